"""What a hook notes before a call for the time after it."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from opintercept._call import OpCall

_Note = TypeVar("_Note")


class Notes(Generic[_Note]):
    """Notes by call. A call that never gets to `post` takes its note with it: another hook raised, or Ctrl-C came.

    A dict by `id(call)` would keep that note, and give it to a later call of the same id.
    """

    __slots__ = ("_notes",)

    def __init__(self) -> None:
        self._notes: dict[weakref.ref[OpCall], _Note] = {}

    def put(self, call: OpCall, note: _Note) -> None:
        """Keep a note until it is taken, or the call is gone."""
        # The callback is no Python code, in which an interrupt would be lost.
        self._notes[weakref.ref(call, self._notes.__delitem__)] = note

    def take(self, call: OpCall) -> _Note | None:
        """Remove and return the note of a call, or None."""
        return self._notes.pop(weakref.ref(call), None) if self._notes else None

    def __len__(self) -> int:
        return len(self._notes)

    def __reduce__(self) -> tuple[type[Notes[_Note]], tuple[()]]:
        """A copy starts empty: the calls are not copied."""
        return type(self), ()
