"use strict";
// Shows the page's block of data with the other scripts. Texts of a run are untrusted: they become text nodes, and
// commands quote them for a shell. The address keeps what is chosen.
(async () => {
  const { dark } = plots;
  const { byId, fill, on } = parts;
  const { chosen, remember } = state;
  const data = await parts.data();
  state.data = data;
  state.run = data.runs[0];
  const inputs = {
    phase: "heat-phase", statistic: "heat-statistic", tensors: "heat-role", colors: "heat-colors",
    filter: "heat-filter",
  };

  function drawAll() {
    divergence.draw();
    heat.draw();
    matmuls.draw();
    outputs.draw();
  }
  function choose() {
    state.run = data.runs[Number(byId("run").value) || 0];
    heat.options();
    matmuls.choose(state.run);
    outputs.options();
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
    heat.draw();
    matmuls.draw();
    outputs.follow();
  }
  state.showChosen = showChosen;
  byId("outputs-scale").value = state.run.histograms.sampled ? "linear" : "log";
  fill(byId("run"), data.runs.map((each, number) => [number, `${"AB"[number]}: ${each.path}`]));
  overview.draw();
  divergence.text();
  byId("choice").hidden = data.runs.length < 2;
  fill(byId("divergence-colors"), maps.colorsFor(state.run.heat));
  on(["divergence-phase", "divergence-colors"], "change", divergence.draw);
  on(["run"], "change", () => { remember({ run: "AB"[Number(byId("run").value)] }); showChosen(); });
  for (const [key, id] of Object.entries(inputs)) {
    on([id], id === "heat-filter" ? "input" : "change", () => { remember({ [key]: byId(id).value }); heat.draw(); });
  }
  on(["outputs-module", "outputs-scale"], "change", outputs.draw);
  dark.addEventListener("change", drawAll);
  function follow() {
    if (chosen.get("panel") === "divergence" && chosen.has("phase")) {
      const field = byId("divergence-phase");
      if ([...field.options].some((each) => each.value === chosen.get("phase"))) field.value = chosen.get("phase");
    }
    showChosen();
    divergence.draw();
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
