"""Write adapters as files for PEFT, vLLM and other tools."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ckpttools.adapters.bases import Base, base_name, other_base_remarks
from ckpttools.adapters.config import config_file
from ckpttools.adapters.factor_rows import WEIGHT
from ckpttools.adapters.factors import Adapter, FactorPair, finite
from ckpttools.array.tree import Leaf, Metadata, Path, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.notes import Notes
from ckpttools.core.text import sort_naturally
from ckpttools.formats.adapters import BASE_NAME, PREFIX
from ckpttools.mapping.keys import Key

# Module names in transformers that differ from those in Hub files.
_TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class PeftFiles:
    """The files that PEFT saves.

    Attributes:
        tree: The factors under PEFT's names.
        config: The content of `adapter_config.json`.
        notes: Notes for the user.
    """

    tree: Tree
    config: bytes
    notes: Notes


def to_peft(base: Base, adapter: Adapter, name: str | None = None, scale: float = 1.0) -> PeftFiles:
    """Return the PEFT files of an adapter.

    Args:
        base: The adapted model.
        adapter: The adapter in the base's names.
        name: The base's name in the configuration; None to use `base_name`.
        scale: A factor for the adapter, in addition to its own scale.

    Raises:
        UsageError: The scale is NaN or infinite.
    """
    names = {factor.name: _module(base, factor.name) for factor in adapter.factors}
    leaves: dict[Path, Leaf] = {}
    for factor in adapter.factors:
        module = f"{PREFIX}{names[factor.name]}"
        leaves[f"{module}.lora_A.weight",] = factor.a
        leaves[f"{module}.lora_B.weight",] = factor.b
    ordered = sort_naturally([str(path[0]) for path in leaves])
    tree = Tree({(name,): leaves[name,] for name in ordered}, Metadata(location=adapter.location))
    modules = [_module(base, name) for name in base.weights if name.endswith(WEIGHT)]
    called = base_name(base, adapter, name)
    settings = _config(adapter.factors, names, modules, scale) | {BASE_NAME: called.text}
    another = Notes(remarks=tuple(other_base_remarks(base, adapter, "converted as one of")))
    return PeftFiles(tree, config_file(settings), called.notes + another)


def _module(base: Base, name: str) -> str:
    """Return the transformers path of the module that a weight belongs to."""
    if base.family is not None:
        own = base.family.spelling_of(base.weights)
        theirs = next((spelling for spelling in base.family.spellings if spelling.name == _TRANSFORMERS), own)
        # Models without towers have the same module names in transformers as in their files.
        name = name if own.model_types else str(theirs.key(Key((own.plain(name),))))
    return name.removesuffix(WEIGHT)


def _config(
    factors: Sequence[FactorPair], names: Mapping[str, str], all_modules: Iterable[str], scale: float
) -> dict[str, object]:
    (rank, _), *_ = Counter(factor.rank for factor in factors).most_common(1)
    alphas = {factor.name: finite("scale", scale, factor.scale * factor.rank * scale) for factor in factors}
    (alpha, _), *_ = Counter(alphas.values()).most_common(1)
    modules = list(names.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": _as_integer(alpha),
        "target_modules": _targets(modules, all_modules),
        "rank_pattern": {_pattern(names[item.name]): item.rank for item in factors if item.rank != rank},
        "alpha_pattern": {
            _pattern(names[name]): _as_integer(own) for name, own in alphas.items() if own != alpha
        },
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _targets(modules: Sequence[str], all_modules: Iterable[str]) -> list[str]:
    """Return module names if all modules with a name are adapted, otherwise full paths."""
    adapted = set(modules)
    partly = {_last_name(other) for other in all_modules if other not in adapted}
    return sorted({_last_name(module) if _last_name(module) not in partly else module for module in modules})


def _last_name(module: str) -> str:
    return module.rpartition(".")[2]


def _pattern(module: str) -> str:
    return re.escape(module)


def _as_integer(number: float) -> float | int:
    return int(number) if number == int(number) else number
