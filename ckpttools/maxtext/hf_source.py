"""Which model a Hugging Face tree is of, and what of it is converted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, by_name
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError, CoverageError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.text import matches_any
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.table import Table
from ckpttools.maxtext import tied_embeddings as tying
from ckpttools.maxtext.family_layouts import family_in
from ckpttools.maxtext.model import ModelOptions, family_for, required, rope_flags
from ckpttools.maxtext.native import KeptWeights
from ckpttools.maxtext.odd_dtypes import of_one_dtype
from ckpttools.maxtext.recognition import families_with_names_of
from ckpttools.maxtext.stored_head import StoredHead, is_alias
from ckpttools.maxtext.to_maxtext_options import ToMaxText
from ckpttools.maxtext.versions import version_called
from ckpttools.model_families.family import Family, Spelling
from ckpttools.quantized.unsupported_errors import refuse_quantized


@dataclass(frozen=True)
class HuggingFaceSource:
    """A Hugging Face tree whose model is known, before it is mapped.

    Attributes:
        kept: the tree without scales.
        arrays: by name, with an output head that is to be made.
        family, table, spelling: of the model.
        drop: patterns of what is left out, the output head's name among them where it is.
        remarks: what to say of dtypes.
        lost_head: The output head that is left out although no pattern of the user names it.
        tied: How the output head is handled; None if the configuration decides.
    """

    kept: KeptWeights
    arrays: Mapping[str, LazyArray]
    family: Family
    table: Table
    spelling: Spelling
    drop: Sequence[str]
    remarks: tuple[str, ...]
    lost_head: StoredHead | None = None
    tied: str | None = None

    @property
    def config(self) -> Mapping[str, Any] | None:
        return self.kept.tree.metadata.config

    @property
    def location(self) -> str:
        return self.kept.tree.metadata.location

    def homeless(self) -> dict[str, LazyArray]:
        """The arrays that MaxText has no place for, without those that the user leaves out."""
        left = self.table.left_out_of({**self.arrays, **self.kept.aside})
        return {key: array for key, array in left.items() if not matches_any(key, self.drop)}


def hugging_face_source(kept: KeptWeights, options: ToMaxText) -> HuggingFaceSource:
    """Which model a tree is of, and its arrays, with its output head or without, as the user wants it."""
    tree, widened = kept.tree, tuple[str, ...]()
    arrays = by_name(tree.arrays)
    if options.dtype is not None and options.scan:
        arrays, widened = of_one_dtype(arrays)
    family, table = _table(tree, arrays, options)
    if not kept.scales:
        # Of all arrays: those that are left out may be the scales of others.
        refuse_quantized(arrays, tree.metadata.config, tree.metadata.location)
    spelling = family.spelling_of(arrays)
    head, drop, lost = tying.right_head(family, spelling), options.drop, None
    way = _head_handling(head, arrays, options)
    if way is None and head and table.flags[tying.FLAG].value and is_alias(head, arrays):
        way = "drop"
    if way == "materialize" and head and head.head not in arrays and head.embedding in arrays:
        arrays[head.head] = arrays[head.embedding]
        widened = (*widened, head.copy_remark)
    if way == "drop" and head and head.head in arrays:
        if not matches_any(head.head, drop) and head.embedding in arrays:
            lost = StoredHead(head, arrays[head.head], arrays[head.embedding])
        drop = (*drop, head.head)
    return HuggingFaceSource(kept, arrays, family, table, spelling, drop, widened, lost, way)


def _head_handling(
    head: tying.Head | None, arrays: Mapping[str, LazyArray], options: ToMaxText
) -> str | None:
    """Return how the output head is handled: the user's choice, or "drop" if it is dropped by name."""
    way = options.model.tied
    if way is None and head and head.head in arrays and matches_any(head.head, options.drop):
        return "drop"
    return way


def _table(tree: Tree, arrays: Mapping[str, LazyArray], options: ToMaxText) -> tuple[Family, Table]:
    """The family and its rows, bound to the model in `tree`."""
    config = required(tree.metadata.config, tree.metadata.location)
    return bound(_family(tree, config, options.model), tree, arrays, options)


def bound(
    family: Family, tree: Tree, arrays: Mapping[str, LazyArray], options: ToMaxText
) -> tuple[Family, Table]:
    """A family in the version's layout, and its rows, bound to the model in `tree`."""
    location = tree.metadata.location
    config = required(tree.metadata.config, location)
    family = family_in(family, version_called(options.maxtext))
    spelling = family.spelling_of(arrays)
    head = tying.right_head(family, spelling)
    way = _head_handling(head, arrays, options)
    tied = tying.tied_flags(way, head.head if head else None, arrays)
    table = family.table(
        config,
        CONFIG,
        scan_axis=options.scan_axis if options.scan else None,
        spelling=spelling,
        overrides={**rope_flags(family, options.model), **tied},
        without=family.towers if options.text_only else tuple(_dropped_towers(family, arrays, options.drop)),
    )
    _require_towers(family, table, arrays, location)
    if options.scan:
        _refuse_scanned(family, table)
    return family, replace(table, location=location, padded=_padded(table, options.pad_vocab))


def _refuse_scanned(family: Family, table: Table) -> None:
    """Refuses layers that MaxText does not scan; errors as `Family.refuse_scanned`."""
    has_towers = any(table.flags[tower].value for tower in family.towers)
    alone = "" if family.never_scanned else f"; {option('text_only', True)} leaves the towers out"
    hint = f"{option('scan', False)} keeps them apart, and MaxText runs them with scan_layers=false{alone}"
    family.refuse_scanned(hint, has_towers=has_towers)


def _require_towers(family: Family, table: Table, arrays: Mapping[str, LazyArray], location: str) -> None:
    """Refuses a model of which the configuration describes a tower that is not there at all.

    Raises:
        CoverageError: it does; where parts of a tower are missing, the rows tell which.
    """
    for tower in family.towers:
        flag = table.flags[tower]
        if flag.value and not arrays_of(family, tower, arrays):
            raise CoverageError(
                f"the model has a tower ({tower}) of which no array is there",
                location=location,
                got=flag.source,
                expected="all of the model's arrays",
                hint=f"check that all of its files are there, or {option('text_only', True)} "
                "converts the text model alone",
            )


def arrays_of(family: Family, tower: str, arrays: Mapping[str, LazyArray]) -> Mapping[str, LazyArray]:
    """A tower's arrays in Hugging Face's files."""
    return Table((), {}, left_out=family.tower_patterns((tower,))).left_out_of(arrays)


def _dropped_towers(family: Family, arrays: Mapping[str, LazyArray], drop: Sequence[str]) -> Iterator[str]:
    """The towers that are left out by the names of all of their arrays."""
    for tower in family.towers if drop else ():
        names = arrays_of(family, tower, arrays)
        if names and all(matches_any(name, drop) for name in names):
            yield tower


def _family(tree: Tree, config: Mapping[str, object], model: ModelOptions) -> Family:
    """The model's family. Where none has its type, the error names those that have its arrays' names."""
    try:
        return family_for(config, model, tree.metadata.location)
    except ConfigError as error:
        fitting = families_with_names_of(tree)
        own = option("family", "FILE.toml")
        hint = f"`ckpt families` lists what there is, none with these names: describe yours in a file, {own}"
        if len(fitting) == 1:
            (only,) = fitting
            chosen = option("family", only)
            hint = f"its arrays have the names of {only}: if the model computes alike, {chosen} converts it"
        elif fitting:
            chosen = option("family", "NAME")
            hint = (
                f"its arrays have the names of {', '.join(fitting)}, of which each makes values of its own: "
                f"{chosen}, of the one that computes as the model does"
            )
        raise error.at(hint=hint) from error


def _padded(table: Table, pad_vocab: int | None) -> dict[str, int]:
    if pad_vocab is None:
        return {}
    vocab = table.sizes.get("vocab")
    if vocab and pad_vocab < vocab.length:
        raise UsageError(
            "padding cannot take rows away",
            got=option("pad_vocab", pad_vocab),
            expected=f"at least {vocab.length} ({vocab.source})",
            hint=f"leave it out, and {vocab_setting(vocab.length)}",
        )
    return {"vocab": pad_vocab}


def vocab_setting(rows: int) -> str:
    """How MaxText learns of the number of rows in the table of token embeddings."""
    where = "in MaxText's configs/models/*.yml, or on its command line"
    return f"set vocab_size={rows} (rows of the embedding) {where}"
