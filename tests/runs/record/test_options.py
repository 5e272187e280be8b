"""The arguments of calls that are not tensors, as a run has them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import torch

from opintercept import intercept, runs
from opintercept.runs.record.options import options_of


def test_arguments_without_a_plain_form_are_left_out() -> None:
    class Call:
        options: ClassVar[dict[str, Any]] = {
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "layout": torch.strided,
            "value": 1 + 2j,
            "list": [1, (2.5, None), math.inf],
            "function": print,
            "generator": torch.Generator(),
            "mixed": [1, print],
            "big": 2**70,
            "long": [0] * 2000,
            "deep": [[[[0]]]],
        }

    assert json.loads(options_of(Call())) == {  # type: ignore[arg-type]
        "dtype": "torch.bfloat16",
        "device": "cpu",
        "layout": "torch.strided",
        "value": "(1+2j)",
        "list": [1, [2.5, None], "inf"],
    }


def test_a_recorder_remembers_so_many_arguments_of_an_operator(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run")
    with intercept(recorder, ops=("roll", "mul"), engine="kernel"):
        for shift in range(300):
            torch.ones(3).roll(shift).mul(shift / 1000)
    assert {len(values) for values in recorder._options._values.values()} == {256}
    shifts = [call.arguments for call in runs.open_run(tmp_path / "run").calls() if call.record.op == "aten::roll"]
    assert shifts == [{"shifts": [shift], "dims": []} for shift in range(300)]
