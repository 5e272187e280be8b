"""Where a value comes from, as Dynamo writes it, `L['args'][0].model.layers.0`: read, and looked up in a frame.

Invariant: a look-up runs no code of the program. What cannot be looked up so, or is not understood, is not found.
"""

from __future__ import annotations

import ast
import inspect
import keyword
import re
import sys
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, FunctionType, GetSetDescriptorType, MappingProxyType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple, TypeAlias

import torch

from opintercept._origin.stack import local_of


class Access(NamedTuple):
    """One step from a value to another one that it holds."""

    kind: str  # one of `_LOOKS`
    key: Any = None


Source: TypeAlias = tuple[Access, ...]


def parse(text: str) -> Source | None:
    """Return the steps that Dynamo has written; None if the text is of another kind, or of a value made in between."""
    # Dynamo shortens `._modules['0']` to `.0`, which is not Python.
    whole = re.sub(_STRING_OR_PART, lambda found: found[1] or _part(found[2]), text)
    try:
        return _steps(ast.parse(whole, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):  # ValueError: not a literal
        return None


_STRING_OR_PART = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|\.([^.\[\](){},'"]+)"""


def _part(name: str) -> str:
    return f".{name}" if name.isidentifier() and not keyword.iskeyword(name) else f"._modules[{name!r}]"


def _steps(node: ast.expr) -> Source | None:
    match node:
        case ast.Subscript(ast.Name("L" | "G" as scope), ast.Constant(str(name))):
            return (Access(scope, name),)
        case ast.Subscript(ast.Attribute(base, "_modules"), ast.Constant(str(name))) | ast.Attribute(base, name):
            return _then(base, "attribute", name)
        case ast.Subscript(base, index):
            return _item(base, index)
        case ast.Call(ast.Name(function), arguments, []):
            return _called(function, arguments)
        case ast.Call(ast.Attribute(ast.Name("dict" | "list" | "object" as kind), method), arguments, []):
            return _called(f"{kind}.{method}", arguments)
        case ast.Call(reference, [], []):
            return _then(reference, "reference")
    return None


def _called(function: str, arguments: list[ast.expr]) -> Source | None:
    """The steps of a call of a function that Dynamo writes."""
    match function, arguments:
        case ("list", [base]):
            return _then(base, "list")
        case ("dict", [base]):
            return _then(base, "dict")
        case ("type", [base]):
            return _then(base, "type")
        case ("dict.keys", [base]):
            return _then(base, "keys")
        case ("dict.__getitem__" | "list.__getitem__", [base, index]):
            return _item(base, index)
        case ("getattr" | "object.__getattribute__", [base, ast.Constant(str(name))]):
            return _then(base, "attribute", name)
        case ("___tuple_iterator_getitem", [base, ast.Constant(int(index))]):
            return _then(base, "to come", index)
        case ("__import__", [ast.Constant(str(name))]):
            return (Access("import", name),)
    return None


def _then(base: ast.expr, kind: str, key: Any = None) -> Source | None:
    source = _steps(base)
    return None if source is None else (*source, Access(kind, key))


def _item(base: ast.expr, index: ast.expr) -> Source | None:
    match index:
        case ast.Call(ast.Name("slice"), bounds):
            return _then(base, "slice", tuple(map(ast.literal_eval, bounds)))
        case ast.Subscript(ast.Call(ast.Name("list"), [ast.Call(_, [keyed])]), place) if _is_same(base, keyed):
            # A key that is not a literal, `list(dict.keys(d))[0]`. By its place, since hashing it may run any code.
            return _then(base, "value", ast.literal_eval(place))
    return _then(base, "item", ast.literal_eval(index))


def _is_same(one: ast.expr, other: ast.expr) -> bool:
    return ast.dump(one) == ast.dump(other)


def look_up(source: Source, frame: FrameType) -> Iterator[Any]:
    """Yield the value of each step in a frame, as far as they can be found."""
    value: Any = frame
    for step in source:
        try:
            value = _LOOKS[step.kind](value, step.key)
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):  # the last: a thread changes it
            return
        yield value


def value_of(source: Source, frame: FrameType) -> Any:
    """Return the value of the last step in a frame; None if it cannot be found."""
    values = list(look_up(source, frame))
    return values[-1] if len(values) == len(source) else None


def find(source: Source, frame: FrameType) -> tuple[Source, torch.nn.Module] | None:
    """Find the first module on the way from which `at` finds the last one, and where the frame has it."""
    values = list(look_up(source, frame))
    if len(values) < len(source) or not is_module(values[-1]):
        return None
    first = len(source) - 1
    while first and is_module(around := values[first - 1]) and source[first].kind == "attribute":
        if around._modules.get(source[first].key) is not values[first]:
            break
        first -= 1
    return source[: first + 1], values[first]


def at(source: Source | None, bases: Mapping[Source, weakref.ref[torch.nn.Module]]) -> torch.nn.Module | None:
    """Return the module of a source, found from modules that are known."""
    for length in range(len(source or ()), 0, -1):
        if source is not None and source[:length] in bases:
            module = bases[source[:length]]()
            for step in source[length:]:
                module = module._modules.get(step.key) if module is not None and step.kind == "attribute" else None
            return module
    return None


_attribute_of = inspect.getattr_static
_Pair = namedtuple("_Pair", "one")
# What makes an attribute of a field in C: those of functions and methods, slots, and the fields of named tuples.
_FIELDS = GetSetDescriptorType, MemberDescriptorType, type(_Pair.one)


def _attribute(value: Any, name: str) -> Any:
    if is_module(value) and name in value._modules:
        return value._modules[name]
    its = issubclass(type(value), type) and type.__dict__.get(name)  # `__dict__` and `__mro__` of a class
    found = its or _attribute_of(value, name)
    kind = type(found)
    if kind in _FIELDS:
        return found.__get__(value)
    bound = kind is FunctionType and found is _attribute_of(type(value), name, None)
    return MethodType(found, value) if bound else found


def is_module(value: Any) -> bool:
    """Whether a value is a module, without asking for its `__class__`, which may be computed."""
    return issubclass(type(value), torch.nn.Module)


def _item_of(value: Any, key: Any) -> Any:
    kind = next((kind for kind in (dict, list, tuple, deque) if issubclass(type(value), kind)), None)
    if kind is None or (kind is dict and not dict.__contains__(value, key)):  # or else a subclass makes an item
        raise LookupError
    return kind.__getitem__(value, key)


def _list_of(value: Any, _: None) -> list[Any]:
    if type(value) not in (set, frozenset, tuple, list, dict, type({}.keys())):
        raise TypeError
    return list(value)


def _dict_of(value: Any, _: None) -> dict[Any, Any]:
    if type(value) not in (dict, MappingProxyType):
        raise TypeError
    return dict(value)


def _referenced(value: Any, _: None) -> Any:
    if type(value) is not weakref.ref:
        raise TypeError
    return value()


def _to_come(value: Any, index: int) -> Any:
    state: Any = type(iter(())).__reduce__(value)
    (values, *_), begin = state[1:]
    return values[begin + index]


_MISSING = object()


def _local(frame: FrameType, name: str) -> Any:
    found = local_of(frame, name, _MISSING)
    if found is _MISSING:
        raise LookupError
    return found


_LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "L": _local,
    "G": lambda frame, name: frame.f_globals[name],
    "import": lambda _, name: sys.modules[name],
    "attribute": _attribute,
    "item": _item_of,
    "slice": lambda value, bounds: _item_of(value, slice(*bounds)),
    "keys": lambda value, _: dict.keys(value),
    "value": lambda value, place: list(dict.values(value))[place],
    "list": _list_of,
    "dict": _dict_of,
    "type": lambda value, _: type(value),
    "reference": _referenced,
    "to come": _to_come,
}
