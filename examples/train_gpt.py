"""Trains a small GPT on a text, and records every matmul of the training.

    python examples/train_gpt.py runs/a
    python examples/train_gpt.py runs/b --round 1.attention
    opintercept show runs/a
    opintercept diff runs/a runs/b

The second training rounds the weights of one layer to bfloat16 before it begins. Its losses look the same, but `diff`
finds the layer. A training goes on from its checkpoint with `--resume`; its steps go on too, in a run of their own.
"""

from __future__ import annotations

import argparse
import pydoc
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import hooks, intercept, runs

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 2, 48, 8


class Block(nn.Module):
    """A layer of a Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layer computes to its input."""
        q, k, v = self.attention(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Predicts the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, codes: Tensor) -> Tensor:
        """The logits of the character after each one."""
        x = self.embedding(codes) + self.place(torch.arange(codes.shape[1], device=codes.device))
        return self.head(self.norm(self.layers(x)))


def main() -> None:
    """Train, record, and write a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of the run")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--round", metavar="LAYER", help="round this layer's weights, such as 1.attention, to bfloat16")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="go on from a checkpoint")
    arguments = parser.parse_args()

    text = Path(pydoc.__file__).read_text("utf-8")  # some text that every Python has
    characters = sorted(set(text))
    data = torch.tensor([characters.index(character) for character in text])
    torch.manual_seed(0)
    model = GPT(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    if arguments.resume:
        checkpoint = torch.load(arguments.resume)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["step"]
    if arguments.round:
        weight = model.layers.get_parameter(f"{arguments.round}.weight")
        with torch.no_grad():
            weight.copy_(weight.bfloat16())

    interceptor = intercept([runs.RunRecorder(arguments.run), hooks.NonFinite()])
    interceptor.step(first)
    with interceptor:
        for step in range(first, first + arguments.steps):
            starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
            codes = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
            loss = F.cross_entropy(model(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            interceptor.step()
            print(f"step {step}  loss {loss.item():.4f}")
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": first + arguments.steps}
    torch.save(checkpoint, arguments.run / "checkpoint.pt")


if __name__ == "__main__":
    main()
