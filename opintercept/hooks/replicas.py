"""`Replicas`: names the first call whose operands should be equal on several ranks and are not.

Invariant: ranks exchange numbers only where `Interceptor.step()` is called and where the block ends, and each exchange
follows from what all ranks have received before. So no rank waits for an exchange that another one leaves out.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch

from opintercept._core.call import OpCall
from opintercept._core.checks import check_choice, check_count, renamed
from opintercept._core.errors import OpInterceptError, OpInterceptWarning, caller_level
from opintercept._core.hook import Read
from opintercept._core.text import counted
from opintercept._kit.filter import CallFilter, name_test
from opintercept._kit.findings import CallFinding, Finds
from opintercept._kit.roles import checked_roles
from opintercept._origin.names import NamedTensor, named_tensors
from opintercept._ranks.expectations import (
    MOST_KEYS,
    WEIGHT,
    DivergedOperand,
    Expectations,
    Group,
    RankOperand,
    key_of,
    who_diverged,
)
from opintercept._ranks.group import Ranks, ranks_of
from opintercept._ranks.operand_hashes import Hash, OperandHashes, is_weight
from opintercept._values.read import leaves_out_captured, without_graph

Action = Literal["raise", "warn", "record"]
Modules = str | re.Pattern[str] | Callable[[str], bool]


_ROLES = ("lhs", "rhs", "bias", "value")
_NOT_ENTERED = "no block was entered"


class _Operand(NamedTuple):
    """Where an operand is, step after step."""

    key: int
    module: str | None
    op: str
    phase: str
    role: str
    weight: bool


class _HashedOperand(NamedTuple):
    """An operand that was hashed in this step."""

    operand: _Operand
    hashed: Hash
    call: int | None
    step: int
    source: str | None


@dataclass(frozen=True, slots=True)
class Divergence(CallFinding):
    """The first call of a step in which ranks diverge that were equal before, or a parameter that no call has read.

    Attributes:
        ranks: The global ranks with each value. Those with the most ranks come first.
        step: The interceptor's step.
        index: The number of the call on this rank; None if this rank did not make the call.
        module: The module's qualified name, as `OpCall.module`.
        op: The operator; `"parameter"` or `"buffer"` for one that has diverged at the end of the step.
        phase: `"forward"`, `"backward"` or `"recompute"`; `""` at the end of the step.
        operand: `"lhs"`, `"rhs"`, `"bias"` or `"value"`; of a parameter or a buffer, its name in the module.
        weight: Whether the operand is a parameter.
        source: The program's line; None if this rank did not make the call.
        more: How many other operands have diverged in the same step.
    """

    ranks: tuple[tuple[int, ...], ...]
    step: int
    index: int | None
    module: str | None
    op: str
    phase: str
    operand: str
    weight: bool
    source: str | None
    more: int

    def __str__(self) -> str:
        call = "a call that this rank did not make" if self.index is None else f"call {self.index}"
        module = "an unknown module" if self.module is None else f"module {self.module or '-'}"
        if self.phase:
            weight = " (weight)" if self.weight else ""
            what = f"at step {self.step}, {call}, {module}, {self.operand}{weight} of {self.op} in {self.phase}"
        else:
            what = f"at the end of step {self.step}, {module}, {self.op} {self.operand}"
        text = f"{who_diverged(self.ranks)} {what}"
        text += f", at {self.source}" if self.source else ""
        return f"{text}; {counted(self.more, 'other operand')} diverged in this step" if self.more else text


class Replicas(Finds[Divergence]):
    """Compares operands that should be equal on several ranks of `torch.distributed`, and names the first divergence.

    Each rank hashes the operands of its calls where they are, and no call waits for a device. When `step()` of the
    interceptor is called and when the block ends, one `all_reduce` of two integers says whether all ranks agree. Only
    if they do not, and in the first steps, they exchange the hashes, 24 bytes for each operand.

    Without `modules`, Replicas finds out what should be equal. A weight should stay equal on the ranks that have it in
    common in the first step in which it appears. Any other operand, such as an activation, should be equal on the ranks
    that had it in common in two of its first four steps, with different values. Operands whose elements are all equal
    do not count, since ranks have zeros in common by chance. What is not equal by then is not hashed again: under data
    parallelism only weights are.

    A weight is hashed once a step, and again if torch has written to it. A weight that needs no gradient is hashed in
    one of 16 steps unless torch has written to it. Where a step ends, so are parameters that no call has read, such as
    those of norms and embeddings, of models of which calls have read others. Buffers count as other operands, since
    under DDP the statistics of a batch norm differ, and only without `modules` and `of`.

    The ranks of a group must enter the block together and call `step()` equally often. They may make different calls;
    an operand is then compared on the ranks that have it. A rank that leaves the block with an exception compares
    nothing more and does not wait for others. They wait for it as in any collective of their program, until its process
    ends or the group's timeout has passed. Replicas does nothing without `torch.distributed`, in a group of one, and in
    a forked child that has not made a process group of its own.

    Args:
        modules: Modules whose operands should be equal on all ranks from the first step on: a glob, a pattern or a
            predicate as for `when`, or several of them. No others are compared.
        of: Which operands to compare: one or more of `"lhs"`, `"rhs"`, `"bias"`, an attention's `"value"`, and
            `"weights"` for all that are parameters.
        every_steps: Compare one step in this many.
        group: The process group; all ranks if None.
        action: `"raise"` raises an `OpInterceptError` on every rank. `"warn"` warns once for each module, operator and
            phase. `"record"` only adds to `findings`, as all actions do.

    Attributes:
        compared: How many steps have been compared.

    Raises:
        TypeError: `modules` or `of` is of another type.
        ValueError: An operand or the action is unknown, `modules` is empty, or `every_steps` is below 1.

    `step()` or the end of the block raises `OpInterceptError` if ranks have diverged, with `action="raise"`.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> replicas = hooks.Replicas()
        >>> with intercept(replicas) as watch:
        ...     for step in range(3):
        ...         _ = torch.ones(2, 3) @ torch.ones(3, 4)
        ...         watch.step()
        >>> print(replicas)
        nothing compared: torch.distributed is not initialised
    """

    reads: Sequence[Read] = ("module", "source")
    fresh: ClassVar = {
        "_lock": threading.RLock,
        "_hashes": OperandHashes,
        "_operands": dict,
        "_plans": dict,
        "_seen": list,
        "_counts": Counter,
        "_expectations": lambda: None,
        "_ranks": lambda: _NOT_ENTERED,
        "_reading": bool,
        "_blocks": int,
        "_outside": lambda: None,
    }

    @renamed(every="every_steps")
    def __init__(
        self,
        modules: Modules | Iterable[Modules] | None = None,
        *,
        of: str | Iterable[str] = _ROLES,
        every_steps: int = 1,
        group: Any = None,
        action: Action = "raise",
    ) -> None:
        super().__init__()
        check_choice("action", action, get_args(Action))
        if modules is not None and (isinstance(modules, (str, re.Pattern)) or not isinstance(modules, Iterable)):
            modules = [modules]
        self._modules = None if modules is None else list(modules)
        self._filters = None if self._modules is None else [CallFilter(module=each) for each in self._modules]
        if self._filters == []:
            raise ValueError("modules must name at least one module, got none; None stands for all")
        roles = checked_roles(of, (*_ROLES, "weights"))
        self._weights = "weights" in roles
        self._roles = frozenset(roles)
        self._compares_all = self._weights or self._roles.issuperset(_ROLES)
        self._looked_at = _ROLES if self._weights else roles
        self._every_steps = check_count("every_steps", every_steps)
        self._group = group
        self._action = action
        self.compared = 0
        self._skipped: Counter[str] = Counter()
        self._steps = 0
        self._step = 0
        self._process = os.getpid()
        self._hashes = OperandHashes()
        self._operands: dict[tuple[Any, ...], _Operand | None] = {}
        self._plans: dict[tuple[Any, ...], tuple[tuple[_Operand, bool], ...]] = {}
        self._seen: list[_HashedOperand] = []
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._expectations: Expectations | None = None
        self._ranks: Ranks | str = _NOT_ENTERED
        self._reading = False
        self._blocks = 0
        self._outside: BaseException | None = None

    @property
    def findings(self) -> list[Divergence]:
        """At most one for each step, and 1000 in all."""
        return self._all_findings()

    @property
    def expected(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The operands of this rank's calls that should be equal, and the groups of global ranks on which they should.

        The key says where an operand is: `"layers.0 aten::addmm forward rhs"`. An operator that a module runs several
        times in a step has one entry with the groups of all its calls.
        """
        found: dict[str, tuple[tuple[int, ...], ...]] = {}
        with self._lock:
            ranks, expectations = self._ranks, self._expectations
            if expectations is not None and isinstance(ranks, Ranks):
                for operand in filter(None, self._operands.values()):
                    groups = expectations.of(operand.key)
                    if groups:
                        module = "?" if operand.module is None else operand.module or "-"
                        name = " ".join(filter(None, (module, operand.op, operand.phase, operand.role)))
                        new = tuple(_global(ranks, group) for group in groups)
                        found[name] = tuple(sorted({*found.get(name, ()), *new}))
        return found

    def enter(self) -> None:
        """Begin a step."""
        if self._process != os.getpid():  # in a forked child no thread will release the lock of the parent
            self.__setstate__({"_process": os.getpid()})
        with self._lock:
            self._blocks += 1
            if self._blocks == 1:
                for each in self._filters or ():
                    each.watch_names()
                self._outside = sys.exception()
                self._begin()

    def _begin(self) -> None:
        """Begin a step, in which this rank hashes operands if it can compare them."""
        self._hashes.next_step()
        self._seen, self._counts = [], Counter()
        self._ranks = ranks_of(self._group)
        self._reading = self._steps % self._every_steps == 0 and isinstance(self._ranks, Ranks)
        if isinstance(self._ranks, Ranks) and self._expectations is None:
            self._expectations = Expectations(len(self._ranks.members), self._filters is not None)

    def pre(self, call: OpCall) -> None:
        """Hash the operands."""
        self._step = call.step
        ranks, expectations = self._ranks, self._expectations
        if not self._reading or expectations is None or isinstance(ranks, str):
            return
        if self._filters is not None and not self._admits(call, self._filters):
            return
        # With the line, further calls elsewhere do not shift the numbers of these.
        where = call.module, call.op, call.phase, call.source
        with self._lock:
            number, plans = self._counts[where], self._plans
            self._counts[where] += 1
        place = (*where, number)
        plan = plans.get(place)
        if plan is None:
            plan = self._planned(call, place, ranks, expectations)
            if len(plans) < MOST_KEYS:
                plans[place] = plan
        if plan:
            without_graph(self._hash, call, plan, expectations)

    def _hash(self, call: OpCall, plan: tuple[tuple[_Operand, bool], ...], expectations: Expectations) -> None:
        for operand, wanted in plan:
            tensor = call.operand(operand.role)
            if tensor is None:
                continue
            if leaves_out_captured(tensor, self):
                return
            self._hashes.meet(tensor, operand.module)
            if wanted:
                self._hash_one(operand, tensor, expectations, call.index, call.source)

    def _hash_one(
        self, operand: _Operand, tensor: Any, expectations: Expectations, index: int | None, source: str | None
    ) -> None:
        try:
            hashed = self._hashes.of(tensor, expectations.of(operand.key) is None)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            with self._lock:
                self._skipped[f"{operand.op}: {reason}"] += 1
            return
        if hashed is not None:
            with self._lock:
                self._seen.append(_HashedOperand(operand, hashed, index, self._step, source))

    def _hash_unread(self, ranks: Ranks, expectations: Expectations) -> None:
        """Hash parameters and buffers that no call has read in this step, of models of which calls have read some."""
        tests = None if self._modules is None else [name_test(each) for each in self._modules]
        buffers = tests is None and self._roles.issuperset(_ROLES)
        seen: set[Any] = set()
        for kind, tensors in named_tensors():
            prefix = self._prefix(tensors)
            for each in tensors if prefix is not None else ():
                module = f"{prefix}{each.module}" if each.module else (prefix or "")[:-1] or kind
                chosen = each.kind == "parameter" or buffers
                chosen &= tests is None or any(test(module) for test in tests)
                where = module, each.kind, "", None, 0, each.name
                if not chosen or seen & {where, id(each.tensor)} or self._hashes.has_met(each.tensor):
                    continue
                seen.update((where, id(each.tensor)))
                if type(each.tensor) not in (torch.nn.Parameter, torch.Tensor):  # DTensor's operators communicate
                    self._skipped[f"{each.kind}s of type {type(each.tensor).__name__}"] += 1
                    continue
                operand = _Operand(key_of(*where), module, each.kind, "", each.name, each.kind == "parameter")
                if where in self._operands or len(self._operands) < MOST_KEYS:
                    self._operands[where] = operand
                    if expectations.wants(operand.key, ranks.rank) and not leaves_out_captured(each.tensor, self):
                        self._hash_one(operand, each.tensor, expectations, None, None)

    def _prefix(self, tensors: list[NamedTensor]) -> str | None:
        """What the names of a model's modules begin with in this block; None if none has read a tensor of its own."""
        for each in tensors:
            module = self._hashes.module_of(each.tensor)
            if module and each.module and f".{module}".endswith(f".{each.module}"):
                return module.removesuffix(each.module)
        return None

    def _planned(
        self, call: OpCall, place: tuple[Any, ...], ranks: Ranks, expectations: Expectations
    ) -> tuple[tuple[_Operand, bool], ...]:
        """The weights of a call, other operands to hash, and which to hash, until `judge` changes what is expected."""
        plan = []
        for role in self._looked_at:
            tensor = call.operand(role)
            if tensor is not None:
                where = (*place, role)
                operand = self._operands[where] if where in self._operands else self._place(where, tensor)
                if operand is not None and (wanted := expectations.wants(operand.key, ranks.rank)) | operand.weight:
                    plan.append((operand, wanted))
        return tuple(plan)

    def _admits(self, call: OpCall, filters: list[CallFilter]) -> bool:
        admitted = [each.admits(call) for each in filters]  # all of them, since each notes which names it has seen
        return any(admitted)

    def _place(self, place: tuple[Any, ...], tensor: Any) -> _Operand | None:
        """Name an operand when it first appears; None if it is not to be looked at."""
        module, op, phase, _, _, role = place
        weight = is_weight(tensor)
        operand = None
        if (role in self._roles or (self._weights and weight)) and len(self._operands) < MOST_KEYS:
            operand = _Operand(key_of(*place), module, op, phase, role, weight)
        if len(self._operands) < MOST_KEYS:
            self._operands[place] = operand
        return operand

    def end_step(self) -> None:
        """Compare what the ranks have hashed."""
        self._compare()

    def exit(self) -> None:
        """Compare the last step, unless an exception ends the block."""
        with self._lock:
            self._blocks -= 1
            if self._blocks:
                return
        exception = sys.exception()
        try:
            if exception is None or exception is self._outside:
                self._compare()
            else:
                self._steps += 1  # if the program goes on, the others notice that this rank is at another step
        finally:
            self._reading = False
            self._outside = None
        for each in self._filters or ():
            text = each.unmatched()
            if text is not None:
                warnings.warn(text, OpInterceptWarning, stacklevel=caller_level())

    def _compare(self) -> None:
        """End a step: exchange what its calls have left, and begin the next one."""
        with self._lock:
            reading, ranks, expectations = self._reading, self._ranks, self._expectations
            if reading and self._compares_all and isinstance(ranks, Ranks) and expectations is not None:
                without_graph(self._hash_unread, ranks, expectations)
            seen = self._seen
            step = self._steps
            self._steps += 1
            hashes = self._hashes.read([each.hashed for each in seen])
            self._begin()
        if reading and expectations is not None and isinstance(ranks, Ranks) and ranks.is_there():
            entries = [
                RankOperand(each.operand.key, value, flags | WEIGHT * each.operand.weight)
                for each, (value, flags) in zip(seen, hashes, strict=True)
            ]
            diverged = self._diverged(ranks, expectations, step, entries)
            self.compared += 1
            if diverged:
                self._notify(self._divergence(ranks, diverged, seen))

    def _diverged(
        self, ranks: Ranks, expectations: Expectations, step: int, entries: list[RankOperand]
    ) -> list[DivergedOperand]:
        """Compare the entries of all ranks: first a sum, then one by one."""
        total, unknown = ranks.summed(expectations.summed(ranks.rank, step, entries))
        if not total and not unknown:
            return []
        heads = ranks.gathered([step, expectations.version, len(entries)])
        if len({head[0] for head in heads}) > 1:
            self._out_of_step(ranks, [head[0] for head in heads])
            return []
        most = max(head[2] for head in heads)
        padding = [0] * (len(RankOperand._fields) * (most - len(entries)))
        rows = ranks.gathered([number for entry in entries for number in entry] + padding)
        tables = [
            [RankOperand(*row[place : place + 3]) for place in range(0, 3 * head[2], 3)]
            for row, head in zip(rows, heads, strict=True)
        ]
        with self._lock:
            if len({head[1] for head in heads}) > 1:  # some ranks have a new hook, or a copy: all begin anew
                expectations.clear()
            self._plans = {}
            return expectations.judge(tables)

    def _out_of_step(self, ranks: Ranks, steps: list[int]) -> None:
        shown = ", ".join(f"{step} of rank {rank}" for step, rank in zip(steps, ranks.members, strict=True))
        text = (
            f"Replicas cannot compare ranks at different steps, got step {shown}; every rank must enter the block and "
            "call step() equally often"
        )
        if self._action == "raise":
            raise OpInterceptError(text)
        if ("", "", "steps") not in self._told:
            self._told.add(("", "", "steps"))
            warnings.warn(text, OpInterceptWarning, stacklevel=caller_level())

    def _divergence(self, ranks: Ranks, diverged: list[DivergedOperand], seen: list[_HashedOperand]) -> Divergence:
        key = diverged[0].key
        here = next((each for each in seen if each.operand.key == key), None)
        known = (operand for operand in self._operands.values() if operand is not None and operand.key == key)
        operand = here.operand if here is not None else next(known, _Operand(key, None, "?", "?", "?", False))
        return Divergence(
            ranks=tuple(_global(ranks, group) for group in diverged[0].ranks),
            step=self._step if here is None else here.step,
            index=None if here is None else here.call,
            module=operand.module,
            op=operand.op,
            phase=operand.phase,
            operand=operand.role,
            weight=operand.weight,
            source=None if here is None else here.source,
            more=len(diverged) - 1,
        )

    def _notify(self, finding: Divergence) -> None:
        new = self._keep(finding)
        if self._action == "raise":
            raise OpInterceptError(str(finding))
        if self._action == "warn" and new:
            warnings.warn(str(finding), OpInterceptWarning, stacklevel=caller_level())

    def clear(self) -> None:
        """Forget the findings and the counts. What should be equal stays known."""
        with self._lock:
            self._forget_findings()
            self._skipped.clear()
            self.compared = 0

    def __str__(self) -> str:
        if not self.compared and isinstance(self._ranks, str):
            return f"nothing compared: {self._ranks}"
        lines = [
            f"{counted(self.compared, 'step')} compared, {counted(len(self.expected), 'operand')} expected to be "
            f"equal, {counted(self._found(), 'step')} in which ranks diverged"
        ]
        lines += map(str, self.findings)
        lines += [f"skipped {count} {reason}" for reason, count in self._skipped.items()]
        return "\n".join(lines)


def _global(ranks: Ranks, group: Group) -> tuple[int, ...]:
    return tuple(sorted(ranks.members[rank] for rank in group))
