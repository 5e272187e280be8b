"""The pack for torchao, and models whose weights torchao has quantised."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiler import ENGINES

from opintercept import CallRecord, hooks, intercept
from opintercept._ops import packs

with warnings.catch_warnings():  # the library's own
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    try:
        pytest.importorskip("torchao.ops")
        quantization = pytest.importorskip("torchao.quantization")
    finally:
        logging.disable(logging.NOTSET)
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]
IDS = torch.arange(14).reshape(2, 7)
CONFIGS = {
    "int8 dynamic": ("Int8DynamicActivationInt8WeightConfig", "aten::_int_mm"),
    "int8 weights": ("Int8WeightOnlyConfig", "aten::mm"),
    "float8 weights": ("Float8WeightOnlyConfig", "aten::mm"),
}
configs = pytest.mark.parametrize("config", CONFIGS)
engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True, scope="module")
def loaded() -> Iterator[None]:
    """Load the pack, after stubs where this build of torchao has no kernel for the CPU."""
    library = torch.library.Library("torchao", "IMPL")

    def linear(x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.arange(math.prod(x.shape[:-1]) * n, dtype=torch.float32).view(*x.shape[:-1], n)

    stubs = {
        "da8w4_linear_cpu": lambda x, _, __, w, *___: linear(x, w.shape[0] * w.shape[3] * 2),
        "float8_linear_cpu": lambda x, _, w, *__: linear(x, w.shape[0] * (w.shape[3] if w.dim() == 4 else 1)),
        "rowwise_scaled_linear_sparse_cutlass_f8f8": lambda x, _, w, *__: linear(x, w.shape[0]),
        "mx_fp8_bf16": lambda a, b, *_: linear(a, b.shape[1]),
        "swizzle_mm": lambda a, b, *_: linear(a, b.shape[1]),
        "swizzle_scaled_mm": lambda a, b, *_: linear(a, b.shape[1]),
        "qscaled_dot_product": lambda q, *_: q.clone(),
    }
    for name, stub in stubs.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"torchao::{name}", "CPU"):
            library.impl(name, stub, "CPU")
    packs.load({"torchao", "ao"})
    yield
    library._destroy()


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).eval()


def records(run: Any, engine: Any = "auto") -> tuple[Any, list[CallRecord]]:
    """What a program returns, and its calls."""
    with intercept(recorder := hooks.Recorder(), engine=engine):
        returned = run()
    return returned, recorder.records


@engines
@configs
def test_the_products_of_a_quantised_model_are_those_of_the_model(config: str, engine: str) -> None:
    settings, name = CONFIGS[config]
    quantised = model()
    quantization.quantize_(quantised.model, getattr(quantization, settings)())
    with torch.no_grad():
        expected = quantised(IDS).logits
        _, wanted = records(lambda: model()(IDS))
        output, found = records(lambda: quantised(IDS).logits, engine)
    assert torch.equal(output, expected)
    assert [(call.module, call.gemm and call.gemm[:4], call.flops) for call in found] == [
        (call.module, call.gemm and call.gemm[:4], call.flops) for call in wanted
    ]
    layers = [call for call in found if call.op == name and call.module != "lm_head"]
    assert len(layers) == 14
    assert all(call.lhs and call.rhs and call.output for call in layers)


def f(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


CALLS: dict[str, tuple[tuple[Any, ...], tuple[int, int], tuple[int, int, int, int] | None, int, int]] = {
    # The arguments, the positions of lhs and rhs, the product, its FLOPs and how many scales there are.
    "da8w4_linear_cpu": (
        (f(2, 5, 64), f(10), f(10), f(2, 2, 32, 16), f(2, 2, 32), f(2, 2, 32), f(2), None, torch.float32),
        (0, 3),
        (1, 10, 64, 64),
        2 * 10 * 64 * 64,
        2,
    ),
    "float8_linear_cpu": (
        (f(10, 64), f(10), f(2, 2, 32, 32), f(2, 2, 32), None, torch.float32),
        (0, 2),
        (1, 10, 64, 64),
        2 * 10 * 64 * 64,
        2,
    ),
    "rowwise_scaled_linear_sparse_cutlass_f8f8": (
        (f(2, 8), f(2), f(4, 4), f(4, 1), f(4)),
        (0, 2),
        (1, 2, 4, 8),
        2 * 2 * 4 * 8,
        2,
    ),
    "mx_fp8_bf16": ((f(2, 3), f(3, 4), f(2, 1), f(1, 4)), (0, 1), (1, 2, 4, 3), 48, 2),
    "swizzle_mm": ((f(2, 3), f(3, 4), False, False), (0, 1), (1, 2, 4, 3), 48, 0),
    "swizzle_scaled_mm": ((f(2, 3), f(3, 4), False, False, f(1), f(1)), (0, 1), (1, 2, 4, 3), 48, 2),
    "qscaled_dot_product": (
        (f(2, 4, 6, 8), f(2, 4, 7, 8), f(2, 4, 7, 8)),
        (0, 1),
        None,
        2 * 2 * 4 * 6 * 7 * (8 + 8),
        0,
    ),
}


@engines
@pytest.mark.parametrize("name", CALLS)
def test_an_operator_has_roles_shape_and_flops(name: str, engine: Any) -> None:
    args, places, gemm, flops, scales = CALLS[name]
    seen: list[Any] = []
    with intercept(
        lambda c: seen.append((c.op, c.lhs, c.rhs, c.gemm, c.flops, len(c.scales), c.output)), engine=engine
    ):
        returned = getattr(torch.ops.torchao, name)(*args)
    ((op, lhs, rhs, product, count, scaled, output),) = seen
    assert op == f"torchao::{name}"
    assert torch.equal(lhs, args[places[0]])
    assert torch.equal(rhs, args[places[1]])
    assert (product and product[:4]) == gemm
    assert (count, scaled) == (flops, scales)
    assert torch.equal(output, returned)


@engines
@configs
def test_training_with_lora_links_backward_calls(config: str, engine: str) -> None:
    peft = pytest.importorskip("peft")
    if config == "int8 dynamic":
        pytest.skip("torchao has no gradient for it")

    def adapted(settings: str | None) -> Any:
        base = model()
        if settings is not None:
            quantization.quantize_(base.model, getattr(quantization, settings)())
        for parameter in base.parameters():
            parameter.requires_grad_(False)
        base.enable_input_require_grads()
        torch.manual_seed(1)
        adapters = peft.LoraConfig(
            r=4, lora_dropout=0.0, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"]
        )
        return peft.get_peft_model(base, adapters).train()

    def trained(network: Any) -> list[torch.Tensor]:
        network.zero_grad()
        network(input_ids=IDS, labels=IDS).loss.backward()
        return [p.grad.clone() for p in network.parameters() if p.grad is not None]

    network = adapted(CONFIGS[config][0])
    expected = trained(network)
    gradients, found = records(lambda: trained(network), engine)
    _, wanted = records(lambda: trained(adapted(None)))
    assert len(expected) == 12
    assert all(map(torch.equal, gradients, expected))
    assert [call.flops for call in found] == [call.flops for call in wanted]
    backward = [call for call in found if call.phase == "backward"]
    assert [call.module for call in backward] == [call.module for call in wanted if call.phase == "backward"]
    assert all(call.forward is not None and found[call.forward].module == call.module for call in backward)
