"""Runs on disk: record, open, compare and replay them, or patch their outputs into another program.

Importing this imports neither torch nor numpy: what needs them is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opintercept._core.errors import needs
from opintercept._values.stats import Values as Values
from opintercept.runs.align.align import align as align
from opintercept.runs.align.alignment import Aligned as Aligned
from opintercept.runs.align.alignment import Alignment as Alignment
from opintercept.runs.align.alignment import Apart as Apart
from opintercept.runs.compare.diff import diff as diff
from opintercept.runs.compare.difference import Absent as Absent
from opintercept.runs.compare.difference import CallDifference as CallDifference
from opintercept.runs.compare.difference import Difference as Difference
from opintercept.runs.compare.difference import ModuleDifference as ModuleDifference
from opintercept.runs.compare.difference import RoleDifference as RoleDifference
from opintercept.runs.compare.difference import Unmatched as Unmatched
from opintercept.runs.ranks.diff import diff_ranks as diff_ranks
from opintercept.runs.ranks.difference import RankDifference as RankDifference
from opintercept.runs.ranks.difference import RankFinding as RankFinding
from opintercept.runs.store.codec import StoredCall as StoredCall
from opintercept.runs.store.run import Run as Run
from opintercept.runs.store.run import RunInfo as RunInfo
from opintercept.runs.store.run import open_run as open_run

if TYPE_CHECKING:
    from opintercept.runs.patch import Patch as Patch
    from opintercept.runs.record.recorder import RunRecorder as RunRecorder

__all__ = [
    "Absent",
    "Aligned",
    "Alignment",
    "Apart",
    "CallDifference",
    "Difference",
    "ModuleDifference",
    "Patch",
    "RankDifference",
    "RankFinding",
    "RoleDifference",
    "Run",
    "RunInfo",
    "RunRecorder",
    "StoredCall",
    "Unmatched",
    "Values",
    "align",
    "diff",
    "diff_ranks",
    "open_run",
]


_LATER = {"Patch": "patch", "RunRecorder": "record.recorder"}


def __getattr__(name: str) -> Any:
    if name == "Graft":
        raise AttributeError(f"module {__name__!r} has no attribute 'Graft'; it is called Patch now")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        value = globals()[name] = vars(import_module(f"{__name__}.{_LATER[name]}"))[name]
    except ModuleNotFoundError as missing:
        if missing.name != "numpy":
            raise
        raise needs(name, "numpy", "'opintercept[cli]'") from missing
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
