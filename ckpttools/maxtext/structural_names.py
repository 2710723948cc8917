"""Names of a Hugging Face model with other prefixes than its family's, recognized by what follows them.

`AutoModel.save_pretrained` and sentence-transformers save a backbone without `model.`; trainers and wrappers
put `transformer.`, `language_model.` or `module.` in front. The rest of each name tells which array it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ckpttools.array.tree import Path, Tree, dotted
from ckpttools.core.notes import Notes
from ckpttools.core.text import matches_any
from ckpttools.families.family import Family
from ckpttools.families.registry import families
from ckpttools.maxtext.key_templates import FamilyKeys, hub_keys, numberless
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.moves import Move, moved

# A wrapper adds at most this many keys: `base_model.model.`, `model.language_model.`.
_MAX_KEYS = 3


def with_family_names(tree: Tree, drop: Collection[str] = ()) -> Transformed:
    """The tree under the names of its family; unchanged where these fit, or where several readings do.

    Args:
        tree: of a Hugging Face model.
        drop: patterns of dotted names of arrays that are left out anyway, whatever their names.
    """
    paths = {dotted(path): path for path in tree.arrays if len(path) == 1}
    names = [name for name in paths if not matches_any(name, drop)]
    forms = [form for family in _families_of(tree) for form in hub_keys(family)]
    strange = [[name for name in names if not is_known(name)] for is_known in map(_recognizer, forms)]
    if len(paths) < len(tree.arrays) or not all(strange):
        return Transformed(tree, Notes())
    for form, unknown in zip(forms, strange, strict=True):
        readings = {tuple(made.items()): made for made in _readings(names, unknown, form)}
        if len(readings) == 1:
            (renamed,) = readings.values()
            targets: dict[Path, Path] = {paths[name]: (target,) for name, target in renamed.items()}
            moves = [Move(path, targets.get(path, path), leaf) for path, leaf in tree.items()]
            return Transformed(moved(tree, moves), Notes(remarks=(_remark(unknown[0], renamed),)))
    return Transformed(tree, Notes())


def _remark(name: str, renamed: Mapping[str, str]) -> str:
    return f"names are recognized without the family's prefix, or with another: {name} is {renamed[name]}"


def _families_of(tree: Tree) -> list[Family]:
    config = tree.metadata.config or {}
    kind = config.get("model_type")
    return [] if config.get("auto_map") else [f for f in families().values() if kind in f.model_types]


def _recognizer(forms: FamilyKeys) -> Callable[[str], bool]:
    """Tell the names that a family has a row for, scales and other parts of its modules included."""
    modules = {text.rpartition(".")[0] for text in forms.by_text} - {""}

    def is_known(name: str) -> bool:
        text = numberless(name)
        return text in forms.by_text or text.rpartition(".")[0] in modules or matches_any(name, forms.ignored)

    return is_known


def _readings(names: Sequence[str], strange: Sequence[str], forms: FamilyKeys) -> Iterator[dict[str, str]]:
    """The ways to exchange one prefix that make all names those of the family, and no two the same."""
    is_known = _recognizer(forms)
    prefixes = {"", *(_before(text) for text in forms.by_text)}
    for taken in _shared(strange):
        for put in sorted(prefixes):
            made = {name: _renamed(name, taken, put, is_known) for name in strange}
            every = [made.get(name, name) for name in names]
            if all(map(is_known, made.values())) and len({*every}) == len(every):
                yield made


def _renamed(name: str, taken: str, put: str, is_known: Callable[[str], bool]) -> str:
    """A name with another prefix, or without one where that is of the family, as `lm_head.weight` is."""
    bare = name.removeprefix(taken)
    return bare if is_known(bare) else put + bare


def _before(text: str) -> str:
    """The prefix of a template before its layers: `model.` of `model.layers.#.mlp.up_proj.weight`."""
    keys = text.split(".")
    at = keys.index("#") if "#" in keys else 0
    return "".join(f"{key}." for key in keys[: max(at - 1, 0)])


def _shared(names: Sequence[str]) -> Iterator[str]:
    """What all names begin with: nothing, one key, or several."""
    keys = [name.split(".") for name in names]
    for count in range(_MAX_KEYS + 1):
        heads = {tuple(each[:count]) for each in keys}
        if len(heads) > 1:
            return
        yield "".join(f"{key}." for key in heads.pop())
