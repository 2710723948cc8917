"""Select the content to copy (steps of a run, an item, a model), and check that it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property

from ckpttools.array.gaps import refuse_incomplete
from ckpttools.array.tree import Tree
from ckpttools.copying.part import FileGroup, commits_of
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, UsageError
from ckpttools.core.message_terms import action, option
from ckpttools.core.text import format_ranges, matches_any, plural, sample_names
from ckpttools.formats.detect import LocationKind, detect, find_leftover
from ckpttools.formats.flax.format import state_fault
from ckpttools.formats.interrupted import find_interrupted_copy, next_step
from ckpttools.formats.json_file import read_json
from ckpttools.formats.lookalikes import MAX_POINTER_BYTES, is_pointer, refuse_disguise
from ckpttools.formats.orbax.entries import entries_of
from ckpttools.formats.orbax.hosts import is_part_of_a_host
from ckpttools.formats.orbax.metadata import TREE_FILE, parse_tree
from ckpttools.formats.orbax.steps import OrbaxItem, OrbaxRun, Step, orbax_at, unfinished_reason
from ckpttools.formats.registry import not_opened, open_all_steps, open_detected, open_tree
from ckpttools.formats.sidecar import PATTERNS
from ckpttools.formats.zarr.legacy_runs import LegacyRun, legacy_items, legacy_run, legacy_run_in
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import find_unfinished

# Files next to steps describe the run. Larger files must be copied separately.
_MAX_SIDE_FILE_BYTES = 16 << 20


@dataclass(frozen=True)
class CopySelection:
    """The content to copy.

    Attributes:
        parts: The parts, in the order of the copy.
        small: Single files next to the steps, by their names at the destination.
        left_out: Content that is not copied, with reasons.
        steps_at: Directory below the destination for steps that are added to a run; None otherwise.
        model: The opened tree if a directory is copied as a whole; None if the directory has several trees,
            or for Orbax.
    """

    parts: Sequence[FileGroup]
    small: Mapping[str, Location] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    steps_at: str | None = None
    model: Tree | None = None


def select_content(source: Location, steps: Sequence[int] = (), latest: int | None = None) -> CopySelection:
    """Select the content to copy.

    Args:
        source: A run, step or item, or a checkpoint directory in another format.
        steps: Steps of a run to copy; empty for all finished steps.
        latest: Number of latest finished steps of a run to copy; None for all.

    Raises:
        UsageError: A step does not exist, or the source has no steps.
        FormatError: The source is not a checkpoint, or is unfinished.
        StorageError: The source does not exist, or the store does not respond.
    """
    detected = detect(source)
    if detected.unfinished is not None:
        raise not_opened(detected)
    if not detected.is_directory:
        open_detected(detected)  # Raises an error unless the file could be copied with its directory.
        raise UsageError(
            "a single file cannot be copied",
            location=source,
            expected="a directory with a checkpoint",
            hint=f"pass its directory: {source.parent}",
        )
    result = detected.orbax
    if isinstance(result, OrbaxRun) and result.steps:
        legacy = legacy_run_in(result.path, [step.path for step in result.steps.values()])
        return _RunRoot(source, result.path, result.steps, legacy).select_content(steps, latest)
    if isinstance(result, OrbaxRun) and (legacy := legacy_run(source)) is not None:
        return _RunRoot(source, legacy.path, {}, legacy).select_content(steps, latest)
    if (steps or latest is not None) and (states := detected.flax_states):
        return _select_states(source, states, steps, latest)
    if steps or latest is not None:
        selection_option = option("steps") if steps else option("latest")
        raise UsageError(f"{source} is not a run with steps", hint=f"leave {selection_option} out")
    match result:
        case OrbaxItem():
            reason = ", ".join(result.step.faults([result])) or None
            part = FileGroup(source, commits=commits_of([""]))
        case Step():
            reason, part = unfinished_reason(result), _part_of(result, "")
        case _:
            trees = [*open_all_steps(detected)]
            for tree in trees:
                refuse_incomplete(tree.arrays.values(), str(source))
            return CopySelection([FileGroup(source)], model=trees[0] if len(trees) == 1 else None)
    if reason:
        raise _unfinished_error(source, reason)
    return CopySelection([part])


def _select_states(
    source: Location, states: Mapping[int, Location], steps: Sequence[int], latest: int | None
) -> CopySelection:
    """Select some of the states that Flax wrote to one directory, and the files next to them.

    Raises:
        UsageError: A step does not exist.
        FormatError: A chosen state is damaged, or no state is complete.
    """
    for number in steps:
        if number not in states:
            raise UsageError(
                f"step {number} does not exist",
                location=source,
                expected=f"one of {format_ranges(sorted(states))}",
            )
        if reason := state_fault(states[number]):
            raise _unfinished_error(states[number], reason)
    selected = sorted({*steps}) or [state for state in sorted(states) if state_fault(states[state]) is None]
    selected = selected if latest is None else selected[-latest:]
    if not selected:
        raise _unfinished_error(source, f"step {format_ranges(sorted(states))}, all unreadable")
    left_out = frozenset(states[number].name for number in states if number not in selected)
    return CopySelection([FileGroup(source, left_out=left_out)])


def _part_of(step: Step, name: str) -> FileGroup:
    """Return a step with its name at the destination."""
    below = {item.directory.relative_to(step.path) for item in step.items}
    handlers = step.declared.handlers
    if isinstance(handlers, dict):
        directories = {entry.name for entry in step.path.entries() if entry.is_dir}
        below |= directories & handlers.keys()
    return FileGroup(step.path, name, step.number, commits_of(sorted(below)))


@dataclass(frozen=True)
class _RunRoot:
    """A run: the given directory or its subdirectory `checkpoints`.

    Attributes:
        source: The given directory.
        path: The directory with the steps.
        orbax_steps: Steps with `_METADATA`, by number.
        legacy: Steps of older versions of Orbax; None if there are none.
    """

    source: Location
    path: Location
    orbax_steps: Mapping[int, Step]
    legacy: LegacyRun | None

    @cached_property
    def steps(self) -> Mapping[int, Step]:
        """All steps by number, in order."""
        legacy = {} if self.legacy is None else self.legacy.steps
        if self.legacy is not None and self.orbax_steps:
            # Other directories next to steps with `_METADATA` may also end in a number.
            legacy = {number: legacy[number] for number in self.legacy.legacy}
        others = {number: Step(location) for number, location in legacy.items()}
        return dict(sorted({**others, **self.orbax_steps}.items()))

    def select_content(self, steps: Sequence[int], latest: int | None) -> CopySelection:
        answers = map_concurrently(self.source.store, self._unfinished_reason, self.steps)
        reasons = dict(zip(self.steps, answers, strict=True))
        self._check(steps, reasons)
        finished = sorted(number for number, reason in reasons.items() if reason is None)
        expected = sorted(set(steps)) if steps else finished
        if latest is not None:
            expected = expected[-latest:]
        if not expected:
            left = find_interrupted_copy(self.path)
            raise FormatError(
                "no step is finished",
                location=self.path,
                got=f"step {format_ranges(reasons)}, all damaged",
                hint=next_step(left) if left else f"{action('doctor', str(self.path))} shows details",
            )
        selected = [self._part(number) for number in expected]
        other_entries = list(self._other_entries())
        parts = [
            FileGroup(location, self._relative_name(location))
            for location, reason in other_entries
            if reason is None
        ]
        directories = [part for part in parts if part.source.is_dir()]
        small = {part.name: part.source for part in parts if part.source.is_file()}
        left_out = {
            self._relative_name(location): reason for location, reason in other_entries if reason is not None
        }
        left_out |= {self._name(number): reason for number, reason in reasons.items() if reason is not None}
        return CopySelection([*directories, *selected], small, left_out, self._relative_name(self.path))

    def _part(self, number: int) -> FileGroup:
        step = self.steps[number]
        if number in self.orbax_steps:
            return _part_of(step, self._name(number))
        items = legacy_items(step.path)
        for item in items:
            refuse_incomplete(open_tree(item).arrays.values(), str(item))
        commits = commits_of([item.relative_to(step.path) for item in items])
        return FileGroup(step.path, self._name(number), number, commits)

    def _unfinished_reason(self, number: int) -> str | None:
        if self.legacy is not None and number not in self.orbax_steps:
            return self.legacy.mismatch_reason(number)
        step = self.orbax_steps[number]
        name = step.path.name
        # Checking for a conversion takes several requests, so it is done only if the name suggests one.
        is_asked = any(item != name and item.startswith(name) for item in self._names)
        return unfinished_reason(step, is_asked=is_asked)

    @cached_property
    def _names(self) -> list[str]:
        return [entry.name for entry in self.path.entries()]

    def _check(self, steps: Sequence[int], reasons: Mapping[int, str | None]) -> None:
        """Raise an error if a requested step is missing or incomplete, or any step is damaged."""
        for number in steps or reasons:
            if number not in reasons:
                existing = f"one of {format_ranges(reasons)}"
                raise UsageError(f"step {number} does not exist", location=self.path, expected=existing)
            reason, step = reasons[number], self.steps[number]
            if reason is None:
                continue
            if steps:
                raise _unfinished_error(step.path, reason)
            if self._is_damaged(number) and not find_unfinished(step.path):
                finished = sorted(item for item, problem in reasons.items() if problem is None)
                others = " ".join(option("steps", item) for item in finished[-3:])
                raise FormatError(
                    f"step {number} was saved completely, but is damaged now",
                    location=step.path,
                    got=reason,
                    hint=f"{action('doctor', str(step.path))} shows details; to copy others, name them: "
                    f"{others or 'none is complete'}",
                )

    def _is_damaged(self, number: int) -> bool:
        """Return whether an unfinished step was saved completely."""
        if self.legacy is not None and number not in self.orbax_steps:
            return not self.legacy.is_skippable(number)
        return self.orbax_steps[number].is_damaged

    def _name(self, number: int) -> str:
        return self._relative_name(self.steps[number].path)

    def _relative_name(self, location: Location) -> str:
        return location.relative_to(self.source)

    def _other_entries(self) -> Iterator[tuple[Location, str | None]]:
        """Yield the files and directories next to the steps, with the reason for leaving each out."""
        if self.path != self.source:
            inner = self.path.name
            for entry in self.source.entries():
                if entry.name != inner:
                    yield self.source / entry.name, f"it is not in {inner}, where the steps are"
        steps = {step.path.name for step in self.steps.values()}
        for entry in self.path.entries():
            if entry.name in steps:
                continue
            location = self.path / entry.name
            yield location, _left_out_reason(location)


def _left_out_reason(location: Location) -> str | None:
    leftover = find_leftover(location)
    if leftover is LocationKind.SAVE:
        return f"temporary name {location.name}"
    if location.is_file():
        is_large = location.stat().size > _MAX_SIDE_FILE_BYTES
        if is_large:
            return f"it is larger than {_MAX_SIDE_FILE_BYTES >> 20} MiB and not part of a step"
        return state_fault(location)
    if location.is_link():
        return "it is a link to a directory, or to nothing"
    if leftover is LocationKind.INTERRUPTED:
        return "an interrupted or running conversion"
    if Step(location).number is not None:
        return "it is named like a step, but does not belong to this run"
    return None if any(True for _ in location.below()) else "it is empty"


def _unfinished_error(location: Location, reason: str) -> FormatError:
    return FormatError(
        "this is not a finished checkpoint",
        location=location,
        got=reason,
        expected="a completed save: elsewhere a copy of an unfinished one could look finished",
        hint=f"{action('doctor', str(location))} shows details",
    )


# Other files that repositories keep in Git LFS.
_LARGE_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.distcp")


def check_complete(part: FileGroup) -> tuple[str, ...]:
    """Check metadata and indexes of items, and look for missing chunks and Git LFS pointers.

    Returns:
        Remarks on items that were not searched for missing chunks, with the reason (a copy includes arrays of
        kinds that ckpttools does not read), and on pointers in place of other files.

    Raises:
        FormatError: Metadata is damaged; an index refers to files outside its item, or to files that are
            missing or too short; chunks are missing; or a tokenizer or configuration file is a Git LFS
            pointer.
        StorageError: The part cannot be read.
    """
    remarks = [*_check_pointers(part)]
    result = orbax_at(part.source)
    if isinstance(result, OrbaxRun):
        return (*remarks,)  # Files next to steps, or a checkpoint that has already been opened.
    for item in (result,) if isinstance(result, OrbaxItem) else result.items:
        parse_tree(read_json(item.directory / TREE_FILE), str(item.directory / TREE_FILE))
        _check_index(item.directory)
        # One host's part does not have the chunks of the others.
        if not is_part_of_a_host(item.directory):
            remarks += _check_chunks(item.directory)
    return tuple(remarks)


def _check_pointers(part: FileGroup) -> Iterator[str]:
    """Reject Git LFS pointers in place of sidecars, and report those in place of files that no check opens.

    Files in subdirectories count only if they have typical names, because a checkpoint can have 100,000 chunk
    files, and in a network store each read is a request.
    """
    small = [
        name
        for name, result in part.files.items()
        if 0 < result.size <= MAX_POINTER_BYTES
        and ("/" not in name or _is_named(name, (*PATTERNS, *_LARGE_FILES)))
    ]
    heads = map_concurrently(part.source.store, lambda name: (part.source / name).read_bytes(), small)
    pointers = {name: head for name, head in zip(small, heads, strict=True) if is_pointer(head)}
    for name in pointers:
        if _is_named(name, PATTERNS):
            refuse_disguise(pointers[name], str(part.source / name))
    if pointers:
        are = "is a Git LFS pointer" if len(pointers) == 1 else "are Git LFS pointers"
        copies = "so are their copies" if len(pointers) > 1 else "so is its copy"
        yield (
            f"{plural(len(pointers), 'file')} {are}, not the data, and {copies}: "
            f"{sample_names(sorted(pointers))}; "
            f"run `git lfs pull` in {part.source} before copying"
        )


def _is_named(path: str, patterns: Iterable[str]) -> bool:
    """Return whether the last component of a path matches a pattern.

    The names of chunks are rejected early.
    """
    name = path.rpartition("/")[2]
    return name[:1].isalpha() and matches_any(name, patterns)


def _check_index(item: Location) -> None:
    # An index that names a file above its directory is rejected while it is read.
    fault = next(iter(entries_of(item).faults.values()), None)
    if fault is not None:
        raise FormatError("files that the index names are missing", location=item, got=fault, hint=fault.hint)


def _check_chunks(item: Location) -> Iterator[str]:
    try:
        tree = open_tree(item)
    except FormatError as error:
        yield f"{item} was not searched for missing chunks: {error.raw.message}{_format_error(error)}"
        return
    refuse_incomplete(tree.arrays.values(), str(item))


def _format_error(error: FormatError) -> str:
    return "" if error.raw.got is None else f" ({error.raw.got})"
