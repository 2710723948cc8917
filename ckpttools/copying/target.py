"""Compare the destination of a copy with its source, and decide whether it may be replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ckpttools.copying.part import FileGroup, files_below
from ckpttools.copying.pieces import BLOCK_BYTES, PIECE_BYTES, FileRange, split_files
from ckpttools.copying.selection import CopySelection
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, DestinationExistsError, StorageError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.text import plural, sample_names
from ckpttools.formats.detect import Detected, detect
from ckpttools.formats.interrupted import find_interrupted_copy, next_step
from ckpttools.formats.orbax.steps import OrbaxItem, OrbaxRun, Step
from ckpttools.formats.registry import find_unowned_files, is_own_file, open_detected
from ckpttools.formats.zarr.legacy_runs import legacy_run
from ckpttools.stores.abilities import SupportsPut
from ckpttools.stores.base import Status
from ckpttools.stores.concurrency import map_concurrently, map_in_threads
from ckpttools.stores.evidence import combine_evidence, get_stamp, load_evidence, save_evidence
from ckpttools.stores.location import Location
from ckpttools.stores.outside_links import find_outside_links
from ckpttools.stores.publishing import find_unfinished
from ckpttools.stores.sharing import is_of_repository


@dataclass(frozen=True)
class CopyTarget:
    """The destination of a copy.

    Attributes:
        location: The destination.
        overwrite: Whether existing content that differs may be replaced.
        optimizer_in: Returns the name of a checkpoint's optimizer state, or None.
    """

    location: Location
    overwrite: bool
    optimizer_in: Callable[[Location], str | None]

    def of(self, part: FileGroup) -> Location:
        """Return the location of a part."""
        return self.location / part.name if part.name else self.location

    def check_replaced(self, part: FileGroup) -> None:
        """Raise an error if replacing the existing content would lose data.

        Raises:
            DestinationExistsError: The destination is a checkpoint of another kind, such as a run; or it has
                a file that does not belong to a checkpoint, an item that the source lacks, or optimizer
                state.
        """
        location = self.of(part)
        if _check_files(part, location):
            self._check_optimizer(part.source, location)

    def _check_optimizer(self, source: Location, location: Location) -> None:
        old = self.optimizer_in(location)
        if old and not self.optimizer_in(source):
            raise DestinationExistsError(
                f"{location} is not replaced: it has optimizer state ({old})",
                expected="no optimizer state, because the replacement has none",
                hint="choose another destination, or move the existing content away",
            )

    def result(self, selection: CopySelection, *, verify: bool) -> Mapping[str, CopyComparison]:
        """Compare existing content with the source, by name.

        Args:
            selection: The content to copy.
            verify: Whether all bytes of existing content are compared.

        Raises:
            DestinationExistsError: Other content exists and may not be replaced.
            UsageError: The selection contains single files, which the destination does not support.
        """
        self._check_small(selection.small)
        _check_run(self.location, selection)

        def look(part: FileGroup) -> CopyComparison | None:
            location = self.of(part)
            # An unfinished copy is either resumed or rejected when its journal is read.
            return None if find_unfinished(location) else compare_status(part, location, verify=verify)

        result: dict[str, CopyComparison] = {}
        compared_parts = map_concurrently(self.location.store, look, selection.parts)
        for part, status in zip(selection.parts, compared_parts, strict=True):
            comparison = status
            if status is not None and status.difference is None:
                comparison = compare_content(part, self.of(part), status)
            if comparison is not None and comparison.difference is None:
                result[part.name] = comparison
            elif comparison is not None and comparison.difference is not None and not self.overwrite:
                _refuse_interrupted(self.of(part))
                # Content that no option allows to replace is rejected first, so that one hint does not lead
                # to another error.
                self.check_replaced(part)
                raise _other_content(self.of(part), comparison.difference)
        return result

    def _check_small(self, small: Mapping[str, Location]) -> None:
        """Check the single files next to the steps of a run."""
        if small and not isinstance(self.location.store, SupportsPut):
            raise UsageError(
                f"files next to the steps of a run cannot be copied to {self.location}",
                got=sample_names(list(small)),
                expected="a directory or a bucket as destination",
                hint="copy a step by its own path",
            )
        for name, source in small.items():
            location = self.location / name
            if not self.overwrite and location.exists() and location.read_bytes() != source.read_bytes():
                raise _other_content(location, "different content")


def _check_run(destination: Location, selection: CopySelection) -> None:
    """Refuse to add steps to a directory with other content."""
    below = selection.steps_at
    if below is None:
        return
    location = destination / below if below else destination
    if not location.is_dir():
        return
    names = {(destination / part.name).name for part in selection.parts}
    small = {(destination / name).name for name in selection.small}
    others = [
        entry.name
        for entry in location.entries()
        if entry.name not in small and not any(entry.name.startswith(name) for name in names)
    ]
    if others and not OrbaxRun(location).steps and legacy_run(location) is None:
        _refuse_interrupted(location)
        raise DestinationExistsError(
            f"{location} exists, and is not a run",
            got=f"{others[0]} in it, and no steps",
            expected="a run, to which steps can be added, or a new name",
            hint="choose another destination, such as a directory in it",
        )


def _refuse_interrupted(location: Location) -> None:
    """Raise DestinationExistsError if another copy to this destination was interrupted."""
    left = find_unfinished(location) or find_interrupted_copy(location)
    if left is not None:
        raise DestinationExistsError(
            f"another {left.kind} to {location} was interrupted",
            got=left.command or None,
            expected="a finished copy, or a new name",
            hint=next_step(left),
        )


def _other_content(location: Location, difference: str) -> DestinationExistsError:
    return DestinationExistsError(
        f"{location} already exists and differs from the source",
        got=difference,
        expected="a new name, or the same content",
        hint=f"choose another destination, or allow its replacement with {option('overwrite', True)}",
    )


def _check_files(part: FileGroup, location: Location) -> bool:
    """Return whether a part replaces existing files. Refuses to replace files that would be lost."""
    existing = files_below(location) if location.is_dir() else {}
    known = {*part.files, *part.commits}
    lost = [name for name in existing if name not in known and not is_of_repository(location, name)]
    if lost:
        _check_kinds(part.source, location, lost)
    items = {name.partition("/")[0] for name in part.files if "/" in name}
    for name in lost:
        head, slash, _ = name.partition("/")
        if not is_own_file(name) or (part.step is not None and slash and head not in items):
            raise DestinationExistsError(
                f"{location} is not replaced: it contains {name}, which the source does not",
                expected="a checkpoint with the same items, and nothing else",
                hint="choose another destination, or move the existing content away",
            )
    return bool(existing)


def _check_kinds(source: Location, location: Location, lost: Sequence[str]) -> None:
    """Refuse to replace a run, a checkpoint of another kind, or a checkpoint with unrelated files in it."""
    existing = detect(location, is_content=True)
    old, new = kind_of(existing), kind_of(detect(source, is_content=True))
    others = (
        [name for name in find_unowned_entries(existing) if not (source / name).exists()]
        if old == new
        else []
    )
    if old != new or others:
        raise DestinationExistsError(
            f"{location} is not replaced: it is {f'{old} with {others[0]} in it' if others else old}",
            got=find_fault(existing)
            or (None if others else f"files that the source lacks: {sample_names(lost)}"),
            expected=f"{new} with no other files",
            hint="choose another destination, or move the existing content away",
        )


def kind_of(detected: Detected) -> str:
    """Describe a directory in the same words for all checkpoints that may replace each other.

    Raises:
        StorageError: The directory cannot be read.
    """
    match detected.orbax:
        case OrbaxItem():
            return "an item of Orbax"
        case Step():
            return "a step of Orbax"
        case OrbaxRun(steps=steps) if steps:
            return f"a run with {plural(len(steps), 'step')}"
    try:
        return f"a checkpoint of format {open_detected(detected).metadata.format}"
    except StorageError:
        raise
    except CheckpointError:
        return "not a readable checkpoint"


def find_fault(detected: Detected) -> str | None:
    """Find a file that cannot be read as part of a checkpoint, and the reason.

    Returns:
        None if the directory is a readable checkpoint, or not a checkpoint at all.

    Raises:
        StorageError: The directory cannot be read.
    """
    try:
        open_detected(detected)
    except StorageError:
        raise
    except CheckpointError as error:
        if error.location not in (None, str(detected.location)):
            return f"{error.location}: {error.raw.line}"
    return None


def find_unowned_entries(detected: Detected) -> Iterable[str]:
    """Return the files next to a checkpoint that are not part of it, such as another checkpoint.

    Raises:
        StorageError: The directory cannot be read.
    """
    if not isinstance(detected.orbax, OrbaxRun) or detected.orbax.steps:
        return ()
    try:
        return sorted(find_unowned_files(detected.location, open_detected(detected)))
    except StorageError:
        raise
    except CheckpointError:
        return ()


_MIN_THREADS = 2


@dataclass(frozen=True, slots=True)
class CopyComparison:
    """The differences between a part and its destination.

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
    existing = {
        name: item
        for name, item in result.items()
        if name in part.files or not is_of_repository(location, name)
    }
    if not existing:
        return None
    difference = _size_difference(part, existing) or _link_difference(part, location, existing)
    if difference:
        return CopyComparison(difference)
    proof = combine_part_evidence(part, location, existing)
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


def _size_difference(part: FileGroup, existing: Mapping[str, Status]) -> str | None:
    extra = sorted(existing.keys() - part.files.keys() - set(part.commits))
    if extra:
        return f"{extra[0]} exists, but not in the source"
    for name, result in part.files.items():
        if name not in existing:
            return f"{name} is missing"
        if existing[name].size != result.size:
            return f"{name} has {existing[name].size} bytes, not {result.size}"
    missing = [name for name in part.commits if name not in existing and name in part.files]
    return f"{missing[0]} is missing" if missing else None


def _link_difference(part: FileGroup, location: Location, existing: Mapping[str, Status]) -> str | None:
    """Describe a file that depends on another location: the source's own file, or a link."""
    for name, result in part.files.items():
        if name in existing and result.identity is not None and existing[name].identity == result.identity:
            return f"{name} is a link to {part.source / name}, not a copy"
    links = find_outside_links(location, ((location / name).key for name in existing))
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
        with source.open(part.files[piece.name]) as source_file, copy.open() as copy_file:
            if source_file.size != copy_file.size:
                raise _DifferenceError(piece.name)
            for start in range(piece.start, piece.stop, BLOCK_BYTES):
                length = min(BLOCK_BYTES, piece.stop - start)
                if source_file.read(start, length) != copy_file.read(start, length):
                    raise _DifferenceError(piece.name)

    pieces = split_files({name: part.files[name].size for name in names}, PIECE_BYTES)
    threads = max(_MIN_THREADS, *(item.store.costs.requests or 1 for item in (part.source, location)))
    try:
        map_in_threads(threads, compare, pieces)
    except _DifferenceError as error:
        return str(error)
    return None
