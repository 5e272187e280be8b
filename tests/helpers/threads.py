"""Runs functions in threads beside each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


def run_threads(*works: Callable[[], Any], seconds: float = 0) -> None:
    """Run each function in its own thread, all at once, and raise what one of them raised.

    With `seconds`, each runs again and again for so long.
    """
    barrier = threading.Barrier(len(works))
    failures: list[BaseException] = []
    end = time.monotonic() + seconds

    def run(work: Callable[[], Any]) -> None:
        try:
            barrier.wait()
            work()
            while time.monotonic() < end and not failures:
                work()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure
