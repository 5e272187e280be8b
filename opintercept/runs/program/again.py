"""`again`: the one place that runs a recorded call: finds its operator, reads its arguments, checks both, and calls it.

Invariant: anyone may have written the run. Only operators of `operators.NAMES` are called, with arguments that their
checks let through, and what they make is not far larger than what the run holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import NoneType
from typing import Any, NamedTuple

import torch

from opintercept._core.errors import OpInterceptError
from opintercept._core.tensors import describe, tensors_of
from opintercept._ops.table import PLACES, functions, overloads, row_of
from opintercept.runs.program import operators
from opintercept.runs.store.run import MAX_TENSOR

FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""What a call raises that does not fit its operator."""
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2),
)
_ROOM = 1 << 22  # elements that a call may make, however small the run
_FOLD = 16  # how many times as many elements it may make as the run has of its tensors


class NotRunError(OpInterceptError):
    """A recorded call is not run again; the message says why."""


class Operator(NamedTuple):
    """What may be called.

    Attributes:
        func: The overload, or the function of torch.
        name: An expression for it, of which no part is taken from the run.
        check: Raises `ValueError` for arguments, by their names, that it must not be given.
        base: The name of an overload on the list.
    """

    func: Callable[..., Any]
    name: str
    check: operators.Check | None
    base: str = ""

    @property
    def schema(self) -> Any:
        """The schema of an overload; None for a function."""
        return getattr(self.func, "_schema", None)

    @property
    def parameters(self) -> Sequence[Any]:
        """The parameters, also of a function that has those of the operator of its name."""
        name = self.name.rpartition(".")[2]
        return (self.schema or overloads(f"aten::{name}")[0]._schema).arguments if self.check or self.schema else ()


@functools.lru_cache(4096)
def operator_of(op: str, func: str) -> Operator:
    """The operator of a recorded call.

    Args:
        op: The `op` of its record.
        func: The `func` of its record.

    Raises:
        NotRunError: It is not on the list.
    """
    overload = overload_of(op, func)
    if overload is not None and op.endswith("_") and not overload._schema.returns:  # as for lists of tensors
        overload = overload_of(op[:-1], func.replace("_.", ".", 1))  # which returns what that writes
    if overload is not None and (base := operators.listed(overload)) is not None:
        return Operator(overload, f"torch.ops.{overload}", operators.CHECKS.get(base), base)
    found = _function(op, func)
    if found is not None:
        return found
    raise NotRunError(f"{func:.100} is not on the list of operators that may run again")


def overload_of(op: str, func: str) -> Any:
    """The overload that a record names, which need not be on the list; None if torch has none."""
    return next((each for each in overloads(row_of(op).name) if str(each) == func), None) if "::" in op else None


def _function(op: str, func: str) -> Operator | None:
    """A function of torch, if that or the operator of its name is on the list and may be called like this."""
    name = func.rpartition(".")[2]
    found: Any = next((function for function, row in functions().items() if row.name == op == func), None)
    for place, owner, _ in PLACES if found is None else ():
        candidate = getattr(owner, name, None) if func == f"{place}.{name}" else None
        if callable(candidate) and torch.overrides.resolve_name(candidate) == func == op:
            found = candidate
    base = name.removesuffix("_")
    if found is None or not (name in operators.FUNCTIONS or (base in operators.NAMES and base not in operators.CHECKS)):
        return None
    return Operator(found, func, operators.FUNCTIONS.get(name))


def argument(plain: Any, name: str, tensor: Callable[[Mapping[str, Any], str], Any], device: torch.device) -> Any:
    """Read a recorded argument.

    Args:
        plain: What was recorded.
        name: The name of its parameter.
        tensor: Makes what stands for a tensor, from what was recorded of it and the name of its place, `"weights[0]"`.
        device: Takes the place of any device.

    Raises:
        NotRunError: It is none that may be passed.
    """
    match plain:
        case {"tensor": str()}:
            return tensor(plain, name)
        case {"list": list(items)}:
            return [argument(item, f"{name}[{place}]", tensor, device) for place, item in enumerate(items)]
        case {"torch": str(constant)}:
            found = getattr(torch, constant, None)
            if isinstance(found, torch.memory_format) or found is torch.strided or found in _DTYPES:
                return found
        case {"device": str()}:
            return device
        case None | bool() | int() | float() | str():
            return plain
    raise NotRunError(f"a recorded argument must be a tensor, a number or a dtype, got {describe(plain)}")


def strided(stored: torch.Tensor, shape: list[Any], stride: list[Any], limit: int) -> torch.Tensor:
    """A stored tensor with the strides that it had.

    Raises:
        NotRunError: They do not fit its values, or `limit` bytes.
    """
    sound = (
        len(shape) == len(stride) <= 64
        and all(type(n) is int and 0 <= n < 2**40 for n in (*shape, *stride))
        and math.prod(shape) == stored.numel()
    )
    extent = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1 if sound else 0
    if not sound or extent * stored.element_size() > limit:
        raise NotRunError(
            f"a tensor's shape and strides must fit its values and {limit} bytes, got {shape!r:.80} and {stride!r:.80}"
        )
    try:
        made = torch.empty_strided(shape, stride, dtype=stored.dtype)
        return made.copy_(stored.reshape(shape))
    except RuntimeError as wrong:  # elements share memory
        raise NotRunError(f"a tensor cannot have strides {stride!r:.80}: {wrong}") from wrong


def room(operands: Iterable[torch.Tensor], made: Iterable[int] = ()) -> int:
    """How many elements a call may make that has these operands and so many elements in recorded outputs."""
    return max(_ROOM, _FOLD * (sum(each.numel() for each in operands) + sum(made)))


def check_size(
    operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], most: int, limit: int = MAX_TENSOR
) -> None:
    """Run a call on shapes alone.

    Args:
        operator: What is called.
        args: The arguments.
        kwargs: The keyword arguments.
        most: How many elements it may make, as `room` says.
        limit: How many bytes an output may have.

    Raises:
        NotRunError: It would make more, or nobody knows before how much it makes.
        Exception: One of `FAILURES`: the arguments do not fit the operator.
    """
    _check(operator, args, kwargs)
    if operator.base and operators.is_unsized(operator.base, _named(operator, args, kwargs)):
        return
    metas: dict[int, torch.Tensor] = {}

    def shape_only(value: Any) -> Any:
        if isinstance(value, list):
            return [shape_only(item) for item in value]
        if isinstance(value, torch.device):
            return torch.device("meta")
        return metas.setdefault(id(value), value.to("meta")) if isinstance(value, torch.Tensor) else value

    given = {name: shape_only(each) for name, each in kwargs.items()}
    if operator.schema is not None and any(each.name == "device" for each in operator.schema.arguments):
        given["device"] = torch.device("meta")
    try:
        with torch.no_grad(), nullcontext() if operator.schema is not None else torch.device("meta"):
            made = operator.func(*map(shape_only, args), **given)
    except NotImplementedError as unknown:
        raise NotRunError(f"nobody knows before how much {operator.name} makes") from unknown
    except FAILURES:
        raise
    except Exception as wrong:  # some rules for shapes are written in Python, and assert or divide by zero
        raise NotRunError(f"{operator.name} must not be called with these arguments: {type(wrong).__name__}") from wrong
    outputs = tensors_of((made,), {})
    size = max((each.numel() * each.element_size() for each in outputs), default=0)
    if size > limit:
        raise NotRunError(f"the output of {operator.name} would have {size} bytes, more than the limit of {limit}")
    if (count := sum(each.numel() for each in outputs)) > most:
        raise NotRunError(f"{operator.name} would make {count:,} numbers, far more than the run has of the call")


def run(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator. `check_size` must have let arguments of these shapes through.

    Raises:
        NotRunError: An argument is one that the operator must not be given.
        Exception: One of `FAILURES`: the operator fails.
    """
    _check(operator, args, kwargs)
    try:
        return operator.func(*args, **kwargs)
    except FAILURES:
        raise
    except Exception as wrong:  # of a function that is written in Python
        raise NotRunError(f"{operator.name} raised {type(wrong).__name__} for these arguments") from wrong


def _named(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by the names of their parameters, defaults included."""
    defaults = {each.name: each.default_value for each in operator.parameters if each.has_default_value()}
    return defaults | _given(operator, args, kwargs)


def _given(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip((each.name for each in operator.parameters), args, strict=False)) | dict(kwargs)


def _check(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    constants = _constants_of(operator.func)
    given = _given(operator, args, kwargs) if constants else {}
    for name, kind in constants:  # a number would be taken for any of them, unchecked
        if not isinstance(given.get(name), (kind, NoneType)):
            raise NotRunError(f"{name} of {operator.name} must be a {kind.__name__}, got {describe(given[name])}")
    if operator.check is None:
        return
    try:
        operator.check(_named(operator, args, kwargs))
    except ValueError as wrong:
        raise NotRunError(f"{operator.name} must not be called with these arguments: {wrong}") from wrong
    except (ArithmeticError, AttributeError, LookupError, TypeError, RuntimeError) as wrong:
        raise NotRunError(f"{operator.name} must not be called with these arguments") from wrong


_CONSTANTS: dict[str, type] = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": torch.device,
}


@functools.lru_cache(4096)
def _constants_of(func: Any) -> tuple[tuple[str, type], ...]:
    """The parameters that take a dtype and the like."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    kinds = {each.name: str(each.real_type).removeprefix("Optional[").removesuffix("]") for each in arguments}
    return tuple((name, _CONSTANTS[kind]) for name, kind in kinds.items() if kind in _CONSTANTS)
