"""`Reference`: what each matmul lost to rounding, by computing it again in a higher precision."""

from __future__ import annotations

import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from opintercept._call import OpCall
from opintercept._checks import check_choice, check_count
from opintercept._errors import OpInterceptError, OpInterceptWarning
from opintercept._ops.table import row_of
from opintercept._record import Phase
from opintercept._tensors import dtype_name, shape_of, share_memory
from opintercept._text import aligned
from opintercept.hooks._attention import Attention, arguments, attention_of, take, without_autocast
from opintercept.hooks._copies import Copyable
from opintercept.hooks._notes import Notes
from opintercept.hooks._values import in_memory, without_graph

Measure = Literal["snr", "cosine", "max_ulp", "max_relative", "max_absolute"]

# Elements that are compared at a time: 8 MiB of float64.
_PIECE = 1 << 20

_TABLE_ROWS = 20

_EXPONENT = 0x7FF0000000000000  # of a float64


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """The error of one call: its output `y` against the reference `r`, element by element or as a whole.

    An element that is not finite in either of them is left out of everything below if it is the same in both, NaN
    and NaN or the same infinity. If not, which `nonfinite` counts, the three maxima are infinite and the `snr` is
    minus infinity. A complex element is measured by its modulus, and the outputs of one call are taken together.

    Attributes:
        index: Number of the call in its interceptor.
        step: The interceptor's step.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        module: Qualified name of the module; None where it cannot be told.
        source: The line, `"model.py:42 in forward"`.
        op: The operator.
        shape: The GEMM, `"[64, 128] @ [128, 32]"`; for an operator without one, its left operand's shape.
        dtype: Of the output.
        max_absolute: `max(abs(y - r))`.
        max_relative: `max(abs(y - r) / abs(r))`; where `r` is zero, 0 if `y` is and infinite if not. Large where
            products cancel, in any precision: Higham, Accuracy and Stability of Numerical Algorithms, 2002, 3.5.
        max_ulp: `max(abs(y - r) / ulp(r))` in units in the last place of the output's dtype, `ulp(r) = eps *
            2**floor(log2(abs(r)))` and no less than the smallest subnormal (Goldberg 1991; Muller, On the
            definition of ulp(x), 2005). An output that is rounded once and correctly has at most 0.5.
        cosine: `(y . r) / (norm(y) * norm(r))`; 1 if both are zero, 0 if one is.
        snr: Signal to noise in decibels, `20 * log10(norm(r) / norm(y - r))`, as the SQNR of `torch.ao.ns`;
            infinite for no error. A float32 product has about 140, one of bfloat16 about 50.
        nonfinite: How many elements are NaN or infinite in one of the two and not the same in the other.
    """

    index: int
    step: int
    phase: Phase
    module: str | None
    source: str | None
    op: str
    shape: str
    dtype: str
    max_absolute: float
    max_relative: float
    max_ulp: float
    cosine: float
    snr: float
    nonfinite: int


class Reference(Copyable):
    """Runs each matmul again in a higher precision, or on another device, and measures the difference.

    The same operands go in, so that each call answers for its own rounding only: what came in already
    rounded is no error of its. At function level the operands are those of before autocast. The program's
    result is what it was, and no random number is drawn.

    In-place and `out=` forms, complex and sparse operands, grouped and scaled (per tensor and per row) products
    and attention, forward and backward, have a reference. What has none is counted in `skipped` with the reason:
    integers, dropout, RNN layers, packed and quantised weights, block scales, what torch cannot do in that dtype.

    It takes copies of the operands in the higher precision, waits for the device at each call and keeps a row of
    it: choose calls with `when`. A hook that changes outputs is measured too if it comes first.

    Args:
        dtype: What to compute in: `torch.float64`, `torch.float32`, which is refused while float32 products may
            be rounded to less, or None, the operands' own; complex operands in the complex dtype of that size.
        device: Where to; the call's own if None.
        max_relative: What `ReferenceRow.max_relative` may be at most.
        max_ulp: The same for `ReferenceRow.max_ulp`.
        min_snr: What `ReferenceRow.snr` must be at least; the one of the three that a single element in which
            products cancel does not decide.
        action: What to do about a call that is not within these: `"raise"` or `"warn"`.

    Raises:
        TypeError: A limit that is no number.
        ValueError: Another dtype or action, a negative maximum, no dtype and no device, or a device without values.
        OpInterceptError: While the program runs: a call is not within the limits.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> reference = hooks.Reference()
        >>> third = torch.full((64, 64), 1 / 3)
        >>> with intercept(reference):
        ...     _ = third @ third, third.bfloat16() @ third.bfloat16()
        >>> [(row.index, row.dtype, round(row.snr, -1)) for row in reference.worst(1)]
        [(1, 'bfloat16', 50.0)]
    """

    reads = ("module", "source")

    def __init__(
        self,
        dtype: torch.dtype | None = torch.float64,
        device: torch.device | str | None = None,
        *,
        max_relative: float | None = None,
        max_ulp: float | None = None,
        min_snr: float | None = None,
        action: Literal["raise", "warn"] = "raise",
    ) -> None:
        if dtype not in (torch.float64, torch.float32, None):
            raise ValueError(f"dtype must be torch.float64, torch.float32 or None, got {dtype!r}")
        if dtype is None and device is None:
            raise ValueError("a reference must differ from the call, got dtype=None and no device; give one of them")
        for name, value in (("max_relative", max_relative), ("max_ulp", max_ulp), ("min_snr", min_snr)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise TypeError(f"{name} must be a number, got {value!r}")
            lowest = -math.inf if name == "min_snr" else 0
            if value is not None and not value >= lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value!r}")
        check_choice("action", action, ("raise", "warn"))
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)
        if self.device is not None and self.device.type == "meta":
            raise ValueError("device must be one that holds values, got 'meta'; use 'cpu'")
        self.max_relative = max_relative
        self.max_ulp = max_ulp
        self.min_snr = min_snr
        self.action = action
        self._rows: list[ReferenceRow] = []
        self._skipped: Counter[str] = Counter()
        self._saved: Notes[_Saved] = Notes()
        self._lock = threading.RLock()

    def pre(self, call: OpCall) -> None:
        """Copy the operands that the call is going to overwrite."""
        written = call.written
        if written and _is_generic(call):
            _, args, kwargs = _functional(call)
            copies = {
                id(tensor): tensor.detach().clone()
                for tensor in _tensors((args, *kwargs.values()))
                if in_memory(tensor) and any(tensor is other or share_memory(tensor, other) for other in written)
            }
            self._saved.put(call, _Saved(call.args, copies))

    def post(self, call: OpCall) -> None:
        """Compute the reference and note the error."""
        saved = self._saved.take(call)
        try:
            errors = self._compare(call, saved)
        except _NoReference as reason:
            self._skip(call, str(reason))
            return
        except (RuntimeError, TypeError) as error:  # an operator or a device that does not have this dtype
            self._skip(call, str(error).partition("\n")[0])
            return
        gemm, lhs = call.gemm, call.lhs
        row = ReferenceRow(
            call.index,
            call.step,
            call.phase,
            call.module,
            call.source,
            call.op,
            str(gemm) if gemm is not None else "" if lhs is None else str(list(shape_of(lhs))),
            errors.dtype,
            errors.absolute,
            errors.relative,
            errors.ulp,
            errors.cosine,
            errors.snr,
            errors.nonfinite,
        )
        self._rows.append(row)
        self._judge(row)

    def _skip(self, call: OpCall, reason: str) -> None:
        with self._lock:
            self._skipped[f"{call.op}: {reason}"] += 1

    def _judge(self, row: ReferenceRow) -> None:
        if self.max_relative is not None and row.max_relative > self.max_relative:
            limit, value = f"max_relative={self.max_relative!r}", row.max_relative
        elif self.max_ulp is not None and row.max_ulp > self.max_ulp:
            limit, value = f"max_ulp={self.max_ulp!r}", row.max_ulp
        elif self.min_snr is not None and row.snr < self.min_snr:
            limit, value = f"min_snr={self.min_snr!r}", row.snr
        else:
            return
        module = f" in {row.module}" if row.module else ""
        source = f" at {row.source}" if row.source else ""
        text = (
            f"the output of {row.op} must be within {limit} of its reference, got {value:.4g} for "
            f"{row.dtype} {row.shape} in call {row.index} ({row.phase}){module}{source}"
        )
        if self.action == "raise":
            raise OpInterceptError(text)
        warnings.warn(text, OpInterceptWarning, stacklevel=2)

    def _compare(self, call: OpCall, saved: _Saved | None) -> Errors:
        """Compute the reference of a call and measure its output against it.

        Raises:
            _NoReference: There is none, with the reason.
        """
        if row_of(call.func).family == "other":
            raise _NoReference("it is no matmul")
        operands = [t for t in (call.lhs, call.rhs) if t is not None]
        if not operands:
            raise _NoReference("it has no reference")
        if not any(t.is_floating_point() or t.is_complex() or t.is_quantized for t in operands):
            raise _NoReference("integers do not round")
        if all(t.dtype == self._dtype(t) and t.device == (self.device or t.device) for t in operands):
            raise _NoReference(f"already {dtype_name(operands[0].dtype)}")
        if not all(map(in_memory, (*call.tensors.values(), *_tensors((call.output,))))):
            raise _NoReference("its operands have no values: their memory was freed, or they stand for others")
        if self.dtype == torch.float32 and _rounds_float32(self.device or operands[0].device):
            raise _NoReference("float32 products may be rounded to less; torch.set_float32_matmul_precision")
        if any(t.is_cuda for t in operands) and torch.cuda.is_current_stream_capturing():
            raise _NoReference("a CUDA graph is being captured, and nothing can be read")
        return without_graph(self._measured, call, saved, self.device or operands[0].device)

    def _measured(self, call: OpCall, saved: _Saved | None, device: torch.device) -> Errors:
        with without_autocast(device):
            outputs, references = self._again(call, saved)
            errors = Errors()
            for output, reference in zip(_tensors((outputs,)), _tensors((references,)), strict=True):
                if output.is_floating_point() or output.is_complex():
                    errors.add(output.detach(), reference)
        if not errors.dtype:
            raise _NoReference("it has no output that rounds")
        return errors

    def _again(self, call: OpCall, saved: _Saved | None) -> tuple[Any, Any]:
        """The outputs and their references, in the same structure."""
        if row_of(call.func).family == "attention":
            return self._attention(call)
        if "pinv" in call.op:
            raise _NoReference("the singular values that it drops depend on the dtype")
        formula = _FORMULAS.get(call.op)
        if formula is not None:
            bound = {name: self._raised(value) for name, value in arguments(call).items()}
            reference = formula(bound)
            return call.output[tuple(map(slice, reference.shape))], reference  # rows past the last group are empty
        if not _is_generic(call):
            raise _NoReference("it has no reference")
        copies: dict[int, torch.Tensor] = {}
        if call.written:
            if saved is None or saved.args is not call.args:  # a later hook has put others in their place
                raise _NoReference("its operands were overwritten before they could be copied")
            copies = saved.copies
        func, args, kwargs = _functional(call)
        again = func(*self._raised(args, copies), **{name: self._raised(v, copies) for name, v in kwargs.items()})
        return call.output, again

    def _attention(self, call: OpCall) -> tuple[Any, Any]:
        attention = attention_of(call)
        if not isinstance(attention, Attention):
            raise _NoReference(attention or "it has no reference")
        if attention.dropout:
            raise _NoReference("dropout draws at random")
        if call.written:
            raise _NoReference("it has no reference")
        raised = Attention(*(self._raised(value) for value in attention))
        outputs = call.output if isinstance(call.output, tuple) else (call.output,)
        if attention.grad is not None:
            gradients = zip(outputs, _gradients(raised), strict=False)  # one that is not needed is None
            outputs, references = zip(*((y, r) for y, r in gradients if isinstance(y, torch.Tensor)), strict=True)
            return outputs, references
        output = outputs[0].transpose(1, 2) if attention.heads_last else outputs[0]
        return output, _attend(raised).reshape(output.shape)

    def _dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """What to compute in with a tensor."""
        if self.dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.dtype
        return self.dtype.to_complex() if tensor.is_complex() else self.dtype

    def _raised(self, value: Any, copies: dict[int, torch.Tensor] | None = None) -> Any:
        """An argument with its tensors in the dtype and on the device of the reference."""
        if isinstance(value, torch.Tensor):
            tensor = copies.get(id(value), value) if copies else value
            return tensor.detach().to(self.device or tensor.device, self._dtype(tensor))
        if isinstance(value, (list, tuple)):
            return type(value)([self._raised(item, copies) for item in value])
        return value

    def rows(self) -> list[ReferenceRow]:
        """A row a call, in the order in which the calls ended."""
        return list(self._rows)

    def worst(self, n: int = 10, by: Measure = "snr") -> list[ReferenceRow]:
        """The `n` calls with the largest error, the worst first.

        Args:
            n: How many.
            by: `"snr"` or `"cosine"`, of the output as a whole, or the worst element's `"max_ulp"`,
                `"max_relative"` or `"max_absolute"`.

        Raises:
            ValueError: An unknown measure, or `n` below 1.
        """
        check_choice("by", by, get_args(Measure))
        check_count("n", n)
        return sorted(self._rows, key=lambda row: getattr(row, by), reverse=by.startswith("max"))[:n]

    @property
    def skipped(self) -> dict[str, int]:
        """Calls without a row, by operator and reason, and how many there were."""
        return dict(self._skipped)

    def clear(self) -> None:
        """Forget the rows and what was skipped."""
        self._rows.clear()
        self._skipped.clear()

    def __str__(self) -> str:
        head = [
            "module",
            "op",
            "shape",
            "dtype",
            "phase",
            "call",
            "absolute",
            "relative",
            "ULP",
            "1 - cosine",
            "SNR/dB",
        ]
        table = [head] + [
            [
                "?" if row.module is None else row.module or "-",
                row.op.removeprefix("aten::"),
                row.shape,
                row.dtype,
                row.phase,
                str(row.index),
                f"{row.max_absolute:.2e}",
                f"{row.max_relative:.2e}",
                f"{row.max_ulp:.3g}",
                f"{1 - row.cosine:.1e}",
                f"{row.snr:.1f}",
            ]
            for row in self.worst(_TABLE_ROWS)
        ]
        lines = [aligned(table, left=5)]
        if len(self._rows) > _TABLE_ROWS:
            lines.append(f"and {len(self._rows) - _TABLE_ROWS} calls with smaller errors")
        lines += [f"skipped {count} {reason}" for reason, count in self._skipped.items()]
        return "\n".join(lines)


def _rounds_float32(device: torch.device) -> bool:
    """Whether torch may round the operands of a float32 product to fewer bits."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the program has set what has no name in these terms
        backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
        return backend.matmul.fp32_precision not in ("ieee", "none")


class _NoReference(Exception):
    """A call cannot be computed again; the text says why."""


class _Saved(NamedTuple):
    """The operands that a call overwrites, by their ids, and the arguments that they were among."""

    args: tuple[Any, ...]
    copies: dict[int, torch.Tensor]


class Errors:
    """Adds up the errors of a call; see `ReferenceRow` for what they mean."""

    def __init__(self) -> None:
        self.dtype = ""  # of the first output
        self.absolute = self.relative = self.ulp = 0.0
        self.nonfinite = 0
        self._noise = self._signal = self._output = 0.0  # Euclidean norms of y - r, r and y

    def add(self, output: torch.Tensor, reference: torch.Tensor, ulp_of: torch.dtype | None = None) -> None:
        """Add an output, in pieces; ULP are those of its dtype, or of another."""
        info = torch.finfo(ulp_of or output.dtype)
        self.dtype = self.dtype or dtype_name(output.dtype)
        output, reference = _flat(output), _flat(reference)
        if output.numel() != reference.numel():
            raise _NoReference("its reference has another shape")
        wide = torch.complex128 if output.is_complex() else torch.float64
        for first in range(0, output.numel(), _PIECE):
            piece = slice(first, first + _PIECE)
            self._add(output[piece].to(reference.device, wide), reference[piece].to(wide), info)

    def _add(self, output: torch.Tensor, reference: torch.Tensor, info: torch.finfo) -> None:
        finite = torch.isfinite(output) & torch.isfinite(reference)
        alike = finite | (output == reference) | (torch.isnan(output) & torch.isnan(reference))
        output, reference = output.where(finite, 0), reference.where(finite, 0)
        error, size = (output - reference).abs(), reference.abs()
        relative = (error / size).where(error != 0, 0)
        power = (size.view(torch.int64) & _EXPONENT).view(torch.float64)  # 2**floor(log2(size))
        ulp = error / (power.clamp(min=info.smallest_normal) * info.eps)
        figures = [(~alike).sum(), error.amax(), relative.amax(), ulp.amax()]
        for values in (error, size, output.abs()):
            peak = values.amax().clamp(min=5e-324)  # squares of float64 leave its range
            figures += [peak, torch.linalg.vector_norm(values / peak)]
        wrong, *maxima, n, noise, s, signal, o, out = torch.stack([f.double() for f in figures]).tolist()  # waits once
        self.nonfinite += int(wrong)
        absolute, relative_, ulp_ = [math.inf] * 3 if wrong else maxima
        self.absolute = max(self.absolute, absolute)
        self.relative = max(self.relative, relative_)
        self.ulp = max(self.ulp, ulp_)
        self._noise = math.hypot(self._noise, n * noise)
        self._signal = math.hypot(self._signal, s * signal)
        self._output = math.hypot(self._output, o * out)

    @property
    def snr(self) -> float:
        if math.isinf(self.absolute):
            return -math.inf
        if not self._noise:
            return math.inf
        return 20 * math.log10(self._signal / self._noise) if self._signal else -math.inf

    @property
    def cosine(self) -> float:
        y, r, error = self._output, self._signal, self._noise
        if not y or not r:
            return 1.0 if y == r else 0.0
        # The law of cosines keeps what 1 - cosine loses in y . r: its error is that of the squared noise.
        return min(1.0, max(-1.0, 1 + (y - r - error) / y * ((y - r + error) / r) / 2))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements, with the zeros of a sparse tensor."""
    if tensor.is_nested:
        return torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().reshape(-1)


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(tuple(value))


def _is_generic(call: OpCall) -> bool:
    """Whether the operator itself computes the reference from longer operands."""
    return row_of(call.func).family in ("gemm", "sparse") and call.op.rpartition("::")[0] in ("aten", "")


def _functional(call: OpCall) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The call without `out=` and `out_dtype=`, which are about the output's tensor and dtype."""
    func = call.func
    if not hasattr(func, "_schema"):
        args = tuple(value for value in call.args if not isinstance(value, torch.dtype))
        return func, args, {k: v for k, v in call.kwargs.items() if k not in ("out", "out_dtype")}
    names = {a.name for a in func._schema.arguments}
    kept = {a.name for a in func._schema.arguments if not a.is_out} - {"out_dtype"}
    if kept == names:
        return func, call.args, call.kwargs
    packet = func.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        if {a.name for a in overload._schema.arguments} == kept:
            return overload, (), {name: value for name, value in arguments(call).items() if name in kept}
    return func, call.args, call.kwargs


def _attend(attention: Attention) -> torch.Tensor:
    """The output of an attention, `[*b, h, s_q, d_v]`."""
    query, value = attention.query, attention.value
    heads, rows = range(query.shape[-3]), range(query.shape[-2])
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    for some_heads, some_rows in attention.pieces(heads, rows):
        weights = attention.weights(heads[some_heads], rows[some_rows], query.dtype)
        output[..., some_heads, some_rows, :] = weights @ take(value, -3, attention.shared(value, heads[some_heads]))
    return output


def _gradients(attention: Attention) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value (Dao et al., FlashAttention, 2022, B.2).

    As the kernels do it, from the output that the forward pass had.
    """
    query, key, value, grad, out = attention.query, attention.key, attention.value, attention.grad, attention.out
    if grad is None or out is None:
        raise _NoReference("it has no reference")
    heads, rows = range(query.shape[-3]), range(query.shape[-2])
    inner = (grad * out).sum(-1, keepdim=True)
    grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for some_heads, some_rows in attention.pieces(heads, rows):
        these, index = heads[some_heads], (..., some_heads, some_rows, slice(None))
        weights = attention.weights(these, rows[some_rows], query.dtype)
        shared_key, shared_value = attention.shared(key, these), attention.shared(value, these)
        scores = weights * (grad[index] @ take(value, -3, shared_value).mT - inner[index]) * attention.scale
        grad_query[index] = scores @ take(key, -3, shared_key)
        places = torch.tensor([*shared_key], device=key.device), torch.tensor([*shared_value], device=key.device)
        grad_key.index_add_(-3, places[0], scores.mT @ query[index])
        grad_value.index_add_(-3, places[1], weights.mT @ grad[index])
    return grad_query, grad_key, grad_value


def _scaled_mm(bound: dict[str, Any]) -> torch.Tensor:
    """`(a * scale_a) @ (b * scale_b) + bias` with a scale a tensor, a row of `a`, or a column of `b`."""
    lhs, rhs, bias = bound["self"], bound["mat2"], bound["bias"]
    scales = bound["scale_a"], bound["scale_b"]
    if bound.get("scale_result") is not None:
        raise _NoReference("scale_result is given, which devices apply in different ways")
    if bound.get("contraction_dim") or any(r > 1 for r in (*bound.get("recipe_a", ()), *bound.get("recipe_b", ()))):
        raise _NoReference("its scales are those of blocks")
    scale_a, scale_b = (scale[0] if isinstance(scale, (list, tuple)) else scale for scale in scales)
    shapes = (lhs.shape[0], 1), (1, rhs.shape[1])
    if any(s.numel() != 1 and s.shape != shape for s, shape in zip((scale_a, scale_b), shapes, strict=True)):
        raise _NoReference("its scales are those of blocks")
    product: torch.Tensor = (lhs * scale_a) @ (rhs * scale_b)
    return product if bias is None else product + bias


def _grouped_mm(bound: dict[str, Any]) -> torch.Tensor:
    """A product a group; `offs` has the ends of the groups along the dimension that they share."""
    lhs, rhs = bound["self"], bound["mat2"]
    if bound["bias"] is not None:
        raise _NoReference("it has no reference with a bias")
    if bound["offs"] is None:
        batched: torch.Tensor = lhs @ rhs
        return batched
    ends = bound["offs"].tolist()
    groups = [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    if lhs.dim() == 2 and rhs.dim() == 3:
        return torch.cat([lhs[group] @ weight for group, weight in zip(groups, rhs, strict=True)])
    if lhs.dim() == 3:
        return torch.cat([part @ rhs[:, group] for group, part in zip(groups, lhs, strict=True)], dim=1)
    return torch.stack([lhs[:, group] @ rhs[group] for group in groups])


_FORMULAS: dict[str, Callable[[dict[str, Any]], torch.Tensor]] = {
    "aten::_grouped_mm": _grouped_mm,
    "aten::_scaled_mm": _scaled_mm,
    "aten::_scaled_mm_v2": _scaled_mm,
}
