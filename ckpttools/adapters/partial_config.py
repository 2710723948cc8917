"""Write the configuration of a partial adapter: `adapter_config.json`, or MaxText's metadata.

PEFT creates every named module, even without weights: with initial factors, which at best change nothing.
Missing complete arrays that are named are an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttools.adapters.config import PeftConfig, config_file, listed_names
from ckpttools.adapters.from_jax import factor_half, factor_pairs
from ckpttools.adapters.peft import modules_of, saved_names
from ckpttools.adapters.to_maxtext import module_path
from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.core.notes import Notes
from ckpttools.core.text import sample_names
from ckpttools.formats.adapters import ADAPTER
from ckpttools.maxtext.layout import LORA_KEY, MODULE_PATH
from ckpttools.transforms.base import Transformed

_PATTERNS = ("rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class PartialConfig:
    """The configuration of a partial adapter.

    Attributes:
        declared: the configuration; None if the part is not an adapter.
        remarks: what was changed, or why it is none, a sentence each; nothing where it is the whole one's.
    """

    declared: Mapping[str, Any] | None
    remarks: tuple[str, ...] = ()

    @property
    def content(self) -> bytes | None:
        """Return the content of the file; None without one."""
        return None if self.declared is None else config_file(self.declared)


def partial_peft_config(
    declared: Mapping[str, Any], location: str, kept: Sequence[str], gone: Sequence[str]
) -> PartialConfig:
    """Return the configuration of an adapter without some of its arrays.

    Args:
        declared: the whole one's.
        location: where that lies, for messages.
        kept, gone: names of arrays.

    Raises:
        ConfigError: it has no names where they belong, or patterns that cannot be matched.
    """
    try:
        config = PeftConfig(declared, location)
    except FormatError:
        return PartialConfig(
            declared, (f"{ADAPTER} describes the whole adapter, including what is left out",)
        )
    left, lost = modules_of(kept), modules_of(gone)
    whole, whole_lost = (_saved_modules(config, names) for names in (kept, gone))
    if halves := [item for item in (*left, *whole) if item in {*lost, *whole_lost}]:
        return _not_an_adapter(f"it has only parts of {sample_names(halves)}")
    if not left:
        return _not_an_adapter("it has no factors")
    narrowed = {
        # A module that is trained as a whole gets no factors, but would once that is said no more.
        "target_modules": _targets(config, left, {**lost, **whole_lost}),
        "target_parameters": _parameters(config, left, lost),
        "modules_to_save": _narrowed_saved(config.replaced, whole, whole_lost),
        **{field: _remaining_patterns(config, field, left, lost) for field in _PATTERNS},
    }
    changed = {field: value for field, value in narrowed.items() if value is not None}
    if not changed:
        return PartialConfig(declared)
    fields = " and ".join(changed)
    return PartialConfig({**declared, **changed}, (f"{ADAPTER}: only what is left is in {fields}",))


def with_remaining_modules(tree: Tree) -> Transformed:
    """Update the module names in a MaxText adapter's metadata after factors were left out."""
    declared = tree.metadata.custom.get(LORA_KEY)
    is_part = any(factor_half(tuple(name.split("/"))) for name in tree.metadata.notes.dropped)
    if not is_part or not isinstance(declared, Mapping) or MODULE_PATH not in declared:
        return Transformed(tree)
    try:
        left = module_path(factor_pairs(tree))
    except FormatError:
        return Transformed(tree)  # factors without their other half, which `merge` and other commands report
    if left == declared[MODULE_PATH]:
        return Transformed(tree)
    custom = {**tree.metadata.custom, LORA_KEY: {**declared, MODULE_PATH: left}}
    return Transformed(tree.with_metadata(custom=custom), Notes(remarks=(f"{MODULE_PATH} is {left} now",)))


def _not_an_adapter(why: str) -> PartialConfig:
    return PartialConfig(None, (f"{ADAPTER} is left out, as what is left is no adapter: {why}",))


def _suffixes(module: str) -> Iterator[str]:
    """Yield the path of a module and its dotted suffixes."""
    keys = module.split(".")
    return (".".join(keys[at:]) for at in range(len(keys)))


def _saved_modules(config: PeftConfig, names: Sequence[str]) -> dict[str, None]:
    """Return the modules of `modules_to_save` that contain the arrays."""
    entries, result = config.replaced, dict[str, None]()
    for name in saved_names(names):
        keys = name.split(".")
        above = (".".join(keys[:at]) for at in range(1, len(keys)))
        result.update(dict.fromkeys(module for module in above if module.endswith(entries)))
    return result


def _narrowed_saved(
    entries: Sequence[str], left: Mapping[str, None], lost: Mapping[str, None]
) -> list[str] | None:
    """Return the entries of `modules_to_save` for what is left; None if unchanged."""
    touched = tuple(entry for entry in entries if any(module.endswith(entry) for module in lost))
    if not touched:
        return None
    kept = [entry for entry in entries if entry not in touched]
    return kept + [module for module in left if module.endswith(touched)]


def _narrowed(entries: Sequence[str], left: Mapping[str, None], lost: Mapping[str, None]) -> list[str] | None:
    """Replace module suffixes that match removed modules with full paths; None if unchanged.

    None where none is of others.
    """
    touched = {end for module in lost for end in _suffixes(module)}.intersection(entries)
    if not touched:
        return None
    kept = [entry for entry in entries if entry not in touched]
    return kept + [module for module in left if not touched.isdisjoint(_suffixes(module))]


def _targets(config: PeftConfig, left: Mapping[str, None], lost: Mapping[str, None]) -> list[str] | None:
    declared = config.declared.get("target_modules")
    # PEFT applies a complete path regardless of layers_to_transform, so ignored modules must not be listed.
    left = {module: None for module in left if declared is None or config.is_target(module)}
    if isinstance(declared, list | tuple):
        return _narrowed(listed_names(config.declared, "target_modules", config.location), left, lost)

    def is_target(module: str) -> bool:
        return not config.parameters_of(module) if declared is None else config.is_target(module)

    return list(filter(is_target, left)) if any(map(is_target, lost)) else None


def _parameters(config: PeftConfig, left: Mapping[str, None], lost: Mapping[str, None]) -> list[str] | None:
    if not any(map(config.parameters_of, lost)):
        return None
    return [name for module in left if config.parameters_of(module) for name in _factor_names(config, module)]


def _remaining_patterns(
    config: PeftConfig, field: str, left: Mapping[str, None], lost: Mapping[str, None]
) -> dict[str, Any] | None:
    """Return the patterns that apply to what is left; None if unchanged."""
    counting, idle = (
        {config.pattern_of(field, name) for module in item for name in _factor_names(config, module)}
        for item in (left, lost)
    )
    idle -= {*counting, None}
    return {key: value for key, value in config.declared[field].items() if key not in idle} if idle else None


def _factor_names(config: PeftConfig, module: str) -> list[str]:
    """Return the names of a module's parameters with factors, or the module."""
    return [f"{module}.{name}" for name in sorted(config.parameters_of(module))] or [module]
