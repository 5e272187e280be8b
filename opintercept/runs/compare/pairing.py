"""The keys by which calls of two runs are paired, and the fingerprint by which they are equal.

Must not import torch.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Literal, get_args

from opintercept._core.record import CallRecord
from opintercept._core.tensors import TensorMeta
from opintercept._core.text import short_name
from opintercept._ops.scratch import UNREAD, torchs_name
from opintercept.runs.store.codec import StoredCall, is_output, role_of

Pairing = Literal["ordinal", "sequence", "family", "shape"]
PAIRINGS: tuple[Pairing, ...] = get_args(Pairing)

# torch wraps modules in modules of these names, which are not part of the program's own names.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Names of models after the first: `Critic.linear1`, `Critic#2.linear1`, and `Critic` itself.
_MODEL = re.compile(r"[A-Z]\w*(?:#[0-9]+)?")
_OF_MODEL = re.compile(rf"({_MODEL.pattern})\.")


@lru_cache(4096)
def module_name(name: str | None) -> str | None:
    """The module's name without wrappers: `_orig_mod.encoder.0` is `encoder.0`."""
    if name is None or "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@lru_cache(4096)
def operator_name(op: str) -> str:
    """The operator's own name: `mm` for `aten::mm`, `addmm` for `torch.Tensor.addmm_`."""
    name = short_name(op)
    return name if name.endswith("__") else name.rstrip("_") or name


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


def first_models(a: set[str], b: set[str]) -> tuple[str, str] | None:
    """The classes of the models that run first in A and in B; None if it is the same model.

    Modules of the model that runs first have plain names, and the names in other models begin with the model's class.
    A class that occurs only in the names of A is therefore that of B's first model, and the other way round. The rest
    of the names must confirm it.
    """
    only_a, only_b = _classes(a) - _classes(b), _classes(b) - _classes(a)
    if len(only_a) != 1 or len(only_b) != 1:
        return None
    (of_b,), (of_a,) = only_a, only_b
    for name, names, others in ((of_a, a, b), (of_b, b, a)):
        plain = {each for each in names if is_plain(each)}
        named = {each.removeprefix(f"{name}.") for each in others if each.startswith(f"{name}.")}
        if 2 * len(plain & named) < max(len(plain), len(named)):
            return None
    return of_a, of_b


def _classes(names: set[str]) -> set[str]:
    return {match[1] for name in names if (match := _OF_MODEL.match(name))}


def is_plain(name: str) -> bool:
    return bool(name) and not _OF_MODEL.match(name) and not _MODEL.fullmatch(name)


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
