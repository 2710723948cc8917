"""Display a tree as HTML in notebooks: keys are collapsible, and equal layers share one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Empty, Leaf, Tree
from ckpttools.core.tabular import text_html
from ckpttools.core.text import array_count, fold_lines, format_disk

MAX_LINES = 2000
"""The maximum number of lines of a tree in a notebook, so that the browser stays responsive."""
_OPEN_LINES = 30
_MAX_DEPTH = 40
_DIGITS = re.compile(r"\d+")
_INDENT = 'style="margin-left:1.5em"'
_FAINT = '<span style="opacity:0.65">'

_MAX_LABEL = 80

_Node = dict[str, Any]


class _Signatures:
    """Assigns equal numbers to subtrees with the same names, dtypes and shapes."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}
        self._of_nodes: dict[int, int] = {}

    def of(self, child: Any) -> int:
        if not isinstance(child, dict):
            is_array = isinstance(child, LazyArray)
            return self._number((child.dtype.name, child.shape) if is_array else repr(child))
        if id(child) not in self._of_nodes:
            items = tuple((name, self.of(item)) for name, item in child.items())
            self._of_nodes[id(child)] = self._number(items)
        return self._of_nodes[id(child)]

    def _number(self, key: object) -> int:
        return self._known.setdefault(key, len(self._known))


def tree_html(tree: Tree) -> str:
    """Return a tree as nested `details` elements with names, dtypes, shapes and sizes; reads no arrays."""
    root: _Node = {}
    is_flat = all(len(path) == 1 for path in tree.leaves)
    for path, leaf in tree.leaves.items():
        # Formats without nesting use names such as `model.layers.0.mlp`.
        parts = str(path[0]).split(".") if is_flat else [*map(str, path or ("",))]
        _insert(root, [*parts[:_MAX_DEPTH], *filter(None, [".".join(parts[_MAX_DEPTH:])])], leaf)
    lines = list(_lines(root, "." if is_flat else "/", _Signatures(), is_open=True))
    visible_lines = lines[:MAX_LINES]
    if len(lines) > MAX_LINES:
        visible_lines += [
            "</div></details>" * _depth(visible_lines),
            f"<div>… {len(lines) - MAX_LINES:,} more lines</div>",
        ]
    return f"<div>{text_html(tree.head())}</div>{''.join(visible_lines)}"


def _insert(root: _Node, parts: list[str], leaf: Leaf) -> None:
    node = root
    for number, part in enumerate(parts[:-1]):
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            # An array and a branch have the same name, so the array keeps its full name as one key.
            node[".".join(parts[number:])] = leaf
            return
        node = child
    name = parts[-1]
    node[f"{name}." if isinstance(node.get(name), dict) else name] = leaf


def _lines(
    node: Mapping[str, Any], separator: str, signatures: _Signatures, *, is_open: bool
) -> Iterator[str]:
    """Yield one line per group of equal children, each followed by the lines below it."""
    groups = _groups(node, signatures)
    for label, child, count in groups:
        while isinstance(child, dict) and len(below := _groups(child, signatures)) == 1:
            ((name, child, times),) = below
            label, count = f"{label}{separator}{name}", count * times
        if len(label) > _MAX_LABEL:
            label = f"{label[:_MAX_LABEL]}… ({count:,} keys)"
        if not isinstance(child, dict):
            yield f"<div {_INDENT}>{text_html(label)} {_FAINT}{_describe(child, count)}</span></div>"
            continue
        arrays, nbytes = _total(child)
        text = f"{array_count(range(count * arrays))}, {format_disk(count * nbytes)}"
        summary = f"<summary>{text_html(label)} {_FAINT}{text}</span></summary>"
        yield f"<details{' open' * (is_open and len(groups) <= _OPEN_LINES)} {_INDENT}>{summary}<div>"
        yield from _lines(child, separator, signatures, is_open=is_open and len(groups) == 1)
        yield "</div></details>"


def _groups(node: Mapping[str, Any], signatures: _Signatures) -> list[tuple[str, Any, int]]:
    """Group the children of a node: equal ones whose names differ only in numbers form one group.

    Returns:
        For each group, its label (such as "{0..31}"), one of its children, and its size.
    """
    groups: dict[tuple[str, object], list[str]] = {}
    for name, child in node.items():
        groups.setdefault((_DIGITS.sub("#", name), signatures.of(child)), []).append(name)
    result: list[tuple[str, Any, int]] = []
    for names in groups.values():
        labels = fold_lines(names)
        if len(labels) == 1:
            result.append((labels[0], node[names[0]], len(names)))
        else:
            # The numbers in the names are not consecutive.
            result += [(name, node[name], 1) for name in names]
    return result


def _depth(lines: list[str]) -> int:
    return sum(line.startswith("<details") - line.startswith("</div></details") for line in lines)


def _total(node: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of arrays below a node, and their total size in memory, in bytes."""
    arrays = nbytes = 0
    for child in node.values():
        if isinstance(child, dict):
            below = _total(child)
            arrays, nbytes = arrays + below[0], nbytes + below[1]
        elif isinstance(child, LazyArray):
            arrays, nbytes = arrays + 1, nbytes + child.nbytes
    return arrays, nbytes


def _describe(leaf: Leaf, count: int) -> str:
    if isinstance(leaf, LazyArray):
        return f"{leaf.dtype}{list(leaf.shape)} · {format_disk(count * leaf.nbytes)}"
    return text_html(f"empty {leaf.kind}" if isinstance(leaf, Empty) else repr(leaf.value))
