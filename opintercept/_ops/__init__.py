"""The operator table: the only place that knows operators, their operands, GEMM shapes and FLOPs."""
