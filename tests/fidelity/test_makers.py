"""With all operators watched, `NonFinite` names the one that makes a NaN, and accuses nobody in healthy programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiler import COMPILED
from native import reading
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import hooks, intercept

pytestmark = pytest.mark.slow
INF = math.inf
ENGINES = [pytest.param({}, id="kernel"), COMPILED]


def x() -> Tensor:
    return torch.tensor([[1.0, 2.0, -3.0], [0.5, 1.0, 2.0]])


def with_nan() -> Tensor:
    """A table whose last row is NaN, written unseen."""
    table = torch.ones(4, 3)
    table.numpy()[3] = math.nan
    return table


def less_itself(y: Tensor) -> Tensor:
    return y - y


def a_row_of_minus_inf(how: str) -> Tensor:
    mask = torch.zeros(2, 3)
    if how == "fill_":
        mask[0].fill_(-INF)
    elif how == "where":
        mask = torch.where(x() > 9, mask, -INF)
    elif how == "masked_fill":
        mask = mask.masked_fill(mask == 0, -INF)
    elif how == "triu":
        return torch.full((3, 3), -INF).triu()[:2]
    elif how == "log":
        return (mask.log() * 0 == 0).float()  # a healthy use of Inf before
    return x() + mask


REF, LAST = torch.zeros(2, dtype=torch.long), torch.tensor([0, 3])
# Each operator with what makes a NaN, or an Inf that becomes one.
MAKERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "log": ("log", lambda: x().log()),
    "log in place": ("log_", lambda: x().log_()),
    "log out": ("log", lambda: torch.log(x(), out=torch.empty(2, 3))),
    "0 / 0": ("div", lambda: (x() * 0) / (x() * 0)),
    "0 / 0 in place": ("div_", lambda: (x() * 0).div_(x() * 0)),
    "exp": ("exp", lambda: less_itself((x() * 200).exp())),
    "exp in place": ("exp_", lambda: less_itself((x() * 200).exp_())),
    "exp out": ("exp", lambda: less_itself(torch.exp(x() * 200, out=torch.empty(2, 3)))),
    "exp, then a view": ("exp", lambda: less_itself((x() * 200).exp()[:, 1:].T * 2)),
    "exp, after another Inf": ("exp", lambda: (torch.zeros(3).log(), less_itself((x() * 200).exp()))[1]),
    "rsqrt": ("rsqrt", lambda: (x() * 0).rsqrt() * 0),
    "product": ("mm", lambda: less_itself((x() * 1e38) @ torch.ones(3, 3) * 1e30)),
    "cast": ("copy_", lambda: less_itself((x() * 1e6).half())),
    "sum": ("sum", lambda: less_itself((torch.ones(2, 3) * 3e38).sum())),
    "embedding": ("embedding", lambda: F.embedding(LAST, with_nan())),
    "index": ("index", lambda: with_nan()[torch.tensor([0, -1])]),
    "buffer": ("mul", lambda: x() * with_nan()[2:]),
    "foreach in place": ("_foreach_div_", lambda: foreach(torch._foreach_div_)),
    "foreach": ("_foreach_sqrt", lambda: torch._foreach_sqrt([x() * 0, x()])[1]),
    "number": ("mul", lambda: x() * math.nan),
    "-inf - -inf": ("sub", lambda: less_itself(torch.full((2, 3), -INF))),
    "loss": ("nll_loss_forward", lambda: F.nll_loss(x(), REF - 100)),
} | {
    f"softmax, {how}": ("_softmax", lambda how=how: (torch.zeros(3).log(), a_row_of_minus_inf(how).softmax(-1))[1])
    for how in ("fill_", "where", "masked_fill", "triu")
}


def foreach(divide: Any) -> Tensor:
    numerators = [x() * 0, x()]
    divide(numerators, [x() * 0, x()])
    return numerators[0]


class Planted(torch.autograd.Function):
    """Uses a value in its forward or its backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, make: Callable[[], Tensor], where: str) -> Tensor:
        ctx.plant = make, where
        return y * make().sum() if where == "forward" else y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        make, where = ctx.plant
        return gradients[0] * make().sum() if where == "backward" else gradients[0], None, None


class Layer(nn.Module):
    def __init__(self, make: Callable[[], Tensor], where: str) -> None:
        super().__init__()
        self.plant = make, where

    def forward(self, y: Tensor) -> Tensor:
        return Planted.apply(y, *self.plant)  # type: ignore[no-any-return, no-untyped-call]


def poison(net: nn.Sequential, make: Callable[[], Tensor]) -> None:
    net[0].weight.grad.mul_(make().sum())  # type: ignore[union-attr, operator]


def a_step(make: Callable[[], Tensor], where: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), Layer(make, where), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    if where == "step":
        optimizer.register_step_pre_hook(lambda *_: poison(net, make))
    net(x()).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("options", ENGINES)
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_maker_alone_is_named(name: str, where: str, options: dict[str, Any]) -> None:
    op, make = MAKERS[name]
    nonfinite = hooks.NonFinite(action="record")
    natively = options.get("engine") == "compiled"  # as where a program runs with compiled kernels
    with reading(natively), torch.no_grad(), intercept(nonfinite, ops="all", **options), torch.enable_grad():
        a_step(lambda: make().float(), where)
    (finding,) = nonfinite.findings
    record = finding.record
    module, phase = ("", "forward") if where == "step" else ("1", where)
    assert (record.op, record.module or "", record.phase) == (f"aten::{op}", module, phase), str(finding)
    assert record.source is not None
    assert nonfinite.passed_on > 0


def masked_attention(dtype: torch.dtype) -> nn.Module:
    class Attention(nn.Module):
        """Adds a mask that overflows in half precision, which harms nobody."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 1)

        def forward(self, y: Tensor) -> Any:
            q, k, v = self.qkv(y).chunk(3, -1)
            scores = q @ k.T * 200
            mask = torch.full_like(scores, torch.finfo(scores.dtype).min).triu(1)
            return self.out((scores + mask).softmax(-1).to(v.dtype) @ v)

    return Attention()


class Gate(nn.Module):
    """Takes the logarithm of zero and then its exponential."""

    def forward(self, y: Tensor) -> Tensor:
        return y * (y > 0).to(y.dtype).log().exp()


def healthy(kind: str) -> nn.Module:
    if kind == "attention":
        return masked_attention(torch.float16)
    middle = Gate() if kind == "gate" else nn.Sequential(nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(), nn.LayerNorm(16))
    return nn.Sequential(nn.Linear(8, 16), middle, nn.Linear(16, 1))


def scaled(loss: Tensor, model: nn.Module, scaler: torch.amp.GradScaler, how: str) -> Tensor:
    if how == "mean":
        return scaler.scale(loss[None]).mean()
    if how == "sum":
        return sum(scaler.scale([loss, loss * 2]))  # type: ignore[return-value]
    if how == "penalty":  # as torch's guide to mixed precision has it
        gradients = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        loss = loss + sum((each / scaler.get_scale()).square().sum() for each in gradients) * 1e-3
    return scaler.scale(loss)


@pytest.mark.parametrize("options", ENGINES)
@pytest.mark.parametrize("how", ["plain", "mean", "sum", "penalty"])
@pytest.mark.parametrize("kind", ["norms", "gate", "attention"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_training_with_a_large_scale_is_healthy(kind: str, how: str, fused: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, batch = healthy(kind), torch.randn(32, 8) * 4
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=not fused)
    scaler, nonfinite = torch.amp.GradScaler("cpu", init_scale=2.0**24), hooks.NonFinite()
    with intercept(nonfinite, ops="all", **options) as interceptor:
        for _ in range(16):
            with torch.autocast("cpu", torch.float16):
                loss = model(batch).float().square().mean()
            scaled(loss, model, scaler, how).backward()
            if how != "penalty" or not fused:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            interceptor.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert scaler.get_scale() < 2.0**24
    assert nonfinite.discarded
    assert (nonfinite.findings, nonfinite.passed_on) == ([], 0)


@pytest.mark.parametrize("options", ENGINES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "Bert", "GPT2", "T5"])
def test_training_a_transformer_is_healthy(name: str, attention: str, dtype: Any, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "pad_token_id": 0, "attn_implementation": attention}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4}
    elif name == "T5":
        sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    head = {"Llama": "ForCausalLM", "Bert": "ForMaskedLM", "GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**small, **sizes)
    model = getattr(transformers, name + head[name])(config).train()
    with intercept(nonfinite := hooks.NonFinite(), ops="all", **options):
        for fused in (True, False):
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused, foreach=not fused)
            for _ in range(2):
                ids = torch.randint(1, 64, (3, 12))
                mask = torch.ones_like(ids)
                mask[1, :4] = mask[2, 8:] = 0
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert (nonfinite.findings, nonfinite.passed_on) == ([], 0)


# At zero autograd's formulas divide by zero and then overwrite the NaN.
AT_ZERO: list[Callable[[Tensor], Tensor]] = [
    lambda y: y.norm(),
    lambda y: F.normalize(y, dim=0),
    lambda y: y.std(),
    lambda y: y.sinc(),
    lambda y: y.cumprod(0),
    lambda y: y.copysign(y),
    lambda y: y.pow(y + 1),
    lambda y: y.renorm(2, 0, 1.0),
    lambda y: y.dist(y.detach()),
    lambda y: y.to(torch.complex64).angle(),
    lambda y: y.to(torch.complex64).sgn().abs(),
]


@pytest.mark.parametrize("options", ENGINES)
@pytest.mark.parametrize("at", range(len(AT_ZERO)))
def test_a_gradient_at_zero_is_healthy(at: int, options: dict[str, Any]) -> None:
    y = torch.zeros(3, 3, requires_grad=True)
    with intercept(hooks.NonFinite(), ops="all", **options):
        AT_ZERO[at](y).sum().backward()
    assert y.grad is not None
    assert y.grad.isfinite().all()


@pytest.mark.parametrize("options", ENGINES)
@pytest.mark.parametrize("how", ["overwritten", "freed"])
def test_an_inf_in_memory_that_another_had_before_is_not_its(how: str, options: dict[str, Any]) -> None:
    nonfinite = hooks.NonFinite(action="record")
    with reading(True), intercept(nonfinite, ops="all", **options):
        for _ in range(10):
            memory = torch.empty(64, 64)
            torch.log(torch.eye(64), out=memory)  # harmless
            if how == "overwritten":
                memory.fill_(0.0)
                memory.numpy()[0] = -INF
            else:
                mask = torch.full((64, 64), 0.0).numpy()
                mask[0] = -INF
                del memory
                memory = torch.tensor(mask)
            torch.softmax(memory, -1)
    (finding,) = nonfinite.findings
    assert (finding.record.op, finding.seen_at) == ("aten::_softmax", None)


@pytest.mark.parametrize("options", ENGINES)
def test_memory_that_is_overwritten_later_is_healthy(options: dict[str, Any]) -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        with intercept(nonfinite := hooks.NonFinite(), ops="all", **options):
            conv(torch.ones(1, 2, 4, 4)).sum().backward()
            torch.empty(8, 8).clone().fill_(1.0)
            torch.linalg.matrix_exp(torch.eye(4) * 3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (nonfinite.findings, nonfinite.passed_on) == ([], 0)
