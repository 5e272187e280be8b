"""`NonFinite`: finds the call that makes the first NaN, and not those that pass it on."""

from __future__ import annotations

import math
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from re import Pattern
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch.utils import deterministic

from opintercept._core.call import OpCall
from opintercept._core.checks import check_choice, check_count, renamed
from opintercept._core.errors import NonFiniteError, OpInterceptWarning
from opintercept._core.in_kernel import OVERWRITTEN, CallRanges, Overwritten, Range, Work
from opintercept._core.pipeline import keep, settle
from opintercept._core.record import CallRecord, PendingRecord
from opintercept._core.tables import Shown
from opintercept._core.tensors import is_strided, named_tensors, nested_tensors, share_memory
from opintercept._core.text import counted
from opintercept._engines.scope import unwatched
from opintercept._kit.copyable import Copyable
from opintercept._kit.filter import name_test
from opintercept._kit.findings import CallFinding as CallFinding
from opintercept._kit.per_call import PerCall
from opintercept._kit.repro import try_to_save
from opintercept._native import values as native
from opintercept._ops.families import makes_values
from opintercept._ops.scratch import (
    MASKS_LATER,
    MOVES,
    OVERWRITES,
    UNWRITTEN,
    UPDATED,
    UPDATES,
    results_of,
    torchs_name,
)
from opintercept._ops.table import row_of
from opintercept._origin.links import running_node
from opintercept._values.copies import safetensors_for
from opintercept._values.late import GraphResults, Lots, graph_of
from opintercept._values.on_device import is_ready
from opintercept._values.read import (
    ON_HOST,
    first_output,
    in_graph_capture,
    in_memory,
    leaves_out_captured,
    parts_of,
    stored_values,
)
from opintercept.hooks._infs import Infs, MemoryPlace, places
from opintercept.hooks._scaling import Losses, Scaling

Action = Literal["raise", "warn", "record", "breakpoint"]


# A gradient scaler looks with them for what is not finite.
_SCALERS = ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")


class _OperatorTraits(NamedTuple):
    """Properties of an operator, computed once."""

    func: Any  # keeps the operator alive, so that its id stays unique
    makes: bool  # whether it computes values: it neither returns a view nor only allocates
    writes: bool  # whether it may write to its arguments
    other: bool  # whether it is something other than a matmul
    scales: bool  # whether it is one of a gradient scaler


_MOST_PASSES = 64

_kinds: dict[int, _OperatorTraits] = {}


def _kind(call: OpCall) -> _OperatorTraits:
    func = call.func
    known = _kinds.get(id(func))
    if known is None:
        if len(_kinds) >= 4096:  # the program creates functions without end
            _kinds.clear()
        schema = getattr(func, "_schema", None)
        name = torchs_name(call.op)
        scales = name in _SCALERS
        makes = makes_values(func) and name not in UNWRITTEN and not scales
        writes = schema is None or name in UPDATES or any(a.alias_info is not None for a in schema.arguments)
        known = _kinds[id(func)] = _OperatorTraits(
            func, makes, makes and writes, row_of(func).family == "other", scales
        )
    return known


class ValueRange(NamedTuple):
    """The range of a tensor: NaN if it contains one, (0, 0) if it is empty."""

    min: float
    max: float

    @property
    def nan(self) -> bool:
        """Whether the tensor contains a NaN."""
        return math.isnan(self.min)

    @property
    def finite(self) -> bool:
        """Whether all values are finite."""
        return math.isfinite(self.min) and math.isfinite(self.max)

    def __str__(self) -> str:
        return "NaN" if self.nan else f"[{self.min + 0.0:.4g}, {self.max + 0.0:.4g}]"  # and not -0


@dataclass(frozen=True, slots=True)
class Finding(CallFinding):
    """The call that made values that are not finite, or the first one that received them.

    Attributes:
        record: The call.
        kind: `"made"` if the call's output contains a NaN and its inputs contain none, or if its output contains an
            Inf and its inputs are finite. `"came in"` if its inputs were not finite, or could not be read, and no
            call that was seen had made such values: they come from another operator, the data, a weight or a number
            that the program passes.
        output: The range of the output; of several outputs, of all together.
        operands: The ranges of all tensors that the call reads, by the names of `OpCall.tensors`, and those numbers
            among its arguments that are not finite. In-place forms are read before they run.
        unread: The names of the arguments whose values cannot be read, such as packed weights.
        seen_at: The later call whose NaN led to this overflow; None if the call was reported at once.
        saved: The script that runs the call again, if one was written.
        unsaved: Why no script could be written.
        unseen: If the values came in: the code that has run in the block before and that no block sees, by the names
            of `Interceptor.opaque`.
    """

    record: CallRecord
    kind: Literal["made", "came in"]
    output: ValueRange
    operands: dict[str, ValueRange]
    seen_at: CallRecord | None = None
    saved: str | None = None
    unread: tuple[str, ...] = ()
    unsaved: str | None = None
    unseen: tuple[str, ...] = ()
    numbers: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def bad(self) -> tuple[str, ...]:
        """The names of the arguments that were not finite; if some contained a NaN, only those."""
        names = tuple(name for name, extent in self.operands.items() if not extent.finite)
        return tuple(name for name in names if self.operands[name].nan) or names

    def __str__(self) -> str:
        record = self.record
        what = "NaN" if self.output.nan else "Inf"
        where = _where(record)
        bad = ", ".join(f"{n}={self.operands[n].min:g}" if n in self.numbers else n for n in self.bad)
        if self.kind == "made":
            text = f"{what} is made by {where}, from {f'Inf in {bad}' if bad else 'finite operands'}"
        elif not bad:
            text = f"{what} comes out of {where}; it may have come in through {', '.join(self.unread)}, not readable"
        else:
            text = f"{what} comes into {where}, through {bad}"
            if not self.numbers.issuperset(self.bad):
                text += "; no call seen before made it"
                text += f", but {', '.join(self.unseen)} ran unseen" if self.unseen else ""
        lines = [text, f"  {record}"]
        lines += [f"  it stands for {', '.join(record.ops)}"] if record.ops else []
        lines += [f"  {role} in {extent}" for role, extent in self.operands.items() if role not in self.numbers]
        lines += [f"  {role} could not be read" for role in self.unread]
        bound = self._bound()
        lines += [f"  {bound}"] if bound else []
        if self.seen_at is not None:
            seen = self.seen_at
            lines.append(f"  it became NaN on the way to {seen.op} in {seen.where()}, step {seen.step}")
        lines += [f"  to run it again: python {self.saved}"] if self.saved else []
        lines += [f"  it could not be saved: {self.unsaved}"] if self.unsaved else []
        return "\n".join(lines)

    def _bound(self) -> str | None:
        """How large the sums of products could become: k times the largest magnitudes."""
        terms, output = self.record.terms, self.record.output
        lhs, rhs = self.operands.get("lhs"), self.operands.get("rhs")
        if self.kind != "made" or terms is None or lhs is None or rhs is None or output is None:
            return None
        if not (lhs.finite and rhs.finite):
            return None
        dtype = getattr(torch, (output[0] if isinstance(output, tuple) else output).dtype)  # type: ignore[union-attr]
        left, right = (max(abs(extent.min), abs(extent.max)) for extent in (lhs, rhs))
        return (
            f"largest possible sum of products: {terms} x {left:.4g} x {right:.4g} = {terms * left * right:.4g}; "
            f"{self.record.output and str(dtype).removeprefix('torch.')} holds {torch.finfo(dtype).max:.4g}"
        )


Span = torch.Tensor | ValueRange
"""The range of a tensor: a tensor of two values, on a device that may not have computed them yet, or what was read."""


class _Before(NamedTuple):
    """What `pre` has read from a call that writes to its caller's tensors."""

    written: list[torch.Tensor]
    ranges: dict[str, Span | None]  # of the operands that the call overwrites
    copies: dict[str, torch.Tensor] | None  # of the same operands, for `save`; None if memory was short


class _InputRanges(NamedTuple):
    """The ranges of a call's inputs, by name; tensors stay on their device."""

    ranges: dict[str, Span]
    numbers: dict[str, ValueRange]
    unread: tuple[str, ...]
    memory: dict[str, list[MemoryPlace]]
    inner: bool  # whether autograd may throw away what the call made, before anybody gets it


class _Moment(NamedTuple):
    """What can be known of a call only while it is running."""

    losses: Callable[[], Losses | None]
    unseen: tuple[str, ...]  # as `Finding.unseen`


class _Spans(NamedTuple):
    """The ranges of a call whose check is put off."""

    ends: Callable[[], Sequence[Sequence[float]]]  # of the output, and of inputs
    names: tuple[str, ...]  # of these
    found: _InputRanges  # the rest of the inputs
    written: list[MemoryPlace]  # where the output is
    moment: _Moment | None = None


class _Parts(NamedTuple):
    """Which tensors of a call make up what is judged: the same for all calls that look alike.

    Tensors are known by their numbers among those of the arguments, or those of the outputs. What was written to an
    argument has the number `~n`.
    """

    operands: tuple[tuple[str, int], ...]
    outputs: tuple[int, ...]
    numbers: dict[str, ValueRange]
    unread: tuple[str, ...]
    writes: bool


class NonFinite(Copyable, Shown):
    """Finds the first call that makes a NaN from operands that have none, in forward and backward.

    A check is one pass over the outputs for their range, which is NaN if they contain one. If the range is not
    finite, NonFinite also reads all inputs of the call: each tensor among the arguments, including those in lists and
    packed weights, and each number. In-place and `out=` forms take another pass before they run, over the tensors
    that they write to. An Inf alone is no finding unless `inf=True`, since masks contain it. But when a NaN turns up
    later, NonFinite reports the call that first made an Inf from finite operands. If the Inf has another origin, such
    as a mask that hides everything, it reports the call that first outputs the NaN.

    A loss that a `torch.amp.GradScaler` has scaled up may overflow in the backward pass. The scaler finds that itself,
    skips the step and lowers its scale, so it is no finding: such calls are counted in `discarded`, and so are those
    that use these gradients before the scaler's `update()`. What a backward call makes is a finding all the same if
    the loss is not finite, if it was not scaled, or if the scale is 1 or less and so cannot be the cause. What a
    forward call makes always is.

    Calls that pass on what they receive are counted in `passed_on`. With `ops="all"`, calls that return views are not
    counted, and allocating memory is not making values. Of attention only the first output is read.

    Args:
        inf: Whether an Inf is a finding by itself.
        action: `"raise"` raises a `NonFiniteError`. `"warn"` warns once for each module, operator and phase.
            `"record"` only adds to `findings`, as all actions do. `"breakpoint"` stops in the debugger, in a frame
            that has the `call`. A function is called with the `Finding`.
        allow: Modules that may make any value: a glob, a compiled pattern or a predicate of the name.
        check_every: How to check calls on a device; what the host computes is checked at once in any case. By default,
            with compiled kernels, no check waits for a device. A call is judged when a later one runs and its values
            have been read by then, when the block ends, or when `findings` or `check` asks. So an error comes some
            calls later, and names the call that made the value. With 1, each check waits for the device, as it also
            does by default without compiled kernels, with `save` or `action="breakpoint"`, and for tensors that these
            kernels cannot read. With more, the checks are looked at once in this many calls, and when the block ends.
        save: A folder. For each finding, NonFinite writes the call's arguments as safetensors and a script that runs
            the call again. If it cannot, the finding says why.

    Raises:
        ValueError: The action is unknown, `check_every` is below 1, or `save` is given with more than 1: the operands
            are gone by then.
        ImportError: `save` without safetensors or numpy.

    Example:
        >>> import torch
        >>> from opintercept import NonFiniteError, hooks, intercept
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> _ = torch.nn.init.constant_(model[1].weight, 3e38)
        >>> _ = torch.nn.init.constant_(model[0].bias, 9.0)
        >>> try:
        ...     with intercept(hooks.NonFinite(inf=True)):
        ...         _ = model(torch.ones(1, 2))
        ... except NonFiniteError as error:
        ...     print(str(error).partition(" (<")[0])
        Inf is made by aten::addmm in module '1'

    Attributes:
        passed_on: How many calls only passed on values that are not finite. In a block, as far as calls are judged.
        discarded: How many calls had such values only in gradients that a scaler discards.
        skipped: How many calls were left out because a CUDA graph captured them, or a device had no memory left. With
            `graphs=True`, `intercept` has each replay of a graph checked.
    """

    reads = ("module", "record")
    fresh: ClassVar = {"_lock": threading.RLock, "_before": PerCall, "_scaling": Scaling, "_passes": dict}
    fresh |= {"_lots": partial(Lots, None), "_readers": set}
    must_see = _SCALERS  # kernels in C++ leave these to the hook

    @renamed(every="check_every")
    def __init__(
        self,
        *,
        inf: bool = False,
        action: Action | Callable[[Finding], object] = "raise",
        allow: str | Pattern[str] | Callable[[str], bool] | None = None,
        check_every: int | None = None,
        save: str | PathLike[str] | None = None,
    ) -> None:
        if not callable(action):
            check_choice("action", action, get_args(Action))
        if check_every is not None:
            check_count("check_every", check_every)
        if save is not None:
            if check_every not in (None, 1):
                gone = "the operands are gone when the check is read"
                raise ValueError(f"save needs check_every=1, got check_every={check_every}: {gone}")
            safetensors_for("save=")  # raises now, not when there is something to save
        if allow is not None:
            name_test(allow)

        self.passed_on = 0
        self.discarded = 0
        self.skipped = 0
        self._inf = inf
        self._action = action
        self._allow = allow
        self._check_every = check_every
        self._puts_off = check_every is not None and check_every > 1
        self._save = save
        self._overflow: Finding | None = None  # the first; with other operators than matmuls, `_infs` says more
        self._infs = Infs()
        self._scaling = Scaling()
        self._first_discarded: CallRecord | None = None
        self._found: dict[tuple[str | None, str, str], Finding] = {}
        self.sees_others = False  # operators other than matmuls, and so what makes a NaN between two of them
        self._before: PerCall[_Before] = PerCall()
        self._pending: deque[tuple[CallRecord, _Spans]] = deque()
        self._lots = Lots(None)  # of `_pending`
        self._passes: dict[int, Losses] = {}  # the last backward passes
        self._untold: list[Finding] = []
        self._readers: set[int] = set()  # threads that read the findings, and are not told
        self._lock = threading.RLock()

    @property
    def findings(self) -> list[Finding]:
        """The findings in the order of the calls, one for each module, operator and phase.

        In a block, this waits for devices if `check_every` is None. What is found so is told of at a later call.
        """
        if self._check_every is None:
            me = threading.get_ident()
            self._readers.add(me)
            try:
                settle(self)
            finally:
                self._readers.discard(me)
        with self._lock:
            return list(self._found.values())

    def pre(self, call: OpCall) -> None:
        """Read the tensors that the operator is about to overwrite."""
        kind = _kind(call)
        captured = (kind.writes or kind.scales) and any(map(in_graph_capture, nested_tensors(call.args)))
        if captured and (kind.scales or not any(map(graph_of, call.tensors.values()))):
            return
        if kind.writes and (before := _before(call, copies=self._save is not None)) is not None:
            self._before.put(call, before)
        elif kind.scales:
            self.check()  # before the scale changes

    def error(self, call: OpCall, exception: BaseException) -> None:
        """Forget a call that raised."""
        self._before.take(call)

    def work(self) -> Work | None:
        """Kernels look whether the outputs are finite, unless operands are to be saved."""
        if self._save is not None:
            return None
        later = self._check_every is None and self._action != "breakpoint"
        return Work(rows=False, finite=True, waits=not self._puts_off, later=later, infs_later=later and not self._inf)

    def learn(self, call: OpCall) -> _Parts | None:
        """Which tensors to judge; None for a call that `post` has to judge."""
        kind = _kind(call)
        if not kind.makes:
            return _Parts((), (), {}, (), False)
        # By their places, and not as this call's tensors: in another one, the same tensor may not be both operands.
        arguments = call.func._schema.arguments
        roles = {place: role for role, (place, _) in row_of(call.func).roles.items()}
        values = [*call.args, *(call.kwargs.get(each.name) for each in arguments[len(call.args) :])]
        given = [
            (argument, name, tensor)
            for place, (argument, value) in enumerate(zip(arguments, values, strict=True))
            for name, tensor in named_tensors(roles.get(place, argument.name), value)
        ]
        ignored = ("bias",) if call.options.get("beta") == 0 else ()
        overwrites = torchs_name(call.op) in OVERWRITES
        operands = tuple(
            (name, number)
            for number, (argument, name, tensor) in enumerate(given)
            if not (argument.is_out or (overwrites and _is_written(argument)) or name in ignored)
            and (tensor.is_floating_point() or tensor.is_complex())
        )
        returned = list(nested_tensors(call.output)) if call.func._schema.returns else []
        written = _written(call) if kind.writes else None
        outputs = []
        for made in _outputs(call, written):
            places = [place for place, each in enumerate(returned) if each is made]
            places += [~n for n, (argument, _, each) in enumerate(given) if each is made and _is_written(argument)]
            if not places:
                return None
            outputs.append(places[0])
        numbers, unread, packed = _others(call.options)
        if packed or _is_unwritten(call):
            return None
        return _Parts(operands, tuple(outputs), numbers, unread, written is not None)

    def begin_backward(self, task: int) -> None:
        """Look at what a backward pass begins with, since it may be over when its values are judged."""
        self._passes[task] = Losses()
        while len(self._passes) > _MOST_PASSES:
            del self._passes[next(iter(self._passes))]

    def arrived(self, calls: Iterable[tuple[PendingRecord, CallRanges, _Parts]]) -> None:
        """Judge calls on devices whose outputs are not finite."""
        for note, seen, parts in calls:
            made = [seen.outputs[n] if n >= 0 else seen.written[~n] for n in parts.outputs]
            whole = _joined(made)
            if whole is None or self._allows(note.call_site.aliases):
                continue
            known = {name: seen.arguments[n] for name, n in parts.operands if seen.arguments[n][0] is not None}
            memory = {name: _places([each]) for name, each in known.items()}
            inner = note.phase == "backward" and seen.node.rstrip("0123456789") in MASKS_LATER
            moment = _Moment(partial(self._passes.get, seen.task), seen.unseen)
            found = _InputRanges({}, parts.numbers, parts.unread, memory, inner)
            ends: list[Any] = [whole, *(each[:2] for each in known.values())]
            spans = _Spans(ends.copy, tuple(known), found, _places(made, parts.writes), moment)
            self._pending.append((note.record(), spans))
        self._judge_pending()

    def post(self, call: OpCall) -> None:
        """Check the outputs."""
        kind = _kind(call)
        if not kind.makes:
            return
        self.sees_others = self.sees_others or kind.other
        before = self._before.take(call) if kind.writes else None
        output = call.output
        if isinstance(first := first_output(output), torch.Tensor) and leaves_out_captured(first, self, joins=True):
            self.skipped += 1
            return
        made = [output] if before is None and type(output) is torch.Tensor else _made(call, before)
        here = [_range_here(tensor) for tensor in made]
        if (before is None or before.written) and here and all(span is not None and span.finite for span in here):
            return
        if isinstance(first, torch.Tensor):
            is_ready(first.device)
        span = _whole([_range(tensor) if known is None else known for tensor, known in zip(made, here, strict=True)])
        if span is None:
            values = isinstance(first, torch.Tensor) and first.is_floating_point() and first.numel()
            self.skipped += bool(values and first.device.type not in ("cpu", "meta"))
            return
        graph = graph_of(span) if isinstance(span, torch.Tensor) else None
        if graph is not None or (self._puts_off and _device_of(span).type not in ON_HOST):
            self._defer(call, span, before, graph)
            return
        extent = _read(span)
        if (
            extent is None
            or extent.finite
            or self._allows(call.aliases)
            or _is_view(call, before)
            or _is_unwritten(call)
        ):
            return
        if self._check_every != 1:
            self.check()  # a device may have made what came in
        found = _operands(call, before)
        operands = {name: read for name, span in found.ranges.items() if (read := _read(span)) is not None}
        found = found._replace(memory=_memory(call, [name for name, extent in operands.items() if not extent.finite]))
        with self._lock:
            written = places(made, written=before is not None)
            moment = _Moment(Losses, tuple(getattr(call.owner, "unseen", ())))
            finding = self._judge(call.record(), extent, operands, found, written, moment)
        if finding is not None:
            self._tell(finding, call, before)

    def _allows(self, names: Iterable[str]) -> bool:
        return self._allow is not None and any(map(name_test(self._allow), names))

    def _judge(
        self,
        record: CallRecord,
        output: ValueRange,
        operands: dict[str, ValueRange],
        found: _InputRanges,
        written: list[MemoryPlace],
        moment: _Moment | None = None,
    ) -> Finding | None:
        """Decide whether a call makes the values or passes them on; return the finding if it is new."""
        finding = Finding(
            record,
            "made",
            output,
            operands | found.numbers,
            unread=found.unread,
            numbers=frozenset(found.numbers),
        )
        bad = [extent for extent in finding.operands.values() if not extent.finite]
        nan = any(extent.nan for extent in operands.values())
        made = not bad and not found.unread
        first = None
        overflow = self._infs.of(place for name in finding.bad for place in found.memory.get(name, ()))
        self._infs.put(written, None if output.nan and not found.inner else finding if made else overflow)
        if found.inner and self.sees_others:
            return None
        if not self.sees_others:  # then what passes an Inf on was not seen
            overflow = overflow or self._overflow
        if not output.nan and not self._inf:
            if made and overflow is None and not self._discards(record, moment):
                self._overflow = self._overflow or finding
            return None
        if not nan and any(extent.nan for extent in found.numbers.values()):
            finding = replace(finding, kind="came in")  # a NaN number is a new origin, whatever came in before
        elif bad and overflow is not None:
            first = overflow
            finding = replace(first, seen_at=record)
        elif not made and not (output.nan and bad and not nan and (self.sees_others or not self._explains_inf())):
            if self._found:
                self.passed_on += 1
                return None
            finding = replace(finding, kind="came in")
        if self.sees_others and finding.kind == "came in" and torchs_name(record.op) in MOVES:
            return None  # whoever computes with it is told of, and nobody may: padding copies what it then overwrites
        known = finding.call_kind in self._found
        if not known and self._discards(record, moment, received=bool(bad)):
            return None
        if first is not None:
            self._overflow = None
            self.passed_on += known
        if moment is not None and finding.kind == "came in":
            finding = replace(finding, unseen=moment.unseen)
        return None if known else self._found.setdefault(finding.call_kind, finding)

    def _discards(self, record: CallRecord, moment: _Moment | None, *, received: bool = False) -> bool:
        """Whether a gradient scaler discards what a call made or received; asked only of what is new."""
        if record.phase == "backward":
            explained = self._scaling.explains_backward(None if moment is None else moment.losses())
        else:  # checks that are put off meet another scale, unless they were read before the scale changed
            explained = received and (moment is not None or self.sees_others) and self._scaling.explains_inputs()
        if not explained:
            return False
        self.discarded += 1
        self._first_discarded = self._first_discarded or record
        return True

    def _explains_inf(self) -> bool:
        """Whether a finding made an Inf, from which later NaNs may come."""
        return any(finding.kind == "made" and not finding.output.nan for finding in self._found.values())

    def _tell(self, finding: Finding, call: OpCall | None, before: _Before | None = None) -> None:
        if self._save is not None and call is not None and finding.seen_at is None:
            copies = {} if before is None else before.copies
            saved: str | None = None
            unsaved: str | None
            if copies is None:
                unsaved = "the device had no memory left for a copy of what the call overwrites"
            else:
                saved, unsaved = try_to_save(call, self._save, copies)
            finding = replace(finding, saved=saved, unsaved=unsaved)
            self._found[finding.call_kind] = finding
        if self._action == "raise":
            raise NonFiniteError(str(finding))
        if self._action == "warn":
            warnings.warn(str(finding), OpInterceptWarning, stacklevel=2)
        elif self._action == "breakpoint":
            breakpoint()
        elif callable(self._action):
            self._action(finding)

    def _defer(self, call: OpCall, output: Span, before: _Before | None, graph: GraphResults | None) -> None:
        if self._allows(call.aliases) or _is_view(call, before) or _is_unwritten(call):
            return
        found = _operands(call, before)
        device = _device_of(output)
        ranges = found.ranges
        if graph is not None:  # a scalar of the host is the same in each replay
            ranges = {name: span for name, span in ranges.items() if _device_of(span) == device}
            others = {name: span for name, span in found.ranges.items() if name not in ranges}
            known = {name: read for name, span in others.items() if (read := _read(span)) is not None}
            found = found._replace(numbers=found.numbers | known)
        spans = self._lots.put([_on(device, span) for span in (output, *ranges.values())])
        found = found._replace(ranges={}, memory=_memory(call, [*found.ranges]))
        rest = tuple(ranges), found, places(_made(call, before), written=before is not None)
        if graph is not None:
            keep(call, self, lambda lot: _Spans(spans.of(lot).read, *rest))
        else:
            self._put_off(call.record(), _Spans(spans.read, *rest))

    def replayed(self, note: PendingRecord, values: Sequence[_Spans]) -> None:
        """Check the outputs of a call that a CUDA graph repeats."""
        for spans in values:
            self._put_off(note.record(), spans)

    def _put_off(self, record: CallRecord, spans: _Spans) -> None:
        with self._lock:
            self._pending.append((record, spans))
            due = len(self._pending) >= (self._check_every or 1)
        if due:
            self.check()

    def check(self) -> None:
        """Look now at the checks that have been put off; waits for the device.

        Raises:
            NonFiniteError: A value is not finite, with `action="raise"`.
        """
        settle(self)
        self._judge_pending()

    def _judge_pending(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, deque()
        with unwatched():
            self._lots.send()
        try:  # all are judged first, since an action may raise
            while pending:
                record, spans = pending.popleft()
                output, *rest = (ValueRange(*ends) for ends in spans.ends())
                if not output.finite:
                    operands = dict(zip(spans.names, rest, strict=True))
                    with self._lock:
                        finding = self._judge(record, output, operands, *spans[2:])
                    if finding is not None:
                        self._untold.append(finding)
        finally:
            with self._lock:
                self._pending.extendleft(reversed(pending))  # an interrupt has left them
        if threading.get_ident() not in self._readers:
            findings, self._untold = self._untold, []
            for finding in findings:
                self._tell(finding, None)

    def __getstate__(self) -> dict[str, Any]:
        _ = self.findings  # judges what has been noted
        return super().__getstate__()

    def exit(self) -> None:
        """Look at the checks that are left."""
        self.check()

    def _held(self) -> str:
        return f"{counted(len(self._found), 'finding')}, {self.passed_on} passed on"

    def __str__(self) -> str:
        lines = list(map(str, self.findings))
        if not lines:
            more = "" if self.sees_others else '; ops="all" watches every operator'
            lines = [f"no{' other' * bool(self.discarded)} watched call made a value that is not finite{more}"]
        if self._first_discarded is not None:
            lines.append(f"{counted(self.discarded, 'call')} with gradients that a GradScaler discards, the first:")
            lines.append(f"  {_where(self._first_discarded)}")
        return "\n".join(lines)


def _where(record: CallRecord) -> str:
    return f"{record.op} in {record.where()}, step {record.step}, call {record.index} ({record.phase})"


def _before(call: OpCall, *, copies: bool) -> _Before | None:
    """Read the tensors that the call is about to write to; None if there are none."""
    written = _written(call)
    if written is None:
        return None
    ranges: dict[str, Span | None] = {}
    kept: dict[str, torch.Tensor] | None = {}
    known: Overwritten = call.once(OVERWRITTEN, lambda _: [])

    def read(tensor: torch.Tensor) -> Span | None:
        return next((ValueRange(*ends) for of, *ends in known if of is tensor), None) or _range(tensor)

    op = torchs_name(call.op)
    if op in UPDATES:
        ranges = {name: read(tensor) for name, tensor in call.tensors.items() if name in UPDATED}
    elif op not in OVERWRITES and (updated := getattr(call.func, "updated", None)) != frozenset():
        for name, tensor in call.tensors.items():
            # A generated kernel says what it updates.
            if name in updated if updated else any(tensor is target or _overlap(tensor, target) for target in written):
                ranges[name] = read(tensor)
                if copies and kept is not None and in_memory(tensor):
                    try:
                        kept[name] = tensor.detach().clone()
                    except torch.OutOfMemoryError:
                        kept = None
    return _Before(written, ranges, kept)


def _operands(call: OpCall, before: _Before | None) -> _InputRanges:
    """Compute the ranges of all inputs of the call."""
    ranges: dict[str, Span] = {}
    unread: list[str] = []
    earlier = {} if before is None else before.ranges
    options = call.options
    overwrites = torchs_name(call.op) in OVERWRITES
    tensors = call.tensors
    for name, tensor in tensors.items():
        if name == "bias" and options.get("beta") == 0:
            continue  # the operator does not read it
        if before is not None and overwrites and any(tensor is target for target in before.written):
            continue
        span = earlier[name] if name in earlier else _range(tensor)
        if span is not None:
            ranges[name] = span
        elif _may_hold(tensor):
            unread.append(name)
    numbers, missing, packed = _others(options)
    unread += missing
    ranges |= {name: span for name, part in packed.items() if (span := _range(part)) is not None}
    inner = call.phase == "backward" and running_node() in MASKS_LATER
    return _InputRanges(ranges, numbers, tuple(unread), {}, inner)


def _memory(call: OpCall, names: Sequence[str]) -> dict[str, list[MemoryPlace]]:
    tensors = call.tensors if names else {}
    return {name: places([tensors[name]]) for name in names if name in tensors}


def _others(options: Mapping[str, Any]) -> tuple[dict[str, ValueRange], tuple[str, ...], dict[str, Any]]:
    """Of other arguments, the numbers that are not finite, the names of what is not readable, and packed tensors."""
    numbers: dict[str, ValueRange] = {}
    unread: list[str] = []
    packed: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, torch.ScriptObject):
            parts = _unpacked(value)
            if parts is None:
                unread.append(name)
            else:
                packed |= {f"{name}[{place}]": part for place, part in enumerate(parts)}
        elif (extent := _worst(value)) is not None:
            numbers[name] = extent
    return numbers, tuple(unread), packed


def _may_hold(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())


def _unpacked(packed: Any) -> tuple[Any, ...] | None:
    """The tensors in a packed weight; None if torch cannot unpack it."""
    try:
        found = packed.unpack()
    except (AttributeError, RuntimeError, TypeError):
        return None
    return found if isinstance(found, tuple) else (found,)


def _worst(value: Any) -> ValueRange | None:
    """The range of a number or a list of numbers if it is not finite; otherwise None."""
    if isinstance(value, complex):
        value = abs(value)
    if isinstance(value, float):
        return None if math.isfinite(value) else ValueRange(value, value)
    if isinstance(value, (list, tuple)):
        found = [extent for extent in map(_worst, value) if extent is not None]
        return next((extent for extent in found if extent.nan), found[0] if found else None)
    return None


def _written(call: OpCall) -> list[torch.Tensor] | None:
    """The tensors of the caller that the call writes to, as far as its schema says so; None if it writes to none."""
    written = list(nested_tensors(call.written))
    return written if written or torchs_name(call.op) in UPDATES else None


def _made(call: OpCall, before: _Before | None) -> list[torch.Tensor]:
    return _outputs(call, None if before is None else before.written)


def _outputs(call: OpCall, written: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    """The outputs that the program gets from the call, and the tensors that the call wrote to."""
    found = list(nested_tensors(call.output))
    if len(found) > 1:
        del found[results_of(call.op, row_of(call.func).family) or len(found) :]
    if written is not None:
        found += [target for target in written if not any(target is output for output in found)]
    return found


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _is_view(call: OpCall, before: _Before | None) -> bool:
    """Whether the call returned memory that it was given. Its schema does not always say so."""
    if before is not None and before.written:
        return False
    output = next(nested_tensors(call.output), None)
    return output is not None and any(output is t or _overlap(output, t) for t in call.tensors.values())


def _is_unwritten(call: OpCall) -> bool:
    """Whether torch fills memory that nobody has written, so that people find code that reads it."""
    if call.op != "aten::fill_" or not torch.are_deterministic_algorithms_enabled():
        return False
    value = call.options.get("value")
    fills: bool = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return fills and isinstance(value, float) and math.isnan(value)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    plain = one.layout is other.layout is torch.strided and not (one.is_nested or other.is_nested)
    return plain and share_memory(one, other)


def _range_here(tensor: torch.Tensor) -> ValueRange | None:
    """As `_range`, of a tensor on the host that C++ can read; otherwise None."""
    ends = native.extent(tensor)
    return None if ends is None else ValueRange(*ends)


def _range(tensor: Any) -> Span | None:
    """Minimum and maximum, `[2]` where they are on a device; None if it is always finite or cannot be read."""
    if not isinstance(tensor, torch.Tensor):
        return None
    try:
        if (here := _range_here(tensor)) is not None:
            return here
        if tensor.layout is not torch.strided and in_memory(tensor) and (parts := parts_of(tensor)):
            tensor = parts[-1]  # the dense form of a sparse tensor may not fit into memory
        if tensor.is_complex() and is_strided(tensor) and in_memory(tensor):  # the modulus of Inf + NaN i is Inf
            tensor = torch.view_as_real(tensor.detach().resolve_conj())
        values = stored_values(tensor)
        if values is None or not values.is_floating_point() or not values.numel():
            return None
        if values.element_size() == 1:
            values = values.to(torch.float32)
        return torch.stack(torch.aminmax(values))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def _whole(found: Iterable[Span | None]) -> Span | None:
    """The common range of several tensors, without those that cannot be read."""
    spans = [span for span in found if span is not None]
    if len(spans) < 2:
        return spans[0] if spans else None
    there = [span for span in spans if isinstance(span, torch.Tensor)]
    known = [span for span in spans if isinstance(span, ValueRange)]
    if not there:
        return next((span for span in known if span.nan), None) or ValueRange(
            min(span.min for span in known), max(span.max for span in known)
        )
    low, high = torch.stack([_on(_device_of(there[0]), span) for span in spans]).unbind(1)
    return torch.stack([low.amin(), high.amax()])


def _joined(ranges: Sequence[Range]) -> ValueRange | None:
    """The common range of several tensors; None if none of them was read."""
    known = [(low, high) for low, high, _ in ranges if low is not None and high is not None]
    if not known:
        return None
    nan = any(math.isnan(low) for low, _ in known)
    return ValueRange(math.nan, math.nan) if nan else ValueRange(min(k[0] for k in known), max(k[1] for k in known))


def _places(ranges: Iterable[Range], written: bool = False) -> list[MemoryPlace]:
    """As `places`, of tensors that kernels have read."""
    known = [place for _, _, place in ranges if place is not None]
    return [MemoryPlace((torch.device(of), number), version, written, kept) for of, number, kept, version in known]


def _device_of(span: Span) -> torch.device:
    return span.device if isinstance(span, torch.Tensor) else torch.device("cpu")


def _on(device: torch.device, span: Span) -> torch.Tensor:
    return span.to(device) if isinstance(span, torch.Tensor) else torch.tensor(span, dtype=torch.float64, device=device)


def _read(span: Span | None) -> ValueRange | None:
    if span is None or isinstance(span, ValueRange):
        return span
    try:
        return ValueRange(*span.tolist())
    except RuntimeError:  # under vmap there is no single value to read for a whole batch
        return None
