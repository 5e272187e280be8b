"""`CallRecord`: what may be kept of a call, as plain data.

Each field says how it is read from a call; `as_dict`, `PendingRecord` and the files of a run (`runs/store/codec.py`)
follow that. Invariant: a record holds no tensor. Must not import torch: the pipeline is tested without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from opintercept._core.call_site import CallSite
from opintercept._core.gemm import Gemm
from opintercept._core.tensors import TensorMeta, dtype_name

if TYPE_CHECKING:
    import torch

Call = Any  # an `OpCall`, whose file imports this one
Phase = Literal["forward", "backward", "recompute"]


def shared(read: Callable[[Call], Any]) -> Mapping[str, Any]:
    """Metadata of a field that is the same for calls that look alike: `read` takes it from the first of them."""
    return {"read": read}


def noted(path: str, *, rare: bool = False) -> Mapping[str, Any]:
    """Metadata of a field that is an attribute of the call's `PendingRecord`, or an attribute of one of those.

    If few calls have it, a run keeps it in their text, and no room for it in the record of each call.
    """
    return {"path": path, "rare": rare}


def taken(read: Callable[[Call], Any]) -> Mapping[str, Any]:
    """Metadata of a field that no `PendingRecord` has yet: `read` takes it from each call, which costs time."""
    return {"read": read}


def _func(call: Call) -> str:
    return str(call.func) if hasattr(call.func, "_schema") else call.op


def _output(call: Call) -> TensorMeta | tuple[TensorMeta | None, ...] | None:
    values = call.output if isinstance(call.output, (list, tuple)) else (call.output,)
    outputs = [TensorMeta.of(value) for value in values]
    while outputs and outputs[-1] is None:
        outputs.pop()  # the others keep their places: of a gradient that nobody needs, the place is empty
    return outputs[0] if len(outputs) == 1 else tuple(outputs) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The fields of a `CallRecord` that follow from how the arguments and the output look."""

    op: str = field(metadata=shared(lambda call: call.op))
    func: str = field(metadata=shared(_func))
    lhs: TensorMeta | None = field(metadata=shared(lambda call: TensorMeta.of(call.operand("lhs"))))
    rhs: TensorMeta | None = field(metadata=shared(lambda call: TensorMeta.of(call.operand("rhs"))))
    bias: TensorMeta | None = field(metadata=shared(lambda call: TensorMeta.of(call.operand("bias"))))
    output: TensorMeta | tuple[TensorMeta | None, ...] | None = field(metadata=shared(_output))
    gemm: Gemm | None = field(metadata=shared(lambda call: call.gemm))
    flops: int | None = field(metadata=shared(lambda call: call.flops))
    bytes: int | None = field(metadata=shared(lambda call: call.bytes))
    opaque: bool = field(metadata=shared(lambda call: call.opaque))
    ops: tuple[str, ...] | None = field(default=None, metadata=shared(lambda call: call.ops))

    @property
    def outputs(self) -> tuple[TensorMeta | None, ...]:
        """The outputs; one None if there are none."""
        return self.output if isinstance(self.output, tuple) else (self.output,)

    @property
    def main(self) -> TensorMeta | None:
        """The left operand; of a call without one, the first output."""
        return self.lhs or next((each for each in self.outputs if each is not None), None)

    @property
    def shape(self) -> str:
        """The GEMM; of a call without one, the shape of `main`."""
        return str(self.gemm) if self.gemm is not None else "" if self.main is None else str(list(self.main.shape))

    @property
    def dtype(self) -> str:
        """The distinct dtypes of the operands, or that of `main`."""
        return ", ".join(dict.fromkeys(each.dtype for each in (self.main, self.rhs) if each is not None))

    @property
    def terms(self) -> int | None:
        """How many products of an element of lhs and one of rhs each element of the output sums; None if unknown."""
        output = next(iter(self.outputs), None)
        # The operands of a backward operator are those of the forward one, and it multiplies the gradient. In a
        # transposed convolution, the product is summed again where kernels overlap; in addbmm, over the batch.
        # And what a generated kernel returns may be computed from the product.
        if self.gemm is None or output is None or self.ops is not None or self.op.endswith("_backward"):
            return None
        batch, m, n, k = self.gemm[:4]
        return k if math.prod(output.shape) == batch * m * n else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord(Summary):
    """What may be kept of a call; the fields are those of `OpCall`, tensors as `TensorMeta`.

    `started` is when the operator started, in nanoseconds since 1970, and `thread` the number that the operating system
    gives its thread, as in the traces of `torch.profiler`. Of a call that a CUDA graph repeats, `replayed` is the index
    of the call that the graph captured, and `elapsed` is not known.

    A new field takes one line, here or in `Summary`. A run of an older version lacks it and is read with None, so the
    type allows None: `str`, `float`, `bool`, `int` for a count, `Literal`, and tuples, dataclasses and named tuples of
    these.
    """

    index: int = field(metadata=noted("index"))
    step: int = field(metadata=noted("step"))
    phase: Phase = field(metadata=noted("phase"))
    module: str | None = field(metadata=noted("call_site.module"))
    source: str | None = field(metadata=noted("call_site.source"))
    forward: int | None = field(metadata=noted("forward"))
    grad_of: Literal["lhs", "rhs"] | None = field(metadata=noted("grad_of"))
    autocast: str | None = field(metadata=noted("autocast_name"))
    started: int | None = field(metadata=noted("started"))
    thread: int | None = field(metadata=noted("thread"))
    elapsed: float | None = field(metadata=noted("elapsed"))
    replayed: int | None = field(metadata=noted("replayed", rare=True))

    def where(self) -> str:
        """The module and the line of the program, in words."""
        module = "no module" if self.module == "" else f"module {self.module!r}" if self.module else "?"
        return f"{module} ({self.source or 'source unknown'})"

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a dict that `json.dumps` accepts."""
        return {name: plain(getattr(self, name)) for name in (*OWN, *SHARED)}

    def __str__(self) -> str:
        operands = " @ ".join(str(t) for t in (self.lhs, self.rhs) if t is not None)
        bias = f" + {self.bias}" if self.bias is not None else ""
        result = ", ".join(str(t) for t in self.outputs if t is not None)
        return f"{f'{self.op} {operands}'.rstrip()}{bias} -> {result}"


class Plain:
    """A dataclass with `as_dict`."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """The value with dataclasses and named tuples as dicts."""
    if isinstance(value, Plain):
        return value.as_dict()
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        parts = tuple(map(plain, value))
        return dict(zip(value._fields, parts, strict=True)) if hasattr(value, "_fields") else parts
    return value


# How the fields that calls which look alike share are read, then where a note has those of each call.
SHARED = {each.name: each.metadata["read"] for each in fields(Summary)}
_own = {each.name: each.metadata for each in fields(CallRecord) if each.name not in SHARED}
OWN = {name: marks.get("path", f"taken.{name}") for name, marks in _own.items()}
_take = {name: marks["read"] for name, marks in _own.items() if "read" in marks}


class Timed(Protocol):
    """What a device takes for a call."""

    def found(self) -> tuple[float, bool]:
        """Seconds on the device, which this waits for, and whether they may include time in which it was idle."""


class PendingRecord(NamedTuple):
    """What a record is made of, collected while the call runs."""

    summary: Summary
    index: int  # type: ignore[assignment]
    step: int
    phase: Phase
    call_site: CallSite
    forward: int | None
    grad_of: str | None
    autocast: torch.dtype | None
    started: int | None
    thread: int | None
    elapsed: float | None
    timed: tuple[float, bool] | None = None  # what `Timed` finds
    taken: SimpleNamespace | None = None
    replayed: int | None = None

    @property
    def autocast_name(self) -> str | None:
        """The name of the dtype."""
        return None if self.autocast is None else dtype_name(self.autocast)

    def record(self) -> CallRecord:
        """Make the record."""
        return _record(self, self.summary)


# Compiled, as `dataclass` compiles `__init__`: a loop over the fields takes half as long again.
_values = [f"{name}=note.{path}" for name, path in OWN.items()] + [f"{name}=summary.{name}" for name in SHARED]
_record: Callable[[PendingRecord, Summary], CallRecord] = eval(
    f"lambda note, summary: CallRecord({', '.join(_values)})"
)

# What kernels in C++ fill of a note, see `in_python` in `ring.cpp`. They note no call that a graph repeats.
_FILLED = {"summary", "index", "step", "phase", "call_site", "forward", "grad_of", "autocast", "started", "thread"}
_FILLED |= {"elapsed", "replayed"}
NOTED_WHOLE = {path.partition(".")[0] for path in OWN.values()}.isdisjoint({*PendingRecord._fields} - _FILLED)
"""Whether what kernels in C++ note of a call has all fields of its record. If not, hooks have to see each call."""


def taken_of(call: Call) -> SimpleNamespace | None:
    """`PendingRecord.taken` of a call; None if no field needs it."""
    return SimpleNamespace(**{name: read(call) for name, read in _take.items()}) if _take else None


_key_bytes = 0
_summaries: dict[Any, tuple[Summary, Any]] = {}  # with the operator, whose identity is in the key
# A program whose shapes or numbers never come again would add one for each call.
_MOST_SUMMARIES, _MOST_BYTES = 4096, 1 << 23
_PLAIN = frozenset((NoneType, bool, int, float, complex, str))


def summary_of(call: Call, signature_of: Callable[..., Any]) -> Summary:
    """The shared fields of a call, worked out once for all calls that look alike: a model has few shapes.

    Args:
        call: The call, once its operator has returned.
        signature_of: The function of this module, or its compiled counterpart.
    """
    global _key_bytes
    try:
        key = signature_of(call.func, call.args, call.kwargs, call.output)
        known = _summaries.get(key)
    except Exception:  # an exotic tensor, a symbolic size, a subclass whose attributes raise
        return _summarise(call)
    if known is None:
        if len(_summaries) >= _MOST_SUMMARIES or _key_bytes > _MOST_BYTES:
            forget_summaries()
        _key_bytes += len(key) if isinstance(key, bytes) else 0  # those of a list of tensors are long
        known = _summaries[key] = (_summarise(call), call.func)
    return known[0]


def forget_summaries() -> None:
    """Work all summaries out anew: the operator table has changed."""
    global _key_bytes
    _key_bytes = 0
    _summaries.clear()


def _summarise(call: Call) -> Summary:
    return Summary(**{name: read(call) for name, read in SHARED.items()})


def signature_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """The signature of a call: a hashable that is equal for calls which look alike, that is, have equal summaries.

    Raises:
        Exception: How the call looks does not decide its summary, or cannot be read.
    """
    numbers = not hasattr(func, "_schema")  # a function may take dimensions as a tensor, as `tensordot` does
    named = _signature(tuple(kwargs.items()), numbers) if kwargs else ()
    return id(func), _signature(args, numbers), named, _signature(output, numbers)


def _signature(value: Any, numbers: bool) -> Any:
    # Each attribute of a tensor that this reads costs time in every recorded call.
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        return tuple([_signature(item, numbers) for item in value])
    try:
        stride = value.stride()  # some tensors have none, and raise
    except AttributeError:
        if isinstance(value, (tuple, list)):
            return tuple([_signature(item, numbers) for item in value])
        if isinstance(value, Sized):
            raise TypeError("a storage is a sequence of all its bytes, and a key must not keep it alive") from None
        return value
    dtype = value.dtype
    if numbers and not dtype.is_floating_point and value.numel() < 64:
        raise TypeError("the numbers may decide the summary")
    return value.shape, stride, dtype, value.device, value.requires_grad, value.layout
