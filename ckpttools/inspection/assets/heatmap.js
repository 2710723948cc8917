// The heat map: one row for each parameter, one column for each layer.

const VALUES = ["norm", "standard deviation", "mean", "largest magnitude"];
const BAD_COUNT = 4;
const SCALES = { row: "within each row", all: "over all rows" };
const INITIAL_ROWS = 60;
const MAX_COLUMNS_WITH_TEXT = 16;
// Layers that differ by less than this look equal.
const MIN_SPREAD = 0.1;
const MAX_COLOR_PERCENT = 70;

class HeatMap {
  constructor(contents) {
    this.contents = contents;
    this.table = find("table.heat");
    this.rows = contents.heat;
    this.maxRows = INITIAL_ROWS;
    find("#layers").hidden = this.rows.length === 0;
    if (this.rows.length === 0) return;
    this.value = this.addSelect("#heat-value", VALUES.map((name, k) => [String(k), name]));
    const roles = ["parameter", "optimizer"].filter((role) => this.rows.some((row) => row.role === role));
    this.role = this.addSelect("#heat-role", roles.map((role) => [role, role === "parameter" ? "parameters" : "the optimizer"]));
    this.scale = this.addSelect("#heat-scale", Object.entries(SCALES));
    this.table.addEventListener("keydown", (event) => this.moveFocus(event));
    addTooltips(this.table, (cell) => this.lines(cell));
    this.draw();
  }

  /** Fills a select, and returns a function that returns its value. */
  addSelect(selector, choices) {
    const select = find(selector);
    select.append(...choices.map(([value, name]) => createElement("option", { value }, name)));
    select.addEventListener("change", () => this.draw());
    return () => select.value;
  }

  draw() {
    const rows = this.rows.filter((row) => row.role === this.role());
    const shown = rows.slice(0, this.maxRows);
    const layers = [...new Set(shown.flatMap((row) => Object.keys(row.layers).map(Number)))].sort((a, b) => a - b);
    const colorOf = this.makeColorScale(shown);
    const prefix = commonPrefix(shown.map((row) => row.name));
    const head = createElement(
      "tr",
      {},
      createElement("th", { scope: "col" }, prefix ? `${prefix}…` : "parameter"),
      ...layers.map((layer) => createElement("th", { scope: "col" }, this.columnHeader(layer, layers))),
      createElement("th", { scope: "col", className: "range" }, "min to max"),
    );
    this.table.classList.toggle("with-text", layers.length <= MAX_COLUMNS_WITH_TEXT);
    this.table.replaceChildren(
      createElement("thead", {}, head),
      createElement("tbody", {}, ...shown.map((row) => this.row(row, layers, colorOf, prefix, layers.length))),
    );
    const first = this.table.querySelector("td[data-tip]");
    if (first) first.tabIndex = 0;
    this.legend(rows.length);
  }

  /** Returns the number of a layer, or "" if there is no room for it. */
  columnHeader(layer, layers) {
    const interval = layers.length <= 40 ? 1 : layers.length <= 100 ? 5 : 10;
    return layer % interval === 0 ? String(layer) : "";
  }

  row(row, layers, colorOf, prefix, columns) {
    const values = Object.values(row.layers).map((cell) => cell[this.value()]).filter((value) => value !== null);
    const cells = layers.map((layer) => {
      const cell = row.layers[layer];
      if (!cell) return createElement("td", { className: "none" });
      const value = cell[this.value()];
      const text = cell[BAD_COUNT] ? "!" : columns <= MAX_COLUMNS_WITH_TEXT ? formatNumber(value) : "";
      const element = createElement("td", { "data-tip": "", tabIndex: -1, style: colorOf(row, value) }, text);
      if (cell[BAD_COUNT]) element.classList.add("bad");
      element.position = [row, layer];
      element.setAttribute("aria-label", this.lines(element).join(", "));
      return element;
    });
    const range = values.length ? `${formatNumber(Math.min(...values))} to ${formatNumber(Math.max(...values))}` : "";
    return createElement(
      "tr",
      {},
      createElement("th", { scope: "row", title: row.name }, row.name.slice(prefix.length)),
      ...cells,
      createElement("td", { className: "range" }, range),
    );
  }

  /** Returns a function that maps a row and a value to the style of the cell. */
  makeColorScale(rows) {
    const valuesOf = (row) => Object.values(row.layers).map((cell) => cell[this.value()]).filter((v) => v !== null);
    const size = (value) => Math.log2(Math.max(Math.abs(value), 1e-30));
    if (this.scale() === "all") {
      const sizes = rows.flatMap(valuesOf).map(size);
      const low = sizes.reduce((a, b) => Math.min(a, b), Infinity);
      const high = sizes.reduce((a, b) => Math.max(a, b), -Infinity);
      return (row, value) => (value === null ? "" : mixColor("--high", (size(value) - low) / Math.max(high - low, MIN_SPREAD)));
    }
    const medians = new Map(rows.map((row) => [row, median(valuesOf(row).map(size))]));
    const spread = rows.flatMap((row) => valuesOf(row).map((value) => Math.abs(size(value) - medians.get(row))));
    const limit = spread.reduce((a, b) => Math.max(a, b), MIN_SPREAD);
    return (row, value) => {
      if (value === null) return "";
      const deviation = (size(value) - medians.get(row)) / limit;
      return mixColor(deviation < 0 ? "--low" : "--high", Math.abs(deviation));
    };
  }

  legend(count) {
    const ramp = createElement("span", { className: `ramp ${this.scale()}` });
    const [less, more] =
      this.scale() === "all" ? ["min", "max, on a logarithmic scale"] : ["below the median of the row", "above"];
    find("#heat-legend").replaceChildren(less, ramp, more);
    const all = find("#heat-more");
    all.hidden = count <= this.maxRows;
    const button = createElement("button", { type: "button" }, `Show all ${formatInteger(count)} rows`);
    button.addEventListener("click", () => {
      this.maxRows = Infinity;
      this.draw();
    });
    all.replaceChildren(button);
  }

  lines(element) {
    const [row, layer] = element.position;
    const cell = row.layers[layer];
    const lines = [`${row.name}`, `layer ${layer}`];
    VALUES.forEach((name, k) => lines.push(`${name} ${formatNumber(cell[k])}`));
    if (cell[BAD_COUNT]) lines.push(`${formatInteger(cell[BAD_COUNT])} NaN or infinite`);
    return lines;
  }

  /** Moves the focus between cells with the arrow keys. */
  moveFocus(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const cell = event.target.closest("td[data-tip]");
    if (!cell || !steps[event.key]) return;
    event.preventDefault();
    const [down, right] = steps[event.key];
    const row = this.table.tBodies[0].rows[cell.parentElement.sectionRowIndex + down];
    const next = row && row.cells[cell.cellIndex + right];
    if (!next || !next.hasAttribute("data-tip")) return;
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

const mixColor = (end, fraction) =>
  `background:color-mix(in oklab, var(${end}) ${(MAX_COLOR_PERCENT * Math.min(1, fraction)).toFixed(1)}%, var(--pale))`;

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}

/** Returns the longest common prefix of names that ends after a separator. */
function commonPrefix(names) {
  if (names.length < 2) return "";
  let start = names[0];
  for (const name of names) {
    while (!name.startsWith(start)) start = start.slice(0, -1);
  }
  return start.slice(0, Math.max(start.lastIndexOf("/"), start.lastIndexOf(".")) + 1);
}
