"""Small trainings with the `Trainer` of transformers and that of Lightning, which tests compare with and without hooks.

Run as a program, it trains on the ranks of a process group: `trainings.py transformers FOLDER`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"


class Sums(nn.Module):
    """Learns the sums of its inputs, and raises in the call with the number `fails`."""

    def __init__(self, fails: int | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.calls, self.fails = 0, fails

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls == self.fails:
            raise ZeroDivisionError("the model fails")
        found = self.last(self.first(x).relu())
        return {"loss": (found - x.sum(1, keepdim=True)).square().mean(), "logits": found}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """24 rows of random numbers."""

    def __init__(self) -> None:
        self.rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"x": self.rows[place], "labels": self.rows[place, :1]}


def transformers_trainer(folder: Path, fails: int | None = None, **arguments: Any) -> Any:
    """A trainer of six steps of two batches each, with a checkpoint and an evaluation after the third."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    settings = TrainingArguments(str(folder), **given | arguments)
    return Trainer(Sums(fails), settings, train_dataset=Rows(), eval_dataset=Rows())


def transformers_losses(trainer: Any) -> list[float]:
    """The losses that a trainer has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def lightning_model(fails: int | None = None) -> Any:
    """A model with its losses in `losses`."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Sums(fails)
            self.losses: list[float] = []

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            self.net(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    return Module()


def lightning_fit(
    folder: Path, callback: Any = None, fails: int | None = None, epochs: int = 1, **arguments: Any
) -> tuple[Any, Any]:
    """Train for some epochs of three steps, each of two batches; return the trainer and the model.

    Each epoch ends with a validation and a checkpoint.
    """
    from lightning.pytorch import Trainer

    checkpoint = arguments.pop("checkpoint", None)
    model = lightning_model(fails)
    given: dict[str, Any] = {
        "max_epochs": epochs,
        "accumulate_grad_batches": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(default_root_dir=folder, callbacks=[callback] if callback else [], **given | arguments)
    data = torch.utils.data.DataLoader(Rows(), batch_size=4)
    trainer.fit(model, data, data, ckpt_path=checkpoint)
    return trainer, model


def _transformers(folder: Path) -> None:
    from opintercept.integrations.transformers import InterceptCallback

    trainer = transformers_trainer(folder / "out", save_strategy="no", eval_strategy="no", ddp_backend="gloo")
    trainer.add_callback(InterceptCallback(trainer, run=folder / "runs"))
    trainer.train()


def _lightning(folder: Path) -> None:
    from opintercept.integrations.lightning import InterceptCallback

    lightning_fit(
        folder / "out", InterceptCallback(run=folder / "runs"), strategy="ddp", devices=2, enable_checkpointing=False
    )


def on_two_ranks(program: str, folder: Path) -> None:
    """Run one of `PROGRAMS` on two ranks."""
    from processes import run_ranks

    run_ranks(__file__, program, folder, timeout=200)


PROGRAMS: dict[str, Callable[[Path], None]] = {"transformers": _transformers, "lightning": _lightning}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]))
