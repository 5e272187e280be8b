"""The keys by which calls of two runs are paired, and the fingerprint by which they are equal.

Must not import torch.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from opintercept._core.record import CallRecord
from opintercept._core.tensors import TensorMeta
from opintercept._ops.scratch import UNREAD, torchs_name
from opintercept.runs.program.names import operator_name
from opintercept.runs.store.codec import StoredCall, is_output, role_of

Pairing = Literal["ordinal", "sequence", "family", "shape"]
PAIRINGS: tuple[Pairing, ...] = get_args(Pairing)


def family(record: CallRecord) -> str:
    """Return the family of interchangeable operators: `"gemm"`, `"attention"`, or the operator's own name."""
    if record.gemm is not None:
        return "gemm"
    return "attention" if "attention" in record.op else operator_name(record.op)


def metas(call: StoredCall) -> dict[str, TensorMeta]:
    """Shape and dtype of operands and outputs by role, of other tensors by the name of their parameter."""
    record = call.record
    operands = {"lhs": record.lhs, "rhs": record.rhs, "bias": record.bias}
    found = {role: meta for role, meta in operands.items() if meta is not None}
    if (value := call.values.get("value")) is not None and record.rhs is not None:
        # The third operand of an attention has the dtype of the second; runs do not record its shape.
        found["value"] = TensorMeta((value.count,), record.rhs.dtype, record.rhs.device, None, False)
    for role, kept in call.values.items():
        if role not in found and not is_output(role):
            found[role] = TensorMeta((kept.count,), "", "", None, False)  # runs record neither shape nor dtype
    return found | {role_of(place): meta for place, meta in enumerate(record.outputs) if meta is not None}


class Ids:
    """Numbers things from 1: equal things get equal numbers, in both of two runs that share an instance."""

    def __init__(self) -> None:
        self._ids: dict[tuple[Any, ...], int] = {}

    def __call__(self, *parts: Any) -> int:
        return self._ids.setdefault(parts, len(self._ids) + 1)


BY = ("nothing", "statistics", "sample", "tensors", "metadata", "hash")
"""What shows that calls are equal: first what shows least."""


def fingerprint(call: StoredCall) -> tuple[int, int]:
    """Return a number for all that is compared of a template apart from values, and an index into `BY` for these.

    The number is equal for equal signatures. The index says what is known of the values of outputs.
    """
    found = metas(call)
    parts: list[Any] = [(role, meta.shape, meta.dtype) for role, meta in found.items()]
    parts += [(role, values.count, values.hash) for role, values in call.values.items()]
    parts.append(repr(sorted((call.arguments or {}).items())))
    judged = [role for role in found if is_output(role)] or list(found)
    if torchs_name(call.record.op) in UNREAD:
        return hash(tuple(parts)), BY.index("metadata")
    if not judged or not all(role in call.values for role in judged):
        return hash(tuple(parts)), BY.index("nothing")
    hashed = all(call.values[role].hash is not None for role in judged)
    return hash(tuple(parts)), BY.index("hash" if hashed else "statistics")


def outcome(error: str | None) -> str | None:
    """The type of the exception that a call raised; its text can hold addresses, which differ in every run."""
    return None if error is None else error.partition(":")[0]
