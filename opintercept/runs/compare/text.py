"""The text of a comparison of two runs: the calls, modules and processes in it. Must not import torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    order,
)
from opintercept.runs.program.names import module_name
from opintercept.runs.program.words import WIDTH, module_text, nonfinite, number_text, short_op
from opintercept.runs.store.codec import is_output
from opintercept.runs.store.run import RunHead
from opintercept.runs.why.answer import Answer

_WHY = {
    "inherited": "an operand differs that may come from an earlier call that differs",
    "unclear": "the recorded operands are equal, but the operator has others, draws random numbers, or raised in one "
    "of the runs",
}
_FAR = 0.1  # operands that differ by more of their largest modulus may be others
_MISSING = "is missing", "are missing"
# What operators call their operands, where that says more than the role.
_NAMES = {"attention": ("query", "key"), "linear": ("input", "weight"), "conv": ("input", "weight")}


def settings_table(settings: Sequence[tuple[str, str, str]]) -> Cells:
    """In what the descriptions of the runs differ."""
    rows = [[printable(text, WIDTH) or "-" for text in row] for row in settings]
    return Cells(["the runs differ in", "A", "B"], rows, left=3)


def hint(judged: Answer | str, a: RunHead, b: RunHead) -> Iterator[str]:
    """Say what is unknown of a difference, and which command says more."""
    record = "record both with `opintercept run --ops all --tensors full`, then"
    if not isinstance(judged, Answer):
        how = f"; {record}" if "recorded" in judged else ""
        yield f"whether rounding explains it is unknown, as {judged}{how}:"
    elif judged.operators == "products":
        yield f"operators between products were not recorded; {record}:"
    else:
        yield "what it costs the loss, and what was not compared:"
    yield f"  opintercept why {' '.join(shlex.quote(printable(each.path)) for each in (a, b))}"


def absent_lines(absent: Sequence[Absent], a: RunHead, b: RunHead) -> Iterator[str]:
    """Name the processes without calls in one run, and those missing in both."""
    for run, name, other in (("a", "A", "B"), ("b", "B", "A")):
        for empty in (False, True):
            found = [each for each in absent if (each.run, each.empty) == (run, empty)]
            if found:
                ranks = [each.rank for each in found]
                calls = sum(each.calls for each in found)
                compared = f"{counted(calls, 'call')} of {other} {'was' if calls == 1 else 'were'} not compared"
                what = ("has no calls", "have no calls") if empty else _MISSING
                titles = (a if (run == "a") is empty else b).titles  # of the run that has a folder for them
                yield f"{_ranks(ranks, titles, *what)} in {name}: {compared}"
    for name, side in (("A", a), ("B", b)):
        expected = range(min(side.info.world_size, 1 << 16))
        named = {*side.ranks, *(each.rank for each in absent if each.run == name.lower())}
        lost = [] if side.alone or side.titles else [rank for rank in expected if rank not in named]
        if lost:
            yield f"{_ranks(lost, {}, *_MISSING)} in {name}, which had {side.info.world_size:,} processes"


def _ranks(ranks: list[int], titles: Mapping[int, str], one: str, several: str) -> str:
    if titles:
        names = printable(listed([titles.get(rank, str(rank)) for rank in ranks]))
        return f"process {names} {one}" if len(ranks) == 1 else f"processes {names} {several}"
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {listed(ranks)} {several}"


def first_parts(
    call: CallDifference, before: tuple[int, int], unmatched: Sequence[Unmatched], optimizer: bool
) -> Iterator[Part]:
    """Describe the first call that differs, and the calls before it that have no counterpart."""
    roles = {role.role: role for role in call.roles}
    yield Marked(f"first divergence: {_where(call)}", "wrong")
    if call.a.record.source is not None:
        yield f"  at {printable(call.a.record.source, WIDTH)}"
    for name, one, other in call.arguments[:8]:
        yield f"  changed argument: {printable(name, WIDTH)} is {_argument(one)} in A and {_argument(other)} in B"
    if call.changed:
        yield f"  changed operand: {_changed(call)}"
    if optimizer:
        yield "  the optimizer: it was equal in an earlier call, and the gradients recorded since then are equal"
    if call.kind == "added" or not (call.changed or call.arguments):
        yield f"  {call.kind}: {_why(call)}"
    if call.pairing != "ordinal" and any(order(roles[name].relative) > _FAR for name in call.changed if name in roles):
        yield "  they may not belong together: `opintercept why A B` joins calls by their values"
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


def _changed(call: CallDifference) -> str:
    """Which operands differ, in words."""
    roles = {role.role: role for role in call.roles}
    changed = [roles[name] for name in call.changed if name in roles]
    dtypes = {(role.a.dtype, role.b.dtype) for role in changed if role.a and role.b and role.a.dtype != role.b.dtype}
    (one, other) = dtypes.pop() if len(dtypes) == 1 else ("", "")
    dtype = f", {one} in A and {other} in B," if one else ""
    above = " above the tolerance" if any(role.equal and role.max_absolute for role in call.roles) else ""
    text = f"{' and '.join(map(_whose(call), call.changed))}{dtype} {'differs' if len(call.changed) == 1 else 'differ'}"
    return f"{text}, and no earlier difference{above} explains it"


def _why(call: CallDifference) -> str:
    """Why a call is of its kind, in words."""
    close = [role for role in call.operands if role.equal and role.max_absolute]
    if call.kind == "added":
        if call.output is not None and call.output.equal is None:
            return "the operands are equal, and the outputs cannot be compared one by one"
        if any(role.equal is False for role in call.operands):
            return "the operands differ by rounding, and the output by more"
        return f"the operands are {'equal within the tolerance' if close else 'equal'} but the output differs"
    if close and call.kind in ("unclear", "inherited"):
        most = max(close, key=lambda role: order(role.relative))
        less = f"operands differ by less than the tolerance, {most.role} by {number_text(most.relative)} of its largest"
        return f"the {less}, so it may come from them"
    return _WHY[call.kind]


def _last_of(unmatched: list[Unmatched]) -> str:
    """The operators of the last of these calls that are in one module, of which one may be the cause."""
    unmatched.sort(key=lambda each: each.index)
    ops = [short_op(each.op) for each in unmatched if each.module == unmatched[-1].module]
    return f", the last: {', '.join(ops[-6:])} in {module_text(unmatched[-1].module)}" if ops else ""


def _where(call: CallDifference) -> str:
    one, other = call.a.record, call.b.record
    ranks = [f" (rank {each.rank})" if call.a.rank or call.b.rank else "" for each in (call.a, call.b)]
    text = f"call {one.index} of A{ranks[0]} and {other.index} of B{ranks[1]}"
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
    names = next((names for word, names in _NAMES.items() if word in call.a.record.op), ())
    own = dict(zip(("lhs", "rhs"), names, strict=False))

    def whose(name: str) -> str:
        notes = [own[name]] if name in own else []
        notes += [f"only {only[name]} has one"] if name in only else []
        return f"{name} ({', '.join(notes)})" if notes else name

    return whose


def _reordered(call: CallDifference) -> Iterator[str]:
    """Name the operands and outputs whose statistics are equal although their values are not."""
    found = [role.role for role in call.roles if _is_reordered(role)]
    if found:
        has = "has" if len(found) == 1 else "have"
        yield f"  {listed(found)} {has} the same values in another order, as after a transpose: only the hashes differ"


def _is_reordered(role: RoleDifference) -> bool:
    """Whether all statistics are equal although values differ, by more than rounding."""
    one, other = role.a_values, role.b_values
    if role.equal is not False or role.by == "hash":
        return role.equal is False and role.max_absolute == 0
    if one is None or other is None or order(role.relative) < 1e-3:
        return False
    same = all(getattr(one, name) == getattr(other, name) for name in ("count", "nan", "inf", "min", "max"))
    return same and math.isclose(one.rms or 0.0, other.rms or 0.0, rel_tol=1e-6)


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
        *("order" if bound and not size else bound + number_text(size) for size in (role.max_absolute, role.relative)),
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
