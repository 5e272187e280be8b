"use strict";
// What the maps of modules over steps share: rows that fold, colours, and the box of the chosen cell.
const maps = (() => {
  const { element } = plots;
  const { byId, least, most, name, plain } = parts;
  const { chosen, remember } = state;

  const folds = new Map(); // by run, pass and map, which groups are open

  // Rows that matter: of the first output that is not finite, of the first divergence, and of the one above the noise.
  function wanted(each) {
    const { data } = state;
    const found = each === data.runs[0] ? data.divergence : null;
    const rows = [each.totals.first?.row, found?.first?.row, found?.drift?.above?.row];
    return new Set(rows.filter((row) => row !== null && row !== undefined));
  }
  function rowsOf(map, each, phase, filter) {
    const { data } = state;
    const { heat } = each;
    const used = new Set(heat.phases[phase] ? heat.phases[phase].row : []);
    const rows = [...heat.modules.keys()]
      .filter((row) => used.has(row) && heat.modules[row].toLowerCase().includes(filter));
    const nodes = modules.tree(heat.modules, heat.exact, rows);
    const key = [map, data.runs.indexOf(each), phase].join();
    const matter = wanted(each);
    if (!folds.has(key)) folds.set(key, modules.opened(nodes, matter));
    const open = folds.get(key);
    const shown = modules.flat(nodes, (group) => Boolean(filter) || open.has(group));
    return { nodes, open, rows: shown, wanted: matter };
  }
  function foldButtons(map, { nodes, open }, redraw) {
    byId(`${map}-fold`).onclick = () => { open.clear(); redraw(); };
    byId(`${map}-open`).onclick = () => { modules.keys(nodes).forEach((key) => open.add(key)); redraw(); };
    for (const button of ["fold", "open"]) byId(`${map}-${button}`).hidden = !modules.keys(nodes).length;
  }
  function stepText({ steps, width }, column) {
    return width === 1 ? `${steps[column]}` : `${steps[column]}–${steps[column] + width - 1}`;
  }
  const columnOf = (heat, step) => heat.steps.findIndex((first) => first <= step && step < first + heat.width);

  function colorsFor({ steps }) {
    const absolute = ["absolute", "absolute"];
    return steps.length > 1 ? [absolute, ["past", "against the row's own past"]] : [absolute];
  }
  // Colours for rows of values: { ramp, part(value, past), texts }.
  function scaled(values, past, { scale, format }) {
    const known = values.flat().filter((value) => value !== null && Number.isFinite(value));
    if (past) {
      const sizes = past.flat().filter((value) => value !== null).map(Math.abs);
      const edge = Math.min(Math.max(most(sizes), scale === "log" ? 1 : 0.5), scale === "log" ? 10 : 8);
      const texts = scale === "log"
        ? [`1/${plain(2 ** edge)} of the past`, "as before", `${plain(2 ** edge)} times`]
        : [`${plain(edge)} times the past's size below`, "as before", `${plain(edge)} above`];
      return { ramp: "signed", part: (value, against) => (against === null ? null : 0.5 + against / edge / 2), texts };
    }
    const positive = known.filter((value) => value > 0);
    const log = scale === "log" && positive.length > 0;
    const largest = most(known.map(Math.abs));
    const [low, high] = log ? [least(positive), most(positive)]
      : scale === "signed" ? [-largest, largest] : [Math.min(0, least(known)), most(known)];
    const at = log ? (value) => Math.log10(Math.max(value, low)) : (value) => value / 2; // halves do not overflow
    const [from, to] = at(low) < at(high) ? [at(low), at(high)] : [at(low) - 0.5, at(high) + 0.5];
    return {
      ramp: scale === "signed" ? "signed" : "even",
      part: (value) => (value === null ? null : (at(value) - from) / (to - from)),
      texts: [0, 0.5, 1].map((part) => from + part * (to - from)).map((tick) => format(log ? 10 ** tick : tick * 2)),
    };
  }
  function pastText(past, y, x, log) {
    if (!past || past[y][x] === null) return [];
    return [log ? `${plain(2 ** past[y][x])} times the median before`
      : `${plain(past[y][x])} of the median's size above the median before`];
  }

  // The row and column that are chosen; of a row that is folded away, the group that has it.
  function found(rows, heat) {
    if (!chosen.has("module") || !chosen.has("step")) return null;
    const key = chosen.get("module");
    const column = columnOf(heat, Number(chosen.get("step")));
    const row = rows.findIndex((each) => each.key === key);
    const over = row >= 0 ? row : rows.findLastIndex((each) => each.group && key.startsWith(each.key.slice(0, -1)));
    return over < 0 || column < 0 ? null : { row: over, column };
  }
  // Draws a map, its key and the box of the cell that is chosen, whose facts and commands `box` returns. At first, a row
  // that matters is in sight.
  // `keys` are texts, or lists of texts and signs. `chose` is what is chosen with a cell, `redraw` draws this map again, and `follow` what shows the same cell.
  function draw(panel, { label, heat, phase, tree, colors, lines, chose, redraw, follow, keys, box }) {
    const { open, rows } = tree;
    foldButtons(panel, tree, redraw);
    const selected = found(rows, heat);
    const before = byId(`${panel}-plot`).querySelector(".rows");
    const scrolled = before?.clientHeight ? before.scrollTop : null;
    plots.heat(byId(`${panel}-plot`), {
      label, rows, steps: heat.steps, ramp: colors.ramp, lines, selected,
      onSelect: (row, column) => {
        remember({ panel, phase, module: rows[row].key, step: heat.steps[column], ...chose });
        redraw();
        follow();
      },
      onFold: (group) => {
        const key = group.slice(0, -2);
        if (!open.delete(key)) open.add(key);
        redraw();
      },
    });
    const shown = byId(`${panel}-plot`).querySelector(".rows");
    const matter = rows.findIndex((row) => !row.group && row.rows.some((each) => tree.wanted.has(each)));
    shown.scrollTop = scrolled ?? (matter + 0.5) * shown.scrollHeight / rows.length - shown.clientHeight / 2;
    const more = shown.scrollHeight > shown.clientHeight && `${rows.length} rows: scroll to see the last ones.`;
    byId(`${panel}-key`).replaceChildren(
      ...[more, ...keys].filter(Boolean).map((words) => element("span", {}, ...[words].flat())),
      ...(heat.steps.length > 1 ? [plots.legend(colors.ramp, colors.texts)] : []));
    byId(`${panel}-chosen`).replaceChildren();
    if (!selected) return;
    const row = rows[selected.row];
    const [facts, texts] = box(row, selected);
    byId(`${panel}-chosen`).append(element("div", { class: "chosen" }, element("b", {}, name(row.title)),
      `, ${phase}, step ${stepText(heat, selected.column)}`,
      element("div", { class: "quiet small" }, facts.join("; ")), ...commands.list(texts)));
  }
  return { colorsFor, columnOf, draw, foldButtons, pastText, rowsOf, scaled, stepText };
})();
