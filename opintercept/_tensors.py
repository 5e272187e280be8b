"""What can be said of a tensor without torch: its kind, shape, dtype and size, and `TensorMeta`, which keeps them.

Must not import torch: the pipeline is tested without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def unflipped(tensor: torch.Tensor) -> torch.Tensor:
    # Below torch's conjugate and negative keys arrive lazily flipped views, and arithmetic on those is silently
    # wrong in a dispatch mode.
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def named_tensors(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if is_tensor(value):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from named_tensors(f"{name}[{place}]", part)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor without its values. `stride` is None for layouts that have none."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    stride: tuple[int, ...] | None
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Any) -> TensorMeta | None:
        """Describe `tensor`; None for what is not a tensor."""
        if not is_tensor(tensor):
            return None
        try:
            stride = tuple(tensor.stride()) if is_strided(tensor) else None
            return cls(shape_of(tensor), dtype_of(tensor), str(tensor.device), stride, bool(tensor.requires_grad))
        except Exception:  # a subclass whose attributes raise; what it says of itself is all there is
            return cls((), f"<{type(tensor).__name__}>", "unknown", None, False)

    def __str__(self) -> str:
        device = "" if self.device == "cpu" else f"@{self.device}"
        return f"{self.dtype}{list(self.shape)}{device}"


def is_tensor(value: Any) -> bool:
    """Tell a tensor by its look, so that no torch has to be imported."""
    try:
        return hasattr(value, "dtype") and hasattr(value, "device") and hasattr(value, "requires_grad")
    except Exception:  # a subclass of a tensor whose dtype raises
        return all(hasattr(type(value), name) for name in ("dtype", "device", "requires_grad"))


def is_strided(tensor: Any) -> bool:
    """Whether the tensor is one dense, strided array."""
    return str(tensor.layout) == "torch.strided" and not tensor.is_nested


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape; a ragged dimension of a nested tensor is -1."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    dims = []
    for dim in range(tensor.dim()):
        try:
            dims.append(int(tensor.size(dim)))
        except (AttributeError, RuntimeError, TypeError, ValueError):
            dims.append(-1)
    return tuple(dims)


def nbytes(tensor: Any) -> int | None:
    """Bytes of a tensor's elements; 0 for no tensor, None for a layout without a plain size."""
    if not is_tensor(tensor):
        return 0
    return int(tensor.numel() * tensor.element_size()) if is_strided(tensor) else None


def dtype_name(dtype: Any) -> str:
    """`"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(tensor: Any) -> str:
    """The name of a tensor's dtype; `"?"` for a subclass that does not say it."""
    try:
        return dtype_name(tensor.dtype)
    except Exception:
        return "?"


def describe(value: Any) -> str:
    """Write a value for a message: `float32[2, 3]@cuda:0`, a list by its elements, the rest by repr."""
    meta = TensorMeta.of(value)
    if meta is not None:
        return str(meta)
    if isinstance(value, (list, tuple)):
        shown = [describe(item) for item in value[:4]] + (["..."] if len(value) > 4 else [])
        return f"[{', '.join(shown)}]"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors among arguments, those in lists too, in order."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            found += tensors_of(tuple(value), {})
        elif is_tensor(value):
            found.append(value)
    return found


def tensors_in(output: Any) -> list[Any]:
    if is_tensor(output):
        return [output]
    return [t for t in output if is_tensor(t)] if isinstance(output, (list, tuple)) else []


def copy_into(target: Any, source: Any) -> None:
    """Give `target` the values of `source`, which may be a view of it."""
    if isinstance(target, (tuple, list)):
        for part, new in zip(target, source, strict=True):
            if is_tensor(part):
                copy_into(part, new)
    elif target is not source:
        # A view of `target` (its transpose, say) must be read whole before any of it is overwritten.
        target.copy_(source.clone() if share_memory(target, source) else source)


def share_memory(one: Any, other: Any) -> bool:
    # By address: autograd does not accumulate into a tensor whose storage Python has asked for (use_count).
    try:
        first, first_end = _extent(one)
        second, second_end = _extent(other)
        return first < second_end and second < first_end
    except (NotImplementedError, RuntimeError):  # a layout without one array
        return True


def _extent(tensor: Any) -> tuple[int, int]:
    """The addresses of a tensor's first byte and behind its last one."""
    start = int(tensor.data_ptr())
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * int(tensor.element_size())
