"""What reads the values of tensors on devices: a kernel, and torch's operators where there is none."""

from __future__ import annotations

import logging
from typing import Any

import fake_cuda
import fake_devices
import pytest
import torch
from compiler import needs_compiler
from made_tensors import random_bits
from native import reading
from numpy_stats import one_row, parts_of
from torch import Tensor

from opintercept._native import library, nvrtc
from opintercept._values import content, on_device
from opintercept._values.content import content_of
from opintercept.hooks import stats

pytestmark = [pytest.mark.slow, needs_compiler]
TENSOR = torch.tensor([[1.0, 0.0, torch.nan, 1e30], [3.0, -torch.inf, 2e-3, 4.0]])


def found(tensor: Tensor) -> Any:
    read = content_of(tensor)
    assert read is not None
    return read.read(), parts_of([one_row(tensor, tensor.mT, for_dtype=torch.float8_e5m2)])


def by_torch(tensor: Tensor) -> Any:
    """The same by torch's operators, as on a device that is neither the host nor CUDA."""
    with reading(False), pytest.MonkeyPatch.context() as patch:
        for where in (content, stats):
            patch.setattr(where, "ON_HOST", ())
        return found(tensor)


@pytest.mark.parametrize("shape", [(2, 3), (5000,), (70, 300)], ids=str)
def test_runs_and_stats_take_what_the_kernel_reads(shape: tuple[int, ...]) -> None:
    tensor = random_bits(shape, torch.float16, 5)
    tensor = tensor if tensor.dim() > 1 else tensor[None]
    other, other_rows = by_torch(tensor)
    with fake_devices.on_fake_devices():
        fake_cuda.driver().fake_count(b"cuLaunchKernel")
        values, rows = found(tensor)
        assert fake_cuda.driver().fake_count(b"cuLaunchKernel") == 3
        assert on_device.told() == "read in one launch"
    for one, two in zip(values.as_dict().values(), other.as_dict().values(), strict=True):
        assert one == (pytest.approx(two, rel=1e-12) if isinstance(two, float) else two)
    assert rows == other_rows


FUNCTIONS = "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_driver_that_fails_is_asked_once(function: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = by_torch(TENSOR)
    with fake_devices.on_fake_devices(), caplog.at_level(logging.WARNING, "opintercept"):
        fake_cuda.driver().fake_count(function.encode())
        fake_cuda.driver().fake_fail(function.encode(), 1)
        assert found(TENSOR) == expected
        assert found(TENSOR) == expected
        assert fake_cuda.driver().fake_count(function.encode()) == 1
        text = f"values on devices are read with torch's operators, since {function}: invalid argument"
        assert caplog.messages == [f"opintercept: {text}"]


def test_without_nvrtc_torchs_operators_read(caplog: pytest.LogCaptureFixture) -> None:
    expected = by_torch(TENSOR)

    def fails(*_: Any) -> bytes:
        raise RuntimeError("there is no libnvrtc.so.13")

    with fake_devices.on_fake_devices() as patch, caplog.at_level(logging.WARNING, "opintercept"):
        patch.setattr(nvrtc, "code_for", fails)
        assert found(TENSOR) == expected
        assert on_device.told() == "read with torch's operators, since there is no libnvrtc.so.13"
        assert len(caplog.messages) == 1


def test_checks_that_cannot_be_loaded_are_told_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    def code_for(_architecture: str, _cuda: str, checks: bool = False) -> bytes:
        if checks:
            raise RuntimeError("it does not compile")
        return fake_cuda.CODE

    with fake_devices.on_fake_devices() as patch, caplog.at_level(logging.WARNING, "opintercept"):
        patch.setattr(nvrtc, "code_for", code_for)
        assert not on_device.is_ready(TENSOR.device, checks=True)
        assert on_device.is_ready(TENSOR.device)
        assert on_device.told() == "read in one launch"
    assert caplog.messages == [
        "opintercept: products on devices are checked with torch's operators, since it does not compile"
    ]


def test_without_the_library_torchs_operators_read_and_nobody_warns(caplog: pytest.LogCaptureFixture) -> None:
    expected = by_torch(TENSOR)
    with fake_devices.on_fake_devices() as patch, caplog.at_level(logging.WARNING, "opintercept"):
        patch.setattr(library, "known", library.Library(None, reason="none was built"))
        assert found(TENSOR) == expected
        assert "`opintercept build` builds them" in on_device.told()
        assert caplog.messages == []


@pytest.mark.parametrize("function", ["cuLaunchKernel", "cuMemAlloc", "cuMemHostAlloc"])
def test_a_launch_that_fails_is_made_up_for_by_torch(function: str) -> None:
    expected = by_torch(TENSOR)
    with fake_devices.on_fake_devices():
        fake_cuda.driver().fake_fail(function.encode(), 2)
        assert found(TENSOR) == expected
        assert on_device.unread == {"float32, Tensor": 2}
        assert found(TENSOR)[0] == expected[0]
        assert on_device.told() == "read in one launch, and with torch's operators: 2 of float32, Tensor"


def test_what_the_kernel_does_not_know_is_counted() -> None:
    with fake_devices.on_fake_devices():
        assert content_of(torch.ones(2, dtype=torch.complex64)).read().count == 2  # type: ignore[union-attr]
        assert on_device.unread == {"complex64, Tensor": 1}


def test_a_device_that_has_failed_is_told() -> None:
    with fake_devices.on_fake_devices():
        fake_cuda.behave(late=True)
        read = content_of(TENSOR)
        assert read is not None
        assert read.at_hand is None
        fake_cuda.behave(late=True, lost=True)
        with pytest.raises(RuntimeError, match="the device has failed"):
            read.read()
