"""Results as data frames and in notebooks."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]
import polars
import pytest
import torch
from made_runs import call, write
from native import run_python
from torch import nn

from opintercept import hooks, intercept, runs
from opintercept._core import tables
from opintercept._core.tables import Cells


def watched(hook: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with intercept(hook):
        net(torch.randn(3, 4)).sum().backward()
    return hook


@pytest.mark.parametrize("make", [hooks.Profile, hooks.Stats, hooks.Reference], ids=lambda make: make.__name__)
def test_frames_have_a_column_for_each_attribute_of_a_row(make: Any) -> None:
    hook = watched(make())
    rows = hook.rows()
    assert len(rows) > 2
    by_pandas, by_polars = hook.to_pandas(), hook.to_polars()
    assert isinstance(by_pandas, pandas.DataFrame)
    assert isinstance(by_polars, polars.DataFrame)
    for name in type(rows[0]).__dataclass_fields__:
        values = [getattr(row, name) for row in rows]
        if values != [None] * len(rows):
            assert by_pandas[name].tolist() == values, name
        assert by_polars[name].to_list() == values, name
    assert list(by_pandas.columns) == by_polars.columns == list(type(rows[0]).__dataclass_fields__)


def test_the_records_of_a_recorder_are_a_frame() -> None:
    recorder = watched(hooks.Recorder())
    frame = recorder.to_pandas()
    assert frame["op"].tolist() == [record.op for record in recorder.records]
    assert frame["output"].tolist() == [str(record.output) for record in recorder.records]
    assert frame["flops"].sum() == sum(record.flops for record in recorder.records)
    assert recorder.to_polars()["phase"].to_list() == [record.phase for record in recorder.records]


@pytest.mark.parametrize("make", [hooks.Profile, hooks.Stats, hooks.Reference, hooks.Recorder])
def test_a_hook_without_calls_has_an_empty_frame(make: Any) -> None:
    assert len(make().to_pandas()) == 0
    assert make().to_polars().columns == list(make().to_pandas().columns)


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_a_package_that_is_missing_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(wanted: str) -> Any:
        raise ImportError(wanted)

    monkeypatch.setattr(tables, "import_module", missing)
    with pytest.raises(ImportError, match=rf"^to_{name}\(\) needs {name}; pip install {name}$"):
        getattr(hooks.Stats(), f"to_{name}")()
    assert importlib.import_module(name)


def test_a_notebook_shows_the_cells_of_the_text() -> None:
    profile = watched(hooks.Profile())
    shown = profile._repr_html_()
    cells = re.findall(r"<t[dh](?: [^>]*)?>(.*?)</t[dh]>", shown)
    lines = str(profile).splitlines()
    assert " ".join(cells).split() == str(profile).split()
    assert len(cells) == 12 * len(lines)
    shares = re.findall(r"transparent ([\d.]+%)", shown)
    assert shares == [line.split()[-3] for line in lines[1:]]


def test_html_escapes_what_programs_name() -> None:
    cells = Cells(["module", "<n>"], [["<script>alert(1)</script>", "1"], ["a\x1b[31m", "2"]], left=1, notes=["<b>"])
    shown = cells.html()
    assert "<script" not in shown
    assert "<b>" not in shown
    assert "\x1b" not in shown
    assert "&lt;script&gt;" in shown


CELLS = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
shell.run_line_magic("load_ext", "opintercept")
shell.run_cell("import torch; a = torch.ones(4, 4)")
for cell in (
    "%%intercept\\na @ a",
    "%%intercept Stats('lhs'), NonFinite(action='record')\\nb = a @ a\\nc = b @ b",
    "from opintercept import hooks; stats = hooks.Stats('rhs')",
    "%%intercept stats\\na @ a\\nraise KeyError('inside')",
):
    print("cell", flush=True)
    shell.run_cell(cell)
print(shell.user_ns["b"].sum().item(), len(shell.user_ns["stats"].rows()))
"""


@pytest.mark.slow
def test_the_cell_of_the_page_shows_its_hooks() -> None:
    page = Path(__file__).parents[2] / "docs" / "integrations" / "index.md"
    (cell,) = re.findall(r"^```text\n(%%intercept.*?)```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    code = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
shell.run_line_magic("load_ext", "opintercept")
shell.run_cell("import torch; model = torch.nn.Linear(4, 2); batch = torch.ones(3, 4)")
shell.run_cell({cell!r}).raise_error()
"""
    shown = "\n".join(run_python(code))
    assert re.search(r"^Linear +addmm +lhs +forward ", shown, re.MULTILINE)
    assert "no watched call made a value that is not finite" in shown


@pytest.mark.slow
def test_a_cell_magic_runs_a_cell_in_a_block_and_shows_its_hooks() -> None:
    _, profile, both, _, failed = "\n".join(run_python(CELLS)).split("cell")
    assert "share" in profile
    assert "operand" in both
    assert "no watched call made a value that is not finite" in both
    assert "KeyError" in failed
    assert "'inside'" in failed
    assert "operand" in failed
    assert "64.0 1" in failed


def test_a_run_is_a_frame_with_a_row_for_each_call(tmp_path: Path) -> None:
    watched(runs.RunRecorder(tmp_path / "run"))
    with intercept(runs.RunRecorder(tmp_path / "raised", tensors="none")), pytest.raises(RuntimeError, match="mat1"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    run = runs.open_run(tmp_path / "run")
    calls = list(run.calls())
    frames = run.to_pandas(), run.to_polars()
    for name in ("index", "step", "op", "func", "phase", "source", "flops", "bytes", "elapsed", "thread"):
        expected = [getattr(call.record, name) for call in calls]
        assert [list(frame[name]) for frame in frames] == [expected, expected], name
    for frame in frames:
        assert list(frame["module"]) == ["0", "2", "2", "2", "0"]
        assert list(frame["output"]) == [str(call.record.output) for call in calls]
        assert list(frame["k"]) == [call.record.gemm and call.record.gemm.k for call in calls]
        assert list(frame["output_max"]) == [call.values["output"].max for call in calls]
        assert [f"{digits:016x}" for digits in frame["lhs_hash"]] == [call.values["lhs"].hash for call in calls]
        assert list(frame["error"]) == [None] * 5
    assert frames[0]["started"].astype("int64").tolist() == [call.record.started for call in calls]
    assert frames[1]["started"].dt.epoch("ns").to_list() == [call.record.started for call in calls]
    (error,) = runs.open_run(tmp_path / "raised").to_pandas()["error"]
    assert re.match(r"RuntimeError: (mm: )?mat1", error)


def test_a_difference_is_a_table_of_modules(tmp_path: Path) -> None:
    a, b, other_b = call("a", "x", "wa", "y"), call("b", "x", "wb", "y"), call("b", "x", "w'", "y'")
    one, other = write(tmp_path / "one", [a, b]), write(tmp_path / "other", [a, other_b])
    found, same = runs.diff(one, other), runs.diff(one, one)
    frame = found.to_pandas()
    assert frame[["module", "phase", "calls", "changed operand", "inherited"]].values.tolist() == [
        ["b", "forward", 1, 1, 0]
    ]
    assert found.to_polars()["relative"].to_list() == [found.modules[0].relative]
    lines = str(found).splitlines()
    row = lines[next(place for place, line in enumerate(lines) if line.startswith("modules that differ  ")) + 1]
    assert row.split()[:5] == ["b", "forward", "1", "1", "1"]
    assert '<td class="text">b</td>' in found._repr_html_()
    assert str(same).splitlines()[3:5] == [
        "2 calls in A, 2 in B, 2 compared: 2 equal",
        "no call differs: all are equal bit for bit",
    ]
    assert repr(found).startswith("Difference(a=")


def test_an_answer_is_a_table_of_causes(tmp_path: Path) -> None:
    for name, slope in (("a", 0.1), ("b", 0.2)):
        with torch.no_grad(), intercept(runs.RunRecorder(tmp_path / name, "full"), ops="all"):
            nn.functional.leaky_relu(torch.linspace(-1, 1, 12).view(3, 4), slope)
    found = runs.why(runs.open_run(tmp_path / "a"), runs.open_run(tmp_path / "b"))
    assert found.to_pandas()[["kind", "what", "exact"]].values.tolist() == [
        ["argument", "uses negative_slope=0.2 where A uses 0.1", True]
    ]
    assert str(found).startswith("B uses negative_slope=0.2 where A uses 0.1, ")
    assert "<td" in found._repr_html_()


@pytest.mark.parametrize("name", ["Profile", "Stats", "NonFinite", "Checksum"])
def test_ipython_shows_what_print_does(name: str) -> None:
    from IPython.lib.pretty import pretty

    hook = watched(getattr(hooks, name)())
    assert pretty(hook) == str(hook)  # type: ignore[no-untyped-call]
