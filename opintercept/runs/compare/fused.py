"""`fused`: the generated kernels of one run, and the operators of another that they stand for.

Invariant: they are joined by names; what they make is compared by the judge alone. Must not import torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from opintercept._core.record import CallRecord
from opintercept._ops.scratch import VIEWS, torchs_name
from opintercept.runs.program.names import is_plain, module_name, operator_name


def fused(own: Sequence[CallRecord], others: Sequence[CallRecord]) -> list[bool]:
    """Which calls of one run are in a kernel of the other, or are kernels that stand for calls of the other.

    A call is in a kernel that has its operator and its pass, and stands for calls of its module. Compiled code needs no
    views.
    """
    there: dict[tuple[bool, str, str], list[CallRecord]] = defaultdict(list)
    compiled = {record.phase for record in others if record.ops is not None}
    for record in others:
        for name in _operators(record):
            there[record.ops is None, record.phase, name].append(record)

    def found(record: CallRecord) -> bool:
        single = record.ops is None
        if single and torchs_name(record.op) in VIEWS:
            return record.phase in compiled
        return any(_meet(record, each) for name in _operators(record) for each in there[not single, record.phase, name])

    return [*map(found, own)]


def _operators(record: CallRecord) -> list[str]:
    return [*map(operator_name, record.ops if record.ops is not None else (record.op,))]


def _meet(one: CallRecord, other: CallRecord) -> bool:
    """Whether one of two modules is in the other, or is not known."""
    return all(a == b for a, b in zip(_path(one), _path(other), strict=False))


def _path(record: CallRecord) -> list[str]:
    """The module's name in its model, in parts."""
    name = module_name(record.module)
    return [] if not name else name.split(".")[not is_plain(name) :]
