"""Find a model's weight files in the Hub layout: one file, or numbered files with an index.

Safetensors and torch.save files have similar names with different suffixes: `model.safetensors`,
`model-00001-of-00003.safetensors` with `model.safetensors.index.json`, `pytorch_model.bin` and so on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from shlex import quote

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, StorageError
from ckpttools.core.text import first_names
from ckpttools.formats.sidecar_files import CONFIG, WEIGHTS_FIELD, is_file, weights_in_config
from ckpttools.formats.weight_index import WeightsLocation, normalize_name, refuse_missing, visible_files
from ckpttools.stores.base import is_inside
from ckpttools.stores.location import Location

_INDEX = ".index.json"
# PyTorch distributed checkpoints in safetensors, in which a process without data writes no file.
_PROCESS = re.compile(r"^shard-\d+-")
# Files that `transformers_weights` may name.
_SAFETENSORS = ".safetensors"
# Larger counts do not occur in practice; such names follow another naming scheme.
_MAX_FILES = 100_000
_MAX_NAMED = 4


class UnusableChoiceError(FormatError):
    """`transformers_weights` in `config.json` does not name a file that can be read."""


@dataclass(frozen=True)
class WeightNames:
    """The names that a format uses for weight files.

    Attributes:
        suffix: Suffix of the files.
        whole: Name of the file of a complete model.
        pattern: Pattern of files in a directory that may be weights; others with the suffix may be anything.
        others: Further suffixes that are accepted for a file passed by name.
    """

    suffix: str
    whole: str
    pattern: str = "*"
    others: tuple[str, ...] = ()

    @cached_property
    def numbered(self) -> re.Pattern[str]:
        """Pattern of names such as `model-00001-of-00003.safetensors`: stem, number and count."""
        return re.compile(
            rf"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+){re.escape(self.suffix)}", re.DOTALL
        )

    def find(self, path: Location) -> WeightsLocation:
        """Find the weights at a path.

        Raises:
            FormatError: There are no weights, or there are several alternatives.
            StorageError: The path does not exist or cannot be accessed.
        """
        path.stat()
        if path.is_dir():
            return self._find_in(path)
        if path.name.endswith(self.suffix + _INDEX):
            return WeightsLocation(path.parent, index=path.name)
        if path.name.endswith((self.suffix, *self.others)):
            return WeightsLocation(path.parent, (path.name,))
        raise FormatError(
            f"the name ends in neither {self.suffix} nor {self.suffix}{_INDEX}",
            location=path,
            hint=f"name a {self.suffix} file, its index or the directory that holds them",
        )

    def mismatch_reason(self, path: Location) -> str | None:
        """Return why a path has no such weights; None if it has. Raises StorageError like `reason`."""
        try:
            self.find(path)
        except UnusableChoiceError:
            return None  # No other file may be read; opening the directory raises the error.
        except CheckpointError as error:
            return reason(error, path)
        return None

    def chosen(self, folder: Location) -> WeightsLocation | None:
        """Find the weights that `transformers_weights` in `config.json` names; None if the field is not set.

        transformers reads only that file, or that index and the files that it names.

        Raises:
            FormatError: The field names files of another format.
            UnusableChoiceError: The field does not name an existing file that transformers can load.
        """
        name = weights_in_config(folder)
        if name is None:
            return None
        if self.suffix != _SAFETENSORS:
            raise FormatError(f"{CONFIG} names other weights: {WEIGHTS_FIELD} is {name!r}", location=folder)
        if isinstance(name, str) and is_inside(name) and is_file(folder / normalize_name(name)):
            if name.endswith(self.suffix + _INDEX):
                return WeightsLocation(folder, index=normalize_name(name), is_chosen=True)
            if name.endswith(self.suffix):
                return WeightsLocation(folder, (normalize_name(name),), is_chosen=True)
        visible = [file for file in visible_files(folder) if file.endswith(self.suffix)]
        kind = UnusableChoiceError if visible else FormatError
        instead = f"; to read another file, pass it: {quote(str(folder / visible[0]))}" if visible else ""
        raise kind(
            f"{CONFIG} names weights that transformers cannot load: {WEIGHTS_FIELD} is {name!r}",
            location=folder / CONFIG,
            got=first_names(visible, _MAX_NAMED) if visible else "no such file",
            expected=f"the name of a {self.suffix} file here, or of an index of such files",
            hint=f"fetch that file, or remove {WEIGHTS_FIELD} from {CONFIG}{instead}",
        )

    def _find_in(self, folder: Location) -> WeightsLocation:
        if (named_weights := self.chosen(folder)) is not None:
            return named_weights
        # transformers prefers model.safetensors and ignores an index next to it
        # (PreTrainedModel.from_pretrained).
        # Opening the directory must read the same weights.
        if is_file(folder / self.whole):
            return WeightsLocation(folder, (self.whole,))
        names = visible_files(folder)
        indexes = [name for name in names if name.endswith(self.suffix + _INDEX)]
        if self.whole + _INDEX in indexes:
            return WeightsLocation(folder, index=self.whole + _INDEX)
        if indexes:
            return WeightsLocation(folder, index=_single_index(indexes, folder))
        files = [name for name in names if name.endswith(self.suffix) and fnmatchcase(name, self.pattern)]
        if not files:
            raise FormatError(
                f"no {self.suffix} file in the directory",
                location=folder,
                hint="name the directory of the weights",
            )
        if missing := self.missing(files):
            refuse_missing(missing, folder, "all files that the others' names count")
        return WeightsLocation(folder, tuple(files))

    def series_files(self, folder: Location) -> set[str]:
        """Return the names of the one series of weights that is read from a directory, and of its index."""
        result = self._find_in(folder)
        if result.index is not None:
            return {result.index, *(result.named or {}).values()}
        # Without an index, all files are read, so a second series may be another model.
        return {name for name in result.files if self._series(name) == self._series(result.files[0])}

    def _series(self, name: str) -> tuple[str, str]:
        """Return the stem and the total count in a file's name."""
        match = self.numbered.fullmatch(name)
        return (
            (_stem_of_all(match["stem"]), match["count"]) if match else (name.removesuffix(self.suffix), "")
        )

    def is_one_of_several(self, path: Location) -> bool:
        """Return whether a path is one file of a numbered series."""
        match = self.numbered.fullmatch(path.name)
        return match is not None and path.is_file() and int(match["count"]) > 1

    def missing(self, files: Iterable[str]) -> list[str]:
        """Return the missing files of numbered series, judged only by names if there is no index.

        Most series start at one, but a series that has a file with number zero starts at zero.
        """
        groups: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        for match in filter(None, map(self.numbered.fullmatch, files)):
            groups[_stem_of_all(match["stem"]), match["count"]][int(match["number"])] = len(match["number"])
        return [
            f"{stem}-{number:0{max(numbers.values())}}-of-{count}{self.suffix}"
            for (stem, count), numbers in groups.items()
            if int(count) <= _MAX_FILES
            for number in range(int(0 not in numbers), int(0 not in numbers) + int(count))
            if number not in numbers
        ]


def _stem_of_all(stem: str) -> str:
    """Remove the number of a process from a stem."""
    return _PROCESS.sub("shard-…-", stem)


def _single_index(indexes: Sequence[str], folder: Location) -> str:
    if len(indexes) == 1:
        return indexes[0]
    raise FormatError(
        "more than one index in the directory",
        location=folder,
        got=", ".join(indexes),
        expected="one",
        hint=f"pass one of them: {folder / indexes[0]}",
    )


def reason(error: CheckpointError, path: Location) -> str:
    """Return the reason in an error for not recognizing a path; raise it if the store did not respond."""
    if isinstance(error, StorageError) and path.exists():
        raise error
    return error.raw.message
