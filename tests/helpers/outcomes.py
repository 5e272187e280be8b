"""Pairs of programs, what `why` must say of each, and how what it says is judged.

The test of the pairs and their scoreboard share this.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from opintercept import intercept, runs
from opintercept.runs.why.answer import Answer, Cause, CauseKind, Place

Program = Callable[[], object]
Recorded = Literal["all", "products", "mixed"]
_OPS: dict[str, tuple[str, str]] = {
    "all": ("all", "all"),
    "products": ("matmul", "matmul"),
    "mixed": ("all", "matmul"),  # a trainer that can be run again, and an engine of which products are known
}
_SEEN: set[CauseKind] = {"operand", "input", "unknown"}  # kinds of what only products show
_PROGRAMS = Path(__file__).parent.parent / "programs"


@dataclass(frozen=True)
class Planted:
    """What one program does otherwise.

    Attributes:
        place: A pattern for the module of a cause, its operator, its file, or the text of its line.
        kinds: The kinds that are right.
        words: A pattern for what B does, with which the cause is named.
    """

    place: str
    kinds: frozenset[CauseKind]
    words: str


def planted(place: str, kinds: str, words: str) -> Planted:
    """`kinds` is a list in words, `"operator argument"`."""
    return Planted(place, frozenset(kinds.split()), words)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pair:
    """Two programs.

    Attributes:
        name: The architecture, the form and the cause.
        programs: Returns both programs, with models of their own.
        planted: What B does otherwise; None if nothing may be named.
        trains: Whether the programs run with gradients.
        fault: A hook that edits what the second program computes.
        ops: What the test records.
    """

    name: str
    programs: Callable[[], tuple[Program, Program]]
    planted: Planted | None = None
    trains: bool = False
    fault: Callable[[], Any] | None = None
    ops: Recorded = "all"


def add(
    pairs: list[Pair],
    name: str,
    place: str = "",
    kinds: str = "",
    words: str = "",
    *,
    made: bool = False,
    trains: bool = False,
) -> Callable[[Callable[[bool], Any]], Callable[[bool], Any]]:
    """Add a program as a pair. The program is given whether it is the second one, which is planted if it has a place.

    What it does is recorded, unless it is `made`: then it returns what is.
    """

    def adding(program: Callable[[bool], Any]) -> Callable[[bool], Any]:
        def programs() -> Any:
            if not made:
                return partial(program, False), partial(program, True)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                a = program(False)
                torch.manual_seed(0)
                return a, program(True)

        pairs.append(Pair(name, programs, planted(place, kinds, words) if place else None, trains=trains))
        return program

    return adding


def recorded(pair: Pair, folder: Path, how: Recorded) -> tuple[runs.Run, runs.Run]:
    """Record both programs."""
    edits = [] if pair.fault is None else [pair.fault()]
    for name, program, ops, hooks in zip("ab", pair.programs(), _OPS[how], ([], edits), strict=True):
        torch.manual_seed(0)
        recorder = runs.RunRecorder(folder / name, tensors="full")
        with torch.set_grad_enabled(pair.trains), intercept([*hooks, recorder], ops=ops):
            program()
    return runs.open_run(folder / "a"), runs.open_run(folder / "b")


@dataclass(frozen=True)
class Outcome:
    """What an answer is worth.

    Attributes:
        accused: How many causes are named where nothing is planted, or elsewhere.
        silent: Whether something is planted, and nothing named.
        place: Whether a cause stands where it was planted.
        kind: Whether such a cause is of a right kind.
        named: Whether such a cause says what was planted.
    """

    accused: int
    silent: bool = False
    place: bool = True
    kind: bool = True
    named: bool = True

    @property
    def right(self) -> bool:
        """Whether nobody is accused in vain, and the place and the kind are right."""
        return not self.accused and self.place and self.kind


def outcome(pair: Pair, answer: Answer) -> Outcome:
    """Judge an answer."""
    if pair.planted is None:
        return Outcome(len(answer.causes))
    expected = pair.planted
    kinds = expected.kinds | (_SEEN if answer.operators == "products" else set())
    told = answer.rows() if "dtype" in kinds else answer.causes  # one rounding may be all there is of its kind
    there = [cause for cause in told if _stands(cause, expected.place)]
    said = ["\n".join((cause.what, *cause.others)) for cause in there if cause.what]
    return Outcome(
        accused=sum(cause not in there for cause in answer.causes),
        silent=not told,
        place=bool(there),
        kind=any(cause.kind in kinds for cause in there),
        named=any(re.search(expected.words, text) for text in said),
    )


def _stands(cause: Cause, pattern: str) -> bool:
    return any(re.search(pattern, text) for text in _words(cause.place))


def _words(place: Place) -> list[str]:
    """What a place is looked for by: module, operator, file, and the text of its line."""
    name, _, number = (place.source or "").partition(" ")[0].rpartition(":")
    line = linecache.getline(str(_PROGRAMS / name), int(number)) if number else ""
    return [place.module or "", place.op, place.source or "", line.strip()]
