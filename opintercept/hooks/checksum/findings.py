"""What `Checksum` reports: `WrongProduct` and `EstimatedError`. Must not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from opintercept._core.record import CallRecord
from opintercept._kit.findings import CallFinding


@dataclass(frozen=True, slots=True)
class WrongProduct(CallFinding):
    """A call whose output is not what its operands make.

    Attributes:
        record: The call.
        position: Where the worst element is in the output as a matrix, `(row, column)`, or in a batch of matrices,
            `(matrix, row, column)`.
        rows: The rows, numbered through the batch, that were computed exactly and are wrong; at most 16.
        suspected: How many rows the checksums suspect.
        got: The element.
        exact: What it should be.
        residual: How far the element is from that.
        bound: How far rounding may move it, from the operands alone.
        changed: Which of `"lhs"`, `"rhs"` and `"output"` are no longer what the checksums were taken from. An operand
            was replaced or overwritten before the operator had read it, or in memory; the output after it was written.
        repeats: Whether the operator computes a wrong product again from what it got; False if the error has passed,
            None if it was not tried: on a device other than the CPU, where the operands are gone by then.
        saved: The script that runs the call again, if one was written.
        unsaved: Why no script could be written.
        twin: The index of the forward call that this call repeats in a checkpoint, from the same operands, with another
            output; None if the call was compared with its own checksums. The attributes above are empty then.
        flags: The settings in `torch.backends.cuda.matmul` that explain an element that is not finite: they let the
            device add up in float16, in which a sum of some of its terms may overflow. Empty otherwise.
    """

    record: CallRecord
    position: tuple[int, ...]
    rows: tuple[int, ...]
    suspected: int
    got: float | complex
    exact: float | complex
    residual: float
    bound: float
    changed: tuple[str, ...] = ()
    repeats: bool | None = None
    saved: str | None = None
    unsaved: str | None = None
    twin: int | None = None
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        record = self.record
        where = f"{record.where()}, step {record.step}, call {record.index}"
        lines = [f"wrong product of {record.op} in {where} ({record.phase})", f"  {record}"]
        if self.rows:
            lines.append(
                f"  element {list(self.position)} is {self.got:.6g} and should be {self.exact:.6g}: "
                f"off by {self.residual:.3g}, where rounding explains {self.bound:.3g}"
            )
            more = f" of {self.suspected} suspected" if self.suspected > len(self.rows) else ""
            lines.append(f"  wrong rows{more}: {', '.join(map(str, self.rows))}")
        if self.flags:
            lines.append("  it may have overflowed on the way, since the device may add up in float16; to forbid that:")
            lines += [f"  torch.backends.cuda.matmul.{flag} = False" for flag in self.flags]
        if self.twin is not None:
            lines.append(f"  it repeats call {self.twin} from the same operands, and its output differs")
        if self.changed:
            lines.append(f"  changed since its checksum was taken: {', '.join(self.changed)}")
        if self.repeats is not None:
            lines.append(
                "  the operator makes the same error again: the kernel is wrong, or its operands are"
                if self.repeats
                else "  the operator computes it right when it runs again: the error was transient"
            )
        lines += [f"  to run it again: python {self.saved}"] if self.saved else []
        lines += [f"  it could not be saved: {self.unsaved}"] if self.unsaved else []
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class EstimatedError:
    """The rounding errors of an operator of a module in one phase, estimated from checksums.

    Attributes:
        module: Qualified name of the module; None if it is not known.
        op: The operator.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        dtype: The output's dtype.
        calls: How many calls.
        relative: The norm of the errors divided by that of the outputs, of all calls together. With
            `ReferenceRow.snr` of a single call, it is `10 ** (-snr / 20)`.
    """

    module: str | None
    op: str
    phase: str
    dtype: str
    calls: int
    relative: float
