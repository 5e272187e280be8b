"""Snapshots of calls: their files, and which changes they detect."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from made_calls import Net, meta, record, three_calls

from opintercept.testing.plugin import OpCalls
from opintercept.testing.snapshot import FOLDER, Snapshots, _entry, _file_name, _read, _write


@pytest.fixture
def snapshots(tmp_path: Path) -> Callable[..., Snapshots]:
    def of(update: bool = False, test: str = "TestNet::test_step[cpu]") -> Snapshots:
        return Snapshots(tmp_path / "test_net.py", test, update)

    return of


def test_a_snapshot_is_a_readable_file_beside_the_test(tmp_path: Path, snapshots: Callable[..., Snapshots]) -> None:
    records = [
        record("addmm", module="net.0", lhs=meta(2, 8, dtype="bfloat16"), rhs=meta(8, 4), output=meta(2, 4)),
        record("mkldnn_rnn_layer", "backward", module=None, rhs=None, output=(meta(3), meta(2))),
    ]
    assert snapshots(update=True).mismatch(records, None) is None
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file == tmp_path / FOLDER / "test_net" / "TestNet.test_step[cpu].json"
    assert json.loads(file.read_text()) == {
        "test": "TestNet::test_step[cpu]",
        "calls": [
            {
                **{"phase": "forward", "module": "net.0", "op": "aten::addmm"},
                **{"lhs": "bfloat16[2, 8]", "rhs": "float32[8, 4]", "output": "float32[2, 4]"},
            },
            {
                **{"phase": "backward", "module": None, "op": "aten::mkldnn_rnn_layer"},
                **{"lhs": "float32[2, 2]", "rhs": None, "output": "float32[3]"},
            },
        ],
    }
    assert len(file.read_text().splitlines()) == 4  # a line for each call, for readable diffs
    assert snapshots().mismatch(records, None) is None


def test_a_snapshot_has_the_first_output_that_is_a_tensor() -> None:
    assert _entry(record(output=(None, meta(4, 3), meta(4))))["output"] == "float32[4, 3]"


def test_a_snapshot_ignores_devices_lines_and_times(snapshots: Callable[..., Snapshots]) -> None:
    attention = "_scaled_dot_product_{}"
    here = [record(attention.format(f"flash_attention_for_cpu{end}")) for end in ("", "_backward")]
    assert snapshots(update=True).mismatch(here, None) is None
    cuda = meta(2, 2, device="cuda:0")
    elsewhere: dict[str, Any] = {"lhs": cuda, "rhs": cuda, "source": "b.py:3 in f"}
    elsewhere |= {"elapsed": 1.0, "flops": 1, "step": 2}
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable"):
        there = [
            dataclasses.replace(record(attention.format(f"{kernel}{end}"), index=7, output=(cuda, cuda)), **elsewhere)
            for end in ("", "_backward")
        ]
        assert snapshots().mismatch(there, None) is None
    assert snapshots().mismatch(there[::-1], None) is not None
    assert snapshots().mismatch([record(attention.format("attention_math"))] * 2, None) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"op": "aten::bmm"},
        {"phase": "backward"},
        {"module": "a"},
        {"lhs": meta(3, 2)},
        {"rhs": meta(2, 2, dtype="float64")},
        {"output": meta(2, 1)},
        {"rhs": None},
    ],
    ids=str,
)
def test_a_snapshot_detects_every_change_of_its_fields(change: Any, snapshots: Callable[..., Snapshots]) -> None:
    assert snapshots(update=True).mismatch([record(), record()], None) is None
    text = snapshots().mismatch([record(), dataclasses.replace(record(), **change)], None)
    assert text is not None
    lines = text.splitlines()
    assert lines[0] == "the calls differ from the snapshot; if that is intended, run with --opintercept-update"
    assert lines[1].startswith("--- ")
    assert lines[1].endswith("TestNet.test_step[cpu].json")
    assert lines[2] == "+++ this run"
    assert lines[4:6] == [
        " forward - aten::mm float32[2, 2] @ float32[2, 2] -> float32[2, 2]",
        "-forward - aten::mm float32[2, 2] @ float32[2, 2] -> float32[2, 2]",
    ]
    assert len(lines) == 7
    assert lines[6].startswith("+")


def test_a_long_diff_is_truncated(snapshots: Callable[..., Snapshots]) -> None:
    snapshots(update=True).mismatch([record()] * 300, None)
    text = snapshots().mismatch([record("bmm")] * 300, None)
    assert text is not None
    assert text.endswith("\n... 503 more lines")


def test_the_snapshots_of_a_test_are_numbered_or_named(tmp_path: Path, snapshots: Callable[..., Snapshots]) -> None:
    updating = snapshots(update=True, test="test_a")
    for name in (None, None, "warm", None):
        updating.mismatch([record()], name)
    names = sorted(path.name for path in (tmp_path / FOLDER / "test_net").iterdir())
    assert names == ["test_a.2.json", "test_a.3.json", "test_a.json", "test_a.warm.json"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", r"Expecting value: line 1 column 1 \(char 0\)"),
        ("<<<<<<< HEAD\n", "Expecting value"),
        ("[]", 'it is not an object with "test" and "calls"'),
        ('{"test": "t", "calls": 3}', 'it is not an object with "test" and "calls"'),
        ('{"test": "t"}', 'it is not an object with "test" and "calls"'),
        ('{"test": "T", "calls": []}', 'it belongs to "T", whose file has the same name'),
        ('{"test": "t", "calls": [3]}', "call 0 must have the fields phase, module, op, lhs, rhs, output, got 3"),
        ('{"test": "t", "calls": [{"op": "mm"}]}', r"call 0 must have .*, got {'op': 'mm'}"),
        (b"\xff\xfe", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_corrupt_snapshot_is_explained(
    content: str | bytes, problem: str, tmp_path: Path, snapshots: Callable[..., Snapshots]
) -> None:
    file = tmp_path / FOLDER / "test_net" / "t.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = snapshots(test="t").mismatch([record()], None)
    assert text is not None
    assert re.search(
        rf"^cannot read the snapshot .*t\.json: {problem}.*; fix it, or write it again with --opintercept-update$", text
    )
    assert snapshots(update=True, test="t").mismatch([record()], None) is None
    assert snapshots(test="t").mismatch([record()], None) is None


def test_a_missing_snapshot_is_explained(snapshots: Callable[..., Snapshots]) -> None:
    text = snapshots(test="t").mismatch([record()], None)
    assert text is not None
    assert re.search(
        r"^no snapshot .*t\.json; write it with --opintercept-update, check it, and keep it beside the test$", text
    )


@given(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
@example(["test_a[x/y]", "test_a[x y]"])
@example(["test_a" * 50, "test_a" * 51])
def test_file_names_are_distinct_and_portable(tests: list[str]) -> None:
    names = [_file_name(test) for test in tests]
    assert all(re.fullmatch(r"[\w.,=+\[\]-]{1,129}", name) for name in names)
    if "::" not in "".join(tests):  # `::` becomes a dot, so only such names may collide
        assert names[0] != names[1]


@given(st.lists(st.tuples(*[st.none() | st.text()] * 6)), st.text())
def test_a_written_snapshot_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Any], test: str) -> None:
    path = tmp_path_factory.mktemp("snapshot") / "deep" / "t.json"
    entries = [dict(zip(("phase", "module", "op", "lhs", "rhs", "output"), row, strict=True)) for row in rows]
    _write(path, test, entries)
    assert _read(path, test) == entries
    assert [file.name for file in path.parent.iterdir()] == ["t.json"]


def test_calls_outside_a_fixture_have_no_snapshot() -> None:
    with pytest.raises(TypeError, match="match_snapshot needs the calls of a fixture"):
        three_calls().match_snapshot()


def test_the_matmuls_of_a_step_are_those_of_the_snapshot(op_calls: OpCalls) -> None:
    Net()(torch.ones(3, 4)).sum().backward()
    op_calls.match_snapshot()
    op_calls.filter(phase="forward").match_snapshot("forward")
