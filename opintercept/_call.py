"""What a hook is given: `OpCall`, one operator call while it runs.

Invariant: building an OpCall computes nothing. Must not import torch: the pipeline is tested without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from opintercept._errors import OpInterceptError

if TYPE_CHECKING:
    import torch
from opintercept._origin.place import Place
from opintercept._record import CallRecord, Gemm, Note, Phase, Summary, summary_of, taken_of
from opintercept._tensors import describe, is_tensor, named_tensors, nbytes, tensors_in, unflipped

T = TypeVar("T")


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
    def place(self, call: OpCall, read: str) -> Place: ...
    def forward(self, call: OpCall, read: str) -> tuple[int | None, str | None, bool]: ...


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
        place: Where the call comes from, once that is known; hooks read `module` and `source`.
        owner: The pipeline that runs the hooks; None when the call is over.
    """

    __slots__ = (
        "__weakref__",
        "_kept",
        "_kin",
        "_spec",
        "args",
        "elapsed",
        "func",
        "index",
        "kwargs",
        "output",
        "owner",
        "phase",
        "place",
        "step",
    )

    _kept: dict[Any, Any]

    def __init__(
        self,
        owner: Owner,
        spec: OpSpec,
        func: Any,
        phase: Phase,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.owner: Owner | None = owner
        self._spec = spec
        self.place: Place | None = None
        self._kin: tuple[int | None, str | None, bool] | None = None
        self.func = func
        self.phase = phase
        self.args = args
        self.kwargs = kwargs
        self.output: Any = None
        self.elapsed: float | None = None
        self.index: int = owner.next_index()
        self.step: int = owner.steps

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
        return self._resolved("lhs")

    @property
    def rhs(self) -> torch.Tensor | None:
        """The right operand, `[*b, k, n]`; a linear's weight is `[n, k]`; the key of an attention."""
        return self._resolved("rhs")

    @property
    def bias(self) -> torch.Tensor | None:
        """What is added to the product, or None."""
        return self._resolved("bias")

    def operand(self, role: str) -> torch.Tensor | None:
        """The operand as the operator gets it, for a hook that reads no values.

        `lhs`, `rhs` and `bias` resolve views with a lazy conjugation or negation, and that is a copy. This does not.

        Args:
            role: `"lhs"`, `"rhs"`, `"bias"`, or another role of the operator: `"value"` of an attention.

        Returns:
            The tensor, or None where the operator has no such role or the caller passed no tensor.
        """
        tensor: torch.Tensor | None = self._spec.operand(role, self.args, self.kwargs)
        return tensor

    def _resolved(self, role: str) -> torch.Tensor | None:
        tensor = self.operand(role)
        return None if tensor is None else unflipped(tensor)

    def summed(self, role: str) -> int | None:
        """The dimension of each matrix in `role` that the product sums over: -1 of the lhs and -2 of the rhs of a `mm`.

        None where the operator does not fix it.
        """
        return self._spec.summed(role)

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
        sizes = [nbytes(t) for t in (*self._inputs(), *tensors_in(self.output))]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def _inputs(self) -> list[Any]:
        spec, args, kwargs = self._spec, self.args, self.kwargs
        lhs, rhs = spec.argument("lhs", args, kwargs), spec.argument("rhs", args, kwargs)
        found = [*tensors_in(lhs), *([] if rhs is lhs else tensors_in(rhs)), self.operand("bias")]
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
            roles.setdefault(id(self.operand(role)), []).append(role)
        found: dict[str, torch.Tensor] = {}
        for name, value in arguments.items():
            for part, tensor in named_tensors(name, value):
                named = roles.get(id(tensor))
                found[named.pop(0) if named else part] = unflipped(tensor)
        return found

    @property
    def options(self) -> dict[str, Any]:
        """Every argument that is no tensor, by the name of its parameter, defaults included: `alpha`, `is_causal`."""
        arguments = self._spec.arguments(self.func, self.args, self.kwargs)
        return {name: value for name, value in arguments.items() if not any(named_tensors(name, value))}

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
        return self._where("module").module

    @property
    def aliases(self) -> tuple[str, ...]:
        """Every name of the module, `module` first; raises as `module` does."""
        return self._where("module").aliases

    @property
    def source(self) -> str | None:
        """The line that made the call, `"model.py:42 in forward"`, outside of torch; else as `module`."""
        return self._where("source").source

    @property
    def forward(self) -> int | None:
        """In backward, the index of the forward call whose gradient this computes; else, and if unknown, None.

        Raises:
            OpInterceptError: The call is over.
        """
        return self._relation("forward")[0]

    @property
    def grad_of(self) -> Literal["lhs", "rhs"] | None:
        """In backward, the operand of `forward` whose gradient this is; None if that cannot be told."""
        return self._relation("forward")[1]  # type: ignore[return-value]

    @property
    def gradient(self) -> torch.Tensor | None:
        """In backward after the operator ran, the gradient with respect to `grad_of`; None if that cannot be told.

        It is `output`, or a view of it that is transposed to the operand's shape, as the operator of `forward`
        got that operand: before autograd multiplies it by `alpha` or sums over what was broadcast. Raises as
        `forward` does.
        """
        _, operand, transposed = self._relation("gradients")
        if operand is None or not is_tensor(self.output):
            return None
        return self.output.mT if transposed else self.output  # type: ignore[no-any-return]

    @property
    def grad_output(self) -> torch.Tensor | None:
        """In backward, the gradient with respect to the output of `forward`, likewise; None if that cannot be told."""
        _, operand, transposed = self._relation("gradients")
        if operand is None:
            return None
        of = self.lhs if (operand == "lhs") is not transposed else self.rhs
        return of.mT if transposed and of is not None else of

    def _where(self, read: str) -> Place:
        if self.place is None:
            self.place = self._live(read).origin.place(self, read)
        return self.place

    def _relation(self, read: str) -> tuple[int | None, str | None, bool]:
        if self._kin is None:
            self._kin = self._live(read).origin.forward(self, read)
        return self._kin

    def _live(self, read: str) -> Owner:
        if self.owner is None:
            raise OpInterceptError(
                f"{read} can only be read while the operator runs, got a call that is over; "
                "keep call.record() instead of the call"
            )
        return self.owner

    def once(self, key: Hashable, compute: Callable[[OpCall], T]) -> T:
        """Return `compute(call)`, computed the first time that the call is asked with this key.

        For a hook that decides something in `pre` and needs the answer again in `post`.
        """
        try:
            kept = self._kept
        except AttributeError:  # most calls are never asked
            kept = self._kept = {}
        if key not in kept:
            kept[key] = compute(self)
        return kept[key]  # type: ignore[no-any-return]

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
        later.place, later._kin = self._where("module"), self._relation("forward")
        later.owner = None
        later.args = tuple(strip(value) for value in self.args)
        later.kwargs = {name: strip(value) for name, value in self.kwargs.items()}
        return later

    def record(self) -> CallRecord:
        """Summarise the call as plain data that may be kept and written as JSON."""
        return self.note().record()

    def note(self) -> Note:
        """What `record` needs, taken now and put together later, for those who keep many."""
        owner = self._live("record")
        forward, grad_of, _ = self._relation("record") if self.phase == "backward" else (None, None, False)
        return Note(
            summary_of(self, owner.look),
            self.index,
            self.step,
            self.phase,
            owner.origin.place(self, "record") if self.place is None else self.place,
            forward,
            grad_of,
            owner.origin.autocast(self),
            self.elapsed,
            taken_of(self),
        )

    @property
    def summary(self) -> Summary:
        """The fields of a record that all calls with arguments of the same look share.

        They are computed once for all these calls: a model has many calls and few shapes.
        """
        return summary_of(self, self._live("summary").look)

    def __str__(self) -> str:
        shown = ", ".join(describe(value) for value in (*self.args, *self.kwargs.values()))
        return f"{self.op}({shown})"

    def __repr__(self) -> str:
        return f"<OpCall {self.index}: {self}>"
