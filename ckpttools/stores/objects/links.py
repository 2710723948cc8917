"""Files in a bucket, and the conditions for server-side copies."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, ClassVar

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, SourceChangedError
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.base import File, Status
from ckpttools.stores.costs import FAR, Costs

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ckpttools.stores.objects.store import ObjectStore


class ObjectFile(File):
    """An object pinned to one version: reads request this version and fail for any other."""

    # Number of bytes that 100 MB/s transfer in 20 ms, the time of a request.
    gap: ClassVar[int] = 2 << 20
    price: ClassVar[int] = FAR

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

    def changed(self, result: Status | None) -> FormatError:
        """Return the error for an object that was changed or removed."""
        if result is None:
            return FormatError(f"{self.path} was removed while it was read", hint=retry_term())
        return SourceChangedError(
            f"{self.path} was changed while it was read",
            got=f"{result.size} bytes, ETag {result.version}",
            expected=f"{self.size} bytes, ETag {self.version}",
            hint=retry_term(),
        )


# An ETag computed from the content (MD5, S3) repeats if old content is restored. Other ETags are never
# reused.
_CONTENT_TAG = re.compile(r"[0-9a-f]{32}(-[0-9]+)?|changed .*")
# HEAD requests report the modification time in full seconds.
_CLOCK_SECONDS = 2


def is_proven_copy(source: ObjectFile, result: Status, built: Status | None, seconds: float) -> bool:
    """Return whether the cloud provably copied the version of an object that was opened.

    obstore copies without a condition, so another process could change the source just before the copy and
    restore the old content just after it.

    Args:
        source: The object as it was opened.
        result: The status of the same object after the copy.
        built: The status of the copy.
        seconds: Duration of the copy in seconds.
    """
    if built is None or built.size != source.size or result.version != source.version:
        return False
    if not _CONTENT_TAG.fullmatch(source.version):
        return True
    # The cloud's clock shows whether a restored source was modified after the copy began.
    age = ((built.modified or 0) - (result.modified or 0)) / 1e9
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
