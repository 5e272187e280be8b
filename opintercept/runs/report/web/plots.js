"use strict";
// Draws for page.js: heat maps with rows that fold, and charts of lines, areas and points, with keys and a pointer.
// It knows nothing of runs. Texts become text nodes, or are painted on a canvas.
const plots = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const color = (variable) => getComputedStyle(document.documentElement).getPropertyValue(`--${variable}`).trim();
  const narrow = () => document.documentElement.clientWidth < 640;

  function made(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) if (value !== null) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }
  const element = (tag, attributes, ...children) => made(document.createElement(tag), attributes, children);
  const svg = "http://www.w3.org/2000/svg";
  const shape = (tag, attributes, ...children) => made(document.createElementNS(svg, tag), attributes, children);

  // --- the text beside the pointer

  const tip = element("div", { id: "tip", hidden: "" });
  document.body.append(tip);
  function showTip(lines, x, y) {
    tip.replaceChildren(...lines.map((line) => element("div", {}, line)));
    tip.hidden = false;
    const [width, height] = [tip.offsetWidth, tip.offsetHeight];
    const room = document.documentElement.clientWidth;
    tip.style.left = `${scrollX + Math.max(4, Math.min(x + 12, room - width - 8))}px`;
    tip.style.top = `${scrollY + (y + height + 24 > innerHeight ? Math.max(4, y - height - 10) : y + 14)}px`;
  }
  const hideTip = () => { tip.hidden = true; };

  // --- colours

  const ramps = {
    // Cividis, which reads the same without full colour vision; and blue through grey to orange.
    even: ["#00224e", "#35456c", "#666970", "#a69d75", "#fee838"],
    signed: ["#2166ac", "#8bb8d9", "#dcdcdc", "#eda268", "#b35806"],
  };
  function colorAt(ramp, part) {
    const stops = ramps[ramp];
    const place = Math.max(0, Math.min(1, part)) * (stops.length - 1);
    const first = Math.min(Math.floor(place), stops.length - 2);
    const mixed = [1, 3, 5].map((at) => {
      const [one, other] = [stops[first], stops[first + 1]].map((stop) => parseInt(stop.slice(at, at + 2), 16));
      return Math.round(one + (other - one) * (place - first));
    });
    return `rgb(${mixed.join(",")})`;
  }
  function legend(ramp, texts) {
    return element("div", { class: "legend" },
      element("div", { class: "ramp", style: `background:linear-gradient(to right,${ramps[ramp].join(",")})` }),
      element("div", { class: "ends" }, ...texts.map((text) => element("span", {}, text))));
  }

  // --- keys

  // A sign in the colour of the marks on maps.
  const sign = (text) => element("i", { class: "sign" }, text);
  // A text of a key behind a sample of what it explains, which has the class of what is drawn, and so its colour.
  const samples = {
    area: ["rect", { width: 12, height: 12 }],
    line: ["path", { d: "M0 6H20" }],
    point: ["circle", { cx: 6, cy: 6, r: 5 }],
  };
  function keyed(kind, style, text) {
    const [tag, size] = samples[kind];
    return element("span", {}, shape("svg", { width: kind === "line" ? 20 : 12, height: 12, "aria-hidden": "true" },
      shape(tag, { class: style, ...size })), text);
  }

  // --- heat maps

  const rowHeight = 20;
  const marks = {
    nan: (ink, x, y, size) => {
      for (const slope of [1, -1]) {
        ink.moveTo(x - size, y - slope * size);
        ink.lineTo(x + size, y + slope * size);
      }
    },
    inf: (ink, x, y, size) => {
      ink.moveTo(x - size, y + size);
      ink.lineTo(x, y - size);
      ink.lineTo(x + size, y + size);
      ink.closePath();
    },
    star: (ink, x, y, size) => {
      for (let point = 0; point < 10; point++) {
        const [turn, reach] = [Math.PI * (point / 5 - 0.5), (point % 2 ? 0.5 : 1.3) * size];
        ink[point ? "lineTo" : "moveTo"](x + reach * Math.cos(turn), y + reach * Math.sin(turn));
      }
      ink.closePath();
    },
  };

  // rows: { key, label, title, depth, folded (null for one that cannot fold), cells: by column { part, text, mark } }.
  // With a single column, `text` and the length of a bar tell values apart better than colours do.
  function heat(place, { label, rows, steps, ramp, lines, selected, onSelect, onFold }) {
    const scrolled = place.querySelector(".rows")?.scrollTop || 0;
    const focused = place.contains(document.activeElement) ? document.activeElement.dataset.key || "canvas" : null;
    const columns = steps.length;
    const names = element("div", { class: "names" });
    for (const row of rows) {
      const known = { title: row.title || row.label, style: `padding-left:${4 + row.depth * (narrow() ? 7 : 14)}px` };
      const words = [element("span", { class: "name" }, row.label), ...(row.sign ? [sign(row.sign)] : [])];
      if (row.folded === null) {
        names.append(element("div", { class: "leaf", ...known }, ...words));
      } else {
        const button = element("button",
          { type: "button", ...known, "aria-expanded": String(!row.folded), "data-key": row.key },
          element("b", { "aria-hidden": "true" }, row.folded ? "▸" : "▾"), ...words);
        button.addEventListener("click", () => onFold(row.key));
        names.append(button);
      }
    }
    const canvas = element("canvas", {
      tabindex: "0", role: "application", "data-key": "canvas", "aria-roledescription": "heat map",
      "aria-label": `${label}: ${rows.length} rows, ${columns} columns. `
        + "Arrow keys choose a cell, + and - open and fold a row.",
    });
    const axis = element("div", { class: "steps", "aria-hidden": "true" });
    place.replaceChildren(element("div", { class: "rows" }, names, element("div", { class: "cells" }, canvas)), axis);
    const width = canvas.parentElement.clientWidth;
    const height = rows.length * rowHeight;
    const wide = width / columns;
    const draw = () => {
      const ratio = devicePixelRatio || 1;
      [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
      [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
      const ink = canvas.getContext("2d");
      ink.scale(ratio, ratio);
      ink.font = `12px ${getComputedStyle(document.body).fontFamily}`;
      ink.textBaseline = "middle";
      const [plain, mark, ground, text, bar] = ["grid", "mark", "panel", "text", "forward"].map(color);
      const gap = wide > 5 ? 1 : 0;
      rows.forEach((row, y) => row.cells.forEach((cell, x) => {
        if (!cell) return;
        const [left, top] = [x * wide, y * rowHeight];
        const long = cell.part === null ? 0 : Math.max(2, (0.04 + 0.96 * cell.part) * (width - 130));
        if (columns === 1) {
          ink.fillStyle = bar;
          ink.fillRect(left, top + 3, long, rowHeight - 6);
          ink.fillStyle = text;
          ink.fillText(cell.text, left + long + (cell.mark ? 22 : 6), top + rowHeight / 2);
        } else {
          ink.fillStyle = cell.part === null ? plain : colorAt(ramp, cell.part);
          ink.fillRect(left, top, Math.max(wide - gap, 1), rowHeight - 1);
        }
        if (!cell.mark) return;
        const size = Math.max(2.5, Math.min(5, wide * 0.4));
        const at = columns === 1 ? long + 12 : left + wide / 2;
        ink.beginPath();
        marks[cell.mark](ink, at, top + rowHeight / 2, size);
        ink.lineWidth = 4;
        ink.strokeStyle = ground;
        ink.stroke();
        ink.lineWidth = 2;
        ink.strokeStyle = ink.fillStyle = mark;
        ink.stroke();
        if (cell.mark !== "nan") ink.fill();
      }));
      if (selected) {
        ink.lineWidth = 2;
        ink.strokeStyle = color("text");
        ink.strokeRect(selected.column * wide, selected.row * rowHeight, Math.max(wide, 3), rowHeight - 1);
      }
    };
    draw();
    const shown = labels(ticks(0, columns - 1, Math.max(2, Math.floor(width / 70))).filter(Number.isInteger)
      .map((column) => [(column + 0.5) * wide, String(steps[column])]), width);
    axis.append(element("span", { class: "axis" }, "step"),
      element("div", {}, ...shown.map(([left, text]) => element("span", { style: `left:${left}px` }, text))));
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left) / wide);
      const row = Math.floor((event.clientY - box.top) / rowHeight);
      return rows[row]?.cells[column] ? { row, column } : null;
    };
    canvas.addEventListener("pointermove", (event) => {
      const found = at(event);
      if (found) showTip(lines(rows[found.row], found.column), event.clientX, event.clientY);
      else hideTip();
    });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("click", (event) => {
      const found = at(event);
      if (found) onSelect(found.row, found.column);
    });
    canvas.addEventListener("keydown", (event) => {
      const from = selected || { row: 0, column: -1 };
      const moves = {
        ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
        Home: [0, -columns], End: [0, columns],
      };
      const { folded, key } = rows[from.row];
      if (event.key in moves) {
        const [down, right] = moves[event.key];
        const clamp = (value, most) => Math.max(0, Math.min(most, value));
        onSelect(clamp(from.row + down, rows.length - 1), clamp(from.column + right, columns - 1));
      } else if ((event.key === "+" && folded === true) || (event.key === "-" && folded === false)) {
        onFold(key);
      } else {
        return;
      }
      event.preventDefault();
    });
    const box = place.querySelector(".rows");
    box.scrollTop = scrolled;
    const again = [...place.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused);
    if (again) again.focus({ preventScroll: true });
    if (selected) {
      const top = selected.row * rowHeight;
      const { scrollTop, clientHeight } = box;
      if (top < scrollTop || top + rowHeight > scrollTop + clientHeight) box.scrollTop = top - clientHeight / 2;
    }
  }

  // --- charts

  // About `most` round numbers from `low` to `high`.
  function ticks(low, high, most) {
    if (!(high > low)) return [low];
    const rough = (high - low) / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const every = [1, 2, 5, 10].map((part) => part * power).find((step) => step >= rough * 0.999) || rough;
    const within = (value) => value <= high + every * 1e-9;
    const found = [];
    for (let number = Math.ceil(low / every - 1e-9); within(number * every) && found.length < 50; number++) {
      found.push(Number((number * every).toPrecision(12)));
    }
    return found;
  }
  function logTicks(low, high, most) {
    const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
    const every = Math.max(1, Math.ceil((last - first + 1) / most));
    const found = [];
    for (let power = first; power <= last; power += every) found.push(10 ** power);
    if (found.length > 1) return found;
    const round = [1, 2, 5].flatMap((part) => [first - 1, first, last].map((power) => part * 10 ** power));
    return [...new Set(round)].filter((value) => value >= low && value <= high).sort((one, other) => one - other);
  }

  // Those of some labels, each [its middle, a text], that do not touch each other, moved so that they end before `room`.
  function labels(found, room) {
    let free = -10; // where the title of a map's axis ends
    return found.map(([middle, text]) => [middle, text, 4 + 3.5 * text.length])
      .map(([middle, text, half]) => [Math.min(middle, room - half), text, half])
      .filter(([middle, text, half]) => {
        const fits = text !== "" && middle - half >= free;
        if (fits) free = middle + half;
        return fits;
      });
  }

  // Each axis is { title, low, high, log, format, letters: the room for ticks, by which charts are aligned }; `draw`
  // gets the functions from values to pixels and returns shapes.
  function chart(place, { label, height, x, y, draw }) {
    const width = place.clientWidth;
    const span = (axis, from, to) => {
      const at = axis.log ? Math.log10 : (value) => value;
      const [low, high] = [at(axis.low), at(axis.high)];
      return (value) => from + (high > low ? (at(value) - low) / (high - low) : 0.5) * (to - from);
    };
    const values = (axis, most) => (axis.log ? logTicks : ticks)(axis.low, axis.high, most);
    const yTicks = values(y, Math.max(2, Math.floor(height / 50)));
    const left = 14 + 7 * Math.max(y.letters || 3, ...yTicks.map((value) => y.format(value).length));
    const [right, top, bottom] = [width - 12, y.title ? 26 : 10, height - 40];
    const [atX, atY] = [span(x, left, right), span(y, bottom, top)];
    const drawn = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    for (const value of yTicks) {
      drawn.append(shape("line", { class: "grid", x1: left, x2: right, y1: atY(value), y2: atY(value) }),
        shape("text", { class: "tick", x: left - 6, y: atY(value) + 4, "text-anchor": "end" }, y.format(value)));
    }
    const xTicks = x.ticks || values(x, Math.max(2, Math.floor((right - left) / 80)));
    for (const [middle, text] of labels(xTicks.map((value) => [atX(value), x.format(value)]), width)) {
      drawn.append(shape("text", { class: "tick", x: middle, y: bottom + 16, "text-anchor": "middle" }, text));
    }
    drawn.append(shape("line", { class: "frame", x1: left, x2: right, y1: bottom, y2: bottom }),
      shape("text", { class: "title", x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, x.title),
      shape("text", { class: "title", x: 4, y: 10 }, y.title || ""));
    drawn.append(...draw(atX, atY, { left, right, top, bottom }));
    drawn.addEventListener("pointermove", (event) => {
      const { tip: lines } = event.target.dataset;
      if (lines) showTip(lines.split("\n"), event.clientX, event.clientY);
      else hideTip();
    });
    drawn.addEventListener("pointerleave", hideTip);
    place.replaceChildren(drawn);
  }
  // A path through points, broken where a value is missing.
  function path(points) {
    let open = false;
    return points.map((point) => {
      if (!point || !point.every(Number.isFinite)) { open = false; return ""; }
      const text = `${open ? "L" : "M"}${point.map((value) => value.toFixed(1)).join(" ")}`;
      open = true;
      return text;
    }).join("");
  }
  return { chart, color, dark, element, heat, hideTip, keyed, legend, narrow, path, shape, sign };
})();
