"""Create models from random values, or from two models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

from ckpttools.api.convert import ChangedRun, write_changed
from ckpttools.api.hf_to_maxtext import hf_to_maxtext
from ckpttools.api.options import WRITING_OPTIONS
from ckpttools.api.options.build import SYNTH
from ckpttools.api.options.convert import CHANGING, NEW_TARGET
from ckpttools.api.prepared import Prepared, Writing, command
from ckpttools.api.sources import Source, Storing, float_dtype_of, location_of, opened, part_of, read_options
from ckpttools.array.tree import Tree
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, MissingPathError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Notes
from ckpttools.core.options import declare
from ckpttools.formats.json_file import read_json
from ckpttools.formats.registry import writer_options
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.synthetic import has_omitted_towers, stitch_models, synthetic_model, text_model_of
from ckpttools.model_families.registry import families
from ckpttools.run.overlap_check import check_no_overlap
from ckpttools.stores.registry import LocationLike, parse


@command(ChangedRun, more=writer_options)
@declare(*SYNTH, *NEW_TARGET, *WRITING_OPTIONS)
def synth(
    source: LocationLike,
    destination: LocationLike,
    *,
    seed: int = 0,
    names: Literal["huggingface", "maxtext"] = "huggingface",
    scan: bool = True,
    dtype: DType | str | None = None,
    **common: Unpack[ChangedRun],
) -> Prepared:
    """Write a randomly initialized model from a configuration.

    Weights are drawn around zero with the configuration's `initializer_range`, 0.02 by default; norms are the
    identity, and biases are zero. The same seed gives the same bits on any machine and with any `jobs`.

    Args:
        source: A `config.json` or its directory; weights are not needed.
        destination: The directory to create. It appears only when everything is written.

    Raises:
        ConfigError, ShapeError: No family supports this model type, or the configuration lacks a size.
        CheckpointError: See `ckpttools.convert`.
    """
    location = parse(source)
    check_no_overlap(location, parse(destination))
    file = location / CONFIG if location.is_dir() else location
    try:
        config, expected = read_json(file.require_exists()), float_dtype_of(dtype)
    except MissingPathError as error:
        hint = f"name the {CONFIG} of a model, or its directory: the name of a family has no sizes"
        raise error if str(location) not in families() else error.at(hint=hint) from error
    except FormatError as error:
        raise error.at(hint=f"name the {CONFIG} of a model, or its directory") from error
    tree = synthetic_model(config, seed, expected, str(file))
    if names == "maxtext":
        if common.get("format") not in (None, "orbax"):
            raise UsageError(f"{option('format')} applies only to models with Hugging Face's names")
        rest = {**part_of(common, Storing), **part_of(common, Writing)}
        return hf_to_maxtext.plan(tree, destination, scan=scan, text_only=has_omitted_towers(tree), **rest)
    if not scan:
        raise UsageError(
            f"{option('scan', False)} applies only to MaxText", hint=f"pass {option('names', 'maxtext')}"
        )
    text = text_model_of(config) if has_omitted_towers(tree) else None
    if text is not None:
        # With a configuration that declares towers, transformers would initialize them randomly.
        remark = Notes(remarks=(f"only the text model is written, with its own {CONFIG}",))
        notes = tree.metadata.notes + remark
        tree = synthetic_model(text, seed, expected, str(file)).with_metadata(notes=notes)
    return write_changed([], tree, destination, {"format": "safetensors", **common})


@command(ChangedRun, more=writer_options)
@declare(*CHANGING)
def stitch(
    source: Source, destination: LocationLike, *, decoder: Source, **common: Unpack[ChangedRun]
) -> Prepared:
    """Combine the towers of one model with another model's text model: embedding, layers, norm and head.

    Args:
        source: The model with towers, which also provides `config.json` and the other files.
        destination: The directory to create. It appears only when everything is written.
        decoder: The model that provides the text model, with or without towers.

    Raises:
        UsageError: The source has no towers, or a model is a MaxText checkpoint.
        CoverageError: The text models have different names or shapes. The message lists all of them.
        CheckpointError: See `ckpttools.convert`.
    """
    location = location_of(decoder)
    if location is not None:
        check_no_overlap(location, parse(destination))

    def make(opening: Mapping[str, Any]) -> Tree:
        read = read_options(opening)
        return stitch_models(opened(source, read, decoder), opened(decoder, read, source))

    return write_changed([], source, destination, common, make=make)
