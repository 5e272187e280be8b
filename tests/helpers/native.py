"""Reading values in C++ or with torch's operators, whichever a test asks for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from opintercept._native import build, values


@functools.cache
def library() -> Any:
    """The library in C++, built if necessary."""
    found = build.load_library(build.built_library())
    found.set_up_values(torch.Tensor, torch.nn.Parameter)
    return found


@contextmanager
def reading(natively: bool) -> Iterator[None]:
    """Let hooks read values in C++, or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "read", library().read if natively else values.unread)
        patch.setattr(values, "extent", library().extent if natively else values.unread)
        yield
