"""Read and write adapters in PEFT's format: a configuration, and factors named after modules.

base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      (rank, in)
base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      (out, rank)
base_model.model.model.embed_tokens.lora_embedding_A                (rank, vocab)
base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight    of the first of two parameters
base_model.model.lm_head.weight                                     a complete array
base_model.model.lm_head.modules_to_save.weight                     the same array, if embeddings are saved
base_model.model.lm_head.original_module.weight                     the base's own
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpttools.adapters.bases import Base, base_name, other_base_remarks
from ckpttools.adapters.config import ALL_LINEAR, WITH_PEFT, PeftConfig, config_file
from ckpttools.adapters.factor_rows import WEIGHT
from ckpttools.adapters.factors import Adapter, FactorPair, finite, have_equal_bits
from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Leaf, Metadata, Path, Tree, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError, CoverageError, FormatError, listing
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count, fold_lines, sort_naturally
from ckpttools.formats.adapters import ADAPTER, BASE_NAME, PREFIX, WEIGHTS_STEM
from ckpttools.formats.json_file import read_json
from ckpttools.formats.registry import open_tree
from ckpttools.mapping.keys import Key
from ckpttools.stores.location import Location
from ckpttools.transforms.strip_wrappers import strip_wrappers

WEIGHTS = (f"{WEIGHTS_STEM}.safetensors", f"{WEIGHTS_STEM}.bin")
STEP_0 = "0"
"""Directory of an adapter's weights in MaxText, which is a run of one step."""
# In state dicts that were saved without PEFT, these words are followed by the adapter's name.
_PART = re.compile(
    r"^(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight$)(?P<adapter>[^.]+))?(?:\.weight)?$"
)
_BASE_LAYER = ".base_layer"
# PEFT inserts this between the names of a fully trained module and its arrays, and removes it when saving.
_TRAINED = re.compile(r"\.modules_to_save(?:\.default)?(?=\.)")
_ORIGINAL = ".original_module."
_MAX_LISTED = 4
_TABLES = ("embed_tokens", "wte", "wpe", "word_embeddings")
_FUSED = ("gate_up_proj", "down_proj")


def is_peft(location: Location) -> bool:
    """Return whether a location is a directory written by PEFT, or a weights file in one."""
    folder = location.folder()
    if not (folder / ADAPTER).is_file():
        return False
    # MaxText's inference engine expects such a file in the parent directory of its weights.
    return any((folder / name).is_file() for name in WEIGHTS) or not (folder / STEP_0).is_dir()


def weights_file(location: Location) -> Location:
    """Return the weights file of an adapter.

    Raises:
        FormatError: The weights file does not exist.
    """
    if not location.is_dir():
        return location
    weights = next((location / name for name in WEIGHTS if (location / name).is_file()), None)
    if weights is None:
        raise FormatError(
            f"{ADAPTER} exists, but a weights file does not",
            location=location,
            expected=" or ".join(WEIGHTS),
            hint="copy the complete directory of the adapter",
        )
    return weights


def open_peft(location: Location) -> Adapter:
    """Open an adapter at a location for which `is_peft` is true.

    Raises:
        FormatError: The kind is not supported, or a factor has no counterpart.
        ConfigError: The configuration contradicts the factors.
        CheckpointError: The adapter cannot be read.
    """
    file = weights_file(location)
    config = location.folder() / ADAPTER
    return adapter_of(open_tree(file), PeftConfig(read_json(config), str(config)))


def adapter_of(tree: Tree, config: PeftConfig) -> Adapter:
    """Return the adapter with these arrays. Raises the errors of `open_peft`."""
    location = tree.metadata.location
    plain = strip_wrappers(tree).tree
    _require_targets(config, plain)
    skipped = _find_ignored_arrays(config, plain)
    kept = {path: leaf for path, leaf in plain.leaves.items() if dotted(path) not in skipped}
    parts, replaced = _group_arrays(Tree(kept, plain.metadata))
    if not parts and any(_PART.match(name.removeprefix(PREFIX)) for name in skipped):
        raise ConfigError(
            "the configuration applies none of the stored factors, so PEFT ignores or refuses all of them:"
            + listing([f"{name} ({field})" for name, field in skipped.items()]),
            location=location,
            expected=f"factors of modules that {config.location} names",
            hint=f"correct {', '.join(dict.fromkeys(skipped.values()))} in {ADAPTER}, or copy the file that "
            "was saved with these weights",
        )
    _require_magnitudes(config, map(dotted, kept), parts, location)
    _check_complete(config, parts, replaced, location)
    reader = _FactorReader(config, parts, location)
    factors = [factor for module in parts for factor in reader.factors(module)]
    return Adapter(location, tuple(factors), replaced, config.declared, skipped)


def _require_magnitudes(
    config: PeftConfig, names: Iterable[str], parts: Mapping[str, Mapping[str, LazyArray]], location: str
) -> None:
    """Raise ConfigError if DoRA replaces a base weight without a stored magnitude.

    PEFT computes a missing magnitude from the weight that the adapter replaces, before it replaces it.
    """
    replaced = [name.removeprefix(PREFIX) for name in names if name.endswith(f"{_BASE_LAYER}.weight")]
    if not replaced or not config.is_dora:
        return
    modules = [name.removesuffix(f"{_BASE_LAYER}.weight") for name in replaced]
    if missing := [module for module in modules if module not in parts]:
        raise ConfigError(
            "use_dora is set, and these modules have a base weight without a magnitude:" + listing(missing),
            location=location,
            expected="lora_magnitude_vector of each module, as PEFT saves it",
            hint="save the adapter again with PEFT",
        )


def _require_targets(config: PeftConfig, tree: Tree) -> None:
    """Raise ConfigError if no field names the adapted modules, or a pattern matches parent modules.

    Without names, PEFT has defaults for a few model types.
    """
    modules = modules_of(map(dotted, tree.arrays))
    if modules and not config.has_targets:
        names = sorted({module.rpartition(".")[2] for module in modules})
        raise ConfigError(
            "the configuration does not name the adapted modules",
            location=config.location,
            got="target_modules null",
            expected="target_modules: without it, PEFT chooses modules by model type",
            hint=f'add "target_modules": {json.dumps(names)} to {ADAPTER}',
        )
    targets = config.declared.get("target_modules")
    if not isinstance(targets, str) or targets.lower() == ALL_LINEAR:
        return
    parents = dict.fromkeys(parent for module in modules for parent in _prefixes(module)[:-1])
    if untargeted := [module for module in parents if module not in modules and config.is_target(module)]:
        raise ConfigError(
            "the pattern in target_modules matches parent modules, which PEFT refuses:" + listing(untargeted),
            location=config.location,
            expected="a pattern that matches only linear layers",
            hint=f"correct target_modules in {ADAPTER}",
        )


def _prefixes(module: str) -> list[str]:
    """Return the path of a module and of each of its parents, outermost first."""
    keys = module.split(".")
    return [".".join(keys[:stop]) for stop in range(1, len(keys) + 1)]


def _find_ignored_arrays(config: PeftConfig, tree: Tree) -> dict[str, str]:
    """Find the arrays that PEFT ignores when it loads an adapter.

    PEFT creates the modules named in the configuration, then loads the arrays whose names match its
    parameters (`set_peft_model_state_dict`). It ignores other arrays without an error.

    Returns:
        The config field that makes PEFT ignore each array, by array name.
    """
    skipped: dict[str, str] = {}
    reasons: dict[str, str | None] = {}
    for path, array in tree.arrays.items():
        name = dotted(path).removeprefix(PREFIX)
        if part := _PART.match(name):
            module, is_table = part["module"].replace(_BASE_LAYER, ""), "embedding" in part["part"]
        else:
            module = _saved_module_name(name).rpartition(".")[0]
            # PEFT checks the module's class. Among modules with matrices, only embeddings are not linear.
            is_table = array.ndim != 2 or module.rpartition(".")[2] in _TABLES
        if module not in reasons:
            is_parameter = bool(config.parameters_of(module))
            reasons[module] = None if is_parameter else config.skip_reason(module, is_embedding=is_table)
        reason = reasons[module] if part else _full_skip_reason(config, name, module, reasons[module])
        if reason is not None:
            skipped[dotted(path)] = reason
    return skipped


def _full_skip_reason(config: PeftConfig, name: str, module: str, factor_reason: str | None) -> str | None:
    """Return the config field that makes PEFT ignore a full array of a module; None if PEFT loads it.

    Args:
        config: The adapter's configuration.
        name: The array's name.
        module: Its module.
        factor_reason: The field that makes PEFT add no factors to the module. In a module with factors, PEFT
            names the weight `base_layer.weight`.
    """
    is_replaced = any(parent.endswith(config.replaced) for parent in _prefixes(module))
    if _ORIGINAL in name or is_replaced:
        return None
    if _TRAINED.search(name):
        return "modules_to_save"
    return None if (factor_reason is None) == (_BASE_LAYER in name) else "target_modules"


def skip_remarks(adapter: Adapter) -> Iterator[str]:
    """Describe the stored arrays that PEFT ignores, in one sentence for each config field."""
    for field in dict.fromkeys(adapter.skipped.values()):
        names = [name for name, reason in adapter.skipped.items() if reason == field]
        modules = fold_lines([*modules_of(names), *saved_names(names)])
        names_text = ", ".join(modules[:_MAX_LISTED]) + (", …" if len(modules) > _MAX_LISTED else "")
        yield (
            f"{field} in {ADAPTER} leaves out {array_count(names)} of the adapter, which PEFT ignores: "
            f"skipped here as well ({names_text})"
        )


def modules_of(names: Iterable[str]) -> dict[str, None]:
    """Return the modules with factors among the arrays, in order."""
    matches = (_PART.match(name.removeprefix(PREFIX)) for name in names)
    return {part["module"].replace(_BASE_LAYER, ""): None for part in matches if part}


def saved_names(names: Iterable[str]) -> list[str]:
    """Return the model's names of arrays that are not factors."""
    own = (name.removeprefix(PREFIX) for name in names if _ORIGINAL not in name)
    return [_saved_module_name(name) for name in own if not _PART.match(name)]


def _saved_module_name(name: str) -> str:
    """Return the model's name for a fully saved array."""
    return _TRAINED.sub("", name.replace(_BASE_LAYER, ""))


def _group_arrays(tree: Tree) -> tuple[dict[str, dict[str, LazyArray]], dict[str, LazyArray]]:
    """Group factors by module and kind, and complete arrays by name.

    Raises:
        CoverageError: The tree has arrays that are not parts of an adapter.
        FormatError: The arrays belong to several adapters, or an array exists twice with different values.
    """
    parts: dict[str, dict[str, LazyArray]] = {}
    replaced: dict[str, LazyArray] = {}
    repeated_arrays: dict[str, LazyArray] = {}
    unknown: list[str] = []
    duplicates: list[str] = []
    adapters: dict[str | None, str] = {}
    for path, array in tree.arrays.items():
        name = dotted(path).removeprefix(PREFIX)
        match = _PART.match(name)
        if match:
            into, key = parts.setdefault(match["module"], {}), match["part"]
            adapters.setdefault(match["adapter"], dotted(path))
        elif _ORIGINAL in name:
            continue
        elif name.endswith((".weight", ".bias")) and "lora_" not in name:
            into = repeated_arrays if _TRAINED.search(name) else replaced
            key = _saved_module_name(name)
        else:
            unknown.append(dotted(path))
            continue
        if key in into:
            duplicates.append(dotted(path))
        into[key] = array
    if len(adapters) > 1:
        duplicates += [adapter for adapter in adapters.values() if adapter not in duplicates]
    stored_twice = [key for key in repeated_arrays if key in replaced]
    duplicates += [
        f"{key}, with different values"
        for key in stored_twice
        if not have_equal_bits(repeated_arrays[key], replaced[key])
    ]
    _refuse_unreadable(unknown, duplicates, tree.metadata.location)
    return parts, {**repeated_arrays, **replaced}


def _refuse_unreadable(unknown: Sequence[str], duplicates: Sequence[str], location: str) -> None:
    """Raise the errors of `_group_arrays` for unknown or duplicate names."""
    if unknown:
        raise CoverageError(
            "these arrays are not parts of a supported adapter:" + listing(unknown),
            location=location,
            expected="lora_A, lora_B, lora_embedding_A, lora_embedding_B, lora_magnitude_vector or weights",
            hint=WITH_PEFT,
        )
    if duplicates:
        raise FormatError(
            "these arrays belong to several adapters, or exist more than once:" + listing(duplicates),
            location=location,
            hint="save each adapter in a directory of its own",
        )


def _check_complete(
    config: PeftConfig,
    parts: Mapping[str, Mapping[str, LazyArray]],
    replaced: Mapping[str, LazyArray],
    location: str,
) -> None:
    """Raise ConfigError if the configuration does not match the stored arrays."""
    lengths = {module for module, words in parts.items() if "lora_magnitude_vector" in words}
    incomplete = [
        f"{module}: no lora_magnitude_vector" for module in parts if config.is_dora and module not in lengths
    ]
    incomplete += [f"{module}: a lora_magnitude_vector" for module in lengths if not config.is_dora]
    # PEFT matches all module names with this ending, even in the middle of a word.
    if config.replaced and not any(f"{module}." in name for module in config.replaced for name in replaced):
        incomplete.append(f"no arrays for modules_to_save, {', '.join(config.replaced)}")
    if not parts and not replaced:
        incomplete.append("no arrays at all")
    if incomplete:
        raise ConfigError(
            "the configuration contradicts the stored arrays:" + listing(incomplete),
            location=location,
            expected=f"the arrays that {config.location} declares",
            hint="save it again, with all parameters gathered from the devices",
        )


@dataclass(frozen=True)
class _FactorReader:
    """A reader that builds factors from their parts.

    Attributes:
        config: The adapter's configuration.
        parts: Array by kind of factor, for each module.
        location: The location, for messages.
    """

    config: PeftConfig
    parts: Mapping[str, Mapping[str, LazyArray]]
    location: str

    def factors(self, module: str) -> Iterator[FactorPair]:
        """Yield the factors of a module. Raise the errors of `open_peft`."""
        parts, name = self.parts[module], self._weight(module)
        embedding = "lora_embedding_A" in parts or "lora_embedding_B" in parts
        words = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
        missing = [word for word in words if word not in parts]
        if missing or any(parts[word].ndim != 2 for word in words):
            got = ", ".join(f"{word} {list(array.shape)}" for word, array in parts.items())
            raise FormatError(
                "a factor is missing or is not a matrix",
                location=f"{self.location}, {module}",
                got=got,
                expected=f"{words[0]} (rank, in) and {words[1]} (out, rank)",
                hint="save it again, with all parameters gathered from the devices",
            )
        a, b = (parts[word] for word in words)
        yield self._factor(module, name, a, b, embedding)

    def _factor(self, module: str, name: str, a: LazyArray, b: LazyArray, embedding: bool) -> FactorPair:
        plain = module.replace(_BASE_LAYER, "")
        is_linear = name == f"{plain}.weight"
        key = plain if is_linear and not self.config.parameters_of(plain) else name
        rank, scale = self.config.rank(key), self.config.scale(key)
        if a.shape[0] != b.shape[1] or (a.shape[0] != rank if is_linear else a.shape[0] % rank):
            raise ConfigError(
                "the configured rank is not the rank of the factors",
                location=f"{self.location}, {module}",
                got=f"A {list(a.shape)} and B {list(b.shape)}",
                expected=f"rank {rank} ({self.config.location})",
                hint="check that the configuration belongs to these weights",
            )
        if not is_linear:
            return FactorPair(name, a, b, scale, rank, "experts", None)
        magnitude = self.parts[module].get("lora_magnitude_vector")
        if embedding:
            return FactorPair(name, a, b, scale, rank, "embedding", False, magnitude)
        return FactorPair(name, a, b, scale, rank, "linear", self.config.has_inputs_first, magnitude)

    def _weight(self, module: str) -> str:
        """Return the weight or parameter that a module's factors change.

        If a module has several adapted parameters, the first one is the innermost, as PEFT wraps them.
        """
        plain = module.replace(_BASE_LAYER, "")
        names = self.config.parameters_of(plain)
        known = [item for item in _FUSED if item in names]
        if not names:
            return f"{plain}.weight"
        depth = len(known) - 1 - module.count(_BASE_LAYER)
        if (names - {*known} and len(names) > 1) or (known and depth < 0):
            raise FormatError(
                "the adapted parameters of this module are ambiguous",
                location=f"{self.location}, {module}",
                got=", ".join(sorted(names)),
                expected=f"one parameter, or {' and '.join(_FUSED)}",
            )
        return f"{plain}.{known[depth] if known else next(iter(names))}"


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
