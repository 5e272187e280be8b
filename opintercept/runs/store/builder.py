"""`Builder`: makes columns from calls, or from the lines that a recorder has written.

Invariant: a line makes the same columns as its call. Lines that differ from known ones only in numbers are read without
making the call. Needs numpy. Must not import torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import product
from types import NoneType
from typing import Any

import numpy as np

from opintercept._core.record import SHARED, CallRecord, plain
from opintercept._values.stats import Values
from opintercept.runs.store.codec import HASH, TENSOR_NAME, StoredCall, compact, decode
from opintercept.runs.store.columns import (
    FIGURES,
    FLAGS,
    NUMBERS,
    PLACES,
    ROLES,
    SLOTS,
    TEXTS,
    Array,
    Arrays,
    Columns,
    StoredCallSite,
    Texts,
    dtype_of,
)
from opintercept.runs.store.untrusted import MAX_TEXT, WRONG, parsed

_MOST_FOUND = 1 << 16  # signatures and call sites that are remembered while columns are made
_MOST_LEARNT = 1 << 13  # the same of pieces of lines
_SHORT = 1 << 14  # characters of a signature that is remembered
# Bits that a mean and a root mean square keep: a hundred times what two kernels agree on (`comparer.SUM_ERROR`). The
# others cannot be compressed, and would take a fifth of a store.
_KEPT = 26
_OF_CALL, _OF_SLOT = (*PLACES, *FLAGS), ("number", "hash", "nan", "inf", *FIGURES)
_SUMS = ("mean", "rms")
_NO_TEXTS, _NO_FLAGS = (None,) * len(TEXTS), (False,) * len(TEXTS)

# How a line begins, as `codec.Encoder` writes it; one that differs in any way is decoded.
_COUNT = r"(0|[1-8][0-9]{0,18}|9[0-9]{0,17})"  # of 63 bits
_TEXT = r'(?:null|"[^"\\]*(?:\\.[^"\\]*)*")'
_NAME = r'(null|"[a-z0-9_]+")'
_OWN = re.compile(
    rf'\{{"index":{_COUNT},"step":{_COUNT},("phase":"[a-z]+","module":{_TEXT},"source":{_TEXT}),'
    rf'"forward":(?:null|{_COUNT}),"grad_of":{_NAME},"autocast":{_NAME},"started":(?:null|{_COUNT}),'
    rf'"thread":(?:null|{_COUNT}),"elapsed":(?:null|((?:0|[1-9][0-9]*)(?:\.[0-9]+(?:e-[0-9]+)?|e-[0-9]+))),',
    re.ASCII,
)
_VALUES, _TENSORS, _END = ',"values":', ',"tensors":', "}\n"
_SIGNATURE_FIELDS = {*SHARED, "arguments"}
_MEMBERS = tuple(Values.__slots__)
_FIGURE = (float, NoneType)
_TYPES = frozenset(product((str, NoneType), (int,), (int,), (int,), _FIGURE, _FIGURE, _FIGURE, _FIGURE))
_parse = json.JSONDecoder().raw_decode


def signature_text(call: StoredCall) -> str:
    """Return the signature of a call as JSON."""
    record = call.record
    own = {name: plain(getattr(record, name)) for name in SHARED}
    roles = {role: (values.count, values.hash is not None) for role, values in call.values.items()}
    return compact({"autocast": record.autocast, **own, "arguments": call.arguments, "roles": roles})


class Builder:
    """Makes columns of calls.

    Args:
        rank: The rank of the process that made the calls.

    Attributes:
        signatures: The texts of the signatures that were not taken yet, by number in order.
        call_sites: The same of the call sites.
        texts: The texts of calls that have any, which were not taken yet.
        size: The characters of all these.
    """

    def __init__(self, rank: int) -> None:
        self.signatures: list[str] = []
        self.call_sites: list[StoredCallSite] = []
        self.texts: list[Texts] = []
        self.size = 0
        self._rank = rank
        self._calls = self._signatures = self._call_sites = 0
        self._look_ids: dict[Any, tuple[int, Any]] = {}
        self._text_ids: dict[str, int] = {}
        self._call_site_ids: dict[StoredCallSite, int] = {}
        # The numbers of call sites and signatures by the pieces of lines that say them.
        self._call_sites_of: dict[Any, int] = {}
        self._signatures_of: dict[Any, int] = {}
        # Of the calls that were not taken yet: `PLACES` and `FLAGS`, one call after the other; and for each slot the
        # number among these calls, the hash and the other values. A tuple for each would be one for Python's collector.
        self._rows: list[Any] = []
        self._values: dict[str, list[Any]] = {slot: [] for slot in SLOTS}

    def __len__(self) -> int:
        return len(self._rows) // len(_OF_CALL)

    def add(self, call: StoredCall) -> None:
        """Add a call."""
        record, values = call.record, call.values
        row = [record.index, record.step, self._call_site(record), self._signature(call)]
        row += [-1 if n is None else n for n in (record.forward, record.started, record.thread)]
        for role, each in values.items():
            if (slot := ROLES.get(role)) is not None:
                digits = 0 if each.hash is None else int(each.hash, 16)
                figures = map(_figure, (each.min, each.max, each.mean, each.rms))
                self._values[slot] += (len(self), digits, each.nan, each.inf, *figures)
        more = {role: each.as_dict() for role, each in values.items() if role not in ROLES}
        texts = Texts(
            self._calls,
            compact(more) if more else None,
            compact(call.tensors) if call.tensors else None,
            None if call.given is None else compact(call.given),
            call.error,
        )
        self._add(row, _figure(record.elapsed), texts)

    def _add(self, row: list[int], elapsed: float, texts: Texts) -> None:
        flags = _NO_FLAGS
        if texts[1:] != _NO_TEXTS:
            flags = tuple([text is not None for text in texts[1:]])
            self.texts.append(texts)
            self.size += sum(len(text) for text in texts[1:] if isinstance(text, str))
        self._calls += 1
        self._rows += (*row, elapsed, *flags)

    def add_line(self, line: bytes) -> int | None:
        """Add the call of a line and return its number; None if the line is not a call."""
        try:
            read = _read(line.decode())
        except WRONG:
            read = None
        if read is None:
            return self._add_decoded(line)
        (index, step, place, forward, grad_of, autocast, started, thread, elapsed), shared, values, tensors = read
        call_site = (place, grad_of)
        signature = (shared, autocast, *[(slot, count, digits is None) for slot, (count, digits, *_) in values])
        call_site_number, signature_number = self._call_sites_of.get(call_site), self._signatures_of.get(signature)
        if call_site_number is None or signature_number is None:
            return self._add_decoded(line, call_site, signature)
        for slot, (_, digits, *numbers) in values:
            self._values[slot] += (len(self), int(digits or "0", 16), *numbers)
        row = [int(index), int(step), call_site_number, signature_number]
        row += [-1 if n is None else int(n) for n in (forward, started, thread)]
        self._add(row, float(elapsed or "nan"), Texts(self._calls, None, tensors, None, None))
        return self._calls - 1

    def _add_decoded(self, line: bytes, call_site: tuple[Any, ...] = (), signature: tuple[Any, ...] = ()) -> int | None:
        """Add the call of a line, and learn what the pieces of it that are given say."""
        call = decode(line, self._rank)
        if call is None:
            return None
        self.add(call)
        # Further members would change others: in JSON, the last one of a name counts.
        if signature and call.given is None and (parsed(f"{{{signature[0]}}}") or {}).keys() == _SIGNATURE_FIELDS:
            _, _, call_site_number, signature_number, *_ = self._rows[-len(_OF_CALL) :]
            for known, key, number in (
                (self._call_sites_of, call_site, call_site_number),
                (self._signatures_of, signature, signature_number),
            ):
                if len(known) >= _MOST_LEARNT:
                    known.clear()
                if len(key[0]) <= MAX_TEXT:
                    known[key] = number
        return self._calls - 1

    def take(self) -> Arrays:
        """The columns of the calls that were added since the last time."""
        made: Arrays = {}
        for place, name in enumerate(_OF_CALL):
            made[name] = np.array(self._rows[place :: len(_OF_CALL)], dtype_of(name))
        for slot, found in self._values.items():
            numbers = np.array(found[:: len(_OF_SLOT)], np.int64)
            for place, name in enumerate(_OF_SLOT[1:], 1):
                unknown = math.nan if name in FIGURES else 0
                whole = made[f"{slot}_{name}"] = np.full(len(self), unknown, dtype_of(f"{slot}_{name}"))
                read = np.array(found[place :: len(_OF_SLOT)], whole.dtype)
                whole[numbers] = rounded(read) if name in _SUMS else read
            found.clear()
        self._rows.clear()
        return {name: made[name] for name in (*NUMBERS, *FLAGS)}

    def _call_site(self, record: CallRecord) -> int:
        call_site = StoredCallSite(record.module, record.source, record.phase, record.grad_of)
        known = self._call_site_ids.get(call_site)
        if known is None:
            if len(self._call_site_ids) >= _MOST_FOUND:
                self._call_site_ids.clear()
            known = self._call_site_ids[call_site] = self._call_sites
            self.call_sites.append(call_site)
            self.size += sum(len(text) for text in call_site if text is not None)
            self._call_sites += 1
        return known

    def _signature(self, call: StoredCall) -> int:
        record = call.record
        # Calls whose lines share a piece of text share what is read of it, so that identity is enough.
        parts = (record.lhs, record.rhs, record.bias, record.output, record.gemm)
        arguments = "" if call.arguments == {} else compact(call.arguments)
        own = (record.op, record.func, record.flops, record.bytes, record.opaque, record.autocast, arguments)
        roles = tuple([(role, v.count, v.hash is not None) for role, v in call.values.items()])
        key = (*map(id, parts), *own, roles)
        known = self._look_ids.get(key)
        if known is None:
            text = signature_text(call)
            number = self._text_ids.get(text)
            if len(self._look_ids) >= _MOST_FOUND or len(self._text_ids) >= _MOST_FOUND:
                self._look_ids.clear()
                self._text_ids.clear()
            if number is None:
                number = self._text_ids[text] = self._signatures
                self.signatures.append(text)
                self.size += len(text)
                self._signatures += 1
            if len(text) > _SHORT:
                del self._text_ids[text]
                return number
            known = self._look_ids[key] = (number, parts)  # the parts are kept alive, so that no other gets an address
        return known[0]


def _read(line: str) -> tuple[Any, ...] | None:
    """The parts of a line that has the usual members, each of the usual type; None for any other.

    Returns:
        The members that each call has, as text; those of its signature, as text; for each slot the
        count, the hash and the other values; and the tensors as text. What is not text was checked.
    """
    own = _OWN.match(line)
    if own is None or not line.endswith(_END):
        return None
    start, last = own.end(), len(line) - len(_END)
    end = line.find(_VALUES, start)
    if end < 0:
        return own.groups(), line[start:last], (), None
    roles, at = _parse(line, end + len(_VALUES))
    values = []
    for role, each in roles.items():
        known = tuple(each.values())
        if tuple(each) != _MEMBERS or tuple(map(type, known)) not in _TYPES:
            return None
        digits, count, nan, inf, *figures = known
        if not (digits is None or HASH.fullmatch(digits)) or (nan | inf) >> 63:  # negative, or too large
            return None
        values.append((ROLES[role], (count, digits, nan, inf, *figures)))
    if at == last:
        return own.groups(), line[start:end], values, None
    if not line.startswith(_TENSORS, at):
        return None
    tensors, at = _parse(line, at + len(_TENSORS))
    if at != last or not all(role in ROLES and TENSOR_NAME.fullmatch(name) for role, name in tensors.items()):
        return None
    return own.groups(), line[start:end], values, compact(tensors) if tensors else None


def rounded(column: Array) -> Array:
    """The nearest numbers of `_KEPT` bits after the first."""
    unit = np.uint64(1 << (52 - _KEPT))
    rounded = ((column.view(np.uint64) + unit // np.uint64(2)) & ~(unit - np.uint64(1))).view(np.float64)
    return np.where(np.isfinite(rounded), rounded, column)


def _figure(value: float | None) -> float:
    return math.nan if value is None else value


class MemoryColumns(Columns):
    """The columns of few calls, in memory.

    Args:
        rank: The rank of the process.
        pieces: What `Builder.take` has returned, one after the other.
        builder: Has the signatures, call sites and texts.
    """

    def __init__(self, rank: int, pieces: Sequence[Arrays], builder: Builder) -> None:
        self._builder = builder
        self._places = {texts.call: place for place, texts in enumerate(builder.texts)}
        self._columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in (*NUMBERS, *FLAGS)}
        super().__init__(rank, len(self._columns["index"]), len(builder.signatures), len(builder.call_sites))

    def signature_text(self, number: int) -> str:
        return self._builder.signatures[number]

    def call_site(self, number: int) -> StoredCallSite:
        return self._builder.call_sites[number]

    def read(self, names: Sequence[str], first: int, end: int) -> Arrays:
        return {name: self._columns[name][first:end] for name in names}

    def texts(self, numbers: Array) -> Iterator[Texts]:
        return (self._builder.texts[self._places[number]] for number in numbers.tolist())
