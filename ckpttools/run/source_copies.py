"""The source of a run: its fingerprint, and checks that all tasks read the same model.

Each process records which copy it reads (`identify_copy`), and parts of a plan also record a digest of
each task's output (`hash_memory`). The process that publishes repeats the tasks of other copies with its
own copy and compares the digests. Neither samples of files nor complete comparisons of a few files can
show that two copies are equal; only repeating a task can.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeAlias, TypeVar

from ckpttools.array.fingerprint import Identify, identity
from ckpttools.array.lazy import ByteSource
from ckpttools.array.scratch import Scratch
from ckpttools.array.tree import keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, SourceChangedError, listing
from ckpttools.core.message_terms import action, retry_term
from ckpttools.core.text import plural
from ckpttools.formats.base import Writer
from ckpttools.plan.plan import Plan
from ckpttools.run.finished_tasks import FinishedTask
from ckpttools.run.task_runner import hash_memory, open_task_values
from ckpttools.stores.abilities import CopyIdentity, SupportsCopyIdentity
from ckpttools.stores.base import File
from ckpttools.stores.checksums import sample_files
from ckpttools.stores.concurrency import map_in_threads
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import Record
from ckpttools.stores.registry import parse
from ckpttools.stores.shares import describe_this_process


class MixedCopiesError(FormatError):
    """The tasks of a checkpoint read different models."""


@dataclass(frozen=True, slots=True)
class SourceCopy:
    """The copy of a model that a process reads.

    Attributes:
        identity: Equal only for processes that read the same files; "" if no file is read. It has two parts.
            The first has the states of the files. The second, after "@", identifies the host and its mounts
            if the files are local, or only this process if the states do not identify contents.
        process: The reading process and its host, for messages.
        is_known: Whether another process can have the same identity.
    """

    identity: str
    process: str
    is_known: bool = True

    def has_files_of(self, identity: str) -> bool:
        """Return whether a copy has files with the same states, even if the host has been restarted."""
        return identity.partition("@")[0] == self.identity.partition("@")[0]


NO_SOURCE_COPY = SourceCopy("", "")
"""Identifies the source of arrays that are in memory."""


def identify_copy(files: Iterable[tuple[str, str]]) -> SourceCopy:
    """Identify the copy that this process reads.

    Args:
        files: Path and version of each source file. The version is used only in stores whose versions
            identify contents.

    Raises:
        StorageError: A file cannot be inspected.
    """
    import xxhash

    identities = sorted((path, _identity(parse(path), version)) for path, version in set(files))
    if not identities:
        return NO_SOURCE_COPY
    names = [(path, identity.file) for path, identity in identities]
    is_known = all(identity.is_reliable for _, identity in identities)
    mounts = [identity.mount for _, identity in identities] if is_known else [secrets.token_hex(16)]
    ends = [xxhash.xxh3_64_hexdigest(repr(mounts).encode())] if any(mounts) else []
    identity = "@".join([xxhash.xxh3_128_hexdigest(repr(names).encode()), *ends])
    return SourceCopy(identity, describe_this_process(), is_known)


def identify_plan_copy(plan: Plan) -> SourceCopy:
    """Identify the copy from which this process made a plan; raises the errors of `identify_copy`."""
    files = (source for source in plan.sources if isinstance(source, File))
    return identify_copy((str(parse(file.path).absolute()), file.version) for file in files)


def _identity(location: Location, version: str) -> CopyIdentity:
    store = location.store
    if isinstance(store, SupportsCopyIdentity):
        return store.copy_identity(location.key)
    return CopyIdentity(version, is_reliable=bool(version))


def select_comparable(done: Iterable[FinishedTask], copy: SourceCopy) -> list[FinishedTask]:
    """Select the finished tasks that read this copy, or that `check_same_model` can compare with it."""
    return [entry for entry in done if entry.digest or copy.has_files_of(entry.copy)]


def check_same_model(
    plan: Plan,
    done: Iterable[FinishedTask],
    copy: SourceCopy,
    content: Location,
    observe: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Repeat the finished tasks of other copies with this copy, and compare their output.

    Args:
        plan: The complete plan.
        done: Finished tasks of the plan. Tasks without a digest are not compared.
        copy: The copy that this process reads.
        content: The directory in which the checkpoint is written, for messages.
        observe: Called with the bytes compared so far and the bytes to compare.

    Raises:
        MixedCopiesError: An output differs. The message names the arrays and the processes that did the
            tasks.
        CheckpointError: The source cannot be read.
    """
    others = [entry for entry in done if entry.digest and entry.copy != copy.identity]
    if not others:
        return
    total = sum(plan.tasks[entry.task].bytes_out for entry in others)
    lock, compared = threading.Lock(), 0

    def find_differing(entries: Sequence[FinishedTask]) -> list[FinishedTask]:
        nonlocal compared
        buffer, scratch = Scratch(plan.buffer_bytes), Scratch(plan.scratch_bytes)
        differing = []
        for entry in entries:
            task = plan.tasks[entry.task]
            with open_task_values(plan, task, buffer, scratch) as (memory, _):
                if hash_memory(memory) != entry.digest:
                    differing.append(entry)
            with lock:
                compared += task.bytes_out
                observe(compared, total)
        return differing

    jobs = min(plan.jobs, len(others))
    observe(0, total)
    results = map_in_threads(jobs, find_differing, [others[first::jobs] for first in range(jobs)])
    if changed_entries := sorted(chain.from_iterable(results), key=lambda entry: entry.task):
        raise _mixed_copies_error(plan, changed_entries, len(others), copy, content)


def _mixed_copies_error(
    plan: Plan, wrong: Sequence[FinishedTask], count: int, copy: SourceCopy, content: Location
) -> MixedCopiesError:
    arrays = dict.fromkeys((keystr(plan.tasks[entry.task].path), entry.process) for entry in wrong)
    listed = listing([f"{name}: {process}" for name, process in arrays], folds=False)
    source = source_of(plan) or "the source"
    # In a bucket the checkpoint is written under its final name, next to the journal.
    work = content.parent if content.store.streams is None else content.with_name(f"{content.name}.partial")
    hash_source = action("hash", source)
    doctor = action("doctor", str(work))
    return MixedCopiesError(
        f"parts read different copies of the model: {len(wrong)} of {plural(count, 'task')} differ:{listed}",
        location=work,
        got=f"values that differ from those that {copy.process} reads from {source}",
        expected="the same values in all copies",
        hint=f"run {hash_source} on every host to find the wrong copy. If this host has it, publish on "
        f"another host. If a part read it, replace it, discard the parts as {doctor} explains, and run all "
        "parts again",
    )


# Detect source files that changed although their sizes, modification times and headers did not.
#
# `cp -p` and rsync restore modification times. No call restores the time of the last status change (ctime),
# but new links and other permissions change it, too. So a changed ctime alone is not an error; the tasks are
# repeated instead. The number of links cannot excuse a change, because the file may also have been rewritten.

_SOURCE_STATE = -2
"""Replaces the task index in a record of the source's state."""
# If the status of a file changes in every attempt, the file is being written.
_MAX_ATTEMPTS = 3

_T = TypeVar("_T")
SourceStates: TypeAlias = Mapping[str, str]
"""The identity (inode, size and times) for the path of each local file."""


def read_source_states(paths: Iterable[str]) -> SourceStates:
    """Return the states of local source files, which takes 10 microseconds per file.

    Raises:
        StorageError: A file cannot be inspected.
    """
    locations = {path: parse(path) for path in paths}
    return {
        path: location.store.copy_identity(location.key).file
        for path, location in locations.items()
        if isinstance(location.store, SupportsCopyIdentity)
    }


def read_plan_states(plan: Plan) -> SourceStates:
    """Return the states of a plan's local source files; raises the errors of `read_source_states`."""
    return read_source_states(source.path for source in plan.sources if isinstance(source, File))


def repeat_if_touched(
    attempt: Callable[[int], _T], states: Callable[[], SourceStates], *, can_repeat: bool = True
) -> _T:
    """Run tasks, and run all of them again if the status of a source file has changed meanwhile.

    Args:
        attempt: Runs the tasks. Its argument is the index of the attempt, from 0; later attempts repeat all
            tasks.
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
    # Either the content or the permissions changed; only reading the file again can tell which.
    raise SourceChangedError(
        f"{touched} was changed while it was read",
        got="another status time (ctime), with the same size and modification time",
        expected="an unchanged file",
        hint=f"find the process that writes to it or sets its attributes; then {retry_term()}",
    )


def source_state_record(copy: SourceCopy) -> Record:
    """Return a record of the state from which a complete checkpoint was written."""
    return [_SOURCE_STATE, copy.identity]


def is_written_from(records: Iterable[Record], copy: SourceCopy) -> bool:
    """Return whether a complete checkpoint was written from the current state of its source.

    Returns True if the state was not recorded, as by earlier versions.
    """
    states = {record[1] for record in records if len(record) == 2 and record[0] == _SOURCE_STATE}
    return not states or any(copy.has_files_of(str(state)) for state in states)


def is_local(source: ByteSource) -> bool:
    """Return whether the version of a source is a modification time, which can be set back."""
    return isinstance(source, File) and parse(source.path).store.scheme == "file"


def fingerprint(
    plan: Plan,
    writer: Writer,
    identify: Identify = identity,
    declared: Callable[[str], str] = lambda text: text,
    is_timed: Callable[[ByteSource], bool] = is_local,
) -> str:
    """Return a text that identifies what a run writes, from which sources and with which tasks.

    Args:
        plan, writer: The run.
        identify: Returns the identity of a source.
        declared: Normalizes texts that may contain locations.
        is_timed: Returns whether the version of a source is a time; if so, sampled bytes are included.

    Raises:
        FormatError, StorageError: A source cannot be read.
    """
    metadata = plan.tree.metadata
    leaves = [(path, leaf) for path, leaf in plan.tree.items() if path not in plan.tree.arrays]
    marks = sorted(map(repr, metadata.scalars)), metadata.key_impls
    rest = writer, leaves, metadata.step, metadata.item, marks
    samples = _samples(plan, identify, is_timed)
    return hashlib.sha256(
        f"{plan.fingerprint(identify)} {samples} {declared(repr(rest))}".encode()
    ).hexdigest()


def _samples(plan: Plan, identify: Identify, is_timed: Callable[[ByteSource], bool]) -> str:
    files = {
        identify(source)[0]: source
        for source in plan.sources
        if isinstance(source, File) and is_timed(source)
    }
    return sample_files([files[name] for name in sorted(files)])


def source_of(plan: Plan) -> str:
    """Return the location of the source for messages: the opened path, or the directory of its files."""
    if plan.tree.metadata.location:
        return str(parse(plan.tree.metadata.location).absolute())
    directories = {parse(source.path).absolute().parent for source in plan.sources}
    common = min(directories, default=None)
    while common is not None and not all(
        common in (directory, *directory.parents) for directory in directories
    ):
        common = None if common == common.parent else common.parent
    return "" if common is None else str(common)
