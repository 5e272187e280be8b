"""Interrupts a hook at random points, as Ctrl-C does, to test the state that it is left in.

The signal comes while `pre`, `post` or `error` runs, never between them.
"""

from __future__ import annotations

import random
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from opintercept import intercept

# Interrupts per test. A thorough run has 4,000, and takes seconds to minutes for each hook.
NUMBER = 50

needs_timer = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that sends a signal")

_PHASES = ("pre", "post", "error")
_SECONDS = 0.03  # for each interrupt; on a slow machine a test ends with fewer


class Interrupted:
    """Wraps a hook, and raises a KeyboardInterrupt inside it once `aim` has been called."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook
        self._lasted: list[float] = []  # seconds that each run of the hook took
        self._left = -1  # runs of the hook until it is interrupted
        self._delay = 0.0
        self._inside = False
        self.delivered = 0
        for phase in _PHASES:
            if callable(getattr(hook, phase, None)):
                setattr(self, phase, self._around(getattr(hook, phase)))

    def __getattr__(self, name: str) -> Any:
        if name in _PHASES:
            raise AttributeError(name)
        return getattr(self._hook, name)

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self._left -= 1
            started = time.perf_counter()
            try:
                self._inside = True
                if self._left == 0:
                    signal.setitimer(signal.ITIMER_REAL, self._delay)
                return method(*args)
            finally:
                self._inside = False
                signal.setitimer(signal.ITIMER_REAL, 0)
                self._lasted.append(time.perf_counter() - started)

        return run

    def aim(self, draw: random.Random) -> None:
        """Choose one of the hook's next runs and a moment in it, judging by its runs since the last time."""
        lasted, self._lasted = self._lasted, []
        place = draw.randrange(len(lasted))
        self._left = place + 1
        self._delay = max(1e-6, draw.uniform(0, 1.2 * lasted[place]))

    def strike(self, number: int, frame: Any) -> None:
        """Handle the signal."""
        if self._inside and not _is_lost(frame):
            self._inside = False
            self.delivered += 1
            raise KeyboardInterrupt


def _is_lost(frame: Any) -> bool:
    """Whether Python loses what is raised here: in a finalizer, or a callback of a weak reference or its collector."""
    name = frame.f_globals.get("__name__", "")
    callers = (caller for caller, _ in traceback.walk_stack(frame))
    return name.startswith(("hypothesis", "_weakrefset", "weakref")) or any(
        caller.f_code.co_name == "__del__" for caller in callers
    )


def interrupt(
    hook: Any,
    program: Callable[[], Any],
    check: Callable[[], Any],
    *,
    number: int = NUMBER,
    seed: int = 0,
    **options: Any,
) -> int:
    """Run a program repeatedly in one block, interrupt the hook at random points, and return the number of interrupts.

    `program` must make the same calls each time. `check` runs after each interrupt, and at the end after a run without
    one. There are `number` interrupts, or fewer on a slow machine.
    """
    draw = random.Random(seed)
    interrupted = Interrupted(hook)
    before = signal.signal(signal.SIGALRM, interrupted.strike)
    try:
        with intercept(interrupted, **options):
            program()  # the first run is slower than the others
            interrupted._lasted.clear()
            program()
            whole = interrupted._lasted
            end = time.monotonic() + 5 + _SECONDS * number
            while interrupted.delivered < number and time.monotonic() < end:
                interrupted._lasted = list(whole)
                interrupted.aim(draw)
                delivered = interrupted.delivered
                try:
                    program()
                except KeyboardInterrupt:
                    if interrupted.delivered == delivered:  # from the keyboard
                        raise
                if interrupted.delivered > delivered:
                    check()
            interrupted._left = -1
            program()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    check()
    return interrupted.delivered
