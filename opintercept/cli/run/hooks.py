"""`ChosenHooks`: the hooks of `opintercept run`, and the blocks that they watch in.

Invariant: a hook that raises does not end the program, except for `--stop`.
Imports torch in functions only, which run after the program has imported it.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from opintercept.cli.run.member import Member
from opintercept.cli.run.tally import Tally

if TYPE_CHECKING:
    from opintercept._core.call import OpCall
    from opintercept.hooks.nonfinite import Finding
    from opintercept.runs import RunRecorder

OPS = "matmul,convolution"
HOOKS = (
    *("Profile", "NonFinite", "Stats", "Reference", "Checksum", "Replicas", "Experts", "Gradients", "AttentionWeights"),
    *("Capture", "Recorder", "Print", "Log", "FakeQuantize", "BitFlip", "Audit"),
)
"""The ready-made hooks that need no arguments."""


class ChosenHooks:
    """What the options ask for; `stop` is what `--stop` does with a finding.

    Attributes:
        shown: The hooks whose results are printed, by the names of their classes.
        blocks: One for what `--ops` names, and where that is cheap one that searches all operators for NaN.
        searches_all: Whether there is such a second block.
        began: When they were made, as `time.monotonic` counts.
    """

    def __init__(
        self, arguments: argparse.Namespace, stderr: TextIO, stop: Callable[[Finding], None], member: Member
    ) -> None:
        from opintercept import hooks
        from opintercept._engines.choose import choose
        from opintercept._ranks.rank import rank_and_world_size

        every_thread = choose(arguments.level, arguments.engine, "current").every_thread
        self._threads: Any = arguments.threads or ("all" if every_thread else "current")
        names = arguments.hooks or ([] if arguments.quiet else ["Profile", "NonFinite"])
        options: dict[str, dict[str, Any]] = {
            "NonFinite": {"action": stop if arguments.stop else "record"},
            "Checksum": {"action": "record"},
            "Replicas": {"action": "record"},
            "Print": {"file": stderr},
            "Audit": {"threads": self._threads, "steps": arguments.steps},
        }
        self.rank, self.world_size = rank_and_world_size()
        self.shown: dict[str, Any] = {name: getattr(hooks, name)(**options.get(name, {})) for name in names}
        search = self.shown.get("NonFinite")
        self._search = hooks.NonFinite(**options["NonFinite"]) if search is None and arguments.stop else search
        shows = not arguments.quiet and self.rank == 0 and not member.child
        self.tally = Tally(self._search, stderr, shows)
        self._member = member
        self.recorder: RunRecorder | None = None
        self.searches_all = False
        self.arguments = arguments
        self.began = time.monotonic()
        self.blocks = self._make_blocks()

    def _make_blocks(self) -> list[Any]:
        from opintercept import hooks, intercept
        from opintercept._engines.choose import choose

        chosen, search = self.arguments, self._search
        watching = [*(hook for hook in self.shown.values() if hook is not search), self.tally, *self._recorders()]
        filters = {"module": chosen.module, "phase": chosen.phase, "steps": chosen.steps}
        filtered = any(value is not None for value in filters.values())
        engine = choose(chosen.level, chosen.engine, "current")
        self.searches_all = chosen.ops is None and not filtered and engine.name == "compiled"
        both = [(watching, (chosen.ops or OPS).split(","))]
        if search is not None and self.searches_all:
            both.append(([search], ["all"]))
        elif search is not None:
            watching.append(search)  # last, so that the others see the call before this one raises
        return [
            intercept(
                [hooks.when(hook, **filters) for hook in watched] if filtered and not chosen.audit else watched,
                ops=ops,
                level=chosen.level,
                engine=chosen.engine,
                threads=self._threads,
                on_error="warn",  # a failing hook must not end the program
            )
            for watched, ops in both
        ]

    def _recorders(self) -> list[Any]:
        """The recorder, in the steps that are recorded."""
        from opintercept import hooks, runs

        chosen = self.arguments
        if chosen.out is None:
            return []
        self.recorder = runs.RunRecorder(
            chosen.out,
            tensors=chosen.tensors or "stats",
            overwrite=chosen.overwrite and self.world_size > 1,  # otherwise `make_room` has removed the run
            flight=chosen.flight,
            max_bytes=chosen.max_bytes,
            member=self._member,
        )
        if chosen.every_steps is None:
            return [self.recorder]
        first, end = (chosen.steps.start, chosen.steps.stop) if chosen.steps else (0, sys.maxsize)
        return [hooks.when(self.recorder, steps=range(first, end, chosen.every_steps))]


class Stopped(BaseException):
    """Ends a program that runs with `--stop`. Not an Exception, which the program might catch."""


Stopped.__module__ = "opintercept"


class Stop:
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
