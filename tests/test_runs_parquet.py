"""Columns on disk that anyone may have written."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from made_runs import attention, call, write

from opintercept import OpInterceptError, runs

connect = pytest.importorskip("duckdb").connect


@pytest.mark.parametrize("name", ["calls", "looks", "sites", "texts"])
def test_changed_bytes_give_calls_or_an_error(name: str, tmp_path: Path) -> None:
    run = write(
        tmp_path / "run", [*(call("a", n, "w", f"y{n}", step=n) for n in range(100)), *attention(attn_mask="m")]
    )
    runs.compact(run.path)
    path = run.path / "columns" / f"{name}-00000000.parquet"
    whole = path.read_bytes()
    draw = random.Random(name)
    refused = 0
    for _ in range(20):
        changed = bytearray(whole[: draw.choice((len(whole), draw.randrange(len(whole))))])
        for _ in range(draw.choice((1, 4)) if changed else 0):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            assert len(list(runs.open_run(run.path).calls())) == 101
        except OpInterceptError:
            refused += 1
    assert refused


@pytest.mark.parametrize("folder", ["st[ore", "a*b?", "it's", "\u00e9 \u2603"])
def test_a_folder_may_have_any_name(folder: str, tmp_path: Path) -> None:
    run = write(tmp_path / folder, [call("a", "x", "w", "y")])
    runs.compact(run.path)
    assert [found.record.module for found in runs.open_run(run.path).calls()] == ["a"]


def test_no_file_beside_the_columns_is_opened(tmp_path: Path) -> None:
    from opintercept.runs._parquet import connect as connected

    (tmp_path / "secret.csv").write_text("a\n1\n")
    (tmp_path / "columns").mkdir()
    connection = connected(tmp_path / "columns")
    for place in ("secret.csv", "columns/../secret.csv"):
        with pytest.raises(Exception, match="Cannot access file"):
            connection.execute(f"SELECT * FROM read_csv('{tmp_path}/{place}')")
    with pytest.raises(Exception, match="configuration has been locked"):
        connection.execute("SET enable_external_access = true")
