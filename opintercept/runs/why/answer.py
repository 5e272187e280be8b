"""`Answer`: the result of `why`, which prints itself, and the `Cause`s in it. Must not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from opintercept._core.record import Plain
from opintercept._core.tables import Cells, Marked, Part, Table
from opintercept._core.text import counted, printable
from opintercept.runs.program.names import module_name
from opintercept.runs.program.words import WIDTH, short_op
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.run import RunHead

CauseKind = Literal["weight", "input", "argument", "operand", "dtype", "operator", "result", "unknown"]
KINDS: tuple[CauseKind, ...] = get_args(CauseKind)
Verdict = Literal["equal", "rounding", "coarser", "difference", "not compared"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
_MOST = 3  # places, operators or roundings that a sentence names
_MOST_OPERATORS = 6  # that a line names of a cause that is not known
_LINE = 4 * WIDTH  # characters of what B does, of the name of a loss, and of what was not compared
_REST = 0.005  # of the difference of the losses that may have no cause without being told
_CANCEL = 1.5  # times that difference, above which the moduli of costs say that they cancel


@dataclass(frozen=True, slots=True)
class Place(Plain):
    """A call, in the words that a reader looks for it by.

    Attributes:
        index: `CallRecord.index` in its run.
        op: Its operator, `"aten::mm"`.
        module: Its module; None if it is in none.
        source: Its line, `"model.py:31"`.
    """

    index: int
    op: str
    module: str | None
    source: str | None

    @classmethod
    def of(cls, call: StoredCall) -> Place:
        """The place of a recorded call."""
        record = call.record
        return cls(record.index, record.op, record.module, record.source)

    @property
    def name(self) -> str:
        """The module, or the operator of a call that is in none."""
        name = module_name(self.module)
        if not name:
            return short_op(self.op)
        return f"module {name}" if name.isdecimal() else printable(name, WIDTH)

    @property
    def line(self) -> str:
        """The line without its function, `"model.py:31"`; empty if it is not known."""
        return printable((self.source or "").partition(" in ")[0], WIDTH)

    def __str__(self) -> str:
        """Write `"layers.1.norm (model.py:31)"`."""
        return f"{self.name} ({self.line})" if self.line else self.name


@dataclass(frozen=True, slots=True)
class Cause(Plain):
    """One thing that B does otherwise.

    Attributes:
        kind: `"weight"` or `"input"`: a tensor that no call has made is another one. `"argument"`: a number or a flag
            of a call. `"operand"`: a call reads another tensor, or not all of it. `"dtype"`: something is rounded to
            another dtype. `"operator"`: operators are others, missing, added or in another order. `"result"`: a call
            does not make what its operands say. `"unknown"`: no single change that was tried explains it.
        what: What B does, after "B": `"uses eps=0.01 where A uses 1e-05"`. Empty if that is unknown.
        place: The call of A that computes otherwise in B, as far as that is known.
        until: The call of A at whose output the difference is certain.
        also: Other places of the same cause.
        other: What computes the same in B; None if nothing was found.
        after: The calls of A whose results are still those of B, right before.
        only_a: The operators that only A has in between.
        only_b: Those that only B has.
        calls: How many calls of A lie in between.
        roundings: How far B's result is from what A makes of B's inputs, in units of rounding.
        exact: Whether A computes what B does, to rounding, with this change.
        others: Other single changes that would do as well.
        cost: What the loss becomes with B's result in A's program, less what it was; None without a loss.
        share: That part of the difference of the losses.
    """

    kind: CauseKind
    what: str
    place: Place
    also: tuple[Place, ...] = ()
    until: Place | None = None
    other: Place | None = None
    after: tuple[Place, ...] = ()
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    calls: int = 1
    roundings: float = math.nan
    exact: bool = False
    others: tuple[str, ...] = ()
    cost: float | None = None
    share: float | None = None

    @property
    def sentence(self) -> str:
        """What is said of it in one sentence, without its share."""
        what = printable(self.what, _LINE)
        if not what:
            where = f", where {self.only}" if self.only else ""
            return f"I do not know: it arises {self._stretch()}{where}; no single change that was tried explains it"
        place, named = self.place, what.split()
        if place.line and not module_name(place.module) and _bare(short_op(place.op)) in named:
            return f"B {what}, at {place.line}{_times(1 + len(self.also))}"
        return f"B {what}, in {_listed((place, *self.also), _MOST)}"

    @property
    def only(self) -> str:
        """The operators that one program has and the other has not, in words; empty if there are none."""
        both = (("A", self.only_a), ("B", self.only_b))
        names = ((run, [*dict.fromkeys(printable(_bare(op), WIDTH) for op in ops)]) for run, ops in both if ops)
        return ", and ".join(f"{run} computes {_some(ops, _MOST_OPERATORS)}" for run, ops in names)

    def _stretch(self) -> str:
        """Where it arises, `"between layers.0.q and layers.0.attn (model.py:20 to 31)"`."""
        end, before = self.until or self.place, sorted(self.after, key=lambda place: place.index)[-_MOST:]
        lines = _lines((*before, end))
        written = str if lines is None else _name
        names = [name for name in dict.fromkeys(map(written, before)) if name != written(end)]
        return (f"between {_both([*names, written(end)])}" if names else f"in {written(end)}") + (lines or "")

    @property
    def certainty(self) -> str:
        """How sure it is, in words."""
        if self.exact:
            more = f", as {counted(len(self.others), 'other change')} would" if self.others else ""
            return f"reproduces B{more}"
        return "by its place" if self.what else "the place alone"


@dataclass(frozen=True, slots=True)
class WrongKernel(Plain):
    """A kernel that torch.compile has generated, and that does not make what its operators make of its operands.

    Attributes:
        run: Which run has it, `"A"` or `"B"`.
        place: The call.
        ops: The operators that it stands for.
        op: The one whose value is furthest off.
        excess: How far, in units of what rounding explains.
        deviation: The same in words, such as `"NaN where its operators give 0.37"`.
    """

    run: Literal["A", "B"]
    place: Place
    ops: tuple[str, ...]
    op: str
    excess: float
    deviation: str

    @property
    def sentence(self) -> str:
        """What is said of it."""
        line = f" at {printable(self.place.source, _LINE)}" if self.place.source else ""
        kernel = printable(self.place.op.partition("::")[2], _LINE)
        ops = _some([printable(short_op(op), WIDTH) for op in self.ops], _MOST_OPERATORS)
        return (
            f"Kernel {kernel} of {self.run} is wrong, which stands for {ops}{line}: its "
            f"{printable(short_op(self.op), WIDTH)} is {self.deviation}."
        )


@dataclass(frozen=True, slots=True)
class Loss(Plain):
    """The loss of both programs.

    Attributes:
        name: What it is, `"nll_loss in model.py:44"`.
        a: A's.
        b: B's.
        rest: What of `b - a` no cause explains.
    """

    name: str
    a: float
    b: float
    rest: float = 0.0


@dataclass(frozen=True, slots=True)
class Layer(Plain):
    """What the rounding of a layer costs, where nothing but rounding differs.

    Attributes:
        module: Its name, or the line of calls that are in no module.
        cost: What the loss changes by when this layer, too, has B's results in A's program.
        share: That part of the difference of the losses.
    """

    module: str
    cost: float
    share: float


@dataclass(frozen=True, slots=True)
class Answer(Plain, Table):
    """The result of `why`. Its table and its data frame have a row for each cause.

    Attributes:
        a: The first run.
        b: The second run.
        verdict: `"equal"`: all results of the programs are the same bit for bit. `"rounding"`: they differ by no more
            than rounding. `"coarser"`: B is rounded or quantised throughout, and differs by no more than that.
            `"difference"`: there are causes. `"not compared"`: nothing differs, but results have no counterpart, or are
            `behind`.
        same_program: Whether both runs are of one program: the same operators in modules of the same names.
        operators: `"all"` if all operators of both were recorded; `"products"` if only products of A or of B were.
        joined: How many calls of A make what some call of B makes, and
        calls: how many there are.
        upto: The last results that were compared, `"the logits"`.
        behind: The operators of what A computes from these, which B's record lacks, where nothing differs up to there.
        causes: What B does otherwise, in A's order.
        coarser: What is rounded or quantised throughout.
        layers: What the rounding of each layer costs if B is coarser, in A's order; empty without a loss.
        rewritten: Where B computes otherwise, and nothing of it is left at the next joint.
        loss: The loss; None if there is none.
        notes: What was not compared, and why.
        kernels: The generated kernels that are wrong by themselves, those of A first.
        unknown: The generated kernels of A that make something else than B, if nobody knows what they stand for.
    """

    a: RunHead = field(compare=False)
    b: RunHead = field(compare=False)
    verdict: Verdict
    same_program: bool
    operators: Literal["all", "products"]
    joined: int
    calls: int
    upto: str
    behind: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    coarser: tuple[Cause, ...] = ()
    layers: tuple[Layer, ...] = ()
    rewritten: tuple[Place, ...] = ()
    loss: Loss | None = None
    notes: tuple[str, ...] = ()
    kernels: tuple[WrongKernel, ...] = ()
    unknown: tuple[Place, ...] = ()

    _row: ClassVar[type] = Cause

    @property
    def equal(self) -> bool:
        """Whether the programs' results differ by no more than rounding, as far as they were recorded."""
        return self.verdict in ("equal", "rounding")

    @property
    def first(self) -> Cause | None:
        """The cause that costs most; without a loss, the first one that is known."""
        return max(self.causes, key=lambda cause: (_modulus(cause), bool(cause.what)), default=None)

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        if self.kernels:
            more = f" It is one of {len(self.kernels)} that are." if len(self.kernels) > 1 else ""
            return f"{self.kernels[0].sentence}{more}{f' {self._sentence}' if self.causes else ''}"
        return self._sentence

    @property
    def _sentence(self) -> str:
        cause, upto = self.first, f", up to and with {self.upto}" if self.upto else ""
        names = (
            f", {_some([printable(_bare(op), WIDTH) for op in self.behind], _MOST_OPERATORS)}," if self.behind else ""
        )
        after = f" What follows it{names} was not compared." if self.operators == "products" and upto else ""
        if cause is not None:
            share = _percent(cause.share)
            of = f": {share} of the difference of the loss" if share else ""
            which = "the largest" if share else "one"
            more = f". It is {which} of {len(self.causes)} causes" if len(self.causes) > 1 else ""
            return f"{cause.sentence}{of}{more}."
        if self.verdict == "coarser":
            coarser = [
                f"{printable(each.what, _LINE)}, in {_listed((each.place, *each.also), 1)}" for each in self.coarser
            ]
            return f"B {_some(coarser, _MOST)}; nothing differs by more than that{upto}.{after}"
        if self.verdict == "not compared" and self.unknown:
            first = self.unknown[0]
            where = f", in {first}" if module_name(first.module) else f" ({first.line})" if first.line else ""
            return f"I do not know: it arises in {short_op(first.op)} of A{where}, which cannot be computed again."
        if self.verdict == "not compared":
            if self.behind:
                return f"I do not know: nothing differs by more than rounding{upto}.{after}"
            none = f"nothing differs by more than rounding{upto}, but other" if upto else "nothing could be compared:"
            return f"I do not know: {none} results of A have no counterpart in B."
        return f"Nothing differs{'' if self.verdict == 'equal' else ' by more than rounding'}{upto}.{after}"

    def rows(self) -> tuple[Cause, ...]:
        """The causes, then what is coarser throughout; of each those first that cost most."""
        return tuple(
            cause for causes in (self.causes, self.coarser) for cause in sorted(causes, key=lambda c: -_modulus(c))
        )

    def parts(self) -> Iterator[Part]:
        """What `print` shows: the answer, its causes, and what was not compared."""
        yield Marked(self.sentence, "right" if self.equal else "wrong")
        yield from ("", f"A  {self.a}", f"B  {self.b}")
        if self.rows():
            yield from ("", self._cells())
        if self.layers:
            yield from ("", self._layers())
        yield from ("", *self._context())

    def _layers(self) -> Cells:
        rows = [
            [printable(each.module, WIDTH), f"{each.cost:+.3g}", _percent(each.share)]
            for each in sorted(self.layers, key=_modulus, reverse=True)
            if each.cost
        ]
        return Cells(["layers by what their rounding costs", "cost", "share"], rows, left=1)

    def _cells(self) -> Cells:
        groups: dict[tuple[str, ...], list[Cause]] = {}
        for cause in self.rows():
            begin = cause.only or (f"it begins after {cause.after[-1]}" if cause.after else "")
            what = f"B {cause.what}" if cause.what else f"unknown: {begin}" if begin else "unknown"
            other = "" if cause.other is None or self.same_program else str(cause.other)
            groups.setdefault((str(cause.place), other, what, cause.certainty), []).append(cause)
        rows = []
        for (_, other, what, certainty), causes in groups.items():
            places = [each for cause in causes for each in (cause.place, *cause.also)]
            shares = [cause.share for cause in causes if cause.share is not None]
            rows.append([_listed(places, 1), other, what, certainty, _percent(sum(shares)) if shares else ""])
        head = ["where", "in B", "what B does otherwise", "how sure", "share"]
        texts = 4
        for name, column in (("share", 4), ("in B", 1)):
            if not any(row[column] for row in rows):
                head.remove(name)
                rows = [[*row[:column], *row[column + 1 :]] for row in rows]
                texts -= name == "in B"
        return Cells(head, rows, left=texts, last=("where", "what B does otherwise"), spare=("in B", "how sure"))

    def _context(self) -> Iterator[str]:
        what = "one program" if self.same_program else "two programs"
        of = "calls" if self.operators == "all" else "products"
        yield f"{what}; B has the results of {self.joined:,} of {self.calls:,} {of} of A"
        if self.loss is not None:
            yield from self._loss(self.loss)
        for cause in self.rows():
            yield from (f"{cause.place}: or B {printable(other, _LINE)}" for other in cause.others)
        if self.rewritten:
            places = _some([*dict.fromkeys(map(str, self.rewritten))], _MOST)
            yield f"written otherwise, with the same results: {counted(len(self.rewritten), 'place')}, {places}"
        yield from (printable(note, 2 * _LINE) for note in self.notes)

    def _loss(self, loss: Loss) -> Iterator[str]:
        change = loss.b - loss.a
        yield f"loss: {loss.a:.6g} in A, {loss.b:.6g} in B, {change:+.3g} ({printable(loss.name, _LINE)})"
        if (self.rows() or self.layers) and abs(loss.rest) > _REST * abs(change):
            yield f"  of the difference, {loss.rest:+.3g} has no {'layer' if self.layers else 'cause'} of its own"
        moduli = sum(_modulus(each) for each in self.layers or self.rows())
        if change and moduli > _CANCEL * abs(change):
            yield f"  costs of both signs cancel: their moduli are {moduli / abs(change):.3g} times the difference"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, in which floats can be infinite or NaN."""
        return {"equal": self.equal, "sentence": self.sentence} | Plain.as_dict(self)


def _name(place: Place) -> str:
    return place.name


def _modulus(cause: Cause | Layer) -> float:
    return abs(cause.cost) if cause.cost is not None and math.isfinite(cause.cost) else 0.0


def _percent(share: float | None) -> str:
    """Write `"99.7 %"`; nothing for a share of no difference."""
    if share is None or not math.isfinite(share):
        return ""
    percent = round(100 * share, 1) + 0.0  # never -0
    return f"{percent:,.0f} %" if percent.is_integer() or abs(percent) >= 1000 else f"{percent:.1f} %"


def _times(count: int) -> str:
    return f", {count:,} times" if count > 1 else ""


def _bare(op: str) -> str:
    return op.strip("_")


def _both(names: Sequence[str]) -> str:
    """Write `"q, k and v"`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def _some(names: Sequence[str], most: int) -> str:
    """Write `"q, k and 4 others"`."""
    rest = len(names) - most
    return _both(names) if rest <= 1 else _both([*names[:most], f"{rest} others"])


def _lines(places: Iterable[Place]) -> str | None:
    """Where places lie in their file, `" (model.py:20 to 31)"`; None if they have several."""
    files, numbers = set[str](), set[int]()
    for place in places:
        file, _, number = place.line.rpartition(":")
        if not number.isdecimal():
            return None
        files.add(file)
        numbers.add(int(number))
    if len(files) != 1:
        return None
    first, last = min(numbers), max(numbers)
    return f" ({files.pop()}:{first})" if first == last else f" ({files.pop()}:{first} to {last})"


def _listed(places: Sequence[Place], most: int) -> str:
    """Write `"layers.0.norm and layers.1.norm (model.py:31)"`; more than `most` places are counted."""
    different = [*dict.fromkeys(map(str, places))]
    if len(different) == 1:
        return f"{different[0]}{_times(len(places))}"
    if len(different) > most:
        return f"{different[0]} and {counted(len(different) - 1, 'other place')}"
    if len({place.line for place in places}) == 1 and places[0].line:
        return f"{_both([*dict.fromkeys(place.name for place in places)])} ({places[0].line})"
    return _both(different)
