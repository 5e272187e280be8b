"""Lines become the columns that their calls would become, whether or not they are decoded on the way."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

np = pytest.importorskip("numpy")

from opintercept import intercept, runs  # noqa: E402
from opintercept.runs.store import builder as _builder  # noqa: E402
from opintercept.runs.store.builder import Builder  # noqa: E402
from opintercept.runs.store.codec import decode  # noqa: E402


def recorded(folder: Path, tensors: runs.Kept) -> list[bytes]:
    """The lines of three steps of a training with an attention, and of a call that raises."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    with intercept(runs.RunRecorder(folder, tensors)):
        for _ in range(3):
            with torch.autocast("cpu"):
                layer(torch.randn(2, 3, 8), torch.zeros(3, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(2, 3) @ torch.ones(2, 3)
    return (folder / "calls.jsonl").read_bytes().splitlines(keepends=True)


def made(builder: Builder) -> tuple[Any, ...]:
    columns = {name: (column.dtype, column.tobytes()) for name, column in builder.take().items()}
    return columns, builder.signatures, builder.call_sites, builder.texts


def assert_same_as_decoded(lines: Iterable[bytes]) -> None:
    fast, slow = Builder(0), Builder(0)
    for line in lines:
        call = decode(line, 0)
        if call is not None:
            slow.add(call)
        assert (fast.add_line(line) is None) == (call is None), line
    assert made(fast) == made(slow)


@pytest.mark.parametrize("tensors", ["none", "stats", "sample", "full"])
def test_lines_make_the_columns_of_their_calls(tensors: runs.Kept, tmp_path: Path) -> None:
    lines = recorded(tmp_path / "run", tensors)
    assert_same_as_decoded([*lines, *lines])


@pytest.mark.parametrize("tensors", ["none", "stats", "sample"])
def test_only_the_first_lines_of_a_kind_are_decoded(
    tensors: runs.Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = recorded(tmp_path / "run", tensors)
    builder = Builder(0)
    for line in lines:
        builder.add_line(line)
    decoded: list[bytes] = []

    def counted(line: bytes, rank: int) -> Any:
        decoded.append(line)
        return decode(line, rank)

    monkeypatch.setattr(_builder, "decode", counted)
    for number, line in enumerate(lines):
        assert builder.add_line(line) == len(lines) + number
    assert decoded == [line for line in lines if b'"error":' in line]


# What may stand for a number, a text or a member of a line.
ODD = ["null", "-0", "-0.0", "1", "01", "1.", ".5", "1e5", "1E5", "1e400", "-1", "9223372036854775807", "true"]
ODD += ["9223372036854775808", "9" * 30, "9" * 5000, "NaN", "-Infinity", "1_0", "0.1", "[]", "{}", '""', '"lhs"', "1.0"]
ODD += ['"0123456789ABCDEF"', '"0123456789abcde"', '"0x23456789abcdef"', '"\\u0031123456789abcdef"', '"1"', "", " 1"]
ODD += ['"\\ud800"', '"\u0661"', '"a\nb"', '"forward"', '"backward"', '"rhs"', '"bfloat16"', '"../1"', "1,", '1,"x":1']
ODD += ['1,"index":7', '1,"values":{}', '1,"error":"no"', '1,"given":{"args":[],"kwargs":{}}']
ODD += ['{"args":[],"kwargs":{}}', "9999999999999999999"]
PIECES = re.compile(rb'(?<=[:,])(?:"[^"]*"|[^,:{}\[\]"]+|\{\})(?=[,}\]])|(?<=[{,])"[a-z0-9_.]+"(?=:)|[{}\[\],:]|\n')


def changed(line: bytes, draw: random.Random) -> bytes:
    """The line with a piece of it replaced, and perhaps with a part of it doubled or left out."""
    piece = draw.choice(list(PIECES.finditer(line)))
    line = line[: piece.start()] + draw.choice(ODD).encode() + line[piece.end() :]
    if draw.random() < 0.2:
        start, end = sorted(draw.randrange(len(line)) for _ in range(2))
        line = line[:start] + line[start:end] * draw.choice((0, 2)) + line[end:]
    return line


@pytest.mark.parametrize("tensors", ["none", "stats", "sample", "full"])
def test_changed_lines_make_the_columns_of_their_calls(tensors: runs.Kept, tmp_path: Path) -> None:
    lines = recorded(tmp_path / "run", tensors)
    draw = random.Random(tensors)
    # The whole lines come first, so that what is known of them is there; and again, as what is learnt must not spread.
    for _ in range(20):
        odd = [changed(draw.choice(lines), draw) for _ in range(40)]
        assert_same_as_decoded([*lines, *odd, *lines, *odd])


def test_members_after_the_known_ones_count(tmp_path: Path) -> None:
    line = json.loads(recorded(tmp_path / "run", "stats")[0])
    start = json.dumps(line, separators=(",", ":"))[:-1]
    further = ["", ',"step":7', ',"phase":"backward"', ',"values":{}', ',"flops":1', ',"error":"no"', ',"other":1', ","]
    lines = [f"{start}{more}}}\n".encode() for more in further]
    assert_same_as_decoded([*lines, *lines, *lines[::-1]])


@pytest.mark.parametrize("tensors", ["none", "stats", "sample"])
def test_the_end_of_a_line_counts(tensors: runs.Kept, tmp_path: Path) -> None:
    line = recorded(tmp_path / "run", tensors)[0]
    ends = [b"", b"}", b"}}", b"}x", b"xx", b"\n", b"\n}", b"}\n\n", b",}\n", b"}}\n", b" }\n", b"}\n"]
    assert_same_as_decoded([line, *(line[:-2] + end for end in ends)])


def test_tensors_with_and_without_a_hash_look_different(tmp_path: Path) -> None:
    line = recorded(tmp_path / "run", "stats")[0]
    without = re.sub(rb'"hash":"[0-9a-f]+"', b'"hash":null', line)
    assert_same_as_decoded([line, without, without, line])


@pytest.mark.parametrize("name", ["index", "step", "started", "thread", "nan"])
def test_the_largest_numbers_are_kept_and_larger_ones_refused(name: str, tmp_path: Path) -> None:
    line = recorded(tmp_path / "run", "stats")[0]
    numbers = [8 * 10**18, 9 * 10**17, 2**63 - 1, 2**63, 10**19 - 1, 10**19, -1]
    assert_same_as_decoded(
        [line, *(re.sub(rb'"%b":[0-9]+' % name.encode(), b'"%b":%d' % (name.encode(), n), line) for n in numbers)]
    )


def test_what_is_learnt_of_lines_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = recorded(tmp_path / "run", "stats")[0]
    monkeypatch.setattr(_builder, "_MOST_LEARNT", 3)
    names = [f'"module":"m{number}"'.encode() for number in (*range(10), *range(10))]
    lines = [re.sub(rb'"module":"[^"]*"', name, line) for name in names]
    lines += [re.sub(rb'"flops":[0-9]+', b'"flops":%d' % number, line) for number in (*range(10), *range(10))]
    lines.append(re.sub(rb'"module":"[^"]*"', b'"module":"%b"' % (b"m" * 10_000), line))
    assert_same_as_decoded([*lines, *lines])
    builder = Builder(0)
    for each in lines:
        builder.add_line(each)
    assert max(len(builder._call_sites_of), len(builder._signatures_of)) <= 3
