"""Flavors: how frameworks nest the same parameters.

    linen     params/params/decoder/layers/mlp/wi_0/kernel      also below a single `params`
    nnx       decoder/layers/mlp/wi_0/kernel/value              also below `model`
    nnx-rl    base/decoder/layers/mlp/wi_0/kernel/value         with or without `value`; others next to `base`

A flavor is a prefix and a suffix of paths, so wrapping and unwrapping are inverse operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant
from ckpttools.array.tree import Empty, Leaf, Metadata, Path, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.maxtext.layout import BASE, MODEL, OPTIMIZER, PARAMS, STEP, VALUE, FlavourName
from ckpttools.roles.names import wraps


@dataclass(frozen=True, slots=True)
class Flavour:
    """The keys before and after every parameter's path.

    Attributes:
        name: The name of the flavor; None if parameters are not wrapped.
        prefix: The keys before the model's own keys.
        suffix: The keys after the model's own keys.
    """

    name: FlavourName | None = None
    prefix: Path = ()
    suffix: Path = ()

    def wrapped(self, path: Path) -> Path:
        """Return the path of a parameter in a tree of this flavor."""
        return (*self.prefix, *path, *self.suffix)

    def holds(self, path: Path) -> bool:
        """Return whether this flavor wraps a path."""
        start, end = len(self.prefix), len(path) - len(self.suffix)
        # A wrapped path must have keys of its own; only an unwrapped path may be empty.
        return path[:start] == self.prefix and path[end:] == self.suffix and end >= start + bool(self.name)

    def unwrapped(self, path: Path) -> Path:
        """Invert `wrapped` for a path that this flavor `holds`."""
        return path[len(self.prefix) : len(path) - len(self.suffix)]


PLAIN = Flavour()
LINEN = Flavour("linen", (PARAMS, PARAMS))
NNX = Flavour("nnx", (), (VALUE,))


def flavour_of(paths: list[Path], mirrored: Path | None) -> Flavour:
    """Return the flavor of parameters; `PLAIN` if no known framework wrapped them.

    Args:
        paths: The paths of all parameters.
        mirrored: The prefix of the parameters that an optimizer mirrors, which decides if several sets are
            wrapped the same way.
    """
    for linen in (LINEN, Flavour("linen", (PARAMS,))):
        if any(map(linen.holds, paths)):
            return linen
    if based := [path for path in paths if path[:1] == (BASE,) and len(path) > 1]:
        return Flavour("nnx-rl", (BASE,), _suffix(based))
    model = Flavour("nnx", (MODEL,), NNX.suffix)
    result = next((item for item in (model, NNX) if paths and all(map(item.holds, paths))), PLAIN)
    key = mirrored[0] if mirrored else paths[0][0] if paths and paths[0] else ""
    apart = mirrored or (wraps(key) and all(path[:1] == (key,) for path in paths))
    return _within(paths, key, result) if apart and result != model else result


def _within(paths: list[Path], key: str | int, otherwise: Flavour) -> Flavour:
    """Return the flavor below a key, or `otherwise` if it has none."""
    below = [path for path in paths if str(path[0]) == str(key) and len(path) > 1]
    inner = flavour_of([path[1:] for path in below], None) if below else PLAIN
    return Flavour(inner.name, (*below[0][:1], *inner.prefix), inner.suffix) if inner.name else otherwise


def _suffix(paths: Iterable[Path]) -> Path:
    return NNX.suffix if all(path[1:] and path[-1:] == NNX.suffix for path in paths) else ()


def linen_state(parameters: Mapping[Path, LazyArray], step: int, custom: Mapping[str, object]) -> Tree:
    """Return parameters as the tree that MaxText's converter writes: with a step, without optimizer state."""
    leaves: dict[Path, Leaf] = {
        STEP: Constant((), DTYPES["int64"], step.to_bytes(8, "little", signed=True)),
        **{LINEN.wrapped(path): array for path, array in parameters.items()},
        OPTIMIZER: Empty("Dict"),
    }
    return Tree(leaves, Metadata(step=step, custom=custom, scalars=frozenset({STEP})))
