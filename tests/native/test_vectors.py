"""The library has what it reads values with once for each set of vector instructions, and picks one when it runs."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections import defaultdict

import pytest
import torch
from compiler import needs_compiler
from native import library, run_python

from opintercept._native import build

pytestmark = pytest.mark.slow

SETS = ("DEFAULT", "AVX2", "AVX512")
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="reads instructions of x86")


def instructions_by_set() -> dict[str, set[str]]:
    """The functions of the library that need AVX2 or AVX512, by what they need."""
    library()
    command = ["objdump", "-d", "--no-show-raw-insn", str(build.cached_library())]
    needs, name = defaultdict[str, set[str]](set), ""
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if begins := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            name = begins[1]
        elif re.search(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]", line):
            needs["AVX512"].add(name)
        elif re.search(r"%ymm|\tv[a-z0-9]+ ", line):
            needs["AVX2"].add(name)
    return needs


@needs_compiler
@needs_x86
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_vector_instructions_are_in_functions_for_processors_that_have_them() -> None:
    """An inline function of a header that the linker took from another set would crash older processors."""
    needs = instructions_by_set()
    assert [name for name in needs["AVX512"] if "AVX512" not in name] == []
    assert [name for name in needs["AVX2"] if "AVX2" not in name and "AVX512" not in name] == []
    assert any("read" in name for name in needs["AVX512"])
    assert any("read" in name for name in needs["AVX2"])
    started = [name for names in needs.values() for name in names if "_GLOBAL__sub_I" in name]
    assert started == []  # they run when the library is loaded, whatever the processor


# The order of additions, and so the last bits of a sum, depends on how many lanes are added at once.
PROGRAM = """
import torch
from opintercept._native import library, values
x = torch.rand(64, 997, generator=torch.Generator().manual_seed(3))
values.adopt(library.find().module)
out = torch.empty(64, 1)
values.project(x, torch.ones(997, 1), out, None)
print(*(values.read(row)[0][7].hex() for row in x), out.tolist())
"""


@needs_compiler
@needs_x86
def test_the_environment_chooses_what_older_processors_run() -> None:
    library()
    most = SETS.index(torch.backends.cpu.get_cpu_capability()) + 1
    found = [run_python(PROGRAM, ATEN_CPU_CAPABILITY=name.lower()) for name in SETS[:most]]
    assert len({str(lines) for lines in found}) == most
    assert found[-1] == run_python(PROGRAM)
