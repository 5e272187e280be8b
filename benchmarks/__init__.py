"""Benchmarks of interception; see README.md in this folder."""
