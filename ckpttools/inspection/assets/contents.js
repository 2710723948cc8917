// Unpacks the contents of the page, and builds the tree of paths.

async function unpackContents() {
  const text = document.getElementById("contents").textContent;
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const contents = JSON.parse(await new Response(stream).text());
  contents.paths = decodePaths(contents.paths);
  for (const name of ["shape", "dtype", "role"]) {
    const { words, indices } = contents[name];
    contents[name] = indices.map((index) => words[index]);
  }
  contents.elements = contents.shape.map(countElements);
  contents.count = contents.paths.length;
  return contents;
}

/** "[4, 16]" -> 64 */
function countElements(shape) {
  if (shape === "[]") return 1;
  return shape.slice(1, -1).split(", ").reduce((product, length) => product * Number(length), 1);
}

/** Decodes paths that are stored as the length of the prefix shared with the previous path, and the rest. */
function decodePaths(encoded) {
  const paths = [];
  let previous = "";
  for (let k = 0; k < encoded.length; k += 2) {
    previous = previous.slice(0, encoded[k]) + encoded[k + 1];
    paths.push(previous);
  }
  return paths;
}

/** Compares names in natural order: layers_2 before layers_10. */
const compareNames = new Intl.Collator("en", { numeric: true }).compare;

/**
 * A node of the tree. `index` is the index of the array at this path, or null. A node that only represents
 * others is not real. An array with other arrays below its name becomes a child of its node: `isOwnArray`.
 */
class TreeNode {
  constructor(name, parent, { isReal = true, isOwnArray = false } = {}) {
    Object.assign(this, { name, parent, isReal, isOwnArray, bytes: 0, arrays: 0, index: null, childMap: new Map() });
  }

  /** Children, largest first. */
  get children() {
    this.sorted ??= [...this.childMap.values()].sort((a, b) => b.bytes - a.bytes || compareNames(a.name, b.name));
    return this.sorted;
  }

  get isArray() {
    return this.index !== null;
  }

  /** This node, or the first one below it that is an array or has several children. */
  get fork() {
    let node = this;
    while (node.index === null && node.childMap.size === 1) [node] = node.childMap.values();
    return node;
  }

  /** Joins the names from below `above` down to this node. */
  label(above, separator) {
    const names = [];
    const first = this.isOwnArray && this.parent !== above ? this.parent : this;
    for (let node = first; node && node !== above; node = node.parent) names.unshift(node.name);
    return names.join(separator);
  }
}

function buildTree(contents) {
  const root = new TreeNode("", null);
  const leaves = [];
  for (let index = 0; index < contents.count; index += 1) {
    let node = root;
    const ancestors = [root];
    for (const name of contents.paths[index].split(contents.separator)) {
      if (!node.childMap.has(name)) node.childMap.set(name, new TreeNode(name, node));
      node = node.childMap.get(name);
      ancestors.push(node);
    }
    node.index = index;
    leaves.push(node);
    for (const ancestor of ancestors) {
      ancestor.bytes += contents.bytes[index];
      ancestor.arrays += 1;
    }
  }
  for (const node of leaves) separateOwnArray(node);
  return root;
}

/** Makes an array with other arrays below its name a child of its node, so that it can be selected, too. */
function separateOwnArray(node) {
  if (node.index === null || node.childMap.size === 0) return;
  const ownArray = new TreeNode(node.name, node, { isOwnArray: true });
  const others = [...node.childMap.values()].reduce((sum, { bytes }) => sum + bytes, 0);
  Object.assign(ownArray, { index: node.index, arrays: 1, bytes: node.bytes - others });
  node.index = null;
  // The node itself is the key, because every name could be that of another child.
  node.childMap.set(ownArray, ownArray);
}
