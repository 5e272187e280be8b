"use strict";
// Shows what `why` has found: the answer, and for each cause a bar of its cost. Texts of a run become text nodes.
(async () => {
  const { element } = plots;
  const { byId, digits, name, notes, least, most, percent, signed } = parts;
  const { answer, causes, equal, joined, loss, notes: told, programs, rounding, runs } = await parts.data();
  const number = (value) => (value === null ? "?" : String(Number(value.toPrecision(8))));
  const difference = loss && loss[3];

  byId("head").textContent = answer;
  byId("title").replaceChildren("A: ", name(runs[0]), ", B: ", name(runs[1]), `; ${programs}`);
  const figures = [
    ...(loss ? [[number(loss[1]), `${loss[0]} in A`], [number(loss[2]), "in B"], [signed(loss[3]), "B − A"]] : []),
    [`${digits(joined[0])} of ${digits(joined[1])}`, `${joined[2]} of A whose result B has`],
  ];
  byId("figures").replaceChildren(...figures.map(([value, text]) => element("div", { class: "figure" },
    element("b", {}, value), element("span", {}, text))));
  notes("notes", told);

  // One row: what it is with its place, which open to the rest that is known; and its cost, if the loss has one.
  function rowOf({ cost, facts, place, sure, what }, at) {
    const text = [element("span", {}, what), element("div", { class: "quiet" }, name(place), `, ${sure}`)];
    const known = facts.flatMap(([term, said]) => [element("dt", {}, term), element("dd", { class: "name" }, said)]);
    const shown = known.length
      ? [element("details", {}, element("summary", {}, ...text), element("dl", {}, ...known))] : text;
    const [from, to] = [at(Math.min(cost, 0)), at(Math.max(cost, 0))];
    const bar = element("div", { class: cost < 0 ? "forward" : "backward", style: `left:${from}%;width:${to - from}%` });
    return element("tr", {}, element("th", { scope: "row", class: "text" }, ...shown), ...(difference === null ? [] : [
      element("td", { class: "bar" }, cost ? bar : ""), element("td", {}, cost === null ? "" : signed(cost)),
      element("td", {}, percent(cost, difference))]));
  }
  const ends = [0, ...causes.map(({ cost }) => cost || 0), ...(loss ? [loss[4] || 0] : [])];
  const at = (value) => 100 * (value - least(ends)) / (most(ends) - least(ends) || 1);
  const rest = loss && loss[4] ? [{ what: "no cause of its own", place: "the rest", sure: "", cost: loss[4], facts: [] }] : [];
  byId("causes-text").textContent = !causes.length ? "Nothing was found."
    : rounding ? "A layer's rounding costs what A's loss changes by when this layer, too, has B's results."
    : difference === null ? "The programs have no loss, so causes are in the order in which A computes."
      : "A cause costs what the loss of A changes by when B's results take the place of A's there, one after the other.";
  byId("causes-table").replaceChildren(element("table", {}, ...[...causes, ...rest].map((row) => rowOf(row, at))));
  byId("causes-key").hidden = difference === null || !causes.length;
  byId("causes").classList.toggle("alarm", !equal);
  document.documentElement.dataset.drawn = "yes";
})();
