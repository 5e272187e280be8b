"""The text of `opintercept diff`: settings, counts, the first divergence, and the modules that differ.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opintercept._core.tensors import TensorMeta
from opintercept._core.text import counted, printable
from opintercept.cli.diff.words import WIDTH, module_text, number_text, short_op
from opintercept.cli.terminal.output import fitted, listed, named_run, nonfinite, width
from opintercept.cli.terminal.style import styled
from opintercept.runs.compare.difference import (
    KINDS,
    NOT_RECORDED,
    Absent,
    CallDifference,
    Difference,
    RoleDifference,
    Unmatched,
)
from opintercept.runs.compare.pairing import module_name
from opintercept.runs.store.codec import is_output
from opintercept.runs.store.run import Run

_WIDE = 120  # columns of a terminal that has room for whole heads
_WHY = {
    "added": "the operands are equal but the output differs: this call adds the difference",
    "inherited": "an operand differs that may come from an earlier call that differs",
    "unclear": "the recorded operands are equal, but the operator has others, draws random numbers, or raised in one "
    "of the runs",
}


def difference_text(found: Difference, a: Run, b: Run, limit: int) -> list[str]:
    """The lines of the result."""
    lines = [f"A  {named_run(a)}", f"B  {named_run(b)}"]
    settings = found.settings[:limit]
    if settings:
        rows = [(printable(n, WIDTH), printable(x, WIDTH) or "-", printable(y, WIDTH) or "-") for n, x, y in settings]
        lines += ["", fitted([["the runs differ in", "A", "B"], *rows], left=3)]
    if found.ranks not in ((), ((0, 0),)):
        pairs = [f"{one} with {other}" for one, other in found.ranks]
        lines += ["", f"ranks compared, A with B: {listed(pairs, 8)}"]
    lines += ["", *_absent(found.absent, a, b), *_counts(found)]
    if found.first is not None:
        lines += ["", *_first(found.first, found.before)]
    if found.modules:
        lines += ["", _modules(found)]
        if found.modules_in_all > len(found.modules):
            lines.append(f"... and {found.modules_in_all - len(found.modules):,} more; a larger --limit shows them")
    if found.unmatched:
        lines += ["", _unmatched(found.unmatched)]
    return lines


def _absent(absent: tuple[Absent, ...], a: Run, b: Run) -> list[str]:
    """Name the processes without calls in one run, and those missing in both."""
    lines = []
    for run, name, other in (("a", "A", "B"), ("b", "B", "A")):
        for empty in (False, True):
            found = [each for each in absent if (each.run, each.empty) == (run, empty)]
            if found:
                ranks = [each.rank for each in found]
                calls = sum(each.calls for each in found)
                compared = f"{counted(calls, 'call')} of {other} {'was' if calls == 1 else 'were'} not compared"
                lines.append(f"{_no_calls(ranks) if empty else _missing(ranks)} in {name}: {compared}")
    for name, side in (("A", a), ("B", b)):
        expected = range(min(side.info.world_size, 1 << 16))
        named = {each.rank for each in absent if each.run == name.lower()}
        lost = [] if side.alone else [rank for rank in expected if rank not in side.infos and rank not in named]
        if lost:
            lines.append(f"{_missing(lost)} in {name}, which had {side.info.world_size:,} processes")
    return lines


def _missing(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is missing" if len(ranks) == 1 else f"ranks {listed(ranks)} are missing"


def _no_calls(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has no calls" if len(ranks) == 1 else f"ranks {listed(ranks)} have no calls"


def _counts(found: Difference) -> list[str]:
    a, b = found.calls
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in found.kinds.items())
    lines = [f"{a:,} calls in A, {b:,} in B, {found.pairs:,} compared: {kinds or 'none'}"]
    weak = [f"{found.by[by]:,} by {by}" for by in ("statistics", "sample", "tensors", "metadata") if found.by.get(by)]
    if weak:
        lines.append(f"judged equal without a hash of all bits: {', '.join(weak)}")
    if found.kinds.get("not compared"):
        lines.append("not compared: nothing but shapes and dtypes was recorded that could be compared")
    if found.metadata:
        lines.append(f"{found.metadata:,} have operands or outputs whose shape or dtype differs")
    if other := {how: number for how, number in found.pairings.items() if how != "ordinal"}:
        words = {
            "sequence": "by alignment",
            "family": "with another operator",
            "shape": "under another module name",
        }
        lines.append("paired " + ", ".join(f"{number:,} {words[how]}" for how, number in other.items()))
    if any(found.unmatched_calls):
        lines.append(f"without a counterpart: {found.unmatched_calls[0]:,} of A, {found.unmatched_calls[1]:,} of B")
    if found.equal:
        compared = found.pairs > found.kinds.get("not compared", 0)
        lines.append(styled(found.verdict, "right") if compared else found.verdict)
    return lines


def _where(call: CallDifference) -> str:
    one, other = call.a.record, call.b.record
    text = f"call {one.index} of A"
    text += f" (rank {call.a.rank})" if call.a.rank or call.b.rank else ""
    text += f" and {other.index} of B"
    text += f" (rank {call.b.rank})" if call.a.rank or call.b.rank else ""
    text += f", step {one.step}, {one.phase}: {short_op(one.op)} in {module_text(one.module)}"
    if (one.op, module_name(one.module)) != (other.op, module_name(other.module)):
        text += f" against {short_op(other.op)} in {module_text(other.module)}"
    return text


def _first(call: CallDifference, before: tuple[int, int]) -> list[str]:
    lines = [styled(f"first divergence: {_where(call)}", "wrong")]
    if call.a.record.source is not None:
        lines.append(f"  at {printable(call.a.record.source, WIDTH)}")
    lines += [
        f"  changed argument: {printable(name, WIDTH)} is {_argument(one)} in A and {_argument(other)} in B"
        for name, one, other in call.arguments[:8]
    ]
    if call.changed:
        changed = " and ".join(map(_whose(call), call.changed))
        differs = "differs" if len(call.changed) == 1 else "differ"
        lines.append(f"  changed operand: {changed} {differs}, and no earlier difference explains it")
    elif not call.arguments:
        lines.append(f"  {call.kind}: {_WHY[call.kind]}")
    lines += _reordered(call)
    lines += _nonfinite(call)
    if any(before):
        lines.append(f"  {before[0]:,} earlier calls of A and {before[1]:,} of B have no counterpart")
    for name, error in (("A", call.a.error), ("B", call.b.error)):
        if error is not None:
            lines.append(f"  raised in {name}: {printable(error, 2 * WIDTH)}")
    head = ("", "", "A", "B", "by", "max abs", "/ max |A|", "max rel", "max ulp", "cosine")
    columns = zip(head, *map(_role, call.roles), strict=True)
    known = [column for column in columns if not column[0] or set(column[1:]) != {"-"}]
    return [*lines, fitted(list(zip(*known, strict=True)), left=5, indent="  ")]


def _type(meta: TensorMeta | None) -> str:
    if meta is None:
        return "-"
    return printable(str(meta), WIDTH) if meta.dtype else f"{meta.shape[0]:,} values"


def _argument(value: Any) -> str:
    return value if value == NOT_RECORDED else printable(repr(value), WIDTH)


def _whose(call: CallDifference) -> Callable[[str], str]:
    """Return a function that names an operand, and its run if only one run has it."""
    only = {role.role: "B" if role.a is None else "A" for role in call.roles if (role.a is None) != (role.b is None)}
    return lambda name: f"{name} (only {only[name]} has one)" if name in only else name


def _reordered(call: CallDifference) -> list[str]:
    """Name the operands and outputs whose statistics are equal although their values are not."""
    found = [role.role for role in call.roles if role.equal is False and role.by == "hash" and role.max_absolute == 0]
    if not found:
        return []
    has = "has" if len(found) == 1 else "have"
    return [f"  {listed(found)} {has} equal statistics: the order of the values may differ, as after a transpose"]


def _nonfinite(call: CallDifference) -> list[str]:
    """Name the operands and outputs with NaN or Inf."""
    lines = []
    for text, outputs in (("operands", False), ("outputs", True)):
        found = [
            f"{role.role} of {name} ({counts})"
            for role in call.roles
            for name, values in (("A", role.a_values), ("B", role.b_values))
            if is_output(role.role) is outputs and (counts := nonfinite(values))
        ]
        if found:
            lines.append(f"  NaN or Inf in {text}: {listed(found)}")
    return lines


def _role(role: RoleDifference) -> tuple[str, ...]:
    verdict = {True: "equal", False: "differs", None: "unknown"}[role.equal]
    known = role.max_absolute or (role.equal is False and role.max_absolute is not None)
    bound = ">= " if role.by in ("sample", "statistics", "hash") and known else ""
    return (
        role.role,
        verdict,
        _type(role.a),
        _type(role.b),
        role.by or "-",
        bound + number_text(role.max_absolute),
        bound + number_text(role.relative),
        number_text(role.max_relative),
        number_text(role.max_ulp),
        "-" if role.cosine is None else f"{role.cosine:.9g}",
    )


def _modules(found: Difference) -> str:
    kinds = [kind for kind in KINDS[1:] if any(row.kinds.get(kind) for row in found.modules)]
    ranks = len(found.ranks) > 1
    rows = [
        (
            *([f"{row.ranks[0]}, {row.ranks[1]}"] if ranks else []),
            module_text(row.module) + (f" ~ {module_text(row.other)}" if row.other != row.module else ""),
            row.phase,
            str(row.index),
            str(row.calls),
            *(str(row.kinds.get(kind, 0) or "") for kind in kinds),
            number_text(row.relative),
        )
        for row in found.modules
    ]
    names: tuple[str, ...] = ("modules that differ", "pass", "first", "calls", *kinds, "max abs / max |A|")
    if (width() or _WIDE) < _WIDE:
        names = ("differing", "pass", "first", "calls", *(kind.removeprefix("changed ") for kind in kinds), "relative")
    return fitted([(*(["ranks"] if ranks else []), *names), *rows], left=2 + ranks, last=names[:1])


def _unmatched(unmatched: tuple[Unmatched, ...]) -> str:
    rows = [
        (
            row.run.upper(),
            module_text(row.module),
            short_op(row.op),
            row.phase + (f" of {row.grad_of}" if row.grad_of else ""),
            str(row.index),
            str(row.calls),
        )
        for row in unmatched
    ]
    return fitted(
        [("run", "without a counterpart", "operator", "pass", "first", "calls"), *rows],
        left=4,
        last=("without a counterpart",),
    )
