"""What hooks add to a call on a GPU stays within its bounds, counted on a stand-in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from compiler import needs_compiler
from devices import on_a_device

PAGE = Path(__file__).parents[2] / "docs/cost.md"


@pytest.mark.slow
@needs_compiler
def test_no_hook_adds_more_launches_and_waits_than_it_may() -> None:
    over, names = [], []
    for (name, forward, backward, waits, *_, at_end), bound in on_a_device("device_costs.py", "--json"):
        figures = [forward, backward, waits, at_end]
        if any(figure > most for figure, most in zip(figures, bound, strict=True)):
            over.append((name, figures, bound))
        names.append(name)
    assert over == []
    table = PAGE.read_text().partition("## On a GPU")[2]
    listed = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert names[: len(listed)] == listed
    assert len(names) > len(listed)
