"""Operands whose memory the program has freed: with any hook, torch returns its own result or raises its own error."""

from __future__ import annotations

import json

import pytest
from processes import run_python
from programs import ENGINES

pytestmark = pytest.mark.slow

# Each hook has a process of its own, since reading freed memory kills the process. They are forks of one that has
# imported torch and computed nothing.
_PROGRAM = """
import faulthandler, io, json, logging, os, sys, tempfile, traceback, warnings

import torch

from opintercept import hooks, intercept, runs

faulthandler.enable()
torch.set_num_threads(1)
options, names = json.loads(sys.argv[1])
logging.getLogger("quiet").addHandler(logging.NullHandler())
logging.getLogger("quiet").setLevel(logging.INFO)
every = ("lhs", "rhs", "bias", "output")


class Writer:
    def log(self, values, step):
        pass


def make(name, folder):
    return {
        "Stats": lambda: hooks.Stats(every, histogram=True),
        "Capture": lambda: hooks.Capture(("lhs", "rhs", "bias", "output")),
        "Capture sample": lambda: hooks.Capture(("lhs", "rhs", "bias"), sample=3),
        "Capture disk": lambda: hooks.Capture(("lhs", "rhs", "bias"), to="disk", folder=f"{folder}/kept"),
        "RunRecorder": lambda: runs.RunRecorder(f"{folder}/run"),
        "RunRecorder sample": lambda: runs.RunRecorder(f"{folder}/run", tensors="sample"),
        "RunRecorder full": lambda: runs.RunRecorder(f"{folder}/run", tensors="full"),
        "Reference": hooks.Reference,
        "FakeQuantize": lambda: hooks.FakeQuantize(of=every),
        "FakeQuantize channel": lambda: hooks.FakeQuantize(per="channel"),
        "Noise": lambda: hooks.Noise(1e-9, of=every),
        "BitFlip": lambda: hooks.BitFlip(of=every, bits=0),
        "NonFinite": lambda: hooks.NonFinite(inf=True, action="record", save=f"{folder}/found"),
        "NonFinite every": lambda: hooks.NonFinite(check_every=2),
        "Print": lambda: hooks.Print(io.StringIO()),
        "Log": lambda: hooks.Log("quiet", values="stats"),
        "Scalars": lambda: hooks.Scalars(Writer(), every),
        "AttentionWeights": hooks.AttentionWeights,
        "Gradients": hooks.Gradients,
        "Patch": lambda: runs.Patch(f"{folder}/other", op="addmm"),
        "Profile": hooks.Profile,
        "Recorder": hooks.Recorder,
        "none": lambda: lambda call: None,
    }[name]()


def freed(*shape, dtype=torch.float32, size=0, view=False):
    # Whole pages, which the system takes back: reading them kills the process.
    tensor = torch.ones(*shape, dtype=dtype)
    view = tensor[1:] if view else tensor
    tensor.untyped_storage().resize_(size)
    return view


def watch(name, folder):
    x = torch.randn(64, 64)
    phased = torch.ones(8, 8, dtype=torch.complex64)
    with intercept(runs.RunRecorder(f"{folder}/other", tensors="full")):
        torch.addmm(x, x, x)
    hook = make(name, folder)
    programs = {
        "bias": lambda: torch.addmm(freed(64, 64), x, x, beta=0),
        "view": lambda: torch.addmm(freed(65, 64, view=True), x, x, beta=0),
        "large": lambda: torch.addmm(freed(1024, 1024), torch.ones(1024, 2), torch.ones(2, 1024), beta=0),
        "short": lambda: torch.addmm(freed(1024, 1024, size=8), torch.ones(1024, 2), torch.ones(2, 1024), beta=0),
        "complex": lambda: torch.addmm(freed(8, 8, dtype=phased.dtype), phased, phased, beta=0),
        "in place": lambda: freed(64, 64).addmm_(x, x, beta=0),
        "out": lambda: torch.mm(x, x, out=freed(64, 64)),
        "empty": lambda: torch.mm(x[:0], freed(64, 64)),
        "lhs": lambda: torch.mm(freed(64, 64), x),
        "rhs": lambda: torch.mm(x, freed(64, 64)),
        "batched": lambda: torch.baddbmm(freed(1, 64, 64), x[None], x[None], beta=0),
    }
    if isinstance(hook, (hooks.FakeQuantize, hooks.BitFlip)):
        del programs["complex"]  # these hooks refuse complex operands
    for name, program in programs.items():
        results = []
        for watched in (False, True):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    if watched:
                        with intercept(hook, **options):
                            result = program()
                    else:
                        result = program()
                results.append((result.shape, result.dtype))
            except Exception as error:
                results.append((type(error), str(error)))
        assert results[0] == results[1], (name, results)


def in_a_fork(name):
    with tempfile.TemporaryFile() as told, tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(told.fileno(), sys.stderr.fileno())
                watch(name, folder)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        told.seek(0)
        return status, told.read().decode()


print(json.dumps({name: in_a_fork(name) for name in names}))
"""

HOOKS = [
    *("Stats", "Capture", "Capture sample", "Capture disk", "RunRecorder", "RunRecorder sample", "RunRecorder full"),
    *("Reference", "FakeQuantize", "FakeQuantize channel", "Noise", "BitFlip", "NonFinite", "NonFinite every", "Print"),
    *("Log", "Scalars", "AttentionWeights", "Gradients", "Patch", "Profile", "Recorder", "none"),
]


@pytest.fixture(scope="module", params=ENGINES)
def ends(request: pytest.FixtureRequest) -> dict[str, tuple[int, str]]:
    """The exit status of each hook's process, negative if a signal ended it, and what it wrote to stderr."""
    options = ENGINES[request.param]
    if not options and request.config.getoption("--compiled"):
        options = {"engine": "compiled"}
    done = run_python("-c", _PROGRAM, json.dumps([options, HOOKS]), timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: (status, told) for name, (status, told) in json.loads(done.stdout).items()}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_does_not_read_freed_memory(hook: str, ends: dict[str, tuple[int, str]]) -> None:
    status, told = ends[hook]
    assert status == 0, told[-3000:]
