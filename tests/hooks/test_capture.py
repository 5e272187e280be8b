"""`Capture` keeps what the operator received and returned, within its budget."""

from __future__ import annotations

import gc
import json
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from compiler import BELOW, LEVELS
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opintercept import OpCall, OpInterceptError, OpInterceptWarning, hooks, intercept
from opintercept._values.copies import copied
from opintercept.hooks.capture import Captured


def capture_of(program: Callable[[], Any], feed: dict[str, Any] | None = None, **options: Any) -> hooks.Capture:
    capture = hooks.Capture(**options)
    with intercept(capture, **(feed or {})):
        program()
    return capture


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("feed", LEVELS)
def test_operands_and_output_are_kept_with_their_call(feed: dict[str, Any]) -> None:
    bias, lhs, rhs = torch.randn(4), torch.randn(2, 3), torch.randn(3, 4)
    capture = hooks.Capture(of=("output", "rhs", "lhs", "bias"))
    with intercept(capture, **feed) as interceptor:
        torch.mm(lhs, rhs)
        interceptor.step()
        output = torch.addmm(bias, lhs, rhs)
    assert [(e.index, e.step, e.role) for e in capture.entries] == [
        *((0, 0, role) for role in ("lhs", "rhs", "output")),
        *((1, 1, role) for role in ("lhs", "rhs", "bias", "output")),
    ]
    for entry, tensor in zip(capture.entries[3:], (lhs, rhs, bias, output), strict=True):
        assert torch.equal(entry.tensor, tensor)
        assert entry.tensor.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert (entry.module, entry.aliases, entry.phase, entry.forward) == ("", ("",), "forward", None)
        assert entry.op.endswith("addmm")
        assert entry.path is None


@pytest.mark.parametrize("feed", LEVELS)
@pytest.mark.parametrize(
    "overwrite",
    [
        pytest.param(lambda a, b, c: c.addmm_(a, b), id="in place"),
        pytest.param(lambda a, b, c: torch.addmm(c, a, b, out=c), id="out= is the bias"),
        pytest.param(lambda a, b, c: torch.mm(a, b, out=a), id="out= is the lhs"),
        pytest.param(lambda a, b, c: torch.mm(a, b, out=b), id="out= is the rhs"),
    ],
)
def test_operands_are_those_from_before_they_were_overwritten(
    overwrite: Callable[..., Tensor], feed: dict[str, Any]
) -> None:
    given = {role: torch.randn(3, 3) for role in ("lhs", "rhs", "bias")}
    a, b, c = (tensor.clone() for tensor in given.values())
    capture = capture_of(lambda: overwrite(a, b, c).add_(1), feed, of=("lhs", "rhs", "bias"))
    assert capture.entries
    for entry in capture.entries:
        assert torch.equal(entry.tensor, given[entry.role])


def test_outputs_are_those_from_before_the_program_overwrote_them() -> None:
    expected = torch.full((2, 2), 3.0)
    capture = capture_of(lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 2)).zero_(), of="output")
    assert torch.equal(capture.entries[0].tensor, expected)


def test_it_sees_the_operands_as_earlier_hooks_left_them() -> None:
    class Plus:
        def pre(self, call: OpCall) -> Any:
            assert call.lhs is not None
            return call.replace(lhs=call.lhs + 1)

        def post(self, call: OpCall) -> Any:
            return call.output + 1

    first, second, third = (hooks.Capture() for _ in range(3))
    with intercept([first, Plus(), second, Plus(), third]):
        torch.mm(torch.zeros(1, 1), torch.ones(1, 1))
    values = [[entry.tensor.item() for entry in capture.entries] for capture in (first, second, third)]
    assert values == [[0, 2], [1, 3], [2, 4]]


def test_operands_of_a_call_that_raised_are_kept() -> None:
    capture = hooks.Capture()
    with intercept(capture), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert [(e.role, e.tensor.shape) for e in capture.entries] == [("lhs", (2, 3))]


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))


@pytest.mark.parametrize("feed", BELOW)
def test_gradients_are_those_of_autograd_with_the_module_of_the_forward_call(feed: dict[str, Any]) -> None:
    model, x = small_model(), torch.randn(5, 3, requires_grad=True)
    inputs: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):

            def note(layer: nn.Module, gradients: Any, _: Any, name: str = name) -> None:
                inputs[name] = gradients[0]

            layer.register_full_backward_hook(note)
    capture = hooks.Capture(of=("output", "grad_lhs", "grad_rhs"))
    with intercept(capture, **feed):
        model(x).sum().backward()
    assert [e.role for e in capture.entries].count("output") == 3
    for name in ("0", "1.0", "2"):
        (output,) = capture[name, "output"]
        (grad_lhs,) = capture[name, "grad_lhs"]
        (grad_rhs,) = capture[name, "grad_rhs"]
        assert grad_lhs.forward == grad_rhs.forward == output.index
        assert (output.phase, grad_lhs.phase) == ("forward", "backward")
        assert torch.equal(grad_lhs.tensor, inputs[name])
        assert torch.equal(grad_rhs.tensor.T, model.get_submodule(name).weight.grad)  # type: ignore[arg-type]


def test_backward_calls_are_kept_unless_gradients_are_asked_for() -> None:
    def program() -> None:
        small_model()(torch.randn(5, 3)).sum().backward()

    phases = [[e.phase for e in capture_of(program, of=of).entries] for of in (("output",), ("output", "grad_rhs"))]
    assert [p.count("forward") for p in phases] == [3, 3]
    assert [p.count("backward") for p in phases] == [5, 3]
    roles = [(e.phase, e.role) for e in capture_of(program, of=("lhs", "grad_rhs")).entries]
    assert sorted(roles) == [("backward", "grad_rhs")] * 3 + [("forward", "lhs")] * 3


def test_gradients_at_function_level_are_refused_at_once() -> None:
    for hook in (hooks.Capture(of="grad_lhs"), hooks.when(hooks.Capture(of=("lhs", "grad_rhs")), op="mm")):
        with pytest.raises(ValueError, match=r"Capture.* works at level='dispatch' only, got"):
            intercept(hook, level="function")


def test_recomputed_calls_have_their_own_phase() -> None:
    model, x = small_model(), torch.randn(5, 3, requires_grad=True)
    capture = capture_of(lambda: checkpoint(model, x, use_reentrant=True).sum().backward(), of=("output", "grad_rhs"))
    for name in ("0", "1.0", "2"):
        first, again = capture[name, "output"]
        assert (first.phase, again.phase) == ("forward", "recompute")
        assert torch.equal(first.tensor, again.tensor)
        [gradient] = capture[name, "grad_rhs"]
        assert gradient.forward == again.index


def test_when_chooses_the_calls() -> None:
    capture = hooks.Capture()
    with intercept(hooks.when(capture, module="1*", phase="forward")):
        small_model()(torch.randn(5, 3)).sum().backward()
    assert [(e.module, e.role) for e in capture.entries] == [("1.0", "lhs"), ("1.0", "output")]


@pytest.mark.parametrize(
    "index", [0, -1, slice(None, 2), ..., (slice(None), 0), (..., slice(1, None)), (None, 1), ()], ids=repr
)
def test_index_keeps_only_that_part(index: Any) -> None:
    lhs = torch.randn(4, 3)
    capture = capture_of(lambda: torch.mm(lhs, torch.ones(3, 2)), of="lhs", index=index)
    [entry] = capture.entries
    assert torch.equal(entry.tensor, lhs[index])
    assert entry.nbytes == entry.tensor.untyped_storage().nbytes() == lhs[index].numel() * 4


def test_the_error_of_an_index_that_does_not_fit_names_the_call() -> None:
    capture = hooks.Capture(index=(0, 0, 0))
    with intercept(capture), pytest.raises(IndexError, match="too many indices") as raised:
        torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    assert "pre hook Capture(0 tensors, 0 bytes) on call 0" in raised.value.__notes__[0]
    assert capture.nbytes == 0


@pytest.mark.parametrize("lhs", [torch.randn(50, 3), torch.randn(3, 50).T, torch.randn(1, 3).expand(50, 3)])
def test_a_sample_is_drawn_from_the_tensor(lhs: Tensor) -> None:
    [entry] = capture_of(lambda: torch.mm(lhs, torch.ones(3, 2)), of="lhs", sample=20, index=slice(25)).entries
    assert entry.tensor.shape == (20,)
    assert set(entry.tensor.tolist()) <= set(lhs[:25].flatten().tolist())
    assert entry.nbytes == 80


def test_a_sample_has_its_own_seeded_generator() -> None:
    lhs = torch.arange(3000.0).view(1000, 3)

    def program() -> None:
        torch.mm(lhs, torch.ones(3, 2)), torch.mm(lhs, torch.ones(3, 2))

    before = torch.get_rng_state()
    samples = [
        [tuple(e.tensor.tolist()) for e in capture_of(program, of="lhs", sample=9, seed=s).entries] for s in (5, 5, 6)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert samples[0] == samples[1]
    assert len({*samples[0], *samples[2]}) == 4


def test_a_sample_of_a_scalar_and_of_an_empty_tensor() -> None:
    def program() -> None:
        torch.dot(torch.ones(2), torch.ones(2))
        torch.mm(torch.ones(0, 2), torch.ones(2, 3))

    capture = capture_of(program, of="output", sample=3)
    assert [e.tensor.tolist() for e in capture.entries] == [[2.0, 2.0, 2.0], []]


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    transpose=st.booleans(),
)
def test_bytes_are_those_of_the_copies(shapes: list[tuple[int, int, int]], dtype: Any, transpose: bool) -> None:
    def program() -> None:
        for m, k, n in shapes:
            lhs = torch.ones(k, m, dtype=dtype).T if transpose else torch.ones(1, k, dtype=dtype).expand(m, k)
            torch.mm(lhs, torch.ones(k, n, dtype=dtype))

    capture = capture_of(program, of=("lhs", "rhs", "output"))
    assert [e.nbytes for e in capture.entries] == [e.tensor.untyped_storage().nbytes() for e in capture.entries]
    assert capture.nbytes == sum(m * k + k * n + m * n for m, k, n in shapes) * dtype.itemsize


def outputs_of(sizes: list[int], capture: hooks.Capture) -> None:
    """Run one call for each size, whose output has that many bytes, a multiple of 4."""
    with intercept(capture):
        for size in sizes:
            torch.mm(torch.ones(1, 1), torch.ones(1, size // 4))
            assert capture.max_bytes is not None
            assert capture.nbytes == sum(e.nbytes for e in capture.entries) <= capture.max_bytes


SIZES = st.lists(st.integers(1, 12).map(lambda n: 4 * n), max_size=12)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, cap=st.integers(1, 60))
def test_stop_keeps_tensors_until_one_does_not_fit_and_warns_once(sizes: list[int], cap: int) -> None:
    fit = next((i for i in range(len(sizes)) if sum(sizes[: i + 1]) > cap), len(sizes))
    capture = hooks.Capture(of="output", max_bytes=cap)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs_of(sizes, capture)
    assert [e.nbytes for e in capture.entries] == sizes[:fit]
    assert [w.category for w in caught] == [OpInterceptWarning] * (fit < len(sizes))


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, cap=st.integers(1, 60))
def test_drop_keeps_the_latest_that_fit(sizes: list[int], cap: int) -> None:
    kept: list[int] = []
    dropped = 0
    for index, size in enumerate(sizes):
        if size <= cap:
            kept.append(index)
        while sum(sizes[i] for i in kept) > cap:
            del kept[0]
    dropped = len(sizes) - len(kept)
    capture = hooks.Capture(of="output", max_bytes=cap, when_full="drop")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs_of(sizes, capture)
    assert [e.index for e in capture.entries] == kept
    assert capture.dropped == dropped
    assert [w.category for w in caught] == [OpInterceptWarning] * any(size > cap for size in sizes)


def test_a_tensor_that_does_not_fit_is_named() -> None:
    stopped = hooks.Capture(of="output", max_bytes=70)
    with pytest.warns(
        OpInterceptWarning,
        match=r"stopped: the output of call 1, aten::mm\(float32\[1, 1\], float32\[1, 8\]\), takes 32 bytes and does "
        r"not fit into max_bytes=70, of which 64 are in use; raise max_bytes, or .* or when_full='drop'",
    ):
        outputs_of([64, 32], stopped)
    left_out = hooks.Capture(of="output", max_bytes=70, when_full="drop")
    with pytest.warns(OpInterceptWarning, match=r"Capture left out a tensor: .* takes 72 bytes .* max_bytes=70"):
        outputs_of([64, 72, 72], left_out)
    assert [e.index for e in left_out.entries] == [0]
    raising = hooks.Capture(of="output", max_bytes=70, when_full="raise")
    for _ in range(2):
        with pytest.raises(OpInterceptError, match=r"takes (72|64) bytes and does not fit into max_bytes=70, of which"):
            outputs_of([64, 72], raising)
        assert [e.nbytes for e in raising.entries] == [64]


def test_clear_forgets_and_starts_again() -> None:
    capture = hooks.Capture(of="output", max_bytes=64)
    for _ in range(2):
        with pytest.warns(OpInterceptWarning, match="Capture stopped"):
            outputs_of([64, 4, 4], capture)
        capture.clear()
        assert (capture.entries, capture.nbytes, repr(capture)) == ([], 0, "Capture(0 tensors, 0 bytes)")
    outputs_of([4], capture)
    assert repr(capture) == "Capture(1 tensors, 4 bytes)"


@pytest.fixture(scope="module")
def named() -> hooks.Capture:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = small_model()
            self.decoder = self.encoder.get_submodule("2")

        def forward(self, x: Tensor) -> Any:
            return self.encoder(x)

    return capture_of(lambda: Tied()(torch.randn(5, 3)))


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("encoder.0", [("encoder.0", "lhs"), ("encoder.0", "output")]),
        ("encoder.1*", [("encoder.1.0", "lhs"), ("encoder.1.0", "output")]),
        (("*", "output"), [("encoder.0", "output"), ("encoder.1.0", "output"), ("encoder.2", "output")]),
        (("decoder", "lhs"), [("encoder.2", "lhs")]),
        ("encoder.[!01]", [("encoder.2", "lhs"), ("encoder.2", "output")]),
    ],
    ids=["name", "glob", "role", "other name", "set"],
)
def test_lookup_by_name_or_glob(named: hooks.Capture, key: Any, found: list[tuple[str, str]]) -> None:
    assert [(e.module, e.role) for e in named[key]] == found


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ("encodr.0", KeyError, r"matches 'encodr\.0'; tensors were kept from 'encoder\.0'"),
        ("Encoder.0", KeyError, r"matches 'Encoder\.0'; tensors were kept from 'encoder\.0'"),
        ("nothing", KeyError, r"matches 'nothing'; tensors were kept from 'encoder\.0', 'encoder\.1\.0', 'encoder\.2'"),
        (("encoder.0", "rhs"), KeyError, r"matches \('encoder\.0', 'rhs'\)"),
        (("encoder.0", "weight"), ValueError, "of must be one or more of 'lhs', .* got 'weight'"),
        (0, TypeError, "a key must be a module's name or a glob, optionally with a role, got 0"),
        (("a", "lhs", "b"), TypeError, "a key must be a module's name or a glob, optionally with a role"),
    ],
    ids=["close", "case", "far", "role", "no role", "number", "three"],
)
def test_a_lookup_that_finds_nothing_says_what_was_kept(
    named: hooks.Capture, key: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        named[key]


def test_lookup_in_an_empty_capture() -> None:
    with pytest.raises(KeyError, match=r"no tensor was kept that matches 'fc\*'; nothing was kept"):
        hooks.Capture()["fc*"]
    with pytest.raises(TypeError, match="a key must be a module's name"):
        list(hooks.Capture())  # type: ignore[call-overload]


def test_the_repr_of_an_entry_says_what_it_is(tmp_path: Path) -> None:
    def program() -> None:
        small_model()(torch.randn(5, 3))

    entry = capture_of(program, of="output")["0"][0]
    assert repr(entry) == "<output of call 0, aten::addmm in 0: float32[5, 4]>"
    entry = capture_of(program, of="output", to="disk", folder=tmp_path)["0"][0]
    assert repr(entry) == f"<output of call 0, aten::addmm in 0: {tmp_path / '00000000-output.safetensors'}>"


def test_a_file_has_the_values_and_says_where_they_come_from(tmp_path: Path) -> None:
    model, x = small_model(), torch.randn(5, 3)
    folder, of = tmp_path / "a" / "b", ("lhs", "output", "grad_rhs")
    memory = capture_of(lambda: model(x).sum().backward(), of=of)
    disk = capture_of(lambda: model(x).sum().backward(), of=of, to="disk", folder=folder)
    files = sorted(folder.iterdir())
    assert [e.path for e in disk.entries] == files
    assert disk.nbytes == sum(file.stat().st_size for file in files)
    for kept, stored in zip(memory.entries, disk.entries, strict=True):
        assert same_bits(kept.tensor, stored.tensor)
        which = {name: getattr(stored, name) for name in ("module", "op", "phase", "index", "step", "forward")}
        assert {name: getattr(kept, name) for name in which} == which
        with safe_open(str(stored.path), "pt") as file:
            assert list(file.keys()) == [kept.role] == [stored.role]
            metadata = file.metadata()
        assert metadata["role"] == stored.role
        assert json.loads(metadata["call"]) == which


def test_files_go_with_their_entries(tmp_path: Path) -> None:
    capture = hooks.Capture(of="output", to="disk", folder=tmp_path, max_bytes=600, when_full="drop")
    with intercept(capture):
        for _ in range(9):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            on_disk = list(tmp_path.iterdir())
            assert capture.nbytes == sum(file.stat().st_size for file in on_disk) <= 600
            assert sorted(on_disk) == [e.path for e in capture.entries]
    assert capture.dropped > 0
    gone = capture.entries[-1]
    capture.clear()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match=r"-output\.safetensors"):
        _ = gone.tensor


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's device that is always full")
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_full_disk_leaves_no_partial_file(tmp_path: Path, on_error: Any) -> None:
    capture = hooks.Capture(of="output", to="disk", folder=tmp_path)
    with intercept(capture, on_error=on_error):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        kept = capture.nbytes
        (tmp_path / "00000001-output.part").symlink_to("/dev/full")
        if on_error == "raise":
            with pytest.raises(OSError, match="No space left on device") as raised:
                torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            assert "post hook Capture" in raised.value.__notes__[0]
        else:
            with pytest.warns(OpInterceptWarning, match="switched off a hook that raised OSError: .*No space left"):
                product = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            assert torch.equal(product, torch.full((2, 2), 2.0))
        assert [file.name for file in tmp_path.iterdir()] == ["00000000-output.safetensors"]
        assert (len(capture.entries), capture.nbytes) == (1, kept)
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert len(capture.entries) == (2 if on_error == "raise" else 1)


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        write(self, data[: len(data) // 2])
        raise KeyboardInterrupt("half way")

    monkeypatch.setattr(Path, "write_bytes", half)
    capture = hooks.Capture(of="output", to="disk", folder=tmp_path)
    with intercept(capture), pytest.raises(KeyboardInterrupt, match="half way"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert list(tmp_path.iterdir()) == []
    assert (capture.entries, capture.nbytes) == ([], 0)


@pytest.mark.parametrize(
    ("tensor", "shown"),
    [
        (torch.ones(2, 2, dtype=torch.complex128), r"of aten::mm, complex128\[2, 2\] with torch.strided"),
        (torch.eye(2).to_sparse(), r"of aten::mm, float32\[2, 2\] with torch.sparse_coo"),
    ],
    ids=["dtype", "layout"],
)
def test_a_tensor_that_safetensors_cannot_store_is_refused_before_a_file_is_made(
    tmp_path: Path, tensor: Tensor, shown: str
) -> None:
    capture = hooks.Capture(of="lhs", to="disk", folder=tmp_path)
    message = rf"safetensors cannot store the lhs {shown}.*to=.cpu"
    with intercept(capture), pytest.raises(OpInterceptError, match=message):
        torch.mm(tensor, torch.ones(2, 2, dtype=tensor.dtype))
    assert list(tmp_path.iterdir()) == []
    assert (capture.entries, capture.nbytes) == ([], 0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"of": "weight"}, ValueError, "of must be one or more of 'lhs', 'rhs', .*'grad_rhs', got 'weight'"),
        ({"of": ("lhs", "grad_output")}, ValueError, "of must be one or more of"),
        ({"of": ()}, ValueError, r"of must be one or more of .* got \(\)"),
        ({"of": 3}, TypeError, "of must be one or more of 'lhs', .* got 3"),
        ({"of": ["lhs", None]}, TypeError, "of must be one or more of"),
        ({"max_bytes": -1}, ValueError, "max_bytes must be a whole number of at least 1, got -1"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be a whole number of at least 1, got 0"),
        ({"max_bytes": 1e9}, ValueError, "max_bytes must be a whole number"),
        ({"max_bytes": True}, ValueError, "max_bytes must be a whole number"),
        ({"sample": -3}, ValueError, "sample must be a whole number of at least 1, got -3"),
        ({"seed": 1.5}, ValueError, r"seed must be a whole number from -2\*\*63 to 2\*\*64 - 1, got 1.5"),
        ({"seed": 2**64}, ValueError, "seed must be a whole number from"),
        ({"index": [0, 1]}, TypeError, r"index must be a number, a slice, ..., None or a tuple of them, got \[0, 1\]"),
        ({"index": (0, torch.tensor(1))}, TypeError, "index must be a number, a slice"),
        ({"to": "cuda"}, ValueError, "to must be one of 'cpu', 'same', 'disk', got 'cuda'"),
        ({"when_full": "ignore"}, ValueError, "when_full must be one of 'stop', 'drop', 'raise', got 'ignore'"),
        ({"to": "disk"}, ValueError, 'folder and to="disk" must be given together, got folder=None'),
        ({"folder": "new"}, ValueError, "folder and to=\"disk\" must be .* got folder='new' and to='cpu'"),
        ({"to": "disk", "folder": "old"}, ValueError, "folder must not contain safetensors files, got 'old'; choose"),
        ({"to": "disk", "folder": "new", "max_bytes": -1}, ValueError, "max_bytes must be a whole number"),
        ({"to": "disk", "folder": "file"}, FileExistsError, "file"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_before_anything_is_made(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old").mkdir()
    Path("old/00000000-lhs.safetensors").touch()
    Path("file").touch()
    with pytest.raises(error, match=message):
        hooks.Capture(**options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "old"]


def float8_product() -> Tensor:
    eight = torch.randn(16, 16).to(torch.float8_e4m3fn)
    return torch._scaled_mm(eight, eight.T, torch.tensor(1.0), torch.tensor(1.0), out_dtype=torch.bfloat16)


REACH: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: torch.randn(3, 4).bfloat16() @ torch.randn(4, 2).bfloat16(),
    "float16": lambda: torch.randn(3, 4).half() @ torch.randn(4, 2).half(),
    "float8": float8_product,
    "complex": lambda: torch.randn(3, 4, dtype=torch.complex64) @ torch.randn(4, 2, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(3, 4, dtype=torch.complex64) @ torch.randn(2, 4, dtype=torch.complex64).mH,
    "integer": lambda: torch.ones(3, 4, dtype=torch.int64) @ torch.ones(4, 2, dtype=torch.int64),
    "int8": lambda: torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)),
    "empty": lambda: torch.randn(0, 4) @ torch.randn(4, 2),
    "transposed": lambda: torch.randn(4, 3).T @ torch.randn(2, 4).T,
    "expanded": lambda: torch.randn(1, 4).expand(3, 4) @ torch.randn(4, 2),
    "strided": lambda: torch.randn(6, 8)[::2, ::2] @ torch.randn(4, 2),
    "sparse": lambda: torch.randn(3, 4).to_sparse() @ torch.randn(4, 2),
    "sparse csr": lambda: torch.randn(3, 4).to_sparse_csr() @ torch.randn(4, 2),
    "attention": lambda: nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8)),
}
if hasattr(torch, "_foreach_mm"):  # came with torch 2.13
    REACH["list"] = lambda: torch._foreach_mm([torch.randn(2, 3)], [torch.randn(3, 4)])


@pytest.mark.parametrize("to", ["cpu", "same"])
@pytest.mark.parametrize("program", REACH.values(), ids=list(REACH))
@pytest.mark.parametrize("feed", LEVELS)
def test_any_tensor_is_kept_as_it_was(program: Callable[[], Any], feed: dict[str, Any], to: Any) -> None:
    seen: list[Tensor] = []

    def look(call: OpCall) -> None:
        outputs = call.output if isinstance(call.output, (tuple, list)) else [call.output]
        assert call.lhs is not None
        seen.extend((call.lhs, outputs[0].resolve_conj()))

    capture = hooks.Capture(to=to)
    with intercept([capture, look], **feed):
        program()
    assert len(seen) == len(capture.entries) > 0
    for entry, tensor in zip(capture.entries, seen, strict=True):
        assert entry.tensor.layout == tensor.layout
        assert entry.tensor.device == tensor.device
        if tensor.layout == torch.strided:
            assert same_bits(entry.tensor, tensor)
        else:
            assert torch.equal(entry.tensor.to_dense(), tensor.to_dense())
        assert not entry.tensor.is_conj()


def test_bytes_of_a_sparse_tensor_include_its_indices() -> None:
    dense, rhs = torch.eye(4), torch.ones(4, 2)
    sizes = [
        [e.nbytes for e in capture_of(partial(torch.matmul, lhs, rhs), of="lhs").entries]
        for lhs in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc())
    ]
    # Values take 4 bytes. A value has two indices of 8 bytes, or one besides the five that mark rows or columns.
    assert sizes == [[4 * 4 + 4 * 16], [4 * 4 + 4 * 8 + 5 * 8], [4 * 4 + 4 * 8 + 5 * 8]]


@pytest.mark.parametrize("options", [{"index": 0}, {"sample": 3}], ids=str)
def test_index_and_sample_refuse_a_sparse_tensor(options: dict[str, Any]) -> None:
    capture = hooks.Capture(of="lhs", **options)
    with intercept(capture), pytest.raises(OpInterceptError, match="index and sample need dense tensors, got float32"):
        torch.eye(2).to_sparse() @ torch.ones(2, 2)


def test_strides_are_kept() -> None:
    [entry] = capture_of(lambda: torch.mm(torch.randn(4, 3).T, torch.ones(4, 2)), of="lhs").entries
    assert entry.tensor.stride() == (1, 3)


@pytest.mark.parametrize("feed", LEVELS)
def test_a_copy_made_in_inference_mode_can_be_used_with_autograd(feed: dict[str, Any]) -> None:
    with torch.inference_mode():
        capture = capture_of(lambda: torch.randn(2, 3) @ torch.randn(3, 2), feed)
    assert len(capture.entries) == 2
    for entry in capture.entries:
        weight = torch.ones(entry.tensor.shape[1], 1, requires_grad=True)
        (entry.tensor @ weight).sum().backward()
        assert torch.equal(weight.grad, entry.tensor.sum(0).view(-1, 1))  # type: ignore[arg-type]


def test_operands_under_autocast_are_kept_in_its_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        capture = capture_of(lambda: torch.randn(2, 3) @ torch.randn(3, 2))
    assert [e.tensor.dtype for e in capture.entries] == [torch.bfloat16] * 2


def test_training_under_a_capture_is_bit_equal_to_training_without() -> None:
    def train(*watch: Any) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        optimizer = torch.optim.AdamW(model.parameters())
        with intercept(watch):
            for _ in range(3):
                model(torch.randn(2, 5, 8)).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [*model.parameters(), torch.get_rng_state()]

    every = ("lhs", "rhs", "bias", "output", "grad_lhs", "grad_rhs")
    watch = [
        hooks.Capture(every),
        hooks.Capture(every[:4], sample=5, to="same"),
        hooks.Capture(every, max_bytes=4096, when_full="drop"),
    ]
    with_it, without = train(*watch), train()
    assert all(torch.equal(one, other) for one, other in zip(with_it, without, strict=True))
    assert watch[2].dropped > 0
    assert {e.role for e in watch[0].entries} == set(every)


def test_gradients_are_stolen_and_not_copied_beside_a_capture() -> None:
    # AccumulateGrad copies a gradient that anything else holds.
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(2, 64)
    made: list[int] = []
    with intercept([capture := hooks.Capture(), lambda call: made.append(call.output.data_ptr())]):
        (x @ weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == made[-1]
    assert {(e.tensor.requires_grad, e.tensor.grad_fn) for e in capture.entries} == {(False, None)}


def test_tensors_that_a_transform_has_wrapped_are_skipped() -> None:
    def row(x: Tensor) -> Tensor:
        return x @ torch.eye(3)

    x = torch.randn(2, 3)
    capture = hooks.Capture()
    with intercept(capture, level="function"):
        assert torch.equal(torch.func.vmap(row)(x), x)
        torch.func.grad(lambda x: row(x).sum())(x)
        torch.mm(torch.ones(2, 2, device="meta"), torch.ones(2, 2, device="meta"))
    assert capture.entries == []
    assert capture.skipped == 6
    [entry] = capture_of(lambda: torch.func.vmap(row)(x), of="output").entries
    assert torch.equal(entry.tensor.view(2, 3), x)


def test_threads_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(tensor: Tensor, to: Any) -> Any:
        time.sleep(0.01)  # lets the other threads ask for room
        return copied(tensor, to)

    monkeypatch.setattr("opintercept.hooks.capture.copied", slow)
    capture = hooks.Capture(of="output", max_bytes=100, when_full="drop")

    def work() -> None:
        for _ in range(5):
            torch.mm(torch.ones(1, 1), torch.ones(1, 10))
            assert capture.nbytes <= 100

    with intercept(capture, threads="all"), ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    assert capture.nbytes == sum(e.nbytes for e in capture.entries) == 80
    assert capture.dropped == 18


def resident() -> int:
    """Resident memory of the process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells a process its size")
@pytest.mark.parametrize("when_full", ["stop", "drop"])
@pytest.mark.slow
def test_memory_stays_flat_and_within_the_budget_over_many_calls(when_full: Any) -> None:
    capture = hooks.Capture(of=("lhs", "output", "grad_rhs"), max_bytes=64 * 1024, when_full=when_full)
    lhs, rhs = torch.randn(8, 16), torch.randn(16, 8, requires_grad=True)
    with intercept(capture), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = None
        for step in range(6000):
            (lhs @ rhs).sum().backward()
            assert capture.nbytes <= 64 * 1024
            if step == 1000:
                gc.collect()
                before = resident()
    assert before is not None
    # The last 10,000 calls output 6 MiB.
    assert resident() - before < 2**21
    assert capture.nbytes == sum(e.nbytes for e in capture.entries) > 60 * 1024
    assert len(caught) == (when_full == "stop")


class Ready:
    """Stands in for a CUDA event."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_reading_waits_for_the_copy() -> None:
    ready: Any = Ready()
    copy = torch.ones(2)
    entry = Captured("lhs", "", ("",), "aten::mm", "forward", 0, 0, None, 8, None, copy, ready)
    assert ready.waited == 0
    assert entry.tensor is copy
    assert ready.waited == 1


def test_calls_that_a_cuda_graph_captures_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call: Any = SimpleNamespace(lhs=SimpleNamespace(is_cuda=True), phase="forward")
    capture = hooks.Capture(of="lhs")
    with pytest.warns(OpInterceptWarning, match="Capture leaves out calls that a CUDA graph captures"):
        capture.pre(call)
    capture.pre(call)
    assert capture.entries == []


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def device() -> Iterator[torch.device]:
    yield torch.device("cuda")
    torch.cuda.synchronize()


@cuda
def test_copies_from_cuda_are_pinned_and_correct_while_the_device_goes_on(device: torch.device) -> None:
    capture = hooks.Capture(of=("lhs", "output"))
    lhs, rhs = torch.randn(2048, 2048, device=device), torch.randn(2048, 2048, device=device)
    expected = [lhs.cpu(), (lhs @ rhs).cpu()]
    with intercept(capture):
        output = lhs @ rhs
        lhs.zero_()
        output.zero_()
    assert all(e._tensor is not None and e._tensor.is_pinned() for e in capture.entries)
    assert all(torch.equal(e.tensor, x) for e, x in zip(capture.entries, expected, strict=True))


@cuda
def test_copies_from_cuda_do_not_wait_for_the_device(device: torch.device) -> None:
    capture = hooks.Capture(of="output")
    lhs = torch.randn(8, 8, device=device)
    with intercept(capture):
        lhs @ lhs  # allocates pinned memory
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        lhs @ lhs
        ready = capture.entries[-1]._ready
        assert ready is not None
        assert not ready.query()
    assert torch.equal(capture.entries[-1].tensor, (lhs @ lhs).cpu())


@cuda
def test_a_copy_from_cuda_in_inference_mode_can_be_used_with_autograd(device: torch.device) -> None:
    capture = hooks.Capture(of="output")
    with torch.inference_mode(), intercept(capture):
        torch.randn(3, 3, device=device) @ torch.randn(3, 3, device=device)
    assert not capture.entries[0].tensor.is_inference()


@cuda
def test_same_keeps_tensors_on_the_device_and_draws_samples_there(device: torch.device) -> None:
    lhs = torch.randn(8, 8, device=device)
    [entry] = capture_of(lambda: lhs @ lhs, of="lhs", to="same", sample=5).entries
    assert entry.tensor.is_cuda
    assert set(entry.tensor.tolist()) <= set(lhs.flatten().tolist())


@cuda
def test_a_cuda_graph_can_be_captured_under_the_hook(device: torch.device) -> None:
    lhs = torch.randn(8, 8, device=device)
    expected = lhs @ lhs
    graph = torch.cuda.CUDAGraph()
    capture = hooks.Capture()
    with intercept(capture), pytest.warns(OpInterceptWarning, match="a CUDA graph captures"), torch.cuda.graph(graph):
        product = lhs @ lhs
    graph.replay()
    assert torch.equal(product, expected)
    assert capture.entries == []


def test_a_tensor_that_there_is_no_memory_to_copy_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = hooks.Capture(("lhs", "output"), to="same")
    x = torch.ones(3, 4)
    with (
        pytest.warns(match="^Capture leaves out tensors for which the device has no memory") as told,
        intercept(capture),
    ):
        monkeypatch.setattr(Tensor, "clone", Mock(side_effect=torch.OutOfMemoryError))
        for _ in range(3):
            x @ x.mT
        monkeypatch.undo()
        x @ x.mT
    assert len(told) == 1
    assert [(entry.role, entry.index) for entry in capture.entries] == [("lhs", 3), ("output", 3)]
    assert (capture.skipped, capture.nbytes) == (6, 4 * (12 + 9))
