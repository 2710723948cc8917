"""Which fields of a `config.json` the rules of its family read, and which nobody looks at."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import matches_any
from ckpttools.mapping.arithmetic import axes_in
from ckpttools.mapping.setting_terms import Term
from ckpttools.mapping.sizes import nested
from ckpttools.maxtext.config.facts import ATTENDING, ModelFacts
from ckpttools.model_families.family import Family

_CONFIG, _ROPE, _LOCAL = "config.", "rope.", "local_"
# Characters of a value that are shown.
_LONGEST = 60
# Parts that stand in a configuration of their own, with the flag of the tower that they describe.
_WITHIN = (
    "text_config",
    "thinker_config",
    "rope_scaling",
    "rope_parameters",
    "full_attention",
    "sliding_attention",
)
# Parts that describe towers -> the flag of the tower.
TOWERS = {"vision_config": "vision", "audio_config": "audio"}
# What a rotary embedding has under other names: all of them are read together.
_ROPE_NAMES = {
    "type": ("rope_type", "type"),
    "theta": ("rope_theta", "rope_local_base_freq"),
    "usual_attention_factor": ("attention_factor", "mscale", "mscale_all_dim"),
}
# Of all models, in whichever part: names, texts, training, how transformers generates and returns. A longest
# text is none to MaxText, which is told one for each run; stored numbers have their own dtype.
_IDLE = (
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
    """How a family reads the configuration of one model."""

    family: Family
    facts: ModelFacts

    def called(self, term: Term) -> str:
        """What a term reads, as the configuration calls it; where that is silent, as it would."""
        if term.kind == "value":
            return json.dumps(term.value)
        return ", ".join(self._there(term) or self._usual(term)) or term.name

    def source(self, term: Term, location: str) -> str:
        """Who says a term."""
        if term.kind == "value" or (
            term.kind == "formula" and axes_in(term.name) <= self.family.constants.keys()
        ):
            return "family"
        if there := self._there(term):
            return f"{location}: {', '.join(there)}"
        from_arrays = term.kind != "field" and self.facts.has_arrays
        return "the arrays" if from_arrays else f"transformers, as {location} does not say"

    def unread(self) -> Iterator[str]:
        """The fields that may change what the model computes, and of which MaxText is told nothing."""
        read = {_plain(item) for item in self._read()}
        for path, value in self._stated("", self.facts.config):
            if path not in read and not self._is_idle(path):
                yield f"{path} {_short(value)}"

    def _there(self, term: Term) -> list[str]:
        """The fields that give it."""
        if term.kind == "field":
            return [where] if (where := self.facts.location_of(term.name)) else []
        if term.kind == "flag":
            rule = self.family.flags.get(term.name)
            names = rule.field if rule else ()
            return [name for name in names if nested(self.facts.config, name) is not None][:1]
        axes = sorted(axes_in(term.name))
        return list(dict.fromkeys(name for axis in axes for name in self._of_axis(axis)))

    def _of_axis(self, axis: str) -> list[str]:
        names = [item for item in self.family.sizes.get(axis, ()) if isinstance(item, str)]
        there = [name for name in names if nested(self.facts.config, name) is not None][:1]
        formula = self.family.derived.get(axis)
        if there or formula is None:
            return there
        return [name for inner in sorted(axes_in(formula)) for name in self._of_axis(inner)]

    def _usual(self, term: Term) -> list[str]:
        """What would have to be there."""
        if term.kind == "field":
            rope, _, name = term.name.partition(".")
            known = _ROPE_NAMES.get(name.removeprefix(_LOCAL), (name,))[0]
            return [f"rope_parameters.{known}" if f"{rope}." == _ROPE else term.name.removeprefix(_CONFIG)]
        if term.kind == "flag":
            rule = self.family.flags.get(term.name)
            return list(rule.field[:1]) if rule else []
        axes = sorted(axes_in(term.name))
        result = (next(iter(self.family.sizes.get(axis, ())), "") for axis in axes)
        return [item for item in result if isinstance(item, str) and item]

    def _read(self) -> Iterator[str]:
        family = self.family
        for alternatives in family.sizes.values():
            yield from (alternative for alternative in alternatives if isinstance(alternative, str))
        for rule in (*family.flags.values(), *family.others.values()):
            yield from rule.field
        for part in family.parts.values():
            yield from part.promise
        for term in family.settings.terms():
            if term.kind == "field":
                yield from self._read_by(term.name)

    def _read_by(self, name: str) -> Iterator[str]:
        prefixes = [prefix for prefix, _ in self.facts.parts]
        if name.startswith(_ROPE):
            plain = name.removeprefix(_ROPE).removeprefix(_LOCAL)
            names: Iterable[str] = _ROPE_NAMES.get(plain, (plain,))
            locations = [f"{where}." for where, _ in self.facts.ropes()]
            yield from (location + item for location in (*locations, *prefixes) for item in names)
        elif name.startswith(_CONFIG):
            yield from (prefix + name.removeprefix(_CONFIG) for prefix in prefixes)
        else:
            yield from (prefix + item for prefix in prefixes for item in ATTENDING)

    def _stated(self, prefix: str, part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in part.items():
            is_there = self.facts.flags.get(TOWERS.get(name, ""), False) if name in TOWERS else True
            if value is None or value in ([], {}) or not is_there:
                continue
            if isinstance(value, Mapping) and (name in _WITHIN or name in TOWERS):
                yield from self._stated(f"{prefix}{name}.", value)
            else:
                yield prefix + name, value

    def _is_idle(self, path: str) -> bool:
        last = path.rpartition(".")[2]
        if matches_any(last, _IDLE):
            return True
        patterns = [field for idle in self.family.settings.idle for field in idle.fields]
        relative = [path.removeprefix(prefix) for prefix, _ in self.facts.parts if path.startswith(prefix)]
        return any(matches_any(item, patterns) for item in relative)


def _plain(path: str) -> str:
    """Without what stands for items of lists."""
    keys = path.split(".")
    while keys[-1] == "#" or keys[-1].isdecimal():
        keys.pop()
    return ".".join(keys)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
