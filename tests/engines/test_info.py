"""`info` as an object and as text. `tests/native/test_library.py` has what it says in each circumstance."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import torch

from opintercept import Info, __version__, info

BUILT = Info(
    engine="compiled",
    reason="",
    library=Path("/cache/opintercept/torch2.13.0.so"),
    cache=Path("/cache/opintercept"),
    torch="2.13.0+cpu",
    git="cf30153c4c131c81",
    python="3.11.7",
    vectors="AVX512",
    noted=True,
    values=True,
    on_devices="read with torch's operators",
)


def test_the_table_says_where_the_library_is() -> None:
    assert str(BUILT).splitlines() == [
        f"opintercept    {__version__}, torch 2.13.0+cpu (cf30153c), Python 3.11.7",
        'engine="auto"  compiled',
        "library        /cache/opintercept/torch2.13.0.so",
        "calls          noted in C++, where the stack is read too",
        "values         read in C++, with AVX512",
        "on devices     read with torch's operators",
    ]


def test_the_table_says_why_there_is_no_library() -> None:
    missing = dataclasses.replace(
        BUILT, engine="kernel", reason="it rains", library=None, noted=False, values=False, git=None
    )
    assert str(missing).splitlines() == [
        f"opintercept    {__version__}, torch 2.13.0+cpu, Python 3.11.7",
        'engine="auto"  kernels in Python, since it rains',
        "library        none; `opintercept build` keeps it in /cache/opintercept",
        "calls          shown to hooks in Python",
        "values         read with torch's operators",
        "on devices     read with torch's operators",
    ]


def test_without_a_home_folder_there_is_no_cache_to_name() -> None:
    text = str(dataclasses.replace(BUILT, library=None, cache=None))
    assert text.splitlines()[2] == "library        none"


def test_the_versions_are_those_of_this_process() -> None:
    found = info()
    assert (found.torch, found.git, found.python) == (
        torch.__version__,
        torch.version.git_version,
        platform.python_version(),
    )
    assert found.vectors == torch.backends.cpu.get_cpu_capability()
