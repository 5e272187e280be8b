"""Models of `transformers`: interception sees every matmul, or every operator, and changes no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sampled
import torch
import transformers
from compiler import COMPILED
from models import MODELS, MORE_MODELS, inputs_of
from programs import outermost, profiled

from opintercept import hooks, intercept

pytestmark = pytest.mark.slow

CONTEXTS = {"training": torch.enable_grad, "evaluation": torch.no_grad, "inference": torch.inference_mode}


def _run(
    make: Callable[[], transformers.PreTrainedModel], context: str
) -> tuple[torch.Tensor, list[Any], torch.Tensor]:
    torch.manual_seed(3)
    model = make().train(context == "training")
    inputs = inputs_of(model)
    with CONTEXTS[context]():
        loss = model(**inputs).loss
    if context == "training":
        loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()], torch.get_rng_state()


def _compare(make: Callable[[], transformers.PreTrainedModel], context: str, **options: Any) -> None:
    recorder = hooks.Recorder()
    interceptor = intercept(recorder, **options)
    watched = frozenset(interceptor.watcher.keys or ())
    loss, gradients, state = _run(make, context)
    with profiled() as profiler, interceptor:
        seen_loss, seen_gradients, seen_state = _run(make, context)
    assert torch.equal(loss, seen_loss)
    assert torch.equal(state, seen_state)
    for one, other in zip(gradients, seen_gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert [record.op for record in recorder.records] == outermost(profiler.events(), watched)
    assert len(recorder.records) > 10


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_matmul_of_a_model_is_seen_and_no_result_changes(name: str, context: str) -> None:
    _compare(MODELS[name], context)


@pytest.mark.parametrize("engine", [pytest.param({"engine": "kernel"}, id="kernel"), COMPILED])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_every_operator_of_a_model_is_seen_and_no_result_changes(
    name: str, context: str, engine: dict[str, Any]
) -> None:
    if not sampled.picks(f"{name} {context} {engine}", of=10):
        pytest.skip("sampled")
    _compare((MODELS | MORE_MODELS)[name], context, ops="all", **engine)
