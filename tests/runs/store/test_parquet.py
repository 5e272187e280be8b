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
        tmp_path / "run", [*(call("a", n, "w", f"y{n}", step=n) for n in range(100)), *attention(attn_bias="m")]
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


@pytest.mark.parametrize(
    ("name", "columns", "why"),
    [
        ("looks", "* FROM file, range(300_000)", r"at most 262144 rows, .* got 600000; delete the store"),
        ("sites", "* FROM file, range(300_000)", r"at most 262144 rows, .* got 600000; delete the store"),
        ("texts", "* FROM file, range(300_000)", r"at most 262144 rows, .* got 300000; delete the store"),
        ("calls", "* FROM file, range(6_000)", r"at most \d+ rows, .* got 606000; delete the store"),
        ("looks", "* REPLACE (repeat('a', 100_000_000) AS text) FROM file", r"at most 67108864 bytes of text, .* got"),
    ],
    ids=["looks", "sites", "texts", "calls", "text"],
)
def test_a_file_of_equal_rows_is_refused_before_it_takes_memory(
    name: str, columns: str, why: str, tmp_path: Path
) -> None:
    run = write(
        tmp_path / "run", [*(call("a", n, "w", f"y{n}", step=n) for n in range(100)), *attention(attn_bias="m")]
    )
    runs.compact(run.path)
    path = run.path / "columns" / f"{name}-00000000.parquet"
    forged = tmp_path / "forged.parquet"
    source = columns.replace("file", f"read_parquet('{path}')")
    connect().execute(f"COPY (SELECT {source}) TO '{forged}' (FORMAT parquet, COMPRESSION zstd)")
    forged.replace(path)
    with pytest.raises(OpInterceptError, match=rf"{name}-00000000.parquet must have {why}"):
        list(runs.open_run(run.path).calls())


@pytest.mark.parametrize("folder", ["st[ore", "a*b?", "it's", "\u00e9 \u2603"])
def test_a_folder_may_have_any_name(folder: str, tmp_path: Path) -> None:
    run = write(tmp_path / folder, [call("a", "x", "w", "y")])
    runs.compact(run.path)
    assert [found.record.module for found in runs.open_run(run.path).calls()] == ["a"]


def test_no_file_beside_the_columns_is_opened(tmp_path: Path) -> None:
    from opintercept.runs.store.parquet import connect as connected

    (tmp_path / "secret.csv").write_text("a\n1\n")
    (tmp_path / "columns").mkdir()
    connection = connected(tmp_path / "columns")
    for place in ("secret.csv", "columns/../secret.csv"):
        with pytest.raises(Exception, match="Cannot access file"):
            connection.execute(f"SELECT * FROM read_csv('{tmp_path}/{place}')")
    with pytest.raises(Exception, match="configuration has been locked"):
        connection.execute("SET enable_external_access = true")


def test_steps_that_a_file_lies_about_are_looked_for_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "run", [call("a", n, "w", f"y{n}", step=n // 10) for n in range(100)])
    runs.compact(run.path)
    columns = runs.open_run(run.path).columns(0)
    assert list(columns.spans(range(3, 5))) == [(0, 100)]
    assert list(columns.spans(range(10, 20))) == []
    assert [start for start, _ in columns.chunks(("step",), steps=range(10, 20))] == []
    query = columns._query  # type: ignore[attr-defined]
    for rows in ([(101, "0", "9")], [(99, "0", "9")], [(-1, "0", "9")], []):
        monkeypatch.setattr(columns, "_query", lambda _, rows=rows: query(values(rows)))
        with pytest.raises(OpInterceptError, match="is damaged: it has not all calls"):
            list(columns.spans(range(1)))
    for low, high in (("?", "9"), (None, None), ("0", "9")):
        monkeypatch.setattr(columns, "_query", lambda _, row=(100, low, high): query(values([row])))
        assert list(columns.spans(range(1))) == [(0, 100)]


def values(rows: list[tuple[int, str | None, str | None]]) -> str:
    """A query that gives these rows."""
    shown = ", ".join(str(row).replace("None", "NULL") for row in rows)
    return f"SELECT * FROM (VALUES {shown}) AS v" if rows else "SELECT 1 WHERE false"
