"""The base model of an adapter: its weights under Hugging Face names, and the mapping to its own names.

What an adapter changes is said in Hugging Face's names. For a base that is MaxText's it goes through the rows
of the family like any weights: the changes, in a model that is zero otherwise, are converted as a model is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from shlex import quote
from typing import Any

from ckpttools.adapters.factors import Adapter
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, Stack, distinct_arrays, pad_array, stack, take
from ckpttools.array.tree import Path, Tree, by_name, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import CheckpointError, FormatError, listing, near_names
from ckpttools.core.message_terms import option
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
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.stores.web.hub_name import HubName, is_model_name
from ckpttools.transforms.cast import cast
from ckpttools.transforms.dequantize import dequantize_with_notes

_FLOAT32 = DTYPES["float32"]
# A module of Mixtral, Phi MoE and MiniMax in transformers 5 (conversion_mapping.py), and in files of the hub.
_RENAMED = ".mlp.", ".block_sparse_moe."
# Added to anything it changes no bit.
_NEGATIVE_ZERO = b"\x00\x00\x00\x80"


@dataclass(frozen=True)
class Base:
    """The base model of an adapter.

    Attributes:
        tree: as it was opened, quantized weights as numbers.
        weights: its arrays under Hugging Face's names.
        config: what its `config.json` says; None where none is known.
        rows: of a MaxText base; None for a Hugging Face one.
        model: what the user says of it.
    """

    tree: Tree
    weights: Mapping[str, LazyArray]
    config: Mapping[str, Any] | None
    rows: ModelRows | None = None
    model: ModelOptions = field(default_factory=ModelOptions)

    def moved(self, changes: Mapping[str, LazyArray]) -> dict[Path, LazyArray]:
        """Map changes to the base's own paths and shapes.

        Args:
            changes: name -> what is added to a weight, float32.
        """
        if self.rows is None:
            return {path: changes[name] for name, path in self._paths.items() if name in changes}
        return self._padded(self.in_rows(changes))

    def replacements_at_paths(self, arrays: Mapping[str, LazyArray]) -> dict[Path, LazyArray]:
        """Map replacement weights to the base's paths, shapes and dtypes.

        Of stacked layers those that are not exchanged stay the base's own.

        Args:
            arrays: name -> what takes the place of a weight.

        Raises:
            FormatError: the base has a weight in one array with others, as no stack.
        """
        if self.rows is None:
            return {
                path: cast(item, self.tree.arrays[path].dtype) for path, item in self.moved(arrays).items()
            }
        wide = {name: cast(array, _FLOAT32) for name, array in arrays.items()}
        new = {id(item) for item in distinct_arrays(wide.values())}
        return {
            path: self._replace_parts(path, built, self.tree.arrays[path], new)
            for path, built in self.moved(wide).items()
        }

    def _replace_parts(self, path: Path, built: LazyArray, own: LazyArray, new: Collection[int]) -> LazyArray:
        """Return `built`, with the base's own array wherever nothing is new."""
        inside = list(distinct_arrays([built]))
        if not any(id(each) in new for each in inside):
            return own
        if isinstance(built, Stack):
            parts = enumerate(built.parts)
            each = [self._replace_parts(path, part, take(own, built.axis, k), new) for k, part in parts]
            return stack(each, built.axis)
        if any(isinstance(each, Constant) and id(each) not in new for each in inside):
            raise FormatError(
                "an array of the base has weights that the adapter replaces and others",
                location=f"{self.tree.metadata.location}, {keystr(path)}",
                hint="merge it into the Hugging Face model, and convert that",
            )
        return cast(built, own.dtype)

    def in_rows(self, changes: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """Map changes to the dotted names of a MaxText base. Nothing is added elsewhere."""
        assert self.rows is not None
        nothing = {
            name: Constant(array.shape, _FLOAT32, _NEGATIVE_ZERO)
            for name, array in self.weights.items()
            if name not in changes
        }
        built = self.rows.table.to_left({**nothing, **changes}).arrays
        known = {id(item) for item in distinct_arrays(changes.values())}
        return {
            name: array
            for name, array in built.items()
            if any(id(item) in known for item in distinct_arrays([array]))
        }

    def _padded(self, built: Mapping[str, LazyArray]) -> dict[Path, LazyArray]:
        """Return arrays at their paths, zero-padded to MaxText's vocabulary."""
        assert self.rows is not None
        view = view_of(self.tree)
        homes = {dotted(path): home for path, home in view.homes.items()}
        odd = [name for name in built if name not in homes or homes[name] in view.on_first_axis]
        if odd:
            raise FormatError(
                "these arrays are stacked otherwise than the others, and adapters of such are not read:"
                + listing(odd),
                location=self.tree.metadata.location,
            )
        return {
            homes[name]: pad_array(array, self.tree.arrays[homes[name]].shape)
            for name, array in built.items()
        }

    @cached_property
    def in_float32(self) -> Mapping[str, LazyArray]:
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
    def chosen_flags(self) -> Mapping[str, Flag]:
        """Return the family flags that the user sets."""
        return {} if self.family is None else rope_flags(self.family, self.model)

    def named(self, name: str) -> str | None:
        """Return the base's name for a weight in any spelling of its family; None if absent."""
        return next((spelling for spelling in self._spellings(name) if spelling in self.weights), None)

    def _spellings(self, name: str) -> Iterator[str]:
        yield name
        yield name.replace(*_RENAMED)
        if self.family is None:
            return
        for theirs in self.family.spellings:
            plain = theirs.plain(name)
            yield from (str(ours.key(Key((plain,)))) for ours in self.family.spellings)


def open_base(tree: Tree, model: ModelOptions | None = None, like: LocationLike | None = None) -> Base:
    """Return the base of a tree. Quantized weights count as their values in bfloat16.

    Args:
        tree: a Hugging Face model, or a MaxText checkpoint.
        model: what the user says of it.
        like: directory of the model that a MaxText one came from; None for what was carried along.

    Raises:
        FormatError: weights are quantized and no numbers can be made of them, or two have one name.
        CheckpointError: as of `ckpttools.maxtext.to_hf.model_rows`.
    """
    tree = dequantize_with_notes(tree).tree
    if name_style(tree.arrays) != "maxtext":
        weights = by_name(tree.arrays)
        refuse_quantized(weights, tree.metadata.config, tree.metadata.location)
        return Base(tree, weights, tree.metadata.config, model=model or ModelOptions())
    options = ToHuggingFace(like=like, model=model or ModelOptions())
    rows = model_rows(tree, options, ModelFiles.of(tree, like))
    return Base(tree, rows.as_huggingface().arrays, rows.config, rows, options.model)


def missing_weights_error(
    adapter: str, base: str, lacking: Collection[str], names: Iterable[str]
) -> FormatError:
    """Return the error for changed weights that the base does not have."""
    known = list(names)
    near = [
        f"{name} (near {result[0]})" if (result := near_names(name, known, 1)) else name for name in lacking
    ]
    return FormatError(
        f"the base has no such weights, and the adapter changes them: {array_count(lacking)}" + listing(near),
        location=adapter,
        got=base,
        expected="the model that was adapted",
        hint=f"`ckpt inspect tree {quote(adapter)}` says which that is, if the adapter does; with "
        f"`--against {quote(base)}` it lists all that does not fit",
    )


# A model is named by its directory, by a file in it, or by the item in a step in it.
_BELOW_NAME = 3


@dataclass(frozen=True)
class BaseName:
    """The name of a base model, with notes for the user."""

    text: str
    notes: Notes


def base_name(base: Base, adapter: Adapter, given: str | None) -> BaseName:
    """Return the given base name, else the recorded hub name, else the base's location.

    Only Hub names count, because directories of the training machine do not exist here.
    """
    if given:
        return BaseName(given, Notes())
    result = next((item for item in _recorded_names(base, adapter) if _is_hub_name(item)), None)
    if result is not None:
        return BaseName(result, Notes())
    location = base.tree.metadata.location
    remark = (
        f"{ADAPTER} names the base by its place here, {location}: nothing says its name on the hub; "
        "say it with "
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

    A relative directory may match too; the written name is then as useful as its path.
    """
    return is_model_name(name) or is_model_name(f"org/{name}")


def other_base_remarks(base: Base, adapter: Adapter, used: str) -> Iterator[str]:
    """Yield a remark if an adapter names another base model.

    Args:
        base: what is taken for the model that it is of.
        adapter: which may name another.
        used: what is done with it, a participle and a preposition: "merged into".
    """
    named, location = adapter.config.get(BASE_NAME), base.tree.metadata.location
    # A place where it was trained may be of a store that is not known here.
    last = named.rstrip("/").rpartition("/")[2] if isinstance(named, str) else ""
    if last and last not in parse(location).parts[-_BELOW_NAME:]:
        yield (
            f"the adapter says that it is of {named}, and is {used} {location}: names and shapes are "
            "compared, "
            "values cannot be"
        )


def recorded_base(tree: Tree) -> str:
    """Return the base name recorded in a MaxText adapter; "" without one."""
    noted = tree.metadata.custom.get(BASE_NAME)
    return noted if isinstance(noted, str) else ""
