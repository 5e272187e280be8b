"""Compares two runs: which processes and calls are counterparts, and which settings of the runs differ.

`pairs` finds the counterpart of each call, `tolerance` compares the two, `kinds` classifies the pair, `judged` asks the
judge of `why` where there are values, and `result` holds it all. Imports torch only if both runs have tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from opintercept._core.checks import check_count
from opintercept._core.errors import OpInterceptError, needs
from opintercept._core.record import CallRecord
from opintercept._core.text import counted
from opintercept.runs.compare.operands import Comparer
from opintercept.runs.compare.result import Difference
from opintercept.runs.store import processes
from opintercept.runs.store.run import Run
from opintercept.runs.why.answer import Answer

if TYPE_CHECKING:
    from opintercept.runs.compare.totals import ErrorListener

Select = Callable[[CallRecord], bool]


def diff(
    a: Run,
    b: Run,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    limit: int = 100,
    tensors: bool = True,
    select: Select | None = None,
) -> Difference:
    """Compare two runs call by call.

    Two calls are counterparts if they have the same module, operator, phase, `grad_of` and number among the calls that
    share these. For the calls left over, the recorded operands, steps and shapes decide. A module that only one run has
    is then paired with one that makes the same products in the same order: `torch.compile` runs all modules as one.
    Runs of several processes are compared rank by rank, or by the names of the processes and the order of their birth,
    and a process that only one of them has makes them differ. The process of a run with only one is compared with each
    process of the other run.

    What happens between two products is not recorded. An operand that differs can therefore come from any differing
    call before it, and counts as `"inherited"`. It counts as changed if no call before it in its process differs, if
    only one of the two calls has it, or if it is a parameter: it requires a gradient, in a run without a backward pass
    in which no left operand ever does.

    An argument that is not a tensor always counts as changed. Hashes and statistics do not show whether rounding
    explains a difference. Of runs of one process with all values, `RunRecorder(folder, "full")`, and at most 2,000
    calls, the judge of `why` decides: what it acquits counts as `"rounding"`, and `first` stands for what it blames.

    Args:
        a: The run that the other is measured against; results are in its order.
        b: The other run.
        rtol: An operand or output counts as equal if `max(abs(b - a))` is at most `atol` plus `rtol` times the largest
            modulus in `a`. With a tolerance, a different dtype alone is no difference. Without recorded tensors,
            statistics give a lower bound of the error.
        atol: See `rtol`.
        limit: The most rows in `worst`, `modules` and `unmatched`.
        tensors: Whether to read the tensors of calls that differ, if both runs have them. Needs torch and safetensors.
        select: Which calls to report. All calls are compared, so what counts as inherited does not depend on it.

    Raises:
        TypeError: `a` or `b` is not a run.
        OpInterceptError: Both runs have calls, but no selected call has a counterpart; or a run changed meanwhile.
        ValueError: A tolerance is not a finite number from 0, or the limit is below 1.

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
    for name, run in (("a", a), ("b", b)):
        if not isinstance(run, Run):
            raise TypeError(f"{name} must be a run, got {run!r}; open its folder with runs.open_run")
    for name, value in (("rtol", rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
    check_count("limit", limit)
    return compare_runs(a, b, Comparer(a, b, rtol, atol, tensors), limit, limit, select)


def compare_runs(
    a: Run,
    b: Run,
    comparer: Comparer,
    limit: int,
    worst_limit: int,
    select: Select | None = None,
    watch: ErrorListener | None = None,
) -> Difference:
    """`diff` with a limit of its own for `worst`, whose calls can be large, and `watch`, which gets all errors."""
    try:
        from opintercept.runs.compare.kinds import compare_ranks
        from opintercept.runs.compare.totals import DiffTotals
    except ImportError as missing:
        raise needs("comparing runs", "numpy", "'opintercept[cli]'") from missing
    total = DiffTotals(limit, worst_limit, watch)
    for rank_a, rank_b in _rank_pairs(a, b):
        compare_ranks(total, a, rank_a, b, rank_b, comparer, select)
    if (
        not total.pairs
        and not isinstance(total.judged, Answer)
        and (not total.absent or (select and not any(total.unmatched_calls)))
    ):
        names = "; if their modules have other names, join calls by their values with `opintercept why A B`"
        raise OpInterceptError(
            f"the runs have no {'selected ' if select else ''}calls in common: {counted(total.calls[0], 'call')} in "
            f"{str(a.path)!r}, {total.calls[1]:,} in {str(b.path)!r}{names if all(total.calls) and not select else ''}"
        )
    return total.difference(a, b, _settings(a, b))


def _rank_pairs(a: Run, b: Run) -> list[tuple[int | None, int | None]]:
    if a.alone:
        return [(a.ranks[0], rank) for rank in b.ranks]
    if b.alone:
        return [(rank, b.ranks[0]) for rank in a.ranks]
    if a.titles or b.titles:
        return processes.pairs(a.infos, b.infos, (a.titles, b.titles))
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
