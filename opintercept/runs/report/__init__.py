"""Writes the report: one HTML page about one or two runs."""
