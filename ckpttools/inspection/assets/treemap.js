// The treemap: rectangles with areas proportional to bytes. A click zooms in.

const HEADER_HEIGHT = 22;
const GAP = 2;
const MAX_LEVELS = 8;
// Minimum sides: of a square with the area of a rectangle, of the rectangle, and for children and a label.
const MIN_SQUARE_SIDE = 12;
const MIN_SIDE = 4;
const MIN_SIZE_FOR_CHILDREN = [64, 52];
const MIN_SIZE_FOR_LABEL = [40, 20];
// Minimum sides for the bytes below a name, and next to it.
const MIN_SIZE_FOR_BYTES_BELOW = [58, 38];
const MIN_SIZE_FOR_BYTES_NEXT_TO_NAME = [110, 20];
const NUM_HUES = 8;
// The printable area of A4 and Letter paper without margins; the height is that of the style sheet.
const PRINT_BOX = { left: 0, top: 0, width: 690, height: 380 };
// Subtrees get different colors if the largest has less than this fraction of the bytes.
const MAX_DOMINANT_FRACTION = 0.95;

/** Returns nearly square rectangles for `items`, largest first (Bruls, Huizing, van Wijk). */
function squarify(items, box) {
  const total = items.reduce((sum, item) => sum + item.bytes, 0);
  const rest = { ...box };
  const scale = (box.width * box.height) / total;
  const rectangles = [];
  let start = 0;
  while (start < items.length) {
    const side = Math.min(rest.width, rest.height);
    let end = start + 1;
    let sum = items[start].bytes * scale;
    let worst = worstRatio(items[start].bytes * scale, items[start].bytes * scale, sum, side);
    while (end < items.length) {
      const area = items[end].bytes * scale;
      const ratio = worstRatio(items[start].bytes * scale, area, sum + area, side);
      if (ratio > worst) break;
      worst = ratio;
      sum += area;
      end += 1;
    }
    placeRow(items.slice(start, end), sum, scale, rest, rectangles);
    start = end;
  }
  return rectangles;
}

/** Returns the worst aspect ratio in a row with the given largest and smallest areas. */
function worstRatio(largest, smallest, sum, side) {
  return Math.max((side * side * largest) / (sum * sum), (sum * sum) / (side * side * smallest));
}

/** Places a row along the shorter side of `rest`, and removes its area from `rest`. */
function placeRow(items, sum, scale, rest, rectangles) {
  const isWide = rest.width >= rest.height;
  const depth = sum / (isWide ? rest.height : rest.width) || 0;
  let offset = isWide ? rest.top : rest.left;
  for (const item of items) {
    const length = (item.bytes * scale) / depth || 0;
    rectangles.push(
      isWide
        ? { item, left: rest.left, top: offset, width: depth, height: length }
        : { item, left: offset, top: rest.top, width: length, height: depth },
    );
    offset += length;
  }
  if (isWide) {
    rest.left += depth;
    rest.width -= depth;
  } else {
    rest.top += depth;
    rest.height -= depth;
  }
}

/** Returns the children that are large enough to be visible in a box, and one node for the others. */
function visibleChildren(node, box) {
  const minBytes = (MIN_SQUARE_SIDE * MIN_SQUARE_SIDE * node.bytes) / (box.width * box.height);
  const shown = node.children.filter((child) => child.bytes >= minBytes);
  const small = node.children.slice(shown.length);
  const rest = new TreeNode(`${formatInteger(small.length)} smaller`, node, { isReal: false });
  for (const child of small) {
    rest.childMap.set(child, child);
    rest.bytes += child.bytes;
    rest.arrays += child.arrays;
  }
  if (rest.bytes >= minBytes && rest.bytes) shown.push(rest);
  return shown.sort((a, b) => b.bytes - a.bytes);
}

class Treemap {
  constructor(contents, choose) {
    Object.assign(this, { contents, choose, root: buildTree(contents) });
    this.box = find(".treemap");
    this.current = this.root;
    this.nodes = new Map();
    this.box.addEventListener("click", (event) => this.handleClick(event.target.closest("[data-tip]")));
    find("#bytes").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.current !== this.root) this.zoomTo(this.parentCrumb());
    });
    addTooltips(this.box, (element) => this.lines(this.nodes.get(element)));
    new ResizeObserver(() => this.draw()).observe(this.box);
    window.addEventListener("beforeprint", () => this.draw(PRINT_BOX));
    window.addEventListener("afterprint", () => this.draw());
    this.draw();
  }

  /** Returns the node to which Escape zooms out. */
  parentCrumb() {
    const crumbs = this.crumbs();
    return crumbs[crumbs.length - 2] ?? this.root;
  }

  handleClick(element) {
    const node = element && this.nodes.get(element);
    if (!node) return;
    if (node.fork.isArray) this.choose(node.fork.index);
    else this.zoomTo(node);
  }

  zoomTo(node) {
    hideTip();
    this.current = node;
    this.draw();
    const label = node === this.root ? "everything" : node.label(this.root, this.contents.separator);
    announce(`${label}: ${formatCount(node.arrays, "array")}, ${formatBytes(node.bytes)}`);
    const first = this.box.querySelector("button");
    if (first) first.focus({ preventScroll: true });
  }

  /** Returns the nodes from the root to the current one, without those that have a single child. */
  crumbs() {
    const ancestors = [];
    for (let node = this.current; node; node = node.parent) ancestors.unshift(node);
    return ancestors.filter((node, k) => k === 0 || k === ancestors.length - 1 || node.fork === node);
  }

  draw(size = { left: 0, top: 0, width: this.box.clientWidth, height: this.box.clientHeight }) {
    this.drawCrumbs();
    this.nodes.clear();
    if (!this.root.bytes) {
      this.box.replaceChildren(createElement("p", { className: "note" }, "All arrays are empty."));
      return;
    }
    const focus = this.current.fork;
    const tiles = focus.isArray
      ? this.tile({ item: focus, ...size }, focus.parent, size, 0, 0)
      : this.layoutChildren(focus, visibleChildren(focus, size), size, size, null, 0);
    this.box.replaceChildren(...tiles);
  }

  /** Returns the tiles of a node's children; `hue` is null until a level has several subtrees. */
  layoutChildren(node, children, box, fullBox, hue, level) {
    const rectangles = squarify(children, box).filter(({ width, height }) => Math.min(width, height) >= MIN_SIDE);
    const isDivided = hue === null && rectangles.length > 1 && rectangles[0].item.bytes < MAX_DOMINANT_FRACTION * node.bytes;
    return rectangles.flatMap((rectangle, k) => this.tile(rectangle, node, fullBox, isDivided ? k % NUM_HUES : hue, level));
  }

  drawCrumbs() {
    const crumbs = this.crumbs();
    const items = crumbs.map((node, k) => {
      const name = k ? node.label(crumbs[k - 1], this.contents.separator) : "everything";
      const last = k === crumbs.length - 1;
      const button = createElement("button", { type: "button", disabled: last }, name);
      if (last) button.setAttribute("aria-current", "true");
      else button.addEventListener("click", () => this.zoomTo(node));
      return createElement("li", {}, button);
    });
    find(".crumbs ol").replaceChildren(...items);
  }

  /** Returns the tile of a node, and those of its children if there is room. */
  tile(rectangle, above, fullBox, hue, level) {
    const node = rectangle.item;
    const inner = { left: rectangle.left, top: rectangle.top, width: rectangle.width - GAP, height: rectangle.height - GAP };
    const childBox = {
      left: inner.left + 2 * GAP,
      top: inner.top + HEADER_HEIGHT,
      width: inner.width - 3 * GAP,
      height: inner.height - HEADER_HEIGHT - GAP,
    };
    const large = inner.width >= MIN_SIZE_FOR_CHILDREN[0] && inner.height >= MIN_SIZE_FOR_CHILDREN[1];
    const children = large && level + 1 < MAX_LEVELS ? visibleChildren(node.fork, childBox) : [];
    // Without a visible child, the tile is not divided.
    const hasChildren = children.length > 1 || children[0]?.isReal;
    const ownButton = this.button(node, above, inner, fullBox, hue, hasChildren);
    return hasChildren ? [ownButton, ...this.layoutChildren(node.fork, children, childBox, fullBox, hue, level + 1)] : [ownButton];
  }

  button(node, above, box, fullBox, hue, isHead) {
    const label = node.fork.label(above, this.contents.separator) || node.name;
    const styles = [
      `left:${(100 * box.left) / fullBox.width}%`,
      `top:${(100 * box.top) / fullBox.height}%`,
      `width:${(100 * Math.max(1, box.width)) / fullBox.width}%`,
      `height:${(100 * Math.max(1, box.height)) / fullBox.height}%`,
    ];
    const text = [createElement("span", { className: "name" }, label)];
    const [minWidth, minHeight] = isHead ? MIN_SIZE_FOR_BYTES_NEXT_TO_NAME : MIN_SIZE_FOR_BYTES_BELOW;
    if (box.width >= minWidth && box.height >= minHeight) {
      text.push(createElement("span", { className: "size" }, formatBytes(node.bytes)));
    }
    const fits = box.width >= MIN_SIZE_FOR_LABEL[0] && box.height >= MIN_SIZE_FOR_LABEL[1];
    const button = createElement(
      "button",
      {
        type: "button",
        className: `tile hue${hue ?? NUM_HUES - 1}${isHead ? " head" : ""}${fits ? "" : " bare"}`,
        style: styles.join(";"),
        "data-tip": "",
        "aria-label": `${label}, ${formatBytes(node.bytes)}${node.fork.isArray ? "" : ", zoom in"}`,
      },
      ...(fits ? text : []),
    );
    this.nodes.set(button, node);
    return button;
  }

  lines(node) {
    if (!node) return [];
    const fork = node.fork;
    const share = `${formatBytes(node.bytes)}, ${formatPercent(node.bytes / this.root.bytes)} of all`;
    const path = fork.label(this.root, this.contents.separator);
    if (!fork.isArray) return [path, share, formatCount(node.arrays, "array")];
    return [path, share, `${this.contents.dtype[fork.index]} ${this.contents.shape[fork.index]}`];
  }
}
