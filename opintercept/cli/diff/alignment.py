"""The text of `opintercept diff --align weights`. Must not import torch."""

from __future__ import annotations

from collections import Counter

from opintercept._core.text import counted, printable
from opintercept.cli.terminal.output import fitted, listed, named_run
from opintercept.cli.terminal.style import styled
from opintercept.runs.align.alignment import Aligned, Alignment, Apart
from opintercept.runs.compare.pairing import module_name, operator_name
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.run import Run

_WIDTH = 60
_MOST = 4  # calls of B that one row names
_BY = {
    "rows": "by equal rows of the weights",
    "parts": "by parts of these rows",
    "permuted": "by rows whose elements are permuted",
    "values": "by rows with close values",
    "sum": "as a sum with a low-rank product",
    "neighbours": "by what stands before and after",
}


def aligned_text(found: Alignment, a: Run, b: Run, limit: int) -> list[str]:
    """The lines of the result."""
    lines = [f"A  {named_run(a)}", f"B  {named_run(b)}"]
    lines += ["", *_counts(found)]
    if found.first is not None:
        lines += ["", *_first(found.first)]
    lines += ["", _table(found.pairs[:limit])]
    if len(found.pairs) > limit:
        lines.append(f"... and {len(found.pairs) - limit:,} more; a larger --limit shows them")
    if found.apart:
        lines += ["", *_apart(found.apart, limit)]
    return lines


def _counts(found: Alignment) -> list[str]:
    of_a, of_b = found.calls
    how = Counter(pair.by for pair in found.pairs)
    kinds = Counter(pair.kind for pair in found.pairs)
    shows_it = found.first is None and any(kind != "not compared" for kind in kinds)
    return [
        f"joined: {len(found.pairs):,} of {counted(of_a, 'forward call')} of A, {found.joined_b:,} of {of_b:,} of B: "
        + ", ".join(f"{count:,} {_BY[by]}" for by, count in how.items()),
        f"compared: {', '.join(f'{count:,} {kind}' for kind, count in kinds.items())}",
        *([styled("no joined call differs by more than rounding", "right")] if shows_it else []),
    ]


def _first(pair: Aligned) -> list[str]:
    record = pair.a.record
    where = " and ".join(f"call {each.record.index} in {_module(each)}" for each in pair.b[:_MOST])
    call = f"call {record.index} of A, step {record.step}: {operator_name(record.op)} in {_module(pair.a)}"
    lines = [styled(f"first divergence: {call} against {where} of B", "wrong")]
    if record.source is not None:
        lines.append(f"  at {printable(record.source, _WIDTH)}")
    if "rhs" in pair.changed:
        count = len(pair.changed_rows)
        lines.append(
            f"  changed operand: {'row' if count == 1 else 'rows'} {listed(pair.changed_rows)} of the weight, by up to "
            f"{_number(pair.weight)} of a row"
        )
    if "bias" in pair.changed:
        lines.append("  changed operand: the bias")
    if "lhs" in pair.changed:
        lines.append(
            f"  changed operand: the input differs by {_number(pair.lhs)}, far more than all matmuls before: "
            "the cause lies between them and this one"
        )
    if pair.kind == "added":
        for name, rounding in (("A", pair.rounding_a), ("B", pair.rounding_b)):
            lines.append(f"  the matmul in {name} is wrong by {_number(rounding)} times its rounding")
    if pair.output is not None:
        lines.append(
            f"  output: norm(b - a) / norm(a) is {_number(pair.output)}, max |b - a| {_number(pair.max_absolute)}"
        )
    return lines


def _table(pairs: tuple[Aligned, ...]) -> str:
    rows = [["A", "B", "joined by", "rows", "weight", "input", "output", ""]]
    for pair in pairs:
        others = list(dict.fromkeys(_module(each) for each in pair.b))
        rows.append(
            [
                _module(pair.a),
                ", ".join(others[:_MOST]) + (", ..." if len(others) > _MOST else ""),
                pair.by,
                f"{pair.rows} of {pair.of}" if pair.of else "",
                *(_number(value) for value in (pair.weight, pair.lhs, pair.output)),
                pair.kind,
            ]
        )
    return fitted(rows, left=3, last=["A", "B"], spare=["rows", "weight", "input"])


def _apart(apart: tuple[Apart, ...], limit: int) -> list[str]:
    counts = Counter((each.run, each.reason) for each in apart)
    examples = {(each.run, each.reason): each.call for each in reversed(apart)}
    lines = []
    for (run, reason), count in list(counts.items())[:limit]:
        call = examples[run, reason]
        lines.append(
            f"not joined: {counted(count, 'call')} of {run.upper()}, the first of them call {call.record.index}, "
            f"{operator_name(call.record.op)} in {_module(call)}: {printable(reason, 4 * _WIDTH)}"
        )
    return lines


def _module(call: StoredCall) -> str:
    name = printable(module_name(call.record.module) or "-", _WIDTH)
    return f"{name} (rank {call.rank})" if call.rank else name


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
