"""Comparing two runs: where they first part, and which calls only pass on what they were given.

Invariant: nothing is claimed beyond what was recorded; memory is tens of bytes a call.
Imports torch only where both runs have tensors.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from opintercept._errors import OpInterceptError
from opintercept._record import CallRecord
from opintercept._tensors import TensorMeta
from opintercept.runs._align import (
    PAIRINGS,
    Ids,
    Index,
    Pairing,
    Pairs,
    first_models,
    metas,
    module_name,
    operator_name,
    outcome,
)
from opintercept.runs.codec import StoredCall, Values, is_output
from opintercept.runs.store import Run

if TYPE_CHECKING:
    import torch

Kind = Literal["equal", "added", "changed argument", "changed operand", "inherited", "unclear", "not compared"]
By = Literal["hash", "tensors", "sample", "statistics", "metadata"]
KINDS: tuple[Kind, ...] = (
    *("equal", "added", "changed argument", "changed operand", "inherited", "unclear", "not compared"),
)
_SAME = ("equal", "not compared")
_Reader = Callable[[int], StoredCall]

# Operators whose operands are all recorded by runs of 0.1, which kept no masks, no scales and no states.
_COMPLETE = {"mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"}
_COMPLETE |= {"linear", "matmul", "inner", "tensordot", "__matmul__", "__rmatmul__", "__imatmul__"}
_OPERANDS = ("lhs", "rhs", "bias", "value")
_KNOWN = ("lhs", "rhs", "bias")  # whose looks are recorded, whatever is kept of values
# What these hold is random, and says nothing where no random numbers were asked for.
_SEEDS = {"philox_seed", "philox_offset", "rng_state", "unused"}
_CHANCES = ("dropout_p", "dropout")
# What a run on another device, or of another dtype, has to differ in.
_DTYPES = ("dtype", "out_dtype")
# Stands for an argument that is a tensor without values, or that has no plain form.
UNTOLD = "(not recorded)"
# Statistics are sums in floating point, whose last digits depend on the order in memory.
_NOISE = 1e-6
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class RoleDifference:
    """One operand or output of two calls.

    Attributes:
        role: `"lhs"`, `"rhs"`, `"bias"`, `"value"` (of an attention), `"output"`, `"output.1"`, ..., or the name of
            a parameter: `"attn_mask"`, `"weights[0]"`.
        equal: Whether it is the same in both runs, within the tolerance if there is one; None where that cannot be
            told.
        by: What tells: `"hash"`, all values (`"tensors"`), some values (`"sample"`), `"statistics"`, or `"metadata"`:
            shape, dtype, or that only one of the calls has it. None where nothing does.
        a: Its shape and dtype in the first run, None where it has none; for `"value"` and other parameters, whose
            shape is not kept, in one dimension, and for those without a dtype.
        b: Those in the second.
        a_values: Statistics and hash in the first run.
        b_values: Those in the second.
        max_absolute: `max(abs(b - a))`; a lower bound of it where `by` is `"sample"` or `"statistics"`, as no
            mean, extremum or root of a mean square differs by more than the values do. Infinite where other
            elements are NaN or infinite, which the counts of these tell even where a sample has none. None if
            unknown, as for other shapes.
        relative: `max_absolute` over the largest finite modulus in the first run.
        max_relative: `max(abs(b - a) / abs(a))`, element by element; only from tensors and samples, as what follows.
        max_ulp: In units in the last place of the coarser dtype; see `hooks.reference.ReferenceRow`.
        cosine: Cosine similarity.
    """

    role: str
    equal: bool | None
    by: By | None
    a: TensorMeta | None
    b: TensorMeta | None
    a_values: Values | None
    b_values: Values | None
    max_absolute: float | None = None
    relative: float | None = None
    max_relative: float | None = None
    max_ulp: float | None = None
    cosine: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        for name in ("a", "b"):
            meta: TensorMeta | None = plain[name]
            plain[name] = meta and {"shape": list(meta.shape), "dtype": meta.dtype, "device": meta.device}
            values: Values | None = plain[f"{name}_values"]
            plain[f"{name}_values"] = values and values.as_dict()
        return plain


@dataclass(frozen=True, slots=True)
class CallDifference:
    """Two calls that were compared.

    Attributes:
        kind: `"equal"`; `"added"`, the operands are equal and the output differs; `"changed argument"`, an argument
            that is no tensor differs; `"changed operand"`, an operand differs that comes from no differing call
            before; `"inherited"`, an operand differs that can come from one; `"unclear"`, the recorded operands are
            equal and the output differs, but the operator draws random numbers, or has operands that the run of an
            older version did not record, or one call raised; `"not compared"`, nothing says whether the outputs are
            equal.
        pairing: How the two were found to belong together: the same module, operator and phase, and among those
            the same `"ordinal"`; or the same place in an aligned `"sequence"`; the same module and phase but another
            operator of the `"family"`; the same `"shape"` and order in a module of another name.
        changed: The operands that differ and come from no differing call before.
        arguments: The arguments that differ: name, first run's, second run's. `"(not recorded)"` stands for one that
            is a tensor whose values were not recorded, or has no plain form.
        a: The call of the first run.
        b: The call of the second run.
        roles: Operands and outputs.
    """

    kind: Kind
    pairing: Pairing
    changed: tuple[str, ...]
    arguments: tuple[tuple[str, Any, Any], ...]
    a: StoredCall
    b: StoredCall
    roles: tuple[RoleDifference, ...]

    @property
    def output(self) -> RoleDifference | None:
        """The output that differs most, or the first."""
        outputs = [role for role in self.roles if is_output(role.role)]
        return max(outputs, key=lambda role: _order(role.relative), default=None)

    @property
    def operands(self) -> tuple[RoleDifference, ...]:
        """The operands, and other tensors that are arguments."""
        return tuple(role for role in self.roles if not is_output(role.role))

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "kind": self.kind,
            "pairing": self.pairing,
            "changed": list(self.changed),
            "arguments": [list(argument) for argument in self.arguments],
            "a": _identity(self.a),
            "b": _identity(self.b),
            "roles": [role.as_dict() for role in self.roles],
        }


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """The calls of a module in one phase.

    Attributes:
        ranks: Of the first run and of the second.
        module: Its name in the first run; None where it is not known.
        other: Its name in the second.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        calls: How many have a counterpart.
        kinds: How many there are of each kind.
        relative: The largest `RoleDifference.relative` of an output; None where there is none.
        index: Number of the first call that differs, `CallRecord.index` of the first run.
    """

    ranks: tuple[int, int]
    module: str | None
    other: str | None
    phase: str
    calls: int
    kinds: dict[Kind, int]
    relative: float | None
    index: int

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Calls of one run that have no counterpart in the other and agree in everything up to `grad_of`.

    Attributes:
        run: `"a"` or `"b"`.
        rank: Of the process.
        module: Its name.
        op: The operator.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        grad_of: In backward the operand whose gradient is computed.
        calls: How many.
        index: Number of the first.
    """

    run: Literal["a", "b"]
    rank: int
    module: str | None
    op: str
    phase: str
    grad_of: str | None
    calls: int
    index: int

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Absent:
    """A process of which only one of the runs has calls.

    Attributes:
        run: The run that has none, `"a"` or `"b"`.
        rank: Of the process.
        empty: Whether that run has a folder of the process, without calls.
        calls: How many calls the other run has of it.
    """

    run: Literal["a", "b"]
    rank: int
    empty: bool
    calls: int

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Difference:
    """What `diff` found.

    Attributes:
        settings: What the runs say of themselves and do not agree in: name, first run's, second run's; flags first.
        ranks: The processes that were compared with one another.
        absent: The processes that were not, as one of the runs has no calls of them.
        calls: How many calls the first and the second run have in these.
        pairs: How many were compared.
        kinds: How many of these are of each kind.
        by: What told of how many that they are equal: `"hash"`, `"statistics"`, `"nothing"`; others by themselves.
        pairings: How many were paired in which way.
        metadata: How many differ in shape or dtype.
        first: The first differing call in the order of the first run, of several processes the one with the smallest
            step and index; None where all are equal.
        before: How many calls before it have no counterpart, in each run: what they did was not compared.
        worst: The calls with the largest `relative` of an output, largest first; without what `given` has.
        modules: The modules with a differing call, in the order in which they first differ.
        modules_in_all: How many there are of these, as `modules` is cut to `limit`.
        unmatched: What has no counterpart.
        unmatched_calls: How many calls that are, in each run.
    """

    settings: tuple[tuple[str, str, str], ...]
    ranks: tuple[tuple[int, int], ...]
    absent: tuple[Absent, ...]
    calls: tuple[int, int]
    pairs: int
    kinds: dict[Kind, int]
    by: dict[str, int]
    pairings: dict[Pairing, int]
    metadata: int
    first: CallDifference | None
    before: tuple[int, int]
    worst: tuple[CallDifference, ...]
    modules: tuple[ModuleDifference, ...]
    modules_in_all: int
    unmatched: tuple[Unmatched, ...]
    unmatched_calls: tuple[int, int]

    @property
    def equal(self) -> bool:
        """Whether no call differs, none is without a counterpart, and both runs have the same processes."""
        return self.first is None and not any(self.unmatched_calls) and not self.absent

    def as_dict(self) -> dict[str, Any]:
        """As plain data, with the floats as they are: infinite ones too."""
        plain: dict[str, Any] = {"equal": self.equal}
        plain |= {name: getattr(self, name) for name in self.__slots__}
        plain["first"] = self.first and self.first.as_dict()
        for name in ("absent", "worst", "modules", "unmatched"):
            plain[name] = [entry.as_dict() for entry in plain[name]]
        return plain


def diff(
    a: Run,
    b: Run,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    limit: int = 100,
    tensors: bool = True,
    select: Callable[[CallRecord], bool] | None = None,
) -> Difference:
    """Compare two runs call by call.

    Calls belong together that have the same module, operator, phase, `grad_of` and number among those; where that
    leaves some over, what is known of operands, steps and shapes decides, and modules that only one run knows are
    taken for those that make the same products in the same order, as `torch.compile` has all in one. Runs of
    several processes are compared rank by rank, and a rank that only one of them has makes them differ; of a run of
    one process and one of several, that process is compared with each of them.

    Which operands are changed and which are inherited: what lies between two products is not recorded, so an
    operand that differs can come from any differing call before it, and is `"inherited"`, unless one of four things
    rules that out. There is no differing call before it in its process; or only one of the two calls has it; or it
    requires a gradient in a run without a backward pass in which no left operand ever does, and so is a parameter; or
    it is bit for bit the same in each call of its module, of two or more, while the outputs of all modules that
    differed before it changed from call to call. An argument that is no tensor is always `"changed"`.

    Args:
        a: The run that the other is measured against; its order is the order of what is found.
        b: The other run.
        rtol: An operand or output counts as equal if `max(abs(b - a))` is at most `atol` and `rtol` times the largest
            modulus in `a`; then a dtype alone makes no difference. By statistics where there are no tensors.
        atol: See `rtol`.
        limit: Rows in `worst`, `modules` and `unmatched`.
        tensors: Whether to read the tensors of calls that differ, where both runs have them. Needs torch and
            safetensors.
        select: The calls that are reported; all are compared, so what is inherited does not depend on it.

    Raises:
        OpInterceptError: No selected call of the one has a counterpart in the other, although both have calls, or a
            run changed meanwhile.
        ValueError: A tolerance that is no number of at least 0, or a limit below 1.

    Example:
        >>> import tempfile, torch
        >>> from opintercept import intercept, runs
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with intercept(runs.RunRecorder(f"{folder}/a")):
        ...         _ = model(torch.ones(3, 4))
        ...     model[1].weight.data += 1
        ...     with intercept(runs.RunRecorder(f"{folder}/b")):
        ...         _ = model(torch.ones(3, 4))
        ...     found = runs.diff(runs.open_run(f"{folder}/a"), runs.open_run(f"{folder}/b"))
        >>> found.first.a.record.module, found.first.kind, found.first.changed
        ('1', 'changed operand', ('rhs',))
        >>> found.kinds
        {'equal': 1, 'changed operand': 1, 'inherited': 1}
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"limit must be a whole number of at least 1, got {limit!r}")
    return compared(a, b, Measure(a, b, rtol, atol, tensors), limit, limit, select)


def compared(
    a: Run,
    b: Run,
    measure: Measure,
    limit: int,
    worst: int,
    select: Callable[[CallRecord], bool] | None = None,
) -> Difference:
    """`diff` with a limit of its own for `worst`, whose calls can be large."""
    total = _Compared(measure, limit, worst, select)
    for rank_a, rank_b in _rank_pairs(a, b):
        total.add(a, rank_a, b, rank_b)
    if not total.pairs and (not total.absent or (select and not any(total.unmatched_calls))):
        raise OpInterceptError(
            f"two runs must have calls in common{' that are asked for' if select else ''}, got none: "
            f"{total.calls[0]} calls in {str(a.path)!r}, {total.calls[1]} in {str(b.path)!r}"
        )
    return total.result(_settings(a, b))


def _rank_pairs(a: Run, b: Run) -> list[tuple[int | None, int | None]]:
    if a.alone:
        return [(a.ranks[0], rank) for rank in b.ranks]
    if b.alone:
        return [(rank, b.ranks[0]) for rank in a.ranks]
    in_a, in_b = set(a.ranks), set(b.ranks)
    return [(rank if rank in in_a else None, rank if rank in in_b else None) for rank in sorted(in_a | in_b)]


def _settings(a: Run, b: Run) -> tuple[tuple[str, str, str], ...]:
    sides = []
    for info in (a.info, b.info):
        side = {f"flag {name}": value for name, value in info.flags.items()}
        side |= {f"version of {name}": value for name, value in info.versions.items()}
        side |= {"devices": ", ".join(info.devices), "argv": " ".join(info.argv), "tensors": info.tensors}
        sides.append(side | {"world size": str(info.world_size), "finished": str(info.finished).lower()})
    one, other = sides
    names = [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
    names.sort(key=lambda name: not name.startswith("flag "))
    return tuple((name, one.get(name, ""), other.get(name, "")) for name in names)


class Measure:
    """Compares two calls; keeps nothing of them."""

    def __init__(self, a: Run, b: Run, rtol: float = 0.0, atol: float = 0.0, tensors: bool = True) -> None:
        self._a, self._b = a, b
        self._rtol, self._atol = rtol, atol
        self._exact = not (rtol or atol)
        self._tensors = tensors

    def arguments(self, a: StoredCall, b: StoredCall) -> tuple[tuple[str, Any, Any], ...]:
        """The arguments that differ, of those that are no tensors."""
        one, other = a.arguments, b.arguments
        if one is None or other is None:
            return ()  # a run of 0.1 has none
        same = a.record.func == b.record.func
        found = []
        for name in dict.fromkeys((*one, *other)):
            if name == "device" or (name in _DTYPES and not self._exact):
                continue
            if name in one and name in other:
                x, y = one[name], other[name]
                # Another kernel for the same job may work out for itself what this one is given.
                if not self._alike(x, y) and (same or (x is not None and y is not None)):
                    found.append((name, x, y))
            elif same and one and other:
                x, y = one.get(name, UNTOLD), other.get(name, UNTOLD)
                without = b if name in one else a
                if (x is None or y is None) and not any(role.partition("[")[0] == name for role in metas(without)):
                    found.append((name, x, y))
        return tuple(found)

    def _alike(self, x: Any, y: Any) -> bool:
        numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (x, y))
        if numbers and not self._exact:
            return bool(abs(x - y) <= self._atol + self._rtol * abs(x))
        return bool(x == y)

    def roles(self, a: StoredCall, b: StoredCall) -> tuple[RoleDifference, ...]:
        """What the operands and outputs have in common."""
        metas_a, metas_b = metas(a), metas(b)
        same_operator = operator_name(a.record.op) == operator_name(b.record.op)
        found = []
        for role in metas_a | metas_b:
            one, other = metas_a.get(role), metas_b.get(role)
            if role in _SEEDS:
                continue
            if (one is None or other is None) and role not in _KNOWN and not is_output(role):
                # Its values may just not have been recorded.
                arguments = (a if one is None else b).arguments
                if arguments is None or role.partition("[")[0] not in arguments:
                    continue
            if role not in ("lhs", "rhs", "output") and (one is None or other is None) and not same_operator:
                continue  # mm and an addition for addmm, another kernel's logarithms of sums
            if role.startswith("output.") and one is not None and "int" in one.dtype:
                continue  # the seed and offset of an attention's dropout, where nobody asked for dropout
            found.append(self._role(role, one, other, a, b, same_operator))
        return tuple(found)

    def _role(
        self, role: str, one: TensorMeta | None, other: TensorMeta | None, a: StoredCall, b: StoredCall, same: bool
    ) -> RoleDifference:
        x, y = a.values.get(role), b.values.get(role)
        known = (role, one, other, x, y)
        if one is None or other is None:
            # An operand that one call does not have; the output of one that raised is not the call's doing.
            return _role(known, None if a.error or b.error else False, "metadata")
        if role == "output" and not same and (a.record.bias is None) != (b.record.bias is None):
            return _role(known, None, None)  # with and without the bias in it
        if not _as_one(one.shape, other.shape):
            if same or sorted(one.shape) != sorted(other.shape):
                return _role(known, False, "metadata")
        elif _same_hash(x, y) and one.dtype == other.dtype:
            return _role(known, True, "hash", 0.0, 0.0)
        if x is None or y is None:
            if self._exact and one.dtype != other.dtype:
                return _role(known, False, "metadata")
            return _role(known, None, None)
        hashed = x.hash is not None and y.hash is not None and _as_one(one.shape, other.shape)
        verdict: bool | None = False if self._exact and (one.dtype != other.dtype or hashed) else None
        figures = self._by_tensors(role, a, b, one, other)
        if figures is None:
            absolute, by = _by_statistics(x, y), "statistics"
            if absolute is None:
                return _role(known, verdict, "metadata" if verdict is False else None)
            figures = (absolute, None, None, None)
        elif (x.nan, x.inf) != (y.nan, y.inf) and x.count == y.count:
            figures, by = (math.inf, None, None, None), "statistics"  # the others are of what has no NaN
        else:
            by = "sample" if a.tensors[role].endswith(".sample") else "tensors"
            if by == "sample" and (bound := _by_statistics(x, y)) is not None:
                figures = (max(figures[0], bound), *figures[1:])
        absolute = figures[0]
        assert absolute is not None
        peak = _peak(x)
        relative = 0.0 if not absolute else absolute / peak if peak else math.inf
        if verdict is None:
            verdict = absolute <= self._atol + self._rtol * peak
        elif hashed and one.dtype == other.dtype:
            by = "hash" if by == "statistics" else by
        return _role(known, verdict, by, absolute, relative, *figures[1:])

    def _by_tensors(
        self, role: str, a: StoredCall, b: StoredCall, one: TensorMeta, other: TensorMeta
    ) -> tuple[float, float | None, float | None, float | None] | None:
        """Maximal absolute and relative error, ULP, cosine."""
        names = a.tensors.get(role), b.tensors.get(role)
        if not self._tensors or names[0] is None or names[1] is None or not _as_one(one.shape, other.shape):
            return None
        if names[0].endswith(".sample") != names[1].endswith(".sample"):
            return None  # the places of a sample are its writer's
        try:
            x, y = self._a.tensor(a, role, _MOST_BYTES), self._b.tensor(b, role, _MOST_BYTES)
        except OpInterceptError:
            return None  # lost, or not what the call says
        if x is None or y is None or x.numel() != y.numel() or not x.numel():
            return None
        return _figures(x, y)


def _role(
    known: tuple[str, TensorMeta | None, TensorMeta | None, Values | None, Values | None],
    equal: bool | None,
    by: Any,
    *figures: float | None,
) -> RoleDifference:
    role, a, b, x, y = known
    return RoleDifference(role, equal, by, a, b, x, y, *figures)


def _figures(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float | None, float | None, float | None] | None:
    import torch

    from opintercept.hooks.reference import Errors

    try:
        floating = all(t.is_floating_point() or t.is_complex() for t in (x, y))
        if not floating:
            x, y = x.to(torch.float64), y.to(torch.float64)
        elif x.is_complex() != y.is_complex():
            return None
        coarser = max(x.dtype, y.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        errors = Errors()
        errors.add(y, x, coarser)
    except (RuntimeError, TypeError):  # a dtype that cannot be widened
        return None
    return errors.absolute, errors.relative, errors.ulp if floating else None, errors.cosine


def _by_statistics(x: Values, y: Values) -> float | None:
    """A lower bound of the maximal absolute error."""
    if (x.nan, x.inf, x.count) != (y.nan, y.inf, y.count):
        return math.inf if x.count == y.count else None
    pairs = [(x.min, y.min), (x.max, y.max), (x.mean, y.mean), (x.rms, y.rms)]
    gaps = []
    for number, (one, other) in enumerate(pairs):
        if one is None or other is None:
            if (one is None) != (other is None):
                return None
            continue
        gap = abs(one - other)
        if number >= 2 and gap <= _NOISE * max(_peak(x), _peak(y)):
            gap = 0.0
        gaps.append(math.inf if math.isnan(gap) else gap)
    return max(gaps, default=0.0)


def _same_hash(x: Values | None, y: Values | None) -> bool:
    return x is not None and y is not None and x.hash is not None and (x.hash, x.count) == (y.hash, y.count)


def _peak(values: Values) -> float:
    ends = [abs(end) for end in (values.min, values.max) if end is not None and math.isfinite(end)]
    return max(ends, default=0.0)


def _as_one(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether the shapes are the same, but for leading dimensions that one of them has flattened."""
    return one == other or (math.prod(one) == math.prod(other) and one[-1:] == other[-1:] and min(one, default=0) >= 0)


def _order(relative: float | None) -> float:
    return -1.0 if relative is None or math.isnan(relative) else relative


# What is kept of each pair, two bytes: operands that differ, whether other tensors do and other arguments, whether the
# output does, whether that may come from operands that are not recorded, whether nothing is known of it, and whether a
# shape or a dtype differs.
_BITS = {role: 1 << place for place, role in enumerate(_OPERANDS)}
_OTHER, _ARGUMENT, _OUTPUT, _UNCLEAR, _BLANK, _METADATA = (1 << place for place in range(4, 10))
_OPERAND_BITS = _OTHER - 1 | _OTHER
_DIFFERS = _OPERAND_BITS | _ARGUMENT | _OUTPUT
_MOST_STEADY = 1 << 16


def _bit(role: str) -> int:
    return _BITS.get(role) or (_OUTPUT if is_output(role) else _OTHER)


def _is_random(call: StoredCall) -> bool:
    """Whether the call draws random numbers, of which nothing is recorded."""
    given = call.arguments or {}
    if given.get("train") is False or given.get("training") is False:
        return False
    names = ("p", *_CHANCES) if "dropout" in call.record.op else _CHANCES
    return any(isinstance(given.get(name), (int, float)) and given[name] > 0 for name in names)


class _Steady:
    """What the differing calls of one module with one other are: whether operands and outputs are always the same."""

    __slots__ = ("calls", "hashes", "outputs", "same", "varies")

    def __init__(self) -> None:
        self.calls = 0  # those that differ; others are added at the end
        self.hashes: dict[int, Any] = {}  # by operand, and of all other tensors together
        self.same: Counter[int] = Counter()
        self.outputs: tuple[str | None, str | None] | None = None
        self.varies = False

    def add(self, roles: tuple[RoleDifference, ...]) -> None:
        """Add a call that differs."""
        self.calls += 1
        others: list[Any] = []
        for role in roles:
            x, y = role.a_values, role.b_values
            if x is None or y is None or x.hash is None or y.hash is None:
                continue
            pair = (x.hash, y.hash)
            if role.role == "output":
                self.outputs = self.outputs or pair
                self.varies |= pair[0] != self.outputs[0] and pair[1] != self.outputs[1]
            elif role.equal is False and role.role in _BITS:
                self.same[_BITS[role.role]] += self.hashes.setdefault(_BITS[role.role], pair) == pair
            elif role.equal is False and not is_output(role.role):
                others += (role.role, *pair)
        if others:
            digest = hash(tuple(others))
            self.same[_OTHER] += self.hashes.setdefault(_OTHER, digest) == digest


class _Compared:
    """Compares the processes one after another and adds up what they give."""

    def __init__(
        self, measure: Measure, limit: int, worst_limit: int, select: Callable[[CallRecord], bool] | None
    ) -> None:
        self.measure = measure
        self.limit, self.worst_limit = limit, worst_limit
        self.calls, self.pairs, self.metadata = [0, 0], 0, 0
        self.kinds: Counter[Kind] = Counter()
        self.by: Counter[str] = Counter()
        self.pairings: Counter[Pairing] = Counter()
        self.ranks: list[tuple[int, int]] = []
        self.absent: list[Absent] = []
        self.first: CallDifference | None = None
        self.before = (0, 0)
        self.worst: list[tuple[float, CallDifference]] = []
        self.modules: list[tuple[tuple[int, int, int], ModuleDifference]] = []  # by the first call's place
        self.modules_in_all = 0
        self.unmatched: list[Unmatched] = []
        self.unmatched_calls = [0, 0]
        self._select = select

    def add(self, run_a: Run, rank_a: int | None, run_b: Run, rank_b: int | None) -> None:
        """Compare two processes, one of which its run may not have."""
        ids = Ids()
        a, b = Index(run_a, rank_a, ids, self._select), Index(run_b, rank_b, ids, self._select)
        if (models := first_models(a.names, b.names)) is not None:
            ids = Ids()
            a, b = (
                Index(run, rank, ids, self._select, model)
                for run, rank, model in zip((run_a, run_b), (rank_a, rank_b), models, strict=True)
            )
        self.calls[0] += len(a)
        self.calls[1] += len(b)
        if rank_a is not None and rank_b is not None:
            self.ranks.append((rank_a, rank_b))
            if len(a) and len(b):
                with run_a.reader(rank_a) as read_a, run_b.reader(rank_b) as read_b:
                    _Processes(self, a, b, read_a, read_b).compare((rank_a, rank_b))
                return
            if len(a) == len(b):
                return
        sides: Any = (("a", a, run_a, rank_a, rank_b), ("b", b, run_b, rank_b, rank_a))
        for side, index, run, rank, other in sides:
            if len(index):
                with run.reader(rank) as read:
                    self.add_unmatched(side, rank, index, array("q", [-1]) * len(index), read)
            else:
                empty = rank is not None
                self.absent.append(Absent(side, rank if empty else other, empty, max(len(a), len(b))))

    def add_unmatched(self, side: Any, rank: int, index: Index, paired: array[int], read: _Reader) -> None:
        """Add the calls of one process that have no counterpart."""
        groups: dict[int, list[int]] = {}
        for number, other in enumerate(paired):
            if other < 0 and index.chosen[number]:
                self.unmatched_calls[side == "b"] += 1
                key = index.key[number]
                if key in groups:
                    groups[key][0] += 1
                elif len(groups) + len(self.unmatched) < self.limit:
                    groups[key] = [1, number]
        for calls, number in groups.values():
            record = read(index.position[number]).record
            self.unmatched.append(
                Unmatched(side, rank, record.module, record.op, record.phase, record.grad_of, calls, record.index)
            )

    def add_rows(self, worst: list[tuple[float, CallDifference]], modules: list[Any]) -> None:
        """Add what one process has given, and keep as much of all as is asked for."""
        self.worst = heapq.nlargest(self.worst_limit, [*self.worst, *worst], key=lambda entry: entry[0])
        if self.modules:
            modules = sorted([*self.modules, *modules], key=lambda entry: entry[0])
        self.modules = modules[: self.limit]

    def result(self, settings: tuple[tuple[str, str, str], ...]) -> Difference:
        """What was found."""
        return Difference(
            settings,
            tuple(self.ranks),
            tuple(self.absent),
            (self.calls[0], self.calls[1]),
            self.pairs,
            {kind: self.kinds[kind] for kind in KINDS if self.kinds[kind]},
            dict(self.by),
            {how: self.pairings[how] for how in PAIRINGS if self.pairings[how]},
            self.metadata,
            self.first,
            self.before,
            tuple(call for _, call in self.worst),
            tuple(module for _, module in self.modules),
            self.modules_in_all,
            tuple(self.unmatched),
            (self.unmatched_calls[0], self.unmatched_calls[1]),
        )


class _Processes:
    """One process of each run. Numbers are those of calls in the first one's index."""

    def __init__(self, total: _Compared, a: Index, b: Index, read_a: _Reader, read_b: _Reader) -> None:
        self._total = total
        self._a, self._b = a, b
        self._read_a, self._read_b = read_a, read_b
        self._pairs = Pairs(a, b)
        self._bits = array("H", bytes(2 * len(a)))
        self._certain = array("B", bytes(len(a)))  # operands that are parameters
        self._relative = array("d", [-1.0]) * len(a)
        self._steady: dict[tuple[int, int], _Steady | None] = {}

    def compare(self, ranks: tuple[int, int]) -> None:
        """Compare all pairs, then say of each what kind it is."""
        total, a, b, pairs = self._total, self._a, self._b, self._pairs
        for number, other in enumerate(pairs.of_a):
            if other < 0:
                continue
            if a.whole[number] == b.whole[other]:
                by = Index.BY[min(a.by[number], b.by[other])]
                self._bits[number] = _BLANK if by == "nothing" else 0
            else:
                by = self._measured(number, other)
            if a.chosen[number]:
                total.pairs += 1
                total.pairings[PAIRINGS[pairs.how[number]]] += 1
                total.metadata += bool(self._bits[number] & _METADATA)
                if not self._bits[number] & _DIFFERS:
                    total.by[by] += 1
        changed = self._changed()
        total.add_unmatched("a", ranks[0], a, pairs.of_a, self._read_a)
        total.add_unmatched("b", ranks[1], b, pairs.of_b, self._read_b)
        self._add_up(ranks, changed)

    def _difference(self, number: int) -> tuple[StoredCall, StoredCall, tuple[RoleDifference, ...]]:
        a = self._read_a(self._a.position[number])
        b = self._read_b(self._b.position[self._pairs.of_a[number]])
        return a, b, self._total.measure.roles(a, b)

    def _measured(self, number: int, other: int) -> str:
        """Compare two calls that are not the same for sure; returns by what they are equal, if they are."""
        a, b, roles = self._difference(number)
        bits, relative = 0, -1.0
        weakest = "hash"
        for role in roles:
            if role.a is not None and role.b is not None:
                bits |= _METADATA * (role.a.shape != role.b.shape or role.a.dtype != role.b.dtype)
            if role.equal is False:
                bits |= _bit(role.role)
            if is_output(role.role):
                blank = role.role == "output" and role.equal is None and role.a is not None and role.b is not None
                bits |= _BLANK * blank
                relative = max(relative, _order(role.relative))
            if role.by != "hash" and role.equal:
                weakest = "statistics" if "statistics" in (weakest, role.by) else str(role.by)
        if self._total.measure.arguments(a, b):
            bits |= _ARGUMENT
        if outcome(a.error) != outcome(b.error):
            bits |= _OUTPUT | _UNCLEAR
        if a.arguments is None or b.arguments is None:
            if not {operator_name(a.record.op), operator_name(b.record.op)} <= _COMPLETE:
                bits |= _UNCLEAR
        elif _is_random(a) or _is_random(b):
            bits |= _UNCLEAR
        if any(role.equal is None for role in roles if not is_output(role.role)):
            bits |= _UNCLEAR
        self._bits[number], self._relative[number] = bits, relative
        if bits & _DIFFERS:
            for role in roles:
                if role.equal is not False or is_output(role.role):
                    continue
                if role.a is None or role.b is None:
                    self._certain[number] |= _bit(role.role)  # no value of another call can be why
                for meta, index in ((role.a, self._a), (role.b, self._b)):
                    if meta is not None and meta.requires_grad and index.only_looks:
                        self._certain[number] |= _bit(role.role)
            key = self._a.key[number], self._b.key[other]
            if key not in self._steady and len(self._steady) < _MOST_STEADY:
                self._steady[key] = _Steady()
            if (steady := self._steady.get(key)) is not None:
                steady.add(roles)
        return "nothing" if bits & _BLANK else weakest

    def _changed(self) -> array[int]:
        """For each call the operands that no differing call before it explains."""
        a, b, of_a, bits = self._a, self._b, self._pairs.of_a, self._bits
        calls: Counter[tuple[int, int]] = Counter()
        for number, other in enumerate(of_a):
            if other >= 0 and (key := (a.key[number], b.key[other])) in self._steady:
                calls[key] += 1
        changed = array("B", bytes(len(a)))
        by_key: dict[tuple[int, int], int] = {}
        differed, varied = False, True
        for number, other in enumerate(of_a):
            if other < 0 or not bits[number] & _DIFFERS:
                continue
            operands = bits[number] & _OPERAND_BITS
            key = a.key[number], b.key[other]
            if key not in by_key:
                steady = self._steady.get(key)
                by_key[key] = 0
                if steady is not None and varied and calls[key] > 1:
                    by_key[key] = sum(bit for bit, same in steady.same.items() if same == calls[key])
                varied = varied and steady is not None and steady.varies
            changed[number] = operands & (by_key[key] | self._certain[number]) if differed else operands
            differed = True
        return changed

    def _kind(self, number: int, changed: int) -> Kind:
        bits = self._bits[number]
        if bits & _ARGUMENT:
            return "changed argument"
        if changed:
            return "changed operand"
        if bits & _OPERAND_BITS:
            return "inherited"
        if bits & _OUTPUT:
            return "unclear" if bits & _UNCLEAR else "added"
        return "not compared" if bits & _BLANK else "equal"

    def _add_up(self, ranks: tuple[int, int], changed: array[int]) -> None:
        total, a, of_a = self._total, self._a, self._pairs.of_a
        rows: dict[int, _Row] = {}
        more: set[int] = set()
        first = -1
        worst: list[tuple[float, int]] = []
        for number, other in enumerate(of_a):
            if other < 0 or not a.chosen[number]:
                continue
            kind = self._kind(number, changed[number])
            total.kinds[kind] += 1
            if kind in _SAME:
                continue
            if first < 0:
                first = number
            row = hash((a.module[number], self._b.module[other], a.phase[number]))
            if row not in rows:
                if len(rows) < total.limit:
                    rows[row] = _Row(number)
                else:
                    more.add(row)
            entry = (self._relative[number], -number)
            if len(worst) < total.worst_limit:
                heapq.heappush(worst, entry)
            elif entry > worst[0]:
                heapq.heapreplace(worst, entry)
        for number, other in enumerate(of_a):
            if other < 0 or not a.chosen[number]:
                continue
            if row_ := rows.get(hash((a.module[number], self._b.module[other], a.phase[number]))):
                row_.calls += 1
                row_.kinds[self._kind(number, changed[number])] += 1
                row_.relative = max(row_.relative, self._relative[number])
        if first >= 0:
            found = self._call(first, changed)
            if total.first is None or found.a.place < total.first.a.place:
                total.first = found
                total.before = (
                    sum(1 for place in range(first) if of_a[place] < 0),
                    sum(1 for place in range(of_a[first]) if self._pairs.of_b[place] < 0),
                )
        total.modules_in_all += len(rows) + len(more)
        modules = []
        for row_ in rows.values():
            call = self._read_a(a.position[row_.first])
            other_record = self._read_b(self._b.position[of_a[row_.first]]).record
            module = ModuleDifference(
                ranks,
                module_name(call.record.module),
                module_name(other_record.module),
                call.record.phase,
                row_.calls,
                {kind: row_.kinds[kind] for kind in KINDS if row_.kinds[kind]},
                row_.relative if row_.relative >= 0 else None,
                call.record.index,
            )
            modules.append((call.place, module))
        total.add_rows([(relative, self._call(-number, changed, slim=True)) for relative, number in worst], modules)

    def _call(self, number: int, changed: array[int], slim: bool = False) -> CallDifference:
        a, b, roles = self._difference(number)
        arguments = self._total.measure.arguments(a, b)
        names = [role for role, bit in _BITS.items() if changed[number] & bit]
        if changed[number] & _OTHER:
            differing = [role for role in roles if role.equal is False and _bit(role.role) == _OTHER]
            own = [role for role in differing if role.a is None or role.b is None]
            names += [role.role for role in own or differing]
        if slim:
            a, b = replace(a, given=None), replace(b, given=None)
        pairing = PAIRINGS[self._pairs.how[number]]
        return CallDifference(self._kind(number, changed[number]), pairing, tuple(names), arguments, a, b, roles)


class _Row:
    __slots__ = ("calls", "first", "kinds", "relative")

    def __init__(self, first: int) -> None:
        self.first = first
        self.calls = 0
        self.kinds: Counter[Kind] = Counter()
        self.relative = -1.0


def _identity(call: StoredCall) -> dict[str, Any]:
    record = call.record
    names = ("index", "step", "op", "phase", "module", "source", "grad_of")
    return {"rank": call.rank} | {name: getattr(record, name) for name in names} | {"error": call.error}
