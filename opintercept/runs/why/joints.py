"""`Joints`: finds tensors of A among those of B by their values, however they are laid out there.

Invariant: what is found agrees with A's values to rounding. Constants, 0 and 1 are never found: anything has them.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from opintercept._values import rounding
from opintercept._values.stats import Values
from opintercept.runs.program.program import Program, Region, Step, contiguous
from opintercept.runs.store.codec import role_of
from opintercept.runs.why.flow import is_real
from opintercept.runs.why.layouts import Layout, Share, layouts
from opintercept.runs.why.noise import LIMIT, Spread, apart, unmasked

_WIDE = 8  # numbers of a row by which it is found alone
_MOST = 1 << 26  # numbers in the rows of one width that are looked through
_PIECE = 1 << 20  # numbers that are compared at once
_NEAR = 64  # rows with a projection like that of a row of A that are compared with it
_CACHED = 1 << 22  # numbers of B's tensors that are kept in memory


class Tensor:
    """A tensor of B.

    Attributes:
        region: Where it lies, and the name of its values.
        makers: The places of the calls that make these values.
        dtype: The dtype that it is stored in.
        unit: The unit roundoff of that.
    """

    __slots__ = ("_bag", "_moments", "dtype", "makers", "region", "unit")

    def __init__(self, region: Region, dtype: torch.dtype) -> None:
        self.region, self.dtype, self.unit = region, dtype, rounding.unit(dtype)
        self.makers: list[int] = []
        self._moments: tuple[float, float, bool] | None = None
        self._bag: int | None = None

    def moments(self, joints: Joints) -> tuple[float, float, bool]:
        """The sum and the norm of the numbers that are finite, and whether all are the same."""
        if self._moments is None:
            values = joints.values(self)
            flat = unmasked(values).reshape(-1)
            self._moments = float(flat.sum()), float(flat.norm()), is_trivial(values)
        return self._moments

    def bag(self, joints: Joints) -> int:
        """A number that is the same for the same numbers in any order."""
        if self._bag is None:
            self._bag = _bag(joints.values(self))
        return self._bag


@dataclass(frozen=True, slots=True)
class Joint:
    """A tensor of A that B has, too.

    Attributes:
        tensor: B's tensor, or the first of those that have its rows.
        given: B's values in A's layout, `float64`; or what reads them when they are asked for.
        whole: Whether one tensor of B has all of it, and no more.
        others: The other tensors that have its rows.
        pieces: Whether these tensors have nothing but its rows.
    """

    tensor: Tensor
    given: torch.Tensor | Callable[[], torch.Tensor]
    whole: bool = True
    others: tuple[Tensor, ...] = ()
    pieces: bool = False

    @property
    def makers(self) -> set[int]:
        """The places of the calls of B that make it."""
        return {maker for each in (self.tensor, *self.others) for maker in each.makers}

    @property
    def values(self) -> torch.Tensor:
        """B's values in A's layout, `float64`."""
        return self.given if isinstance(self.given, torch.Tensor) else self.given()


class Joints:
    """The real tensors that a program reads and makes.

    Args:
        program: B's program.
        steps: Its calls.
        share: The samples of A that B computes; None for all.
    """

    def __init__(self, program: Program, steps: list[Step], share: Share | None = None) -> None:
        self.program, self.share = program, share
        self._by_name: dict[str, Tensor] = {}
        self._by_size: dict[int, list[Tensor]] = defaultdict(list)
        self._by_content: dict[tuple[str, str], Tensor] = {}
        self._bits: set[tuple[str, str]] = set()
        self._rows: dict[int, _Rows | None] = {}
        self._parts: dict[str, list[Region]] = {}
        self._cache: dict[str, torch.Tensor] = {}
        self._cached = 0
        for step in steps:
            for name, own in step.inputs:
                self._add(own, step.stored.values.get(name))
            for place, region in enumerate(step.outputs):
                found = None if region is None else self._add(region, step.stored.values.get(role_of(place)))
                if found is not None:
                    found.makers.append(step.number)

    def _add(self, region: Region, values: Values | None) -> Tensor | None:
        if region.name is None or not math.prod(region.shape):
            return None
        kind = self.program.dtype(region)
        self._bits.add((content_of(region.name), kind))
        if not is_real(self.program, region):
            return None
        found = self._by_name.get(region.name)
        if found is None:
            found = self._by_name[region.name] = Tensor(region, DTYPES.get(kind, torch.float32))
            self._by_size[math.prod(region.shape)].append(found)
            if values is None or values.min is None or values.min != values.max:
                self._by_content.setdefault((content_of(region.name), kind), found)
        return found

    def add_parts(self, steps: list[Step]) -> Tensor:
        """The tensor that calls fill part by part, and that no call reads; of one call, what it makes."""
        parts = [region for step in steps if (region := step.outputs[0]) is not None]
        made = self._by_name[str(parts[0].name)]
        if len(parts) == 1:
            return made
        name, shape = f"parts of {parts[0].memory} from {made.region.name}", (len(parts), *parts[0].shape)
        self._parts[name] = parts
        whole = self._by_name[name] = Tensor(Region(name, shape, -1, 0, contiguous(shape)), made.dtype)
        whole.makers = [step.number for step in steps]
        self._by_size[math.prod(shape)].append(whole)
        return whole

    def of(self, region: Region | None) -> Tensor | None:
        """B's tensor of a region."""
        return None if region is None or region.name is None else self._by_name.get(region.name)

    def of_shape(self, shape: tuple[int, ...]) -> list[Tensor]:
        """B's tensors of a shape that no call makes."""
        return [each for each in self._by_size[math.prod(shape)] if each.region.shape == shape and not each.makers]

    def made_by(self, step: Step) -> Tensor | None:
        """The first output of a call of B."""
        return self.of(step.outputs[0]) if step.outputs else None

    def values(self, tensor: Tensor) -> torch.Tensor:
        """Its values, `float64` in its own shape."""
        name = tensor.region.name
        assert name is not None
        if name not in self._cache:
            parts = [self.program.value(each).double() for each in self._parts.get(name, (tensor.region,))]
            read = torch.stack(parts) if len(parts) > 1 else parts[0]
            if self._cached + read.numel() > _CACHED:
                self._cache.clear()
                self._cached = 0
            if read.numel() > _CACHED:
                return read
            self._cache[name] = read
            self._cached += read.numel()
        return self._cache[name]

    def exact(self, program: Program, region: Region) -> Joint | None:
        """The tensor of B with the same bits as a recorded tensor of A, in the same order."""
        if region.name is None:
            return None
        found = self._by_content.get((content_of(region.name), program.dtype(region)))
        if found is None or math.prod(found.region.shape) != math.prod(region.shape):
            return None
        return None if math.prod(region.shape) == 1 and found.moments(self)[2] else self._laid(found, region.shape)

    def _laid(self, tensor: Tensor, shape: tuple[int, ...], layout: Layout | None = None) -> Joint:
        """A tensor in another shape, in its own order without a layout."""

        def read() -> torch.Tensor:
            values = self.values(tensor)
            return values.reshape(shape) if layout is None else layout.laid(values, shape)

        return Joint(tensor, read)

    def has_bits(self, program: Program, region: Region) -> bool:
        """Whether B has a tensor with the same bits, were it a constant, or one of whole numbers."""
        return region.name is not None and (content_of(region.name), program.dtype(region)) in self._bits

    def has_noise(self, spread: Spread) -> bool:
        """Whether values of A are nothing but rounding, as the gradient of the bias of keys, and B makes such, too."""
        return any(
            not spread.tells(each.unit)
            and spread.ratio(self.values(each).reshape(spread.base.shape), each.unit) <= LIMIT
            for each in self._by_size[spread.base.numel()]
            if each.makers and not each.moments(self)[2]
        )

    def find(self, spread: Spread, *, by_rows: bool = True) -> Joint | None:
        """The tensor of B with the values of A, or those of the samples that B computes, to rounding."""
        found = self._find(spread) or (self._find_rows(spread) if by_rows else None)
        if found is None and by_rows and spread.base.dim() > 2:  # of the channels, as where B computes step by step
            rows = self._find_rows(spread.part(lambda x: x.movedim(1, -1)))
            found = rows and Joint(rows.tensor, rows.values.movedim(-1, 1), False, rows.others)
        if found is None and (share := self.share) is not None:
            for dim in share.dims(spread.base.shape):
                own = spread.part(functools.partial(share.part, dim=dim))
                part = self._find(own) or (self._find_rows(own) if by_rows else None)
                if part is not None:
                    return replace(part, given=share.put(spread.base, part.values, dim))
        return found

    def mostly(self, spread: Spread, without: Container[Tensor]) -> Joint | None:
        """The tensor of B that has most of A's rows in their places, where both choose, and not always alike."""
        base = spread.base
        if base.dim() < 2 or is_trivial(base):
            return None
        x = base.reshape(-1, base.shape[-1])
        told = ~(x == x[:, :1]).all(1)  # anything may have rows of zeros
        best: tuple[int, Tensor] | None = None
        for tensor in self._by_size[base.numel()]:
            if tensor.region.shape[-1:] == base.shape[-1:] and tensor not in without:
                y, noise = self.values(tensor).reshape(x.shape), spread.rows(tensor.unit).reshape(-1)
                near = (x - y).square().mean(1).sqrt() <= LIMIT * noise
                count, most = int(near.sum()), 2 * int((near & told).sum()) > int(told.sum())
                best = (count, tensor) if most and (best is None or count > best[0]) else best
        return None if best is None else self._laid(best[1], base.shape)

    def _find(self, spread: Spread) -> Joint | None:
        """The tensor of B with these values in some layout, of several the nearest."""
        base = spread.base
        if is_trivial(base) or not base.numel():
            return None
        flat = unmasked(base).reshape(-1)
        total, norm, count = float(flat.sum()), float(flat.norm()), flat.numel()
        best: tuple[float, Joint] | None = None
        fars: dict[float, float] = {}  # how far norms may be apart, by the unit roundoff
        for tensor in self._by_size[count]:
            if (far := fars.get(tensor.unit)) is None:
                told = spread.tells(tensor.unit)
                far = fars[tensor.unit] = LIMIT * spread.usual(tensor.unit) * math.sqrt(count) if told else -1.0
            if far < 0:
                continue
            sums, norms, trivial = tensor.moments(self)
            if trivial or abs(norms - norm) > far or abs(sums - total) > far * math.sqrt(count):
                continue
            own = self.values(tensor)
            for layout in layouts(tensor.region.shape, tuple(base.shape)):
                if spread.misses(own, layout, tensor.unit):
                    continue
                values = layout.laid(own, base.shape)
                if spread.ratio(values, tensor.unit) <= LIMIT:
                    distance = apart(base, values)
                    if best is None or distance < best[0]:
                        best = distance, self._laid(tensor, base.shape, layout)
                    break
            if best is not None and best[0] == 0:
                break
        return None if best is None else best[1]

    def _find_rows(self, spread: Spread) -> Joint | None:
        """Each row of A in some tensor of B, as where B computes in pieces."""
        base = spread.base
        width = _width(base.shape)
        if not width or is_trivial(base):
            return None
        if width not in self._rows:
            self._rows[width] = self._rows_of(width)
        table, x = self._rows[width], base.reshape(-1, width)
        # What is too narrow for rows is no row itself: a few other numbers would be lost in it.
        if table is None or (len(x) == 1 and width != base.shape[-1]) or not bool(x.isfinite().all()):
            return None
        narrow = spread.rows(table.unit).expand(*base.shape[:-1], 1).reshape(len(x), -1)
        noise = narrow.square().mean(1).sqrt()
        if bool((noise > 0.2 * x.std(1).clamp_min(1e-300)).any()):
            return None
        return table.find(self, x, noise, base.shape)

    def _rows_of(self, width: int) -> _Rows | None:
        wide = [
            each
            for each in self._by_name.values()
            if (len(each.region.shape) > 1 or each.makers) and width in _widths(each.region.shape)
            if not each.region.weight
            if not each.moments(self)[2]
        ]
        size = sum(math.prod(each.region.shape) for each in wide)
        return _Rows(self, wide, width) if wide and size <= _MOST else None


class _Rows:
    """The rows of one width, by their projections on a random direction."""

    def __init__(self, joints: Joints, tensors: list[Tensor], width: int) -> None:
        direction = torch.randn(width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self._direction = direction / direction.norm()
        self._tensors = tensors
        self.unit = max(each.unit for each in tensors)
        projections, which, rows = [], [], []
        for number, each in enumerate(tensors):
            values = joints.values(each).reshape(-1, width) @ self._direction
            projections.append(values.nan_to_num(math.inf, math.inf, math.inf))
            which.append(torch.full((len(values),), number))
            rows.append(torch.arange(len(values)))
        found = torch.cat(projections)
        order = found.argsort()
        self._projections, self._which, self._row = found[order], torch.cat(which)[order], torch.cat(rows)[order]

    def find(self, joints: Joints, x: torch.Tensor, noise: torch.Tensor, shape: torch.Size) -> Joint | None:
        width = x.shape[1]
        projections, far = x @ self._direction, 1.5 * LIMIT * noise * math.sqrt(width)
        low = torch.searchsorted(self._projections, projections - far)
        counts = (torch.searchsorted(self._projections, projections + far) - low).clamp_max(_NEAR)
        if not bool(counts.all()):
            return None
        often = self._which[_spans(low, counts)[1]].bincount(minlength=len(self._tensors))
        found, used = list[torch.Tensor](), dict[int, None]()
        step = max(1, _PIECE // (_NEAR * width))
        for own, moved, start, count in zip(*(each.split(step) for each in (x, noise, low, counts)), strict=True):
            row, at = _spans(start, count)
            which, values = self._which[at], x.new_empty((len(at), width))
            for number in which.unique().tolist():
                here = which == number
                values[here] = joints.values(self._tensors[number]).reshape(-1, width)[self._row[at[here]]]
            distance = (values - own[row]).square().mean(1).sqrt() / moved[row]
            # Of equal rows, that of the tensor with the most: others may have a row by chance.
            order = np.lexsort((-often[which].numpy(), distance.numpy(), row.numpy()))
            best = torch.from_numpy(order)[count.cumsum(0) - count]
            if not bool((distance[best] <= LIMIT).all()):
                return None
            found.append(values[best])
            used |= dict.fromkeys(which[best].tolist())
        first, *others = (self._tensors[number] for number in used)
        pieces = sum(math.prod(each.region.shape) for each in (first, *others)) == x.numel()
        return Joint(first, torch.cat(found).reshape(shape), False, tuple(others), pieces)


def _spans(starts: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of each span, for each of its places, and these places."""
    numbers = torch.repeat_interleave(counts)
    return numbers, torch.arange(len(numbers)) + (starts - counts.cumsum(0) + counts)[numbers]


def is_trivial(values: torch.Tensor) -> bool:
    """Whether anything may have these values: 0, 1, -1, or one number everywhere."""
    flat = values.reshape(-1)
    if len(flat) == 1:
        return abs(float(flat[0])) in (0.0, 1.0) or not bool(flat.isfinite())
    return bool((flat == flat[:1]).all()) if len(flat) else True


def _width(shape: Sequence[int]) -> int:
    """How many numbers at the end of a shape count as a row; 0 for too few."""
    return next((size for size in _widths(shape) if size >= _WIDE), 0)


def _widths(shape: Sequence[int]) -> Iterable[int]:
    """How many numbers at the end of a shape may be a row: those of its last dimensions, as of the heads of a token."""
    return itertools.accumulate(reversed(shape), operator.mul)


def content_of(name: str) -> str:
    """The hash of a recorded tensor's content, which its name has."""
    return name.rpartition("/")[2].partition("-")[0]


def _bag(values: torch.Tensor) -> int:
    bits = (values.reshape(-1) + 0.0).view(torch.int64)
    mixed = (bits ^ (bits >> 31)) * 0x2545F4914F6CDD1D
    return int(((mixed ^ (mixed >> 29)) * 0x5851F42D4C957F2D).sum()) ^ values.numel()


DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
"""The dtypes of real numbers, by the names that safetensors has for them."""
