"""`Errors`: how far outputs are from their references: absolute, relative, in ULPs, as a signal-to-noise ratio.

Invariant: adding waits for a device once, and needs memory for a piece of the output.
"""

from __future__ import annotations

import math

import torch

from opintercept._core.tensors import dtype_name

PIECE = 1 << 20
"""How many elements are compared at a time: 8 MiB of float64."""
_EXPONENT = 0x7FF0000000000000  # the exponent bits of a float64


class OtherShape(ValueError):
    """A reference does not have as many elements as the output."""


class Errors:
    """Adds up the errors of a call; `hooks.ReferenceRow` explains them."""

    def __init__(self) -> None:
        self.dtype = ""  # of the first output
        self.absolute = self.relative = self.ulp = 0.0
        self.nonfinite = 0
        self._noise = self._signal = self._output = 0.0  # Euclidean norms of y - r, r and y

    def add(self, output: torch.Tensor, reference: torch.Tensor, ulp_of: torch.dtype | None = None) -> None:
        """Add an output, in pieces. Its dtype defines the ULP, unless `ulp_of` is given."""
        info = torch.finfo(ulp_of or output.dtype)
        self.dtype = self.dtype or dtype_name(output.dtype)
        output, reference = _flat(output), _flat(reference)
        if output.numel() != reference.numel():
            raise OtherShape("its reference has another shape")
        wide = torch.complex128 if output.is_complex() else torch.float64
        for first in range(0, output.numel(), PIECE):
            piece = slice(first, first + PIECE)
            self._add(output[piece].to(reference.device, wide), reference[piece].to(wide), info)

    def _add(self, output: torch.Tensor, reference: torch.Tensor, info: torch.finfo) -> None:
        finite = torch.isfinite(output) & torch.isfinite(reference)
        alike = finite | (output == reference) | (torch.isnan(output) & torch.isnan(reference))
        output, reference = output.where(finite, 0), reference.where(finite, 0)
        error, size = (output - reference).abs(), reference.abs()
        relative = (error / size).where(error != 0, 0)
        power = (size.view(torch.int64) & _EXPONENT).view(torch.float64)  # 2**floor(log2(size))
        ulp = error / (power.clamp(min=info.smallest_normal) * info.eps)
        figures = [(~alike).sum(), error.amax(), relative.amax(), ulp.amax()]
        for values in (error, size, output.abs()):
            peak = values.amax().clamp(min=5e-324)  # scale, since squares of large or small float64 leave its range
            figures += [peak, torch.linalg.vector_norm(values / peak)]
        # Wait for the device only once.
        wrong, *maxima, n, noise, s, signal, o, out = torch.stack([f.double() for f in figures]).tolist()
        self.nonfinite += int(wrong)
        absolute, relative_, ulp_ = [math.inf] * 3 if wrong else maxima
        self.absolute = max(self.absolute, absolute)
        self.relative = max(self.relative, relative_)
        self.ulp = max(self.ulp, ulp_)
        self._noise = math.hypot(self._noise, n * noise)
        self._signal = math.hypot(self._signal, s * signal)
        self._output = math.hypot(self._output, o * out)

    @property
    def snr(self) -> float:
        """Signal-to-noise ratio in decibels."""
        if math.isinf(self.absolute):
            return -math.inf
        if not self._noise:
            return math.inf
        return 20 * math.log10(self._signal / self._noise) if self._signal else -math.inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between outputs and references."""
        y, r, error = self._output, self._signal, self._noise
        if not y or not r:
            return 1.0 if y == r else 0.0
        # Computing 1 - cosine from y . r would cancel. The law of cosines has only the error of the squared noise.
        return min(1.0, max(-1.0, 1 + (y - r - error) / y * ((y - r + error) / r) / 2))


def between(output: torch.Tensor, reference: torch.Tensor) -> Errors:
    """The errors of any tensor, with the ULP of the coarser dtype; that of float64 stands for whole numbers."""
    wide = [each if each.is_floating_point() or each.is_complex() else each.double() for each in (output, reference)]
    errors = Errors()
    errors.add(wide[0], wide[1], max((each.dtype for each in wide), key=lambda dtype: torch.finfo(dtype).eps))
    return errors


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one dimension, including the zeros of a sparse tensor."""
    if tensor.is_nested:
        return torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().reshape(-1)
