"""What reads the values of tensors on devices: torch's operators, unless the environment asks for Triton."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from native import reading
from numpy_stats import one_row, parts_of
from torch import Tensor

import opintercept._values
from opintercept._values import content, on_device, sums
from opintercept._values import hash as _hash
from opintercept._values.content import content_of
from opintercept.hooks import stats

TENSOR = torch.tensor([[1.0, 0.0, torch.nan, 1e30], [3.0, -torch.inf, 2e-3, 4.0]])


def rows_of(tensor: Tensor, limits: Any, hashed: bool) -> Tensor:
    """What the kernel returns, a row for each three values."""
    read = [sums.Reader(None, False).read(piece) for piece in sums.flat(tensor).split(3)]
    rows = torch.tensor([[*figures, below, high] for figures, below, high in read], dtype=torch.float64).view(
        torch.int64
    )
    hashes = torch.zeros(len(rows), 1, dtype=torch.int64)
    if hashed:
        hashes[0], hashes[-1] = _hash.hash_of(*_hash.bits_of(tensor)) - 5, 5
    return torch.cat([hashes, rows], 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ask for the kernel as in a process that has read nothing yet. The CPU is the device."""
    monkeypatch.setattr(on_device, "known", None)
    monkeypatch.setattr(on_device, "DEVICES", ("cpu",))
    monkeypatch.setattr(content, "ON_HOST", ())
    monkeypatch.setattr(stats, "ON_HOST", ())
    monkeypatch.setenv(on_device.SWITCH, "1")
    with reading(False):
        yield monkeypatch


def use(patch: pytest.MonkeyPatch, read: Any) -> None:
    patch.setattr(opintercept._values, "triton_reader", SimpleNamespace(read=read, VERSION="9.9"), raising=False)


def found(tensor: Tensor) -> Any:
    read = content_of(tensor)
    assert read is not None
    return read.read(), parts_of([one_row(tensor, tensor.mT)])


def test_rows_of_the_kernel_are_added_up(asked: pytest.MonkeyPatch) -> None:
    asked.delenv(on_device.SWITCH)
    expected = found(TENSOR)
    assert on_device.told() == "read with torch's operators"
    asked.setattr(on_device, "known", None)
    asked.setenv(on_device.SWITCH, "1")
    use(asked, rows_of)
    assert found(TENSOR) == expected
    assert on_device.told() == "read in one launch, by Triton 9.9"


def test_a_kernel_that_fails_is_launched_once(asked: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    launches = []

    def fail(*args: Any) -> Tensor:
        launches.append(args)
        raise RuntimeError("no such instruction")

    use(asked, fail)
    assert found(TENSOR)[0].count == 8
    reason = "OPINTERCEPT_TRITON=1 is set, but RuntimeError: no such instruction"
    assert on_device.told() == f"read with torch's operators, since {reason}"
    assert (len(launches), [*map(str, caplog.messages)]) == (
        1,
        [f"opintercept: values on devices are {on_device.told()}"],
    )


def test_without_triton_torchs_operators_read(asked: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked.delattr(opintercept._values, "triton_reader", raising=False)
    asked.delitem(sys.modules, "opintercept._values.triton_reader", raising=False)
    asked.setitem(sys.modules, "triton", None)
    assert found(TENSOR)[0].count == 8
    assert on_device.told().startswith(
        "read with torch's operators, since OPINTERCEPT_TRITON=1 is set, but ModuleNotFou"
    )
    assert len(caplog.messages) == 1


def test_the_kernel_gets_plain_arrays_alone(asked: pytest.MonkeyPatch) -> None:
    class Other(Tensor):
        pass

    use(asked, lambda *_: pytest.fail("it was launched"))
    negative = torch.ones(2, 2, dtype=torch.complex64).conj().imag
    nested = torch.nested.nested_tensor([torch.ones(2)])
    for each in torch.ones(2, 2).as_subclass(Other), torch.eye(2).to_sparse(), negative, nested:
        assert on_device.read(each, None, True) is None
