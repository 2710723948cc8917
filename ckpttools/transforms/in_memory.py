"""Arrays in memory as leaves of a tree, and a tree of what was made of them as arrays again.

Any arrays with numpy's methods will do, JAX's above all: what only moves elements is done by these methods,
so that an array stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttools.array.lazy import ByteSource, Derived, LazyArray, ReadCost
from ckpttools.array.nodes import Concat, Elementwise, Padded, Relayout, Repeated, Stack, Take, Window
from ckpttools.array.tree import Empty, Leaf, Path, Text, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import parse_dtype
from ckpttools.core.region import Region

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch


@dataclass(frozen=True, eq=False, repr=False)
class InMemory(LazyArray):
    """An array in memory.

    Attributes:
        value: of numpy, JAX or another library with the same methods.
    """

    value: Any

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        import numpy as np

        out[...] = np.ascontiguousarray(self.value[region.slices]).view(self.dtype.carrier)

    @property
    def scratch_bytes(self) -> int:
        return 0

    def read_cost(self, region: Region) -> ReadCost:
        return ReadCost(region.size * self.dtype.itemsize, 1)

    @property
    def stored_bits(self) -> int:
        return 8 * self.dtype.itemsize

    def first_byte(self, region: Region) -> tuple[str, int]:
        return "", 0

    def sources(self) -> Iterator[ByteSource]:
        return iter(())


def tree_of(nested: Any) -> Tree:
    """Nested dictionaries and lists with arrays in them as a tree; empty ones and strings are leaves.

    Raises:
        UnknownNameError: an array of a dtype that no format has.
    """
    return Tree(dict(_leaves(nested, ())))


def _leaves(node: Any, path: Path) -> Iterator[tuple[Path, Leaf]]:
    match node:
        case None:
            yield path, Empty("None")
        case dict() if node:
            for key, value in node.items():
                yield from _leaves(value, (*path, key))
        case list() | tuple() if node:
            for location, value in enumerate(node):
                yield from _leaves(value, (*path, location))
        case dict() | list() | tuple():
            yield path, Empty({dict: "Dict", list: "List", tuple: "Tuple"}[type(node)])
        case str():
            yield path, Text(node)
        case _:
            yield path, _in_memory(node)


def _in_memory(value: Any) -> InMemory:
    import numpy as np

    array = value if hasattr(value, "dtype") else np.asarray(value)
    return InMemory(tuple(array.shape), parse_dtype(str(array.dtype)), array)


def values_of(tree: Tree) -> Any:
    """The tree as dictionaries and lists with arrays in them; arrays that are not `InMemory` are read."""
    return _valued(tree.nested())


def _valued(node: Any) -> Any:
    match node:
        case LazyArray():
            return value_of(node)
        case dict():
            return {key: _valued(value) for key, value in node.items()}
        case list():
            return [_valued(value) for value in node]
        case _:
            return node


def value_of(array: LazyArray) -> Any:
    """The array itself: of the library that the arrays it is made of come from, else of numpy."""
    match array:
        case InMemory():
            return array.value
        case Stack():
            parts = [value_of(part) for part in array.parts]
            return parts[0].__array_namespace__().stack(parts, axis=array.axis)
        case Concat():
            parts = [value_of(part) for part in array.parts]
            return parts[0].__array_namespace__().concat(parts, axis=array.axis)
        case Take():
            return value_of(array.source)[(*[slice(None)] * array.axis, array.index)]
        case Window():
            stops = (start + length for start, length in zip(array.start, array.shape, strict=True))
            return value_of(array.source)[tuple(map(slice, array.start, stops))]
        case Relayout():
            atoms = [length for group in array.split for length in group]
            return value_of(array.source).reshape(atoms).transpose(array.order).reshape(array.shape)
        case Elementwise() | Padded() | Repeated():
            return _made_on_host(array)
        case _:
            return array.read()


def _made_on_host(array: Derived) -> Any:
    """What the array is, made on the host and put where its source is."""
    import numpy as np

    source = value_of(array.source)
    there = InMemory(array.source.shape, array.source.dtype, np.asarray(source))
    built = replace(array, source=there).read()
    return source.__array_namespace__().asarray(built, device=source.device)
