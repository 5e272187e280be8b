"""`Gradients`: keeps, shows or replaces the gradients of each call's operands and output."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from re import Pattern
from typing import Any, ClassVar

import torch

from opintercept._core.call import OpCall
from opintercept._core.errors import HookError
from opintercept._core.tables import Cells, Table
from opintercept._core.tensors import tensors_of
from opintercept._core.text import counted
from opintercept._kit.copyable import Copyable
from opintercept._kit.filter import name_test
from opintercept._values.read import warn_of_memory

Function = Callable[[OpCall, dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | None]


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient of one call.

    Attributes:
        module: Qualified name of the forward call's module.
        op: The forward call's operator; at dispatch level, the operator of the backward call that computed the
            gradient.
        forward: The forward call's index.
        operand: `"lhs"`, `"rhs"`, `"bias"` or `"output"`.
        value: The gradient, which has the operand's shape.
    """

    module: str | None
    op: str
    forward: int | None
    operand: str
    value: torch.Tensor


class Gradients(Copyable, Table):
    """Passes the gradients of each call's operands and output to a function, or keeps them.

    At function level each call gets two identity nodes in the autograd graph, as a module does from
    `nn.Module.register_full_backward_hook`. The gradients are those of this call alone, even if a tensor is also used
    elsewhere, and the gradients of operands may be replaced. In-place forms are left out, and code that compares an
    operand with `is` finds a view of it.

    At dispatch level autograd is unchanged. Gradients reads the matmuls of the backward pass that belong to a forward
    call, as they run: each has the gradient of one operand, and of the output. No gradient can be replaced there, and
    a bias has none, since its gradient is a sum and not a matmul.

    `str(gradients)` is a table of what is kept, with the norm and the largest magnitude of each gradient. A data frame
    has these, too, and the `shape`, but not the values: they are in `entries`, in the same order.

    Args:
        function: Is called as `function(call, gradients)`, where `gradients` has some of the keys `"lhs"`, `"rhs"`,
            `"bias"` and `"output"`. At function level `call` is the forward call, with shapes and no values, and the
            function may return a dict of gradients for operands that replace the original ones. At dispatch level
            `call` is the backward call. Without a function, `entries` keeps copies of the gradients, except those that
            the device has no memory to copy, of which it warns once.

    Raises:
        TypeError: `function` is not callable.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> x, w = torch.ones(1, 2), torch.ones(2, 3, requires_grad=True)
        >>> gradients = hooks.Gradients()
        >>> with intercept(gradients, level="function"):
        ...     (x @ w).sum().backward()
        >>> [(entry.operand, entry.value.tolist()) for entry in gradients.entries]
        [('rhs', [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]), ('output', [[1.0, 1.0, 1.0]])]
    """

    reads = ("module", "forward", "gradients")
    levels = ("function", "dispatch")
    fresh: ClassVar = {"_last": threading.local}
    _row = Gradient

    def __init__(self, function: Function | None = None) -> None:
        if function is not None and not callable(function):
            raise TypeError(f"function must be callable as function(call, gradients), got {function!r}")
        self.entries: list[Gradient] = []
        self._function = function
        self._scales: dict[int, Any] = {}  # alpha by call index, which autograd applies after the product
        self._last = threading.local()

    def __getitem__(self, module: str | Pattern[str] | Callable[[str], bool]) -> list[Gradient]:
        """The gradients kept from modules that a glob, a pattern or a predicate matches, in order."""
        test = name_test(module)
        return [entry for entry in self.entries if entry.module is not None and test(entry.module)]

    def _held(self) -> str:
        if self._function is None:
            return counted(len(self.entries), "gradient")
        return str(getattr(self._function, "__qualname__", type(self._function).__name__))

    def rows(self) -> Sequence[Gradient]:
        """What is kept, as `entries`."""
        return self.entries

    def _columns(self) -> Mapping[str, Any]:
        columns = dict(super()._columns())
        values = [value.to_dense().abs().double() for value in columns.pop("value")]
        return columns | {
            "shape": [list(value.shape) for value in values],
            "norm": [value.norm().item() for value in values],
            "absmax": [value.max().item() if value.numel() else 0.0 for value in values],
        }

    def _cells(self) -> Cells:
        columns = self._columns()
        rows = zip(*columns.values(), strict=True)
        texts = [[f"{each:.3g}" if isinstance(each, float) else str(each) for each in row] for row in rows]
        return Cells([*columns], texts, left=5)

    def clear(self) -> None:
        """Forget all gradients."""
        self.entries.clear()

    def backward(
        self, call: OpCall, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Take the gradients of a call at function level."""
        tensors = tensors_of(call.args, call.kwargs)
        places = {
            role: place
            for role in ("lhs", "rhs", "bias")
            for place, tensor in enumerate(tensors)
            if tensor is getattr(call, role)
        }
        found = {role: grad_inputs[place] for role, place in places.items()} | {"output": grad_outputs[0]}
        replaced = self._take(call, call.index, {role: grad for role, grad in found.items() if grad is not None})
        if not replaced:
            return None
        unknown = [role for role in replaced if role not in places]
        if unknown:
            raise HookError(f"only the gradients of {', '.join(places)} can be replaced here, got {', '.join(unknown)}")
        gradients = list(grad_inputs)
        for role, gradient in replaced.items():
            gradients[places[role]] = gradient
        return tuple(gradients)

    def post(self, call: OpCall) -> None:
        """Take the gradients of a backward call at dispatch level."""
        if call.phase != "backward":
            alpha = call.kwargs.get("alpha", 1)
            if alpha != 1:
                self._scales[call.index] = alpha
            elif self._scales:
                self._scales.pop(call.index, None)  # left by another interceptor, whose indexes are the same
            return
        forward, of = call.forward, call.grad_of
        gradient, output = call.gradient, call.grad_output
        if forward is None or of is None or gradient is None or output is None:
            return
        if forward in self._scales:
            try:
                gradient = gradient * self._scales[forward]
            except torch.OutOfMemoryError:
                self._leave_out()
                return
        found = {of: gradient, "output": output}
        last_forward, last_of = getattr(self._last, "seen", (None, None))
        if self._function is None and last_forward == forward and last_of != of:
            del found["output"]  # it was kept with the other operand's gradient
        replaced = self._take(call, forward, found)
        self._last.seen = forward, of  # at the end, since an interrupt may come before anything is kept
        if replaced:
            raise HookError("gradients can be replaced at function level only; at dispatch level return None")

    def _take(self, call: OpCall, forward: int, found: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        if self._function is not None:
            return self._function(call, found)
        module = call.module
        # Keep copies: autograd uses the tensor itself as `.grad` of a parameter and adds the next gradient to it.
        try:
            self.entries += [
                Gradient(module, call.op, forward, role, grad.detach().clone()) for role, grad in found.items()
            ]
        except torch.OutOfMemoryError:
            self._leave_out()
        return None

    def _leave_out(self) -> None:
        warn_of_memory(self, "gradients", "choose calls with hooks.when(...)")
