"""Checks of arguments, so that the same mistake gets the same message everywhere.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Check that `value` is one of `choices`.

    Raises:
        ValueError: It is not.
    """
    __tracebackhide__ = True  # pytest then shows the test that called this
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Check that `value` is a whole number of at least `least`, and return it.

    Raises:
        ValueError: It is not. True and False do not count as numbers.
    """
    __tracebackhide__ = True
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


def renamed(**names: str) -> Callable[[Function], Function]:
    """Decorate a function to refuse the old names of its arguments with an error that has the new ones."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            for old, new in names.items():
                if old in kwargs:
                    raise TypeError(f"{old}= is now {new}=")
            return function(*args, **kwargs)

        return cast(Function, checked)

    return decorate
