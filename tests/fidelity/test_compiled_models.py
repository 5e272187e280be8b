"""Compiled models give the same under hooks, and each launch is seen. `programs/compiled_models.py` has many more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiled_models import compare, step_of
from compiler import needs_compiler

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec..:FutureWarning"),
]


@pytest.mark.parametrize(("name", "trains"), [("own_rnn", True), ("own_unet", False)])
def test_results_are_the_same_and_each_launch_is_seen(name: str, trains: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
        found = compare(step_of(name, trains, {}), str(tmp_path))
    torch._dynamo.reset()
    assert found.wrong == []
    assert found.seen == found.launches > 10


def test_kernels_of_batch_norms_and_those_that_lay_operands_out_have_modules(tmp_path: Path) -> None:
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
        found = compare(step_of("own_resnet", False, {}), str(tmp_path))
    torch._dynamo.reset()
    assert found.wrong == []
    assert found.placed == found.seen == found.launches > 10
