"""Identify the model that MaxText arrays belong to: its family, bound to the model's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Metadata, Tree, by_name, keystr
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, ConfigError, UsageError, did_you_mean
from ckpttools.core.message_terms import option
from ckpttools.formats.base import SIDECARS
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.build import Mapped
from ckpttools.mapping.table import Table
from ckpttools.maxtext import tied_embeddings as tying
from ckpttools.maxtext.config.to_hf_config import SETTINGS, config_from_settings
from ckpttools.maxtext.config_differences import require_own_rows, require_same_family, require_same_values
from ckpttools.maxtext.conversion_options import TEXT, ToHuggingFace
from ckpttools.maxtext.family_layouts import family_as_stored
from ckpttools.maxtext.layers import LayerNotes, with_layer_notes
from ckpttools.maxtext.model_config import text_config
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.model_options import family_for, rope_flags
from ckpttools.maxtext.scan_axis import known_scan_axis, stored_scan_axis, with_scan_axis
from ckpttools.maxtext.versions import VOCAB
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.family import Family, Spelling
from ckpttools.model_families.registry import families, names_a_file
from ckpttools.quantized.unsupported_errors import refuse_quantized
from ckpttools.stores.registry import parse


@dataclass(frozen=True)
class BoundModel:
    """A family, its table for one model, and the spelling of names."""

    family: Family
    table: Table
    spelling: Spelling


def _with_recorded_options(options: ToHuggingFace, files: ModelFiles) -> ToHuggingFace:
    """Add the options chosen in the conversion to MaxText, unless the user overrides them.

    Raises:
        UsageError: The conversion used the user's family file, and only its name was recorded.
    """
    model = options.model
    family = model.family or files.family
    if model.family is None and family is not None and names_a_file(family):
        raise UsageError(
            "this checkpoint was converted with a family file; another family might misread its arrays",
            location=files.location,
            got=family,
            hint=option("family", f"PATH/{family}"),
        )
    rope_layout = model.rope_layout or files.rope_layout
    # The arrays show whether the head is separate now, which training may have changed.
    tied = model.tied or ("keep" if files.tied else None)
    return replace(options, model=replace(model, family=family, rope_layout=rope_layout, tied=tied))


@dataclass(frozen=True)
class UnboundModel:
    """The arrays of a tree, with the options and files of their model."""

    arrays: Mapping[str, LazyArray]
    location: str
    options: ToHuggingFace
    files: ModelFiles

    @classmethod
    def of(
        cls, tree: Tree, arrays: Mapping[str, LazyArray], options: ToHuggingFace, files: ModelFiles
    ) -> UnboundModel:
        """Return the arrays of a tree with the user's options and those recorded in the conversion.

        Raises:
            FormatError: The axis on which layers are stacked is unknown.
            UsageError: A configuration is requested although one exists, or the family comes from a user's
                file.
            ConfigError: The configuration cannot be built.
        """
        options = _with_known_axis(options, arrays, tree)
        files = _with_config_from_settings(files, options, arrays)
        return cls(arrays, tree.metadata.location, _with_recorded_options(options, files), files)

    def bind(self) -> BoundModel:
        """Return the family and its rows, from the configuration or options, else from the arrays alone."""
        if self.files.config is None and self.options.model.family is None:
            return self._single_matching_family()
        return self._bind_family(family_for(self.files.config, self.options.model, self.location))

    def _bind_family(self, family: Family) -> BoundModel:
        family = family_as_stored(family, self.arrays)
        spelling = _choose_spelling(family, self.options.spelling, self.files)
        model = self.options.model
        # A materialized head is created under its Hugging Face name after all arrays are mapped.
        tied_mode = "keep" if model.tied == "materialize" else model.tied
        config = self.files.config
        if config is not None and self.options.spelling == TEXT:
            config = text_config(config, spelling) or config
        table = family.table(
            config,
            self.files.location,
            scan_axis=stored_scan_axis(family, self.arrays, self.options.scan_axis),
            spelling=spelling,
            overrides={
                **rope_flags(family, model),
                **tying.tied_flags(tied_mode, tying.left_head(family), self.arrays),
            },
            without=self._absent_towers(family),
        )
        return BoundModel(family, replace(table, location=self.location), spelling)

    def _absent_towers(self, family: Family) -> tuple[str, ...]:
        """Return the towers that are not written; without other information, the arrays decide."""
        return family.towers if self.options.spelling == TEXT else family.towers_not_in(self.arrays)

    def _has_all_towers(self, family: Family) -> bool:
        """Return whether all towers of a family are present."""
        return not family.towers_not_in(self.arrays)

    def require_agreement(self, bound: BoundModel, arrays: Mapping[str, LazyArray]) -> None:
        """Raise an error if the configuration gives other values than the one in the checkpoint.

        Raises:
            ConfigError: The configuration belongs to another family that no option names, or binds the
                family's rows differently.
        """
        config, carried = self.files.config, self.files.overruled
        if config is None:
            return
        require_own_rows(
            self.options.model.family,
            config if carried is None else carried,
            self.files.location if carried is None else self._carried_location,
            lambda item: self._bind_family(item).table.to_right(arrays, (VOCAB,)).arrays,
        )
        if carried is None:
            return
        if self.options.model.family is None:
            require_same_family(bound.family, config, self.files.location, carried)
        files = replace(self.files, config=carried, location=self._carried_location)
        options = replace(self.options, spelling=bound.spelling.name)
        other = replace(self, arrays=arrays, options=options, files=files)._bind_family(bound.family)
        require_same_values(bound.table, other.table, arrays, self.files.location)

    @property
    def _carried_location(self) -> str:
        """Return the location of the configuration in the checkpoint."""
        return str(parse(self.location) / SIDECARS / CONFIG)

    def _single_matching_family(self) -> BoundModel:
        """Return the only family whose rows match exactly these arrays.

        Raises:
            ConfigError: No family matches, or several match.
        """
        matching: dict[str, BoundModel | None] = {}
        for family in families().values():
            try:
                bound = self._bind_family(family)
                unwanted = unwanted_towers(family, self.arrays, self.options)
                bound.table.to_right({key: self.arrays[key] for key in self.arrays if key not in unwanted})
                matching[family.name] = bound
            except ConfigError:
                matching[family.name] = None  # The arrays match but leave a choice open.
            except CheckpointError:
                continue
        complete = [name for name in matching if self._has_all_towers(families()[name])]
        likely = {name: bound for name, bound in matching.items() if name in complete or not complete}
        only = next(iter(likely.values())) if len(likely) == 1 else None
        if only is not None:
            return only
        names = ", ".join(matching)
        hint = f"name the directory of the model it came from: {option('like', 'HF_DIR')}"
        if matching and None not in matching.values():
            hint += f"; {option('family', 'NAME')} is enough for the arrays, but then no {CONFIG} is written"
        raise ConfigError(
            "nothing says which model this is",
            location=self.location,
            got=f"arrays as of {names}" if names else "arrays of no known family",
            expected="its config.json",
            hint=hint,
        )


def _choose_spelling(family: Family, name: str | None, files: ModelFiles) -> Spelling:
    """Return the spelling of names: as requested, as in the original model, or as usual for its type.

    Raises:
        UsageError: The family does not have this spelling.
    """
    expected = name or files.spelling
    if expected is not None:
        result = next((spelling for spelling in family.spellings if spelling.name == expected), None)
        if result is None and name is not None:
            raise UsageError(
                f"family {family.name} has no such spelling of names",
                got=name,
                expected="one of " + ", ".join(spelling.name for spelling in family.spellings),
            )
        if result is not None:
            return result
    if files.weights:
        return family.spelling_of(files.weights)
    model_type = (files.config or {}).get("model_type")
    return family.spelling_for(model_type if isinstance(model_type, str) else None)


def _with_known_axis(options: ToHuggingFace, arrays: Mapping[str, LazyArray], tree: Tree) -> ToHuggingFace:
    """Return the options with the scan axis filled in.

    Raises:
        FormatError: The user, the shapes and the notes do not determine the axis.
    """
    if options.scan_axis is not None:
        return options
    leaves: dict[TreePath, LazyArray] = {tuple(key.split(".")): array for key, array in arrays.items()}
    recorded = LayerNotes(scan_axis=view_of(tree).notes.scan_axis)
    with_axis = with_layer_notes(Tree(leaves, Metadata(location=tree.metadata.location)), recorded)
    return replace(options, scan_axis=known_scan_axis(view_of(with_axis)))


def _with_config_from_settings(
    files: ModelFiles, options: ToHuggingFace, arrays: Mapping[str, LazyArray]
) -> ModelFiles:
    """Return the files with a configuration built from the user's MaxText settings.

    Raises:
        UsageError: A configuration already exists.
        ConfigError: As for `config_from_settings`.
    """
    if not options.maxtext_config:
        return files
    if files.config is not None:
        raise UsageError(
            "a config.json exists, so none can be built from MaxText's settings",
            location=files.location,
            hint=f"leave out {option('maxtext_config')}",
        )
    config = config_from_settings(
        options.maxtext_config,
        arrays,
        scan_axis=options.scan_axis,
        family=options.model.family,
        text_alone=options.spelling == TEXT,
    )
    # Use the names of the text model that the configuration describes, even if the original model used
    # others.
    return replace(files, config=config, location=SETTINGS, spelling=None)


def unwanted_towers(
    family: Family, arrays: Mapping[str, LazyArray], options: ToHuggingFace
) -> frozenset[str]:
    """Return the tower arrays that are left out when only the text model is written."""
    return family.of_towers(arrays) if options.spelling == TEXT else frozenset()


def named_parameters(tree: Tree, prefix: str | None) -> dict[str, LazyArray]:
    """Return the model's arrays by dotted names, without optimizer state and wrapping.

    Raises:
        UsageError: There are no arrays below the prefix.
        FormatError: Several arrays would have the same name.
    """
    return by_name(
        {inner: view_of(tree).parameters[path] for path, inner in _paths_below(tree, prefix).items()}
    )


def _paths_below(tree: Tree, prefix: str | None) -> dict[TreePath, TreePath]:
    """Map the paths of parameters below a prefix to the remainders of the paths."""
    result = view_of(tree).parameters
    keys: TreePath = tuple(key for key in (prefix or "").replace(".", "/").split("/") if key)
    below = {path: path[len(keys) :] for path in result if path[: len(keys)] == keys}
    if prefix is not None and not below:
        tops = sorted({str(path[0]) for path in result})
        raise UsageError(
            f"no array is below {prefix!r}",
            location=tree.metadata.location,
            expected="one of " + ", ".join(tops[:20]),
            hint=did_you_mean(prefix, tops),
        )
    return below


def parameters_outside_model(tree: Tree, prefix: str | None) -> list[str]:
    """List learned arrays outside the model: collections, other models, and adapters."""
    view, below = view_of(tree), _paths_below(tree, prefix)
    taken = {tree_path for inner, tree_path in view.homes.items() if inner in below}
    return [keystr(path) for path in view.of_role("parameter") if path in view.arrays and path not in taken]


@dataclass(frozen=True)
class ModelRows:
    """The parameters of a MaxText tree and the rows of their model.

    Attributes:
        arrays: The parameters by dotted names.
        family, table, spelling: The family, rows and spelling of the model; the rows have the layout of the
            tree.
        scan_axis: The axis on which layers are stacked; None if they are not stacked.
        config: The parsed `config.json` of the model; None if unknown.
    """

    arrays: Mapping[str, LazyArray]
    family: Family
    table: Table
    spelling: Spelling
    scan_axis: int | None
    config: Mapping[str, object] | None

    def as_huggingface(self) -> Mapped:
        """Return the arrays under their Hugging Face names.

        Raises CoverageError if the arrays do not match the model.
        """
        return self.table.to_right(self.arrays, (VOCAB,))


def model_rows(tree: Tree, options: ToHuggingFace, files: ModelFiles) -> ModelRows:
    """Return the parameters of a MaxText tree with their model's rows; same errors as `to_huggingface`."""
    tree = with_scan_axis(tree, options.scan_axis)
    arrays = named_parameters(tree, options.prefix)
    refuse_quantized(arrays, tree.metadata.config, tree.metadata.location)
    unbound = UnboundModel.of(tree, arrays, options, files)
    bound, options = unbound.bind(), unbound.options
    unbound.require_agreement(bound, arrays)
    axis = stored_scan_axis(bound.family, arrays, options.scan_axis)
    return ModelRows(arrays, bound.family, bound.table, bound.spelling, axis, unbound.files.config)
