"""User functions that map each array: `function(path, array)`.

`path` is the array's path with "/" between keys, `array` is lazy. The result is a string for a new path, None
to drop the array, a lazy array to replace it, or `(path, array)` for both.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path as FilePath
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from ckpttools.array.lazy import ByteSource, Derived, LazyArray, ReadCost
from ckpttools.array.nodes import Concat, Elementwise, Padded, Relayout, Repeated, Stack, Take, Window
from ckpttools.array.tree import Empty, Leaf, Path, Text, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import parse_dtype
from ckpttools.core.errors import FormatError, MappingError, MissingPathError, UsageError, did_you_mean
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Notes
from ckpttools.core.region import Region
from ckpttools.core.user_code import check_code
from ckpttools.transforms.base import Move, Transform, Transformed, move_leaves, path_like
from ckpttools.transforms.rename import Remap, read_rules, renames

if TYPE_CHECKING:
    import numpy as np

    from ckpttools.array.scratch import Scratch


Function = Callable[[str, LazyArray], "str | LazyArray | tuple[str, LazyArray] | None"]
Mapper = str | FilePath | Mapping[str, str | None] | Remap | Function
"""A description of the new path and value of each array; see `mapped_by`."""


@dataclass(frozen=True)
class MapArrays:
    """A transform that applies a function to every array and keeps other leaves.

    Attributes:
        function: A function as described in the module docstring.
        name: The name of the function, for messages.
    """

    function: Function
    name: str = "the function"

    def __call__(self, tree: Tree) -> Transformed:
        """Apply the function to every array.

        Raises:
            MappingError: The function raises or returns an invalid result; two arrays get the same path; or
                no array is left.
            FormatError: A list would have gaps.
        """
        moves_by_path = {path: self._map_array(path, array) for path, array in tree.arrays.items()}
        dropped = tuple(keystr(path) for path, move in moves_by_path.items() if move is None)
        moves = (moves_by_path.get(path, Move(path, path, leaf)) for path, leaf in tree.items())
        return Transformed(move_leaves(tree, (move for move in moves if move)), Notes(dropped=dropped))

    def _map_array(self, path: Path, array: LazyArray) -> Move | None:
        try:
            mapped = self.function(keystr(path), array)
        except (Exception, SystemExit) as error:
            raise MappingError(
                f"{self.name} failed", location=keystr(path), got=f"{type(error).__name__}: {error}"
            ) from error
        match mapped:
            case None:
                return None
            case LazyArray():
                return Move(path, path, mapped)
            case str(name) if name:
                return Move(path, path_like(name.split("/"), path), array)
            case (str(name), LazyArray() as other) if name:
                return Move(path, path_like(name.split("/"), path), other)
            case _:
                raise MappingError(
                    f"{self.name} returned an unsupported value",
                    location=keystr(path),
                    got=repr(mapped),
                    expected="a path, None, a lazy array, or a path and a lazy array",
                )


def mapped_by(by: Mapper, *, strict: bool = False) -> Transform:
    """Create a transform from rules or a function, given directly or by name.

    Args:
        by: One of: a file of rules, `module:function` or `file.py:function`, as text or a path; a mapping of
            templates, in which None drops arrays: `{"a.{layer}.w": "b.{layer}.w", "rope.{...}": None}`; rules
            from `ckpttools.transforms.rename.read_rules`; a function of (path, array).
        strict: Whether to reject unmatched arrays.

    Raises:
        MissingPathError: The file does not exist.
        FormatError: Running the file fails.
        UsageError: The function does not exist, or `strict`, which only applies to rules, is set for a
            function.
        CodeNotAllowedError: Only a plan file names the function.
        MappingError: A template is invalid.
        CheckpointError: See `ckpttools.transforms.rename.read_rules`, for files.
    """
    match by:
        case str() | FilePath():
            return _transform_by_name(str(by), strict)
        case Remap():
            return replace(by, strict=strict or by.strict)
        case Mapping():
            return replace(renames(by), strict=strict)
        case _:
            name = getattr(by, "__qualname__", repr(by))
            _refuse_strict(name, strict)
            return MapArrays(by, name)


def _transform_by_name(spec: str, strict: bool) -> Transform:
    module, colon, name = spec.rpartition(":")
    if not colon:
        return read_rules(FilePath(spec), strict=strict)
    _refuse_strict(spec, strict)
    check_code("map", spec)
    function = getattr(_module(module, spec), name, None)
    if not callable(function):
        known = [item for item, value in vars(_module(module, spec)).items() if callable(value)]
        raise UsageError(
            f"{module} has no function {name}",
            location=spec,
            hint=did_you_mean(name, known),
        )
    return MapArrays(function, spec)


def _refuse_strict(name: str, strict: bool) -> None:
    if strict:
        raise UsageError("a function decides about every array itself", got=f"{option('strict')} with {name}")


def _module(name: str, spec: str) -> ModuleType:
    is_file = name.endswith(".py")
    if is_file and not FilePath(name).exists():
        raise MissingPathError(f"{name} does not exist", hint="check the spelling of the path")
    try:
        return _load(FilePath(name)) if is_file else importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise (FormatError if is_file else UsageError)(
            f"cannot import {name}",
            location=spec,
            got=f"{type(error).__name__}: {error}",
            hint=None if is_file else "for a function in a file, give its path: ./names.py:function",
        ) from error


def _load(file: FilePath) -> ModuleType:
    """Execute a file once, and return it as a module."""
    name = f"ckpttools_map:{file.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module while it is being executed.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def as_checkpoint_conversion_fn(
    *makers: Transform | Function | Mapping[str, str | None],
) -> Callable[[Any], Any]:
    """Return a function of a complete checkpoint for MaxText's `checkpoint_conversion_fn`.

    Args:
        makers: Transforms or arguments of `mapped_by`, applied in this order.

    Returns:
        A function from a dictionary of numpy or JAX arrays, flat or nested, to such a dictionary. Arrays that
        are only renamed are the same objects. Axes are moved by the arrays' own methods, so JAX arrays stay
        on their devices. Values are changed on the host, one array at a time.
    """
    transforms = [_transform(maker) for maker in makers]

    def convert(checkpoint: Any) -> Any:
        return values_of(tree_of(checkpoint).pipe(*transforms))

    return convert


def _transform(maker: Any) -> Transform:
    """Treat dataclasses as transforms (`ckpttools.transforms.base`), and other callables as functions."""
    return cast(Transform, maker) if is_dataclass(maker) else mapped_by(maker)


# In-memory arrays as leaves of a tree, and the conversion of the resulting tree back to arrays. Any arrays
# with numpy's methods work, especially JAX's: their methods move elements, so an array stays on its device.


@dataclass(frozen=True, eq=False, repr=False)
class InMemory(LazyArray):
    """An array in memory.

    Attributes:
        value: An array of numpy, JAX or another library with the same methods.
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
    """Build a tree from nested dictionaries and lists of arrays; empty containers and strings are leaves.

    Raises:
        UnknownNameError: No format has the dtype of an array.
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
            yield path, _wrap_array(node)


def _wrap_array(value: Any) -> InMemory:
    import numpy as np

    array = value if hasattr(value, "dtype") else np.asarray(value)
    return InMemory(tuple(array.shape), parse_dtype(str(array.dtype)), array)


def values_of(tree: Tree) -> Any:
    """Convert a tree to dictionaries and lists of arrays; arrays that are not `InMemory` are read."""
    return _plain_value(tree.nested())


def _plain_value(node: Any) -> Any:
    match node:
        case LazyArray():
            return value_of(node)
        case dict():
            return {key: _plain_value(value) for key, value in node.items()}
        case list():
            return [_plain_value(value) for value in node]
        case _:
            return node


def value_of(array: LazyArray) -> Any:
    """Return the array itself, in the library of its source arrays or otherwise in numpy."""
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
            return _host_array(array)
        case _:
            return array.read()


def _host_array(array: Derived) -> Any:
    """Compute the array on the host, and move it to the device of its source."""
    import numpy as np

    source = value_of(array.source)
    host_array = InMemory(array.source.shape, array.source.dtype, np.asarray(source))
    computed = replace(array, source=host_array).read()
    return source.__array_namespace__().asarray(computed, device=source.device)
