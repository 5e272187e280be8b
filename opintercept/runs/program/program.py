"""`Program`: the calls of a run, which can be computed again, in float64 and with other values.

Invariant: anyone may have written the run. `again` runs its calls, what they make is as large as what was recorded, and
the memory of the program is not far larger than what the run holds.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from opintercept._core.errors import OpInterceptError
from opintercept._ops import scratch
from opintercept._ops.families import makes_values
from opintercept.runs.program import again
from opintercept.runs.program.names import operator_name
from opintercept.runs.program.unfused import Unfused
from opintercept.runs.store.codec import StoredCall, role_of
from opintercept.runs.store.run import Run

_ROOM = 1 << 24  # elements of memory that a program may use, however few were recorded
_FOLD = 16  # how many times as many it may use as were recorded


class Region(NamedTuple):
    """Where a tensor lies in memory."""

    name: str | None  # of its recorded values; None for an output that was not kept
    shape: tuple[int, ...]
    memory: int
    offset: int
    stride: tuple[int, ...]
    weight: bool = False  # whether it is the memory of a parameter

    @property
    def end(self) -> int:
        """The number of elements up to its last one."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return self.offset + last + 1 if math.prod(self.shape) else self.offset

    @property
    def once(self) -> Region:
        """The region with each element once: a dimension that repeats the others has one element."""
        sizes = zip(self.shape, self.stride, strict=True)
        return self._replace(shape=tuple(1 if step == 0 and size else size for size, step in sizes))


class Leaf(NamedTuple):
    """Stands for a tensor among the arguments of a call: its place in `Step.inputs`."""

    place: int


@dataclass(slots=True)
class Step:
    """One call of a program.

    Attributes:
        number: Its place in the program.
        stored: The recorded call.
        called: What is called to compute it again; None if it is not computed again, since it is not on the list of
            operators that may be, draws random numbers or has arguments that were not recorded. What was recorded
            stands for its result.
        arguments: Those that it was given, by name, with a `Leaf` for each tensor.
        inputs: The tensors that it reads, by the names of its parameters.
        outputs: What it returns; None for what is no tensor.
        written: The places among the inputs that it writes to.
        reads: The places of those that it reads.
        computes: Whether its outputs have values of their own: they are no views of known memory.
        refused: Whether it is not computed again because its operator is not on the list.
        is_random: Whether it draws random numbers.
        fits: Whether the operator is known to make outputs of the recorded size.
        pairs: The places among the inputs of complex numbers, which are pairs of real ones in a program.
    """

    number: int
    stored: StoredCall
    called: again.Operator | None
    arguments: dict[str, Any]
    inputs: list[tuple[str, Region]]
    outputs: list[Region | None]
    written: frozenset[int]
    reads: frozenset[int]
    computes: bool
    refused: bool = False
    is_random: bool = False
    fits: bool = False
    pairs: frozenset[int] = frozenset()

    @property
    def operator(self) -> str:
        """The operator's own name, `"mm"`."""
        return operator_name(self.stored.record.op)

    @property
    def overload(self) -> Any:
        """The operator itself, if it is computed again."""
        return None if self.called is None else self.called.func

    @property
    def is_attention(self) -> bool:
        """Whether it is a fused attention, and not its backward pass."""
        return self.operator.startswith("_scaled_dot_product_") and not self.operator.endswith("_backward")

    def compute(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The outputs for these inputs; real numbers are computed in float64 if the inputs are.

        Raises:
            ValueError: The outputs would not be as large as the recorded ones.
            Exception: The operator fails.
        """
        inputs = [torch.view_as_complex(x.contiguous()) if at in self.pairs else x for at, x in enumerate(inputs)]
        called, arguments = self._given(inputs)
        if not self.fits:
            known = [math.prod(region.shape) for region in self.outputs if region is not None and region.name]
            again.check_size(called, (), arguments, again.room(inputs, known))
            self.fits = True
        made = again.run(called, (), arguments)
        outputs = list(made) if isinstance(made, (tuple, list)) else [made]
        outputs = outputs[:1] if called is _ATTENTION else outputs  # the others are not those of the fused operator
        found = [each if isinstance(each, torch.Tensor) else None for each in outputs]
        found = [torch.view_as_real(x.resolve_conj()) if x is not None and x.is_complex() else x for x in found]
        for each, region in zip(found, self.outputs, strict=False):
            if each is not None and region is not None and each.numel() != math.prod(region.shape):
                raise ValueError("an output must have the recorded size")
        return found

    def _given(self, inputs: Sequence[torch.Tensor]) -> tuple[again.Operator, dict[str, Any]]:
        """What is called, and its arguments by name."""
        given = [each.clone() if place in self.written else each for place, each in enumerate(inputs)]
        double = any(each.dtype in (torch.float64, torch.complex128) for each in given)
        if self.called is None:
            raise again.NotRunError(f"{self.operator} is not computed again")
        arguments = {name: _filled(item, given, double) for name, item in self.arguments.items()}
        if double and "half_to_float" in arguments:  # of a softmax, whose input is as wide as its output now
            arguments["half_to_float"] = False
        if self.is_attention:
            return _ATTENTION, _attention(arguments)
        return self.called, arguments


def _filled(item: Any, given: Sequence[torch.Tensor], double: bool) -> Any:
    """An argument with tensors in the place of leaves. A closure that calls itself would hold them in a cycle."""
    if isinstance(item, Leaf):
        return given[item.place]
    if isinstance(item, list):
        return [_filled(each, given, double) for each in item]
    return torch.float64 if double and isinstance(item, torch.dtype) and item.is_floating_point else item


_MATH = "_scaled_dot_product_attention_math"
_ATTENTION = again.operator_of(f"aten::{_MATH}", f"aten.{_MATH}.default")


def _attention(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an attention by operators that have derivatives for all of them, from those of a fused one."""
    query, key = given["query"], given["key"]
    return {
        **{"query": query, "key": key, "value": given["value"]},
        "attn_mask": given.get("attn_mask", given.get("attn_bias")),
        "is_causal": given.get("is_causal", False),
        "scale": given.get("scale"),
        "enable_gqa": query.dim() == 4 and query.shape[1] != key.shape[1],
    }


class Program:
    """The calls of one process of a run.

    Args:
        run: The run, recorded with `tensors="full"` and `ops="all"`.
        rank: The process.
        start: The first step that counts.

    Attributes:
        run: The run, recorded with `tensors="full"` and `ops="all"`.
        rank: The process.
        steps: Its calls that compute, in order: views are left out, since what they return lies in known memory.
        sizes: How many elements of each memory the calls use.
        root: The place of the call that made what `backward` began with; None without one.
        backward: The place of the first call after the first forward pass; None without one.
        roots: The places of the calls that make what each `backward` began with.
    """

    def __init__(self, run: Run, rank: int, start: int = 0) -> None:
        run.check_trusted()
        self.run, self.rank = run, rank
        self.steps: list[Step] = []
        self.sizes: dict[int, int] = {}
        self.root: int | None = None
        self.backward: int | None = None
        self.roots: list[int] = []
        self._held: dict[str, tuple[int, str]] = {}  # how many elements the recorded tensors have, and their dtypes
        last: Region | None = None
        begun = 0  # the place of the first call after that which made the last root
        self._pairs = True  # whether complex numbers are pairs of real ones: memory has others if some are lazy
        self._unfused = Unfused(run)
        for stored in (each for _, call in run.located(rank) for each in self._unfused.calls(call)):
            record = stored.record
            self._pairs &= record.op not in ("aten::_conj", "aten::_neg_view")
            if stored.error is not None or record.step < start:
                continue
            if record.phase != "forward":
                if self.root is None and last is not None:
                    self.root = self._maker(last)
                if self.backward is None:
                    self.backward = len(self.steps)
            read = _read(stored)
            if read is None:
                continue
            if record.op == "aten::ones_like" and read.inputs and not read.inputs[0][1].shape:
                last = read.inputs[0][1]  # autograd makes the gradient of the root like this
                begun = len(self.steps)
                if (root := self._maker(last)) is not None:
                    self.roots.append(root)
            if read.computes:
                read.number = len(self.steps)
                self.steps.append(read)
        if self.root is None and last is not None:  # only the forward calls were recorded
            self.root = self._maker(last)
            if any(step.inputs[place][1].weight for step in self.steps[begun:] for place in step.written):
                self.backward = begun  # an optimizer has stepped, whose gradients were not recorded
        if not self.steps:
            raise OpInterceptError(
                f"{str(run.path)!r} must have calls with all of their values; record it with "
                "`opintercept run --why` or with RunRecorder(folder, 'full') under ops=\"all\""
            )
        for step in self.steps:
            before = [region for _, region in step.inputs]
            step.inputs = [(name, self._place(region)) for name, region in step.inputs]
            step.outputs = [None if region is None else self._place(region) for region in step.outputs]
            step.pairs = frozenset(at for at, (_, region) in enumerate(step.inputs) if region is not before[at])
        recorded = (size for name, (size, _) in self._held.items() if self._unfused.kept(name) is None)
        used, held = sum(self.sizes.values()), sum(recorded)
        if used > max(_ROOM, _FOLD * held):
            raise OpInterceptError(
                f"the memory of a program must not be far larger than what was recorded of it, got {used:,} numbers in "
                f"{str(run.path)!r}, of which {held:,} were recorded"
            )

    def _place(self, region: Region) -> Region:
        """Where a tensor lies, for which there is room then; complex numbers lie there as pairs."""
        if region.name is not None:
            if region.name not in self._held:
                self._held[region.name] = self._unfused.kept(region.name) or self.run.kept(self.rank, region.name)
            size, dtype = self._held[region.name]
            if size != math.prod(region.shape):
                raise OpInterceptError(
                    f"a tensor must be as large as its recorded values, got the shape {region.shape!r:.80} for "
                    f"{size:,} numbers of {region.name!r}"
                )
            if dtype == "C64" and self._pairs:
                stride = (*(2 * step for step in region.stride), 1)
                region = region._replace(shape=(*region.shape, 2), offset=2 * region.offset, stride=stride)
        self.sizes[region.memory] = max(self.sizes.get(region.memory, 0), region.end)
        return region

    def _maker(self, region: Region) -> int | None:
        """The last call that wrote to a region."""
        made = (step.number for step in reversed(self.steps) for each in step.outputs if each and _is(each, region))
        return next(made, None)

    def refused(self) -> list[str]:
        """The operators that read tensors and are not on the list of those that may run again."""
        return [
            *dict.fromkeys(step.operator for step in self.steps if step.refused and step.reads and any(step.outputs))
        ]

    def dtype(self, region: Region) -> str:
        """The dtype of the recorded values, `"F32"`; empty if they were not kept."""
        found = "" if region.name is None else self._held[region.name][1]
        return "F32" if found == "C64" and self._pairs else found

    def has_record(self, step: Step) -> bool:
        """Whether all that a call reads was recorded, and a kernel keeps none of it in registers."""
        return all(region.name is None or self._unfused.kept(region.name) is None for _, region in step.inputs)

    def tensor(self, call: StoredCall, role: str) -> torch.Tensor | None:
        """As `Run.tensor`, also of what a kernel keeps in registers."""
        known = self._unfused.value(call.tensors.get(role, ""))
        return self.run.tensor(call, role) if known is None else known

    def value(self, region: Region) -> torch.Tensor:
        """The recorded values, in the region's shape."""
        if region.name is None:
            raise OpInterceptError(f"the values of a tensor were not kept in {str(self.run.path)!r}")
        found = self._unfused.value(region.name)
        found = self.run.load(self.rank, region.name) if found is None else found
        found = (torch.view_as_real(found) if found.is_complex() and self._pairs else found).reshape(region.shape)
        # Whoever keeps a part of a file in memory keeps all of it; real numbers are copied to float64 anyway.
        return found if found.is_floating_point() else found.clone()


def _is(one: Region, other: Region) -> bool:
    return one[2:4] == other[2:4] and math.prod(one.shape) == math.prod(other.shape)


def _read(stored: StoredCall) -> Step | None:
    """The step of a call; None if nothing was recorded of it, as of a view."""
    given, record = stored.given, stored.record
    if given is None or not isinstance(given.get("outputs"), list):
        return _opaque(stored)
    overload = again.overload_of(record.op, record.func) if record.op.startswith("aten::") else None
    parameters = [] if overload is None else list(overload._schema.arguments)
    inputs: list[tuple[str, Region]] = []
    names = [each.name for each in parameters] + [str(place) for place in range(len(parameters), len(given["args"]))]

    def leaf(plain: Mapping[str, Any], name: str) -> Leaf:
        inputs.append((name, _region(plain, plain["tensor"])))
        return Leaf(len(inputs) - 1)

    arguments = {
        name: again.argument(item, name, leaf, torch.device("cpu"))
        for name, item in (*zip(names, given["args"], strict=False), *given["kwargs"].items())
    }
    roles = [role_of(place) for place in range(len(given["outputs"]))]
    outputs = [
        None if each is None else _region(each, stored.tensors.get(role))
        for role, each in zip(roles, given["outputs"], strict=True)
    ]
    is_random = overload is not None and _is_random(overload, stored)
    called = None if overload is None or is_random else _listed(record.op, record.func)
    written = {each.name for each in parameters if each.alias_info is not None and each.alias_info.is_write}
    ignored = {each.name for each in parameters if each.is_out}
    ignored |= written if scratch.torchs_name(record.op) in scratch.OVERWRITES else set()
    places = [(place, name.partition("[")[0]) for place, (name, _) in enumerate(inputs)]
    return Step(
        number=0,
        stored=stored,
        called=called,
        arguments=arguments,
        inputs=inputs,
        outputs=outputs,
        written=frozenset(place for place, name in places if name in written),
        reads=frozenset(place for place, name in places if name not in ignored),
        computes=overload is None or makes_values(overload) or stored.record.op.startswith(scratch.COMMUNICATION),
        refused=called is None and not is_random,
        is_random=is_random,
    )


def _opaque(stored: StoredCall) -> Step | None:
    """A call whose arguments were not recorded, such as one with packed weights: nobody knows where its outputs lie."""
    record = stored.record
    regions: list[Region | None] = []
    for place, meta in enumerate(record.outputs):
        name = stored.tensors.get(role_of(place))
        memory = -100 * record.index - place - 1  # a number that no memory has
        known = name is not None and meta is not None
        regions.append(Region(name, meta.shape, memory, 0, contiguous(meta.shape)) if known and meta else None)
    nothing: frozenset[int] = frozenset()
    return Step(0, stored, None, {}, [], regions, nothing, nothing, True) if any(regions) else None


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose values lie one after the other."""
    return (*itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1),)[::-1] if shape else ()


def _region(plain: Mapping[str, Any], name: str | None) -> Region:
    match plain:
        case {"shape": list(shape), "memory": [int(memory), int(offset), list(stride), bool(weight)]}:
            numbers = (memory, offset, *shape, *stride)
            sound = len(shape) == len(stride) <= 64 and all(type(n) is int and 0 <= n < 1 << 40 for n in numbers)
            if sound:
                return Region(name, tuple(shape), memory, offset, tuple(stride), weight)
    raise OpInterceptError(
        "each tensor of a run must say where it lies in memory; record the run with this version of opintercept"
    )


def _listed(op: str, func: str) -> again.Operator | None:
    try:
        return again.operator_of(op, func)
    except again.NotRunError:
        return None


def _is_random(overload: Any, stored: StoredCall) -> bool:
    arguments = stored.arguments or {}
    return torch.Tag.nondeterministic_seeded in overload.tags and arguments.get("dropout_p") != 0


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor in float64; any other as it is."""
    return tensor.double() if tensor.is_floating_point() else tensor


class ProgramMemory:
    """The values of a program's memory while it runs, in float64: NaN where nothing has been written.

    Args:
        sizes: How many elements of each memory are used.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._sizes = sizes
        self._flat: dict[int, torch.Tensor] = {}
        self._shared: set[int] = set()  # memory that others have, too

    def has(self, memory: int) -> bool:
        """Whether anything has been written to a memory."""
        return memory in self._flat

    def read(self, region: Region) -> torch.Tensor:
        """A copy of the values of a region, `float64` of its shape."""
        if region.memory not in self._flat:
            return torch.full(region.shape, torch.nan, dtype=torch.float64)
        return self._flat[region.memory].as_strided(region.shape, region.stride, region.offset).clone()

    def write(self, region: Region, values: torch.Tensor) -> None:
        """Set the values of a region."""
        flat = self._memory(region)
        if is_dense(region.shape, region.stride):
            flat.as_strided(region.shape, region.stride, region.offset).copy_(values)
        else:
            flat[places_of(region)] = values.double().reshape(-1)

    def _memory(self, region: Region) -> torch.Tensor:
        flat = self._flat.get(region.memory)
        if flat is None:
            size = self._sizes[region.memory]
            flat = self._flat[region.memory] = torch.full((size,), torch.nan, dtype=torch.float64)
        elif region.memory in self._shared:
            flat = self._flat[region.memory] = flat.clone()
            self._shared.discard(region.memory)
        return flat

    def share(self, number: int, others: Iterable[ProgramMemory]) -> None:
        """Let other memories have one of this, until one of them writes to it."""
        for each in (self, *others):
            each._flat[number] = self._flat[number]
            each._shared.add(number)

    def has_that_of(self, other: ProgramMemory, number: int) -> bool:
        """Whether a memory is shared with another, or neither has it."""
        return self._flat.get(number) is other._flat.get(number)

    def forget(self, memory: Iterable[int]) -> None:
        """Let go of memory that no later call uses."""
        for number in memory:
            self._flat.pop(number, None)
            self._shared.discard(number)


@functools.lru_cache(1024)
def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether no two elements share memory, as far as that is plain."""
    end = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step < end:
            return False
        end += step * (size - 1)
    return True


def places_of(region: Region) -> torch.Tensor:
    """The places of a region's elements in its memory, `int64[numel]`."""
    found = torch.full((), region.offset)
    for size, step in zip(region.shape, region.stride, strict=True):
        found = found[..., None] + torch.arange(size) * step
    return found.reshape(-1)


def last_uses(steps: Iterable[Step]) -> dict[int, list[int]]:
    """The memory that no later call uses, by the place of the last call that does."""
    last: dict[int, int] = {}
    for step in steps:
        for region in (*(region for _, region in step.inputs), *filter(None, step.outputs)):
            last[region.memory] = step.number
    by_step: dict[int, list[int]] = {}
    for memory, number in last.items():
        by_step.setdefault(number, []).append(memory)
    return by_step
