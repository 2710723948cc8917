"""Quantised weights: how, whether their scales are there and fit, and whether `config.json` says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from shlex import quote
from typing import Any

from ckpttools.core.errors import CheckpointError
from ckpttools.core.text import agreeing
from ckpttools.doctor.base import ERROR, INFO, WARNING, Check, Finding
from ckpttools.doctor.inventory import Inventory
from ckpttools.doctor.models import StoredModel, models_in
from ckpttools.doctor.scales import native_findings, value_findings
from ckpttools.formats.registry import open_tree
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.quantized.config import FIELD, says_quantized, scheme
from ckpttools.quantized.readable import weights_of
from ckpttools.quantized.refusals import remedy
from ckpttools.quantized.schemes.registry import read_methods
from ckpttools.quantized.weights import Quantized, quantized
from ckpttools.stores.place import Place

_KEEP = "; `ckpt convert hf-to-maxtext {} DST --quantized keep` keeps it FP8, where blocks fit into kernels"


def _look(inventory: Inventory) -> Iterator[Finding]:
    for model in models_in(inventory):
        found = quantized(dict(model.arrays), model.config)
        said = says_quantized(model.config) or {}
        read = weights_of(model.arrays, found, model.config)
        told = [*_findings(model.folder, list(found.values()), model.config, is_read=not read.is_whole)]
        wrong = list[Finding]()
        if said.get("quant_method") in read_methods() and not any(each.is_bare for each in found.values()):
            faults = () if read.is_whole else read.faults
            wrong += [_unreadable(model.folder, faults, said)] if faults else _values(model, inventory)
        # What is to be done with sound weights is no advice for others.
        is_sound = all(each.level != ERROR for each in wrong)
        yield from (each for each in told if is_sound or each.level != INFO)
        yield from wrong
    yield from native_findings(inventory)


def _values(model: StoredModel, inventory: Inventory) -> Iterator[Finding]:
    """What only the scales themselves tell; of a model that cannot be opened another check says why."""
    if model.is_whole:
        with suppress(CheckpointError):
            yield from value_findings(open_tree(model.folder, inventory.read), str(model.folder))


def _findings(
    folder: Place, found: list[Quantized], config: Mapping[str, Any], *, is_read: bool
) -> Iterator[Finding]:
    said = says_quantized(config)
    scaled = bool(said) or any(each.scales for each in found)
    bare = [each for each in found if each.is_bare] if scaled else []
    if bare:
        yield _without_scales(folder, bare, len(found))
    if found and not said:
        yield _unsaid(folder, found)
    elif said and not found:
        yield _untrue(folder, said)
    elif said and not bare:
        yield _whole(folder, found, said, is_read=is_read)


def _without_scales(folder: Place, bare: list[Quantized], count: int) -> Finding:
    what = f"{len(bare)} of {count} quantised weights have no scale, such as {bare[0].name} ({bare[0].dtype})"
    why = "their numbers mean nothing without them; a program that loads them anyway computes nonsense"
    return Finding(ERROR, str(folder), what, why, "fetch the checkpoint again, with all of its shards")


def _unsaid(folder: Place, found: list[Quantized]) -> Finding:
    scales = sum(bool(each.scales) for each in found)
    what = (
        f"there {agreeing(len(found), 'quantised weight')}, {scales} with scales, such as {found[0]}, "
        f"and {CONFIG} has no {FIELD}"
    )
    why = "transformers and others take the numbers for the weights themselves"
    level = ERROR if scales else WARNING
    return Finding(level, str(folder / CONFIG), what, why, f"fetch {CONFIG} again, which says how")


def _untrue(folder: Place, said: Mapping[str, Any]) -> Finding:
    what = f"{CONFIG} says {scheme(said)}, but no weight is quantised"
    why = "transformers and others look for scales that are not there, or quantise the weights themselves"
    do = f"take {FIELD} out of {CONFIG}, if the weights were dequantised; `ckpt convert to-safetensors` does"
    return Finding(WARNING, str(folder / CONFIG), what, why, do)


def _whole(folder: Place, found: list[Quantized], said: Mapping[str, Any], *, is_read: bool) -> Finding:
    count = f"{len(found)} weight{'s' * (len(found) != 1)}"
    what = f"the weights are quantised: {scheme(said)}; {count}, each with its scales"
    if is_read and said.get("quant_method") in read_methods():
        why = "their numbers mean nothing by themselves: conversions to MaxText multiply them by their scales"
        do = f"`ckpt cast {quote(str(folder))} DST --dtype bfloat16` writes a model of plain weights"
        do += _KEEP.format(quote(str(folder))) if _may_stay(found, said) else ""
        return Finding(INFO, str(folder), what, why, do)
    why = (
        "their numbers mean nothing by themselves: conversions to MaxText refuse weights of this scheme, "
        "and casts leave them and their scales as they are"
    )
    return Finding(INFO, str(folder), what, why, remedy(said, is_read=False))


def _may_stay(found: list[Quantized], said: Mapping[str, Any]) -> bool:
    """Whether it is FP8 in blocks, the form that MaxText has as well."""
    is_fp8 = all(each.dtype.name.startswith("float8_") for each in found)
    return is_fp8 and said.get("quant_method") == "fp8" and bool(said.get("weight_block_size"))


def _unreadable(folder: Place, faults: Sequence[str], said: Mapping[str, Any]) -> Finding:
    more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
    what = f"quantised weights are not as {CONFIG} says ({scheme(said)}): {faults[0]}{more}"
    why = "nothing can be made of their numbers without scales that fit"
    return Finding(ERROR, str(folder), what, why, f"fetch the checkpoint and its {CONFIG} again")


CHECK = Check("quantization", f"quantised weights without sound scales, or not as {CONFIG} says", _look)
