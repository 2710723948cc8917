"""Recognize array names of a Hugging Face model whose prefix differs from its family's.

`AutoModel.save_pretrained` and sentence-transformers save a backbone without `model.`. Trainers and wrappers
add `transformer.`, `language_model.` or `module.`. The rest of each name identifies the array.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ckpttools.array.tree import Path, Tree, dotted
from ckpttools.core.notes import Notes
from ckpttools.core.text import matches_any
from ckpttools.maxtext.key_templates import FamilyKeys, hub_keys, numberless
from ckpttools.model_families.family import Family
from ckpttools.model_families.registry import families
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.moves import Move, moved

# A wrapper adds at most this many keys: `base_model.model.`, `model.language_model.`.
_MAX_KEYS = 3


def with_family_names(tree: Tree, drop: Collection[str] = ()) -> Transformed:
    """Give a tree the names of its family. Unchanged if they match already, or if several prefixes match.

    Args:
        tree: a Hugging Face model.
        drop: patterns of dotted names of arrays that are left out in any case.
    """
    paths = {dotted(path): path for path in tree.arrays if len(path) == 1}
    names = [name for name in paths if not matches_any(name, drop)]
    forms = [form for family in _families_of(tree) for form in hub_keys(family)]
    strange = [[name for name in names if not is_known(name)] for is_known in map(_recognizer, forms)]
    if len(paths) < len(tree.arrays) or not all(strange):
        return Transformed(tree, Notes())
    for form, unknown in zip(forms, strange, strict=True):
        readings = {tuple(built.items()): built for built in _readings(names, unknown, form)}
        if len(readings) == 1:
            (renamed,) = readings.values()
            targets: dict[Path, Path] = {paths[name]: (target,) for name, target in renamed.items()}
            moves = [Move(path, targets.get(path, path), leaf) for path, leaf in tree.items()]
            return Transformed(moved(tree, moves), Notes(remarks=(_remark(unknown[0], renamed),)))
    return Transformed(tree, Notes())


def _remark(name: str, renamed: Mapping[str, str]) -> str:
    return f"recognized names whose prefix differs from the family's: {name} is {renamed[name]}"


def _families_of(tree: Tree) -> list[Family]:
    config = tree.metadata.config or {}
    if config.get("auto_map"):
        return []
    return [family for family in families().values() if config.get("model_type") in family.model_types]


def _recognizer(forms: FamilyKeys) -> Callable[[str], bool]:
    """Return a test for names that belong to a family, including scales and other parts of its modules."""
    modules = {text.rpartition(".")[0] for text in forms.by_text} - {""}

    def is_known(name: str) -> bool:
        text = numberless(name)
        return text in forms.by_text or text.rpartition(".")[0] in modules or matches_any(name, forms.ignored)

    return is_known


def _readings(names: Sequence[str], strange: Sequence[str], forms: FamilyKeys) -> Iterator[dict[str, str]]:
    """Yield the renamings that exchange one prefix and give all arrays distinct names of the family."""
    is_known = _recognizer(forms)
    prefixes = {"", *(_before(text) for text in forms.by_text)}
    for removed in _shared(strange):
        for added in sorted(prefixes):
            renamed = {name: _rename(name, removed, added, is_known) for name in strange}
            every = [renamed.get(name, name) for name in names]
            if all(map(is_known, renamed.values())) and len({*every}) == len(every):
                yield renamed


def _rename(name: str, removed: str, added: str, is_known: Callable[[str], bool]) -> str:
    """Exchange the prefix of a name. Only remove it if the family has such a name, like `lm_head.weight`."""
    bare = name.removeprefix(removed)
    return bare if is_known(bare) else added + bare


def _before(text: str) -> str:
    """Return the prefix before the layers: `model.` for `model.layers.#.mlp.up_proj.weight`."""
    keys = text.split(".")
    at = keys.index("#") if "#" in keys else 0
    return "".join(f"{key}." for key in keys[: max(at - 1, 0)])


def _shared(names: Sequence[str]) -> Iterator[str]:
    """Yield the prefixes that all names share: nothing, one key, or several."""
    keys = [name.split(".") for name in names]
    for count in range(_MAX_KEYS + 1):
        heads = {tuple(parts[:count]) for parts in keys}
        if len(heads) > 1:
            return
        yield "".join(f"{key}." for key in heads.pop())
