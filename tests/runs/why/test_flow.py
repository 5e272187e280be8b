"""What of a program its results are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from opintercept import intercept, runs
from opintercept.runs.program.program import Program
from opintercept.runs.why.flow import Flow


def _counted(x: Tensor) -> Tensor:
    chosen = x.argmax(-1)
    ends = torch.histc(chosen.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
    return x[chosen] * ends.shape[0]


def _drawn(x: Tensor) -> Tensor:
    return x.mm(torch.empty(4, 3).uniform_(-1, 1))


@pytest.mark.parametrize(
    ("program", "ends"),
    [(nn.Linear(4, 3), ["addmm"]), (lambda x: nn.Linear(4, 3)(x), ["addmm"]), (_drawn, ["mm"]), (_counted, ["mul"])],
)
def test_results_are_real_numbers_that_nothing_reads_and_no_counts(
    program: Callable[[Tensor], Tensor], ends: list[str], tmp_path: Path
) -> None:
    x = torch.randn(6, 4)
    with torch.no_grad(), intercept(runs.RunRecorder(tmp_path, tensors="full"), ops="all"):
        program(x)
    flow = Flow(Program(runs.open_run(tmp_path), 0))
    assert [flow.steps[end].operator for end in flow.ends] == ends
