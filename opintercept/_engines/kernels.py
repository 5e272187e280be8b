"""The kernel engine: kernels at the dispatch key BackendSelect, below autograd and above every backend.

Invariant: a kernel is installed once, asks the scope what to do, and is removed only when the process is quiet: torch
would call a freed kernel if another thread were running operators at that moment. An operator that no block watches
has no kernel, and so costs nothing.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import operator
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from opintercept._core import locks
from opintercept._core.errors import OpInterceptError, OpInterceptWarning, caller_level
from opintercept._core.fork import in_child
from opintercept._core.pipeline import run
from opintercept._core.record import Phase
from opintercept._engines import foreign
from opintercept._engines import overloads as _overloads
from opintercept._engines import scope as _scope
from opintercept._engines.base import Block, Engine, Watcher
from opintercept._engines.dynamo import keep_out
from opintercept._engines.overloads import Overloads
from opintercept._engines.quiet import has_forked_tasks, native_threads, run_if_quiet
from opintercept._engines.scope import KEY, UNKNOWN, Watch, state, take
from opintercept._native.layout import UNREAL
from opintercept._ops.generated import GeneratedKernel
from opintercept._ops.select import PRODUCTS
from opintercept._ops.table import OWN, ROWS, row_of
from opintercept._origin.links import graph_task
from opintercept._origin.stack import backward_phase

SOURCE = "kernels"

# Private; `KernelEngine.needs` lists each for the error if one is missing.
_key: Any = getattr(torch._C, "DispatchKey", None)
_full_after: Any = getattr(torch._C, "_dispatch_keyset_full_after", None)
_has_kernel: Any = _overloads.has_kernel
_has_scope: Any = _scope.has
_get_scope: Any = _scope.get
_stash: Any = _scope.stash

_BELOW: Any = None if _key is None or _full_after is None else _full_after(_key.BackendSelect)

# From what these return torch makes objects of subclasses, such as a `Parameter`, and a tensor that is an object of
# Python already is refused there. A kernel in Python cannot return another.
CONSTRUCTORS = frozenset(("aten::detach", "aten::alias"))

# The part of a call's key set below ours, by the bits of the key set. `&` takes 350 ns, a look-up 30 ns.
_below: dict[int, Any] = {}


# In `x + 1` the 1 is a tensor with a mark, by which types are promoted as for a number. Torch hands it to Python as a
# number, and takes none back for the tensor. (A call by dispatch key takes one, for few operators, and jumps to address
# 0 where the key has no kernel of its own.) Python cannot set the mark, but `Tensor.data` keeps it, and autograd saves
# the tensor by which it multiplies.
_DTYPES: dict[type, Any] = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_marks: dict[torch.dtype, torch.Tensor] = {}


def _find_marks() -> dict[torch.dtype, torch.Tensor]:
    if not _marks:
        # In a thread of its own, which no mode, no transform and no `no_grad` of this one reaches.
        finder = threading.Thread(target=_multiply_by_numbers)
        finder.start()
        finder.join()
    return _marks


def _multiply_by_numbers() -> None:
    factor = torch.zeros((), dtype=torch.complex128, device="cpu", requires_grad=True)
    for number in (True, 1, 1.0, 1j, 2**63):
        saved = getattr((factor * number).grad_fn, "_saved_other", None)
        if saved is not None:
            _marks[saved.dtype] = saved


# Called straight at the CPU's kernels, so that no block and no mode sees them.
_CPU: Any = None if _key is None else torch._C.DispatchKeySet(_key.CPU)
_scalar_tensor: Any = torch.ops.aten.scalar_tensor.default._handle.redispatch_boxed
_set_storage: Any = torch.ops.aten.set_.source_Storage_storage_offset._handle.redispatch_boxed


class KernelEngine(Engine):
    """Installs kernels in Python. A subclass may make some of them in another way.

    Args:
        name: What `intercept` calls it.
    """

    source = SOURCE
    instead = 'use engine="mode"'
    needs: dict[str, Any] = _scope.NEEDS | {
        "torch._C.DispatchKey": _key,
        "torch._C._dispatch_keyset_full_after": _full_after,
        "torch._C._dispatch_has_kernel_for_dispatch_key": _has_kernel,
        "torch._C._dispatch_find_schema_or_throw": _overloads.find_schema,
        "torch._C._dispatch_get_registrations_for_dispatch_key": _overloads.registered,
    }
    every_thread = True
    left_out = CONSTRUCTORS

    def __init__(self, name: str) -> None:
        self.name = name

    def require(self) -> None:
        """As of every engine. What multiplies to find out is done here, since importing should cost little."""
        self.needs.setdefault("MulBackward0._saved_other", _find_marks() or None)
        super().require()

    def of_families(self, families: tuple[str, ...], among: frozenset[str] | None = None) -> Overloads:
        """The overloads that kernels can watch: those that reach BackendSelect whole and have no other kernel there."""
        found = _overloads.of_families(families, functools.partial(self.everything, among), among)
        return {
            name: overload
            for name, overload in sorted(found.items())
            if row_of(name).kind in _overloads.WATCHED and _overloads.arrives_whole(overload)
        }

    def version(self, families: tuple[str, ...]) -> Any:
        """As of every engine. Families that are no products also hold operators without a row."""
        return ROWS.version if set(families) <= set(PRODUCTS) else (ROWS.version, foreign.registrations())

    def everything(self, among: frozenset[str] | None = None) -> Overloads:
        """As of every engine. Kernels in Python leave out `CONSTRUCTORS`."""
        if among is not None:
            return _overloads.everything(self.left_out.union(filter(KERNELS.selects_backend, among)), among)
        return _everything(self.left_out, ROWS.version, foreign.registrations())

    def named(self, entries: list[Any]) -> Overloads:
        """As `of_families`."""
        return _overloads.named(entries, _why_not)

    def unknown(self) -> Overloads:
        """As `of_families`."""
        return _unknown(ROWS.version)

    def skipped(self) -> Overloads:
        """As `of_families`."""
        return _passed(ROWS.version)

    def is_leaf(self, key: Any) -> bool:
        """True of torch's own operators and of generated kernels; one of another library may run Python."""
        return isinstance(key, GeneratedKernel) or str(key).startswith("aten::")

    def enter(self, block: Block) -> None:
        """Install the kernels that a block lacks, and enter it in this thread."""
        self.hold(block, block.watcher)
        if block.watcher.everywhere:
            with locks.shared:
                state.watch_everywhere((*state.everywhere.blocks, block))
        _scope.enter(block)

    def leave(self, block: Block) -> None:
        """Leave a block. If it was the last and the process is quiet, remove the kernels. Can be repeated."""
        _scope.leave(block)
        if block.pid != state.everywhere.pid:
            return  # a parent process entered it, and keeps its own count
        if block.watcher.everywhere:
            with locks.shared:
                state.watch_everywhere(tuple(b for b in state.everywhere.blocks if b is not block))
        self.release(block)

    def hold(self, user: object, watcher: Watcher) -> None:
        """Install the kernels that are missing, and keep them until `user` releases them.

        Raises:
            OpInterceptError: Other code has a kernel where ours would go, and it would not be called.
        """
        with locks.shared:
            KERNELS.hold(user, watcher.shown, self)  # type: ignore[arg-type]  # as `keys` gave them

    def release(self, user: object) -> None:
        """End a `hold`. If it was the last and the process is quiet, remove the kernels. Can be repeated."""
        KERNELS.release(user)

    def extend(self, user: object, watcher: Watcher, come: frozenset[str]) -> None:
        """Install the kernels that a user lacks. Where other code has one already, a warning says so."""
        if user in KERNELS.users:
            KERNELS.hold(user, watcher.shown, self, come)  # type: ignore[arg-type]  # as `keys` gave them

    def installation(self, name: str, overloads: Overloads) -> Callable[[], Any]:
        """A callable that installs a kernel in one C call and returns the object that keeps it installed."""
        return KERNELS.installation(name, overloads)

    def running(self) -> int:
        """How many kernels that are not Python functions are on the stack of this thread."""
        return 0


class Kernels:
    """The kernels in this process's dispatcher. They serve every block, whichever engine made them.

    Attributes:
        installed: The object that keeps each kernel installed, by overload.
        users: The blocks and coroutines that hold the kernels.
        makers: The engines that have asked for kernels.
    """

    def __init__(self) -> None:
        self.installed: dict[str, Any] = {}
        self.users: set[object] = set()
        self.makers: set[KernelEngine] = set()
        # Kernels in Python, by the overload's name. A library that is loaded again has other overloads.
        self._made: dict[str, tuple[torch._ops.OpOverload, Callable[..., Any]]] = {}
        # By namespace; by name for what may go while a block is open: operators of other libraries, and late ones.
        self._libraries: dict[str, torch.library.Library] = {}
        self._alone: dict[str, torch._ops.OpOverload] = {}  # those among the installed ones
        self._whole: dict[int, Overloads] = {}  # selections whose kernels are all installed, by identity
        self._threads_before: frozenset[str] = frozenset()
        self._maker: KernelEngine | None = None  # of all installed ones; None if there are several
        self._told: set[str] = set()  # operators that have come late with a kernel in the place of ours

    def hold(self, user: object, overloads: Overloads, maker: KernelEngine, late: frozenset[str] | None = None) -> None:
        """Install the kernels that are missing, and keep all of them until `user` releases them.

        Where other code has a kernel in the place of ours, an error says so, or a warning for operators that are late.

        Args:
            user: A block or a coroutine.
            overloads: What it watches.
            maker: Makes the kernels.
            late: Those that have come since the user had all the others.
        """
        with locks.shared:
            self.makers.add(maker)
            if self.installed and not self.users and self._maker is not maker:
                self._remove_if_quiet()  # idle kernels that could not be removed earlier
            if not self.users:
                self._threads_before = native_threads()
            self.users.add(user)
            if id(overloads) in self._whole:
                return
            wanted = overloads if late is None else filter(overloads.__contains__, late)
            missing = [name for name in wanted if name not in self.installed]
            # In this order: a signal handler may install a kernel between the two questions.
            others: set[str] = set()
            if missing and late is None:
                others.update(_overloads.registered("BackendSelect"))
            elif missing:
                others.update(name for name in missing if _has_kernel(name, "BackendSelect"))
            taken = [name for name in missing if name in others and name not in self.installed]
            if taken:
                text = (
                    f"the dispatch key BackendSelect must be free, got kernels of other code for {', '.join(taken)}; "
                    f"{maker.instead}"
                )
                if late is None:
                    raise OpInterceptError(text)
                missing = [name for name in missing if name not in taken]
                if not self._told.issuperset(taken):
                    self._told.update(taken)
                    warnings.warn(text, OpInterceptWarning, stacklevel=caller_level())
            if missing:
                self._install(missing, overloads, maker, late is not None)
            if late is not None:  # of the selections before, no watcher has the last one any more
                self._whole.clear()
            self._whole[id(overloads)] = overloads

    def forget_unloaded(self) -> frozenset[str]:
        """Remove the kernels of operators whose library was unloaded, which would serve the next one of their name.

        Nobody can be running one: torch has freed the operator's own kernels by now.
        """
        with locks.shared:
            gone = [name for name, overload in self._alone.items() if not _overloads.is_there(overload)]
            for name in gone:
                self.withdraw(name)
            return frozenset(gone)

    def withdraw(self, name: str) -> None:
        """Remove a kernel that is alone in its library, if there is one."""
        with locks.shared:
            if name not in self._alone:
                return
            library = self._libraries.get(name)
            resets = () if library is None or library.m is None else (library.m.reset,)
            pops = [functools.partial(each.pop, name, None) for each in (self.installed, self._alone)]
            # In one C call, as `_install` does. Dropping a kernel in C++ removes it.
            deque(map(operator.call, (self._whole.clear, *resets, *pops)), maxlen=0)

    def release(self, user: object) -> None:
        """End a `hold`."""
        with locks.shared:
            self.users.discard(user)
            if not self.users and self.installed:
                self._remove_if_quiet()

    def _install(self, names: list[str], overloads: Overloads, maker: KernelEngine, late: bool) -> None:
        self._maker = maker if not self.installed or self._maker is maker else None
        self._alone.update({name: overloads[name] for name in names if late or not foreign.is_torchs(name)})
        steps = {name: maker.installation(name, overloads) for name in names}
        # A single C call installs each kernel and stores it, so that no interrupt comes in between. It skips names
        # that a signal handler has stored meanwhile.
        new, again = itertools.tee(itertools.filterfalse(self.installed.__contains__, steps))
        self.installed.update(zip(new, map(operator.call, map(steps.__getitem__, again)), strict=False))

    def installation(self, name: str, overloads: Overloads) -> Callable[[], Any]:
        """A callable that installs a kernel in Python in one C call."""
        overload = overloads[name]
        known, kernel = self._made.get(name, (None, None))
        if known is not overload or kernel is None:
            kernel = _make_kernel(name, overload)
            self._made[name] = overload, kernel
        place = name if name in self._alone else overload.namespace
        library = self._libraries.get(place)
        if library is None:
            library = self._libraries[place] = torch.library.Library(overload.namespace, "IMPL")
        # The C++ method below `Library.impl`, which also keeps records in Python.
        return functools.partial(library.m.impl, name, "BackendSelect", kernel, True)  # type: ignore[union-attr]

    def _remove_if_quiet(self) -> None:
        """Remove the kernels, unless one of them is running or another thread may be about to run one."""
        if any(maker.running() for maker in self.makers):
            return
        # `reset` empties a library, as interpreter shutdown does, and it can be used again.
        resets = [library.m.reset for library in self._libraries.values() if library.m is not None]
        clears = (self._whole.clear, *resets, self.installed.clear, self._alone.clear)
        run_if_quiet(_kernel_code, self._threads_before, clears)

    def selects_backend(self, name: str) -> bool:
        """Whether other code has a kernel where ours would go, as torch has for factories, which choose a device."""
        with locks.shared:  # another thread may be installing ours
            return name not in self.installed and bool(_has_kernel(name, "BackendSelect"))

    def taken(self) -> frozenset[str]:
        """The overloads of which other code has a kernel where ours would go."""
        with locks.shared:
            return frozenset(_overloads.registered("BackendSelect")) - self.installed.keys()

    def let_forked_tasks_end(self) -> None:
        """Before the interpreter shuts down, wait for tasks that may still have a scope.

        A task of `torch.jit.fork` has its caller's scope, and releases it after its future is done. Releasing takes
        the GIL, and a thread that takes the GIL of an interpreter that is shutting down aborts the process.
        """
        if self.makers and has_forked_tasks(self._threads_before):
            time.sleep(0.05)

    def forget_parent(self) -> None:
        """Start afresh in a forked child: the parent's kernels stay installed, idle, until a block ends here."""
        self.users.clear()


KERNELS = Kernels()
atexit.register(KERNELS.let_forked_tasks_end)
in_child(KERNELS.forget_parent)

_kernel_code: CodeType | None = None


@functools.lru_cache(maxsize=2)
def _everything(left_out: frozenset[str], version: int, registrations: Any) -> Overloads:
    fresh = _overloads.everything(KERNELS.taken() | left_out)
    if fresh.keys() != _every.get(left_out, {}).keys():
        _every[left_out] = fresh
    return _every[left_out]


# The same object while there is nothing new: kernels know by its identity what is installed.
_every: dict[frozenset[str], Overloads] = {}


@functools.lru_cache(maxsize=1)
def _unknown(version: int) -> Overloads:
    return {
        name: overload
        for name, overload in foreign.unknown().items()
        if not KERNELS.selects_backend(name) and _overloads.is_runnable(overload)
    }


@functools.lru_cache(maxsize=1)
def _passed(version: int) -> Overloads:
    return {name: overload for name, overload in _overloads.skipped().items() if _overloads.is_runnable(overload)}


def _why_not(overload: torch._ops.OpOverload) -> str | None:
    if not KERNELS.selects_backend(overload.name()):
        return None
    return (
        "already has a kernel where the kernel engine would put its own, as operators that choose a device do; "
        "use engine='mode'"
    )


def _descend(keyset: Any) -> tuple[Any, bool]:
    """The key set below ours, which is cached for real tensors, and whether the call's tensors are real."""
    below = keyset & _BELOW
    real = not any(keyset.has(getattr(_key, name)) for name in UNREAL if hasattr(_key, name))
    if real:
        _below[keyset.raw_repr()] = below
    return below, real


def _marked(value: Any, is_tensor: bool) -> Any:
    """What torch has made a number of, or numbers in a list, as it was; anything else as it is."""
    if not is_tensor:
        return value
    if isinstance(value, (list, tuple)):
        return value if _DTYPES.keys().isdisjoint(map(type, value)) else [_marked(item, True) for item in value]
    dtype = _DTYPES.get(type(value))
    if dtype is None:
        return value
    with torch._C.DisableTorchFunction():
        tensor = _marks[torch.uint64 if dtype is torch.int64 and value >= 2**63 else dtype].data
        storage = _scalar_tensor(_CPU, value, dtype=tensor.dtype).untyped_storage()
        _set_storage(_CPU, tensor, storage, 0, [], [])
    return tensor


def redispatcher(name: str, overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """A callable that runs the operator for a key set: `OpOverload.redispatch` without its Python frame."""
    boxed = overload._handle.redispatch_boxed
    if name.partition(".")[0] in OWN:
        return boxed  # nobody passes a number for one of their tensors
    arguments, returns = overload._schema.arguments, overload._schema.returns
    tensors = [a for a in arguments if "Tensor" in str(a.type)]
    looks_inside = any("List" in str(a.type) or (a.kwarg_only and not a.is_out) for a in tensors)
    places, names = ["Tensor" in str(a.type) for a in arguments], {a.name for a in tensors}
    returned = ["Tensor" in str(each.type) for each in returns]

    def redispatch(below: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            if not looks_inside and _DTYPES.keys().isdisjoint(map(type, args)):
                return boxed(below, *args, **kwargs)
            args = tuple(map(_marked, args, places))
            kwargs = {key: _marked(value, key in names) for key, value in kwargs.items()}
            output = boxed(below, *args, **kwargs)  # a number if the operator returns the tensor that it got
            return tuple(map(_marked, output, returned)) if len(returned) > 1 else _marked(output, returned == [True])
        finally:
            del args, kwargs  # as in `run`

    return redispatch


def _make_kernel(name: str, overload: torch._ops.OpOverload) -> Callable[..., Any]:
    global _kernel_code
    redispatch = redispatcher(name, overload)
    below_of = _below.get
    has_scope, get_scope, stash = _has_scope, _get_scope, _stash
    carried, current = _scope.carried, _scope.current
    foreign_overload = None if name.partition(".")[0] in OWN else overload

    def kernel(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        below = below_of(keyset.raw_repr())
        if below is None:
            below, real = _descend(keyset)
            if not real:
                return redispatch(below, *args, **kwargs)
        scope = get_scope(KEY) if has_scope(KEY) else state.idle
        if scope.everywhere is not state.everywhere or scope.carried is not carried():
            scope = current()
        watch = scope.tables[SOURCE].get(name, UNKNOWN)
        if watch is UNKNOWN:
            watch = scope.watch(SOURCE, name)
        if watch is None:
            if scope.owner is None:
                state.unseen += 1
            return redispatch(below, *args, **kwargs)
        if watch.tally is not None:
            watch.tally()
            return redispatch(below, *args, **kwargs)
        if foreign_overload is not None and foreign.has_changed(foreign_overload):
            return overload._handle.redispatch_boxed(below, *args, **kwargs)
        hidden = watch.hidden
        if take is not None:
            take(hidden)
            take(scope)
        phase: Phase = "forward" if graph_task() == -1 else backward_phase()
        try:
            stash(KEY, hidden)  # inside the try: a signal handler may raise right after it
            if watch.inner is hidden:
                return run(watch.pipelines, watch.row, overload, phase, redispatch, below, args, kwargs)
            head = (watch, redispatch, below)
            return run(watch.pipelines, watch.row, overload, phase, _step_inside, head, args, kwargs)
        finally:
            stash(KEY, scope)
            del args, kwargs  # as in `run`

    _kernel_code = kernel.__code__
    return keep_out(kernel)


def _step_inside(head: tuple[Watch, Callable[..., Any], Any], /, *args: Any, **kwargs: Any) -> Any:
    watch, redispatch, below = head
    if take is not None:
        take(watch.inner)
        take(watch.hidden)
    try:
        _stash(KEY, watch.inner)
        return redispatch(below, *args, **kwargs)
    finally:
        _stash(KEY, watch.hidden)
        del args, kwargs  # as in `run`
