"""What torch's profiler sees of a program beside a block, for audits."""
