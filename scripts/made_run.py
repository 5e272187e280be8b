"""Makes a run of any size without running a model, to measure what reads runs.

    python scripts/made_run.py OUT --calls 10000000 --ranks 64 [--changed STEP:LAYER] [--lines]

Its calls are those of a training: each step has the products of `--layers` decoder layers, forward and backward. With
`--changed` the layer computes other outputs from that step on, and everything after it inherits that.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opintercept._record import plain
from opintercept.runs._columns import FIGURES, FLAGS, NUMBERS, Site, dtype_of
from opintercept.runs._parquet import StoreColumns, StoreWriter
from opintercept.runs.codec import compact
from opintercept.runs.store import CALLS, COLUMNS, COMPACTED, INFO, SCHEMA

ROWS = 512  # of the activations
PRODUCTS = {"q": (1024, 1024), "k": (1024, 256), "v": (1024, 256), "o": (1024, 1024)}
PRODUCTS |= {"gate": (1024, 2816), "up": (1024, 2816), "down": (2816, 1024)}
_INPUT = {"q": "x", "k": "x", "v": "x", "o": "a", "gate": "h", "up": "h", "down": "g"}  # which products share


def main(arguments: list[str]) -> int:
    """Make the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--calls", type=int, default=1_000_000, help="of all ranks together")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--changed", help="STEP:LAYER from which on values are others")
    parser.add_argument("--lines", action="store_true", help="write calls.jsonl, as a recorder does")
    chosen = parser.parse_args(arguments)
    changed = None if chosen.changed is None else tuple(map(int, chosen.changed.split(":")))
    for rank in range(chosen.ranks):
        folder = chosen.out / f"rank{rank}" if chosen.ranks > 1 else chosen.out
        (folder / COLUMNS).mkdir(parents=True)
        _make(folder / COLUMNS, rank, chosen.calls // chosen.ranks, chosen.layers, changed)
        if chosen.lines:
            _write_lines(folder, rank)
        plain = {"schema": SCHEMA if chosen.lines else COMPACTED, "argv": ["train.py"], "started": "", "rank": rank}
        plain |= {"finished": True, "tensors": "stats", "world_size": chosen.ranks}
        plain |= {"versions": {"torch": "2.13.0"}, "devices": [], "flags": {}}
        (folder / INFO).write_text(json.dumps(plain), "utf-8")
    return 0


def _make(folder: Path, rank: int, calls: int, layers: int, changed: tuple[int, ...] | None) -> None:
    program = _Program(layers)
    writer = StoreWriter(folder, rank)
    size = len(program.look)
    for step in range(-(-calls // size)):
        columns = program.step(step, rank, changed)
        if calls - step * size < size:
            columns = {name: column[: calls - step * size] for name, column in columns.items()}
        looks, program.looks = program.looks, []
        sites, program.sites = program.sites, []
        writer.add_columns(columns, looks, sites)
    writer.close(skipped=0)


class _Program:
    """The products of one step, each with its place and the numbers of the tensors that it reads and makes."""

    def __init__(self, layers: int) -> None:
        self.looks: list[str] = []
        self.sites: list[Site] = []
        ids: dict[str, int] = {}
        site: list[int] = []
        look: list[int] = []
        tensors: list[tuple[int, int, int]] = []  # of lhs, rhs and output
        layer_of: list[int] = []

        def add(layer: int, module: str, kind: tuple[Any, ...], *names: str) -> None:
            place = Site(f"model.layers.{layer}.{module}", "model.py:7 in forward", *kind[:2])
            self.sites.append(place)
            site.append(len(self.sites) - 1)
            text = _look(*kind[2:])
            if text not in self.looks:
                self.looks.append(text)
            look.append(self.looks.index(text))
            tensors.append(tuple(ids.setdefault(name, len(ids)) for name in names))  # type: ignore[arg-type]
            layer_of.append(layer)

        for layer in range(layers):
            for name, (k, n) in PRODUCTS.items():
                x = f"{layer}.{_INPUT[name]}"
                add(layer, name, ("forward", None, ROWS, k, n), x, f"{layer}.{name}.w", f"{layer}.{name}.y")
        forward = len(site)
        for layer in reversed(range(layers)):
            for name, (k, n) in reversed(PRODUCTS.items()):
                own, x = f"{layer}.{name}", f"{layer}.{_INPUT[name]}"
                add(layer, name, ("backward", "lhs", ROWS, n, k), f"{own}.dy", f"{own}.wt", f"{own}.dx")
                add(layer, name, ("backward", "rhs", n, ROWS, k), f"{own}.dyt", x, f"{own}.dw")
        self.site, self.look = np.array(site, np.int32), np.array(look, np.int32)
        self.tensors = np.array(tensors, np.uint64)
        self.forward = np.full(len(site), -1)
        names = {self.sites[place].module: number for number, place in enumerate(site[:forward])}
        self.forward[forward:] = [names[self.sites[place].module] for place in site[forward:]]
        self._weights = np.array([name.endswith((".w", ".wt")) for name in ids])
        # A tensor is another one if a layer before it is: the first layer that reads or makes it in this order.
        self._first = np.full(len(ids), 2 * layers)
        order = np.arange(len(site))
        self._order = np.where(order < forward, np.array(layer_of), 2 * layers - 1 - np.array(layer_of))
        for number in range(len(site) - 1, -1, -1):
            self._first[self.tensors[number].astype(int)] = self._order[number]

    def step(self, step: int, rank: int, changed: tuple[int, ...] | None) -> dict[str, NDArray[Any]]:
        """The columns of a step."""
        size = len(self.site)
        columns: dict[str, NDArray[Any]] = {}
        for name in NUMBERS:
            columns[name] = np.full(size, np.nan if dtype_of(name) is np.float64 else 0, dtype_of(name))
        columns |= {name: np.zeros(size, bool) for name in FLAGS}
        columns["index"] = np.arange(step * size, (step + 1) * size)
        columns["step"][:] = step
        columns["site"], columns["look"] = self.site, self.look
        columns["forward"] = np.where(self.forward < 0, -1, self.forward + step * size)
        drawn = _mixed(np.arange(size, dtype=np.uint64) + np.uint64(step * size * 7919))
        columns["elapsed"] = (20_000 + drawn % np.uint64(30_000)).astype(np.int64) / 1e9
        salt = np.zeros(len(self._weights), np.uint64)
        if changed is not None:
            others = np.full(len(salt), step > changed[0])
            if step == changed[0]:
                others = ~self._weights & (self._first >= changed[1])
            salt[others] = 1
        ranked = np.where(self._weights, 0, rank).astype(np.uint64)
        seed = (np.arange(len(salt), dtype=np.uint64) << np.uint64(32)) + (ranked << np.uint64(24)) + np.uint64(step)
        alike, digits = _mixed(seed), _mixed(seed + (salt << np.uint64(63)))
        outputs = np.full(size, False)
        if changed is not None and step == changed[0]:
            outputs = self._order == changed[1]  # the changed layer reads equal operands
        for place, slot in enumerate(("lhs", "rhs", "output")):
            tensor = self.tensors[:, place].astype(int)
            other = salt[tensor] > 0
            if slot == "lhs" and outputs.any():
                other &= ~outputs
            columns[f"{slot}_hash"] = np.where(other, digits[tensor], alike[tensor])
            scale = np.where(other, 1.001, 1.0)
            for number, name in enumerate(FIGURES):
                part = (_mixed(alike[tensor] + np.uint64(number + 1)) >> np.uint64(11)) / 2**53
                value = {"min": -1 - part, "max": 1 + part, "mean": part / 100, "rms": 0.5 + part / 4}[name] * scale
                columns[f"{slot}_{name}"] = value.astype(np.float32).astype(float) if name in ("min", "max") else value
        return columns


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Splitmix64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _look(m: int, k: int, n: int) -> str:
    def meta(*shape: int) -> dict[str, Any]:
        kept = {"shape": shape, "dtype": "float32", "device": "cpu", "stride": [shape[1], 1], "requires_grad": False}
        return kept

    gemm = {"batch": 1, "m": m, "n": n, "k": k, "dtypes": ["float32"] * 2, "transposes": [False, False]}
    own: dict[str, Any] = {
        "op": "aten::mm",
        "func": "aten.mm.default",
        "lhs": meta(m, k),
        "rhs": meta(k, n),
        "bias": None,
    }
    own |= {"output": meta(m, n), "gemm": gemm, "flops": 2 * m * n * k, "bytes": 4 * (m * k + k * n + m * n)}
    roles = {"lhs": (m * k, True), "rhs": (k * n, True), "output": (m * n, True)}
    return compact({"autocast": None, **own, "opaque": False, "arguments": {}, "roles": roles})


def _write_lines(folder: Path, rank: int) -> None:
    columns = StoreColumns(folder / COLUMNS, rank)
    with open(folder / CALLS, "w", encoding="ascii") as file:
        for call in columns.calls():
            record = {name: plain(value) for name, value in call.record.as_dict().items()}
            values = {role: kept.as_dict() for role, kept in call.values.items()}
            file.write(compact(record | {"arguments": call.arguments, "values": values}) + "\n")
    for path in (folder / COLUMNS).iterdir():
        path.unlink()
    (folder / COLUMNS).rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
