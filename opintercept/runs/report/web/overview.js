"use strict";
// The top of the page: what the runs are, their totals, and the first output that is not finite.
const overview = (() => {
  const { element } = plots;
  const { byId, counted, digits, figure, name, nonfinite, partOf, time } = parts;
  const { letter } = state;

  // Both runs come first: seeing which of them goes wrong takes no click.
  function head() {
    const { data } = state;
    byId("title").replaceChildren(...data.runs.flatMap((each, number) => [
      number ? " and " : "", letter(number) ? `${letter(number)}: ` : "", name(each.path)]));
    const one = (text, many) => (each) => (each === 1 ? text : many || `${text}s`);
    const cards = [
      [({ totals }) => totals.calls, digits, one("call")],
      [({ totals }) => totals.flops, (value) => figure(value, "FLOP"), () => "of work"],
      [({ totals }) => totals.seconds, time, () => "host time in operators"],
      [({ totals }) => totals.modules, (value, { totals }) => digits(value) + (totals.more_modules ? "+" : ""),
        one("module")],
      [({ totals }) => (totals.calls ? totals.steps[1] - totals.steps[0] + 1 : 0), digits, one("step")],
      [({ totals, heat }) => (heat.roles.includes("output") ? totals.nonfinite : null),
        (value) => (value === null ? "?" : digits(value)), () => "outputs with NaN or Inf", true],
      [({ totals }) => totals.errors, digits, one("call raised", "calls raised"), true],
    ].filter(([value], number) => number < 6 || data.runs.some((each) => value(each)));
    byId("figures").classList.toggle("two", data.runs.length > 1);
    byId("figures").replaceChildren(...cards.map(([value, shown, text, alarm]) => {
      const values = data.runs.map(value);
      return element("div", { class: "figure" }, ...data.runs.flatMap((each, number) => [
        ...(letter(number) ? [element("i", {}, letter(number))] : []),
        element("b", alarm && values[number] ? { class: "bad" } : {}, shown(values[number], each))]),
      element("span", {}, text(values.every((each) => each === 1) ? 1 : 2)));
    }));
    const these = data.runs.length > 1 ? "these runs" : "this run";
    byId("about").replaceChildren(element("summary", {}, `About ${these}`), ...data.runs.flatMap(about));
    byId("first").replaceChildren(...data.runs.map(first).filter(Boolean));
  }
  const about = (each, number) => [...(letter(number) ? [element("h3", {}, letter(number))] : []),
    element("div", { class: "name" }, ...each.about.map(partOf))];
  function first(each, number) {
    const found = each.totals.first;
    if (!found) return null;
    return element("section", { class: "alarm" },
      element("h2", {}, `${letter(number) ? `${letter(number)}: t` : "T"}he first output that is not finite`),
      element("p", {},
        `Call ${found.index} in step ${found.step}, ${found.phase}: `, name(found.op), " in ", name(found.module),
        ...(found.source ? [", ", name(found.source)] : []),
        each.ranks === 1 ? "" : `, rank ${found.rank}`,
        `, has ${nonfinite([found.nan, found.inf])} in ${counted(found.count, "value")}. `,
        found.from === null ? "Its operands' values were not recorded."
          : found.from.length ? `Its ${found.from.join(" and ")} already had some.`
            : "Its operands are finite, so this call produced it."),
    );
  }
  return { draw: head };
})();
