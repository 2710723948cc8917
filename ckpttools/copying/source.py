"""Check that the files of a part did not change while they were copied."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckpttools.copying.part import FileGroup
from ckpttools.copying.pieces import BLOCK_BYTES, FileRange, digest_of
from ckpttools.core.errors import SourceChangedError
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.concurrency import map_concurrently, map_in_threads
from ckpttools.stores.evidence import get_stamp_text

_THREADS = 4


def check_source(part: FileGroup, copied: Iterable[tuple[FileRange, str]], *, verify: bool) -> None:
    """Compare all files of a part with their state before they were read.

    A local file whose stamp has changed is read again and compared with the digests of the copied data. The
    stamp alone is not an error: another link to the file changes its ctime, too.

    Args:
        part: The part.
        copied: The pieces that were read, with their digests.
        verify: Whether local files are read again even if their file system has no evidence of a change.

    Raises:
        SourceChangedError: A file was changed, deleted or added.
        CheckpointError: A file cannot be read.
    """
    files = [(part.source / name).open(result) for name, result in part.files.items()]
    map_concurrently(part.source.store, lambda file: file.check_unchanged(), files)
    now = part.current_files()
    if now.keys() != part.files.keys():
        name = sorted(now.keys() ^ part.files.keys())[0]
        raise SourceChangedError(
            f"{part.source} was changed while it was copied",
            got=f"{name} is {'new' if name in now else 'gone'}",
            expected="the files that were there at first",
            hint=f"wait until nothing writes to it, then {retry_term()}",
        )
    if part.source.store.scheme == "file":
        stamps = {name: get_stamp_text(part.source / name) for name in part.files}
        names = {name for name, text in stamps.items() if _is_doubtful(part, name, text, verify=verify)}
        if names:
            _check_content(part, copied, names)


def _is_doubtful(part: FileGroup, name: str, text: str, *, verify: bool) -> bool:
    """Return whether the stamp does not show that a file is unchanged."""
    stamp = part.stamps[name]
    return stamp.text != text or (verify and not stamp.is_evidence)


def _check_content(part: FileGroup, copied: Iterable[tuple[FileRange, str]], names: Collection[str]) -> None:
    def check(copied_piece: tuple[FileRange, str]) -> None:
        piece, digest = copied_piece
        location, buffer = part.source / piece.name, memoryview(bytearray(BLOCK_BYTES))
        with location.open(part.files[piece.name]) as file:
            if digest_of(piece, file.read_into, buffer) != digest:
                raise SourceChangedError(
                    f"{location} was changed while it was copied",
                    got=f"other bytes between byte {piece.start:,} and byte {piece.stop:,}",
                    expected="the bytes that were copied",
                    hint=f"wait until nothing writes to it, then {retry_term()}",
                )

    map_in_threads(_THREADS, check, [item for item in copied if item[0].name in names])
