"""For tests of `RunRecorder`: reading runs back, and running programs in other processes."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python
from torch import Tensor

from opintercept import intercept
from opintercept.runs import Run, RunRecorder, open_run
from opintercept.runs.record import writer
from opintercept.runs.store.codec import StoredCall

ALL = ("none", "stats", "sample", "full")


def calls_of(path: Path) -> list[StoredCall]:
    return list(open_run(path).calls())


def tensor_of(run: Run, call: StoredCall, role: str = "lhs") -> Tensor:
    tensor = run.tensor(call, role)
    assert tensor is not None
    return tensor


def record(path: Path, tensors: Any = "stats", **options: Any) -> None:
    """Record one product."""
    with intercept(RunRecorder(path, tensors, **options)):
        torch.eye(2) @ torch.eye(2)


def run_of(path: Path, program: Callable[[], object], tensors: Any = "stats", *hooks: Any, **options: Any) -> Run:
    """The run of a program, which further hooks may change."""
    with intercept([*hooks, RunRecorder(path, tensors)], **options):
        program()
    return open_run(path)


def no_writer() -> bool:
    return not any(isinstance(thread, writer.Writer) for thread in threading.enumerate())


def same(one: Tensor, other: Tensor) -> bool:
    """Compare bit by bit, whatever the strides."""
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def raw(tensor: Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def run_script(code: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    head = "import os, sys, time, torch\nfrom opintercept import hooks, intercept, runs\n"
    done = run_python("-c", head + code)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def run_forked(program: Callable[[], Any]) -> int:
    """Run a program in a forked child, and return the exit status as a shell has it.

    What a child writes to stderr is shown if it crashes.
    """
    with tempfile.TemporaryFile() as errors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks beside threads
            child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(errors.fileno(), 2)
                faulthandler.enable(2)
                gc.freeze()  # what frees the parent's garbage may wait for threads that a child does not have
                program()
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            except KeyboardInterrupt:
                status = 130
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if -status in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS):
            errors.seek(0)
            print(errors.read().decode(errors="replace"))
    return status


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


TABLES = ["calls.bin", "run.json", "signatures.jsonl", "sites.jsonl", "tensors.bin", "texts.jsonl"]
FILES = [*TABLES[:5], "tensors/00000000.safetensors", TABLES[5]]
