"""Doors to other programs: trainers and metrics servers. Each module needs the package that it is named after.

Imports nothing, so that no package is needed before its module is imported.
"""
