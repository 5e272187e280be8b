"""Hooks that read values in C++ report what they report with torch's operators, field by field."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_compiler
from native import reading
from numpy_stats import FLOATS
from torch import Tensor

from opintercept import hooks, intercept, runs

pytestmark = [pytest.mark.slow, needs_compiler]


def products() -> None:
    """Products of every dtype and layout, with odd values in some, and of tensors that are not read in C++."""
    generator = torch.Generator().manual_seed(3)
    for dtype in FLOATS:
        for shape in ((3, 5), (40, 40), (300, 260)):
            x = (torch.randn(shape, generator=generator) * 3 + 1).to(dtype)
            x[:, 1] = 0
            for operand in (x, x.t(), x[::2], x[:, ::2], x[:1].expand(7, -1), x[:0]):
                torch.mm(operand, operand.mT)
            if dtype is not torch.float16:
                x[-1, :2] = torch.tensor([float("inf"), float("nan")])
                torch.mm(x, x.mT)
    torch.mm(torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 2, dtype=torch.int64))
    phased = torch.randn(4, 4, dtype=torch.complex64, generator=generator)
    torch.mm(phased, phased.conj())
    torch.mm(torch.eye(4).to_sparse(), torch.ones(4, 4))


def both(report: Callable[[], Any]) -> tuple[Any, Any]:
    """What is reported of values that are read in C++, and with torch's operators."""
    with reading(True):
        native = report()
    with reading(False):
        return native, report()


def near(value: Any) -> Any:
    """Floats to the precision that the hooks promise; what is a rounding error of other values, to that."""
    return pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True) if isinstance(value, float) else value


@pytest.mark.parametrize("options", [{}, {"for_dtype": torch.float8_e4m3fn, "histogram": True}], ids=["plain", "all"])
def test_stats_have_the_same_fields(options: dict[str, Any]) -> None:
    def report() -> hooks.Stats:
        found = hooks.Stats(("lhs", "rhs", "output"), **options)
        with intercept(found):
            products()
        return found

    native, expected = both(report)
    assert len(native.rows()) == len(expected.rows()) > 2
    assert native.skipped == expected.skipped
    for one, other in zip(native.rows(), expected.rows(), strict=True):
        for field in dataclasses.fields(one):
            exact = field.name not in ("mean", "std", "rms")
            value, other_value = getattr(one, field.name), getattr(other, field.name)
            assert value == (other_value if exact else near(other_value)), field.name
    if options:
        for operand in ("lhs", "output"):
            assert native.histogram("", operand) == expected.histogram("", operand)


def test_channels_are_the_same() -> None:
    def report() -> list[Tensor]:
        found = hooks.Stats(channels="lhs")
        with intercept(found):
            for shape in ((6, 40), (700, 40)):
                x = torch.arange(float(shape[0] * shape[1])).view(shape)
                for operand in (x, x.view(40, -1).t(), x * float("inf")):
                    torch.mm(operand, torch.ones(40, 2))
        return [found.channels("")]

    native, expected = both(report)
    assert torch.equal(native[0].nan_to_num(-1.0), expected[0].nan_to_num(-1.0))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("ops", ["matmul", "all"])
def test_findings_are_the_same(every: int, ops: str) -> None:
    def report() -> tuple[list[Any], int, list[Any]]:
        found = hooks.NonFinite(inf=True, action="record", check_every=every)
        with intercept(found, ops=ops):
            products()
            torch.ones(4, 4).div_(0.0) @ torch.zeros(4, 4)
            torch.ones(3, 3).mul_(3e38).mul_(3e38)
        spans = [(f.kind, f.output, f.operands, f.bad, str(f)) for f in found.findings]
        return spans, found.passed_on, [dataclasses.replace(f.record, started=0, elapsed=0.0) for f in found.findings]

    native, expected = both(report)
    assert repr(native) == repr(expected)  # with NaN as the same text
    assert native[0]


def test_lines_of_print_are_the_same() -> None:
    def report() -> str:
        lines = io.StringIO()
        with intercept(hooks.Print(lines)):
            products()
        return lines.getvalue()

    native, expected = both(report)
    assert len(native.splitlines()) > 70
    for one, other in zip(native.splitlines(), expected.splitlines(), strict=True):
        head, _, figures = one.partition(" | ")
        assert head == other.partition(" | ")[0]
        for word, other_word in zip(figures.split(), other.partition(" | ")[2].split(), strict=True):
            # Three digits are shown, and those of a mean that is a rounding error differ.
            assert word == other_word or float(word) == pytest.approx(float(other_word), rel=2e-2, abs=1e-6)


def test_values_in_a_log_are_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def report() -> list[Any]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "opintercept"), intercept(hooks.Log(values="stats")):
            products()
        return [record.__dict__["values"] for record in caplog.records]

    native, expected = both(report)
    assert len(native) > 70
    for one, other in zip(native, expected, strict=True):
        assert one is other is None or one == {name: near(value) for name, value in other.items()}


def test_values_of_a_run_are_the_same(tmp_path: Path) -> None:
    def report() -> list[Any]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        with intercept(runs.RunRecorder(path, tensors="stats")):
            products()
        return [call.values for call in runs.open_run(path).calls()]

    native, expected = both(report)
    assert len(native) > 70
    for one, other in zip(native, expected, strict=True):
        assert one.keys() == other.keys()
        for role in one:
            ours, theirs = dataclasses.asdict(one[role]), dataclasses.asdict(other[role])
            assert ours == {name: near(value) for name, value in theirs.items()}
            assert ours["hash"] == theirs["hash"]
