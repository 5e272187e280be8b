"""`compare`: finds where the ranks of one run diverge, by hashes, numbers and statistics of their calls.

Invariant: what is kept from window to window grows with the places in the program, not with the calls.
Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

import numpy as np

from opintercept._ranks.expectations import Group, RankOperand, by_value
from opintercept.runs.program.names import module_name
from opintercept.runs.ranks.difference import RankDifference, RankFinding, What
from opintercept.runs.ranks.rules import Alike, Counts, MatchedCalls, OutlierFinder
from opintercept.runs.ranks.windows import BLOCK, MOST, ROLES, Window, WindowReader
from opintercept.runs.store.columns import Array
from opintercept.runs.store.run import Run
from opintercept.runs.sums import ordinals, starts_of

_EDGE = (1 << BLOCK) - 1


def compare(run: Run, limit: int, window: int = MOST) -> RankDifference:
    """Compare the ranks of a run of at least two processes, so many calls together."""
    return _Comparison(run, WindowReader(run, window)).result(limit)


class _Comparison:
    def __init__(self, run: Run, windows: WindowReader) -> None:
        self._run, self._windows = run, windows
        size = len(windows.ranks)
        self._operands = Alike(size, windows.weight)
        # The first finding of each sort at each place, with what puts them in order, and how often there is one.
        self._found: dict[tuple[object, ...], tuple[tuple[int, int, int], RankFinding, int]] = {}
        self._counts = Counts(size)
        self._orders = Alike(size, self._counts.shared)
        self._streaks = {"rms": OutlierFinder(), "max": OutlierFinder()}
        infos = [run.infos[rank] for rank in windows.ranks]
        # The last step of a process that was killed is not whole.
        cut = [not info.finished for info in infos]
        self._end = np.where(cut, windows.last, np.iinfo(np.int64).max)

    def result(self, limit: int) -> RankDifference:
        """Compare all windows."""
        windows, infos = self._windows, self._run.infos
        for window in windows:
            self._diverged(window)
            self._uneven(window)
            if len(windows.ranks) > 2:
                self._outliers(window)
            self._not_finite(window)
        every = sorted(self._found.values(), key=itemgetter(0))
        # Activation checkpointing shows a weight a second time, in a recompute.
        shared = Counter(
            self._ranks(groups)
            for key, groups in self._operands.agreed.items()
            if windows.weight[key] and windows.operands.places[key].call_site.phase == "forward"
        )
        unshared = shared.pop((), 0)
        size = max(info.world_size for info in infos.values())
        last = {rank: time for rank, time in zip(windows.ranks, windows.last.tolist(), strict=True) if time >= 0}
        expected = {*range(min(size, 1 << 16)), *windows.ranks}
        return RankDifference(
            run=self._run.head(),
            ranks=tuple(last),
            missing=tuple(sorted(expected - {*last})),
            unfinished={rank: time & _EDGE for rank, time in last.items() if not infos[rank].finished},
            calls=windows.size,
            steps=windows.steps or (0, 0),
            shared=tuple(sorted(shared.items(), key=lambda each: (-each[1], each[0]))),
            unshared=unshared,
            findings=tuple(replace(found, times=times) for _, found, times in every[:limit]),
            found=len(every),
            outliers=len(windows.ranks) > 2,
        )

    def _ranks(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        return tuple(tuple(self._windows.ranks[process] for process in group) for group in groups)

    def _note(
        self,
        what: What,
        key: int,
        when: tuple[int, int],
        call: tuple[int, int],
        parts: tuple[Group, ...],
        numbers: tuple[float, ...] = (),
        statistic: str | None = None,
        times: int = 1,
    ) -> None:
        """Add a finding at a place, at a time and a place in its step, in a call of a process."""
        name = _name(what, key, parts)
        order = *when, _WHATS.index(what)  # at one place, what decides the others comes first
        first, found, before = self._found.get(name, (order, None, 0))
        if found is None or order < first:
            windows, first = self._windows, order
            numbered = windows.operands if what in ("weight", "operand") else windows.outputs
            place = (windows.calls if what in ("calls", "order") else numbered).places[key]
            found = RankFinding(
                what=what,
                parts=self._ranks(parts),
                step=when[0] & _EDGE,
                rank=windows.ranks[call[0]],
                index=call[1],
                module=module_name(place.call_site.module),
                op=place.record.op,
                phase=place.call_site.phase,
                source=place.call_site.source,
                operand=place.operand,
                numbers=numbers,
                statistic=statistic,
                times=0,
            )
        self._found[name] = first, found, before + times

    def _rows(self, window: Window, keys: list[Array]) -> MatchedCalls:
        """Match the calls of all processes by place, step and number; a key of -1 leaves a call out."""
        chosen = [np.flatnonzero(key >= 0) for key in keys]
        times = np.unique(np.concatenate([part.time for part in window]))
        of_rows = np.concatenate([key[calls] for key, calls in zip(keys, chosen, strict=True)]).astype(np.int64)
        time = np.concatenate([part.time[calls] for part, calls in zip(window, chosen, strict=True)])
        numbers = [
            ordinals(key[calls], part.time[calls]) for key, part, calls in zip(keys, window, chosen, strict=True)
        ]
        ordinal = np.concatenate(numbers)
        code = (of_rows * len(times) + np.searchsorted(times, time)) * (1 + ordinal.max(initial=0)) + ordinal
        order = np.argsort(code, kind="stable")
        code = code[order]
        firsts = starts_of(code)
        process = np.repeat(np.arange(len(chosen)), [len(calls) for calls in chosen])[order]
        starts = np.r_[firsts, len(code)]
        at = order[firsts]
        return MatchedCalls(of_rows[at], time[at], starts, process, np.concatenate(chosen)[order], order)

    def _diverged(self, window: Window) -> None:
        """Operands that were equal on several ranks, and are not."""
        weight = self._windows.weight
        for role in ROLES:
            keys = []
            for part in window:
                key = part.places[role]
                asked = (part.columns[f"{role}_hash"] != 0) & self._operands.asks(key)
                keys.append(np.where(asked, key, -1))
            rows = self._rows(window, keys)
            value = _column(window, keys, f"{role}_hash")[rows.order]
            constant = (_column(window, keys, f"{role}_min") == _column(window, keys, f"{role}_max"))[rows.order]
            for row, parts in self._operands.diverged(rows, value, constant):
                what: What = "weight" if weight[rows.key[row]] else "operand"
                self._note(what, *_at(window, rows, row, parts))

    def _uneven(self, window: Window) -> None:
        """Steps in which ranks make different calls, or the same in another order."""
        keys = [part.places["call"].astype(np.int64) for part in window]
        uneven: set[int] = set()
        for key, time, counts in self._counts.uneven(window, keys, self._end):
            uneven.add(time)
            parts = by_value(counts, {p: RankOperand(key, n) for p, n in counts.items()})
            shown = tuple(float(counts[part[0]]) for part in parts)
            if _name("calls", key, parts) in self._found:
                self._note("calls", key, (time, 0), (0, 0), parts, shown)
                continue
            # The first call that not all of them make, on a rank that makes it.
            most = max(counts, key=lambda p: (counts[p], -p))
            part = window[most]
            call = np.flatnonzero((keys[most] == key) & (part.time == time))[min(counts.values())]
            when = time, int(part.place[call])
            self._note("calls", key, when, (most, int(part.columns["index"][call])), parts, shown)
        rows, value = self._counts.orders(window, keys, self._end, uneven)
        for row, parts in self._orders.diverged(rows, value, np.zeros(len(value), bool)):
            self._misplaced(window, keys, int(rows.key[row]), int(rows.time[row]), parts)

    def _misplaced(self, window: Window, keys: list[Array], members: int, time: int, parts: tuple[Group, ...]) -> None:
        """Note the first call that another rank makes at another point of the step."""
        usual, odd = parts[0][0], parts[1][0]
        here = [
            np.flatnonzero((window[process].time == time) & (self._counts.sets(keys[process]) == members))
            for process in (usual, odd)
        ]
        size = min(map(len, here))
        differs = np.flatnonzero(keys[usual][here[0][:size]] != keys[odd][here[1][:size]])
        call = int(here[1][differs[0] if len(differs) else 0])
        part = window[odd]
        index = int(part.columns["index"][call])
        self._note("order", int(keys[odd][call]), (time, int(part.place[call])), (odd, index), parts)

    def _outliers(self, window: Window) -> None:
        """Outputs of a rank that stay far smaller or larger than those of the others, or are so by a huge factor."""
        backward = np.array([place.backward for place in self._windows.outputs.places], bool)
        # The gradients of a batch can be any times smaller than those of another.
        outputs = [part.places["output"] for part in window]
        keys = [np.where(backward[output], -1, output) for output in outputs]
        rows = self._rows(window, keys)
        high = np.abs(np.fmax(-_column(window, keys, "output_min"), _column(window, keys, "output_max")))
        for statistic, values in (("rms", _column(window, keys, "output_rms")), ("max", high)):
            for streak in self._streaks[statistic].of(rows, values[rows.order]):
                if streak.first is not None:
                    number = int(np.searchsorted(rows.starts, streak.first, "right")) - 1
                    own = int(rows.process[streak.first])
                    others = rows.process[rows.starts[number] : rows.starts[number + 1]].tolist()
                    parts = tuple(sorted(process for process in others if process != own)), (own,)
                    figures = (streak.usual, streak.value), statistic
                    streak.note = partial(self._note, "outlier", *_at(window, rows, number, parts), *figures)
                    streak.first = None
                if streak.reported:
                    streak.note(times=streak.reported)

    def _not_finite(self, window: Window) -> None:
        """Outputs with NaN or infinities on fewer than half of the ranks."""
        scaled = np.array([place.scaled for place in self._windows.outputs.places], bool)
        keys = [part.places["output"] for part in window]
        bad = []
        for part, key in zip(window, keys, strict=True):
            columns = part.columns
            infinite = (columns["output_inf"] > 0) & (columns["bias_inf"] <= 0)  # a mask is added as a bias
            bad.append(((columns["output_nan"] > 0) | infinite) & ~scaled[key])
        if not any(each.any() for each in bad):
            return
        rows = self._rows(window, keys)
        of_entries = np.concatenate([each[key >= 0] for each, key in zip(bad, keys, strict=True)])[rows.order]
        numbers = rows.of_entries()
        some = np.bincount(numbers[of_entries], minlength=len(rows.key))
        for row in np.flatnonzero((some > 0) & (2 * some <= np.diff(rows.starts))).tolist():
            entries = slice(rows.starts[row], rows.starts[row + 1])
            is_bad = of_entries[entries]
            processes = rows.process[entries]
            parts = tuple(tuple(sorted(processes[which].tolist())) for which in (~is_bad, is_bad))
            self._note("not finite", *_at(window, rows, row, parts))


_WHATS: tuple[What, ...] = ("weight", "operand", "calls", "order", "not finite", "outlier")


def _name(what: What, key: int, parts: tuple[Group, ...]) -> tuple[object, ...]:
    """By what findings are told apart."""
    return what, key, parts[1:] if what in ("calls", "outlier", "not finite") else ()


def _at(
    window: Window, rows: MatchedCalls, row: int, parts: tuple[Group, ...]
) -> tuple[int, tuple[int, int], tuple[int, int], tuple[Group, ...]]:
    """Where a row is, and the call of a process that has diverged."""
    entries = range(rows.starts[row], rows.starts[row + 1])
    process, call = next(
        (int(rows.process[each]), int(rows.call[each])) for each in entries if rows.process[each] == parts[-1][0]
    )
    place = min(int(window[rows.process[each]].place[rows.call[each]]) for each in entries)
    index = int(window[process].columns["index"][call])
    return int(rows.key[row]), (int(rows.time[row]), place), (process, index), parts


def _column(window: Window, keys: list[Array], name: str) -> Array:
    """A column of the calls that have a place, process after process."""
    return np.concatenate([part.columns[name][key >= 0] for part, key in zip(window, keys, strict=True)])
