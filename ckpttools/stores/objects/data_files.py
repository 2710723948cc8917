"""Data files in a bucket: one object each, written sequentially by one thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import ExitStack
from typing import ClassVar, TypeAlias

from ckpttools.stores.base import Status
from ckpttools.stores.objects.client import Bucket
from ckpttools.stores.objects.writing import Upload
from ckpttools.stores.publishing import Record

_VERSIONS = -3
"""Marks a record of object versions in place of the task index."""

Versions: TypeAlias = Mapping[str, Collection[tuple[int, str]]]
"""For each object, the sizes and versions from uploads of the plan; usually one."""


class ObjectDataFiles:
    """Data files in a bucket; see `ckpttools.stores.publishing.DataFiles`.

    Args:
        bucket: The bucket.
        key: Key prefix of the files.
        sizes: Size of each file in bytes.
        heads: First bytes of some files.
        plan: Fingerprint of the plan, which marks the objects.
        check: Raises an error if the destination is no longer locked by this process.
    """

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        sizes: Mapping[str, int],
        heads: Mapping[str, bytes],
        plan: str,
        check: Callable[[], None],
    ) -> None:
        self._bucket, self._key, self._plan, self.check = bucket, key, plan, check
        self._sizes, self._heads = sizes, heads
        self._start_upload: set[str] = set()
        self.versions: dict[str, tuple[int, str]] = {}
        self._unrecorded: dict[str, tuple[int, str]] = {}

    def write_passes(self, group: int) -> Generator[ObjectSink]:
        """Yield one sink; its objects are complete when the generator ends."""
        with ExitStack() as uploads:
            yield ObjectSink(self, uploads, group)
            # Check once per group rather than per file, because one file may be complete before another one
            # fails.
            self.check()

    def begun(self, name: str, size: int) -> Upload:
        """Start the upload of a file and write its head.

        Args:
            name: Name of the file.
            size: Minimum size of the file in bytes, if it was not declared in advance.
        """
        self._start_upload.add(name)
        upload = Upload(self._bucket, f"{self._key}/{name}", self._sizes.get(name, size), self._plan)
        upload.on_complete = lambda size, version: self._note(name, size, version)
        upload.write(memoryview(self._heads.get(name, b"")))
        return upload

    def _note(self, name: str, size: int, version: str) -> None:
        self.versions[name] = self._unrecorded[name] = size, version

    def pop_version_records(self) -> list[Record]:
        """Return records of the objects that were completed since the last call."""
        versions, self._unrecorded = self._unrecorded, {}
        return [[_VERSIONS, {name: list(item) for name, item in versions.items()}]] if versions else []

    def write_heads(self) -> None:
        """See `DataFiles.write_heads`. Writes the files that no task writes."""
        for name in self._sizes.keys() - self._start_upload:
            if self._bucket.head(f"{self._key}/{name}") is None:
                with self.begun(name, 0):
                    self.check()

    @property
    def written(self) -> Mapping[str, int]:
        """Minimum size in bytes of each file that must exist."""
        return {**dict.fromkeys(self._start_upload, 0), **self._sizes}

    def extend(self, name: str, end: int) -> None:
        """Do nothing, because each group appends to its own files."""

    def sync(self) -> None:
        """Do nothing, because completed objects are durable."""

    def close(self) -> None:
        """Do nothing, because no resources are held."""


class ObjectSink:
    """The files of a group of tasks; see `ckpttools.stores.publishing.Sink`."""

    is_dry_pass: ClassVar[bool] = False

    def __init__(self, files: ObjectDataFiles, uploads: ExitStack, group: int) -> None:
        self._files, self._stack, self._group = files, uploads, group
        self._uploads: dict[str, Upload] = {}

    def write(self, name: str, offset: int, data: memoryview, address: int, loose: int | None = None) -> None:
        upload = self._uploads.get(name) or self._start_upload(name, loose or 0)
        if offset < upload.position:
            raise RuntimeError(f"{name}: byte {offset} comes after byte {upload.position}")
        upload.fill(offset)
        upload.write(data)
        if loose is not None and upload.position >= loose:
            # A task may write hundreds of chunks, and keeping them all would take their total size.
            self._files.check()
            upload.complete()

    def _start_upload(self, name: str, size: int) -> Upload:
        upload = self._uploads[name] = self._stack.enter_context(self._files.begun(name, size))
        return upload

    def identity(self, name: str) -> str:
        """Return "" because object versions are recorded separately; see `SupportsFileIdentity.identity`."""
        return ""

    def write_whole(self, name: str, data: bytes) -> None:
        self.write(name, 0, memoryview(data), 0, len(data))

    def append(self, name: str, limit: int, data: bytes) -> tuple[str, int]:
        file = f"{name}-{self._group:05d}"
        upload = self._uploads.get(file) or self._start_upload(file, 0)
        offset = upload.position
        upload.write(memoryview(data))
        return file, offset


def recorded_versions(records: Iterable[Record]) -> Versions:
    """Return the versions that `ObjectDataFiles.pop_version_records` recorded."""
    result: dict[str, set[tuple[int, str]]] = {}
    for record in records:
        match record:
            case [int(kind), dict(versions)] if kind == _VERSIONS:
                for name, (size, version) in versions.items():
                    result.setdefault(name, set()).add((size, version))
    return result


def find_changed_objects(
    bucket: Bucket, key: str, existing: Mapping[str, Status], versions: Versions
) -> list[str]:
    """Return objects that are missing, or whose size or version differs from their upload.

    Args:
        bucket, key: Location of the objects.
        existing: A listing of the location.
        versions: The versions to expect.

    Raises:
        StorageError: The store does not respond.
    """

    def is_expected(name: str, status: Status | None) -> bool:
        return status is not None and any(
            size == status.size and version in ("", status.version) for size, version in versions[name]
        )

    # Some servers list a different tag from the one that they return for requests; only the latter counts.
    return sorted(
        name
        for name in versions
        if not is_expected(name, existing.get(name)) and not is_expected(name, bucket.head(f"{key}/{name}"))
    )
