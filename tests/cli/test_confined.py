"""Commands that compute what another user has written do so in a process of their own, whatever becomes of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from opintercept import OpInterceptError, intercept, runs
from opintercept.cli import main
from opintercept.runs.replay import replay

CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
HANG = "import time; time.sleep(100)"
NO_ROOM = "from opintercept.runs.program import again\ndef run(*given): raise MemoryError('no room')\nagain.run = run"


def record(folder: Path) -> str:
    with intercept(runs.RunRecorder(folder, "full"), ops="all"):
        torch.ones(2, 3) @ torch.ones(3, 4)
    return str(folder)


def in_its_place(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process that has limits run this before anything else."""
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    (tmp_path / "sitecustomize.py").write_text(f"import os\nif 'OPINTERCEPT_CONFINED' in os.environ:\n{lines}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_an_untrusted_run_is_computed_with_the_same_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = record(tmp_path / "run")
    index = str(next(call.record.index for call in runs.open_run(path).calls() if call.record.op == "aten::mm"))
    assert main(["replay", path, index]) == 0
    here = capfd.readouterr().out.partition("\n")[2]
    assert "the same bit for bit" in here
    assert main(["replay", path, index, "--untrusted"]) == 0
    assert capfd.readouterr().out.partition("\n")[2] == here
    assert main(["replay", path, index, "--untrusted", "--dtype", "bfloat16", "--json"]) in (0, 1)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (CRASH, [], "was ended by SIGSEGV"),
        (HANG, ["--max-seconds", "1"], "took longer than 1 seconds; --max-seconds allows it more"),
        (NO_ROOM, [], "it needs more memory than --max-memory allows"),
    ],
    ids=["crash", "hang", "no room"],
)
def test_whatever_becomes_of_the_process_is_one_line(
    text: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = record(tmp_path / "run")
    in_its_place(text, tmp_path, monkeypatch)
    assert main(["replay", path, "0", "--untrusted", *options]) == 2
    said = capfd.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("opintercept replay: ")
    assert message in said.err


def test_a_run_of_another_user_is_not_computed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path / "run")
    monkeypatch.setattr(os, "getuid", lambda: 1 + os.stat(path).st_uid)
    run = runs.open_run(path)
    assert not run.trusted
    with pytest.raises(OpInterceptError, match=r"another user wrote the run: use the command line, .* trusted=True"):
        replay(run, 2)
    assert replay(runs.open_run(path, trusted=True), 2).equal
    in_its_place(CRASH, tmp_path, monkeypatch)
    for command in (["diff", path, path], ["replay", path, "2"]):
        assert main(command) == 2
        assert "SIGSEGV" in capfd.readouterr().err


def test_a_limit_that_torch_alone_exceeds_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["diff", "--untrusted", "--max-memory", "100M", str(tmp_path), str(tmp_path)])
    assert "must be at least 1G, since torch takes a part of it, got '100M'" in capsys.readouterr().err
