"""Output of commands: tables as wide as the terminal, JSON without NaN, one line for each warning.

Must not import torch.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opintercept._core.errors import OpInterceptWarning
from opintercept._core.tables import Cells, Marked, Part
from opintercept._core.text import printable
from opintercept.cli.terminal.layout import fitted
from opintercept.cli.terminal.progress import hide
from opintercept.cli.terminal.style import styled

if TYPE_CHECKING:
    from opintercept.runs import Answer, Difference, RankDifference
    from opintercept.runs.replay import Replay

    Result = Difference | RankDifference | Answer | Replay


@contextmanager
def plain_warnings(command: str) -> Iterator[None]:
    """Print each of our own warnings once, as one line on stderr and without our line of code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", OpInterceptWarning)
        # torch warns when it is imported without numpy, which no command needs from torch.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        show, printed = warnings.showwarning, set()

        def show_once(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, OpInterceptWarning):
                show(message, category, *where, **more)
            elif str(message) not in printed:  # reading a run twice repeats its warnings
                printed.add(str(message))
                hide()
                warning = styled("warning:", "warning", sys.stderr)
                print(f"opintercept {command}: {warning} {printable(str(message))}", file=sys.stderr)

        warnings.showwarning = show_once
        yield


@contextmanager
def safe_stdout() -> Iterator[None]:
    """Print to a stdout of any encoding, and stop quietly if its reader goes away."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack characters of a name
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the interpreter flushes stdout once more at exit, which must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def can_print(text: str) -> bool:
    """Whether the encoding of stdout has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def finite_json(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by None; tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    return [finite_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def print_parts(parts: Iterable[Part], limit: int | None = None) -> None:
    """Print lines, marked ones in colour, and tables of at most so many rows."""
    for part in parts:
        if isinstance(part, Cells):
            print(fitted(part, limit))
        else:
            print(styled(part, part.mark) if isinstance(part, Marked) else part)


def print_result(found: Result, as_json: bool, limit: int | None = None) -> int:
    """Print a result with tables of at most so many rows, or as JSON; return the exit status."""
    if as_json:
        print(json.dumps(finite_json(found.as_dict()), indent=1, allow_nan=False))
    else:
        print_parts(found.parts(), limit)
    return 0 if found.equal else 1
