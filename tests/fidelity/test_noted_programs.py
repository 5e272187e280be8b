"""Kernels in C++ report of random programs what kernels in Python report of them."""

from __future__ import annotations

import noted_programs
import pytest
import sampled
from compiler import needs_compiler
from processes import run_python

pytestmark = [pytest.mark.slow, needs_compiler]
EACH = 15  # programs in a process: their threads and forks would leave kernels to the tests after them
FIRST = range(6, 486, EACH)  # the 15 from here do all that programs do, and none has thousands of shapes


@pytest.mark.parametrize("first", FIRST[:1] if sampled.on else FIRST)
def test_both_kinds_of_kernels_report_the_same(first: int) -> None:
    done = run_python(noted_programs.__file__, "--seed", first, "--count", EACH, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(", 0 differ: []\n"), done.stdout
