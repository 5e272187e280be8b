"""Holds what A looks up in tables against what B does: other rows, such as tokens and positions, or another table.

Invariant: nothing is told of a lookup that B has, too, by whatever operator.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from opintercept.runs.program.program import Region, Step
from opintercept.runs.why.answer import Cause, CauseKind
from opintercept.runs.why.both import Both
from opintercept.runs.why.changes.wording import apart, place_of
from opintercept.runs.why.flow import LEAF, Flow, is_real
from opintercept.runs.why.joints import Joint, Joints
from opintercept.runs.why.sweep import Sweep

_OPERATORS = frozenset(("embedding", "index", "index_select"))


class _Lookup(NamedTuple):
    steps: tuple[Step, ...]  # several where B looks up piece by piece
    place: int  # of the table among the inputs
    table: Region
    rows: torch.Tensor
    given: bool  # whether no call has made the numbers of the rows
    window: slice = slice(None)  # of the tokens, where others are padding
    along: int = 0  # the dimension of the rows in which pieces follow each other

    @property
    def step(self) -> Step:
        return self.steps[0]

    def values(self, joints: Joints) -> torch.Tensor:
        made = [joints.made_by(step) for step in self.steps]
        found = torch.cat([joints.values(each) for each in made if each is not None], self.along - (self.along < 0))
        return found[..., self.window, :]


def other_lookups(both: Both, sweep: Sweep) -> Iterator[tuple[int, Joint, Cause]]:
    """Where B may look up something else: the place of A's call, what B's makes, and the cause that this would be."""
    mine, theirs = _lookups(both.a), _lookups(both.b)

    def same_table(one: _Lookup, other: _Lookup) -> bool:
        joint, tensor = both.counterparts.joint_of(sweep, one.step.number, one.place), both.joints.of(other.table)
        known = joint is not None and tensor is not None and tensor.region.shape == joint.tensor.region.shape
        return known and tensor.bag(both.joints) == joint.tensor.bag(both.joints)  # type: ignore[union-attr]

    def same_rows(one: _Lookup, other: _Lookup) -> bool:
        return torch.equal(one.rows.flatten(), other.rows.flatten())

    padded = {
        (other.rows.shape[-1], start, start + one.rows.shape[-1])
        for one, other in itertools.product(mine, theirs)
        if one.given and one.rows.dim() and one.rows.shape[:-1] == other.rows.shape[:-1] and same_table(one, other)
        for start in range(other.rows.shape[-1] - one.rows.shape[-1] + 1)
        if one.rows.shape != other.rows.shape
        if torch.equal(other.rows[..., start : start + one.rows.shape[-1]], one.rows)
    }
    theirs += [*_pieced(theirs)]
    theirs += [
        other._replace(rows=other.rows[..., start:end], window=slice(start, end))
        for other, (size, start, end) in itertools.product(theirs, padded)
        if other.rows.shape[-1:] == (size,)
    ]
    pairs = [(one, other, same_table(one, other), same_rows(one, other)) for one in mine for other in theirs]
    settled, taken = set[int](), set[int]()
    for one, other, table, rows in pairs:
        steps = {step.number for step in other.steps}
        if table and rows and one.step.number not in settled and not steps & taken:
            settled.add(one.step.number)
            taken |= steps
    for one, other, table, rows in pairs:
        region, made = one.step.outputs[0], both.joints.made_by(other.step)
        joint = sweep.joined.get(one.step.number)
        known = one.step.number in settled or other.step.number in taken or (joint is not None and joint.whole)
        if known or table == rows or region is None or made is None or one.rows.numel() != other.rows.numel():
            continue
        kind: CauseKind = "input" if one.given and other.given else "operand"
        words = _rows_words(one.rows, other.rows.reshape(one.rows.shape))
        if rows:
            owner = next((each for each in mine if same_table(each, other)), None)
            if owner is None:
                continue
            kind, words = "weight", f"looks up in the table of {place_of(owner.step)}"
        values = other.values(both.joints).reshape(region.shape)
        cause = Cause(kind, words, place_of(one.step), other=place_of(other.step), exact=True)
        yield one.step.number, Joint(made, values), cause


def _lookups(flow: Flow) -> list[_Lookup]:
    found = []
    for step in flow.steps:
        real = [place for place, (_, region) in enumerate(step.inputs) if is_real(flow.program, region)]
        whole = [place for place in range(len(step.inputs)) if place not in real]
        if step.operator not in _OPERATORS or len(real) != 1 or len(whole) != 1:
            continue
        (place,), (at,) = real, whole
        table, writers = step.inputs[place][1], flow.writers[step.number]
        if len(table.shape) == 2 and (table.weight or writers[place] == {LEAF}):
            rows = flow.program.value(step.inputs[at][1])
            found.append(_Lookup((step,), place, table, rows, writers[at] == {LEAF}))
    return found


def _pieced(lookups: list[_Lookup]) -> Iterator[_Lookup]:
    """What is looked up in the same table, call by call, as in one call."""
    groups: dict[Any, list[_Lookup]] = defaultdict(list)
    for each in lookups:
        groups[each.table.name, each.rows.dim()].append(each)
    for (_, dims), group in groups.items():
        for along in (0, -1) if dims > 1 else (0,):
            shapes = {each.rows.shape[1:] if along == 0 else each.rows.shape[:-1] for each in group}
            if len(group) > 1 and dims and len(shapes) == 1:
                steps = tuple(step for each in group for step in each.steps)
                yield group[0]._replace(steps=steps, rows=torch.cat([each.rows for each in group], along), along=along)


def _rows_words(a: torch.Tensor, b: torch.Tensor) -> str:
    """How numbers of rows differ, in words."""
    if a.shape == b.shape and a.numel() > 1 and bool(((b - a) == (b - a).flatten()[0]).all()):
        return f"looks up rows shifted by {int((b - a).flatten()[0])}"
    places = next((by for by in (1, -1) if a.dim() and torch.equal(a.roll(by, -1), b)), None)
    return f"looks up rows shifted by {places} place" if places else f"looks up other rows: {apart(a, b)}"
