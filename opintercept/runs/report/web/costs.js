"use strict";
// Bars of what makes the difference of two losses: rows of modules, operators or lines that fold, with their causes.
const costs = (data) => {
  const { element, narrow } = plots;
  const { brief, byId, counted, fill, least, most, name, on, percent, signed, total } = parts;
  const { difference, shares } = data;
  const mostRows = 20; // of the table at first
  const mostCauses = 10; // of a node, and nodes beside each other
  const folds = new Map(); // what rows are by: the keys of the nodes that are open
  const bySize = (cost) => (one, other) => Math.abs(cost(other)) - Math.abs(cost(one));
  const all = [...shares.cost.keys()].sort(bySize((row) => shares.cost[row]));
  const costOf = (rows) => total(rows.map((row) => shares.cost[row]));

  // The largest of some nodes, each { key, label, rows: numbers of shares, children: nodes, confirmed }, and a node of
  // the others if they are many.
  function largest(key, nodes) {
    const sorted = [...nodes].sort(bySize((node) => costOf(node.rows)));
    if (sorted.length <= mostCauses + 1) return sorted;
    const rest = sorted.splice(mostCauses);
    const [label, rows] = [`${rest.length} smaller ones`, rest.flatMap((node) => node.rows)];
    return [...sorted, { key: `${key}*`, label, rows, children: rest }];
  }
  function nodesOf(by) {
    const tried = new Map(by === data.by ? data.confirmed : []);
    const leaf = (key, label, rows, of = key) => ({ key, label, rows, children: [], confirmed: tried.get(of) });
    const groups = new Map();
    for (const row of all) {
      if (!groups.has(shares[by][row])) groups.set(shares[by][row], []);
      groups.get(shares[by][row]).push(row);
    }
    if (by !== "module") return largest(by, [...groups].map(([key, rows]) => leaf(key, key || "(unknown)", rows)));
    const nodeOf = ({ key, label, own, children }) => {
      const rows = own === null ? [] : groups.get(own);
      if (!children.length) return leaf(key, label, rows);
      const below = children.map(nodeOf);
      if (rows.length) below.push(leaf(`${key}.`, "(itself)", rows, key));
      return { key, label, rows: below.flatMap((each) => each.rows), children: largest(key, below) };
    };
    return largest(by, modules.tree(shares.modules, shares.exact, [...groups.keys()]).map(nodeOf));
  }
  const keysOf = (nodes) => nodes.flatMap(({ key, children }) => [key, ...keysOf(children)]);
  // At first, what has the largest costs of either sign is open, as long as the table is short.
  function opened(nodes) {
    const open = new Set();
    const size = ({ rows }) => total(rows.map((row) => Math.abs(shares.cost[row])));
    const waiting = [...nodes];
    for (let shown = nodes.length; waiting.length;) {
      const node = waiting.sort((one, other) => size(other) - size(one)).shift();
      shown += node.children.length || Math.min(node.rows.length, mostCauses + 1);
      if (shown > mostRows) break;
      open.add(node.key);
      waiting.push(...node.children);
    }
    return open;
  }

  function rowsOf(nodes, open, depth = 0) {
    return nodes.flatMap((node) => {
      const { key, rows, children } = node;
      const row = { ...node, depth, cost: costOf(rows), open: open.has(key) };
      if (!row.open) return [row];
      return [row, ...(children.length ? rowsOf(children, open, depth + 1) : causesOf(rows, depth + 1))];
    });
  }
  function causesOf(rows, depth, limit = mostCauses) {
    const rest = rows.slice(limit);
    return [...rows.slice(0, limit).map((share) => ({ depth, share, cost: shares.cost[share] })),
      ...(rest.length ? [{ depth, label: counted(rest.length, "smaller row"), cost: costOf(rest) }] : [])];
  }
  function lastRows() {
    const [count, cost] = data.rest;
    const left = difference === null ? null : difference - total(shares.cost) - cost;
    return [...(count ? [{ depth: 0, label: counted(count, "smaller row"), cost }] : []),
      { depth: 0, label: "not explained", cost: left }].map((row) => ({ ...row, rest: true }));
  }

  function draw(focused = null) {
    const by = byId("costs-by").value;
    const nodes = by === "call" ? [] : nodesOf(by);
    if (!folds.has(by)) folds.set(by, opened(nodes));
    const open = folds.get(by);
    const rows = [...(by === "call" ? causesOf(all, 0, 10 * mostCauses) : rowsOf(nodes, open)), ...lastRows()];
    const ends = [0, ...rows.map((row) => row.cost)];
    const [low, high] = [least(ends), most(ends)];
    const at = (value) => 100 * (value - low) / (high - low || 1);
    const redraw = (change, key) => { change(); draw(key); };
    byId("costs-table").replaceChildren(element("table", {}, ...rows.map((row) => {
      const [from, to] = [at(Math.min(row.cost, 0)), at(Math.max(row.cost, 0))];
      const wide = row.share !== undefined && narrow(); // a cause takes the room of the bar
      const toggle = () => redraw(() => { if (!open.delete(row.key)) open.add(row.key); }, row.key);
      return element("tr", row.rest ? { class: "rest" } : {},
        element("th", {
          scope: "row", class: "text", colspan: wide ? 2 : 1,
          style: `padding-left:${row.depth * (narrow() ? 8 : 16)}px`,
        }, ...(row.share !== undefined ? causeOf(row.share, by) : row.key === undefined ? [row.label]
          : [button(row, toggle)])),
        ...(wide ? [] : [element("td", { class: "bar" }, row.cost ? element("div",
          { class: row.cost < 0 ? "forward" : "backward", style: `left:${from}%;width:${to - from}%` }) : "")]),
        element("td", {}, signed(row.cost)), element("td", {}, percent(row.cost, difference)));
    })));
    [...byId("costs-table").querySelectorAll("button")].find((each) => each.dataset.key === focused)?.focus();
    byId("costs-fold").onclick = () => redraw(() => open.clear());
    byId("costs-open").onclick = () => redraw(() => keysOf(nodes).forEach((key) => open.add(key)));
    for (const id of ["costs-fold", "costs-open"]) byId(id).hidden = !nodes.length;
  }
  function button(row, toggle) {
    const made = element("button", { type: "button", "aria-expanded": String(row.open), "data-key": row.key },
      element("b", { "aria-hidden": "true" }, row.open ? "▾" : "▸"), name(row.label),
      ...(row.confirmed === undefined ? []
        : [element("span", { class: "quiet" }, `confirmed ${signed(row.confirmed)}`)]));
    made.addEventListener("click", toggle);
    return made;
  }
  function causeOf(row, by) {
    const { cause, confirmed, index, line, module, op, roundings } = shares;
    const facts = [
      by !== "module" && shares.modules[module[row]], `call ${index[row]}`, line[row],
      roundings[row] !== null && `${brief(roundings[row])} times its rounding`,
      confirmed[row] !== null && `confirmed ${signed(confirmed[row])}`,
    ];
    return [name(op[row]), `: ${cause[row]}`, element("div", { class: "quiet" }, facts.filter(Boolean).join(", "))];
  }
  fill(byId("costs-by"), ["module", "op", "line", "dtype", "call"].map((by) => [by, by]));
  byId("costs-by").value = data.by;
  on(["costs-by"], "change", () => draw());
  return { all, draw };
};
