"""Models that nobody here wrote: everything they multiply is seen, and nothing they compute is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from programs import outermost
from torch.profiler import ProfilerActivity, profile

from opintercept import hooks, intercept

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT = {"vocab_size": 50, **_SMALL}

MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT, num_key_value_heads=2)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_TEXT)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**_SMALL, image_size=16, patch_size=4)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_TEXT, num_key_value_heads=2, num_local_experts=4)
    ),
}


def _inputs(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    if isinstance(model, transformers.ViTForImageClassification):
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    tokens = torch.randint(1, 50, (2, 12))
    return {"input_ids": tokens, "labels": tokens}


CONTEXTS = {"training": torch.enable_grad, "evaluation": torch.no_grad, "inference": torch.inference_mode}


def _run(
    make: Callable[[], transformers.PreTrainedModel], context: str
) -> tuple[torch.Tensor, list[Any], torch.Tensor]:
    torch.manual_seed(3)
    model = make().train(context == "training")
    inputs = _inputs(model)
    with CONTEXTS[context]():
        loss = model(**inputs).loss
    if context == "training":
        loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_seen_whole_and_not_changed(name: str, context: str) -> None:
    recorder = hooks.Recorder()
    interceptor = intercept(recorder)
    watched = {overload.partition(".")[0] for overload in interceptor._overloads}
    loss, gradients, state = _run(MODELS[name], context)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, interceptor:
        seen_loss, seen_gradients, seen_state = _run(MODELS[name], context)
    assert torch.equal(loss, seen_loss)
    assert torch.equal(state, seen_state)
    for one, other in zip(gradients, seen_gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert [record.op for record in recorder.records] == outermost(profiler.events(), watched)
    assert len(recorder.records) > 10
