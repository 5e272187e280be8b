"""`Pages`: which tokens of a paged cache a call reads or writes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from opintercept._ops.pages import Pages

READS = Pages(("k", "v"), 1, table="table", lengths="lengths")
WRITES = Pages(("k",), 1, slots="slots")


def cache(within: int = 1) -> Tensor:
    """Five pages of four tokens, each with its number, which lie in some dimension of a page."""
    return torch.arange(20.0).reshape(5, 4, 1).expand(5, 4, 3).movedim(1, within)


def numbers(pages: Pages, arguments: Mapping[str, Tensor], name: str = "k") -> list[float]:
    found = pages.tokens(arguments)[id(arguments[name])]
    assert found.shape[1:] == (3,)
    return found[:, 0].tolist()


def test_the_tokens_of_each_sequence_are_found_by_its_pages() -> None:
    given = {"k": cache(), "v": cache() + 100, "table": torch.tensor([[3, 1], [0, 4]]), "lengths": torch.tensor([6, 1])}
    assert numbers(READS, given) == [12, 13, 14, 15, 4, 5, 0]
    assert numbers(READS, given, "v") == [112, 113, 114, 115, 104, 105, 100]


def test_all_of_the_pages_count_without_lengths() -> None:
    given = {"k": cache(), "v": cache(), "table": torch.tensor([[2, 0]])}
    assert numbers(READS._replace(lengths=None), given) == [8, 9, 10, 11, 0, 1, 2, 3]


def test_slots_count_tokens_page_after_page_and_those_below_0_are_left_out() -> None:
    assert numbers(WRITES, {"k": cache(), "slots": torch.tensor([7, -1, 0, 19])}) == [7, 0, 19]


def test_tokens_may_lie_in_any_dimension_of_a_page() -> None:
    given = {"k": cache(2), "slots": torch.tensor([7, 0])}
    assert given["k"].shape == (5, 3, 4)
    assert numbers(WRITES._replace(within=2), given) == [7, 0]


@pytest.mark.parametrize("table", [None, torch.tensor([[99]])])
def test_a_call_without_pages_or_with_others_than_the_cache_has_is_read_whole(table: Tensor | None) -> None:
    given = {"k": cache(), "v": cache(), "table": table, "lengths": torch.tensor([1])}
    assert READS.tokens(given) == {}


def test_what_is_found_shares_no_memory_with_the_cache() -> None:
    given = {"k": torch.zeros(5, 4, 3), "slots": torch.tensor([0])}
    found = WRITES.tokens(given)[id(given["k"])]
    given["k"].fill_(1)
    assert found.sum() == 0
