"""`Encoder` and `decode`: write a call as a line of `calls.jsonl`, and read a line that anyone may have written.

Both follow from the fields of `CallRecord`, so that a new field is written and read without a change here.
Invariant: the text of a signature is made once and read once for all its calls. Must not import torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from types import NoneType
from typing import Any, get_type_hints

from opintercept._core.call_site import CallSite
from opintercept._core.record import OWN, SHARED, CallRecord, PendingRecord, Summary, plain
from opintercept._values.stats import Values
from opintercept.runs.store.untrusted import (
    MAX_TEXT,
    WRONG,
    checked,
    checks_of,
    entries,
    field_checks,
    items,
    of_type,
    parsed,
    reader,
    text,
)

MAX_LINE = 1 << 22  # bytes; no line that is written comes near
MAX_ROLES = 2048  # tensors of one call
MAX_ARGUMENTS = 256  # other arguments of one call
MAX_PARAMETER = 100  # characters of a parameter's name
MAX_LIST = 1 << 16  # items of an argument that is a list
MAX_DEPTH = 4  # of lists in such a list
MAX_WRITTEN = 4096  # shared pieces of text that the writer remembers
MAX_READ = 1024  # those that the reader remembers

# Where a tensor is: the number of its file, and its name there.
TENSOR_NAME = re.compile(r"([0-9]{1,8})/([0-9a-f]{16}-[0-9]{1,8}(?:\.sample)?)", re.ASCII)
HASH = re.compile(r"[0-9a-f]{16}", re.ASCII)
_ROLES = frozenset(("lhs", "rhs", "bias", "output"))
# A role, the number of an output, or the name of a parameter: `attn_mask`, `weights[0]`.
_ROLE = re.compile(r"output\.[1-9][0-9]?|[A-Za-z_][A-Za-z0-9_]{0,99}(?:\[[0-9]{1,6}\]){0,4}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A recorded call.

    Attributes:
        record: Its record.
        rank: The rank of the process that made it, 0 if there was one process.
        values: What its operands and outputs were, by role: `"lhs"`, `"rhs"`, `"bias"`, `"value"` of an attention,
            `"output"`, and `"output.1"` and so on if there are several; other tensors by the name of their parameter:
            `"attn_mask"`, `"weights[0]"`.
        tensors: Where `Run.tensor` finds the values themselves, all or a sample, by the same roles.
        arguments: The arguments that are not tensors, by the name of their parameter, defaults included: `"alpha"`,
            `"is_causal"`. NaN and infinities, complex numbers, dtypes, devices and layouts are strings. None in runs
            of 0.1, which did not record them.
        given: With `tensors="full"`, all arguments as `_kit.repro.plain_arguments` makes them: `{"args": [...],
            "kwargs": {...}}`.
        error: What the call raised, `"RuntimeError: ..."`; None if it returned.
    """

    record: CallRecord
    rank: int
    values: Mapping[str, Values]
    tensors: Mapping[str, str]
    arguments: Mapping[str, Any] | None
    given: Mapping[str, Any] | None
    error: str | None

    @property
    def place(self) -> tuple[int, int, int]:
        """Step, index and rank, which put the calls of several processes in one order."""
        return self.record.step, self.record.index, self.rank


def is_output(role: str) -> bool:
    """Whether a role is that of an output; a parameter may be called `output_mask`."""
    return role == "output" or role.startswith("output.")


compact = json.JSONEncoder(separators=(",", ":")).encode


def _members_of(kind: type, paths: Mapping[str, str]) -> Callable[[Any], str]:
    """A function that writes fields as the members of a JSON object, without the braces. NaN and infinities are null.

    It is compiled, as `dataclass` compiles `__init__`. A loop over the fields would take half as long again, in a
    thread that shares Python's lock with the program.

    Args:
        kind: The class with the types of the fields.
        paths: The attributes of the object to be written that have their values.
    """
    members = []
    for name, hint in get_type_hints(kind).items():
        if name in paths:
            types = set(checks_of(hint)) - {NoneType}
            value = "quoted(v)" if types == {str} else "repr(v)" if types <= {int, float} else "compact(plain(v))"
            is_null = f"(v := it.{paths[name]}) is None"
            if float in types:
                is_null += " or v - v"  # NaN for infinities, which is true
            members.append(f'"{name}":{{null if {is_null} else {value}}}')
    names = {"quoted": encode_basestring_ascii, "compact": compact, "plain": plain, "null": "null"}
    return eval(f"lambda it: f'{','.join(members)}'", names)  # type: ignore[no-any-return]


_own_members = _members_of(CallRecord, OWN)
# Kernels write the members of a flight recorder's line that each call has, `flight.cpp`. The others they get as text.
_BY_KERNELS = ("index", "step", "phase", "forward", "grad_of", "started", "thread", "elapsed")
_place_members = _members_of(CallRecord, {name: name for name in ("module", "source")})
_autocast_member = _members_of(CallRecord, {"autocast": "autocast_name"})
_value_members = _members_of(Values, {name: name for name in Values.__slots__})


class Encoder:
    """Writes calls as lines."""

    def __init__(self) -> None:
        self._shared: dict[int, tuple[Summary, str]] = {}

    def line(
        self,
        note: PendingRecord,
        arguments: str,
        values: Mapping[str, Values],
        tensors: Mapping[str, str],
        given: Mapping[str, Any] | None,
        error: str | None,
    ) -> bytes:
        """The line of a call; what it says is read back as a `StoredCall`, where the arguments are described.

        Args:
            note: The call's record.
            arguments: JSON text of an object.
            values: By role.
            tensors: By role.
            given: The arguments as plain data, or None.
            error: What the call raised, or None.
        """
        shared = self._shared.get(id(note.summary)) or self._add(note.summary)
        line = f'{{{_own_members(note)},{shared[1]},"arguments":{arguments}'
        if values:
            members = [f"{encode_basestring_ascii(role)}:{{{_value_members(each)}}}" for role, each in values.items()]
            line += f',"values":{{{",".join(members)}}}'
        if tensors:
            line += f',"tensors":{compact(tensors)}'
        if given is not None:
            line += f',"given":{compact(given)}'
        if error is not None:
            line += f',"error":{compact(error)}'
        return f"{line}}}\n".encode()

    def signature(self, note: PendingRecord, arguments: str) -> bytes:
        """Return the members of a line that are the same for all calls of a signature; kernels write the others."""
        shared = self._shared.get(id(note.summary)) or self._add(note.summary)
        return f'{_autocast_member(note)},{shared[1]},"arguments":{arguments}'.encode()

    def _add(self, summary: Summary) -> tuple[Summary, str]:
        if len(self._shared) >= MAX_WRITTEN:
            self._shared.clear()
        # The summary is kept alive, so that no other gets its address.
        added = self._shared[id(summary)] = (summary, compact(plain(summary))[1:-1])
        return added


def place_members(place: CallSite) -> bytes:
    """The members of a line that say where a call comes from."""
    return _place_members(place).encode()


def writes_as_kernels() -> bool:
    """Return whether kernels write all fields of a record; a field that was added is written in Python only."""
    return {*_BY_KERNELS, "module", "source", "autocast"} == OWN.keys()


# Where the members of a signature begin and end in a line.
_FIRST, *_, _LAST = (f',"{name}":' for name in SHARED)
_checks = field_checks(CallRecord)
assert _checks.keys().isdisjoint(StoredCall.__slots__), "a line has other members of these names"
_own_fields = reader({name: _checks[name] for name in OWN})
_shared_fields = reader({name: _checks[name] for name in SHARED})
_any_values: Callable[[dict[str, Any]], Values] = reader(field_checks(Values), Values)
_error_checks = checks_of(str | None)
_decoder = json.JSONDecoder()
_fragments: dict[str, dict[str, Any]] = {}


def decode(line: bytes, rank: int) -> StoredCall | None:
    """Read a line; None for one that is not a call."""
    try:
        whole = line.decode()  # `json.loads` would take UTF-16 as well
    except UnicodeDecodeError:
        return None
    start = whole.find(_FIRST)
    last = whole.find(_LAST, start)
    if start > 0 and last > 0:
        try:
            _, end = _decoder.raw_decode(whole, last + len(_LAST))
        except (ValueError, RecursionError):
            return None
        fragment = whole[start + 1 : end]
        shared = _fragments.get(fragment)
        if shared is None and (shared := shared_fields(parsed(f"{{{fragment}}}"))) is not None:
            if len(_fragments) >= MAX_READ:
                _fragments.clear()
            if len(fragment) <= MAX_TEXT:
                _fragments[fragment] = shared
        if shared is not None and (call := stored_call(parsed(whole[:start] + whole[end:]), shared, rank)) is not None:
            return call
    # Members in another order, of another program, or of a version with other fields.
    members = parsed(whole)
    shared = shared_fields(members)
    return None if shared is None else stored_call(members, shared, rank)


def shared_fields(members: Any) -> dict[str, Any] | None:
    """Return the checked fields of a signature; None if they are not a call's."""
    try:
        return _shared_fields(members)  # type: ignore[no-any-return]
    except WRONG:
        return None


def stored_call(members: Any, shared: dict[str, Any], rank: int) -> StoredCall | None:
    """The call with these members of a line and checked shared fields; None if one is not as it must be."""
    try:
        values = {_role(role): _values(each) for role, each in entries(members.get("values", {}), MAX_ROLES)}
        tensors = {_role(role): _tensor_name(name) for role, name in entries(members.get("tensors", {}), MAX_ROLES)}
        arguments, given = members.get("arguments"), members.get("given")
        if given is None and arguments is not None and arguments.keys() == {"args", "kwargs"}:
            arguments, given = None, arguments  # as 0.1 wrote it
        if arguments is not None:
            arguments = {_parameter(name): _argument(value) for name, value in entries(arguments, MAX_ARGUMENTS)}
        if given is not None:
            of_type(of_type(given, dict)["args"], list)
            of_type(given["kwargs"], dict)
        record = CallRecord(**_own_fields(members), **shared)
        return StoredCall(record, rank, values, tensors, arguments, given, checked(members.get("error"), _error_checks))
    except WRONG:
        return None


def _values(members: Any) -> Values:
    values = _any_values(members)
    if values.hash is not None and not HASH.fullmatch(values.hash):
        raise ValueError("a hash")
    return values


def _role(value: str) -> str:
    if value not in _ROLES and not _ROLE.fullmatch(value):
        raise ValueError("a role")
    return value


def _tensor_name(value: Any) -> str:
    if not TENSOR_NAME.fullmatch(of_type(value, str)):
        raise ValueError("a tensor's name")
    return value  # type: ignore[no-any-return]


def _parameter(name: str) -> str:
    if len(name) > MAX_PARAMETER:
        raise ValueError("a parameter's name")
    return text(name)


def _argument(value: Any, depth: int = 0) -> Any:
    """An argument that is not a tensor: a number, a text, None, or a list of these."""
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return text(value)
    if type(value) is int:
        if not -(2**63) <= value < 2**64:
            raise ValueError("a whole number of 64 bits")
        return value
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if depth == MAX_DEPTH:
        raise ValueError(f"lists nested at most {MAX_DEPTH} deep")
    return [_argument(item, depth + 1) for item in items(value, MAX_LIST)]
