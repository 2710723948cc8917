"""Check that two configurations give the arrays of a checkpoint the same values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttools.array.fingerprint import Describer
from ckpttools.array.lazy import LazyArray
from ckpttools.core.errors import CheckpointError, ConfigError
from ckpttools.core.message_terms import action, option
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.flags import Flag
from ckpttools.mapping.sizes import Size
from ckpttools.mapping.table import Table
from ckpttools.maxtext.layout import VOCAB
from ckpttools.model_families.family import Family
from ckpttools.model_families.registry import family_named, family_of, names_a_file

# Flag -> its description, and the option that sets it.
_FLAG_CHOICES = {
    "interleaved": ("the order of rotary pairs", "rope_layout", "halves", " or interleaved"),
    "tied": ("how the output head is handled", "tied", "keep", ", drop or materialize"),
}


def require_same_family(
    family: Family, config: Mapping[str, Any], location: str, carried: Mapping[str, Any]
) -> None:
    """Raise an error if a configuration belongs to another family than the one in the checkpoint.

    Args:
        family: The family of `config`.
        config: The configuration that is used.
        location: The location of `config`.
        carried: The configuration in the checkpoint.

    Raises:
        ConfigError: The configuration in the checkpoint belongs to another or an unknown family.
    """
    try:
        name = family_of(carried, location).name
    except ConfigError:
        name = None
    if name != family.name:
        raise _contradiction_error(
            location,
            f"{_model_type_text(config)} (family {family.name})",
            f"{_model_type_text(carried)} ({f'family {name}' if name else 'of no known family'})",
            f"leave {option('like')} out, or choose the family with {option('family', 'NAME')}",
        )


def require_own_rows(
    named: str | None,
    config: Mapping[str, Any],
    location: str,
    convert: Callable[[Family], Mapping[str, LazyArray]],
) -> None:
    """Raise an error if the user's family gives other values than the configuration's own family.

    Family files are always accepted, and so are families that list the model's type. If the rows of the
    configuration's own family do not match the arrays, any family is accepted.

    Args:
        named: The family that the user names, or None.
        config: The configuration of the checkpoint.
        location: The location of the configuration.
        convert: Converts the arrays with a family; raises CheckpointError if the family does not match.

    Raises:
        ConfigError: The configuration's family also matches the arrays, and converts them to different
            values.
    """
    if named is None or names_a_file(named):
        return
    family = family_named(named)
    if config.get("model_type") in family.model_types:
        return
    try:
        own = family_of(config, location)
        expected = _described_arrays(convert(own))
    except CheckpointError:
        return
    if _described_arrays(convert(family)) != expected:
        file = option("family", "FILE.toml")
        raise ConfigError(
            "the rows of this family would give the arrays other values than the model's own family",
            location=location,
            got=option("family", named),
            expected=f"{_model_type_text(config)} (family {own.name}), whose rows match these arrays as well",
            hint=f"leave {option('family')} out; if {CONFIG} is wrong, correct its model_type; to use these "
            f"rows on purpose, {action('families.toml', named)} writes a file of them for {file}",
        )


def require_same_values(mine: Table, carried: Table, arrays: Mapping[str, LazyArray], location: str) -> None:
    """Raise an error if a configuration gives other values than the one in the checkpoint.

    Args:
        mine: The rows bound to the configuration that is used.
        carried: The same family's rows bound to the configuration in the checkpoint.
        arrays: MaxText arrays that match `mine`.
        location: The location of the configuration that is used.

    Raises:
        ConfigError: The configurations differ in a flag, or in a size that affects values.
    """
    for name, flag in mine.flags.items():
        other = carried.flags.get(name)
        if other is not None and other.value != flag.value:
            raise _contradiction_error(
                location, _flag_text(name, flag), _flag_text(name, other), _flag_hint(name)
            )
    # Vocabulary rows may be cut off, depending on their content.
    differing = [
        axis
        for axis, size in mine.sizes.items()
        if axis != VOCAB and axis in carried.sizes and carried.sizes[axis].length != size.length
    ]
    if differing and not _has_same_arrays(mine, carried, arrays):
        got, expected = (_sizes_text(table.sizes, differing) for table in (mine, carried))
        raise _contradiction_error(location, got, expected, _flag_hint(""))


def _has_same_arrays(mine: Table, carried: Table, arrays: Mapping[str, LazyArray]) -> bool:
    """Return whether both tables give the same arrays, or the checkpoint's configuration does not match."""
    sizes = {**carried.sizes, **{axis: size for axis, size in mine.sizes.items() if axis == VOCAB}}
    try:
        other = replace(carried, sizes=sizes).to_right(arrays, (VOCAB,))
    except CheckpointError:
        return True
    return _described_arrays(mine.to_right(arrays, (VOCAB,)).arrays) == _described_arrays(other.arrays)


def _described_arrays(arrays: Mapping[str, LazyArray]) -> list[object]:
    describer = Describer()
    return [(key, list(describer.lines(array))) for key, array in sorted(arrays.items())]


def _flag_hint(flag: str) -> str:
    """Return the hint for a contradicted flag, or a general hint."""
    leave = f"leave {option('like')} out, or"
    if flag not in _FLAG_CHOICES:
        return f"{leave} use the model that this checkpoint came from"
    what, name, first, others = _FLAG_CHOICES[flag]
    return f"{leave} set {what} with {option(name, first)}{others}"


def _contradiction_error(location: str, got: str, expected: str, hint: str) -> ConfigError:
    return ConfigError(
        "this configuration would give the arrays other values than the one in the checkpoint",
        location=location,
        got=got,
        expected=f"{expected}, as stored in the checkpoint",
        hint=hint,
    )


def _model_type_text(config: Mapping[str, Any]) -> str:
    return f"model_type {json.dumps(config.get('model_type'))}"


def _flag_text(name: str, flag: Flag) -> str:
    return f"{name} is {'set' if flag.value else 'not set'} ({flag.source})"


def _sizes_text(sizes: Mapping[str, Size], axes: Sequence[str]) -> str:
    return ", ".join(f"{axis} {sizes[axis].length} ({sizes[axis].source})" for axis in axes)
