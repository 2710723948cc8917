// The head of the page: what was opened, and what to know of it.

function showFacts(contents) {
  const { facts } = contents;
  const parts = facts.path.split("/").filter(Boolean);
  const place = parts.slice(-3).join("/");
  find("#place").textContent = place;
  find("#summary").textContent = facts.path === place ? "" : facts.path;
  for (const [name, value, more] of factsOf(contents)) {
    if (value === null || value === undefined) continue;
    const shown = more ? [value, made("small", {}, more)] : [value];
    find("#facts").append(made("div", {}, made("dt", {}, name), made("dd", {}, ...shown)));
  }
  find("#warnings").hidden = facts.warnings.length === 0;
  find("#warnings ul").append(...facts.warnings.map((text) => made("li", {}, text)));
}

function factsOf(contents) {
  const { facts, stats } = contents;
  const bytes = contents.bytes.reduce((sum, each) => sum + each, 0);
  const groups = facts.layers.map((group) => `${group.length} ${group.layout}`);
  const custom = Object.entries(facts.custom).map(([key, value]) => `${key} ${value}`);
  return [
    ["Parameters", inBillions(facts.parameters), facts.parameters >= 1000 ? grouped(facts.parameters) : ""],
    ["Bytes", inBytes(bytes), bytes >= 1000 ? grouped(bytes) : ""],
    ["Arrays", grouped(contents.count)],
    ["Format", facts.format],
    ["Kind", facts.kind, facts.flavor],
    ["Layers", groups.join(", ") || null, facts.scanAxis === null ? "" : `stacked on axis ${facts.scanAxis}`],
    ["Step", facts.step === null ? null : grouped(facts.step)],
    ["Optimizer", facts.optimizer],
    ["NaN, infinite", stats ? badOf(stats) : null],
    ["Metadata", custom.length ? custom.join(", ") : null],
  ];
}

function badOf(stats) {
  const [nan, inf] = [stats.nan, stats.inf].map((column) => column.reduce((sum, each) => sum + each, 0));
  const found = [`${grouped(nan)} NaN`, `${grouped(inf)} infinite`].filter((text) => !text.startsWith("0 "));
  return found.length ? made("strong", { className: "bad" }, found.join(", ")) : "none";
}
