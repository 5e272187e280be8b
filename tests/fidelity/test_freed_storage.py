"""Operands whose memory the program has freed: with any hook, torch returns its own result or raises its own error."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_PROGRAM = """
import io, logging, sys, tempfile, warnings

import torch

from opintercept import hooks, intercept, runs


class Writer:
    def log(self, values, step):
        pass


name, options = sys.argv[1], eval(sys.argv[2])
folder = tempfile.mkdtemp()
logging.getLogger("quiet").addHandler(logging.NullHandler())
logging.getLogger("quiet").setLevel(logging.INFO)
every = ("lhs", "rhs", "bias", "output")
x = torch.randn(64, 64)
phased = torch.ones(8, 8, dtype=torch.complex64)
with intercept(runs.RunRecorder(f"{folder}/other", tensors="full")):
    torch.addmm(x, x, x)
hook = {
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
    "NonFinite every": lambda: hooks.NonFinite(every=2),
    "Print": lambda: hooks.Print(io.StringIO()),
    "Log": lambda: hooks.Log("quiet", values="stats"),
    "Scalars": lambda: hooks.Scalars(Writer(), every),
    "AttentionWeights": hooks.AttentionWeights,
    "Gradients": hooks.Gradients,
    "Graft": lambda: runs.Graft(f"{folder}/other", op="addmm"),
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


def addmm(bias):
    return torch.addmm(bias, x, x, beta=0)


programs = {
    "bias": lambda: addmm(freed(64, 64)),
    "view": lambda: addmm(freed(65, 64, view=True)),
    "large": lambda: torch.addmm(freed(2048, 2048), torch.ones(2048, 2), torch.ones(2, 2048), beta=0),
    "short": lambda: torch.addmm(freed(2048, 2048, size=8), torch.ones(2048, 2), torch.ones(2, 2048), beta=0),
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
print("done")
"""

HOOKS = [
    *("Stats", "Capture", "Capture sample", "Capture disk", "RunRecorder", "RunRecorder sample", "RunRecorder full"),
    *("Reference", "FakeQuantize", "FakeQuantize channel", "Noise", "BitFlip", "NonFinite", "NonFinite every", "Print"),
    *("Log", "Scalars", "AttentionWeights", "Gradients", "Graft", "Profile", "Recorder", "none"),
]


@pytest.mark.parametrize("options", [{}, {"engine": "mode"}, {"level": "function"}], ids=["kernel", "mode", "function"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_does_not_read_freed_memory(hook: str, options: dict[str, str], request: pytest.FixtureRequest) -> None:
    if not options and request.config.getoption("--compiled"):
        options = {"engine": "compiled"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, hook, repr(options)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-3000:]
