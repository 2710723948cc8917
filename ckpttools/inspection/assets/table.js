// The table of all arrays, with search and sorting. Only visible rows are drawn.

const ROW_HEIGHT = 30;
const EXTRA_ROWS = 12;
const MAX_PRINTED_ROWS = 1000;

class ArrayTable {
  constructor(contents, choose) {
    Object.assign(this, { contents, choose, columns: createColumns(contents), sortedColumn: null, isAscending: false });
    this.order = [...Array(contents.count).keys()];
    this.shown = this.order;
    this.current = null;
    this.scroller = find(".rows");
    this.body = createElement("tbody");
    this.headers = this.columns.map((column, k) => this.createHeader(column, k));
    this.before = createElement("tr", { className: "space", "aria-hidden": "true" }, createElement("td", { colSpan: this.columns.length }));
    this.after = this.before.cloneNode(true);
    find("table.arrays").append(createElement("thead", {}, createElement("tr", {}, ...this.headers)), this.body);
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    find("#search").addEventListener("input", () => this.search());
    this.body.addEventListener("click", (event) => this.handleClick(event.target.closest("tr[data-index]")));
    window.addEventListener("beforeprint", () => this.print(true));
    window.addEventListener("afterprint", () => this.print(false));
    window.addEventListener("resize", () => this.draw());
    this.search();
  }

  createHeader(column, k) {
    const button = createElement("button", { type: "button" }, column.name);
    button.addEventListener("click", () => this.sort(k));
    return createElement("th", { scope: "col", className: column.kind }, button);
  }

  /** Sorts numbers in descending and words in ascending order; then the reverse; then as in the checkpoint. */
  sort(k) {
    const first = this.columns[k].kind === "word";
    if (this.sortedColumn !== k) [this.sortedColumn, this.isAscending] = [k, first];
    else if (this.isAscending === first) this.isAscending = !first;
    else this.sortedColumn = null;
    this.headers.forEach((header, position) => {
      if (position === this.sortedColumn) header.setAttribute("aria-sort", this.isAscending ? "ascending" : "descending");
      else header.removeAttribute("aria-sort");
    });
    this.updateRows();
  }

  search() {
    this.matches = createMatcher(find("#search").value);
    this.updateRows();
  }

  updateRows() {
    const { paths, dtype, role, shape } = this.contents;
    const text = (index) => `${paths[index]} ${dtype[index]} ${role[index]} ${shape[index]}`.toLowerCase();
    this.shown = this.order.filter((index) => this.matches(paths[index].toLowerCase(), text(index)));
    if (this.sortedColumn !== null) {
      const { key } = this.columns[this.sortedColumn];
      const sign = this.isAscending ? 1 : -1;
      this.shown.sort((a, b) => compareValues(key(a), key(b), sign) || a - b);
    }
    const bytes = this.shown.reduce((sum, index) => sum + this.contents.bytes[index], 0);
    const all = this.shown.length === this.contents.count;
    find("#count").textContent = `${all ? "" : "Found "}${formatCount(this.shown.length, "array")}, ${formatBytes(bytes)}`;
    this.scroller.scrollTop = 0;
    this.draw();
  }

  /** Draws the visible rows, with empty space for the others. */
  draw() {
    const height = this.scroller.clientHeight || 600;
    const start = this.isPrinting ? 0 : Math.max(0, Math.floor(this.scroller.scrollTop / ROW_HEIGHT) - EXTRA_ROWS);
    const end = this.isPrinting
      ? Math.min(this.shown.length, MAX_PRINTED_ROWS)
      : Math.min(this.shown.length, start + Math.ceil(height / ROW_HEIGHT) + 2 * EXTRA_ROWS);
    this.before.firstChild.style.height = `${start * ROW_HEIGHT}px`;
    this.after.firstChild.style.height = this.isPrinting ? "0" : `${(this.shown.length - end) * ROW_HEIGHT}px`;
    const rows = this.shown.slice(start, end).map((index, k) => this.row(index, start + k));
    this.body.replaceChildren(this.before, ...rows, this.after);
    find("table.arrays").setAttribute("aria-rowcount", this.shown.length + 1);
  }

  row(index, position) {
    const cells = this.columns.map(({ kind, show }) => createElement("td", { className: kind }, show(index)));
    const row = createElement("tr", { "data-index": index, "aria-rowindex": position + 2 }, ...cells);
    if (index === this.current) row.setAttribute("aria-current", "true");
    return row;
  }

  handleClick(row) {
    if (row) this.choose(Number(row.dataset.index));
  }

  /** Marks the row of an array. */
  mark(index) {
    this.current = index;
    this.draw();
  }

  print(isPrinting) {
    this.isPrinting = isPrinting;
    this.draw();
  }
}

function createColumns(contents) {
  const { paths, shape, elements, dtype, role, bytes, stats } = contents;
  const name = (index) => {
    const text = createElement("bdi", {}, paths[index]);
    const title = { title: paths[index] };
    return stats ? createElement("button", { type: "button", ...title }, text) : createElement("span", title, text);
  };
  const words = [
    { name: "Array", kind: "word path", key: (index) => paths[index], show: name },
    { name: "Shape", kind: "number", key: (index) => elements[index], show: (index) => shape[index] },
    { name: "Dtype", kind: "word", key: (index) => dtype[index], show: (index) => dtype[index] },
    { name: "Role", kind: "word", key: (index) => role[index], show: (index) => role[index] },
    { name: "Bytes", kind: "number", key: (index) => bytes[index], show: (index) => formatBytes(bytes[index]) },
  ];
  if (!stats) return words;
  const numbers = ["norm", "min", "max", "mean", "std"].map((name) => ({
    name: name[0].toUpperCase() + name.slice(1),
    kind: "number",
    key: (index) => stats[name][index],
    show: (index) => formatNumber(stats[name][index]),
  }));
  const zeros = { name: "Zeros", kind: "number", key: (k) => stats.zeros[k], show: (k) => (stats.zeros[k] ? formatInteger(stats.zeros[k]) : "") };
  const bad = (index) => stats.nan[index] + stats.inf[index];
  const shown = (index) => (bad(index) ? createElement("strong", { className: "bad" }, formatInteger(bad(index))) : "");
  const last = [zeros, { name: "NaN, inf", kind: "number", key: bad, show: shown }];
  const all = [...Array(paths.length).keys()];
  return [...words, ...numbers, ...last.filter(({ key }) => all.some((index) => key(index)))];
}

/** Compares numbers by size and words in natural order. Missing values are last in both directions. */
function compareValues(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (typeof a === "string" ? compareNames(a, b) : a - b);
}

/** Returns a predicate: a pattern matches complete paths, and all words of any other text must occur. */
function createMatcher(text) {
  const query = text.trim().toLowerCase();
  if (/[*?]/.test(query)) {
    const escaped = query.replace(/[.+^${}()|[\]\\]/g, "\\$&").replaceAll("*", ".*").replaceAll("?", ".");
    const pattern = new RegExp(`^${escaped}$`);
    return (path) => pattern.test(path);
  }
  const words = query.split(/\s+/).filter(Boolean);
  return (path, all) => words.every((word) => all.includes(word));
}
