"""What `pytest --sampled` leaves out of tests with several parameters."""

from __future__ import annotations

import itertools

import pytest
import sampled

SOURCE = """
import pytest, sampled

@pytest.mark.parametrize("c", range(3))
@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 1), (1, 0)])
def test_two(a, b, c): pass

@pytest.mark.parametrize("x", [True, False])
@pytest.mark.parametrize("y", range(3))
@pytest.mark.parametrize("z", range(4))
def test_three(x, y, z): pass

@pytest.mark.parametrize("n", range(20))
def test_one(n): pass

@pytest.mark.parametrize("n", range(7))
@pytest.mark.parametrize("one", [1])
def test_few(n, one): pass

@pytest.mark.parametrize("n", range(5))
@pytest.mark.parametrize("m", range(5))
def test_that_asks(n, m): sampled.on
"""


def test_each_value_of_two_parameters_and_each_pair_of_three_are_there(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:asyncio")  # which warns of settings that are missing here
    items = pytester.getitems(SOURCE)
    monkeypatch.setattr(sampled, "on", False)
    assert sampled.covering(items) == {*items}
    monkeypatch.setattr(sampled, "on", True)
    found: dict[str, list[dict[str, int]]] = {}
    for item in sampled.covering(items):
        assert isinstance(item, pytest.Function)
        found.setdefault(item.originalname, []).append(getattr(item, "callspec").params)  # noqa: B009
    two, three = found["test_two"], found["test_three"]
    assert sorted((case["a"], case["b"]) for case in two) == [(0, 0), (0, 1), (1, 0)]
    assert sorted(case["c"] for case in two) == [0, 1, 2]
    for one, other in itertools.combinations("xyz", 2):
        product = {*itertools.product({case[one] for case in three}, {case[other] for case in three})}
        assert {(case[one], case[other]) for case in three} == product
    assert len({case["x"] for case in three}) * len({case["y"] for case in three}) == 6
    assert len(three) < 24
    assert [len(found[name]) for name in ("test_one", "test_few", "test_that_asks")] == [20, 7, 25]
