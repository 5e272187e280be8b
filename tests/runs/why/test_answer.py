"""`Answer`: what is said of two programs, in sentences and in a table."""

from __future__ import annotations

import json
from typing import Any

import pytest
from made_runs import INFO

from opintercept.cli.terminal.layout import fitted
from opintercept.cli.terminal.output import finite_json
from opintercept.runs.store.run import RunHead, RunInfo
from opintercept.runs.why.answer import VERDICTS, Answer, Cause, CauseKind, Loss, Place

INFORMATION = RunInfo(**{name: value for name, value in INFO.items() if name != "schema"})
LOSS = Loss("nll_loss_forward in train.py:44", 2.0, 2.5)


def place(module: str | None, line: int | None = 31, op: str = "aten::add_", index: int = 7) -> Place:
    return Place(index, op, module, None if line is None else f"model.py:{line} in forward")


def cause(kind: CauseKind = "argument", what: str = "uses eps=0.01 where A uses 1e-05", **more: Any) -> Cause:
    known: dict[str, Any] = {"place": place("layers.1.norm"), "exact": True}
    return Cause(kind, what, **known | more)


def answer(*causes: Cause, **more: Any) -> Answer:
    a, b = (RunHead(f"runs/{name}", (0,), INFORMATION, True) for name in "ab")
    known: dict[str, Any] = {"verdict": "difference" if causes else "rounding", "same_program": True}
    known |= {"operators": "all"}
    counts: dict[str, Any] = {"joined": 9, "calls": 9, "upto": "head (model.py:40)", "causes": causes}
    return Answer(a, b, **known | counts | more)


def lines_of(found: Answer) -> list[str]:
    return [" ".join(line.split()) for line in str(found).splitlines()]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            cause(share=0.9968),
            "B uses eps=0.01 where A uses 1e-05, in layers.1.norm (model.py:31): 99.7 % of the difference of the loss.",
        ),
        (
            cause(also=(place("layers.2.norm"), place("layers.3.norm"))),
            "B uses eps=0.01 where A uses 1e-05, in layers.1.norm, layers.2.norm and layers.3.norm (model.py:31).",
        ),
        (
            cause(also=tuple(place(f"layers.{n}.norm") for n in range(2, 9))),
            "B uses eps=0.01 where A uses 1e-05, in layers.1.norm (model.py:31) and 7 other places.",
        ),
        (
            cause(what="uses alpha=1 where A uses 2", place=place(None), also=(place(None, index=8),) * 2),
            "B uses alpha=1 where A uses 2, in add_ (model.py:31), 3 times.",
        ),
        (cause(what="leaves out div", place=place("", op="aten::div")), "B leaves out div, at model.py:31."),
        (cause(place=place("0", None)), "B uses eps=0.01 where A uses 1e-05, in module 0."),
        (
            cause("weight", f"has another {'x' * 999} weight", place=place("_orig_mod.up")),
            f"B has another {'x' * 107}...{'x' * 111} weight, in up (model.py:31).",
        ),
    ],
    ids=["share", "three", "many", "often", "no module", "number", "long"],
)
def test_a_cause_is_a_sentence(found: Cause, sentence: str) -> None:
    assert answer(found).sentence == sentence


@pytest.mark.parametrize(
    ("more", "where"),
    [
        (
            {"after": (place("layers.0.q", 20, index=1),), "only_a": ("arange", "_pow", "_pow", "cos")},
            "between layers.0.q and layers.0.attn (model.py:20 to 31), where A computes arange, pow and cos",
        ),
        (
            {"after": (place("layers.0.k", 31, index=2), place("layers.0.q", 31, index=1)), "only_b": ("mul", "add")},
            "between layers.0.q, layers.0.k and layers.0.attn (model.py:31), where B computes mul and add",
        ),
        (
            {"only_a": ("silu", "mm"), "only_b": tuple(f"op{n}" for n in range(9))},
            "in layers.0.attn (model.py:31), where A computes silu and mm, and B computes op0, op1, op2, op3, op4, op5 "
            "and 3 others",
        ),
        (
            {"after": tuple(place(f"expert.{n}", None, index=n) for n in range(9))},
            "between expert.6, expert.7, expert.8 and layers.0.attn (model.py:31)",
        ),
        (
            {"after": (place("layers.0.q", 20),), "until": place("layers.0.o", 35)},
            "between layers.0.q and layers.0.o (model.py:20 to 35)",
        ),
        ({"after": (place("layers.0.attn", 20),)}, "in layers.0.attn (model.py:20 to 31)"),
        (
            {"after": (place("layers.0.attn", 31),), "place": place("layers.0.attn", 31)},
            "in layers.0.attn (model.py:31)",
        ),
    ],
    ids=["A", "B", "both", "many", "until", "own", "own line"],
)
def test_what_is_not_known_has_a_stretch(more: dict[str, Any], where: str) -> None:
    found = answer(cause("unknown", "", **{"place": place("layers.0.attn"), "exact": False} | more))
    assert found.sentence == f"I do not know: it arises {where}; no single change that was tried explains it."


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"verdict": "equal"}, "Nothing differs, up to and with head (model.py:40)."),
        ({}, "Nothing differs by more than rounding, up to and with head (model.py:40)."),
        (
            {"verdict": "not compared"},
            "I do not know: nothing differs by more than rounding, up to and with head (model.py:40), but other "
            "results of A have no counterpart in B.",
        ),
        (
            {"verdict": "not compared", "upto": ""},
            "I do not know: nothing could be compared: results of A have no counterpart in B.",
        ),
        (
            {
                "verdict": "coarser",
                "coarser": (
                    cause("dtype", "has its weight in bfloat16", also=(place("layers.2.up"), place("layers.3.up"))),
                    cause("dtype", "computes mm in bfloat16", place=place("head", 40)),
                ),
            },
            "B has its weight in bfloat16, in layers.1.norm (model.py:31) and 2 other places and computes mm in "
            "bfloat16, in head (model.py:40); nothing differs by more than that, up to and with head (model.py:40).",
        ),
    ],
    ids=["equal", "rounding", "part", "nothing", "coarser"],
)
def test_where_nobody_is_accused_the_answer_says_how_far_that_holds(more: dict[str, Any], sentence: str) -> None:
    found = answer(**more)
    assert found.sentence == sentence
    assert str(found).startswith(f"{sentence}\n\nA  runs/a")


def test_of_several_causes_the_first_line_has_the_largest() -> None:
    small = cause("weight", "has another weight", cost=0.1, share=0.2)
    large = cause(cost=0.4, share=0.8)
    assert answer(small, large).sentence.endswith(
        ": 80 % of the difference of the loss. It is the largest of 2 causes."
    )
    assert answer(small, large).rows() == (large, small)
    without = answer(*(cause("weight", what) for what in ("has another weight", "has another bias")))
    assert without.sentence == "B has another weight, in layers.1.norm (model.py:31). It is one of 2 causes."


@pytest.mark.parametrize(
    ("share", "text"),
    [(1.0, "100 %"), (-0.30049, "-30 %"), (-1e-9, "0 %"), (0.00123, "0.1 %"), (123.45678, "12,346 %")],
)
def test_shares_are_short(share: float, text: str) -> None:
    assert f": {text} of the difference of the loss." in answer(cause(share=share)).sentence


def test_without_a_loss_the_first_line_has_a_cause_that_is_known() -> None:
    unknown = cause("unknown", "", exact=False, after=(place("layers.0.up"),))
    found = answer(unknown, cause())
    assert found.sentence.startswith(
        "B uses eps=0.01 where A uses 1e-05, in layers.1.norm (model.py:31). It is one of 2"
    )
    assert "unknown: it begins after layers.0.up (model.py:31)" in str(found)
    assert answer(unknown).sentence.startswith("I do not know: it arises between layers.0.up and layers.1.norm")


def test_the_table_has_a_row_for_each_cause() -> None:
    unknown = cause("unknown", "", place=place(None, 50), exact=False, only_b=("mul",), cost=0.05, share=0.1)
    named = cause(cost=0.45, share=0.9, others=("uses momentum=0", "leaves out add"))
    found = answer(unknown, named, unknown, loss=LOSS, notes=("results of A without a counterpart in B: head",))
    assert lines_of(found)[5:] == [
        "where what B does otherwise how sure share",
        "layers.1.norm (model.py:31) B uses eps=0.01 where A uses 1e-05 reproduces B, as 2 other changes would 90 %",
        "add_ (model.py:50), 2 times unknown: B computes mul the place alone 20 %",
        "",
        "one program; B has the results of 9 of 9 calls of A",
        "loss: 2 in A, 2.5 in B, +0.5 (nll_loss_forward in train.py:44)",
        "layers.1.norm (model.py:31): or B uses momentum=0",
        "layers.1.norm (model.py:31): or B leaves out add",
        "results of A without a counterpart in B: head",
    ]


def test_of_two_programs_the_table_has_the_places_of_both() -> None:
    found = answer(cause(other=Place(3, "aten::mm", "qkv", "engine.py:9")), same_program=False, operators="products")
    assert lines_of(found)[5:7] == [
        "where in B what B does otherwise how sure",
        "layers.1.norm (model.py:31) qkv (engine.py:9) B uses eps=0.01 where A uses 1e-05 reproduces B",
    ]
    assert lines_of(found)[-1] == "two programs; B has the results of 9 of 9 products of A"


def test_costs_that_cancel_are_told() -> None:
    found = answer(cause(cost=2.0, share=4.0), cause("dtype", "rounds", cost=-1.0, share=-2.0), loss=LOSS)
    assert "costs of both signs cancel: their moduli are 6 times the difference" in str(found)
    rest = answer(cause(cost=0.1, share=0.2), loss=Loss("loss", 2.0, 2.5, 0.4))
    assert "of the difference, +0.4 has no cause of its own" in str(rest)
    assert "cancel" not in str(rest)


def test_a_narrow_terminal_shows_where_and_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    found = answer(cause(share=1.0, cost=0.5), loss=LOSS)
    table = next(part for part in found.parts() if not isinstance(part, str))
    assert [" ".join(line.split()) for line in fitted(table).splitlines()] == [
        "where what B does otherwise share",
        "layers.1.norm (model.py:31) B uses eps=0.01 where A uses 1e-05 100 %",
    ]


def test_names_of_a_run_cannot_harm_a_terminal() -> None:
    evil = "\x1b[2J"
    found = cause("unknown", f"has {evil}", place=Place(1, f"aten::{evil}", evil, evil), others=(evil,), only_a=(evil,))
    hostile = answer(
        found, replaced(found), upto=evil, loss=Loss(evil, 1.0, 2.0), rewritten=(found.place,), notes=(evil,)
    )
    assert "\x1b" not in str(hostile)


def replaced(found: Cause) -> Cause:
    return Cause("unknown", "", found.place, after=(found.place,), only_a=found.only_a)


def test_an_answer_is_plain_data_and_a_frame() -> None:
    found = answer(cause(share=0.9968, cost=0.5), loss=LOSS)
    plain = json.loads(json.dumps(finite_json(found.as_dict()), allow_nan=False))
    assert (plain["equal"], plain["sentence"]) == (False, found.sentence)
    assert plain["causes"][0]["place"]["module"] == "layers.1.norm"
    assert plain["causes"][0]["roundings"] is None
    assert list(found.to_pandas()["share"]) == [0.9968]


def test_rounding_alone_is_equal() -> None:
    assert {each: answer(verdict=each).equal for each in VERDICTS} == {
        "equal": True,
        "rounding": True,
        "coarser": False,
        "difference": False,
        "not compared": False,
    }
