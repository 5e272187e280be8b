"""That `opintercept run --no-children` says so, if the program had children that may have run torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import run_python

TOLD = "; child processes are not watched, since --no-children was given"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork"),
]
IMPORT = f"[{sys.executable!r}, '-c', 'import torch']"
BUSY = "import sys, time\nwhile time.process_time() < 0.6: pass\nprint(flush=True)\n"  # as long as such an import
LASTING = f"subprocess.Popen([{sys.executable!r}, '-c', {BUSY + 'sys.stdin.read()'!r}], stdin=-1, stdout=-1)"
WITH = {
    "forked": "if not (pid := os.fork()): os._exit(0)\nos.waitpid(pid, 0)",
    "forked by multiprocessing": "p = multiprocessing.get_context('fork').Process(target=int); p.start(); p.join()",
    "spawned": f"subprocess.run({IMPORT})",
    "still running": f"p = {LASTING}; p.stdout.readline()",
    "never waited for": f"p = {LASTING}; p.stdout.readline(); p.stdin.close(); p.stdout.read()",
}
WITHOUT = {
    "none": "",
    "short": "subprocess.run(['true']); os.system('true')",
    "a resource tracker": "from multiprocessing import resource_tracker; resource_tracker.ensure_running()",
}


def said(tmp_path: Path, code: str) -> str:
    program = tmp_path / "program.py"
    program.write_text(
        f"import multiprocessing, os, subprocess, time, torch\ntorch.ones(2, 3) @ torch.ones(3, 4)\n{code}\n"
    )
    done = run_python("-m", "opintercept", "run", "--no-children", program, check=True)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("opintercept: 1 call,")]
    return line


@pytest.mark.parametrize("how", WITH)
def test_children_that_may_have_run_torch_are_told(tmp_path: Path, how: str) -> None:
    assert said(tmp_path, WITH[how]).endswith(TOLD)


@pytest.mark.parametrize("how", WITHOUT)
def test_a_program_without_such_children_is_told_nothing(tmp_path: Path, how: str) -> None:
    assert TOLD not in said(tmp_path, WITHOUT[how])


def test_children_from_before_the_program_do_not_count(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import torch\ntorch.ones(2, 3) @ torch.ones(3, 4)\n")
    code = f"""
import os, subprocess, sys
subprocess.run([sys.executable, "-c", {BUSY!r}], check=True, stdout=subprocess.DEVNULL)
os.execv(sys.executable, [sys.executable, "-m", "opintercept", "run", "--no-children", {str(program)!r}])
"""
    done = run_python("-c", code, check=True)
    assert "opintercept: 1 call," in done.stderr
    assert TOLD not in done.stderr
