"""The two tables of a run: a fixed record for each call, and one for the values of each tensor that was read.

`_native/layout.py` has their fields. Kernels write the same bytes, see `_engines/compiled/records.cpp`. Invariant: a
record is whole if its first word is its check; a torn or damaged one is found by that. Needs numpy. Must not import
torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opintercept._core.call_site import NOWHERE, CallSite
from opintercept._core.record import OWN, PendingRecord, Summary, plain
from opintercept._native import layout
from opintercept._native.layout import CHOICES, FORMATS, HINTS, IN_SITE, SLOTS
from opintercept._ops.slots import slots_of
from opintercept._values.splitmix import splitmix64
from opintercept._values.stats import Values
from opintercept.runs.store.texts import Texts, sealed

Array = NDArray[Any]
Arrays = dict[str, Array]

CALLS, TENSORS, CALL_TEXTS = "calls.bin", "tensors.bin", "texts.jsonl"
SHARED_TEXTS = ("signatures.jsonl", "sites.jsonl")
"""The files of a process: its two tables, the texts of calls, and those that calls share."""

ROLES = {role: slot for slot, role in SLOTS.items()}
TEXTS = ("more", "tensors", "given", "error", "own")
"""What the text of a call may have, in the order of the bits of `has`: values of other roles, and so on."""
IN_TEXT = tuple(name for name in HINTS if name not in FORMATS)
"""Fields that were added and are no numbers, or that few calls have."""
CALL: Any = np.dtype(layout.CALL)
TENSOR: Any = np.dtype(layout.TENSOR)
MORE: Any = np.dtype([("call", "<u4"), ("row", "<u4")])
"""Tensors for which a record has no slot, as kernels hand them over: the number of the call, from 0, and of the tensor,
from 1, or 0 for one that could not be read."""
ROWS_OF_CALL = len(SLOTS)
"""How many tensors a call of a flight recorder has room for."""


def described() -> dict[str, list[list[str]]]:
    """What `run.json` says of the tables: the names and the formats of their fields."""
    return {"calls": [list(each) for each in CALL.descr], "tensors": [list(each) for each in TENSOR.descr]}


_CODES = {"<u8": "Q", "<i8": "q", "<f8": "d", "<u4": "I", "|u1": "B", "|i1": "b"}
_own = [name for name in CALL.names if name in FORMATS]
_pack_call = struct.Struct("<" + "".join(_CODES.get(kind, kind[2:] + "x") for _, kind in CALL.descr)).pack
_pack_values = struct.Struct("<8xQII4d").pack
_WEIGHTS = np.array([splitmix64(number) | 1 for number in range(1, 65)], np.uint64)


def checks_of(records: Array, laps: Any = 0) -> Array:
    """The check of each record: a sum of its words mod 2**64, each times an odd number of its own.

    It changes with each bit. Records of tensors are bound to the lap of their call in a flight recorder's file.
    Invariant: `records.cpp` computes the same.
    """
    words = records.view(np.uint64).reshape(len(records), records.itemsize // 8)
    found = words[:, 1:] @ _WEIGHTS[1 : words.shape[1]]
    return np.asarray(found + (np.atleast_1d(laps).astype(np.uint64) + np.uint64(1)) * _WEIGHTS[0])


def seal(records: Array, laps: Any = 0) -> Array:
    """Write the checks of records, and return these."""
    records["check"] = checks_of(records, laps)
    return records


def packed_values(values: Values) -> bytes | None:
    """The record of a tensor's values; None if it has no room for them."""
    if (values.nan | values.inf) >> 32:
        return None
    digits = 0 if values.hash is None else int(values.hash, 16)
    figures = [math.nan if v is None or v - v else v for v in (values.min, values.max, values.mean, values.rms)]
    return _pack_values(digits, values.nan, values.inf, *figures)


def _number_of(name: str) -> Callable[[Any], Any]:
    """A function that makes a number of the value of a field."""
    if name in CHOICES:
        return {choice: number for number, choice in enumerate(CHOICES[name])}.__getitem__
    unknown = math.nan if FORMATS[name] == "<f8" else -1
    return lambda value: unknown if value is None else value


def _getter(names: list[str]) -> Callable[[PendingRecord], tuple[Any, ...]]:
    """A function that returns the numbers of some fields. Compiled, since a loop takes half as long again."""
    given = {f"number_of_{name}": _number_of(name) for name in names}
    parts = [f"number_of_{name}(note.{OWN[name]})" for name in names]
    return eval(f"lambda note: ({', '.join(parts)},)", given)  # type: ignore[no-any-return]


_large = [name for name in _own if FORMATS[name][0] == "<"]
_large_numbers, _small_numbers = _getter(_large), _getter([name for name in _own if FORMATS[name][0] == "|"])
_PLACES = {role: number for number, role in enumerate(ROLES)}


_MOST_SUMMARIES = 4096  # that are remembered


class Encoder:
    """Makes the records of calls, and numbers what they share.

    Texts name the rows of tensors that a call has no place for. In a `circle`, which has no room for more rows, they
    hold the values.
    """

    def __init__(self) -> None:
        self.circle = False
        self.forget()

    def forget(self) -> None:
        """Begin to number anew, for other files."""
        self.signatures, self.sites = Texts(), Texts()
        self._known: dict[int, tuple[Summary, Summary]] = {}  # kept alive, so that no other gets its address
        self._alike: dict[Summary, Summary] = {}
        self.without_slot: dict[int, tuple[str, ...]] = {}  # the roles of a signature that no record has a slot for
        self.site(NOWHERE)  # 0, as kernels have it

    def record(
        self,
        note: PendingRecord,
        arguments: str,
        values: Mapping[str, Values],
        tensors: Mapping[str, str],
        given: Mapping[str, Any] | None,
        error: str | None,
        row: Callable[[bytes], int],
        text: Callable[[bytes], int],
    ) -> bytes:
        """Return the record of a call without its check; values and names of stored tensors are by role.

        `row` takes the record of a tensor's values and returns its number, from 1; `text` takes the call's text and
        returns its place, from 1, or -1 if there is no room.
        """
        rows = [0] * len(SLOTS)
        more: dict[str, Any] = {}
        places = slots_of(values)
        for role, each in values.items():
            packed = packed_values(each)
            if packed is not None and role in places:
                rows[_PLACES[places[role]]] = row(packed)
            else:
                more[role] = each.as_dict() if packed is None or self.circle else row(packed)
        has = place = 0
        if more or tensors or given is not None or error is not None or IN_TEXT:
            own = {name: plain(value) for name in IN_TEXT if (value := attrgetter(OWN[name])(note)) is not None}
            members = {"more": more, "tensors": tensors, "given": given, "error": error, "own": own}
            said = {name: value for name, value in members.items() if value not in (None, {})}
            has = sum(1 << TEXTS.index(name) for name in said)
            place = text(sealed({"index": note.index} | said)) if said else 0
            if place < 0 and said.pop("given", None) is not None:  # the call cannot be run again
                return self.record(note, arguments, values, tensors, None, error, row, text)
            if place < 0:
                place, has = 0, layout.LEFT_OUT
        roles = tuple([(role, each.count, each.hash is not None) for role, each in values.items()])
        numbers = self.signature(note, arguments, roles), self.site(note.call_site), 0
        return _pack_call(0, *_large_numbers(note), place, *numbers, *rows, *_small_numbers(note), has)

    def signature(self, note: PendingRecord, arguments: str, roles: tuple[tuple[str, int, bool], ...]) -> int:
        """The number of a call's signature; of each role with values, the count and whether there is a hash."""
        summary = note.summary

        def members() -> dict[str, Any]:
            known = {role: (count, hashed) for role, count, hashed in roles}
            own = {"autocast": note.autocast_name, **plain(summary)}
            return own | {"arguments": json.loads(arguments), "roles": known}

        known = self._known.get(id(summary))
        if known is None:
            for kept in (self._known, self._alike):
                if len(kept) >= _MOST_SUMMARIES:
                    kept.clear()
            known = self._known[id(summary)] = summary, self._alike.setdefault(summary, summary)
        summary = known[1]  # the same for equal ones
        return self.signatures.number((id(summary), note.autocast, arguments, roles), members, summary)

    def site(self, place: CallSite) -> int:
        """The number of a place in the program."""
        site = (place.module, place.source)
        return self.sites.number(site, lambda: dict(zip(IN_SITE, site, strict=True)))


KERNELS_WRITE = frozenset(("index", "step", "phase", "forward", "grad_of", "started", "thread", "elapsed", "replayed"))
"""The fields that kernels write of a call, besides those that calls share, see `records.h`; no graph repeats theirs."""


def writes_as_kernels() -> bool:
    """Return whether kernels write all fields of a record. If not, each call is recorded in Python."""
    return KERNELS_WRITE.issuperset(HINTS)
