"""The operator table: only this package knows operators, their operands, GEMM shapes and FLOPs."""
