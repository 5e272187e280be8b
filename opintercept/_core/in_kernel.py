"""`InKernel`, the second door for hooks: what a hook declares that compiled kernels can work for.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from opintercept._core.call import OpCall
from opintercept._core.call_site import CallSite
from opintercept._core.record import PendingRecord, Phase, Summary

Found = tuple[tuple[int, int, int, int, int, int, float, float], float, float, int | None, None, None]
"""What a kernel reads of a tensor: sums, minus the smallest and the largest finite value, a hash, and two Nones.

The sums are how many values there are, and how many are finite, NaN, not zero, and would become zero or too large in
the target dtype; the total of the finite ones, and the sum of their squared distances from their mean.
"""

Overwritten = list[tuple[Any, float, float]]
"""The tensors that a call is about to change, each with its smallest and its largest value."""

OVERWRITTEN = "overwritten"
"""The key by which `OpCall.once` has these, if a kernel has read them for `Work.finite`."""

ROLES = ("lhs", "rhs", "bias", "value", "output", "output.1", "output.2", "attn_mask", "grad_out", "logsumexp")


Place = tuple[str, int, Any, int | None]
"""Where a tensor lies: its device, a number for its storage, what keeps the number from being used again, a version."""

Range = tuple[float | None, float | None, Place | None]
"""A tensor's smallest and largest value, both NaN if it has one, or None if it was not read; and its place."""


class CallRanges(NamedTuple):
    """What was read of a call whose outputs are not finite, for `Work.later`.

    Attributes:
        arguments: The tensors among its arguments, also in lists, before it wrote to them.
        outputs: Those of its outputs that are for the program.
        written: What it has written to arguments that are no outputs, by their numbers.
        node: The node of autograd that was running, or an empty text.
        task: The number of the backward pass, as `begin_backward` was told it, or -1.
        unseen: What had run that no block sees: how much, and for hooks the names.
    """

    arguments: list[Range]
    outputs: list[Range]
    written: dict[int, Range]
    node: str
    task: int
    unseen: Any


class Work(NamedTuple):
    """What a kernel does for a hook with each call, in place of calling it.

    Attributes:
        rows: Whether `noted` is to be called.
        reads: The roles of the tensors whose values are read, some of `ROLES`.
        hashed: Whether to hash them, too.
        target: Counts values that become zero or are too large in another dtype, see `_native.values.Read`.
        finite: Whether to call the hook's `post` if an output is not finite, and otherwise not.
        waits: Whether `finite` may wait for a device. If not, the hook sees the calls there.
        later: Whether it need not: calls on a device go to the hook's `arrived` once the device has read their tensors,
            those whose outputs are not finite, as triples of a note, a `CallRanges` and what `learn` has returned.
            Where that was None, `finite` waits. `begin_backward` is called with the number of each backward pass.
        infs_later: Whether `later` holds for forward calls on the host, too, whose outputs have an Inf and no NaN.
        settings: Whether `learn` depends on torch's settings for the precision of products.
        times: Whether calls on a device are timed there, as `timed` of the note says.
        writes: Where to write a record of each call. Then `learn` returns the number of the call's signature there.
        checker: Makes the `Checker` that checks each product. The hook's `post` is called if one is suspect, or its
            `arrived` if a device says so later.
        keeps: Whether the hook takes many calls together: `keep` gets a `Chunk`, and the place in it of what the hook
            has learned. It does so if every hook of the interceptor does; otherwise each call goes to `noted`.
    """

    rows: bool = True
    reads: tuple[str, ...] = ()
    hashed: bool = False
    target: tuple[float, float] | None = None
    finite: bool = False
    waits: bool = True
    later: bool = False
    infs_later: bool = False
    settings: bool = False
    times: bool = False
    writes: RecordWriter | None = None
    checker: Checks | None = None
    keeps: bool = False


class Plan(NamedTuple):
    """What kernels do for all hooks of an interceptor, see `ring.h`.

    Attributes:
        work: What the hooks want together.
        places: Whether to find out where calls come from.
        links: Whether to link backward calls to forward ones.
        sink: Where records go, or None.
        written: The roles whose values these have.
        checker: Checks products, or None.
    """

    work: Work
    places: bool
    links: bool
    sink: Sink | None
    written: tuple[str, ...]
    checker: Checker | None


class CallKind(NamedTuple):
    """The calls of a `Chunk` that look alike and come from one place.

    Attributes:
        summary: What their records have in common.
        phase: Their pass.
        call_site: Where they come from.
        autocast: The dtype that autocast ran them in, or None.
        learned: What the hook has learned of them.
        read: The roles of which values were read.
        calls: How many calls.
        elapsed: The time of their operators on the host.
        seconds: The same, on the device of those that were timed there.
        idle: During how many of them a device may have waited for the host.
    """

    summary: Summary
    phase: Phase
    call_site: CallSite
    autocast: Any
    learned: Any
    read: list[str]
    calls: int
    elapsed: float
    seconds: float
    idle: int


class Chunk(Protocol):
    """Calls that kernels have noted, oldest first. They take 100 bytes each, and `row` makes objects of them.

    `kinds` makes a tuple of each `CallKind`, in the order of their first calls, for the hook of such a number. `add_up`
    adds what was read of a role to the sums of each kind, call by call.
    """

    def row(self, number: int, /) -> tuple[tuple[Any, ...], dict[str, Found], tuple[Any, ...]]: ...
    def opaque(self) -> list[tuple[Any, int]]: ...
    def size(self) -> int: ...
    def kinds(self, hook: int, /) -> list[tuple[Any, ...]]: ...
    def add_up(self, role: str, sums: list[Any], /) -> None: ...


class InKernel(Protocol):
    """A hook that compiled kernels can work for, so that a call costs about a microsecond and needs no Python.

    Kernels note its calls in C++, and the hook is notified of many at once: when it or another hook sees a call in
    Python, when `flush` is called, and when the block ends. It has the methods of other hooks as well. They see the
    first of the calls that look alike and come from one place, the calls that kernels cannot note, and all calls where
    there are no compiled kernels. So both ways must lead to the same results. Kernels work for the hooks of an
    interceptor if each of them has these methods.

    Subclasses are excluded, since they may override the methods of other hooks. A subclass that defines `work` itself
    is not.

    Example:
        >>> import torch
        >>> from opintercept import Work, intercept
        >>> class Largest:
        ...     reads = ("module",)
        ...     def __init__(self):
        ...         self.largest = {}
        ...     def post(self, call):
        ...         self.add(call.module, float(call.output.max()))
        ...     def add(self, module, value):
        ...         self.largest[module] = max(value, self.largest.get(module, value))
        ...     def work(self):
        ...         return Work(reads=("output",))
        ...     def learn(self, call):
        ...         return True
        ...     def noted(self, note, values, learned):
        ...         _, _, highest, *_ = values["output"]
        ...         self.add(note.call_site.module, highest)
        >>> largest = Largest()
        >>> with intercept(largest):
        ...     for scale in (1.0, 3.0, 2.0):
        ...         _ = torch.eye(2) @ torch.full((2, 2), scale)
        >>> largest.largest
        {'': 3.0}
    """

    def work(self) -> Work | None:
        """What to do for this hook; None if it has to see each call."""

    def learn(self, call: OpCall) -> Any:
        """What holds for all calls that look like this one, for `noted`; None if the hook has to see such calls.

        It is asked in Python, once for each kind of call, before `post` sees the call. Calls look alike whatever values
        their tensors have. Those of an operator that does not multiply also do if numbers with a fraction differ, such
        as the rate of an optimizer.
        """

    def noted(self, note: PendingRecord, values: Mapping[str, Found], learned: Any) -> None:
        """Take a call that has been noted.

        Args:
            note: What its record is made of; `note.record()` makes it.
            values: What was read, by role. Views and uninitialised memory are not read, nor what C++ cannot read.
            learned: What `learn` returned.
        """


class Sink(Protocol):
    """Takes the records of calls in C++, see `_engines/compiled/records.cpp`."""

    def open(self, calls: Any, tensors: Any, slots: int, number: int, /) -> None: ...
    def put(self, call: bytes, tensors: bytes, /) -> None: ...
    def take(self, waits: bool, /) -> tuple[bytes, bytes, bytes] | None: ...
    def close(self) -> None: ...
    def forget_parent(self) -> None: ...


class RecordWriter(Protocol):
    """Writes records to files. `runs.RunRecorder` implements it."""

    def serve(self, make: Callable[[], Sink]) -> Sink:
        """Return where kernels put records, made and opened if there is none."""

    def number_of(self, place: CallSite) -> bytes:
        """Return the number by which a record names a call site."""


class Checker(Protocol):
    """The checker in C++, see `_engines/compiled/checker.cpp`."""

    def set_up(self, limit: float, exact: bool, every: int, signs_of: Any, form_of: Any, limits_of: Any, /) -> None: ...
    def taken(self) -> tuple[Any, Any, bool] | None: ...
    def forget(self, rhs: Any, wide: bool, /) -> None: ...
    def counts(self) -> tuple[int, int, list[tuple[Any, int]]]: ...
    def clear(self) -> None: ...


class Checks(Protocol):
    """Has products checked. `hooks.Checksum` implements it."""

    def use(self, make: Callable[[], Checker]) -> Checker:
        """Return the checker of this hook, made and set up if there is none."""

    def arrived(self, calls: Any) -> None:
        """Take products of which a device says that a row is suspect: triples of a note, what it says, and None."""
