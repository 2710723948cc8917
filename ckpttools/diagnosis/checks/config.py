"""Report weights without the configuration of their model."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import action
from ckpttools.diagnosis.base import INFO, WARNING, Check, Finding, finding_of, on_disk
from ckpttools.diagnosis.inventory import Inventory, json_or_error
from ckpttools.formats.adapters import ADAPTER, adapter_in, is_lora, merge_command, merging
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.stores.location import Location


def _look(inventory: Inventory) -> Iterator[Finding]:
    listed = {directory.path: directory.files for directory in inventory.directories}
    for weights in inventory.weights:
        if not weights.is_whole or weights.folder not in listed:
            continue
        location = weights.folder / CONFIG
        if CONFIG not in listed[weights.folder]:
            if ADAPTER in listed[weights.folder]:
                yield _adapter(weights.folder)
                yield from _adapter_faults(weights.folder)
            else:
                yield _without(weights.folder)
            continue
        result = json_or_error(location)
        if isinstance(result, CheckpointError):
            yield finding_of(result, location, why="sizes and family of the model are in it")


def _without(folder: Location) -> Finding:
    why = "conversions to and from MaxText, and transformers, take the family and sizes of the model from it"
    command = f"hf download REPO {CONFIG} --local-dir {on_disk(folder)}"
    do = f"fetch it: {command}; other commands do not need it"
    return Finding(WARNING, str(folder), f"no {CONFIG} next to the weights", why, do, command=command)


def _adapter(folder: Location) -> Finding:
    what = f"{ADAPTER} but no {CONFIG}: {adapter_in(folder)}, not a complete model"
    why = f"{action('hf_to_maxtext')} and {action('maxtext_to_hf')} take complete models, not adapters"
    return Finding(INFO, str(folder), what, why, merging(folder), command=merge_command(folder))


def _adapter_faults(folder: Location) -> Iterator[Finding]:
    """Report why an adapter cannot be read, or which of its arrays PEFT ignores."""
    from ckpttools.adapters.peft import open_peft, skip_remarks

    if not is_lora(folder):
        return
    why = "PEFT adds factors to the modules that the configuration names, not to those in the weights file"
    try:
        adapter = open_peft(folder)
    except CheckpointError as error:
        yield finding_of(error, folder / ADAPTER, why=why)
        return
    for text in skip_remarks(adapter):
        do = f"correct {ADAPTER}, or copy the file that was saved with these weights"
        yield Finding(WARNING, str(folder / ADAPTER), text, why, do)


CHECK = Check("config", f"{CONFIG} missing next to safetensors, or unreadable", _look)
