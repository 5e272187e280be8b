"""The main promise, for each program in each context: interception sees every matmul and changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from compiler import COMPILED
from programs import EMPTY, ENGINES, PROGRAMS, Program, assert_same, execute, outermost
from torch.profiler import ProfilerActivity, profile

from opintercept import Interceptor, OpInterceptWarning, intercept

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
) -> None:
    """Compare the calls with those in the profile, and the outcome with that of a run without interception."""
    seen: list[str] = []
    interceptor = intercept(lambda call: seen.append(call.op), **(engine or {}))
    watched = {name.partition(".")[0] for name in interceptor.watcher.keys or ()}
    events: list[Any] = []

    @contextmanager
    def both() -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU]) as profiler, interceptor:
            yield
        events.extend(profiler.events())

    plain = execute(program, run_in, gradients=gradients, wrap=wrap, function=function)
    intercepted = execute(program, run_in, gradients=gradients, wrap=wrap, watch=both, function=function)
    assert_same(plain, intercepted)
    failed = intercepted.exception is not None
    expected = outermost(events, watched)
    if failed and len(expected) == len(seen) + 1:
        expected.pop()  # the call that raised has no `post`
    assert seen == expected
    assert seen or failed


@pytest.mark.parametrize("engine", [pytest.param({}, id="kernel"), COMPILED])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("program", PROGRAMS, ids=_by_name)
def test_kernel_engine_sees_what_the_profiler_sees_and_changes_nothing(
    program: Program, context: str, engine: dict[str, Any]
) -> None:
    run_in, gradients = CONTEXTS[context]
    _compare(program, run_in, gradients, engine=engine)


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.scriptable], ids=_by_name)
def test_kernel_engine_inside_a_script(program: Program) -> None:
    for _ in range(2):  # TorchScript optimises a function after its first runs
        execute(program, nullcontext, gradients=True, wrap=torch.jit.script)
    _compare(program, nullcontext, True, torch.jit.script)


def _compare_compiled(program: Program, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(17)
    compiled = torch.compile(program.make(), backend=backend)
    for _ in range(2):  # compiles the backward pass too
        execute(program, nullcontext, gradients=True, function=compiled)
    _compare(program, nullcontext, True, function=compiled)


# torch does not compile mkldnn tensors, and its message lists every registered kernel, including ours.
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.name != "mkldnn_linear"], ids=_by_name)
def test_kernel_engine_under_compile(program: Program) -> None:
    _compare_compiled(program, "aot_eager")


@pytest.mark.parametrize("name", ["mm", "matmul_broadcast", "linear_bias_3d", "attention", "attention_math", "gru"])
def test_kernel_engine_under_inductor(name: str) -> None:
    (program,) = (program for program in PROGRAMS if program.name == name)
    # Inductor's thread pool would outlive the test, and keep our kernels installed during later tests.
    with torch._inductor.config.patch(compile_threads=1):
        _compare_compiled(program, "inductor")


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
    interceptor = intercept(lambda call: None, **ENGINES[engine])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "function level turns off the fused path", OpInterceptWarning)
        intercepted = execute(program, run_in, gradients=gradients, watch=lambda: interceptor)
    assert_same(empty, intercepted)
    if (engine, program.name, context) not in KNOWN:
        assert_same(plain, intercepted)


@pytest.mark.parametrize("program", PROGRAMS, ids=_by_name)
def test_function_level_sees_every_program(program: Program) -> None:
    seen: list[str] = []
    interceptor: Interceptor = intercept(lambda call: seen.append(call.op), level="function")
    outcome = execute(program, nullcontext, gradients=False, watch=lambda: interceptor)
    assert outcome.exception is None
    assert seen
