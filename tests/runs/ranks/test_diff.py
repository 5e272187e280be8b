"""`runs.diff_ranks`: what diverges between the ranks of one run, and what may differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recorded_ranks
import torch
from made_runs import call, ranked, values, write
from processes import run_beside

from opintercept import OpInterceptError, runs
from opintercept.runs.ranks.comparison import compare
from opintercept.runs.ranks.difference import RankFinding

Calls = list[dict[str, Any]]
STEPS = 12


def training(rank: int, *modules: str, steps: int = STEPS, **fields: Any) -> Calls:
    """The calls of a rank: weights are equal on all ranks and change in each step, and data is its own."""
    calls = []
    for step in range(steps):
        for module in modules or ("a", "b"):
            own = f"{module} {step}"
            calls.append(call(module, f"x {own} {rank}", f"w {own}", f"y {own} {rank}", step=step, **fields))
    return calls


def of(calls: Calls, step: int, module: str) -> dict[str, Any]:
    """The call of a module in a step."""
    (found,) = [each for each in calls if (each["step"], each["module"]) == (step, module)]
    return found


def put(calls: Calls, step: int, module: str, **named: Any) -> None:
    """Replace tensors of one call by others, given by name or by their statistics."""
    for role, name in named.items():
        of(calls, step, module)["values"][role] = values(name) if isinstance(name, str) else name


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., runs.RankDifference]:
    def compared(*ranks: Calls | None, **options: Any) -> runs.RankDifference:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return runs.diff_ranks(ranked(folder, *ranks), **options)

    return compared


def by_what(found: runs.RankDifference) -> list[RankFinding]:
    return sorted(found.findings, key=lambda each: each.what)


def brief(found: RankFinding) -> tuple[Any, ...]:
    return found.what, found.odd, found.step, found.module, found.operand


def test_nothing_diverges_where_only_data_differs(compared: Any) -> None:
    found = compared(*map(training, range(4)))
    assert found.equal
    assert (found.ranks, found.calls, found.steps) == ((0, 1, 2, 3), 96, (0, 11))
    assert found.shared == ((((0, 1, 2, 3),), 2),)
    assert (found.findings, found.found, found.first, found.unshared) == ((), 0, None, 0)


def test_the_first_weight_that_differs_on_one_rank_is_first(compared: Any) -> None:
    ranks = [training(rank) for rank in range(4)]
    for step in range(7, STEPS):
        put(ranks[2], step, "b", rhs=f"w b {step}'")
    put(ranks[2], 9, "a", rhs="other")
    found = compared(*ranks)
    assert not found.equal
    assert [brief(each) for each in found.findings] == [
        ("weight", (2,), 7, "b", "rhs"),
        ("weight", (2,), 9, "a", "rhs"),
    ]
    first = found.first
    assert (first.parts, first.rank, first.index, first.majority) == (((0, 1, 3), (2,)), 2, 15, True)
    assert (first.op, first.phase, first.source) == ("aten::mm", "forward", "train.py:7 in forward")
    assert compared(*ranks, limit=1).findings == (first,)


def test_two_ranks_have_no_majority(compared: Any) -> None:
    ranks = [training(rank) for rank in range(2)]
    put(ranks[1], 3, "a", rhs="other", output=values("y") | {"rms": 1e9})
    found = compared(*ranks)
    (first,) = found.findings
    assert (first.parts, first.majority, first.odd) == (((0,), (1,)), False, (0, 1))
    assert not found.outliers


def test_weights_are_compared_within_the_groups_that_share_them(compared: Any) -> None:
    ranks = [training(rank) for rank in range(4)]
    for rank, calls in enumerate(ranks):
        for step in range(STEPS):
            put(calls, step, "b", rhs=f"shard {rank % 2} {step}")
    found = compared(*ranks)
    assert found.equal
    assert found.shared == ((((0, 1, 2, 3),), 1), (((0, 2), (1, 3)), 1))
    put(ranks[3], 5, "b", rhs="other")
    (first,) = compared(*ranks).findings
    assert (first.parts, first.step, first.majority) == (((1,), (3,)), 5, False)


def test_sharded_weights_are_not_reported(compared: Any) -> None:
    ranks = [training(rank) for rank in range(3)]
    for rank, calls in enumerate(ranks):
        for step in range(STEPS):
            put(calls, step, "a", rhs=f"shard {rank} {step}")
    found = compared(*ranks)
    assert found.equal
    assert (found.shared, found.unshared) == (((((0, 1, 2),), 1),), 1)


def test_a_weight_that_differs_from_most_ranks_from_its_first_step_is_reported(compared: Any) -> None:
    ranks = [training(rank) for rank in range(4)]
    for step in range(STEPS):
        put(ranks[1], step, "b", rhs=f"not loaded {step}")
    (first,) = compared(*ranks).findings
    assert brief(first) == ("weight", (1,), 0, "b", "rhs")


def test_constants_are_not_taken_for_weights_in_common(compared: Any) -> None:
    zeros = values("zeros") | {"min": 0.0, "max": 0.0}
    ranks = [training(rank) for rank in range(2)]
    for rank, calls in enumerate(ranks):
        put(calls, 0, "a", rhs=zeros)
        for step in range(1, STEPS):
            put(calls, step, "a", rhs=f"shard {rank} {step}")
    assert compared(*ranks).equal


def test_an_activation_should_stay_equal_once_it_was_with_two_values(compared: Any) -> None:
    def replicated(until: int) -> list[Calls]:
        ranks = [training(rank) for rank in range(3)]
        for rank, calls in enumerate(ranks):
            for step in range(STEPS):
                put(calls, step, "b", lhs=f"x {step}" if step < until else f"x {step} {rank}")
        return ranks

    assert compared(*replicated(1)).equal  # the first batch may well be the same
    first, *others = compared(*replicated(3)).findings
    assert (first.what, first.step, first.module, first.operand) == ("operand", 3, "b", "lhs")
    assert others == []


def test_operands_of_batches_of_products_and_of_attention_are_no_weights(compared: Any) -> None:
    gemm = call("a", "x", "w", "y")["gemm"] | {"batch": 8}
    for fields in ({"gemm": gemm, "op": "aten::bmm"}, {"op": "aten::_scaled_dot_product_flash_attention"}):
        ranks = [training(rank, **fields) for rank in range(2)]
        for step in range(1, STEPS):
            put(ranks[1], step, "a", rhs=f"key {step}")
            put(ranks[1], step, "b", rhs=f"key {step}")
        found = compared(*ranks)
        assert (found.equal, found.shared) == (True, ())


def test_a_batch_of_another_size_is_no_difference(compared: Any) -> None:
    ranks = [training(rank) for rank in range(3)]
    for step in (4, STEPS - 1):
        for module in ("a", "b"):
            last = of(ranks[1], step, module)
            last |= {name: last[name] | {"shape": [1, 4]} for name in ("lhs", "output")}
            last["values"]["output"] = values("y") | {"rms": 1e-3}
    assert compared(*ranks).equal
    table = of(ranks[1], 5, "b")  # of positions, which is cut to the length of the batch
    table["rhs"] = table["rhs"] | {"shape": [2, 4]}
    put(ranks[1], 5, "b", rhs="a part of the table")
    assert compared(*ranks).equal
    put(ranks[1], STEPS - 1, "b", rhs="other")
    assert brief(compared(*ranks).first) == ("weight", (1,), STEPS - 1, "b", "rhs")


def test_ranks_that_make_more_or_fewer_calls_are_named(compared: Any) -> None:
    ranks = [training(rank) for rank in range(4)]
    place = ranks[1].index(of(ranks[1], 5, "a"))
    ranks[1][place:place] = [of(ranks[1], 5, "a")] * 2
    ranks[3].remove(of(ranks[3], 8, "b"))
    first, second = compared(*ranks).findings
    assert brief(first) == ("calls", (1,), 5, "a", None)
    assert (first.parts, first.numbers, first.rank, first.index) == (((0, 2, 3), (1,)), (1, 3), 1, 11)
    assert brief(second) == ("calls", (3,), 8, "b", None)
    assert (second.numbers, second.rank) == ((1, 0), 0)


def test_more_calls_do_not_hide_a_weight_that_diverges_later(compared: Any) -> None:
    ranks = [training(rank) for rank in range(3)]
    ranks[0].insert(6, ranks[0][6])
    put(ranks[2], 9, "a", rhs="other")
    assert [each.what for each in compared(*ranks).findings] == ["calls", "weight"]


def test_a_module_that_only_some_ranks_have_is_no_difference(compared: Any) -> None:
    ranks = [training(0, "a"), training(1, "a"), training(2, "b"), training(3, "b", "log")]
    for step in (4, 0):
        ranks[0].insert(step, call("eval", "x", "w", "y", step=step))
    found = compared(*ranks)
    assert found.equal
    assert found.shared == ((((0, 1),), 1), (((2, 3),), 1))


def test_the_first_call_in_another_order_is_named(compared: Any) -> None:
    ranks = [training(rank, "a", "b", "c") for rank in range(3)]
    for step in (4, 6):
        place = ranks[2].index(of(ranks[2], step, "b"))
        ranks[2][place : place + 2] = reversed(ranks[2][place : place + 2])
    (first,) = compared(*ranks).findings
    assert brief(first) == ("order", (2,), 4, "c", None)
    assert first.index == 13


def test_the_last_step_of_a_rank_that_was_killed_is_not_counted(tmp_path: Path) -> None:
    for rank in range(3):
        calls = training(rank)
        if rank == 1:
            del calls[-7:]  # in the middle of step 8
        write(tmp_path / f"rank{rank}", calls, rank=rank, world_size=3, finished=rank != 1)
    found = runs.diff_ranks(runs.open_run(tmp_path))
    assert (found.equal, found.unfinished) == (True, {1: 8})
    (tmp_path / "rank1/run.json").write_text((tmp_path / "rank1/run.json").read_text().replace("false", "true"))
    first, *_ = runs.diff_ranks(runs.open_run(tmp_path)).findings
    assert brief(first) == ("calls", (1,), 8, "b", None)


def test_a_rank_without_calls_is_missing(compared: Any) -> None:
    found = compared(training(0), [], training(2), None)
    assert (found.equal, found.ranks, found.missing) == (False, (0, 2), (1, 3))


@pytest.mark.parametrize("statistic", ["rms", "max"])
@pytest.mark.parametrize("factor", [100.0, 0.01, 0.0])
def test_a_rank_whose_outputs_stay_far_off_is_an_outlier(compared: Any, statistic: str, factor: float) -> None:
    ranks = [training(rank) for rank in range(4)]
    for step in range(4, STEPS):
        output = values(f"y {step}")
        names = ["rms"] if statistic == "rms" else ["min", "max"]
        put(ranks[3], step, "b", output=output | {name: output[name] * factor for name in names})
    (first,) = compared(*ranks).findings
    assert brief(first) == ("outlier", (3,), 4, "b", "output")
    assert (first.parts, first.statistic, first.times) == (((0, 1, 2), (3,)), statistic, STEPS - 4)
    assert first.numbers[1] == pytest.approx(first.numbers[0] * factor, rel=0.6)


@pytest.mark.parametrize(("times", "factor", "found"), [(4, 100.0, False), (1, 2000.0, True)])
def test_one_batch_is_an_outlier_only_by_a_huge_factor(compared: Any, times: int, factor: float, found: bool) -> None:
    ranks = [training(rank) for rank in range(4)]
    for step in range(4, 4 + times):
        put(ranks[0], step, "a", output=values("y") | {"rms": 0.6 * factor})
    assert [brief(each) for each in compared(*ranks).findings] == [("outlier", (0,), 4, "a", "output")] * found


def test_two_ranks_that_alone_have_a_module_have_no_outlier(compared: Any) -> None:
    ranks = [training(0, "a"), training(1, "a"), training(2, "b"), training(3, "b")]
    for step in range(7, STEPS):
        put(ranks[1], step, "a", output=values("y") | {"rms": 1e6})
    assert compared(*ranks).equal


def test_gradients_may_be_of_any_size(compared: Any) -> None:
    ranks = [training(rank, phase="backward", grad_of="rhs") for rank in range(4)]
    for step in range(STEPS):
        put(ranks[0], step, "a", output=values("y") | {"rms": 1e-9, "min": 0.0, "max": 0.0})
    assert compared(*ranks).equal


def test_the_rank_that_first_has_values_that_are_not_finite_is_named(compared: Any) -> None:
    ranks = [training(rank) for rank in range(4)]
    put(ranks[1], 3, "b", output=values("y") | {"nan": 2})
    for rank in ranks:
        put(rank, 4, "a", output=values("y") | {"nan": 16, "min": None, "max": None, "rms": None})
    (first,) = compared(*ranks).findings
    assert brief(first) == ("not finite", (1,), 3, "b", "output")
    assert first.parts == ((0, 2, 3), (1,))


def test_masks_and_the_first_scales_of_float16_may_be_infinite(compared: Any) -> None:
    ranks = [training(rank, dtype="float16", phase="backward") for rank in range(3)]
    put(ranks[1], 0, "a", output=values("y") | {"inf": 1})
    assert compared(*ranks).equal
    ranks = [training(rank, bias="mask", op="aten::baddbmm") for rank in range(3)]
    put(ranks[1], 2, "a", bias=values("mask") | {"inf": 4}, output=values("y") | {"inf": 4})
    assert compared(*ranks).equal
    put(ranks[1], 2, "a", bias="mask")
    assert compared(*ranks).first.what == "not finite"


def test_calls_are_compared_where_no_values_were_recorded(compared: Any) -> None:
    ranks = [training(rank, kept=False) for rank in range(3)]
    assert compared(*ranks).equal
    del ranks[2][9]
    assert [each.what for each in compared(*ranks).findings] == ["calls"]


def test_steps_of_a_block_that_was_entered_again_are_other_steps(tmp_path: Path) -> None:
    for rank in range(2):
        calls = training(rank, steps=3)
        for step in range(2):
            again = training(rank, steps=3)[2 * step : 2 * step + 2]
            calls += again if (rank, step) != (1, 1) else again[:1]
        for number, each in enumerate(calls):
            each["index"] = number % 6
        write(tmp_path / f"rank{rank}", calls, rank=rank, world_size=2)
    (first,) = runs.diff_ranks(runs.open_run(tmp_path)).findings
    assert brief(first) == ("calls", (0, 1), 1, "b", None)
    assert (first.numbers, first.index) == ((1, 0), 3)


@pytest.mark.parametrize("window", [1, 7, 40])
def test_small_windows_find_the_same(tmp_path: Path, window: int) -> None:
    ranks = [training(rank, "a", "b", "c") for rank in range(3)]
    put(ranks[1], 6, "c", rhs="other")
    put(ranks[0], 8, "b", output=values("y") | {"nan": 1})
    ranks[2].insert(30, ranks[2][30])
    run = ranked(tmp_path, *ranks)
    whole = compare(run, 100)
    assert sorted(each.what for each in whole.findings) == ["calls", "not finite", "weight"]
    assert compare(run, 100, window) == whole


def test_an_outlier_is_found_across_windows(tmp_path: Path) -> None:
    ranks = [training(rank, "a", "a.1", "a.2", "a.3", steps=40) for rank in range(8)]
    for step in range(13, 30):
        put(ranks[3], step, "a.2", output=values("y") | {"rms": 60.0})
    run = ranked(tmp_path, *ranks)
    whole = compare(run, 100)
    assert [(brief(each), each.times) for each in whole.findings] == [(("outlier", (3,), 13, "a.2", "output"), 17)]
    assert compare(run, 100, 8 * 4 * 4) == whole


def test_any_step_and_index_can_be_read(compared: Any) -> None:
    ranks = [training(rank) for rank in range(2)]
    for number, each in enumerate(ranks[1]):
        each["step"] = (2**62, 0, 2**40 - 1)[number % 3]
    assert not compared(*ranks).equal


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([training(0)], r"comparing ranks needs a run of several, got one rank in '.*'; record a run under torchrun"),
        ([training(0), []], r"comparing ranks needs calls of several, got those of 1 rank in "),
        ([[], []], r"comparing ranks needs calls of several, got those of 0 ranks in "),
    ],
)
def test_one_rank_cannot_be_compared(compared: Any, ranks: list[Calls], message: str) -> None:
    with pytest.raises(OpInterceptError, match=message):
        compared(*ranks)


def test_the_result_is_plain_data(compared: Any) -> None:
    ranks = [training(rank) for rank in range(3)]
    put(ranks[2], 3, "a", rhs="other")
    plain = compared(*ranks).as_dict()
    assert plain["findings"][0]["ranks"] == [2]
    assert plain["findings"][0]["parts"] == ((0, 1), (2,))
    assert plain["shared"] == [{"groups": [[0, 1, 2]], "weights": 2}]
    assert (plain["equal"], plain["unfinished"]) == (False, [])


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trainings that four ranks have recorded."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = run_beside(*[[recorded_ranks.__file__, folder, rank, 4] for rank in range(4)])
    assert [rank.returncode for rank in ranks] == [0] * 4, "\n".join(rank.stderr for rank in ranks)[-5000:]
    return folder


needs_ranks = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)


@needs_ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recorded_ranks.TRAININGS if name != "flipped"])
def test_a_healthy_training_diverges_nowhere(trainings: Path, name: str) -> None:
    found = runs.diff_ranks(runs.open_run(trainings / name))
    assert found.findings == ()
    assert found.equal
    assert found.shared == ((((0, 1, 2, 3),), 10),)


@needs_ranks
@pytest.mark.slow
def test_one_flipped_bit_of_a_weight_is_named_first(trainings: Path) -> None:
    found = runs.diff_ranks(runs.open_run(trainings / "flipped"))
    assert found.first is not None
    assert brief(found.first) == ("weight", (2,), recorded_ranks.FLIPPED, "blocks.1.down", "rhs")
    assert {each.module for each in found.findings} == {"blocks.1.down"}
