"""What a family is: rows, the configuration fields that give its sizes, and the flags that choose rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError, UsageError
from ckpttools.core.message_terms import option, with_options
from ckpttools.core.text import matches_any, plural
from ckpttools.mapping.flags import Flag
from ckpttools.mapping.keys import Field, Key, parse_key
from ckpttools.mapping.row import Layers, Row
from ckpttools.mapping.row_conversion import with_parts
from ckpttools.mapping.settings import SettingRules
from ckpttools.mapping.sizes import Alternatives, Size, derive, first_stated, lengths_of, sizes_from_config
from ckpttools.mapping.table import Table
from ckpttools.model_families.hf_defaults import default_fields


@dataclass(frozen=True, slots=True)
class FlagRule:
    """When a flag of the model is set.

    Attributes:
        field: configuration field that decides, dots for nested ones; alternatives in order.
        equals: values that set the flag; any other leaves it unset. Empty: any value but false and 0 sets it.
        default: what an absent field means.
        remedy: what a user can do where the arrays are not as the configuration says; `{tied}` in it is the
            option of this name.
        by_arrays: whether arrays of a Hugging Face model decide, where they show it, by names or shapes: a
            matter of how files were written. The configuration then decides the way back alone.
    """

    field: tuple[str, ...]
    equals: tuple[object, ...] = ()
    default: bool = False
    remedy: str = ""
    by_arrays: bool = False

    def read(self, config: Mapping[str, Any], location: str, silent: Mapping[str, Any] | None = None) -> Flag:
        """The flag as a configuration sets it, or as transformers does where that is silent.

        Args:
            config: the parsed `config.json`.
            location: of the configuration, for messages.
            silent: the `default_fields` of the configuration, for whoever reads many flags.
        """
        silent = default_fields(config) if silent is None else silent
        name, value, source = first_stated(config, self.field, location, silent)
        if name is not None:
            there = value in self.equals if self.equals else bool(value)
            return self._flag(there, source or f"{location}: {name} is {json.dumps(value)}")
        return self._flag(self.default, f"{location}: no {self.field[0]}" if self.field else "")

    def _flag(self, value: bool, source: str) -> Flag:
        return Flag(value, source, with_options(self.remedy), by_arrays=self.by_arrays)


@dataclass(frozen=True, slots=True)
class UnsupportedPart:
    """A part of a model that MaxText has no place for, with weights that somebody trained.

    Attributes:
        keys: patterns of its Hugging Face keys, as files have them.
        promise: configuration fields of which the first that is stated says whether a model has it; the first
            of all is what a configuration without it sets to false. Empty where none does.
        idle: whether no model of the family asks it, so that it may be left out unasked.
    """

    keys: tuple[str, ...]
    promise: tuple[str, ...] = ()
    idle: bool = False

    def of(self, names: Iterable[str]) -> list[str]:
        """Of names, those of this part."""
        return [name for name in names if matches_any(name, self.keys)]


@dataclass(frozen=True, slots=True)
class Spelling:
    """How some files write Hugging Face keys: the rows' prefixes and what stands there instead.

    Attributes:
        prefixes: prefix of the rows -> prefix in the files.
        inner: what the rows' keys have further on -> what stands there in the files.
        model_types: values of `model_type` whose files are written so; empty for all others.
        name: what users call it.
        architecture: of transformers, that the configuration of such files names; empty where it follows from
            that of the whole model.
        without: fields of the whole model's text part that this configuration does not have, dots for nested
            ones.
        defaults: what it states where the whole model's text part is silent, as the two mean different things
            by that.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    model_types: tuple[str, ...] = ()
    name: str = "hub"
    architecture: str = ""
    without: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    inner: Mapping[str, str] = field(default_factory=dict)

    def key(self, key: Key) -> Key:
        """A key template of the rows as these files have it."""
        first, *rest = key.parts
        if isinstance(first, str):
            first = _swapped_prefix(first, self.prefixes)
        parts = (first, *rest)
        return Key(tuple(_swap_prefix(part, self.inner) if isinstance(part, str) else part for part in parts))

    def plain(self, name: str) -> str:
        """A name of these files as the rows have it."""
        name = _swapped_prefix(name, {theirs: ours for ours, theirs in self.prefixes.items()})
        return _swap_prefix(name, {theirs: ours for ours, theirs in self.inner.items()})

    def row(self, row: Row) -> Row:
        """A row as these files have it."""
        if not (self.prefixes or self.inner):
            return row
        return replace(row, right=replace(row.right, key=self.key(row.right.key)))


PLAIN = Spelling()


def _swapped_prefix(text: str, prefixes: Mapping[str, str]) -> str:
    """With another prefix, the first of these that it has."""
    result = next((prefix for prefix in prefixes if text.startswith(prefix)), None)
    return text if result is None else prefixes[result] + text.removeprefix(result)


def _swap_prefix(text: str, words: Mapping[str, str]) -> str:
    for ours, theirs in words.items():
        text = text.replace(ours, theirs)
    return text


def _module(name: str) -> str:
    return name.partition(".")[0]


def _rows_of(towers: Collection[str], rows: Iterable[Row]) -> Iterator[Row]:
    """The rows that only a model with one of these towers has."""
    return (row for row in rows if not set(towers).isdisjoint(row.when.split()))


def _pattern_of(key: Key) -> Key:
    """A pattern of all keys of a template, whatever stands in its fields."""
    return Key(("".join("*" if isinstance(part, Field) else part for part in key.parts),))


def decoder_layers(
    number: str,
    scanned: str,
    stacked: tuple[str, ...],
    rows: tuple[Row, ...],
    *,
    when: str = "",
    unless: str = "",
) -> Layers:
    """A group of layers with one number on both sides, `number` in the language of keys.

    Args:
        number: such as "layer", or "4*block+position".
        scanned: prefix below MaxText's decoder in a scanned model, such as "layers.layers_{position}"; empty
            as of `Layers`.
        stacked, rows, when, unless: as of `Layers`.
    """
    right, left = f"model.layers.{{{number}}}", f"decoder.layers_{{{number}}}"
    return Layers(right, left, f"decoder.{scanned}" if scanned else "", stacked, rows, when, unless)


def tower_blocks(right: str, left: str, rows: tuple[Row, ...], tower: str = "vision") -> Layers:
    """The blocks of a tower: each has a number of its own, whether or not MaxText scans its layers.

    Args:
        right, left: prefixes of keys, each with a field for the number.
        rows: what is below them.
        tower: the flag of the tower.
    """
    return Layers(right, left, left, (), rows, when=tower)


def nested_below(sizes: Mapping[str, Alternatives], *prefixes: str) -> dict[str, Alternatives]:
    """Sizes of which the fields stand below one of several prefixes; the first that has one counts."""
    named = {axis: [item for item in fields if isinstance(item, str)] for axis, fields in sizes.items()}
    defaults = {axis: fields[len(named[axis]) :] for axis, fields in sizes.items()}
    return {
        axis: (*(prefix + name for prefix in prefixes for name in names), *defaults[axis])
        for axis, names in named.items()
    }


@dataclass(frozen=True)
class Family:
    """A model family as data.

    Attributes:
        name: what users call it.
        model_types: values of `model_type` in a Hugging Face `config.json`.
        models: examples of released models, for help texts.
        rows: MaxText on the left (without flavour prefix), Hugging Face on the right; those outside of
            layers, the embedding first.
        layers: groups of layers, each with its rows.
        sizes: axis -> configuration fields that say its length; axes not named come from shapes.
        derived: axis -> formula over other axes, such as `layers // 6`.
        constants: axis -> length that is the same in every model.
        flags: flag -> rule.
        dropped: patterns of Hugging Face keys that hold nothing a model needs.
        left_out: templates of Hugging Face keys as files have them, or patterns, for which MaxText has
            no place.
        parts: parts of a model for which it has none, either, by name.
        towers: flags whose rows are a part beside the text model, such as "vision": a checkpoint of MaxText's
            may have it or not.
        spellings: how files write the rows' Hugging Face keys; the first is written where none is asked for.
        maxtext_vocab: vocabulary of released models -> rows that MaxText's own configuration has.
        hints: pattern of Hugging Face keys -> what to do where a file has such.
        never_scanned: why MaxText cannot scan the layers; empty where it can.
        unscanned_with_towers: why it scans those of the text model alone; empty where towers do not matter.
        others: families that models of these types are of where a rule is met, by name.
        settings: what MaxText must be told of a model.
    """

    name: str
    model_types: tuple[str, ...]
    models: tuple[str, ...]
    rows: tuple[Row, ...]
    layers: tuple[Layers, ...]
    sizes: Mapping[str, Alternatives]
    derived: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, FlagRule] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    parts: Mapping[str, UnsupportedPart] = field(default_factory=dict)
    towers: tuple[str, ...] = ()
    spellings: tuple[Spelling, ...] = (PLAIN,)
    maxtext_vocab: Mapping[int, int] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    settings: SettingRules = field(default_factory=SettingRules)
    never_scanned: str = ""
    unscanned_with_towers: str = ""
    others: Mapping[str, FlagRule] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)

    def refuse_scanned(self, hint: str, *, has_towers: bool = False) -> None:
        """Refuses a layout that MaxText does not have.

        Raises:
            UsageError: no model of this family can be scanned, or none with towers; with the hint.
        """
        why = self.never_scanned or (self.unscanned_with_towers if has_towers else "")
        if why:
            raise UsageError(f"MaxText does not scan the layers of family {self.name}: {why}", hint=hint)

    def layers_beyond_cycles(self, lengths: Mapping[str, int]) -> int:
        """Return the number of layers after the last complete cycle, in a family that scans complete cycles.

        Args:
            lengths: length of each axis of a model.
        """
        fields = [
            item for group in self.layers if not group.scanned for item in parse_key(group.right).fields
        ]
        return max((lengths.get(axis, 0) for item in fields for axis in item.axes), default=0)

    def all_rows(self, scan_axis: int | None) -> tuple[Row, ...]:
        """All rows, for layers stacked on `scan_axis`, or for layers with numbers where it is None."""
        if scan_axis not in self._built_rows:
            of_layers = (row for group in self.layers for row in group.all_rows(scan_axis))
            self._built_rows[scan_axis] = with_parts((*self.rows, *of_layers))
        return self._built_rows[scan_axis]

    @cached_property
    def _built_rows(self) -> dict[int | None, tuple[Row, ...]]:
        """What `all_rows` has made so far: everything that is asked of a family begins with it."""
        return {}

    def table(
        self,
        config: Mapping[str, Any] | None,
        location: str,
        *,
        scan_axis: int | None = None,
        spelling: Spelling = PLAIN,
        overrides: Mapping[str, Flag] | None = None,
        without: Collection[str] = (),
    ) -> Table:
        """The family's rows bound to what one model's configuration says.

        Args:
            config: the parsed `config.json`; None where there is none, and the arrays must show it.
            location: where it lies, for messages.
            scan_axis: the axis on which MaxText's layers are stacked; None for layers with numbers.
            spelling: how the Hugging Face files write their keys.
            overrides: flags that the user sets, whatever the configuration says.
            without: towers that are left out, whatever the configuration says.

        Raises:
            ConfigError: a size in the configuration is not one, or its layers do not form whole groups.
        """
        sizes = {axis: Size(n, f"family {self.name}") for axis, n in self.constants.items()}
        # A rule without fields needs no configuration.
        rules = {name: rule for name, rule in self.flags.items() if config is not None or not rule.field}
        silent = default_fields(config or {})
        flags = {name: rule.read(config or {}, location, silent) for name, rule in rules.items()}
        if config is not None:
            sizes = {**sizes_from_config(config, self.sizes, location, silent), **sizes}
            sizes = derive(sizes, self.derived, location)
        if scan_axis is not None and (rest := self.layers_beyond_cycles(lengths_of(sizes))):
            raise ConfigError(
                f"MaxText scans complete cycles of layers, and {plural(rest, 'layer')} would be left over",
                location=location,
                got=plural(sizes["layers"].length, "layer"),
                hint=f"{option('scan', False)} keeps them apart, for scan_layers=false in MaxText",
            )
        absent = {name: Flag(False, f"the model is taken without {name}") for name in without}
        return Table(
            rows=tuple(map(spelling.row, self.all_rows(scan_axis))),
            sizes=sizes,
            flags={**flags, **(overrides or {}), **absent},
            derived=self.derived,
            dropped=self.dropped,
            left_out=(*map(parse_key, self.unplaced_keys), *self.tower_patterns(without)),
            location=location,
            is_configured=config is not None,
            remedies=self.hints,
        )

    def spelling_of(self, names: Collection[str]) -> Spelling:
        """How files with arrays of these names write their keys; the first where none fits.

        Spellings may differ in the names of layers or towers alone: then that which has most of the names.
        """
        anchor = self.rows[0].right.key
        fitting = [item for item in self.spellings if str(item.key(anchor)) in names]
        if len(fitting) < 2:
            return next(iter(fitting), self.spellings[0])
        keys = [row.right.key for row in self.all_rows(None)]
        return max(fitting, key=lambda spelling: sum(spelling.key(key).first() in names for key in keys))

    def tower_patterns(self, towers: Collection[str]) -> tuple[Key, ...]:
        """Patterns of the towers' Hugging Face keys, however files write them."""
        keys = [row.right.key for row in _rows_of(towers, self.all_rows(None))]
        return tuple(
            dict.fromkeys(_pattern_of(spelling.key(key)) for spelling in self.spellings for key in keys)
        )

    def towers_in(self, names: Iterable[str]) -> tuple[str, ...]:
        """The towers of which an array is among these names of MaxText's."""
        modules = set(map(_module, names))
        return tuple(tower for tower in self.towers if modules & self._modules([tower]))

    def towers_not_in(self, names: Iterable[str]) -> tuple[str, ...]:
        """The others."""
        there = self.towers_in(names)
        return tuple(tower for tower in self.towers if tower not in there)

    def of_towers(self, names: Iterable[str], towers: Collection[str] | None = None) -> frozenset[str]:
        """Of names of MaxText's, those of these towers; None for all."""
        modules = self._modules(self.towers if towers is None else towers)
        return frozenset(name for name in names if _module(name) in modules)

    def _modules(self, towers: Collection[str]) -> set[str]:
        """What the towers' names begin with."""
        return {_module(str(row.left.key)) for row in _rows_of(towers, self.all_rows(None))}

    @property
    def unplaced_keys(self) -> tuple[str, ...]:
        """Templates and patterns of all Hugging Face keys for which MaxText has no place."""
        return (*self.left_out, *(key for part in self.parts.values() for key in part.keys))

    @property
    def unused(self) -> tuple[str, ...]:
        """Patterns of Hugging Face keys that no model of the family uses in computation."""
        idle = (key for part in self.parts.values() if part.idle for key in part.keys)
        return (*self.dropped, *idle)

    @property
    def text_layers(self) -> tuple[Layers, ...]:
        """The groups of layers that are no tower's."""
        return tuple(group for group in self.layers if not set(group.when.split()) & set(self.towers))

    def spelling_for(self, model_type: str | None) -> Spelling:
        """How files of a model of this type are written."""
        fitting = (spelling for spelling in self.spellings if model_type in spelling.model_types)
        return next(fitting, self.spellings[0])
