"""`register_op`: how a program declares the products of its own operators and of other libraries.

Invariant: what cannot be right is refused before the table changes, and `remove` puts it back as it was.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeAlias

import torch

from opintercept._core.checks import check_choice
from opintercept._core.errors import OpInterceptWarning, caller_level
from opintercept._ops import patched_functions
from opintercept._ops.op import Declared, Family, Kind, Layout, Op, parameters_of
from opintercept._ops.pages import Pages
from opintercept._ops.patched_functions import is_patched
from opintercept._ops.table import ROWS, exact, overloads

Role: TypeAlias = str | int
"""An argument: the name of a parameter, or its position from 0."""

_programs: dict[str, Op] = {}  # the rows that the program has declared and not taken back
_misfits: set[str] = set()  # what `recheck` has warned of
# Compiled when they are first used, and kept by `re`: importing the package should cost little.
_NAME = r"\w+::\w+(\.\w+)?"
_FUNCTION = r"\w+(\.\w+)*:\w+(\.\w+)*"


class Registration:
    """One operator that `register_op` has declared. `remove()` takes it back; so does leaving it as a context manager.

    Attributes:
        name: The operator, `"mylib::scaled_mm"`.
    """

    def __init__(self, name: str, row: Op) -> None:
        self.name = name
        self._row = row

    def remove(self) -> None:
        """Forget the operator. Blocks that are open watch it until they end. Removing twice does no harm."""
        ROWS.withdraw(self.name, self._row)
        if _programs.get(self.name) is self._row:
            del _programs[self.name]

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Registration of {self.name}>"


def register_op(
    target: Any,
    *,
    lhs: Role | None = None,
    rhs: Role | None = None,
    bias: Role | None = None,
    out: Role | None = None,
    scales: Role | Iterable[Role] = (),
    layout: Layout | None = "kn",
    gemm: Callable[..., Any] | None = None,
    flops: Callable[..., Any] | None = None,
    dequantize: Callable[..., torch.Tensor] | Mapping[str, Callable[..., torch.Tensor]] | None = None,
    reference: Callable[..., Any] | None = None,
) -> Registration:
    """Declare an operator of another library to be a matmul, so that every interceptor watches it.

    A function that is no operator of the dispatcher can be declared too: one in Python or C++, or a kernel of Triton.
    While a block is open it is replaced, in its module and in every module that has imported it by name. What it runs
    inside is not counted again. References to it elsewhere, as in a list or a closure, escape.

    Roles are the names of parameters, or positions from 0. The formulas `gemm`, `flops` and `dequantize` are called
    with all arguments by name, defaults included: `lambda a, b, **_: ...` takes those that it needs.

    Args:
        target: A name, `"mylib::scaled_mm"` for all overloads of an operator or `"mylib::scaled_mm.out"` for one,
            whose library may load later; an `OpOverloadPacket` or `OpOverload`; or what `torch.library.custom_op`
            returns. For a function: `"package.module:function"` or `"package.module:Class.method"`, whose module may
            be imported later, the function itself, or a kernel of Triton.
        lhs: The left operand, `[*b, m, k]`.
        rhs: The right operand; `layout` says how it lies.
        bias: The tensor that is added to the product.
        out: The tensor that the operator writes its result to. An operator that returns nothing needs no `out` if its
            schema marks what it writes, `Tensor(a!)`.
        scales: The scales of quantised operands, one or several.
        layout: `"kn"` if rhs is `[*b, k, n]`, `"nk"` if it is `[n, k]`, as the weight of a linear, and None if that
            varies between calls, so that `gemm` must tell the shape.
        gemm: Computes `(batch, m, n, k)`. Gets sizes in place of tensors, so that it never waits for a device. By
            default the shape follows from those of lhs and rhs. If the arguments of a call do not tell, it raises
            NotImplementedError.
        flops: Computes the floating-point operations, from sizes as `gemm` does. By default `2 * batch * m * n * k`.
        dequantize: Computes the values of rhs from the operator's arguments, in the shape that `layout` says. A dict
            has such a function by role: `{"lhs": ..., "rhs": ...}`. Without it hooks get the codes.
        reference: Computes the same as the operator from the same arguments, for `hooks.Reference`. It gets
            floating-point tensors in the precision of the reference, and returns the result or writes it to the
            same argument as the operator.

    Returns:
        The registration. `remove()` takes it back.

    Raises:
        TypeError: The target is something else.
        ValueError: A name is no operator's name, the operator is declared already, or it has no such argument; a
            module that is imported has no such function.

    Example:
        >>> import torch
        >>> from opintercept import intercept, register_op
        >>> @torch.library.custom_op("docs::scaled_mm", mutates_args=())
        ... def scaled_mm(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        ...     return (a @ b) * scale
        >>> with register_op(scaled_mm, lhs="a", rhs="b"), intercept(lambda call: print(call, call.gemm)):
        ...     _ = scaled_mm(torch.ones(2, 3), torch.ones(3, 4), 0.5)
        docs::scaled_mm(float32[2, 3], float32[3, 4], 0.5) [2, 3] @ [3, 4]
    """
    roles = {"lhs": lhs, "rhs": rhs, "bias": bias, "out": out}
    key, row = _row(target, roles, scales, layout, gemm, flops, dequantize, reference)
    _check_roles(key, row)
    other = next((name for name in ROWS.patched if name != key and patched_functions.same(name, key)), None)
    if other is not None:
        raise ValueError(f"a function can be declared once, got {key}, which is {other}, declared before")
    if not ROWS.gives_way(key):
        whose = "torch's own table has it" if ROWS[key].declared is None else "call remove() on its registration first"
        raise ValueError(f"an operator can be declared once, got {key} again; {whose}")
    ROWS.declare(key, row)
    _programs[key] = row
    on_declared(key)
    return Registration(key, row)


def _nobody(key: str) -> None:
    return


on_declared: Callable[[str], None] = _nobody
"""Is called with the name of each operator that a program declares. Open blocks see it from then on."""


def recheck() -> None:
    """Recheck registrations whose library loaded or changed later.

    A registration that does not fit gets a warning. Hooks do not get the argument that is missing.
    """
    for key, row in _programs.copy().items():
        spec = getattr(sys.modules.get(key.partition(":")[0]), "__spec__", None)
        if is_patched(key) and getattr(spec, "_initializing", False):
            continue  # its module is being imported
        try:
            _check_roles(key, row)
        except ValueError as error:
            if str(error) not in _misfits:
                _misfits.add(str(error))
                text = f"{error}; declare it anew with register_op, after remove() on its registration"
                warnings.warn(text, OpInterceptWarning, stacklevel=caller_level())


def recheck_offered(module: str) -> None:
    """Check what packs have offered of a module before it was imported, and leave out what does not fit, as they do."""
    for key, row in ROWS.offered():
        if is_patched(key) and key.partition(":")[0] == module and (text := _misfit(key, row)) is not None:
            ROWS.refuse(key)
            warnings.warn(text, OpInterceptWarning, stacklevel=caller_level())


def _misfit(key: str, row: Op) -> str | None:
    """Why a pack's row does not fit the version of its library that is loaded."""
    if is_patched(key) and patched_functions.locate(key) is None:
        return None  # versions of a library have other functions
    try:
        _check_roles(key, row, operands_only=True)
    except ValueError as error:
        return f"{error}, which opintercept does not know yet; declare it with register_op"
    return None


def offer_ops(
    targets: str,
    arguments: str = "",
    *,
    layout: Layout | None = "kn",
    gemm: Callable[..., Any] | None = None,
    flops: Callable[..., Any] | None = None,
    dequantize: Callable[..., torch.Tensor] | Mapping[str, Callable[..., torch.Tensor]] | None = None,
    family: Family = "foreign",
    opaque: bool = False,
    kind: Kind | None = None,
    within: int = 1,
) -> None:
    """Declare operators for a pack, as `register_op` does, unless the program or torch's own table has declared them.

    An operator without such an lhs or rhs stays undeclared, with a warning: the pack does not fit this version of its
    library. Other arguments come and go between versions.

    Args:
        targets: The names of packets, or the places of functions. The row of one overload would win over what the
            program declares for all.
        arguments: Their arguments as `role:parameter`: the roles of `register_op`, `scale` for one of the scales, and
            `value` for that of an attention. Of paged caches, `cache`, `slots`, `table` and `lengths`, see `Pages`;
            such an argument may have another role, too.
        layout: As for `register_op`, and so are the formulas.
        family: What kind of operators they are. Those of attention are opaque, and others are no products.
        opaque: Whether they multiply inside, where no single product can be seen.
        kind: How they reach the kernels, if not as leaves.
        within: The dimension of a cache that counts the tokens of a page.
    """
    words = [word.split(":") for word in arguments.split()]
    named: dict[str, str] = dict(words)
    roles = {role: named[role] for role in named if role not in ("scale", "cache", "slots", "table", "lengths")}
    scales, caches = ([parameter for role, parameter in words if role == of] for of in ("scale", "cache"))
    pages = Pages(tuple(caches), within, *map(named.get, ("slots", "table", "lengths"))) if caches else None
    for target in targets.split():
        key, row = _row(target, roles, scales, layout, gemm, flops, dequantize, None)
        if (text := _misfit(key, row)) is not None:
            warnings.warn(text, OpInterceptWarning, stacklevel=2)
            continue
        opaque = opaque or family == "attention"
        ROWS.offer(key, replace(row, family=family, opaque=opaque, kind=kind or row.kind, pages=pages))


def _row(
    target: Any,
    roles: Mapping[str, Role | None],
    scales: Role | Iterable[Role],
    layout: Layout | None,
    gemm: Callable[..., Any] | None,
    flops: Callable[..., Any] | None,
    dequantize: Callable[..., torch.Tensor] | Mapping[str, Callable[..., torch.Tensor]] | None,
    reference: Callable[..., Any] | None,
) -> tuple[str, Op]:
    """The key of a target's row, and the row."""
    key, name = _key_of(target)
    check_choice("layout", layout, ("kn", "nk", None))
    given = {role: where for role, where in roles.items() if where is not None}
    if isinstance(scales, (str, int)):
        scales = (scales,)
    if dequantize is None or not isinstance(dequantize, Mapping):
        dequantize = {} if dequantize is None else {"rhs": dequantize}
    for role, function in dequantize.items():
        check_choice("a role of dequantize", role, ("lhs", "rhs", "bias"))
        _callable("dequantize", function)
    declared = Declared(given, tuple(scales), layout, _callable("gemm", gemm), _callable("flops", flops))
    kind: Kind = "patched" if is_patched(key) else "leaf"
    computed = _callable("reference", reference)
    return key, Op(name, "foreign", kind, dequantize=dict(dequantize), reference=computed, declared=declared)


def _callable(what: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise TypeError(f"{what} must be a function, got {value!r}")
    return value


def _key_of(target: Any) -> tuple[str, str]:
    """The key of a target's row, and the name that its calls have."""
    if isinstance(target, torch._library.custom_ops.CustomOpDef):
        target = target._qualname
    elif isinstance(target, torch._ops.OpOverloadPacket):
        target = target._qualified_op_name
    elif isinstance(target, torch._ops.OpOverload):
        target = exact(target._name)
    elif callable(target) and not isinstance(target, (str, type)):
        name = patched_functions.name_of(target)
        if name is None:
            raise ValueError(
                f"a function must be found under its name in its module, got {target!r}; "
                "give its place instead, as in 'package.module:function'"
            )
        return name, name
    if not isinstance(target, str):
        raise TypeError(
            f"register_op takes a name such as 'mylib::scaled_mm' or 'package.module:function', an operator of "
            f"torch.ops, what torch.library.custom_op returns, or a function, got {target!r}"
        )
    if re.fullmatch(_FUNCTION, target):
        return target, target
    if not re.fullmatch(_NAME, target):
        raise ValueError(
            f"an operator's name must have its namespace, as in 'mylib::scaled_mm', and a function's its module, as "
            f"in 'package.module:function', got {target!r}"
        )
    return target, target.partition(".")[0]


def _check_roles(key: str, row: Op, operands_only: bool = False) -> None:
    """Check the roles, or only lhs and rhs, if the operator is loaded. One of its overloads must have all of them."""
    assert row.declared is not None
    given = [*row.declared.roles.items(), *(("scales", each) for each in row.declared.scales)]
    roles = [(role, argument) for role, argument in given if not operands_only or role in ("lhs", "rhs")]
    found = _functions(key) if is_patched(key) else overloads(key)
    problems = [_problem(key, overload, roles) for overload in found]
    if found and all(problems):
        raise ValueError(problems[0])


def _functions(key: str) -> list[Any]:
    """The function that is patched; none if its module is not imported."""
    module, _, path = key.partition(":")
    target = patched_functions.locate(key)
    if target is None and module in sys.modules:
        raise ValueError(f"the module {module} must have what is declared, but it has no {path}")
    if target is not None and not patched_functions.can_replace(target):
        raise ValueError(
            f"only functions that compute before they return can be declared, got {key}, which is {target.value!r}; "
            "declare what it calls"
        )
    return [] if target is None else [patched_functions.function_of(target.value)]


def _problem(key: str, func: Any, roles: list[tuple[str, Role]]) -> str | None:
    names = [parameter.name for parameter in parameters_of(func)]
    for role, given in roles:
        if isinstance(given, bool) or not isinstance(given, (int, str)):
            raise TypeError(f"{role} must be the name or the position of an argument, got {given!r}")
        if is_patched(key) and patched_functions.takes_any(func, given):
            continue
        if given not in names if isinstance(given, str) else not 0 <= given < len(names):
            return f"{role} must be an argument of {key}, which has {', '.join(names)}; got {given!r}"
    return None
