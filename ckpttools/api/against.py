"""Comparing a tree by names, shapes and dtypes with a family, a configuration or a checkpoint."""

from __future__ import annotations

from ckpttools.array.tree import Tree
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.inspect.comparison import Comparison
from ckpttools.stores.place import Place
from ckpttools.stores.registry import Where, parse
from ckpttools.transforms.as_numbers import as_numbers, side_by_side


def compared(
    tree: Tree, what: Where | Tree, pattern: str = "*", read: ReadOptions | None = None
) -> Comparison:
    """The arrays that match a pattern, compared with what they should be.

    Args:
        tree: any checkpoint.
        what: the name of a family or a file with one, a configuration, or another checkpoint; of an adapter
            the model that it should be of.
        pattern: shell pattern of paths.
        read: how to open the other checkpoint.

    Raises:
        CheckpointError: it is none of them, or cannot be read.
        UsageError: no array matches, or the pattern cannot be applied to what is missing.
    """
    from ckpttools.adapters.bases import base_of
    from ckpttools.adapters.config import is_number
    from ckpttools.adapters.from_maxtext import said_of
    from ckpttools.adapters.report import adapter_report, is_maxtext_adapter, peft_adapter
    from ckpttools.adapters.tunix import adapter_of_jax
    from ckpttools.families.file import SUFFIXES
    from ckpttools.families.registry import families, family_called, family_of
    from ckpttools.formats.json_file import read_json
    from ckpttools.formats.registry import open_tree
    from ckpttools.inspect.adapters import against_base
    from ckpttools.inspect.against import against_family, against_tree

    if isinstance(what, Tree):
        return against_tree(*_alike(tree, what), pattern)
    name, path = str(what), parse(what)
    if adapter_report(tree) is not None:
        base = base_of(open_tree(path, read))
        if not is_maxtext_adapter(tree):
            return against_base(peft_adapter(tree), base)
        # Names and shapes are compared: where none is noted any scale will do.
        alpha = None if is_number(said_of(tree).get("lora_alpha")) else 1
        return against_base(adapter_of_jax(base, tree, alpha), base)
    own_arrays = as_numbers(tree).tree
    if name in families() or path.suffix in SUFFIXES or not (path.exists() or "/" in name):
        family, own = family_called(name), tree.metadata.config
        if own is None or own.get("model_type") not in family.model_types:
            return against_family(own_arrays, family, pattern=pattern)
        return against_family(own_arrays, family, own, "the config.json beside it", pattern)
    config = _config_at(path)
    if config is None:
        return against_tree(*_alike(tree, open_tree(path, read)), pattern)
    document = read_json(config)
    return against_family(own_arrays, family_of(document, str(config)), document, str(config), pattern)


def _alike(tree: Tree, other: Tree) -> tuple[Tree, Tree]:
    """Both, quantised weights as numbers where they do not store them alike."""
    mine, theirs = side_by_side(tree, other)
    return mine.tree, theirs.tree


def _config_at(path: Place) -> Place | None:
    """The configuration at a path; None for a checkpoint."""
    if path.suffix == ".json":
        return path
    inside = path / CONFIG
    return inside if inside.is_file() and not any(path.glob("*.safetensors")) else None
