"""`Profile`: adds up what each module's matmuls cost, and tells in which precision they ran."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from itertools import accumulate
from os import PathLike
from typing import Any, ClassVar, NamedTuple

import torch

from opintercept._core.call import OpCall
from opintercept._core.in_kernel import CallKind, Chunk, Found, Work
from opintercept._core.pipeline import flush
from opintercept._core.record import PendingRecord, Timed
from opintercept._core.tables import Cells, Table
from opintercept._core.tensors import dtype_name, nested_tensors
from opintercept._core.text import counted, number, rate_text, write_csv
from opintercept._kit.copyable import Copyable
from opintercept._kit.per_call import PerCall
from opintercept._ops.table import row_of
from opintercept._values import on_device
from opintercept._values.precision import convolution_precision


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """All calls that agree in the fields up to `precision`.

    Attributes:
        module: Qualified name of the module; None if it is not known.
        op: The operator.
        shape: The GEMM, `"[64, 128] @ [128, 32]"`; for an operator without one, the shape of its left operand or of
            its output.
        dtype: The operands' dtype, `"bfloat16"`, or both if they differ, `"bfloat16, float32"`; without operands that
            of the output.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        autocast: The dtype that autocast ran the calls in, or None.
        precision: How torch may round float32 operands and sums: `torch.get_float32_matmul_precision()`, or the
            `fp32_precision` of the device's backend if the program has set that; on CUDA also the flags for
            reduced-precision reductions that are on. Of a convolution, the `conv.fp32_precision` of the backend.
        calls: How many calls.
        flops: Their floating-point operations; None if there is no formula for the operator.
        bytes: Bytes of their operands and outputs; None if a layout has no plain size.
        seconds: Their time: on a CPU the host's, on CUDA the device's.
        idle: During how many of the calls a CUDA device may have waited for the host, since it had done all before
            them by the time that their kernels were launched. Their time is an upper bound.
    """

    module: str | None
    op: str
    shape: str
    dtype: str
    phase: str
    autocast: str | None
    precision: str
    calls: int
    flops: int | None
    bytes: int | None
    seconds: float
    idle: int = 0

    @property
    def flops_per_second(self) -> float | None:
        """FLOP per second; None if the work or the time is unknown."""
        return self.flops / self.seconds if self.flops is not None and self.seconds else None

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity in FLOP per byte; None if the work or the size is unknown."""
        return self.flops / self.bytes if self.flops is not None and self.bytes else None


_Key = tuple[str | None, str, str, str, str, str | None, str]
# Shape, dtype, precision, FLOP and bytes, which are the same for calls that look alike.
_Learned = tuple[str, str, str, int | None, int | None]
# Calls, FLOP, bytes, seconds and idle of a row. It is replaced as a whole, so that an interrupt cannot add half a call.
_Sum = tuple[int, int | None, int | None, float, int]
_NOTHING: _Sum = (0, 0, 0, 0.0, 0)


class _Events(NamedTuple):
    """The time between two events that a device may not have reached yet, as `Timed` has it."""

    idle: bool
    started: Any
    ended: Any
    pool: list[Any]

    def found(self) -> tuple[float, bool]:
        self.ended.synchronize()
        seconds = self.started.elapsed_time(self.ended) / 1e3
        self.pool.extend((self.started, self.ended))
        return seconds, self.idle


class _Pending(NamedTuple):
    """A call whose time is not known yet."""

    key: _Key
    flops: int | None
    bytes: int | None
    timed: Timed


class Profile(Copyable, Table):
    """Adds up calls, work, bytes and time by module, operator, GEMM shape, dtype and phase.

    On a CPU, Profile measures host time. On CUDA it measures the time between two events on the stream, which it
    reads when you read the profile, so that no call waits for the device. A small product takes less than that on a
    device that waits for the host in between: `ProfileRow.idle` counts such calls, and the table has `<=` before their
    time. `str(profile)` is a table.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> profile = hooks.Profile()
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        >>> with intercept(profile):
        ...     model(torch.ones(2, 8)).sum().backward()
        >>> [(row.module, row.phase, row.shape, row.calls, row.flops) for row in profile.rows()[:2]]
        [('0', 'forward', '[2, 8] @ [8, 16]', 1, 512), ('1', 'forward', '[2, 16] @ [16, 4]', 1, 256)]
        >>> profile.by_phase()["backward"].flops
        1024
    """

    reads = ("module", "autocast")
    fresh: ClassVar = {"_lock": threading.RLock, "_started": PerCall, "_pending": deque, "_pool": list, "_kept": deque}
    _row = ProfileRow

    def __init__(self) -> None:
        self._sums: dict[_Key, _Sum] = {}
        # Reentrant, since a signal handler or a finalizer may call the hook from anywhere in the same thread.
        self._lock = threading.RLock()
        self._started: PerCall[Any] = PerCall()  # an event, on CUDA
        self._pending: deque[_Pending] = deque()
        self._pool: list[Any] = []
        self._kept: deque[CallKind] = deque()  # of noted calls that are not in the sums yet

    def pre(self, call: OpCall) -> None:
        """Record the first event of a call on CUDA."""
        if call.timed is not None:
            return
        tensors = nested_tensors((call.args, call.kwargs))  # a kernel of torch.compile has no left operand
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is not None and not torch.cuda.is_current_stream_capturing():
            on_device.is_entered(device)  # from now on, kernels note such calls
            self._started.put(call, self._event())

    def post(self, call: OpCall) -> None:
        """Add the call."""
        shape, dtype, precision, flops, size = self.learn(call)
        autocast = call.autocast
        cast = None if autocast is None else dtype_name(autocast)
        key = (call.module, call.op, shape, dtype, call.phase, cast, precision)
        started, timed = self._started.take(call), call.timed
        if started is not None:
            timed = _Events(started.query(), started, self._event(), self._pool)
        if timed is None:
            self._add(key, flops, size, call.elapsed or 0.0)
        else:
            self._sums.setdefault(key, _NOTHING)  # keeps the rows in the order of the calls
            self._pending.append(_Pending(key, flops, size, timed))

    def work(self) -> Work:
        """Kernels measure the time, on devices by the same events."""
        return Work(settings=True, times=True, keeps=True)

    def learn(self, call: OpCall) -> _Learned:
        """What a row tells of all calls that look like this one."""
        summary = call.summary  # computed once for calls that look alike
        return summary.shape, summary.dtype, _precision(call), summary.flops, summary.bytes

    def noted(self, note: PendingRecord, values: Mapping[str, Found], learned: _Learned) -> None:
        """Add a call that a kernel has noted."""
        shape, dtype, precision, flops, size = learned
        key = (note.call_site.module, note.summary.op, shape, dtype, note.phase, note.autocast_name, precision)
        self._add(key, flops, size, *(note.timed or (note.elapsed or 0.0,)))

    def keep(self, calls: Chunk, number: int) -> None:
        """Add calls that kernels have noted."""
        self._kept.extend([*map(CallKind._make, calls.kinds(number))])
        self._add_kept()

    def _add_kept(self) -> None:
        while True:
            try:
                kind = self._kept.popleft()
            except IndexError:  # none is left, or another thread or a signal handler took the last one
                return
            shape, dtype, precision, flops, size = kind.learned
            cast = None if kind.autocast is None else dtype_name(kind.autocast)
            key = (kind.call_site.module, kind.summary.op, shape, dtype, kind.phase, cast, precision)
            self._add(key, flops, size, kind.seconds, kind.idle, kind.calls)

    def _add(self, key: _Key, flops: int | None, size: int | None, seconds: float, idle: int = 0, of: int = 1) -> None:
        with self._lock:
            if key not in self._sums:
                self._sums[key] = _NOTHING
            # No function is called from here on, so no signal handler can add to the row in between.
            calls, all_flops, all_bytes, all_seconds, all_idle = self._sums[key]
            self._sums[key] = (
                calls + of,
                None if flops is None or all_flops is None else all_flops + flops * of,
                None if size is None or all_bytes is None else all_bytes + size * of,
                all_seconds + seconds,
                all_idle + idle,
            )

    def error(self, call: OpCall, exception: BaseException) -> None:
        """Forget the event of a call that raised."""
        self._started.take(call)

    def _event(self) -> Any:
        try:
            event = self._pool.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _settle(self) -> None:
        flush()
        self._add_kept()  # what an interrupt has left
        with self._lock:
            for _ in range(len(self._pending)):
                try:
                    pending = self._pending.popleft()
                except IndexError:  # a signal handler has read the rest
                    return
                self._add(pending.key, pending.flops, pending.bytes, *pending.timed.found())

    def _held(self) -> str:
        return counted(len(self._sums), "row")

    def rows(self) -> list[ProfileRow]:
        """The rows in the order of their first calls; waits for the device."""
        self._settle()
        with self._lock:
            sums = list(self._sums.items())
        return [ProfileRow(*key, *total) for key, total in sums if total[0]]

    def by_phase(self) -> dict[str, ProfileRow]:
        """Totals by phase."""
        return self._totals("phase", lambda row: [row.phase])

    def by_module(self) -> dict[str, ProfileRow]:
        """Totals by module, including its submodules; `""` is the whole program."""

        def with_ancestors(row: ProfileRow) -> list[str]:
            return ["", *accumulate(row.module.split("."), "{}.{}".format)] if row.module else [""]

        return self._totals("module", with_ancestors)

    def _totals(self, field: str, names: Callable[[ProfileRow], list[str]]) -> dict[str, ProfileRow]:
        groups: dict[str, list[ProfileRow]] = defaultdict(list)
        for row in self.rows():
            for name in names(row):
                groups[name].append(row)
        whole = ProfileRow("", "", "", "", "", None, "", 0, 0, 0, 0.0)
        return {
            name: replace(
                whole,
                **{field: name},
                calls=sum(row.calls for row in rows),
                flops=sum(row.flops or 0 for row in rows),
                bytes=sum(row.bytes or 0 for row in rows),
                seconds=sum(row.seconds for row in rows),
                idle=sum(row.idle for row in rows),
            )
            for name, rows in groups.items()
        }

    def audit(self) -> list[str]:
        """Findings about precision, one line each; empty if there are none.

        A finding is a module whose backward pass has another dtype than its forward pass, a product that ran in
        float32 while autocast cast others, or a product of operands with different dtypes.
        """
        findings = []
        passes: dict[str | None, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        rows = self.rows()
        casts = sorted({row.autocast for row in rows if row.phase == "forward" and row.autocast is not None})
        for row in rows:
            passes[row.module][row.phase].add(row.dtype)
            if ", " in row.dtype:
                findings.append(f"{row.module}: {row.op} mixes {row.dtype} in {row.phase}")
            if casts and row.phase == "forward" and row.autocast is None and row.dtype == "float32":
                findings.append(
                    f"{row.module}: {row.op} ran in float32 while autocast cast others to {', '.join(casts)}"
                )
        for module, dtypes in passes.items():
            if dtypes["backward"] and dtypes["forward"] and dtypes["backward"] != dtypes["forward"]:
                forward, backward = (", ".join(sorted(dtypes[phase])) for phase in ("forward", "backward"))
                findings.append(f"{module}: forward in {forward}, backward in {backward}")
        return list(dict.fromkeys(findings))

    def __getstate__(self) -> dict[str, Any]:
        self._settle()  # events cannot leave the process
        with self._lock:
            return super().__getstate__()

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the rows with a header line."""
        write_csv(path, [field.name for field in fields(ProfileRow)], map(astuple, self.rows()))

    def _cells(self) -> Cells:
        rows = sorted(self.rows(), key=lambda row: -row.seconds)
        total = sum(row.seconds for row in rows) or 1.0
        head = ["module", "op", "shape", "dtype", "phase", "calls", "MFLOP", "MB", "ms", "share", "GFLOP/s", "FLOP/B"]
        cells = [
            [
                "?" if row.module is None else row.module or "-",
                row.op.removeprefix("aten::"),
                row.shape,
                row.dtype if row.autocast is None else f"{row.dtype} (autocast)",
                row.phase,
                str(row.calls),
                number(row.flops, 1e6),
                number(row.bytes, 1e6),
                "<=" * bool(row.idle) + number(row.seconds, 1e-3),
                f"{row.seconds / total:.1%}",
                ">=" * bool(row.idle) + rate_text(row.flops, row.bytes, row.seconds),
                number(row.intensity, 1),
            ]
            for row in rows
        ]
        return Cells(head, cells, left=5, shares=("share",))


def _precision(call: OpCall) -> str:
    lhs = call.operand("lhs")
    if lhs is not None and row_of(call.func).family == "convolution":
        return convolution_precision(lhs.device)
    try:
        words = [torch.get_float32_matmul_precision()]
    except RuntimeError:  # the program has set the fp32_precision of a backend
        backend: Any = torch.backends.cuda if lhs is not None and lhs.is_cuda else torch.backends.mkldnn
        words = [backend.matmul.fp32_precision]
    if lhs is not None and lhs.is_cuda:
        flags = torch.backends.cuda.matmul
        words += ["fp16 sums"] * bool(flags.allow_fp16_reduced_precision_reduction)
        words += ["bf16 sums"] * bool(flags.allow_bf16_reduced_precision_reduction)
    return ", ".join(words)
