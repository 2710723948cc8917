"""Model families: rows, the configuration fields that give sizes, and the flags that select rows."""

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
    """A rule that decides when a flag of the model is set.

    Attributes:
        field: Alternative configuration fields to read, in order, with dots for nested fields.
        equals: Values that set the flag; if empty, every value except false and 0.
        default: Value of the flag if no field is stated.
        remedy: What the user can do if the arrays contradict the configuration; `{tied}` stands for the
            option of this name.
        by_arrays: Whether the names or shapes of Hugging Face arrays decide, because the flag only describes
            how files were written. In the reverse conversion, the configuration decides.
    """

    field: tuple[str, ...]
    equals: tuple[object, ...] = ()
    default: bool = False
    remedy: str = ""
    by_arrays: bool = False

    def read(
        self, config: Mapping[str, Any], location: str, defaults: Mapping[str, Any] | None = None
    ) -> Flag:
        """Return the flag from a configuration, or from transformers' defaults.

        Args:
            config: The parsed `config.json`.
            location: The location of the configuration, for messages.
            defaults: The `default_fields` of the configuration, for reading many flags without recomputing
                them.
        """
        defaults = default_fields(config) if defaults is None else defaults
        name, value, source = first_stated(config, self.field, location, defaults)
        if name is not None:
            is_set = value in self.equals if self.equals else bool(value)
            return self._flag(is_set, source or f"{location}: {name} is {json.dumps(value)}")
        return self._flag(self.default, f"{location}: no {self.field[0]}" if self.field else "")

    def _flag(self, value: bool, source: str) -> Flag:
        return Flag(value, source, with_options(self.remedy), by_arrays=self.by_arrays)


@dataclass(frozen=True, slots=True)
class UnsupportedPart:
    """A trained part of a model that MaxText does not support.

    Attributes:
        keys: Patterns of the part's Hugging Face keys as they appear in files.
        promise: Configuration fields that state whether a model has the part. The first stated field counts;
            the first field is set to false in configurations without the part. Empty if there is no such
            field.
        idle: Whether no model of the family uses the part, so that it may be left out without the user's
            consent.
    """

    keys: tuple[str, ...]
    promise: tuple[str, ...] = ()
    idle: bool = False

    def of(self, names: Iterable[str]) -> list[str]:
        """Return the names that belong to this part."""
        return [name for name in names if matches_any(name, self.keys)]


@dataclass(frozen=True, slots=True)
class Spelling:
    """The spelling of Hugging Face names in some files, as replacements in the keys of the rows.

    Attributes:
        prefixes: Prefix in the rows -> prefix in the files.
        inner: Text inside the keys of the rows -> text in the files.
        model_types: Values of `model_type` whose files have this spelling; empty for all other values.
        name: The name for users.
        architecture: The transformers class in the configuration of such files; empty if it follows from the
            complete model's class.
        without: Fields of the complete model's text part that this configuration does not have, with dots for
            nested fields.
        defaults: Fields that this configuration must state if the complete model's text part does not,
            because their defaults differ.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    model_types: tuple[str, ...] = ()
    name: str = "hub"
    architecture: str = ""
    without: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    inner: Mapping[str, str] = field(default_factory=dict)

    def key(self, key: Key) -> Key:
        """Return a key template of the rows in this spelling."""
        first, *rest = key.parts
        if isinstance(first, str):
            first = _swapped_prefix(first, self.prefixes)
        parts = (first, *rest)
        return Key(tuple(_swap_prefix(part, self.inner) if isinstance(part, str) else part for part in parts))

    def plain(self, name: str) -> str:
        """Convert a name in these files to the name in the rows."""
        name = _swapped_prefix(name, {replacement: prefix for prefix, replacement in self.prefixes.items()})
        return _swap_prefix(name, {replacement: prefix for prefix, replacement in self.inner.items()})

    def row(self, row: Row) -> Row:
        """Return a row in this spelling."""
        if not (self.prefixes or self.inner):
            return row
        return replace(row, right=replace(row.right, key=self.key(row.right.key)))


PLAIN = Spelling()


def _swapped_prefix(text: str, prefixes: Mapping[str, str]) -> str:
    """Replace the first of these prefixes that the text starts with."""
    match = next((prefix for prefix in prefixes if text.startswith(prefix)), None)
    return text if match is None else prefixes[match] + text.removeprefix(match)


def _swap_prefix(text: str, words: Mapping[str, str]) -> str:
    for prefix, replacement in words.items():
        text = text.replace(prefix, replacement)
    return text


def _module(name: str) -> str:
    return name.partition(".")[0]


def _rows_of(towers: Collection[str], rows: Iterable[Row]) -> Iterator[Row]:
    """Return the rows that require one of these towers."""
    return (row for row in rows if not set(towers).isdisjoint(row.when.split()))


def _pattern_of(key: Key) -> Key:
    """Return a pattern that matches all keys of a template."""
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
    """Return a group of layers with the same index, in key syntax, on both sides.

    Args:
        number: The index in key syntax, such as "layer" or "4*block+position".
        scanned: Prefix below MaxText's decoder in a scanned model, such as "layers.layers_{position}"; empty
            as in `Layers`.
        stacked, rows, when, unless: As for `Layers`.
    """
    right, left = f"model.layers.{{{number}}}", f"decoder.layers_{{{number}}}"
    return Layers(right, left, f"decoder.{scanned}" if scanned else "", stacked, rows, when, unless)


def tower_blocks(right: str, left: str, rows: tuple[Row, ...], tower: str = "vision") -> Layers:
    """Return the blocks of a tower, which have indices even if MaxText scans the layers.

    Args:
        right, left: Prefixes of keys, each with a field for the number.
        rows: The rows below the prefixes.
        tower: The flag of the tower.
    """
    return Layers(right, left, left, (), rows, when=tower)


def nested_sizes(sizes: Mapping[str, Alternatives], *prefixes: str) -> dict[str, Alternatives]:
    """Return sizes with fields below each of several prefixes; the first stated field counts."""
    named = {axis: [item for item in fields if isinstance(item, str)] for axis, fields in sizes.items()}
    defaults = {axis: fields[len(named[axis]) :] for axis, fields in sizes.items()}
    return {
        axis: (*(prefix + name for prefix in prefixes for name in names), *defaults[axis])
        for axis, names in named.items()
    }


@dataclass(frozen=True)
class Family:
    """A model family, described by data.

    Attributes:
        name: The name for users.
        model_types: Values of `model_type` in a Hugging Face `config.json`.
        models: Examples of released models, for help texts.
        rows: Rows outside of layers, the embedding first, with MaxText on the left (without a flavor prefix)
            and Hugging Face on the right.
        layers: Groups of layers, each with its rows.
        sizes: Axis -> configuration fields that state its length; other lengths come from shapes.
        derived: Axis -> formula over other axes, such as `layers // 6`.
        constants: Axis -> length that is the same in every model.
        flags: Flag -> rule.
        dropped: Patterns of Hugging Face keys that a model does not need.
        left_out: Templates (as in files) or patterns of Hugging Face keys that MaxText does not support.
        parts: Parts of a model that MaxText does not support either, by name.
        towers: Flags of parts in addition to the text model, such as "vision", which a MaxText checkpoint may
            lack.
        spellings: How files spell the rows' Hugging Face keys; the first is the default for writing.
        maxtext_vocab: Vocabulary of released models -> vocabulary in MaxText's own configuration.
        hints: Pattern of Hugging Face keys -> hint for files with such keys.
        no_scan_reason: Why MaxText cannot scan the layers; empty if it can.
        unscanned_with_towers: Why MaxText can scan the layers only without towers; empty if towers do not
            matter.
        others: Family name -> the rule by which a model of these types belongs to that family.
        settings: The rules for the MaxText settings of a model.
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
    no_scan_reason: str = ""
    unscanned_with_towers: str = ""
    others: Mapping[str, FlagRule] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)

    def refuse_scanned(self, hint: str, *, has_towers: bool = False) -> None:
        """Refuse a scanned layout that MaxText does not support.

        Raises:
            UsageError: This family cannot be scanned, or cannot be scanned with towers. The error has the
                hint.
        """
        reason = self.no_scan_reason or (self.unscanned_with_towers if has_towers else "")
        if reason:
            raise UsageError(f"MaxText does not scan the layers of family {self.name}: {reason}", hint=hint)

    def layers_beyond_cycles(self, lengths: Mapping[str, int]) -> int:
        """Return the number of layers after the last complete cycle, if the family scans complete cycles.

        Args:
            lengths: The length of each axis of the model.
        """
        fields = [
            item for group in self.layers if not group.scanned for item in parse_key(group.right).fields
        ]
        return max((lengths.get(axis, 0) for item in fields for axis in item.axes), default=0)

    def all_rows(self, scan_axis: int | None) -> tuple[Row, ...]:
        """Return all rows for layers stacked on `scan_axis`, or for unscanned layers if it is None."""
        if scan_axis not in self._rows_cache:
            of_layers = (row for group in self.layers for row in group.all_rows(scan_axis))
            self._rows_cache[scan_axis] = with_parts((*self.rows, *of_layers))
        return self._rows_cache[scan_axis]

    @cached_property
    def _rows_cache(self) -> dict[int | None, tuple[Row, ...]]:
        """Return the cache of `all_rows`, which most other methods call first."""
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
        """Return the family's rows, bound to the configuration of a model.

        Args:
            config: The parsed `config.json`; None if there is none, in which case array shapes decide.
            location: The location of the configuration, for messages.
            scan_axis: The axis on which MaxText's layers are stacked; None for unscanned layers.
            spelling: How the Hugging Face files spell their keys.
            overrides: Flags that the user sets, which override the configuration.
            without: Towers to leave out, even if the configuration has them.

        Raises:
            ConfigError: A size in the configuration is invalid, or the layers do not form complete groups.
        """
        sizes = {axis: Size(n, f"family {self.name}") for axis, n in self.constants.items()}
        # A rule without fields needs no configuration.
        rules = {name: rule for name, rule in self.flags.items() if config is not None or not rule.field}
        silent = default_fields(config or {})
        flags = {name: rule.read(config or {}, location, silent) for name, rule in rules.items()}
        if config is not None:
            sizes = {**sizes_from_config(config, self.sizes, location, silent), **sizes}
            sizes = derive(sizes, self.derived, location)
        if scan_axis is not None and (leftover := self.layers_beyond_cycles(lengths_of(sizes))):
            raise ConfigError(
                f"MaxText scans complete cycles of layers, and {plural(leftover, 'layer')} would be left "
                f"over",
                location=location,
                got=plural(sizes["layers"].length, "layer"),
                hint=f"{option('scan', False)} keeps the layers unscanned, for scan_layers=false in MaxText",
            )
        absent = {name: Flag(False, f"{name} is left out of the model") for name in without}
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
        """Return the spelling of files with these array names; the first spelling if none matches.

        If spellings differ only in the names of layers or towers, the one that matches most names is
        returned.
        """
        anchor = self.rows[0].right.key
        matching = [item for item in self.spellings if str(item.key(anchor)) in names]
        if len(matching) < 2:
            return next(iter(matching), self.spellings[0])
        keys = [row.right.key for row in self.all_rows(None)]
        return max(matching, key=lambda spelling: sum(spelling.key(key).first() in names for key in keys))

    def tower_patterns(self, towers: Collection[str]) -> tuple[Key, ...]:
        """Return patterns of the towers' Hugging Face keys, in all spellings."""
        keys = [row.right.key for row in _rows_of(towers, self.all_rows(None))]
        return tuple(
            dict.fromkeys(_pattern_of(spelling.key(key)) for spelling in self.spellings for key in keys)
        )

    def towers_in(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the towers that have arrays among these MaxText names."""
        modules = set(map(_module, names))
        return tuple(tower for tower in self.towers if modules & self._modules([tower]))

    def towers_not_in(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the towers that have no arrays among these MaxText names."""
        present = self.towers_in(names)
        return tuple(tower for tower in self.towers if tower not in present)

    def of_towers(self, names: Iterable[str], towers: Collection[str] | None = None) -> frozenset[str]:
        """Return the MaxText names that belong to these towers; None for all towers."""
        modules = self._modules(self.towers if towers is None else towers)
        return frozenset(name for name in names if _module(name) in modules)

    def _modules(self, towers: Collection[str]) -> set[str]:
        """Return the first keys of the towers' MaxText names."""
        return {_module(str(row.left.key)) for row in _rows_of(towers, self.all_rows(None))}

    @property
    def unplaced_keys(self) -> tuple[str, ...]:
        """Return templates and patterns of all Hugging Face keys that MaxText does not support."""
        return (*self.left_out, *(key for part in self.parts.values() for key in part.keys))

    @property
    def unused(self) -> tuple[str, ...]:
        """Return patterns of Hugging Face keys that no model of the family uses in its computation."""
        idle = (key for part in self.parts.values() if part.idle for key in part.keys)
        return (*self.dropped, *idle)

    @property
    def text_layers(self) -> tuple[Layers, ...]:
        """Return the groups of layers that belong to the text model."""
        return tuple(group for group in self.layers if not set(group.when.split()) & set(self.towers))

    def spelling_for(self, model_type: str | None) -> Spelling:
        """Return the spelling of files for a model type."""
        matching = (spelling for spelling in self.spellings if model_type in spelling.model_types)
        return next(matching, self.spellings[0])
