"""`before_exit`: calls a function before `multiprocessing` leaves a forked process, which it does by `os._exit`.

Must not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


def before_exit(end: Callable[[], None]) -> None:
    """Call `end` once the function of the `Process` has returned, and the threads for which Python then waits."""
    # Not above: it takes the main module that is there when it is first imported for the program's.
    from multiprocessing.util import Finalize

    # 0 is the last priority before `multiprocessing` joins children, which fails where a fork has inherited some.
    Finalize(None, _end, args=(end,), exitpriority=0)


def _end(end: Callable[[], None]) -> None:
    here = threading.current_thread(), threading.main_thread()
    others = [thread for thread in threading.enumerate() if not thread.daemon and thread not in here]
    if others:
        threading.Thread(target=_after, args=(others, end), daemon=False).start()  # Python waits for this one, too
    else:
        end()


def _after(threads: list[threading.Thread], end: Callable[[], None]) -> None:
    for thread in threads:
        thread.join()
    end()
