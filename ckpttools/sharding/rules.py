"""Rules that shard arrays over a mesh, by array name or by the names of the array's axes.

    Rules(arrays=(("*/wo/kernel", (("tensor",), ("fsdp",))),))        a pattern of paths -> its spec
    Rules(axes=(("embed", ("fsdp",)), ("mlp", ("tensor",))))          a logical axis -> mesh axes, as MaxText

If a pattern matches a path, its spec is used, whatever the names of the axes are. For all other arrays, axis
rules are applied in order, as in Flax's `logical_axis_rules`: a rule applies if no other axis of the array
already uses one of its mesh axes. A name can be repeated with fewer mesh axes.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from ckpttools.array.patterns import first_match
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, MappingError, UsageError, did_you_mean, similar_names
from ckpttools.core.message_terms import action
from ckpttools.core.text import array_count, sample_names
from ckpttools.formats.json_file import parse_json
from ckpttools.mapping.documents import fields, mapping, text
from ckpttools.maxtext.axis_names import (
    LOGICAL_AXIS_RULES,
    MESH_AXES,
    AxisNames,
    axis_names,
    is_maxtext_axis,
)
from ckpttools.sharding.mesh import MeshShape, Spec, check_spec, parse_spec, require_axes, spec_from_entries
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

_EXPECTED = "pairs of a logical axis and mesh axes, or patterns of paths and partition specs"


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for sharding arrays over meshes.

    Attributes:
        arrays: Patterns of paths (`ckpttools.array.patterns`) and their specs; the first match is used.
        axes: Logical axes and the mesh axes that shard them, in order.
        absent: Mesh axes that a mesh may lack; arrays are not sharded along them.
        is_closed: Whether a mesh can have no axes other than `absent`.
        name: The name of the rules in messages.
    """

    arrays: tuple[tuple[str, Spec], ...] = ()
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    absent: frozenset[str] = frozenset()
    is_closed: bool = False
    name: str = "rules"

    def check(self, mesh: MeshShape) -> None:
        """Raise UsageError if a rule names a mesh axis that the mesh lacks and that is not optional.

        Also raise it if the mesh has an axis without rules whose name resembles a missing one.
        """
        for pattern, spec in self.arrays:
            require_axes(spec, mesh, f"{self.name}: {pattern}")
        for logical, axes in self.axes:
            needed = tuple(name for name in axes if name not in self.absent)
            if (
                logical in mesh.axes
                and needed
                and not mesh.axes.keys() & needed
                and is_maxtext_axis(needed[0])
            ):
                raise UsageError(
                    "a rule has a mesh axis in place of the logical axis",
                    location=self.name,
                    got=f"{logical}: {', '.join(axes)}",
                    expected="a logical axis, then mesh axes",
                    hint=f"swap them: {needed[0]}: {logical}",
                )
            require_axes((needed,), mesh, f"{self.name}: {logical}")
        for axis in sorted(mesh.axes.keys() - self._mesh_axes - self.absent):
            expected = self.absent if self.is_closed else self._mesh_axes - mesh.axes.keys()
            near = similar_names(axis, expected, 1)
            if near or self.is_closed:
                raise UsageError(
                    "these rules do not know an axis of the mesh",
                    location=self.name,
                    got=f"{axis}={mesh.axes[axis]}",
                    expected=", ".join(sorted(expected)),
                    hint=f"did you mean {near[0]}?" if near else "name the axis as the rules do",
                )
        if self._mesh_axes and not mesh.axes.keys() & (self._mesh_axes | self.absent):
            raise UsageError(
                "the rules use no axis of the mesh, so all arrays would be replicated",
                location=self.name,
                got=str(mesh),
                expected=f"one of {', '.join(sorted(self._mesh_axes))}",
                hint="name the axes of the mesh as the rules do",
            )

    @property
    def _mesh_axes(self) -> frozenset[str]:
        """The mesh axes that the rules name."""
        entries = (entry for _, spec in self.arrays for entry in spec)
        return frozenset(chain(*entries, *(axes for _, axes in self.axes)))

    def check_names(self, tree: Tree, leaves: Collection[NamedArray] = ()) -> None:
        """Check the patterns and logical axes of the rules.

        Args:
            tree: The arrays to shard.
            leaves: The caller's names of the arrays and of their axes.

        Raises:
            UsageError: A pattern matches no array; or a rule shards a logical axis that no array has and that
                MaxText does not know either.
        """
        known = [*tree.arrays, *(leaf.path for leaf in leaves)]
        for pattern, _ in self.arrays:
            if not any(first_match(path, (pattern,)) for path in known):
                raise UsageError(
                    "a pattern of the rules matches no array",
                    location=self.name,
                    got=pattern,
                    hint=f"{action('inspect')} lists the names",
                )
        # Rules for MaxText also have axes of activations, and of models of other families.
        candidates = {logical: axes for logical, axes in self.axes if axes and not is_maxtext_axis(logical)}
        if candidates:
            named = (*axis_names(tree).values(), *(leaf.axes for leaf in leaves))
            axes_of_arrays = dict.fromkeys(name for axes in named for names in axes for name in names)
            for logical in (item for item in candidates if item not in axes_of_arrays):
                raise self._unknown_axis(logical, candidates[logical], sorted(axes_of_arrays))

    def _unknown_axis(self, logical: str, axes: tuple[str, ...], known: Sequence[str]) -> UsageError:
        hint = did_you_mean(logical, known) or did_you_mean(logical, dict(LOGICAL_AXIS_RULES))
        return UsageError(
            "no array has the logical axis of a rule",
            location=self.name,
            got=f"{logical}: {', '.join(axes)}",
            expected=f"one of {', '.join(known)}" if known else "named axes, which these arrays do not have",
            hint=hint or "correct it or leave it out; patterns of names shard arrays without named axes",
        )

    def spec(self, path: Path, axes: AxisNames, mesh: MeshShape) -> Spec:
        """Return the partition spec of an array.

        Args:
            path: The array's path in its tree.
            axes: Names of the array's axes; for each axis, the first name that has a rule is used. () if the
                names are unknown.
            mesh: The devices.
        """
        pattern = first_match(path, (item for item, _ in self.arrays))
        if pattern is not None:
            return next(spec for item, spec in self.arrays if item == pattern)
        result = _spec_from_axes(self.axes, axes)
        # Mesh axes of length one shard nothing, so MaxText leaves them out as well.
        return tuple(tuple(name for name in entry if mesh.axes.get(name, 1) > 1) for entry in result)

    def applies(self, path: Path, axes: AxisNames) -> bool:
        """Return whether a rule applies to this array. Other arrays are replicated."""
        known = {logical for logical, _ in self.axes}
        return first_match(path, (item for item, _ in self.arrays)) is not None or any(
            not known.isdisjoint(names) for names in axes
        )


@lru_cache(maxsize=1024)
def _spec_from_axes(rules: tuple[tuple[str, tuple[str, ...]], ...], axes: AxisNames) -> Spec:
    # Cached because all layers have the same result.
    known = {logical for logical, _ in rules}
    names = [
        next((alternative for alternative in alternatives if alternative in known), None)
        for alternatives in axes
    ]
    result: list[tuple[str, ...] | None] = [None] * len(axes)
    used: set[str] = set()
    for logical, cut in rules:
        for position, name in enumerate(names):
            if name == logical and result[position] is None and used.isdisjoint(cut):
                result[position] = cut
                used.update(cut)
    return tuple(item or () for item in result)


# MaxText's rules, for meshes in which axes that are not listed have length one.
MAXTEXT = Rules(axes=LOGICAL_AXIS_RULES, absent=frozenset(MESH_AXES), is_closed=True, name="maxtext")
PRESETS: Mapping[str, Rules] = {"maxtext": MAXTEXT}

RulesLike = Rules | str | Mapping[str, Any] | Sequence[tuple[str, Any]]
"""Rules, the name of a preset, a file, or pairs that `resolve_rules` accepts."""


def resolve_rules(value: RulesLike) -> Rules:
    """Convert a user's value to rules.

    Args:
        value: "maxtext", a file that ends in .toml or .json (`ckpttools.sharding.rules`), or pairs in a
            mapping or sequence. A pair is a logical axis with a mesh axis, several mesh axes or None; or a
            path pattern with a `PartitionSpec` or its text, "P('fsdp', None)".

    Raises:
        UsageError: The value is none of these.
        StorageError, FormatError, MappingError: The file cannot be read or is not valid.
    """
    if isinstance(value, Rules):
        return value
    if isinstance(value, str):
        return _mesh_axes(value)
    pairs = value.items() if isinstance(value, Mapping) else value
    return rules_from_pairs(pairs)


def mesh_axis_rules(mesh: MeshShape) -> Rules:
    """Return rules for templates whose axes are named after mesh axes."""
    return Rules(axes=tuple((name, (name,)) for name in mesh.axes), name="the names of axes")


def _mesh_axes(name: str) -> Rules:
    if name in PRESETS:
        return PRESETS[name]
    if not name.endswith((".toml", ".json")):
        raise UsageError(
            "these rules do not exist",
            got=name,
            expected=f"{', '.join(PRESETS)}, or a file that ends in .toml or .json",
            hint=did_you_mean(name, PRESETS),
        )

    return read_rules(name)


def rules_from_pairs(pairs: Iterable[Any], name: str = "rules") -> Rules:
    """Return rules from pairs, as in `resolve_rules`. A mesh may lack the axes that MaxText names."""
    arrays: list[tuple[str, Spec]] = []
    axes: list[tuple[str, tuple[str, ...]]] = []
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise UsageError("not a rule", location=name, got=repr(pair), expected=_EXPECTED)
        key, value = pair
        if not isinstance(key, str):
            raise UsageError("not a rule", location=name, got=repr(pair), expected=_EXPECTED)
        if (spec := _parse_spec_value(value, key)) is not None:
            arrays.append((key, spec))
        else:
            axes.append((key, check_spec((_parse_axes_value(value, f"{name}: {key}"),), key)[0]))
    return Rules(tuple(arrays), tuple(axes), frozenset(MESH_AXES), name=name)


def _parse_spec_value(value: object, location: str) -> Spec | None:
    """Return the spec if the value is one (text with parentheses, or a `PartitionSpec`), otherwise None."""
    if isinstance(value, str):
        return parse_spec(value) if "(" in value else None
    # A value can be a `PartitionSpec` only if JAX was imported.
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.sharding.PartitionSpec):
        return spec_from_entries(value, location)
    return None


def _parse_axes_value(value: object, location: str) -> tuple[str, ...]:
    if value is None or isinstance(value, str | tuple | list):
        return spec_from_entries([value or None], location)[0]
    raise UsageError("not a rule", location=location, got=repr(value), expected=_EXPECTED)


# Rules from a file, TOML or JSON, with the same two keys:
#
# axes = [["embed", "fsdp"], ["mlp", "tensor"], ["vocab", ["tensor", "fsdp"]]]     as `logical_axis_rules`
#
# [arrays]
# "*/token_embedder/embedding" = "P('tensor', 'fsdp')"
#
# `axes` can also be a table; each name then occurs once.


def read_rules(file: str) -> Rules:
    """Read rules from a file.

    Raises:
        StorageError: The file cannot be read.
        FormatError: The file is not TOML or JSON.
        MappingError: The file has other keys, or a value is not a rule. The message names the value.
    """
    location = parse(file)
    document = _read_document(location)
    try:
        result = fields({"axes": _parse_axis_pairs, "arrays": mapping(_parse_spec_text)})(
            document, f"{location}:"
        )
        by_axes = rules_from_pairs(result.get("axes", ()), str(location))
    except UsageError as error:
        raise MappingError(
            error.raw.message,
            location=error.location or location,
            got=error.raw.got,
            expected=error.raw.expected,
            hint=error.raw.hint,
        ) from error
    return replace(by_axes, arrays=tuple(result.get("arrays", {}).items()))


def _parse_spec_text(value: object, location: str) -> Spec:
    return parse_spec(text(value, location))


def _read_document(location: Location) -> Any:
    content = location.require_exists().read_bytes()
    try:
        return tomllib.loads(content.decode()) if location.suffix == ".toml" else parse_json(content)
    except (ValueError, RecursionError) as error:
        kind = "TOML" if location.suffix == ".toml" else "JSON"
        raise FormatError(f"not a {kind} file", location=location, got=error) from error


def _parse_axis_pairs(value: object, location: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        value = [[name, axes] for name, axes in value.items()]
    if not isinstance(value, list) or not all(isinstance(item, list) and len(item) == 2 for item in value):
        expected = 'a list of pairs, [["embed", "fsdp"], ...], or a table'
        raise MappingError("not a list of axis rules", location=location, expected=expected)
    return [(name, axes) for name, axes in value]


@dataclass(frozen=True, slots=True)
class NamedArray:
    """The names by which rules match an array.

    Attributes:
        path: Path of the array in the caller's tree, which can differ from the path in the checkpoint.
        axes: Names of the array's axes.
    """

    path: Path
    axes: AxisNames


@dataclass(frozen=True)
class AppliedRules:
    """Rules applied to the arrays of one tree on one mesh.

    Attributes:
        rules: The rules.
        tree: The tree, whose arrays have axis names.
        mesh: The devices.

    Raises:
        UsageError: A rule names an axis that the mesh lacks.
    """

    rules: Rules
    tree: Tree
    mesh: MeshShape
    _names: Mapping[Path, AxisNames] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.rules.check(self.mesh)
        object.__setattr__(self, "_names", axis_names(self.tree))

    def named_array(self, path: Path, caller_path: Path | None = None, axes: AxisNames = ()) -> NamedArray:
        """Return the names of an array for matching.

        Args:
            path: The array's path in the tree.
            caller_path: Path in the caller's tree; None if it is the same.
            axes: The caller's names of the array's axes; () if there are none.
        """
        known = self._names.get(path, ())
        if len(axes) == len(known):
            names = tuple((*first, *second) for first, second in zip(axes, known, strict=True))
        else:
            names = axes or known
        return NamedArray(path if caller_path is None else caller_path, names)

    def spec(self, array: NamedArray) -> Spec:
        """Return the partition spec of an array."""
        return self.rules.spec(array.path, array.axes, self.mesh)

    def specs(self) -> Iterator[tuple[Path, Spec]]:
        """Yield the path and partition spec of each array in the tree."""
        return ((path, self.spec(self.named_array(path))) for path in self.tree.arrays)

    def is_unmatched(self, array: NamedArray, rank: int) -> bool:
        """Return whether no rule applies to an array with several axes."""
        return rank > 1 and not self.rules.applies(array.path, array.axes)

    def remarks(self, arrays: Mapping[NamedArray, int] | None = None) -> Iterator[str]:
        """Yield remarks on arrays that match no rule.

        Args:
            arrays: Number of axes of each array; None for all arrays of the tree.
        """
        if arrays is None:
            arrays = {self.named_array(path): array.ndim for path, array in self.tree.arrays.items()}
        others = [array for array, rank in arrays.items() if self.is_unmatched(array, rank)]
        if not others:
            return
        known = {logical for logical, _ in self.rules.axes}
        of_others = (names for other in others for names in other.axes)
        axes = {"/".join(names) for names in of_others if names and known.isdisjoint(names)}
        text = f"; logical axes without a rule: {', '.join(sorted(axes))}" if axes else ""
        names_text = sample_names([keystr(other.path) for other in others])
        yield f"{array_count(others)} match no sharding rule and will be replicated: {names_text}{text}"
