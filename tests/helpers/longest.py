"""The test files that take longest, which processes beside each other begin with, so that they end at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# By CPU time, that of programs they start included.
FILES = (
    "fidelity/test_pairs.py",
    "project/test_docs.py",
    "cli/test_processes.py",
    "hooks/test_checksum.py",
    "cli/test_run.py",
    "origin/test_compiled_graphs.py",
    "fidelity/test_programs.py",
    "core/test_exits.py",
    "cli/test_engine.py",
    "values/test_fragments.py",
    "devices/test_costs.py",
    "engines/test_late_libraries.py",
    "project/test_examples.py",
    "devices/test_edges.py",
    "fidelity/test_compiled_nans.py",
    "fidelity/test_op_db.py",
    "devices/test_nonfinite.py",
    "origin/test_links.py",
    "fidelity/test_noted_programs.py",
    "fidelity/test_convolutions.py",
    "fidelity/test_compiled_models.py",
    "fidelity/test_compile.py",
    "runs/report/test_report.py",
    "testing/test_plugin.py",
    "native/test_nvrtc.py",
    "devices/test_initialising.py",
    "cli/test_cli.py",
    "hooks/test_hooks.py",
    "devices/test_noted.py",
    "engines/test_patched_functions.py",
    "fidelity/test_distributed.py",
    "devices/test_hooks.py",
    "fidelity/test_checksum_op_db.py",
    "fidelity/test_every_operator.py",
    "hooks/test_audit.py",
    "project/test_wheel.py",
    "engines/test_inductor.py",
    "engines/test_launches.py",
    "runs/compare/test_diff.py",
    "cli/test_show.py",
    "integrations/test_transformers.py",
    "integrations/test_lightning.py",
    "blocks/test_tasks.py",
)


def place(item: pytest.Item) -> int:
    """The place of the file of a test in this order; the rest come after all of these, as they were."""
    path = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
    return FILES.index(path) if path in FILES else len(FILES)
