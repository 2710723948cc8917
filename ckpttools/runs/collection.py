"""List the checkpoints and runs in a directory that is not itself a checkpoint."""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.core.tabular import Tabular
from ckpttools.core.text import plural
from ckpttools.formats.detect import Detected, LocationState
from ckpttools.runs.listing import measure_usage
from ckpttools.stores.concurrency import map_concurrently


@dataclass(frozen=True, slots=True)
class MemberListing:
    """A checkpoint or run in a directory of several.

    Attributes:
        name: Path below the directory; "" for the directory itself.
        kind: "run", "step", "item", "hosts", "model", "adapter", "checkpoint", "file" or "interrupted
            conversion".
        format: Name of the format; None if it is unknown.
        steps: Number of steps of a run; None for other kinds.
        nbytes: Bytes of all files, counting each file once.
        modified: Time of the last change of a file, in seconds since 1970; None if the store does not report
            it.
        state: "complete", "unfinished", "damaged" or "interrupted"; "unreadable" if it cannot be examined.
            The state of a run is that of its latest step, unless an earlier step is complete.
        reason: Why the member is not complete; None if it is complete, or if the state needs no explanation.
    """

    name: str
    kind: str
    format: str | None
    steps: int | None
    nbytes: int
    modified: float | None
    state: str
    reason: str | None = None


@dataclass(frozen=True, repr=False)
class CollectionListing(Tabular):
    """A directory of checkpoints or runs that do not belong together.

    Attributes:
        path: The directory.
        members: The checkpoints and runs in it.
        is_truncated: Whether there are more directories than are searched.
    """

    rows_field = "members"

    path: str
    members: tuple[MemberListing, ...]
    is_truncated: bool = False

    def __repr__(self) -> str:
        return f"<CollectionListing of {self.path}: {plural(len(self.members), 'member')}>"


def list_collection(detected: Detected) -> CollectionListing:
    """List the members of a directory. Reads names and metadata, but no arrays.

    Raises:
        StorageError: The directory cannot be listed.
    """
    members = detected.members
    listings = map_concurrently(
        detected.location.store,
        lambda member: list_member(member, member.name_below(detected.location)),
        members,
    )
    return CollectionListing(str(detected.location), tuple(listings), detected.is_truncated)


def list_member(detected: Detected, name: str = "") -> MemberListing:
    """List one checkpoint or run under a name."""
    kind, reason, steps, format = str(detected.kind), None, None, None
    try:
        state, reason = str(detected.state), detected.unfinished_reason
        steps, format = detected.step_count, detected.format_name
        nbytes, modified = _measure(detected)
    except CheckpointError as error:
        return MemberListing(name, kind, format, steps, 0, None, "unreadable", error.raw.line)
    return MemberListing(
        name,
        kind,
        format,
        steps,
        nbytes,
        modified,
        state,
        None if state == LocationState.COMPLETE else reason,
    )


def _measure(detected: Detected) -> tuple[int, float | None]:
    """Return the total size of the files, and the time of the last change."""
    if detected.is_directory:
        usage = measure_usage(detected.location)
        nbytes, modified = usage.nbytes, usage.modified
    else:
        status = detected.location.stat()
        nbytes, modified = status.size, status.modified
    return nbytes, None if modified is None else modified / 1e9
