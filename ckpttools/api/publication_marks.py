"""Record the publication of a plan in a small file next to the plan, for processes that start later.

PLAN.published   the plan, the destination, and the file there that proves the checkpoint complete
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, DestinationExistsError
from ckpttools.core.message_terms import action, option
from ckpttools.plan.plan_file import PlanFile
from ckpttools.stores.abilities import SupportsCacheInvalidation
from ckpttools.stores.base import FileKind
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import PLAN_MARK
from ckpttools.stores.shares import PublishedError

SUFFIX = ".published"
# Maximum number of inspected files: those nearest to the top, which are small and written last, and some of
# the rest.
_MOST_FILES = 16


@dataclass(frozen=True, slots=True, repr=False)
class PublishedPlan:
    """A plan whose checkpoint was published.

    Attributes:
        destination: Location of the checkpoint.
        plan: Fingerprint of the plan.
        published: Time of publication in seconds since 1970.
        state: "complete".
    """

    destination: Location
    plan: str
    published: float
    state: str = "complete"

    def __repr__(self) -> str:
        when = datetime.fromtimestamp(self.published, UTC).isoformat(" ", "seconds")
        return f"<Published {self.destination}: complete since {when}>"


def published_at(file: PlanFile, destination: Location) -> PublishedPlan | None:
    """Return the record of a published plan if its checkpoint is still at the destination; otherwise None.

    Raises:
        StorageError: The destination cannot be inspected.
    """
    declared = _said(file)
    if declared.get("plan") != file.checksum:
        return None
    marks, when = declared.get("files"), declared.get("published")
    if not isinstance(marks, dict) or not isinstance(when, int | float) or not marks:
        return None
    # Another kind of store has the same files with other versions.
    is_same_kind = declared.get("scheme") == destination.store.scheme
    compared = 2 if is_same_kind else 1
    result = marks_of(destination, marks)
    if any(result.get(name, [])[:compared] != mark[:compared] for name, mark in marks.items()):
        return None
    return PublishedPlan(destination, file.header.plan, when)


def check_unpublished(file: PlanFile, destination: Location) -> None:
    """Refuse to start a plan whose destination is occupied.

    Raises:
        PublishedError: The plan was published.
        DestinationExistsError: The destination has content, and no record next to the plan shows that the
            plan created it. Either the plan was published without a record, or something else has been
            written there since.
    """
    if published_at(file, destination) is not None:
        raise PublishedError(f"{destination} is already published: all parts are done")
    if is_new(file, destination):
        raise _new(file, destination)


def is_new(file: PlanFile, destination: Location) -> bool:
    """Return whether the destination was created after the plan was written.

    Raises:
        StorageError: The destination cannot be inspected.
    """
    now = marks_of(destination)
    return now != file.header.replaced and destination.exists()


def _new(file: PlanFile, destination: Location) -> DestinationExistsError:
    note = "a note next to the plan" if file.location is None else str(_trace(file.location))
    since = "had other content" if file.header.replaced else "did not exist"
    return DestinationExistsError(
        f"{destination} exists, and {since} when the plan was made",
        got="a checkpoint that a single run of the plan's command has completed, or that another command "
        "wrote; or this plan's, whose note was lost",
        expected=f"no change since the plan was made, or {note}, which publishing writes",
        hint=f"if {action('summary', str(destination))} shows the expected checkpoint, nothing is left to "
        "do; "
        f"otherwise choose another destination, or {option('overwrite', True)}: it replaces what exists when "
        "it is made",
    )


def note_published(file: PlanFile, destination: Location) -> None:
    """Record next to a plan that its checkpoint was published.

    Raises:
        UsageError, StorageError: Nothing can be written next to the plan.
    """
    if file.location is None:
        return
    declared = {
        "plan": file.checksum,
        "destination": str(destination),
        "scheme": destination.store.scheme,
        "published": time.time(),
        "files": marks_of(destination),
    }
    _trace(file.location).put(json.dumps(declared, indent=1).encode())


def marks_of(destination: Location, names: Mapping[str, object] | None = None) -> dict[str, list[object]]:
    """Return size and version of files of a checkpoint by name: the given files, or a few near the top."""
    if isinstance(destination.store, SupportsCacheInvalidation):
        # The cached state of the files may be outdated.
        destination.store.forget(destination.key)
    result: dict[str, list[object]] = {}
    for name in islice(_near_the_top(destination), _MOST_FILES) if names is None else names:
        status = (destination / name).status()
        if status is not None:
            result[name] = [status.size, status.version]
    return result


def _near_the_top(destination: Location) -> list[str]:
    """Yield names of files near the top; none if the destination is not a directory."""
    if not destination.is_dir():
        return []
    level, names = [""], list[str]()
    while level and len(names) < _MOST_FILES:
        below: list[str] = []
        for directory in level[:_MOST_FILES]:
            for entry in sorted((destination / directory).entries() if directory else destination.entries()):
                name = f"{directory}/{entry.name}".lstrip("/")
                if entry.kind is FileKind.DIRECTORY:
                    below.append(name)
                elif entry.kind is FileKind.FILE and name != PLAN_MARK:
                    names.append(name)
        level = below
    return names


def _trace(plan: Location) -> Location:
    return plan.with_name(plan.name + SUFFIX)


def _said(file: PlanFile) -> Mapping[str, object]:
    """Return the record next to a plan; empty if it cannot be read."""
    if file.location is None:
        return {}
    with suppress(CheckpointError, ValueError):
        result = json.loads(_trace(file.location).read_bytes())
        if isinstance(result, dict):
            return result
    return {}
