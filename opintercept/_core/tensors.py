"""Tensors without torch: how to tell, describe, compare and overwrite them, and `TensorMeta`, a description to keep.

Must not import torch, so that the pipeline can be tested without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def unflipped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of a view that torch conjugates or negates lazily."""
    # A dispatch mode gets such views as they are, and arithmetic on them is silently wrong there.
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def named_tensors(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Yield the tensors in an argument, each with a name: `"weights"`, or `"weights[0]"` in a list."""
    if is_tensor(value):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from named_tensors(f"{name}[{place}]", part)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor without its values.

    Attributes:
        shape: Its sizes; -1 for the ragged dimension of a nested tensor.
        dtype: `"float32"`.
        device: `"cuda:0"`.
        stride: Its strides in elements; None if its layout has none.
        requires_grad: Whether autograd records what is computed with it.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    stride: tuple[int, ...] | None
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Any) -> TensorMeta | None:
        """Return the description of a tensor, or None if `tensor` is something else."""
        if not is_tensor(tensor):
            return None
        try:
            stride = tuple(tensor.stride()) if is_strided(tensor) else None
            return cls(shape_of(tensor), dtype_of(tensor), str(tensor.device), stride, bool(tensor.requires_grad))
        except Exception:  # a subclass whose attributes raise
            return cls((), f"<{type(tensor).__name__}>", "unknown", None, False)

    def __str__(self) -> str:
        device = "" if self.device == "cpu" else f"@{self.device}"
        return f"{self.dtype}{list(self.shape)}{device}"


def is_tensor(value: Any) -> bool:
    """Whether a value looks like a tensor, decided without importing torch."""
    try:
        return hasattr(value, "dtype") and hasattr(value, "device") and hasattr(value, "requires_grad")
    except Exception:  # a subclass of a tensor whose dtype raises
        return all(hasattr(type(value), name) for name in ("dtype", "device", "requires_grad"))


def is_strided(tensor: Any) -> bool:
    """Whether the tensor is one dense, strided array."""
    return str(tensor.layout) == "torch.strided" and not tensor.is_nested


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape, with -1 for the ragged dimension of a nested tensor."""
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
    """Return the bytes of a tensor's elements: 0 without a tensor, None if a layout has no fixed size per element."""
    if not is_tensor(tensor):
        return 0
    return int(tensor.numel() * tensor.element_size()) if is_strided(tensor) else None


def dtype_name(dtype: Any) -> str:
    """Return `"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(tensor: Any) -> str:
    """Return the name of a tensor's dtype, or `"?"` if a subclass raises when asked."""
    try:
        return dtype_name(tensor.dtype)
    except Exception:
        return "?"


def describe(value: Any) -> str:
    """Write a value for a message: a tensor as `float32[2, 3]@cuda:0`, a list by its elements, the rest as its repr."""
    meta = TensorMeta.of(value)
    if meta is not None:
        return str(meta)
    if isinstance(value, (list, tuple)):
        shown = [describe(item) for item in value[:4]] + (["..."] if len(value) > 4 else [])
        return f"[{', '.join(shown)}]"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the tensors among arguments and in lists among them, in order."""
    return [tensor for value in (*args, *kwargs.values()) for _, tensor in named_tensors("", value)]


def tensors_in(output: Any) -> list[Any]:
    """Return the tensors of an output, which is a tensor or a list or tuple of them."""
    if is_tensor(output):
        return [output]
    return [t for t in output if is_tensor(t)] if isinstance(output, (list, tuple)) else []


def flat(value: Any) -> list[Any]:
    """Return the items of lists and tuples inside one another; a value in a list of its own."""
    return [each for part in value for each in flat(part)] if isinstance(value, (list, tuple)) else [value]


def nested_tensors(value: Any) -> Iterator[Any]:
    """The tensors of arguments or outputs, also those in lists, tuples and dictionaries of them."""
    if is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from nested_tensors(part)


def copy_into(target: Any, source: Any) -> None:
    """Copy the values of `source`, which may be a view of `target`, into `target`."""
    if isinstance(target, (tuple, list)):
        for part, new in zip(target, source, strict=True):
            if is_tensor(part):
                copy_into(part, new)
    elif target is not source:
        # A view of `target`, such as its transpose, must be read completely before any of it is overwritten.
        target.copy_(source.clone() if share_memory(target, source) else source)


def share_memory(one: Any, other: Any) -> bool:
    """Whether two tensors may overlap in memory. True if that is unknown."""
    # By address, not by storage: autograd does not accumulate into a tensor whose storage Python holds (use_count).
    try:
        first, first_end = _extent(one)
        second, second_end = _extent(other)
        return first < second_end and second < first_end
    except (NotImplementedError, RuntimeError):  # a layout without one array
        return True


def _extent(tensor: Any) -> tuple[int, int]:
    """Return the address of a tensor's first byte and the address after its last byte."""
    start = int(tensor.data_ptr())
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * int(tensor.element_size())
