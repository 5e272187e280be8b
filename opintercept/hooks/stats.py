"""`Stats`: what the values of every module's operands and outputs look like, added up without waiting for a device."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from os import PathLike
from typing import Any, NamedTuple

import torch

from opintercept._call import OpCall, describe, dtype_name
from opintercept._errors import HookError, OpInterceptError
from opintercept._table import aligned, write_csv
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
# Devices whose values are read at once; the sums of others stay there.
_ON_HOST = ("cpu",)
# Powers of two that a histogram tells apart: those of bfloat16 and float32, the ends for all beyond.
_LOWEST, _HIGHEST = -149, 127


class _Cell:
    """The sums of one row: in Python for the CPU's tensors, in a few tensors a device for the others."""

    __slots__ = ("calls", "channels", "devices", "histogram", "range", "sums")

    def __init__(self) -> None:
        self.calls = 0
        self.sums = [0.0] * 8
        self.range = [-math.inf, -math.inf]
        self.devices: dict[torch.device, list[torch.Tensor]] = {}
        self.histogram: torch.Tensor | None = None
        self.channels: torch.Tensor | None = None

    def add(self, sums: list[float], low: float, high: float) -> None:
        between = _between(self.sums, sums)
        self.sums = [mine + theirs for mine, theirs in zip(self.sums, sums, strict=True)]
        self.sums[_SPREAD] += between
        self.range = [max(self.range[0], low), max(self.range[1], high)]

    def add_device(self, sums: torch.Tensor) -> None:
        """The same for sums and range in one tensor, `[10]`, which stays on its device."""
        lots = self.devices.setdefault(sums.device, [])
        lots.append(sums)
        if len(lots) == _BATCH:
            self.devices[sums.device] = [_together(torch.stack(lots))]

    def read(self) -> None:
        """Bring in what the devices have added up; waits for them."""
        for device, lots in self.devices.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # calls may have come on any stream
            for *sums, low, high in torch.stack(lots).tolist():
                self.add(sums, low, high)
        self.devices.clear()
        for name in ("histogram", "channels"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor.cpu())

    def merge(self, other: _Cell) -> None:
        """Add another cell; both have been read."""
        self.calls += other.calls
        self.add(other.sums, *other.range)
        if other.histogram is not None:
            self.add_histogram(other.histogram)
        if other.channels is not None:
            self.add_channels(other.channels)

    def add_histogram(self, counts: torch.Tensor) -> None:
        self.histogram = counts if self.histogram is None else self.histogram.to(counts.device) + counts

    def add_channels(self, absmax: torch.Tensor) -> None:
        if self.channels is None:
            self.channels = absmax
        elif self.channels.shape != absmax.shape:
            raise HookError(
                "channels must name an operand whose last dimension stays the same from call to call, "
                f"got {absmax.shape[0]} channels after {self.channels.shape[0]}; choose calls with hooks.when(...)"
            )
        else:
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

    asks_origin = True

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
            if channels not in OPERANDS:
                raise ValueError(f"channels must be one of {', '.join(OPERANDS)}, got {channels!r}")
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
        self._window: dict[_Key, _Cell] = {}
        self._totals: dict[_Key, _Cell] = {}
        self._waiting: dict[int, tuple[list[_Cell], list[torch.Tensor]]] = {}
        self._held = 0  # values that wait
        self._lock = threading.Lock()
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
        values = stored_values(tensor)
        key = _Key(call.module, call.op, operand, call.phase)
        with self._lock:
            if values is None or captured(values, "Stats"):
                self.skipped += 1
                return
            cell = self._window.get(key) or _Cell()
            try:
                self._add(cell, values, tensor.size(-1) if operand == self._channels and tensor.dim() else None)
            except torch.OutOfMemoryError:
                raise
            except HookError:
                raise
            except RuntimeError:  # vmap: one value for a whole batch cannot be read
                self.skipped += 1
            else:
                self._window[key] = cell
                cell.calls += 1

    def _add(self, cell: _Cell, values: torch.Tensor, width: int | None) -> None:
        device = values.device.type
        if device == "mps":  # has no float64
            device, values = "cpu", values.cpu()
        if width and values.numel():
            exact = values if values.is_floating_point() and values.element_size() > 1 else values.to(torch.float64)
            cell.add_channels(exact.abs().reshape(-1, width).amax(0).to(torch.float64))
        flat = _flat(values)
        count = flat.numel()
        if device not in _ON_HOST:
            for part in flat.split(_PIECE) if count else ():
                cell.add_device(self._reduce(part))
                if self._histogram:
                    cell.add_histogram(_powers(part))
        elif count > _SMALL:
            for part in flat.split(_CHUNK) if count > _CHUNK else (flat,):
                cell.add(*self._read(part))
                if self._histogram:
                    cell.add_histogram(_powers(part))
        elif count:
            cells, rows = self._waiting.setdefault(count, ([], []))
            cells.append(cell)
            rows.append(flat.to(torch.float64, copy=True))
            self._held += count
            if len(rows) == _BATCH:
                self._read_batch(count)
            elif self._held > _WAITING:
                self._read_batches()

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

    def _read_batch(self, count: int) -> None:
        """Read the tensors of one size that wait, all at once; one that is not finite by itself."""
        cells, tensors = self._waiting.pop(count)
        self._held -= count * len(tensors)
        wide = torch.stack(tensors)
        low, high = torch.aminmax(wide, dim=1)
        nonzero, total = torch.count_nonzero(wide, dim=1), wide.sum(1)
        nothing = torch.zeros_like(total)
        misfits = self._misfits(wide.abs()) if self._target else (nothing, nothing)
        spread = torch.linalg.vector_norm(wide.sub_((total / count)[:, None]), dim=1).square()
        columns = [nonzero, *misfits, total, spread, -low, high]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for cell, tensor, (*sums, below, above) in zip(cells, tensors, rows, strict=True):
            if math.isfinite(sums[-2]):
                cell.add([count, count, 0, *sums], below, above)
            else:
                cell.add(*self._read(tensor))
            if self._histogram:
                cell.add_histogram(_powers(tensor))

    def _read_batches(self) -> None:
        for count in list(self._waiting):
            self._read_batch(count)

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
        with self._lock:
            cells = self._all()
        return [cell.row(key, self._target is not None) for key, cell in cells.items()]

    def step(self) -> list[StatsRow]:
        """End a step: return the rows of what has come since the last one, and add them to the totals."""
        with self._lock:
            self._totals = self._all()
            window, self._window = self._window, {}
        return [cell.row(key, self._target is not None) for key, cell in window.items()]

    def _all(self) -> dict[_Key, _Cell]:
        """Totals and window together, in cells of their own."""
        return self._copies(self._totals, self._window)

    def _copies(self, *lots: dict[_Key, _Cell]) -> dict[_Key, _Cell]:
        self._read_batches()
        copies: dict[_Key, _Cell] = {}
        for cells in lots:
            _merge(copies, cells)
        return copies

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
        with self._lock:
            cells = self._all()
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
        with other._lock:
            cells, skipped = other._all(), other.skipped
        with self._lock:
            _merge(self._window, cells)
            self.skipped += skipped

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
        with self._lock:
            mine = self._asked(), self.skipped, self._copies(self._totals), self._copies(self._window)
        everybody: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(everybody, mine, group)
        if len(asked := {theirs[0] for theirs in everybody}) > 1:
            raise ValueError(f"every rank must make its statistics with the same arguments, got {asked}")
        with self._lock:
            self._totals, self._window = {}, {}
            self.skipped = sum(skipped for _, skipped, _, _ in everybody)
            for _, _, totals, window in everybody:
                _merge(self._totals, totals)
                _merge(self._window, window)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = vars(self) | {"_totals": self._copies(self._totals), "_window": self._copies(self._window)}
        del state["_lock"]
        state.pop("pre", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _waiting={}, _held=0, _lock=threading.Lock())
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


def _merge(cells: dict[_Key, _Cell], others: dict[_Key, _Cell]) -> None:
    for key, other in others.items():
        mine = cells.setdefault(key, _Cell())
        mine.read()
        other.read()
        mine.merge(other)


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
