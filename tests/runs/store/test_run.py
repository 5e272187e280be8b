"""Reading runs from folders that anyone may have written: invalid content is refused or skipped."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import struct
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import made_runs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from made_runs import change_records, peak_memory

from opintercept import OpInterceptError, OpInterceptWarning, intercept, runs
from opintercept._values.stats import Values
from opintercept.runs import Run, open_run
from opintercept.runs.store import codec, columns, records
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.records import CALL as RECORD
from opintercept.runs.store.records import TENSOR, seal
from opintercept.runs.store.texts import sealed
from opintercept.runs.store.untrusted import MAX_TEXT

pytestmark = pytest.mark.slow

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
INFO = made_runs.INFO | {"tensors": "full", "tables": records.described()}
META = {"shape": [2, 3], "dtype": "float32", "device": "cpu", "stride": [3, 1], "requires_grad": False}
SIGNATURE: dict[str, Any] = {
    "autocast": None,
    "op": "aten::mm",
    "func": "aten.mm.default",
    "lhs": META,
    "rhs": META,
    "bias": None,
    "output": META,
    "gemm": {"batch": 1, "m": 2, "n": 3, "k": 3, "dtypes": ["float32", "float32"], "transposes": [False, False]},
    "flops": 36,
    "bytes": 72,
    "opaque": False,
    "arguments": {"alpha": 1, "scale": None, "padding": [[0, 1.5], "same"]},
    "roles": {"lhs": [6, True]},
}
SITE: dict[str, Any] = {"module": "encoder.0", "source": "train.py:3 in step"}
TEXT: dict[str, Any] = {
    "index": 0,
    "tensors": {"lhs": "0/0123456789abcdef-0"},
    "given": {"args": [{"tensor": "0/0123456789abcdef-0", "shape": [2], "stride": [1]}], "kwargs": {}},
}
CALL: dict[str, Any] = {"signature": SIGNATURE, "site": SITE, "text": TEXT}
OTHER: dict[str, Any] = {"signature": SIGNATURE | {"op": "aten::bmm"}, "site": SITE, "text": TEXT}
TABLES = ("calls.bin", "tensors.bin", "signatures.jsonl", "sites.jsonl", "texts.jsonl")
DELETED = object()


def line(members: Any, number: int | None = None) -> bytes:
    shared = {} if number is None else {"number": number}
    return members if isinstance(members, bytes) else sealed(shared | members)


def make(folder: Path, *calls: dict[str, Any], info: Any = None) -> Path:
    """Write a run with these calls. Their texts are plain data, or lines whatever they say; the checks are right."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(INFO if info is None else info))
    made = np.zeros(len(calls), RECORD)
    place = 0
    for number, call in enumerate(calls):
        made[number]["index"] = made[number]["signature"] = made[number]["site"] = number
        made[number]["forward"], made[number]["phase"], made[number]["lhs"] = -1, 1, number + 1
        made[number]["text"], made[number]["has"] = place + 1, 6
        place += len(line(call["text"]))
    for part in ("signature", "site"):
        lines = [line(call[part], number) for number, call in enumerate(calls)]
        (folder / f"{part}s.jsonl").write_bytes(b"".join(lines))
    (folder / "texts.jsonl").write_bytes(b"".join(line(call["text"]) for call in calls))
    values = np.array([(0, number, 0, 0, 0.0, 1.0, 0.5, 0.6) for number in range(len(calls))], TENSOR)
    (folder / "tensors.bin").write_bytes(seal(values).tobytes())
    (folder / "calls.bin").write_bytes(seal(made).tobytes())
    return folder


def read(folder: Path) -> list[StoredCall]:
    """The calls, without the warning about damaged ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=OpInterceptWarning)
        return list(open_run(folder).calls())


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in folder.rglob("*")
    }


def changed(plain: Any, path: tuple[Any, ...], value: Any) -> Any:
    plain = copy.deepcopy(plain)
    inner = plain
    for key in path[:-1]:
        inner = inner[key]
    if value is DELETED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return plain


def paths(plain: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in entries:
        yield (*prefix, key)
        yield from paths(value, (*prefix, key))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**62, 2**200)
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["\ud800", "\x00", "../../etc/passwd", "x" * 5000, "0/0123456789abcdef-0", "backward", "lhs"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def test_a_call_is_read_as_it_was_written(tmp_path: Path) -> None:
    (call,) = open_run(make(tmp_path, CALL)).calls()
    plain = json.loads(json.dumps(call.record.as_dict()))
    shared = {name: value for name, value in (SIGNATURE | SITE).items() if name in plain}
    assert {name: plain[name] for name in shared} == shared
    assert shared.keys() >= SITE.keys()
    assert call.values["lhs"] == Values("0" * 16, 6, 0, 0, 0.0, 1.0, 0.5, 0.6)
    assert (call.tensors, call.given, call.error) == (TEXT["tensors"], TEXT["given"], None)
    assert call.arguments == SIGNATURE["arguments"]


def test_tensors_have_the_names_of_their_parameters(tmp_path: Path) -> None:
    names = ["attn_mask", "hx_", "weights[0]", "args[12][3]", "output.12", "output_mask"]
    text = TEXT | {"tensors": dict.fromkeys(names, TEXT["tensors"]["lhs"])}
    (call,) = open_run(make(tmp_path, CALL | {"text": text})).calls()
    assert list(call.tensors) == names
    assert [codec.is_output(name) for name in names] == [False] * 4 + [True, False]


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("signature", "roles", {"a b": [6, True]}),
        ("signature", "roles", {"a" * 102: [6, True]}),
        ("signature", "roles", {f"a{i}": [6, True] for i in range(codec.MAX_ROLES + 1)}),
        ("signature", "roles", {f"weights[{i}]": [6, True] for i in range(8)}),  # more than a record has room for
        ("signature", "arguments", []),
        ("signature", "arguments", {"a": {}}),
        ("signature", "arguments", {"a": [[[[[1]]]]]}),
        ("signature", "arguments", {"a": 2**64}),
        ("signature", "arguments", {"a": -(2**63) - 1}),
        ("signature", "arguments", {"a" * 101: 1}),
        ("signature", "arguments", {f"a{i}": 1 for i in range(codec.MAX_ARGUMENTS + 1)}),
        ("signature", "arguments", {"a": [0] * (codec.MAX_LIST + 1)}),
        ("text", "tensors", {"../a": "0/0123456789abcdef-0"}),
        ("text", "more", {"a": {"count": 1}}),
        ("text", "given", []),
        ("text", "given", {"args": {}, "kwargs": {}}),
        ("text", "own", {"os": "system"}),
    ],
    ids=range(17),
)
def test_names_and_arguments_are_bounded(part: str, field: str, value: Any, tmp_path: Path) -> None:
    folder = make(tmp_path, CALL | {part: CALL[part] | {field: value}})
    with pytest.raises(OpInterceptError, match=r"is damaged|has no text of a call"):
        list(open_run(folder).calls())


def test_arguments_are_plain_and_short(tmp_path: Path) -> None:
    given = {"a": float("nan"), "b": -float("inf"), "c": "x" * 5000, "d": "\ud800", "e": True}
    (call,) = open_run(make(tmp_path, CALL | {"signature": SIGNATURE | {"arguments": given}})).calls()
    assert call.arguments is not None
    assert {**call.arguments, "c": None} == {"a": "nan", "b": "-inf", "c": None, "d": "?", "e": True}
    assert len(call.arguments["c"]) == MAX_TEXT + 3


@settings(RELAXED, max_examples=200)
@given(path=st.sampled_from([path for path in paths(CALL) if len(path) > 1]), value=st.just(DELETED) | JSON)
def test_a_call_with_any_change_is_a_call_or_an_error(path: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    folder = make(tmp_path, changed(CALL, path, value), OTHER)
    before = snapshot(folder)
    run = open_run(folder)
    try:
        found = read(folder)
    except OpInterceptError:
        found = []
    for call in found:
        check_types(call)
        for name in (*call.tensors.values(), value):
            if isinstance(name, str):
                with pytest.raises(OpInterceptError, match=r"a tensor must have a name|is missing$"):
                    run.load(0, name)
        str(call.record).encode()
        json.dumps(call.record.as_dict())
    assert snapshot(folder) == before


def check_types(call: StoredCall) -> None:
    """Check the types that readers rely on."""
    record = call.record
    for count in (record.index, record.step, record.flops, record.bytes, record.forward):
        assert count is None or (type(count) is int and 0 <= count < 2**63)
    for text in (record.op, record.func, record.module, record.source, record.autocast, call.error):
        assert text is None or (type(text) is str and len(text) <= MAX_TEXT + 3)
        assert text is None or isinstance(text.encode(), bytes)  # without half a surrogate pair
    assert record.phase in ("forward", "backward", "recompute")
    assert record.grad_of in ("lhs", "rhs", None)
    assert record.elapsed is None or type(record.elapsed) is float
    for meta in (record.lhs, record.rhs, record.bias):
        assert meta is None or all(type(size) is int for size in meta.shape)
    for value in call.values.values():
        assert all(n is None or type(n) is float for n in (value.min, value.max, value.mean, value.rms))


@settings(RELAXED, max_examples=150)
@given(path=st.sampled_from(list(paths(INFO))), value=st.just(DELETED) | JSON)
@example(path=("tables", "calls", 3), value={"": None, ",": None})  # numpy raises a SyntaxError
def test_a_run_json_with_any_change_is_read_or_refused(path: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    folder = make(tmp_path, CALL, info=changed(INFO, path, value))
    try:
        info = open_run(folder).info
        for call in read(folder):
            check_types(call)
    except OpInterceptError:
        return
    json.dumps(info.as_dict())
    assert all(type(text) is str and text.encode("utf-8") is not None for text in info.argv)


@settings(RELAXED, max_examples=60)
@given(data=st.binary(max_size=400), name=st.sampled_from(TABLES))
def test_any_bytes_can_be_read(data: bytes, name: str, tmp_path: Path) -> None:
    folder = make(tmp_path, CALL, OTHER)
    (folder / name).write_bytes(data)
    assert read(folder) == []
    (folder / "run.json").write_bytes(data)
    with pytest.raises(OpInterceptError, match="must"):
        open_run(folder)


@settings(RELAXED, max_examples=300)
@given(name=st.sampled_from(TABLES), place=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
def test_a_bit_that_flips_gives_no_wrong_answer(name: str, place: int, bit: int, cut: bool, tmp_path: Path) -> None:
    folder = make(tmp_path, *[CALL, OTHER] * 3)
    right = read(folder)
    data = bytearray((folder / name).read_bytes())
    place %= len(data)
    data[place] ^= 1 << bit
    (folder / name).write_bytes(bytes(data[:place] if cut else data))
    found = read(folder)
    assert len(found) < 6
    assert [call for call in right if call in found] == found
    assert cut or len(found) >= 4  # a newline may be lost, and joins two lines


@settings(RELAXED, max_examples=200)
@given(data=st.data())
def test_any_record_that_checks_is_a_call_or_an_error(data: st.DataObject, tmp_path: Path) -> None:
    folder = make(tmp_path, CALL, OTHER)
    change_records(folder, data.draw)
    try:
        for call in read(folder):
            check_types(call)
    except OpInterceptError as error:
        assert "has no text of a call" in str(error)  # noqa: PT017 - either is right


def test_a_torn_end_is_no_call(tmp_path: Path) -> None:
    folder = make(tmp_path, CALL, OTHER)
    whole = (folder / "calls.bin").read_bytes()
    for cut in (1, RECORD.itemsize // 2, RECORD.itemsize - 1):
        (folder / "calls.bin").write_bytes(whole[:-cut])
        assert [call.record.op for call in open_run(folder).calls()] == ["aten::mm"]


def test_damaged_calls_are_skipped_with_one_warning(tmp_path: Path) -> None:
    folder = make(tmp_path, *[CALL] * 5)
    damaged = bytearray((folder / "calls.bin").read_bytes())
    damaged[8] ^= 1
    (folder / "calls.bin").write_bytes(damaged)
    texts = (folder / "texts.jsonl").read_bytes().split(b"\n")
    texts[2] = texts[2].replace(b"args", b"argz")
    (folder / "texts.jsonl").write_bytes(b"\n".join(texts))
    run = open_run(folder)
    with pytest.warns(OpInterceptWarning, match=r"^skipped 2 damaged calls in ") as caught:
        assert [call.record.index for call in run.calls()] == [1, 3, 4]
    assert len(caught) == 1


@pytest.mark.parametrize(("row", "wrong"), [(1, False), (0, True), (2, True), (1 << 40, True)])
def test_the_text_of_a_call_names_rows_of_tensors(row: int, wrong: bool, tmp_path: Path) -> None:
    look = SIGNATURE | {"roles": {"lhs": [2, True], "weights[0]": [2, True]}}
    folder = make(tmp_path, CALL | {"signature": look, "text": {"index": 0, "more": {"weights[0]": row}}})
    if wrong:
        with pytest.raises(OpInterceptError, match="is damaged: the text of a call names rows that are not there"):
            list(open_run(folder).calls())
    else:
        (call,) = open_run(folder).calls()
        assert call.values["weights[0]"] == call.values["lhs"]


@pytest.mark.parametrize("name", ["calls.bin", "tensors.bin", "texts.jsonl"])
def test_a_hole_of_any_size_is_refused_at_once(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path, CALL)
    try:
        os.truncate(folder / name, 8 << 30)
    except OSError:
        pytest.skip("no room for sparse files")
    started = time.process_time()
    with pytest.raises(OpInterceptError, match=rf"{name} is damaged: most of its (records|lines) are none"):
        list(open_run(folder).calls())
    assert time.process_time() - started < 2


def test_shared_texts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_SHARED", 10)
    with pytest.raises(OpInterceptError, match=r"jsonl' must have at most 10 bytes, got \d+; no recorder writes more"):
        list(open_run(make(tmp_path, CALL)).calls())


DEEP = b"[" * 500_000 + b"]" * 500_000


EXTREME = {
    "deep list": DEEP,
    "deep object": b'{"a":' * 300_000 + b"1" + b"}" * 300_000,
    "long number": b"9" * 1_000_000,
    "large exponent": b"1e999999999",
    "many lists": b"[" + b"[]," * 300_000 + b"[]]",
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("part", ["signature", "site", "text"])
@pytest.mark.parametrize("text", EXTREME)
def test_an_extreme_text_takes_little_memory_and_time(text: str, part: str, tmp_path: Path) -> None:
    whole = b'{"number":1,"a":%s}' % EXTREME[text]
    folder = make(tmp_path, CALL, CALL | {part: b'%s,"crc":"%08x"}\n' % (whole[:-1], zlib.crc32(whole))})
    started = time.process_time()

    def reading() -> None:
        with contextlib.suppress(OpInterceptError):
            assert len(read(folder)) == 1

    assert peak_memory(reading) < 100 << 20
    assert time.process_time() - started < 5


def test_lines_that_are_shared_may_come_in_any_order_and_twice(tmp_path: Path) -> None:
    folder = make(tmp_path, CALL, OTHER, CALL)
    right = read(folder)
    for name in ("signatures.jsonl", "sites.jsonl"):
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(b"".join([*lines[::-1], lines[1]]))
    assert read(folder) == right
    lines = (folder / "signatures.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "signatures.jsonl").write_bytes(b"".join(lines[1:]))
    assert read(folder) == right[:2]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    (call,) = read(make(tmp_path, CALL | {"site": SITE | {"module": "a\ud800b"}}))
    assert call.record.module == "a?b"


@pytest.mark.parametrize(
    "info",
    [
        b"",
        b"[]",
        b"null",
        b'{"schema": 2}',
        b'{"schema": [' + b"[" * 900 + b"]" * 900 + b"]}",
        b'{"schema": ' + b"9" * 4000 + b"}",
        DEEP,
        b" " * (2 << 20),
        b'{"schema": 3}',
        json.dumps(INFO | {"rank": -1}).encode(),
        json.dumps(INFO | {"rank": True}).encode(),
        json.dumps(INFO | {"tensors": ["full"]}).encode(),
        json.dumps(INFO | {"versions": {"torch": 2}}).encode(),
        json.dumps(INFO | {"argv": "train.py"}).encode(),
        json.dumps(INFO).encode("utf-16"),
    ],
    ids=range(15),
)
def test_an_invalid_run_json_is_refused(info: bytes, tmp_path: Path) -> None:
    make(tmp_path, CALL)
    (tmp_path / "run.json").write_bytes(info)
    with pytest.raises(OpInterceptError, match=r"run.json must (hold a JSON object|have (schema 3, got|a valid '))"):
        open_run(tmp_path)


@pytest.mark.parametrize("schema", [1, 2])
def test_a_run_of_an_older_version_names_the_version_that_reads_it(schema: int, tmp_path: Path) -> None:
    make(tmp_path, info=INFO | {"schema": schema, "versions": {"opintercept": "0.1.0"}})
    with pytest.raises(OpInterceptError, match=r"schema 3, got \d; read it with opintercept 0.1.0, which wrote it$"):
        open_run(tmp_path)


@pytest.mark.parametrize("path", ["missing", "empty", "file", "a\0b", "x" * 5000])
def test_a_folder_without_a_run_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(OpInterceptError, match=r"^a run must be a folder with run.json, or with rank0/run.json"):
        open_run(tmp_path / path)


ODD_FILES: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, real: path.symlink_to(real),
    "dangling": lambda path, real: path.symlink_to(real.with_name("nothing")),
    "loop": lambda path, real: path.symlink_to(path),
    "folder": lambda path, real: path.mkdir(),
    "pipe": lambda path, real: os.mkfifo(path),
    "device": lambda path, real: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", ["run.json", *TABLES])
@pytest.mark.parametrize("kind", ODD_FILES)
def test_only_plain_files_are_read(name: str, kind: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "run", CALL)
    (folder / name).rename(tmp_path / "real")
    ODD_FILES[kind](folder / name, tmp_path / "real")
    with pytest.raises(OpInterceptError, match=r"(as|must be) a plain file[:;]"):
        list(open_run(folder).calls())


def test_a_closed_run_leaves_no_file_open(tmp_path: Path) -> None:
    folder = make(tmp_path, CALL)
    before = os.listdir("/proc/self/fd")
    run = open_run(folder)
    assert len(list(run.calls())) == 1
    run.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert len(list(run.calls())) == 1
    del run
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_run_without_calls_has_none(tmp_path: Path) -> None:
    folder = make(tmp_path)
    for name in TABLES:
        (folder / name).unlink()
    assert list(open_run(folder).calls()) == []


def test_ranks_are_folders_and_no_links(tmp_path: Path) -> None:
    for number in (0, 2, 10):
        make(tmp_path / f"rank{number}", CALL, info=INFO | {"rank": number})
    make(tmp_path / "elsewhere", CALL)
    (tmp_path / "rank3").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "rank4").write_text("")
    make(tmp_path / "rankle", CALL)
    make(tmp_path / "rank\N{ARABIC-INDIC DIGIT ONE}", CALL)
    run = open_run(tmp_path)
    assert run.ranks == (0, 2, 10)
    assert [call.rank for call in run.calls()] == [0, 2, 10]


def test_more_processes_are_read_together_than_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opintercept.runs.store.run._MOST_OPEN", 1)
    for number in range(4):
        make(tmp_path / f"rank{number}", *[CALL] * (number + 1), info=INFO | {"rank": number})
    run = open_run(tmp_path)
    frame = run.to_pandas()
    assert frame["rank"].tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert frame["lhs_hash"].tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]
    together = [run.columns(rank) for rank in run.ranks]
    assert [each.read(("index",), 0, len(each))["index"].tolist() for each in together] == [
        list(range(number + 1)) for number in range(4)
    ]


def test_a_number_gives_its_call_again(tmp_path: Path) -> None:
    folder = make(tmp_path, *[CALL, OTHER] * 3)
    data = bytearray((folder / "calls.bin").read_bytes())
    data[RECORD.itemsize] ^= 1
    (folder / "calls.bin").write_bytes(data)
    run = open_run(folder)
    with pytest.warns(OpInterceptWarning, match="skipped 1 damaged call in"):
        places = list(run.located(0))
    assert [call.record.index for _, call in places] == [0, 2, 3, 4, 5]
    for number, call in reversed(places):
        assert run.at(0, number) == call


@settings(RELAXED, max_examples=40)
@given(data=st.data())
def test_scattered_calls_are_gathered_as_they_are_read(data: st.DataObject, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_BLOCK", data.draw(st.integers(1, 9)))
        patch.setattr(columns, "CHUNK", data.draw(st.integers(1, 70)))
        found = columns.Columns(make(tmp_path, *[CALL] * 60), 0)
        every = found.read(columns.NUMBERS, 0, 60)
        numbers = np.array(data.draw(st.lists(st.integers(0, 59), max_size=9)), np.int64)
        for name, column in found.gather(numbers, columns.NUMBERS).items():
            np.testing.assert_array_equal(column, every[name][numbers])
        joined = [chunk["lhs_hash"] for _, chunk in found.chunks(("lhs_hash",))]
        assert np.concatenate(joined).tolist() == every["lhs_hash"].tolist() == list(range(60))


def test_a_tensor_that_was_not_read_has_no_values(tmp_path: Path) -> None:
    path = make(tmp_path, *[CALL] * 4)
    records = np.fromfile(path / "calls.bin", RECORD)
    records["lhs"][1] = 0
    (path / "calls.bin").write_bytes(seal(records).tobytes())
    assert columns.Columns(path, 0).read(("lhs_hash",), 0, 4)["lhs_hash"].tolist() == [0, 0, 2, 3]


def test_many_calls_are_gathered_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = columns.Columns(make(tmp_path, *[CALL] * 60), 0)
    monkeypatch.setattr(columns, "CHUNK", 10)
    sizes, read = [], columns.RecordTable.read

    def counted(self: columns.RecordTable, first: int, end: int) -> Any:
        sizes.append(end - first)
        return read(self, first, end)

    monkeypatch.setattr(columns.RecordTable, "read", counted)
    assert found.gather(np.arange(60), ("index",))["index"].tolist() == list(range(60))
    assert sizes == [10] * 6


# Tensors


def named(name: str) -> StoredCall:
    return StoredCall(None, 0, {}, {"lhs": name}, {}, None, None)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with a tensor."""
    with intercept(runs.RunRecorder(tmp_path / "run", "full")):
        torch.eye(3) @ torch.arange(9.0).reshape(3, 3)
    return open_run(tmp_path / "run")


def name_in(run: Run) -> str:
    return next(run.calls()).tensors["rhs"]


def test_a_tensor_is_read_unless_it_is_larger_than_the_limit(run: Run) -> None:
    call = next(run.calls())
    stored = run.tensor(call, "rhs", limit=36)
    assert stored is not None
    assert torch.equal(stored, torch.arange(9.0).reshape(3, 3))
    assert run.tensor(call, "bias") is None
    with pytest.raises(OpInterceptError, match=r"has 36 bytes, more than the limit of 35$"):
        run.tensor(call, "rhs", limit=35)
    with pytest.raises(OpInterceptError, match="rank must be one of 0, got 1"):
        run.load(1, call.tensors["rhs"])


NAMES = [
    "../x",
    "0/../../etc/passwd",
    "0/0123456789abcdef-0\n",
    "0/0123456789abcdef-0/..",
    "",
    "\0",
    "0/x",
    "\N{ARABIC-INDIC DIGIT ZERO}/" + "0" * 16,
]


@pytest.mark.parametrize(
    "name", [*NAMES, "-1/0123456789abcdef-0", "123456789/0123456789abcdef-0", "0/0123456789ABCDEF-0"]
)
def test_no_path_is_taken_from_a_tensors_name(name: str, run: Run) -> None:
    with pytest.raises(OpInterceptError, match="a tensor must have a name such as"):
        run.tensor(named(name), "lhs")
    with pytest.raises(OpInterceptError, match="has no text of a call"):
        read(make(run.path, changed(CALL, ("text", "tensors", "lhs"), name)))


@pytest.mark.parametrize("kind", [*ODD_FILES, "link to the folder", "missing"])
def test_only_a_plain_tensor_file_is_read(kind: str, run: Run, tmp_path: Path) -> None:
    name, path = name_in(run), run.path / "tensors/00000000.safetensors"
    if kind == "link to the folder":
        path.parent.rename(tmp_path / "elsewhere")
        path.parent.symlink_to(tmp_path / "elsewhere")
    else:
        path.rename(tmp_path / "real")
    if kind in ODD_FILES:
        ODD_FILES[kind](path, tmp_path / "real")
    with pytest.raises(OpInterceptError, match=r"must be a plain (file|folder); remove it|is missing"):
        run.load(0, name)


class Boom:
    """Makes a folder if it is ever unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


def test_a_pickle_is_not_executed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = run.path / "tensors/00000000.safetensors"
    name = name_in(run)
    for write in (lambda: path.write_bytes(pickle.dumps(Boom())), lambda: torch.save({"x": Boom()}, path)):
        write()
        with pytest.raises(OpInterceptError, match="cannot read tensor "):
            run.load(0, name)
    assert not (tmp_path / "unpickled").exists()


def head(name: str, **entry: Any) -> bytes:
    whole = {"dtype": "F32", "shape": [3, 3], "data_offsets": [0, 36]} | entry
    return json.dumps({name: whole}).encode()


HEADS: dict[str, Any] = {
    "negative offset": {"data_offsets": [-4, 32]},
    "reversed": {"data_offsets": [36, 0]},
    "beyond the end": {"data_offsets": [0, 1 << 40]},
    "huge offsets": {"data_offsets": [2**64 - 36, 2**64]},
    "too many bytes": {"data_offsets": [0, 40]},
    "huge shape": {"shape": [2**62, 2**62]},
    "overflowing shape": {"shape": [2**32, 2**32, 0]},
    "negative shape": {"shape": [-3, -3]},
    "other shape": {"shape": [3]},
    "float shape": {"shape": [3.0, 3]},
    "unknown dtype": {"dtype": "X32"},
    "other dtype": {"dtype": "F64"},
    "no dtype": {"dtype": None},
    "many dimensions": {"shape": [1] * 100_000 + [9]},
}


@pytest.mark.parametrize("case", HEADS)
def test_a_hostile_head_is_refused(case: str, run: Run) -> None:
    name = name_in(run)
    path = run.path / "tensors/00000000.safetensors"
    text = head(name.partition("/")[2], **HEADS[case])
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 36)

    def loading() -> None:
        with pytest.raises(OpInterceptError, match="cannot read tensor "):
            run.load(0, name)

    assert peak_memory(loading) < 50 << 20


@settings(RELAXED, max_examples=150)
@given(data=st.data())
def test_a_damaged_tensor_file_gives_a_tensor_or_an_error(data: st.DataObject, tmp_path: Path) -> None:
    folder = make(tmp_path / "damaged", CALL)
    (folder / "tensors").mkdir(exist_ok=True)
    text = head("0123456789abcdef-0")
    whole = bytearray(struct.pack("<Q", len(text)) + text + b"\1" * 36)
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    cut = data.draw(st.integers(0, len(whole)) | st.just(len(whole)))
    path = folder / "tensors/00000000.safetensors"
    path.write_bytes(bytes(whole[:cut]) if data.draw(st.booleans()) else bytes(whole))
    before = snapshot(folder)
    try:
        tensor = open_run(folder).load(0, "0/0123456789abcdef-0")
    except OpInterceptError:
        pass
    else:
        assert tensor.numel() * tensor.element_size() <= 36
    assert snapshot(folder) == before


def test_a_sparse_file_of_many_gigabytes_is_not_read(run: Run) -> None:
    name = name_in(run)
    path = run.path / "tensors/00000000.safetensors"
    size = 5 << 30
    text = head(name.partition("/")[2], shape=[size // 4], data_offsets=[0, size])
    try:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + size)
    except OSError:
        pytest.skip("no room for sparse files")
    with pytest.raises(OpInterceptError, match=r"has 5368709120 bytes, more than the limit of 4294967296$"):
        run.load(0, name)


def test_reading_more_calls_takes_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "CHUNK", 100)
    monkeypatch.setattr(columns, "_KNOWN", 8)
    run = open_run(make(tmp_path, *[CALL] * 2000))
    few, many = (peak_memory(lambda: deque(islice(run.calls(), count), 0)) for count in (200, 2000))  # noqa: B023
    assert many < few + 50_000
