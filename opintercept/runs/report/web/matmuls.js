"use strict";
// The panel of operators: a table that sorts and filters, and the roofline of its rows.
const matmuls = (() => {
  const { element, keyed, narrow, shape } = plots;
  const { byId, cell, clear, counted, digits, figure, fill, least, most, notes, on, plain, short, time } = parts;
  const shownRows = 25;
  // On an asynchronous device, host time is no time of the work.
  const rateOf = (device, work, seconds) => (device === "cpu" && seconds && work !== null ? work / seconds : null);
  // Operators without a formula for their FLOP, such as those by element, show the bytes that they move.
  const rateText = ({ device, flops, bytes, seconds }) => (flops === null
    ? figure(rateOf(device, bytes, seconds), "B/s") : figure(rateOf(device, flops, seconds), ""));
  const columns = [
    ["op", "operator", "text"], ["phase", "pass", "text"], ["module", "modules", "text"], ["shape", "shape", "text"],
    ["dtype", "dtype", "text"], ["calls", "calls", (row) => digits(row.calls)],
    ["flops", "FLOP", (row) => (row.flops === null ? figure(row.bytes, "B") : figure(row.flops, ""))],
    ["seconds", "time", (row) => time(row.seconds)], ["share", "share", (row) => `${(row.share * 100).toFixed(1)} %`],
    ["rate", "FLOP/s", rateText], ["intensity", "FLOP/byte", (row) => plain(row.intensity)],
  ];
  const sorting = { by: "seconds", down: true };
  let allRows = false;
  let run = null;
  let rowsOfRun = [];

  function options() {
    const total = run.totals.seconds || 1;
    rowsOfRun = run.gemms.rows.map(([op, phase, module, shape, dtype, device, calls, flops, bytes, seconds]) => {
      const intensity = flops === null || !bytes ? null : flops / bytes;
      const [rate, share] = [rateOf(device, flops, seconds), (seconds || 0) / total];
      return { op, phase, module, shape, dtype, device, calls, flops, bytes, seconds, rate, intensity, share };
    });
    const distinct = (key) => [...new Set(rowsOfRun.map((row) => row[key]))].sort().map((value) => [value, value]);
    fill(byId("gemms-op"), [["", "all"], ...distinct("op")]);
    fill(byId("gemms-phase"), [["", "all"], ...distinct("phase")]);
    byId("gemms-controls").hidden = !rowsOfRun.length;
  }
  function draw() {
    const [op, phase, shape, module] = ["op", "phase", "shape", "module"]
      .map((key) => byId(`gemms-${key}`).value.toLowerCase());
    const rows = rowsOfRun.filter((row) => (!op || row.op.toLowerCase() === op) && (!phase || row.phase === phase)
      && row.shape.toLowerCase().includes(shape) && row.module.toLowerCase().includes(module));
    rows.sort((one, other) => compare(one[sorting.by], other[sorting.by]) * (sorting.down ? -1 : 1));
    byId("gemms-text").textContent = rowsOfRun.length
      ? "Each row combines calls of the same operator, pass, shape and dtype, in modules whose names differ only in "
        + "numbers, for which * stands. Times are host times."
      : "The run has no calls.";
    notes("gemms-notes", [
      rowsOfRun.some((row) => row.device !== "cpu" && row.device !== "")
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
      const [calls, flops, bytes, seconds] = run.gemms.rest;
      const share = seconds / (run.totals.seconds || 1);
      const rest = { device: "", calls, flops, bytes, seconds, share, rate: null, intensity: null };
      body.append(element("tr", { class: "rest" }, element("td", { class: "text", colspan: 5 }, "all others"),
        ...columns.slice(5).map(([, , format]) => element("td", {}, format(rest)))));
    }
    const heads = columns.map(([key, text, format]) => {
      const sorted = sorting.by === key;
      const button = element("button", { type: "button" }, `${text}${sorted ? (sorting.down ? " ↓" : " ↑") : ""}`);
      button.addEventListener("click", () => {
        sorting.down = sorted ? !sorting.down : format !== "text";
        sorting.by = key;
        draw();
        byId("gemms-table").querySelectorAll("th button")[columns.findIndex(([each]) => each === key)].focus();
      });
      const head = element("th", { scope: "col", class: format === "text" ? "text" : "" }, button);
      if (sorted) head.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
      return head;
    });
    byId("gemms-table").replaceChildren(rowsOfRun.length
      ? element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body) : "");
    const more = byId("gemms-more");
    more.hidden = rows.length <= shownRows;
    more.textContent = allRows ? `Show the first ${shownRows}` : `Show all ${digits(rows.length)} rows`;
  }
  function compare(one, other) {
    if (one === null || other === null) return (one !== null) - (other !== null);
    return typeof one === "string" ? one.localeCompare(other) : one - other;
  }
  function roofline(rows) {
    const isPoint = (row) => row.rate && row.intensity;
    const drawn = rows.filter(isPoint);
    if (!drawn.length) return clear("roofline");
    // The roof is the highest rate of this run, over all its products and not only those shown.
    const measured = rowsOfRun.filter(isPoint);
    const work = most(measured.map((row) => row.rate));
    const memory = most(measured.map((row) => row.rate / row.intensity));
    const intensities = measured.map((row) => row.intensity);
    const [left, right] = [least(intensities) / 3, Math.max(most(intensities), work / memory) * 3];
    const low = Math.min(least(measured.map((row) => row.rate)) / 3, left * memory);
    plots.chart(byId("roofline"), {
      label: `FLOP/s by FLOP per byte of ${counted(drawn.length, "row")} of the table below`,
      height: narrow() ? 300 : 380,
      x: { title: "FLOP per byte", low: left, high: right, log: true, format: plain },
      y: { title: "FLOP/s", low, high: work * 3, log: true, format: (value) => figure(value, "") },
      draw: (x, y) => [
        shape("path", {
          class: "roof", d: plots.path([[x(left), y(left * memory)], [x(work / memory), y(work)], [x(right), y(work)]]),
        }),
        ...drawn.map((row) => shape("circle", {
          class: `point ${row.phase}`, cx: x(row.intensity), cy: y(row.rate), r: 3 + 13 * Math.sqrt(row.share),
          "data-tip": [
            `${row.op} ${row.shape} ${row.dtype}`, row.module,
            `${figure(row.rate, "FLOP/s")} at ${plain(row.intensity)} FLOP/byte`,
            `${counted(row.calls, "call")}, ${time(row.seconds)}`,
          ].map((text) => short(text, 90)).join("\n"),
        })),
      ],
    });
    const used = Object.keys(run.heat.phases).filter((phase) => drawn.some((row) => row.phase === phase));
    byId("roofline-key").replaceChildren(...used.map((phase) => keyed("point", `point ${phase}`, phase)),
      keyed("line", "roof", "highest measured"));
  }

  function choose(each) {
    run = each;
    allRows = false;
    options();
  }
  on(["gemms-op", "gemms-phase"], "change", () => draw());
  on(["gemms-shape", "gemms-module"], "input", () => draw());
  byId("gemms-more").addEventListener("click", () => { allRows = !allRows; draw(); });
  return { choose, draw };
})();
