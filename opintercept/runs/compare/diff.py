"""Comparing two runs, or the ranks of one: which is compared with which, and in what the runs themselves differ.

`_pairing` finds the counterpart of each call, `comparer` compares the two, `_classify` says of which kind they are,
`_totals` adds that up, and `difference` has what is reported. Imports torch only if both runs have tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from opintercept._core.checks import check_count
from opintercept._core.errors import OpInterceptError, needs
from opintercept._core.record import CallRecord
from opintercept._core.text import counted
from opintercept.runs.compare.difference import Difference
from opintercept.runs.compare.values import Comparer
from opintercept.runs.ranks.difference import RankDifference
from opintercept.runs.store.run import Run

if TYPE_CHECKING:
    from opintercept.runs.compare.totals import Watch

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
    Runs of several processes are compared rank by rank, and a rank that only one of them has makes them differ. The
    process of a run with only one is compared with each process of the other run.

    What happens between two products is not recorded. An operand that differs can therefore come from any differing
    call before it, and counts as `"inherited"`. It counts as changed if one of four things rules that out:

    - No call before it in its process differs.
    - Only one of the two calls has it.
    - It is a parameter: it requires a gradient, in a run without a backward pass in which no left operand ever does.
    - It is bit for bit the same in each of two or more calls of its module, while the outputs of all modules that
      differed before it changed from call to call.

    An argument that is not a tensor always counts as changed.

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


def diff_ranks(run: Run, *, limit: int = 100) -> RankDifference:
    """Compare the ranks of one run, and find what parted first.

    - A weight should stay equal on the ranks that have it in common when it first appears, so no layout of data,
      tensor and pipeline parallelism has to be given. A weight that differs from that of most ranks from its beginning
      is reported, too; sharded weights, which are equal on no two ranks, are not. Any other operand should stay equal
      on the ranks that had it in common in two of its first four calls with different values. Constants do not count.
      These are the rules of `hooks.Replicas`. A run does not say which tensors are parameters: the right operand of a
      single product and a bias count as weights.
    - Ranks that ever call an operator at one place of the program should do so equally often in each step, and ranks
      that make the same calls should make them in one order.
    - Outputs of the same shape should be of the same size on all ranks in a forward pass, whatever their data. One is
      far off if its root mean square or largest magnitude is more than twice that of the median rank, or less than
      half, and 16 times as far from it, in logarithms, as half of the outputs of its place are. A rank is an outlier
      if five outputs in a row are, or one by a factor of 1000. This takes three ranks and 12 calls of a place. NaN and
      infinities count where at most half of the ranks have them.

    Needs numpy. What was recorded without hashes is compared by its calls only.

    Args:
        run: A run of several processes.
        limit: The most findings to return.

    Raises:
        OpInterceptError: The run has calls of one rank only, or of none.
        ValueError: The limit is below 1.

    Example:
        >>> import os, tempfile, torch
        >>> from opintercept import intercept, runs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for rank in range(3):  # in practice, torchrun starts a process for each
        ...         os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
        ...         model = torch.nn.Linear(2, 2)
        ...         _ = model.weight.data.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        ...         with intercept(runs.RunRecorder(folder)) as watch:
        ...             for step in range(4):
        ...                 if (rank, step) == (1, 2):
        ...                     model.weight.data[0, 0] = 5.0
        ...                 _ = model(torch.rand(3, 2))
        ...                 watch.step()
        ...     found = runs.diff_ranks(runs.open_run(folder)).first
        >>> del os.environ["RANK"], os.environ["WORLD_SIZE"]
        >>> found.what, found.odd, found.step, found.operand
        ('weight', (1,), 2, 'rhs')
    """
    check_count("limit", limit)
    try:
        from opintercept.runs.ranks.diff import compare
    except ImportError as missing:
        raise needs("comparing ranks", "numpy", "'opintercept[cli]'") from missing
    if len(run.ranks) < 2:
        raise OpInterceptError(
            f"comparing ranks needs a run of several, got one rank in {str(run.path)!r}; record a run under torchrun, "
            "or compare two runs with `opintercept diff A B`"
        )
    found = compare(run, limit)
    if len(found.ranks) < 2:
        raise OpInterceptError(
            f"comparing ranks needs calls of several, got those of {counted(len(found.ranks), 'rank')} in "
            f"{str(run.path)!r}; record them again"
        )
    return found


def compare_runs(
    a: Run,
    b: Run,
    comparer: Comparer,
    limit: int,
    worst_limit: int,
    select: Select | None = None,
    watch: Watch | None = None,
) -> Difference:
    """`diff` with a limit of its own for `worst`, whose calls can be large, and `watch`, which gets all errors."""
    try:
        from opintercept.runs.compare.processes import compare_ranks
        from opintercept.runs.compare.totals import Totals
    except ImportError as missing:
        raise needs("comparing runs", "numpy", "'opintercept[cli]'") from missing
    total = Totals(limit, worst_limit, watch)
    for rank_a, rank_b in _rank_pairs(a, b):
        compare_ranks(total, a, rank_a, b, rank_b, comparer, select)
    if not total.pairs and (not total.absent or (select and not any(total.unmatched_calls))):
        names = "; if their modules have other names, join calls by weights with `opintercept diff --align weights`"
        raise OpInterceptError(
            f"the runs have no {'selected ' if select else ''}calls in common: {counted(total.calls[0], 'call')} in "
            f"{str(a.path)!r}, {total.calls[1]:,} in {str(b.path)!r}{names if all(total.calls) and not select else ''}"
        )
    return total.difference(_settings(a, b))


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
