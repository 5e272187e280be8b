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


def _decoder(alphabet: int, context: int, width: int = 96) -> torch.nn.Module:
    import torch
    from torch import nn

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(alphabet, width), nn.Embedding(context, width)
            block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            self.blocks = nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
            self.head = nn.Linear(width, alphabet)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            logits: torch.Tensor = self.head(self.blocks(x, mask, is_causal=True))
            return logits

    return Decoder()
