"""Several processes that make one checkpoint: each does a share of the groups of one plan.

    with staging.joined(purpose, nbytes, share) as work:    beside other shares, never beside a single run
        files = work.data_files(sizes, heads)
        work.enter(records)                                 in a journal of this process's own

`Staging.opened` refuses as long as one of them is at work; it finds their records beside those of single runs
of the plan, and takes their journals away with its own. What each has written counts whatever becomes of it:
any other share, of any number, goes on from there.

**In a directory** each process holds the journal's lock together with the others, and has a file of its own
in `<destination>.partial/parts/`, which it alone writes and keeps locked.

**In a bucket** each has an object in `<destination>.partial/parts/` that it writes again every few seconds.
It looks for the lock of a single run after it has put that; who takes the lock looks for these objects after
that. So at least one of two that begin at the same moment sees the other, and withdraws.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import DestinationExistsError, UsageError
from ckpttools.core.message_terms import plan_step
from ckpttools.core.text import first_names, format_age
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import DataFiles, JobInfo, LockedError, Record

Prepared = TypeVar("Prepared")
_LOOK_SECONDS = 0.25

DONE = "done"
"""`Member.outcome` of a process that has done all its tasks."""

PARTS = "parts"
"""Below `<destination>.partial`: a file or an object for each process that does a share."""


@dataclass(frozen=True, slots=True)
class Share:
    """Groups of a plan that one process does.

    Attributes:
        name: for messages, such as "3/8".
        first, stop: their numbers.
    """

    name: str
    first: int
    stop: int

    def meets(self, other: Share) -> bool:
        """Whether two shares have a group in common."""
        return max(self.first, other.first) < min(self.stop, other.stop)


@dataclass(frozen=True, slots=True)
class Member:
    """A process that does a share, or did.

    Attributes:
        token: what tells it from all others.
        share: its groups.
        process: which, in words.
        began, seen: when it began and when it was seen last, in seconds since 1970.
        is_alive: whether it is at work, as far as is known.
        outcome: "done", or what has ended it; "" while it is at work, or where it was cut off.
        records: what it has entered.
        age: seconds since it was seen last, by the clock of the store.
        release: the command that releases its claim.
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
    """How far a plan has come at a destination.

    Attributes:
        is_begun: whether anything of this plan is there.
        is_published: whether the checkpoint has its name, and only traces of the work are left.
        other: what else is there, in words: the beginning of another conversion; "" if nothing is.
        records: what single runs have entered, and processes whose share is not known any more.
        members: the processes, in the order in which they began.
    """

    is_begun: bool
    is_published: bool = False
    other: str = ""
    records: Sequence[Record] = ()
    members: Sequence[Member] = ()

    @property
    def all_records(self) -> list[Record]:
        """What all have entered."""
        return [*self.records, *(record for member in self.members for record in member.records)]


class PartWork(Protocol):
    """A destination as one of several processes has it; see `publishing.Work`.

    Attributes:
        token: no other process has the same: what is appended goes to files named after it.
    """

    token: str

    @property
    def content(self) -> Location:
        """Where the checkpoint grows."""

    @property
    def records(self) -> Sequence[Record]:
        """What all processes had entered when this one began."""

    def data_files(self, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> DataFiles:
        """As `Work.data_files`."""

    def enter(self, records: Iterable[Record]) -> None:
        """As `Work.enter`."""

    def discard(self) -> None:
        """Gives up what this process has entered."""


@runtime_checkable
class SharedStaging(Protocol):
    """A destination that several processes can write."""

    def joined(self, purpose: JobInfo, nbytes: int, share: Share) -> AbstractContextManager[PartWork]:
        """Takes a share of a destination, which is prepared for the plan by whoever comes first.

        Raises:
            LockedError: a single run is at work, or another process on some of these groups.
            CheckpointError: as `Staging.opened`.
        """

    def standing(self, plan: str) -> Standing:
        """How far a plan has come; takes no lock, and changes nothing."""


def shared_staging(staging: object, destination: Location) -> SharedStaging:
    """The same staging, of which several processes can have a share.

    Raises:
        UsageError: one process has to write it all.
    """
    if isinstance(staging, SharedStaging):
        return staging
    raise UsageError(
        f"what is written to {destination.store.scheme}:// is written by one process",
        location=destination,
        expected="a local directory that all processes see, gs://, s3:// or az://",
        hint="convert to one of these, then copy the checkpoint with ckpt copy",
    )


def check_free(share: Share, members: Iterable[Member], location: object) -> None:
    """Raises LockedError if a process is at work on groups of a share."""
    for member in members:
        if member.is_alive and member.share.meets(share):
            raise claimed_error(
                f"another process is at work on tasks of part {share.name}", [member], location, "wait for it"
            )


def claimed_error(what: str, members: Sequence[Member], location: object, wait: str) -> LockedError:
    """Return the error of a destination that other processes write.

    Args:
        what: The first line of the error.
        members: The processes, at least one.
        location: The destination.
        wait: What to do as long as they are at work.
    """
    release = f"; if it is gone, release its claim: {members[0].release}" if members[0].release else ""
    return LockedError(what, location=location, got=first_names([*map(str, members)]), hint=wait + release)


class PublishedError(DestinationExistsError):
    """All parts are done, and the checkpoint has its name, or is being given it."""


def published(destination: object) -> PublishedError:
    """The error of who comes too late."""
    return PublishedError(
        f"{destination} is complete: all parts are done, and it has its name",
        expected="nothing more to do",
        hint=f"{plan_step('ckpttools.publish_plan', '--publish')} removes the files that are left next to it",
    )


def prepared(
    attempt: Callable[[], Prepared | None], is_preparing: Callable[[], bool], patience: float
) -> Prepared:
    """A destination that is prepared for the parts of a plan by whoever comes first; the others wait.

    Args:
        attempt: takes it where it is prepared, or prepares it and returns None.
        is_preparing: whether who has it alone is known to prepare it, for however long that takes.
        patience: seconds to wait for whoever else has it: it may be about to let go.

    Raises:
        LockedError: somebody else has it.
        CheckpointError: as `attempt`.
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
            time.sleep(_LOOK_SECONDS)
        else:
            if result is not None:
                return result


def at_work(members: Iterable[Member]) -> list[Member]:
    """Return the processes that are at work."""
    return [member for member in members if member.is_alive]


def this_process() -> str:
    """This process, as `Member.process` says it."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def who_does_what(begun: JobInfo | None = None) -> str:
    """Return the command that lists the processes of a plan.

    Args:
        begun: the work of these processes, whose command names the plan; None if it is unknown.
    """
    words = begun.command.split(" --part ")[0].partition("ckpt run ") if begun else ("", "", "")
    return plan_step("ckpttools.plan_status(plan)", "--status", words[2])


def share_of(declared: Any) -> Share | None:
    """A share as a journal says it; None for anything else."""
    match declared:
        case [str(name), int(first), int(stop)]:
            return Share(name, first, stop)
    return None
