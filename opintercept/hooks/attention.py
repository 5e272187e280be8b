"""`AttentionWeights`: the weights that fused attention never returns."""

from __future__ import annotations

import fnmatch
import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from opintercept._call import OpCall, Phase
from opintercept.hooks._attention import Attention, attention_of, plain

Of = Literal["probabilities", "scores", "entropy"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """What was kept of one attention.

    Attributes:
        index: Number of the call in its interceptor.
        step: The interceptor's step.
        phase: `"forward"`, or `"recompute"` in a checkpoint.
        module: Qualified name of the module; None where it cannot be told.
        heads: The heads of the query that were kept.
        rows: The queries that were kept, by their place in the sequence.
        dropout: Probability of the dropout that the operator applies after these weights.
        values: `[*b, heads, rows, s_k]`, for the entropy `[*b, heads, rows]`; on the CPU, float64 if the query
            is, else float32.
    """

    index: int
    step: int
    phase: Phase
    module: str | None
    heads: Sequence[int]
    rows: Sequence[int]
    dropout: float
    values: torch.Tensor


class AttentionWeights:
    """Keeps the weights of every `scaled_dot_product_attention`, whichever kernel computes it.

    The kernel runs as it would; the weights are computed once more, from the query, the key, the mask, the causal
    flag, the scale and the grouped heads of the call, as torch's math path does it, in float32 for the shorter
    dtypes. They differ from the math path's by rounding only: of a score, by some units in the last place of
    `scale * sum(abs(query * key))`; of a probability, relatively by about twice that difference.
    They are what the operator has before dropout, whose probability is `dropout`.

    Only the chosen heads and rows are computed, in pieces of 32 MiB, and they wait for the device.
    `weights["encoder.layers.0.attn"]` looks calls up.

    At dispatch level, torch's math path and the fast path of `nn.MultiheadAttention` on a CPU are plain products,
    not an attention; at function level every `torch.nn.functional.scaled_dot_product_attention` is one.

    Args:
        of: `"probabilities"`: the softmax over the keys, zeros for a query that sees none. `"scores"`: what goes
            into it, `scale * query @ key.T + mask`, -inf where a key is masked. `"entropy"`: `-sum(p * log(p))`
            of each row of probabilities, in nats (Shannon 1948).
        heads: One or more heads of the query, or a slice; all if None. Negative ones count from the end.
        rows: The same for the queries: `-1` is the last of the sequence.

    Attributes:
        calls: Everything kept, in the order in which the calls ended; a list to read and to clear.

    Raises:
        TypeError: Heads or rows that are no numbers.
        ValueError: An unknown `of`.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> weights = hooks.AttentionWeights(rows=-1)
        >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> with intercept(weights):
        ...     _ = attention(x, x, x, need_weights=False)
        >>> [call] = weights[""]
        >>> call.values.shape, torch.allclose(call.values.sum(-1), torch.ones(1, 2, 1))
        (torch.Size([1, 2, 1, 5]), True)
    """

    asks_origin = True

    def __init__(
        self,
        of: Of = "probabilities",
        *,
        heads: int | Iterable[int] | slice | None = None,
        rows: int | Iterable[int] | slice | None = None,
    ) -> None:
        if of not in get_args(Of):
            raise ValueError(f"of must be one of {', '.join(map(repr, get_args(Of)))}, got {of!r}")
        self.of = of
        self.calls: list[AttentionCall] = []
        self._heads = _chosen("heads", heads)
        self._rows = _chosen("rows", rows)
        self._skipped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def post(self, call: OpCall) -> None:
        """Compute and keep the weights of an attention."""
        if call.op.endswith("_backward"):
            return
        attention = attention_of(call)
        if attention is None:
            return
        kept = attention if isinstance(attention, str) else self._keep(call, attention)
        if kept is not None:
            with self._lock:
                self._skipped[f"{call.op}: {kept}"] += 1

    def _keep(self, call: OpCall, attention: Attention) -> str | None:
        """Keep the weights; a reason if that is not possible."""
        query = attention.query
        heads, rows = _places(self._heads, query.shape[-3]), _places(self._rows, query.shape[-2])
        if heads is None:
            return f"heads {self._heads} of {query.shape[-3]}"
        if rows is None:
            return f"rows {self._rows} of {query.shape[-2]}"
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured, and nothing can be read"
        try:
            with plain(query.device):
                values = self._values(attention, heads, rows)
        except RuntimeError as error:  # vmap's and other wrapped tensors, whose values cannot be read
            return str(error).partition("\n")[0]
        if type(values) is not torch.Tensor:
            return "its operands are fake and have no values"
        self.calls.append(
            AttentionCall(call.index, call.step, call.phase, call.module, heads, rows, attention.dropout, values)
        )
        return None

    def _values(self, attention: Attention, heads: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        dtype = torch.float64 if attention.query.dtype == torch.float64 else torch.float32
        shape = (*attention.query.shape[:-3], len(heads), len(rows))
        if self.of != "entropy":
            shape = (*shape, attention.key.shape[-2])
        with torch.inference_mode(False):  # else it could not be changed outside
            values = torch.empty(shape, dtype=dtype, device="cpu")
        for some_heads, some_rows in attention.pieces(heads, rows):
            if self.of == "scores":
                piece = attention.scores(heads[some_heads], rows[some_rows], dtype)
            else:
                piece = attention.weights(heads[some_heads], rows[some_rows], dtype)
            if self.of == "entropy":
                values[..., some_heads, some_rows] = torch.special.entr(piece).sum(-1)
            else:
                values[..., some_heads, some_rows, :] = piece
        return values

    def __getitem__(self, module: str) -> list[AttentionCall]:
        """The calls of a module, by its qualified name or a glob, in which `*` also stands for dots.

        Raises:
            KeyError: No call of such a module was kept.
        """
        matches = re.compile(fnmatch.translate(module)).fullmatch
        found = [call for call in self.calls if call.module is not None and matches(call.module)]
        if not found:
            known = ", ".join(dict.fromkeys(repr(call.module) for call in self.calls)) or "none"
            raise KeyError(
                f"module must name modules whose attention was seen, got {module!r}; seen: {known}; "
                f"skipped: {self.skipped or 'none'}"
            )
        return found

    @property
    def skipped(self) -> dict[str, int]:
        """Attentions that are not among the calls, by operator and reason, and how many there were."""
        return dict(self._skipped)


def _chosen(name: str, value: Any) -> slice | tuple[int, ...]:
    if value is None:
        return slice(None)
    if isinstance(value, slice):
        return value
    numbers = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise TypeError(f"{name} must be a number, several, or a slice, got {value!r}")
    return numbers


def _places(chosen: slice | tuple[int, ...], size: int) -> Sequence[int] | None:
    """The places that are chosen of so many, or None if one of them does not exist."""
    if isinstance(chosen, slice):
        return range(*chosen.indices(size))
    if any(not -size <= number < size for number in chosen):
        return None
    return tuple(number % size for number in chosen)
