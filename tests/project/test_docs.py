"""The README and the pages of docs/: their links, their place on the site, and what their commands print.

conftest.py runs their Python blocks; test_troubleshooting.py produces the messages of that page.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import tempfile
import time
from html import unescape
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from browser import TIMEOUT, Browser
from compiler import needs_compiler
from native import run_python as run_new_python
from processes import for_torchrun, run_python

from opintercept import intercept, runs
from opintercept.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
GUIDES = {
    *("find-a-nan", "float16-overflow", "compare-two-runs", "eager-and-compiled", "flops-and-time", "outliers"),
    *("attention-maps", "patching", "test-matmuls", "several-ranks", "your-own-hook", "your-own-operator"),
}
COMPARISON = DOCS / "guides" / "compare-two-runs.md"
ENGINE = DOCS / "how.md"
TESTING = DOCS / "guides" / "test-matmuls.md"
BUILD = "opintercept build\nopintercept info\n"
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {"opintercept": "opintercept", "torchrun": "torch.distributed.run"}


SEARCHES = {
    "loss is NaN": "guides/find-a-nan",
    "bf16": "guides/explain-a-difference",
    "which layer should stay in bf16": "guides/explain-a-difference",
    "vllm": "guides/trainer-and-engine",
    "logprob mismatch": "guides/trainer-and-engine",
    "slow": "guides/flops-and-time",
    "silent data corruption": "checksum",
    "which layer overflows": "guides/float16-overflow",
    "detect_anomaly": "alternatives",
}


def first_found(browser: Browser, page: Path, words: str) -> str:
    """The page that a search of the site shows first."""
    browser.open(page, draws_itself=False, query=f"?q={quote(words)}")
    deadline = time.monotonic() + TIMEOUT
    shown = "document.querySelector('#search-results').innerText"
    while not re.search("finished|did not match", browser.evaluate(shown)):
        assert time.monotonic() < deadline, words
        time.sleep(0.05)
    found = browser.evaluate("document.querySelector('#search-results li a')?.getAttribute('href')")
    return re.sub(r"[?#].*", "", found or "")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def with_commands() -> list[Path]:
    return [page for page in PAGES if page != ENGINE and any(language == "sh" for language, _ in blocks(page))]


def blocks(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text("utf-8"))


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", page.read_text("utf-8")))


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, named as GitHub names them; those of the file that a page includes, too."""
    text = page.read_text("utf-8")
    included = re.search(r"^```\{include\} (\S+)", text, re.MULTILINE)
    if included:
        return anchors(page.parent / included[1])
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@functools.cache
def outputs(page: Path) -> list[tuple[str, subprocess.CompletedProcess[str]]]:
    """What the commands of a page print, each in turn, in a folder with the programs that the page shows."""
    done = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        wide = os.environ | {"COLUMNS": "120"} | for_torchrun(other)
        for language, code in blocks(page):
            program = re.match(r"# (\w+\.py)\n", code)
            if language == "python" and program:
                Path(folder, program[1]).write_text(code, "utf-8")
            for command in code.splitlines() if language == "sh" else ():
                first, *arguments = shlex.split(command)
                argv = ["-m", PROGRAMS[first], *arguments]
                result = run_python(*argv, cwd=folder, env=wide)
                for _ in range(3):  # on a busy machine a thread of torch's now and then aborts a rank that has ended
                    if first == "torchrun" and "terminate called without an active exception" in result.stderr:
                        result = run_python(*argv, cwd=folder, env=wide)
                done.append((command, result))
    return done


def test_the_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md", *PAGES], ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_page_is_in_one_table_of_contents() -> None:
    listed = []
    for page, captions in runpy.run_path(str(DOCS / "conf.py"))["CONTENTS"].items():
        for entry in itertools.chain.from_iterable(captions.values()):
            name = re.sub(r".*<(.*)>", r"\1", entry)  # a title may come first
            listed.append(((DOCS / page).parent / f"{name}.md").resolve())
    assert sorted([*listed, DOCS / "index.md"]) == PAGES


def test_the_front_page_links_every_guide_and_the_readme_the_twelve() -> None:
    guides = {page.stem for page in (DOCS / "guides").glob("*.md")}
    assert set(re.findall(r"\]\(guides/([\w-]+)\.md\)", prose(DOCS / "index.md"))) == guides >= GUIDES
    assert set(re.findall(r"\]\(docs/guides/([\w-]+)\.md\)", prose(README))) >= GUIDES


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_a_page_is_checked(page: Path) -> None:
    found = blocks(page)
    assert len(found) * 2 == len(re.findall("^```", page.read_text("utf-8"), re.MULTILINE)), "a block does not end"
    directives = {"{include}", "{eval-rst}"}
    assert {language for language, _ in found} <= {"python", "text", "sh", "sql", "console"} | directives
    commands = "".join(code for language, code in found if language == "sh")
    for language, code in found:
        program = re.match(r"# (\w+\.py)\n", code)
        assert not (language == "python" and program) or program[1] in commands
        if language == "console":  # .ci/run runs those of the README
            assert code in README.read_text("utf-8")
    # What other blocks print is compared; the rest has tests: a cell in test_tables.py, errors here and in
    # test_troubleshooting.py.
    alone = re.findall(r"(?<!^```\n)^```text\n(.*)\n", page.read_text("utf-8"), re.MULTILINE)
    with_tests = {"index.md": ["%%intercept"], TESTING.name: ["E       Failed: expected"]}.get(page.name, [])
    if page.name != "troubleshooting.md":
        assert [line for line in alone if not line.startswith(tuple(with_tests))] == []


def test_the_commands_of_the_readme_are_those_of_the_guide() -> None:
    of_guide = "".join(code for language, code in blocks(COMPARISON) if language == "sh").splitlines()
    of_readme = "".join(code for language, code in blocks(README) if language == "sh").splitlines()
    assert of_readme
    assert {command.replace("examples/", "") for command in of_readme} <= set(of_guide)


def test_the_program_of_the_guide_is_an_example() -> None:
    (program,) = [code for language, code in blocks(COMPARISON) if code.startswith("# train.py\n")]
    assert (ROOT / "examples" / "train.py").read_text("utf-8").endswith(program.removeprefix("# train.py\n"))


def test_the_json_has_the_names_that_the_page_for_agents_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    for scale, folder in enumerate(folders, 1):
        with intercept(runs.RunRecorder(folder)):
            torch.eye(2) @ torch.full((2, 2), float(scale))
    assert main(["diff", *folders, "--json"]) == 1
    difference = json.loads(capsys.readouterr().out)
    assert main(["show", folders[0], "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    page = (DOCS / "agents.md").read_text("utf-8")
    for found, names in (
        (difference, ("equal", "first", "before", "unmatched")),
        (difference["first"], ("kind", "changed", "arguments", "a", "b")),
        (row, ("module", "op", "phase", "calls", "flops", "seconds", "flops_per_second", "share")),
    ):
        assert found.keys() >= set(names)
        assert all(re.search(rf"`(first\.)?{name}`", page) for name in names)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")
@pytest.mark.parametrize("page", with_commands(), ids=name_of)
def test_the_commands_of_a_page_print_what_it_shows(page: Path) -> None:
    done = iter(outputs(page))
    found = blocks(page)
    for (language, code), (after, shown) in zip(found, [*found[1:], ("", "")], strict=True):
        for command in code.splitlines() if language == "sh" else ():
            ran, result = next(done)
            assert ran == command
            may_differ = re.search(r"^opintercept (diff|why|ranks|replay)|--stop", command)
            assert result.returncode in ((0, 1) if may_differ else (0,)), f"{command}\n{result.stderr}"
        if language == "sh" and after == "text":
            printed = result.stdout + result.stderr
            for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
                assert part in printed


@pytest.mark.slow
def test_a_larger_model_fails_the_test_of_the_guide_as_it_says(tmp_path: Path) -> None:
    (code,) = [code for language, code in blocks(TESTING) if language == "python" and "test_a_training_step" in code]
    (expected,) = [code for language, code in blocks(TESTING) if language == "text"]
    (tmp_path / "test_step.py").write_text(code.replace("nn.Linear(16, 4))", "nn.Linear(16, 4), nn.Linear(4, 4))"))
    command = ["-m", "pytest", "-p", "no:cacheprovider", "test_step.py"]
    done = run_python(*command, cwd=tmp_path, env=os.environ | {"COLUMNS": "120"})
    assert done.returncode == 1
    assert expected in done.stdout


@pytest.mark.slow
def test_the_picture_shows_what_the_command_prints() -> None:
    (output,) = [done.stdout for command, done in outputs(COMPARISON) if command == "opintercept diff runs/a runs/b"]
    texts = re.findall(r"<text [^>]*picture-r\d[^>]*>(.*?)</text>", (DOCS / "picture.svg").read_text("utf-8"))
    drawn = [unescape(text).replace("\xa0", " ") for text in texts]
    printed = [line for line in output.splitlines() if line]
    # The rows of tables depend on the last bits, which differ from machine to machine.
    last = next(number for number, line in enumerate(drawn) if "changed operand: rhs differs" in line)
    assert drawn[: last + 1] == ["$ opintercept diff runs/a runs/b", *printed[:last]]
    heads = [line.split() for line in printed if "max abs" in line]
    assert [line.split() for line in drawn if "max abs" in line] == heads
    assert len(heads) == 2


@pytest.mark.slow
def test_the_site_builds_and_fits_a_phone_without_a_network(tmp_path: Path) -> None:
    command = ["sphinx-build", "-W", "--keep-going", "-q", "docs", str(tmp_path / "site")]
    done = run_python("-m", "sphinx", *command[1:], cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert shlex.join([*command[:-1], "docs/_build"]) in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    with Browser(tmp_path / "profile") as browser:
        for page in PAGES:
            built = (tmp_path / "site" / page.relative_to(DOCS)).with_suffix(".html")
            browser.open(built, width=400, draws_itself=False)
            assert browser.evaluate("document.querySelector('article').scrollWidth") <= 400, page
            assert {request.partition(":")[0] for request in browser.requests} <= {"file", "data"}
            assert not browser.complaints
        browser.open(tmp_path / "site" / "index.html", width=400, draws_itself=False)
        assert browser.evaluate("(p => p.scrollWidth <= p.clientWidth)(document.querySelector('pre'))")  # no scrolling
        width = browser.evaluate("document.querySelector('img[src$=\"picture.svg\"]').clientWidth")
        box = re.search(r'viewBox="0 0 (\d+)', (DOCS / "picture.svg").read_text("utf-8"))
        assert box is not None
        assert 20 * width / int(box[1]) >= 12, "the letters of the picture are smaller than 12 pixels"
        for words, first in SEARCHES.items():
            assert first_found(browser, tmp_path / "site" / "search.html", words) == f"{first}.html"


@pytest.mark.slow
@needs_compiler
def test_the_compiled_engine_is_built_and_shown_as_the_page_says() -> None:
    (expected,) = re.findall(rf"^```sh\n{BUILD}```\n```text\n(.*?)^```$", ENGINE.read_text("utf-8"), re.M | re.S)
    run_new_python("from opintercept.cli import main; main(['build'])")
    printed = run_new_python("from opintercept.cli import main; main(['info'])")

    def parts(lines: list[str]) -> list[str]:
        # Paths, versions and processors differ.
        return [re.sub(r"/.*/|\w*[0-9]\S*|with \w+", "", line) for line in lines]

    assert parts(printed) == parts(expected.splitlines())
