"""PyTorch's operator database: each operator does the same with and without interception, bit for bit.

The kernel engine, for products and for every operator, and function level change nothing. The mode engine changes
what an empty dispatch mode changes, and values only where `ROUNDED` and `WRONG` say so.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import hypothesis
import numpy as np
import pytest
import sampled
import torch
from compiler import COMPILED
from programs import EMPTY, profiled
from torch import Tensor
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves, tree_map_only

from opintercept import OpCall, hooks, intercept

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def _load() -> list[Any]:
    """Import the database, and undo what importing torch's test helpers changes in the process."""
    settings = hypothesis.settings.get_current_profile_name()
    script_types = torch._C.ScriptFunction, torch._C.ScriptMethod
    calls = [script_type.__call__ for script_type in script_types]
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        hypothesis.settings.load_profile(settings)  # theirs has 10 examples for each test
        for script_type, call in zip(script_types, calls, strict=True):
            script_type.__call__ = call  # type: ignore[method-assign]
        torch.backends.__allow_nonbracketed_mutation_flag = True
    return list(op_db)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operators that run a matmul or a convolution. They are tested in DTYPES, strided, in place and with out= too.
MULTIPLIES = _names(
    """
    __rmatmul__ addbmm addmm addmm.decomposed addmv addr baddbmm bmm bmm.triton_optimized cdist cholesky
    cholesky_inverse cholesky_solve corrcoef cov dot einsum inner linalg.cholesky linalg.cholesky_ex linalg.cond
    linalg.eig linalg.eigh linalg.eigvalsh linalg.householder_product linalg.inv linalg.inv_ex linalg.lstsq
    linalg.lstsq.grad_oriented linalg.lu linalg.lu_factor linalg.lu_factor_ex linalg.lu_solve linalg.matrix_norm
    linalg.matrix_power linalg.multi_dot linalg.norm linalg.norm.subgradients_at_zero linalg.pinv
    linalg.pinv.hermitian linalg.pinv.singular linalg.qr linalg.solve linalg.solve_ex linalg.solve_triangular
    linalg.svd linalg.svdvals linalg.tensorinv linalg.tensorsolve linalg.vecdot lu lu_solve matmul matrix_exp mm mv
    nn.functional.bilinear nn.functional.linear nn.functional.linear_cross_entropy
    nn.functional.linear_cross_entropy.chunked nn.functional.linear_cross_entropy.chunked_none
    nn.functional.multi_head_attention_forward nn.functional.scaled_dot_product_attention norm.nuc ormqr pca_lowrank
    pinverse qr sparse.mm.reduce sparse.sampled_addmm svd svd_lowrank tensordot triangular_solve vdot
    """
)
if TORCH >= (2, 15):
    # Its samples of cdist are too small for a product, and these operators are new to the database.
    MULTIPLIES -= _names("cdist")
    MULTIPLIES |= _names("linalg.matrix_sqrth linalg.polar torch.ops.aten._scaled_dot_product_flash_attention_for_cpu")
CONVOLVES = _names(
    """
    nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d
    nn.functional.conv_transpose2d nn.functional.conv_transpose3d
    """
)
DTYPES = (torch.float64, torch.bfloat16, torch.complex64)
SAMPLES, FEWER = 8, 4  # the most of the first runs of an operator of these lists in float32, and of all others

# These return uninitialised memory, of which only the form can be compared.
UNWRITTEN = _names("empty empty_like empty_permuted empty_strided new_empty new_empty_strided")

# torch gives the warnings of a call when its binding returns to Python. A kernel in Python calls other bindings, whose
# warnings come first. Before 2.15 all warnings of a call are alike.
REORDERED = _names("sparse.sampled_addmm") if TORCH >= (2, 15) else frozenset()

# Operators whose values differ under any dispatch mode, even an empty one, and why. Under a mode ATen takes the
# branches that it has for tensor subclasses (#81448).
ROUNDED = {
    **dict.fromkeys(_names("masked.prod masked_fill prod"), "gradients are summed in another order"),
    **dict.fromkeys(
        _names("max.reduction_no_dim median min.reduction_no_dim nanmedian"),
        "zero gradients get the sign of the others",
    ),
    **dict.fromkeys(
        _names("linalg.cond linalg.matrix_norm linalg.norm norm.nuc"), "LAPACK computes the singular vectors too"
    ),
    "matmul": "a batch of one is multiplied by mm instead of bmm",
}
# Under a mode ATen also loses conjugates of complex numbers (#198118).
WRONG = _names("linalg.lstsq linalg.lstsq.grad_oriented linalg.pinv linalg.pinv.singular pinverse")
if TORCH >= (2, 15):
    WRONG |= _names("linalg.matrix_sqrth linalg.polar")


@dataclass(frozen=True, eq=False)
class Case:
    """An operator of the database, in one dtype."""

    op: Any
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.op.full_name)

    @property
    def ops(self) -> tuple[str, ...]:
        """The families to watch."""
        return ("matmul", "convolution") if self.name in CONVOLVES else ("matmul",)

    def __str__(self) -> str:
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}"


ALL_CASES = [
    Case(op, dtype)
    for op in _load()
    for dtype in (torch.float32, *(DTYPES if op.full_name in MULTIPLIES | CONVOLVES else ()))
    if op.supports_dtype(dtype, "cpu")
]
# What multiplies or convolves is always there in float32, and the parts of other dtypes have some of each.
CASES = [
    case
    for case in ALL_CASES
    if sampled.picks(str(case), of=24) or (case.dtype is torch.float32 and case.name in MULTIPLIES | CONVOLVES)
]


@dataclass(frozen=True)
class Run:
    """One call of an operator.

    Attributes:
        inputs: All tensors among its arguments.
        finish: Makes what is differentiated out of the output.
        written: Whether all memory of the output is initialised.
    """

    name: str
    call: Callable[[], Any]
    inputs: list[Tensor]
    finish: Callable[[Any], Any]
    written: bool


def _runs(case: Case) -> Iterator[Run]:
    """The runs of a case, the same each time, with new tensors."""
    op = case.op

    def run(name: str, function: Callable[..., Any], sample: Any, **options: Any) -> Run:
        leaves = tree_leaves((sample.input, sample.args, sample.kwargs, options))
        return Run(
            name,
            partial(function, sample.input, *sample.args, **sample.kwargs, **options),
            [leaf for leaf in leaves if isinstance(leaf, Tensor)],
            sample.output_process_fn_grad,
            case.name not in UNWRITTEN,
        )

    multiplies = case.name in MULTIPLIES | CONVOLVES
    for name, sample in _samples(case, SAMPLES if multiplies and case.dtype is torch.float32 else FEWER):
        yield run(name, op, sample)
    if case.dtype is torch.float32 and op.error_inputs_func is not None:
        _seed()
        for number, error in enumerate(op.error_inputs_func(op, "cpu")):
            # Some inputs are made with torch.empty, as the operator refuses them before it reads them.
            yield replace(run(f"error {number}", op, error.sample_input), written=False)
    if not multiplies:
        return
    if op.inplace_variant is not None:
        for name, sample in _samples(case):
            yield run(f"{name} in place", lambda x, *a, **k: op.inplace_variant(x.clone(), *a, **k), sample)
    if case.name.startswith("sparse."):
        return  # these support neither strided operands nor out=
    for name, sample in _samples(case):
        yield run(f"{name} strided", op, sample.noncontiguous())
    if op.supports_out:
        for name, sample in _samples(case, gradients=False):
            output = op(sample.input, *sample.args, **sample.kwargs)
            yield run(f"{name} out=", op, sample, out=tree_map_only(Tensor, torch.zeros_like, output))


def _samples(case: Case, most: int = FEWER, *, gradients: bool = True) -> Iterator[tuple[str, Any]]:
    """Some of the operator's samples, evenly spread."""
    op = case.op
    _seed()
    # Not with op.sample_inputs, which formats the Python stack: 5 ms for each sample.
    wanted = ("cpu", case.dtype, gradients and case.dtype in op.supported_backward_dtypes("cpu"))
    samples = list(op.sample_inputs_func(op, *wanted))
    if case.dtype.is_complex and op.test_conjugated_samples:
        samples += op.conjugate_sample_inputs(*wanted, set_seed=False)
    if case.name.startswith("linalg.lstsq"):  # gelsy reads uninitialised memory (#187411)
        samples = [sample for sample in samples if sample.kwargs["driver"] != "gelsy"]
    last = len(samples) - 1
    for number in range(last + 1) if last < most else (i * last // (most - 1) for i in range(most)):
        yield f"sample {number}", samples[number]


def _seed() -> None:
    torch.default_generator.manual_seed(17)
    random.seed(17)
    np.random.seed(17)


@dataclass(frozen=True)
class Bits:
    """The values of a tensor as they are in memory."""

    bits: bytes
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return torch.frombuffer(bytearray(self.bits), dtype=self.dtype)


Found = dict[str, Any]  # what interception must not change in a run


def _observe(
    case: Case,
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
    around: AbstractContextManager[Any] | None = None,
) -> dict[str, Found]:
    """Run a case: each run under `watch`, and all of them within `around`."""
    warn_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else some warn only once in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs = {run.name: run for run in _runs(case)}
            with profiled() as profiler, around or nullcontext():
                found = {name: _observe_one(run, watch) for name, run in runs.items()}
    finally:
        torch.set_warn_always(warn_always)
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    for run, root in zip(found.values(), [root for root in roots if root.name == "run"], strict=True):
        run["operators"] = _operators(root, 0, [])
        if case.name in REORDERED:
            run["warnings"].sort(key=str)
    return found


def _observe_one(run: Run, watch: Callable[[], AbstractContextManager[Any]]) -> Found:
    output = exception = None
    torch.default_generator.manual_seed(18)  # torch.manual_seed formats the Python stack for CUDA
    with warnings.catch_warnings(record=True) as warned, record_function("run"):
        warnings.simplefilter("always")
        try:
            with watch():
                output = run.call()
                results = [x for x in tree_leaves(run.finish(output)) if isinstance(x, Tensor) and x.requires_grad]
                if results:
                    torch.autograd.backward(results, [_gradient(result) for result in results])
        except Exception as error:
            exception = type(error), str(error)
    found: Found = {
        "exception": exception,
        "warnings": [(warning.category, str(warning.message)) for warning in warned],
        "random state": bytes(torch.get_rng_state().numpy()),
    }
    for number, value in enumerate(tree_leaves(output)):
        found.update(_describe(f"output {number}", value, run))
    for number, value in enumerate(run.inputs):
        found.update(_describe(f"input {number}", value, run))
        if value.is_leaf:
            found.update(_describe(f"gradient {number}", value.grad, run))
    return found


def _gradient(result: Tensor) -> Tensor:
    return torch.randn_like(result) if result.layout is torch.strided else torch.ones_like(result)


is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]


def _describe(what: str, value: Any, run: Run) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Tensor):
        yield what, repr(value)
        return
    yield f"{what} type", (type(value), value.dtype, value.layout, value.shape)
    yield f"{what} flags", (value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg())
    yield f"{what} node", type(value.grad_fn)
    yield f"{what} version", value._version
    for part in _parts(value):
        yield f"{what} strides", (part.stride(), part.storage_offset())
        yield f"{what} aliases", [is_alias_of(part, other) for x in run.inputs for other in _parts(x)]
        if run.written and not part.is_meta:
            yield f"{what} values", _bits(part)
        what += " next"


def _parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that a tensor is made of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor]


def _bits(tensor: Tensor) -> Bits:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return Bits(flat.view(torch.uint8).numpy().tobytes(), tensor.dtype)


def _operators(event: Any, depth: int, found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The names of the events below a profiler's event, each with its depth, in the order of their start."""
    for child in event.children:
        found.append((depth, f"{child.name}.{child.overload_name}".rstrip(".")))
        _operators(child, depth + 1, found)
    return found


class _Count:
    """Lists the calls that it sees, including those that raise."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def pre(self, call: OpCall) -> None:
        self.seen.append(call.op)

    def post(self, call: OpCall) -> None:
        pass


def _names_of(hook: Any) -> list[str]:
    return hook.seen if isinstance(hook, _Count) else [record.op for record in hook.records]


def _differences(one: dict[str, Found], other: dict[str, Found]) -> list[tuple[str, str, Any, Any]]:
    """What differs: run, field, and the two values."""
    assert list(one) == list(other)
    return [
        (run, what, one[run].get(what), other[run].get(what))
        for run in one
        for what in {**one[run], **other[run]}
        if one[run].get(what) != other[run].get(what)
    ]


def _fail_on(differences: list[tuple[str, str, Any, Any]]) -> None:
    if differences:
        pytest.fail("\n".join(f"{run}: {what} {_told(was, now)}" for run, what, was, now in differences[:20]))


def _told(was: Any, now: Any) -> str:
    if isinstance(was, Bits) and isinstance(now, Bits):
        difference, largest = _distance(was, now)
        return f"differ by up to {difference:.2g}, and are up to {largest:.2g}"
    return f"was {str(was)[:300]}, is {str(now)[:300]}"


def _distance(one: Bits, other: Bits) -> tuple[float, float]:
    """The largest difference, and the largest value; 0 where only the sign of a zero differs."""
    was, now = (bits.tensor().to(torch.complex128) for bits in (one, other))
    return float((was - now).abs().max()), float(was.abs().max())


def _rounded(case: Case, one: Bits, other: Bits) -> bool:
    difference, largest = _distance(one, other)
    return difference <= 100 * torch.finfo(case.dtype).eps * largest


def _outermost(operators: list[tuple[int, str]], watched: set[str]) -> Iterator[str]:
    inside: float = float("inf")
    for depth, name in operators:
        if depth > inside:
            continue
        inside = float("inf")
        if name in watched:
            inside = depth
            yield name.partition(".")[0]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def bare(case: Case) -> dict[str, Found]:
    """What a case does without interception. The module scope makes the tests of a case run one after another."""
    return _observe(case)


def test_kernel_engine_changes_nothing(case: Case, bare: dict[str, Found]) -> None:
    count = _Count()
    interceptor = intercept(count, ops=case.ops)
    found = _observe(case, around=interceptor)  # not around each run: kernels take 2 ms to install and remove
    _fail_on(_differences(bare, found))
    watched = set(interceptor.watcher.keys or ())
    expected = [name for run in found.values() for name in _outermost(run["operators"], watched)]
    assert count.seen == expected
    if case.dtype is torch.float32:
        assert bool(expected) == (case.name in MULTIPLIES | CONVOLVES), "MULTIPLIES must list what multiplies"


# A hook that has to see each call, and some whose calls compiled kernels note.
HOOKS: dict[str, Callable[[], list[Any]]] = {
    "seen": lambda: [_Count()],
    "noted": lambda: [hooks.Recorder(), hooks.Stats(), hooks.NonFinite(action="record")],
}


# Torch conjugates and negates, prepares autograd for an operator in Python, and copies what the gradient of
# `clamp_min_` needs, before it calls the operator's kernel. The profiler shows this inside of the operator.
PREPARED = ("aten::_conj", "aten::_neg_view", "torch_nn::", "aten::clamp_min_")
PREPARING = ("aten::clone", "aten::copy_", "aten::detach")


@pytest.mark.parametrize("made", HOOKS)
@pytest.mark.parametrize("engine", [pytest.param({"engine": "kernel"}, id="kernel"), COMPILED])
def test_watching_every_operator_changes_nothing(
    case: Case, bare: dict[str, Found], engine: dict[str, Any], made: str
) -> None:
    if not sampled.picks(f"{case} {made} {'compiled' in engine.values()}", of=10):
        pytest.skip("sampled")
    first, *others = HOOKS[made]()
    interceptor = intercept([first, *others], ops="all", **engine)
    seen: list[list[str]] = []

    @contextmanager
    def listing() -> Iterator[None]:  # what is between the runs is seen too
        before = len(_names_of(first))
        try:
            yield
        finally:
            seen.append(_names_of(first)[before:])

    found = _observe(case, listing, interceptor)
    # Hooks run some operators, and torch tells again of what it tells of when they read a sparse tensor or halves.
    by_hooks = ("operators", "warnings") if case.name.startswith(("sparse.", "chalf")) else ("operators",)
    _fail_on([d for d in _differences(bare, found) if not (others and d[1] in by_hooks)])
    watched = set(interceptor.watcher.keys or ())
    for run, names in zip(bare.values(), seen, strict=True):
        expected = list(_outermost(run["operators"], watched))
        if case.dtype.is_complex or any(name.startswith(PREPARED) for name in expected):
            names, expected = ([name for name in each if name not in PREPARING] for each in (names, expected))
        assert names == expected or (others and run["exception"])  # that call has no `post`


# With `--sampled` a case runs at function level or under the mode engine.
AT_FUNCTIONS = {str(case) for case in CASES if sampled.picks(f"{case} function", of=2)}
UNDER_A_MODE = {str(case) for case in CASES if not sampled.on or str(case) not in AT_FUNCTIONS}


def test_function_level_changes_nothing(case: Case, bare: dict[str, Found]) -> None:
    if str(case) not in AT_FUNCTIONS:
        pytest.skip("sampled")
    interceptor = intercept(_Count(), ops=case.ops, level="function")
    _fail_on(_differences(bare, _observe(case, lambda: interceptor)))


def test_mode_engine_changes_what_an_empty_mode_changes(case: Case, bare: dict[str, Found]) -> None:
    if str(case) not in UNDER_A_MODE:
        pytest.skip("sampled")
    interceptor = intercept(_Count(), ops=case.ops, engine="mode")
    found = _observe(case, lambda: interceptor)
    _fail_on(_differences(_observe(case, EMPTY["mode"]), found))
    # Under any dispatch mode autograd accumulates gradients out of place, and views come from other operators.
    differences = [d for d in _differences(bare, found) if not d[1].endswith(("operators", "version", "node"))]
    if case.dtype.is_complex and case.name in WRONG:
        assert differences, "torch has fixed it; remove it from WRONG"
        differences = [d for d in differences if not d[1].endswith("values")]
    elif case.name in ROUNDED:
        # On some processors another order of the same sums rounds to the same bits, so a difference is not required.
        differences = [d for d in differences if not (d[1].endswith("values") and _rounded(case, d[2], d[3]))]
    _fail_on(differences)
