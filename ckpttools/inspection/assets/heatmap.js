// One row for each parameter, one column for each layer.

const VALUES = ["norm", "standard deviation", "mean", "largest magnitude"];
const BAD = 4;
const SCALES = { row: "within each row", all: "over all rows" };
const ROWS_AT_FIRST = 60;
const COLUMNS_WITH_TEXT = 16;
// A layer that differs from the others by less than this is as good as equal.
const LEAST_SPREAD = 0.1;
const STRONGEST = 70;

class HeatMap {
  constructor(contents) {
    this.contents = contents;
    this.table = find("table.heat");
    this.rows = contents.heat;
    this.most = ROWS_AT_FIRST;
    find("#layers").hidden = this.rows.length === 0;
    if (this.rows.length === 0) return;
    this.value = this.selected("#heat-value", VALUES.map((name, k) => [String(k), name]));
    const roles = ["parameter", "optimizer"].filter((role) => this.rows.some((row) => row.role === role));
    this.role = this.selected("#heat-role", roles.map((role) => [role, role === "parameter" ? "parameters" : "the optimizer"]));
    this.scale = this.selected("#heat-scale", Object.entries(SCALES));
    this.table.addEventListener("keydown", (event) => this.moved(event));
    tipsWithin(this.table, (cell) => this.lines(cell));
    this.draw();
  }

  /** Fills a select; returns what reads it. */
  selected(selector, choices) {
    const select = find(selector);
    select.append(...choices.map(([value, name]) => made("option", { value }, name)));
    select.addEventListener("change", () => this.draw());
    return () => select.value;
  }

  draw() {
    const rows = this.rows.filter((row) => row.role === this.role());
    const shown = rows.slice(0, this.most);
    const layers = [...new Set(shown.flatMap((row) => Object.keys(row.layers).map(Number)))].sort((a, b) => a - b);
    const colour = this.colouring(shown);
    const prefix = commonStart(shown.map((row) => row.name));
    const head = made(
      "tr",
      {},
      made("th", { scope: "col" }, prefix ? `${prefix}…` : "parameter"),
      ...layers.map((layer) => made("th", { scope: "col" }, this.columnHead(layer, layers))),
      made("th", { scope: "col", className: "range" }, "least to most"),
    );
    this.table.classList.toggle("worded", layers.length <= COLUMNS_WITH_TEXT);
    this.table.replaceChildren(
      made("thead", {}, head),
      made("tbody", {}, ...shown.map((row) => this.row(row, layers, colour, prefix, layers.length))),
    );
    const first = this.table.querySelector("td[data-tip]");
    if (first) first.tabIndex = 0;
    this.legend(rows.length);
  }

  /** Numbers of columns, as many as fit. */
  columnHead(layer, layers) {
    const every = layers.length <= 40 ? 1 : layers.length <= 100 ? 5 : 10;
    return layer % every === 0 ? String(layer) : "";
  }

  row(row, layers, colour, prefix, columns) {
    const values = Object.values(row.layers).map((cell) => cell[this.value()]).filter((value) => value !== null);
    const cells = layers.map((layer) => {
      const cell = row.layers[layer];
      if (!cell) return made("td", { className: "none" });
      const value = cell[this.value()];
      const text = cell[BAD] ? "!" : columns <= COLUMNS_WITH_TEXT ? shortNumber(value) : "";
      const element = made("td", { "data-tip": "", tabIndex: -1, style: colour(row, value) }, text);
      if (cell[BAD]) element.classList.add("bad");
      element.place = [row, layer];
      element.setAttribute("aria-label", this.lines(element).join(", "));
      return element;
    });
    const range = values.length ? `${shortNumber(Math.min(...values))} to ${shortNumber(Math.max(...values))}` : "";
    return made(
      "tr",
      {},
      made("th", { scope: "row", title: row.name }, row.name.slice(prefix.length)),
      ...cells,
      made("td", { className: "range" }, range),
    );
  }

  /** A function from a row and a value to the style of its cell. */
  colouring(rows) {
    const valuesOf = (row) => Object.values(row.layers).map((cell) => cell[this.value()]).filter((v) => v !== null);
    const size = (value) => Math.log2(Math.max(Math.abs(value), 1e-30));
    if (this.scale() === "all") {
      const sizes = rows.flatMap(valuesOf).map(size);
      const low = sizes.reduce((a, b) => Math.min(a, b), Infinity);
      const high = sizes.reduce((a, b) => Math.max(a, b), -Infinity);
      return (row, value) => (value === null ? "" : mixed("--high", (size(value) - low) / Math.max(high - low, LEAST_SPREAD)));
    }
    const middles = new Map(rows.map((row) => [row, median(valuesOf(row).map(size))]));
    const spread = rows.flatMap((row) => valuesOf(row).map((value) => Math.abs(size(value) - middles.get(row))));
    const most = spread.reduce((a, b) => Math.max(a, b), LEAST_SPREAD);
    return (row, value) => {
      if (value === null) return "";
      const off = (size(value) - middles.get(row)) / most;
      return mixed(off < 0 ? "--low" : "--high", Math.abs(off));
    };
  }

  legend(count) {
    const ramp = made("span", { className: `ramp ${this.scale()}` });
    const [less, more] =
      this.scale() === "all" ? ["least", "most, on a logarithmic scale"] : ["less than the middle of its row", "more"];
    find("#heat-legend").replaceChildren(less, ramp, more);
    const all = find("#heat-more");
    all.hidden = count <= this.most;
    const button = made("button", { type: "button" }, `Show all ${grouped(count)} rows`);
    button.addEventListener("click", () => {
      this.most = Infinity;
      this.draw();
    });
    all.replaceChildren(button);
  }

  lines(element) {
    const [row, layer] = element.place;
    const cell = row.layers[layer];
    const lines = [`${row.name}`, `layer ${layer}`];
    VALUES.forEach((name, k) => lines.push(`${name} ${shortNumber(cell[k])}`));
    if (cell[BAD]) lines.push(`${grouped(cell[BAD])} NaN or infinite`);
    return lines;
  }

  /** Arrow keys lead from cell to cell. */
  moved(event) {
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

const mixed = (end, share) =>
  `background:color-mix(in oklab, var(${end}) ${(STRONGEST * Math.min(1, share)).toFixed(1)}%, var(--pale))`;

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}

/** What all names begin with, whole keys only. */
function commonStart(names) {
  if (names.length < 2) return "";
  let start = names[0];
  for (const name of names) {
    while (!name.startsWith(start)) start = start.slice(0, -1);
  }
  return start.slice(0, Math.max(start.lastIndexOf("/"), start.lastIndexOf(".")) + 1);
}
