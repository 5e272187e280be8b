"""Which call of one run belongs to which call of another.

Invariant: a call costs fifty bytes of memory here, whatever the run says of it, and every step takes linear time except
for one, which has a budget. Must not import torch.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

from opintercept._record import CallRecord
from opintercept._tensors import TensorMeta
from opintercept._text import short_name
from opintercept.runs.codec import StoredCall, Values, is_output
from opintercept.runs.store import Run

Pairing = Literal["ordinal", "sequence", "family", "shape"]
PAIRINGS: tuple[Pairing, ...] = ("ordinal", "sequence", "family", "shape")

# torch wraps modules in modules of these names, which are not part of the program's own names.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_BUDGET = 5_000_000  # comparisons of equal elements that difflib may make for a pair of runs: about five seconds
_SOME = 10_000  # names that are kept, and changed calls that are looked at to find shuffled ones
_LONGEST = 200  # characters of a name that is kept
# Names of models after the first: `Critic.linear1`, `Critic#2.linear1`, and `Critic` itself.
_MODEL = re.compile(r"[A-Z]\w*(?:#[0-9]+)?")
_OF_MODEL = re.compile(rf"({_MODEL.pattern})\.")


@lru_cache(4096)
def module_name(name: str | None) -> str | None:
    """The module's name without wrappers: `_orig_mod.encoder.0` is `encoder.0`."""
    if name is None or "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@lru_cache(4096)
def operator_name(op: str) -> str:
    """The operator's own name: `mm` for `aten::mm`, `addmm` for `torch.Tensor.addmm_`."""
    name = short_name(op)
    return name if name.endswith("__") else name.rstrip("_") or name


def family(record: CallRecord) -> str:
    """What operators for the same job have in common: `"gemm"`, `"attention"`, or the operator's own name."""
    if record.gemm is not None:
        return "gemm"
    return "attention" if "attention" in record.op else operator_name(record.op)


def metas(call: StoredCall) -> dict[str, TensorMeta]:
    """Shape and dtype of operands and outputs by role, of other tensors by the name of their parameter."""
    record = call.record
    outputs = record.output if isinstance(record.output, tuple) else (record.output,)
    found = {"lhs": record.lhs, "rhs": record.rhs, "bias": record.bias}
    if (value := call.values.get("value")) is not None and record.rhs is not None:
        # The third operand of an attention has the dtype of the second; runs do not record its shape.
        found["value"] = TensorMeta((value.count,), record.rhs.dtype, record.rhs.device, None, False)
    for role, kept in call.values.items():
        if role not in found and not is_output(role):
            found[role] = TensorMeta((kept.count,), "", "", None, False)  # runs record neither shape nor dtype
    found |= {f"output.{number}" if number else "output": meta for number, meta in enumerate(outputs)}
    return {role: meta for role, meta in found.items() if meta is not None}


class Ids:
    """Numbers things: equal things get equal numbers, in both of two runs that share an instance.

    Only the 64-bit hashes of the things are kept: in a hostile run, each call can have another long name.
    """

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}

    def __call__(self, *parts: Any) -> int:
        return self._ids.setdefault(hash(parts), len(self._ids) + 1)


def first_models(a: set[str], b: set[str]) -> tuple[str, str] | None:
    """The classes of the models that run first in A and in B; None if it is the same model.

    Modules of the model that runs first have plain names, and the names in other models begin with the model's class.
    A class that occurs only in the names of A is therefore that of B's first model, and the other way round. The rest
    of the names must confirm it.
    """
    only_a, only_b = _classes(a) - _classes(b), _classes(b) - _classes(a)
    if len(only_a) != 1 or len(only_b) != 1:
        return None
    (of_b,), (of_a,) = only_a, only_b
    for name, names, others in ((of_a, a, b), (of_b, b, a)):
        plain = {each for each in names if _is_plain(each)}
        named = {each.removeprefix(f"{name}.") for each in others if each.startswith(f"{name}.")}
        if 2 * len(plain & named) < max(len(plain), len(named)):
            return None
    return of_a, of_b


def _classes(names: set[str]) -> set[str]:
    return {match[1] for name in names if (match := _OF_MODEL.match(name))}


def _is_plain(name: str) -> bool:
    return bool(name) and not _OF_MODEL.match(name) and not _MODEL.fullmatch(name)


class Index:
    """The calls of one process, in the order in which they ended. Each array has a number for each call.

    Args:
        run: The run.
        rank: The rank of the process; None for a process that the run does not have.
        ids: Numbers for equal things, shared with the other run's index.
        select: Which calls the caller asks for.
        model: A model's class to put before plain names of modules, as `first_models` gives it.

    Attributes:
        names: The names of the modules, at most `_SOME` of them.
        position: The call's position, for `Run.at`.
        key: Module, operator, phase and `grad_of`.
        loose: Module, phase and family.
        module: The module.
        phase: The phase.
        shape: Phase, family and the GEMM, or the operands' shapes if there is no GEMM.
        step: The step together with `shape`.
        inputs: Shapes and hashes of all operands; 0 if no hash is recorded.
        weights: Shape, and hashes of the right operand and the bias; 0 if no hash is recorded.
        whole: Everything that is compared, arguments included: two calls are equal if this is.
        by: What `whole` has of the outputs' values, as an index into `BY`.
        chosen: Whether the caller asks for this call.
        only_looks: Whether the process trains nothing: no backward pass, no left operand that requires a gradient.
    """

    BY = ("nothing", "statistics", "hash")

    def __init__(
        self,
        run: Run,
        rank: int | None,
        ids: Ids,
        select: Callable[[CallRecord], bool] | None,
        model: str = "",
    ) -> None:
        self.names: set[str] = set()
        self.position, self.inputs, self.weights, self.whole = array("Q"), array("q"), array("q"), array("q")
        self.key, self.loose, self.module, self.phase = array("I"), array("I"), array("I"), array("B")
        self.shape, self.step = array("I"), array("I")
        self.by, self.chosen = array("B"), array("B")
        self.only_looks = True
        phases = ("forward", "backward", "recompute")
        for position, call in () if rank is None else run.located(rank):
            record, values = call.record, call.values
            module, kind = module_name(record.module), family(record)
            if module and len(self.names) < _SOME:
                self.names.add(module[:_LONGEST])
            if model and module and _is_plain(module):
                module = f"{model}.{module}"
            lhs, rhs = record.lhs, record.rhs
            shape: Any = record.gemm and record.gemm[:4]
            if shape is None:
                shape = (lhs and lhs.shape, rhs and rhs.shape)
            hashes = tuple([values[role].hash if role in values else None for role in ("lhs", "rhs", "bias")])
            shape_id = ids("shape", record.phase, kind, shape)
            self.position.append(position)
            self.key.append(ids("key", module, operator_name(record.op), record.phase, record.grad_of))
            self.loose.append(ids("loose", module, record.phase, kind))
            self.module.append(ids("module", module))
            self.phase.append(phases.index(record.phase))
            self.shape.append(shape_id)
            self.step.append(ids("step", shape_id, record.step))
            self.inputs.append(hash((shape_id, hashes)) if any(hashes) else 0)
            self.weights.append(hash((shape_id, hashes[1:])) if hashes[1] else 0)
            by, whole = _whole(call)
            self.by.append(by)
            self.whole.append(whole)
            self.chosen.append(select is None or select(record))
            if record.phase != "forward" or (lhs is not None and lhs.requires_grad):
                self.only_looks = False

    def __len__(self) -> int:
        return len(self.position)


def _whole(call: StoredCall) -> tuple[int, int]:
    """`Index.by` and `Index.whole` of a call."""
    found = metas(call)
    parts: list[Any] = [outcome(call.error)]
    for role, meta in found.items():
        parts += (role, meta.shape, meta.dtype)
    for role, values in call.values.items():
        parts += (role, values.hash if values.hash is not None else _figures(values))
    if call.arguments is not None:
        parts.append(repr(sorted(call.arguments.items())))
    told = [role for role in found if is_output(role)] or list(found)
    hashes = [call.values[role].hash is not None if role in call.values else None for role in told]
    by = 0 if None in hashes or not hashes else 1 + all(hashes)
    return by, hash(tuple(parts))


def _figures(values: Values) -> tuple[float | None, ...]:
    return (values.count, values.nan, values.inf, values.min, values.max, values.mean, values.rms)


def outcome(error: str | None) -> str | None:
    """The type of the exception that a call raised; its text can hold addresses, which differ in every run."""
    return None if error is None else error.partition(":")[0]


class Pairs:
    """The counterparts of the calls of two indexes.

    Attributes:
        of_a: For each call of A, the number of its counterpart in B; -1 if it has none.
        of_b: The same for each call of B.
        how: How each call of A was paired, as an index into `PAIRINGS`. `"ordinal"`: same module, operator and phase,
            and the same number among these calls. `"sequence"`: the same, but the runs have different numbers of these
            calls, or other shapes, and were aligned. `"family"`: same module and phase, another operator for the same
            job. `"shape"`: in the order of the calls, if the other run has no module of that name.
    """

    def __init__(self, a: Index, b: Index) -> None:
        self.of_a, self.of_b = array("q", [-1]) * len(a), array("q", [-1]) * len(b)
        self.how = array("B", bytes(len(a)))
        self._a, self._b = a, b
        self._budget = _BUDGET
        self._modules = set(a.module), set(b.module)
        for how, name in ((0, "key"), (2, "loose"), (3, "phase")):
            groups_a, groups_b = _groups(a, name, self.of_a), _groups(b, name, self.of_b)
            for key, in_a in groups_a.items():
                if (in_b := groups_b.get(key)) is not None:
                    self._pair(in_a, in_b, how)

    def _pair(self, in_a: Sequence[int], in_b: Sequence[int], how: int) -> None:
        a, b = self._a, self._b
        renamed = PAIRINGS[how] == "shape"
        if not renamed and [a.shape[i] for i in in_a] == [b.shape[j] for j in in_b]:
            changed = (pair for pair in zip(in_a, in_b, strict=True) if a.inputs[pair[0]] != b.inputs[pair[1]])
            some = list(islice(changed, _SOME))  # enough to see whether calls are shuffled
            if {a.inputs[i] for i, _ in some}.isdisjoint({b.inputs[j] for _, j in some} - {0}):
                self._join(zip(in_a, in_b, strict=True), how)
                return
        how = how or 1
        # Calls with the same operands are the same wherever they stand; with the same weight, the module is the same.
        known = (a.weights, b.weights) if renamed else (a.inputs, b.inputs)
        self._join(_by_turns(in_a, in_b, *known), how, renamed)
        for signs in ((a.step, b.step), (a.shape, b.shape)):
            in_a, in_b = self._rest(in_a, in_b)
            self._join(self._in_order(in_a, in_b, *signs), how, renamed)
        in_a, in_b = self._rest(in_a, in_b)
        if len(in_a) == len(in_b) and not renamed:
            self._join(zip(in_a, in_b, strict=True), how)

    def _rest(self, in_a: Sequence[int], in_b: Sequence[int]) -> tuple[list[int], list[int]]:
        return [i for i in in_a if self.of_a[i] < 0], [j for j in in_b if self.of_b[j] < 0]

    def _join(self, pairs: Iterable[tuple[int, int]], how: int, renamed: bool = False) -> None:
        for i, j in pairs:
            if renamed and not self._may_be_renamed(i, j):
                continue
            self.of_a[i], self.of_b[j], self.how[i] = j, i, how

    def _may_be_renamed(self, i: int, j: int) -> bool:
        """A module that both runs have is not taken for another."""
        in_a, in_b = self._a.module[i], self._b.module[j]
        return in_a == in_b or in_a not in self._modules[1] or in_b not in self._modules[0]

    def _in_order(
        self, in_a: Sequence[int], in_b: Sequence[int], signs_a: Sequence[int], signs_b: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Pairs in the longest stretches of equal signs; by turns if finding these would take too long."""
        start, end_a, end_b = 0, len(in_a), len(in_b)
        while start < min(end_a, end_b) and signs_a[in_a[start]] == signs_b[in_b[start]]:
            yield in_a[start], in_b[start]
            start += 1
        while min(end_a, end_b) > start and signs_a[in_a[end_a - 1]] == signs_b[in_b[end_b - 1]]:
            end_a, end_b = end_a - 1, end_b - 1
            yield in_a[end_a], in_b[end_b]
        in_a, in_b = in_a[start:end_a], in_b[start:end_b]
        middle_a, middle_b = [signs_a[i] for i in in_a], [signs_b[j] for j in in_b]
        counts: dict[int, int] = defaultdict(int)
        for sign in middle_b:
            counts[sign] += 1
        alike = sum(counts.get(sign, 0) for sign in middle_a)
        if not alike:
            return
        # difflib looks at each pair of equal elements at each level of its recursion, which can be 20 deep.
        work = 20 * alike + len(middle_a) + len(middle_b)
        if work > self._budget:
            yield from _by_turns(in_a, in_b, signs_a, signs_b)
            return
        self._budget -= work
        for first_a, first_b, size in SequenceMatcher(None, middle_a, middle_b, autojunk=False).get_matching_blocks():
            yield from zip(in_a[first_a : first_a + size], in_b[first_b : first_b + size], strict=True)


def _groups(index: Index, name: str, paired: Sequence[int]) -> dict[int, array[int]]:
    groups: dict[int, array[int]] = {}
    for number, (key, other) in enumerate(zip(getattr(index, name), paired, strict=True)):
        if other < 0:
            if (group := groups.get(key)) is None:
                group = groups[key] = array("I")
            group.append(number)
    return groups


def _by_turns(
    in_a: Sequence[int], in_b: Sequence[int], signs_a: Sequence[int], signs_b: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """The first call with a sign in A and the first in B, then the second and the second; 0 is not a sign."""
    places: dict[int, list[int]] = defaultdict(list)
    for j in reversed(in_b):
        if signs_b[j]:
            places[signs_b[j]].append(j)
    for i in in_a:
        if places.get(signs_a[i]):
            yield i, places[signs_a[i]].pop()
