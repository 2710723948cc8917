"""Find arrays of A that have another name in B, by comparing a few elements of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from itertools import groupby

import numpy as np

from ckpttools.array.lazy import LazyArray
from ckpttools.compare.causes.base import Cause
from ckpttools.compare.samples import read_samples
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.message_terms import action
from ckpttools.core.region import Shape
from ckpttools.maxtext.layers import split_number
from ckpttools.maxtext.versions import LAYERS

_SWAP = f"rename the arrays of one side with {action('remap')}, or convert again with the right rows"
_MAX_SHOWN = 8


@dataclass(frozen=True)
class Candidates:
    """The arrays of A, indexed by content.

    Attributes:
        arrays: Arrays by name.
    """

    arrays: Mapping[str, LazyArray]
    _by_shape: dict[Shape, dict[bytes, list[str]]] = field(default_factory=dict, compare=False)

    def like(self, array: LazyArray) -> Iterator[tuple[str, LazyArray]]:
        """Yield arrays whose sample equals that of an array of the other side."""
        mark = sample_key(array)
        if mark is not None:
            yield from ((name, self.arrays[name]) for name in self._marks(array.shape).get(mark, ()))

    def _marks(self, shape: Shape) -> dict[bytes, list[str]]:
        """Return the names of all arrays of this shape by their sample."""
        if shape not in self._by_shape:
            marks = self._by_shape[shape] = {}
            for name, array in self.arrays.items():
                mark = sample_key(array) if array.shape == shape else None
                if mark is not None:
                    marks.setdefault(mark, []).append(name)
        return self._by_shape[shape]


def sample_key(array: LazyArray) -> bytes | None:
    """Return a sample of an array, coarse enough to be the same in every dtype; None for a constant."""
    parts = read_samples(array)
    if not parts:
        return None
    values = np.concatenate([part.reshape(-1) for part in parts])
    # NaN and values beyond float32 cause numpy warnings.
    with np.errstate(over="ignore", invalid="ignore"):
        if (values == values[0]).all():
            return None
        if array.dtype.is_float:
            single = values.view(array.dtype.numpy).astype(np.float32)
            return single.astype(DTYPES["bfloat16"].numpy).tobytes()
    return values.tobytes()


def moves(origins: Mapping[str, str]) -> dict[str, Cause]:
    """Return the cause for each name of B that has another name in A.

    Args:
        origins: A's name of the array, by name in B.
    """
    result: dict[str, Cause] = {}
    renumbered: dict[str, dict[str, tuple[str, int, int]]] = {}
    for name, origin in origins.items():
        number = _number(name, origin)
        if number is None:
            result[name] = _renaming_cause(name, origin, origins.get(origin) == name)
        else:
            renumbered.setdefault(template(name), {})[name] = number
    for group in renumbered.values():
        move = _renumbering_cause(group)
        result.update(dict.fromkeys(group, move))
    return result


def _renumbering_cause(group: Mapping[str, tuple[str, int, int]]) -> Cause:
    """Return the cause for arrays whose names differ in one number."""
    offsets = {new - old for _, old, new in group.values()}
    word = next(iter(group.values()))[0]
    if len(offsets) == 1:
        return Cause(
            "shifted", f"{word} are shifted: number n in B is number n{offsets.pop():+d} in A", _SWAP
        )
    pairs = sorted({(old, new) for _, old, new in group.values()})
    text = ", ".join(f"{old} is {new}" for old, new in pairs[:_MAX_SHOWN])
    more = ", …" if len(pairs) > _MAX_SHOWN else ""
    return Cause("permuted", f"{word} are in another order: of B's and A's numbers {text}{more}", _SWAP)


def _renaming_cause(name: str, origin: str, mutual: bool) -> Cause:
    old, new = _different(name, origin)
    if mutual:
        first, second = sorted((old, new))
        return Cause("swapped", f"{first} and {second} are swapped", _SWAP)
    return Cause("renamed", f"B's {old} is A's {new}", _SWAP)


def _different(name: str, other: str) -> tuple[str, str]:
    """Return the keys in which two names differ, without common keys at both ends."""
    joint = "/" if "/" in name + other else "."
    old, new = name.split(joint), other.split(joint)
    while len(old) > 1 and len(new) > 1 and old[0] == new[0]:
        del old[0], new[0]
    while len(old) > 1 and len(new) > 1 and old[-1] == new[-1]:
        del old[-1], new[-1]
    return joint.join(old), joint.join(new)


def template(name: str) -> str:
    """Return a name without layer and expert numbers, which is the same for all layers and experts."""
    return "".join(word for word, _ in _parts(name))


def indices(name: str) -> tuple[tuple[str, int], ...]:
    """Return the numbers of layers, experts and the like in a name, each with the word that it numbers."""
    parts = _parts(name)
    return tuple(
        (_counted_noun(parts, k), number) for k, (_, number) in enumerate(parts) if number is not None
    )


def _parts(name: str) -> list[tuple[str, int | None]]:
    """Return keys and separators in turn. The number of a key is separated from its word.

    The 0 in `wi_0` is not an index: it distinguishes arrays, not layers.
    """
    parts: list[tuple[str, int | None]] = []
    for is_joint, run in groupby(name, "/.".__contains__):
        text = "".join(run)
        named = split_number(text)
        if is_joint or not (text.isdecimal() or (named and LAYERS[:-1] in named[0])):
            parts.append((text, None))
        else:
            parts.append((f"{named[0]}_", named[1]) if named else ("", int(text)))
    return parts


def _counted_noun(parts: list[tuple[str, int | None]], location: int) -> str:
    """Return what an index numbers: the word in its own key, or the key before it."""
    words = [word for word, _ in parts[: location + 1] if word.strip("/.")]
    return words[-1].rstrip("_") if words else "arrays"


def _number(name: str, origin: str) -> tuple[str, int, int] | None:
    """Return the word before the only number in which two names differ, and both numbers; otherwise None."""
    if template(name) != template(origin):
        return None
    pairs = zip(indices(name), indices(origin), strict=True)
    unlike = [(word, old, new) for (word, old), (_, new) in pairs if old != new]
    return unlike[0] if len(unlike) == 1 else None
