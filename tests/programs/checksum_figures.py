"""Measures `Checksum`: false alarms in random products, and how many flipped bits it finds, by bit.

`python tests/programs/checksum_figures.py alarms flips` prints the figures of docs/checksum.md; it takes an hour. The
tests use the same functions for fewer products. `cores` does so for what tensor cores may compute.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from opintercept import OpCall, hooks, intercept

if __name__ == "__main__":
    sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent / "helpers")]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _heavy(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) / torch.randn(shape, dtype=torch.float64).abs().clamp_min(1e-3)


def _scaled(*shape: int) -> Tensor:
    """Rows and columns whose scales differ by a million."""
    rows, columns = (10 ** torch.empty(size, dtype=torch.float64).uniform_(-3, 3) for size in shape)
    return _normal(*shape) * rows.sqrt().unsqueeze(1) * columns.sqrt()


KINDS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": _normal,
    "uniform": lambda *shape: torch.rand(shape, dtype=torch.float64) - 0.5,
    "all positive": lambda *shape: torch.rand(shape, dtype=torch.float64),
    "heavy tails": _heavy,
    "sparse": lambda *shape: _normal(*shape) * (torch.rand(shape, dtype=torch.float64) < 0.05),
    "badly scaled": _scaled,
    "constant": lambda *shape: torch.full(shape, 1 / 3, dtype=torch.float64),
    "sorted": lambda *shape: _normal(*shape).sort(1).values,
}


def sizes(largest: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Sizes m, n, k of products, spread evenly over the powers of two."""
    for _ in range(count):
        yield tuple(int(2 ** (torch.rand(()).item() * math.log2(largest + 0.99))) for _ in range(3))  # type: ignore[misc]


def multiply(kind: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    """Run one of the operators on random operands of a kind."""
    a, b = (KINDS[kind](*shape).to(dtype) for shape in ((m, k), (k, n)))
    if dtype.is_complex:
        a = a + 1j * KINDS[kind](m, k).to(dtype)
    which = int(torch.randint(6, ()))
    if which == 0:
        torch.mm(a.T.contiguous().T, b)
    elif which == 1:
        torch.addmm(KINDS[kind](1, n)[0].to(dtype), a, b.T.contiguous().T)
    elif which == 2 and m * n * k < 1 << 24:
        torch.baddbmm(KINDS[kind](m, n).to(dtype), a.expand(2, m, k), b.expand(2, k, n), alpha=0.5, beta=2)
    elif which == 3:
        torch.mv(a, b[:, 0])
    else:
        torch.mm(a, b)


def alarms(
    products: int, largest: int, kinds: Any = KINDS, dtypes: Any = DTYPES, seed: int = 0
) -> dict[str, hooks.Checksum]:
    """Check random products, this many of each kind of operands."""
    torch.manual_seed(seed)
    found = {}
    for kind in kinds:
        checksum = found[kind] = hooks.Checksum(action="record")
        with intercept(checksum):
            for count, size in enumerate(sizes(largest, products)):
                multiply(kind, dtypes[count % len(dtypes)], *size)
    return found


class Step:
    """A training step of a model, or its forward pass only."""

    def __init__(self, model: Any, inputs: dict[str, Tensor], train: bool) -> None:
        self.model, self.inputs, self.train = model, inputs, train

    def __call__(self) -> None:
        if not self.train:
            with torch.no_grad():
                self.model(**self.inputs)
            return
        output = self.model(**self.inputs)
        loss = output.loss if getattr(output, "loss", None) is not None else output.last_hidden_state.square().mean()
        loss.backward()
        self.model.zero_grad()


def minilm_step(dtype: torch.dtype, train: bool = True) -> Step:
    import minilm

    model, tokenizer = minilm.load()
    sentences = [
        "The quick brown fox jumps over the lazy dog.",
        "Silent data corruption is rare.",
        "A checksum costs little beside a product.",
        "Nobody reads every product.",
        "It was the best of times, it was the worst of times.",
        "She sells sea shells by the sea shore.",
        "How much wood would a woodchuck chuck?",
        "To be, or not to be, that is the question.",
    ]
    return Step(model.to(dtype), dict(tokenizer(sentences, padding=True, return_tensors="pt")), train)


def llama_step(dtype: torch.dtype, train: bool = True) -> Step:
    from models import MODELS, inputs_of

    torch.manual_seed(0)
    model: Any = MODELS["llama"]().train()
    return Step(model.to(dtype), inputs_of(model), train)


STEPS: dict[str, Callable[[torch.dtype], Step]] = {"MiniLM": minilm_step, "Llama": llama_step}


class Effect:
    """What a flip does to a product, beside its rounding: the first of the hooks keeps the operands.

    Attributes:
        last: The hook that goes last, and sees the output.
        largest: Of all rows, the largest effect in units of the norm of the row's rounding errors.
    """

    reads = ()

    def __init__(self, target: int) -> None:
        self.target, self.largest = target, 0.0
        self.last = SimpleNamespace(reads=(), post=self.measure)
        self.call: tuple[Any, Any] = (), {}

    def is_target(self, call: OpCall) -> bool:
        return call.index == self.target

    def pre(self, call: OpCall) -> None:
        if self.is_target(call):
            self.call = call.args, dict(call.kwargs)

    def measure(self, call: OpCall) -> None:
        if not self.is_target(call):
            return
        args, kwargs = self.call
        with torch.no_grad():
            clean = call.func(*args, **kwargs).double()
            exact = call.func(*(a.double() if isinstance(a, Tensor) else a for a in args), **kwargs)
            effect, rounding = ((t - u).norm(dim=-1) for t, u in ((call.output.double(), clean), (clean, exact)))
            self.largest = float((effect / rounding.clamp_min(1e-34)).nan_to_num(math.inf).amax())


class Tally:
    """How many flips were made, found in the right call, and had an effect of more than rounding; and false alarms.

    A flip has one if it moves a row of the output by more than 6 times the norm of the row's rounding errors.
    """

    def __init__(self) -> None:
        self.made = self.found = self.visible = self.visible_found = self.elsewhere = 0

    def __str__(self) -> str:
        return f"{self.visible_found}/{self.visible} of {self.found}/{self.made}"


def flips(
    step: Callable[[], None],
    role: str,
    bits: Any,
    tries: int,
    *,
    phase: str | None = None,
    count: int = 1,
    seed: int = 0,
    level: Any = "dispatch",
) -> dict[int, Tally]:
    """Flip one bit of one call in each run of a step, and count by bit what is found.

    Args:
        step: Runs the products.
        role: `"output"`; or an operand, which is flipped after its checksum was taken and before the product.
        bits: The bits.
        tries: How many flips of each bit.
        phase: Only calls of this phase.
        count: How many elements to flip at once.
        seed: Seeds the choice of calls and elements.
        level: The level of the block.
    """
    recorder = hooks.Recorder()
    products = ("mm", "addmm", "bmm", "linear", "matmul", "baddbmm")
    with intercept(hooks.when(recorder, op=products, phase=phase), level=level):
        step()
    indices = [record.index for record in recorder.records]
    generator = torch.Generator().manual_seed(seed)
    tallies: dict[int, Tally] = defaultdict(Tally)
    checksum = hooks.Checksum(action="record")
    for bit in bits:
        for turn in range(tries):
            target = indices[int(torch.randint(len(indices), (), generator=generator))]
            flip = hooks.BitFlip(count, of=role, bits=bit, seed=seed + 1000 * bit + turn)
            effect = Effect(target)
            one = hooks.when(flip, predicate=effect.is_target)
            order = [one, checksum] if role == "output" else [checksum, one]
            with intercept([effect, *order, effect.last], level=level):
                step()
            if not flip.log:
                continue
            named = {finding.record.index for finding in checksum.findings}
            checksum.clear()
            tallies[bit].made += 1
            tallies[bit].found += target in named
            tallies[bit].visible += effect.largest > 6
            tallies[bit].visible_found += effect.largest > 6 and target in named
            tallies[bit].elsewhere += bool(named - {target})
    return dict(tallies)


def _swap_rows(output: Tensor) -> None:
    output[[0, -1]] = output[[-1, 0]]


def _empty_a_tile(output: Tensor) -> None:
    output[:16, :16] = 0


def _flip_a_bit(output: Tensor) -> None:
    """One of the exponent or of the highest two of the mantissa, in a random element."""
    words = output.view(-1).view(torch.int32 if output.dtype is torch.float32 else torch.int16)
    lowest = round(-math.log2(torch.finfo(output.dtype).eps)) - 2
    bit = int(torch.randint(lowest, 8 * words.element_size() - 1, ()))
    words[int(torch.randint(len(words), ()))] ^= 1 << bit


PLANTED = {"swapped rows": _swap_rows, "a tile of zeros": _empty_a_tile, "a flipped bit": _flip_a_bit}


def cores(way: str, products: int, largest: int, seed: int = 0) -> tuple[Counter[str], Counter[str]]:
    """How many products there are of what tensor cores compute right or wrong, and in how many of them is a finding.

    `"right"` has the products without a planted error, and `"overflows"` those of them that a setting explains.
    """
    import tensor_cores

    dtype, flags, multiply = tensor_cores.ARITHMETIC[way]
    torch.manual_seed(seed)
    made: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for make in KINDS.values():
        for m, n, k in sizes(largest, products):
            a, b = make(m, k).to(dtype), make(k, n).to(dtype)
            right = multiply(a, b).to(dtype)
            for what, plant in {"right": None, **PLANTED}.items():
                output = right.clone()
                if plant is not None:
                    plant(output)
                    if torch.equal(output, right) or not right.isfinite().all():
                        continue
                checksum = hooks.Checksum(action="record")
                with tensor_cores.settings("cpu", **flags):
                    with intercept([tensor_cores.Computed(lambda *_, given=output: given), checksum]):
                        torch.mm(a, b)
                explained = any(finding.flags for finding in checksum.findings)
                made[what] += 1
                found[what] += bool(checksum.findings) and not explained
                found["overflows"] += explained and plant is None
    return made, found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure Checksum.")
    parser.add_argument("figures", nargs="+", choices=("alarms", "flips", "cores"))
    parser.add_argument("--products", type=int, default=1000)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--largest", type=int, default=4096)
    options = parser.parse_args()
    if "alarms" in options.figures:
        for kind, checksum in alarms(options.products, options.largest).items():
            print(f"{kind:14}{checksum.checked:7} products{checksum.rows:9} rows{len(checksum.findings):3} alarms")
            for finding in checksum.findings[:3]:
                print(finding)
    if "cores" in options.figures:
        import tensor_cores

        for way in tensor_cores.ARITHMETIC:
            made, told = cores(way, options.products, options.largest)
            shares = [f"{what} {told[what]}/{made[what]}" for what in made]
            print(f"{way}: {', '.join(shares)}, overflows {told['overflows']}", flush=True)
    if "flips" in options.figures:
        torch.set_num_threads(1)
        for name, make in STEPS.items():
            for dtype, bits in ((torch.float32, range(12, 32)), (torch.bfloat16, range(4, 16))):
                step = make(dtype)
                for role in ("output", "lhs", "rhs"):
                    found = flips(step, role, bits, options.tries)
                    print(name, str(dtype), role, {bit: str(tally) for bit, tally in found.items()}, flush=True)
                    high = [tally for bit, tally in found.items() if bit >= (20 if dtype == torch.float32 else 8)]
                    share = sum(tally.visible_found for tally in high) / sum(tally.visible for tally in high)
                    print(f"  high bits {share:.2%}, elsewhere {sum(t.elsewhere for t in found.values())}", flush=True)


if __name__ == "__main__":
    main()
