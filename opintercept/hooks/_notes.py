"""Notes that a hook takes in `pre` and reads in `post`."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from opintercept._call import OpCall

_Note = TypeVar("_Note")


class Notes(Generic[_Note]):
    """Notes by call. If a call never reaches `post`, because another hook raised or Ctrl-C came, its note goes with it.

    A dict keyed by `id(call)` would keep that note and hand it to a later call with the same id.
    """

    __slots__ = ("_notes",)

    def __init__(self) -> None:
        self._notes: dict[weakref.ref[OpCall], _Note] = {}

    def put(self, call: OpCall, note: _Note) -> None:
        """Keep a note until `take` is called or the call is gone."""
        # Python discards an interrupt that arrives in a weakref callback. This one runs no Python code.
        self._notes[weakref.ref(call, self._notes.__delitem__)] = note

    def take(self, call: OpCall) -> _Note | None:
        """Remove and return the note of a call; None if there is none."""
        return self._notes.pop(weakref.ref(call), None) if self._notes else None

    def __len__(self) -> int:
        return len(self._notes)

    def __reduce__(self) -> tuple[type[Notes[_Note]], tuple[()]]:
        """Make copies start empty, since the calls are not copied."""
        return type(self), ()
