"""Runs the code in the README, in the pages of docs/ and in docstrings as tests.

A `text` block holds what the `python` block before it prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sybil import Document, Example, Region, Sybil
from sybil.parsers.rest import DocTestParser

# The results of tests, and of programs that they start, do not depend on whether the library has been built.
os.environ.setdefault("OPINTERCEPT_COMPILED", "0")
_FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def _run_python(example: Example) -> str | None:
    """Run a block as if it were pasted into Python. pytest runs a block that defines tests."""
    code, line = example.parsed
    example.namespace.setdefault("printed", "")
    if re.search(r"^def test_", code, re.MULTILINE):
        example.namespace["printed"] = _run_pytest(code)
        return None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\n" * line + code, example.path, "exec"), example.namespace)
    example.namespace["printed"] = out.getvalue()
    return None


def _run_pytest(code: str) -> str:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        test = Path(folder, "test_readme_block.py")
        test.write_text("import torch\n" + code)
        plain = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:asyncio", "--import-mode=importlib")
        status = pytest.main(["-q", *plain, "--rootdir", folder, "-c", os.devnull, str(test)])
    assert status == 0, out.getvalue()
    return ""


def _compare_text(example: Example) -> str | None:
    expected, printed = example.parsed[0], example.namespace.get("printed", "")
    return None if printed in (expected, None) else f"expected:\n{expected}\ngot:\n{printed}"


def _no_check(example: Example) -> None:
    # .ci/run runs every console block; tests/project/test_readme.py checks that it does. tests/project/test_docs.py
    # runs sh blocks, with the programs that python blocks show.
    example.namespace["printed"] = None


def _run_sql(example: Example) -> None:
    import duckdb

    rows = duckdb.sql(example.parsed[0])
    assert rows is not None
    assert rows.fetchall()


_EVALUATORS = {"python": _run_python, "text": _compare_text, "sql": _run_sql}
_PROGRAM = re.compile(r"# \w+\.py\n")


def _fences(document: Document) -> Any:
    for match in _FENCE.finditer(document.text):
        line = document.text.count("\n", 0, match.start("code"))
        language = match["language"]
        if language == "text" and not document.text[: match.start()].rstrip().endswith("```"):
            continue  # a drawing, not an output
        program = language == "python" and _PROGRAM.match(match["code"])
        evaluate = _no_check if program else _EVALUATORS.get(language, _no_check)
        yield Region(match.start(), match.end(), (match["code"], line), evaluate)


def _enter_folder(namespace: dict[str, Any]) -> None:
    """Run the blocks of a page in an empty folder, where they may write."""
    folder = tempfile.TemporaryDirectory()
    namespace["folder of the page"] = folder, os.getcwd()
    os.chdir(folder.name)


def _leave_folder(namespace: dict[str, Any]) -> None:
    folder, before = namespace.pop("folder of the page")
    os.chdir(before)
    folder.cleanup()


_pages = Sybil(
    parsers=[_fences],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    setup=_enter_folder,
    teardown=_leave_folder,
).pytest()
_docstrings = Sybil(
    parsers=[DocTestParser()], patterns=["opintercept/*.py", "opintercept/**/*.py"], document_types={}
).pytest()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the examples in a file."""
    found: pytest.Collector | None = _pages(file_path, parent) or _docstrings(file_path, parent)
    return found
