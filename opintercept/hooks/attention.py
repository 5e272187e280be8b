"""`AttentionWeights`: the weights that attention, fused or eager, computes and does not return."""

from __future__ import annotations

import fnmatch
import math
import re
import threading
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch

from opintercept._core.call import OpCall
from opintercept._core.checks import check_choice
from opintercept._core.errors import OpInterceptWarning, caller_level
from opintercept._core.record import Phase
from opintercept._core.tables import Held
from opintercept._core.text import counted, printable
from opintercept._kit.copyable import Copyable
from opintercept._values.attention import Attention, attention_of, product_of, take, without_autocast
from opintercept._values.copies import on_host
from opintercept._values.read import in_graph_capture, is_freed, leaves_out_captured, stored_values

Of = Literal["probabilities", "scores", "entropy"]

_NAMED = re.compile("attn|attention", re.IGNORECASE)
_Selected = tuple[Sequence[int], Sequence[int], torch.Tensor]  # heads, rows, and the weights there
_SHAPES = 8  # output shapes kept per module: some compute several products before they use one as scores


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The weights of one attention call.

    Attributes:
        index: The call's index in its interceptor.
        step: The interceptor's step.
        phase: `"forward"`, or `"recompute"` in a checkpoint.
        module: Qualified name of the module; None if it is not known.
        heads: The heads of the query that were kept.
        rows: The queries that were kept, by their position in the sequence.
        dropout: Probability of the dropout that the operator applies after these weights; NaN for eager attention
            that has already applied its dropout to them.
        values: `[*b, heads, rows, s_k]`, or `[*b, heads, rows]` for the entropy, on the CPU; float64 if the query
            is float64, else float32.
    """

    index: int
    step: int
    phase: Phase
    module: str | None
    heads: Sequence[int]
    rows: Sequence[int]
    dropout: float
    values: torch.Tensor


class AttentionWeights(Held, Copyable):
    """Keeps the weights of every attention, fused or eager.

    **Fused** attention is every `scaled_dot_product_attention`, whichever kernel computes it. The kernel runs as
    always. AttentionWeights computes the weights again as torch's math path does, from the query, the key, the mask,
    the causal flag, the scale and the grouped heads of the call, and uses float32 for shorter dtypes. The result
    differs from the math path's by rounding only: a score by a few units in the last place of
    `scale * sum(abs(query * key))`, a probability, relatively, by about twice that. Dropout, with the probability
    `dropout`, comes after these weights.

    Only the chosen heads and rows are computed, in pieces of 32 MiB. Each call waits for the device.
    `weights["encoder.layers.0.attn"]` looks calls up.

    **Eager** attention is two products with a softmax between them: Hugging Face's `attn_implementation="eager"`,
    torch's math path, and `nn.MultiheadAttention` at dispatch level if it needs weights or takes its fast path on a
    CPU. AttentionWeights recognises the second product: it is batched, and its left operand has the shape of an
    earlier output of the same module, no negative value, and rows that sum to 1 up to rounding. It keeps that operand
    unchanged. After a dropout, rows sum to 1 only on average; such weights are kept, with the dropout in them, if the
    module's name contains "attn" or "attention". The scores of eager attention are not known.

    A program may flatten batch and heads into one dimension before the product. They are separated again if the
    operand is a view of a tensor that has both, as in torch's math path and in BERT, but not in inference mode or in
    `nn.MultiheadAttention`. Otherwise the values are `[b * h, rows, s_k]`, and `heads` selects among `b * h`.

    When a block ends, it warns once about attention that was skipped. It also warns if nothing was kept although
    modules with "attn" or "attention" in their names made products.

    Args:
        of: `"probabilities"` is the softmax over the keys, zeros for a query that sees none. `"scores"` is the input
            of the softmax, `scale * query @ key.T + mask`, -inf where a key is masked. `"entropy"` is
            `-sum(p * log(p))` of each row of probabilities, in nats (Shannon 1948).
        heads: One or more heads of the query, or a slice; None means all. Negative numbers count from the end.
        rows: The same for the queries: `-1` is the last of the sequence.

    Attributes:
        calls: All that was kept, in the order in which the calls ended; you may clear this list.

    Raises:
        TypeError: `heads` or `rows` contains something other than whole numbers.
        ValueError: `of` is unknown.

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
    fresh: ClassVar = {"_lock": threading.RLock, "_shapes": dict}

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
        self._told: Counter[str] = Counter()  # the part of `_skipped` that a warning has named
        self._kept = False  # whether this block has kept anything
        self._products: Counter[str] = Counter()  # by modules named like attention, until something is kept
        # Shapes of earlier outputs, which may be scores, by thread, module and phase; a deque forgets the oldest.
        self._shapes: dict[tuple[int, str | None, Phase], deque[tuple[int, ...]]] = {}
        self._lock = threading.RLock()

    def _held(self) -> str:
        return f"{self.of!r}, {counted(len(self.calls), 'call')}"

    def post(self, call: OpCall) -> None:
        """Keep the weights if the call is attention."""
        if call.phase == "backward" or call.op.endswith("_backward"):
            return
        attention = attention_of(call)
        try:
            if isinstance(attention, str):
                raise _Unkept(attention)
            if attention is not None:
                self._keep(call, attention)
            elif (product := product_of(call)) is not None:
                self._keep_eager(call, *product)
            elif not self._kept:
                self._named_like_attention(call)
        except (_Unkept, torch.OutOfMemoryError) as error:
            reason = str(error).partition("\n")[0]
            with self._lock:
                self._skipped[f"{call.op}: {reason}"] += 1

    def enter(self) -> None:
        """Begin a block."""
        self._kept = False
        self._products.clear()
        self._shapes.clear()

    def exit(self) -> None:
        """Warn about attention that was skipped, or if nothing was kept although there seems to be attention."""
        new = self._skipped - self._told
        self._told = Counter(self._skipped)
        if new:
            reasons = "; ".join(f"{why} ({count} times)" if count > 1 else why for why, count in new.items())
            text = f"AttentionWeights skipped {new.total()} attention calls: {printable(reasons, 500)}"
        elif self._products and not self._kept:
            number, name = self._products.total(), printable(self._products.most_common(1)[0][0], 200)
            text = (
                f"AttentionWeights kept nothing, although modules named like attention, such as {name!r}, made "
                f"{number} products; it recognises scaled_dot_product_attention, and softmax(Q K.T) V as two batched "
                "products"
            )
        else:
            return
        warnings.warn(text, OpInterceptWarning, stacklevel=caller_level())

    def _named_like_attention(self, call: OpCall) -> bool:
        """Whether the module is named like attention."""
        name = call.module
        found = name is not None and _NAMED.search(name) is not None
        if found and not self._kept:
            with self._lock:
                self._products[str(name)] += 1
        return found

    def _keep_eager(self, call: OpCall, lhs: torch.Tensor, output: torch.Tensor) -> None:
        """Keep the left operand of a product if it is attention weights."""
        named = self._named_like_attention(call)
        shapes = self._shapes.setdefault((threading.get_ident(), call.module, call.phase), deque(maxlen=_SHAPES))
        shape, found = tuple(lhs.shape), None
        if shape in shapes:
            shapes.remove(shape)  # this operand was made of those scores, whether or not it is weights
            with nullcontext() if named else suppress(_Unkept):
                found = None if leaves_out_captured(lhs, self) else self._weights_in(lhs, named)
        if found is None:
            shapes.append(tuple(output.shape))
            return
        weights, dropout, selected = found
        heads, rows, chosen = selected or self._selected(weights)
        values = _empty(tuple(chosen.shape), chosen.dtype)
        values.copy_(chosen)
        self._append(call, heads, rows, dropout, values)

    def _weights_in(
        self, lhs: torch.Tensor, may_be_dropped: bool
    ) -> tuple[torch.Tensor, float, _Selected | None] | None:
        """The left operand of a product, with the shape of an earlier output, if it is the output of a softmax.

        Comes with the probability of the dropout that follows, NaN if it has been applied, and from a device with what
        is to be kept. `may_be_dropped` says whether rows may sum to 1 only on average, as they do after a dropout.
        Raises if it may be weights and cannot be kept.
        """
        values = stored_values(lhs)
        if values is None or type(values) not in (torch.Tensor, torch.nn.Parameter):
            raise _Unkept("its operands have no values")
        if not values.is_floating_point() or not values.numel():
            return None
        selected, weights = None, _with_heads(lhs, values)
        sums, low = values.sum(-1, dtype=torch.float64), values.amin()
        if not values.is_cpu:
            with suppress(_Unkept):  # raised again, if these are weights
                selected = self._selected(weights)
            if selected is None:
                sums, low = on_host([sums, low])
            else:
                sums, low, chosen = on_host([sums, low, selected[2]])
                selected = *selected[:2], chosen
        dropout = _dropout_in(sums, low.item(), values, may_be_dropped)
        return None if dropout is None else (weights, dropout, selected)

    def _selected(self, weights: torch.Tensor) -> _Selected:
        """The chosen heads and rows, and the weights there, or their entropies."""
        if self.of == "scores":
            raise _Unkept('the scores of eager attention are not known; of="probabilities" works')
        heads = _places("heads", self._heads, weights.shape[-3])
        rows = _places("rows", self._rows, weights.shape[-2])
        dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
        chosen = take(take(weights.detach(), -3, heads), -2, rows).to(dtype)
        return heads, rows, torch.special.entr(chosen).sum(-1) if self.of == "entropy" else chosen

    def _append(
        self, call: OpCall, heads: Sequence[int], rows: Sequence[int], dropout: float, values: torch.Tensor
    ) -> None:
        kept = AttentionCall(call.index, call.step, call.phase, call.module, heads, rows, dropout, values)
        self._kept = True
        self.calls.append(kept)

    def _keep(self, call: OpCall, attention: Attention) -> None:
        """Compute and keep the weights of fused attention."""
        query = attention.query
        if any(is_freed(tensor) for tensor in (query, attention.key, attention.mask) if tensor is not None):
            raise _Unkept("the memory of its operands was freed")
        heads = _places("heads", self._heads, query.shape[-3])
        rows = _places("rows", self._rows, query.shape[-2])
        if in_graph_capture(query):
            raise _Unkept("a CUDA graph is being captured, so no value can be read")
        try:
            with without_autocast(query.device):
                values = self._values(attention.detached(), heads, rows)
        except RuntimeError as error:  # vmap and other transforms wrap tensors, whose values cannot be read
            raise _Unkept(str(error).partition("\n")[0]) from None
        if type(values) is not torch.Tensor:
            raise _Unkept("its operands are fake and have no values")
        self._append(call, heads, rows, attention.dropout, values)

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
        """The calls of modules whose qualified name matches a glob, in which `*` also matches dots.

        Raises:
            KeyError: No call of a matching module was kept.
        """
        matches = re.compile(fnmatch.translate(module)).fullmatch
        found = [call for call in self.calls if call.module is not None and matches(call.module)]
        if not found:
            known = ", ".join(dict.fromkeys(repr(call.module) for call in self.calls)) or "none"
            raise KeyError(
                f"no attention was kept from a module named {module!r}; kept: {known}; "
                f"skipped: {self.skipped or 'none'}"
            )
        return found

    @property
    def skipped(self) -> dict[str, int]:
        """How many attention calls were not kept, by operator and reason."""
        return dict(self._skipped)


class _Unkept(Exception):
    """Attention that cannot be kept; the message says why."""


def _dropout_in(sums: torch.Tensor, low: float, values: torch.Tensor, may_be_dropped: bool) -> float | None:
    """The dropout in weights with these sums and this smallest value, as `_weights_in` says; None if they are none."""
    if not bool(torch.isfinite(sums).all()):
        raise _Unkept("its weights are not all finite")
    if low < 0:
        return None
    # The softmax was computed in at least float32 and rounded to the dtype, so each weight is off by at most eps / 2.
    eps = torch.finfo(values.dtype).eps
    close = (sums - 1).abs() <= eps + values.shape[-1] * min(eps, 2.0**-23)
    some, empty = bool(close.any()), sums == 0  # a query that sees no key
    if some and bool((close | empty).all()):
        return 0.0
    if may_be_dropped and low == 0 and abs(float(sums.mean()) - 1) < 0.25:
        return math.nan
    raise _Unkept("the rows of its weights do not sum to 1")


def _with_heads(lhs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The weights as `[*b, h, s_q, s_k]` if the operand is a flattened view of such a tensor."""
    base = lhs._base
    whole = base is not None and base.numel() == values.numel() and base.shape[-2:] == values.shape[-2:]
    return values.reshape(base.shape) if base is not None and whole and base.dim() > values.dim() else values


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor that may be changed outside inference mode too."""
    if not torch.is_inference_mode_enabled():
        return torch.empty(shape, dtype=dtype, device="cpu")
    mode = torch.inference_mode(False)
    try:
        mode.__enter__()  # inside the try: an interrupt may be raised right after it
        return torch.empty(shape, dtype=dtype, device="cpu")
    finally:
        with suppress(AttributeError):  # the interrupt came before it
            mode.__exit__(None, None, None)


def _chosen(name: str, value: Any) -> slice | tuple[int, ...]:
    if value is None:
        return slice(None)
    if isinstance(value, slice):
        return value
    numbers = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise TypeError(f"{name} must be a whole number, several of them or a slice, got {value!r}")
    return numbers


def _places(name: str, chosen: slice | tuple[int, ...], size: int) -> Sequence[int]:
    """The chosen positions among `size`."""
    if isinstance(chosen, slice):
        return range(*chosen.indices(size))
    if any(not -size <= number < size for number in chosen):
        raise _Unkept(f"{name} {chosen} are out of range: there are {size}")
    return tuple(number % size for number in chosen)
