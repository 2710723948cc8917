"""Whether the files of a checkpoint are what the store that they lie in says: one call, one report."""

from __future__ import annotations

from ckpttools.api.sources import DEFAULT_MEMORY, Observe, scanning
from ckpttools.core.checked import checked
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError, listing
from ckpttools.core.message_terms import option
from ckpttools.stores.contents import FileDifference, ListsContents, differing
from ckpttools.stores.registry import LocationLike, parse

_SHOWN = 8


@dataclass(frozen=True, slots=True, repr=False)
class FileVerification:
    """What was found.

    Attributes:
        path: what was read; of a revision the commit.
        against: who says what the files are.
        equal: whether they are that.
        files: how many there are.
        nbytes: of all of them.
        different: how many are not as they should be.
        differences: each of them.
    """

    path: str
    against: str
    equal: bool
    files: int
    nbytes: int
    different: int
    differences: tuple[FileDifference, ...]

    def __repr__(self) -> str:
        lines = [
            f"{difference.name}: {difference.got} instead of {difference.expected}"
            for difference in self.differences
        ]
        verdict = "equal" if self.equal else f"{self.different:,} different"
        what = f"{self.path} against {self.against}"
        return f"<FileVerification of {what}: {verdict}, {self.files:,} files{listing(lines, _SHOWN)}>"


@checked
def verify_files(
    checkpoint: LocationLike,
    *,
    memory: int | str = DEFAULT_MEMORY,
    jobs: int | None = None,
    requests: int | None = None,
    observe: Observe | None = None,
) -> FileVerification:
    """Reads all files and compares them with the digests that their store lists, as the hub does.

    Args:
        checkpoint: a model of the hub, a directory or a file in it.
        memory: bytes that may be resident at most, as a number or as text.
        jobs: files at a time; None for four.
        requests: reads under way at once; None for as many as are found good.
        observe: called with the bytes read so far and the bytes to read in all.

    Raises:
        UsageError: the store lists no digests.
        MemoryBudgetError: the memory is too small.
        StorageError: nothing is there, or the store cannot be read.
    """
    location = parse(checkpoint)
    if not isinstance(location.store, ListsContents):
        raise UsageError(
            f"{location.store.scheme}:// does not say what its files hold",
            location=location,
            expected=f"hf://…, or something to compare with: {option('against', 'SRC')}, "
            f"{option('manifest', 'FILE')}",
        )
    result = location.store.contents(location.key)
    total = sum(file.size for file in result.files.values())
    with scanning({"memory": memory, "requests": requests, "observe": observe}) as scan:
        different = differing(
            location, result.files, memory=scan.memory, jobs=jobs, observe=scan.observer(total)
        )
    return FileVerification(
        str(location.absolute()),
        result.declared,
        not different,
        len(result.files),
        total,
        len(different),
        tuple(different),
    )
