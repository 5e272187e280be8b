"""`Checksum`: finds products whose output is not what their operands make, and estimates the errors of the others."""

from __future__ import annotations

import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch

from opintercept._core.call import OpCall
from opintercept._core.checks import check_choice, check_count, renamed
from opintercept._core.errors import OpInterceptError, OpInterceptWarning
from opintercept._core.hook import Read
from opintercept._core.in_kernel import Checker, Work
from opintercept._core.pipeline import settle
from opintercept._core.record import PendingRecord
from opintercept._core.tensors import dtype_name, share_memory
from opintercept._core.text import aligned
from opintercept._engines.scope import unwatched
from opintercept._kit.findings import Finds
from opintercept._kit.per_call import PerCall
from opintercept._kit.repro import try_to_save
from opintercept._ops.table import row_of
from opintercept._values.attention import without_autocast
from opintercept._values.copies import safetensors_for
from opintercept._values.late import Late, Lots
from opintercept._values.read import first_output, in_memory, leaves_out_captured, without_graph
from opintercept.hooks.checksum import arithmetic as sums
from opintercept.hooks.checksum.findings import EstimatedError as EstimatedError
from opintercept.hooks.checksum.findings import WrongProduct as WrongProduct
from opintercept.hooks.checksum.launches import Begun, Checking, Kind, SuspectRow, Weights, kind_of
from opintercept.hooks.checksum.products import NoProduct, Product, positions_of, products_of, reason_of
from opintercept.hooks.checksum.repeats import Twins
from opintercept.hooks.checksum.suspects import SCREEN, Kept, look, may_write

Action = Literal["raise", "warn", "record"]

WAITING = 1024
"""After how many calls the results on a device are read, if no step has ended before."""


class _ByOperators(NamedTuple):
    """What torch's operators find of the most suspected row of a product, which the device may still be computing."""

    figures: Late  # how suspect the row is, and which it is, [1] each
    scores: torch.Tensor  # of all rows
    limit: float  # of what is not suspect
    terms: sums.Terms
    height: int  # the rows of each matrix of the batch

    def suspect(self) -> SuspectRow | None:
        """See `Checking`."""
        (worst,), (flat,) = self.figures.read()
        if worst <= self.limit:
            return None
        with unwatched():
            suspected = int((~(self.scores.cpu() <= self.limit)).sum())
            return SuspectRow(int(flat), self.height, suspected, self.terms.cpu())


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for kernels to call, outside of hooks: no block sees the operators that it runs."""

    def unseen(*args: Any) -> Any:
        with unwatched():
            return function(*args)

    return unseen


class _Waiting(NamedTuple):
    """The verdict on one product."""

    note: PendingRecord
    found: _ByOperators | Checking
    batched: bool
    turned: bool


class Checksum(Finds[WrongProduct]):
    """Checks each product, forward and backward, against a checksum of its operands, and names the call that is wrong.

    For C = A B and random signs e, C e must equal A (B e), up to rounding (Freivalds, 1977; Huang and Abraham, IEEE
    Trans. Comput. C-33(6), 1984). This reads each matrix once, against the many times that the product does. Checksum
    takes those of A and B before the operator runs and that of C after it; bias, alpha, beta and scales are included.
    It suspects a row whose checksum is more than `0.75 * sigma` standard deviations of a model of rounding off. Of the
    16 rows that are suspected most it then computes the exact values, in float64, and reports a finding only if

    `abs(c - exact) > ulp(exact) + u * (k / 2 + sigma * sqrt(k)) * (|A| |B| + |bias|)`

    or if the errors of a row or column together are larger than such errors can be. The second term holds for any order
    of summation: with a probability of at least 1 - 2 k exp(-sigma**2 / 2) if errors of rounding are independent
    (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019), and for equal numbers, whose errors are not. u is the unit
    roundoff of float32 for dtypes of up to 32 bits, and that of float64 otherwise. TF32, bfloat16 passes and sums in
    reduced precision add theirs where `torch.backends` allows them, and so do operators that round alpha, beta, the
    product or the scaled bias before they add them. TF32 on CUDA adds how far the row moves if operands are rounded to
    11 bits, all in one direction; sums in reduced precision, what rounding 32 parts of the row may do. If float16
    overflows in such a sum, the element is wrong, and `WrongProduct.flags` names the setting. Integers must be equal.
    So errors below rounding go unnoticed, and so do those in an operand before it is read. Elements whose exact value
    is not finite are not judged.

    Operators of the table that compute `alpha A B + beta bias` are checked: matrices, batches, vectors, `out=` and
    in-place forms, scaled and grouped products, sparse operands, complex numbers and integers, at function level also
    `linear`, `einsum` and `tensordot`. So are operators of `register_op` without other arguments that could multiply.
    `skipped` counts the others by reason.

    On the CPU each call is judged when it ends. On another device nothing waits: only the most suspected row of each
    product is computed, and it is judged when a step or the block ends, after 1024 products, or on CUDA with compiled
    kernels at a later call. Findings there do not say what has changed or whether the error repeats, and
    `action="raise"` raises late.

    Args:
        sigma: How many standard deviations rounding may take.
        every_calls: Check one call in this many, spread so that the calls of a repeated step take turns.
        action: `"raise"` raises an `OpInterceptError`. `"warn"` warns once for each module, operator and phase.
            `"record"` only adds to `findings`, as all actions do.
        exact: Whether to compute the checksums of float32 products in float64, which finds smaller errors. It takes
            longer.
        save: A folder. For each finding, Checksum writes the call's arguments as safetensors and a script that runs
            the call again. Not on devices other than the CPU, where the operands are gone by then.
        estimate: Whether to estimate the rounding error of each product too, in `errors`: the mean square of the
            residuals over rows is that of the errors. Checksums are then computed as with `exact`. float64 and
            integers have no estimate.

        recompute: Whether to compare the output of each product that a checkpoint repeats with that of its forward
            call, by 64-bit hashes. If their operands are equal and their outputs differ, one of the two is wrong, or
            the operator is not deterministic.

    Raises:
        ValueError: The action is unknown, `sigma` is not positive, or `every_calls` is below 1.
        ImportError: `save` without safetensors or numpy.

    A call of the program raises `OpInterceptError` if its output is wrong, with `action="raise"`.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> checksum = hooks.Checksum(action="record")
        >>> a = torch.ones(32, 16)
        >>> with intercept([hooks.BitFlip(bits=30), checksum]):  # the top bit of an exponent
        ...     _ = a @ a.mT
        >>> [(found.record.op, found.position, found.repeats) for found in checksum.findings]
        [('aten::mm', (24, 20), False)]
    """

    reads: Sequence[Read] = ("record",)
    fresh: ClassVar = {
        "_lock": threading.RLock,
        "_checker": lambda: None,
        "_kept": PerCall,
        "_memory": sums.Memory,
        "_weights": Weights,
        "_waiting": list,
        "_repeated": list,
        "_lots": Lots,
    }

    @renamed(every="every_calls")
    def __init__(
        self,
        *,
        sigma: float = 6.0,
        every_calls: int = 1,
        action: Action = "raise",
        exact: bool = False,
        save: str | PathLike[str] | None = None,
        estimate: bool = False,
        recompute: bool = False,
    ) -> None:
        if isinstance(sigma, bool) or not isinstance(sigma, (int, float)) or not 0 < sigma < math.inf:
            raise ValueError(f"sigma must be a positive number, got {sigma!r}")
        super().__init__()
        check_choice("action", action, get_args(Action))
        self._every_calls = check_count("every_calls", every_calls)
        if save is not None:
            safetensors_for("save=")
        self._sigma = float(sigma)
        self._checked = self._rows = 0
        self._checker: Checker | None = None
        self._action = action
        self._exact = exact or estimate
        self._estimate = estimate
        self._save = save
        self._skipped: Counter[str] = Counter()
        self._errors: dict[tuple[str | None, str, str, str], tuple[int, torch.Tensor]] = {}
        self._step = 0
        self._kept: PerCall[Kept] = PerCall()
        self._memory = sums.Memory()
        self._weights = Weights()
        self._waiting: list[_Waiting] = []
        self._repeated: list[tuple[PendingRecord, Late]] = []
        self._lots = Lots()
        self._twins = Twins() if recompute else None
        if estimate or recompute:
            self.reads = ("module", "record")

    @property
    def findings(self) -> list[WrongProduct]:
        """The findings in the order of the calls, at most 1000. Does not wait for a device; see `check`."""
        return self._all_findings()

    @property
    def checked(self) -> int:
        """How many products were checked."""
        return self._checked + self._counts()[0]

    @property
    def rows(self) -> int:
        """How many rows they had."""
        return self._rows + self._counts()[1]

    @property
    def skipped(self) -> dict[str, int]:
        """How many calls were not checked, by operator and reason."""
        found = self._skipped.copy()
        for func, count in self._counts()[2]:
            found[f"{row_of(func).name}: {reason_of(func)}"] += count
        return dict(found)

    def __getstate__(self) -> dict[str, Any]:
        counted = {"_checked": self.checked, "_rows": self.rows, "_skipped": Counter(self.skipped)}
        return super().__getstate__() | counted

    def _counts(self) -> tuple[int, int, list[tuple[Any, int]]]:
        checker = self._checker
        return (0, 0, []) if checker is None else checker.counts()

    def work(self) -> Work | None:
        """Kernels check the products, unless more than a verdict is asked for."""
        if self._estimate or self._twins is not None:
            return None
        return Work(rows=False, checker=self)

    def use(self, make: Callable[[], Checker]) -> Checker:
        """See `in_kernel.Checks`."""
        with self._lock:
            if self._checker is None:
                checker = make()
                functions = _unseen(sums.signs_for), _unseen(positions_of), _unseen(self._limits_of)
                checker.set_up(SCREEN * self._sigma, self._exact, self._every_calls, *functions)
                self._checker = checker
            return self._checker

    def _limits_of(
        self, lhs: torch.Tensor, rhs: torch.Tensor, bias: Any, output: torch.Tensor, alpha: float, beta: float
    ) -> tuple[float, float, int, Kind]:
        """What kernels need to know to check products on a device that look like this one."""
        product = Product(lhs, rhs, first_output, bias=bias, alpha=alpha, beta=beta)
        kind = kind_of(product, output.dtype, SCREEN * self._sigma)
        return kind.deviation, kind.limit, int(kind.fields), kind

    def pre(self, call: OpCall) -> None:
        """Take the checksums of the operands."""
        if self._every_calls > 1 and not _chosen(call.index, self._every_calls):
            return
        try:
            products = products_of(call)
            device = products[0].lhs.device if products else None
            if device is None or self._leaves_out(call, products, device):
                return
            with without_autocast(device):
                self._kept.put(call, without_graph(self._expect, call, products))
        except NoProduct as reason:
            self._skip(call, str(reason))
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, OverflowError) as error:
            # Operands that do not fit, which the operator will refuse, or a dtype that the device cannot multiply.
            self._skip(call, str(error).partition("\n")[0])

    def _leaves_out(self, call: OpCall, products: list[Product], device: torch.device) -> bool:
        if leaves_out_captured(products[0].lhs, self):
            return True
        tensors = [tensor for product in products for tensor in product.tensors]
        if not all(map(in_memory, tensors)):
            raise NoProduct("its operands have no values: their memory was freed, or they wrap other tensors")
        if any(tensor.device != device for tensor in tensors if tensor.dim()):
            raise NoProduct("its operands are on several devices")
        dtypes = {product.lhs.dtype for product in products} | {product.rhs.dtype for product in products}
        if torch.bool in dtypes:
            raise NoProduct("its operands are no numbers")
        if device.type != "cpu" and any(
            not d.is_floating_point and not d.is_complex and d.itemsize > 1 for d in dtypes
        ):
            raise NoProduct("the device has no product of integers")
        return False

    def _forget(self, rhs: torch.Tensor, signs: torch.Tensor) -> None:
        """Forget what is remembered of an operand."""
        self._memory.forget(rhs, signs)
        if self._checker is not None:
            self._checker.forget(rhs, signs.dtype is torch.float64)

    def _expect(self, call: OpCall, products: list[Product]) -> Kept:
        copies: dict[str, torch.Tensor] = {}
        if may_write(call.func) and (written := call.written):
            copies = {
                name: tensor.detach().clone()
                for name, tensor in call.tensors.items()
                if any(tensor is other or share_memory(tensor, other) for other in written)
            }
            products = products_of(call, copies)
        taken = None if self._checker is None else self._checker.taken()
        expected: list[sums.Expected | Begun] = []
        for product in products:
            if min(*product.lhs.shape, *product.rhs.shape) == 0:
                raise NoProduct("it is empty")
            if not self._exact and (begun := self._weights.begin(product)) is not None:
                expected.append(begun)
                continue
            expected.append(self._expected(product, taken))
        return Kept(expected, copies)

    def _expected(self, product: Product, taken: sums.Taken | None = None) -> sums.Expected:
        wide = sums.wide_dtype(product, self._exact)
        if wide is torch.float64 and product.lhs.dtype.itemsize == 1 and product.lhs.shape[-1] >= 1 << 17:
            raise NoProduct("its sums may not fit into 32 bits")
        groups = sums.groups_of(product, self._estimate)
        return sums.expect(product, wide, groups, self._memory, taken)

    def error(self, call: OpCall, exception: BaseException) -> None:
        """Forget a call that raised."""
        self._kept.take(call)

    def post(self, call: OpCall) -> None:
        """Compare them with that of the output."""
        kept = self._kept.take(call)
        if kept is None:
            return
        waiting = len(self._waiting) + len(self._repeated)
        if waiting and (call.step != self._step or waiting >= WAITING):
            self._check_waiting()
        self._step = call.step
        found: list[WrongProduct] = []
        with without_autocast(kept.expected[0].product.lhs.device):
            try:
                found = without_graph(self._compare, call, kept)
            except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, OverflowError) as error:
                self._skip(call, str(error).partition("\n")[0])
        for finding in found[:1]:
            self._tell(self._saved(finding, call, kept))
        if self._twins is not None and not kept.copies and not found:
            self._compare_twins(call, self._twins)

    def _compare_twins(self, call: OpCall, twins: Twins) -> None:
        """Compare a call that a checkpoint repeats with its forward call."""
        try:
            verdict = without_graph(twins.compare, call)
        except RuntimeError as error:  # the device has no memory left
            self._skip(call, str(error).partition("\n")[0])
            return
        if verdict is None:
            return
        if verdict.device.type == "cpu":
            twin = int(verdict)
            if twin >= 0:
                self._tell(_of_twin(call.note(), twin))
        else:
            with self._lock:
                self._repeated.append((call.note(), self._lots.put([verdict])))

    def _compare(self, call: OpCall, kept: Kept) -> list[WrongProduct]:
        found = []
        for place, expected in enumerate(kept.expected):
            product = expected.product
            output = product.out(call.output)
            output = output.detach() if output.requires_grad else output
            if not in_memory(output):
                raise NoProduct("its output has no values")
            if output.shape != (*product.lhs.shape[:-1], product.rhs.shape[-1]):
                raise NoProduct("its output has another shape than the product")
            if isinstance(expected, Begun):
                launched = expected.finish(output, SCREEN * self._sigma)
                if launched is not None:
                    self._count(output)
                    self._wait_for(call, product, launched)
                    continue
                expected = self._expected(product)
            units = sums.units_of(product, output.dtype)
            seen = sums.screen(expected, output, units)
            self._count(output)
            if self._estimate:
                self._add_error(call, output, seen.residual)
            if output.device.type != "cpu":
                self._put_off(call, expected, output, units, seen)
            elif not float(seen.worst()) <= SCREEN * self._sigma:
                finding = look(call, kept, expected, place, output, units, seen, self._sigma, self._forget)
                if finding is not None:
                    found.append(finding)
        return found

    def _put_off(
        self, call: OpCall, expected: sums.Expected, output: torch.Tensor, units: sums.Units, seen: sums.Screen
    ) -> None:
        """Compute the most suspected row, and leave it on the device."""
        product = expected.product
        height, batched = product.lhs.shape[-2], product.lhs.dim() > 2
        limit = SCREEN * self._sigma * seen.deviation
        scores = seen.rows_at(limit)
        worst, flat = scores.max(0, keepdim=True)
        terms = sums.terms_of(product, output, units, flat // height if batched else None, flat)
        self._wait_for(call, product, _ByOperators(self._lots.put([worst, flat]), scores, limit, terms, height))

    def _count(self, output: torch.Tensor) -> None:
        self._checked += 1
        self._rows += output.numel() // output.shape[-1]

    def _wait_for(self, call: OpCall, product: Product, found: _ByOperators | Checking) -> None:
        with self._lock:
            self._waiting.append(_Waiting(call.note(), found, product.lhs.dim() > 2, product.turned))

    def check(self) -> None:
        """Read the verdicts that are still on a device; waits for it.

        Raises:
            OpInterceptError: A product is wrong, with `action="raise"`.
        """
        settle(self)
        self._check_waiting()

    def _check_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            repeated, self._repeated = self._repeated, []
        with unwatched():
            self._lots.send()
        for note, twin in repeated:
            if (found := int(twin.read()[0][0])) >= 0:
                self._tell(_of_twin(note, found))
        for each in waiting:
            self._judge(each)

    def arrived(self, calls: Iterable[tuple[PendingRecord, tuple[Any, Kind], Any]]) -> None:
        """Judge products on devices of which a row is suspect, see `in_kernel.Checks`."""
        for note, (check, kind), _ in calls:
            self._judge(_Waiting(note, Checking(check, kind), kind.batched, False))

    def _judge(self, waiting: _Waiting) -> None:
        """Tell of a row if it is wrong."""
        suspect = waiting.found.suspect()
        if suspect is None:
            return
        with unwatched():
            finding = self._verdict(waiting, *suspect)
        if finding is not None:
            self._tell(finding)

    def _verdict(
        self, waiting: _Waiting, flat: int, height: int, suspected: int, terms: sums.Terms
    ) -> WrongProduct | None:
        """The verdict on a row, on the host."""
        examined = sums.judge(terms, self._sigma)
        verdict, column = examined.verdict(self._sigma).tolist()
        if verdict <= 1:
            return None
        batch, row = divmod(flat, height)
        place = (int(column), row) if waiting.turned else (row, int(column))
        got, exact, error, bound = (each.reshape(-1)[int(column)].item() for each in examined[:4])
        position = (batch, *place) if waiting.batched else place
        flags = examined.flags_at(0, int(column))
        record = waiting.note.record()
        return WrongProduct(record, position, (flat,), suspected, got, exact, error, bound, flags=flags)

    def exit(self) -> None:
        """Read the verdicts that are left."""
        if self._twins is not None:
            self._twins.clear()
        self.check()

    def _saved(self, finding: WrongProduct, call: OpCall, kept: Kept) -> WrongProduct:
        if self._save is None:
            return finding
        saved, unsaved = try_to_save(call, self._save, kept.copies)
        return replace(finding, saved=saved, unsaved=unsaved)

    def _tell(self, finding: WrongProduct) -> None:
        new = self._keep(finding)
        if self._action == "raise":
            raise OpInterceptError(str(finding))
        if self._action == "warn" and new:
            warnings.warn(str(finding), OpInterceptWarning, stacklevel=2)

    def _skip(self, call: OpCall, reason: str) -> None:
        with self._lock:
            self._skipped[f"{call.op}: {reason}"] += 1

    def _add_error(self, call: OpCall, output: torch.Tensor, residual: torch.Tensor) -> None:
        if output.dtype in (torch.float64, torch.complex128) or sums.unit(output.dtype) == 0:
            return
        noise = residual.abs().nan_to_num(0.0, 0.0, 0.0).square().sum()
        values = output if output.dtype.itemsize > 1 else output.float()
        wide = torch.promote_types(values.dtype.to_real(), torch.float32)
        signal = torch.linalg.vector_norm(values, dtype=wide.to_complex() if values.is_complex() else wide)
        both = torch.stack([noise, signal.to(noise.dtype).nan_to_num(0.0, 0.0, 0.0).square()])
        key = call.module, call.op, call.phase, dtype_name(output.dtype)
        with self._lock:
            calls, total = self._errors.get(key, (0, torch.zeros_like(both)))
            self._errors[key] = calls + 1, total + both

    def errors(self) -> list[EstimatedError]:
        """The estimated errors, in the order of the first calls; waits for the device."""
        with self._lock:
            totals = list(self._errors.items())
        rows = []
        for key, (calls, total) in totals:
            noise, signal = total.tolist()
            rows.append(EstimatedError(*key, calls, math.sqrt(noise / signal) if signal else 0.0))
        return rows

    def clear(self) -> None:
        """Forget the findings, the errors and the counts."""
        with self._lock:
            self._forget_findings()
            self._skipped.clear()
            self._errors.clear()
            self._waiting.clear()
            self._repeated.clear()
            self._checked = self._rows = 0
            if self._checker is not None:
                self._checker.clear()

    def __str__(self) -> str:
        lines = [f"{self.checked} products checked, {self._found()} wrong"]
        lines += map(str, self.findings)
        rows = self.errors()
        if rows:
            table = [["module", "op", "phase", "dtype", "calls", "relative error"]]
            table += [
                [
                    "?" if row.module is None else row.module or "-",
                    row.op.removeprefix("aten::"),
                    row.phase,
                    row.dtype,
                    str(row.calls),
                    f"{row.relative:.2e}",
                ]
                for row in sorted(rows, key=lambda row: -row.relative)
            ]
            lines.append(aligned(table, left=4))
        lines += [f"skipped {count} {reason}" for reason, count in self.skipped.items()]
        return "\n".join(lines)


def _of_twin(note: PendingRecord, twin: int) -> WrongProduct:
    return WrongProduct(note.record(), (), (), 0, 0.0, 0.0, 0.0, 0.0, twin=twin)


def _chosen(index: int, every: int) -> bool:
    """Whether a call is one in `every`: multiples of the golden ratio, mod 1, fall evenly into every interval."""
    return (index * 0x9E3779B97F4A7C15) % 2**64 * every < 2**64
