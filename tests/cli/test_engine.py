"""An inference engine under `opintercept run`: its processes, its operators, its cache, and `why` a trainer differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sampled
from compiler import needs_compiler
from processes import Program
from recorded import tensor_of

from opintercept import runs
from opintercept._native import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork"),
]
ENGINE = Path(__file__).parents[1] / "programs" / "engine.py"
CACHE = 4096 * 2 * 4 * 16 * 4  # bytes of the keys and values that a worker of two has for a layer
PAIRS = """
import sys
sys.path.insert(0, {programs!r})
import torch
from opintercept import intercept, runs
from engine import PLANTS, PROMPT, Served, Settings, Trained, define

torch.set_num_threads(1)
define()
for pair in {pairs}:
    plant, _, side = pair.partition("-in-")
    own, answers = PLANTS.get(plant, Settings()), []
    served = Served(own if side == "engine" else Settings())
    with intercept(runs.RunRecorder(pair + "/engine", "full"), ops="all"):
        answers += served.answer()
    trained = Trained(own if side == "trainer" else Settings())
    with torch.no_grad(), intercept(runs.RunRecorder(pair + "/trainer", "full"), ops="all"):
        trained(torch.tensor([[*PROMPT, *answers]]))
"""
SAID = {
    "nothing": ("rounding", ""),
    "theta-in-engine": ("uses 12000 where A uses 10000", "theta **"),
    "eps-in-engine": ("uses 0.01 where A uses 1e-06", "+ eps))"),
    "scale-in-trainer": ("uses scale=0.25 where A uses 0.2", "F.scaled_dot_product_attention(q, k, v"),
    "lora-in-engine": ("seems to have another weight, which was not recorded", "F.linear(gated, w[f"),
    "weight-in-trainer": ("seems to have another weight: rows 3, 4, 5, 6, ... of 64 differ", "_o"),
}
"""What is planted, what `why` says of it, and what stands in the line that it names."""


# Whether kernels are those in C++, and whether the engine's model is compiled.
HOW = [("1", True)] if sampled.on else [("0", True), ("1", False)]


@needs_compiler
@pytest.mark.parametrize(("in_cpp", "compiled"), HOW)
def test_each_process_of_an_engine_is_recorded(in_cpp: str, compiled: bool, tmp_path: Path) -> None:
    if in_cpp == "1":
        build.built_library()  # for the programs that the test starts
    noted = tmp_path / "noted"
    noted.mkdir()
    command = [sys.executable, "-m", "opintercept", "run", "--ops", "all", "--tensors", "full", "--out", "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPINTERCEPT_COMPILED": in_cpp}
    arguments = [*command, str(ENGINE), str(noted), *["--compiled"] * compiled]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "did not end" not in done.stderr
    run = runs.open_run(tmp_path / "run")
    assert run.info.finished
    found = {
        info.member["pid"]: Counter(call.record.op for call in run.calls(rank))
        for rank, info in run.infos.items()
        if info.member
    }
    counted = {file.stem: Counter(json.loads(file.read_text())) for file in noted.glob("*.json")}
    assert len(counted) == 3
    for pid, calls in counted.items():
        assert {op: count for op, count in found[pid].items() if op in calls} == dict(calls)
    workers = [calls for calls in found.values() if calls["_C::onednn_mm"]]
    assert [calls["vllm::unified_attention_with_output"] for calls in workers] == [6, 6]
    assert all(any(op.startswith("inductor::") for op in calls) for calls in workers) == compiled
    attentions = [call for call in run.calls() if call.record.op == "_C::cpu_attention_with_kv_cache"]
    assert {tuple(tensor_of(run, call, "rhs").shape) for call in attentions} == {(8, 1, 16), (9, 1, 16), (10, 1, 16)}
    assert sum(file.stat().st_size for file in (tmp_path / "run").rglob("*.safetensors")) < 2 * CACHE  # weights of both


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "pairs.py").write_text(PAIRS.format(programs=str(ENGINE.parent), pairs=[*SAID]))
    program = Program(["pairs.py"], cwd=folder)
    assert program.wait() == 0, program.stderr
    return folder


@pytest.mark.parametrize("pair", SAID)
def test_why_finds_what_an_engine_does_otherwise_than_a_trainer(pair: str, pairs: Path) -> None:
    found = runs.why(*(runs.open_run(pairs / pair / side) for side in ("trainer", "engine")))
    what, line = SAID[pair]
    if pair == "nothing":
        assert (found.verdict, found.causes) == (what, ())
        return
    (cause,) = found.causes
    assert cause.what == what
    number = int(cause.place.line.rpartition(":")[2])
    assert line in ENGINE.read_text().splitlines()[number - 1]
