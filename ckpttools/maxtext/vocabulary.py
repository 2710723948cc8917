"""MaxText rows beyond a model's vocabulary: zero padding, or learned values.

One rule for conversions and comparisons: what is zeros throughout is padding and counts for nothing, which is
said; what is not counts, unless the user says otherwise.
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
from ckpttools.maxtext.layout import VOCABULARY

WAYS = ("keep", "drop")
"""What a user may want of such rows, whatever they hold."""

_MAX_PIECE_BYTES = 4 << 20
# What is noted of elements takes a byte for each.
_COMPARED_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Surplus:
    """The rows of an array beyond the model's.

    Attributes:
        name: of the array.
        rows: the rows beyond, lazily.
        axis: the axis of the array along which they lie.
        kept: how many rows the model has; none of an array that MaxText alone has.
        fill: what all elements are as long as nothing was learned.
        because: what of the model's configuration says that it has no such array; empty where nothing could
            say otherwise.
    """

    name: str
    rows: LazyArray
    axis: int
    kept: int
    fill: float = 0
    because: str = ""

    @classmethod
    def of(cls, name: str, array: LazyArray, axis: int, kept: int) -> Surplus:
        """Return the rows of an array after the first `kept` ones."""
        start, shape = [0] * len(array.shape), list(array.shape)
        start[axis], shape[axis] = kept, array.shape[axis] - kept
        return cls(name, window(array, tuple(start), tuple(shape)), axis, kept)

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
        """Return the array's name, with the range of the surplus rows: `embedding[256:300]`."""
        if self.is_whole:
            return self.name
        return f"{self.name}[{':, ' * self.axis}{self.kept}:{self.there}]"

    def first_learned(self, *, memory: int, reserved: int = 0) -> int | None:
        """Return the first row that is not `fill`; None if all are. 0 and -0 are equal.

        Args:
            memory: bytes that may be resident at most.
            reserved: bytes of the memory that something else takes meanwhile.

        Raises:
            MemoryBudgetError: not even a small piece fits into the memory.
            FormatError, StorageError: they cannot be read.
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
        arrays: by MaxText's names, keys joined by "/".
        shapes: by the same names those that the others have.
    """
    result: dict[str, Surplus] = {}
    for name, axis in ((keystr(path), axis) for path, axis in VOCABULARY.items()):
        array, shape = arrays.get(name), shapes.get(name)
        if array is None or shape is None or len(shape) != len(array.shape) or len(shape) <= axis:
            continue
        kept = shape[axis]
        if array.shape[axis] > kept and (*array.shape[:axis], kept, *array.shape[axis + 1 :]) == shape:
            result[name] = Surplus.of(name, array, axis, kept)
    return result


def without_surplus(array: LazyArray, extra: Surplus) -> LazyArray:
    """Return an array without its surplus rows."""
    axis = extra.axis
    shape = (*array.shape[:axis], extra.kept, *array.shape[axis + 1 :])
    return window(array, (0,) * len(shape), shape)


@dataclass(frozen=True)
class CountedRows:
    """The rows beyond a vocabulary that a comparison counts.

    Attributes:
        arrays: by name. Rows that count have the names of their places: the other side has none of them.
        remarks: what was done with which rows, in words.
    """

    arrays: Mapping[str, LazyArray]
    remarks: tuple[str, ...]


def without_vocabulary_padding(
    arrays: Mapping[str, LazyArray], shapes: Mapping[str, Shape], way: str | None, memory: int
) -> CountedRows:
    """Return MaxText's arrays without padding, and the surplus rows that count.

    Args:
        arrays, shapes: as of `find_surpluses`.
        way, memory: as of `counted_rows`; errors, too.
    """
    result = find_surpluses(arrays, shapes)
    rows = counted_rows(result, way, memory)
    cut = {name: without_surplus(arrays[name], item) for name, item in result.items()}
    return CountedRows({**arrays, **cut, **rows.arrays}, rows.remarks)


def counted_rows(extra: Mapping[str, Surplus], way: str | None, memory: int) -> CountedRows:
    """Return the surplus rows that count. Read them to distinguish padding from learned values.

    Args:
        extra: by whatever names.
        way: "keep" where all count and "drop" where none does, unread; None where their content decides, as
            it always does of arrays that MaxText alone has.
        memory: bytes that may be resident at most.

    Raises:
        CheckpointError: as `Surplus.first_learned`.
    """
    arrays: dict[str, LazyArray] = {}
    remarks: list[str] = []
    dropping = option("padding_rows", "drop")
    for item in extra.values():
        if item.is_whole:
            if item.first_learned(memory=memory) is not None:
                arrays[item.location] = item.rows
            continue
        row = item.first_learned(memory=memory) if way is None else None
        if way == "drop":
            remarks.append(f"left out, as {dropping} says: {item.location}")
        elif way is None and row is None:
            remarks.append(f"left out, as a vocabulary is padded with zeros: {item.location}")
        else:
            arrays[item.location] = item.rows
        if row is not None:
            remarks.append(
                f"beyond the vocabulary, and row {row} is not zero: {item.location}; "
                f"{dropping} compares without it"
            )
    return CountedRows(arrays, tuple(remarks))


def refuse_learned_rows(
    extra: Mapping[str, Surplus], location: str, way: str | None, *, memory: int, reserved: int
) -> None:
    """Raise if learned rows would be left out. Read them to find out.

    Args:
        extra: by whatever names.
        location: the checkpoint, for messages.
        way: what the user wants of rows beyond the vocabulary; these are not read where there is any.
        memory, reserved: as of `Surplus.first_learned`.

    Raises:
        ConfigError: a row beyond the vocabulary is not zero, or an array that MaxText alone has is not what
            it began as.
        CheckpointError: as `Surplus.first_learned`.
    """
    for item in extra.values():
        if way is not None and not item.is_whole:
            continue
        row = item.first_learned(memory=memory, reserved=reserved)
        if row is not None and item.is_whole:
            raise ConfigError(
                f"Hugging Face's model computes as if this were {item.fill:g} throughout, and it is not",
                location=f"{item.name} in {location}",
                got=f"something else at {row}: it was trained",
                expected=f"{item.fill:g} throughout, as MaxText begins with",
                hint=_trained_array_hint(item),
            )
        if row is not None:
            raise ConfigError(
                f"the last {item.count} rows of the vocabulary would be cut off, and they are not zero",
                location=f"{item.name} in {location}",
                got=f"{item.there} rows for a vocabulary of {item.kept}; row {row} is not zero",
                expected=f"zeros from row {item.kept} on, as {option('pad_vocab')} adds them",
                hint=f"{option('padding_rows', 'keep')} writes them, with a vocab_size (rows of the "
                f"embedding) of {item.there} in the config.json of what is written; "
                f"{option('padding_rows', 'drop')} leaves them out for good",
            )


def _trained_array_hint(trained: Surplus) -> str:
    """Return the hint for a trained array that only MaxText has."""
    why = trained.because
    otherwise = f"to write it, change what says that the model has no such array ({why}); or " if why else ""
    return (
        f"{otherwise}take a step at which it is unchanged, or train again with it frozen "
        "(trainable_parameters_mask in MaxText)"
    )
