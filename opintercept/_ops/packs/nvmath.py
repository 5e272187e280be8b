"""nvmath-python: its products, which go to cuBLASLt and NVPL without the dispatcher.

The signatures are those of nvmath-python 0.2 to 1.0. Operands of NumPy and CuPy are no tensors, and have no shape here.
"""

from __future__ import annotations

from opintercept._ops.register import offer_op

for _module in ("nvmath.linalg", "nvmath.linalg.advanced"):
    offer_op(f"{_module}:matmul", lhs="a", rhs="b", bias="c")
    # The operands were given to the object before.
    offer_op(f"{_module}:Matmul.execute", opaque=True)
