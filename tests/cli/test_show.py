"""`opintercept show`: what it counts, filters and sorts, in three forms, also for a malicious run."""

from __future__ import annotations

import contextlib
import csv
import html
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from made_calls import meta, record
from made_runs import peak_memory, rewrite, stats, write_files

from opintercept import runs
from opintercept._core.gemm import Gemm
from opintercept.cli import main


def call(index: int, **changes: Any) -> dict[str, Any]:
    """A call: modules 0 to 4 take turns, so do the phases; a step has ten calls, each a millisecond longer."""
    made = record(
        index=index,
        step=index // 10,
        phase="backward" if index % 2 else "forward",
        module=f"layers.{index % 5}",
        source="model.py:3 in forward",
        lhs=meta(4, 8),
        rhs=meta(8, 4),
        output=meta(4, 4),
        gemm=Gemm(1, 4, 4, 8, ("float32", "float32"), (False, False)),
        flops=256,
        bytes=320,
        elapsed=1e-3 * (index + 1),
    )
    return made.as_dict() | {"values": {"output": values(index)}} | changes


def values(index: int, **changes: Any) -> dict[str, Any]:
    return stats(**{"hash": f"{index:016x}", "max": 1.0 * index, "mean": 0.5, "rms": 1.5} | changes)


def write(folder: Path, calls: Iterable[dict[str, Any]], **changes: Any) -> str:
    info = {
        "argv": ["train.py", "--epochs", "1"],
        "started": "2026-01-02T03:04:05+0000",
        "versions": {"opintercept": "0.1.0", "torch": "2.13.0"},
        "devices": ["A card"],
        "flags": {"float32_matmul_precision": "high"},
    }
    return str(write_files(folder, calls, **info | changes))


@pytest.fixture
def run(tmp_path: Path) -> str:
    calls = [call(index) for index in range(20)]
    calls[7]["values"]["output"] |= {"nan": 3, "inf": 1}
    calls[9] |= {"op": "aten::bmm", "error": "RuntimeError: no"}
    return write(tmp_path / "run", calls)


Shown = Callable[..., str]
Rows = Callable[..., list[dict[str, str]]]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """What the command prints."""

    def shown(*arguments: str) -> str:
        assert main(["show", *arguments]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return shown


@pytest.fixture
def rows(shown: Shown) -> Rows:
    """The rows that the command prints as CSV."""
    return lambda *arguments: list(csv.DictReader(io.StringIO(shown(*arguments, "--csv"))))


def test_show_gives_an_overview_and_a_table_by_module(run: str, shown: Shown) -> None:
    assert shown(run, "--limit", "2").splitlines() == [
        f"run       {run}: finished",
        "started   2026-01-02T03:04:05+0000",
        "command   train.py --epochs 1",
        "versions  opintercept 0.1.0, torch 2.13.0",
        "devices   A card",
        "flags     float32_matmul_precision=high",
        "tensors   stats",
        "calls     20 calls, 5.12 kFLOP, 210.000 ms in total, 1 not finite, 1 raised",
        "nonfinite first in call 7, step 0, rank 0, backward: mm in layers.2 at model.py:3 in forward; "
        "output (3 NaN and 1 Inf of 16); its operands are not recorded",
        "",
        "module    op  phase     calls  MFLOP     ms  share  GFLOP/s  not finite  min  max",
        "layers.3  mm  forward       2   0.00  28.00  13.3%     0.00           0   -1   18",
        "layers.2  mm  backward      2   0.00  26.00  12.4%     0.00           1   -1   17",
        "... and 9 more rows; --limit all shows them",
    ]


def test_a_run_prints_its_overview(run: str, shown: Shown) -> None:
    opened = runs.open_run(run)
    lines = shown(run).splitlines()
    assert str(opened).splitlines() == lines[:7]
    assert lines[0] == f"run       {run}: finished"
    assert [line.split()[0] for line in lines[1:7]] == ["started", "command", "versions", "devices", "flags", "tensors"]
    assert [html.unescape(line) for line in re.findall("<pre[^>]*>([^<]*)</pre>", opened._repr_html_())] == lines[:7]
    assert repr(opened) == f"Run({run!r}, 1 rank)"


def test_extremes_are_those_of_the_first_output_that_is_a_tensor(tmp_path: Path, rows: Rows) -> None:
    made = call(0, values={"output.1": values(5), "output.2": values(9)})
    name = write(tmp_path / "run", [made])
    assert [(row["min"], row["max"]) for row in rows(name)] == [("-1.0", "5.0")]
    assert [(row["min"], row["max"]) for row in rows(name, "--calls")] == [("-1.0", "5.0")]


def test_groups_add_up(run: str, shown: Shown) -> None:
    plain = json.loads(shown(run, "--json"))
    total = plain["calls"]
    assert (total["calls"], total["flops"], total["nonfinite"], total["raised"]) == (20, 20 * 256, 1, 1)
    assert total["seconds"] == pytest.approx(0.21)
    for name in ("calls", "flops", "nonfinite", "raised"):
        assert sum(row[name] for row in plain["rows"]) == total[name]
    assert sum(row["share"] for row in plain["rows"]) == pytest.approx(1)
    by_keys = {(row["module"], row["op"], row["phase"]): row for row in plain["rows"]}
    row = by_keys["layers.2", "aten::mm", "forward"]
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
        (["--op", "bmm", "--op", "mm", "--steps", "1"], [*range(10, 20)]),
        (["--module", "layers.[12]"], [1, 2, 6, 7, 11, 12, 16, 17]),
        (["--module", "layers.*", "--op", "bmm", "--phase", "forward"], []),
        (["--phase", "backward", "--steps", "1:"], [11, 13, 15, 17, 19]),
        (["--nonfinite"], [7]),
        (["--rank", "0", "--steps", ":1", "--limit", "3"], [0, 1, 2]),
        (["--sort", "time", "--limit", "3"], [19, 18, 17]),
        (["--sort", "rate", "--limit", "2"], [0, 1]),
        (["--sort", "nonfinite", "--limit", "2"], [7, 0]),
        (["--sort", "max", "--limit", "2", "--phase", "forward"], [18, 16]),
        (["--sort", "index", "--limit", "2"], [0, 1]),
        (["--sort", "module", "--limit", "5"], [0, 5, 10, 15, 1]),
    ],
)
def test_filters_and_order_of_calls(filters: list[str], indexes: list[int], run: str, shown: Shown, rows: Rows) -> None:
    assert [int(row["index"]) for row in rows(run, "--calls", *filters)] == indexes
    plain = json.loads(shown(run, "--calls", *filters, "--json"))
    assert [row["index"] for row in plain["calls"]] == indexes
    table = shown(run, "--calls", *filters).splitlines()[1 : len(indexes) + 1]
    assert [int(line.split()[0]) for line in table] == indexes


def test_filters_of_groups_do_not_change_the_total(run: str, shown: Shown) -> None:
    text = shown(run, "--op", "bmm")
    assert re.search("^calls     20 calls", text, re.MULTILINE)
    assert re.search("^chosen    1 call, 256 FLOP, 10.000 ms in total, 0 not finite, 1 raised$", text, re.MULTILINE)
    assert " ".join(text.splitlines()[-1].split()) == "layers.4 bmm backward 1 0.00 10.00 100.0% 0.00 0 -1 9 1"


@pytest.mark.parametrize(("sort", "first"), [("calls", "layers.0"), ("module", "layers.0"), ("nonfinite", "layers.2")])
def test_order_of_groups(sort: str, first: str, run: str, rows: Rows) -> None:
    assert rows(run, "--sort", sort)[0]["module"] == first


def test_keys_of_groups(run: str, rows: Rows) -> None:
    by = rows(run, "--by", "step,shape,dtype,rank,source")
    assert [(row["step"], row["shape"], row["dtype"], row["rank"], row["calls"]) for row in by] == [
        ("1", "[4, 8] @ [8, 4]", "float32", "0", "10"),
        ("0", "[4, 8] @ [8, 4]", "float32", "0", "10"),
    ]


def test_ranks_are_one_run(tmp_path: Path, shown: Shown, rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        calls = [call(index) for index in range(10 + rank)]
        write(tmp_path / "run" / f"rank{rank}", calls, rank=rank, world_size=3, finished=not rank)
    run = str(tmp_path / "run")
    text = shown(run)
    assert "run: not finished (ranks 1): still running, or killed; 2 of 3 ranks" in text
    assert "calls     21 calls" in text
    assert len(rows(run, "--calls", "--rank", "1")) == 11
    assert shown(run, "--calls", "--sort", "time", "--limit", "1").splitlines()[1].split()[:2] == ["1", "10"]
    assert main(["show", run, "--rank", "2"]) == 2
    assert "--rank must be one of 0, 1, got 2" in capsys.readouterr().err


def test_a_run_without_statistics(tmp_path: Path, shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [call(index, values={}, flops=None) for index in range(3)]
    run = write(tmp_path / "run", calls, tensors="none", devices=[])
    text = shown(run)
    assert "devices   the CPU" in text
    assert "min" not in text
    assert text.splitlines()[-1].split()[:6] == ["layers.0", "mm", "forward", "1", "320", "B"]
    assert main(["show", run, "--nonfinite"]) == 2
    assert "--nonfinite needs statistics" in capsys.readouterr().err


@pytest.mark.parametrize("form", [[], ["--csv"], ["--json"], ["--calls"], ["--calls", "--csv"], ["--calls", "--json"]])
@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (["--module", "layer.1"], "--module 'layer.1' matches no module of {run}; did you mean 'layers.1' or "),
        (["--module", "layers"], "--module 'layers' matches no module of {run}; did you mean 'layers.*' or "),
        (["--module", "LAYERS.[01]"], "--module 'LAYERS.[01]' matches no module of {run}; did you mean 'layers."),
        (["--module", "q\x1b"], "--module 'q\\x1b' matches no module of {run}; `opintercept show` lists them"),
        (["--op", "mmm"], "--op 'mmm' matches no operator of {run}; did you mean 'mm' or 'bmm'?"),
        (["--op", "mm", "--op", "linear"], "--op 'linear' matches no operator of {run}; `opintercept show` "),
        (["--op", "bmmm", "--module", "layers.4"], "--op 'bmmm' matches no operator of {run}; did you mean 'b"),
    ],
    ids=str,
)
def test_a_filter_that_matches_no_call_is_refused(
    filters: list[str], message: str, form: list[str], run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", run, *filters, *form]) == 2
    out, err = capsys.readouterr()
    assert out == "" or filters[:2] == ["--op", "mm"]  # calls of the other operator are shown as they come
    assert err.startswith(f"opintercept show: {message.format(run=run)}")


def two_ranks(folder: Path) -> str:
    """16 calls a step; rank 1 has NaN in the outputs of step 2 on, rank 0 in those of step 3 on."""
    for rank in range(2):
        calls = [call(index, step=index // 16, module=f"m{rank}") for index in range(64)]
        for broken in calls[(48, 32)[rank] :]:
            broken["values"] |= {"lhs": values(0, nan=2), "rhs": values(0, inf=1), "output": values(0, nan=16)}
        write(folder / f"rank{rank}", calls, rank=rank, world_size=2)
    return str(folder)


def test_the_first_nan_of_several_ranks_comes_from_the_first_step(tmp_path: Path, shown: Shown, rows: Rows) -> None:
    run = two_ranks(tmp_path / "run")
    text = shown(run)
    assert (
        "\nnonfinite first in call 32, step 2, rank 1, forward: mm in m1 at model.py:3 in forward; "
        "output (16 NaN of 16); already in lhs (2 NaN of 16), rhs (1 Inf of 16)\n"
    ) in text
    first = json.loads(shown(run, "--json"))["first_nonfinite"]
    assert (first["rank"], first["index"], first["step"], first["module"]) == (1, 32, 2, "m1")
    assert first["values"]["rhs"] == {"nan": 0, "inf": 1, "count": 16}
    assert "in call 48, step 3, rank 0" in shown(run, "--rank", "0")
    listed = rows(run, "--calls", "--nonfinite", "--limit", "20")
    assert [(row["rank"], row["step"], row["index"]) for row in listed[:2]] == [("1", "2", "32"), ("1", "2", "33")]
    assert [(row["step"], row["index"], row["rank"]) for row in listed[16:]] == [
        ("3", index, rank) for index in ("48", "49") for rank in "01"
    ]
    assert [row["index"] for row in rows(run, "--calls", "--sort", "index", "--limit", "4")] == [*"0011"]


def test_the_first_nan_is_looked_for_in_outputs_before_operands(tmp_path: Path, shown: Shown) -> None:
    calls = [call(index) for index in range(4)]
    calls[1]["values"]["lhs"] = values(1, inf=1)
    calls[3]["values"] = {"lhs": values(3), "output": values(3, nan=1)}
    text = shown(write(tmp_path / "run", calls))
    assert "nonfinite first in call 3, step 0, rank 0, backward: mm in layers.3 at model.py:3 in forward; " in text
    assert "output (1 NaN of 16); its operands are finite\n" in text
    assert "first in call 1," in shown(write(tmp_path / "operand", calls[:3]))
    assert "nonfinite" not in shown(write(tmp_path / "finite", calls[:1]))


def test_a_number_that_is_not_finite_is_where_a_mask_has_its_inf_from(tmp_path: Path, shown: Shown) -> None:
    masked = call(0, arguments={"dim": 1, "value": "-inf", "name": "none"})
    masked["values"] = {"lhs": values(0), "output": values(0, inf=3)}
    assert "output (3 Inf of 16); already in value=-inf\n" in shown(write(tmp_path / "number", [masked]))
    masked["values"]["lhs"] = values(0, nan=1)
    assert "already in lhs (1 NaN of 16), value=-inf\n" in shown(write(tmp_path / "both", [masked]))


def test_too_many_ranks_are_read_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Rows) -> None:
    monkeypatch.setattr("opintercept._reports.calls.MAX_OPEN", 2)
    for rank in range(3):
        write(tmp_path / "run" / f"rank{rank}", [call(index) for index in range(3)], rank=rank, world_size=3)
    run = str(tmp_path / "run")
    assert [row["rank"] for row in rows(run, "--calls")] == [*"000111222"]
    listed = rows(run, "--calls", "--sort", "time", "--limit", "9")
    assert [(row["index"], row["rank"]) for row in listed] == [(i, r) for i in "210" for r in "012"]


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_tables_fit_the_terminal(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: Shown) -> None:
    name = "model.encoder.layers.{}.attention.output.dense.projection"
    source = "a_module_with_a_rather_long_name.py:1234 in a_function_with_a_long_name"
    calls = [call(index, module=name.format(index % 5), source=source) for index in range(20)]
    run = write(tmp_path / "run", calls, tensors="none")
    monkeypatch.setenv("COLUMNS", str(columns))
    for options in (["--by", "module,source,op"], ["--calls"], []):
        text = shown(run, *options)
        lines = text[text.index("\n\n") + 2 :].splitlines() if "--calls" not in options else text.splitlines()
        assert len(lines) > 5
        assert max(map(len, lines)) <= columns
        if columns > 80:  # the names of modules are cut last
            assert sum("projection" in line for line in lines[1:]) == len(lines) - 1
    monkeypatch.delenv("COLUMNS")
    assert name.format(3) in shown(run)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_csv_has_no_formulas(start: str, tmp_path: Path, rows: Rows) -> None:
    evil = f'{start}HYPERLINK("http://x","y")'
    lines = [call(0, module=evil, op=evil, source=evil, error=evil, elapsed=-1.0), call(1, module="a\ud800=1")]
    run = write(tmp_path / "run", lines)
    safe = "'" + evil.replace("\t", "\\t").replace("\r", "\\r")
    one, other = rows(run, "--calls")
    assert {one[name] for name in ("module", "op", "source", "error")} == {safe}
    assert (one["seconds"], one["min"]) == ("-1.0", "-1.0")
    assert other["module"] == "a?=1"
    assert {row["module"] for row in rows(run)} == {safe, "a?=1"}


@pytest.mark.parametrize("arguments", [["nowhere"], [".", "--calls", "--csv", "--sort", "time"]], ids=str)
def test_a_folder_without_a_run_exits_with_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["show", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("opintercept show: a run must be a folder with run.json")


def test_sorted_calls_need_a_limit(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--csv"], ["--json"], ["--limit", "all"]):
        assert main(["show", run, "--calls", "--sort", "time", *arguments]) == 2
        assert "--calls with --sort needs a --limit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--by", "module,color"],
            "unknown key 'color'; choose from module,op,phase,shape,dtype,step,rank,process,source,run",
        ),
        (["--limit", "0"], "must be a whole number of at least 1, got '0'"),
        (["--steps", "3:b"], "must be a step or a range of steps such as 0:100, got '3:b'"),
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


def test_control_characters_are_escaped_in_every_form(tmp_path: Path, shown: Shown) -> None:
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
            text = shown(run, *form, *what)
            assert all(character.isprintable() or character == "\n" for character in text)
            if form == ["--json"]:
                json.loads(text, parse_constant=lambda name: pytest.fail(name))
            if not form:
                assert max(map(len, text.splitlines())) < 1000
    assert r"a\x1b]0;owned\x07\r\n\u202e?\x9b2Jé" in shown(run)


def test_nan_and_missing_numbers_sort_last(tmp_path: Path, shown: Shown, rows: Rows) -> None:
    calls = [call(n, elapsed=e) for n, e in enumerate([math.nan, 1.0, None, math.inf, -math.inf])]
    run = write(tmp_path / "run", calls)
    assert [row["index"] for row in rows(run, "--calls", "--sort", "time", "--limit", "9")] == [*"31402"]
    assert shown(run).count("layers.") == 5


def test_groups_beyond_the_limit_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Rows) -> None:
    monkeypatch.setattr("opintercept._reports.sums.MAX_GROUPS", 3)
    run = write(tmp_path / "run", [call(index, module=str(index)) for index in range(9)])
    assert {row["module"]: row["calls"] for row in rows(run)} == {"0": "1", "1": "1", "2": "1", "(others)": "6"}


def peak_of(*arguments: str) -> int:
    """The most memory that the command takes."""

    def show() -> None:
        assert main(["show", *arguments]) == 0

    with Path("/dev/null").open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        return peak_memory(show)


@pytest.mark.parametrize(
    "arguments", [[], ["--calls", "--limit", "all"], ["--calls", "--sort", "time"], ["--calls", "--json"]]
)
@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_calls(arguments: list[str], tmp_path: Path) -> None:
    peaks = []
    for number in (10, 400, 800):  # the first is for what is kept once
        run = write(tmp_path / str(number), (call(index) for index in range(number)))
        peaks.append(peak_of(run, *arguments))
    # Calls are read in pieces of 65,536, of which each takes about a kilobyte.
    assert peaks[2] - peaks[1] < 500_000


@pytest.mark.parametrize("options", [[], ["--calls"], ["--calls", "--sort", "time"], ["--calls", "--json"]], ids=str)
@pytest.mark.slow
def test_large_calls_are_not_kept(options: list[str], tmp_path: Path) -> None:
    nested: list[Any] = [[]] * 20_000  # 60 kB as text, 1.4 MB as objects
    run = write(tmp_path / "run", [call(index) | {"given": {"args": nested, "kwargs": {}}} for index in range(16)])
    assert peak_of(run, *options) < 8 << 20


def test_the_memory_of_group_keys_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Rows) -> None:
    monkeypatch.setattr("opintercept._reports.sums.MAX_KEYS_SIZE", 10_000)
    run = write(tmp_path / "run", [call(index, module=f"{index}{'m' * 5000}") for index in range(99)])
    counts = {row["module"]: int(row["calls"]) for row in rows(run)}
    assert 10 < len(counts) < 40
    assert sum(counts.values()) == 99
    assert counts["(others)"] > 50


def test_show_stops_at_a_closed_pipe(run: str) -> None:
    rewrite(Path(run), [call(index) for index in range(3000)])
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


def test_show_prints_what_was_recorded(tmp_path: Path, shown: Shown) -> None:
    import torch

    from opintercept import intercept

    with intercept(runs.RunRecorder(tmp_path / "run")):
        torch.nn.Linear(3, 2)(torch.full((4, 3), float("inf"))).sum().backward()
    plain = json.loads(shown(str(tmp_path / "run"), "--calls", "--json"))
    recorded = [c.record for c in runs.open_run(tmp_path / "run").calls()]
    assert [(c["op"], c["phase"], c["flops"]) for c in plain["calls"]] == [(r.op, r.phase, r.flops) for r in recorded]
    text = shown(str(tmp_path / "run"), "--nonfinite")
    assert f"{len(recorded)} not finite" in text


def test_figures_over_steps(tmp_path: Path, shown: Shown, rows: Rows) -> None:
    calls = [call(index) for index in range(40)]
    calls[23]["values"]["output"] |= {"nan": 4, "min": -8.0}
    calls[31] |= {"elapsed": None, "values": {}}
    run = write(tmp_path / "run", calls)
    chosen = ("--by", "step", "--module", "layers.[13]", "--phase", "backward")
    found = rows(run, *chosen)
    assert [(row["step"], row["last"], row["calls"]) for row in found] == [(str(n), str(n), "2") for n in range(4)]
    # Calls 21 and 23: 16 and 12 finite values of mean 0.5 and root mean square 1.5.
    assert [found[2][name] for name in ("min", "max", "nonfinite")] == ["-8.0", "23.0", "1"]
    assert [float(found[2][name]) for name in ("mean", "rms", "seconds")] == pytest.approx([0.5, 1.5, 0.046])
    plain = json.loads(shown(run, *chosen, "--json", "--limit", "2"))
    assert (plain["width"], plain["modules"]) == (2, ["layers.1", "layers.3"])
    assert [(row["step"], row["last"], row["calls"], row["max"]) for row in plain["rows"]] == [
        (0, 1, 4, 13.0),
        (2, 3, 4, 33.0),
    ]
    assert shown(run, *chosen, "--limit", "2").splitlines() == [
        "modules   layers.1, layers.3",
        "steps     2 steps a row; --limit sets the number of rows",
        "time      ▁█  32 to 80 ms",
        "rms       ▅▅  1.5 to 1.5",
        "max       ▁█  13 to 33",
        "",
        "step  calls     ms  min  max  mean  rms  not finite",
        "0-1       4  32.00   -1   13   0.5  1.5           0",
        "2-3       4  80.00   -8   33   0.5  1.5           1",
    ]


def test_sorted_steps_are_groups_like_any_others(run: str, rows: Rows) -> None:
    found = rows(run, "--by", "step", "--sort", "time")
    assert [(row["step"], row["flops"], "mean" in row) for row in found] == [("1", "2560", False), ("0", "2560", False)]


def test_bars_that_the_terminal_cannot_print_are_left_out(run: str) -> None:
    code = f"from opintercept.cli import main; main(['show', {run!r}, '--by', 'step'])"
    told = {}
    for encoding in ("ascii", "utf-8"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
        told[encoding] = done.stdout.decode()
    assert "\nmax       ▁█  9 to 19\n" in told["utf-8"]
    assert "\\u2581" not in told["ascii"]
    assert told["ascii"].splitlines()[-1].split()[:2] == ["1", "10"]


def test_several_runs_have_a_column_for_the_run(
    run: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shown: Shown,
    rows: Rows,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "notes").mkdir()
    for number in (2, 10):
        write(tmp_path / f"run{number}", [call(index) for index in range(number)])
    monkeypatch.chdir(tmp_path)
    by_pattern = rows("run*", "--by", "phase")
    assert by_pattern == rows("run", "run2", "run10", "--by", "phase")
    counts = {(row["run"], row["phase"]): row["calls"] for row in by_pattern}
    calls = {"run": "10", "run2": "1", "run10": "5"}
    assert counts == {(name, phase): count for name, count in calls.items() for phase in ("forward", "backward")}
    table = shown("run*", "--by", "op", "--sort", "op").splitlines()
    assert [line.split()[0] for line in table[1:4]] == ["run", "run2", "run10"]
    assert table[1].endswith("1  step 0, layers.2")
    assert table[5].split()[:3] == ["run", "op", "calls"]
    plain = json.loads(shown("run2", "run10", "--json"))
    assert [(each["path"], each["calls"]["calls"]) for each in plain["runs"]] == [("run2", 2), ("run10", 10)]
    listed = rows("run2", "run10", "--calls", "--sort", "time", "--limit", "2")
    assert [(row["run"], row["index"]) for row in listed] == [("run10", "9"), ("run10", "8")]
    assert [row["run"] for row in rows("run10", "run2", "--by", "step")] == ["run10", "run2"]
    assert "run    index" in shown("run2", "run10", "--calls").splitlines()[0]
    assert "run" not in rows("run10", "run10")[0]
    assert main(["show", "note*"]) == 2
    assert "a pattern must match the folder of a run, got 'note*'" in capsys.readouterr().err
    assert main(["show", "run2", "run10", "--module", "layer"]) == 2
    assert "matches no module of these 2 runs" in capsys.readouterr().err


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[tuple[str, int, int]]]:
    """A run of 12,000 calls that is read in pieces of 2,048; and the columns that are made, with their calls."""
    from opintercept.runs.store import columns

    monkeypatch.setattr(columns, "CHUNK", 2048)
    calls = (call(index, **({"module": "rare"} if index == 7000 else {})) for index in range(12_000))
    run = write(tmp_path / "stored", calls)
    read: list[tuple[str, int, int]] = []
    reads = columns.Columns._columns_of

    def counted(self: Any, records: Any, names: Any) -> Any:
        read.extend((name, int(records["index"].min()), int(records["index"].max()) + 1) for name in names)
        return reads(self, records, names)

    monkeypatch.setattr(columns.Columns, "_columns_of", counted)
    return run, read


@pytest.mark.parametrize("options", [[], ["--calls"], ["--by", "step"]], ids=str)
def test_steps_and_modules_read_only_their_part_of_the_columns(
    options: list[str], stored: tuple[str, list[tuple[str, int, int]]], shown: Shown, rows: Rows
) -> None:
    run, read = stored
    found = rows(run, *options, "--steps", "500:503")
    assert sum(int(row.get("calls", 1)) for row in found) == 30
    assert all(first >= 4096 and end <= 6144 for _, first, end in read)
    if not options:
        total = json.loads(shown(run, "--steps", "500:503", "--json"))["calls"]
        assert (total["calls"], total["flops"]) == (30, 30 * 256)
        assert (
            "\ncalls     30 calls, 7.68 kFLOP, 150.465 s in total, 0 not finite, 0 raised, of the chosen steps\n"
            in (shown(run, "--steps", "500:503"))
        )
        return
    read.clear()
    (row,) = rows(run, *options, "--module", "rare")
    assert row.get("index", row.get("step")) == ("7000" if options == ["--calls"] else "700")
    # Of the other calls, only where they come from.
    assert {name for name, first, end in read if (first, end) != (7000, 7001)} == {"site", "look", "step"}
    assert {(first, end) for _, first, end in read if end - first > 1} == {
        (start, min(start + 2048, 12_000)) for start in range(0, 12_000, 2048)
    }
