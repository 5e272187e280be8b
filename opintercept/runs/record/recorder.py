"""`RunRecorder`: records a run to a folder, which can be shown, compared with another and replayed."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_args

from opintercept._core.call import OpCall
from opintercept._core.call_site import CallSite
from opintercept._core.checks import check_choice, check_count
from opintercept._core.errors import OpInterceptError, OpInterceptWarning
from opintercept._core.exits import uninterrupted
from opintercept._core.in_kernel import ROLES, Sink, Work
from opintercept._core.noted import forget
from opintercept._core.pipeline import keep
from opintercept._core.record import PendingRecord, Summary
from opintercept._core.text import counted
from opintercept._engines.scope import unwatched
from opintercept._kit.per_call import PerCall
from opintercept._ops.slots import slots_of
from opintercept._ranks.rank import rank_and_world_size
from opintercept._values.content import LOTS, Content
from opintercept._values.copies import safetensors_for
from opintercept._values.late import Lot
from opintercept._values.read import is_captured
from opintercept.runs.record.claim import Claim, check_free, names_in, taken
from opintercept.runs.record.description import at_first_call, described, with_devices
from opintercept.runs.record.options import CallOptions
from opintercept.runs.record.values import Before, CallTensors, tensors_of
from opintercept.runs.record.writer import (
    BATCH_BYTES,
    INTERVAL,
    QueuedCall,
    Writer,
    leftovers,
    remove_leftovers,
    remove_run,
    write_info,
)
from opintercept.runs.store.flight import FLIGHT, MOST_SLOTS, NOTHING, Flight
from opintercept.runs.store.records import Encoder, writes_as_kernels
from opintercept.runs.store.run import INFO, RunInfo, TensorMode
from opintercept.runs.store.untrusted import MAX_TEXT

_NUMBER = struct.Struct("=I")
MOST_WAITING = 1 << 13  # calls of kernels that may wait to be written


class RunMember(Protocol):
    """One process of a program whose processes are recorded together."""

    @property
    def child(self) -> bool:
        """Whether another process of the program began before. Then the folder is made at the first call."""

    def about(self) -> dict[str, str] | None:
        """What `run.json` says of it, see `RunInfo.member`."""

    def folder(self) -> Path | None:
        """The folder of a child, made now, which nobody else has; None if the process is not to be recorded."""


class RunRecorder:
    """Writes every call to a folder: its record, its arguments, statistics and a content hash of its tensors.

    A thread writes at least once a second. If the disk is slower than the program, the program waits. Calls that are
    written stay readable if the program is killed. A full disk stops the recording with one warning. If the program
    has several processes, as under `torchrun`, each writes to a folder of its own, `rank0`, `rank1`, ... Calls of a
    forked child are not written. Wrap the recorder in `when` to record some calls only.

    Calls that a CUDA graph captures compute nothing, so its replays are recorded: see `graphs` of `intercept`.

    Values on a CPU are read as soon as the operator returns. On another device they are reduced there, and copied while
    the program goes on, for 256 tensors at a time or once a second. In a backward pass, parameters are not read there
    again, unless autograd knows of a write to them since the forward call.

    Args:
        path: The folder, made if it is missing. `opintercept show`, `diff`, `report` and `replay` read it, and so
            does `runs.open_run`.
        tensors: `"none"` keeps records and the arguments that are not tensors. `"stats"` adds statistics and hashes of
            operands, outputs, masks, states and any other tensor that the operator reads.
            `"sample"` adds some values of each tensor, from the same places in every run. `"full"` adds all values,
            each content once, so that a call can be run again, except those of a dtype or layout that safetensors
            cannot hold.
        overwrite: Whether to delete a run that the folder holds when the block is entered.
        sample: How many values a sample has.
        flight: If given, the recorder keeps this many last calls, in a mapped file of fixed size, and takes no more
            time or memory however long the program runs. If the process is killed, the file stays and is read as a
            run, without the values of calls on devices other than the CPU; so it is while the program runs. If an
            exception leaves the block, the folder gets these calls with all values, and the operands of the call that
            raised it. If the block ends well, nothing is left.
        max_bytes: The most bytes that the folder may take; the recording stops there with one warning.
        member: Which process of a program this is, for one that records several.

    Attributes:
        path: The folder.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An unknown choice, a count below 1, or a folder that is not empty.
        ImportError: Keeping tensors needs safetensors and numpy, and one is not installed.

    Example:
        >>> import tempfile, torch
        >>> from opintercept import intercept, runs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with intercept(runs.RunRecorder(f"{folder}/run")):
        ...         _ = torch.nn.Linear(3, 2)(torch.zeros(4, 3))
        ...     call, = runs.open_run(f"{folder}/run").calls()
        >>> call.record.op, call.values["rhs"].count, call.values["lhs"].rms
        ('aten::addmm', 6, 0.0)
    """

    reads = ("record",)

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: TensorMode = "stats",
        *,
        overwrite: bool = False,
        sample: int = 64,
        flight: int | None = None,
        max_bytes: int | None = None,
        member: RunMember | None = None,
    ) -> None:
        check_choice("tensors", tensors, get_args(TensorMode))
        self.path = Path(path)
        self.tensors: TensorMode = tensors
        self.sample = check_count("sample", sample)
        self.flight = None if flight is None else check_count("flight", flight)
        if flight is not None and flight > MOST_SLOTS:
            raise ValueError(f"flight must be at most {MOST_SLOTS}, got {flight}; without it, every call is kept")
        self.max_bytes = None if max_bytes is None else check_count("max_bytes", max_bytes)
        if tensors in ("sample", "full") or flight is not None:
            safetensors_for("keeping tensors")
        self._overwrite = overwrite
        self._member = member
        self._waits = member is not None and member.child  # for the first call
        if not self._waits:
            self._check_free()
        self._writer: Writer | None = None
        self._closed: Writer | None = None  # that of the last block
        self._info: RunInfo | None = None
        self._folder = self.path
        self._entered = 0
        # With `flight`: the file; the entries with their tensors, if those are kept; the last one that raised.
        self._encoder = Encoder()
        self._flight = None if flight is None else Flight(flight, self._encoder)
        self._last: deque[QueuedCall] = deque(maxlen=self.flight)
        self._failed: QueuedCall | None = None
        self._sink: Sink | None = None  # where kernels put calls
        self._held: deque[QueuedCall] = deque()  # calls whose values a device computes, and those after them
        self._held_bytes, self._held_since = 0, 0.0
        self._tensors = CallTensors(self, tensors, sample, keeps_failed=flight is not None, name_of=self._name_of)
        self._before: PerCall[Before] = PerCall()
        self._options = CallOptions()
        self._lock = threading.RLock()
        self._outside: BaseException | None = None
        self._process = os.getpid()
        self._told = False
        self._claim: tuple[RunInfo, Claim] | None = None  # to the folder, with `flight`
        self._made = False  # whether this recorder has made that folder

    def _check_free(self) -> None:
        """Refuse a folder that holds something already, or an older run that readers would mix with this one."""
        folder, _, world_size = self._own()
        if self._member is not None and folder == self.path:
            if os.path.lexists(folder / INFO):
                raise taken(folder)
            return  # whoever began the program has looked, and its children may have folders in there by now
        if world_size > 1 and not self._overwrite and (found := leftovers(self.path, world_size)):
            raise taken(found[0])
        check_free(folder, overwrite=self._overwrite)

    def _own(self) -> tuple[Path, int, int]:
        """The folder of this process, its rank and the number of processes."""
        rank, world_size = rank_and_world_size()
        alone = world_size == 1 or (self._member is not None and self._member.child)
        return (self.path if alone else self.path / f"rank{rank}"), rank, world_size

    @property
    def calls(self) -> int:
        """How many calls are on disk: all of them, once the block has been left."""
        writer = self._writer or self._closed
        return 0 if writer is None else writer.calls

    @property
    def nbytes(self) -> int:
        """How many bytes the folder takes; only those of this process if there are several."""
        writer = self._writer or self._closed
        return 0 if writer is None else writer.nbytes

    def enter(self) -> None:
        """Make the folder and start to write, or continue the run of this recorder's last block."""
        begun: list[bool] = []
        info = self._info or self._described()  # here, since it imports
        try:
            uninterrupted(partial(self._begin, sys.exception(), info, begun))
        except BaseException:
            if begun:
                uninterrupted(partial(self._end, None, []))
            raise

    def _begin(self, outside: BaseException | None, info: RunInfo, begun: list[bool]) -> None:
        if self._process != os.getpid():
            if self._entered or self._info is not None:
                return  # in a forked child: the run belongs to the parent
            self._process, self._lock = os.getpid(), threading.RLock()
            if self._flight is not None:
                self._flight.forget_parent()
            if self._sink is not None:
                self._sink.forget_parent()
        with self._lock:
            if not self._entered:  # otherwise another interceptor's block is active
                self._outside = outside
                if not self._waits:
                    self._open(info)
            self._entered += 1
        begun.append(True)

    def _described(self) -> RunInfo:
        return described(self.tensors, *self._own()[1:], None if self._member is None else self._member.about())

    def _open(self, info: RunInfo) -> None:
        if self._flight is None:
            self._start(info)
        else:
            self._take_off(self._flight, info)

    def _wake(self) -> None:
        """Make the folder of a child, and begin to write, at its first call."""
        with self._lock:
            folder = None if self._member is None or not self._waits else self._member.folder()
            self._waits = False
            if folder is None:
                return
            self.path = self._folder = folder
            try:
                uninterrupted(partial(self._open, self._described()))
            except (OpInterceptError, OSError, ValueError) as error:  # a full disk
                text = f"the calls of process {os.getpid()} are not recorded: {error}"
                warnings.warn(text, OpInterceptWarning, stacklevel=4)

    def _start(self, info: RunInfo) -> None:
        self._stop()  # if nobody has ended the last block
        if self._closed is not None and self._closed.failure is not None:
            return  # the recording has stopped
        self._write(info, self._claimed())

    def _write(self, info: RunInfo, claim: Claim) -> None:
        try:
            writer = Writer(self._folder, info, self.max_bytes, self._encoder, self._closed, claim)
            writer.start()
        except BaseException:
            claim.release()
            raise
        self._info, self._writer = info, writer
        self._open_sink()

    def _claimed(self) -> Claim:
        """Claim the folder of a new run, or that of the run that this recorder has begun."""
        folder, _, world_size = self._own()
        self._made = not folder.exists()
        if self._info is None:
            self._check_free()
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = self._folder
            if self._closed is None or not self._closed.is_there():
                raise OpInterceptError(
                    f"{str(folder)!r} no longer holds the run that this recorder began; make a new RunRecorder"
                )
        claim = Claim(folder)
        try:
            if self._info is None:
                self._check_free()  # again: from here on no other recorder can begin a run
                if names_in(folder) and self._overwrite:
                    remove_run(folder, claimed=True)
                if self._overwrite and world_size > 1:
                    remove_leftovers(self.path, world_size)
        except BaseException:
            claim.release()
            raise
        self._folder = folder
        return claim

    def exit(self) -> None:
        """Write what is left; with `flight`, write the last calls if an exception ends the block."""
        begun: list[bool] = []
        try:
            uninterrupted(partial(self._end, sys.exception(), begun))
        except BaseException as exception:
            if not begun:
                uninterrupted(partial(self._end, exception, begun))
            raise
        if self._closed is not None:
            self._tell(self._closed)

    def _end(self, exception: BaseException | None, begun: list[bool]) -> None:
        begun.append(True)
        if self._process != os.getpid():
            return
        with self._lock:
            self._entered -= 1
            if self._entered:
                return
            try:
                if self._flight is not None:
                    self._land(self._flight, failed=exception is not None and exception is not self._outside)
            finally:
                self._outside = None
                self._stop()

    def _take_off(self, flight: Flight, info: RunInfo) -> None:
        """Make the file of the last calls, in the folder that a run of them would have."""
        self._land(flight, failed=False)  # if nobody has ended the last block
        claim = self._claimed()
        try:
            if self._info is None:  # the files of the last block are gone, and kernels know numbers of theirs
                self._encoder.forget()
                forget()
            write_info(self._folder, info, finished=False)
            flight.open(self._folder)
        except BaseException:
            claim.release()
            raise
        self._claim = info, claim

    def _land(self, flight: Flight, *, failed: bool) -> None:
        """Remove the files of the last calls; write them if the block has failed."""
        last = NOTHING
        try:
            last = flight.close(self._folder)
        finally:
            calls, failing = [*self._last], self._failed
            self._last.clear()
            self._failed = None
            fails = failed and bool(calls or failing or len(last.calls))
            may_write = self._closed is None or self._closed.failure is None
            claimed = self._give_back(goes_on=fails and may_write)
        if claimed is None:
            return
        self._write(*claimed)
        if self._writer is not None:
            if not calls and failing is not None:
                calls = [failing]
            with unwatched():
                LOTS.send()
            known = {call.note.index for call in calls}
            rest = last.calls[[index not in known for index in last.calls["index"].tolist()]]
            for call in calls:
                earlier = rest["index"] < call.note.index
                if earlier.any():
                    self._writer.put(last._replace(calls=rest[earlier]))
                    rest = rest[~earlier]
                self._writer.put(call)
            if len(rest):
                self._writer.put(last._replace(calls=rest))

    def _give_back(self, *, goes_on: bool) -> tuple[RunInfo, Claim] | None:
        """Remove the files of the last calls, and let others write to the folder, unless this recorder goes on."""
        claimed, self._claim = self._claim, None
        if claimed is None:
            return None
        with contextlib.ExitStack() as stack:
            stack.callback(claimed[1].release)
            for name in FLIGHT:
                (self._folder / name).unlink(missing_ok=True)
            if goes_on:
                stack.pop_all()
                return claimed
            if self._info is None:
                remove_run(self._folder, claimed=True, alone=True)
            else:  # an exception has ended an earlier block, and the folder has its calls
                write_info(self._folder, self._info, finished=True)
        if self._made:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
        return None

    def _stop(self) -> None:
        writer = self._writer
        if writer is None or self._process != os.getpid():
            return
        if self._sink is not None:
            self._sink.close()
        self._hand_over(due=True, last=True)
        writer.close()
        self._writer, self._closed = None, writer

    def _tell(self, writer: Writer) -> None:
        if writer.failure is not None and not self._told:
            self._told = True
            warnings.warn(
                f"stopped recording to {str(self.path)!r} after {counted(writer.calls, 'call')}: {writer.failure}",
                OpInterceptWarning,
                stacklevel=3,
            )

    def pre(self, call: OpCall) -> None:
        """Read the operands that the operator is about to overwrite."""
        if self._waits:
            self._wake()
        if before := self._tensors.overwritten(call):
            self._before.put(call, before)

    def work(self) -> Work | None:
        """Kernels read the values and write the records, unless tensors are kept."""
        if self.tensors in ("sample", "full") or not writes_as_kernels():
            return None
        stats = self.tensors == "stats"
        return Work(False, ROLES if stats else (), stats, writes=self)

    def serve(self, make: Callable[[], Sink]) -> Sink:
        """Let kernels write."""
        if self._sink is None:
            self._sink = make()
            self._open_sink()
        return self._sink

    def _open_sink(self) -> None:
        if self._sink is not None and self._flight is not None:
            self._flight.use(self._sink)
        elif self._sink is not None and self._writer is not None:
            self._sink.open(None, None, MOST_WAITING, 0)
            self._writer.sink = self._sink

    def number_of(self, place: CallSite) -> bytes:
        """The number of a call site, for kernels."""
        return self._numbered(self._encoder.site(place))

    def learn(self, call: OpCall) -> bytes | None:
        """The number of the call's signature, for kernels; None if it has more tensors than there is room for."""
        if self._waits:
            self._wake()
        tensors = tensors_of(call, whole=False, tokens={}) if self.tensors == "stats" else []
        slots = slots_of(role for role, _ in tensors)
        more = tuple(role for role, _ in tensors if role not in slots)
        if more and self._flight is not None:
            return None
        roles = tuple((role, tensor.numel(), True) for role, tensor in tensors)
        number = self._encoder.signature(call.note(), self._arguments(call, call.summary), roles)
        if more:
            self._encoder.without_slot[number] = more
        return self._numbered(number)

    def _numbered(self, number: int) -> bytes:
        if self._flight is not None:
            self._flight.write_texts()
        return _NUMBER.pack(number)

    def post(self, call: OpCall) -> None:
        """Record the call."""
        self._take(call, None)

    def error(self, call: OpCall, exception: BaseException) -> None:
        """Record a call that raised, with its operands if tensors are kept or `flight` is given."""
        self._take(call, exception)

    def replayed(self, note: PendingRecord, values: Sequence[Mapping[str, Content]]) -> None:
        """Record a call that a CUDA graph repeats."""
        if self._may_record():
            found: dict[str, Any] = dict(values[0]) if values else {}
            self._put(QueuedCall(note, found, [], {}, self._options.known(note.summary) or "{}", None, None))

    def _name_of(self, key: Any) -> str | None:
        return None if self._writer is None else self._writer.names.get(key)

    def _take(self, call: OpCall, exception: BaseException | None) -> None:
        before = self._before.take(call) or {}
        if not self._may_record():
            return
        error = None if exception is None else f"{type(exception).__name__}: {exception}"[:MAX_TEXT]
        note = call.note()
        entry = QueuedCall(note, {}, [], {}, self._arguments(call, note.summary), None, error)
        if self.tensors != "none" or (error and self.flight is not None):
            self._tensors.add(call, entry, before)
        if error is None and is_captured((call.args, call.kwargs, call.output)):  # replays compute it
            keep(call, self, partial(_of, entry.values))
        else:
            self._put(entry)

    def _may_record(self) -> bool:
        if self._waits:
            self._wake()
        writer = self._writer
        if self._process != os.getpid() or (self.flight is None and writer is None):
            return False
        if writer is not None and writer.failure is not None:
            if self._sink is not None:
                self._sink.close()  # kernels need not show each call from now on
            self._tell(writer)
            return False
        return True

    def _put(self, entry: QueuedCall) -> None:
        late = LOTS.is_used and any(content.at_hand is None for content in _contents(entry))
        if self._writer is not None:
            if late or self._held:
                self._hold(entry)
            else:
                self._writer.put(entry)
        elif self._flight is not None:
            if late or self.tensors in ("sample", "full"):
                self._last.append(entry)
            elif entry.error is not None:
                self._failed = entry
            # Those that a device still computes are there if an exception leaves the block, as that writes `_last`.
            values = {} if late else {role: content.read() for role, content in entry.values.items()}
            self._flight.put(entry.note, entry.arguments, values, entry.error)

    def _hold(self, entry: QueuedCall) -> None:
        """Hand calls to the writer, which runs no operators, when their values are on the way to the host."""
        with self._lock:
            if not self._held:
                self._held_bytes, self._held_since = 0, time.monotonic()
            self._held.append(entry)
            self._held_bytes += entry.nbytes
            due = self._held_bytes > BATCH_BYTES or time.monotonic() - self._held_since > INTERVAL
            self._hand_over(due=due)

    def _hand_over(self, *, due: bool, last: bool = False) -> None:
        writer = self._writer
        if self._held and due:
            with unwatched():
                LOTS.send()
        while writer is not None and self._held:
            if not (last or all(content.is_sent for content in _contents(self._held[0]))):
                break
            writer.put(self._held.popleft())

    def _arguments(self, call: OpCall, summary: Summary) -> str:
        known = self._options.known(summary)
        if known is None:
            self._describe()
            known = self._options.learn(call, summary)
        return known

    def _describe(self) -> None:
        """Complete the description with what the program has set up by now."""
        with self._lock:
            before = self._info if self._claim is None else self._claim[0]
            if before is None:
                return
            info = with_devices(before if self._options else at_first_call(before))
            if info == before:
                return
            if self._writer is not None:
                self._info = info
                self._writer.describe(info)
            elif self._claim is not None:
                self._claim = info, self._claim[1]
                with contextlib.suppress(OSError):
                    write_info(self._folder, info, finished=False)

    def __repr__(self) -> str:
        return f"RunRecorder({str(self.path)!r}, tensors={self.tensors!r})"


def _contents(entry: QueuedCall) -> list[Content]:
    return [each for each in entry.values.values() if isinstance(each, Content)]


def _of(values: dict[str, Any], lot: Lot) -> dict[str, Any]:
    """The values of a replay."""
    return {role: content.of(lot) if isinstance(content, Content) else content for role, content in values.items()}
