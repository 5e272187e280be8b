"""`opintercept diff`: where two recorded runs first part, as text or JSON.

Must not import torch.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any, get_args

from opintercept._call import CallRecord, Phase
from opintercept._table import aligned, printable
from opintercept.cli import count
from opintercept.runs._align import module_name, operator_name
from opintercept.runs.diff import KINDS, CallDifference, Difference, RoleDifference, Unmatched, diff
from opintercept.runs.store import Run, open_run

_WIDTH = 60
_WHY = {
    "added": "the operands are equal, the output is not: the difference is made here",
    "changed operand": "{changed} {differs}, and no call that differs before it explains that",
    "inherited": "an operand differs that can come from a call that differs before it",
    "unclear": "the recorded operands are equal, but this operator has others, or it raised in one of the runs",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("a", help="the folder of a run, against which the other is measured")
    parser.add_argument("b", help="the folder of the other run")
    parser.add_argument("--rtol", type=_tolerance, default=0.0, metavar="X", help=_RTOL)
    parser.add_argument("--atol", type=_tolerance, default=0.0, metavar="X", help="or by X itself (default 0)")
    parser.add_argument(
        "--op", action="append", help="report only this operator, mm or aten::mm; repeat it for several"
    )
    parser.add_argument("--module", metavar="GLOB", help="report only modules of such a name: 'encoder.*'")
    parser.add_argument("--phase", choices=get_args(Phase), help="report only calls of this pass")
    parser.add_argument("--limit", metavar="N", type=count, default=20, help="rows of each table (default 20)")
    parser.add_argument("--no-tensors", action="store_true", help="compare by hashes and statistics alone")
    parser.add_argument("--json", action="store_true", help="print JSON, numbers that are not finite as null")
    parser.epilog = "Exit status: 0 if the runs are equal, 1 if they differ, 2 if they cannot be compared."


_RTOL = (
    "a tensor counts as equal if no value differs by more than X times the largest modulus in A; by statistics "
    "where the values were not kept (default 0: bit for bit)"
)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def command(arguments: argparse.Namespace) -> int:
    """Compare and print."""
    a, b = open_run(arguments.a), open_run(arguments.b)
    found = diff(
        a,
        b,
        rtol=arguments.rtol,
        atol=arguments.atol,
        limit=arguments.limit,
        tensors=not arguments.no_tensors,
        select=_select(arguments),
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may have what the terminal's encoding has not
    try:
        if arguments.json:
            plain = {"a": _about(a), "b": _about(b), **found.as_dict()}
            print(json.dumps(_finite(plain), indent=1, allow_nan=False))
        else:
            print("\n".join(_text(found, a, b, arguments.limit)))
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, and there must be something to flush to at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if found.equal else 1


def _select(arguments: argparse.Namespace) -> Callable[[CallRecord], bool] | None:
    op, phase = arguments.op, arguments.phase
    if op is None and phase is None and arguments.module is None:
        return None
    module = None if arguments.module is None else re.compile(fnmatch.translate(arguments.module)).fullmatch

    def select(record: CallRecord) -> bool:
        name = module_name(record.module)
        return (
            (phase is None or record.phase == phase)
            and (op is None or record.op in op or operator_name(record.op) in op)
            and (module is None or (name is not None and module(name) is not None))
        )

    return select


def _about(run: Run) -> dict[str, Any]:
    return {"path": str(run.path), "ranks": list(run.ranks), "info": run.info.as_dict()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(found: Difference, a: Run, b: Run, limit: int) -> list[str]:
    lines = []
    for name, run in (("A", a), ("B", b)):
        lines.append(f"{name}  {printable(str(run.path))}  {printable(' '.join(run.info.argv), 2 * _WIDTH)}".rstrip())
    settings = found.settings[:limit]
    if settings:
        rows = [
            (printable(n, _WIDTH), printable(x, _WIDTH) or "-", printable(y, _WIDTH) or "-") for n, x, y in settings
        ]
        lines += ["", aligned([["the runs differ in", "A", "B"], *rows], left=3)]
    if len(found.ranks) > 1 or found.ranks[0] != (0, 0):
        shown = ", ".join(f"{one} with {other}" for one, other in found.ranks[:8])
        lines += ["", f"processes compared, A's with B's: {shown}{', ...' if len(found.ranks) > 8 else ''}"]
    lines += ["", *_counts(found)]
    if found.first is not None:
        lines += ["", *_first(found.first, found.before)]
    if found.modules:
        lines += ["", _modules(found)]
        if found.modules_in_all > len(found.modules):
            lines.append(f"... and {found.modules_in_all - len(found.modules):,} more, which a larger --limit shows")
    if found.unmatched:
        lines += ["", _unmatched(found.unmatched)]
    return lines


def _counts(found: Difference) -> list[str]:
    a, b = found.calls
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in found.kinds.items())
    lines = [f"{a:,} calls in A, {b:,} in B, {found.pairs:,} compared: {kinds or 'none'}"]
    weak = [f"{found.by[by]:,} by {by}" for by in ("statistics", "sample", "tensors", "metadata") if found.by.get(by)]
    if weak:
        lines.append(f"of those that are equal, not by the hash of all bits: {', '.join(weak)}")
    if found.kinds.get("not compared"):
        lines.append("not compared: of their values nothing was recorded that tells, only shapes and dtypes")
    if found.metadata:
        lines.append(f"{found.metadata:,} have operands or outputs of another shape or dtype")
    if other := {how: number for how, number in found.pairings.items() if how != "ordinal"}:
        words = {
            "sequence": "by an alignment",
            "family": "with another operator",
            "shape": "under another module's name",
        }
        lines.append("paired " + ", ".join(f"{number:,} {words[how]}" for how, number in other.items()))
    if any(found.unmatched_calls):
        lines.append(f"without a counterpart: {found.unmatched_calls[0]:,} of A, {found.unmatched_calls[1]:,} of B")
    if found.equal:
        lines.append("no call differs")
    return lines


def _where(call: CallDifference) -> str:
    one, other = call.a.record, call.b.record
    text = f"call {one.index} of A"
    text += f" (rank {call.a.rank})" if call.a.rank or call.b.rank else ""
    text += f" and {other.index} of B"
    text += f" (rank {call.b.rank})" if call.a.rank or call.b.rank else ""
    text += f", step {one.step}, {one.phase}: {_short(one.op)} in {_module(one.module)}"
    if (one.op, module_name(one.module)) != (other.op, module_name(other.module)):
        text += f" against {_short(other.op)} in {_module(other.module)}"
    return text


def _first(call: CallDifference, before: tuple[int, int]) -> list[str]:
    differs = "differs" if len(call.changed) == 1 else "differ"
    why = _WHY[call.kind].format(changed=" and ".join(call.changed), differs=differs)
    lines = [f"first divergence: {_where(call)}"]
    if call.a.record.source is not None:
        lines.append(f"  at {printable(call.a.record.source, _WIDTH)}")
    lines.append(f"  {call.kind}: {why}")
    if any(before):
        lines.append(f"  before it, {before[0]:,} calls of A and {before[1]:,} of B have no counterpart")
    for name, error in (("A", call.a.error), ("B", call.b.error)):
        if error is not None:
            lines.append(f"  raised in {name}: {printable(error, 2 * _WIDTH)}")
    head = ("", "", "A", "B", "by", "max abs", "/ max |A|", "max rel", "max ulp", "cosine")
    columns = zip(head, *map(_role, call.roles), strict=True)
    known = [column for column in columns if not column[0] or set(column[1:]) != {"-"}]
    table = aligned(list(zip(*known, strict=True)), left=5)
    return [*lines, *(f"  {line}" for line in table.splitlines())]


def _role(role: RoleDifference) -> tuple[str, ...]:
    verdict = {True: "equal", False: "differs", None: "unknown"}[role.equal]
    bound = ">= " if role.by in ("sample", "statistics", "hash") and role.max_absolute else ""
    return (
        role.role,
        verdict,
        "-" if role.a is None else printable(str(role.a), _WIDTH),
        "-" if role.b is None else printable(str(role.b), _WIDTH),
        role.by or "-",
        bound + _number(role.max_absolute),
        bound + _number(role.relative),
        _number(role.max_relative),
        _number(role.max_ulp),
        "-" if role.cosine is None else f"{role.cosine:.9g}",
    )


def _modules(found: Difference) -> str:
    kinds = [kind for kind in KINDS[1:] if any(row.kinds.get(kind) for row in found.modules)]
    ranks = len(found.ranks) > 1
    rows = [
        (
            *([f"{row.ranks[0]}, {row.ranks[1]}"] if ranks else []),
            _module(row.module) + (f" ~ {_module(row.other)}" if row.other != row.module else ""),
            row.phase,
            str(row.index),
            str(row.calls),
            *(str(row.kinds.get(kind, 0) or "") for kind in kinds),
            _number(row.relative),
        )
        for row in found.modules
    ]
    head = (*(["ranks"] if ranks else []), "modules in which calls differ", "pass", "first", "calls", *kinds)
    return aligned([(*head, "max abs / max |A|"), *rows], left=2 + ranks)


def _unmatched(unmatched: tuple[Unmatched, ...]) -> str:
    rows = [
        (
            row.run.upper(),
            _module(row.module),
            _short(row.op),
            row.phase + (f" of {row.grad_of}" if row.grad_of else ""),
            str(row.index),
            str(row.calls),
        )
        for row in unmatched
    ]
    return aligned([("run", "without a counterpart", "operator", "pass", "first", "calls"), *rows], left=4)


def _module(name: str | None) -> str:
    return "(unknown module)" if name is None else printable(module_name(name) or "(outermost)", _WIDTH)


def _short(op: str) -> str:
    return printable(op.removeprefix("aten::"), _WIDTH)


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.3g}"
