"""`PerCall`: what a hook keeps in `pre` for `post` of the same call."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from opintercept._core.call import OpCall

_Kept = TypeVar("_Kept")


class PerCall(Generic[_Kept]):
    """One value per call. If a call never reaches `post`, because a hook raised or Ctrl-C came, its value goes with it.

    A dict keyed by `id(call)` would keep that value and hand it to a later call with the same id.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[weakref.ref[OpCall], _Kept] = {}

    def put(self, call: OpCall, value: _Kept) -> None:
        """Keep a value until `take` is called or the call is gone."""
        # Python discards an interrupt that arrives in a weakref callback. This one runs no Python code.
        self._kept[weakref.ref(call, self._kept.__delitem__)] = value

    def take(self, call: OpCall) -> _Kept | None:
        """Remove and return the value of a call; None if there is none."""
        return self._kept.pop(weakref.ref(call), None) if self._kept else None

    def __len__(self) -> int:
        return len(self._kept)
