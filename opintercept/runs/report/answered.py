"""Writes what `why` has found as an HTML page: the answer, what each cause costs, and where it is.

Invariant: as in `page`. Of many causes the page shows those that cost most, and says how many are left out. Must not
import torch.
"""

from __future__ import annotations

import math
import os
from typing import Any

from opintercept._core.text import counted
from opintercept.runs.report.page import filled, save
from opintercept.runs.report.panels import NAME, NAMED, rounded, shown_text
from opintercept.runs.why.answer import Answer, Cause

CAUSES = 200


def write(path: str | os.PathLike[str], found: Answer) -> None:
    """Write the page. If that fails, `path` stays as it was."""
    save(path, page(found))


def page(found: Answer) -> str:
    """The page as text."""
    loss = found.loss
    layers = sorted(found.layers, key=lambda layer: -abs(layer.cost))
    roundings = [("rounding", layer.module, "measured in A's program", layer.cost) for layer in layers[:CAUSES]]
    rows = [*map(_cause, found.rows()[:CAUSES]), *(_row(*each, []) for each in roundings)]
    left = len(found.rows()) + len(layers) - len(rows)
    notes = [f"{counted(left, 'cause')} that cost less are left out"] if left > 0 else []
    data = {
        "answer": shown_text(found.sentence, 4 * NAME),
        "equal": found.equal,
        "runs": [shown_text(each.path, NAME) for each in (found.a, found.b)],
        "programs": "one program" if found.same_program else "two programs",
        "joined": [found.joined, found.calls, "calls" if found.operators == "all" else "products"],
        "loss": loss and [shown_text(loss.name), *map(_finite, (loss.a, loss.b, loss.b - loss.a, loss.rest))],
        "causes": rows,
        "rounding": bool(layers),
        "notes": [*notes, *(shown_text(note, 4 * NAME) for note in found.notes)],
    }
    return filled("why", "answered", "plots parts answered", data)


def _cause(cause: Cause) -> dict[str, Any]:
    def places(named: str, *given: Any) -> list[list[str]]:
        shown = [shown_text(str(each)) for each in given]
        more = [f"{len(shown) - NAMED} others"] if len(shown) > NAMED else []
        return [[named, ", ".join([*shown[:NAMED], *more])]] if shown else []

    roundings = rounded(cause.roundings)
    facts = [
        *places("also in", *cause.also),
        *places("in B", *([] if cause.other is None else [cause.other])),
        *places("begins after", *cause.after),
        *places("only A computes", *cause.only_a),
        *places("only B computes", *cause.only_b),
        *([] if roundings is None else [["off by", f"{roundings:g} times what rounding may do"]]),
        *([["or", shown_text(f"B {other}")] for other in cause.others]),
    ]
    what = f"B {cause.what}" if cause.what else "not known: no single change that was tried explains it"
    return _row(what, str(cause.place), cause.certainty, cause.cost, facts)


def _row(what: str, place: str, sure: str, cost: float | None, facts: list[list[str]]) -> dict[str, Any]:
    shown = {"what": shown_text(what), "place": shown_text(place), "sure": shown_text(sure)}
    return shown | {"cost": _finite(cost), "facts": facts}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
