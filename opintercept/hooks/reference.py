"""`Reference`: computes each matmul again in a higher precision, and measures what rounding cost."""

from __future__ import annotations

import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch

from opintercept._core.call import OpCall
from opintercept._core.checks import check_choice, check_count
from opintercept._core.errors import OpInterceptError, OpInterceptWarning
from opintercept._core.record import Phase
from opintercept._core.tables import Cells, Table
from opintercept._core.tensors import dtype_name, shape_of, share_memory, tensors_of
from opintercept._core.text import counted
from opintercept._kit.copyable import Copyable
from opintercept._kit.per_call import PerCall
from opintercept._ops.fragment import UNKNOWN
from opintercept._ops.generated import GeneratedKernel
from opintercept._ops.table import row_of
from opintercept._values.attention import Attention, arguments, attention_of, take, without_autocast
from opintercept._values.errors import Errors, OtherShape
from opintercept._values.fragments import Judged, judge
from opintercept._values.precision import convolution_precision, product_precision
from opintercept._values.read import in_graph_capture, in_memory, without_graph

Measure = Literal["snr", "cosine", "max_ulp", "max_relative", "max_absolute"]


_TABLE_ROWS = 20

_GENERIC = ("gemm", "sparse", "convolution")


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """The error of one call: how far its output `y` is from the reference `r`.

    If an element is not finite but the same in `y` and `r` (both NaN, or the same infinity), it is left out of all
    that follows. If it differs, `nonfinite` counts it, the three maxima are infinite and `snr` is minus infinity. The
    modulus of a complex element is measured, and all outputs of a call are taken together.

    Attributes:
        index: The call's index in its interceptor.
        step: The interceptor's step.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        module: Qualified name of the module; None if it is not known.
        source: The line that made the call, `"model.py:42 in forward"`.
        op: The operator.
        shape: The GEMM, `"[64, 128] @ [128, 32]"`; for an operator without one, the shape of its left operand.
        dtype: The output's dtype.
        max_absolute: `max(abs(y - r))`.
        max_relative: `max(abs(y - r) / abs(r))`; where `r` is zero, 0 if `y` is zero too and otherwise infinite. It
            is large where products cancel, in any precision (Higham, Accuracy and Stability of Numerical Algorithms,
            2002, 3.5).
        max_ulp: `max(abs(y - r) / ulp(r))`, in units in the last place of the output's dtype, where `ulp(r) = eps *
            2**floor(log2(abs(r)))`, but at least the smallest subnormal (Goldberg 1991; Muller, On the definition of
            ulp(x), 2005). A correctly rounded output has at most 0.5.
        cosine: `(y . r) / (norm(y) * norm(r))`; 1 if both are zero, 0 if one of them is.
        snr: Signal-to-noise ratio in decibels, `20 * log10(norm(r) / norm(y - r))`, as the SQNR of `torch.ao.ns`;
            infinite if there is no error. A float32 product has about 140, a bfloat16 product about 50.
        nonfinite: How many elements are NaN or infinite in `y` or `r` and not the same in the other.
        ops: The operators that a kernel stands for which torch.compile has generated; None for other calls.
        excess: The largest error of such a kernel, in units of what rounding explains; above 1 it is wrong.
        wrong: The operator whose value it gets wrong; None if there is none.
        deviation: How far off that is, in words, such as `"NaN where its operators give 0.37"`.
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
    ops: tuple[str, ...] | None = None
    excess: float | None = None
    wrong: str | None = None
    deviation: str | None = None


class Reference(Copyable, Table):
    """Runs each matmul again in a higher precision or on another device, and measures the difference.

    The reference starts from the same operands, so each call answers only for its own rounding, not for rounding that
    its operands have been through. At function level the operands are those before autocast. The program's results
    stay the same, and no random number is drawn.

    In-place and `out=` forms, complex and sparse operands, grouped products, scaled products (per tensor and per
    row), convolutions and attention have a reference, forward and backward. `skipped` counts calls without one, by
    reason: integers, dropout, RNN layers, packed and quantised weights, block scales, and operators that torch lacks
    for the dtype.

    With `ops="all"` it holds each kernel that torch.compile generates against the operators that it stands for, run in
    float64 on the operands of the kernel. `wrong` lists those that are further off than rounding explains, whether or
    not the kernel rounds between two operators; the limits below are for other calls. What a kernel stands for is known
    if it is compiled while a block is open; the source of most Triton kernels says it, too. Outputs that hang on a
    random number or on the last bits of a comparison are counted in `skipped`.

    Reference copies the operands to the higher precision, waits for the device at each call, and keeps a row for each
    call. Choose calls with `when`. It measures the changes of an earlier hook too.

    Args:
        dtype: The dtype to compute in: `torch.float64`, `torch.float32` or None for the operands' own dtype. Complex
            operands use the complex dtype of that precision. Calls are skipped with `torch.float32` if torch may
            round the operands of float32 products.
        device: The device to compute on; None means that of the call.
        max_relative: The upper limit of `ReferenceRow.max_relative`.
        max_ulp: The upper limit of `ReferenceRow.max_ulp`.
        min_snr: The lower limit of `ReferenceRow.snr`, the only one of the three that does not depend on a single
            element in which products cancel.
        action: What to do if a call exceeds a limit: `"raise"` or `"warn"`.

    Raises:
        TypeError: A limit is not a number.
        ValueError: The dtype or action is unknown, a maximum is negative, neither dtype nor device is given, or the
            device holds no values.
        OpInterceptError: A call of the program exceeds a limit.

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
    fresh: ClassVar = {"_lock": threading.RLock, "_saved": PerCall}
    _row = ReferenceRow

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
            raise ValueError("a reference needs another dtype or device than the call; give dtype= or device=")
        for name, value in (("max_relative", max_relative), ("max_ulp", max_ulp), ("min_snr", min_snr)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if value is not None and (math.isnan(value) or (value < 0 and name != "min_snr")):
                raise ValueError(f"{name} must not be NaN{'' if name == 'min_snr' else ' or negative'}, got {value!r}")
        check_choice("action", action, ("raise", "warn"))
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)
        if self.device is not None and self.device.type == "meta":
            raise ValueError("device='meta' holds no values; use device='cpu'")
        self.max_relative = max_relative
        self.max_ulp = max_ulp
        self.min_snr = min_snr
        self.action = action
        self._rows: list[ReferenceRow] = []
        self._skipped: Counter[str] = Counter()
        self._saved: PerCall[_Saved | str] = PerCall()  # or why there are no copies
        self._lock = threading.RLock()

    def pre(self, call: OpCall) -> None:
        """Copy the operands that the call is about to overwrite."""
        written = call.written
        if isinstance(call.func, GeneratedKernel):
            self._copy_operands(call, call.func)
        elif written and (_is_generic(call) or row_of(call.func).reference):
            _, args, kwargs = _functional(call)
            try:
                copies = {
                    id(tensor): tensor.detach().clone()
                    for tensor in tensors_of(args, kwargs)
                    if in_memory(tensor) and any(tensor is other or share_memory(tensor, other) for other in written)
                }
                self._saved.put(call, _Saved(call.args, copies))
            except torch.OutOfMemoryError as error:
                self._saved.put(call, str(error).partition("\n")[0])

    def post(self, call: OpCall) -> None:
        """Compute the reference and keep a row with the error."""
        saved = self._saved.take(call)
        if isinstance(saved, str):
            self._skip(call, saved)
            return
        excess = wrong = deviation = None
        try:
            if isinstance(call.func, GeneratedKernel):
                errors, worst = self._compare_kernel(call, call.func, saved)
                excess = worst.excess
                if excess > 1:
                    wrong, deviation = worst.node.op, worst.deviation
            else:
                errors = self._compare(call, saved)
        except (_NoReference, OtherShape) as reason:
            self._skip(call, str(reason))
            return
        except (RuntimeError, TypeError) as failed:  # the operator or the device lacks this dtype
            self._skip(call, str(failed).partition("\n")[0])
            return
        gemm, lhs = call.gemm, call.lhs
        shape = str(gemm) if gemm is not None else "" if lhs is None else str(list(shape_of(lhs)))
        which = call.index, call.step, call.phase, call.module, call.source, call.op
        figures = errors.absolute, errors.relative, errors.ulp, errors.cosine, errors.snr, errors.nonfinite
        row = ReferenceRow(*which, shape, errors.dtype, *figures, call.ops, excess, wrong, deviation)
        self._rows.append(row)
        if excess is None:
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
            f"the output of {row.op} violates {limit}, got {value:.4g} for {row.dtype} {row.shape} "
            f"in call {row.index} ({row.phase}){module}{source}"
        )
        if self.action == "raise":
            raise OpInterceptError(text)
        warnings.warn(text, OpInterceptWarning, stacklevel=2)

    def _copy_operands(self, call: OpCall, kernel: GeneratedKernel) -> None:
        """Copy what a kernel reads and overwrites. Its wrapper may pass the same memory twice."""
        read = [argument.name for argument in kernel._schema.arguments if argument.part != "out"]
        if kernel.fragment is None or kernel.updated.isdisjoint(read):
            return
        try:
            copies = {
                id(call.args[place]): _copied(call.args[place])
                for place in kernel.fragment.given
                if kernel._schema.arguments[place].name in kernel.updated and in_memory(call.args[place])
            }
            self._saved.put(call, _Saved(call.args, copies))
        except torch.OutOfMemoryError as error:
            self._saved.put(call, str(error).partition("\n")[0])

    def _compare_kernel(self, call: OpCall, kernel: GeneratedKernel, saved: _Saved | None) -> tuple[Errors, Judged]:
        """Hold a generated kernel against its operators: the errors, and the output that is furthest off."""
        tensors = [*tensors_of(call.args, {})]
        if kernel.fragment is None:
            raise _NoReference(UNKNOWN)
        if self.dtype != torch.float64 or any(self.device not in (None, each.device) for each in tensors):
            raise _NoReference("its operators run in float64 and on its own device only")
        if not all(map(in_memory, tensors)):
            raise _NoReference("its operands have no values: their memory was freed, or they wrap other tensors")
        if any(map(in_graph_capture, tensors)):
            raise _NoReference("a CUDA graph is being captured, so no value can be read")
        if saved is not None and saved.args is not call.args:
            raise _NoReference("its operands were overwritten before they could be copied")
        copies = {} if saved is None else saved.copies
        before = [copies.get(id(each), each) for each in call.args]
        with without_autocast(tensors[0].device):
            judged, left_out = without_graph(judge, kernel.fragment, before, call.args)
        for reason in left_out.values():
            self._skip(call, f"of an output, {reason}")
        errors = Errors()
        for each in judged:
            if each.output.is_floating_point():
                errors.add(each.output, each.exact)
        if not judged:
            raise _NoReference("it has no output that can be held")
        return errors, max(judged, key=lambda each: each.excess)

    def _compare(self, call: OpCall, saved: _Saved | None) -> Errors:
        """Compute the reference of a call, or say why it has none, and measure its output against it."""
        if row_of(call.func).family == "other":
            raise _NoReference("it is not a matmul")
        operands = [t for t in (call.lhs, call.rhs) if t is not None]
        if not operands:
            raise _NoReference("it has no reference")
        declared = row_of(call.func).reference is not None
        if not declared and not any(t.is_floating_point() or t.is_complex() or t.is_quantized for t in operands):
            raise _NoReference("integers do not round")
        if not declared and all(t.dtype == self._dtype(t) and t.device == (self.device or t.device) for t in operands):
            raise _NoReference(f"already {dtype_name(operands[0].dtype)}")
        if not all(map(in_memory, (*call.tensors.values(), *tensors_of((call.output,), {})))):
            raise _NoReference("its operands have no values: their memory was freed, or they wrap other tensors")
        if self.dtype == torch.float32 and _rounds_float32(call, self.device or operands[0].device):
            convolves = row_of(call.func).family == "convolution"
            where = "conv.fp32_precision of torch.backends" if convolves else "torch.set_float32_matmul_precision"
            raise _NoReference(f"torch may round float32 operands; see {where}")
        if any(map(in_graph_capture, operands)):
            raise _NoReference("a CUDA graph is being captured, so no value can be read")
        return without_graph(self._measured, call, saved, self.device or operands[0].device)

    def _measured(self, call: OpCall, saved: _Saved | None, device: torch.device) -> Errors:
        with without_autocast(device):
            outputs, references = self._again(call, saved)
            errors = Errors()
            pairs = list(zip_longest(tensors_of((outputs,), {}), tensors_of((references,), {})))
            if any(output is None or reference is None for output, reference in pairs):
                raise _NoReference("its reference computes another number of tensors")
            for output, reference in pairs:
                if output.is_floating_point() or output.is_complex():
                    errors.add(output.detach(), reference)
        if not errors.dtype:
            raise _NoReference("it has no floating-point output")
        return errors

    def _again(self, call: OpCall, saved: _Saved | None) -> tuple[Any, Any]:
        """The outputs and their references, in the same structure."""
        if row_of(call.func).family == "attention":
            return self._attention(call)
        if "pinv" in call.op:
            raise _NoReference("the dtype decides which singular values it drops")
        formula = _FORMULAS.get(call.op)
        if formula is not None:
            bound = {name: self._raised(value) for name, value in arguments(call).items()}
            reference = formula(bound)
            return call.output[tuple(map(slice, reference.shape))], reference  # rows past the last group are empty
        declared = row_of(call.func).reference
        if not (declared or _is_generic(call)):
            raise _NoReference("it has no reference; register_op(reference=...) declares one")
        copies: dict[int, torch.Tensor] = {}
        if call.written:
            if saved is None or saved.args is not call.args:  # a later hook has replaced them
                raise _NoReference("its operands were overwritten before they could be copied")
            copies = saved.copies
        func, args, kwargs = (declared, call.args, call.kwargs) if declared else _functional(call)
        args, kwargs = self._raised(args, copies), {name: self._raised(v, copies) for name, v in kwargs.items()}
        again = func(*args, **kwargs)
        if declared and again is None:  # like the operator, it may write to an argument
            again = row_of(call.func).result(call.func, args, kwargs)
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
            gradients = zip(outputs, _gradients(raised), strict=False)  # a gradient that is not needed is None
            outputs, references = zip(*((y, r) for y, r in gradients if isinstance(y, torch.Tensor)), strict=True)
            return outputs, references
        output = outputs[0].transpose(1, 2) if attention.heads_last else outputs[0]
        return output, _attend(raised).reshape(output.shape)

    def _dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype of a tensor in the reference."""
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

    def _held(self) -> str:
        return counted(len(self._rows), "row")

    def rows(self) -> list[ReferenceRow]:
        """One row for each call, in the order in which the calls ended."""
        return list(self._rows)

    def worst(self, n: int = 10, by: Measure = "snr") -> list[ReferenceRow]:
        """The `n` calls with the largest errors, worst first.

        Args:
            n: How many.
            by: `"snr"` and `"cosine"` measure the output as a whole, `"max_ulp"`, `"max_relative"` and
                `"max_absolute"` its worst element.

        Raises:
            ValueError: The measure is unknown, or `n` is below 1.
        """
        check_choice("by", by, get_args(Measure))
        check_count("n", n)
        return sorted(self._rows, key=lambda row: getattr(row, by), reverse=by.startswith("max"))[:n]

    @property
    def wrong(self) -> list[ReferenceRow]:
        """The generated kernels whose error is more than rounding explains, in the order of the calls."""
        return [row for row in self._rows if row.excess is not None and row.excess > 1]

    @property
    def skipped(self) -> dict[str, int]:
        """How many calls have no row, by operator and reason."""
        return dict(self._skipped)

    def clear(self) -> None:
        """Forget the rows and the counts in `skipped`."""
        self._rows.clear()
        self._skipped.clear()

    def _cells(self) -> Cells:
        figures = ["absolute", "relative", "ULP", "1 - cosine", "SNR/dB"]
        table = [
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
        notes = [_accusation(row) for row in self.wrong[:1]]
        if len(self._rows) > _TABLE_ROWS:
            notes.append(f"and {len(self._rows) - _TABLE_ROWS} calls with smaller errors")
        notes += [f"skipped {count} {reason}" for reason, count in self._skipped.items()]
        head = ["module", "op", "shape", "dtype", "phase", "call", *figures]
        return Cells(head, table, left=5, notes=notes)


def _accusation(row: ReferenceRow) -> str:
    """A wrong kernel in words."""
    where = f" in {row.module}" if row.module else ""
    line = f" at {row.source}" if row.source else ""
    ops = ", ".join(row.ops or ())
    return (
        f"call {row.index} is wrong: {row.op}, which stands for {ops}{where}{line}; its {row.wrong} is {row.deviation}"
    )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also where memory between the elements is someone else's."""
    tensor = tensor.detach()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _rounds_float32(call: OpCall, device: torch.device) -> bool:
    """Whether torch may round the operands of a float32 product to fewer bits."""
    if row_of(call.func).family == "convolution":
        return convolution_precision(device) != "highest"
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the program has set precisions that this function has no name for
        return product_precision(device) != "highest"


class _NoReference(Exception):
    """A call has no reference; the message says why."""


class _Saved(NamedTuple):
    """Copies of the operands that a call overwrites, by id, and the arguments that contained them."""

    args: tuple[Any, ...]
    copies: dict[int, torch.Tensor]


def _is_generic(call: OpCall) -> bool:
    """Whether the operator itself can compute the reference from operands of higher precision."""
    return row_of(call.func).family in _GENERIC and call.op.rpartition("::")[0] in ("aten", "")


def _functional(call: OpCall) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The call without `out=` and `out_dtype=`, which would decide where and in which dtype the reference is."""
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
    """The output of attention, `[*b, h, s_q, d_v]`."""
    query, value = attention.query, attention.value
    heads, rows = range(query.shape[-3]), range(query.shape[-2])
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    for some_heads, some_rows in attention.pieces(heads, rows):
        weights = attention.weights(heads[some_heads], rows[some_rows], query.dtype)
        output[..., some_heads, some_rows, :] = weights @ take(value, -3, attention.shared(value, heads[some_heads]))
    return output


def _gradients(attention: Attention) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, from the output of the forward pass.

    The kernels compute them in the same way (Dao et al., FlashAttention, 2022, B.2).
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
    """`(a * scale_a) @ (b * scale_b) + bias`, where scales are per tensor, or per row of `a` and column of `b`."""
    lhs, rhs, bias = bound["self"], bound["mat2"], bound["bias"]
    scales = bound["scale_a"], bound["scale_b"]
    if bound.get("scale_result") is not None:
        raise _NoReference("devices apply scale_result in different ways")
    if bound.get("contraction_dim") or any(r > 1 for r in (*bound.get("recipe_a", ()), *bound.get("recipe_b", ()))):
        raise _NoReference("it has a scale for each block")
    scale_a, scale_b = (scale[0] if isinstance(scale, (list, tuple)) else scale for scale in scales)
    shapes = (lhs.shape[0], 1), (1, rhs.shape[1])
    if any(s.numel() != 1 and s.shape != shape for s, shape in zip((scale_a, scale_b), shapes, strict=True)):
        raise _NoReference("it has a scale for each block")
    product: torch.Tensor = (lhs * scale_a) @ (rhs * scale_b)
    return product if bias is None else product + bias


def _grouped_mm(bound: dict[str, Any]) -> torch.Tensor:
    """One product for each group; `offs` holds the ends of the groups along their common dimension."""
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
