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


_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 32,
    **{f"{part}_{of}": size for part in ("encoder", "decoder") for of, size in (("layers", 1), ("attention_heads", 4))},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **_DECODER,
}
_STAGES: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 32, 32]}

MORE_MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "qwen2_moe": lambda: transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **_TEXT, num_key_value_heads=2, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
        )
    ),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**_TEXT, num_key_value_heads=2, head_dim=8)
    ),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_TEXT)),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaForCausalLM(
        transformers.RecurrentGemmaConfig(**(_TEXT | {"num_hidden_layers": 3}), num_key_value_heads=1, lru_width=32)
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**_SEQ2SEQ)),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**_SEQ2SEQ, num_mel_bins=8, max_source_positions=16, max_target_positions=20)
    ),
    "wav2vec2": lambda: transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(
            **_TEXT, conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 4), num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
        )
    ),
    "albert": lambda: transformers.AlbertForMaskedLM(transformers.AlbertConfig(**_TEXT, embedding_size=16)),
    "deberta_v2": lambda: transformers.DebertaV2ForMaskedLM(
        transformers.DebertaV2Config(**_TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"])
    ),
    "convnext": lambda: transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**_STAGES)),
    "resnet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, **_STAGES)
    ),
    "swin": lambda: transformers.SwinForImageClassification(
        transformers.SwinConfig(image_size=32, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4)
    ),
    "segformer": lambda: transformers.SegformerForImageClassification(
        transformers.SegformerConfig(**_STAGES, num_attention_heads=[1, 1, 2, 2])
    ),
}  # fmt: skip


def inputs_of(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 64)
        return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}
    tokens = torch.randint(1, 50, (2, 12))
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(2, 8, 32), "labels": tokens}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(2, 600), "labels": tokens[:, :5]}
    return {"input_ids": tokens, "labels": tokens}
