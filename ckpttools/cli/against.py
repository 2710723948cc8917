"""`ckpt inspect tree --against`: what the user means by it, and how the result is shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpttools.cli.output import printable
from ckpttools.cli.units import counted

if TYPE_CHECKING:
    from ckpttools.formats.base import ReadOptions
    from ckpttools.inspect.against import Comparison, Different, Spec
    from ckpttools.ir.tree import Tree

# Beyond this many lines a list says only how many more there are.
_MOST_LINES = 100


def compare(tree: Tree, what: str, read: ReadOptions) -> Comparison:
    """The tree against a family or a file with one, a configuration or another checkpoint.

    Raises:
        CheckpointError: it is none of them, or cannot be read.
    """
    from ckpttools.families.file import SUFFIXES
    from ckpttools.families.registry import families, family_called, family_of
    from ckpttools.formats.json_file import read_json
    from ckpttools.formats.registry import open_tree
    from ckpttools.inspect.against import against_family, against_tree

    path = Path(what)
    if what in families() or path.suffix in SUFFIXES or not (path.exists() or "/" in what):
        family, own = family_called(what), tree.metadata.config
        if own is None or own.get("model_type") not in family.model_types:
            return against_family(tree, family)
        return against_family(tree, family, own, "the config.json beside it")
    config = _config_at(path)
    if config is None:
        return against_tree(tree, open_tree(path, read))
    document = read_json(config)
    return against_family(tree, family_of(document, str(config)), document, str(config))


def _config_at(path: Path) -> Path | None:
    """The configuration that a path means; None for a checkpoint."""
    if path.suffix == ".json":
        return path
    inside = path / "config.json"
    return inside if inside.is_file() and not any(path.glob("*.safetensors")) else None


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """The verdict, and every list that is not empty."""
    against = printable(comparison.against)
    if comparison.is_same:
        number = counted(comparison.num_compared, "array")
        shapes = ", every shape as it should be" if comparison.shapes_compared else ""
        yield f"Against {against}: {number}, none missing, none left over{shapes}."
    else:
        yield f"Against {against}:"
    yield from _section("missing", [(each.path, _type(each)) for each in comparison.missing])
    yield from _section("not expected", [(each.path, _type(each)) for each in comparison.extra])
    yield from _section(
        "of another shape or dtype", [(each.path, _difference(each)) for each in comparison.different]
    )
    if comparison.reasons:
        yield ""
        yield from map(printable, comparison.reasons)


def _section(what: str, entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    """One list of names, each with what is to say of it, under their number."""
    if not entries:
        return
    yield ""
    are = "is" if len(entries) == 1 else "are"
    yield click.style(f"{counted(len(entries), 'array')} {are} {what}", bold=True)
    lines = _folded(entries)
    width = max(len(name) for name, _ in lines[:_MOST_LINES])
    for name, text in lines[:_MOST_LINES]:
        yield f"  {name:{width}}  {click.style(text, fg='cyan')}" if text else f"  {name}"
    if len(lines) > _MOST_LINES:
        yield f"  … and {len(lines) - _MOST_LINES:,} more lines; --json has all of them"


def _folded(entries: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names of which the same is to say and that differ in numbers only as one."""
    from ckpttools.names import folded

    names: dict[str, list[str]] = {}
    for name, text in entries:
        names.setdefault(text, []).append(name)
    return [(printable(name), printable(text)) for text, alike in names.items() for name in folded(alike)]


def _difference(each: Different) -> str:
    why = f" ({each.why})" if each.why else ""
    got = each.got if each.wanted.dtype else replace(each.got, dtype=None)
    return f"{_type(got)}, should be {_type(each.wanted)}{why}"


def _type(spec: Spec) -> str:
    """`bfloat16[64,128]`, or `[64,128]` where any dtype will do."""
    shape = "" if spec.shape is None else f"[{','.join(map(str, spec.shape))}]"
    return f"{spec.dtype or ''}{shape}"
