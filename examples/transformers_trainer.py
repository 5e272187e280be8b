"""Trains a small GPT-2 with the `Trainer` of transformers, and watches it with a callback.

    python examples/transformers_trainer.py out
    python examples/transformers_trainer.py out --steps 12 --resume

The training stops at the first NaN, with the module that made it. The spread of each layer's outputs goes to
TensorBoard, next to the loss: `tensorboard --logdir out/logs`. Each training has a run: `opintercept show out/runs/*`.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from opintercept import hooks
from opintercept.integrations.transformers import InterceptCallback


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Numbers that count up from some number on."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, start: int) -> dict[str, torch.Tensor]:
        codes = (start + torch.arange(32)) % 100
        return {"input_ids": codes, "labels": codes}


def main() -> None:
    """Train, or go on from the last checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder of checkpoints, logs and runs")
    parser.add_argument("--steps", type=int, default=6, help="steps of the optimizer in all")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    arguments = parser.parse_args()

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(arguments.out / "logs")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    settings = TrainingArguments(
        str(arguments.out),
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=3,
        report_to=["tensorboard"],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=Counting())

    spread = partial(hooks.Scalars, values=["std"], every_steps=2)
    trainer.add_callback(InterceptCallback(trainer, hooks.NonFinite(), scalars=spread, run=arguments.out / "runs"))

    trainer.train(resume_from_checkpoint=arguments.resume or None)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}  loss {entry['loss']:.4f}")


if __name__ == "__main__":
    main()
