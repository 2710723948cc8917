"""Whether all that a part names is in it: what lies elsewhere, or is missing, no copy would have."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.array.gaps import refuse_incomplete
from ckpttools.copying.part import FileGroup
from ckpttools.core.errors import FormatError
from ckpttools.formats.json_file import read_json
from ckpttools.formats.orbax.entries import entries_of
from ckpttools.formats.orbax.hosts import is_part_of_a_host
from ckpttools.formats.orbax.metadata import TREE_FILE, parse_tree
from ckpttools.formats.orbax.steps import OrbaxItem, OrbaxRun, orbax_at
from ckpttools.formats.registry import open_tree
from ckpttools.stores.place import Place


def check_whole(part: FileGroup) -> tuple[str, ...]:
    """Looks into metadata and indexes of items, and for chunks that are missing.

    Returns:
        Which items were not searched for missing chunks, and why: a copy takes arrays of kinds that nothing
        here reads.

    Raises:
        FormatError: metadata is damaged; an index refers to files that lie outside of its item, are missing
            or end too early; or chunks are missing.
        StorageError: it cannot be read.
    """
    found = orbax_at(part.source)
    if isinstance(found, OrbaxRun):
        return ()  # what lies beside steps, or has been opened already
    remarks: list[str] = []
    for item in (found,) if isinstance(found, OrbaxItem) else found.items:
        parse_tree(read_json(item.directory / TREE_FILE), str(item.directory / TREE_FILE))
        _check_index(item.directory)
        # One host's part lacks the chunks of the others.
        if not is_part_of_a_host(item.directory):
            remarks += _check_chunks(item.directory)
    return tuple(remarks)


def _check_index(item: Place) -> None:
    # What is read of an index is refused where it names a file above its directory.
    fault = next(iter(entries_of(item).faults.values()), None)
    if fault is not None:
        raise FormatError("not all that the index names is there", place=item, got=fault, hint=fault.hint)


def _check_chunks(item: Place) -> Iterator[str]:
    try:
        tree = open_tree(item)
    except FormatError as error:
        yield f"nobody looked for missing chunks in {item}: {error.message}{_of(error)}"
        return
    refuse_incomplete(tree.arrays.values(), str(item))


def _of(error: FormatError) -> str:
    return "" if error.got is None else f" ({error.got})"
