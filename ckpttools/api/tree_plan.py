"""Plan writing a tree with its model files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttools.api.output_checks import check_source, compare_names, compare_with_config
from ckpttools.api.prepared import Prepared, Resources
from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, by_name, dotted
from ckpttools.core.notes import Notes
from ckpttools.formats.adapters import ADAPTER, is_adapter
from ckpttools.formats.base import RECORD, SIDECARS, SupportsSidecars, Writer
from ckpttools.formats.json_file import read_json
from ckpttools.formats.origin import with_origin
from ckpttools.formats.sidecar import CARRIED, Sidecars, WithSidecars
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.hub_names import hub_name
from ckpttools.maxtext.model_config import absent_mtp_field, absent_towers, config_for_weights
from ckpttools.maxtext.model_files import (
    ModelFiles,
    config_bytes,
    has_sidecars,
    sidecars_of,
    stale_file_notes,
    stale_files,
)
from ckpttools.maxtext.recognition import owned_name_test
from ckpttools.maxtext.versions import LORA_KEY
from ckpttools.roles.names import container
from ckpttools.roles.of_tree import roles
from ckpttools.stores.registry import parse


def plan_tree(
    tree: Tree, writer: Writer, resources: Resources | None = None, source: Tree | None = None
) -> Prepared:
    """Plan writing `tree` with `writer`. Reads no arrays.

    Args:
        tree: The tree to write.
        writer: The writer.
        resources: Memory and workers; None for the defaults.
        source: The tree before it was changed; None if it was not opened from a path.

    Raises:
        CheckpointError: The format cannot represent the tree, or the work does not fit into the memory.
    """
    resources = resources or Resources()
    tree = _match_partial_metadata(tree)
    is_renamed = source is not None and any(path not in source.leaves for path in tree)
    notes = tree.metadata.notes + check_source(tree, renamed_from=source if is_renamed else None)
    sidecars = sidecars_of(tree)
    tree = with_origin(tree, tree)
    if not (sidecars or tree.metadata.is_other_model):
        return resources.plan(tree, writer, notes)
    if not isinstance(writer, SupportsSidecars):
        return resources.plan(tree, writer, notes + _omitted_sidecar_notes(sidecars, writer.name))
    is_model = _is_model(tree, sidecars)
    changed, changes = _updated_sidecars(tree, sidecars, is_model)
    copied = {name: file for name, file in sidecars.files.items() if name not in changed}
    result = {name: content for name, content in changed.items() if content is not None}
    location = writer.sidecars_at(tree, is_model)
    foreign = compare_names(source, tree, {**copied, **result}) if source and is_renamed else Notes()
    changes += foreign
    if is_model and not location and not foreign.remarks:
        changes += compare_with_config(tree, {**copied, **result}, is_renamed=is_renamed)
    sidecar_writer = WithSidecars(writer, Sidecars(copied, sidecars.arrays), location, result)
    return resources.plan(sidecar_writer.with_sidecars(tree), sidecar_writer, notes + changes)


def _match_partial_metadata(tree: Tree) -> Tree:
    """Adjust the metadata of a tree if arrays of an adapter were left out."""
    if LORA_KEY not in tree.metadata.custom:
        return tree
    from ckpttools.adapters.partial_config import with_remaining_modules

    return tree.pipe(with_remaining_modules)


def _updated_sidecars(
    tree: Tree, sidecars: Sidecars, is_model: bool
) -> tuple[dict[str, bytes | None], Notes]:
    """Return new contents of sidecar files, None for files to leave out, and remarks about the changes."""
    result, changes = _new_config(tree, sidecars, is_model)
    files: dict[str, bytes | None] = {**result}
    if is_model:
        config = tree.metadata.config
        stale = stale_files(sidecars.files, tree, _read_config(sidecars), config)
        files, changes = {**dict.fromkeys(stale), **files}, changes + stale_file_notes(stale)
    dropped = [name.replace("/", ".") for name in tree.metadata.notes.dropped]
    if dropped and ADAPTER in sidecars.files and is_adapter(tree):
        from ckpttools.adapters.partial_config import partial_peft_config

        file = sidecars.files[ADAPTER]
        part = partial_peft_config(
            read_json(parse(file.path)), file.path, list(map(dotted, tree.arrays)), dropped
        )
        if part.remarks:
            files[ADAPTER], changes = part.content, changes + Notes(remarks=part.remarks)
    return files, changes


def _new_config(tree: Tree, sidecars: Sidecars, is_model: bool) -> tuple[dict[str, bytes], Notes]:
    """Return the configuration that replaces the existing one, and remarks about it.

    A carried configuration belongs to the original model and stays unchanged: the reverse conversion uses it
    and adjusts it to the arrays that it writes.
    """
    is_new_model = tree.metadata.is_other_model and tree.metadata.config is not None
    if not is_new_model and not (is_model and CONFIG in sidecars.files):
        return {}, Notes()
    config = config_for_weights(_config(tree, sidecars), _weights(tree))
    remarks = [f"{CONFIG}: {change}" for change in config.changes]
    if not tree.metadata.is_other_model and _lacks_described(tree, config.config):
        remarks.append(f"{CONFIG} describes the complete model, including arrays that are left out")
    content = config_bytes(ModelFiles(sidecars=sidecars.files), config)
    return {CONFIG: content}, Notes(remarks=tuple(remarks))


# The embedding table serves as the head of tied models.
_HEAD = "lm_head.weight"


def _lacks_described(tree: Tree, config: Mapping[str, Any]) -> bool:
    """Return whether an omitted array is part of the model that the configuration describes.

    Optimizer state and heads that a trainer added do not count. For an unknown model, every other array may
    count.
    """
    names = [dotted(path) for path in tree]
    dropped = [name.replace("/", ".") for name in tree.metadata.notes.dropped]
    dropped = [name for name in dropped if container(name.partition(".")[0]) is None]
    if config.get("tie_word_embeddings"):
        dropped = [name for name in dropped if not name.endswith(_HEAD)]
    if not dropped:
        return False
    is_row = owned_name_test(config)
    if is_row is None or absent_towers(config, names) or absent_mtp_field(config, names):
        return True
    lost = {next(filter(is_row, _names_within(name)), None) for name in dropped} - {None}
    return bool(lost) and not lost <= {next(filter(is_row, _names_within(name)), None) for name in names}


def _names_within(name: str) -> Iterator[str]:
    """Yield the possible Hub names of an array, without prefixes that trainers add, longest first."""
    keys = name.split(".")
    for at in range(len(keys)):
        end = ".".join(keys[at:])
        yield from filter(None, (end, hub_name(end)))


def _is_model(tree: Tree, sidecars: Sidecars) -> bool:
    """Return whether the arrays have the model's own names, so that its files apply.

    True for a Hugging Face directory and for trees derived from one with the same names. The output of
    hf-to-maxtext is nested and carries a record.
    """
    if has_sidecars(tree):
        return True
    has_names = all(len(path) == 1 for path in tree)
    return has_names and RECORD not in sidecars.files and not sidecars.arrays


def _omitted_sidecar_notes(sidecars: Sidecars, format: str) -> Notes:
    """Return a remark about sidecars that cannot be written."""
    names = ", ".join(sidecars.files)
    remarks = (f"left out, because {format} cannot store files of a model: {names}",) if names else ()
    return Notes(dropped=tuple(f"{SIDECARS}/{CARRIED}/{name}" for name in sidecars.arrays), remarks=remarks)


def _config(tree: Tree, sidecars: Sidecars) -> Mapping[str, Any]:
    """Return the configuration among the sidecars."""
    config = tree.metadata.config
    return read_json(parse(sidecars.files[CONFIG].path)) if config is None else config


def _read_config(sidecars: Sidecars) -> Mapping[str, Any] | None:
    """Return the configuration next to the source."""
    return read_json(parse(sidecars.files[CONFIG].path)) if CONFIG in sidecars.files else None


def _weights(tree: Tree) -> dict[str, LazyArray]:
    """Return the arrays that a configuration describes, by dotted name; raises the errors of `by_name`."""
    known = roles(tree)
    return by_name({path: item for path, item in tree.arrays.items() if known.of(path) == "parameter"})
