"""Finding the format of a path: built-in ones are listed here, others come by entry points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from shlex import quote
from string import digits
from typing import Any

import ckpttools.formats as package
from ckpttools.array.storage import Sharding, Storage
from ckpttools.array.tree import Path as TreePath
from ckpttools.array.tree import Tree
from ckpttools.core.errors import CheckpointError, FormatError, UsageError, listing
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Notes
from ckpttools.core.options import Option, parse_options
from ckpttools.core.plugins import load_group
from ckpttools.core.text import first_names
from ckpttools.formats.adapters import ADAPTER
from ckpttools.formats.base import (
    Format,
    OtherSteps,
    ReadOptions,
    SupportsFaults,
    SupportsFiles,
    SupportsRankPreference,
    SupportsShardings,
    SupportsSidecarLookup,
    SupportsStepFiles,
    SupportsSteps,
    SupportsStorage,
    SupportsUnownedFiles,
    Target,
    Writable,
    Writer,
)
from ckpttools.formats.foreign import foreign_error
from ckpttools.formats.interrupted import absent, begun_in, next_step, refuse_empty, refuse_interrupted
from ckpttools.formats.several import other_kinds
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

_MOST_TRIED, _MOST_NAMED = 100, 5
# Files that are opened by their own names: a directory of such may hold anything.
_SAVED_BY_TORCH = (".pth", ".pt", ".ckpt")
# Modules of this package with a `FORMAT`, in the order in which they are tried.
_BUILT_IN = (
    *("orbax.format", "safetensors.format", "zarr.read"),
    *("torch.format", "torch.dcp", "torch.ranks", "torch.zero", "torch.universal"),
    *("flax.format", "zarr.untyped_arrays"),
)


@cache
def formats() -> Mapping[str, Format]:
    """Return all formats by name, built-in ones first."""
    return {**{item.name: item for item in _built_in()}, **load_group("ckpttools.formats")}


def _built_in() -> Iterator[Format]:
    """Yield the formats of this package, importing each when needed: PyTorch alone has 26 modules."""
    return map(_loaded, _BUILT_IN)


@cache
def _loaded(name: str) -> Format:
    result: Format = import_module(f"{package.__name__}.{name}").FORMAT
    return result


def _in_turn() -> Iterator[Format]:
    """Yield all formats in the order in which they are tried."""
    yield from _built_in()
    # Looking for plug-ins takes 30 ms, which most checkpoints do not need.
    built_in = {item.name for item in _built_in()}
    yield from (item for name, item in formats().items() if name not in built_in)


def open_tree(where: LocationLike, options: ReadOptions | None = None) -> Tree:
    """Return the checkpoint at a place, whatever its format, without reading any array.

    Raises:
        StorageError: nothing is there.
        FormatError: no format recognizes it, says what each of them missed; or a conversion grows there.
    """
    path = parse(where)
    if not path.exists():
        raise absent(path)
    refuse_interrupted(path)
    reasons: dict[str, str] = {}
    for item in _in_turn():
        reason = item.why_not(path)
        if reason is None:
            tree = _with_step(item.open(path, options or ReadOptions()), options)
            return _with_notes(tree, other_kinds(path, item.name))
        reasons[item.name] = f"{item.name}: {reason}"
    refuse_empty(path)
    if left := begun_in(path):
        raise FormatError(f"{path} is not a checkpoint yet", hint=next_step(left))
    if error := foreign_error(path):
        raise error
    if len(below := _found_below(path)) > 1 and len({item.name.rstrip(digits) for item in below}) == 1:
        what = f"{path} is a directory of {len(below):,} steps, which are opened by their own paths"
        raise FormatError(what, expected="the path of one of them", hint=_instead(path))
    raise FormatError(
        f"{path} is not a checkpoint of a known format{listing(list(reasons.values()))}", hint=_instead(path)
    )


def require_ranks(options: ReadOptions, *locations: Location) -> None:
    """Refuse a preferred process where no checkpoint is of a format that has files of processes.

    Args:
        options: how all of them are opened.
        locations: where they lie; what is no checkpoint does not count.

    Raises:
        UsageError: none has.
    """
    if not options.prefer_rank:
        return
    result = [_format_at(location) for location in locations]
    if any(isinstance(item, SupportsRankPreference) for item in result):
        return
    takers = [fmt.rank_files for fmt in formats().values() if isinstance(fmt, SupportsRankPreference)]
    raise UsageError(
        f"{option('prefer_rank', options.prefer_rank[0])} is of checkpoints with files of each process",
        location=locations[0],
        got=" and ".join(f"the format {item.name}" for item in result if item) or None,
        expected=f"files {'; '.join(takers)}",
        hint=f"leave {option('prefer_rank')} out",
    )


def _format_at(path: Location) -> Format | None:
    """Return the format that opens what is at a path."""
    return next((item for item in _in_turn() if item.why_not(path) is None), None) if path.exists() else None


def stored_shardings(tree: Tree) -> Mapping[TreePath, Sharding]:
    """How the arrays of a tree lay on devices, as its format tells: see `SupportsShardings`; else empty."""
    format = _format_of(tree)
    return format.shardings(tree) if isinstance(format, SupportsShardings) else {}


def other_steps(tree: Tree) -> OtherSteps:
    """Return unreadable steps next to a tree, if its format is `SupportsSteps`; otherwise none."""
    format = _format_of(tree)
    return format.other_steps(tree) if isinstance(format, SupportsSteps) else OtherSteps({}, {})


def storage_of(tree: Tree, options: ReadOptions | None = None) -> Storage:
    """Return the files of a checkpoint and their content: see `SupportsStorage`; else its arrays.

    Raises:
        FormatError, StorageError: an index or the metadata of an array is damaged or cannot be read.
    """
    format = _format_of(tree)
    if isinstance(format, SupportsStorage):
        return format.storage(tree, options or ReadOptions())
    from ckpttools.formats.survey import plain_storage

    return plain_storage(tree)


def faults_in(format: SupportsFaults, path: Location, options: ReadOptions) -> Iterator[CheckpointError]:
    """What a format finds wrong with a file or directory: see `SupportsFaults`."""
    try:
        yield from format.faults(path, options)
    except CheckpointError as error:
        yield error


def open_all_steps(path: Location) -> tuple[Tree, ...]:
    """Open a path, and the other checkpoints that its format finds there: see `SupportsStepFiles`.

    Raises:
        CheckpointError: one of them cannot be opened.
    """
    tree = open_tree(path)
    format = _format_of(tree)
    if not isinstance(format, SupportsStepFiles):
        return (tree,)
    others = [location for location in format.checkpoints_in(path) if str(location) != tree.metadata.location]
    return (tree, *(format.open(location, ReadOptions()) for location in others if location != path))


def sidecars_at(tree: Tree) -> Location | None:
    """Where what belongs to a model lies beside a tree, if its format tells: see `SupportsSidecarLookup`."""
    format = _format_of(tree)
    return format.sidecars(tree) if isinstance(format, SupportsSidecarLookup) else None


def find_unowned_files(directory: Location, tree: Tree, writer: Writer | None = None) -> set[str]:
    """Return the files in a directory that are not part of the opened tree: see `SupportsFiles`; else all.

    Args:
        directory: where.
        tree: what was opened there.
        writer: what will be written in its place; may know better: see `SupportsUnownedFiles`.

    Raises:
        StorageError: it cannot be listed.
    """
    if isinstance(writer, SupportsUnownedFiles):
        return set(writer.unowned_files(directory, tree))
    format = _format_of(tree)
    if isinstance(format, SupportsFiles):
        return set(format.unowned_files(directory, tree))
    return {entry.name for entry in directory.entries()}


def is_own_file(name: str) -> bool:
    """Return whether a path within a checkpoint is one that files of some format have."""
    return any(fmt.owns(name) for fmt in formats().values() if isinstance(fmt, SupportsFiles))


def writable() -> Mapping[str, Writable]:
    """Return the formats that can be written, by name."""
    return {name: item for name, item in formats().items() if isinstance(item, Writable)}


def format_named(name: str) -> Format | None:
    """Return a format by its name; None where there is none."""
    return next((item for item in _built_in() if item.name == name), None) or formats().get(name)


def writer_for(
    tree: Tree,
    format: str | None = None,
    destination: Location | None = None,
    *,
    keeps_names: bool = True,
    shares: bool = False,
    least_share: float = 0.0,
    **options: Any,
) -> Writer:
    """Return the writer of a format, by name.

    Args:
        tree: what will be written, as it was opened.
        format: name of a format; None for the one the tree was read from.
        destination: directory that will be written, where that is known.
        keeps_names, shares, least_share: as `ckpttools.formats.base.Target`.
        options: of the format, as it declares them; those that are None are not said.

    Raises:
        UsageError: no such format, or one that can be read only; an option that it does not have, or that
            cannot be meant.
    """
    name = format or tree.metadata.format
    result = None if name is None else format_named(name)
    if not isinstance(result, Writable):
        cannot = f"{name} cannot be written" if result is None else f"{name} can be read, but not written"
        raise UsageError(
            cannot if name else "it is not said in which format to write",
            location=tree.metadata.location or None,
            expected=", ".join(writable()),
            hint=f"choose another, as {option('format', 'safetensors')} does",
        )
    declared = {key: value for key, value in options.items() if value is not None}
    values = parse_options(result.options, declared, writer_options, f"{name} is not stored")
    target = Target(tree, destination, keeps_names, shares, least_share, frozenset(declared))
    return result.writer(target, **values)


def writer_options() -> list[Option]:
    """Return all that any format lets a user say of how it is written."""
    return [option for item in writable().values() for option in item.options]


def _format_of(tree: Tree) -> Format | None:
    """Return the format that opened a tree; None for a tree that was made."""
    name = tree.metadata.format
    return None if name is None or not tree.metadata.location else format_named(name)


def is_checkpoint(path: Location) -> bool:
    """Return whether a built-in format recognizes a path; StorageError if it cannot be accessed."""
    return any(item.why_not(path) is None for item in _built_in())


def _instead(path: Location) -> str:
    """What to name instead: what lies in the directory and may be opened."""
    result = _found_below(path)
    if not result:
        return _nothing_below(path)
    return f"name what lies in it: {first_names([quote(str(item)) for item in result], _MOST_NAMED)}"


def _found_below(path: Location) -> list[Location]:
    """Checkpoints in a directory, else files of torch.save in it, else checkpoints in its directories."""
    try:
        inside = sorted(path.iterdir()) if path.is_dir() else []
        folders = [item for item in inside if item.is_dir()][:_MOST_TRIED]
        if result := [folder for folder in folders if is_checkpoint(folder)]:
            return result
        if files := [item for item in inside if item.suffix in _SAVED_BY_TORCH]:
            return files
        further = [item for above in folders for item in sorted(above.iterdir()) if item.is_dir()]
        return [item for item in further[:_MOST_TRIED] if is_checkpoint(item)]
    except CheckpointError:
        return []


def _nothing_below(path: Location) -> str:
    """What to do where nothing can be opened."""
    if (path / CONFIG).is_file() and is_checkpoint(path.parent):
        return f"its weights lie in the directory above: name {quote(str(path.parent))}"
    if (path / CONFIG).is_file():
        return (
            "there is the config.json of a model, and not its weights: copy its *.safetensors files, too, or "
            "fetch them: hf download REPO --include '*.safetensors' --local-dir " + quote(path.as_local())
        )
    if path.name == ADAPTER:
        return f"it says how an adapter is made: `ckpt {quote(str(path.parent))}` looks at the adapter"
    if path.name == CONFIG:
        model, config = quote(str(path.parent)), quote(str(path))
        return (
            f"it says what a model is: `ckpt {model}` looks at its weights, `ckpt synth {config} DST` makes "
            f"such a model of noise, `ckpt plan-training {config} --hosts N` plans its training"
        )
    return "`ckpt formats` lists what can be read"


def _with_notes(tree: Tree, more: Notes) -> Tree:
    return tree.with_metadata(notes=tree.metadata.notes + more) if more.remarks else tree


def _with_step(tree: Tree, options: ReadOptions | None) -> Tree:
    """Return the tree, if it is of the step that was asked for."""
    require_step(options or ReadOptions(), tree.metadata.step, tree.metadata.location)
    return tree


def require_step(options: ReadOptions, step: int | None, location: Location | str) -> None:
    """Refuse a step that was asked for where another one is opened, or none.

    Raises:
        UsageError: it is not `step`, which is None for what is of no step.
    """
    if options.step is not None and step != options.step:
        without = f"leave {option('step')} out"
        raise UsageError(
            f"there is no step {options.step}",
            location=location,
            got="no steps" if step is None else f"step {step}",
            hint=without if step is None else f"give the directory of the run, or {without}",
        )
