"""`Patch`: replaces outputs by those of a recorded run, to find where an error is added."""

from __future__ import annotations

import os
import re
import threading
import warnings
from array import array
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

import torch

from opintercept._core.call import OpCall
from opintercept._core.errors import OpInterceptError, OpInterceptWarning
from opintercept._core.hook import reads_of
from opintercept._core.tensors import describe
from opintercept._kit.copyable import Copyable
from opintercept._kit.filter import CallFilter
from opintercept._ranks.rank import rank_and_world_size
from opintercept.runs.store.codec import StoredCall, role_of
from opintercept.runs.store.run import Run, open_run

_Key = tuple[str | None, str, str, str | None]


class Patch(Copyable):
    """Replaces the outputs of chosen calls by those that the same calls had in a recorded run.

    The counterpart of a call has the same module, operator and phase, and the same number among the calls that share
    these. `Patch` counts all calls for that: choose calls with its arguments and not with `when`. If a patch removes
    an error, the error was added by the chosen calls or before them; if the error stays, it was added after them. As
    with any replaced output, autograd differentiates the operator that ran, not the output that replaces it.

    A call raises `OpInterceptError` if its counterpart's output has another shape. An output of another dtype or on
    another device is converted.

    Args:
        run: A run that was recorded with `tensors="full"`, or its folder.
        op: As for `when`, as are the other arguments.
        module: The module's name, a glob, a pattern or a test.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        steps: The step, or a container of steps.
        predicate: Any test of the call.

    Attributes:
        patched: How many calls got a recorded output.
        missing: How many chosen calls have no counterpart in the run; the first of them warns.

    Raises:
        OpInterceptError: There is no run, or it has no outputs.
        TypeError: An argument has the wrong type.
        ValueError: An unknown phase.

    Example:
        >>> import tempfile, torch
        >>> from opintercept import hooks, intercept, runs
        >>> layer = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with intercept(runs.RunRecorder(f"{folder}/run", tensors="full")):
        ...         before = layer(torch.ones(1, 2))
        ...     _ = torch.nn.init.zeros_(layer.weight)
        ...     with intercept(runs.Patch(f"{folder}/run")):
        ...         after = layer(torch.ones(1, 2))
        >>> torch.equal(before, after)
        True
    """

    def __init__(
        self,
        run: Run | str | os.PathLike[str],
        *,
        op: str | Iterable[str] | None = None,
        module: str | re.Pattern[str] | Callable[[str], bool] | None = None,
        phase: str | None = None,
        steps: int | Container[int] | None = None,
        predicate: Callable[[OpCall], bool] | None = None,
    ) -> None:
        self.run = run if isinstance(run, Run) else open_run(run)
        if self.run.info.tensors != "full":
            raise OpInterceptError(
                f"{str(self.run.path)!r} was recorded with tensors={self.run.info.tensors!r}, without whole outputs; "
                'record it with tensors="full"'
            )
        self._filter = CallFilter(op, module, phase, steps=steps, predicate=predicate)
        self.reads = reads_of((self._filter,), ("module", "forward"))
        rank = rank_and_world_size()[0]
        self._rank = rank if rank in self.run.ranks else self.run.ranks[0]
        self._places: dict[_Key, array[int]] = defaultdict(partial(array, "q"))
        for place, call in self.run.located(self._rank):
            self._places[_key(call)].append(place)
        self._seen: dict[_Key, int] = defaultdict(int)
        self._lock = threading.RLock()
        self.patched = 0
        self.missing = 0

    def post(self, call: OpCall) -> Any:
        """Return the recorded output of the call."""
        key = (call.module, call.op, call.phase, call.grad_of)
        with self._lock:
            number = self._seen[key]
            self._seen[key] += 1
        if not self._filter.admits(call):
            return None
        places = self._places.get(key, ())
        if number >= len(places):
            self._miss(call)
            return None
        then = self.run.at(self._rank, places[number])
        outputs = list(call.output) if isinstance(call.output, (tuple, list)) else [call.output]
        changed = False
        for place, output in enumerate(outputs):
            role = role_of(place)
            if isinstance(output, torch.Tensor) and (recorded := self._recorded(then, role, output, call)) is not None:
                outputs[place], changed = recorded, True
        if not changed:
            self._miss(call)
            return None
        with self._lock:
            self.patched += 1
        return type(call.output)(outputs) if isinstance(call.output, (tuple, list)) else outputs[0]

    def _recorded(self, then: StoredCall, role: str, output: torch.Tensor, call: OpCall) -> torch.Tensor | None:
        recorded = self.run.tensor(then, role)
        if recorded is None:
            return None
        if recorded.shape != output.shape:
            raise OpInterceptError(
                f"a patched output must have the shape of the output that it replaces, got {describe(recorded)} of "
                f"call {then.record.index} for {describe(output)} of {call.op} in {call.module!r}; choose calls that "
                "are the same in both runs"
            )
        return recorded.to(output.device, output.dtype)

    def _miss(self, call: OpCall) -> None:
        with self._lock:
            self.missing += 1
            first = self.missing == 1
        if first:
            warnings.warn(
                f"{str(self.run.path)!r} has no output for {call.op} in {call.module!r} ({call.phase}), which keeps "
                "its own; `missing` counts such calls",
                OpInterceptWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"Patch({str(self.run.path)!r}, patched={self.patched}, missing={self.missing})"


def _key(call: StoredCall) -> _Key:
    record = call.record
    return record.module, record.op, record.phase, record.grad_of
