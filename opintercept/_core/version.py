"""The version of the package, which its build reads here too."""

__version__ = "0.2.0"
