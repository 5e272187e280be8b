"""`why`: what one program does otherwise than another. Imports torch only when it is called."""

from __future__ import annotations

from contextlib import suppress
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
    so much. A kernel that torch.compile has generated is held against its own operators, too, see
    `Answer.kernels`.

    Args:
        a: The run to measure against, recorded with `opintercept run --why`, or with `RunRecorder(folder, "full")`
            under `ops="all"`. A forward pass is enough; without differences there, a step of training is compared, too.
        b: The other run, recorded likewise. Its matmuls alone will do; if A has no more, only these are compared.

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
        from opintercept.runs.why.flow import holds_products
        from opintercept.runs.why.judge import judged
        from opintercept.runs.why.kernels import wrong_kernels
        from opintercept.runs.why.products.products import has_codes, judged_products
    except ImportError as missing:
        raise needs("comparing programs", "torch, numpy and safetensors", "'opintercept[cli]'") from missing
    whole = {name: not holds_products(run) for name, run in (("A", a), ("B", b))}
    # A replay would round again what A has in whole numbers; B's scales are not known unless all was recorded.
    replayed = whole["A"] and (whole["B"] if has_codes(b) else not has_codes(a))
    answer = judged(_busiest(a), _busiest(b)) if replayed else judged_products(a, b)
    if answer.verdict == "not compared" and not answer.behind and not all(whole.values()):
        with suppress(OpInterceptError):  # which joins parts of weights, too
            answer, replayed = judged_products(a, b), False
    if not answer.joined:
        raise OpInterceptError(
            f"{str(b.path)!r} must have results of {str(a.path)!r}, got none; record the same weights on the same "
            "inputs, with `opintercept run --why`"
        )
    alone = [
        f"only {_busiest(run).title(_busiest(run).ranks[0])} of the {len(run.ranks)} of {name} was compared"
        for name, run in (("A", a), ("B", b))
        if replayed and len(run.ranks) > 1
    ]
    if all(whole.values()) and not replayed:
        alone.append("only products were compared, since A multiplies whole numbers, which a replay would round anew")
    lacking = [name for name in whole if not whole[name]]
    if lacking:
        rest = "" if replayed else "".join(f", so others of {name} were not compared" for name in whole if whole[name])
        of = " and ".join(lacking)
        alone.append(f"only products were recorded of {of}{rest}; `opintercept run --why` records all operators")
    if answer.verdict == "equal":
        return replace(answer, notes=(*answer.notes, *alone))
    both = [wrong_kernels(_busiest(a), "A"), wrong_kernels(_busiest(b), "B")]
    found = tuple(kernel for kernels, _ in both for kernel in kernels)
    verdict = "difference" if found else answer.verdict
    notes = (*answer.notes, *alone, *(told for _, told in both if told))
    return replace(answer, notes=notes, kernels=found, verdict=verdict)


def _busiest(run: Run) -> Run:
    """The run of the process with most calls, if its processes are no ranks, of which all do the same."""
    return run.only([max(run.ranks, key=lambda rank: len(run.columns(rank)))]) if run.titles else run
