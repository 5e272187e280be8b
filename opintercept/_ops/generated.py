"""`GeneratedKernel`: a kernel that a compiler has generated, where a wrapper launches it, in the shape of an operator.

Invariant: it has what hooks ask of an `OpOverload`, so that its calls need no code of their own. Knows no compiler.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from opintercept._core.gemm import Gemm
from opintercept._core.tensors import dtype_name, is_tensor
from opintercept._ops.fragment import Fragment
from opintercept._ops.op import Args, GemmRule, Kwargs, Op

Part = Literal["in", "out", "in_out", "number"]


class _Alias(NamedTuple):
    """What a schema says of the memory of an argument that is written to."""

    is_write: bool
    before_set: frozenset[str]


@cache
def _alias(name: str) -> _Alias:
    return _Alias(True, frozenset((name,)))


class Argument(NamedTuple):
    """An argument of a kernel, in the words of torch's schemas.

    Attributes:
        name: Its name in the generated source.
        part: Whether the kernel reads it, writes it, does both, or gets a number.
        overwritten: Whether another argument, which the kernel writes to, has the same memory.
    """

    name: str
    part: Part
    overwritten: bool = False

    @property
    def type(self) -> str:
        """As in a schema."""
        return "Scalar" if self.part == "number" else "Tensor"

    @property
    def is_out(self) -> bool:
        """Whether what it has before the call is nobody's."""
        return self.part == "out"

    @property
    def kwarg_only(self) -> bool:
        """Wrappers pass all arguments by position."""
        return False

    @property
    def alias_info(self) -> _Alias | None:
        """Of an argument that is written to."""
        return _alias(self.name) if self.part in ("out", "in_out") else None

    def has_default_value(self) -> bool:
        """A kernel has no defaults."""
        return False


class Schema(NamedTuple):
    """The signature of a kernel."""

    name: str
    overload_name: str
    arguments: tuple[Argument, ...]
    returns: tuple[()] = ()


class GeneratedKernel:
    """One launch in a generated wrapper.

    Attributes:
        ops: The operators that it stands for, by packet, `"aten::log"`.
        line: The line of the wrapper that launches it.
        multiplies: Whether it computes products of matrices itself.
        updated: The arguments that it reads and whose memory it writes to.
        tags: As of an `OpOverload`.
        row: Its row of the operator table.
        tells: Tells what the launches of its wrapper stand for, by line; None once it has been asked.
    """

    is_view = False

    def __init__(
        self,
        name: str,
        key: str,
        line: int,
        arguments: Sequence[Argument],
        ops: tuple[str, ...],
        multiplies: bool = False,
    ) -> None:
        """`name` is that of the kernel, and `key` tells its wrapper from others."""
        self._schema = Schema(f"inductor::{name}", key, tuple(arguments))
        self._overloadname = key
        self._name = f"inductor::{name}.{key}"
        self.ops = ops
        self.updated = frozenset(each.name for each in arguments if each.part == "in_out" or each.overwritten)
        self.line = line
        self.multiplies = multiplies
        self.tags: tuple[torch.Tag, ...] = ()
        self._fragment: Fragment | None = None
        self.tells: Callable[[], Mapping[int, Fragment]] | None = None
        self.row = _row(self._schema, ops) if multiplies else Op(self._schema.name)

    @property
    def fragment(self) -> Fragment | None:
        """What it stands for; None if that is not known."""
        if self._fragment is None and self.tells is not None:
            tells, self.tells = self.tells, None
            self._fragment = tells().get(self.line)
        return self._fragment

    @fragment.setter
    def fragment(self, fragment: Fragment | None) -> None:
        self._fragment = fragment

    @functools.cached_property
    def stands_for(self) -> dict[str, Any] | None:
        """Its fragment, as a recorder writes it, with the places of the arguments that are its outputs."""
        plain = None if self.fragment is None else self.fragment.as_plain()
        written = [place for place, each in enumerate(self._schema.arguments) if each.alias_info is not None]
        return None if plain is None else plain | {"written": written}

    def name(self) -> str:
        """As of an `OpOverload`."""
        return self._name

    def __repr__(self) -> str:
        return f"<GeneratedKernel {self._name} at line {self.line}>"

    def __str__(self) -> str:
        return self._name.replace("::", ".", 1)


# The operands of templates, by the names of their parameters.
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"))
_OPERANDS = (("X", "W"), ("arg_A", "arg_B"), ("arg_Q", "arg_K"), ("in_ptr0", "in_ptr1"))


def _row(schema: Schema, ops: tuple[str, ...]) -> Op:
    """The row of a kernel that multiplies. It may compute more, and what it returns need not be the product."""
    places = {argument.name: (place, argument.name) for place, argument in enumerate(schema.arguments)}
    attention = "arg_Q" in places
    lhs, rhs = next((pair for pair in _OPERANDS if all(name in places for name in pair)), ("", ""))
    if not lhs or sum(op.partition("::")[2] in _PRODUCTS for op in ops) > 1:
        return Op(schema.name, "fused", opaque=True)  # of one buffer with itself, or several products
    roles = {"lhs": places[lhs], "rhs": places[rhs]}
    if attention:
        roles |= {"value": places["arg_V"]} if "arg_V" in places else {}
        return Op(schema.name, "attention", opaque=True, roles=roles)
    written = [place for place, argument in enumerate(schema.arguments) if argument.alias_info is not None]

    def shape(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
        one, other = op.operand("lhs", args, kwargs), op.operand("rhs", args, kwargs)
        outputs = [args[place] for place in written if place < len(args) and is_tensor(args[place])]
        return next(filter(None, (_gemm(one, other, output) for output in outputs)), None)

    return Op(schema.name, "fused", roles=roles, gemm_rule=GemmRule(shape))


def _gemm(lhs: torch.Tensor, rhs: torch.Tensor, output: torch.Tensor) -> Gemm | None:
    """The product of two operands whose dimensions may be merged, or packed, and whose output has those of the product.

    Each element of the operands and of the output is there once, which leaves one size to sum over.
    """
    if output.dim() < 2:
        return None
    batch = math.prod(output.shape[:-2]) if output.dim() > 2 and lhs.dim() > 2 else 1
    rows = math.prod(output.shape[:-1]) // batch if batch else 0
    columns = output.shape[-1]
    if not batch * rows * columns or lhs.numel() % (batch * rows):
        return None
    summed = lhs.numel() // (batch * rows)
    if rhs.numel() < batch * columns * summed:  # a packed operand may be padded
        return None
    return Gemm(batch, rows, columns, summed, (dtype_name(lhs.dtype), dtype_name(rhs.dtype)), (False, False))
