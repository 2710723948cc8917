"""Delete and replace steps so that a crash at any time leaves everything that is needed.

On a disk, a step is renamed atomically before any of its files are deleted, so the steps that Orbax lists are
always complete. Objects in a bucket cannot be renamed: there, the commit files are deleted first, so that
Orbax does not list the steps, and then the other objects. The last finished step and all kept steps are never
touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from shlex import quote

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, StorageError, listing
from ckpttools.core.message_terms import option
from ckpttools.formats.orbax.metadata import COMMIT_FILE
from ckpttools.formats.orbax.steps import DELETING, Step, deletion_marker, has_new_files, unfinished_reason
from ckpttools.runs.journal import PruneJournal, fingerprint, journal_location, plan_of, store_with_removal
from ckpttools.stores.abilities import SupportsCacheInvalidation, SupportsRename
from ckpttools.stores.location import Location

_REMOVED, _DELETING, _STRIPPED = "removed", DELETING, "stripped"
_PROBE = "probe"


@dataclass(frozen=True)
class Removal:
    """A prune that was started and may have been interrupted at any point.

    Attributes:
        run: Directory that contains the steps.
        journal: The decision.
    """

    run: Location
    journal: PruneJournal

    def carry_out(self) -> tuple[str, ...]:
        """Carry out the remaining work of the prune.

        Returns:
            Descriptions of steps that were left alone, with reasons.

        Raises:
            FormatError: A step to keep is missing. Nothing more is deleted.
            StorageError: The store reports an error. The same call resumes.
        """
        self.check_kept()
        left = [*(self._rename_steps() if self._renames else self._remove_commit_files())]
        self._check_stripped()
        deleted: set[str] = set()
        # Each step is checked right before its deletion, because deleting the others may take hours.
        for name in chain(self._partly_deleted(), self._deletable_steps()):
            self._delete(name)
            deleted.add(name)
        left += () if self._renames else self._find_saved_again(deleted, left)
        self._clean_up()
        return tuple(left)

    def undo(self) -> tuple[str, ...]:
        """Restore intact steps, and delete partly deleted ones.

        Returns:
            Descriptions of steps that cannot be restored, with reasons.

        Raises:
            StorageError: The store reports an error. The same call resumes.
        """
        if self._renames:
            self._put_back()
        else:
            self._restore_commit_files()
        deleting = self._names(_DELETING)
        missing = [name for name in self.journal.delete if not (self.run / name).is_dir() or name in deleting]
        lost = (
            *(f"{name}: it was already deleted, completely or in part" for name in missing),
            *(f"{name}: its optimizer was already deleted" for name in self._stripped_steps()),
        )
        for name in self._partly_deleted():
            self._delete(name)
        self._clean_up()
        return lost

    # Current state of the run.

    @property
    def _renames(self) -> bool:
        return isinstance(self.run.store, SupportsRename)

    def _partly_deleted(self) -> Iterator[str]:
        """Yield the names of partly deleted steps, except those that were saved again in the meantime."""
        return (name for name in self._names(_DELETING) if not self._was_saved_again(name))

    def _was_saved_again(self, name: str) -> bool:
        """Return whether a step in a bucket has a commit file, which is deleted first, or newer files."""
        location, marker = self.run / name, journal_location(self.run, _DELETING, name)
        if self._renames:
            return False
        if isinstance(location.store, SupportsCacheInvalidation):
            location.store.forget(location.key)
        if name in self.journal.commits and (location / COMMIT_FILE).is_file():
            return True
        return has_new_files(location, marker)

    def _deletable_steps(self) -> Iterator[str]:
        """Yield the names of untouched steps that may be deleted now."""
        if self._renames:
            return iter(self._names(_REMOVED))
        return (name for name in self.journal.delete if self._is_planned(name))

    def _names(self, directory: str) -> list[str]:
        location = journal_location(self.run, directory)
        return [entry.name for entry in location.entries()] if location.is_dir() else []

    def _is_planned(self, name: str) -> bool:
        """Return whether a step is complete and the one that was to be deleted."""
        location = self.run / name
        return location.is_dir() and fingerprint(location) == self.journal.delete.get(name)

    def _stripped_steps(self) -> list[str]:
        """Return the names of steps that were replaced by stripped ones."""
        journal = self.journal.stripped
        return [
            name
            for name in journal
            if (self.run / name).is_dir() and fingerprint(self.run / name) == journal[name]
        ]

    def check_kept(self) -> None:
        """Raise FormatError if a step to keep is missing or damaged."""
        lost = []
        for name in self.journal.keep:
            location = self.run / name
            reason = unfinished_reason(Step(location)) if location.is_dir() else "it does not exist"
            if reason:
                lost.append(f"{name}: {reason}")
        if lost:
            raise FormatError(
                "steps to keep are no longer complete, so no others are deleted" + listing(lost),
                location=self.run,
                hint="inspect the run again; after an interrupted prune, restore intact steps with "
                f"{option('undo', True)}",
            )

    def _check_stripped(self) -> None:
        """Refuse to delete a step that has not been replaced by its stripped version."""
        for name in self._names(_REMOVED):
            if name in self.journal.strip and not (self.run / name).is_dir():
                raise FormatError(
                    f"step {name} without its optimizer no longer exists",
                    location=self.run / name,
                    hint=f"restore the complete step with {option('undo', True)}",
                )

    # Methods for runs on a disk.

    def _rename_steps(self) -> Iterator[str]:
        """Rename steps for deletion, and give stripped steps their names.

        Yields descriptions of steps that were saved again, which are left alone.
        """
        for name, expected in self.journal.strip.items():
            step, stripped = self.run / name, journal_location(self.run, _STRIPPED, name)
            if not stripped.is_dir():
                continue  # The step already has its name, or was never written.
            if step.is_dir():
                if fingerprint(step) != expected:
                    yield _saved_again(name)
                    continue
                step.rename(journal_location(self.run, _REMOVED, name))
            stripped.rename(step)
        for name in self.journal.delete:
            if self._is_planned(name):
                (self.run / name).rename(journal_location(self.run, _REMOVED, name))
            elif (self.run / name).is_dir():
                yield _saved_again(name)

    def _put_back(self) -> None:
        for name in self._names(_REMOVED):
            step, removed = self.run / name, journal_location(self.run, _REMOVED, name)
            if step.is_dir() and fingerprint(step) == self.journal.stripped.get(name):
                step.rename(journal_location(self.run, _STRIPPED, name))
            if step.is_dir():
                raise StorageError(
                    f"step {name} cannot be restored: another step has its name",
                    location=removed,
                    hint="move one of them away",
                )
            removed.rename(step)

    # Methods for runs in a bucket.

    def _remove_commit_files(self) -> Iterator[str]:
        """Delete the commit files of steps, so that they do not count as finished.

        Yields descriptions of steps that were saved again, which are left alone.
        """
        for name in self.journal.delete:
            location = self.run / name
            if self._is_planned(name):
                store_with_removal(self.run).remove((location / COMMIT_FILE).key)
            elif location.is_dir() and (name not in self._names(_DELETING) or self._was_saved_again(name)):
                yield _saved_again(name)

    def _find_saved_again(self, deleted: Collection[str], left: Collection[str]) -> Iterator[str]:
        """Yield descriptions of steps that were saved again since their commit files were deleted."""
        for name in self.journal.delete:
            location = self.run / name
            if isinstance(location.store, SupportsCacheInvalidation):
                location.store.forget(location.key)
            if location.is_dir() and name in deleted:
                yield f"{name}: it was written again while it was deleted, and may lack files"
            elif location.is_dir() and _saved_again(name) not in left:
                yield _saved_again(name)

    def _restore_commit_files(self) -> None:
        deleting = self._names(_DELETING)
        for name in self.journal.delete:
            if name not in deleting and self._is_planned(name) and name in self.journal.commits:
                (self.run / name / COMMIT_FILE).put(self.journal.commits[name].encode())

    # Methods for runs on a disk and in a bucket.

    def _delete(self, name: str) -> None:
        store, going = store_with_removal(self.run), journal_location(self.run, _DELETING, name)
        if self._renames:
            removed = journal_location(self.run, _REMOVED, name)
            if removed.is_dir() and not going.is_dir():
                removed.rename(going)
            store.remove(going.key)
            return
        if not going.exists():
            store.claim(going.key, deletion_marker(self.run / name))
        store.remove((self.run / name).key)
        store.remove(going.key)

    def _clean_up(self) -> None:
        tidy_all(self.run)


def _saved_again(name: str) -> str:
    return f"{name}: it was saved again in the meantime"


def check_can_rename(run: Location, names: Iterable[str]) -> None:
    """Check that the store can rename each step, before anything is written or renamed.

    Args:
        run: Directory that contains the steps.
        names: Names of the steps to delete or replace.

    Raises:
        StorageError: The file system cannot rename a step.
    """
    if not isinstance(run.store, SupportsRename):
        return
    for name in (item for item in names if (run / item).is_dir()):
        try:
            run.store.check_can_rename((run / name).key, journal_location(run, _PROBE).key)
        except StorageError as error:
            run_path, copy = quote(str(run)), quote(f"{run}.copy")
            hint = (
                "copy the run to a volume and prune it there; or copy it into the container's own layer: "
                f"cp -a {run_path} {copy} && rm -r {run_path} && mv {copy} {run_path}"
            )
            raise error.at(hint=hint) from error


def tidy_all(run: Location) -> None:
    """Remove all files of a finished prune, the journal last."""
    store = store_with_removal(run)
    for name in (_STRIPPED, _REMOVED, _DELETING):
        store.remove(journal_location(run, name).key)
    store.remove(plan_of(run).key)
    tidy(run)
    if isinstance(run.store, SupportsCacheInvalidation):
        run.store.forget(run.key)


def tidy(run: Location) -> None:
    """Remove the remains of a prune that ended or was killed before it started, except steps."""
    location, store = journal_location(run), store_with_removal(run)
    if plan_of(run).exists():
        return
    store.remove(journal_location(run, _STRIPPED).key)
    if isinstance(run.store, SupportsRename) and journal_location(run, _PROBE).exists():
        store.remove(journal_location(run, _PROBE).key)
    if location.is_dir() and not location.entries():
        store.remove(location.key)
