"""What is known of one model: fields of its configuration however they are spelled, lengths, flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttools.mapping.sizes import nested

_CONFIG, _ROPE, _CYCLE = "config.", "rope.", "layer_types.full_every_"
# Where a multimodal configuration has its text model.
_PARTS = ("thinker_config.text_config", "text_config", "thinker_config")
# `rope_scaling` until transformers 4, `rope_parameters` from 5 on; by kind of layers where there are two.
# Where a file has both, transformers takes the older one.
_ROPES = ("rope_scaling", "rope_parameters")
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
# DeepSeek V4 has one of layers that are not compressed, "main", which is never stretched.
_COMPRESSED = "compress"
# Lists with an entry for each layer, which may go on for layers that a model does not have.
_BY_LAYER = frozenset(("compress_ratios", "layer_types"))
# Lists with an entry for each layer: name of the field -> the entry of layers that attend to everything.
_KINDS = {"layer_types": _GLOBAL, "no_rope_layers": 0}
# Names of the older way.
_OLDER = {"theta": ("rope_theta",), "local_theta": ("rope_local_base_freq",)}
_TYPES = ("rope_type", "type")
# Sections of positions in images, which texts have not: for these it is the plain one.
_PLAIN_TYPES = {"mrope": "default"}


@dataclass(frozen=True)
class ModelFacts:
    """What is known of one model.

    Attributes:
        config: the parsed `config.json`.
        lengths: of axes.
        flags: yes and no.
    """

    config: Mapping[str, Any]
    lengths: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)

    def field(self, name: str) -> Any:
        """`config.NAME`, of the text model if it has it, or `rope.NAME`; None where there is none.

        `layer_types.full_every_N` is whether every N-th layer attends to everything, and no other.
        """
        if name.startswith(_CYCLE):
            return self._cycles(int(name.removeprefix(_CYCLE)))
        if name.startswith(_ROPE):
            return self._rope(name.removeprefix(_ROPE))
        name = name.removeprefix(_CONFIG)
        parts = (*(nested(self.config, each) for each in _PARTS), self.config)
        found = (nested(each, name) for each in parts if isinstance(each, Mapping))
        said = next((each for each in found if each is not None), None)
        if name in _BY_LAYER and isinstance(said, list):
            return said[: self.field("num_hidden_layers")]
        return said

    def _cycles(self, every: int) -> bool | None:
        lists = [(self.field(_CONFIG + name), entry) for name, entry in _KINDS.items()]
        said = [
            [each == full for each in kinds] for kinds, full in lists if kinds and isinstance(kinds, list)
        ]
        if not said:
            return None
        return all(full == (k % every == every - 1) for layers in said for k, full in enumerate(layers))

    def _rope(self, name: str) -> Any:
        is_local = name.startswith("local_")
        rope = self._rope_of(_LOCAL if is_local else _GLOBAL)
        plain = name.removeprefix("local_")
        if plain == "type":
            said = next((rope[each] for each in _TYPES if rope.get(each)), "default")
            return _PLAIN_TYPES.get(said, said) if isinstance(said, str) else said
        keys = ("rope_theta",) if plain == "theta" else (plain,)
        older = _OLDER.get(name, () if is_local else (name,))
        found = [rope.get(key) for key in keys] + [self.field(_CONFIG + each) for each in older]
        return next((each for each in found if each is not None), None)

    def _rope_of(self, kind: str) -> Mapping[str, Any]:
        for name in _ROPES:
            said = self.field(_CONFIG + name)
            if not isinstance(said, Mapping):
                continue
            if _GLOBAL in said or _LOCAL in said:
                said = said.get(kind)
            elif _COMPRESSED in said:
                said = said[_COMPRESSED]
            elif kind == _LOCAL:
                return {}
            if isinstance(said, Mapping):
                return said
        return {}
