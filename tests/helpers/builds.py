"""Builds of the library with a compiler that tests control."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from native import fresh_look
from processes import Program

from opintercept._native import build

# Writes `made` in place of objects and libraries, as soon as there is no file `held` beside it.
FAKE_COMPILER = """\
#!/bin/sh
here=$(dirname "$0")
echo "start $$" >> "$here/log"
for output; do :; done  # the last argument
echo half > "$output"
while [ -e "$here/held" ]; do sleep 0.05; done
sleep 0.1
echo made > "$output"
echo end >> "$here/log"
"""


def unoptimized(folder: Path) -> str:
    """A compiler that takes less time, where a test does not ask how fast the library is; for `CXX`."""
    compiler = folder / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O0\n')
    compiler.chmod(0o755)
    return str(compiler)


BUILD = """
import sys
from pathlib import Path
from opintercept._native import build
build.SOURCES = [Path(name) for name in sys.argv[1:]]
print(build.built_library().read_text(), end="", flush=True)
"""


class Builds:
    """Builds of two sources with a compiler that can be held."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.cache = folder / "a cache" / "opintercept"
        self.sources = [folder / "one.cpp", folder / "two.cpp"]
        for source in self.sources:
            source.touch()
        self.compiler = folder / "c++"
        self.compiler.write_text(FAKE_COMPILER)
        self.compiler.chmod(0o755)
        self.held = folder / "held"
        patch.setattr(build, "SOURCES", self.sources)
        patch.setenv("TORCH_EXTENSIONS_DIR", str(self.cache.parent))
        patch.setenv("CXX", str(self.compiler))
        patch.delenv("MAX_JOBS", raising=False)

    def add_vectorized(self) -> None:
        """Add a source that is compiled for each set of vector instructions."""
        source = self.folder / "vectors" / "loops.cpp"
        source.parent.mkdir()
        source.touch()
        self.sources.append(source)

    def start(self) -> Program:
        return Program(["-c", BUILD, *self.sources])

    def wait_for(self, count: int) -> None:
        """Wait until the compiler has been started that often."""
        end = time.monotonic() + 60
        while not self.log.exists() or self.log.read_text().count("start") < count:
            assert time.monotonic() < end
            time.sleep(0.01)

    def compilers(self) -> list[int]:
        """The processes of all compilers that were started."""
        return [int(line.split()[1]) for line in self.log.read_text().splitlines() if line.startswith("start")]

    def left(self) -> list[str]:
        """What lies in the cache, by the end of the name; the lock stays and is empty of meaning."""
        return sorted(path.name.partition(".so")[2].rpartition(".")[2] for path in self.cache.iterdir())


@contextmanager
def fake_builds(folder: Path) -> Iterator[Builds]:
    """Build with such a compiler, in a process that has not looked for the library."""
    pytest.importorskip("fcntl")
    with fresh_look() as patch:
        yield Builds(folder, patch)


# A library that loads, and has nothing of ours.
MODULE = """
#include <Python.h>
#include <c10/macros/Macros.h>

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "empty"};

PyMODINIT_FUNC PyInit_opintercept_compiled() {
    return PyModule_Create(&module);
}
"""
