"""What waits for the import of a module, beside other tools that do."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opintercept._core.after_import import AfterImport

NAME = "a_module_that_tools_wait_for"


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What happens, in this order; the module notes that it runs."""
    (tmp_path / f"{NAME}.py").write_text("import builtins\nbuiltins.events.append('runs')\n")
    found: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.events", found, raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield found
    sys.modules.pop(NAME, None)


class Tool(importlib.abc.MetaPathFinder):
    """Another tool that wraps `exec_module` of the module's loader, and takes its wrapper off when it runs."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != NAME:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None)
        loader: Any = spec.loader
        inner, own = loader.exec_module, "exec_module" in vars(loader)

        def exec_module(module: Any) -> None:
            if own:
                loader.exec_module = inner
            else:
                del loader.exec_module
            loader.exec_module(module)
            self.then()

        loader.exec_module = exec_module
        return spec


@pytest.mark.parametrize("first", [False, True], ids=["a tool that came before", "a tool that comes later"])
def test_other_tools_that_wait_for_the_module_are_called_too(first: bool, events: list[str]) -> None:
    waits: list[Callable[[], None]] = [
        lambda: sys.meta_path.insert(0, Tool(lambda: events.append("tool"))),
        AfterImport(NAME.__eq__, lambda _: events.append("ours")).begin,
    ]
    for wait in reversed(waits) if first else waits:
        wait()
    loader = importlib.import_module(NAME).__loader__
    assert events == (["runs", "ours", "tool"] if first else ["runs", "tool", "ours"])
    assert "exec_module" not in vars(loader)


def test_a_search_alone_is_no_import(events: list[str]) -> None:
    finder = AfterImport(NAME.__eq__, lambda name: events.append(name))
    finder.begin()
    assert importlib.util.find_spec(NAME) is not None
    assert events == []
    importlib.import_module(NAME)
    del sys.modules[NAME]
    importlib.import_module(NAME)
    assert events == ["runs", NAME, "runs", NAME]
    finder.end()
    del sys.modules[NAME]
    importlib.import_module(NAME)
    assert events[4:] == ["runs"]


def test_a_list_that_another_thread_goes_through_stays_as_it_is(events: list[str]) -> None:
    finder = AfterImport(NAME.__eq__, events.append)
    for change in (finder.begin, finder.end):
        searched = sys.meta_path
        before = [*searched]
        change()
        assert sys.meta_path is not searched
        assert searched == before
    assert finder not in sys.meta_path
