"""Runs a recorded call again alone, and compares what comes out with what came out then.

Invariant: a run is untrusted, so only operators of the op table are called, by names of ours, and their operands and
outputs take no more memory than a limit.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from opintercept._errors import OpInterceptError
from opintercept._ops.table import functions, overloads, row_of
from opintercept._tensors import TensorMeta, describe, tensors_of
from opintercept._text import printable
from opintercept.hooks._repro import write_repro
from opintercept.hooks.reference import Errors
from opintercept.runs import recorder as run_recorder
from opintercept.runs.codec import StoredCall
from opintercept.runs.store import MAX_TENSOR, Run


@dataclass(frozen=True, slots=True)
class Replayed:
    """One output of a call that was run again, against the recorded one.

    Attributes:
        role: `"output"`, `"output.1"`, ...
        recorded: How it looked then.
        now: How it looks now.
        equal: Whether they are the same bit for bit.
        max_absolute: Largest absolute error, NaN where the shapes differ; infinite where one is finite and the
            other is not. So are the others.
        max_relative: Largest relative error.
        max_ulp: Largest error in units in the last place of the recorded dtype.
        cosine: Cosine similarity.
    """

    role: str
    recorded: TensorMeta
    now: TensorMeta
    equal: bool
    max_absolute: float
    max_relative: float
    max_ulp: float
    cosine: float


@dataclass(frozen=True, slots=True)
class Replay:
    """What `replay` found.

    Attributes:
        call: The recorded call.
        func: What was called.
        outputs: Its outputs.
        elapsed: Host time in seconds; on a device, until it was done.
    """

    call: StoredCall
    func: str
    outputs: tuple[Replayed, ...]
    elapsed: float

    @property
    def equal(self) -> bool:
        """Whether all outputs are the same bit for bit."""
        return all(output.equal for output in self.outputs)

    def __str__(self) -> str:
        record = self.call.record
        lines = [
            f"call {record.index} of rank {self.call.rank}: {self.func} ({record.phase}), "
            f"run again in {self.elapsed * 1e3:.3f} ms"
        ]
        for output in self.outputs:
            if output.equal:
                lines.append(f"  {output.role} {output.now}: the same bit for bit")
                continue
            lines.append(f"  {output.role}: {output.now} now, compared with the {output.recorded} of the run")
            if output.recorded.shape != output.now.shape:
                lines.append("    they have different shapes")
                continue
            coarser = max((output.recorded.dtype, output.now.dtype), key=_eps)
            for name, figure, meaning in (
                ("max absolute error", f"{output.max_absolute:.3e}", "the largest difference of two elements"),
                (
                    "max relative error",
                    f"{output.max_relative:.3e}",
                    "the largest, as a share of the run's element",
                ),
                ("max error in ulp", f"{output.max_ulp:.4g}", f"in steps between numbers of {coarser}"),
                ("cosine", f"{output.cosine:.9g}", "of both as vectors; 1 where they point the same way"),
            ):
                lines.append(f"    {name:18}  {figure:>11}  {meaning}")
            lines.append(f"    {_expected(self.call, coarser)}")
        return "\n".join(lines)


def _eps(dtype: str) -> float:
    kind = getattr(torch, dtype)
    return float(torch.finfo(kind).eps) if kind.is_floating_point or kind.is_complex else 0.0


def _expected(call: StoredCall, dtype: str) -> str:
    """What rounding alone explains."""
    gemm, eps = call.record.gemm, _eps(dtype)
    if gemm is None or not gemm.k or not eps:
        return "0 and a cosine of 1 are equality"
    lhs, rhs, output = (call.values.get(role) for role in ("lhs", "rhs", "output"))
    if not (lhs and rhs and output and lhs.rms and rhs.rms and output.rms):
        return f"good: a cosine that is 1 to about {eps:.0e}, what rounding to {dtype} makes"
    # Operands are rounded before the sum, which lets their errors cancel, sums on the way in float32 at least, and
    # the output at the end.
    sums = 4 * (eps * math.sqrt(gemm.k) + min(eps, _eps("float32")) * gemm.k)
    bound = sums * lhs.rms * rhs.rms + eps * max(abs(output.min or 0.0), abs(output.max or 0.0))
    return (
        f"good: an absolute error up to about {bound:.1e}, what rounding to {dtype} makes of sums of {gemm.k} "
        "products; where those nearly cancel, the relative error and the ulp are large all the same"
    )


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"a flag must be True or False, got {text!r}")
    return text.lower() == "true"


def _attribute(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


_SETTERS: dict[str, tuple[Callable[[Any], Any], Callable[[str], Any]]] = {
    "float32_matmul_precision": (torch.set_float32_matmul_precision, str),
    "deterministic_algorithms": (torch.use_deterministic_algorithms, _bool),
    "threads": (torch.set_num_threads, int),
    "mkldnn": (torch.backends.mkldnn.set_flags, _bool),
    "cuda.matmul.allow_tf32": (_attribute(torch.backends.cuda.matmul, "allow_tf32"), _bool),
    "cuda.matmul.allow_fp16_reduced_precision_reduction": (
        _attribute(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        _bool,
    ),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": (
        _attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        _bool,
    ),
    "cudnn.allow_tf32": (_attribute(torch.backends.cudnn, "allow_tf32"), _bool),
}
# By the names that a run's flags have: how to read one, how to set it, how to read its value in a text.
FLAGS = {name: (run_recorder.FLAGS[name], *setter) for name, setter in _SETTERS.items()}


def replay(
    run: Run,
    index: int,
    *,
    rank: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    flags: Mapping[str, str] | None = None,
    limit: int = MAX_TENSOR,
) -> Replay:
    """Run a call of a run that was recorded with `tensors="full"` again, without its program.

    Args:
        run: The run.
        index: The call's `record.index`.
        rank: The process that made it, the first of the run by default.
        dtype: For floating-point operands; as they were by default.
        device: Where to run it, whatever it was on.
        flags: Settings for this time, by their names in a run's `flags`, as text: `{"mkldnn": "False"}`.
        limit: Bytes that a tensor may take, read or made.

    Raises:
        OpInterceptError: There is no such call, or it cannot be run again.
        ValueError: An unknown flag, or no value for it.
        ImportError: safetensors is not installed.

    Example:
        >>> import tempfile, torch
        >>> from opintercept import intercept, runs
        >>> from opintercept.runs.replay import replay
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with intercept(runs.RunRecorder(f"{folder}/run", tensors="full")):
        ...         _ = torch.ones(2, 3) @ torch.full((3, 4), 0.1)
        ...     found = replay(runs.open_run(f"{folder}/run"), 0, dtype=torch.bfloat16)
        >>> found.equal, found.outputs[0].max_absolute
        (False, 0.0007812380790710449)
    """
    chosen = _parsed(flags or {})
    call = _find(run, index, rank)
    func, name = _function(call)
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as missing:
        raise OpInterceptError(f"device must be one that is there, got {str(device)!r}: {missing}") from missing
    arguments = _arguments(run, call, limit, lambda tensor: _moved(tensor, dtype, device), device)
    args, kwargs = arguments
    _check_size(func, args, kwargs, name, limit)
    with _set(chosen), torch.no_grad():
        started = time.perf_counter()
        try:
            made = func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as failed:
            then = "; it raised then, too" if call.error else ""
            # torch quotes arguments, which are whatever the run's file says.
            said = "\n".join(map(printable, str(failed).split("\n")))
            raise OpInterceptError(
                f"a call must run again, got {type(failed).__name__} from {name}: {said}{then}"
            ) from failed
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - started
    outputs = list(made) if isinstance(made, (tuple, list)) else [made]
    found = []
    for role in call.tensors:
        if role.partition(".")[0] != "output":
            continue
        place = int(role.partition(".")[2] or 0)
        then_was = run.tensor(call, role, limit)
        if then_was is not None and place < len(outputs) and isinstance(outputs[place], torch.Tensor):
            found.append(_compared(role, then_was, outputs[place].cpu()))
    return Replay(call, name, tuple(found), elapsed)


def write_script(run: Run, index: int, path: str | os.PathLike[str], *, rank: int | None = None) -> str:
    """Write a script that runs the call again and needs torch and safetensors alone, with its tensors beside it.

    Args:
        run: Recorded with `tensors="full"`.
        index: The call's `record.index`.
        path: The script; its name gets `.py` if it has another ending.
        rank: As for `replay`.

    Returns:
        The script's path.

    Raises:
        OpInterceptError: As `replay`.
        OSError: They cannot be written.
    """
    call = _find(run, index, rank)
    _, name = _function(call)
    tensors: dict[str, torch.Tensor] = {}

    def renamed(plain: Any) -> Any:
        match plain:
            case {"tensor": str(stored), "shape": list(shape), "stride": list(stride)}:
                key = f"tensor{len(tensors)}"
                tensors[key] = run.load(call.rank, stored)
                _strided(tensors[key], shape, stride, MAX_TENSOR)
                return {"tensor": key, "shape": shape, "stride": stride}
            case {"list": list(items)}:
                return {"list": [renamed(item) for item in items]}
        return plain

    given = _given(run, call)
    arguments = {
        "args": [renamed(item) for item in given["args"]],
        "kwargs": {key: renamed(item) for key, item in given["kwargs"].items()},
    }
    target = os.fspath(path)
    target = target if target.endswith(".py") else f"{target}.py"
    phase = call.record.phase
    title = f"Runs {name} again, call {call.record.index} of a recorded run ({phase})."
    write_repro(target, title, name, arguments, tensors)
    return target


def _find(run: Run, index: int, rank: int | None) -> StoredCall:
    rank = run.ranks[0] if rank is None else rank
    if rank not in run.ranks:
        raise OpInterceptError(f"rank must be one of {', '.join(map(str, run.ranks))}, got {rank}")
    for call in run.calls(rank):
        if call.record.index == index:
            return call
    raise OpInterceptError(f"index must be that of a recorded call, got {index}; `opintercept show --calls` lists them")


def _function(call: StoredCall) -> tuple[Callable[..., Any], str]:
    """What to call, and an expression for it that is made of our own words."""
    func = call.record.func
    for overload in overloads(row_of(call.record.op).name) if "::" in call.record.op else []:
        if str(overload) == func and row_of(overload).family != "other":
            return overload, f"torch.ops.{overload}"
    for function, row in functions().items():
        if row.name == call.record.op == func:
            return function, row.name
    raise OpInterceptError(f"what is run again must be an operator of the op table, got {func!r}")


def _given(run: Run, call: StoredCall) -> Mapping[str, Any]:
    if call.given is not None:
        return call.given
    if run.infos[call.rank].tensors == "full":
        why = "one of them is no plain data, or a tensor of a dtype or layout that safetensors cannot hold"
    else:
        why = 'record with tensors="full" (`opintercept run --tensors full`)'
    raise OpInterceptError(
        f"a call can be run again if its arguments were kept, got call {call.record.index} without; {why}"
    )


def _arguments(
    run: Run, call: StoredCall, limit: int, moved: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    known: dict[Any, torch.Tensor] = {}

    def value(plain: Any) -> Any:
        match plain:
            case {"tensor": str(name), "shape": list(shape), "stride": list(stride)}:
                key = (name, tuple(map(str, shape)), tuple(map(str, stride)))  # one tensor twice stays one
                if key not in known:
                    known[key] = moved(_strided(run.load(call.rank, name, limit), shape, stride, limit))
                return known[key]
            case {"list": list(items)}:
                return [value(item) for item in items]
            case {"torch": str(name)}:
                found = getattr(torch, name, None)
                if isinstance(found, (torch.dtype, torch.layout)):
                    return found
            case {"device": str()}:
                return device
            case None | bool() | int() | float() | str():
                return plain
        raise OpInterceptError(f"a recorded argument must be a tensor, a number or a dtype, got {describe(plain)}")

    given = _given(run, call)
    return [value(item) for item in given["args"]], {name: value(item) for name, item in given["kwargs"].items()}


def _strided(stored: torch.Tensor, shape: list[Any], stride: list[Any], limit: int) -> torch.Tensor:
    """The tensor with the strides that it had."""
    sound = (
        len(shape) == len(stride) <= 64
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**40 for n in (*shape, *stride))
        and math.prod(shape) == stored.numel()
    )
    extent = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1 if sound else 0
    if not sound or extent * stored.element_size() > limit:
        raise OpInterceptError(f"a tensor must have a shape and strides that fit into {limit} bytes, got {shape!r:.80}")
    try:
        made = torch.empty_strided(shape, stride, dtype=stored.dtype)
        return made.copy_(stored.reshape(shape))
    except RuntimeError as wrong:  # elements that share memory
        raise OpInterceptError(f"a tensor must have sound strides, got {stride!r:.80}: {wrong}") from wrong


def _moved(tensor: torch.Tensor, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    if dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(dtype)
    return tensor.to(device)


def _check_size(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], name: str, limit: int) -> None:
    """Refuse a call whose output is out of proportion, from its shapes."""

    def shape_only(value: Any) -> Any:
        if isinstance(value, list):
            return [shape_only(item) for item in value]
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    try:
        made = func(*map(shape_only, args), **{key: shape_only(value) for key, value in kwargs.items()})
    except Exception:  # it has no shapes-only form, or is wrong: then it is up to the table, and to the call itself
        gemm = row_of(func).gemm(tuple(args), kwargs)
        sizes = [] if gemm is None else [gemm.batch * gemm.m * gemm.n * 8]
    else:
        sizes = [t.numel() * t.element_size() for t in tensors_of((made,), {})]
    if any(size > limit for size in sizes):
        raise OpInterceptError(f"an output must have at most {limit} bytes, got {max(sizes)} for {name}")


def _compared(role: str, recorded: torch.Tensor, now: torch.Tensor) -> Replayed:
    metas = [cast(TensorMeta, TensorMeta.of(tensor)) for tensor in (recorded, now)]
    equal = (
        recorded.dtype == now.dtype
        and recorded.shape == now.shape
        and torch.equal(recorded.contiguous().view(-1).view(torch.uint8), now.contiguous().view(-1).view(torch.uint8))
    )
    figures = [math.nan] * 4
    if recorded.shape == now.shape:
        wide = now if now.is_floating_point() or now.is_complex() else now.to(torch.float64)
        then = recorded if recorded.is_floating_point() or recorded.is_complex() else recorded.to(torch.float64)
        errors = Errors()
        errors.add(wide, then, max(wide.dtype, then.dtype, key=lambda dtype: torch.finfo(dtype).eps))
        figures = [errors.absolute, errors.relative, errors.ulp, errors.cosine]
    return Replayed(role, metas[0], metas[1], equal, *figures)


def _parsed(flags: Mapping[str, str]) -> dict[str, Any]:
    for name in flags:
        if name not in FLAGS:
            raise ValueError(f"a flag must be one of {', '.join(FLAGS)}, got {name!r}")
    return {name: FLAGS[name][2](text) for name, text in flags.items()}


@contextlib.contextmanager
def _set(flags: Mapping[str, Any]) -> Iterator[None]:
    """With the flags set, and as they were afterwards."""
    before = {name: FLAGS[name][0]() for name in flags}
    try:
        for name, value in flags.items():
            FLAGS[name][1](value)
        yield
    finally:
        for name, value in before.items():
            FLAGS[name][1](value)
