"""Send requests to buckets with obstore: identity, timeouts and retries."""

from __future__ import annotations

import http.client
import re
import shlex
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ckpttools.core.dataclass import dataclass
from ckpttools.core.details import log_detail
from ckpttools.core.errors import FormatError, StorageError
from ckpttools.stores.base import FileKind, Status
from ckpttools.stores.certificates import added_certificates
from ckpttools.stores.costs import Meter
from ckpttools.stores.objects.errors import (
    BucketRequest,
    MessageTerms,
    add_retries,
    explain_error,
    has_invalid_key,
    is_absent_object,
    is_changed_object,
    is_listing_unsupported,
    is_not_the_api,
    is_refused_without_code,
    is_truncated,
    unusable_credentials,
    wrong_api_error,
)

Object: TypeAlias = tuple[str, Status]
"""The relative key of an object, and its status."""

CONNECT_SECONDS = 10.0
# Timeout before the first byte of a response, and between two reads.
STALL_SECONDS = 30.0
# Timeout for a complete response: 8 MiB at 30 KB/s.
ANSWER_SECONDS = 300.0
# Typing errors and missing connections should be reported soon. Once a bucket has responded, hours of work
# may depend on it, so requests are retried after 0.1 to 15 s (429, 408, 5xx, broken connections).
FIRST_RETRIES, FIRST_SECONDS = 4, 10.0
RETRIES, RETRY_SECONDS = 10, 180.0
# Timeout for deletions, which cannot have conditions: none may be in flight when another process takes over
# an expired lock.
SHORT_TIMEOUT_SECONDS = 15.0
# obstore resumes truncated objects but never repeats listings. `Bucket` repeats them with the same number of
# tries and the same pauses as obstore.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 15.0
_NAMES_PER_PAGE = 1000
# Prefix of versions for objects without an ETag.
_BY_TIME = "changed "
_ENDPOINT = re.compile(r"https?://[^\s\[\]]*(\[[0-9A-Fa-f:.]+\][^\s\[\]]*)?")
# Keys that obstore does not accept.
_UNUSABLE = re.compile(r"[\x00-\x1f\x7f]|(^|/)\.\.?(/|$)")
_LOGIN = re.compile(r"(?<=//)[^/@]*(?=@)")
_Answer = TypeVar("_Answer")
Version: TypeAlias = Mapping[str, str]
"""Identifies the content of an object by its ETag and, if the store has them, its generation."""

QUOTED, UNQUOTED, IGNORED = "quoted", "unquoted", "ignored"


@dataclass(frozen=True, slots=True)
class Conditions:
    """The write conditions that a bucket honors (`ckpttools.stores.objects.writing`).

    Attributes:
        creates: Whether objects can be created on the condition that none exists.
        replaces: The spelling of the tag in a conditional replacement; `IGNORED` if no spelling works.
    """

    creates: bool = True
    replaces: str = QUOTED

    def expected(self, version: Version) -> dict[str, str]:
        """Return the version in the spelling that the bucket compares in a conditional replacement."""
        if self.replaces != UNQUOTED:
            return dict(version)
        return {**version, "e_tag": version.get("e_tag", "").strip('"')}


def is_usable(key: str) -> bool:
    """Return whether an object can have this key."""
    return not _UNUSABLE.search(key)


class ObjectChangedError(Exception):
    """An object has a different version from the requested one."""


class Access(NamedTuple):
    """The settings for accessing a bucket.

    Attributes:
        kind: Name of the class in `obstore.store`.
        config: Arguments of the class.
        identity: The identity of the client, for messages.
        endpoint: URL of a server other than the cloud's own.
        log_in: Hint for authentication if it differs from that of the cloud's own tools, otherwise "".
    """

    kind: str
    config: Mapping[str, Any]
    identity: str
    endpoint: str = ""
    log_in: str = ""


class Bucket:
    """A bucket. Keys are relative to it; "" is its root.

    Args:
        name: Name of the bucket.
        location: URL of the bucket, for messages.
        access: How to reach the bucket.
        words: The cloud's terms, for messages.
        meter: Counts requests, pages of listings, and bytes of objects. It does not see internal requests of
            obstore: retries, tokens, the bytes of listings, and pages that a server makes shorter than a
            thousand names.

    Attributes:
        conditions: The write conditions that the bucket honors; until it is probed, all of them.
        is_probed: Whether the bucket was probed.
    """

    def __init__(self, name: str, location: str, access: Access, words: MessageTerms, meter: Meter) -> None:
        self._name, self._location = name, location
        self._access = access
        self._meter = meter
        self._endpoint = _LOGIN.sub("…", access.endpoint)
        # obstore panics with other endpoints.
        if access.endpoint and not _ENDPOINT.fullmatch(access.endpoint):
            raise StorageError(
                "the endpoint in the environment is not a URL",
                location=location,
                got=self._endpoint,
                expected="http://HOST:PORT or https://HOST",
                hint=f"correct {words.endpoint}",
            )
        self._words = words
        self._has_answered = self._has_api = False
        self.conditions, self.is_probed = Conditions(), False

    def uri(self, key: str) -> str:
        """Return the URL of a key."""
        return f"{self._location}/{key}" if key else self._location

    def removal(self, key: str) -> str:
        """Return the command that deletes one object."""
        words = (part.format(bucket=self._name, key=key) for part in self._words.remove_object.split())
        return shlex.join(words)

    def head(self, key: str) -> Status | None:
        """Return the status of an object; None if it does not exist. Raises StorageError without a
        response.
        """
        import obstore

        try:
            result = self.ask("cannot inspect", key, lambda client: obstore.head(client, key))
        except FileNotFoundError:
            return None
        return _status(result)

    def objects_below(self, key: str, limit: int | None = None) -> Sequence[Object] | None:
        """Return all objects below a key; same errors as `head`.

        Returns:
            The objects; None if there are more than `limit`, or one has an unreadable name.
        """
        import obstore
        from obstore.exceptions import BaseError

        pages = _Pages(key)

        def list_objects(client: Any) -> list[Object] | None:
            start = pages.next_start()
            try:
                listing = obstore.list(client, key or None, offset=start, chunk_size=_NAMES_PER_PAGE)
                for number, page in enumerate(listing):
                    self._meter.add(requests=min(number, 1))
                    pages.add(page)
                    if limit is not None and len(pages.result) > limit:
                        return None
            except BaseError as error:
                # A listing by directory fails only in the directory of that object.
                if limit is None or not has_invalid_key(error):
                    raise
                return None
            return pages.result

        try:
            result = self._list(key, list_objects, lambda: len(pages.result))
        except FileNotFoundError:
            return []
        self._check_api(key, is_empty=result == [])
        return result and _drop_directory_markers(result)

    def names_below(self, key: str) -> Mapping[str, Status]:
        """Return the objects and directories directly below a key, by name; same errors as `head`."""
        import obstore

        try:
            result = self._list(key, lambda client: obstore.list_with_delimiter(client, key or None))
        except FileNotFoundError:
            return {}
        count = len(result["common_prefixes"]) + len(result["objects"])
        self._meter.add(requests=max(0, count - 1) // _NAMES_PER_PAGE)
        self._check_api(key, is_empty=not count)
        names = [item.rpartition("/")[2] for item in result["common_prefixes"]]
        objects = dict(_relative_objects(key, result["objects"]))
        for name in names:
            # Web consoles create empty objects for directories.
            if name in objects and objects[name].size:
                raise name_collision(self.uri(f"{key}/{name}" if key else name))
        return {**objects, **dict.fromkeys(names, Status(FileKind.DIRECTORY))}

    def _check_api(self, key: str, *, is_empty: bool) -> None:
        """Raise StorageError if a server that answers every request with a web page sent an empty listing.

        Captive portals and web consoles do this, and obstore reads an HTML page as an empty listing. Until
        the bucket is known, the check takes one request for an object that cannot exist.
        """
        import obstore
        from obstore.exceptions import BaseError

        if self._has_api or not is_empty:
            self._has_api = True
            return
        absent = "/".join(filter(None, (key, f"ckpttools-{uuid.uuid4().hex}")))

        def look(client: Any) -> bool:
            try:
                obstore.head(client, absent)
            except (BaseError, OSError) as error:
                return not is_not_the_api(error)
            return False

        self._has_api = self.ask("cannot list", key, look)
        if not self._has_api:
            raise wrong_api_error(
                self._new_request("cannot list", key), "a response for an object that does not exist"
            )

    def read(self, key: str, version: str, start: int, length: int) -> memoryview:
        """Read bytes of an object into a new buffer.

        Raises:
            ObjectChangedError: The object has another version.
            FileNotFoundError: The object does not exist.
            FormatError: The object is too short.
            StorageError: As for `head`.
        """
        import obstore

        options: Any = {"range": (start, start + length), **_version_options(version)}

        def read(client: Any) -> memoryview:
            response = obstore.get(client, key, options=options)
            # Not every S3-compatible server respects `If-Match`.
            if _status(response.meta).version != version:
                raise ObjectChangedError
            return memoryview(response.bytes())

        content = self.ask("cannot read", key, read)
        self._meter.add(nbytes=len(content))
        if len(content) != length:
            raise FormatError(f"{self._location}/{key} ends too early", got=f"{start + len(content)} bytes")
        return content

    def _list(
        self, key: str, list_page: Callable[[Any], _Answer], progress: Callable[[], int] = lambda: 0
    ) -> _Answer:
        """List a directory, repeating truncated listings; same errors as `head`.

        Args:
            key: Key of the directory.
            list_page: Lists the directory with obstore's client.
            progress: Returns the number of objects listed so far. Progress resets the number of tries.
        """
        retries, seconds = (RETRIES, RETRY_SECONDS) if self._has_answered else (FIRST_RETRIES, FIRST_SECONDS)

        def again(client: Any) -> _Answer:
            tries, before, started = 0, progress(), time.monotonic()
            while True:
                try:
                    return list_page(client)
                except Exception as error:
                    if not is_truncated(error):
                        raise
                    if progress() > before:
                        tries, before, started = 0, progress(), time.monotonic()
                    pause = min(_PAUSE_SECONDS * 2**tries, _LONGEST_PAUSE_SECONDS)
                    if tries >= retries or time.monotonic() - started + pause > seconds:
                        raise add_retries(error, tries) from error
                tries += 1
                log_detail("listing of %s ended early; the next attempt in %.1f s", self.uri(key), pause)
                time.sleep(pause)
                self._meter.add(requests=1)

        return self.ask("cannot list", key, again)

    def ask(
        self,
        activity: str,
        key: str,
        question: Callable[[Any], _Answer],
        *,
        requests: int = 1,
        is_brief: bool = False,
    ) -> _Answer:
        """Send a request; same errors as `read`.

        Args:
            activity, key: The action and the object, for messages.
            question: Sends the request with obstore's client.
            requests: Number of requests to count.
            is_brief: Whether to give up after `SHORT_TIMEOUT_SECONDS`.

        Returns:
            The result of `question`.
        """
        from obstore.exceptions import BaseError

        self._meter.add(requests=requests)
        client = self._client_for(self._new_request(activity, key), is_brief=is_brief)
        try:
            response = question(client)
        except (BaseError, OSError, ValueError) as error:
            if is_absent_object(error) and not is_listing_unsupported(error):
                raise FileNotFoundError(key) from error
            if is_changed_object(error):
                raise ObjectChangedError from error
            cause = self._with_code(client, key, error) if is_refused_without_code(error) else error
            raise explain_error(cause, self._new_request(activity, key)) from error
        self._has_answered = True
        log_detail("%s %s", activity.removeprefix("cannot "), self.uri(key))
        return response

    def _new_request(self, activity: str, key: str) -> BucketRequest:
        access = self._access
        words = replace(self._words, log_in=access.log_in) if access.log_in else self._words
        return BucketRequest(activity, self.uri(key), self._name, access.identity, self._endpoint, words)

    def _with_code(self, client: Any, key: str, error: Exception) -> Exception:
        """Return the error with the server's error code, by reading a byte: other responses have no code."""
        import obstore
        from obstore.exceptions import BaseError

        self._meter.add(requests=1)
        try:
            obstore.get_range(client, key, start=0, end=1)
        except (BaseError, OSError, ValueError) as result:
            return error if is_absent_object(result) else result
        return error

    def _client_for(self, request: BucketRequest, *, is_brief: bool) -> Any:
        from obstore.exceptions import BaseError

        try:
            return self._brief if is_brief else self._patient if self._has_answered else self._impatient
        except (BaseError, OSError, ValueError) as error:
            raise unusable_credentials(error, request) from error

    @cached_property
    def _impatient(self) -> Any:
        return self._client(FIRST_RETRIES, FIRST_SECONDS)

    @cached_property
    def _patient(self) -> Any:
        return self._client(RETRIES, RETRY_SECONDS)

    @cached_property
    def _brief(self) -> Any:
        return self._client(RETRIES, SHORT_TIMEOUT_SECONDS, SHORT_TIMEOUT_SECONDS)

    def _client(self, retries: int, seconds: float, answer_seconds: float = ANSWER_SECONDS) -> Any:
        import obstore.store

        is_encrypted = not self._access.endpoint.startswith("http://")
        certificates = added_certificates() if is_encrypted else ""
        return getattr(obstore.store, self._access.kind)(
            self._name,
            **self._access.config,
            client_options={
                "allow_http": not is_encrypted,
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "read_timeout": timedelta(seconds=STALL_SECONDS),
                "timeout": timedelta(seconds=answer_seconds),
                **({"root_certificate": certificates} if certificates else {}),
            },
            retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=seconds)},
        )


def _status(result: Any) -> Status:
    """Convert obstore's metadata of an object."""
    # Azure's listings omit the quotes.
    etag = (result["e_tag"] or "").strip('"')
    changed = result["last_modified"]
    modified = round(changed.timestamp() * 1e9)
    return Status(
        FileKind.FILE, result["size"], etag or f"{_BY_TIME}{changed.isoformat()}", modified=modified
    )


def _version_options(version: str) -> dict[str, object]:
    """Return the options that restrict a request to a version."""
    if version.startswith(_BY_TIME):
        return {}
    return {"if_match": version if version.startswith("W/") else f'"{version}"'}


def _relative_objects(key: str, result: Sequence[Any]) -> list[Object]:
    """Return objects by relative key, without the empty object for the directory itself."""
    start = f"{key}/" if key else ""
    return [(item["path"][len(start) :], _status(item)) for item in result if item["path"] != key]


def name_collision(location: str) -> FormatError:
    """Return the error for an object whose key is also a directory of other objects."""
    return FormatError(
        f"{location} is both an object and the directory of other objects",
        got=f"objects {location} and {location}/…",
        expected="a name that is either a file or a directory",
        hint="rename or delete the object, or move the objects below it",
    )


class _Pages:
    """The objects of a listing, page by page.

    Args:
        key: Key of the directory.

    Attributes:
        result: The objects so far.
    """

    def __init__(self, key: str) -> None:
        self._key, self._last, self._is_sorted = key, "", True
        self.result: list[Object] = []

    def next_start(self) -> str | None:
        """Return the path to continue after; None if the listing must restart, discarding its objects."""
        if not self._is_sorted:
            self.result, self._last, self._is_sorted = [], "", True
        return self._last or None

    def add(self, page: Sequence[Any]) -> None:
        """Add a page, skipping objects before the start path, which some servers ignore."""
        paths = [item["path"] for item in page]
        if not self.result or not self._is_sorted:
            new = page
        else:
            new = [item for item in page if item["path"] > self._last]
        self.result += _relative_objects(self._key, new)
        # S3 directory buckets list in any order, and the path of an empty object `name/` lacks the `/`.
        self._is_sorted &= paths == sorted(paths)
        self._last = max([self._last, *paths])


def _drop_directory_markers(objects: list[Object]) -> list[Object]:
    """Remove the empty objects `name/` that web consoles create for directories; their keys lack the `/`."""
    if all(result.size for _, result in objects):
        return objects
    names = (name for name, _ in objects)
    directories = {name[:at] for name in names for at, letter in enumerate(name) if letter == "/"}
    return [(name, result) for name, result in objects if result.size or name not in directories]


# The address is the same in every cloud, but the protocols differ.
_ADDRESS = "169.254.169.254"
_SECONDS = 1.0


def metadata_headers(path: str, headers: Mapping[str, str]) -> Mapping[str, str] | None:
    """Return response headers of the machine's metadata server; None without a response within a second."""
    connection = http.client.HTTPConnection(_ADDRESS, timeout=_SECONDS)
    try:
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        return dict(response.headers.items()) if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
