"""`diff_ranks`: compares the ranks of one run.

Importing this needs neither numpy nor torch; the comparison needs numpy.
"""

from __future__ import annotations

from opintercept._core.checks import check_count
from opintercept._core.errors import OpInterceptError, needs
from opintercept._core.text import counted
from opintercept.runs.ranks.difference import RankDifference
from opintercept.runs.store.run import Run


def diff_ranks(run: Run, *, limit: int = 100) -> RankDifference:
    """Compare the ranks of one run, and find what diverged first.

    - A weight should stay equal on the ranks that have it in common when it first appears, so no layout of data,
      tensor and pipeline parallelism has to be given. A weight that differs from that of most ranks from its beginning
      is reported, too; sharded weights, which are equal on no two ranks, are not. Any other operand should stay equal
      on the ranks that had it in common in two of its first four calls with different values. Constants do not count.
      These are the rules of `hooks.Replicas`, which also compares parameters that no call reads; a run does not have
      them. A run does not say which tensors are parameters: the right operand of a
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
        from opintercept.runs.ranks.comparison import compare
    except ImportError as missing:
        raise needs("comparing ranks", "numpy", "'opintercept[cli]'") from missing
    if run.titles:  # a program with other processes, too
        run = run.only([rank for rank, title in run.titles.items() if title == f"rank{rank}"])
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
