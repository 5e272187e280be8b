"""`computed`: what the function of a call makes of the operands of each run in float64, beside what the runs have.

Invariant: anyone may have written the runs. `again` runs their calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from opintercept._core.errors import OpInterceptError
from opintercept._core.text import printable, short_name
from opintercept._ops.families import belongs
from opintercept._ops.scratch import FOR_PROGRAM
from opintercept._values import rounding
from opintercept.runs.compare.difference import Computed
from opintercept.runs.program import again
from opintercept.runs.replay import prepared
from opintercept.runs.store.codec import StoredCall, is_output, role_of
from opintercept.runs.store.run import Run

_WIDENING = ("_softmax", "_log_softmax")  # their third argument says that a narrow input becomes a wide output
_CPU = torch.device("cpu")
_ULPS = 8.0  # how far kernels of `erf` and their like may be off, and sums of what they make
_EXP_ULPS = 24.0  # those of softmax and attention take an `exp` that may be off by 20
_TF32, _BF16 = 2.0**-11, 2.0**-8


class NotComputed(Exception):
    """A call cannot be computed again; the message says why."""


def computed(run_a: Run, a: StoredCall, run_b: Run, b: StoredCall) -> Computed:
    """Compute both calls again, and compare what they have made with that.

    Raises:
        NotComputed: Values are missing, or the operator cannot be called.
    """
    one, other = _Again(run_a, a), _Again(run_b, b)
    apart = [
        (name, rounding.operand_roundings(one.operands[name], other.operands[name]))
        for name in one.operands
        if name in other.operands
    ]
    difference, inherited = _largest(one.recorded, other.recorded), _largest(one.exact, other.exact)
    return Computed(one.added(), other.added(), difference, inherited, dict(apart))


def _largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float | None:
    """The largest difference of outputs where they are finite in both; None if they have other shapes."""
    if [(role, each.shape) for role, each in one.items()] != [(role, each.shape) for role, each in other.items()]:
        return None
    apart = (each.double() - other[role].double() for role, each in one.items() if each.numel())
    return max((float(each.abs().nan_to_num(0.0, 0.0, 0.0).amax()) for each in apart), default=0.0)


class _Again:
    """A call that is computed again.

    Attributes:
        operands: Its tensors by role, as they were recorded.
        exact: Its outputs in float64, by role.
        recorded: Its outputs as they were recorded.
    """

    def __init__(self, run: Run, call: StoredCall) -> None:
        if call.given is None or not any(map(is_output, call.tensors)):
            raise NotComputed("its values were not recorded")
        self._call = call
        try:
            self._operator, self._args, self._kwargs = prepared(run, call, lambda tensor: tensor, _CPU)
            found = {role: run.tensor(call, role) for role in call.tensors}
            self.exact = self._outputs(rounding.widened)
        except (OpInterceptError, *again.FAILURES) as failed:
            raise NotComputed(f"it cannot be computed again, as {printable(str(failed), 160)}") from failed
        read = {role: tensor for role, tensor in found.items() if tensor is not None}
        self.operands = {role: tensor for role, tensor in read.items() if not is_output(role)}
        self.recorded = {role: read[role] for role in self.exact if role in read}
        self._is_whole = not any(tensor.is_floating_point() for tensor in self.operands.values())
        self._least = _least_unit(run, call)
        if not self.recorded or any(tensor.is_complex() for tensor in read.values()):
            raise NotComputed("its numbers are complex" if self.recorded else "its outputs were not recorded")

    def _outputs(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the operator makes of changed operands, by role."""

        def value(given: Any) -> Any:
            if isinstance(given, torch.Tensor):
                return change(given)
            if isinstance(given, list):
                return [value(item) for item in given]
            return torch.float64 if isinstance(given, torch.dtype) and given.is_floating_point else given

        args, kwargs = [value(item) for item in self._args], {name: value(v) for name, v in self._kwargs.items()}
        for name in ("alpha", "beta") if change is modulus else ():
            kwargs |= {name: abs(kwargs[name])} if name in kwargs else {}
        if short_name(self._call.record.op) in _WIDENING and len(args) > 2:
            args[2] = False  # they are wide already
        try:
            with torch.no_grad():
                made = again.run(self._operator, args, kwargs)
        except again.FAILURES as failed:
            first_line = printable(str(failed).partition("\n")[0], 100)
            raise NotComputed(f"its operator does not run in float64: {first_line}") from failed
        outputs = list(made) if isinstance(made, (tuple, list)) else [made]
        outputs = outputs[: FOR_PROGRAM.get(self._call.record.op)]
        return {role_of(place): each for place, each in enumerate(outputs) if isinstance(each, torch.Tensor)}

    def added(self) -> float:
        """How far the recorded outputs are from those computed, in units of their rounding."""
        found = []
        for role, recorded in self.recorded.items():
            exact = self.exact[role]
            if recorded.shape != exact.shape:
                raise NotComputed("its output has another shape")
            if not recorded.is_floating_point():
                # Of numbers that round, it is a choice that rounding may turn, such as the place of the largest.
                found.append(math.inf if self._is_whole and not torch.equal(recorded, exact) else 0.0)
                continue
            info = torch.finfo(recorded.dtype)
            got, exact = recorded.double(), exact.double()
            overflows = (exact.abs() > info.max * (1 - info.eps)) & (got == exact.sign() * math.inf)
            exact = torch.where(overflows, got, exact)
            same = (got == exact) | (got.isnan() & exact.isnan())
            if bool(same.all()):
                continue
            error = (got - exact).abs() / self._rounding(role, exact, recorded.dtype)
            found.append(float(error.nan_to_num(math.inf).where(~same, 0).amax()))
        return max(found, default=0.0)

    def _rounding(self, role: str, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """How far rounding may move each element of an output."""
        given = [tensor for tensor in self.operands.values() if tensor.is_floating_point()]
        own = max((tensor.dtype for tensor in given), key=rounding.unit, default=dtype)
        gemm, bound = self._call.record.gemm, rounding.ulp(exact, dtype)
        # A kernel under autocast rounds its operands to the dtype of the output first.
        least = max(self._least, rounding.unit(dtype) if gemm is not None else 0.0)
        if gemm is not None:
            terms = self._call.record.terms or max(gemm.m, gemm.n, gemm.k)
            size = self._outputs(modulus)[role]
            device = "" if self._call.record.lhs is None else self._call.record.lhs.device.partition(":")[0]
            bound = bound + rounding.of_sums(own, terms, device) * size
            if "bias" in self.operands:  # some kernels round the product before they add it
                bias = _largest_of(self.operands["bias"])
                bound = bound + rounding.unit(dtype) * (2 * bias + exact.abs())
            if least <= min((rounding.unit(tensor.dtype) for tensor in given), default=1.0):
                return bound
        deviation = rounding.noise(lambda change: self._outputs(change)[role].double(), exact, least)
        takes_exp = any(word in self._call.record.op for word in ("softmax", "attention"))
        inside = _ULPS * 2 * rounding.unit(torch.promote_types(dtype, torch.float32)) * self._inside(exact)
        return (_EXP_ULPS if takes_exp else _ULPS) * bound + inside + rounding.of_adding(self._terms()) * deviation

    def _inside(self, exact: torch.Tensor) -> torch.Tensor:
        """The size of what nearly cancels inside, as in `x * (1 + erf(x))` and in weights times values."""
        op, nothing = short_name(self._call.record.op), torch.zeros(())
        gradient = next((tensor for name, tensor in self.operands.items() if name.startswith("grad")), None)
        if "attention" in op:
            return _largest_of(self.operands.get("value", exact) if gradient is None else exact)
        if not belongs(f"aten::{op}", lambda: None, "activation"):
            return nothing
        used = next(iter(self.operands.values()), nothing) if gradient is None else gradient
        return used.double().abs() if used.shape == exact.shape else nothing

    def _terms(self) -> float:
        """How many numbers a sum inside the function has, at most."""
        operands = [tensor.numel() for tensor in self.operands.values()]
        record, outputs = self._call.record, [tensor.numel() for tensor in self.recorded.values() if tensor.numel()]
        if "attention" in record.op and record.rhs is not None:
            return record.rhs.shape[-2]
        if "convolution" in record.op and (weight := self.operands.get("rhs", self.operands.get("weight"))) is not None:
            return max(operands) / max(min(weight.shape[:2]), 1)
        return max(1.0, max(operands, default=1) / min(outputs, default=1))


def _largest_of(tensor: torch.Tensor) -> torch.Tensor:
    """The largest modulus; 0 of no numbers."""
    return tensor.double().abs().amax() if tensor.numel() else torch.zeros((), dtype=torch.float64)


def modulus(tensor: torch.Tensor) -> torch.Tensor:
    """The moduli, in float64; whole numbers as they are."""
    return rounding.widened(tensor).abs() if tensor.is_floating_point() else tensor


def _least_unit(run: Run, call: StoredCall) -> float:
    """The roundoff of the precision in which the run's flags let products of float32 round their operands first."""
    lhs, flags = call.record.lhs, run.infos[call.rank].flags
    if call.record.gemm is None or lhs is None or lhs.dtype != "float32":
        return 0.0
    precision = flags.get("float32_matmul_precision", "highest")
    if lhs.device.startswith("cuda"):
        name = "cudnn.allow_tf32" if "convolution" in call.record.op else "cuda.matmul.allow_tf32"
        return _TF32 if flags.get(name) == "True" or precision != "highest" else 0.0
    return {"medium": _BF16, "high": _TF32}.get(precision, 0.0)
