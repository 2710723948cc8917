"""The towers of one model before the decoder of another."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Leaf, Path, Tree, dotted
from ckpttools.core.errors import CoverageError, UsageError, listing
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count
from ckpttools.maxtext.layout import DECODER, EMBEDDING
from ckpttools.maxtext.model import CONFIG, ModelOptions, family_for
from ckpttools.maxtext.view import view_of

_TEXT = (DECODER, EMBEDDING[0])


def stitched(towers: Tree, decoder: Tree) -> Tree:
    """The model `towers` with the text model of `decoder`: embedding, layers, final norm and head.

    Both are Hugging Face models or both MaxText's. Files of the model, and its configuration, stay those of
    `towers`.

    Raises:
        UsageError: one is MaxText's and the other is not, there are no towers, or there is training state.
        CoverageError: the text models have other names or shapes; lists all.
        ConfigError: a Hugging Face model has no configuration, or one of no family.
    """
    sides = [view_of(each).is_maxtext for each in (towers, decoder)]
    if sides[0] != sides[1]:
        raise UsageError(
            "one is MaxText's and the other Hugging Face's", hint="convert one of them first: ckpt convert"
        )
    if view_of(towers).optimizer or view_of(decoder).optimizer:
        raise UsageError(
            "moments of one model are none of the other",
            place=towers.metadata.place or None,
            hint="take parameters alone: ckpt strip-optimizer",
        )
    text, other = (_of_maxtext if sides[0] else _of_hugging_face)(towers, decoder)
    place = towers.metadata.place or None
    if len(text) == len(towers.arrays):
        raise UsageError("there are no towers", place=place, wanted="a model that sees or hears")
    _check_alike(text, other, towers, decoder)
    given = {path: other[name] for name, path in text.items()}
    leaves: dict[Path, Leaf] = {path: given.get(path, leaf) for path, leaf in towers.items()}
    remark = f"{array_count(given)} of the text model are those of {decoder.metadata.place or 'the other'}"
    notes = towers.metadata.notes + Notes(remarks=(remark,))
    return Tree(leaves, towers.metadata).with_metadata(notes=notes)


Text = tuple[Mapping[str, Path], Mapping[str, LazyArray]]
"""Of the first model where the arrays of its text model are, of the second these arrays, by common names."""


def _of_maxtext(towers: Tree, decoder: Tree) -> Text:
    homes, others = view_of(towers).homes, view_of(decoder).homes
    own = {dotted(inner): path for inner, path in homes.items() if inner[0] in _TEXT}
    return own, {dotted(inner): decoder.arrays[p] for inner, p in others.items() if inner[0] in _TEXT}


def _of_hugging_face(towers: Tree, decoder: Tree) -> Text:
    family = family_for(towers.metadata.config, ModelOptions(), towers.metadata.place or CONFIG)
    patterns = family.tower_patterns(family.towers)
    rest = (*family.homeless, *(key for part in family.parts.values() for key in part.keys))

    def text_of(tree: Tree) -> dict[str, Path]:
        names = {dotted(path): path for path in tree.arrays}
        spelling = family.spelling_of(frozenset(names))
        away = [*map(str, patterns), *rest]
        return {spelling.plain(n): path for n, path in names.items() if not _matches(n, away)}

    there = text_of(decoder)
    return text_of(towers), {name: decoder.arrays[path] for name, path in there.items()}


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_alike(
    text: Mapping[str, Path], other: Mapping[str, LazyArray], towers: Tree, decoder: Tree
) -> None:
    odd = [f"{name}: missing" for name in text if name not in other]
    odd += [f"{name}: left over" for name in other if name not in text]
    odd += [
        f"{name}: {list(other[name].shape)}, wanted {list(towers.arrays[path].shape)}"
        for name, path in text.items()
        if name in other and other[name].shape != towers.arrays[path].shape
    ]
    if odd:
        raise CoverageError(
            f"the text models are not alike:{listing(odd)}",
            place=decoder.metadata.place or None,
            wanted=f"the names and shapes of {towers.metadata.place or 'the other model'}",
        )
