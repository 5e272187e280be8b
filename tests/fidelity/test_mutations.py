"""Each mutation applies to the package; running `mutations.py` shows that a test notices it."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest
from mutations import MUTATIONS, ROOT, Mutation
from processes import run_python


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks)
def test_a_mutation_applies_to_the_package(mutation: Mutation, tmp_path: Path) -> None:
    copy = tmp_path / mutation.file
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "opintercept" / mutation.file, copy)
    mutation.apply(tmp_path)
    assert ast.dump(ast.parse(copy.read_text())) != ast.dump(
        ast.parse((ROOT / "opintercept" / mutation.file).read_text())
    )
    for test in mutation.noticed_by:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_a_mutation_that_no_longer_applies_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("1 + 1")
    with pytest.raises(ValueError, match=r"file\.py must have the text of a mutation once, got 0 times: 'x'"):
        Mutation("", "file.py", "x", "y", ()).apply(tmp_path)


@pytest.mark.slow
def test_the_tests_that_notice_mutations_exist() -> None:
    tests = sorted({test for mutation in MUTATIONS for test in mutation.noticed_by})
    done = run_python("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
