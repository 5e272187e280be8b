"""`Both`: two programs that are compared, and what is known of both."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from hashlib import blake2b

import torch

from opintercept._values import rounding
from opintercept.runs.program.program import Program, Region
from opintercept.runs.why.counterparts import Counterparts
from opintercept.runs.why.flow import LEAF, Flow, holds_products, is_real, passes
from opintercept.runs.why.joints import DTYPES, Joint, Joints
from opintercept.runs.why.layouts import Share

_MANY = 1 << 12  # samples that a batch has no more of
_WEIGHTS = ("weight", "mat2", "other")  # the inputs of calls that may have weights


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
        tails: The places of the calls of A whose results nothing reads, of which the last products lead to some.
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
        self.tails = self.a.ends
        self.partial = holds_products(b.run, b.rank)
        if self.partial:
            self.a.ends = self.a.final_products(backward=passes(a) == passes(b))
        self.joints = Joints(b, self.b.steps, shared(self.a, self.b))
        self.counterparts = Counterparts(self.a, self.b, self.joints, partial=self.partial)
        self.dtypes = [_usual_dtype(flow) for flow in (self.a, self.b)]
        self.unit_a = rounding.unit(self.dtypes[0])
        self.dtype = max(self.dtypes, key=rounding.unit)
        self.taken: set[int] = set()
        self.searched = 0.0
        self.forced: dict[int, Joint] = {}


def shared(a: Flow, b: Flow) -> Share | None:
    """The samples of A's batch that B computes, too, as what no call has made tells; None for all or none of them."""
    mine, theirs = _inputs(a), _inputs(b)
    kept: dict[int, set[int]] = {}
    for shape, batches in mine.items():
        own, known = set[bytes]().union(*batches), set[bytes]().union(*theirs.get(shape, ()))
        whole = any(len(samples) > 1 and known.issuperset(samples) for samples in batches)  # so B has all samples
        for samples in batches if known <= own and not whole else ():
            found = {at for at, sample in enumerate(samples) if sample in known}
            kept[len(samples)] = kept.get(len(samples), found) & found
    shares = {Share.of(count, found) for count, found in kept.items() if 0 < len(found) < count}
    return shares.pop() if len(shares) == 1 else _shared_tokens(a, b)


def _shared_tokens(a: Flow, b: Flow) -> Share | None:
    """The tokens of A's sequences that B computes, too, where it looks them up piece by piece.

    An engine does not compute the last token of an answer. Earlier ones are taken to be computed first.
    """
    mine, theirs = ([*_looked_up(flow)] for flow in (a, b))
    left = Counter(number for rows in theirs for number in rows.flatten().tolist())
    if not mine or mine[0].dim() not in (1, 2) or not left:
        return None
    tokens = mine[0]
    known = [
        [left.subtract([n]) or left[n] >= 0 for n in each] for each in tokens.reshape(-1, tokens.shape[-1]).mT.tolist()
    ]
    kept = {at for at, each in enumerate(known) if all(each)}
    return Share.of(len(known), kept) if 0 < len(kept) < len(known) else None


def _looked_up(flow: Flow) -> Iterator[torch.Tensor]:
    """The numbers of the rows that a program looks up in the table of its first lookup, call by call."""
    table: str | None = None
    for step in flow.steps:
        regions = [region for at, (_, region) in enumerate(step.inputs) if at in step.reads]
        real = [each for each in regions if is_real(flow.program, each)]
        whole = [each for each in regions if each not in real and each.name is not None]
        if step.operator == "embedding" and len(real) == len(whole) == 1 and table in (None, real[0].name):
            table = real[0].name
            yield flow.program.value(whole[0])


def _inputs(flow: Flow) -> dict[tuple[int, ...], list[list[bytes]]]:
    """The inputs of a program but for weights, cut along either dimension and whole, by the shape of a part."""
    regions: dict[str, Region] = {}
    for step, writers in zip(flow.steps, flow.writers, strict=True):
        for (name, region), found in zip(step.inputs, writers, strict=True):
            other = region.weight or name in _WEIGHTS or flow.program.dtype(region)[0] == "C"
            if found == {LEAF} and len(region.shape) > 1 and region.name is not None and not other:
                regions[region.name] = region
    found_by = defaultdict[tuple[int, ...], list[list[bytes]]](list)
    for dim, region in itertools.product((0, 1), regions.values()):
        values = flow.program.value(region).double()
        for samples in (values.movedim(dim, 0), values[None]) if values.shape[dim] <= _MANY else ():
            found_by[dim, *samples.shape[1:]].append([blake2b(each.numpy().tobytes()).digest() for each in samples])
    return found_by


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
