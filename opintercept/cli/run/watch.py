"""`ProgramWatch`: the interceptor and hooks of `opintercept run`, and what it prints at the end.

Invariant: nothing here changes how the program ends, except for `--stop`.
Imports torch in functions only, which run after the program has imported it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import shlex
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from opintercept._core.errors import OpInterceptError, OpInterceptWarning
from opintercept._core.in_kernel import Work
from opintercept._core.text import amount, counted, duration, printable
from opintercept.cli import UNUSABLE
from opintercept.cli.build import worth_it
from opintercept.cli.terminal.style import styled
from opintercept.runs.store.run import INFO

if TYPE_CHECKING:
    from opintercept._core.call import OpCall
    from opintercept._core.record import PendingRecord
    from opintercept.hooks import NonFinite
    from opintercept.hooks.nonfinite import Finding
    from opintercept.runs import RunRecorder

OPS = "matmul,convolution"
HOOKS = (
    *("Profile", "NonFinite", "Stats", "Reference", "Checksum", "Replicas", "Experts", "Gradients", "AttentionWeights"),
    *("Capture", "Recorder", "Print", "Log", "FakeQuantize", "BitFlip"),
)
"""The ready-made hooks that need no arguments."""
_PROGRESS_SECONDS = 0.25
_CHILDREN = "child processes are not watched, except for the ranks of `torchrun -m opintercept run ...`"


class ProgramWatch:
    """The interceptor of a program, from its import of torch until the interpreter exits."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.error: BaseException | None = None  # what ended the program
        self._arguments = arguments
        self._stderr = sys.stderr  # the program may replace sys.stderr
        self._process = os.getpid()
        self._shown: dict[str, Any] = {}  # hooks by the names of their classes
        self._tally: Any = None
        self._blocks: list[Any] = []  # in the order in which they are entered
        self._searches_all = False  # whether one of them searches all operators for NaN
        self._recorder: RunRecorder | None = None
        self._entered_by, self._began = 0, 0.0
        self._rank, self._world_size = 0, 1

    def begin(self) -> None:
        """Enter the block, unless this is a forked child."""
        if os.getpid() != self._process:
            return
        self._entered_by, self._began = threading.get_ident(), time.monotonic()
        try:
            for block in self._make():
                self._blocks.append(block)
                block.__enter__()
        except (OpInterceptError, ImportError, OSError, TypeError, ValueError) as error:
            self._exit(None)
            atexit.unregister(self.end)
            text = str(error).replace("pass overwrite=True", "add --overwrite")
            _write(self._stderr, f"opintercept run: {text}\n")
            raise SystemExit(UNUSABLE) from None
        if self._arguments.flight is None:
            self._hide_from_git()
        _count_steps(self._blocks)

    def _hide_from_git(self) -> None:
        """Put a `.gitignore` into the folder of the run, if there is one: with `--flight`, only a failure makes it."""
        out = self._arguments.out
        if out is not None and any(os.path.exists(os.path.join(out, *rank, INFO)) for rank in ((), ("rank0",))):
            with contextlib.suppress(OSError), open(os.path.join(out, ".gitignore"), "x") as file:
                file.write("*\n")

    def _make(self) -> list[Any]:
        """The blocks: one for what `--ops` names, and where that is cheap one that searches all operators for NaN."""
        from opintercept import hooks, intercept
        from opintercept._engines.choose import choose

        chosen = self._arguments
        watching, search = self._hooks()
        filters = {"module": chosen.module, "phase": chosen.phase, "steps": chosen.steps}
        filtered = any(value is not None for value in filters.values())
        engine = choose(chosen.level, chosen.engine, "current")
        self._searches_all = chosen.ops is None and not filtered and engine.name == "compiled"
        both = [(watching, (chosen.ops or OPS).split(","))]
        if search is not None and self._searches_all:
            both.append(([search], ["all"]))
        elif search is not None:
            watching.append(search)  # last, so that the others see the call before this one raises
        return [
            intercept(
                [hooks.when(hook, **filters) for hook in watched] if filtered else watched,
                ops=ops,
                level=chosen.level,
                engine=chosen.engine,
                threads=chosen.threads or ("all" if engine.every_thread else "current"),
                on_error="warn",  # a failing hook must not end the program
            )
            for watched, ops in both
        ]

    def _hooks(self) -> tuple[list[Any], NonFinite | None]:
        """The hooks for what `--ops` names, and the one that searches for NaN."""
        from opintercept import hooks, runs
        from opintercept._ranks.rank import rank_and_world_size

        chosen = self._arguments
        names = chosen.hooks or ([] if chosen.quiet else ["Profile", "NonFinite"])
        options: dict[str, dict[str, Any]] = {
            "NonFinite": {"action": self._stop if chosen.stop else "record"},
            "Checksum": {"action": "record"},
            "Replicas": {"action": "record"},
            "Print": {"file": self._stderr},
        }
        self._shown = {name: getattr(hooks, name)(**options.get(name, {})) for name in dict.fromkeys(names)}
        search = self._shown.get("NonFinite") or (hooks.NonFinite(**options["NonFinite"]) if chosen.stop else None)
        self._rank, self._world_size = rank_and_world_size()
        visible = not chosen.quiet and self._rank == 0
        self._tally = _Tally(search, self._stderr, visible and self._stderr.isatty())
        watching: list[Any] = [*(hook for hook in self._shown.values() if hook is not search), self._tally]
        if chosen.out is not None:
            self._recorder = runs.RunRecorder(
                chosen.out,
                tensors=chosen.tensors or "stats",
                overwrite=chosen.overwrite,
                flight=chosen.flight,
                max_bytes=chosen.max_bytes,
            )
            watching.append(self._recorder)
            if chosen.every_steps is not None:
                first, end = (chosen.steps.start, chosen.steps.stop) if chosen.steps else (0, sys.maxsize)
                watching[-1] = hooks.when(self._recorder, steps=range(first, end, chosen.every_steps))
        return watching, search

    def _stop(self, finding: Finding) -> None:
        """End this thread at a finding, and each other thread at its next call."""
        stop = _Stop(str(finding))
        self._blocks[-1].register(stop)
        stop.post()

    def clear_progress(self) -> None:
        """Remove the line of progress."""
        if self._tally is not None:
            self._tally.clear()

    def end(self) -> None:
        """Leave the block and print the report."""
        if os.getpid() != self._process:
            return  # a forked child exits without a report
        if self._blocks:
            self._leave()
            self._hide_from_git()
        self.clear_progress()
        if self._arguments.quiet or self._rank != 0:
            return
        with contextlib.suppress(AttributeError, OSError, ValueError):  # stdout is None or closed
            sys.stdout.flush()  # the program's output comes first
        _write(self._stderr, "".join(f"{line}\n" for line in self._report()))

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

            ours = [block.watcher for block in self._blocks]
            force_out(block for block in open_blocks() if block.watcher in ours)
            return
        trace = None if error is None else error.__traceback__
        for block in reversed(self._blocks):
            try:
                block.__exit__(None if error is None else type(error), error, trace)
            except OpInterceptError:  # the program has left blocks of its own open
                pass
            except OpInterceptWarning as warning:  # the program turns warnings into errors
                _write(self._stderr, f"opintercept run: {warning}\n")

    def _report(self) -> Iterator[str]:
        chosen, tally = self._arguments, self._tally
        if not self._blocks:
            yield f"opintercept: nothing to show, since the program did not import torch; {_CHILDREN}"
            return
        rank = f" on rank 0 of {self._world_size}" if self._world_size > 1 else ""
        none = "" if tally.calls or tally.failed else f"; {_CHILDREN}"
        yield f"opintercept: {tally}, {duration(tally.seconds)} in total{rank}{none}"
        for name, hook in self._shown.items():
            if name == "NonFinite" and not hook.findings:
                yield from self._nothing_found(hook)
            elif name not in ("Print", "Log") and tally.calls:
                yield from _top(hook, chosen.limit, self._stderr)
        opaque = ", ".join(f"{name} x{times}" for name, times in self._blocks[0].opaque.items())
        if opaque:
            yield f"opaque (matmuls inside are not shown): {printable(opaque)}"
        if self._recorder is not None:
            yield self._recorded(self._recorder)
        if (chosen.engine, chosen.level) == ("auto", "dispatch"):
            yield from worth_it(tally.calls, time.monotonic() - self._began)

    def _nothing_found(self, hook: NonFinite) -> Iterator[str]:
        """Say what was watched, and how to watch the rest: where no watched call made a NaN, another may have."""
        chosen = self._arguments
        filters = [f"--{name}" for name in ("module", "phase", "steps") if getattr(chosen, name) is not None]
        names = set((chosen.ops or OPS).split(","))
        whole = {"all"} <= names <= {"all", "-view"} and chosen.level == "dispatch" and not filters
        everything = whole or self._searches_all
        ops = "the functions that the program calls" if chosen.ops == "all" else (chosen.ops or OPS).replace(",", ", ")
        within = f" ({', '.join(filters)})" if filters else ""
        limits = "" if everything else f"; only {printable(ops)}{within} were watched"
        found, *discarded = str(hook).splitlines()
        yield found.partition(";")[0] + limits
        yield from discarded
        if not everything:
            start = "torchrun ... -m opintercept run" if self._world_size > 1 else "opintercept run"
            program = shlex.join([*["-m"] * chosen.module_name, *chosen.program])
            yield f"to watch every operator: {start} --stop --ops all {printable(program, 2000)}"

    def _recorded(self, recorder: RunRecorder) -> str:
        out, flight = self._arguments.out, self._arguments.flight
        if flight is not None and not (self._failed or os.path.exists(os.path.join(out, INFO))):
            return "nothing recorded: the program did not fail"
        what = f"{counted(recorder.calls, 'call')}, {amount(recorder.nbytes, 'B')}, in {printable(out)}"
        return f"recorded {what}; to look at it: opintercept show {printable(shlex.quote(out))}"


class Stopped(BaseException):
    """Ends a program that runs with `--stop`. Not an Exception, which the program might catch."""


Stopped.__module__ = "opintercept"


class _Stop:
    """Raises once in each thread that makes a call."""

    reads = ()

    def __init__(self, finding: str) -> None:
        self._finding = finding
        self._stopped: set[int] = set()

    def post(self, call: OpCall | None = None) -> None:
        """End the running thread, unless it has been ended before."""
        thread = threading.get_ident()
        if thread not in self._stopped:
            self._stopped.add(thread)
            raise Stopped(self._finding)


class _Tally:
    """Counts calls, and shows the counts on a terminal while the program runs."""

    reads = ()

    def __init__(self, nonfinite: Any, stderr: TextIO, visible: bool) -> None:
        self.calls = 0
        self.failed = 0
        self.flops = 0
        self.seconds = 0.0
        self._lock = threading.RLock()
        self._nonfinite = nonfinite
        self._stderr = stderr
        self._due = time.monotonic() + _PROGRESS_SECONDS if visible else float("inf")
        self._drawn = False

    def post(self, call: OpCall) -> None:
        """Count the call."""
        self._add(self.learn(call), call.elapsed)

    def work(self) -> Work:
        """Kernels note the calls."""
        return Work()

    def learn(self, call: OpCall) -> int:
        """The floating-point operations of all calls that look like this one."""
        return call.summary.flops or 0

    def noted(self, note: PendingRecord, values: Any, learned: int) -> None:
        """Count a call that a kernel has noted."""
        self._add(learned, note.elapsed)

    def _add(self, flops: int, seconds: float | None) -> None:
        with self._lock:
            self.calls += 1
            self.flops += flops
            self.seconds += seconds or 0.0
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _PROGRESS_SECONDS
            self._drawn = True
            _write(self._stderr, f"\r\x1b[Kopintercept: {self}")

    def error(self, call: OpCall, exception: BaseException) -> None:
        """Count a call that raised."""
        with self._lock:
            self.failed += 1

    def clear(self) -> None:
        """Remove the line of progress."""
        if self._drawn:
            self._drawn = False
            _write(self._stderr, "\r\x1b[K")

    def __str__(self) -> str:
        text = f"{counted(self.calls, 'call')}, {amount(self.flops, 'FLOP')}"
        if self.failed:
            text += f", {self.failed:,} raised"
        if self._nonfinite is not None:
            search = self._nonfinite
            text += f", {len(search.findings) + search.passed_on + search.discarded:,} not finite"
        return text


def _write(stderr: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed, or the terminal is gone
        stderr.write(text)
        stderr.flush()


def _top(hook: Any, limit: int, file: TextIO) -> Iterator[str]:
    """Yield the first rows of a hook's table."""
    rows = getattr(hook, "findings", None) or []
    found = bool(rows)
    if not found:
        head, rows = str(hook).splitlines()[:1], str(hook).splitlines()[1:]
        yield from (styled(printable(line), "head", file) for line in head)
    for row in rows[:limit]:
        lines = list(map(printable, str(row).splitlines()))
        if lines and found:
            lines[0] = styled(lines[0], "wrong", file)
        yield from lines
    if len(rows) > limit:
        yield f"... and {len(rows) - limit} more; --limit {len(rows)} shows them"


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
