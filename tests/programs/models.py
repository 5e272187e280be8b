"""Small models of `transformers`, with inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

_SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_DECODER: dict[str, Any] = {"decoder_start_token_id": 0}
_TEXT: dict[str, Any] = {"vocab_size": 50, **_SMALL}

MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT, num_key_value_heads=2)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_TEXT)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **_DECODER)
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**_SMALL, image_size=16, patch_size=4)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_TEXT, num_key_value_heads=2, num_local_experts=4)
    ),
}


def inputs_of(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    if isinstance(model, transformers.ViTForImageClassification):
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    tokens = torch.randint(1, 50, (2, 12))
    return {"input_ids": tokens, "labels": tokens}
