"""Runs on disk: record, open, compare and replay them, or patch their outputs into another program.

Importing this imports neither torch nor numpy: what needs them is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opintercept._core.after_import import torch_first
from opintercept._core.errors import needs
from opintercept.runs.compare.diff import diff as diff
from opintercept.runs.compare.result import Difference as Difference
from opintercept.runs.ranks.diff import diff_ranks as diff_ranks
from opintercept.runs.ranks.difference import RankDifference as RankDifference
from opintercept.runs.store.run import Run as Run
from opintercept.runs.store.run import open_run as open_run
from opintercept.runs.why.answer import Answer as Answer
from opintercept.runs.why.why import why as why

if TYPE_CHECKING:
    from opintercept.runs.patch import Patch as Patch
    from opintercept.runs.record.recorder import RunRecorder as RunRecorder

__all__ = [
    "Answer",
    "Difference",
    "Patch",
    "RankDifference",
    "Run",
    "RunRecorder",
    "diff",
    "diff_ranks",
    "open_run",
    "why",
]

_RENAMED = {"Graft": "Patch", "align": "why", "explain": "why", "Alignment": "Answer", "Explanation": "Answer"}
_LATER = {"Patch": "patch", "RunRecorder": "record.recorder"}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it is called {_RENAMED[name]} now")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    torch_first()
    try:
        value = globals()[name] = vars(import_module(f"{__name__}.{_LATER[name]}"))[name]
    except ModuleNotFoundError as missing:
        if missing.name != "numpy":
            raise
        raise needs(name, "numpy", "'opintercept[cli]'") from missing
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
