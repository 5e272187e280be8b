"""The comparisons of runs name the planted cause of each pair of programs, or nothing where nothing is planted."""

from __future__ import annotations

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
_SAME = {"attn_mask": "mask", "is_causal": "mask", "attn_bias": "mask", "dropout_p": "dropout", "heads": "k v"}


def record(folder: Path, pair: Pair, program: Callable[[], object]) -> runs.Run:
    torch.manual_seed(0)
    with torch.set_grad_enabled(pair.trains), intercept(runs.RunRecorder(folder, tensors="full"), ops=pair.ops):
        program()
    return runs.open_run(folder)


def verdict(found: runs.Difference | runs.Alignment) -> str | None:
    """What a result names: the module of the first run, and the cause in a word; None if it names nothing."""
    first: Any = found.first
    if first is None:
        return unseen(found) if isinstance(found, runs.Alignment) else only_in_one(found)
    return f"{first.a.record.module}: {' '.join(dict.fromkeys(causes(first)))}"


def causes(first: Any) -> Iterator[str]:
    """The words for what a pair of calls adds."""
    record = first.a.record
    dtypes = [(role.a, role.b) for role in getattr(first, "roles", ()) if role.a and role.b]
    if any(a.dtype != b.dtype for a, b in dtypes if a.dtype and b.dtype):
        yield "dtype"
        return
    attention = "attention" in record.op
    for name, *_ in getattr(first, "arguments", ()):
        yield _SAME.get(name, name)
    for name in first.changed:
        if attention:
            yield _SAME.get(name, _ATTENTION.get(name, name))
        else:
            yield {"lhs": "input", "rhs": "weight"}.get(name, name)
    if not first.changed and not getattr(first, "arguments", ()):
        yield first.kind


def unseen(found: runs.Alignment) -> str | None:
    """Products with a weight that were not compared; None if all were."""
    products = ("mm", "addmm", "linear", "convolution")
    apart = [each.call for each in found.apart if each.run == "a"]
    apart += [pair.a for pair in found.pairs if pair.kind == "not compared"]
    count = sum(call.record.op.rpartition("::")[2].split(".")[0] in products for call in apart)
    return f"not compared: {count} products" if count else None


def only_in_one(found: runs.Difference) -> str | None:
    names = [f"{each.module}: only in {each.run}" for each in found.unmatched]
    return ", ".join(names) or None


def said(pair: Pair, folder: Path) -> str | None:
    one, other = pair.programs()
    recorded = record(folder / "a", pair, one), record(folder / "b", pair, other)
    try:
        return verdict(runs.align(*recorded) if pair.by == "align" else runs.diff(*recorded))
    except OpInterceptError as error:
        return f"error: {error}"


def case(pair: Pair) -> Any:
    wrong = WRONG.get(pair.name)
    marks = [] if wrong is None else [pytest.mark.xfail(reason=wrong, strict=True)]
    return pytest.param(pair, id=pair.name, marks=marks)


@pytest.mark.parametrize("pair", [case(pair) for pair in PAIRS if sampled.picks(pair.name, 4)])
def test_the_planted_cause_is_named(pair: Pair, tmp_path: Path) -> None:
    found = said(pair, tmp_path)
    assert found in pair.verdicts or (found is None and not pair.verdicts), f"{found}, not {pair.verdicts}"


def test_each_name_is_of_one_pair() -> None:
    names = Counter(pair.name for pair in PAIRS)
    assert [name for name, count in names.items() if count > 1] == []
    assert WRONG.keys() <= names.keys()
