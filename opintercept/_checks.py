"""Checks of arguments that several callables share, each with the same message.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Refuse a value that is not one of `choices`.

    Raises:
        ValueError: It is not.
    """
    __tracebackhide__ = True  # expectations in tests call this
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return `value`, a whole number of at least `least`.

    Raises:
        ValueError: It is something else; True and False are no numbers here.
    """
    __tracebackhide__ = True
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value
