"use strict";
// The panel of two runs: what `diff` prints, and a map of errors.
const divergence = (() => {
  const { element } = plots;
  const { byId, counted, fill, name, partOf, plain } = parts;
  const { columnOf, pastText, rowsOf, scaled, stepText } = maps;

  const kinds = {
    added: ["◆", "added here: the operands do not explain it"],
    "changed argument": ["✚", "argument changed"],
    "changed operand": ["■", "operand changed"],
    unclear: ["?", "unclear"],
    inherited: ["", "inherited"],
    rounding: ["", "rounding"],
  };
  const error = (size) => (size === null ? "?" : size === "inf" ? "Inf" : plain(size));
  const paragraph = (...words) => element("p", {}, ...words);

  function divergenceText() {
    const { data } = state;
    const found = data.divergence;
    byId("divergence").hidden = !found;
    if (!found) return;
    const text = byId("divergence-text");
    if (found.failed) return text.replaceChildren(element("p", { class: "note" }, found.failed));
    text.replaceChildren(...found.parts.map(partOf), ...aboveText(found));
    const phases = Object.keys(data.runs[0].heat.phases)
      .filter((phase) => found.modules.some((point) => point[1] === phase));
    fill(byId("divergence-phase"), phases.map((phase) => [phase, phase]));
    if (found.first && phases.includes(found.first.phase)) byId("divergence-phase").value = found.first.phase;
  }
  // Where the error rises above the noise of the first steps.
  function aboveText({ drift: { noise, above }, first }) {
    const { data } = state;
    if (!noise) return [];
    const steps = noise.steps === 1 ? "the first step" : `the first ${noise.steps} steps`;
    const begin = !noise.usual ? `In ${steps}, no module differs by more than rounding. `
      : `In ${steps}, a module that differs is off by ${plain(noise.usual)} in the median. `;
    const meaning = `Noise is the median error of the module in ${steps}; where that is within its rounding, the `
      + `median of the others. An error is above it if it is more than ${noise.times} times as large, and more than ${
        noise.times} times the rounding of its dtype.`;
    if (!above) {
      return first ? [element("p", { title: meaning }, element("b", {}, "Above the noise: "), begin,
        `No step is more than ${noise.times} times above its module's noise.`)] : [];
    }
    const { heat } = data.runs[0];
    const [unit, size] = above.noise > above.rounding ? ["noise", above.noise] : ["rounding", above.rounding];
    const ratio = above.error === "inf" ? Infinity : above.error / size;
    const step = stepText(heat, above.column);
    return [
      paragraph(element("b", {}, `First step above the noise: ${step}. `), begin,
        `In step ${step}, ${above.phase}, `, name(heat.modules[above.row]),
        ` has an error of ${error(above.error)}, ${plain(ratio)} times its ${unit} of ${plain(size)}.`),
      element("p", { class: "quiet small" }, meaning),
    ];
  }
  function divergenceDraw() {
    const { data } = state;
    const found = data.divergence;
    if (!found || found.failed) return;
    byId("divergence-map").hidden = !found.modules.length;
    if (!found.modules.length) return;
    const { heat } = data.runs[0];
    const phase = byId("divergence-phase").value;
    const tree = rowsOf("divergence", data.runs[0], phase, "");
    const { rows } = tree;
    const cells = found.drift.phases[phase];
    const [known, base] = [modules.index(cells), modules.index(heat.phases[phase])];
    const calls = rows.map((row) => modules.sums(heat.phases[phase], base, row.rows, heat.steps.length, null));
    const errors = rows.map((row) => (cells ? modules.errors(cells, known, row.rows, heat.steps.length)
      : heat.steps.map(() => null)));
    const values = errors.map((row) => row.map((sum) => sum && sum.error));
    const past = byId("divergence-colors").value === "past"
      ? values.map((row) => modules.againstPast(row, true)) : null;
    const positive = values.map((row) => row.map((value) => (value > 0 ? value : null)));
    const colors = scaled(positive, past, { scale: "log", format: plain });
    const above = found.drift.above && found.drift.above.phase === phase ? found.drift.above : null;
    const kindOf = new Map(found.modules.filter((point) => point[1] === phase).map((point) => [point[0], point[2]]));
    const used = new Set();
    let infinite = 0;
    rows.forEach((row, y) => {
      const kind = row.group ? null : kindOf.get(row.rows[0]);
      if (kind && kinds[kind][0]) { row.sign = kinds[kind][0]; used.add(kind); }
      row.cells = calls[y].map((sum, x) => {
        if (!sum) return null;
        const drift = errors[y][x];
        const star = above && row.rows.includes(above.row) && above.column === x;
        if (drift && drift.inf && !row.group) infinite++;
        return {
          part: positive[y][x] === null ? null : colors.part(positive[y][x], past && past[y][x]),
          mark: star ? "star" : drift && drift.inf ? "inf" : null,
          text: !drift ? "no difference" : drift.error === null && drift.inf ? "Inf" : `error ${error(drift.error)}`,
        };
      });
    });
    const lines = (row, x) => {
      const y = rows.indexOf(row);
      const drift = errors[y][x];
      const differ = !drift ? [counted(calls[y][x].calls, "call"), "no difference"] : [
        `${counted(drift.calls, "call")} of ${calls[y][x].calls} ${drift.calls === 1 ? "differs" : "differ"}`,
        `largest relative error ${error(drift.error)}${drift.inf ? `, and Inf in ${counted(drift.inf, "call")}` : ""}`,
      ];
      return [row.title, `step ${stepText(heat, x)}, ${phase}, ${differ[0]}`, differ[1], ...pastText(past, y, x, true)];
    };
    maps.draw("divergence", {
      label: "Relative error of each module by step", heat, phase, tree, colors, lines,
      chose: { run: "A" }, redraw: divergenceDraw, follow: () => state.showChosen(),
      keys: [
        above && [plots.sign("★"), " first above the noise"],
        infinite && [plots.sign("▲"), ` Inf: ${counted(infinite, "cell")} where A is all zeros, or NaN and Inf differ`],
        ...[...used].map((kind) => [plots.sign(kinds[kind][0]), ` ${kinds[kind][1]}`]), "Grey cells are equal.",
      ],
      box: (row, { row: y, column }) => {
        const sum = calls[y][column];
        const texts = data.runs.flatMap((each) => commands.of(each, row, phase, columnOf(each.heat, heat.steps[column]),
          each === data.runs[0] && sum ? sum.call : null));
        return [sum ? lines(row, column).slice(2) : ["no calls"],
          texts.filter((text) => !text.includes("--by") && !text.includes("undefined"))];
      },
    });
  }
  return { draw: divergenceDraw, text: divergenceText };
})();
