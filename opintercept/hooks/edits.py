"""Hooks that change operands or outputs: `FakeQuantize`, `Noise` and `BitFlip`.

Invariant: they draw from their own generators, and they refuse tensors that they cannot edit.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from opintercept._core.call import OpCall
from opintercept._core.checks import check_choice, check_count
from opintercept._core.errors import OpInterceptError, OpInterceptWarning, caller_level
from opintercept._core.hook import Read
from opintercept._core.record import Phase
from opintercept._core.tables import Held
from opintercept._core.tensors import describe, dtype_name, is_strided
from opintercept._kit.copyable import Copyable
from opintercept._kit.roles import Generators, checked_roles, checked_seed
from opintercept._ops.table import row_of
from opintercept._values.hash import WORDS
from opintercept._values.read import first_output, in_graph_capture, in_memory, without_graph

_ROLES = ("lhs", "rhs", "bias", "output")
_REAL = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_NO_BITS = _COMPLEX | {torch.bool}


class _Edit(Held, Copyable):
    """Replaces the tensors in the roles `of` by what `edited` returns.

    Leaves tensors without values alone: meta and fake tensors, tensors that a torch.func transform has wrapped, and
    tensors whose memory the program has freed.
    """

    reads: tuple[Read, ...] = ()

    def __init__(self, of: str | Iterable[str]) -> None:
        self.of = checked_roles(of, _ROLES)
        self._operands = [role for role in ("lhs", "rhs", "bias") if role in self.of]

    def _held(self) -> str:
        """The settings: what is public and no list of what has happened."""
        settings = {name: value for name, value in vars(self).items() if name[0] != "_" and name != "log"}
        return ", ".join(f"{name}={value!r}" for name, value in settings.items())

    def pre(self, call: OpCall) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Replace the operands asked for."""
        operands = {role: getattr(call, role) for role in self._operands}
        operands = {role: tensor for role, tensor in operands.items() if tensor is not None and in_memory(tensor)}
        edited = {role: self.edited(tensor, role, call) for role, tensor in operands.items()}
        return call.replace(**edited) if any(edited[role] is not operands[role] for role in edited) else None

    def post(self, call: OpCall) -> Any:
        """Replace the output, or the first of several, if asked for."""
        output = call.output
        first = first_output(output)
        if "output" not in self.of or not isinstance(first, torch.Tensor) or not in_memory(first):
            return None
        edited = self.edited(first, "output", call)
        return edited if first is output else type(output)([edited if each is first else each for each in output])

    def edited(self, tensor: torch.Tensor, role: str, call: OpCall) -> torch.Tensor:
        """Return the tensor to use instead."""
        raise NotImplementedError

    def _check(self, allowed: bool, what: str, tensor: torch.Tensor, role: str, call: OpCall) -> None:
        if not allowed or not is_strided(tensor):
            raise OpInterceptError(
                f"{type(self).__name__} can only edit dense {what} tensors, got {describe(tensor)} with "
                f"{tensor.layout} as the {role} of {call.op}; leave such calls out with hooks.when(op=...) or "
                "hooks.when(dtype=...)"
            )


def _straight_through(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values` as a tensor that autograd takes for a copy of `tensor`."""
    if not tensor.requires_grad:
        return values
    return without_graph(tensor.clone().copy_, values)


def _refuse_in_graph(tensor: torch.Tensor, hook: str) -> None:
    if in_graph_capture(tensor):
        raise OpInterceptError(
            f"{hook} draws anew for each call, but a CUDA graph would capture one draw and repeat it; capture the "
            "graph outside the block"
        )


class FakeQuantize(_Edit):
    """Rounds operands to the values of a low-precision dtype, with a scale computed for each call.

    The operator still runs in the operands' dtype, so this shows what precision costs, not what speed it gains. An
    empty tensor stays as it is. A tensor or channel that contains NaN or infinity becomes NaN.

    At dispatch level the edit is straight-through: the backward pass is that of the operator with its original
    operands. The products of the backward pass are rounded too; `when(..., phase="forward")` leaves them out. At
    function level autograd differentiates the product of the rounded operands and takes the rounding for a copy (the
    straight-through estimator of Bengio et al. 2013, arXiv:1308.3432), so each operand's gradient is computed with
    the other one rounded.

    Args:
        dtype: `torch.int8`, `torch.float8_e4m3fn` or `torch.float8_e5m2`, or its name.
        of: One or more of `"lhs"`, `"rhs"`, `"bias"` and `"output"`.
        per: `"tensor"` uses one scale. `"channel"` uses one for each row of the lhs and each column of the rhs, in
            each batch, since these scales factor out of a product (Dettmers et al. 2022, arXiv:2208.07339, section
            3.1); it does not work for bias and output. Of a convolution, whose patches overlap, it uses one for each
            sample of the input and each output channel of the weight. Operands without such channels stay as they
            are: those of attention, and of the backward pass of a convolution. `skipped` counts them by operator, and
            a warning says so when a block ends.
        symmetric: For int8, True uses `scale = amax / 127`, zero at 0 and values from -127 to 127 (Wu et al. 2020,
            arXiv:2004.09602, section 3.1.2). False is affine: `scale = (max - min) / 255` with a zero point and
            values from -128 to 127, where the range is widened to contain 0 (Jacob et al. 2017, arXiv:1712.05877,
            section 2.1). float8 is always symmetric with `scale = amax / finfo(dtype).max` (Micikevicius et al.
            2022, arXiv:2209.05433).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The dtype or a choice is unknown, bias or output is rounded per channel, or a float8 is affine.

    A call raises `OpInterceptError` if an operand is not a dense tensor of float16, bfloat16, float32 or float64.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> x = torch.tensor([[0.3, 1.0]])
        >>> with intercept(hooks.FakeQuantize(torch.float8_e4m3fn, of="lhs")):
        ...     x @ torch.eye(2)
        tensor([[0.2857, 1.0000]])
    """

    def __init__(
        self,
        dtype: torch.dtype | str = torch.int8,
        *,
        of: str | Iterable[str] = ("lhs", "rhs"),
        per: Literal["tensor", "channel"] = "tensor",
        symmetric: bool = True,
    ) -> None:
        super().__init__(of)
        targets = {dtype_name(known): known for known in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)}
        if dtype_name(dtype) not in targets:
            raise ValueError(f"dtype must be one of {', '.join(map(repr, targets))}, got {dtype!r}")
        check_choice("per", per, ("tensor", "channel"))
        if not isinstance(symmetric, bool):
            raise TypeError(f"symmetric must be True or False, got {symmetric!r}")
        if per == "channel" and not {"lhs", "rhs"}.issuperset(self.of):
            raise ValueError(f'per="channel" works for "lhs" and "rhs" only, got of={of!r}')
        self.dtype = targets[dtype_name(dtype)]
        if not symmetric and self.dtype.is_floating_point:
            raise ValueError(f"symmetric must be True for float8, which has no zero point, got {symmetric!r}")
        self.per = per
        self.symmetric = symmetric
        self._skipped: Counter[str] = Counter()
        self._told = 0  # how many of them a warning has named

    @property
    def skipped(self) -> dict[str, int]:
        """How many operands have no channels and stayed as they are, by operator."""
        return dict(self._skipped)

    def exit(self) -> None:
        """Warn about operands that stayed as they are."""
        self._told, told = self._skipped.total(), self._told
        if self._told > told:
            warnings.warn(
                "FakeQuantize(per='channel') leaves operands without channels as they are: "
                + ", ".join(f"{count} of {op}" for op, count in self._skipped.items()),
                OpInterceptWarning,
                stacklevel=caller_level(),
            )

    def edited(self, tensor: torch.Tensor, role: str, call: OpCall) -> torch.Tensor:
        self._check(tensor.dtype in _REAL, "float16, bfloat16, float32 and float64", tensor, role, call)
        if tensor.numel() == 0:
            return tensor
        dim: tuple[int, ...] | None = tuple(range(tensor.dim()))  # those that share a scale; None without channels
        if self.per == "channel":
            dim = row_of(call.func).sharing(role, call.args, call.kwargs)
        if dim is None:
            self._skipped[call.op] += 1
            return tensor
        wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        values = self._scaled(wide, dim) if self.symmetric else self._affine(wide, dim)
        return _straight_through(tensor, values.to(tensor.dtype))

    def _scaled(self, wide: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
        largest = 127.0 if self.dtype == torch.int8 else torch.finfo(self.dtype).max
        scale = _scale(torch.linalg.vector_norm(wide, math.inf, dim, keepdim=True), largest)
        steps = wide * scale.reciprocal()  # exceeds `largest` by at most one ulp, which rounding takes away
        return (steps.round() if self.dtype == torch.int8 else steps.to(self.dtype).to(wide.dtype)) * scale

    @staticmethod
    def _affine(wide: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
        low, high = wide.amin(dim, keepdim=True).clamp_max(0), wide.amax(dim, keepdim=True).clamp_min(0)
        scale = _scale(high - low, 255.0)
        zero = -128 - (low / scale).round()
        return (((wide * scale.reciprocal()).round() + zero).clamp(-128, 127) - zero) * scale


def _scale(span: torch.Tensor, steps: float) -> torch.Tensor:
    # The scale of zeros would be 0, and the reciprocal of a scale below this is infinite.
    return (span / steps).clamp_min(torch.finfo(torch.float32).tiny)


class Noise(_Edit):
    """Adds seeded Gaussian noise in the tensor's own dtype.

    At dispatch level the edit is straight-through: the backward pass is that of the operator with its original
    operands. The products of the backward pass become noisy too; `when(..., phase="forward")` leaves them out. At
    function level autograd differentiates the noise like any arithmetic: additive noise leaves a tensor's gradient
    unchanged, relative noise multiplies it by the same factors, and each operand's gradient is computed with the
    other operand noisy.

    Args:
        std: Standard deviation of the noise; with `relative`, of the factors.
        of: One or more of `"lhs"`, `"rhs"`, `"bias"` and `"output"`.
        relative: False adds `std * z`, True adds `x * std * z`. `z` is standard normal; for complex tensors it is
            complex with a variance of 1.
        seed: Seeds the hook's own generators, one per device. Noise never draws from torch's global ones.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `std` is not positive and finite, or a role is unknown.

    A call raises `OpInterceptError` if a tensor is not a dense floating-point tensor of at least 16 bits, or if a
    CUDA graph is being captured, since it would repeat the same noise.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> with intercept(hooks.Noise(0.1, seed=3)):
        ...     y = torch.eye(100) @ torch.eye(100)
        >>> round((y - torch.eye(100)).std().item(), 2)
        0.1
    """

    def __init__(
        self, std: float, *, of: str | Iterable[str] = "output", relative: bool = False, seed: int = 0
    ) -> None:
        super().__init__(of)
        if not isinstance(std, (int, float)) or isinstance(std, bool) or not 0 < std < math.inf:
            raise ValueError(f"std must be a positive number, got {std!r}")
        if not isinstance(relative, bool):
            raise TypeError(f"relative must be True or False, got {relative!r}")
        self.std = std
        self.relative = relative
        self._generators = Generators(seed)

    def edited(self, tensor: torch.Tensor, role: str, call: OpCall) -> torch.Tensor:
        self._check(tensor.dtype in _REAL or tensor.dtype in _COMPLEX, "floating-point", tensor, role, call)
        _refuse_in_graph(tensor, "Noise")
        device = tensor.device
        noise = torch.randn(tensor.shape, dtype=tensor.dtype, device=device, generator=self._generators[device])
        if self.relative:
            return torch.addcmul(tensor, tensor, noise, value=self.std)
        return torch.add(tensor, noise, alpha=self.std)


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit that was flipped.

    Attributes:
        index: The call's index in its interceptor.
        step: As `OpCall.step`.
        op: The operator.
        module: As `OpCall.module`.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        role: `"lhs"`, `"rhs"`, `"bias"` or `"output"`.
        position: Where the element is in the tensor.
        bit: Which bit was flipped; 0 is the least significant.
        before: The element's value before the flip.
        after: The element's value after the flip.
    """

    index: int
    step: int
    op: str
    module: str | None
    phase: Phase
    role: str
    position: tuple[int, ...]
    bit: int
    before: float
    after: float


class BitFlip(_Edit):
    """Flips random bits, as faulty memory does, and logs each flip.

    BitFlip reads the elements that it flips and so waits for the device. Wrap it in `when` to choose calls:
    `when(BitFlip(), module="encoder.*", every_calls=1000)`.

    At dispatch level the edit is straight-through: the backward pass is that of the operator with its original
    operands. The products of the backward pass get faults too; `when(..., phase="forward")` leaves them out. At
    function level autograd differentiates the product of the faulty operands and takes the fault for a copy, so that
    the gradient passes through it unchanged.

    Args:
        flips: How many different bits to flip in each tensor; all of them if it has fewer.
        of: One or more of `"lhs"`, `"rhs"`, `"bias"` and `"output"`.
        bits: Which bits of an element may be flipped, one or several; None means any. 0 is the least significant.
            Negative numbers count from the top: -1 is the sign. The exponent of a float32 is `range(23, 31)`, of a
            bfloat16 `range(7, 15)`, of a float16 `range(10, 15)`.
        seed: Seeds the hook's own generator. BitFlip never draws from a global one. The same calls get the same
            faults on every device.

    Attributes:
        log: A list of `Flip`s in the order of the faults; you may clear it.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A count is below 1, a role is unknown, or no element has the bits.

    A call raises `OpInterceptError` if a tensor is complex, boolean or not dense, if its elements do not have the
    bits asked for, or if a CUDA graph is being captured.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> faults = hooks.BitFlip(bits=-1, seed=1)
        >>> with intercept(faults):
        ...     torch.eye(2) @ torch.ones(2, 2)
        tensor([[ 1., -1.],
                [ 1.,  1.]])
        >>> [(flip.position, flip.bit, flip.before, flip.after) for flip in faults.log]
        [((0, 1), 31, 1.0, -1.0)]
    """

    reads: tuple[Read, ...] = ("module",)

    def __init__(
        self,
        flips: int = 1,
        *,
        of: str | Iterable[str] = "output",
        bits: int | Iterable[int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(of)
        self.flips = check_count("flips", flips)
        self.bits = None if bits is None else _bits(bits)
        self._random = random.Random(checked_seed(seed))
        self.log: list[Flip] = []

    def edited(self, tensor: torch.Tensor, role: str, call: OpCall) -> torch.Tensor:
        allowed = tensor.dtype not in _NO_BITS and not tensor.is_quantized
        self._check(allowed, "real", tensor, role, call)
        _refuse_in_graph(tensor, "BitFlip")
        width = 8 * tensor.element_size()
        asked = range(width) if self.bits is None else self.bits
        if not all(-width <= bit < width for bit in asked):
            raise OpInterceptError(
                f"the {role} of {call.op}, {describe(tensor)}, has {width} bits in each element, got bits={asked!r}"
            )
        bits = list(dict.fromkeys(bit % width for bit in asked))
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        elements = values.view(-1)
        words = elements.view(WORDS[tensor.element_size()])
        places = range(words.numel() * len(bits))
        which = call.index, call.step, call.op, call.module, call.phase
        flips = []
        for place in self._random.sample(places, min(self.flips, len(places))):
            element, number = divmod(place, len(bits))
            bit = bits[number]
            before = elements[element].item()
            words[element] ^= 1 << bit if bit < width - 1 else -(1 << bit)
            flips.append(Flip(*which, role, _position(element, tensor.shape), bit, before, elements[element].item()))
        edited = _straight_through(tensor, values)
        self.log += flips
        return edited


def _bits(bits: Any) -> tuple[int, ...]:
    found = (bits,) if isinstance(bits, int) else tuple(bits) if isinstance(bits, Iterable) else ()
    if not found or not all(isinstance(bit, int) for bit in found):
        raise TypeError(f"bits must be one or more whole numbers, such as range(23, 31), got {bits!r}")
    if not all(-64 <= bit < 64 for bit in found):
        raise ValueError(f"bits must be from -64 to 63, got {bits!r}")
    return found


def _position(element: int, shape: torch.Size) -> tuple[int, ...]:
    position = []
    for size in reversed(shape):
        element, place = divmod(element, size)
        position.append(place)
    return tuple(reversed(position))
