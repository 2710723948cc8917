"""The journal of a prune, written before any change, so that the prune can be finished or undone.

RUN/.ckpttools-prune/plan.json        the plan, removed last
RUN/.ckpttools-prune/stripped/STEP    a step without its optimizer, before it has the step's name
RUN/.ckpttools-prune/removed/STEP     a complete step that can be restored
RUN/.ckpttools-prune/deleting/STEP    incomplete; in a bucket, a file that marks RUN/STEP as incomplete
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, field

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, UsageError
from ckpttools.core.message_terms import option, render_all
from ckpttools.formats.json_file import read_json
from ckpttools.formats.orbax.metadata import COMMIT_FILE
from ckpttools.formats.orbax.steps import PRUNE_DIRECTORY
from ckpttools.stores.abilities import SupportsCacheInvalidation, SupportsRemove
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import LockedError

_VERSION = 1


@dataclass(frozen=True)
class PruneJournal:
    """A prune that was started.

    Attributes:
        delete, strip: For each step name, a fingerprint that distinguishes the step from later steps of the
            same name.
        stripped: The same for the replacements of the steps in `strip`.
        keep: Names of steps that must exist before anything is deleted.
        commits: Content of the commit file of each step that had one.
        token: Unique ID of the prune.
        version: Version of the journal format.
    """

    delete: Mapping[str, str]
    strip: Mapping[str, str]
    stripped: Mapping[str, str]
    keep: Sequence[str]
    commits: Mapping[str, str]
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    version: int = _VERSION

    def begin(self, run: Location) -> None:
        """Write the journal, which marks the start of the prune.

        Raises:
            UsageError: Another prune was interrupted.
            StorageError, NoSpaceError: The journal cannot be written.
        """
        if not store_with_removal(run).claim(plan_of(run).key, json.dumps(render_all(asdict(self))).encode()):
            raise interrupted_error(run)


def store_with_removal(run: Location) -> SupportsRemove:
    """Return the store of a run, which must support deletion.

    Raises:
        UsageError: The store cannot delete.
    """
    if isinstance(run.store, SupportsRemove):
        return run.store
    raise UsageError(
        f"nothing can be deleted in {run.store.scheme}://",
        location=run,
        expected="a run on a disk or in a bucket",
    )


@contextmanager
def locked_run(run: Location) -> Iterator[None]:
    """Lock a run, so that no other process prunes it.

    Raises:
        LockedError: Another process is pruning the run.
        UsageError: Nothing can be deleted there.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(store_with_removal(run).locked(run.key))
        except LockedError as error:
            reason = "another process prunes this run"
            raise LockedError(reason, location=run, got=error.raw.got, hint=error.raw.hint) from error
        yield


def journal_location(run: Location, *names: str) -> Location:
    """Return a location in the directory of a run's prune."""
    location = run / PRUNE_DIRECTORY
    for name in names:
        location = location / name
    return location


def plan_of(run: Location) -> Location:
    """Return the location of a run's journal."""
    return journal_location(run, "plan.json")


def read_journal(run: Location) -> PruneJournal | None:
    """Return the prune that was started; None if there is none, or if it has changed nothing.

    Raises:
        FormatError: The journal is invalid, and something has been changed.
    """
    location = plan_of(run)
    if not location.is_file():
        return None
    try:
        document = read_json(location)
        if document.pop("version", None) != _VERSION:
            raise FormatError("a journal of another version", location=location)
        return PruneJournal(**document)
    except (FormatError, TypeError) as error:
        if not any(journal_location(run, name).is_dir() for name in ("removed", "deleting")):
            # The process crashed before the journal was durable, and therefore before any change.
            return PruneJournal({}, {}, {}, (), {})
        raise FormatError(
            "the journal of a prune cannot be read",
            location=location,
            got=str(error),
            hint=(
                f"inspect {journal_location(run)}: steps in its "
                "directory removed are complete and can be moved back"
            ),
        ) from error


def interrupted_error(run: Location) -> UsageError:
    """Return the error for a run with an interrupted prune."""
    return UsageError(
        "a prune of this run was interrupted",
        location=journal_location(run),
        hint=f"finish it with {option('finish', True)}, or restore intact steps with {option('undo', True)}",
    )


def fingerprint(step: Location) -> str:
    """Return a hash of a step's files, without commit files, that changes when the step is saved again.

    S3 gives the same ETag to the same bytes, so the hash also covers the modification times.

    Raises:
        StorageError: The step cannot be listed.
    """
    if isinstance(step.store, SupportsCacheInvalidation):
        step.store.forget(step.key)
    files = sorted(
        (name, result.size, result.version, result.modified)
        for name, result in step.walk()
        if name.rpartition("/")[2] != COMMIT_FILE
    )
    return hashlib.sha256(json.dumps(files).encode(errors="surrogatepass")).hexdigest()
