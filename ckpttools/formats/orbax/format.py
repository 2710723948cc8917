"""Read Orbax checkpoints of every layout from their metadata, without Orbax or devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ckpttools.array.storage import Sharding, Storage
from ckpttools.array.tree import Empty, Leaf, Metadata, Path, Text, Tree, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, UnlistedStepWarning, UsageError, warn_step
from ckpttools.core.memory_limit import check_memory
from ckpttools.core.message_terms import option
from ckpttools.core.options import Option
from ckpttools.formats.base import SIDECARS, OtherSteps, ReadOptions, Target, Writer
from ckpttools.formats.json_file import DEEPEST, is_deep, read_json
from ckpttools.formats.orbax import metadata as orbax_metadata
from ckpttools.formats.orbax import runs as orbax_runs
from ckpttools.formats.orbax.arrays import Arrays
from ckpttools.formats.orbax.entries import entries_of
from ckpttools.formats.orbax.hosts import hosts_at, is_part_of_a_host
from ckpttools.formats.orbax.metadata import SavedLeaf, key_impls
from ckpttools.formats.orbax.options import HELP, OPTIONS, STORAGE
from ckpttools.formats.orbax.steps import FLAX_PREFIX, OrbaxItem, OrbaxRun, Step, is_item, orbax_at
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.stores.base import count_occurrences
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

if TYPE_CHECKING:
    from ckpttools.formats.orbax.saves import Save


@dataclass(frozen=True)
class Orbax:
    """The `orbax` format."""

    name: str = "orbax"
    options: tuple[Option, ...] = OPTIONS
    help: str = HELP

    def mismatch_reason(self, path: Location) -> str | None:
        return orbax_runs.mismatch_reason(path)

    def open(self, path: Location, options: ReadOptions) -> Tree:
        place = orbax_at(path)
        is_run_without_steps = isinstance(place, OrbaxRun) and not place.steps
        return self.open_at(path, place, hosts_at(path) if is_run_without_steps else {}, options)

    def open_at(
        self,
        path: Location,
        place: OrbaxItem | Step | OrbaxRun,
        hosts: Mapping[Location, Sequence[Location]],
        options: ReadOptions,
    ) -> Tree:
        """Open an identified location; otherwise like `open`.

        Args:
            path: The location to open.
            place: The result of `orbax_at` for the location.
            hosts: The result of `hosts_at`; empty unless `place` is a run without steps.
            options: Options for reading.
        """
        if hosts:
            from ckpttools.formats.orbax.joined import join_save

            return join_tree(join_save(path, hosts, options), path)
        if isinstance(place, OrbaxRun) and (state := _flax_state(place, options.step)) is not None:
            from ckpttools.formats.flax.format import FORMAT as FLAX

            return FLAX.open(state, options)
        items = orbax_runs.find_items(place, options.step)
        if len(items) == 1:
            return _open_item(items[0], options)
        from ckpttools.formats.orbax.runs import open_items

        return open_items(items, partial(_open_item, options=options), all_items=options.all_items)

    def shardings(self, tree: Tree) -> Mapping[Path, Sharding]:
        from ckpttools.formats.orbax.sharding import stored_shardings

        if not tree.metadata.items:
            return stored_shardings(tree)
        from ckpttools.formats.orbax.runs import one_item

        return {
            (name, *path): sharding
            for name in tree.metadata.items
            for path, sharding in stored_shardings(one_item(tree, name)).items()
        }

    def other_steps(self, tree: Tree) -> OtherSteps:
        return orbax_runs.steps_around(tree)

    def storage(self, tree: Tree, options: ReadOptions) -> Storage:
        from ckpttools.formats.survey import zarr_storage

        location = parse(tree.metadata.location)
        if tree.metadata.items:
            from ckpttools.formats.orbax.runs import several_items_error

            raise several_items_error(location, tree.metadata.items)
        if not is_item(location):
            from ckpttools.formats.orbax.joined import refuse_parts

            raise refuse_parts(location)
        return zarr_storage(tree, options.max_index_bytes)

    def owns(self, name: str) -> bool:
        from ckpttools.formats.orbax.owned_files import owns

        return owns(name)

    def unowned_files(self, directory: Location, tree: Tree) -> Iterable[str]:
        from ckpttools.formats.orbax.owned_files import unowned_files

        return unowned_files(directory, tree)

    def sidecars(self, tree: Tree) -> Location:
        return parse(tree.metadata.location) / SIDECARS

    def writer(
        self,
        target: Target,
        /,
        *,
        level: str,
        item: str | None,
        as_step: int | None,
        target_data_file_size: int | None,
        reference: bool | None,
        **writer_options: Any,
    ) -> Writer:
        from ckpttools.formats.orbax.write import OrbaxWriter
        from ckpttools.formats.references import (
            MIN_SHARED_FRACTION,
            ReferenceMode,
            References,
            reference_mode,
        )

        _check_level(level, item, as_step)
        encodes = any(entry.name in target.declared for entry in STORAGE if entry.name != "reference")
        mode = reference_mode(reference, by_default=target.shares, encodes=encodes)
        least = max(MIN_SHARED_FRACTION, 0 if reference else target.least_share)
        shared = References() if mode is ReferenceMode.NONE else References(mode, target.destination, least)
        return OrbaxWriter(
            as_step,
            _item(target, level, item),
            target_data_file_bytes=target_data_file_size
            or _suitable_file_bytes(target, writer_options["ocdbt"]),
            references=shared,
            level=level,
            **writer_options,
        )


def _check_level(level: str, item: str | None, as_step: int | None) -> None:
    """Reject a name for a directory that is itself the destination."""
    declared = {"as_step": as_step} if level == "step" else {"as_step": as_step, "item": item}
    unused = [name for name, value in declared.items() if value is not None] if level != "run" else []
    if unused:
        raise UsageError(
            f"with {option('level', level)} the destination itself is the {level}",
            got=", ".join(map(option, unused)),
            hint=f"leave {' and '.join(map(option, unused))} out, and give the destination its name",
        )


def _item(target: Target, level: str, declared: str | None) -> str:
    """Return the item's name: that of the run's other steps, or that of the replaced item.

    Emits `UnlistedStepWarning` if a manager would not find the item.
    """
    from ckpttools.formats.orbax.naming import ITEM, Neighbors

    as_read = target.tree.metadata.item if target.keeps_names else None
    if target.destination is None or level == "run":
        return declared or as_read or ITEM
    neighbors = Neighbors(target.destination)
    if level == "item":
        neighbors.check_bare()
        return ITEM
    name = neighbors.item(declared, as_read)
    if reason := neighbors.unlisted_reason(name):
        warn_step(reason, UnlistedStepWarning)
    return name


def _suitable_file_bytes(target: Target, ocdbt: bool) -> int | None:
    """Return the data file size that suits the store, or None if the user set one."""
    streams = target.destination.store.streams if target.destination else None
    return streams.file_bytes if streams and ocdbt else None


FORMAT = Orbax()


def _flax_state(run: OrbaxRun, step: int | None) -> Location | None:
    """Return the file that Flax reads for a step (or the latest one) in a run of both Flax and Orbax steps.

    `flax.training.checkpoints` writes files named `checkpoint_N` or, with Orbax, directories of that name,
    and lists both as steps of one run.
    """
    if not any(item.prefix == FLAX_PREFIX for item in run.steps.values()):
        return None
    from ckpttools.formats.flax.format import numbered_states

    states = numbered_states(run.path)
    latest = max((*states, *run.steps)) if step is None else step
    return states.get(latest)


def _open_item(item: OrbaxItem, options: ReadOptions) -> Tree:
    location = item.directory / orbax_metadata.TREE_FILE
    _require_room(location)
    document = read_json(location, is_walked=False)
    return _tree(item, document, _arrays(item, document, options), item.directory)


def _tree(item: OrbaxItem, document: Mapping[str, Any], arrays: Arrays, location: Location) -> Tree:
    """Build the tree of an item.

    Args:
        item: Directory of the item's JSON files.
        document: Content of its `_METADATA`.
        arrays: The arrays of the tree.
        location: The location that the tree reports.
    """
    file = item.directory / orbax_metadata.TREE_FILE
    saved = orbax_metadata.parse_tree(document, str(file))
    names = _names(saved, file)
    impls = key_impls(item.directory)
    metadata = Metadata(
        format=FORMAT.name,
        step=item.step.number,
        item=item.name,
        custom=_custom_metadata(item) or _object(document, file),
        scalars=frozenset(entry.path for entry in saved if entry.value_type == "scalar"),
        key_impls={names[name]: impl for name, impl in impls.items() if name in names},
        config=_config(item.directory),
        location=str(location),
    )
    leaves = _Leaves(item.directory, arrays)
    result = map_concurrently(item.directory.store, leaves.leaf, saved)
    return Tree({entry.path: leaf for entry, leaf in zip(saved, result, strict=True)}, metadata)


def join_tree(save: Save, location: Location) -> Tree:
    """Build the tree of a save from several hosts; reads only indexes.

    Args:
        save: The save, complete or not.
        location: The location that the tree reports.
    """
    from ckpttools.formats.orbax.joined import Joined

    first = save.shares[0]
    _require_room(first.item / orbax_metadata.TREE_FILE)
    item = OrbaxItem(first.item, first.step)
    arrays = Arrays(location, Joined(location, save), first.document.get("use_zarr3"), may_be_left_out=False)
    tree = _tree(item, first.document, arrays, location)
    return tree.with_metadata(step=save.step)


# Each leaf takes several objects in this file and several keys in the index: opening 100,000 leaves took 2.4
# KiB each.
_BYTES_PER_LEAF = 1536


def _require_room(location: Location) -> None:
    source = location.open()
    leaves = count_occurrences(b'"value_type"', source)
    source.close()
    check_memory(leaves, leaves * _BYTES_PER_LEAF, location)


def _config(directory: Location) -> Mapping[str, Any] | None:
    """Return the model's configuration if it was copied into the item, else None."""
    path = directory / SIDECARS / CONFIG
    return read_json(path) if path.is_file() else None


def _arrays(item: OrbaxItem, document: Mapping[str, Any], options: ReadOptions) -> Arrays:
    directory = item.directory
    entries = entries_of(directory, orbax_metadata.needs_index(document), options.max_index_bytes)
    # Old versions do not record this; in their checkpoints, a missing chunk may have been lost or omitted.
    declared = document.get("store_array_data_equal_to_fill_value")
    # A host's share lacks the chunks of other hosts, regardless of their content.
    left_out = declared is False and not is_part_of_a_host(directory)
    return Arrays(directory, entries, document.get("use_zarr3"), left_out, may_be_old=declared is None)


def _names(saved: Iterable[SavedLeaf], location: Location) -> dict[str, Path]:
    """Map the name on disk of each leaf with data to its path.

    Raises:
        FormatError: Two leaves have the same name. Orbax joins keys with dots, so one has overwritten the
            other.
    """
    names: dict[str, Path] = {}
    for item in saved:
        other = item.path if item.is_empty else names.setdefault(dotted(item.path), item.path)
        if other != item.path:
            raise FormatError(
                "two leaves have the same name on disk, so one has overwritten the other",
                location=location,
                got=f"{keystr(other)} and {keystr(item.path)} are both {dotted(item.path)!r}",
                hint="save it again with other keys: Orbax joins them with dots",
            )
    return names


def _custom_metadata(item: OrbaxItem) -> Mapping[str, object]:
    """Return the user's metadata from the step, or from the copy in the item."""
    for directory in (item.step.path, item.directory):
        path = directory / orbax_metadata.CHECKPOINT_FILE
        if path.is_file():
            custom = _object(read_json(path), path)
            if custom:
                return custom
    return {}


def _object(document: Mapping[str, Any], location: Location) -> Mapping[str, object]:
    """Return the user's metadata in a document.

    Raises:
        FormatError: The metadata is not a JSON object.
    """
    custom = document.get("custom_metadata") or {}
    if not isinstance(custom, dict):
        raise FormatError(
            "the custom metadata is not a JSON object", location=location, got=type(custom).__name__
        )
    # The writer adds the outer object again.
    if is_deep([custom]):
        expected = f"at most {DEEPEST - 1} levels"
        raise FormatError("the custom metadata is nested too deep", location=location, expected=expected)
    return custom


class _Leaves:
    """Builds the leaves of an item."""

    def __init__(self, directory: Location, arrays: Arrays) -> None:
        self._directory, self._arrays = directory, arrays

    def leaf(self, saved: SavedLeaf) -> Leaf:
        if saved.is_empty:
            return Empty(saved.value_type)
        if saved.value_type == "string":
            return Text(self._string(saved.path))
        return self._arrays.array(saved.path)

    def _string(self, path: Path) -> str:
        text = self._strings.get(dotted(path))
        if not isinstance(text, str):
            raise FormatError(
                "a string is missing",
                location=self._directory / orbax_metadata.STRINGS_FILE,
                expected=f"a text for {dotted(path)!r}",
            )
        return text

    @cached_property
    def _strings(self) -> Mapping[str, object]:
        return read_json(self._directory / orbax_metadata.STRINGS_FILE)
