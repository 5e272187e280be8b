"use strict";
// Draws the page from its block of data. Texts of a run are untrusted: they become text nodes, or go through label()
// to plotly, which reads some tags and entities in labels.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const shownRows = 25;
  let run = data.runs[0];

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }
  const name = (text) => element("span", { class: "name" }, text);
  const cell = (text, kind) => element("div", { class: `name cell ${kind}` }, text);
  const label = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const color = (variable) => getComputedStyle(document.documentElement).getPropertyValue(`--${variable}`).trim();
  const narrow = () => document.documentElement.clientWidth < 640;
  const counted = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many || one + "s"}`;

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
  function on(ids, event, action) {
    for (const id of ids) byId(id).addEventListener(event, action);
  }

  function axis(title, more) {
    return {
      title: { text: title, font: { size: 12 }, standoff: 8 }, gridcolor: color("grid"), linecolor: color("line"),
      zerolinecolor: color("line"), tickfont: { size: 11 }, automargin: true, ...more,
    };
  }
  // Ticks at 1, 2 and 5 of each decade, or at every few decades, about six in all.
  function decades(low, high, format) {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.ceil((last - first) / 6);
    const parts = last - first <= 2 ? [1, 2, 5] : last - first <= 3 ? [1, 3] : [1];
    const tickvals = [];
    for (let power = first; power <= last; power += every) tickvals.push(...parts.map((part) => part * 10 ** power));
    return { type: "log", tickvals, ticktext: tickvals.map(format), range: [Math.log10(low), Math.log10(high)] };
  }
  function draw(id, traces, layout) {
    const place = byId(id);
    Plotly.react(place, traces, {
      width: place.clientWidth, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("text") },
      margin: { l: 50, r: 16, t: 16, b: 44 }, hovermode: "closest", dragmode: narrow() ? false : "zoom",
      hoverlabel: {
        align: "left", bgcolor: color("panel"), bordercolor: color("line"), font: { color: color("text"), size: 12 },
      },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
      ...layout,
    }, { displaylogo: false, displayModeBar: false, doubleClick: "reset" });
  }
  // As many names beside the rows as there is room for, also after zooming in.
  function rowTicks(names, height, range) {
    const [from, to] = [Math.max(0, Math.ceil(Math.min(...range))), Math.min(names.length - 1, Math.floor(Math.max(...range)))];
    const every = Math.ceil((to - from + 1) / (height / 14)) || 1;
    const tickvals = [];
    for (let row = from; row <= to; row += every) tickvals.push(row);
    return { tickvals, ticktext: tickvals.map((row) => label(short(names[row], narrow() ? 20 : 44))) };
  }
  function rowAxis(names, height) {
    const range = [names.length - 0.5, -0.5];
    return axis("", { ...rowTicks(names, height, range), range, showgrid: false, zeroline: false, ticks: "" });
  }
  function followZoom(id, names, height) {
    const place = byId(id);
    place.removeAllListeners("plotly_relayout");
    place.on("plotly_relayout", (event) => {
      if ("yaxis.tickvals" in event) return;
      const { tickvals, ticktext } = rowTicks(names, height, place.layout.yaxis.range);
      Plotly.relayout(place, { "yaxis.tickvals": tickvals, "yaxis.ticktext": ticktext });
    });
  }
  function clear(id) {
    Plotly.purge(byId(id));
    byId(id).replaceChildren();
  }

  // --- what the run is

  // Both runs come first: seeing which of them goes wrong takes no click.
  const letter = (number) => (data.runs.length > 1 ? "AB"[number] : "");
  function head() {
    byId("title").replaceChildren(...data.runs.flatMap((each, number) => [
      number ? " and " : "", letter(number) ? `${letter(number)}: ` : "", name(each.path)]));
    const one = (text, many) => (each) => (each === 1 ? text : many || `${text}s`);
    const cards = [
      [({ totals }) => totals.calls, (value) => value.toLocaleString("en"), one("call")],
      [({ totals }) => totals.flops, (value) => figure(value, "FLOP"), () => "of work"],
      [({ totals }) => totals.seconds, time, () => "host time in operators"],
      [({ totals }) => totals.modules, (value, { totals }) => `${value.toLocaleString("en")}${totals.more_modules ? "+" : ""}`, one("module")],
      [({ totals }) => (totals.calls ? totals.steps[1] - totals.steps[0] + 1 : 0), (value) => value.toLocaleString("en"), one("step")],
      [({ totals, heat }) => (heat.roles.includes("output") ? totals.nonfinite : null), (value) => (value === null ? "?" : value.toLocaleString("en")), () => "outputs with NaN or Inf", true],
      [({ totals }) => totals.errors, (value) => value.toLocaleString("en"), one("call raised", "calls raised"), true],
    ].filter(([value], number) => number < 6 || data.runs.some((each) => value(each)));
    byId("figures").classList.toggle("two", data.runs.length > 1);
    byId("figures").replaceChildren(...cards.map(([value, shown, text, alarm]) => {
      const values = data.runs.map(value);
      return element("div", { class: "figure" }, ...data.runs.flatMap((each, number) => [
        ...(letter(number) ? [element("i", {}, letter(number))] : []),
        element("b", alarm && values[number] ? { class: "bad" } : {}, shown(values[number], each))]),
      element("span", {}, text(values.every((each) => each === 1) ? 1 : 2)));
    }));
    byId("about").replaceChildren(element("summary", {}, data.runs.length > 1 ? "About these runs" : "About this run"), ...data.runs.flatMap(about));
    byId("first").replaceChildren(...data.runs.map(first).filter(Boolean));
  }
  function about(each, number) {
    const { about } = each;
    const rows = [
      ["folder", name(each.path)], ["command", name(about.command || "?")], ["started", about.started],
      ["finished", about.finished ? "yes" : "no: the program ended early, or was still running"],
      ["tensors recorded", about.tensors], ["processes", about.processes],
      ...about.versions.map(([key, value]) => [key, name(value)]),
      ...about.devices.map((device) => ["device", name(device)]),
      ...about.flags.map(([key, value]) => [key, name(value)]),
    ];
    return [...(letter(number) ? [element("h3", {}, letter(number))] : []),
      element("dl", {}, ...rows.flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, value)]))];
  }
  function nonfinite([nan, inf]) {
    return [nan && counted(nan, "NaN", "NaN"), inf && counted(inf, "Inf", "Inf")].filter(Boolean).join(" and ");
  }
  function first(each, number) {
    const found = each.totals.first;
    if (!found) return null;
    return element("section", { class: "alarm" },
      element("h2", {}, `${letter(number) ? `${letter(number)}: t` : "T"}he first output that is not finite`),
      element("p", {},
        `Call ${found.index} in step ${found.step}, ${found.phase}: `, name(found.op), " in ", name(found.module),
        ...(found.source ? [", ", name(found.source)] : []), each.about.processes.startsWith("1 ") ? "" : `, rank ${found.rank}`,
        `, has ${nonfinite([found.nan, found.inf])} in ${counted(found.count, "value")}. `,
        found.from === null ? "Its operands' values were not recorded."
          : found.from.length ? `Its ${found.from.join(" and ")} already had some.` : "Its operands are finite, so this call produced it."),
    );
  }

  // --- modules over steps

  const fields = { count: 0, nan: 1, inf: 2, min: 3, max: 4, mean: 5, rms: 6 };
  const of = (field) => (moments) => moments[fields[field]];
  // The largest magnitude that is known; null if none is.
  const size = (moments) => {
    const known = [moments[fields.min], moments[fields.max]].filter((value) => value !== null);
    return known.length ? Math.max(...known.map(Math.abs)) : null;
  };
  const statistics = {
    rms: { text: "root mean square", read: of("rms"), scale: "log", format: plain },
    absmax: { text: "largest magnitude", read: size, scale: "log", format: plain },
    mean: { text: "mean", read: of("mean"), scale: "signed", format: plain },
    min: { text: "smallest", read: of("min"), scale: "signed", format: plain },
    max: { text: "largest", read: of("max"), scale: "signed", format: plain },
    nonfinite: {
      text: "share of NaN and Inf", scale: "linear", format: (value) => `${plain(value * 100)} %`,
      read: (moments) => moments[0] ? (moments[fields.nan] + moments[fields.inf]) / moments[0] : null,
    },
    seconds: { text: "host time", cell: 4, scale: "log", format: time },
    flops: { text: "FLOP", cell: 3, scale: "log", format: (value) => figure(value, "FLOP") },
    calls: { text: "calls", cell: 2, scale: "linear", format: plain },
  };
  const scales = {
    // Cividis, which reads the same without full colour vision; and blue through grey to orange.
    even: [[0, "#00224e"], [0.25, "#35456c"], [0.5, "#666970"], [0.75, "#a69d75"], [1, "#fee838"]],
    signed: [[0, "#2166ac"], [0.25, "#8bb8d9"], [0.5, "#dcdcdc"], [0.75, "#eda268"], [1, "#b35806"]],
  };

  function heatOptions() {
    const { heat } = run;
    fill(byId("heat-statistic"), Object.entries(statistics)
      .filter(([, each]) => each.cell || heat.roles.length).map(([key, each]) => [key, each.text]));
    fill(byId("heat-role"), heat.roles.map((role) => [role, { output: "outputs", lhs: "left operands", rhs: "right operands", bias: "biases" }[role]]));
    fill(byId("heat-phase"), Object.keys(heat.phases).map((phase) => [phase, phase]));
  }
  function stepText(column) {
    const { steps, width } = run.heat;
    return width === 1 ? `${steps[column]}` : `${steps[column]}–${steps[column] + width - 1}`;
  }
  function heatDraw() {
    const { heat } = run;
    const statistic = statistics[byId("heat-statistic").value];
    const role = heat.roles.indexOf(byId("heat-role").value);
    const phase = byId("heat-phase").value;
    byId("heat-role").parentElement.hidden = heat.roles.length < 2 || Boolean(statistic.cell);
    byId("heat-text").textContent = !run.totals.calls ? "The run has no calls."
      : heat.roles.length ? "Colour shows the statistic over all calls of the module in the step. Cells without calls are blank."
        : "No values were recorded, so this shows work. Record with tensors=\"stats\" to see values.";
    notes("heat-notes", [
      heat.width > 1 && `To fit, each column combines ${counted(heat.width, "step")}.`,
      heat.left_out && `The map shows the first ${counted(heat.modules.length, "module")} and leaves out ${counted(heat.left_out, "call")} of others.`,
    ]);
    const wanted = byId("heat-filter").value.toLowerCase();
    const used = new Set((heat.phases[phase] || []).map((cell) => cell[0]));
    const rows = [...heat.modules.keys()].filter((row) => used.has(row) && heat.modules[row].toLowerCase().includes(wanted));
    byId("heat-controls").hidden = !run.totals.calls;
    if (!rows.length) {
      byId("heat-key").replaceChildren(run.totals.calls ? "No module has a name that contains this." : "");
      return clear("heat-plot");
    }
    const place = new Map(rows.map((row, number) => [row, number]));
    const grid = () => rows.map(() => heat.steps.map(() => null));
    const values = grid();
    const texts = grid();
    const broken = { nan: [], inf: [] };
    for (const cell of heat.phases[phase]) {
      const y = place.get(cell[0]);
      if (y === undefined) continue;
      const x = cell[1];
      const moments = cell[5 + role] || null;
      const value = statistic.cell ? cell[statistic.cell] : moments && statistic.read(moments);
      values[y][x] = value;
      const lines = [heat.modules[cell[0]], `step ${stepText(x)}, ${phase}, ${counted(cell[2], "call")}`,
        `${statistic.text}: ${value === null ? "none" : statistic.format(value)}`];
      if (moments && !statistic.cell && moments[fields.nan] + moments[fields.inf]) {
        lines.push(`${counted(moments[fields.nan], "NaN", "NaN")}, ${counted(moments[fields.inf], "Inf", "Inf")} of ${counted(moments[0], "value")}`);
        broken[moments[fields.nan] ? "nan" : "inf"].push([x, y, lines]);
      }
      texts[y][x] = lines.map(label).join("<br>");
    }
    const known = values.flat().filter((value) => value !== null);
    const positive = known.filter((value) => value > 0);
    const log = statistic.scale === "log" && positive.length > 0;
    const [low, high] = log ? [least(positive), most(positive)]
      : statistic.scale === "signed" ? [-most(known.map(Math.abs)), most(known.map(Math.abs))]
        : [Math.min(0, least(known)), most(known)];
    const at = log ? (value) => (value > 0 ? Math.log10(value) : Math.log10(low)) : (value) => value;
    const [from, to] = at(low) < at(high) ? [at(low), at(high)] : [at(low) - 0.5, at(high) + 0.5];
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => from + part * (to - from));
    const tickText = ticks.map((tick) => statistic.format(log ? 10 ** tick : tick));
    const bars = heat.steps.length === 1;
    const small = narrow();
    const height = Math.max(bars ? 120 : 160, Math.min(rows.length * 18, 720)) + (small && !bars ? 110 : 60);
    const names = rows.map((row) => heat.modules[row]);
    const scale = statistic.scale === "signed" ? scales.signed : scales.even;
    const bar = {
      thickness: 12, outlinewidth: 0, tickvals: ticks, ticktext: tickText, tickfont: { size: 11 },
      ...(small ? { orientation: "h", y: -44 / (height - 98), yanchor: "top", len: 1, tickvals: [ticks[0], ticks[2], ticks[4]], ticktext: [tickText[0], tickText[2], tickText[4]] } : {}),
    };
    const traces = [];
    const xaxis = axis("step", { showgrid: false, zeroline: false, ticks: "" });
    if (bars) {
      // With a single step, bars tell the values apart better than colours.
      traces.push({
        type: "bar", orientation: "h", y: rows.map((_, number) => number),
        x: values.map(([value]) => (value === null ? null : log && !(value > 0) ? null : value)),
        hovertext: texts.map(([text]) => text), hoverinfo: "text", textposition: "none", marker: { color: color("forward") }, showlegend: false,
      });
      Object.assign(xaxis, axis(statistic.text, {
        nticks: small ? 4 : 8, ...(log ? decades(low / 3, high * 1.2, statistic.format) : {}),
      }));
    } else {
      traces.push({
        type: "heatmap", x: heat.steps.map((_, number) => number), y: rows.map((_, number) => number),
        z: values.map((row) => row.map((value) => (value === null ? null : at(value)))),
        hovertext: texts, hoverinfo: "text", hoverongaps: false, colorscale: scale, zmin: from, zmax: to, colorbar: bar,
        xgap: heat.steps.length <= 60 ? 1 : 0, ygap: rows.length <= 45 ? 1 : 0,
      });
      const stride = Math.ceil(heat.steps.length / (small ? 5 : 14));
      const numbers = [...heat.steps.keys()].filter((number) => number % stride === 0);
      Object.assign(xaxis, {
        tickvals: numbers, ticktext: numbers.map((number) => `${heat.steps[number]}`), range: [-0.5, heat.steps.length - 0.5],
      });
    }
    const marks = { nan: ["x", "NaN"], inf: ["triangle-up", "Inf, no NaN"] };
    const markSize = Math.max(5, Math.min(9, (height - 60) / rows.length, bars ? 9 : byId("heat-plot").clientWidth * 0.75 / heat.steps.length));
    const edge = log ? low / 2 : low;
    for (const [kind, cells] of Object.entries(broken)) {
      if (!cells.length) continue;
      traces.push({
        type: "scatter", mode: "markers", name: marks[kind][1], showlegend: false,
        x: cells.map(([x]) => (bars ? edge : x)), y: cells.map(([, y]) => y),
        hovertext: cells.map(([, , lines]) => lines.map(label).join("<br>")), hoverinfo: "text",
        marker: { symbol: marks[kind][0], size: markSize, color: color("mark"), line: { color: color("panel"), width: 1 } },
      });
    }
    byId("heat-key").replaceChildren(...(statistic.cell || role < 0 ? [] : [
      broken.nan.length && `✖ has NaN: ${counted(broken.nan.length, "cell")}`,
      broken.inf.length && `▲ has Inf, no NaN: ${counted(broken.inf.length, "cell")}`,
      broken.nan.length + broken.inf.length ? "Statistics cover only the finite values." : "All values are finite.",
    ].filter(Boolean).map((text) => element("span", {}, text))));
    draw("heat-plot", traces, { height, xaxis, yaxis: rowAxis(names, height - 60), margin: { l: 10, r: small ? 10 : 16, t: 8, b: small && !bars ? 90 : 44 } });
    followZoom("heat-plot", names, height - 60);
  }
  // A long array is too many arguments for Math.min.
  const least = (values) => values.reduce((one, other) => (other < one ? other : one), values.length ? values[0] : 0);
  const most = (values) => values.reduce((one, other) => (other > one ? other : one), values.length ? values[0] : 0);

  // --- products

  const phases = { forward: "circle", backward: "square", recompute: "diamond" };
  const rates = (row) => row.device === "cpu" && row.seconds ? row.flops === null ? null : row.flops / row.seconds : null;
  const columns = [
    ["op", "operator", "text"], ["phase", "pass", "text"], ["module", "modules", "text"], ["shape", "shape", "text"], ["dtype", "dtype", "text"],
    ["calls", "calls", (row) => row.calls.toLocaleString("en")], ["flops", "FLOP", (row) => figure(row.flops, "")],
    ["seconds", "time", (row) => time(row.seconds)], ["share", "share", (row) => `${(row.share * 100).toFixed(1)} %`],
    ["rate", "FLOP/s", (row) => figure(row.rate, "")], ["intensity", "FLOP/byte", (row) => plain(row.intensity)],
  ];
  const sorting = { by: "seconds", down: true };
  let allRows = false;
  let products = [];

  function gemmsOptions() {
    const total = run.totals.seconds || 1;
    products = run.gemms.rows.map(([op, phase, module, shape, dtype, device, calls, flops, bytes, seconds]) => {
      const row = { op, phase, module, shape, dtype, device, calls, flops, bytes, seconds, share: (seconds || 0) / total };
      row.rate = rates(row);
      row.intensity = flops === null || !bytes ? null : flops / bytes;
      return row;
    });
    const distinct = (key) => [...new Set(products.map((row) => row[key]))].sort().map((value) => [value, value]);
    fill(byId("gemms-op"), [["", "all"], ...distinct("op")]);
    fill(byId("gemms-phase"), [["", "all"], ...distinct("phase")]);
    byId("gemms-controls").hidden = !products.length;
  }
  function gemmsDraw() {
    const [op, phase, shape, module] = ["op", "phase", "shape", "module"].map((key) => byId(`gemms-${key}`).value.toLowerCase());
    const rows = products.filter((row) => (!op || row.op.toLowerCase() === op) && (!phase || row.phase === phase)
      && row.shape.toLowerCase().includes(shape) && row.module.toLowerCase().includes(module));
    rows.sort((one, other) => compare(one[sorting.by], other[sorting.by]) * (sorting.down ? -1 : 1));
    byId("gemms-text").textContent = products.length
      ? "Each row combines calls of the same operator, pass, shape and dtype, in modules whose names differ only in a number. Times are host times."
      : "The run has no calls.";
    notes("gemms-notes", [
      products.some((row) => row.device !== "cpu" && row.device !== "")
        && "For an asynchronous device, host time covers only the launch, so its calls have no FLOP/s.",
      run.gemms.rest && `The last row combines ${counted(run.gemms.rest[0], "call")} that took less time.`,
    ]);
    roofline(rows);
    const body = element("tbody", {});
    for (const row of allRows ? rows : rows.slice(0, shownRows)) {
      body.append(element("tr", {}, ...columns.map(([key, , format]) => format === "text"
        ? element("td", { class: "text" }, key === "module" || key === "op" ? cell(row[key], key) : row[key])
        : element("td", {}, format(row)))));
    }
    if (run.gemms.rest && !op && !phase && !shape && !module) {
      const [calls, flops, , seconds] = run.gemms.rest;
      const rest = { calls, flops, seconds, share: seconds / (run.totals.seconds || 1), rate: null, intensity: null };
      body.append(element("tr", { class: "rest" }, element("td", { class: "text", colspan: 5 }, "all others"),
        ...columns.slice(5).map(([, , format]) => element("td", {}, format(rest)))));
    }
    const heads = columns.map(([key, text, format]) => {
      const sorted = sorting.by === key;
      const button = element("button", { type: "button" }, `${text}${sorted ? (sorting.down ? " ↓" : " ↑") : ""}`);
      button.addEventListener("click", () => {
        sorting.down = sorted ? !sorting.down : format !== "text";
        sorting.by = key;
        gemmsDraw();
        byId("gemms-table").querySelectorAll("th button")[columns.findIndex(([each]) => each === key)].focus();
      });
      const head = element("th", { scope: "col", class: format === "text" ? "text" : "" }, button);
      if (sorted) head.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
      return head;
    });
    byId("gemms-table").replaceChildren(products.length
      ? element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body) : "");
    const more = byId("gemms-more");
    more.hidden = rows.length <= shownRows;
    more.textContent = allRows ? `Show the first ${shownRows}` : `Show all ${rows.length.toLocaleString("en")} rows`;
  }
  function compare(one, other) {
    if (one === null || other === null) return (one !== null) - (other !== null);
    return typeof one === "string" ? one.localeCompare(other) : one - other;
  }
  function roofline(rows) {
    const drawn = rows.filter((row) => row.rate && row.intensity);
    if (!drawn.length) return clear("roofline");
    const traces = [];
    // The roof is the highest rate of this run, over all its products and not only those shown.
    const measured = products.filter((row) => row.rate && row.intensity);
    const work = most(measured.map((row) => row.rate));
    const memory = most(measured.map((row) => row.rate / row.intensity));
    const left = least(measured.map((row) => row.intensity)) / 3;
    const right = Math.max(most(measured.map((row) => row.intensity)), work / memory) * 3;
    traces.push({
      type: "scatter", mode: "lines", name: "highest measured", hoverinfo: "skip", line: { color: color("quiet"), width: 1, dash: "dot" },
      x: [left, work / memory, right], y: [left * memory, work, work],
    });
    for (const [phase, symbol] of Object.entries(phases)) {
      const group = drawn.filter((row) => row.phase === phase);
      if (!group.length) continue;
      traces.push({
        type: "scatter", mode: "markers", name: phase, x: group.map((row) => row.intensity), y: group.map((row) => row.rate),
        marker: { symbol, color: color(phase), size: group.map((row) => 6 + 26 * Math.sqrt(row.share)), opacity: 0.75, line: { color: color("panel"), width: 1 } },
        hoverinfo: "text",
        hovertext: group.map((row) => [`${row.op} ${row.shape} ${row.dtype}`, row.module, `${figure(row.rate, "FLOP/s")} at ${plain(row.intensity)} FLOP/byte`,
          `${counted(row.calls, "call")}, ${time(row.seconds)}`].map((text) => label(short(text, 90))).join("<br>")),
      });
    }
    const lowest = least(measured.map((row) => row.rate));
    draw("roofline", traces, {
      height: narrow() ? 300 : 380, margin: { l: 50, r: 16, t: 40, b: 44 },
      xaxis: axis("FLOP per byte", decades(left, right, plain)),
      yaxis: axis("FLOP/s", decades(lowest / 3, work * 3, (value) => figure(value, ""))),
    });
  }

  // --- distributions

  function histogramsOptions() {
    const { histograms, heat } = run;
    byId("histograms").hidden = !histograms.shown.length && !histograms.unread;
    const wide = narrow() ? 34 : 70;
    fill(byId("histograms-module"), histograms.shown.map((each, number) => [number, `${short(heat.modules[each.module], wide)}, ${each.phase}`]));
    byId("histograms-controls").hidden = !histograms.shown.length;
    byId("histograms-text").textContent = histograms.sampled
      ? "Samples of the outputs of the first and the last few calls of a module in a pass." : "The outputs of the first and the last call of a module in a pass.";
    notes("histograms-notes", [
      histograms.unread && `${counted(histograms.unread, "tensor")} could not be read, or are too large for this page.`,
      histograms.left_out && `The page shows the first ${histograms.shown.length} histograms and leaves out ${histograms.left_out.toLocaleString("en")}.`,
    ]);
  }
  function histogramsDraw() {
    const { histograms } = run;
    const shown = histograms.shown[byId("histograms-module").value || 0];
    if (!shown) return clear("histogram-plot");
    const log = byId("histograms-scale").value === "log";
    const styles = [["forward", "solid", "circle"], ["backward", "dash", "square"]];
    const [low, high] = shown.edges;
    const floor = log ? 0.5 : 0;
    const traces = shown.drawn.map((each, number) => {
      const [variable, dash, symbol] = styles[number];
      const bins = each.counts.length;
      const steps = each.steps[0] === each.steps[1] ? `step ${each.steps[0]}` : `steps ${each.steps[0]}–${each.steps[1]}`;
      const name = `${steps}, ${counted(each.calls, "call")}${each.nonfinite ? `, ✖ ${each.nonfinite} of ${each.count} not finite` : ""}`;
      const shared = { type: "scatter", name, hovertemplate: "%{y} at %{x:.4g}<extra></extra>" };
      if (bins === 1) {
        return { ...shared, mode: "markers", x: [low], y: each.counts, marker: { color: color(variable), size: 10, symbol } };
      }
      const edges = [...Array(bins + 1).keys()].map((bin) => low + bin * (high - low) / bins);
      return {
        ...shared, mode: "lines", line: { shape: "hv", color: color(variable), dash, width: 1.8 }, fill: number || log ? "none" : "tozeroy",
        x: [low, ...edges], y: [floor, ...each.counts.map((count) => Math.max(count, floor)), floor],
      };
    });
    const highest = most(shown.drawn.flatMap((each) => each.counts));
    draw("histogram-plot", traces, {
      height: 320, showlegend: true, margin: { l: 50, r: 16, t: 50, b: 44 }, xaxis: axis("value", { nticks: narrow() ? 5 : 10, zeroline: false }),
      yaxis: axis("values in a bin", log ? decades(floor, highest * 2, plain) : { rangemode: "tozero" }),
    });
  }

  // --- two runs

  const kinds = {
    added: ["diamond", "mark", "added here: operands equal, output differs"],
    "changed argument": ["cross", "mark", "argument changed"],
    "changed operand": ["square", "backward", "operand changed"],
    unclear: ["star-triangle-up", "quiet", "unclear"],
    inherited: ["circle", "forward", "inherited"],
  };
  const ways = { tensors: "all of its values", sample: "a sample of its values", hash: "its statistics", statistics: "its statistics", metadata: "its shape" };
  const error = (size) => (size === null ? "?" : size === "inf" ? "Inf" : plain(size));

  function divergenceText() {
    const found = data.divergence;
    byId("divergence").hidden = !found;
    if (!found) return;
    const text = byId("divergence-text");
    if (found.failed) return text.replaceChildren(element("p", { class: "note" }, found.failed));
    const lines = [];
    if (found.first) {
      const { first } = found;
      const changed = [
        ...first.arguments.flatMap(([key, one, other]) => ["Its argument ", name(key), " was ", name(one), " in A and is ", name(other), " in B. "]),
        first.changed.length ? `Its ${first.changed.join(" and ")} ${first.changed.length > 1 ? "differ" : "differs"}, and no earlier call explains that.`
          : { added: "Its operands are equal but its output differs: this call adds the difference.", inherited: "Its operands already differ.", "changed argument": "" }[first.kind]
          ?? "Its recorded operands are equal but its output differs: it has other operands, draws random numbers, or raised in one of the runs.",
      ];
      const broken = first.nonfinite.map(([role, ...sides]) => `its ${role} has ${sides.map((side, number) => `${nonfinite(side) || "none"} in ${"AB"[number]}`).join(" and ")}`);
      lines.push(element("p", {}, element("b", {}, "First divergence: "), `call ${first.index} of A, ${first.other_index} of B, in step ${first.step}, ${first.phase}: `,
        name(first.op), " in ", name(first.module), ...(first.source ? [", ", name(first.source)] : []), ". ", ...changed,
        broken.length ? ` NaN and Inf: ${broken.join(", ")}.` : "",
        first.relative === null ? "" : ` The relative error of its output is ${first.by === "tensors" || first.relative === "inf" ? "" : "at least "}${error(first.relative)}, judged by ${ways[first.by]}.`));
    } else {
      lines.push(element("p", {}, found.equal ? "No call differs: each has a counterpart with an equal output."
        : found.pairs ? "No call that has a counterpart differs." : "No call has a counterpart, so nothing was compared."));
    }
    const counts = Object.entries(found.kinds).filter(([, count]) => count).map(([kind, count]) => `${count.toLocaleString("en")} ${kind}`);
    if (found.pairs) lines.push(element("p", { class: "quiet" }, `Compared: ${counted(found.pairs, "pair")} of calls: ${counts.join(", ")}.${
      data.runs.every((each) => each.about.tensors === "full") ? "" : " Errors are lower bounds, as not all values were recorded."}`));
    const ranks = (run, empty) => found.absent.filter((each) => each[0] === run && each[2] === empty).map((each) => each[1]);
    const missing = [["A", false], ["B", false], ["A", true], ["B", true]].map(([run, empty]) => [run, empty, ranks(run, empty)]).filter(([, , of]) => of.length);
    const remarks = [
      ...missing.map(([run, empty, of]) => {
        const [word, are, have, were] = of.length > 1 ? ["Ranks", "are", "have", "were"] : ["Rank", "is", "has", "was"];
        return `${word} ${of.join(", ")} ${empty ? `${have} no calls` : `${are} missing`} in ${run} and ${were} not compared.`;
      }),
      found.absent_in_all > found.absent.length && `${found.absent_in_all - found.absent.length} more processes have calls in only one of the runs.`,
      (found.unmatched[0] || found.unmatched[1]) && `${counted(found.unmatched[0], "call")} of A and ${found.unmatched[1].toLocaleString("en")} of B have no counterpart`
        + (found.before[0] || found.before[1] ? `, ${found.before[0]} and ${found.before[1]} of them before the first divergence.` : "."),
      found.left_out && `${counted(found.left_out, "module")} that differ are not drawn.`,
    ].filter(Boolean);
    lines.push(...remarks.map((remark) => element("p", { class: "note" }, remark)));
    if (found.settings.length) {
      lines.push(element("details", {}, element("summary", {}, `The runs differ in ${counted(found.settings.length, "setting")}`),
        element("dl", {}, ...found.settings.flatMap(([key, one, other]) => [element("dt", {}, name(key)), element("dd", {}, "A: ", name(one || "none"), ", B: ", name(other || "none"))]))));
    }
    text.replaceChildren(...lines);
    const phasesHere = Object.keys(data.runs[0].heat.phases).filter((phase) => found.modules.some((point) => point[1] === phase));
    fill(byId("divergence-phase"), phasesHere.map((phase) => [phase, phase]));
    if (found.first && phasesHere.includes(found.first.phase)) byId("divergence-phase").value = found.first.phase;
    if (!found.worst.length) return;
    const heads = ["call of A", "pass", "module", "operator", "kind", "relative error", "absolute error"];
    byId("divergence-table").replaceChildren(element("table", {},
      element("caption", {}, "The largest errors"),
      element("thead", {}, element("tr", {}, ...heads.map((head, number) => element("th", { scope: "col", class: number > 0 && number < 5 ? "text plain" : "plain" }, head)))),
      element("tbody", {}, ...found.worst.map((each) => element("tr", {}, element("td", {}, String(each.index)), element("td", { class: "text" }, each.phase),
        element("td", { class: "text" }, cell(each.module, "module")), element("td", { class: "text" }, cell(each.op, "op")), element("td", { class: "text" }, each.kind),
        element("td", {}, error(each.relative)), element("td", {}, error(each.absolute)))))));
  }
  function divergenceDraw() {
    const found = data.divergence;
    if (!found || found.failed || !found.modules.length) return;
    const { heat } = data.runs[0];
    const phase = byId("divergence-phase").value;
    const points = found.modules.filter((point) => point[1] === phase);
    const rows = [...new Set([...heat.phases[phase].map((cell) => cell[0]), ...points.map((point) => point[0])])].sort((one, other) => one - other);
    const place = new Map(rows.map((row, number) => [row, number]));
    const differs = new Set(points.map((point) => point[0]));
    const logs = points.map((point) => point[5]).filter((size) => typeof size === "number" && size > 0).map(Math.log10);
    const [low, high] = logs.length ? [Math.floor(least(logs)), Math.ceil(most(logs) + 1e-9)] : [-8, 0];
    const every = Math.ceil((high - low) / (narrow() ? 3 : 8)) || 1;
    const tickvals = [];
    for (let power = low; power <= high; power += every) tickvals.push(power);
    const ticktext = tickvals.map((power) => `10<sup>${power}</sup>`);
    const edge = Math.max(0.6, (high - low) * (narrow() ? 0.36 : 0.12));
    const [equal, infinite] = [low - edge, high + edge];
    tickvals.unshift(equal);
    ticktext.unshift("equal");
    if (points.some((point) => point[5] === "inf")) {
      tickvals.push(infinite);
      ticktext.push("Inf");
    }
    // A call that differs by 0 differs in something that has no error: an argument, say.
    const unknown = points.some((point) => !point[5]);
    if (unknown) {
      tickvals.unshift(equal - edge);
      ticktext.unshift("?");
    }
    const at = (size) => (!size ? equal - edge : size === "inf" ? infinite : Math.log10(size));
    const same = rows.filter((row) => !differs.has(row));
    const size = rows.length > 100 ? 5 : 8;
    const traces = [{
      type: "scatter", mode: "markers", name: "equal", x: same.map(() => equal), y: same.map((row) => place.get(row)), hoverinfo: "text",
      hovertext: same.map((row) => `${label(heat.modules[row])}<br>no difference`), marker: { symbol: "circle-open", size: size - 2, color: color("quiet") },
    }, {
      type: "scatter", mode: "lines", showlegend: false, hoverinfo: "skip", line: { color: color("line"), width: 1 },
      x: rows.map((row) => (differs.has(row) ? at(points.find((point) => point[0] === row)[5]) : equal)), y: rows.map((_, number) => number),
    }];
    for (const [kind, [symbol, variable, text]] of Object.entries(kinds)) {
      const group = points.filter((point) => point[2] === kind);
      if (!group.length) continue;
      traces.push({
        type: "scatter", mode: "markers", name: text, x: group.map((point) => at(point[5])), y: group.map((point) => place.get(point[0])), hoverinfo: "text",
        hovertext: group.map((point) => [heat.modules[point[0]], `${counted(point[4], "call")} of ${point[3]} differ`, `largest relative error ${error(point[5])}`].map(label).join("<br>")),
        marker: { symbol, size, color: color(variable), line: { width: 1, color: color("panel") } },
      });
    }
    const names = rows.map((row) => heat.modules[row]);
    const layout = {};
    const { first } = found;
    if (first && first.phase === phase && place.has(first.row)) {
      const y = place.get(first.row);
      layout.shapes = [{ type: "line", xref: "paper", layer: "below", x0: 0, x1: 1, y0: y, y1: y, line: { color: color("mark"), width: 1.5, dash: "dash" } }];
      const top = y < rows.length / 2;
      layout.annotations = [{
        xref: "paper", x: 1, y, xanchor: "right", yanchor: top ? "top" : "bottom", showarrow: false, text: `★ first divergence${rows.length > 45 ? `: ${label(short(names[y], narrow() ? 20 : 44))}` : ""}`, font: { color: color("mark"), size: 12 },
        bgcolor: color("panel"),
      }];
    }
    const height = Math.max(160, Math.min(rows.length * 16, 640)) + 100;
    draw("divergence-plot", traces, {
      height, margin: { l: 10, r: 16, t: narrow() ? 70 : 44, b: 44 }, ...layout,
      xaxis: axis("largest relative error of an output", { tickvals, ticktext, tickangle: 0, range: [(unknown ? equal - edge : equal) - edge / 2, infinite + edge / 2], zeroline: false }),
      yaxis: rowAxis(names, height - 100),
    });
    followZoom("divergence-plot", names, height - 100);
  }

  // --- all of it

  function drawAll() {
    divergenceDraw();
    heatDraw();
    gemmsDraw();
    histogramsDraw();
  }
  function choose() {
    run = data.runs[Number(byId("run").value) || 0];
    allRows = false;
    heatOptions();
    gemmsOptions();
    histogramsOptions();
    drawAll();
  }
  byId("histograms-scale").value = run.histograms.sampled ? "linear" : "log";
  fill(byId("run"), data.runs.map((each, number) => [number, `${"AB"[number]}: ${each.path}`]));
  head();
  divergenceText();
  on(["divergence-phase"], "change", divergenceDraw);
  byId("choice").hidden = data.runs.length < 2;
  on(["run"], "change", choose);
  on(["heat-statistic", "heat-role", "heat-phase"], "change", heatDraw);
  on(["heat-filter"], "input", heatDraw);
  on(["gemms-op", "gemms-phase"], "change", gemmsDraw);
  on(["gemms-shape", "gemms-module"], "input", gemmsDraw);
  on(["histograms-module", "histograms-scale"], "change", histogramsDraw);
  byId("gemms-more").addEventListener("click", () => { allRows = !allRows; gemmsDraw(); });
  dark.addEventListener("change", drawAll);
  choose();
  let width = byId("heat").clientWidth;
  let pending = 0;
  new ResizeObserver(() => {
    if (byId("heat").clientWidth === width) return;
    width = byId("heat").clientWidth;
    clearTimeout(pending);
    pending = setTimeout(drawAll, 100);
  }).observe(byId("heat"));
  document.documentElement.dataset.drawn = "yes";
})();
