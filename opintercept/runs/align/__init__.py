"""Compares two runs whose modules have other names."""
