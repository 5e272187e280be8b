"""`Stats` in programs: its rows, steps, merging, ranks and threads, and its tables."""

from __future__ import annotations

import copy
import csv
import dataclasses
import errno
import math
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import minilm
import pytest
import torch
from compiler import BELOW, LEVELS
from devices import no_waits
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_stats import (
    FLOATS,
    assert_row_is,
    call,
    float64,
    parts_of,
    powers_by_numpy,
    read,
    seen,
    sizes,
    tensors,
    ways,
)
from processes import run_beside
from threads import run_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opintercept import OpInterceptError, hooks, intercept

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:ComplexHalf support is experimental:UserWarning",
        "ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning",
    ),
]


def test_a_step_returns_its_own_rows_and_the_totals_keep_all() -> None:
    found = hooks.Stats(histogram=True)
    lots = [torch.randn(3, 5) for _ in range(4)]
    assert found.step() == []
    found.post(call(lots[0], module="a"))
    found.post(call(lots[1], module="a"))
    first = found.step()
    found.post(call(lots[2], module="b"))
    found.post(call(lots[3], module="a"))
    assert sizes(first) == {"a": (2, 30)}
    assert_row_is(first[0], float64(torch.cat(lots[:2])))
    assert sizes(found.step()) == {"b": (1, 15), "a": (1, 15)}
    assert found.step() == []
    assert sizes(found.rows()) == {"a": (3, 45), "b": (1, 15)}
    assert_row_is(found.rows()[0], float64(torch.cat([lots[0], lots[1], lots[3]])))
    assert sum(found.histogram("a").values()) == 45
    assert found.rows() == found.rows()


@ways
@settings(deadline=None)
@given(mine=st.lists(tensors(), max_size=4), theirs=st.lists(tensors(), max_size=4), after=st.booleans())
@pytest.mark.slow
def test_merging_two_gives_the_statistics_of_both(
    way: str, mine: list[Tensor], theirs: list[Tensor], after: bool
) -> None:
    asked: dict[str, Any] = {"histogram": True, "for_dtype": torch.float16}
    with read(way):
        first, second, both = seen(*mine, **asked), seen(*theirs, **asked), seen(*mine, *theirs, **asked)
        second.post(call(torch.ones(2, 2), module="other"))
        both.post(call(torch.ones(2, 2), module="other"))
        if after:
            first.step()
        second_rows = second.rows()
        first.merge(second)
    assert repr(parts_of(first.rows())) == repr(parts_of(both.rows())) or (not mine and not theirs)
    for row, expected in zip(first.rows(), both.rows(), strict=True):
        assert row.mean == pytest.approx(expected.mean, rel=1e-9, abs=1e-14 * expected.absmax, nan_ok=True)
        assert row.std == pytest.approx(expected.std, rel=1e-6, abs=1e-13 * expected.absmax, nan_ok=True)
    if mine or theirs:
        assert first.histogram("m") == both.histogram("m")
    assert repr(second.rows()) == repr(second_rows)


def test_merging_adds_skipped_and_works_with_itself() -> None:
    first, second = hooks.Stats(channels="output"), hooks.Stats(channels="output")
    first.post(call(torch.ones(2, 3)))
    second.post(call(torch.full((1, 3), 2.0)))
    second.post(call(torch.ones(2, device="meta")))
    first.merge(second)
    assert first.skipped == 1
    assert first.channels("m").tolist() == [2.0] * 3
    first.merge(first)
    assert sizes(first.rows()) == {"m": (4, 18)}
    assert first.skipped == 2


@pytest.mark.parametrize(
    "other", [{"of": "lhs"}, {"for_dtype": torch.float16}, {"histogram": True}, {"channels": "output"}]
)
def test_merging_with_other_arguments_is_refused(other: dict[str, Any]) -> None:
    found = seen(torch.ones(2))
    with pytest.raises(ValueError, match=r"only Stats that were made with the same arguments can be merged, got"):
        found.merge(hooks.Stats(**other))
    assert sizes(found.rows()) == {"m": (1, 2)}


@pytest.mark.parametrize("duplicate", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy])
def test_statistics_can_be_sent_to_another_process(duplicate: Callable[[hooks.Stats], hooks.Stats]) -> None:
    found = hooks.Stats(("lhs", "output"), histogram=True, channels="lhs", for_dtype=torch.float16)
    for _ in range(3):
        found.pre(call(lhs=torch.randn(2, 3)))
        found.post(call(torch.randn(200, 300)))
        found.step()
    found.post(call(torch.randn(2, 2)))
    found.post(call(torch.ones(2, device="meta")))
    twin = duplicate(found)
    assert twin.rows() == found.rows()
    assert (twin.histogram("m"), twin.skipped) == (found.histogram("m"), 1)
    assert torch.equal(twin.channels("m"), found.channels("m"))
    assert sizes(twin.step()) == {"m": (1, 4)}
    twin.pre(call(lhs=torch.ones(1, 3)))
    twin.post(call(torch.ones(1)))
    found.merge(twin)
    assert sum(row.calls for row in found.rows()) == 3 + 4 + 3 + 4 + 2


RANK = """
import sys, torch
import torch.distributed as dist
from types import SimpleNamespace
from opintercept import hooks

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)

def call(output, module):
    return SimpleNamespace(module=module, op="aten::mm", func=None, phase="forward", output=output)

def lot(of, step):
    return torch.arange(12.0).reshape(3, 4) * (of + 1) + 100 * step

stats = hooks.Stats(histogram=True, channels="output", for_dtype=torch.float16)
single = hooks.Stats(histogram=True, channels="output", for_dtype=torch.float16)
for of in range(2):
    single.post(call(lot(of, 0), "shared"))
    single.post(call(lot(of, 0), f"only {of}"))
single.step()
single.post(call(lot(0, 1), "shared"))
single.post(call(lot(1, 1), "shared"))

stats.post(call(lot(rank, 0), "shared"))
stats.post(call(lot(rank, 0), f"only {rank}"))
stats.step()
stats.post(call(lot(rank, 1), "shared"))
stats.post(call(torch.ones(2, device="meta"), "shared"))
alone = dist.new_group([0])
stats.all_reduce(group=alone)
assert sum(row.calls for row in stats.rows()) == 3, stats.rows()
stats.all_reduce()
assert str(stats) == str(single), f"{stats}\\n{single}"
assert [(r.module, r.calls, r.count) for r in stats.step()] == [("shared", 2, 24)]
for row in single.rows():
    assert stats.histogram(row.module) == single.histogram(row.module)
    assert torch.equal(stats.channels(row.module), single.channels(row.module))
assert stats.skipped == 2
try:
    hooks.Stats(histogram=rank == 0).all_reduce()
except ValueError as error:
    assert "every rank must make its Stats with the same arguments" in str(error), error
else:
    raise AssertionError("unlike ranks were added up")
dist.barrier()
dist.destroy_process_group()
print("well")
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.slow
def test_two_ranks_get_the_statistics_of_a_single_process(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = run_beside(*[[script, rank, tmp_path] for rank in range(2)])
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert all(rank.stdout.endswith("well\n") for rank in ranks)


def test_all_reduce_without_ranks_says_what_to_call() -> None:
    with pytest.raises(OpInterceptError, match="which is not initialised; call init_process_group first"):
        hooks.Stats().all_reduce()


def test_calls_of_all_threads_add_up() -> None:
    found = hooks.Stats(("lhs", "output"), histogram=True)

    def work(number: int) -> None:
        for turn in range(300):
            size = 1 + (number + turn) % 5
            found.pre(call(lhs=torch.ones(size), module=f"m{turn % 3}"))
            found.post(call(torch.full((size,), 2.0), module="all"))
            found.post(call(torch.ones(1, device="meta")))
            if turn % 50 == 0:
                found.step()
                found.rows()

    run_threads(*(partial(work, number) for number in range(8)))
    rows = {row.module: row for row in found.rows()}
    count = sum(1 + (number + turn) % 5 for number in range(8) for turn in range(300))
    assert (rows["all"].calls, rows["all"].count, rows["all"].mean) == (2400, count, 2.0)
    assert sum(rows[f"m{m}"].count for m in range(3)) == count
    assert found.histogram("all") == {1: count}
    assert found.skipped == 2400


def test_all_threads_of_a_block_for_all_threads_are_counted() -> None:
    found = hooks.Stats(("lhs", "output"))
    a = torch.randn(8, 8)
    with intercept(found, threads="all"):
        run_threads(*[lambda: [a @ a for _ in range(50)]] * 8)
    rows = {(row.operand, row.calls, row.count) for row in found.rows()}
    assert rows == {("lhs", 400, 400 * 64), ("output", 400, 400 * 64)}


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gpu_adds_up_the_same_as_the_host_without_waiting(dtype: torch.dtype) -> None:
    a, b = torch.randn(300, 200).to("cuda", dtype), torch.randn(200, 100).to("cuda", dtype)
    asked: dict[str, Any] = {"of": ("lhs", "output"), "histogram": True, "channels": "lhs", "for_dtype": torch.float16}
    found, host = hooks.Stats(**asked), hooks.Stats(**asked)
    a @ b  # initialises cuBLAS
    torch.cuda.synchronize()
    with no_waits(), intercept(found):
        outputs = [a @ b for _ in range(3)]
    for output in outputs:
        host.pre(call(lhs=a.cpu(), module=""))
        host.post(call(output.cpu(), module=""))
    assert parts_of(found.rows()) == parts_of(host.rows())
    for row, expected in zip(found.rows(), host.rows(), strict=True):
        assert row.mean == pytest.approx(expected.mean, rel=1e-5, abs=1e-6 * expected.absmax)
        assert row.std == pytest.approx(expected.std, rel=1e-5)
    assert found.histogram("") == host.histogram("")
    assert torch.equal(found.channels(""), host.channels(""))


@gpu
def test_a_cuda_graph_leaves_its_calls_out_with_one_warning() -> None:
    a, found = torch.randn(8, 8, device="cuda"), hooks.Stats()
    a @ a
    with intercept(found), pytest.warns(match="Stats leaves out calls that a CUDA graph captures"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            a @ a
    assert (found.rows(), found.skipped) == ([], 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        hidden: Tensor = checkpoint(lambda x: self.first(x).relu(), x, use_reentrant=False)
        return self.second(hidden)


@pytest.mark.parametrize("engine", BELOW)
def test_rows_are_by_module_operand_and_phase(engine: dict[str, Any]) -> None:
    net, x = Net(), torch.randn(5, 6)
    found = hooks.Stats(("lhs", "rhs", "bias", "output"))
    with intercept(found, **engine):
        net(x).sum().backward()
    rows = {(row.module, row.op, row.operand, row.phase): row for row in found.rows()}
    linears = {(m, "aten::addmm", o, "forward") for m in ("first", "second") for o in ("lhs", "rhs", "bias", "output")}
    again = {("first", "aten::addmm", operand, "recompute") for operand in ("lhs", "rhs", "bias", "output")}
    back = {(m, "aten::mm", o, "backward") for m in ("first", "second") for o in ("lhs", "rhs", "output")}
    assert set(rows) == linears | again | back
    hidden = net.first(x).relu()
    for key, tensor in {
        ("first", "aten::addmm", "lhs", "forward"): x,
        ("first", "aten::addmm", "rhs", "forward"): net.first.weight,
        ("first", "aten::addmm", "bias", "recompute"): net.first.bias,
        ("second", "aten::addmm", "lhs", "forward"): hidden,
        ("second", "aten::addmm", "output", "forward"): net.second(hidden),
    }.items():
        assert_row_is(rows[key], float64(tensor))
    assert rows["second", "aten::mm", "output", "backward"].calls == 2  # for the operand and for the weight


def test_a_linear_is_one_row_at_function_level() -> None:
    net, x = Net(), torch.randn(5, 6)
    found = hooks.Stats(("lhs", "rhs", "output"))
    with intercept(found, level="function"):
        net(x).sum().backward()
    assert {(row.module, row.op, row.operand, row.calls) for row in found.rows()} == {
        (module, "torch.nn.functional.linear", operand, 1)
        for module in ("first", "second")
        for operand in ("lhs", "rhs", "output")
    }
    assert_row_is(found.rows()[1], float64(net.first.weight))


@pytest.mark.parametrize("engine", LEVELS)
def test_operands_are_read_before_the_operator_overwrites_them(engine: dict[str, Any]) -> None:
    into, a = torch.full((3, 3), 7.0), torch.eye(3)
    found = hooks.Stats(("lhs", "bias", "output"))
    with intercept(found, **engine):
        into.addmm_(a, a)
        torch.mm(a, torch.full((3, 3), 2.0), out=a)
    rows = [(row.op.split("::")[-1].split(".")[-1], row.operand, row.mean) for row in found.rows()]
    third = pytest.approx(1 / 3)
    assert rows == [
        ("addmm_", "lhs", third),
        ("addmm_", "bias", 7.0),
        ("addmm_", "output", pytest.approx(7 + 1 / 3)),
        ("mm", "lhs", third),
        ("mm", "output", a.mean().item()),  # torch clears the output first, so 0
    ]


@pytest.mark.parametrize("engine", LEVELS)
def test_under_autocast_the_values_are_those_of_the_operator(engine: dict[str, Any]) -> None:
    layer, x = nn.Linear(6, 3), torch.randn(4, 6)
    found = hooks.Stats(("lhs", "output"))
    with torch.autocast("cpu", torch.bfloat16), intercept(found, **engine):
        output = layer(x)
    assert output.dtype is torch.bfloat16
    rows = {row.operand: row for row in found.rows()}
    assert_row_is(rows["output"], float64(output))
    # Above autocast the operands are those that the program passed, below it those that the operator got.
    assert_row_is(rows["lhs"], float64(x if "level" in engine else x.bfloat16()))


@pytest.mark.parametrize("engine", LEVELS)
def test_rows_are_the_same_under_inference_mode(engine: dict[str, Any]) -> None:
    layer, x = nn.Linear(6, 3), torch.randn(4, 6)
    found = hooks.Stats(("lhs", "output"))
    with intercept(found, **engine):
        layer(x)
        with torch.inference_mode():
            layer(x)
    assert found.skipped == 0
    for operand, tensor in (("lhs", x), ("output", layer(x))):
        rows = [row for row in found.rows() if row.operand == operand]
        assert sum(row.calls for row in rows) == 2
        for row in rows:
            assert_row_is(row, float64(torch.cat([tensor] * row.calls)))


def test_vmapped_tensors_leave_no_row() -> None:
    x, w = torch.randn(4, 2, 3), torch.randn(3, 5)
    found, below = hooks.Stats(("lhs", "output"), histogram=True, channels="lhs"), hooks.Stats()
    with intercept(found, level="function"), intercept(below):
        output = torch.func.vmap(lambda t: t @ w)(x)
    assert (found.skipped, found.rows()) == (2, [])
    assert str(found) == "module  op  operand  phase  calls  mean  std  min  max  zeros  nan  inf"
    (row,) = below.rows()
    assert_row_is(row, float64(output))


@pytest.mark.parametrize("engine", LEVELS)
def test_fake_tensors_are_skipped(engine: dict[str, Any]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    found = hooks.Stats()
    with intercept(found, **engine), FakeTensorMode():
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert found.rows() == []


def test_the_first_of_several_outputs_is_read() -> None:
    q = torch.randn(1, 2, 8, 4)
    found = hooks.Stats()
    with intercept(found), torch.no_grad():
        output = nn.functional.scaled_dot_product_attention(q, q, q)
    (row,) = found.rows()
    assert_row_is(row, float64(output))


def test_an_operand_that_a_call_lacks_is_left_out() -> None:
    found = hooks.Stats(("bias", "output"))
    with intercept(found):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert [row.operand for row in found.rows()] == ["output"]
    assert found.skipped == 0


def test_a_hook_that_reads_outputs_only_has_no_pre() -> None:
    assert not hasattr(hooks.Stats(), "pre")
    assert hasattr(hooks.Stats("lhs"), "pre")


# tests/fidelity/test_ready_made_hooks.py shows the same of values that are read on the host.
@pytest.mark.parametrize("engine", LEVELS)
def test_sums_on_a_device_leave_training_unchanged(engine: dict[str, Any]) -> None:
    def trained(hook: Any) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(Net(), nn.Dropout(0.1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for _ in range(3):
            with intercept(hook, **engine):
                optimizer.zero_grad()
                net(torch.randn(5, 6)).square().sum().backward()
            optimizer.step()
        return [torch.get_rng_state(), *net.parameters(), *(parameter.grad for parameter in net.parameters())]

    found = hooks.Stats(("lhs", "rhs", "bias", "output"), histogram=True, for_dtype=torch.float8_e4m3fn)
    with read("on a device", PIECE=1 << 23):
        observed = trained(found)
        assert len(found.rows()) > 5
    assert all(torch.equal(one, other) for one, other in zip(trained(()), observed, strict=True))
    assert found.skipped == 0


@pytest.mark.slow
def test_the_linear_layers_of_a_pretrained_model_agree_with_numpy() -> None:
    model, tokenizer = minilm.load()
    texts = tokenizer(["See every matmul.", "Change nothing, cost nothing."], padding=True, return_tensors="pt")
    kept: dict[str | None, dict[str, Any]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            kept[name] = {"lhs": inputs[0].clone(), "output": output.clone(), "rhs": module.weight, "bias": module.bias}

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(keep(name))
    found = hooks.Stats(("lhs", "rhs", "bias", "output"), for_dtype=torch.float8_e4m3fn, histogram=True, channels="lhs")
    with intercept(hooks.when(found, op="addmm")), torch.no_grad():
        model(**texts)
    rows = {(row.module, row.operand): row for row in found.rows()}
    assert len(kept) == 37
    assert set(rows) == {(name, operand) for name in kept for operand in ("lhs", "rhs", "bias", "output")}
    for (name, operand), row in rows.items():
        tensor = kept[name][operand].detach()
        values = float64(tensor)
        assert_row_is(row, values)
        cast = tensor.to(torch.float8_e4m3fn).to(torch.float32)
        assert row.underflow == int(((tensor != 0) & (cast == 0)).sum()) / tensor.numel()
        assert row.overflow == int((tensor.abs() > 448).sum()) / tensor.numel()
        assert found.histogram(name, operand) == powers_by_numpy(values)
    for name, operands in kept.items():
        assert torch.equal(found.channels(name), operands["lhs"].abs().flatten(0, -2).amax(0).double())


def a_few() -> hooks.Stats:
    found = hooks.Stats(for_dtype=torch.float16)
    found.post(call(torch.tensor([1.0, 0.0, 1e-9, 1e9]), module="net.0"))
    found.post(call(torch.tensor([math.nan, math.inf]), module=""))
    found.post(call(torch.tensor([0.1, 0.2], dtype=torch.float64), module=None, phase="backward"))
    found.post(call(torch.empty(0), module='an "odd",\nname', op="mkldnn::_linear_pointwise"))
    return found


def test_the_table_shows_every_row() -> None:
    lines = [" ".join(line.split()) for line in str(a_few()).splitlines()]
    assert lines[:4] == [
        "module op operand phase calls mean std min max zeros nan inf underflow overflow",
        "net.0 mm output forward 1 2.5e+08 4.33e+08 0 1e+09 25.0% 0 0 25.00% 25.00%",
        "- mm output forward 1 nan nan nan nan 0.0% 1 1 0.00% 50.00%",
        "? mm output backward 1 0.15 0.05 0.1 0.2 0.0% 0 0 0.00% 0.00%",
    ]
    assert "mkldnn::_linear_pointwise  output   forward" in str(a_few())
    assert "underflow" not in str(seen(torch.ones(1)))


def test_csv_has_every_number_to_the_last_digit(tmp_path: Path) -> None:
    found, path = a_few(), tmp_path / "stats.csv"
    path.write_text("what was there before")
    found.to_csv(path)
    with open(path, newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(found.rows()) == 4
    for line, row in zip(lines, found.rows(), strict=True):
        for field in dataclasses.fields(row):
            value, text = getattr(row, field.name), line[field.name]
            if value is None:
                assert text == ("?" if field.name == "module" else "")
            elif isinstance(value, float):
                assert repr(float(text)) == repr(value)
            else:
                assert text == str(value)
    assert os.listdir(tmp_path) == ["stats.csv"]


class FullDisk:
    """An open file with room for a number of characters."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def write(self, text: str) -> int:
        self.room -= len(text)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self.file.write(text))


@pytest.mark.parametrize("room", [0, 200])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    found, path = a_few(), tmp_path / "stats.csv"
    path.write_text("what was there before")
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", lambda *args, **kwargs: FullDisk(_open(*args, **kwargs), room))
        with pytest.raises(OSError, match="No space left on device"):
            found.to_csv(path)
    assert path.read_text() == "what was there before"
    assert os.listdir(tmp_path) == ["stats.csv"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        found.to_csv(tmp_path / "nowhere" / "stats.csv")


_open = open


NO_RANGE = (torch.int8, torch.bool, torch.complex64, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, "float16", float, 16)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        *(
            ({"of": of}, error, "of must be one or more of 'lhs', 'rhs', 'bias', 'output', got")
            for of, error in (
                *(("weight", ValueError), (("lhs", "wieght"), ValueError), ((), ValueError), ("", ValueError)),
                *((("lhs", 3), TypeError), (3, TypeError)),
            )
        ),
        *(
            ({"channels": channels}, ValueError, "channels must be one of 'lhs', 'rhs', 'bias', 'output', got")
            for channels in ("weight", ["lhs", "rhs"], "", 1)
        ),
        *(
            ({"for_dtype": dtype}, TypeError, "for_dtype must be a floating-point torch.dtype with a sign, got")
            for dtype in NO_RANGE
        ),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hooks.Stats(**given)


def test_reading_what_was_not_asked_for_or_not_seen_raises() -> None:
    found = seen(torch.ones(2))
    with pytest.raises(ValueError, match="has no histograms; make it with histogram=True"):
        found.histogram("m")
    with pytest.raises(ValueError, match="has no channels; make it with channels='lhs'"):
        found.channels("m")
    found = seen(torch.ones(2), histogram=True, channels="output")
    with pytest.raises(KeyError, match="no output of module 'n' was seen in forward; seen: m"):
        found.histogram("n")
    with pytest.raises(KeyError, match="no output of module 'm' was seen in backward; seen: m"):
        found.channels("m", phase="backward")
    with pytest.raises(KeyError, match="seen: none"):
        hooks.Stats(histogram=True).histogram("m")
