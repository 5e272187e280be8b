"""`AfterImport`: a finder that calls a function right after modules have been imported.

Invariant: an import goes as it would without it, also beside other tools that wait for the module.
Must import nothing that a starting Python has not imported anyway: each child of a watched program imports this.
"""

from __future__ import annotations

import _thread
import sys

TYPE_CHECKING = False  # as in `opintercept/__init__.py`

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class AfterImport:
    """Waits for modules between `begin` and `end`.

    Args:
        waits_for: Whether it waits for a module of this name.
        then: Is called with the name after each import.
    """

    def __init__(self, waits_for: Callable[[str], bool], then: Callable[[str], None]) -> None:
        self._waits_for = waits_for
        self._then = then
        self._searching: set[tuple[int, str]] = set()  # by thread

    def begin(self) -> None:
        """Wait from now on. Can be repeated."""
        if sys.meta_path is not None and self not in sys.meta_path:  # it is None when the interpreter ends
            sys.meta_path = [self, *sys.meta_path]  # a new list: another thread may be going through this one

    def end(self) -> None:
        """Wait no longer. Can be repeated."""
        if sys.meta_path is not None and self in sys.meta_path:
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as the finders behind this one do."""
        search = _thread.get_ident(), fullname
        finders = sys.meta_path
        if search in self._searching or self not in finders or not self._waits_for(fullname):
            return None
        self._searching.add(search)  # another tool may ask all finders in its turn, and so this one
        try:
            for finder in finders[finders.index(self) + 1 :]:  # those before have passed, or ask this one
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
                if spec is not None:
                    self._wrap(spec.loader, fullname)
                    return spec
            return None
        finally:
            self._searching.discard(search)

    def _wrap(self, loader: Any, name: str) -> None:
        """Wrap what runs the module's code, once. A spec that is only looked up has no effect."""
        if isinstance(loader, type) or not hasattr(loader, "__dict__") or not hasattr(loader, "exec_module"):
            return  # it serves other modules, too
        inner, own = loader.exec_module, "exec_module" in vars(loader)  # its own where another tool has wrapped it, too

        def exec_module(module: ModuleType) -> None:
            if loader.exec_module is exec_module:
                if own:
                    loader.exec_module = inner
                else:
                    del loader.exec_module
            inner(module)
            if self in sys.meta_path:
                self._then(name)

        loader.exec_module = exec_module


def torch_first() -> None:
    """Import torch before a file of ours that would, where `opintercept run` waits for it.

    What waits imports the same file, which must not be half imported by then.
    """
    if "torch" not in sys.modules and any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        import torch  # noqa: F401
