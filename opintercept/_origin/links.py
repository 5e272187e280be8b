"""Links from backward calls to the forward calls whose gradients they compute, by autograd's sequence numbers.

Invariant: nothing here keeps a tensor or a graph alive. What is unknown is None. Reads autograd's private state.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from opintercept._core.call import OpCall
from opintercept._core.call_site import NOWHERE, CallSite
from opintercept._core.record import Phase
from opintercept._ops.patched_functions import is_patched
from opintercept._ops.table import OWN, ROWS, row_of
from opintercept._origin.compiled_graphs import GraphCallSite
from opintercept._origin.stack import current_node, custom_function, in_checkpoint

# -1 outside of `backward`. This and the names below are private. torch 2.11 to 2.15 have them; if one is missing, the
# import fails here and names it.
graph_task = torch._C._current_graph_task_id
_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
_is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_ABOVE_PYTHON = torch._C.DispatchKey.Conjugate
_Function: type[Any] = torch._C._FunctionBase
_Saved: type[Any] = torch._C._autograd.SavedTensor
_packing: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
threads: Callable[[], tuple[int, int | None]] | None = None
"""Tells the number of this thread and that of the thread that has made the running node, where there is the library."""


_Memory = weakref.ref[torch.UntypedStorage]


class Made(NamedTuple):
    """What tells the node of a call from other threads' nodes, beside the addresses of the call's operands."""

    task: int  # the graph task in which the call ran, or -1; its node can only run in a later one
    again: bool  # whether a checkpoint repeated the call; then its node can only run before the checkpoint is done
    node: int | None  # the identity of the node, if it is a custom Function's
    # The shape and strides of each argument that is a tensor, as the node saves them; None outside of graph tasks, and
    # if the program packs what nodes save.
    looks: tuple[Any, ...] | None


class Link(NamedTuple):
    """What a forward call notes for the backward calls that compute its gradients."""

    index: int  # type: ignore[assignment]
    op: str
    round: int  # how many backward passes had begun before it
    operands: tuple[int, ...]  # the addresses of its arguments; 0 for arguments that are not tensors
    sure: bool  # whether autograd has recorded this call for certain, and not only an operator of its name
    needed: bool  # whether an operand needs a gradient; in a custom Function, which may have cast them, none may
    wanted: tuple[int, ...]  # the positions of the arguments that need a gradient
    made: Made | None = None  # None for a call outside of graph tasks and custom Functions
    # The memory of each argument that needs no gradient, if the program packs what nodes save, as checkpoints do.
    memory: tuple[_Memory | None, ...] | None = None


class _Life:
    """Lives as long as a thread."""

    __slots__ = ("__weakref__",)


class ThreadLinks:
    """The links of one thread, by the sequence number that autograd also gives to the node of the gradient."""

    __slots__ = ("later", "links", "open", "places", "seen", "shared", "thread")

    def __init__(self) -> None:
        # The newest number at the last call. Nodes up to it do not belong to the next call.
        self.seen = _sequence_nr() - 1
        self.thread = None if threads is None else threads()[0]
        self.links: dict[int, Link] = {}
        self.places: dict[int, CallSite] = {}
        # Numbers of nodes with several calls, in a custom Function or a fused operator. Which call it is, is unknown.
        self.shared: set[int] = set()
        # Numbers of nodes after whose call others came without a node, with the place that all have in common. Either
        # one operator runs all of them, or the node is the first one's, and the others have no gradient, as `x > 0`.
        self.later: dict[int, CallSite] = {}
        # A patched function that is running: its link, its place, and the newest number before it.
        self.open: tuple[Link, CallSite, int] | None = None

    def look(self, newest: int) -> bool:
        """Note the newest number, and return whether autograd has recorded anything since the last time."""
        fresh = newest > self.seen
        self.seen = newest
        return fresh

    def share(self, number: int, place: CallSite | None) -> None:
        """Note that another call, from `place`, has the same node. What their places have in common stays known."""
        self.shared.add(number)
        known = self.places.get(number)
        if known is not None and place is not None:
            self.places[number] = known.common(place)

    def follow(self, number: int, place: CallSite | None) -> None:
        """Note that another call, from `place`, came after the one that has this node, and without a newer node."""
        known = self.later.get(number, self.places.get(number))
        if known is not None:
            self.later[number] = known if place is None else known.common(place)

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the links with these numbers."""
        for number in numbers:
            del self.links[number]
            self.places.pop(number, None)
            self.later.pop(number, None)
            self.shared.discard(number)


class Links:
    """The forward calls of one interceptor, which its backward calls look up. `owner` is as for `Origin`.

    `_engines/compiled/links.cpp` adds and finds most of those that kernels note.
    """

    __slots__ = (
        *("_by_number", "_in_backward", "_local", "_owner", "_place", "_round", "_threads"),
        *("names_all", "wanted"),
    )

    # Beyond SOFT links, those from before the last two backward passes are dropped. Beyond HARD links, which a program
    # reaches that never calls backward, the older half is dropped.
    SOFT, HARD = 4096, 1 << 16
    THREADS = 64  # beyond this number, those of threads that have ended are dropped
    NODES = 64  # how many nodes of one patched function are linked

    def __init__(self, owner: Callable[[], int | None], place: Callable[[Phase], CallSite]) -> None:
        self._owner = owner
        self._place = place
        # Autograd numbers nodes per thread. With the links, the identity of their thread and what dies with it: Python
        # may give the identity to a new thread while nodes of the old one are still there.
        self._threads: dict[ThreadLinks, tuple[int, weakref.ref[_Life]]] = {}
        self._by_number: dict[int | None, ThreadLinks] = {}  # those, by the number that autograd gives a thread
        self._local = threading.local()
        self._round = 0
        self._in_backward = False
        self.wanted = False  # whether a hook reads where calls come from; otherwise nothing is noted
        # Whether calls that autograd does not record are named as well. Without that, a root would get its label only
        # when a hook reads a name, and two interceptors could give it different ones.
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
                    call.call_site = self._place(call.phase)
                return
            function = custom_function()
        operands: list[int] = []
        wanted: list[int] = []
        listed = False  # whether a tensor in a list needs a gradient
        for position, value in enumerate(call.args):
            if isinstance(value, torch.Tensor):
                operands.append(address(value))
                if value.requires_grad:
                    wanted.append(position)
            else:
                operands.append(0)
                if isinstance(value, (list, tuple)):
                    listed = listed or any(isinstance(t, torch.Tensor) and t.requires_grad for t in value)
        needed = listed or bool(wanted)
        if recording and is_patched(call.op):
            # Autograd records what the function runs, and has recorded none of it yet.
            if not backward:
                call.call_site = self._place(call.phase)
                link = Link(call.index, call.op, self._round, tuple(operands), True, needed, tuple(wanted))
                self._of_this_thread().open = (link, call.call_site, _sequence_nr() - 1)
            return
        made = None if call.phase == "forward" and function is None else _made(call, function)
        packed = None if _packing(True) is None else call.args
        seen = tuple(operands), tuple(wanted), needed, recording, function
        call.call_site = self._link(call.op, call.index, call.phase, *seen, call.call_site, made, _memory(packed))

    def add(
        self,
        op: str,
        index: int,
        operands: tuple[int, ...],
        wanted: tuple[int, ...],
        place: CallSite,
        packed: tuple[Any, ...] | None,
        *,
        in_function: bool = False,
    ) -> None:
        """Remember a forward call that autograd records. `operands` and `wanted` are as in `Link`.

        `packed` are the arguments, if the program packs what nodes save. A call `in_function` is one that a custom
        Function makes, as compiled graphs are, outside of graph tasks.
        """
        function = custom_function() if in_function else None
        made = None if function is None else Made(-1, False, id(function), None)
        recording = not in_function
        memory = _memory(packed)
        self._link(op, index, "forward", operands, wanted, bool(wanted), recording, function, place, made, memory)

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
        place: CallSite | None,
        made: Made | None,
        memory: tuple[_Memory | None, ...] | None,
    ) -> CallSite | None:
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
            if isinstance(place, GraphCallSite):
                needed = needed and function is None  # in a compiled graph no operand tells more than another
        other = links.get(number)
        if other is not None:
            if function is None and not fresh and other.sure and not other.needed:
                return place  # no node is of this one: the newest is a custom Function's, such as a compiled graph's
            if not needed or other.needed or not other.sure:
                if needed and function is None and not fresh and other.needed and other.sure and op != other.op:
                    if other.op == "aten::clone" and op.endswith("_") and number - 1 not in links:
                        # `clamp_` saves a clone of what it overwrites, with a node after its own.
                        links[number - 1] = Link(index, op, self._round, operands, False, needed, wanted, made, memory)
                        if place is not None:
                            mine.places[number - 1] = place
                        return place
                    mine.follow(number, place)
                elif needed or (function is not None and not other.needed) or (inside and not other.sure):
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
        # Mostly a tuple of plain values, so that the garbage collector need not visit it.
        sure = needed or function is not None
        links[number] = Link(index, op, self._round, operands, sure, needed, wanted, made, memory)
        if place is not None:
            mine.places[number] = place
        elif (found := self.find()) is not None:
            mine.places[number] = found[1]
        return place

    def close(self) -> None:
        """Link the nodes that autograd recorded while a patched function ran: they compute gradients of its call."""
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
        """Forget a patched function that has not run."""
        self._of_this_thread().open = None

    def _of_this_thread(self) -> ThreadLinks:
        mine: ThreadLinks | None = getattr(self._local, "links", None)
        if mine is None:
            mine = self._local.links = ThreadLinks()
            life = self._local.life = _Life()
            self._threads[mine] = threading.get_ident(), weakref.ref(life)
            self._by_number[mine.thread] = mine
            if len(self._threads) > self.THREADS:
                for links, (_, life_of) in tuple(self._threads.items()):
                    if life_of() is None:
                        self._threads.pop(links, None)
                        if links.thread is not None and self._by_number.get(links.thread) is links:
                            del self._by_number[links.thread]
        return mine

    def find(self) -> tuple[Link, CallSite, bool] | None:
        """Find the forward call whose gradient is being computed, its place, and whether others share its node."""
        node = current_node()
        if node is None:
            return None
        self._in_backward = True
        number = node._sequence_nr()
        known: ThreadLinks | None = getattr(self._local, "links", None)
        if known is None or len(self._threads) > 1:
            known = self._maker(node, number, known)
        link = None if known is None else known.links.get(number)
        if known is None or link is None or not _computes(node, link):
            return None
        if link.memory is not None:
            link = link._replace(operands=_in_place(node, link.operands, link.memory))
        later = known.later.get(number)
        if later is not None and number not in known.shared and not is_of(node.name(), link.op, False):
            return link, later, True
        return link, known.places.get(number, NOWHERE), number in known.shared

    def _maker(self, node: Any, number: int, mine: ThreadLinks | None) -> ThreadLinks | None:
        """Return the links of the thread that has made a node, or None if that cannot be told.

        Each thread numbers its nodes from 0, and a node tells its thread in C++ only. Autograd's own threads run nodes
        of others and, where a graph is made in the backward pass, some of their own. `mine` is of this thread.
        """
        if threads is not None and None not in self._by_number:
            return self._by_number.get(threads()[1])
        own = None if mine is None else mine.links.get(number)
        if own is not None and _computes(node, own) and _evidence(node, own) >= ALL:
            return mine
        able = [(each, link) for each in tuple(self._threads) if (link := each.links.get(number)) is not None]
        able = [(each, link) for each, link in able if _computes(node, link)]
        if len(able) == 1 and number >= _sequence_nr():
            return able[0][0]  # this thread has not come to that number, and no other one has a link
        judged = [(_evidence(node, link), link.index, each) for each, link in able]
        best = max(judged, key=itemgetter(0, 1), default=(NOT, 0, None))
        if best[0] >= ALL:
            return best[2]  # the newest: older ones of the same operands have been freed
        left = [each for evidence, _, each in judged if evidence == best[0] != NOT]
        if len(left) > 1 and all(each.links[number].made is None for each in left):
            caller = self._owner() or threading.get_ident()
            alive = [each for each, (ident, life) in tuple(self._threads.items()) if ident == caller and life()]
            left = [each for each in left if each in alive]
        return left[0] if len(left) == 1 else None


def running_node() -> str:
    """The name of the node that autograd runs in this thread, without its number, or an empty text."""
    node = current_node()
    return "" if node is None else str(node.name()).rstrip("0123456789")


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element, or 0 if it has none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a layout without one array
        return 0


def _made(call: OpCall, function: Any) -> Made:
    task = graph_task()
    looks = None
    if task != -1 and _packing(True) is None:
        looks = tuple((t.shape, t.stride()) if isinstance(t, torch.Tensor) else None for t in call.args)
    return Made(task, call.phase == "recompute", None if function is None else id(function), looks)


def _saved(node: Any, link: Link) -> list[tuple[int, Any]]:
    """What a node has saved of the link's operands, by their positions. Not unpacked, which could run a checkpoint."""
    if not hasattr(_Saved, "unpack_hook"):  # torch 2.11 does not tell
        return []
    roles = row_of(link.op).roles.values()
    found = ((position, getattr(node, f"_raw_saved_{name}", None)) for position, name in roles)
    return [(at, saved) for at, saved in found if isinstance(saved, _Saved) and at < len(link.operands)]


def _memory(packed: tuple[Any, ...] | None) -> tuple[_Memory | None, ...] | None:
    if packed is None:
        return None
    free = (t if isinstance(t, torch.Tensor) and not t.requires_grad and address(t) else None for t in packed)
    return tuple(None if tensor is None else weakref.ref(tensor.untyped_storage()) for tensor in free)


def _in_place(node: Any, operands: tuple[int, ...], memory: tuple[_Memory | None, ...]) -> tuple[int, ...]:
    """The operands without those that have been packed: they come back elsewhere, and others may be there.

    Weights stay where they are. So does what needs no gradient, as long as its memory is there.
    """
    leaves = _leaves(node)
    held = (each is not None and each() is not None for each in memory)
    return tuple(at if is_held or at in leaves else 0 for at, is_held in zip(operands, held, strict=False))


VIEWS = 4  # how many views of a weight are looked through


def _leaves(node: Any) -> set[int]:
    """The addresses of the weights whose gradients a node computes, or those of their views."""
    found = set()
    for each, _ in node.next_functions:
        for _ in range(VIEWS):
            if each is not None and len(each.next_functions) == 1:
                ((each, _),) = each.next_functions
        if each is not None and each.name() == "torch::autograd::AccumulateGrad":
            found.add(address(each.variable))
    return found - {0}


# How well a link fits a node: not at all, unknown, by one of the operands, by all that the node has saved, and by these
# in their shapes and strides too.
NOT, UNKNOWN, PARTLY, ALL, EXACTLY = range(-1, 4)


def _evidence(node: Any, link: Link) -> int:
    """How well a link fits a node.

    A node keeps what it has saved, so that no call since can have had another operand at the same address.
    """
    made = link.made
    if made is not None and (made.task == graph_task() or (made.again and not in_checkpoint())):
        return NOT
    function = id(node) if isinstance(node, _Function) else None
    if function is not None or (made is not None and made.node is not None):
        return UNKNOWN if made is None else EXACTLY if made.node == function else NOT
    looks = None if made is None else made.looks
    fits = [_fits(saved, link.operands[at], looks and looks[at]) for at, saved in _saved(node, link) if link.needed]
    known = [fit for fit in fits if fit is not None]
    if not known:
        return PARTLY if link.needed and not _leaves(node).isdisjoint(link.operands) else UNKNOWN
    if looks is not None:
        return EXACTLY if all(known) else NOT
    return ALL if all(known) else PARTLY if any(known) else NOT


def _fits(saved: Any, operand: int, look: Any) -> bool | None:
    """Whether an operand is the tensor that a node has saved; None if that cannot be told."""
    if saved.unpack_hook is not None:
        return None if look is None else False
    tensor = saved.data
    if tensor is None or (place := address(tensor)) == 0:
        return None
    return place == operand and look in (None, (tensor.shape, tensor.stride()))


_NODES = frozenset(name.partition("::")[2].replace("_", "") for name in OWN if ROWS[name].kind == "leaf")


def _computes(node: Any, link: Link) -> bool:
    """Whether the node can belong to the link's operator. Another thread may have a node of the same number."""
    return is_of(node.name(), link.op, link.sure)


@lru_cache(4096)
def is_of(node: str, op: str, sure: bool) -> bool:
    """Whether a node of this name can belong to an operator. `sure` is as in `Link`."""
    name = node.lower().rstrip("0123456789").removesuffix("backward")
    if is_patched(op):
        return True  # a function may run any operators
    its = op.partition("::")[2].replace("_", "")
    return (sure and name not in _NODES) or name in (its, its.removesuffix("forward"))  # nll_loss_forward: NllLoss


def grad_of(operands: Iterable[int], left: int, link: Link) -> tuple[str | None, bool]:
    """Return the operand of the link whose gradient a backward call computes, and whether it computes the transpose.

    The gradient of one operand is a product with the other, which autograd has saved. If G is the gradient of the
    output, that of lhs is `G @ rhs.T` and that of rhs is `lhs.T @ G`. For a column-major operand, autograd swaps the
    factors and transposes the product (`mm_mat1_backward` in FunctionsManual.cpp). `operands` are the addresses of the
    backward call's tensors, and `left` that of its left operand, 0 without one.
    """
    if left == 0:
        return None, False  # not a product: `add_` may find an operand that was freed where its own tensor is
    factors = factors_of(link.op)
    if factors is None:
        return None, False
    if link.sure and not link.needed:
        return None, False  # operands that were cast may have been freed, and others may be in their memory
    (*at, foreign), its = factors, link.operands
    lhs, rhs = its[at[0]] if at[0] < len(its) else 0, its[at[1]] if at[1] < len(its) else 0
    used = {*operands} - {0}
    of_lhs, of_rhs = at[0] in link.wanted, at[1] in link.wanted
    if of_lhs is not of_rhs and not foreign:
        lhs, rhs = (0, rhs) if of_lhs else (lhs, 0)  # not saved, and others may be in its memory
    if (lhs in used) == (rhs in used):
        # Another library may multiply with a copy of an operand, such as a weight that it dequantises again.
        sure = foreign and of_lhs is not of_rhs and lhs not in used
        return (("lhs" if of_lhs else "rhs") if sure else None), False
    on_the_left = left != 0 and left in (lhs, rhs)
    if lhs not in used:
        return "lhs", on_the_left
    return "rhs", on_the_left if row_of(link.op).contraction_dim("rhs") == -1 else not on_the_left  # a weight of [n, k]


def factors_of(op: str) -> tuple[int, int, bool] | None:
    """The positions of an operator's two factors, and whether it is another library's; None if it has no such two."""
    row = row_of(op)
    if not {"lhs", "rhs"} <= row.roles.keys() or row.family in ("convolution", "attention"):
        return None  # one call computes several gradients of these, or several calls a part of one
    return row.roles["lhs"][0], row.roles["rhs"][0], row.family == "foreign"
