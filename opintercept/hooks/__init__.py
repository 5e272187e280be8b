"""Ready-made hooks, each also an example of how to write one.

Importing this imports torch only with the hooks that read values, when they are first used.
"""

from __future__ import annotations

from opintercept.hooks.log import Log as Log
from opintercept.hooks.print import Print as Print
from opintercept.hooks.recorder import Recorder as Recorder
from opintercept.hooks.when import when as when

__all__ = ["Log", "Print", "Recorder", "when"]
