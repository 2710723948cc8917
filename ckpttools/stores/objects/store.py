"""An object store with cached requests and objects pinned to versions.

Keys have the form `bucket/name/of/object`.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, MissingPathError, SourceChangedError, StorageError
from ckpttools.core.extras import require_package
from ckpttools.core.message_terms import retry_term
from ckpttools.stores import block_cache as blocks
from ckpttools.stores.abilities import LinkTrials, StoredLock
from ckpttools.stores.base import DirEntry, File, FileKind, Status, Store
from ckpttools.stores.concurrency import (
    DEFAULT_CONCURRENCY,
    map_in_threads,
    requested_concurrency,
    write_concurrency,
)
from ckpttools.stores.costs import REMOTE_COST, Costs, Meter, Streams, Traffic
from ckpttools.stores.location import Location
from ckpttools.stores.objects.client import Access, Bucket, Object, ObjectChangedError, is_usable
from ckpttools.stores.objects.errors import MessageTerms
from ckpttools.stores.objects.journal import PLAN, PUBLISHED, ObjectJournal
from ckpttools.stores.objects.listing_cache import KnownObjects
from ckpttools.stores.objects.lock import PROBE, Lock, stored_lock
from ckpttools.stores.objects.parts import members
from ckpttools.stores.objects.writing import (
    MAX_CONCURRENT_PARTS,
    PART_BYTES,
    TakenError,
    Upload,
    copy,
    delete,
    put,
    replace,
)
from ckpttools.stores.publishing import CONTENT, JOURNAL, LOCK, SUFFIX, JobInfo, Unfinished
from ckpttools.stores.reads import ReadPool
from ckpttools.stores.shares import PARTS, active_members

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ckpttools.stores.objects.shared_staging import SharedObjectStaging


# Names directly below a staging directory.
_STAGING_NAMES = (LOCK, JOURNAL, CONTENT)
# Orbax uses 400 MiB on gs://; smaller files are faster to rewrite.
_FILE_BYTES = 256 << 20
_FILES = 16
_RUN_LOCK = f".ckpttools-{LOCK}"


class ObjectStore(Store):
    """The buckets of a cloud.

    Attributes:
        words: The cloud's terms, for messages.
        largest_copy: Maximum size of an object that the cloud copies in one request, in bytes.
        header_variables: Environment variables whose values become request headers.
    """

    streams: ClassVar[Streams | None] = Streams(
        memory=PART_BYTES * (MAX_CONCURRENT_PARTS + 2), file_bytes=_FILE_BYTES, files=_FILES
    )
    link_copies: ClassVar[bool] = True
    words: ClassVar[MessageTerms]
    # Maximum object size of Google and Azure.
    largest_copy: ClassVar[int] = 5 << 40
    header_variables: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}
        self._lock = threading.Lock()
        self._known = KnownObjects(self)
        self._meter = Meter()
        self._blocks = blocks.BlockCache()
        self._reads = ReadPool()

    @abstractmethod
    def access(self, bucket: str) -> Access:
        """Return how to reach a bucket, as configured in the environment.

        Raises:
            StorageError: Settings are missing or invalid.
        """

    @property
    def costs(self) -> Costs:
        return Costs(requested_concurrency() or DEFAULT_CONCURRENCY, self._reads.memory + blocks.MAX_BYTES)

    @property
    def traffic(self) -> Traffic:
        return self._meter.total

    def takes(self, key: str) -> bool:
        return is_usable(key)

    def removal(self, key: str) -> str:
        bucket, _, rest = key.partition("/")
        return shlex.join(part.format(bucket=bucket, key=rest) for part in self.words.remove.split())

    def stat(self, key: str) -> Status | None:
        return self._known.status(key) if key else Status(FileKind.DIRECTORY)

    def list(self, key: str) -> Sequence[DirEntry]:
        if not key:
            raise self._no_name()
        names = self._known.names(key)
        if not names and "/" in key:
            raise self._no_directory(key)
        return [DirEntry(name, result.kind) for name, result in names.items()]

    def walk(self, key: str) -> Iterator[Object]:
        if not key:
            raise self._no_name()
        objects = self._known.objects(key)
        if not objects and "/" in key:
            raise self._no_directory(key)
        yield from objects

    def open(self, key: str, status: Status | None = None) -> ObjectFile:
        status = status or self.stat(key)
        if status is None or status.kind is not FileKind.FILE:
            got = "it does not exist" if status is None else "a directory"
            raise FormatError(f"cannot inspect {self.uri(key)}", got=got)
        return ObjectFile(self, key, status)

    def put(self, key: str, content: bytes) -> None:
        """See `SupportsPut.put`."""
        bucket, rest = self._at(key)
        above = self.stat(key.rpartition("/")[0])
        if not rest or bucket.names_below(rest):
            raise StorageError(f"cannot write {self.uri(key)}", got="a directory")
        if above is not None and above.kind is FileKind.FILE:
            raise StorageError(f"cannot write {self.uri(key)}", got="its parent is a file")
        replace(bucket, rest, content)
        self.forget(key)

    def claim(self, key: str, content: bytes) -> bool:
        """See `SupportsRemove.claim`."""
        bucket, rest = self._at(key)
        try:
            put(bucket, rest, content)
        except TakenError:
            return False
        finally:
            self.forget(key)
        return True

    def locked(self, key: str) -> Lock:
        """See `SupportsRemove.locked`. The lock is an object in the directory."""
        bucket, rest = self._at(key)
        return Lock(bucket, f"{rest}/{_RUN_LOCK}", self.uri(key))

    def locks(self, key: str) -> Sequence[StoredLock]:
        """See `SupportsLocks.locks`: locks of a conversion to a key, or of a command on the run at a key."""
        bucket, rest = self._at(key.removesuffix(SUFFIX))
        names = (f"{rest}{SUFFIX}/{LOCK}", f"{rest}/{_RUN_LOCK}") if rest else ()
        return [lock for name in names if (lock := stored_lock(bucket, name)) is not None]

    def remove(self, key: str) -> None:
        """See `SupportsRemove.remove`. Uses a new listing."""
        bucket, rest = self._at(key)
        if not rest:
            raise self._no_name()
        names = [rest, *(f"{rest}/{name}" for name, _ in bucket.objects_below(rest) or ())]
        map_in_threads(write_concurrency(), lambda name: delete(bucket, [name]), names)
        self.forget(key)

    def staging(self, key: str, overwrite: bool, check_replaced: Callable[[], None]) -> SharedObjectStaging:
        """See `SupportsPublishing`."""
        from ckpttools.stores.objects.shared_staging import SharedObjectStaging

        bucket, rest = self._at(key)
        return SharedObjectStaging(self, bucket, key, rest, overwrite, check_replaced)

    def unfinished(self, key: str) -> Unfinished | None:
        """See `SupportsPublishing`."""
        if key.endswith(SUFFIX):
            return self.find_unfinished(key.removesuffix(SUFFIX)) or self._find_leftover(key)
        partial = key + SUFFIX
        bucket, rest = self._at(f"{partial}/{JOURNAL}")
        if "/" not in key or bucket.head(f"{rest}/{PLAN}") is None:
            return None
        journal = ObjectJournal.read(bucket, rest, with_records=False)
        return self._unfinished(partial, journal) if journal.is_destination_incomplete else None

    def _unfinished(self, partial: str, journal: ObjectJournal) -> Unfinished:
        bucket, rest = self._at(partial)
        job_info = journal.purpose or JobInfo("")
        lock, writer, release = stored_lock(bucket, f"{rest}/{LOCK}"), "", ""
        if lock is not None and lock.is_held:
            writer, release = str(lock), lock.release
        elif result := active_members(members(bucket, rest, None, {})):
            writer, release = str(result[0]), result[0].release
        return Unfinished(
            *(Location(self, partial), None, job_info.command, writer, job_info.directory, release),
            plan=job_info.plan,
            division=job_info.division,
        )

    def _find_leftover(self, key: str) -> Unfinished | None:
        """Return an unfinished conversion without a plan, if nothing else exists below the key."""
        bucket, rest = self._at(key)
        names = bucket.names_below(rest) if rest else {}
        others = (f"{LOCK}{PROBE}", f"{PARTS}/")
        own_names = [name for name in names if name in _STAGING_NAMES or name.startswith(others)]
        return Unfinished(Location(self, key)) if names and len(own_names) == len(names) else None

    def find_unfinished(self, key: str) -> Unfinished | None:
        """See `SupportsPublishing`."""
        if "/" not in key:
            return None
        partial = key + SUFFIX
        bucket, rest = self._at(f"{partial}/{JOURNAL}")
        is_begun = any(bucket.head(f"{rest}/{name}") is not None for name in (PLAN, PUBLISHED))
        if not is_begun:
            return None
        return self._unfinished(partial, ObjectJournal.read(bucket, rest, with_records=False))

    def link_trials(self, key: str) -> LinkTrials:
        """See `SupportsLinks`."""
        return CopyTrials(self, key.partition("/")[0])

    def link(self, source: File, key: str) -> bool:
        """See `SupportsLinks.link`. Copies inside the cloud if the result is provably the opened version."""
        if self.link_trials(key).refusal(source) is not None:
            return False
        assert isinstance(source, ObjectFile)
        bucket, rest = self._at(key)
        original, started = self._at(source.key)[1], time.monotonic()
        try:
            copy(bucket, original, rest)
        except FileNotFoundError:
            raise source.changed(None) from None
        seconds = time.monotonic() - started
        self.forget(key)
        built = bucket.head(rest)
        if built is not None and built[1:3] == (source.size, source.version):
            return True
        result = bucket.head(original)
        if result is None or result.version != source.version:
            self.forget(source.key)
            raise source.changed(result)
        if not is_proven_copy(source, result, built, seconds):
            delete(bucket, [rest])
            return False
        return True

    def copy_parts(self, source: File, key: str, parts: Iterable[tuple[int, int]]) -> None:
        """See `SupportsLinks.copy_parts`. The other bytes are zeros."""
        bucket, rest = self._at(key)
        with Upload(bucket, rest, source.size, "") as upload:
            for start, stop in parts:
                upload.fill(start)
                for at in range(start, stop, PART_BYTES):
                    upload.write(memoryview(source.read(at, min(PART_BYTES, stop - at))))
        self.forget(key)

    def forget(self, key: str) -> None:
        """Discard cached listings that include a key or anything below it."""
        self._known.forget(key)

    def status_after(self, key: str, moment: float) -> Status | None:
        """Return a status newer than a moment of the monotonic clock; same errors as `stat`."""
        return self._known.status_after(key, moment)

    def read_into(self, file: ObjectFile, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a file in this store; same errors as `File.read_into`."""
        fetch = partial(self._fetch, file)
        if self._blocks.takes(file.key, file.size, len(out)):
            name, read = (file.key, file.version), partial(self._reads.read_into, fetch=fetch)
            self._blocks.read_into(name, file.size, start, out, read)
        else:
            self._reads.read_into(start, out, fetch)

    def _fetch(self, file: ObjectFile, start: int, length: int) -> memoryview:
        bucket, key = self._at(file.key)
        try:
            return bucket.read(key, file.version, start, length)
        except (ObjectChangedError, FileNotFoundError):
            self._known.forget(file.key)
            raise file.changed(bucket.head(key)) from None

    # -- methods for `KnownObjects`

    def head(self, key: str) -> Status | None:
        """See `Source`."""
        bucket, rest = self._at(key)
        return bucket.head(rest)

    def objects_below(self, key: str, limit: int | None = None) -> Sequence[Object] | None:
        """See `Source`."""
        bucket, rest = self._at(key)
        return bucket.objects_below(rest, limit)

    def names_below(self, key: str) -> Mapping[str, Status]:
        """See `Source`."""
        bucket, rest = self._at(key)
        return bucket.names_below(rest)

    def _at(self, key: str) -> tuple[Bucket, str]:
        name, _, rest = key.partition("/")
        with self._lock:
            if name not in self._buckets:
                require_package("obstore", f"{self.scheme}://")
                self._check_headers()
                access = self.access(name)
                self._buckets[name] = Bucket(name, self.uri(name), access, self.words, self._meter)
            return self._buckets[name], rest

    def _check_headers(self) -> None:
        """Raise StorageError if a value has a character that headers cannot have: obstore would panic."""
        result = next((n for n in self.header_variables if not os.environ.get(n, "").isprintable()), None)
        if result is not None:
            raise StorageError(
                f"the value of {result} cannot be sent",
                got="a line break or another control character",
                expected="a value on one line",
                hint=f"""export {result}="$(printenv {result} | tr -d '[:cntrl:]')\"""",
            )

    def _no_name(self) -> StorageError:
        return StorageError(
            f"cannot list {self.scheme}://",
            got="no name",
            expected=f"the name of a {self.words.bucket}: {self.scheme}://NAME/…",
            hint=f"`{self.words.list_buckets}` lists yours",
        )

    def _no_directory(self, key: str) -> StorageError:
        is_missing = self.stat(key) is None
        got = "it does not exist" if is_missing else "a file"
        error = MissingPathError if is_missing else StorageError
        return error(f"cannot list {self.uri(key)}", got=got, hint="check the spelling of the path")


class ObjectFile(File):
    """An object pinned to one version: reads request this version and fail for any other."""

    # Number of bytes that 100 MB/s transfer in 20 ms, the time of a request.
    gap: ClassVar[int] = 2 << 20
    price: ClassVar[int] = REMOTE_COST

    __slots__ = ("_last_read", "key", "path", "size", "store", "version")

    def __init__(self, store: ObjectStore, key: str, result: Status) -> None:
        self.store = store
        self.key = key
        self.path = store.uri(key)
        self.size = result.size
        self.version = result.version
        self._last_read = time.monotonic()

    @property
    def costs(self) -> Costs:
        return self.store.costs

    def read_into(self, offset: int, out: Buffer) -> None:
        target = memoryview(out).cast("B")
        if offset + len(target) > self.size:
            raise FormatError(f"{self.path} ends too early", got=f"{self.size} bytes")
        if len(target):
            self.store.read_into(self, offset, target)
            self._last_read = time.monotonic()

    def check_unchanged(self) -> None:
        result = self.store.status_after(self.key, self._last_read)
        if result is None or result.version != self.version:
            raise self.changed(result)

    def changed(self, status: Status | None) -> FormatError:
        """Return the error for an object that was changed or removed."""
        if status is None:
            return FormatError(f"{self.path} was removed while it was read", hint=retry_term())
        return SourceChangedError(
            f"{self.path} was changed while it was read",
            got=f"{status.size} bytes, ETag {status.version}",
            expected=f"{self.size} bytes, ETag {self.version}",
            hint=retry_term(),
        )


# An ETag computed from the content (MD5, S3) repeats if old content is restored. Other ETags are never
# reused.
_CONTENT_TAG = re.compile(r"[0-9a-f]{32}(-[0-9]+)?|changed .*")
# HEAD requests report the modification time in full seconds.
_CLOCK_SECONDS = 2


def is_proven_copy(source: ObjectFile, status: Status, copy_status: Status | None, seconds: float) -> bool:
    """Return whether the cloud provably copied the version of an object that was opened.

    obstore copies without a condition, so another process could change the source just before the copy and
    restore the old content just after it.

    Args:
        source: The object as it was opened.
        status: The status of the same object after the copy.
        copy_status: The status of the copy.
        seconds: Duration of the copy in seconds.
    """
    if copy_status is None or copy_status.size != source.size or status.version != source.version:
        return False
    if not _CONTENT_TAG.fullmatch(source.version):
        return True
    # The cloud's clock shows whether a restored source was modified after the copy began.
    age = ((copy_status.modified or 0) - (status.modified or 0)) / 1e9
    return age > seconds + _CLOCK_SECONDS


@dataclass(frozen=True)
class CopyTrials:
    """See `ckpttools.stores.abilities.LinkTrials`. Needs no trial.

    Attributes:
        store: Store of the destination.
        bucket: Name of the destination's bucket.
    """

    store: ObjectStore
    bucket: str

    def refusal(self, source: File) -> str | None:
        """Return the store's reason why an object cannot be copied; None if it can."""
        if not isinstance(source, ObjectFile) or source.store is not self.store:
            return f"it is not in {self.store.words.cloud}"
        if source.key.partition("/")[0] != self.bucket:
            return f"it is in another {self.store.words.bucket}"
        if source.size > self.store.largest_copy:
            return f"objects of more than {self.store.largest_copy >> 30} GiB cannot be copied in one request"
        return None
