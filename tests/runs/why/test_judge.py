"""Judgement by outcome: what differs and stays so is accused, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import OpCall, OpInterceptError, intercept, runs
from opintercept.runs.why.noise import LIMIT, Spread

Program = Callable[[], Any]


def why(folder: Path, a: Program, b: Program, *, trains: bool = False, ops: str = "all") -> runs.Answer:
    """Judge two programs; `ops` is what is recorded of the second one."""
    recorded = []
    for name, program, seen in (("a", a, "all"), ("b", b, ops)):
        torch.manual_seed(0)
        recorder = runs.RunRecorder(folder / name, tensors="full")
        with torch.set_grad_enabled(trains), intercept(recorder, ops=seen):
            program()
        recorded.append(runs.open_run(folder / name))
    return runs.why(*recorded)


def layers(seed: int = 0, width: int = 16) -> tuple[nn.Linear, nn.Linear, Tensor]:
    torch.manual_seed(seed)
    return nn.Linear(width, width), nn.Linear(width, 4), torch.randn(6, width)


def test_the_same_program_twice_is_equal(tmp_path: Path) -> None:
    one, two, x = layers()
    found = why(tmp_path, lambda: two(one(x).relu()), lambda: two(one(x).relu()))
    assert (found.verdict, found.causes, found.equal) == ("equal", (), True)


def test_numbers_of_the_same_program_are_not_written_otherwise(tmp_path: Path) -> None:
    one, two, x = layers()

    def program() -> None:
        hidden = one(x)
        for _ in range(3):
            hidden = hidden + torch.maximum(torch.tensor(1.0), hidden.square().mean().sqrt()) * hidden
        two(hidden)

    found = why(tmp_path, program, program)
    assert (found.verdict, found.rewritten) == ("equal", ())


def test_a_number_of_a_call_is_named_with_its_share_of_the_loss(tmp_path: Path) -> None:
    one, two, x = layers()

    def program(slope: float) -> Program:
        return lambda: F.leaky_relu(one(x), slope).mul(two.weight[0]).square().mean().backward()

    found = why(tmp_path, program(0.01), program(0.2), trains=True)
    (cause,) = found.causes
    assert (cause.kind, cause.what) == ("argument", "uses negative_slope=0.2 where A uses 0.01")
    assert cause.share == pytest.approx(1, abs=1e-4)  # the losses are of float32
    assert not found.equal


def test_a_rewriting_that_is_gone_at_the_next_joint_accuses_nobody(tmp_path: Path) -> None:
    one, two, x = layers()
    scaled = nn.Linear(16, 16)
    scaled.weight.data, scaled.bias.data = one.weight.data * 3, one.bias.data * 3
    found = why(tmp_path, lambda: two(one(x).tanh()), lambda: two((scaled(x) / 3).tanh()))
    assert (found.verdict, found.causes) == ("rounding", ())


def test_weights_in_another_dtype_accuse_nobody(tmp_path: Path) -> None:
    one, two, x = layers()
    low = [nn.Linear(16, 16).bfloat16(), nn.Linear(16, 4).bfloat16()]
    for layer, own in zip(low, (one, two), strict=True):
        layer.load_state_dict(own.state_dict())
    found = why(tmp_path, lambda: two(one(x).relu()), lambda: low[1](low[0](x.bfloat16()).relu()))
    assert (found.verdict, found.causes) == ("rounding", ())


def test_weights_of_fewer_bits_are_told_once(tmp_path: Path) -> None:
    one, two, x = layers()
    coarse = [nn.Linear(16, 16), nn.Linear(16, 4)]
    for layer, own in zip(coarse, (one, two), strict=True):
        scale = own.weight.data.abs().amax(1, keepdim=True) / 127
        layer.weight.data, layer.bias.data = (own.weight.data / scale).round() * scale, own.bias.data
    found = why(tmp_path, lambda: two(one(x).relu()), lambda: coarse[1](coarse[0](x).relu()))
    assert (found.verdict, found.causes, len(found.coarser)) == ("coarser", (), 1)
    assert "int8" in found.coarser[0].what


def on_a_grid(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-9) / 127
    return (weight / scale).round() * scale


@pytest.mark.parametrize("operator", ["experts", "as_strided", "of a mean"])
def test_operators_that_are_not_computed_in_float64_accuse_nobody(operator: str, tmp_path: Path) -> None:
    one, two, x = layers()
    experts, ends = torch.randn(2, 16, 16), torch.tensor([2, 6], dtype=torch.int32)

    def between(y: Tensor) -> Tensor:
        if operator == "experts":
            return torch._grouped_mm(y, experts, offs=ends)
        y = y.expand(2, 6, 16).mean(1, keepdim=True) if operator == "of a mean" else y.expand(2, 6, 16)
        return F.adaptive_avg_pool1d(y.mT, 1).flatten(1)  # as_strided_, which lays out its mean anew

    def program(coarse: bool) -> Program:
        weights = [on_a_grid(each.weight.data) if coarse else each.weight.data for each in (one, two)]
        return lambda: F.linear(between(F.linear(x, weights[0]).relu()), weights[1])

    found = why(tmp_path, program(False), program(True))
    assert (found.verdict, found.causes) == ("coarser", ())


def test_a_row_that_is_zero_in_both_tables_is_on_each_grid(tmp_path: Path) -> None:
    table, (one, two, _) = torch.randn(20, 16), layers()
    table[0] = 0

    def program(coarse: bool) -> Program:
        weights = [on_a_grid(each) if coarse else each for each in (table, one.weight.data, two.weight.data)]
        return lambda: F.linear(F.linear(F.embedding(torch.arange(12), weights[0]), weights[1]).relu(), weights[2])

    found = why(tmp_path, program(False), program(True))
    assert (found.verdict, found.causes) == ("coarser", ())


def routed(router: torch.dtype, experts: torch.dtype) -> Program:
    torch.manual_seed(0)
    gate, head, x = torch.randn(8, 16) / 8, torch.randn(4, 16), torch.randn(200, 16)
    weights = torch.randn(8, 16, 16) / 4

    def program() -> None:
        x_, gate_, head_, weights_ = (each.bfloat16().to(experts) for each in (x, gate, head, weights))
        scores = F.linear(x_.to(router), gate_.to(router)).softmax(-1)
        shares, chosen = scores.topk(2)
        y = torch.zeros_like(x_)
        for number, weight in enumerate(weights_):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            y[token] += shares[token, slot, None].to(experts) * F.linear(x_[token], weight)
        F.linear(y, head_)

    return program


def test_choices_that_a_router_in_another_dtype_turns_are_its_own(tmp_path: Path) -> None:
    low = torch.bfloat16
    found = why(tmp_path, routed(torch.float32, low), routed(low, low))
    (cause,) = found.causes
    assert cause.kind == "dtype"
    assert "computes _softmax in bfloat16 where A computes it in float32, which turns" in cause.what


def split(dtype: torch.dtype) -> Program:
    """A mixture whose tokens are sorted by their experts, and split where these begin."""
    torch.manual_seed(0)
    gate, head, x = torch.randn(4, 16) / 64, torch.randn(4, 16), torch.randn(200, 16)
    weights = torch.randn(4, 16, 16) / 4

    def program() -> None:
        x_, gate_, head_, weights_ = (each.to(dtype) for each in (x, gate, head, weights))
        share, chosen = F.linear(x_, gate_).softmax(-1).max(-1)
        order = chosen.argsort()
        counts = F.one_hot(chosen, 4).sum(0).tolist()
        parts = zip(x_[order].split(counts), weights_, strict=True)
        y = torch.cat([F.linear(part, weight).relu() for part, weight in parts])
        F.linear(x_ + torch.zeros_like(x_).index_add(0, order, y * share[order, None]), head_)

    return program


LOW, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("a", "b"),
    [(routed(FULL, FULL), routed(LOW, LOW)), (split(FULL), split(LOW)), (split(LOW), split(FULL))],
    ids=["loop", "split", "split in full"],
)
def test_choices_that_rounding_turns_accuse_nobody(a: Program, b: Program, tmp_path: Path) -> None:
    found = why(tmp_path, a, b)
    assert found.causes == ()
    assert any("rounding turns" in note for note in found.notes)


def layered(dtype: torch.dtype) -> Program:
    """Mixtures whose tokens go to one expert each, which adds its part to those that have theirs already."""
    torch.manual_seed(0)
    x, gate, experts = torch.randn(24, 16), torch.randn(3, 4, 16), torch.randn(3, 4, 16, 16)
    gate[1, 1], gate[1, 1, 0] = gate[1, 0], gate[1, 0, 0] * 1.001  # which rounding turns

    def program() -> Any:
        h, *weights = (each.to(dtype) for each in (x, gate, experts))
        for own, mixture in zip(*weights, strict=True):
            h = F.layer_norm(h, (16,))
            chosen, y = F.linear(h, own).argmax(-1), torch.zeros_like(h)
            for number, expert in enumerate(mixture):
                token = (chosen == number).nonzero()[:, 0]
                y.index_add_(0, token, F.linear(h[token], expert))
            h = h + y
        return F.linear(F.layer_norm(h, (16,)), experts[0, 0].to(dtype))

    return program


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_token_of_another_expert_is_not_taken_for_other_tokens(dtype: torch.dtype, tmp_path: Path) -> None:
    found = why(tmp_path, layered(torch.float32), layered(dtype))
    assert found.verdict in ("rounding", "coarser")
    assert any("rounding turns" in note for note in found.notes)


@pytest.mark.parametrize(("kept", "part"), [([0], "1 of 4"), ([0, 2], "2 of 4"), ([2, 3], "1 of 2")])
@pytest.mark.parametrize("first", [True, False])
def test_a_few_samples_of_a_batch_are_judged_without_the_others(
    kept: list[int], part: str, first: bool, tmp_path: Path
) -> None:
    one, two, x = nn.Linear(16, 16), nn.Linear(16, 4), torch.randn(4, 6, 16)

    def program(x: Tensor, slope: float) -> Program:
        def run() -> None:
            y = F.leaky_relu(one(x if first else x.transpose(0, 1).contiguous()), slope)
            _ = two(y.softmax(-1)) * 2

        return run

    found = why(tmp_path / "clean", program(x, 0.1), program(x[kept], 0.1))
    assert (found.verdict, found.causes) == ("rounding", ())
    assert f"B computes {part} parts of A's batch, and no other" in found.notes
    found = why(tmp_path / "wrong", program(x, 0.1), program(x[kept], 0.2))
    assert [cause.what for cause in found.causes] == ["uses negative_slope=0.2 where A uses 0.1"]


def test_a_part_that_a_batch_copies_is_not_taken_for_the_whole_of_a_sample(tmp_path: Path) -> None:
    one, two, x = nn.Linear(16, 16), nn.Linear(16, 16), torch.randn(2, 2, 6, 16)

    def program(x: Tensor) -> Program:
        return lambda: two(one(x).tanh())[:, 0].contiguous()  # copies nothing of a single sample

    assert why(tmp_path, program(x[:1]), program(x)).causes == ()


def test_a_result_is_not_compared_with_that_of_another_step(tmp_path: Path) -> None:
    one, two, x = nn.Linear(16, 16), nn.Linear(16, 16), torch.randn(5, 16)

    def pooled(*parts: slice) -> Program:
        return lambda: [two(one(x[part]).tanh()[:1]).tanh() for part in parts]

    found = why(tmp_path, pooled(slice(0, 4), slice(4, 5)), pooled(slice(0, 5)))
    assert found.causes == ()
    assert any("results of A without a counterpart" in note for note in found.notes)


def test_a_mean_of_a_batch_is_not_compared_with_that_of_a_sample(tmp_path: Path) -> None:
    one, two, x = layers()

    def program(x: Tensor) -> Program:
        def run() -> None:
            y = two(one(x).tanh())
            _ = y.square().mean() * torch.ones(len(x)) + 1

        return run

    found = why(tmp_path, program(x), program(x[:1]))
    assert found.causes == ()
    assert any("results of A without a counterpart" in note for note in found.notes)


def test_complex_numbers_are_computed_from_the_values_of_the_other_run(tmp_path: Path) -> None:
    one, two, x = layers()
    turns = torch.polar(torch.ones(8), torch.arange(8.0))

    def program(slope: float) -> Program:
        def run() -> None:
            y = torch.view_as_complex(F.leaky_relu(one(x), slope).unflatten(-1, (8, 2))) * turns
            two(torch.view_as_real(y).flatten(-2).tanh())

        return run

    found = why(tmp_path, program(0.1), program(0.2))
    assert [cause.what for cause in found.causes] == ["uses negative_slope=0.2 where A uses 0.1"]


def test_groups_of_columns_in_another_order_may_have_few_bits(tmp_path: Path) -> None:
    one, two, x = layers(width=32)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    groups = one.weight.data[:, order].view(32, 4, 8)
    step = groups.abs().amax(-1, keepdim=True) / 7
    weight = ((groups / step).round() * step).view(32, 32)
    found = why(tmp_path, lambda: two(one(x).tanh()), lambda: two(F.linear(x[:, order], weight, one.bias).tanh()))
    assert (found.verdict, found.causes) == ("coarser", ())


class WrongProduct:
    """A kernel that computes the second of all products wrongly."""

    def __init__(self) -> None:
        self.count = 0

    def post(self, call: OpCall) -> None:
        self.count += "mm" in call.op
        if "mm" in call.op and self.count == 2:
            call.output[2] *= 1.1


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_a_kernel_that_computes_wrongly_is_told_in_either_program(wrong: str, tmp_path: Path) -> None:
    one, two, x = layers()
    for name in ("a", "b"):
        hooks = [WrongProduct()] if name == wrong else []
        with torch.no_grad(), intercept([*hooks, runs.RunRecorder(tmp_path / name, tensors="full")], ops="all"):
            _ = two(one(x).relu()).tanh() @ two.weight
    (cause,) = runs.why(*(runs.open_run(tmp_path / name) for name in ("a", "b"))).causes
    assert cause.kind == "result"
    assert cause.what.startswith("makes what the operands of A's" if wrong == "a" else "makes another result than")


def test_a_row_of_a_weight_is_named(tmp_path: Path) -> None:
    one, two, x = layers()
    other = nn.Linear(16, 16)
    other.load_state_dict(one.state_dict())
    other.weight.data[3] *= 1.5
    found = why(tmp_path, lambda: two(one(x).relu()), lambda: two(other(x).relu()))
    (cause,) = found.causes
    assert cause.kind == "weight"
    assert "row 3 of 16" in cause.what


def test_a_loss_that_agrees_by_chance_does_not_hide_logits(tmp_path: Path) -> None:
    one, two, x = layers()
    found = why(tmp_path, lambda: two(one(x).relu()).sum(), lambda: two(one(x).relu()).flip(0).sum())
    assert found.equal  # the order of what is added up does not count
    other = nn.Linear(16, 4)
    other.load_state_dict(two.state_dict())
    other.bias.data += torch.tensor([1.0, -1.0, 0.0, 0.0])
    found = why(tmp_path / "bias", lambda: two(one(x)).sum(), lambda: other(one(x)).sum())
    assert [cause.kind for cause in found.causes] == ["weight"]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_result_that_is_filled_part_by_part_is_compared(factor: float, turned: bool, tmp_path: Path) -> None:
    one, _, x = layers()

    def filled() -> None:
        made = torch.empty(6, 16)
        for token, row in zip(x, made, strict=True):
            row.copy_((one.weight @ token).tanh() * factor)

    programs: list[Program] = [lambda: (x @ one.weight.T).tanh(), filled]
    found = why(tmp_path, *(programs[::-1] if turned else programs))
    assert (found.equal, bool(found.causes)) == (factor == 1, factor != 1)


def test_the_last_state_of_a_loop_that_has_another_form_accuses_nobody(tmp_path: Path) -> None:
    one, two, x = layers()

    def program(form: float) -> Program:
        def loop() -> Any:
            state, made = torch.zeros(16), []
            for token in one(x):
                made.append((state * (2 / form)).sin())
                state = state * 0.5 + token * form
            return two(torch.stack(made))

        return loop

    found = why(tmp_path, program(1), program(3))
    assert (found.verdict, found.causes) == ("rounding", ())
    assert any("the last step of a loop" in note and "add" in note for note in found.notes)
    assert why(tmp_path / "others", program(1), lambda: program(3)().tanh()).causes


def test_numbers_that_are_not_finite_in_one_program_are_accused(tmp_path: Path) -> None:
    weight, broken = torch.ones(16, 4), torch.ones(16, 4)
    broken[2, 1] = torch.nan
    found = why(tmp_path, lambda: torch.ones(6, 16) @ weight, lambda: torch.ones(6, 16) @ broken)
    assert found.verdict == "difference"


def test_a_result_without_a_counterpart_is_not_called_equal(tmp_path: Path) -> None:
    one, two, x = layers()
    found = why(tmp_path, lambda: two(one(x)).tanh(), lambda: one(x))
    assert not found.equal


def test_a_step_of_training_that_leaves_out_its_clipping_is_told(tmp_path: Path) -> None:
    def program(clips: bool) -> Program:
        def run() -> None:
            one, _, x = layers()
            optimizer = torch.optim.SGD(one.parameters(), 0.1)
            for _ in range(2):
                one(x).square().mean().backward()
                if clips:
                    nn.utils.clip_grad_norm_(one.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()

        return run

    found = why(tmp_path, program(True), program(False), trains=True)
    assert found.verdict == "difference"
    assert why(tmp_path / "same", program(True), program(True), trains=True).verdict == "equal"


def test_what_a_clipping_of_all_gradients_writes_is_computed_from_those_of_the_other_run(tmp_path: Path) -> None:
    def program(most: float) -> Program:
        def run() -> None:
            one, two, x = layers()
            weights = [*one.parameters(), *two.parameters()]
            optimizer = torch.optim.SGD(weights, 0.1)
            for _ in range(3):
                two(one(x).tanh()).square().mean().backward()
                nn.utils.clip_grad_norm_(weights, most, foreach=True)
                optimizer.step()
                optimizer.zero_grad()

        return run

    found = why(tmp_path, program(0.1), program(0.05), trains=True)
    assert not [note for note in found.notes if "not on the list" in note or "cannot be computed" in note]
    (cause,) = found.causes
    assert cause.what == "multiplies what reciprocal makes by 0.5" or "0.05" in cause.what, found
    assert why(tmp_path / "products", program(0.1), program(0.05), trains=True, ops="matmul").causes


@pytest.mark.parametrize("ops", ["all", "matmul"])
@pytest.mark.parametrize("steps", ["equal", "another rate"])
def test_a_loss_that_is_divided_and_whose_gradients_are_not_accuses_nobody(
    steps: str, ops: str, tmp_path: Path
) -> None:
    def program(in_parts: bool, rate: float = 0.1) -> Program:
        def run() -> None:
            one, two, x = layers()
            optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], rate, momentum=0.9)
            for _ in range(2):
                for part in x.chunk(2):
                    loss = two(one(part).tanh()).square().mean()
                    (loss / 2 if in_parts else loss).backward()
                if not in_parts:
                    for parameter in (*one.parameters(), *two.parameters()):
                        assert parameter.grad is not None
                        parameter.grad.mul_(0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

        return run

    found = why(tmp_path, program(True), program(False, 0.1 if steps == "equal" else 0.2), trains=True, ops=ops)
    if ops == "all":
        assert [cause.what for cause in found.causes] == (
            [] if steps == "equal" else ["uses alpha=-0.2 where A uses -0.1"]
        ), found
    else:
        assert bool(found.causes) == (steps != "equal"), found


@pytest.mark.parametrize("shift", [0, 1])
def test_labels_of_which_one_program_marks_the_padding_are_no_smaller_batch(shift: int, tmp_path: Path) -> None:
    tokens = torch.randint(1, 12, (3, 8), generator=torch.Generator().manual_seed(2))
    tokens[0, 5:] = 0
    one, two, _ = layers()

    def gradients(loss: Tensor) -> None:
        torch.autograd.grad(loss, [*one.parameters(), *two.parameters()])

    def marked() -> None:
        logits = two(one(F.one_hot(tokens, 16).float()).tanh())
        labels = (tokens % 4).masked_fill(tokens == 0, -100)
        gradients(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))

    def by_hand() -> None:
        logits = two(one(F.one_hot(tokens, 16).float()).tanh())[:, :-1].log_softmax(-1)
        at = tokens[:, 1 - shift : 8 - shift]
        each = -logits.gather(-1, (at % 4)[..., None])[..., 0] * (at != 0)
        gradients(each.sum() / (at != 0).sum())

    found = why(tmp_path, marked, by_hand, trains=True)
    assert (found.equal, bool(found.causes)) == (not shift, bool(shift)), found


def test_a_program_that_rounds_more_and_computes_the_same_is_not_accused(tmp_path: Path) -> None:
    one, two, x = layers()

    def program(turns: float) -> Program:
        # More turns are the same angle, whose sine has the error of a number that is so much larger.
        return lambda: two(one(x) + torch.sin(torch.arange(16) * 0.1 + turns * 2 * torch.pi))

    assert not why(tmp_path, program(0), program(20)).causes
    assert why(tmp_path / "other", program(0), program(20.001)).causes


def test_channels_are_found_step_by_step(tmp_path: Path) -> None:
    conv: Any
    conv, x = nn.Conv1d(8, 8, 2), torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))
    last: Any = nn.Conv1d(8, 4, 1)

    def steps(slope: float) -> Any:
        (w, b), out = conv.parameters(), []
        for t in range(5):
            y = F.leaky_relu(x[..., t] @ w[..., 0].T + x[..., t + 1] @ w[..., 1].T + b, slope)
            out.append(y @ last.weight[..., 0].T + last.bias)
        return torch.stack(out, -1)

    found = why(tmp_path, lambda: last(F.leaky_relu(conv(x))), lambda: steps(0.1))
    assert [cause.place.op for cause in found.causes] == ["aten::leaky_relu"], found
    assert why(tmp_path / "same", lambda: last(F.leaky_relu(conv(x))), lambda: steps(0.01)).equal


def test_what_updates_a_weight_is_accused_and_not_the_product_that_reads_it(tmp_path: Path) -> None:
    def program(power: float) -> Program:
        def run() -> None:
            one, two, x = layers()
            for _ in range(2):
                weights = [*one.parameters(), *two.parameters()]
                gradients = torch.autograd.grad(two(one(x).tanh()).square().mean(), weights)
                with torch.no_grad():
                    for weight, gradient in zip(weights, gradients, strict=True):
                        weight.sub_((gradient.abs() + 0.1).pow(power))

        return run

    found = why(tmp_path, program(0.5), program(0.6), trains=True)
    assert found.causes
    assert not [cause for cause in found.causes if cause.kind == "weight"], found


def test_distances_by_which_rows_are_chosen_are_no_results(tmp_path: Path) -> None:
    one, two, x = layers()
    book = torch.randn(10, 16)

    def by_distance() -> Any:
        return two(book[torch.cdist(one(x), book).argmin(1)])

    def by_square(factor: float = 1) -> Any:
        y = one(x)
        away = y.square().sum(1, keepdim=True) - 2 * y @ book.T + book.square().sum(1)
        return two(book[away.argmin(1)] * factor)

    assert why(tmp_path, by_distance, by_square).equal
    (cause,) = why(tmp_path / "wrong", by_distance, lambda: by_square(1.5)).causes
    assert cause.place.op != "aten::_cdist_forward"


def test_by_what_a_loss_is_divided_is_told_by_its_gradients(tmp_path: Path) -> None:
    one, two, x = layers()

    def whole() -> None:
        F.logsigmoid(two(one(x).tanh())).mm(torch.ones(4, 1)).mean().neg().backward()

    def by_columns() -> None:
        y, total = two(one(x).tanh()), torch.zeros(())
        for column in y.unbind(1):
            total = total + F.softplus(-column).sum()
        (total / 24).backward()

    (cause,) = why(tmp_path, whole, by_columns, trains=True).causes
    assert (cause.what, cause.exact) == ("uses 0.25 where A uses 1", True)  # which are summed by a product


def test_a_mask_of_one_minus_what_is_kept_hides_nothing(tmp_path: Path) -> None:
    one, two, x = layers()
    keep = torch.arange(6) < 5

    def program(scale: float, by_number: bool) -> Program:
        def run() -> Any:
            y = one(x)
            scores = y @ y.mT * scale
            if by_number:
                scores = scores + (1.0 - keep.float()) * torch.finfo(torch.float32).min
            else:
                scores = scores.masked_fill(~keep, -torch.inf)
            return two(scores.softmax(-1) @ y)

        return run

    assert why(tmp_path, program(0.25, True), program(0.3, False)).verdict == "difference"
    assert why(tmp_path / "same", program(0.25, True), program(0.25, False)).equal


def test_masks_do_not_drown_the_scores_beside_them() -> None:
    scores = torch.randn(4, 8, dtype=torch.float64)
    mask = torch.zeros(8, dtype=torch.float64)
    mask[6:] = -1e9
    spread = Spread(scores + mask, [scores * (1 + 1e-7) + mask * (1 + 1e-7)], 2.0**-24)
    assert spread.ratio(scores / 2 + mask, 2.0**-24) > LIMIT
    assert spread.ratio(scores + mask - 1e9 * (mask < 0), 2.0**-24) <= LIMIT


def test_an_unknown_cause_does_not_stand_where_what_follows_is_the_same(tmp_path: Path) -> None:
    _, two, x = layers()
    turns = torch.outer(torch.arange(16), torch.arange(16)) % 16 * (torch.pi / 8)

    def a() -> Any:
        waves = torch.fft.fft(x)
        return waves.abs(), two((waves * waves).real.sigmoid())

    def b() -> Any:
        one, other = x @ turns.cos(), x @ turns.sin()
        return (one * one + other * other).sqrt(), two((one * other).erf())

    (cause,) = why(tmp_path, a, b).causes
    assert (cause.what, cause.place.op) == ("", "aten::mul")


def test_a_product_is_not_taken_for_what_a_rewriting_scales_behind_it(tmp_path: Path) -> None:
    one, two, x = layers()
    gate, scale = nn.Linear(16, 16), torch.linspace(1, 4, 16)

    def b() -> Any:
        wrong = F.linear(x, one.weight * scale, one.bias)
        return F.linear(gate(x).sigmoid() * (wrong / scale), two.weight * scale, two.bias)

    found = why(tmp_path, lambda: two(gate(x).sigmoid() * one(x)), b)
    words = "has another weight: 240 of 256 numbers differ, by up to 0.69"  # the first column is scaled by one
    assert [(cause.place.op, cause.what) for cause in found.causes] == [("aten::addmm", words)]


@pytest.mark.parametrize("in_parts", [0, 1])
@pytest.mark.parametrize("sizes", [(1,) * 6, (1, 4, 1)])
def test_small_results_of_samples_are_compared_with_those_of_the_batch(
    in_parts: int, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    one, two, x = layers()
    three = nn.Linear(16, 4)

    def program(side: int, half: float) -> Program:
        parts = x.split(sizes) if side == in_parts else [x]
        return lambda: [(two(y) + three(y)) * half for y in map(one, parts)]

    found = why(tmp_path / "same", program(0, 0.5), program(1, 0.5))
    assert (found.verdict, found.causes) == ("rounding", ())
    found = why(tmp_path / "other", program(0, 0.5), program(1, 0.25))
    assert found.verdict == "difference"


def test_small_numbers_by_which_samples_are_chosen_are_no_results(tmp_path: Path) -> None:
    one, two, x = layers()

    def program(factor: float, *sizes: int) -> Program:
        def chosen(y: Tensor) -> Any:
            return one(y).masked_fill((two(one(y)) * factor > 0).any(-1, keepdim=True), 0.0)

        return lambda: [chosen(part) for part in x.split(sizes)]

    assert why(tmp_path, program(0.5, *(1,) * 6), program(0.25, 6)).causes == ()


def test_runs_without_values_are_refused(tmp_path: Path) -> None:
    one, _, x = layers()
    with intercept(runs.RunRecorder(tmp_path / "a"), ops="all"):
        one(x)
    run = runs.open_run(tmp_path / "a")
    with pytest.raises(OpInterceptError, match="all of their values"):
        runs.why(run, run)
