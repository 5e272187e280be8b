"""A program is replayed on another's values: what lies between two joined products is accused, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import intercept, runs
from opintercept.runs.align.alignment import Alignment

pytestmark = pytest.mark.usefixtures("one_thread")


def record(folder: Path, program: Callable[[], object], ops: Any) -> runs.Run:
    torch.manual_seed(1)  # of dropout
    with torch.no_grad(), intercept(runs.RunRecorder(folder, tensors="full"), ops=ops):
        program()
    return runs.open_run(folder)


def aligned(folder: Path, one: Callable[[], object], other: Callable[[], object]) -> Alignment:
    return runs.align(record(folder / "a", one, "all"), record(folder / "b", other, "matmul"))


def causes(found: Alignment) -> list[str | None]:
    return [pair.a.record.module for pair in found.pairs if pair.kind.startswith("changed")]


class Layers(nn.Module):
    """Layers with a residual stream or without, and a function after each."""

    def __init__(self, *, residual: bool = False, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(count))
        self.residual = residual

    def forward(self, x: Tensor, *functions: Callable[[Tensor], Tensor]) -> Tensor:
        for number, layer in enumerate(self.layers):
            function = functions[number] if number < len(functions) else F.silu
            y = function(layer(x))
            x = x + y if self.residual else y
        return x


X = torch.randn(12, 32, generator=torch.Generator().manual_seed(3))


def test_each_of_two_changes_is_named_at_the_next_product(tmp_path: Path) -> None:
    model = Layers()
    found = aligned(tmp_path, lambda: model(X), lambda: model(X, F.gelu, F.silu, lambda y: 1.1 * F.silu(y)))
    assert causes(found) == ["layers.1", "layers.3"]
    assert [pair.kind for pair in found.pairs][2] == "inherited"
    assert found.first is not None
    assert found.first.after == "layers.0"
    assert found.first.between == ("silu",)
    assert found.first.lines[0].startswith("test_replay.py:")
    assert "B computes the same if gelu takes the place of silu (test_replay.py:" in str(found)
    assert not found.equal


def test_what_a_residual_stream_carries_on_is_named_once(tmp_path: Path) -> None:
    model = Layers(residual=True)
    assert causes(aligned(tmp_path, lambda: model(X), lambda: model(X, lambda y: 1.01 * F.silu(y)))) == ["layers.1"]


def test_another_input_that_the_residual_stream_carries_on_is_named_once(tmp_path: Path) -> None:
    model = Layers(residual=True)
    assert causes(aligned(tmp_path, lambda: model(X), lambda: model(X + (X > 1)))) == ["layers.0"]


def test_a_difference_that_is_smaller_than_ten_roundings_is_named(tmp_path: Path) -> None:
    model, low = Layers(count=6), Layers(count=6).bfloat16()
    assert aligned(tmp_path / "same", lambda: model(X), lambda: low(X.bfloat16())).equal
    functions: list[Callable[[Tensor], Tensor]] = [F.silu, F.silu, F.silu, lambda y: 1.03 * F.silu(y)]
    found = aligned(tmp_path / "other", lambda: model(X), lambda: low(X.bfloat16(), *functions))
    assert causes(found) == ["layers.4"]
    assert found.first is not None
    assert found.first.lhs is not None
    assert found.first.lhs < 5 * 2**-7  # ten roundings of bfloat16, at which products without a program are judged


def test_writes_in_place_and_views_are_followed(tmp_path: Path) -> None:
    model = Layers()

    def in_place(y: Tensor) -> Tensor:
        z = torch.zeros_like(y)
        z[:, ::2] = y[:, 1::2]
        z[:, 1::2].add_(y[:, ::2]).mul_(2)
        return z.t().contiguous().t()

    def apart(y: Tensor) -> Tensor:
        return torch.stack((y[:, 1::2], 2 * y[:, ::2]), -1).flatten(1)

    assert aligned(tmp_path / "same", lambda: model(X, in_place), lambda: model(X, apart)).equal
    found = aligned(tmp_path / "other", lambda: model(X, in_place), lambda: model(X, lambda y: apart(y) * 1.001))
    assert causes(found) == ["layers.1"]


def test_whole_numbers_that_a_difference_changes_accuse_nothing_after_it(tmp_path: Path) -> None:
    model = Layers()

    def chosen(y: Tensor) -> Tensor:
        return y.gather(1, y.argsort(1))

    found = aligned(tmp_path, lambda: model(X, F.silu, chosen), lambda: model(X, lambda y: F.silu(y.flip(1)), chosen))
    assert causes(found) == ["layers.1"]


def test_rows_that_nobody_can_tell_apart_accuse_nothing_after_them(tmp_path: Path) -> None:
    model, other = Layers(), Layers()
    other.layers[1].weight.data = torch.randn(32, 32, generator=torch.Generator().manual_seed(9))
    assert causes(aligned(tmp_path, lambda: model(X), lambda: other(X))) == ["layers.1"]


def test_random_numbers_are_as_recorded(tmp_path: Path) -> None:
    model = Layers()
    found = aligned(tmp_path, lambda: model(X, F.dropout), lambda: model(X, F.dropout))
    assert found.equal


def test_a_weight_that_the_program_draws_with_a_generator_is_as_recorded(tmp_path: Path) -> None:
    def program() -> None:
        generator = torch.Generator().manual_seed(1)
        weight, other = torch.randn(8, 8, generator=generator), torch.empty(8, 8).normal_(generator=generator)
        F.linear(F.gelu(F.linear(torch.ones(3, 8), weight)), other.softmax(-1))

    found = aligned(tmp_path, program, program)
    assert (found.equal, len(found.pairs), found.notes) == (True, 2, ())


def test_products_without_numbers_are_nothing_to_compare(tmp_path: Path) -> None:
    def program() -> None:
        model(X)
        torch.mm(torch.empty(3, 0), torch.empty(0, 4))
        F.linear(torch.empty(0, 32), torch.ones(3, 32))
        F.scaled_dot_product_attention(torch.ones(1, 1, 2, 4), torch.empty(1, 1, 0, 4), torch.empty(1, 1, 0, 4))

    model = Layers()
    found = aligned(tmp_path, program, program)
    assert (found.equal, found.calls) == (True, (len(found.pairs),) * 2)


def test_an_operator_that_may_not_run_again_is_named(tmp_path: Path) -> None:
    model = Layers()
    found = aligned(tmp_path, lambda: model(X, torch.special.i1), lambda: model(X, torch.special.modified_bessel_i1))
    assert found.notes == ()
    swapped = aligned(
        tmp_path / "b", lambda: model(X, torch.special.modified_bessel_i1), lambda: model(X, torch.special.i1)
    )
    note = "not on the list of operators that may run again, so not computed: special_modified_bessel_i1"
    assert swapped.notes == (note,)
    assert str(swapped).endswith(f"\n{note}")


def test_a_call_that_is_not_joined_counts_after_the_last_joined_one(tmp_path: Path) -> None:
    model, more = Layers(), nn.Linear(32, 7)
    before = aligned(tmp_path / "before", lambda: (more(X), model(X)), lambda: model(X))
    after = aligned(tmp_path / "after", lambda: more(model(X)), lambda: model(X))
    assert (before.equal, after.equal) == (True, False)
    assert len(before.apart) == len(after.apart) == 1
