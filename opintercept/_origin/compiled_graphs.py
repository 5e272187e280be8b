"""The modules and lines of calls in code that torch.compile has made, read from the graphs behind that code.

Invariant: what is kept holds names and lines, but no graph, module or frame. What a graph does not tell is None.
Must not import torch's compilers. All attributes of torch that this reads are private; if torch drops them, calls
in compiled code have no module and no line.
"""

from __future__ import annotations

import atexit
import functools
import linecache
import operator
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from opintercept._core.call_site import CallSite, KernelPart, written_lines
from opintercept._origin import fused
from opintercept._origin.sources import Source, parse
from opintercept._origin.stack import NOT_SOURCE, local_of
from opintercept._origin.wrappers import wrapper_at

if TYPE_CHECKING:
    import torch

_EVAL = "<eval_with_key>"  # the file of a GraphModule's forward, with the backends "eager" and "aot_eager"
# Compiled when they are first used, and kept by `re`: importing the package should cost little.
_INDUCTOR = r"[/\\]c[a-z2-7]{40,}\.py$"  # the file of Inductor's wrapper, named by its hash
_COMMENT = r"# Topologically Sorted Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]"
_ASSIGNED = r"\s*(\w+)(?:\s*:[^=]+)? = "
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_CALL = r"\s*(\w+)(?:: [^=]*?)? = torch\.ops\.([\w.]+)\((.*)\)(?:;.*)?$"
_ITEM = r"\s*(\w+)(?:: [^=]*?)? = (\w+)\[\d+\](?:;.*)?$"
_NAME = r"\b[A-Za-z_]\w*\b"

# Functions that multiply, by their names in a graph of Dynamo or AOTAutograd.
_PRODUCTS = (
    r"_?_?(?:r?matmul|linear|mm|bmm|mv|dot|vdot|inner|addmm|addbmm|baddbmm|addmv|einsum|tensordot|chain_matmul|multi_dot"
    r"|bilinear|cdist|scaled_mm|grouped_mm|multi_head_attention_forward|scaled_dot_product\w*|conv\w*"
    r"|_transformer_encoder_layer_fwd|_native_multi_head_attention|lstm\w*|gru\w*|rnn_\w+)(?:__|_)?$"
)
_HIDING = frozenset(("HigherOrderOperator", "OpOverload", "OpOverloadPacket"))  # types of functions that may multiply
# Operators that pass a tensor on with other strides or another dtype, or pick one of several outputs.
_PASSING = (
    "permute t transpose reshape view _unsafe_view expand unsqueeze squeeze slice select clone alias detach _to_copy"
    " convert_element_type getitem"
)
_VIEWS = frozenset(_PASSING.split())
_SUMS = ("addmm", "baddbmm", "bias_addmm", "_mm_plus_mm")  # kernels that may include a sum of the program


class Trace(NamedTuple):
    """Where a call in a graph comes from."""

    # Where the compiled function has the module that makes the call; `()` if the function makes it outside of further
    # modules; None if unknown.
    source: Source | None
    outermost: Source | None  # where it has the outermost module that it calls for this
    path: tuple[str, ...]  # the attributes from the graph's own module, in graphs that do not say more
    kind: str  # the name of the innermost module's class
    line: fused.Line | None  # the file, line number and function, as graphs write them
    below: fused.Line | None = None  # the program's, where those are in torch, as under `torch.set_default_device`

    @property
    def source_line(self) -> fused.Line | None:
        """The line of the program; None if only torch's is known."""
        is_torchs = self.line is not None and self.line[0].startswith(NOT_SOURCE)
        return self.below if is_torchs else self.line


UNKNOWN = Trace(None, None, (), "", None)


class Graph(NamedTuple):
    """The matrix products in a graph of Dynamo."""

    nodes: dict[str, tuple[Trace, bool]]  # the trace of each node and whether it is a product, in the graph's order
    products: tuple[tuple[Trace, int], ...]  # the trace of each product and the inputs that it depends on, as bits
    inputs: tuple[frozenset[Trace], ...]  # for each input, the traces of the products that have it as an operand
    # For each node of the forward pass, by its name in Inductor's graph, the traces of the products that have it as an
    # operand or as their output.
    saved: dict[str, frozenset[Trace]]
    placed: dict[str, Trace]  # the traces of its nodes, by their names in Inductor's graph

    def product(self, names: list[str], fused: bool) -> Trace:
        """Return the product among the nodes that a kernel was made of. It is the last, after those of its operands."""
        order = {name: place for place, name in enumerate(self.nodes)}
        if not names or any(name not in order for name in names):
            return UNKNOWN
        last = max(names, key=order.__getitem__)
        if fused and not self.nodes[last][1]:  # a sum of the program
            products = [name for name in names if self.nodes[name][1]]
            return self.nodes[products[0]][0] if len(products) == 1 else UNKNOWN
        return UNKNOWN if fused and sum(self.nodes[name][1] for name in names) > 1 else self.nodes[last][0]

    def depending_on(self, inputs: int) -> frozenset[Trace]:
        """Return the products that depend on these inputs alone, or else, if one was decomposed, on the fewest more."""
        able = [(trace, its) for trace, its in self.products if its & inputs == inputs]
        return frozenset(trace for trace, its in able if not any(its & other == other != its for _, other in able))


_generated: dict[int, tuple[CodeType, bool]] = {}
_lines: dict[tuple[int, int, int], tuple[CodeType, Graph | None, Trace]] = {}
atexit.register(_generated.clear)  # see `stack`
atexit.register(_lines.clear)
_graphs: dict[int, tuple[weakref.ref[Any], Graph]] = {}  # by the identity of the GraphModule


def is_generated(code: CodeType) -> bool:
    """Whether a compiler has made this code. Cached by identity, since hashing a code object reads all of it."""
    known = _generated.get(id(code))
    if known is None:
        if len(_generated) > 10_000:
            _generated.clear()
        known = _generated[id(code)] = (code, code.co_filename.startswith(_EVAL) or is_wrapper(code))
    return known[1]


def is_wrapper(code: CodeType) -> bool:
    """Whether code is that of a wrapper of Inductor, as `_engines/compiled/stack.cpp` asks, too."""
    return re.search(_INDUCTOR, code.co_filename) is not None


def forward(frame: FrameType, graph: Graph | None) -> Trace:
    """Return the trace of the call that a frame of generated code makes, which was compiled from this graph."""
    if graph is not None and not graph.saved and (text := _text(frame)):
        _read_saved(graph, _parse(text)[0])
    return _once(frame, graph, _in_module if _is_module(frame) else _in_wrapper)


def backward(frame: FrameType, graph: Graph | None) -> Trace:
    """Return the trace of a call in the backward pass of a graph."""
    return _once(frame, graph, _in_module if _is_module(frame) else _in_backward_wrapper)


class Computed(NamedTuple):
    """A node that a generated kernel computes: its operator, where it comes from, and its name in Inductor's graph."""

    op: str
    trace: Trace
    name: str


_computed: dict[tuple[int, int], tuple[CodeType, Graph | None, dict[int, tuple[Computed, ...]]]] = {}
atexit.register(_computed.clear)


def computed(frame: FrameType, graph: Graph | None) -> tuple[Computed, ...]:
    """Return what the kernel computes that a frame of a wrapper launches; nothing for other calls.

    Args:
        frame: The frame.
        graph: Dynamo's graph, of which the wrapper is the forward or the backward pass.
    """
    code = frame.f_code
    if _is_module(frame) or frame.f_lineno not in wrapper_at(code.co_filename).launches:
        return ()
    key = (id(code), id(graph))
    known = _computed.get(key)
    if known is None:
        if len(_computed) > 1000:
            _computed.clear()
        known = _computed[key] = (code, graph, _computed_in(code.co_filename, _text(frame) or "", graph))
    return known[2].get(frame.f_lineno, ())


def _computed_in(file: str, text: str, graph: Graph | None) -> dict[int, tuple[Computed, ...]]:
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    stacks = getattr(cache, "linemaps", {}).get(file, ())
    whole = fused.InductorGraph(text)
    events = wrapper_at(file).events
    traces = _traces(whole, graph)
    nodes = fused.nodes_of(whole, events, zip(*stacks, strict=False) if len(stacks) == 2 else ())
    return {
        line: tuple(Computed(node.op, traces[node.name], node.name) for node in found)
        for line, found in nodes.items()
        if found
    }


def _traces(whole: fused.InductorGraph, graph: Graph | None) -> dict[str, Trace]:
    """The trace of each node of Inductor's graph.

    Both graphs have the program's lines. If modules share one, their nodes on it follow each other as in Dynamo's
    graph. Where there are not as many runs of nodes as modules, as in a backward pass, a node belongs to the only one
    of those modules whose saved tensors or weights it is connected with.
    """
    lines = _lines_now(whole, graph)
    traces = {
        name: UNKNOWN._replace(line=None if node.line is None else lines[node.line])
        for name, node in whole.nodes.items()
    }
    if graph is None:
        return traces
    places: dict[fused.Line, list[tuple[Trace, bool]]] = {}
    for trace, product in graph.nodes.values():
        if trace.line is not None and trace.source is not None:
            places.setdefault(trace.line, []).append((trace, product))
    names: dict[fused.Line, list[str]] = {}
    for name in whole.nodes:
        if (line := traces[name].line) in places and line is not None:
            names.setdefault(line, []).append(name)
    told: dict[str, Trace] = {}
    if any(name.startswith("tangents_") for name in whole.nodes):
        _connect(whole, graph, traces, places, told)
    else:
        around: dict[str, Trace] = {}
        for line, of_line in names.items():
            exact, outer = _aligned(places[line], of_line, whole)
            told |= exact
            around |= outer
        graph.placed.update(told)
        told = around | told
    return traces | told


def _aligned(
    its: list[tuple[Trace, bool]], names: list[str], whole: fused.InductorGraph
) -> tuple[dict[str, Trace], dict[str, Trace]]:
    """Which of a line's nodes has which trace, if their order tells, and of the others which trace is around them.

    Products divide both into the same parts. Nodes of a batch norm and of what follows it on the line cannot be told
    apart, but all are inside the module of the latter.
    """
    order = {name: place for place, name in enumerate(whole.nodes)}
    ours: list[list[list[str]]] = [[]]  # runs of nodes that follow each other, between products
    before = -2
    for name in names:
        if re.match(_PRODUCTS, whole.nodes[name].op.partition("::")[2]):
            ours += [[[name]], []]
        elif ours[-1] and order[name] == before + 1:
            ours[-1][-1].append(name)
        else:
            ours[-1].append([name])
        before = order[name]
    theirs: list[list[Trace]] = [[]]
    for trace, product in its:
        if product:
            theirs += [[trace], []]
        elif not theirs[-1] or theirs[-1][-1] != trace:
            theirs[-1].append(trace)
    if len({trace for trace, _ in its}) == 1:
        return dict.fromkeys(names, its[0][0]), {}
    if len(ours) != len(theirs):
        ours, theirs = [[run for part in ours for run in part]], [[trace for part in theirs for trace in part]]
    found: dict[str, Trace] = {}
    around: dict[str, Trace] = {}
    for runs, traces in zip(ours, theirs, strict=True):
        outer = min(traces, key=lambda trace: len(trace.source or ()), default=UNKNOWN)
        if len(set(traces)) == 1:
            found |= dict.fromkeys((name for run in runs for name in run), traces[0])
        elif len(runs) == len(traces):
            found |= {name: trace for run, trace in zip(runs, traces, strict=True) for name in run}
        elif outer.source and all(_is_inside(trace.source or (), outer.source) for trace in traces):
            around |= dict.fromkeys((name for run in runs for name in run), outer)
    return found, around


def _connect(
    whole: fused.InductorGraph,
    graph: Graph,
    traces: dict[str, Trace],
    places: dict[fused.Line, list[tuple[Trace, bool]]],
    told: dict[str, Trace],
) -> None:
    """Add the traces of the nodes of a backward pass.

    Several modules may share a line. Then the neighbours of a node tell: saved tensors, weights, and other nodes.
    """
    able: dict[fused.Line, set[Trace]] = {}
    for line, its in places.items():
        able[line] = {trace for trace, product in its if not product} or {trace for trace, _ in its}
    near: dict[str, set[Trace]] = {}
    for name, node in whole.nodes.items():
        if not node.op and (place := _input(name)) is not None:
            near[name] = set(graph.inputs[place]) if place < len(graph.inputs) else set()
        elif not node.op and name in graph.placed:
            near[name] = {graph.placed[name]}
    users: dict[str, list[str]] = {}
    for name in whole.nodes:
        for operand in whole.operands(name):
            users.setdefault(operand, []).append(name)
    open_ = {name for name, node in whole.nodes.items() if node.op and traces[name].line in able}
    while open_:
        fresh: dict[str, Trace] = {}
        for name in open_:
            around = [*whole.operands(name), *users.get(name, ())]
            sources = {trace.source for each in around for trace in near.get(each, ()) if trace.source}
            those = able[traces[name].line]  # type: ignore[index]
            for fits in (tuple.__eq__, _is_inside):
                found = {each for each in those if any(fits(source, each.source or ()) for source in sources)}
                if len(those) == 1 or len(found) == 1:
                    (fresh[name],) = those if len(those) == 1 else found
                    break
        if not fresh:
            return
        told |= fresh
        near |= {name: {trace} for name, trace in fresh.items()}
        open_ -= fresh.keys()


def _is_inside(source: Source, outer: Source) -> bool:
    return source[: len(outer)] == outer


def _lines_now(whole: fused.InductorGraph, graph: Graph | None) -> dict[fused.Line, fused.Line | None]:
    """Where the lines of a graph's text are in the program now; None for those that are not found.

    The text may come from a cache that is older than the program. It has what stood on each line.
    """
    ours = None if graph is None else dict.fromkeys(trace.line for trace, _ in graph.nodes.values() if trace.line)
    fresh = ours is not None and ours.keys() >= whole.written.keys()
    found: dict[fused.Line, fused.Line | None] = {}
    for line, code in whole.written.items():
        same = [each for each in ours or (line,) if each[2] == line[2] and linecache.getline(*each[:2]).strip() == code]
        if line in same or (fresh and not same):
            found[line] = line
        else:
            found[line] = same[0] if len(same) == 1 else None
    return found


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
    """Find the node of a GraphModule by the name to which the running line assigns."""
    nodes = getattr(getattr(local_of(frame, "self"), "graph", None), "nodes", ())
    found = re.match(_ASSIGNED, linecache.getline(frame.f_code.co_filename, frame.f_lineno))
    name = None if found is None else found[1]
    return next((_trace(node) for node in nodes if node.name == name), UNKNOWN)


def _trace(node: Any) -> Trace:
    meta = node.meta
    # Dynamo has inlined what replaces a function.
    lines = [line for line in fused.frames(meta.get("stack_trace")) if not line[0].startswith(_HERE)]
    line = lines[-1] if lines else None
    below = next((line for line in reversed(lines) if not line[0].startswith(NOT_SOURCE)), None)
    nowhere = UNKNOWN._replace(line=line, below=below)
    in_backward = meta.get("autograd_backward") or meta.get("partitioner_tag") == "is_backward"
    key = "fwd_nn_module_stack" if in_backward and "nn_module_stack" not in meta else "nn_module_stack"
    if in_backward and key not in meta:
        return nowhere
    stack = meta.get(key)
    if not stack:
        return nowhere._replace(source=())
    written = [(str(name), kind) for name, kind in stack.values()]
    name, kind = written[-1]
    source = parse(name)
    if source is None:  # of torch.export and torch.fx, which write the qualified name
        return nowhere._replace(path=tuple(filter(None, name.split("."))))
    return Trace(source, parse(written[0][0]), (), getattr(kind, "__name__", str(kind).rpartition(".")[2]), line, below)


def graph_of(frame: FrameType) -> tuple[Graph | None, bool]:
    """Return the graph that a frame was compiled from, and whether the innermost function of Dynamo decides that.

    AOTAutograd's function has one of the graph's methods as attribute.
    """
    outer, functions = frame.f_back, 0
    while outer is not None:
        if outer.f_code.co_name == "_fn":
            function = local_of(outer, "fn")
            functions += function is not None
            module: Any = getattr(getattr(function, "named_parameters", None), "__self__", None)
            nodes = getattr(getattr(module, "graph", None), "nodes", None)
            if nodes is not None:
                known = _graphs.get(id(module))
                if known is None or known[0]() is not module:
                    if len(_graphs) > 1000:
                        _graphs.clear()
                    known = _graphs[id(module)] = (weakref.ref(module), _read(nodes))
                return known[1], functions == 1
        outer = outer.f_back
    return None, True


def _read(nodes: Iterable[Any]) -> Graph:
    traces: dict[str, tuple[Trace, bool]] = {}
    products: list[tuple[Trace, int]] = []
    roots: dict[Any, Any] = {}  # by a view's node, the node that it is a view of
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
    return Graph(traces, tuple(products), tuple(frozenset(found) for found in inputs.values()), {}, {})


def _multiplies(target: Any) -> bool:
    if not _HIDING.isdisjoint(kind.__name__ for kind in type(target).__mro__):
        return True
    return re.match(_PRODUCTS, target if isinstance(target, str) else getattr(target, "__name__", "")) is not None


def _read_saved(graph: Graph, calls: dict[str, tuple[str, list[str]]]) -> None:
    """Find the products of Inductor's forward graph in Dynamo's graph, by the inputs that they depend on."""
    reached: dict[str, int] = {}
    using: dict[str, set[Trace]] = {}
    for name, (called, arguments) in calls.items():
        bits = (reached.get(each, 1 << place if (place := _input(each)) is not None else 0) for each in arguments)
        reached[name] = functools.reduce(operator.or_, bits, 0)
        if re.match(_PRODUCTS, called):
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
    """Return the text of the graph from which Inductor has made the running wrapper."""
    outer = frame.f_back
    while outer is not None:
        text = getattr(local_of(outer, "self"), "inductor_post_grad_graph_str", None)
        if isinstance(text, str):
            return text
        outer = outer.f_back
    return None


def _comment_above(frame: FrameType) -> tuple[list[str], list[str]] | None:
    found = re.search(_COMMENT, linecache.getline(frame.f_code.co_filename, frame.f_lineno - 1))
    if found is None:
        return None
    return [name for name in found[1].split(", ") if name], found[2].split(", ")


def _in_wrapper(frame: FrameType, graph: Graph | None) -> Trace:
    """Find the call of Inductor's wrapper by the comment above each kernel, which lists nodes of Dynamo's graph."""
    comment = _comment_above(frame)
    if comment is None or graph is None:
        return UNKNOWN
    names, operators = comment
    kernel = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    fused = "aten.add" in operators and any(f"kernels.{name}(" in kernel for name in _SUMS)
    return graph.product(names, fused)


def _in_backward_wrapper(frame: FrameType, graph: Graph | None) -> Trace:
    """Find the call of Inductor's wrapper of a backward pass, whose comments list nodes of the backward graph only.

    The weight tells which product the gradient belongs to: it is an operand of the input's gradient, and the graph
    returns the weight's own gradient at the weight's position.
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
    # The text may come from a cache and be older than the program. Then it has other lines.
    if own in lines and {trace.line for trace, _ in graph.nodes.values()}.issuperset(lines.values()):
        line = lines[own]
        here = frozenset(trace for trace, product in graph.nodes.values() if product and trace.line == line)
        candidates = here if candidates is None else candidates & here
    else:
        line = None
    places = {trace._replace(line=None) for trace in candidates or ()}
    written = {trace.line for trace in candidates or ()}
    told = next(iter(places)) if len(places) == 1 else UNKNOWN
    return told._replace(line=next(iter(written)) if len(written) == 1 else line)


def _parse(text: str) -> tuple[dict[str, tuple[str, list[str]]], dict[str, tuple[str, int, str]], list[str]]:
    """Return each node's operator and arguments, each node's line, and what the graph returns, from a graph's text."""
    calls: dict[str, tuple[str, list[str]]] = {}
    lines: dict[str, tuple[str, int, str]] = {}
    returned: list[str] = []
    line: tuple[str, int, str] | None = None
    for row in text.splitlines():
        if found := re.match(fused.LINE_COMMENT, row):
            line = (found[1], int(found[2]), found[3])
        elif "# No stacktrace found" in row:
            line = None
        elif found := re.match(_CALL, row) or re.match(_ITEM, row):
            item = found.re.pattern == _ITEM
            called = "getitem" if item else found[2].split(".")[1]
            calls[found[1]] = (called, re.findall(_NAME, found[2 if item else 3]))
            if line is not None:
                lines[found[1]] = line
        elif row.strip().startswith("return "):
            returned = [part.strip() for part in row.strip()[len("return ") :].strip("()").split(",")]
    return calls, lines, returned


def _products(
    own: str, calls: dict[str, tuple[str, list[str]]], returned: list[str], graph: Graph
) -> Iterable[frozenset[Trace]]:
    """Yield the forward products that each operand of a backward product, and its place in the outputs, allow."""
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
    """What a forward call in a compiled graph notes for its backward calls. Keeps no module alive."""

    graph: Graph | None
    # The innermost and the outermost module around the compiled function; None outside of all modules.
    modules: tuple[weakref.ref[torch.nn.Module], weakref.ref[torch.nn.Module]] | None
    bases: dict[Source, weakref.ref[torch.nn.Module]]  # the modules that the function has, by where it has them
    # The program's code that called a compiled module of torch itself, with its instruction; else None and -1.
    caller: tuple[CodeType | None, int]

    def place(
        self, aliases: tuple[str, ...], trace: Trace, parts: tuple[tuple[Computed, str | None], ...] = ()
    ) -> GraphCallSite:
        """Return the place of one call. A graph has no line for a call that only modules of torch make.

        Args:
            aliases: The names of its module.
            trace: Its trace.
            parts: What a generated kernel computes, with the name of each module.
        """
        line = trace.source_line
        code, instruction = self.caller if line is None and trace.source is not None else (None, -1)
        return GraphCallSite(aliases, code, instruction, line, self, parts)


class GraphCallSite(CallSite):
    """The place of a call in a compiled graph, whose calls all share the node that runs the backward graph."""

    __slots__ = ("_parts", "_source", "around")

    def __init__(
        self,
        aliases: tuple[str, ...],
        code: CodeType | None,
        instruction: int,
        line: tuple[str, int, str] | None,
        around: Around,
        parts: tuple[tuple[Computed, str | None], ...] = (),
    ) -> None:
        super().__init__(aliases, code, instruction, line)
        self.around = around
        self._parts = parts
        self._source: str | None = None  # that of the parts, once somebody has asked

    @property
    def source(self) -> str | None:
        """As of every call site; the lines of all parts of a generated kernel."""
        if self._parts and self._source is None:
            lines = [part.trace.source_line for part, _ in self._parts]
            self._source = written_lines([line for line in lines if line is not None])
        return self._source if self._parts else super().source

    @property
    def parts(self) -> tuple[KernelPart, ...]:
        """As of every call site."""
        return tuple(
            KernelPart(part.op, module, None if line is None else written_lines([line]), part.name)
            for part, module in self._parts
            for line in (part.trace.source_line,)
        )

    def common(self, other: CallSite) -> CallSite:
        if isinstance(other, GraphCallSite):
            self.around.bases.update(other.around.bases)
        common = super().common(other)
        return GraphCallSite(common.aliases, common.code, common.instruction, common.line, self.around)
