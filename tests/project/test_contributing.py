"""The pages for contributors and .pre-commit-config.yaml name files, options, commands and tests that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from opintercept import HookDeclaration, intercept
from opintercept._core import record
from opintercept._ops import table

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w.-]+\.(py|md|yaml)")
WORDS = sorted({word for code in re.findall(r"`([^`\n]+)`", TEXT) for word in code.split()})


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", [word for word in WORDS if "NAME" not in word and PATH.fullmatch(word)])
def test_a_path_exists(path: str) -> None:
    assert (ROOT / path).exists() or (ROOT / "opintercept" / path).exists()


def test_the_set_up_is_that_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    install, *checks = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    assert f"$ {install} && pytest -q\n" in readme
    assert checks == ["pytest -q", "ruff check && ruff format --check && mypy"]


def test_the_layout_names_every_file_and_folder_of_the_package() -> None:
    (drawing,) = re.findall(r"^opintercept/\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    named = {word for line in drawing.splitlines() for word in re.findall(r"\S+", line.partition("   ")[0].strip())}
    found = {path.name for path in (ROOT / "opintercept").glob("[_a-z]*.py")} - {"__init__.py", "__main__.py"}
    found |= {f"{path.parent.name}/" for path in (ROOT / "opintercept").glob("*/__init__.py")}
    assert named == found


def test_the_markers_and_options_of_pytest_exist(pytestconfig: pytest.Config) -> None:
    assert any(marker.startswith("slow:") for marker in pytestconfig.getini("markers"))
    assert pytestconfig.getoption("--compiled") in (True, False)
    assert pytestconfig.getoption("--whole") in (True, False)


def test_the_hook_that_it_shows_works() -> None:
    (code,) = (block for block in blocks("python") if "class LargestOutput" in block)
    namespace: dict[str, object] = {"__name__": "largest_output"}
    exec(compile(code, "CONTRIBUTING.md", "exec"), namespace)
    hook = namespace["LargestOutput"]()  # type: ignore[operator]
    with intercept(hook):
        torch.nn.Linear(2, 2)(torch.zeros(1, 2)), torch.eye(2) @ torch.full((2, 2), 3.0)
    assert set(hook.largest) == {"Linear", ""}
    assert hook.largest[""] == 3.0
    assert set(HookDeclaration.__annotations__) == {"reads", "levels"}


def test_the_row_that_it_shows_is_in_the_table() -> None:
    (row,) = (block.strip() for block in blocks("python") if block.startswith("_add("))
    assert f"\n{row}\n" in Path(table.__file__).read_text()


def test_the_metadata_of_record_fields_that_it_names_exists() -> None:
    assert all(callable(getattr(record, name)) for name in ("shared", "noted", "taken"))


def test_pre_commit_runs_the_checks_of_the_set_up() -> None:
    entries = re.findall(r"^ +entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    assert [" ".join(word for word in entry.split() if not word.startswith("-")) for entry in entries] == [
        "ruff check",
        "ruff format",
        "mypy",
    ]


TWINS = [line.strip("| ").split(" | ") for line in (ROOT / "docs/twins.md").read_text().splitlines() if "::" in line]


@pytest.mark.parametrize(("what", "python", "cpp", "test"), TWINS)
def test_a_twin_and_the_test_of_it_exist(what: str, python: str, cpp: str, test: str) -> None:
    for path in (python, cpp):
        assert (ROOT / "opintercept" / path.strip("`")).is_file(), what
    file, _, name = test.strip("`").partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), what


def test_every_source_in_cpp_that_repeats_python_has_a_twin() -> None:
    named = {Path(cpp.strip("`")).name for _, _, cpp, _ in TWINS if cpp.endswith(".cpp`")}
    own = {"ring.cpp", "sets.cpp", "values.cpp", "remembered.cpp", "checksums.cpp"}  # only C++ has a ring, and layouts
    own |= {"driver.cpp", "readings.cpp", "checks.cpp"}  # and launches
    assert named | own == {path.name for path in (ROOT / "opintercept").rglob("*.cpp")}


def test_the_page_on_threads_names_every_mutex() -> None:
    page = (ROOT / "docs/threads.md").read_text()
    headers = [*(ROOT / "opintercept").rglob("*.h"), *(ROOT / "opintercept").rglob("*.cpp")]
    has = re.compile(r"^ *std::mutex \w+;", re.MULTILINE)
    made = [path.name for path in headers for _ in has.findall(path.read_text())]
    of_records, of_driver = ("Records::mutex", "Records::writing"), ("State::mutex", "OfStream::mutex")
    names = [
        "Checker::mutex",
        "Held::mutex",
        "Weights::mutex",
        *of_driver,
        "Reading::mutex",
        *of_records,
        "Memory::mutex",
        "left_mutex",
        "Ring::mutex",
    ]
    where = [
        "checker.h",
        "checks.cpp",
        "driver.cpp",
        "driver.cpp",
        "readings.cpp",
        "records.h",
        "records.h",
        "remembered.cpp",
        "ring.cpp",
        "ring.h",
        "weights.h",
    ]
    assert sorted(made) == where
    for name in names:
        assert f"`{name}`" in page


def test_cpp_files_are_formatted() -> None:
    formatter = shutil.which("clang-format")
    if formatter is None:
        pytest.skip("needs clang-format")
    files = [str(path) for ending in ("*.cpp", "*.h") for path in (ROOT / "opintercept").rglob(ending)]
    done = subprocess.run([formatter, "--dry-run", "--Werror", *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
