"""`Op`, one row of the operator table: an operator's operands, GEMM shape and FLOPs.

Must not import the table.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch

from opintercept._core.errors import OpInterceptWarning
from opintercept._core.gemm import Gemm
from opintercept._core.tensors import describe, is_tensor, named_tensors
from opintercept._ops.pages import Pages
from opintercept._ops.scratch import OVERWRITES, torchs_name

Family = Literal["gemm", "low precision", "sparse", "attention", "fused", "foreign", "convolution", "other"]
# How an operator reaches the kernels:
#   leaf       As itself. Both dispatch engines watch it.
#   composite  Decomposed above autograd. Whole only at function level, or under inference_mode.
#   seen       As itself, but its inner matmuls pass through the dispatcher too. The kernel engine watches those;
#              a dispatch mode cannot, and gets one opaque call.
#   outer      As itself, and so does what it runs, of which some may be no operator: kernels show both.
#   bare       As itself under inference_mode, since its one kernel is for all dispatch keys and calls no operator.
#   patched    Not at all. It is a Python function, which is replaced while a block is open.
Kind = Literal["leaf", "composite", "seen", "outer", "bare", "patched"]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
FlopsRule = Callable[["Op", Args, Kwargs], int | None]
Layout = Literal["kn", "nk"]


@dataclass(frozen=True, slots=True)
class GemmRule:
    """How operators of one kind multiply.

    Attributes:
        shape: Computes the product's shape from the arguments of a call; returns None if it is not a single product.
        contraction: The dimensions of a matrix in lhs and in rhs over which the product sums; None if they vary.
        in_list: Whether the operands may come in one list instead of one by one.
        sharing: Computes what `Op.sharing` returns, if it does not follow from `contraction`.
    """

    shape: Callable[[Op, Args, Kwargs], Gemm | None]
    contraction: tuple[int, int] | None = None
    in_list: bool = False
    sharing: Callable[[Op, str, Args, Kwargs], tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Declared:
    """The arguments of `register_op` that need the operator's parameters: names or positions by role, and formulas."""

    roles: Mapping[str, str | int]
    scales: tuple[str | int, ...]
    layout: Layout | None
    gemm: Callable[..., Any] | None
    flops: Callable[..., Any] | None


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One row of the table.

    Attributes:
        name: The packet, `"aten::addmm"`, or a function's public name.
        family: The family it belongs to; `"other"` if it is not a matmul.
        kind: How it reaches the kernels, see `Kind`.
        opaque: Whether it multiplies inside, where no single product can be seen.
        roles: By role, the position and the keyword of the argument, `{"lhs": (1, "mat1")}`.
        gemm_rule: How it multiplies; None if it is not a single product.
        flops_rule: Computes its FLOPs; None if they follow from the GEMM shape or are unknown.
        scales: The position and the keyword of each argument with scales of a quantised operand.
        dequantize: By role, what computes the operand's values from the arguments of a call, by name.
        reference: What computes the same as the operator, from the same arguments.
        pages: How it finds the tokens of a paged cache, if it has one.
        declared: What `register_op` was given, until `fitted` has a schema or a signature to find the arguments in.
        func: The overload or function in whose schema or signature it has found them.
    """

    name: str
    family: Family = "other"
    kind: Kind = "leaf"
    opaque: bool = False
    roles: dict[str, tuple[int, str]] = field(default_factory=dict)
    gemm_rule: GemmRule | None = None
    flops_rule: FlopsRule | None = None
    scales: tuple[tuple[int, str], ...] = ()
    dequantize: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    reference: Callable[..., Any] | None = None
    pages: Pages | None = None
    declared: Declared | None = None
    func: Any = None

    def operand(self, role: str, args: Args, kwargs: Kwargs) -> Any:
        """Return the tensor in `role`, the first one of a list, or None."""
        value = self.argument(role, args, kwargs)
        if isinstance(value, (list, tuple)) and value:  # einsum's operands, a foreach list
            value = value[0]
        return value if is_tensor(value) else None

    def argument(self, role: str, args: Args, kwargs: Kwargs) -> Any:
        """Return the argument in `role`, passed by position or by keyword, or None."""
        where = self.roles.get(role)
        if where is None:
            return None
        if self._takes_a_list(args):
            args = (args[0], *args[1])
        return passed(where, args, kwargs)

    @property
    def overwritten(self) -> tuple[str, ...]:
        """The parameters that the operator writes to without reading them."""
        if self.pages is not None and self.pages.slots is not None:
            return self.pages.caches
        return ("self",) if torchs_name(self.name) in OVERWRITES else ()

    def scale_tensors(self, args: Args, kwargs: Kwargs) -> list[Any]:
        """Return the scales that were passed as tensors, alone or in a list, which may have the operand too."""
        operands = {id(self.operand(role, args, kwargs)) for role in self.roles} if self.scales else ()
        found = [t for where in self.scales for _, t in named_tensors("", passed(where, args, kwargs))]
        return [tensor for tensor in found if id(tensor) not in operands]

    def replaced(self, role: str, value: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return the inputs with `value` in `role`, passed in the same way as the tensor that it replaces.

        Raises:
            ValueError: There is no tensor in that role, or a list of tensors.
        """
        old = self.argument(role, args, kwargs)
        if role in self.dequantize:
            raise ValueError(f"the {role} of {self.name} holds codes, which values cannot replace; change its codes")
        if not is_tensor(old):
            raise ValueError(
                f"only a tensor can be replaced, got {describe(old)} as the {role} of {self.name}; "
                "return changed (args, kwargs) instead of call.replace(...)"
            )
        position, keyword = self.roles[role]
        if self._takes_a_list(args):
            equation, operands = args
            inner = [*operands[: position - 1], value, *operands[position:]]
            return (equation, type(operands)(inner)), kwargs
        if position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, keyword if keyword in kwargs else "self": value}

    def _takes_a_list(self, args: Args) -> bool:
        """Whether the operands come in a list instead of one by one."""
        in_list = self.gemm_rule is not None and self.gemm_rule.in_list
        return in_list and len(args) == 2 and isinstance(args[1], (list, tuple))

    def contraction_dim(self, role: str) -> int | None:
        """Return the dimension of a matrix in `role`, lhs or rhs, over which the product sums; None if it varies."""
        if self.gemm_rule is None or self.gemm_rule.contraction is None:
            return None
        return self.gemm_rule.contraction[0 if role == "lhs" else 1]

    def sharing(self, role: str, args: Args, kwargs: Kwargs) -> tuple[int, ...] | None:
        """Return the dimensions of an operand over which a scale must be the same to factor out of the product.

        All other dimensions may have a scale for each element. None if there is no such product.
        """
        rule, tensor = self.gemm_rule, self.operand(role, args, kwargs)
        if rule is not None and rule.sharing is not None:
            return rule.sharing(self, role, args, kwargs)
        dim = self.contraction_dim(role)
        return None if dim is None or tensor is None else (dim if tensor.dim() > 1 else -1,)

    def gemm(self, args: Args, kwargs: Kwargs) -> Gemm | None:
        """Return the shape of the matrix product, or None if a call is not a single product."""
        rule = self.gemm_rule
        if rule is None:
            return None
        operands = [self.operand(role, args, kwargs) for role in ("lhs", "rhs") if role in self.roles]
        if any(operand is None or operand.is_nested for operand in operands):
            return None
        try:
            return rule.shape(self, args, kwargs)
        except Exception:  # operands that do not fit: a pre hook may ask before the operator refuses them
            return None

    def flops(self, args: Args, kwargs: Kwargs, output: Any = None) -> int | None:
        """Return the floating-point operations, 2 for each multiply-add, or None if no formula is known."""
        if self.flops_rule is not None:
            lhs = self.operand("lhs", args, kwargs)
            if lhs is not None and lhs.is_nested:
                return None
            try:
                return self.flops_rule(self, args, kwargs)
            except Exception:  # as in `gemm`
                return None
        if self.family == "low precision" and self.roles.keys() == {"lhs"} and is_tensor(output) and not self.opaque:
            # A linear whose weight is packed, so that only the output tells how many columns it has.
            return int(2 * self.operand("lhs", args, kwargs).numel() * output.shape[-1])
        shape = self.gemm(args, kwargs)
        return None if shape is None else 2 * shape.batch * shape.m * shape.n * shape.k

    def arguments(self, func: Any, args: Args, kwargs: Kwargs) -> dict[str, Any]:
        """Return every argument except outputs by the name of its parameter, defaults included.

        If torch does not tell a function's parameters, their names are their positions, `"args[2]"`.
        """
        parameters = parameters_of(func, "" if self.kind == "patched" else self.name.rpartition(".")[2])
        outputs = {p.name for p in parameters if p.is_out}
        # torch's schemas tell what is written from the `out` that the backward of an attention reads.
        if not (hasattr(func, "_schema") and self.name.startswith("aten::")):
            outputs.add(self.roles.get("out", (0, "out"))[1])
        return {name: value for name, value in bound(parameters, args, kwargs).items() if name not in outputs}

    def dequantized(self, role: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the values of a quantised operand, or None, after a warning, if they cannot be computed."""
        values = error = None
        try:
            values = self.dequantize[role](**bound(parameters_of(func), args, kwargs))
        except Exception as exception:
            error = exception
        if is_tensor(values):
            return values
        got = describe(values) if error is None else f"{type(error).__name__}: {error}"
        warnings.warn(
            f"dequantize of {self.name} must return the values of {role}, got {got}; hooks get the codes",
            OpInterceptWarning,
            stacklevel=2,
        )
        return None

    def result(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the output of a call that returns nothing: what it writes to, alone or in a tuple, or None."""
        if "out" in self.roles:
            return self.argument("out", args, kwargs)
        written = self.written(func, args, kwargs)
        return tuple(written) if len(written) > 1 else written[0] if written else None

    def tokens(self, func: Any, args: Args, kwargs: Kwargs) -> dict[int, torch.Tensor]:
        """Return what a call reads or writes of paged caches, by the identity of each cache."""
        return {} if self.pages is None else self.pages.tokens(bound(parameters_of(func), args, kwargs))

    def written(self, func: Any, args: Args, kwargs: Kwargs) -> list[Any]:
        """Return the program's tensors that a call writes its result to: those of `out=` and in-place forms."""
        if "out" in self.roles and not hasattr(func, "_schema"):
            return [t for _, t in named_tensors("", self.argument("out", args, kwargs))]
        schema = getattr(func, "_schema", None)
        if self.kind == "patched":
            return []
        if schema is None:
            short = self.name.rpartition(".")[2]
            out = kwargs.get("out")
            if out is None and short.endswith("_") and not short.endswith("__"):
                out = args[0] if args else kwargs.get("input", kwargs.get("self"))
            return list(out) if isinstance(out, (list, tuple)) else [] if out is None else [out]
        found = [
            passed((position, argument.name), args, kwargs)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return [value for value in found if value is not None]

    def returned(self, func: Any, args: Args, kwargs: Kwargs) -> list[Any]:
        """Return, for each output of a call, the program's tensor that it is, or None for a tensor of its own.

        An operator may write to an argument, such as a workspace, and return something else.
        """
        schema = getattr(func, "_schema", None)
        if schema is None:
            return self.written(func, args, kwargs)
        written = {
            name: passed((position, argument.name), args, kwargs)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for name in argument.alias_info.before_set
        }
        return [
            next((written[name] for name in output.alias_info.before_set if name in written), None)
            if output.alias_info is not None
            else None
            for output in schema.returns
        ]


def passed(where: tuple[int, str], args: Args, kwargs: Kwargs) -> Any:
    """Return the argument at a position or, if it was passed by keyword, of a name; None if it was not passed."""
    position, keyword = where
    if position < len(args):
        return args[position]
    if keyword == "input":  # torch's C functions accept both names
        return kwargs.get("input", kwargs.get("self"))
    return kwargs.get(keyword)


class Parameter(NamedTuple):
    """A parameter of an operator or a function.

    Attributes:
        name: Its name.
        default: Its default value; `inspect.Parameter.empty` if it has none.
        is_out: Whether it is a tensor for the result, which can only be passed by keyword.
    """

    name: str
    default: Any = inspect.Parameter.empty
    is_out: bool = False


def bound(parameters: tuple[Parameter, ...], args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a call by the names of their parameters, with defaults for those that are not outputs."""
    found: dict[str, Any] = {}
    for position, parameter in enumerate(parameters):
        if position < len(args):
            found[parameter.name] = args[position]
        elif parameter.name in kwargs:
            found[parameter.name] = kwargs[parameter.name]
        elif parameter.default is not inspect.Parameter.empty and not parameter.is_out:
            found[parameter.name] = parameter.default
    found |= {f"args[{i}]": args[i] for i in range(len(parameters), len(args))}
    return found | {name: value for name, value in kwargs.items() if name not in found}


@lru_cache(maxsize=4096)
def parameters_of(func: Any, short: str = "") -> tuple[Parameter, ...]:
    """Return the parameters of an overload or a function; none if torch and Python do not tell them.

    Args:
        func: An overload, or a function.
        short: For a function in C, the name of the operator of torch whose parameters it usually has.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        try:
            parameters = inspect.signature(func).parameters.values()
            several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            return tuple(Parameter(p.name, p.default) for p in parameters if p.kind not in several)
        except (TypeError, ValueError):
            schema = getattr(getattr(getattr(torch.ops.aten, short, None), "default", None), "_schema", None)
        if schema is None:
            return _documented(func)
    return tuple(
        Parameter(a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty, a.is_out)
        for a in (() if schema is None else schema.arguments)
    )


def _documented(func: Any) -> tuple[Parameter, ...]:
    """The parameters of a function in C++, which pybind11 writes into its docstring: `mul(a: Tensor, b: Tensor)`.

    Their defaults are only there as text, and left out.
    """
    head = re.match(_HEAD, getattr(func, "__doc__", None) or "")
    if head is None or head[1] != getattr(func, "__name__", None):
        return ()
    depth, parts = 0, [""]
    for character in head[2]:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    names = [part.partition("=")[0].partition(":")[0].strip() for part in parts]
    return tuple(map(Parameter, filter(str.isidentifier, names)))


_HEAD = r"(?m)(\w+)\((.*)\)(?: -> .*)?$"
