"""`OpCall`, the operator call that hooks receive.

Invariant: making an OpCall computes nothing. Must not import torch, so that the pipeline can be tested without it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from threading import get_native_id
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from opintercept._core.call_site import NOWHERE, CallSite, KernelPart
from opintercept._core.errors import OpInterceptError
from opintercept._core.gemm import Gemm
from opintercept._core.record import CallRecord, PendingRecord, Phase, Summary, Timed, summary_of, taken_of
from opintercept._core.tensors import describe, is_tensor, named_tensors, nbytes, tensors_in, unflipped

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class OriginReader(Protocol):
    """Tells where calls come from. `_origin.origin.Origin` implements it.

    `read` is what the hook reads, as in `HookDeclaration.reads`, for a warning if no hook declares it.
    """

    @property
    def links(self) -> Any: ...
    def autocast(self, call: OpCall) -> Any: ...
    def call_site(self, call: OpCall, read: str) -> CallSite: ...
    def forward(self, call: OpCall, read: str) -> tuple[int | None, str | None, bool]: ...
    def lasting(self, module: Any, root: Any, code: Any, instruction: int) -> tuple[CallSite, Any] | None: ...
    def forward_of(self, operands: tuple[int, ...], lhs: int) -> tuple[CallSite, int | None, str | None] | None: ...


class NoOrigin:
    """An `OriginReader` that knows nothing of any call."""

    links = None

    def autocast(self, lhs: Any) -> None:
        return None

    def call_site(self, call: OpCall, read: str) -> CallSite:
        return NOWHERE

    def forward(self, call: OpCall, read: str) -> tuple[None, None, bool]:
        return None, None, False

    def lasting(self, module: Any, root: Any, code: Any, instruction: int) -> None:
        return None

    def forward_of(self, operands: tuple[int, ...], lhs: int) -> None:
        return None


class Owner(Protocol):
    """What a call uses of its interceptor. `Pipeline` implements it."""

    next_index: Callable[[], int]
    steps: int
    origin: OriginReader
    signature_of: Callable[..., Any]


class Spec(Protocol):
    """What a call uses of its operator's row of the table. `_ops.op.Op` implements it and says what each means."""

    @property
    def name(self) -> str: ...
    @property
    def opaque(self) -> bool: ...
    @property
    def roles(self) -> Mapping[str, tuple[int, str]]: ...
    @property
    def scales(self) -> tuple[tuple[int, str], ...]: ...
    @property
    def overwritten(self) -> Collection[str]: ...
    @property
    def dequantize(self) -> Mapping[str, Callable[..., Any]]: ...
    def argument(self, role: str, args: Any, kwargs: Any, /) -> Any: ...
    def arguments(self, func: Any, args: Any, kwargs: Any, /) -> dict[str, Any]: ...
    def contraction_dim(self, role: str, /) -> int | None: ...
    def dequantized(self, role: str, func: Any, args: Any, kwargs: Any, /) -> Any: ...
    def flops(self, args: Any, kwargs: Any, output: Any, /) -> int | None: ...
    def gemm(self, args: Any, kwargs: Any, /) -> Gemm | None: ...
    def operand(self, role: str, args: Any, kwargs: Any, /) -> Any: ...
    def replaced(self, role: str, value: Any, args: Any, kwargs: Any, /) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def result(self, func: Any, args: Any, kwargs: Any, /) -> Any: ...
    def returned(self, func: Any, args: Any, kwargs: Any, /) -> list[Any]: ...
    def scale_tensors(self, args: Any, kwargs: Any, /) -> list[Any]: ...
    def tokens(self, func: Any, args: Any, kwargs: Any, /) -> dict[int, Any]: ...
    def written(self, func: Any, args: Any, kwargs: Any, /) -> list[Any]: ...


class OpCall:
    """One operator call while it runs. Properties are computed when they are read.

    A hook may read every attribute. It assigns none: to change the call, it returns a value.
    Keep `call.record()` rather than the call, which keeps its tensors alive.

    Attributes:
        func: What torch called: an `OpOverload` at dispatch level, at function level the program's function.
        args: Positional arguments, as the operator gets them.
        kwargs: Keyword arguments, as the operator gets them.
        output: What the operator returned; None in `pre` and `error`.
        phase: `"forward"`; `"backward"` while autograd runs a graph; `"recompute"` while a checkpoint, or a
            module that a custom Function calls, runs forward during backward.
        index: 0-based number of the call in its interceptor, in the order in which calls started.
        step: The interceptor's step when the call started.
        began: When the operator started, in seconds of `time.perf_counter`; None before it has.
        elapsed: Host time of the operator in seconds; None before it has returned. Does not include
            work that the operator queued on a device.
        call_site: Where the call comes from, or None if nothing has read that yet. Hooks read `module` and `source`.
        owner: The pipeline that runs the hooks; None once the call is over.
    """

    __slots__ = (
        "__weakref__",
        "_kept",
        "_kin",
        "_spec",
        "_started",
        "args",
        "began",
        "call_site",
        "elapsed",
        "func",
        "index",
        "kwargs",
        "output",
        "owner",
        "phase",
        "step",
        "timed",
    )

    _kept: dict[Any, Any]

    def __init__(
        self,
        owner: Owner,
        spec: Spec,
        func: Any,
        phase: Phase,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int | None = None,
    ) -> None:
        self.owner: Owner | None = owner
        self._spec = spec
        self.call_site: CallSite | None = None
        self._kin: tuple[int | None, str | None, bool] | None = None
        self.func = func
        self.phase = phase
        self.args = args
        self.kwargs = kwargs
        self.output: Any = None
        self.began: float | None = None
        self._started: int | None = None
        self.elapsed: float | None = None
        self.timed: Timed | None = None  # what its device takes for it, if kernels in C++ see to that
        self.index: int = owner.next_index() if index is None else index
        self.step: int = owner.steps

    @property
    def started(self) -> int | None:
        """When the operator started, in nanoseconds since 1970 by the machine's clock; None before it has."""
        if self._started is None and self.began is not None:
            self._started = time.time_ns() - int((time.perf_counter() - self.began) * 1e9)
        return self._started

    @property
    def op(self) -> str:
        """The operator without its overload, `"aten::addmm"`; at function level the function's public name."""
        return self._spec.name

    @property
    def ops(self) -> tuple[str, ...] | None:
        """The operators that a kernel stands for which torch.compile has generated; None for other calls.

        They are those of the program, as autograd sees them: `"aten::_softmax"`, not the `"aten::exp"` in it.
        """
        ops: tuple[str, ...] | None = getattr(self.func, "ops", None) if self.op.startswith("inductor::") else None
        return ops

    @property
    def parts(self) -> tuple[KernelPart, ...]:
        """What such a kernel computes, each with its module and line, as far as that is known. Raises as `module` does.

        They are the operators that are left of those in `ops` after torch.compile has decomposed them.
        """
        return self._where("module").parts

    @property
    def opaque(self) -> bool:
        """Whether the operator multiplies inside, where no single product can be seen."""
        return self._spec.opaque

    @property
    def lhs(self) -> torch.Tensor | None:
        """The left operand, `[*b, m, k]`, or an attention's query; None if the operator table names none.

        Of a quantised operand, the values if `register_op(dequantize=...)` says how to compute them, otherwise codes.
        """
        return self._resolved("lhs")

    @property
    def rhs(self) -> torch.Tensor | None:
        """The right operand, `[*b, k, n]`, a linear's weight, `[n, k]`, or an attention's key; otherwise as `lhs`."""
        return self._resolved("rhs")

    @property
    def bias(self) -> torch.Tensor | None:
        """The tensor that is added to the product, or None."""
        return self._resolved("bias")

    @property
    def scales(self) -> tuple[torch.Tensor, ...]:
        """The scales of quantised operands that `register_op(scales=...)` names and the program passed."""
        return tuple(self._spec.scale_tensors(self.args, self.kwargs))

    def operand(self, role: str) -> torch.Tensor | None:
        """Return the operand as the operator gets it, for a hook that does not read its values.

        Torch may conjugate or negate a view lazily. `lhs`, `rhs` and `bias` copy such a view so that its values are
        right; this does not.

        Args:
            role: `"lhs"`, `"rhs"` or `"bias"`; an attention also has a `"value"`.

        Returns:
            The tensor; None if the operator has no such role or the program passed no tensor there.
        """
        tensor: torch.Tensor | None = self._spec.operand(role, self.args, self.kwargs)
        return tensor

    def _resolved(self, role: str) -> torch.Tensor | None:
        tensor = self.operand(role)
        if tensor is None:
            return None
        if role in self._spec.dequantize:
            return self.once((role, id(tensor)), lambda call: call._dequantized(role, tensor))
        return unflipped(tensor)

    def _dequantized(self, role: str, codes: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor | None = self._spec.dequantized(role, self.func, self.args, self.kwargs)
        return codes if values is None else values

    def is_quantized(self, role: str) -> bool:
        """Whether an operand holds codes, of which nobody has said how to compute the values: `dequantize` is missing.

        Args:
            role: `"lhs"` or `"rhs"`.
        """
        tensor = self.operand(role)
        if tensor is None or not self._spec.scales or role in self._spec.dequantize:
            return False
        return not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1

    def contraction_dim(self, role: str) -> int | None:
        """Return the dimension of an operand's matrices that the product sums over, or None if the operator fixes none.

        Args:
            role: `"lhs"`, for which `mm` has -1, or `"rhs"`, for which it has -2.
        """
        return self._spec.contraction_dim(role)

    def replace(self, **operands: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `(args, kwargs)` with other operands, for a `pre` hook to return. The call itself does not change.

        Args:
            operands: The new tensors by role: `lhs`, `rhs`, `bias`.

        Raises:
            TypeError: There is no role of that name.
            ValueError: The call has no tensor in that role, or has a list.

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
                raise TypeError(f"replace takes lhs=, rhs= and bias=, got {role}=")
            args, kwargs = self._spec.replaced(role, value, args, kwargs)
        return args, kwargs

    @property
    def gemm(self) -> Gemm | None:
        """The shape of the matrix product, or None if the call is not a single product."""
        return self._spec.gemm(self.args, self.kwargs)

    @property
    def flops(self) -> int | None:
        """Floating-point operations of the products, or None if no formula is known.

        A multiply-add counts as 2, and a sparse operand as if it were dense. As in torch's `FlopCounterMode`, bias and
        scaling do not count. Of a product with a packed weight it is known once the operator has run.
        """
        return self._spec.flops(self.args, self.kwargs, self.output)

    @property
    def bytes(self) -> int | None:
        """Bytes of the operands and the output, or None if a layout has no fixed size per element; 0 for a view.

        An operator without operands, such as an addition, reads all its tensors.
        """
        if getattr(self.func, "is_view", False):
            return 0
        sizes = [nbytes(t) for t in (*self._inputs(), *tensors_in(self.output))]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def _inputs(self) -> list[Any]:
        spec, args, kwargs = self._spec, self.args, self.kwargs
        if not spec.roles:
            return [tensor for name, tensor in self.tensors.items() if name.partition("[")[0] not in spec.overwritten]
        once = ("lhs",) if spec.roles.get("lhs") == spec.roles.get("rhs") else ("lhs", "rhs")  # a list with both
        operands = [tensor for role in once for tensor in tensors_in(spec.argument(role, args, kwargs))]
        return [*operands, self.operand("bias"), *self.scales]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that the operator reads, by its role or, without a role, by the name of its parameter.

        The name of a tensor in a list ends in its position, `"weights[0]"`. Tensors passed as `out=` are left out.

        Example:
            >>> import torch
            >>> from opintercept import intercept
            >>> x = torch.ones(1, 1, 4, 8)
            >>> with intercept(lambda call: print(*call.tensors)):
            ...     _ = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(4, 4))
            lhs rhs value attn_mask
        """
        arguments = self._spec.arguments(self.func, self.args, self.kwargs)
        roles: dict[int, list[str]] = {}  # by the tensor's identity; one tensor may be both operands
        for role in self._spec.roles:
            roles.setdefault(id(self.operand(role)), []).append(role)
        found: dict[str, torch.Tensor] = {}
        for name, value in arguments.items():
            for part, tensor in named_tensors(name, value):
                named = roles.get(id(tensor))
                found[named.pop(0) if named else part] = unflipped(tensor)
        return found

    def tokens(self) -> dict[int, torch.Tensor]:
        """What the call reads or writes of paged caches, by the `id` of each cache: `[tokens, ...]`, copied.

        Empty for an operator of which no pack of opintercept says how it finds them.
        """
        found: dict[int, torch.Tensor] = self._spec.tokens(self.func, self.args, self.kwargs)
        return found

    @property
    def overwritten(self) -> Collection[str]:
        """The names of the parameters that the operator writes to without reading them."""
        return self._spec.overwritten

    @property
    def options(self) -> dict[str, Any]:
        """Every other argument by the name of its parameter, defaults included: `alpha`, `is_causal`."""
        arguments = self._spec.arguments(self.func, self.args, self.kwargs)
        return {name: value for name, value in arguments.items() if not any(named_tensors(name, value))}

    @property
    def written(self) -> list[torch.Tensor]:
        """The program's tensors that the operator writes to: those of `out=` and in-place forms, otherwise none."""
        tensors: list[torch.Tensor] = self._spec.written(self.func, self.args, self.kwargs)
        return tensors

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype in which autocast runs this call, or None.

        Raises:
            OpInterceptError: The call is over.
        """
        dtype: torch.dtype | None = self._live("autocast").origin.autocast(self)
        return dtype

    @property
    def module(self) -> str | None:
        """Qualified name of the innermost `nn.Module`, `"encoder.layers.0.linear1"`; `""` outside of all modules.

        The outermost module goes by its class, `"Net"`. If the program runs several models, the first one has plain
        names. Names in the others begin with the class, `"Critic.linear1"`, and with a number if several models of
        the class are alive, `"Critic#2.linear1"`. Wrappers that torch puts around a model are not part of a name.

        A backward call has the name of the forward call whose gradient it computes, or None if that is unknown.
        A module that is registered in several places has several names; this is the first, and `aliases` has all.

        Raises:
            OpInterceptError: The call is over.
        """
        return self._where("module").module

    @property
    def aliases(self) -> tuple[str, ...]:
        """Every name of the module, `module` first. Raises as `module` does."""
        return self._where("module").aliases

    @property
    def source(self) -> str | None:
        """The program's line that made the call, `"model.py:42 in forward"`. In backward, and raising, as `module`."""
        return self._where("source").source

    @property
    def forward(self) -> int | None:
        """Of a backward call, the index of the forward call whose gradient it computes; None if unknown.

        Raises:
            OpInterceptError: The call is over.
        """
        return self._relation("forward")[0]

    @property
    def grad_of(self) -> Literal["lhs", "rhs"] | None:
        """Of a backward call, the operand of `forward` whose gradient it computes; None if unknown."""
        return self._relation("forward")[1]  # type: ignore[return-value]

    @property
    def gradient(self) -> torch.Tensor | None:
        """Of a backward call, in `post`, the gradient with respect to the operand `grad_of`; None if unknown.

        It is `output`, or a view of it, transposed to the shape that the operand had in `forward`. Autograd may still
        multiply it by `alpha` or sum it over broadcast dimensions. Raises as `forward` does.
        """
        _, operand, transposed = self._relation("gradients")
        if operand is None or not is_tensor(self.output):
            return None
        return self.output.mT if transposed else self.output  # type: ignore[no-any-return]

    @property
    def grad_output(self) -> torch.Tensor | None:
        """Of a backward call, the gradient with respect to the output of `forward`; None if unknown."""
        _, operand, transposed = self._relation("gradients")
        if operand is None:
            return None
        of = self.lhs if (operand == "lhs") is not transposed else self.rhs
        return of.mT if transposed and of is not None else of

    def _where(self, read: str) -> CallSite:
        if self.call_site is None:
            self.call_site = self._live(read).origin.call_site(self, read)
        return self.call_site

    def _relation(self, read: str) -> tuple[int | None, str | None, bool]:
        if self._kin is None:
            self._kin = self._live(read).origin.forward(self, read)
        return self._kin

    def _live(self, read: str) -> Owner:
        if self.owner is None:
            raise OpInterceptError(
                f"{read} can only be read while the operator runs, and this call is over; "
                "keep call.record() instead of the call"
            )
        return self.owner

    def once(self, key: Hashable, compute: Callable[[OpCall], T]) -> T:
        """Return `compute(call)`, computed only the first time for each key.

        This lets a hook decide in `pre` and look the decision up in `post`.
        """
        try:
            kept = self._kept
        except AttributeError:  # most calls need no dict
            kept = self._kept = {}
        if key not in kept:
            kept[key] = compute(self)
        return kept[key]  # type: ignore[no-any-return]

    def without_values(self, shape_only: Callable[[Any], Any]) -> OpCall:
        """Return a copy to keep after the call is over: with its origin, and with tensors that have no values.

        Args:
            shape_only: Makes a tensor without values from one with values.
        """

        def strip(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)([strip(item) for item in value])
            return shape_only(value) if is_tensor(value) else value

        later = copy.copy(self)
        later.call_site, later._kin = self._where("module"), self._relation("forward")
        later.owner = None
        later.args = tuple(strip(value) for value in self.args)
        later.kwargs = {name: strip(value) for name, value in self.kwargs.items()}
        return later

    def record(self) -> CallRecord:
        """Return a summary of the call as plain data, to keep or to write as JSON.

        Raises:
            OpInterceptError: The call is over.
        """
        return self.note().record()

    def note(self) -> PendingRecord:
        """Return what `record` needs, to put together later: a hook that keeps many records keeps notes instead.

        Raises:
            OpInterceptError: The call is over.
        """
        owner = self._live("record")
        forward, grad_of, _ = self._relation("record") if self.phase == "backward" else (None, None, False)
        return PendingRecord(
            summary_of(self, owner.signature_of),
            self.index,
            self.step,
            self.phase,
            owner.origin.call_site(self, "record") if self.call_site is None else self.call_site,
            forward,
            grad_of,
            owner.origin.autocast(self),
            self.started,
            get_native_id(),
            self.elapsed,
            taken=taken_of(self),
        )

    @property
    def summary(self) -> Summary:
        """The fields of a record that calls share if their arguments and outputs look alike.

        They are computed once for all these calls, since a model makes many calls with few shapes.

        Raises:
            OpInterceptError: The call is over.
        """
        return summary_of(self, self._live("summary").signature_of)

    def __str__(self) -> str:
        shown = ", ".join(describe(value) for value in (*self.args, *self.kwargs.values()))
        return f"{self.op}({shown})"

    def __repr__(self) -> str:
        return f"<OpCall {self.index}: {self}>"
