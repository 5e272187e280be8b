"""Nothing that watches a program initialises CUDA, or waits for whoever does. The GPU is that of `fake_gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opintercept import runs

pytestmark = pytest.mark.slow

PROGRAM = """
import torch
layer = torch.nn.Linear(3, 4)
layer(torch.randn(2, 3)).relu().sum().backward()
"""
BLOCK = """
from opintercept import hooks, intercept, runs
every = [hooks.Profile(), hooks.NonFinite(), hooks.Stats(), hooks.Checksum(), hooks.Reference(), hooks.Capture()]
with intercept([*every, runs.RunRecorder("run", "full")], ops="all"):
    layer(torch.randn(2, 3)).relu().sum().backward()
"""
RUN = ("-m", "opintercept", "run")
HOOKS = "profile,nonfinite,stats,checksum,reference,capture,replicas"
COMMANDS = {
    "run": RUN,
    "run --hooks": (*RUN, "--hooks", HOOKS, "--ops", "all", "--out", "run"),
    "run --stop": (*RUN, "--stop"),
    "run --why": (*RUN, "--out", "run", "--why"),
    "run --flight": (*RUN, "--out", "run", "--flight", "9"),
    "a block": (),
}
FAKE = Path(__file__).parents[1] / "helpers" / "fake_gpu"


def watched(folder: Path, program: str, command: tuple[str, ...] = ()) -> int:
    """Run a program where torch has a GPU, and return its status."""
    (folder / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(FAKE), "FAKE_GPU": str(folder / "asked"), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, *command, "program.py"]
    return subprocess.run(arguments, cwd=folder, env=environment, stderr=subprocess.DEVNULL, timeout=120).returncode


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_that_watches_a_program_initialises_cuda(name: str, tmp_path: Path) -> None:
    assert watched(tmp_path, PROGRAM + (BLOCK if name == "a block" else ""), COMMANDS[name]) == 0
    assert (tmp_path / "asked").read_text() == ""


INITIALISE = "torch.cuda._lazy_init()\ntorch.backends.cuda.matmul.allow_tf32 = True\nlayer(torch.randn(5, 3))\n"


def test_a_run_names_the_devices_that_the_program_has_initialised(tmp_path: Path) -> None:
    assert watched(tmp_path, PROGRAM + INITIALISE, (*RUN, "--out", "run")) == 0
    assert (tmp_path / "asked").read_text().split()[0] == "_lazy_init"
    assert runs.open_run(tmp_path / "run").info.devices == ("Fake GPU", "Fake GPU")


def test_a_flight_that_is_killed_has_named_the_devices(tmp_path: Path) -> None:
    program = f"{PROGRAM}{INITIALISE}import os\nos.kill(os.getpid(), 9)\n"
    assert watched(tmp_path, program, (*RUN, "--out", "run", "--flight", "9")) == -9
    assert runs.open_run(tmp_path / "run").info.devices == ("Fake GPU", "Fake GPU")
