"""What generated kernels stand for, read from Inductor's own graph at the moment it loads the wrapper that it has made.

Each buffer of that graph has the node whose value it is. Invariant: Inductor's objects are only read, and none is kept.
All attributes that this reads are private; if torch drops one, kernels stand for nothing that can be told.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch

from opintercept._ops.fragment import Fragment, FragmentNode, HeldNode, Ref, of_aten
from opintercept._ops.generated import GeneratedKernel
from opintercept._origin.wrappers import WrapperSource


def graph_that_loads() -> Any:
    """Inductor's graph, while it loads its wrapper; None if a wrapper is loaded that has been generated before."""
    virtualized = sys.modules.get("torch._inductor.virtualized")
    graph = getattr(getattr(virtualized, "V", None), "graph", None)
    return graph if hasattr(graph, "name_to_buffer") and hasattr(graph, "graph_inputs") else None


def tell(graph: Any, source: WrapperSource) -> None:
    """Tell the launches of a wrapper what they stand for. Whatever this meets in Inductor, the program goes on."""
    try:
        buffers = _BufferNodes(graph)
        for event in source.events:
            if event.kind == "launch":
                kernel = source.launches[event.line]
                kernel.fragment = buffers.launch(kernel, event.passed)
            elif event.kind == "alias":
                buffers.alias(event.written[0], event.read[0])
            else:
                buffers.fill(event.written)
    except Exception:  # another torch, which has other buffers
        for kernel in source.launches.values():
            kernel.fragment = None


class _BufferNodes:
    """Which node each variable of a wrapper holds, while its events pass.

    The variables have the names of Inductor's buffers. One that is written in place has no node: Inductor may give it
    that of what it becomes.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._nodes = {node.name: node for node in _nodes(graph)}
        self._sums = _with_sums(graph, self._nodes)
        self._changed = {name for each in graph.operations for name in each.get_mutation_names()}
        # What a kernel computes in place and keeps in registers: memory has what was there before.
        self._removed = {*graph.removed_buffers, *graph.inplaced_to_remove}
        by_others = {
            name
            for each in graph.operations
            if type(each).__name__ != "ComputedBuffer"
            for name in each.get_mutation_names()
        }
        self._holds: dict[str, HeldNode | None] = {}
        for name, value in graph.graph_inputs.items():
            if name in self._nodes and name not in by_others and hasattr(value, "get_layout"):
                self._holds[name] = _held(name, value)
        for name in graph.constants:
            if name in self._nodes and name not in self._changed:
                self._holds[name] = _held_by_tensor(name, graph.constants[name])

    def alias(self, name: str, other: str) -> None:
        """Note that a variable is memory of another, or one of several outputs."""
        several = type(self._graph.name_to_buffer.get(name)).__name__ == "MultiOutput"
        self._holds[name] = self._own(name) if several else self._holds.get(other)

    def fill(self, names: tuple[str, ...]) -> None:
        """Note that variables have been written to."""
        self._holds |= {name: self._own(name) for name in names}

    def _own(self, name: str) -> HeldNode | None:
        buffer = self._graph.name_to_buffer.get(name)
        if buffer is None or name in self._changed or name in self._removed:
            return None
        if name in self._sums:
            return _held(name, buffer)
        node = buffer.get_origin_node()
        return None if node is None or node.name not in self._nodes else _held(node.name, buffer)

    def launch(self, kernel: GeneratedKernel, passed: tuple[str | None, ...]) -> Fragment:
        """What a launch with these variables stands for."""
        given: dict[int, HeldNode] = {}
        made: dict[int, HeldNode] = {}
        left_out: dict[int, str] = {}
        unclear: set[str] = set()
        arguments = kernel._schema.arguments
        for place, (argument, name) in enumerate(zip(arguments, passed, strict=False)):
            if argument.part in ("in", "in_out"):
                held = None if name is None else self._holds.get(name)
                if held is not None:
                    given[place] = held
                else:
                    unclear |= self._behind(name)
        written = [name for argument, name in zip(arguments, passed, strict=False) if argument.alias_info and name]
        self.fill(tuple(written))
        for place, (argument, name) in enumerate(zip(arguments, passed, strict=False)):
            if argument.alias_info is None:
                continue
            held = None if name is None else self._holds.get(name)
            if held is not None and written.count(name or "") == 1:
                made[place] = held
            elif name in self._changed or name in self._graph.graph_inputs:
                left_out[place] = "it is written in place"
            else:
                left_out[place] = "no operator of the graph returns what it holds"
        return Fragment(self._nodes, given, made, left_out, frozenset(unclear))

    def _behind(self, name: str | None) -> frozenset[str]:
        """The nodes that a buffer may hold a part of; all, if that is not known."""
        buffer = None if name is None else self._graph.name_to_buffer.get(name)
        if buffer is None or name in self._changed:
            return frozenset(self._nodes)
        return frozenset(node.name for node in buffer.get_origins())


def _with_sums(graph: Any, nodes: dict[str, FragmentNode]) -> set[str]:
    """Add nodes for the sums of which Inductor makes means and variances, and return the names of their buffers.

    A variance takes two sums, of the values and of the squares of their distances from the mean, in this order; or one
    kernel makes the mean and the second of them.
    """
    found: dict[str, list[tuple[str, bool]]] = {}
    for name, buffer in graph.name_to_buffer.items():
        data = getattr(buffer, "data", None)
        kind = getattr(data, "reduction_type", None)
        if kind is None or buffer.get_origin_node() is not None:
            continue
        able = [node.name for node in buffer.get_origins() if nodes.get(node.name, _NONE).op in _AVERAGES]
        held = _held(name, buffer)
        if len(able) != 1 or held is None or math.prod(held.shape) != _count(graph, able[0]):
            continue
        if kind == "sum" or (kind == "welford_reduce" and getattr(data, "output_index", None) == 1):
            found.setdefault(able[0], []).append((name, kind != "sum"))
    made: dict[str, FragmentNode] = {}
    for name, buffers in found.items():
        node, terms = nodes[name], _terms(graph, name)
        of_squares = [each for each, _ in buffers][-1]
        if terms is None:
            continue
        if node.op == "aten::mean" and len(buffers) == 1 and not buffers[0][1]:
            (first, _) = buffers[0]
            made[first] = FragmentNode(first, _SUMS[len(node.args) > 1], node.args, node.kwargs, node.dtype)
            made[name] = node._replace(func=_DIVIDE, args=(Ref(first), terms), kwargs={})
        elif node.op == "aten::var_mean" and [several for _, several in buffers] in ([False, False], [True]):
            correction = node.kwargs.get("correction", 1)
            left = terms - (1 if correction is None else correction)
            items = {each.args[1]: each for each in nodes.values() if each.args[:1] == (Ref(name),)}
            pairs = [(of_squares, 0, left), *([(buffers[0][0], 1, terms)] if len(buffers) == 2 else [])]
            if left <= 0 or any(place not in items for _, place, _ in pairs):
                continue
            for each, place, count in pairs:
                item = items[place]
                made[f"{each}.item"] = item._replace(name=f"{each}.item")
                made[each] = FragmentNode(each, _TIMES, (Ref(f"{each}.item"), count), {}, item.dtype)
                made[item.name] = item._replace(func=_DIVIDE, args=(Ref(each), count))
    whole = {**nodes}
    nodes.clear()
    for name, node in whole.items():  # in order: a sum stands before what is made of it
        sums = made.get(name)
        if sums is not None:
            (first,) = sums.operands()
            nodes |= {each: made[each] for each in (f"{first}.item", first) if each in made}
        nodes[name] = sums or node
    return {name for name in made if name in graph.name_to_buffer and name not in whole}


_NONE = FragmentNode("", None)
_AVERAGES = ("aten::mean", "aten::var_mean")
_SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)
_TIMES, _DIVIDE = torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor


def _values_of(graph: Any, name: str) -> tuple[Any, Any]:
    """The fake tensors of a node's first argument and of its first output."""
    node = next(each for each in graph.graph.nodes if each.name == name)
    value = node.meta.get("val")
    return node.args[0].meta.get("val"), value[0] if isinstance(value, (list, tuple)) else value


def _count(graph: Any, name: str) -> int | None:
    count = _values_of(graph, name)[1].numel()
    return count if isinstance(count, int) else None


def _terms(graph: Any, name: str) -> int | None:
    value, made = _values_of(graph, name)
    terms = value.numel() / max(made.numel(), 1) if isinstance(value.numel(), int) else None
    return int(terms) if terms else None


def _held(name: str, buffer: Any) -> HeldNode | None:
    try:
        layout = buffer.get_layout()
        sizes = [*layout.size, *layout.stride]
    except (AttributeError, NotImplementedError):  # of several outputs
        return None
    if not all(isinstance(size, int) or getattr(size, "is_Integer", False) for size in sizes):
        return None
    return HeldNode(name, tuple(map(int, layout.size)), tuple(map(int, layout.stride)))


def _held_by_tensor(name: str, value: Any) -> HeldNode | None:
    return HeldNode(name, tuple(value.shape), tuple(value.stride())) if isinstance(value, torch.Tensor) else None


def _nodes(graph: Any) -> Iterator[FragmentNode]:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        dtype = value.dtype if isinstance(value, torch.Tensor) else None
        if node.op == "get_attr":
            yield FragmentNode(str(node.target), None, dtype=dtype)
        if node.op != "call_function":
            yield FragmentNode(node.name, None, dtype=dtype)
        elif isinstance(node.target, torch._ops.OpOverload):
            yield of_aten(FragmentNode(node.name, node.target, _plain(node.args), _plain(dict(node.kwargs)), dtype))
        elif node.target is operator.getitem:
            yield FragmentNode(node.name, operator.getitem, _plain(node.args), {}, dtype)
        else:
            yield FragmentNode(node.name, None, dtype=dtype)


def _plain(value: Any) -> Any:
    if type(value).__name__ == "Node":
        return Ref(value.name)
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)] if isinstance(value, list) else tuple(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
