"""What is particular about a GPU: copies between devices, memory that is gone or short, and what a crash leaves."""

from __future__ import annotations

from typing import Any

import pytest
from compiler import needs_compiler
from devices import on_a_device

pytestmark = [pytest.mark.slow, needs_compiler]
VALUES = ["Stats", "NonFinite", "NonFinite, later", "Checksum", "Capture", "AttentionWeights"]
VALUES += [f"RunRecorder, {tensors}" for tensors in ("stats", "full", "flight")]

# Each with its settings, and all from one start of Python.
CASES = ["all", "memory", "overwritten", "passed+late", "places+late", "captured+late", "hung+late+driver"]
CASES += [case + more for case in ("flight", "freed", "unshown+driver") for more in ("", "+late")]
CASES += [case + more for case in ("short", "wrong", "cores") for more in ("", "+driver")]


@pytest.fixture(scope="module")
def tried() -> dict[str, Any]:
    """What happens in each case."""
    return on_a_device("device_edges.py", *CASES)  # type: ignore[no-any-return]


def test_a_block_of_all_operators_launches_none_and_says_which_way_copies_go(tried: dict[str, Any]) -> None:
    unchanged, copies = tried["all"]
    assert unchanged == {"kernel": True, "compiled": True, "mode": True}
    ways = ["@toy:0 from cpu", "@toy:0 from cpu", "@toy:1 from toy:0", " from toy:1"]
    below = [f"aten::copy_ -> float32[6, 8]{way}" for way in ways]
    above = [below[1] if n == 1 else each.replace("copy_", "_to_copy") for n, each in enumerate(below)]
    assert copies == {"kernel": below, "compiled": below, "mode": above}


@pytest.mark.parametrize("late", [False, True], ids=["", "late copies"])
def test_the_last_calls_before_an_exception_have_their_values(late: bool, tried: dict[str, Any]) -> None:
    on_device, on_cpu = tried["flight" + "+late" * late]
    assert len(on_cpu) == 3
    assert on_device == on_cpu


def test_the_last_calls_are_in_the_files_before_a_device_has_read_their_values(tried: dict[str, Any]) -> None:
    hung, then, later, last = tried["hung+late+driver"]
    assert hung == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert then == [[1, 0], [2, 3], [3, 3], [4, 0]]  # hooks have seen the first two in Python
    assert later == [[7, 0], [8, 0], [9, 0], [10, 0]]
    assert last == [[8, 3], [9, 3], [10, 3], [11, 0]]


@pytest.mark.parametrize("late", [False, True], ids=["", "late copies"])
def test_results_are_those_of_the_values_at_the_call(late: bool, tried: dict[str, Any]) -> None:
    rows, findings = tried["freed" + "+late" * late]
    assert rows == [[40, 1000, 0.0, 39.0, 19.5], [40, 1000, 0.0, 5 * 39.0**2, pytest.approx(2567.5)]]
    assert findings == 0


def test_the_host_is_not_blamed_for_what_came_from_a_device_and_is_not_checked_yet(tried: dict[str, Any]) -> None:
    found = tried["passed+late"]
    assert found == {engine: [["aten::log", "made"]] for engine in ("kernel", "compiled")}


def test_a_hook_for_which_the_device_has_no_memory_left_leaves_calls_out(tried: dict[str, Any]) -> None:
    alike, stats, nonfinite, checksum, calls = tried["memory"]
    assert alike
    assert (stats, nonfinite) == (2, 2)
    assert checksum == {"aten::addmm: the device has no memory left": 2}
    assert calls == [{}, {}]


@pytest.mark.parametrize("driver", [False, True], ids=["", "in launches"])
def test_no_hook_lets_the_program_fail_that_has_no_memory_left_for_it(driver: bool, tried: dict[str, Any]) -> None:
    leaves_out = "leaves out {} for which the device has no memory left; {}"
    remedy = "copy to the host with to='cpu', or keep less with hooks.when(...), index= or sample="
    record = 'record fewer calls, or tensors="stats"'
    copies = [f"Capture {leaves_out.format('tensors', remedy)}"]
    skipped = "AttentionWeights skipped 4 attention calls: aten::bmm: the device has no memory left (4 times)"
    assert tried["short" + "+driver" * driver] == {
        "Capture, same": copies,
        "Capture, gradients": copies,
        "Gradients": [f"Gradients {leaves_out.format('gradients', 'choose calls with hooks.when(...)')}"],
        "AttentionWeights": [skipped],
        **({"RunRecorder, full": [f"RunRecorder {leaves_out.format('tensors', record)}"]} if driver else {}),
    }


def test_a_run_has_no_arguments_of_which_one_was_overwritten_before_it_was_copied(tried: dict[str, Any]) -> None:
    found = tried["overwritten"]
    assert {tuple(each) for each in found} == {(False, False), (True, True)}


def test_hooks_find_on_two_streams_and_devices_what_they_find_on_the_cpu(tried: dict[str, Any]) -> None:
    for on_device, on_cpu in tried["places+late"]:
        assert on_device == on_cpu


@pytest.mark.parametrize("driver", [False, True], ids=["", "in launches"])
def test_products_that_are_wrong_are_found_where_they_are_on_the_cpu(driver: bool, tried: dict[str, Any]) -> None:
    on_device, on_cpu = tried["wrong" + "+driver" * driver]
    assert len(on_cpu) == 16
    assert on_device == on_cpu


@pytest.mark.parametrize("driver", [False, True], ids=["", "in launches"])
def test_tensor_cores_of_a_device_have_the_bounds_that_they_have_on_the_cpu(
    driver: bool, tried: dict[str, Any]
) -> None:
    on_device, on_cpu = tried["cores" + "+driver" * driver]
    assert len(on_cpu) == 32
    assert on_device == on_cpu


@pytest.mark.parametrize("late", [False, True], ids=["", "late rows"])
def test_wrong_products_are_found_without_python_once_it_has_seen_such_a_call(
    late: bool, tried: dict[str, Any]
) -> None:
    findings, checked_early, in_python, checked, rows = tried["unshown+driver" + "+late" * late]
    assert findings == [[call, [0, 5 + call], True] for call in (3, 11, 12, 17)]
    assert (checked_early, in_python, checked, rows) == (4, 2, 20, 120)


def test_no_hook_adds_to_a_graph_that_is_captured_or_ends_the_capture(tried: dict[str, Any]) -> None:
    found = tried["captured+late"]
    assert {name: added for name, (added, _) in found.items() if any(added)} == {}
    told = {name: len(warnings) for name, (_, warnings) in found.items() if warnings}
    assert told == dict.fromkeys(VALUES, 1)
