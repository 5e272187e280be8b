"""The page of `why`: in a real browser it shows the answer and what causes cost, and runs no text of a run."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, cast

import pytest
from browser import Browser, data_of, said_in, texts_of

from opintercept.runs.report import answered
from opintercept.runs.store.run import RunHead
from opintercept.runs.why.answer import Answer, Cause, Layer, Loss, Place

pytestmark = pytest.mark.slow

LOSS = Loss("nll_loss (train.py:44)", 2.0, 2.5, 0.2)


def cause(what: str, cost: float | None = None, module: str | None = "layers.1.norm", **more: Any) -> Cause:
    return Cause("argument", what, Place(7, "aten::add", module, "model.py:31 in f"), cost=cost, exact=True, **more)


def answer(*causes: Cause, **more: Any) -> Answer:
    a, b = (RunHead(name, (0,), cast(Any, None), True) for name in ("runs/a", "runs/b"))
    known: dict[str, Any] = {"verdict": "difference" if causes else "rounding", "same_program": True}
    known |= {"operators": "all", "joined": 9, "calls": 12, "upto": "head", "causes": causes}
    return Answer(a, b, **known | more)


def show(browser: Browser, path: Path, found: Answer, **options: Any) -> None:
    answered.write(path / "page.html", found)
    browser.open(path / "page.html", **options)
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")


def test_only_the_costliest_causes_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answered, "CAUSES", 2)
    data = data_of(answered.page(answer(cause("a", 0.1), cause("b", -0.3), cause("c", 0.2), loss=LOSS)))
    assert [each["what"] for each in data["causes"]] == ["B b", "B c"]
    assert data["notes"] == ["1 cause that cost less are left out"]


def test_layers_are_rows_of_their_own() -> None:
    found = answer(layers=(Layer("layers.0", 0.1, 0.2), Layer("layers.1", -0.3, -0.6)), loss=LOSS)
    data = data_of(answered.page(found))
    assert [(each["place"], each["cost"]) for each in data["causes"]] == [("layers.1", -0.3), ("layers.0", 0.1)]
    assert data["rounding"]


def test_numbers_that_json_lacks_are_left_out() -> None:
    data = data_of(answered.page(answer(cause("a", math.nan), loss=Loss("loss", math.inf, 1.0, math.nan))))
    assert (data["causes"][0]["cost"], data["loss"]) == (None, ["loss", None, 1.0, None, None])


@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_fits_and_follows_the_colour_scheme(browser: Browser, tmp_path: Path, width: int) -> None:
    long = cause("uses eps=0.01", 0.4, "x" * 99, also=(Place(1, "aten::mm", "y" * 99, None),), roundings=9.0)
    grounds = []
    for dark in (False, True):
        show(browser, tmp_path, answer(long, cause("b", -0.1), loss=LOSS), width=width, dark=dark)
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        right = "[...document.querySelectorAll('#causes-table td, .bar div')].map(e => e.getBoundingClientRect().right)"
        assert max(browser.evaluate(right)) <= width
        grounds.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark_ground = (sum(map(int, re.findall(r"\d+", ground))) for ground in grounds)
    assert (light > 3 * 200, dark_ground < 3 * 50) == (True, True)


def test_causes_have_bars_of_their_costs(browser: Browser, tmp_path: Path) -> None:
    other = cause("leaves out add", -0.1, others=("uses c=0",), after=(Place(1, "aten::mm", "up", None),))
    found = answer(cause("uses eps=0.01", 0.4), other, loss=LOSS, notes=("not compared: head",))
    show(browser, tmp_path, found)
    assert said_in(browser, "head") == found.sentence
    assert texts_of(browser, ".figure b") == ["2", "2.5", "+0.5", "9 of 12"]
    assert texts_of(browser, ".note") == ["not compared: head"]
    minus = "\u2212"
    assert texts_of(browser, "#causes-table td:not(.bar)") == [
        *("+0.4", "80.0 %"),
        *(f"{minus}0.1", f"{minus}20.0 %"),
        *("+0.2", "40.0 %"),
    ]
    assert texts_of(browser, "#causes-table dd") == ["up", "B uses c=0"]
    assert "no cause of its own" in texts_of(browser, "#causes-table th")[2]
    bars = browser.evaluate("[...document.querySelectorAll('.bar div')].map(e => [e.className, e.style.width])")
    assert bars == [["backward", "80%"], ["forward", "20%"], ["backward", "40%"]]


def test_without_a_loss_there_are_no_bars(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, answer(cause("uses eps=0.01")))
    assert texts_of(browser, "#causes-table td") == []
    show(browser, tmp_path, answer())
    assert said_in(browser, "causes-text") == "Nothing was found."
    assert not browser.evaluate("document.getElementById('causes').classList.contains('alarm')")


HOSTILE = [
    "</script><script>document.title='ran'</script>",
    "<img src=x onerror=\"document.title='ran'\">",
    "\"'><svg onload=document.title='ran'>`${document.title='ran'}`",
    "@@answer@@",
    "\x00\x1b[31m\r\n\u2028\u202e",
]


def test_texts_of_a_run_are_only_ever_shown(browser: Browser, tmp_path: Path) -> None:
    places = tuple(Place(1, text, text, text) for text in HOSTILE)
    names = tuple(HOSTILE)
    causes = [
        cause(text, 1.0, text, also=places, after=places, others=names, only_a=names, only_b=names) for text in HOSTILE
    ]
    answered.write(tmp_path / "page.html", answer(*causes, loss=Loss(HOSTILE[0], 1.0, 2.0), notes=names))
    text = (tmp_path / "page.html").read_text("utf-8")
    (tmp_path / "page.html").write_text(re.sub("<meta http-equiv[^>]*>", "", text), "utf-8")  # it must not rely on this
    browser.open(tmp_path / "page.html")
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.evaluate("document.title") == "opintercept why"
    assert HOSTILE[0] in browser.evaluate("document.body.innerText")
    assert browser.evaluate("document.querySelectorAll('img, svg').length") == 0
    assert not re.search("[\x00\x1b\u202e\u2028]", browser.evaluate("document.body.innerText"))
