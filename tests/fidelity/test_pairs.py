"""The comparisons of runs name the planted cause of each pair of programs, or nothing where nothing is planted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sampled
import torch
from pairs import PAIRS, WRONG, Pair

from opintercept import OpInterceptError, intercept, runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

_ATTENTION = {"lhs": "q", "rhs": "k", "value": "v", "query": "q", "key": "k"}
_PRODUCT = {"lhs": "input", "rhs": "weight"}
_SAME = {"attn_mask": "mask", "is_causal": "mask", "attn_bias": "mask", "dropout_p": "dropout"}
_LINEAR = ("mm", "addmm", "linear", "addmv")


def record(folder: Path, pair: Pair, program: Callable[[], object], ops: Any, *edits: Any) -> runs.Run:
    torch.manual_seed(0)
    recorder = runs.RunRecorder(folder, tensors="full")
    with torch.set_grad_enabled(pair.trains), intercept([*edits, recorder], ops=ops):
        program()
    return runs.open_run(folder)


def verdict(found: runs.Difference | runs.Alignment) -> str | None:
    """What a result names: the module of the first run, and the cause in a word; None if it names nothing."""
    if isinstance(found, runs.Difference):
        if (alone := only_in_one(found)) is not None:
            return alone
    elif found.first is None:
        return unseen(found)
    first: Any = found.first
    return None if first is None else f"{first.a.record.module}: {' '.join(dict.fromkeys(causes(first)))}"


def causes(first: Any) -> Iterator[str]:
    """The words for what a pair of calls adds."""
    metas = [(role.a, role.b) for role in getattr(first, "roles", ()) if role.a and role.b]
    if first.changed and any(a.dtype != b.dtype for a, b in metas):
        yield "dtype"
    elif first.changed and first.a.record.phase == "backward":
        yield "gradient"
    else:
        words = _ATTENTION if "attention" in first.a.record.op else _PRODUCT
        names = [*(name for name, *_ in getattr(first, "arguments", ())), *first.changed]
        found = [_SAME.get(name, words.get(name, name)) for name in names]
        yield from (re.sub(r"^weight\d$", "weight", word) for word in found or [first.kind])


def unseen(found: runs.Alignment) -> str | None:
    """Products with a weight that were not compared; None if all were. The last part of a sum stands for all."""
    calls = [each.call for each in found.apart if each.run == "a"]
    calls += [pair.a for pair in found.pairs if pair.kind == "not compared" and pair.by != "sum"]
    count = sum(call.record.op.rpartition("::")[2].split(".")[0] in _LINEAR for call in calls)
    return f"not compared: {count} products" if count else None


def only_in_one(found: runs.Difference) -> str | None:
    """The last calls before the first difference that only one run has, in a word; None if there are none."""
    ends = {} if found.first is None else {"a": found.first.a.record.index, "b": found.first.b.record.index}
    casts = "aten::_to_copy", "aten::copy_"  # which the dtype of a later call shows
    others = [each for each in found.unmatched if each.op not in casts]
    before = [each for each in others if each.index < ends.get(each.run, each.index + 1)]
    if not before or (found.first is not None and found.first.arguments):
        return None
    last = [each for each in before if each.module == before[-1].module]
    dropped = any("dropout" in each.op or "bernoulli" in each.op for each in last)
    word = "dropout" if dropped else "function" if len({each.run for each in last}) == 2 else f"only in {last[0].run}"
    return f"{last[0].module}: {word}"


def said(pair: Pair, folder: Path) -> tuple[str | None, str]:
    """What a comparison names, and the edits that it says."""
    one, other = pair.programs()
    edits = () if pair.fault is None else (pair.fault(),)
    ops = "all" if pair.replays else pair.ops
    recorded = record(folder / "a", pair, one, ops), record(folder / "b", pair, other, pair.ops, *edits)
    try:
        found = runs.align(*recorded) if pair.by == "align" else runs.diff(*recorded)
        named = "; ".join(getattr(found.first, "causes", ()))
        return verdict(found), re.sub(r" \(\w+\.py:\d+\)", "", named)
    except OpInterceptError as error:
        return f"error: {error}", ""


def case(pair: Pair) -> Any:
    wrong = WRONG.get(pair.name)
    marks = [] if wrong is None else [pytest.mark.xfail(reason=wrong, strict=True)]
    return pytest.param(pair, id=pair.name, marks=marks)


@pytest.mark.parametrize("pair", [case(pair) for pair in PAIRS if sampled.picks(pair.name, 4)])
def test_the_planted_cause_is_named(pair: Pair, tmp_path: Path) -> None:
    found, edits = said(pair, tmp_path)
    assert pair.edit in edits, edits
    assert found in pair.verdicts or (found is None and not pair.verdicts), f"{found}, not {pair.verdicts}"


def test_each_name_is_of_one_pair() -> None:
    names = Counter(pair.name for pair in PAIRS)
    assert [name for name, count in names.items() if count > 1] == []
    assert WRONG.keys() <= names.keys()
