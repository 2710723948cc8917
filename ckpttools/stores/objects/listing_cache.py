"""A short-lived cache of object store listings, which saves requests.

The search for a checkpoint needs dozens of names in the same few directories. One listing returns everything
below a key with sizes and ETags, at a thousand names per request. The first access to a directory therefore
lists it completely, and later ones are answered from the cache.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import StorageError
from ckpttools.stores.base import FileKind, Status
from ckpttools.stores.objects.client import Object, name_collision

# If a directory has more objects than this, it is listed without its subdirectories, after 5 wasted requests.
_MAX_OBJECTS = 5000
# How long a listing is valid: this many seconds, or this multiple of the time it took.
_VALID_SECONDS = 5.0
_VALID_FACTOR = 10
_FILE_NAME = re.compile(r"\.[A-Za-z]\w*$")
_DIRECTORY = Status(FileKind.DIRECTORY)


class Source(Protocol):
    """The store behind the cache. Its methods raise StorageError if there is no response."""

    def uri(self, key: str) -> str:
        """Return the URL of a key."""

    def head(self, key: str) -> Status | None:
        """Return the status of an object; None if it does not exist."""

    def objects_below(self, key: str, limit: int | None = None) -> Sequence[Object] | None:
        """Return all objects below a key; None if there are more than `limit`."""

    def names_below(self, key: str) -> Mapping[str, Status]:
        """Return the objects and directories directly below a key, by name."""


@dataclass(frozen=True)
class Listing:
    """A listing of all objects below a key.

    Attributes:
        asked: Time of the request, by the monotonic clock.
        until: End of validity, by the monotonic clock.
        directories: The entries of each relative directory, by name.
        objects: All objects below the key; None if subdirectories were not listed.
    """

    asked: float
    until: float
    directories: Mapping[str, Mapping[str, Status]]
    objects: Sequence[Object] | None = None

    @property
    def is_deep(self) -> bool:
        return self.objects is not None

    def tells(self, rest: str) -> bool:
        """Return whether the listing covers a relative key."""
        first, _, below = rest.partition("/")
        return self.is_deep or not below or self.directories[""].get(first) != _DIRECTORY

    def status(self, rest: str) -> Status | None:
        """Return the status of a relative key, or None if it does not exist."""
        if not rest:
            return _DIRECTORY
        directory, _, name = rest.rpartition("/")
        return self.directories.get(directory, {}).get(name)


class KnownObjects:
    """Answers from cached listings, and requests new listings if that saves requests."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._listings: dict[str, Listing] = {}
        self._unlistable: set[str] = set()
        self._asked_in: set[str] = set()
        self._lock = threading.Lock()

    def forget(self, key: str) -> None:
        """Discard all listings that include a key or anything below it."""
        with self._lock:
            for item in [listing for listing in self._listings if listing.startswith(f"{key}/")]:
                del self._listings[item]
            for above in _key_and_ancestors(key):
                self._listings.pop(above, None)

    def status(self, key: str) -> Status | None:
        """Return the status of a key; None if it does not exist."""
        for listing, rest in self._valid_listings(key, time.monotonic()):
            if listing.tells(rest):
                return listing.status(rest)
        return self._request_status(key)

    def status_after(self, key: str, moment: float) -> Status | None:
        """Return a status newer than a moment of the monotonic clock; also lists known siblings."""
        for listing, rest in self._valid_listings(key):
            if rest and listing.tells(rest):
                above = key.removesuffix(rest).rstrip("/")
                return (listing if listing.asked > moment else self._list(above)).status(rest)
        return self._source.head(key)

    def names(self, key: str) -> Mapping[str, Status]:
        """Return the entries directly below a key, by name; empty if the key is not a directory."""
        for listing, rest in self._valid_listings(key, time.monotonic()):
            if listing.is_deep or not rest:
                break
        else:
            listing, rest = self._list(key), ""
        result = listing.directories.get(rest, {})
        start = f"{rest}/" if rest else ""
        for name, status in result.items():
            if status.kind is FileKind.FILE and start + name in listing.directories:
                raise name_collision(self._source.uri(f"{key}/{name}"))
        return result

    def objects(self, key: str) -> Sequence[Object]:
        """Return all objects below a key."""
        for listing, rest in self._valid_listings(key, time.monotonic()):
            if listing.objects is not None:
                start = f"{rest}/" if rest else ""
                below = (item for item in listing.objects if item[0].startswith(start))
                return self._distinct(key, [(name[len(start) :], result) for name, result in below])
        result = self._list(key).objects
        return self._distinct(key, self._source.objects_below(key) or () if result is None else result)

    def _distinct(self, key: str, objects: Sequence[Object]) -> Sequence[Object]:
        """Return objects below a key; raise FormatError if an object has the same name as a directory."""
        directories = _directories(objects)
        for name, _ in objects:
            if name in directories:
                raise name_collision(self._source.uri(f"{key}/{name}"))
        return objects

    def _valid_listings(self, key: str, now: float = 0.0) -> Iterator[tuple[Listing, str]]:
        """Yield valid listings of the key and its ancestors, the nearest first, with the relative key."""
        for above in _key_and_ancestors(key):
            listing = self._listings.get(above)
            if listing and now < listing.until:
                yield listing, key[len(above) + 1 :]

    def _request_status(self, key: str) -> Status | None:
        """Request the status of a key that no listing covers."""
        above = key.rpartition("/")[0]
        with self._lock:
            is_first = above not in self._asked_in
            self._asked_in.add(above)
        # A second request in the same directory suggests that more will follow, so list it.
        if above and not is_first and (listing := self._list_if_allowed(above)):
            return listing.status(key[len(above) + 1 :])
        is_file_first = bool(_FILE_NAME.search(key)) and "/" in key
        if is_file_first and (result := self._source.head(key)):
            return result
        if "/" not in key:
            self._list(key)  # This raises an error if the bucket does not exist.
            return _DIRECTORY
        if self._list(key).directories[""]:
            return _DIRECTORY
        return None if is_file_first else self._source.head(key)

    def _list_if_allowed(self, key: str) -> Listing | None:
        """List a directory without subdirectories; return None if the user may read but not list it."""
        if key in self._unlistable:
            return None
        try:
            return self._list(key, deep=False)
        except StorageError:
            self._unlistable.add(key)
            return None

    def _list(self, key: str, deep: bool = True) -> Listing:
        requested_at = time.monotonic()
        objects = self._source.objects_below(key, _MAX_OBJECTS) if deep else None
        directories = {"": self._source.names_below(key)} if objects is None else _directories(objects)
        now = time.monotonic()
        until = now + max(_VALID_SECONDS, _VALID_FACTOR * (now - requested_at))
        listing = Listing(requested_at, until, directories, objects)
        # There can be nothing below a file either.
        if directories[""]:
            with self._lock:
                self._listings[key] = listing
        return listing


def _directories(objects: Iterable[Object]) -> Mapping[str, Mapping[str, Status]]:
    """Group objects into the entries of each directory."""
    result: dict[str, dict[str, Status]] = {"": {}}
    for key, status in objects:
        above, _, name = key.rpartition("/")
        is_new = above not in result
        result.setdefault(above, {})[name] = status
        while above and is_new:
            above, _, name = above.rpartition("/")
            is_new = above not in result
            result.setdefault(above, {}).setdefault(name, _DIRECTORY)
    return result


def _key_and_ancestors(key: str) -> Iterator[str]:
    """Iterate over a key and its ancestors, the nearest first."""
    while key:
        yield key
        key = key.rpartition("/")[0]
