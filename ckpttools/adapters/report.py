"""Summarize an adapter: base, ranks and targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ckpttools.adapters.bases import recorded_base
from ckpttools.adapters.config import PeftConfig
from ckpttools.adapters.factor_rows import WEIGHT
from ckpttools.adapters.factors import Adapter
from ckpttools.adapters.from_jax import factor_half, factor_pairs, recorded_settings, tunix_kernels
from ckpttools.adapters.peft import adapter_of, is_peft
from ckpttools.adapters.summary import AdapterReport
from ckpttools.array.tree import Tree
from ckpttools.core.errors import CheckpointError
from ckpttools.formats.adapters import ADAPTER, BASE_NAME, LORA, is_adapter
from ckpttools.formats.json_file import read_json
from ckpttools.maxtext.view import view_of
from ckpttools.stores.registry import parse


def adapter_report(tree: Tree) -> AdapterReport | None:
    """Return the summary of an adapter; None if the tree is not an adapter."""
    location = parse(tree.metadata.location) if tree.metadata.location else None
    if is_maxtext_adapter(tree):
        return _jax_report(tree)
    if location is None or not is_peft(location) or not (tree.metadata.config is None or is_adapter(tree)):
        return None
    try:
        settings = read_json(location.folder() / ADAPTER)
    except CheckpointError as error:
        return AdapterReport("", {}, None, {}, problem=error.raw.line)
    base, alpha = str(settings.get(BASE_NAME) or ""), settings.get("lora_alpha")
    alpha = alpha if isinstance(alpha, int | float) else None
    try:
        return _peft_report(peft_adapter(tree, settings), base, alpha)
    except CheckpointError as error:
        kind = str(settings.get("peft_type") or LORA)
        return AdapterReport(base, {}, alpha, {}, problem=error.raw.line, kind=kind)


def is_maxtext_adapter(tree: Tree) -> bool:
    """Return whether all parameters of a tree are factors, as in the adapters of JAX trainers."""
    parameters = view_of(tree).of_role("parameter")
    return bool(parameters) and all(factor_half(path) is not None for path in parameters)


def names_of_jax(tree: Tree) -> str:
    """Return the naming scheme of a JAX trainer's factors: "Tunix" (its own models) or "MaxText"."""
    return "Tunix" if tunix_kernels(view_of(tree).of_role("parameter")) else "MaxText"


def _jax_report(tree: Tree) -> AdapterReport:
    names = names_of_jax(tree)
    try:
        pairs, settings = factor_pairs(tree), recorded_settings(tree)
    except CheckpointError as error:
        return AdapterReport("", {}, None, {}, problem=error.raw.line, names=names)
    recorded_alpha = settings.get("lora_alpha")
    alpha = recorded_alpha if isinstance(recorded_alpha, int | float) else None
    # The module of a kernel. A name may consist of a single key.
    targets = Counter(name.split(".")[-2:][0] for name in pairs)
    ranks = Counter(pair.rank for pair in pairs.values())
    return AdapterReport(recorded_base(tree), dict(sorted(ranks.items())), alpha, dict(targets), names=names)


def peft_adapter(tree: Tree, settings: Mapping[str, Any] | None = None) -> Adapter:
    """Open an adapter in PEFT's layout; `settings` is its configuration, if read.

    Raises the errors of `open_peft`.
    """
    location = parse(tree.metadata.location)
    config = location.folder() / ADAPTER
    return adapter_of(tree, PeftConfig(read_json(config) if settings is None else settings, str(config)))


def _peft_report(adapter: Adapter, base: str, alpha: float | None) -> AdapterReport:
    ranks = Counter(factor.rank for factor in adapter.factors)
    targets = Counter(_module_name(factor.name) for factor in adapter.factors)
    features = {factor.kind for factor in adapter.factors} - {"linear"}
    special = {"rslora": adapter.config.get("use_rslora"), "dora": adapter.config.get("use_dora")}
    named = [name for name, is_present in special.items() if is_present]
    return AdapterReport(
        base,
        dict(sorted(ranks.items())),
        alpha,
        dict(targets),
        (*named, *sorted(features)),
        len(adapter.replaced),
        skipped=dict(Counter(adapter.skipped.values())),
    )


def _module_name(name: str) -> str:
    """Return the last component of a module's name: `q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return name.removesuffix(WEIGHT).rpartition(".")[2]
