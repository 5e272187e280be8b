"""`Replicas`: ranks that diverge are found and named, and ranks that may differ raise no alarm."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import replica_programs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Program, run_beside
from torch import nn

from opintercept import hooks, intercept
from opintercept._ranks.expectations import (
    CONSTANT,
    PATIENCE,
    WEIGHT,
    DivergedOperand,
    Expectations,
    RankOperand,
    mixed,
)
from opintercept._ranks.operand_hashes import OperandHashes, is_weight

needs_ranks = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)


def tables(*ranks: dict[int, int], flags: int = WEIGHT) -> list[list[RankOperand]]:
    """The table of each rank from its values by key, in the order of its calls."""
    return [[RankOperand(key, value, flags) for key, value in rank.items()] for rank in ranks]


def agree(expectations: Expectations, step: Sequence[Sequence[RankOperand]]) -> bool:
    """What the small exchange says."""
    sums = [expectations.summed(rank, 0, table) for rank, table in enumerate(step)]
    return not sum(total for total, _ in sums) % 2**64 and not sum(unknown for _, unknown in sums)


def test_a_weight_is_expected_to_stay_equal_on_the_ranks_that_have_it_in_common_at_first() -> None:
    expectations = Expectations(4)
    assert expectations.judge(tables({1: 5, 2: 7}, {1: 5, 2: 8}, {1: 5, 2: 7}, {1: 5, 2: 8})) == []
    assert expectations.of(1) == ((0, 1, 2, 3),)
    assert expectations.of(2) == ((0, 2), (1, 3))
    assert agree(expectations, tables({1: 6, 2: 1}, {1: 6, 2: 2}, {1: 6, 2: 1}, {1: 6, 2: 2}))
    step = tables({1: 6, 2: 1}, {1: 6, 2: 2}, {1: 9, 2: 1}, {1: 6, 2: 3})
    assert not agree(expectations, step)
    assert expectations.judge(step) == [DivergedOperand(1, ((0, 1, 3), (2,))), DivergedOperand(2, ((1,), (3,)))]
    assert expectations.judge(step) == []  # told once
    assert expectations.of(1) == ((0, 1, 3),)
    assert not expectations.wants(1, 2)
    assert expectations.of(2) == ((0, 2),)


def test_an_activation_is_expected_to_be_equal_after_it_was_in_two_steps_with_different_values() -> None:
    expectations = Expectations(2)
    for value in (5, 5, 6):
        assert expectations.of(1) is None
        assert expectations.judge(tables({1: value, 2: 4, 3: value}, {1: value, 2: 4, 3: 1}, flags=0)) == []
    assert expectations.of(1) == ((0, 1),)
    assert expectations.of(2) is None  # equal, but always the same
    assert expectations.of(3) == ()  # not equal, so no longer hashed
    assert expectations.judge(tables({1: 1, 2: 4}, {1: 2, 2: 4}, flags=0)) == [DivergedOperand(1, ((0,), (1,)))]
    assert expectations.of(2) == ()


def test_constants_do_not_count_as_equal() -> None:
    expectations = Expectations(2)
    expectations.judge(tables({1: 0, 2: 0}, {1: 0, 2: 0}, flags=WEIGHT | CONSTANT))
    assert expectations.of(1) is None
    expectations.judge(tables({1: 3, 2: 5}, {1: 4, 2: 5}))
    assert (expectations.of(1), expectations.of(2)) == ((), ((0, 1),))
    for _ in range(PATIENCE):
        expectations.judge(tables({3: 0}, {3: 0}, flags=CONSTANT))
    assert expectations.of(3) == ()


def test_ranks_without_a_call_are_not_compared_and_not_forgotten() -> None:
    expectations = Expectations(3)
    expectations.judge(tables({1: 5, 2: 5}, {1: 5, 2: 5}, {1: 5, 2: 5}))
    step = tables({1: 6}, {2: 6}, {})
    assert not agree(expectations, step)  # so the ranks look
    assert expectations.judge(step) == []
    assert expectations.judge(tables({1: 7}, {1: 8}, {})) == [DivergedOperand(1, ((0,), (1,)))]
    assert expectations.of(1) == ((0, 2),)


def test_what_has_diverged_comes_in_the_order_of_the_calls() -> None:
    expectations = Expectations(2, all_equal=True)
    step = tables({9: 1, 4: 1, 7: 1}, {9: 1, 4: 2, 7: 2})
    assert [each.key for each in expectations.judge(step)] == [4, 7]


def test_ranks_that_have_learned_something_else_do_not_agree() -> None:
    one, other = Expectations(2), Expectations(2)
    step = tables({1: 5}, {1: 5})
    one.judge(step)
    assert (one.summed(0, 3, [])[0] + other.summed(1, 3, [])[0]) % 2**64
    other.judge(step)
    assert not (one.summed(0, 3, [])[0] + other.summed(1, 3, [])[0]) % 2**64
    assert (one.summed(0, 3, [])[0] + other.summed(1, 4, [])[0]) % 2**64


_values = st.sampled_from([0, 1, 2, 2**63 - 1, -(2**63)])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_small_exchange_and_the_tables_find_the_same(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    keys = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4, unique=True))
    expectations = Expectations(size)
    first = [{key: data.draw(_values) for key in keys} for _ in range(size)]
    expectations.judge(tables(*first))
    for key in keys:
        groups = expectations.of(key)
        assert groups is not None
        assert all(len({first[rank][key] for rank in group}) == 1 < len(group) for group in groups)
        alone = [rank for rank in range(size) if not any(rank in group for group in groups)]
        values = [first[rank][key] for rank in alone] + [first[group[0]][key] for group in groups]
        assert len(set(values)) == len(values)
    # The next step has equal values where they are expected, or one that is changed.
    step = [{key: mixed(first[rank][key]) for key in keys} for rank in range(size)]
    rank, key = data.draw(st.integers(0, size - 1)), data.draw(st.sampled_from(keys))
    changed = data.draw(st.booleans())
    if changed:
        step[rank][key] ^= 1 << data.draw(st.integers(0, 62))
    matters = changed and any(rank in group for group in expectations.of(key) or ())
    now = tables(*step)
    assert agree(expectations, now) is not matters
    found = expectations.judge(now)
    assert [each.key for each in found] == ([key] if matters else [])
    assert all((rank,) in each.ranks for each in found)
    assert agree(expectations, now)


def hash_of(hashes: OperandHashes, tensor: Any, constants: bool = False) -> tuple[int, int]:
    hashed = hashes.of(tensor, constants)
    assert hashed is not None
    ((value, flags),) = hashes.read([hashed])
    return value, flags


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.float8_e4m3fn], ids=str
)
def test_one_bit_changes_the_hash_and_strides_do_not(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 9).mul(50).to(dtype)
    hashes = OperandHashes()
    value, flags = hash_of(hashes, tensor, constants=True)
    assert flags == 0
    assert hash_of(hashes, tensor.mT.contiguous().mT)[0] == value
    assert hash_of(hashes, tensor.mT)[0] != value
    tensor.view(torch.uint8)[3, 4] ^= 1
    assert hash_of(hashes, tensor)[0] != value
    assert hash_of(hashes, torch.ones(3).to(dtype), constants=True)[1] == CONSTANT


def test_a_weight_is_hashed_once_a_step_and_when_torch_has_written_to_it() -> None:
    hashes, layer = OperandHashes(), nn.Linear(4, 4)
    weight, before = layer.weight, hash_of(OperandHashes(), layer.weight)
    assert hash_of(hashes, weight.t()) == hash_of(hashes, weight) == before
    weight.data.add_(1)
    assert hash_of(hashes, weight) == before  # torch does not know of it, and the step is the same
    hashes.next_step()
    after = hash_of(hashes, weight)
    assert after != before
    with torch.no_grad():
        weight.sub_(1)
    assert hash_of(hashes, weight.t()) not in (after,)


def test_weights_and_casts_of_them_are_weights() -> None:
    layer = nn.Linear(4, 4)
    assert is_weight(layer.weight.t())
    assert is_weight(layer.weight.bfloat16().t())
    assert not is_weight(layer(torch.ones(1, 4)))
    assert not is_weight(torch.ones(1))


def test_without_other_ranks_nothing_is_hashed() -> None:
    replicas = hooks.Replicas()
    layer = nn.Linear(4, 4)
    assert str(replicas) == "nothing compared: no block was entered"
    with intercept(replicas) as watch:
        for _ in range(3):
            layer(torch.ones(2, 4)).sum().backward()
            watch.step()
    assert str(replicas) == "nothing compared: torch.distributed is not initialised"
    assert (replicas.findings, replicas.expected, replicas.compared) == ([], {}, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "stop"}, "action must be one of 'raise', 'warn', 'record', got 'stop'"),
        ({"every_steps": 0}, "every_steps must be a whole number of at least 1, got 0"),
        ({"of": "output"}, "of must be one or more of 'lhs', 'rhs', 'bias', 'value', 'weights', got 'output'"),
        ({"modules": []}, "modules must name at least one module, got none"),
    ],
)
def test_a_wrong_argument_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hooks.Replicas(**options)


def test_a_finding_says_who_has_diverged_and_where() -> None:
    place = ("layers.3.mlp", "aten::addmm", "forward", "rhs", True, "net.py:8 in forward", 0)
    shown = str(hooks.Divergence(((0, 2, 3), (1,)), 7, 12, *place))
    assert shown == (
        "rank 1 diverged from ranks 0, 2, 3 at step 7, call 12, module layers.3.mlp, rhs (weight) of aten::addmm in "
        "forward, at net.py:8 in forward"
    )
    assert str(hooks.Divergence(((0,), (1,), (2,)), 7, 12, *place)).startswith(
        "ranks 0 to 2 diverged from each other at"
    )
    parts = ((0, 1), (2, 3), (4,))
    shown = str(hooks.Divergence(parts, 7, None, None, "aten::mm", "backward", "lhs", False, None, 1))
    assert shown == (
        "ranks 2, 3 and rank 4 diverged from ranks 0, 1 at step 7, a call that this rank did not make, an unknown "
        "module, lhs of aten::mm in backward; 1 other operand diverged in this step"
    )


# What ranks find.


def launch(folder: Path, size: int, *programs: str) -> list[Program]:
    return run_beside(*[[replica_programs.__file__, folder, rank, size, *programs] for rank in range(size)])


def run(folder: Path, size: int, *programs: str) -> list[dict[str, Any]]:
    ranks = launch(folder, size, *programs)
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(rank.stderr for rank in ranks)[-5000:]
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]


FOUR = ("flipped", "grid")
TWO = [name for name in replica_programs.PROGRAMS if name not in ("grid", "failing", "flipped")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("two"), 2, *TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("four"), 4, *FOUR)


def finding(said: dict[str, Any]) -> hooks.Divergence:
    """The only finding."""
    ((ranks, *others),) = said["findings"]
    return hooks.Divergence(tuple(map(tuple, ranks)), *others)


pytestmark = needs_ranks
slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("way", ["ddp", "autocast", "function", "mode", "everything", "threads"])
def test_data_parallel_training_raises_no_alarm_and_keeps_its_bits(two: Any, way: str) -> None:
    for rank in two:
        said = rank["healthy"][way]
        assert (said["findings"], said["equal"], said["same"]) == ([], True, True)
        assert said["compared"] == replica_programs.STEPS + 1
        assert len(said["expected"]) >= 10
        told = [name for name in said["expected"] if " parameter " not in name]  # the originals of autocast's copies
        assert (len(told) < len(said["expected"])) is (way == "autocast")
        assert all("rhs" in name or "bias" in name or way == "everything" for name in told)


@slow
def test_a_parameter_that_no_product_reads_is_compared_where_the_step_ends(two: Any) -> None:
    for rank in two:
        said = rank["unread"]
        places = {"norm": "norm parameter weight", "table": "table parameter weight", "autocast": "norm parameter bias"}
        for name, place in places.items():
            found = finding(said[name])
            assert (found.ranks, found.step, found.index, found.weight) == (((0,), (1,)), 3, None, True)
            assert f"{found.module} {found.op} {found.operand}" == place
            assert f"at the end of step 3, module {found.module}, parameter {found.operand}" in said[name]["text"]
        found = finding(said["buffer"])
        assert (found.step, found.module, found.op, found.operand, found.weight) == (
            3,
            "Normed",
            "buffer",
            "scale",
            False,
        )
        for name in ("healthy", "other model", "filtered"):
            assert said[name]["findings"] == [], name
        assert {name for name in said["healthy"]["expected"] if " parameter " in name} == {
            f"{module} parameter {name}" for module in ("norm", "batch") for name in ("weight", "bias")
        } | {"table parameter weight"}


@slow
def test_one_flipped_bit_of_a_weight_is_named_with_its_ranks(four: Any) -> None:
    for rank in four:
        found = finding(rank["flipped"])
        assert found.ranks == ((0, 2, 3), (1,))
        assert (found.step, found.module, found.op, found.phase) == (3, "blocks.1.down", "aten::addmm", "forward")
        assert (found.operand, found.weight, found.more) == ("rhs", True, 2)  # recomputed, and in backward
        named = "rank 1 diverged from ranks 0, 2, 3 at step 3, call 51, module blocks.1.down, rhs (weight)"
        assert named in rank["flipped"]["text"]


@slow
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("flipped under autocast", {"step": 3, "module": "blocks.1.down", "operand": "rhs", "weight": True}),
        ("every other step", {"step": 4}),
        ("not synchronised", {"step": 1, "module": "blocks.0.up", "operand": "rhs", "weight": True}),
        ("frozen", {"step": 3, "operand": "rhs"}),  # torch has written to the weight, so it was hashed again
        ("copied", {"step": 3}),  # a rank with a copy of its hook makes all ranks learn anew
    ],
    ids=str,
)
def test_the_only_divergence_is_named(two: Any, program: str, expected: dict[str, Any]) -> None:
    for rank in two:
        found = finding(rank[program])
        assert {name: getattr(found, name) for name in expected} == expected


@slow
def test_every_compares_every_other_step(two: Any) -> None:
    assert [rank["every other step"]["compared"] for rank in two] == [4, 4]


@slow
def test_an_activation_that_diverges_is_named(two: Any) -> None:
    for rank in two:
        first, second = rank["activation"]["findings"]
        assert first[:4] == [[[0], [1]], 4, 65, "blocks.0.down"]
        assert first[5:8] == ["forward", "lhs", False]
        assert second[1] == 5  # the weights follow


@slow
def test_ranks_may_make_different_calls(two: Any) -> None:
    found = [finding(rank["uneven"]) for rank in two]
    assert [each.index for each in found] == [51, 61]  # each says its own number
    assert all((each.step, each.module, each.operand) == (3, "blocks.1.down", "rhs") for each in found)


@slow
def test_raise_raises_on_all_ranks_and_warn_warns_once(two: Any) -> None:
    for rank in two:
        said = rank["raised"]["error"]
        assert said.startswith("rank 1 diverged from rank 0 at step 3, call 51, module blocks.1.down")
        assert rank["raised"]["compared"] == 4
        (warning,) = rank["warned"]["warnings"]
        assert warning.startswith("rank 1 diverged from rank 0 at step 3, call 52, module head, rhs (weight)")


@slow
def test_named_modules_must_be_equal_from_the_first_step_on(two: Any) -> None:
    for rank in two:
        said = rank["named"]
        assert said["weights"]["findings"] == []
        named = {name.partition(" ")[0] for name in said["weights"]["expected"]}
        assert named == {"blocks.0.up", "blocks.1.up", "head"}
        found = finding(said["others"])
        assert (found.step, found.module, found.operand) == (0, "blocks.1.down", "rhs")
        found = finding(said["activations"])
        assert (found.step, found.module, found.operand, found.weight) == (0, "head", "lhs", False)
        (warning,) = said["warnings"]
        assert "module='blocks'" in warning


@slow
def test_what_is_equal_by_chance_raises_no_alarm(two: Any) -> None:
    assert all(rank["constants"]["findings"] == [] for rank in two)


@slow
def test_a_forked_child_and_a_program_without_its_group_wait_for_nobody(two: Any) -> None:
    assert [rank["forked"] for rank in two] == [0, 0]
    alone = ["nothing compared: the group has one rank only", "nothing compared: this rank is not in the group"]
    assert [rank["late"][0] for rank in two] == alone
    assert all(rank["late"][1].startswith("1 step compared") for rank in two)


@slow
def test_ranks_at_different_steps_are_told(two: Any) -> None:
    message = "Replicas cannot compare ranks at different steps, got step 0 of rank 0, 1 of rank 1"
    assert all(rank["out of step"].startswith(message) for rank in two)


@slow
def test_groups_of_a_grid_are_found_and_a_rank_that_diverges_from_its_group_is_named(four: Any) -> None:
    for number, rank in enumerate(four):
        said = rank["grid"]["everywhere"]
        found = finding(said)
        assert (found.ranks, found.step, found.operand, found.weight) == (((1,), (3,)), 4, "rhs", True)
        assert said["expected"]["Linear aten::mm forward lhs"] == [[0, 1], [2, 3]]
        assert said["expected"]["Linear aten::mm forward rhs"] == [[0, 2], [1, 3]]
        of_data = rank["grid"]["of data"]["findings"]
        assert [each[0] for each in of_data] == ([] if number in (0, 2) else [[[1], [3]]])


@slow
def test_a_rank_that_raises_does_not_wait_for_the_others(tmp_path: Path) -> None:
    ranks = launch(tmp_path, 2, "failing")
    printed = [rank.stderr for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "KeyError: 'a broken batch'" in printed[1]
    assert "broken batch" not in printed[0]
    assert re.search("RuntimeError: .*(closed|reset|Timed out)", printed[0]), printed[0]
