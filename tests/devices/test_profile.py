"""`Profile` on a GPU takes the device's time, from events that kernels in C++ record around a call."""

from __future__ import annotations

from typing import Any

import pytest
from compiler import needs_compiler
from devices import on_a_device

pytestmark = [pytest.mark.slow, needs_compiler]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    rows: dict[str, Any] = on_a_device("device_profile.py")
    return rows


@pytest.mark.parametrize("how", ["late", "beside others", "at once"])
def test_calls_on_a_device_are_noted_and_have_its_time(how: str, found: dict[str, Any]) -> None:
    rows = found[how]
    assert (rows["calls"], rows["timed"], rows["again"]) == (5 * 20, True, True)
    assert rows["shown"] <= 10  # those that look like no call before


def test_calls_during_which_the_device_waits_for_the_host_are_counted(found: dict[str, Any]) -> None:
    assert found["late"]["idle"] == 0
    assert found["at once"]["idle"] >= 90  # the others are timed in Python, where events are always late


def test_calls_have_the_hosts_time_where_there_are_no_events(found: dict[str, Any]) -> None:
    rows = found["no events"]
    assert (rows["calls"], rows["timed"]) == (100, True)
