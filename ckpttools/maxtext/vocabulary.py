"""Embedding rows of MaxText beyond a model's vocabulary: zero padding or learned values.

Conversions and comparisons share one rule: rows of zeros are padding and are left out with a remark; other
rows count unless the user decides otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import window
from ckpttools.array.tree import keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError
from ckpttools.core.message_terms import option
from ckpttools.core.region import Region, Shape, split_evenly
from ckpttools.maxtext.versions import VOCABULARY

PADDING_MODES = ("keep", "drop")
"""How to handle rows beyond the vocabulary, regardless of their values."""

_MAX_PIECE_BYTES = 4 << 20
# Scratch memory per element, for a mask.
_COMPARED_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Surplus:
    """The rows of an array that the model does not have.

    Attributes:
        name: The name of the array.
        rows: The surplus rows, as a lazy array.
        axis: The axis of the rows.
        kept: The number of rows in the model; 0 for an array that only MaxText has.
        fill: The value of all elements before training.
        because: Why, according to its configuration, the model has no such array; empty if no configuration
            could change that.
    """

    name: str
    rows: LazyArray
    axis: int
    kept: int
    fill: float = 0
    because: str = ""

    @classmethod
    def of(cls, name: str, array: LazyArray, axis: int, kept_rows: int) -> Surplus:
        """Return the rows of an array after the first `kept` rows."""
        start, shape = [0] * len(array.shape), list(array.shape)
        start[axis], shape[axis] = kept_rows, array.shape[axis] - kept_rows
        return cls(name, window(array, tuple(start), tuple(shape)), axis, kept_rows)

    @property
    def is_whole(self) -> bool:
        """Return whether the model lacks this array, so that all rows are surplus."""
        return self.kept == 0

    @property
    def count(self) -> int:
        """Return the number of rows beyond the model's."""
        return self.rows.shape[self.axis]

    @property
    def there(self) -> int:
        """Return the total number of rows."""
        return self.kept + self.count

    @property
    def location(self) -> str:
        """Return the array's name with the range of the surplus rows: `embedding[256:300]`."""
        if self.is_whole:
            return self.name
        return f"{self.name}[{':, ' * self.axis}{self.kept}:{self.there}]"

    def first_learned(self, *, memory: int, reserved: int = 0) -> int | None:
        """Return the first row that is not all `fill`; None if all rows are. 0 and -0 are equal.

        Args:
            memory: The peak memory limit in bytes.
            reserved: Bytes of the limit that are already in use.

        Raises:
            MemoryBudgetError: Even a small piece does not fit in memory.
            FormatError, StorageError: An array cannot be read.
        """
        from ckpttools.plan.pieces import Tiles, fit_pieces

        item = (self.rows,)
        fit = fit_pieces([item], memory=memory, jobs=1, scratch=_COMPARED_ELEMENTS, reserved=reserved)
        limit = fit.piece_bytes // self.rows.dtype.itemsize
        for piece in Tiles(min(_MAX_PIECE_BYTES, fit.piece_bytes))(item, limit):
            row = self._first_learned_in(piece)
            if row is not None:
                return row
        return None

    def _first_learned_in(self, piece: Region) -> int | None:
        import numpy as np

        values = self.rows.read(piece)
        for part in split_evenly(piece, _COMPARED_ELEMENTS):
            learned = np.moveaxis(values[part.relative_to(piece).slices] != self.fill, self.axis, 0)
            if learned.any():
                result = learned.reshape(len(learned), -1).any(axis=1)
                return self.kept + part.start[self.axis] + int(result.argmax())
        return None


def find_surpluses(arrays: Mapping[str, LazyArray], shapes: Mapping[str, Shape]) -> dict[str, Surplus]:
    """Return the rows of MaxText's arrays beyond those of arrays with the same names.

    Args:
        arrays: Arrays by MaxText's names, with keys joined by "/".
        shapes: The shapes of the other arrays, by the same names.
    """
    result: dict[str, Surplus] = {}
    for name, axis in ((keystr(path), axis) for path, axis in VOCABULARY.items()):
        array, shape = arrays.get(name), shapes.get(name)
        if array is None or shape is None or len(shape) != len(array.shape) or len(shape) <= axis:
            continue
        kept_rows = shape[axis]
        if (
            array.shape[axis] > kept_rows
            and (*array.shape[:axis], kept_rows, *array.shape[axis + 1 :]) == shape
        ):
            result[name] = Surplus.of(name, array, axis, kept_rows)
    return result


def drop_surplus(array: LazyArray, extra: Surplus) -> LazyArray:
    """Return an array without its surplus rows."""
    axis = extra.axis
    shape = (*array.shape[:axis], extra.kept, *array.shape[axis + 1 :])
    return window(array, (0,) * len(shape), shape)


@dataclass(frozen=True)
class CountedRows:
    """The surplus rows that count in a comparison.

    Attributes:
        arrays: The arrays by name. Rows that count have their range in the name, because the other side lacks
            them.
        remarks: Descriptions of how rows were handled.
    """

    arrays: Mapping[str, LazyArray]
    remarks: tuple[str, ...]


def drop_vocabulary_padding(
    arrays: Mapping[str, LazyArray], shapes: Mapping[str, Shape], padding_mode: str | None, memory: int
) -> CountedRows:
    """Return MaxText's arrays without padding, and the surplus rows that count.

    Args:
        arrays, shapes: As for `find_surpluses`.
        padding_mode, memory: As for `count_surplus_rows`, which also raises the errors.
    """
    result = find_surpluses(arrays, shapes)
    rows = count_surplus_rows(result, padding_mode, memory)
    cut = {name: drop_surplus(arrays[name], item) for name, item in result.items()}
    return CountedRows({**arrays, **cut, **rows.arrays}, rows.remarks)


def count_surplus_rows(extra: Mapping[str, Surplus], padding_mode: str | None, memory: int) -> CountedRows:
    """Return the surplus rows that count, reading them to distinguish padding from learned values.

    Args:
        extra: The surplus rows by any names.
        padding_mode: "keep" counts all rows and "drop" none, without reading them; None decides by their
            content, which is always done for arrays that only MaxText has.
        memory: The peak memory limit in bytes.

    Raises:
        CheckpointError: As for `Surplus.first_learned`.
    """
    arrays: dict[str, LazyArray] = {}
    remarks: list[str] = []
    dropping = option("padding_rows", "drop")
    for item in extra.values():
        if item.is_whole:
            if item.first_learned(memory=memory) is not None:
                arrays[item.location] = item.rows
            continue
        row = item.first_learned(memory=memory) if padding_mode is None else None
        if padding_mode == "drop":
            remarks.append(f"left out ({dropping}): {item.location}")
        elif padding_mode is None and row is None:
            remarks.append(f"left out, because vocabularies are padded with zeros: {item.location}")
        else:
            arrays[item.location] = item.rows
        if row is not None:
            remarks.append(
                f"beyond the vocabulary, but row {row} is not zero: {item.location}; "
                f"{dropping} compares without it"
            )
    return CountedRows(arrays, tuple(remarks))


def refuse_learned_rows(
    extra: Mapping[str, Surplus], location: str, padding_mode: str | None, *, memory: int, reserved: int
) -> None:
    """Raise an error if learned rows would be left out, reading the rows to check.

    Args:
        extra: The surplus rows by any names.
        location: The location of the checkpoint, for messages.
        padding_mode: How the user wants to handle surplus rows; if set, the rows are not read.
        memory, reserved: See `Surplus.first_learned`.

    Raises:
        ConfigError: A row beyond the vocabulary is not zero, or training changed an array that only MaxText
            has.
        CheckpointError: As for `Surplus.first_learned`.
    """
    for item in extra.values():
        if padding_mode is not None and not item.is_whole:
            continue
        row = item.first_learned(memory=memory, reserved=reserved)
        if row is not None and item.is_whole:
            raise ConfigError(
                f"the Hugging Face model computes as if all values of this array were {item.fill:g}, but "
                f"they are not",
                location=f"{item.name} in {location}",
                got=f"a different value at {row}, from training",
                expected=f"{item.fill:g} everywhere, as MaxText initializes it",
                hint=_trained_array_hint(item),
            )
        if row is not None:
            raise ConfigError(
                f"the last {item.count} rows of the vocabulary would be cut off, but are not zero",
                location=f"{item.name} in {location}",
                got=f"{item.there} rows for a vocabulary of {item.kept}; row {row} is not zero",
                expected=f"zeros from row {item.kept} on, as added by {option('pad_vocab')}",
                hint=f"{option('padding_rows', 'keep')} writes them, with a vocab_size (rows of the "
                f"embedding) of {item.there} in the written config.json; "
                f"{option('padding_rows', 'drop')} discards them",
            )


def _trained_array_hint(trained: Surplus) -> str:
    """Return the hint for a trained array that only MaxText has."""
    reason = trained.because
    otherwise = (
        f"to write it, change the configuration so that the model has this array ({reason}); or "
        if reason
        else ""
    )
    return (
        f"{otherwise}use a step at which it is unchanged, or train again with it frozen "
        "(trainable_parameters_mask in MaxText)"
    )
