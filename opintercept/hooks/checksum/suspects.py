"""Looks at the rows of a product that its checksum suspects, and says which elements are wrong, and why.

Invariant: a finding rests on exact values alone. What the screen suspects in vain costs time, and no alarm. Must not
import the hook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from opintercept._core.call import OpCall
from opintercept.hooks.checksum import arithmetic as sums
from opintercept.hooks.checksum.findings import WrongProduct
from opintercept.hooks.checksum.launches import Begun
from opintercept.hooks.checksum.products import products_of

SCREEN = 0.75
"""The share of `sigma` above which a row is looked at. What is looked at in vain costs time, and no alarm."""
LOOKED_AT = 16
"""The most rows of a product that are computed exactly."""


class Kept(NamedTuple):
    """What `Checksum` keeps of a call until it has run."""

    expected: list[sums.Expected | Begun]
    copies: dict[str, torch.Tensor]  # of operands that the call overwrites, by their name in `OpCall.tensors`


def look(
    call: OpCall,
    kept: Kept,
    expected: sums.Expected,
    place_of: int,
    output: torch.Tensor,
    units: sums.Units,
    seen: sums.Screen,
    sigma: float,
    forget: Callable[[torch.Tensor, torch.Tensor], None],
) -> WrongProduct | None:
    """Look at the rows that the screen suspects in one of the call's products; return a finding if they are wrong.

    `forget` forgets what is remembered of an operand with these signs.
    """
    product = expected.product
    changed: dict[str, None] = {}
    if expected.remembered:
        fresh = sums.expect(product, expected.signs.dtype, expected.signs.shape[1], None)
        differing = int((~sums.same(fresh.inner, expected.inner)).any(-1).sum())
        if differing:
            forget(product.rhs, expected.signs)
            if differing == 1:  # the program has changed one value without torch's knowing, or it was hit
                changed["lhs" if product.turned else "rhs"] = None
            expected, seen = fresh, sums.screen(fresh, output, units)
            if not changed and float(seen.worst()) <= SCREEN * sigma:
                return None
    changed |= dict.fromkeys(_changed(call, kept, place_of, expected, output, seen))
    wrong: set[int] = set()
    most = 1.0
    position: tuple[int, ...] = ()
    for batch, rows, columns in _suspects(expected, seen, sigma):
        examined = sums.examine(product, output, units, sigma, batch, rows, columns)
        ratio, place = examined.verdict(sigma).tolist()
        if ratio > 1:
            height, width = divmod(int(place), examined.error.shape[1])
            bad = (examined.error > examined.bound).any(1)
            bad[height] = True
            first = 0 if batch is None else int(batch) * product.lhs.shape[-2]
            wrong |= {first + row for row in rows[bad].tolist()}
        if ratio > most:
            most, best = ratio, (examined, height, width)
            position = (*(() if batch is None else (int(batch),)), int(rows[height]), width + (columns.start or 0))
    if not wrong and not changed:
        forget(product.rhs, expected.signs)  # the factor that was kept with it may no longer hold
        return None
    suspected = int((~(seen.rows() <= SCREEN * sigma * seen.deviation)).sum())
    if not wrong:
        return WrongProduct(call.record(), (), (), suspected, 0.0, 0.0, 0.0, 0.0, tuple(changed))
    examined, height, width = best
    if product.turned:
        position = (*position[:-2], position[-1], position[-2])
    return WrongProduct(
        call.record(),
        position,
        tuple(sorted(wrong)),
        suspected,
        examined.got[height, width].item(),
        examined.exact[height, width].item(),
        float(examined.error[height, width]),
        float(examined.bound[height, width]),
        tuple(changed),
        _repeats(call, kept, expected, units, sigma),
        flags=examined.flags_at(height, width),
    )


def _suspects(
    expected: sums.Expected, seen: sums.Screen, sigma: float
) -> Iterator[tuple[torch.Tensor | None, torch.Tensor, slice]]:
    """What to compute exactly: the most suspected rows, or else the columns of the most suspected group."""
    product, limit = expected.product, SCREEN * sigma * seen.deviation
    scores = seen.rows().nan_to_num(math.inf)
    top = scores.topk(min(LOOKED_AT, scores.numel()))
    rows = top.indices[top.values > limit]
    for batch, some in sums.row_places(product, rows) if rows.numel() else ():
        yield batch, some, slice(None)
    whole = None if rows.numel() else seen.groups()
    if whole is not None:
        groups, n = expected.signs.shape[1], product.rhs.shape[-1]
        width = -(-n // groups)
        batch_of, group = divmod(int(whole.nan_to_num(math.inf).argmax()), groups)
        every = torch.arange(product.lhs.shape[-2])
        batch = None if product.lhs.dim() == 2 else torch.tensor([batch_of])
        yield batch, every, slice(group * width, min(n, (group + 1) * width))


def _changed(
    call: OpCall,
    kept: Kept,
    place: int,
    expected: sums.Expected,
    output: torch.Tensor,
    seen: sums.Screen,
) -> list[str]:
    """Which tensors have changed since their checksums were taken, by taking them again."""
    product, wide, groups = expected.product, expected.signs.dtype, expected.signs.shape[1]
    found = []
    again = sums.expect(product, wide, groups, None)
    given = products_of(call, kept.copies)[place]
    operands = sums.expect(given, wide, groups, None)  # another hook may have replaced them
    for now in (again, operands):
        if not sums.alike(now.inner, expected.inner):
            found.append("lhs" if product.turned else "rhs")
        rounds = wide.is_floating_point or wide.is_complex
        through, _ = sums.project(now.product.lhs, expected.inner, norms=rounds)  # in the same pieces as before
        if not sums.alike(through, expected.middle):
            found.append("rhs" if product.turned else "lhs")
    units = sums.units_of(product, output.dtype)
    if not sums.alike(sums.screen(expected, output, units).residual, seen.residual):
        found.append("output")
    return list(dict.fromkeys(found))


def _repeats(call: OpCall, kept: Kept, expected: sums.Expected, units: sums.Units, sigma: float) -> bool | None:
    """Whether the operator makes a wrong product again."""
    written = call.written if may_write(call.func) else []
    named = call.tensors
    copies = {id(tensor): tensor.clone() for tensor in written}
    copies |= {id(named[name]): copy.clone() for name, copy in kept.copies.items() if name in named}
    try:
        args, kwargs = _replaced(call.args, copies), _replaced(call.kwargs, copies)
        again = call.func(*args, **kwargs)
        if again is None:
            return None
        output = expected.product.out(again).detach()
        seen = sums.screen(expected, output, units)
        for batch, rows, columns in _suspects(expected, seen, sigma):
            examined = sums.examine(expected.product, output, units, sigma, batch, rows, columns)
            if float(examined.verdict(sigma)[0]) > 1:
                return True
        return False
    except Exception:  # the operator may have side effects that keep it from running twice
        return None


def may_write(func: Any) -> bool:
    """Whether an operator may write to an argument of its caller."""
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.is_mutable)


def _replaced(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Arguments with copies in the place of some tensors."""
    if isinstance(value, torch.Tensor):
        return copies.get(id(value), value)
    if isinstance(value, dict):
        return {name: _replaced(item, copies) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_replaced(item, copies) for item in value])
    return value
