"""Gradients of a call at function level, for `backward` hooks: what torch does for modules, around one function.

Invariant: no tensor is kept but by autograd's graph, and a call without such a hook never comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import BackwardHook

from opintercept._core.call import OpCall
from opintercept._core.hook import Handle
from opintercept._core.pipeline import Pipeline
from opintercept._core.replace import check_gradients
from opintercept._core.tensors import tensors_of
from opintercept._engines import scope as _scope
from opintercept._engines.dynamo import keep_out
from opintercept._engines.scope import KEY, take

# Whether a tensor belongs to a transform of torch.func. Private; where it is missing, we try to add the nodes.
_wrapped: Callable[[torch.Tensor], bool] | None = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None
)


class Tap:
    """Adds identity nodes before and after one call, as `nn.Module.register_full_backward_hook` does.

    Args:
        pipeline: Deals with a hook that raises.
        call: While it runs; the hooks get one with shapes and no values, which does not keep the graph alive.
        handles: Registrations with a `backward`.
    """

    __slots__ = ("_hook", "_needed")

    def __init__(self, pipeline: Pipeline, call: OpCall, handles: Sequence[Handle]) -> None:
        self._needed: list[bool] = []
        if torch.is_grad_enabled() and not call.written:
            # A tensor that is passed twice stays one tensor: attention asks whether `query is key`.
            seen: set[int] = set()
            for tensor in tensors_of(call.args, call.kwargs):
                self._needed.append(tensor.requires_grad and id(tensor) not in seen)
                seen.add(id(tensor))
                if _wrapped is not None and _wrapped(tensor):  # torch.func refuses such nodes
                    self._needed = []
                    return
        if any(self._needed):
            try:
                spent = call.without_values(_without_values)
            except (NotImplementedError, RuntimeError):  # a layout without meta tensors
                self._needed = []
                return
            self._hook = BackwardHook(spent, [_hidden(pipeline, handle, self._needed) for handle in handles], [])

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs to run the operator with."""
        if not any(self._needed):
            return args, kwargs
        # Torch's hook would give zeros to those that need no gradient.
        needed = [t for t, need in zip(tensors_of(args, kwargs), self._needed, strict=True) if need]
        passed = dict(zip(map(id, needed), self._hook.setup_input_hook(tuple(needed)), strict=True))
        return _replaced(args, passed), {name: _replaced(value, passed) for name, value in kwargs.items()}

    def output(self, output: Any) -> Any:
        """The output for the program."""
        return self._hook.setup_output_hook(output) if any(self._needed) else output


def _replaced(value: Any, by: dict[int, torch.Tensor]) -> Any:
    """Arguments with other tensors in the place of some. A closure would be a cycle, which keeps them for a while."""
    if isinstance(value, (list, tuple)):
        return type(value)([_replaced(item, by) for item in value])
    return by.get(id(value), value)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    meta = tensor.detach().to("meta")
    return meta.requires_grad_(tensor.requires_grad)


def _hidden(pipeline: Pipeline, handle: Handle, needed: list[bool]) -> Callable[..., Any]:
    def backward(call: OpCall, grad_inputs: Any, grad_outputs: Any) -> Any:
        if handle.removed:
            return None
        given = iter(grad_inputs)
        grad_inputs = tuple(next(given) if need else None for need in needed)
        scope = _scope.current()
        hidden = scope.while_hooks_run()
        if take is not None:
            take(hidden)
            take(scope)
        try:
            _scope.stash(KEY, hidden)  # inside the try: a signal handler may raise right after it
            replacement = handle.backward(call, grad_inputs, grad_outputs)
            if replacement is None:
                return None
            check_gradients(grad_inputs, replacement)
            return tuple(grad for grad, need in zip(replacement, needed, strict=True) if need)
        except Exception as exception:
            if not pipeline.survives(handle, "backward", call, exception):
                raise
            return None
        finally:
            _scope.stash(KEY, scope)

    return keep_out(backward)
