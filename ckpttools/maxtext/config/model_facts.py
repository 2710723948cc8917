"""Facts about a model (fields in any spelling, lengths, flags), and which fields its family reads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import matches_any
from ckpttools.mapping.arithmetic import axes_in
from ckpttools.mapping.settings import Term
from ckpttools.mapping.sizes import nested_value, states_field
from ckpttools.model_families.family import Family
from ckpttools.model_families.hf_defaults import TEXT_PARTS, THETA, resolve_alias

_USUAL_ATTENTION_FACTOR = "rope.usual_attention_factor"
_SCALES = ("mscale", "mscale_all_dim")
# Tolerance: files state factors to about 16 digits.
_TOLERANCE = 1e-6
_CONFIG, _ROPE = "config.", "rope."
# A list with the kind of each layer, and a fact whether every N-th layer has full attention.
LAYER_TYPES, CYCLE = "layer_types", "layer_types.full_every_"
# Fields of a multimodal configuration that contain the text model.
_PARTS = (*TEXT_PARTS, "thinker_config")
# The field is `rope_scaling` up to transformers 4 and `rope_parameters` since 5; with two kinds of layers, it
# has one entry per kind. If a file has both, transformers uses the older one.
_ROPES = ("rope_scaling", "rope_parameters")
FULL_ATTENTION, _LOCAL = "full_attention", "sliding_attention"
# DeepSeek V4 has a layer type "main" for uncompressed layers, which are never scaled.
_COMPRESSED = "compress"
# Fields with one list entry per layer (and possibly more entries than layers) -> the entry for layers with
# full attention; None if the list does not show them.
BY_LAYER = {
    LAYER_TYPES: FULL_ATTENTION,
    "no_rope_layers": 0,
    "mlp_layer_types": None,
    "compress_ratios": None,
}
# The lists that show which layers have full attention.
ATTENTION_LISTS = tuple(name for name, entry in BY_LAYER.items() if entry is not None)
# Older names of fields.
_OLD_NAMES = {"theta": ("rope_theta",), "local_theta": ("rope_local_base_freq",)}
_TYPES = ("rope_type", "type")
# Sections of positions in images. For text, the embedding is equivalent to the plain one.
_PLAIN_TYPES = {"mrope": "default"}


@dataclass(frozen=True)
class ModelFacts:
    """The known facts about a model.

    Attributes:
        config: The parsed `config.json`.
        lengths: Axis lengths.
        flags: Boolean facts.
        silent: Field -> the value that transformers uses if the configuration does not have the field.
        has_arrays: Whether the lengths come from arrays.
    """

    config: Mapping[str, Any]
    lengths: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    silent: Mapping[str, Any] = field(default_factory=dict)
    has_arrays: bool = False

    def field(self, name: str) -> Any:
        """Return `config.NAME`, preferably from the text model, or `rope.NAME`; None if absent.

        `layer_types.full_every_N` is whether exactly every N-th layer has full attention, and
        `rope.usual_attention_factor` is whether YaRN multiplies by 0.1 ln(factor) + 1.
        """
        return resolve_alias(name, self._find(name)[1])

    def location_of(self, name: str) -> str | None:
        """Return the dotted location of a field in the configuration; None if it is absent."""
        return self._find(name)[0]

    @cached_property
    def parts(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Return the parts that describe the text model, with their prefixes, the most specific first."""
        result = ((f"{name}.", nested_value(self.config, name)) for name in _PARTS)
        return (*((name, part) for name, part in result if isinstance(part, Mapping)), ("", self.config))

    def ropes(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the location and content of each part that describes the rotary embedding."""
        for name in _ROPES:
            where, declared = self._find(_CONFIG + name)
            if where is not None and isinstance(declared, Mapping):
                kinds = [
                    kind
                    for kind in (FULL_ATTENTION, _LOCAL, _COMPRESSED)
                    if isinstance(declared.get(kind), Mapping)
                ]
                yield from ((f"{where}.{kind}", declared[kind]) for kind in kinds)
                if not kinds:
                    yield where, declared

    def theta_conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield contradictory rotary bases in pairs: the one that is used, and the other."""
        for name, older in _OLD_NAMES.items():
            where, declared = self._rope(name)
            for item in older:
                location, other = self._find(_CONFIG + item)
                if where is not None and location not in (None, where) and other != declared:
                    yield f"{where} is {json.dumps(declared)}", f"{location} is {json.dumps(other)}"

    def layers_off_cycle(self, interval: int) -> dict[int, str]:
        """Return the layers whose entries in the configuration contradict a cycle.

        Args:
            interval: Every N-th layer should have full attention, and the other layers should not.

        Returns:
            A map from layer index to a text such as `layer_types[7] is "full_attention" instead of
            "sliding_attention"`.
        """
        result: dict[int, str] = {}
        for where, kinds, full in self._layer_lists():
            other = next((item for item in kinds if item != full), None)
            for k, kind in enumerate(kinds):
                is_full = k % interval == interval - 1
                expected = full if is_full else other
                if (kind == full) != is_full:
                    instead = "" if expected is None else f" instead of {json.dumps(expected)}"
                    result.setdefault(k, f"{where}[{k}] is {json.dumps(kind)}{instead}")
        return result

    def _layer_lists(self) -> Iterator[tuple[str, list[Any], Any]]:
        """Yield each list that shows layers with full attention: name, entries, and that layers' entry."""
        for name in ATTENTION_LISTS:
            where, kinds = self._find(_CONFIG + name)
            if where is not None and kinds and isinstance(kinds, list):
                yield where, kinds, BY_LAYER[name]

    def _find(self, name: str) -> tuple[str | None, Any]:
        if name.startswith(CYCLE):
            return self._cycles(int(name.removeprefix(CYCLE)))
        if name == _USUAL_ATTENTION_FACTOR:
            return self._attention_factor()
        if name.startswith(_ROPE):
            return self._rope(name.removeprefix(_ROPE))
        name = name.removeprefix(_CONFIG)
        result = ((prefix + name, nested_value(part, name)) for prefix, part in self.parts)
        where, declared = next((item for item in result if item[1] is not None), (None, self._default(name)))
        if name in BY_LAYER and isinstance(declared, list):
            return where, declared[: self.field("num_hidden_layers")]
        return where, declared

    def _default(self, name: str) -> Any:
        """Return transformers' default for an absent field; None if unknown."""
        is_stated = any(states_field(part, name) for _, part in self.parts)
        return None if is_stated else self.silent.get(name)

    def _cycles(self, interval: int) -> tuple[str | None, bool | None]:
        stated = list(self._layer_lists())
        for where, kinds, full in stated:
            if any((kind == full) != (k % interval == interval - 1) for k, kind in enumerate(kinds)):
                return where, False
        return (stated[0][0], True) if stated else (None, None)

    def _rope(self, name: str) -> tuple[str | None, Any]:
        is_local = name.startswith("local_")
        where, rope = self._rope_of(_LOCAL if is_local else FULL_ATTENTION)
        plain = name.removeprefix("local_")
        if plain == "type":
            key = next((kind for kind in _TYPES if rope.get(kind)), None)
            declared = rope[key] if key else self._default_rope(name, where)
            plain_type = _PLAIN_TYPES.get(declared, declared) if isinstance(declared, str) else declared
            return (f"{where}.{key}" if key else None), plain_type
        keys = ("rope_theta",) if plain == "theta" else (plain,)
        older = _OLD_NAMES.get(name, () if is_local else (name,))
        result: list[tuple[str | None, Any]] = [(f"{where}.{key}", rope.get(key)) for key in keys]
        result += [self._find(_CONFIG + item) for item in older]
        taken = None, self._default_rope(name, where)
        return next((item for item in result if item[1] is not None), taken)

    def _default_rope(self, name: str, where: str) -> Any:
        """Return the default of a rotary embedding field at a location, which is empty if there is none."""
        known = name == THETA.removeprefix(_ROPE) or not where
        usual = "default" if name in ("type", "local_type") else None
        return self.silent.get(_ROPE + name, usual) if known else usual

    def _attention_factor(self) -> tuple[str | None, bool | None]:
        """Compute the attention factor as transformers does."""
        numbers = {name: self._rope(name) for name in ("factor", "attention_factor", *_SCALES)}
        if any(not isinstance(item, int | float | None) for _, item in numbers.values()):
            return None, None
        factor, own, scale, scale_all = (item for _, item in numbers.values())
        if not factor or factor <= 1 or not (own or (scale and scale_all)):
            return None, None
        usual = _yarn(factor, 1)
        result = own or _yarn(factor, scale) / _yarn(factor, scale_all)
        where = numbers["attention_factor" if own else _SCALES[0]][0]
        return where, math.isclose(result, usual, rel_tol=_TOLERANCE)

    def _rope_of(self, kind: str) -> tuple[str, Mapping[str, Any]]:
        for name in _ROPES:
            where, declared = self._find(_CONFIG + name)
            if not isinstance(declared, Mapping):
                continue
            if FULL_ATTENTION in declared or _LOCAL in declared:
                where, declared = f"{where}.{kind}", declared.get(kind)
            elif _COMPRESSED in declared:
                where, declared = f"{where}.{_COMPRESSED}", declared[_COMPRESSED]
            elif kind == _LOCAL:
                return "", {}
            if isinstance(declared, Mapping):
                return str(where), declared
        return "", {}


def layer_types(interval: int, layers: int) -> list[str]:
    """Return layer types for full attention in every N-th layer and a window in the others."""
    return [FULL_ATTENTION if k % interval == interval - 1 else _LOCAL for k in range(layers)]


def _yarn(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


_LOCAL_PREFIX = "local_"
# Maximum length of a value in messages, in characters.
_MAX_VALUE_LENGTH = 60
# Parts with their own configuration -> the flag of the tower that they describe.
_NESTED_PARTS = (
    "text_config",
    "thinker_config",
    "rope_scaling",
    "rope_parameters",
    "full_attention",
    "sliding_attention",
)
# Parts that describe towers -> the flag of the tower.
TOWERS = {"vision_config": "vision", "audio_config": "audio"}
# Rotary embedding fields with alternative names; all of the names are read.
_ROPE_NAMES = {
    "type": ("rope_type", "type"),
    "theta": ("rope_theta", "rope_local_base_freq"),
    "usual_attention_factor": ("attention_factor", "mscale", "mscale_all_dim"),
}
# Fields that any part of any model may have: names, texts, training, generation and return values. MaxText
# ignores a model's maximum text length, which is set for each run, and stored arrays have their own dtype.
_IRRELEVANT = (
    "*_dropout",
    "*_id",
    "*_ids",
    "*_index",
    "*_implementation*",
    "*_token",
    "*_loss_*",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attribute_map",
    "auto_map",
    "aux_loss_alpha",
    "base_model_*",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dropout",
    "dtype",
    "ep_size",
    "id2label",
    "initializer_factor",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "max_length",
    "max_position_embeddings",
    "mlp_layer_types",
    "model_type",
    "mtp_*",
    "name_or_path",
    "num_nextn_predict_layers",
    "output_*",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "router_z_loss_coef",
    "seq_aux",
    "tie_encoder_decoder",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers*version",
    "transformers_weights",
    "unsloth_*",
    "use_cache",
    "use_return_dict",
)


@dataclass(frozen=True)
class Reading:
    """How a family reads the configuration of a model."""

    family: Family
    facts: ModelFacts

    def called(self, term: Term) -> str:
        """Return the fields that a term reads, under the names in the configuration."""
        if term.kind == "value":
            return json.dumps(term.value)
        return ", ".join(self._stated_fields(term) or self._default_fields(term)) or term.name

    def source(self, term: Term, location: str) -> str:
        """Return the source of a term's value."""
        if term.kind == "value" or (
            term.kind == "formula" and axes_in(term.name) <= self.family.constants.keys()
        ):
            return "family"
        if fields := self._stated_fields(term):
            return f"{location}: {', '.join(fields)}"
        from_arrays = term.kind != "field" and self.facts.has_arrays
        return "the arrays" if from_arrays else f"the default of transformers, not stated in {location}"

    def unread(self) -> Iterator[str]:
        """Yield fields that may affect the computation but have no MaxText setting."""
        read = {_without_item_keys(item) for item in self._read_fields()}
        for path, value in self._stated("", self.facts.config):
            if path not in read and not self._is_irrelevant(path):
                yield f"{path} {_shorten(value)}"

    def _stated_fields(self, term: Term) -> list[str]:
        """Return the stated fields that give a term its value."""
        if term.kind == "field":
            return [where] if (where := self.facts.location_of(term.name)) else []
        if term.kind == "flag":
            rule = self.family.flags.get(term.name)
            names = rule.field if rule else ()
            return [name for name in names if nested_value(self.facts.config, name) is not None][:1]
        axes = sorted(axes_in(term.name))
        return list(dict.fromkeys(name for axis in axes for name in self._axis_fields(axis)))

    def _axis_fields(self, axis: str) -> list[str]:
        names = [item for item in self.family.sizes.get(axis, ()) if isinstance(item, str)]
        fields = [name for name in names if nested_value(self.facts.config, name) is not None][:1]
        formula = self.family.derived.get(axis)
        if fields or formula is None:
            return fields
        return [name for inner in sorted(axes_in(formula)) for name in self._axis_fields(inner)]

    def _default_fields(self, term: Term) -> list[str]:
        """Return the absent fields that could give a term its value."""
        if term.kind == "field":
            rope, _, name = term.name.partition(".")
            known = _ROPE_NAMES.get(name.removeprefix(_LOCAL_PREFIX), (name,))[0]
            return [f"rope_parameters.{known}" if f"{rope}." == _ROPE else term.name.removeprefix(_CONFIG)]
        if term.kind == "flag":
            rule = self.family.flags.get(term.name)
            return list(rule.field[:1]) if rule else []
        axes = sorted(axes_in(term.name))
        result = (next(iter(self.family.sizes.get(axis, ())), "") for axis in axes)
        return [item for item in result if isinstance(item, str) and item]

    def _read_fields(self) -> Iterator[str]:
        family = self.family
        for alternatives in family.sizes.values():
            yield from (alternative for alternative in alternatives if isinstance(alternative, str))
        for rule in (*family.flags.values(), *family.others.values()):
            yield from rule.field
        for part in family.parts.values():
            yield from part.promise
        for term in family.settings.terms():
            if term.kind == "field":
                yield from self._fields_of_term(term.name)

    def _fields_of_term(self, name: str) -> Iterator[str]:
        prefixes = [prefix for prefix, _ in self.facts.parts]
        if name.startswith(_ROPE):
            plain = name.removeprefix(_ROPE).removeprefix(_LOCAL_PREFIX)
            names: Iterable[str] = _ROPE_NAMES.get(plain, (plain,))
            locations = [f"{where}." for where, _ in self.facts.ropes()]
            yield from (location + item for location in (*locations, *prefixes) for item in names)
        elif name.startswith(_CONFIG):
            yield from (prefix + name.removeprefix(_CONFIG) for prefix in prefixes)
        else:
            yield from (prefix + item for prefix in prefixes for item in ATTENTION_LISTS)

    def _stated(self, prefix: str, part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in part.items():
            is_there = self.facts.flags.get(TOWERS.get(name, ""), False) if name in TOWERS else True
            if value is None or value in ([], {}) or not is_there:
                continue
            if isinstance(value, Mapping) and (name in _NESTED_PARTS or name in TOWERS):
                yield from self._stated(f"{prefix}{name}.", value)
            else:
                yield prefix + name, value

    def _is_irrelevant(self, path: str) -> bool:
        last = path.rpartition(".")[2]
        if matches_any(last, _IRRELEVANT):
            return True
        patterns = [field for idle in self.family.settings.idle for field in idle.fields]
        relative = [path.removeprefix(prefix) for prefix, _ in self.facts.parts if path.startswith(prefix)]
        return any(matches_any(item, patterns) for item in relative)


def _without_item_keys(path: str) -> str:
    """Remove the keys of list items from a field path."""
    keys = path.split(".")
    while keys[-1] == "#" or keys[-1].isdecimal():
        keys.pop()
    return ".".join(keys)


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}…"
