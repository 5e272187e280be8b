"""`Graft`: feeds recorded outputs of another run into this one, to tell where an error is added."""

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

from opintercept._call import OpCall
from opintercept._errors import OpInterceptError, OpInterceptWarning
from opintercept._tensors import describe
from opintercept.hooks._copyable import Copyable
from opintercept.hooks.when import CallFilter
from opintercept.runs._ranks import rank_and_world_size
from opintercept.runs.codec import StoredCall
from opintercept.runs.store import Run, open_run

_Key = tuple[str | None, str, str, str | None]


class Graft(Copyable):
    """Replaces the outputs of chosen calls by those that the same calls had in a recorded run.

    A call's counterpart is the one of the same module, operator and pass with the same number among those, so all
    calls must be seen: choose here, and not with `when`. Where the error of a run is gone after a graft, it was added
    there or before; where it is still there, behind. As with any replaced output, autograd differentiates the
    operator that ran, not what was put in its place.

    Args:
        run: A run that was recorded with `tensors="full"`, or its folder.
        op: As in `when`, and so are the others.
        module: The module's name, a glob, a pattern or a test.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        steps: The step, or a container of steps.
        predicate: Any test of the call.

    Attributes:
        grafted: How many calls got another output.
        missing: How many chosen calls have no counterpart in the run; the first of them warns.

    Raises:
        OpInterceptError: There is no run, or it has no outputs.
        TypeError: An argument of the wrong type.
        ValueError: An unknown phase.

    A call raises `OpInterceptError` if its counterpart's output has another shape. One of another dtype or on another
    device is converted.

    Example:
        >>> import tempfile, torch
        >>> from opintercept import hooks, intercept, runs
        >>> layer = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with intercept(runs.RunRecorder(f"{folder}/run", tensors="full")):
        ...         before = layer(torch.ones(1, 2))
        ...     _ = torch.nn.init.zeros_(layer.weight)
        ...     with intercept(runs.Graft(f"{folder}/run")):
        ...         after = layer(torch.ones(1, 2))
        >>> torch.equal(before, after)
        True
    """

    reads = ("module", "forward")

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
                f"a run must have all outputs to be grafted, got one with tensors={self.run.info.tensors!r} at "
                f'{str(self.run.path)!r}; record it with tensors="full"'
            )
        self._filter = CallFilter(op, module, phase, steps=steps, predicate=predicate)
        rank = rank_and_world_size()[0]
        self._rank = rank if rank in self.run.ranks else self.run.ranks[0]
        self._places: dict[_Key, array[int]] = defaultdict(partial(array, "q"))
        for place, call in self.run.located(self._rank):
            self._places[_key(call)].append(place)
        self._seen: dict[_Key, int] = defaultdict(int)
        self._lock = threading.RLock()
        self.grafted = 0
        self.missing = 0

    def post(self, call: OpCall) -> Any:
        """Put the recorded output in the place of the call's."""
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
            role = f"output.{place}" if place else "output"
            if isinstance(output, torch.Tensor) and (recorded := self._recorded(then, role, output, call)) is not None:
                outputs[place], changed = recorded, True
        if not changed:
            self._miss(call)
            return None
        with self._lock:
            self.grafted += 1
        return type(call.output)(outputs) if isinstance(call.output, (tuple, list)) else outputs[0]

    def _recorded(self, then: StoredCall, role: str, output: torch.Tensor, call: OpCall) -> torch.Tensor | None:
        recorded = self.run.tensor(then, role)
        if recorded is None:
            return None
        if recorded.shape != output.shape:
            raise OpInterceptError(
                f"a grafted output must have the shape of the call's, got {describe(recorded)} of call "
                f"{then.record.index} for {describe(output)} of {call.op} in {call.module!r}; choose calls that both "
                "runs made alike"
            )
        return recorded.to(output.device, output.dtype)

    def _miss(self, call: OpCall) -> None:
        with self._lock:
            self.missing += 1
            first = self.missing == 1
        if first:
            text = (
                f"{call.op} in {call.module!r} ({call.phase}) has no output in {str(self.run.path)!r}; it keeps its own"
            )
            warnings.warn(f"{text}, and so do others that `missing` counts", OpInterceptWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"Graft({str(self.run.path)!r}, grafted={self.grafted}, missing={self.missing})"


def _key(call: StoredCall) -> _Key:
    record = call.record
    return record.module, record.op, record.phase, record.grad_of
