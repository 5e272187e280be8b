"""The browser in which pages are tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(started: Browser) -> Iterator[Browser]:
    """A browser in which pages must do nothing wrong."""
    yield started
    assert started.complaints == []
