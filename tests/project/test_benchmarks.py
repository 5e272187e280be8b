"""The pages quote the figures that were measured. What is to be measured on a GPU runs to its end without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sampled

from benchmarks import figures
from benchmarks._timing import rows

ROOT = Path(__file__).parents[2]
TIMES = {"plain": [2e-3], "mode": [3e-3], "Recorder": [2.2e-3]}
ROWS = [
    *rows("models", "Llama", TIMES, {"Recorder": ("plain", 1.2), "mode": ("plain", 1.25)}),
    *rows("models", "one token", {"plain": [4.0], "Recorder": [50.0]}, {"Recorder": ("plain", 13)}),
    *rows("reading", "a run, seconds", {"a second": [1.0], "show": [1.25]}, {"show": ("a second", 2)}),
]
TEXT = """\
`python -m benchmarks models`:

| | Llama | one token |
|---|---|---|
| plain | 2 ms | 4 s |
| mode | 1.50 > 1.25, the bound | |
| Recorder | 1.10 ≤ 1.2 | 12.5 ≤ 13 |

`python -m benchmarks reading`:

| | a run, seconds |
|---|---|
| show | 1.25 ≤ 2 |
"""


def test_a_table_has_a_row_for_each_configuration_and_its_bounds() -> None:
    assert figures.markdown(ROWS) == TEXT


def test_figures_are_filled_in_wherever_a_page_quotes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    known = figures.figures(f"{figures.BEGIN}{TEXT}{figures.END}")
    assert known["models", "one token", "plain"] == "4 s"
    page = """A `show` takes\n{0} seconds. `python -m benchmarks models`:

| | one token | other | Llama |
|---|---|---|---|
| `Recorder` | {1} | 7 | {2} |
| `mode` | | | {3} |
"""
    monkeypatch.setitem(figures.SENTENCES, "page", {"`show` takes": ("reading", "a run, seconds", "show")})
    found, count = figures.quoted("page", page.format(1, 2, 3, 4), known)
    assert (found, count) == (page.format("1.25", "12.5", "1.10", "1.50"), 4)
    with pytest.raises(KeyError, match="plian"):
        figures.quoted("page", found + "| plian | | | 1 |\n", known)
    with pytest.raises(AssertionError, match=r"page must say '`show` takes' before a figure once, found 0"):
        figures.quoted("page", "A `show` takes long.", known)


@pytest.mark.parametrize("page", figures.SENTENCES)
def test_a_page_quotes_what_was_measured(page: str) -> None:
    """Otherwise somebody has edited a figure, or one table alone: `python -m benchmarks --pages` writes them all."""
    known = figures.figures((ROOT / figures.TABLES).read_text("utf-8"))
    assert {suite for suite, *_ in known} == set(figures.SUITES)
    text = (ROOT / page).read_text("utf-8")
    found, count = figures.quoted(page, text, known)
    assert found == text
    assert count > 1


@pytest.mark.slow
def test_the_list_for_a_gpu_is_rehearsed_without_one() -> None:
    if sampled.on:
        pytest.skip("takes half a minute; run without --sampled")
    command = [sys.executable, "-m", "benchmarks", "gpu", "--all", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, *parts = done.stdout.split("\n## ")
    assert len(parts) == 9
    assert all(part.count("\n| ") > 1 and "failed" not in part for part in parts), done.stdout
