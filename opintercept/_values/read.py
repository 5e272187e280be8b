"""Reads the values of any tensor that a call can have, and summarises them for `Print` and `Log`.

Invariant: a tensor whose memory is not there is never read, since that would end the process.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from operator import mul
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from opintercept._core.errors import OpInterceptWarning
from opintercept._core.tensors import is_strided, nested_tensors
from opintercept._values.late import captures, graph_of

_Result = TypeVar("_Result")

ON_HOST = ("cpu",)
"""The types of devices whose values are read at once; those of others when the work queued there is done."""


def without_graph(compute: Callable[..., _Result], *args: Any) -> _Result:
    """Call a function with gradients off, and restore the program's setting whatever happens.

    `with torch.no_grad()` would leave them off if Ctrl-C came inside its `__enter__` or `__exit__`.
    """
    enabled = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(False)
        return compute(*args)
    finally:
        try:
            torch.set_grad_enabled(enabled)
        finally:  # an interrupt came before the line above had run
            torch.set_grad_enabled(enabled)


# Up to this many bytes, checking the bounds of the memory takes as long as reading it.
_QUICK = 1 << 16


def in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are in memory. Reading elements that are not would end the process.

    FSDP frees parameters with `untyped_storage().resize_(0)`, and operators that do not read them go on running.
    Meta and fake tensors have no memory, and functorch's wrapped tensors have none of their own. If a storage was
    resized to less than the tensor needs, but not to zero, this notices it for tensors of more than 64 KiB.

    This does not touch the storage object: autograd copies a gradient once Python has asked for its storage.
    """
    try:
        if tensor.is_meta:
            return False
        kind = type(tensor)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter and _dispatches(kind):
            flatten = getattr(tensor, "__tensor_flatten__", None)
            if flatten is None:
                storage = tensor.untyped_storage()
                # A fake tensor's data_ptr would only warn. That of a wrapper's storage without memory raises.
                return storage.device.type != "meta" and storage.data_ptr() != 0
            return all(in_memory(getattr(tensor, name)) for name in flatten()[0])
        if tensor.layout is not torch.strided:
            return all(map(in_memory, parts_of(tensor)))
        # A null storage makes the offset the address. data_ptr raises for a tensor that wraps others.
        if tensor.data_ptr() == tensor.storage_offset() * tensor.element_size():
            return not tensor.numel() or tensor._is_zerotensor()  # autograd's zeros need no memory
        if tensor.nbytes > _QUICK and not tensor.is_nested:
            # This checks the bounds. Without detach, autograd would record it.
            tensor.detach().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return True
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return False


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory has been freed, see `in_memory`; false if it never had any."""
    if tensor.is_meta or in_memory(tensor):
        return False
    if _dispatches(type(tensor)):
        return hasattr(tensor, "__tensor_flatten__")
    try:
        return tensor.layout is not torch.strided or tensor.data_ptr() >= 0
    except RuntimeError:  # it wraps other tensors
        return False


def _dispatches(kind: type) -> bool:
    """Whether tensors of this class wrap others; those of a plain subclass have their own memory."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that make up a sparse tensor; empty for an opaque layout."""
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def stored_values(tensor: Any) -> torch.Tensor | None:
    """The values as a dense real tensor on their device, usually the tensor itself; None if none can be read.

    The zeros of a sparse tensor count, and the values of a complex tensor are its moduli.
    """
    if not isinstance(tensor, torch.Tensor) or not in_memory(tensor):
        return None
    try:
        if tensor.layout is torch.strided and tensor.is_floating_point() and not (tensor.is_nested or tensor.is_neg()):
            return tensor.detach() if tensor.requires_grad else tensor
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        elif tensor.is_nested:
            parts = [part.flatten() for part in tensor.unbind()]
            tensor = torch.cat(parts) if parts else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        elif not is_strided(tensor):
            tensor = tensor.to_dense()
        values: torch.Tensor = tensor.abs() if tensor.is_complex() else tensor
        values.data_ptr()
        return values
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def real_values(tensor: Any) -> torch.Tensor | None:
    """The values as a flat float64 tensor on the CPU, or None as for `stored_values`."""
    values = stored_values(tensor)
    try:
        if values is None or in_graph_capture(values):
            return None
        return values.to("cpu", torch.float64).reshape(-1)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


ROW = 1 << 10
"""How many float32 values `moments` squares and sums in one row."""


def moments(values: torch.Tensor) -> tuple[float, float]:
    """The sum, in float64, and the sum of squares of a flat float32 or float64 tensor on the CPU.

    The squares of float32 values are summed in rows. Torch sums them one after the other, and the norm of 2**24
    values is off by 5e-4 (pytorch issue 169237).
    """
    whole = values.numel() // ROW * ROW if values.dtype is torch.float32 else 0
    squares = 0.0
    if whole:
        rows = values if whole == values.numel() else values[:whole]
        norms = torch.linalg.vector_norm(rows.view(-1, ROW), dim=1).tolist()
        squares = sum(map(mul, norms, norms))
    if whole < values.numel():
        norm = float(torch.linalg.vector_norm(values[whole:], dtype=torch.float64))
        squares += norm * norm
    return float(values.sum(dtype=torch.float64)), squares


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


def all_finite(tensor: Any) -> torch.Tensor | None:
    """Whether every value is finite, as a tensor that the device may still be computing; None if none can be read."""
    if not isinstance(tensor, torch.Tensor) or not in_memory(tensor):
        return None
    if in_graph_capture(tensor):
        return None  # the check would become part of the graph
    try:
        if tensor.dtype in _FLOATS and is_strided(tensor):
            return torch.isfinite(tensor.detach()).all()
        values = stored_values(tensor)
        # float8 and the like lack the operator, float64 has it.
        return None if values is None else torch.isfinite(values.to(torch.float64)).all()
    except (RuntimeError, TypeError):
        return None


def sample(tensor: Any, count: int, generator: torch.Generator) -> list[float]:
    """`count` of the tensor's values, drawn with replacement by `generator`; empty if none can be read."""
    values = real_values(tensor)
    if values is None or values.numel() == 0:
        return []
    try:
        places = torch.randint(values.numel(), (count,), generator=generator)
        return [float(value) for value in values[places].tolist()]
    except RuntimeError:
        return []


def in_graph_capture(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is capturing the call. Its tensors have no values before the graph is replayed."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_captured(values: Any) -> bool:
    """Whether a CUDA graph captures a call with these arguments and outputs, in a block that sees its replays."""
    return bool(captures) and any(map(in_graph_capture, nested_tensors(values)))


_warned: WeakSet[object] = WeakSet()  # hooks that have left out a call
_short: WeakSet[object] = WeakSet()  # hooks for which a device had no memory


def leaves_out_captured(tensor: torch.Tensor, hook: object, joins: bool = False) -> bool:
    """Whether a hook must leave out a call because a CUDA graph captures it. Warns once for each hook.

    Args:
        tensor: A tensor of the call.
        hook: The hook.
        joins: Whether its readers can become part of the graph. They do if `late.graph_of` returns one with room.
    """
    if not in_graph_capture(tensor):
        return False
    graph = graph_of(tensor) if joins else None
    if graph is not None and not graph.is_full:
        return False
    if hook not in _warned:
        _warned.add(hook)
        reason = (
            "they have no values before the graph is replayed" if graph is None else "it has no room for more values"
        )
        remedy = "pass graphs=True to intercept, or " * (joins and graph is None)
        text = (
            f"{type(hook).__name__} leaves out calls that a CUDA graph captures, since {reason}; "
            f"{remedy}run them once without the graph"
        )
        warnings.warn(text, OpInterceptWarning, stacklevel=2)
    return True


def warn_of_memory(hook: object, what: str, remedy: str) -> None:
    """Warn, once for each hook, that it leaves something out because a device has no memory left for it."""
    if hook not in _short:
        _short.add(hook)
        text = f"{type(hook).__name__} leaves out {what} for which the device has no memory left; {remedy}"
        warnings.warn(text, OpInterceptWarning, stacklevel=3)


def first_output(output: Any) -> Any:
    """The output, or the first tensor of several: an attention's result, not its log-sum-exp."""
    if not isinstance(output, (tuple, list)):
        return output
    return next((each for each in output if isinstance(each, torch.Tensor)), output)


def parameter_of(tensor: torch.Tensor) -> torch.nn.Parameter | None:
    """The parameter that a tensor is or views; only parameters live long enough to be worth remembering."""
    base = tensor if tensor._base is None else tensor._base
    return base if isinstance(base, torch.nn.Parameter) and not base.is_inference() else None


def storage_ref(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
    """A weak reference to the memory; `torch.utils.swap_tensors` would refuse a tensor that has one itself."""
    return weakref.ref(tensor.untyped_storage())
