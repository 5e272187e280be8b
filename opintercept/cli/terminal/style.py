"""Colours for the few lines that matter most.

Invariant: text that goes to a file or a pipe is plain. Must not import torch.
"""

from __future__ import annotations

import os
import sys
from typing import Literal, TextIO

_CODES = {"head": "1", "right": "32", "warning": "33", "wrong": "1;31"}
Style = Literal["head", "right", "warning", "wrong"]


def styled(text: str, style: Style, file: TextIO | None = None) -> str:
    """The line in bold or in a colour, if the file shows it; stdout by default."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if text and _shows(file or sys.stdout) else text


def _shows(file: TextIO) -> bool:
    """Whether a file shows colours, by the rules of Python's own traceback: https://no-color.org comes first."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    try:
        return os.environ.get("TERM") != "dumb" and file.isatty()
    except ValueError:  # closed
        return False
