"""Buckets, asked through obstore: as whom, how long an answer is waited for, how often it is asked again."""

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
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, StorageError, UsageError
from ckpttools.stores.base import FileKind, Status
from ckpttools.stores.certificates import added_certificates
from ckpttools.stores.costs import Meter
from ckpttools.stores.objects.errors import (
    BucketRequest,
    MessageTerms,
    explained,
    is_broken_off,
    is_changed,
    is_no_key,
    is_no_listing,
    is_no_object,
    is_not_the_api,
    is_refused_without_code,
    not_the_api,
    repeated,
    unusable_credentials,
)

Object: TypeAlias = tuple[str, Status]
"""The rest of an object's key, and what it is."""

CONNECT_SECONDS = 10.0
# Before the first byte of an answer, and between two of them.
STALL_SECONDS = 30.0
# For all of one answer: 8 MiB at 30 KB/s.
ANSWER_SECONDS = 300.0
# Who mistypes a name or is not connected hears of it soon. Once a bucket has answered, hours of work may
# depend on its answering again: 0.1 to 15 s lie between two tries (429, 408, 5xx, broken connections).
FIRST_RETRIES, FIRST_SECONDS = 4, 10.0
RETRIES, RETRY_SECONDS = 10, 180.0
# For deletions, on which there are no conditions: none is under way any more when a lock that was held a
# moment before is another's.
BRIEF_SECONDS = 15.0
# obstore resumes a truncated object, but never repeats a listing. `Bucket` repeats listings with the tries
# and pauses of obstore.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 15.0
_NAMES_TO_A_PAGE = 1000
# How versions of objects begin that have no ETag.
_BY_TIME = "changed "
_ENDPOINT = re.compile(r"https?://[^\s\[\]]*(\[[0-9A-Fa-f:.]+\][^\s\[\]]*)?")
# What obstore does not take for a key.
_UNUSABLE = re.compile(r"[\x00-\x1f\x7f]|(^|/)\.\.?(/|$)")
_LOGIN = re.compile(r"(?<=//)[^/@]*(?=@)")
_Answer = TypeVar("_Answer")
Version: TypeAlias = Mapping[str, str]
"""Identifies the content of an object: its ETag and, if the store has them, its generation."""

QUOTED, UNQUOTED, IGNORED = "quoted", "unquoted", "ignored"


@dataclass(frozen=True, slots=True)
class Conditions:
    """The write conditions that a bucket honors (`ckpttools.stores.objects.conditions`).

    Attributes:
        creates: whether an object can be created only where none exists.
        replaces: the spelling of the tag in a conditional replacement; `IGNORED` if no spelling works.
    """

    creates: bool = True
    replaces: str = QUOTED

    def expected(self, version: Version) -> dict[str, str]:
        """Return the version for a conditional replacement, as the bucket compares it."""
        if self.replaces != UNQUOTED:
            return dict(version)
        return {**version, "e_tag": version.get("e_tag", "").strip('"')}


def is_usable(key: str) -> bool:
    """Whether an object can have this key."""
    return not _UNUSABLE.search(key)


class ObjectChangedError(Exception):
    """An object has another version than the one asked for."""


class Access(NamedTuple):
    """How a bucket is reached.

    Attributes:
        kind: name of the class in `obstore.store`.
        config: what it is made with.
        identity: as whom, for messages.
        endpoint: URL, where it is not the cloud's own.
        log_in: what to do about who asks, where that is not what the cloud's own tools want; "" where it is.
    """

    kind: str
    config: Mapping[str, Any]
    identity: str
    endpoint: str = ""
    log_in: str = ""


class Bucket:
    """One bucket. Keys are those in it; "" is what all of them are below.

    Args:
        name: of the bucket.
        location: the same as users write it, for messages.
        access: how it is reached.
        words: what messages say of its cloud.
        meter: counts questions, pages of listings, and bytes of objects. What obstore does by itself is not
            seen: tries after a failure, tokens that it fetches, the bytes of listings, pages that a server
            makes shorter than a thousand names.

    Attributes:
        conditions: the write conditions that the bucket honors; all of them until it is probed.
        is_probed: whether the bucket was probed.
    """

    def __init__(self, name: str, location: str, access: Access, words: MessageTerms, meter: Meter) -> None:
        self._name, self._location = name, location
        self._access = access
        self._meter = meter
        self._endpoint = _LOGIN.sub("…", access.endpoint)
        # obstore panics at others.
        if access.endpoint and not _ENDPOINT.fullmatch(access.endpoint):
            raise StorageError(
                "the endpoint that the environment names is no address",
                location=location,
                got=self._endpoint,
                expected="http://HOST:PORT or https://HOST",
                hint=f"correct {words.endpoint}",
            )
        self._words = words
        self._has_answered = self._has_api = False
        self.conditions, self.is_probed = Conditions(), False

    def uri(self, key: str) -> str:
        """A key as users write it."""
        return f"{self._location}/{key}" if key else self._location

    def removal(self, key: str) -> str:
        """Return the command that deletes one object."""
        words = (part.format(bucket=self._name, key=key) for part in self._words.remove_object.split())
        return shlex.join(words)

    def head(self, key: str) -> Status | None:
        """What an object is; None if there is none. Raises StorageError where there is no answer."""
        import obstore

        try:
            result = self.ask("cannot look at", key, lambda client: obstore.head(client, key))
        except FileNotFoundError:
            return None
        return _status(result)

    def objects_below(self, key: str, limit: int | None = None) -> Sequence[Object] | None:
        """All objects below a key; None if they are more than `limit`, or one has a name that cannot be read.
        Errors as `head`.
        """
        import obstore
        from obstore.exceptions import BaseError

        pages = _Pages(key)

        def listed(client: Any) -> list[Object] | None:
            start = pages.resume()
            try:
                listing = obstore.list(client, key or None, offset=start, chunk_size=_NAMES_TO_A_PAGE)
                for number, page in enumerate(listing):
                    self._meter.add(requests=min(number, 1))
                    pages.add(page)
                    if limit is not None and len(pages.result) > limit:
                        return None
            except BaseError as error:
                # A listing by directory fails only in the directory of that object.
                if limit is None or not is_no_key(error):
                    raise
                return None
            return pages.result

        try:
            result = self._list(key, listed, lambda: len(pages.result))
        except FileNotFoundError:
            return []
        self._check_api(key, is_empty=result == [])
        return result and _without_markers(result)

    def names_below(self, key: str) -> Mapping[str, Status]:
        """Objects and directories directly below a key, by name; errors as `head`."""
        import obstore

        try:
            result = self._list(key, lambda client: obstore.list_with_delimiter(client, key or None))
        except FileNotFoundError:
            return {}
        count = len(result["common_prefixes"]) + len(result["objects"])
        self._meter.add(requests=max(0, count - 1) // _NAMES_TO_A_PAGE)
        self._check_api(key, is_empty=not count)
        names = [item.rpartition("/")[2] for item in result["common_prefixes"]]
        objects = dict(_below(key, result["objects"]))
        for name in names:
            # Consoles make empty objects for directories.
            if name in objects and objects[name].size:
                raise name_collision(self.uri(f"{key}/{name}" if key else name))
        return {**objects, **dict.fromkeys(names, Status(FileKind.DIRECTORY))}

    def _check_api(self, key: str, *, is_empty: bool) -> None:
        """Raise StorageError if an empty listing comes from a server that answers every request with a page.

        Captive portals and consoles do, and obstore reads an HTML page as an empty listing. Takes one request
        until the bucket is known: for an object that cannot exist.
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
            raise not_the_api(self._asked("cannot list", key), "a response for an object that does not exist")

    def read(self, key: str, version: str, start: int, length: int) -> memoryview:
        """The bytes of an object from `start` on, so many, in memory of their own.

        Raises:
            ObjectChangedError: it has another version.
            FileNotFoundError: there is none.
            FormatError: it is shorter.
            StorageError: as `head`.
        """
        import obstore

        options: Any = {"range": (start, start + length), **_pinned(version)}

        def read(client: Any) -> memoryview:
            answer = obstore.get(client, key, options=options)
            # Not every server that speaks S3 heeds `If-Match`.
            if _status(answer.meta).version != version:
                raise ObjectChangedError
            return memoryview(answer.bytes())

        content = self.ask("cannot read", key, read)
        self._meter.add(nbytes=len(content))
        if len(content) != length:
            raise FormatError(f"{self._location}/{key} ends too early", got=f"{start + len(content)} bytes")
        return content

    def _list(
        self, key: str, listed: Callable[[Any], _Answer], progress: Callable[[], int] = lambda: 0
    ) -> _Answer:
        """List a directory, and repeat truncated listings; errors as `head`.

        Args:
            key: the directory's key.
            listed: lists with obstore's client.
            progress: the number of objects listed so far. Progress resets the number of tries.
        """
        retries, seconds = (RETRIES, RETRY_SECONDS) if self._has_answered else (FIRST_RETRIES, FIRST_SECONDS)

        def again(client: Any) -> _Answer:
            tries, before, began = 0, progress(), time.monotonic()
            while True:
                try:
                    return listed(client)
                except Exception as error:
                    if not is_broken_off(error):
                        raise
                    if progress() > before:
                        tries, before, began = 0, progress(), time.monotonic()
                    pause = min(_PAUSE_SECONDS * 2**tries, _LONGEST_PAUSE_SECONDS)
                    if tries >= retries or time.monotonic() - began + pause > seconds:
                        raise repeated(error, tries) from error
                tries += 1
                time.sleep(pause)
                self._meter.add(requests=1)

        return self.ask("cannot list", key, again)

    def ask(
        self,
        doing: str,
        key: str,
        question: Callable[[Any], _Answer],
        *,
        requests: int = 1,
        is_brief: bool = False,
    ) -> _Answer:
        """The answer to a question; errors as `read`.

        Args:
            doing, key: what for, for messages.
            question: asked of obstore's client.
            requests: that it takes.
            is_brief: whether it is given up after `BRIEF_SECONDS` instead of being tried for longer.
        """
        from obstore.exceptions import BaseError

        self._meter.add(requests=requests)
        client = self._client_for(self._asked(doing, key), is_brief=is_brief)
        try:
            answer = question(client)
        except (BaseError, OSError, ValueError) as error:
            if is_no_object(error) and not is_no_listing(error):
                raise FileNotFoundError(key) from error
            if is_changed(error):
                raise ObjectChangedError from error
            cause = self._with_code(client, key, error) if is_refused_without_code(error) else error
            raise explained(cause, self._asked(doing, key)) from error
        self._has_answered = True
        return answer

    def _asked(self, doing: str, key: str) -> BucketRequest:
        access = self._access
        words = replace(self._words, log_in=access.log_in) if access.log_in else self._words
        return BucketRequest(doing, self.uri(key), self._name, access.identity, self._endpoint, words)

    def _with_code(self, client: Any, key: str, error: Exception) -> Exception:
        """Return the error of reading a byte of an object, whose answer has a body with the server's code."""
        import obstore
        from obstore.exceptions import BaseError

        self._meter.add(requests=1)
        try:
            obstore.get_range(client, key, start=0, end=1)
        except (BaseError, OSError, ValueError) as result:
            return error if is_no_object(result) else result
        return error

    def _client_for(self, asked: BucketRequest, *, is_brief: bool) -> Any:
        from obstore.exceptions import BaseError

        try:
            return self._brief if is_brief else self._patient if self._has_answered else self._impatient
        except (BaseError, OSError, ValueError) as error:
            raise unusable_credentials(error, asked) from error

    @cached_property
    def _impatient(self) -> Any:
        return self._client(FIRST_RETRIES, FIRST_SECONDS)

    @cached_property
    def _patient(self) -> Any:
        return self._client(RETRIES, RETRY_SECONDS)

    @cached_property
    def _brief(self) -> Any:
        return self._client(RETRIES, BRIEF_SECONDS, BRIEF_SECONDS)

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


def require_obstore(scheme: str) -> None:
    """Raises UsageError where the package that reads object stores is not installed."""
    if find_spec("obstore") is None:
        raise UsageError(
            f"{scheme}:// is read by the package obstore, which is not installed",
            expected="this package with its extra `cloud`",
            hint="pip install 'ckpttools[cloud]'",
        )


def _status(result: Any) -> Status:
    """What obstore says of an object."""
    # Azure's listings leave out the quotes.
    etag = (result["e_tag"] or "").strip('"')
    changed = result["last_modified"]
    modified = round(changed.timestamp() * 1e9)
    return Status(
        FileKind.FILE, result["size"], etag or f"{_BY_TIME}{changed.isoformat()}", modified=modified
    )


def _pinned(version: str) -> dict[str, object]:
    """The condition under which an object is answered."""
    if version.startswith(_BY_TIME):
        return {}
    return {"if_match": version if version.startswith("W/") else f'"{version}"'}


def _below(key: str, result: Sequence[Any]) -> list[Object]:
    """Objects by the rest of their keys; not the empty one that stands for the directory itself."""
    start = f"{key}/" if key else ""
    return [(item["path"][len(start) :], _status(item)) for item in result if item["path"] != key]


def name_collision(location: str) -> FormatError:
    """Return the error for an object whose key is also the directory of other objects."""
    return FormatError(
        f"{location} is both an object and the directory of other objects",
        got=f"objects {location} and {location}/…",
        expected="a name that is either a file or a directory",
        hint="rename or delete the object, or move the objects below it",
    )


class _Pages:
    """The objects of a listing, page by page.

    Args:
        key: the directory's key.

    Attributes:
        result: the objects so far.
    """

    def __init__(self, key: str) -> None:
        self._key, self._last, self._is_sorted = key, "", True
        self.result: list[Object] = []

    def resume(self) -> str | None:
        """Return the path after which the listing continues. None restarts it without objects."""
        if not self._is_sorted:
            self.result, self._last, self._is_sorted = [], "", True
        return self._last or None

    def add(self, page: Sequence[Any]) -> None:
        """Add a page, but skip objects before the start, because some servers ignore it."""
        paths = [item["path"] for item in page]
        if not self.result or not self._is_sorted:
            new = page
        else:
            new = [item for item in page if item["path"] > self._last]
        self.result += _below(self._key, new)
        # S3 directory buckets list in any order, and the path of an empty object `name/` lacks its `/`.
        self._is_sorted &= paths == sorted(paths)
        self._last = max([self._last, *paths])


def _without_markers(objects: list[Object]) -> list[Object]:
    """Without the empty objects `name/` by which consoles make directories; they come without their `/`."""
    if all(result.size for _, result in objects):
        return objects
    names = (name for name, _ in objects)
    directories = {name[:at] for name in names for at, letter in enumerate(name) if letter == "/"}
    return [(name, result) for name, result in objects if result.size or name not in directories]


# The same address in every cloud; each answers in its own way.
_ADDRESS = "169.254.169.254"
_SECONDS = 1.0


def metadata_headers(path: str, headers: Mapping[str, str]) -> Mapping[str, str] | None:
    """The headers of a good answer of the metadata server; None without one, after a second at most."""
    connection = http.client.HTTPConnection(_ADDRESS, timeout=_SECONDS)
    try:
        connection.request("GET", path, headers=dict(headers))
        answer = connection.getresponse()
        return dict(answer.headers.items()) if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
