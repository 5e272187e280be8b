"""Scores `why`, or another judge, on pairs of programs: `python tests/programs/score_pairs.py --set new -v`.

Records each pair once, into a folder that later calls read.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "helpers"))

import torch
from outcomes import Outcome, Pair, Recorded, outcome, recorded

from opintercept import runs

SETS = {
    "everyday": "everyday_pairs",
    "idioms": "idiom_pairs",
    "styled": "styled_pairs",
    "suite": "pairs",
    "reported": "reported_pairs",
    "new": "fresh_pairs",
    "blind": "blind_pairs",
}
SECONDS = 60  # of processor time for each pair
Judge = Callable[[runs.Run, runs.Run], runs.Answer]


class OutOfTimeError(BaseException):
    """No Exception, so that no judge catches it."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise OutOfTimeError(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def opened(pair: Pair, cache: Path, how: Recorded, source: str) -> tuple[runs.Run, runs.Run]:
    """The runs of a pair; they are recorded if they are not there, or of other programs."""
    name = re.sub(r"\W+", "-", pair.name)
    folder = cache / f"{name}-{how}-{zlib.crc32(f'{pair.name} {source}'.encode()):08x}"
    if not folder.exists():
        made = Path(tempfile.mkdtemp(dir=cache))
        recorded(pair, made, how)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return runs.open_run(folder / "a"), runs.open_run(folder / "b")


def scored(pair: Pair, judge: Judge, a: runs.Run, b: runs.Run) -> tuple[Outcome | None, list[str]]:
    """The outcome, None if there is no answer; and what was said."""
    try:
        with limited(SECONDS):
            answer = judge(a, b)
        found = outcome(pair, answer)
    except (Exception, OutOfTimeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno} in {last.name}: {last.line}"
        return None, [f"{type(error).__name__}: {error}"[:300], where]
    said = [f"{answer.verdict}: {answer.sentence}"]
    for cause in answer.causes:
        more = "".join(f" | or {other}" for other in cause.others)
        said.append(f"  {cause.kind}: {cause.place} [{cause.place.op}] {cause.what}{more}")
    return found, said


def failures(pair: Pair, found: Outcome | None) -> list[str]:
    """The kinds of failure."""
    if found is None:
        return ["error"]
    if pair.planted is None:
        return ["clean accused"] if found.accused else []
    if found.silent:
        return ["planted silent"]
    named = {
        "place wrong": not found.place,
        "kind wrong": found.place and not found.kind,
        "not named": found.place and not found.named,
        "extra accused": found.accused > 0 and found.place,
    }
    return [name for name, holds in named.items() if holds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", choices=SETS, action="append", help="may be repeated; all by default")
    parser.add_argument("--only", default="", metavar="REGEX", help="of the names of pairs")
    parser.add_argument("--ops", choices=("all", "products", "mixed", "own"), default="all", help="what is recorded")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "opintercept-pairs"))
    parser.add_argument("--judge", default="opintercept.runs:why", metavar="MODULE:FUNCTION")
    parser.add_argument("-v", action="store_true", help="print pairs without failure too")
    options = parser.parse_args()
    module, _, function = options.judge.partition(":")
    judge: Judge = getattr(importlib.import_module(module), function)
    options.cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    counts: Counter[str] = Counter()
    seconds: list[float] = []
    for name in options.set or SETS:
        programs: Any = importlib.import_module(SETS[name])
        own = Path(__file__).parent
        source = "".join((own / f"{file}.py").read_text() for file in (SETS[name], "pair_models"))
        for pair in programs.PAIRS:
            if not re.search(options.only, pair.name):
                continue
            runs_of = opened(pair, options.cache, pair.ops if options.ops == "own" else options.ops, source)
            began = time.perf_counter()
            found, said = scored(pair, judge, *runs_of)
            seconds.append(time.perf_counter() - began)
            failed = failures(pair, found)
            counts.update(failed)
            planted = pair.planted is not None
            counts.update(["planted" if planted else "clean"])
            if planted and found is not None:
                counts.update(each for each in ("place", "kind", "named") if getattr(found, each))
            silent = "planted" if "planted silent" in failed else "" if planted else "clean"
            if silent and said[0].startswith("not compared"):
                failed = [*failed, f"{silent} not compared"]
                counts[failed[-1]] += 1
            if failed or options.v:
                print(f"{', '.join(failed) or 'right'}: {name}/{pair.name} ({seconds[-1]:.1f} s)")
                if pair.planted is not None:
                    wanted = pair.planted
                    print(f"    expected: {wanted.place!r} {'/'.join(sorted(wanted.kinds))} {wanted.words!r}")
                print("\n".join(f"    {line}" for line in said), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    of = counts["planted"]
    print(f"clean: {counts['clean']}, accused {counts['clean accused']}, not compared {counts['clean not compared']}")
    print(
        f"planted: {of}, silent {counts['planted silent']}, of which {counts['planted not compared']} not compared, "
        f"place right {counts['place']}, kind right {counts['kind']}, "
        f"cause named {counts['named']}, with extra causes {counts['extra accused']}"
    )
    print(f"errors: {counts['error']}")
    if seconds:
        mean = sum(seconds) / len(seconds)
        print(f"seconds: mean {mean:.2f}, most {max(seconds):.1f}; peak memory {peak:.0f} MB")


if __name__ == "__main__":
    main()
