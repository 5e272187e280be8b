"use strict";
// The panel of modules over steps: a map of one statistic, or of work.
const heat = (() => {
  const { byId, clear, counted, figure, fill, nonfinite, notes, plain, rangeText, time } = parts;
  const { foldButtons, pastText, rowsOf, scaled, stepText } = maps;
  const { letterOf } = state;

  const statistics = {
    rms: { text: "root mean square", scale: "log", format: plain },
    absmax: { text: "largest magnitude", scale: "log", format: plain },
    mean: { text: "mean", scale: "signed", format: plain },
    min: { text: "smallest", scale: "signed", format: plain },
    max: { text: "largest", scale: "signed", format: plain },
    nonfinite: { text: "share of NaN and Inf", scale: "linear", format: (value) => `${plain(value * 100)} %` },
    seconds: { text: "host time", work: true, scale: "log", format: time },
    flops: { text: "FLOP", work: true, scale: "log", format: (value) => figure(value, "FLOP") },
    calls: { text: "calls", work: true, scale: "linear", format: plain },
  };
  const roles = { output: "outputs", lhs: "left operands", rhs: "right operands", bias: "biases" };

  function heatOptions() {
    const { run } = state;
    const { heat } = run;
    fill(byId("heat-statistic"), Object.entries(statistics)
      .filter(([, each]) => each.work || heat.roles.length).map(([key, each]) => [key, each.text]));
    fill(byId("heat-role"), heat.roles.map((role) => [role, roles[role]]));
    fill(byId("heat-phase"), Object.keys(heat.phases).map((phase) => [phase, phase]));
    fill(byId("heat-colors"), maps.colorsFor(heat));
  }
  function heatDraw() {
    const { data, run } = state;
    const { heat } = run;
    const statistic = statistics[byId("heat-statistic").value];
    const [key, role, phase] = ["heat-statistic", "heat-role", "heat-phase"].map((id) => byId(id).value);
    byId("heat-role").parentElement.hidden = heat.roles.length < 2 || Boolean(statistic.work);
    byId("heat-text").textContent = !run.totals.calls ? "The run has no calls."
      : heat.roles.length ? "Colour shows the statistic over all calls of the module in the step; a group of modules "
        + "has all of theirs. Cells without calls are blank."
        : "No values were recorded, so this shows work. Record with tensors=\"stats\" to see values.";
    notes("heat-notes", [
      heat.width > 1 && `To fit, each column combines ${counted(heat.width, "step")}.`,
      heat.left_out && `The map shows the first ${counted(heat.modules.length, "module")} and leaves out ${
        counted(heat.left_out, "call")} of others.`,
    ]);
    byId("heat-controls").hidden = !run.totals.calls;
    const tree = rowsOf("heat", run, phase, byId("heat-filter").value.toLowerCase());
    const { rows } = tree;
    if (!rows.length) {
      foldButtons("heat", tree, heatDraw);
      ["heat-chosen", "heat-plot"].forEach(clear);
      return byId("heat-key").replaceChildren(run.totals.calls ? "No module has a name that contains this." : "");
    }
    const cells = heat.phases[phase];
    const known = modules.index(cells);
    const sums = rows.map((row) => modules.sums(cells, known, row.rows, heat.steps.length, role));
    const values = sums.map((row) => row.map((sum) => sum && sum[key]));
    const log = statistic.scale === "log";
    const past = byId("heat-colors").value === "past" ? values.map((row) => modules.againstPast(row, log)) : null;
    const colors = scaled(values, past, statistic);
    const broken = { nan: 0, inf: 0 };
    rows.forEach((row, y) => {
      row.cells = sums[y].map((sum, x) => {
        if (!sum) return null;
        const mark = statistic.work ? null : sum.nan ? "nan" : sum.inf ? "inf" : null;
        if (mark && !row.group) broken[mark]++;
        const value = values[y][x];
        if (value === null) return { part: null, text: "none", mark };
        return { part: colors.part(value, past && past[y][x]), text: statistic.format(value), mark };
      });
    });
    const lines = (row, x) => {
      const y = rows.indexOf(row);
      const sum = sums[y][x];
      return [
        row.title, `step ${stepText(heat, x)}, ${phase}, ${counted(sum.calls, "call")}`,
        `${statistic.text}: ${row.cells[x].text}`, ...pastText(past, y, x, log),
        ...(!statistic.work && sum.nan + sum.inf
          ? [`${nonfinite([sum.nan, sum.inf])} of ${counted(sum.count, "value")}`] : []),
      ];
    };
    const facts = (sum) => [
      counted(sum.calls, "call"), `${time(sum.seconds)} of host time`, figure(sum.flops, "FLOP"),
      ...(sum.values ? [`${roles[role]}: ${rangeText(sum).join(", ")}`, nonfinite([sum.nan, sum.inf]) || "all finite"]
        : []),
    ];
    maps.draw("heat", {
      label: `${statistic.text} of each module by step`, heat, phase, tree, colors, lines,
      chose: { run: data.runs.length > 1 ? letterOf() : null },
      redraw: heatDraw, follow: () => { divergence.draw(); outputs.follow(); },
      keys: statistic.work || !role ? [] : [
        broken.nan && [plots.sign("✖"), ` has NaN: ${counted(broken.nan, "cell")}`],
        broken.inf && [plots.sign("▲"), ` has Inf, no NaN: ${counted(broken.inf, "cell")}`],
        broken.nan + broken.inf ? "Statistics cover only the finite values." : "All values are finite.",
      ],
      box: (row, { row: y, column }) => {
        const sum = sums[y][column];
        return [sum ? facts(sum) : ["no calls"], commands.of(run, row, phase, column, sum && sum.call)];
      },
    });
  }
  return { draw: heatDraw, options: heatOptions };
})();
