"""What a hook is given (`OpCall`, alive) and what may be kept of it (`CallRecord`, plain data).

Invariant: building an OpCall computes nothing; a CallRecord holds no tensor.
Must not import torch: the pipeline is tested without it.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from types import CodeType, NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from opintercept._errors import OpInterceptError

if TYPE_CHECKING:
    import torch

Phase = Literal["forward", "backward", "recompute"]


class Place:
    """Where in the program a call comes from.

    Attributes:
        aliases: The names of the innermost `nn.Module`, `("",)` outside of all modules, `()` where it cannot be told.
            Several for a module that is registered in several places.
    """

    __slots__ = ("_code", "_instruction", "_line", "aliases")

    def __init__(
        self,
        aliases: tuple[str, ...],
        code: CodeType | None,
        instruction: int,
        line: tuple[str, int, str] | None = None,
    ) -> None:
        self.aliases = aliases
        self._code = code
        self._instruction = instruction
        self._line = line  # file, number and function, in place of the code

    @property
    def module(self) -> str | None:
        """The first of the names."""
        return self.aliases[0] if self.aliases else None

    @property
    def source(self) -> str | None:
        """The line, `"model.py:42 in forward"`; worked out when asked for, which takes longer than the rest."""
        if self._code is None:
            return None if self._line is None else "{}:{} in {}".format(_file(self._line[0]), *self._line[1:])
        key = (id(self._code), self._instruction)
        known = _sources.get(key)
        if known is None:
            if len(_sources) >= 4096:  # a program that makes code without end, a notebook say
                _sources.clear()
            known = _sources[key] = (self._code, _source(self._code, self._instruction))
        return known[1]

    def common(self, other: Place) -> Place:
        """What two places have in common; the rest cannot be told."""
        aliases = self.aliases if self.aliases == other.aliases else ()
        mine, its = ((place._code, place._instruction, place._line) for place in (self, other))
        return Place(aliases, *(mine if mine == its else (None, -1, None)))


_sources: dict[tuple[int, int], tuple[CodeType, str | None]] = {}


def _source(code: CodeType, instruction: int) -> str | None:
    shown = _file(code.co_filename)
    for start, end, line in code.co_lines():
        if start <= instruction < end:
            return f"{shown}:{line} in {code.co_name}"
    return None


def _file(name: str) -> str:
    """What a file is called in a source line: a notebook's cell has none, and maybe a number."""
    number: object = None
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        # IPython names a cell after a hash of its text, and keeps the number here. The attribute is private to it.
        number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(name)
    if number is None and (found := _NUMBERED_CELL.search(name)):
        number = found[1]
    if number is not None:
        return f"<cell {number}>"
    if (name.startswith("<") and name.endswith(">")) or _CELL.search(name):
        return "<cell>"
    return os.path.basename(name).rpartition(">.")[2]  # of torch.package: <torch_package_0>.net.py


_CELL = re.compile(r"(?:^|[/\\])(?:ipykernel_\d+[/\\][^/\\]*|ipython-input-[^/\\]*)$")
_NUMBERED_CELL = re.compile(r"(?:^<|[/\\])ipython-input-(\d+)-[^/\\]*$")

NOWHERE = Place((), None, -1)


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


class OpSpec(Protocol):
    """What the op table knows of one operator; `_ops.Op` is the implementation."""

    @property
    def name(self) -> str: ...
    @property
    def opaque(self) -> bool: ...
    @property
    def roles(self) -> Mapping[str, tuple[int, str]]: ...
    def argument(self, role: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def operand(self, role: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def replaced(
        self, role: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def arguments(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]: ...
    def summed(self, role: str) -> int | None: ...
    def gemm(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gemm | None: ...
    def flops(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None: ...
    def written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]: ...


class Origin(Protocol):
    """Where calls come from; `_origin.Origin` is the implementation."""

    @property
    def links(self) -> Any: ...
    def autocast(self, call: OpCall) -> Any: ...
    def place(self, call: OpCall) -> Place: ...
    def forward(self, call: OpCall) -> tuple[int | None, str | None, bool]: ...


class Owner(Protocol):
    """What a call knows of the interceptor that it belongs to; `_pipeline.Pipeline` is the implementation."""

    next_index: Callable[[], int]
    steps: int
    origin: Origin
    look: Callable[..., Any]


class OpCall:
    """One operator call while it runs. Everything but `phase` and the counters is computed when asked for.

    A hook may read any attribute; to change the call it returns a value instead of assigning one.
    Keep `call.record()`, not the call, beyond the hook: a call holds its tensors.

    Attributes:
        func: What torch handed over: an `OpOverload`, or the function the program called.
        args: Positional arguments, as the operator gets them.
        kwargs: Keyword arguments, as the operator gets them.
        output: What the operator returned; None in `pre` and `error`.
        phase: `"forward"`; `"backward"` while an autograd graph runs; `"recompute"` where a checkpoint runs a
            forward call again in there.
        index: 0-based number of the call in its interceptor, in the order in which calls started.
        step: The interceptor's step when the call started.
        elapsed: Host time of the operator in seconds; None before it has returned. Says nothing about
            work that is queued on a device.
    """

    __slots__ = (
        "__weakref__",
        "_kin",
        "_pipeline",
        "_place",
        "_spec",
        "_verdicts",
        "args",
        "elapsed",
        "func",
        "index",
        "kwargs",
        "output",
        "phase",
        "step",
    )

    _verdicts: dict[Any, bool]

    def __init__(
        self,
        pipeline: Owner,
        spec: OpSpec,
        func: Any,
        phase: Phase,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._pipeline: Owner | None = pipeline  # None when the call is over
        self._spec = spec
        self._place: Place | None = None
        self._kin: tuple[int | None, str | None, bool] | None = None
        self.func = func
        self.phase = phase
        self.args = args
        self.kwargs = kwargs
        self.output: Any = None
        self.elapsed: float | None = None
        self.index: int = pipeline.next_index()
        self.step: int = pipeline.steps

    @property
    def op(self) -> str:
        """The operator without its overload, `"aten::addmm"`, or the function's public name."""
        return self._spec.name

    @property
    def opaque(self) -> bool:
        """Whether the operator hides matmuls that cannot be seen one by one."""
        return self._spec.opaque

    @property
    def lhs(self) -> torch.Tensor | None:
        """The left operand, `[*b, m, k]`; the query of an attention; None where the table names none."""
        return self._operand("lhs")

    @property
    def rhs(self) -> torch.Tensor | None:
        """The right operand, `[*b, k, n]`; a linear's weight is `[n, k]`; the key of an attention."""
        return self._operand("rhs")

    @property
    def bias(self) -> torch.Tensor | None:
        """What is added to the product, or None."""
        return self._operand("bias")

    def _passed(self, role: str) -> torch.Tensor | None:
        """The operand as it is, for what reads no values: resolving a lazily flipped view is a copy."""
        tensor: torch.Tensor | None = self._spec.operand(role, self.args, self.kwargs)
        return tensor

    def _operand(self, role: str) -> torch.Tensor | None:
        tensor = self._passed(role)
        return None if tensor is None else _unflipped(tensor)

    def replace(self, **operands: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `(args, kwargs)` with other operands, for a `pre` to return; the call stays as it is.

        Args:
            operands: By role: `lhs`, `rhs`, `bias`.

        Raises:
            TypeError: A role of another name.
            ValueError: The call has no tensor in that role, or a list of them.

        Example:
            >>> import torch
            >>> from opintercept import intercept
            >>> class Double:
            ...     def pre(self, call):
            ...         return call.replace(lhs=call.lhs * 2)
            >>> with intercept(Double()):
            ...     torch.ones(1, 3) @ torch.ones(3, 1)
            tensor([[6.]])
        """
        args, kwargs = self.args, self.kwargs
        for role, value in operands.items():
            if role not in ("lhs", "rhs", "bias"):
                raise TypeError(f"an operand must be one of 'lhs', 'rhs', 'bias', got {role!r}")
            args, kwargs = self._spec.replaced(role, value, args, kwargs)
        return args, kwargs

    @property
    def gemm(self) -> Gemm | None:
        """The matrix product's shape, or None where there is no single one."""
        return self._spec.gemm(self.args, self.kwargs)

    @property
    def flops(self) -> int | None:
        """Floating-point operations of the products, 2 a multiply-add, sparse operands as if dense.

        None where no formula is known. Bias and scaling are not counted, as in `FlopCounterMode`.
        """
        return self._spec.flops(self.args, self.kwargs)

    @property
    def bytes(self) -> int | None:
        """Bytes of the operands and the output; None where a layout has no plain size."""
        sizes = [nbytes(t) for t in (*self._inputs(), *_tensors(self.output))]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def _inputs(self) -> list[Any]:
        spec, args, kwargs = self._spec, self.args, self.kwargs
        lhs, rhs = spec.argument("lhs", args, kwargs), spec.argument("rhs", args, kwargs)
        found = [*_tensors(lhs), *([] if rhs is lhs else _tensors(rhs)), self._passed("bias")]
        return found

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that the operator reads, by role where it has one, else by the name of its parameter.

        A tensor in a list has its place in the name, `"weights[0]"`. Tensors of `out=` are not read.

        Example:
            >>> import torch
            >>> from opintercept import intercept
            >>> x = torch.ones(1, 1, 4, 8)
            >>> with intercept(lambda call: print(*call.tensors)):
            ...     _ = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(4, 4))
            lhs rhs value attn_mask
        """
        arguments = self._spec.arguments(self.func, self.args, self.kwargs)
        roles: dict[int, list[str]] = {}  # of each tensor by identity: one may be both operands
        for role in self._spec.roles:
            roles.setdefault(id(self._passed(role)), []).append(role)
        found: dict[str, torch.Tensor] = {}
        for name, value in arguments.items():
            for part, tensor in _named_tensors(name, value):
                named = roles.get(id(tensor))
                found[named.pop(0) if named else part] = _unflipped(tensor)
        return found

    @property
    def options(self) -> dict[str, Any]:
        """Every argument that is no tensor, by the name of its parameter, defaults included: `alpha`, `is_causal`."""
        arguments = self._spec.arguments(self.func, self.args, self.kwargs)
        return {name: value for name, value in arguments.items() if not any(_named_tensors(name, value))}

    @property
    def written(self) -> list[torch.Tensor]:
        """The caller's tensors that the operator writes its result to, of `out=` and in-place forms; mostly none."""
        tensors: list[torch.Tensor] = self._spec.written(self.func, self.args, self.kwargs)
        return tensors

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype that autocast runs this call in, or None.

        Raises:
            OpInterceptError: The call is over, and with it the state that this reads.
        """
        dtype: torch.dtype | None = self._live("autocast").origin.autocast(self)
        return dtype

    @property
    def module(self) -> str | None:
        """Qualified name of the innermost `nn.Module`, `"encoder.layers.0.linear1"`; `""` outside of all modules.

        The outermost module is called by its class, `"Net"`. If the program runs several models, the names in the
        first one stay as they are, and those in the others begin with the class, `"Critic.linear1"`, numbered where
        several of a class live, `"Critic#2.linear1"`. What torch wraps around a model is not part of a name.

        In backward the name is that of the forward call whose gradient is computed; None where that cannot be told.
        If a module is registered in several places, this is the first of its names; see `aliases`.

        Raises:
            OpInterceptError: The call is over, and with it the stack that this reads.
        """
        return self._where().module

    @property
    def aliases(self) -> tuple[str, ...]:
        """Every name of the module, `module` first; raises as `module` does."""
        return self._where().aliases

    @property
    def source(self) -> str | None:
        """The line that made the call, `"model.py:42 in forward"`, outside of torch; else as `module`."""
        return self._where().source

    @property
    def forward(self) -> int | None:
        """In backward, the index of the forward call whose gradient this computes; else, and if unknown, None.

        Raises:
            OpInterceptError: The call is over.
        """
        return self._relation()[0]

    @property
    def grad_of(self) -> Literal["lhs", "rhs"] | None:
        """In backward, the operand of `forward` whose gradient this is; None if that cannot be told."""
        return self._relation()[1]  # type: ignore[return-value]

    @property
    def gradient(self) -> torch.Tensor | None:
        """In backward after the operator ran, the gradient with respect to `grad_of`; None if that cannot be told.

        It is `output`, or a view of it that is transposed to the operand's shape, as the operator of `forward`
        got that operand: before autograd multiplies it by `alpha` or sums over what was broadcast. Raises as
        `forward` does.
        """
        _, operand, transposed = self._relation()
        if operand is None or not is_tensor(self.output):
            return None
        return self.output.mT if transposed else self.output  # type: ignore[no-any-return]

    @property
    def grad_output(self) -> torch.Tensor | None:
        """In backward, the gradient with respect to the output of `forward`, likewise; None if that cannot be told."""
        _, operand, transposed = self._relation()
        if operand is None:
            return None
        of = self.lhs if (operand == "lhs") is not transposed else self.rhs
        return of.mT if transposed and of is not None else of

    def _where(self) -> Place:
        if self._place is None:
            self._place = self._live("module").origin.place(self)
        return self._place

    def _relation(self) -> tuple[int | None, str | None, bool]:
        if self._kin is None:
            self._kin = self._live("forward").origin.forward(self)
        return self._kin

    def _live(self, what: str) -> Owner:
        if self._pipeline is None:
            raise OpInterceptError(
                f"{what} can only be read while the operator runs, got a call that is over; "
                "keep call.record() instead of the call"
            )
        return self._pipeline

    def without_values(self, shape_only: Callable[[Any], Any]) -> OpCall:
        """The call for a later time: where it came from, and tensors with a shape and no values.

        Args:
            shape_only: Makes such a tensor.
        """

        def strip(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)([strip(item) for item in value])
            return shape_only(value) if is_tensor(value) else value

        later = copy.copy(self)
        later._place, later._kin = self._where(), self._relation()
        later._pipeline = None
        later.args = tuple(strip(value) for value in self.args)
        later.kwargs = {name: strip(value) for name, value in self.kwargs.items()}
        return later

    def record(self) -> CallRecord:
        """Summarise the call as plain data that may be kept and written as JSON."""
        return self.note().record()

    def note(self) -> Note:
        """What `record` needs, taken now and put together later, for those who keep many."""
        origin = self._live("a record").origin
        return Note(
            self._summary(),
            self.index,
            self.step,
            self.phase,
            origin.place(self) if self._place is None else self._place,
            self._relation() if self.phase == "backward" else _NO_KIN,
            origin.autocast(self),
            self.elapsed,
        )

    def _summary(self) -> Summary:
        """Worked out once for all calls whose arguments look alike: a model has many calls and few shapes."""
        look = self._live("a record").look
        try:
            key = look(self.func, self.args, self.kwargs, self.output)
            known = _summaries.get(key)
        except Exception:  # an exotic tensor, a symbolic size, a subclass whose attributes raise
            return self._summarise()
        if known is None:
            if len(_summaries) >= 4096:  # a program whose shapes never come again
                _summaries.clear()
            known = _summaries[key] = (self._summarise(), self.func)
        return known[0]

    def _summarise(self) -> Summary:
        outputs = [TensorMeta.of(t) for t in _tensors(self.output)]
        return Summary(
            op=self.op,
            func=str(self.func) if hasattr(self.func, "_schema") else self.op,
            lhs=TensorMeta.of(self._passed("lhs")),
            rhs=TensorMeta.of(self._passed("rhs")),
            bias=TensorMeta.of(self._passed("bias")),
            output=outputs[0] if len(outputs) == 1 else tuple(outputs) or None,
            gemm=self.gemm,
            flops=self.flops,
            bytes=self.bytes,
            opaque=self.opaque,
        )

    def __str__(self) -> str:
        shown = ", ".join(describe(value) for value in (*self.args, *self.kwargs.values()))
        return f"{self.op}({shown})"

    def __repr__(self) -> str:
        return f"<OpCall {self.index}: {self}>"


def _unflipped(tensor: torch.Tensor) -> torch.Tensor:
    # Below torch's conjugate and negative keys arrive lazily flipped views, and arithmetic on those is silently
    # wrong in a dispatch mode.
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _named_tensors(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if is_tensor(value):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from _named_tensors(f"{name}[{place}]", part)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor without its values. `stride` is None for layouts that have none."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    stride: tuple[int, ...] | None
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Any) -> TensorMeta | None:
        """Describe `tensor`; None for what is not a tensor."""
        if not is_tensor(tensor):
            return None
        try:
            stride = tuple(tensor.stride()) if is_strided(tensor) else None
            return cls(shape_of(tensor), dtype_of(tensor), str(tensor.device), stride, bool(tensor.requires_grad))
        except Exception:  # a subclass whose attributes raise; what it says of itself is all there is
            return cls((), f"<{type(tensor).__name__}>", "unknown", None, False)

    def __str__(self) -> str:
        device = "" if self.device == "cpu" else f"@{self.device}"
        return f"{self.dtype}{list(self.shape)}{device}"


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


_summaries: dict[Any, tuple[Summary, Any]] = {}  # with the operator, whose identity is in the key
_NO_KIN = (None, None, False)
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


def is_tensor(value: Any) -> bool:
    """Tell a tensor by its look, so that no torch has to be imported."""
    try:
        return hasattr(value, "dtype") and hasattr(value, "device") and hasattr(value, "requires_grad")
    except Exception:  # a subclass of a tensor whose dtype raises
        return all(hasattr(type(value), name) for name in ("dtype", "device", "requires_grad"))


def is_strided(tensor: Any) -> bool:
    """Whether the tensor is one dense, strided array."""
    return str(tensor.layout) == "torch.strided" and not tensor.is_nested


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape; a ragged dimension of a nested tensor is -1."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    dims = []
    for dim in range(tensor.dim()):
        try:
            dims.append(int(tensor.size(dim)))
        except (AttributeError, RuntimeError, TypeError, ValueError):
            dims.append(-1)
    return tuple(dims)


def nbytes(tensor: Any) -> int | None:
    """Bytes of a tensor's elements; 0 for no tensor, None for a layout without a plain size."""
    if not is_tensor(tensor):
        return 0
    return int(tensor.numel() * tensor.element_size()) if is_strided(tensor) else None


def dtype_name(dtype: Any) -> str:
    """`"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(tensor: Any) -> str:
    """The name of a tensor's dtype; `"?"` for a subclass that does not say it."""
    try:
        return dtype_name(tensor.dtype)
    except Exception:
        return "?"


def describe(value: Any) -> str:
    """Write a value for a message: `float32[2, 3]@cuda:0`, a list by its elements, the rest by repr."""
    meta = TensorMeta.of(value)
    if meta is not None:
        return str(meta)
    if isinstance(value, (list, tuple)):
        shown = [describe(item) for item in value[:4]] + (["..."] if len(value) > 4 else [])
        return f"[{', '.join(shown)}]"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors among arguments, those in lists too, in order."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            found += tensors_of(tuple(value), {})
        elif is_tensor(value):
            found.append(value)
    return found


def _tensors(output: Any) -> list[Any]:
    if is_tensor(output):
        return [output]
    return [t for t in output if is_tensor(t)] if isinstance(output, (list, tuple)) else []
