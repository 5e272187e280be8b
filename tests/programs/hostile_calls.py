"""Hostile calls: each operator that a run from elsewhere may have called again, with arguments that nobody would write.

Each call goes through `opintercept.runs.program.again`, as those of all commands do, with valid arguments that are
changed at random, or with random ones. A process of its own runs those of an operator: it must neither end by a signal,
nor hang, nor take a gigabyte. `python tests/programs/hostile_calls.py --count 200` tries all of them.
"""

from __future__ import annotations

import argparse
import copy
import math
import mmap
import os
import random
import resource
import signal
import struct
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "helpers")]

import torch

from opintercept import OpCall, OpInterceptError, intercept
from opintercept._kit.repro import plain_arguments
from opintercept._ops.table import PLACES, overloads
from opintercept.runs.program import again, operators

MOST_SECONDS, MOST_BYTES = 10.0, 1 << 30
_VALID = (
    "numbers",
    "copies",
    "layers",
    "data_dependent",
    "modes_of_autograd",
    "views_in_place",
    "adamw",
    "complex_numbers",
)
_CPU = torch.device("cpu")
_INTEGERS: tuple[int, ...] = (
    0,
    1,
    2,
    3,
    5,
    -1,
    -2,
    -3,
    7,
    16,
    63,
    64,
    1 << 10,
    1 << 16,
    1 << 20,
    1 << 30,
    (1 << 31) - 1,
    1 << 31,
)
_INTEGERS += (1 << 32, 1 << 40, (1 << 62), (1 << 63) - 1, -(1 << 31), -(1 << 40), -(1 << 63), 100_000, -100_000)
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.5, 1e-300, 1e300, 1e18, -1e18, math.inf, -math.inf, math.nan, 2.0**31, 3e9)
_TEXTS = (
    "",
    "none",
    "tanh",
    "mean",
    "sum",
    "amax",
    "prod",
    "floor",
    "trunc",
    "\x00",
    "linear",
    "x" * 5000,
    "ij,jk->ik",
)
_CONSTANTS: tuple[str, ...] = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int64",
    "uint8",
    "bool",
    "complex64",
    "uint64",
)
_CONSTANTS += (
    "strided",
    "sparse_coo",
    "channels_last",
    "contiguous_format",
    "preserve_format",
    "float8_e4m3fn",
    "bits8",
)
_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
)
_DTYPES += (torch.bool, torch.int8, torch.int16, torch.complex64, torch.complex128)
_SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (1,),
    (3,),
    (4,),
    (2, 3),
    (4, 4),
    (0, 3),
    (3, 0),
    (2, 3, 4),
    (1, 2, 4, 4),
    (1, 1, 1, 1),
    (2, 0, 3, 3),
)
_SHAPES += ((1, 2, 2, 3, 3), (1,) * 7, (1000,), (64, 64), (3, 1 << 12))


class Recorded(NamedTuple):
    """The arguments of a call as a run has them, with its tensors by name."""

    args: list[Any]
    kwargs: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def __str__(self) -> str:
        tensors = {name: (str(each.dtype), each.unique()[:8].tolist()) for name, each in self.tensors.items()}
        return f"{self.args} {self.kwargs} {tensors}"


class Found(NamedTuple):
    """What the calls of an operator have come to."""

    name: str
    outcomes: Counter[str]
    failures: list[tuple[int, str]]  # the number of a call, and how its process ended
    peak: int  # bytes


class Keeper:
    """Keeps the arguments of a few valid calls of each operator."""

    def __init__(self, most: int = 8) -> None:
        self.found: dict[str, list[Recorded]] = defaultdict(list)
        self._most = most

    def pre(self, call: OpCall) -> None:
        name = str(call.func) if hasattr(call.func, "_schema") else torch.overrides.resolve_name(call.func)
        if name is None or len(self.found[name]) >= self._most:
            return
        tensors: dict[str, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> str:
            tensors[f"{len(tensors)}"] = tensor.detach().clone().contiguous()
            return f"{len(tensors) - 1}"

        try:
            plain = plain_arguments(call, {}, keep)
        except (TypeError, RuntimeError):
            return
        if sum(each.numel() for each in tensors.values()) < 1 << 16:
            self.found[name].append(Recorded(plain["args"], plain["kwargs"], tensors))


def rare_calls() -> None:
    """Calls of operators that no other program here has."""
    lines, images, volumes = (torch.rand(1, 2, *[6] * n, requires_grad=True) for n in (1, 2, 3))
    functional: Any = torch.nn.functional
    made = [functional.max_pool3d(volumes, 2), functional.avg_pool3d(volumes, 2), functional.avg_pool2d(images, 2)]
    made += [functional.adaptive_avg_pool3d(volumes, 2), functional.adaptive_max_pool2d(images, 2)]
    modes = [(lines, "nearest nearest-exact linear"), (images, "nearest nearest-exact bilinear bicubic")]
    for x, names in [*modes, (volumes, "nearest trilinear")]:
        made += [functional.interpolate(x, scale_factor=2.0, mode=mode) for mode in names.split()]
        made += [functional.interpolate(x, size=[4] * (x.dim() - 2), mode=mode) for mode in names.split()]
    made += [functional.interpolate(images, size=(4, 4), mode=mode, antialias=True) for mode in ("bilinear", "bicubic")]
    made += [functional.pad(volumes, (1,) * 6, mode) for mode in ("reflect", "replicate")]
    made += [functional.pad(images, (1,) * 4, mode) for mode in ("reflect", "replicate")]
    made += [functional.fold(functional.unfold(images, 2), (6, 6), 2), functional.rms_norm(lines, (6,))]
    made += [functional.nll_loss(images.log_softmax(1), torch.ones(1, 6, 6, dtype=torch.int64))]
    made += [
        functional.conv_transpose3d(volumes, torch.ones(2, 3, 2, 2, 2)),
        functional.conv_transpose1d(lines, torch.ones(2, 3, 2)),
    ]
    for training in (False, True):
        mean, variance = torch.zeros(2), torch.ones(2)
        made += [functional.batch_norm(images, mean, variance, torch.ones(2), torch.ones(2), training)]
    made += [functional.group_norm(images, 2), functional.instance_norm(images), functional.layer_norm(lines, (6,))]
    made += [functional.adaptive_avg_pool1d(lines, 2), functional.affine_grid(torch.eye(2, 3)[None], (1, 1, 4, 4))]
    scores = torch.rand(5, 1, 4, requires_grad=True)
    lengths = torch.tensor([5]), torch.tensor([2])
    made += [functional.ctc_loss(scores.log_softmax(-1), torch.tensor([[1, 2]]), *lengths)]
    table, places, rows = torch.rand(4, 3, requires_grad=True), torch.tensor([2, 0]), torch.rand(2, 3)
    made += [table.index_copy(0, places, rows), table.index_add(0, places, rows), table.index_fill(0, places, 2.0)]
    made += [table.index_fill(0, places, torch.tensor(1.0)), table.index_reduce(0, places, rows, "amax")]
    made += [table.put(places, rows[0, :2]), table.detach().scatter(0, places[:, None], rows, reduce="add")]
    made += [table.detach().scatter(0, places[:, None], 2.0, reduce="multiply"), table.diagonal_scatter(rows[0])]
    made += [table.masked_fill(table > 0.5, torch.tensor(1.0)), torch.einsum("ij,kj->ik", table, rows)]
    made += [torch.fake_quantize_per_channel_affine(table, rows[0] + 0.1, torch.zeros(3).int(), 1, 0, 255)]
    sum(each.double().sum() for each in made).backward()


def valid_calls() -> dict[str, list[Recorded]]:
    """Valid calls of the operators that small programs call."""
    import every_programs
    import models
    import programs

    keeper = Keeper()
    levels: tuple[Literal["dispatch", "function"], ...] = ("dispatch", "function")
    for level in levels:
        with warnings.catch_warnings(), intercept(keeper, ops="all", level=level):
            warnings.simplefilter("ignore")
            for program in programs.PROGRAMS:
                programs.execute(program, program.context, gradients=program.differentiable)
            rare_calls()
            for name in _VALID:
                every_programs.outcome(every_programs.PROGRAMS[name])
            for name in ("llama", "bert", "gpt2", "mixtral"):
                model = models.MODELS[name]()
                model(**models.inputs_of(model)).loss.backward()
            model = models.MORE_MODELS["resnet"]()
            model(**models.inputs_of(model)).loss.backward()
    return keeper.found


def listed() -> dict[str, again.Operator]:
    """All that may be called, by name."""
    found = {}
    for name in sorted(operators.NAMES):
        for packet in (name, f"{name}_"):
            for overload in overloads(f"aten::{packet}"):
                if operators.listed(overload) == name:
                    found[str(overload)] = again.operator_of(f"aten::{packet}", str(overload))
    functions = [f"{place}.{name}" for place, _, _ in PLACES for name in operators.FUNCTIONS]
    for name in functions:
        with suppress(again.NotRunError):
            found[name] = again.operator_of(name, name)
    return found


def hostile(random_: random.Random, operator: again.Operator, valid: list[Recorded]) -> Recorded:
    """The arguments of one call."""
    if valid and random_.random() < 0.75:
        made = copy.deepcopy(random_.choice(valid))
        for _ in range(random_.choice((0, 1, 1, 1, 2, 2, 3))):
            _change(random_, made)
        return made
    tensors: dict[str, torch.Tensor] = {}
    shape = random_.choice(_SHAPES)
    dtype = random_.choice(_DTYPES[:2] * 3 + _DTYPES)
    kwargs = {}
    for parameter in operator.schema.arguments if operator.schema is not None else ():
        if parameter.has_default_value() and random_.random() < 0.5:
            continue
        kwargs[parameter.name] = _of_type(random_, str(parameter.type), tensors, shape, dtype)
    if operator.schema is None:
        count = random_.randint(1, 4)
        return Recorded([_of_type(random_, "Tensor", tensors, shape, dtype) for _ in range(count)], {}, tensors)
    return Recorded([], kwargs, tensors)


def _of_type(
    random_: random.Random, kind: str, tensors: dict[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Any:
    if random_.random() < 0.03:
        kind = random_.choice(("Tensor", "int", "float", "List[int]", "str", "NoneType"))
    if kind.startswith("Optional["):
        return None if random_.random() < 0.4 else _of_type(random_, kind[9:-1], tensors, shape, dtype)
    if kind.startswith("List["):
        count = random_.choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 6, 200))
        return {"list": [_of_type(random_, kind[5:-1], tensors, shape, dtype) for _ in range(count)]}
    if kind == "Tensor":
        if random_.random() < 0.3:
            shape = random_.choice(_SHAPES)
        if random_.random() < 0.3:
            dtype = random_.choice(_DTYPES)
        return _tensor(random_, tensors, shape, dtype)
    if kind in ("int", "SymInt"):
        return random_.choice(_INTEGERS if random_.random() < 0.4 else _INTEGERS[:9])
    if kind in ("float", "number"):
        return random_.choice(random_.choice((_FLOATS, _INTEGERS)))
    if kind == "bool":
        return random_.random() < 0.5
    if kind == "str":
        return random_.choice(_TEXTS)
    if kind == "Device":
        return {"device": random_.choice(("cpu", "cuda:9", "meta"))}
    return {"torch": random_.choice(_CONSTANTS)} if kind in ("ScalarType", "Layout", "MemoryFormat") else None


def _tensor(
    random_: random.Random, tensors: dict[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    name = str(len(tensors))
    tensors[name] = _values(random_, shape, dtype)
    stride = list(tensors[name].stride())
    if random_.random() < 0.1:
        stride = [random_.choice((0, 1, 2, 7, 1 << 10, 1 << 20, 1 << 26, 1 << 39, -1)) for _ in stride]
    return {"tensor": name, "shape": list(shape), "stride": stride}


def _values(random_: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random_.getrandbits(32))
    if dtype.is_floating_point or dtype.is_complex:
        found = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        hostile_ = [*_FLOATS, *map(float, _INTEGERS)]
    elif dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    else:
        found = torch.randint(0, 4, shape, generator=generator).to(dtype)
        if random_.random() < 0.15:  # of which one divided by the other does not fit the dtype
            found = torch.where(found > 1, torch.iinfo(dtype).min, -1).to(dtype)
        hostile_ = list(_INTEGERS)
    if found.numel() and random_.random() < 0.4:
        value = torch.tensor(random_.choice(hostile_)).to(dtype)
        if random_.random() < 0.5:
            found.view(-1)[random_.randrange(found.numel())] = value
        else:
            found.fill_(value)
    return found


def _change(random_: random.Random, made: Recorded) -> None:
    """Change one argument, or a part of one."""
    places: list[tuple[Any, Any]] = []

    def collect(holder: Any, key: Any) -> None:
        places.append((holder, key))
        value = holder[key]
        if isinstance(value, dict) and "list" in value:
            for place in range(len(value["list"])):
                collect(value["list"], place)

    for place in range(len(made.args)):
        collect(made.args, place)
    for name in made.kwargs:
        collect(made.kwargs, name)
    if not places:
        return
    holder, key = random_.choice(places)
    value = holder[key]
    if random_.random() < 0.06:
        kind = random_.choice(("Tensor", "int", "float", "List[int]", "str", "bool", "NoneType", "ScalarType"))
        holder[key] = _of_type(random_, kind, made.tensors, (2, 3), torch.float32)
    elif isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = random_.choice(_INTEGERS)
    elif isinstance(value, float):
        holder[key] = random_.choice(_FLOATS)
    elif isinstance(value, str):
        holder[key] = random_.choice(_TEXTS)
    elif value is None:
        kind = random_.choice(("Tensor", "int", "float", "List[int]", "bool"))
        holder[key] = _of_type(random_, kind, made.tensors, (3,), torch.float32)
    elif "list" in value:
        items = value["list"]
        match random_.randrange(4):
            case 0:
                items.clear()
            case 1 if items:
                items.pop(random_.randrange(len(items)))
            case 2 if items:
                items.extend(copy.deepcopy(items) * random_.choice((1, 2, 40)))
            case _:
                value["list"] = [random_.choice(_INTEGERS) for _ in items]
    elif "torch" in value:
        value["torch"] = random_.choice(_CONSTANTS)
    elif "tensor" in value:
        _change_tensor(random_, made, value)


def _change_tensor(random_: random.Random, made: Recorded, value: dict[str, Any]) -> None:
    tensor = made.tensors[value["tensor"]]
    shape, dtype = tuple(tensor.shape), tensor.dtype
    match random_.randrange(6):
        case 0:  # other values
            pass
        case 1:
            dtype = random_.choice(_DTYPES)
        case 2:
            shape = random_.choice(_SHAPES)
        case 3 if shape:  # one size is another
            at = random_.randrange(len(shape))
            shape = (*shape[:at], random_.choice((0, 1, 2, shape[at] + 1, 2 * shape[at], 33)), *shape[at + 1 :])
        case 4:  # a dimension more or less
            shape = (1, *shape) if random_.random() < 0.5 else shape[1:]
        case _:  # the tensor of another argument
            value |= {"tensor": (other := random_.choice([*made.tensors])), "shape": list(made.tensors[other].shape)}
            value["stride"] = list(made.tensors[other].stride())
            return
    value |= _tensor(random_, made.tensors, shape, dtype)


def attempt(operator: again.Operator, given: Recorded, *, double: bool, derived: bool) -> str:
    """Run one call as the commands do, and say what it came to.

    Args:
        operator: What is called.
        given: Its arguments.
        double: Whether real numbers are computed in float64.
        derived: Whether derivatives are computed, too.
    """
    known: dict[str, torch.Tensor] = {}

    def tensor(plain: Mapping[str, Any], name: str) -> torch.Tensor:
        if plain["tensor"] not in known:
            made = again.strided(given.tensors[plain["tensor"]], plain["shape"], plain["stride"], 1 << 28)
            known[plain["tensor"]] = made.double() if double and made.is_floating_point() else made
        return known[plain["tensor"]]

    try:
        args = [again.argument(each, str(at), tensor, _CPU) for at, each in enumerate(given.args)]
        kwargs = {name: again.argument(each, name, tensor, _CPU) for name, each in given.kwargs.items()}
        most = again.room(known.values())
        again.check_size(operator, args, kwargs, most)
        leaves = [each.requires_grad_() for each in known.values() if derived and each.is_floating_point()]
        with torch.set_grad_enabled(bool(leaves)):
            made = again.run(operator, args, kwargs)
        outputs = [each for each in (made if isinstance(made, (tuple, list)) else [made]) if torch.is_tensor(each)]
        ends = [each for each in outputs if each.requires_grad]
        if leaves and ends:
            torch.autograd.grad(ends, leaves, [*map(torch.ones_like, ends)], allow_unused=True)
            return "derived"
        return "computed"
    except OpInterceptError as error:
        return f"refused: {error}"
    except again.FAILURES as error:
        return f"raised: {error}"


def _calls_of(
    name: str, operator: again.Operator, valid: list[Recorded], numbers: Iterable[int], told: mmap.mmap
) -> None:
    """Run calls in this process, and tell the number of each before it runs."""
    outcomes: Counter[str] = Counter()
    for number in numbers:
        told[:16] = struct.pack("qd", number, time.monotonic())
        random_ = random.Random(f"{name} {number}")
        try:
            given = hostile(random_, operator, valid)
            how = {"double": random_.random() < 0.6, "derived": random_.random() < 0.5}
            outcomes[attempt(operator, given, **how).partition(":")[0]] += 1
        except Exception as error:
            outcomes[type(error).__name__] += 1
        text = repr(dict(outcomes)).encode()
        told[16 : 24 + len(text)] = struct.pack("q", len(text)) + text


def try_operator(name: str, operator: again.Operator, valid: list[Recorded], count: int) -> Found:
    """Run the hostile calls of an operator; after one that ends its process, the others run in a new one."""
    told = mmap.mmap(-1, 1 << 14)
    outcomes: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    first, peak = 0, 0
    while first < count:
        told[:24] = struct.pack("qdq", first, time.monotonic(), 0)
        pid = os.fork()
        if not pid:
            warnings.simplefilter("ignore")
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            status = 1
            try:
                _calls_of(name, operator, valid, range(first, count), told)
                status = 0
            finally:
                os._exit(status)
        hangs = False
        while not (ended := os.wait4(pid, os.WNOHANG))[0]:
            hangs = time.monotonic() - struct.unpack("d", told[8:16])[0] > MOST_SECONDS
            if hangs:
                os.kill(pid, signal.SIGKILL)
                ended = os.wait4(pid, 0)
                break
            time.sleep(0.002)
        number, length = struct.unpack("q", told[:8])[0], struct.unpack("q", told[16:24])[0]
        outcomes.update(eval(told[24 : 24 + length]) if length else {})
        peak = max(peak, ended[2].ru_maxrss << 10)
        status = os.waitstatus_to_exitcode(ended[1])
        if not status:
            break
        failures.append((number, "hangs" if hangs else f"signal {-status}" if status < 0 else f"exits with {status}"))
        first = number + 1
    return Found(name, outcomes, failures, peak)


def tried(count: int, names: Iterable[str] = ()) -> Iterator[Found]:
    """Try all operators, or those of these names."""
    every, valid = listed(), valid_calls()
    for name in every.keys() & valid.keys():  # what torch imports when it first needs it counts for no call
        for given in valid[name][:1]:
            attempt(every[name], given, double=True, derived=False)
    for name in names or every:
        yield try_operator(name, every[name], valid.get(name, []), count)


def main() -> int:
    """Try them, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="calls of each operator")
    parser.add_argument("--show", type=int, help="print this call of the operators, and run it here")
    parser.add_argument("names", nargs="*", help="only these, such as aten.mm.default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.show is not None:
        valid = valid_calls()
        for name in arguments.names:
            random_ = random.Random(f"{name} {arguments.show}")
            given = hostile(random_, listed()[name], valid.get(name, []))
            options = {"double": random_.random() < 0.6, "derived": random_.random() < 0.5}
            print(name, given, options, flush=True)
            print(attempt(listed()[name], given, **options))
        return 0
    total: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    started, peak, count, large = time.monotonic(), 0, 0, 0
    for found in tried(arguments.count, arguments.names):
        total += found.outcomes
        peak, count = max(peak, found.peak), count + 1
        large += found.peak > MOST_BYTES
        for number, how in found.failures:
            ends[how.partition(" ")[0]] += 1
            print(f"{found.name} call {number}: {how}", flush=True)
        if found.peak > MOST_BYTES or arguments.names:
            print(f"{found.name}: {found.peak >> 20} MiB, {dict(found.outcomes)}", flush=True)
    print(f"{count} operators, {sum(total.values())} calls in {time.monotonic() - started:.0f} s: {dict(total)}")
    print(f"ends: {dict(ends)}; {large} operators above {MOST_BYTES >> 20} MiB; the most {peak >> 20} MiB")
    return 1 if ends or large else 0


if __name__ == "__main__":
    sys.exit(main())
