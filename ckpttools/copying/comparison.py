"""Compare a part with its destination by content, since equal sizes and times do not show equal content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpttools.copying.part import FileGroup, files_below
from ckpttools.copying.pieces import BLOCK_BYTES, PIECE_BYTES, FileRange, split_files
from ckpttools.core.dataclass import dataclass
from ckpttools.stores.base import Status
from ckpttools.stores.concurrency import map_in_threads
from ckpttools.stores.evidence import combine_evidence, get_stamp, load_evidence, save_evidence
from ckpttools.stores.location import Location
from ckpttools.stores.outside_links import find_outside_links
from ckpttools.stores.sharing import is_of_repository

_MIN_THREADS = 2


@dataclass(frozen=True, slots=True)
class CopyComparison:
    """How a destination differs from a part.

    Attributes:
        difference: A description of the first difference; None if there is none.
        files_compared, bytes_compared: Number and size of the files whose content was compared.
        files_unchanged: Number of files that, like their copies, are unchanged since an earlier copy.
        undecided: Names of the files whose content must be compared.
        proof: Evidence to record for each file if there is no difference.
    """

    difference: str | None
    files_compared: int = 0
    bytes_compared: int = 0
    files_unchanged: int = 0
    undecided: tuple[str, ...] = ()
    proof: Mapping[str, str] | None = None


def compare_status(part: FileGroup, location: Location, *, verify: bool) -> CopyComparison | None:
    """Compare a part with its destination without reading any file.

    Args:
        part: The part to copy.
        location: Its destination.
        verify: Whether the content of all files must be compared.

    Returns:
        The comparison, with an `undecided` list of files for `compare_content`; None if the destination does
        not exist.

    Raises:
        CheckpointError: The part or the destination cannot be read.
    """
    if not location.is_dir():
        return None
    result = files_below(location)
    there = {
        name: item
        for name, item in result.items()
        if name in part.files or not is_of_repository(location, name)
    }
    if not there:
        return None
    difference = _by_size(part, there) or _by_link(part, location, there)
    if difference:
        return CopyComparison(difference)
    proof = combine_part_evidence(part, location, there)
    known = {} if verify else load_evidence(part.source, location)
    undecided = tuple(name for name in part.files if not proof[name] or known.get(name) != proof[name])
    return CopyComparison(None, 0, 0, len(part.files) - len(undecided), undecided, proof)


def combine_part_evidence(
    part: FileGroup, location: Location, copies: Mapping[str, Status]
) -> Mapping[str, str]:
    """Combine the evidence of each file of a part with that of its copy; "" if either has none."""

    def combine(name: str) -> str:
        status = copies.get(name)
        return combine_evidence(
            part.stamps[name].evidence, get_stamp(location / name, status).evidence if status else ""
        )

    return {name: combine(name) for name in part.files}


def compare_content(part: FileGroup, location: Location, status: CopyComparison) -> CopyComparison:
    """Compare the files that `compare_status` left undecided, and record the evidence if they are equal.

    Raises:
        CheckpointError: A file cannot be read.
    """
    differing = find_differing_file(part, location, status.undecided)
    if differing is not None:
        return CopyComparison(f"{differing} differs in content from {part.source / differing}")
    if status.undecided:
        save_evidence(part.source, location, status.proof or {})
    nbytes = sum(part.files[name].size for name in status.undecided)
    return CopyComparison(None, len(status.undecided), nbytes, status.files_unchanged)


def _by_size(part: FileGroup, there: Mapping[str, Status]) -> str | None:
    extra = sorted(there.keys() - part.files.keys() - set(part.commits))
    if extra:
        return f"{extra[0]} exists, but not in the source"
    for name, result in part.files.items():
        if name not in there:
            return f"{name} is missing"
        if there[name].size != result.size:
            return f"{name} has {there[name].size} bytes, not {result.size}"
    missing = [name for name in part.commits if name not in there and name in part.files]
    return f"{missing[0]} is missing" if missing else None


def _by_link(part: FileGroup, location: Location, there: Mapping[str, Status]) -> str | None:
    """Describe a file that depends on another location: the source's own file, or a link."""
    for name, result in part.files.items():
        if name in there and result.identity is not None and there[name].identity == result.identity:
            return f"{name} is a link to {part.source / name}, not a copy"
    links = find_outside_links(location, ((location / name).key for name in there))
    return next((f"{name} is a link to {links[name]}, not a copy" for name in sorted(links)), None)


class _DifferenceError(Exception):
    """A file of the part differs from its copy."""


def find_differing_file(part: FileGroup, location: Location, names: Sequence[str]) -> str | None:
    """Find a file whose copy has different bytes.

    Returns:
        The file's name; None if all copies are equal.

    Raises:
        CheckpointError: A file cannot be read.
    """

    def compare(piece: FileRange) -> None:
        source, copy = part.source / piece.name, location / piece.name
        with source.open(part.files[piece.name]) as ours, copy.open() as theirs:
            if ours.size != theirs.size:
                raise _DifferenceError(piece.name)
            for start in range(piece.start, piece.stop, BLOCK_BYTES):
                length = min(BLOCK_BYTES, piece.stop - start)
                if ours.read(start, length) != theirs.read(start, length):
                    raise _DifferenceError(piece.name)

    pieces = split_files({name: part.files[name].size for name in names}, PIECE_BYTES)
    threads = max(_MIN_THREADS, *(item.store.costs.requests or 1 for item in (part.source, location)))
    try:
        map_in_threads(threads, compare, pieces)
    except _DifferenceError as error:
        return str(error)
    return None
