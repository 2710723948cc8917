"""One checkpoint in the spelling of another, as a conversion makes it: what `verify` and `hash` compare.

Unlike `ckpttools.alignment`, which compares whatever it finds, this refuses what a conversion would refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttools.hf_to_maxtext import ToMaxText, to_maxtext
from ckpttools.ir.array import LazyArray
from ckpttools.ir.kinds import kind_of
from ckpttools.ir.tree import Tree, dotted
from ckpttools.maxtext_to_hf import ToHuggingFace, to_huggingface
from ckpttools.model import ModelOptions
from ckpttools.model_files import ModelFiles
from ckpttools.prove.canonical import per_layer

_EMBEDDING = "token_embedder/embedding"
_HEAD = "decoder/logits_dense/kernel"


def in_maxtext_names(tree: Tree, model: ModelOptions | None = None) -> dict[str, LazyArray]:
    """The arrays of a MaxText tree, layers one by one; of a Hugging Face tree those that it becomes.

    Raises:
        CheckpointError: as `to_maxtext`.
    """
    return (
        per_layer(tree) if _is_maxtext(tree) else _converted(tree, ToMaxText(model=model or ModelOptions()))
    )


def counterpart(source: Tree, made: Tree, model: ModelOptions | None = None) -> dict[str, LazyArray] | None:
    """The parameters of `source` as a conversion to `made` spells them; None where both spell alike.

    What a user may have chosen for that conversion is told from `made`: padding, an output head, and
    float32 for what would not come back exactly otherwise.

    Args:
        source: what was converted.
        made: what came of it.
        model: what the user says of the model.

    Raises:
        CheckpointError: the one cannot have become the other; as `to_maxtext` and `to_huggingface`.
    """
    model = model or ModelOptions()
    if _is_maxtext(made) == _is_maxtext(source):
        return None
    if _is_maxtext(source):
        return _as_huggingface(source, made, model)
    there = per_layer(made)
    options = _options(source, there, model)
    wanted = _converted(source, options)
    widened = any(_is_wider(there.get(name), array) for name, array in wanted.items())
    return _converted(source, replace(options, exact=True)) if widened else wanted


def _is_maxtext(tree: Tree) -> bool:
    return kind_of(tree).kind is not None


def _converted(tree: Tree, options: ToMaxText) -> dict[str, LazyArray]:
    state = to_maxtext(tree, replace(options, scan=False)).state
    return per_layer(Tree({path: leaf for path, leaf in state.items() if path[0] == "params"}))


def _options(source: Tree, there: Mapping[str, LazyArray], model: ModelOptions) -> ToMaxText:
    """The options that the conversion to `there` must have had."""
    said = source.metadata.config or {}
    text = said.get("text_config") or said
    vocab = text.get("vocab_size") if isinstance(text, Mapping) else None
    embedding = there.get(_EMBEDDING)
    rows = embedding.shape[0] if embedding is not None else None
    padded = rows if rows and isinstance(vocab, int) and rows > vocab else None
    if model.tied is None:
        model = replace(model, tied="materialize" if _HEAD in there else "drop")
    return ToMaxText(pad_vocab=padded, model=model)


def _is_wider(there: LazyArray | None, wanted: LazyArray) -> bool:
    floats = there is not None and there.dtype.is_float and wanted.dtype.is_float
    return floats and there is not None and there.dtype.bits == 32 and wanted.dtype.bits == 16


def _as_huggingface(source: Tree, made: Tree, model: ModelOptions) -> dict[str, LazyArray]:
    weights = {dotted(path): array for path, array in made.arrays.items()}
    known = ModelFiles.of(source, None)
    files = replace(known, config=made.metadata.config or known.config, weights=weights, carried={})
    options = ToHuggingFace(model=model if model.tied else replace(model, tied="keep"))
    converted = to_huggingface(source, options, files)
    carried = {name: array for name, array in known.carried.items() if name in weights}
    return {**{dotted(path): array for path, array in converted.tree.arrays.items()}, **carried}
