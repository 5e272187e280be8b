"""The compiled engine: the kernel engine with its kernels in C++, built when a process first asks for them.

Each source is named after the Python file of which it does the same: `kernels.cpp` has the kernel of
`kernels._make_kernel`, `stack.cpp` has `_origin.stack.walk`, `record.cpp` has `_core.record.signature_of`. `noted.cpp`
runs calls that become rows of `ring.cpp` and not Python objects, see `_core/noted.py`.
Invariant: nothing is built before somebody asks for this engine by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from opintercept._core import pipeline as _pipeline
from opintercept._core import record
from opintercept._core.call_site import NOWHERE
from opintercept._core.in_kernel import ROLES
from opintercept._core.noted import Ring, on_forget
from opintercept._engines import foreign, kernels, scope
from opintercept._engines.dynamo import keep_out
from opintercept._native import build, library, values
from opintercept._ops.table import OWN
from opintercept._origin import stack


class Extension:
    """The extension module of this process, set up with what it calls in Python.

    Attributes:
        running: See `KernelEngine.running`.
        ring: See `Engine.ring`.
        walk: As `stack.walk`.
        signature_of: As `_core.record.signature_of`.
    """

    def __init__(self, extension: Any) -> None:
        self._extension = extension
        # By the overload's name, with the overload; None for those that need a kernel in Python.
        self._prepared: dict[str, tuple[torch._ops.OpOverload, Any]] = {}
        # C++ calls these directly, without a frame of ours above them that keeps Dynamo out.
        called = (scope.Scope.watch, _pipeline.run, scope.current, stack.backward_phase, foreign.has_changed)
        functions = [keep_out(function) for function in called]
        extension.setup(scope.state, scope.CARRIED, scope.Scope, scope.Watch, kernels.SOURCE, *functions)
        scope.state.told = extension.watch
        scope.state.tell()
        for name in ("after_kernel", "flush", "forward_of", "lasting_call_site", "link", "number_of"):
            setattr(_pipeline.Pipeline, name, keep_out(getattr(_pipeline.Pipeline, name)))
        extension.set_up_notes(scope.state, scope.Scope, scope.Watch, keep_out(_rings_of), NOWHERE, keep_out)
        on_forget(extension.forget_notes)
        self.ring: Callable[[], Ring] = extension.Ring
        scope.state.unseen_by_compiled = extension.unseen
        self.running: Callable[[], int] = extension.running
        extension.set_up_signature(record.signature_of, torch.Tensor, torch.nn.Parameter)
        self.signature_of: Callable[..., Any] = extension.signature_of
        has_walk = extension.set_up_walk(*stack.WALKED_CODE, torch.nn.Module, stack.NOT_SOURCE)
        self.walk: Callable[[], stack.Walked] = extension.walk if has_walk else stack.walk

    def installation(self, name: str, overload: torch._ops.OpOverload) -> Callable[[], Any] | None:
        """A callable that installs a kernel in C++; None for an overload that needs a kernel in Python."""
        schema = overload._schema
        names = (schema.name, schema.overload_name)
        known, prepared = self._prepared.get(name, (None, None))
        if known is not overload:
            redispatch = _from_raw(kernels.redispatcher(name, overload))
            prepared = self._extension.prepare(*names, name, overload, redispatch, schema.name not in OWN)
            self._prepared[name] = overload, prepared
        return None if prepared is None else functools.partial(self._extension.install, *names, prepared)


def _rings_of(watch: scope.Watch, overload: torch._ops.OpOverload) -> tuple[Any, ...] | None:
    """The rings of the pipelines that see an operator, whether it is opaque, and the places of its operands.

    None if the hooks have to see each of its calls.

    An operator with inner steps to be seen is left to Python. So are those whose operands are codes, and those that
    write to their arguments, which hooks have to read before.
    """
    row = watch.row
    rings = tuple(pipeline.queue.ring for pipeline in watch.pipelines if pipeline.queue is not None)
    if len(rings) != len(watch.pipelines) or watch.inner is not watch.hidden or overload._schema.is_mutable:
        return None
    if row.kind != "leaf" or row.scales or row.dequantize:
        return None
    return rings, row.opaque, tuple(row.roles[role][0] if role in row.roles else -1 for role in ROLES[:4])


def _from_raw(redispatch: Callable[..., Any]) -> Callable[..., Any]:
    keyset = torch._C.DispatchKeySet.from_raw_repr

    def from_raw(raw: int, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return redispatch(keyset(raw), *args, **kwargs)
        finally:
            del args, kwargs  # as in `pipeline.run`

    return keep_out(from_raw)


class CompiledEngine(kernels.KernelEngine):
    """The kernel engine with its kernels, its walk of the stack and its signatures of calls in C++."""

    instead = build.INSTEAD

    def require(self) -> None:
        """Refuse a torch that lacks what the engine needs, and load the extension, building it first if necessary."""
        super().require()
        load()

    def installation(self, name: str, overload: torch._ops.OpOverload) -> Callable[[], Any]:
        """A kernel in C++, or one in Python for an overload that needs it."""
        return load().installation(name, overload) or super().installation(name, overload)

    def running(self) -> int:
        """How many kernels in C++ are on the stack of this thread."""
        return load().running()

    def ring(self) -> Ring | None:
        """A ring for an interceptor, whose kernels note the calls that its hooks need not see."""
        return load().ring()

    @property
    def walk(self) -> Callable[[], stack.Walked]:
        """The walk in C++, or in Python where C++ cannot read this Python's frames."""
        return load().walk

    @property
    def signature_of(self) -> Callable[..., Any]:
        """The same in C++."""
        return load().signature_of


ENGINE = CompiledEngine("compiled")


loaded: Extension | None = None


def load() -> Extension:
    """Load the compiled kernels. The first process on a machine builds them, which takes up to a minute.

    If another process is building them, this one waits, and logs that to `opintercept`.

    Raises:
        OpInterceptError: They cannot be built or loaded here.
    """
    global loaded
    if loaded is None:
        with library.lock:
            if loaded is None:
                module = library.need()
                values.adopt(module)
                loaded = Extension(module)
    return loaded


def is_there() -> bool:
    """Whether the engine can be had without a build, as `engine="auto"` asks. It is looked for once in a process."""
    if library.find().module is None:
        return False
    try:
        load()
    except Exception as error:  # a torch that lacks what the kernels are set up with
        library.reject(f"the compiled kernels cannot be set up: {error}")
        return False
    return True
