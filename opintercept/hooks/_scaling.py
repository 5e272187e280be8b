"""`Scaling`: tells what only a scaled loss makes infinite, which its `GradScaler` finds and discards.

Invariant: nothing is patched. The scalers are found among all objects of the process, and the loss in the frame that
runs the backward pass; both only when values that are not finite ask for it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.amp import GradScaler

_NODES = 64  # the most nodes of autograd's graph to look at
# What programs may do to a loss between `scaler.scale` and `backward`.
_AFTER_SCALING = tuple(
    f"{name}Backward"
    for name in ("Add", "Div", "Mean", "Sum", "Stack", "Cat", "View", "Reshape", "Squeeze", "Unsqueeze", "ToCopy")
)
# The functions that run a backward pass, and their parameters with what it begins with.
_BACKWARD = {torch.autograd.backward.__code__: "tensors", torch.autograd.grad.__code__: "outputs"}


class Losses:
    """What the running backward passes began with, as far as a scaler may explain their values. Waits for no device."""

    def __init__(self) -> None:
        losses = _losses()
        self.may_be_scaled = not losses or any(map(_ends_in_product, losses))
        self._finite: list[torch.Tensor] | None = None  # None if they are not known
        if losses and self.may_be_scaled:
            with contextlib.suppress(RuntimeError):  # the device has no memory left now
                self._finite = [_was_finite(loss) for loss in losses]

    def were_finite(self) -> bool:
        """Whether all were finite before they were scaled."""
        return self._finite is None or all(map(bool, self._finite))


class Scaling:
    """Knows the scalers of the process, and their state when gradients last overflowed."""

    def __init__(self) -> None:
        self._scalers: WeakSet[GradScaler] = WeakSet()
        self._overflowed: WeakKeyDictionary[GradScaler, dict[str, Any]] = WeakKeyDictionary()

    def explains_backward(self, losses: Losses | None) -> bool:
        """Whether a scaler discards values of a backward call that are not finite.

        A scale of 1 or less makes nothing larger, and so explains nothing.

        Args:
            losses: What was known while the call was running; None if nobody looked.
        """
        # The search for scalers takes longer.
        if (losses is not None and not self._is_scaled(losses)) or self._scale() <= 1:
            return False
        self._overflowed = WeakKeyDictionary((scaler, scaler.state_dict()) for scaler in self._scalers)
        return True

    def explains_inputs(self) -> bool:
        """Whether gradients have overflowed since the last `update()` of a scaler.

        That changes its state even if it finds nothing. The scaler of another training may be freed at any time.
        """
        states = list(self._overflowed.items())
        return bool(states) and all(scaler.state_dict() == state for scaler, state in states)

    def _is_scaled(self, losses: Losses) -> bool:
        """Whether one of the losses was multiplied by a constant, and all were finite before.

        A penalty on gradients that overflowed, which is part of a loss, is not finite either.
        """
        return losses.may_be_scaled and (losses.were_finite() or self.explains_inputs())

    def _scale(self) -> float:
        """The largest scale; 0 if there is no scaler."""
        scale = max(map(_scale_of, self._scalers), default=0.0)
        if scale <= 1:  # the program may have made another one
            kinds = tuple(_with_subclasses(GradScaler))
            # An object refers to its class. The collector looks through a million objects in 0.1 s.
            for each in gc.get_referrers(*kinds):
                if type(each) in kinds:
                    self._scalers.add(each)
            scale = max(map(_scale_of, self._scalers), default=0.0)
        return scale


def _scale_of(scaler: GradScaler) -> float:
    return scaler.get_scale() if scaler.is_enabled() else 0.0


def _with_subclasses(kind: type[GradScaler]) -> Iterator[type[GradScaler]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _losses() -> list[torch.Tensor]:
    """What the running backward passes began with: that of this thread, or else, on a device, those of any thread."""
    own = _outermost(sys._getframe())
    return own or [loss for frame in sys._current_frames().values() for loss in _outermost(frame)]


def _outermost(frame: FrameType | None) -> list[torch.Tensor]:
    """What the outermost backward pass on a stack began with: a checkpoint runs others inside it."""
    found: list[torch.Tensor] = []
    while frame is not None:
        if frame.f_code in _BACKWARD:
            given = frame.f_locals.get(_BACKWARD[frame.f_code])
            given = given if isinstance(given, (list, tuple)) else [given]
            found = [each for each in given if isinstance(each, torch.Tensor)]
        frame = frame.f_back
    return found


def _ends_in_product(loss: torch.Tensor) -> bool:
    """Whether a loss is a product with a constant, or made of such products by what programs do to a scaled loss."""
    nodes = [loss.grad_fn]
    for node in nodes:
        if node is None or len(nodes) > _NODES:
            continue
        inputs = [each for each, _ in node.next_functions]
        if node.name().startswith("MulBackward") and None in inputs:
            return True
        if node.name().startswith(_AFTER_SCALING):
            nodes += inputs
    return False


def _was_finite(loss: torch.Tensor) -> torch.Tensor:
    """Whether a scaled loss was finite before; the scale alone may be too much for float16."""
    kept = loss.detach()
    return kept.isnan().any().logical_not() if kept.dtype is torch.float16 else kept.isfinite().all()
