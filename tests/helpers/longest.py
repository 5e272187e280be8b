"""The test files that take longest, which processes beside each other begin with, so that they end at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# By CPU time, that of programs they start included.
FILES = (
    "fidelity/test_pairs.py",
    "cli/test_run.py",
    "core/test_exits.py",
    "project/test_docs.py",
    "fidelity/test_programs.py",
    "fidelity/test_compile.py",
    "fidelity/test_op_db.py",
    "project/test_wheel.py",
    "engines/test_compiled_build.py",
    "project/test_examples.py",
    "fidelity/test_noted_programs.py",
    "runs/report/test_report.py",
    "fidelity/test_compiled_nans.py",
    "fidelity/test_compiled_models.py",
    "engines/test_launches.py",
    "devices/test_nonfinite.py",
    "engines/test_inductor.py",
    "cli/test_processes.py",
    "cli/test_cli.py",
    "fidelity/test_checksum_op_db.py",
    "cli/test_show.py",
    "fidelity/test_distributed.py",
    "fidelity/test_every_operator.py",
    "devices/test_edges.py",
    "devices/test_costs.py",
    "devices/test_noted.py",
    "devices/test_hooks.py",
    "origin/test_links.py",
    "origin/test_compiled_graphs.py",
    "runs/compare/test_diff.py",
    "engines/test_late_libraries.py",
    "native/test_library.py",
    "integrations/test_transformers.py",
    "integrations/test_lightning.py",
    "testing/test_plugin.py",
    "hooks/test_replicas.py",
    "hooks/test_attention.py",
    "core/test_noted.py",
    "fidelity/test_models.py",
    "blocks/test_intercept.py",
)


def place(item: pytest.Item) -> int:
    """The place of the file of a test in this order; the rest come after all of these, as they were."""
    path = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
    return FILES.index(path) if path in FILES else len(FILES)
