"""Random trees of processes under `opintercept run`: they fork, spawn, exec, are killed and exit in any order.

Each process multiplies matrices of a shape that no other has, and notes how often. What was recorded must be that, for
each process that ended by itself, and nothing else's. `python tests/programs/process_trees.py --count 50` tries trees.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WAYS = ("os.fork", "os.fork", "fork", "fork", "forkserver", "spawn", "subprocess")
ENDS = ("falls off", "falls off", "exits", "raises", "is killed", "leaves", "executes")
BY_THEMSELVES = ("falls off", "exits", "raises")
_SECONDS = 240  # that a tree may take

Node = dict[str, Any]


def tree(seed: int) -> Node:
    """A random tree of at most seven processes, of which three start a new Python."""
    draw = random.Random(seed)
    numbers = iter(range(7))
    fresh = iter(range(3))

    def node(depth: int) -> Node:
        number = next(numbers)
        children = []
        for _ in range(draw.randint(0 if depth else 1, 3) if depth < 3 else 0):
            how = draw.choice(WAYS)
            if how in ("forkserver", "spawn", "subprocess") and next(fresh, None) is None:
                how = "fork"
            with contextlib.suppress(StopIteration):
                children.append({"how": how, "waits": draw.random() < 0.8} | node(depth + 1))
        end = draw.choice(ENDS) if depth else "falls off"
        return {"number": number, "before": draw.randint(0, 3), "after": draw.randint(0, 3), "end": end,
                "children": children, "inside": draw.random() < 0.3}  # fmt: skip

    return node(0)


def nodes(top: Node) -> list[Node]:
    """All processes of a tree."""
    return [top, *(each for child in top["children"] for each in nodes(child))]


def grow(node: Node) -> None:
    """Be a process of a tree."""
    before, after = node["before"], node["after"]
    work(node, before)
    waits = []
    with block() if node["inside"] else contextlib.nullcontext():
        for child in node["children"]:
            ended = start(child)
            if child["waits"]:
                waits.append(ended)
    for ended in waits:
        ended()
    work(node, after)
    end(node["end"])


def block() -> Any:
    """A block of the program's own."""
    from opintercept import hooks, intercept

    return intercept(hooks.Recorder())


def work(node: Node, times: int) -> None:
    """Multiply matrices of the shape of the process."""
    if times:
        import torch

        size = node["number"] + 1
        for _ in range(times):
            torch.ones(2, size) @ torch.ones(size, 2)
    with open(f"counted/{node['number']}", "a") as file:
        file.write(f"{os.getpid()} {times}\n")


def start(child: Node) -> Any:
    """Start a process, and return what waits for its end."""
    if child["how"] == "os.fork":
        pid = os.fork()
        if not pid:
            try:
                grow(child)
            except ZeroDivisionError:
                sys.exit(1)
            sys.exit()
        return lambda: os.waitpid(pid, 0)
    if child["how"] == "subprocess":
        return subprocess.Popen([sys.executable, __file__, "--grow", json.dumps(child)]).wait
    process = multiprocessing.get_context(child["how"]).Process(target=grow, args=(child,), daemon=False)
    process.start()
    return process.join


def end(how: str) -> None:
    """End this process."""
    if how == "exits":
        sys.exit(3)
    if how == "raises":
        raise ZeroDivisionError("on purpose")
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leaves":
        os._exit(4)
    if how == "executes":
        os.execv(sys.executable, [sys.executable, "-S", "-c", "pass"])


def alive(session: int) -> list[int]:
    """The processes of a session that run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, *_, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(owner) == session and state not in "ZX":
                found.append(int(entry.name))
    return found


def check(seed: int, folder: Path, options: tuple[str, ...] = ()) -> None:
    """Run a tree in an empty folder, and compare what was recorded with what its processes have counted."""
    from opintercept import runs

    top = tree(seed)
    (folder / "counted").mkdir()
    command = [
        sys.executable,
        "-m",
        "opintercept",
        "run",
        "--out",
        "run",
        *options,
        __file__,
        "--grow",
        json.dumps(top),
    ]
    with open(folder / "said", "w") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said, start_new_session=True)
    last = time.monotonic() + _SECONDS
    while process.poll() is None or alive(process.pid):
        if time.monotonic() > last:
            left = alive(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"tree {seed} hangs in {left}: {(folder / 'said').read_text()[-3000:]}")
        time.sleep(0.02)
    assert process.returncode == 0, (folder / "said").read_text()[-3000:]
    by_shape: dict[str, int] = {}
    if any(counts(folder).values()):
        opened = runs.open_run(folder / "run")
        parts = {number: [*opened.calls(number)] for number in opened.ranks}
        for number, calls in parts.items():
            shapes = {call.record.shape for call in calls}
            assert len(shapes) <= 1, f"tree {seed}: {opened.title(number)} has calls of several processes: {shapes}"
            for shape in shapes:
                assert shape not in by_shape, f"tree {seed}: the calls of {shape} are in two folders"
                by_shape[shape] = len(calls)
        whole = {parts[n][0].record.shape for n, info in opened.infos.items() if info.finished and parts[n]}
    else:
        whole = set()
    judge(seed, top, counts(folder), by_shape, whole)


def judge(seed: int, top: Node, counted: Mapping[int, int], by_shape: Mapping[str, int], whole: set[str]) -> None:
    """Compare what each process has counted with its calls; `whole` has the shapes of the runs that have finished."""
    for node in nodes(top):
        number = node["number"]
        shape = f"[2, {number + 1}] @ [{number + 1}, 2]"
        have, want = by_shape.get(shape, 0), counted.get(number, 0)
        if node["end"] in BY_THEMSELVES or have == want:
            assert have == want, f"tree {seed}: process {node} counts {want} calls, and {have} are recorded"
            assert not want or node["end"] not in BY_THEMSELVES or shape in whole, (
                f"tree {seed}: {node} has not finished"
            )
        else:
            assert have < want, f"tree {seed}: process {node} counts {want} calls, and {have} are recorded"
            assert shape not in whole, f"tree {seed}: the run of {node} looks whole, and lacks calls"


def counts(folder: Path) -> dict[int, int]:
    """How often each process has multiplied, by its own count."""
    lines = {int(file.name): file.read_text().split() for file in (folder / "counted").iterdir()}
    return {number: sum(map(int, words[1::2])) for number, words in lines.items()}


def main() -> None:
    """Grow a tree, or try many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grow", type=json.loads, help="be a process of a tree")
    parser.add_argument("--count", type=int, default=50, help="how many trees to try")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    arguments = parser.parse_args()
    if arguments.grow is not None:
        grow(arguments.grow)
        return
    for seed in range(arguments.first, arguments.first + arguments.count):
        with tempfile.TemporaryDirectory() as folder:
            check(seed, Path(folder))
        print(f"tree {seed}: {len(nodes(tree(seed)))} processes", flush=True)


if __name__ == "__main__":
    main()
