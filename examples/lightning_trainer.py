"""Trains a classifier with Lightning, and watches it with a callback.

    python examples/lightning_trainer.py out
    python examples/lightning_trainer.py out --epochs 4 --resume

The training stops at the first NaN, with the module that made it. The spread of each layer's outputs goes to the
trainer's logger, here a CSV file, next to the loss. Each training has a run: `opintercept show out/runs/*`.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opintercept import hooks
from opintercept.integrations.lightning import InterceptCallback


class Classifier(LightningModule):
    """Tells whether a point is inside the unit ball."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, points: Tensor) -> Tensor:
        """The logit of each point."""
        return self.layers(points).squeeze(1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        # Calling `self`, and not `self.layers`, gives the layers their full names, such as layers.0.
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    """Train, or go on from the last checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder of checkpoints, logs and runs")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of eight steps in all")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    points = torch.randn(256, 3)
    data = DataLoader(TensorDataset(points, (points.norm(dim=1) < 1).float()), batch_size=32)
    checkpoints = ModelCheckpoint(arguments.out, filename="last", enable_version_counter=False)
    spread = partial(hooks.Scalars, values=["std"], every_steps=4)
    trainer = Trainer(
        max_epochs=arguments.epochs,
        logger=CSVLogger(arguments.out, "logs"),
        log_every_n_steps=1,
        callbacks=[checkpoints, InterceptCallback(hooks.NonFinite(), scalars=spread, run=arguments.out / "runs")],
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), data, ckpt_path=arguments.out / "last.ckpt" if arguments.resume else None)
    print(f"step {trainer.global_step}  loss {trainer.callback_metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
