"""How the source line of a call is shown, in a notebook too."""

from __future__ import annotations

import sys
import textwrap
import types

import pytest
import torch
from nets import record
from processes import run_python

CELLS = {
    "<stdin>": "<cell>",
    "<ipython-input-3-a1b2c3>": "<cell 3>",
    "/tmp/ipython-input-12-3456789.py": "<cell 12>",
    "/tmp/ipython-input-3456789.py": "<cell>",
    "/tmp/ipykernel_7/512345.py": "<cell>",
    "/home/me/ipykernel_tools/train.py": "train.py",
}


def source_in(file: str) -> str | None:
    code = compile("\n\ntorch.mm(torch.ones(2, 2), torch.ones(2, 2))", file, "exec")
    (call,) = record(lambda: exec(code, {"torch": torch}))
    return call.source


@pytest.mark.parametrize(("file", "shown"), CELLS.items())
def test_source_of_a_cell_has_its_number_where_the_name_of_its_code_has(file: str, shown: str) -> None:
    assert source_in(file) == f"{shown}:3 in <module>"


def test_source_of_a_cell_has_the_number_that_ipython_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = types.SimpleNamespace(_filename_map={"/tmp/ipykernel_7/512345.py": 4})
    shells = [types.SimpleNamespace(compile=compiler), None, types.SimpleNamespace()]
    shown = []
    for shell in shells:
        ipython = types.SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        shown.append((source_in("/tmp/ipykernel_7/512345.py"), source_in("/tmp/ipykernel_7/6.py")))
    assert shown == [
        ("<cell 4>:3 in <module>", "<cell>:3 in <module>"),
        ("<cell>:3 in <module>", "<cell>:3 in <module>"),
        ("<cell>:3 in <module>", "<cell>:3 in <module>"),
    ]


SHELL = """
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    for cell in (
        "import torch; from opintercept import hooks, intercept; recorder = hooks.Recorder()",
        "def f(x):\\n    return x @ x",
        "with intercept(recorder):\\n    f(torch.ones(2, 2))",
    ):
        shell.run_cell(cell, store_history=True).raise_error()
    (call,) = shell.user_ns["recorder"].records
    assert call.source == "<cell 2>:2 in f", call.source
"""


@pytest.mark.slow
def test_source_of_a_cell_in_a_real_shell() -> None:
    pytest.importorskip("IPython")
    done = run_python("-c", textwrap.dedent(SHELL))
    assert done.returncode == 0, done.stderr
