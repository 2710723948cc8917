"""Claims to shares of a conversion to a bucket: one object per process, `DST.partial/parts/TOKEN`.

A claim is a lock that no other process takes (`ckpttools.stores.objects.lock`); its content lists the groups
of its process. At the end it is not deleted but records the outcome. Finished tasks are in the journal.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import first_line
from ckpttools.core.message_terms import render
from ckpttools.stores.base import Status
from ckpttools.stores.concurrency import map_in_threads, write_concurrency
from ckpttools.stores.objects.client import Bucket
from ckpttools.stores.objects.lock import Lock, is_live, process_of
from ckpttools.stores.objects.writing import TakenError, put, read
from ckpttools.stores.publishing import Record
from ckpttools.stores.shares import DONE, PARTS, Member, Share, parse_share


@dataclass(frozen=True, slots=True)
class PartClaim:
    """The claim of this process to a share.

    Attributes:
        token: Unique name of the object.
        lock: The lock object.
    """

    token: str
    lock: Lock


@contextmanager
def hold_claim(bucket: Bucket, partial: str, location: str, plan: str, share: Share) -> Iterator[PartClaim]:
    """Claim a share in a `with` block, then record the outcome.

    Args:
        bucket: The bucket.
        partial: Key of the staging directory.
        location: The destination, for messages.
        plan: Fingerprint of the plan.
        share: The share to claim.

    Raises:
        StorageError: The store reports an error.
    """
    token = uuid.uuid4().hex[:12]
    key = f"{partial}/{PARTS}/{token}"
    declared = {"plan": plan, "share": [share.name, share.first, share.stop], "began": time.time()}
    lock = _HeldLock(bucket, key, location, declared)
    with lock:
        try:
            yield PartClaim(token, lock)
            lock.outcome = DONE
        except BaseException as error:
            lock.outcome = render(first_line(error))
            raise


class _HeldLock(Lock):
    """A held lock that records an outcome when it is released."""

    outcome = ""
    lapses = True

    def release(self) -> None:
        result = read(self._bucket, self._key)
        # A process that considered this one dead may have removed the object.
        if result and self._is_own(result[0]):
            content = {**json.loads(self._content()), "ended": self.outcome}
            with suppress(TakenError):
                put(self._bucket, self._key, json.dumps(content).encode(), instead_of=result[1])


def members(
    bucket: Bucket,
    partial: str,
    plan: str | None,
    done: Mapping[str, Sequence[Record]],
    now: float | None = None,
) -> list[Member]:
    """Return the processes that are working, or have worked, on shares of a plan.

    Args:
        bucket, partial: As for `hold_claim`.
        plan: Fingerprint of the plan; None for any plan.
        done: The records of each process, by token.
        now: Time of the bucket's clock; None uses the clock of this machine.

    Raises:
        StorageError: The store reports an error.
    """
    now = time.time() if now is None else now
    found: list[Member] = []
    for token, status, declared in _read_all(bucket, partial):
        share, last_seen = parse_share(declared.get("share")), (status.modified or 0) / 1e9
        if share is None or plan not in (None, declared.get("plan")):
            continue
        age, started = max(0.0, now - last_seen), declared.get("began")
        found.append(
            Member(
                token,
                share,
                process_of(declared),
                float(started) if isinstance(started, int | float) else last_seen,
                last_seen,
                is_alive="ended" not in declared and is_live(declared, now - last_seen),
                outcome=str(declared.get("ended", "")),
                records=done.get(token, ()),
                age=age,
                release=bucket.removal(f"{partial}/{PARTS}/{token}"),
            )
        )
    return sorted(found, key=lambda item: item.began)


def _read_all(bucket: Bucket, partial: str) -> Iterator[tuple[str, Status, dict[str, Any]]]:
    """Yield name, status and content of all claims; a job may have had a thousand."""
    result = list(bucket.objects_below(f"{partial}/{PARTS}") or ())
    contents = map_in_threads(
        write_concurrency(), lambda item: read(bucket, f"{partial}/{PARTS}/{item[0]}"), result
    )
    for (token, status), content in zip(result, contents, strict=True):
        yield token, status, _parse(content[0]) if content else {}


def _parse(content: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        result = json.loads(content)
        if isinstance(result, dict):
            return result
    return {}
