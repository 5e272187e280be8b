"use strict";
// Shows what `explain` has found with the other scripts. Texts of a run are untrusted: they become text nodes.
(async () => {
  const { element } = plots;
  const { byId, counted, name, notes, percent, signed, total } = parts;
  const data = await parts.data();
  const { difference, shares } = data;
  const { all, draw: drawCosts } = costs(data);
  const path = errorPath(data, all);

  function head() {
    byId("title").replaceChildren("A: ", name(data.runs[0]), ", B: ", name(data.runs[1]), `. Explained: ${data.loss}.`);
    const explained = percent(total(shares.cost) + data.rest[1], difference) || "?";
    const figures = [
      ...data.losses.map((value, run) => [
        value === null ? "?" : String(Number(value.toPrecision(8))), `in ${"AB"[run]}`]),
      [signed(difference), "B − A"], [explained, `explained by ${counted(all.length + data.rest[0], "row")}`],
    ];
    byId("figures").replaceChildren(...figures.map(([value, text]) => element("div", { class: "figure" },
      element("b", {}, value), element("span", {}, text))));
    const [row] = all;
    const share = percent(shares.cost[row], difference);
    byId("costs-text").replaceChildren(...(row === undefined ? ["No call, weight or input differs."] : [
      "The largest row is ", name(shares.op[row]), " in ", name(shares.modules[shares.module[row]]),
      `, ${shares.cause[row]}: ${signed(shares.cost[row])}${share && `, ${share} of the difference`}.`]));
    notes("costs-notes", data.notes);
  }
  function draw() {
    drawCosts();
    path.draw();
  }
  head();
  draw();
  let width = byId("costs").clientWidth;
  new ResizeObserver(() => {
    if (byId("costs").clientWidth === width) return;
    width = byId("costs").clientWidth;
    draw();
  }).observe(byId("costs"));
  document.documentElement.dataset.drawn = "yes";
})();
