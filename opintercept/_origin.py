"""Where a call comes from: module and source line, its pass, the forward call behind it, and autocast's state.

Invariant: what cannot be told is None; nothing here keeps a tensor, a frame, a module or a graph alive.
The one file outside `_engines/` that reads torch's private state: autograd's and autocast's.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from itertools import count, islice
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.utils.checkpoint

from opintercept import _pipeline
from opintercept._call import NOWHERE, OpCall, Phase, Place
from opintercept._engines import graphs
from opintercept._ops import MATMUL, row_of

# -1 outside of `backward`. Private, like the rest below; without them (not seen from torch 2.11 to 2.15)
# importing fails here, at once and by name.
graph_task = torch._C._current_graph_task_id
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
_is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_ABOVE_PYTHON = torch._C.DispatchKey.Conjugate
_Context: type[Any] = torch._C._FunctionBase

_OUTER_CALL = torch.nn.Module._wrapped_call_impl.__code__
_INNER_CALL = torch.nn.Module._call_impl.__code__
# What calls a custom Function's forward; None where that is C, as it is in torch 2.15.
_APPLY: CodeType | None = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
_RUN = _pipeline.run.__code__
WALKED_CODE = (_OUTER_CALL, _INNER_CALL, _RUN)
_CHECKPOINT = torch.utils.checkpoint.__file__
NOT_SOURCE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

# What torch puts between a module and its parent without the user having written it.
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_PARALLEL = {"DataParallel", "DistributedDataParallel"}  # these call what they wrap `module`
_PUTS_CLASSES_BELOW = ("torch.distributed.", "torch.nn.utils.parametrize")


def backward_phase() -> Phase:
    """The pass of a call inside of a graph task: backward, or a checkpoint's recomputation of the forward."""
    # Both a recomputation and `create_graph=True` turn gradients on; only the one has checkpoint's frames.
    if torch.is_grad_enabled():
        frame: FrameType | None = sys._getframe()  # may be the only one: a compiled kernel has none
        while frame is not None:
            if frame.f_code.co_filename == _CHECKPOINT:
                return "recompute"
            frame = frame.f_back
    return "backward"


class _Names(NamedTuple):
    """The names that a module has under one root, the first one first."""

    module: weakref.ref[torch.nn.Module]
    names: tuple[str, ...]


# The qualified names under each root, without its label; shared by all interceptors, since collecting them takes time.
_by_root: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, _Names]] = weakref.WeakKeyDictionary()

# Whether a code object is the user's, for the source line. By identity: hashing a code object reads all of it.
_users: dict[int, tuple[CodeType, bool]] = {}


Walked: TypeAlias = tuple[torch.nn.Module | None, torch.nn.Module | None, CodeType | None, int]
"""The innermost and the outermost module, and the user's code with its instruction; None and -1 outside of them."""


def walk() -> Walked:
    """Walk the Python stack once, from the operator outwards."""
    top = _top()
    # Three stretches of the stack, since each look at a frame costs: up to the innermost module; up to the
    # outermost; and beyond, where somebody may have called `model.forward` directly. The source line is sought in
    # the first one and, since most modules inside of models are torch's own, in a part of the second.
    inner: FrameType | None = None
    frame = top
    while frame is not None:
        code = frame.f_code
        if code is _OUTER_CALL or (code.co_name == "forward" and _called_directly(frame)):
            inner = frame
            break
        frame = frame.f_back
    frame = outer = inner
    while frame is not None:
        if frame.f_code is _OUTER_CALL:
            outer = frame
        frame = frame.f_back
    frame = None if outer is None else outer.f_back
    while frame is not None:
        if frame.f_code.co_name == "forward" and _called_directly(frame):
            outer = frame
        frame = frame.f_back
    try:
        module = None if inner is None else _module_of(inner)
        root = None if outer is None else _module_of(outer)
        frame = top
        while frame is not None:
            code = frame.f_code
            known_user = _users.get(id(code))
            if known_user[1] if known_user is not None else _is_users(code):
                return module, root, code, frame.f_lasti
            frame = frame.f_back
        return module, root, None, -1
    finally:
        del top, inner, outer, frame  # a frame that reaches itself is garbage


def _top() -> FrameType | None:
    """The frame of the pipeline: above it are the hook that asks, maybe a module's method, and who has asked for it."""
    top: FrameType | None = sys._getframe(1)
    try:
        while top is not None and top.f_code is not _RUN:
            top = top.f_back
        return top
    finally:
        del top


def _called_directly(frame: FrameType) -> bool:
    """Whether a function named forward is a module's, called without the module's own `__call__`."""
    caller = frame.f_back
    if caller is not None and caller.f_code is _INNER_CALL:
        return False
    while caller is not None and caller.f_code is not _INNER_CALL and caller.f_code.co_name in ("wrapper", "inner"):
        caller = caller.f_back  # a decorator's, or torch's own around its hooks
    return (caller is None or caller.f_code is not _INNER_CALL) and _module_of(frame) is not None


def _module_of(frame: FrameType) -> torch.nn.Module | None:
    code = frame.f_code
    module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return module if isinstance(module, torch.nn.Module) else None


def _is_users(code: CodeType) -> bool:
    if len(_users) > 10_000:  # a program that makes code without end, a notebook say
        _users.clear()
    users = not code.co_filename.startswith(NOT_SOURCE)
    _users[id(code)] = (code, users)
    return users


def _find(root: torch.nn.Module, module: torch.nn.Module) -> tuple[str, ...] | None:
    """The qualified names of `module` under `root`, `""` for the root itself; None if it is not registered there."""
    known = _table(root)
    entry = known.get(id(module))
    if entry is None or entry.module() is not module:
        known.update(_collect(root))  # registered since, perhaps
        entry = known.get(id(module))
    return entry.names if entry is not None and entry.module() is module else None


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
    shown: dict[str, str] = {}  # by qualified name, that without the wrappers' parts; a parent comes before its parts
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
    """The module that the user wrote, inside of what torch puts around it."""
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
    # `fully_shard` and `parametrize` put a class of their own, FSDPNet, below the user's.
    kinds = (kind for kind in type(root).__mro__ if not kind.__module__.startswith(_PUTS_CLASSES_BELOW))
    return next(kinds).__name__


class _Home:
    """A root with a label, after which the modules in it are named.

    Attributes:
        root: The root, as long as it lives and has the label.
        label: What the root itself is called.
        prefix: What the names of its modules begin with.
        names: The names so far by the module's identity.
    """

    __slots__ = ("label", "names", "prefix", "root")

    def __init__(self, label: str, prefix: str) -> None:
        self.root: Callable[[], torch.nn.Module | None] = _no_root
        self.label = label
        self.prefix = prefix
        self.names: dict[int, _Names] = {}

    def find(self, module: torch.nn.Module) -> tuple[str, ...] | None:
        """The names of a module in here, or None; remembered."""
        root = self.root()
        found = None if root is None else _find(root, module)
        if found is None:
            return None
        names = tuple(f"{self.prefix}{name}" if name else self.label for name in found)
        self.names[id(module)] = _Names(weakref.ref(module), names)
        return names


class _Seen(NamedTuple):
    """The outermost module of a stack, and the home that it is part of, mostly its own."""

    root: Callable[[], torch.nn.Module | None]
    home: _Home


def _no_root() -> None:
    return None


class Labels:
    """What one interceptor calls the modules of the program.

    The first root with modules in it gives them their plain names, `fc1`. A name under any other root begins with
    the root's class, `Critic.fc1`, and with a number where several of the class live, `Critic#2.fc1`. A label is free
    again when its root has died. No lock: a signal handler may name modules, too.
    """

    def __init__(self) -> None:
        self._homes: dict[str, _Home] = {}  # by label
        self._seen: dict[int, _Seen] = {}  # by the identity of the root; those that are gone leave when there are many
        self._look_through_at = 64
        self._last = _Seen(_no_root, _Home("", ""))  # nearly always the next one, too
        self._plain: str | None = None  # the class whose first root has plain names

    def names(self, root: torch.nn.Module, module: torch.nn.Module) -> tuple[str, ...]:
        """The names of `module` in a call whose outermost module is `root`."""
        seen = self._last
        if seen.root() is not root:
            seen = self._turn_to(root)
        entry = seen.home.names.get(id(module))
        if entry is not None and entry.module() is module:
            return entry.names
        if seen.home.root() is None:
            seen = self._turn_to(root)
        return seen.home.find(module) or self._unregistered(seen.home, module)

    def registered(self, root: torch.nn.Module, module: torch.nn.Module) -> tuple[str, ...] | None:
        """The names of `module`, wherever the stack is, or None if it is not registered under `root`."""
        return self._turn_to(root).home.find(module)

    def recomputed(self, module: torch.nn.Module) -> tuple[str, ...] | None:
        """The names of `module` where the stack begins at a checkpoint and not at the root; None if no root has it."""
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
                return home  # a part of a model, called directly
        kind = _class_name(_unwrapped(root))
        inside = [home for home in homes if (part := home.root()) is not None and _has(root, part)]
        if any(not home.prefix for home in inside) or (self._plain is None and _unwrapped(root)._modules):
            self._plain = kind
        for home in inside:  # parts of this model that were called before it
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
            if getattr(root, "_is_replica", False):  # DataParallel makes them anew in each forward
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
        """Name a module that is registered nowhere by its class, after the innermost one around it that is."""
        root, outermost = home.root(), module
        frame = _top()
        try:
            around = None
            while frame is not None:
                if frame.f_code is _OUTER_CALL and (around := _module_of(frame)) is not None and root is not None:
                    found = _find(root, around)
                    if found is not None:
                        break
                    outermost = around
                frame = frame.f_back
            else:
                found = ("",)
        finally:
            del frame
        inside = None if outermost is module else _find(outermost, module)
        parts = (found[0], f"<{type(outermost).__name__}>", *(inside or ()))
        name = ".".join(part for part in parts if part)
        return (f"{home.prefix}{name}",)


class Link(NamedTuple):
    """What a forward call leaves behind for the backward calls that compute its gradients; no tensor.

    Attributes:
        index: The call's.
        op: Its operator.
        round: How many backward passes there had been.
        operands: Where its arguments begin in memory, 0 for what is no tensor.
        sure: Whether autograd was seen to record it, and not only to record something of its name.
        needed: Whether autograd knows one of its operands. A custom Function may have others, which it has cast.
    """

    index: int  # type: ignore[assignment]
    op: str
    round: int
    operands: tuple[int, ...]
    sure: bool
    needed: bool


class _ThreadLinks:
    """The links of one thread by autograd's sequence number, which the node of the gradient has too."""

    __slots__ = ("_seen", "links", "places", "shared")

    def __init__(self) -> None:
        # The newest number when a call was last looked at; the nodes up to it are not of a call that comes now.
        self._seen = _sequence_nr() - 1
        self.links: dict[int, Link] = {}
        self.places: dict[int, Place] = {}
        # Several calls under one node, of a custom Function or inside of a fused operator: which, cannot be told.
        self.shared: set[int] = set()

    def look(self, newest: int) -> bool:
        """Whether autograd has recorded something since the last look."""
        fresh = newest > self._seen
        self._seen = newest
        return fresh

    def share(self, number: int, place: Place | None) -> None:
        """Note that another call, from `place`, has the same node: what the two have in common can still be told."""
        self.shared.add(number)
        known = self.places.get(number)
        if known is not None and place is not None:
            self.places[number] = known.common(place)

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self.links[number]
            self.places.pop(number, None)
            self.shared.discard(number)


class Links:
    """The forward calls of one interceptor, for its backward calls to find.

    Attributes:
        wanted: Whether somebody asks; nothing is noted until then.
    """

    # Old links go when there are more than so many, those of the last two backward passes excepted, and
    # the oldest go in any case beyond the second number: a program that never calls backward.
    SOFT, HARD = 4096, 1 << 16
    THREADS = 64  # from so many on, those of threads that have ended go

    def __init__(self, owner: Callable[[], int | None], place: Callable[[Phase], Place]) -> None:
        self._owner = owner
        self._place = place
        # Autograd's numbers are per thread. By the thread's identity, for autograd's threads that work for it.
        self._threads: dict[int, _ThreadLinks] = {}
        self._local = threading.local()
        self._round = 0
        self._in_backward = False
        self.wanted = False

    def begin(self) -> None:
        """Note that this thread begins to look: what autograd has recorded so far is of calls that were not seen."""
        if self.wanted:
            self._of_this_thread().look(_sequence_nr() - 1)

    def note(self, call: OpCall) -> None:
        """Remember a call whose gradient autograd may compute, and where a call of the forward pass comes from."""
        backward = call.phase == "backward"
        if backward:
            self._in_backward = True
        else:
            # Also where no gradient is wanted: a root that is not seen now would get its label when a hook asks, and
            # another one than an interceptor gives it whose hooks ask in each call.
            call._place = self._place(call.phase)
        recording = torch.is_grad_enabled()
        function = None
        if not recording:
            if backward or _is_fwd_grad_enabled() or torch.is_inference_mode_enabled():
                return  # `no_grad` leaves forward-mode gradients on; a custom Function's forward has both off
            function = _custom_function()
        operands = []
        needed = False
        for value in call.args:
            if isinstance(value, torch.Tensor):
                needed = needed or value.requires_grad
                operands.append(_address(value))
            else:
                operands.append(0)
                if isinstance(value, (list, tuple)):
                    needed = needed or any(isinstance(t, torch.Tensor) and t.requires_grad for t in value)
        if isinstance(call._place, _GraphPlace):
            needed = needed and function is None  # in a compiled graph one operand tells no more than another
        mine = self._of_this_thread()
        links = mine.links
        newest = _sequence_nr() - 1
        fresh = mine.look(newest)
        number = newest if function is None else function._sequence_nr()
        # Autograd knows a wrapper (DTensor), and not the tensors inside, which are the ones that come by here.
        inside = not needed and recording and _is_excluded(_ABOVE_PYTHON)
        other = links.get(number)
        if other is not None:
            if not needed or other.needed or not other.sure:
                if needed or (function is not None and not other.needed) or (inside and not other.sure):
                    # Inside of a wrapper the first product is that of the node; another one may have none.
                    mine.share(number, None if inside else call._place)
                return
            mine.forget([number])  # of a custom Function's products, the one whose operands autograd knows
        elif not needed and function is None and not (inside and fresh):
            return
        if self._in_backward and not backward:
            self._in_backward = False
            self._round += 1
            if len(links) > self.SOFT:
                mine.forget([n for n, link in links.items() if link.round < self._round - 2])
        elif len(links) > self.HARD:
            mine.forget(list(islice(links, self.HARD // 2)))
        # A tuple of plain values, which the garbage collector does not have to visit.
        links[number] = Link(call.index, call.op, self._round, tuple(operands), needed or function is not None, needed)
        if call._place is not None:
            mine.places[number] = call._place
        elif (behind := self.find()) is not None:
            mine.places[number] = behind[1]

    def _of_this_thread(self) -> _ThreadLinks:
        mine: _ThreadLinks | None = getattr(self._local, "links", None)
        if mine is None:
            # A thread may have the identity of one that has ended, whose links are not its own.
            mine = self._local.links = self._threads[threading.get_ident()] = _ThreadLinks()
            if len(self._threads) > self.THREADS:
                for ended in self._threads.keys() - sys._current_frames().keys():
                    del self._threads[ended]
        return mine

    def find(self) -> tuple[Link, Place, bool] | None:
        """The forward call whose gradient is being computed, its place, and whether it shares its node; or None."""
        node = _current_node()
        if node is None:
            return None
        thread = threading.get_ident()
        if thread not in self._threads:
            # A thread of autograd's own works for the one that called backward.
            thread = self._owner() or thread
        known = self._threads.get(thread)
        number = node._sequence_nr()
        link = None if known is None else known.links.get(number)
        if known is None or link is None or not _computes(node, link):
            return None
        return link, known.places.get(number, NOWHERE), number in known.shared


def _custom_function() -> Any:
    """The node of the custom Function whose forward is running, if autograd records one.

    Its context is the node. The nodes of Functions inside of its forward are newer and go nowhere. A Function with
    `setup_context` has no context on the stack: None.
    """
    frame = _top()
    try:
        while frame is not None and (caller := frame.f_back) is not None:
            code = frame.f_code
            # Without a frame to go by, by its name, or by that of the decorator `torch.amp.custom_fwd`.
            if caller.f_code is _APPLY if _APPLY is not None else code.co_name in ("forward", "decorate_fwd"):
                first = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
                if not code.co_argcount and isinstance(first, tuple) and first:
                    first = first[0]  # a decorator's `*args`, that of `torch.amp.custom_fwd`, say
                if isinstance(first, _Context) and first.next_functions:
                    return first
            frame = caller
        return None
    finally:
        del frame


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a layout without one array
        return 0


_NODES = frozenset(name.partition("::")[2].replace("_", "") for name, row in MATMUL.items() if row.kind == "leaf")


def _computes(node: Any, link: Link) -> bool:
    """Whether the node can be that of the link's operator: another thread's numbers may be the same."""
    name = node.name().lower().rstrip("0123456789").removesuffix("backward")
    return (link.sure and name not in _NODES) or name == link.op.partition("::")[2].replace("_", "")


class _Around(NamedTuple):
    """What the forward call of a compiled graph leaves behind for its backward calls; keeps no module alive.

    Attributes:
        graph: The graph.
        modules: The innermost and the outermost module around the compiled function; None outside of all.
        bases: The modules that the function uses, by how it calls them.
        caller: The user's code that has called one of torch's own modules, all of which was compiled; else None.
    """

    graph: graphs.Graph | None
    modules: tuple[weakref.ref[torch.nn.Module], weakref.ref[torch.nn.Module]] | None
    bases: dict[str, weakref.ref[torch.nn.Module]]
    caller: tuple[CodeType | None, int]

    def place(self, aliases: tuple[str, ...], trace: graphs.Trace) -> _GraphPlace:
        """The place of one call; a graph keeps no line of a call that is in torch's modules alone."""
        code, instruction = self.caller if trace.line is None and trace.base is not None else (None, -1)
        return _GraphPlace(aliases, code, instruction, trace.line, self)


class _GraphPlace(Place):
    """The place of a call in a compiled graph. All calls of the graph share a node, which runs the backward graph."""

    __slots__ = ("around",)

    def __init__(
        self,
        aliases: tuple[str, ...],
        code: CodeType | None,
        instruction: int,
        line: tuple[str, int, str] | None,
        around: _Around,
    ) -> None:
        super().__init__(aliases, code, instruction, line)
        self.around = around

    def common(self, other: Place) -> Place:
        if isinstance(other, _GraphPlace):
            self.around.bases.update(other.around.bases)
        common = super().common(other)
        return _GraphPlace(common.aliases, common._code, common._instruction, common._line, self.around)


def _frame_of(code: CodeType) -> FrameType | None:
    frame = _top()
    try:
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        return frame
    finally:
        del frame


def _is_graph(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "GraphModule" for kind in type(module).__mro__)


def _is_dynamos(module: torch.nn.Module) -> bool:
    return hasattr(module, "compile_subgraph_reason")  # what Dynamo calls, which is not in the program


def _called(frame: FrameType, base: str) -> torch.nn.Module | None:
    """The module that a frame calls by a local or a global name, as a graph writes them: L['self'], G['model']."""
    module = (frame.f_locals if base[0] == "L" else frame.f_globals).get(base[3:-2])
    return module if isinstance(module, torch.nn.Module) and not _is_graph(module) else None


class _Stack:
    """Reads the Python stack of a running call, and names the modules on it for one interceptor.

    Args:
        walk: `walk`, or what does the same.
    """

    def __init__(self, walk: Callable[[], Walked]) -> None:
        self._labels = Labels()
        self._walk = walk

    def here(self, phase: Phase) -> Place:
        """The place on the stack, above the hook that asks."""
        module, root, code, instruction = self._walk()
        if code is not None and graphs.is_generated(code):
            return self._in_graph(phase, module, root, code)
        if module is None or root is None:
            return Place(("",), code, instruction)
        again = self._labels.recomputed(module) if phase == "recompute" else None
        return Place(again or self._labels.names(root, module), code, instruction)

    def _in_graph(
        self, phase: Phase, module: torch.nn.Module | None, root: torch.nn.Module | None, code: CodeType
    ) -> Place:
        """The place of a call in code that torch.compile has made, as its graph tells it."""
        made = _frame_of(code)
        if made is None:
            return NOWHERE
        own = outermost = base = None  # modules of the program around the compiled function
        caller: tuple[CodeType | None, int] | None = None
        frame = made.f_back
        try:
            trace, graph = graphs.forward(made)
            while frame is not None:
                if base is None and trace.base:
                    base = _called(frame, trace.base)
                if frame.f_code is _OUTER_CALL and (outer := _module_of(frame)) is not None and not _is_graph(outer):
                    own, outermost = outer if own is None else own, outer
                if caller is None and _is_users(frame.f_code):
                    caller = (frame.f_code, frame.f_lasti) if own is not None else (None, -1)
                frame = frame.f_back
        finally:
            del frame, made
        if graph is None and own is None and module is not None and root is not None and not _is_dynamos(root):
            return Place(self._labels.names(root, module), None, -1, trace.line)  # a GraphModule of the program's
        bases = {} if base is None or trace.base is None else {trace.base: weakref.ref(base)}
        around = None if own is None or outermost is None else (weakref.ref(own), weakref.ref(outermost))
        there = _Around(graph, around, bases, caller or (None, -1))
        return there.place(self._names_of(trace, there, phase == "recompute"), trace)

    def _names_of(self, trace: graphs.Trace, there: _Around, again: bool = False) -> tuple[str, ...]:
        own, root = (None, None) if there.modules is None else (ref() for ref in there.modules)
        if trace.base == "":
            if there.modules is None:
                return ("",)
            module = own
        else:
            base = module = there.bases[trace.base]() if trace.base in there.bases else None
            root = base if root is None else root
            for part in trace.path:
                module = None if module is None else module._modules.get(part)
            if type(module).__name__ != trace.kind:
                return ()
        if module is None or root is None:
            return ()
        return (self._labels.recomputed(module) if again else None) or self._labels.registered(root, module) or ()

    def in_backward_graph(self, place: _GraphPlace) -> Place:
        """The place of a backward call whose forward call ran in compiled code."""
        code = self._walk()[2]
        frame = None if code is None or not graphs.is_generated(code) else _frame_of(code)
        if frame is None:
            return place
        try:
            trace = graphs.backward(frame, place.around.graph)
        finally:
            del frame
        return place.around.place(self._names_of(trace, place.around), trace)


class Origin:
    """What an interceptor's calls ask where they come from; injected into its pipeline.

    Args:
        below: Whether the calls run below autograd and autocast.
        owner: The thread on whose behalf this one runs, for autograd's device threads.
        walk: `walk`, or what does the same.
    """

    def __init__(self, below: bool, owner: Callable[[], int | None], walk: Callable[[], Walked]) -> None:
        self._stack = _Stack(walk)
        self.links = Links(owner, self._stack.here) if below else None
        self._below = below

    def autocast(self, call: OpCall) -> torch.dtype | None:
        """The dtype that autocast runs the call in, or None."""
        return autocast_below(call) if self._below else autocast_above(call._passed("lhs"))

    def place(self, call: OpCall) -> Place:
        """The module and the line of the call, in backward those of the forward call behind it."""
        if call.phase != "backward":
            if self.links is not None:
                self.links.wanted = True
            return self._stack.here(call.phase)
        behind = self._behind(call)
        if behind is None:
            return NOWHERE
        return self._stack.in_backward_graph(behind[1]) if isinstance(behind[1], _GraphPlace) else behind[1]

    def forward(self, call: OpCall) -> tuple[int | None, str | None, bool]:
        """The forward call whose gradient this one computes, of which operand, and whether it comes transposed."""
        behind = self._behind(call)
        if behind is None or behind[2]:
            return None, None, False
        return behind[0].index, *_grad_of(call, behind[0])

    def _behind(self, call: OpCall) -> tuple[Link, Place, bool] | None:
        if self.links is None:
            return None
        self.links.wanted = True
        return self.links.find() if call.phase == "backward" else None


def _grad_of(call: OpCall, link: Link) -> tuple[str | None, bool]:
    """The gradient of one operand is a product with the other one, which autograd has saved.

    With G the gradient of the output, that of lhs is `G @ rhs.T` and that of rhs `lhs.T @ G`; for an operand that
    is column-major autograd multiplies the other way round and transposes the product (`mm_mat1_backward` in its
    FunctionsManual.cpp).
    """
    roles = row_of(link.op).roles
    if "lhs" not in roles or "rhs" not in roles:
        return None, False
    if link.sure and not link.needed:
        return None, False  # operands that were cast may be gone by now, and others in their memory
    lhs, rhs = (link.operands[p] if (p := roles[r][0]) < len(link.operands) else 0 for r in ("lhs", "rhs"))
    used = {_address(value) for value in call.args if isinstance(value, torch.Tensor)} - {0}
    if (lhs in used) == (rhs in used):
        return None, False
    left = call._spec.operand("lhs", call.args, call.kwargs)
    on_the_left = left is not None and _address(left) in (lhs, rhs)
    return ("rhs", not on_the_left) if lhs in used else ("lhs", on_the_left)


def autocast_below(call: OpCall) -> torch.dtype | None:
    """The dtype that autocast has cast the operands to, or None; for calls below autocast.

    Autocast's kernel turns its switch off for what it calls. So where the switch is on, autocast has no kernel
    for the operator, and where it is off inside of an `autocast` block, the operands tell whether they were cast:
    bfloat16 operands under `autocast(enabled=False)`, alone, look the same.
    """
    # The nesting depth has no getter; raising and lowering it has no other effect.
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    if depth == 0 or (lhs := call._passed("lhs")) is None:
        return None
    try:
        dtype = torch.get_autocast_dtype(lhs.device.type)
        on = torch.is_autocast_enabled(lhs.device.type)
        return dtype if not on and lhs.dtype == dtype else None
    except Exception:  # a device without autocast, or a subclass whose attributes raise
        return None


def autocast_above(lhs: Any) -> torch.dtype | None:
    """The dtype that autocast will cast to, or None; for calls above autocast, where its switch can be read."""
    device = "cpu" if lhs is None else lhs.device.type
    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    except RuntimeError:
        return None
