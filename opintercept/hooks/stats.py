"""`Stats`: statistics of the values of operands and outputs, added up without waiting for a device."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from os import PathLike
from typing import Any, ClassVar, NamedTuple

import torch

from opintercept._core.call import OpCall
from opintercept._core.checks import check_choice
from opintercept._core.errors import HookError, OpInterceptError
from opintercept._core.in_kernel import CallKind, Chunk, Found, Work
from opintercept._core.pipeline import flush, keep
from opintercept._core.record import PendingRecord
from opintercept._core.tables import Cells, Table
from opintercept._core.tensors import describe, dtype_name
from opintercept._core.text import write_csv
from opintercept._engines.scope import unwatched
from opintercept._kit.copyable import Copyable
from opintercept._kit.roles import checked_roles
from opintercept._ops.families import makes_values
from opintercept._values.late import Lot, Lots, graph_of
from opintercept._values.read import ON_HOST, first_output, leaves_out_captured, stored_values
from opintercept._values.stats import Sums
from opintercept._values.sums import BATCH, LOWEST, PIECE, Cell, LateSums, Read, Reader, check_width, flat, powers

OPERANDS = ("lhs", "rhs", "bias", "output")

SMALL = 1 << 13
"""Tensors of at most this many values wait for others of their size: alone, reading them would be mostly overhead."""
WAITING = 1 << 20
"""How many values may wait."""
NOTED = 1 << 10
"""How many entries without tensors are moved into the state together."""
KEPT = 1 << 13
"""How many calls that kernels have noted are. To copy the cells for it costs more than to add to them."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other subclasses may lack the operators that read many tensors at once


@dataclass(frozen=True, slots=True)
class StatsRow:
    """The values of one operand, for one operator of a module in one phase.

    Range and moments are those of the finite values, NaN if there are none. For complex values they are those of the
    moduli. Shares are relative to `count`.

    Attributes:
        module: Qualified name of the module; None if it is not known.
        op: The operator.
        operand: `"lhs"`, `"rhs"`, `"bias"` or `"output"`; `"rhs codes"` for a quantised operand whose values nobody has
            said how to compute, see `register_op`.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        calls: How many calls.
        count: How many values, including NaN and infinite ones.
        nan: How many NaNs.
        inf: How many infinite values.
        min: The smallest value.
        max: The largest value.
        mean: The mean.
        std: The population standard deviation.
        rms: The root mean square.
        absmax: The largest magnitude.
        zeros: The share of zeros.
        underflow: The share of values that the target dtype would round to zero; None without a target.
        overflow: The share of values beyond the target's largest number, including infinite ones; None without a
            target.
    """

    module: str | None
    op: str
    operand: str
    phase: str
    calls: int
    count: int
    nan: int
    inf: int
    min: float
    max: float
    mean: float
    std: float
    rms: float
    absmax: float
    zeros: float
    underflow: float | None
    overflow: float | None


class _Key(NamedTuple):
    module: str | None
    op: str
    operand: str
    phase: str


_NO_KEY = _Key(None, "", "", "")


class _Addition(NamedTuple):
    """What one tensor adds to its row: a cell, sums, small values that wait for others of their size, or late sums."""

    key: _Key
    part: Cell | None = None
    values: torch.Tensor | None = None
    read: Read | None = None
    late: LateSums | None = None

    calls: Chunk | None = None
    number: int = 0  # of the hook to these

    def of(self, lot: Lot) -> _Addition:
        """The same of another replay of the graph that computes the sums."""
        return self if self.late is None else self._replace(late=self.late.of(lot))


class _AllSums(NamedTuple):
    """All sums so far. The state is replaced as a whole, so an interrupt leaves either the old one or the new one.

    A cell in it never changes: a changed copy takes its place.
    """

    waiting: dict[int, list[_Addition]]  # by number of values
    held: int  # how many values wait
    window: dict[_Key, Cell]
    totals: dict[_Key, Cell]
    late: list[_Addition]  # what devices are still adding up


class Stats(Copyable, Table):
    """Streaming statistics of operands and outputs by module, operator and phase.

    Stats adds up the values of each tensor and their squared distances from its mean, and combines these as Chan,
    Golub and LeVeque (1979) do. On a CPU it reads floating-point values in one pass in C++ if the compiled engine has
    been built. Otherwise it reads many small tensors at once, in float64, and large tensors in chunks that stay in the
    cache, where it adds the squares of floating-point values of up to 32 bits in float32, in rows of 1024. On other
    devices it reduces values in float64, and copies what it finds for 256 tensors at a time, so that no call waits.

    Mean and standard deviation are accurate to 1e-5 whatever the mean. A mean much smaller than the values is
    accurate only to the rounding error of their sum. `str(stats)` is a table.

    Operands are read before the operator runs and outputs after; of several outputs, Stats reads the first. It does not
    read views, whose values have been read where they were made, or uninitialised memory. `skipped`
    counts tensors without values: fake and vmapped ones, and those of calls that a CUDA graph captures, unless
    `intercept` got `graphs=True`: then each replay adds its values, but for a histogram and channels.

    Args:
        of: Which tensors to look at: one or more of `"lhs"`, `"rhs"`, `"bias"` and `"output"`.
        for_dtype: A floating-point dtype. Count the values that it would round to zero (at most half its smallest
            subnormal number in magnitude) or could not hold.
        histogram: Whether to count magnitudes by power of two too; see `histogram`.
        channels: An operand. For calibration, keep the largest magnitude of each entry in its last dimension: for
            `"lhs"` the input channels, for `"rhs"` the output channels, or the input channels if it is the weight of
            a whole `linear`, as at function level; see `channels`.

    Raises:
        TypeError: `for_dtype` is not a floating-point dtype with a sign, or `of` holds no names.
        ValueError: `of` is empty or names an unknown operand, or `channels` does.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> stats = hooks.Stats(of=("lhs", "output"), for_dtype=torch.float8_e4m3fn)
        >>> with intercept(stats):
        ...     _ = torch.tensor([[3.0, 4.0]]) @ torch.eye(2) * 200
        >>> [(row.operand, row.mean, row.std, row.overflow) for row in stats.rows()]
        [('lhs', 3.5, 0.5, 0.0), ('output', 3.5, 0.5, 0.0)]
    """

    reads = ("module",)
    fresh: ClassVar = {"_lock": threading.RLock, "_inbox": list, "_lots": Lots}
    _row = StatsRow

    def __init__(
        self,
        of: str | Iterable[str] = ("output",),
        *,
        for_dtype: torch.dtype | None = None,
        histogram: bool = False,
        channels: str | None = None,
    ) -> None:
        self._of = checked_roles(of, OPERANDS)
        if channels is not None:
            check_choice("channels", channels, OPERANDS)
            self._of = tuple(dict.fromkeys((*self._of, channels)))
        if for_dtype is not None and not _is_signed_float(for_dtype):
            raise TypeError(f"for_dtype must be a floating-point torch.dtype with a sign, got {for_dtype!r}")
        self.skipped = 0
        self._reader = Reader(for_dtype, histogram)
        self._channels = channels
        self._widths: dict[_Key, int] = {}
        # A call only appends an entry, which takes no lock. `_settle` moves the entries into the state.
        self._inbox: list[_Addition] = []
        self._kept = 0  # calls in it that kernels have noted, or near it
        self._state = _AllSums({}, 0, {}, {}, [])
        self._lots = Lots()
        # Reentrant, since a signal handler or a finalizer may call the hook from anywhere in the same thread.
        self._lock = threading.RLock()
        self._inputs = tuple(operand for operand in self._of if operand != "output")
        if self._inputs:
            self.pre = self._pre  # a hook without `pre` costs nothing before the call

    def _pre(self, call: OpCall) -> None:
        for operand in self._inputs:
            self._see(call, operand, getattr(call, operand))

    def post(self, call: OpCall) -> None:
        """Add the output, if asked for."""
        if "output" in self._of and makes_values(call.func):
            self._see(call, "output", first_output(call.output))

    def work(self) -> Work | None:
        """Kernels read the values, unless powers or channels are to be counted."""
        if self._reader.histogram or self._channels is not None:
            return None
        return Work(reads=self._of, target=self._reader.limits, keeps=True)

    def learn(self, call: OpCall) -> str:
        """The operator."""
        return call.op

    def noted(self, note: PendingRecord, values: Mapping[str, Found], learned: str) -> None:
        """Add the tensors of a call that a kernel has noted."""
        for operand in self._of:
            found = values.get(operand)
            if found is not None:
                key = _Key(note.call_site.module, learned, operand, note.phase)
                self._add(_Addition(key, read=found[:3]), NOTED)

    def keep(self, calls: Chunk, number: int) -> None:
        """Keep calls that kernels have noted, to be added up."""
        self._kept += calls.size()
        self._add(_Addition(_NO_KEY, calls=calls, number=number), NOTED if self._kept < KEPT else 1)

    def _see(self, call: OpCall, operand: str, tensor: Any) -> None:
        if tensor is None:
            return
        shown = f"{operand} codes" if operand != "output" and call.is_quantized(operand) else operand
        key = _Key(call.module, call.op, shown, call.phase)
        try:
            entry = self._entry(key, tensor, operand == self._channels)
        except HookError:
            raise
        except Exception:  # the tensor wraps others, as under vmap, or lacks an operator, or memory is short
            entry = None
        if entry is None:
            return self._skip(1)
        if entry.late is not None and graph_of(tensor) is not None:
            return keep(call, self, entry.of)
        self._add(entry)

    def replayed(self, note: PendingRecord, values: Sequence[_Addition]) -> None:
        """Add the tensors of a call that a CUDA graph repeats."""
        for entry in values:
            self._add(entry)

    def _add(self, entry: _Addition, most: int = BATCH) -> None:
        self._inbox.append(entry)
        if len(self._inbox) >= most:
            self._settle()

    def _entry(self, key: _Key, tensor: Any, with_channels: bool) -> _Addition | None:
        """What a tensor adds to its row; None if it has no values."""
        with_channels = with_channels and tensor.dim() > 0
        found = self._reader.read_natively(tensor, with_channels)
        if found is not None:
            sums, below, high, _, counts, channels = found
            if not counts and not channels:
                return _Addition(key, read=(sums, below, high))
            if channels:
                self._check_width(key, tensor.size(-1))
            part = Cell(1)
            part.add(sums, below, high)
            part.add_arrays(counts, channels)
            return _Addition(key, part)
        values = stored_values(tensor)
        joins = not (self._reader.histogram or with_channels)  # replays bring no counts and channels to the host
        if values is None or leaves_out_captured(values, self, joins):
            return None
        return self._read_or_wait(key, values, tensor.size(-1) if with_channels else None)

    def _check_width(self, key: _Key, width: int) -> None:
        check_width(width, self._widths.setdefault(key, width))

    def _skip(self, tensors: int) -> None:
        with self._lock:
            self.skipped += tensors

    def _read_or_wait(self, key: _Key, values: torch.Tensor, width: int | None) -> _Addition:
        """The sums of some values, now or later, or those that wait."""
        device = values.device.type
        if device == "mps":  # it has no float64
            device, values = "cpu", values.cpu()
        part: Cell | None = None
        if width and values.numel():
            self._check_width(key, width)
            exact = values if values.is_floating_point() and values.element_size() > 1 else values.to(torch.float64)
            part = Cell(1)
            part.channels = exact.abs().reshape(-1, width).amax(0).to(torch.float64)
        values = flat(values) if device in ON_HOST else values
        count = values.numel()
        if device in ON_HOST and 0 < count <= SMALL and type(values) in _PLAIN:
            return _Addition(key, part, values.to(torch.float64, copy=True))
        part = part or Cell(1)
        if not count:
            return _Addition(key, part)
        if device in ON_HOST:
            self._reader.add(values, part)
            return _Addition(key, part)
        for piece in flat(values).split(PIECE) if self._reader.histogram else ():
            part.add_histogram(powers(piece))
        return _Addition(key, part, late=self._reader.read_later(values, self._lots))

    def _settle(self, everything: bool = False, then: Callable[[_AllSums], _AllSums] | None = None) -> _AllSums:
        """Move the entries into the state and return it.

        Args:
            everything: Whether to read the values that wait and the sums on devices too.
            then: Makes the next state from the one that is returned.
        """
        with self._lock:
            while True:
                old, count = self._state, len(self._inbox)
                with unwatched():
                    settled, unread = self._settled(old, self._inbox[:count], everything)
                new = settled if then is None else then(settled)
                # Python runs signal handlers only at calls, so nothing can come between the lines below. If a
                # handler has changed the state before them, start again from its state.
                if self._state is old:
                    self._state = new
                    del self._inbox[:count]
                    self._kept = 0
                    self.skipped += unread
                    return settled

    def _settled(self, old: _AllSums, entries: list[_Addition], everything: bool) -> tuple[_AllSums, int]:
        """The state with these entries, and how many of their tensors could not be read."""
        waiting, held, unread = dict(old.waiting), old.held, 0
        cells: dict[_Key, Cell] = {}  # copies of the cells that change
        sizes: dict[int, list[_Addition]] = {}
        late: list[_Addition] = []
        for entry in (*old.late, *entries):
            if entry.calls is not None:
                self._add_up(entry.calls, entry.number, old.window, cells)
                continue
            # Devices finish in the order of the calls, so that nothing is at hand after what is not.
            waits = entry.late is not None and bool(late or not (everything or entry.late.at_hand))
            if waits:
                late.append(entry)
                if entry.key in old.window:
                    continue
            cell = _own(cells, old.window, entry.key)  # keeps the order of the calls
            if waits:
                continue
            if entry.late is not None:
                Sums.merge(cell, entry.late.read()[1])
            if entry.values is not None:
                sizes.setdefault(entry.values.numel(), []).append(entry)
            elif entry.read is not None:
                cell.calls += 1
                cell.add(*entry.read)
            elif entry.part is not None:
                cell.merge(entry.part)
        for count, lot in sizes.items():
            waiting[count] = [*waiting[count], *lot] if count in waiting else lot
            held += count * len(lot)
        for count in [*waiting] if everything or held > WAITING else [*sizes]:
            lot = waiting[count]
            if everything or held > WAITING or len(lot) >= BATCH:
                unread += self._read_lot(lot, old.window, cells)
                del waiting[count]
                held -= count * len(lot)
        if everything:
            for key, cell in old.window.items():
                if not cell.is_read:
                    _own(cells, old.window, key)
            for cell in cells.values():
                cell.read()
        return _AllSums(waiting, held, old.window | cells, old.totals, late), unread

    def _add_up(self, calls: Chunk, number: int, window: dict[_Key, Cell], cells: dict[_Key, Cell]) -> None:
        """Add calls that kernels have noted."""
        sums: dict[str, list[Cell | None]] = {operand: [] for operand in self._of}
        for kind in map(CallKind._make, calls.kinds(number)):
            for operand in self._of:
                key = _Key(kind.call_site.module, kind.learned, operand, kind.phase)
                sums[operand].append(_own(cells, window, key) if operand in kind.read else None)
        for operand, of_kinds in sums.items():
            calls.add_up(operand, of_kinds)

    def _read_lot(self, lot: list[_Addition], window: dict[_Key, Cell], cells: dict[_Key, Cell]) -> int:
        """Add entries that have waited; return how many could not be read."""
        unread = 0
        tensors = [entry.values for entry in lot if entry.values is not None]
        try:
            rows = self._reader.read_together(tensors)
        except Exception:  # memory is short
            rows = [None] * len(tensors)
        for entry, tensor, row in zip(lot, tensors, rows, strict=True):
            try:
                sums, below, high = row or self._reader.read(tensor)
                counts = powers(tensor) if self._reader.histogram else None
            except Exception:
                unread += 1
                continue
            cell = _own(cells, window, entry.key)
            cell.add(sums, below, high)
            if counts is not None:
                cell.add_histogram(counts)
            if entry.part is None:
                cell.calls += 1
            else:
                cell.merge(entry.part)
        return unread

    def _held(self) -> str:
        return f"of={self._of!r}"

    def rows(self) -> list[StatsRow]:
        """All rows so far, in the order of their first calls; waits for the devices."""
        return self._as_rows(self._all())

    def step(self) -> list[StatsRow]:
        """End a step: return the rows of the calls since the last step, and add them to the totals."""
        flush()
        state = self._settle(True, lambda state: _AllSums({}, 0, {}, _merged(state.totals, state.window), []))
        return self._as_rows(state.window)

    def _as_rows(self, cells: dict[_Key, Cell]) -> list[StatsRow]:
        return [_row(key, cell, self._reader.target is not None) for key, cell in cells.items() if cell.calls]

    def _all(self) -> dict[_Key, Cell]:
        """Totals and the running step together."""
        flush()
        state = self._settle(True)
        return _merged(state.totals, state.window)

    def histogram(self, module: str | None, operand: str = "output", phase: str = "forward") -> dict[int, int]:
        """How many values of a module have a magnitude from `2**power` up to the next power of two, by power.

        Zeros and values that are not finite are left out. The lowest power, -149, and the highest, 127, include all
        values beyond. The operators of a module are added up.

        Raises:
            ValueError: The hook was made without `histogram`.
            KeyError: No such operand of the module was seen.
        """
        if not self._reader.histogram:
            raise ValueError("this Stats has no histograms; make it with histogram=True")
        total = sum(cell.histogram for cell in self._found(module, operand, phase) if cell.histogram is not None)
        counts = total.tolist() if isinstance(total, torch.Tensor) else []
        return {power: count for power, count in enumerate(counts, start=LOWEST) if count}

    def channels(self, module: str | None, phase: str = "forward") -> torch.Tensor:
        """The largest magnitude of each channel of a module's operand, `[channels]` in float64 on the CPU.

        Raises:
            ValueError: The hook was made without `channels`, or the module's operators differ in their number.
            KeyError: The module was not seen.
        """
        if self._channels is None:
            raise ValueError("this Stats has no channels; make it with channels='lhs' or another operand")
        found = [cell.channels for cell in self._found(module, self._channels, phase) if cell.channels is not None]
        if len({tensor.shape for tensor in found}) != 1:
            raise ValueError(
                f"the operators of module {module!r} have different numbers of channels, "
                f"{', '.join(describe(tensor) for tensor in found)}; choose one with hooks.when(stats, op=...)"
            )
        return torch.stack(found).amax(0)

    def _found(self, module: str | None, operand: str, phase: str) -> list[Cell]:
        cells = {key: cell for key, cell in self._all().items() if cell.calls}
        found = [c for k, c in cells.items() if (k.module, k.operand, k.phase) == (module, operand, phase)]
        if not found:
            known = sorted({f"{key.module}" for key in cells})
            raise KeyError(f"no {operand} of module {module!r} was seen in {phase}; seen: {', '.join(known) or 'none'}")
        return found

    def merge(self, other: Stats) -> None:
        """Add the statistics of another hook, such as that of another process; `other` stays as it is.

        Raises:
            ValueError: The two were made with different arguments.
        """
        if self._asked() != other._asked():
            raise ValueError(
                f"only Stats that were made with the same arguments can be merged, got {other._asked()} "
                f"for {self._asked()}"
            )
        cells, skipped = other._all(), other.skipped
        self._settle(then=lambda state: state._replace(window=_merged(state.window, cells)))
        self._skip(skipped)

    def _asked(self) -> tuple[Any, ...]:
        target = None if self._reader.target is None else dtype_name(self._reader.target)
        return self._of, target, self._reader.histogram, self._channels

    def all_reduce(self, group: Any = None) -> None:
        """Add up the statistics of all ranks in a `torch.distributed` group, and give each rank the result.

        All ranks must call this, once, at the end: a second call would add up the results of the first. Like torch's
        own collectives it does nothing on a rank outside the group.

        Raises:
            OpInterceptError: `torch.distributed` is not initialised.
            ValueError: The ranks made the hook with different arguments; all of them raise.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise OpInterceptError(
                "all_reduce needs torch.distributed, which is not initialised; call init_process_group first"
            )
        if torch.distributed.get_rank(group) < 0:
            return
        flush()
        state = self._settle(True)
        mine = self._asked(), self.skipped, state.totals, state.window
        gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, mine, group)
        if len(asked := {theirs[0] for theirs in gathered}) > 1:
            raise ValueError(f"every rank must make its Stats with the same arguments, got {asked}")
        skipped = sum(skipped for _, skipped, _, _ in gathered)
        totals = _merged(*(totals for _, _, totals, _ in gathered))
        window = _merged(*(window for _, _, _, window in gathered))
        self._settle(then=lambda _: _AllSums({}, 0, window, totals, []))
        self.skipped = skipped

    def __getstate__(self) -> dict[str, Any]:
        flush()
        self._settle(True)
        state = super().__getstate__()
        state.pop("pre", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._inputs:
            self.pre = self._pre

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the rows with a header line; a module that is not known is `?`, as in the table."""
        rows = (("?" if row.module is None else row.module, *astuple(row)[1:]) for row in self.rows())
        write_csv(path, [field.name for field in fields(StatsRow)], rows)

    def _cells(self) -> Cells:
        head = ["module", "op", "operand", "phase", "calls", "mean", "std", "min", "max", "zeros", "nan", "inf"]
        if self._reader.target is not None:
            head += ["underflow", "overflow"]
        table = []
        for row in self.rows():
            cells = ["?" if row.module is None else row.module or "-", row.op.removeprefix("aten::"), row.operand]
            cells += [row.phase, str(row.calls), *(f"{v:.4g}" for v in (row.mean, row.std, row.min, row.max))]
            cells += [f"{row.zeros:.1%}", str(row.nan), str(row.inf)]
            if row.underflow is not None and row.overflow is not None:
                cells += [f"{row.underflow:.2%}", f"{row.overflow:.2%}"]
            table.append(cells + [""] * (len(head) - len(cells)))
        return Cells(head, table, left=4, shares=("zeros", "underflow", "overflow"))


def _row(key: _Key, cell: Cell, with_target: bool) -> StatsRow:
    count, low, high = cell.count, cell.min, cell.max
    return StatsRow(
        *key,
        calls=cell.calls,
        count=int(count),
        nan=int(cell.nan),
        inf=int(count - cell.finite - cell.nan),
        min=low,
        max=high,
        mean=cell.mean,
        std=cell.std,
        rms=cell.rms,
        absmax=max(abs(low), abs(high)),
        zeros=(count - cell.nonzero) / count if count else math.nan,
        underflow=cell.underflow / count if with_target and count else None,
        overflow=cell.overflow / count if with_target and count else None,
    )


def _own(cells: dict[_Key, Cell], window: dict[_Key, Cell], key: _Key) -> Cell:
    """The cell of a key in `cells`; if it is not there yet, a copy of the one in `window`."""
    cell = cells.get(key)
    if cell is None:
        old = window.get(key)
        cell = cells[key] = Cell() if old is None else old.copy()
    return cell


def _merged(*lots: dict[_Key, Cell]) -> dict[_Key, Cell]:
    """Add up the cells of each key, in new cells."""
    merged: dict[_Key, Cell] = {}
    for cells in lots:
        for key, cell in cells.items():
            merged.setdefault(key, Cell()).merge(cell)
    return merged


def _is_signed_float(dtype: Any) -> bool:
    try:
        return isinstance(dtype, torch.dtype) and dtype.is_floating_point and torch.finfo(dtype).min < 0
    except (TypeError, NotImplementedError):  # torch.finfo does not know packed floats
        return False
