"""An average of the parameters that training keeps in its state, in the place of the parameters.

opt_state/1/ema/params/decoder/…    of optax.ema      stands for    params/params/decoder/…
ema_params/decoder/…                of flax recipes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Leaf, Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CoverageError, UsageError, listing
from ckpttools.core.notes import Notes
from ckpttools.core.wording import option
from ckpttools.roles.names import is_average
from ckpttools.roles.of_tree import roles
from ckpttools.transforms.base import Transformed

ANY = "ema"
"""Instead of a path: whatever average there is."""


@dataclass(frozen=True)
class StoredAverage:
    """The parameters as an average of them in the same state has them; the average itself is left out.

    Attributes:
        below: the key that it lies below, such as "opt_state/1/ema"; "ema" for the only one there is.
    """

    below: str = ANY

    def __call__(self, tree: Tree) -> Transformed:
        """The tree with other parameters.

        Raises:
            UsageError: there is no such average, or several.
            CoverageError: what lies there are not the parameters: other names or other shapes.
        """
        head = self._head(tree)
        places = _places(tree, head)
        leaves: dict[Path, Leaf] = {}
        for path, leaf in tree.items():
            if path[: len(head)] != head:
                leaves[path] = tree.arrays[places[path]] if path in places else leaf
        remark = f"the parameters are those of {keystr(head)}, the average that training has kept"
        return Transformed(Tree(leaves, tree.metadata), Notes(remarks=(remark,)))

    def _head(self, tree: Tree) -> Path:
        heads = {path[:k]: None for path in tree.arrays for k in range(1, len(path))}
        named = [head for head in heads if keystr(head) == self.below]
        averages = [head for head in heads if is_average(head[-1])]
        outer = [head for head in averages if not any(head[:k] in averages for k in range(1, len(head)))]
        found = named or (outer if self.below == ANY else [])
        if len(found) == 1:
            return found[0]
        raise UsageError(
            f"there is no {self.below} in the state" if not found else "there are several averages",
            place=tree.metadata.place or None,
            got=", ".join(map(keystr, outer)) or "no average of parameters that a name tells",
            hint=f"name the key that it lies below, such as {option('parameters', 'opt_state/1/ema')}",
        )


def _places(tree: Tree, head: Path) -> Mapping[Path, Path]:
    """Where the average of each parameter lies.

    Raises:
        CoverageError: the names or the shapes are others.
    """
    known = roles(tree)
    own = [path for path in tree.arrays if path[: len(head)] != head and known.of(path) == "parameter"]
    floats = [path for path in own if tree.arrays[path].dtype.is_float]
    below = {path[len(head) :]: path for path in tree.arrays if path[: len(head)] == head}
    for cut in range(max(map(len, floats), default=0)):
        tails = {path[cut:]: path for path in floats}
        if len(tails) == len(floats) and tails.keys() == below.keys():
            odd = _other_shapes(tree.arrays, {path: below[tail] for tail, path in tails.items()})
            if odd:
                break
            return {path: below[tail] for tail, path in tails.items()}
    else:
        odd = [keystr(path) for path in _unlike(floats, below)]
    raise CoverageError(
        f"what lies below {keystr(head)} are not the parameters{listing(odd)}",
        place=tree.metadata.place or None,
        got=f"{len(below)} arrays",
        wanted=f"the names and shapes of {len(floats)} parameters",
    )


def _other_shapes(arrays: Mapping[Path, LazyArray], places: Mapping[Path, Path]) -> list[str]:
    return [
        f"{keystr(path)}: {list(arrays[path].shape)}, there {list(arrays[place].shape)}"
        for path, place in places.items()
        if arrays[path].shape != arrays[place].shape
    ]


def _unlike(parameters: Iterable[Path], below: Mapping[Path, Path]) -> list[Path]:
    """Parameters that no array there has the name of, by any of its ends; else all."""
    ends = {tail[k:] for tail in below for k in range(len(tail))}
    paths = list(parameters)
    return [path for path in paths if not any(path[k:] in ends for k in range(len(path)))] or paths
