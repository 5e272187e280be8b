"""CUDA graphs: the calls that a graph captures in a block are seen again whenever it is replayed in one.

Invariant: nothing becomes part of a graph unless a block with `graphs=True` sees it captured.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from opintercept._core.call import OpCall
from opintercept._core.errors import OpInterceptWarning, caller_level
from opintercept._core.hook import Handle
from opintercept._core.pipeline import CapturedCall, Pipeline, kept_of
from opintercept._engines import scope as _scope
from opintercept._engines.blind_spots import tell
from opintercept._engines.dynamo import keep_out
from opintercept._engines.patches import Place
from opintercept._values.late import GraphResults, captures
from opintercept._values.read import is_captured, without_graph
from opintercept._values.sums import prepare


class _CapturedGraph:
    """A graph that is being captured, or has been: its calls by pipeline, and the results of readers in it."""

    def __init__(self) -> None:
        self.results: GraphResults | None = None
        self.calls: weakref.WeakKeyDictionary[Pipeline, list[CapturedCall]] = weakref.WeakKeyDictionary()
        self._handles: list[Handle] = []

    def begin(self) -> None:
        """Get ready, as little can be done while a graph is captured."""
        pipelines = [watcher.pipeline for watcher in _scope.current().active()]
        if not pipelines:
            return
        if any(pipeline.graphs for pipeline in pipelines):
            try:
                with _scope.unwatched():
                    results = without_graph(GraphResults, torch.accelerator.current_accelerator())
                    without_graph(prepare, results.place)
                self.results = results
            except torch.OutOfMemoryError:
                _tell_of_no_memory()
        captures.append(self.results)
        for pipeline in pipelines:
            calls = self.calls.setdefault(pipeline, [])
            self._handles.append(pipeline.register(_Noter(calls, self.leave)))

    def end(self) -> None:
        """Let the graph write down what it finds."""
        if self.results is not None and self._handles:
            try:
                with _scope.unwatched():
                    without_graph(self.results.end)
            except torch.OutOfMemoryError:
                self.leave()
                self.results = None
                _tell_of_no_memory()

    def leave(self) -> None:
        """See no more calls. Can be repeated."""
        handles, self._handles = self._handles, []
        if handles:
            captures.remove(self.results)
        for handle in handles:
            handle.remove()

    def replayed(self) -> None:
        """Tell the hooks of the blocks that are open."""
        results = None
        for watcher in _scope.current().active():
            calls = self.calls.get(watcher.pipeline)
            if calls is None:
                tell("cuda::graph_replay", (watcher,))
                continue
            with _scope.unwatched():  # nor is what hooks run
                if results is None and self.results is not None:
                    results = without_graph(self.results.results)
                watcher.pipeline.replay(calls, results)


def _tell_of_no_memory() -> None:
    text = "the device has no memory for what hooks read in a CUDA graph: its calls have no values"
    warnings.warn(text, OpInterceptWarning, stacklevel=caller_level())


class _Noter:
    """Runs after the other hooks, and notes what they keep of a captured call."""

    reads = ("record",)

    def __init__(self, calls: list[CapturedCall], leave: Callable[[], None]) -> None:
        self._calls = calls
        self.exit = leave  # if the block ends before the capture does

    def post(self, call: OpCall) -> None:
        if is_captured((call.args, call.kwargs, call.output)):
            self._calls.append((call.note(), kept_of(call)))


_captures: weakref.WeakKeyDictionary[Any, _CapturedGraph] = weakref.WeakKeyDictionary()  # by graph


def _begin(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        capture = _CapturedGraph()
        capture.begin()
        try:
            begun = original(graph, *args, **kwargs)
        except BaseException:
            capture.leave()
            raise
        _captures[graph] = capture
        return begun

    return keep_out(capture_begin)


def _end(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_end(graph: Any) -> Any:
        capture = _captures.get(graph)
        if capture is None:
            return original(graph)
        try:
            capture.end()
            return original(graph)
        finally:
            capture.leave()

    return keep_out(capture_end)


def _replay(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replay(graph: Any) -> Any:
        result = original(graph)
        _captures.get(graph, _UNSEEN).replayed()
        return result

    return keep_out(replay)


_UNSEEN = _CapturedGraph()
# torch.cuda.CUDAGraph calls these of its base. Private; a build for the CPU lacks them, and has no graphs.
_WRAPPERS = {"capture_begin": _begin, "capture_end": _end, "replay": _replay}


def methods() -> list[Place]:
    """The methods of a graph that are wrapped."""
    return _methods_of(getattr(torch._C, "_CUDAGraph", None))


@functools.cache
def _methods_of(owner: Any) -> list[Place]:
    wrappers = _WRAPPERS if isinstance(owner, type) else {}
    return [(f"CUDAGraph.{name}", owner, name, wrap) for name, wrap in wrappers.items()]
