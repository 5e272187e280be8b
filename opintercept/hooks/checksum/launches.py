"""Checks products on CUDA devices in at most four launches, see `_native/device/checksum.h`.

Invariant: nothing waits for a device before `Checking.suspect`, and no operand is kept until then. The verdict is that
of `arithmetic.judge`, from what the device computes of the most suspected row. Must not import the hook.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Any, NamedTuple

import torch

from opintercept._native import library
from opintercept._values import on_device
from opintercept.hooks.checksum import arithmetic as sums
from opintercept.hooks.checksum.products import Product


class Fields(IntFlag):
    """What is computed of a row: `Field` of `device/checksum.h`, in its order."""

    GOT = 1
    VALUE = 2
    SIZE = 4
    SQUARE = 8
    CUT = 16
    PART = 32
    BIAS = 64
    LOST = 128
    FACTOR = 256


class Weights:
    """The checksums of weights on devices, which hold until torch writes to the weight."""

    def __init__(self) -> None:
        self._memory: Any = None

    def begin(self, product: Product) -> Begun | None:
        """Take the checksums of a product's operands, on their device; None if torch's operators have to.

        Raises:
            RuntimeError: The device has no memory left.
        """
        if product.lhs.device.type != on_device.DEVICE or not on_device.is_ready(product.lhs.device, checks=True):
            return None
        module: Any = library.find().module
        if self._memory is None:
            self._memory = module.Weights()
        alpha, beta = product.alpha, product.beta
        if isinstance(alpha, complex) or isinstance(beta, complex):
            return None
        operands = product.lhs, product.rhs, product.bias, product.rows, product.columns
        check = module.check_on_device(self._memory, *operands, float(alpha), float(beta))
        return None if check is None else Begun(product, check)


class Kind(NamedTuple):
    """What is known of all products that look alike.

    The first three are when a row is suspect, and what is computed of it; the others, what it is judged by.
    """

    deviation: float
    limit: float
    fields: Fields
    product: Product  # without its tensors
    units: sums.Units
    dtype: torch.dtype
    converts: bool
    k: int
    n: int
    batched: bool

    def terms(self, data: bytearray, most: float) -> sums.Terms:
        """What `arithmetic.judge` takes, of what the device has computed."""
        rows = dict(zip(self.fields, torch.frombuffer(data, dtype=torch.float64).view(-1, 1, self.n), strict=True))
        product = self.product
        return sums.Terms(
            got=rows[Fields.GOT].to(self.dtype),
            value=rows[Fields.VALUE],
            alpha=product.alpha,
            beta=product.beta,
            apart=product.apart,
            partial=product.partial,
            converts=self.converts,
            k=self.k,
            units=self.units,
            factor=rows.get(Fields.FACTOR, product.alpha),
            bias=rows.get(Fields.BIAS),
            size=rows[Fields.SIZE],
            square=rows.get(Fields.SQUARE),
            cut=rows.get(Fields.CUT),
            parts=rows.get(Fields.PART),
            most=torch.tensor(most, dtype=torch.float64) if self.converts or abs(product.alpha) > 1 else None,
            lost=rows.get(Fields.LOST),
        )


_NOTHING = torch.empty(0)


def kind_of(product: Product, output: torch.dtype, share: float) -> Kind:
    """The kind of a product with an output of a dtype.

    Args:
        product: The product.
        output: The dtype.
        share: How many standard deviations a row may be off that is not suspect.
    """
    units, converts = sums.units_of(product, output), sums.converts(product, output)
    fields = Fields.GOT | Fields.VALUE | Fields.SIZE
    for field, wanted in (
        (Fields.SQUARE, units.operands > 0),
        (Fields.CUT, units.cuts),
        (Fields.PART, units.partial > 0),
        (Fields.BIAS, product.bias is not None),
        (Fields.LOST, sums.loses(product, converts)),
        (Fields.FACTOR, product.rows is not None or product.columns is not None),
    ):
        fields |= field if wanted else Fields(0)
    k, n = product.rhs.shape[-2:]
    deviation = sums.deviation_of(product, units, sums.wide_dtype(product, False), sums.groups_of(product, False))
    left = product._replace(lhs=_NOTHING, rhs=_NOTHING, bias=None, rows=None, columns=None)
    return Kind(deviation, share * deviation, fields, left, units, output, converts, k, n, product.lhs.dim() > 2)


class Begun(NamedTuple):
    """A product whose operands a device is reading."""

    product: Product
    check: Any

    def finish(self, output: torch.Tensor, share: float) -> Checking | None:
        """Compare them with the output, which has the shape of the product; None if they cannot be compared.

        Raises:
            RuntimeError: The device has no memory left.
        """
        kind = kind_of(self.product, output.dtype, share)
        if not self.check.finish(output, kind.deviation, kind.limit, int(kind.fields)):
            return None
        return Checking(self.check, kind)


class Checking(NamedTuple):
    """A product that a device is checking."""

    check: Any
    kind: Kind

    def suspect(self) -> SuspectRow | None:
        """The row that is suspected most; None if none is. Waits for the device.

        Raises:
            RuntimeError: The device has failed.
        """
        found = self.check.found()
        if found is not None and not found[2]:
            return None
        data = None if found is None else self.check.terms()
        if data is None:
            raise RuntimeError("the device has failed before it could check a product")
        self.check.forget()  # what is remembered of the weight may be what is wrong
        _, flat, suspected, most, height = found
        return SuspectRow(flat, height, suspected, self.kind.terms(data, most))


class SuspectRow(NamedTuple):
    """The most suspected row of a product."""

    flat: int  # its index, counted through the batch
    height: int  # the rows of each matrix of the batch
    suspected: int  # how many rows are suspect
    terms: sums.Terms  # on the host
