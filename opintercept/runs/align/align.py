"""`align`: compares two runs whose modules have other names, and joins their matmuls by the rows of their weights.

`common_weights` finds equal rows, `common_calls` joins the calls, `judge` compares them, and `alignment` holds what is
reported. Imports torch only when it is called.
"""

from __future__ import annotations

from opintercept._core.errors import OpInterceptError, needs
from opintercept._core.text import listed
from opintercept.runs.align.alignment import CAUSES, Alignment, Apart
from opintercept.runs.store.run import Run

_STRANGE = "another user wrote A, so its program was not computed again: use the command, or open_run(a, trusted=True)"


def align(a: Run, b: Run) -> Alignment:
    """Compare the forward matmuls of two runs whose modules have other names, as a trainer and an inference engine.

    The rows of the weights say which products belong together: fused, split, permuted and transposed projections,
    copies in another dtype, quantised ones, and layers that several processes share. Products without a weight are
    joined if they stand between the same two others. The outputs are compared through the map that the rows give.

    Args:
        a: The run that the other is measured against, recorded with `tensors="full"`.
        b: The other run, recorded likewise. A few steps are enough.

    Raises:
        OpInterceptError: No call of one run could be joined with one of the other.

    Example:
        >>> import tempfile, torch
        >>> from opintercept import intercept, runs
        >>> apart = torch.nn.ModuleDict({"q": torch.nn.Linear(16, 8), "k": torch.nn.Linear(16, 8)})
        >>> fused = torch.nn.Linear(16, 16).requires_grad_(False)
        >>> fused.weight.data = torch.cat([apart.q.weight, apart.k.weight])
        >>> fused.bias.data = torch.cat([apart.q.bias, apart.k.bias])
        >>> x = torch.randn(4, 16)
        >>> with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        ...     with intercept(runs.RunRecorder(f"{folder}/a", tensors="full")):
        ...         _ = apart.q(x), apart.k(x)
        ...     with intercept(runs.RunRecorder(f"{folder}/b", tensors="full")):
        ...         _ = fused(x)
        ...     found = runs.align(runs.open_run(f"{folder}/a"), runs.open_run(f"{folder}/b"))
        >>> [(pair.by, pair.rows, pair.of, pair.weight) for pair in found.pairs], found.first
        ([('rows', 8, 8, 0.0), ('rows', 8, 8, 0.0)], None)
    """
    try:
        from opintercept.runs.align.common_calls import linked
        from opintercept.runs.align.common_weights import Joining, Side
        from opintercept.runs.align.judge import compared
    except ImportError as missing:
        raise needs("aligning runs", "torch, numpy and safetensors", "'opintercept[cli]'") from missing
    one, other = Side.of(a), Side.of(b)
    joining = Joining(one, other)
    links = linked(joining)
    if not joining.matches:
        reasons = sorted({*one.reasons.values(), *other.reasons.values()})[:3]
        raise OpInterceptError(
            f"no call of {str(a.path)!r} can be joined with one of {str(b.path)!r}: "
            f"{'; '.join(reasons) or 'their weights have no rows in common'}; record a forward pass of the same "
            "weights in both programs, with tensors='full', or compare programs of the same modules with `opintercept "
            "diff A B`"
        )
    pairs, refused = compared(joining, links)
    note = f"not on the list of operators that may run again, so not computed: {listed(refused)}"
    first = next((pair for pair in pairs if pair.kind in CAUSES), None)
    apart_a = [Apart("a", one.calls[i], links.reasons["a", i]) for i in range(len(one.calls)) if i not in links.of_a]
    apart_b = [
        Apart("b", other.calls[i], links.reasons["b", i]) for i in range(len(other.calls)) if i not in links.of_b
    ]
    return Alignment(
        a=a.head(),
        b=b.head(),
        calls=(len(one.calls), len(other.calls)),
        joined_b=len(links.of_b),
        pairs=tuple(pairs),
        apart=(*apart_a, *apart_b),
        first=first,
        notes=(note,) if refused else () if a.trusted else (_STRANGE,),
    )
