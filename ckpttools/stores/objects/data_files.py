"""Data files in a bucket: one object each, written by one thread from its first byte to its last."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from typing import ClassVar

from ckpttools.stores.objects.client import Bucket
from ckpttools.stores.objects.writing import Upload


class ObjectDataFiles:
    """See `ckpttools.stores.publishing.DataFiles`.

    Args:
        bucket: where.
        key: what the names of files are below.
        sizes: bytes of files.
        heads: the first bytes of some.
        plan: fingerprint of the plan, with which objects are marked.
        check: raises where the destination no longer belongs to this process.
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
        self._begun: set[str] = set()

    def passes(self, group: int) -> Generator[ObjectSink]:
        """Once: what has been written is complete when the next is asked for, and there is none."""
        with ExitStack() as uploads:
            yield ObjectSink(self, uploads, group)
            # Here and not in each of them: a file may be complete before another of the group fails.
            self.check()

    def begun(self, name: str, size: int) -> Upload:
        """A file of which nothing is written but its head.

        Args:
            name: of the file.
            size: bytes that it will have at least, if it is not one of those given in the beginning.
        """
        self._begun.add(name)
        upload = Upload(self._bucket, f"{self._key}/{name}", self._sizes.get(name, size), self._plan)
        upload.write(memoryview(self._heads.get(name, b"")))
        return upload

    def write_heads(self) -> None:
        """As `DataFiles.write_heads`: of files of which no task writes anything."""
        for name in self._sizes.keys() - self._begun:
            if self._bucket.head(f"{self._key}/{name}") is None:
                with self.begun(name, 0):
                    self.check()

    @property
    def written(self) -> Mapping[str, int]:
        """Minimum size in bytes of each file that must exist."""
        return {**dict.fromkeys(self._begun, 0), **self._sizes}

    def extend(self, name: str, end: int) -> None:
        """Each group appends to files of its own."""

    def sync(self) -> None:
        """An object that is there is durable."""

    def close(self) -> None:
        """There is nothing to give back."""


class ObjectSink:
    """The files of one group of tasks; see `ckpttools.stores.publishing.Sink`."""

    is_rehearsal: ClassVar[bool] = False

    def __init__(self, files: ObjectDataFiles, uploads: ExitStack, group: int) -> None:
        self._files, self._stack, self._group = files, uploads, group
        self._uploads: dict[str, Upload] = {}

    def write(self, name: str, offset: int, data: memoryview, address: int, loose: int | None = None) -> None:
        upload = self._uploads.get(name) or self._begun(name, loose or 0)
        if offset < upload.position:
            raise RuntimeError(f"{name}: byte {offset} comes after byte {upload.position}")
        upload.fill(offset)
        upload.write(data)
        if loose is not None and upload.position >= loose:
            # A task may write hundreds of chunks; what is kept of each would be as much as all of them.
            self._files.check()
            upload.complete()

    def _begun(self, name: str, size: int) -> Upload:
        upload = self._uploads[name] = self._stack.enter_context(self._files.begun(name, size))
        return upload

    def write_whole(self, name: str, data: bytes) -> None:
        self.write(name, 0, memoryview(data), 0, len(data))

    def append(self, name: str, most: int, data: bytes) -> tuple[str, int]:
        file = f"{name}-{self._group:05d}"
        upload = self._uploads.get(file) or self._begun(file, 0)
        offset = upload.position
        upload.write(memoryview(data))
        return file, offset
