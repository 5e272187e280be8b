"""Compares two runs: pairs their calls, compares each pair, and finds where a difference comes from."""
