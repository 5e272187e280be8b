"""`Pages`: which tokens of a paged cache a call reads or writes, by its own arguments.

Invariant: of a cache, only these are read or copied. Must not import the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from opintercept._core.tensors import is_strided, is_tensor


class Pages(NamedTuple):
    """How an operator finds the tokens of its caches, `[pages, ...]`. The arguments go by name.

    Attributes:
        caches: The caches.
        within: The dimension of a cache that counts the tokens of a page.
        slots: For each token that is written, its number in the cache, page after page; those below 0 are left out.
        table: The pages of each sequence, `[sequences, pages]`, of an operator that reads.
        lengths: How many tokens each sequence has; without it, all of its pages count.
    """

    caches: tuple[str, ...]
    within: int
    slots: str | None = None
    table: str | None = None
    lengths: str | None = None

    def tokens(self, arguments: Mapping[str, Any]) -> dict[int, torch.Tensor]:
        """By the identity of each cache, its tokens, `[tokens, ...]`: those of one sequence after those of another.

        Nothing of a call without such an argument, or with other sizes than these.
        """
        caches = [arguments.get(name) for name in self.caches]
        try:
            return {id(cache): self._tokens(cache, arguments) for cache in caches if is_tensor(cache)}
        except (IndexError, TypeError):
            return {}

    def _tokens(self, cache: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
        if not is_strided(cache) or not 0 < self.within < cache.dim():
            raise TypeError("a cache has pages")
        size = cache.shape[self.within]
        slots = self._slots(arguments, size).to(cache.device, torch.int64)
        found: torch.Tensor = cache.detach().movedim(self.within, 1)[slots // size, slots % size]
        return found

    def _slots(self, arguments: Mapping[str, Any], size: int) -> torch.Tensor:
        """The numbers of the tokens, page after page of `size` tokens."""
        if self.slots is not None:
            slots: torch.Tensor = arguments[self.slots].flatten()
            return slots[slots >= 0]
        table, lengths = arguments.get(self.table or ""), arguments.get(self.lengths or "")
        if table is None:
            raise TypeError("the keys are no pages")
        every = torch.arange(table.shape[1] * size, device=table.device)
        slots = table[:, every // size] * size + every % size
        return slots.flatten() if lengths is None else slots[every < lengths[: len(table), None].to(table.device)]
