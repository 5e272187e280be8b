"use strict";
// What the panels of the page share: numbers and names as texts, and fields and notes.
const parts = (() => {
  const { element } = plots;
  const byId = (id) => document.getElementById(id);
  // The block of data that the page carries.
  async function data() {
    const packed = Uint8Array.from(atob(JSON.parse(byId("data").textContent)), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  }
  const name = (text) => element("span", { class: "name" }, text);
  const cell = (text, kind) => element("div", { class: `name cell ${kind}` }, text);
  const digits = (number) => number.toLocaleString("en");
  const counted = (number, one, many) => `${digits(number)} ${number === 1 ? one : many || one + "s"}`;

  function figure(value, unit) {
    if (value === null || value === undefined) return "?";
    const prefixes = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    const [scale, prefix] = prefixes.find(([least]) => Math.abs(value) >= least) || [1, ""];
    return `${Number((value / scale).toPrecision(3))} ${prefix}${unit}`.trim();
  }
  function time(seconds) {
    if (seconds === null || seconds === undefined) return "?";
    if (seconds >= 60) return `${(seconds / 60).toPrecision(3)} min`;
    const [scale, unit] = seconds >= 1 || seconds === 0 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    return `${Number((seconds * scale).toPrecision(3))} ${unit}`;
  }
  function plain(value) {
    if (value === null || value === undefined) return "?";
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  }
  // Three digits, with the sign that is as wide as a plus.
  const brief = (value) => (value === null ? "?" : plain(Number(value.toPrecision(3))).replaceAll("-", "−"));
  const signed = (value) => `${value > 0 ? "+" : ""}${brief(value)}`;
  const percent = (part, whole) => (whole && part !== null
    ? `${(100 * part / whole).toFixed(1)} %`.replace(/^-0.0 /, "0.0 ").replace("-", "−") : "");
  const total = (values) => values.reduce((sum, value) => sum + value, 0);
  function nonfinite([nan, inf]) {
    return [nan && counted(nan, "NaN", "NaN"), inf && counted(inf, "Inf", "Inf")].filter(Boolean).join(" and ");
  }
  function rangeText({ min, max, mean, rms }) {
    return [`smallest ${plain(min)}, largest ${plain(max)}`, `mean ${plain(mean)}, root mean square ${plain(rms)}`];
  }
  // Shortens "encoder.layer.11.attention.query" to "e.l.11.a.query": the last part and the numbers say most.
  function short(text, most) {
    const parts = text.split(".");
    for (let i = 0; i < parts.length - 1 && parts.join(".").length > most; i++) {
      if (!/^\d*$/.test(parts[i])) parts[i] = parts[i].slice(0, 1);
    }
    const shown = parts.join(".");
    return shown.length <= most ? shown : `…${shown.slice(1 - most)}`;
  }

  function fill(select, options) {
    const before = select.value;
    select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
    if (options.some(([value]) => String(value) === before)) select.value = before;
    select.parentElement.hidden = options.length < 2;
  }
  function notes(id, texts) {
    byId(id).replaceChildren(...texts.filter(Boolean).map((text) => element("p", { class: "note" }, text)));
  }
  // A line of a result with its mark, or a table, as `print` shows them.
  function partOf(part) {
    if (Array.isArray(part)) return element("div", { class: `said ${part[1]}` }, part[0]);
    const { head, rows, left } = part;
    const row = (tag, texts, style) => element("tr", {}, ...texts.map((text, number) => element(tag,
      { class: (number < left ? "text said " : "") + style }, text)));
    return element("div", { class: "scroll" },
      element("table", {}, element("thead", {}, row("th", head, "plain")),
        element("tbody", {}, ...rows.map((texts) => row("td", texts, "")))),
      ...part.notes.map((note) => element("div", { class: "quiet small" }, note)));
  }
  const clear = (id) => byId(id).replaceChildren();
  function on(ids, event, action) {
    for (const id of ids) byId(id).addEventListener(event, action);
  }
  // A long array is too many arguments for Math.min.
  const least = (values) => values.reduce((one, other) => (other < one ? other : one), values.length ? values[0] : 0);
  const most = (values) => values.reduce((one, other) => (other > one ? other : one), values.length ? values[0] : 0);
  return {
    brief, byId, cell, clear, counted, data, digits, figure, fill, least, most, name, nonfinite, notes, on, partOf, percent,
    plain, rangeText, short, signed, time, total,
  };
})();
