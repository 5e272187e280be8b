"""What Python and C++ share: fields of calls and tensors, roles, flags, constants and keys, each written here once.

`header` makes `layout.h` of it, which is compiled into the library. Invariant: the fields of a call's record follow
from those of `CallRecord`. Must not import torch or numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from opintercept._core.in_kernel import ROLES
from opintercept._core.record import OWN, CallRecord

SLOTS = {role.replace(".", ""): role for role in ROLES}
"""The roles that have a place in a call's record, by the names of its fields.

Other tensors take places of operands that are free, see `_ops.slots`.
"""
FIGURES = ("min", "max", "mean", "rms")
IN_SITE, IN_SIGNATURE = ("module", "source"), "autocast"
"""The fields of a call that its call site has, and the one that calls which look alike share."""
LEFT_OUT = 1 << 7
"""The bit of `has` of a call whose text had no room in a flight recorder."""
LATE = 1 << 6
"""The bit of `has` of a call in a flight recorder some of whose values a device had not read when it was written."""

GROUP, MOST_GROUPS = 16, 48
"""Of the checksums of a row: the least columns that share one where the output has few digits, and how many there are.

Fewer columns have less rounding.
"""

ALL_OUTPUTS = 1 << 30
"""How many of an operator's outputs are for the program if all of them are, see `_ops.scratch.FOR_PROGRAM`."""

UNREAL = (
    "Meta",
    "Functionalize",
    "FuncTorchBatched",
    "FuncTorchGradWrapper",
    "FuncTorchVmapMode",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "PythonTLSSnapshot",
)
"""The dispatch keys of calls for which hooks do not run.

Their tensors have shapes only (meta, and fake tensors, which are meta below), or are wrappers that another key takes
apart before it calls the operator again with plain tensors.
"""

Fields = list[tuple[str, str]]
"""The names of a record's fields in their order, and how each is stored, as numpy writes it."""


def choices_of(hint: Any) -> tuple[str, ...]:
    """The texts that a field may have; empty if it may have others."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(choice for part in parts if get_origin(part) is Literal for choice in get_args(part))


def _format_of(hint: Any) -> str | None:
    """How a record holds a field; None if it is no number. -1 and NaN stand for None, as does the choice 0."""
    if choices_of(hint):
        return "|u1"
    kinds = (set(get_args(hint)) or {hint}) - {NoneType}
    return {frozenset((int,)): "<i8", frozenset((float,)): "<f8", frozenset((bool,)): "|i1"}.get(frozenset(kinds))


HINTS = {
    name: hint for name, hint in get_type_hints(CallRecord).items() if name in OWN.keys() - {*IN_SITE, IN_SIGNATURE}
}
"""The types of the fields that each call has for itself."""
RARE = tuple(each.name for each in fields(CallRecord) if each.metadata.get("rare"))
_formats = {name: _format_of(hint) for name, hint in HINTS.items() if name not in RARE}
FORMATS = {name: format for name, format in _formats.items() if format is not None}
CHOICES = {name: (None, *choices) for name, hint in HINTS.items() if (choices := choices_of(hint))}


def _call() -> Fields:
    """The fields of a call's record in falling order of size, so that C++ lays them out alike."""
    fields = [("check", "<u8"), *((name, kind) for name, kind in FORMATS.items() if kind[1:] in ("i8", "f8"))]
    fields += [("text", "<u8"), ("signature", "<u4"), ("site", "<u4"), ("lap", "<u4")]
    fields += [*((slot, "<u4") for slot in SLOTS), *((name, kind) for name, kind in FORMATS.items() if kind[0] == "|")]
    fields.append(("has", "|u1"))
    return [*fields, ("pad", f"|V{-size_of(fields) % 8}")]


def size_of(fields: Fields) -> int:
    """How many bytes a record takes."""
    return sum(int(kind[2:]) for _, kind in fields)


CALL = _call()
TENSOR: Fields = [("check", "<u8"), ("hash", "<u8"), ("nan", "<u4"), ("inf", "<u4"), *((n, "<f8") for n in FIGURES)]

_TYPES = {"u8": "uint64_t", "i8": "int64_t", "f8": "double", "u4": "uint32_t", "u1": "uint8_t", "i1": "int8_t"}


def header() -> str:
    """The text of `layout.h`."""
    first = ROLES.index("output")
    outputs = sum(role.startswith("output") for role in ROLES)
    places = {"ROLES": len(ROLES), "VALUE": ROLES.index("value"), "OUTPUT": first, "AFTER_OUTPUTS": first + outputs}
    names = ", ".join(f'"{role}"' for role in ROLES)
    # Meta is one key of several bits, for which C++ asks by itself.
    keys = ", ".join(f'"{name}"' for name in UNREAL if name != "Meta")
    phases = {name.upper(): CHOICES["phase"].index(name) for name in ("forward", "backward")}
    return "\n".join(
        [
            "// Made by `_native/layout.py`.",
            "#pragma once",
            "#include <cstddef>",
            "#include <cstdint>",
            "namespace opintercept {",
            *_constants("size_t", places),
            f"constexpr const char* ROLE_NAMES[ROLES] = {{{names}}};",
            *_constants("int64_t", {"GROUP": GROUP, "MOST_GROUPS": MOST_GROUPS}),
            f"constexpr const char* UNREAL[] = {{{keys}}};",
            *_constants("int", {"ALL_OUTPUTS": ALL_OUTPUTS}),
            *_constants("uint8_t", {**phases, "LATE": LATE}),
            *_struct("StoredCall", CALL),
            *_struct("StoredTensor", TENSOR),
            "} // namespace opintercept\n",
        ]
    )


def _constants(kind: str, values: Mapping[str, int]) -> Iterable[str]:
    return (f"constexpr {kind} {name} = {value};" for name, value in values.items())


def _struct(name: str, fields: Fields) -> Iterable[str]:
    """A record whose rows of tensors are one array."""
    yield f"struct {name} {{"
    for field, kind in fields:
        if field == next(iter(SLOTS)):
            yield "  uint32_t rows[ROLES];"
        elif field == "pad":
            yield f"  uint8_t pad[{kind[2:]}];" if kind != "|V0" else ""
        elif field not in SLOTS:
            yield f"  {_TYPES[kind[1:]]} {field};"
    yield "};"
    yield f"static_assert(sizeof({name}) == {size_of(fields)});"
