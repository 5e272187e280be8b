"""Which tensors of a call a hook takes, and the random numbers that it draws.

Invariant: torch's global generators are never drawn from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def checked_roles(of: str | Iterable[str], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The roles in `of`, each once, in the order of `allowed`.

    Raises:
        TypeError: Not a role and no iterable of them.
        ValueError: An unknown role, or none.
    """
    roles = [of] if isinstance(of, str) else list(of) if isinstance(of, Iterable) else None
    if roles is None or not all(isinstance(role, str) for role in roles):
        raise TypeError(f"of must be a role or several of {', '.join(map(repr, allowed))}, got {of!r}")
    unknown = [role for role in roles if role not in allowed]
    if unknown or not roles:
        raise ValueError(f"of must name some of {', '.join(map(repr, allowed))}, got {of!r}")
    return tuple(role for role in allowed if role in roles)


def checked_seed(seed: Any) -> int:
    """`seed`, a whole number that a generator takes.

    Raises:
        ValueError: Anything else.
    """
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be a whole number from -2**63 to 2**64 - 1, got {seed!r}")
    return seed


class Generators(dict[torch.device, torch.Generator]):
    """A generator for each device, seeded when it is first asked for; a wrong seed is a ValueError at once."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = checked_seed(seed)

    def __missing__(self, device: torch.device) -> torch.Generator:
        generator = self[device] = torch.Generator(device).manual_seed(self.seed)
        return generator
