"""`CallTensors`: which tensors of a call a run reads, and those that it keeps.

Invariant: a tensor's values are those that the operator has read or made, also where it writes over them.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from opintercept._core.call import OpCall
from opintercept._core.tensors import flat, is_strided, share_memory
from opintercept._kit.repro import plain_arguments
from opintercept._ops.families import makes_values
from opintercept._ops.scratch import FOR_PROGRAM, SCRATCH, UNREAD, UPDATED, UPDATES, torchs_name
from opintercept._ops.slots import OUTPUT_ARGUMENT, OUTPUTS
from opintercept._values.content import Content, content_of
from opintercept._values.copies import can_store, copied
from opintercept._values.late import place_of
from opintercept._values.read import is_captured, leaves_out_captured, warn_of_memory
from opintercept._values.stats import Values
from opintercept.runs.record.memory import MemoryNumbers
from opintercept.runs.record.writer import QueuedCall, QueuedTensor, key_of
from opintercept.runs.store.codec import role_of
from opintercept.runs.store.run import TensorMode

_MOST_TENSORS = 1000  # of one call, besides its operands and outputs
_MOST_SHAPES = 1024  # for which the places of a sample are remembered
_MANY = 1 << 16  # numbers of a tensor that is stored as one number if all are equal
_LARGE = 1 << 20  # bytes of a tensor of which views are not stored again

Before = dict[str, tuple[Content | None, torch.Tensor]]
"""What was read of operands before the operator wrote over them, by role, each with the tensor or a copy of it."""


class CallTensors:
    """Reads and keeps the tensors of calls for one recorder.

    Args:
        hook: The recorder, which is named where tensors cannot be read.
        mode: As `RunRecorder.tensors`.
        sample: How many values a sample has.
        keeps_failed: Whether to keep all values of a call that raised.
        name_of: The name of a tensor that is written already, by its `key_of`; None if there is none.
    """

    def __init__(
        self,
        hook: Any,
        mode: TensorMode,
        sample: int,
        *,
        keeps_failed: bool,
        name_of: Callable[[Any], str | None],
    ) -> None:
        self._hook = hook
        self._mode = mode
        self._keeps = mode in ("sample", "full")
        self._keeps_failed = keeps_failed
        self._sample = sample
        self._name_of = name_of
        self._clones: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()
        self._places: dict[Any, tuple[torch.Tensor, ...]] = {}
        self._memory = MemoryNumbers()

    def overwritten(self, call: OpCall) -> Before:
        """Read the operands that the operator is about to overwrite."""
        written = flat(call.written)
        updated = UPDATED if torchs_name(call.op) in UPDATES else ()
        if not (written or updated) or self._mode == "none" or _is_unread(call):
            return {}
        before: Before = {}
        for role, tensor in _inputs(call, {}).items():
            if leaves_out_captured(tensor, self._hook, self._mode == "stats"):
                return {}
            if role in updated or any(share_memory(tensor, target) for target in written):
                content = content_of(tensor)  # None where there is no memory to copy
                if content is not None and self._keeps:
                    try:
                        tensor = tensor.detach().clone()
                    except torch.OutOfMemoryError:
                        content = None
                        self._warn_of_memory()
                before[role] = content, tensor
        return before

    def add(self, call: OpCall, entry: QueuedCall, before: Before) -> None:
        """Read a call's tensors for its entry, and keep them.

        Args:
            call: The call, which has ended.
            entry: Where they are added.
            before: What `overwritten` returned.
        """
        failed = entry.error is not None
        full = self._mode == "full" or (failed and self._keeps_failed)
        keeps = self._keeps or (failed and self._keeps_failed)
        places: dict[int, int] = {}
        tokens = _tokens(call)
        for role, tensor in tensors_of(call, whole=keeps, tokens=tokens):
            if leaves_out_captured(tensor, self._hook, self._mode == "stats"):
                return
            if role in before:
                content, tensor = before[role]
            else:
                content = content_of(tensor)
            if content is None:
                continue
            entry.values[role] = content
            if keeps and (kept := self._kept(tensor, content, full)) is not None:
                entry.roles[role] = places[id(tensor)] = len(entry.kept)
                entry.kept.append(kept)
        if full:
            # `plain_arguments` restores operands that the operator has overwritten; other tensors are restored here.
            old = {id(tensor): before[role] for role, tensor in _inputs(call, tokens).items() if role in before}

            views = _is_unread(call)

            def keep(tensor: torch.Tensor) -> int:
                if id(tensor) in old:
                    known, tensor = old[id(tensor)]
                    if known is None:
                        raise TypeError("what the operator has overwritten was not copied")
                place = places.get(id(tensor))
                if place is None:
                    if views and tensor.numel() * tensor.element_size() > _LARGE:
                        raise TypeError("what computes with it stores it")
                    content = None if leaves_out_captured(tensor, self._hook) else content_of(tensor)
                    kept = None if content is None else self._kept(tensor, content, True)
                    if kept is None:
                        raise TypeError("safetensors cannot store the tensor")
                    place = places[id(tensor)] = len(entry.kept)
                    entry.kept.append(kept)
                return place

            operands = {role: tensor for role, (_, tensor) in before.items() if role in ("lhs", "rhs", "bias")}
            try:
                entry.given = plain_arguments(call, operands, keep, self._memory.place, tokens)
            except TypeError:  # the call cannot be run again
                entry.given = None

    def _kept(self, tensor: torch.Tensor, content: Content, full: bool) -> QueuedTensor | str | None:
        """The tensor to be written; its name if it is written already; None if it cannot be written."""
        if not is_strided(tensor) or tensor.is_quantized or not can_store(tensor.dtype):
            return None
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        known = content.at_hand
        key = None
        if known is not None and known.hash is not None:
            shape = tuple(tensor.shape) if full else (min(self._sample, known.count),)
            key = key_of(known.hash, str(tensor.dtype), shape, not full)
            if (name := self._name_of(key)) is not None:
                return name
            if (clone := self._clones.get(key)) is not None:
                return QueuedTensor(clone, None, content, not full)
        try:
            if full and known is not None and known.count >= _MANY and _is_uniform(tensor, known):
                clone, ready = tensor[(0,) * tensor.dim()].cpu().clone().expand(tensor.shape), None
            elif full and tensor.device.type == "cpu":
                clone, ready = tensor.clone(memory_format=torch.contiguous_format), None
            else:
                clone, ready = copied(tensor.contiguous() if full else self._sampled(tensor), "cpu")
        except torch.OutOfMemoryError:
            self._warn_of_memory()
            return None
        try:
            clone.data_ptr()
        except RuntimeError:  # a torch.func transform has wrapped it
            return None
        if key is not None:
            self._clones[key] = clone
        return QueuedTensor(clone, ready, content, not full)

    def _warn_of_memory(self) -> None:
        warn_of_memory(self._hook, "tensors", 'record fewer calls, or tensors="stats"')

    def _sampled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Some values, at places that depend only on the number of elements."""
        count = tensor.numel()
        if count <= self._sample:
            return tensor.reshape(-1)
        key = tensor.shape, place_of(tensor)
        places = self._places.get(key)
        if places is None:
            drawn = torch.tensor(sorted(random.Random(count).choices(range(count), k=self._sample)), device="cpu")
            places = tuple(
                each.to(tensor.device, non_blocking=True) for each in torch.unravel_index(drawn, tensor.shape)
            )
            if len(self._places) >= _MOST_SHAPES:
                self._places.clear()
            self._places[key] = places
        return tensor[places]


def _is_uniform(tensor: torch.Tensor, known: Values) -> bool:
    """Whether all numbers are the same bit for bit, as those of a cache that was just made."""
    if known.nan or known.inf or known.min != known.max or tensor.is_complex():
        return False
    first = tensor[(0,) * tensor.dim()]
    signs = tensor.signbit() if tensor.is_floating_point() and known.min == 0 else None  # -0.0 equals 0.0
    return bool((tensor == first).all()) and (signs is None or bool((signs == first.signbit()).all()))


def _tokens(call: OpCall) -> dict[int, torch.Tensor]:
    """What stands for paged caches: the tokens that the call reads or writes. None while a graph is captured."""
    return {} if is_captured((call.args, call.kwargs)) else call.tokens()


def _inputs(call: OpCall, tokens: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that a call reads: operands by role, then others by the name of the parameter."""
    found = {role: tensor for role in ("lhs", "rhs", "bias") if (tensor := getattr(call, role)) is not None}
    if (value := call.operand("value")) is not None:  # an attention has one
        found["value"] = value
    overwritten = call.overwritten  # values that nobody reads, and that may be uninitialised
    for name, tensor in list(call.tensors.items())[:_MOST_TENSORS]:
        if name.partition("[")[0] not in overwritten:
            found.setdefault(OUTPUT_ARGUMENT if name == "output" else name, tensor)
    return {role: tokens.get(id(tensor), tensor) for role, tensor in found.items()}


def tensors_of(call: OpCall, whole: bool, tokens: Mapping[int, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """What is read of a call: its inputs, and its outputs by number. Nothing of a view.

    Args:
        call: The call.
        whole: Whether the call is to run again, and needs the state of random numbers too.
        tokens: What stands for paged caches.
    """
    if _is_unread(call):
        return []
    found = [(name, tensor) for name, tensor in _inputs(call, tokens).items() if whole or name not in SCRATCH]
    most = len(OUTPUTS) if not whole and call.op in FOR_PROGRAM else 99
    for place, output in enumerate(flat(call.output)[:most]):
        if isinstance(output, torch.Tensor):
            found.append((role_of(place), tokens.get(id(output), output)))
    return found


def _is_unread(call: OpCall) -> bool:
    """Whether the values of a call are not read: it returns a view of what was read before, or uninitialised memory."""
    return torchs_name(call.op) in UNREAD or not makes_values(call.func)
