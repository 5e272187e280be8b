"""`Finds`: the findings of a hook, bounded in number, and which of them are new to the program's eyes.

Must not import the hooks.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from opintercept._core.tables import Shown
from opintercept._core.text import counted
from opintercept._kit.copyable import Copyable

MOST_FINDINGS = 1000
"""The most findings that are kept; the others are counted."""

Finding = TypeVar("Finding")
Kind = tuple[str | None, str, str]
"""Module, operator and phase. Only the first finding of a kind is worth a warning."""


class Finds(Copyable, Shown, Generic[Finding]):
    """A hook that keeps findings."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._findings: list[Finding] = []
        self._more = 0
        self._told: set[Kind] = set()

    def _all_findings(self) -> list[Finding]:
        with self._lock:
            return list(self._findings)

    def _found(self) -> int:
        """How many findings there were."""
        return len(self._findings) + self._more

    def _held(self) -> str:
        return counted(self._found(), "finding")

    def _keep(self, finding: Finding, kind: Kind) -> bool:
        """Keep a finding, and return whether it is the first of its kind."""
        with self._lock:
            new = kind not in self._told
            self._told.add(kind)
            if len(self._findings) < MOST_FINDINGS:
                self._findings.append(finding)
            else:
                self._more += 1
        return new

    def _forget_findings(self) -> None:
        self._findings.clear()
        self._told.clear()
        self._more = 0
