"""What may be kept of a call: `CallRecord`, plain data, and what it is put together from.

Invariant: a record holds no tensor. Must not import torch: the pipeline is tested without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    pass
from opintercept._origin.place import Place
from opintercept._tensors import TensorMeta, dtype_name

Phase = Literal["forward", "backward", "recompute"]


class Gemm(NamedTuple):
    """The matrix product behind a call: `batch` times `[m, k] @ [k, n]`.

    `dtypes` and `transposes` are those of lhs and rhs; a transpose is true where the operand as the
    product reads it has its rows, not its columns, one step apart in memory.
    """

    batch: int
    m: int
    n: int
    k: int
    dtypes: tuple[str, str]
    transposes: tuple[bool, bool]

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch != 1 else ""
        return f"{batch}[{self.m}, {self.k}] @ [{self.k}, {self.n}]"


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What may be kept of a call; the fields are those of `OpCall`, tensors as `TensorMeta`."""

    index: int
    step: int
    op: str
    func: str
    phase: Phase
    module: str | None
    source: str | None
    forward: int | None
    grad_of: str | None
    lhs: TensorMeta | None
    rhs: TensorMeta | None
    bias: TensorMeta | None
    output: TensorMeta | tuple[TensorMeta | None, ...] | None
    gemm: Gemm | None
    flops: int | None
    bytes: int | None
    autocast: str | None
    opaque: bool
    elapsed: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a dict that `json.dumps` takes as it is."""
        plain = asdict(self)
        plain["gemm"] = None if self.gemm is None else self.gemm._asdict()
        return plain

    def __str__(self) -> str:
        operands = " @ ".join(str(t) for t in (self.lhs, self.rhs) if t is not None)
        bias = f" + {self.bias}" if self.bias is not None else ""
        outputs = self.output if isinstance(self.output, tuple) else (self.output,)
        result = ", ".join(str(t) for t in outputs if t is not None)
        return f"{self.op} {operands}{bias} -> {result}"


class Summary(NamedTuple):
    """The fields of a `CallRecord` that follow from how the arguments and the output look."""

    op: str
    func: str
    lhs: TensorMeta | None
    rhs: TensorMeta | None
    bias: TensorMeta | None
    output: TensorMeta | tuple[TensorMeta | None, ...] | None
    gemm: Gemm | None
    flops: int | None
    bytes: int | None
    opaque: bool


summaries: dict[Any, tuple[Summary, Any]] = {}  # with the operator, whose identity is in the key
NO_KIN = (None, None, False)
_PLAIN = frozenset((NoneType, bool, int, float, complex, str))


def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A hashable that is the same for calls which look the same to `Summary`; raises where that cannot be told."""
    return id(func), _look(args), _look(kwargs.items()), _look(output)


def _look(value: Any) -> Any:
    """The same for a value. Each attribute of a tensor that is read here takes its time in every recorded call."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        return tuple([_look(item) for item in value])
    try:
        stride = value.stride()  # raises for some that have none
    except AttributeError:
        return tuple([_look(item) for item in value]) if isinstance(value, Iterable) else value
    dtype = value.dtype
    if not dtype.is_floating_point and value.numel() < 64:
        raise TypeError("the numbers may count: tensordot takes its dimensions as a tensor too")
    return value.shape, stride, dtype, value.device, value.requires_grad, value.layout


class Note(NamedTuple):
    """A record that has not been put together yet."""

    summary: Summary
    index: int  # type: ignore[assignment]
    step: int
    phase: Phase
    place: Place
    kin: tuple[int | None, str | None, bool]
    autocast: Any
    elapsed: float | None

    def record(self) -> CallRecord:
        """Put it together."""
        summary, place = self.summary, self.place
        return CallRecord(
            index=self.index,
            step=self.step,
            op=summary.op,
            func=summary.func,
            phase=self.phase,
            module=place.module,
            source=place.source,
            forward=self.kin[0],
            grad_of=self.kin[1],
            lhs=summary.lhs,
            rhs=summary.rhs,
            bias=summary.bias,
            output=summary.output,
            gemm=summary.gemm,
            flops=summary.flops,
            bytes=summary.bytes,
            autocast=None if self.autocast is None else dtype_name(self.autocast),
            opaque=summary.opaque,
            elapsed=self.elapsed,
        )
