"""Runs made by hand, out of the calls that a test gives: the one place where tests write a run without recording it."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import hypothesis.strategies as st
import numpy as np
from made_calls import record

from opintercept import TensorMeta, runs
from opintercept._core.gemm import Gemm
from opintercept._core.record import OWN, SHARED, Summary
from opintercept._values.stats import Values
from opintercept.runs.record.writer import QueuedCall, Writer
from opintercept.runs.store.records import CALL, TENSOR, Encoder, seal
from opintercept.runs.store.run import SCHEMA
from opintercept.runs.store.untrusted import field_checks, reader

SHAPE = [4, 4]


INFO: dict[str, Any] = {
    "schema": SCHEMA,
    "argv": ["train.py"],
    "started": "2026-01-02T03:04:05",
    "finished": True,
    "tensors": "stats",
    "rank": 0,
    "world_size": 1,
    "versions": {"torch": "2.13.0"},
    "devices": [],
    "flags": {"threads": "1"},
}


def stats(**changes: Any) -> dict[str, Any]:
    """What a run keeps of a tensor's values."""
    plain = {"hash": None, "count": 16, "nan": 0, "inf": 0, "min": -1.0, "max": 1.0, "mean": 0.0, "rms": 0.5}
    return plain | changes


def values(name: Any, *, hashed: bool = True) -> dict[str, Any]:
    """Statistics and hash of the tensor of this name."""
    digest = hashlib.blake2b(str(name).encode(), digest_size=8).hexdigest()
    size = 1 + int(digest[:4], 16) / 2**17
    return stats(hash=digest if hashed else None, min=-size, max=size, rms=size / 2)


def call(
    module: str | None,
    lhs: Any,
    rhs: Any,
    output: Any,
    *,
    bias: Any = None,
    op: str = "aten::mm",
    grad: tuple[bool, bool] = (False, False),
    shape: list[int] = SHAPE,
    dtype: str = "float32",
    kept: bool = True,
    **fields: Any,
) -> dict[str, Any]:
    """A call as plain data. Tensors are given by name; a call that raised has no output."""

    def meta(name: Any, requires_grad: bool = False) -> Any:
        return None if name is None else TensorMeta(tuple(shape), dtype, "cpu", None, requires_grad)

    tensors = {"lhs": lhs, "rhs": rhs, "bias": bias, "output": output} | fields.pop("more", {})
    gemm = Gemm(1, shape[0], 4, 4, (dtype, dtype), (False, False))
    plain = record(
        op=op,
        module=module,
        source="train.py:7 in forward",
        lhs=meta(lhs, grad[0]),
        rhs=meta(rhs, grad[1]),
        bias=meta(bias),
        output=meta(output),
        gemm=None if "attention" in op else gemm,
        flops=128,
        bytes=192,
        started=1_700_000_000_000_000_000,
        thread=1,
        elapsed=0.001,
    ).as_dict()
    del plain["index"]  # its place in the run, unless it is given
    if kept:
        plain["values"] = {
            role: name if isinstance(name, dict) else values(name) for role, name in tensors.items() if name is not None
        }
    return plain | fields


class Known(NamedTuple):
    """Values that are known already."""

    values: Values

    def read(self) -> Values:
        return self.values


def write_files(folder: Path, calls: Iterable[dict[str, Any]], **info: Any) -> Path:
    """A run's folder, with these calls."""
    writer = Writer(folder, cast(Any, Described(INFO | {"rank": 0} | info)), None, Encoder())
    writer.start()
    summaries: dict[str, Summary] = {}
    for number, each in enumerate(calls):
        writer.put(queued({"index": number} | each, summaries))
    writer.close()
    assert writer.failure is None, writer.failure
    members = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(members | INFO | info))
    return folder


class Described(dict[str, Any]):
    """What `run.json` is to say, whatever it is."""

    def as_dict(self) -> dict[str, Any]:
        return dict(self)


def queued(given: dict[str, Any], summaries: dict[str, Summary]) -> QueuedCall:
    """What a recorder would queue of a call; calls that look alike share a summary."""
    shared = {name: given.get(name) for name in SHARED}
    text = json.dumps(shared)
    if text not in summaries:
        summaries[text] = Summary(**SHARED_OF(json.loads(text)))
    own = {name: given.get(name) for name in OWN}
    note = SimpleNamespace(
        summary=summaries[text],
        call_site=SimpleNamespace(module=own.pop("module"), source=own.pop("source")),
        autocast=own["autocast"],
        autocast_name=own.pop("autocast"),
        **own,
    )
    tensors = given.get("tensors", {})
    kept: list[Any] = list(tensors.values())
    return QueuedCall(
        cast(Any, note),
        {role: Known(Values(**each)) for role, each in given.get("values", {}).items()},
        kept,
        {role: place for place, role in enumerate(tensors)},
        json.dumps(given.get("arguments") or {}),
        numbered(given.get("given"), kept),
        given.get("error"),
    )


def numbered(value: Any, kept: list[Any]) -> Any:
    """Arguments with the numbers of tensors in place of their names, as a recorder queues them."""
    if isinstance(value, list):
        return [numbered(each, kept) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        kept.append(value["tensor"])
    return {name: len(kept) - 1 if name == "tensor" else numbered(each, kept) for name, each in value.items()}


SHARED_OF = reader(field_checks(Summary))


def plain(run: runs.Run) -> list[dict[str, Any]]:
    """The calls of a run as `write` takes them."""
    calls = []
    for each in run.calls():
        fields: dict[str, Any] = {"tensors": each.tensors, "arguments": each.arguments}
        fields |= {"given": each.given, "error": each.error}
        values = {role: found.as_dict() for role, found in each.values.items()}
        calls.append(each.record.as_dict() | {"values": values} | fields)
    return calls


def rewrite(path: Path, calls: list[dict[str, Any]]) -> runs.Run:
    """Put other calls into the folder of a process, and open it."""
    info = json.loads((path / "run.json").read_text())
    for name in ("calls.bin", "tensors.bin", "signatures.jsonl", "sites.jsonl", "texts.jsonl"):
        (path / name).unlink()
    write_files(path, calls, **info)
    return runs.open_run(path)


def change_records(path: Path, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
    """Give some fields of the records of a process any content, with checks that are right."""
    for name, kind in (("calls.bin", CALL), ("tensors.bin", TENSOR)):
        made = np.fromfile(path / name, kind)
        for field in draw(st.lists(st.sampled_from(kind.names), max_size=4)):
            row, size = draw(st.integers(0, len(made) - 1)), kind[field].itemsize
            made[field][row] = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), kind[field])[0]
        (path / name).write_bytes(seal(made).tobytes())


def peak_memory(program: Callable[[], object]) -> int:
    """The most memory that a program takes for objects and arrays."""
    tracemalloc.start()
    try:
        program()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def add_damaged(path: Path) -> None:
    """Add what is no record to the calls of a process."""
    with (path / "calls.bin").open("ab") as file:
        file.write(b"\1" * CALL.itemsize)


def write(folder: Path, calls: list[dict[str, Any]], **info: Any) -> runs.Run:
    return runs.open_run(write_files(folder, calls, **info))


def kinds(found: runs.Difference) -> dict[str, dict[str, int]]:
    return {str(row.module): {str(kind): count for kind, count in row.kinds.items()} for row in found.modules}


def chain(*modules: str, of: str = "") -> list[dict[str, Any]]:
    """A call of each module in turn, each with its own weight. Values differ from the module `of` on."""
    calls, suffix = [], ""
    for number, module in enumerate(modules):
        weight, x = f"w{module}", f"x{number}{suffix}"
        if module == of:
            suffix, weight = "'", f"w{module}'"
        calls.append(call(module, x, weight, f"y{number}{suffix}"))
    return calls


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def attention(arguments: dict[str, Any] | None = None, output: str = "y", **more: Any) -> list[dict[str, Any]]:
    """One call of an attention whose arguments were recorded."""
    given = {"dropout_p": 0.0, "is_causal": True, "attn_mask": None, "scale": None} | (arguments or {})
    given = {name: value for name, value in given.items() if name not in more}
    return [call("attn", "q", "k", output, op=ATTENTION, more={"value": "v"} | more, arguments=given)]


def ranked(folder: Path, *ranks: list[dict[str, Any]] | None, world_size: int | None = None) -> runs.Run:
    """A run of several processes; None stands for a folder that is missing."""
    for rank, calls in enumerate(ranks):
        if calls is not None:
            write(folder / f"rank{rank}", calls, rank=rank, world_size=world_size or len(ranks))
    return runs.open_run(folder)
