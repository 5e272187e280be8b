"""Integrations with trainers, metrics servers and notebooks. Each module needs the package that it is named after.

Imports nothing, so that no package is needed before its module is imported.
"""
