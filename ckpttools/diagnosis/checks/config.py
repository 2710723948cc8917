"""Report weights without the configuration of their model."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import action
from ckpttools.diagnosis.base import INFO, WARNING, Check, Finding, finding_of, quote_local_path
from ckpttools.diagnosis.inventory import Inventory, json_or_error
from ckpttools.formats.adapters import ADAPTER, adapter_in, is_lora, merge_command, merge_hint
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.stores.location import Location


def _examine(inventory: Inventory) -> Iterator[Finding]:
    files = {directory.path: directory.files for directory in inventory.directories}
    for weights in inventory.weights:
        if not weights.is_whole or weights.folder not in files:
            continue
        location = weights.folder / CONFIG
        if CONFIG not in files[weights.folder]:
            if ADAPTER in files[weights.folder]:
                yield _adapter(weights.folder)
                yield from _adapter_faults(weights.folder)
            else:
                yield _missing_config_finding(weights.folder)
            continue
        result = json_or_error(location)
        if isinstance(result, CheckpointError):
            yield finding_of(result, location, reason="sizes and family of the model are in it")


def _missing_config_finding(folder: Location) -> Finding:
    reason = (
        "conversions to and from MaxText, and transformers, take the family and sizes of the model from it"
    )
    command = f"hf download REPO {CONFIG} --local-dir {quote_local_path(folder)}"
    do = f"fetch it: {command}; other commands do not need it"
    return Finding(WARNING, str(folder), f"no {CONFIG} next to the weights", reason, do, command=command)


def _adapter(folder: Location) -> Finding:
    problem = f"{ADAPTER} but no {CONFIG}: {adapter_in(folder)}, not a complete model"
    reason = f"{action('hf_to_maxtext')} and {action('maxtext_to_hf')} take complete models, not adapters"
    return Finding(INFO, str(folder), problem, reason, merge_hint(folder), command=merge_command(folder))


def _adapter_faults(folder: Location) -> Iterator[Finding]:
    """Report why an adapter cannot be read, or which of its arrays PEFT ignores."""
    from ckpttools.adapters.peft import open_peft, skip_remarks

    if not is_lora(folder):
        return
    reason = "PEFT adds factors to the modules that the configuration names, not to those in the weights file"
    try:
        adapter = open_peft(folder)
    except CheckpointError as error:
        yield finding_of(error, folder / ADAPTER, reason=reason)
        return
    for text in skip_remarks(adapter):
        do = f"correct {ADAPTER}, or copy the file that was saved with these weights"
        yield Finding(WARNING, str(folder / ADAPTER), text, reason, do)


CHECK = Check("config", f"{CONFIG} missing next to safetensors, or unreadable", _examine)
