"""`judged_products`: what B does otherwise than A where both runs hold products only, so that nothing can be replayed.

Invariant: a difference that is gone at the next joined products accuses nobody, and neither does one that comes from a
cause before it. Needs numpy. Imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from opintercept._core.errors import OpInterceptError
from opintercept._core.text import counted, listed, printable
from opintercept.runs.program.names import module_name
from opintercept.runs.program.words import WIDTH
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.run import Run
from opintercept.runs.why.answer import Answer, Cause, CauseKind, Place, Verdict
from opintercept.runs.why.changes.wording import UNSEEN_BIAS, rows_differ
from opintercept.runs.why.joining.calls import JoinedCalls, linked
from opintercept.runs.why.joining.weights import Joining, Side
from opintercept.runs.why.products.figures import Comparing, Figures
from opintercept.runs.why.products.rows import dtype_of, eps_of, is_coded

_ROUNDINGS = 5.0  # how many roundings of their dtype the operators between two products may take
_AMPLIFIED = 16 * 2.0**-23  # and how far these of float32 go, as those of the sine of a large angle do
_GROWTH = 2.0  # and how many times they may enlarge the usual error: by 1.5 in most clean pairs
_WORST_GROWTH = 3.0  # and that of the worst row: by 2.7 there
_CLEAR = 10.0  # how far beyond rounding a difference is of which one sees that it is gone
_GONE = 2  # inputs that agree where a difference is gone
_SOME = 64  # rows that tell whether a weight is whole numbers
_THROUGHOUT = 0.2  # of the products, and not only one, have what is no cause of its own
_ROUNDED = tuple(f"rounds results {how} than A, which its dtype does not say" for how in ("less", "more"))
_SHOWN = 4  # rows, places and reasons that are named


def judged_products(a: Run, b: Run) -> Answer:
    """Say what B does otherwise than A, by what both have recorded of their products.

    Raises:
        OpInterceptError: No product of one run could be joined with one of the other.
    """
    one, other = Side.of(a), Side.of(b)
    joining = Joining(one, other)
    links = linked(joining)
    if not links.of_a:
        reasons = sorted({*one.reasons.values(), *other.reasons.values()})[:3]
        raise OpInterceptError(
            f"no call of {str(a.path)!r} can be joined with one of {str(b.path)!r}: "
            f"{'; '.join(reasons) or 'their weights have no rows in common'}; record a forward pass of the same "
            "weights in both programs, with tensors='full', or compare programs of the same modules with `opintercept "
            "diff A B`"
        )
    judge = _Sweeping(joining, links)
    judge.sweep()
    names = [[(module_name(call.record.module), call.record.op) for call in side.calls] for side in (one, other)]
    return Answer(
        a=a.head(),
        b=b.head(),
        verdict=judge.verdict(),
        same_program=names[0] == names[1],
        operators="products",
        joined=sum(each.reason is None for each in judge.figures.values()),
        calls=len(one.calls),
        upto=f"{judge.compared}, {Place.of(one.calls[judge.last])}" if judge.last >= 0 else "",
        causes=tuple(judge.causes),
        coarser=tuple(judge.coarser),
        rewritten=tuple(judge.rewritten),
        notes=(*judge.notes(),),
    )


def has_codes(run: Run) -> bool:
    """Whether most weights of a run are whole numbers, which the program scales behind the products."""
    side = Side.of(run)
    coded = [is_coded(side.rows(number)[:_SOME]) for number, weight in enumerate(side.weights) if weight.sure]
    return 2 * sum(coded) > len(coded)


@dataclass(slots=True)
class _Suspect:
    """What a call does otherwise, which is a cause unless the difference goes away."""

    causes: list[Cause]
    input: str | None  # the hash of its input
    whole: bool  # whether all rows of a weight differ, for which a factor elsewhere may make up


@dataclass(slots=True)
class _Sweeping:
    joining: Joining
    links: JoinedCalls
    causes: list[Cause] = field(default_factory=list)
    coarser: list[Cause] = field(default_factory=list)
    rewritten: list[Place] = field(default_factory=list)
    figures: dict[int, Figures] = field(default_factory=dict)
    last: int = -1  # the last call of A that was compared
    whole: bool = False  # whether the gradient of its output was compared, which comes from the loss
    _gradient: int | None = None  # the call that gets another gradient
    _trained: bool = False  # whether its weight has been updated since
    _harmless: bool = False  # whether such a gradient has come to nothing
    _open: list[_Suspect] = field(default_factory=list)
    _gone: list[_Suspect] = field(default_factory=list)
    _peak: float = 0.0  # the largest difference since the first of these, in units of what may be rounding
    _agreed: set[str | None] = field(default_factory=set)  # inputs of calls that agree since the last difference
    _equal: set[int] = field(default_factory=set)  # weights of A that were equal in an earlier call
    _few: set[int] = field(default_factory=set)  # calls with a format that only few have

    def sweep(self) -> None:
        """Go through A's calls in their order; what differs in neither input nor operands is how far rounding goes."""
        a, b, of_a = self.joining.a, self.joining.b, self.links.of_a
        comparing = Comparing(self.joining, self.links)
        weighted = [number for number in sorted(of_a) if any(match is not None for _, match in of_a[number])]
        self.figures = {number: comparing.product(number) for number in weighted}
        self._find_throughout()
        eps = {n: max(eps_of(dtype_of(c, "lhs")) for c in (a.calls[n], b.calls[of_a[n][0][0]])) for n in of_a}
        between = {n: _ROUNDINGS * each + min(_AMPLIFIED, 16 * each) for n, each in eps.items()}
        usual = Counter(between.values()).most_common(1)[0][0]
        noise, mean, coarse = 0.0, 0.0, 0.0
        seen: set[int] = set()
        for number in sorted(of_a):
            if a.weight[number] in seen:  # a forward pass begins, where nothing of the last one is left
                self._settle()
                self._compare_gradients(comparing, _WORST_GROWTH * noise + coarse + usual)
                seen.clear()
            seen |= {a.weight[number]} - {-1}
            if self._gradient is not None and a.weight[number] == a.weight[self._gradient]:
                names = [a.calls[each].tensors.get("rhs") for each in (number, self._gradient)]
                self._trained |= names[0] != names[1]
            few = number in self._few
            allowed = coarse + (usual if few else max(between[number], usual))  # others may round its operands
            found = self.figures.get(number) or comparing.neighbours(number, _WORST_GROWTH * noise + allowed)
            self.figures[number] = found
            if found.output is None or (found.rows and not (self._is_parameter(number) or self._is_joined(number))):
                continue
            self.last = number
            own = 0.0 if found.rows or few else found.weight
            limit = _WORST_GROWTH * max(noise, own) + allowed
            far = found.usual[0] > math.hypot(_GROWTH * max(mean, own), allowed)  # independent errors add up so
            moved = far or not found.input[1] <= limit  # NaN is off
            self._judge(number, found, moved, allowed, limit)
            if not (self._open or self.causes or moved):
                noise, coarse = max(noise, found.output, found.input[0]), max(coarse, found.weight)
                mean = max(mean, *found.usual)
        self._settle()
        self._compare_gradients(comparing, _WORST_GROWTH * noise + coarse + usual)
        self.causes += [self._used_otherwise()] if self._gradient is not None else []

    def _compare_gradients(self, comparing: Comparing, limit: float) -> None:
        """Compare what comes back to the products from the loss, where a program trains.

        A difference is none if the next step has the same weights, as where gradients are divided and not their loss.
        """
        if self._gradient is not None and self._trained:
            self._harmless, self.causes = not self.causes, self.causes and [self._used_otherwise()]
            self._gradient, self._trained = None, False
        if self.causes or self._gradient is not None:
            return
        found = {
            number: comparing.gradients(number) for number in range(self.last, -1, -1) if number in self.links.of_a
        }
        self.whole = found.get(self.last) is not None
        far = (number for number, far in found.items() if far is not None and not far <= limit)
        self._gradient = None if self._harmless else next(far, None)

    def _used_otherwise(self) -> Cause:
        assert self._gradient is not None
        what = "gets another gradient of its output, so its output is used otherwise, up to the loss"
        return self._cause(self._gradient, "operand", what)

    def _find_throughout(self) -> None:
        """Sort out what many products have: weights in fewer bits, or results that are rounded more."""
        of: dict[tuple[CauseKind, str], list[int]] = {}
        for number, found in self.figures.items():
            labels: list[tuple[CauseKind, str]] = [("dtype", found.coarser)] if found.coarser else []
            labels += [("result", what) for what, far in zip(_ROUNDED, found.roundings, strict=True) if far > 1]
            for label in labels:
                of.setdefault(label, []).append(number)
        for (kind, what), numbers in of.items():
            least = min(2, len(self.figures) - 1)  # quantisers leave the last product in full
            throughout = len(numbers) >= max(1, least, _THROUGHOUT * len(self.figures))
            if kind == "result" and throughout:
                for number in numbers:
                    self.figures[number].roundings = 0.0, 0.0
            elif kind != "result" and not throughout:
                self._few.update(numbers)
            if throughout:
                where = f": {len(numbers)} of {len(self.figures)} products"
                self.coarser.append(self._cause(numbers[0], kind, what + where))

    def _judge(self, number: int, found: Figures, moved: bool, allowed: float, limit: float) -> None:
        """Open a suspect for what differs here by itself, and settle older ones that are gone."""
        assert found.output is not None
        off = not found.output <= limit
        inherited = bool(self.causes or self._open)
        made_up = found.drop_made_up(math.inf if inherited else limit)
        own = [*self._own(number, found, off, inherited, allowed)]
        operands = found.heads.operands if found.heads is not None else ("input",) if moved else ()
        visible = off or found.effect > allowed
        if (made_up or (operands and not visible)) and not (inherited or own):
            self.rewritten.append(Place.of(self.joining.a.calls[number]))
        explained = any(each.kind == "dtype" or "updated" in each.what for each in own)  # by what rounds or trains it
        if operands and visible and not (made_up or inherited or explained or self._reopened()):
            own.append(self._input(number, found, operands))
        if off and (moved or own):
            self._peak, self._agreed = max(self._peak, found.output / limit if limit else math.inf), set()
        if own:
            weight = self.joining.a.weight[number]
            rows = len(self.joining.a.weights[weight].left) if weight >= 0 else 0
            self._open.append(_Suspect(own, self._input_of(number), whole=0 < rows == len(found.rows)))
        elif not off and (made_up or not moved):
            self._agreed.add(self._input_of(number))
            if len(self._agreed - {each.input for each in self._open}) >= _GONE:
                self._settle()

    def _own(self, number: int, found: Figures, off: bool, inherited: bool, allowed: float) -> Iterator[Cause]:
        """What differs in a call by itself, whatever its input is."""
        weight, parameter = self.joining.a.weight[number], self._is_parameter(number)
        for side, far in zip("AB", found.roundings, strict=True):
            if far > 1:
                what = f"is {far:.2g} times what rounding allows away from what its operands make"
                yield self._cause(
                    number, "result", f"{'is right: its result in A ' if side == 'A' else 'has a result that '}{what}"
                )
        if parameter and weight in self._equal and (found.rows or found.bias):
            if not inherited:
                yield self._cause(number, "weight", "has updated its weight otherwise")
        elif found.rows and parameter:
            yield self._cause(number, "weight", f"has another weight: {self._apart_in(found.rows, weight)}")
        elif found.rows and not inherited and min(found.weight, found.output or 0.0) > allowed:
            yield self._cause(number, "operand", f"multiplies by another operand: {self._apart_in(found.rows, weight)}")
        elif not found.bias and weight >= 0:
            self._equal.add(weight)
        if found.bias and weight not in self._equal:
            yield self._cause(number, "weight", f"has another bias: {self._apart_in(found.bias, weight, 'element')}")
        if number in self._few and off:
            yield self._cause(number, "dtype", found.coarser)
        for what in found.heads.arguments if found.heads is not None else ():
            yield self._cause(number, "argument", what)

    def _is_joined(self, number: int) -> bool:
        """Whether most rows of the right operand of a call have some like them, and not one or two by chance."""
        matches = [self.joining.matches[match] for _, match in self.links.of_a[number] if match is not None]
        of = len(self.joining.a.weights[self.joining.a.weight[number]].left)
        return 2 * sum(len(match.rows_a) for match in matches) > of

    def _apart_in(self, errors: dict[int, float], weight: int, noun: str = "row") -> str:
        """Which rows of a weight differ, or elements of its bias, `"rows 3, 17 of 64 differ, by up to 0.02"`."""
        of = len(self.joining.a.weights[weight].left) if weight >= 0 else max(errors) + 1
        return f"{rows_differ(sorted(errors), of, noun)}, by up to {max(errors.values()):.2g}"

    def _input(self, number: int, found: Figures, operands: tuple[str, ...]) -> Cause:
        """The cause of a call whose input is another one, with the products before it: all that have the same input."""
        calls, after = self.joining.a.calls, list[Place]()
        before = number - 1 if self.joining.a.attentions.get(number) is None else number - 2
        while before >= 0 and calls[before].rank == calls[number].rank:
            after.insert(0, Place.of(calls[before]))
            if not before or self._input_of(before - 1) is None or self._input_of(before - 1) != self._input_of(before):
                break
            before -= 1
        what = f"has {'another' if len(operands) == 1 else 'other'} {' and '.join(operands)}{found.where}"
        if operands == ("heads",):
            what = "has heads in another order"
        made = f", made after {listed([*map(str, after)], _SHOWN)}" if after else ""
        return replace(self._cause(number, "operand", f"{what}{made}"), after=tuple(after))

    def _reopened(self) -> bool:
        """Take back that a difference was gone, where another one arises that it may explain, as by another branch."""
        again = [cause for each in self._gone if not each.whole for cause in each.causes]
        self.rewritten = [each for each in self.rewritten if each not in [cause.place for cause in again]]
        self._gone = [each for each in self._gone if each.whole]
        self.causes += again
        return bool(again)

    def _settle(self) -> None:
        """Decide about the suspects: what is clearly gone accuses nobody."""
        if self._agreed - {each.input for each in self._open} and self._peak > _CLEAR:
            self._gone += self._open
            self.rewritten += [each.causes[0].place for each in self._open]
        else:
            known = {(cause.kind, cause.what) for cause in self.causes}
            new = [cause for each in self._open for cause in each.causes if (cause.kind, cause.what) not in known]
            self.causes += {(cause.kind, cause.what): cause for cause in reversed(new)}.values()
            self.causes.sort(key=lambda cause: cause.place.index)
        self._open, self._agreed, self._peak = [], set(), 0.0

    def _is_parameter(self, number: int) -> bool:
        """Whether the right operand of a call may be a parameter; what a program computes is also joined by rows."""
        a, b, weight = self.joining.a, self.joining.b, self.joining.a.weight[number]
        if weight < 0:
            return True  # the weights of a recurrent layer, which have names
        calls = (a, number), *((b, each) for each, _ in self.links.of_a[number])
        known = [side.parameters.get(each) for side, each in calls if True in side.parameters.values()]
        return a.weights[weight].sure and (None in known or True in known or not known)

    def _input_of(self, number: int) -> str | None:
        values = self.joining.a.calls[number].values.get("lhs")
        return values.hash if values is not None else None

    def _cause(self, number: int, kind: CauseKind, what: str) -> Cause:
        other = self.joining.b.calls[self.links.of_a[number][0][0]]
        return Cause(kind, what, Place.of(self.joining.a.calls[number]), other=Place.of(other))

    @property
    def compared(self) -> str:
        """What was compared last."""
        return "the gradient of the last product" if self.whole else "the last product"

    def verdict(self) -> Verdict:
        """The answer in a word, which is none unless the last products of both runs were compared."""
        if self.causes or self.coarser:
            return "difference" if self.causes else "coarser"
        if not self.whole and not self._reaches_the_end():
            return "not compared"
        return "rounding" if any(each.output for each in self.figures.values()) else "equal"

    def _reaches_the_end(self) -> bool:
        """Whether no product of either run follows those that were compared, nor a bias within the last one."""
        links, a, b = self.links, self.joining.a, self.joining.b
        return (
            {*range(self.last + 1, len(a.calls))} <= links.terms.keys()
            and max(links.of_b) == len(b.calls) - 1
            and not self._lacks_bias()
        )

    def _lacks_bias(self) -> bool:
        """Whether only one run adds a bias within the last product."""
        last = [self.joining.b.calls[number] for number, _ in self.links.of_a.get(self.last, ())]
        return len({call.record.bias is None for call in (*last, self.joining.a.calls[self.last])}) > 1

    def notes(self) -> Iterator[str]:
        """What was not compared, and why."""
        if self.last >= 0 and self._lacks_bias():
            yield UNSEEN_BIAS
        apart = [*self._apart()]
        first = dict(reversed(apart))
        for (run, reason), count in Counter(key for key, _ in apart).most_common(_SHOWN):
            calls = f"{counted(count, 'product')} of {run.upper()}, the first in {Place.of(first[run, reason])}"
            yield f"not compared: {calls}: {printable(reason, 4 * WIDTH)}"

    def _apart(self) -> Iterator[tuple[tuple[str, str], StoredCall]]:
        for number, found in sorted(self.figures.items()):
            if found.reason is not None:
                yield ("a", found.reason), self.joining.a.calls[number]
        for (name, number), reason in sorted(self.links.reasons.items()):
            side = self.joining.a if name == "a" else self.joining.b
            if number not in (self.links.of_a if name == "a" else self.links.of_b):
                yield (name, reason), side.calls[number]
