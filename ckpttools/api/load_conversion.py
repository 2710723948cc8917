"""Convert a checkpoint before loading, so that its arrays have the expected names and layout."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import (
    ConfigError,
    CoverageError,
    FormatError,
    PaddedVocabularyWarning,
    StorageError,
    UsageError,
)
from ckpttools.core.message_terms import action, option, rename_option
from ckpttools.core.notes import Notes
from ckpttools.maxtext.conversion_options import ToHuggingFace, ToMaxText
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.model_options import ModelOptions
from ckpttools.maxtext.recognition import families_with_names_of
from ckpttools.maxtext.source_checks import name_style, refuse_hugging_face, refuse_maxtext
from ckpttools.maxtext.stored_head import refuse_lost_head
from ckpttools.maxtext.to_hf import to_huggingface
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.maxtext.versions import EMBEDDING
from ckpttools.maxtext.vocabulary import refuse_learned_rows
from ckpttools.stores.registry import LocationLike

if TYPE_CHECKING:
    from ckpttools.sharding.templates import TreeTemplate

Side = Literal["maxtext", "hf"]


@dataclass(frozen=True, slots=True)
class Converting:
    """Conversion options of `ckpttools.load`; None for options that are not given.

    Attributes:
        scan, scan_axis, pad_vocab, family, model, rope_layout, tied, padding_rows, text_only: See
            `ckpttools.load`.
    """

    scan: bool | None = None
    scan_axis: int | None = None
    pad_vocab: int | None = None
    family: str | None = None
    model: LocationLike | None = None
    rope_layout: str | None = None
    tied: str | None = None
    padding_rows: Literal["keep", "drop"] | None = None
    text_only: bool | None = None

    def check(self, to: str | None) -> None:
        """Reject options without effect.

        Raises:
            UsageError: An option requires a conversion, or the conversion in the other direction.
        """
        if to not in (None, "maxtext", "hf"):
            raise UsageError(f"unknown {option('to', to)}", expected='"maxtext", "hf" or None')
        for field in fields(self):
            value = getattr(self, field.name)
            sides = _ABOUT.get(field.name, ("maxtext", "hf"))
            if value is None or to in sides:
                continue
            way = " or ".join(option("to", side) for side in sides)
            raise UsageError(
                f"{option(field.name, value)} applies only to conversions with {way}",
                hint=f"leave it out, or pass {way}",
            )

    @property
    def options(self) -> ModelOptions:
        return ModelOptions(self.family, self.rope_layout, self.tied)


# Options that apply to only one direction.
_ABOUT: Mapping[str, tuple[Side, ...]] = {
    "scan": ("maxtext",),
    "pad_vocab": ("maxtext",),
    "text_only": ("maxtext",),
    "padding_rows": ("hf",),
}


def converted(
    tree: Tree, to: str | None, template: TreeTemplate | None, declared: Converting, memory: int
) -> tuple[Tree, Notes]:
    """Return the converted tree and notes about it.

    Args:
        tree: The opened tree.
        to: Framework whose names the arrays get; None leaves them unchanged.
        template: The caller's template, which determines layers and vocabulary if the options do not.
        declared: The caller's options, already checked.
        memory: Maximum resident bytes.

    Raises:
        CheckpointError: The tree cannot be converted, or values would be lost.
    """
    if to == "maxtext":
        return _as_maxtext(tree, template, declared, memory)
    if to == "hf":
        return _as_hugging_face(tree, declared, memory)
    return tree, tree.metadata.notes


def next_step(tree: Tree, to: str | None, template: TreeTemplate) -> str:
    """Suggest `to`, or listing the names, if arrays of a template are missing.

    Args:
        tree: The opened tree, before conversion.
        to, template: See `converted`.
    """
    own = name_style(tree.arrays)
    expected = name_style([leaf.path for leaf in template.leaves])
    if to is None and own and expected and own != expected:
        whose = "MaxText's" if expected == "maxtext" else "Hugging Face's"
        model = f" and {option('model', 'HF_DIR')}" if expected == "hf" else ""
        return f"{option('like')} has {whose} names, into which {option('to', expected)}{model} converts"
    kind = (tree.metadata.config or {}).get("model_type")
    what = f"it is a model of type {kind}" if kind else "it may be another model"
    shown = (
        f": {action('inspect', tree.metadata.location)} lists its arrays" if tree.metadata.location else ""
    )
    return f"check whether {option('like')} describes this checkpoint; {what}{shown}"


def _as_maxtext(
    tree: Tree, template: TreeTemplate | None, declared: Converting, memory: int
) -> tuple[Tree, Notes]:
    """Return the parameters of a Hugging Face model, nested as in MaxText's Linen trees."""
    with _worded("maxtext"):
        refuse_maxtext(tree)
    if declared.model is not None:
        with _worded("model"):
            files = ModelFiles.of(tree, declared.model)
        tree = tree.with_metadata(config=files.config)
    scan = _is_scanned(template) if declared.scan is None else declared.scan
    rows = _more_rows(tree, template) if declared.pad_vocab is None else declared.pad_vocab
    axis = 1 if declared.scan_axis is None else declared.scan_axis
    expected = ToMaxText(
        scan=scan,
        scan_axis=axis,
        pad_vocab=rows,
        model=declared.options,
        text_only=declared.text_only is True,
        leaves_out=True,
    )
    built = to_maxtext(tree, expected)
    if built.lost_head is not None:
        refuse_lost_head(built.lost_head, tree, memory=memory)
    return Tree(built.parameters, built.state.metadata), built.notes


def _as_hugging_face(tree: Tree, declared: Converting, memory: int) -> tuple[Tree, Notes]:
    """Return the arrays of a MaxText checkpoint under Hugging Face names. Fails if arrays would be lost."""
    with _worded("hf"):
        refuse_hugging_face(tree)
    way = ToHuggingFace(
        like=declared.model,
        scan_axis=declared.scan_axis,
        model=declared.options,
        padding_rows=declared.padding_rows,
    )
    with _worded("model"):
        files = ModelFiles.of(tree, declared.model)
        with _of_the_same_model(tree, files, declared.family):
            built = to_huggingface(tree, way, files)
    refuse_learned_rows(built.extra, tree.metadata.location, declared.padding_rows, memory=memory, reserved=0)
    if built.lost_head is not None:
        refuse_lost_head(built.lost_head, tree, memory=memory)
    config: Mapping[str, Any] | None = None if built.config is None else built.config.config
    return built.tree.with_metadata(config=config), built.notes


@contextmanager
def _worded(what: str) -> Iterator[None]:
    """Rewrite the hints of conversion errors raised inside the `with` for `load`."""
    try:
        yield
    except FormatError as error:
        if what == "model":
            raise
        raise error.at(hint=f"leave out {option('to', what)}: the arrays already have these names") from error
    except (ConfigError, StorageError) as error:
        # The conversion functions call the model `like`.
        raise error.at(hint=rename_option(error.raw.hint or "", "like", "model") or None) from error


@contextmanager
def _of_the_same_model(tree: Tree, files: ModelFiles, family: str | None) -> Iterator[None]:
    """Name the family that matches the arrays in coverage errors raised inside the `with`."""
    try:
        yield
    except CoverageError as error:
        fitting = families_with_names_of(tree)
        if not fitting:
            raise
        names = f"the arrays have the names of {' and '.join(fitting)}"
        if family is not None:
            raise error.at(hint=f"{names}: leave out {option('family', family)}") from error
        kind = f"{files.location} is of model_type {(files.config or {}).get('model_type')!r}"
        hint = f"{kind}, {names}: name the model they came from with {option('model')}"
        raise error.at(hint=hint) from error


def _is_scanned(template: TreeTemplate | None) -> bool:
    """Return whether a template's layers are stacked: no key below the decoder has a layer index."""
    names = [leaf.name for leaf in template.leaves] if template else []
    return not any(re.search(r"(^|/)decoder/(\w+_)?layers_\d+/", name) for name in names)


def _more_rows(tree: Tree, template: TreeTemplate | None) -> int | None:
    """Return the template's number of embedding rows if it exceeds the vocabulary, with a warning."""
    config = tree.metadata.config or {}
    vocab = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    expected = [leaf.shape for leaf in template.leaves if leaf.path[-2:] == EMBEDDING] if template else []
    rows = expected[0][0] if expected and expected[0] else None
    if not rows or not isinstance(vocab, int) or rows <= vocab:
        return None
    text = (
        f"{option('like')} has {rows} rows of token embeddings, the model {vocab}: the other {rows - vocab} "
        f"are zeros, as {option('pad_vocab', rows)} says"
    )
    warnings.warn(text, PaddedVocabularyWarning, stacklevel=2)
    return rows
