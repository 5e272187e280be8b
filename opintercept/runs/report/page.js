"use strict";
// Shows the page's block of data with the other scripts. Texts of a run are untrusted: they become text nodes, and
// commands quote them for a shell. The address keeps what is chosen.
(async () => {
  const { dark, element, narrow, shape } = plots;
  const { byId, cell, clear, counted, figure, fill, least, most, name, notes, on, plain, short, time } = parts;
  const packed = Uint8Array.from(atob(JSON.parse(byId("data").textContent)), (letter) => letter.charCodeAt(0));
  const data = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  let run = data.runs[0];

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

  // --- what is chosen, which the address keeps

  const chosen = new Map(new URLSearchParams(location.hash.slice(1)));
  const fields = ["run", "phase", "statistic", "tensors", "colors", "filter", "step", "module", "panel"];
  const inputs = { phase: "heat-phase", statistic: "heat-statistic", tensors: "heat-role", colors: "heat-colors", filter: "heat-filter" };
  const letterOf = () => "AB"[data.runs.indexOf(run)];
  function remember(changes) {
    for (const [key, value] of Object.entries(changes)) {
      if (value === null || value === "") chosen.delete(key);
      else chosen.set(key, String(value));
    }
    const address = new URLSearchParams(fields.filter((key) => chosen.has(key)).map((key) => [key, chosen.get(key)])).toString();
    history.replaceState(null, "", address ? `#${address}` : location.pathname);
  }
  // What follows a quoted text is part of a command that a reader pastes into a shell.
  const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replace(/'/g, "'\\''")}'`);
  const option = (key, text) => (text.startsWith("-") ? `--${key}=${quoted(text)}` : `--${key} ${quoted(text)}`);
  const folder = (each) => (each.exact ? quoted(each.path.startsWith("-") ? `./${each.path}` : each.path) : null);
  function commands(of, row, phase, column, call) {
    const path = folder(of);
    if (path === null) return [];
    const { steps, width, exact } = of.heat;
    const narrowed = [`--phase ${phase}`];
    if (row && row.rows.every((each) => exact[each])) {
      const name = (row.group ? row.key.slice(0, -2) : row.key).replace(/[[*?]/g, "[$&]");
      narrowed.unshift(option("module", row.group ? `${name}.*` : name));
    }
    const step = `--step ${steps[column]}${width > 1 ? `:${steps[column] + width}` : ""}`;
    return [
      `opintercept show ${path} ${narrowed.join(" ")} ${step} --calls`,
      ...(steps.length > 1 ? [`opintercept show ${path} ${narrowed.join(" ")} --over steps`] : []),
      ...(call ? [`opintercept replay ${path} ${call[1]}${of.ranks > 1 ? ` --rank ${call[0]}` : ""}`] : []),
    ];
  }
  function commandList(texts) {
    return texts.map((text) => {
      const code = element("code", {}, text);
      const button = element("button", { type: "button", "aria-label": `Copy ${text}` }, "Copy");
      button.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(text);
          button.textContent = "Copied";
        } catch {
          getSelection().selectAllChildren(code); // without the right to copy, the reader's keys do
          button.textContent = "Selected";
        }
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
      return element("div", { class: "command" }, code, button);
    });
  }

  // --- modules over steps

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
  const colors = [["absolute", "absolute"], ["past", "against the row's own past"]];
  const folds = new Map(); // by run, pass and map, which groups are open

  // Rows that matter: of the first output that is not finite, of the first divergence, and of the one above the noise.
  function wanted(each) {
    const found = data.divergence;
    const rows = [each.totals.first?.row, ...(each === data.runs[0] && found ? [found.first?.row, found.drift?.above?.row] : [])];
    return new Set(rows.filter((row) => row !== null && row !== undefined));
  }
  function rowsOf(map, each, phase, filter) {
    const { heat } = each;
    const used = new Set(heat.phases[phase] ? heat.phases[phase].row : []);
    const rows = [...heat.modules.keys()].filter((row) => used.has(row) && heat.modules[row].toLowerCase().includes(filter));
    const nodes = modules.tree(heat.modules, heat.exact, rows);
    const key = [map, data.runs.indexOf(each), phase].join();
    if (!folds.has(key)) folds.set(key, modules.opened(nodes, wanted(each)));
    const open = folds.get(key);
    return { nodes, open, rows: modules.flat(nodes, (group) => Boolean(filter) || open.has(group)) };
  }
  function foldButtons(map, nodes, open, redraw) {
    byId(`${map}-fold`).onclick = () => { open.clear(); redraw(); };
    byId(`${map}-open`).onclick = () => { modules.keys(nodes).forEach((key) => open.add(key)); redraw(); };
    for (const button of ["fold", "open"]) byId(`${map}-${button}`).hidden = !modules.keys(nodes).length;
  }
  function stepText(heat, column) {
    return heat.width === 1 ? `${heat.steps[column]}` : `${heat.steps[column]}–${heat.steps[column] + heat.width - 1}`;
  }
  const columnOf = (heat, step) => heat.steps.findIndex((first) => first <= step && step < first + heat.width);

  // Colours for rows of values: { ramp, part(value, past), texts }.
  function scaled(values, past, { scale, format }) {
    const known = values.flat().filter((value) => value !== null && Number.isFinite(value));
    if (past) {
      const sizes = past.flat().filter((value) => value !== null).map(Math.abs);
      const edge = Math.min(Math.max(most(sizes), scale === "log" ? 1 : 0.5), scale === "log" ? 10 : 8);
      const texts = scale === "log"
        ? [`1/${plain(2 ** edge)} of the past`, "as before", `${plain(2 ** edge)} times`]
        : [`${plain(edge)} times the past's size below`, "as before", `${plain(edge)} above`];
      return { ramp: "signed", part: (value, against) => (against === null ? null : 0.5 + against / edge / 2), texts };
    }
    const positive = known.filter((value) => value > 0);
    const log = scale === "log" && positive.length > 0;
    const largest = most(known.map(Math.abs));
    const [low, high] = log ? [least(positive), most(positive)] : scale === "signed" ? [-largest, largest] : [Math.min(0, least(known)), most(known)];
    const at = log ? (value) => Math.log10(Math.max(value, low)) : (value) => value / 2; // halves do not overflow
    const [from, to] = at(low) < at(high) ? [at(low), at(high)] : [at(low) - 0.5, at(high) + 0.5];
    return {
      ramp: scale === "signed" ? "signed" : "even", part: (value) => (value === null ? null : (at(value) - from) / (to - from)),
      texts: [0, 0.5, 1].map((part) => from + part * (to - from)).map((tick) => format(log ? 10 ** tick : tick * 2)),
    };
  }
  function pastText(against, log) {
    if (against === null) return [];
    return [log ? `${plain(2 ** against)} times the median before` : `${plain(against)} of the median's size above the median before`];
  }
  function heatOptions() {
    const { heat } = run;
    fill(byId("heat-statistic"), Object.entries(statistics)
      .filter(([, each]) => each.work || heat.roles.length).map(([key, each]) => [key, each.text]));
    fill(byId("heat-role"), heat.roles.map((role) => [role, roles[role]]));
    fill(byId("heat-phase"), Object.keys(heat.phases).map((phase) => [phase, phase]));
    fill(byId("heat-colors"), heat.steps.length > 1 ? colors : colors.slice(0, 1));
  }
  function heatDraw() {
    const { heat } = run;
    const statistic = statistics[byId("heat-statistic").value];
    const [key, role, phase] = ["heat-statistic", "heat-role", "heat-phase"].map((id) => byId(id).value);
    byId("heat-role").parentElement.hidden = heat.roles.length < 2 || Boolean(statistic.work);
    byId("heat-text").textContent = !run.totals.calls ? "The run has no calls."
      : heat.roles.length ? "Colour shows the statistic over all calls of the module in the step; a group of modules has all of theirs. Cells without calls are blank."
        : "No values were recorded, so this shows work. Record with tensors=\"stats\" to see values.";
    notes("heat-notes", [
      heat.width > 1 && `To fit, each column combines ${counted(heat.width, "step")}.`,
      heat.left_out && `The map shows the first ${counted(heat.modules.length, "module")} and leaves out ${counted(heat.left_out, "call")} of others.`,
    ]);
    byId("heat-controls").hidden = !run.totals.calls;
    const { nodes, open, rows } = rowsOf("heat", run, phase, byId("heat-filter").value.toLowerCase());
    foldButtons("heat", nodes, open, heatDraw);
    clear("heat-chosen");
    if (!rows.length) {
      byId("heat-key").replaceChildren(run.totals.calls ? "No module has a name that contains this." : "");
      return clear("heat-plot");
    }
    const cells = heat.phases[phase];
    const known = modules.index(cells);
    const sums = rows.map((row) => modules.sums(cells, known, row.rows, heat.steps.length, role));
    const values = sums.map((row) => row.map((sum) => sum && sum[key]));
    const log = statistic.scale === "log";
    const past = byId("heat-colors").value === "past" ? values.map((row) => modules.againstPast(row, log)) : null;
    const { ramp, part, texts } = scaled(values, past, statistic);
    const broken = { nan: 0, inf: 0 };
    rows.forEach((row, y) => {
      row.cells = sums[y].map((sum, x) => {
        if (!sum) return null;
        const mark = statistic.work ? null : sum.nan ? "nan" : sum.inf ? "inf" : null;
        if (mark && !row.group) broken[mark]++;
        const value = values[y][x];
        return { part: value === null ? null : part(value, past && past[y][x]), text: value === null ? "none" : statistic.format(value), mark };
      });
    });
    const lines = (row, x) => {
      const sum = sums[rows.indexOf(row)][x];
      return [row.title, `step ${stepText(heat, x)}, ${phase}, ${counted(sum.calls, "call")}`, `${statistic.text}: ${row.cells[x].text}`,
        ...(past ? pastText(past[rows.indexOf(row)][x], log) : []),
        ...(!statistic.work && sum.nan + sum.inf ? [`${nonfinite([sum.nan, sum.inf])} of ${counted(sum.count, "value")}`] : [])];
    };
    const selected = found(rows, heat);
    const redraw = (changes) => { remember({ panel: "heat", run: data.runs.length > 1 ? letterOf() : null, phase, ...changes }); heatDraw(); divergenceDraw(); outputsFollow(); };
    plots.heat(byId("heat-plot"), {
      label: `${statistic.text} of each module by step`, rows, steps: heat.steps, ramp, lines, selected,
      onSelect: (row, column) => redraw({ module: rows[row].key, step: heat.steps[column] }),
      onFold: (group) => { toggle(open, group); heatDraw(); },
    });
    byId("heat-key").replaceChildren(...(statistic.work || !role ? [] : [
      broken.nan && `✖ has NaN: ${counted(broken.nan, "cell")}`,
      broken.inf && `▲ has Inf, no NaN: ${counted(broken.inf, "cell")}`,
      broken.nan + broken.inf ? "Statistics cover only the finite values." : "All values are finite.",
    ].filter(Boolean).map((text) => element("span", {}, text))), ...(heat.steps.length > 1 ? [plots.legend(ramp, texts)] : []));
    if (!selected) return;
    const [row, sum] = [rows[selected.row], sums[selected.row][selected.column]];
    byId("heat-chosen").replaceChildren(chosenBox(row, heat, phase, selected.column, sum ? [
      counted(sum.calls, "call"), `${time(sum.seconds)} of host time`, figure(sum.flops, "FLOP"),
      ...(sum.values ? [`${roles[role]}: smallest ${plain(sum.min)}, largest ${plain(sum.max)}, mean ${plain(sum.mean)}, root mean square ${plain(sum.rms)}`,
        nonfinite([sum.nan, sum.inf]) || "all finite"] : []),
    ] : ["no calls"], commands(run, row, phase, selected.column, sum && sum.call)));
  }
  function toggle(open, group) {
    const key = group.slice(0, -2);
    if (!open.delete(key)) open.add(key);
  }
  // The row and column that are chosen; of a row that is folded away, the group that has it.
  function found(rows, heat) {
    if (!chosen.has("module") || !chosen.has("step")) return null;
    const key = chosen.get("module");
    const column = columnOf(heat, Number(chosen.get("step")));
    const row = rows.findIndex((each) => each.key === key);
    const over = row >= 0 ? row : rows.findLastIndex((each) => each.group && key.startsWith(each.key.slice(0, -1)));
    return over < 0 || column < 0 ? null : { row: over, column };
  }
  function chosenBox(row, heat, phase, column, facts, texts) {
    return element("div", { class: "chosen" }, element("b", {}, name(row.title)), `, ${phase}, step ${stepText(heat, column)}`,
      element("div", { class: "quiet small" }, facts.join("; ")), ...commandList(texts));
  }

  // --- outputs over steps

  let outputs = [];
  function outputsOptions() {
    const { histograms, heat } = run;
    const drawn = new Map(histograms.shown.map((each) => [`${each.module},${each.phase}`, each]));
    outputs = Object.entries(heat.phases).flatMap(([phase, cells]) => [...modules.index(heat.roles.includes("output") ? cells : null)]
      .filter(([row, list]) => list.some((cell) => cells.output.count[cell] !== null) || drawn.has(`${row},${phase}`))
      .map(([row]) => ({ row, phase, histogram: drawn.get(`${row},${phase}`) })));
    byId("outputs").hidden = !outputs.length && !histograms.unread;
    const wide = narrow() ? 34 : 70;
    fill(byId("outputs-module"), outputs.map(({ row, phase }, number) => [number, `${short(heat.modules[row], wide)}, ${phase}`]));
    byId("outputs-controls").hidden = !outputs.length;
    byId("outputs-text").textContent = `The finite values of a module's outputs in each step.${!histograms.shown.length ? " Record with tensors=\"sample\" or \"full\" to see how they are distributed."
      : histograms.sampled ? " The histograms are of samples of a few calls each." : " The histograms are of single calls."}`;
    notes("outputs-notes", [
      histograms.unread && `${counted(histograms.unread, "tensor")} could not be read, or are too large for this page.`,
      histograms.left_out && `The page has the histograms of the first ${histograms.shown.length} modules and passes, and leaves out ${histograms.left_out.toLocaleString("en")}.`,
    ]);
  }
  // Shows the module that is chosen in a map, if it has outputs.
  function outputsFollow() {
    const number = outputs.findIndex(({ row, phase }) => run.heat.modules[row] === chosen.get("module") && phase === (chosen.get("phase") || phase));
    if (number >= 0) byId("outputs-module").value = String(number);
    outputsDraw();
  }
  function outputsDraw() {
    const { heat } = run;
    const one = outputs[byId("outputs-module").value || 0];
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
        label: `Smallest, largest, mean and root mean square of the outputs of ${heat.modules[one.row]} by step`, height: 240,
        x: { title: "step", low: 0, high: heat.steps.length - 1, format: (value) => (Number.isInteger(value) ? `${heat.steps[value]}` : "") },
        y: { title: "value", low, high: high > low ? high : low + 1, format: plain },
        draw: (x, y, { top, bottom }) => {
          const line = (key) => plots.path(sums.map((sum, number) => (sum && sum[key] !== null ? [x(number), y(sum[key])] : null)));
          const wide = x(1) - x(0);
          return [
            ...sums.map((sum, number) => (sum && sum.min !== null ? shape("rect", { class: "band", x: x(number) - wide / 2, width: wide, y: y(sum.max), height: Math.max(y(sum.min) - y(sum.max), 1) }) : "")),
            column >= 0 ? shape("line", { class: "here", x1: x(column), x2: x(column), y1: top, y2: bottom }) : "",
            shape("path", { class: "line mean", d: line("mean") }), shape("path", { class: "line rms", d: line("rms") }),
            ...sums.map((sum, number) => (sum && sum.values ? shape("rect", {
              class: "hit", x: x(number) - wide / 2, width: wide, y: top, height: bottom - top,
              "data-tip": [`step ${stepText(heat, number)}`, `smallest ${plain(sum.min)}, largest ${plain(sum.max)}`, `mean ${plain(sum.mean)}, root mean square ${plain(sum.rms)}`, nonfinite([sum.nan, sum.inf])].filter(Boolean).join("\n"),
            }) : "")),
          ];
        },
      });
      byId("outputs-key").replaceChildren(...[["band", "■ smallest to largest"], ["mean", "— mean"], ["rms", "┄ root mean square"]].map(([kind, text]) => element("span", { class: kind }, text)));
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
      x: { title: "step", low: 0, high: drawn.length, ticks: drawn.map((_, number) => number + 0.5), format: (value) => (narrow() && drawn.length > 4 && Math.floor(value) % 2 ? "" : steps[Math.floor(value)] || "") },
      y: { title: "value", low: bottom, high: top, format: plain },
      draw: (x, y) => drawn.flatMap((each, number) => each.counts.map((count, bin) => {
        const [from, to] = [bin, bin + 1].map((edge) => bottom + edge * (top / each.counts.length - bottom / each.counts.length));
        return count ? shape("rect", {
          class: "bin", x: x(number) + 1, width: Math.max(1, (x(1) - x(0) - 6) * size(count) / widest), y: y(to), height: Math.max(y(from) - y(to) - 0.5, 0.5),
          "data-tip": [`step ${steps[number]}, ${counted(each.calls, "call")}`, high > low ? `${counted(count, "value")} from ${plain(from)} to ${plain(to)}` : `${counted(count, "value")}, all ${plain(low)}`, ...(each.nonfinite ? [`✖ ${each.nonfinite} of ${each.count} not finite`] : [])].join("\n"),
        }) : "";
      })),
    });
  }

  // --- two runs

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
      onSelect: (row, column) => { remember({ panel: "divergence", run: "A", phase, module: rows[row].key, step: heat.steps[column] }); divergenceDraw(); showChosen(); },
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
      data.runs.flatMap((each) => commands(each, row, phase, columnOf(each.heat, heat.steps[selected.column]), each === data.runs[0] && sum ? sum.call : null)
        .filter((text) => !text.includes("--over") && !text.includes("undefined")))));
  }

  // --- all of it

  function drawAll() {
    divergenceDraw();
    heatDraw();
    products.draw();
    outputsDraw();
  }
  function choose() {
    run = data.runs[Number(byId("run").value) || 0];
    heatOptions();
    products.choose(run);
    outputsOptions();
  }
  // Puts what is chosen into the fields.
  function showChosen() {
    byId("run").value = chosen.get("run") === "B" && data.runs.length > 1 ? "1" : "0";
    choose();
    for (const [key, id] of Object.entries(inputs)) {
      const field = byId(id);
      const before = field.value;
      if (!chosen.has(key)) continue;
      field.value = chosen.get(key);
      if (field.tagName === "SELECT" && field.selectedIndex < 0) field.value = before;
    }
    heatDraw();
    products.draw();
    outputsFollow();
  }
  byId("outputs-scale").value = run.histograms.sampled ? "linear" : "log";
  fill(byId("run"), data.runs.map((each, number) => [number, `${"AB"[number]}: ${each.path}`]));
  head();
  divergenceText();
  byId("choice").hidden = data.runs.length < 2;
  fill(byId("divergence-colors"), run.heat.steps.length > 1 ? colors : colors.slice(0, 1));
  on(["divergence-phase", "divergence-colors"], "change", divergenceDraw);
  on(["run"], "change", () => { remember({ run: "AB"[Number(byId("run").value)] }); showChosen(); });
  for (const [key, id] of Object.entries(inputs)) {
    byId(id).addEventListener(id === "heat-filter" ? "input" : "change", () => { remember({ [key]: byId(id).value }); heatDraw(); });
  }
  on(["outputs-module", "outputs-scale"], "change", outputsDraw);
  dark.addEventListener("change", drawAll);
  function follow() {
    if (chosen.get("panel") === "divergence" && chosen.has("phase")) {
      const field = byId("divergence-phase");
      if ([...field.options].some((each) => each.value === chosen.get("phase"))) field.value = chosen.get("phase");
    }
    showChosen();
    divergenceDraw();
    if (["heat", "divergence"].includes(chosen.get("panel"))) byId(chosen.get("panel")).scrollIntoView();
  }
  addEventListener("hashchange", () => {
    chosen.clear();
    new URLSearchParams(location.hash.slice(1)).forEach((value, key) => chosen.set(key, value));
    follow();
  });
  follow();
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
