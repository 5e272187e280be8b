"""`OpCalls`: the calls of a test, and the expectations that a test may have of them.

Invariant: recording calls does not change the program, and waits for a device only when a test asks about values.
Imports torch, so `testing.plugin` imports this file only when it watches a test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, TypedDict, Unpack, overload

import pytest

from opintercept import hooks
from opintercept._blocks.intercept import Interceptor, intercept
from opintercept._core.call import OpCall
from opintercept._core.checks import check_count
from opintercept._core.hook import Hook, Level
from opintercept._core.record import CallRecord
from opintercept._core.tensors import TensorMeta
from opintercept._core.text import aligned
from opintercept._engines.choose import EngineChoice
from opintercept._kit.filter import CallFilter, checked_dtype
from opintercept._ops.select import split, why_never
from opintercept._values.read import all_finite, first_output
from opintercept.testing.snapshot import Snapshots

_MOST_CALLS = 10  # listed one by one in a failure
_MOST_ROWS = 40  # in the table of a failure


class Options(TypedDict, total=False):
    """The options of the marker and of a block: `finite` adds the hook `NonFinite`, the rest is as in `intercept`."""

    level: Level
    ops: Any
    engine: EngineChoice
    finite: bool
    hooks: Hook | Iterable[Hook]


class Filters(TypedDict, total=False):
    """The filters of `hooks.when`."""

    op: str | Iterable[str]
    module: str | re.Pattern[str] | Callable[[str], bool]
    phase: str
    dtype: Any
    min_numel: int
    every_calls: int
    first: int
    steps: int | Container[int]
    predicate: Callable[[CallRecord], bool]


class OpCalls:
    """A growing sequence: the records of the calls so far, in the order in which the calls ended.

    Example:
        >>> import torch
        >>> from opintercept.testing.plugin import OpCalls
        >>> def test_a_matmul_and_its_gradient(op_calls):
        ...     x = torch.ones(2, 3, requires_grad=True)
        ...     (x @ torch.ones(3, 4)).sum().backward()
        ...     op_calls.expect(op="mm", count=2, finite=True)

        >>> with OpCalls([]).block() as op_calls:
        ...     test_a_matmul_and_its_gradient(op_calls)
        >>> op_calls.count, op_calls.flops, op_calls.dtypes, op_calls.modules
        (2, 96, {'float32'}, [''])
        >>> [str(call) for call in op_calls.filter(phase="backward")]
        ['aten::mm float32[2, 4] @ float32[4, 3] -> float32[2, 3]']
    """

    def __init__(
        self,
        records: list[CallRecord] | hooks.Recorder,
        finite: dict[int, Any] | None = None,
        options: Options | None = None,
        snapshots: Callable[[], Snapshots] | None = None,
        refuse: Callable[[str], str | None] | None = None,
    ) -> None:
        self._source = records
        self._finite = {} if finite is None else finite
        self._options: Options = {} if options is None else options
        self._snapshots = snapshots
        self._ran = self  # of filtered calls, those that they were chosen from
        self._refuse = refuse  # returns why these calls cannot include an operator, or None
        self._shown_in: BaseException | None = None  # the failure that already lists what ran

    @property
    def _records(self) -> list[CallRecord]:
        # Not kept: a recorder makes its records when they are read.
        return self._source.records if isinstance(self._source, hooks.Recorder) else self._source

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[CallRecord]:
        return iter(self._records)

    @overload
    def __getitem__(self, index: int) -> CallRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[CallRecord]: ...
    def __getitem__(self, index: int | slice) -> CallRecord | list[CallRecord]:
        return self._records[index]

    def __repr__(self) -> str:
        return f"<OpCalls: {_amount(self._records)}>"

    @property
    def count(self) -> int:
        """The number of calls."""
        return len(self._records)

    @property
    def flops(self) -> int:
        """The FLOP of all calls; operators without a formula count as 0."""
        return sum(record.flops or 0 for record in self._records)

    @property
    def dtypes(self) -> set[str]:
        """The dtypes of the operands, such as `{"float32"}`."""
        return {t.dtype for record in self._records for t in _operands(record)}

    @property
    def modules(self) -> list[str | None]:
        """The distinct modules in the order of their first calls; see `OpCall.module`."""
        return list(dict.fromkeys(record.module for record in self._records))

    def filter(self, **filters: Unpack[Filters]) -> OpCalls:
        """Return the calls so far that pass every filter.

        Args:
            **filters: As in `hooks.when`: `op`, `module`, `phase`, `dtype`, `min_numel`, `every_calls`, `first`,
                `steps` and `predicate`, which gets the record. A module that has several names is known by its first.

        Raises:
            TypeError, ValueError: As in `hooks.when`, or the calls cannot include an operator of that name.
        """
        if "op" in filters:
            filters["op"] = _read_twice(filters["op"])
        found = copy(self)
        found._source = self._chosen(filters)
        return found

    def clear(self) -> None:
        """Forget the calls so far."""
        self._records.clear()
        if self._ran is self:
            self._finite.clear()

    def table(self) -> str:
        """Return the calls as a table. Calls that are alike in every column share a row."""
        return _table(self._records)

    @contextmanager
    def block(self, **options: Unpack[Options]) -> Generator[OpCalls]:
        """Record the calls of a `with` block on their own.

        Args:
            **options: `level`, `ops`, `engine`, `finite` and `hooks`. The marker of the test sets those not given.
        """
        interceptor, calls = recording(self._options | options, self._snapshots)
        with interceptor:
            yield calls

    def expect(
        self,
        *,
        op: str | Iterable[str] | None = None,
        module: str | re.Pattern[str] | Callable[[str], bool] | None = None,
        phase: str | None = None,
        count: int | None = None,
        max_count: int | None = None,
        dtype: Any = None,
        finite: bool = False,
        max_flops: int | None = None,
        shapes: Any = None,
        predicate: Callable[[CallRecord], bool] | None = None,
    ) -> None:
        """Fail the test unless the calls are as expected.

        `op`, `module` and `phase`, as in `hooks.when`, select the calls that the other arguments describe. At least
        one call must be selected, unless `count`, `max_count` or `max_flops` is given.

        Args:
            op: Select these operators: `"bmm"`, `"aten::bmm"` or several.
            module: Select these modules: a glob, for example.
            phase: Select `"forward"`, `"backward"` or `"recompute"` calls.
            count: The exact number of calls.
            max_count: The largest number of calls.
            dtype: The dtype of both operands of every call.
            finite: Whether every output must be free of NaN and infinities. Checking this waits for the device.
            max_flops: The most FLOP of all selected calls together.
            shapes: The shapes of the left and the right operand: one pair for every call, `((2, 8), (8, 16))`, or
                a list with a pair for each call. None matches any size.
            predicate: A function that must return true for the record of every call.

        Raises:
            pytest.fail.Exception: They are not as expected. The message lists the offending calls and what ran.
            TypeError, ValueError: The expectation makes no sense; for example, the calls cannot include `op`.
        """
        __tracebackhide__ = True
        for name, value in (("count", count), ("max_count", max_count), ("max_flops", max_flops)):
            if value is not None:
                check_count(name, value, least=0)
        if predicate is not None and not callable(predicate):
            raise TypeError(f"predicate must be callable, got {predicate!r}")
        wanted_dtype = None if dtype is None else checked_dtype(dtype)
        wanted_shapes = None if shapes is None else _checked_shapes(shapes)
        op = _read_twice(op)
        chosen = self._chosen({"op": op, "module": module, "phase": phase})
        narrowed = chosen if len(chosen) < len(self._records) else []  # otherwise the table lists them
        ops = "matmul" if op is None else op if isinstance(op, str) else " or ".join(op)
        kind = ops if phase is None else f"{phase} {ops}"
        where = "" if module is None else f" in {getattr(module, 'pattern', module)}"
        broken: list[str] = []

        def calls(number: int) -> str:
            return f"{number} {kind} call{'' if number == 1 else 's'}{where}"

        def breaks(claim: str, wrong: Sequence[CallRecord], more: Sequence[str] = ()) -> None:
            broken.extend([f"expected {claim}", *_listed(wrong, more)])

        def every(claim: str, wrong: Sequence[CallRecord]) -> None:
            if wrong:
                do = "does" if len(wrong) == 1 else "do"
                breaks(f"every {kind} call{where} to {claim}, but {len(wrong)} of {len(chosen)} {do} not:", wrong)

        if count is not None and len(chosen) != count:
            breaks(f"{calls(count)}, got {len(chosen)}", narrowed)
        if max_count is not None and len(chosen) > max_count:
            breaks(f"at most {calls(max_count)}, got {len(chosen)}", narrowed)
        if not chosen and count is max_count is max_flops is None:
            breaks(f"at least {calls(1)}, got 0", [])
        if wanted_dtype is not None:
            wrong = [r for r in chosen if {t.dtype for t in _operands(r)} - {wanted_dtype}]
            every(f"have {wanted_dtype} operands", wrong)
        if finite:
            every("have a finite output", [r for r in chosen if _is_infinite(self._finite.get(r.index))])
        if max_flops is not None:
            every("have a known number of FLOP", [r for r in chosen if r.flops is None])
            flops = sum(r.flops or 0 for r in chosen)
            if flops > max_flops:
                claim = f"at most {max_flops:,} FLOP in {calls(len(chosen))}, got {flops:,}, the largest first:"
                breaks(claim, sorted(chosen, key=lambda r: r.flops or 0, reverse=True))
        if isinstance(wanted_shapes, tuple):
            every(f"multiply {_shown(wanted_shapes)}", [r for r in chosen if not _fits(r, wanted_shapes)])
        elif wanted_shapes is not None and len(wanted_shapes) != len(chosen):
            breaks(f"{calls(len(wanted_shapes))}, one for each pair of shapes, got {len(chosen)}", narrowed)
        elif wanted_shapes is not None:
            others = [(r, _shown(pair)) for r, pair in zip(chosen, wanted_shapes, strict=True) if not _fits(r, pair)]
            if others:
                claim = f"other shapes in {len(others)} of {calls(len(chosen))}:"
                breaks(claim, [r for r, _ in others], [f", expected {pair}" for _, pair in others])
        if predicate is not None:
            name = getattr(predicate, "__name__", repr(predicate))
            every(f"satisfy {name}", [r for r in chosen if not predicate(r)])
        if broken:
            self._ran._shown_in = pytest.fail.Exception("\n".join([*broken, self._what_ran()]))
            raise self._ran._shown_in

    def match_snapshot(self, name: str | None = None) -> None:
        """Fail the test unless module, operator, shapes, dtypes and phase of every call match the snapshot.

        The snapshot is a JSON file in the folder `__opcalls__` beside the test; `pytest --opintercept-update` writes
        it. It holds on every machine and device where torch runs the same operators. Attention kernels count as one
        operator, but what a device fuses, such as an LSTM on some, is another operator.

        Args:
            name: Tells several snapshots of one test apart. Without names they are numbered.

        Raises:
            pytest.fail.Exception: A call differs, which a unified diff shows; or the file is missing or corrupt.
        """
        __tracebackhide__ = True
        if self._snapshots is None:
            raise TypeError("match_snapshot needs the calls of a fixture; these calls belong to none")
        mismatch = self._snapshots().mismatch(self._records, name)
        if mismatch is not None:
            pytest.fail(mismatch)

    def report(self, failure: BaseException | None) -> str | None:
        """Return what ran, for the report of a failing test; None if the failure lists it already."""
        return None if failure is not None and failure is self._ran._shown_in else self._what_ran()

    def _chosen(self, filters: Mapping[str, Any]) -> list[CallRecord]:
        """The calls that pass. Operators that could never match, which `count=0` would silently accept, are refused."""
        wanted, op = CallFilter(**filters), filters.get("op")
        if self._refuse is not None and op is not None:
            for name in [op] if isinstance(op, str) else op:
                if (why := self._refuse(name)) is not None:
                    raise ValueError(f"no call can have op={name!r}: {why}")
        return [record for record in self._records if wanted.admits(record)]

    def _what_ran(self) -> str:
        records = self._ran._records
        return f"what ran: {_amount(records)}\n{_table(records, _MOST_ROWS)}".rstrip()


class _FiniteRecorder(hooks.Recorder):
    """Also keeps whether outputs are finite, as tensors: reading them would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.finite: dict[int, Any] = {}

    def post(self, call: OpCall) -> None:
        self.finite[call.index] = all_finite(first_output(call.output))
        super().post(call)


class CostProperties:
    """Adds up the cost of a test's calls, and stores it in the test's properties, which reports carry."""

    reads = ()

    def __init__(self, properties: list[tuple[str, object]]) -> None:
        self.calls, self.flops, self.seconds = 0, 0, 0.0
        self._properties = properties

    def post(self, call: OpCall) -> None:
        """Add a call."""
        self.calls += 1
        self.flops += call.flops or 0
        self.seconds += call.elapsed or 0.0

    def exit(self) -> None:
        """Store the sums."""
        for name in ("calls", "flops", "seconds"):
            self._properties.append((f"matmul_{name}", getattr(self, name)))


def recording(options: Options, snapshots: Callable[[], Snapshots] | None = None) -> tuple[Interceptor, OpCalls]:
    """Return an interceptor with these options, and the calls that it will record.

    Raises:
        TypeError, ValueError: An option is unknown, or `intercept` refuses its value.
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown option {', '.join(sorted(unknown))}; choose from {', '.join(Options.__annotations__)}"
        )
    finite, others = options.get("finite", False), options.get("hooks", ())
    if not isinstance(finite, bool):
        raise TypeError(f"finite must be True or False, got {finite!r}")
    recorder = _FiniteRecorder()
    plain: Any = {key: value for key, value in options.items() if key in ("level", "ops", "engine")}
    interceptor = intercept(recorder, **plain)
    # After the recorder, which then has the call at which one of them raises.
    if finite:
        interceptor.register(hooks.NonFinite())
    for hook in others if isinstance(others, Iterable) else [others]:
        interceptor.register(hook)
    families = split(interceptor.watcher.ops).families
    level = options.get("level", "dispatch")
    refuse = partial(why_never, level=level, keys=interceptor.watcher.keys, whole=families)
    return interceptor, OpCalls(recorder, recorder.finite, options, snapshots, refuse=refuse)


def _read_twice(op: Any) -> Any:
    return list(op) if not isinstance(op, str) and isinstance(op, Iterable) else op


def _operands(record: CallRecord) -> list[TensorMeta]:
    return [t for t in (record.lhs, record.rhs) if t is not None]


def _is_infinite(finite: Any) -> bool:
    try:
        return finite is not None and not bool(finite)
    except RuntimeError:  # a tensor without values, such as a fake one or one inside vmap
        return False


Shape = tuple[int | None, ...]
Pair = tuple[Shape | None, Shape | None]


def _checked_shapes(shapes: Any) -> Pair | list[Pair]:
    """Return one pair as a tuple, several as a list."""
    if (pair := _pair(shapes)) is not None:
        return pair
    pairs = [_pair(item) for item in shapes] if isinstance(shapes, Sequence) else [None]
    found = [pair for pair in pairs if pair is not None]
    if len(found) != len(pairs):
        raise TypeError(
            "shapes must be a pair for the left and the right operand, such as ((2, 8), (8, 16)), or a list with a "
            f"pair for each call, got {shapes!r}"
        )
    return found


def _pair(value: Any) -> Pair | None:
    def is_shape(shape: Any) -> bool:
        return shape is None or (
            isinstance(shape, (tuple, list)) and all(n is None or isinstance(n, int) for n in shape)
        )

    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(map(is_shape, value)):
        return None
    lhs, rhs = (None if shape is None else tuple(shape) for shape in value)
    return lhs, rhs


def _fits(record: CallRecord, pair: Pair) -> bool:
    return all(
        shape is None if t is None else shape is not None and _alike(t.shape, shape)
        for t, shape in zip((record.lhs, record.rhs), pair, strict=True)
    )


def _alike(found: tuple[int, ...], wanted: Shape) -> bool:
    return len(found) == len(wanted) and all(n in (None, m) for m, n in zip(found, wanted, strict=True))


def _shown(pair: Iterable[Shape | None]) -> str:
    shapes = ([str("*" if n is None else n) for n in shape] for shape in pair if shape is not None)
    return " @ ".join(f"[{', '.join(shape)}]" for shape in shapes)


def _amount(records: Sequence[CallRecord]) -> str:
    calls = f"{len(records)} call{'' if len(records) == 1 else 's'}"
    return f"{calls}, {sum(record.flops or 0 for record in records):,} FLOP"


def _listed(records: Sequence[CallRecord], more: Sequence[str] = ()) -> list[str]:
    lines = [
        f"  {r.index} {r.phase} {r} in {_module(r)} ({r.source})" + (more[i] if more else "")
        for i, r in enumerate(records[:_MOST_CALLS])
    ]
    return [*lines, f"  ... {len(records) - _MOST_CALLS} more"] if len(records) > _MOST_CALLS else lines


def _module(record: CallRecord) -> str:
    return "?" if record.module is None else record.module or "-"


def _table(records: Sequence[CallRecord], most: int | None = None) -> str:
    rows: dict[tuple[str, ...], int] = {}
    for r in records:
        operands = _operands(r)
        row = (
            r.phase,
            _module(r),
            r.op.removeprefix("aten::"),
            _shown(t.shape for t in operands),
            ", ".join(dict.fromkeys(t.dtype for t in operands)),
            r.source or "?",
        )
        rows[row] = rows.get(row, 0) + 1
    if not rows:
        return ""
    head = ["phase", "module", "op", "shapes", "dtype", "line", "calls"]
    lines = aligned([head, *([*row, str(count)] for row, count in rows.items())], left=6).split("\n")
    if most is not None and len(rows) > most:
        lines[most + 1 :] = [f"... {len(rows) - most} more rows"]
    return "\n".join(lines)
