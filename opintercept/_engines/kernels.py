"""The kernel engine: kernels at BackendSelect, below autograd and above every backend.

Invariant: kernels are installed once, gated by the scope, and removed only when the process is quiet:
torch calls a freed kernel if one goes while another thread runs operators (torch-facts 4.4).
An operator that nobody watches has no kernel, and so costs nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import operator
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol

import torch

from opintercept._engines import scope as _scope
from opintercept._engines.dynamo import keep_out
from opintercept._engines.scope import KEY, UNKNOWN, Block, Watch, native_threads, require, require_scope, state, take
from opintercept._errors import OpInterceptError
from opintercept._fork import in_child
from opintercept._ops.table import MATMUL
from opintercept._origin.links import graph_task
from opintercept._origin.stack import backward_phase
from opintercept._pipeline import run
from opintercept._record import Phase

_INSTEAD = 'use engine="mode"'

# Each is private; `available` names what is missing.
_key: Any = getattr(torch._C, "DispatchKey", None)
_full_after: Any = getattr(torch._C, "_dispatch_keyset_full_after", None)
_has_kernel: Any = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
_find_schema: Any = getattr(torch._C, "_dispatch_find_schema_or_throw", None)
_has_scope: Any = _scope._has
_get_scope: Any = _scope._get
_stash: Any = _scope.stash

_BELOW: Any = None if _key is None or _full_after is None else _full_after(_key.BackendSelect)

# No kernel runs for these: shapes only (meta, and fake tensors, which are meta below), or wrappers that
# another key takes apart before the operator comes by again with plain tensors.
_UNREAL = (
    "Meta",
    "Functionalize",
    "FuncTorchBatched",
    "FuncTorchGradWrapper",
    "FuncTorchVmapMode",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "PythonTLSSnapshot",
)

# Key set of a call, by its bits, to the part below ours. A `&` of key sets costs 350 ns, this 30.
_below: dict[int, Any] = {}


class Compiled(Protocol):
    """Kernels in C++, see `compiled`."""

    def installation(self, name: str, overload: torch._ops.OpOverload) -> Callable[[], Any] | None:
        """What installs the kernel and returns a handle that takes it out when it goes; it runs no Python.

        None for an overload that needs the kernel in Python.
        """

    def running(self) -> int:
        """How many of the kernels are on the stack of this thread."""


_lock = threading.RLock()  # a signal's handler may enter a block while its thread enters one
_kernels: dict[str, Callable[..., Any]] = {}  # by overload, made once
_installed: dict[str, Any] = {}  # by overload; a compiled kernel's handle, which takes it out when it goes
_libraries: dict[str, torch.library.Library] = {}  # by namespace, made once
_whole: dict[int, dict[str, torch._ops.OpOverload]] = {}  # selections, by identity, that have all of their kernels
_compiled: Compiled | None = None  # set for good by the first block that asks for it
_users: set[object] = set()
_threads_at_entry: frozenset[str] = frozenset()
_kernel_code: CodeType | None = None


def available() -> None:
    """Refuse a torch that the engine cannot run on.

    Raises:
        OpInterceptError: See `scope.require`.
    """
    require_scope("kernel", _INSTEAD)
    require(
        "kernel",
        _INSTEAD,
        {
            "torch._C.DispatchKey": _key,
            "torch._C._dispatch_keyset_full_after": _full_after,
            "torch._C._dispatch_has_kernel_for_dispatch_key": _has_kernel,
            "torch._C._dispatch_find_schema_or_throw": _find_schema,
        },
    )


def registered(overload: torch._ops.OpOverload) -> bool:
    """Whether the dispatcher knows the overload; TorchScript has some of its own."""
    try:
        _find_schema(overload._schema.name, overload._schema.overload_name)
    except RuntimeError:
        return False
    return True


def composite(overload: torch._ops.OpOverload) -> bool:
    """Whether the overload is taken apart above autograd, before a kernel of ours could see it."""
    return bool(_has_kernel(overload.name(), "CompositeImplicitAutograd"))


def selects_backend(overload: torch._ops.OpOverload) -> bool:
    """Whether somebody has a kernel where ours would go: torch for factories, which choose a device there."""
    name = overload.name()
    with _lock:  # another thread may be installing ours
        return name not in _installed and bool(_has_kernel(name, "BackendSelect"))


# Where an operator computes. One that this build of torch has for none of them cannot run.
_BACKENDS = (
    *("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CPU", "CUDA", "MPS", "XPU", "HPU", "XLA"),
    *("MTIA", "PrivateUse1", "PrivateUse2", "PrivateUse3", "QuantizedCPU", "QuantizedCUDA", "QuantizedPrivateUse1"),
    *("SparseCPU", "SparseCUDA", "SparsePrivateUse1", "SparseCsrCPU", "SparseCsrCUDA", "SparseCsrPrivateUse1"),
    *("NestedTensorCPU", "NestedTensorCUDA", "MkldnnCPU", "Vulkan", "Metal", "IPU", "VE", "Lazy"),
)


def runnable(overload: torch._ops.OpOverload) -> bool:
    """Whether this build of torch has a kernel for the overload; entering a block is the faster for the others."""
    return any(_has_kernel(overload.name(), key) for key in _BACKENDS)


def hold(user: object, overloads: dict[str, torch._ops.OpOverload], compiled: Compiled | None = None) -> None:
    """Install what is missing, and keep it until `user` releases it.

    Whoever made them, kernels serve all: those that others use stay when compiled ones are asked for.

    Raises:
        OpInterceptError: Other code has a kernel where ours would go, and it would not be called.
    """
    global _threads_at_entry, _compiled
    with _lock:
        if compiled is not None:
            _compiled = compiled
            if _installed and not _users and _quiet():
                _remove()  # idle ones, left from a time that was not quiet
        if not _users:
            _threads_at_entry = native_threads()
        _users.add(user)
        if id(overloads) in _whole:
            return
        missing = [name for name in overloads if name not in _installed]
        # In this order, since a signal's handler may install one meanwhile.
        taken = [name for name in missing if _has_kernel(name, "BackendSelect") and name not in _installed]
        if taken:
            raise OpInterceptError(
                f"the kernel engine needs the dispatch key BackendSelect to be free, got kernels of somebody else for "
                f"{', '.join(taken)}; {_INSTEAD}"
            )
        if missing:
            _install({name: overloads[name] for name in missing}, compiled)
        _whole[id(overloads)] = overloads


def release(user: object) -> None:
    """End a `hold`, and take the kernels out if it was the last and all is quiet. Can be repeated."""
    with _lock:
        _users.discard(user)
        if not _users and _installed and _quiet():
            _remove()


def enter(block: Block, overloads: dict[str, torch._ops.OpOverload], compiled: Compiled | None = None) -> None:
    """Install what is missing for a block, and enter it in this thread."""
    hold(block, overloads, compiled)
    if block.watcher.everywhere:
        with _lock:
            state.watch_everywhere((*state.everywhere.blocks, block))
    _scope.enter(block)


def leave(block: Block) -> None:
    """Leave a block, and take the kernels out if it was the last and all is quiet. Can be repeated."""
    _scope.leave(block)
    if block.pid != state.everywhere.pid:
        return  # entered by a parent process, which counts for itself
    if block.watcher.everywhere:
        with _lock:
            state.watch_everywhere(tuple(b for b in state.everywhere.blocks if b is not block))
    release(block)


def _install(overloads: dict[str, torch._ops.OpOverload], compiled: Compiled | None) -> None:
    steps = {name: _installation(name, overload, compiled) for name, overload in overloads.items()}
    # One call of C installs each kernel and puts it down, so that no interrupt comes in between; a name that a
    # signal's handler has put down meanwhile is left out.
    names, again = itertools.tee(itertools.filterfalse(_installed.__contains__, steps))
    _installed.update(zip(names, map(operator.call, map(steps.__getitem__, again)), strict=False))


def _installation(name: str, overload: torch._ops.OpOverload, compiled: Compiled | None) -> Callable[[], Any]:
    """What installs a kernel and is no Python."""
    install = None if compiled is None else compiled.installation(name, overload)
    if install is not None:
        return install
    kernel = _kernels.get(name)
    if kernel is None:
        kernel = _kernels[name] = _make_kernel(name, overload)
    library = _libraries.get(overload.namespace)
    if library is None:
        library = _libraries[overload.namespace] = torch.library.Library(overload.namespace, "IMPL")
    # The call in C++ below `Library.impl`, which also keeps books in Python.
    return functools.partial(library.m.impl, name, "BackendSelect", kernel, True)  # type: ignore[union-attr]


def _remove() -> None:
    # `reset` empties a library, as the interpreter's end does, and leaves it fit for use. One call of C, as above.
    resets = [library.m.reset for library in _libraries.values() if library.m is not None]
    deque(map(operator.call, (_whole.clear, *resets, _installed.clear)), maxlen=0)


_HARMLESS = ("opintercept.runs.writer", "tqdm._monitor")  # modules of threads that run no operator


def _quiet() -> bool:
    """Whether no kernel of ours can be running, nor start before it is gone.

    Any other Python thread might run an operator, and so might torch's pool for `torch.jit.fork`, which has no
    Python frames. The thread that writes a run never does, nor tqdm's monitor, which outlives every progress bar,
    nor execnet's reader of messages, which lives as long as a worker of pytest-xdist.
    """
    if _compiled is not None and _compiled.running():
        return False
    _let_threads_start()
    names = {thread.ident: type(thread).__module__ for thread in threading.enumerate()}
    here = threading.get_ident()
    frame: FrameType | None = None
    try:
        for thread, frame in sys._current_frames().items():  # noqa: B007 - walked below
            harmless = thread == here or names.get(thread) in _HARMLESS
            while frame is not None:
                if frame.f_code is _kernel_code:
                    return False
                if not harmless and frame.f_globals.get("__name__") != "execnet.gateway_base":
                    return False
                frame = frame.f_back
    finally:
        del frame  # our own is among them, and a frame that holds itself is garbage
    return not _has_forked_tasks()


def _thread_states() -> int:
    """How many threads Python knows of, those included that have yet to run their first line."""
    states, state = 0, _first_state(_interpreter())
    while state:
        states, state = states + 1, _next_state(state)
    return states


def _python_api(name: str, argument: Any) -> Any:
    function = getattr(ctypes.pythonapi, name)
    function.argtypes, function.restype = argument, ctypes.c_void_p
    return function


# Part of Python's stable interface for debuggers.
_interpreter = _python_api("PyInterpreterState_Get", [])
_first_state = _python_api("PyInterpreterState_ThreadHead", [ctypes.c_void_p])
_next_state = _python_api("PyThreadState_Next", [ctypes.c_void_p])
_without_frames = 0  # of threads that are no Python's, autograd's for a device


def _let_threads_start() -> None:
    """Give threads that have been started, and have no frame yet to be seen by, the time for their first line.

    A thread of C++ that once was in Python has none either, and keeps none: it is waited for once.
    """
    global _without_frames
    end = time.monotonic() + 0.25
    while (missing := _thread_states() - len(sys._current_frames())) > _without_frames:
        if time.monotonic() > end:
            _without_frames = missing
            return
        time.sleep(0.001)


def _has_forked_tasks() -> bool:
    """Whether torch's pool for `torch.jit.fork` is there; where this cannot be told, that is the caller's risk."""
    threads = native_threads()
    if threads - _threads_at_entry:
        time.sleep(0.005)  # a thread of the pool names itself, as its first act
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                if file.read().strip() == "PTThreadPool":
                    return True
        except OSError:  # that thread has just ended
            continue
    return False


def _let_forked_tasks_end() -> None:
    # A task of `torch.jit.fork` was lent its caller's scope, and gives it back, which takes the GIL, after its
    # future is done. A thread that asks for the GIL of an interpreter that is going down aborts the process.
    if (_kernels or _compiled is not None) and _has_forked_tasks():
        time.sleep(0.05)


atexit.register(_let_forked_tasks_end)


def _descend(keyset: Any) -> tuple[Any, bool]:
    """The key set below ours, and whether the call is of real tensors; remembered if so."""
    below = keyset & _BELOW
    real = not any(keyset.has(getattr(_key, name)) for name in _UNREAL if hasattr(_key, name))
    if real:
        _below[keyset.raw_repr()] = below
    return below, real


def redispatcher(name: str, overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """How to go on below with a key set and arguments: `OpOverload.redispatch` without its Python frame."""
    boxed = overload._handle.redispatch_boxed
    if name.partition(".")[0] in MATMUL:
        return boxed
    # `x + 1` passes the 1 as a tensor that torch hands to Python as a number and `redispatch_boxed` does not
    # take back; a call by dispatch key does. It promotes types as a number does, where a tensor of ours would not.
    tensors = [i for i, a in enumerate(overload._schema.arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]

    def redispatch(below: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            if any(i < len(args) and isinstance(args[i], (bool, int, float, complex)) for i in tensors):
                return overload._op_dk(below.highestPriorityTypeId(), *args, **kwargs)
            return boxed(below, *args, **kwargs)
        finally:
            del args, kwargs  # as in `run`

    return redispatch


def _make_kernel(name: str, overload: torch._ops.OpOverload) -> Callable[..., Any]:
    global _kernel_code
    redispatch = redispatcher(name, overload)
    below_of = _below.get
    has_scope, get_scope, stash = _has_scope, _get_scope, _stash
    carried, current = _scope.carried, _scope.current

    def kernel(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        below = below_of(keyset.raw_repr())
        if below is None:
            below, real = _descend(keyset)
            if not real:
                return redispatch(below, *args, **kwargs)
        scope = get_scope(KEY) if has_scope(KEY) else state.idle
        if scope.everywhere is not state.everywhere or scope.carried is not carried():
            scope = current()
        watch = scope.kernels.get(name, UNKNOWN)
        if watch is UNKNOWN:
            watch = scope.watch("kernel", name)
        if watch is None:
            if scope.owner is None:
                state.unseen += 1
            return redispatch(below, *args, **kwargs)
        hidden = watch.hidden
        if take is not None:
            take(hidden)
            take(scope)
        phase: Phase = "forward" if graph_task() == -1 else backward_phase()
        try:
            stash(KEY, hidden)  # in here: a signal's exception may come up right after it
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


@in_child
def _forget_parent() -> None:
    # The parent's blocks do not count in a forked child; its kernels stay, idle, until an exit here.
    global _lock
    _lock = threading.RLock()
    _users.clear()
