"""`opintercept demo`: trains a small Transformer on real text under `intercept`, in seconds and without a download."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from opintercept._core.tables import Cells
from opintercept.cli.build import worth_it
from opintercept.cli.options import count
from opintercept.cli.terminal.output import print_parts

if TYPE_CHECKING:
    import torch

_ROWS = 12  # of the table


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--steps", type=count, default=20, help="training steps (default 20)")


def command(arguments: argparse.Namespace) -> int:
    """Train a character-level Transformer on a source file of the standard library."""
    steps: int = arguments.steps
    import textwrap as text_source  # short, and part of every Python

    import torch

    from opintercept import hooks, intercept

    torch.manual_seed(0)
    with open(text_source.__file__, encoding="utf-8") as file:
        text = file.read()
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text])
    context, batch = 64, 16
    model = _decoder(len(alphabet), context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"A decoder of {parameters:,} parameters learns {text_source.__name__}.py ({len(text):,} characters).")
    print("The first matmuls, forward, and the first three backward:")

    profile = hooks.Profile()
    shown = [hooks.when(hooks.Print(), phase="forward", first=6), hooks.when(hooks.Print(), phase="backward", first=3)]
    started = time.perf_counter()
    with intercept([profile, *shown]) as interceptor:
        for step in range(steps):
            starts = torch.randint(len(data) - context - 1, (batch,))
            chunk = torch.stack([data[start : start + context + 1] for start in starts.tolist()])
            logits = model(chunk[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            interceptor.step()
            if step in (0, steps - 1):
                print(f"step {step:3}  loss {loss.item():.3f}")
    elapsed = time.perf_counter() - started
    print()
    for table in profile.parts():
        print_parts([table._replace(rows=table.rows[:_ROWS], notes=["..."])] if isinstance(table, Cells) else [table])
    whole = profile.by_module()[""]
    print(f"These matmuls are {whole.seconds / elapsed:.1%} of the {elapsed:.1f} s of training.")
    if opaque := ", ".join(f"{name} x{count}" for name, count in interceptor.opaque.items()):
        print(f"opaque (matmuls inside are not shown): {opaque}")
    print("\nNext, a program of your own: opintercept run train.py")
    for line in worth_it(whole.calls, elapsed):
        print(line)
    return 0


def _decoder(alphabet: int, context: int) -> torch.nn.Module:
    import torch
    from torch import nn

    class DecoderBlock(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # [b, s, 3 * width] -> three of [b, heads, s, width / heads]
            q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            hidden: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))
            return hidden

    class Decoder(nn.Module):
        def __init__(self, width: int = 96, depth: int = 3, heads: int = 4) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(alphabet, width), nn.Embedding(context, width)
            self.blocks = nn.Sequential(*(DecoderBlock(width, heads) for _ in range(depth)))
            self.head = nn.Linear(width, alphabet)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            logits: torch.Tensor = self.head(self.blocks(self.tokens(tokens) + self.places(places)))
            return logits

    return Decoder()
