"""Report JSON files of Orbax that cannot be read or are incomplete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ckpttools.array.tree import dotted, keystr
from ckpttools.core.errors import CheckpointError
from ckpttools.diagnosis.base import ERROR, Check, Finding, finding_of
from ckpttools.diagnosis.inventory import Inventory, ListedItem, json_or_error
from ckpttools.formats.orbax import metadata as orbax_metadata
from ckpttools.formats.orbax.metadata import (
    CHECKPOINT_FILE,
    SHARDING_FILE,
    STRINGS_FILE,
    TREE_FILE,
    SavedLeaf,
)


def _examine(inventory: Inventory) -> Iterator[Finding]:
    for step in inventory.steps:
        if CHECKPOINT_FILE in step.files:
            result = json_or_error(step.path / CHECKPOINT_FILE)
            if isinstance(result, CheckpointError):
                yield finding_of(result, step.path)
    for item in inventory.items:
        yield from _optional(item)
        if TREE_FILE in item.directory.files:
            yield from _tree(item)


def _optional(item: ListedItem) -> Iterator[Finding]:
    reason = "loading onto devices without a target needs it; with a target, or as numpy, it loads"
    if SHARDING_FILE in item.directory.files:
        result = json_or_error(item.path / SHARDING_FILE)
        if isinstance(result, CheckpointError):
            yield finding_of(result, item.path, reason=reason)
    try:
        orbax_metadata.key_impls(item.path)
    except CheckpointError as error:
        yield finding_of(error, item.path, reason="typed PRNG keys cannot be distinguished from other arrays")


def _tree(item: ListedItem) -> Iterator[Finding]:
    location = str(item.path / TREE_FILE)
    if isinstance(item.metadata, CheckpointError):
        yield finding_of(
            item.metadata, item.path, reason="without it the arrays of the checkpoint are unknown"
        )
        return
    try:
        leaves = orbax_metadata.parse_tree(item.metadata, location)
    except CheckpointError as error:
        yield finding_of(error, item.path, reason="without it the arrays of the checkpoint are unknown")
        return
    yield from _collisions(leaves, location)
    yield from _strings(item, leaves)


def _collisions(leaves: Sequence[SavedLeaf], location: str) -> Iterator[Finding]:
    names: dict[str, list[str]] = defaultdict(list)
    for leaf in leaves:
        if not leaf.is_empty:
            names[dotted(leaf.path)].append(keystr(leaf.path))
    for name, paths in names.items():
        if len(paths) > 1:
            problem = f"{' and '.join(paths)} are both stored as {name!r}"
            reason = "Orbax joins keys with dots: one overwrote the other during the save"
            yield Finding(
                ERROR, location, problem, reason, "save it again with other keys; the first is lost"
            )


def _strings(item: ListedItem, leaves: Sequence[SavedLeaf]) -> Iterator[Finding]:
    expected = [dotted(leaf.path) for leaf in leaves if leaf.value_type == "string"]
    if not expected:
        return
    result = json_or_error(item.path / STRINGS_FILE)
    if isinstance(result, CheckpointError):
        yield finding_of(result, item.path, reason="the strings of the tree are in it")
        return
    lost = [name for name in expected if not isinstance(result.get(name), str)]
    if lost:
        problem = f"no text for {', '.join(lost)}"
        yield Finding(
            ERROR, str(item.path / STRINGS_FILE), problem, "the tree cannot be read", "restore the file"
        )


CHECK = Check("metadata", "unreadable JSON, trees whose names collide, missing strings", _examine)
