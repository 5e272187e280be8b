"""How far an output may be off by rounding, as far as statistics tell: what `rounding` says where there are values.

Must not import torch.
"""

from __future__ import annotations

from typing import Any

_BITS = {"float64": 52, "complex128": 52, "float16": 10, "bfloat16": 7, "float8_e4m3fn": 3, "float8_e4m3fnuz": 3}
_BITS |= {"float8_e5m2": 2, "float8_e5m2fnuz": 2, "float32": 23, "complex64": 23}  # of a mantissa
SUMS = 2.0**-23
"""The distance from 1 to the next number of the dtype in which kernels add up, or of a finer one."""


def eps(dtype: str) -> float:
    """The distance from 1 to the next number of a dtype, by its name; 0 if it does not round."""
    return 2.0 ** -_BITS[dtype] if dtype in _BITS else 0.0


def of_terms(eps: Any, terms: Any, operands: Any, peak: Any) -> Any:
    """The largest error of sums of products, for numbers or columns of them.

    Operands are rounded before the sum, in which their errors partly cancel. Partial sums are rounded to float32 or
    better, and the output at the end.

    Args:
        eps: That of the coarsest dtype.
        terms: How many products make up a sum.
        operands: The product of the operands' root mean squares.
        peak: The largest magnitude of the output.
    """
    finest = (eps + SUMS - abs(eps - SUMS)) / 2
    return 4 * (eps * terms**0.5 + finest * terms) * operands + eps * peak
