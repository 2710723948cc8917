"""Parts of a model that MaxText has no place for: not lost unasked, and not promised where they are not."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ckpttools.core.errors import ConfigError, CoverageError
from ckpttools.core.message_terms import option, several
from ckpttools.core.text import array_count
from ckpttools.mapping.sizes import nested
from ckpttools.maxtext.model_config import TrueConfig
from ckpttools.model_families.family import Family, FlagRule, UnsupportedPart


def refuse_lost(family: Family, names: Collection[str], location: str) -> None:
    """Refuses to leave out what a model does besides what MaxText's does.

    Args:
        family: of the model.
        names: the arrays that the way back would not have.
        location: for messages.

    Raises:
        CoverageError: a part of the model is among them.
    """
    lost = {name: part.of(names) for name, part in family.parts.items() if not part.idle}
    lost = {name: result for name, result in lost.items() if result}
    if lost:
        patterns = [key for name in lost for key in family.parts[name].keys]
        drop = several("drop", [key for key in patterns if UnsupportedPart((key,)).of(names)])
        kept = f"{option('carry', True)} keeps it beside the weights, for the way back"
        raise CoverageError(
            "MaxText has no place for a part of this model, which would be lost",
            location=location,
            got=", ".join(
                f"{name}: {array_count(result)}, such as {result[0]}" for name, result in lost.items()
            ),
            expected="to be told what becomes of it",
            hint=f"{kept}; {drop} leaves it out",
        )


def promising_less(family: Family, config: TrueConfig, names: Collection[str], location: str) -> TrueConfig:
    """A configuration that promises no part of which no array is there.

    Args:
        family: of the model.
        config: that describes it.
        names: the arrays that are written beside it.
        location: where the configuration lies, for messages.

    Raises:
        ConfigError: of parts that one field promises some are there and others are not.
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
                f"{part.promise[0]} promises parts of which some are there and others are not",
                location=location,
                got=f"{name}, without {' and '.join(absent)}",
                expected="all of them, or none",
                hint=f"{option('like', 'HF_DIR')} {option('carry', True)} takes them from the model",
            )
    built = json.loads(json.dumps(config.config))
    changes = [_deny(built, field) for field in fields]
    return replace(config, config=built, changes=(*config.changes, *changes)) if changes else config


def _deny(config: dict[str, Any], field: str) -> str:
    """Sets a field to false, and says so."""
    within, _, last = field.rpartition(".")
    target = nested(config, within) if within else config
    target[last] = False
    return f"{field} is false, as no array of what it promises is stored"
