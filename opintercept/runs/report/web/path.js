"use strict";
// The path of the error between two runs: how far outputs are apart, module by module in the order of calls, and what
// the calls up to there cost. `all` are the rows of the shares, the largest first.
const errorPath = (data, all) => {
  const { element, keyed, shape } = plots;
  const { brief, byId, counted, least, most, name, percent, signed } = parts;
  const { difference, path, shares } = data;
  const places = [...path.module.keys()];
  const last = places.length - 1;
  const upTo = [];
  for (const cost of path.cost) upTo.push((upTo[upTo.length - 1] || 0) + cost);
  let chosen = null;

  const off = (place) => `by ${brief(path.relative[place])} of A's norm (${
    brief(path.roundings[place])} roundings of ${path.dtype[place]})`;
  function text() {
    const apart = places.filter((place) => path.relative[place] !== 0);
    const further = (one, other) => (path.relative[other] > path.relative[one] ? other : one);
    const [first, furthest] = [apart[0], apart.reduce(further, apart[0])];
    byId("path-text").replaceChildren(...(!apart.length ? ["The outputs of all modules are equal."] : [
      "Outputs first differ in ", name(path.module[first]), `, ${off(first)}`,
      ...(first === furthest ? [", and nowhere more"]
        : ["; most in ", name(path.module[furthest]), `, ${off(furthest)}`]),
      `; and at the end ${path.relative[last] === 0 ? "not at all" : off(last)}.`]));
  }
  function table() {
    const heads = ["module", "calls", "last operator", "|B − A| / |A|", "roundings", "dtype", "cost", "up to here"];
    const cells = (place) => [
      String(path.calls[place]), path.op[place], brief(path.relative[place]), brief(path.roundings[place]),
      path.dtype[place], signed(path.cost[place]), signed(upTo[place]),
    ];
    const head = heads.map((each, number) => element("th",
      { scope: "col", class: number ? "plain" : "plain text" }, each));
    byId("path-table").replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...head)),
      element("tbody", {}, ...places.map((place) => element("tr", {},
        element("th", { scope: "row", class: "plain text" }, name(path.module[place])),
        ...cells(place).map((each) => element("td", {}, each)))))));
  }
  function factsOf(place) {
    const row = all.find((each) => shares.index[each] <= path.index[place]
      && (place === 0 || shares.index[each] > path.index[place - 1]));
    return [
      `${path.module[place]}, ${counted(path.calls[place], "call")}`,
      `its output ${path.relative[place] === 0 ? "is equal" : `differs ${off(place)}`}`,
      `cost ${signed(path.cost[place])}; up to here ${signed(upTo[place])}`
        + (difference ? `, ${percent(upTo[place], difference)} of the difference` : ""),
      ...(row === undefined ? [] : [`most by ${shares.op[row]}: ${shares.cause[row]}`]),
    ];
  }

  // Layers are what the first number of a name tells apart; elsewhere, modules.
  function layers() {
    const found = [];
    path.module.forEach((module, place) => {
      const key = module.match(/^(.*?\.)?\d+(?=\.|$)/)?.[0] ?? module;
      const before = found[found.length - 1];
      if (before?.key === key) before.end = place + 1;
      else found.push({ key, label: key.match(/[^.]*$/)[0], start: place, end: place + 1 });
    });
    return found;
  }
  // The labels of layers by their middles, where there is room. Names stay within their layers.
  function ticksOf(groups, room) {
    const found = new Map();
    let free = 0;
    for (const { label, start, end } of groups) {
      const [half, middle] = [4 + 3 * label.length, room * (start + end) / 2];
      if (middle - half < free || (!/^\d+$/.test(label) && 2 * half > room * (end - start))) continue;
      free = middle + half;
      found.set((start + end) / 2, label);
    }
    return found;
  }
  function chart(id, label, y, drawn) {
    const groups = layers();
    const ticks = ticksOf(groups, (byId(id).clientWidth - 90) / places.length);
    plots.chart(byId(id), {
      label: `${label}, by module in the order of calls. Arrow keys choose a module.`, height: 210,
      y: { letters: 9, format: brief, ...y },
      x: {
        title: "modules in the order of calls", low: 0, high: places.length, ticks: [...ticks.keys()],
        format: (middle) => ticks.get(middle),
      },
      draw: (atX, atY, box) => {
        const strip = (start, end, attributes) => shape("rect",
          { x: atX(start), width: atX(end) - atX(start), y: box.top, height: box.bottom - box.top, ...attributes });
        return [
          ...groups.filter((_, number) => number % 2).map(({ start, end }) => strip(start, end, { class: "strip" })),
          ...drawn((place) => atX(place + 0.5), atY, box),
          ...places.map((place) => strip(place, place + 1, {
            class: place === chosen ? "hit here" : "hit", "data-place": place, "data-tip": factsOf(place).join("\n"),
          })),
        ];
      },
    });
    const choose = (place) => {
      chosen = Math.max(0, Math.min(last, place));
      draw();
      byId(id).firstChild.focus({ preventScroll: true });
    };
    byId(id).firstChild.setAttribute("tabindex", "0");
    byId(id).firstChild.setAttribute("role", "application");
    byId(id).onclick = ({ target }) => target.dataset.place && choose(Number(target.dataset.place));
    byId(id).onkeydown = (event) => {
      const moves = { ArrowLeft: (chosen ?? 1) - 1, ArrowRight: (chosen ?? -1) + 1, Home: 0, End: last };
      if (!(event.key in moves)) return;
      event.preventDefault();
      choose(moves[event.key]);
    };
  }
  function errors() {
    const sizes = path.relative.map((value) => value || null);
    const units = sizes.map((value, place) => value && value / path.roundings[place]);
    const known = [...sizes, ...units].filter(Boolean);
    chart("path-errors", "How far outputs are from A's",
      { low: (least(known) || 1e-8) / 3, high: 3 * (most(known) || 1), log: true }, (x, y) => {
        const line = (kind, values) => shape("path",
          { class: kind, d: plots.path(values.map((value, place) => value && [x(place), y(value)])) });
        const dots = places.filter((place) => sizes[place])
          .map((place) => shape("circle", { class: "dot", cx: x(place), cy: y(sizes[place]), r: 2 }));
        return [line("roof", units), line("line mean", sizes), ...dots];
      });
  }
  function sums() {
    const ends = [0, difference || 0, ...upTo];
    const edge = (most(ends) - least(ends) || 1) / 20;
    chart("path-costs", "What the calls up to each module cost",
      { low: least(ends) - edge, high: most(ends) + edge }, (x, y, { left, right }) => {
        const wide = x(1) - x(0);
        const levels = places.map((place) => [y(upTo[place - 1] || 0), y(upTo[place])]);
        const steps = levels.flatMap(([before, after], place) => [[x(place), before], [x(place), after]]);
        return [
          shape("path", { class: "roof", d: plots.path([[left, y(difference || 0)], [right, y(difference || 0)]]) }),
          shape("path", { class: "line mean", d: plots.path([[left, y(0)], ...steps, [right, levels[last][1]]]) }),
          ...levels.map(([before, after], place) => shape("rect", {
            class: path.cost[place] < 0 ? "forward" : "backward", x: x(place) - wide / 2, width: wide,
            y: Math.min(before, after), height: Math.abs(after - before),
          })),
        ];
      });
  }
  function draw() {
    if (!places.length) return;
    errors();
    sums();
    byId("path-chosen").replaceChildren(...(chosen === null ? [] : [element("div", { class: "chosen" },
      ...factsOf(chosen).map((fact) => element("div", {}, fact)))]));
  }
  byId("path").hidden = !places.length;
  byId("path-errors-key").replaceChildren(keyed("line", "line mean", "norm of B − A by the norm of A"),
    keyed("line", "roof", "one rounding of the coarsest dtype so far"), element("span", {}, "In gaps, both are equal."));
  byId("path-costs-key").replaceChildren(keyed("line", "line mean", "all calls up to there"),
    keyed("line", "roof", "the difference B − A"));
  text();
  table();
  return { draw };
};
