"""Which generated kernels of a run are wrong by themselves: each is held against its operators on its own operands.

Invariant: only what was recorded of a kernel accuses it, whatever the other run has.
"""

from __future__ import annotations

from typing import Literal

from opintercept._core.errors import OpInterceptError
from opintercept._core.text import counted
from opintercept.runs.program import kernels
from opintercept.runs.store.run import Run
from opintercept.runs.why.answer import Place, WrongKernel


def wrong_kernels(run: Run, name: Literal["A", "B"]) -> tuple[list[WrongKernel], str]:
    """The wrong kernels of a run in order, and how many kernels could be held, in words.

    Args:
        run: The run.
        name: Its name in the answer, `"A"` or `"B"`.
    """
    found: list[WrongKernel] = []
    calls = [call for call in run.calls() if kernels.is_kernel(call) and call.error is None]
    held = 0
    for call in calls:
        try:
            judged, _ = kernels.held(run, call)
        except OpInterceptError:
            continue
        held += bool(judged)
        worst = max(judged, key=lambda each: each[1].excess, default=None)
        if worst is not None and worst[1].excess > 1:
            wrong, ops = worst[1], tuple(call.record.ops or ())
            found.append(WrongKernel(name, Place.of(call), ops, wrong.node.op, wrong.excess, wrong.deviation))
    return found, _told(name, held, len(calls))


def _told(name: str, held: int, calls: int) -> str:
    if not calls:
        return ""
    rest = f"; {calls - held:,} cannot be held against theirs" if held < calls else ""
    return f"{held:,} of {counted(calls, 'generated kernel')} of {name} were held against their operators{rest}"
