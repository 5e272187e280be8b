"""The forward call behind a backward call, by autograd's sequence numbers, and whose gradient it computes.

Invariant: nothing here keeps a tensor or a graph alive. What cannot be told is None.
Reads autograd's private state.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

import torch

from opintercept._call import OpCall
from opintercept._ops.table import MATMUL, row_of
from opintercept._origin.graphs import GraphPlace
from opintercept._origin.place import NOWHERE, Place
from opintercept._origin.stack import custom_function
from opintercept._record import Phase

# -1 outside of `backward`. Private, like the rest below; without them (not seen from torch 2.11 to 2.15)
# importing fails here, at once and by name.
graph_task = torch._C._current_graph_task_id
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
_is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_ABOVE_PYTHON = torch._C.DispatchKey.Conjugate


class Link(NamedTuple):
    """What a forward call leaves behind for the backward calls that compute its gradients; no tensor.

    Attributes:
        index: The call's.
        op: Its operator.
        round: How many backward passes there had been.
        operands: Where its arguments begin in memory, 0 for what is no tensor.
        sure: Whether autograd was seen to record it, and not only to record something of its name.
        needed: Whether autograd knows one of its operands. A custom Function may have others, which it has cast.
    """

    index: int  # type: ignore[assignment]
    op: str
    round: int
    operands: tuple[int, ...]
    sure: bool
    needed: bool


class _ThreadLinks:
    """The links of one thread by autograd's sequence number, which the node of the gradient has too."""

    __slots__ = ("_seen", "links", "places", "shared")

    def __init__(self) -> None:
        # The newest number when a call was last looked at; the nodes up to it are not of a call that comes now.
        self._seen = _sequence_nr() - 1
        self.links: dict[int, Link] = {}
        self.places: dict[int, Place] = {}
        # Several calls under one node, of a custom Function or inside of a fused operator: which, cannot be told.
        self.shared: set[int] = set()

    def look(self, newest: int) -> bool:
        """Whether autograd has recorded something since the last look."""
        fresh = newest > self._seen
        self._seen = newest
        return fresh

    def share(self, number: int, place: Place | None) -> None:
        """Note that another call, from `place`, has the same node: what the two have in common can still be told."""
        self.shared.add(number)
        known = self.places.get(number)
        if known is not None and place is not None:
            self.places[number] = known.common(place)

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self.links[number]
            self.places.pop(number, None)
            self.shared.discard(number)


class Links:
    """The forward calls of one interceptor, for its backward calls to find.

    Attributes:
        wanted: Whether a hook reads where calls come from; nothing is noted without one.
        names_all: Whether calls that autograd does not record are named as well. A root that is not named in such
            a call would get its label when a hook reads it, and another label than an interceptor gives it whose
            hooks declare that they read names.
    """

    # Old links go when there are more than so many, those of the last two backward passes excepted, and
    # the oldest go in any case beyond the second number: a program that never calls backward.
    SOFT, HARD = 4096, 1 << 16
    THREADS = 64  # from so many on, those of threads that have ended go

    def __init__(self, owner: Callable[[], int | None], place: Callable[[Phase], Place]) -> None:
        self._owner = owner
        self._place = place
        # Autograd's numbers are per thread. By the thread's identity, for autograd's threads that work for it.
        self._threads: dict[int, _ThreadLinks] = {}
        self._local = threading.local()
        self._round = 0
        self._in_backward = False
        self.wanted = False
        self.names_all = False

    def begin(self) -> None:
        """Note that this thread begins to look: what autograd has recorded so far is of calls that were not seen."""
        if self.wanted:
            self._of_this_thread().look(_sequence_nr() - 1)

    def note(self, call: OpCall) -> None:
        """Remember a call whose gradient autograd may compute, and where a call of the forward pass comes from."""
        backward = call.phase == "backward"
        if backward:
            self._in_backward = True
        recording = torch.is_grad_enabled()
        function = None
        if not recording:
            if backward or _is_fwd_grad_enabled() or torch.is_inference_mode_enabled():
                # `no_grad` leaves forward-mode gradients on; a custom Function's forward has both off
                if self.names_all and not backward:
                    call.place = self._place(call.phase)
                return
            function = custom_function()
        if not backward:
            call.place = self._place(call.phase)
        operands = []
        needed = False
        for value in call.args:
            if isinstance(value, torch.Tensor):
                needed = needed or value.requires_grad
                operands.append(address(value))
            else:
                operands.append(0)
                if isinstance(value, (list, tuple)):
                    needed = needed or any(isinstance(t, torch.Tensor) and t.requires_grad for t in value)
        if isinstance(call.place, GraphPlace):
            needed = needed and function is None  # in a compiled graph one operand tells no more than another
        mine = self._of_this_thread()
        links = mine.links
        newest = _sequence_nr() - 1
        fresh = mine.look(newest)
        number = newest if function is None else function._sequence_nr()
        # Autograd knows a wrapper (DTensor), and not the tensors inside, which are the ones that come by here.
        inside = not needed and recording and _is_excluded(_ABOVE_PYTHON)
        other = links.get(number)
        if other is not None:
            if not needed or other.needed or not other.sure:
                if needed or (function is not None and not other.needed) or (inside and not other.sure):
                    # Inside of a wrapper the first product is that of the node; another one may have none.
                    mine.share(number, None if inside else call.place)
                return
            mine.forget([number])  # of a custom Function's products, the one whose operands autograd knows
        elif not needed and function is None and not (inside and fresh):
            return
        if self._in_backward and not backward:
            self._in_backward = False
            self._round += 1
            if len(links) > self.SOFT:
                mine.forget([n for n, link in links.items() if link.round < self._round - 2])
        elif len(links) > self.HARD:
            mine.forget(list(islice(links, self.HARD // 2)))
        # A tuple of plain values, which the garbage collector does not have to visit.
        links[number] = Link(call.index, call.op, self._round, tuple(operands), needed or function is not None, needed)
        if call.place is not None:
            mine.places[number] = call.place
        elif (behind := self.find()) is not None:
            mine.places[number] = behind[1]

    def _of_this_thread(self) -> _ThreadLinks:
        mine: _ThreadLinks | None = getattr(self._local, "links", None)
        if mine is None:
            # A thread may have the identity of one that has ended, whose links are not its own.
            mine = self._local.links = self._threads[threading.get_ident()] = _ThreadLinks()
            if len(self._threads) > self.THREADS:
                for ended in self._threads.keys() - sys._current_frames().keys():
                    del self._threads[ended]
        return mine

    def find(self) -> tuple[Link, Place, bool] | None:
        """The forward call whose gradient is being computed, its place, and whether it shares its node; or None."""
        node = _current_node()
        if node is None:
            return None
        thread = threading.get_ident()
        if thread not in self._threads:
            # A thread of autograd's own works for the one that called backward.
            thread = self._owner() or thread
        known = self._threads.get(thread)
        number = node._sequence_nr()
        link = None if known is None else known.links.get(number)
        if known is None or link is None or not _computes(node, link):
            return None
        return link, known.places.get(number, NOWHERE), number in known.shared


def address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a layout without one array
        return 0


_NODES = frozenset(name.partition("::")[2].replace("_", "") for name, row in MATMUL.items() if row.kind == "leaf")


def _computes(node: Any, link: Link) -> bool:
    """Whether the node can be that of the link's operator: another thread's numbers may be the same."""
    name = node.name().lower().rstrip("0123456789").removesuffix("backward")
    return (link.sure and name not in _NODES) or name == link.op.partition("::")[2].replace("_", "")


def grad_of(call: OpCall, link: Link) -> tuple[str | None, bool]:
    """The gradient of one operand is a product with the other one, which autograd has saved.

    With G the gradient of the output, that of lhs is `G @ rhs.T` and that of rhs `lhs.T @ G`; for an operand that
    is column-major autograd multiplies the other way round and transposes the product (`mm_mat1_backward` in its
    FunctionsManual.cpp).
    """
    roles = row_of(link.op).roles
    if "lhs" not in roles or "rhs" not in roles:
        return None, False
    if link.sure and not link.needed:
        return None, False  # operands that were cast may be gone by now, and others in their memory
    lhs, rhs = (link.operands[p] if (p := roles[r][0]) < len(link.operands) else 0 for r in ("lhs", "rhs"))
    used = {address(value) for value in call.args if isinstance(value, torch.Tensor)} - {0}
    if (lhs in used) == (rhs in used):
        return None, False
    left = call.operand("lhs")
    on_the_left = left is not None and address(left) in (lhs, rhs)
    return ("rhs", not on_the_left) if lhs in used else ("lhs", on_the_left)
