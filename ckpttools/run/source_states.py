"""Notice source files that changed although their sizes, modification times and headers did not.

`cp -p` and rsync restore modification times. No call restores the time of the last status change (ctime), but
new links and other permissions change it, too. So a changed ctime alone is not an error: the tasks are
repeated instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from ckpttools.plan.plan import Plan
from ckpttools.run.source_copies import SourceCopy
from ckpttools.stores.abilities import DistinguishesCopies
from ckpttools.stores.base import File
from ckpttools.stores.publishing import Record
from ckpttools.stores.registry import parse

_SOURCE_STATE = -2
"""Replaces the task index in a record of the source's state."""

SourceStates: TypeAlias = Mapping[str, tuple[str, int]]
"""For the path of each local file, its identity (inode, size and times) and its number of links."""


def read_source_states(plan: Plan) -> SourceStates:
    """Return the states of a plan's local source files, at 10 microseconds per file.

    Raises:
        StorageError: a file cannot be inspected.
    """
    states = {}
    for source in plan.sources:
        if isinstance(source, File):
            place = parse(source.path)
            if isinstance(place.store, DistinguishesCopies):
                status = place.status()
                links = 0 if status is None else status.links
                states[source.path] = place.store.copy_identity(place.key).file, links
    return states


def find_touched_file(before: SourceStates, after: SourceStates) -> str | None:
    """Return the path of a file whose state changed, but not its number of links; None if there is none."""
    for path, (identity, links) in before.items():
        if after[path][0] != identity and after[path][1] == links:
            return path
    return None


def source_state_record(copy: SourceCopy) -> Record:
    """Return a record of the state from which a complete checkpoint was written."""
    return [_SOURCE_STATE, copy.identity]


def is_written_from(records: Iterable[Record], copy: SourceCopy) -> bool:
    """Whether a complete checkpoint was written from the present state of its source.

    Returns True if there is no record of its state: earlier versions wrote none.
    """
    states = {record[1] for record in records if len(record) == 2 and record[0] == _SOURCE_STATE}
    return not states or any(copy.has_files_of(str(state)) for state in states)
