"""`opintercept run`: an unmodified program, watched.

Invariant: what the program prints, raises, reads and returns is what it is without us; we write to standard error.
Imports torch when the program does, right after it: what the program sets before that counts.
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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, get_args

from opintercept._errors import OpInterceptError, OpInterceptWarning
from opintercept._record import Phase
from opintercept._text import amount, duration, printable
from opintercept.cli import UNUSABLE, count, size, steps
from opintercept.cli._program import after_import, prepare
from opintercept.runs.store import INFO, Kept

if TYPE_CHECKING:
    from opintercept._call import OpCall
    from opintercept.hooks import NonFinite
    from opintercept.runs import RunRecorder

_HOOKS = ("profile", "nonfinite", "stats", "reference", "print")
_PROGRESS_SECONDS = 0.25
_CHILDREN = "processes that it starts are not watched, but each of those that torchrun starts with this command is"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "%(prog)s [options] script.py [argument ...]\n       %(prog)s [options] -m module [argument ...]"
    parser.add_argument("-m", dest="module_name", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument(
        "--out", metavar="FOLDER", help="record the run in this new folder; needs --overwrite for an old one"
    )
    parser.add_argument(
        "--tensors",
        choices=get_args(Kept),
        help="what to record of tensors: nothing, statistics and a hash, some values, all values (default stats)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in FOLDER")
    parser.add_argument(
        "--flight", metavar="N", type=count, help="record only the last N calls, and these only if the program fails"
    )
    parser.add_argument(
        "--every", metavar="N", type=count, help="record every Nth step only, the first of --steps and so on"
    )
    parser.add_argument(
        "--max-bytes", metavar="SIZE", type=size, help="stop recording before the folder takes more: 500k, 64M, 2G"
    )
    parser.add_argument(
        "--stop",
        action="store_true",
        help="stop the program, with exit status 1, at the call that makes the first NaN",
    )
    parser.add_argument(
        "--hooks",
        action="append",
        choices=_HOOKS,
        help="what to show at the end (default profile and nonfinite); repeat it for several",
    )
    parser.add_argument("--top", metavar="N", type=count, default=20, help="rows of each table to show (default 20)")
    parser.add_argument("-q", "--quiet", action="store_true", help="show nothing, neither progress nor tables")
    parser.add_argument(
        "--ops", default="matmul", help="matmul, all, or names with commas between them: mm,bmm (default matmul)"
    )
    parser.add_argument(
        "--level",
        choices=("dispatch", "function"),
        default="dispatch",
        help="what runs, or what is called (default dispatch)",
    )
    parser.add_argument(
        "--engine",
        choices=("auto", "kernel", "compiled", "mode"),
        default="auto",
        help="how operators are seen (default auto)",
    )
    parser.add_argument("--threads", choices=("all", "current"), help="default all, with the kernel engine")
    parser.add_argument("--module", metavar="GLOB", help="only calls in modules of such a name: 'encoder.*'")
    parser.add_argument("--phase", choices=get_args(Phase), help="only calls of this pass")
    parser.add_argument(
        "--steps", metavar="A:B", type=steps, help="only steps A to B - 1, from 0; an optimizer's step ends one"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def command(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return what runs the program."""
    if not arguments.program:
        raise OpInterceptError("run needs a program, got none; opintercept run script.py, or -m module")
    for name in ("tensors", "overwrite", "flight", "every", "max_bytes"):
        if getattr(arguments, name) and arguments.out is None:
            option = f"--{name.replace('_', '-')}"
            raise OpInterceptError(f"{option} is about a recording, got no --out FOLDER for one; add --out FOLDER")
    name, *rest = arguments.program
    if arguments.out is not None:
        arguments.out = os.path.abspath(arguments.out)  # the program may go elsewhere
    program = prepare(name, rest, module=arguments.module_name)
    watch = _Watch(arguments)

    def run() -> int:
        # The first that is registered is the last that runs: after the program's own, and its threads.
        atexit.register(watch.end)
        after_import("torch", watch.begin)
        try:
            program()
        except BaseException as error:
            watch.error = error
            raise
        finally:
            watch.clear_progress()
        return 0

    return run


class _Watch:
    """The interceptor of a program, from its import of torch until the interpreter ends."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.error: BaseException | None = None  # of the program
        self._arguments = arguments
        self._stderr = sys.stderr  # the program may put another in its place, for what it writes itself
        self._process = os.getpid()
        self._shown: dict[str, Any] = {}  # hooks by name
        self._tally: Any = None
        self._interceptor: Any = None
        self._recording: _Recording | None = None
        self._began = time.perf_counter()
        self._entered_by = 0
        self._rank, self._world_size = 0, 1

    def begin(self) -> None:
        """Enter the block; in the process that was started only, as with blocks in a program."""
        if os.getpid() != self._process:
            return
        try:
            self._interceptor = self._make()
            self._interceptor.__enter__()
        except (OpInterceptError, ImportError, OSError, TypeError, ValueError) as unusable:
            self._interceptor = None
            atexit.unregister(self.end)
            text = str(unusable).replace("pass overwrite=True", "add --overwrite")
            _write(self._stderr, f"opintercept run: {text}\n")
            raise SystemExit(UNUSABLE) from None
        self._entered_by = threading.get_ident()
        _count_steps(self._interceptor)

    def _make(self) -> Any:
        from opintercept import hooks, intercept, runs
        from opintercept.runs._ranks import rank_and_world_size

        chosen = self._arguments
        names = chosen.hooks or ([] if chosen.quiet else ["profile", "nonfinite"])
        make: dict[str, Callable[[], Any]] = {
            "profile": hooks.Profile,
            "nonfinite": lambda: hooks.NonFinite(action="record"),
            "stats": hooks.Stats,
            "reference": hooks.Reference,
            "print": lambda: hooks.Print(file=self._stderr),
        }
        self._shown = {name: make[name]() for name in dict.fromkeys(names)}
        self._rank, self._world_size = rank_and_world_size()
        visible = not chosen.quiet and self._rank == 0
        self._tally = _Tally(self._shown.get("nonfinite"), self._stderr, visible and self._stderr.isatty())
        watching: list[Any] = [*self._shown.values(), self._tally]
        if chosen.out is not None:
            recorder = runs.RunRecorder(
                chosen.out,
                tensors=chosen.tensors or "stats",
                overwrite=chosen.overwrite,
                flight=chosen.flight,
                max_bytes=chosen.max_bytes,
            )
            self._recording = _Recording(recorder)
            recording: Any = self._recording
            if chosen.every is not None:
                first, end = (chosen.steps.start, chosen.steps.stop) if chosen.steps else (0, sys.maxsize)
                recording = hooks.when(recording, steps=range(first, end, chosen.every))
            watching.append(recording)
        if chosen.stop:  # the last of them: the others have seen the call when it raises
            watching.append(_Stop(self._shown.get("nonfinite"), hooks.NonFinite(action="record")))
        filters = {"module": chosen.module, "phase": chosen.phase, "steps": chosen.steps}
        if any(value is not None for value in filters.values()):
            watching = [hooks.when(hook, **filters) for hook in watching]
        ops = chosen.ops if chosen.ops in ("matmul", "all") else chosen.ops.split(",")
        kernels = chosen.level == "dispatch" and chosen.engine != "mode" and ops != "all"
        return intercept(
            watching,
            ops=ops,
            level=chosen.level,
            engine=chosen.engine,
            threads=chosen.threads or ("all" if kernels else "current"),
            on_error="warn",  # a program must not end because somebody looks
        )

    def clear_progress(self) -> None:
        """Leave the line to who writes next."""
        if self._tally is not None:
            self._tally.clear()

    def end(self) -> None:
        """Leave the block, and say what was seen."""
        if os.getpid() != self._process:
            return  # forked, and on its way out as the program would be
        if self._interceptor is not None:
            self._leave()
        self.clear_progress()
        if self._arguments.quiet or self._rank != 0:
            return
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            sys.stdout.flush()  # what the program printed comes first
        _write(self._stderr, "".join(f"{line}\n" for line in self._report()))

    def _leave(self) -> None:
        error = self.error if self._failed else None
        try:
            if error is not None:
                raise error  # for hooks that ask whether the program has failed
        except BaseException:
            self._exit(error)
        else:
            self._exit(None)

    @property
    def _failed(self) -> bool:
        return self.error is not None and not (isinstance(self.error, SystemExit) and not self.error.code)

    def _exit(self, error: BaseException | None) -> None:
        if threading.get_ident() == self._entered_by:
            trace = None if error is None else error.__traceback__
            try:
                self._interceptor.__exit__(None if error is None else type(error), error, trace)
            except OpInterceptError:  # the program has not left blocks of its own
                pass
            except OpInterceptWarning as warning:  # for the program, warnings are errors
                _write(self._stderr, f"opintercept run: {warning}\n")
        else:  # it has imported torch in another thread
            from opintercept._blocks import force_out, open_blocks

            force_out(block for block in open_blocks() if block.watcher is self._interceptor.watcher)

    def _report(self) -> Iterator[str]:
        chosen, tally = self._arguments, self._tally
        if self._interceptor is None:
            yield f"opintercept: nothing to see, the program has not imported torch in its own process; {_CHILDREN}"
            return
        rank = f" by rank 0 of {self._world_size}" if self._world_size > 1 else ""
        none = "" if tally.calls or tally.failed else f"; {_CHILDREN}"
        yield f"opintercept: {tally}{rank}, {duration(tally.seconds)} in them{none}"
        for name, hook in self._shown.items():
            if name != "print" and tally.calls:
                yield from _shortened(hook, chosen.top)
        opaque = ", ".join(f"{name} x{times}" for name, times in self._interceptor.opaque.items())
        if opaque:
            yield f"opaque, seen but not into: {printable(opaque)}"
        if self._recording is not None:
            if self._recording.hook.calls:
                yield self._recording.took(time.perf_counter() - self._began)
            yield self._recorded()

    def _recorded(self) -> str:
        out, flight = self._arguments.out, self._arguments.flight
        if flight is not None and not (self._failed or os.path.exists(os.path.join(out, INFO))):
            return "nothing recorded: the program did not fail"
        return f"recorded in {printable(out)}; to look at it: opintercept show {printable(shlex.quote(out))}"


class _Recording:
    """A recorder, and the time for which the program waited for it."""

    reads = RunRecorder.reads

    def __init__(self, hook: RunRecorder) -> None:
        self.hook = hook
        self.enter = hook.enter
        self._seconds = 0.0

    def pre(self, call: OpCall) -> None:
        """Time it."""
        started = time.perf_counter()
        self.hook.pre(call)
        self._seconds += time.perf_counter() - started

    def post(self, call: OpCall) -> None:
        """Time it."""
        started = time.perf_counter()
        self.hook.post(call)
        self._seconds += time.perf_counter() - started

    def error(self, call: OpCall, exception: BaseException) -> None:
        """Time it."""
        started = time.perf_counter()
        self.hook.error(call, exception)
        self._seconds += time.perf_counter() - started

    def exit(self) -> None:
        """Time it: what is left is written now."""
        started = time.perf_counter()
        self.hook.exit()
        self._seconds += time.perf_counter() - started

    def took(self, total: float) -> str:
        """What the recording has cost."""
        calls = f"{self.hook.calls:,} {'call' if self.hook.calls == 1 else 'calls'}"
        share = f"{self._seconds / total:.0%} of {duration(total)}"
        return f"recording {calls} took {duration(self._seconds)}, {share}, and {amount(self.hook.nbytes, 'B')}"


class Stopped(BaseException):
    """The first NaN of a program that runs with `--stop`; no Exception, which a program may catch and go on."""


Stopped.__module__ = "opintercept"


class _Stop:
    """Raises in each thread that makes a call from the first finding on."""

    reads = NonFinite.reads

    def __init__(self, shown: NonFinite | None, own: NonFinite) -> None:
        self._nonfinite = shown or own
        self._own = None if shown is not None else own
        self._stopped: set[int] = set()

    def pre(self, call: OpCall) -> None:
        """Look, if no other hook does."""
        if self._own is not None:
            self._own.pre(call)

    def post(self, call: OpCall) -> None:
        """Look, and stop."""
        if self._own is not None:
            self._own.post(call)
        found, thread = self._nonfinite.findings, threading.get_ident()
        if found and thread not in self._stopped:
            self._stopped.add(thread)
            raise Stopped(str(found[0]))

    def error(self, call: OpCall, exception: BaseException) -> None:
        """Look, if no other hook does."""
        if self._own is not None:
            self._own.error(call, exception)


class _Tally:
    """Counts calls, and shows the count on a terminal while the program runs."""

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
        flops = call.summary.flops or 0  # worked out once for calls that look alike
        with self._lock:
            self.calls += 1
            self.flops += flops
            self.seconds += call.elapsed or 0.0
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _PROGRESS_SECONDS
            self._drawn = True
            _write(self._stderr, f"\r\x1b[Kopintercept: {self}")

    def error(self, call: OpCall, exception: BaseException) -> None:
        """Count a call that raised."""
        with self._lock:
            self.failed += 1

    def clear(self) -> None:
        """Take the line away."""
        if self._drawn:
            self._drawn = False
            _write(self._stderr, "\r\x1b[K")

    def __str__(self) -> str:
        text = f"{self.calls:,} {'call' if self.calls == 1 else 'calls'}, {amount(self.flops, 'FLOP')}"
        if self.failed:
            text += f", {self.failed:,} that raised"
        if self._nonfinite is not None:
            text += f", {len(self._nonfinite.findings) + self._nonfinite.passed_on:,} not finite"
        return text


def _write(stderr: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed, or a terminal that has gone
        stderr.write(text)
        stderr.flush()


def _shortened(hook: Any, top: int) -> Iterator[str]:
    """What a hook says, to so many rows."""
    head, rows = [], getattr(hook, "findings", None)
    if not rows:
        head, rows = str(hook).splitlines()[:1], str(hook).splitlines()[1:]
    for row in (*head, *rows[:top]):
        yield from map(printable, str(row).splitlines())
    if len(rows) > top:
        yield f"... and {len(rows) - top} more, which --top {len(rows)} shows"


def _count_steps(interceptor: Any) -> None:
    """Count a step whenever the optimizer that was the first to step has done so: one a batch, also for two of them."""
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
            interceptor.step()

    register_optimizer_step_post_hook(stepped)
