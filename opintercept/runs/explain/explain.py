"""`explain`: what the difference of two runs' losses is made of.

Imports torch only when it is called.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opintercept._core.checks import check_choice
from opintercept._core.errors import OpInterceptError, needs
from opintercept._core.text import counted, listed, printable
from opintercept.runs.compare.pairing import operator_name
from opintercept.runs.explain.explanation import BY, Explanation, Share, ShareBy, groups
from opintercept.runs.store.run import Run

if TYPE_CHECKING:
    import torch

    from opintercept.runs.explain.budget import Added, Budget, Measure
    from opintercept.runs.explain.program import Program, Step

_MASK = ["abs", "bitwise_and", "eq", "mul", "ne", "ne"]  # isfinite(x) & x.ne(0), by which torch selects for printing
_FORMAT = frozenset(("abs", "copy", "to_copy", "_to_copy", "min", "max", "ceil", "ne", "div", "gt", "lt"))
_LIKE = "record both with `opintercept run --explain`"


def explain(
    a: Run,
    b: Run,
    *,
    loss: int | None = None,
    tokens: Sequence[int] | None = None,
    by: ShareBy = "call",
    confirm: int = 0,
    rank: int | None = None,
) -> Explanation:
    """Say what the difference of two runs' losses is made of: which calls, weights and inputs, and how much each.

    A's forward calls are computed in float64, with A's values and with B's. What a call of B has beside that, it adds;
    the rest it inherits. The cost of an addition is its product with the gradient of the loss, averaged over the way
    from A to B. Rows and remainder add up to the difference. Adjoint-weighted rounding errors of a single program are
    those of ADAPT (Menon et al., SC 2018) and CHEF-FP (Vassilev et al., IPDPS 2023).

    Args:
        a: The run to measure against: one step of a program with all operators and values, recorded with
            `opintercept run --explain` or `RunRecorder(folder, "full")` under `ops="all"`.
        b: The other run, recorded likewise. It needs no backward pass, and its operators may be others.
        loss: The index of A's call whose output is explained. By default the root of A's backward pass, or else the
            last number that differs, where it was computed first, or else the norm of the difference of the last
            outputs.
        tokens: If given, the loss is the sum of the log-probabilities that the last output, or that of the call `loss`,
            gives to these tokens, one for each of its last rows.
        by: What the rows are: each call, or the sums of a `"module"`, an `"op"`, a `"line"` or a `"dtype"`.
        confirm: For how many of the largest rows A's program is run again with that row alone.
        rank: The process; by default the first of each run.

    Raises:
        OpInterceptError: The runs lack values, or there is no such loss in both.

    Example:
        >>> import tempfile, torch
        >>> from opintercept import intercept, runs
        >>> model, x = torch.nn.Linear(8, 4), torch.ones(2, 8)
        >>> def step(folder, slope):
        ...     with intercept(runs.RunRecorder(folder, tensors="full"), ops="all"):
        ...         torch.nn.functional.leaky_relu(model(x), slope).square().sum().backward()
        ...     return runs.open_run(folder)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = runs.explain(step(f"{folder}/a", 0.01), step(f"{folder}/b", 0.02))
        >>> found.rows()[0].op, found.rows()[0].cause
        ('aten::leaky_relu', 'another argument: negative_slope=0.02 for 0.01')
    """
    check_choice("by", by, BY)
    try:
        from opintercept.runs.explain.budget import Budget, Spill
        from opintercept.runs.explain.pairs import counterparts
        from opintercept.runs.explain.program import Program
    except ImportError as missing:
        raise needs("explaining runs", "torch, numpy and safetensors", "'opintercept[cli]'") from missing
    one, other = (Program(run, run.ranks[0] if rank is None else rank) for run in (a, b))
    pairs = counterparts(one, other)
    end = _end(one, other, pairs, loss)
    measure, what = _measure(one, other, pairs, end, tokens)
    paired = frozenset(pairs.values())
    with Spill() as spill:
        budget = Budget(one, other, pairs, end, spill)
        losses = budget.weigh(measure)
        difference = losses[1] - losses[0]
        shares = [_share(each, difference, _cause(each, other, paired)) for each in budget.added]
        rows = sorted(groups(shares, by).items(), key=lambda row: -abs(sum(each.cost for each in row[1])))
        of_share = {id(share): each for share, each in zip(shares, budget.added, strict=True)}
        tried = {key: budget.confirmed(measure, [of_share[id(each)] for each in row]) for key, row in rows[:confirm]}
    notes = _notes(one, pairs, end, budget)
    return Explanation(a.head(), b.head(), what, losses, by, tuple(shares), tried, notes, tuple(budget.path))


def _end(program: Program, other: Program, pairs: dict[int, int], loss: int | None) -> int:
    """The place of the call of A that makes the loss."""
    if loss is not None:
        found = next((step.number for step in program.steps if step.stored.record.index == loss), None)
        if found is None:
            raise OpInterceptError(
                f"loss must be the index of a forward call of A that computes, got {loss}; `opintercept show --calls` "
                "lists them"
            )
    elif program.root is not None:
        found = program.root
    else:
        printing = _printing(program)
        made = [n for n in sorted(pairs.keys() - printing) if _numbers(program.steps[n])]
        if not made:
            raise OpInterceptError(f"no output of A has a counterpart in B; {_LIKE}")
        single = [place for place in made if _numbers(program.steps[place]) == 1]
        numbers = {place: (_size(program.steps[place]), _size(other.steps[pairs[place]])) for place in single}
        last = next((both for both in reversed(numbers.values()) if both[0] != both[1]), None)
        found = next((place for place, both in numbers.items() if both == last), made[-1])
    if found not in pairs:
        record = program.steps[found].stored.record
        raise OpInterceptError(
            f"the loss, the output of call {record.index} ({record.op} in {record.where()}), must have a counterpart "
            "in B; name another call with loss= (--loss)"
        )
    return found


def _numbers(step: Step) -> int:
    """How many real numbers the first output of a call has; 0 if they are not real."""
    meta = step.stored.record.output
    meta = meta[0] if isinstance(meta, tuple) else meta
    return math.prod(meta.shape) if meta is not None and "float" in meta.dtype else 0


def _printing(program: Program) -> set[int]:
    """The calls by which torch finds how to print a tensor: what comes from its finite numbers that are not 0."""
    found: set[int] = set()
    makers: dict[int, Step] = {}  # the last call that wrote to a memory
    for step in program.steps:
        memory = {name: region.memory for name, region in step.inputs}
        if step.operator == "masked_select" and {"self", "mask"} <= memory.keys():
            mask = _makers(makers, memory["mask"], {*_MASK}, memory["self"])
            if sorted(each.operator for each in mask) == _MASK:
                cut = _makers(makers, memory["self"], {"cat", "stack"})  # a large tensor without its middle
                source = step.stored.record.source
                cut = [each for each in cut if each.stored.record.source == source]
                found |= {each.number for each in (step, *mask, *cut)}
        elif step.operator in _FORMAT and any(
            each in makers and makers[each].number in found for each in memory.values()
        ):
            found.add(step.number)
        makers |= {region.memory: step for region in step.outputs if region is not None}
    return found


def _makers(makers: Mapping[int, Step], memory: int, ops: set[str], given: int | None = None) -> list[Step]:
    """The calls of some operators that have made a memory, out of a given one and of what others have made."""
    found: dict[int, Step] = {}
    left = [memory]
    while left:
        maker = makers.get(left.pop())
        if maker is not None and maker.number not in found and maker.operator in ops:
            found[maker.number] = maker
            left += [region.memory for _, region in maker.inputs if region.memory != given]
    return [*found.values()]


def _size(step: Step) -> float | None:
    """The modulus of the number that a call makes, which its copies share."""
    values = step.stored.values.get("output")
    return None if values is None or values.mean is None else abs(values.mean)


def _measure(
    a: Program, b: Program, pairs: dict[int, int], end: int, tokens: Sequence[int] | None
) -> tuple[Measure, str]:
    """The loss as a function of the output of its call, and what it is in words."""
    import torch

    step = a.steps[end]
    record = step.stored.record
    where = f"{operator_name(record.op)} in {record.where()}"
    if tokens is not None:
        chosen = torch.tensor(list(tokens))

        def log_probabilities(output: torch.Tensor) -> torch.Tensor:
            rows = output.reshape(-1, output.shape[-1])[-len(chosen) :]
            return rows.log_softmax(-1).gather(-1, chosen[-len(rows) :, None]).sum()

        width = (_output(step).shape or (0,))[-1]
        if not len(chosen) or int(chosen.min()) < 0 or int(chosen.max()) >= width:
            raise OpInterceptError(
                f"tokens must be whole numbers from 0 to {width - 1}, the rows of the output of {where}, got "
                f"{listed(list(tokens))}"
            )
        return log_probabilities, f"log-probabilities of {counted(len(chosen), 'token')} from {where}"
    if _numbers(step) == 1:
        return lambda output: output.sum(), f"loss, {where}"
    ends = [program.value(_output(program.steps[place])).double() for program, place in ((a, end), (b, pairs[end]))]
    change = ends[1].reshape(ends[0].shape) - ends[0]
    direction = change / change.norm().clamp_min(torch.finfo(torch.float64).tiny)
    start = ends[0]
    return (
        lambda output: (direction.reshape(output.shape) * (output - start.reshape(output.shape))).sum()
    ), f"norm of the difference of outputs, {where}"


def _output(step: Step) -> Any:
    return next(each for each in step.outputs if each is not None and each.name is not None)


def _share(added: Added, difference: float, cause: str) -> Share:
    record = added.step.stored.record
    return Share(
        share=added.cost / difference if difference else math.nan,
        cost=added.cost,
        index=record.index,
        op=record.op,
        module=record.module,
        source=record.source,
        cause=cause,
        dtype=added.dtype,
        roundings=added.roundings,
    )


def _cause(added: Added, b: Program, paired: Container[int]) -> str:
    """What an addition is, in words."""
    if added.kind == "leaf":
        what = "weight" if added.region.weight else "input"
        if added.rounded:
            return f"{what} rounded to {added.dtype}: {added.name}"
        size = math.prod(added.region.shape)
        of = f", {added.values:,} of {size:,} values" if added.values < size else ""
        return f"another {what}: {added.name}{of}"
    if added.kind == "between":
        if added.roundings <= 1:
            return f"{added.name} rounded to {added.dtype} before"
        there = listed(_before(added.other, b, paired), _MOST_OPS)
        return f"{added.name} is computed otherwise before{f': {there} in B' if there else ''}"
    assert added.other is not None
    one, other = added.step.stored, added.other.stored
    if operator_name(one.record.op) != operator_name(other.record.op):
        return f"another operator: {operator_name(other.record.op)}"
    mine, theirs = one.arguments or {}, other.arguments or {}
    changed = [
        f"{name}={theirs.get(name)} for {mine.get(name)}"
        for name in dict.fromkeys([*mine, *theirs])
        if mine.get(name) != theirs.get(name) and name not in _NO_VALUES
    ]
    if changed:
        return f"another argument: {', '.join(changed)}"
    if added.integers:
        return f"another {', '.join(added.integers)}"
    if added.step.overload is None:
        return "other numbers: it is not computed again"
    if added.roundings <= 1:
        return f"rounding in {added.dtype}"
    return f"another result, {added.roundings:.2g} times its rounding in {added.dtype}"


def _before(step: Step | None, program: Program, paired: Container[int]) -> list[str]:
    """The operators of B without a counterpart that ran right before a call."""
    found: list[str] = []
    place = -1 if step is None else step.number - 1
    while place >= 0 and place not in paired:
        found.append(program.steps[place].operator)
        place -= 1
    return found[::-1]


_MOST_OPS = 6
_NO_VALUES = frozenset(("dtype", "device", "layout", "pin_memory", "memory_format", "non_blocking", "copy"))


def _notes(program: Program, pairs: dict[int, int], end: int, budget: Budget) -> tuple[str, ...]:
    from opintercept.runs.program.again import NotRunError  # which imports torch

    steps = program.steps[: end + 1]
    alone = [step.stored.record for step in steps if step.number not in pairs]
    notes = []
    if alone:
        ops = listed(list(dict.fromkeys(operator_name(record.op) for record in alone)))
        notes.append(f"{counted(len(alone), 'call')} of A without a counterpart in B: {ops}")
    if budget.uncomputed:
        calls = counted(len(budget.uncomputed), "call")
        names: dict[str, str] = {}
        for place, failed in budget.uncomputed.items():
            why = f" ({printable(str(failed), 160)})" if isinstance(failed, NotRunError) else ""
            names.setdefault(program.steps[place].operator, why)
        what = listed([f"{name}{why}" for name, why in names.items()])
        notes.append(f"not computed in float64: {calls}, {what}; rows before them may lack costs")
    if refused := program.refused(end):
        notes.append(
            f"not on the list of operators that may run again, so not computed: {listed(refused)}; rows before them "
            "may lack costs"
        )
    return tuple(notes)
