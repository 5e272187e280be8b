"""`Columns`: the calls of one process, read from its tables as columns of numbers or as `StoredCall`s.

Invariant: anyone may have written the files. They are checked when they are opened, piece by piece, and what is no
whole record, or names what is not there, is left out; nothing behind this has to check it again. Memory is bounded,
however long the tables are. Needs numpy. Must not import torch.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from opintercept._core.errors import OpInterceptError
from opintercept._core.record import CallRecord
from opintercept._native.layout import CHOICES, FIGURES, FORMATS, IN_SITE, SLOTS
from opintercept._values.stats import Values
from opintercept.runs.store.codec import CallSignature, CallText, StoredCall, StoredCallSite, call_text
from opintercept.runs.store.files import open_plain, read_plain
from opintercept.runs.store.flight import snapshot
from opintercept.runs.store.progress import report
from opintercept.runs.store.records import (
    CALL,
    CALL_TEXTS,
    CALLS,
    IN_TEXT,
    ROLES,
    SHARED_TEXTS,
    TENSOR,
    TENSORS,
    TEXTS,
    Array,
    Arrays,
    checks_of,
    seal,
)
from opintercept.runs.store.texts import MAX_LINE, lines_of, members_of, number_in, opened
from opintercept.runs.store.untrusted import WRONG, text

__all__ = ["FIGURES", "ROLES", "SLOTS", "Array", "Arrays", "CallSignature", "Columns", "StoredCallSite"]

PLACES = ("index", "step", "site", "look", "forward", "started", "thread", "elapsed")
VALUES = tuple(f"{slot}_{name}" for slot in SLOTS for name in ("hash", "nan", "inf", *FIGURES))
NUMBERS = (*PLACES, *VALUES)
FLAGS = tuple(f"has_{name}" for name in TEXTS)
MORE = tuple(name for name in FORMATS if name not in (*PLACES, "phase", "grad_of"))
"""The fields that have been added to records."""
CHUNK = 1 << 14  # calls that are read together
_CHECKED = 1 << 16  # records that are checked together
MAX_SHARED = 1 << 28  # bytes of the texts that calls share
_RUIN = 1 << 26  # bytes of damaged texts that may be skipped
_BLOCK = 1 << 12  # records that are read together where few are wanted, as a processor's cache has room for them
_KNOWN = 1 << 12  # signatures that are remembered
_BATCH = 256  # calls that are made together
_NONE = (1 << 32) - 1  # the number before that of the first record
_OPTIONAL = ("forward", "grad_of", "started", "thread", "elapsed", "pad")
_KINDS = ("<u8", "<i8", "<f8", "<u4", "|u1", "|i1")
_BLANK = np.array([(0, 0, 0, 0, *[math.nan] * len(FIGURES))], TENSOR)


def dtype_of(name: str) -> Any:
    """The dtype of a column of numbers. -1 stands for an unknown count, NaN for an unknown figure."""
    end = name.rpartition("_")[2]
    if name in FLAGS:
        return np.bool_
    if end == "hash":
        return np.uint64
    if name in FORMATS and name not in ("phase", "grad_of"):
        return np.dtype(FORMATS[name])
    return np.float64 if end in FIGURES else np.int32 if name in ("site", "look") else np.int64


class RecordTable:
    """The records of a file, which may be missing, and those of a flight recorder after them.

    They have the dtype of the program that wrote them.
    """

    def __init__(self, path: Path, dtype: Any, more: Array) -> None:
        self.path, self._dtype, self._more = path, dtype, more
        self._size, self._descriptor = 0, -1
        self.close: Callable[[], object] = int
        with suppress(FileNotFoundError), open_plain(path) as file:
            self._size = os.fstat(file.fileno()).st_size // dtype.itemsize
            self._descriptor = os.dup(file.fileno())
            self.close = weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return self._size + len(self._more)

    def read(self, first: int, end: int) -> Array:
        """The records from `first` to `end - 1`."""
        made = np.empty(end - first, self._dtype)
        in_file = max(min(end, self._size) - first, 0)
        if in_file:
            into, at, size = memoryview(made.view(np.uint8).data), first * made.itemsize, in_file * made.itemsize
            done = 0
            while done < size:
                got = os.preadv(self._descriptor, [into[done:size]], at + done)
                if not got:
                    raise OpInterceptError(f"{self.path} has become shorter; a run must not change while it is read")
                done += got
        if in_file < len(made):
            made[in_file:] = self._more[max(first - self._size, 0) : end - self._size]
        return made

    def gather(self, numbers: Array) -> Array:
        """The records with these numbers."""
        if len(numbers) and (np.diff(numbers) == 1).all():
            return self.read(int(numbers[0]), int(numbers[-1]) + 1)
        made, order = np.empty(len(numbers), self._dtype), np.argsort(numbers, kind="stable")
        ends = np.flatnonzero(np.diff(numbers[order] // _BLOCK)) + 1
        for piece in np.split(order, ends) if len(order) else ():
            first = int(numbers[piece[0]])
            made[piece] = self.read(first, int(numbers[piece[-1]]) + 1)[numbers[piece] - first]
        return made


class Columns:
    """The calls of one process, numbered in the order in which they ended."""

    def __init__(self, folder: Path, rank: int, dtypes: tuple[Any, Any] = (CALL, TENSOR)) -> None:
        self.rank = rank
        self._folder = folder
        flight = snapshot(folder, dtypes)
        self._tensors = RecordTable(folder / TENSORS, dtypes[1], flight.tensors)
        self._texts_size, self._flight_texts = _size_of(folder / CALL_TEXTS), flight.texts
        before = len(self._tensors) - len(flight.tensors)
        for slot in SLOTS:
            flight.calls[slot] += np.where(flight.calls[slot] > 0, before, 0).astype(np.uint32)
        flight.calls["text"] += np.where(flight.calls["text"] > 0, self._texts_size, 0).astype(np.uint64)
        self._calls = RecordTable(folder / CALLS, dtypes[0], seal(flight.calls))
        self._lines, self._sites = (_SharedTexts(folder / name) for name in SHARED_TEXTS)
        self.signatures = len(self._lines.numbers)  # how many there are
        self._signatures: OrderedDict[int, CallSignature] = OrderedDict()
        self.left_out = flight.left_out  # those that had no room in the flight recorder, or were being written
        self._check(before)

    def _check(self, in_file: int) -> None:
        """Find the records that are whole and name what is there, and the call sites that they have."""
        bad = np.zeros(0, np.int64)
        for start, records in _pieces(self._tensors, in_file):
            wrong = records["check"] != checks_of(records)
            _refuse_ruin(self._tensors.path, wrong)
            bad = np.append(bad, np.flatnonzero(wrong) + start + 1)
        texts = self._damaged_texts()
        known, used = np.zeros(len(self._sites.numbers) << 4, bool), np.zeros(self.signatures, bool)
        lost: list[Array] = []
        for start, records in _pieces(self._calls, len(self._calls)):
            right = records["check"] == checks_of(records)
            _refuse_ruin(self._calls.path, ~right)
            for at in range(0, len(records), _BLOCK):
                block, whole = records[at : at + _BLOCK], right[at : at + _BLOCK]
                whole &= self._names_what_is_there(block, bad, texts)
                known[self._codes_of(block)[whole]] = True
                used[self._lines.places(block["signature"])[whole]] = True
            lost.append(np.flatnonzero(~right) + start)
        self._codes = np.flatnonzero(known)
        self._call_sites = [self._call_site(code) for code in self._codes.tolist()]
        self.call_sites = len(self._codes)
        self.used = np.flatnonzero(used).tolist()  # the signatures that calls have
        missing = np.concatenate(lost) if lost else np.zeros(0, np.int64)
        self.damaged = len(missing)  # records that are damaged, or name what is damaged or missing
        self._kept = np.delete(np.arange(len(self._calls)), missing) if len(missing) else None
        self._size = len(self._calls) - len(missing)

    def _names_what_is_there(self, records: Array, bad: Array, texts: Array) -> Array:
        """Which records name nothing that is missing, no damaged record of a tensor, and no damaged text."""
        right = self._lines.has(records["signature"]) & self._sites.has(records["site"])
        for slot in SLOTS:
            right &= records[slot] <= len(self._tensors)
            right &= ~np.isin(records[slot], bad) if len(bad) else True
        right &= records["text"] <= self._texts_size + len(self._flight_texts)
        right &= (records["text"] > 0) | (records["has"] == 0)
        right &= ~np.isin(records["text"], texts) if len(texts) else True
        for name in ("index", "step", "phase"):
            right &= records[name] >= (name == "phase")
        for name, choices in CHOICES.items():
            right &= _field(records, name) < len(choices)
        return right

    def _damaged_texts(self) -> Array:
        """The places of the texts of calls that are damaged."""
        found = []
        place, damaged = 1, 0
        with suppress(FileNotFoundError), open_plain(self._folder / CALL_TEXTS) as file:
            while line := file.readline(MAX_LINE):
                if opened(line) is None:
                    found.append(place)
                    damaged += len(line)
                    if damaged > max(place // 2, _RUIN):  # such as a hole of any size
                        raise OpInterceptError(f"{self._folder / CALL_TEXTS} is damaged: most of its lines are none")
                place += len(line)
        return np.array(found, np.uint64)

    def _codes_of(self, records: Array) -> Array:
        """The call site, phase and gradient of each call as one number."""
        codes = self._sites.places(records["site"]).astype(np.int64) << 4
        return np.asarray(codes | records["phase"].astype(np.int64) << 2 | _field(records, "grad_of").astype(np.int64))

    def _call_site(self, code: int) -> StoredCallSite:
        members: Any = members_of(self._sites.lines[code >> 4])
        try:
            module, source = (None if members[name] is None else text(members[name]) for name in IN_SITE)
        except WRONG as wrong:
            raise OpInterceptError("the run is damaged: a call site is not that of a call") from wrong
        return StoredCallSite(module, source, CHOICES["phase"][code >> 2 & 3] or "", CHOICES["grad_of"][code & 3])

    def __len__(self) -> int:
        return self._size

    def close(self) -> None:
        """Close the files."""
        self._tensors.close()
        self._calls.close()

    def call_site(self, number: int) -> StoredCallSite:
        """A call site by its number."""
        return self._call_sites[number]

    def signature(self, number: int) -> CallSignature:
        """A signature by its number."""
        signature = self._signatures.get(number)
        if signature is None:
            signature = self._signatures[number] = CallSignature(members_of(self._lines.lines[number]))
            if len(self._signatures) > _KNOWN:
                self._signatures.popitem(last=False)
        return signature

    def _records(self, first: int, end: int) -> Array:
        return self._calls.read(first, end) if self._kept is None else self._calls.gather(self._kept[first:end])

    def read(self, names: Sequence[str], first: int, end: int) -> Arrays:
        """Some columns of some calls: of `NUMBERS`, `FLAGS` and `MORE`."""
        return self._columns_of(self._records(first, end), names)

    def _columns_of(self, records: Array, names: Sequence[str]) -> Arrays:
        wanted: dict[str, list[str]] = {}
        for name in names:
            slot, _, figure = name.rpartition("_")
            if slot in SLOTS:
                wanted.setdefault(slot, []).append(figure)
        values = self._values({slot: records[slot] for slot in wanted}, wanted)
        made: Arrays = {}
        for name in names:
            if name == "site":
                column = np.searchsorted(self._codes, self._codes_of(records))
            elif name == "look":
                column = self._lines.places(records["signature"])
            elif name in FLAGS:
                column = records["has"] >> FLAGS.index(name) & 1
            else:
                column = values[name] if name in values else _field(records, name)
            made[name] = column.astype(dtype_of(name), copy=False)
        return made

    def _values(self, rows: Arrays, wanted: Mapping[str, list[str]]) -> Arrays:
        """The wanted figures of each slot, from the numbers of the tensors' records; unknown where these are 0."""
        places = {slot: column - np.uint32(1) for slot, column in rows.items()}  # the largest number for 0
        firsts = {slot: low for slot, column in places.items() if (low := int(column.min(initial=_NONE))) < _NONE}
        first = min(firsts.values(), default=0)
        end = max((int((places[slot] + np.uint32(1)).max()) for slot in firsts), default=0)
        near = end - first <= 4 * sum(len(places[slot]) for slot in firsts) + _BLOCK
        block = self._tensors.read(first, end) if firsts and near else _BLANK[:0]
        shared: Arrays = {}  # figures of the block, and an unknown one
        made: Arrays = {}
        for slot in rows:
            if slot not in firsts:
                made |= {f"{slot}_{name}": np.broadcast_to(_BLANK[name], len(rows[slot])) for name in wanted[slot]}
                continue
            at, known = places[slot].astype(np.int64) - first, shared
            if not near:
                there = np.flatnonzero(places[slot] < _NONE)
                block, known = self._tensors.gather(places[slot][there].astype(np.int64)), {}
                at = np.full(len(at), len(block))
                at[there] = np.arange(len(block))
            for name in wanted[slot]:  # to copy whole records takes longer
                if name not in known:
                    known[name] = np.append(block[name], _BLANK[name])
                made[f"{slot}_{name}"] = known[name].take(at, mode="clip")  # where it is unknown, the last
        return made

    def texts(self, numbers: Array) -> Iterator[CallText]:
        """The texts of calls that have any, one after the other."""
        if not len(numbers):
            return
        with ExitStack() as stack:
            file = None
            chunk = self.gather(numbers, ("text", "look"))
            for place, look in zip((chunk["text"] - 1).tolist(), chunk["look"].tolist(), strict=True):
                if place >= self._texts_size:
                    start = place - self._texts_size
                    line = self._flight_texts[start : self._flight_texts.find(b"\n", start) + 1]
                else:
                    file = file or stack.enter_context(open_plain(self._folder / CALL_TEXTS))
                    file.seek(place)
                    line = file.readline(MAX_LINE)
                text = call_text(members_of(line))
                if text is None:
                    raise OpInterceptError(f"{self._folder / CALL_TEXTS} has no text of a call at byte {place}")
                if rows := {role: each for role, each in text.more.items() if isinstance(each, int)}:
                    text.more.update(self._in_rows(rows, self.signature(look).roles))
                yield text

    def _in_rows(self, rows: Mapping[str, int], roles: Mapping[str, tuple[int, bool]]) -> Iterator[tuple[str, Values]]:
        """The values of roles from the numbers of their rows, as a text has them."""
        numbers = np.array([*rows.values()])
        inside = rows.keys() <= roles.keys() and numbers.min() > 0 and numbers.max() <= len(self._tensors)
        records = self._tensors.gather(numbers - 1) if inside else np.zeros(1, TENSOR)
        if not (records["check"] == checks_of(records)).all():
            raise OpInterceptError(f"{self._folder} is damaged: the text of a call names rows that are not there")
        for role, record in zip(rows, records[["hash", "nan", "inf", *FIGURES]].tolist(), strict=True):
            yield role, _values(*roles[role], record)

    def chunks(
        self, names: Sequence[str], first: int = 0, end: int | None = None, steps: range | None = None
    ) -> Iterator[tuple[int, Arrays]]:
        """Columns of all calls piece by piece, each with the number of its first call.

        With `steps`, pieces that have no call of these steps are left out; the others may have calls of other steps.
        """
        end = len(self) if end is None else end
        for start in range(first, end, CHUNK):
            report(str(self._folder), start, end)
            records = self._records(start, min(start + CHUNK, end))
            if in_steps(records["step"], steps).any():
                yield start, self._columns_of(records, names)
        report(str(self._folder), end, end)

    def gather(self, numbers: Array, names: Sequence[str]) -> Arrays:
        """Columns of the calls with these numbers."""
        if len(numbers) > CHUNK:
            parts = [self.gather(numbers[start : start + CHUNK], names) for start in range(0, len(numbers), CHUNK)]
            return {name: np.concatenate([part[name] for part in parts]) for name in names}
        return self._columns_of(self._calls.gather(numbers if self._kept is None else self._kept[numbers]), names)

    def calls(self, first: int = 0, end: int | None = None) -> Iterator[StoredCall]:
        """Calls as they were recorded."""
        for start, chunk in self.chunks((*NUMBERS, *FLAGS, *MORE), first, end):
            yield from self._stored(np.arange(start, start + len(chunk["index"])), chunk, given=True)

    def calls_at(self, numbers: Array, *, given: bool = True) -> Iterator[StoredCall]:
        """The calls with these numbers; without `StoredCall.given` if that is not wanted."""
        for start in range(0, len(numbers), _BATCH):
            piece = numbers[start : start + _BATCH]
            yield from self._stored(piece, self.gather(piece, (*NUMBERS, *FLAGS, *MORE)), given=given)

    def _stored(self, numbers: Array, chunk: Arrays, *, given: bool) -> Iterator[StoredCall]:
        of_roles = zip(
            *(
                zip(*(chunk[f"{slot}_{name}"].tolist() for name in ("hash", "nan", "inf", *FIGURES)), strict=True)
                for slot in SLOTS
            ),
            strict=True,
        )
        own = [name for name in (*PLACES, *MORE) if name not in ("site", "look")]
        places = zip(*(map(_known_of(name), chunk[name].tolist()) for name in own), strict=True)
        shared = zip(chunk["site"].tolist(), chunk["look"].tolist(), strict=True)
        has_texts = np.any([chunk[flag] for flag in FLAGS], axis=0)
        texts = self.texts(numbers[has_texts])
        for place, (site, look), values, has in zip(places, shared, of_roles, has_texts.tolist(), strict=True):
            text = next(texts) if has else _NO_TEXT
            signature = self.signature(look)
            fields: dict[str, Any] = _unknown | dict(zip(own, place, strict=True)) | text.own
            fields |= self.call_site(site)._asdict() | {"autocast": signature.autocast} | signature.shared
            record = CallRecord(**fields)
            found: dict[str, Values] = {}
            for role, (count, hashed) in signature.roles.items():
                if role in text.more:
                    found[role] = text.more[role]
                elif role in signature.slots:
                    found[role] = _values(count, hashed, values[_SLOT_NUMBERS[signature.slots[role]]])
                else:
                    raise OpInterceptError(f"{self._folder} is damaged: a call lacks what its signature promises")
            yield StoredCall(
                record, self.rank, found, text.tensors, signature.arguments, text.given if given else None, text.error
            )


def in_steps(step: Array, steps: range | None) -> Array:
    """Which calls are of the steps that are asked for."""
    return np.ones(len(step), bool) if steps is None else np.asarray((step >= steps.start) & (step < steps.stop))


_NO_TEXT = CallText({}, {}, None, None, {})
_SLOT_NUMBERS = {role: number for number, role in enumerate(ROLES)}
_unknown = dict.fromkeys(IN_TEXT)


def _values(count: int, hashed: bool, numbers: tuple[Any, ...]) -> Values:
    digits, nan, inf, *figures = numbers
    known = [None if figure != figure else figure for figure in figures]
    return Values(f"{digits:016x}" if hashed else None, count, nan, inf, *known)


def _known_of(name: str) -> Callable[[Any], Any]:
    """A function that makes the value of a field of its number."""
    if name in CHOICES:
        return CHOICES[name].__getitem__
    if FORMATS[name] == "<f8":
        return lambda number: None if number != number else number
    if FORMATS[name] == "|i1":
        return lambda number: None if number < 0 else bool(number)
    return lambda number: None if number < 0 else number


def _field(records: Array, name: str) -> Array:
    """A field of records; of a program that had no such field, that it is unknown."""
    if name in (records.dtype.names or ()):
        return np.asarray(records[name])
    unknown = 0 if name in CHOICES else math.nan if FORMATS[name] == "<f8" else -1
    return np.full(len(records), unknown, FORMATS[name])


def _pieces(table: RecordTable, end: int) -> Iterator[tuple[int, Array]]:
    for start in range(0, end, _CHECKED):
        yield start, table.read(start, min(start + _CHECKED, end))


def _refuse_ruin(path: Path, wrong: Array) -> None:
    """Stop at a file that has next to no records, such as a hole of any size."""
    if wrong.sum() > max(len(wrong) // 2, _BLOCK):
        raise OpInterceptError(f"{path} is damaged: most of its records are none")


def _size_of(path: Path) -> int:
    try:
        with open_plain(path) as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0


class _SharedTexts:
    """The lines of a file by their numbers, without damaged ones."""

    def __init__(self, path: Path) -> None:
        known: dict[int, bytes] = {}
        with suppress(FileNotFoundError):
            for line in lines_of(read_plain(path, MAX_SHARED)):
                if (number := number_in(line)) is not None:
                    known[number] = line
        self.numbers = np.array(sorted(known), np.int64)
        self.lines = [known[number] for number in self.numbers.tolist()]
        self._is_whole = self.numbers[-1:].tolist() == [len(known) - 1]  # places are numbers

    def places(self, numbers: Array) -> Array:
        """The places of numbers among those that there are."""
        return numbers if self._is_whole else np.searchsorted(self.numbers, numbers)

    def has(self, numbers: Array) -> Array:
        """Which of these numbers there are."""
        if self._is_whole:
            return np.asarray(numbers < len(self.numbers))
        return np.asarray(np.append(self.numbers, -1)[self.places(numbers)] == numbers)


def dtypes_of(tables: Any, path: Path) -> tuple[Any, Any]:
    """The dtypes of the tables of a process, as its `run.json` describes them; refuses those of another version."""
    made: list[Any] = []
    for name, known, optional in (("calls", CALL, {*MORE, *_OPTIONAL}), ("tensors", TENSOR, set())):
        try:
            pairs = [(str(field), str(kind)) for field, kind in tables[name]]
            if not all(kind in _KINDS or field == "pad" for field, kind in pairs):
                raise ValueError("a kind of number")
            dtype: Any = np.dtype(pairs)
            kinds = dict(dtype.descr)
            right = len(dtype.names) <= 60 and dtype.itemsize % 8 == 0 and dtype.names[0] == "check"
            right &= all(kinds.get(field, kind if field in optional else "") == kind for field, kind in known.descr)
        except (*WRONG, IndexError, MemoryError, SyntaxError):  # numpy takes a text with a comma for Python
            right = False
        if not right:
            raise OpInterceptError(f"{path} describes other {name!r} than this version reads; read it with its own")
        made.append(dtype)
    return made[0], made[1]
