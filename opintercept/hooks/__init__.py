"""Ready-made hooks, each also an example of how to write one."""

from __future__ import annotations

from opintercept.hooks.attention import AttentionCall as AttentionCall
from opintercept.hooks.attention import AttentionWeights as AttentionWeights
from opintercept.hooks.log import Log as Log
from opintercept.hooks.print import Print as Print
from opintercept.hooks.profile import Profile as Profile
from opintercept.hooks.profile import ProfileRow as ProfileRow
from opintercept.hooks.recorder import Recorder as Recorder
from opintercept.hooks.reference import Reference as Reference
from opintercept.hooks.reference import ReferenceRow as ReferenceRow
from opintercept.hooks.when import when as when

__all__ = [
    "AttentionCall",
    "AttentionWeights",
    "Log",
    "Print",
    "Profile",
    "ProfileRow",
    "Recorder",
    "Reference",
    "ReferenceRow",
    "when",
]
