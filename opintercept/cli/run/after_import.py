"""`after_import`: calls a function right after a module has been imported.

Invariant: the import itself goes as it would without it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` once: right after the first import of a top-level module, or now if that was imported before."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self._searching or self not in sys.meta_path:
            return None
        self._searching = True  # another tool that waits for the module may ask all finders in its turn, and so us
        try:
            for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # those before have passed, or ask us
                if (spec := finder.find_spec(fullname, path, target)) is not None:
                    if spec.loader is not None:
                        self._wrap(spec.loader)
                    return spec
            return None
        finally:
            self._searching = False

    def _wrap(self, loader: Any) -> None:
        """Wrap this loader, which serves only this module. A spec that is only looked up has no effect."""
        inner, own = loader.exec_module, "exec_module" in vars(loader)  # its own where another tool has wrapped it, too

        def exec_module(module: ModuleType) -> None:
            if loader.exec_module is exec_module:
                if own:
                    loader.exec_module = inner
                else:
                    del loader.exec_module
            inner(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        loader.exec_module = exec_module
