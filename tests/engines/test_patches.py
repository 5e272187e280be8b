"""`Replacements` gives each attribute its own value again, also one that other code has put there meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opintercept._engines.patches import MISSING, Replaced, Replacements, Wrapped


def test_what_other_code_has_restored_is_replaced_for_the_next_user() -> None:
    owner = SimpleNamespace(value="its")
    found = [Replaced("value", vars(owner), "value", "its", "ours")]
    patches = Replacements(lambda: found)
    patches.enter(1)
    owner.value = "its"
    patches.enter(2)
    assert owner.value == "ours"
    patches.leave(2)
    assert owner.value == "ours"
    patches.leave(1)
    assert owner.value == "its"


def test_an_attribute_that_only_the_class_has_is_gone_from_the_object() -> None:
    owner = SimpleNamespace()
    found = [Replaced("value", vars(owner), "value", MISSING, "ours")]
    patches = Replacements(lambda: found)
    patches.enter(1)
    assert owner.value == "ours"
    patches.leave(1)
    assert vars(owner) == {}


def test_a_function_is_wrapped_once_and_again_if_other_code_replaces_it() -> None:
    class Owner:
        value: Any = "first"

    wrapped = Wrapped(lambda: [("value", Owner, "value", lambda original: f"around {original}")])
    (first,) = wrapped()
    first.assign(first.replacement)()
    assert wrapped() == [first]
    Owner.value = "other"
    (second,) = wrapped()
    assert (second.original, second.replacement) == ("other", "around other")
