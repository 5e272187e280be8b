"""Two processes of torch.distributed, threads as `nn.DataParallel` starts them, and workers of a DataLoader."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed_programs
import pytest
import torch
from distributed_programs import ENGINES, PROGRAMS
from nets import Model
from processes import run_ranks
from products import Products
from threads import run_threads
from torch import distributed, nn
from torch.utils.data import DataLoader

from opintercept import hooks, intercept
from opintercept._engines import kernels
from opintercept.runs import RunRecorder, open_run

pytestmark = pytest.mark.slow

UNWRAPPED = "unwrapped"
RANKS = (0, 1)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw of the programs, which all run in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(distributed_programs.__file__, folder, ranks=len(RANKS))
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in RANKS]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_matmul_of_a_distributed_program_is_seen_and_no_result_changes(
    results: list[dict[str, Any]], program: str, engine: str, rank: int
) -> None:
    result = results[rank][program][engine]
    assert result["different"] == []
    assert result["compared"] > 25
    seen = [op for op, *_ in result["calls"]]
    if engine != "function":
        assert Counter(result["profiled"]) <= Counter(seen)
    if engine in ("kernel", "mode"):  # which watch one thread, as the profiler does
        assert seen == result["profiled"]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_distributed_program_has_the_names_and_links_of_the_unwrapped_model(
    results: list[dict[str, Any]], program: str, engine: str, rank: int
) -> None:
    calls, expected = (results[rank][name][engine]["calls"] for name in (program, UNWRAPPED))
    of_model = calls[: len(expected)]
    if program == "DTensor":
        # Two products in a row, of which only the first has a gradient, cannot be told apart.
        for (*_, forward), call in zip(of_model, expected, strict=True):
            call[3] = None if forward is None else call[3]
        assert sum(forward is not None for *_, forward in of_model) >= (11 if engine != "function" else 0)
    assert of_model == expected
    assert any(phase == "backward" for _, phase, *_ in expected) is (engine != "function")
    # What a communication hook multiplies belongs to no module.
    assert all(op == "aten::bmm" and not module for op, _, module, _ in calls[len(expected) :])
    if program != "DDP, multiplying hook":
        assert len(calls) == len(expected)


@pytest.mark.parametrize("rank", RANKS)
def test_a_communication_hook_that_multiplies_is_seen_in_all_threads(results: list[dict[str, Any]], rank: int) -> None:
    # PowerSGD continues when its all-reduces are done, in this thread or in a thread of gloo.
    in_hook = {
        engine: [
            phase for op, phase, *_ in results[rank]["DDP, multiplying hook"][engine]["calls"] if op == "aten::bmm"
        ]
        for engine in ENGINES
        if engine != "function"
    }
    assert len(in_hook["all threads"]) == 30
    assert all(phases[:10] == ["backward"] * 10 for phases in in_hook.values())
    assert all(len(phases) in (10, 20, 30) for phases in in_hook.values())


@pytest.mark.parametrize("rank", RANKS)
def test_the_dispatcher_of_a_rank_is_restored(results: list[dict[str, Any]], rank: int) -> None:
    assert results[rank]["restored"]


def test_threads_all_sees_replicas_in_threads_under_the_names_of_the_model() -> None:
    # As `nn.parallel.parallel_apply` runs them, which needs an accelerator.
    model, x = Model(8, 4), torch.randn(6, 8)
    plain = hooks.Recorder()
    with intercept(plain):
        expected = model(x)
    everything, current = hooks.Recorder(), hooks.Recorder()
    outputs: list[torch.Tensor] = []
    with intercept(everything, threads="all"), intercept(current):
        run_threads(*[lambda: outputs.append(model(x))] * 4)
        torch.stack(outputs).sum().backward()
    assert all(torch.equal(output, expected) for output in outputs)
    forward = [r for r in everything.records if r.phase == "forward"]
    assert Counter((r.op, r.module) for r in forward) == Counter((r.op, r.module) for r in plain.records * 4)
    # The backward pass runs in this thread, and links to calls of the others.
    backward = [r for r in everything.records if r.phase == "backward"]
    assert [r.op for r in backward] == [r.op for r in current.records]
    assert len(backward) == 4 * 13
    assert {r.phase for r in current.records} == {"backward"}


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    with intercept(()):
        pass  # gloo's threads have ended, so the kernels can be removed


@pytest.mark.parametrize("engine", ["kernel", "compiled", "mode"])
def test_what_is_still_being_sent_is_not_read(engine: Any, one_rank: None, tmp_path: Path) -> None:
    """An operator that sends returns before anything has come: what is in the memory is nobody's result."""
    memory = torch.full((4,), torch.nan)
    check, stats, recorder = hooks.NonFinite(), hooks.Stats(), RunRecorder(tmp_path / "run", "stats")
    with intercept([check, stats, recorder], ops="all", engine=engine):
        for _ in range(3):
            distributed.all_reduce(memory)
    calls = [call for call in open_run(tmp_path / "run").calls() if call.record.op == "c10d::allreduce_"]
    assert [call.values for call in calls] == [{}] * 3
    assert stats.rows() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_threads_all_sees_data_parallel() -> None:
    model, x = Model(8, 4).cuda(), torch.randn(6, 8, device="cuda")
    plain, everything = hooks.Recorder(), hooks.Recorder()
    with intercept(plain):
        model(x)
    replicated = nn.DataParallel(model, device_ids=[0, 0])
    replicated(x)
    with intercept(everything, threads="all"):
        replicated(x).sum().backward()
    forward = Counter((r.op, r.module) for r in everything.records if r.phase == "forward")
    assert forward == Counter((r.op, r.module) for r in plain.records * 2)
    assert all(r.module for r in everything.records)


@pytest.mark.parametrize(
    ("workers", "start", "engine"),
    [(workers, start, engine) for workers, start in ((0, None), (2, "fork")) for engine in ENGINES]
    + [(2, "spawn", "kernel")],  # these get nothing from their parent, whatever the engine
)
def test_a_data_loader_in_a_block(workers: int, start: str | None, engine: str) -> None:
    products = Products()
    recorder = hooks.Recorder()
    with intercept([recorder, products.hook], **ENGINES[engine]):
        for number, batch in enumerate(
            DataLoader(
                products, batch_size=2, num_workers=workers, timeout=60 * bool(workers), multiprocessing_context=start
            )
        ):
            assert torch.equal(batch["product"], batch["expected"])
            # A worker does not run the hooks of its parent.
            assert batch["seen here"].tolist() == ([0, 0] if workers else [2 * number + 1, 2 * number + 2])
            # It sees what it intercepts itself.
            assert batch["seen by a block of its own"].tolist() == [1, 1]
            torch.ones(3, 3) @ torch.ones(3, 3)
    assert [r.gemm.m for r in recorder.records if r.gemm].count(3) == 3
    assert len(recorder.records) == 3 + (0 if workers else 12)
    _sweep()


def test_workers_forked_before_a_block_do_not_run_its_hooks() -> None:
    products = Products()
    loader = DataLoader(
        products, batch_size=2, num_workers=2, timeout=60, persistent_workers=True, multiprocessing_context="fork"
    )
    recorder = hooks.Recorder()
    assert len(list(loader)) == 3
    with intercept([recorder, products.hook], threads="all"):
        assert all(batch["seen here"].tolist() == [0, 0] for batch in loader)
        torch.ones(3, 3) @ torch.ones(3, 3)
    assert all(batch["seen here"].tolist() == [0, 0] for batch in loader)
    assert len(recorder.records) == 1
    del loader
    _sweep()


def _sweep() -> None:
    """Wait for the threads of a DataLoader's queues to end, so that the kernels can be removed."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and type(thread).__module__ != "tqdm._monitor":
            thread.join(10)
    with intercept(ops="mm"):
        pass
    assert not kernels.KERNELS.installed
