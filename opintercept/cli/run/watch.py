"""`ProgramWatch`: enters the blocks of `opintercept run` when the program imports torch, and leaves them at its exit.

Invariant: nothing here changes how the program ends, except for `--stop`.
Imports torch in functions only, which run after the program has imported it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

# `exits` comes before `end` is registered, so that `end` runs before it and leaves these blocks with their error.
from opintercept._core import exits  # noqa: F401
from opintercept._core.errors import OpInterceptError, OpInterceptWarning
from opintercept.cli import UNUSABLE
from opintercept.cli.run.hooks import ChosenHooks, Stop
from opintercept.cli.run.summary import summary
from opintercept.cli.terminal.progress import write
from opintercept.runs.store.run import INFO

if TYPE_CHECKING:
    from opintercept.hooks.nonfinite import Finding


class ProgramWatch:
    """The blocks of a program, from its import of torch until the interpreter exits.

    Attributes:
        error: What ended the program.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.error: BaseException | None = None
        self._arguments = arguments
        self._hooks: ChosenHooks | None = None  # until the program imports torch
        self._entered: list[Any] = []  # blocks, in this order
        self._stderr = sys.stderr  # the program may replace sys.stderr
        self._process = os.getpid()
        self._entered_by = 0

    def begin(self) -> None:
        """Enter the block, unless this is a forked child."""
        if os.getpid() != self._process:
            return
        self._entered_by = threading.get_ident()
        try:
            self._hooks = ChosenHooks(self._arguments, self._stderr, self._stop)
            for block in self._hooks.blocks:
                self._entered.append(block)
                block.__enter__()
        except (OpInterceptError, ImportError, OSError, TypeError, ValueError) as error:
            self._exit(None)
            atexit.unregister(self.end)
            text = str(error).replace("pass overwrite=True", "add --overwrite")
            write(self._stderr, f"opintercept run: {text}\n")
            raise SystemExit(UNUSABLE) from None
        if self._arguments.flight is None:
            self._hide_from_git()
        _count_steps(self._entered)

    def _hide_from_git(self) -> None:
        """Put a `.gitignore` into the folder of the run, if there is one: with `--flight`, only a failure makes it."""
        out = self._arguments.out
        if out is not None and any(os.path.exists(os.path.join(out, *rank, INFO)) for rank in ((), ("rank0",))):
            with contextlib.suppress(OSError), open(os.path.join(out, ".gitignore"), "x") as file:
                file.write("*\n")

    def _stop(self, finding: Finding) -> None:
        """End this thread at a finding, and each other thread at its next call."""
        stop = Stop(str(finding))
        self._entered[-1].register(stop)
        stop.post()

    def clear_progress(self) -> None:
        """Remove the line of progress."""
        if self._hooks is not None:
            self._hooks.tally.line.clear()

    def end(self) -> None:
        """Leave the block and print the summary."""
        if os.getpid() != self._process:
            return  # a forked child exits without a report
        if self._entered:
            self._leave()
            self._hide_from_git()
        self.clear_progress()
        if self._arguments.quiet or (self._hooks is not None and self._hooks.rank != 0):
            return
        with contextlib.suppress(AttributeError, OSError, ValueError):  # stdout is None or closed
            sys.stdout.flush()  # the program's output comes first
        write(self._stderr, "".join(f"{line}\n" for line in summary(self._hooks, self._failed, self._stderr)))

    def _leave(self) -> None:
        error = self.error if self._failed else None
        try:
            if error is not None:
                raise error  # so that hooks see the exception as the current one
        except BaseException:
            self._exit(error)
        else:
            self._exit(None)

    @property
    def _failed(self) -> bool:
        return self.error is not None and not (isinstance(self.error, SystemExit) and not self.error.code)

    def _exit(self, error: BaseException | None) -> None:
        if threading.get_ident() != self._entered_by:  # another thread imported torch
            from opintercept._blocks.blocks import force_out, open_blocks

            ours = [block.watcher for block in self._entered]
            force_out(block for block in open_blocks() if block.watcher in ours)
            return
        raised = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        for block in reversed(self._entered):
            try:
                block.__exit__(*raised)
            except OpInterceptError:  # the program has left blocks of its own open
                pass
            except OpInterceptWarning as warning:  # the program turns warnings into errors
                write(self._stderr, f"opintercept run: {warning}\n")


def _count_steps(blocks: list[Any]) -> None:
    """End a step after each step of the optimizer that steps first; further optimizers do not count."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first: Any = None

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal first
        if torch.compiler.is_compiling():
            return
        if first is None or first() is None:
            first = weakref.ref(optimizer)
        if first() is optimizer:
            for block in blocks:
                block.step()

    register_optimizer_step_post_hook(stepped)
