"""Report locks in a bucket: their owner, their age, and the command that releases them."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.text import format_age
from ckpttools.diagnosis.base import INFO, WARNING, Check, Finding
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.stores.abilities import SupportsLocks


def _examine(inventory: Inventory) -> Iterator[Finding]:
    path = inventory.path
    if not isinstance(path.store, SupportsLocks):
        return
    for lock in path.store.locks(path.key):
        problem = f"a lock of {lock.owner}, last renewed {format_age(lock.age)} ago"
        if lock.is_held:
            reason = "the process that writes here renews it every few seconds; other writers are refused"
            do = f"wait until that process is done; if it has ended, release the lock: {lock.release}"
            yield Finding(INFO, lock.location, problem, reason, do, command=lock.release)
        else:
            reason = "its process has ended: the next command that writes here takes over the lock"
            do = f"run the command again, or release the lock: {lock.release}"
            yield Finding(WARNING, lock.location, problem, reason, do, command=lock.release)


CHECK = Check("locks", "locks of processes that write to a bucket", _examine)
