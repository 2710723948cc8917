"""Convert the values of a pickle to the leaves of a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import number_array
from ckpttools.array.tree import Empty, Leaf, Path, Text
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, listing
from ckpttools.formats.json_file import DEEPEST
from ckpttools.formats.torch.dtensor import is_distributed
from ckpttools.formats.torch.pickled import Record, in_few_words
from ckpttools.formats.torch.tensors import NotReadableError, is_tensor

# Values may contain one another: a pickle of a kilobyte can have more leaves than any checkpoint. Normally,
# each leaf takes at least one byte, and few leaves are shared.
_FEW = 1000
# A leaf takes about 300 bytes.
_MOST_LEAVES = 2_000_000
_KEYS_PER_LEAF = 32
_PART = "one process's part of a distributed tensor (DTensor)"
_OF_PARTS = (
    "for files named model_world_size_N_rank_R.pt, pass the directory with those of all processes; "
    "otherwise save each as tensor.full_tensor()"
)

Tensor = Callable[[Record], LazyArray]


@dataclass
class State:
    """The values of a pickle as leaves of a tree.

    Attributes:
        leaves: Leaves by path.
        scalars: Paths of leaves that were Python numbers.
        others: Kinds of all other objects (not arrays, numbers or texts), by path.
        unreadable: Why each unreadable tensor cannot be read, by path.
    """

    leaves: dict[Path, Leaf] = field(default_factory=dict)
    scalars: set[Path] = field(default_factory=set)
    others: dict[Path, str] = field(default_factory=dict)
    unreadable: dict[Path, str] = field(default_factory=dict)

    def refuse_unreadable(self, location: str) -> None:
        """Raise FormatError if tensors are unreadable; the message lists all of them."""
        if self.unreadable:
            lines = [f"{'.'.join(map(str, path))}: {why}" for path, why in self.unreadable.items()]
            raise FormatError(
                "some tensors do not own plain numeric data:" + listing(lines),
                location=location,
                expected="dense tensors with all of their elements in the file",
                hint=_OF_PARTS
                if _PART in self.unreadable.values()
                else "save each as tensor.detach().contiguous().clone()",
            )


def state_of(value: Any, nbytes: int, tensor: Tensor, location: str) -> State:
    """Convert a value to the leaves of a tree.

    Args:
        value: The value of a pickle.
        nbytes: Size of the pickle, in bytes.
        tensor: Returns the array for a tensor's record.
        location: The location for messages.

    Raises:
        FormatError: The value is nested too deep or cyclic, has keys that are neither strings nor numbers, or
            has a tensor that cannot be read.
    """
    state = State()
    for path, item in _walk(value, min(_FEW + nbytes, _MOST_LEAVES), location):
        _put(state, path, item, tensor)
    state.refuse_unreadable(location)
    return state


def _walk(value: Any, limit: int, location: str) -> Iterator[tuple[Path, Any]]:
    """Yield leaves and empty containers in order, limiting their number and the length of their paths."""
    rest: list[tuple[Path, Any]] = [((), value)]
    met, keys = 1, 0
    while rest:
        path, each = rest.pop()
        inside = len(each) if isinstance(each, list | tuple | dict) else 0
        met += inside
        keys += inside * (len(path) + 1)
        if met > limit or keys > _KEYS_PER_LEAF * limit:
            raise _strange(location, f"more than {limit:,} values, or one value in too many places")
        inner = _inner(each, location) if inside else {}
        if not inner:
            yield path, each
        elif len(path) >= DEEPEST:
            raise _strange(location, f"values nested more than {DEEPEST} levels deep")
        else:
            rest.extend(((*path, key), below) for key, below in reversed(list(inner.items())))


def _inner(value: Any, location: str) -> Mapping[Any, Any]:
    """Return the contents of a container by key; empty for other values."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if not isinstance(value, dict):
        return {}
    strange = next((key for key in value if type(key) not in (str, int)), None)
    if strange is not None:
        raise _strange(location, f"a {type(strange).__name__} used as a key")
    return value


def _strange(location: str, what: str) -> FormatError:
    return FormatError(
        "the pickle does not have the structure of weights",
        location=location,
        got=what,
        expected="dictionaries of tensors by name",
        hint="if you trust its author, save only the weights: torch.save(model.state_dict(), FILE)",
    )


def _put(state: State, path: Path, value: Any, tensor: Tensor) -> None:
    if isinstance(value, Record) and is_tensor(value):
        try:
            state.leaves[path] = tensor(value)
        except NotReadableError as error:
            state.unreadable[path] = _PART if is_distributed(value) else str(error)
    elif (number := number_array(value)) is not None:
        state.leaves[path] = number
        state.scalars.add(path)
    elif isinstance(value, str):
        state.leaves[path] = Text(value)
    elif value is None:
        state.leaves[path] = Empty("None")
    elif isinstance(value, dict | list | tuple):
        state.leaves[path] = Empty(type(value).__name__.capitalize())
    else:
        state.others[path] = in_few_words(value)
