"use strict";
// What the panels share: the data, the run that is shown, and what is chosen, which the address keeps. `page.js` sets
// the data, the run, and `showChosen`, which puts what is chosen into all panels.
const state = (() => {
  const chosen = new Map(new URLSearchParams(location.hash.slice(1)));
  const fields = ["run", "phase", "statistic", "tensors", "colors", "filter", "step", "module", "panel"];
  const letter = (number) => (shared.data.runs.length > 1 ? "AB"[number] : "");
  const letterOf = () => "AB"[shared.data.runs.indexOf(shared.run)];
  function remember(changes) {
    for (const [key, value] of Object.entries(changes)) {
      if (value === null || value === "") chosen.delete(key);
      else chosen.set(key, String(value));
    }
    const kept = fields.filter((key) => chosen.has(key)).map((key) => [key, chosen.get(key)]);
    history.replaceState(null, "", kept.length ? `#${new URLSearchParams(kept)}` : location.pathname);
  }
  const shared = { data: null, run: null, showChosen: null, chosen, letter, letterOf, remember };
  return shared;
})();
