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
from opintercept.hooks._table import aligned, write_csv
from opintercept.hooks._values import captured, first_output, stored_values

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


# What a cell adds up, in this order; the range is kept beside it as (-min, max), which both grow.
_COUNT, _NAN, _INF, _NONZERO, _TOTAL, _SQUARES, _UNDERFLOW, _OVERFLOW = range(8)
# A reduction reads so many values at a time, so that their float64 form stays in the cache.
_CHUNK = 1 << 18
# Small tensors wait for others of their size, since a reduction of few values is nothing but overhead.
_SMALL, _BATCH = 1 << 13, 64
# Powers of two that a histogram tells apart: those of bfloat16 and float32, the ends for all beyond.
_LOWEST, _HIGHEST = -149, 127


class _Cell:
    """The sums of one row: in Python for the CPU's tensors, in two tensors a device for the others."""

    __slots__ = ("calls", "channels", "devices", "histogram", "range", "sums")

    def __init__(self) -> None:
        self.calls = 0
        self.sums = [0.0] * 8
        self.range = [-math.inf, -math.inf]
        self.devices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self.histogram: torch.Tensor | None = None
        self.channels: torch.Tensor | None = None

    def add(self, sums: Iterable[float], low: float, high: float) -> None:
        for place, value in enumerate(sums):
            self.sums[place] += value
        self.range = [max(self.range[0], low), max(self.range[1], high)]

    def read(self) -> None:
        """Bring in what the devices have added up; waits for them."""
        for sums, (low, high) in ((sums.tolist(), span.tolist()) for sums, span in self.devices.values()):
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
        count, nan, inf, nonzero, total, squares, underflow, overflow = self.sums
        finite = count - nan - inf
        nothing = finite <= 0
        mean = math.nan if nothing else total / finite
        square = math.nan if nothing else squares / finite
        low, high = (math.nan, math.nan) if nothing else (-self.range[0], self.range[1])
        return StatsRow(
            *key,
            calls=self.calls,
            count=int(count),
            nan=int(nan),
            inf=int(inf),
            min=low,
            max=high,
            mean=mean,
            std=math.nan if nothing else math.sqrt(max(0.0, square - mean * mean)),
            rms=math.sqrt(square) if square >= 0 else math.nan,
            absmax=max(-low, high),
            zeros=(count - nonzero) / count if count else math.nan,
            underflow=underflow / count if with_target and count else None,
            overflow=overflow / count if with_target and count else None,
        )


class Stats:
    """Streaming statistics of operands and outputs by module, operator and pass.

    Sums are in float64: of each value, of its square (`std` is the root of the mean square less the square of
    the mean), range and counts. On a CPU they are read in pieces that stay in the cache, small tensors many at
    once; on other devices they stay there until somebody looks, so that no call waits. `str(stats)` is a table.

    Operands are read before the operator runs, outputs after; of several outputs the first. Fake and vmapped tensors
    have no values, and a call that a CUDA graph captures has none yet: they are counted in `skipped`.

    Args:
        of: What to look at: any of `"lhs"`, `"rhs"`, `"bias"`, `"output"`.
        for_dtype: A floating-point dtype: count what it would round to zero (a magnitude of at most half its
            smallest subnormal number) or could not hold.
        histogram: Count magnitudes by powers of two as well; see `histogram`.
        channels: An operand of whose last dimension each entry gets its largest magnitude, for calibration: of
            `"lhs"` the input channels, of `"rhs"` the output channels; see `channels`.

    Raises:
        TypeError: `for_dtype` is no floating-point dtype.
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
            (channels,) = operands(channels)
            self._of = tuple(dict.fromkeys((*self._of, channels)))
        if for_dtype is not None and not (isinstance(for_dtype, torch.dtype) and for_dtype.is_floating_point):
            raise TypeError(f"for_dtype must be a floating-point torch.dtype, got {for_dtype!r}")
        self.skipped = 0
        self._target = for_dtype
        self._histogram = histogram
        self._channels = channels
        self._tiny = self._huge = 0.0
        if for_dtype is not None:
            info = torch.finfo(for_dtype)
            self._tiny, self._huge = info.smallest_normal * info.eps / 2, info.max
        self._window: dict[_Key, _Cell] = {}
        self._totals: dict[_Key, _Cell] = {}
        self._waiting: dict[int, tuple[list[_Cell], list[torch.Tensor]]] = {}
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
        if values is None or captured(values, "Stats"):
            self.skipped += 1
            return
        key = _Key(call.module, call.op, operand, call.phase)
        with self._lock:
            cell = self._window.get(key) or self._window.setdefault(key, _Cell())
            try:
                self._add(cell, values, operand)
            except torch.OutOfMemoryError:
                raise
            except HookError:
                raise
            except RuntimeError:  # vmap: one value for a whole batch cannot be read
                self.skipped += 1
            else:
                cell.calls += 1

    def _add(self, cell: _Cell, values: torch.Tensor, operand: str) -> None:
        if operand == self._channels and values.dim():
            magnitudes = values.to(torch.float32).abs() if values.element_size() == 1 else values.abs()
            if magnitudes.numel():
                cell.add_channels(magnitudes.reshape(-1, magnitudes.shape[-1]).amax(0).to(torch.float64))
        flat = _flat(values)
        if flat.device.type in ("cpu", "mps"):  # MPS has no float64
            if 0 < flat.numel() <= _SMALL:
                cells, rows = self._waiting.setdefault(flat.numel(), ([], []))
                cells.append(cell)
                rows.append(flat.to("cpu", torch.float64, copy=True))
                if len(rows) == _BATCH:
                    self._read_batch(flat.numel())
                return
            for part in flat.cpu().split(_CHUNK) if flat.numel() > _CHUNK else (flat.cpu(),):
                wide = part.to(torch.float64)
                cell.add(*self._read(wide))
                if self._histogram:
                    cell.add_histogram(_powers(wide))
            return
        sums, span = self._reduce(flat)
        if flat.device in cell.devices:
            cell.devices[flat.device][0].add_(sums)
            torch.maximum(cell.devices[flat.device][1], span, out=cell.devices[flat.device][1])
        else:
            cell.devices[flat.device] = sums, span
        if self._histogram:
            cell.add_histogram(_powers(flat))

    def _read(self, wide: torch.Tensor) -> tuple[list[float], float, float]:
        """The sums and the range of values on the CPU, in as few passes as can be."""
        count = wide.numel()
        if not count:
            return [0.0] * 8, -math.inf, -math.inf
        nan = inf = 0
        nonzero = int(torch.count_nonzero(wide))
        underflow, overflow = self._misfits(wide)
        total = float(wide.sum())
        if not math.isfinite(total):
            nan = int(wide.isnan().sum())
            finite = wide[wide.isfinite()]
            inf = count - nan - finite.numel()
            wide, total = finite, float(finite.sum())
        if not wide.numel():
            return [count, nan, inf, nonzero, 0.0, 0.0, underflow, overflow], -math.inf, -math.inf
        low, high = torch.aminmax(wide)
        squares = float(torch.dot(wide, wide))
        return [count, nan, inf, nonzero, total, squares, underflow, overflow], -float(low), float(high)

    def _read_batch(self, count: int) -> None:
        """Read the tensors of one size that wait, all at once; one that is not finite by itself."""
        cells, tensors = self._waiting.pop(count)
        wide = torch.stack(tensors)
        low, high = torch.aminmax(wide, dim=1)
        columns = [torch.count_nonzero(wide, dim=1), wide.sum(1), (wide * wide).sum(1), -low, high]
        if self._target is not None:
            magnitudes = wide.abs()
            columns += [((magnitudes <= self._tiny) & (magnitudes > 0)).sum(1), (magnitudes > self._huge).sum(1)]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for cell, tensor, (nonzero, total, squares, below, above, *misfits) in zip(cells, tensors, rows, strict=True):
            if math.isfinite(total):
                cell.add([count, 0, 0, nonzero, total, squares, *misfits], below, above)
            else:
                cell.add(*self._read(tensor))
            if self._histogram:
                cell.add_histogram(_powers(tensor))

    def _misfits(self, wide: torch.Tensor) -> tuple[float, float]:
        if self._target is None:
            return 0.0, 0.0
        magnitudes = wide.abs()
        underflow = ((magnitudes <= self._tiny) & (magnitudes > 0)).sum()
        return float(underflow), float((magnitudes > self._huge).sum())

    def _reduce(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as two tensors on the device, in float64, without waiting for it."""
        if flat.element_size() == 1 or not flat.is_floating_point():
            flat = flat.to(torch.float64)
        if not flat.numel():
            nothing = torch.zeros(8, dtype=torch.float64, device=flat.device)
            return nothing, torch.full_like(nothing[:2], -math.inf)
        finite = flat.isfinite()
        kept = torch.where(finite, flat, 0)
        nan = flat.isnan().sum()
        norm = torch.linalg.vector_norm(kept, dtype=torch.float64)
        underflow = overflow = torch.zeros((), device=flat.device)
        if self._target is not None:
            magnitudes = flat.abs()
            underflow = ((magnitudes <= self._tiny) & (magnitudes > 0)).sum()
            overflow = (magnitudes > self._huge).sum()
        parts = [
            torch.full((), flat.numel(), device=flat.device),
            nan,
            flat.numel() - finite.sum() - nan,
            torch.count_nonzero(flat),
            kept.sum(dtype=torch.float64),
            norm * norm,
            underflow,
            overflow,
        ]
        ends = [-torch.where(finite, flat, math.inf).amin(), torch.where(finite, flat, -math.inf).amax()]
        return torch.stack([s.to(torch.float64) for s in parts]), torch.stack([e.to(torch.float64) for e in ends])

    def rows(self) -> list[StatsRow]:
        """Everything so far, in the order in which it first came up; waits for the devices."""
        with self._lock:
            cells = self._all()
        return [cell.row(key, self._target is not None) for key, cell in cells.items()]

    def step(self) -> list[StatsRow]:
        """End a step: return the rows of what has come since the last one, and add them to the totals."""
        with self._lock:
            window = self._window
            self._totals, self._window = self._all(), {}
        return [cell.row(key, self._target is not None) for key, cell in window.items()]

    def _all(self) -> dict[_Key, _Cell]:
        """Totals and window together, in cells of their own."""
        for count in list(self._waiting):
            self._read_batch(count)
        merged: dict[_Key, _Cell] = {}
        for cells in (self._totals, self._window):
            for key, cell in cells.items():
                cell.read()
                merged.setdefault(key, _Cell()).merge(cell)
        return merged

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
            cells = other._all()
        self._merge(cells)

    def _asked(self) -> tuple[Any, ...]:
        target = None if self._target is None else dtype_name(self._target)
        return self._of, target, self._histogram, self._channels

    def _merge(self, cells: dict[_Key, _Cell]) -> None:
        with self._lock:
            for key, cell in cells.items():
                mine = self._window.setdefault(key, _Cell())
                mine.read()
                mine.merge(cell)

    def all_reduce(self, group: Any = None) -> None:
        """Add up over the ranks of a `torch.distributed` group, so that each has everybody's; all must call it.

        Raises:
            OpInterceptError: `torch.distributed` has not been initialised.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise OpInterceptError(
                "all_reduce needs torch.distributed, which is not initialised; call init_process_group first"
            )
        with self._lock:
            mine = {
                tuple(key): (cell.calls, cell.sums, cell.range, cell.histogram, cell.channels)
                for key, cell in self._all().items()
            }
        everybody: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(everybody, mine, group)
        with self._lock:
            self._window, self._totals = {}, {}
        for plain in everybody:
            cells = {}
            for key, state in plain.items():
                cell = cells[_Key(*key)] = _Cell()
                cell.calls, cell.sums, cell.range, cell.histogram, cell.channels = state
            self._merge(cells)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the rows with a header line."""
        write_csv(path, [field.name for field in fields(StatsRow)], map(astuple, self.rows()))

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
