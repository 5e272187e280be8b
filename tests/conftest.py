"""What every test is checked for, whether it asks or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def dispatcher_state() -> dict[str, object]:
    """Everything of torch's that a block changes and must bring back."""
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "mm": torch._C._dispatch_dump_table("aten::mm"),
        "addmm": torch._C._dispatch_dump_table("aten::addmm"),
        "in a dispatch mode": torch.utils._python_dispatch._is_in_torch_dispatch_mode,
    }


@pytest.fixture(autouse=True)
def clean_torch() -> Iterator[None]:
    """Fail the test that leaves a mode on torch's stacks or a kernel in the dispatcher."""
    before = dispatcher_state()
    torch.manual_seed(0)
    yield
    assert dispatcher_state() == before
