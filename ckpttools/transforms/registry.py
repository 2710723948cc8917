"""Registry of named transforms, each with a command and a function.

Other packages register transforms with entry points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import cleandoc
from typing import Any, TypeVar

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, MappingError, UnknownNameError, similar_names
from ckpttools.core.message_terms import traceback_term
from ckpttools.core.options import Option, parse_options
from ckpttools.core.plugins import load_group
from ckpttools.transforms.base import Transform, Transformed

T = TypeVar("T")
GROUP = "ckpttools.transforms"
Maker = Callable[..., Transform]
"""A factory named by an entry point.

It creates a transform from the options declared in its `options` attribute.
"""


@cache
def transforms() -> Mapping[str, Maker]:
    """Return all transforms by name."""
    return load_group(GROUP)


def transform_named(name: str, declared: Mapping[str, Any]) -> Transform:
    """Create a transform with its options.

    Unexpected exceptions in its code become errors that name the transform.

    Raises:
        UnknownNameError: The transform does not exist.
        UsageError: An option is unknown or invalid.
        MappingError: The transform cannot be created with these options.
    """
    make = _build_transform(name)
    set_options = {key: value for key, value in declared.items() if value is not None}
    return _GuardedTransform(
        name,
        _guard(name, make, **parse_options(options_of(name), set_options, tuple, f"{name} is not called")),
    )


@dataclass(frozen=True)
class _GuardedTransform:
    """A transform of another package.

    Attributes:
        name: Its registered name.
        transform: The transform of the package.
    """

    name: str
    transform: Transform

    def __call__(self, tree: Tree) -> Transformed:
        """Apply the transform.

        Raises:
            MappingError: The transform fails, or returns something other than a tree.
            CheckpointError: The error that the transform raised.
        """
        transformed = _guard(self.name, self.transform, tree)
        if not isinstance(transformed, Transformed):
            raise MappingError(
                f"the transform {self.name} did not return a Transformed",
                got=repr(transformed),
                expected="a Transformed",
            )
        return transformed


def _guard(name: str, call: Callable[..., T], /, *arguments: Any, **options: Any) -> T:
    try:
        return call(*arguments, **options)
    except (CheckpointError, MemoryError, OSError):
        raise
    except Exception as error:
        raise MappingError(
            f"the transform {name} failed",
            got=f"{type(error).__name__}: {error}",
            hint=f"it belongs to another package: check its purpose and its options; {traceback_term()} "
            "shows where it failed",
        ) from error


def options_of(name: str) -> Sequence[Option]:
    """Return the options of a transform."""
    return getattr(_build_transform(name), "options", ())


def help_of(name: str) -> str:
    """Return the docstring of a transform as its help."""
    return cleandoc(_build_transform(name).__doc__ or name).partition("\n\nAttributes:")[0]


def _build_transform(name: str) -> Maker:
    if name not in transforms():
        near = similar_names(name, transforms(), 1)
        raise UnknownNameError(
            f"unknown transform {name!r}",
            expected=", ".join(transforms()) or "a transform of an installed package",
            hint=f"did you mean {near[0]!r}?"
            if near
            else f"packages register transforms under the entry point {GROUP}",
        )
    return transforms()[name]
