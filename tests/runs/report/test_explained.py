"""The page of `explain`: its figures add up and are bounded, and in a real browser it shows them, and runs no text."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any, cast

import pytest
from browser import Browser, choose, data_of, said_in, texts_of

from opintercept.runs.explain.explanation import Explanation, OutputDistance, Share
from opintercept.runs.report import explained
from opintercept.runs.store.run import RunHead

pytestmark = pytest.mark.slow


def share(index: int, cost: float, module: str | None = "layer", **changes: Any) -> Share:
    known: dict[str, Any] = {"op": "aten::mm", "source": "train.py:1 in forward", "dtype": "bfloat16"}
    known |= {"cause": "rounding in bfloat16", "roundings": 0.5}
    return Share(share=math.nan, cost=cost, index=index, module=module, **known | changes)


def distance(index: int, module: str | None, relative: float, op: str = "aten::mm") -> OutputDistance:
    return OutputDistance(index, op, module, "bfloat16", relative, relative * 256)


def made(shares: list[Share], path: list[OutputDistance] | None = None, **changes: Any) -> Explanation:
    a, b = (RunHead(name, (0,), cast(Any, None), True) for name in ("runs/a", "runs/b"))
    losses = (2.0, 2.0 + sum(each.cost for each in shares))
    known: dict[str, Any] = {"loss": "loss, nll_loss", "losses": losses, "by": "call", "path": tuple(path or ())}
    return Explanation(a, b, all=tuple(shares), **known | changes)


def test_the_smallest_costs_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explained, "SHARES", 3)
    data = data_of(explained.page(made([share(i, (-1.0) ** i * i) for i in range(10)])))
    assert (data["shares"]["index"], data["shares"]["cost"]) == ([7, 8, 9], [-7.0, 8.0, -9.0])
    assert data["rest"] == [7, 3.0]


MODULES = ["embed", "layers.0.a", "layers.0.a", "layers.0.b", "layers.0", "layers.1.a", "head"]


@pytest.mark.parametrize(
    ("most", "modules", "calls"),
    [
        (6, ["embed", "layers.0.a", "layers.0.b", "layers.0", "layers.1.a", "head"], [1, 2, 1, 1, 1, 1]),
        (4, ["embed", "layers.0", "layers.1", "head"], [1, 4, 1, 1]),
        (3, ["embed", "layers", "head"], [1, 5, 1]),
        (2, ["layers.0.b", "head"], [4, 3]),
    ],
)
def test_the_path_has_the_last_output_and_the_cost_of_each_stretch(
    monkeypatch: pytest.MonkeyPatch, most: int, modules: list[str], calls: list[int]
) -> None:
    monkeypatch.setattr(explained, "STRETCHES", most)
    path = [distance(10 * number, module, number / 8) for number, module in enumerate(MODULES)]
    shares = [share(index, 2.0**place) for place, index in enumerate((0, 5, 20, 45, 50, 99))]
    found = data_of(explained.page(made(shares, path)))["path"]
    assert (found["module"], found["calls"]) == (modules, calls)
    last = [sum(calls[: number + 1]) - 1 for number in range(len(calls))]
    assert found["relative"] == [number / 8 for number in last]
    # What is between two outputs belongs to the second, and what follows all of them to the last.
    ends = [10 * number for number in last[:-1]] + [100]
    upto = [sum(each.cost for each in shares if (each.index or 0) <= end) for end in ends]
    assert found["cost"] == [one - before for one, before in zip(upto, [0.0, *upto], strict=False)]


def test_a_long_explanation_makes_no_larger_page() -> None:
    draw = random.Random(0)

    def text() -> str:
        return f"{draw.getrandbits(4000):x}"

    shares = [share(i, draw.random(), text(), op=text(), source=text(), cause=text()) for i in range(5000)]
    path = [distance(i, text(), 0.5, text()) for i in range(5000)]
    assert len(explained.page(made(shares, path))) < 2e6


def test_numbers_that_json_lacks_are_left_out() -> None:
    data = data_of(explained.page(made([share(0, math.nan)], [distance(0, None, math.inf)], losses=(1.0, math.nan))))
    assert (data["losses"], data["difference"], data["shares"]["cost"]) == ([1.0, None], None, [None])
    assert (data["path"]["relative"], data["path"]["cost"]) == ([None], [None])


# In a browser.


def layered(**changes: Any) -> Explanation:
    """Six layers of two modules: the error comes in at the second layer and is gone at the end."""
    shares, path = [share(0, 0.125, "", cause="another input: weight")], [distance(0, "", 0.0)]
    for number in range(12):
        module = f"model.layers.{number // 2}.{('attn', 'mlp')[number % 2]}"
        path += [distance(10 * number + 10, module, 0.01 * (number > 1)), distance(10 * number + 11, module, 0.0)]
        path[-1] = distance(10 * number + 11, module, 0.02 * (number > 1) * (number < 11))
        shares.append(share(10 * number + 10, (-1.0) ** number * number / 4, module, op=f"aten::{'ab'[number % 2]}"))
    return made(shares, path, **changes)


def open_page(browser: Browser, path: Path, found: Explanation, **options: Any) -> None:
    explained.write(path / "page.html", found)
    browser.open(path / "page.html", **options)


def rows_of(browser: Browser) -> list[list[str]]:
    """The cells of the table of costs, without those of bars."""
    cells = "[...row.cells].filter(each => each.className !== 'bar').map(each => each.innerText.trim())"
    rows = browser.evaluate(f"[...document.querySelectorAll('#costs-table tr')].map(row => {cells})")
    return [[re.sub(r"^[▸▾]\s*", "", plain(cell)) for cell in row] for row in rows]


def plain(text: str) -> str:
    """A text with the minus that Python writes."""
    return text.replace("\u2212", "-")


def press(browser: Browser, button: str) -> None:
    browser.evaluate(
        "[...document.querySelectorAll('#costs button')]"
        f".find(each => /^[▸▾]?{button}$/.test(each.textContent)).click()"
    )


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_and_follows_the_colour_scheme(browser: Browser, tmp_path: Path, width: int) -> None:
    grounds = []
    for dark in (False, True):
        open_page(browser, tmp_path, layered(), width=width, dark=dark)
        press(browser, "Open all")
        browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        page = tmp_path / "page.html"
        assert [address for address in browser.requests if not address.startswith("data:")] == [page.as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        right = (
            "[...document.querySelectorAll('svg, #costs-table td, .bar div')].map(e => e.getBoundingClientRect().right)"
        )
        assert max(browser.evaluate(right)) <= width
        grounds.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark_ground = (sum(map(int, re.findall(r"\d+", ground))) for ground in grounds)
    assert light > 3 * 200
    assert dark_ground < 3 * 50


def test_bars_fold_down_to_causes_and_have_signs(browser: Browser, tmp_path: Path) -> None:
    open_page(browser, tmp_path, layered(losses=(2.0, 1.0)))
    assert [*map(plain, texts_of(browser, ".figure b"))] == ["2", "1", "-1", "137.5 %"]
    assert (
        "The largest row is b in model.layers.5.mlp, rounding in bfloat16: -2.75, 275.0 % of the difference."
        in plain(said_in(browser, "costs"))
    )
    press(browser, "Fold all")
    top = [["model.layers", "-1.5", "150.0 %"], ["(outside of modules)", "+0.125", "-12.5 %"]]
    rest = [["not explained", "+0.375", "-37.5 %"]]
    assert rows_of(browser) == top + rest
    press(browser, "model.layers")
    layers = [[str(layer), "-0.25", "25.0 %"] for layer in (5, 4, 3, 2, 1, 0)]
    assert rows_of(browser) == [top[0], *layers, top[1], *rest]
    assert browser.evaluate("document.activeElement.textContent") == "▾model.layers"
    press(browser, "5")
    press(browser, "attn")
    cause = ["a: rounding in bfloat16\ncall 110, train.py:1 in forward, 0.5 times its rounding", "+2.5", "-250.0 %"]
    below = [["mlp", "-2.75", "275.0 %"], ["attn", "+2.5", "-250.0 %"], cause]
    assert rows_of(browser)[1:5] == [layers[0], *below]
    bars = (
        "[...document.querySelectorAll('.bar div')].map(e => [e.className, e.offsetLeft, e.offsetLeft + e.offsetWidth])"
    )
    (_, _, zero), *_ = found = browser.evaluate(bars)
    for (kind, left, right), (_, cost, _) in zip(found, rows_of(browser), strict=True):
        assert kind == ("forward" if cost.startswith("-") else "backward")
        assert abs((right if kind == "forward" else left) - zero) <= 1
    choose(browser, "costs-by", "op")
    press(browser, "Fold all")
    assert [row[:2] for row in rows_of(browser)] == [
        ["b", "-9"],
        ["a", "+7.5"],
        ["mm", "+0.125"],
        ["not explained", "+0.375"],
    ]
    choose(browser, "costs-by", "call")
    assert [row[1] for row in rows_of(browser)[:3]] == ["-2.75", "+2.5", "-2.25"]
    assert "model.layers.5.mlp, call 120, train.py:1" in rows_of(browser)[0][0]


def test_the_smaller_of_many_modules_open_together(browser: Browser, tmp_path: Path) -> None:
    open_page(browser, tmp_path, made([share(i, i + 1.0, f"layers.{i}") for i in range(30)]))
    layers = [str(layer) for layer in reversed(range(30))]
    assert [row[0] for row in rows_of(browser)] == ["layers", *layers[:10], "20 smaller ones", "not explained"]
    assert rows_of(browser)[11][1] == "+210"
    press(browser, "20 smaller ones")
    assert [row[0] for row in rows_of(browser)][11:-1] == ["20 smaller ones", *layers[10:]]


def test_costs_that_the_page_has_no_room_for_are_a_row(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explained, "SHARES", 1)
    open_page(browser, tmp_path, made([share(i, i + 1.0) for i in range(3)], losses=(0.0, 8.0)))
    press(browser, "Fold all")
    rows = [["layer", "+3", "37.5 %"], ["2 smaller rows", "+3", "37.5 %"], ["not explained", "+2", "25.0 %"]]
    assert rows_of(browser) == rows
    assert texts_of(browser, ".figure")[3] == "75.0 %explained by 3 rows"


def test_what_was_confirmed_is_shown_beside_its_row(browser: Browser, tmp_path: Path) -> None:
    open_page(browser, tmp_path, layered(confirmed={12: -2.5}))
    choose(browser, "costs-by", "call")
    assert rows_of(browser)[0][0].endswith("0.5 times its rounding, confirmed -2.5")
    open_page(browser, tmp_path, made([share(0, 1.0, "1"), share(1, 2.0, "0")], confirmed={1: 2.5}))
    press(browser, "Fold all")
    assert [row[0] for row in rows_of(browser)] == ["0", "1", "not explained"]  # row 1 was, and not module 1
    open_page(browser, tmp_path, layered(by="module", confirmed={"model.layers.2.mlp": 0.5}))
    press(browser, "Open all")
    assert [row[:2] for row in rows_of(browser) if "confirmed" in row[0]] == [["mlp\nconfirmed +0.5", "-1.25"]]
    open_page(browser, tmp_path, layered(by="op", confirmed={"aten::b": -8.0}))
    press(browser, "Fold all")
    assert [row[0] for row in rows_of(browser)] == ["b\nconfirmed -8", "a", "mm", "not explained"]


def test_the_path_is_told_and_read_with_keys(browser: Browser, tmp_path: Path) -> None:
    open_page(browser, tmp_path, layered())
    assert said_in(browser, "path-text") == (
        "Outputs first differ in model.layers.1.attn, by 0.02 of A's norm (5.12 roundings of bfloat16), "
        "and nowhere more; and at the end not at all."
    )
    places = ["", *(f"model.layers.{layer}.{name}" for layer in range(6) for name in ("attn", "mlp"))]
    for plot in ("path-errors", "path-costs"):
        assert texts_of(browser, f"#{plot} .tick[text-anchor=middle]") == list("012345")
        key = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: '{}', bubbles: true}}))"
        browser.evaluate(f"document.querySelector('#{plot} svg').focus()")
        for pressed in ("Home", "ArrowRight", "ArrowRight", "ArrowRight"):
            browser.evaluate(key.format(pressed))
        assert plain(said_in(browser, "path-chosen")) == (
            "model.layers.1.attn, 2 calls\nits output differs by 0.02 of A's norm (5.12 roundings of bfloat16)\n"
            "cost +0.5; up to here +0.375, -27.3 % of the difference\nmost by a: rounding in bfloat16"
        )
        assert browser.evaluate(f"document.activeElement === document.querySelector('#{plot} svg')")
        browser.evaluate(key.format("End"))
        assert plain(said_in(browser, "path-chosen")).startswith(
            "model.layers.5.mlp, 2 calls\nits output is equal\ncost -2.75"
        )
    # Both plots have each module in the same place, and a table has all of them.
    left = "[...document.querySelectorAll('#{} .hit')].map(each => each.getAttribute('x'))"
    assert browser.evaluate(left.format("path-errors")) == browser.evaluate(left.format("path-costs"))
    assert texts_of(browser, "#path-table tbody th") == ["(outside of modules)", *places[1:]]
    assert browser.evaluate("document.querySelectorAll('#path-errors .dot').length") == 9


def test_runs_without_a_difference_or_a_number_make_a_page(browser: Browser, tmp_path: Path) -> None:
    open_page(browser, tmp_path, made([], [distance(0, "a", 0.0)]))
    assert "No call, weight or input differs." in said_in(browser, "costs")
    assert said_in(browser, "path-text") == "The outputs of all modules are equal."
    open_page(browser, tmp_path, made([]))
    assert browser.evaluate("document.getElementById('path').hidden")
    open_page(browser, tmp_path, made([share(0, math.nan)], [distance(0, "a", math.inf)], losses=(1.0, math.nan)))
    assert texts_of(browser, ".figure b") == ["1", "?", "?", "?"]
    assert rows_of(browser)[-1] == ["not explained", "?", ""]


HOSTILE = [
    "</script><script>document.title='ran'</script>",
    "<img src=x onerror=\"document.title='ran'\">",
    "\"'><svg onload=document.title='ran'>`${document.title='ran'}`",
    "@@costs@@",
    "__proto__",
    "\x00\x1b[31m\r\n\u2028\u202e",
]


def test_texts_of_a_run_are_only_ever_shown(browser: Browser, tmp_path: Path) -> None:
    shares = [share(i, i + 1.0, text, op=text, source=text, cause=text, dtype=text) for i, text in enumerate(HOSTILE)]
    path = [OutputDistance(i, text, text, text, 0.5, 2.0) for i, text in enumerate(HOSTILE)]
    explained.write(tmp_path / "page.html", made(shares, path, loss=HOSTILE[0], notes=tuple(HOSTILE)))
    text = (tmp_path / "page.html").read_text("utf-8")
    (tmp_path / "page.html").write_text(re.sub("<meta http-equiv[^>]*>", "", text), "utf-8")  # it must not rely on this
    browser.open(tmp_path / "page.html")
    for by in ("op", "line", "dtype", "call", "module"):
        choose(browser, "costs-by", by)
        press(browser, "Open all")
        assert len(rows_of(browser)) >= len(HOSTILE) + 1
    browser.evaluate(
        "document.querySelector('#path-costs .hit').dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    assert said_in(browser, "path-chosen").startswith(HOSTILE[0])
    assert browser.evaluate("document.title") == "opintercept explain"
    assert browser.evaluate("document.querySelectorAll('img, p svg, #costs-table svg').length") == 0
    assert not re.search("[\x00\x1b\u202e\u2028]", browser.evaluate("document.body.innerText"))
