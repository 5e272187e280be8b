"""nvmath-python: its products, which go to cuBLASLt and NVPL without the dispatcher.

The signatures are those of nvmath-python 0.2 to 1.0. Operands of NumPy and CuPy are no tensors, and have no shape here.
"""

from __future__ import annotations

from opintercept._ops.register import offer_ops

offer_ops("nvmath.linalg:matmul nvmath.linalg.advanced:matmul", "lhs:a rhs:b bias:c")
# The operands were given to the object before.
offer_ops("nvmath.linalg:Matmul.execute nvmath.linalg.advanced:Matmul.execute", opaque=True)
