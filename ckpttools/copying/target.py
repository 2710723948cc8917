"""Compare the destination of a copy with its source, and decide whether it may be replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ckpttools.copying.comparison import CopyComparison, compare_content, compare_status
from ckpttools.copying.part import FileGroup, files_below
from ckpttools.copying.selection import CopySelection
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, DestinationExistsError, StorageError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.text import plural, sample_names
from ckpttools.formats.detect import Detected, detect
from ckpttools.formats.interrupted import begun_in, next_step
from ckpttools.formats.orbax.steps import OrbaxItem, OrbaxRun, Step
from ckpttools.formats.registry import find_unowned_files, is_own_file, open_detected
from ckpttools.formats.zarr.legacy_runs import legacy_run
from ckpttools.stores.abilities import SupportsPut
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location
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
                _refuse_begun(self.of(part))
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
        _refuse_begun(location)
        raise DestinationExistsError(
            f"{location} exists, and is not a run",
            got=f"{others[0]} in it, and no steps",
            expected="a run, to which steps can be added, or a new name",
            hint="choose another destination, such as a directory in it",
        )


def _refuse_begun(location: Location) -> None:
    """Raise DestinationExistsError if another copy to this destination was interrupted."""
    left = find_unfinished(location) or begun_in(location)
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
    there = files_below(location) if location.is_dir() else {}
    known = {*part.files, *part.commits}
    lost = [name for name in there if name not in known and not is_of_repository(location, name)]
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
    return bool(there)


def _check_kinds(source: Location, location: Location, lost: Sequence[str]) -> None:
    """Refuse to replace a run, a checkpoint of another kind, or a checkpoint with unrelated files in it."""
    there = detect(location, is_content=True)
    old, new = kind_of(there), kind_of(detect(source, is_content=True))
    others = (
        [name for name in find_unowned_entries(there) if not (source / name).exists()] if old == new else []
    )
    if old != new or others:
        raise DestinationExistsError(
            f"{location} is not replaced: it is {f'{old} with {others[0]} in it' if others else old}",
            got=find_fault(there)
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
