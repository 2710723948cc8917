"""Whether the arrays of a checkpoint are those of the model that its configuration describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttools.array.tree import Tree, by_name
from ckpttools.core.errors import CoverageError
from ckpttools.families.family import Family
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.coverage import NotCoveredError
from ckpttools.mapping.flags import Flag
from ckpttools.maxtext.family_layouts import family_as_stored
from ckpttools.maxtext.layout import VOCAB
from ckpttools.maxtext.native import scale_pairs
from ckpttools.maxtext.stacked_on import stored_scan_axis
from ckpttools.maxtext.structural_names import with_family_names
from ckpttools.maxtext.view import MaxTextView
from ckpttools.quantized.readable import weights_in
from ckpttools.transforms.dequantize import dequantized, is_said_to_be_quantized


def require_hugging_face(tree: Tree, family: Family, config: Mapping[str, Any]) -> None:
    """Refuses a Hugging Face model whose arrays contradict its configuration; reads none.

    Raises:
        CoverageError: they do. Of weights in a scheme that is not read nothing is said.
        FormatError: two arrays have one name, or quantised weights lack scales or have some that do not fit.
    """
    if is_said_to_be_quantized(tree) and weights_in(tree).is_whole:
        return
    arrays = by_name(with_family_names(dequantized(tree, is_read=False).tree).tree.arrays)
    table = family.table(config, CONFIG, spelling=family.spelling_of(arrays))
    try:
        replace(table, place=tree.metadata.place).require_fit(arrays)
    except NotCoveredError as error:
        raise _contradicted(error) from error


def require_maxtext(
    view: MaxTextView, place: str, family: Family, config: Mapping[str, Any], flags: Mapping[str, Flag]
) -> None:
    """The same of a MaxText checkpoint.

    Args:
        view: of the checkpoint.
        place: where it lies.
        family: of the model.
        config: the model's.
        flags: those that the arrays, or the way in which they were made, decide.
    """
    scales = set(scale_pairs(view.named).values())
    arrays = {name: array for name, array in view.named.items() if name not in scales}
    family = family_as_stored(family, arrays)
    absent = family.towers_not_in(arrays)
    try:
        axis = stored_scan_axis(family, arrays, view.scan_axis)
        table = family.table(config, CONFIG, scan_axis=axis, overrides=flags, without=absent)
        replace(table, place=place).require_fit(arrays, left=True, cut=(VOCAB,))
    except NotCoveredError as error:
        raise _contradicted(error) from error


def _contradicted(error: NotCoveredError) -> CoverageError:
    return CoverageError(
        "the arrays are not those of the model that its configuration describes" + error.coverage.summary(),
        place=error.place,
        wanted=f"the {CONFIG} of these arrays",
        hint=f"a conversion would say: {error.hint}; here name {CONFIG} itself, which is taken at its word",
    )
