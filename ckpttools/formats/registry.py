"""Finding the format of a path: built-in ones and plug-ins come through the same entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ckpttools.entry_points import load_group
from ckpttools.errors import FormatError, StorageError, UsageError, listing
from ckpttools.formats.base import Format, ReadOptions
from ckpttools.ir.tree import Tree


@cache
def formats() -> Mapping[str, Format]:
    """All formats by name."""
    return load_group("ckpttools.formats")


def open_tree(path: Path, options: ReadOptions | None = None) -> Tree:
    """The checkpoint at `path`, whatever its format, without reading any array.

    Raises:
        StorageError: nothing is there.
        FormatError: no format recognises it; says what each of them missed.
    """
    if not path.exists():
        raise StorageError(f"{path} is not there", hint="check the spelling of the path")
    reasons: list[str] = []
    for name, each in sorted(formats().items()):
        reason = each.why_not(path)
        if reason is None:
            return _with_step(each.open(path, options or ReadOptions()), options)
        reasons.append(f"{name}: {reason}")
    raise FormatError(f"{path} is no checkpoint of a known format{listing(reasons)}")


def _with_step(tree: Tree, options: ReadOptions | None) -> Tree:
    """The tree, if it is of the step that was asked for."""
    if options and options.step is not None and tree.metadata.step != options.step:
        raise UsageError(
            f"there is no step {options.step}",
            place=tree.metadata.place,
            got="no steps" if tree.metadata.step is None else f"step {tree.metadata.step}",
            hint="leave --step out",
        )
    return tree
