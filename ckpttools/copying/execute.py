"""Copying one part, or going on where an earlier run stopped: it becomes visible when all of it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckpttools.copying.comparison import combine_part_evidence, find_differing_file
from ckpttools.copying.files import files_below
from ckpttools.copying.part import FileGroup
from ckpttools.copying.room import CopyRoom, room_for
from ckpttools.copying.transfer import Transferred, WrittenWrongError, check_sizes, transfer
from ckpttools.core.errors import SourceChangedError, UsageError
from ckpttools.core.wording import again, option
from ckpttools.formats.orbax.metadata import COMMIT_TEXT
from ckpttools.run.apart import check_unread
from ckpttools.stores.at_once import at_once
from ckpttools.stores.evidence import save_evidence
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import PublishesChecked, Purpose, Staging, TellsPublished, Work, staging_of
from ckpttools.stores.registry import parse


def room_of(part: FileGroup, place: Place, memory: int, jobs: int) -> CopyRoom:
    """What copying a part to a place may take; arguments and errors as of `room_for`."""
    held = sum(part.files[name].size for name in part.last)
    return room_for(list(part.files), 2 * held, part.source.store, place.store, memory, jobs)


def check_part(part: FileGroup, place: Place, overwrite: bool, check_replaced: Callable[[], None]) -> None:
    """Raises what stops `copy_part` before it writes anything; arguments as there."""
    _checked(part, place, staging_of(place, overwrite, check_replaced))


def _checked(part: FileGroup, place: Place, staging: Staging) -> str:
    sources = [(part.source / name).open(found) for name, found in part.files.items()]
    check_unread(sources, staging.taken)
    _check_names(part, place)
    plan = part.fingerprint()
    staging.check(plan, part.nbytes)
    return plan


def _check_names(part: FileGroup, place: Place) -> None:
    """Raises UsageError where a file has a name that nothing can have at the destination."""
    name = next((name for name in part.files if not place.store.takes((place / name).key)), None)
    if name is not None:
        raise UsageError(
            f"a file has a name that nothing in {place.store.scheme}:// can have",
            place=part.source / name,
            wanted="names without control characters",
            hint=f"give it another name, or move it away; then {again()}",
        )


def copy_part(
    part: FileGroup,
    place: Place,
    room: CopyRoom,
    *,
    overwrite: bool,
    check_replaced: Callable[[], None],
    verify: bool,
    add_commits: bool,
    command: str,
    observe: Callable[[int], None],
) -> Transferred:
    """Copies a part.

    Args:
        part: what.
        place: final name; it appears only when everything is there.
        room: what copying may take.
        overwrite, check_replaced: as of `ckpttools.stores.publishing.Publishes.staging`.
        verify: whether all that was written is read again.
        add_commits: whether the commit files are written that are missing.
        command: the command line, for whoever finds the work unfinished; "" where there is none.
        observe: called with numbers of bytes that are done.

    Raises:
        CheckpointError: of any kind; the destination is then as it was, and `<place>.partial` keeps what was
            done.
    """
    staging = staging_of(place, overwrite, check_replaced)
    plan = _checked(part, place, staging)
    _ = part.evidence  # collected before any file is read
    directory = str(parse(".").absolute()) if command else ""
    purpose = Purpose(plan, str(part.source.absolute()), command, directory)
    with staging.opened(purpose, part.nbytes) as work:
        was_complete = work.is_complete
        if was_complete:
            done = Transferred(bytes_resumed=part.nbytes)
            observe(part.nbytes)
        else:
            streams = place.store.streams
            is_readable = streams is None or streams.is_readable
            done = _made(part, place, work, room, verify and is_readable, add_commits, observe)
            if is_readable:
                check_sizes(part, _sizes(work.content), place)
            _publish(work, part, place)
        # What a store has listed before is not what is there now: `work` tells it so when it ends.
        work.conclude()
        if isinstance(work, TellsPublished):
            done = replace(done, published=work.published)
    copies = files_below(place)
    check_sizes(part, {name: copy.size for name, copy in copies.items()}, place)
    evidence = combine_part_evidence(part, place, copies)
    if was_complete and (differing := find_differing_file(part, place, list(part.files))) is not None:
        # The plan did not notice: size, time and samples are unchanged.
        raise SourceChangedError(
            f"{part.source / differing} was changed since an earlier run copied it to {place}",
            hint=f"replace the copy with {option('overwrite', True)}",
        )
    if verify:
        names = part.last if done.bytes_verified else list(part.files)
        done = replace(done, bytes_verified=done.bytes_verified + verified(part, place, names))
    save_evidence(part.source, place, evidence)
    return done


def _sizes(place: Place) -> Mapping[str, int]:
    return {name: found.size for name, found in files_below(place).items()}


def _publish(work: Work, part: FileGroup, place: Place) -> None:
    """Publish a copy. An older copy is deleted only after the sizes of all files were checked."""
    if isinstance(work, PublishesChecked):
        work.publish_checked(lambda: check_sizes(part, _sizes(place), place))
    else:
        work.publish()


def verified(part: FileGroup, place: Place, names: Sequence[str]) -> int:
    """Compare files with their copies, and return the bytes compared.

    Raises:
        WrittenWrongError: a copy differs.
    """
    differing = find_differing_file(part, place, names)
    if differing is not None:
        raise WrittenWrongError(f"{place}/{differing} does not hold what was written to it")
    return sum(part.files[name].size for name in names)


def _made(
    part: FileGroup,
    place: Place,
    work: Work,
    room: CopyRoom,
    verify: bool,
    add_commits: bool,
    observe: Callable[[int], None],
) -> Transferred:
    """Makes the content, all but its name."""
    try:
        done = transfer(part, work, place.store, room, verify=verify, observe=observe)
        for name in part.last:
            if name not in part.commits:
                _write_last(part, work, name, observe)
        for name in part.commits:
            if name in part.files:
                _write_last(part, work, name, observe)
            elif add_commits:
                (work.content / name).write_bytes(COMMIT_TEXT)
        check_source(part)
    except (SourceChangedError, WrittenWrongError):
        # What was copied is of two states, or is not what was read.
        work.discard()
        raise
    return done


def _write_last(part: FileGroup, work: Work, name: str, observe: Callable[[int], None]) -> None:
    with (part.source / name).open(part.files[name]) as source:
        (work.content / name).write_bytes(source.read(0, source.size))
        observe(source.size)


def check_source(part: FileGroup) -> None:
    """Compares all files of a part with what they were at first.

    Raises:
        SourceChangedError: one was changed, or is gone, or there is one more.
    """
    files = [(part.source / name).open(found) for name, found in part.files.items()]
    at_once(part.source.store, lambda file: file.check_unchanged(), files)
    now = files_below(part.source)
    if now.keys() != part.files.keys():
        name = sorted(now.keys() ^ part.files.keys())[0]
        raise SourceChangedError(
            f"{part.source} was changed while it was copied",
            got=f"{name} is {'new' if name in now else 'gone'}",
            wanted="the files that were there at first",
            hint=f"wait until nothing writes to it, then {again()}",
        )
