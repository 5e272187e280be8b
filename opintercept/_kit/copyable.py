"""`Copyable`: the base class of hooks that can be copied and pickled."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import copy
from typing import Any, ClassVar

_CONTAINERS = (dict, list, set, deque)


class Copyable:
    """Each copy of such a hook has its own containers, and its own lock in `_lock`.

    Attributes:
        fresh: The attributes that a copy does not take over but makes anew, and how.
    """

    fresh: ClassVar[Mapping[str, Callable[[], Any]]] = {"_lock": threading.RLock}

    def __getstate__(self) -> dict[str, Any]:
        with vars(self).get("_lock") or nullcontext():
            state = {name: value for name, value in vars(self).items() if name not in self.fresh}
            return {name: copy(value) if isinstance(value, _CONTAINERS) else value for name, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for name, make in self.fresh.items():
            setattr(self, name, make())
