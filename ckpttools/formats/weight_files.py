"""Finding the files of a model's weights as the hub lays them out: one, or numbered ones with an index.

Safetensors and files of torch.save have the same scheme of names under other endings: `model.safetensors`,
`model-00001-of-00003.safetensors` with `model.safetensors.index.json`; `pytorch_model.bin` and so on.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NoReturn

from ckpttools.core.errors import CheckpointError, ConfigError, FormatError, StorageError, listing
from ckpttools.formats.disguises import refuse_disguise
from ckpttools.formats.json_file import json_object, without_duplicates
from ckpttools.stores.at_once import at_once
from ckpttools.stores.base import is_inside
from ckpttools.stores.place import Place

_INDEX = ".index.json"
_INDEX_HINT = "fetch the index again, or remove it: the files themselves say which tensors they hold"
_NUMBERED = re.compile(r"(?P<stem>.*)-\d+-of-(?P<rest>\d+\..*)", re.DOTALL)
# A count beyond any real one is somebody's own scheme of names.
_MOST_FILES = 100_000


@dataclass(frozen=True)
class WeightsLocation:
    """Where the weights are: file names in a folder, or an index that names them."""

    folder: Place
    files: tuple[str, ...] = ()
    index: str | None = None


@dataclass(frozen=True)
class WeightNames:
    """How files of weights are called.

    Attributes:
        suffix: their ending.
        whole: name of the one file of a whole model.
        pattern: of the files in a directory that may be weights; others of the suffix may be anything.
        others: further endings that one file may have which is named by itself.
    """

    suffix: str
    whole: str
    pattern: str = "*"
    others: tuple[str, ...] = ()

    @cached_property
    def numbered(self) -> re.Pattern[str]:
        """`model-00001-of-00003.safetensors`: stem, number and count."""
        return re.compile(
            rf"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+){re.escape(self.suffix)}", re.DOTALL
        )

    def find(self, path: Place) -> WeightsLocation:
        """What of these lies at a path.

        Raises:
            FormatError: nothing, or more than one thing.
            StorageError: there is nothing there at all, or it cannot be accessed.
        """
        path.stat()
        if path.is_dir():
            return self._find_in(path)
        if path.name.endswith(self.suffix + _INDEX):
            return WeightsLocation(path.parent, index=path.name)
        if path.name.endswith((self.suffix, *self.others)):
            return WeightsLocation(path.parent, (path.name,))
        raise FormatError(
            f"the name ends neither in {self.suffix} nor in {self.suffix}{_INDEX}",
            place=path,
            hint=f"name a {self.suffix} file, its index or the directory that holds them",
        )

    def _find_in(self, folder: Place) -> WeightsLocation:
        # transformers takes model.safetensors where there is one and looks at no index beside it
        # (PreTrainedModel.from_pretrained); whoever opens the directory means the same weights.
        if is_file(folder / self.whole):
            return WeightsLocation(folder, (self.whole,))
        names = _listed(folder)
        indexes = [name for name in names if name.endswith(self.suffix + _INDEX)]
        if self.whole + _INDEX in indexes:
            return WeightsLocation(folder, index=self.whole + _INDEX)
        if indexes:
            return WeightsLocation(folder, index=_only(indexes, folder))
        files = [name for name in names if name.endswith(self.suffix) and fnmatchcase(name, self.pattern)]
        if not files:
            raise FormatError(
                f"no {self.suffix} file in the directory",
                place=folder,
                hint="name the directory of the weights",
            )
        self._check_numbers(files, folder)
        return WeightsLocation(folder, tuple(files))

    def read_in(self, folder: Place) -> set[str]:
        """Names of the one series of weights that is read in a directory, and of its index."""
        found = self._find_in(folder)
        if found.index is not None:
            return {found.index, *weight_map(folder / found.index).values()}
        # Without an index all files are read; another series than the first may still be another model's.
        return {name for name in found.files if self._series(name) == self._series(found.files[0])}

    def _series(self, name: str) -> tuple[str, str]:
        """The stem of a file and how many it says that there are."""
        match = self.numbered.fullmatch(name)
        return (match["stem"], match["count"]) if match else (name.removesuffix(self.suffix), "")

    def is_one_of_several(self, path: Place) -> bool:
        """Whether a path is one file of a numbered series."""
        match = self.numbered.fullmatch(path.name)
        return match is not None and path.is_file() and int(match["count"]) > 1

    def _check_numbers(self, files: Iterable[str], folder: Place) -> None:
        """Without an index only the names (`model-00002-of-00003`) can tell that a file is missing."""
        groups: dict[tuple[str, str], set[str]] = defaultdict(set)
        for match in filter(None, map(self.numbered.fullmatch, files)):
            groups[match["stem"], match["count"]].add(match["number"])
        missing = [
            f"{stem}-{number}-of-{count}{self.suffix}"
            for (stem, count), numbers in groups.items()
            for number in _missing_numbers(numbers, count)
        ]
        if missing:
            _refuse_missing(missing, folder, "all files that the others' names count")


def _missing_numbers(numbers: set[str], count: str) -> list[str]:
    """Numbers without a file. Most count from one; a file with number zero shows that all count from zero."""
    width = len(next(iter(numbers)))
    first = 0 if any(int(number) == 0 for number in numbers) else 1
    if int(count) > _MOST_FILES:
        return []
    wanted = (str(number).zfill(width) for number in range(first, first + int(count)))
    return [number for number in wanted if number not in numbers]


def _refuse_missing(missing: Sequence[str], place: Place, wanted: str) -> NoReturn:
    raise FormatError(
        f"{len(missing):,} of the weight files {'is' if len(missing) == 1 else 'are'} missing:"
        f"{listing(missing)}",
        place=place,
        wanted=wanted,
        hint="the download is not complete: fetch these files into the directory",
    )


def is_file(path: Place) -> bool:
    """Whether a file of this name is there."""
    try:
        return path.is_file()
    except StorageError:
        # Of a disk neither "yes" nor "no", as of a name that is too long. Elsewhere nobody has answered.
        if path.store.scheme != "file":
            raise
        return False


def _listed(folder: Place) -> list[str]:
    """Names of what may be files of ours, sorted; hidden ones are other programs' (`._model.safetensors`)."""
    return [entry.name for entry in folder.entries() if entry.name[0] != "." and not entry.is_dir]


def _only(indexes: Sequence[str], folder: Place) -> str:
    if len(indexes) == 1:
        return indexes[0]
    raise FormatError(
        "more than one index in the directory",
        place=folder,
        got=", ".join(indexes),
        wanted="one",
        hint=f"name the one you mean: {folder / indexes[0]}",
    )


def _json_file(path: Place, kind: type[CheckpointError], hint: str, unique: bool = True) -> dict[str, Any]:
    """The JSON object in a file; `unique` refuses an object that names a key twice."""
    raw = path.read_bytes()
    if not raw.lstrip().startswith((b"{", b"[")):
        refuse_disguise(raw[:1024], str(path), kind, "JSON")
    return json_object(raw, str(path), kind, hint, without_duplicates if unique else None)


def weight_map(path: Place) -> dict[str, str]:
    """Tensor name to file name, of an index. Its `metadata.total_size` is often wrong and not looked at.

    Raises:
        FormatError: it is damaged, or names no files.
    """
    found = _json_file(path, FormatError, _INDEX_HINT).get("weight_map")
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


def files_of_index(folder: Place, index: Place, named: Mapping[str, str]) -> tuple[str, ...]:
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
        _refuse_missing(missing, index, "all files that the index names")
    _refuse_unnamed(folder, index, names)
    return names


def _refuse_unnamed(folder: Place, index: Place, names: Sequence[str]) -> None:
    """A file of the same series that the index leaves out: its tensors would be lost."""
    if folder.store.scheme != "file":
        return  # a listing is a request there
    series = {_series_of(name) for name in names} - {None}
    unnamed = sorted({*_listed(folder)} - {*names}) if series else []
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


def check_once(tensors: Sequence[tuple[str, str]]) -> None:
    """Checks that no tensor is in two files: (tensor, file) for all.

    Raises:
        FormatError: some are; lists them with their files.
    """
    if len({tensor for tensor, _ in tensors}) == len(tensors):
        return
    places: dict[str, list[str]] = {}
    for tensor, file in tensors:
        places.setdefault(tensor, []).append(file)
    twice = [f"{tensor}: {' and '.join(files)}" for tensor, files in places.items() if len(files) > 1]
    raise FormatError(
        "the same tensor in two files:" + listing(twice),
        wanted="each tensor in one file",
        hint="move files of another checkpoint out of the directory, or name one file",
    )


def check_index(named: Mapping[str, str], there: Mapping[str, str], index: Place) -> None:
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
    lines = [f"{tensor} ({file})" for tensor, file in sorted(pairs)]
    return f"\n  {what} ({len(lines)}):{listing(lines)}" if lines else ""


def config_beside(folder: Place) -> dict[str, Any] | None:
    """The model's configuration beside the weights, or None where there is none.

    Raises:
        ConfigError: what is there is not a JSON object, or a link to nothing, as a cache leaves it.
        StorageError: it cannot be read.
    """
    path = folder / "config.json"
    if not path.lexists():
        return None
    hint = "correct the file, fetch it again, or move it away to do without"
    if path.is_link() and not is_file(path):
        raise ConfigError(
            "the configuration is a link to nothing", place=path, got=path.readlink(), hint=hint
        )
    # Duplicate keys pass, as they do in transformers.
    return _json_file(path, ConfigError, hint, unique=False)
