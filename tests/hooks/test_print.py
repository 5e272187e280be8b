"""`Print`: its line for every kind of output, and where it prints."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_calls import product_of

from opintercept import hooks, intercept

NAN, INF = float("nan"), float("inf")


def line_of(output: Any) -> str:
    """The values that are printed for a product with this output."""
    file = io.StringIO()
    hooks.Print(file).post(product_of(output))
    start, _, line = file.getvalue().partition(" -> ")
    assert start == "0 forward aten::mm float32[2, 3] @ float32[3, 4]"
    assert line.endswith("\n")
    return line[:-1]


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (torch.tensor([1.0, 2, 3, 6]), "float32[4] | min 1 max 6 mean 3 std 1.87"),
        (torch.tensor(2.0), "float32[] | min 2 max 2 mean 2 std 0"),
        (torch.tensor([1.0, NAN, INF, -INF, 3]), "float32[5] | min 1 max 3 mean 2 std 1 NONFINITE 3"),
        (torch.tensor([NAN, INF]), "float32[2] | min nan max nan mean nan std nan NONFINITE 2"),
        (torch.empty(0, 3), "float32[0, 3]"),
        (torch.tensor([[-3, 4]]), "int64[1, 2] | min -3 max 4 mean 0.5 std 3.5"),
        (torch.tensor([-128, 127], dtype=torch.int8), "int8[2] | min -128 max 127 mean -0.5 std 128"),
        (torch.tensor([True, False]), "bool[2] | min 0 max 1 mean 0.5 std 0.5"),
        (torch.tensor([3 + 4j, 0j]), "complex64[2] | min 0 max 5 mean 2.5 std 2.5"),
        (torch.tensor([3 + 4j]).conj(), "complex64[1] | min 5 max 5 mean 5 std 0"),
        (torch.tensor([3 + 4j]).conj().imag, "float32[1] | min -4 max -4 mean -4 std 0"),
        (torch.tensor([complex(NAN, 1), 3 + 4j]), "complex64[2] | min 5 max 5 mean 5 std 0 NONFINITE 1"),
        (torch.tensor([1.0, 2]).bfloat16(), "bfloat16[2] | min 1 max 2 mean 1.5 std 0.5"),
        (torch.tensor([1.0, 448]).to(torch.float8_e4m3fn), "float8_e4m3fn[2] | min 1 max 448 mean 224 std 224"),
        (torch.tensor([1.0, NAN]).to(torch.float8_e5m2), "float8_e5m2[2] | min 1 max 1 mean 1 std 0 NONFINITE 1"),
        # The moments may be beyond the range of the dtype.
        (torch.full((2,), 6e4, dtype=torch.float16), "float16[2] | min 6e+04 max 6e+04 mean 6e+04 std 0"),
        (torch.eye(2).to_sparse(), "float32[2, 2] | min 0 max 1 mean 0.5 std 0.5"),
        (torch.eye(2).to_sparse_csr(), "float32[2, 2] | min 0 max 1 mean 0.5 std 0.5"),
        (torch.eye(2).to_mkldnn(), "float32[2, 2] | min 0 max 1 mean 0.5 std 0.5"),
        (
            torch.nested.nested_tensor([torch.ones(1, 2), torch.zeros(3, 2)]),
            "float32[2, -1, 2] | min 0 max 1 mean 0.25 std 0.433",
        ),
        (torch.ones(2, device="meta"), "float32[2]@meta"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2[2]"),
        ((torch.ones(2), torch.zeros(3)), "float32[2], float32[3] | min 1 max 1 mean 1 std 0"),
        (torch.ones(2, requires_grad=True), "float32[2] | min 1 max 1 mean 1 std 0"),
    ],
)
def test_the_line_of_an_output(output: Any, line: str) -> None:
    assert line_of(output) == line


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        (
            lambda: (torch.ones(2, 3, requires_grad=True) @ torch.ones(3, 1)).sum().backward(),
            [
                "0 forward aten::mm float32[2, 3] @ float32[3, 1] -> float32[2, 1] | min 3 max 3 mean 3 std 0",
                "1 backward aten::mm float32[2, 1] @ float32[1, 3] -> float32[2, 3] | min 1 max 1 mean 1 std 0",
            ],
        ),
        (
            lambda: torch.addmm(torch.ones(4), torch.ones(2, 3), torch.ones(3, 4)),
            [
                "0 forward aten::addmm float32[2, 3] @ float32[3, 4] + float32[4] -> float32[2, 4]"
                " | min 4 max 4 mean 4 std 0"
            ],
        ),
        (
            lambda: torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)),
            ["0 forward aten::_int_mm int8[32, 16] @ int8[16, 8] -> int32[32, 8] | min 16 max 16 mean 16 std 0"],
        ),
        (
            lambda: torch.sparse.mm(torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
            [
                "0 forward aten::_sparse_sparse_matmul float32[2, 2] @ float32[2, 2] -> float32[2, 2]"
                " | min 0 max 1 mean 0.5 std 0.5"
            ],
        ),
    ],
    ids=["backward", "bias", "integer", "sparse"],
)
def test_a_line_has_index_phase_and_shapes(
    program: Callable[[], Any], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with intercept(hooks.Print()):
        program()
    assert capsys.readouterr().out.splitlines() == lines


def test_standard_output_is_looked_up_when_the_line_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    hook, later = hooks.Print(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", later)
    with intercept(hook):
        torch.mm(torch.ones(1, 1), torch.ones(1, 1))
    assert later.getvalue().startswith("0 forward aten::mm ")


def test_a_file_gets_the_lines_instead_of_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    class EmptyFile(io.StringIO):
        def __len__(self) -> int:
            return 0  # a file may have a length, and be false while it is empty

    for file in (io.StringIO(), EmptyFile()):
        with intercept(hooks.Print(file)):
            torch.mm(torch.ones(1, 1), torch.ones(1, 1))
        assert file.getvalue().count("\n") == 1
    assert capsys.readouterr().out == ""
