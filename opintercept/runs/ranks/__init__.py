"""The ranks of one run compared."""
