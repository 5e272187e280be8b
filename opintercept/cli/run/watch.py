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
from typing import TYPE_CHECKING, Any

# `exits` comes before `end` is registered, so that `end` runs before it and leaves these blocks with their error.
from opintercept._core import exits  # noqa: F401
from opintercept._core.errors import OpInterceptError, OpInterceptWarning
from opintercept.cli import UNUSABLE
from opintercept.cli.run.exits import before_exit
from opintercept.cli.run.family import Family
from opintercept.cli.run.hooks import ChosenHooks, Stop
from opintercept.cli.run.member import Member
from opintercept.cli.run.steps import count_steps
from opintercept.cli.run.told import tell, whole_summary
from opintercept.cli.terminal.progress import write
from opintercept.runs.store.run import is_run

if TYPE_CHECKING:
    from opintercept.hooks.nonfinite import Finding


class ProgramWatch:
    """The blocks of one process, from its import of torch until the interpreter exits.

    Args:
        arguments: The options.
        family: The processes of the program; None to leave out its children.
        child: Whether another process has started this one.
        forked: Whether the process may end as forks of `multiprocessing` do.

    Attributes:
        error: What ended the program.
    """

    def __init__(
        self, arguments: argparse.Namespace, family: Family | None, *, child: bool = False, forked: bool = False
    ) -> None:
        self.error: BaseException | None = None
        self._arguments = arguments
        self._family = family
        self._member = Member(family, child=child)
        self._hooks: ChosenHooks | None = None  # until the program imports torch
        self._entered: list[Any] = []  # blocks, in this order
        self._stderr = sys.stderr  # the program may replace sys.stderr
        self._process = os.getpid()
        self._entered_by = 0
        self._forked = forked
        self._prepared = self._over = False

    def begin(self) -> None:
        """Enter the blocks. In a child, a failure to do so is told and ends nothing."""
        if os.getpid() != self._process:  # a forked child, before or after its parent has imported torch
            if self._family is None or self._over:
                return
            self._process, self._forked, self.error = os.getpid(), True, None
            self._member = Member(self._family, child=True)
        self._entered, self._entered_by = [], threading.get_ident()
        try:
            self._hooks = ChosenHooks(self._arguments, self._stderr, self._stop, self._member)
            from opintercept._blocks.blocks import of_programs

            for block in self._hooks.blocks:
                of_programs.add(block.watcher)
                self._entered.append(block)
                block.__enter__()
        except (OpInterceptError, ImportError, OSError, TypeError, ValueError) as error:
            self._exit(None)
            text = str(error).replace("pass overwrite=True", "add --overwrite")
            write(self._stderr, f"opintercept run: {text}\n")
            if self._member.child:
                self._entered, self._hooks = [], None
                return
            atexit.unregister(self.end)
            raise SystemExit(UNUSABLE) from None
        if self._member.child:
            self._hooks.tally.first = self._called
        elif self._arguments.flight is None:
            self._hide_from_git()
        if not self._prepared:
            self._prepared = True
            os.register_at_fork(after_in_child=self.begin)
            count_steps(lambda: self._entered)

    def _called(self) -> None:
        """Make the folder of a child, at its first call."""
        if self._member.folder() is not None and self._forked:
            before_exit(self.end)

    def _hide_from_git(self) -> None:
        """Put a `.gitignore` into the folder of the run, if there is one: with `--flight`, only a failure makes it."""
        out = self._arguments.out
        if out is not None and is_run(out):
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
        """Leave the blocks. The first process prints the summary, and a child leaves its own for that."""
        if os.getpid() != self._process or self._over:
            return
        self._over = True
        if self._member.child:
            # That of a `Process` is on its way, and that of a program was printed.
            self.error = sys.exception() or getattr(sys, "last_value", None)
        if self._entered:
            self._leave()
        self.clear_progress()
        if self._member.child:
            if self._hooks is not None and (self._hooks.tally.calls or self._hooks.tally.failed):
                tell(self._member.folder(), self._hooks, self._stderr)
            if self._family is None or self._family.pid != self._process:
                return
            self._hooks = None  # `os.exec` has put this program in the place of the first one
        self._hide_from_git()
        if not self._arguments.quiet and (self._hooks is None or self._hooks.rank == 0):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # stdout is None or closed
                sys.stdout.flush()  # the program's output comes first
            lines = whole_summary(self._hooks, self._arguments, self._family, self._failed, self._stderr)
            write(self._stderr, "".join(f"{line}\n" for line in lines))
        if self._family is not None:
            self._family.end()

    def _leave(self) -> None:
        error = self.error if self._failed else None
        try:
            if error is not None and error is not sys.exception():
                raise error  # so that hooks see the exception as the current one
        except BaseException:
            self._exit(error)
        else:
            self._exit(error)
        from opintercept._engines.scope import let_threads_end

        let_threads_end()  # the thread that has written a run, too: this is the last that runs before Python shuts down

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
        while self._entered:
            block = self._entered.pop()
            try:
                block.__exit__(*raised)
            except OpInterceptError:  # the program has left blocks of its own open
                pass
            except OpInterceptWarning as warning:  # the program turns warnings into errors
                write(self._stderr, f"opintercept run: {warning}\n")
