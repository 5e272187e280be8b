"""Reading runs from folders that anyone may have written: invalid content is refused or skipped."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import struct
import time
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opintercept import OpInterceptError, OpInterceptWarning, intercept, runs
from opintercept.runs import Run, open_run
from opintercept.runs.store import codec
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.untrusted import MAX_TEXT

pytestmark = pytest.mark.slow

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
INFO = {
    "schema": 1,
    "argv": ["train.py"],
    "started": "2026-01-01T00:00:00+0000",
    "finished": True,
    "tensors": "full",
    "rank": 0,
    "world_size": 1,
    "versions": {"torch": "2.13.0"},
    "devices": [],
    "flags": {"threads": "1"},
}
META = {"shape": [2, 3], "dtype": "float32", "device": "cpu", "stride": [3, 1], "requires_grad": False}
CALL: dict[str, Any] = {
    "index": 0,
    "step": 0,
    "op": "aten::mm",
    "func": "aten.mm.default",
    "phase": "forward",
    "module": "encoder.0",
    "source": "train.py:3 in step",
    "forward": None,
    "grad_of": None,
    "lhs": META,
    "rhs": META,
    "bias": None,
    "output": META,
    "gemm": {"batch": 1, "m": 2, "n": 3, "k": 3, "dtypes": ["float32", "float32"], "transposes": [False, False]},
    "flops": 36,
    "bytes": 72,
    "autocast": None,
    "opaque": False,
    "started": 1_700_000_000_000_000_000,
    "thread": 1,
    "elapsed": 1e-6,
    "values": {
        "lhs": {"hash": "0" * 16, "count": 6, "nan": 0, "inf": 0, "min": 0.0, "max": 1.0, "mean": 0.5, "rms": 0.6}
    },
    "tensors": {"lhs": "0/0123456789abcdef-0"},
    "arguments": {"alpha": 1, "scale": None, "padding": [[0, 1.5], "same"]},
    "given": {"args": [{"tensor": "0/0123456789abcdef-0", "shape": [2], "stride": [1]}], "kwargs": {}},
    "error": None,
}
DELETED = object()


def make(folder: Path, *lines: Any, info: Any = None) -> Path:
    """Write a run with these lines, which are bytes or plain data."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(INFO if info is None else info))
    text = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    (folder / "calls.jsonl").write_bytes(text)
    return folder


def read(folder: Path) -> list[StoredCall]:
    """The calls, without the warning about skipped lines."""
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


def test_a_line_is_read_as_it_was_written(tmp_path: Path) -> None:
    (call,) = open_run(make(tmp_path, CALL)).calls()
    plain = {key: CALL[key] for key in call.record.as_dict()}
    assert json.loads(json.dumps(call.record.as_dict())) == plain
    assert call.values["lhs"].as_dict() == CALL["values"]["lhs"]
    assert (call.tensors, call.arguments, call.error) == (CALL["tensors"], CALL["arguments"], None)
    assert call.given == CALL["given"]


def test_a_run_of_a_version_before_named_arguments_is_read(tmp_path: Path) -> None:
    old = changed(CALL, ("given",), DELETED) | {"arguments": CALL["given"]}
    bare = changed(changed(CALL, ("given",), DELETED), ("arguments",), DELETED)
    found = [(call.arguments, call.given) for call in open_run(make(tmp_path, old, bare)).calls()]
    assert found == [(None, CALL["given"]), (None, None)]


def test_tensors_have_the_names_of_their_parameters(tmp_path: Path) -> None:
    names = ["attn_mask", "hx_", "weights[0]", "args[12][3]", "output.12", "output_mask"]
    value, place = CALL["values"]["lhs"], CALL["tensors"]["lhs"]
    line = CALL | {"values": dict.fromkeys(names, value), "tensors": dict.fromkeys(names, place)}
    (call,) = open_run(make(tmp_path, line)).calls()
    assert list(call.values) == list(call.tensors) == names
    assert [codec.is_output(name) for name in names] == [False] * 4 + [True, False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("values", {"a b": CALL["values"]["lhs"]}),
        ("values", {"a" * 102: CALL["values"]["lhs"]}),
        ("values", {"a[1]" + "[1]" * 4: CALL["values"]["lhs"]}),
        ("values", {f"a{i}": CALL["values"]["lhs"] for i in range(codec.MAX_ROLES + 1)}),
        ("tensors", {"../a": "0/0123456789abcdef-0"}),
        ("arguments", []),
        ("arguments", {"a": {}}),
        ("arguments", {"a": [[[[[1]]]]]}),
        ("arguments", {"a": 2**64}),
        ("arguments", {"a": -(2**63) - 1}),
        ("arguments", {"a" * 101: 1}),
        ("arguments", {f"a{i}": 1 for i in range(codec.MAX_ARGUMENTS + 1)}),
        ("arguments", {"a": [0] * (codec.MAX_LIST + 1)}),
        ("given", []),
        ("given", {"args": {}, "kwargs": {}}),
    ],
    ids=range(15),
)
def test_names_and_arguments_are_bounded(field: str, value: Any, tmp_path: Path) -> None:
    found = read(make(tmp_path, CALL | {field: value}, changed(CALL, ("index",), 7)))
    assert [call.record.index for call in found] == [7]


def test_arguments_are_plain_and_short(tmp_path: Path) -> None:
    line = json.dumps(CALL | {"arguments": {"a": math.nan, "b": -math.inf, "c": "x" * 5000, "d": "\ud800", "e": True}})
    (call,) = open_run(make(tmp_path, f"{line}\n".encode())).calls()
    arguments = call.arguments
    assert arguments is not None
    assert {**arguments, "c": None} == {"a": "nan", "b": "-inf", "c": None, "d": "?", "e": True}
    assert len(arguments["c"]) == MAX_TEXT + 3


@settings(RELAXED, max_examples=200)
@given(path=st.sampled_from(list(paths(CALL))), value=st.just(DELETED) | JSON)
def test_a_line_with_any_change_is_a_call_or_is_skipped(path: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    folder = make(tmp_path, changed(CALL, path, value), CALL)
    before = snapshot(folder)
    run = open_run(folder)
    *first, last = read(folder)
    assert last.record.module == "encoder.0"
    for call in first:
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
def test_a_run_json_with_any_change_is_read_or_refused(path: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    folder = make(tmp_path, CALL, info=changed(INFO, path, value))
    try:
        info = open_run(folder).info
    except OpInterceptError:
        return
    json.dumps(info.as_dict())
    assert all(type(text) is str and text.encode("utf-8") is not None for text in info.argv)


@settings(RELAXED, max_examples=150)
@given(data=st.binary(max_size=200) | JSON.map(lambda plain: json.dumps(plain).encode()), torn=st.booleans())
def test_any_bytes_can_be_read(data: bytes, torn: bool, tmp_path: Path) -> None:
    folder = make(tmp_path, data + b"\n" * (not torn))
    assert read(folder) == []
    (folder / "run.json").write_bytes(data)
    with pytest.raises(OpInterceptError, match="must"):
        open_run(folder)


@settings(RELAXED, max_examples=100)
@given(place=st.integers(0, 10_000), what=st.binary(max_size=4), length=st.integers(0, 10_000))
def test_a_damaged_line_does_not_affect_others(place: int, what: bytes, length: int, tmp_path: Path) -> None:
    line = json.dumps(CALL).encode()
    place %= len(line)
    damaged = (line[:place] + what + line[place + length % 9 :]).replace(b"\n", b" ")
    found = read(make(tmp_path, CALL, damaged + b"\n", changed(CALL, ("index",), 7)))
    assert [call.record.index for call in (found[0], found[-1])] == [0, 7]
    assert len(found) in (2, 3)


def test_a_torn_line_is_skipped_with_one_warning(tmp_path: Path) -> None:
    line = json.dumps(CALL).encode()
    for cut in (1, len(line) // 2, len(line)):
        run = open_run(make(tmp_path, CALL, b"no call\n", line[:cut]))
        with pytest.warns(OpInterceptWarning, match=r"^skipped 2 unreadable lines in .*calls.jsonl;") as caught:
            assert len(list(run.calls())) == 1
        assert len(caught) == 1


DEEP = b"[" * 500_000 + b"]" * 500_000
LINES = {
    "deep list": b'{"index":' + DEEP + b"}",
    "deep, within Python's limit": json.dumps(changed(CALL, ("given", "args"), []))
    .encode()
    .replace(b'"args": []', b'"args": [' + b"[" * 800 + b"]" * 800 + b"]"),
    "deep object": b'{"a":' * 300_000 + b"1" + b"}" * 300_000,
    "long number": b'{"index":' + b"9" * 1_000_000 + b"}",
    "long float": json.dumps(CALL).encode().replace(b"1e-06", b"1" + b"0" * 400),
    "large exponent": json.dumps(CALL).encode().replace(b"1e-06", b"1e999999999"),
    "constants": json.dumps(CALL).encode().replace(b'"min": 0.0, "max": 1.0', b'"min": NaN, "max": -Infinity'),
    "long text": json.dumps(changed(CALL, ("module",), "m" * 1_000_000)).encode(),
    "half a pair": json.dumps(changed(CALL, ("module",), "a\ud800b")).encode(),
    "NUL": json.dumps(changed(CALL, ("module",), "a\0b")).encode(),
    "raw NUL": b"\0" * 100,
    "UTF-16": json.dumps(CALL).encode("utf-16"),
    "BOM": b"\xef\xbb\xbf" + json.dumps(CALL).encode(),
    "many keys": json.dumps(CALL | {"values": {}} | {f"k{i}": 0 for i in range(50_000)}).encode(),
    "many lists": b'{"arguments":[' + b"[]," * 300_000 + b"[]]}",
    "longer than a line may be": b" " * (3 * codec.MAX_LINE) + json.dumps(CALL).encode(),
}


@pytest.mark.parametrize("line", LINES)
def test_an_extreme_line_takes_little_memory_and_time(line: str, tmp_path: Path) -> None:
    folder = make(tmp_path, CALL, LINES[line] + b"\n", changed(CALL, ("index",), 7))
    tracemalloc.start()
    started = time.process_time()
    try:
        found = read(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found[0].record.index, found[-1].record.index) == (0, 7)
    assert len(found) in (2, 3)
    for call in found:
        check_types(call)
    assert peak < 100 << 20
    assert time.process_time() - started < 5


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    call, *_ = read(make(tmp_path, LINES["half a pair"] + b"\n"))
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
        b'{"schema": 1}',
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
    with pytest.raises(
        OpInterceptError, match=r"run.json must (hold a JSON object|have (schema 1 or 2, got|a valid '))"
    ):
        open_run(tmp_path)


@pytest.mark.parametrize("path", ["missing", "empty", "file", "a\0b", "x" * 5000])
def test_a_folder_without_a_run_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(OpInterceptError, match=r"^a run must be a folder with run.json, or with rank0/run.json"):
        open_run(tmp_path / path)


@pytest.mark.parametrize("name", ["run.json", "calls.jsonl"])
@pytest.mark.parametrize("kind", ["link", "dangling", "loop", "folder", "pipe", "device"])
def test_only_plain_files_are_read(name: str, kind: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "run", CALL)
    real = folder / name
    real.rename(tmp_path / "real")
    if kind == "link":
        real.symlink_to(tmp_path / "real")
    elif kind == "dangling":
        real.symlink_to(tmp_path / "nothing")
    elif kind == "loop":
        real.symlink_to(real)
    elif kind == "folder":
        real.mkdir()
    elif kind == "pipe":
        os.mkfifo(real)
    else:
        real.symlink_to("/dev/zero")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(OpInterceptError, match=r"(as|must be) a plain file[:;]"):
        list(open_run(folder).calls())
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_run_without_calls_has_none(tmp_path: Path) -> None:
    folder = make(tmp_path)
    (folder / "calls.jsonl").unlink()
    run = open_run(folder)
    assert list(run.calls()) == []
    with pytest.raises(OpInterceptError, match=r"calls.jsonl is gone; a run must not change while it is read$"):
        run.at(0, 0)


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


def test_a_position_gives_its_call_again(tmp_path: Path) -> None:
    lines = [changed(CALL, ("index",), index) for index in range(5)]
    run = open_run(make(tmp_path, lines[0], b"broken\n", *lines[1:]))
    with pytest.warns(OpInterceptWarning, match="skipped 1 unreadable line in"):
        places = list(run.located(0))
    with run.reader(0) as at:
        for position, call in reversed(places):
            assert at(position) == run.at(0, position) == call
        for wrong in (1, places[1][0] - 3, 10**9):
            with pytest.raises(OpInterceptError, match=r"calls.jsonl has no call at byte \d+; a run must"):
                at(wrong)


# Tensors


def named(name: str) -> StoredCall:
    return StoredCall(None, 0, {}, {"lhs": name}, None, None, None)  # type: ignore[arg-type]


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
    assert read(make(run.path, changed(CALL, ("tensors", "lhs"), name))) == []


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "link to the folder", "missing"])
def test_only_a_plain_tensor_file_is_read(kind: str, run: Run, tmp_path: Path) -> None:
    name, path = name_in(run), run.path / "tensors/00000000.safetensors"
    path.rename(tmp_path / "real")
    if kind == "link":
        path.symlink_to(tmp_path / "real")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to the folder":
        (tmp_path / "real").rename(path)
        (run.path / "tensors").rename(tmp_path / "elsewhere")
        (run.path / "tensors").symlink_to(tmp_path / "elsewhere")
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
    tracemalloc.start()
    try:
        with pytest.raises(OpInterceptError, match="cannot read tensor "):
            run.load(0, name)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


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


def test_reading_more_calls_takes_no_more_memory(tmp_path: Path) -> None:
    folder = make(tmp_path, *[CALL] * 200)
    run = open_run(folder)
    (folder / "calls.jsonl").write_bytes((folder / "calls.jsonl").read_bytes() * 20)
    peaks = []
    for count in (200, 1500):
        tracemalloc.start()
        for _ in zip(range(count), run.calls(), strict=False):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 50_000
