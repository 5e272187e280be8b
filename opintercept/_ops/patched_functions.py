"""Python functions and Triton kernels that multiply outside the dispatcher, as `"package.module:function"`.

Invariant: finding one imports nothing, and runs no code of the module that it is in.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

from opintercept._ops.op import parameters_of

NAMES: dict[Any, str] = {}
"""The names of the functions that are being replaced or have been, which calls have as `func`."""

# The `__dict__` of a module itself: a subclass may compute another one.
_namespace: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__


class PatchedFunction(NamedTuple):
    """Where a patched function is."""

    owner: Any  # the module or the class that has the function
    attribute: str  # its name there
    value: Any  # what is there: a function, a `staticmethod`, a Triton kernel


def is_patched(name: object) -> TypeGuard[str]:
    """Whether this is a name of the form `"package.module:function"`."""
    return isinstance(name, str) and ":" in name and "::" not in name


def locate(name: str) -> PatchedFunction | None:
    """Find a patched function; None if its module is not imported or does not have it."""
    module, _, path = name.partition(":")
    *outer, attribute = path.split(".")
    owner: Any = sys.modules.get(module)
    for part in outer:
        owner = attributes(owner).get(part)
        if not isinstance(owner, type):
            return None
    found = attributes(owner)
    return PatchedFunction(owner, attribute, found[attribute]) if attribute in found else None


def can_replace(target: PatchedFunction) -> bool:
    """Whether what is there is a function, in a place that takes another value.

    Not one that computes after it has returned, such as an `async def`: blocks see what that calls. Anything else, such
    as the None of a library that could not import it, may be everywhere in the process.
    """
    if isinstance(target.value, type) or (isinstance(target.owner, type) and target.owner.__flags__ & _IMMUTABLE):
        return False
    function = function_of(target.value)
    later = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return (
        callable(function) and type(function).__hash__ is not None and not any(is_kind(function) for is_kind in later)
    )


_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE, of types in C


def attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of a module or a class; none of anything else."""
    if isinstance(owner, type):
        return dict(vars(owner))
    return _namespace(owner) if issubclass(type(owner), ModuleType) else {}


def same(name: str, other: str) -> bool:
    """Whether two names are of one function."""
    one, two = locate(name), locate(other)
    return one is not None and two is not None and function_of(one.value) is function_of(two.value)


def name_of(value: Any) -> str | None:
    """Return the name under which a function or a Triton kernel can be found, or None."""
    function = function_of(value)
    name = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', None)}"
    target = locate(name)
    return name if target is not None and value in (target.value, function_of(target.value)) else None


def is_kernel(value: Any) -> bool:
    """Whether this is a kernel of Triton, which is launched with `kernel[grid](...)`."""
    kinds = type(value).__mro__
    return any(kind.__name__ == "KernelInterface" and kind.__module__.startswith("triton.") for kind in kinds)


def function_of(value: Any) -> Any:
    """Return the function that has the parameters: that of a `staticmethod`, or the one below a kernel's decorators."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    while is_kernel(value):
        value = value.fn
    return inspect.unwrap(value)


def takes_any(function: Any, argument: str | int) -> bool:
    """Whether a function may take an argument that its parameters do not name: `*args`, `**kwargs`, or unknown ones."""
    if isinstance(argument, int) and argument < 0:
        return False
    try:
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    except (TypeError, ValueError):  # a function in C
        return not parameters_of(function)
    return (inspect.Parameter.VAR_KEYWORD if isinstance(argument, str) else inspect.Parameter.VAR_POSITIONAL) in kinds
