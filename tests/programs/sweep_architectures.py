"""Compares small models with other ways to compute them: `python tests/programs/sweep_architectures.py llama -v`.

Neither side has a mistake, so `why` must accuse nobody. Prints each pair in which it does, or does not compare.
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from models import MODELS, MORE_MODELS, inputs_of
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

from opintercept import intercept, runs

SECONDS = 60  # of processor time for each pair
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 50),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_experts_per_tok", "n_group", "topk_group", "first_k_dense_replace"), 1
    ),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "hidden_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "attention_dim"), 32),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "word_embed_proj_dim", "state_size", "window_size", "attention_window"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "mamba_d_state", "block_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "sliding_window", "image_size"), 64),
    **{"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "expand": 1},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "patch_size": 16, "decoder_start_token_id": 0},
}
_HEADS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)
_LARGEST = 4_000_000  # parameters of a model that counts as small
Inputs = dict[str, torch.Tensor]
Forward = Callable[[Any, Inputs], None]


def small(kind: str) -> Any:
    """A small model of any type that has a head for text or images."""
    if kind in MODELS or kind in MORE_MODELS:
        return {**MODELS, **MORE_MODELS}[kind]()
    usual = transformers.AutoConfig.for_model(kind)
    sizes = {name: size for name, size in _SMALL.items() if isinstance(getattr(usual, name, None), int)}
    if "kv_lora_rank" in sizes:  # each head has keys and values of its own
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    layers = [*(getattr(usual, "layer_types", None) or ())]
    full = next((at for at, each in enumerate(layers) if "attention" in each and "linear" not in each), 0)
    if full > 1 and "num_hidden_layers" in sizes:  # a cache of states alone tells no length
        sizes["num_hidden_layers"] = full + 1
    config = transformers.AutoConfig.for_model(kind, **sizes)
    if kind in _HEADS[0] and hasattr(config, "is_decoder"):
        config.is_decoder = True  # a model that looks ahead has no cache
    name = next(heads[kind] for heads in _HEADS if kind in heads)
    with torch.device("meta"):
        made = getattr(transformers, name if isinstance(name, str) else name[0])
        if sum(each.numel() for each in made(copy.deepcopy(config)).parameters()) > _LARGEST:
            raise ValueError("the model is not small")
    return made(config)


def kinds() -> list[str]:
    """The types of models, the usual ones first."""
    known = [*MODELS, *MORE_MODELS]
    return [*known, *(kind for kind in dict.fromkeys(kind for heads in _HEADS for kind in heads) if kind not in known)]


def forward(model: Any, inputs: Inputs) -> None:
    own = next(model.parameters()).dtype
    model(**{name: value.to(own) if value.is_floating_point() else value for name, value in inputs.items()})


def one_row(model: Any, inputs: Inputs) -> None:
    forward(model, {name: value[:1] for name, value in inputs.items()})


def row_by_row(model: Any, inputs: Inputs) -> None:
    for row in range(len(next(iter(inputs.values())))):
        forward(model, {name: value[row : row + 1] for name, value in inputs.items()})


def places(model: Any, begin: int, end: int) -> Inputs:
    """The places of tokens, where a model takes some: what it makes of a padding token is another thing."""
    known = "position_ids" in signature(model.forward).parameters
    return {"position_ids": torch.arange(begin, end)[None]} if known else {}


def with_cache(model: Any, inputs: Inputs) -> None:
    tokens, cache = inputs["input_ids"], None
    for begin, end in ((0, 7), *((place, place + 1) for place in range(7, tokens.shape[1]))):
        more = places(model, begin, end)  # a cache of states tells none
        cache = model(input_ids=tokens[:, begin:end], past_key_values=cache, use_cache=True, **more).past_key_values


def without_cache(model: Any, inputs: Inputs) -> None:
    model(input_ids=inputs["input_ids"], use_cache=False, **places(model, 0, inputs["input_ids"].shape[1]))


def loaded(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder).eval()


def eager(model: Any) -> Any:
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


def quantised(levels: int, size: int) -> Callable[[Any], Any]:
    """Weights of linears as whole numbers of bits have them, with a scale for each row or for so many columns.

    A head that shares its weight with a table stays in full, as quantisers leave it.
    """

    def rounded(model: Any) -> Any:
        other = copy.deepcopy(model)
        kept = [module.weight for module in other.modules() if isinstance(module, torch.nn.Embedding)]
        linears = sum(isinstance(module, (torch.nn.Linear, Conv1D)) for module in other.modules())
        if 3 * linears < sum(each.dim() == 2 for each in other.parameters()):
            raise ValueError("most of its products are of modules of its own")
        for module in other.modules():
            is_linear = isinstance(module, torch.nn.Linear)
            if not (is_linear or isinstance(module, Conv1D)) or any(module.weight is each for each in kept):
                continue
            weight = module.weight.data if is_linear else module.weight.data.T
            width = size or weight.shape[1]
            if weight.shape[1] % width == 0:
                blocks = weight.unflatten(1, (-1, width))
                scale = (blocks.abs().amax(-1, keepdim=True) / levels).clamp_min(1e-12)
                weight.copy_(((blocks / scale).round() * scale).flatten(1))
        return other

    return rounded


_BATCHES = frozenset(("row by row", "batched", "one row", "of a batch"))  # of other sizes than the other program's
VARIANTS: dict[str, tuple[Callable[[Any], Any], Forward, Forward]] = {
    "bfloat16": (lambda model: copy.deepcopy(model).bfloat16(), forward, forward),
    "float16": (lambda model: copy.deepcopy(model).half(), forward, forward),
    "eager": (eager, forward, forward),
    "loaded": (loaded, forward, forward),
    "int8": (quantised(127, 0), forward, forward),
    "int4": (quantised(7, 16), forward, forward),
    "row by row": (lambda model: model, forward, row_by_row),
    "batched": (lambda model: model, row_by_row, forward),
    "one row": (lambda model: model, forward, one_row),
    "of a batch": (lambda model: model, one_row, forward),
    "cached": (lambda model: model, without_cache, with_cache),
    "uncached": (lambda model: model, with_cache, without_cache),
}


class Unable(Exception):
    """The model cannot be computed like that."""


def record(folder: Path, model: Any, run: Forward, inputs: Inputs) -> runs.Run:
    if not (folder / "a").exists():
        random.seed(0)
        torch.set_rng_state(_seeded().get_state())
        try:
            with torch.no_grad(), intercept(runs.RunRecorder(folder / "a", tensors="full"), ops="all"):
                run(model, inputs)
        except Exception as error:
            raise Unable(repr(error)[:100]) from error
    return runs.open_run(folder / "a")


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def compared(kind: str, variants: list[str], folder: Path) -> Iterator[tuple[str, str, str]]:
    """For each variant its name, what became of it, and what was said."""
    torch.manual_seed(0)
    try:
        model = small(kind).eval()
        inputs = inputs_of(model)
        inputs.pop("labels")
        if model.config.is_encoder_decoder and "input_ids" in inputs:
            inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)
        elif model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(3, 50, (2, 6))
    except Exception as error:
        yield "model", "skipped", repr(error)[:100]
        return
    for variant in variants:
        make, one, other = VARIANTS[variant]
        if variant == "eager" and not getattr(model, "_supports_sdpa", False):
            continue
        if "cached" in variant and (inputs.keys() != {"input_ids"} or not hasattr(model, "generate")):
            continue
        try:
            a = record(folder / one.__name__, model, one, inputs)
            try:
                changed = make(model)
            except Exception as error:
                raise Unable(repr(error)[:100]) from error
            b = record(folder / variant, changed, other, inputs)
            if variant in _BATCHES and not torch.equal(torch.get_rng_state(), _seeded().get_state()):
                raise Unable("it draws random numbers, which are others for each batch")
        except Unable as error:
            yield variant, "skipped", str(error)
            continue
        began = time.process_time()
        try:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            answer = runs.why(a, b)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            yield variant, "failed", f"{error!r:.200} at {Path(last.filename).name}:{last.lineno}"
            continue
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        outcome = {"difference": "accused", "not compared": "not compared"}.get(answer.verdict, "right")
        spent = time.process_time() - began
        causes = " | ".join(f"{each.place} [{each.place.op}] {each.what}" for each in answer.causes[:2])
        said = f"{answer.verdict}: {causes or answer.sentence:.300} ({spent:.1f} s)"
        yield variant, outcome, said


def _late(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="types of models, all by default")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--part", default="1/1", help="2/8 is the second of every eight")
    parser.add_argument("-v", action="store_true", help="print pairs without failure too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    logs: Any = transformers.utils.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    signal.signal(signal.SIGPROF, _late)
    place, count = map(int, options.part.split("/"))
    totals: Counter[str] = Counter()
    for kind in (options.names or kinds())[place - 1 :: count]:
        before = totals.total() - totals["skipped"]
        with tempfile.TemporaryDirectory() as folder:
            for variant, outcome, said in compared(kind, options.variants, Path(folder)):
                totals[outcome] += 1
                if outcome != "right" or options.v:
                    print(f"{outcome}: {kind}, {variant}: {said}", flush=True)
        totals["models"] += totals.total() - totals["skipped"] > before
    models = totals.pop("models", 0)
    print(f"{models} models:", ", ".join(f"{count} {outcome}" for outcome, count in sorted(totals.items())))


if __name__ == "__main__":
    main()
