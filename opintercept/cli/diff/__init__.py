"""`opintercept diff`: where two recorded runs, or the ranks of one, first differ, as text or JSON.

Must not import torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from opintercept._core.errors import OpInterceptError
from opintercept._core.record import CallRecord
from opintercept._core.tensors import TensorMeta
from opintercept._core.text import counted, printable
from opintercept._ranks.expectations import named_ranks, who_parted
from opintercept.cli.diff.alignment import aligned_text
from opintercept.cli.filters import NameFilter
from opintercept.cli.options import add_module_and_phase, add_op, count, tolerance
from opintercept.cli.terminal.output import (
    finite_json,
    fitted,
    listed,
    named_run,
    nonfinite,
    plain_warnings,
    safe_stdout,
    width,
)
from opintercept.cli.terminal.progress import progress
from opintercept.cli.terminal.style import styled
from opintercept.runs.align.align import align
from opintercept.runs.align.alignment import Alignment
from opintercept.runs.compare.diff import compare_runs
from opintercept.runs.compare.difference import (
    KINDS,
    NOT_RECORDED,
    Absent,
    CallDifference,
    Difference,
    RoleDifference,
    Unmatched,
)
from opintercept.runs.compare.pairing import module_name, operator_name
from opintercept.runs.compare.values import Comparer
from opintercept.runs.ranks.diff import diff_ranks
from opintercept.runs.ranks.difference import RankDifference, RankFinding
from opintercept.runs.record.compaction import open_compacted
from opintercept.runs.store.codec import is_output
from opintercept.runs.store.run import Run

_WIDTH = 60
_LEAST = 1 << 20  # bytes of lines of one process that are worth being compacted, as a run has many of them
_MOST_GROUPS = 4  # of ranks that are shown
_WIDE = 120  # columns of a terminal that has room for whole heads
_WHY = {
    "added": "the operands are equal but the output differs: this call adds the difference",
    "inherited": "an operand differs that may come from an earlier call that differs",
    "unclear": "the recorded operands are equal, but the operator has others, draws random numbers, or raised in one "
    "of the runs",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("a", help="folder of the run to measure against, or with --ranks of the only one")
    parser.add_argument("b", nargs="?", help="folder of the other run")
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="compare the ranks of one run: weights that should be equal, calls, and the size of outputs",
    )
    parser.add_argument(
        "--align",
        choices=("weights",),
        help="join calls by the rows of their weights and not by names, if the modules have other names in B; needs "
        "runs with --tensors full",
    )
    parser.add_argument(
        "--rtol",
        type=tolerance,
        default=0.0,
        metavar="X",
        help="treat tensors as equal if no value differs by more than X times the largest magnitude in A; judged by "
        "statistics if values were not recorded (default 0: bit for bit)",
    )
    parser.add_argument("--atol", type=tolerance, default=0.0, metavar="X", help="or by more than X (default 0)")
    add_op(parser, "report")
    add_module_and_phase(parser, "report")
    parser.add_argument("--limit", metavar="N", type=count, default=20, help="rows of each table (default 20)")
    parser.add_argument("--no-tensors", action="store_true", help="compare only hashes and statistics")
    parser.add_argument("--json", action="store_true", help="print JSON, with null for numbers that are not finite")
    status = "exit status: 0 if the runs, or ranks, are equal, 1 if they differ, 2 if they cannot be\n  compared"
    parser.epilog = "\n\n".join(filter(None, (status, parser.epilog)))


def command(arguments: argparse.Namespace) -> int:
    """Compare two runs, or the ranks of one, and print the result."""
    if arguments.ranks:
        return _command_of_ranks(arguments)
    if arguments.b is None:
        raise OpInterceptError("diff needs the folders of two runs; to compare the ranks of one, pass --ranks")
    if arguments.align:
        return _command_of_aligned(arguments)
    with plain_warnings("diff"), progress():
        a, b = open_compacted(arguments.a), open_compacted(arguments.b)
        names = NameFilter(arguments.module, arguments.op, module_name, operator_name)
        phase = arguments.phase
        chosen = phase is not None or arguments.op is not None or arguments.module is not None

        def select(record: CallRecord) -> bool:
            return names(record) and phase in (None, record.phase)

        comparer = Comparer(a, b, arguments.rtol, arguments.atol, not arguments.no_tensors)
        worst = arguments.limit if arguments.json else 1  # text does not show them
        try:
            found = compare_runs(a, b, comparer, arguments.limit, worst, select if chosen else None)
        except OpInterceptError:
            names.check("the runs")
            raise
        names.check("the runs")
    _print(arguments, {"a": a, "b": b}, found, lambda: _text(found, a, b, arguments.limit))
    return 0 if found.equal else 1


def _command_of_aligned(arguments: argparse.Namespace) -> int:
    _refuse(arguments, "--align weights joins all forward calls, and", "--no-tensors", "--phase")
    with plain_warnings("diff"), progress():
        a, b = open_compacted(arguments.a), open_compacted(arguments.b)
        found = align(a, b)
    _print(arguments, {"a": a, "b": b}, found, lambda: aligned_text(found, a, b, arguments.limit))
    return 0 if found.first is None and not found.apart else 1


def _refuse(arguments: argparse.Namespace, what: str, *more: str) -> None:
    """Refuse options that a comparison does not take."""
    names = ("--rtol", "--atol", "--op", "--module", *more)
    given = [name for name in names if getattr(arguments, name.strip("-").replace("-", "_"))]
    if given:
        raise OpInterceptError(f"{what} does not take {listed(given)}")


def _command_of_ranks(arguments: argparse.Namespace) -> int:
    if arguments.b is not None:
        raise OpInterceptError("--ranks compares the ranks of one run, and does not take a second run")
    _refuse(arguments, "--ranks compares the ranks of one run bit for bit, and", "--phase", "--no-tensors", "--align")
    with plain_warnings("diff"), progress():
        run = open_compacted(arguments.a, least=_LEAST)
        found = diff_ranks(run, limit=arguments.limit)
    _print(arguments, {"run": run}, found, lambda: _ranks_text(found, run))
    return 0 if found.equal else 1


def _print(
    arguments: argparse.Namespace,
    compared: dict[str, Run],
    found: Difference | RankDifference | Alignment,
    text: Callable[[], list[str]],
) -> None:
    with safe_stdout():
        if arguments.json:
            plain = {name: _about(run) for name, run in compared.items()} | found.as_dict()
            print(json.dumps(finite_json(plain), indent=1, allow_nan=False))
        else:
            print("\n".join(text()))


def _about(run: Run) -> dict[str, Any]:
    return {"path": str(run.path), "ranks": list(run.ranks), "info": run.info.as_dict()}


def _text(found: Difference, a: Run, b: Run, limit: int) -> list[str]:
    lines = [f"A  {named_run(a)}", f"B  {named_run(b)}"]
    settings = found.settings[:limit]
    if settings:
        rows = [
            (printable(n, _WIDTH), printable(x, _WIDTH) or "-", printable(y, _WIDTH) or "-") for n, x, y in settings
        ]
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
    text += f", step {one.step}, {one.phase}: {_short(one.op)} in {_module(one.module)}"
    if (one.op, module_name(one.module)) != (other.op, module_name(other.module)):
        text += f" against {_short(other.op)} in {_module(other.module)}"
    return text


def _first(call: CallDifference, before: tuple[int, int]) -> list[str]:
    lines = [styled(f"first divergence: {_where(call)}", "wrong")]
    if call.a.record.source is not None:
        lines.append(f"  at {printable(call.a.record.source, _WIDTH)}")
    lines += [
        f"  changed argument: {printable(name, _WIDTH)} is {_argument(one)} in A and {_argument(other)} in B"
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
            lines.append(f"  raised in {name}: {printable(error, 2 * _WIDTH)}")
    head = ("", "", "A", "B", "by", "max abs", "/ max |A|", "max rel", "max ulp", "cosine")
    columns = zip(head, *map(_role, call.roles), strict=True)
    known = [column for column in columns if not column[0] or set(column[1:]) != {"-"}]
    return [*lines, fitted(list(zip(*known, strict=True)), left=5, indent="  ")]


def _looks(meta: TensorMeta | None) -> str:
    if meta is None:
        return "-"
    return printable(str(meta), _WIDTH) if meta.dtype else f"{meta.shape[0]:,} values"


def _argument(value: Any) -> str:
    return value if value == NOT_RECORDED else printable(repr(value), _WIDTH)


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
        _looks(role.a),
        _looks(role.b),
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
    names: tuple[str, ...] = ("modules that differ", "pass", "first", "calls", *kinds, "max abs / max |A|")
    if (width() or _WIDE) < _WIDE:
        names = ("differing", "pass", "first", "calls", *(kind.removeprefix("changed ") for kind in kinds), "relative")
    return fitted([(*(["ranks"] if ranks else []), *names), *rows], left=2 + ranks, last=names[:1])


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
    return fitted(
        [("run", "without a counterpart", "operator", "pass", "first", "calls"), *rows],
        left=4,
        last=("without a counterpart",),
    )


def _module(name: str | None) -> str:
    return "(unknown module)" if name is None else printable(module_name(name) or "(outermost)", _WIDTH)


def _short(op: str) -> str:
    return printable(op.removeprefix("aten::"), _WIDTH)


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.3g}"


def _ranks_text(found: RankDifference, run: Run) -> list[str]:
    """The result as lines."""
    first, last = found.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    lines = [
        named_run(run),
        "",
        f"{counted(len(found.ranks), 'rank')}, {counted(found.calls, 'call')} in {steps}",
        *_shared_weights(found),
    ]
    if not found.outliers:
        lines.append("statistics were not compared: two ranks have no majority that says which of them is the outlier")
    if found.missing:
        lines.append(f"{named_ranks(found.missing)} {'has' if len(found.missing) == 1 else 'have'} no calls")
    if found.unfinished:
        where = listed([f"rank {rank} in step {step}" for rank, step in found.unfinished.items()], 8)
        lines.append(f"not finished, as after a kill: {where}; what follows there was not counted")
    if found.first is None:
        return [*lines, styled("nothing parted", "right")]
    lines += ["", *_first_parted(found.first)]
    if found.found > 1:
        lines += ["", f"{counted(found.found, 'finding')}, of which the later ones may come from the first:"]
        lines.append(_partings(found))
        if found.found > len(found.findings):
            lines.append(f"... and {found.found - len(found.findings):,} more; a larger --limit shows them")
    return lines


def _shared_weights(found: RankDifference) -> list[str]:
    lines = []
    for groups, number in found.shared[:_MOST_GROUPS]:
        shown = " and on ".join(named_ranks(group) for group in groups[:_MOST_GROUPS])
        more = "" if len(groups) <= _MOST_GROUPS else f" and {len(groups) - _MOST_GROUPS} more groups"
        lines.append(f"{counted(number, 'weight')} should be equal on {shown}{more}")
    if len(found.shared) > _MOST_GROUPS:
        lines.append(f"... and weights on {len(found.shared) - _MOST_GROUPS:,} other groups of ranks")
    if not found.shared:
        lines.append("no weight is equal on several ranks when it first appears, so none is compared")
    return lines


def _first_parted(first: RankFinding) -> list[str]:
    lines = [styled(f"first: {_parted(first)}", "wrong")]
    call = f"call {first.index} of rank {first.rank}"
    lines.append(f"  {call}, {first.phase}: {_short(first.op)} in {_module(first.module)}")
    if first.source is not None:
        lines.append(f"  at {printable(first.source, _WIDTH)}")
    if not first.majority:
        lines.append("  no majority of ranks agrees, which would say which of them are wrong")
    return lines


def _parted(finding: RankFinding) -> str:
    step = f"at step {finding.step}"
    parted = who_parted(finding.parts)
    if finding.what in ("weight", "operand"):
        named = f"the weight {finding.operand}" if finding.what == "weight" else f"the operand {finding.operand}"
        return f"{parted} {step}, in {named}"
    if finding.what == "calls":
        made = [
            f"{named_ranks(part)} {'makes' if len(part) == 1 else 'make'} {counted(int(number), 'call')}"
            for part, number in zip(finding.parts, finding.numbers, strict=True)
        ]
        return f"{' and '.join(made)} {step}"
    if finding.what == "order":
        return f"{parted} {step}: the same calls in another order, from this one on"
    who = named_ranks(finding.parts[-1])
    if finding.what == "not finite":
        has = "has" if len(finding.parts[-1]) == 1 else "have"
        return f"{who} {has} NaN or Inf {step} where {named_ranks(finding.parts[0])} {has.replace('has', 'have')} none"
    usual, value = finding.numbers
    figure = "root mean square" if finding.statistic == "rms" else "largest magnitude"
    return f"{who} is an outlier {step}: the output's {figure} is {value:.3g}, and {usual:.3g} on the median rank"


def _partings(found: RankDifference) -> str:
    rows = [
        (
            _module(finding.module),
            finding.phase,
            _short(finding.op),
            finding.operand or "-",
            finding.what,
            str(finding.step),
            named_ranks(finding.odd).partition(" ")[2],
            str(finding.times),
        )
        for finding in found.findings
    ]
    head = ("module", "pass", "operator", "operand", "what", "step", "ranks", "times")
    return fitted([head, *rows], left=5, last=("module",), spare=("operator",))
