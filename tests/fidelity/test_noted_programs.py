"""Kernels in C++ report of random programs what kernels in Python report of them."""

from __future__ import annotations

import noted_programs
import pytest
import sampled
from compiler import needs_compiler
from native import reading

pytestmark = [pytest.mark.slow, needs_compiler]
EACH = 10  # programs in a test


@pytest.mark.parametrize("first", range(0, sampled.fewer(500, 60), EACH))
def test_both_kinds_of_kernels_report_the_same(first: int) -> None:
    with reading(True):
        found = [noted_programs.difference(seed) for seed in range(first, first + EACH)]
    assert [each for each in found if each] == []
