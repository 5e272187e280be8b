"""The pytest plugin: the fixture `op_calls`, the matmuls that a test ran.

Loaded with every pytest run of everybody who has the library installed, so it must not import torch
outside of the fixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import pytest

if TYPE_CHECKING:
    from opintercept._call import CallRecord


class OpCalls(Sequence["CallRecord"]):
    """The records of the calls so far, in order; grows while the test runs."""

    def __init__(self, records: list[CallRecord]) -> None:
        self._records = records

    @overload
    def __getitem__(self, index: int) -> CallRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[CallRecord]: ...
    def __getitem__(self, index: int | slice) -> CallRecord | list[CallRecord]:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def expect(
        self,
        *,
        op: str | None = None,
        phase: str | None = None,
        dtype: Any = None,
        count: int | None = None,
        max_count: int | None = None,
    ) -> None:
        """Fail the test unless the calls are as said.

        Args:
            op: Look at this operator's calls only, `"bmm"` or `"aten::bmm"`.
            phase: Look at this pass only, `"forward"` or `"backward"`.
            dtype: Every operand of these calls has it.
            count: There are exactly so many of them.
            max_count: There are at most so many.
        """
        __tracebackhide__ = True
        chosen = [
            record
            for record in self._records
            if (op is None or op in (record.op, record.op.rpartition("::")[2]))
            and (phase is None or record.phase == phase)
        ]
        what = " ".join(word for word in (phase, op) if word) or "matmul"
        if count is not None and len(chosen) != count:
            self._fail(f"expected {count} {what} calls, got {len(chosen)}")
        if max_count is not None and len(chosen) > max_count:
            self._fail(f"expected at most {max_count} {what} calls, got {len(chosen)}")
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            wrong = [
                record
                for record in chosen
                if any(operand is not None and operand.dtype != name for operand in (record.lhs, record.rhs))
            ]
            if wrong:
                self._fail(
                    f"expected {name} operands in {what} calls, got others in {len(wrong)} of {len(chosen)}, "
                    f"first in {wrong[0]}"
                )

    def _fail(self, text: str) -> None:
        __tracebackhide__ = True
        ran = "\n".join(f"  {record.index} {record.phase} {record}" for record in self._records) or "  nothing"
        pytest.fail(f"{text}; what ran:\n{ran}", pytrace=True)


@pytest.fixture
def op_calls() -> Iterator[OpCalls]:
    """The matmuls that the test's body runs, forward and backward, as records."""
    from opintercept import hooks, intercept

    recorder = hooks.Recorder()
    with intercept(recorder):
        yield OpCalls(recorder.records)
