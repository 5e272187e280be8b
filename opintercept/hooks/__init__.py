"""Ready-made hooks. Each is also an example of how to write one: begin with `recorder`, `print` and `log`.

Each says in `reads` what it reads of its calls, and in `levels` where it works, if not everywhere. A hook is
loaded when it is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opintercept._core.after_import import torch_first

if TYPE_CHECKING:
    from opintercept.hooks._when import when as when
    from opintercept.hooks.attention import AttentionCall as AttentionCall
    from opintercept.hooks.attention import AttentionWeights as AttentionWeights
    from opintercept.hooks.audit import Audit as Audit
    from opintercept.hooks.audit import AuditRow as AuditRow
    from opintercept.hooks.capture import Capture as Capture
    from opintercept.hooks.capture import Captured as Captured
    from opintercept.hooks.checksum.checksum import Checksum as Checksum
    from opintercept.hooks.checksum.checksum import EstimatedError as EstimatedError
    from opintercept.hooks.checksum.checksum import WrongProduct as WrongProduct
    from opintercept.hooks.edits import BitFlip as BitFlip
    from opintercept.hooks.edits import FakeQuantize as FakeQuantize
    from opintercept.hooks.edits import Flip as Flip
    from opintercept.hooks.edits import Noise as Noise
    from opintercept.hooks.experts import Experts as Experts
    from opintercept.hooks.experts import ExpertsRow as ExpertsRow
    from opintercept.hooks.gradients import Gradient as Gradient
    from opintercept.hooks.gradients import Gradients as Gradients
    from opintercept.hooks.log import Log as Log
    from opintercept.hooks.nonfinite import CallFinding as CallFinding
    from opintercept.hooks.nonfinite import Finding as Finding
    from opintercept.hooks.nonfinite import NonFinite as NonFinite
    from opintercept.hooks.print import Print as Print
    from opintercept.hooks.profile import Profile as Profile
    from opintercept.hooks.profile import ProfileRow as ProfileRow
    from opintercept.hooks.recorder import Recorder as Recorder
    from opintercept.hooks.reference import Reference as Reference
    from opintercept.hooks.reference import ReferenceRow as ReferenceRow
    from opintercept.hooks.replicas import Divergence as Divergence
    from opintercept.hooks.replicas import Replicas as Replicas
    from opintercept.hooks.scalars import Scalars as Scalars
    from opintercept.hooks.stats import Stats as Stats
    from opintercept.hooks.stats import StatsRow as StatsRow

_HOMES = {
    name: file
    for file, names in {
        "_when": "when",
        "attention": "AttentionCall AttentionWeights",
        "audit": "Audit AuditRow",
        "capture": "Capture Captured",
        "checksum.checksum": "Checksum EstimatedError WrongProduct",
        "edits": "BitFlip FakeQuantize Flip Noise",
        "experts": "Experts ExpertsRow",
        "gradients": "Gradient Gradients",
        "log": "Log",
        "nonfinite": "CallFinding Finding NonFinite",
        "print": "Print",
        "profile": "Profile ProfileRow",
        "recorder": "Recorder",
        "reference": "Reference ReferenceRow",
        "replicas": "Divergence Replicas",
        "scalars": "Scalars",
        "stats": "Stats StatsRow",
    }.items()
    for name in names.split()
}

__all__ = [*_HOMES]  # noqa: PLE0604 - computed, so that each name is written once


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    torch_first()
    value = globals()[name] = vars(import_module(f"{__name__}.{_HOMES[name]}"))[name]
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
