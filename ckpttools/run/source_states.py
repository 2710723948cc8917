"""Notice source files that changed although their sizes, modification times and headers did not.

`cp -p` and rsync restore modification times. No call restores the time of the last status change (ctime), but
new links and other permissions change it, too. So a changed ctime alone is not an error: the tasks are
repeated instead. The number of links cannot excuse a change: the file may also have been rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias, TypeVar

from ckpttools.core.errors import SourceChangedError
from ckpttools.core.message_terms import again
from ckpttools.plan.plan import Plan
from ckpttools.run.source_copies import SourceCopy
from ckpttools.stores.abilities import DistinguishesCopies
from ckpttools.stores.base import File
from ckpttools.stores.publishing import Record
from ckpttools.stores.registry import parse

_SOURCE_STATE = -2
"""Replaces the task index in a record of the source's state."""
# A file whose status changes in every attempt is being written.
_MAX_ATTEMPTS = 3

_T = TypeVar("_T")
SourceStates: TypeAlias = Mapping[str, str]
"""The identity (inode, size and times) for the path of each local file."""


def read_source_states(paths: Iterable[str]) -> SourceStates:
    """Return the states of local source files, at 10 microseconds per file.

    Raises:
        StorageError: a file cannot be inspected.
    """
    locations = {path: parse(path) for path in paths}
    return {
        path: location.store.copy_identity(location.key).file
        for path, location in locations.items()
        if isinstance(location.store, DistinguishesCopies)
    }


def read_plan_states(plan: Plan) -> SourceStates:
    """Return the states of a plan's local source files; errors as `read_source_states`."""
    return read_source_states(source.path for source in plan.sources if isinstance(source, File))


def repeat_if_touched(
    attempt: Callable[[int], _T], states: Callable[[], SourceStates], *, can_repeat: bool = True
) -> _T:
    """Run tasks, and run all of them again if the status of a source file changed meanwhile.

    Args:
        attempt: Runs the tasks. Its argument counts the attempts, from 0. After the first, it repeats all.
        states: Reads the states of the source files.
        can_repeat: Whether the tasks can be repeated.

    Returns:
        The result of the last attempt.

    Raises:
        SourceChangedError: A file was changed in every attempt, or in one that cannot be repeated.
    """
    touched = ""
    for number in range(_MAX_ATTEMPTS if can_repeat else 1):
        before = states()
        result = attempt(number)
        after = states()
        changed = (path for path, state in before.items() if after.get(path) != state)
        touched = next(changed, "")
        if not touched:
            return result
    # Other content, or other permissions: only reading the file again shows that.
    raise SourceChangedError(
        f"{touched} was changed while it was read",
        got="another status time (ctime), with the same size and modification time",
        expected="a file that nothing changes",
        hint=f"find out what writes to it or sets its attributes; then {again()}",
    )


def source_state_record(copy: SourceCopy) -> Record:
    """Return a record of the state from which a complete checkpoint was written."""
    return [_SOURCE_STATE, copy.identity]


def is_written_from(records: Iterable[Record], copy: SourceCopy) -> bool:
    """Whether a complete checkpoint was written from the present state of its source.

    Returns True if there is no record of its state: earlier versions wrote none.
    """
    states = {record[1] for record in records if len(record) == 2 and record[0] == _SOURCE_STATE}
    return not states or any(copy.has_files_of(str(state)) for state in states)
