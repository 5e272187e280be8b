"use strict";
// Commands for a shell that show more of what is chosen, with buttons that copy them.
const commands = (() => {
  const { element } = plots;

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
    const step = `--steps ${steps[column]}${width > 1 ? `:${steps[column] + width}` : ""}`;
    return [
      `opintercept show ${path} ${narrowed.join(" ")} ${step} --calls`,
      ...(steps.length > 1 ? [`opintercept show ${path} ${narrowed.join(" ")} --by step`] : []),
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
  return { list: commandList, of: commands };
})();
