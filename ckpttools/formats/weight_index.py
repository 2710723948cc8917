"""The index of a model's weights, such as `model.safetensors.index.json`, and the files that it names."""

from __future__ import annotations

import itertools
import posixpath
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from shlex import quote
from typing import NoReturn

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, list_with_count, listing
from ckpttools.core.message_terms import call
from ckpttools.core.text import first_names, plural, sample_names
from ckpttools.formats.sidecar_files import is_file, sidecar_json
from ckpttools.stores.base import is_inside
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location

_INDEX_HINT = "fetch the index again, or remove it: the files themselves list their tensors"
_REFETCH_HINT = "fetch the index and its files again"
_NUMBERED = re.compile(r"(?P<stem>.*)-\d+-of-(?P<rest>\d+\..*)", re.DOTALL)


@dataclass(frozen=True)
class WeightsLocation:
    """The location of weights: file names in a directory, or an index of them.

    Attributes:
        folder: The directory.
        files: Names of the files if there is no index.
        index: Name of the index. Its file names are relative to the directory.
        is_chosen: Whether `transformers_weights` in `config.json` names the file or the index.
    """

    folder: Location
    files: tuple[str, ...] = ()
    index: str | None = None
    is_chosen: bool = False

    @cached_property
    def named(self) -> Mapping[str, str] | None:
        """The index: normalized file name by tensor name, or None. Raises errors like `_weight_map`."""
        if self._as_written is None:
            return None
        names = {name: sys.intern(normalize_name(name)) for name in {*self._as_written.values()}}
        return {tensor: names[name] for tensor, name in self._as_written.items()}

    @cached_property
    def _as_written(self) -> Mapping[str, str] | None:
        return None if self.index is None else _weight_map(self.folder / self.index)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The normalized file names; from an index, in the order of `sort_by_reading_order`.

        Raises:
            FormatError: The index is damaged, or a file is missing or outside the directory.
        """
        if self._as_written is None or self.index is None:
            return self.files
        names = sorted({*self._as_written.values()})
        for name in names:
            _check_inside(name, self.folder / self.index)
        return _files_of_index(self.folder, self.folder / self.index, sort_by_reading_order(names))

    @cached_property
    def unnamed(self) -> tuple[str, ...]:
        """Files of the same series that are not in the index; empty where listing takes a request."""
        if self.named is None or self.folder.store.scheme != "file":
            return ()  # Listing a remote directory takes a request.
        series = {_series_of(name) for name in self.names} - {None}
        others = sorted({*visible_files(self.folder)} - {*self.names}) if series else []
        return tuple(name for name in others if _series_of(name) in series)

    def check(self, tensors: Sequence[tuple[str, str]]) -> None:
        """Check that no tensor is in two files, and that the index maps each tensor to its file.

        Args:
            tensors: Pairs of tensor name and file.

        Raises:
            FormatError: The index and the files disagree. The message lists the differences.
        """
        _check_once(tensors, self.folder)
        if self.named is not None and self.index is not None:
            if self.unnamed:
                raise FormatError(
                    f"the index leaves out files of the same series:{listing(self.unnamed)}",
                    location=self.folder / self.index,
                    expected="all files of the series",
                    hint=f"move these files away, or: {_INDEX_HINT}",
                )
            _check_index(self.named, dict(tensors), self.folder / self.index)

    def check_as_loaded(
        self, tensors: Sequence[tuple[str, str]], tensors_in: Callable[[str], Iterable[str]]
    ) -> tuple[str, ...]:
        """Check that the files of the index form a complete model, as transformers reads them.

        transformers reads all files in the index in the order of their names. If a tensor is in several
        files, the last file wins, regardless of the index. Tensors that the index does not list are also
        read, and files that it does not name are skipped. This check accepts a tensor in several files only
        if the index names the last one, and skips a file only if the others have all of its tensors.

        Args:
            tensors: Pairs of tensor name and file, sorted by file name.
            tensors_in: Returns the names of the tensors in a file that is not in the index.

        Returns:
            Remarks for the user about disagreements between index and files.

        Raises:
            FormatError: Tensors are missing or ambiguous. The message lists them.
        """
        if self.named is None or self.index is None:
            self.check(tensors)
            return ()
        index, last = self.folder / self.index, dict(tensors)
        files: dict[str, list[str]] = {}
        for tensor, file in tensors:
            files.setdefault(tensor, []).append(file)
        repeated = {tensor: names for tensor, names in files.items() if len(names) > 1}
        _refuse_ambiguous(self.named, repeated, index)
        unnamed_tensors = {name: frozenset(tensors_in(name)) for name in self.unnamed}
        all_tensors = [*last, *(tensor for item in unnamed_tensors.values() for tensor in item)]
        is_unique = not repeated and len(all_tensors) == len({*all_tensors})
        hint = _set_aside(index) if is_unique and self._is_one_series() else _REFETCH_HINT
        _refuse_lost(
            self.named, last, unnamed_tensors, index, hint, lambda: self._tensors_elsewhere(tensors_in)
        )
        moved = [name for name in self.named if last[name] != self.named[name]]
        unlisted = [name for name in last if name not in self.named]
        return tuple(_remarks(self.index, last, tuple(repeated), moved, unlisted, self.unnamed))

    def _tensors_elsewhere(self, tensors_in: Callable[[str], Iterable[str]]) -> dict[str, str]:
        """Return the tensors in files that are not in the index, each with its file."""
        result: dict[str, str] = {}
        for name in _other_weights(self.folder, self.names):
            try:
                result |= dict.fromkeys(tensors_in(name), name)
            except CheckpointError:
                continue  # Only readable files count.
        return result

    def _is_one_series(self) -> bool:
        """Return whether the weight files form one complete series, so that an index can be written."""
        all_tensors = {*self.names, *self.unnamed}
        series = {_series_of(name) for name in all_tensors}
        kind = series.pop() if len(series) == 1 else None
        if kind is None or self.folder.store.scheme != "file":
            return False
        count, _, ending = kind[1].partition(".")
        files = {name for name in visible_files(self.folder) if name.endswith(f".{ending}")}
        return len(all_tensors) == int(count) and files == all_tensors


def _remarks(
    index: str,
    files: Mapping[str, str],
    repeated: Sequence[str],
    moved: Sequence[str],
    unlisted: Sequence[str],
    unnamed: Sequence[str],
) -> Iterator[str]:
    """Yield remarks about tensors and files that the index lists incorrectly."""
    if repeated:
        count = plural(len(repeated), "tensor")
        yield f"{count} in several files, read from those that {index} names: {sample_names(repeated)}"
    for problem, names in (("in other files than it names", moved), ("that it does not list", unlisted)):
        if names:
            actual_files = sorted({files[name] for name in names})
            count = plural(len(names), "tensor")
            where = f"read from {sample_names(actual_files)} as transformers does"
            yield f"{index} is stale: {count} {problem}, {where}: {sample_names(names)}"
    if unnamed:
        problem = f"skipped as by transformers, as {index} does not name them and others have their tensors"
        yield f"{problem}: {sample_names(unnamed)}"


def _refuse_lost(
    named: Mapping[str, str],
    actual: Mapping[str, str],
    unnamed_tensors: Mapping[str, Collection[str]],
    index: Location,
    hint: str,
    other_locations: Callable[[], Mapping[str, str]],
) -> None:
    """Refuse an index with tensors that its files lack, or without files for some tensors."""
    lost = {
        name: sorted(item for item in unnamed_tensors[name] if item not in actual) for name in unnamed_tensors
    }
    lost = {name: tensors for name, tensors in lost.items() if tensors}
    absent = {tensor: file for tensor, file in named.items() if tensor not in actual}
    if lost:
        lines = [
            f"{name}: {plural(len(item), 'tensor')}, {sample_names(item)}" for name, item in lost.items()
        ]
        raise FormatError(
            "the index is stale: it does not name files that have tensors which no other file has:"
            + listing(lines),
            location=index,
            got=f"{plural(len({*named.values()}), 'file')} in the index",
            expected="every file that has tensors of the model; transformers would skip these",
            hint=hint,
        )
    if absent:
        others = other_locations()
        holders = sorted({others[tensor] for tensor in absent if tensor in others})
        moved = sum(tensor in others for tensor in absent)
        got = "all files that it names, without these tensors: the index or a file is of another save"
        if holders:
            got = (
                f"{plural(moved, 'tensor')} of these in files that it does not name: {sample_names(holders)}"
            )
        raise FormatError(
            "the index and its files do not hold the same tensors"
            + _format_differences("named by the index, not in the file", absent.items())
            + _format_differences("in the file, not named by the index", _unlisted_tensors(named, actual)),
            location=index,
            got=got,
            expected="every tensor of the index in a file",
            hint=hint if hint == _REFETCH_HINT else f"{_REFETCH_HINT}; or, if the files are right, {hint}",
        )


def _unlisted_tensors(named: Mapping[str, str], actual: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(tensor, file) for tensor, file in actual.items() if tensor not in named]


def _set_aside(index: Location) -> str:
    """Return the commands that replace an index with an index of all files next to it.

    Files of `torch.save` are opened without an index; only safetensors get a new index.
    """
    names = (index.with_name(f"{index.name}.aside{number or ''}") for number in itertools.count())
    target = quote(str(next(name for name in names if not name.lexists())))
    rename = f"mv -n {quote(str(index))} {target}"
    is_written = index.name.endswith(".safetensors.index.json")
    return f"{rename} && {call('doctor', str(index.parent), fix='index')}" if is_written else rename


def visible_files(folder: Location) -> list[str]:
    """Return the sorted names of visible files; hidden ones (`._model.safetensors`) are not weights."""
    return [entry.name for entry in folder.entries() if entry.name[0] != "." and not entry.is_dir]


def _other_weights(folder: Location, names: Collection[str]) -> list[str]:
    """Return the names of weight files not in `names`; empty where listing takes a request."""
    if folder.store.scheme != "file":
        return []
    endings = tuple({f".{name.rpartition('.')[2]}" for name in names})
    return [name for name in visible_files(folder) if name.endswith(endings) and name not in names]


def refuse_missing(
    missing: Sequence[str], location: Location, expected: str, others: Sequence[str] = ()
) -> NoReturn:
    """Raise an error for missing weight files.

    Args:
        missing: Names of the missing files.
        location: The index or directory that names or counts the files.
        expected: Description of the expected files.
        others: Names of weight files that may have the tensors of the missing files.
    """
    renamed = f"; or, if their tensors are in {sample_names(others)}, fetch the index again" if others else ""
    raise FormatError(
        f"{len(missing):,} of the weight files {'is' if len(missing) == 1 else 'are'} missing:"
        f"{listing(missing)}",
        location=location,
        expected=expected,
        hint=f"the download is not complete: fetch these files into the directory{renamed}",
    )


def _weight_map(path: Location) -> dict[str, str]:
    """Read the map from tensor to file in an index; `metadata.total_size` is often wrong and is ignored.

    Raises:
        FormatError: The index is damaged, or names no files.
    """
    result = sidecar_json(path, FormatError, _INDEX_HINT).get("weight_map")
    if isinstance(result, dict) and result and all(type(name) is str for name in result.values()):
        # Many tensors share few files, so each distinct name is normalized once.
        return {tensor: sys.intern(name) for tensor, name in result.items()}
    raise FormatError(
        "the index has no usable weight_map",
        location=path,
        got="none"
        if result is None
        else f"{type(result).__name__}, empty or with values that are not strings",
        expected='{"weight_map": {tensor: file, …}, …}',
        hint=_INDEX_HINT,
    )


def normalize_name(name: str) -> str:
    """Return the normalized spelling of a file name below a directory, such as `a` for `./a`.

    Names that lead outside the directory are unchanged, so that `is_inside` rejects them. A trailing slash,
    which only directories have, is also kept.
    """
    return posixpath.normpath(name) if is_inside(name) and not name.endswith("/") else name


def sort_by_reading_order(names: Iterable[str]) -> list[str]:
    """Normalize the file names of an index, in the order in which transformers reads the files.

    transformers sorts names as they are spelled. If a file has several spellings, the last one counts.
    """
    last = {normalize_name(name): position for position, name in enumerate(sorted({*names}))}
    return sorted(last, key=last.__getitem__)


def _files_of_index(folder: Location, index: Location, named: Sequence[str]) -> tuple[str, ...]:
    """Return the files that an index names, after checking that they exist.

    Raises:
        FormatError: A file does not exist.
    """
    names = tuple(named)
    # Symbolic links are followed: in the Hugging Face cache, every file is a link to a blob elsewhere.
    exists = map_concurrently(folder.store, lambda name: is_file(folder / name), names)
    missing = [name for name, is_there in zip(names, exists, strict=True) if not is_there]
    if missing:
        _refuse_stale(folder, index, names, missing)
        others = _other_weights(folder, names)
        refuse_missing(missing, index, "all files that the index names", others)
    return names


def _refuse_stale(folder: Location, index: Location, names: Sequence[str], missing: Sequence[str]) -> None:
    """Refuse an index with missing files next to another, complete series with the same stem.

    An incomplete download lacks files, but has no other series.
    """
    expected = {match["stem"] for name in missing if (match := _NUMBERED.fullmatch(name))}
    series: dict[tuple[str, str], list[str]] = {}
    for name in {*visible_files(folder)} - {*names}:
        kind = _series_of(name)
        if kind is not None and kind[0] in expected:
            series.setdefault(kind, []).append(name)
    for (_, rest), files in series.items():
        if len(files) == int(rest.partition(".")[0]):
            fetched = "or, if these files are of an earlier save, fetch the missing ones"
            is_replaceable = {*missing} == {*names}
            raise FormatError(
                f"the index names {plural(len(missing), 'file')} that do not exist, next to others that are "
                f"complete and that it does not name: the index is stale:{listing(sorted(missing))}",
                location=index,
                got=f"{plural(len(files), 'file')}: {sample_names(sorted(files))}",
                expected="the names of existing files",
                hint=f"{_set_aside(index) if is_replaceable else 'fetch the index again'}; {fetched}",
            )


def _series_of(name: str) -> tuple[str, str] | None:
    """Split the name of a numbered file into stem, count and suffix; return None for other files."""
    match = _NUMBERED.fullmatch(name)
    return (match["stem"], match["rest"]) if match else None


def _check_inside(name: str, index: Location) -> None:
    if is_inside(name):
        return
    raise FormatError(
        f"the index names a file outside of its directory: {name!r}",
        location=index,
        got=repr(name),
        expected="the name of a file next to the index",
        hint="do not trust this index; fetch the checkpoint from its source again",
    )


def _check_once(tensors: Sequence[tuple[str, str]], folder: Location) -> None:
    """Check that no tensor is in two files, given (tensor, file) pairs.

    Raises:
        FormatError: Tensors are in several files. The message lists them.
    """
    if len({tensor for tensor, _ in tensors}) == len(tensors):
        return
    locations: dict[str, list[str]] = {}
    for tensor, file in tensors:
        locations.setdefault(tensor, []).append(file)
    names_by_files: dict[tuple[str, ...], list[str]] = {}
    for tensor, files in locations.items():
        if len(files) > 1:
            names_by_files.setdefault(tuple(files), []).append(tensor)
    duplicates = [
        f"{sample_names(tensors)}: in {first_names(files, 4)}" for files, tensors in names_by_files.items()
    ]
    raise FormatError(
        "the same tensors in several files:" + listing(duplicates),
        location=folder,
        expected="each tensor in one file",
        hint="move files of another checkpoint out of the directory, or name one file",
    )


def _refuse_ambiguous(
    named: Mapping[str, str], repeated: Mapping[str, Sequence[str]], index: Location
) -> None:
    """Refuse tensors that are in several files if the index does not name the last one."""
    unclear = {name: files for name, files in repeated.items() if named.get(name) in files[:-1]}
    if not unclear:
        return
    lines = [f"{name}: in {first_names(files, 4)}" for name, files in unclear.items()]
    first, files = next(iter(unclear.items()))
    raise FormatError(
        "several files have the same tensors, and the index does not name the last file:" + listing(lines),
        location=index,
        got=f"{first} in {named[first]}",
        expected=f"{files[-1]}, which transformers uses regardless of the index",
        hint="fetch the shards and the index again: they belong to different saves",
    )


def _check_index(named: Mapping[str, str], actual: Mapping[str, str], index: Location) -> None:
    """Check that an index and its files have the same tensors in the same files.

    Raises:
        FormatError: The index and the files differ. The message lists the differences.
    """
    if actual == named:
        return
    raise FormatError(
        "the index and its files do not hold the same tensors"
        + _format_differences("named by the index, not in the file", named.items() - actual.items())
        + _format_differences("in the file, not named by the index", actual.items() - named.items()),
        location=index,
        expected="exactly the tensors of the files in the index, each with its file",
        hint=_INDEX_HINT,
    )


def _format_differences(problem: str, pairs: Iterable[tuple[str, str]]) -> str:
    return list_with_count(problem, [f"{tensor} ({file})" for tensor, file in sorted(pairs)])
