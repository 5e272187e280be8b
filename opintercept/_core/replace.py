"""Checks of the inputs, outputs and gradients that hooks return, and how results reach the program's tensors.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from opintercept._core.call import OpCall
from opintercept._core.errors import HookError
from opintercept._core.tensors import copy_into, describe, is_tensor, shape_of


def checked_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a pre hook returned as `(args, kwargs)`.

    Raises:
        HookError: It is something else.
    """
    if (
        not isinstance(inputs, tuple)
        or len(inputs) != 2
        or not isinstance(inputs[0], (tuple, list))
        or not isinstance(inputs[1], Mapping)
    ):
        raise HookError(
            f"a pre hook must return None or (args, kwargs), got {describe(inputs)}; "
            "to change one operand, return call.replace(lhs=...)"
        )
    return tuple(inputs[0]), dict(inputs[1])


def check_alike(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that replaced inputs are like the call's: above dispatch level, their shapes and dtypes are already fixed.

    Raises:
        HookError: A tensor has another shape, dtype, device or layout.
    """
    pairs = [*zip(call.args, args, strict=False), *((call.kwargs[k], kwargs[k]) for k in call.kwargs if k in kwargs)]
    for old, new in pairs:
        if new is not old and is_tensor(old) and is_tensor(new):
            _check_like("a replacement input at dispatch level", old, new)


def written_back(targets: list[Any], output: Any) -> Any:
    """Copy a result into the program's own tensors, after a hook has replaced those that the operator writes to.

    Args:
        targets: For each output, the tensor that the program passed to be written to, or None if there is none.
        output: What the operator returned, or what it wrote to if it returns nothing.

    Returns:
        The output for the program.
    """
    if all(target is None for target in targets):
        return output
    results = output if isinstance(output, (tuple, list)) else (output,)
    parts = list(results)
    for place, (target, result) in enumerate(zip(targets, results, strict=False)):
        if target is not None and is_tensor(result):
            if tuple(target.shape) != tuple(result.shape):
                target.resize_(result.shape)
            copy_into(target, result)
            parts[place] = target
    return parts[0] if not isinstance(output, (tuple, list)) else type(output)(parts)


def check_gradients(gradients: tuple[Any, ...], replacement: Any) -> None:
    """Check that a backward hook returned gradients that can replace `gradients`.

    Raises:
        HookError: Their number differs, or the shape, dtype, device or layout of one, or one replaces None or the
            reverse.
    """
    if not isinstance(replacement, (tuple, list)) or len(replacement) != len(gradients):
        raise HookError(
            f"a backward hook must return None or a tuple of {len(gradients)} gradients, one for each input tensor, "
            f"got {describe(replacement)}"
        )
    for old, new in zip(gradients, replacement, strict=True):
        if is_tensor(old) and is_tensor(new):
            _check_like("a replacement gradient", old, new)
        elif (old is None) is not (new is None) or new is not old:
            raise HookError(
                f"a backward hook must return a gradient where there was one and None elsewhere, "
                f"got {describe(new)} for {describe(old)}"
            )


def check_replacement(output: Any, replacement: Any) -> None:
    """Check that a post hook returned something that can replace `output`.

    Raises:
        HookError: It has another structure, or a tensor in it has another shape, dtype, device or layout.
    """
    if isinstance(output, (tuple, list)):
        if type(replacement) is not type(output) or len(replacement) != len(output):
            raise HookError(
                f"a replacement output must be a {type(output).__name__} of {len(output)} parts like the operator's, "
                f"got {describe(replacement)}"
            )
        for part, new in zip(output, replacement, strict=True):
            check_replacement(part, new)
        return
    if not is_tensor(output):
        if replacement is not output and replacement != output:
            raise HookError(
                f"only tensors of an output can be replaced, got {describe(replacement)} for {describe(output)}"
            )
        return
    if not is_tensor(replacement):
        raise HookError(
            f"a post hook must return None or an output like {describe(output)}, got {describe(replacement)}; "
            "return None to leave the output as it is"
        )
    _check_like("a replacement output", output, replacement)


def _check_like(what: str, old: Any, new: Any) -> None:
    for name, read in _LIKE.items():
        if read(old) != read(new):
            raise HookError(f"{what} must have the {name} of the operator's, {describe(old)}, got {describe(new)}")


# `shape_of`, since a nested tensor has no `shape` in a dispatch mode.
_LIKE: dict[str, Callable[[Any], Any]] = {
    "shape": shape_of,
    "dtype": attrgetter("dtype"),
    "device": attrgetter("device"),
    "layout": attrgetter("layout"),
}
