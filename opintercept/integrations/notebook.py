"""The cell magic `%%intercept` for IPython and Jupyter. Must not import IPython before a shell asks for the magic."""

from __future__ import annotations

from functools import partial
from typing import Any

from opintercept import hooks
from opintercept._blocks.intercept import intercept


def add_magic(shell: Any) -> None:
    """Add `%%intercept` to a shell.

    `%%intercept Stats("lhs"), NonFinite()` runs the cell in a block with these hooks and shows them, as tables if they
    have one. The names of `opintercept.hooks` and those of the notebook are known. Without hooks it shows a `Profile`.
    """
    shell.register_magic_function(partial(_run, shell), magic_kind="cell", magic_name="intercept")


def _run(shell: Any, line: str, cell: str) -> None:
    from IPython.display import display

    names = {name: getattr(hooks, name) for name in hooks.__all__} | shell.user_ns
    given = eval(line, names) if line.strip() else hooks.Profile()
    every = given if isinstance(given, (list, tuple)) else [given]
    with intercept(every):
        shell.run_cell(cell)  # shows what the cell raises
    display(*every)  # type: ignore[no-untyped-call]
