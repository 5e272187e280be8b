"""`Gradients`: what autograd computes for each call's operands and output, to keep, look at or replace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from re import Pattern
from typing import Any

import torch

from opintercept._call import OpCall
from opintercept._errors import HookError
from opintercept._tensors import tensors_of
from opintercept.hooks.when import name_test

Function = Callable[[OpCall, dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | None]


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient of one call.

    Attributes:
        module: Qualified name of the forward call's module.
        op: The forward call's operator; at dispatch level that of the backward call that computed it.
        forward: The forward call's index.
        operand: `"lhs"`, `"rhs"`, `"bias"` or `"output"`.
        value: The gradient, of the operand's shape.
    """

    module: str | None
    op: str
    forward: int | None
    operand: str
    value: torch.Tensor


class Gradients:
    """Hands the gradients of each call's operands and output to a function, or keeps them.

    At function level there are two identity nodes around each call, as `nn.Module.register_full_backward_hook` puts
    them around a module: the gradients are those of this call alone, not of a tensor that is also used
    elsewhere, and those of operands may be replaced. In-place forms are left out, and whoever tests an operand with
    `is` finds a view of it.

    At dispatch level autograd is untouched: gradients are read from the matmuls of the backward pass that are
    linked to a forward call, as they come, one operand at a time with the output's beside it. None can be
    replaced there, and a bias has none, since that is a sum and no matmul.

    Args:
        function: Called as `function(call, gradients)` with a dict of what there is: `"lhs"`, `"rhs"`, `"bias"`,
            `"output"`. At function level `call` is the forward call with shapes and no values, and a dict that is
            returned replaces operands' gradients; at dispatch level it is the backward call. Without a function,
            `entries` keeps copies of the gradients.

    Raises:
        TypeError: `function` cannot be called.

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

    def __init__(self, function: Function | None = None) -> None:
        if function is not None and not callable(function):
            raise TypeError(f"function must be callable as function(call, gradients), got {function!r}")
        self.entries: list[Gradient] = []
        self._function = function
        self._scales: dict[int, Any] = {}  # of the calls with an alpha, which is applied after the product
        self._last = threading.local()

    def __getitem__(self, module: str | Pattern[str] | Callable[[str], bool]) -> list[Gradient]:
        """What was kept of the modules that a glob, a pattern or a test names, in order."""
        test = name_test(module)
        return [entry for entry in self.entries if entry.module is not None and test(entry.module)]

    def clear(self) -> None:
        """Forget what was kept."""
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
            raise HookError(f"only gradients of operands can be replaced, {', '.join(places)} here, got {unknown}")
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
                self._scales.pop(call.index, None)  # of another interceptor, which has the same numbers
            return
        forward, of = call.forward, call.grad_of
        gradient, output = call.gradient, call.grad_output
        if forward is None or of is None or gradient is None or output is None:
            return
        found = {of: gradient * self._scales[forward] if forward in self._scales else gradient, "output": output}
        last_forward, last_of = getattr(self._last, "seen", (None, None))
        if self._function is None and last_forward == forward and last_of != of:
            del found["output"]  # kept with the other operand's
        replaced = self._take(call, forward, found)
        self._last.seen = forward, of  # last, since an interrupt may come before anything was kept
        if replaced:
            raise HookError("gradients can be replaced at function level only, got some at dispatch level; return None")

    def _take(self, call: OpCall, forward: int, found: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        if self._function is not None:
            return self._function(call, found)
        module = call.module
        # Copies: autograd makes the tensor itself the `.grad` of a parameter, and adds the next gradient to it.
        self.entries += [
            Gradient(module, call.op, forward, role, grad.detach().clone()) for role, grad in found.items()
        ]
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_last"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _last=threading.local())
