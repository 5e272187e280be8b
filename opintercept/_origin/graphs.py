"""What torch.compile keeps of the program in the code that it makes: module and line of a call in there.

Invariant: a mapping holds names and lines alone, no graph, module or frame; what the graph does not tell is None.
Must not import torch, nor make it import its compilers: whatever is read here is in frames that are running.
Without the attributes that are read here, all private to torch, a call in compiled code has no module and no line.
"""

from __future__ import annotations

import functools
import linecache
import operator
import re
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from opintercept._origin.place import Place

if TYPE_CHECKING:
    import torch

_EVAL = "<eval_with_key>"  # the file of a GraphModule's forward, of backends "eager" and "aot_eager"
_INDUCTOR = re.compile(r"[/\\]c[a-z2-7]{40,}\.py$")  # that of Inductor's wrapper, named by its hash
_COMMENT = re.compile(r"# Topologically Sorted Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]")
_ASSIGNED = re.compile(r"\s*(\w+)(?:\s*:[^=]+)? = ")
_LINE = re.compile(r'File "(.+?)", line (\d+), in (.+)')
_LINE_COMMENT = re.compile(r"\s*# File: (.+):(\d+) in (.+?), code: ")
_CALL = re.compile(r"\s*(\w+)(?:: [^=]*?)? = torch\.ops\.([\w.]+)\((.*)\)(?:;.*)?$")
_ITEM = re.compile(r"\s*(\w+)(?:: [^=]*?)? = (\w+)\[\d+\](?:;.*)?$")
_NAME = re.compile(r"\b[A-Za-z_]\w*\b")
_BASE = re.compile(r"([LG])\['(\w+)'\]((?:\.\w+|\._modules\['\w+'\])*)$")

# Functions that multiply, by their names in a graph of Dynamo's or of AOTAutograd's.
_PRODUCTS = re.compile(
    r"_?_?(?:r?matmul|linear|mm|bmm|mv|dot|vdot|inner|addmm|addbmm|baddbmm|addmv|einsum|tensordot|chain_matmul|multi_dot"
    r"|bilinear|cdist|scaled_mm|grouped_mm|multi_head_attention_forward|scaled_dot_product\w*|conv\w*"
    r"|_transformer_encoder_layer_fwd|_native_multi_head_attention|lstm\w*|gru\w*|rnn_\w+)(?:__|_)?$"
)
_HIDING = frozenset(("HigherOrderOperator", "OpOverload", "OpOverloadPacket"))  # kinds of functions that may multiply
# Operators that hand a tensor on with other strides or another dtype, or one of several outputs.
_VIEWS = frozenset(
    (
        *("permute", "t", "transpose", "reshape", "view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "slice"),
        *("select", "clone", "alias", "detach", "_to_copy", "convert_element_type", "getitem"),
    )
)
_SUMS = ("addmm", "baddbmm", "bias_addmm", "_mm_plus_mm")  # kernels that may have a sum of the program's in them


class Trace(NamedTuple):
    """Where a call in a graph comes from.

    Attributes:
        base: How the compiled function calls the module that has it, `"L['self']"`; `""` if the call is in no module
            but the function's own; None where that cannot be told.
        path: The names from there to the innermost module.
        kind: The name of that module's class.
        line: File, number and function.
    """

    base: str | None
    path: tuple[str, ...]
    kind: str
    line: tuple[str, int, str] | None


UNKNOWN = Trace(None, (), "", None)


class Graph(NamedTuple):
    """The products in a graph of Dynamo's.

    Attributes:
        nodes: Each node's trace, and whether it is a product, by its name; in the order of the graph.
        products: The products' traces, and which inputs of the graph they depend on, as bits.
        inputs: For each input the traces of the products that have it as an operand.
        saved: The traces of the products that have a node of the forward pass as an operand, or whose output it is,
            by the name that the node has in Inductor's graph.
    """

    nodes: dict[str, tuple[Trace, bool]]
    products: tuple[tuple[Trace, int], ...]
    inputs: tuple[frozenset[Trace], ...]
    saved: dict[str, frozenset[Trace]]

    def product(self, names: list[str], fused: bool) -> Trace:
        """The product among the nodes from which a kernel was made; it comes last, after what makes its operands."""
        order = {name: place for place, name in enumerate(self.nodes)}
        if not names or any(name not in order for name in names):
            return UNKNOWN
        last = max(names, key=order.__getitem__)
        if fused and not self.nodes[last][1]:  # the program's sum
            products = [name for name in names if self.nodes[name][1]]
            return self.nodes[products[0]][0] if len(products) == 1 else UNKNOWN
        return UNKNOWN if fused and sum(self.nodes[name][1] for name in names) > 1 else self.nodes[last][0]

    def depending_on(self, inputs: int) -> frozenset[Trace]:
        """The products that depend on just these inputs, or, of one that was taken apart, on the fewest more."""
        able = [(trace, its) for trace, its in self.products if its & inputs == inputs]
        return frozenset(trace for trace, its in able if not any(its & other == other != its for _, other in able))


_generated: dict[int, tuple[CodeType, bool]] = {}
_lines: dict[tuple[int, int, int], tuple[CodeType, Graph | None, Trace]] = {}
_graphs: dict[int, tuple[weakref.ref[Any], Graph]] = {}  # by the identity of the GraphModule


def is_generated(code: CodeType) -> bool:
    """Whether a compiler has made this code. By identity: hashing a code object reads all of it."""
    known = _generated.get(id(code))
    if known is None:
        if len(_generated) > 10_000:
            _generated.clear()
        made = code.co_filename.startswith(_EVAL) or _INDUCTOR.search(code.co_filename) is not None
        known = _generated[id(code)] = (code, made)
    return known[1]


def forward(frame: FrameType) -> tuple[Trace, Graph | None]:
    """The trace of the call that a frame of generated code makes, and the graph that it is part of."""
    graph = _graph_of_dynamo(frame)
    if graph is not None and not graph.saved and (text := _text(frame)):
        _read_saved(graph, _parse(text)[0])
    return _once(frame, graph, _in_module if _is_module(frame) else _in_wrapper), graph


def backward(frame: FrameType, graph: Graph | None) -> Trace:
    """The trace of a call in the backward pass of a graph."""
    return _once(frame, graph, _in_module if _is_module(frame) else _in_backward_wrapper)


def _once(frame: FrameType, graph: Graph | None, find: Callable[[FrameType, Graph | None], Trace]) -> Trace:
    code = frame.f_code
    key = (id(code), frame.f_lineno, id(graph))  # graphs that look alike share their code
    known = _lines.get(key)
    if known is None:
        if len(_lines) > 10_000:
            _lines.clear()
        known = _lines[key] = (code, graph, find(frame, graph))
    return known[2]


def _is_module(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_EVAL)


def _in_module(frame: FrameType, graph: Graph | None) -> Trace:
    """Of a GraphModule, whose nodes are there: by the name that the line assigns to."""
    nodes = getattr(getattr(frame.f_locals.get("self"), "graph", None), "nodes", ())
    found = _ASSIGNED.match(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
    name = None if found is None else found[1]
    return next((_trace(node) for node in nodes if node.name == name), UNKNOWN)


def _trace(node: Any) -> Trace:
    meta = node.meta
    lines = _LINE.findall(meta.get("stack_trace") or "")
    line = (lines[-1][0], int(lines[-1][1]), lines[-1][2]) if lines else None
    in_backward = meta.get("autograd_backward") or meta.get("partitioner_tag") == "is_backward"
    key = "fwd_nn_module_stack" if in_backward and "nn_module_stack" not in meta else "nn_module_stack"
    if in_backward and key not in meta:
        return UNKNOWN._replace(line=line)
    stack = meta.get(key)
    if not stack:
        return Trace("", (), "", line)
    written, kind = list(stack.values())[-1]
    found = _BASE.match(str(written))
    if found is None:
        return UNKNOWN._replace(line=line)
    path = tuple(part for part in re.findall(r"\w+", found[3]) if part != "_modules")
    return Trace(f"{found[1]}['{found[2]}']", path, getattr(kind, "__name__", str(kind).rpartition(".")[2]), line)


def _graph_of_dynamo(frame: FrameType) -> Graph | None:
    """The graph that a frame was compiled from, of which AOTAutograd's function has a method as an attribute."""
    outer = frame.f_back
    while outer is not None:
        if outer.f_code.co_name == "_fn":
            module: Any = getattr(getattr(outer.f_locals.get("fn"), "named_parameters", None), "__self__", None)
            nodes = getattr(getattr(module, "graph", None), "nodes", None)
            if nodes is not None:
                known = _graphs.get(id(module))
                if known is None or known[0]() is not module:
                    if len(_graphs) > 1000:
                        _graphs.clear()
                    known = _graphs[id(module)] = (weakref.ref(module), _read(nodes))
                return known[1]
        outer = outer.f_back
    return None


def _read(nodes: Iterable[Any]) -> Graph:
    traces: dict[str, tuple[Trace, bool]] = {}
    products: list[tuple[Trace, int]] = []
    roots: dict[Any, Any] = {}  # of a view, what it is a view of
    inputs: dict[Any, set[Trace]] = {}
    reached: dict[Any, int] = {}  # the inputs that a node depends on
    for node in nodes:
        if node.op == "placeholder":
            reached[node] = 1 << len(inputs)
            inputs[node] = set()
            continue
        operands = [roots.get(each, each) for each in node.all_input_nodes]
        reached[node] = functools.reduce(operator.or_, (reached.get(each, 0) for each in operands), 0)
        if node.op not in ("call_function", "call_method"):
            continue
        trace, product = traces[node.name] = _trace(node), _multiplies(node.target)
        if product:
            products.append((trace, reached[node]))
            for operand in operands:
                if operand in inputs:
                    inputs[operand].add(trace)
        elif len(operands) == 1:
            roots[node] = operands[0]
    return Graph(traces, tuple(products), tuple(frozenset(found) for found in inputs.values()), {})


def _multiplies(target: Any) -> bool:
    if not _HIDING.isdisjoint(kind.__name__ for kind in type(target).__mro__):
        return True
    return _PRODUCTS.match(target if isinstance(target, str) else getattr(target, "__name__", "")) is not None


def _read_saved(graph: Graph, calls: dict[str, tuple[str, list[str]]]) -> None:
    """Find the products of Inductor's forward graph in that of Dynamo's by the inputs that they depend on."""
    reached: dict[str, int] = {}
    using: dict[str, set[Trace]] = {}
    for name, (called, arguments) in calls.items():
        bits = (reached.get(each, 1 << place if (place := _input(each)) is not None else 0) for each in arguments)
        reached[name] = functools.reduce(operator.or_, bits, 0)
        if _PRODUCTS.match(called):
            traces = graph.depending_on(reached[name])
            for each in (name, *arguments):
                using.setdefault(_root(each, calls), set()).update(traces)
    graph.saved.update({name: frozenset(using.get(_root(name, calls), ())) for name in calls})


def _input(name: str) -> int | None:
    number = name.removeprefix("primals_")
    return int(number) - 1 if number != name and number.isdecimal() else None


def _root(name: str, calls: dict[str, tuple[str, list[str]]]) -> str:
    while name in calls and calls[name][0] in _VIEWS and calls[name][1]:
        name = calls[name][1][0]
    return name


def _text(frame: FrameType) -> str | None:
    """The graph from which Inductor has made the wrapper that is running, as it printed it."""
    outer = frame.f_back
    while outer is not None:
        text = getattr(outer.f_locals.get("self"), "inductor_post_grad_graph_str", None)
        if isinstance(text, str):
            return text
        outer = outer.f_back
    return None


def _comment_above(frame: FrameType) -> tuple[list[str], list[str]] | None:
    found = _COMMENT.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno - 1))
    if found is None:
        return None
    return [name for name in found[1].split(", ") if name], found[2].split(", ")


def _in_wrapper(frame: FrameType, graph: Graph | None) -> Trace:
    """Of Inductor's wrapper: a comment above each kernel has the nodes of Dynamo's graph from which it was made."""
    comment = _comment_above(frame)
    if comment is None or graph is None:
        return UNKNOWN
    names, operators = comment
    kernel = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    fused = "aten.add" in operators and any(f"kernels.{name}(" in kernel for name in _SUMS)
    return graph.product(names, fused)


def _in_backward_wrapper(frame: FrameType, graph: Graph | None) -> Trace:
    """Of Inductor's wrapper of a backward pass, whose comments have its own nodes.

    Which product's gradient it is follows from the parameter: the weight is one operand of the input's gradient,
    and the other product is that weight's gradient, which the graph returns in its place.
    """
    comment, text = _comment_above(frame), _text(frame)
    if comment is None or graph is None or not text or not comment[0]:
        return UNKNOWN
    calls, lines, returned = _parse(text)
    own = comment[0][-1]
    if own not in calls:
        return UNKNOWN
    candidates: frozenset[Trace] | None = None
    if len(returned) == len(graph.inputs):
        for using in _products(own, calls, returned, graph):
            candidates = using if candidates is None else candidates & using
    # The text may come from a cache, and the program may have changed since: then the lines are others.
    if own in lines and {trace.line for trace, _ in graph.nodes.values()}.issuperset(lines.values()):
        line = lines[own]
        here = frozenset(trace for trace, product in graph.nodes.values() if product and trace.line == line)
        candidates = here if candidates is None else candidates & here
    else:
        line = None
    places = {trace[:3] for trace in candidates or ()}
    written = {trace.line for trace in candidates or ()}
    told = next(iter(places)) if len(places) == 1 else UNKNOWN[:3]
    return Trace(*told, next(iter(written)) if len(written) == 1 else line)


def _parse(text: str) -> tuple[dict[str, tuple[str, list[str]]], dict[str, tuple[str, int, str]], list[str]]:
    """Of a printed graph: each node's operator and arguments, its line, and what the graph returns."""
    calls: dict[str, tuple[str, list[str]]] = {}
    lines: dict[str, tuple[str, int, str]] = {}
    returned: list[str] = []
    line: tuple[str, int, str] | None = None
    for row in text.splitlines():
        if found := _LINE_COMMENT.match(row):
            line = (found[1], int(found[2]), found[3])
        elif "# No stacktrace found" in row:
            line = None
        elif found := _CALL.match(row) or _ITEM.match(row):
            item = found.re is _ITEM
            calls[found[1]] = ("getitem" if item else found[2].split(".")[1], _NAME.findall(found[2 if item else 3]))
            if line is not None:
                lines[found[1]] = line
        elif row.strip().startswith("return "):
            returned = [part.strip() for part in row.strip()[len("return ") :].strip("()").split(",")]
    return calls, lines, returned


def _products(
    own: str, calls: dict[str, tuple[str, list[str]]], returned: list[str], graph: Graph
) -> Iterable[frozenset[Trace]]:
    """What each operand of a product in the backward pass, and the input whose gradient it is, tells of the other."""
    for name in calls[own][1]:
        root = _root(name, calls)
        place = _input(root)
        using = graph.saved.get(root, frozenset()) if place is None else graph.inputs[place]
        if root not in calls and using:
            yield using
    for place, name in enumerate(returned):
        if _root(name, calls) == own and graph.inputs[place]:
            yield graph.inputs[place]


class Around(NamedTuple):
    """What the forward call of a compiled graph leaves behind for its backward calls; keeps no module alive.

    Attributes:
        graph: The graph.
        modules: The innermost and the outermost module around the compiled function; None outside of all.
        bases: The modules that the function uses, by how it calls them.
        caller: The user's code that has called one of torch's own modules, all of which was compiled; else None.
    """

    graph: Graph | None
    modules: tuple[weakref.ref[torch.nn.Module], weakref.ref[torch.nn.Module]] | None
    bases: dict[str, weakref.ref[torch.nn.Module]]
    caller: tuple[CodeType | None, int]

    def place(self, aliases: tuple[str, ...], trace: Trace) -> GraphPlace:
        """The place of one call; a graph keeps no line of a call that is in torch's modules alone."""
        code, instruction = self.caller if trace.line is None and trace.base is not None else (None, -1)
        return GraphPlace(aliases, code, instruction, trace.line, self)


class GraphPlace(Place):
    """The place of a call in a compiled graph. All calls of the graph share a node, which runs the backward graph."""

    __slots__ = ("around",)

    def __init__(
        self,
        aliases: tuple[str, ...],
        code: CodeType | None,
        instruction: int,
        line: tuple[str, int, str] | None,
        around: Around,
    ) -> None:
        super().__init__(aliases, code, instruction, line)
        self.around = around

    def common(self, other: Place) -> Place:
        if isinstance(other, GraphPlace):
            self.around.bases.update(other.around.bases)
        common = super().common(other)
        return GraphPlace(common.aliases, common.code, common.instruction, common.line, self.around)
