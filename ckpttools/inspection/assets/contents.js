// The contents of the page, unpacked: arrays by index, and the tree that their paths make.

async function unpacked() {
  const text = document.getElementById("contents").textContent;
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const contents = JSON.parse(await new Response(stream).text());
  contents.paths = pathsOf(contents.paths);
  for (const name of ["shape", "dtype", "role"]) {
    const { words, places } = contents[name];
    contents[name] = places.map((place) => words[place]);
  }
  contents.elements = contents.shape.map(elementsIn);
  contents.count = contents.paths.length;
  return contents;
}

/** "[4, 16]" -> 64 */
function elementsIn(shape) {
  if (shape === "[]") return 1;
  return shape.slice(1, -1).split(", ").reduce((product, length) => product * Number(length), 1);
}

/** Paths from how much each shares with the one before, and its rest. */
function pathsOf(coded) {
  const paths = [];
  let before = "";
  for (let k = 0; k < coded.length; k += 2) {
    before = before.slice(0, coded[k]) + coded[k + 1];
    paths.push(before);
  }
  return paths;
}

/** How people sort names: layers_2 before layers_10. */
const inOrder = new Intl.Collator("en", { numeric: true }).compare;

/**
 * A place in the tree; `index` is that of the array there, or null. What only stands for others is not real.
 * An array with others below its name is its own child: `isOwn`.
 */
class TreeNode {
  constructor(name, parent, { isReal = true, isOwn = false } = {}) {
    Object.assign(this, { name, parent, isReal, isOwn, bytes: 0, arrays: 0, index: null, below: new Map() });
  }

  /** Children, largest first. */
  get children() {
    this.sorted ??= [...this.below.values()].sort((a, b) => b.bytes - a.bytes || inOrder(a.name, b.name));
    return this.sorted;
  }

  get isArray() {
    return this.index !== null;
  }

  /** This place, or the first below it where the way forks or ends. */
  get fork() {
    let node = this;
    while (node.index === null && node.below.size === 1) [node] = node.below.values();
    return node;
  }

  /** Names from `above` down to this place, joined. */
  label(above, joint) {
    const names = [];
    const first = this.isOwn && this.parent !== above ? this.parent : this;
    for (let node = first; node && node !== above; node = node.parent) names.unshift(node.name);
    return names.join(joint);
  }
}

function treeOf(contents) {
  const root = new TreeNode("", null);
  const ends = [];
  for (let index = 0; index < contents.count; index += 1) {
    let node = root;
    const way = [root];
    for (const name of contents.paths[index].split(contents.joint)) {
      if (!node.below.has(name)) node.below.set(name, new TreeNode(name, node));
      node = node.below.get(name);
      way.push(node);
    }
    node.index = index;
    ends.push(node);
    for (const each of way) {
      each.bytes += contents.bytes[index];
      each.arrays += 1;
    }
  }
  for (const node of ends) setApart(node);
  return root;
}

/** Makes an array that has others below its name a child of its place, so that it can be chosen like them. */
function setApart(node) {
  if (node.index === null || node.below.size === 0) return;
  const own = new TreeNode(node.name, node, { isOwn: true });
  const others = [...node.below.values()].reduce((sum, { bytes }) => sum + bytes, 0);
  Object.assign(own, { index: node.index, arrays: 1, bytes: node.bytes - others });
  node.index = null;
  // No name of another child is this key.
  node.below.set(own, own);
}
