"""The text of a comparison of two runs: the calls, modules and processes in it. Must not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opintercept._core.tables import Cells, Marked, Part
from opintercept._core.tensors import TensorMeta
from opintercept._core.text import counted, listed, printable
from opintercept.runs.compare.difference import (
    KINDS,
    NOT_RECORDED,
    Absent,
    CallDifference,
    ModuleDifference,
    RoleDifference,
    Unmatched,
)
from opintercept.runs.compare.pairing import module_name
from opintercept.runs.compare.words import WIDTH, module_text, nonfinite, number_text, short_op
from opintercept.runs.store.codec import is_output
from opintercept.runs.store.run import RunHead

_WHY = {
    "added": "the operands are equal but the output differs: this call adds the difference",
    "inherited": "an operand differs that may come from an earlier call that differs",
    "unclear": "the recorded operands are equal, but the operator has others, draws random numbers, or raised in one "
    "of the runs",
}


def settings_table(settings: Sequence[tuple[str, str, str]]) -> Cells:
    """In what the descriptions of the runs differ."""
    rows = [[printable(text, WIDTH) or "-" for text in row] for row in settings]
    return Cells(["the runs differ in", "A", "B"], rows, left=3)


def absent_lines(absent: Sequence[Absent], a: RunHead, b: RunHead) -> Iterator[str]:
    """Name the processes without calls in one run, and those missing in both."""
    for run, name, other in (("a", "A", "B"), ("b", "B", "A")):
        for empty in (False, True):
            found = [each for each in absent if (each.run, each.empty) == (run, empty)]
            if found:
                ranks = [each.rank for each in found]
                calls = sum(each.calls for each in found)
                compared = f"{counted(calls, 'call')} of {other} {'was' if calls == 1 else 'were'} not compared"
                yield f"{_no_calls(ranks) if empty else _missing(ranks)} in {name}: {compared}"
    for name, side in (("A", a), ("B", b)):
        expected = range(min(side.info.world_size, 1 << 16))
        named = {*side.ranks, *(each.rank for each in absent if each.run == name.lower())}
        lost = [] if side.alone else [rank for rank in expected if rank not in named]
        if lost:
            yield f"{_missing(lost)} in {name}, which had {side.info.world_size:,} processes"


def _missing(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is missing" if len(ranks) == 1 else f"ranks {listed(ranks)} are missing"


def _no_calls(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has no calls" if len(ranks) == 1 else f"ranks {listed(ranks)} have no calls"


def first_parts(call: CallDifference, before: tuple[int, int], unmatched: Sequence[Unmatched]) -> Iterator[Part]:
    """Describe the first call that differs, and the calls before it that have no counterpart."""
    yield Marked(f"first divergence: {_where(call)}", "wrong")
    if call.a.record.source is not None:
        yield f"  at {printable(call.a.record.source, WIDTH)}"
    for name, one, other in call.arguments[:8]:
        yield f"  changed argument: {printable(name, WIDTH)} is {_argument(one)} in A and {_argument(other)} in B"
    if call.changed:
        changed = " and ".join(map(_whose(call), call.changed))
        differs = "differs" if len(call.changed) == 1 else "differ"
        yield f"  changed operand: {changed} {differs}, and no earlier difference explains it"
    elif not call.arguments:
        yield f"  {call.kind}: {_WHY[call.kind]}"
    yield from _reordered(call)
    yield from _nonfinite(call)
    for run, side, calls in (("a", call.a, before[0]), ("b", call.b, before[1])):
        if calls:
            earlier = [u for u in unmatched if (u.run, u.rank) == (run, side.rank) and u.index < side.record.index]
            yield f"  before it, only {run.upper()} has {counted(calls, 'call')}{_last_of(earlier)}"
    for run, error in (("A", call.a.error), ("B", call.b.error)):
        if error is not None:
            yield f"  raised in {run}: {printable(error, 2 * WIDTH)}"
    head = ("", "", "A", "B", "by", "max abs", "/ max |A|", "max rel", "max ulp", "cosine")
    columns = zip(head, *map(_role, call.roles), strict=True)
    known = [column for column in columns if not column[0] or set(column[1:]) != {"-"}]
    names, *rows = map(list, zip(*known, strict=True))
    yield Cells(names, rows, left=5, indent="  ")


def _last_of(unmatched: list[Unmatched]) -> str:
    """The operators of the last of these calls that are in one module, of which one may be the cause."""
    unmatched.sort(key=lambda each: each.index)
    ops = [short_op(each.op) for each in unmatched if each.module == unmatched[-1].module]
    return f", the last: {', '.join(ops[-6:])} in {module_text(unmatched[-1].module)}" if ops else ""


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


def _reordered(call: CallDifference) -> Iterator[str]:
    """Name the operands and outputs whose statistics are equal although their values are not."""
    found = [role.role for role in call.roles if role.equal is False and role.by == "hash" and role.max_absolute == 0]
    if found:
        has = "has" if len(found) == 1 else "have"
        yield f"  {listed(found)} {has} equal statistics: the order of the values may differ, as after a transpose"


def _nonfinite(call: CallDifference) -> Iterator[str]:
    """Name the operands and outputs with NaN or Inf."""
    for text, outputs in (("operands", False), ("outputs", True)):
        found = [
            f"{role.role} of {name} ({counts})"
            for role in call.roles
            for name, values in (("A", role.a_values), ("B", role.b_values))
            if is_output(role.role) is outputs and (counts := nonfinite(values))
        ]
        if found:
            yield f"  NaN or Inf in {text}: {listed(found)}"


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


def modules_table(modules: Sequence[ModuleDifference], in_all: int, *, ranks: bool) -> Cells:
    """The modules with a call that differs; with the processes of each if there are several."""
    kinds = [kind for kind in KINDS[1:] if any(row.kinds.get(kind) for row in modules)]
    rows = [
        [
            *([f"{row.ranks[0]}, {row.ranks[1]}"] if ranks else []),
            module_text(row.module) + (f" ~ {module_text(row.other)}" if row.other != row.module else ""),
            row.phase,
            str(row.index),
            str(row.calls),
            *(str(row.kinds.get(kind, 0) or "") for kind in kinds),
            number_text(row.relative),
        ]
        for row in modules
    ]
    first = ["ranks"] if ranks else []
    head = [*first, "modules that differ", "pass", "first", "calls", *kinds, "max abs / max |A|"]
    brief = [kind.removeprefix("changed ") for kind in kinds]
    short = [*first, "differing", "pass", "first", "calls", *brief, "relative"]
    notes = [f"... and {in_all - len(modules):,} more; a larger limit shows them"] if in_all > len(modules) else []
    return Cells(head, rows, 2 + ranks, notes, last=("modules that differ", "differing"), short=short)


def unmatched_table(unmatched: Sequence[Unmatched]) -> Cells:
    """The calls without a counterpart."""
    rows = [
        [
            row.run.upper(),
            module_text(row.module),
            short_op(row.op),
            row.phase + (f" of {row.grad_of}" if row.grad_of else ""),
            str(row.index),
            str(row.calls),
        ]
        for row in unmatched
    ]
    head = ["run", "without a counterpart", "operator", "pass", "first", "calls"]
    return Cells(head, rows, left=4, last=("without a counterpart",))
