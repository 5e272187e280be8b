"""`info`: which engine this process takes, and why.

Must not build anything.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from opintercept._core.version import __version__
from opintercept._engines import compiled
from opintercept._native import build, library
from opintercept._origin import stack
from opintercept._values import on_device


@dataclass(frozen=True, slots=True)
class Info:
    """What `info` returns. As text it is a small table.

    Attributes:
        engine: What `engine="auto"` takes for named operators at dispatch level: `"compiled"`, or `"kernel"` in Python.
        reason: Why it is not `"compiled"`; `""` if it is.
        library: Where the library in C++ lies; None if this process uses none.
        cache: The folder that `opintercept build` keeps it in; None if there is no home folder.
        torch: The version of torch.
        git: The commit that torch was built from.
        python: The version of Python.
        vectors: torch's name for the best vector instructions of this processor, `"AVX512"` for example.
        noted: Whether calls are noted in C++, where the stack is read too.
        values: Whether hooks read values of tensors on the CPU in C++.
        on_devices: How hooks read those of tensors on CUDA devices.
    """

    engine: Literal["compiled", "kernel"]
    reason: str
    library: Path | None
    cache: Path | None
    torch: str
    git: str | None
    python: str
    vectors: str
    noted: bool
    values: bool
    on_devices: str

    def __str__(self) -> str:
        where = "none" if self.cache is None else f"none; `opintercept build` keeps it in {self.cache}"
        commit = f" ({self.git[:8]})" if self.git else ""
        rows = {
            "opintercept": f"{__version__}, torch {self.torch}{commit}, Python {self.python}",
            'engine="auto"': "compiled" if self.engine == "compiled" else f"kernels in Python, since {self.reason}",
            "library": where if self.library is None else str(self.library),
            "calls": "noted in C++, where the stack is read too" if self.noted else "shown to hooks in Python",
            "values": f"read in C++, with {self.vectors}" if self.values else "read with torch's operators",
            "on devices": self.on_devices,
        }
        return "\n".join(f"{name:<15}{text}" for name, text in rows.items())


def info() -> Info:
    """Tell which engine `engine="auto"` takes in this process and why, and where the library in C++ is.

    Nothing is built. The library is looked for once in a process, so one that is built later shows in the next.

    Returns:
        An object to read or to print.

    Example:
        >>> info().engine in ("compiled", "kernel")
        True
    """
    ready = compiled.is_there()  # first, since it may find that the library does not work
    found = library.find()
    try:
        cache = build.cache_folder()
    except RuntimeError:  # no home folder
        cache = None
    return Info(
        engine="compiled" if ready else "kernel",
        reason="" if ready else found.reason,
        library=found.path if ready else None,
        cache=cache,
        torch=torch.__version__,
        git=torch.version.git_version,
        python=platform.python_version(),
        vectors=torch.backends.cpu.get_cpu_capability(),
        noted=ready and compiled.load().walk is not stack.walk,
        values=found.module is not None,
        on_devices=on_device.told(),
    )
