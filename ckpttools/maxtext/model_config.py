"""Adjust the `config.json` of a model to match the weights that are written with it.

Adjustments cover the dtype (at the top level and in each part such as `text_config`), quantization, and
whether the output head is a separate array.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import source_arrays
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import ConfigError, CoverageError
from ckpttools.core.message_terms import option, repeated_option
from ckpttools.core.text import array_count
from ckpttools.formats.sidecar_files import WEIGHTS_FIELD
from ckpttools.mapping.sizes import nested_value, states_field
from ckpttools.model_families.family import Family, FlagRule, Spelling, UnsupportedPart
from ckpttools.model_families.hf_defaults import contradicted_defaults
from ckpttools.quantized.config import FIELD, declared_quantization, scheme, without_quantization
from ckpttools.quantized.scales import is_plain
from ckpttools.quantized.unsupported_errors import signs_of_scheme
from ckpttools.quantized.weights import find_weights

PREDICTION_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields with the number of multi-token-prediction (MTP) layers, which follow the last layer."""
# transformers writes `dtype` since version 5, and `torch_dtype` before.
_DTYPES = ("dtype", "torch_dtype")
_ROWS = "vocab_size"
_TEXT, _PART = "text_config", "_config"
# Lists for which transformers requires one entry per layer.
STRICT_LISTS = ("layer_types", "mlp_layer_types")
# Words in the array names of a tower.
_TOWERS = {"vision_config": ("vision", "visual"), "audio_config": ("audio",)}
# Parts that have a text model of their own.
_TEXT_MODEL_PARENTS = ("thinker_config",)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Top-level fields of a multimodal configuration that belong to the text model.
_SHARED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    *_DTYPES,
    "transformers_version",
)


@dataclass(frozen=True)
class WeightsConfig:
    """A configuration that matches the weights next to it.

    Attributes:
        config: The parsed `config.json`.
        changes: The changes, one sentence each; empty for the original configuration.
    """

    config: Mapping[str, Any]
    changes: tuple[str, ...]

    def to_json(self) -> bytes:
        """Return the content of `config.json`."""
        return json.dumps(self.config, indent=2, ensure_ascii=False).encode() + b"\n"

    def requantized(
        self, config: Mapping[str, Any], arrays: Mapping[str, LazyArray], original: Mapping[str, Any]
    ) -> WeightsConfig:
        """Return the configuration for weights that have been quantized again.

        Args:
            config: The configuration with its quantization fields.
            arrays: The arrays that are written with the configuration, by name.
            original: The model's own configuration, which may state other dtypes.
        """
        result = config_for_weights(_with_original_dtypes(config, original), arrays)
        others = (
            change for change in self.changes if not change.startswith(FIELD) and not _is_dtype_change(change)
        )
        return WeightsConfig(
            result.config, (*others, *result.changes, "it describes the quantization of the weights")
        )


def config_for_weights(
    config: Mapping[str, Any],
    arrays: Mapping[str, LazyArray],
    tied: bool | None = None,
    *,
    tied_by: FlagRule | None = None,
    vocab: int | None = None,
) -> WeightsConfig:
    """Return a configuration that is adjusted to match these arrays.

    Args:
        config: The parsed `config.json` of the model.
        arrays: The arrays that are written with the configuration, by name.
        tied: Whether the model has no separate output head; None keeps the stated value.
        tied_by: The rule with the fields that state whether the head is separate.
        vocab: The number of vocabulary rows; None keeps the stated value.
    """
    result = json.loads(json.dumps(config))
    changes = list(_with_dtypes(result, "", _plain_arrays(arrays, config)))
    if tied is not None and tied_by is not None:
        changes += _with_tied(result, tied, tied_by)
    if vocab is not None:
        changes += _with_vocab(result, vocab)
    changes += _with_layer_lists(result)
    if WEIGHTS_FIELD in result:
        name = result.pop(WEIGHTS_FIELD)
        changes.append(f"{WEIGHTS_FIELD} is left out, because it names a file of the source: {name}")
    settings = declared_quantization(result)
    if settings and _has_plain_arrays(arrays, config):
        result = without_quantization(result)
        changes.append(f"{FIELD} is left out, because no weight is quantized; it was {scheme(settings)}")
    return WeightsConfig(result, tuple(changes))


def _has_plain_arrays(arrays: Mapping[str, LazyArray], config: Mapping[str, Any]) -> bool:
    """Return whether no quantized weights remain, in known or unknown schemes."""
    return not (find_weights(arrays, config) or signs_of_scheme(arrays, config))


def _plain_arrays(arrays: Mapping[str, LazyArray], config: Mapping[str, Any]) -> dict[str, LazyArray]:
    """Return the float arrays that are neither quantized nor scales."""
    result = find_weights(arrays, config)
    if not declared_quantization(config) and not any(item.scales for item in result.values()):
        result = {}
    others = {*result, *(side for item in result.values() for side in item.sides)}
    return {name: array for name, array in arrays.items() if array.dtype.is_float and name not in others}


def _with_dtypes(config: dict[str, Any], where: str, arrays: Mapping[str, LazyArray]) -> Iterator[str]:
    """Set the dtype wherever a configuration states one, and yield the changes."""
    main = _main_dtype(arrays)
    if main is not None and not _has_known_scales(main, arrays):
        main = None
    for name in _DTYPES:
        declared = config.get(name)
        if main is not None and isinstance(declared, str) and declared.removeprefix("torch.") != main.name:
            config[name] = main.name
            yield f"{where}{name} is {main}, like the weights; it was {declared}"
    for name, part in config.items():
        if name.endswith(_PART) and isinstance(part, dict) and name != FIELD:
            yield from _with_dtypes(part, f"{where}{name}.", _part_arrays(name, arrays))


def _is_dtype_change(change: str) -> bool:
    """Return whether a sentence comes from `_with_dtypes`."""
    return change.partition(" ")[0].rpartition(".")[2] in _DTYPES


def _with_original_dtypes(config: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the dtypes that the original configuration states."""
    parts = {
        name: _with_original_dtypes(part, original[name])
        for name, part in config.items()
        if name.endswith(_PART) and isinstance(part, dict) and isinstance(original.get(name), dict)
    }
    dtypes = {name: original[name] for name in _DTYPES if name in config and name in original}
    return {**config, **parts, **dtypes}


def _has_known_scales(main: DType, arrays: Mapping[str, LazyArray]) -> bool:
    """Return whether the array values are the weights themselves.

    Stored float8 arrays may have lost their scales, and a configuration that states float8 does not declare
    scales.
    """
    return is_plain(main) or not any(_is_stored(array) for array in arrays.values() if array.dtype == main)


def _is_stored(array: LazyArray) -> bool:
    """Return whether an array is stored in its dtype, not cast to it."""
    return all(item.dtype == array.dtype and _is_stored(item) for item in source_arrays(array))


def _part_arrays(name: str, arrays: Mapping[str, LazyArray]) -> Mapping[str, LazyArray]:
    """Return the arrays that a part of a configuration describes."""
    if name not in _TOWERS:
        return arrays
    return {key: array for key, array in arrays.items() if _contains_any(key, _TOWERS[name])}


def _contains_any(key: str, words: Iterable[str]) -> bool:
    return any(word in key for word in words)


def _main_dtype(arrays: Mapping[str, LazyArray]) -> DType | None:
    """Return the dtype of most elements, without those of towers."""
    words = [word for tower in _TOWERS.values() for word in tower]
    own = {key: array for key, array in arrays.items() if not _contains_any(key, words)} or arrays
    count: Counter[DType] = Counter()
    for array in own.values():
        count[array.dtype] += array.size
    return count.most_common(1)[0][0] if count else None


def _with_tied(config: dict[str, Any], tied: bool, rule: FlagRule) -> Iterator[str]:
    """Set every field that states whether embeddings are tied, and yield the changes."""
    fields = [name for name in rule.field if states_field(config, name)]
    for name in fields:
        yield from _with_field(config, name, tied)
    if rule.read(config, "").value != tied:
        yield from _with_field(config, next(name for name in rule.field if _has_location(config, name)), tied)


def _with_field(config: dict[str, Any], name: str, tied: bool) -> Iterator[str]:
    within, _, last = name.rpartition(".")
    location = nested_value(config, within) if within else config
    if location.get(last) != tied:
        location[last] = tied
        yield f"{name} is {json.dumps(tied)}, because {'no' if tied else 'an'} output head is stored"


def _has_location(config: Mapping[str, Any], name: str) -> bool:
    within = name.rpartition(".")[0]
    return not within or isinstance(nested_value(config, within), Mapping)


def _with_vocab(config: dict[str, Any], vocab: int) -> Iterator[str]:
    """Set the vocabulary size wherever it is stated, and yield the changes."""
    for where, location in _text_parts(config).items():
        declared = location.get(_ROWS)
        if declared is not None and declared != vocab:
            location[_ROWS] = vocab
            yield f"{where}{_ROWS} is {vocab}, because all rows are kept; it was {declared}"


def config_parts(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a configuration and its nested configurations, each with the prefix of its field names."""
    yield prefix, config
    for name, part in config.items():
        if name.endswith(_PART) and isinstance(part, Mapping):
            yield from config_parts(part, f"{prefix}{name}.")


def _with_layer_lists(config: dict[str, Any]) -> Iterator[str]:
    """Give the lists in `STRICT_LISTS` one entry per layer if the missing entries are known."""
    for prefix, part in config_parts(config):
        count = part.get("num_hidden_layers")
        if type(count) is not int or count < 1:
            continue
        for name in STRICT_LISTS:
            entries = part.get(name)
            if not isinstance(entries, list) or len(entries) in (0, count, count + prediction_layers(part)):
                continue
            if len(entries) > count or all(entry == entries[0] for entry in entries):
                cast("dict[str, Any]", part)[name] = [*entries, *entries[:1] * count][:count]
                yield f"{prefix}{name} has {count} entries, one for each layer; it had {len(entries)}"


def _text_parts(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Map the field prefix of each part that describes the text model to that part."""
    text = config.get(_TEXT)
    return {"": config, f"{_TEXT}.": text} if isinstance(text, dict) else {"": config}


def absent_towers(config: Mapping[str, Any], names: Collection[str]) -> tuple[str, ...]:
    """Return the fields, such as `vision_config`, that describe towers without arrays."""
    result = []
    for field, part in config.items():
        if field in _TOWERS and part and not any(_contains_any(name, _TOWERS[field]) for name in names):
            result.append(field)
        elif field.endswith(_PART) and isinstance(part, Mapping):
            result += [f"{field}.{tower}" for tower in absent_towers(part, names)]
    return tuple(result)


def absent_mtp_field(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return the field that declares MTP layers if the arrays have none."""
    field = next((field for field in PREDICTION_FIELDS if config.get(field)), None)
    layers = config.get("num_hidden_layers")
    if field is None or not isinstance(layers, int):
        return None
    has_mtp = any(number >= layers for number in _layers(names)) or _contains_any(" ".join(names), ("mtp.",))
    return None if has_mtp else field


def absent_layers(config: Mapping[str, Any], names: Collection[str]) -> set[int]:
    """Return the declared layers that have no arrays; empty if names have no layers."""
    around = _text_model_parents(config)
    texts = [item[_TEXT] for item in around if isinstance(item.get(_TEXT), Mapping)]
    count, present = (*texts, config)[0].get("num_hidden_layers"), set(_layers(names))
    return set(range(count)) - present if isinstance(count, int) and present else set()


def _text_model_parents(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a configuration and its parts that may contain the text model."""
    return [config, *(config[name] for name in _TEXT_MODEL_PARENTS if isinstance(config.get(name), Mapping))]


def _layers(names: Iterable[str]) -> Iterator[int]:
    return (int(result[1]) for result in map(_LAYER.search, names) if result)


def text_config(config: Mapping[str, Any], spelling: Spelling) -> dict[str, Any] | None:
    """Return the text model's configuration in a multimodal one; None for a text-only model.

    Args:
        config: The multimodal configuration.
        spelling: The spelling of the separate text model.
    """
    around = _text_model_parents(config)
    text = around[-1].get(_TEXT)
    if not isinstance(text, Mapping):
        return None
    shared = {field: item[field] for item in around for field in _SHARED if item.get(field) is not None}
    own = {field: value for field, value in text.items() if value is not None or field not in shared}
    result = {**shared, **json.loads(json.dumps(own)), "model_type": spelling.model_types[0]}
    for name in spelling.without:
        within, _, last = name.rpartition(".")
        part = nested_value(result, within) if within else result
        if isinstance(part, dict):
            part.pop(last, None)
    result = {**spelling.defaults, **contradicted_defaults(result, config), **result}
    kinds = text.get("architectures") or config.get("architectures") or ()
    named = [str(kind).replace("ForConditionalGeneration", "ForCausalLM") for kind in kinds]
    return {**result, "architectures": [spelling.architecture] if spelling.architecture else named}


def refuse_lost_parts(family: Family, names: Collection[str], location: str) -> None:
    """Raise an error if a conversion would silently lose a part of the model.

    Args:
        family: The family of the model.
        names: The arrays that the reverse conversion would lack.
        location: Location of the model, for messages.

    Raises:
        CoverageError: The arrays include a part of the model.
    """
    lost = {name: part.of(names) for name, part in family.parts.items() if not part.idle}
    lost = {name: result for name, result in lost.items() if result}
    if lost:
        patterns = [key for name in lost for key in family.parts[name].keys]
        drop = repeated_option("drop", [key for key in patterns if UnsupportedPart((key,)).of(names)])
        carry_hint = f"{option('carry', True)} keeps it with the weights, for the reverse conversion"
        raise CoverageError(
            "MaxText does not support a part of this model, which would be lost",
            location=location,
            got=", ".join(
                f"{name}: {array_count(result)}, such as {result[0]}" for name, result in lost.items()
            ),
            expected="an option that decides how to handle it",
            hint=f"{carry_hint}; {drop} leaves it out",
        )


def drop_absent_parts(
    family: Family, config: WeightsConfig, names: Collection[str], location: str
) -> WeightsConfig:
    """Return a configuration that does not declare parts without arrays.

    Args:
        family: The family of the model.
        config: The configuration of the model.
        names: The names of the arrays that are written with the configuration.
        location: Location of the configuration, for messages.

    Raises:
        ConfigError: Only some of the parts that a field declares exist.
    """
    promised = {
        name: part
        for name, part in family.parts.items()
        if FlagRule(part.promise).read(config.config, location).value
    }
    absent = {name: part for name, part in promised.items() if not part.of(names)}
    fields = dict.fromkeys(part.promise[0] for part in absent.values())
    for name, part in promised.items():
        if name not in absent and part.promise[0] in fields:
            raise ConfigError(
                f"{part.promise[0]} declares several parts, but only some of them exist",
                location=location,
                got=f"{name}, without {' and '.join(absent)}",
                expected="all parts, or none",
                hint=f"{option('like', 'HF_DIR')} {option('carry', True)} copies them from the model",
            )
    result = json.loads(json.dumps(config.config))
    changes = [_set_false(result, field) for field in fields]
    return replace(config, config=result, changes=(*config.changes, *changes)) if changes else config


def _set_false(config: dict[str, Any], field: str) -> str:
    """Set a field to false, and return a description of the change."""
    within, _, last = field.rpartition(".")
    target = nested_value(config, within) if within else config
    target[last] = False
    return f"{field} is false, because no array of that part is stored"


def prediction_layers(config: Mapping[str, Any]) -> int:
    """Return the number of MTP layers that a configuration states; 0 if it does not state one."""
    stated = (config.get(name) for name in PREDICTION_FIELDS)
    return sum(number for number in stated if isinstance(number, int))
