"""Every operator: blocks with `ops="all"`, and beside them the tools of torch that look at every operator, too."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks._timing import Clock, Make, Row, compare, rows
from benchmarks.models import decoding, encoding, inference, llama
from benchmarks.operators import blocks, compiled, no_op
from opintercept import hooks, intercept, runs

_FEW: dict[str, Callable[[], Any]] = {"no-op hook": lambda: no_op, "Recorder": hooks.Recorder}
_FEW |= {"NonFinite": hooks.NonFinite}
_HOOKS: dict[str, Callable[[], Any]] = {"empty block": tuple, "Stats": hooks.Stats, "Profile": hooks.Profile} | _FEW
_KEPT = ("none", "stats")


class NaNMode(TorchDispatchMode):
    """The usual way to look for NaN."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and bool(leaf.isnan().any()):
                raise ValueError(f"NaN from {func}")
        return output


@contextlib.contextmanager
def _recorded(kept: Any, engine: Any) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        with intercept(runs.RunRecorder(f"{folder}/run", kept), ops="all", engine=engine):
            yield


def _ours(engine: str, chosen: dict[str, Callable[[], Any]]) -> dict[str, Make]:
    recorded: dict[str, Make] = {f'RunRecorder("{kept}")': partial(_recorded, kept, engine) for kept in _KEPT}
    return blocks(chosen, ops="all", engine=engine) | recorded


@contextlib.contextmanager
def _hashed() -> Iterator[None]:
    from torch.utils._debug_mode import DebugMode

    with DebugMode(), DebugMode.log_tensor_hashes(hash_inputs=True):
        yield


def _others() -> dict[str, Make]:
    found: dict[str, Make] = {
        "a mode that looks for NaN": NaNMode,
        "torch.profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    }
    try:
        from torch.utils._debug_mode import DebugMode
    except ImportError:  # private, and not in every torch
        return found
    return found | {"DebugMode": DebugMode, "DebugMode with hashes": _hashed}


def run(smoke: bool) -> list[Row]:
    """Time three models forward, a training step, two compiled models, and entering and leaving a block."""
    in_c = compiled(_ours("compiled", _HOOKS))
    few = {f"kernels in Python, {name}": make for name, make in _ours("kernel", _FEW).items()}
    few |= {f"mode engine, {name}": make for name, make in _ours("mode", _FEW).items()}
    plain: dict[str, Make] = {"plain": contextlib.nullcontext}
    torch.manual_seed(0)
    model = llama()
    tokens = torch.randint(0, 100, (1, 16))

    def train() -> Any:
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss

    size: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 2} if smoke else {}
    gpt2: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)).eval()  # type: ignore[no-untyped-call]
    programs: dict[str, tuple[Callable[[], Any] | None, dict[str, float]]] = {
        "Llama, 4 layers of width 64, forward": (
            inference(lambda: model(tokens).logits),
            {"Recorder": 1.5, "NonFinite": 1.5, 'RunRecorder("stats")': 2.2, 'RunRecorder("none")': 1.6},
        ),
        "Llama, training step": (train, {}),
        "MiniLM, 8 sentences": (
            encoding(),
            {"Recorder": 1.05, "NonFinite": 1.1, 'RunRecorder("stats")': 1.5, 'RunRecorder("none")': 1.06},
        ),
        f"{'GPT-2, 2 layers' if smoke else 'GPT-2 small'}, one token": (
            decoding(gpt2, torch.randint(0, 50000, (1, 64))),
            {"Recorder": 1.1, "NonFinite": 1.15},
        ),
    }
    anomalies: dict[str, Make] = {"detect_anomaly": partial(torch.autograd.set_detect_anomaly, True)}
    found: list[Row] = []
    for program, (body, most) in programs.items():
        if body is not None:
            found += compare(
                "every",
                program,
                body,
                plain | in_c | few | _others() | (anomalies if body is train else {}),
                rounds=1 if smoke else 7,
                number=3 if "forward" in program and not smoke else 1,
                bounds={f"compiled kernels, {name}": ("plain", bound) for name, bound in most.items() if in_c},
                check=False,  # modes change the last bits
            )
    return found + _graphs(smoke, in_c) + _entering(smoke)


def _graphs(smoke: bool, in_c: dict[str, Make]) -> list[Row]:
    """Time graphs of torch.compile, whose generated kernels are calls.

    A compiled function that finds its modules by itself may find others next time: they are looked up for each call.
    """
    torch.manual_seed(0)
    model = llama(width=256)
    tokens = torch.randint(0, 100, (2, 64))
    most = {"Recorder": 1.1, "NonFinite": 1.15, 'RunRecorder("stats")': 1.5}
    makes = {name: make for name, make in in_c.items() if name.partition(", ")[2] in most}
    bounds = {f"compiled kernels, {name}": ("plain", bound) for name, bound in most.items()}
    compiled_model: Any = torch.compile(model)
    programs = {
        "Llama, 4 layers of width 256, compiled": (lambda: compiled_model(tokens, use_cache=False).logits, bounds)
    }
    if not smoke:
        function = torch.compile(lambda: model(tokens, use_cache=False).logits)
        programs["The same in a compiled function"] = function, {}
        if (body := encoding(torch.compile)) is not None:
            programs["MiniLM, 8 sentences, compiled"] = body, bounds
    found: list[Row] = []
    for program, (body, limits) in programs.items() if makes else ():
        every = {"plain": contextlib.nullcontext} | makes
        found += compare("every", program, inference(body), every, rounds=1 if smoke else 15, bounds=limits)
    return found


def _entering(smoke: bool) -> list[Row]:
    """Time both beside a millisecond, so that a ratio is a number of milliseconds."""
    engines: dict[str, Any] = {"compiled kernels": "compiled"} if compiled({"": intercept}) else {}
    engines |= {"kernels in Python": "kernel", "mode engine": "mode"}
    turns = 2 if smoke else 15
    times: dict[str, list[float]] = {"a millisecond": [1e-3]}
    for turn in range(turns + 1):
        for name, engine in engines.items():
            for ops in ("matmul", "all"):
                block: Any = intercept(no_op, ops=ops, engine=engine)
                started = Clock.now()
                block.__enter__()
                inside = Clock.now()
                block.__exit__(None, None, None)
                left = Clock.now()
                if turn:
                    times.setdefault(f'{name}, ops="{ops}": in', []).append(inside - started)
                    times.setdefault(f'{name}, ops="{ops}": out', []).append(left - inside)
    bounds = {
        f'compiled kernels, ops="all": {way}': ("a millisecond", most) for way, most in (("in", 15.0), ("out", 10.0))
    }
    found = {name: bound for name, bound in bounds.items() if name in times}
    return rows("every", "entering and leaving a block, milliseconds", times, found)
