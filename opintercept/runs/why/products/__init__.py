"""Judges two runs that hold products only, of which nothing in between can be computed again."""
