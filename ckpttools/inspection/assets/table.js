// The table of all arrays: searched, sorted, and drawn only where it is looked at.

const ROW = 30;
const BEYOND = 12;
const PRINTED = 1000;

class ArrayTable {
  constructor(contents, choose) {
    Object.assign(this, { contents, choose, columns: columnsOf(contents), sorted: null, upwards: false });
    this.order = [...Array(contents.count).keys()];
    this.shown = this.order;
    this.current = null;
    this.scroller = find(".rows");
    this.body = made("tbody");
    this.heads = this.columns.map((column, k) => this.head(column, k));
    this.before = made("tr", { className: "space", "aria-hidden": "true" }, made("td", { colSpan: this.columns.length }));
    this.after = this.before.cloneNode(true);
    find("table.arrays").append(made("thead", {}, made("tr", {}, ...this.heads)), this.body);
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    find("#search").addEventListener("input", () => this.search());
    this.body.addEventListener("click", (event) => this.clicked(event.target.closest("tr[data-index]")));
    window.addEventListener("beforeprint", () => this.print(true));
    window.addEventListener("afterprint", () => this.print(false));
    window.addEventListener("resize", () => this.draw());
    this.search();
  }

  head(column, k) {
    const button = made("button", { type: "button" }, column.name);
    button.addEventListener("click", () => this.sort(k));
    return made("th", { scope: "col", className: column.kind }, button);
  }

  /** First downwards for numbers and upwards for words, then the other way, then as in the checkpoint. */
  sort(k) {
    const first = this.columns[k].kind === "word";
    if (this.sorted !== k) [this.sorted, this.upwards] = [k, first];
    else if (this.upwards === first) this.upwards = !first;
    else this.sorted = null;
    this.heads.forEach((head, at) => {
      if (at === this.sorted) head.setAttribute("aria-sort", this.upwards ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    this.arrange();
  }

  search() {
    this.matches = matcher(find("#search").value);
    this.arrange();
  }

  arrange() {
    const { paths, dtype, role, shape } = this.contents;
    const text = (index) => `${paths[index]} ${dtype[index]} ${role[index]} ${shape[index]}`.toLowerCase();
    this.shown = this.order.filter((index) => this.matches(paths[index].toLowerCase(), text(index)));
    if (this.sorted !== null) {
      const { key } = this.columns[this.sorted];
      const sign = this.upwards ? 1 : -1;
      this.shown.sort((a, b) => compared(key(a), key(b), sign) || a - b);
    }
    const bytes = this.shown.reduce((sum, index) => sum + this.contents.bytes[index], 0);
    const all = this.shown.length === this.contents.count;
    find("#found").textContent = `${all ? "" : "Found "}${counted(this.shown.length, "array")}, ${inBytes(bytes)}`;
    this.scroller.scrollTop = 0;
    this.draw();
  }

  /** Rows in sight, and space in place of the others. */
  draw() {
    const height = this.scroller.clientHeight || 600;
    const from = this.printing ? 0 : Math.max(0, Math.floor(this.scroller.scrollTop / ROW) - BEYOND);
    const upto = this.printing
      ? Math.min(this.shown.length, PRINTED)
      : Math.min(this.shown.length, from + Math.ceil(height / ROW) + 2 * BEYOND);
    this.before.firstChild.style.height = `${from * ROW}px`;
    this.after.firstChild.style.height = this.printing ? "0" : `${(this.shown.length - upto) * ROW}px`;
    const rows = this.shown.slice(from, upto).map((index, k) => this.row(index, from + k));
    this.body.replaceChildren(this.before, ...rows, this.after);
    find("table.arrays").setAttribute("aria-rowcount", this.shown.length + 1);
  }

  row(index, at) {
    const cells = this.columns.map(({ kind, show }) => made("td", { className: kind }, show(index)));
    const row = made("tr", { "data-index": index, "aria-rowindex": at + 2 }, ...cells);
    if (index === this.current) row.setAttribute("aria-current", "true");
    return row;
  }

  clicked(row) {
    if (row) this.choose(Number(row.dataset.index));
  }

  /** Marks the row of an array. */
  mark(index) {
    this.current = index;
    this.draw();
  }

  print(printing) {
    this.printing = printing;
    this.draw();
  }
}

function columnsOf(contents) {
  const { paths, shape, elements, dtype, role, bytes, stats } = contents;
  const name = (index) => {
    const text = made("bdi", {}, paths[index]);
    const title = { title: paths[index] };
    return stats ? made("button", { type: "button", ...title }, text) : made("span", title, text);
  };
  const words = [
    { name: "Array", kind: "word path", key: (index) => paths[index], show: name },
    { name: "Shape", kind: "number", key: (index) => elements[index], show: (index) => shape[index] },
    { name: "Dtype", kind: "word", key: (index) => dtype[index], show: (index) => dtype[index] },
    { name: "Role", kind: "word", key: (index) => role[index], show: (index) => role[index] },
    { name: "Bytes", kind: "number", key: (index) => bytes[index], show: (index) => inBytes(bytes[index]) },
  ];
  if (!stats) return words;
  const numbers = ["norm", "min", "max", "mean", "std"].map((each) => ({
    name: each[0].toUpperCase() + each.slice(1),
    kind: "number",
    key: (index) => stats[each][index],
    show: (index) => shortNumber(stats[each][index]),
  }));
  const zeros = { name: "Zeros", kind: "number", key: (k) => stats.zeros[k], show: (k) => (stats.zeros[k] ? grouped(stats.zeros[k]) : "") };
  const bad = (index) => stats.nan[index] + stats.inf[index];
  const shown = (index) => (bad(index) ? made("strong", { className: "bad" }, grouped(bad(index))) : "");
  const last = [zeros, { name: "NaN, inf", kind: "number", key: bad, show: shown }];
  const all = [...Array(paths.length).keys()];
  return [...words, ...numbers, ...last.filter(({ key }) => all.some((index) => key(index)))];
}

/** Numbers by size, words as people sort them; what is missing goes last either way. */
function compared(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (typeof a === "string" ? inOrder(a, b) : a - b);
}

/** Whether an array is searched for: a pattern for the whole path, or words that must all occur. */
function matcher(text) {
  const wanted = text.trim().toLowerCase();
  if (/[*?]/.test(wanted)) {
    const escaped = wanted.replace(/[.+^${}()|[\]\\]/g, "\\$&").replaceAll("*", ".*").replaceAll("?", ".");
    const pattern = new RegExp(`^${escaped}$`);
    return (path) => pattern.test(path);
  }
  const words = wanted.split(/\s+/).filter(Boolean);
  return (path, all) => words.every((word) => all.includes(word));
}
