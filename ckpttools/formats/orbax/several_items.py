"""Open a step with several items: only the item with the model, or all items as one tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from shlex import quote

from ckpttools.array.tree import Metadata, Tree
from ckpttools.core.errors import ChosenItemWarning, FormatError, warn_step
from ckpttools.core.text import sample_names
from ckpttools.formats.json_file import read_json
from ckpttools.formats.orbax.metadata import TREE_FILE, holds_arrays, holds_data
from ckpttools.formats.orbax.steps import OrbaxItem, Step
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

# Items that trainers (Tunix, EasyLM, Flax) save next to the model.
_NO_PARAMETERS = frozenset(
    ("optimizer_state", "opt_state", "optimizer", "rng", "rngs", "rng_key", "data_iter", "iter", "step")
)
# Names of the optimizer's item in `save_checkpointables` and `Composite`. The item is opened together with
# the model, because both are one training state, and only the user may decide to drop a part.
_OPTIMIZERS = frozenset(("opt", "optim"))


def open_items(items: Sequence[OrbaxItem], opened: Callable[[OrbaxItem], Tree], *, all_items: bool) -> Tree:
    """Open an item, or several items of one step, without reading array data.

    Args:
        items: All items of the step; at least two.
        opened: Opens an item.
        all_items: Whether to open all items as one tree, each below its name.

    Returns:
        The only item with a model (emits `ChosenItemWarning`), or several items as one tree if `all_items` is
        set or if they are a model and its optimizer state.

    Raises:
        FormatError: It is unclear which item is the model, or an item is damaged.
    """
    step = items[0].step
    if all_items:
        return _as_one_tree(step, items, opened)
    unknown = [item for item in items if item.directory.name not in _NO_PARAMETERS]
    documents = {item: read_json(item.directory / TREE_FILE) for item in unknown}
    models = [item for item in unknown if holds_arrays(documents[item])]
    if len(models) == 1:
        _warn_of_others(step, items, models)
        return opened(models[0])
    # Numbers in other items may be part of the training state, such as a position in the data.
    parts = [item for item in unknown if holds_data(documents[item])]
    if len(parts) == 2 and len([item for item in parts if item.directory.name in _OPTIMIZERS]) == 1:
        _warn_of_others(step, items, parts)
        return _as_one_tree(step, parts, opened)
    raise several_items_error(step.path, [item.directory.name for item in items])


def several_items_error(step: Location, names: Sequence[str]) -> FormatError:
    """Return the error for a step whose items must be opened one by one."""
    return FormatError(
        "there are several items",
        location=step,
        got=", ".join(names),
        hint=f"add one of them to the path, such as {quote(str(step / names[-1]))}",
    )


def one_item(tree: Tree, name: str) -> Tree:
    """Extract one item of a tree as if it had been opened separately.

    Args:
        tree: A tree of several items.
        name: One of `tree.metadata.items`.
    """
    of = tree.metadata
    return Tree(
        {path[1:]: leaf for path, leaf in tree.items() if path[0] == name},
        replace(
            of,
            item=name,
            items=(),
            scalars=frozenset(path[1:] for path in of.scalars if path[0] == name),
            key_impls={path[1:]: impl for path, impl in of.key_impls.items() if path[0] == name},
            location=str(parse(of.location) / name),
        ),
    )


def _warn_of_others(step: Step, items: Sequence[OrbaxItem], chosen: Sequence[OrbaxItem]) -> None:
    """Warn that a step has more items than the opened ones."""
    if others := [item.directory.name for item in items if item not in chosen]:
        names = " and ".join(item.directory.name for item in chosen)
        verb = "is" if len(chosen) == 1 else "are"
        warn_step(
            f"{names} of {step.path} {verb} opened; open {sample_names(others)} next to it with "
            f"{step.path}/NAME",
            ChosenItemWarning,
        )


def _as_one_tree(step: Step, items: Sequence[OrbaxItem], opened: Callable[[OrbaxItem], Tree]) -> Tree:
    trees = {item.directory.name: opened(item) for item in items}
    each = {name: tree.metadata for name, tree in trees.items()}
    metadata = Metadata(
        format=next(iter(each.values())).format,
        step=step.number,
        items=tuple(trees),
        custom=next((of.custom for of in each.values() if of.custom), {}),
        config=next((of.config for of in each.values() if of.config is not None), None),
        scalars=frozenset((name, *path) for name, of in each.items() for path in of.scalars),
        key_impls={(name, *path): impl for name, of in each.items() for path, impl in of.key_impls.items()},
        location=str(step.path),
    )
    leaves = {(name, *path): leaf for name, tree in trees.items() for path, leaf in tree.items()}
    return Tree(leaves, metadata)
