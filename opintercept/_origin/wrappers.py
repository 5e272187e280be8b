"""Reads the wrappers that Inductor generates: which kernels they launch where, and what each argument is.

Invariant: a wrapper is read as text, and never run. What its text does not tell is left out. Must not import torch's
compilers. The text is private to torch, and differs between versions: whatever does not look as expected has no
launches, so that its kernels run unseen.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch

from opintercept._ops.generated import Argument, GeneratedKernel, Part
from opintercept._ops.table import HIGHER_ORDER
from opintercept._origin.stack import local_of

# Private. Where it is missing, the operators that a kernel's name lists are not told apart.
_all_names: Any = getattr(torch._C, "_dispatch_get_all_op_names", list)


class Definition(NamedTuple):
    """A kernel as its wrapper defines it: its arguments, in order, and its source."""

    arguments: tuple[Argument, ...]
    source: str


class Look(NamedTuple):
    """How a tensor lies in memory, as far as a text tells: its dtype, `"torch.float32"` or `""`, size and strides."""

    dtype: str = ""
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None

    def agrees(self, other: Look) -> bool:
        """Whether both may be of the same tensor."""
        return all(one == another for one, another in zip(self, other, strict=True) if one and another)


class Event(NamedTuple):
    """What a wrapper does, in order.

    Attributes:
        kind: It launches a generated kernel, calls something else, or gives memory another name.
        line: Its line.
        name: The kernel, or the operator without its namespace.
        read: The variables that it reads.
        written: Those that it writes or assigns.
        looks: How variables lie in memory, as far as the text tells.
        passed: The variable that each argument of a launch is; None for a number or a part of a variable.
        reuses: Whether an alias takes the memory of a variable that is deleted.
        mutated: The variables that an operator writes to in place, or may write to.
    """

    kind: Literal["launch", "extern", "alias"]
    line: int
    name: str
    read: tuple[str, ...]
    written: tuple[str, ...]
    looks: dict[str, Look]
    passed: tuple[str | None, ...] = ()
    reuses: bool = False
    mutated: tuple[str, ...] = ()


class WrapperSource:
    """What the source of a wrapper says.

    Args:
        text: The source.
        key: Tells it from others.

    Attributes:
        launches: By line.
        events: In order.
        inputs: The variables that its functions get.
        text: The source.
    """

    def __init__(self, text: str, key: str) -> None:
        self.launches: dict[int, GeneratedKernel] = {}
        self.events: list[Event] = []
        self.inputs: set[str] = set()
        self.text = text
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return
        lines = text.splitlines()
        definitions = definitions_of(tree)
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            self.inputs.update(_given(function))
            of_products: set[str] = set()  # variables with what others have multiplied
            for event, arguments in _events(function, definitions):
                self.events.append(event)
                ops = _in_comment(lines, event.line) or ops_in(event.name)
                product = _is_product(event, ops, definitions, of_products)
                if product:
                    of_products.update(event.written)
                elif event.kind == "alias" and event.read[0] in of_products:
                    of_products.add(event.written[0])
                else:
                    of_products.difference_update(event.written)
                if event.kind == "launch":
                    self.launches[event.line] = GeneratedKernel(event.name, key, event.line, arguments, ops, product)


_read: dict[str, WrapperSource] = {}


def wrapper_at(file: str) -> WrapperSource:
    """What the wrapper in a file says. Its name is a hash of its text. If the file has gone, a running graph has it."""
    known = _read.get(file)
    if known is None:
        text = "".join(linecache.getlines(file)) or next(attributes_on_stack("source_code"), "")
        known = WrapperSource(text, os.path.basename(file).removesuffix(".py"))
        if text:
            if len(_read) >= 4096:
                _read.clear()
            _read[file] = known
    return known


def attributes_on_stack(name: str) -> Iterator[str]:
    """The texts of this name that compiled graphs on the stack have, from the innermost one outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        text = getattr(local_of(frame, "self"), name, None)
        if isinstance(text, str):
            yield text
        frame = frame.f_back


def definitions_of(tree: ast.Module) -> dict[str, Definition]:
    """The kernels that a wrapper defines, by name: `name = async_compile.cpp_pybinding(...)` and its like."""
    found: dict[str, Definition] = {}
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(ast.Name("async_compile"), kind), values)) if (
                kind == "multi_kernel"
            ):
                match values:
                    case [_, ast.List([ast.Name(first), *_]), *_] if first in found:
                        found[name] = found[first]
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(ast.Name("async_compile")), values)):
                texts = [
                    each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)
                ]
                source = max(texts, key=len, default="")
                arguments = _of_triton(source) if "@triton" in source else _of_cpp(source)
                if arguments is not None:
                    found[name] = Definition(arguments, source)
    return found


_SIGNATURE = r'extern "C"[^{;]*?\b(\w+)\s*\(([^)]*)\)\s*\{'


def _of_cpp(source: str) -> tuple[Argument, ...] | None:
    """The parameters of a function in C++ with C linkage. Of pointers, those to const are read."""
    found = re.search(_SIGNATURE, source)
    if found is None:
        return None
    arguments = []
    for parameter in filter(None, map(str.strip, found[2].split(","))):
        kind, _, name = parameter.rpartition("*" if "*" in parameter else " ")
        name = name.replace("__restrict__", "").strip()
        if "*" not in parameter:
            arguments.append(Argument(name, "number"))
        else:
            arguments.append(Argument(name, "in" if kind.startswith("const ") else _written(name)))
    return tuple(arguments)


def _written(name: str) -> Part:
    return "in_out" if name.startswith("in_out_ptr") else "out"


def _of_triton(source: str) -> tuple[Argument, ...] | None:
    """The parameters of a kernel, and what the metadata above it says of them."""
    try:
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return None
    heads = {each: "".join(map(ast.unparse, each.decorator_list)) for each in functions}
    # Those that it calls may follow, and have no metadata.
    kernel = next((each for each in functions if "triton_meta" in heads[each]), functions[-1] if functions else None)
    if kernel is None:
        return None
    head = heads[kernel]
    mutated = _listed(r"'mutated_arg_names': \[(.*?)\]", head)
    types = dict(re.findall(r"'(\w+)': '([^']*)'", next(iter(re.findall(r"'signature': \{(.*?)\}", head)), "")))
    arguments = []
    for parameter in kernel.args.args:
        name = parameter.arg
        if types.get(name) == "constexpr" or "constexpr" in ast.unparse(parameter):
            continue  # wrappers do not pass it
        if name in types and not types[name].startswith("*") and not types[name].startswith("tensordesc"):
            arguments.append(Argument(name, "number"))
        elif name.startswith("in_ptr") and "custom_kernel" not in head:
            arguments.append(Argument(name, "in"))  # if it is mutated, then by way of another argument
        elif name in mutated or name.startswith("in_out_ptr"):
            arguments.append(Argument(name, "in_out"))
        else:
            arguments.append(Argument(name, "out" if name.startswith("out_ptr") else "in"))
    return tuple(arguments)


def _listed(pattern: str, text: str) -> list[str]:
    found = re.search(pattern, text)
    return re.findall(r"'(\w+)'", found[1]) if found else []


class _Buffers:
    """What the variables of a wrapper hold at a point of it: values, or memory that nothing has been written to.

    A kernel reads what its argument's name says only if there is something to read. It may fill a part of a buffer and
    read the whole, or write some elements of a buffer that has values.
    """

    def __init__(self) -> None:
        self._fresh: set[str] = set()  # new memory
        self._reused: set[str] = set()  # memory of a buffer that is not used any more; values only for `in_out`
        self._parts: dict[str, set[str]] = {}  # by buffer, the names of its parts that are fresh
        self._looks: dict[str, Look] = {}

    def assign(self, name: str, value: ast.expr, gone: set[str]) -> None:
        """Follow an assignment; `gone` are the variables that its line deletes."""
        self._fresh.discard(name)
        self._reused.discard(name)
        other = _root(value)
        if isinstance(value, ast.Call) and re.match(_ALLOCATES, ast.unparse(value.func)):
            self._fresh.add(name)
            dtypes = [text for each in value.args if (text := ast.unparse(each)).startswith("torch.")]
            self._looks[name] = Look(next(iter(dtypes), ""), *_shape(value.args))
            return
        if other is None:
            return
        look = self._looks.get(other, Look())
        reshaped = isinstance(value, ast.Call) and len(value.args) > 1
        self._looks[name] = Look(look.dtype, *_shape(value.args[1:])) if reshaped else look  # type: ignore[attr-defined]
        if other in gone:
            (self._fresh if other in self._fresh else self._reused).add(name)
        elif other in self._fresh:
            self._fresh.add(name)
            self._parts.setdefault(other, set()).add(name)
        elif other in self._reused:
            self._reused.add(name)

    def pass_on(self, names: Sequence[str | None], arguments: Sequence[Argument]) -> list[Argument]:
        """Follow a launch with these variables, and return its arguments as they are there."""
        parts: list[Part] = []
        for name, argument in zip(names, arguments, strict=True):
            part = argument.part
            if part != "number" and name in self._fresh:
                part = "out"
            elif part == "out" and name not in self._reused:
                part = "in_out"
            parts.append(part)
        written = {name for name, part in zip(names, parts, strict=True) if part in ("out", "in_out")}
        self.fill(names)
        return [
            Argument(each.name, part, part == "in" and name in written)
            for each, part, name in zip(arguments, parts, names, strict=True)
        ]

    def check(self, arguments: Sequence[ast.expr]) -> None:
        """Follow a check of a variable's size and strides."""
        match arguments:
            case [ast.Name(name), *others]:
                checked = [(name, others)]
            case [ast.Tuple(names), ast.Tuple(sizes), ast.Tuple(strides), *_]:
                several = zip(names, sizes, strides, strict=True)
                checked = [(name.id, [size, stride]) for name, size, stride in several if isinstance(name, ast.Name)]
            case _:
                checked = []
        for name, others in checked:
            self._looks[name] = Look(self._looks.get(name, Look()).dtype, *_shape(others))

    def looks(self, names: Sequence[str]) -> dict[str, Look]:
        """How variables lie in memory, as far as that is known."""
        return {name: self._looks[name] for name in names if name in self._looks}

    def fill(self, names: Sequence[str | None]) -> None:
        """Note that these variables have values, and what is a part of them."""
        for name in filter(None, names):
            self._fresh.discard(name)
            self._reused.discard(name)
            self._fresh -= self._parts.pop(name, set())
            for whole, parts in tuple(self._parts.items()):
                parts.discard(name)
                if not parts:
                    del self._parts[whole]
                    self._fresh.discard(whole)


def _shape(arguments: Sequence[ast.expr]) -> Iterator[tuple[int, ...] | None]:
    """The first size among arguments and the strides behind it; None for one that is not all numbers."""
    tuples = [each for each in arguments if isinstance(each, ast.Tuple)]
    for each in (*tuples, None, None)[:2]:
        numbers = [item.value for item in each.elts if isinstance(item, ast.Constant)] if each is not None else []
        whole = each is not None and len(numbers) == len(each.elts) and all(type(item) is int for item in numbers)
        yield tuple(numbers) if whole else None  # type: ignore[arg-type]


_ALLOCATES = r"empty_strided\w*$|alloc_from_pool$|torch\.empty\w*$"


def _root(value: ast.expr) -> str | None:
    """The variable whose memory an expression is: that of `reinterpret_tensor(buf0, ...)`, or `buf0` itself."""
    while isinstance(value, ast.Call) and value.args and re.match(_SAME, ast.unparse(value.func)):
        value = value.args[0]
    return value.id if isinstance(value, ast.Name) else None


_SAME = r"reinterpret_tensor$|torch\.as_strided$|as_strided$|alloc_from_pool$"


def _events(function: ast.FunctionDef, definitions: dict[str, Definition]) -> Iterator[tuple[Event, list[Argument]]]:
    """What a function does, with the arguments of launches."""
    memory = _Buffers()
    deleted: dict[int, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Delete):
            names = {each.id for each in node.targets if isinstance(each, ast.Name)}
            deleted.setdefault(node.lineno, set()).update(names)
    for statement in _in_order(function.body):
        match statement:
            case ast.Assign([ast.Name(name)], value):
                yield from _calls(value, definitions, memory, (name,))
                gone = deleted.get(statement.lineno, set())
                memory.assign(name, value, gone)
                if (other := _root(value)) is not None or (other := _item(value)) is not None:
                    looks = memory.looks((other, name))
                    yield Event("alias", statement.lineno, "", (other,), (name,), looks, reuses=other in gone), []
            case ast.Assign([ast.Tuple(targets)], value):
                assigned = tuple(each.id for each in targets if isinstance(each, ast.Name))
                yield from _calls(value, definitions, memory, assigned)
            case ast.Expr(value):
                yield from _calls(value, definitions, memory, ())


def _given(function: ast.FunctionDef) -> Iterator[str]:
    """The variables that a function takes from its list of arguments."""
    for statement in function.body:
        match statement:
            case ast.Assign([ast.Tuple(targets)], ast.Name("args")):
                yield from (each.id for each in targets if isinstance(each, ast.Name))


def _item(value: ast.expr) -> str | None:
    """The variable of `buf3[0]`."""
    return value.value.id if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) else None


def _calls(
    value: ast.expr, definitions: dict[str, Definition], memory: _Buffers, assigned: tuple[str, ...]
) -> Iterator[tuple[Event, list[Argument]]]:
    if not isinstance(value, ast.Call):
        return
    match value.func:
        case ast.Name(name) | ast.Attribute(ast.Name(name), "run") if name in definitions:
            arguments = definitions[name].arguments
            names = [_root(each) for each in value.args]
            known = zip(names, arguments, strict=False)
            pointers = [each if argument.part != "number" else None for each, argument in known]
            short = len(arguments) - len(pointers)  # of a user's kernel, wrappers leave out numbers that are constants
            if short >= 0 and all(each.part == "number" for each in arguments[len(pointers) :]):
                pointers += [None] * short
                passed = memory.pass_on(pointers, arguments)
                both = [(each, argument.part) for each, argument in zip(pointers, passed, strict=True) if each]
                read = tuple(each for each, part in both if part != "out")
                written = tuple(each for each, part in both if part != "in")
                whole = tuple(each.id if isinstance(each, ast.Name) else None for each in value.args)
                yield Event("launch", value.lineno, name, read, written, memory.looks(read + written), whole), passed
            return
    function = ast.unparse(value.func)
    if function.startswith("assert_size_stride"):
        memory.check(value.args)
    if re.match(f"{_ALLOCATES}|{_SAME}|{_PLAIN}", function):
        return
    outs = [each for keyword in value.keywords if keyword.arg == "out" for each in _names_in(keyword.value)]
    read = tuple(each for argument in value.args for each in _names_in(argument))
    memory.fill([*read, *outs])
    if "." in function:
        operator = re.sub(r"\.(default|out|Tensor|dim_\w+)$", "", function).rpartition(".")[2]
        mutated = tuple(_mutated(function, value.args))
        name = operator.removeprefix("bias_")
        yield Event("extern", value.lineno, name, read, (*outs, *assigned), {}, mutated=mutated), []


def _mutated(function: str, arguments: Sequence[ast.expr]) -> Iterator[str]:
    """The variables that an operator writes to in place; all, if its schema is not known."""
    found = re.fullmatch(r"(?:torch\.ops\.)?(\w+)\.(\w+)(?:\.(\w+))?", function)
    if found is None or found[1] == "extern_kernels":  # those write to `out=`
        return
    packet = getattr(getattr(torch.ops, found[1]), found[2], None)
    schema = getattr(getattr(packet, found[3] or "default", None), "_schema", None)
    for place, value in enumerate(arguments):
        alias = schema.arguments[place].alias_info if schema and place < len(schema.arguments) else None
        if schema is None or (alias is not None and alias.is_write):
            yield from _names_in(value)


_PLAIN = r"assert_size_stride\w*$|assert_alignment$|get_raw_stream$|\w+\.clear$|raise_|torch\._C\."


def _names_in(value: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]


def _in_order(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            continue
        yield statement
        for inner in ("body", "orelse", "finalbody"):
            yield from _in_order(getattr(statement, inner, ()))


_COMMENT = r"# Topologically Sorted Source Nodes: \[.*?\], Original ATen: \[(.*?)\]"


def _in_comment(lines: Sequence[str], line: int) -> tuple[str, ...]:
    """The operators that the comment above a launch lists, which launches of kernels in C++ do not have."""
    for above in lines[max(line - 4, 0) : line - 1][::-1]:
        if found := re.search(_COMMENT, above):
            return tuple(_full(each) for each in found[1].split(", ") if each)
        if "stream" not in above:  # `stream0 = get_raw_stream(0)` may come in between
            break
    return ()


def _full(name: str) -> str:
    """`"aten::log"` of `aten.log`. An operator of higher order has no namespace."""
    space, dot, short = name.rpartition(".")
    return f"{space}::{short}" if dot else _packets().get(name, name)


_FUSED = r"(?:^|_)fused_(.*)_\d+$"


@cache
def ops_in(name: str) -> tuple[str, ...]:
    """The operators in the name of a kernel: `aten::add` and `aten::log` in `cpp_fused_add_log_0`.

    The name lists them in the order of the alphabet, which tells `_softmax_backward_data` and `sum` apart where one
    ends and the next begins. Where it is no such list, there are none.
    """
    found = re.search(_FUSED, name)
    words = () if found is None else tuple(found[1].split("_"))
    usual = {short: packet for short, packet in _packets().items() if packet.startswith(_USUAL)}
    for packets in (usual, _packets()):  # `add_relu` are two of aten's, and one of `quantized`
        if (names := _split(words, packets.keys())) is not None:
            return tuple(map(packets.__getitem__, names))
    return ()


_USUAL = ("aten::", "prims::", "higher_order::", "inductor::")


def _split(words: tuple[str, ...], known: Collection[str]) -> tuple[str, ...] | None:
    """The names of which a list is made, the fewest there are; None if there are none."""
    best: list[dict[str, tuple[str, ...]]] = [{} for _ in range(len(words) + 1)]  # by the last name
    best[0][""] = ()
    for end in range(1, len(words) + 1):
        for start in range(end):
            name = "_".join(words[start:end])
            if name not in known:
                continue
            for last, before in best[start].items():
                if last < name and (name not in best[end] or len(best[end][name]) > len(before) + 1):
                    best[end][name] = (*before, name)
    return min(best[-1].values(), key=len, default=None)


@cache
def _packets() -> dict[str, str]:
    """The packets of all operators by their short names; of several, that of `aten`."""
    found: dict[str, str] = {}
    for name in sorted(_all_names(), key=lambda name: (name.startswith("aten::"), name.startswith("prims::"))):
        full = name.partition(".")[0]
        found[full.partition("::")[2]] = full
    return found | {name: f"higher_order::{name}" for name in HIGHER_ORDER}


_MULTIPLYING = "mm bmm addmm baddbmm addbmm mv addmv dot vdot linear matmul convolution"
_PRODUCTS = rf"_tem_|_(?:{_MULTIPLYING.replace(' ', '|')}|flex_attention|grouped_mm|scaled_mm)(?:_|$)"


def multiplies(name: str) -> bool:
    """Whether a kernel of this name may multiply matrices."""
    return not name.startswith(("cpp_fused_", "triton_")) or re.search(_PRODUCTS, name) is not None


def _is_product(event: Event, ops: tuple[str, ...], definitions: dict[str, Definition], of_products: set[str]) -> bool:
    """Whether a call multiplies matrices.

    A kernel is named after all operators that it has a part of: one that adds the bias to a product of another kernel
    is named after `addmm`, too, and one that copies an operand of a product after the product.
    """
    if event.kind == "extern":
        return any(f"_{word}_" in f"_{event.name}_" for word in _MULTIPLYING.split())
    if event.kind == "alias" or not multiplies(event.name):
        return False
    names = {argument.name for argument in definitions[event.name].arguments}
    if "_tem_" in event.name or not event.name.startswith(("cpp_fused_", "triton_")) or {"X", "W"} <= names:
        return True
    computes = not {op.partition("::")[2] for op in ops}.isdisjoint(_MULTIPLYING.split())
    copies = event.name.startswith("triton_") and len(event.read) < 2
    return computes and of_products.isdisjoint(event.read) and not copies
