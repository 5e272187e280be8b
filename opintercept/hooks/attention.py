"""`AttentionWeights`: the weights that attention, fused or eager, does not return."""

from __future__ import annotations

import fnmatch
import math
import re
import threading
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from opintercept._call import OpCall
from opintercept._checks import check_choice
from opintercept._errors import OpInterceptWarning, caller_level
from opintercept._record import Phase
from opintercept._text import printable
from opintercept.hooks._attention import Attention, attention_of, product_of, take, without_autocast
from opintercept.hooks._values import captured, is_freed, stored_values

Of = Literal["probabilities", "scores", "entropy"]

_NAMED = re.compile("attn|attention", re.IGNORECASE)
_SHAPES = 8  # of a module's products that are remembered: some compute more than one of scores


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
        dropout: Probability of the dropout that the operator applies after these weights. NaN for eager attention
            whose weights have been through a dropout already.
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
    """Keeps the weights of every attention, fused or eager.

    **Fused** is every `scaled_dot_product_attention`, whichever kernel computes it.

    The kernel runs as it would; the weights are computed once more, from the query, the key, the mask, the causal
    flag, the scale and the grouped heads of the call, as torch's math path does it, in float32 for the shorter
    dtypes. They differ from the math path's by rounding only: of a score, by some units in the last place of
    `scale * sum(abs(query * key))`; of a probability, relatively by about twice that difference.
    They are what the operator has before dropout, whose probability is `dropout`.

    Only the chosen heads and rows are computed, in pieces of 32 MiB, and they wait for the device.
    `weights["encoder.layers.0.attn"]` looks calls up.

    **Eager** attention is two products with a softmax between them: Hugging Face's `attn_implementation="eager"`,
    torch's math path, `nn.MultiheadAttention` at dispatch level where it needs weights or takes its fast path on a
    CPU. It is found by its second product: a batched one, whose left operand has the shape of an output of the same
    module before, no negative value, and rows that sum to 1 but for rounding. That operand is kept as it is. Behind a
    dropout the rows sum to 1 on average only; such weights are kept, dropout included, if the module's name has
    "attn" or "attention" in it. Their scores are not known.

    A batched product may have flattened batch and heads into one dimension. They are told apart if the operand is
    a view of a tensor that has both, as in torch's math path and in BERT, but not in inference mode or in
    `nn.MultiheadAttention`. Else the values are `[b * h, rows, s_k]`, and `heads` chooses among `b * h`.

    A block that ends warns once of attentions that were skipped. It also warns if it has kept nothing although
    modules with "attn" or "attention" in their names made products.

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
        >>> [call] = weights["MultiheadAttention"]
        >>> call.values.shape, torch.allclose(call.values.sum(-1), torch.ones(1, 2, 1))
        (torch.Size([1, 2, 1, 5]), True)
    """

    reads = ("module",)

    def __init__(
        self,
        of: Of = "probabilities",
        *,
        heads: int | Iterable[int] | slice | None = None,
        rows: int | Iterable[int] | slice | None = None,
    ) -> None:
        check_choice("of", of, get_args(Of))
        self.of = of
        self.calls: list[AttentionCall] = []
        self._heads = _chosen("heads", heads)
        self._rows = _chosen("rows", rows)
        self._skipped: Counter[str] = Counter()
        self._told: Counter[str] = Counter()  # those of the skipped that a warning has named
        self._kept = False  # whether the block has kept something
        self._products: Counter[str] = Counter()  # of modules that look like attention, until something is kept
        # Shapes that scores may have, by thread, module and pass; a deque forgets the oldest.
        self._shapes: dict[tuple[int, str | None, Phase], deque[tuple[int, ...]]] = {}
        self._lock = threading.RLock()

    def post(self, call: OpCall) -> None:
        """Compute and keep the weights of an attention."""
        if call.phase == "backward" or call.op.endswith("_backward"):
            return
        attention = attention_of(call)
        if attention is not None:
            kept = attention if isinstance(attention, str) else self._keep(call, attention)
        else:
            product = product_of(call)
            kept = None if product is None else self._keep_eager(call, *product)
            if product is None and not self._kept:
                self._is_named(call)
        if kept is not None:
            with self._lock:
                self._skipped[f"{call.op}: {kept}"] += 1

    def enter(self) -> None:
        """Begin a block."""
        self._kept = False
        self._products.clear()
        self._shapes.clear()

    def exit(self) -> None:
        """Warn of what was skipped, and if nothing was kept where there should have been something."""
        new = self._skipped - self._told
        self._told = Counter(self._skipped)
        if new:
            reasons = "; ".join(f"{why} ({count} times)" if count > 1 else why for why, count in new.items())
            text = f"AttentionWeights has skipped {new.total()} attention calls: {printable(reasons, 500)}"
        elif self._products and not self._kept:
            number, name = self._products.total(), printable(self._products.most_common(1)[0][0], 200)
            text = (
                f"AttentionWeights has kept nothing, though modules that look like attention, {name!r} for one, "
                f"made {number} products; it knows scaled_dot_product_attention and softmax(Q K.T) V in two "
                "batched products"
            )
        else:
            return
        warnings.warn(text, OpInterceptWarning, stacklevel=caller_level())

    def _is_named(self, call: OpCall) -> bool:
        """Whether the module's name looks like an attention's."""
        name = call.module
        found = name is not None and _NAMED.search(name) is not None
        if found and not self._kept:
            with self._lock:
                self._products[str(name)] += 1
        return found

    def _keep_eager(self, call: OpCall, lhs: torch.Tensor, output: torch.Tensor) -> str | None:
        """Keep the weights that a product takes on its left; a reason if that is not possible."""
        named = self._is_named(call)
        shapes = self._shapes.setdefault((threading.get_ident(), call.module, call.phase), deque(maxlen=_SHAPES))
        shape = tuple(lhs.shape)
        found = _weights_in(lhs, named) if shape in shapes and not captured(lhs, "AttentionWeights") else None
        if shape in shapes:
            shapes.remove(shape)  # whatever became of them, this was made of those scores
        if found is None:
            shapes.append(tuple(output.shape))
            return None
        if isinstance(found, str):
            return found
        weights, dropout = found
        if self.of == "scores":
            return "the scores of eager attention are not known, its probabilities are"
        heads, rows, reason = self._places(weights.shape[-3], weights.shape[-2])
        if reason:
            return reason
        dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
        chosen = take(take(weights.detach(), -3, heads), -2, rows).to(dtype)
        if self.of == "entropy":
            chosen = torch.special.entr(chosen).sum(-1)
        values = _empty(tuple(chosen.shape), dtype)
        values.copy_(chosen)
        self._append(call, heads, rows, dropout, values)
        return None

    def _places(self, heads: int, rows: int) -> tuple[Sequence[int], Sequence[int], str | None]:
        """The chosen heads and rows, and a reason if one of them does not exist."""
        some_heads, some_rows = _places(self._heads, heads), _places(self._rows, rows)
        if some_heads is None:
            return (), (), f"heads {self._heads} of {heads}"
        if some_rows is None:
            return (), (), f"rows {self._rows} of {rows}"
        return some_heads, some_rows, None

    def _append(
        self, call: OpCall, heads: Sequence[int], rows: Sequence[int], dropout: float, values: torch.Tensor
    ) -> None:
        kept = AttentionCall(call.index, call.step, call.phase, call.module, heads, rows, dropout, values)
        self._kept = True
        self.calls.append(kept)

    def _keep(self, call: OpCall, attention: Attention) -> str | None:
        """Keep the weights; a reason if that is not possible."""
        query = attention.query
        if any(is_freed(tensor) for tensor in (query, attention.key, attention.mask) if tensor is not None):
            return "the memory of its operands was freed"
        heads, rows, reason = self._places(query.shape[-3], query.shape[-2])
        if reason:
            return reason
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured, and nothing can be read"
        try:
            with without_autocast(query.device):
                values = self._values(attention.detached(), heads, rows)
        except RuntimeError as error:  # vmap's and other wrapped tensors, whose values cannot be read
            return str(error).partition("\n")[0]
        if type(values) is not torch.Tensor:
            return "its operands are fake and have no values"
        self._append(call, heads, rows, attention.dropout, values)
        return None

    def _values(self, attention: Attention, heads: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        dtype = torch.float64 if attention.query.dtype == torch.float64 else torch.float32
        shape = (*attention.query.shape[:-3], len(heads), len(rows))
        if self.of != "entropy":
            shape = (*shape, attention.key.shape[-2])
        values = _empty(shape, dtype)
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

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = vars(self) | {"calls": [*self.calls], "_skipped": Counter(self._skipped), "_shapes": {}}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    @property
    def skipped(self) -> dict[str, int]:
        """Attentions that are not among the calls, by operator and reason, and how many there were."""
        return dict(self._skipped)


def _weights_in(lhs: torch.Tensor, may_be_dropped: bool) -> tuple[torch.Tensor, float] | str | None:
    """Tell whether the left operand of a product with the value is a softmax's result.

    Args:
        lhs: Has the shape of the scores that were computed before.
        may_be_dropped: Whether its rows may also sum to 1 on average only, as they do behind a dropout.

    Returns:
        The weights and the probability of their dropout, NaN where one has been applied; a reason if they may
        well be some and cannot be kept; None if they are none.
    """
    values = stored_values(lhs)
    if values is None or type(values) not in (torch.Tensor, torch.nn.Parameter):
        return "its operands have no values" if may_be_dropped else None
    if not values.is_floating_point() or not values.numel():
        return None
    sums = values.sum(-1, dtype=torch.float64)
    if not bool(torch.isfinite(sums).all()):
        return "its weights are not all finite" if may_be_dropped else None
    if bool((values < 0).any()):
        return None
    # A softmax in float32 or more, rounded to the dtype: each of the weights is off by eps / 2 of itself.
    eps = torch.finfo(values.dtype).eps
    close = (sums - 1).abs() <= eps + values.shape[-1] * min(eps, 2.0**-23)
    some, empty = bool(close.any()), sums == 0  # a query that sees no key
    if some and bool((close | empty).all()):
        return _with_heads(lhs, values), 0.0
    if not may_be_dropped:
        return None
    if bool((values == 0).any()) and abs(float(sums.mean()) - 1) < 0.25:
        return _with_heads(lhs, values), math.nan
    return "the rows of its weights do not sum to 1"


def _with_heads(lhs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As `[*b, h, s_q, s_k]` where a batched product was given a view of that."""
    base = lhs._base
    whole = base is not None and base.numel() == values.numel() and base.shape[-2:] == values.shape[-2:]
    return values.reshape(base.shape) if base is not None and whole and base.dim() > values.dim() else values


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that may be changed outside of inference mode as well."""
    if not torch.is_inference_mode_enabled():
        return torch.empty(shape, dtype=dtype, device="cpu")
    mode = torch.inference_mode(False)
    try:
        mode.__enter__()  # in here: an interrupt may come up right after it
        return torch.empty(shape, dtype=dtype, device="cpu")
    finally:
        with suppress(AttributeError):  # it came before
            mode.__exit__(None, None, None)


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
