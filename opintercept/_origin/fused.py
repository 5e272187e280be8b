"""Which nodes of a compiled graph each generated kernel computes, worked out from the texts of graph and wrapper.

Inductor writes no more than a kernel's name for those in C++. But it keeps the line of the program of the last node
that each loop in a kernel computes, and the data flow tells the rest. Invariant: a node that cannot be told is left
out. Must not import torch's compilers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from opintercept._core.call_site import Line as Line
from opintercept._origin.stack import NOT_SOURCE
from opintercept._origin.wrappers import Event, Look


class Node(NamedTuple):
    """A node of Inductor's graph, after its passes.

    Attributes:
        op: The packet, `"aten::add"`.
        arguments: The nodes that it has as arguments.
        dtype: Of its output, as in the graph's text, `"f32"`; `""` if it has several outputs.
        shape: Of its output, as there.
        line: The program's line; None if the text has none.
    """

    name: str
    op: str
    arguments: tuple[str, ...]
    dtype: str
    shape: tuple[str, ...]
    line: Line | None


LINE_COMMENT = r"\s*# .*?\bFile: (.+):(\d+) in (.+?), code: "
"""Where the nodes below it come from. torch 2.15 writes "Backward of forward node: " first."""
_ASSIGNED = r'\s*(\w+)(?:: (?:"(\w+)\[(.*?)\].*?"|[^=]*?))? = (.*?)(?:;.*)?$'
_CALLED = r"torch\.ops\.(\w+)\.(\w+)[\w.]*\((.*)\)$"
_ITEM = r"(\w+)\[\d+\]$"
_NAME = r"\b[A-Za-z_]\w*\b"
_INPUT = r'(\w+): "(\w+)\[(.*?)\]'

# Operators that return the memory of their argument, or all its values in another shape.
_VALUE_KEEPING = (
    "alias as_strided detach diagonal expand getitem permute reshape select slice split split_with_sizes squeeze t"
    " transpose unbind unfold unsqueeze view _unsafe_view view_as_complex view_as_real view_dtype"
)
_VIEWS = frozenset(_VALUE_KEEPING.split())


class InductorGraph:
    """A graph's nodes in order, from its text.

    Attributes:
        nodes: By name.
        returned: The names of what it returns.
        written: The program's text on each line.
    """

    def __init__(self, text: str) -> None:
        self.nodes: dict[str, Node] = {}
        self.written: dict[Line, str] = {}
        self.returned: list[str] = []
        line: Line | None = None
        for row in text.splitlines():
            if found := re.match(LINE_COMMENT, row):
                line = (found[1], int(found[2]), found[3])
                self.written[line] = row[found.end() :].strip()
            elif "# No stacktrace found" in row:
                line = None
            elif row.lstrip().startswith("def forward("):
                for name, dtype, shape in re.findall(_INPUT, row):
                    self.nodes[name] = Node(name, "", (), dtype, _sizes(shape), None)
            elif row.lstrip().startswith("return "):
                self.returned = re.findall(_NAME, row.strip()[len("return ") :])
            elif found := re.match(_ASSIGNED, row):
                self._add(found[1], found[2] or "", found[3] or "", found[4], line)

    def _add(self, name: str, dtype: str, shape: str, value: str, line: Line | None) -> None:
        if called := re.match(_CALLED, value):
            names = [each for each in re.findall(_NAME, re.sub(r"'[^']*'", "", called[3])) if each in self.nodes]
            self.nodes[name] = Node(name, f"{called[1]}::{called[2]}", tuple(names), dtype, _sizes(shape), line)
        elif item := re.match(_ITEM, value):
            self.nodes[name] = Node(name, "getitem", (item[1],), dtype, _sizes(shape), line)
        else:  # a constant of the module
            self.nodes[name] = Node(name, "", (), dtype, _sizes(shape), None)

    def root(self, name: str) -> str:
        """The node whose values a node has, which may be a view of them."""
        while (node := self.nodes[name]).op.partition("::")[2] in _VIEWS or node.op == "getitem":
            if not node.arguments:
                break
            name = node.arguments[0]
        return name

    def operands(self, name: str) -> list[str]:
        """The roots of a node's arguments."""
        return [self.root(each) for each in self.nodes[name].arguments]


def _sizes(shape: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in shape.split(",") if each.strip())


class _Variables:
    """What the variables of a wrapper hold, while its events pass."""

    def __init__(self, graph: InductorGraph, lines: Sequence[tuple[int, Line]]) -> None:
        self._graph = graph
        self._lines = lines  # the program's lines, with the wrapper's, in order
        self._holds: dict[str, frozenset[str]] = {name: frozenset((name,)) for name in graph.nodes}
        self._done: set[str] = set()  # nodes that a kernel has computed
        # What is computed for others: its own users in a kernel may compute it once more.
        self._users: dict[str, set[str]] = {}
        for name in graph.nodes:
            for operand in graph.operands(name):
                self._users.setdefault(operand, set()).add(name)
        self._returned = set(map(graph.root, filter(graph.nodes.__contains__, graph.returned)))
        self._extern: set[str] = set()

    def held(self, variable: str | None) -> frozenset[str]:
        return self._holds.get(variable or "", frozenset())

    def alias(self, name: str, other: str) -> None:
        self._holds[name] = self.held(other)

    def extern(self, event: Event) -> Node | None:
        """Find the node that a call of the wrapper computes, by its operator and its operands."""
        wanted = [self.held(each) for each in event.read if self.held(each)]
        names = [
            name
            for name, node in self._graph.nodes.items()
            if name not in self._done and node.op.partition("::")[2] == event.name
        ]
        matches = [sum(not each.isdisjoint(self._graph.operands(name)) for each in wanted) for name in names]
        best = max(matches, default=0)
        for variable in event.written:
            self._holds.pop(variable, None)
        if best or len(names) == 1:  # a kernel may have converted an operand before
            name = names[matches.index(best)]
            self._done.add(name)
            self._holds |= {variable: frozenset((name,)) for variable in event.written}
            return self._graph.nodes[name]
        return None

    def launch(self, event: Event, since: int, outside: Collection[str]) -> list[Node]:
        """Find the nodes that a kernel computes, in order.

        Args:
            event: Its launch.
            since: The wrapper's line of the event before.
            outside: Nodes that only other calls compute.
        """
        sure = {name for each in event.read for name in self.held(each) if len(self.held(each)) == 1}
        given = {name for each in event.read for name in self.held(each)}
        anchors = {line[:2] for place, line in self._lines if since < place <= event.line}
        whole: dict[str, frozenset[str] | None] = {}
        able = [name for name in self._graph.nodes if self._closure(name, given, outside, whole) is not None]
        last = [name for name in able if (line := self._graph.nodes[name].line) and line[:2] in anchors]
        last = [name for name in last if name not in self._done] or last
        found: set[str] = set()
        for name in last:
            found |= self._closure(name, given, outside, whole) or frozenset()
        self._done |= {name for name in last if name not in sure}
        self._assign(event, found)
        nodes = [node for name, node in self._graph.nodes.items() if name in found]
        # A constant is on the line of whoever needed one like it first.
        return [node for node in nodes if node.arguments] or nodes

    def _closure(
        self, name: str, given: set[str], outside: Collection[str], known: dict[str, frozenset[str] | None]
    ) -> frozenset[str] | None:
        """The nodes behind a node, down to those that the kernel is given; None if it is not given enough.

        An input of the graph itself, or a product that is not given, cannot be computed.
        """
        graph = self._graph
        order = [(name, False)]
        while order:
            each, ready = order.pop()
            root = graph.root(each)
            if root in known:
                continue
            node = graph.nodes[root]
            if root in given:
                known[root] = frozenset()
            elif not node.op or root in outside:
                known[root] = None
            elif not ready:
                order.append((root, True))
                order += [(operand, False) for operand in graph.operands(root) if operand not in known]
            else:
                parts = [known.get(operand) for operand in graph.operands(root)]
                whole = None if any(part is None for part in parts) else frozenset((root,)).union(*filter(None, parts))
                known[root] = whole
        return known.get(graph.root(name)) or None

    def _assign(self, event: Event, found: set[str]) -> None:
        """Note what the kernel has written: those of its nodes that fit, and that others need.

        What no node fits may be what it has read, laid out as a library wants it.
        """
        graph = self._graph
        read = {self.held(variable) for variable in event.read} - {frozenset()}  # before this writes to one of them
        needed = {n for n in found if n in self._returned or not self._users.get(n, set()) <= found}
        for variable in event.written:
            look = event.looks.get(variable)
            fits = [n for n in found if look is None or _fits(graph.nodes[n], look)]
            nodes = frozenset([n for n in fits if n in needed] or fits)
            self._holds[variable] = nodes or self._copied(read, look)

    def _copied(self, read: Iterable[frozenset[str]], look: Look | None) -> frozenset[str]:
        """What a buffer holds if it is a copy of the only operand that looks like it."""
        fits = (
            []
            if look is None or not look.dtype
            else [each for each in read if all(_fits(self._graph.nodes[n], look) for n in each)]
        )
        return fits[0] if len(fits) == 1 else frozenset()


def _fits(node: Node, look: Look) -> bool:
    if look.dtype and _DTYPES.get(look.dtype, look.dtype) != node.dtype:
        return False
    sizes = [int(each) if each.isdecimal() else None for each in node.shape]
    return look.size is None or None in sizes or math.prod(filter(None, sizes)) == math.prod(look.size)


_DTYPES = {
    f"torch.{name}": short
    for name, short in (
        ("float32", "f32"),
        ("float64", "f64"),
        ("float16", "f16"),
        ("bfloat16", "bf16"),
        ("int64", "i64"),
        ("int32", "i32"),
        ("int16", "i16"),
        ("int8", "i8"),
        ("uint8", "u8"),
        ("bool", "b8"),
        ("complex64", "c64"),
        ("complex128", "c128"),
    )
}


def nodes_of(
    graph: InductorGraph, events: Sequence[Event], stacks: Iterable[tuple[int, str | None]]
) -> dict[int, list[Node]]:
    """The nodes that each launch of a wrapper computes, by the launch's line.

    Args:
        graph: The graph.
        events: What the wrapper does.
        stacks: The program's stack for lines of the wrapper, as Inductor keeps it.
    """
    lines = [(place, line) for place, stack in stacks for line in _innermost(stack)]
    flow = _Variables(graph, lines)
    outside = frozenset(_of_externs(graph, events))
    found: dict[int, list[Node]] = {}
    copying: dict[str, int] = {}  # the lines of launches that compute nothing, by the buffers that they write
    since = 0
    for event in events:
        if event.kind == "alias":
            flow.alias(event.written[0], event.read[0])
            continue
        if event.kind == "launch":
            found[event.line] = flow.launch(event, since, outside)
            copying |= dict.fromkeys(() if found[event.line] else event.written, event.line)
        elif (node := flow.extern(event)) is not None:
            for line in {copying.pop(variable) for variable in event.read if variable in copying}:
                found[line].append(node)  # its operands are what the kernel has copied for it
        since = event.line
    return found


def _of_externs(graph: InductorGraph, events: Sequence[Event]) -> Iterable[str]:
    """The nodes of operators that only calls of the wrapper compute, as many as there are."""
    counts: dict[str, int] = {}
    for event in events:
        if event.kind == "extern":
            counts[event.name] = counts.get(event.name, 0) + 1
    for op, count in counts.items():
        names = [name for name, node in graph.nodes.items() if node.op.partition("::")[2] == op]
        if len(names) <= count:
            yield from names


_FRAME = r'File "(.+?)", line (\d+), in (.+)'


def frames(stack: str | None) -> list[Line]:
    """The lines of a stack, as text has it, the innermost one last."""
    return [(file, int(line), function) for file, line, function in re.findall(_FRAME, stack or "")]


def _innermost(stack: str | None) -> list[Line]:
    """The innermost line, and the innermost one of the program: the graph's text has one of the two."""
    lines = frames(stack)
    return [*lines[-1:], *[line for line in lines if not line[0].startswith(NOT_SOURCE)][-1:]]
