"""Kernels in C++ note all operators on a GPU, but for those that are named here."""

from __future__ import annotations

import pytest
import sampled
from compiler import needs_compiler
from devices import on_a_device

pytestmark = [pytest.mark.slow, needs_compiler]
FORMS = ["full", "sparing"]
LISTS = {"aten::_foreach_mm"}  # its operands come in lists
# What they write to gets a size that depends on values, or on a storage.
SIZES = {"aten::linalg_lstsq.out", "aten::masked_select.out", "aten::nonzero.out"}
STORAGES = "aten::set.source_Storage", "aten::set_.source_Storage"


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = on_a_device("noted_operators.py", "table")
    return found


@pytest.fixture(scope="module")
def others() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = on_a_device("noted_operators.py", "others", *["--fewer"] * sampled.on)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_every_operator_of_the_table_is_noted(form: str, table: dict[str, dict[str, str]]) -> None:
    own = {name: how for name, how in table[form].items() if name.startswith("aten::")}
    unmade = {name for name, how in own.items() if how.startswith("no ")}
    assert {name for name, how in own.items() if how != "noted"} - unmade == LISTS
    assert all("quantized" in name for name in unmade)  # whose weights are packed into objects
    for kind in ("flash", "efficient", "cudnn", "fused"):
        parts = [name for name in own if name.startswith(f"aten::_scaled_dot_product_{kind}_attention")]
        assert len(parts) >= 2


def test_operators_of_other_libraries_are_shown_since_their_inner_steps_are(table: dict[str, dict[str, str]]) -> None:
    others = {how for name, how in table["sparing"].items() if not name.startswith("aten::")}
    assert {how for how in others if not how.startswith("no ")} == {"shown"}


@pytest.mark.parametrize("form", FORMS)
def test_every_other_operator_is_noted(form: str, others: dict[str, dict[str, str]]) -> None:
    shown = {name for name, how in others[form].items() if how == "shown"}
    sizes = {name for name in shown if not name.startswith(STORAGES)}
    assert sizes <= SIZES if sampled.on else sizes == SIZES
    noted = [name for name, how in others[form].items() if how == "noted"]
    # Makers of tensors cannot be watched, and some views not be tried.
    assert len(noted) > (1900 // 5 if sampled.on else 1900)


def test_a_weight_is_read_again_only_when_it_has_changed() -> None:
    assert on_a_device("device_weights.py") == {
        "Stats": [[0, 1, 3, 5], []],  # it sees the first call that is like others in Python
        "RunRecorder": [[0, 3, 5], []],
    }
