"""`Capture`: keeps copies of operands, outputs and gradients, within a budget."""

from __future__ import annotations

import difflib
import json
import os
import threading
import warnings
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, get_args

import torch

from opintercept._core.call import OpCall
from opintercept._core.checks import check_choice, check_count
from opintercept._core.errors import OpInterceptError, OpInterceptWarning
from opintercept._core.hook import Level, Read
from opintercept._core.record import Phase
from opintercept._core.tensors import describe, is_strided
from opintercept._kit.copyable import Copyable
from opintercept._kit.roles import Generators, checked_roles
from opintercept._values.copies import can_store, copied, safetensors_for
from opintercept._values.read import first_output, in_memory, leaves_out_captured, parts_of, warn_of_memory

Role = Literal["lhs", "rhs", "bias", "output", "grad_lhs", "grad_rhs"]
Keep = Literal["cpu", "same", "disk"]
WhenFull = Literal["stop", "drop", "raise"]
CallSite = int | slice | EllipsisType | None
Index = CallSite | tuple[CallSite, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Captured:
    """One tensor that was kept, and where it comes from.

    Attributes:
        role: `"lhs"`, `"rhs"`, `"bias"`, `"output"`, `"grad_lhs"` or `"grad_rhs"`.
        module: As `OpCall.module`; for a gradient, that of the forward call.
        aliases: As `OpCall.aliases`.
        op: The operator.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        index: The call's index in its interceptor; tensors of one call share it.
        step: As `OpCall.step`.
        forward: As `OpCall.forward`: for a gradient, the index of the forward call.
        nbytes: How much of the budget the tensor takes.
        path: The file, with `to="disk"`; otherwise None.
    """

    role: str
    module: str | None
    aliases: tuple[str, ...]
    op: str
    phase: Phase
    index: int
    step: int
    forward: int | None
    nbytes: int
    path: Path | None
    _tensor: torch.Tensor | None
    _ready: torch.cuda.Event | None

    @property
    def tensor(self) -> torch.Tensor:
        """The values. Waits for a copy that is still in flight, or reads the file.

        Raises:
            FileNotFoundError: The file has been dropped, cleared or moved.
        """
        if self._ready is not None:
            self._ready.synchronize()
        if self._tensor is not None:
            return self._tensor
        assert self.path is not None
        from safetensors.torch import load

        tensor: torch.Tensor = load(self.path.read_bytes())[self.role]
        return tensor

    def __reduce__(self) -> tuple[type[Captured], tuple[Any, ...]]:
        """Copy without the event, after waiting for it."""
        if self._ready is not None:
            self._ready.synchronize()
        return type(self), (*(getattr(self, name) for name in self.__slots__[:-1]), None)

    def __repr__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        shown = describe(self._tensor) if self._tensor is not None else str(self.path)
        return f"<{self.role} of call {self.index}, {self.op}{where}: {shown}>"


class Capture(Copyable):
    """Keeps copies of tensors as they were when the operator received or returned them.

    Operands are copied before the operator runs, as earlier hooks left them. In-place forms, `out=` and later hooks
    cannot change the copies, and the operands of a call that raises are kept too. Wrap the hook in `when` to choose
    calls.

    Args:
        of: One or more of `"lhs"`, `"rhs"`, `"bias"`, `"output"`, `"grad_lhs"` and `"grad_rhs"`. The first four are
            kept from every call, backward calls included. The last two are the gradients with respect to the
            operands (see `OpCall.gradient`) and need dispatch level; with one of them, Capture keeps only gradients
            from backward calls. Of several outputs or a list of operands it keeps the first.
        index: Keep `tensor[index]` only: a number, a slice, `...`, None or a tuple of them.
        sample: Keep this many values only, drawn with replacement after `index`, as a one-dimensional tensor.
        seed: Seeds the sample's own generators, one per device. Capture never draws from torch's global ones.
        to: `"cpu"` keeps tensors in host memory; from CUDA it copies into pinned memory without waiting. `"same"`
            keeps them on their device. `"disk"` writes each as a contiguous tensor to its own safetensors file in
            `folder`, with metadata that says where it comes from.
        folder: A folder that contains no safetensors files; created if it does not exist.
        max_bytes: The budget: bytes of elements, including the indices of sparse tensors, or of files with
            `to="disk"`.
        when_full: `"stop"` keeps nothing more until `clear()`, and warns once. `"drop"` discards the oldest tensors
            with their files; it leaves out a tensor that is larger than the whole budget, and warns once. `"raise"`
            raises an `OpInterceptError` in the call.

    Attributes:
        nbytes: How many bytes are kept.
        dropped: How many tensors were discarded, or left out because they are larger than the budget.
        skipped: How many tensors had no values to keep: meta and fake tensors, tensors that a torch.func transform
            has wrapped at function level, tensors whose memory the program has freed, and those that the device has no
            memory to copy, of which it warns once.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A role or choice is unknown, a count is below 1, `folder` is given without `to="disk"` or the
            other way round, or the folder contains safetensors files.
        ImportError: `to="disk"` without safetensors or numpy.

    A call raises `OpInterceptError` if the budget is spent under `when_full="raise"` or a tensor cannot be kept as
    asked, `IndexError` if `index` does not fit, and `OSError` if the disk is full. Nothing of that tensor is kept
    then. Capture leaves out calls that a CUDA graph captures, since they have no values yet, and warns once. A copy
    of the hook has its own entries; a hook with `to="disk"` cannot be copied.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> capture = hooks.Capture(of=("output", "grad_lhs"), max_bytes=2**20)
        >>> with intercept(capture):
        ...     model(torch.ones(5, 3)).sum().backward()
        >>> [entry.tensor.shape for entry in capture["2"]]
        [torch.Size([5, 2]), torch.Size([5, 4])]
        >>> capture["*", "output"]
        [<output of call 0, aten::addmm in 0: float32[5, 4]>, <output of call 1, aten::addmm in 2: float32[5, 2]>]
    """

    def __init__(
        self,
        of: str | Iterable[str] = ("lhs", "output"),
        *,
        index: Index = None,
        sample: int | None = None,
        seed: int = 0,
        to: Keep = "cpu",
        folder: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        when_full: WhenFull = "stop",
    ) -> None:
        self.of = checked_roles(of, get_args(Role))
        for name, value, allowed in (("to", to, Keep), ("when_full", when_full, WhenFull)):
            check_choice(name, value, get_args(allowed))
        if not all(isinstance(i, CallSite) for i in (index if isinstance(index, tuple) else (index,))):
            raise TypeError(f"index must be a number, a slice, ..., None or a tuple of them, got {index!r}")
        self.index = index
        self.sample = None if sample is None else check_count("sample", sample)
        self.max_bytes = None if max_bytes is None else check_count("max_bytes", max_bytes)
        self.to = to
        self.when_full = when_full
        self._generators = Generators(seed)
        self.folder = _folder(to, folder)
        self._operands = [role for role in ("lhs", "rhs", "bias") if role in self.of]
        self._gradients = [role for role in self.of if role.startswith("grad_")]
        self.reads: tuple[Read, ...] = ("module", "forward", "gradients") if self._gradients else ("module", "forward")
        self.levels: tuple[Level, ...] = ("dispatch",) if self._gradients else ("function", "dispatch")
        self._lock = threading.RLock()
        self._entries: deque[Captured] = deque()
        self._files = 0
        self._stopped = False
        self._warned = False
        self.nbytes = 0
        self.dropped = 0
        self.skipped = 0

    @property
    def entries(self) -> list[Captured]:
        """The tensors that are kept, in the order in which they came."""
        with self._lock:
            return list(self._entries)

    def __getitem__(self, key: str | tuple[str, str]) -> list[Captured]:
        """The tensors kept from a module: `capture["encoder.0"]`, `capture["encoder.*", "output"]`.

        Args:
            key: The module's name or a glob, in which `*` also matches dots, optionally with a role. A module
                with several names is found by any of them.

        Raises:
            KeyError: Nothing was kept from such a module.
            TypeError: The key is neither a name nor a name and a role.
            ValueError: The role is unknown.
        """
        module, *role = key if isinstance(key, tuple) else (key,)
        if not isinstance(module, str) or len(role) > 1:
            raise TypeError(f"a key must be a module's name or a glob, optionally with a role, got {key!r}")
        roles = checked_roles(role[0], get_args(Role)) if role else self.of
        entries = self.entries
        found = [e for e in entries if e.role in roles and any(fnmatchcase(name, module) for name in e.aliases)]
        if not found:
            names = list(dict.fromkeys(name for e in entries for name in e.aliases))
            shown = difflib.get_close_matches(module, names, n=3) or names[:3]
            known = f"tensors were kept from {', '.join(map(repr, shown))}" if shown else "nothing was kept"
            raise KeyError(f"no tensor was kept that matches {key!r}; {known}")
        return found

    def clear(self) -> None:
        """Forget all tensors, delete their files, and start again with the whole budget."""
        with self._lock:
            while self._entries:
                self._drop()
            self._stopped = self._warned = False
            self.dropped = self.skipped = 0

    def pre(self, call: OpCall) -> None:
        """Keep the operands asked for."""
        if self._stopped or (self._gradients and call.phase == "backward"):
            return
        for role in self._operands:
            tensor = getattr(call, role)
            if tensor is not None:
                self._keep(call, role, tensor)

    def post(self, call: OpCall) -> None:
        """Keep the output or the gradient, if asked for."""
        if self._stopped:
            return
        if self._gradients and call.phase == "backward":
            gradient, role = call.gradient, f"grad_{call.grad_of}"
            if gradient is not None and role in self._gradients:
                self._keep(call, role, gradient)
        elif "output" in self.of and isinstance(output := first_output(call.output), torch.Tensor):
            self._keep(call, "output", output)

    def _keep(self, call: OpCall, role: str, tensor: torch.Tensor) -> None:
        if leaves_out_captured(tensor, self):
            return
        if not in_memory(tensor):
            with self._lock:
                self.skipped += 1
            return
        try:
            self._copy(call, role, tensor)
        except torch.OutOfMemoryError:
            with self._lock:
                self.skipped += 1
            remedy = "copy to the host with to='cpu', or keep less with hooks.when(...), index= or sample="
            warn_of_memory(self, "tensors", remedy)

    def _copy(self, call: OpCall, role: str, tensor: torch.Tensor) -> None:
        with self._lock:
            chosen = self._chosen(tensor)
            data = b"" if self.folder is None else _serialised(chosen, role, call)
            size = len(data) or _size(chosen)
            if self._stopped or not self._has_room(size, role, call):
                return
            path, copy, ready = None, None, None
            try:
                if self.folder is None:
                    copy, ready = copied(chosen, self.to)
                else:
                    path = self.folder / f"{self._files:08d}-{role}.safetensors"
                    _write(path, data)
                which = call.module, call.aliases, call.op, call.phase, call.index, call.step, call.forward
                entry = Captured(role, *which, size, path, copy, ready)
                # Ctrl-C is raised only after a call, so nothing can come between these three.
                self._files += path is not None
                self.nbytes += size
                self._entries.append(entry)
            except BaseException:
                if path is not None and not (self._entries and self._entries[-1].path == path):
                    path.unlink(missing_ok=True)
                raise

    def _chosen(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of the tensor to copy, usually a view."""
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if self.index is None and self.sample is None:
            return tensor
        if not is_strided(tensor):
            raise OpInterceptError(
                f"index and sample need dense tensors, got {describe(tensor)} with {tensor.layout}; leave such calls "
                "out with hooks.when(predicate=...)"
            )
        if self.index is not None:
            tensor = tensor[self.index]
        if self.sample is None:
            return tensor
        if tensor.numel() == 0:
            return tensor.new_empty(0)
        # Do not flatten the tensor: that would copy all of a view.
        tensor = tensor if tensor.dim() else tensor.reshape(1)
        device = tensor.device
        drawn = torch.randint(tensor.numel(), (self.sample,), device=device, generator=self._generators[device])
        return tensor[torch.unravel_index(drawn, tensor.shape)]

    def _has_room(self, size: int, role: str, call: OpCall) -> bool:
        if self.max_bytes is None or self.nbytes + size <= self.max_bytes:
            return True
        if self.when_full == "drop" and size <= self.max_bytes:
            while self.nbytes + size > self.max_bytes:
                self._drop()
                self.dropped += 1
            return True
        text = (
            f"the {role} of call {call.index}, {call}, takes {size} bytes and does not fit into "
            f"max_bytes={self.max_bytes}, of which {self.nbytes} are in use; "
            "raise max_bytes, or keep less with hooks.when(...), index= or sample="
        )
        if self.when_full == "raise":
            raise OpInterceptError(text)
        if self.when_full == "drop":
            self.dropped += 1
            text = f"Capture left out a tensor: {text}"
        else:
            self._stopped = True
            text = f"Capture stopped: {text}, or when_full='drop'"
        if not self._warned:
            self._warned = True
            warnings.warn(text, OpInterceptWarning, stacklevel=5)
        return False

    def _drop(self) -> None:
        oldest = self._entries[0]
        try:
            self.nbytes -= oldest.nbytes
            self._entries.popleft()
        finally:
            if oldest.path is not None:
                oldest.path.unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        if self.folder is not None:
            raise TypeError(
                f'a Capture with to="disk" owns the files in {str(self.folder)!r} and cannot be copied; '
                "make another one with its own folder"
            )
        return super().__getstate__()

    def __repr__(self) -> str:
        return f"Capture({len(self._entries)} tensors, {self.nbytes} bytes)"


def _folder(to: Keep, folder: str | os.PathLike[str] | None) -> Path | None:
    if (to == "disk") != (folder is not None):
        raise ValueError(f'folder and to="disk" must be given together, got folder={folder!r} and to={to!r}')
    if folder is None:
        return None
    path = Path(folder)
    safetensors_for("to='disk'")
    if any(path.glob("*.safetensors")):
        raise ValueError(f"folder must not contain safetensors files, got {str(folder)!r}; choose another one")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _serialised(tensor: torch.Tensor, role: str, call: OpCall) -> bytes:
    if not is_strided(tensor) or not can_store(tensor.dtype):
        raise OpInterceptError(
            f"safetensors cannot store the {role} of {call.op}, {describe(tensor)} with {tensor.layout}; "
            'use to="cpu", or leave such calls out with hooks.when(predicate=...)'
        )
    which = {name: getattr(call, name) for name in ("module", "op", "phase", "index", "step", "forward")}
    metadata = {"role": role, "call": json.dumps(which)}
    data: bytes = safetensors_for("to='disk'").save({role: tensor.cpu().contiguous()}, metadata)
    return data


def _write(path: Path, data: bytes) -> None:
    """Write the whole file or nothing."""
    part = path.with_suffix(".part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _size(tensor: torch.Tensor) -> int:
    """How many bytes a copy takes."""
    parts = [tensor] if is_strided(tensor) else parts_of(tensor) or [tensor]
    return sum(part.numel() * part.element_size() for part in parts)
