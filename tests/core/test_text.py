"""Tables and CSV of arbitrary text: module names come from the program, and a run may come from anywhere."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from opintercept._core.text import aligned, csv_cell, write_csv


def test_a_table_shortens_long_cells_and_escapes_control_characters() -> None:
    name = f"\x1b[2J{'a' * 1_000_000}\nend"
    lines = aligned([["module", "calls"], [name, "1"]], left=1).split("\n")
    assert len(lines) == 2
    assert len(lines[1]) < 140  # 120 characters, some of which become longer escapes
    assert lines[1].startswith("\\x1b[2Jaaa")
    assert "aaa...aaa" in lines[1]
    assert lines[1].endswith("a\\nend      1")
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("name", ["model.layers.31.self_attn.q_proj", "модель.слой", "层.0", "-", "?", "", "a" * 120])
def test_a_table_shows_other_cells_as_they_are(name: str) -> None:
    assert aligned([[name, "1"]], left=1) == f"{name}  1"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("encoder.layers.0", "encoder.layers.0"),
        ("", ""),
        ("?", "?"),
        ('=HYPERLINK("http://x","y")', '\'=HYPERLINK("http://x","y")'),
        ("+1+1", "'+1+1"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\\t=1"),
        ("\r=1", "'\\r=1"),
        ("\n=1", "'\n=1"),
        ("\uff1d1+1", "'\uff1d1+1"),
        ("a=1", "a=1"),
        ("-1.5", "-1.5"),
        ("+3e-7", "+3e-7"),
        ("-inf", "-inf"),
        (-1.5, -1.5),
        (7, 7),
        (None, None),
        ("a\udc80b", "a\\udc80b"),
        ("a\x00\x1bb", "a\\x00\\x1bb"),
        ("a,b", "a,b"),
    ],
    ids=repr,
)
def test_a_spreadsheet_shows_a_cell_of_csv_and_does_not_run_it(value: Any, written: Any) -> None:
    assert csv_cell(value) == written


def test_the_head_of_a_csv_file_is_safe_too(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", ["=head", "n"], [["=row\udc80", -2], ["a\nb", None]])
    with open(tmp_path / "t.csv", newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["'=head", "n"], ["'=row\\udc80", "-2"], ["a\nb", ""]]
