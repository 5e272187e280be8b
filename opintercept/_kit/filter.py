"""`CallFilter`: which calls pass the filters by operator, module, phase, dtype, size, number and step."""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
import threading
from collections.abc import Callable, Container, Iterable
from typing import Any, TypeGuard, get_args

import torch

from opintercept._core.call import OpCall
from opintercept._core.checks import check_choice, check_count, renamed
from opintercept._core.hook import Read, reads_of
from opintercept._core.record import CallRecord, Phase
from opintercept._core.tensors import TensorMeta, dtype_name, dtype_of
from opintercept._core.text import short_name
from opintercept._kit.copyable import Copyable

MOST_NAMES = 1024
"""How many module names a filter keeps, to suggest one if its own pattern matches none."""
_MOST_GLANCES = 10_000  # how many calls that other filters leave out are asked for their module


class CallFilter(Copyable):
    """The filters of `when`, which take the same arguments. They work for calls and for records of calls."""

    @renamed(every="every_calls")
    def __init__(
        self,
        op: str | Iterable[str] | None = None,
        module: str | re.Pattern[str] | Callable[[str], bool] | None = None,
        phase: str | None = None,
        dtype: Any = None,
        min_numel: int | None = None,
        every_calls: int | None = None,
        first: int | None = None,
        steps: int | Container[int] | None = None,
        predicate: Callable[[Any], bool] | None = None,
    ) -> None:
        if predicate is not None and not callable(predicate):
            raise TypeError(f"predicate must be callable, got {predicate!r}")
        if phase is not None:
            check_choice("phase", phase, get_args(Phase))
        for name, value in (("every_calls", every_calls), ("first", first), ("min_numel", min_numel)):
            if value is not None:
                check_count(name, value)
        if isinstance(steps, str) or not (steps is None or isinstance(steps, int) or hasattr(steps, "__contains__")):
            raise TypeError(f"steps must be a number or a container of numbers, such as range(100, 200), got {steps!r}")
        names: tuple[Read, ...] = () if module is None else ("module",)
        if (reads := reads_of(() if predicate is None else (predicate,), names)) is not None:
            self.reads = reads
        self._ops = None if op is None else _op_names(op)
        self._module = None if module is None else name_test(module)
        self._pattern = module if _should_match(module) else None
        self._missed: set[str] | None = None  # names that did not match; None after a match, or if nothing watches
        self._glances = 0
        self._phase = phase
        self._dtype = None if dtype is None else checked_dtype(dtype)
        self._min_numel = min_numel
        self._every_calls = every_calls
        self._first = first
        self._steps = steps
        self._predicate = predicate
        self._passed = 0
        self._admitted = 0
        self._lock = threading.RLock()

    def admits(self, call: OpCall | CallRecord) -> bool:
        """Whether the call passes. Counts it for `every_calls` and `first`, so ask only once for each call."""
        return self._passes(call) and self._counted()

    def _passes(self, call: OpCall | CallRecord) -> bool:
        if not (
            (self._phase is None or call.phase == self._phase)
            and (self._ops is None or not self._ops.isdisjoint(_names(call)))
            and (self._steps is None or self._in_steps(call.step))
            and (self._dtype is None or any(_dtype(t) == self._dtype for t in _operands(call)))
            and (self._min_numel is None or any(_numel(t) >= self._min_numel for t in _operands(call)))
        ):
            if self._missed is not None and self._glances < _MOST_GLANCES:
                self._glances += 1
                self._matches(_modules(call))
            return False
        return (self._module is None or self._in_module(_modules(call))) and (
            self._predicate is None or bool(self._predicate(call))
        )

    def _in_module(self, names: tuple[str, ...]) -> bool:
        if self._matches(names):
            return True
        missed = self._missed
        if missed is not None and len(missed) < MOST_NAMES:
            missed.update(names)
        return False

    def _matches(self, names: tuple[str, ...]) -> bool:
        for name in names:
            if self._module(name):  # type: ignore[misc]
                self._missed = None
                return True
        return False

    def watch_names(self) -> bool:
        """Keep names that do not match, so that `unmatched` can warn; return whether that makes sense here."""
        if self._pattern is not None:
            self._missed = set()
        return self._pattern is not None

    def unmatched(self) -> str | None:
        """The text of a warning, once, if some calls were asked for their module and no name matched."""
        missed = self._missed
        if not missed or self._pattern is None:
            return None
        self._missed = None
        return (
            f"no call so far comes from a module that matches module={self._pattern!r}; "
            f"{_suggestion(self._pattern, sorted(missed))}"
        )

    def _in_steps(self, step: int) -> bool:
        return step == self._steps if isinstance(self._steps, int) else step in self._steps  # type: ignore[operator]

    def _counted(self) -> bool:
        with self._lock:
            turn = self._every_calls is None or self._passed % self._every_calls == 0
            self._passed += 1
            if not turn or (self._first is not None and self._admitted >= self._first):
                return False
            self._admitted += 1
            return True


def checked_dtype(dtype: Any) -> str:
    """The name of a dtype, given as such or by its name."""
    name = dtype_name(dtype)
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or its name, such as 'bfloat16', got {dtype!r}")
    return name


def name_test(module: Any) -> Callable[[str], Any]:
    """The predicate of module names that a glob, a compiled pattern or a predicate stands for."""
    if isinstance(module, str):
        return re.compile(fnmatch.translate(module)).fullmatch
    if isinstance(module, re.Pattern):
        return module.fullmatch
    if callable(module):
        return module  # type: ignore[no-any-return]
    raise TypeError(f"module must be a glob, a compiled pattern or a predicate of the name, got {module!r}")


def _should_match(module: Any) -> TypeGuard[str | re.Pattern[str]]:
    """Whether matching nothing is a mistake: not for a predicate, a pattern that excludes names, or `""`."""
    if isinstance(module, re.Pattern):
        return isinstance(module.pattern, str) and "(?!" not in module.pattern and "(?<!" not in module.pattern
    return isinstance(module, str) and module != "" and "[!" not in module


def _suggestion(module: str | re.Pattern[str], names: list[str]) -> str:
    """Suggest what to write instead of a module that matches none of `names`."""
    if isinstance(module, re.Pattern):
        if (name := next(filter(module.search, names), None)) is not None:
            return f"it must match the whole of {name!r}"
        module = module.pattern
    else:
        # The module of a call is the innermost one, and its name starts below the outermost one that ran.
        for wider in (f"{module}.*", f"*.{module}", f"*.{module}.*"):
            if any(map(name_test(wider), names)):
                return f"did you mean {wider!r}"
    if close := difflib.get_close_matches(module, names, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(map(repr, close))}"
    shown = [repr(name) if name else "'' (outside all modules)" for name in names[:3]]
    return f"calls come from {', '.join(shown)}{', ...' if len(names) > 3 else ''}"


def _op_names(op: Any) -> frozenset[str]:
    names = [op] if isinstance(op, str) else list(op) if isinstance(op, Iterable) else []
    if not names or isinstance(op, torch._ops.OpOverloadPacket) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"op must be one or more names of operators, such as 'mm' or 'aten::mm', got {op!r}")
    return frozenset(names)


def _names(call: OpCall | CallRecord) -> tuple[str, ...]:
    """The full name of an operator and its short name. A generated kernel has those of its operators, too."""
    names = (call.op, *(call.ops or ()))
    return (*names, *map(short_name, names))


def _operands(call: OpCall | CallRecord) -> list[Any]:
    both = (call.lhs, call.rhs) if isinstance(call, CallRecord) else (call.operand("lhs"), call.operand("rhs"))
    return [t for t in both if t is not None]


def _dtype(operand: Any) -> str:
    return operand.dtype if isinstance(operand, TensorMeta) else dtype_of(operand)


def _numel(operand: Any) -> int:
    return math.prod(operand.shape) if isinstance(operand, TensorMeta) else int(operand.numel())


def _modules(call: OpCall | CallRecord) -> tuple[str, ...]:
    """All names of the module; a record has only the first."""
    if isinstance(call, CallRecord):
        return () if call.module is None else (call.module,)
    return call.aliases
