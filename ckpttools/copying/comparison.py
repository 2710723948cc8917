"""Whether a destination has a part already, which no size and no time of change can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpttools.copying.files import files_below
from ckpttools.copying.part import FileGroup
from ckpttools.copying.pieces import BLOCK_BYTES, PIECE_BYTES, FileRange, pieces_of
from ckpttools.core.dataclass import dataclass
from ckpttools.stores.at_once import in_threads
from ckpttools.stores.base import Status
from ckpttools.stores.evidence import evidence, joint, record, recorded
from ckpttools.stores.place import Place
from ckpttools.stores.sharing import is_of_repository

_LEAST_THREADS = 2


@dataclass(frozen=True, slots=True)
class CopyComparison:
    """How a destination differs from a part.

    Attributes:
        difference: in words; None where there is none.
        files_compared, bytes_compared: whose content was read in both places.
        files_unchanged: that are, by the record of an earlier copy, what they were then, and so are their
            copies.
        undecided: names of files whose content is to be compared.
        proof: what is recorded for each file if there is no difference.
    """

    difference: str | None
    files_compared: int = 0
    bytes_compared: int = 0
    files_unchanged: int = 0
    undecided: tuple[str, ...] = ()
    proof: Mapping[str, str] | None = None


def compared_status(part: FileGroup, place: Place, *, verify: bool) -> CopyComparison | None:
    """Compares a part with what is at its place as far as that can be done without reading files.

    Args:
        part, place: of a copy.
        verify: whether the content of all files is compared.

    Returns:
        None where nothing is there. What is `undecided`, `compared_content` compares.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    if not place.is_dir():
        return None
    found = files_below(place)
    there = {
        name: each for name, each in found.items() if name in part.files or not is_of_repository(place, name)
    }
    if not there:
        return None
    difference = _by_size(part, there)
    if difference:
        return CopyComparison(difference)
    proof = proof_of(part, place, there)
    known = {} if verify else recorded(part.source, place)
    undecided = tuple(name for name in part.files if not proof[name] or known.get(name) != proof[name])
    return CopyComparison(None, 0, 0, len(part.files) - len(undecided), undecided, proof)


def proof_of(part: FileGroup, place: Place, there: Mapping[str, Status]) -> Mapping[str, str]:
    """For each file of a part, what it and its copy have only as long as both are what they are now."""
    return {
        name: joint(part.evidence[name], evidence(place / name, there[name])) if name in there else ""
        for name in part.files
    }


def compared_content(part: FileGroup, place: Place, found: CopyComparison) -> CopyComparison:
    """Compares the files of which `compared_status` could decide nothing, and records that they are equal.

    Raises:
        CheckpointError: a file cannot be read.
    """
    other = differing_file(part, place, found.undecided)
    if other is not None:
        return CopyComparison(f"{other} has other content than {part.source / other}")
    if found.undecided:
        record(part.source, place, found.proof or {})
    nbytes = sum(part.files[name].size for name in found.undecided)
    return CopyComparison(None, len(found.undecided), nbytes, found.files_unchanged)


def _by_size(part: FileGroup, there: Mapping[str, Status]) -> str | None:
    extra = sorted(there.keys() - part.files.keys() - set(part.commits))
    if extra:
        return f"{extra[0]} is there, and not in what is copied"
    for name, found in part.files.items():
        if name not in there:
            return f"{name} is missing"
        if there[name].size != found.size:
            return f"{name} has {there[name].size} bytes, not {found.size}"
    missing = [name for name in part.commits if name not in there and name in part.files]
    return f"{missing[0]} is missing" if missing else None


class _DifferenceError(Exception):
    """A file of the part has other bytes than its copy."""


def differing_file(part: FileGroup, place: Place, names: Sequence[str]) -> str | None:
    """The name of a file whose bytes at a place are not the part's; None if all are. Errors as of reading."""

    def compare(piece: FileRange) -> None:
        source, copy = part.source / piece.name, place / piece.name
        with source.open(part.files[piece.name]) as ours, copy.open() as theirs:
            if ours.size != theirs.size:
                raise _DifferenceError(piece.name)
            for start in range(piece.start, piece.stop, BLOCK_BYTES):
                length = min(BLOCK_BYTES, piece.stop - start)
                if ours.read(start, length) != theirs.read(start, length):
                    raise _DifferenceError(piece.name)

    pieces = pieces_of({name: part.files[name].size for name in names}, PIECE_BYTES)
    threads = max(_LEAST_THREADS, *(each.store.costs.requests or 1 for each in (part.source, place)))
    try:
        in_threads(threads, compare, pieces)
    except _DifferenceError as error:
        return str(error)
    return None
