"""`run_python`, with which other tests start programs: they run and end as in a new Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import Program, for_torchrun, run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

PROGRAMS = {
    "text": "import sys; print(sys.argv, __name__, input()); print('b', file=sys.stderr)",
    "status": "import sys; sys.exit(3)",
    "message": "import sys; sys.exit('no data')",
    "at once": "import os; print('a', flush=True); os._exit(7)",
    "error": "def f():\n    1 / 0\nf()",
    "a hook of errors": "import sys\nsys.excepthook = lambda *e: print(e[:2])\n1 / 0",
    "interrupt": "def f():\n    raise KeyboardInterrupt\nf()",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "at exit": "import atexit, threading, time\natexit.register(print, 'last')\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('main')",
    "text of C": "import ctypes, sys; ctypes.CDLL(None).printf(b'c\\n'); sys.exit(5)",
    "finalizer": "class A:\n    def __del__(self):\n        print('gone')\na = A()",
    "handlers": "import signal; print(*map(signal.getsignal, (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE)))",
    "descriptors": "import numpy, torch, os; print(os.listdir('/dev/fd')[:-1], os.getcwd(), os.environ['GIVEN'])",
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("file", [False, True], ids=["text", "file"])
def test_a_program_runs_and_ends_as_in_a_new_python(name: str, file: bool, tmp_path: Path) -> None:
    arguments = ["-c", PROGRAMS[name]]
    if file:
        (tmp_path / "program.py").write_text(PROGRAMS[name])
        arguments = ["program.py"]
    environment = os.environ | {"GIVEN": "so"}
    arguments = [*arguments, "one", "two"]
    done = run_python(*arguments, cwd=tmp_path, env=environment, input="given\n")
    new = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=environment, input="given\n", capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (new.returncode, new.stdout)
    assert done.stderr == new.stderr


def test_torch_is_there_and_nothing_of_ours_is() -> None:
    code = "import sys; print('torch' in sys.modules, [name for name in sys.modules if 'opintercept' in name])"
    assert run_python("-c", code).stdout == "True []\n"


def test_a_program_that_does_not_end_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired, match=r"timed out after 0\.2 seconds"):
        run_python("-c", "import time; time.sleep(60)", timeout=0.2)


def test_programs_run_beside_each_other(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = Program(["-c", f"print(open({str(tmp_path / 'pipe')!r}).read())"])
    writer = Program(["-c", f"open({str(tmp_path / 'pipe')!r}, 'w').write('told')"])
    assert (writer.wait(), reader.wait(), reader.stdout) == (0, 0, "told\n")
    sleeper = Program(["-c", "import time; time.sleep(60)"])
    sleeper.kill()
    assert sleeper.wait() == -signal.SIGKILL


def test_what_torchrun_starts_ends_as_its_program(tmp_path: Path) -> None:
    python = for_torchrun(tmp_path)["PYTHON_EXEC"]
    for end, status in (("sys.exit(3)", 3), ("os.kill(os.getpid(), 15)", -15)):
        program = f"import os, sys; print(sys.argv, sys.stdin.read(), flush=True); {end}"
        done = subprocess.run([python, "-u", "-c", program, "x"], input="given", capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (status, "['-c', 'x'] given\n", "")
    waiting = "import time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([python, "-c", waiting], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"
        started.terminate()
        assert started.wait(60) == -signal.SIGTERM
