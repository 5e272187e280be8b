"""`Counterparts`: which tensor of B a call of A would make, were it not for what differs.

By the rows of weights, then by the same operator on the same operands; results of the programs belong to each other.
Invariant: no call has a counterpart by its order alone.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from opintercept._core.errors import OpInterceptError
from opintercept.runs.program.names import module_name
from opintercept.runs.program.program import Region, Step
from opintercept.runs.store.columns import Array
from opintercept.runs.why.changes.wording import biases_of
from opintercept.runs.why.flow import LEAF, Flow, is_real
from opintercept.runs.why.joining.calls import linked
from opintercept.runs.why.joining.tokens import MOST, distances, in_order
from opintercept.runs.why.joining.weights import Joining, Match, Side
from opintercept.runs.why.joints import Joint, Joints, Tensor, content_of
from opintercept.runs.why.layouts import Layout, Share, layouts
from opintercept.runs.why.noise import apart, unmasked
from opintercept.runs.why.sweep import Sweep

_CHAIN = frozenset(("add", "mul", "sub", "div", "clone", "_to_copy", "copy"))  # what may follow a product of its own
_PRODUCTS = frozenset(("mm", "addmm", "linear", "matmul", "_int_mm"))
ACTIVATIONS = (
    *("silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "hardswish", "mish", "elu", "leaky_relu", "hardtanh"),
    *("relu6", "celu", "selu", "hardsigmoid", "log_sigmoid", "softshrink"),
)
"""Functions that may stand for each other by mistake."""
_LONGEST = 8  # calls of such a chain
_FARTHER = 1.5  # how much nearer a later call of a chain must be to B's
_ALIKE = 0.25  # of the square of their size that values may be off, to be in their own order for sure
_SAMPLED = 1 << 12  # numbers that tell the layout of a tensor
_CLEARLY = 0.5  # of the square of the distance in its own order, below which another one is that of a tensor
_UNLIKE = 0.5  # of the square of their size that results may be off, but for those of B's last product
_SAME = 1e-6  # of that, that rows may be off which are joined
_KNOWN = 0.5  # of a product that must have a counterpart


class Counterpart(NamedTuple):
    """What B has in the place of the output of a call of A.

    Attributes:
        number: The place of the call of A.
        joint: B's values in A's layout.
        step: B's call; None if it is not known.
        by: `"operands"`, `"weight"`, `"parameter"`, `"piece"` for calls of an engine, or `"result"`.
        others: What B has before or behind that, which may be meant instead.
    """

    number: int
    joint: Joint
    step: Step | None
    by: str
    others: tuple[Counterpart, ...] = ()


class _Piece(NamedTuple):
    """A part of what a product of A makes, which a product of B makes."""

    match: int
    step: Step
    rows_a: Array  # of the weight
    rows_b: Array
    tokens: tuple[Array, Array] | None  # rows of the other operand; None for all in the same order


class _SameRows(NamedTuple):
    """The rows of calls of B, one call after the other, that are those of a tensor of A."""

    steps: list[Step]
    at: torch.Tensor  # of A
    of: torch.Tensor  # of B
    far: float  # the mean of the squares of their distances, relative to their own


class Counterparts:
    """The counterparts of two programs."""

    def __init__(self, a: Flow, b: Flow, joints: Joints, *, partial: bool) -> None:
        self.a, self.b, self.joints, self.partial = a, b, joints, partial
        self.reasons: list[str] = []
        self.joining: Joining | None = None
        self._named: dict[tuple[str, int], list[Step]] = defaultdict(list)
        for step in b.steps:
            if (made := joints.made_by(step)) is not None:
                self._named[step.operator, math.prod(made.region.shape)].append(step)
        self._parts: dict[int, list[int]] = {}  # results of A that are parts of one, which B has
        self.ends = self._paired_ends()

    @functools.cached_property
    def by_weight(self) -> dict[int, list[_Piece]]:
        """What B makes of the weight of each product of A, by the rows of their weights; found when it is asked for."""
        joined: dict[int, list[_Piece]] = {}
        sides = [Side.of(flow.program.run) for flow in (self.a, self.b)]
        try:
            joining = self.joining = Joining(*sides)
        except OpInterceptError as reason:  # the runs lack values
            self.reasons.append(str(reason))
            return joined
        links = linked(joining)
        for side in sides:
            side.run.close_tensors()  # lets go of the memory that all weights take
        places = [{step.stored.record.index: step for step in flow.steps} for flow in (self.a, self.b)]
        for a, found in links.of_a.items():
            step = places[0].get(joining.a.calls[a].record.index)
            for b, match in found:
                other = places[1].get(joining.b.calls[b].record.index)
                if step is None or other is None or match is None or joining.a.calls[a].rank != self.a.program.rank:
                    continue
                own = joining.matches[match]
                if own.part_a == own.part_b == (0, joining.a.weights[own.a].shape[2]):
                    rows_b = own.rows_b
                    if own.by == "neighbours" and len(own.rows_a) == joining.a.rows(own.a).shape[0] == len(rows_b):
                        rows_b = own.rows_a  # nothing says which row is which
                    piece = _Piece(match, other, own.rows_a, rows_b, links.rows.get((a, b)))
                    joined.setdefault(step.number, []).append(piece)
        return joined

    @functools.cached_property
    def _taken(self) -> set[int]:
        """The products of B that have a counterpart by their weights."""
        return {piece.step.number for pieces in self.by_weight.values() for piece in pieces}

    def _paired_ends(self) -> dict[int, Tensor]:
        """B's tensor for each result of A: of the same operator in a module of the same name, of the same size."""
        left = [step for number in self.b.ends if self.joints.made_by(step := self.b.steps[number]) is not None]
        root = self.b.program.root
        counts = [Counter(map(_likeness, flow.steps)) for flow in (self.a, self.b)]
        found: dict[int, Tensor] = {}

        def fits(step: Step, other: Step, level: int) -> bool:
            one, two = step.stored.record, other.stored.record
            made = self.joints.made_by(other)
            if made is None or math.prod(made.region.shape) != self._size(step):
                return False
            if self.partial and counts[0][_likeness(step)] != counts[1][_likeness(other)]:
                return False  # one computes in pieces
            if step.number == self.a.program.root or other.number == root:
                return step.number == self.a.program.root and other.number == root
            return (
                (step.operator == other.operator and module_name(one.module) == module_name(two.module)),
                step.operator == other.operator,
                True,
            )[level]

        for level in range(1 if self.partial else 3):
            for number in reversed(self.a.ends):
                step = self.a.steps[number]
                other = next((each for each in reversed(left) if number not in found and fits(step, each, level)), None)
                if other is not None and (made := self.joints.made_by(other)) is not None:
                    found[number] = made
                    left.remove(other)
        if self.partial:
            return found
        mine = [*_results(self.a, [end for end in self.a.ends if end not in found])]
        theirs = [
            (self.joints.add_parts([self.b.steps[number] for number in numbers]), numbers)
            for numbers in _results(self.b, [step.number for step in left])
        ]
        for numbers in reversed(mine):
            size = sum(self._size(self.a.steps[number]) for number in numbers)
            fitting = (each for each in reversed(theirs) if math.prod(each[0].region.shape) == size)
            if (pair := next(fitting, None)) is not None and len(numbers) + len(pair[1]) > 2:
                theirs.remove(pair)
                found |= dict.fromkeys(numbers, pair[0])
                self._parts |= dict.fromkeys(numbers, numbers)
        return found

    def weight_rows(self, number: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The rows of the weight of a product of A, and those that B has for them, `float64[n, k]`; None if unknown."""
        step, rows = self.a.steps[number], None
        place = weight_place(step)
        if place is None:
            return None
        rows = _as_rows(step, self.a.program.value(step.inputs[place][1]))
        theirs = rows.clone()
        for piece in self.by_weight[number]:
            at = weight_place(piece.step)
            if self.joining is not None and piece.match in self.joining.terms and len(self.by_weight[number]) == 1:
                one, other = self.joining.both(piece.match)  # with low-rank products that are added on either side
                if len(one) == len(rows):
                    return one, other
            if at is None:
                return None
            weight = _as_rows(piece.step, self.b.program.value(piece.step.inputs[at][1]))
            if weight.shape[1] != rows.shape[1] or int(piece.rows_b.max()) >= len(weight):
                return None
            if int(piece.rows_a.max()) >= len(rows):
                return None
            match = self.match(number)
            weight = weight if match is None or match.order is None else weight[:, match.order]
            theirs[torch.from_numpy(piece.rows_a)] = weight[torch.from_numpy(piece.rows_b)]
        return rows, theirs

    def match(self, number: int) -> Match | None:
        """The rows of the weight of a product of A that B's first product of them has."""
        pieces = self.by_weight.get(number)
        return self.joining.matches[pieces[0].match] if pieces and self.joining is not None else None

    def scaled(self, number: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What B's product of a weight makes, and what B scales that to, `float64[m, n]`, if one product has it all."""
        pieces = self.by_weight[number]
        if len(pieces) != 1:
            return None, None
        chain, rows = self._chain(self.b, pieces[0].step.number), torch.from_numpy(pieces[0].rows_b)
        made = [self.joints.made_by(self.b.steps[each]) for each in (chain[0], chain[-1])]
        first, last = (None if each is None else self.joints.values(each) for each in made)
        if first is None or last is None:
            return None, None
        width = first.shape[-1]
        one, two = first.reshape(-1, width), last.reshape(-1, width)
        return (one[:, rows], two[:, rows]) if int(rows.max()) < width else (None, None)

    def of(self, sweep: Sweep, bad: set[int], bad_ends: set[int], stale: set[int]) -> Iterator[Counterpart]:
        """The counterparts of calls that differ, in A's order, but for stale ones, to which the caller may add."""
        used = {maker for joint in sweep.joined.values() for maker in joint.makers}
        later: dict[int, list[Counterpart]] = defaultdict(list)
        for number in sorted(bad):
            found = later.pop(number, [])
            known = number in sweep.made or number in self.by_weight  # products in whole numbers are scaled behind
            if known and number in self.a.active and number not in stale:
                same = self._same_operands(sweep, number, used) if not self._is_product(number) else None
                if same is None and number in self.by_weight:
                    if self.partial and (operand := self._operand(sweep, number, bad)) is not None:
                        yield operand
                        if number in sweep.joined or number in stale:
                            continue
                    same = self._product(sweep, number, bad)
                elif same is None:
                    same = self._same_parameter(sweep, number) or self._same_piece(sweep, number)
                if same is not None:
                    (found if same.number == number else later[same.number]).append(same)
                if number in bad_ends and (end := self.end(sweep, number)) is not None:
                    found.append(end)
            yield from sorted(found, key=lambda each: each.by != "operands")

    def _is_product(self, number: int) -> bool:
        """Whether a call multiplies by a matrix, which says better than its operands what belongs to it."""
        step = self.a.steps[number]
        return step.operator in _PRODUCTS and weight_place(step) is not None

    def end(self, sweep: Sweep, number: int) -> Counterpart | None:
        """What B has in the place of a result of A, in one or in several tensors."""
        base = sweep.made[number].base
        if number not in self.ends:
            pieces = self.by_weight.get(number, []) if self._is_product(number) else []
            if not pieces and self._is_product(number):
                return self._rows_of_result(base, number)
            values = self._assembled(base, number, pieces[0].step.number) if pieces else None
            made = self.joints.made_by(pieces[0].step) if pieces else None
            if values is None or made is None:
                return self._part_of_result(base, number)
            if self._chains(number, pieces[0].step, pieces[0])[0][0] != number:  # A adds behind it what is within B's
                for piece in pieces:
                    for place in biases_of(piece.step):
                        bias = self.b.program.value(piece.step.inputs[place][1]).double()
                        values[..., piece.rows_a] -= bias[..., piece.rows_b]
            return Counterpart(number, Joint(made, values, whole=False), pieces[0].step, "result")
        tensor = self.ends[number]
        step = self.b.steps[tensor.makers[-1]] if tensor.makers else None
        parts = self._parts.get(number, [number])
        if len(parts) > 1:
            regions = (own for each in parts if (own := self.a.steps[each].outputs[0]) is not None)
            base = torch.stack([self.a.program.value(each).double() for each in regions])
        values = nearest(self.joints.values(tensor), base, share=self.joints.share)
        values = values[parts.index(number)] if len(parts) > 1 else values
        return Counterpart(number, Joint(tensor, values, whole=len(parts) == 1), step, "result")

    def _size(self, step: Step) -> int:
        """How many numbers B has of what a call of A makes."""
        return _size(step) if self.joints.share is None else self.joints.share.size(_size(step))

    def _same_operands(self, sweep: Sweep, number: int, used: set[int]) -> Counterpart | None:
        """The output of B's call of the same operator on operands that A's call has, too."""
        step = self.a.steps[number]
        mine: list[tuple[int, Joint | None]] = []
        leaves: list[tuple[int, Joint | None]] = []
        for place, writers in enumerate(self.a.writers[number]):
            region = step.inputs[place][1]
            if not writers or not is_real(self.a.program, region):
                continue
            joint = self.joint_of(sweep, number, place)
            if writers == {LEAF}:
                leaves.append((place, joint))
            elif writers & self.a.active:
                mine.append((place, joint))
        mine = mine or [each for each in leaves if each[1] is not None and math.prod(step.inputs[each[0]][1].shape) > 1]
        if not mine or any(joint is None for _, joint in mine):
            return None
        size = self._size(step)
        candidates = []
        operators = ACTIVATIONS if step.operator in ACTIVATIONS else (step.operator,)
        for other in (each for operator in operators for each in self._named[operator, size]):
            names = [name for name, _ in other.inputs]
            same = names[: len(step.inputs)] == [name for name, _ in step.inputs[: len(names)]]
            if (
                other.number in self._taken
                or not (same or other.operator != step.operator)
                or updates(step) != updates(other)
            ):
                continue
            known = leaves if other.number in used else []  # which another call of A makes, of its own weights
            if all(
                place < len(other.inputs) and joint is not None and self.reads(other.inputs[place][1], joint)
                for place, joint in (*mine, *known)
            ):
                candidates.append(other)
        if not candidates:
            return None
        at, base = number / max(len(self.a.steps), 1), sweep.made[number].base
        ranks = [
            (
                each.number in used,
                module_name(each.stored.record.module) != module_name(step.stored.record.module),
                each.operator != step.operator,
                -self._alike(step, each, sweep),
            )
            for each in candidates
        ]
        found = []
        for other in (each for each, rank in zip(candidates, ranks, strict=True) if rank == min(ranks)):
            tensor = self.joints.made_by(other)
            assert tensor is not None
            joint = Joint(tensor, nearest(self.joints.values(tensor), base, share=self.joints.share))
            far = apart(joint.values, base), abs(other.number / max(len(self.b.steps), 1) - at)
            found.append((far, Counterpart(number, joint, other, "operands")))
        return min(found, key=lambda each: each[0])[1]

    def _same_parameter(self, sweep: Sweep, number: int) -> Counterpart | None:
        """The output of B's call that reads the same parameter, as often as A has read it before."""
        step = self.a.steps[number]
        for place, (name, region) in enumerate(step.inputs):
            joint = self.joint_of(sweep, number, place)
            gemm = step.stored.record.gemm is not None
            leaf = region.weight or (gemm and self.a.writers[number][place] == {LEAF})
            narrow = len(region.shape) < 2 and place not in step.written
            if joint is None or not leaf or narrow or number in sweep.joined:
                continue
            mine = [each for each in self.a.steps if each.operator == step.operator and _reads(each, name, region)]
            turn = next(turn for turn, each in enumerate(mine) if each.number == number)
            readers = [each for each in self.b.steps if any(self.reads(own, joint) for _, own in each.inputs)]
            for alike in (True, False):
                theirs = [
                    each
                    for each in readers
                    if _size(each) == _size(step)
                    and (self.partial or updates(each) == updates(step))
                    and not (self.partial and biases_of(step) and not biases_of(each))
                    and (each.operator == step.operator if alike else each.stored.record.gemm is not None)
                ]
                if len(theirs) == len(mine):
                    return self._in_chain(sweep, number, theirs[turn])
        return None

    def _in_chain(self, sweep: Sweep, number: int, other: Step) -> Counterpart | None:
        """What B makes of a parameter, with a bias of its own: what is nearest to A's."""
        base, found = sweep.made[number].base, list[tuple[float, Counterpart]]()
        chain = [other.number] if updates(other) else self._chains(number, other)[1]
        for late, m in enumerate(chain):
            tensor = self.joints.made_by(self.b.steps[m])
            if tensor is not None:
                values = nearest(_channels_as(self.a.steps[number], other, self.joints.values(tensor), base), base)
                far = apart(values, base) * (1 + 0.01 * late)
                found.append((far, Counterpart(number, Joint(tensor, values), self.b.steps[m], "parameter")))
        return min(found, key=lambda each: each[0], default=(0.0, None))[1]

    def _alike(self, step: Step, other: Step, sweep: Sweep) -> int:
        """How many operands of two calls are the same, leaves too."""
        joints = (self.joint_of(sweep, step.number, place) for place in range(len(step.inputs)))
        return sum(
            joint is not None and self.reads(region, joint)
            for joint, (_, region) in zip(joints, other.inputs, strict=False)
        )

    def joint_of(self, sweep: Sweep, number: int, place: int) -> Joint | None:
        """B's tensor for an input of a call."""
        edge = sweep.edges.get((number, place))
        if edge is not None:
            return edge
        writers = self.a.writers[number][place]
        (writer,) = writers if len(writers) == 1 else (LEAF,)
        made = None if writer == LEAF else self.a.steps[writer].outputs[0]
        own = made is not None and made.memory == self.a.steps[number].inputs[place][1].memory  # and no other output
        return sweep.joined.get(writer) if own else None

    def reads(self, region: Region, joint: Joint) -> bool:
        """Whether B reads a joint's tensor there, however it is laid out."""
        tensor = self.joints.of(region)
        if tensor is None or not joint.whole:
            return False
        if tensor is joint.tensor:
            return True
        size = math.prod(region.shape)
        return size == math.prod(joint.tensor.region.shape) and tensor.bag(self.joints) == joint.tensor.bag(self.joints)

    def _product(self, sweep: Sweep, number: int, bad: set[int]) -> Counterpart | None:
        """What B makes of the weight of a product, with what it adds or scales of its own behind that."""
        found: list[tuple[float, Counterpart]] = []
        pieces = self.by_weight[number]
        if number in sweep.blind and any(piece.tokens is not None for piece in pieces):
            return None  # it has other tokens than it was recorded with
        first = pieces[0].step
        chain_a, chain_b = [number], [first.number]
        if len(pieces) == 1:
            chain_a, chain_b = self._chains(number, first, pieces[0])
        chain_a = [each for each in chain_a if each in bad and each in sweep.made]
        for late, n in enumerate(chain_a):
            base = sweep.made[n].base
            for m in chain_b:
                made = self.joints.made_by(self.b.steps[m])
                values = None if made is None else self._assembled(base, number, m)
                if values is None or made is None:
                    continue
                square = float(values.nan_to_num(0, 0, 0).square().sum()) or 1e-300
                distance = apart(base, values) / square
                counterpart = Counterpart(n, Joint(made, values, len(pieces) == 1), self.b.steps[m], "weight")
                found.append((distance * _FARTHER ** (len(chain_a) - late), counterpart))
        if not found:
            return None
        nearest_first = [each for _, each in sorted(found, key=lambda each: each[0])]
        best = nearest_first[0]
        return best._replace(others=tuple(each for each in nearest_first[1:] if each.number == best.number))

    def _operand(self, sweep: Sweep, number: int, bad: set[int]) -> Counterpart | None:
        """What B multiplies by the weight of a product of A, in the place of what makes that in A."""
        (piece, *others), lhs = self.by_weight[number], _lhs(self.a.steps[number])
        theirs = self.joints.of(_lhs(piece.step))
        if others or lhs is None or theirs is None or piece.tokens is not None or self.joining is None:
            return None
        places = (at for at, (_, region) in enumerate(self.a.steps[number].inputs) if region is lhs)
        writers = self.a.writers[number][next(places)]
        (maker,) = writers if len(writers) == 1 else (LEAF,)
        if maker not in bad or maker not in sweep.made or self.joining.matches[piece.match].order is not None:
            return None
        base = sweep.made[maker].base
        if base.numel() != math.prod(theirs.region.shape) or base.numel() != math.prod(lhs.shape):
            return None
        values = nearest(self.joints.values(theirs), base)
        return Counterpart(maker, Joint(theirs, values), piece.step, "weight")

    def _rows_of_result(self, base: torch.Tensor, number: int) -> Counterpart | None:
        """B's results for some tokens of a result of A, where neither weights nor sizes tell: an engine's logits."""
        x = base.reshape(-1, base.shape[-1])
        best: tuple[float, _SameRows] | None = None
        for steps in self._unweighted.values():
            rows = self._aligned(x, steps)
            if rows is None or len(rows.at) == len(x):
                continue
            far = rows.far - (steps[-1].number == max(self._last_unweighted))
            if best is None or far < best[0]:
                best = far, rows
        return None if best is None or best[0] > _UNLIKE else self._filled(best[1], base, number, "result")

    def _part_of_result(self, base: torch.Tensor, number: int) -> Counterpart | None:
        """The nearest samples of B's results of the same operator, where one program computes all of them by parts."""
        operator, shape = self.a.steps[number].operator, base.shape[1:]
        mine = [step for end in self.a.ends if (step := self.a.steps[end]).operator == operator]
        theirs = [step for end in self.b.ends if (step := self.b.steps[end]).operator == operator]
        made = [tensor for tensor in map(self.joints.made_by, theirs) if tensor and tensor.region.shape[1:] == shape]
        if self.a.users[number] or base.dim() < 2:  # what is read only chooses, and is judged by what follows
            return None
        if not made or len(made) < len(theirs) or sum(map(_size, mine)) != sum(map(_size, theirs)):
            return None
        values = torch.cat([self.joints.values(each) for each in made])
        lengths = [region.shape[0] for step in (*mine, *theirs) if (region := step.outputs[0]) and region.shape]
        parts = values.unfold(0, len(base), math.gcd(*lengths)).movedim(-1, 1)
        part = min(parts, key=lambda each: apart(each, base))
        return Counterpart(number, Joint(made[0], part, whole=False), theirs[0], "result")

    def _same_piece(self, sweep: Sweep, number: int) -> Counterpart | None:
        """What B makes, call by call, of rows that A has: where weights are behind handles, and keys in a cache."""
        step, base = self.a.steps[number], sweep.made[number].base
        if not step.is_attention and not self._is_product(number):
            return self._scaled_rows(sweep, number)
        role = "value" if step.is_attention else "lhs"
        name = step.stored.tensors.get(role)
        place = next((at for at, (_, region) in enumerate(step.inputs) if region.name == name), None)
        joint = None if place is None or name is None else self.joint_of(sweep, number, place)
        if joint is None or place is None:
            return None
        given = sweep.given.get(number, {place: None})[place]  # as A's call reads it
        if given is None:
            region = step.inputs[place][1]
            known = joint.values if (number, place) in sweep.edges else self.a.program.value(region).double()
            given = known.reshape(region.shape)
        x = _by_token(given, step.is_attention)
        found: list[tuple[float, Counterpart]] = []
        for steps in (self._attentions if step.is_attention else self._unweighted).values():
            rows = self._aligned(x, steps, role)
            filled = self._filled(rows, base, number, "piece") if rows is not None and rows.far <= _SAME else None
            found += [] if filled is None else [(apart(filled.joint.values, base), filled)]
        return min(found, key=lambda each: each[0], default=(0.0, None))[1]

    def _scaled_rows(self, sweep: Sweep, number: int) -> Counterpart | None:
        """What B's calls make that read a vector of weights, as those of a norm, one call after the other."""
        step, base = self.a.steps[number], sweep.made[number].base
        for place, (_, region) in enumerate(step.inputs):
            joint = self.joint_of(sweep, number, place)
            if joint is None or not region.weight or base.shape[-1:] != region.shape or base.dim() < 2:
                continue
            x, content = base.reshape(-1, base.shape[-1]), content_of(region.name or "")
            mine = [  # in a model that was not trained, all norms have the same
                each.number
                for each in self.a.steps
                if each.operator == step.operator
                if any(own.weight and content_of(own.name or "") == content for _, own in each.inputs)
            ]
            groups = [*self._readers(joint).values()]
            steps = groups[mine.index(number)] if len(groups) == len(mine) else []
            rows = self._aligned(x, steps)
            if rows is not None and len(rows.at) < len(x):
                sure = steps[0].operator == step.operator or "norm" in steps[0].operator
                return self._filled(rows, base, number, "piece" if sure else "parameter")
        return None

    def _readers(self, joint: Joint) -> dict[Any, list[Step]]:
        """The calls of B that read a vector and make rows, by where they are."""
        made = ((step, self.joints.made_by(step)) for step in self.b.steps)
        rows = (step for step, own in made if own is not None and len(own.region.shape) > 1)  # no initialised weight
        return _by_line(step for step in rows if any(self.reads(own, joint) for _, own in step.inputs))

    @functools.cached_property
    def _last_unweighted(self) -> list[int]:
        return [step.number for steps in self._unweighted.values() for step in steps]

    @functools.cached_property
    def _unweighted(self) -> dict[Any, list[Step]]:
        """The products of B whose weight is behind a handle, by where they are."""
        records = ((step, step.stored.record) for step in self.b.steps)
        return _by_line(
            step for step, own in records if own.gemm is not None and own.lhs is not None and own.rhs is None
        )

    @functools.cached_property
    def _attentions(self) -> dict[Any, list[Step]]:
        """The attentions of B that are of another library, by where they are."""
        opaque = (step for step in self.b.steps if step.stored.record.opaque and "value" in step.stored.tensors)
        return _by_line(step for step in opaque if not step.stored.record.op.startswith("aten::"))

    def _aligned(self, x: torch.Tensor, steps: list[Step], role: str = "output") -> _SameRows | None:
        """The rows of B's calls beside those of A, in the order of both; None if B has more, or of another width."""
        y = self._rows(steps, x.shape[1], role)
        if y is None or len(y) > len(x) or len(x) * len(y) > MOST:
            return None
        cost = distances(x, y)
        at, of = in_order(cost)
        return _SameRows(steps, torch.from_numpy(at), torch.from_numpy(of), float(cost[at, of].mean()))

    def _rows(self, steps: list[Step], width: int | None, role: str = "output") -> torch.Tensor | None:
        """What calls of B have in a role, `float64[tokens, width]`, call after call; nothing of another width."""
        found = []
        for step in steps:
            values = self.b.program.tensor(step.stored, role)  # its arguments may not have been recorded
            if values is None or not values.dim() or not values.is_floating_point():
                return None
            found.append(values.reshape(len(values), -1).double())
        widths = {each.shape[1] for each in found}
        return torch.cat(found) if len(widths) == 1 and width in (None, *widths) else None

    def _filled(self, rows: _SameRows, base: torch.Tensor, number: int, by: str) -> Counterpart | None:
        """A's output with B's in the rows that B has, of several products in one those columns that are nearest."""
        attention = self.a.steps[number].is_attention
        own = _by_token(base, attention)
        values, made = self._rows(rows.steps, None), [self.joints.made_by(each) for each in rows.steps]
        if values is None or values.shape[1] < own.shape[1]:
            return None
        windows = values[rows.of].unfold(1, own.shape[1], math.gcd(own.shape[1], values.shape[1]))
        far = [apart(own[rows.at], window) for window in windows.unbind(1)]
        filled = own.index_copy(0, rows.at, windows[:, min(range(len(far)), key=far.__getitem__)])
        first, *others = (each for each in made if each is not None)
        joint = Joint(first, _from_tokens(filled, base.shape, attention), False, (*others,))
        return Counterpart(number, joint, rows.steps[0], by)

    def unseen_bias(self, number: int) -> torch.Tensor | None:
        """What a product of A adds to what B's product makes, which B may add where it is not recorded."""
        mine, pieces = biases_of(self.a.steps[number]), self.by_weight.get(number, [])
        if not self.partial or not mine or not pieces or any(biases_of(piece.step) for piece in pieces):
            return None
        bias = self.a.program.value(self.a.steps[number].inputs[min(mine)][1])
        return bias.double() if bias.dim() == 1 else None

    def bias_behind(self, number: int) -> int | None:
        """The call by which A adds behind a product the bias that B's product adds within."""
        pieces = self.by_weight.get(number, []) if self._is_product(number) else []
        first = self._chains(number, pieces[0].step, pieces[0])[0][0] if pieces else number
        theirs = [self.b.program.value(each.step.inputs[at][1]) for each in pieces for at in biases_of(each.step)]
        if first == number or not theirs:
            return None
        bias = torch.cat([each.reshape(-1) for each in theirs]).double().sort().values
        mine = (self.a.program.value(region).double().reshape(-1) for _, region in self.a.steps[first].inputs)
        return first if any(torch.equal(each.sort().values, bias) for each in mine) else None

    def _assembled(self, base: torch.Tensor, number: int, last: int) -> torch.Tensor | None:
        """B's output in A's layout, A's own where B has none; `last` is the last call of B's chain of one piece."""
        if not base.dim():
            return None
        pieces, width = self.by_weight[number], base.shape[-1]
        bias = self.unseen_bias(number)
        mine = biases_of(self.a.steps[number]) if len(pieces) > 1 else ()
        if mine and all(self._chains(number, each.step, each)[1][0] != each.step.number for each in pieces):
            bias = self.a.program.value(self.a.steps[number].inputs[min(mine)][1]).double()  # each adds its part behind
        bias = torch.zeros(width) if bias is None or len(bias) != width else bias
        own = base.reshape(-1, width)
        found, known = own.clone(), torch.zeros(own.shape, dtype=torch.bool)
        for piece in pieces:
            made = self.joints.made_by(self.b.steps[last] if len(pieces) == 1 else piece.step)
            if made is None:
                continue
            values = self.joints.values(made)
            n = piece.step.outputs[0].shape[-1] if piece.step.outputs[0] is not None else 0
            if int(piece.rows_a.max()) >= width or int(piece.rows_b.max()) >= n or values.numel() % n:
                continue
            rows_a, rows_b = torch.from_numpy(piece.rows_a), torch.from_numpy(piece.rows_b)
            if piece.tokens is not None:
                at, of = (torch.from_numpy(np.asarray(each)) for each in piece.tokens)
                rows = values.reshape(-1, n)
                if not len(at) or int(at.max()) >= len(own) or int(of.max()) >= len(rows):
                    continue
                found[at[:, None], rows_a[None]] = rows[of[:, None], rows_b[None]] + bias[rows_a]
                known[at[:, None], rows_a[None]] = True
            elif values.numel() // n == len(own):
                columns = values if values.shape[-1] == n else values.reshape(-1, n)
                chosen = columns[..., rows_b] + bias[rows_a]
                like = own[:, rows_a].reshape(*base.shape[:-1], len(rows_a))
                found[:, rows_a] = nearest(chosen, like, keep_last=True).reshape(len(own), -1)
                known[:, rows_a] = True
        return found.reshape(base.shape) if float(known.double().mean()) >= _KNOWN else None

    def _chains(self, number: int, other: Step, piece: _Piece | None = None) -> tuple[list[int], list[int]]:
        """What follows a product of A and one of B, from where both have added a bias, or neither has."""
        steps = self.a.steps[number], other
        chains = [self._chain(flow, step.number) for flow, step in zip((self.a, self.b), steps, strict=True)]
        mine, theirs = (
            [flow.program.value(step.inputs[place][1]) for place in biases_of(step)]
            for flow, step in zip((self.a, self.b), steps, strict=True)
        )
        for flow, chain, known in ((self.a, chains[0], theirs), (self.b, chains[1], mine)):
            if len(mine) + len(theirs) == 1 == len(known):
                bias = known[0].reshape(-1)
                if piece is not None and known is mine and len(piece.rows_a) < len(bias):  # B has a part of it
                    bias = bias[piece.rows_a[np.argsort(piece.rows_b)]]
                chain[:] = self._from_bias(flow, chain, bias)
        return chains[0], chains[1]

    def _from_bias(self, flow: Flow, chain: list[int], bias: torch.Tensor) -> list[int]:
        """The part of a chain from the next call on, if that adds such a bias."""
        for user, place in flow.users[chain[0]]:
            step = flow.steps[user]
            rest = [region for at, (_, region) in enumerate(step.inputs) if at != place]
            if step.operator == "add" and len(rest) == 1 and math.prod(rest[0].shape) == bias.numel() < _size(step):
                own = flow.program.value(rest[0])
                if rest[0].weight or torch.equal(own.double().reshape(-1), bias.double().reshape(-1)):
                    return chain[chain.index(user) :] if user in chain else [user]
        return chain

    def _chain(self, flow: Flow, number: int) -> list[int]:
        """A product, and what is added to it or multiplied with: a bias, an adapter or a scale of its own."""
        lhs, phase = _lhs(flow.steps[number]), flow.steps[number].stored.record.phase
        found, size = [number], _size(flow.steps[number])
        while lhs is not None and len(found) < _LONGEST:
            users = {user for user, _ in flow.users[found[-1]] if flow.goes_into(user)}
            if len([user for user in users if flow.steps[user].stored.record.phase == phase]) > 1:
                break  # what follows needs the product itself, too, as the formula of an activation does
            following = (
                user
                for user, place in flow.users[found[-1]]
                if flow.steps[user].operator in _CHAIN
                and _size(flow.steps[user]) == size
                and all(
                    at == place
                    or not writers & flow.active
                    or (
                        math.prod(flow.steps[user].inputs[at][1].shape) < size
                        and not flow.before(writers & flow.active, range(number)) & {*found}  # as by its own norm
                    )
                    or all(m not in found and self._derives(flow, m, lhs.memory, found) for m in writers & flow.active)
                    for at, writers in enumerate(flow.writers[user])
                )
            )
            user = next(following, None)
            if user is None:
                break
            found.append(user)
        return found

    def _derives(self, flow: Flow, number: int, memory: int, stop: list[int], depth: int = 7) -> bool:
        """Whether a call's output comes from a tensor, from weights beside it, and from nothing else."""
        step = flow.steps[number]
        if not depth or step.operator not in _PRODUCTS | _CHAIN:
            return False
        hit = False
        for place, writers in enumerate(flow.writers[number]):
            if step.inputs[place][1].memory == memory:
                hit = True
                continue
            if step.inputs[place][1].weight:
                continue
            for writer in writers & flow.active:
                if writer in stop or not self._derives(flow, writer, memory, stop, depth - 1):
                    return False
                hit = True
        return hit


def updates(step: Step) -> bool:
    """Whether a call writes to a weight."""
    return any(step.inputs[place][1].weight for place in step.written)


def line_of(step: Step) -> tuple[str, str | None, str | None]:
    """What the calls of a line have in common, in each step."""
    record = step.stored.record
    return record.op, record.module, record.source


def _by_line(steps: Iterable[Step]) -> dict[Any, list[Step]]:
    groups: dict[Any, list[Step]] = defaultdict(list)
    for step in steps:
        groups[line_of(step)].append(step)
    return groups


def _reads(step: Step, name: str, region: Region) -> bool:
    """Whether a call reads the same values under a name."""
    own = dict(step.inputs).get(name)
    return own is not None and own.name == region.name


def _by_token(values: torch.Tensor, attention: bool) -> torch.Tensor:
    """The values with a row for each token: of an attention's `[batch, heads, tokens, size]`, with all heads."""
    rows = values.transpose(-3, -2) if attention and values.dim() > 2 else values
    return rows.reshape(-1, math.prod(rows.shape[-2:]) if attention else rows.shape[-1])


def _from_tokens(rows: torch.Tensor, shape: torch.Size, attention: bool) -> torch.Tensor:
    """The inverse."""
    if not attention or len(shape) < 3:
        return rows.reshape(shape)
    *batch, heads, tokens, size = shape
    return rows.reshape(*batch, tokens, heads, size).transpose(-3, -2)


def nearest(
    values: torch.Tensor, like: torch.Tensor, *, keep_last: bool = False, share: Share | None = None
) -> torch.Tensor:
    """Values in the shape of others, `float64`: in their own order, unless they are far nearer in another one."""
    if share is not None and values.numel() != like.numel():
        parts = {dim: nearest(values, share.part(like, dim)) for dim in share.dims(like.shape)}
        dim = min(parts, key=lambda each: apart(parts[each], share.part(like, each)))
        return share.put(like, parts[dim], dim)
    own, shape = tuple(values.shape), tuple(like.shape)
    if keep_last and own[-1:] == shape[-1:]:
        width = own[-1]
        leading = layouts(own[:-1], shape[:-1])
        found = [Layout((*sizes, width), (*(each * width for each in strides), 1)) for sizes, strides in leading]
    else:
        found = [*layouts(own, shape)]
    theirs, mine = unmasked(values), unmasked(like).reshape(-1)
    places = torch.arange(len(mine))
    if len(mine) > _SAMPLED:
        places = torch.randint(len(mine), (_SAMPLED,), generator=torch.Generator().manual_seed(0))
    mine = mine[places]
    if float((found[0].at(theirs, places) - mine).square().sum()) < _ALIKE * float(mine.square().sum()):
        return values.reshape(shape)
    far = [float((layout.at(theirs, places) - mine).square().sum()) for layout in found]
    best = min(range(len(found)), key=far.__getitem__)
    return found[best if far[best] < _CLEARLY * far[0] else 0].laid(values, shape)


def _channels_as(step: Step, other: Step, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What B's convolution makes with its channels last, if A multiplies by a matrix, or the other way round."""
    convolves = [each.operator == "convolution" for each in (step, other)]
    if convolves == [False, True] and values.shape[1] == like.shape[-1]:
        return values.movedim(1, -1)
    if convolves == [True, False] and values.shape[-1] == like.shape[1]:
        return values.reshape(like.movedim(1, -1).shape).movedim(-1, 1)
    return values


def weight_place(step: Step) -> int | None:
    """The place of the weight among the inputs of a product."""
    names = ("weight", "mat2", "other")
    return next((at for at, (name, region) in enumerate(step.inputs) if name in names and len(region.shape) == 2), None)


def _as_rows(step: Step, weight: torch.Tensor) -> torch.Tensor:
    """A weight with a row for each column of the output."""
    return (weight if step.operator == "linear" else weight.mT).double()


def _lhs(step: Step) -> Region | None:
    """Where the left operand of a product lies."""
    name = "input" if step.operator == "linear" else "mat1" if step.operator == "addmm" else "self"
    return dict(step.inputs).get(name)


def _likeness(step: Step) -> tuple[str, str | None, int]:
    """What calls have in common that may belong to each other."""
    return step.operator, module_name(step.stored.record.module), _size(step)


def _results(flow: Flow, ends: list[int]) -> Iterable[list[int]]:
    """The results among some, of which those are one that fill a memory part by part, in the order of the parts."""
    memories: dict[Any, dict[int, int]] = defaultdict(dict)
    for number in ends:
        if (region := flow.steps[number].outputs[0]) is not None and region.name is not None:
            memories[region.memory, region.shape, region.stride][region.offset] = number
    return [[parts[offset] for offset in sorted(parts)] for parts in memories.values()]


def _size(step: Step) -> int:
    region = step.outputs[0] if step.outputs else None
    return math.prod(region.shape) if region is not None else -1
