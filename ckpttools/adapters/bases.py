"""The base model of an adapter: its weights under Hugging Face names, and the mapping to its own names.

An adapter's changes have Hugging Face names. For a MaxText base, the changes are converted by the rows of the
family like any weights, in a model that has zeros elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from ckpttools.adapters.factors import Adapter
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, Stack, distinct_arrays, pad_array, stack, take
from ckpttools.array.tree import Path, Tree, by_name, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import CheckpointError, FormatError, listing, similar_names
from ckpttools.core.message_terms import action, option
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count
from ckpttools.formats.adapters import ADAPTER, BASE_NAME
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.flags import Flag
from ckpttools.mapping.keys import Key
from ckpttools.maxtext.bound_model import ModelRows, model_rows
from ckpttools.maxtext.conversion_options import ToHuggingFace
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.model_options import ModelOptions, family_for, rope_flags
from ckpttools.maxtext.source_checks import name_style
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.family import Family
from ckpttools.model_families.registry import family_of
from ckpttools.quantized.unsupported_errors import refuse_quantized
from ckpttools.quantized.view import quantized_view
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.stores.web.hub_name import HubName, is_model_name
from ckpttools.transforms.cast import cast

_FLOAT32 = DTYPES["float32"]
# The name of a module of Mixtral, Phi MoE and MiniMax in transformers 5 (conversion_mapping.py), and in Hub
# files.
_RENAMED = ".mlp.", ".block_sparse_moe."
# Adding negative zero does not change any bit of a value.
_NEGATIVE_ZERO = b"\x00\x00\x00\x80"


@dataclass(frozen=True)
class Base:
    """The base model of an adapter.

    Attributes:
        tree: The opened tree, with quantized weights as values.
        weights: Its arrays under Hugging Face names.
        config: The content of its `config.json`; None if there is none.
        rows: The rows of a MaxText base; None for a Hugging Face one.
        model: The model options that the user set.
    """

    tree: Tree
    weights: Mapping[str, LazyArray]
    config: Mapping[str, Any] | None
    rows: ModelRows | None = None
    model: ModelOptions = field(default_factory=ModelOptions)

    def moved(self, changes: Mapping[str, LazyArray]) -> dict[Path, LazyArray]:
        """Map changes to the base's own paths and shapes.

        Args:
            changes: The float32 array to add to each weight, by name.
        """
        if self.rows is None:
            return {path: changes[name] for name, path in self._paths.items() if name in changes}
        return self._pad_vocabulary(self.map_to_base_names(changes))

    def replacements_at_paths(self, arrays: Mapping[str, LazyArray]) -> dict[Path, LazyArray]:
        """Map replacement weights to the base's paths, shapes and dtypes.

        Layers in a stack that the adapter does not replace remain those of the base.

        Args:
            arrays: The array that replaces each weight, by name.

        Raises:
            FormatError: The base stores a weight in one array with others, but not as a stack.
        """
        if self.rows is None:
            return {
                path: cast(item, self.tree.arrays[path].dtype) for path, item in self.moved(arrays).items()
            }
        wide = {name: cast(array, _FLOAT32) for name, array in arrays.items()}
        new = {id(item) for item in distinct_arrays(wide.values())}
        return {
            path: self._replace_parts(path, converted, self.tree.arrays[path], new)
            for path, converted in self.moved(wide).items()
        }

    def _replace_parts(
        self, path: Path, converted: LazyArray, base_array: LazyArray, replacement_ids: Collection[int]
    ) -> LazyArray:
        """Return `converted`, with the parts of the base that have no replacement."""
        inside = list(distinct_arrays([converted]))
        if not any(id(replacements) in replacement_ids for replacements in inside):
            return base_array
        if isinstance(converted, Stack):
            parts = enumerate(converted.parts)
            replacements = [
                self._replace_parts(path, part, take(base_array, converted.axis, k), replacement_ids)
                for k, part in parts
            ]
            return stack(replacements, converted.axis)
        if any(
            isinstance(replacements, Constant) and id(replacements) not in replacement_ids
            for replacements in inside
        ):
            raise FormatError(
                "an array of the base holds weights that the adapter replaces, and weights that it does not",
                location=f"{self.tree.metadata.location}, {keystr(path)}",
                hint="merge it into the Hugging Face model, and convert that",
            )
        return cast(converted, base_array.dtype)

    def map_to_base_names(self, changes: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """Map changes to the dotted names of a MaxText base. Nothing is added elsewhere."""
        assert self.rows is not None
        zeros = {
            name: Constant(array.shape, _FLOAT32, _NEGATIVE_ZERO)
            for name, array in self.weights.items()
            if name not in changes
        }
        converted = self.rows.table.to_left({**zeros, **changes}).arrays
        change_ids = {id(item) for item in distinct_arrays(changes.values())}
        return {
            name: array
            for name, array in converted.items()
            if any(id(item) in change_ids for item in distinct_arrays([array]))
        }

    def _pad_vocabulary(self, arrays: Mapping[str, LazyArray]) -> dict[Path, LazyArray]:
        """Return arrays at their paths, zero-padded to MaxText's vocabulary."""
        assert self.rows is not None
        view = view_of(self.tree)
        paths = {dotted(path): tree_path for path, tree_path in view.homes.items()}
        unsupported = [
            name for name in arrays if name not in paths or paths[name] in view.leading_layer_paths
        ]
        if unsupported:
            raise FormatError(
                "these arrays are stacked differently from the others, which adapters do not support:"
                + listing(unsupported),
                location=self.tree.metadata.location,
            )
        return {
            paths[name]: pad_array(array, self.tree.arrays[paths[name]].shape)
            for name, array in arrays.items()
        }

    @cached_property
    def float32_weights(self) -> Mapping[str, LazyArray]:
        """Return the weights as float32, before rounding to Hugging Face's dtypes."""
        if self.rows is None:
            return {name: cast(array, _FLOAT32) for name, array in self.weights.items()}
        wide = {
            name: cast(array, _FLOAT32) for name, array in self.rows.arrays.items() if array.dtype.is_float
        }
        return replace(self.rows, arrays={**self.rows.arrays, **wide}).as_huggingface().arrays

    @cached_property
    def _paths(self) -> Mapping[str, Path]:
        return {dotted(path): path for path in self.tree.arrays}

    @cached_property
    def family(self) -> Family | None:
        """Return the model's family, if it is known."""
        if self.rows is not None:
            return self.rows.family
        if self.model.family is not None:
            return family_for(self.config, self.model, self.tree.metadata.location)
        try:
            return family_of(self.config or {}, CONFIG)
        except CheckpointError:
            return None

    @property
    def user_flags(self) -> Mapping[str, Flag]:
        """Return the family flags that the user sets."""
        return {} if self.family is None else rope_flags(self.family, self.model)

    def named(self, name: str) -> str | None:
        """Return the base's name for a weight in any spelling of its family; None if the base lacks it."""
        return next((spelling for spelling in self._spellings(name) if spelling in self.weights), None)

    def _spellings(self, name: str) -> Iterator[str]:
        yield name
        yield name.replace(*_RENAMED)
        if self.family is None:
            return
        for other in self.family.spellings:
            plain = other.plain(name)
            yield from (str(spelling.key(Key((plain,)))) for spelling in self.family.spellings)


def open_base(tree: Tree, model: ModelOptions | None = None, like: LocationLike | None = None) -> Base:
    """Return the base of a tree. Quantized weights count as their values in bfloat16.

    Args:
        tree: A Hugging Face model, or a MaxText checkpoint.
        model: The model options that the user set.
        like: Hugging Face directory of a MaxText model; None for the files stored with it.

    Raises:
        FormatError: Weights are quantized and cannot be dequantized, or two weights have the same name.
        CheckpointError: See `ckpttools.maxtext.to_hf.model_rows`.
    """
    tree = quantized_view(tree).plain().tree
    if name_style(tree.arrays) != "maxtext":
        weights = by_name(tree.arrays)
        refuse_quantized(weights, tree.metadata.config, tree.metadata.location)
        return Base(tree, weights, tree.metadata.config, model=model or ModelOptions())
    options = ToHuggingFace(like=like, model=model or ModelOptions())
    rows = model_rows(tree, options, ModelFiles.of(tree, like))
    return Base(tree, rows.as_huggingface().arrays, rows.config, rows, options.model)


def missing_weights_error(
    adapter: str, base: str, missing: Collection[str], names: Iterable[str]
) -> FormatError:
    """Return the error for changed weights that the base does not have."""
    known = list(names)
    near = [
        f"{name} (near {similar[0]})" if (similar := similar_names(name, known, 1)) else name
        for name in missing
    ]
    return FormatError(
        f"the adapter changes weights that the base does not have: {array_count(missing)}" + listing(near),
        location=adapter,
        got=base,
        expected="the model that was adapted",
        hint=f"{action('inspect', adapter)} shows the base model that the adapter records; with "
        f"{option('against', base)} it lists every mismatch",
    )


# A location is a model directory, a file in it, or an item in one of its steps.
_MAX_LEVELS_BELOW_NAME = 3


@dataclass(frozen=True)
class BaseName:
    """The name of a base model, with notes for the user."""

    text: str
    notes: Notes


def base_name(base: Base, adapter: Adapter, requested: str | None) -> BaseName:
    """Return the requested base name, or the recorded Hub name, or the base's location.

    A recorded directory of the training machine does not exist here, so only Hub names are used.
    """
    if requested:
        return BaseName(requested, Notes())
    recorded = next((item for item in _recorded_names(base, adapter) if _is_hub_name(item)), None)
    if recorded is not None:
        return BaseName(recorded, Notes())
    location = base.tree.metadata.location
    remark = (
        f"{ADAPTER} names the base by its local path, {location}, because its name on the Hub is unknown; "
        "set it with "
        f"{option('base_name', 'NAME')} for others to load the adapter"
    )
    return BaseName(location, Notes(remarks=(remark,)))


def _recorded_names(base: Base, adapter: Adapter) -> Iterator[str]:
    yield str(adapter.config.get(BASE_NAME) or "")
    yield str((base.config or {}).get("_name_or_path") or "")
    location = parse(base.tree.metadata.location)
    if location.store.scheme == "hf":
        yield HubName.of(location.key).repo


def _is_hub_name(name: str) -> bool:
    """Return whether a text has the form org/name, or is a bare name.

    A relative directory may also match; the name is then as useful as its path.
    """
    return is_model_name(name) or is_model_name(f"org/{name}")


def other_base_remarks(base: Base, adapter: Adapter, used: str) -> Iterator[str]:
    """Yield a remark if an adapter names another base model.

    Args:
        base: The model that the command uses as the base.
        adapter: The adapter, which may name another base.
        used: How the base is used, a participle and a preposition: "merged into".
    """
    named, location = adapter.config.get(BASE_NAME), base.tree.metadata.location
    # The recorded location may use a store that is unknown here.
    last = named.rstrip("/").rpartition("/")[2] if isinstance(named, str) else ""
    if last and last not in parse(location).parts[-_MAX_LEVELS_BELOW_NAME:]:
        yield (
            f"the adapter names {named} as its base, and is {used} {location}: names and shapes are "
            "compared, "
            "values cannot be"
        )


def recorded_base(tree: Tree) -> str:
    """Return the base name recorded in a MaxText adapter; "" without one."""
    recorded = tree.metadata.custom.get(BASE_NAME)
    return recorded if isinstance(recorded, str) else ""
