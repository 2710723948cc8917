"""Locks in a bucket: who holds one, since when it was not renewed, and how it is released."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.text import age
from ckpttools.doctor.base import INFO, WARNING, Check, Finding
from ckpttools.doctor.inventory import Inventory
from ckpttools.stores.abilities import KeepsLocks


def _look(inventory: Inventory) -> Iterator[Finding]:
    path = inventory.path
    if not isinstance(path.store, KeepsLocks):
        return
    for lock in path.store.locks(path.key):
        what = f"a lock of {lock.owner}, last renewed {age(lock.age)} ago"
        if lock.is_held:
            why = "a process that writes here renews it every few seconds; others are refused meanwhile"
            do = f"wait until that process is done; if it is gone, release the lock: {lock.release}"
            yield Finding(INFO, lock.place, what, why, do, command=lock.release)
        else:
            why = "its process is gone: the next command that writes here takes the lock over"
            do = f"run the command again; or release the lock: {lock.release}"
            yield Finding(WARNING, lock.place, what, why, do, command=lock.release)


CHECK = Check("locks", "locks of processes that write to a bucket", _look)
