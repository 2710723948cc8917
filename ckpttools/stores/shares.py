"""Protocols for several processes that write one checkpoint; each does a share of a plan's groups.

    with staging.joined(purpose, nbytes, share) as work:    next to other shares, never to a single run
        files = work.data_files(sizes, heads)
        work.record(records)                                in a journal of this process

`Staging.opened` fails while a share is active. It includes the records of all shares, and removes their
journals together with its own. The finished work of every process counts, so that any other division into
shares can resume.

**In a directory**, each process holds a shared lock on the journal and has its own file in
`<destination>.partial/parts/`, which only that process writes and keeps locked.

**In a bucket**, each process has an object in `<destination>.partial/parts/`, which it rewrites every few
seconds. It writes this object before it checks for the lock of a single run, and a single run takes the lock
before it checks for these objects. If two start at the same moment, at least one of them sees the other and
withdraws.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from shlex import split
from typing import Any, Protocol, TypeVar, runtime_checkable

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import DestinationExistsError, UsageError
from ckpttools.core.message_terms import PLAN, action
from ckpttools.core.text import first_names, format_age
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import DataFiles, JobInfo, LockedError, Record

Prepared = TypeVar("Prepared")
_POLL_SECONDS = 0.25

DONE = "done"
"""The `Member.outcome` of a process that has finished all its tasks."""

PARTS = "parts"
"""Directory below `<destination>.partial` that has a file or object for each process."""


@dataclass(frozen=True, slots=True)
class Share:
    """The groups of a plan that are assigned to one process.

    Attributes:
        name: Name for messages, such as "3/8".
        first, stop: The range of group indexes.
    """

    name: str
    first: int
    stop: int

    def overlaps(self, other: Share) -> bool:
        """Return whether two shares overlap."""
        return max(self.first, other.first) < min(self.stop, other.stop)


@dataclass(frozen=True, slots=True)
class Member:
    """A process that is working, or has worked, on a share.

    Attributes:
        token: Unique ID.
        share: The share of the process.
        process: Description of the process.
        began, seen: Start time and time of the last renewal, in seconds since 1970.
        is_alive: Whether the process is active, as far as known.
        outcome: "done", or the reason why the process ended; "" while it is active or if it was killed.
        records: Records of the finished tasks.
        age: Seconds since the last renewal, by the store's clock.
        release: The command that releases the claim.
    """

    token: str
    share: Share
    process: str
    began: float
    seen: float
    is_alive: bool
    outcome: str
    records: Sequence[Record] = ()
    age: float = 0.0
    release: str = ""

    def __str__(self) -> str:
        return f"part {self.share.name}: {self.process}, last seen {format_age(self.age)} ago"


@dataclass(frozen=True, slots=True)
class Standing:
    """The progress of a plan at a destination.

    Attributes:
        is_begun: Whether the plan has been started at the destination.
        is_published: Whether the checkpoint is published, so that only cleanup remains.
        other: Description of another unfinished conversion to the destination; "" if there is none.
        records: Records of single runs, and of processes whose share is unknown.
        members: The processes, sorted by start time.
    """

    is_begun: bool
    is_published: bool = False
    other: str = ""
    records: Sequence[Record] = ()
    members: Sequence[Member] = ()

    @property
    def all_records(self) -> list[Record]:
        """Return the records of single runs and of all processes."""
        return [*self.records, *(record for member in self.members for record in member.records)]


class PartWork(Protocol):
    """A destination that several processes write; see `publishing.Work`.

    Attributes:
        token: Unique ID, which names the files that this process appends to.
    """

    token: str

    @property
    def content(self) -> Location:
        """Return the location of the unpublished checkpoint."""

    @property
    def records(self) -> Sequence[Record]:
        """Return the records of all processes at the time when this process started."""

    def data_files(self, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> DataFiles:
        """See `Work.data_files`."""

    def record(self, records: Iterable[Record]) -> None:
        """See `Work.record`."""

    def discard(self) -> None:
        """Discard the finished work of this process."""


@runtime_checkable
class SharedStaging(Protocol):
    """A destination that several processes can write."""

    def joined(self, purpose: JobInfo, nbytes: int, share: Share) -> AbstractContextManager[PartWork]:
        """Join the work on a destination, which the first process prepares for the plan.

        Raises:
            LockedError: A single run is active, or another process has some of these groups.
            CheckpointError: As for `Staging.opened`.
        """

    def standing(self, plan: str) -> Standing:
        """Return the progress of a plan without locks or changes."""


def shared_staging(staging: object, destination: Location) -> SharedStaging:
    """Return a staging that several processes can write to.

    Raises:
        UsageError: Only one process can write to the store.
    """
    if isinstance(staging, SharedStaging):
        return staging
    raise UsageError(
        f"only one process can write to {destination.store.scheme}://",
        location=destination,
        expected="a local directory that all processes see, gs://, s3:// or az://",
        hint=f"convert to one of these, then copy the checkpoint with {action('copy')}",
    )


def check_free(share: Share, members: Iterable[Member], location: object) -> None:
    """Raise LockedError if an active process has groups of a share."""
    for member in members:
        if member.is_alive and member.share.overlaps(share):
            raise in_use_error(
                f"another process is doing tasks of part {share.name}", [member], location, "wait for it"
            )


def in_use_error(message: str, members: Sequence[Member], location: object, wait: str) -> LockedError:
    """Return the error for a destination that other processes write to.

    Args:
        message: The first line of the error.
        members: The processes; at least one.
        location: The destination.
        wait: The hint while the processes are active.
    """
    release = f"; to release its claim: {members[0].release}" if members[0].release else ""
    return LockedError(message, location=location, got=first_names([*map(str, members)]), hint=wait + release)


class PublishedError(DestinationExistsError):
    """All parts are done, and the checkpoint is published or being published."""


def already_published_error(destination: object) -> PublishedError:
    """Return the error for a part that starts after the checkpoint was published."""
    return PublishedError(
        f"{destination} is complete: all parts are finished, and it is published",
        expected="no more parts",
        hint=f"{action('publish_plan', PLAN)} removes the remaining files next to it",
    )


def prepare_or_wait(
    attempt: Callable[[], Prepared | None], is_preparing: Callable[[], bool], patience: float
) -> Prepared:
    """Wait until a destination is prepared for the parts of a plan, or prepare it.

    Args:
        attempt: Joins a prepared destination, or prepares it and returns None.
        is_preparing: Returns whether the lock holder is preparing the destination, which may take any time.
        patience: Seconds to wait for any other lock holder, which may be about to end.

    Raises:
        LockedError: Another process holds the lock.
        CheckpointError: As for `attempt`.
    """
    until = time.monotonic() + patience
    while True:
        try:
            result = attempt()
        except LockedError:
            if is_preparing():
                until = time.monotonic() + patience
            elif time.monotonic() > until:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            if result is not None:
                return result


def active_members(members: Iterable[Member]) -> list[Member]:
    """Return the processes that are active."""
    return [member for member in members if member.is_alive]


def describe_this_process() -> str:
    """Return a description of this process, as in `Member.process`."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def members_command(existing: JobInfo | None = None) -> str:
    """Return the command that lists the processes of a plan.

    Args:
        existing: The work of the processes, whose command names the plan; None if unknown.
    """
    words = split(existing.command) if existing else []
    return action("plan_status", words[2] if words[:2] == ["ckpt", "run"] else PLAN)


def parse_share(value: Any) -> Share | None:
    """Parse a share from a journal; return None if it is malformed."""
    match value:
        case [str(name), int(first), int(stop)]:
            return Share(name, first, stop)
    return None
