"""What a family is: rows, the configuration fields that give its sizes, and the flags that choose rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import Alternatives, Size, sizes_from_config
from ckpttools.mapping.table import Flag, Table


@dataclass(frozen=True, slots=True)
class FlagRule:
    """When a flag of the model is set.

    Attributes:
        field: configuration field that decides, dots for nested ones; alternatives in order.
        equals: values that set the flag.
        default: what an absent field means.
    """

    field: Alternatives
    equals: tuple[object, ...]
    default: bool = False

    def read(self, config: Mapping[str, Any], place: str) -> Flag:
        """The flag as a configuration sets it."""
        for name in self.field:
            value = _nested(config, name)
            if value is not None:
                return Flag(value in self.equals, f"{place}: {name} is {json.dumps(value)}")
        return Flag(self.default, f"{place}: no {self.field[0]}" if self.field else "")


def _nested(config: Mapping[str, Any], name: str) -> Any:
    """The field at a dotted name, or None."""
    value: Any = config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True, slots=True)
class Family:
    """A model family as data.

    Attributes:
        name: what users call it.
        model_types: values of `model_type` in a Hugging Face `config.json`.
        models: examples of released models, for help texts.
        rows: MaxText on the left (unscanned, without flavour prefix), Hugging Face on the right.
        sizes: axis -> configuration fields that say its length; axes not named come from shapes.
        constants: axis -> length that is the same in every model.
        flags: flag -> rule.
        dropped: patterns of Hugging Face keys that hold nothing a model needs.
        scan_axes: key axes that scanning moves into arrays.
    """

    name: str
    model_types: tuple[str, ...]
    models: tuple[str, ...]
    rows: tuple[Row, ...]
    sizes: Mapping[str, Alternatives]
    constants: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, FlagRule] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    scan_axes: tuple[str, ...] = ("layer",)

    def table(
        self,
        config: Mapping[str, Any],
        place: str,
        overrides: Mapping[str, Flag] | None = None,
    ) -> Table:
        """The family's rows bound to what one model's configuration says.

        Args:
            config: the parsed `config.json`.
            place: where it lies, for messages.
            overrides: flags that the user sets, whatever the configuration says.

        Raises:
            ConfigError: a size in the configuration is not one.
        """
        sizes = sizes_from_config(config, self.sizes, place)
        sizes.update({axis: Size(n, f"family {self.name}") for axis, n in self.constants.items()})
        flags = {name: rule.read(config, place) for name, rule in self.flags.items()}
        return Table(self.rows, sizes, {**flags, **(overrides or {})}, self.dropped, place)
