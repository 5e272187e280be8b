"""`NonFinite`: where the first NaN comes from, apart from all the calls that only pass it on."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from re import Pattern
from typing import Any, Literal, NamedTuple, get_args

import torch

from opintercept._call import CallRecord, OpCall
from opintercept._errors import NonFiniteError, OpInterceptWarning
from opintercept.hooks._notes import Notes
from opintercept.hooks._repro import save_repro
from opintercept.hooks._values import captured, first_output, stored_values
from opintercept.hooks.when import name_test

Action = Literal["raise", "warn", "record", "breakpoint"]
_ROLES = ("lhs", "rhs", "bias")


class Extent(NamedTuple):
    """The range of a tensor: (0, 0) of an empty one, NaN if there is one in it."""

    min: float
    max: float

    @property
    def nan(self) -> bool:
        """Whether there is a NaN."""
        return math.isnan(self.min)

    @property
    def finite(self) -> bool:
        """Whether all is finite."""
        return math.isfinite(self.min) and math.isfinite(self.max)

    def __str__(self) -> str:
        return "NaN" if self.nan else f"[{self.min:.4g}, {self.max:.4g}]"


@dataclass(frozen=True, slots=True)
class Finding:
    """Where values that are not finite were made, or first came by.

    Attributes:
        record: The call.
        kind: `"made"`: its operands are finite and its output is not. `"came in"`: an operand was not, and no
            call that was seen had made it: another operator has, or the data, or a weight.
        output: The range of the output.
        operands: The ranges of the operands, by role.
        seen_at: The call whose NaN made this overflow worth telling; None where the call itself did.
        saved: The script that runs the call again, if one was asked for.
    """

    record: CallRecord
    kind: Literal["made", "came in"]
    output: Extent
    operands: dict[str, Extent]
    seen_at: CallRecord | None = None
    saved: str | None = None

    def __str__(self) -> str:
        record = self.record
        what = "NaN" if self.output.nan else "Inf"
        where = f"{record.op} in {_place(record)}, call {record.index} ({record.phase})"
        if self.kind == "made":
            text = f"{what} is made by {where}, from finite operands"
        else:
            bad = ", ".join(role for role, extent in self.operands.items() if not extent.finite)
            text = f"{what} comes into {where}, through {bad}; no watched call before it has made it"
        lines = [text, f"  {record}"]
        lines += [f"  {role} in {extent}" for role, extent in self.operands.items()]
        bound = self._bound()
        lines += [f"  {bound}"] if bound else []
        if self.seen_at is not None:
            lines.append(f"  it became NaN on the way to {self.seen_at.op} in {_place(self.seen_at)}")
        lines += [f"  to run it again: python {self.saved}"] if self.saved else []
        return "\n".join(lines)

    def _bound(self) -> str | None:
        """How large the sums of products could have become: k times the largest magnitudes."""
        gemm, output = self.record.gemm, self.record.output
        lhs, rhs = self.operands.get("lhs"), self.operands.get("rhs")
        if self.kind != "made" or gemm is None or lhs is None or rhs is None or output is None:
            return None
        dtype = getattr(torch, (output[0] if isinstance(output, tuple) else output).dtype)  # type: ignore[union-attr]
        left, right = (max(abs(extent.min), abs(extent.max)) for extent in (lhs, rhs))
        return (
            f"largest possible sum of products: {gemm.k} x {left:.4g} x {right:.4g} = {gemm.k * left * right:.4g}; "
            f"{self.record.output and str(dtype).removeprefix('torch.')} holds {torch.finfo(dtype).max:.4g}"
        )


def _place(record: CallRecord) -> str:
    module = "no module" if record.module == "" else f"module {record.module!r}" if record.module else "?"
    return f"{module} ({record.source or 'source unknown'})"


class NonFinite:
    """Finds the first call with finite operands and an output that is not, forward and backward.

    A check is one pass over the output for its range, which a NaN takes over; operands are only read where that
    is not finite. An Inf alone is no finding unless `inf` says so, since masks are made of it; but when a
    NaN comes up later, the call that first made an Inf from finite operands is what is reported. Calls that pass on
    what an operand brings in are counted in `passed_on`. Of several outputs the first is read.

    Args:
        inf: Whether an Inf is a finding by itself.
        action: `"raise"` a `NonFiniteError`; `"warn"`, once for each module, operator and pass; `"record"` in
            `findings` only, as all do; `"breakpoint"`: stop in the debugger, in a frame that has the `call`.
        allow: Modules that may make what they like: a glob, a compiled pattern or a test of the name.
        every: Look at what the device has found every so many calls, and when the block ends. With 1, each
            check waits for a device that is no CPU; with more, findings come late, and operands are read each time.
        save: A folder that gets, for each call found, its operands as safetensors and a script that runs it again.

    Raises:
        ValueError: An unknown action, `every` below 1, or `save` with `every` above 1: the operands are gone by then.
        ImportError: `save` without safetensors.

    Example:
        >>> import torch
        >>> from opintercept import NonFiniteError, hooks, intercept
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> _ = torch.nn.init.constant_(model[1].weight, 3e38)
        >>> _ = torch.nn.init.constant_(model[0].bias, 9.0)
        >>> try:
        ...     with intercept(hooks.NonFinite(inf=True)):
        ...         _ = model(torch.ones(1, 2))
        ... except NonFiniteError as error:
        ...     print(str(error).partition(" (<")[0])
        Inf is made by aten::addmm in module '1'

    Attributes:
        findings: What was found, first things first; one for each module, operator and pass.
        passed_on: How many calls only passed on what came in.
        skipped: How many calls a CUDA graph captured.
    """

    asks_origin = True

    def __init__(
        self,
        *,
        inf: bool = False,
        action: Action = "raise",
        allow: str | Pattern[str] | Callable[[str], bool] | None = None,
        every: int = 1,
        save: str | PathLike[str] | None = None,
    ) -> None:
        if action not in get_args(Action):
            raise ValueError(f"action must be one of {', '.join(map(repr, get_args(Action)))}, got {action!r}")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of at least 1, got {every!r}")
        if save is not None:
            if every > 1:
                raise ValueError(f"save needs every=1, got every={every}: later the operands are gone")
            import safetensors.torch  # noqa: F401 - fail now, and not when it matters

        self.findings: list[Finding] = []
        self.passed_on = 0
        self.skipped = 0
        self._inf = inf
        self._action = action
        self._allow = None if allow is None else name_test(allow)
        self._every = every
        self._save = save
        self._overflow: Finding | None = None
        self._found: set[tuple[str | None, str, str]] = set()
        self._before: Notes[dict[str, Any]] = Notes()
        self._pending: list[tuple[CallRecord, tuple[str, ...], torch.Tensor]] = []
        self._lock = threading.RLock()

    def pre(self, call: OpCall) -> None:
        """Keep operands that the operator is about to overwrite."""
        if written := call.written:
            kept = {role: getattr(call, role) for role in _ROLES}
            before = {
                role: tensor.clone() for role, tensor in kept.items() if any(tensor is target for target in written)
            }
            self._before.put(call, before)

    def post(self, call: OpCall) -> None:
        """Check the output."""
        before = self._before.take(call)
        output = _range(first_output(call.output))
        if output is None:
            return
        if captured(output, "NonFinite"):
            self.skipped += 1
            return
        if self._every > 1:
            self._defer(call, output, before or {})
            return
        extent = _read(output)
        if extent is None or extent.finite or (self._allow is not None and any(map(self._allow, call.aliases))):
            return
        operands = {role: read for role, t in _operands(call, before) if (read := _read(_range(t))) is not None}
        with self._lock:
            finding = self._judge(call.record(), extent, operands)
        if finding is not None:
            self._tell(finding, call, before)

    def _judge(self, record: CallRecord, output: Extent, operands: dict[str, Extent]) -> Finding | None:
        """Tell a call that makes it from one that passes it on; the finding if it is a new one."""
        made = all(extent.finite for extent in operands.values())
        finding: Finding | None = None
        if made:
            finding = Finding(record, "made", output, operands)
            if not output.nan and not self._inf:
                self._overflow = self._overflow or finding
                return None
        elif not output.nan and not self._inf:
            return None
        elif self._overflow is not None:
            first, self._overflow = self._overflow, None
            finding = Finding(first.record, "made", first.output, first.operands, seen_at=record)
        elif not self.findings:
            finding = Finding(record, "came in", output, operands)
        if finding is None:
            self.passed_on += 1
            return None
        key = (finding.record.module, finding.record.op, finding.record.phase)
        if key in self._found:
            return None
        self._found.add(key)
        return finding

    def _tell(self, finding: Finding, call: OpCall | None, before: dict[str, Any] | None = None) -> None:
        if self._save is not None and call is not None and finding.seen_at is None:
            saved = save_repro(call, self._save, before or {})
            finding = Finding(finding.record, finding.kind, finding.output, finding.operands, saved=saved)
        self.findings.append(finding)
        if self._action == "raise":
            raise NonFiniteError(str(finding))
        if self._action == "warn":
            warnings.warn(str(finding), OpInterceptWarning, stacklevel=2)
        elif self._action == "breakpoint":
            breakpoint()

    def _defer(self, call: OpCall, output: torch.Tensor, before: dict[str, Any]) -> None:
        if self._allow is not None and any(map(self._allow, call.aliases)):
            return
        ranges = {"output": output}
        ranges |= {role: span for role, t in _operands(call, before) if (span := _range(t)) is not None}
        device = output.device
        spans = torch.stack([span.to(device) for span in ranges.values()])
        with self._lock:
            self._pending.append((call.record(), tuple(ranges), spans))
            due = len(self._pending) >= self._every
        if due:
            self.check()

    def check(self) -> None:
        """Look now at what `every` has put off; waits for the device.

        Raises:
            NonFiniteError: As `action` says.
        """
        with self._lock:
            pending, self._pending = self._pending, []
        for record, roles, spans in pending:
            extents = {role: Extent(*ends) for role, ends in zip(roles, spans.tolist(), strict=True)}
            output = extents.pop("output")
            if not output.finite:
                with self._lock:
                    finding = self._judge(record, output, extents)
                if finding is not None:
                    self._tell(finding, None)

    def exit(self) -> None:
        """Look at what is left."""
        self.check()

    def __str__(self) -> str:
        if not self.findings:
            return "nothing that is not finite was made"
        return "\n".join(map(str, self.findings))


def _operands(call: OpCall, before: dict[str, Any] | None) -> list[tuple[str, Any]]:
    return [(role, (before or {}).get(role, getattr(call, role))) for role in _ROLES]


def _range(tensor: Any) -> torch.Tensor | None:
    """Minimum and maximum, `[2]`, where the tensor is; None for what cannot be other than finite."""
    values = stored_values(tensor)
    if values is None or not values.is_floating_point() or not values.numel():
        return None
    if values.element_size() == 1:
        values = values.to(torch.float32)
    return torch.stack(torch.aminmax(values))


def _read(span: torch.Tensor | None) -> Extent | None:
    try:
        return None if span is None else Extent(*span.tolist())
    except RuntimeError:  # vmap: one value for a whole batch cannot be read
        return None
