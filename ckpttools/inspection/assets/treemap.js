// Rectangles whose areas are bytes: as many levels as there is room for, click by click.

const HEAD = 22;
const GAP = 2;
const LEVELS = 8;
// Sides of the least square that is drawn, the least side of any, and sides for children and for text.
const LEAST_SIDE = 12;
const THINNEST = 4;
const ROOM_FOR_LEVEL = [64, 52];
const ROOM_FOR_TEXT = [40, 20];
// Sides for bytes below a name, and beside one.
const ROOM_BELOW = [58, 38];
const ROOM_BESIDE = [110, 20];
const HUES = 8;
// What a sheet of A4 or Letter paper has room for, margins left out; the height is that of the style sheet.
const PAPER = { left: 0, top: 0, width: 690, height: 380 };
// Subtrees get colours of their own where the largest has less than such a share.
const UNDIVIDED = 0.95;

/** Rectangles for `items`, largest first, as near to squares as they can be (Bruls, Huizing, van Wijk). */
function squarified(items, box) {
  const total = items.reduce((sum, item) => sum + item.bytes, 0);
  const rest = { ...box };
  const scale = (box.width * box.height) / total;
  const placed = [];
  let from = 0;
  while (from < items.length) {
    const side = Math.min(rest.width, rest.height);
    let upto = from + 1;
    let sum = items[from].bytes * scale;
    let worst = worstRatio(items[from].bytes * scale, items[from].bytes * scale, sum, side);
    while (upto < items.length) {
      const area = items[upto].bytes * scale;
      const ratio = worstRatio(items[from].bytes * scale, area, sum + area, side);
      if (ratio > worst) break;
      worst = ratio;
      sum += area;
      upto += 1;
    }
    placeRow(items.slice(from, upto), sum, scale, rest, placed);
    from = upto;
  }
  return placed;
}

/** The least square rectangle of a row whose largest and smallest areas are known. */
function worstRatio(largest, smallest, sum, side) {
  return Math.max((side * side * largest) / (sum * sum), (sum * sum) / (side * side * smallest));
}

/** Places a row along the shorter side of `rest`, and takes it off. */
function placeRow(items, sum, scale, rest, placed) {
  const across = rest.width >= rest.height;
  const depth = sum / (across ? rest.height : rest.width) || 0;
  let at = across ? rest.top : rest.left;
  for (const item of items) {
    const length = (item.bytes * scale) / depth || 0;
    placed.push(
      across
        ? { item, left: rest.left, top: at, width: depth, height: length }
        : { item, left: at, top: rest.top, width: length, height: depth },
    );
    at += length;
  }
  if (across) {
    rest.left += depth;
    rest.width -= depth;
  } else {
    rest.top += depth;
    rest.height -= depth;
  }
}

/** The children of a node that can be seen in a box, and one node for those that only together can. */
function visible(node, box) {
  const least = (LEAST_SIDE * LEAST_SIDE * node.bytes) / (box.width * box.height);
  const shown = node.children.filter((child) => child.bytes >= least);
  const small = node.children.slice(shown.length);
  const rest = new TreeNode(`${grouped(small.length)} smaller`, node, { isReal: false });
  for (const child of small) {
    rest.below.set(child, child);
    rest.bytes += child.bytes;
    rest.arrays += child.arrays;
  }
  if (rest.bytes >= least && rest.bytes) shown.push(rest);
  return shown.sort((a, b) => b.bytes - a.bytes);
}

class Treemap {
  constructor(contents, choose) {
    Object.assign(this, { contents, choose, root: treeOf(contents) });
    this.box = find(".treemap");
    this.place = this.root;
    this.nodes = new Map();
    this.box.addEventListener("click", (event) => this.clicked(event.target.closest("[data-tip]")));
    find("#bytes").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.place !== this.root) this.go(this.outside());
    });
    tipsWithin(this.box, (element) => this.lines(this.nodes.get(element)));
    new ResizeObserver(() => this.draw()).observe(this.box);
    window.addEventListener("beforeprint", () => this.draw(PAPER));
    window.addEventListener("afterprint", () => this.draw());
    this.draw();
  }

  /** The place that Escape leads to. */
  outside() {
    const crumbs = this.crumbs();
    return crumbs[crumbs.length - 2] ?? this.root;
  }

  clicked(element) {
    const node = element && this.nodes.get(element);
    if (!node) return;
    if (node.fork.isArray) this.choose(node.fork.index);
    else this.go(node);
  }

  go(node) {
    hideTip();
    this.place = node;
    this.draw();
    const label = node === this.root ? "everything" : node.label(this.root, this.contents.joint);
    say(`${label}: ${counted(node.arrays, "array")}, ${inBytes(node.bytes)}`);
    const first = this.box.querySelector("button");
    if (first) first.focus({ preventScroll: true });
  }

  /** Places from the root to the present one, those where the way does not fork left out. */
  crumbs() {
    const way = [];
    for (let node = this.place; node; node = node.parent) way.unshift(node);
    return way.filter((node, k) => k === 0 || k === way.length - 1 || node.fork === node);
  }

  draw(size = { left: 0, top: 0, width: this.box.clientWidth, height: this.box.clientHeight }) {
    this.drawCrumbs();
    this.nodes.clear();
    if (!this.root.bytes) {
      this.box.replaceChildren(made("p", { className: "note" }, "No array holds any bytes."));
      return;
    }
    const focus = this.place.fork;
    const tiles = focus.isArray
      ? this.tile({ item: focus, ...size }, focus.parent, size, 0, 0)
      : this.inside(focus, visible(focus, size), size, size, null, 0);
    this.box.replaceChildren(...tiles);
  }

  /** Rectangles for children of a node; `hue` is null as long as nothing has divided them. */
  inside(node, children, box, whole, hue, level) {
    const places = squarified(children, box).filter(({ width, height }) => Math.min(width, height) >= THINNEST);
    const divided = hue === null && places.length > 1 && places[0].item.bytes < UNDIVIDED * node.bytes;
    return places.flatMap((place, k) => this.tile(place, node, whole, divided ? k % HUES : hue, level));
  }

  drawCrumbs() {
    const crumbs = this.crumbs();
    const items = crumbs.map((node, k) => {
      const name = k ? node.label(crumbs[k - 1], this.contents.joint) : "everything";
      const last = k === crumbs.length - 1;
      const button = made("button", { type: "button", disabled: last }, name);
      if (last) button.setAttribute("aria-current", "true");
      else button.addEventListener("click", () => this.go(node));
      return made("li", {}, button);
    });
    find(".crumbs ol").replaceChildren(...items);
  }

  /** The rectangle of a node, and within it those of its children where there is room. */
  tile(place, above, whole, hue, level) {
    const node = place.item;
    const inner = { left: place.left, top: place.top, width: place.width - GAP, height: place.height - GAP };
    const below = {
      left: inner.left + 2 * GAP,
      top: inner.top + HEAD,
      width: inner.width - 3 * GAP,
      height: inner.height - HEAD - GAP,
    };
    const large = inner.width >= ROOM_FOR_LEVEL[0] && inner.height >= ROOM_FOR_LEVEL[1];
    const children = large && level + 1 < LEVELS ? visible(node.fork, below) : [];
    // Where no child is large enough to be seen, there is nothing to divide.
    const opened = children.length > 1 || children[0]?.isReal;
    const own = this.button(node, above, inner, whole, hue, opened);
    return opened ? [own, ...this.inside(node.fork, children, below, whole, hue, level + 1)] : [own];
  }

  button(node, above, box, whole, hue, isHead) {
    const label = node.fork.label(above, this.contents.joint) || node.name;
    const shares = [
      `left:${(100 * box.left) / whole.width}%`,
      `top:${(100 * box.top) / whole.height}%`,
      `width:${(100 * Math.max(1, box.width)) / whole.width}%`,
      `height:${(100 * Math.max(1, box.height)) / whole.height}%`,
    ];
    const text = [made("span", { className: "name" }, label)];
    const [wide, high] = isHead ? ROOM_BESIDE : ROOM_BELOW;
    if (box.width >= wide && box.height >= high) {
      text.push(made("span", { className: "size" }, inBytes(node.bytes)));
    }
    const fits = box.width >= ROOM_FOR_TEXT[0] && box.height >= ROOM_FOR_TEXT[1];
    const button = made(
      "button",
      {
        type: "button",
        className: `tile hue${hue ?? HUES - 1}${isHead ? " head" : ""}${fits ? "" : " bare"}`,
        style: shares.join(";"),
        "data-tip": "",
        "aria-label": `${label}, ${inBytes(node.bytes)}${node.fork.isArray ? "" : ", go into it"}`,
      },
      ...(fits ? text : []),
    );
    this.nodes.set(button, node);
    return button;
  }

  lines(node) {
    if (!node) return [];
    const fork = node.fork;
    const share = `${inBytes(node.bytes)}, ${percent(node.bytes / this.root.bytes)} of all`;
    const path = fork.label(this.root, this.contents.joint);
    if (!fork.isArray) return [path, share, counted(node.arrays, "array")];
    return [path, share, `${this.contents.dtype[fork.index]} ${this.contents.shape[fork.index]}`];
  }
}
