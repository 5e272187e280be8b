"""Runs on disk: written by `hooks.RunRecorder`, read here."""

from __future__ import annotations

from opintercept.runs.store import Run as Run
from opintercept.runs.store import RunInfo as RunInfo
from opintercept.runs.store import StoredCall as StoredCall
from opintercept.runs.store import Values as Values
from opintercept.runs.store import open_run as open_run

__all__ = ["Run", "RunInfo", "StoredCall", "Values", "open_run"]
