"""That an engine is one file: a toy, which shows the products of a library of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from opintercept import OpInterceptError, hooks, intercept
from opintercept._engines import choose
from opintercept._engines import scope as _scope
from opintercept._engines.base import Block, Engine, Keys
from opintercept._engines.modes import run_hooked
from opintercept._engines.scope import UNKNOWN

A = torch.randn(4, 4)


class Library:
    """What the toy watches."""

    matmul = staticmethod(torch.matmul)


MATMUL = Library.matmul


class Toy(Engine):
    """Replaces the library's function while a block is entered."""

    name = "toy"
    source = "toy"
    instead = 'use engine="kernel"'

    def __init__(self) -> None:
        self.needs: dict[str, Any] = {"library.matmul": MATMUL}
        self.blocks: set[Block] = set()

    def keys(self, ops: Any) -> Keys:
        return frozenset([MATMUL])

    def enter(self, block: Block) -> None:
        self.blocks.add(block)
        Library.matmul = self.matmul  # type: ignore[assignment]
        _scope.enter(block)

    def leave(self, block: Block) -> None:
        _scope.leave(block)
        self.blocks.discard(block)
        if not self.blocks:
            Library.matmul = MATMUL  # type: ignore[assignment]

    def matmul(self, *args: Any, **kwargs: Any) -> Any:
        scope = _scope.current()
        watch = scope.tables[self.source].get(MATMUL, UNKNOWN)
        if watch is UNKNOWN:
            watch = scope.watch(self.source, MATMUL)
        return MATMUL(*args, **kwargs) if watch is None else run_hooked(scope, watch, MATMUL, args, kwargs)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    engine = Toy()
    monkeypatch.setitem(choose.ENGINES, engine.name, engine)
    yield engine
    assert Library.matmul is MATMUL


@pytest.mark.usefixtures("toy")
def test_an_engine_of_one_file_shows_its_calls() -> None:
    toys, kernels = hooks.Recorder(), hooks.Recorder()
    with intercept(toys, engine="toy"), intercept(kernels):  # type: ignore[arg-type]
        product = Library.matmul(A, A)
        A @ A
    assert [record.op for record in toys.records] == ["torch.matmul"]
    assert [record.op for record in kernels.records] == ["aten::mm", "aten::mm"]
    assert torch.equal(product, A @ A)


@pytest.mark.usefixtures("toy")
def test_hooks_of_such_an_engine_may_change_and_pause() -> None:
    interceptor = intercept(lambda call: call.output * 2, engine="toy")  # type: ignore[arg-type]
    with interceptor:
        assert torch.equal(Library.matmul(A, A), (A @ A) * 2)
        with interceptor.paused():
            assert torch.equal(Library.matmul(A, A), A @ A)


@pytest.mark.usefixtures("toy")
def test_such_an_engine_serves_coroutines_and_generators() -> None:
    recorder = hooks.Recorder()

    @intercept(recorder, engine="toy")  # type: ignore[arg-type]
    def body() -> Iterator[None]:
        Library.matmul(A, A)
        yield
        Library.matmul(A, A)

    for _ in body():
        Library.matmul(A, A)
    assert len(recorder.records) == 2


def test_an_engine_that_torch_cannot_serve_says_what_is_missing(toy: Toy) -> None:
    toy.needs["library.matmul"] = None
    with pytest.raises(
        OpInterceptError, match=r'^the toy engine needs library.matmul, which torch .*; use engine="kern'
    ):
        intercept(engine="toy")  # type: ignore[arg-type]


@pytest.mark.usefixtures("toy")
def test_what_an_engine_does_not_offer_is_refused() -> None:
    with pytest.raises(ValueError, match="with the toy engine"):
        intercept(engine="toy", threads="all")  # type: ignore[arg-type]
