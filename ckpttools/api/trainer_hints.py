"""Suggest commands for models that a PyTorch trainer saved under its own names."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.array.tree import Tree, dotted
from ckpttools.core.message_terms import call, is_call
from ckpttools.core.text import matches_any
from ckpttools.maxtext.hub_names import as_hub_model, has_llama_names, patterns_outside_model
from ckpttools.maxtext.model_options import config_copy_command
from ckpttools.maxtext.recognition import find_unowned_arrays, guess_families
from ckpttools.maxtext.view import view_of
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

# Maximum number of patterns in a suggested command.
_FEW = 4


def names_of_hub(*trees: Tree) -> str | None:
    """Return the command that gives Hub names to the first checkpoint with a trainer's names, or None."""
    for tree in trees:
        is_known = view_of(tree).is_maxtext or guess_families(tree)
        built = (
            []
            if is_known or not tree.metadata.location
            else list(commands(tree, parse(tree.metadata.location)))
        )
        if built:
            after = "" if is_call(built[0]) else f"after `{built[0]}`, "
            return f"{after}`{built[-1]}` gives names of the hub, which can be compared"
    return None


def commands_of_model(tree: Tree, location: Location) -> Iterator[str]:
    """Yield commands for a model with Hub names: copy a configuration if it has none, otherwise convert it.

    Args:
        tree: The model, possibly with optimizer state or a head that its trainer added.
        location: Location of the model.
    """
    if tree.metadata.config is None:
        yield from filter(None, (config_copy_command(location),))
        return
    beside, path = list(dict.fromkeys((*patterns_outside_model(tree), *_heads(tree)))), str(location)
    if len(beside) > _FEW:
        return
    yield call("hf_to_maxtext", path, "DST", drop=beside or None)
    if not beside:
        yield call("maxtext_config", path)


def _heads(tree: Tree) -> Iterator[str]:
    """Yield patterns of arrays that a trainer added to a model: keys without arrays of the model."""
    result = find_unowned_arrays(tree)
    strange = {*result.names} if result is not None and not result.prefixes else set()
    names = [dotted(path) for path in tree.arrays]
    own = {name.split(".")[0] for name in names if name not in strange}
    for key in dict.fromkeys(name.split(".")[0] for name in names if name in strange):
        if key not in own:
            yield f"{key}.*"


def commands(tree: Tree, location: Location) -> Iterator[str]:
    """Yield commands that extract a model from a checkpoint; none for unknown models.

    Args:
        tree: A tree whose names are neither MaxText's nor the Hub's.
        location: Location of the tree.
    """
    beside, path = patterns_outside_model(tree), str(location)
    if len(beside) > _FEW:
        return
    hub = as_hub_model(tree, tree.metadata.config).tree
    leaves = {at: a for at, a in hub.arrays.items() if not matches_any(dotted(at), beside)}
    weights = Tree(leaves, hub.metadata)
    is_llama = has_llama_names(map(dotted, leaves))
    result = find_unowned_arrays(weights)
    if result is not None and result.prefixes:
        yield from (
            call("select", path, "DST", prefix=prefix, format="safetensors") for prefix in result.prefixes
        )
        return
    if not is_llama and not guess_families(weights):
        return
    dropped = beside or None
    to_hub = call("convert", path, "DST", format="safetensors", names="hub", drop=dropped)
    if tree.metadata.config is None:
        # The second command needs the file that the first one copies.
        if copied := config_copy_command(location):
            yield from (copied, to_hub)
    elif not is_llama:
        yield from (call("hf_to_maxtext", path, "DST", drop=dropped), to_hub)
