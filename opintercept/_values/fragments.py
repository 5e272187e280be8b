"""Holds what a generated kernel has written against the operators that it stands for, run in float64.

A kernel may round between two operators, as the graph asks, or may not: the bound allows for both. Invariant: an output
that hangs on the last bits of what is computed, or on a random number, is left out with a reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from opintercept._core.tensors import is_tensor, nested_tensors
from opintercept._ops.fragment import Fragment, FragmentNode, HeldNode, NotTold, Ref
from opintercept._values.precision import product_precision
from opintercept._values.rounding import SIGMA, of_adding, ulp, unit

_TRIALS = 4
_SLACK = 4  # compilers take sums and products apart and together, and approximate functions


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# By packet, without the namespace and underscores at its ends.
_VIEWS = _words("""
    alias detach diagonal expand getitem permute reshape select slice split split_with_sizes squeeze t transpose
    unbind unfold unsqueeze view unsafe_view clone cat stack flip constant_pad_nd repeat
""")
_RANDOM = r"rand|seed|dropout|bernoulli|multinomial|normal_functional|exponential|^uniform|philox"
_MEMORY = _words("""
    as_strided as_strided_scatter view_dtype set empty empty_strided new_empty empty_like
""")
# What jumps: comparisons, and what makes whole numbers of others.
_COMPARED = _words("""
    gt lt le ge eq ne
""")
_JUMPS = _words("""
    floor ceil round trunc frac sign sgn argmax argmin argsort sort topk fmod remainder floor_divide
    searchsorted bucketize nonzero signbit logical_not logical_and logical_or logical_xor isnan isinf kthvalue
    median mode low_memory_max_pool_with_offsets max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool2d fractional_max_pool2d cummax cummin nextafter unique2 digamma
""")
_TIES = _words("""
    argmax argmin sort argsort topk max min median mode kthvalue cummax cummin
""")
_SUMS = (
    r"sum|mean|var|std|norm|prod$|mm$|mv$|dot$|matmul|linear|conv|scatter|index_put|index_add|index_reduce|pool|softmax"
    r"|upsample|grid_sample|embedding_dense|cdist|trace|interpolate"
)
_PRODUCTS = r"mm$|mv$|dot$|matmul|linear|conv|cdist"
_COARSE = r"tanh|erf|gelu|lgamma|bessel|exp$|exp2|pow|sigmoid|silu|sin$|cos$|tan$|log"
_CONVERSION = frozenset(("convert_element_type", "to_copy", "to"))
_LOW = (torch.float32, torch.float16, torch.bfloat16)


class Judged(NamedTuple):
    """One output of a kernel.

    Attributes:
        place: The place of its argument.
        node: Whose value it is.
        output: What the kernel has written.
        exact: What the operators make of the same operands.
        excess: The largest error, in units of what rounding explains; 0 if there is none.
    """

    place: int
    node: FragmentNode
    output: torch.Tensor
    exact: torch.Tensor
    excess: float

    @property
    def deviation(self) -> str:
        """How far off a wrong output is, in words that follow "is"."""
        if math.isfinite(self.excess):
            return f"off by {self.excess:.3g} times what rounding explains"
        output, exact = self.output, self.exact
        other = (output != exact) & ~(output.isnan() & exact.isnan())
        if output.is_floating_point():
            other &= ~(output.isfinite() & exact.isfinite())
        number, instead = (_number_told(each[other].flatten()[0].item()) for each in (output, exact))
        return f"{number} where its operators give {instead}"


def _number_told(value: float | bool) -> str:
    return f"{value:.3g}".replace("nan", "NaN") if isinstance(value, float) else str(value)


Call = Callable[[Callable[..., Any], list[Any], dict[str, Any]], Any]
"""Calls a function with these arguments."""


def _call(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def judge(
    fragment: Fragment, before: Sequence[Any], after: Sequence[Any], call: Call = _call
) -> tuple[list[Judged], dict[int, str]]:
    """Hold the outputs of a launch against its operators.

    Args:
        fragment: What it stands for.
        before: Its arguments before.
        after: The same afterwards.
        call: Calls an operator.

    Returns:
        What could be held, and for other outputs the reason, by the place of the argument.
    """
    left_out = dict(fragment.left_out)
    given: dict[str, torch.Tensor] = {}
    unclear = set(fragment.unclear)
    for place, held in fragment.given.items():
        value = as_held(before[place], held)
        if value is None:
            unclear |= {held.name}
        else:
            given[held.name] = value
    fragment = fragment._replace(unclear=frozenset(unclear))
    written: dict[int, torch.Tensor] = {}
    for place, held in fragment.made.items():
        output = as_held(after[place], held)
        if output is None:
            left_out[place] = "its memory is laid out otherwise than in the graph"
        elif not output.numel():
            left_out[place] = "it is empty"
        else:
            written[place] = output
    judged = []
    evaluation = _Evaluation(fragment, given, call)
    # A mask that the kernel draws is taken as it is.
    drawn = {
        fragment.made[place].name: output
        for place, output in written.items()
        if not output.dtype.is_floating_point and fragment.made[place].name not in given
    }
    masked = _Evaluation(fragment, given | drawn, call)
    for place, output in written.items():
        name = fragment.made[place].name
        try:
            try:
                exact, excess = evaluation.compare(name, output)
            except _Random:
                if not drawn or name in drawn:
                    raise
                exact, excess = masked.compare(name, output)
        except NotTold as reason:
            left_out[place] = str(reason)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            left_out[place] = str(error).partition("\n")[0]
        else:
            judged.append(Judged(place, fragment.nodes[name], output, exact, excess))
    return judged, left_out


def as_held(value: Any, held: HeldNode) -> torch.Tensor | None:
    """An argument as the tensor that its buffer holds; None if it is another part of memory."""
    if not is_tensor(value) or value.layout != torch.strided:
        return None
    value = value.detach()
    sizes = [size for size in held.shape if size != 1]
    strides = [stride for size, stride in zip(held.shape, held.stride, strict=True) if size != 1]
    own = [(size, stride) for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]
    if own == list(zip(sizes, strides, strict=True)):
        return torch.as_strided(value, held.shape, held.stride, value.storage_offset())
    dense = 1
    for size, stride in sorted(zip(sizes, strides, strict=True), key=lambda pair: pair[1]):
        if stride != dense:
            return None
        dense *= size
    if dense != value.numel() or not _is_dense(value):
        return None
    return torch.as_strided(value, held.shape, held.stride, value.storage_offset())


def _is_dense(value: torch.Tensor) -> bool:
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.numel() == last + 1


class _Random(NotTold):
    """An output hangs on a random number."""


class _Value(NamedTuple):
    """A node's value: exact, and as it may come out with roundings on the way; `sure` if none is in it."""

    exact: Any
    trials: tuple[Any, ...]
    sure: bool


class _Evaluation:
    """The values of nodes, in float64 where they round."""

    def __init__(self, fragment: Fragment, given: Mapping[str, torch.Tensor], call: Call) -> None:
        self._fragment = fragment
        self._call = call
        self._given = given
        self._values: dict[str, _Value] = {}
        for name, value in given.items():
            wide = value.double() if value.is_floating_point() else value
            self._values[name] = _Value(wide, (wide,) * _TRIALS, True)
        self._plain: dict[str, Any] = dict(given)
        self._generator = torch.Generator().manual_seed(0)

    def compare(self, name: str, output: torch.Tensor) -> tuple[torch.Tensor, float]:
        """What a node should be, and how far the output is from it, in units of what rounding explains."""
        nodes = self._fragment.needed(name, self._values.keys())
        for node in nodes:
            self._values[node.name] = self._value(node)
        value = self._values[name]
        exact = value.exact
        if not is_tensor(exact) or exact.shape != output.shape:
            raise NotTold("its node has another shape")
        if exact.is_complex() or output.is_complex():
            raise NotTold("it is complex")
        if not output.dtype.is_floating_point:
            if not value.sure or self._ties(name):
                raise NotTold("whole numbers hang on the last bits of what it computes")
            wrong = exact != output
            return exact, float("inf") if bool(wrong.any()) else 0.0
        exact = exact.double()
        bound = _bound(value, exact, output.dtype)
        error = (output.double() - exact).abs()
        if bool((_beyond(output, exact, error, bound) > 1).any()):
            # A value may leave the range of a dtype on the way, where float64 goes on.
            plain = self._in_own_dtypes(name)
            own = (output.double() - plain.double()).abs()
            excess = torch.minimum(_beyond(output, exact, error, bound), _beyond(output, plain.double(), own, bound))
        else:
            excess = _beyond(output, exact, error, bound)
        return exact, float(excess.amax())

    def _ties(self, name: str) -> bool:
        nodes = self._fragment.needed(name, self._given.keys())
        return any(_short(node) in _TIES for node in nodes)

    def _value(self, node: FragmentNode) -> _Value:
        short = _short(node)
        if re.search(_RANDOM, short):
            raise _Random(f"{node.op} draws at random")
        operands = [self._values[each] for each in node.operands()]
        if short in _MEMORY or _is_bit_view(node):
            raise NotTold(f"{node.op} is no function of values")
        sure = all(each.sure for each in operands)
        _check_runs(node)
        floats = [each for each in operands if _is_float(each.exact)]
        if not sure and floats and any(not each.sure for each in floats):
            if short in _COMPARED or (short in _CONVERSION and not _is_float_dtype(node.dtype)):
                self._check_decided(node, short)
            elif short in _JUMPS or _divides_down(node) or (short in ("max", "min") and "dim" in str(node.func)):
                raise NotTold(f"{node.op} hangs on the last bits of what it gets")
        sums = re.search(_SUMS, short) is not None
        if re.search(_PRODUCTS, short) and any(map(_may_be_cut, (each.exact for each in operands))):
            raise NotTold(f"torch may round float32 operands of {node.op}; see torch.set_float32_matmul_precision")
        least = _SLACK * unit(torch.float32 if node.dtype != torch.float64 else torch.float64)
        exact = self._run(node, {name: self._values[name].exact for name in node.operands()})
        # Roundings of partial sums count as roundings of what is added up.
        off = least * of_adding(_terms(exact, [each.exact for each in operands]), 1.0) if sums else 0.0
        trials = []
        for trial in range(_TRIALS):
            values = {name: self._values[name].trials[trial] for name in node.operands()}
            if sums:
                values = {name: _mapped(value, lambda each: self._off(each, off)) for name, value in values.items()}
            made = self._run(node, values)
            if short not in _VIEWS and not (short in _CONVERSION and sure and _keeps(node, operands)):
                made = _mapped(made, lambda each: self._rounded(each, node, least))
            trials.append(made)
        rounds = _is_float_dtype(node.dtype) or node.dtype is None
        kept = short in _VIEWS or not rounds
        return _Value(exact, tuple(trials), sure and kept)

    def _off(self, value: torch.Tensor, size: float) -> torch.Tensor:
        return value * (1 + size * self._signs(value)) if value.is_floating_point() else value

    def _rounded(self, value: torch.Tensor, node: FragmentNode, least: float) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        dtype = node.dtype or torch.float32
        size = max(unit(dtype), least)
        short = _short(node)
        coarse = re.search(_COARSE, short) is not None
        value = value * (1 + size * (1 + 3 * coarse) * self._signs(value))
        small = torch.finfo(dtype if dtype.is_floating_point else torch.float32).tiny
        if short in ("tanh", "erf", "gelu", "expm1", "log1p", "sin", "cos"):
            small = 2 * least  # made of terms near one
        return value + small * self._signs(value)

    def _signs(self, value: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, value.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return signs.to(value.device)

    def _check_decided(self, node: FragmentNode, short: str) -> None:
        """Roundings must not decide a comparison."""
        if short in _CONVERSION and node.dtype != torch.bool:
            raise NotTold(f"{node.op} to whole numbers hangs on the last bits of what it gets")
        values = [[_number(each, self._values, None) for each in node.args[:2]]]
        values += [[_number(each, self._values, trial) for each in node.args[:2]] for trial in range(_TRIALS)]
        gaps = [pair[0] - pair[1] if short in _COMPARED else pair[0] for pair in values]
        off = torch.stack([torch.as_tensor(gap - gaps[0]).abs().nan_to_num(0.0) for gap in gaps[1:]]).amax(0)
        off = torch.maximum(off, off.mean())
        if bool((torch.as_tensor(gaps[0]).abs() <= 2 * SIGMA * off).any()):
            raise NotTold(f"{node.op} hangs on the last bits of what it gets")

    def _in_own_dtypes(self, name: str) -> torch.Tensor:
        """The value of a node as torch computes it, one operator after the other."""
        for node in self._fragment.needed(name, self._plain.keys()):
            values = {each: self._plain[each] for each in node.operands()}
            self._plain[node.name] = self._run(node, values, raised=False)
        return self._plain[name]  # type: ignore[no-any-return]

    def _run(self, node: FragmentNode, values: Mapping[str, Any], raised: bool = True) -> Any:
        """What a node makes of these values."""

        def bound(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return values[argument.name]
            if isinstance(argument, (list, tuple)):
                return [bound(each) for each in argument]
            return torch.float64 if raised and isinstance(argument, torch.dtype) and argument in _LOW else argument

        args = [bound(each) for each in node.args]
        kwargs = {key: bound(each) for key, each in node.kwargs.items()}
        if _short(node) == "copy":
            target, source = args[:2]
            return source.to(target.dtype).expand_as(target)
        func = node.func
        if _short(node) in ("view", "unsafe_view"):
            func = torch.ops.aten.reshape.default  # memory may lie otherwise than in the graph
        assert func is not None
        return self._call(func, args, kwargs)


def _number(argument: Any, values: Mapping[str, _Value], trial: int | None) -> Any:
    if not isinstance(argument, Ref):
        return argument
    value = values[argument.name]
    return value.exact if trial is None else value.trials[trial]


def _bound(value: _Value, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    square = torch.zeros_like(exact)
    for trial in value.trials:
        square += (trial - exact).square().nan_to_num(0.0, 0.0) / _TRIALS
    # A few trials may come out small by chance, so the neighbours count too.
    rows = square if square.dim() and square.shape[-1] >= 16 else square.reshape(1, -1)
    together = rows.mean(-1, keepdim=True).expand_as(rows).reshape(square.shape)
    noise = torch.maximum(square, together).sqrt()
    return SIGMA * noise + ulp(exact.nan_to_num(), dtype) + torch.finfo(dtype).tiny


def _beyond(output: torch.Tensor, exact: torch.Tensor, error: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """The error of each element in units of its bound. Equal infinities and NaNs have none."""
    largest = torch.finfo(output.dtype).max
    alike = (output == exact) | (output.isnan() & exact.isnan())
    alike |= output.isinf() & (exact.abs() + bound >= largest) & (output.sign() == exact.sign())
    return (error / bound).nan_to_num(torch.inf, torch.inf).where(~alike, 0.0)


def _short(node: FragmentNode) -> str:
    return node.op.rpartition("::")[2].strip("_")


def _is_float(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_float, value))
    return is_tensor(value) and (value.is_floating_point() or value.is_complex())


def _may_be_cut(value: Any) -> bool:
    """Whether a kernel may round a float32 operand of a product to fewer bits."""
    return is_tensor(value) and _is_float(value) and product_precision(value.device) != "highest"


def _is_float_dtype(dtype: torch.dtype | None) -> bool:
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def _is_bit_view(node: FragmentNode) -> bool:
    return _short(node) in ("view", "bitcast") and any(isinstance(each, torch.dtype) for each in node.args)


def _divides_down(node: FragmentNode) -> bool:
    return _short(node) == "div" and node.kwargs.get("rounding_mode") is not None


def _keeps(node: FragmentNode, operands: Sequence[_Value]) -> bool:
    """Whether a conversion of an operand of the kernel rounds nothing, as one to a wider dtype."""
    return node.dtype in (torch.float32, torch.float64) and len(operands) == 1


def _check_runs(node: FragmentNode) -> None:
    """An operator that writes to an argument is none of values; `copy_` writes what it returns."""
    schema = getattr(node.func, "_schema", None)
    if schema is not None and schema.is_mutable and _short(node) != "copy":
        raise NotTold(f"{node.op} writes to its argument")


def _terms(result: Any, operands: Sequence[Any]) -> float:
    """How many numbers are added up, at most."""
    count = max([each.numel() for each in nested_tensors(operands)], default=1)
    made = max([each.numel() for each in nested_tensors(result)], default=1)
    if made >= count:  # of a product, or a scan
        return float(max([max(each.shape, default=1) for each in nested_tensors(operands)], default=1))
    return max(1.0, count / max(made, 1))


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_mapped(each, function) for each in value)
    return function(value) if is_tensor(value) else value
