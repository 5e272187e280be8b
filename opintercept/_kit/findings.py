"""`CallFinding`, the base of what checks report, and `Finds`, the base of hooks that keep findings.

Must not import the hooks.
"""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

from opintercept._core.tables import Shown
from opintercept._core.text import counted
from opintercept._kit.copyable import Copyable

MOST_FINDINGS = 1000
"""The most findings that are kept; the others are counted."""

_OF_RECORD = ("module", "op", "phase", "source", "step", "index")


class CallFinding:
    """Something wrong with a call, in words with `str`.

    `module`, `op`, `phase`, `source`, `step` and `index` say which call, as in its `CallRecord`.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in _OF_RECORD:  # and not a field of its own
            return getattr(self.record, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def call_kind(self) -> tuple[str | None, str, str]:
        """Module, operator and phase. Only the first finding of a kind is worth a warning."""
        return self.module, self.op, self.phase


FindingT = TypeVar("FindingT", bound=CallFinding)


class Finds(Copyable, Shown, Generic[FindingT]):
    """A hook that keeps findings."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._findings: list[FindingT] = []
        self._more = 0
        self._told: set[tuple[str | None, str, str]] = set()

    def _all_findings(self) -> list[FindingT]:
        with self._lock:
            return list(self._findings)

    def _found(self) -> int:
        """How many findings there were."""
        return len(self._findings) + self._more

    def _held(self) -> str:
        return counted(self._found(), "finding")

    def _keep(self, finding: FindingT) -> bool:
        """Keep a finding, and return whether it is the first of its kind."""
        with self._lock:
            new = finding.call_kind not in self._told
            self._told.add(finding.call_kind)
            if len(self._findings) < MOST_FINDINGS:
                self._findings.append(finding)
            else:
                self._more += 1
        return new

    def _forget_findings(self) -> None:
        self._findings.clear()
        self._told.clear()
        self._more = 0
