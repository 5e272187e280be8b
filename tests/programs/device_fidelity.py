"""Programs that must run on a stand-in for a GPU as they do without a block, with the calls that they have on the CPU.

`python device_fidelity.py ENGINE OPS [NAME...]` prints as JSON how they differ. Each runs in a process of its own, on
the device first, so that nothing that the CPU's run leaves behind helps.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from device_hooks import differences, plain
from models import MODELS, inputs_of
from programs import PROGRAMS, Program, execute
from seen import assert_alike
from torch import Tensor
from toy_device import in_a_child, use_driver

from opintercept import hooks, intercept

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("fidelity", "helpers")]
import test_features

Run = Callable[[], Sequence[Tensor]]
FIELDS = ("op", "module", "source", "phase", "forward", "gemm", "autocast")


def of_program(program: Program) -> Sequence[Tensor]:
    """What one of `PROGRAMS` makes, its gradients, and the state of the random numbers."""
    found = execute(program, nullcontext, gradients=True)
    if found.exception is not None:
        raise found.exception[0](found.exception[1])
    return [*found.outputs, *(each for each in found.gradients if each is not None), found.random_state]


def of_model(make: Callable[[], Any]) -> Sequence[Tensor]:
    """The loss of a model, and its gradients."""
    model = make().eval()  # without dropout, for which the device has another operator
    model.set_attn_implementation("eager")  # another one is chosen for the CPU
    loss = model(**inputs_of(model)).loss
    loss.backward()
    return [loss, *(each.grad for each in model.parameters() if each.grad is not None)]


CASES: dict[str, Run] = {
    **{program.name: partial(of_program, program) for program in PROGRAMS},
    **{f"feature {test_features.by_name(each)}": each.run for each in test_features.FEATURES},
    **{name: partial(of_model, make) for name, make in MODELS.items()},
}


def run(device: str, name: str, watch: Sequence[Any], options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(5)
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with intercept(watch, **options) if watch else nullcontext():
            made = list(CASES[name]())
    return [each.detach().cpu() for each in made]


def compare(name: str, options: dict[str, Any]) -> list[str]:
    """How a program differs on the device: from one that nothing watches in results, and from the CPU's in calls."""
    found, results = [], []
    for device in ("toy", "cpu"):
        recorder, stats = hooks.Recorder(), hooks.Stats(("lhs", "rhs", "output"))
        try:
            results.append(run(device, name, [recorder, stats], options))
        except Exception as error:
            try:
                run(device, name, [], options)
            except Exception:
                return [f"does not run: {error}"]
            raise
        calls = [[str(getattr(each, field)) for field in FIELDS] for each in recorder.records]
        found.append([calls, plain(stats.rows())])
    lines = differences(found[0], found[1])
    try:
        assert_alike(run("toy", name, [], options), results[0])
    except AssertionError as error:
        lines.insert(0, f"other results than without a block: {error}")
    return lines


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    engine, ops, *names = sys.argv[1:]
    if engine == "compiled":
        use_driver()  # noted calls are read in one launch
    options: dict[str, Any] = {"level": "function"} if engine == "function" else {"engine": engine, "ops": ops}
    print(json.dumps({name: in_a_child(partial(compare, name, options)) for name in names or CASES}))
