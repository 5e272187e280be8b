"""`why`: what one program does otherwise than another. Imports torch only when it is called."""

from __future__ import annotations

from dataclasses import replace

from opintercept._core.errors import OpInterceptError, needs
from opintercept.runs.store.run import Run
from opintercept.runs.why.answer import Answer


def why(a: Run, b: Run) -> Answer:
    """Say what B's program does otherwise than A's, where, and what that costs the loss.

    A's program is computed again, in float64, with B's values wherever B has them: tensors are found by their values,
    however they are laid out, so modules and operators may have other names. A difference that is gone at the next
    such tensor is another way to write the same, and accuses nobody. What stays is a cause, and single changes of A
    are tried until one makes what B does. What counts as rounding is measured, by computing with values that are off by
    so much.

    Args:
        a: The run to measure against, recorded with `opintercept run --why`, or with `RunRecorder(folder, "full")`
            under `ops="all"`. A forward pass is enough; without differences there, a step of training is compared, too.
        b: The other run, recorded likewise. Its matmuls alone will do, and if A has no more either, these are joined by
            the rows of their weights.

    Raises:
        OpInterceptError: The runs lack values, or B has nothing of what A computes.

    Example:
        >>> import tempfile, torch
        >>> from opintercept import intercept, runs
        >>> model, x = torch.nn.Linear(8, 4), torch.ones(2, 8)
        >>> def step(folder, slope):
        ...     with intercept(runs.RunRecorder(folder, tensors="full"), ops="all"):
        ...         torch.nn.functional.leaky_relu(model(x), slope).square().sum().backward()
        ...     return runs.open_run(folder)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = runs.why(step(f"{folder}/a", 0.01), step(f"{folder}/b", 0.02))
        >>> found.first.what, found.first.place.op, f"{found.first.share:.0%}"
        ('uses negative_slope=0.02 where A uses 0.01', 'aten::leaky_relu', '100%')
    """
    try:
        from opintercept.runs.why.judge import judged
        from opintercept.runs.why.products.products import judged_products
    except ImportError as missing:
        raise needs("comparing programs", "torch, numpy and safetensors", "'opintercept[cli]'") from missing
    of_a, of_b = (_has_operators(run) for run in (a, b))
    if of_b and not of_a:
        raise OpInterceptError(
            f"the first run must have all operators if one of two has, got only matmuls in {str(a.path)!r}; exchange "
            "the runs, or record the first one with `opintercept run --why`"
        )
    answer = judged(a, b) if of_a else judged_products(a, b)
    if not answer.joined:
        raise OpInterceptError(
            f"{str(b.path)!r} must have results of {str(a.path)!r}, got none; record the same weights on the same "
            "inputs, with `opintercept run --why`"
        )
    alone = [
        f"only rank {run.ranks[0]} of the {len(run.ranks)} of {name} was compared"
        for name, run in (("A", a), ("B", b))
        if of_a and len(run.ranks) > 1
    ]
    return replace(answer, notes=(*answer.notes, *alone))


def _has_operators(run: Run) -> bool:
    """Whether a run has other operators than matmuls."""
    return any(
        call.record.phase == "forward" and call.error is None and (call.record.lhs is None or "conv" in call.record.op)
        for call in run.calls()
    )
