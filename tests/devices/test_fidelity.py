"""A block changes no result on a stand-in for a GPU, and its calls are those of the same program on the CPU."""

from __future__ import annotations

import pytest
import sampled
from compiler import needs_compiler
from devices import on_a_device

pytestmark = needs_compiler

PART = ["mm", "addmm_in_place", "linear_bias_3d", "mha_train", "feature not_reentrant", "feature autograd_function"]

# Where calls differ. Torch chooses other operators by the device; a script is compiled anew in its first runs.
OTHER = {"attention", "attention_flash", "feature attention", "encoder_layer_eval", "rnn", "feature scripted"}
OTHER_OF_ALL = {"attention_math", "attention_dropout", "mha_train", "encoder_layer_train", "matrix_exp", "matmul_out"}
# Programs that copy numbers of their own to the device.
OTHER_OF_ALL |= {"grouped_mm", "gpt2", "llama", "bert", "t5"}
# A graph that was made in the backward pass: nothing tells whose nodes those of other operators than products are.
OTHER_OF_ALL |= {"feature first_and_second_derivative", "feature reentrant"}
# A conjugate is dropped (pytorch issue 198118), and the function that a tensor wraps is known on the device alone.
OTHER_OF_MODE = {"pinv_complex", "feature vector_jacobian"}
KNOWN: dict[tuple[str, str], set[str]] = {
    ("kernel", "matmul"): set(),
    ("compiled", "matmul"): set(),
    ("mode", "matmul"): OTHER_OF_MODE,
    ("function", "matmul"): set(),
    ("kernel", "all"): OTHER_OF_ALL,
    ("compiled", "all"): OTHER_OF_ALL | {"feature by_dispatch"},  # a wrapper that is noted in C++ on the CPU
    ("mode", "all"): OTHER_OF_ALL | OTHER_OF_MODE,
}


def check(found: dict[str, list[str]], known: set[str], least: int) -> None:
    ran = {name: lines for name, lines in found.items() if not any("does not run" in line for line in lines)}
    assert len(ran) >= least
    assert {name: lines for name, lines in ran.items() if lines and name not in known} == {}
    assert [line for lines in ran.values() for line in lines if "other results" in line or "Traceback" in line] == []


def test_some_programs_run_on_a_device_as_on_the_cpu() -> None:
    check(on_a_device("device_fidelity.py", "kernel", "matmul", *PART), set(), len(PART))


@pytest.mark.slow
@pytest.mark.skipif(sampled.on, reason="each takes a minute")
@pytest.mark.parametrize(("engine", "ops"), KNOWN)
def test_programs_run_on_a_device_as_on_the_cpu(engine: str, ops: str) -> None:
    check(on_a_device("device_fidelity.py", engine, ops), OTHER | KNOWN[engine, ops], 92)
