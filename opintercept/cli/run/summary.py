"""What `opintercept run` prints of one process that has imported torch.

Must not import torch.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from opintercept._core.text import duration, printable
from opintercept.cli.run.hooks import OPS, ChosenHooks
from opintercept.cli.terminal.style import styled

if TYPE_CHECKING:
    from opintercept.hooks import NonFinite


def summary(hooks: ChosenHooks, file: TextIO, which: str = "", more: str = "") -> Iterator[str]:
    """Yield the lines, in the colours of the file. `which` says of a child which it is, and `more` ends the first."""
    chosen, tally = hooks.arguments, hooks.tally
    rank = f" on rank 0 of {hooks.world_size}" if hooks.world_size > 1 and not which else ""
    yield f"opintercept: {which}{tally}, {duration(tally.seconds)} in total{rank}{more}"
    for name, hook in hooks.shown.items():
        if name == "NonFinite" and not hook.findings:
            yield from itertools.islice(_nothing_found(hooks, hook), 1 if which else None)
        elif name == "Audit" or (name not in ("Print", "Log") and tally.calls):
            yield from _top(hook, chosen.limit, file)
    opaque = ", ".join(f"{name} x{times}" for name, times in hooks.blocks[0].opaque.items())
    if opaque:
        yield f"opaque (matmuls inside are not shown): {printable(opaque)}"


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
