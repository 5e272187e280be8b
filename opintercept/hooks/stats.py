"""`Stats`: what the values of every module's operands and outputs look like, added up without waiting for a device."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import astuple, dataclass, fields
from os import PathLike
from typing import Any, NamedTuple

import torch

from opintercept._call import OpCall
from opintercept._checks import check_choice
from opintercept._errors import HookError, OpInterceptError
from opintercept._tensors import describe, dtype_name
from opintercept._text import aligned, write_csv
from opintercept.hooks._values import captured, first_output, moments, stored_values

OPERANDS = ("lhs", "rhs", "bias", "output")


@dataclass(frozen=True, slots=True)
class StatsRow:
    """The values of one operand of one module's operator in one pass.

    The range, moments and shares are those of the finite values, NaN where there is none; of complex values
    they are those of the moduli.

    Attributes:
        module: Qualified name; None where a backward call cannot be attributed.
        op: The operator.
        operand: `"lhs"`, `"rhs"`, `"bias"` or `"output"`.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        calls: How many.
        count: How many values, NaN and infinite ones included.
        nan: How many of them are NaN.
        inf: How many are infinite.
        min: The smallest.
        max: The largest.
        mean: Their mean.
        std: Population standard deviation.
        rms: Root of the mean square.
        absmax: The largest magnitude.
        zeros: Share of zeros.
        underflow: Share of values that are not zero and would be in the target dtype; None without one.
        overflow: Share of values, infinite ones included, beyond the target's largest; None without one.
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


# What a cell adds up, in this order; the range is kept beside it as (-min, max), which both grow. The spread is
# the sum of squared distances from the mean: sums of squares lose it next to a large mean.
_COUNT, _FINITE, _NAN, _NONZERO, _UNDERFLOW, _OVERFLOW, _TOTAL, _SPREAD = range(8)
# A reduction reads so many values at a time, so that they stay in a CPU's cache, and what is made of them takes little
# of a device's memory.
_CHUNK, _PIECE = 1 << 19, 1 << 23
# Small tensors wait for others of their size, since a reduction of few values is nothing but overhead; all
# together for no more than so many values.
_SMALL, _BATCH, _WAITING = 1 << 13, 64, 1 << 20
# Of these a tensor waits for others; a subclass may lack the operators that read many at once.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Devices whose values are read at once; the sums of others stay there.
_ON_HOST = ("cpu",)
# Powers of two that a histogram tells apart: those of bfloat16 and float32, the ends for all beyond.
_LOWEST, _HIGHEST = -149, 127


class _Cell:
    """The sums of one row: in Python for the CPU's tensors, in a few tensors per device and stream for the others.

    A cell of a `_State` is never changed: what changes is a copy, which takes its place.
    """

    __slots__ = ("calls", "channels", "devices", "histogram", "range", "sums")

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls
        self.sums = [0.0] * 8
        self.range = [-math.inf, -math.inf]
        self.devices: dict[tuple[torch.device, Any], list[torch.Tensor]] = {}
        self.histogram: torch.Tensor | None = None
        self.channels: torch.Tensor | None = None

    def copy(self) -> _Cell:
        """A cell of the same sums, which may be changed."""
        copy = _Cell(self.calls)
        copy.sums, copy.range, copy.histogram, copy.channels = self.sums, self.range, self.histogram, self.channels
        if self.devices:
            copy.devices = {place: [*lots] for place, lots in self.devices.items()}
        return copy

    def add(self, sums: list[float], low: float, high: float) -> None:
        between = _between(self.sums, sums)
        self.sums = [mine + theirs for mine, theirs in zip(self.sums, sums, strict=True)]
        self.sums[_SPREAD] += between
        self.range = [max(self.range[0], low), max(self.range[1], high)]

    def add_device(self, sums: torch.Tensor, stream: Any) -> None:
        """The same for sums and range in one tensor, `[10]`, which stays on its device, in the order of its stream."""
        lots = self.devices.setdefault((sums.device, stream), [])
        lots.append(sums)
        if len(lots) == _BATCH:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                lots[:] = [_together(torch.stack(lots))]

    @property
    def is_read(self) -> bool:
        """Whether nothing is left on a device."""
        tensors = (self.histogram, self.channels)
        return not self.devices and all(tensor is None or tensor.device.type == "cpu" for tensor in tensors)

    def read(self) -> None:
        """Bring in what the devices have added up; waits for them."""
        for device in {device for device, _ in self.devices if device.type == "cuda"}:
            torch.cuda.synchronize(device)  # calls may have come on any stream
        for lots in self.devices.values():
            for *sums, low, high in torch.stack(lots).tolist():
                self.add(sums, low, high)
        self.devices = {}
        self.histogram = None if self.histogram is None else self.histogram.cpu()
        self.channels = None if self.channels is None else self.channels.cpu()

    def merge(self, other: _Cell) -> None:
        """Add another cell."""
        self.calls += other.calls
        self.add(other.sums, *other.range)
        for (_, stream), lots in other.devices.items():
            for sums in lots:
                self.add_device(sums, stream)
        if other.histogram is not None:
            self.add_histogram(other.histogram)
        if other.channels is not None:
            self.add_channels(other.channels)

    def add_histogram(self, counts: torch.Tensor) -> None:
        self.histogram = counts if self.histogram is None else self.histogram.to(counts.device) + counts

    def add_channels(self, absmax: torch.Tensor) -> None:
        if self.channels is None:
            self.channels = absmax
        else:
            _check_width(absmax.shape[0], self.channels.shape[0])
            self.channels = torch.maximum(self.channels.to(absmax.device), absmax)

    def row(self, key: _Key, with_target: bool) -> StatsRow:
        count, finite, nan, nonzero, underflow, overflow, total, spread = self.sums
        mean, variance, low, high = math.nan, math.nan, math.nan, math.nan
        if finite:
            mean, variance = total / finite, spread / finite
            low, high = 0.0 - self.range[0], 0.0 + self.range[1]  # of two zeros, the one without a sign
        return StatsRow(
            *key,
            calls=self.calls,
            count=int(count),
            nan=int(nan),
            inf=int(count - finite - nan),
            min=low,
            max=high,
            mean=mean,
            std=math.sqrt(variance),
            rms=math.sqrt(variance + mean * mean),
            absmax=max(abs(low), abs(high)),
            zeros=(count - nonzero) / count if count else math.nan,
            underflow=underflow / count if with_target and count else None,
            overflow=overflow / count if with_target and count else None,
        )


class _Entry(NamedTuple):
    """What one tensor adds to its row: sums, and small values that wait for others of their size."""

    key: _Key
    part: _Cell | None
    values: torch.Tensor | None


class _State(NamedTuple):
    """All that has been added up. It is replaced as a whole, so an interrupt leaves the old one or the new one."""

    waiting: dict[int, list[_Entry]]  # by their number of values
    held: int  # values that wait
    window: dict[_Key, _Cell]
    totals: dict[_Key, _Cell]


class Stats:
    """Streaming statistics of operands and outputs by module, operator and pass.

    Each tensor gives the sum of its values and of their squared distances from its mean, put together as Chan, Golub
    and LeVeque (1979) do. On a CPU, small tensors are read many at once in float64; large ones in pieces that stay
    in the cache, the squares of floating point of up to 32 bits in float32 by rows of 1024. On other devices the sums
    stay there, in float64, until somebody looks, so that no call waits. Mean and standard deviation are right to 1e-5
    whatever the mean; a mean that is next to nothing beside the values, to the rounding of its sum.
    `str(stats)` is a table.

    Operands are read before the operator runs, outputs after; of several outputs the first. Fake and vmapped tensors
    have no values, and a call that a CUDA graph captures has none yet: they are counted in `skipped`.

    Args:
        of: What to look at: any of `"lhs"`, `"rhs"`, `"bias"`, `"output"`.
        for_dtype: A floating-point dtype: count what it would round to zero (a magnitude of at most half its
            smallest subnormal number) or could not hold.
        histogram: Count magnitudes by powers of two as well; see `histogram`.
        channels: An operand of whose last dimension each entry gets its largest magnitude, for calibration: of
            `"lhs"` the input channels, of `"rhs"` the output channels (but where a `linear` is seen whole, as at
            function level, the input channels of its weight); see `channels`.

    Raises:
        TypeError: `for_dtype` is no floating-point dtype with a sign.
        ValueError: An unknown operand, or none.

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

    def __init__(
        self,
        of: str | Iterable[str] = ("output",),
        *,
        for_dtype: torch.dtype | None = None,
        histogram: bool = False,
        channels: str | None = None,
    ) -> None:
        self._of = operands(of)
        if channels is not None:
            check_choice("channels", channels, OPERANDS)
            self._of = tuple(dict.fromkeys((*self._of, channels)))
        if for_dtype is not None and not _is_signed_float(for_dtype):
            raise TypeError(f"for_dtype must be a floating-point torch.dtype with a sign, got {for_dtype!r}")
        self.skipped = 0
        self._target = for_dtype
        self._histogram = histogram
        self._channels = channels
        self._tiny = self._huge = 0.0
        if for_dtype is not None:
            # Its smallest number has the pattern 1; torch.finfo is wrong of float8_e5m2fnuz, whose eps it has as 0.125.
            bits = (torch.uint8, torch.int16, torch.int32, torch.int64)[for_dtype.itemsize.bit_length() - 1]
            smallest = torch.ones(1, dtype=bits, device="cpu").view(for_dtype)
            self._tiny, self._huge = smallest.to(torch.float64).item() / 2, torch.finfo(for_dtype).max
        self._widths: dict[_Key, int] = {}
        # A call only appends an entry, which takes no lock; now and then the entries move on into the state.
        self._inbox: list[_Entry] = []
        self._state = _State({}, 0, {}, {})
        # A signal's handler or a finalizer may come back to it from anywhere in the same thread.
        self._lock = threading.RLock()
        self._inputs = tuple(operand for operand in self._of if operand != "output")
        if self._inputs:
            self.pre = self._pre  # a hook without `pre` costs nothing before the call

    def _pre(self, call: OpCall) -> None:
        for operand in self._inputs:
            self._see(call, operand, getattr(call, operand))

    def post(self, call: OpCall) -> None:
        """Add the output, if it is asked for."""
        if "output" in self._of:
            self._see(call, "output", first_output(call.output))

    def _see(self, call: OpCall, operand: str, tensor: Any) -> None:
        if tensor is None:
            return
        key = _Key(call.module, call.op, operand, call.phase)
        try:
            values = stored_values(tensor)
            if values is None or captured(values, "Stats"):
                return self._skip(1)
            width = tensor.size(-1) if operand == self._channels and tensor.dim() else None
            part, flat = self._read_or_wait(key, values, width)
        except HookError:
            raise
        except Exception:  # a tensor that stands for others, of vmap say, or that lacks an operator; short memory
            return self._skip(1)
        self._inbox.append(_Entry(key, part, flat))
        if len(self._inbox) >= _BATCH:
            self._settle()

    def _skip(self, tensors: int) -> None:
        with self._lock:
            self.skipped += tensors

    def _read_or_wait(
        self, key: _Key, values: torch.Tensor, width: int | None
    ) -> tuple[_Cell | None, torch.Tensor | None]:
        """What an entry holds of these values."""
        device = values.device.type
        if device == "mps":  # has no float64
            device, values = "cpu", values.cpu()
        part: _Cell | None = None
        if width and values.numel():
            _check_width(width, self._widths.setdefault(key, width))
            exact = values if values.is_floating_point() and values.element_size() > 1 else values.to(torch.float64)
            part = _Cell(1)
            part.channels = exact.abs().reshape(-1, width).amax(0).to(torch.float64)
        flat = _flat(values)
        count = flat.numel()
        if device in _ON_HOST and 0 < count <= _SMALL and type(flat) in _PLAIN:
            return part, flat.to(torch.float64, copy=True)
        part = part or _Cell(1)
        if device not in _ON_HOST:
            stream = torch.cuda.current_stream(flat.device) if device == "cuda" else None
            for piece in flat.split(_PIECE) if count else ():
                part.add_device(self._reduce(piece), stream)
                if self._histogram:
                    part.add_histogram(_powers(piece))
        elif count:
            for piece in flat.split(_CHUNK) if count > _CHUNK else (flat,):
                part.add(*self._read(piece))
                if self._histogram:
                    part.add_histogram(_powers(piece))
        return part, None

    def _settle(self, everything: bool = False, then: Callable[[_State], _State] | None = None) -> _State:
        """Move the entries into the state and return it.

        Args:
            everything: Read what waits and what the devices hold as well.
            then: Makes the next state from the one that is returned.
        """
        with self._lock:
            while True:
                old, count = self._state, len(self._inbox)
                settled, unread = self._settled(old, self._inbox[:count], everything)
                new = settled if then is None else then(settled)
                # Python handles signals when it calls something, so the four lines below happen together. If a
                # handler has settled the state before them, its state is the one to go on from.
                if self._state is old:
                    self._state = new
                    del self._inbox[:count]
                    self.skipped += unread
                    return settled

    def _settled(self, old: _State, entries: list[_Entry], everything: bool) -> tuple[_State, int]:
        """The state with these entries, and how many could not be read after all."""
        waiting, held, unread = dict(old.waiting), old.held, 0
        cells: dict[_Key, _Cell] = {}  # copies of those that change
        sizes: dict[int, list[_Entry]] = {}
        for entry in entries:
            cell = _own(cells, old.window, entry.key)  # in the order of the calls
            if entry.values is not None:
                sizes.setdefault(entry.values.numel(), []).append(entry)
            elif entry.part is not None:
                cell.merge(entry.part)
        for count, lot in sizes.items():
            waiting[count] = [*waiting[count], *lot] if count in waiting else lot
            held += count * len(lot)
        for count in [*waiting] if everything or held > _WAITING else [*sizes]:
            lot = waiting[count]
            if everything or held > _WAITING or len(lot) >= _BATCH:
                unread += self._read_lot(lot, old.window, cells)
                del waiting[count]
                held -= count * len(lot)
        if everything:
            for key, cell in old.window.items():
                if not cell.is_read:
                    _own(cells, old.window, key)
            for cell in cells.values():
                cell.read()
        return _State(waiting, held, old.window | cells, old.totals), unread

    def _read_lot(self, lot: list[_Entry], window: dict[_Key, _Cell], cells: dict[_Key, _Cell]) -> int:
        """Add entries that have waited, and return how many could not be read."""
        unread = 0
        tensors = [entry.values for entry in lot if entry.values is not None]
        try:
            rows = self._read_together(tensors)
        except Exception:  # short memory
            rows = [None] * len(tensors)
        for entry, tensor, row in zip(lot, tensors, rows, strict=True):
            try:
                sums, low, high = row or self._read(tensor)
                powers = _powers(tensor) if self._histogram else None
            except Exception:
                unread += 1
                continue
            cell = _own(cells, window, entry.key)
            cell.add(sums, low, high)
            if powers is not None:
                cell.add_histogram(powers)
            if entry.part is None:
                cell.calls += 1
            else:
                cell.merge(entry.part)
        return unread

    def _read(self, values: torch.Tensor) -> tuple[list[float], float, float]:
        """The sums and the range of values on the CPU, in as few passes and operators as can be."""
        count = finite = values.numel()
        # float32 does for values of as many bits, at half the work; their squares must stay away from its ends.
        narrow = values.is_floating_point() and values.element_size() <= 4
        # Each operator finds its own code out of the cache, at 5 to 10 us a time beside what it computes.
        wide = values if values.dtype is torch.float32 else values.to(torch.float32 if narrow else torch.float64)
        low, high = map(float, torch.aminmax(wide))
        if narrow and not 1e-12 < max(-low, high) < 1e15:  # also where they are NaN
            wide = values.to(torch.float64)
        nan = 0
        if not (math.isfinite(low) and math.isfinite(high)):
            nan = int(wide.isnan().sum())
            wide = wide[wide.isfinite()]
            finite = wide.numel()
            if not finite:
                return [count, 0, nan, count, 0.0, count - nan, 0.0, 0.0], -math.inf, -math.inf
            low, high = map(float, torch.aminmax(wide))
        total, squares = moments(wide)
        spread = squares - total * total / finite if math.isfinite(squares) else math.inf
        nonzero = finite
        if low <= 0 <= high and not wide.abs().amin():
            nonzero = int(torch.ne(wide, 0, out=torch.empty_like(wide)).sum())
        if 4 * spread < squares:  # the difference has lost digits
            rest, squares = moments(wide - total / finite)
            spread = max(0.0, squares - rest * rest / finite)
        lost, underflow = count - finite, 0
        overflow = lost - nan
        if self._target is not None:
            magnitudes = wide.to(torch.float64).abs()  # the target's limits are numbers of float64
            underflow = int((magnitudes <= self._tiny).sum()) - (finite - nonzero)
            if max(-low, high) > self._huge:
                overflow += int((magnitudes > self._huge).sum())
        return [count, finite, nan, nonzero + lost, underflow, overflow, total, spread], -low, high

    def _read_together(self, tensors: list[torch.Tensor]) -> list[tuple[list[float], float, float] | None]:
        """Read tensors of one size all at once; None for one that is not finite."""
        count = tensors[0].numel()
        wide = torch.stack(tensors)
        low, high = torch.aminmax(wide, dim=1)
        nonzero, total = torch.count_nonzero(wide, dim=1), wide.sum(1)
        nothing = torch.zeros_like(total)
        misfits = self._misfits(wide.abs()) if self._target else (nothing, nothing)
        spread = torch.linalg.vector_norm(wide.sub_((total / count)[:, None]), dim=1).square()
        columns = [nonzero, *misfits, total, spread, -low, high]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [
            ([count, count, 0, *sums], below, above) if math.isfinite(sums[-2]) else None
            for *sums, below, above in rows
        ]

    def _misfits(self, magnitudes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How many of the last dimension the target would round to zero, and how many are too large for it."""
        underflow = ((magnitudes <= self._tiny) & (magnitudes > 0)).sum(-1, dtype=torch.float64)
        return underflow, (magnitudes > self._huge).sum(-1, dtype=torch.float64)

    def _reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The same as one tensor on the device, `[10]`, without waiting for it."""
        wide = values.to(torch.float64)
        magnitudes = wide.abs()
        finite = magnitudes < math.inf
        number = finite.sum(dtype=torch.float64)
        total = torch.where(finite, wide, 0.0).sum()
        apart = torch.where(finite, wide - total / number.clamp(min=1), 0.0)
        nothing = torch.zeros_like(total)
        sums = [
            torch.full_like(total, values.numel()),
            number,
            (wide != wide).sum(dtype=torch.float64),
            (wide != 0).sum(dtype=torch.float64),
            *(self._misfits(magnitudes) if self._target else (nothing, nothing)),
            total,
            torch.dot(apart, apart),
            -torch.where(finite, wide, math.inf).amin(),
            torch.where(finite, wide, -math.inf).amax(),
        ]
        return torch.stack(sums)

    def rows(self) -> list[StatsRow]:
        """Everything so far, in the order in which it first came up; waits for the devices."""
        return self._as_rows(self._all())

    def step(self) -> list[StatsRow]:
        """End a step: return the rows of what has come since the last one, and add them to the totals."""
        state = self._settle(True, lambda state: _State({}, 0, {}, _merged(state.totals, state.window)))
        return self._as_rows(state.window)

    def _as_rows(self, cells: dict[_Key, _Cell]) -> list[StatsRow]:
        return [cell.row(key, self._target is not None) for key, cell in cells.items() if cell.calls]

    def _all(self) -> dict[_Key, _Cell]:
        """Totals and window together."""
        state = self._settle(True)
        return _merged(state.totals, state.window)

    def histogram(self, module: str | None, operand: str = "output", phase: str = "forward") -> dict[int, int]:
        """How many values of a module have a magnitude from `2**power` up to the next power of two, by power.

        Zeros and what is not finite are left out; the lowest power, -149, and the highest, 127, also stand for all
        beyond. Several operators of one module are added up.

        Raises:
            ValueError: Histograms are off.
            KeyError: Nothing was seen of it.
        """
        if not self._histogram:
            raise ValueError("Stats must be made with histogram=True to have histograms, got histogram=False")
        total = sum(cell.histogram for cell in self._found(module, operand, phase) if cell.histogram is not None)
        counts = total.tolist() if isinstance(total, torch.Tensor) else []
        return {power: count for power, count in enumerate(counts, start=_LOWEST) if count}

    def channels(self, module: str | None, phase: str = "forward") -> torch.Tensor:
        """The largest magnitude of each channel of the operand `channels`, `[channels]` in float64 on the CPU.

        Raises:
            ValueError: Channels are off, or several operators of the module differ in their number.
            KeyError: Nothing was seen of it.
        """
        if self._channels is None:
            raise ValueError("Stats must be made with channels='lhs', say, to have channels, got channels=None")
        found = [cell.channels for cell in self._found(module, self._channels, phase) if cell.channels is not None]
        if len({tensor.shape for tensor in found}) != 1:
            raise ValueError(
                f"the operators of {module!r} must have the same number of channels, "
                f"got {[describe(tensor) for tensor in found]}; choose one with hooks.when(stats, op=...)"
            )
        return torch.stack(found).amax(0)

    def _found(self, module: str | None, operand: str, phase: str) -> list[_Cell]:
        cells = {key: cell for key, cell in self._all().items() if cell.calls}
        found = [c for k, c in cells.items() if (k.module, k.operand, k.phase) == (module, operand, phase)]
        if not found:
            known = sorted({f"{key.module}" for key in cells})
            raise KeyError(f"no {operand} of module {module!r} was seen in {phase}; seen: {', '.join(known) or 'none'}")
        return found

    def merge(self, other: Stats) -> None:
        """Add what another one has seen, of another process or shard; `other` stays as it is.

        Raises:
            ValueError: The two look for different things.
        """
        if self._asked() != other._asked():
            raise ValueError(
                f"statistics can be merged that were made alike, got {other._asked()} for {self._asked()}; "
                "make both with the same arguments"
            )
        cells, skipped = other._all(), other.skipped
        self._settle(then=lambda state: state._replace(window=_merged(state.window, cells)))
        self._skip(skipped)

    def _asked(self) -> tuple[Any, ...]:
        target = None if self._target is None else dtype_name(self._target)
        return self._of, target, self._histogram, self._channels

    def all_reduce(self, group: Any = None) -> None:
        """Add up over the ranks of a `torch.distributed` group, so that each has everybody's; all must call it.

        A second time would add up what each has got from the first: call it once, at the end. On a rank
        that is not in the group it does nothing, as torch's own.

        Raises:
            OpInterceptError: `torch.distributed` has not been initialised.
            ValueError: The ranks look for different things; all of them raise.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise OpInterceptError(
                "all_reduce needs torch.distributed, which is not initialised; call init_process_group first"
            )
        if torch.distributed.get_rank(group) < 0:
            return
        state = self._settle(True)
        mine = self._asked(), self.skipped, state.totals, state.window
        everybody: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(everybody, mine, group)
        if len(asked := {theirs[0] for theirs in everybody}) > 1:
            raise ValueError(f"every rank must make its statistics with the same arguments, got {asked}")
        skipped = sum(skipped for _, skipped, _, _ in everybody)
        totals = _merged(*(totals for _, _, totals, _ in everybody))
        window = _merged(*(window for _, _, _, window in everybody))
        self._settle(then=lambda _: _State({}, 0, window, totals))
        self.skipped = skipped

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self) | {"_state": self._settle(True), "_inbox": []}
        del state["_lock"]
        state.pop("pre", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())
        if self._inputs:
            self.pre = self._pre

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the rows with a header line; a module that is not known is `?`, as in the table."""
        rows = (("?" if row.module is None else row.module, *astuple(row)[1:]) for row in self.rows())
        write_csv(path, [field.name for field in fields(StatsRow)], rows)

    def __str__(self) -> str:
        head = ["module", "op", "operand", "phase", "calls", "mean", "std", "min", "max", "zeros", "nan", "inf"]
        if self._target is not None:
            head += ["underflow", "overflow"]
        table = [head]
        for row in self.rows():
            cells = ["?" if row.module is None else row.module or "-", row.op.removeprefix("aten::"), row.operand]
            cells += [row.phase, str(row.calls), *(f"{v:.4g}" for v in (row.mean, row.std, row.min, row.max))]
            cells += [f"{row.zeros:.1%}", str(row.nan), str(row.inf)]
            if row.underflow is not None and row.overflow is not None:
                cells += [f"{row.underflow:.2%}", f"{row.overflow:.2%}"]
            table.append(cells + [""] * (len(head) - len(cells)))
        return aligned(table, left=4)


def operands(of: str | Iterable[str]) -> tuple[str, ...]:
    """Check the names of operands.

    Raises:
        ValueError: An unknown one, or none.
    """
    names = (of,) if isinstance(of, str) else tuple(of)
    if not names or any(name not in OPERANDS for name in names):
        raise ValueError(f"operands must be some of {', '.join(OPERANDS)}, got {of!r}")
    return tuple(dict.fromkeys(names))


def _own(cells: dict[_Key, _Cell], window: dict[_Key, _Cell], key: _Key) -> _Cell:
    """The cell of a key in `cells`, at first a copy of that in `window`."""
    cell = cells.get(key)
    if cell is None:
        old = window.get(key)
        cell = cells[key] = _Cell() if old is None else old.copy()
    return cell


def _merged(*lots: dict[_Key, _Cell]) -> dict[_Key, _Cell]:
    """The cells of all of them, added up in cells of their own."""
    merged: dict[_Key, _Cell] = {}
    for cells in lots:
        for key, cell in cells.items():
            merged.setdefault(key, _Cell()).merge(cell)
    return merged


def _check_width(width: int, known: int) -> None:
    if width != known:
        raise HookError(
            "channels must name an operand whose last dimension stays the same from call to call, "
            f"got {width} channels after {known}; choose calls with hooks.when(...)"
        )


def _is_signed_float(dtype: Any) -> bool:
    try:
        return isinstance(dtype, torch.dtype) and dtype.is_floating_point and torch.finfo(dtype).min < 0
    except (TypeError, NotImplementedError):  # torch has no limits of packed floats
        return False


def _between(mine: list[float], theirs: list[float]) -> float:
    """What the distance of two means adds to the spread of both lots together."""
    m, n = mine[_FINITE], theirs[_FINITE]
    if not m or not n:
        return 0.0
    apart = mine[_TOTAL] / m - theirs[_TOTAL] / n
    return apart * apart * (m * n / (m + n))


def _together(lots: torch.Tensor) -> torch.Tensor:
    """The sums and the range of many lots, `[lots, 10]`, in one, `[10]`."""
    sums, number = lots[:, :8].sum(0), lots[:, _FINITE]
    mean = sums[_TOTAL] / sums[_FINITE].clamp(min=1)
    apart = torch.where(number > 0, lots[:, _TOTAL] / number.clamp(min=1) - mean, 0.0)
    sums[_SPREAD] += torch.dot(number, apart * apart)
    return torch.cat([sums, lots[:, 8:].amax(0)])


def _flat(values: torch.Tensor) -> torch.Tensor:
    """The values in one dimension in any order, without a copy for a tensor that is dense in some order."""
    if values.is_contiguous():
        return values.view(-1)
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    return values.permute(order).reshape(-1)


def _powers(flat: torch.Tensor) -> torch.Tensor:
    """Counts by power of two, `[277]`, without waiting for a device."""
    wide = flat.to(torch.float64)
    counted = wide.isfinite() & (wide != 0)
    # frexp gives a mantissa in [0.5, 1), so the power is one less than its exponent.
    _, exponents = torch.frexp(torch.where(counted, wide, 1.0))
    places = (exponents.long() - 1).clamp(_LOWEST, _HIGHEST) - _LOWEST
    counts = torch.zeros(_HIGHEST - _LOWEST + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, places, counted.long())
