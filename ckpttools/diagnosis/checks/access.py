"""Report files and directories without read access."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.errors import StorageError
from ckpttools.diagnosis.base import ERROR, Check, Finding, quote_local_path
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.stores.location import Location

_UNREADABLE_TEXT = "nothing in it can be read"


def _examine(inventory: Inventory) -> Iterator[Finding]:
    for location, error in inventory.denied.items():
        if location.store.scheme == "file":
            yield _finding(location, error.raw.got or error.raw.message, "rX")
        else:
            yield Finding(
                ERROR,
                str(location),
                error.raw.got or error.raw.message,
                _UNREADABLE_TEXT,
                error.raw.hint or "",
            )
    for directory in inventory.directories:
        for name in directory.files:
            path = directory.path / name
            if path.is_link() and not _leads_somewhere(path):
                yield Finding(
                    ERROR,
                    str(path),
                    f"a symbolic link to nothing: {path.readlink()}",
                    "its target was moved or deleted",
                    "copy the files themselves: cp -rL SRC DST",
                )
            elif not path.may_read():
                yield _finding(path, "no permission to read it", "r")


def _leads_somewhere(path: Location) -> bool:
    try:
        return path.exists()
    except StorageError:
        return True  # The path exists but cannot be accessed.


def _finding(path: Location, problem: str, bits: str) -> Finding:
    do = f"chmod u+{bits} {quote_local_path(path)}"
    return Finding(ERROR, str(path), problem, _UNREADABLE_TEXT, do, command=do)


CHECK = Check("access", "files and directories that cannot be read, broken links", _examine)
