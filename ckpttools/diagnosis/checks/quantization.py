"""Quantised weights: how, whether their scales are there and fit, and whether `config.json` says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from shlex import quote
from typing import Any

from ckpttools.core.errors import CheckpointError
from ckpttools.core.text import agreeing
from ckpttools.diagnosis.base import ERROR, INFO, WARNING, Check, Finding
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.diagnosis.models import StoredModel, models_in
from ckpttools.diagnosis.scales import native_findings, value_findings
from ckpttools.formats.registry import open_tree
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.quantized.config import FIELD, says_quantized, scheme
from ckpttools.quantized.dequantizable import weights_of
from ckpttools.quantized.schemes.registry import read_methods
from ckpttools.quantized.unsupported_errors import remedy
from ckpttools.quantized.weights import Quantized, quantized
from ckpttools.stores.location import Location

_KEEP = "; `ckpt convert hf-to-maxtext {} DST --quantized keep` keeps it FP8, where blocks fit into kernels"


def _look(inventory: Inventory) -> Iterator[Finding]:
    for model in models_in(inventory):
        result = quantized(dict(model.arrays), model.config)
        declared = says_quantized(model.config) or {}
        read = weights_of(model.arrays, result, model.config)
        told = [*_findings(model.folder, list(result.values()), model.config, is_read=not read.is_whole)]
        wrong = list[Finding]()
        if declared.get("quant_method") in read_methods() and not any(
            item.is_bare for item in result.values()
        ):
            faults = () if read.is_whole else read.faults
            wrong += [_unreadable(model.folder, faults, declared)] if faults else _values(model, inventory)
        # What is to be done with sound weights is no advice for others.
        is_sound = all(item.level != ERROR for item in wrong)
        yield from (item for item in told if is_sound or item.level != INFO)
        yield from wrong
    yield from native_findings(inventory)


def _values(model: StoredModel, inventory: Inventory) -> Iterator[Finding]:
    """What only the scales themselves tell; of a model that cannot be opened another check says why."""
    if model.is_whole:
        with suppress(CheckpointError):
            yield from value_findings(open_tree(model.folder, inventory.read), str(model.folder))


def _findings(
    folder: Location, result: list[Quantized], config: Mapping[str, Any], *, is_read: bool
) -> Iterator[Finding]:
    declared = says_quantized(config)
    scaled = bool(declared) or any(item.scales for item in result)
    bare = [item for item in result if item.is_bare] if scaled else []
    if bare:
        yield _without_scales(folder, bare, len(result))
    if result and not declared:
        yield _unsaid(folder, result)
    elif declared and not result:
        yield _untrue(folder, declared)
    elif declared and not bare:
        yield _whole(folder, result, declared, is_read=is_read)


def _without_scales(folder: Location, bare: list[Quantized], count: int) -> Finding:
    what = f"{len(bare)} of {count} quantised weights have no scale, such as {bare[0].name} ({bare[0].dtype})"
    why = "their numbers mean nothing without them; a program that loads them anyway computes nonsense"
    return Finding(ERROR, str(folder), what, why, "fetch the checkpoint again, with all of its shards")


def _unsaid(folder: Location, result: list[Quantized]) -> Finding:
    scales = sum(bool(item.scales) for item in result)
    what = (
        f"there {agreeing(len(result), 'quantised weight')}, {scales} with scales, such as {result[0]}, "
        f"and {CONFIG} has no {FIELD}"
    )
    why = "transformers and others take the numbers for the weights themselves"
    level = ERROR if scales else WARNING
    return Finding(level, str(folder / CONFIG), what, why, f"fetch {CONFIG} again, which says how")


def _untrue(folder: Location, declared: Mapping[str, Any]) -> Finding:
    what = f"{CONFIG} says {scheme(declared)}, but no weight is quantised"
    why = "transformers and others look for scales that are not there, or quantise the weights themselves"
    do = f"take {FIELD} out of {CONFIG}, if the weights were dequantised; `ckpt convert to-safetensors` does"
    return Finding(WARNING, str(folder / CONFIG), what, why, do)


def _whole(
    folder: Location, result: list[Quantized], declared: Mapping[str, Any], *, is_read: bool
) -> Finding:
    count = f"{len(result)} weight{'s' * (len(result) != 1)}"
    what = f"the weights are quantised: {scheme(declared)}; {count}, each with its scales"
    if is_read and declared.get("quant_method") in read_methods():
        why = "their numbers mean nothing by themselves: conversions to MaxText multiply them by their scales"
        do = f"`ckpt cast {quote(str(folder))} DST --dtype bfloat16` writes a model of plain weights"
        do += _KEEP.format(quote(str(folder))) if _may_stay(result, declared) else ""
        return Finding(INFO, str(folder), what, why, do)
    why = (
        "their numbers mean nothing by themselves: conversions to MaxText refuse weights of this scheme, "
        "and casts leave them and their scales as they are"
    )
    return Finding(INFO, str(folder), what, why, remedy(declared, is_read=False))


def _may_stay(result: list[Quantized], declared: Mapping[str, Any]) -> bool:
    """Whether it is FP8 in blocks, the form that MaxText has as well."""
    is_fp8 = all(item.dtype.name.startswith("float8_") for item in result)
    return is_fp8 and declared.get("quant_method") == "fp8" and bool(declared.get("weight_block_size"))


def _unreadable(folder: Location, faults: Sequence[str], declared: Mapping[str, Any]) -> Finding:
    more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
    what = f"quantised weights are not as {CONFIG} says ({scheme(declared)}): {faults[0]}{more}"
    why = "nothing can be made of their numbers without scales that fit"
    return Finding(ERROR, str(folder), what, why, f"fetch the checkpoint and its {CONFIG} again")


CHECK = Check("quantization", f"quantised weights without sound scales, or not as {CONFIG} says", _look)
