"""Open checkpoints of all formats, and use the abilities that only some formats have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import Any

from ckpttools.array.storage import Sharding, Storage
from ckpttools.array.tree import Path as TreePath
from ckpttools.array.tree import Tree
from ckpttools.core.details import log_detail
from ckpttools.core.errors import CheckpointError, FormatError, SeveralCheckpointsError, UsageError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.core.notes import Notes
from ckpttools.core.options import Option, parse_options
from ckpttools.core.text import plural
from ckpttools.formats.adapters import ADAPTER
from ckpttools.formats.base import (
    NOT_A_DIRECTORY,
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
from ckpttools.formats.detect import (
    Detected,
    LocationKind,
    count_members,
    detect,
    find_in_step,
    is_checkpoint,
)
from ckpttools.formats.foreign import foreign_error, is_pipeline, other_kinds
from ckpttools.formats.interrupted import empty_error, find_interrupted_copy, interrupted_error, next_step
from ckpttools.formats.known_formats import format_named, formats, writable
from ckpttools.formats.orbax.steps import OrbaxItem, orbax_at
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike

_MAX_NAMED = 20


def open_tree(where: LocationLike, options: ReadOptions | None = None) -> Tree:
    """Open the checkpoint at a location, in any format, without reading array data.

    Raises:
        StorageError: The location does not exist.
        SeveralCheckpointsError: The location is a directory of several checkpoints or runs.
        FormatError: No format recognizes the location (the message gives each format's reason), or it is the
            destination of a conversion in progress.
    """
    return open_detected(detect(where), options)


def open_detected(detected: Detected, options: ReadOptions | None = None) -> Tree:
    """Open the checkpoint that `detect` returned; raises the same errors as `open_tree`."""
    if detected.format is None:
        raise not_opened(detected)
    tree = _with_step(detected.open(options or ReadOptions()), options)
    log_detail("opened %s as %s: %s arrays", detected.location, detected.format.name, len(tree.arrays))
    return _with_notes(tree, other_kinds(detected.location, detected.format.name))


def not_opened(detected: Detected) -> FormatError:
    """Return the error for a location that no format opens.

    Raises:
        StorageError: A directory cannot be listed.
    """
    path = detected.location
    if detected.unfinished is not None:
        return interrupted_error(path, detected.unfinished)
    if detected.is_empty:
        return empty_error(path)
    if detected.kind is LocationKind.RUN:
        steps = list(detected.trainer_steps)
        problem = f"not one checkpoint: it is a run with {plural(len(steps), 'step')}"
        inside = [item.location for item in find_in_step(steps[-1]).values()]
        return _several(detected, problem, steps, (inside or steps[-1:])[0])
    if detected.kind is LocationKind.COLLECTION and not is_pipeline(path):
        members = [item.location for item in detected.members]
        runs = sum(item.kind is LocationKind.RUN for item in detected.members)
        problem = "a directory above a checkpoint" if len(members) == 1 else "not one checkpoint"
        return _several(detected, f"{problem}: it has {count_members(len(members), runs)}", members)
    if left := find_interrupted_copy(path):
        return FormatError(f"{path} is not a checkpoint yet", hint=next_step(left))
    if error := foreign_error(path):
        return error
    if checkpoint := _checkpoint_above(path):
        return FormatError(
            f"{path} is a part of a checkpoint",
            expected="the path of the checkpoint",
            hint=f"pass {quote(str(checkpoint))}",
        )
    reasons = dict(detected.reasons)
    if not detected.is_directory:
        reasons = {name: reason for name, reason in reasons.items() if reason != NOT_A_DIRECTORY}
    if detected.is_directory and "orbax" not in reasons:
        reasons = {"orbax": format_reason("orbax", path), **reasons}
    lines = [f"{name}: {reason}" for name, reason in reasons.items()]
    return FormatError(
        f"{path} is not a checkpoint of a known format{listing(lines)}", hint=_nothing_below(path)
    )


# Levels between a file of a checkpoint and the checkpoint: d/data in an item, 0/items/d/data in a run.
_MAX_LEVELS_ABOVE = 3


def _checkpoint_above(path: Location) -> Location | None:
    """Return the Orbax item that a file or directory is a part of."""
    for _ in range(_MAX_LEVELS_ABOVE):
        path = path.parent
        if isinstance(orbax_at(path), OrbaxItem):
            return path
    return None


def _several(
    detected: Detected, subject: str, members: Sequence[Location], suggested: Location | None = None
) -> SeveralCheckpointsError:
    path = detected.location
    suggested = suggested or members[0]
    members_text = [quote(str(member)) for member in members]
    error = SeveralCheckpointsError(
        f"{path} is {subject}{listing(members_text, _MAX_NAMED)}",
        location=path,
        expected="the path of one of them",
        hint=f"pass the path of one of them, such as {quote(str(suggested))}",
    )
    error.suggested, error.detected = str(suggested), detected
    return error


def format_reason(name: str, path: Location) -> str:
    """Return why a format does not recognize a location; "" if it recognizes it."""
    format = format_named(name)
    return "" if format is None else format.mismatch_reason(path) or ""


def require_ranks(options: ReadOptions, *locations: Location) -> None:
    """Raise an error if a preferred rank is given but no checkpoint has per-process files.

    Args:
        options: Options for opening the checkpoints.
        locations: Locations of checkpoints; other locations are ignored.

    Raises:
        UsageError: No checkpoint has per-process files.
    """
    if not options.prefer_rank:
        return
    result = [detect(location).format for location in locations if location.exists()]
    if any(isinstance(item, SupportsRankPreference) for item in result):
        return
    takers = [fmt.rank_files for fmt in formats().values() if isinstance(fmt, SupportsRankPreference)]
    raise UsageError(
        f"{option('prefer_rank', options.prefer_rank[0])} needs a checkpoint with files of each process",
        location=locations[0],
        got=" and ".join(f"the format {item.name}" for item in result if item) or None,
        expected=f"files {'; '.join(takers)}",
        hint=f"leave {option('prefer_rank')} out",
    )


def stored_shardings(tree: Tree) -> Mapping[TreePath, Sharding]:
    """Return the shardings that the arrays had when saved; empty unless the format is `SupportsShardings`."""
    format = _format_of(tree)
    return format.shardings(tree) if isinstance(format, SupportsShardings) else {}


def other_steps(tree: Tree) -> OtherSteps:
    """Return unreadable steps next to a tree; none unless its format is `SupportsSteps`."""
    format = _format_of(tree)
    return format.other_steps(tree) if isinstance(format, SupportsSteps) else OtherSteps({}, {})


def storage_of(tree: Tree, options: ReadOptions | None = None) -> Storage:
    """Return the files of a checkpoint with their content; only its arrays unless `SupportsStorage`.

    Raises:
        FormatError, StorageError: An index or the metadata of an array is damaged or cannot be read.
    """
    format = _format_of(tree)
    if isinstance(format, SupportsStorage):
        return format.storage(tree, options or ReadOptions())
    from ckpttools.formats.survey import plain_storage

    return plain_storage(tree)


def faults_in(format: SupportsFaults, path: Location, options: ReadOptions) -> Iterator[CheckpointError]:
    """Yield the faults that a format finds in a file or directory; see `SupportsFaults`."""
    try:
        yield from format.faults(path, options)
    except CheckpointError as error:
        yield error


def open_all_steps(detected: Detected) -> tuple[Tree, ...]:
    """Open a location and any other checkpoints that its format finds there; see `SupportsStepFiles`.

    Raises:
        CheckpointError: A checkpoint cannot be opened.
    """
    path, tree = detected.location, open_detected(detected)
    format = _format_of(tree)
    if not isinstance(format, SupportsStepFiles):
        return (tree,)
    others = [location for location in format.checkpoints_in(path) if str(location) != tree.metadata.location]
    return (tree, *(format.open(location, ReadOptions()) for location in others if location != path))


def sidecars_at(tree: Tree) -> Location | None:
    """Return the directory of a tree's sidecars; None unless its format is `SupportsSidecarLookup`."""
    format = _format_of(tree)
    return format.sidecars(tree) if isinstance(format, SupportsSidecarLookup) else None


def find_unowned_files(directory: Location, tree: Tree, writer: Writer | None = None) -> set[str]:
    """Return the files in a directory that are not part of the opened tree; all unless `SupportsFiles`.

    Args:
        directory: The directory to list.
        tree: The tree that was opened from the directory.
        writer: The writer that will replace the tree; it may know more, see `SupportsUnownedFiles`.

    Raises:
        StorageError: The directory cannot be listed.
    """
    if isinstance(writer, SupportsUnownedFiles):
        return set(writer.unowned_files(directory, tree))
    format = _format_of(tree)
    if isinstance(format, SupportsFiles):
        return set(format.unowned_files(directory, tree))
    return {entry.name for entry in directory.entries()}


def is_own_file(name: str) -> bool:
    """Return whether a path within a checkpoint belongs to any format."""
    return any(fmt.owns(name) for fmt in formats().values() if isinstance(fmt, SupportsFiles))


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
    """Create the writer of a format.

    Args:
        tree: The tree to write, as opened.
        format: Name of the format; None for the tree's own format.
        destination: Directory to write, if known.
        keeps_names, shares, least_share: See `ckpttools.formats.base.Target`.
        options: Options that the format declares; None means not set.

    Raises:
        UsageError: The format does not exist or is read-only, or an option does not exist or is invalid.
    """
    name = format or tree.metadata.format
    result = None if name is None else format_named(name)
    if not isinstance(result, Writable):
        cannot = f"{name} cannot be written" if result is None else f"{name} can be read, but not written"
        raise UsageError(
            cannot if name else "no output format is given",
            location=tree.metadata.location or None,
            expected=", ".join(writable()),
            hint=f"choose another, as {option('format', 'safetensors')} does",
        )
    declared = {key: value for key, value in options.items() if value is not None}
    values = parse_options(result.options, declared, writer_options, f"{name} is not stored")
    target = Target(tree, destination, keeps_names, shares, least_share, frozenset(declared))
    return result.writer(target, **values)


def writer_options() -> list[Option]:
    """Return the options of all writable formats."""
    return [option for item in writable().values() for option in item.options]


def _format_of(tree: Tree) -> Format | None:
    """Return the format that opened a tree; None for a tree built in memory."""
    name = tree.metadata.format
    return None if name is None or not tree.metadata.location else format_named(name)


def _nothing_below(path: Location) -> str:
    """Return a hint for a path below which nothing can be opened."""
    if (path / CONFIG).is_file() and is_checkpoint(path.parent):
        return f"its weights are in the parent directory: pass {quote(str(path.parent))}"
    if (path / CONFIG).is_file():
        return (
            "the directory has a model's config.json but not its weights: copy its *.safetensors files, too, "
            "or fetch them: hf download REPO --include '*.safetensors' --local-dir " + quote(path.as_local())
        )
    if path.name == ADAPTER:
        return f"it configures an adapter: inspect that with {action('summary', str(path.parent))}"
    if path.name == CONFIG:
        config = str(path)
        return (
            f"it configures a model: {action('summary', str(path.parent))} inspects its weights, "
            f"{action('synth', config, 'DST')} creates "
            f"a randomly initialized model, {action('plan_training', config, hosts='N')} plans its training"
        )
    return f"{action('families.formats')} lists the supported formats"


def _with_notes(tree: Tree, more: Notes) -> Tree:
    return tree.with_metadata(notes=tree.metadata.notes + more) if more.remarks else tree


def _with_step(tree: Tree, options: ReadOptions | None) -> Tree:
    """Return the tree if it is the requested step; raise UsageError otherwise."""
    require_step(options or ReadOptions(), tree.metadata.step, tree.metadata.location)
    return tree


def require_step(options: ReadOptions, step: int | None, location: Location | str) -> None:
    """Raise an error if a step other than the requested one is opened.

    Raises:
        UsageError: The requested step is not `step`, which is None for a checkpoint without steps.
    """
    if options.step is not None and step != options.step:
        without = f"leave {option('step')} out"
        raise UsageError(
            f"step {options.step} does not exist",
            location=location,
            got="no steps" if step is None else f"step {step}",
            hint=without if step is None else f"give the directory of the run, or {without}",
        )
