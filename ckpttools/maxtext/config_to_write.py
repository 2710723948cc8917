"""The `config.json` of what is written, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpttools.array.lazy import LazyArray
from ckpttools.core.wording import option
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext import tying
from ckpttools.maxtext.bound_model import BoundModel
from ckpttools.maxtext.layout import VOCAB
from ckpttools.maxtext.model_config import TrueConfig, absent_prediction, text_config, true_config
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.parts import promising_less
from ckpttools.maxtext.to_hf_options import TEXT, ToHuggingFace


def config_to_write(
    bound: BoundModel,
    options: ToHuggingFace,
    files: ModelFiles,
    made: Mapping[str, LazyArray],
    tied: bool | None,
) -> TrueConfig | None:
    """The configuration of what is written, None where there is none; errors as `promising_less`."""
    if files.config is None:
        return None
    text = text_config(files.config, bound.spelling) if options.spelling == TEXT else None
    size = bound.table.sizes.get(VOCAB) if options.padding_rows == "keep" else None
    rule = bound.family.flags.get(tying.FLAG)
    vocab = size.length if size else None
    config = true_config(text or files.config, made, tied, tied_by=rule, vocab=vocab)
    if text is None:
        return promising_less(bound.family, config, made, files.place)
    return replace(config, changes=("it is that of the text model alone", *config.changes))


def remarks_about(config: TrueConfig | None, made: Mapping[str, LazyArray], lacking: bool) -> Iterator[str]:
    """What to say of the configuration.

    Args:
        config: None where there is none.
        made: what is written beside it.
        lacking: whether the model at hand has nothing but what comes from MaxText.
    """
    if config is None:
        remedy = f"{option('like')} takes the one of the model it came from"
        yield f"no {CONFIG} is written, as none is known: {remedy}"
        return
    yield from (f"{CONFIG}: {change}" for change in config.changes)
    prediction = absent_prediction(config.config, made)
    if prediction:
        remedy = "nor in the model" if lacking else f"{with_model()} takes them from the model"
        yield (
            f"{CONFIG}: {prediction} is {config.config[prediction]}, but layers that predict further tokens "
            f"are not there{', ' if lacking else '; '}{remedy}"
        )


def with_model() -> str:
    """What takes arrays from the model that a checkpoint came from."""
    return f"{option('like', 'HF_DIR')} {option('carry', True)}"
