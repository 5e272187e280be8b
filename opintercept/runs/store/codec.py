"""`StoredCall`, and the texts that it is read from: those of signatures, of call sites and of calls.

Invariant: anyone may have written a text; what is made of it is checked. Must not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from opintercept._core.errors import OpInterceptError
from opintercept._core.record import OWN, SHARED, CallRecord, Plain
from opintercept._ops.slots import slots_of
from opintercept._values.stats import Values
from opintercept.runs.store.untrusted import (
    WRONG,
    checked,
    checks_of,
    count,
    entries,
    field_checks,
    items,
    of_type,
    reader,
    text,
)

MAX_ROLES = 2048  # tensors of one call
MAX_ARGUMENTS = 256  # other arguments of one call
MAX_PARAMETER = 100  # characters of a parameter's name
MAX_LIST = 1 << 16  # items of an argument that is a list
MAX_DEPTH = 4  # of lists in such a list

# Where a tensor is: the number of its file, and its name there.
TENSOR_NAME = re.compile(r"([0-9]{1,8})/([0-9a-f]{16}-[0-9]{1,8}(?:\.sample)?)", re.ASCII)
HASH = re.compile(r"[0-9a-f]{16}", re.ASCII)
# A role, the number of an output, or the name of a parameter: `attn_mask`, `weights[0]`.
_ROLE = re.compile(r"output\.[1-9][0-9]?|[A-Za-z_][A-Za-z0-9_]{0,99}(?:\[[0-9]{1,6}\]){0,4}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredCall(Plain):
    """A recorded call.

    Attributes:
        record: Its record.
        rank: The rank of the process that made it, 0 if there was one process.
        values: What its operands and outputs were, by role: `"lhs"`, `"rhs"`, `"bias"`, `"value"` of an attention,
            `"output"`, and `"output.1"` and so on if there are several; other tensors by the name of their parameter:
            `"attn_mask"`, `"weights[0]"`.
        tensors: Where `Run.tensor` finds the values themselves, all or a sample, by the same roles.
        arguments: The arguments that are not tensors, by the name of their parameter, defaults included: `"alpha"`,
            `"is_causal"`. NaN and infinities, complex numbers, dtypes, devices and layouts are strings.
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

    def as_dict(self) -> dict[str, Any]:
        """Return what identifies the call, as plain data."""
        names = ("index", "step", "op", "phase", "module", "source", "grad_of")
        return {"rank": self.rank} | {name: getattr(self.record, name) for name in names} | {"error": self.error}


def role_of(place: int) -> str:
    """The role of an output by its place."""
    return f"output.{place}" if place else "output"


def is_output(role: str) -> bool:
    """Whether a role is that of an output; a parameter may be called `output_mask`."""
    return role == "output" or role.startswith("output.")


_checks = field_checks(CallRecord)
_shared_fields = reader({name: _checks[name] for name in SHARED})
_any_values: Callable[[dict[str, Any]], Values] = reader(field_checks(Values), Values)
_text_checks = checks_of(str | None)


class StoredCallSite(NamedTuple):
    """The module, line, phase and gradient that calls come from."""

    module: str | None
    source: str | None
    phase: str
    grad_of: str | None


class CallSignature:
    """The operator, operand types and arguments that calls have in common, from the JSON object of their text.

    `roles` has the count of each role with statistics and whether there is a hash, and `slots` the role whose place in
    a record it takes; `template` is a call that looks like them, with statistics of zeros.
    """

    __slots__ = ("arguments", "autocast", "roles", "shared", "slots", "template")

    def __init__(self, members: Any) -> None:
        try:
            self.shared: dict[str, Any] = _shared_fields(members)
            self.autocast: str | None = checked(members["autocast"], _text_checks)
            self.roles: dict[str, tuple[int, bool]] = _by_role(members["roles"], _size)
            self.slots = slots_of(self.roles)
            arguments = entries(members["arguments"], MAX_ARGUMENTS)
            if any(len(name) > MAX_PARAMETER for name, _ in arguments):
                raise ValueError("a parameter's name")
            self.arguments = {text(name): _argument(value) for name, value in arguments}
        except WRONG as wrong:
            raise OpInterceptError("the run is damaged: a signature is not that of a call") from wrong
        own: dict[str, Any] = dict.fromkeys(OWN) | {"index": 0, "step": 0, "phase": "forward"}
        record = CallRecord(**own | {"autocast": self.autocast}, **self.shared)
        values = {
            role: Values("0" * 16 if hashed else None, size, 0, 0, None, None, None, None)
            for role, (size, hashed) in self.roles.items()
        }
        self.template = StoredCall(record, 0, values, {}, self.arguments, None, None)

    @property
    def record(self) -> CallRecord:
        """The record of the template."""
        return self.template.record

    def record_at(self, call_site: StoredCallSite) -> CallRecord:
        """The record of the template, with the place of a call site."""
        places: dict[str, Any] = {"module": call_site.module, "source": call_site.source, "phase": call_site.phase}
        return replace(self.template.record, **places, grad_of=call_site.grad_of)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class CallText:
    """The rest of a call, which its record has no room for: values of other roles, `own` further fields, and so on.

    Of values, the text may have the number of their row in the table of tensors.
    """

    more: dict[str, Any]
    tensors: dict[str, str]
    given: dict[str, Any] | None
    error: str | None
    own: dict[str, Any]


def call_text(members: Any) -> CallText | None:
    """Return what the text of a call says; None if it is not one."""
    try:
        values = _by_role(members.get("more", {}), lambda each: count(each) if isinstance(each, int) else _values(each))
        tensors = _by_role(members.get("tensors", {}), lambda name: _matched(name, TENSOR_NAME))
        given = members.get("given")
        if given is not None:
            of_type(of_type(given, dict)["args"], list)
            of_type(given["kwargs"], dict)
        own = {name: checked(value, _checks[name]) for name, value in members.get("own", {}).items()}
        error = checked(members.get("error"), _text_checks)
        count(members["index"])
        return CallText(values, tensors, given, error, own)
    except WRONG:
        return None


def _by_role(members: Any, read: Callable[[Any], Any]) -> dict[str, Any]:
    return {_matched(role, _ROLE): read(each) for role, each in entries(members, MAX_ROLES)}


def _size(members: Any) -> tuple[int, bool]:
    size, hashed = members
    return count(size), of_type(hashed, bool)


def _values(members: Any) -> Values:
    values = _any_values(members)
    if values.hash is not None:
        _matched(values.hash, HASH)
    return values


def _matched(value: Any, pattern: re.Pattern[str]) -> str:
    if not pattern.fullmatch(of_type(value, str)):
        raise ValueError(f"a text that matches {pattern.pattern}")
    return value  # type: ignore[no-any-return]


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
