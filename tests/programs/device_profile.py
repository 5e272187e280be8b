"""What `Profile` finds of calls on a stand-in for a GPU: `python device_profile.py` prints it as JSON.

How many calls it has, how many of them hooks saw in Python, and whether their times are possible: if the device is
late, beside other hooks, if the device is done at once, and if it has no events left.
"""

from __future__ import annotations

import json
import time
from typing import Any
from unittest import mock

import fake_cuda
import torch
import toy_device
from torch import nn

from opintercept import hooks, intercept
from opintercept._core.pipeline import Pipeline

STEPS = 20


def profiled(*others: Any) -> dict[str, Any]:
    """The rows of a model's steps, how many calls were shown in Python, and how long all took on the host."""
    shown = []
    show = Pipeline.begin_call

    def counted(self: Pipeline, *what: Any) -> Any:
        shown.append(what[0].name)
        return show(self, *what)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("toy")
    x, profile = torch.randn(2, 8).to("toy"), hooks.Profile()
    began = time.perf_counter()
    with mock.patch.object(Pipeline, "begin_call", counted), intercept([profile, *others], engine="compiled"):
        for _ in range(STEPS):
            model(x).sum().backward()
    rows = profile.rows()
    took = time.perf_counter() - began
    return {
        "calls": sum(row.calls for row in rows),
        "shown": len(shown),
        "timed": all(0 < row.seconds < took for row in rows),
        "idle": sum(row.idle for row in rows),
        "again": [row.seconds for row in profile.rows()] == [row.seconds for row in rows],
    }


if __name__ == "__main__":
    toy_device.take_for_cuda()
    toy_device.use_driver()
    found = {"late": profiled(), "beside others": profiled(hooks.Recorder(), hooks.Stats(), hooks.NonFinite())}
    fake_cuda.behave()
    found["at once"] = profiled()
    for function in (b"cuEventCreate", b"cuEventRecord"):
        fake_cuda.driver().fake_fail(function, 1000)
    found["no events"] = profiled()
    print(json.dumps(found))
    toy_device.leave()
