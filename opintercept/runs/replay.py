"""`replay`: runs a recorded call again on its own, and compares its outputs with the recorded ones.

Invariant: anyone may have written the run. `again` runs the call, whose operands and outputs stay below a limit of
memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch

from opintercept._core.errors import OpInterceptError
from opintercept._core.tables import Page, Part
from opintercept._core.tensors import TensorMeta, describe
from opintercept._core.text import printable
from opintercept._kit.repro import write_repro
from opintercept._values import roundoff
from opintercept._values.errors import between
from opintercept.runs.program import again, kernels
from opintercept.runs.record.description import FLAGS
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.run import MAX_TENSOR, Run


@dataclass(frozen=True, slots=True)
class Replayed:
    """One output of a call that was run again, compared with the recorded one.

    Attributes:
        role: `"output"`, `"output.1"`, ...
        recorded: Shape and dtype of the recorded output.
        now: Shape and dtype of the new one.
        equal: Whether they are the same bit for bit.
        max_absolute: The largest absolute error. NaN if the shapes differ, as are the next three. Infinite if an
            element is finite in only one of them.
        max_relative: The largest relative error.
        max_ulp: The largest error in units in the last place of the coarser dtype.
        cosine: The cosine similarity.
        excess: The error of a kernel that torch.compile has generated, in units of what rounding explains: above 1 it
            is wrong. None for other calls.
        deviation: How far off a wrong kernel is, in words, such as `"NaN where its operators give 0.37"`.
    """

    role: str
    recorded: TensorMeta
    now: TensorMeta
    equal: bool
    max_absolute: float
    max_relative: float
    max_ulp: float
    cosine: float
    excess: float | None = None
    deviation: str | None = None


@dataclass(frozen=True, slots=True)
class Replay(Page):
    """What `replay` found.

    Attributes:
        call: The recorded call.
        func: The operator that was called, or the generated kernel.
        outputs: Its outputs, compared with the recorded ones.
        elapsed: Host time in seconds, until the device was done.
        left_out: Why other outputs of a generated kernel cannot be compared, by role.
    """

    call: StoredCall
    func: str
    outputs: tuple[Replayed, ...]
    elapsed: float
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether all outputs are the same bit for bit; those of a generated kernel, up to rounding."""
        return all(output.equal if output.excess is None else output.excess <= 1 for output in self.outputs)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data; NaN and infinities as text, since it matters which one a figure is."""
        call = {"index": self.call.record.index, "rank": self.call.rank, "func": self.func, "equal": self.equal}
        outputs = [{name: _finite(value) for name, value in asdict(output).items()} for output in self.outputs]
        return call | {"elapsed": self.elapsed, "outputs": outputs, "left_out": dict(self.left_out)}

    def parts(self) -> Iterator[Part]:
        """What `print` shows."""
        record = self.call.record
        made = f"call {record.index} of rank {self.call.rank}: {self.func} ({record.phase})"
        if record.ops is None:
            yield f"{made}, run again in {self.elapsed * 1e3:.3f} ms"
        else:
            line = f" at {printable(record.source)}" if record.source else ""
            yield f"{made}{line}, held against {', '.join(record.ops)}, run in float64"
        for output in self.outputs:
            if output.equal:
                yield f"  {output.role} {output.now}: the same bit for bit"
                continue
            if output.excess is not None:
                held = f"  {output.role} {output.recorded}:"
                if output.deviation is None:
                    yield f"{held} the largest error is {output.excess:.3g} times what rounding explains"
                    continue
                yield f"{held} {output.deviation}, so the kernel is wrong"
            else:
                yield f"  {output.role}: {output.now} now, compared with the {output.recorded} of the run"
            if output.recorded.shape != output.now.shape:
                yield "    they have different shapes"
                continue
            coarser = max((output.recorded.dtype, output.now.dtype), key=roundoff.eps)
            figures = {
                "max absolute error": (f"{output.max_absolute:.3e}", "the largest difference of two elements"),
                "max relative error": (f"{output.max_relative:.3e}", "the largest, divided by the run's element"),
                "max error in ulp": (f"{output.max_ulp:.4g}", f"in steps between numbers of {coarser}"),
                "cosine": (f"{output.cosine:.9g}", "of both as vectors; 1 if they point the same way"),
            }
            for name, (figure, meaning) in figures.items():
                yield f"    {name:18}  {figure:>11}  {meaning}"
            if output.excess is None:
                yield f"    {_expected(self.call, coarser)}"
        for role, reason in self.left_out.items():
            yield f"  {role}: left out, since {printable(reason)}"


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _expected(call: StoredCall, dtype: str) -> str:
    """How large an error rounding alone explains, in words."""
    terms, eps = call.record.terms, roundoff.eps(dtype)
    if not terms or not eps:
        return "0 and a cosine of 1 mean equality"
    lhs, rhs, output = (call.values.get(role) for role in ("lhs", "rhs", "output"))
    if not (lhs and rhs and output and lhs.rms and rhs.rms and output.rms):
        return f"rounding to {dtype} explains a cosine that differs from 1 by up to about {eps:.0e}"
    bound = roundoff.of_terms(eps, terms, lhs.rms * rhs.rms, max(abs(output.min or 0.0), abs(output.max or 0.0)))
    return (
        f"rounding to {dtype} explains an absolute error up to about {bound:.1e}, in sums of {terms} products; "
        "if these nearly cancel, the relative error and the ulp are large even so"
    )


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
    """Run a recorded call again without its program. The run must have been recorded with `tensors="full"`.

    A kernel that torch.compile has generated is not run: its outputs are held against the operators that it stands for,
    run in float64 on the recorded operands. That takes a run whose block was open when the kernel was compiled.

    Args:
        run: The run.
        index: The call's `record.index`.
        rank: The rank of the process that made it; by default the first of the run.
        dtype: The dtype of floating-point operands; by default that of the record.
        device: Where to run it, whatever device the program used.
        flags: Settings for this call, by their names in a run's `flags`, as text: `{"mkldnn": "False"}`.
        limit: The most bytes that an operand or an output may have.

    Raises:
        OpInterceptError: There is no such call, or it cannot be run again.
        ValueError: A flag is unknown, or has no such value.
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
    if kernels.is_kernel(call):
        if dtype not in (None, torch.float64) or torch.device(device).type != "cpu" or chosen:
            raise ValueError("the operators of a generated kernel run in float64 on the CPU; leave out other settings")
        return _held(run, call, limit)
    name = again.operator_of(call.record.op, call.record.func).name
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as missing:
        raise OpInterceptError(f"device {str(device)!r} is not available: {missing}") from missing
    with _set(chosen), torch.no_grad():
        try:
            operator, args, kwargs = _prepared(run, call, dtype, device, limit)
            started = time.perf_counter()
            made = again.run(operator, args, kwargs)
        except OpInterceptError:
            raise
        except again.FAILURES as failed:
            then = "; the recorded call raised, too" if call.error else ""
            # torch quotes arguments, which come from the run's file.
            text = "\n".join(map(printable, str(failed).split("\n")))
            raise OpInterceptError(f"{name} raised {type(failed).__name__}: {text}{then}") from failed
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


def _held(run: Run, call: StoredCall, limit: int) -> Replay:
    """Hold a generated kernel against its operators."""
    run.check_trusted()
    started = time.perf_counter()
    with torch.no_grad():
        judged, left_out = kernels.held(run, call, limit)
    elapsed = time.perf_counter() - started
    if not judged:
        reason = next(iter(left_out.values()), "it has no output")
        raise OpInterceptError(f"call {call.record.index} cannot be held against operators: {printable(reason)}")
    found = [
        replace(
            _compared(role, each.output.detach(), each.exact),
            excess=each.excess,
            deviation=each.deviation if each.excess > 1 else None,
            equal=False,
        )
        for role, each in judged
    ]
    return Replay(call, call.record.op, tuple(found), elapsed, left_out)


def write_script(run: Run, index: int, path: str | os.PathLike[str], *, rank: int | None = None) -> str:
    """Write a script that runs a call again, with its tensors beside it. It needs only torch and safetensors.

    Args:
        run: A run that was recorded with `tensors="full"`.
        index: The call's `record.index`.
        path: The path of the script; `.py` is appended if it ends otherwise.
        rank: As for `replay`.

    Returns:
        The path of the script.

    Raises:
        OpInterceptError: There is no such call, or it cannot be run again.
        OSError: The files cannot be written.
    """
    call = _find(run, index, rank)
    name = again.operator_of(call.record.op, call.record.func).name
    tensors: dict[str, torch.Tensor] = {}

    def renamed(plain: Any) -> Any:
        match plain:
            case {"tensor": str(stored), "shape": list(shape), "stride": list(stride)}:
                key = f"tensor{len(tensors)}"
                tensors[key] = run.load(call.rank, stored)
                again.strided(tensors[key], shape, stride, MAX_TENSOR)
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
    raise OpInterceptError(f"the run has no call of index {index}; `opintercept show --calls` lists its calls")


def _prepared(
    run: Run, call: StoredCall, dtype: torch.dtype | None, device: torch.device, limit: int
) -> tuple[again.Operator, list[Any], dict[str, Any]]:
    """The operator of a call and its arguments, which have passed all checks."""
    run.check_trusted()
    operator = again.operator_of(call.record.op, call.record.func)
    known: dict[Any, torch.Tensor] = {}

    def tensor(plain: Mapping[str, Any], _: str) -> torch.Tensor:
        match plain:
            case {"tensor": str(name), "shape": list(shape), "stride": list(stride)}:
                key = (name, tuple(map(str, shape)), tuple(map(str, stride)))  # a tensor that is passed twice stays one
                if key not in known:
                    made = again.strided(run.load(call.rank, name, limit), shape, stride, limit)
                    converts = dtype is not None and (made.is_floating_point() or made.is_complex())
                    known[key] = made.to(device, dtype if converts else made.dtype)
                return known[key]
        raise again.NotRunError(f"a recorded argument must be a tensor, a number or a dtype, got {describe(plain)}")

    given = _given(run, call)
    args = [again.argument(item, "", tensor, device) for item in given["args"]]
    kwargs = {name: again.argument(item, name, tensor, device) for name, item in given["kwargs"].items()}
    made = [run.kept(call.rank, name)[0] for role, name in call.tensors.items() if is_output(role)]
    again.check_size(operator, args, kwargs, again.room(known.values(), made), limit)
    return operator, args, kwargs


def _given(run: Run, call: StoredCall) -> Mapping[str, Any]:
    if call.given is not None:
        return call.given
    if run.infos[call.rank].tensors == "full":
        why = "one of them is not plain data, or is a tensor of a dtype or layout that safetensors cannot hold"
    else:
        why = 'record with tensors="full" (`opintercept run --tensors full`)'
    raise OpInterceptError(f"call {call.record.index} cannot be run again, as its arguments were not recorded; {why}")


def _compared(role: str, recorded: torch.Tensor, now: torch.Tensor) -> Replayed:
    metas = [cast(TensorMeta, TensorMeta.of(tensor)) for tensor in (recorded, now)]
    equal = (
        recorded.dtype == now.dtype
        and recorded.shape == now.shape
        and torch.equal(recorded.contiguous().view(-1).view(torch.uint8), now.contiguous().view(-1).view(torch.uint8))
    )
    figures = (math.nan, math.nan, math.nan, math.nan)
    if recorded.shape == now.shape:
        errors = between(now, recorded)
        figures = errors.absolute, errors.relative, errors.ulp, errors.cosine
    return Replayed(role, metas[0], metas[1], equal, *figures)


_SET = {name: set_ for name, (_, set_) in FLAGS.items() if set_ is not None}


def _parsed(flags: Mapping[str, str]) -> dict[str, Any]:
    """The values of flags, which are of the types that they have now."""
    found = {}
    for name, text in flags.items():
        if name not in _SET:
            raise ValueError(f"a flag must be one of {', '.join(_SET)}, got {name!r}")
        if (kind := type(FLAGS[name][0]())) is bool and text.lower() not in ("true", "false"):
            raise ValueError(f"a flag must be True or False, got {text!r}")
        found[name] = text.lower() == "true" if kind is bool else kind(text)
    return found


@contextlib.contextmanager
def _set(flags: Mapping[str, Any]) -> Iterator[None]:
    """Set the flags, and afterwards set them back."""
    before = {name: FLAGS[name][0]() for name in flags}
    try:
        for name, value in flags.items():
            _SET[name](value)
        yield
    finally:
        for name, value in before.items():
            _SET[name](value)
