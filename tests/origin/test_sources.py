"""Sources that Dynamo writes, held against what Dynamo's own classes find."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch._dynamo.source as dynamo
from torch import nn
from torch._guards import Source

from opintercept._origin import sources


class Fields(NamedTuple):
    model: Any
    other: Any


@dataclasses.dataclass
class Holder:
    model: Any

    def run(self) -> None: ...


class Slotted:
    __slots__ = ("model",)

    def __init__(self, model: Any) -> None:
        self.model = model


class Net(nn.Module):
    """Has modules under names that are no identifiers, in a list, and in an attribute of its class."""

    shared = nn.Identity()

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Net(depth - 1) if depth else nn.Linear(1, 1), nn.Sequential(nn.Tanh())])
        self.by_name = nn.ModuleDict({name: nn.ReLU() for name in ("a b", "c-d", "class", "0", "x")})
        self.own = [nn.Linear(1, 1), {"k": nn.Linear(1, 1), 3: nn.Tanh(), nn.GELU(): nn.Tanh()}]
        self.holder = Holder(nn.Identity())


def closure(model: Any) -> Callable[[], Any]:
    return lambda: model


def values() -> dict[str, Any]:
    """What a program may hold modules in, by the names of its variables."""
    net = Net(1)
    return {
        "self": net,
        "args": (net, 1, Net(0)),
        "kwargs": {"model": net, 'say "x"': nn.Linear(1, 1), 7: net, nn.Tanh(): nn.Tanh()},
        "ordered": OrderedDict(one=net, two=nn.ReLU()),
        "fields": Fields(net, Slotted(Net(0))),
        "holder": Holder([net]),
        "bound": net.forward,
        "run": Holder(net).run,
        "partial": functools.partial(print, net, model=net),
        "function": closure(net),
        "reference": weakref.ref(net),
        "iterator": iter((nn.Tanh(), net)),
        "alone": {net},
        "queue": deque([net]),
        "kind": Net,
    }


def steps(source: Source, value: Any) -> Iterator[tuple[Source, Any]]:
    """What Dynamo may write after a source, with the values."""
    if isinstance(value, nn.Module):
        yield dynamo.UnspecializedNNModuleSource(dynamo.NNModuleSource(source)), value
        for name in value._modules:
            held = dynamo.AttrSource(source, "_modules")
            yield dynamo.DictGetItemSource(held, name), value._modules[name]
            if name.isidentifier():
                yield dynamo.AttrSource(source, name), value._modules[name]
        if isinstance(value, Net):
            for name in ("own", "holder", "shared"):
                yield dynamo.AttrSource(source, name), getattr(value, name)
            yield dynamo.GenericAttrSource(source, "own"), value.own
            yield dynamo.TypeSource(source), type(value)
    elif isinstance(value, dict):
        for place, (key, item) in enumerate(value.items()):
            by_place = dynamo.ConstDictKeySource(source, place)
            yield dynamo.DictGetItemSource(source, by_place), item
            yield by_place, key
            if isinstance(key, (str, int)):
                yield dynamo.DictGetItemSource(source, key), item
                yield dynamo.DictSubclassGetItemSource(source, key), item
    elif isinstance(value, (Holder, Slotted, Fields)):
        yield dynamo.AttrSource(source, "model"), value.model
        if isinstance(value, Fields):
            yield dynamo.GetItemSource(source, 1), value[1]
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield dynamo.ListGetItemSource(source, place), item
            yield dynamo.GetItemSource(source, place), item
    elif isinstance(value, (tuple, deque)):
        for place, item in enumerate(value):
            yield dynamo.GetItemSource(source, place), item
            yield dynamo.GetItemSource(source, place - len(value)), item
        if isinstance(value, tuple):
            yield dynamo.GetItemSource(source, slice(None, None, 2)), value[::2]
    elif isinstance(value, types.MethodType):
        yield dynamo.AttrSource(source, "__self__"), value.__self__
        yield dynamo.AttrSource(source, "__func__"), value.__func__
    elif isinstance(value, functools.partial):
        yield dynamo.AttrSource(source, "args"), value.args
        yield dynamo.AttrSource(source, "keywords"), value.keywords
        yield dynamo.AttrSource(source, "func"), value.func
    elif isinstance(value, types.FunctionType) and value.__closure__:
        yield dynamo.ClosureSource(source), value.__closure__
    elif isinstance(value, types.CellType):
        yield dynamo.AttrSource(source, "cell_contents"), value.cell_contents
    elif isinstance(value, weakref.ref):
        yield dynamo.WeakRefCallSource(source), value()
    elif isinstance(value, type(iter(()))):
        yield dynamo.TupleIteratorGetItemSource(source, 1), value.__reduce__()[1][0][1]
    elif isinstance(value, set):
        yield dynamo.NonSerializableSetGetItemSource(source, 0), next(iter(value))
    elif value is Net:
        yield dynamo.TypeDictSource(source), dict(Net.__dict__)
        yield dynamo.AttrSource(source, "shared"), Net.shared


def written(source: Source) -> str:
    """What Dynamo writes into a graph for a module."""
    name = source.name if isinstance(source.name, str) else source.name()
    return re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]", r".\2", name)


def in_frame(local: dict[str, Any], look: Callable[[types.FrameType], Any]) -> Any:
    """Call a function with a frame that has these local and global variables."""
    found: dict[str, Any] = {"__look": lambda: look(sys._getframe(1)), **local}
    exec(f"def __call({', '.join(local)}):\n    return __look()", found)
    return found["__call"](**local)


def last(text: str, frame: types.FrameType) -> Any:
    """The value of a source; None if it cannot be looked up."""
    source = sources.parse(text)
    found = [] if source is None else list(sources.look_up(source, frame))
    return found[-1] if source is not None and len(found) == len(source) else None


def test_what_dynamo_writes_is_found() -> None:
    draw, variables, tried, kinds = random.Random(0), values(), 0, set()

    def walk(frame: types.FrameType) -> None:
        nonlocal tried
        for _ in range(3000):
            name = draw.choice(list(variables))
            root = draw.choice((dynamo.LocalSource(name), dynamo.GlobalSource(name)))
            source: Source = root
            value = variables[name]
            for _ in range(draw.randint(0, 12)):
                further = list(steps(source, value))
                if not further:
                    break
                source, value = draw.choice(further)
                kinds.add(type(source).__name__)
            found = last(written(source), frame)
            assert found is value or found == value, written(source)
            if isinstance(value, nn.Module):
                tried += 1
                parsed = sources.parse(written(source))
                assert parsed is not None
                base = sources.find(parsed, frame)
                assert base is not None
                assert sources.at(parsed, {base[0]: weakref.ref(base[1])}) is value

    in_frame(variables, walk)
    assert tried > 1000
    assert len(kinds) == 14, kinds


def test_weak_references_imports_and_odd_attributes_are_found() -> None:
    net = Net(0)
    vars(net)["odd name"] = net.own
    texts = {
        written(dynamo.GlobalWeakRefSource("ref")): net,
        "getattr(G['net'], 'odd name')[0]": net.own[0],
        "__import__('random')": random,
        written(dynamo.AttrSource(dynamo.LocalSource("net"), "holder")) + ".model": net.holder.model,
        "G['net'].forward.__self__": net,
    }

    def look(frame: types.FrameType) -> None:
        assert {text: last(text, frame) for text in texts} == texts

    in_frame({"net": net, "ref": weakref.ref(net)}, look)


NO_SOURCES = [
    *("", "layers.0.fc", "L['x'", "L['x']..y", "x['y']", "L[0]", "<ephemeral: x>", "(0, L['x'])", "random_value_0"),
    *("SYNTHETIC_LOCAL['x'].y", "L['x'].size()[0].y(1)", "___from_numpy(L['x'])", "L['x'].item(1)", "eval('1')"),
    *("L['d'][G['key']]", "L['d'][list(dict.keys(L['e']))[0]]", "L['x'].a(b", "list(1)", "L['x'] + 1", "L" * 10_000),
    *("(" * 5000 + ")" * 5000, "L['x']" + ".a()" * 3000),
]


@pytest.mark.parametrize("text", NO_SOURCES, ids=lambda text: text[:40])
def test_what_is_not_understood_is_not_found(text: str) -> None:
    assert in_frame({"x": Net(0), "d": {1: 2}, "e": {1: 2}, "key": 1}, lambda frame: last(text, frame)) is None


class Guarded:
    """Runs code for whatever is asked of it, which counts."""

    ran = 0

    def __init__(self) -> None:
        object.__setattr__(self, "model", "held")

    def count(self, *_: Any) -> Any:
        Guarded.ran += 1
        return self

    __getattribute__ = __getattr__ = __getitem__ = __call__ = __iter__ = __hash__ = __eq__ = count
    computed = property(count)


class GuardedDict(dict[Any, Any]):
    __getitem__ = __iter__ = keys = values = __missing__ = Guarded.count


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("L['x'].model", "held"),
        ("L['d']['k']", "v"),
        ("L['d'][list(dict.keys(L['d']))[0]]", "v"),
        ("list(dict.keys(L['d']))[0]", "k"),
        *((f"L['x']{each}", None) for each in ("['k']", "[0]", "()", ".missing", "[slice(0, 1, None)]")),
        ("L['d']['none']", None),
        ("list(L['x'])[0]", None),
        ("list(L['d'])[0]", None),
        ("___tuple_iterator_getitem(L['x'], 0)", None),
    ],
)
def test_a_look_up_runs_no_code_of_the_program(text: str, expected: Any) -> None:
    Guarded.ran = 0
    variables = {"x": Guarded(), "d": GuardedDict(k="v")}
    assert in_frame(variables, lambda frame: last(text, frame)) == expected
    assert not isinstance(in_frame(variables, lambda frame: last("L['x'].computed.y", frame)), Guarded)
    assert Guarded.ran == 0
