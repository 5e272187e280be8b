"""Reads the values of tensors on the CPU in one pass, in C++, where the library of the compiled engine has been built.

Invariant: nothing is built here. The library is looked for once, when values are first read; if there is none, or it
cannot read a tensor, the answer is None, and the caller uses torch's operators. Call `values.read` by that name, since
`adopt` replaces it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from opintercept._native import library

Found = tuple[
    tuple[int, int, int, int, int, int, float, float], float, float, int | None, bytearray | None, bytearray | None
]
"""What `read` returns: what `Sums.add` of `_values.stats` takes, hash, powers and channels; None if not asked for.

The hash is that of `_values.hash` mod 2**64. The powers are int64, `[277]`, and the channels are float64.
"""


class Read(Protocol):
    """How `read` is called."""

    def __call__(
        self,
        tensor: Any,
        target: tuple[float, float] | None = ...,
        powers: bool = ...,
        channels: bool = ...,
        hashed: bool = ...,
        /,
    ) -> Found | None:
        """Read a tensor's values, with all options or with none.

        Args:
            tensor: Anything; what is not a plain tensor of floating-point values on the CPU is not read.
            target: The largest magnitude that the target dtype rounds to zero, and the largest that it can hold.
            powers: Whether to count magnitudes by power of two.
            channels: Whether to find the largest magnitude of each entry in the last dimension.
            hashed: Whether to compute the hash.

        Returns:
            What was found; None if the tensor cannot be read here.
        """


class Extent(Protocol):
    """How `extent` is called."""

    def __call__(self, tensor: Any, /) -> tuple[float, float] | None:
        """Return the smallest and the largest value, both NaN if there is one; None if the tensor cannot be read."""


class Project(Protocol):
    """How `project` is called."""

    def __call__(self, x: Any, by: torch.Tensor, out: torch.Tensor, norms: torch.Tensor | None, /) -> bool:
        """Multiply a matrix by a few vectors.

        Args:
            x: `[m, k]` or `[b, m, k]`, as for `read`.
            by: `[k, g]` or `[b, k, g]`, of float32 or float64.
            out: Where to put the product, `[m, g]` or `[b, m, g]` and contiguous, of the dtype of `by`.
            norms: Where to put the norms of the rows, `[m, 1]` or `[b, m, 1]`, likewise.

        Returns:
            Whether that was done; it is not if the tensors cannot be read here.
        """


class SignSums(Protocol):
    """How `sign_sums` is called."""

    def __call__(self, x: Any, signs: torch.Tensor, out: torch.Tensor, /) -> bool:
        """Multiply a matrix by signs, and add up the products of neighbouring columns.

        Args:
            x: `[m, n]` or `[b, m, n]`, as for `read`.
            signs: `[n]`, of float32 or float64.
            out: Where to put the sums of g groups of columns, `[m, g]` or `[b, m, g]` and contiguous, of that dtype.

        Returns:
            As for `Project`.
        """


class Storage(Protocol):
    """How `storage` is called."""

    def __call__(self, tensor: Any, /) -> tuple[int, Any] | None:
        """Return a number for the storage of a tensor, and an object while which no other storage gets the number.

        Neither keeps the memory alive, nor makes torch make an object of the storage. None without a storage.
        """


def adopt(module: Any) -> None:
    """Read values with this library from now on."""
    global read, extent, project, sign_sums, storage
    module.set_up_values(torch.Tensor, torch.nn.Parameter)
    read, extent = module.read, module.extent
    project, sign_sums, storage = module.project, module.sign_sums, module.storage


def unread(*_: Any) -> None:
    """Read nothing, as where there is no library."""


def unsummed(*_: Any) -> bool:
    """Compute nothing, as where there is no library."""
    return False


def _find() -> None:
    """Adopt the library, or none, for the rest of the process."""
    global read, extent, project, sign_sums, storage
    module = library.find().module
    if module is None:
        read = extent = storage = unread
        project = sign_sums = unsummed
    else:
        adopt(module)


def _first_read(*args: Any) -> Found | None:
    _find()
    return read(*args)


def _first_extent(tensor: Any, /) -> tuple[float, float] | None:
    _find()
    return extent(tensor)


def _first_project(*args: Any) -> bool:
    _find()
    return project(*args)


def _first_sign_sums(*args: Any) -> bool:
    _find()
    return sign_sums(*args)


def _first_storage(tensor: Any, /) -> tuple[int, Any] | None:
    _find()
    return storage(tensor)


read: Read = _first_read
extent: Extent = _first_extent
project: Project = _first_project
sign_sums: SignSums = _first_sign_sums
storage: Storage = _first_storage
