"""`opintercept show`: what it counts, chooses and sorts, in three forms, also of a run that is out to harm."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opintercept import runs
from opintercept._call import CallRecord, Gemm, TensorMeta
from opintercept._errors import OpInterceptWarning
from opintercept.cli import main


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "float32", "cpu", shape, False)


def call(index: int, **changes: Any) -> dict[str, Any]:
    """Of modules 0 to 4 in turn, forward and backward in turn, ten a step; each takes a millisecond longer."""
    record = CallRecord(
        index=index,
        step=index // 10,
        op="aten::mm",
        func="aten.mm.default",
        phase="backward" if index % 2 else "forward",
        module=f"layers.{index % 5}",
        source="model.py:3 in forward",
        forward=None,
        grad_of=None,
        lhs=meta(4, 8),
        rhs=meta(8, 4),
        bias=None,
        output=meta(4, 4),
        gemm=Gemm(1, 4, 4, 8, ("float32", "float32"), (False, False)),
        flops=256,
        bytes=320,
        autocast=None,
        opaque=False,
        elapsed=1e-3 * (index + 1),
    )
    return record.as_dict() | {"values": {"output": values(index)}} | changes


def values(index: int, **changes: Any) -> dict[str, Any]:
    plain = {"hash": f"{index:016x}", "count": 16, "nan": 0, "inf": 0, "min": -1.0, "max": 1.0 * index}
    return plain | {"mean": 0.5, "rms": 1.5} | changes


def write(folder: Path, calls: Iterator[dict[str, Any]] | list[dict[str, Any]], **changes: Any) -> str:
    info = {
        "schema": 1,
        "argv": ["train.py", "--epochs", "1"],
        "started": "2026-01-02T03:04:05+0000",
        "finished": True,
        "tensors": "stats",
        "rank": 0,
        "world_size": 1,
        "versions": {"opintercept": "0.1.0", "torch": "2.13.0"},
        "devices": ["A card"],
        "flags": {"float32_matmul_precision": "high"},
    }
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(info | changes))
    with (folder / "calls.jsonl").open("w") as file:
        file.writelines(f"{json.dumps(call)}\n" for call in calls)
    return str(folder)


@pytest.fixture
def run(tmp_path: Path) -> str:
    calls = [call(index) for index in range(20)]
    calls[7]["values"]["output"] |= {"nan": 3, "inf": 1}
    calls[9] |= {"op": "aten::bmm", "error": "RuntimeError: no"}
    return write(tmp_path / "run", calls)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["show", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(shown(capsys, *arguments, "--csv"))))


def test_show_gives_an_overview_and_a_table_by_module(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, run, "--limit", "2").splitlines() == [
        f"run       {run}: finished",
        "started   2026-01-02T03:04:05+0000",
        "command   train.py --epochs 1",
        "versions  opintercept 0.1.0, torch 2.13.0",
        "devices   A card",
        "flags     float32_matmul_precision=high",
        "tensors   stats",
        "calls     20 calls, 5.12 kFLOP, 210.000 ms in them, 1 not finite, 1 that raised",
        "",
        "module    op  phase     calls  MFLOP     ms  share  GFLOP/s  not finite  min  max",
        "layers.3  mm  forward       2   0.00  28.00  13.3%     0.00           0   -1   18",
        "layers.2  mm  backward      2   0.00  26.00  12.4%     0.00           1   -1   17",
        "... and 9 rows more, which --limit all shows",
    ]


def test_groups_add_up(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = json.loads(shown(capsys, run, "--json"))
    total = plain["calls"]
    assert (total["calls"], total["flops"], total["nonfinite"], total["raised"]) == (20, 20 * 256, 1, 1)
    assert total["seconds"] == pytest.approx(0.21)
    for name in ("calls", "flops", "nonfinite", "raised"):
        assert sum(row[name] for row in plain["rows"]) == total[name]
    assert sum(row["share"] for row in plain["rows"]) == pytest.approx(1)
    (row,) = (
        row for row in plain["rows"] if (row["module"], row["op"], row["phase"]) == ("layers.2", "aten::mm", "forward")
    )
    assert (row["calls"], row["min"], row["max"]) == (2, -1.0, 12.0)
    assert row["seconds"] == pytest.approx(0.016)
    assert row["flops_per_second"] == pytest.approx(512 / 0.016)
    assert plain["run"]["ranks"]["0"]["argv"] == ["train.py", "--epochs", "1"]


@pytest.mark.parametrize(
    ("filters", "indexes"),
    [
        ([], [*range(20)]),
        (["--op", "bmm"], [9]),
        (["--op", "aten::bmm"], [9]),
        (["--op", "bmm", "--op", "mm", "--step", "1"], [*range(10, 20)]),
        (["--module", "layers.[12]"], [1, 2, 6, 7, 11, 12, 16, 17]),
        (["--module", "layers"], []),
        (["--phase", "backward", "--step", "1:"], [11, 13, 15, 17, 19]),
        (["--nonfinite"], [7]),
        (["--rank", "0", "--step", ":1", "--limit", "3"], [0, 1, 2]),
        (["--sort", "time", "--limit", "3"], [19, 18, 17]),
        (["--sort", "rate", "--limit", "2"], [0, 1]),
        (["--sort", "nonfinite", "--limit", "2"], [7, 0]),
        (["--sort", "max", "--limit", "2", "--phase", "forward"], [18, 16]),
        (["--sort", "index", "--limit", "2"], [0, 1]),
        (["--sort", "module", "--limit", "5"], [0, 5, 10, 15, 1]),
    ],
)
def test_filters_and_order_of_calls(
    filters: list[str], indexes: list[int], run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [int(row["index"]) for row in rows(capsys, run, "--calls", *filters)] == indexes
    plain = json.loads(shown(capsys, run, "--calls", *filters, "--json"))
    assert [row["index"] for row in plain["calls"]] == indexes
    table = shown(capsys, run, "--calls", *filters).splitlines()[1 : len(indexes) + 1]
    assert [int(line.split()[0]) for line in table] == indexes


def test_filters_of_groups_leave_the_total(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, run, "--op", "bmm")
    assert re.search("^calls     20 calls", text, re.MULTILINE)
    assert re.search("^chosen    1 call, 256 FLOP, 10.000 ms in them, 0 not finite, 1 that raised$", text, re.MULTILINE)
    assert text.splitlines()[-1].split() == [
        "layers.4",
        "bmm",
        "backward",
        "1",
        "0.00",
        "10.00",
        "100.0%",
        "0.00",
        "0",
        "-1",
        "9",
        "1",
    ]


@pytest.mark.parametrize(("sort", "first"), [("calls", "layers.0"), ("module", "layers.0"), ("nonfinite", "layers.2")])
def test_order_of_groups(sort: str, first: str, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(capsys, run, "--sort", sort)[0]["module"] == first


def test_keys_of_groups(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    by = rows(capsys, run, "--by", "step,shape,dtype,rank,source")
    assert [(row["step"], row["shape"], row["dtype"], row["rank"], row["calls"]) for row in by] == [
        ("1", "[4, 8] @ [8, 4]", "float32", "0", "10"),
        ("0", "[4, 8] @ [8, 4]", "float32", "0", "10"),
    ]


def test_ranks_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        calls = [call(index) for index in range(10 + rank)]
        write(tmp_path / "run" / f"rank{rank}", calls, rank=rank, world_size=3, finished=not rank)
    run = str(tmp_path / "run")
    text = shown(capsys, run)
    assert "run: not finished (ranks 1): it still runs, or was killed; 2 of 3 ranks" in text
    assert "calls     21 calls" in text
    assert len(rows(capsys, run, "--calls", "--rank", "1")) == 11
    assert shown(capsys, run, "--calls", "--sort", "time", "--limit", "1").splitlines()[1].split()[:2] == ["1", "10"]
    assert main(["show", run, "--rank", "2"]) == 2
    assert "--rank must be one of 0, 1, got 2" in capsys.readouterr().err


def test_a_run_without_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [call(index, values={}, flops=None) for index in range(3)]
    run = write(tmp_path / "run", calls, tensors="none", devices=[])
    text = shown(capsys, run)
    assert "devices   the CPU" in text
    assert "min" not in text
    assert text.splitlines()[-1].split()[:5] == ["layers.0", "mm", "forward", "1", "?"]
    assert main(["show", run, "--nonfinite"]) == 2
    assert "--nonfinite needs the statistics of tensors" in capsys.readouterr().err


def test_a_torn_line_is_told(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    with (Path(run) / "calls.jsonl").open("a") as file:
        file.write('{"index": 20, "op')
    with pytest.warns(OpInterceptWarning, match="has 1 lines that are no calls"):
        assert "calls     20 calls" in shown(capsys, run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "a run must be a folder with run.json"),
        ([".", "--calls", "--csv", "--sort", "time"], "a run must be a folder with run.json"),
    ],
)
def test_what_is_no_run_exits_with_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["show", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"opintercept show: {message}")


def test_sorted_calls_need_a_limit(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--csv"], ["--json"], ["--limit", "all"]):
        assert main(["show", run, "--calls", "--sort", "time", *arguments]) == 2
        assert "--sort of calls needs a --limit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by", "module,color"], "must be of module,op,phase,shape,dtype,step,rank,source, got 'color'"),
        (["--limit", "0"], "must be a whole number of at least 1, got '0'"),
        (["--step", "3:b"], "must be a step, or a range of steps as in 0:100, got '3:b'"),
        (["--json", "--csv"], "not allowed with argument"),
    ],
)
def test_bad_options_exit_with_2(
    arguments: list[str], message: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["show", run, *arguments])
    assert message in capsys.readouterr().err


EVIL = "a\x1b]0;owned\x07\r\n\u202e\ud800\x9b2Jé" + "x" * 5000


def test_nothing_that_steers_a_terminal_gets_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = call(0, module=EVIL, op=EVIL, source=EVIL, error=EVIL, func=EVIL, gemm=None)
    evil["lhs"]["dtype"] = EVIL
    run = write(
        tmp_path / "run",
        [evil, call(1, elapsed=math.nan), call(2, elapsed=math.inf), call(3, elapsed=-1e308, flops=2**63 - 1)],
        argv=[EVIL] * 3,
        started=EVIL,
        versions={EVIL: EVIL},
        devices=[EVIL],
        flags={EVIL: EVIL},
    )
    for form in ([], ["--csv"], ["--json"]):
        for what in ([], ["--calls"], ["--by", "source,dtype,shape,op"], ["--sort", "module"], ["--sort", "rate"]):
            text = shown(capsys, run, *form, *what)
            assert all(character.isprintable() or character == "\n" for character in text)
            if form == ["--json"]:
                json.loads(text, parse_constant=lambda name: pytest.fail(name))
            if not form:
                assert max(map(len, text.splitlines())) < 1000
    assert r"a\x1b]0;owned\x07\r\n\u202e?\x9b2Jé" in shown(capsys, run)


def test_numbers_that_are_none_sort_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [call(n, elapsed=e) for n, e in enumerate([math.nan, 1.0, None, math.inf, -math.inf])]
    run = write(tmp_path / "run", calls)
    assert [row["index"] for row in rows(capsys, run, "--calls", "--sort", "time", "--limit", "9")] == [*"31402"]
    assert shown(capsys, run).count("layers.") == 5


def test_groups_without_end_are_added_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opintercept.cli.show._GROUPS", 3)
    run = write(tmp_path / "run", [call(index, module=str(index)) for index in range(9)])
    assert {row["module"]: row["calls"] for row in rows(capsys, run)} == {"0": "1", "1": "1", "2": "1", "(others)": "6"}


@pytest.mark.parametrize(
    "arguments", [[], ["--calls", "--limit", "all"], ["--calls", "--sort", "time"], ["--calls", "--json"]]
)
def test_memory_is_flat(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for number in (10, 400, 800):  # the first is for what is kept once
        run = write(tmp_path / str(number), (call(index) for index in range(number)))
        tracemalloc.start()
        with Path("/dev/null").open("w") as nowhere, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", nowhere)
            assert main(["show", run, *arguments]) == 0
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # 400 more calls are 300 kB as text, and more as objects.
    assert peaks[2] - peaks[1] < 100_000


def test_show_leaves_torch_alone_and_a_reader_that_has_seen_enough(run: str) -> None:
    code = f"import sys; from opintercept.cli import main; main(['show', {run!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    with (Path(run) / "calls.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(call(index))}\n" for index in range(3000))
    show = subprocess.Popen(
        [sys.executable, "-m", "opintercept", "show", run, "--calls", "--limit", "all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert show.stdout is not None
    assert show.stdout.readline().startswith(b"index")
    show.stdout.close()
    assert show.stderr is not None
    assert show.stderr.read() == b""
    assert show.wait() == 0
    show.stderr.close()


def test_what_is_recorded_is_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from opintercept import hooks, intercept

    with intercept(hooks.RunRecorder(tmp_path / "run")):
        torch.nn.Linear(3, 2)(torch.full((4, 3), float("inf"))).sum().backward()
    plain = json.loads(shown(capsys, str(tmp_path / "run"), "--calls", "--json"))
    recorded = [c.record for c in runs.open_run(tmp_path / "run").calls()]
    assert [(c["op"], c["phase"], c["flops"]) for c in plain["calls"]] == [(r.op, r.phase, r.flops) for r in recorded]
    text = shown(capsys, str(tmp_path / "run"), "--nonfinite")
    assert f"{len(recorded)} not finite" in text
