"""`Replacements`: attributes of modules, classes and objects that are replaced while a block is open.

Invariant: when the last user leaves, whatever still has our value has its own again.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from opintercept._core import locks
from opintercept._core.fork import in_child

MISSING: Any = object()


@dataclass(frozen=True, slots=True, eq=False)
class Replaced:
    """One attribute and its two values. Whoever finds it again returns the same object.

    Attributes:
        name: What messages call it.
        owner: A class, or the `__dict__` of a module or an object.
        attribute: The name in its owner.
        original: Its own value; MISSING if it has none, but that of its class.
        replacement: Ours.
    """

    name: str
    owner: Any
    attribute: str
    original: Any
    replacement: Any

    def now(self) -> Any:
        """The value that it has."""
        return (self.owner if isinstance(self.owner, dict) else vars(self.owner)).get(self.attribute, MISSING)

    def is_known(self) -> bool:
        """Whether it has one of its two values."""
        now = self.now()
        return now is self.original or now is self.replacement

    def assign(self, value: Any) -> Callable[[], Any]:
        """A callable that gives it a value in one C call."""
        if not isinstance(self.owner, dict):
            return partial(setattr, self.owner, self.attribute, value)
        if value is MISSING:
            return partial(self.owner.pop, self.attribute, None)
        return partial(operator.setitem, self.owner, self.attribute, value)


Place = tuple[str, Any, str, Callable[[Any], Any]]
"""A function: its name in messages, its class or module, its attribute, and what wraps it."""


class Wrapped:
    """Finds the functions to wrap: each once, as long as nobody else replaces it.

    Args:
        places: Where they are.
    """

    def __init__(self, places: Callable[[], Iterable[Place]]) -> None:
        self._places = places
        self._known: dict[tuple[Any, str], Replaced] = {}

    def __call__(self) -> list[Replaced]:
        found, known = [], self._known
        for name, owner, attribute, wrap in self._places():
            now, patch = owner.__dict__.get(attribute), known.get((owner, attribute))
            if patch is None or (now is not patch.original and now is not patch.replacement):
                if now is None:
                    continue
                place = owner if isinstance(owner, type) else vars(owner)
                patch = known[owner, attribute] = Replaced(name, place, attribute, now, wrap(now))
            found.append(patch)
        return found


class Replacements:
    """Attributes that are replaced as long as they have users.

    Args:
        find: Finds what to replace, including what is replaced already. It is asked when a user enters.
        copies: Finds the places of our values when the last user leaves: other code may have copied them meanwhile.
        displaced: Gets a patch whose value is neither ours nor its own when the last user leaves. Other code has
            replaced it meanwhile, and it stays.
        fixed: Whether `find` always finds the same, so that it is not asked while its patches are in place.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Replaced]],
        copies: Callable[[], Iterable[Replaced]] = tuple,
        displaced: Callable[[Replaced], None] | None = None,
        fixed: bool = False,
    ) -> None:
        self._fixed = fixed
        self._find = find
        self._copies = copies
        self._displaced = displaced
        self._users: set[object] = set()
        self._in_place: dict[Replaced, None] = {}  # in order
        in_child(self._forget_parent)

    @property
    def in_place(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._in_place)

    def enter(self, user: object) -> None:
        """Replace what there is to replace, until `user` leaves."""
        with locks.shared:
            self._users.add(user)
            if self._fixed and self._in_place:
                return
            new = [patch for patch in self._find() if patch not in self._in_place or patch.now() is patch.original]
            if new:
                again = set(new)
                places = {(id(patch.owner), patch.attribute) for patch in new}
                # Of a module that was loaded again, the function before has gone.
                for before in [p for p in [*self._in_place] if (id(p.owner), p.attribute) in places and p not in again]:
                    del self._in_place[before]
                steps = [patch.assign(patch.replacement) for patch in new]
                # A single C call, so that neither an interrupt nor a signal handler comes in between.
                self._in_place.update(zip(new, map(operator.call, steps), strict=True))

    def leave(self, user: object) -> None:
        """End an `enter`. Can be repeated."""
        with locks.shared:
            self._users.discard(user)
            if self._users or not self._in_place:
                return
            kept = [*self._in_place]  # a signal handler may enter a block meanwhile
            found = [*kept, *self._copies()]
            steps = [patch.assign(patch.original) for patch in found if patch.now() is patch.replacement]
            lost = [patch for patch in kept if not patch.is_known()]
            deque(chain(map(operator.call, steps), map(operator.call, (self._in_place.clear,))), maxlen=0)  # as above
        if self._displaced is not None:
            for patch in lost:
                self._displaced(patch)

    def _forget_parent(self) -> None:
        # A forked child ignores its parent's blocks.
        self._displaced, displaced = None, self._displaced
        for user in tuple(self._users):
            self.leave(user)
        self._displaced = displaced
