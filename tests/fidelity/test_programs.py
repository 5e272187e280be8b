"""The main promise, for each program in each context: interception sees every matmul and changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import sampled
import torch
from compiler import COMPILED
from programs import EMPTY, ENGINES, PROGRAMS, Program, assert_same, execute, outermost, profiled

from opintercept import OpInterceptWarning, intercept

pytestmark = pytest.mark.slow

CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], bool]] = {
    "grad": (nullcontext, True),
    "no_grad": (torch.no_grad, False),
    "inference_mode": (torch.inference_mode, False),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), True),
}

# What any mode of torch changes, even an empty one: (engine, program, context), and why.
KNOWN: dict[tuple[str, str, str], str] = {
    # The handler runs below autocast, so what a fused operator calls inside is no longer cast.
    **{
        ("mode", program, "autocast"): "autocast stops at the handler"
        for program in ("bilinear", "pinv", "scaled_mm", "foreach_mm", "sparse_mm", "sparse_addmm")
    },
    **{("mode", "pinv_complex", context): "a conjugate is dropped (#198118)" for context in CONTEXTS},
    **{
        ("mode", program, "inference_mode"): "ATen takes another branch for composites that arrive whole"
        for program in ("mha_train", "encoder_layer_train")
    },
    **{
        ("function", program, context): "the fused path is off (#106302)"
        for program in ("mha_eval", "encoder_layer_eval")
        for context in CONTEXTS
    },
}


def _by_name(program: Program) -> str:
    return program.name


def _compare(
    program: Program,
    run_in: Callable[[], AbstractContextManager[Any]],
    gradients: bool,
    wrap: Any = lambda function: function,
    function: Any = None,
    engine: dict[str, Any] | None = None,
    whole: bool = True,
) -> None:
    """Compare the calls with those in the profile, and the outcome with that of a run without interception."""
    seen: list[str] = []
    interceptor = intercept(lambda call: seen.append(call.op), **(engine or {}))
    watched = frozenset(interceptor.watcher.keys or ())
    events: list[Any] = []

    @contextmanager
    def both() -> Iterator[None]:
        with profiled() as profiler, interceptor:
            yield
        events.extend(profiler.events())

    plain = execute(program, run_in, gradients=gradients, wrap=wrap, function=function)
    intercepted = execute(program, run_in, gradients=gradients, wrap=wrap, watch=both, function=function)
    assert_same(plain, intercepted)
    failed = intercepted.exception is not None
    expected = outermost(events, watched)
    if failed and len(expected) == len(seen) + 1:
        expected.pop()  # the call that raised has no `post`
    assert whole is False or seen == expected
    assert seen or failed


@pytest.mark.parametrize("engine", [pytest.param({}, id="kernel"), COMPILED])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("program", PROGRAMS, ids=_by_name)
def test_kernel_engine_sees_what_the_profiler_sees_and_changes_nothing(
    program: Program, context: str, engine: dict[str, Any]
) -> None:
    run_in, gradients = CONTEXTS[context]
    _compare(program, run_in, gradients, engine=engine)


# Torch makes copies for these before it calls a kernel, and the profiler shows that inside of the operator.
PREPARED = ("conjugated", "negated", "pinv_complex", "vdot_complex", "mm_complex64")


@pytest.mark.parametrize("engine", [pytest.param({"engine": "kernel"}, id="kernel"), COMPILED])
@pytest.mark.parametrize("context", [*CONTEXTS, "aot_eager"])
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.name != "mkldnn_linear"], ids=_by_name)
def test_kernel_engine_sees_every_operator_and_changes_nothing(
    program: Program, context: str, engine: dict[str, Any]
) -> None:
    if not sampled.picks(f"{program.name} {context} {'compiled' in engine.values()}", of=16):
        pytest.skip("sampled")
    whole = context != "autocast" and program.name not in PREPARED
    if context == "aot_eager":
        _compare_compiled(program, context, {"ops": "all", **engine}, whole)
    else:
        _compare(program, *CONTEXTS[context], engine={"ops": "all", **engine}, whole=whole)


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.scriptable], ids=_by_name)
def test_kernel_engine_inside_a_script(program: Program) -> None:
    for _ in range(2):  # TorchScript optimises a function after its first runs
        execute(program, nullcontext, gradients=True, wrap=torch.jit.script)
    _compare(program, nullcontext, True, torch.jit.script)


def _compare_compiled(program: Program, backend: str, engine: dict[str, Any] | None = None, whole: bool = True) -> None:
    torch._dynamo.reset()
    torch.manual_seed(17)
    compiled = torch.compile(program.make(), backend=backend)
    for _ in range(2):  # compiles the backward pass too
        execute(program, nullcontext, gradients=True, function=compiled)
    _compare(program, nullcontext, True, function=compiled, engine=engine, whole=whole)


# torch does not compile mkldnn tensors, and its message lists every registered kernel, including ours.
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.name != "mkldnn_linear"], ids=_by_name)
def test_kernel_engine_under_compile(program: Program) -> None:
    if not sampled.picks(program.name, of=4):
        pytest.skip("sampled")
    _compare_compiled(program, "aot_eager")


@pytest.mark.parametrize("engine", [None, {"ops": "all", "engine": "kernel"}], ids=["products", "all"])
@pytest.mark.parametrize("name", ["mm", "matmul_broadcast", "linear_bias_3d", "attention", "attention_math", "gru"])
def test_kernel_engine_under_inductor(name: str, engine: dict[str, Any] | None) -> None:
    (program,) = (program for program in PROGRAMS if program.name == name)
    # Inductor's thread pool would outlive the test, and keep our kernels installed during later tests.
    with torch._inductor.config.patch(compile_threads=1):
        _compare_compiled(program, "inductor", engine, whole=engine is None)


torch.library.define("opintercept_tests::body", "(Tensor[] inputs, int program) -> Tensor")


@torch.library.impl("opintercept_tests::body", "CompositeExplicitAutograd")
def _body(inputs: list[torch.Tensor], program: int) -> torch.Tensor:
    return PROGRAMS[program].make()(*inputs)


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=[p.name for p in PROGRAMS])
def test_kernel_engine_inside_a_custom_operator(number: int) -> None:
    def wrap(function: Any) -> Any:
        return lambda *inputs: torch.ops.opintercept_tests.body(list(inputs), number)

    # A module makes its weights in the body, so its own gradients do not come out.
    _compare(PROGRAMS[number], torch.no_grad, False, wrap)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("engine", ["mode", "function"])
@pytest.mark.parametrize("program", PROGRAMS, ids=_by_name)
def test_other_engines_change_what_an_empty_mode_of_torch_changes(program: Program, engine: str, context: str) -> None:
    run_in, gradients = CONTEXTS[context]
    plain = execute(program, run_in, gradients=gradients)
    empty = execute(program, run_in, gradients=gradients, watch=EMPTY[engine])
    seen: list[str] = []
    interceptor = intercept(lambda call: seen.append(call.op), **ENGINES[engine])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "function level turns off the fused path", OpInterceptWarning)
        intercepted = execute(program, run_in, gradients=gradients, watch=lambda: interceptor)
    assert_same(empty, intercepted)
    if (engine, program.name, context) not in KNOWN:
        assert_same(plain, intercepted)
    if engine == "function":
        failed = intercepted.exception is not None  # as some do under autocast
        assert seen or failed
        assert gradients or not failed
