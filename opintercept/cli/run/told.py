"""What `opintercept run` prints when the program has ended: of the first process, and what its children have told.

A child leaves its summary in its folder when it ends; one without a summary was killed, or still runs.
Must not import torch: a program may have ended before it did.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from opintercept._core.errors import OpInterceptError
from opintercept._core.text import amount, counted, listed, printable
from opintercept.cli.build import worth_it
from opintercept.cli.run.family import Family, can_follow
from opintercept.cli.run.hooks import ChosenHooks
from opintercept.cli.run.summary import summary
from opintercept.runs.store.processes import SUMMARY
from opintercept.runs.store.run import child_folders, is_run, open_run

_WHOLE = 4  # children of which tables are printed, too
_NAMES = 8  # of children in one line
_IMPORT = (
    0.5  # seconds of a processor; importing torch takes longer, and a compiler's question for its version does not
)


class _Told(NamedTuple):
    """A child that has made a call."""

    name: str
    ended: bool
    calls: int
    not_finite: int
    lines: list[str]


def tell(folder: Path | None, hooks: ChosenHooks, file: TextIO) -> None:
    """Leave the summary of a child in its folder, if that is still there."""
    if folder is None:
        return
    lines = [] if hooks.arguments.quiet else [*summary(hooks, file, f"{folder.name}: ")]
    said = {"calls": hooks.tally.calls, "not_finite": hooks.tally.not_finite, "lines": lines}
    part = folder / f"{SUMMARY}.part"
    with contextlib.suppress(OSError):
        part.write_text(json.dumps(said), encoding="utf-8")
        part.replace(folder / SUMMARY)


def whole_summary(
    hooks: ChosenHooks | None, chosen: argparse.Namespace, family: Family | None, failed: bool, file: TextIO
) -> Iterator[str]:
    """Yield the lines, in the colours of the file. `failed` says whether the program ended with an error."""
    told = [] if family is None else sorted(_told(family), key=lambda child: (-child.not_finite, -child.calls))
    unseen = "" if told else _unseen(hooks, family)
    if hooks is not None:
        yield from summary(hooks, file, more=unseen)
    elif not told:
        yield f"opintercept: nothing to show, since the program did not import torch{unseen}"
    for child in told[: chosen.limit]:
        yield from child.lines[: None if len(told) <= _WHOLE else 1]
    if len(told) > chosen.limit:
        yield f"... and {len(told) - chosen.limit} more processes; --limit {len(told)} shows them"
    if lost := [child.name for child in told if not child.ended]:
        names = listed(list(map(printable, lost)), _NAMES)
        what = "did not end by itself, or still runs" if len(lost) == 1 else "did not end by themselves, or still run"
        yield f"{counted(len(lost), 'process')} {what}: {names}"
    if chosen.out is not None:
        yield from _recorded(hooks, chosen, failed, bool(told))
    if hooks is not None and (chosen.engine, chosen.level) == ("auto", "dispatch"):
        yield from worth_it(hooks.tally.calls, time.monotonic() - hooks.began)


def _told(family: Family) -> Iterator[_Told]:
    base = Path(family.folder)
    recorded = {entry.name for entry in child_folders(base)}
    with contextlib.suppress(OSError):
        for entry in sorted(base.iterdir()):
            try:
                said = json.loads((entry / SUMMARY).read_text(encoding="utf-8"))
                yield _Told(entry.name, True, said["calls"], said["not_finite"], said["lines"])
            except (OSError, ValueError, KeyError):
                if entry.name in recorded or (family.options["out"] is None and entry.is_dir()):
                    yield _Told(entry.name, False, 0, 0, [])


def _unseen(hooks: ChosenHooks | None, family: Family | None) -> str:
    """What to say of children where none has told of a call, but some may have made calls."""
    nothing = hooks is None or not (hooks.tally.calls or hooks.tally.failed)
    if family is not None and can_follow():
        which = "; child processes made no call, were not Python, or Python without opintercept"
        return which if nothing and _had_children() else ""
    why = "--no-children was given" if family is None else "opintercept.pth is not where Python looks for packages"
    return f"; child processes are not watched, since {why}" if nothing or _had_children() else ""


def _had_children() -> bool:
    """Whether the program has waited for children in which torch may have run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime >= _IMPORT


def _recorded(hooks: ChosenHooks | None, chosen: argparse.Namespace, failed: bool, several: bool) -> Iterator[str]:
    out, recorder = chosen.out, None if hooks is None else hooks.recorder
    if chosen.flight is not None and not (failed or is_run(out)):
        yield "nothing recorded: the program did not fail"
        return
    calls, nbytes, of = (0, 0, "") if recorder is None else (recorder.calls, recorder.nbytes, "")
    if several:
        with contextlib.suppress(OpInterceptError, ImportError):
            run = open_run(out)
            calls, of = sum(len(run.columns(rank)) for rank in run.ranks), f" of {counted(len(run.ranks), 'process')}"
            nbytes = sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(out) for name in names)
    elif recorder is None:
        return
    what = f"{counted(calls, 'call')}{of}, {amount(nbytes, 'B')}, in {printable(out)}"
    yield f"recorded {what}; to look at it: opintercept show {printable(shlex.quote(out))}"
