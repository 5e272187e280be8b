"""Parquet files of a run, which other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import call, ranked, write

from opintercept import intercept, runs
from opintercept.cli import main

duckdb = pytest.importorskip("duckdb")


def rows(folder: Path) -> list[dict[str, Any]]:
    found = duckdb.sql(f"SELECT * FROM '{folder}/*.parquet' ORDER BY rank, index")
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


def test_a_row_of_parquet_has_what_the_data_frame_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run")):
        torch.nn.Linear(3, 2)(torch.ones(4, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(2, 3) @ torch.ones(2, 3)
    assert main(["export", str(tmp_path / "run"), "--format", "parquet", "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 3 calls\n"
    frame = runs.open_run(tmp_path / "run").to_pandas()
    found = rows(tmp_path / "out")
    assert [name.replace("started_ns", "started") for name in found[0]] == list(frame.columns)
    for name in ("op", "module", "source", "lhs", "error", "flops", "lhs_nan"):
        assert [row[name] for row in found] == [None if value != value else value for value in frame[name]], name
    assert [row["output_max"] for row in found][:2] == list(frame["output_max"])[:2]
    assert (found[2]["output_max"], found[2]["output_hash"], found[2]["forward"]) == (None, None, None)
    assert [row["started_ns"] for row in found] == frame["started"].astype("int64").tolist()


def test_each_rank_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opintercept.runs.store.export.ROWS", 2)
    run = ranked(tmp_path / "run", *[[call("a", f"x{n}", "w", "y") for n in range(3)] for _ in range(2)])
    from opintercept.runs.store.export import write_parquet

    assert write_parquet(run, tmp_path / "out") == 6
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"rank{rank}-0000{part}.parquet" for rank in range(2) for part in range(2)
    ]
    assert [(row["rank"], row["index"]) for row in rows(tmp_path / "out")] == [
        (r, n) for r in range(2) for n in range(3)
    ]


@pytest.mark.parametrize("options", [[], ["-o", "out", "--steps", "3"], ["-o", "used"]], ids=str)
def test_parquet_that_cannot_be_written_is_one_error(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ranked(tmp_path / "run", [call("a", "x", "w", "y")])
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").write_text("")
    assert main(["export", "run", "--format", "parquet", *options]) == 2
    error = capsys.readouterr().err
    assert "Parquet needs a new folder" in error if "used" in options else "need --out FOLDER" in error
    assert not (tmp_path / "out").exists()


def test_replays_of_a_graph_are_shown_exported_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captured = [call("a", "x", "w", "y"), call("b", "y", "w", "z")]
    again = [each | {"replayed": place, "source": None} for place, each in enumerate(captured)]
    one = write(tmp_path / "a", [*captured, *again])
    other = write(tmp_path / "b", captured)
    indices = [None, None, 0, 1]
    assert main(["export", str(one.path), "--format", "parquet", "-o", str(tmp_path / "out")]) == 0
    assert [row["replayed"] for row in rows(tmp_path / "out")] == indices
    (kind,) = duckdb.sql(f"SELECT DISTINCT typeof(replayed) FROM '{tmp_path}/out/*.parquet'").fetchall()
    assert kind == ("BIGINT",)
    assert [None if each != each else each for each in one.to_pandas()["replayed"]] == indices
    for command in (["show"], ["show", "--calls"], ["report", "-o", str(tmp_path / "page.html")]):
        assert main([*command, str(one.path)]) == 0
    assert "4 calls, 512 FLOP" in capsys.readouterr().out
    assert main(["show", "--calls", str(one.path)]) == 0
    head, *calls = capsys.readouterr().out.splitlines()
    place = head.index("replay of") + len("replay of") - 1
    assert [line[place] for line in calls] == [" ", " ", "0", "1"]
    assert runs.diff(one, one).equal
    found = runs.diff(one, other)
    assert [(each.run, each.index) for each in found.unmatched] == [("a", 2), ("a", 3)]
    assert "without a counterpart: 2 of A, 0 of B" in str(found)
