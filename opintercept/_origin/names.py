"""The names of modules, which each interceptor gives to the models that it sees.

Invariant: nothing here keeps a module alive.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

import torch

from opintercept._core.noted import forget
from opintercept._origin import stack
from opintercept._origin.stack import OUTER_CALL, is_users, module_of, pipeline_frame

# Attributes with which torch puts a wrapper between a module and its parent.
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_PARALLEL = {"DataParallel", "DistributedDataParallel"}  # wrappers whose attribute is called `module`
_PUTS_CLASSES_BELOW = ("torch.distributed.", "torch.nn.utils.parametrize")


class _Names(NamedTuple):
    """The names of a module under one root, in order."""

    module: weakref.ref[torch.nn.Module]
    names: tuple[str, ...]


# The qualified names under each root, without its label. All interceptors share them, since collecting takes time.
_by_root: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, _Names]] = weakref.WeakKeyDictionary()
# The parts of scripted modules, by what TorchScript runs.
_by_steps: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, weakref.ref[torch.nn.Module]]]
_by_steps = weakref.WeakKeyDictionary()


class NamedTensor(NamedTuple):
    """A parameter or a buffer of a model that interceptors have named."""

    kind: str  # "parameter" or "buffer"
    module: str  # the qualified name of its module in the model
    name: str  # its own name there
    tensor: torch.Tensor


def named_tensors() -> Iterator[tuple[str, list[NamedTensor]]]:
    """The class of each model whose modules interceptors have named, and its parameters and buffers."""
    for root, table in list(_by_root.items()):
        found = []
        for entry in list(table.values()):
            module = entry.module()
            kinds = () if module is None else (("parameter", module._parameters), ("buffer", module._buffers))
            for kind, tensors in kinds:
                named = [(name, tensor) for name, tensor in list(tensors.items()) if tensor is not None]
                found += [NamedTensor(kind, entry.names[0], name, tensor) for name, tensor in named]
        yield _class_name(_unwrapped(root)), found


def names_under(root: torch.nn.Module, module: torch.nn.Module) -> tuple[str, ...] | None:
    """Return the qualified names of `module` under `root`, `""` for the root itself; None if it has no such module."""
    if not _has(root, module):
        _table(root).update(_collect(root))  # it may be new
    return _table(root)[id(module)].names if _has(root, module) else None


def _table(root: torch.nn.Module) -> dict[int, _Names]:
    known = _by_root.get(root)
    if known is None:
        known = _by_root[root] = _collect(root)
    return known


def _has(root: torch.nn.Module, module: torch.nn.Module) -> bool:
    entry = _table(root).get(id(module))
    return entry is not None and entry.module() is module


def _collect(root: torch.nn.Module) -> dict[int, _Names]:
    names: dict[int, list[str]] = {}
    modules: dict[int, torch.nn.Module] = {}
    shown: dict[str, str] = {}  # the names without wrappers, by qualified name; parents come before their parts
    wrapped: set[str] = set()
    for name, module in root.named_modules(remove_duplicate=False):
        parent, _, part = name.rpartition(".")
        above = shown.get(parent, "")
        hidden = part in _WRAPPERS or name in wrapped
        shown[name] = above if hidden else f"{above}.{part}".lstrip(".")
        if any(kind.__name__ in _PARALLEL for kind in type(module).__mro__):
            wrapped.add(f"{name}.module".lstrip("."))
        names.setdefault(id(module), []).append(shown[name])
        modules[id(module)] = module
    return {key: _Names(weakref.ref(module), tuple(names[key])) for key, module in modules.items()}


def _unwrapped(root: torch.nn.Module) -> torch.nn.Module:
    """Return the program's own module inside of torch's wrappers."""
    while True:
        parallel = any(kind.__name__ in _PARALLEL for kind in type(root).__mro__)
        names = _WRAPPERS | {"module"} if parallel else _WRAPPERS
        inner = next((part for name, part in root.named_children() if name in names), None)
        if inner is None:
            return root
        root = inner


def _class_name(root: torch.nn.Module) -> str:
    if isinstance(root, torch.jit.ScriptModule):
        return str(getattr(root, "original_name", type(root).__name__))
    # `fully_shard` and `parametrize` derive a class of their own, such as FSDPNet, from the program's.
    kinds = (kind for kind in type(root).__mro__ if not kind.__module__.startswith(_PUTS_CLASSES_BELOW))
    return next(kinds).__name__


def tells_parts(module: torch.nn.Module | None) -> bool:
    """Whether TorchScript can tell the parts of a module that it runs. Freezing frees what that needs."""
    # Private: freezing removes all attributes but those that the program names, and nobody names this one of torch's.
    return isinstance(module, torch.jit.ScriptModule) and module._c.hasattr("_is_full_backward_hook")


def running_part(module: torch.nn.Module) -> torch.nn.Module:
    """Return the part of the innermost module that TorchScript runs, or else the module."""
    frame = pipeline_frame() if tells_parts(module) else None
    while frame is not None and frame.f_code is not OUTER_CALL:
        frame = None if is_users(frame.f_code) else frame.f_back  # Python that runs a script, or that a script runs
    if frame is None:
        return module
    steps = stack.script()
    known = _by_steps.setdefault(module, {})
    part = known[steps]() if steps in known else None
    if part is None:
        part = _part(module, steps)
        known[steps] = weakref.ref(part)
    return part


def _part(module: torch.nn.Module, steps: str) -> torch.nn.Module:
    for name, kind in re.findall(r"^(?!(?:TOP|SELF)\()(\w+)\((\w*)\)::", steps, re.MULTILINE):
        found = [part for part in _parts(module, name) if _class_name(part) == kind]
        if len(found) != 1:
            break
        module = found[0]
    return module


def _parts(module: torch.nn.Module, name: str) -> Iterator[torch.nn.Module]:
    """The parts with this name, also those in lists and dictionaries, which TorchScript leaves out."""
    for its, part in module._modules.items():
        if part is not None and its == name:
            yield part
        elif part is not None and _class_name(part) in ("ModuleList", "ModuleDict"):
            yield from _parts(part, name)


class _Home:
    """A root with its label, the name of the root itself, and the prefix that the names of its modules begin with."""

    __slots__ = ("label", "names", "prefix", "root")

    def __init__(self, label: str, prefix: str) -> None:
        self.root: Callable[[], torch.nn.Module | None] = _no_root  # None once it is gone or has lost the label
        self.label = label
        self.prefix = prefix
        self.names: dict[int, _Names] = {}  # those found so far, by the module's identity

    def find(self, module: torch.nn.Module) -> tuple[str, ...] | None:
        """Return the names of a module under this root and remember them; None if it has no such module."""
        root = self.root()
        found = None if root is None else names_under(root, module)
        if found is None:
            return None
        names = tuple(f"{self.prefix}{name}" if name else self.label for name in found)
        self.names[id(module)] = _Names(weakref.ref(module), names)
        return names


class _Seen(NamedTuple):
    """The outermost module of a stack, and the home that it belongs to, usually its own."""

    root: Callable[[], torch.nn.Module | None]
    home: _Home


def _no_root() -> None:
    return None


class Labels:
    """The names that one interceptor gives to the modules of the program.

    Modules in the first root that has any get plain names, `fc1`. Names under other roots begin with the root's class,
    `Critic.fc1`, and with a number if several roots of that class are alive, `Critic#2.fc1`. When a root is freed, its
    label can be used again. There is no lock, since a signal handler may name modules too.
    """

    def __init__(self) -> None:
        self._homes: dict[str, _Home] = {}  # by label
        self._seen: dict[int, _Seen] = {}  # by the root's identity; entries of freed roots go when there are many
        self._look_through_at = 64
        self._last = _Seen(_no_root, _Home("", ""))  # usually also the next one
        self._plain: str | None = None  # the class whose first root has plain names

    def names(self, root: torch.nn.Module, module: torch.nn.Module) -> tuple[str, ...]:
        """Return the names of `module` in a call whose outermost module is `root`."""
        seen = self._last
        if seen.root() is not root:
            seen = self._turn_to(root)
        entry = seen.home.names.get(id(module))
        if entry is not None and entry.module() is module:
            return entry.names
        if seen.home.root() is None:
            seen = self._turn_to(root)
        return seen.home.find(module) or self._unregistered(seen.home, module)

    def below(self, root: torch.nn.Module, module: torch.nn.Module, path: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of what is at a path below `module`, which need not be a module."""
        names = self.names(root, module)
        home = self._last.home
        tops = (home.prefix if name == home.label else f"{name}." for name in names)
        return tuple(top + ".".join(path) for top in tops) if path else names

    def lasts(self, root: torch.nn.Module, module: torch.nn.Module) -> bool:
        """Whether `names` will answer the same again, until a module is freed or kernels are told to `forget`."""
        return self._last.root() is root and id(module) in self._last.home.names

    def registered(self, root: torch.nn.Module, module: torch.nn.Module) -> tuple[str, ...] | None:
        """Return the names of `module` without a look at the stack; None if it is not registered under `root`."""
        return self._turn_to(root).home.find(module)

    def recomputed(self, module: torch.nn.Module) -> tuple[str, ...] | None:
        """Return the names of `module` if the stack begins at a checkpoint, below the root; None if no root has it."""
        found = [names for home in list(self._homes.values()) if (names := home.find(module)) is not None]
        return max(found, key=lambda names: len(names[0]), default=None)

    def _turn_to(self, root: torch.nn.Module) -> _Seen:
        key = id(root)
        seen = self._seen.get(key)
        if seen is None or seen.root() is not root or seen.home.root() is None:
            if len(self._seen) >= self._look_through_at:
                self._seen = {key: seen for key, seen in self._seen.items() if seen.root() is not None}
                self._look_through_at = 2 * len(self._seen) + 64
            seen = self._seen[key] = _Seen(weakref.ref(root), self._home(root))
        self._last = seen
        return seen

    def _home(self, root: torch.nn.Module) -> _Home:
        homes = list(self._homes.values())
        for home in homes:
            other = home.root()
            if other is not None and _has(other, root):
                return home  # the program has called a part of a model
        kind = _class_name(_unwrapped(root))
        inside = [home for home in homes if (part := home.root()) is not None and _has(root, part)]
        if any(not home.prefix for home in inside) or (self._plain is None and _unwrapped(root)._modules):
            self._plain = kind
        if inside:
            forget()
        for home in inside:  # parts of this model that the program called before it
            del self._homes[home.label]
            home.root = _no_root
            home.names.clear()
        return self._take_label(root, kind)

    def _take_label(self, root: torch.nn.Module, kind: str) -> _Home:
        first = self._homes.get(self._plain or "")
        plain = None if first is None else first.root()
        reserved = () if plain is None or plain is root else _unwrapped(plain)._modules
        for number in count(1):
            label = kind if number == 1 else f"{kind}#{number}"
            home = _Home(label, "" if label == self._plain else f"{label}.")
            if getattr(root, "_is_replica", False):  # DataParallel makes new ones in each forward
                home.root = weakref.ref(root)
                return home
            if label not in reserved and self._homes.setdefault(label, home) is home:
                break
        homes = self._homes

        def free(_: object) -> None:
            home.names.clear()
            if homes.get(home.label) is home:
                del homes[home.label]

        home.root = weakref.ref(root, free)
        return home

    def _unregistered(self, home: _Home, module: torch.nn.Module) -> tuple[str, ...]:
        """Name a module that is not registered: the innermost registered module around it, then its class."""
        root, outermost = home.root(), module
        frame = pipeline_frame()
        while frame is not None:
            if frame.f_code is OUTER_CALL and (around := module_of(frame)) is not None and root is not None:
                found = names_under(root, around)
                if found is not None:
                    break
                outermost = around
            frame = frame.f_back
        else:
            found = ("",)
        inside = None if outermost is module else names_under(outermost, module)
        parts = (found[0], f"<{type(outermost).__name__}>", *(inside or ()))
        name = ".".join(part for part in parts if part)
        return (f"{home.prefix}{name}",)
