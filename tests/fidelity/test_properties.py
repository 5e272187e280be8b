"""The promises for random programs: interception changes nothing and sees everything, and replacements take effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import sampled
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from programs import EMPTY, ENGINES, outermost_of_one_thread
from random_programs import RandomProgram, Run, Step, execute, random_programs
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from opintercept import Interceptor, OpCall, hooks, intercept

pytestmark = pytest.mark.slow


def _examples(count: int) -> settings:
    return settings(max_examples=sampled.fewer(count, 40), derandomize=True, deadline=None, database=None)


class Curious:
    """Reads everything, computes with it, multiplies matrices and draws random numbers, without an effect outside."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    @torch.no_grad()  # else autograd would number nodes for it at function level
    def pre(self, call: OpCall) -> None:
        for operand in (call.lhs, call.rhs, call.bias):
            if operand is not None and operand.numel():
                (operand.to(torch.complex64) * 2).sum()

    @torch.no_grad()
    def post(self, call: OpCall) -> None:
        str(call), call.record().as_dict(), call.aliases
        for output in call.output if isinstance(call.output, (tuple, list)) else (call.output,):
            flat = output.to(torch.complex64).reshape(1, -1)
            (flat @ flat.mT).tolist()
        torch.rand(3, generator=self.generator)

    def error(self, call: OpCall, exception: BaseException) -> None:
        str(call), str(exception)


LOOKING: dict[str, Callable[[], list[Any]]] = {
    "nothing": lambda: [lambda call: None],
    "curious": lambda: [Curious()],
    "recorder": lambda: [hooks.Recorder()],
    "several": lambda: [hooks.Profile(), hooks.when(Curious(), every_calls=2), hooks.Recorder()],
}


@contextmanager
def _each(interceptors: list[Interceptor]) -> Iterator[None]:
    with ExitStack() as stack:
        for interceptor in interceptors:
            stack.enter_context(interceptor)
        yield


@_examples(500)
@given(random_programs(), st.sampled_from(sorted(LOOKING)), st.booleans())
def test_kernel_engine_changes_nothing_and_sees_what_the_profiler_sees(
    program: RandomProgram, looking: str, nested: bool
) -> None:
    seen: list[str | None] = []

    class Sees:
        def pre(self, call: OpCall) -> None:
            seen.append(call.op)

    found = [Sees(), *LOOKING[looking]()]
    interceptors = [intercept(hook) for hook in found] if nested else [intercept(found)]
    watched = {name.partition(".")[0] for name in interceptors[0].watcher.keys or ()}
    profiles: list[Any] = []

    @contextmanager
    def both() -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU]) as profiler, _each(interceptors):
            yield
        profiles.append(profiler)

    def failed(by_autograd: bool) -> None:
        if by_autograd:
            seen.append(None)

    assert execute(program, both, failed=failed) == execute(program)
    # Autograd refuses some calls before they run; the profiler shows these too.
    pattern = "".join(r"(\S+ )?" if op is None else re.escape(op) + " " for op in seen)
    assert re.fullmatch(pattern, "".join(op + " " for op in outermost_of_one_thread(profiles[0], watched)))


@pytest.mark.parametrize("engine", ["mode", "function"])
@_examples(250)
@given(program=random_programs(), looking=st.sampled_from(sorted(LOOKING)))
def test_other_engines_change_what_an_empty_mode_of_torch_changes(
    engine: str, program: RandomProgram, looking: str
) -> None:
    interceptor = intercept(LOOKING[looking](), **ENGINES[engine])
    assert execute(program, lambda: interceptor) == execute(program, EMPTY[engine])


@dataclass(frozen=True)
class Edit:
    """How a hook replaces inputs and outputs; exact for whole numbers.

    Attributes:
        pre: Whether it scales the operands.
        post: How it changes the output: linearly, otherwise, or to a constant, which has no gradient.
        phases: The passes in which it does so.
    """

    pre: bool
    post: str | None
    phases: tuple[str, ...]

    def operands(self, phase: str, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs * 2, -rhs) if self.pre and phase in self.phases else (lhs, rhs)

    def output(self, phase: str, output: Any) -> Any:
        if phase not in self.phases or self.post is None:
            return None
        if self.post == "affine":
            return output * 2 + 1
        return output.abs() if self.post == "abs" else torch.full_like(output, 3)

    def product(self, function: Callable[..., Any], phase: str, *operands: Any, **options: Any) -> Any:
        """Call `function` as the hook changes it."""
        *bias, lhs, rhs = operands
        output = function(*bias, *self.operands(phase, lhs, rhs), **options)
        replacement = self.output(phase, output)
        return output if replacement is None else replacement


class Edits:
    """The hook that applies an edit."""

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def pre(self, call: OpCall) -> Any:
        if not self.edit.pre:
            return None
        *bias, lhs, rhs = call.args
        return (*bias, *self.edit.operands(call.phase, lhs, rhs)), call.kwargs

    def post(self, call: OpCall) -> Any:
        return self.edit.output(call.phase, call.output)


class StraightThrough(torch.autograd.Function):
    """An edited product. Its backward pass is that of the operator, with its products edited too."""

    @staticmethod
    def forward(ctx: Any, edit: Edit, op: str, beta: float, alpha: float, *operands: Tensor) -> Any:
        *biases, lhs, rhs = operands
        *_, into_lhs, into_rhs = ctx.needs_input_grad  # each operand is saved for the gradient of the other
        ctx.save_for_backward(lhs if into_rhs else None, rhs if into_lhs else None)
        ctx.known = edit, op, beta, alpha, [bias.shape for bias in biases], lhs.shape
        options = {"beta": beta, "alpha": alpha} if biases else {}
        return edit.product(getattr(torch, op), "forward", *operands, **options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        lhs, rhs = ctx.saved_tensors
        edit, op, beta, alpha, biases, shape = ctx.known
        into: list[Any] = [(grad * beta).sum_to_size(bias) for bias in biases]
        if op == "addbmm":
            grad = grad.expand(shape[0], *grad.shape)
        function = {"mv": torch.mv, "addmv": torch.mv, "mm": torch.mm, "addmm": torch.mm}.get(op, torch.bmm)
        into_lhs = into_rhs = None
        if rhs is not None:
            if op == "dot":
                into_lhs = grad * rhs
            elif function is torch.mv:
                into_lhs = torch.outer(grad, rhs) * alpha
            else:
                into_lhs = edit.product(function, "backward", grad, rhs.mT) * alpha
        if lhs is not None:
            into_rhs = grad * lhs if op == "dot" else edit.product(function, "backward", lhs.mT, grad) * alpha
        return None, None, None, None, *into, into_lhs, into_rhs


straight_through: Callable[..., Any] = StraightThrough.apply
_PLAIN = ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addbmm", "addmv")
_IN_PLACE = ("addmm_", "baddbmm_", "addbmm_", "addmv_")
_WHOLE: dict[str, Any] = {"dtypes": st.just(torch.float64), "whole": True, "failures": False, "most": 3}
# No layout in which elements share memory: an in-place form could not hold all new values there.
_WHOLE |= {"layouts": ("contiguous", "transposed", "sliced", "neg")}
_WHOLE |= {"contexts": ("grad", "grad", "no_grad", "inference_mode")}


def _edits(*phases: tuple[str, ...]) -> st.SearchStrategy[Edit]:
    posts = st.sampled_from(("affine", "abs", "constant", None))
    return st.builds(Edit, st.booleans(), posts, st.sampled_from(phases))


def _exact(run: Run) -> bool:
    """Whether float64 holds all values exactly, so that the order of summation does not matter."""
    return all(abs(x.detach()).max() < 2**45 for x in run.live if x.numel())


@pytest.mark.parametrize("engine", ["kernel", "mode"])
@_examples(150)
@given(
    program=random_programs(ops=_PLAIN + _IN_PLACE, backwards=("once", "none", "twice"), **_WHOLE),
    edit=_edits(("forward",), ("backward",), ("forward", "backward")),
)
def test_a_replacement_at_dispatch_level_is_a_straight_through_edit(
    engine: str, program: RandomProgram, edit: Edit
) -> None:
    def by_hand(function: Any, step: Step, operands: list[Any], options: dict[str, Any]) -> Any:
        if "out" in options:  # never differentiated
            *bias, lhs, rhs = operands
            out = function(*bias, *edit.operands("forward", lhs, rhs), **options)
            replacement = edit.output("forward", out)
            return out if replacement is None else out.copy_(replacement)
        scales = options.get("beta", 1), options.get("alpha", 1)
        if step.op.endswith("_"):
            return operands[0].copy_(straight_through(edit, step.op[:-1], *scales, *operands))
        return straight_through(edit, step.op, *scales, *operands)

    interceptor = intercept(Edits(edit), **ENGINES[engine])
    edited, oracle = execute(program, lambda: interceptor), execute(program, call=by_hand)
    plain = execute(program, EMPTY.get(engine, nullcontext))
    assume(_exact(oracle))
    _same(edited, oracle, "values", "beside")
    _same(edited, plain, "is", "shares", "like", "version", "bits", "grad", "graph")
    assert edited.steps == plain.steps


@_examples(150)
@given(
    program=random_programs(ops=(*_PLAIN, *_IN_PLACE, "matmul", "inner"), **_WHOLE),
    edit=_edits(("forward",)),
)
def test_a_replacement_at_function_level_is_differentiated(program: RandomProgram, edit: Edit) -> None:
    def by_hand(function: Any, step: Step, operands: list[Any], options: dict[str, Any]) -> Any:
        if "out" not in options and not step.op.endswith("_"):
            return edit.product(function, "forward", *operands, **options)
        *bias, lhs, rhs = operands
        out = function(*bias, *edit.operands("forward", lhs, rhs), **options)
        replacement = edit.output("forward", out)
        return out if replacement is None else out.copy_(replacement)

    interceptor = intercept(Edits(edit), level="function")
    assert execute(program, lambda: interceptor) == execute(program, call=by_hand)


def _same(one: Run, other: Run, *fields: str) -> None:
    assert len(one.tensors) == len(other.tensors)
    for field in fields:
        assert [x.get(field) for x in one.tensors] == [x.get(field) for x in other.tensors], field
