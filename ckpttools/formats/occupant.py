"""What has the name of a destination already, and whether a new checkpoint may take its place.

Only a checkpoint of the kind that is being written may be replaced, and only if nothing else lies in it: not
a run of several steps, not other items or files beside the weights, not the state of an optimizer that the
new one does not have.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from ckpttools.errors import CheckpointError, DestinationExistsError, LaterStepWarning, StorageError, listing
from ckpttools.formats import orbax_metadata
from ckpttools.formats.base import COMPANIONS, PLAN_MARK
from ckpttools.formats.registry import open_tree
from ckpttools.ir.kinds import optimizer_of
from ckpttools.ir.tree import Tree
from ckpttools.stores.files import names_in

# What belongs to a Hugging Face model: weights, their index, configuration, tokenizer, model card. Nothing
# that a trainer leaves (`optimizer.pt`, `training_args.bin`), no directory (`checkpoint-500`, `.git`).
_MODEL_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.md",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.py",
    "LICENSE*",
    ".gitattributes",
)
_ORBAX_FILES = frozenset(orbax_metadata.OWN_FILES)
_SHOWN = 5


def check_replaceable(destination: Path, tree: Tree, format_name: str) -> None:
    """Refuses where a destination holds what would be lost.

    Args:
        destination: a directory with something in it.
        tree: what will be written.
        format_name: of the writer.

    Raises:
        DestinationExistsError: it may not be replaced; says what is there.
        StorageError: the system reports an error.
    """
    old = _opened(destination)
    if old.metadata.format != format_name:
        raise _refused(
            destination, f"holds a checkpoint of format {old.metadata.format}", f"one of {format_name}"
        )
    strangers = sorted({*_STRANGERS.get(format_name, _all)(destination, old)} - {PLAN_MARK})
    if strangers:
        more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
        raise _refused(
            destination,
            f"holds more than one checkpoint: {', '.join(strangers[:_SHOWN])}{more}",
            "one checkpoint, laid out as this command writes it, and nothing else",
        )
    optimizer = optimizer_of(old)
    if optimizer and not optimizer_of(tree):
        step = "" if old.metadata.step is None else f" of step {old.metadata.step}"
        raise _refused(
            destination,
            f"holds a training checkpoint{step}, with the state of its optimizer ({optimizer.name})",
            "no optimizer state where what replaces it has none",
        )


def _opened(destination: Path) -> Tree:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LaterStepWarning)
            return open_tree(destination)
    except StorageError:
        raise
    except CheckpointError as error:
        names = names_in(destination)
        raise _refused(
            destination,
            "is no checkpoint that can be read" + listing(names, _SHOWN),
            "a whole checkpoint of the kind that is written",
        ) from error


def _refused(destination: Path, got: str, wanted: str) -> DestinationExistsError:
    return DestinationExistsError(
        f"{destination} is not replaced: it {got}",
        wanted=wanted,
        hint="choose another destination, or move away what is there",
    )


def _orbax_strangers(destination: Path, tree: Tree) -> Iterator[str]:
    """All but one step with one item, as `OrbaxWriter` lays them out."""
    item = Path(tree.metadata.place)
    step = item.parent
    if item == destination or step == destination or step.parent != destination:
        yield f"{os.path.relpath(item, destination)} (an item of Orbax, not <step>/<item>)"
        return
    yield from (name for name in names_in(destination) if name != step.name)
    for name in names_in(step):
        if name != item.name and name not in _ORBAX_FILES:
            yield f"{step.name}/{name}"


def _safetensors_strangers(destination: Path, tree: Tree) -> Iterator[str]:
    for entry in os.scandir(destination):
        # What goes along has a directory of its own where the source had one.
        if entry.name == COMPANIONS and entry.is_dir(follow_symlinks=False):
            yield from (f"{COMPANIONS}/{each.name}" for each in os.scandir(entry) if not _is_of_model(each))
        elif not _is_of_model(entry):
            yield entry.name


def _is_of_model(entry: os.DirEntry[str]) -> bool:
    known = any(fnmatchcase(entry.name, pattern) for pattern in _MODEL_FILES)
    return known and not entry.is_dir(follow_symlinks=False)


def _zarr_strangers(destination: Path, tree: Tree) -> Iterator[str]:
    for entry in os.scandir(destination):
        node = Path(entry.path, "zarr.json")
        if entry.name != "zarr.json" and not node.is_file() and entry.name != "c":
            yield entry.name


def _all(destination: Path, tree: Tree) -> Iterable[str]:
    return names_in(destination)


_STRANGERS = {
    "orbax": _orbax_strangers,
    "safetensors": _safetensors_strangers,
    "zarr3": _zarr_strangers,
}
