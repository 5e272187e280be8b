"""`NonFinite` finds on a stand-in for a GPU, without waiting for it, what it finds when it waits and on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import sampled
from compiler import needs_compiler
from devices import on_a_device

pytestmark = [pytest.mark.slow, needs_compiler]
PROGRAM = "device_nonfinite.py"


@pytest.mark.parametrize("how", [[], ["--late"]], ids=["at once", "late"])
def test_what_is_found_later_is_what_is_found_at_once_and_on_the_cpu(how: list[str]) -> None:
    found = on_a_device(PROGRAM, *how, *["--fewer"] * sampled.on)
    assert len(found) >= (7 if sampled.on else 15)
    assert {case: lines for case, lines in found.items() if lines} == {}


@pytest.fixture(scope="module")
def late() -> dict[str, Any]:
    names = "raising", "waiting", "failing", "reading", "removed", "nested", "forked", "short", "kept"
    found: dict[str, Any] = on_a_device(PROGRAM, "--late", *names)
    return found


def test_an_error_comes_with_the_call_after_the_values_and_names_the_one_that_made_them(late: dict[str, Any]) -> None:
    # The sixth call makes the value. Its loop begins at -2, so that this is its round 3.
    by_the_next_call, by_the_end, at_once, stopped = late["raising"]
    assert by_the_next_call == ["NonFiniteError", 5, 5]
    assert by_the_end == ["NonFiniteError", 5, 8]
    assert at_once == ["NonFiniteError", 5, 2]
    assert stopped == ["RuntimeError", 5, 2]


def test_noted_calls_wait_only_if_asked_to(late: dict[str, Any]) -> None:
    none, each = late["waiting"]
    assert none == 0
    assert each > 20


def test_an_exception_of_the_program_stays_and_the_finding_is_there(late: dict[str, Any]) -> None:
    assert late["failing"] == [["RuntimeError", [5]], [5]]


def test_findings_can_be_read_in_the_block_and_the_error_still_comes(late: dict[str, Any]) -> None:
    assert late["reading"] == [5, 5]


def test_a_hook_that_goes_has_its_findings(late: dict[str, Any]) -> None:
    assert late["removed"] == [[5], [True], 5]


def test_hooks_of_one_block_and_of_two_find_the_same(late: dict[str, Any]) -> None:
    assert late["nested"] == 3 * [[[["aten::mm", 5]], [["aten::mm", 5]], [["aten::mul", 5]], [0, 0, 1]]]


def test_a_forked_child_has_the_findings_of_before(late: dict[str, Any]) -> None:
    assert late["forked"] == [["5", "0"], [5]]


def test_calls_are_judged_at_once_where_no_rows_are_to_be_had(late: dict[str, Any]) -> None:
    assert late["short"] == 2 * [[[["aten::div_", "made", 18]], 1]]


def test_no_tensor_is_kept_alive(late: dict[str, Any]) -> None:
    assert late["kept"] == [True, True]
