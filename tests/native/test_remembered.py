"""What was read of tensors is taken again while no operator writes to them, and only then."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
from compiler import needs_compiler
from recorded import forks, run_forked
from torch import Tensor

from opintercept import OpCall, hooks, intercept, runs
from opintercept._engines import compiled
from opintercept._values.content import content_of

pytestmark = [pytest.mark.slow, needs_compiler, pytest.mark.usefixtures("values_in_cpp")]

LEAST, AGAIN = 1 << 14, 512
SHAPE = (160, 128)


@pytest.fixture(autouse=True)
def remember() -> Iterator[Callable[[int, int], int]]:
    """Remember tensors of every size, and look at none of their values again."""
    remember = compiled.load().remember
    remember(1, 0)
    yield remember
    remember(LEAST, AGAIN)


def products(path: Path, program: Callable[[], object], ops: Any = "all", *others: Any) -> list[runs.StoredCall]:
    with intercept([*others, runs.RunRecorder(path)], ops=ops, engine="compiled"):
        program()
    return [call for call in runs.open_run(path).calls() if call.record.op == "aten::mm"]


def hash_of(tensor: Tensor) -> str | None:
    content = content_of(tensor)
    assert content is not None
    return content.read().hash


def test_an_operand_is_read_once_while_nothing_writes_to_it(tmp_path: Path, remember: Any) -> None:
    x, w = torch.randn(8, 160), torch.nn.Parameter(torch.randn(SHAPE))

    def program() -> None:
        for _ in range(5):
            x @ w
            w.sum()  # the same values, in the same order

    found = products(tmp_path / "run", program)
    assert {call.values["rhs"].hash for call in found} == {hash_of(w)}
    assert remember(1, 0) >= 3 * 4  # x, w and w again, but for the first calls, which hooks see in Python


def test_an_output_is_not_read_again_as_an_operand(tmp_path: Path, remember: Any) -> None:
    x = torch.randn(8, 160)

    def program() -> None:
        for _ in range(3):
            y = x * 2
            y.exp() + y

    products(tmp_path / "run", program)
    assert remember(1, 0) >= 5


@torch.library.custom_op("remembered::written", mutates_args=("x",))
def _written(x: Tensor, number: float) -> None:
    x[0, 0] = number


_library = torch.library.Library("remembered", "FRAGMENT")
_library.define("untold(Tensor x, float number) -> ()")  # the schemas of collectives do not say it either


@torch.library.impl(_library, "untold", "CPU")
def _untold(x: Tensor, number: float) -> None:
    x.numpy()[0, 0] = number


def _in_thread(w: Tensor, number: float) -> None:
    def write() -> None:
        with torch.inference_mode(w.is_inference()):
            w.data[0, 0].fill_(number)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


def _by_optimizer(w: Tensor, number: float) -> None:
    w.grad = torch.zeros_like(w)
    w.grad[0, 0] = number
    torch.optim.SGD([w], lr=1.0, foreach=True).step()


def _by_index(w: Tensor, number: float) -> None:
    w.data.index_put_((torch.tensor([0]), torch.tensor([0])), torch.tensor(number))


WRITES: dict[str, Callable[[Tensor, float], object]] = {
    "one value": lambda w, number: w.data[0, 0].fill_(number),
    "out=": lambda w, number: torch.mul(w.data, number, out=w.data),
    "in a list": lambda w, number: torch._foreach_mul_([w.data[:1]], number),
    "by an index": _by_index,
    "by another name": lambda w, number: w.detach().flatten()[:1].copy_(torch.tensor([number])),
    "by an optimizer": _by_optimizer,
    "by an operator of another library": lambda w, number: torch.ops.remembered.written(w.data, number),
    "by one that does not tell": lambda w, number: torch.ops.remembered.untold(w.data, number),
    "in another thread": _in_thread,
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("inference", [False, True])
def test_what_an_operator_has_written_is_read(way: str, inference: bool, tmp_path: Path) -> None:
    known: list[str | None] = []

    def program() -> None:
        with torch.inference_mode(inference):
            x, w = torch.randn(8, 160), torch.nn.Parameter(torch.randn(SHAPE), requires_grad=not inference)
            for number in range(2, 8):
                known.append(hash_of(w))
                x @ w
                with torch.no_grad():
                    WRITES[way](w, float(number))

    found = products(tmp_path / "run", program)
    assert len(set(known)) == 6
    assert [call.values["rhs"].hash for call in found] == known


@pytest.mark.parametrize("share", [False, True])
def test_a_write_while_another_thread_reads_is_noticed(
    share: bool, remember: Callable[[int, int], int], tmp_path: Path
) -> None:
    w = torch.zeros(4_000_000)
    other = torch.from_numpy(w.numpy()) if share else w
    meet = threading.Barrier(2)
    rounds, known = 40, []

    def write() -> None:
        for number in range(rounds):
            meet.wait()
            other.data.fill_(number + 1.0)
            meet.wait()

    with intercept(runs.RunRecorder(tmp_path / "run"), ops="all", engine="compiled"):
        thread = threading.Thread(target=write)
        thread.start()
        for _ in range(rounds):
            remember(1, 0)  # forgets all
            meet.wait()
            w.sum()  # reads before, while or after the other thread writes
            meet.wait()
            known.append(hash_of(w))
            w.prod()
        thread.join()
    found = [call for call in runs.open_run(tmp_path / "run").calls() if call.record.op == "aten::prod"]
    assert len(set(known)) == rounds
    assert [call.values["self"].hash for call in found] == known


@pytest.mark.parametrize("written", ["one", "other"])
@pytest.mark.parametrize("share", ["numpy", "dlpack"])
def test_a_write_by_another_storage_of_the_same_memory_is_noticed(share: str, written: str, tmp_path: Path) -> None:
    w = torch.randn(SHAPE)
    other = torch.from_numpy(w.numpy()[:150]) if share == "numpy" else torch.utils.dlpack.from_dlpack(w.view(-1)[64:])
    read, write = (w, other) if written == "other" else (other, w.view(-1)[64:] if share == "dlpack" else w)
    known = []

    def program() -> None:
        for number in range(5):
            known.append(hash_of(read))
            read.exp()
            write.view(-1)[0] = number

    with intercept(runs.RunRecorder(tmp_path / "run"), ops="all", engine="compiled"):
        program()
    found = [call for call in runs.open_run(tmp_path / "run").calls() if call.record.op == "aten::exp"]
    assert len(set(known)) == 5
    assert [call.values["self"].hash for call in found] == known


def test_what_runs_while_a_block_is_paused_is_seen_as_well(tmp_path: Path) -> None:
    x, w = torch.randn(8, 160), torch.randn(SHAPE)
    known = []
    with intercept(runs.RunRecorder(tmp_path / "run"), ops="all", engine="compiled") as block:
        for number in range(4):
            known.append(hash_of(w))
            x @ w
            with block.paused():
                w.data[0, 0] = number
    assert [call.values["rhs"].hash for call in runs.open_run(tmp_path / "run").calls() if call.values] == known


def test_what_a_hook_writes_is_read(tmp_path: Path) -> None:
    x, w = torch.randn(8, 160), torch.randn(SHAPE)
    known: list[str | None] = []

    class Writes:
        def post(self, call: OpCall) -> None:
            w.data[0, 0] = len(known)

    def program() -> None:
        with intercept(Writes(), ops="aten::exp"):
            for _ in range(6):
                known.append(hash_of(w))
                x @ w
                x.exp()

    found = products(tmp_path / "run", program)
    assert [call.values["rhs"].hash for call in found] == known


def test_what_a_generated_kernel_writes_is_read(tmp_path: Path) -> None:
    @torch.compile
    def write(w: Tensor, number: Tensor) -> None:
        w[0] = number

    x, w = torch.randn(8, 160), torch.randn(SHAPE)
    known = []

    def program() -> None:
        for number in range(5):
            known.append(hash_of(w))
            x @ w
            write(w.detach(), torch.tensor(float(number)))

    with torch.no_grad(), torch._inductor.config.patch(compile_threads=1):  # others would be left behind
        write(w.clone(), torch.tensor(0.0))
        found = products(tmp_path / "run", program)
    assert len(set(known)) == 5
    assert [call.values["rhs"].hash for call in found] == known


def test_what_is_written_between_two_blocks_is_read(tmp_path: Path) -> None:
    x, w = torch.randn(8, 160), torch.randn(SHAPE)
    for number in range(3):
        found = products(tmp_path / str(number), lambda: [x @ w for _ in range(3)])
        assert {call.values["rhs"].hash for call in found} == {hash_of(w)}
        w.data[0, 0] = number


def test_blocks_that_do_not_see_all_operators_read_each_time(tmp_path: Path, remember: Any) -> None:
    x, w = torch.randn(8, 160), torch.randn(SHAPE)
    for ops in ("matmul", ("all", "-elementwise")):
        products(tmp_path / str(len(ops)), lambda: [x @ w for _ in range(3)], ops)
        assert remember(1, 0) == 0


def test_memory_that_another_tensor_has_got_is_read(tmp_path: Path) -> None:
    x = torch.randn(8, 160)
    known = []

    def program() -> None:
        for number in range(20):
            w = torch.empty(SHAPE)
            w.numpy()[:] = number  # past all operators
            known.append(hash_of(w))
            x @ w
            del w
            gc.collect()

    found = products(tmp_path / "run", program)
    assert [call.values["rhs"].hash for call in found] == known


@pytest.mark.parametrize("count", [1, 40, AGAIN, 160 * 128])
def test_a_write_past_all_operators_is_noticed_by_the_values_that_are_looked_at(
    count: int, tmp_path: Path, remember: Any
) -> None:
    remember(1, count)
    x, w = torch.randn(8, 160), torch.randn(SHAPE)
    known = []

    def program() -> None:
        for number in range(4):
            known.append(hash_of(w))
            x @ w
            w.numpy()[:] = number

    found = products(tmp_path / "run", program)
    assert [call.values["rhs"].hash for call in found] == known


def test_tensors_that_are_small_or_not_dense_are_read_each_time(tmp_path: Path, remember: Any) -> None:
    remember(LEAST, AGAIN)
    x, small, sliced = torch.randn(8, 100), torch.randn(100, 100), torch.randn(200, 320)[::2, ::2]

    def program() -> None:
        for _ in range(3):
            x @ small
            x @ sliced

    products(tmp_path / "run", program)
    assert remember(LEAST, AGAIN) == 0


def test_hooks_that_ask_for_something_else_get_what_they_ask_for(tmp_path: Path) -> None:
    x, w = torch.randn(8, 160), torch.randn(SHAPE)
    w[0, 0] = 1e-30
    stats = [hooks.Stats(("rhs",)), hooks.Stats(("rhs",), for_dtype=torch.float16)]
    counts = []
    for hook in (*stats, *stats):
        with intercept(hook, ops="all", engine="compiled"):
            for _ in range(3):
                x @ w
        counts.append([(row.op, row.underflow) for row in hook.rows() if row.op == "aten::mm"])
    assert counts[0] == counts[2]
    assert counts[1] == counts[3] != counts[0]


@forks
def test_a_forked_child_reads_anew(tmp_path: Path) -> None:
    x, w = torch.randn(8, 160), torch.randn(SHAPE)

    def child() -> None:
        w.numpy()[0, 0] = 7
        found = products(tmp_path / "child", lambda: [x @ w for _ in range(3)])
        assert {call.values["rhs"].hash for call in found} == {hash_of(w)}

    with intercept(runs.RunRecorder(tmp_path / "run"), ops="all", engine="compiled"):
        for _ in range(3):
            x @ w
        assert run_forked(child) == 0
