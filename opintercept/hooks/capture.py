"""`Capture`: keeps operands, outputs and gradients, within a budget."""

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

from opintercept._call import OpCall
from opintercept._checks import check_choice, check_count
from opintercept._errors import OpInterceptError, OpInterceptWarning
from opintercept._hook import Level
from opintercept._record import Phase
from opintercept._tensors import describe, is_strided
from opintercept.hooks._copies import Copyable, can_store, copied, safetensors_for
from opintercept.hooks._roles import Generators, checked_roles
from opintercept.hooks._values import captured, first_output, in_memory, parts_of

Role = Literal["lhs", "rhs", "bias", "output", "grad_lhs", "grad_rhs"]
Keep = Literal["cpu", "same", "disk"]
WhenFull = Literal["stop", "drop", "raise"]
Place = int | slice | EllipsisType | None
Index = Place | tuple[Place, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Captured:
    """One tensor that was kept, and which.

    Attributes:
        role: `"lhs"`, `"rhs"`, `"bias"`, `"output"`, `"grad_lhs"` or `"grad_rhs"`.
        module: As `OpCall.module`; a gradient has that of the forward call.
        aliases: As `OpCall.aliases`.
        op: The operator.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        index: The call's number in its interceptor; tensors of one call share it.
        step: As `OpCall.step`.
        forward: As `OpCall.forward`: for a gradient, the index of the forward call.
        nbytes: What it takes of the budget.
        path: The file, for `to="disk"`; else None.
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
        """The values; waits for a copy that is under way, or reads the file.

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
        """For copies: without the event, after waiting for it."""
        if self._ready is not None:
            self._ready.synchronize()
        return type(self), (*(getattr(self, name) for name in self.__slots__[:-1]), None)

    def __repr__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        shown = describe(self._tensor) if self._tensor is not None else str(self.path)
        return f"<{self.role} of call {self.index}, {self.op}{where}: {shown}>"


class Capture(Copyable):
    """Keeps tensors: copies of what they were when the operator got or returned them.

    Operands are copied before the operator runs, as the hooks before this one left them, so that in-place forms,
    `out=` and later hooks cannot change them; those of a call that then raises are kept too. Wrap it in `when` to
    keep those of some calls only.

    Args:
        of: One or more of `"lhs"`, `"rhs"`, `"bias"`, `"output"`, of every call, backward ones included;
            `"grad_lhs"` and `"grad_rhs"`, the gradients with respect to the operands (see `OpCall.gradient`), at
            dispatch level. With one of the last two, backward calls give gradients only. Of several outputs or a
            list of operands, the first.
        index: Keeps `tensor[index]`: a number, a slice, `...`, None, or a tuple of them.
        sample: Keeps so many values of the tensor, after `index`, drawn with replacement into one dimension.
        seed: Seeds the sample's own generators, one a device; torch's global ones are never drawn from.
        to: `"cpu"`: host memory; from CUDA by way of pinned memory, without waiting. `"same"`: the device it is
            on. `"disk"`: a safetensors file a tensor, in `folder`, contiguous; the metadata says which it is.
        folder: A folder without safetensors files; made if it is missing.
        max_bytes: The budget for what is kept: the bytes of elements (of a sparse tensor also its indices), of
            files for `to="disk"`.
        when_full: `"stop"`: keep nothing more, until `clear()`, and warn once. `"drop"`: the oldest tensors go,
            with their files, and one that is larger than the budget is left out, with one warning. `"raise"`.

    Attributes:
        nbytes: What is kept, in bytes.
        dropped: How many tensors were dropped, or left out for being larger than the budget.
        skipped: How many tensors had no values to keep: meta and fake ones, those that a transform of torch.func has
            wrapped at function level, and those whose memory the program has freed.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An unknown role or choice, a count below 1, or a folder without `to="disk"` or the reverse.
        ImportError: `to="disk"` without safetensors.

    A call raises `OpInterceptError` where the budget is spent under `"raise"` and for tensors that cannot be kept as
    asked, `IndexError` where `index` does not fit, and `OSError` on a full disk; nothing is left of that tensor then.
    Calls that a CUDA graph captures have no values yet and are left out, with one warning. A copy of the hook keeps
    entries of its own; with `to="disk"` there is no copy.

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

    reads = ("module", "forward", "gradients")

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
        if not all(isinstance(i, Place) for i in (index if isinstance(index, tuple) else (index,))):
            raise TypeError(f"index must be a number, a slice, ..., None or a tuple of them, got {index!r}")
        self.index = index
        self.sample = None if sample is None else check_count("sample", sample)
        self.max_bytes = None if max_bytes is None else check_count("max_bytes", max_bytes)
        self.to = to
        self.when_full = when_full
        self._generators = Generators(seed)
        self.folder = _folder(to, folder)
        self._operands = [role for role in self.of if role in ("lhs", "rhs", "bias")]
        self._gradients = [role for role in self.of if role.startswith("grad_")]
        self.levels: tuple[Level, ...] = ("dispatch",) if self._gradients else get_args(Level)
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
        """What is kept, in the order in which it came."""
        with self._lock:
            return list(self._entries)

    def __getitem__(self, key: str | tuple[str, str]) -> list[Captured]:
        """What was kept of a module: `capture["encoder.0"]`, `capture["encoder.*", "output"]`.

        Args:
            key: The module's name or a glob, in which `*` also stands for dots, or that and a role. A module
                with several names is found by any of them.

        Raises:
            KeyError: Nothing was kept of such a module.
            TypeError: The key is something else.
            ValueError: An unknown role.
        """
        module, *role = key if isinstance(key, tuple) else (key,)
        if not isinstance(module, str) or len(role) > 1:
            raise TypeError(f"a key must be a module's name or glob, or that and a role, got {key!r}; see entries")
        roles = checked_roles(role[0], get_args(Role)) if role else self.of
        entries = self.entries
        found = [e for e in entries if e.role in roles and any(fnmatchcase(name, module) for name in e.aliases)]
        if not found:
            names = list(dict.fromkeys(name for e in entries for name in e.aliases))
            shown = difflib.get_close_matches(module, names, n=3) or names[:3]
            known = f"there are {', '.join(map(repr, shown))}" if shown else "nothing was kept"
            raise KeyError(f"a module's name or glob must match something that was kept, got {key!r}; {known}")
        return found

    def clear(self) -> None:
        """Forget all, delete the files that there are, and go on if the budget had been spent."""
        with self._lock:
            while self._entries:
                self._drop()
            self._stopped = self._warned = False
            self.dropped = self.skipped = 0

    def pre(self, call: OpCall) -> None:
        """Keep the operands."""
        if self._stopped or (self._gradients and call.phase == "backward"):
            return
        for role in self._operands:
            tensor = getattr(call, role)
            if tensor is not None:
                self._keep(call, role, tensor)

    def post(self, call: OpCall) -> None:
        """Keep the output, or the gradient."""
        if self._stopped:
            return
        if self._gradients and call.phase == "backward":
            gradient, role = call.gradient, f"grad_{call.grad_of}"
            if gradient is not None and role in self._gradients:
                self._keep(call, role, gradient)
        elif "output" in self.of and isinstance(output := first_output(call.output), torch.Tensor):
            self._keep(call, "output", output)

    def _keep(self, call: OpCall, role: str, tensor: torch.Tensor) -> None:
        if captured(tensor, "Capture"):
            return
        if not in_memory(tensor):
            with self._lock:
                self.skipped += 1
            return
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
                entry = Captured(
                    role,
                    call.module,
                    call.aliases,
                    call.op,
                    call.phase,
                    call.index,
                    call.step,
                    call.forward,
                    size,
                    path,
                    copy,
                    ready,
                )
                # Ctrl-C comes behind a call or not at all: these go together.
                self._files += path is not None
                self.nbytes += size
                self._entries.append(entry)
            except BaseException:
                if path is not None and not (self._entries and self._entries[-1].path == path):
                    path.unlink(missing_ok=True)
                raise

    def _chosen(self, tensor: torch.Tensor) -> torch.Tensor:
        """What of the tensor is to be copied, itself mostly a view."""
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if self.index is None and self.sample is None:
            return tensor
        if not is_strided(tensor):
            raise OpInterceptError(
                f"index and sample need dense tensors, got {describe(tensor)} with {tensor.layout}; leave such calls "
                "out with when(predicate=...)"
            )
        if self.index is not None:
            tensor = tensor[self.index]
        if self.sample is None:
            return tensor
        if tensor.numel() == 0:
            return tensor.new_empty(0)
        # Not of the flattened tensor, which for a view would be a copy of all of it.
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
        full = (
            f"max_bytes={self.max_bytes}, got {self.nbytes} in use and {size} for the {role} of call {call.index}, "
            f"{call}; raise max_bytes, or keep less by when(...), index= or sample="
        )
        if self.when_full == "raise":
            raise OpInterceptError(f"what is captured must fit into {full}")
        if self.when_full == "drop":
            self.dropped += 1
            full = f"Capture leaves out what is larger than {full}"
        else:
            self._stopped = True
            full = f"Capture stopped at {full}, or when_full='drop'"
        if not self._warned:
            self._warned = True
            warnings.warn(full, OpInterceptWarning, stacklevel=5)
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
                'a Capture with to="disk" owns its files and cannot be copied, got one with '
                f"folder={str(self.folder)!r}; make another with a folder of its own"
            )
        return super().__getstate__()

    def __repr__(self) -> str:
        return f"Capture({len(self._entries)} tensors, {self.nbytes} bytes)"


def _folder(to: Keep, folder: str | os.PathLike[str] | None) -> Path | None:
    if (to == "disk") != (folder is not None):
        raise ValueError(f'folder must be given with to="disk" and with nothing else, got {folder!r} for to={to!r}')
    if folder is None:
        return None
    path = Path(folder)
    safetensors_for("to='disk'")
    if any(path.glob("*.safetensors")):
        raise ValueError(f"folder must have no safetensors files in it yet, got {str(folder)!r}; name a new one")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _serialised(tensor: torch.Tensor, role: str, call: OpCall) -> bytes:
    if not is_strided(tensor) or not can_store(tensor.dtype):
        raise OpInterceptError(
            f"safetensors stores dense tensors of its own dtypes, got {describe(tensor)} with {tensor.layout} as the "
            f'{role} of {call.op}; use to="cpu", or leave such calls out with when(predicate=...)'
        )
    which = {name: getattr(call, name) for name in ("module", "op", "phase", "index", "step", "forward")}
    metadata = {"role": role, "call": json.dumps(which)}
    data: bytes = safetensors_for("to='disk'").save({role: tensor.cpu().contiguous()}, metadata)
    return data


def _write(path: Path, data: bytes) -> None:
    """Write the file whole or not at all."""
    part = path.with_suffix(".part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _size(tensor: torch.Tensor) -> int:
    """Bytes that a copy takes."""
    parts = [tensor] if is_strided(tensor) else parts_of(tensor) or [tensor]
    return sum(part.numel() * part.element_size() for part in parts)
