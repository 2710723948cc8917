"""Transforms with a name, which make a command and a call: those of other packages, by entry points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import cleandoc
from typing import Any, TypeVar

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, MappingError, UnknownNameError, near_names
from ckpttools.core.options import Option, parse_options
from ckpttools.core.plugins import load_group
from ckpttools.transforms.base import Transform, Transformed

T = TypeVar("T")
GROUP = "ckpttools.transforms"
Maker = Callable[..., Transform]
"""What the entry point names: makes a transform of its options, which its attribute `options` declares."""


@cache
def transforms() -> Mapping[str, Maker]:
    """All of them, by name."""
    return load_group(GROUP)


def transform_named(name: str, declared: Mapping[str, Any]) -> Transform:
    """A transform with its options. What its code raises by mistake is an error that names it.

    Raises:
        UnknownNameError: there is no such transform.
        UsageError: an option that it does not have, or that cannot be meant.
        MappingError: it cannot be made with these options.
    """
    make = _build_transform(name)
    given = {key: value for key, value in declared.items() if value is not None}
    return _GuardedTransform(
        name, _guard(name, make, **parse_options(options_of(name), given, tuple, f"{name} is not called"))
    )


@dataclass(frozen=True)
class _GuardedTransform:
    """A transform of another package.

    Attributes:
        name: as users call it.
        transform: what the package made.
    """

    name: str
    transform: Transform

    def __call__(self, tree: Tree) -> Transformed:
        """The tree that it makes.

        Raises:
            MappingError: it fails, or returns something else.
            CheckpointError: what it raises on purpose.
        """
        built = _guard(self.name, self.transform, tree)
        if not isinstance(built, Transformed):
            raise MappingError(
                f"the transform {self.name} returned something else",
                got=repr(built),
                expected="a Transformed",
            )
        return built


def _guard(name: str, call: Callable[..., T], /, *arguments: Any, **options: Any) -> T:
    try:
        return call(*arguments, **options)
    except (CheckpointError, MemoryError, OSError):
        raise
    except Exception as error:
        raise MappingError(
            f"the transform {name} failed",
            got=f"{type(error).__name__}: {error}",
            hint="it is of another package: check what it is for and its options; `ckpt --traceback …` shows "
            "where it failed",
        ) from error


def options_of(name: str) -> Sequence[Option]:
    """What may be said of a transform."""
    return getattr(_build_transform(name), "options", ())


def help_of(name: str) -> str:
    """What a transform does: its docstring."""
    return cleandoc(_build_transform(name).__doc__ or name).partition("\n\nAttributes:")[0]


def _build_transform(name: str) -> Maker:
    if name not in transforms():
        near = near_names(name, transforms(), 1)
        raise UnknownNameError(
            f"there is no transform {name!r}",
            expected=", ".join(transforms()) or "one of a package that announces some",
            hint=f"did you mean {near[0]!r}?"
            if near
            else f"packages announce them under the entry point {GROUP}",
        )
    return transforms()[name]
