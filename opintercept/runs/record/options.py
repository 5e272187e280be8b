"""`CallOptions`: the arguments of calls that are not tensors, as JSON.

Invariant: they are found once for all calls that look alike, and are within the limits of the reader.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from typing import Any

import torch

from opintercept._core.call import OpCall
from opintercept._core.record import Summary
from opintercept.runs.store.untrusted import MAX_TEXT

_MOST_SUMMARIES = 4096  # whose options are remembered
_MOST_VALUES = 256  # options of one operator; further ones name no fractions, which an optimizer changes in each step
_MOST_OPTIONS = 100  # of one call
_MOST_ITEMS, _DEPTH = 1000, 3  # of an option that is a list


class CallOptions:
    """The options of the calls of one recorder."""

    def __init__(self) -> None:
        # Summaries are kept alive, so that no other gets the address of one.
        self._known: dict[int, tuple[Summary, str]] = {}
        self._values: defaultdict[str, set[str]] = defaultdict(set)  # the options of each operator

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._known)

    def known(self, summary: Summary) -> str | None:
        """Those of calls that look like one that was learned."""
        known = self._known.get(id(summary))
        return None if known is None else known[1]

    def learn(self, call: OpCall, summary: Summary) -> str:
        """Those of a call, for all that look like it."""
        if len(self._known) >= _MOST_SUMMARIES:
            self._known.clear()
        options, values = options_of(call), self._values[summary.func]
        if len(values) >= _MOST_VALUES and options not in values:
            options = _as_json(json.loads(options, parse_float=lambda _: "varies"))
        if len(values) < _MOST_VALUES:
            values.add(options)
        self._known[id(summary)] = (summary, options)
        return options


def options_of(call: OpCall) -> str:
    """The arguments of a call that are not tensors and have a plain form."""
    found = {}
    for name, value in list(call.options.items())[:_MOST_OPTIONS]:
        with contextlib.suppress(TypeError):
            found[name] = _plain(value)
    return _as_json(found)


def _as_json(options: dict[str, Any]) -> str:
    return json.dumps(options, separators=(",", ":"), allow_nan=False)


def _plain(value: Any, depth: int = 0) -> Any:
    """An option as plain data; TypeError if it has no plain form, or its plain form is long."""
    if value is None or isinstance(value, bool) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS and depth < _DEPTH:
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, (str, complex, torch.dtype, torch.device, torch.layout)):
        return str(value)[:MAX_TEXT]
    raise TypeError(f"an option must be plain data, got a {type(value).__name__}")  # a storage shows all its bytes
