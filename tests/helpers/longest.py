"""The test files that take longest, which processes beside each other begin with, so that they end at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# By CPU time, that of programs they start included.
FILES = (
    "cli/test_processes.py",
    "cli/test_run.py",
    "project/test_docs.py",
    "fidelity/test_pairs.py",
    "origin/test_compiled_graphs.py",
    "core/test_exits.py",
    "devices/test_edges.py",
    "fidelity/test_programs.py",
    "engines/test_late_libraries.py",
    "project/test_examples.py",
    "hooks/test_checksum.py",
    "fidelity/test_compile.py",
    "values/test_fragments.py",
    "cli/test_engine.py",
    "fidelity/test_op_db.py",
    "devices/test_hooks.py",
    "fidelity/test_noted_programs.py",
    "fidelity/test_compiled_nans.py",
    "devices/test_nonfinite.py",
    "devices/test_initialising.py",
    "native/test_nvrtc.py",
    "origin/test_links.py",
    "cli/test_cli.py",
    "devices/test_costs.py",
    "fidelity/test_checksum_op_db.py",
    "runs/compare/test_diff.py",
    "runs/report/test_report.py",
    "devices/test_noted.py",
    "fidelity/test_every_operator.py",
    "fidelity/test_distributed.py",
    "cli/test_show.py",
    "blocks/test_tasks.py",
    "hooks/test_audit.py",
    "testing/test_plugin.py",
    "engines/test_patched_functions.py",
    "fidelity/test_convolutions.py",
    "integrations/test_lightning.py",
    "hooks/test_hooks.py",
    "project/test_wheel.py",
    "native/test_device.py",
    "engines/test_engines.py",
    "fidelity/test_compiled_models.py",
    "integrations/test_transformers.py",
    "engines/test_launches.py",
    "engines/test_inductor.py",
)


def place(item: pytest.Item) -> int:
    """The place of the file of a test in this order; the rest come after all of these, as they were."""
    path = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
    return FILES.index(path) if path in FILES else len(FILES)
