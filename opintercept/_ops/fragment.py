"""`Fragment`: the part of a compiled graph that one launch of a generated kernel stands for.

Invariant: it is data, without a graph, a compiler or a tensor behind it. What is not sure is left out, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch


class Ref(NamedTuple):
    """A node among the arguments of another."""

    name: str


class FragmentNode(NamedTuple):
    """A node of the graph.

    Attributes:
        name: Its name in the graph.
        func: The overload that it calls, or what takes an item; None for an input or what is no operator.
        args: With a `Ref` for each node.
        kwargs: Likewise.
        dtype: Of its output; None if that is no tensor.
    """

    name: str
    func: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    dtype: torch.dtype | None = None

    @property
    def op(self) -> str:
        """The packet, `"aten::log"`, or `"getitem"`; `""` for an input."""
        schema = getattr(self.func, "_schema", None)
        return getattr(self.func, "__name__", "") if schema is None else schema.name

    def operands(self) -> Iterator[str]:
        """The nodes among its arguments."""
        return refs((self.args, *self.kwargs.values()))


def of_aten(node: FragmentNode) -> FragmentNode:
    """A node with an operator of ATen for one that a compiler's passes put in its place."""
    match node.op, node.args:
        case "prims::convert_element_type", (value, dtype):
            return node._replace(func=torch.ops.aten._to_copy.default, args=(value,), kwargs={"dtype": dtype})
        case "prims::fma", (one, other, added):
            return node._replace(func=torch.ops.aten.addcmul.default, args=(added, one, other))
        case "prims::iota", (int(count),) if isinstance(first := node.kwargs.get("start"), int):
            step = node.kwargs.get("step", 1)
            kept = {key: node.kwargs.get(key) for key in ("dtype", "device")}
            args = (first, first + count * step, step)
            return node._replace(func=torch.ops.aten.arange.start_step, args=args, kwargs=kept)
    return node


def refs(value: Any) -> Iterator[str]:
    """The nodes in nested arguments."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs(item)


class HeldNode(NamedTuple):
    """The node whose value a buffer holds, and how it lies there."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Fragment(NamedTuple):
    """What one launch stands for.

    Attributes:
        nodes: Those of the graph, in order.
        given: The nodes that arguments hold before, by the place of the argument.
        made: Those that they hold afterwards.
        left_out: Why other outputs cannot be held, by the place of the argument.
        unclear: Nodes that arguments hold a part of, which cannot be told.
    """

    nodes: Mapping[str, FragmentNode]
    given: Mapping[int, HeldNode]
    made: Mapping[int, HeldNode]
    left_out: Mapping[int, str]
    unclear: frozenset[str]

    def needed(self, name: str, known: Collection[str]) -> list[FragmentNode]:
        """The nodes to compute for one of them, down to those that are known, in order.

        Raises:
            NotTold: It needs something that the kernel is not given.
        """
        found: set[str] = set()
        open_ = [name]
        while open_:
            each = open_.pop()
            if each in known or each in found:
                continue
            node = self.nodes.get(each)
            if node is None or node.func is None:
                raise NotTold(f"it needs {each!r}, which is no operand")
            if each in self.unclear:
                raise NotTold("one of its operands holds what no operator of the graph returns")
            found.add(each)
            open_ += node.operands()
        return [node for each, node in self.nodes.items() if each in found]

    def as_plain(self) -> dict[str, Any] | None:
        """The fragment as JSON can hold it; None if an argument is no plain data."""
        needed: dict[str, FragmentNode] = {}
        known = {held.name for held in self.given.values()}
        left_out = {str(place): reason for place, reason in self.left_out.items()}
        for place, held in self.made.items():
            try:
                needed |= {node.name: node for node in self.needed(held.name, known)}
            except NotTold as reason:
                left_out[str(place)] = str(reason)
        made = {place: held for place, held in self.made.items() if str(place) not in left_out}
        try:
            nodes = [_plain_node(each) for name, each in self.nodes.items() if name in needed]
        except TypeError:
            return None
        places = ({str(place): [*map(_listed, held)] for place, held in part.items()} for part in (self.given, made))
        return dict(zip(("given", "made"), places, strict=True)) | {"nodes": nodes, "left_out": left_out}


def _plain_node(node: FragmentNode) -> list[Any]:
    kwargs = {key: plain_argument(value) for key, value in node.kwargs.items()}
    return [node.name, str(node.func), [*map(plain_argument, node.args)], kwargs, plain_argument(node.dtype)]


def _listed(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


def plain_argument(value: Any) -> Any:
    """As `_kit.repro.plain_arguments` writes arguments, with a node for each tensor."""
    if isinstance(value, Ref):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return {"list": [plain_argument(each) for each in value]}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an argument must be plain data, got a {type(value).__name__}")


class NotTold(Exception):
    """An output cannot be held against operators; the message says why."""


UNKNOWN = (
    "what it stands for is only known of kernels that are compiled while a block is open, and of Triton kernels whose "
    "source says it; TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 takes none from a cache"
)
"""Why a kernel has no fragment."""
