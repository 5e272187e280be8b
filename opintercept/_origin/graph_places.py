"""`GraphPlaces`, which tells where calls in code that torch.compile has made come from in the program.

Invariant: a place is kept only with all modules that decide it, and only for calls through the same ones. Nothing here
keeps a module alive.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

import torch

from opintercept._core.call_site import NOWHERE, CallSite
from opintercept._core.record import Phase
from opintercept._origin import compiled_graphs, sources
from opintercept._origin.names import Labels
from opintercept._origin.sources import Source
from opintercept._origin.stack import OUTER_CALL, Walked, frame_of, is_users, local_of, module_of

_Caller: TypeAlias = tuple[CodeType | None, int]
_Key: TypeAlias = tuple[int | str, ...]
_Named: TypeAlias = tuple[weakref.ref[torch.nn.Module], weakref.ref[torch.nn.Module], tuple[str, ...]]
Needs: TypeAlias = tuple[tuple[bool, str, torch.nn.Module], ...]
"""Whether a name is global, the name, and the module that the nearest frame with a module by this name has there."""


def _is_graph(module: object) -> bool:
    kind: Any = type(module)
    return _is_graph_type(kind)


@functools.lru_cache(maxsize=1024)
def _is_graph_type(kind: Any) -> bool:
    return any(each.__name__ == "GraphModule" for each in kind.__mro__)


def _is_dynamos(module: object) -> bool:
    return hasattr(module, "compile_subgraph_reason")  # Dynamo's own, which the program does not have


def _bases(trace: compiled_graphs.Trace, frame: FrameType) -> dict[Source, weakref.ref[torch.nn.Module]]:
    """Find modules in a frame from which a trace's module can be found; none if the frame is not of its function."""
    found = {}
    for source in (trace.source, trace.outermost):
        base = sources.find(source, frame) if source else None
        if base is not None and not _is_graph(base[1]):
            found[base[0]] = weakref.ref(base[1])
        elif source is trace.source:
            return {}
    return found if type(sources.at(trace.source, found)).__name__ == trace.kind else {}


def _around(made: FrameType) -> tuple[torch.nn.Module | None, torch.nn.Module | None, _Caller]:
    """Return the program's innermost and outermost module around generated code, and its line, or None and -1."""
    own = outermost = None
    caller: _Caller | None = None
    frame = made.f_back
    while frame is not None:
        if frame.f_code is OUTER_CALL and (outer := module_of(frame)) is not None and not _is_graph(outer):
            own, outermost = outer if own is None else own, outer
        if caller is None and is_users(frame.f_code):
            caller = (frame.f_code, frame.f_lasti) if own is not None else (None, -1)
        frame = frame.f_back
    return own, outermost, caller or (None, -1)


def _nearest(source: Source, made: FrameType) -> torch.nn.Module | None:
    """Return the module that the nearest frame around generated code has there, which has any."""
    frame = made.f_back
    while frame is not None:
        if sources.is_module(found := sources.value_of(source, frame)):
            return found  # type: ignore[no-any-return]
        frame = frame.f_back
    return None


class GraphPlaces:
    """Where calls in compiled graphs come from, with the modules' names for one interceptor."""

    def __init__(self, labels: Labels, walk: Callable[[], Walked]) -> None:
        self._labels = labels
        self._walk = walk
        self._known: dict[_Key, _KnownPlace] = {}
        self._sources: dict[_Key, tuple[Source, ...]] = {}  # where compiled functions have the modules that decide

    def find(self, phase: Phase, code: CodeType) -> tuple[CallSite, Needs | None, bool]:
        """Return the place of a call in code that torch.compile has made, what else decides it, and if it is kept."""
        made = frame_of(code)
        if made is None:
            return NOWHERE, None, False
        own, outermost, caller = _around(made)
        graph, decides = compiled_graphs.graph_of(made)
        key = (id(code), made.f_lasti, id(graph), phase, id(own))
        deciding = {source: _nearest(source, made) for source in self._sources.get(key, ())}
        known = self._known.get((*key, *map(id, deciding.values())))
        if known is None or not known.holds(own, outermost, caller, deciding) or not self._has_names(known.names):
            modules = None if own is None or outermost is None else (weakref.ref(own), weakref.ref(outermost))
            around = compiled_graphs.Around(graph, modules, {}, caller)
            place, roots = self._read(phase, made, around)
            bases = {source: base() for source, base in around.bases.items()}
            # Whoever calls a module has the same modules in it.
            deciding = {} if own is not None and all(base is own for base in bases.values()) else bases
            if roots is None or any(_nearest(source, made) is not module for source, module in deciding.items()):
                return place, None, False
            pairs = [(root, root) for root in roots] if own is None or outermost is None else [(outermost, own)]
            known = _KnownPlace(code, graph, around, tuple(self._named(*pair) for pair in pairs), place)
            self._sources[key] = tuple(deciding)
            self._keep((*key, *map(id, deciding.values())), known)
        needs = [
            (source[0].kind == "G", source[0].key, module) for source, module in deciding.items() if module is not None
        ]
        lasts = decides and all(len(source) == 1 and source[0].kind in ("L", "G") for source in deciding)
        named = own is None or outermost is None or self._labels.lasts(outermost, own)
        return known.place, tuple(needs) if lasts and named else None, True

    def _read(
        self, phase: Phase, made: FrameType, around: compiled_graphs.Around
    ) -> tuple[CallSite, set[torch.nn.Module] | None]:
        """Read the place of a call from its graph, and add the modules that the compiled function has to `around`.

        Also returns the outermost ones of those; None if the function has further modules, or if it is none.
        """
        graph, bases = around.graph, around.bases
        trace = compiled_graphs.forward(made, graph)
        computed = compiled_graphs.computed(made, graph)
        traces = dict.fromkeys((trace, *(part.trace for part in computed)))
        wanted = {its.source: its for its in traces if its.source}
        frame = made.f_back
        while frame is not None and wanted:
            for source, its in tuple(wanted.items()):
                if sources.at(source, bases) is None:
                    bases |= _bases(its, frame)
                if sources.at(source, bases) is not None:
                    del wanted[source]
            frame = frame.f_back
        own = _modules(around)[0]
        if (place := self._of_program(made, graph, own)) is not None:
            return place, None
        place = self._place(trace, computed, around, again=phase == "recompute")
        if wanted and (own is None or any(base() is not own for base in bases.values())):
            return place, None
        return place, {root for its in traces if (root := sources.at(its.outermost, bases)) is not None}

    def in_program(self, code: CodeType) -> CallSite | None:
        """Return the place of a call in a GraphModule that the program has made; None if torch.compile has made it.

        All calls with the same modules, code and instruction have it.
        """
        made = frame_of(code)
        return None if made is None else self._of_program(made, compiled_graphs.graph_of(made)[0], _around(made)[0])

    def _of_program(
        self, made: FrameType, graph: compiled_graphs.Graph | None, own: torch.nn.Module | None
    ) -> CallSite | None:
        module, root, _, _ = self._walk()
        runs = local_of(made, "self")
        if graph is not None or (own is not None and not _is_graph(runs)) or _is_dynamos(root) or _is_dynamos(runs):
            return None
        if module is None or root is None:
            return None
        trace = compiled_graphs.forward(made, graph)
        path = trace.path if runs is module and trace.source is None else ()  # not in a module that the graph calls
        return CallSite(self._labels.below(root, module, path), None, -1, trace.source_line)

    def _named(self, root: torch.nn.Module, module: torch.nn.Module) -> _Named:
        return weakref.ref(root), weakref.ref(module), self._labels.names(root, module)

    def _has_names(self, known: tuple[_Named, ...]) -> bool:
        return all(
            (root := its()) is not None and (module := of()) is not None and self._labels.names(root, module) == names
            for its, of, names in known
        )

    def _keep(self, key: _Key, known: _KnownPlace) -> None:
        if len(self._known) >= 10_000:
            self._known.clear()
            self._sources.clear()
        self._known[key] = known

    def _place(
        self,
        trace: compiled_graphs.Trace,
        computed: tuple[compiled_graphs.Computed, ...],
        there: compiled_graphs.Around,
        again: bool = False,
    ) -> CallSite:
        """The place of a call with this trace, or of a generated kernel that computes all of these nodes."""
        if not computed:
            return there.place(self._names_of(trace, there, again), trace)
        names = {its: self._names_of(its, there, again) for its in dict.fromkeys(each.trace for each in computed)}
        known = list(dict.fromkeys(filter(None, names.values())))
        aliases = known[0] if len(known) == 1 else (_common([each[0] for each in known]),) if known else ()
        if aliases == (None,):
            aliases = self._names_of(_ROOT, there, again)
        parts = tuple((each, names[each.trace][0] if names[each.trace] else None) for each in computed)
        return there.place(aliases, trace, parts)  # type: ignore[arg-type]

    def _names_of(
        self, trace: compiled_graphs.Trace, there: compiled_graphs.Around, again: bool = False
    ) -> tuple[str, ...]:
        if trace.source == () and there.modules is None:
            return ("",)
        around = [] if there.modules is None else [ref() for ref in there.modules]
        if trace.source == ():
            module = around[0]
        else:
            module = sources.at(trace.source, there.bases)
            if type(module).__name__ != trace.kind:
                return ()
        # What torch.compile has returned, the outermost one, may be gone. Without any, the function's own call counts.
        roots = reversed(around) if around else [sources.at(trace.outermost, there.bases)]
        root = next((root for root in roots if root is not None), None)
        if module is None or root is None:
            return ()
        return (self._labels.recomputed(module) if again else None) or self._labels.registered(root, module) or ()

    def find_backward(self, place: compiled_graphs.GraphCallSite) -> CallSite:
        """Return the place of a backward call whose forward call ran in compiled code."""
        code = self._walk()[2]
        frame = None if code is None or not compiled_graphs.is_generated(code) else frame_of(code)
        if frame is None:
            return place
        around = place.around
        key = (id(frame.f_code), frame.f_lasti, id(around))
        known = self._known.get(key)
        if known is not None and all(ref() is not None for ref in (*(around.modules or ()), *around.bases.values())):
            return known.place
        trace = compiled_graphs.backward(frame, around.graph)
        found = self._place(trace, compiled_graphs.computed(frame, around.graph), around)
        self._keep(key, _KnownPlace(frame.f_code, around.graph, around, (), found))
        return found


class _KnownPlace(NamedTuple):
    """The place of a call in a compiled graph, which is the same for all such calls with the same modules."""

    code: CodeType  # this and the next two keep their identities
    graph: Any
    around: compiled_graphs.Around
    names: tuple[_Named, ...]  # of the outermost modules, and of the innermost one around the compiled function
    place: CallSite

    def holds(
        self,
        own: torch.nn.Module | None,
        outermost: torch.nn.Module | None,
        caller: _Caller,
        deciding: dict[Source, torch.nn.Module | None],
    ) -> bool:
        """Whether the call comes through the same modules, from the same place in the program."""
        known, around = _modules(self.around), self.around
        if known[0] is not own or known[1] is not outermost or around.caller != caller:
            return False
        return all(around.bases[source]() is module is not None for source, module in deciding.items())


def _modules(around: compiled_graphs.Around) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
    return (None, None) if around.modules is None else (around.modules[0](), around.modules[1]())


_ROOT = compiled_graphs.UNKNOWN._replace(source=())


def _common(names: Sequence[str]) -> str | None:
    """The name of the innermost module around several; None if that is the model itself."""
    if "" in names:
        return ""  # one of them is outside of all modules
    paths = [name.split(".") for name in names]
    common = [first for first, *others in zip(*paths, strict=False) if all(other == first for other in others)]
    return ".".join(common) or None
