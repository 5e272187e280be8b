"""`Family`: what the processes of a program that `opintercept run` watches know of each other, from the environment.

Invariant: the environment has one variable more, which nothing but `opintercept.pth` reads, and nothing is wrapped.
Must not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import site
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from opintercept._core.errors import OpInterceptError
from opintercept._core.version import __version__
from opintercept.runs.record.claim import check_free
from opintercept.runs.store.processes import SUMMARY
from opintercept.runs.store.run import INFO, is_run

VARIABLE = "OPINTERCEPT_RUN"
"""As `opintercept.pth` has it."""


class Family(NamedTuple):
    """A program and its children."""

    program: str  # tells it from other programs
    folder: str  # where each child makes a folder: that of the run, or a temporary one
    pid: int  # of the process that began
    version: str  # of opintercept there, whose options may be others
    options: dict[str, Any]

    @classmethod
    def begin(cls, arguments: argparse.Namespace) -> Family:
        """Let the children of this process follow it."""
        folder = arguments.out or tempfile.mkdtemp(prefix="opintercept-")
        options = {name: value for name, value in vars(arguments).items() if name != "program"}
        if arguments.steps is not None:
            options["steps"] = [arguments.steps.start, arguments.steps.stop]
        family = cls(uuid.uuid4().hex[:16], folder, os.getpid(), __version__, options)
        os.environ[VARIABLE] = json.dumps(family._asdict())
        return family

    @classmethod
    def here(cls) -> Family | None:
        """That of this process, as the environment has it; None if something has changed that."""
        try:
            return cls(**json.loads(os.environ[VARIABLE]))
        except (KeyError, TypeError, ValueError):
            return None

    @staticmethod
    def leave() -> None:
        """Let no child of this process follow the family that this process may have been started in."""
        os.environ.pop(VARIABLE, None)

    def arguments(self) -> argparse.Namespace:
        """The options, as they were given to `opintercept run`."""
        steps = self.options["steps"]
        return argparse.Namespace(**self.options | {"program": sys.argv, "steps": steps and range(*steps)})

    def end(self) -> None:
        """Remove the temporary folder, or the folders of children that have recorded nothing, as with `--flight`."""
        if self.options["out"] is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        base = Path(self.folder)
        with contextlib.suppress(OSError):
            for folder in [entry for entry in base.iterdir() if entry.is_dir() and not (entry / INFO).exists()]:
                with contextlib.suppress(OSError):
                    (folder / SUMMARY).unlink(missing_ok=True)
                    folder.rmdir()  # unless it has other files
            base.rmdir()


def make_room(arguments: argparse.Namespace) -> None:
    """Refuse a folder that holds something, or remove the run in it, before any process of the program begins.

    Each rank of `torchrun -m opintercept run` has a folder of its own, and its recorder sees to that.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        return
    folder = Path(arguments.out)
    try:
        check_free(folder, overwrite=arguments.overwrite)
    except ValueError as error:
        raise OpInterceptError(str(error).replace("pass overwrite=True", "add --overwrite")) from None
    if is_run(folder):
        from opintercept.runs.record.writer import remove_run

        remove_run(folder)


def can_follow() -> bool:
    """Whether a Python that this process starts would find `opintercept.pth`."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return any(os.path.exists(os.path.join(folder, "opintercept.pth")) for folder in folders)
