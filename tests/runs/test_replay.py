"""Recorded calls run again on their own: the same bits, other dtypes and flags, scripts, and false content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import plain, rewrite
from processes import run_python
from recorded import run_of

from opintercept import OpInterceptError, intercept, runs
from opintercept.cli import main
from opintercept.runs.record.description import FLAGS
from opintercept.runs.replay import replay, write_script


def record(folder: Path, program: Callable[[], Any], level: Any = "dispatch", tensors: Any = "full") -> runs.Run:
    return run_of(folder / "run", program, tensors, level=level)


def product() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(5, 7) @ torch.randn(7, 3)


def training() -> None:
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(3, 5, 16)
    torch.nn.Linear(16, 4)(attention(x, x, x, need_weights=False)[0]).sum().backward()


def in_place() -> None:
    torch.manual_seed(0)
    total = torch.randn(3, 3)
    total.addmm_(total.t().contiguous(), torch.randn(3, 3), beta=0.5, alpha=2)
    torch.baddbmm(torch.randn(1, 3, 3), torch.randn(2, 3, 4), torch.randn(2, 4, 3), out=torch.empty(2, 3, 3))


def views() -> None:
    torch.manual_seed(0)
    complex_ = torch.randn(4, 3, dtype=torch.complex64)
    torch.mm(complex_.mH, complex_)
    torch.mm(torch.randn(8, 10)[::2, 1::3], torch.randn(3, 4).T.contiguous().T)
    torch.bmm(torch.randn(3, 4).expand(2, 3, 4), torch.randn(2, 4, 3))


def masked() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 4, 8)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.randn(4, 4), scale=0.3)
    with torch.no_grad():  # otherwise it also returns what its backward pass needs
        torch.nn.LSTM(3, 5)(torch.randn(4, 2, 3), (torch.randn(1, 2, 5), torch.randn(1, 2, 5)))


@pytest.mark.parametrize("program", [product, training, in_place, views, masked])
def test_every_call_gives_the_same_bits_again(program: Callable[[], Any], tmp_path: Path) -> None:
    run = record(tmp_path, program)
    calls = list(run.calls())
    assert calls
    for call in calls:
        again = replay(run, call.record.index)
        assert again.equal, str(again)
        assert [output.role for output in again.outputs] == [role for role in call.tensors if role.startswith("output")]
        assert str(again).endswith("the same bit for bit")


def test_a_call_at_function_level_runs_again_as_it_was_called(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    run = record(tmp_path, lambda: layer(x), level="function")
    again = replay(run, 0)
    assert (again.func, again.equal) == ("torch.nn.functional.linear", True)


def test_another_dtype_shows_what_it_costs(tmp_path: Path) -> None:
    run = record(tmp_path, product)
    (output,) = replay(run, 0, dtype=torch.bfloat16).outputs
    torch.manual_seed(0)
    lhs, rhs = torch.randn(5, 7), torch.randn(7, 3)
    error = ((lhs.bfloat16() @ rhs.bfloat16()).double() - (lhs @ rhs).double()).abs().max()
    assert (output.equal, output.max_absolute) == (False, error.item())
    assert (output.recorded.dtype, output.now.dtype) == ("float32", "bfloat16")
    (wide,) = replay(run, 0, dtype=torch.float64).outputs
    assert 0 < wide.max_absolute < 1e-5 < output.max_absolute  # float32's rounding of sums of 7 products near 1


def test_the_numbers_of_a_replay_explain_themselves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    lhs, rhs = torch.randn(20, 300), torch.randn(300, 10)
    text = str(replay(record(tmp_path, lambda: lhs @ rhs), 0, dtype=torch.bfloat16))
    head, compared, *figures, good = text.splitlines()
    assert re.fullmatch(r"call 0 of rank 0: torch.ops.aten.mm.default \(forward\), run again in [\d.]+ ms", head)
    assert compared == "  output: bfloat16[20, 10] now, compared with the float32[20, 10] of the run"
    rows = {figure[4:22].strip(): (figure[22:35].strip(), figure[35:].strip()) for figure in figures}
    assert list(rows) == ["max absolute error", "max relative error", "max error in ulp", "cosine"]
    assert rows["max error in ulp"][1] == "in steps between numbers of bfloat16"
    assert rows["cosine"][1] == "of both as vectors; 1 if they point the same way"
    bound = re.match(
        r"    rounding to bfloat16 explains an absolute error up to about (\S+), in sums of 300 products", good
    )
    assert bound is not None
    error = (lhs.bfloat16().float() @ rhs.bfloat16().float() - lhs @ rhs).abs().max()
    assert float(rows["max absolute error"][0]) < float(bound[1]) < 20 * error.item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("draw", [torch.randn, torch.rand], ids=["randn", "rand"])
def test_the_error_that_rounding_explains_is_right(draw: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = [(8, 8, 8), (64, 1000, 16), (16, 4096, 16)]
    run = record(tmp_path, lambda: [draw(m, k) @ draw(k, n) for m, k, n in sizes])
    for index in range(len(sizes)):
        again = replay(run, index, dtype=dtype)
        bound = re.search(r"up to about (\S+),", str(again))
        assert bound is not None
        error = again.outputs[0].max_absolute
        assert error < float(bound[1]) < 100 * error  # it holds, and is not much too large


@pytest.mark.parametrize(
    ("name", "value"), [("mkldnn", "False"), ("threads", "1"), ("float32_matmul_precision", "high")]
)
def test_a_flag_holds_only_during_the_replay(name: str, value: str, tmp_path: Path) -> None:
    run = record(tmp_path, product)
    read = FLAGS[name][0]
    before, seen = read(), []
    with intercept(lambda call: seen.append(read())):
        replay(run, 0, flags={name: value})
    assert [str(flag) for flag in seen] == [value]
    assert read() == before


@pytest.mark.slow
def test_a_script_runs_the_call_with_only_torch_and_safetensors(tmp_path: Path) -> None:
    run = record(tmp_path, views)
    script = write_script(run, 0, tmp_path / "again")
    code = f"import runpy, sys; sys.modules['opintercept'] = None; runpy.run_path({script!r})"
    done = run_python("-c", code, check=True)
    assert done.stdout == "torch.complex64 [3, 3] NaN 0 Inf 0\n"


def test_the_command_prints_the_comparison_and_exits_with_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(record(tmp_path, product).path)
    assert main(["replay", path, "0"]) == 0
    assert "output float32[5, 3]: the same bit for bit" in capsys.readouterr().out
    assert main(["replay", path, "0", "--dtype", "bfloat16", "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert (plain["equal"], plain["outputs"][0]["now"]["dtype"]) == (False, "bfloat16")
    assert main(["replay", path, "0", "--script", str(tmp_path / "again.py")]) == 0
    assert capsys.readouterr().out == f"python {tmp_path / 'again.py'}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["7"], r"the run has no call of index 7; `opintercept show --calls` lists its calls"),
        (["0", "--rank", "3"], r"rank must be one of 0, got 3"),
        (["0", "--dtype", "nn"], r"--dtype must be a dtype of torch such as bfloat16, got 'nn'"),
        (["0", "--flag", "speed=11"], r"a flag must be one of float32_matmul_precision, .*, got 'speed'"),
        (["0", "--flag", "mkldnn=perhaps"], r"a flag must be True or False, got 'perhaps'"),
        (["0", "--device", "abacus"], r"device 'abacus' is not available: "),
    ],
    ids=["index", "rank", "dtype", "flag", "value", "device"],
)
def test_what_cannot_be_replayed_exits_with_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(record(tmp_path, product).path)
    assert main(["replay", path, *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_run_without_arguments_is_refused(tmp_path: Path) -> None:
    run = record(tmp_path, product, tensors="stats")
    with pytest.raises(OpInterceptError, match=r"as its arguments were not recorded; record with tensors="):
        replay(run, 0)


def test_a_call_of_a_full_run_whose_arguments_could_not_be_kept_says_why(tmp_path: Path) -> None:
    run = record(tmp_path, lambda: torch.eye(4).to_sparse() @ torch.ones(4, 4))
    with pytest.raises(OpInterceptError, match=r"were not recorded; one of them is .* that safetensors cannot hold"):
        replay(run, next(run.calls()).record.index)


def test_a_hostile_argument_is_printed_with_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    run = record(tmp_path, lambda: torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)), level="function")
    call = plain(run)[0]
    hostile = {"args": [*call["given"]["args"], "\x1b]0;owned\x07\x1b[2J"], "kwargs": {}}
    with pytest.raises(OpInterceptError, match=r" raised TypeError: ") as raised:
        replay(lie(run, given=hostile), 0)
    keyed = {"args": call["given"]["args"], "kwargs": {"\x1b[31mred\u202e": 1}}
    assert "\x1b" not in str(raised.value)
    assert main(["replay", str(lie(run, given=keyed).path), "0"]) == 2
    shown = capsys.readouterr().err
    assert "\\x1b[31mred\\u202e" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_replaying_a_call_that_raised_says_so(tmp_path: Path) -> None:
    def fail() -> None:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(2, 3) @ torch.ones(4, 5)

    run = record(tmp_path, fail)
    with pytest.raises(OpInterceptError, match=r"must have same reduction dim, .*; the recorded call raised, too"):
        replay(run, 0)


def lie(run: runs.Run, **changes: Any) -> runs.Run:
    """Rewrite the fields of a run's only call."""
    return rewrite(run.path, [plain(run)[0] | changes])


@pytest.mark.parametrize(
    "func",
    ["aten.add.Tensor", "os.system", "aten.mm.default; import os", "torch.load", "torch.hub.load", "__import__", ""],
)
def test_only_operators_on_the_list_are_called(func: str, tmp_path: Path) -> None:
    run = lie(record(tmp_path, product), func=func)
    for act in (lambda: replay(run, 0), lambda: write_script(run, 0, tmp_path / "again")):
        with pytest.raises(OpInterceptError, match=r" is not on the list of operators that may run again"):
            act()
    run = lie(run, op=func)
    with pytest.raises(OpInterceptError, match=r" is not on the list of operators that may run again"):
        replay(run, 0)
    assert not (tmp_path / "again.py").exists()


def tensor(run: runs.Run, shape: list[Any], stride: list[Any]) -> dict[str, Any]:
    return {"tensor": next(run.calls()).tensors["lhs"], "shape": shape, "stride": stride}


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ([5, 7], [2**39, 1]),
        ([5, 7], [1, -1]),
        ([2**20, 2**20], [1, 1]),
        ([5, 7], [1]),
        ([5, True], [7, 1]),
        ([5, 7], [0, 1]),
        ([5.0, 7], [7, 1]),
    ],
)
def test_false_strides_are_refused_before_memory_is_allocated(
    shape: list[Any], stride: list[Any], tmp_path: Path
) -> None:
    run = record(tmp_path, product)
    given = {"args": [tensor(run, shape, stride), tensor(run, [7, 5], [5, 1])], "kwargs": {}}
    with pytest.raises(OpInterceptError, match=r"a tensor's shape and strides must fit|a tensor cannot have strides"):
        replay(lie(run, given=given), 0)


def test_a_huge_output_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    run = record(tmp_path, lambda: torch.ones(70_000, 1) @ torch.ones(1, 2))
    lhs = tensor(run, [70_000, 1], [1, 1])
    run = lie(run, given={"args": [lhs, lhs | {"shape": [1, 70_000], "stride": [1, 1]}], "kwargs": {}})
    with pytest.raises(OpInterceptError, match=r"would have 19600000000 bytes, more than the limit of 4294967296"):
        replay(run, 0)


@pytest.mark.parametrize("value", [{"torch": "load"}, {"torch": "hub"}, {"eval": "1"}, {"tensor": "../../x"}, {}])
def test_only_plain_arguments_are_accepted(value: Any, tmp_path: Path) -> None:
    run = record(tmp_path, product)
    run = lie(run, given={"args": [value, value], "kwargs": {}})
    with pytest.raises(OpInterceptError, match=r"a recorded argument must be a tensor, a number or a dtype, got "):
        replay(run, 0)


def test_names_that_lead_out_of_the_run_are_refused(tmp_path: Path) -> None:
    run = record(tmp_path, product)
    value = {"tensor": "../0/0123456789abcdef-0", "shape": [5, 7], "stride": [7, 1]}
    run = lie(run, given={"args": [value, value], "kwargs": {}})
    with pytest.raises(OpInterceptError, match=r"a tensor must have a name such as .*, got '\.\./0/"):
        replay(run, 0)
