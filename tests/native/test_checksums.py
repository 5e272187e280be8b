"""Sums over the columns of matrices in C++, against float64."""

from __future__ import annotations

import pytest
import torch
from compiler import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from native import library
from torch import Tensor

pytestmark = [needs_compiler, pytest.mark.slow]

SIDES = st.one_of(st.integers(1, 40), st.sampled_from([64, 255, 256, 257, 600, 1500]))


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Matrices and batches of them, in any layout."""
    rows, columns = draw(SIDES), draw(SIDES)
    batch = draw(st.sampled_from([(), (1,), (3,)]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    layout = draw(st.sampled_from(["rows", "columns", "strided", "expanded"]))
    if layout == "columns":
        return made(*batch, columns, rows).mT
    if layout == "strided":
        return made(*batch, 2 * rows, 3 * columns)[..., ::2, ::3]
    if layout == "expanded":
        return made(*batch, 1, columns).expand(*batch, rows, columns)
    return made(*batch, rows, columns)


def close(found: Tensor, exact: Tensor, sizes: Tensor) -> bool:
    """Whether sums are right: each rounding is at most half an eps, and the sums are far shorter than 1 / eps."""
    return bool(((found.double() - exact).abs() <= 100 * torch.finfo(found.dtype).eps * sizes).all())


@settings(max_examples=150, deadline=None)
@given(matrices(), st.sampled_from([1, 2, 7, 8, 24, 33, 48]), st.booleans(), st.booleans())
def test_project_is_the_product_and_the_norms_of_rows(x: Tensor, groups: int, wide: bool, by_batch: bool) -> None:
    dtype = torch.float64 if wide or x.dtype is torch.float64 else torch.float32
    by_batch = by_batch and x.dim() == 3
    by = torch.randn(*(x.shape[:1] if by_batch else ()), x.shape[-1], groups, dtype=dtype)
    out = torch.full((*x.shape[:-1], groups), torch.nan, dtype=dtype)
    norms = torch.full((*x.shape[:-1], 1), torch.nan, dtype=dtype)
    assert library().project(x, by, out, norms)
    exact, sizes = x.double() @ by.double(), x.double().abs() @ by.double().abs()
    assert close(out, exact, sizes)
    lengths = torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True)
    assert close(norms, lengths, lengths)
    alone = torch.empty_like(out)
    assert library().project(x, by, alone, None)
    assert torch.equal(alone, out)


@settings(max_examples=150, deadline=None)
@given(matrices(), st.sampled_from([1, 2, 7, 48]), st.booleans())
def test_sign_sums_add_up_neighbouring_columns(x: Tensor, groups: int, wide: bool) -> None:
    dtype = torch.float64 if wide or x.dtype is torch.float64 else torch.float32
    columns = x.shape[-1]
    signs = (torch.randint(0, 2, (columns,)) * 2 - 1).to(dtype)
    out = torch.full((*x.shape[:-1], groups), torch.nan, dtype=dtype)
    assert library().sign_sums(x, signs, out)
    matrix = torch.zeros(columns, groups, dtype=torch.float64)
    places = torch.arange(columns)
    matrix[places, places // -(-columns // groups)] = signs.double()
    assert close(out, x.double() @ matrix, x.double().abs() @ matrix.abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_the_bits_of_a_row_depend_on_neither_threads_nor_other_rows(dtype: torch.dtype, turned: bool) -> None:
    x = torch.randn(900, 2000).to(dtype) if turned else torch.randn(2000, 900).to(dtype)
    x = x.mT if turned else x
    for groups in (1, 48):
        by = torch.randn(900, groups)
        found = []
        before = torch.get_num_threads()
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(torch.empty(2000, groups))
            try:
                assert library().project(x, by, found[-1], None)
            finally:
                torch.set_num_threads(before)
        few = torch.empty(700, groups)
        assert library().project(x[600:1300], by, few, None)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[0][600:1300], few)


def test_what_cannot_be_read_is_refused() -> None:
    x, by, out = torch.randn(4, 6), torch.randn(6, 3), torch.empty(4, 3)
    project = library().project
    assert project(x, by, out, None)
    freed = torch.randn(4, 6)
    freed.untyped_storage().resize_(0)

    class Sub(torch.Tensor):
        pass

    refused = [
        (x.int(), by, out),
        (x.to(torch.complex64), by, out),
        (x.to_sparse(), by, out),
        (x[0], by, out),
        (torch.randn(2, 2, 4, 6), by, out),
        (freed, by, out),
        (x.as_subclass(Sub), by, out),
        (x.to("meta"), by, out),
        (x, by[:5], out),
        (x, by[:, ::2], out),
        (x, by.double(), out),
        (x, by.half(), out.half()),
        (x, by, out[:3]),
        (x, by, torch.empty(3, 4).mT),
        (x, by[0], out),
        (x, None, out),
    ]
    for given_x, given_by, given_out in refused:
        assert project(given_x, given_by, given_out, None) is False
    assert project(x, by, out, torch.empty(3, 1)) is False
    assert project(x, by, out) is False
    signs = torch.ones(6)
    assert library().sign_sums(x, signs, out)
    for given_x, given_signs, given_out in [
        (freed, signs, out),
        (x, signs[:5], out),
        (x, signs, out[:2]),
        (x[0], signs, out),
    ]:
        assert library().sign_sums(given_x, given_signs, given_out) is False
