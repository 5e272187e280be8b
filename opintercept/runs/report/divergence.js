"use strict";
// The panel of two runs: the first divergence in words, a map of errors, and the largest errors.
const divergence = (() => {
  const { element } = plots;
  const { byId, cell, counted, fill, name, nonfinite, plain } = parts;
  const { chosenBox, columnOf, foldButtons, found, pastText, rowsOf, scaled, stepText, toggle } = maps;
  const { remember } = state;

  const kinds = {
    added: ["◆", "added here: operands equal, output differs"],
    "changed argument": ["✚", "argument changed"],
    "changed operand": ["■", "operand changed"],
    unclear: ["?", "unclear"],
    inherited: ["", "inherited"],
  };
  const ways = { tensors: "all of its values", sample: "a sample of its values", hash: "its statistics", statistics: "its statistics", metadata: "its shape" };
  const error = (size) => (size === null ? "?" : size === "inf" ? "Inf" : plain(size));

  function divergenceText() {
    const { data } = state;
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
      lines.push(element("p", {}, found.equal ? (found.kinds["not compared"] ? "No call differs as far as values were recorded." : "No call differs: each has a counterpart with an equal output.")
        : found.pairs ? "No call that has a counterpart differs." : "No call has a counterpart, so nothing was compared."));
    }
    lines.push(...aboveText(found));
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
  // Where the error rises above the noise of the first steps.
  function aboveText({ drift: { noise, above }, first }) {
    const { data } = state;
    if (!noise) return [];
    const steps = noise.steps === 1 ? "the first step" : `the first ${noise.steps} steps`;
    const begin = noise.usual ? `In ${steps}, the error of a module is ${plain(noise.usual)} in the median: this is the runs' noise. ` : `In ${steps}, most modules are equal. `;
    const meaning = `Noise is the median error of the module in ${steps}; an error is above it if it is more than ${noise.times} times as large, or more than 0 where the module begins equal.`;
    if (!above) return first ? [element("p", { title: meaning }, element("b", {}, "Above the noise: "), begin, `No step is more than ${noise.times} times above its module's noise.`)] : [];
    return [element("p", {}, element("b", {}, `First step above the noise: ${above.step}. `), begin, `In step ${above.step}, ${above.phase}, `, name(above.module),
      ` has an error of ${error(above.error)} in call ${above.index}${data.runs[0].ranks > 1 ? ` of rank ${above.rank}` : ""}, ${above.noise ? `${plain(above.error === "inf" ? Infinity : above.error / above.noise)} times its noise of ${plain(above.noise)}` : "where it began equal"}.`),
    element("p", { class: "quiet small" }, meaning)];
  }
  function divergenceDraw() {
    const { data } = state;
    const found_ = data.divergence;
    if (!found_ || found_.failed) return;
    byId("divergence-map").hidden = !found_.modules.length;
    if (!found_.modules.length) return;
    const { heat } = data.runs[0];
    const phase = byId("divergence-phase").value;
    const { nodes, open, rows } = rowsOf("divergence", data.runs[0], phase, "");
    foldButtons("divergence", nodes, open, divergenceDraw);
    const cells = found_.drift.phases[phase];
    const [known, base] = [modules.index(cells), modules.index(heat.phases[phase])];
    const calls = rows.map((row) => modules.sums(heat.phases[phase], base, row.rows, heat.steps.length, null));
    const errors = rows.map((row) => (cells ? modules.errors(cells, known, row.rows, heat.steps.length) : heat.steps.map(() => null)));
    const values = errors.map((row) => row.map((sum) => sum && sum.error));
    const past = byId("divergence-colors").value === "past" ? values.map((row) => modules.againstPast(row, true)) : null;
    const positive = values.map((row) => row.map((value) => (value > 0 ? value : null)));
    const { ramp, part, texts } = scaled(positive, past, { scale: "log", format: plain });
    const { above } = found_.drift;
    const kindOf = new Map(found_.modules.filter((point) => point[1] === phase).map((point) => [point[0], point[2]]));
    const used = new Set();
    let infinite = 0;
    rows.forEach((row, y) => {
      const kind = row.group ? null : kindOf.get(row.rows[0]);
      if (kind && kinds[kind][0]) { row.sign = kinds[kind][0]; used.add(kind); }
      row.cells = calls[y].map((sum, x) => {
        if (!sum) return null;
        const error_ = errors[y][x];
        const star = above && above.phase === phase && row.rows.includes(above.row) && columnOf(heat, above.step) === x;
        if (error_ && error_.inf && !row.group) infinite++;
        return {
          part: positive[y][x] === null ? null : part(positive[y][x], past && past[y][x]), mark: star ? "star" : error_ && error_.inf ? "inf" : null,
          text: !error_ ? "no difference" : error_.error === null && error_.inf ? "Inf" : `error ${error(error_.error)}`,
        };
      });
    });
    const lines = (row, x) => {
      const y = rows.indexOf(row);
      const found = errors[y][x];
      return [row.title, `step ${stepText(heat, x)}, ${phase}, ${found ? `${counted(found.calls, "call")} of ${calls[y][x].calls} ${found.calls === 1 ? "differs" : "differ"}` : counted(calls[y][x].calls, "call")}`,
        found ? `largest relative error ${error(found.error)}${found.inf ? `, and Inf in ${counted(found.inf, "call")}` : ""}` : "no difference", ...(past ? pastText(past[y][x], true) : [])];
    };
    const selected = found(rows, heat);
    plots.heat(byId("divergence-plot"), {
      label: "Relative error of each module by step", rows, steps: heat.steps, ramp, lines, selected,
      onSelect: (row, column) => { remember({ panel: "divergence", run: "A", phase, module: rows[row].key, step: heat.steps[column] }); divergenceDraw(); state.showChosen(); },
      onFold: (group) => { toggle(open, group); divergenceDraw(); },
    });
    byId("divergence-key").replaceChildren(...[
      above && above.phase === phase && "★ first above the noise", infinite && `▲ Inf: ${counted(infinite, "cell")} where A is all zeros, or NaN and Inf differ`,
      ...[...used].map((kind) => `${kinds[kind][0]} ${kinds[kind][1]}`), "Grey cells are equal.",
    ].filter(Boolean).map((text) => element("span", {}, text)), ...(heat.steps.length > 1 ? [plots.legend(ramp, texts)] : []));
    byId("divergence-chosen").replaceChildren();
    if (!selected) return;
    const row = rows[selected.row];
    const sum = calls[selected.row][selected.column];
    byId("divergence-chosen").replaceChildren(chosenBox(row, heat, phase, selected.column, sum ? lines(row, selected.column).slice(2) : ["no calls"],
      data.runs.flatMap((each) => commands.of(each, row, phase, columnOf(each.heat, heat.steps[selected.column]), each === data.runs[0] && sum ? sum.call : null)
        .filter((text) => !text.includes("--by") && !text.includes("undefined")))));
  }
  return { draw: divergenceDraw, text: divergenceText };
})();
