"""The calls of one process as columns of numbers: what a store keeps on disk, and what is read of it in bulk.

Calls with the same operator and operand types share a `CallSignature`, and calls from one line of the program a
`StoredCallSite`; columns hold their numbers. Invariant: a call is read back as it was written, except the last digits
of means and root mean squares, see `builder.py`. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from opintercept._core.errors import OpInterceptError
from opintercept._core.record import CallRecord
from opintercept._values.stats import Values
from opintercept.runs.store.codec import StoredCall, shared_fields, stored_call
from opintercept.runs.store.untrusted import parsed

Array = NDArray[Any]
Arrays = dict[str, Array]

# The roles whose statistics have columns of their own, by the beginning of the columns' names: those of products, then
# those that only attentions have.
SLOTS = {"lhs": "lhs", "rhs": "rhs", "bias": "bias", "value": "value", "output": "output", "output1": "output.1"}
SLOTS |= {"output2": "output.2", "attn_mask": "attn_mask", "grad_out": "grad_out", "logsumexp": "logsumexp"}
ROLES = {role: slot for slot, role in SLOTS.items()}
FIGURES = ("min", "max", "mean", "rms")
PLACES = ("index", "step", "site", "look", "forward", "started", "thread", "elapsed")
VALUES = tuple(f"{slot}_{name}" for slot in SLOTS for name in ("hash", "nan", "inf", *FIGURES))
NUMBERS = (*PLACES, *VALUES)
TEXTS = ("more", "tensors", "given", "error")
FLAGS = tuple(f"has_{name}" for name in TEXTS)
CHUNK = 1 << 16  # calls that are read together
_KNOWN = 1 << 12  # signatures that are remembered
_BATCH = 256  # calls that are made together
_SHORT = 1 << 14  # characters of a signature that is remembered


def dtype_of(name: str) -> Any:
    """The dtype of a column of numbers. -1 stands for an unknown count, NaN for an unknown figure."""
    end = name.rpartition("_")[2]
    if name in FLAGS:
        return np.bool_
    if end == "hash":
        return np.uint64
    return np.float64 if end in (*FIGURES, "elapsed") else np.int32 if name in ("site", "look") else np.int64


class Texts(NamedTuple):
    """The rest of a call, which is in no column of numbers, as JSON."""

    call: int
    more: str | None
    tensors: str | None
    given: str | None
    error: str | None


_NO_TEXTS = Texts(-1, None, None, None, None)


class StoredCallSite(NamedTuple):
    """The module, line, phase and gradient that calls come from."""

    module: str | None
    source: str | None
    phase: str
    grad_of: str | None


class CallSignature:
    """The operator, operand types and arguments that calls have in common.

    Args:
        text: As `signature_text` makes it; anyone may have written it.

    Attributes:
        shared: The fields of their records.
        roles: For each role with statistics the count and whether there is a hash.
        arguments: As in `StoredCall`.
        template: A call that looks like them, with statistics of zeros.

    Raises:
        OpInterceptError: The text is not that of a signature.
    """

    __slots__ = ("arguments", "autocast", "roles", "shared", "template")

    def __init__(self, text: str) -> None:
        members = parsed(text)
        shared = shared_fields(members)
        roles: dict[str, tuple[int, bool]] = {}
        call = None
        if shared is not None:
            try:
                for role, kept in members["roles"].items():
                    roles[role] = (kept[0], kept[1])
                blank: dict[str, Any] = dict.fromkeys(("min", "max", "mean", "rms")) | {"nan": 0, "inf": 0}
                values = {}
                for role, (size, hashed) in roles.items():
                    values[role] = blank | {"count": size, "hash": "0" * 16 if hashed else None}
                own = {"index": 0, "step": 0, "phase": "forward", "autocast": members["autocast"], "values": values}
                call = stored_call(own | {"arguments": members["arguments"]}, shared, 0)
            except (AttributeError, KeyError, TypeError, IndexError):
                call = None
        if shared is None or call is None:
            raise OpInterceptError("the store is damaged: a signature is not that of a call")
        self.shared = shared
        self.roles = roles
        self.template = call
        self.arguments = call.arguments
        self.autocast = call.record.autocast

    @property
    def record(self) -> CallRecord:
        """The record of the template."""
        return self.template.record

    def record_at(self, call_site: StoredCallSite) -> CallRecord:
        """The record of the template, with the place of a call site."""
        places: dict[str, Any] = {"module": call_site.module, "source": call_site.source, "phase": call_site.phase}
        return replace(self.template.record, **places, grad_of=call_site.grad_of)  # type: ignore[arg-type]


class Columns(ABC):
    """The calls of one process, numbered in the order in which they ended.

    Args:
        rank: The rank of the process.
        size: How many calls there are.
        signatures: How many signatures.
        call_sites: How many call sites.
    """

    def __init__(self, rank: int, size: int, signatures: int, call_sites: int) -> None:
        self.rank = rank
        self.signatures, self.call_sites = signatures, call_sites
        self._size = size
        self._signatures: OrderedDict[int, CallSignature] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    @abstractmethod
    def signature_text(self, number: int) -> str:
        """The text of a signature."""

    @abstractmethod
    def call_site(self, number: int) -> StoredCallSite:
        """A call site by its number."""

    @abstractmethod
    def read(self, names: Sequence[str], first: int, end: int) -> Arrays:
        """Some columns of some calls: of `NUMBERS` and `FLAGS`."""

    @abstractmethod
    def texts(self, numbers: Array) -> Iterator[Texts]:
        """The texts of calls that have any, one after the other."""

    def signature(self, number: int) -> CallSignature:
        """A signature by its number."""
        signature = self._signatures.get(number)
        if signature is None:
            text = self.signature_text(number)
            signature = CallSignature(text)
            if len(text) <= _SHORT:
                self._signatures[number] = signature
                if len(self._signatures) > _KNOWN:
                    self._signatures.popitem(last=False)
        return signature

    def spans(self, steps: range) -> Iterator[tuple[int, int]]:
        """Stretches of calls that may be of these steps, as first number and end; no call outside of them is."""
        yield 0, len(self)

    def chunks(
        self, names: Sequence[str], first: int = 0, end: int | None = None, steps: range | None = None
    ) -> Iterator[tuple[int, Arrays]]:
        """Columns of all calls piece by piece, each with the number of its first call.

        With `steps`, pieces that have no call of these steps are left out; the others may have calls of other steps.
        """
        end = len(self) if end is None else end
        for low, high in ((first, end),) if steps is None else self.spans(steps):
            high = min(high, end)
            for start in range(max(low, first), high, CHUNK):
                yield start, self.read(names, start, min(start + CHUNK, high))

    def gather(self, numbers: Array, names: Sequence[str]) -> Arrays:
        """Columns of the calls with these numbers."""
        if not len(numbers):
            return self.read(names, 0, 0)
        first, end = int(numbers.min()), int(numbers.max()) + 1
        if end - first <= 2 * max(len(numbers), CHUNK):
            read = self.read(names, first, end)
            if len(numbers) == end - first and numbers[0] == first and (np.diff(numbers) == 1).all():
                return read
            return {name: column[numbers - first] for name, column in read.items()}
        made = {name: np.empty(len(numbers), dtype_of(name)) for name in names}
        order = np.argsort(numbers, kind="stable")
        pieces = np.flatnonzero(np.diff(numbers[order] // CHUNK)) + 1
        for piece in np.split(order, pieces):
            low = int(numbers[piece[0]])
            read = self.read(names, low, int(numbers[piece[-1]]) + 1)
            for name, column in read.items():
                made[name][piece] = column[numbers[piece] - low]
        return made

    def calls(self, first: int = 0, end: int | None = None) -> Iterator[StoredCall]:
        """Calls as they were put in."""
        for start, chunk in self.chunks((*NUMBERS, *FLAGS), first, end):
            yield from self._stored(np.arange(start, start + len(chunk["index"])), chunk, given=True)

    def calls_at(self, numbers: Array, *, given: bool = True) -> Iterator[StoredCall]:
        """The calls with these numbers; without `StoredCall.given` if that is not wanted."""
        chunk = self.gather(numbers, (*NUMBERS, *FLAGS))
        for start in range(0, len(numbers), _BATCH):
            piece = {name: column[start : start + _BATCH] for name, column in chunk.items()}
            yield from self._stored(numbers[start : start + _BATCH], piece, given=given)

    def _stored(self, numbers: Array, chunk: Arrays, *, given: bool) -> Iterator[StoredCall]:
        slots = {
            role: zip(*(chunk[f"{slot}_{name}"].tolist() for name in ("hash", "nan", "inf", *FIGURES)), strict=True)
            for slot, role in SLOTS.items()
        }
        places = zip(*(chunk[name].tolist() for name in PLACES), strict=True)
        has_texts = np.any([chunk[flag] for flag in FLAGS], axis=0)
        texts = self.texts(numbers[has_texts])
        of_roles = zip(*slots.values(), strict=True)
        for place, values, has in zip(places, of_roles, has_texts.tolist(), strict=True):
            own = next(texts) if has else _NO_TEXTS
            yield self._call(place, dict(zip(slots, values, strict=True)), own if given else own._replace(given=None))

    def _call(self, place: tuple[Any, ...], values: dict[str, Any], texts: Texts) -> StoredCall:
        index, step, call_site_number, signature_number, forward, started, thread, elapsed = place
        signature, call_site = self.signature(signature_number), self.call_site(call_site_number)
        record = CallRecord(
            index=index,
            step=step,
            phase=call_site.phase,  # type: ignore[arg-type]
            module=call_site.module,
            source=call_site.source,
            forward=None if forward < 0 else forward,
            grad_of=call_site.grad_of,  # type: ignore[arg-type]
            autocast=signature.autocast,
            started=None if started < 0 else started,
            thread=None if thread < 0 else thread,
            elapsed=None if elapsed != elapsed else elapsed,
            **signature.shared,
        )
        _, more, tensors, given, error = texts
        rest: StoredCall | None = None
        if more is not None or tensors is not None or given is not None:
            members = {"values": _parsed(more, {}), "tensors": _parsed(tensors, {}), "given": _parsed(given, None)}
            own = {"index": index, "step": step, "phase": "forward", "arguments": {}}
            rest = stored_call(own | members, signature.shared, self.rank)
        in_texts = {} if rest is None else rest.values
        found: dict[str, Values] = {}
        for role, kept in signature.roles.items():
            if role in values:
                found[role] = _values(kept, values[role])
            elif role in in_texts:
                found[role] = in_texts[role]
            else:
                raise OpInterceptError("the store is damaged: a call lacks statistics that its signature promises")
        return StoredCall(
            record,
            self.rank,
            found,
            {} if rest is None else rest.tensors,
            signature.arguments,
            None if rest is None else rest.given,
            error,
        )


def _values(kept: tuple[int, bool], numbers: tuple[Any, ...]) -> Values:
    digits, nan, inf, *figures = numbers
    known = [None if figure != figure else figure for figure in figures]
    return Values(f"{digits:016x}" if kept[1] else None, kept[0], nan, inf, *known)


def _parsed(text: str | None, default: Any) -> Any:
    return default if text is None else parsed(text)
