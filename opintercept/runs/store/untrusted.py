"""Checks JSON that anyone may have written: its types, and that nothing in it is larger than it may be.

Each check returns the value, or raises one of `WRONG`. `checks_of` derives the checks of a type from its annotations.
Must not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, ItemsView, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MAX_TEXT = 4096  # characters of a text; longer ones are cut
MAX_DIMS = 64  # of a list of whole numbers, which is a shape or its strides

WRONG = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)

Check = Callable[[Any], Any]
Checks = Mapping[type, Check]  # by the type that `json.loads` gives the value


def parsed(text: bytes) -> Any:
    """The JSON value; None for a text that is not JSON in UTF-8, or is nested deeper than Python reads."""
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError):  # a ValueError for a number with too many digits, too
        return None


def checks_of(hint: Any) -> Checks:
    """The checks of a value that is to become an instance of a type, by the type that JSON has for it.

    The type is `None`, `str`, `bool`, `float`, `int` for a count, a `Literal`, a union, a dataclass or named tuple, a
    tuple or a `Mapping` with `str` keys of these. In `tuple[int, ...]` numbers may be negative.
    """
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {type(part): partial(choice, allowed=parts) for part in parts}
    if origin in (Union, UnionType):
        return {kind: check for part in parts for kind, check in checks_of(part).items()}
    if hint == tuple[int, ...]:
        return {list: lambda value: tuple(map(integer, items(value)))}
    every = [checks_of(part) for part in parts if part is not ...]
    if origin is tuple and parts[1:] == (...,):
        return {list: lambda value: tuple([checked(item, every[0]) for item in value])}
    if origin is tuple:
        return {list: lambda value: tuple([checked(item, each) for item, each in zip(value, every, strict=True)])}
    if origin is Mapping:
        return {dict: lambda value: {text(key): checked(item, every[1]) for key, item in value.items()}}
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return {dict: reader(field_checks(hint), hint)}
    raise TypeError(f"a type that is read from JSON must be one that checks_of knows, got {hint!r}")


def field_checks(kind: Any) -> dict[str, Checks]:
    """The checks of each field of a dataclass or named tuple."""
    return {name: checks_of(hint) for name, hint in get_type_hints(kind).items()}


def reader(checks: Mapping[str, Checks], kind: Callable[..., Any] = dict) -> Callable[[dict[str, Any]], Any]:
    """A function that checks the fields of an object, and passes them to `kind`. A field that it lacks is None."""
    return lambda members: kind(**{name: checked(members.get(name), allowed) for name, allowed in checks.items()})


def checked(value: Any, checks: Checks) -> Any:
    """The value, checked."""
    return checks[type(value)](value)


def text(value: Any) -> str:
    """A text, cut to `MAX_TEXT`."""
    if type(value) is not str:
        raise TypeError("a text")
    short = value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}..."
    # JSON can hold half a surrogate pair, which cannot be printed.
    return short if short.isascii() else short.encode("utf-8", "replace").decode()


def count(value: Any) -> int:
    """A whole number from 0, of 64 bits."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a count of 64 bits")
    return value


def integer(value: Any) -> int:
    """A whole number of 64 bits."""
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError("a whole number of 64 bits")
    return value


def choice(value: Any, allowed: tuple[Any, ...]) -> Any:
    """One of several values."""
    if value not in allowed:
        raise ValueError(f"one of {allowed}")
    return value


def of_type(value: Any, kind: type) -> Any:
    """A value of a type that needs no other check."""
    if not isinstance(value, kind):
        raise TypeError(f"a {kind.__name__}")
    return value


def items(value: Any, most: int = MAX_DIMS) -> list[Any]:
    """A list that is not too long."""
    if len(of_type(value, list)) > most:
        raise ValueError(f"at most {most}")
    return value  # type: ignore[no-any-return]


def entries(value: Any, most: int) -> ItemsView[str, Any]:
    """The entries of an object that has not too many."""
    if len(of_type(value, dict)) > most:
        raise ValueError(f"at most {most}")
    return value.items()  # type: ignore[no-any-return]


_PLAIN: dict[Any, Checks] = {
    NoneType: {NoneType: lambda value: value},
    str: {str: text},
    bool: {bool: bool},
    int: {int: count},
    float: {float: float, int: float},  # an OverflowError for a long one
}
