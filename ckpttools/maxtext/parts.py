"""Parts of a model that MaxText has no place for: not lost unasked, and not promised where they are not."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ckpttools.core.errors import ConfigError, CoverageError
from ckpttools.core.text import array_count
from ckpttools.core.wording import option, several
from ckpttools.families.family import Family, FlagRule, UnsupportedPart
from ckpttools.mapping.sizes import nested
from ckpttools.maxtext.model_config import TrueConfig


def refuse_lost(family: Family, names: Collection[str], place: str) -> None:
    """Refuses to leave out what a model does besides what MaxText's does.

    Args:
        family: of the model.
        names: the arrays that the way back would not have.
        place: for messages.

    Raises:
        CoverageError: a part of the model is among them.
    """
    lost = {name: part.of(names) for name, part in family.parts.items() if not part.idle}
    lost = {name: found for name, found in lost.items() if found}
    if lost:
        patterns = [key for name in lost for key in family.parts[name].keys]
        drop = several("drop", [key for key in patterns if UnsupportedPart((key,)).of(names)])
        kept = f"{option('carry', True)} keeps it beside the weights, for the way back"
        raise CoverageError(
            "MaxText has no place for a part of this model, which would be lost",
            place=place,
            got=", ".join(
                f"{name}: {array_count(found)}, such as {found[0]}" for name, found in lost.items()
            ),
            wanted="to be told what becomes of it",
            hint=f"{kept}; {drop} leaves it out",
        )


def promising_less(family: Family, config: TrueConfig, names: Collection[str], place: str) -> TrueConfig:
    """A configuration that promises no part of which no array is there.

    Args:
        family: of the model.
        config: that describes it.
        names: the arrays that are written beside it.
        place: where the configuration lies, for messages.

    Raises:
        ConfigError: of parts that one field promises some are there and others are not.
    """
    promised = {
        name: part
        for name, part in family.parts.items()
        if FlagRule(part.promise).read(config.config, place).value
    }
    absent = {name: part for name, part in promised.items() if not part.of(names)}
    fields = dict.fromkeys(part.promise[0] for part in absent.values())
    for name, part in promised.items():
        if name not in absent and part.promise[0] in fields:
            raise ConfigError(
                f"{part.promise[0]} promises parts of which some are there and others are not",
                place=place,
                got=f"{name}, without {' and '.join(absent)}",
                wanted="all of them, or none",
                hint=f"{option('like', 'HF_DIR')} {option('carry', True)} takes them from the model",
            )
    made = json.loads(json.dumps(config.config))
    changes = [_deny(made, field) for field in fields]
    return replace(config, config=made, changes=(*config.changes, *changes)) if changes else config


def _deny(config: dict[str, Any], field: str) -> str:
    """Sets a field to false, and says so."""
    within, _, last = field.rpartition(".")
    target = nested(config, within) if within else config
    target[last] = False
    return f"{field} is false, as no array of what it promises is stored"
