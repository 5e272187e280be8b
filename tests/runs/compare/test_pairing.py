"""Which call of one run is compared with which call of another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from made_runs import ATTENTION, add_damaged, call, chain, peak_memory, values, write
from torch import nn

from opintercept import OpInterceptWarning, intercept, runs
from opintercept.runs.compare.difference import order


def test_models_with_equal_inner_names_are_never_paired_with_each_other(compare: Any) -> None:
    """This holds whichever model trains first, and however often."""

    def program(order: list[str], prime: str = "") -> list[dict[str, Any]]:
        return [
            call(
                f"{model}.main.{layer}", f"x{n}{model}{layer}{prime}", f"w{model}{layer}", f"y{n}{model}{layer}{prime}"
            )
            for n, model in enumerate(order)
            for layer in range(2)
        ]

    one, other = ["Generator", "Discriminator"] * 2, ["Discriminator", "Generator"] * 2
    for a, b in ((one, other), (other, one), (one, ["Discriminator"] * 3 + ["Generator"]), (one, one[:-1])):
        found = compare(program(a), program(b, "'"), limit=1000)
        assert found.pairs == 2 * sum(min(a.count(model), b.count(model)) for model in set(a))
        assert {(row.module, row.other) for row in found.modules} == {
            (f"{model}.main.{layer}",) * 2 for model in set(a) for layer in range(2)
        }
        assert all(pair.a.record.module == pair.b.record.module for pair in found.worst)


def gan(*order: str, prime: str = "", first: bool = True) -> list[dict[str, Any]]:
    """Models with equal inner names. The names of the one that runs first are plain, as a recorder writes them."""
    calls = []
    for n, model in enumerate(order):
        for layer in ("main.0", "main.2"):
            name = layer if first and model == order[0] else f"{model}.{layer}"
            calls.append(call(name, f"x{n}{model}{layer}{prime}", f"w{model}{layer}", f"y{n}{model}{layer}{prime}"))
    return calls


@pytest.mark.parametrize("third", [[], ["Encoder"]], ids=["two", "three"])
def test_a_model_that_runs_first_is_recognized_in_a_run_where_it_does_not(compare: Any, third: list[str]) -> None:
    one, other = ["Generator", "Discriminator", *third] * 2, ["Discriminator", "Generator", *third] * 2
    for a, b in ((one, other), (other, one), (one, one)):
        found = compare(gan(*a), gan(*b, prime="'"), limit=1000)
        assert (found.pairs, found.kinds) == (2 * len(a), {"changed operand": 1, "inherited": 2 * len(a) - 1})
        for pair in found.worst:
            assert pair.a.values["rhs"].hash == pair.b.values["rhs"].hash  # the weight is that of the same module
        assert compare(gan(*a), gan(*b)).unmatched_calls == (0, 0)


def test_submodules_are_not_taken_for_models(compare: Any) -> None:
    a = [call(name, f"x{name}", "w", f"y{name}") for name in ("proj", "encoder.proj")]
    b = [call(name, f"x{name}'", "w", f"y{name}'") for name in ("proj", "decoder.proj")]
    found = compare(a, b)
    assert [(row.module, row.other) for row in found.modules] == [("proj", "proj"), ("encoder.proj", "decoder.proj")]


def many(numbers: list[int]) -> list[dict[str, Any]]:
    """Calls of three modules, each with operands of its own."""
    return [call("abc"[n % 3], f"x{n}", f"w{n % 3}", f"y{n}", shape=[4 + n % 2, 4]) for n in numbers]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), count=st.integers(2, 24))
def test_inserted_missing_and_shuffled_calls_leave_the_others_paired(compare: Any, data: Any, count: int) -> None:
    """Calls with operands of their own are paired whatever happened around them."""
    numbers = list(range(count))
    a = data.draw(st.lists(st.sampled_from(numbers), min_size=1, unique=True).map(sorted))
    b = data.draw(st.permutations(data.draw(st.lists(st.sampled_from(numbers), min_size=1, unique=True))))
    common = set(a) & set(b)
    if not common:
        return
    found = compare(many(a), many(b))
    pairs = found.pairs - found.kinds.get("equal", 0)
    assert found.kinds.get("equal", 0) == len(common)
    # Calls without a counterpart stay alone, or are paired with one of the same module and shape.
    assert found.unmatched_calls == (len(a) - len(common) - pairs, len(b) - len(common) - pairs)
    assert found.equal is (set(a) == set(b))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_missing_and_new_modules_leave_the_others_paired(compare: Any, data: Any) -> None:
    """Every value differs, so that only names, shapes and order can tell."""
    layers = data.draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=20))
    gone, new = data.draw(st.sampled_from("abcde")), data.draw(st.booleans())
    kept = [layer for layer in layers if layer != gone]
    if not kept:
        return
    a = [call(layer, f"x{n}", f"w{layer}", f"y{n}") for n, layer in enumerate(layers)]
    b = [call(layer, f"x{n}'", f"w{layer}'", f"y{n}'") for n, layer in enumerate(kept)]
    if new:
        b.insert(len(b) // 2, call("new", "x", "w", "y", shape=[9, 4]))
    found = compare(a, b, limit=1000)
    assert found.pairs == len(kept)
    assert all(pair.a.record.module == pair.b.record.module for pair in found.worst)
    assert found.unmatched_calls == (layers.count(gone), int(new))
    assert {(row.run, row.module, row.calls) for row in found.unmatched} == {
        *([("a", gone, layers.count(gone))] if gone in layers else []),
        *([("b", "new", 1)] if new else []),
    }


def test_calls_without_a_counterpart_before_the_first_divergence_are_counted(compare: Any) -> None:
    a, b = chain("a", "b", "c"), chain("a", "b", "c", of="b")
    b.insert(0, call("new", "x", "w", "y", shape=[9, 4]))
    found = compare(a, b)
    assert (found.before, found.first.b.record.index) == ((0, 1), 2)


def test_steps_tell_apart_calls_of_the_same_shape(compare: Any) -> None:
    def steps(counts: list[int], prime: str) -> list[dict[str, Any]]:
        return [
            call("a", f"x{s}{n}{prime}", "w", f"y{s}{n}", step=s) for s, size in enumerate(counts) for n in range(size)
        ]

    found = compare(steps([2, 2, 2], ""), steps([2, 1, 2], "'"), limit=100)
    assert (
        sorted((pair.a.record.step, pair.b.record.step) for pair in found.worst)
        == [(0, 0)] * 2 + [(1, 1)] + [(2, 2)] * 2
    )


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."])
def test_modules_that_torch_wraps_keep_their_names(compare: Any, wrapper: str) -> None:
    found = compare(chain("a", "b"), [line | {"module": wrapper + line["module"]} for line in chain("a", "b")])
    assert (found.kinds, found.pairings) == ({"equal": 2}, {"ordinal": 2})


def test_another_operator_for_the_same_job_is_its_counterpart(compare: Any) -> None:
    found = compare(chain("a"), [line | {"op": "torch.nn.functional.linear"} for line in chain("a")])
    assert (found.kinds, found.pairings) == ({"equal": 1}, {"family": 1})
    # The other run adds the bias elsewhere, so the outputs cannot be compared: that is not a difference.
    fused = [call("a", "x0", "wa", "z", bias="b", op="aten::addmm")]
    found = compare(fused, chain("a"))
    assert (found.kinds, found.pairings) == ({"not compared": 1}, {"family": 1})


def test_another_kernel_for_the_same_call_is_its_counterpart(compare: Any) -> None:
    def on(device: str, op: str, *more: Any) -> list[dict[str, Any]]:
        lines = [*chain("a"), call("attn", "q", "k", "y", op=op)]
        for line in lines:
            for role in ("lhs", "rhs", "output"):
                line[role]["device"] = device
        lines[1]["output"] = [lines[1]["output"], *more]
        return lines

    seed = {"shape": [2], "dtype": "int64", "device": "cuda:0", "stride": None, "requires_grad": False}
    cuda = on("cuda:0", "aten::_scaled_dot_product_efficient_attention", seed | {"dtype": "float32"}, seed, seed)
    found = compare(on("cpu", ATTENTION, seed | {"dtype": "float32"}), cuda)
    assert (found.kinds, found.pairings) == ({"equal": 2}, {"ordinal": 1, "family": 1})


def test_a_compiled_model_has_the_calls_of_its_modules(compare: Any) -> None:
    compiled = [line | {"module": ""} for line in chain("a", "b", "c", of="b")]
    found = compare(chain("a", "b", "c"), compiled)
    assert found.pairings == {"shape": 3}
    assert [(row.module, row.other) for row in found.modules] == [("b", ""), ("c", "")]
    back = compare(compiled, chain("a", "b", "c"))
    assert [(row.module, row.other) for row in back.modules] == [("", "b"), ("", "c")]


def test_passes_of_a_compiled_model_are_paired_in_their_order(compare: Any) -> None:
    def passes(prime: str, modules: list[str]) -> list[dict[str, Any]]:
        names = [(step, w, module) for step in range(3) for w, module in zip("ab", modules, strict=True)]
        return [call(module, f"x{step}{w}{prime}", w, f"y{step}{w}{prime}", step=step) for step, w, module in names]

    # One pass less, so that the lists have different lengths.
    found = compare(passes("", ["a", "b"]), passes("'", ["", ""])[:4])
    assert sorted((pair.a.record.index, pair.b.record.index) for pair in found.worst) == [(n, n) for n in range(4)]


def test_a_module_that_both_runs_have_is_not_taken_for_another(compare: Any) -> None:
    a = [*chain("a", "b"), call("a", "x", "w", "y")]
    b = [*chain("a", "b"), call("b", "x", "w", "y")]
    found = compare(a, b)
    assert (found.pairs, found.unmatched_calls) == (2, (1, 1))


@pytest.mark.slow
def test_difflib_gets_no_more_than_it_can_do_in_seconds(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares every call with every other call that looks alike."""
    given: list[int] = []

    def matcher(_: None, a: list[int], b: list[int], autojunk: bool) -> Any:
        given.append(sum(b.count(sign) for sign in a))
        return SequenceMatcher(None, a, b, autojunk=autojunk)

    monkeypatch.setattr("opintercept.runs.compare.pairs.SequenceMatcher", matcher)
    random = Random(0)
    for calls, told in ((200, True), (1500, False)):
        a, b = ([call("a", f"{p}{n}", "w", "y", shape=[random.choice((4, 5)), 4]) for n in range(calls)] for p in "xy")
        given.clear()
        assert compare(a, b).pairs > calls * 0.95
        assert bool(given) is told
        assert sum(given) < 250_000


def test_a_warning_counts_the_calls_that_were_skipped(tmp_path: Path) -> None:
    a = write(tmp_path / "a", chain("a"))
    add_damaged(tmp_path / "a")
    with pytest.warns(OpInterceptWarning, match=r"skipped 1 damaged call"):
        assert runs.diff(a, write(tmp_path / "b", chain("a"))).equal


def few_together(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Read a few calls together, and keep what takes memory elsewhere."""
    for name in ("CHUNK", "_CHECKED"):
        monkeypatch.setattr(f"opintercept.runs.store.columns.{name}", calls)
    monkeypatch.setattr("opintercept.runs.compare.pairs._WAITING", 2 * calls)
    monkeypatch.setattr("opintercept.runs.compare.pairs._MOST_CHANGED", 40)


@pytest.mark.parametrize("change", ["none", "all", "left out", "added", "moved", "shuffled", "cut", "other modules"])
def test_pairs_are_the_same_however_few_calls_are_read_together(
    compare: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    random = Random(0)
    modules = [random.choice("abcdef") for _ in range(60)]
    a = [call(each, f"x{n}", f"w{each}", f"y{n}", step=n // 6, elapsed=0.5) for n, each in enumerate(modules)]
    b = [each | {"module": f"m{each['module']}"} if change == "other modules" else dict(each) for each in a]
    if change == "all":
        b = [call(each, f"x{n}'", f"w{each}", f"y{n}'", step=n // 6, elapsed=0.5) for n, each in enumerate(modules)]
    elif change in ("left out", "moved"):
        taken = b.pop(20)
        b[50:50] = [taken] if change == "moved" else []
    elif change == "added":
        b.insert(20, call("c", "new", "wc", "new", elapsed=0.5))
    elif change == "shuffled":
        random.shuffle(b)
    elif change == "cut":
        del b[40:]
    together = compare(a, b).as_dict()
    few_together(monkeypatch, 4)
    parts = compare(a, b).as_dict()
    for found in (together, parts):
        found["a"] = found["b"] = None  # their folders differ
    assert parts == together


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["", "'"])
def test_more_calls_take_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    few_together(monkeypatch, 100)

    def peak(calls: int) -> int:
        for folder, suffix in (("a", ""), ("b", mark)):
            made = [call("m", f"x{n}{suffix}", "w", f"y{n}{suffix}") for n in range(calls)]
            write(tmp_path / f"{calls}{folder}", made)
        a, b = (runs.open_run(tmp_path / f"{calls}{folder}") for folder in "ab")
        return peak_memory(lambda: runs.diff(a, b, limit=10))

    peak(300)  # caches
    assert peak(3000) < 1.2 * peak(1000)


def recorded(path: Path, program: Callable[..., object], ops: Any = "all", *, steps: bool = False) -> runs.Run:
    torch.manual_seed(0)
    with intercept(runs.RunRecorder(path), ops=ops) as watching:
        program(*[watching.step] if steps else [])
    return runs.open_run(path)


def test_calls_of_other_shapes_are_no_pair_without_a_module(tmp_path: Path) -> None:
    def program(sizes: list[int]) -> Callable[[], object]:
        return lambda: [torch.ones(4, size).copy_(torch.zeros(size)) for size in sizes]

    a, b = (recorded(tmp_path / name, program(sizes)) for name, sizes in (("a", [5, 6, 7]), ("b", [5, 8, 7])))
    found = runs.diff(a, b)
    assert [(row.op, row.calls) for row in found.unmatched if row.run == "a"] == [
        ("aten::fill_", 1),
        ("aten::zero_", 1),
        ("aten::copy_", 1),
    ]
    assert (found.first, found.metadata) == (None, 0)


def test_another_number_of_rows_makes_no_other_call(tmp_path: Path) -> None:
    weight = torch.randn(5, 4)

    def program(rows: int, size: int) -> Callable[[], object]:
        return lambda: nn.Linear(5, size)((torch.ones(rows, 5) @ weight @ weight.t()).exp())

    one, more, wider = (
        recorded(tmp_path / f"{n}", program(*sizes)) for n, sizes in enumerate([(3, 4), (4, 4), (3, 6)])
    )
    assert runs.diff(one, more).unmatched_calls == (0, 0)
    found = runs.diff(one, wider, select=lambda record: record.module == "Linear")
    assert (found.unmatched_calls, found.metadata) == ((0, 0), 2)  # their module has one name


def test_a_number_among_the_arguments_tells_calls_apart(tmp_path: Path) -> None:
    def program(clip: bool) -> Callable[[], object]:
        def run() -> None:
            net = nn.Linear(8, 5)
            optimizer = torch.optim.Adam(net.parameters(), foreach=False)
            net(torch.randn(6, 8)).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            optimizer.step()
            net(torch.ones(6, 8))

        return run

    a, b = (recorded(tmp_path / name, program(name == "a")) for name in "ab")
    found: Any = runs.diff(a, b)
    assert "changed argument" not in found.kinds
    assert found.unmatched_calls == (8, 0)
    assert [row.op for row in found.unmatched][:4] == [
        "aten::_foreach_norm",
        "aten::stack",
        "aten::linalg_vector_norm",
        "aten::add",
    ]


@pytest.mark.parametrize("forget", [False, True])
def test_a_resumed_run_is_paired_by_its_steps(tmp_path: Path, forget: bool) -> None:
    saved: list[Any] = []

    def program(first: int) -> Callable[..., object]:
        def run(end_step: Callable[[], None]) -> None:
            net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            batches = torch.randn(6, 16, 8, generator=torch.Generator().manual_seed(1))
            if first:
                net.load_state_dict(saved[0])
                if not forget:
                    optimizer.load_state_dict(copy.deepcopy(saved[1]))
            for step in range(first, 6):
                if step == 3 and not first:
                    saved.extend(copy.deepcopy([net.state_dict(), optimizer.state_dict()]))
                optimizer.zero_grad()
                net(batches[step]).square().mean().backward()
                optimizer.step()
                end_step()

        return run

    for ops in ("matmul", "all"):
        a, b = (recorded(tmp_path / f"{ops}{first}", program(first), ops, steps=True) for first in (0, 3))
        found: Any = runs.diff(a, b, limit=1000)
        assert {row.a.record.step - row.b.record.step for row in found.worst} <= {3}
        products = runs.diff(a, b, select=lambda record: record.gemm is not None)
        assert (products.pairs, products.unmatched_calls) == (15, (15, 0))
        if forget:
            assert found.first.a.record.step == (4 if ops == "matmul" else 3)
        else:
            assert (found.first, products.kinds) == (None, {"equal": 15})
    saved.clear()


def test_gradients_without_a_name_are_paired_by_their_weights(compare: Any) -> None:
    """A compiled backward pass does not say whose gradients it computes, and computes them in another order."""

    def step(number: int, prime: str, named: bool) -> list[dict[str, Any]]:
        def gradient(of: str, other: str) -> dict[str, Any]:
            name = of if named else None
            return call("a", f"g{number}{prime}", other, f"{of}{number}", phase="backward", grad_of=name, step=number)

        both = [gradient("lhs", "w"), gradient("rhs", f"x{number}")]
        return both if named else both[::-1]

    a, b = ([each for n in range(3) for each in step(n, mark, not mark)] for mark in ("", "'"))
    found = compare(a, b, limit=100)
    assert found.pairings == {"family": 6}
    assert all(row.changed == ("lhs",) or row.kind == "inherited" for row in found.worst)
    assert {role.role for row in found.worst for role in row.roles if role.equal is False} == {"lhs"}


def test_gradients_that_round_are_paired_by_their_size(compare: Any) -> None:
    def rounded(kept: dict[str, Any]) -> dict[str, Any]:
        return kept | {"hash": f"{int(kept['hash'], 16) ^ 1:016x}", "max": kept["max"] * (1 + 1e-7)}

    a = [call("a", "g", other, f"y{other}", phase="backward", grad_of=of) for of, other in (("lhs", "w"), ("rhs", "x"))]
    b = [call("a", rounded(values("g")), rounded(values(other)), f"y{other}", phase="backward") for other in "xw"]
    found = compare(a, b)
    assert {role.role for row in found.worst for role in row.roles if order(role.relative) > 1e-3} == set()
    assert found.pairings == {"family": 2}
