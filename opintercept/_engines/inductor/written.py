"""What Triton kernels stand for, read from the graph's fragment that Inductor writes above each of them.

Also graphs of before a block, and of Inductor's cache, have that text. It names nodes where a launch passes variables:
the two are joined by the order of the arguments, and by layouts, inputs and earlier launches, which must all agree.
Invariant: what the text leaves open is left out. Nothing is run or imported for it.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import torch

from opintercept._ops.fragment import Fragment, FragmentNode, HeldNode, Ref, of_aten
from opintercept._ops.generated import GeneratedKernel
from opintercept._origin.wrappers import Event, Look, WrapperSource

_MOST = 5000  # ways to join what a kernel's text names with its arguments


def offer(source: WrapperSource) -> None:
    """Let the launches of a wrapper ask its text what they stand for, unless Inductor's graph has told them."""
    if "# Graph fragment:" in source.text:
        tells = cache(lambda: told(source))
        for kernel in source.launches.values():
            kernel.tells = tells


def told(source: WrapperSource) -> dict[int, Fragment]:
    """What the launches of a wrapper stand for by its text, by line."""
    try:
        return _told(source)
    except Exception:  # the text of another torch
        return {}


def _told(source: WrapperSource) -> dict[int, Fragment]:
    texts = dict(_texts(source.text))
    inputs = source.inputs - {name for event in source.events for name in event.written if event.kind != "launch"}
    joined = _JoinedTexts(texts, _changed(source), inputs)
    for event in sorted(source.events, key=lambda event: event.line):
        if event.kind == "launch":
            joined.launch(source.launches[event.line], event)
        elif event.kind == "alias":
            joined.alias(event)
        else:
            joined.fill(event.written)
    return joined.found


class _KernelText(NamedTuple):
    """The text above a kernel.

    Attributes:
        reads: What it reads, also of its own, and how that lies.
        nodes: What it computes, with dtypes and sizes.
        writes: What it writes, also what no argument gets.
        loads: The arguments that its code loads, in the order in which it was generated.
    """

    reads: dict[str, Look]
    nodes: dict[str, tuple[FragmentNode, Look]]
    writes: tuple[str, ...]
    loads: tuple[str, ...]


_ABOVE = re.compile(
    r"^# Graph fragment:\n((?:#   [^\n]*\n)+)(\w+) = async_compile\.triton\([^\n]*?'''(.*?)^'''",
    re.MULTILINE | re.DOTALL,
)
_LOAD = re.compile(r"\btmp(\d+) = tl\.load\((\w+)")
_TYPE = r'Tensor "(\w+)\[([^\]]*)\]\[([^\]]*)\]\S*"'
_READ = re.compile(rf"%(\w+) : (?:{_TYPE}|Tensor ) = PlaceHolder\[target=\w+\]")
_NODE = re.compile(
    rf"%(\w+) : (?:{_TYPE})?(.*?)\[num_users=\d+\] = "
    r"call_function\[target=([\w.]+)\]\(args = (\(.*\)), kwargs = (\{.*\})\)"
)
_WRITES = re.compile(r"return ((?:%\w+(?:,|$))*)")


def _texts(text: str) -> Iterator[tuple[str, _KernelText]]:
    """The texts by kernel; without those that have a line of another form."""
    for lines, kernel, code in _ABOVE.findall(text):
        reads, nodes = {}, {}
        writes: tuple[str, ...] | None = None
        for line in (each.removeprefix("#   ") for each in lines.splitlines()):
            if found := _READ.fullmatch(line):
                name, *look = found.groups()
                reads[name] = _look(*look)
            elif found := _NODE.fullmatch(line):
                name, *look, kind, target, args, kwargs = found.groups()
                node = _node(name, kind, look[0], target, args, kwargs)
                nodes[name] = node, _look(*look)._replace(stride=None)
            elif writes is None and (found := _WRITES.fullmatch(line)):
                writes = tuple(re.findall(r"%(\w+)", found[1]))
            else:
                break
        else:
            if writes is not None:
                # Inductor numbers values as it goes, wherever it puts the lines that load them.
                loads = sorted(_LOAD.findall(code), key=lambda found: int(found[0]))
                items = _unpacked([node for node, _ in nodes.values()], reads, writes)
                nodes |= {item.name: (item, Look()) for item in items}
                yield kernel, _KernelText(reads, nodes, writes, tuple(dict.fromkeys(name for _, name in loads)))


def _look(dtype: str | None, size: str | None, stride: str | None) -> Look:
    name = _dtypes().get(dtype or "")
    return Look("" if name is None else str(name), _numbers(size), _numbers(stride))


def _numbers(text: str | None) -> tuple[int, ...] | None:
    """Sizes or strides; None if one is no number."""
    parts = [each.strip() for each in (text or "").split(",") if each.strip()]
    return tuple(map(int, parts)) if text is not None and all(map(str.isdecimal, parts)) else None


@cache
def _dtypes() -> dict[str, torch.dtype]:
    """Dtypes by their short names, which are private. Where a torch lacks them, no text is read."""
    try:
        from torch.utils._dtype_abbrs import dtype_abbrs
    except ImportError:
        return {}
    return {short: dtype for dtype, short in dtype_abbrs.items()}


def _node(name: str, kind: str, dtype: str | None, target: str, args: str, kwargs: str) -> FragmentNode:
    """A node; of what is no operator, or has arguments that the text does not tell, without its function."""
    made = _dtypes().get(dtype or "")
    func = _function(target)
    try:
        if func is None or kind or (dtype is not None and made is None):
            raise ValueError(f"{target} returns {kind or dtype}")
        given, named = _ArgumentText(args).value(), _ArgumentText(kwargs).value()
        arguments = [*getattr(getattr(func, "_schema", None), "arguments", ())]
        types = {each.name: str(each.type) for each in arguments}
        in_order = [str(each.type) for each in arguments] or [""] * len(given)
        given = tuple(_typed(each, kind) for each, kind in zip(given, in_order[: len(given)], strict=True))
        named = {key: _typed(each, types.get(key, "")) for key, each in named.items()}
    except (ValueError, IndexError):
        return FragmentNode(name, None, dtype=made)
    return of_aten(FragmentNode(name, func, given, named, made))


def _function(target: str) -> Any:
    if target in ("operator.getitem", "_operator.getitem"):
        return operator.getitem
    match target.split("."):
        case ["torch", "ops", space, packet, overload]:
            found = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
            return found if isinstance(found, torch._ops.OpOverload) else None
    return None


class _Unquoted(str):
    """What the text writes without quotation marks: a string, or a device."""


class _ArgumentText:
    """Reads arguments as `torch.fx.Node.format_node` writes them."""

    _TOKEN = re.compile(r"\s*(%\w+|torch\.\w+|[A-Za-z_]\w*(?::\d+)?|-?(?:\d[\d.]*(?:e[+-]?\d+)?|inf\b)|[\[\](){},:])")

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        place = 0
        while place < len(text):
            found = self._TOKEN.match(text, place)
            if found is None:
                raise ValueError(text)
            self._tokens.append(found[1])
            place = found.end()
        self._at = 0

    def value(self) -> Any:
        """The whole text as one value."""
        found = self._next()
        if self._at != len(self._tokens):
            raise ValueError("more than one value")
        return found

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _next(self) -> Any:
        token = self._take()
        if token == "[":
            return [*self._items("]")]
        if token == "(":
            return tuple(self._items(")"))
        if token == "{":
            return dict(self._pairs())
        if token.startswith("%"):
            return Ref(token[1:])
        if token in _NAMED:
            return _NAMED[token]
        if token.startswith("torch."):
            found = getattr(torch, token[6:], None)
            if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
                return found
        elif re.fullmatch(r"-?\d+", token):
            return int(token)
        elif token[-1].isdecimal() and token[0] in "-0123456789":
            return float(token)
        elif token.isidentifier() or ":" in token[1:]:
            return _Unquoted(token)
        raise ValueError(token)

    def _items(self, end: str) -> Iterator[Any]:
        while self._tokens[self._at] != end:
            yield self._next()
            if self._tokens[self._at] == ",":
                self._at += 1
            elif self._tokens[self._at] != end:
                raise ValueError("no comma between two values")
        self._at += 1

    def _pairs(self) -> Iterator[tuple[str, Any]]:
        while (key := self._take()) != "}":
            if not key.isidentifier() or self._take() != ":":
                raise ValueError("no name")
            yield key, self._next()
            if self._tokens[self._at] == ",":
                self._at += 1


_NAMED = {"True": True, "False": False, "None": None, "inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _typed(value: Any, kind: str) -> Any:
    """An argument of this type of a schema.

    Raises:
        ValueError: The text does not tell it.
    """
    if "str" in kind:
        if value is not None and not isinstance(value, _Unquoted):
            raise ValueError("a string that looks like another value")
        return value and str(value)
    if isinstance(value, _Unquoted):
        if "Device" not in kind:
            raise ValueError(f"{value} is no value of type {kind}")
        try:
            return torch.device(value)
        except RuntimeError as unknown:
            raise ValueError(value) from unknown
    if isinstance(value, (list, tuple)) and not isinstance(value, Ref):
        return type(value)([_typed(each, "") for each in value])
    return value


def _unpacked(nodes: Sequence[FragmentNode], reads: Mapping[str, Look], writes: Sequence[str]) -> list[FragmentNode]:
    """The two items of an operator that returns two tensors, which texts use and do not define.

    Whatever traces a graph takes both items, in order, so they have two numbers in a row.
    """
    dtypes = {name: look.dtype for name, look in reads.items()} | {each.name: str(each.dtype) for each in nodes}
    used = {name for node in nodes for name in node.operands()} | {*reads, *writes}
    items = sorted((name for name in used if _ITEM.fullmatch(name) and name not in dtypes.keys() - reads), key=_number)
    several = [each for each in nodes if [str(one.type) for one in _returns(each)] == ["Tensor", "Tensor"]]
    if len(several) != 1 or len(items) != 2 or _number(items[0]) + 1 != _number(items[1]):
        return []
    dtype = next((dtypes.get(name) for name in several[0].operands()), None)
    made = next((each for each in _dtypes().values() if str(each) == dtype), None)
    pairs = enumerate(items)
    return [FragmentNode(name, operator.getitem, (Ref(several[0].name), place), {}, made) for place, name in pairs]


_ITEM = re.compile(r"getitem(?:_\d+)?")


def _number(name: str) -> int:
    return int(name.partition("_")[2] or 0)


def _returns(node: FragmentNode) -> Sequence[Any]:
    return getattr(getattr(node.func, "_schema", None), "returns", ())


def _ordered(parts: Iterable[Iterable[FragmentNode]]) -> dict[str, FragmentNode]:
    """The nodes of all kernels, each behind its operands. One that two texts define in two ways is none."""
    nodes: dict[str, FragmentNode] = {}
    for node in itertools.chain.from_iterable(parts):
        if nodes.setdefault(node.name, node) != node:
            nodes[node.name] = FragmentNode(node.name, None)
    try:
        order = [*TopologicalSorter({name: [*node.operands()] for name, node in nodes.items()}).static_order()]
    except CycleError:
        return {}
    return {name: nodes[name] for name in order if name in nodes}


def _changed(source: WrapperSource) -> set[str]:
    """The variables whose memory is written to when it has values already, and the other names of that memory."""
    filled = {*source.inputs}
    groups: dict[str, set[str]] = {}
    changed: set[str] = set()

    def write(names: Sequence[str]) -> None:
        for name in names:
            if name in filled:
                changed.update(groups.get(name, (name,)))
        filled.update(names)

    for event in source.events:
        if event.kind == "alias":
            (name,), (other,) = event.written, event.read
            if not event.reuses or other in groups:
                group = groups.setdefault(other, {other})
                group.add(name)
                groups[name] = group
                if other in filled:
                    filled.add(name)
                if other in changed:
                    changed.add(name)
        else:
            filled.update(set(event.read) - set(event.written))
            write(event.mutated)
            write(event.written)
    return changed


class _JoinedTexts:
    """Joins the texts of kernels with the launches of a wrapper.

    Args:
        texts: By kernel.
        changed: The variables that are written to in place.
        inputs: Those of the graph. They have the names of their nodes.
    """

    def __init__(self, texts: Mapping[str, _KernelText], changed: set[str], inputs: set[str]) -> None:
        self.found: dict[int, Fragment] = {}
        nodes = [text.nodes for text in texts.values()]
        self._nodes = _ordered((node for node, _ in each.values()) for each in nodes)
        self._sizes = {name: look for each in nodes for name, (_, look) in each.items()}
        self._texts = texts
        self._changed = changed
        self._inputs = inputs
        self._holds: dict[str, str] = {}  # the node that a variable holds
        self._behind: dict[str, frozenset[str]] = {}  # the nodes of which one without a node may hold a part
        self._known: dict[str, Fragment | None] = {}
        self._filled = {*inputs}
        self._looks: dict[str, Look] = {}
        self._memory: dict[str, str] = {}  # the variable whose memory another has taken

    def alias(self, event: Event) -> None:
        """Note that a variable is memory of another."""
        (name,), (other,) = event.written, event.read
        self._looks |= event.looks
        self._memory.pop(name, None)
        if event.reuses:
            self._memory[name] = other
        for known in (self._holds, self._behind):
            known.pop(name, None)
            if other in known:
                known[name] = known[other]  # type: ignore[assignment]

    def fill(self, names: Iterable[str]) -> None:
        """Note that variables have values which no text names."""
        for name in names:
            self._filled.add(name)
            self._holds.pop(name, None)
            self._behind.pop(name, None)

    def launch(self, kernel: GeneratedKernel, event: Event) -> None:
        """Find out what a launch stands for."""
        arguments = kernel._schema.arguments
        passed = [*event.passed, *[None] * len(arguments)][: len(arguments)]
        known = self._known.get(event.name)
        if known is not None and self._lies_alike(known, passed, event):
            # The same code: it computes of these arguments what it computes of those of the first launch.
            self.found[event.line] = known
        elif event.name not in self._known:
            text = self._texts.get(event.name)
            known = self._known[event.name] = None if text is None else self._first(kernel, passed, event, text)
            if known is not None:
                self.found[event.line] = known
        self._filled.update(event.written)

    def _lies_alike(self, known: Fragment, passed: Sequence[str | None], event: Event) -> bool:
        """Whether the arguments of a launch lie like those of the launch with which the text was written."""
        for place, held in (*known.given.items(), *known.made.items()):
            look = event.looks.get(passed[place] or "", Look())
            if (look.size, look.stride) != (held.shape, held.stride):
                return False
        return not {*passed} & self._changed

    def _first(
        self, kernel: GeneratedKernel, passed: Sequence[str | None], event: Event, text: _KernelText
    ) -> Fragment:
        """What the launch stands for with which the text was written."""
        arguments = kernel._schema.arguments
        reads, writes = self._reads(kernel, passed, event, text), self._writes(kernel, passed, event, text)
        given: dict[int, HeldNode] = {}
        made: dict[int, HeldNode] = {}
        left_out: dict[int, str] = {}
        unclear: set[str] = set()
        for place, argument in enumerate(arguments):
            name = passed[place]
            if argument.part in ("in", "in_out"):
                held = None if name is None or place not in reads else self._given(name, reads[place], text)
                if held is not None:
                    given[place] = held
                else:
                    unclear |= self._behind.get(name or "", frozenset(self._nodes))
        written = [name for name, argument in zip(passed, arguments, strict=True) if argument.alias_info and name]
        for name in written:
            self._holds.pop(name, None)
            self._behind[name] = frozenset(text.nodes)
        for place, argument in enumerate(arguments):
            if argument.alias_info is None:
                continue
            name, node = passed[place], self._nodes.get(writes.get(place, ""), _NONE)
            look = event.looks.get(name or "", Look())
            if name in self._changed or name in self._inputs:
                left_out[place] = "it is written in place"
            elif name is None or node.func is None or written.count(name) > 1 or look.size is None or not look.stride:
                left_out[place] = "the text of the kernel does not tell which operator returns what it holds"
            else:
                made[place] = HeldNode(node.name, look.size, look.stride)
                self._holds[name] = node.name
        return Fragment(self._nodes, given, made, left_out, frozenset(unclear))

    def _given(self, name: str, node: str, text: _KernelText) -> HeldNode | None:
        """What a variable holds that is called so in the text."""
        look = text.reads[node]
        if look.size is None or look.stride is None:
            return None
        if name in self._inputs:
            return HeldNode(name, look.size, look.stride)
        before: str | None = name
        while before is not None:
            if before in self._changed:
                return None
            before = self._memory.get(before)
        return None if _is_buffer(node) else HeldNode(node, look.size, look.stride)

    def _reads(
        self, kernel: GeneratedKernel, passed: Sequence[str | None], event: Event, text: _KernelText
    ) -> dict[int, str]:
        """What each argument that is read is called in the text; nothing if the two do not agree.

        The text lists what is read in the order in which code for it was generated, and so are arguments numbered.
        """
        arguments = kernel._schema.arguments
        places = [place for place, each in enumerate(arguments) if each.part in ("in", "in_out")]
        in_place = [place for place in places if arguments[place].name.startswith("in_out_ptr")]
        if in_place:  # they have numbers of their own
            order = {name: number for number, name in enumerate(text.loads)}
            in_order = [place for place in places if arguments[place].name in order]
            rest = [place for place in in_order if place not in in_place]
            if not {*places} - {*in_order} <= {*in_place}:
                return {}
            places = sorted(in_order, key=lambda place: order[arguments[place].name])
            if rest != [place for place in places if place not in in_place]:
                return {}
        outer = [name for name in text.reads if name not in text.writes]
        found = dict(zip(places, outer, strict=False))
        fits = len(outer) == len(places) and all(
            self._is_called(passed[place], node, text, event, place in in_place) for place, node in found.items()
        )
        return found if fits else {}

    def _is_called(self, name: str | None, node: str, text: _KernelText, event: Event, in_place: bool) -> bool:
        """Whether a variable that a kernel reads may be called so in its text."""
        if name is None:
            return True
        if not in_place and not event.looks.get(name, Look()).agrees(text.reads[node]):
            return False  # what is written in place may lie otherwise before
        if name in self._holds:
            return self._holds[name] == node
        return node == name or (node not in self._inputs and not _is_buffer(node))

    def _writes(
        self, kernel: GeneratedKernel, passed: Sequence[str | None], event: Event, text: _KernelText
    ) -> dict[int, str]:
        """What each argument that is written is called in the text, as far as that is sure.

        `out_ptr2` is the third that is not written in place, whether or not the first two are arguments. What is
        written in place has taken the memory of others, one after the other, which the kernel may have written, too.
        """
        written = [(place, each.name) for place, each in enumerate(kernel._schema.arguments) if each.alias_info]
        in_place = [place for place, name in written if name.startswith("in_out_ptr")]
        plain = [(place, int(name[7:])) for place, name in written if re.fullmatch(r"out_ptr\d+", name)]
        names = text.writes
        if len(in_place) + len(plain) != len(written) or len({*names}) != len(names) or 2 ** len(names) > _MOST:
            return {}
        chains = [self._chain(passed[place]) for place in in_place]

        def fits(name: str | None, node: str) -> bool:
            own = (self._looks | event.looks).get(name or "", Look())
            if name is None or name in self._changed:
                return True
            if _is_buffer(node):
                return node == name
            return own.agrees(text.reads.get(node, Look())) and own.agrees(self._sizes.get(node, Look()))

        def ways(number: int, left: tuple[str, ...]) -> Iterator[dict[int, str]]:
            if number < len(in_place):
                for chosen in itertools.combinations(left, len(chains[number])):
                    if chosen and all(map(fits, chains[number], chosen)):
                        rest = tuple(name for name in left if name not in chosen)
                        yield from ({in_place[number]: chosen[-1]} | way for way in ways(number + 1, rest))
            elif all(at < len(left) and fits(passed[place], left[at]) for place, at in plain):
                yield {place: left[at] for place, at in plain}

        found = [*itertools.islice(ways(0, names), _MOST)]
        return _sure(found) if len(found) < _MOST else {}

    def _chain(self, name: str | None) -> list[str]:
        """A variable, and before it those whose memory it has taken and that nothing has filled: so the kernel does."""
        chain = [] if name is None else [name]
        while chain and (other := self._memory.get(chain[0])) is not None and other not in self._filled:
            chain.insert(0, other)
        return chain


_NONE = FragmentNode("", None)


def _is_buffer(name: str) -> bool:
    """Whether a name is that of a buffer that no node has made."""
    return re.fullmatch(r"buf\d+", name) is not None


def _sure(ways: Iterable[dict[int, str]]) -> dict[int, str]:
    """What is the same in all ways, of which there must be one."""
    found: dict[int, str] | None = None
    for way in ways:
        found = way if found is None else {place: name for place, name in found.items() if way[place] == name}
    return found or {}
