"""The pack for bitsandbytes, with its own kernels for the CPU and models of transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import ENGINES

from opintercept import CallRecord, OpCall, hooks, intercept
from opintercept._ops import packs

bitsandbytes = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

# The libraries' own.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

IDS = torch.arange(14).reshape(2, 7)
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "nf4": (FOUR_BITS, "gemm_4bit"),
    "nf4 with quantised scales": ({**FOUR_BITS, "bnb_4bit_use_double_quant": True}, "gemm_4bit"),
    "fp4": ({**FOUR_BITS, "bnb_4bit_quant_type": "fp4"}, "gemm_4bit"),
    "int8": ({"load_in_8bit": True, "llm_int8_threshold": 0.0}, "int8_scaled_mm"),
    "int8 with outliers": ({"load_in_8bit": True, "llm_int8_threshold": 0.5}, "int8_mixed_scaled_mm"),
}
configs = pytest.mark.parametrize("config", CONFIGS)
engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Load the pack, and keep what the libraries log out of the tests."""
    packs.load({"bitsandbytes"})
    logging.disable(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is not quantised, on disk."""
    torch.manual_seed(0)
    # Multiples of 64, the size of a block: on the CPU, bitsandbytes 0.50 dequantises other rows with wrong scales.
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def loaded(folder: Path, **config: Any) -> Any:
    quantised: dict[str, Any] = {}
    if config:
        quantised = {"quantization_config": transformers.BitsAndBytesConfig(**config), "device_map": "cpu"}
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **quantised).eval()


def records(run: Callable[[], Any], engine: Any = "auto") -> tuple[Any, list[CallRecord]]:
    """What a program returns, and its calls."""
    with intercept(recorder := hooks.Recorder(), engine=engine):
        returned = run()
    return returned, recorder.records


@engines
@configs
def test_the_products_of_a_quantised_model_are_those_of_the_model(config: str, engine: str, saved: Path) -> None:
    settings, name = CONFIGS[config]
    plain, quantised = loaded(saved), loaded(saved, **settings)
    with torch.no_grad():
        expected = quantised(IDS).logits
        _, wanted = records(lambda: plain(IDS))
        output, found = records(lambda: quantised(IDS).logits, engine)
    assert torch.equal(output, expected)
    assert [(call.module, call.gemm and call.gemm[:4]) for call in found] == [
        (call.module, call.gemm and call.gemm[:4]) for call in wanted
    ]
    assert sum(call.flops or 0 for call in found) == sum(call.flops or 0 for call in wanted) > 0
    assert [call.flops for call in found] == [call.flops for call in wanted]
    layers = [call for call in found if call.op == f"bitsandbytes::{name}"]
    assert len(layers) == 14
    assert all(call.lhs and call.rhs and call.output for call in layers)


@configs
def test_hooks_get_the_values_of_the_weights(config: str, saved: Path) -> None:
    model = loaded(saved, **CONFIGS[config][0])
    original = dict(loaded(saved).named_parameters())
    far = []

    def look(call: OpCall) -> None:
        if call.op.startswith("bitsandbytes::"):
            weight = original[f"{call.module}.weight"]
            assert call.rhs is not None
            assert call.rhs.shape == weight.shape
            assert not call.is_quantized("rhs")
            assert call.lhs is not None
            assert call.lhs.is_floating_point()
            far.append(float((call.rhs - weight).norm() / weight.norm()))

    with torch.no_grad(), intercept(look):
        model(IDS)
    assert len(far) == 14
    assert max(far) < (0.02 if "int8" in config else 0.15)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("code", ["nf4", "fp4"])
def test_the_values_of_4_bits_are_those_that_bitsandbytes_computes(code: str, nested: bool) -> None:
    functional = bitsandbytes.functional
    weight, x = torch.randn(96, 64), torch.randn(3, 5, 64)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=code, compress_statistics=nested)
    expected = functional.dequantize_4bit(packed, state)
    seen: list[Any] = []
    with intercept(lambda call: seen.append((call.op, call.gemm, call.rhs))):
        bitsandbytes.matmul_4bit(x, packed, state)
        if not nested:
            torch.ops.bitsandbytes.gemv_4bit(x, packed, state.shape, state.absmax, state.code, state.blocksize)
    assert [op for op, _, _ in seen] == ["bitsandbytes::gemm_4bit", *["bitsandbytes::gemv_4bit"] * (not nested)]
    assert all(gemm[:4] == (1, 15, 96, 64) for _, gemm, _ in seen)
    assert all(torch.equal(rhs, expected) for _, _, rhs in seen)


def test_the_values_of_4_bits_in_the_layout_for_avx512_are_right() -> None:
    functional = bitsandbytes.functional
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(torch.randn(96, 64), blocksize=64, quant_type="nf4")
    expected = functional.dequantize_4bit(packed, state).bfloat16()
    if not hasattr(functional, "_convert_weight_packed_for_cpu"):
        pytest.skip("this bitsandbytes has no such layout")
    packed, state = functional._convert_weight_packed_for_cpu(packed, state)
    library = torch.library.Library("bitsandbytes", "IMPL")
    seen: list[Any] = []
    if not torch._C._dispatch_has_kernel_for_dispatch_key("bitsandbytes::gemv_4bit", "CPU"):
        # Only a CPU with bfloat16 in AVX-512 has the kernel.
        library.impl("gemv_4bit", lambda a, b, shape, *_: a.new_zeros(*a.shape[:-1], shape[0]), "CPU")
    with intercept(lambda call: seen.append(call.rhs)):
        torch.ops.bitsandbytes.gemv_4bit(x, packed, list(state.shape), state.absmax, state.code, state.blocksize)
    library._destroy()
    assert torch.allclose(seen[0], expected, rtol=0.01)  # the scales are bfloat16 there


@engines
def test_int8_has_the_output_that_it_writes(engine: Any) -> None:
    a, b = (torch.randint(-127, 127, shape, dtype=torch.int8) for shape in ((2, 3), (4, 3)))
    out = torch.empty(2, 4, dtype=torch.int32)
    seen: list[Any] = []
    with intercept(lambda call: seen.append((call.op, call.gemm, call.output.clone())), engine=engine):
        torch.ops.bitsandbytes.int8_linear_matmul.out(a, b, out)
    ((op, gemm, output),) = seen
    assert (op, gemm[:4]) == ("bitsandbytes::int8_linear_matmul", (1, 2, 4, 3))
    assert torch.equal(output, a.int() @ b.int().T)


def adapted(folder: Path, **config: Any) -> Any:
    """The model, frozen, with low-rank adapters in some of its layers."""
    peft = pytest.importorskip("peft")
    model = loaded(folder, **config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.enable_input_require_grads()
    torch.manual_seed(1)
    adapters = peft.LoraConfig(
        r=4, lora_dropout=0.0, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    return peft.get_peft_model(model, adapters).train()


def trained(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of one step."""
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@engines
@configs
def test_training_with_lora_links_backward_calls(config: str, engine: str, saved: Path) -> None:
    model = adapted(saved, **CONFIGS[config][0])
    expected = trained(model)
    gradients, found = records(lambda: trained(model), engine)
    _, wanted = records(lambda: trained(adapted(saved)))
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert [call.flops for call in found] == [call.flops for call in wanted]

    def links(calls: list[CallRecord]) -> list[tuple[str | None, str | None]]:
        backward = [call for call in calls if call.phase == "backward"]
        return [(call.module, None if call.forward is None else calls[call.forward].module) for call in backward]

    assert links(found) == links(wanted)
    assert all(module == forward is not None for module, forward in links(found))


def test_the_gradients_of_frozen_layers_are_those_of_their_input(saved: Path) -> None:
    model = adapted(saved, **FOUR_BITS)
    _, found = records(lambda: trained(model))
    backward = [call for call in found if call.phase == "backward" and call.forward is not None]
    layers = [call for call in backward if found[call.forward].op == "bitsandbytes::gemm_4bit"]  # type: ignore[index]
    assert len(layers) == 14
    assert [call.grad_of for call in layers] == ["lhs"] * 14
