"""`Both`: two programs that are compared, and what is known of both."""

from __future__ import annotations

from collections import Counter

import torch

from opintercept._values import rounding
from opintercept.runs.program.program import Program
from opintercept.runs.why.counterparts import Counterparts
from opintercept.runs.why.flow import Flow, holds_products, is_real, passes
from opintercept.runs.why.joints import DTYPES, Joint, Joints


class Both:
    """Two programs.

    Args:
        a: A's program.
        b: B's.
        forward: Whether only the first forward pass counts.

    Attributes:
        a: A's data flow.
        b: B's.
        partial: Whether B has products only, of which nothing follows about what it computes in between.
        joints: B's tensors.
        counterparts: What of B belongs to what of A.
        dtypes: The dtype of most products of A, and of B.
        dtype: The coarser of these.
        unit_a: The unit roundoff of A's.
        taken: The places of calls of A that are taken as recorded, since computed again they make something else.
        searched: How many numbers the search for causes has read: a limit of time would name less on a slow machine.
        forced: B's values that were put into A's program, by the places of calls.
    """

    def __init__(self, a: Program, b: Program, *, forward: bool) -> None:
        self.a, self.b = (Flow(each, each.backward if forward else None) for each in (a, b))
        if not forward:  # gradients tell what losses do; of another number of passes these are of other batches
            for flow in (self.a, self.b):
                flow.ends = [end for end in flow.ends if end not in flow.program.roots]
        self.partial = holds_products(b)
        if self.partial:
            self.a.ends = self.a.final_products(backward=passes(a) == passes(b))
        self.joints = Joints(b, self.b.steps)
        self.counterparts = Counterparts(self.a, self.b, self.joints, partial=self.partial)
        self.dtypes = [_usual_dtype(flow) for flow in (self.a, self.b)]
        self.unit_a = rounding.unit(self.dtypes[0])
        self.dtype = max(self.dtypes, key=rounding.unit)
        self.taken: set[int] = set()
        self.searched = 0.0
        self.forced: dict[int, Joint] = {}


def _usual_dtype(flow: Flow) -> torch.dtype:
    """The dtype of most products; without any, of most results."""
    for heavy in (True, False):
        kinds = Counter(
            flow.program.dtype(region)
            for step in flow.steps
            for region in step.outputs[:1]
            if region is not None and is_real(flow.program, region)
            if not heavy or step.stored.record.gemm is not None
        )
        if kinds:
            return DTYPES.get(kinds.most_common(1)[0][0], torch.float32)
    return torch.float32
