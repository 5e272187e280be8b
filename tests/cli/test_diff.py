"""`opintercept diff` and `ranks`: what they print, their exit status, and names that could harm a terminal."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import attention, call, chain, plain, ranked, rewrite, values, write

from opintercept import intercept, runs
from opintercept._reports.filters import NameFilter
from opintercept.cli import main

UNKNOWN = "no values were recorded; record both with `opintercept run --ops all --tensors full`, then:"
TIMES = "host time of the calls compared: 2.000 ms in A, 2.000 ms in B\n"  # of two calls that are made by hand


def size(name: str) -> float:
    return float(values(name)["max"])


def gap(name: str) -> float:
    return abs(size(name) - size(f"{name}'"))


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Compare two runs; returns the exit status and what was printed."""

    def shown(a: list[dict[str, Any]], b: list[dict[str, Any]], *options: str, **info: Any) -> tuple[int, str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write(folder / "a", a)
        write(folder / "b", b, **info)
        status = main(["diff", str(folder / "a"), str(folder / "b"), *options])
        out, err = capsys.readouterr()
        assert err == ""
        return status, out.replace(f"{folder}/", "")

    return shown


def test_equal_runs_exit_with_0(shown: Any) -> None:
    status, text = shown(chain("a", "b"), chain("a", "b"))
    assert status == 0
    assert text == (
        f"A  a  train.py\nB  b  train.py\n\n2 calls in A, 2 in B, 2 compared: 2 equal\n"
        f"no call differs: all are equal bit for bit\n\n{TIMES}"
    )


def test_text_says_where_two_runs_first_differ(shown: Any) -> None:
    a, b = chain("a", "b", "c"), chain("a", "b", "c", of="b")
    b.append(call("new", "x", "w", "y", shape=[9, 4], phase="backward", grad_of="rhs"))
    status, text = shown(a, b, flags={"threads": "4"})
    assert status == 1
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[3:] == [
        "the runs differ in A B",
        "flag threads 1 4",
        "",
        "3 calls in A, 4 in B, 3 compared: 1 equal, 1 changed operand, 1 inherited",
        "without a counterpart: 0 of A, 1 of B",
        "",
        "first divergence: call 1 of A and 1 of B, step 0, forward: mm in b",
        "at train.py:7 in forward",
        "changed operand: rhs differs, and no earlier difference explains it",
        "A B by max abs / max |A|",
        "lhs equal float32[4, 4] float32[4, 4] hash 0 0",
        f"rhs differs float32[4, 4] float32[4, 4] hash >= {gap('wb'):.3g} >= {gap('wb') / size('wb'):.3g}",
        f"output differs float32[4, 4] float32[4, 4] hash >= {gap('y1'):.3g} >= {gap('y1') / size('y1'):.3g}",
        "",
        "modules that differ pass first calls changed operand inherited max abs / max |A|",
        f"b forward 1 1 1 {gap('y1') / size('y1'):.3g}",
        f"c forward 2 1 1 {gap('y2') / size('y2'):.3g}",
        "",
        "run without a counterpart operator pass first calls",
        "B new mm backward of rhs 3 1",
        "",
        "host time of the calls compared: 3.000 ms in A, 3.000 ms in B",
        "",
        f"whether rounding explains it is unknown, as {UNKNOWN}",
        "opintercept why a b",
    ]


@pytest.mark.parametrize(
    ("b", "options", "said"),
    [
        (chain("a", "b", of="a"), [], "changed operand: rhs differs, and no earlier difference"),
        (
            [call("a", "x0", "wa", "other"), chain("a", "b")[1]],
            [],
            "added: the operands are equal but the output differs",
        ),
        (chain("a", "b", of="a"), ["--limit", "1"], "... and 1 more; a larger --limit shows them"),
        (chain("a"), [], "without a counterpart: 1 of A, 0 of B"),
        ([*chain("z"), *chain("a", "b", of="a")], [], "before it, only B has 1 call, the last: "),
        ([line | {"module": ""} for line in chain("a", "b")], [], "paired 2 under another module name"),
        (chain("a", "b", of="a"), ["--rtol", "10"], "judged equal without a hash of all bits: 2 by stat"),
        (chain("a", "b", of="a"), ["--atol", "10", "--no-tensors"], "no call differs"),
        (chain("a", "b", of="a"), ["--module", "b"], "1 compared: 1 inherited"),
        (chain("a", "b", of="b"), ["--op", "mm", "--phase", "forward"], "2 compared: 1 equal, 1 changed operand"),
        ([call(m, "x", "w", "y", kept=False) for m in "ab"], [], "2 not compared"),
        ([call(m, "x", "w", "y", kept=False) for m in "ab"], [], "\nno values were compared\n"),
    ],
    ids=range(12),
)
def test_text_contains(shown: Any, b: list[dict[str, Any]], options: list[str], said: str) -> None:
    status, text = shown(chain("a", "b"), b, *options)
    assert said in text
    assert status == (0 if "no call differs" in text or "no values were compared" in text else 1)


def test_no_more_is_said_to_be_equal_than_was_compared(shown: Any) -> None:
    calls = [*chain("a"), call("b", "x", "w", "y", kept=False)]
    status, text = shown(calls, calls)
    assert (status, text.splitlines()[-3]) == (0, "no call whose values were compared differs")


@pytest.mark.parametrize("tensors", ["stats", "full"])
def test_values_in_another_order_are_not_said_to_differ_by_0(tensors: Any, tmp_path: Path, capsys: Any) -> None:
    x, weight = torch.ones(2, 4), torch.arange(16.0).view(4, 4)
    for name, used in (("a", weight), ("b", weight.t())):
        with intercept(runs.RunRecorder(tmp_path / name, tensors)):
            x @ used
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "rhs has the same values in another order, as after a transpose: only the hashes differ" in lines
    if tensors == "stats":
        assert "lhs equal float32[2, 4] float32[2, 4] hash 0 0" in lines
        assert "rhs differs float32[4, 4] float32[4, 4] hash order order" in lines


def test_an_operand_is_called_what_its_operator_calls_it(shown: Any) -> None:
    b = attention(output="y'")
    b[0]["values"]["rhs"] = values("k'")
    assert "  changed operand: rhs (key) differs, and no earlier difference explains it\n" in shown(attention(), b)[1]


def test_a_weight_that_differs_by_a_rounding_is_not_said_to_be_more(shown: Any) -> None:
    near = values("wa") | {"hash": "0" * 16, "max": values("wa")["max"] * (1 + 2**-23)}
    text = shown(chain("a"), [call("a", "x0", near, values("y"))])[1]
    assert f"whether rounding explains it is unknown, as {UNKNOWN}\n  opintercept why a b\n" in text


def test_host_times_are_added_up_for_the_calls_that_are_chosen(shown: Any) -> None:
    a, b = chain("a", "b"), [line | {"elapsed": 0.5} for line in chain("a", "b")]
    assert "calls compared: 2.000 ms in A, 1.000 s in B" in shown(a, b)[1]
    assert "calls compared: 1.000 ms in A, 500.000 ms in B" in shown(a, b, "--module", "b")[1]
    b[1]["elapsed"] = None
    assert "host time" not in shown(a, b)[1]
    assert json.loads(shown(a, b, "--json")[1])["elapsed"] == [0.002, None]


def test_filters_are_asked_once_about_calls_that_look_alike(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    admits = NameFilter.__call__

    def asks(self: NameFilter, record: Any) -> bool:
        asked.append(record)
        return admits(self, record)

    monkeypatch.setattr(NameFilter, "__call__", asks)
    assert "50 compared: 50 equal" in shown(chain("a", "b") * 50, chain("a", "b") * 50, "--module", "b")[1]
    assert len(asked) == 4


def test_unclear_differences_and_errors_are_shown(shown: Any) -> None:
    random = {"dropout_p": 0.1}  # random numbers are not recorded
    a, b = attention(random), attention(random, "y'")
    assert "unclear: the recorded operands are equal, but" in shown(a, b)[1]
    raised = call("a", "x", "w", None, error="RuntimeError: no\nmemory")
    assert "  raised in B: RuntimeError: no\\nmemory\n" in shown([call("a", "x", "w", "y")], [raised])[1]


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({"is_causal": True}, {"is_causal": False}, ["changed argument: is_causal is True in A and False in B"]),
        ({"scale": None}, {"scale": 0.5}, ["changed argument: scale is None in A and 0.5 in B"]),
        ({}, {"name": "x\x1b"}, []),
        ({"name": "a"}, {"name": "x\x1b"}, ["changed argument: name is 'a' in A and 'x\\x1b' in B"]),
    ],
    ids=str,
)
def test_a_changed_argument_is_named(shown: Any, a: dict[str, Any], b: dict[str, Any], said: list[str]) -> None:
    status, text = shown(attention(a), attention(b, "y'" if said else "y"))
    assert status == bool(said)
    assert [line.strip() for line in text.splitlines() if "argument:" in line] == said
    assert "unclear" not in text


def test_a_changed_mask_is_named(shown: Any) -> None:
    text = shown(attention(attn_mask="m"), attention(output="y'", attn_mask="m'"))[1]
    assert "\n  changed operand: attn_mask differs, and no earlier difference explains it\n" in text
    assert re.search(r"^  attn_mask +differs +16 values +16 values +hash ", text, re.MULTILINE)
    for a, b, run in (
        (attention(), attention(output="z", attn_mask="m"), "B"),
        (attention(attn_mask="m"), attention(output="z"), "A"),
    ):
        text = shown(a, b)[1]
        assert f"  changed operand: attn_mask (only {run} has one) differs, and no earlier difference" in text


def test_operands_and_outputs_with_nan_are_named(shown: Any) -> None:
    b = chain("a")
    for role, counts in (("lhs", {"nan": 3}), ("rhs", {"nan": 1, "inf": 2}), ("output", {"nan": 16})):
        b[0]["values"][role] = values(f"{role}'") | counts
    text = shown(chain("a"), b)[1]
    assert "  NaN or Inf in operands: lhs of B (3 NaN of 16), rhs of B (1 NaN and 2 Inf of 16)\n" in text
    assert "  NaN or Inf in outputs: output of B (16 NaN of 16)\n" in text


def test_a_missing_rank_is_named_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = chain("a", "b")
    folders: dict[str, list[Any]] = {
        "four": [same] * 4,
        "two": [same, same, None, None],
        "empty": [same, [], same, same],
        "pair": [same] * 2,
        "one": [same],
    }
    for name, ranks in folders.items():
        ranked(tmp_path / name, *ranks)
    write(tmp_path / "none", [])
    write(tmp_path / "some", chain("a"))

    def printed(a: str, b: str) -> tuple[int, list[str]]:
        status = main(["diff", str(tmp_path / a), str(tmp_path / b)])
        lines = capsys.readouterr().out.splitlines()
        return status, [line for line in lines if re.match(r"ranks? \d|no call differs", line)]

    assert printed("four", "two") == (1, ["ranks 2, 3 are missing in B: 4 calls of A were not compared"])
    assert printed("two", "four") == (1, ["ranks 2, 3 are missing in A: 4 calls of B were not compared"])
    assert printed("four", "pair") == (1, ["ranks 2, 3 are missing in B: 4 calls of A were not compared"])
    assert printed("four", "empty") == (1, ["rank 1 has no calls in B: 2 calls of A were not compared"])
    assert printed("some", "none") == (1, ["rank 0 has no calls in B: 1 call of A was not compared"])
    lost = [f"ranks 2, 3 are missing in {run}, which had 4 processes" for run in "AB"]
    assert printed("two", "two") == (0, [*lost, "no call differs: all are equal bit for bit"])
    assert printed("four", "four") == (0, ["no call differs: all are equal bit for bit"])


def test_tables_fit_the_terminal(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"encoder.layers.{number}.attention.output.dense.projection" for number in range(2)]
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(chain(*names), chain(*names, of=names[0]))[1]
    rows = [line.split()[0] for line in text.splitlines() if " forward " in line and not line.startswith("first")]
    assert [row[:6] for row in rows] == ["e.l.0.", "e.l.1."]
    assert all(row.endswith(".projection") for row in rows)
    prose = ("first divergence", "  changed", "whether")
    tables = [line for line in text.splitlines()[4:] if not line.startswith(prose)]
    assert max(map(len, tables)) <= 80
    monkeypatch.delenv("COLUMNS")
    assert names[1] in shown(chain(*names), chain(*names, of=names[0]))[1]


def test_control_characters_in_names_are_escaped(shown: Any) -> None:
    name = "\x1b[2Jm\n\u202e[red]"
    a = [call(name, "x", "w", "y", source=name, op=f"aten::{name}")]
    status, text = shown(a, [call(name, "x", "w'", "y", op=f"aten::{name}")], argv=[name], flags={name: name})
    assert status == 1
    assert "\\x1b[2Jm\\n\\u202e[red]" in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_json_is_strict_and_complete(shown: Any) -> None:
    b = chain("a", "b", of="a")
    b[0]["values"]["output"]["nan"] = 1
    status, text = shown(chain("a", "b"), b, "--json")
    assert status == 1
    plain = json.loads(text, parse_constant=lambda constant: pytest.fail(constant))
    assert plain["a"]["path"] == "a" or plain["a"]["path"].endswith("/a")
    assert plain["equal"] is False
    assert (plain["kinds"], plain["pairs"]) == ({"changed operand": 1, "inherited": 1}, 2)
    assert plain["first"]["a"]["module"] == "a"
    assert plain["first"]["changed"] == ["rhs"]
    assert [role["max_absolute"] for role in plain["first"]["roles"]][2] is None  # infinite
    assert shown(chain("a"), chain("a"), "--json")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{a}", "{a}x"], r"a run must be a folder with run\.json"),
        (["{empty}", "{empty}"], r"the runs have no calls in common: 0 calls in '.*/empty', 0 in "),
        (["{a}", "{a}", "--op", "bmm"], r"--op 'bmm' matches no operator of the runs; did you mean 'mm'\?"),
        (["{a}", "{a}", "--op", "mm", "--op", "x"], r"--op 'x' matches no operator of the runs; `opinter"),
        (
            ["{a}", "{a}", "--module", "encodr.*"],
            r"--module 'encodr\.\*' matches no module of the runs; did you mean 'encoder\.0'",
        ),
        (["{a}", "{a}", "--phase", "backward"], r"the runs have no selected calls in common: 1 "),
    ],
    ids=["no run", "no calls", "no such operator", "one such operator", "no such module", "no such calls"],
)
def test_runs_that_cannot_be_compared_exit_with_2(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", chain("encoder.0"))
    write(tmp_path / "empty", [])
    assert main(["diff", *(argument.format(a=tmp_path / "a", empty=tmp_path / "empty") for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(f"opintercept diff: {message}", err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"the following arguments are required: a"),
        (["a"], r"the following arguments are required: b"),
        (["a", "b", "--rtol", "-1"], r"--rtol: must be a number of at least 0, got '-1'"),
        (["a", "b", "--atol", "nan"], r"--atol: must be a number of at least 0, got 'nan'"),
        (["a", "b", "--rtol", "x"], r"--rtol: must be a number of at least 0, got 'x'"),
        (["a", "b", "--limit", "0"], r"--limit: must be a whole number of at least 1, got '0'"),
        (["a", "b", "--phase", "sideways"], r"--phase: invalid choice: 'sideways'"),
    ],
    ids=" ".join,
)
def test_wrong_options_exit_with_2(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["diff", *options])
    assert re.search(message, capsys.readouterr().err)


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a", chain("a"))
    command = [sys.executable, "-m", "opintercept", "diff", str(tmp_path / "a"), str(tmp_path / "a"), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
    process.stderr.close()


def replicas(folder: Path, steps: int = 8, **changed: str) -> str:
    """A run of four ranks, in which rank 2 has other weights from step 5 on: those of the modules that are given."""
    ranks = []
    for rank in range(4):
        calls = []
        for step in range(steps):
            for module in ("up", "down"):
                other = changed.get(module, "") if rank == 2 and step >= 5 else ""
                calls.append(call(module, f"x{step}{rank}", f"{module}{step}{other}", f"y{step}{rank}", step=step))
        ranks.append(calls)
    ranked(folder, *ranks)
    return str(folder)


def test_ranks_that_agree_exit_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", replicas(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1:] == [
        "",
        "4 ranks, 64 calls in steps 0 to 7",
        "2 weights should be equal on ranks 0 to 3",
        "nothing diverged in what recorded calls read",
    ]
    assert err == ""


def test_the_rank_step_and_module_that_diverged_first_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = replicas(tmp_path, up="'", down="'")
    assert main(["ranks", run, "--limit", "1"]) == 1
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[4:]] == [
        "",
        "first: rank 2 diverged from ranks 0, 1, 3 at step 5, in the weight rhs",
        "call 10 of rank 2, forward: mm in up",
        "at train.py:7 in forward",
        "",
        "2 findings, of which the later ones may come from the first:",
        "module pass operator operand what step ranks times",
        "up forward mm rhs weight 5 2 1",
        "... and 1 more; a larger --limit shows them",
    ]
    assert main(["ranks", run, "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert [(each["module"], each["ranks"]) for each in plain["findings"]] == [("up", [2]), ("down", [2])]
    assert (plain["equal"], plain["found"], plain["run"]["ranks"]) == (False, 2, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("calls", "first: ranks 0 to 2 make 1 call and rank 3 makes 0 calls at step 4"),
        ("nan", "first: rank 3 has NaN or Inf at step 4 where ranks 0 to 2 have none"),
        ("huge", "first: rank 3 is an outlier at step 4: the output's root mean square is 1e+06, and 0."),
        ("cut", "not finished, as after a kill: rank 3 in step 4; what follows there was not counted"),
        ("empty", "rank 3 has no calls"),
    ],
)
def test_text_says_how_a_rank_diverged(
    tmp_path: Path, change: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas(tmp_path)
    path = tmp_path / "rank3"
    calls = plain(runs.open_run(path))
    if change == "calls":
        del calls[8]
    elif change in ("nan", "huge"):
        calls[8]["values"]["output"] |= {"nan": 1} if change == "nan" else {"rms": 1e6}
    elif change == "cut":
        del calls[9:]
    else:
        calls = []
    rewrite(path, calls)
    if change == "cut":
        info = path / "run.json"
        info.write_text(info.read_text().replace('"finished": true', '"finished": false'))
    assert main(["ranks", str(tmp_path)]) == (change != "cut")
    assert said in capsys.readouterr().out


def test_two_ranks_are_told_that_they_have_no_majority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = ([call("a", f"x{rank}", f"w{step}", "y", step=step) for step in range(3)] for rank in range(2))
    other[2] = call("a", "x1", "other", "y", step=2)
    ranked(tmp_path, one, other)
    assert main(["ranks", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "first: rank 1 diverged from rank 0 at step 2, in the weight rhs\n" in out
    assert "  no majority of ranks agrees, which would say which of them are wrong\n" in out
    assert "statistics were not compared: two ranks have no majority that says which of them is the outlier\n" in out


def test_the_ranks_of_a_run_of_one_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "one", chain("a"))
    assert main(["ranks", str(tmp_path / "one")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(r"comparing ranks needs a run of several, got one rank in .*; record a run under torchrun", err)


def test_results_print_what_the_commands_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(write(tmp_path / "one", chain("a", "b")).path), str(write(tmp_path / "two", chain("a", of="a")).path)
    ranks = replicas(tmp_path / "ranks", up="'", down="'")
    for arguments, found in (
        (["diff", a, b], runs.diff(runs.open_run(a), runs.open_run(b))),
        (["ranks", ranks], runs.diff_ranks(runs.open_run(ranks))),
    ):
        assert main(arguments) == 1
        text = str(found)
        assert capsys.readouterr().out == f"{text}\n"
        page = found._repr_html_()
        assert "<table" in page
        words = re.sub(r"<style>.*?</style>|<[^>]+>", " ", page).split()
        assert words == html.escape(text, quote=True).split()
