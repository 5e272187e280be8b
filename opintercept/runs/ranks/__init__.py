"""Compares the ranks of one run."""
