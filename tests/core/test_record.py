"""`CallRecord` and what follows from its fields: dicts, and the calls of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from processes import run_python

import opintercept
from opintercept import CallRecord, hooks, intercept, runs

# A line for a copy of the package, before which line it goes, and the value of the field for PROGRAM's call.
NEW_FIELDS = {
    "arity": ("    arity: int | None = field(metadata=shared(lambda call: len(call.args)))", "    opaque: bool = ", 2),
    "aliases": (
        '    aliases: tuple[str, ...] | None = field(metadata=noted("call_site.aliases"))',
        "    elapsed: float | None = ",
        [""],
    ),
    "total": (
        "    total: float | None = field(metadata=taken(lambda call: float(call.output.sum())))",
        "    elapsed: float | None = ",
        24.0,
    ),
}
PROGRAM = """
import json, sys, torch
from pathlib import Path
from opintercept import hooks, intercept, runs
from opintercept.cli import main

names = json.loads(sys.argv[1])
recorder = hooks.Recorder()
with intercept([recorder, runs.RunRecorder("run")]):
    torch.ones(2, 3) @ torch.ones(3, 4)
record = recorder.records[0]
print(json.dumps({name: record.as_dict()[name] for name in names}))
for run in ("run", "older"):
    (call,) = runs.open_run(run).calls()
    print(json.dumps({name: getattr(call.record, name) for name in names}))
(call,) = runs.open_run("run").calls()
assert call.record == record
assert runs.diff(runs.open_run("run"), runs.open_run("older")).pairs == 1
frame = runs.open_run("run").to_pandas()
print(json.dumps({name: frame[name][0] for name in names if name in frame}))
with intercept(runs.RunRecorder("flight", flight=3)):
    torch.ones(2, 3) @ torch.ones(3, 4)
    (call,) = runs.open_run("flight").calls()
    print(json.dumps({name: getattr(call.record, name) for name in names}))
main(["report", "run", "-o", "page.html"])
main(["show", "--calls", "--json", "run"])
"""


@pytest.mark.slow
def test_a_new_field_of_a_record_takes_one_line(tmp_path: Path) -> None:
    package = Path(opintercept.__file__).parent
    shutil.copytree(package, tmp_path / "opintercept", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "opintercept/_core/record.py"
    text = source.read_text("utf-8")
    for line, before, _ in NEW_FIELDS.values():
        assert text.count(before) == 1
        text = text.replace(before, f"{line}\n{before}")
    source.write_text(text, "utf-8")
    with intercept(runs.RunRecorder(tmp_path / "older")):
        torch.ones(2, 3) @ torch.ones(3, 4)
    done = run_python("-c", PROGRAM, json.dumps(list(NEW_FIELDS)), cwd=tmp_path, check=True)
    as_dict, stored, of_an_older_run, framed, of_a_flight, page, *shown = done.stdout.splitlines()
    assert page.startswith("page.html")
    expected = {name: value for name, (_, _, value) in NEW_FIELDS.items()}
    assert json.loads(as_dict) == expected
    assert json.loads(stored) == expected
    assert json.loads(of_an_older_run) == dict.fromkeys(NEW_FIELDS)
    assert json.loads(of_a_flight) == expected
    assert json.loads(framed) == {name: expected[name] for name in ("aliases", "total")}
    row = json.loads("".join(shown))["calls"][0]
    assert {name: row[name] for name in NEW_FIELDS} == expected


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
