"""Ready-made hooks. Each is also an example of how to write one: begin with `recorder`, `print` and `log`.

Each says in `reads` what it reads of its calls, and in `levels` where it works, if not everywhere.
"""

from __future__ import annotations

from opintercept.hooks.attention import AttentionCall as AttentionCall
from opintercept.hooks.attention import AttentionWeights as AttentionWeights
from opintercept.hooks.capture import Capture as Capture
from opintercept.hooks.capture import Captured as Captured
from opintercept.hooks.checksum.checksum import Checksum as Checksum
from opintercept.hooks.checksum.checksum import EstimatedError as EstimatedError
from opintercept.hooks.checksum.checksum import WrongProduct as WrongProduct
from opintercept.hooks.edits import BitFlip as BitFlip
from opintercept.hooks.edits import FakeQuantize as FakeQuantize
from opintercept.hooks.edits import Flip as Flip
from opintercept.hooks.edits import Noise as Noise
from opintercept.hooks.gradients import Gradient as Gradient
from opintercept.hooks.gradients import Gradients as Gradients
from opintercept.hooks.log import Log as Log
from opintercept.hooks.nonfinite import Finding as Finding
from opintercept.hooks.nonfinite import NonFinite as NonFinite
from opintercept.hooks.print import Print as Print
from opintercept.hooks.profile import Profile as Profile
from opintercept.hooks.profile import ProfileRow as ProfileRow
from opintercept.hooks.recorder import Recorder as Recorder
from opintercept.hooks.reference import Reference as Reference
from opintercept.hooks.reference import ReferenceRow as ReferenceRow
from opintercept.hooks.replicas import Parting as Parting
from opintercept.hooks.replicas import Replicas as Replicas
from opintercept.hooks.scalars import Scalars as Scalars
from opintercept.hooks.stats import Stats as Stats
from opintercept.hooks.stats import StatsRow as StatsRow
from opintercept.hooks.when import when as when

__all__ = [
    "AttentionCall",
    "AttentionWeights",
    "BitFlip",
    "Capture",
    "Captured",
    "Checksum",
    "EstimatedError",
    "FakeQuantize",
    "Finding",
    "Flip",
    "Gradient",
    "Gradients",
    "Log",
    "Noise",
    "NonFinite",
    "Parting",
    "Print",
    "Profile",
    "ProfileRow",
    "Recorder",
    "Reference",
    "ReferenceRow",
    "Replicas",
    "Scalars",
    "Stats",
    "StatsRow",
    "WrongProduct",
    "when",
]
