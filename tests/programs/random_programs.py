"""Random small programs of the matmul family: a strategy for Hypothesis, how to run one, and what it leaves behind.

A program is plain data: leaves with a memory layout, and steps that take tensors from a growing pool. Some steps fail.
A program makes its own values, so that two runs must agree in every bit.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}

# The shapes that an operator takes and returns. Each word is a shape and each letter a size: "mk kn mn" stands for
# [m, k] @ [k, n] -> [m, n]. 1 is the size 1, and a dot the shape of a number.
_ADDMM = ("mn mk kn mn", "n mk kn mn", "1n mk kn mn", "m1 mk kn mn", ". mk kn mn")
_BADDBMM = ("bmn bmk bkn bmn", "mn bmk bkn bmn", "b1n bmk bkn bmn", ". bmk bkn bmn")
_ADDBMM = ("mn bmk bkn mn", "n bmk bkn mn")
_ADDMV = ("m mk k m", "1 mk k m", ". mk k m")
_MATMUL = (
    *("k k .", "mk k m", "k kn n", "mk kn mn", "bmk k bm", "k bkn bn", "bmk kn bmn", "mk bkn bmn", "bmk bkn bmn"),
    *("1mk bkn bmn", "cbmk bkn cbmn", "c1mk bkn cbmn", "cbmk kn cbmn"),
)
SIGNATURES: dict[str, tuple[str, ...]] = {
    "mm": ("mk kn mn",),
    "bmm": ("bmk bkn bmn",),
    "mv": ("mk k m",),
    "dot": ("k k .",),
    "vdot": ("k k .",),
    "addmm": _ADDMM,
    "baddbmm": _BADDBMM,
    "addbmm": _ADDBMM,
    "addmv": _ADDMV,
    "_addmm_activation": _ADDMM[:2],
    "matmul": _MATMUL,
    "inner": ("k k .", "mk nk mn", "bmk nk bmn"),
    "linear": ("k nk n", "mk nk mn", "bmk nk bmn", "mk nk n mn", "bmk nk n bmn"),
    "bilinear": ("bi bj oij bo", "bi bj oij o bo"),
    "ik,kj->ij": ("mk kn mn",),
    "bik,bjk->bij": ("bmk bnk bmn",),
    "ij,jk,kl": ("mk kn np mp",),
    "tensordot": ("mkl kln mn",),
    "multi_dot": ("mk kn np mp", "k kn np p"),
    "attention": ("bhsd bhtd bhtd bhsd",),
    "_foreach_mm": ("mk kn mn",),
}
IN_PLACE = {"addmm_": "mn mk kn mn", "baddbmm_": "bmn bmk bkn bmn", "addbmm_": "mn bmk bkn mn", "addmv_": "m mk k m"}
_OUT = ("mm", "bmm", "mv", "dot", "vdot", "addmm", "baddbmm", "addbmm", "addmv", "matmul", "inner", "multi_dot")
_SCALED = ("addmm", "baddbmm", "addbmm", "addmv", *IN_PLACE)  # those with alpha and beta
# Steps in between: views, copies, arithmetic, random numbers, and writes to a tensor that is still needed.
_AROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "mT": lambda x: x.mT if x.dim() > 1 else x.view_as(x),
    "slice": lambda x: x[..., 1:] if x.dim() else x.view_as(x),
    "first": lambda x: x[0],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "conj": lambda x: x.conj(),
    "neg_view": torch._neg_view,
    "tanh": torch.tanh,
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "dropout": F.dropout,
    "double_": lambda x: x.mul_(2),
}
_SIZES = st.sampled_from((2, 3, 1, 4, 0, 20))
_DTYPES = st.sampled_from(
    (torch.float32, torch.bfloat16, torch.complex64, torch.float64, torch.float16, torch.int64, torch.int8)
)
_LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "overlapping", "conj", "neg")


@dataclass(frozen=True)
class Leaf:
    """A tensor that the program starts from.

    Attributes:
        grad: What requires a gradient: `"nothing"`, the tensor `"itself"`, or the `"base"` that it is a view of.
        whole: Whether its values are whole numbers, whose products are exact.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"
    grad: str = "nothing"
    seed: int = 0
    whole: bool = False

    def make(self) -> tuple[Tensor, Tensor]:
        """Make the tensor and its base."""
        generator = torch.Generator().manual_seed(self.seed)
        layout, shape = self.layout, self.shape
        if not shape or (layout == "transposed" and len(shape) < 2):
            layout = "contiguous"
        stored = {
            "transposed": (*shape[:-2], *reversed(shape[-2:])),
            "sliced": (*shape[:-1], 2 * shape[-1] + 1) if shape else (),
            "expanded": (1, *shape[1:]),
            "overlapping": (sum(shape) + 2,),
        }.get(layout, shape)
        if self.whole or not (self.dtype.is_floating_point or self.dtype.is_complex):
            base = torch.randint(-2, 3, stored, generator=generator).to(self.dtype)
        else:
            base = torch.randn(stored, generator=generator, dtype=torch.promote_types(self.dtype, torch.float32))
            base = base.to(self.dtype)
        base.requires_grad_(self.grad == "base")
        view = {
            "transposed": lambda: base.mT,
            "sliced": lambda: base[..., 1::2],
            "expanded": lambda: base.expand(shape),
            "overlapping": lambda: base.as_strided(shape, (1,) * len(shape), 1),
            "conj": lambda: base.conj(),
            "neg": lambda: torch._neg_view(base),
        }.get(layout, lambda: base)()
        if self.grad == "itself":
            view = view.detach().requires_grad_()
        return view, base


@dataclass(frozen=True)
class Step:
    """One operation on tensors in the pool, to which its result is added.

    Attributes:
        out: Index of `out=` in the pool.
        options: Keyword arguments.
    """

    op: str
    operands: tuple[int, ...]
    out: int | None = None
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class RandomProgram:
    """The items of the pool in order, the context of torch to run in, and how gradients are computed."""

    items: tuple[Leaf | Step, ...]
    context: str = "grad"
    backward: str = "none"


def function_of(op: str) -> Callable[..., Any]:
    if op in _AROUND:
        return _AROUND[op]
    if "," in op:
        return lambda *operands: torch.einsum(op, *operands)
    if op == "attention":
        # A copy: for a query that overlaps itself, torch computes other values in each run.
        return lambda q, k, v: F.scaled_dot_product_attention(q.clone(), k, v, dropout_p=0.5 if q.size(0) == 1 else 0.0)
    if op == "_foreach_mm":
        return lambda a, b: torch._foreach_mm([a], [b])[0]
    if op == "multi_dot":
        return lambda *operands, **options: torch.linalg.multi_dot(operands, **options)
    if op == "tensordot":
        return lambda a, b: torch.tensordot(a, b, dims=([1, 2], [0, 1]))
    if op.endswith("_"):
        return lambda target, *operands, **options: getattr(target, op)(*operands, **options)
    function: Callable[..., Any] = getattr(torch, op, None) or getattr(F, op)
    return function


UNFIT = "?"  # among the letters: an operand does not fit


@dataclass
class _Drawn:
    """The pool drawn so far, with the shape that each item should have, or None if that is unknown."""

    draw: st.DrawFn
    dtype: torch.dtype
    layouts: tuple[str, ...]
    failures: bool
    leaves: dict[str, Any]
    items: list[Leaf | Step] = field(default_factory=list)
    shapes: list[tuple[int, ...] | None] = field(default_factory=list)

    def leaf(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> int:
        dtype = dtype or self.dtype
        inexact = dtype.is_floating_point or dtype.is_complex
        layouts = [x for x in self.layouts if (x != "conj" or dtype.is_complex) and (x != "neg" or inexact)]
        grads = st.sampled_from(("nothing", "itself", "base")) if inexact else st.just("nothing")
        drawn = {"layout": self.draw(st.sampled_from(layouts)), "grad": self.draw(grads), **self.leaves}
        self.items.append(Leaf(shape, dtype, seed=len(self.items), **drawn))
        self.shapes.append(shape)
        return len(self.items) - 1

    def operand(self, word: str, sizes: dict[str, int]) -> int:
        """Choose a tensor of the pool that fits, a new leaf, or sometimes one that does not fit."""
        if self.failures and self.items and self.draw(st.integers(0, 29)) == 29:
            sizes[UNFIT] = 0
            return self.draw(st.integers(0, len(self.items) - 1))
        fits = [i for i, shape in enumerate(self.shapes) if shape is not None and _match(word, shape, sizes)]
        chosen = self.draw(st.sampled_from((*reversed(fits), None))) if fits else None
        if chosen is None:
            for letter in word:
                if letter.isalpha() and letter not in sizes:
                    sizes[letter] = self.draw(_SIZES)
            return self.leaf(_shape(word, sizes))
        sizes.update(_match(word, self.shapes[chosen] or (), sizes) or {})
        return chosen

    def step(self, op: str, signature: str) -> None:
        *words, result = signature.split()
        sizes: dict[str, int] = {}
        operands = tuple(self.operand(word, sizes) for word in words)
        shape = None if UNFIT in sizes else _shape(result, sizes)
        options: list[tuple[str, Any]] = []
        if op in _SCALED and self.draw(st.booleans()):
            scales = (0, 2, -1) if self.leaves.get("whole") else (0, 2, 0.5)
            options = [(name, self.draw(st.sampled_from(scales))) for name in ("beta", "alpha")]
        out = None
        if op in _OUT and self.draw(st.integers(0, 3)) == 3:
            out = self._out(result, shape, sizes)
        self.items.append(Step(op, operands, out, tuple(options)))
        self.shapes.append(shape)

    def _out(self, word: str, shape: tuple[int, ...] | None, sizes: dict[str, int]) -> int | None:
        kinds = ("fits", "empty", "fits", "resized", "any", "dtype") if self.failures else ("fits", "empty")
        kind = self.draw(st.sampled_from(kinds))
        if shape is None:
            return None
        if kind == "fits":
            return self.operand(word, sizes)
        if kind == "any" and self.items:
            return self.draw(st.integers(0, len(self.items) - 1))
        if kind == "dtype":
            return self.leaf(shape, torch.int32 if self.dtype != torch.int32 else torch.float32)
        return self.leaf((0,) if kind == "empty" else (2, 3))

    def around(self) -> None:
        op = self.draw(st.sampled_from(tuple(_AROUND)))
        where = self.draw(st.integers(0, len(self.items) - 1))
        shape = self.shapes[where]
        if shape is not None:
            if op == "first":
                shape = shape[1:] if shape and shape[0] else None
            elif op == "mT":
                shape = (*shape[:-2], *reversed(shape[-2:]))
            elif op == "unsqueeze":
                shape = (1, *shape)
            elif op == "slice" and shape:
                shape = (*shape[:-1], max(shape[-1] - 1, 0))
        self.items.append(Step(op, (where,)))
        self.shapes.append(shape)


def _match(word: str, shape: tuple[int, ...], sizes: dict[str, int]) -> dict[str, int] | None:
    """The sizes of the letters if the shape fits the word, else None."""
    if len(word.replace(".", "")) != len(shape):
        return None
    found: dict[str, int] = {}
    for letter, size in zip(word, shape, strict=False):
        known = 1 if letter == "1" else found.get(letter, sizes.get(letter, size))
        if known != size:
            return None
        if letter != "1":
            found[letter] = size
    return found or {".": 0}


def _shape(word: str, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(1 if letter == "1" else sizes[letter] for letter in word.replace(".", ""))


@st.composite
def random_programs(
    draw: st.DrawFn,
    /,
    *,
    ops: tuple[str, ...] = (*SIGNATURES, *IN_PLACE),
    dtypes: st.SearchStrategy[torch.dtype] = _DTYPES,
    contexts: tuple[str, ...] = tuple(CONTEXTS),
    backwards: tuple[str, ...] = ("once", "none", "twice", "create_graph"),
    most: int = 6,
    layouts: tuple[str, ...] = _LAYOUTS,
    failures: bool = True,
    **leaves: Any,
) -> RandomProgram:
    """Programs of at most `most` matmuls, with as many other operations in between.

    Args:
        failures: Whether some operands do not fit, nor some targets of `out=` and in-place forms.
        leaves: Attributes that all leaves share.
    """
    drawn = _Drawn(draw, draw(dtypes), layouts, failures, leaves)
    for _ in range(draw(st.integers(1, most))):
        op = draw(st.sampled_from(ops))
        if op == "attention" and not drawn.dtype.is_floating_point:
            op = "bmm"
        drawn.step(op, draw(st.sampled_from(SIGNATURES.get(op) or (IN_PLACE[op],))))
        if failures and draw(st.booleans()):
            drawn.around()
    return RandomProgram(tuple(drawn.items), draw(st.sampled_from(contexts)), draw(st.sampled_from(backwards)))


Call = Callable[[Callable[..., Any], Step, list[Any], dict[str, Any]], Any]


def _call(function: Callable[..., Any], step: Step, operands: list[Any], options: dict[str, Any]) -> Any:
    return function(*operands, **options)


@dataclass
class Run:
    """What a program did and left behind.

    Attributes:
        steps: Type and text of the exceptions and warnings of each step.
        live: Every tensor of the pool, every base, and their gradients.
        tensors: Descriptions of the same tensors.
        random_state: State of the global generator.
    """

    steps: list[Any]
    live: list[Tensor] = field(compare=False)
    tensors: list[Any]
    random_state: bytes


def execute(
    program: RandomProgram,
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    call: Call = _call,
    failed: Callable[[bool], None] = lambda above: None,
) -> Run:
    """Run a program from a fixed seed under a watcher.

    Args:
        call: Calls the function of a matmul.
        failed: Called for each matmul that raises, with whether autograd may have refused it.
    """
    torch.manual_seed(5)
    pool: list[Any] = []
    bases: list[Tensor] = []
    steps: list[Any] = []
    defined = True
    for item in program.items:
        if isinstance(item, Leaf):
            view, base = item.make()
            bases.append(base)
            pool.append(view)
        else:
            pool.append(None)
    sizes = {
        base.untyped_storage()._cdata: base.untyped_storage().nbytes() for base in (*bases, *pool) if base is not None
    }
    start = torch._C._autograd._get_sequence_nr()

    @contextmanager
    def noted(what: Any, *, step: bool = False, by_autograd: bool = False) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            except Exception as error:
                chain = (error.__cause__, error.__context__, getattr(error, "__notes__", None))
                steps.append((what, type(error), str(error), chain))
                if step:
                    failed(by_autograd)
        steps.extend((what, warning.category, str(warning.message)) for warning in caught)

    torch.set_warn_always(True)
    try:
        with watch():
            with CONTEXTS[program.context]():
                for position, item in enumerate(program.items):
                    if isinstance(item, Leaf):
                        continue
                    operands = [pool[operand] for operand in item.operands]
                    options = dict(item.options)
                    if item.out is not None:
                        options["out"] = pool[item.out]
                    if any(x is None for x in (*operands, *options.values())) or _resized(item, operands, options):
                        continue
                    defined = defined and not _overlap(item, operands, options)
                    size = _size(options)
                    around = item.op in _AROUND
                    differentiable = any(
                        x.requires_grad for x in (*operands, *options.values()) if isinstance(x, Tensor)
                    )
                    with noted((position, item), step=not around, by_autograd=differentiable):
                        pool[position] = (_call if around else call)(function_of(item.op), item, operands, options)
                    # A step that fails half-way leaves memory uninitialised.
                    defined = defined and (pool[position] is not None or size == _size(options))
            with noted("backward"):
                _backward(program, pool, bases)
    finally:
        torch.set_warn_always(False)
    tensors = [tensor for tensor in (*pool, *bases) if tensor is not None]
    gradients = [_answer(partial(_gradient, tensor)) for tensor in tensors]
    tensors += [gradient for gradient in gradients if isinstance(gradient, Tensor)]
    return Run(steps, tensors, _described(tensors, start, defined, sizes), torch.get_rng_state().numpy().tobytes())


def _gradient(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None


def _overlap(step: Step, operands: list[Tensor], options: dict[str, Any]) -> bool:
    """Whether a step writes to an operand, or twice to one place, so that values depend on the order of the writes."""
    target = operands[0] if step.op in IN_PLACE else options.get("out")
    if target is not None and target.numel() > 1:
        span = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True)) + 1
        if target.numel() > span:
            return True
    read = operands[1:] if step.op in IN_PLACE else operands
    return target is not None and any(target.untyped_storage()._cdata == x.untyped_storage()._cdata for x in read)


def _resized(step: Step, operands: list[Tensor], options: dict[str, Any]) -> bool:
    """Whether `out=` is an operand that torch may resize and then read at its old size, at which it crashes."""
    out = options.get("out")
    if out is None or not _overlap(step, operands, options):
        return False
    square = out.dim() >= 2 and out.size(-1) == out.size(-2) and all(x.shape == out.shape for x in operands[-2:])
    whole = ("mm", "addmm", "matmul", "inner") if out.dim() == 2 else ("bmm", "baddbmm", "matmul")
    return not (square and step.op in whole)


def _size(options: dict[str, Any]) -> int | None:
    return options["out"].untyped_storage().nbytes() if "out" in options else None


def _backward(program: RandomProgram, pool: list[Any], bases: list[Tensor]) -> None:
    outputs = [x for x, item in zip(pool, program.items, strict=True) if x is not None and isinstance(item, Step)]
    outputs = [x for x in dict.fromkeys(outputs) if x.requires_grad]
    if program.backward == "none" or not outputs:
        return
    generator = torch.Generator().manual_seed(3)
    gradients = [
        torch.randint(-2, 3, x.shape, generator=generator).to(x.dtype) if position % 2 else torch.ones_like(x)
        for position, x in enumerate(outputs)
    ]
    if program.backward != "create_graph":
        for repeat in range(2 if program.backward == "twice" else 1):
            torch.autograd.backward(outputs, gradients, retain_graph=program.backward == "twice" and not repeat)
        return
    leaves = [x for x in dict.fromkeys((*pool, *bases)) if x is not None and x.is_leaf and x.requires_grad]
    first = torch.autograd.grad(outputs, leaves, gradients, create_graph=True, allow_unused=True)
    needed = [x for x in first if x is not None and x.requires_grad]
    pool.extend(x for x in first if x is not None)
    if needed:
        torch.autograd.backward(needed, [torch.ones_like(x) for x in needed])


_ASKED: dict[str, Callable[[Tensor], Any]] = {
    "like": lambda x: (type(x), x.dtype, tuple(x.shape), x.stride(), x.storage_offset()),
    "bits": lambda x: (x.is_conj(), x.is_neg(), x._is_zerotensor(), x.is_inference()),
    "version": lambda x: x._version,
    "grad": lambda x: (x.requires_grad, x.is_leaf, x._is_view(), x.retains_grad),
}


def _described(tensors: list[Tensor], start: int, values: bool, sizes: dict[int, int]) -> list[Any]:
    """Describe tensors so that two runs can be compared. Where torch refuses an answer, its message stands instead.

    Args:
        sizes: Bytes of each storage at the start. A storage that has grown since is uninitialised in part.
    """
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    nodes: dict[Any, int] = {}
    found = []
    for position, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()
        asked: dict[str, Callable[[], Any]] = {
            "is": partial(objects.setdefault, id(tensor), position),
            "shares": partial(storages.setdefault, storage._cdata, position),
            "graph": partial(_graph_of, tensor, nodes, start),
            **{what: partial(ask, tensor) for what, ask in _ASKED.items()},
        }
        if values:
            asked["values"] = partial(_digest, tensor)
            if sizes.get(storage._cdata) == storage.nbytes():
                asked["beside"] = partial(_digest, _bytes(storage))
        found.append({what: _answer(ask) for what, ask in asked.items()})
    return found


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except RuntimeError as error:
        return str(error)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A storage as a tensor, including what a view of it leaves out."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _digest(tensor: Tensor) -> str:
    """Hash the bits: a comparison of values takes -0.0 for 0.0, and NaN equals nothing."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return hashlib.blake2b(plain.view(torch.uint8).numpy().data if len(plain) else b"", digest_size=8).hexdigest()


def _graph_of(tensor: Tensor, nodes: dict[Any, int], start: int) -> Any:
    return _graph(tensor.grad_fn, nodes, start)


def _graph(node: Any, nodes: dict[Any, int], start: int) -> Any:
    """The nodes behind a tensor that are not listed yet, with their sequence numbers."""
    if node is None or node in nodes:
        return nodes.get(node)
    nodes[node] = len(nodes)
    number = node._sequence_nr()
    inner = [(_graph(behind, nodes, start), index) for behind, index in node.next_functions]
    return node.name(), number - start if number < 1 << 62 else None, inner
