// The header of the page: facts about the checkpoint, and warnings.

function showFacts(contents) {
  const { facts } = contents;
  const parts = facts.path.split("/").filter(Boolean);
  const shortPath = parts.slice(-3).join("/");
  find("#title").textContent = shortPath;
  find("#summary").textContent = facts.path === shortPath ? "" : facts.path;
  for (const [name, value, detail] of listFacts(contents)) {
    if (value === null || value === undefined) continue;
    const content = detail ? [value, createElement("small", {}, detail)] : [value];
    find("#facts").append(createElement("div", {}, createElement("dt", {}, name), createElement("dd", {}, ...content)));
  }
  find("#warnings").hidden = facts.warnings.length === 0;
  find("#warnings ul").append(...facts.warnings.map((text) => createElement("li", {}, text)));
}

function listFacts(contents) {
  const { facts, stats } = contents;
  const bytes = contents.bytes.reduce((sum, size) => sum + size, 0);
  const groups = facts.layers.map((group) => `${group.length} ${group.layout}`);
  const custom = Object.entries(facts.custom).map(([key, value]) => `${key} ${value}`);
  return [
    ["Parameters", formatParameters(facts.parameters), facts.parameters >= 1000 ? formatInteger(facts.parameters) : ""],
    ["Bytes", formatBytes(bytes), bytes >= 1000 ? formatInteger(bytes) : ""],
    ["Arrays", formatInteger(contents.count)],
    ["Format", facts.format],
    ["Kind", facts.kind, facts.flavor],
    ["Layers", groups.join(", ") || null, facts.scanAxis === null ? "" : `stacked on axis ${facts.scanAxis}`],
    ["Step", facts.step === null ? null : formatInteger(facts.step)],
    ["Optimizer", facts.optimizer],
    ["NaN, infinite", stats ? badValuesText(stats) : null],
    ["Metadata", custom.length ? custom.join(", ") : null],
  ];
}

function badValuesText(stats) {
  const [nan, inf] = [stats.nan, stats.inf].map((column) => column.reduce((sum, count) => sum + count, 0));
  const counts = [`${formatInteger(nan)} NaN`, `${formatInteger(inf)} infinite`].filter((text) => !text.startsWith("0 "));
  return counts.length ? createElement("strong", { className: "bad" }, counts.join(", ")) : "none";
}
