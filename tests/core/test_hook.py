"""What hooks declare: what they read, at which levels they work, and whose gradients they want."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from compiler import BELOW
from torch import nn

from opintercept import OpCall, OpInterceptWarning, hooks, intercept
from opintercept._core.call_site import CallSite
from opintercept._core.hook import Read, reads_of

READ: dict[str, Callable[[OpCall], Any]] = {
    "module": lambda call: call.aliases,
    "source": lambda call: call.source,
    "forward": lambda call: call.forward,
    "gradients": lambda call: call.gradient,
    "record": lambda call: call.record().module,
}


def train(model: nn.Module) -> None:
    model(torch.ones(3, 4)).sum().backward()


def declared(post: Callable[[OpCall], Any], reads: tuple[str, ...] | None) -> Any:
    return SimpleNamespace(post=post) if reads is None else SimpleNamespace(post=post, reads=reads)


def noted(
    reads: tuple[str, ...] | None, mode: AbstractContextManager[Any], *, frozen: bool = False, **options: Any
) -> bool:
    """Whether a call notes where it comes from although no hook reads it."""
    places: list[CallSite | None] = []
    model = nn.Linear(4, 2).requires_grad_(not frozen)
    with intercept(declared(lambda call: places.append(call.call_site), reads), **options), mode:
        model(torch.ones(3, 4))
    [place] = places
    return place is not None


@pytest.mark.parametrize("engine", BELOW)
@pytest.mark.parametrize(
    ("reads", "with_grad", "without"),
    [
        (None, True, False),
        ((), False, False),
        (("autocast",), False, False),
        (("forward",), True, False),
        (("gradients",), True, False),
        (("module",), True, True),
        (("source",), True, True),
        (("record",), True, True),
    ],
    ids=str,
)
def test_a_call_notes_where_it_comes_from_for_hooks_that_read_it(
    reads: tuple[str, ...] | None, with_grad: bool, without: bool, engine: dict[str, Any]
) -> None:
    assert noted(reads, torch.enable_grad(), **engine) is with_grad
    assert noted(reads, torch.enable_grad(), frozen=True, **engine) is without
    assert noted(reads, torch.no_grad(), **engine) is without
    assert noted(reads, torch.inference_mode(), **engine) is without


def names_of_the_second_model(reads: tuple[str, ...] | None) -> set[str | None]:
    class Teacher(nn.Sequential):
        pass

    class Student(nn.Sequential):
        pass

    found: set[str | None] = set()
    teacher, student = Teacher(nn.Linear(4, 4)), Student(nn.Linear(4, 4))
    read = False
    with intercept(declared(lambda call: found.add(call.module) if read else None, reads)):
        with torch.no_grad():
            teacher(torch.ones(3, 4))
        read = True
        student(torch.ones(3, 4))
    return found


def test_a_hook_that_declares_names_has_models_named_in_the_order_in_which_they_run() -> None:
    assert names_of_the_second_model(("module",)) == {"Student.0"}
    assert names_of_the_second_model(None) == {"0"}


@pytest.mark.parametrize("engine", BELOW)
@pytest.mark.parametrize("word", READ)
def test_a_backward_read_that_no_hook_declares_warns_once_and_is_answered_from_then_on(
    word: str, engine: dict[str, Any]
) -> None:
    model, found = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), []

    def read(call: OpCall) -> None:
        if call.phase == "backward":
            found.append(READ[word](call))

    with intercept(declared(read, ()), **engine):
        with pytest.warns(OpInterceptWarning, match=f'a hook read "{word}" of a backward call.*add "{word}" to') as log:
            train(model)
        where = (__file__, READ[word].__code__.co_firstlineno)
        assert [(warning.filename, warning.lineno) for warning in log] == [where]
        assert not any(found)
        found.clear()
        train(model)
    assert len(found) == 3
    assert all(each is not None for each in found)
    expected: list[Any] = []
    with intercept(lambda call: expected.append(READ[word](call)) if call.phase == "backward" else None, **engine):
        train(model)
    if word in ("module", "record"):
        assert found == expected


@pytest.mark.parametrize("engine", BELOW)
def test_a_hook_is_answered_what_another_hook_of_its_interceptor_declares(engine: dict[str, Any]) -> None:
    found = []
    with intercept([declared(lambda call: found.append(call.module), ()), hooks.Recorder()], **engine):
        train(nn.Sequential(nn.Linear(4, 4)))
    assert set(found) == {"0"}


def test_a_forward_call_answers_what_no_hook_declares() -> None:
    found = []
    with intercept(declared(lambda call: found.append((call.module, call.source, call.record().module)), ())):
        nn.Sequential(nn.Linear(4, 4))(torch.ones(3, 4))
    [(module, source, recorded)] = found
    assert (module, recorded) == ("0", "0")
    assert str(source).startswith("test_hook.py:")


def test_a_function_declares_what_it_reads_by_an_attribute() -> None:
    def hook(call: OpCall) -> None:
        assert call.call_site is None

    hook.reads = ()  # type: ignore[attr-defined]
    with intercept(hook):
        train(nn.Linear(4, 4))


def test_a_hook_that_is_registered_later_declares_what_it_reads_too() -> None:
    found = []
    with intercept(declared(lambda call: None, ())) as interceptor:
        interceptor.register(declared(lambda call: found.append(call.module), ("module",)))
        train(nn.Sequential(nn.Linear(4, 4)))
    assert set(found) == {"0"}


@pytest.mark.parametrize(
    ("several", "also", "expected"),
    [
        ([], (), ()),
        ([("module",), ("autocast",)], (), ("module", "autocast")),
        ([("forward",)], ("module",), ("forward", "module")),
        ([None], (), None),
        ([None, ("forward",)], ("autocast",), None),
        ([None, ("module",)], (), get_args(Read)),
        ([None], ("module",), get_args(Read)),
    ],
    ids=str,
)
def test_a_hook_made_of_others_reads_what_they_read(several: Any, also: Any, expected: Any) -> None:
    made_of = [declared(print, reads) for reads in several]
    assert reads_of(made_of, also) == (None if expected is None else set(expected))


def test_a_filter_by_module_declares_that_it_reads_names() -> None:
    quiet = declared(print, ())
    assert set(hooks.when(quiet, module="*").reads) == {"module"}  # type: ignore[union-attr]
    assert set(hooks.when(quiet, op="mm").reads) == set()  # type: ignore[union-attr]
    assert set(hooks.when(hooks.Recorder(), op="mm").reads) == {"record"}  # type: ignore[union-attr]
    assert not hasattr(hooks.when(quiet, predicate=bool), "reads")
    assert not hasattr(hooks.when(print, op="mm"), "reads")


def test_an_invalid_declaration_is_refused_behind_a_filter_too() -> None:
    with pytest.raises(TypeError, match="reads of a hook must be a collection, got 'module' on"):
        hooks.when(SimpleNamespace(post=print, reads="module"))


def test_a_hook_gets_only_the_gradients_that_it_wants() -> None:
    class Wants:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def wants_gradients(self, call: OpCall) -> bool:
            return call.op == "torch.nn.functional.linear"

        def backward(self, call: OpCall, grad_inputs: Any, grad_outputs: Any) -> None:
            self.calls.append(call.op)

    hook = Wants()
    with intercept([hook, hooks.when(hook, phase="forward")], level="function"):
        x = nn.Linear(4, 4)(torch.ones(3, 4))
        (x @ torch.ones(4, 4)).sum().backward()
    assert hook.calls == ["torch.nn.functional.linear"] * 2
