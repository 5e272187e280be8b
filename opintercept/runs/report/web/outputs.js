"use strict";
// The panel of a module's outputs over steps: their range, and histograms.
const outputs = (() => {
  const { keyed, narrow, shape } = plots;
  const { byId, clear, counted, digits, fill, least, most, nonfinite, notes, plain, rangeText, short } = parts;
  const { columnOf, stepText } = maps;
  const { chosen } = state;

  let drawable = [];
  function outputsOptions() {
    const { run } = state;
    const { histograms, heat } = run;
    const drawn = new Map(histograms.shown.map((each) => [`${each.module},${each.phase}`, each]));
    drawable = !heat.roles.includes("output") ? []
      : Object.entries(heat.phases).flatMap(([phase, cells]) => [...modules.index(cells)]
        .map(([row, list]) => ({ row, phase, list, histogram: drawn.get(`${row},${phase}`) }))
        .filter(({ list, histogram }) => histogram || list.some((cell) => cells.output.count[cell] !== null)));
    byId("outputs").hidden = !drawable.length && !histograms.unread;
    const wide = narrow() ? 34 : 70;
    fill(byId("outputs-module"), drawable.map(({ row, phase }, number) => [
      number, `${short(heat.modules[row], wide)}, ${phase}`]));
    byId("outputs-controls").hidden = !drawable.length;
    const about = !histograms.shown.length
      ? "Record with tensors=\"sample\" or \"full\" to see how they are distributed."
      : `The histograms are of ${histograms.sampled ? "samples of a few calls each" : "single calls"}.`;
    byId("outputs-text").textContent = `The finite values of a module's outputs in each step. ${about}`;
    notes("outputs-notes", [
      histograms.unread && `${counted(histograms.unread, "tensor")} could not be read, or are too large for this page.`,
      histograms.left_out && `The page has the histograms of the first ${
        histograms.shown.length} modules and passes, and leaves out ${digits(histograms.left_out)}.`,
    ]);
  }
  // Shows the module that is chosen in a map, if it has outputs.
  function outputsFollow() {
    const { run } = state;
    const number = drawable.findIndex(({ row, phase }) => run.heat.modules[row] === chosen.get("module")
      && phase === (chosen.get("phase") || phase));
    if (number >= 0) byId("outputs-module").value = String(number);
    outputsDraw();
  }
  function outputsDraw() {
    const { run } = state;
    const { heat } = run;
    const one = drawable[byId("outputs-module").value || 0];
    ["outputs-plot", "outputs-key", "histogram-plot"].forEach(clear);
    byId("outputs-bins").hidden = !one?.histogram;
    if (!one) return;
    const cells = heat.phases[one.phase];
    const sums = modules.sums(cells, modules.index(cells), [one.row], heat.steps.length, "output");
    const ends = sums.flatMap((sum) => (sum && sum.min !== null && sum.max !== null ? [sum.min, sum.max] : []));
    if (heat.steps.length > 1 && ends.length) {
      const [low, high] = [Math.min(0, least(ends)), Math.max(0, most(ends))];
      const column = chosen.has("step") ? columnOf(heat, Number(chosen.get("step"))) : -1;
      plots.chart(byId("outputs-plot"), {
        label: `Smallest, largest, mean and root mean square of the outputs of ${heat.modules[one.row]} by step`,
        height: 240,
        x: {
          title: "step", low: -0.5, high: heat.steps.length - 0.5, // a step is as wide as its fill
          format: (value) => (Number.isInteger(value) ? `${heat.steps[value]}` : ""),
        },
        y: { title: "value", low, high: high > low ? high : low + 1, format: plain },
        draw: (x, y, { top, bottom }) => {
          const wide = x(1) - x(0);
          const place = (number) => ({ x: x(number) - wide / 2, width: wide });
          const line = (key) => shape("path", {
            class: `line ${key}`,
            d: plots.path(sums.map((sum, number) => (sum && sum[key] !== null ? [x(number), y(sum[key])] : null))),
          });
          return [
            ...sums.map((sum, number) => (!sum || sum.min === null ? "" : shape("rect", {
              class: "band", ...place(number), y: y(sum.max), height: Math.max(y(sum.min) - y(sum.max), 1),
            }))),
            column >= 0 ? shape("line", { class: "here", x1: x(column), x2: x(column), y1: top, y2: bottom }) : "",
            line("mean"), line("rms"),
            ...sums.map((sum, number) => (!sum || !sum.values ? "" : shape("rect", {
              class: "hit", ...place(number), y: top, height: bottom - top,
              "data-tip": [`step ${stepText(heat, number)}`, ...rangeText(sum), nonfinite([sum.nan, sum.inf])]
                .filter(Boolean).join("\n"),
            }))),
          ];
        },
      });
      byId("outputs-key").replaceChildren(keyed("area", "band", "smallest to largest"),
        keyed("line", "line mean", "mean"), keyed("line", "line rms", "root mean square"));
    }
    if (one.histogram) histogramDraw(one.histogram, heat.modules[one.row]);
  }
  // A histogram stands upright at each step, its bins as wide as their counts.
  function histogramDraw({ edges: [low, high], drawn }, module) {
    const log = byId("outputs-scale").value === "log";
    const size = (count) => (log ? Math.log1p(count) : count);
    const widest = most(drawn.flatMap((each) => each.counts.map(size))) || 1;
    const steps = drawn.map(({ steps: [first, last] }) => (first === last ? `${first}` : `${first}–${last}`));
    const [bottom, top] = high > low ? [low, high] : [low - 0.5, high + 0.5];
    plots.chart(byId("histogram-plot"), {
      label: `Histograms of the outputs of ${module} at ${counted(drawn.length, "place")} of the run`, height: 260,
      x: {
        title: "step", low: 0, high: drawn.length, ticks: drawn.map((_, number) => number + 0.5),
        format: (value) => steps[Math.floor(value)] || "",
      },
      y: { title: "value", low: bottom, high: top, format: plain },
      draw: (x, y) => drawn.flatMap((each, number) => each.counts.map((count, bin) => {
        if (!count) return "";
        const every = top / each.counts.length - bottom / each.counts.length;
        const [from, to] = [bottom + bin * every, bottom + (bin + 1) * every];
        const range = high > low ? ` from ${plain(from)} to ${plain(to)}` : `, all ${plain(low)}`;
        return shape("rect", {
          class: "bin", x: x(number) + 1, width: Math.max(1, (x(1) - x(0) - 6) * size(count) / widest),
          y: y(to), height: Math.max(y(from) - y(to) - 0.5, 0.5),
          "data-tip": [
            `step ${steps[number]}, ${counted(each.calls, "call")}`, `${counted(count, "value")}${range}`,
            ...(each.nonfinite ? [`✖ ${each.nonfinite} of ${each.count} not finite`] : []),
          ].join("\n"),
        });
      })),
    });
  }
  return { draw: outputsDraw, follow: outputsFollow, options: outputsOptions };
})();
