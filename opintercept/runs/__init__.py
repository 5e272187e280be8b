"""Runs on disk: written by `hooks.RunRecorder`, read here."""

from __future__ import annotations

from opintercept.runs.diff import Absent as Absent
from opintercept.runs.diff import CallDifference as CallDifference
from opintercept.runs.diff import Difference as Difference
from opintercept.runs.diff import ModuleDifference as ModuleDifference
from opintercept.runs.diff import RoleDifference as RoleDifference
from opintercept.runs.diff import Unmatched as Unmatched
from opintercept.runs.diff import diff as diff
from opintercept.runs.store import Run as Run
from opintercept.runs.store import RunInfo as RunInfo
from opintercept.runs.store import StoredCall as StoredCall
from opintercept.runs.store import Values as Values
from opintercept.runs.store import open_run as open_run

__all__ = [
    "Absent",
    "CallDifference",
    "Difference",
    "ModuleDifference",
    "RoleDifference",
    "Run",
    "RunInfo",
    "StoredCall",
    "Unmatched",
    "Values",
    "diff",
    "open_run",
]
