"""The staging directory `<destination>.partial`, in which a checkpoint is written before it is published.

    DST.partial/journal.ckpttools   the plan and its progress; locked by the active process
    DST.partial/content/            the checkpoint; after an exchange, the replaced one
    DST.partial/parts/              finished tasks of each of several processes (`ckpttools.stores.shares`)
    DST.partial/replaced/           the replaced checkpoint, if the file system cannot exchange two names
    DST.partial/removed/            files that are being deleted

The final name does not exist until everything is written. One rename then publishes the checkpoint, or
one exchange if it replaces another. Until it is published, a checkpoint has a mark that names its plan.
All states after a crash can therefore be distinguished, and unmarked files are never taken for ours.
After publication, the replaced checkpoint is deleted, then the mark, then the journal. A directory with
this name but without our journal is not owned by ckpttools and is left unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import DestinationExistsError, UsageError
from ckpttools.core.memory_limit import DEFAULT_MEMORY, format_size, parse_size
from ckpttools.core.message_terms import option, retry_term
from ckpttools.stores.local.file import iso_time, storage_error
from ckpttools.stores.local.files import check_no_mount, exchange, remove_tree, sync_directory
from ckpttools.stores.local.journal import (
    CONTENT,
    REMOVED,
    REPLACED,
    Journal,
    is_staging,
    read_mark,
    remove_mark,
)
from ckpttools.stores.local.mounts import first_mount
from ckpttools.stores.local.store import STORE
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import PLAN_MARK, SUFFIX, JobInfo


def is_free(path: Path) -> bool:
    """Return whether a directory can be renamed to this path without losing anything."""
    if not os.path.lexists(path):
        return True
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        return next(path.iterdir(), None) is None and first_mount(path) is None
    except OSError as error:
        raise storage_error("cannot list", path, error) from error


def check_directory(destination: Path) -> None:
    """Raise DestinationExistsError if the destination cannot be replaced by a checkpoint."""
    problem = None
    hint = "choose another destination"
    mount = first_mount(destination)
    if destination.is_symlink():
        problem = f"is a symbolic link to {destination.readlink()}"
    elif not destination.is_dir():
        problem = "is a file"
    elif mount == destination.resolve():
        problem = "is a mount point, which cannot be replaced"
    elif mount is not None:
        problem = f"contains the mount point {mount}, which would be deleted"
        hint = f"{hint}, or umount {mount}"
    if problem:
        raise DestinationExistsError(
            f"{destination} {problem}",
            expected="a new name, or an empty directory",
            hint=hint,
        )


def disk_usage(path: Path) -> int:
    """Return the disk usage of all files below `path` that have no other hard link, in bytes."""
    result = 0
    # Another process may be publishing or removing the directory at the same time.
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                status = Path(directory, name).lstat()
                result += status.st_blocks * 512 * (status.st_nlink == 1)
    return result


def inventory(directory: Path) -> Iterator[str]:
    """Iterate over one line for each file below a directory: size in bytes, mtime in nanoseconds, and path.

    The mark of the plan is not listed, because it is removed at the end.

    Raises:
        OSError: The system reports an error.
    """
    waiting = [directory]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif Path(entry.path) != directory / PLAN_MARK:
                    yield _line(Path(entry.path), directory)


def check_inventory(directory: Path, lines: Iterable[str], hint: str) -> None:
    """Compare the files of a checkpoint with its inventory, ignoring additional files.

    Args:
        directory: Directory of the checkpoint.
        lines: Lines of the inventory.
        hint: The hint of the error.

    Raises:
        DestinationExistsError: A file was changed or removed.
        OSError: The system reports an error.
    """
    for line in lines:
        name = line.split(" ", 2)[2]
        try:
            current = _line(directory / name, directory)
        except (FileNotFoundError, NotADirectoryError):
            current = None
        if current != line:
            raise DestinationExistsError(
                f"{directory} has changed since an interrupted conversion published it",
                location=directory / name,
                got=_describe(current),
                expected=_describe(line),
                hint=hint,
            )


def _line(path: Path, directory: Path) -> str:
    status = path.lstat()
    return f"{status.st_size} {status.st_mtime_ns} {path.relative_to(directory).as_posix()}"


def _describe(line: str | None) -> str:
    if line is None:
        return "no such file"
    size, time, _ = line.split(" ", 2)
    return f"{size} bytes, changed at {iso_time(int(time))}"


@dataclass(frozen=True, slots=True)
class StagingDirectory:
    """The staging directory of a destination, and the renames between the two.

    Attributes:
        destination: The final location.
    """

    destination: Path

    @property
    def directory(self) -> Path:
        return self.destination.with_name(self.destination.name + SUFFIX)

    @property
    def content(self) -> Path:
        return self.directory / CONTENT

    @property
    def taken(self) -> tuple[Location, Location]:
        return Location(STORE, str(self.destination)), Location(STORE, str(self.directory))

    @property
    def _replaced(self) -> Path:
        return self.directory / REPLACED

    @property
    def _removed(self) -> Path:
        return self.directory / REMOVED

    def is_published(self, plan: str) -> bool:
        """Return whether this plan's run was interrupted after publication but before its cleanup."""
        return read_mark(self.destination) == plan and is_staging(self.directory)

    def is_complete(self, journal: Journal, plan: str) -> bool:
        """Return whether the journal records a complete publication, even if nothing else remains."""
        may_be = journal.plan == plan and journal.publishing
        return may_be and (self.is_published(plan) or self._is_unmarked(journal))

    def _is_unmarked(self, journal: Journal) -> bool:
        """Return whether the destination has exactly the published files and only the mark was removed."""
        is_moving = any(map(os.path.lexists, (self.content, self._replaced)))
        if journal.inventory is None or is_moving or is_free(self.destination):
            return False
        try:
            check_inventory(self.destination, journal.inventory, "")
        except DestinationExistsError:
            return False
        return True

    def old(self, journal: Journal) -> Path | None:
        """Return the path of the replaced checkpoint in the directory, or None."""
        if os.path.lexists(self._replaced):
            return self._replaced
        may_be_exchanged = journal.publishing or journal.plan is None
        if not may_be_exchanged or is_free(self.content):
            return None
        # New content is marked from the start.
        return self.content if read_mark(self.content) is None else None

    def finish_removing(self, journal: Journal, plan: str) -> None:
        """Finish an interrupted removal of files that ckpttools owns.

        Unmarked files belong to a checkpoint that a published one has replaced.

        Raises:
            UsageError: The owner of the files is unknown.
        """
        location = self._removed
        is_known = journal.publishing or self.is_published(plan)
        is_directory = location.is_dir() and not location.is_symlink()
        if is_directory and (is_known or is_free(location) or read_mark(location) is not None):
            self._empty_removed()
        elif os.path.lexists(location):
            raise UsageError(
                f"{location} was not written by a conversion",
                got="a directory without the mark of ckpttools" if is_directory else "no directory",
                expected="no directory, or one that an interrupted conversion was deleting",
                hint=f"move it away, or delete it; then {retry_term()}",
            )

    def refuse_unmarked(self) -> None:
        """Raise UsageError if ckpttools does not own the content directory."""
        is_marked = not self.content.is_symlink() and read_mark(self.content) is not None
        if not is_marked and not is_free(self.content):
            raise UsageError(
                f"{self.content} was not written by a conversion: it has no {PLAN_MARK}",
                expected="an unpublished checkpoint, which has the mark from the start",
                hint=f"move it away, or delete it; then {retry_term()}",
            )

    def settle(self, journal: Journal, plan: str) -> None:
        """Remove the replaced checkpoint if its successor is published; otherwise restore its name."""
        old = self.old(journal)
        if old is None:
            return
        is_known = journal.publishing
        if self.is_published(plan):
            self.remove(old)
        elif is_known and is_free(self.destination):
            old.rename(self.destination)
            self.sync_names()
        else:
            raise UsageError(
                f"{old} is the checkpoint that a conversion wanted to replace, and it is unknown whether "
                f"{self.destination} is its successor",
                hint=f"delete {old}, or move it to where you want it; then {retry_term()}",
            )

    def rename(self) -> None:
        if is_free(self.destination):
            self.content.rename(self.destination)
            return
        # Remove the mark that an interrupted run left, so that the replaced checkpoint is not taken for new
        # content.
        remove_mark(self.destination)
        if not exchange(self.content, self.destination):
            self.destination.rename(self._replaced)
            self.sync_names()
            self.content.rename(self.destination)

    def rename_back(self) -> None:
        """Undo a `rename` that replaced something."""
        if os.path.lexists(self._replaced):
            self.destination.rename(self.content)
            self.sync_names()
            self._replaced.rename(self.destination)
        else:
            exchange(self.content, self.destination)

    def sync_names(self) -> None:
        sync_directory(self.directory)
        sync_directory(self.destination.absolute().parent)

    def remove(self, location: Path) -> None:
        """Remove a directory in the staging directory, if it exists: rename it durably, then delete it."""
        if os.path.lexists(location):
            check_no_mount(location)
            location.rename(self._removed)
            sync_directory(self.directory)
            self._empty_removed()

    def _empty_removed(self) -> None:
        """Delete the marked directory.

        The mark is removed last, before any change of the journal, because both identify the directory.
        """
        remove_tree(self._removed, last=PLAN_MARK)
        sync_directory(self.directory)


_RESOURCES = frozenset(("--jobs", "--memory", "--requests", "--progress", "--no-progress", "--resume"))
"""Options that do not affect the result, so that a command can resume with different values."""


def conflict_error(directory: Path, begun: JobInfo | None, purpose: JobInfo) -> UsageError:
    """Return the error for a directory that contains a different conversion.

    Args:
        directory: The staging directory of the other conversion.
        begun: The other conversion; None if its journal is damaged.
        purpose: The requested conversion.
    """
    discard = f"delete {directory}, or discard it with {option('overwrite', True)}"
    if begun is None:
        return UsageError(
            f"the journal in {directory} is damaged, so the finished work is unknown",
            expected="an unmodified file of an interrupted conversion",
            hint=discard,
        )
    if begun.is_same_command(purpose):
        owner = "another conversion: the same command, started before its source changed"
        go_on = "it cannot be resumed"
        hint = f"{go_on}: {discard}"
    else:
        owner = "another conversion"
        go_on = f"to resume it, {_resume_hint(begun)}"
        hint = f"{go_on}; otherwise {discard}"
    if _is_same_conversion(begun, purpose):
        changes = _describe_changes(begun, purpose) or _describe_smaller_memory(begun, purpose)
        owner = f"another conversion: the same command, started with other options{changes}"
        hint = f"to start over with the new options, {discard}; {go_on}"
        if not changes:
            owner = "another conversion: the same command, with other options or before its source changed"
            hint = f"to start over, {discard}"
    return UsageError(
        f"{directory} contains the beginning of {owner}",
        got=describe_conversion(begun),
        expected=describe_conversion(purpose),
        hint=hint,
    )


def _is_same_conversion(existing: JobInfo, purpose: JobInfo) -> bool:
    """Return whether two conversions have the same command and source but different options."""
    names = [item.command.split()[:2] for item in (existing, purpose)]
    return existing.command != purpose.command and existing.source == purpose.source and names[0] == names[1]


def _describe_changes(existing: JobInfo, purpose: JobInfo) -> str:
    """Describe the options that differ between two commands; "" if none differ."""
    before, after = (dict.fromkeys(_options(item.command)) for item in (existing, purpose))
    old = [item for item in before if item not in after]
    new = [item for item in after if item not in before]
    changes = [f"{word} {' '.join(options)}" for word, options in (("with", old), ("now", new)) if options]
    return f" ({', '.join(changes)})" if changes else ""


def _describe_smaller_memory(existing: JobInfo, purpose: JobInfo) -> str:
    """Describe the memory limits of two commands if the started tasks may not fit in the other limit."""
    before, after = _parse_memory_limit(existing.command), _parse_memory_limit(purpose.command)
    if not existing.division or before is None or after is None or before <= after:
        return ""
    old, new = (option("memory", format_size(memory)) for memory in (before, after))
    return f" (with {old}, now {new}, into which its tasks do not fit)"


def _parse_memory_limit(command: str) -> int | None:
    """Return the memory limit of a command in bytes; None if it cannot be parsed."""
    words = command.replace("--memory=", "--memory ").split()
    if "--memory" not in words:
        return DEFAULT_MEMORY
    try:
        return parse_size(words[words.index("--memory") + 1])
    except (IndexError, UsageError):
        return None


def _options(command: str) -> Iterator[str]:
    """Iterate over the options of a command that affect its result, with their values."""
    words = command.split()
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith("--") and word.partition("=")[0] not in _RESOURCES:
            yield word if following.startswith("-") else f"{word} {following}"


def describe_conversion(purpose: JobInfo) -> str:
    """Describe a conversion for a message."""
    of = f"the conversion of {purpose.source}, " if purpose.source else ""
    by = f"by `{purpose.command}` in {purpose.directory}, " if purpose.command else ""
    return f"{of}{by}plan {purpose.plan[:12]}"


def _resume_hint(purpose: JobInfo) -> str:
    """Return a hint on how to resume a conversion."""
    if not purpose.command:
        return "run the command that started it"
    return f"run in {purpose.directory}: {purpose.command}"
