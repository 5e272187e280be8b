"""Holds recorded kernels that torch.compile has generated against the operators that they stand for.

Invariant: anyone may have written the run. `again` calls the operators, apart from views, which make no memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from opintercept._core.tensors import tensors_of
from opintercept._ops.fragment import UNKNOWN, Fragment, FragmentNode, HeldNode, NotTold, Ref
from opintercept._values.fragments import Judged, judge
from opintercept.runs.program import again
from opintercept.runs.store.codec import StoredCall, role_of
from opintercept.runs.store.run import MAX_TENSOR, Run

_MOST_NODES = 10_000
_SHAPED = """
    view reshape _unsafe_view permute transpose t expand unsqueeze squeeze slice select unbind split
    split_with_sizes alias detach
"""
_VIEWS = frozenset(_SHAPED.split())
_DAMAGED = (KeyError, TypeError, ValueError, IndexError, AttributeError)


def is_kernel(call: StoredCall) -> bool:
    """Whether a call is that of a generated kernel."""
    return call.record.ops is not None


def held(run: Run, call: StoredCall, limit: int = MAX_TENSOR) -> tuple[list[tuple[str, Judged]], dict[str, str]]:
    """Hold a recorded kernel against its operators, run in float64 on what it was given.

    Returns:
        Its outputs by role, and why others could not be held, by role.

    Raises:
        NotRunError: The run does not have what that takes.
    """
    fragment, written = fragment_of(call)
    assert call.given is not None  # it has a fragment
    try:
        outputs = call.given["outputs"]
        before = [_argument(run, call, each, limit) for each in call.given["args"]]
        after = [*before]
        for number, (place, output) in enumerate(zip(written, outputs, strict=True)):
            after[place] = _output(run, call, role_of(number), output, limit)
        if max((*fragment.given, *fragment.made), default=0) >= len(after):
            raise ValueError("the place of an argument")
    except _DAMAGED as wrong:
        raise again.NotRunError(f"what the run says of {call.record.op} is damaged") from wrong
    most = again.room(tensors_of((before, after), {}))

    def called(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        if func is operator.getitem or isinstance(func, _Unlisted) or is_view(func):
            return func(*args, **kwargs)
        listed = again.operator_of(func._schema.name, str(func))  # type: ignore[attr-defined]
        try:
            again.check_size(listed, args, kwargs, most, limit)
            return again.run(listed, args, kwargs)
        except again.NotRunError as refused:
            raise ValueError(str(refused)) from refused

    judged, left_out = judge(fragment, before, after, called)
    roles = {place: role_of(number) for number, place in enumerate(written)}
    reasons = {roles[place]: reason for place, reason in left_out.items() if place in roles}
    return [(roles[each.place], each) for each in judged if each.place in roles], reasons


def fragment_of(call: StoredCall) -> tuple[Fragment, list[int]]:
    """What a recorded kernel stands for, and the places of the arguments that are its outputs.

    Raises:
        NotRunError: It is not known.
    """
    plain = (call.given or {}).get("stands_for")
    if not isinstance(plain, dict):
        raise again.NotRunError(f"{call.record.op} cannot be held against operators: {UNKNOWN}")
    try:
        return _fragment(plain), [_place(each) for each in plain["written"]]
    except _DAMAGED as wrong:
        raise again.NotRunError(f"what the run says of {call.record.op} is damaged") from wrong


def is_view(func: Any) -> bool:
    """Whether an operator of a fragment makes no memory."""
    space, _, name = func._schema.name.partition("::")
    return space == "aten" and name in _VIEWS


def _fragment(plain: Mapping[str, Any]) -> Fragment:
    if len(plain["nodes"]) > _MOST_NODES:
        raise ValueError("too many nodes")
    given, made = ({_place(place): _held(each) for place, each in plain[part].items()} for part in ("given", "made"))
    nodes = {each.name: FragmentNode(each.name, None) for each in given.values()}
    for name, func, args, kwargs, dtype in plain["nodes"]:
        kept = {str(key): _value(each) for key, each in kwargs.items()}
        nodes[str(name)] = FragmentNode(str(name), _function(str(func)), tuple(map(_value, args)), kept, _value(dtype))
    left_out = {_place(place): str(reason) for place, reason in plain["left_out"].items()}
    return Fragment(nodes, given, made, left_out, frozenset())


def _function(name: str) -> Any:
    if name == str(operator.getitem):
        return operator.getitem
    space, _, rest = name.partition(".")
    func = again.overload_of(f"{space}::{rest.partition('.')[0]}", name)
    if func is not None and is_view(func):
        return func
    try:
        again.operator_of("" if func is None else func._schema.name, name)
    except again.NotRunError as unlisted:
        return _Unlisted(str(unlisted))
    return func


class _Unlisted:
    """Stands for an operator that may not run again."""

    def __init__(self, reason: str) -> None:
        self.__name__ = "unlisted"
        self._reason = reason

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise NotTold(self._reason)


def _place(value: Any) -> int:
    place = int(value)
    if not 0 <= place < 4096:
        raise ValueError("the place of an argument")
    return place


def _held(plain: Any) -> HeldNode:
    name, shape, stride = plain
    if len(shape) != len(stride) or not all(type(each) is int and 0 <= each < 2**40 for each in (*shape, *stride)):
        raise ValueError("a shape and strides")
    return HeldNode(str(name), tuple(shape), tuple(stride))


def _value(plain: Any) -> Any:
    match plain:
        case {"node": str(name)}:
            return Ref(name)
        case {"list": list(items)}:
            return [_value(each) for each in items]
    return again.argument(plain, "", _no_tensor, torch.device("cpu"))


def _no_tensor(plain: Mapping[str, Any], name: str) -> Any:
    raise ValueError("a node's arguments have no tensors of their own")


def _argument(run: Run, call: StoredCall, plain: Any, limit: int) -> Any:
    match plain:
        case {"tensor": str(name), "shape": list(shape), "stride": list(stride)}:
            return again.strided(run.load(call.rank, name, limit), shape, stride, limit)
    return plain


def _output(run: Run, call: StoredCall, role: str, plain: Mapping[str, Any], limit: int) -> Any:
    found = run.tensor(call, role, limit)
    if found is None:
        return None
    return again.strided(found, plain["shape"], plain["memory"][2], limit)
