"""Report OCDBT databases of single processes that a save did not merge completely."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.core.message_terms import call, option
from ckpttools.core.text import plural
from ckpttools.diagnosis.arrays import array_findings
from ckpttools.diagnosis.base import ERROR, INFO, Check, Finding, Fix, fix_command, set_aside_command
from ckpttools.diagnosis.inventory import Directory, Inventory, ListedItem
from ckpttools.diagnosis.safe_files import holds, refuse_existing, write_new
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.orbax import ocdbt_files
from ckpttools.formats.orbax.entries import Indexed
from ckpttools.formats.orbax.index import processes_of, read_index, union_of
from ckpttools.formats.orbax.metadata import TREE_FILE
from ckpttools.formats.orbax.ocdbt import MANIFEST
from ckpttools.stores.location import Location


def _examine(inventory: Inventory) -> Iterator[Finding]:
    for item in inventory.items:
        if not item.processes:
            continue
        if item.is_merged:
            yield from _unmerged_keys_findings(item)
        elif TREE_FILE in item.directory.files:
            yield _unmerged_finding(inventory, item)


def _unmerged_finding(inventory: Inventory, item: ListedItem) -> Finding:
    location, problem = str(item.path), f"{', '.join(item.processes)} without a {MANIFEST} for all"
    if any(finding.level == ERROR for finding in array_findings(item)):
        reason = f"an index of these files would have gaps, so {option('fix', 'merge')} refuses to write it"
        return Finding(
            ERROR, location, problem, reason, "resolve the other findings about this directory first", "merge"
        )
    command = fix_command(inventory, "merge")
    reason = "Orbax then looks for the arrays in files of their own, and finds no .zarray or zarr.json"
    do = f"{command} writes the missing index; ckpttools itself needs no index"
    return Finding(ERROR, location, problem, reason, do, "merge", command=command)


def _unmerged_keys_findings(item: ListedItem) -> Iterator[Finding]:
    """Report keys of a process that the merged index lacks."""
    if isinstance(item.database, CheckpointError):
        return
    for name in item.processes:
        try:
            index = read_index(item.path / name, item.read.max_index_bytes)
            lost = Indexed(item.path / name, index).all.keys() - item.database.all.keys()
        except CheckpointError as error:
            reason = "the merged index does not need it: only merging again would"
            yield Finding(
                INFO,
                error.location or str(item.path / name),
                error.raw.message,
                reason,
                "no action is needed",
            )
            continue
        if lost:
            problem = f"the merged {MANIFEST} lacks {plural(len(lost), 'key')}, such as {min(lost)}"
            reason = (
                "they cannot be read: the merge was interrupted, or the directory belongs to another save"
            )
            command = call("doctor", item.path, fix="merge")
            do = f"{set_aside_command(item.path / MANIFEST)} && {command}"
            yield Finding(ERROR, str(item.path / name), problem, reason, do, command=do)


def merge_indexes(path: Location, read: ReadOptions) -> str:
    """Merge the indexes of all processes of a save: write a new node file, then the manifest.

    Raises:
        FormatError: The processes contradict each other, or arrays would be incomplete.
        StorageError: The index cannot be written.
    """
    entries_here = path.entries()
    names = [entry.name for entry in entries_here if entry.is_dir]
    files = [entry.name for entry in entries_here if not entry.is_dir]
    entries = union_of(path, read.max_index_bytes, compare_all=True).entries
    _refuse_holes(ListedItem(Directory(path, tuple(files), tuple(names)), path, read=read))
    digest = hashlib.sha256(repr(list(entries.items())).encode()).hexdigest()
    node_file = f"d/{digest[:32]}"
    index = ocdbt_files.encode(entries.items(), node_file)
    stored = {node_file: index.nodes, MANIFEST: index.manifest}
    if ocdbt_files.read(lambda file, start, length: _part(stored[file], start, length)) != entries:
        raise FormatError("the merged index does not read back as it was made", location=path)
    refuse_existing(path / MANIFEST)
    if not holds(path / node_file, index.nodes):  # An interrupted merge leaves this file.
        write_new(path / node_file, index.nodes)
    write_new(path / MANIFEST, index.manifest)
    return f"{path / MANIFEST} was written: {plural(len(entries), 'key')} of {_processes(path)}"


def _processes(path: Location) -> str:
    number = len(processes_of(path))
    return f"{number} process{'es' * (number != 1)}"


def _part(data: bytes, start: int, length: int | None) -> bytes:
    return data[start:] if length is None else data[start : start + length]


def _refuse_holes(item: ListedItem) -> None:
    for finding in array_findings(item):
        if finding.level == ERROR:
            raise FormatError(
                "the merged arrays would be incomplete",
                location=finding.location,
                got=finding.what,
                hint="a process's directory is missing: copy it here first",
            )


CHECK = Check(
    "unmerged",
    f"ocdbt.process_* directories without a merged {MANIFEST}",
    _examine,
    Fix("merge", f"write the {MANIFEST} over the databases of all processes", merge_indexes),
)
