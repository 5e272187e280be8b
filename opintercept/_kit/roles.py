"""Arguments that several hooks take: which tensors of a call to use, and the seed of random numbers.

Invariant: no hook draws from torch's global generators.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def checked_roles(of: str | Iterable[str], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The roles named in `of`, without repeats."""
    roles = [of] if isinstance(of, str) else list(of) if isinstance(of, Iterable) else None
    if roles is None or not all(isinstance(role, str) for role in roles):
        raise TypeError(f"of must be one or more of {', '.join(map(repr, allowed))}, got {of!r}")
    unknown = [role for role in roles if role not in allowed]
    if unknown or not roles:
        raise ValueError(f"of must be one or more of {', '.join(map(repr, allowed))}, got {of!r}")
    return tuple(dict.fromkeys(roles))


def checked_seed(seed: Any) -> int:
    """Return `seed` if a `torch.Generator` accepts it."""
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be a whole number from -2**63 to 2**64 - 1, got {seed!r}")
    return seed


class Generators(dict[torch.device, torch.Generator]):
    """One generator per device, created and seeded at its first use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = checked_seed(seed)

    def __missing__(self, device: torch.device) -> torch.Generator:
        generator = self[device] = torch.Generator(device).manual_seed(self.seed)
        return generator
