"""The index of a model's weights, such as `model.safetensors.index.json`, and the files that it names."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NoReturn

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, counted_listing, listing
from ckpttools.core.text import first_of, some
from ckpttools.formats.sidecar_files import is_file, sidecar_json
from ckpttools.stores.at_once import at_once
from ckpttools.stores.base import is_inside
from ckpttools.stores.place import Place

_INDEX_HINT = "fetch the index again, or remove it: the files themselves say which tensors they hold"
_NUMBERED = re.compile(r"(?P<stem>.*)-\d+-of-(?P<rest>\d+\..*)", re.DOTALL)


@dataclass(frozen=True)
class WeightsLocation:
    """Where the weights are: file names in a folder, or an index that names them."""

    folder: Place
    files: tuple[str, ...] = ()
    index: str | None = None

    @cached_property
    def named(self) -> Mapping[str, str] | None:
        """Tensor name to file name, as the index has it; None without one. Errors as `_weight_map`."""
        return None if self.index is None else _weight_map(self.folder / self.index)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the files, sorted where an index names them, which is how they are numbered.

        Raises:
            FormatError: the index is damaged; one is not there, or lies outside of the folder.
        """
        if self.named is None or self.index is None:
            return self.files
        return _files_of_index(self.folder, self.folder / self.index, self.named)

    def check(self, tensors: Sequence[tuple[str, str]]) -> None:
        """Checks that no tensor is in two files, and that the index says of each in which it is.

        Args:
            tensors: name of each, and of the file that holds it.

        Raises:
            FormatError: they are not; lists which.
        """
        _check_once(tensors, self.folder)
        if self.named is not None and self.index is not None:
            _check_index(self.named, dict(tensors), self.folder / self.index)

    def check_overlaid(self, tensors: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        """Check tensors as `check` does, but accept repeated tensors if the index names the last file.

        transformers reads all files that an index names, ordered by name. The last file with a tensor counts,
        whichever file the index names. A repeated tensor is accepted only if both agree.

        Args:
            tensors: Names of the tensors and of their files, ordered by file name.

        Returns:
            The repeated tensors.

        Raises:
            FormatError: Index and files disagree; lists the differences.
        """
        last = dict(tensors)
        if self.named is None or self.index is None or len(last) == len(tensors):
            self.check(tensors)
            return ()
        files: dict[str, list[str]] = {}
        for tensor, file in tensors:
            files.setdefault(tensor, []).append(file)
        repeated = {tensor: names for tensor, names in files.items() if len(names) > 1}
        index = self.folder / self.index
        _refuse_ambiguous(self.named, repeated, index)
        _check_index(self.named, last, index)
        return tuple(repeated)


def visible_files(folder: Place) -> list[str]:
    """Names of what may be files of ours, sorted; hidden ones are other programs' (`._model.safetensors`)."""
    return [entry.name for entry in folder.entries() if entry.name[0] != "." and not entry.is_dir]


def refuse_missing(missing: Sequence[str], place: Place, wanted: str) -> NoReturn:
    """Refuses weights of which some files are missing.

    Args:
        missing: their names.
        place: what names or counts them.
        wanted: in words.
    """
    raise FormatError(
        f"{len(missing):,} of the weight files {'is' if len(missing) == 1 else 'are'} missing:"
        f"{listing(missing)}",
        place=place,
        wanted=wanted,
        hint="the download is not complete: fetch these files into the directory",
    )


def _weight_map(path: Place) -> dict[str, str]:
    """Tensor name to file name, of an index. Its `metadata.total_size` is often wrong and not looked at.

    Raises:
        FormatError: it is damaged, or names no files.
    """
    found = sidecar_json(path, FormatError, _INDEX_HINT).get("weight_map")
    if isinstance(found, dict) and found and all(type(name) is str for name in found.values()):
        # Few files have many tensors.
        return {tensor: sys.intern(name) for tensor, name in found.items()}
    raise FormatError(
        "the index has no usable weight_map",
        place=path,
        got="none" if found is None else f"{type(found).__name__}, empty or with values that are not strings",
        wanted='{"weight_map": {tensor: file, …}, …}',
        hint=_INDEX_HINT,
    )


def _files_of_index(folder: Place, index: Place, named: Mapping[str, str]) -> tuple[str, ...]:
    """The files that an index names, sorted, which is how they are numbered.

    Raises:
        FormatError: one is not there, or lies outside of the folder.
    """
    names = tuple(sorted(set(named.values())))
    for name in names:
        _check_inside(name, index)
    # Symbolic links are followed: in the Hugging Face cache every file is one, to a blob elsewhere.
    there = at_once(folder.store, lambda name: is_file(folder / name), names)
    missing = [name for name, is_there in zip(names, there, strict=True) if not is_there]
    if missing:
        refuse_missing(missing, index, "all files that the index names")
    _refuse_unnamed(folder, index, names)
    return names


def _refuse_unnamed(folder: Place, index: Place, names: Sequence[str]) -> None:
    """A file of the same series that the index leaves out: its tensors would be lost."""
    if folder.store.scheme != "file":
        return  # a listing is a request there
    series = {_series_of(name) for name in names} - {None}
    unnamed = sorted({*visible_files(folder)} - {*names}) if series else []
    left_out = [name for name in unnamed if _series_of(name) in series]
    if left_out:
        raise FormatError(
            f"the index names no tensor of a file of the same series:{listing(left_out)}",
            place=index,
            wanted="all files that are numbered alike",
            hint=f"move these files away, or: {_INDEX_HINT}",
        )


def _series_of(name: str) -> tuple[str, str] | None:
    """Stem, count and ending of a numbered file; None for others."""
    match = _NUMBERED.fullmatch(name)
    return (match["stem"], match["rest"]) if match else None


def _check_inside(name: str, index: Place) -> None:
    if is_inside(name):
        return
    raise FormatError(
        f"the index names a file outside of its directory: {name!r}",
        place=index,
        got=repr(name),
        wanted="the name of a file beside the index",
        hint="do not trust this index; fetch the checkpoint from its source again",
    )


def _check_once(tensors: Sequence[tuple[str, str]], folder: Place) -> None:
    """Checks that no tensor is in two files: (tensor, file) for all.

    Raises:
        FormatError: some are; lists them with their files.
    """
    if len({tensor for tensor, _ in tensors}) == len(tensors):
        return
    places: dict[str, list[str]] = {}
    for tensor, file in tensors:
        places.setdefault(tensor, []).append(file)
    together: dict[tuple[str, ...], list[str]] = {}
    for tensor, files in places.items():
        if len(files) > 1:
            together.setdefault(tuple(files), []).append(tensor)
    twice = [f"{some(tensors)}: in {first_of(files, 4)}" for files, tensors in together.items()]
    raise FormatError(
        "the same tensors in several files:" + listing(twice),
        place=folder,
        wanted="each tensor in one file",
        hint="move files of another checkpoint out of the directory, or name one file",
    )


def _refuse_ambiguous(named: Mapping[str, str], repeated: Mapping[str, Sequence[str]], index: Place) -> None:
    """Refuse repeated tensors for which the index does not name the last file."""
    unclear = {name: files for name, files in repeated.items() if named.get(name) in files[:-1]}
    if not unclear:
        return
    lines = [f"{name}: in {first_of(files, 4)}" for name, files in unclear.items()]
    first, files = next(iter(unclear.items()))
    raise FormatError(
        "several files have the same tensors, and the index does not name the last file:" + listing(lines),
        place=index,
        got=f"{first} in {named[first]}",
        wanted=f"{files[-1]}, which transformers uses regardless of the index",
        hint="fetch the shards and the index again: they belong to different saves",
    )


def _check_index(named: Mapping[str, str], there: Mapping[str, str], index: Place) -> None:
    """Checks that an index and its files name the same tensors, in the same files.

    Raises:
        FormatError: they do not; lists what differs.
    """
    if there == named:
        return
    raise FormatError(
        "the index and its files do not hold the same tensors"
        + _differing("named by the index, not in the file", named.items() - there.items())
        + _differing("in the file, not named by the index", there.items() - named.items()),
        place=index,
        wanted="every tensor of the files in the index, with its file, and no other",
        hint=_INDEX_HINT,
    )


def _differing(what: str, pairs: Iterable[tuple[str, str]]) -> str:
    return counted_listing(what, [f"{tensor} ({file})" for tensor, file in sorted(pairs)])
