"""What `opintercept run` prints when the program has ended.

Must not import torch: a program may have ended before it did.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from opintercept._core.text import amount, counted, duration, printable
from opintercept.cli.build import worth_it
from opintercept.cli.run import children
from opintercept.cli.run.hooks import OPS, ChosenHooks
from opintercept.cli.terminal.style import styled
from opintercept.runs.store.run import INFO

if TYPE_CHECKING:
    from opintercept.hooks import NonFinite
    from opintercept.runs import RunRecorder

_CHILDREN = "child processes are not watched, except for the ranks of `torchrun -m opintercept run ...`"


def summary(hooks: ChosenHooks | None, failed: bool, file: TextIO) -> Iterator[str]:
    """Yield the lines, in the colours of the file. `failed` says whether the program ended with an error."""
    if hooks is None:
        yield f"opintercept: nothing to show, since the program did not import torch; {_CHILDREN}"
        return
    chosen, tally = hooks.arguments, hooks.tally
    rank = f" on rank 0 of {hooks.world_size}" if hooks.world_size > 1 else ""
    nothing = not (tally.calls or tally.failed)
    elsewhere = f"; {_CHILDREN}" if nothing or children.had_some() else ""
    yield f"opintercept: {tally}, {duration(tally.seconds)} in total{rank}{elsewhere}"
    for name, hook in hooks.shown.items():
        if name == "NonFinite" and not hook.findings:
            yield from _nothing_found(hooks, hook)
        elif name not in ("Print", "Log") and tally.calls:
            yield from _top(hook, chosen.limit, file)
    opaque = ", ".join(f"{name} x{times}" for name, times in hooks.blocks[0].opaque.items())
    if opaque:
        yield f"opaque (matmuls inside are not shown): {printable(opaque)}"
    if hooks.recorder is not None:
        yield _recorded(chosen, hooks.recorder, failed)
    if (chosen.engine, chosen.level) == ("auto", "dispatch"):
        yield from worth_it(tally.calls, time.monotonic() - hooks.began)


def _nothing_found(hooks: ChosenHooks, hook: NonFinite) -> Iterator[str]:
    """Say what was watched, and how to watch the rest: where no watched call made a NaN, another may have."""
    chosen = hooks.arguments
    filters = [f"--{name}" for name in ("module", "phase", "steps") if getattr(chosen, name) is not None]
    names = set((chosen.ops or OPS).split(","))
    whole = {"all"} <= names <= {"all", "-view"} and chosen.level == "dispatch" and not filters
    everything = whole or hooks.searches_all
    ops = "the functions that the program calls" if chosen.ops == "all" else (chosen.ops or OPS).replace(",", ", ")
    within = f" ({', '.join(filters)})" if filters else ""
    limits = "" if everything else f"; only {printable(ops)}{within} were watched"
    found, *discarded = str(hook).splitlines()
    yield found.partition(";")[0] + limits
    yield from discarded
    if not everything:
        start = "torchrun ... -m opintercept run" if hooks.world_size > 1 else "opintercept run"
        program = shlex.join([*["-m"] * chosen.module_name, *chosen.program])
        yield f"to watch every operator: {start} --stop --ops all {printable(program, 2000)}"


def _recorded(chosen: argparse.Namespace, recorder: RunRecorder, failed: bool) -> str:
    out, flight = chosen.out, chosen.flight
    if flight is not None and not (failed or os.path.exists(os.path.join(out, INFO))):
        return "nothing recorded: the program did not fail"
    what = f"{counted(recorder.calls, 'call')}, {amount(recorder.nbytes, 'B')}, in {printable(out)}"
    return f"recorded {what}; to look at it: opintercept show {printable(shlex.quote(out))}"


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
