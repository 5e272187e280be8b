"""`when`: calls a hook for some calls only."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

from opintercept._core.call import OpCall
from opintercept._core.checks import renamed
from opintercept._core.errors import OpInterceptWarning, caller_level
from opintercept._core.hook import Hook, is_hook, reads_of
from opintercept._kit.filter import CallFilter


@renamed(every="every_calls")
def when(
    hook: Hook,
    *,
    op: str | Iterable[str] | None = None,
    module: str | re.Pattern[str] | Callable[[str], bool] | None = None,
    phase: str | None = None,
    dtype: Any = None,
    min_numel: int | None = None,
    every_calls: int | None = None,
    first: int | None = None,
    steps: int | Container[int] | None = None,
    predicate: Callable[[OpCall], bool] | None = None,
) -> Hook:
    """Return a hook that calls `hook` only for calls that pass every filter given.

    The filters decide once for each call and for all methods of the hook: before the operator runs if the hook has a
    `pre`. The result declares what `hook` declares, and `reads` names if `module` is given. A hook or predicate
    without a declaration leaves the result without one.

    Args:
        hook: Any hook, also another `when`.
        op: One or more operators: `"mm"`, `"aten::mm"`, `"torch.nn.functional.linear"` or `"linear"`.
        module: The module's qualified name: a glob such as `"encoder.*.attn"`, in which `*` also matches dots; a
            compiled pattern, which must match the whole name; or any predicate of the name. A module with several
            names passes if one of them does; a call without a known module does not pass. If a block ends and no
            name has matched the glob or pattern so far, `when` warns once and suggests names.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        dtype: The dtype of the left or the right operand, `torch.bfloat16` or `"bfloat16"`.
        min_numel: How many elements the larger operand must have at least.
        every_calls: Pass one call in this many, starting with the first; counts the calls that pass the filters above
            and `predicate`.
        first: Pass only this many calls, counted after `every_calls`.
        steps: The interceptor's step, or a container of steps such as `range(100, 200)`.
        predicate: Any predicate of the call.

    Raises:
        TypeError: `hook` is not a hook, `predicate` is not callable, or a filter has the wrong type.
        ValueError: The phase is unknown, or a count is below 1.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> with intercept(hooks.when(hooks.Print(), op="bmm", first=1)):
        ...     x = torch.ones(2, 3, 3)
        ...     _ = torch.mm(x[0], x[1]), torch.bmm(x, x), torch.bmm(x, x)
        1 forward aten::bmm float32[2, 3, 3] @ float32[2, 3, 3] -> float32[2, 3, 3] | min 3 max 3 mean 3 std 0
    """
    if not is_hook(hook) or isinstance(hook, type):
        raise TypeError(f"when needs a hook, got {hook!r}")
    return _When(hook, CallFilter(op, module, phase, dtype, min_numel, every_calls, first, steps, predicate))


class _When:
    """Has the methods that the hook has and no others, so that the pipeline calls nothing in vain.

    None of the methods refers back to the object, so that it goes without the garbage collector.
    """

    def __init__(self, hook: Hook, filters: CallFilter) -> None:
        self.hook = hook
        self._filters = filters
        if (reads := reads_of((hook, filters))) is not None:
            self.reads = reads
        if (levels := getattr(hook, "levels", None)) is not None:
            self.levels = levels
        methods = [name for name in ("pre", "post", "error", "backward") if callable(getattr(hook, name, None))]
        if not methods and callable(hook):
            self.post = _filtered(hook, filters)
        for name in methods:
            setattr(self, name, _filtered(getattr(hook, name), filters))
        if "backward" in methods:
            self.wants_gradients = partial(_wants, filters, getattr(hook, "wants_gradients", None))
        if callable(enter := getattr(hook, "enter", None)):
            self.enter = enter
        if callable(end_step := getattr(hook, "end_step", None)):
            self.end_step = end_step
        # A filter inside another one sees only what that lets through, so it must not warn.
        leave = hook._leave if isinstance(hook, _When) else getattr(hook, "exit", None)
        self._leave: Callable[[], Any] | None = leave if callable(leave) else None
        leave = partial(_exit, filters, self._leave) if filters.watch_names() else self._leave
        if leave is not None:
            self.exit = leave

    def __reduce__(self) -> tuple[Any, ...]:
        return _When, (self.hook, self._filters)

    def __repr__(self) -> str:
        return f"when({self.hook!r})"


def _exit(filters: CallFilter, leave: Callable[[], Any] | None) -> None:
    if leave is not None:
        leave()
    text = filters.unmatched()
    if text is not None:
        warnings.warn(text, OpInterceptWarning, stacklevel=caller_level())


def _filtered(method: Callable[..., Any], filters: CallFilter) -> Callable[..., Any]:
    def filtered(call: OpCall, *more: Any) -> Any:
        return method(call, *more) if _verdict(filters, call) else None

    return filtered


def _verdict(filters: CallFilter, call: OpCall) -> bool:
    return call.once(filters, filters.admits)


def _wants(filters: CallFilter, wants: Callable[[OpCall], bool] | None, call: OpCall) -> bool:
    return _verdict(filters, call) and (wants is None or wants(call))
