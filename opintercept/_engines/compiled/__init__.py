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
from opintercept._core.call_site import NOWHERE, CallSite
from opintercept._core.in_kernel import ROLES
from opintercept._core.noted import Ring, on_forget
from opintercept._engines import foreign, inductor, kernels, scope
from opintercept._engines.dynamo import keep_out
from opintercept._engines.overloads import Overloads
from opintercept._native import build, library, values
from opintercept._native.layout import ALL_OUTPUTS
from opintercept._ops import slots
from opintercept._ops.families import makes_values
from opintercept._ops.scratch import OVERWRITES, SCRATCH, UPDATED, UPDATES, results_of, torchs_name
from opintercept._ops.table import exact
from opintercept._ops.table import overloads as overloads_of
from opintercept._origin import links, stack

# Methods of `Pipeline`.
_CALLED = (
    *("begin_backward", "begin_call", "deliver", "end_call", "flush", "forward_of", "lasting_call_site"),
    *("link", "link_in_function", "number_of"),
)


class Extension:
    """The extension module of this process, set up with what it calls in Python.

    Attributes:
        running: See `KernelEngine.running`.
        ring: See `Engine.ring`.
        walk: As `stack.walk`, which it is where C++ cannot read this Python's frames; then no calls are noted.
        signature_of: As `_core.record.signature_of`.
    """

    def __init__(self, extension: Any) -> None:
        self._extension = extension
        # By the overload's name, with the overload of another library, which may be loaded again.
        self._prepared: dict[str, tuple[torch._ops.OpOverload | None, Any]] = {}
        foreign.registrations = extension.registrations
        # C++ calls these directly, without a frame of ours above them that keeps Dynamo out.
        called = (scope.Scope.watch, _pipeline.run, scope.current, stack.backward_phase, foreign.has_changed)
        functions = [keep_out(function) for function in called]
        extension.setup(
            scope.state, scope.CARRIED, scope.Scope, scope.Watch, kernels.SOURCE, *functions, keep_out(_in_python)
        )
        scope.state.told = extension.watch
        scope.state.tell()
        for name in _CALLED:
            setattr(_pipeline.Pipeline, name, keep_out(getattr(_pipeline.Pipeline, name)))
        extension.set_up_launches(
            scope.state, scope.Scope, scope.Scope.watch, inductor.LEVEL, torch.Tensor, torch.nn.Parameter
        )
        inductor.launcher = extension.Launcher
        extension.set_up_notes(scope.state, scope.Scope, scope.Watch, keep_out(_rings_of), NOWHERE, keep_out)
        on_forget(extension.forget_notes)
        extension.set_up_links(
            links.Links, links.ThreadLinks, links.Link, links.is_of, links.factors_of, CallSite, NOWHERE
        )
        on_forget(extension.forget_links)
        self.ring: Callable[[], Ring] = extension.Ring
        scope.state.unseen_by_compiled = extension.unseen
        self.remember: Callable[[int, int], int] = extension.remember
        self.running: Callable[[], int] = extension.running
        extension.set_up_signature(record.signature_of, torch.Tensor, torch.nn.Parameter)
        self.signature_of: Callable[..., Any] = extension.signature_of
        has_walk = extension.set_up_walk(*stack.WALKED_CODE, torch.nn.Module, stack.NOT_SOURCE)
        self.walk: Callable[[], stack.Walked] = extension.walk if has_walk else stack.walk
        stack.script = extension.script
        links.threads = extension.threads

    def installation(self, name: str, overloads: Overloads) -> Callable[[], Any]:
        """A callable that installs a kernel in C++."""
        packet, _, overload_name = name.partition(".")
        overload = None if foreign.is_torchs(name) else overloads[name]
        known, prepared = self._prepared.get(name, (None, None))
        if prepared is None or known is not overload:
            prepared = self._extension.prepare(
                packet, overload_name, name, overload is not None, name in kernels.CONSTRUCTORS
            )
            self._prepared[name] = overload, prepared
        return functools.partial(self._extension.install, packet, overload_name, prepared)


def _in_python(name: str) -> tuple[torch._ops.OpOverload, Callable[..., Any]]:
    """An overload, and what runs it with arguments that a hook has replaced."""
    overload = next(iter(overloads_of(exact(name))))
    return overload, _from_raw(kernels.redispatcher(name, overload))


def _rings_of(watch: scope.Watch, overload: torch._ops.OpOverload) -> tuple[Any, ...] | None:
    """What kernels need to know to note the calls of an operator; None if the hooks have to see each of them.

    An operator with inner steps to be seen is left to Python. So are those whose operands are codes or come in lists,
    those of which a part of a cache is read, and those that write to an argument outputs whose size depends on values.

    Returns:
        The rings of the pipelines that see it; whether it is opaque; the places of its operands; those of other
        arguments with tensors that it reads, with their slots in a record, or -1 for the next free ones; the places of
        the arguments that it writes to, and of those among them that it reads; whether its outputs are views or
        uninitialised, which nobody reads; whether it has a row in the tables of products and convolutions; whether a
        block that sees it watches every operator; and how many tensors among its outputs are for the program.
    """
    row = watch.row
    rings = tuple(pipeline.queue.ring for pipeline in watch.pipelines if pipeline.queue is not None)
    if len(rings) != len(watch.pipelines) or watch.inner is not watch.hidden:
        return None
    if row.kind != "leaf" or row.scales or row.dequantize or row.pages is not None:
        return None
    schema = overload._schema
    short = torchs_name(row.name)
    written = tuple(
        i
        for i, a in enumerate(schema.arguments)
        if (a.alias_info is not None and a.alias_info.is_write) or (short in UPDATES and a.name in UPDATED)
    )
    if any(short in getattr(hook, "must_see", ()) for pipeline in watch.pipelines for hook in pipeline.hooks):
        return None
    if written and not _OF_UNKNOWN_SIZE.isdisjoint(overload.tags):
        return None
    if any("List" in str(schema.arguments[place].type) for place, _ in row.roles.values()):
        return None
    read = tuple(i for i in written if not schema.arguments[i].is_out and short not in OVERWRITES)
    if row.family == "other":
        for hook in (hook for pipeline in watch.pipelines for hook in pipeline.hooks if hasattr(hook, "sees_others")):
            hook.sees_others = True  # it is not shown calls with finite values
    places = tuple(row.roles[role][0] if role in row.roles else -1 for role in ROLES)
    others = tuple(
        (i, ROLES.index(a.name) if a.name in slots.OPERANDS and _is_one_tensor(a) else -1)
        for i, a in enumerate(schema.arguments)
        if "Tensor" in str(a.type)
        and not a.is_out
        and i not in places
        and (i in read or i not in written)
        and a.name not in SCRATCH
    )
    unread = not makes_values(overload)
    results = results_of(row.name, row.family)
    in_table, sees_writes = row.family != "other", any(pipeline.sees_writes for pipeline in watch.pipelines)
    return rings, row.opaque, places, others, written, read, unread, in_table, sees_writes, results or ALL_OUTPUTS


def _is_one_tensor(argument: torch._C.Argument) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


_OF_UNKNOWN_SIZE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


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
    left_out = frozenset()

    def require(self) -> None:
        """Refuse a torch that lacks what the engine needs, and load the extension, building it first if necessary."""
        super().require()
        load()

    def installation(self, name: str, overloads: Overloads) -> Callable[[], Any]:
        """A kernel in C++."""
        return load().installation(name, overloads)

    def awaited(self) -> Overloads:
        """What changes the scale of a loss, by which hooks judge what the backward pass has made."""
        return _awaited()

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


@functools.cache
def _awaited() -> Overloads:
    return {each.name(): each for each in overloads_of("aten::_amp_update_scale_")}


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
