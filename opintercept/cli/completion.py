"""`opintercept completion`: prints a script that makes a shell complete commands and options.

Must not import torch.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from opintercept._core.errors import needs
from opintercept.cli import all_commands


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="the shell that is to read the script")


def command(arguments: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError as missing:
        raise needs("completion", "shtab", "'opintercept[cli]'") from missing
    parser = all_commands(lambda name, parser: import_module(f"opintercept.cli.{name}").configure(parser))
    print(shtab.complete(parser, shell=arguments.shell))
    return 0
