"""Reading the values of whatever tensor a call has, and what `Print` and `Log` say of them, waiting for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import mul
from typing import Any, NamedTuple, TypeVar

import torch

from opintercept._errors import OpInterceptWarning
from opintercept._tensors import is_strided

_Result = TypeVar("_Result")


def without_graph(compute: Callable[..., _Result], *args: Any) -> _Result:
    """Call a function with gradients off, and put them back whatever happens.

    `with torch.no_grad()` leaves them off for the program if Ctrl-C comes inside of its `__enter__` or `__exit__`.
    """
    enabled = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(False)
        return compute(*args)
    finally:
        try:
            torch.set_grad_enabled(enabled)
        finally:  # if an interrupt came before that was done
            torch.set_grad_enabled(enabled)


class Summary(NamedTuple):
    """Range and moments of a tensor's finite and non-finite values; those of the moduli if complex.

    Attributes:
        std: Population standard deviation, in float64.
        nonfinite: How many values are NaN or infinite; they are left out of the rest.
    """

    min: float
    max: float
    mean: float
    std: float
    nonfinite: int

    def __str__(self) -> str:
        text = f"min {self.min:.3g} max {self.max:.3g} mean {self.mean:.3g} std {self.std:.3g}"
        return f"{text} NONFINITE {self.nonfinite}" if self.nonfinite else text


# Up to so many bytes, to ask for the bounds of the memory takes as long as to read it.
_QUICK = 1 << 16


def in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements can be read: memory that is not there ends the process.

    FSDP frees parameters with `untyped_storage().resize_(0)`, and operators that do not read them run on. Meta and
    fake tensors have no memory, and functorch's wrapped tensors none of their own. A storage that was resized to less
    than the tensor needs, but not to nothing, is noticed for tensors of more than 64 KiB.

    The storage itself is not asked: autograd copies a gradient whose storage Python has asked for.
    """
    try:
        if tensor.is_meta:
            return False
        kind = type(tensor)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter and _dispatches(kind):
            flatten = getattr(tensor, "__tensor_flatten__", None)
            if flatten is None:
                return tensor.untyped_storage().device.type != "meta"  # fake; data_ptr would only warn
            return all(in_memory(getattr(tensor, name)) for name in flatten()[0])
        if tensor.layout is not torch.strided:
            return all(map(in_memory, parts_of(tensor)))
        # The address of a null storage is the offset into it. Raises for a tensor that stands for others.
        if tensor.data_ptr() == tensor.storage_offset() * tensor.element_size():
            return not tensor.numel() or tensor._is_zerotensor()  # autograd's zeros need no memory
        if tensor.nbytes > _QUICK and not tensor.is_nested:
            # Checks the bounds. A node of autograd's would be made of a tensor that is not detached.
            tensor.detach().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return True
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return False


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's own memory is not there, see `in_memory`; false for one that never had any."""
    if tensor.is_meta or in_memory(tensor):
        return False
    if _dispatches(type(tensor)):
        return hasattr(tensor, "__tensor_flatten__")
    try:
        return tensor.layout is not torch.strided or tensor.data_ptr() >= 0
    except RuntimeError:  # stands for others
        return False


def _dispatches(kind: type) -> bool:
    """Whether tensors of a class are made of others: a plain subclass has memory of its own."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a sparse tensor is made of; none for an opaque layout."""
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def stored_values(tensor: Any) -> torch.Tensor | None:
    """The values as a dense real tensor where they are, mostly the tensor itself; None where there are none to read.

    See `in_memory` for which have none. A sparse tensor's zeros count, and a complex tensor's values are its moduli.
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
    """The values as a flat float64 tensor on the CPU, or None; see `stored_values`."""
    values = stored_values(tensor)
    try:
        return None if values is None else values.to("cpu", torch.float64).reshape(-1)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def summarize(tensor: Any) -> Summary | None:
    """Summarise a tensor; None if it has no values to read."""
    values = real_values(tensor)
    if values is None or values.numel() == 0:
        return None
    try:
        finite = values[torch.isfinite(values)]
        nonfinite = values.numel() - finite.numel()
        if finite.numel() == 0:
            return Summary(float("nan"), float("nan"), float("nan"), float("nan"), nonfinite)
        low, high = torch.aminmax(finite)
        return Summary(low.item(), high.item(), finite.mean().item(), finite.std(correction=0).item(), nonfinite)
    except RuntimeError:  # vmap: one value for a whole batch cannot be read
        return None


_ROW = 1 << 10  # values whose squares may be added up one after the other in float32


def moments(values: torch.Tensor) -> tuple[float, float]:
    """The sum, in float64, and the sum of squares of a flat float32 or float64 tensor on the CPU.

    The squares by rows, since torch adds up those of float32 one after the other, and of 2**24 values the norm is
    5e-4 off (pytorch issue 169237).
    """
    whole = values.numel() // _ROW * _ROW if values.dtype is torch.float32 else 0
    squares = 0.0
    if whole:
        rows = values if whole == values.numel() else values[:whole]
        norms = torch.linalg.vector_norm(rows.view(-1, _ROW), dim=1).tolist()
        squares = sum(map(mul, norms, norms))
    if whole < values.numel():
        norm = float(torch.linalg.vector_norm(values[whole:], dtype=torch.float64))
        squares += norm * norm
    return float(values.sum(dtype=torch.float64)), squares


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


def all_finite(tensor: Any) -> torch.Tensor | None:
    """Whether every value is finite: a tensor that has not been waited for, or None where no value can be read."""
    if not isinstance(tensor, torch.Tensor) or not in_memory(tensor):
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # it would become a part of the graph
    try:
        if tensor.dtype in _FLOATS and is_strided(tensor):
            return torch.isfinite(tensor.detach()).all()
        values = stored_values(tensor)  # of float8 and the like, which lack the operator, as float64
        return None if values is None else torch.isfinite(values.to(torch.float64)).all()
    except (RuntimeError, TypeError):
        return None


def sample(tensor: Any, count: int, generator: torch.Generator) -> list[float]:
    """`count` values drawn with replacement from a generator of the caller's; none if there are none."""
    values = real_values(tensor)
    if values is None or values.numel() == 0:
        return []
    try:
        places = torch.randint(values.numel(), (count,), generator=generator)
        return [float(value) for value in values[places].tolist()]
    except RuntimeError:
        return []


_warned: set[str] = set()


def captured(values: torch.Tensor, hook: str) -> bool:
    """Whether a CUDA graph captures the running call, whose values are not there before its replay; warns once."""
    if not (values.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    if hook not in _warned:
        _warned.add(hook)
        text = f"{hook} leaves out calls that a CUDA graph captures, they have no values yet; run them once outside"
        warnings.warn(text, OpInterceptWarning, stacklevel=2)
    return True


def first_output(output: Any) -> Any:
    """The output, or the first of several: an attention's result, not its log-sum-exp."""
    return output[0] if isinstance(output, (tuple, list)) and output else output
