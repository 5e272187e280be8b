"""Reads the values of tensors on CUDA devices in one launch of a kernel, see `_native/device`.

Invariant: nothing here waits for a device, nor initialises one. What the kernel cannot read is read with torch's
operators, by the caller, and counted. A kernel that fails is not launched again in this process.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from opintercept._core.fork import in_child
from opintercept._native import library, nvrtc
from opintercept._native.values import Found
from opintercept._values.late import Late, Lot, Numbers, graph_of

DEVICE = "cuda"
"""The type of the devices that the kernel runs on."""
DRIVER = "libcuda.so.1"
_ROW = 12  # words, see `device/kernel.h:Row`

entered: dict[int, bool] = {}
"""Whether kernels in C++ can time calls on a device, by its number."""
ready: dict[Any, bool] = {}
"""Whether the kernel is loaded on a device, by its number; none of those that nobody has read from.

The kernels for checks are by `(number, "checks")`."""
reasons: dict[bool, str] = {}
"""Why the kernel does not read on some device, in one line, and with True as the key, why those for checks do not."""
unread: Counter[str] = Counter()
"""How many tensors of each kind torch's operators have read, since the kernel could not."""
_is_set_up = False
_lock = threading.RLock()


class Launched:
    """The numbers that a launch writes to the host's memory, as a `Late` has them."""

    __slots__ = ("_reading",)
    is_sent = True

    def __init__(self, reading: Any) -> None:
        self._reading = reading

    @property
    def at_hand(self) -> bool:
        """Whether `read` does not wait."""
        return bool(self._reading.has_arrived())

    def of(self, _lot: Lot) -> Launched:
        """Itself: no replay of a graph computes this."""
        return self

    def read(self) -> Any:
        """What was found; waits for the device.

        Raises:
            RuntimeError: The device has failed.
        """
        found = self._reading.found()
        if found is None:
            raise RuntimeError("the device has failed before it could read a tensor")
        return found


Piece = tuple[Late | Launched, Callable[[Any], tuple[int, Any]]]
"""What `LateSums` takes: numbers, and what makes of them the hash and what `Sums.add` takes."""


def read(tensor: torch.Tensor, limits: tuple[float, float] | None, hashed: bool) -> Piece | None:
    """Read a tensor without waiting for its device; None if torch's operators have to.

    Args:
        tensor: A tensor whose memory is there.
        limits: As `target` of `_native.values.Read`.
        hashed: Whether to compute the hash.
    """
    if not is_ready(tensor.device):
        return None
    module: Any = library.find().module
    graph = graph_of(tensor)
    if graph is None:
        reading = module.read_on_device(tensor, limits, hashed, tensor.is_leaf and tensor.requires_grad)
        if reading is not None:
            return Launched(reading), _found
    elif (scratch := graph.scratch()) is not None:
        row = torch.empty(_ROW, dtype=torch.int64, device=tensor.device)
        repeats = module.read_on_device(tensor, limits, hashed, False, row, scratch)
        if repeats is not None:
            return graph.put([row]), partial(_of_row, repeats)
    unread[f"{str(tensor.dtype).removeprefix('torch.')}, {type(tensor).__name__}"] += 1
    return None


def is_ready(device: torch.device, checks: bool = False) -> bool:
    """Whether the kernel is loaded on a device; loads it if nobody has tried. Then kernels in C++ launch it, too.

    Args:
        device: The device.
        checks: Whether to ask for the kernels that check products instead.
    """
    if device.type != DEVICE:
        return False
    number = device.index or 0
    key = (number, "checks") if checks else number
    known = ready.get(key)
    if known is None:
        with _lock:
            known = ready.get(key)
            if known is None:
                known = ready[key] = _load(device, number, checks)
    return known


def is_entered(device: torch.device) -> bool:
    """Whether kernels in C++ can time calls on a device; sees to it if nobody has tried."""
    number = device.index or 0
    if device.type == DEVICE and number not in entered:
        with _lock:
            try:
                _enter(library.find().module, number)
                entered[number] = True
            except Exception:  # as in `_load`; then hooks time the calls
                entered[number] = False
    return entered.get(number, False)


def _enter(module: Any, number: int) -> None:
    global _is_set_up
    if module is None:
        raise RuntimeError("there are no compiled kernels; `opintercept build` builds them")
    if torch.version.hip is not None:
        raise RuntimeError("the kernel runs on CUDA, and this torch is built for ROCm")
    if not _is_set_up:
        module.set_up_device(DRIVER, DEVICE)
        _is_set_up = True
    module.enter_device(number)


def _load(device: torch.device, number: int, checks: bool) -> bool:
    module: Any = library.find().module
    try:
        _enter(module, number)
        code = nvrtc.code_for(architecture_of(device), torch.version.cuda or "", checks)
        module.load_on_device(number, code, checks)
    except Exception as error:  # whatever a driver, a compiler or a file system is not ready for
        reasons[checks] = str(error)
        level = logging.INFO if module is None or torch.version.hip else logging.WARNING
        what = f"products on devices are checked {_instead(True)}" if checks else f"values on devices are {told()}"
        logging.getLogger("opintercept").log(level, "opintercept: %s", what)
        return False
    return True


def architecture_of(device: torch.device) -> str:
    """The name of a device's instructions, as NVRTC knows them."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def told() -> str:
    """What reads, for `info`."""
    if False in reasons:
        return f"read {_instead(False)}"
    if not ready:
        return "read in one launch, once there are any"
    others = ", ".join(f"{count} of {kind}" for kind, count in unread.most_common(3))
    return "read in one launch" + (f", and with torch's operators: {others}" if others else "")


def _instead(checks: bool) -> str:
    return f"with torch's operators, since {reasons[checks]}"


@in_child
def _forget_devices() -> None:
    """A child of a process that has used CUDA cannot."""
    global _lock
    _lock = threading.RLock()


def _found(found: Found) -> tuple[int, Any]:
    return found[3] or 0, found[:3]


def _of_row(repeats: int, numbers: list[Numbers]) -> tuple[int, Any]:
    """What a row on a device holds, see `device/driver.cpp:wait_for`."""
    words = array("q", map(int, numbers[0]))
    hashed, finite, nan, odd, zeros, underflow, overflow, *_ = words
    total, spread, low, high, _ = array("d", words.tobytes())[7:]
    counts = finite + odd, finite, nan, finite + odd - zeros, underflow, overflow
    return hashed, ((*(repeats * each for each in counts), repeats * total, repeats * spread), -low, high)
