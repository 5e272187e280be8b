"""Tensors of a run that share memory have one number."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from native import reading
from torch.multiprocessing.reductions import StorageWeakRef

from opintercept.runs.record.memory import MemoryNumbers


@pytest.mark.parametrize("in_c", [False, True])
def test_views_have_the_memory_of_their_base(in_c: bool) -> None:
    numbers, base = MemoryNumbers(), torch.ones(4, 6)
    with reading(in_c):
        assert numbers.place(base) == [1, 0, [6, 1], False]
        assert numbers.place(base.t()[2:]) == [1, 2, [1, 6], False]
        assert numbers.place(torch.ones(2)) == [2, 0, [1], False]
        weight = torch.nn.Parameter(torch.ones(2, 3))
        assert numbers.place(weight.t()) == [3, 0, [1, 3], True]


@pytest.mark.parametrize("in_c", [False, True])
def test_memory_that_is_used_again_has_a_new_number(in_c: bool) -> None:
    numbers = MemoryNumbers()
    with reading(in_c):
        found = [numbers.place(torch.ones(64))[0] for _ in range(50)]
    assert found == list(range(1, 51))


@pytest.fixture
def interrupts() -> Iterator[Any]:
    """Raises KeyboardInterrupt at the n-th line of the code that makes a weak reference to memory."""
    before = sys.gettrace()

    def at(line: int) -> None:
        left = line

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            if frame.f_code is not StorageWeakRef.__init__.__code__:
                return None
            if event == "line" and (left := left - 1) == 0:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)

    yield at
    sys.settrace(before)


@pytest.mark.parametrize("line", [1, 2])
def test_an_interrupt_while_memory_gets_its_number_leaves_nothing(line: int, interrupts: Any) -> None:
    numbers, tensor = MemoryNumbers(), torch.ones(2)
    with reading(False), pytest.raises(KeyboardInterrupt, match=r"^$"):
        interrupts(line)
        numbers.place(tensor)
    assert numbers.place(tensor)[0] == 1  # pytest fails the test if something cannot be freed


def test_of_many_tensors_the_oldest_is_forgotten() -> None:
    numbers, first, most = MemoryNumbers(), torch.ones(2), 1 << 16
    assert numbers.place(first)[0] == 1
    for _ in range(most - 1):
        numbers.place(torch.ones(1))
    assert numbers.place(first)[0] == 1
    numbers.place(torch.ones(1))
    assert numbers.place(first)[0] == most + 2
