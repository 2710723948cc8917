"""Copy one part, or resume an interrupted copy. The part becomes visible when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ckpttools.copying.part import FileGroup, files_below
from ckpttools.copying.pieces import BLOCK_BYTES, CopyRoom, FileRange, PieceDigester, digest_of, room_for
from ckpttools.copying.target import combine_part_evidence, find_differing_file
from ckpttools.copying.transfer import Transferred, WrittenWrongError, check_files, transfer
from ckpttools.core.errors import SourceChangedError, UsageError
from ckpttools.core.message_terms import option, retry_term
from ckpttools.formats.orbax.metadata import COMMIT_TEXT
from ckpttools.run.overlap_check import check_unread
from ckpttools.stores.base import Status
from ckpttools.stores.concurrency import map_concurrently, map_in_threads
from ckpttools.stores.evidence import get_stamp, get_stamp_text, save_evidence
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import (
    JobInfo,
    Staging,
    SupportsCheckedPublish,
    SupportsPublished,
    Work,
    staging_of,
)
from ckpttools.stores.registry import parse


def room_of(part: FileGroup, location: Location, memory: int, jobs: int) -> CopyRoom:
    """Return the memory and workers for copying a part; raises the errors of `room_for`."""
    buffer_bytes = sum(part.files[name].size for name in part.last)
    return room_for(list(part.files), 2 * buffer_bytes, part.source.store, location.store, memory, jobs)


def check_part(
    part: FileGroup, location: Location, overwrite: bool, check_replaced: Callable[[], None]
) -> None:
    """Raise the errors that stop `copy_part` before it writes anything."""
    _check_sidecars(part, location, staging_of(location, overwrite, check_replaced))


def _check_sidecars(part: FileGroup, location: Location, staging: Staging) -> str:
    sources = [(part.source / name).open(result) for name, result in part.files.items()]
    check_unread(sources, staging.taken)
    _check_names(part, location)
    plan = part.fingerprint()
    staging.check(plan, part.nbytes)
    return plan


def _check_names(part: FileGroup, location: Location) -> None:
    """Raise UsageError if a file's name is not allowed at the destination."""
    name = next((name for name in part.files if not location.store.takes((location / name).key)), None)
    if name is not None:
        raise UsageError(
            f"a file has a name that is not possible in {location.store.scheme}://",
            location=part.source / name,
            expected="names without control characters",
            hint=f"give it another name, or move it away; then {retry_term()}",
        )


def copy_part(
    part: FileGroup,
    location: Location,
    room: CopyRoom,
    *,
    overwrite: bool,
    check_replaced: Callable[[], None],
    verify: bool,
    add_commits: bool,
    command: str,
    observe: Callable[[int], None],
) -> Transferred:
    """Copy the files of a part to a location.

    Args:
        part: The part.
        location: Final location, which is created only when everything is complete.
        room: Memory and workers.
        overwrite, check_replaced: See `ckpttools.stores.publishing.SupportsPublishing.staging`.
        verify: Whether all written data is read again.
        add_commits: Whether missing commit files are written.
        command: The command line, for messages about unfinished work; may be "".
        observe: Called with numbers of bytes as they are copied.

    Raises:
        CheckpointError: Any failure. The destination is unchanged, and `<destination>.partial` keeps the
            finished work.
    """
    staging = staging_of(location, overwrite, check_replaced)
    plan = _check_sidecars(part, location, staging)
    _ = part.stamps  # Computed before any file is read.
    directory = str(parse(".").absolute()) if command else ""
    purpose = JobInfo(plan, str(part.source.absolute()), command, directory)
    with staging.opened(purpose, part.nbytes) as work:
        was_complete = work.is_complete
        stamps: Mapping[str, str] | None = None
        if was_complete:
            done = Transferred(bytes_resumed=part.nbytes)
            observe(part.nbytes)
        else:
            streams = location.store.streams
            is_readable = streams is None or streams.is_readable
            done = _copy_part(part, location, work, room, verify and is_readable, add_commits, observe)
            if is_readable:
                staged = files_below(work.content)
                check_files(part, _sizes(staged), work.content)
                stamps = done.stamps if streams is None else _object_stamps(part, work.content, staged)
            _publish(work, part, location)
        # The store's cached listings are outdated; `work` tells the store when it ends.
        work.finalize()
        if isinstance(work, SupportsPublished):
            done = replace(done, published=work.published)
    return _check_published(part, location, done, stamps, was_complete=was_complete, verify=verify)


def _check_published(
    part: FileGroup,
    location: Location,
    done: Transferred,
    stamps: Mapping[str, str] | None,
    *,
    was_complete: bool,
    verify: bool,
) -> Transferred:
    """Check a published copy, and record the evidence of its files.

    Args:
        part, location: The source and the copy.
        done: The transferred files.
        stamps: Stamps of the written files; None if the store has none.
        was_complete: Whether an earlier run published the copy.
        verify: Whether the content of all files must be compared.

    Raises:
        SourceChangedError: The source changed after the earlier run.
        WrittenWrongError: The copy differs from what was written.
    """
    copies = files_below(location)
    check_files(part, _sizes(copies), location)
    evidence = combine_part_evidence(part, location, copies)
    if was_complete and (differing := find_differing_file(part, location, list(part.files))) is not None:
        # The plan did not notice the change: size, time and samples are equal.
        raise SourceChangedError(
            f"{part.source / differing} was changed since an earlier run copied it to {location}",
            hint=f"replace the copy with {option('overwrite', True)}",
        )
    if verify:
        names = part.last if done.bytes_verified else list(part.files)
        done = replace(done, bytes_verified=done.bytes_verified + verify_copies(part, location, names))
    if stamps is not None:
        unsure = _changed_since_written(part, location, stamps)
        evidence = {name: "" if name in unsure else text for name, text in evidence.items()}
    save_evidence(part.source, location, evidence)
    return done


def _object_stamps(part: FileGroup, content: Location, staged: Mapping[str, Status]) -> Mapping[str, str]:
    """Return the stamps of objects before they are published, except those that are written last."""
    last = set(part.last)
    return {name: get_stamp(content / name, item).text for name, item in staged.items() if name not in last}


def _sizes(files: Mapping[str, Status]) -> Mapping[str, int]:
    return {name: result.size for name, result in files.items()}


def _publish(work: Work, part: FileGroup, location: Location) -> None:
    """Publish a copy. An older copy is deleted only after all files have been checked."""
    if isinstance(work, SupportsCheckedPublish):
        work.publish_checked(lambda: check_files(part, _sizes(files_below(location)), location))
    else:
        work.publish()


def _changed_since_written(part: FileGroup, location: Location, stamps: Mapping[str, str]) -> Collection[str]:
    """Return the files whose copies may differ from what was written.

    Raises:
        WrittenWrongError: Another process changed a copy on a disk while this command ran.
    """
    if location.store.scheme != "file":
        current = {
            name: get_stamp(location / name, result).text for name, result in files_below(location).items()
        }
        return {name for name in part.files if current.get(name) != stamps.get(name)}
    changed = [name for name in part.files if get_stamp_text(location / name) != stamps.get(name)]
    verify_copies(part, location, changed)
    return changed


def verify_copies(part: FileGroup, location: Location, names: Sequence[str]) -> int:
    """Compare files with their copies, and return the bytes compared.

    Raises:
        WrittenWrongError: A copy differs.
    """
    differing = find_differing_file(part, location, names)
    if differing is not None:
        raise WrittenWrongError(f"{location}/{differing} differs from what was written")
    return sum(part.files[name].size for name in names)


def _copy_part(
    part: FileGroup,
    location: Location,
    work: Work,
    room: CopyRoom,
    verify: bool,
    add_commits: bool,
    observe: Callable[[int], None],
) -> Transferred:
    """Write the content, except for the final name."""
    try:
        done = transfer(part, work, location.store, room, verify=verify, observe=observe)
        pieces, stamps = [*done.pieces], dict(done.stamps)
        for name in part.last:
            if name not in part.commits:
                pieces.append(_write_last(part, work, name, stamps, observe))
        for name in part.commits:
            if name in part.files:
                pieces.append(_write_last(part, work, name, stamps, observe))
            elif add_commits:
                (work.content / name).write_bytes(COMMIT_TEXT)
        check_source(part, pieces, verify=verify)
    except (SourceChangedError, WrittenWrongError):
        # The source changed during the copy, or the copy differs from the source.
        work.discard()
        raise
    return replace(done, pieces=(), stamps=stamps)


def _write_last(
    part: FileGroup, work: Work, name: str, stamps: dict[str, str], observe: Callable[[int], None]
) -> tuple[FileRange, str]:
    """Copy a small file, record its stamp, and return its digest as that of a single piece."""
    with (part.source / name).open(part.files[name]) as source:
        content = source.read(0, source.size)
        (work.content / name).write_bytes(content)
        stamps[name] = get_stamp_text(work.content / name)
        observe(source.size)
    digester = PieceDigester()
    digester.add(memoryview(content))
    return FileRange(-1, name, 0, len(content), len(content)), digester.text


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
            expected="the files as they were at first",
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
                    got=f"different bytes between byte {piece.start:,} and byte {piece.stop:,}",
                    expected="the bytes that were copied",
                    hint=f"wait until nothing writes to it, then {retry_term()}",
                )

    map_in_threads(_THREADS, check, [item for item in copied if item[0].name in names])
