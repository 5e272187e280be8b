"""Links from backward calls to the forward calls whose gradients they compute, by autograd's sequence numbers.

Invariant: nothing here keeps a tensor or a graph alive. What is unknown is None. Reads autograd's private state.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

import torch

from opintercept._call import OpCall
from opintercept._ops.seams import is_seam
from opintercept._ops.table import OWN, ROWS, row_of
from opintercept._origin.compiled_graphs import GraphPlace
from opintercept._origin.place import NOWHERE, Place
from opintercept._origin.stack import custom_function
from opintercept._record import Phase

# -1 outside of `backward`. This and the names below are private. torch 2.11 to 2.15 have them; if one is missing, the
# import fails here and names it.
graph_task = torch._C._current_graph_task_id
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
_is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_ABOVE_PYTHON = torch._C.DispatchKey.Conjugate


class Link(NamedTuple):
    """What a forward call notes for the backward calls that compute its gradients.

    Attributes:
        index: The index of the forward call.
        op: Its operator.
        round: How many backward passes had begun before it.
        operands: The addresses of its arguments; 0 for arguments that are not tensors.
        sure: Whether autograd has recorded this call for certain, and not only an operator of its name.
        needed: Whether one of its operands needs a gradient. In a custom Function, which may have cast them, none may.
        wanted: The positions of the arguments that need a gradient.
    """

    index: int  # type: ignore[assignment]
    op: str
    round: int
    operands: tuple[int, ...]
    sure: bool
    needed: bool
    wanted: tuple[int, ...]


class _ThreadLinks:
    """The links of one thread, by the sequence number that autograd also gives to the node of the gradient."""

    __slots__ = ("_seen", "links", "open", "places", "shared")

    def __init__(self) -> None:
        # The newest number at the last call. Nodes up to it do not belong to the next call.
        self._seen = _sequence_nr() - 1
        self.links: dict[int, Link] = {}
        self.places: dict[int, Place] = {}
        # Numbers of nodes with several calls, in a custom Function or a fused operator. Which call it is, is unknown.
        self.shared: set[int] = set()
        # A seam that is running: its link, its place, and the newest number before it.
        self.open: tuple[Link, Place, int] | None = None

    def look(self, newest: int) -> bool:
        """Note the newest number, and return whether autograd has recorded anything since the last time."""
        fresh = newest > self._seen
        self._seen = newest
        return fresh

    def share(self, number: int, place: Place | None) -> None:
        """Note that another call, from `place`, has the same node. What their places have in common stays known."""
        self.shared.add(number)
        known = self.places.get(number)
        if known is not None and place is not None:
            self.places[number] = known.common(place)

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the links with these numbers."""
        for number in numbers:
            del self.links[number]
            self.places.pop(number, None)
            self.shared.discard(number)


class Links:
    """The forward calls of one interceptor, which its backward calls look up.

    Args:
        owner: As for `Origin`.
        place: Returns the place of the running call.

    Attributes:
        wanted: Whether a hook reads where calls come from. Otherwise nothing is noted.
        names_all: Whether calls that autograd does not record are named as well. Without that, a root would get its
            label only when a hook reads a name, and two interceptors could give it different ones.
    """

    # Beyond SOFT links, those from before the last two backward passes are dropped. Beyond HARD links, which a program
    # reaches that never calls backward, the older half is dropped.
    SOFT, HARD = 4096, 1 << 16
    THREADS = 64  # beyond this number, those of threads that have ended are dropped
    NODES = 64  # how many nodes of one seam are linked

    def __init__(self, owner: Callable[[], int | None], place: Callable[[Phase], Place]) -> None:
        self._owner = owner
        self._place = place
        # Autograd numbers nodes per thread. Keyed by the thread's identity, so that autograd's own threads find them.
        self._threads: dict[int, _ThreadLinks] = {}
        self._local = threading.local()
        self._round = 0
        self._in_backward = False
        self.wanted = False
        self.names_all = False

    def begin(self) -> None:
        """Note that this thread starts to watch. Whatever autograd has recorded before belongs to unseen calls."""
        if self.wanted:
            self._of_this_thread().look(_sequence_nr() - 1)

    def note(self, call: OpCall) -> None:
        """Note where a forward call comes from, and remember it if autograd may compute its gradient."""
        backward = call.phase == "backward"
        if backward:
            self._in_backward = True
        recording = torch.is_grad_enabled()
        function = None
        if not recording:
            if backward or _is_fwd_grad_enabled() or torch.is_inference_mode_enabled():
                # `no_grad` leaves forward-mode gradients on, and a custom Function's forward turns both off.
                if self.names_all and not backward:
                    call.place = self._place(call.phase)
                return
            function = custom_function()
        operands: list[int] = []
        wanted: list[int] = []
        needed = False
        for value in call.args:
            if isinstance(value, torch.Tensor):
                if value.requires_grad:
                    needed = True
                    wanted.append(len(operands))
                operands.append(address(value))
            else:
                operands.append(0)
                if isinstance(value, (list, tuple)):
                    needed = needed or any(isinstance(t, torch.Tensor) and t.requires_grad for t in value)
        if recording and is_seam(call.op):
            # Autograd records what the function runs, and has recorded none of it yet.
            if not backward:
                call.place = self._place(call.phase)
                link = Link(call.index, call.op, self._round, tuple(operands), True, needed, tuple(wanted))
                self._of_this_thread().open = (link, call.place, _sequence_nr() - 1)
            return
        call.place = self._link(
            call.op, call.index, call.phase, tuple(operands), tuple(wanted), needed, recording, function, call.place
        )

    def add(self, op: str, index: int, operands: tuple[int, ...], wanted: tuple[int, ...], place: Place) -> None:
        """Remember a forward call that autograd records.

        Args:
            op: The operator.
            index: The index of the call.
            operands: See `Link`.
            wanted: See `Link`.
            place: Where the call comes from.
        """
        self._link(op, index, "forward", operands, wanted, bool(wanted), True, None, place)

    def _link(
        self,
        op: str,
        index: int,
        phase: Phase,
        operands: tuple[int, ...],
        wanted: tuple[int, ...],
        needed: bool,
        recording: bool,
        function: Any,
        place: Place | None,
    ) -> Place | None:
        """Remember a call if autograd may compute its gradient, and return its place if that has been found out."""
        backward = phase == "backward"
        mine = self._of_this_thread()
        links = mine.links
        newest = _sequence_nr() - 1
        fresh = mine.look(newest)
        number = newest if function is None else function._sequence_nr()
        # With a wrapper such as DTensor, autograd knows the wrapper, and this call has the tensors inside of it.
        inside = not needed and recording and _is_excluded(_ABOVE_PYTHON)
        if not backward and (self.names_all or needed or function is not None or (inside and fresh)):
            if place is None:
                place = self._place(phase)  # reading the stack takes most of the time of a note
            if isinstance(place, GraphPlace):
                needed = needed and function is None  # in a compiled graph no operand tells more than another
        other = links.get(number)
        if other is not None:
            if not needed or other.needed or not other.sure:
                if needed or (function is not None and not other.needed) or (inside and not other.sure):
                    # Inside of a wrapper, the first product belongs to the node. Others may have no node.
                    mine.share(number, None if inside else place)
                return place
            mine.forget([number])  # autograd knows the operands of this one among a custom Function's products
        elif not needed and function is None and not (inside and fresh):
            return place
        if self._in_backward and phase == "forward":
            self._in_backward = False
            self._round += 1
            if len(links) > self.SOFT:
                mine.forget([n for n, link in links.items() if link.round < self._round - 2])
        elif len(links) > self.HARD:
            mine.forget(list(islice(links, self.HARD // 2)))
        # A tuple of plain values, so that the garbage collector need not visit it.
        sure = needed or function is not None
        links[number] = Link(index, op, self._round, operands, sure, needed, wanted)
        if place is not None:
            mine.places[number] = place
        elif (behind := self.find()) is not None:
            mine.places[number] = behind[1]
        return place

    def close(self) -> None:
        """Link the nodes that autograd has recorded while a seam ran: they compute gradients of its call."""
        mine = self._of_this_thread()
        if mine.open is not None:
            link, place, before = mine.open
            mine.open = None
            newest = _sequence_nr() - 1
            mine.look(newest)
            for number in range(before + 1, min(newest, before + self.NODES) + 1):
                mine.links[number] = link
                mine.places[number] = place

    def abandon(self) -> None:
        """Forget a seam that has not run."""
        self._of_this_thread().open = None

    def _of_this_thread(self) -> _ThreadLinks:
        mine: _ThreadLinks | None = getattr(self._local, "links", None)
        if mine is None:
            # Python may give a thread the identity of one that has ended, whose links are not its own.
            mine = self._local.links = self._threads[threading.get_ident()] = _ThreadLinks()
            if len(self._threads) > self.THREADS:
                for ended in self._threads.keys() - sys._current_frames().keys():
                    del self._threads[ended]
        return mine

    def find(self) -> tuple[Link, Place, bool] | None:
        """Find the forward call whose gradient is being computed.

        Returns:
            Its link, its place, and whether it shares its node with other calls; None if it is unknown.
        """
        node = _current_node()
        if node is None:
            return None
        self._in_backward = True
        thread = threading.get_ident()
        if thread not in self._threads:
            # A thread of autograd works for the thread that called backward.
            thread = self._owner() or thread
        known = self._threads.get(thread)
        number = node._sequence_nr()
        link = None if known is None else known.links.get(number)
        if known is None or link is None or not _computes(node, link):
            return None
        return link, known.places.get(number, NOWHERE), number in known.shared


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element, or 0 if it has none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a layout without one array
        return 0


_NODES = frozenset(name.partition("::")[2].replace("_", "") for name in OWN if ROWS[name].kind == "leaf")


def _computes(node: Any, link: Link) -> bool:
    """Whether the node can belong to the link's operator. Another thread may have a node of the same number."""
    name = node.name().lower().rstrip("0123456789").removesuffix("backward")
    if is_seam(link.op):
        return True  # a function may run any operators
    return (link.sure and name not in _NODES) or name == link.op.partition("::")[2].replace("_", "")


def grad_of(operands: Iterable[int], left: int, link: Link) -> tuple[str | None, bool]:
    """Return the operand of the link whose gradient a backward call computes, and whether it computes the transpose.

    The gradient of one operand is a product with the other, which autograd has saved. If G is the gradient of the
    output, that of lhs is `G @ rhs.T` and that of rhs is `lhs.T @ G`. For a column-major operand, autograd swaps the
    factors and transposes the product (`mm_mat1_backward` in FunctionsManual.cpp).

    Args:
        operands: The addresses of the backward call's tensors.
        left: That of its left operand.
        link: The forward call.
    """
    row = row_of(link.op)
    roles = row.roles
    if "lhs" not in roles or "rhs" not in roles or row.family == "convolution":
        return None, False  # one call computes both gradients of a convolution, or several a part of one each
    if link.sure and not link.needed:
        return None, False  # operands that were cast may have been freed, and others may be in their memory
    lhs, rhs = (link.operands[p] if (p := roles[r][0]) < len(link.operands) else 0 for r in ("lhs", "rhs"))
    used = {*operands} - {0}
    wanted = [role for role in ("lhs", "rhs") if roles[role][0] in link.wanted]
    if len(wanted) == 1 and row.family != "foreign":
        lhs, rhs = (0, rhs) if wanted == ["lhs"] else (lhs, 0)  # not saved, and others may be in its memory
    if (lhs in used) == (rhs in used):
        # Another library may multiply with a copy of an operand, such as a weight that it dequantises again.
        sure = row.family == "foreign" and len(wanted) == 1 and lhs not in used
        return (wanted[0] if sure else None), False
    on_the_left = left != 0 and left in (lhs, rhs)
    if lhs not in used:
        return "lhs", on_the_left
    return "rhs", on_the_left if row.summed("rhs") == -1 else not on_the_left  # a weight of [n, k] is transposed
