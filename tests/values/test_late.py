"""Numbers that a device computes come to the host together, in the dtypes and the order in which they were put."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
import torch
from threads import run_threads

from opintercept._values.late import Lots


def numbers(place: int) -> list[torch.Tensor]:
    return [
        torch.tensor([place, 2**62 + place]),
        torch.tensor(place / 3, dtype=torch.float64),
        torch.tensor([place, -0.5], dtype=torch.bfloat16),
    ]


@pytest.mark.parametrize("size", [1, 3, None])
def test_numbers_keep_their_order_and_their_bits(size: int | None) -> None:
    lots = Lots(size)
    put = [lots.put(numbers(place)) for place in range(7)]
    assert [each.is_sent for each in put] == [size is not None and place < 7 // size * size for place in range(7)]
    for place in (6, 0, 3, *range(7)):
        assert [list(part) for part in put[place].read()] == [part.reshape(-1).tolist() for part in numbers(place)]


def test_threads_may_put_and_send_at_once() -> None:
    lots, barrier = Lots(3), threading.Barrier(4)

    def put() -> None:
        barrier.wait()
        for place in range(200):
            result = lots.put([torch.tensor(place)])
            if place % 7 == 0:
                lots.send()
            if place % 5 == 0:
                assert list(result.read()[0]) == [place]

    run_threads(*[put] * 4)


def test_without_memory_for_a_copy_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lots = Lots(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", Mock(side_effect=torch.OutOfMemoryError))
        put = [lots.put([torch.tensor(place)]) for place in range(2)]
    assert not put[0].is_sent
    assert list(put[0].read()[0]) == [0]
    assert put[1].is_sent
    assert list(put[1].read()[0]) == [1]


def test_a_result_that_was_copied_alone_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lots, cat, fails = Lots(2), torch.cat, iter([True, True])

    def fails_twice(tensors: list[torch.Tensor]) -> torch.Tensor:
        if next(fails, False):
            raise torch.OutOfMemoryError
        return cat(tensors)

    monkeypatch.setattr(torch, "cat", fails_twice)
    put = [lots.put([torch.tensor(place)]) for place in range(2)]
    assert list(put[0].read()[0]) == [0]
    assert not put[1].is_sent
    assert [list(each.read()[0]) for each in reversed(put)] == [[1], [0]]


def test_a_result_that_another_thread_reads_while_it_is_sent_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    lots, cat = Lots(), torch.cat
    results = [lots.put([torch.tensor(place)]) for place in range(3)]

    def read_meanwhile(tensors: list[torch.Tensor]) -> torch.Tensor:
        monkeypatch.setattr(torch, "cat", cat)
        assert list(results[1].read()[0]) == [1]
        return cat(tensors)

    monkeypatch.setattr(torch, "cat", read_meanwhile)
    lots.send()
    assert [list(each.read()[0]) for each in results] == [[0], [1], [2]]
