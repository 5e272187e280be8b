"""`CallRecord` and what follows from its fields: dicts, and the calls of a run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import sampled
import torch
from builds import unoptimized
from compiler import needs_compiler
from native import library
from processes import run_python

import opintercept
from opintercept import CallRecord, hooks, intercept, runs
from opintercept._core.record import NOTED_WHOLE
from opintercept.runs.store.records import writes_as_kernels

# A line for a copy of the package, before which line it goes, and the value of the field for PROGRAM's calls.
NEW_FIELDS = {
    "arity": ("    arity: int | None = field(metadata=shared(lambda call: len(call.args)))", "    opaque: bool = ", 2),
    "aliases": (
        '    aliases: tuple[str, ...] | None = field(metadata=noted("call_site.aliases"))',
        "    elapsed: float | None = ",
        [""],
    ),
    "ordinal": ('    ordinal: int | None = field(metadata=noted("step"))', "    elapsed: float | None = ", 5),
    "total": (
        "    total: float | None = field(metadata=taken(lambda call: float(call.output.sum())))",
        "    elapsed: float | None = ",
        24.0,
    ),
    "sums": (
        "    sums: tuple[float, ...] | None = field(metadata=taken(lambda call: (float(call.output.sum()),)))",
        "    elapsed: float | None = ",
        [24.0],
    ),
}
# Of eight calls, how many compiled kernels show to a Recorder and to a RunRecorder with such a field. A number has a
# place in `layout.h`, with which the library is built anew: one of them shows that this works. `test_layout.py`
# compiles that header alone.
SHOWN = {"arity": [1, 1], "aliases": [1, 8], "ordinal": [1, 8], "sums": [8, 8]}
PROGRAM = """
import json, sys, torch
from pathlib import Path
from opintercept import OpCall, hooks, intercept, runs
from opintercept.cli import main

names, engine = json.loads(sys.argv[1]), sys.argv[2]
made, seen = OpCall.__init__, []


def count(call, *args):
    seen.append(call)
    made(call, *args)


def multiply():
    for _ in range(8):
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))


def tell(records):
    found = {json.dumps({name: record.as_dict()[name] for name in names}) for record in records}
    assert len(found) == 1, found
    print(*found)


OpCall.__init__ = count
recorder, counts = hooks.Recorder(), []
for hook in (recorder, runs.RunRecorder("run")):
    seen.clear()
    with intercept(hook, engine=engine) as block:
        block.step(5)
        multiply()
    counts.append(len(seen))
print(json.dumps(counts))
tell(recorder.records)
for run in ("run", "older"):
    tell([call.record for call in runs.open_run(run).calls()])
assert runs.diff(runs.open_run("run"), runs.open_run("older")).pairs == 8
frame = runs.open_run("run").to_pandas()
print(json.dumps({name: frame[name][7] for name in names if name in frame}, default=lambda number: number.item()))
with intercept([hooks.Recorder(), runs.RunRecorder("flight", flight=8)], engine=engine) as block:
    block.step(5)
    multiply()
    tell([call.record for call in runs.open_run("flight").calls()])
main(["report", "run", "-o", "page.html"])
main(["show", "--calls", "--json", "run"])
"""


def records_with(fields: list[str], engine: str, folder: Path) -> tuple[list[int], dict[str, Any]]:
    """How many calls hooks have seen in Python of a package with new fields, and the values of these in all places."""
    package = Path(opintercept.__file__).parent
    shutil.copytree(package, folder / "opintercept", ignore=shutil.ignore_patterns("__pycache__"))
    source = folder / "opintercept/_core/record.py"
    text = source.read_text("utf-8")
    for line, before, _ in (NEW_FIELDS[name] for name in fields):
        assert text.count(before) == 1
        text = text.replace(before, f"{line}\n{before}")
    source.write_text(text, "utf-8")
    with intercept(runs.RunRecorder(folder / "older")) as block:
        block.step(5)
        for _ in range(8):
            torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    environment = os.environ | {"CXX": unoptimized(folder)}
    done = run_python("-c", PROGRAM, json.dumps(fields), engine, cwd=folder, env=environment, check=True)
    counts, *found, page, _ = done.stdout.split("\n", 7)
    assert page.startswith("page.html")
    row = json.loads(done.stdout.partition("page.html")[2].partition("\n")[2])["calls"][7]
    places = dict(zip(("record", "run", "older", "frame", "flight"), map(json.loads, found), strict=True))
    return json.loads(counts), places | {"shown": {name: row[name] for name in fields}}


def expected_of(fields: list[str]) -> dict[str, Any]:
    values = {name: value for name, (_, _, value) in NEW_FIELDS.items() if name in fields}
    places = dict.fromkeys(("record", "run", "flight", "shown"), values)
    in_frame = {name: value for name, value in values.items() if name != "arity"}
    return places | {"older": dict.fromkeys(values), "frame": in_frame}


@pytest.mark.slow
def test_a_new_field_of_a_record_takes_one_line(tmp_path: Path) -> None:
    _, found = records_with([*NEW_FIELDS], "kernel", tmp_path)
    assert found == expected_of([*NEW_FIELDS])


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", SHOWN)
def test_a_field_that_compiled_kernels_do_not_know_is_right_all_the_same(name: str, tmp_path: Path) -> None:
    if sampled.on and name == "ordinal":
        pytest.skip("builds the library; run without --sampled")
    library()  # else it may be built here, without optimisation
    shown, found = records_with([name], "compiled", tmp_path)
    assert found == expected_of([name])
    assert shown == SHOWN[name]


def test_kernels_write_all_fields_of_a_record() -> None:
    remedy = "let kernels write the field, as CONTRIBUTING.md says: until then, hooks see each call in Python"
    assert NOTED_WHOLE, remedy
    assert writes_as_kernels(), remedy


def test_a_record_that_is_read_back_is_equal(tmp_path: Path) -> None:
    query = torch.ones(2, 3, 5, 8, requires_grad=True)
    recorder = hooks.Recorder()
    with intercept([recorder, runs.RunRecorder(tmp_path / "run")]):
        torch.nn.functional.scaled_dot_product_attention(query, query, query)[0].sum().backward()
        with torch.autocast("cpu"):
            torch.nn.Linear(3, 2)(torch.ones(4, 3)).sum().backward()
    assert {record.phase for record in recorder.records} == {"forward", "backward"}
    assert {record.autocast for record in recorder.records} == {None, "bfloat16"}
    assert [call.record for call in runs.open_run(tmp_path / "run").calls()] == recorder.records


def test_a_record_is_made_by_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        CallRecord(0, 0, "aten::mm")  # type: ignore[call-arg, arg-type]
