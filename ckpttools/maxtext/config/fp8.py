"""FP8 weights of a MaxText checkpoint: what MaxText makes of them, and with which settings it keeps them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from shlex import quote
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import plural
from ckpttools.mapping.blocks import Block
from ckpttools.maxtext.config.checking import same
from ckpttools.maxtext.config.given import Given
from ckpttools.maxtext.config.report import Contradiction, ModelSetting
from ckpttools.maxtext.native import CODES, IGNORES_SCALES

WEIGHT_DTYPE, BLOCK_SIZE, MODULES = "weight_dtype", "weight_block_size", "unquantized_modules"
# What MaxText's own configurations of FP8 models leave as it is.
UNQUANTIZED = (
    *("token_embedder", "logits_dense", "gate", "shared_expert_gate", "conv1d", "in_proj_ba", "A_log"),
    *("dt_bias", "norm"),
)
_ARRAYS, _PLAIN = "the arrays", "bfloat16 or float32"
_WORD = re.compile(r"[^\s,\[\]'\"]+")


@dataclass(frozen=True)
class StoredFp8:
    """The weights of a checkpoint that have scales.

    Attributes:
        place: of the checkpoint.
        weights: how many there are.
        dtypes: of their codes, sorted: none, one or two.
        block: elements of a block; None where each weight has one scale.
        misfits: why MaxText cannot compute with some of them in FP8, a line for each kind.
    """

    place: str
    weights: int = 0
    dtypes: tuple[str, ...] = ()
    block: Block | None = None
    misfits: tuple[str, ...] = ()

    def notes(self) -> Iterator[str]:
        """What MaxText makes of them; nothing where there are none."""
        if not self.weights:
            return
        yield (
            f"{plural(self.weights, 'array')} in FP8 ({' and '.join(self.dtypes)}), with scales beside the "
            "codes: MaxText's training multiplies them when it loads them, into weight_dtype, by default "
            "float32"
        )
        yield (
            f"{IGNORES_SCALES}; for these, dequantise first: "
            f"`ckpt cast {quote(self.place or 'SRC')} DST --dtype bfloat16`"
        )
        if self._reason:
            yield f"MaxText cannot compute with them in FP8, so leave weight_dtype as it is: {self._reason}"
        else:
            yield f"MaxText computes with them in FP8 if it is told {' '.join(map(str, self.settings()))}"

    @property
    def _reason(self) -> str:
        """Why no model of MaxText's that is FP8 itself takes them; empty where one does."""
        mixed = f"some are {' and some '.join(self.dtypes)}" if len(self.dtypes) > 1 else ""
        reasons = [*filter(None, [mixed]), *self.misfits]
        if len(reasons) < 2:
            return "".join(reasons)
        return f"{reasons[0]} (and {len(reasons) - 1} more like this)"

    def settings(self) -> tuple[ModelSetting, ...]:
        """Those with which MaxText keeps them FP8."""
        size = self.block[0] if self.block else None
        return (
            ModelSetting(WEIGHT_DTYPE, self.dtypes[0], _ARRAYS),
            ModelSetting(BLOCK_SIZE, size, _ARRAYS),
            ModelSetting(MODULES, list(UNQUANTIZED), "MaxText's own FP8 models"),
        )

    def contradictions(self, given: Given) -> Iterator[Contradiction]:
        """What does not go together where a run is told that its model is FP8."""
        said = given.values.get(WEIGHT_DTYPE)
        if said is None or said.value not in CODES:
            return
        reason = self._reason if self.weights else "none is FP8 with a scale"
        if reason:
            yield Contradiction(WEIGHT_DTYPE, said.value, said.source, _PLAIN, f"{_ARRAYS}: {reason}")
            return
        for each in self.settings():
            found = given.values.get(each.name)
            if found is None and given.is_whole:
                found = ModelSetting(each.name, None, "MaxText's default")
            if found is not None and not _agrees(each, found.value):
                yield Contradiction(each.name, found.value, found.source, each.value, each.source)


def _agrees(wanted: ModelSetting, said: Any) -> bool:
    if wanted.name == MODULES:
        return set(wanted.value) <= set(_words(said))
    if wanted.name == BLOCK_SIZE and isinstance(wanted.value, int):
        sizes = _words(said)
        return bool(sizes) and all(same(each, wanted.value) for each in sizes)
    return bool(said == wanted.value) or (wanted.value is None and said in ("", "null", "None"))


def _words(said: Any) -> list[str]:
    """The members of a list, as configuration files and command lines have it."""
    if said is None:
        return []
    return _WORD.findall(" ".join(map(str, said)) if isinstance(said, list) else str(said))
