"""`Gemm`: the shape of the matrix product behind a call. Must not import torch."""

from __future__ import annotations

from typing import NamedTuple


class Gemm(NamedTuple):
    """The matrix product behind a call: `batch` times `[m, k] @ [k, n]`.

    Of a convolution, `batch` are its groups, and lhs has a row with the patch of the input for each position.

    `dtypes` and `transposes` are those of lhs and rhs. A transpose is true if, in the operand as the product reads it,
    neighbours in a column are neighbours in memory, and not those in a row.
    """

    batch: int
    m: int
    n: int
    k: int
    dtypes: tuple[str, str]
    transposes: tuple[bool, bool]

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch != 1 else ""
        return f"{batch}[{self.m}, {self.k}] @ [{self.k}, {self.n}]"
