"""Write the configuration of a partial adapter: `adapter_config.json`, or MaxText's metadata.

PEFT creates every named module, even without weights, and its initial factors at best change nothing. PEFT
fails if an array of a fully trained module is missing.
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
from ckpttools.maxtext.versions import LORA_KEY, MODULE_PATH
from ckpttools.transforms.base import Transformed

_PATTERNS = ("rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class PartialConfig:
    """The configuration of a partial adapter.

    Attributes:
        declared: Configuration; None if the part is not an adapter.
        remarks: One sentence for each change, or the reason why the part is not an adapter; () if unchanged.
    """

    declared: Mapping[str, Any] | None
    remarks: tuple[str, ...] = ()

    @property
    def content(self) -> bytes | None:
        """Return the content of the file; None if there is no configuration."""
        return None if self.declared is None else config_file(self.declared)


def partial_peft_config(
    settings: Mapping[str, Any], location: str, kept: Sequence[str], removed: Sequence[str]
) -> PartialConfig:
    """Return the configuration of an adapter without some of its arrays.

    Args:
        settings: The configuration of the complete adapter.
        location: Its location, for messages.
        kept, removed: Names of the arrays that are kept and of those that are left out.

    Raises:
        ConfigError: A field is not a list of names, or a pattern is not supported.
    """
    try:
        config = PeftConfig(settings, location)
    except FormatError:
        return PartialConfig(
            settings, (f"{ADAPTER} describes the complete adapter, including the arrays that are left out",)
        )
    left, lost = modules_of(kept), modules_of(removed)
    saved, whole_lost = (_saved_modules(config, names) for names in (kept, removed))
    if halves := [item for item in (*left, *saved) if item in {*lost, *whole_lost}]:
        return _not_an_adapter(f"it has only parts of {sample_names(halves)}")
    if not left:
        return _not_an_adapter("it has no factors")
    narrowed = {
        # A fully trained module gets no factors, but would get some if it were no longer listed.
        "target_modules": _targets(config, left, {**lost, **whole_lost}),
        "target_parameters": _parameters(config, left, lost),
        "modules_to_save": _narrow_saved_modules(config.replaced, saved, whole_lost),
        **{field: _remaining_patterns(config, field, left, lost) for field in _PATTERNS},
    }
    changed = {field: value for field, value in narrowed.items() if value is not None}
    if not changed:
        return PartialConfig(settings)
    fields = " and ".join(changed)
    return PartialConfig({**settings, **changed}, (f"{ADAPTER}: {fields} name only the remaining modules",))


def with_remaining_modules(tree: Tree) -> Transformed:
    """Update the module names in a MaxText adapter's metadata after factors were left out."""
    settings = tree.metadata.custom.get(LORA_KEY)
    is_part = any(factor_half(tuple(name.split("/"))) for name in tree.metadata.notes.dropped)
    if not is_part or not isinstance(settings, Mapping) or MODULE_PATH not in settings:
        return Transformed(tree)
    try:
        left = module_path(factor_pairs(tree))
    except FormatError:
        return Transformed(tree)  # Single factors, which `merge` and other commands report.
    if left == settings[MODULE_PATH]:
        return Transformed(tree)
    custom = {**tree.metadata.custom, LORA_KEY: {**settings, MODULE_PATH: left}}
    return Transformed(tree.with_metadata(custom=custom), Notes(remarks=(f"{MODULE_PATH} is {left} now",)))


def _not_an_adapter(reason: str) -> PartialConfig:
    return PartialConfig(
        None, (f"{ADAPTER} is left out, because the remaining arrays are not an adapter: {reason}",)
    )


def _suffixes(module: str) -> Iterator[str]:
    """Yield the path of a module and its dotted suffixes."""
    keys = module.split(".")
    return (".".join(keys[at:]) for at in range(len(keys)))


def _saved_modules(config: PeftConfig, names: Sequence[str]) -> dict[str, None]:
    """Return the modules of `modules_to_save` that contain the arrays."""
    entries, modules = config.replaced, dict[str, None]()
    for name in saved_names(names):
        keys = name.split(".")
        above = (".".join(keys[:at]) for at in range(1, len(keys)))
        modules.update(dict.fromkeys(module for module in above if module.endswith(entries)))
    return modules


def _narrow_saved_modules(
    entries: Sequence[str], left: Mapping[str, None], lost: Mapping[str, None]
) -> list[str] | None:
    """Return the entries of `modules_to_save` for the remaining arrays; None if unchanged."""
    touched = tuple(entry for entry in entries if any(module.endswith(entry) for module in lost))
    if not touched:
        return None
    kept = [entry for entry in entries if entry not in touched]
    return kept + [module for module in left if module.endswith(touched)]


def _narrow_modules(
    entries: Sequence[str], left: Mapping[str, None], lost: Mapping[str, None]
) -> list[str] | None:
    """Replace module suffixes that match removed modules with full paths.

    Returns None if no suffix matches a removed module.
    """
    touched = {end for module in lost for end in _suffixes(module)}.intersection(entries)
    if not touched:
        return None
    kept = [entry for entry in entries if entry not in touched]
    return kept + [module for module in left if not touched.isdisjoint(_suffixes(module))]


def _targets(config: PeftConfig, left: Mapping[str, None], lost: Mapping[str, None]) -> list[str] | None:
    targets = config.declared.get("target_modules")
    # PEFT applies a complete path regardless of layers_to_transform, so ignored modules must not be listed.
    left = {module: None for module in left if targets is None or config.is_target(module)}
    if isinstance(targets, list | tuple):
        return _narrow_modules(listed_names(config.declared, "target_modules", config.location), left, lost)

    def is_target(module: str) -> bool:
        return not config.parameters_of(module) if targets is None else config.is_target(module)

    return list(filter(is_target, left)) if any(map(is_target, lost)) else None


def _parameters(config: PeftConfig, left: Mapping[str, None], lost: Mapping[str, None]) -> list[str] | None:
    if not any(map(config.parameters_of, lost)):
        return None
    return [name for module in left if config.parameters_of(module) for name in _factor_names(config, module)]


def _remaining_patterns(
    config: PeftConfig, field: str, left: Mapping[str, None], lost: Mapping[str, None]
) -> dict[str, Any] | None:
    """Return the patterns that apply to the remaining modules; None if unchanged."""
    counting, idle = (
        {config.pattern_of(field, name) for module in item for name in _factor_names(config, module)}
        for item in (left, lost)
    )
    idle -= {*counting, None}
    return {key: value for key, value in config.declared[field].items() if key not in idle} if idle else None


def _factor_names(config: PeftConfig, module: str) -> list[str]:
    """Return the names of a module's parameters with factors, or the module."""
    return [f"{module}.{name}" for name in sorted(config.parameters_of(module))] or [module]
