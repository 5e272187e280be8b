"use strict";
// A tree of modules by the dots of their names, and what the cells of a map add up to for the rows that are shown.
// It draws nothing and touches no element.
const modules = (() => {
  // Where there are more rows than this, groups are folded.
  const most = 60;

  // Rows as a tree: { key, label, rows: all below, own: its own row or null, children }. A group with one child joins
  // it.
  function tree(names, exact, rows) {
    const made = (key, label) => ({ key, label, rows: [], own: null, children: new Map() });
    const root = made("", "");
    for (const row of rows) {
      const parts = exact[row] ? names[row].split(".") : [names[row]];
      let node = root;
      parts.forEach((part, number) => {
        if (!node.children.has(part)) node.children.set(part, made(parts.slice(0, number + 1).join("."), part));
        node = node.children.get(part);
        node.rows.push(row);
      });
      node.own = row;
    }
    const joined = (node) => {
      let found = node;
      while (found.children.size === 1 && found.own === null) {
        const [child] = found.children.values();
        child.label = `${found.label}.${child.label}`;
        found = child;
      }
      return { ...found, children: [...found.children.values()].map(joined) };
    };
    return [...root.children.values()].map(joined);
  }

  // The keys of the groups to open at first: those on the way to the rows that matter, then level by level.
  function opened(nodes, wanted) {
    const open = new Set();
    let shown = nodes.length;
    const grow = (node) => { open.add(node.key); shown += node.children.length + (node.own === null ? 0 : 1); };
    const towards = (node) => {
      if (!node.children.length || !node.rows.some((row) => wanted.has(row))) return;
      if (node.rows.some((row) => wanted.has(row) && row !== node.own) || wanted.has(node.own)) grow(node);
      node.children.forEach(towards);
    };
    nodes.forEach(towards);
    for (let level = nodes; level.length; level = level.flatMap((node) => (open.has(node.key) ? node.children : []))) {
      const folded = level.filter((node) => node.children.length && !open.has(node.key));
      if (shown + folded.reduce((sum, node) => sum + node.children.length, 0) > most) break;
      folded.forEach(grow);
    }
    return open;
  }

  // What is shown of a tree: { key, label, title, depth, folded, rows, group }.
  function flat(nodes, isOpen, depth = 0) {
    const leaf = ({ key }, label, depth, rows) => ({ key, label, title: key, depth, folded: null, rows, group: false });
    return nodes.flatMap((node) => {
      if (!node.children.length) return [leaf(node, node.label, depth, node.rows)];
      const key = `${node.key}.*`;
      const row = { ...leaf({ key }, node.label, depth, node.rows), folded: !isOpen(node.key), group: true };
      if (row.folded) return [row];
      const own = node.own === null ? [] : [leaf(node, "(itself)", depth + 1, [node.own])];
      return [row, ...own, ...flat(node.children, isOpen, depth + 1)];
    });
  }
  const keys = (nodes) => nodes.flatMap((node) => (node.children.length ? [node.key, ...keys(node.children)] : []));

  // The numbers of the cells of each row.
  function index(cells) {
    const found = new Map();
    (cells ? cells.row : []).forEach((row, cell) => {
      if (!found.has(row)) found.set(row, []);
      found.get(row).push(cell);
    });
    return found;
  }

  // What the cells of some rows add up to, by column. `cells` is a list for each field, `known` its `index`.
  function sums(cells, known, rows, columns, role) {
    const found = Array(columns).fill(null);
    const moments = cells[role];
    for (const row of rows) {
      for (const cell of known.get(row) || []) {
        const column = cells.column[cell];
        const sum = found[column] || (found[column] = {
          calls: 0, flops: 0, seconds: 0, call: null, count: 0, nan: 0, inf: 0, finite: 0, sum: 0, square: 0,
          min: null, max: null, values: false,
        });
        for (const name of ["calls", "flops", "seconds"]) sum[name] += cells[name][cell] || 0;
        if (cells.index) {
          const call = [cells.rank[cell], cells.index[cell]];
          if (!sum.call || call[0] < sum.call[0] || (call[0] === sum.call[0] && call[1] < sum.call[1])) sum.call = call;
        }
        if (!moments || moments.count[cell] === null) continue;
        const [count, nan, inf, mean, rms] = ["count", "nan", "inf", "mean", "rms"].map((name) => moments[name][cell]);
        sum.values = true;
        sum.count += count;
        sum.nan += nan;
        sum.inf += inf;
        if (mean !== null && rms !== null) {
          const finite = Math.max(count - nan - inf, 0);
          sum.finite += finite;
          sum.sum += mean * finite;
          sum.square += rms * rms * finite;
        }
        for (const [name, choose] of [["min", Math.min], ["max", Math.max]]) {
          const value = moments[name][cell];
          if (value !== null) sum[name] = sum[name] === null ? value : choose(sum[name], value);
        }
      }
    }
    for (const sum of found) {
      if (!sum) continue;
      const known = sum.finite > 0;
      sum.mean = known ? sum.sum / sum.finite : null;
      sum.rms = known && Number.isFinite(sum.square) ? Math.sqrt(sum.square / sum.finite) : null;
      sum.absmax = sum.min === null || sum.max === null ? null : Math.max(Math.abs(sum.min), Math.abs(sum.max));
      sum.nonfinite = sum.count ? (sum.nan + sum.inf) / sum.count : null;
    }
    return found;
  }

  // The same of the errors between two runs: the largest, how many calls differ, and how many of these by Inf.
  function errors(cells, known, rows, columns) {
    const found = Array(columns).fill(null);
    for (const row of rows) {
      for (const cell of known.get(row) || []) {
        const sum = found[cells.column[cell]] || (found[cells.column[cell]] = { error: null, calls: 0, inf: 0 });
        const error = cells.error[cell];
        if (error !== null) sum.error = sum.error === null ? error : Math.max(sum.error, error);
        sum.calls += cells.calls[cell];
        sum.inf += cells.inf[cell];
      }
    }
    return found;
  }

  // Each value against the median of those before it: as a logarithm of their ratio to base 2, or as their difference
  // in units of the median's size. Null where there is none.
  function againstPast(values, log) {
    const earlier = [];
    return values.map((value) => {
      if (value === null || (log && !(value > 0))) return null;
      const middle = earlier.length ? earlier[(earlier.length - 1) >> 1] : null;
      const place = earlier.findIndex((each) => each > value);
      earlier.splice(place < 0 ? earlier.length : place, 0, value);
      if (middle === null) return 0;
      if (log) return Math.log2(value / middle);
      return value === middle ? 0 : middle === 0 ? Math.sign(value) * 8 : (value - middle) / Math.abs(middle);
    });
  }
  return { againstPast, errors, flat, index, keys, opened, sums, tree };
})();
