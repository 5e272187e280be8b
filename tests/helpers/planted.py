"""Graphs that are compiled with a change of the text that Inductor generates, so that a kernel is wrong."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def compiled_in(plant: Callable[[str], str]) -> Iterator[None]:
    """Compile anew what is compiled inside, and let `plant` change the text of each wrapper before it is loaded."""
    torch._dynamo.reset()
    cache = importlib.import_module("torch._inductor.codecache").PyCodeCache
    write = cache.write

    def planted(source: str, *args: Any, **options: Any) -> Any:
        return write(plant(source), *args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cache, "write", planted)
        with torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
            yield
    torch._dynamo.reset()


def replaced(pattern: str, by: str, place: int = 0) -> Callable[[str], str]:
    """Change one match of a pattern, counted over all wrappers."""
    seen = 0

    def plant(text: str) -> str:
        def change(match: re.Match[str]) -> str:
            nonlocal seen
            seen += 1
            return match.expand(by) if seen == place + 1 else match[0]

        return re.sub(pattern, change, text)

    return plant
