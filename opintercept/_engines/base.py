"""What an engine is: how the calls that a program runs reach the blocks that watch them.

A new engine is one file with a subclass of `Engine`; `choose.ENGINES` makes it known to `intercept`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from opintercept._core import record
from opintercept._core.errors import OpInterceptError
from opintercept._core.noted import Ring
from opintercept._ops.seams import is_seam
from opintercept._ops.select import split
from opintercept._ops.table import ROWS
from opintercept._origin import stack

if TYPE_CHECKING:
    from opintercept._engines.scope import Block, Watcher

Keys: TypeAlias = Mapping[str, Any] | frozenset[Any] | None
"""What a block watches: overloads by name, or functions; None for everything."""


class Engine(Protocol):
    """Shows blocks the calls that they watch.

    Attributes:
        name: What `intercept(engine=...)` calls it.
        feed: The stream of calls that it shows. A block sees the calls of every engine with the same feed, so
            kernels in Python and in C++ serve each other's blocks.
        instead: What to use where it cannot run, for messages.
        needs: The private API of torch that it is built on, by path; None for what this torch lacks.
        every_operator: Whether a block may watch all operators instead of named ones.
        every_thread: Whether a block may watch all threads.
    """

    name: str
    feed: str
    instead: str
    needs: Mapping[str, Any]
    every_operator: bool = False
    every_thread: bool = False

    def require(self) -> None:
        """Refuse a torch on which the engine cannot run, before any state has changed.

        Raises:
            OpInterceptError: Names what is missing, the torch version and what to use instead.
        """
        missing = [path for path, value in self.needs.items() if value is None]
        if missing:
            raise OpInterceptError(
                f"the {self.name} engine needs {', '.join(missing)}, which torch {torch.__version__} does not have; "
                f"{self.instead}"
            )

    def keys(self, ops: Any) -> Keys:
        """Work out what to watch for the argument `ops` of `intercept`.

        Raises:
            TypeError: An entry that cannot name an operator.
            ValueError: An unknown operator, or one that the engine cannot watch.
        """
        if isinstance(ops, str) and ops == "all":
            return None
        families, entries = split(ops)
        entries = [entry for entry in entries if not is_seam(entry)]  # those are not for engines
        found: list[Any] = [self.named(entries)] if entries else []
        if families or not found:
            found.append(_of_families(self, families, ROWS.version))  # type: ignore[arg-type]  # engines are hashable
        keys: Keys = found[0] if len(found) == 1 else found[0] | found[1]
        return keys

    def of_families(self, families: tuple[str, ...]) -> Any:
        """What to watch of whole families, `"matmul"` and `"convolution"`. It is asked once while the rows stay."""
        return frozenset()

    def named(self, entries: list[Any]) -> Any:
        """What to watch for other entries of `ops`. Raises as `keys` does."""
        return frozenset()

    def unknown(self) -> Any:
        """Operators that nobody has declared, to be told of if they turn out to multiply; a dict, or a set.

        Only blocks that watch the family of matmuls ask.
        """
        return frozenset()

    def passed(self) -> Any:
        """Convolutions, which a block that watches the family of matmuls alone counts without looking at them."""
        return frozenset()

    def is_leaf(self, key: Any) -> bool:
        """Whether no Python, and nothing that another block could watch, runs inside of an operator."""
        return False

    def enter(self, block: Block) -> None:
        """Show the block the calls of this thread, or of all threads."""

    def leave(self, block: Block) -> None:
        """Undo `enter`, as far as it came. Can be repeated.

        Raises:
            OpInterceptError: The block was left out of order. It is left all the same.
        """

    def hold(self, user: object, watcher: Watcher) -> None:
        """Keep what entering takes time for until `user` releases it: a coroutine enters a block at each resumption."""
        return

    def release(self, user: object) -> None:
        """Undo `hold`. Can be repeated."""
        return

    @property
    def walk(self) -> Callable[[], stack.Walked]:
        """What reads the Python stack for a call."""
        return stack.walk

    def ring(self) -> Ring | None:
        """A ring in which its kernels can note the calls of one interceptor; None if they cannot."""
        return None

    @property
    def look(self) -> Callable[..., Any]:
        """What tells calls apart that do not look alike, see `_record.look`."""
        return record.look


@functools.lru_cache(maxsize=32)
def _of_families(engine: Engine, families: tuple[str, ...], version: int) -> Any:
    # `version` is that of the rows. All blocks get the same object: kernels know by its identity what is installed.
    return engine.of_families(families)
