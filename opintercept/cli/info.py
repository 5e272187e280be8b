"""`opintercept info`: prints which engine a program gets on this machine, and why."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def command(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from opintercept._engines.info import info

    print(info())
    return 0
