"""What `why` calls calls, arguments, operands and the ways in which tensors differ.

Invariant: each phrase goes on after "B".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from opintercept._core.text import listed
from opintercept.runs.program.program import Leaf, Region, Step
from opintercept.runs.why.answer import CauseKind, Place
from opintercept.runs.why.noise import MASKED
from opintercept.runs.why.quantised import quantised

UNSEEN_BIAS = "not compared: the bias of the last product, which only one run adds within it"
UNSEEN_FACTOR = "not compared: a number by which only A multiplies before the last product, and B may behind it"
LONGEST = 6  # operators that may be left out together, and that a phrase names
_WORDS = {
    **{"self": "input", "mat1": "input", "tensors": "operand", "other": "operand", "mat2": "weight"},
    **{"attn_mask": "mask", "attn_bias": "mask"},
}
_BIASES = {"addmm": "self", "baddbmm": "self", "linear": "bias", "convolution": "bias"}


def place_of(step: Step) -> Place:
    """A call in words."""
    return Place.of(step.stored)


def name_of(step: Step) -> str:
    return step.operator.removesuffix("_")


def names_of(steps: Iterable[Step]) -> str:
    """The operators of calls, each once."""
    return listed(list(dict.fromkeys(map(name_of, steps))), LONGEST)


def left_out_words(steps: Sequence[Step], given: Sequence[torch.Tensor]) -> str:
    """What is left out; `given` are the operands of the last call."""
    if all(0 in step.written and step.inputs[0][1].weight for step in steps):
        return f"does not update the weight, by {names_of(steps)}"
    masks = (each.is_floating_point() and each.numel() and float(each.min()) <= MASKED for each in given)
    return f"leaves out {'the mask, in ' if len(steps) == 1 and any(masks) else ''}{names_of(steps)}"


def argument_of(step: Step, name: str) -> Any:
    """An argument, or its default; the scale of an attention as it is by default."""
    value = step.arguments.get(name)
    if name not in step.arguments and step.overload is not None:
        found = (each for each in step.overload._schema.arguments if each.name == name and each.has_default_value())
        value = next((each.default_value for each in found), None)
    if name == "scale" and value is None and "scaled_dot_product" in step.operator:
        return step.inputs[0][1].shape[-1] ** -0.5
    return value


def differing(step: Step, other: Step) -> dict[str, tuple[Any, Any]]:
    """The arguments that two calls of one operator have otherwise, of A and of B."""
    names = dict.fromkeys((*step.arguments, *other.arguments)) if step.operator == other.operator else ()
    pairs = {name: (argument_of(step, name), argument_of(other, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if all(map(_is_plain, pair)) and repr(pair[0]) != repr(pair[1])}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Leaf):
        return False
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def others_of(value: Any) -> list[Any]:
    """Other values that an argument may have by mistake."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [each for each in (value - 1, value + 1, 2 * value, value // 2, -value) if each != value]
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return [[other] * len(value) for other in range(4) if [other] * len(value) != value]
    return []


def argument_words(name: str, mine: Any, theirs: Any) -> str:
    """Which argument is another one, after "uses"."""
    one, other = (f"{each:.6g}" if isinstance(each, float) else str(each) for each in (mine, theirs))
    called = "" if name in ("other", "self", "exponent", "value") else f"{name}="
    return f"{called}{other} where A uses {one}{_times_words(mine, theirs)}"


def _times_words(mine: Any, theirs: Any) -> str:
    """How many times as large a number is, if that is a shorter one."""
    if not (isinstance(mine, float) and isinstance(theirs, float) and mine and theirs):
        return ""
    short = f"{theirs / mine:.3g}"
    plain = len(f"{theirs:.6g}") <= len(short) + 3 or abs(float(short) * mine / theirs - 1) > 1e-6
    return "" if plain else f", {short} times that"


def operand_words(step: Step, name: str, region: Region) -> str:
    """What a reader calls an operand."""
    if name == "self" and step.operator in ("addmm", "baddbmm"):
        return "bias"
    if region.weight and name.startswith("weight") and name != "weight" and len(region.shape) == 1:
        return "bias"  # of a recurrent layer, whose parameters are called weight1 to weight4
    if region.weight and name in ("other", "self", "input"):
        return "weight"
    if name == "mat2" and not region.weight:
        return "operand"
    plain = name.partition("[")[0].rstrip("0123456789")
    return _WORDS.get(plain, plain)


def apart(a: torch.Tensor, b: torch.Tensor) -> str:
    """How two tensors differ, in words."""
    differs = ~((a == b) | (a.isnan() & b.isnan())) if a.is_floating_point() else a != b
    count, of = int(differs.sum()), a.numel()
    finite = (a.double() - b.double()).abs()
    finite = finite.where(finite.isfinite(), 0.0)
    by = f", by up to {float(finite.max()):.2g}" if float(finite.max()) else ""
    if a.dim() == 2 and a.shape[0] > 1:
        rows = differs.any(1).nonzero()[:, 0].tolist()
        if len(rows) <= max(1, len(a) // 4):
            return f"{rows_differ(rows, len(a))}{by}"
    return f"{count:,} of {of:,} numbers differ{by}"


def rows_differ(numbers: Sequence[int], of: int, noun: str = "row") -> str:
    """Write `"rows 3, 17 of 64 differ"`."""
    one = len(numbers) == 1
    return f"{noun}{'' if one else 's'} {listed(numbers, 4)} of {of} {'differs' if one else 'differ'}"


def weight_words(rows: torch.Tensor, theirs: torch.Tensor) -> tuple[CauseKind, str]:
    """What kind of cause B's rows of a weight are, and how they differ."""
    bits, wrong = quantised(rows, theirs)
    if not bits:
        return "weight", f"has another weight: {apart(rows, theirs)}"
    which = wrong.nonzero()[:, 0].tolist()
    if not which:
        return "dtype", f"has its weight in {bits}"
    return "weight", f"has another weight: {rows_differ(which, len(rows))} by more than {bits} explains"


def biases_of(step: Step) -> set[int]:
    """The places of what a product adds."""
    return {place for place, (name, _) in enumerate(step.inputs) if name == _BIASES.get(step.operator)}
