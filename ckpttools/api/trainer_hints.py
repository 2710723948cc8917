"""Suggest commands for checkpoints that trainers saved: adapters, and models under their own names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from shlex import quote
from typing import TYPE_CHECKING

from ckpttools.array.tree import Tree, dotted
from ckpttools.core.message_terms import action, call, is_call
from ckpttools.core.text import matches_any
from ckpttools.formats.adapters import ADAPTER, PREFIX, is_adapter, merge_command
from ckpttools.maxtext.hub_names import as_hub_model, has_llama_names, patterns_outside_model
from ckpttools.maxtext.model_options import config_copy_command
from ckpttools.maxtext.recognition import find_unowned_arrays, guess_families
from ckpttools.maxtext.versions import MODULE_PATH, PARAMS, VALUE
from ckpttools.maxtext.view import view_of
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

if TYPE_CHECKING:
    from ckpttools.adapters.summary import AdapterReport


# Adapter features that MaxText supports besides factors of linear layers.
_KNOWN_TO_MAXTEXT = {"rslora"}


def is_peft_adapter(tree: Tree, location: Location) -> bool:
    """Return whether a location is a directory that PEFT saved."""
    return tree.metadata.format != "orbax" and (location / ADAPTER).is_file()


def loading_steps(tree: Tree, location: Location) -> tuple[str, ...]:
    """Return the command lines that load an adapter; none for other checkpoints."""
    if is_peft_adapter(tree, location):
        merging = f"to merge it: {action('merge_adapter', 'BASE', 'DST', adapter=str(location))}"
        if location.store.scheme not in ("file", "hf"):
            return (f"PEFT reads disks and the Hub: {action('copy', str(location), 'DIR')}", merging)
        loading = f"PeftModel.from_pretrained(model, {json.dumps(str(location))})"
        # PEFT ignores factors with other names, with a warning; `merge_adapter` reads them.
        is_loaded = all(dotted(path).startswith(PREFIX) for path in tree.arrays)
        return (loading, merging) if is_loaded else (merging,)
    if not any("lora" in str(key) for path in tree.arrays for key in path[-2:]):
        return ()  # Only adapters have all these modules.
    from ckpttools.adapters.report import is_maxtext_adapter, names_of_jax

    if not (is_maxtext_adapter(tree) and names_of_jax(tree) == "MaxText" and _is_read(tree)):
        return ()
    if away := elsewhere(location):
        return (away,)
    return (" ".join(_settings(tree)), *_alpha_to_set(tree))


def merge_command_hint(*trees: Tree) -> str | None:
    """Return the command that merges the first adapter among checkpoints to compare them, or None."""
    from ckpttools.adapters.report import is_maxtext_adapter

    for tree in trees:
        location = parse(tree.metadata.location) if tree.metadata.location else None
        if location is None or not (is_adapter(tree) or is_maxtext_adapter(tree)):
            continue
        if command := merge_command(location):
            return f"merge the adapter before comparing it: {command}"
    return None


def elsewhere(location: Location) -> str | None:
    """Return the command that copies a checkpoint to where MaxText reads it; None if it is already there."""
    if location.store.scheme in ("file", "gs"):
        return None
    return f"MaxText reads only disks and gs://: {action('copy', str(location), 'DIR')}"


def _is_read(tree: Tree) -> bool:
    """Return whether MaxText restores factors with these names, unlike those of its converter and engine."""
    last = {str(path[-1]) for path in view_of(tree).of_role("parameter")}
    return (
        last <= {VALUE} if _is_restored(tree) else all(key.endswith(("_lora_a", "_lora_b")) for key in last)
    )


def _is_restored(tree: Tree) -> bool:
    """Return whether MaxText restores the adapter. It resumes its own fine-tuning checkpoints instead."""
    return all(path[0] != PARAMS for path in tree.arrays)


def _settings(tree: Tree) -> Iterator[str]:
    from ckpttools.adapters.from_jax import recorded_settings

    yield "lora.enable_lora=true"
    config = recorded_settings(tree)
    modules = config.get(MODULE_PATH)
    if isinstance(modules, str):
        yield f"lora.{MODULE_PATH}={quote(modules)}"
    yield from _rank_and_alpha(tree, config)
    if _is_restored(tree):
        yield f"lora.lora_restore_path={quote(str(parse(tree.metadata.location).absolute()))}"


def _rank_and_alpha(tree: Tree, config: Mapping[str, object]) -> Iterator[str]:
    """Yield the settings of rank and alpha, which trainers use before they read a checkpoint's metadata.

    With a rank of 0, trainers divide by zero. With an alpha of 0, they do not change the model.
    """
    from ckpttools.adapters.config import is_number
    from ckpttools.adapters.from_jax import factor_pairs

    rank = config.get("lora_rank") or max((pair.rank for pair in factor_pairs(tree).values()), default=0)
    if rank:
        yield f"lora.lora_rank={rank}"
    alpha = config.get("lora_alpha")
    if is_number(alpha) and alpha >= 0:
        yield f"lora.lora_alpha={_decimal(alpha)}"


def _alpha_to_set(tree: Tree) -> Iterator[str]:
    """Yield advice if the metadata of a checkpoint lacks the alpha that MaxText needs to apply it."""
    from ckpttools.adapters.config import is_number
    from ckpttools.adapters.from_jax import recorded_settings

    alpha = recorded_settings(tree).get("lora_alpha")
    if not is_number(alpha):
        yield (
            "the checkpoint does not state alpha: add lora.lora_alpha=ALPHA, because with MaxText's default "
            "of 0 the adapter does not change the model"
        )
    elif alpha == 0:
        yield "alpha is 0, so the adapter does not change the model: set lora.lora_alpha as in its training"
    elif alpha < 0:
        yield (
            f"alpha is {_decimal(alpha)}, and MaxText refuses a negative alpha: {action('adapter_to_peft')}, "
            f"then {action('adapter_to_maxtext')}, negates a factor instead"
        )


def _decimal(number: float) -> str:
    """Format a number without an exponent, which MaxText's YAML and command line parse alike."""
    return f"{Decimal(repr(number)):f}"


def adapter_commands(path: str, result: AdapterReport | None, *, is_peft: bool) -> Iterator[str]:
    """Yield calls that accept the adapter at a path."""
    yield call("inspect", path)
    if result is not None and result.problem:
        return
    # Without alpha, neither command knows the scale.
    alpha = "ALPHA" if result is not None and not is_peft and result.alpha is None else None
    yield call("merge_adapter", "BASE", "DST", adapter=path, alpha=alpha)
    if not is_peft:
        yield call("adapter_to_peft", path, "DST", base="BASE", alpha=alpha)
    elif result is None or not ({*result.features} - _KNOWN_TO_MAXTEXT or result.num_replaced):
        yield call("adapter_to_maxtext", path, "DST", base="BASE")


# Maximum number of patterns in a suggested command.
_MAX_SUGGESTED = 4


def names_of_hub(*trees: Tree) -> str | None:
    """Return the command that gives Hub names to the first checkpoint with a trainer's names, or None."""
    for tree in trees:
        is_known = view_of(tree).is_maxtext or guess_families(tree)
        result = (
            []
            if is_known or not tree.metadata.location
            else list(trainer_commands(tree, parse(tree.metadata.location)))
        )
        if result:
            after = "" if is_call(result[0]) else f"after `{result[0]}`, "
            return f"{after}`{result[-1]}` gives names of the Hub, which can be compared"
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
    other_patterns, path = list(dict.fromkeys((*patterns_outside_model(tree), *_heads(tree)))), str(location)
    if len(other_patterns) > _MAX_SUGGESTED:
        return
    yield call("hf_to_maxtext", path, "DST", drop=other_patterns or None)
    if not other_patterns:
        yield call("maxtext_config", path)


def _heads(tree: Tree) -> Iterator[str]:
    """Yield patterns of arrays that a trainer added to a model: keys without arrays of the model."""
    result = find_unowned_arrays(tree)
    unknown = {*result.names} if result is not None and not result.prefixes else set()
    names = [dotted(path) for path in tree.arrays]
    own = {name.split(".")[0] for name in names if name not in unknown}
    for key in dict.fromkeys(name.split(".")[0] for name in names if name in unknown):
        if key not in own:
            yield f"{key}.*"


def trainer_commands(tree: Tree, location: Location) -> Iterator[str]:
    """Yield commands that extract a model from a checkpoint; none for unknown models.

    Args:
        tree: A tree whose names are neither MaxText's nor the Hub's.
        location: Location of the tree.
    """
    sidecar_patterns, path = patterns_outside_model(tree), str(location)
    if len(sidecar_patterns) > _MAX_SUGGESTED:
        return
    hub = as_hub_model(tree, tree.metadata.config).tree
    leaves = {at: a for at, a in hub.arrays.items() if not matches_any(dotted(at), sidecar_patterns)}
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
    dropped = sidecar_patterns or None
    to_hub = call("convert", path, "DST", format="safetensors", names="hub", drop=dropped)
    if tree.metadata.config is None:
        # The second command needs the file that the first one copies.
        if copied := config_copy_command(location):
            yield from (copied, to_hub)
    elif not is_llama:
        yield from (call("hf_to_maxtext", path, "DST", drop=dropped), to_hub)
