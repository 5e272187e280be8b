"""Reading values in C++ or with torch's operators, whichever a test asks for."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import processes
import pytest
import torch

from opintercept._engines import choose, compiled
from opintercept._native import build, values
from opintercept._native import library as libraries

# Before conftest.py replaces them.
_is_there = compiled.is_there
_kernel = choose.ENGINES["kernel"]


@functools.cache
def library() -> Any:
    """The library in C++, built if necessary."""
    found = build.load_library(build.built_library())
    found.set_up_values(torch.Tensor, torch.nn.Parameter)
    return found


def read_values(natively: bool, patch: pytest.MonkeyPatch) -> None:
    """Let hooks read values in C++, or not, until the patch is undone."""
    for name in "read", "extent", "storage":
        patch.setattr(values, name, getattr(library(), name) if natively else values.unread)
    for name in "project", "sign_sums":
        patch.setattr(values, name, getattr(library(), name) if natively else values.unsummed)


@contextmanager
def reading(natively: bool) -> Iterator[None]:
    """Let hooks read values in C++, or not."""
    with pytest.MonkeyPatch.context() as patch:
        read_values(natively, patch)
        yield


@contextmanager
def fresh_look() -> Iterator[pytest.MonkeyPatch]:
    """Let `engine="auto"` look for the library, as in a process that has not done so yet.

    `compiled.loaded` stays, since kernels of earlier blocks may be installed: a test that replaces it enters no block.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(libraries.SWITCH, raising=False)
        patch.setattr(libraries, "known", None)
        patch.setattr(compiled, "is_there", _is_there)
        patch.setitem(choose.ENGINES, "kernel", _kernel)
        yield patch


def run_python(code: str, python: str | None = None, cwd: Path | None = None, **environment: str) -> list[str]:
    """Run a program that may use the library, and return the lines that it writes, those of stderr last.

    It runs in a new Python if that is given, and otherwise where torch is imported already.
    """
    env = {name: value for name, value in os.environ.items() if name != libraries.SWITCH} | environment
    if python is None:
        done = processes.run_python("-c", code, cwd=cwd, env=env, check=True)
    else:
        done = subprocess.run([python, "-c", code], cwd=cwd, capture_output=True, text=True, check=True, env=env)
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]
