"""What the user should know of a Hugging Face tree that becomes one of MaxText."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count
from ckpttools.core.wording import option
from ckpttools.families.family import Family
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.mapped import Mapped, notes_of
from ckpttools.mapping.scale_grids import ScaleGrids
from ckpttools.maxtext.hf_source import HuggingFaceSource, arrays_of, vocab_setting
from ckpttools.maxtext.native import misfits_remark
from ckpttools.maxtext.to_maxtext_options import ToMaxText
from ckpttools.quantized.config import says_quantized, scheme
from ckpttools.transforms.cast import cast_notes


def value_notes(
    family: Family, mapped: Mapped, options: ToMaxText, carried: Mapping[str, LazyArray]
) -> Notes:
    inexact = () if options.dtype is None else cast_notes(mapped.arrays, options.dtype)
    values = [*_vocab_notes(family, mapped.sizes.get("vocab"), options.pad_vocab)]
    if carried:
        values.append(Note.of_arrays(len(carried), "carried along, for the way back"))
    dropped = tuple(key for key in mapped.dropped if key not in carried)
    return notes_of(mapped.values) + Notes(tuple(inexact), tuple(values), dropped)


def remarks_on(
    source: HuggingFaceSource, grids: ScaleGrids, options: ToMaxText, homeless: Mapping[str, LazyArray]
) -> Iterator[str]:
    """What to say of dtypes, of quantised weights, and of what MaxText has no place for."""
    family = source.family
    towers = [name for tower in family.towers for name in arrays_of(family, tower, homeless)]
    yield from source.remarks
    if not source.kept.scales:
        yield from _stale(says_quantized(source.config))
    if grids.misfits:
        yield misfits_remark(grids.misfits)
    if not (options.carry and homeless):
        yield from _lost([key for key in homeless if key not in towers and key not in source.kept.aside])
    yield from _without_towers(towers, _way_back(family, options))


def _stale(said: Mapping[str, object] | None) -> Iterator[str]:
    """What to say of a configuration that calls plain weights quantised."""
    if said:
        yield f"{CONFIG} says {scheme(said)}, but no weight is quantised: they are taken as they are"


def _lost(names: Collection[str]) -> Iterator[str]:
    """What to say of arrays that the way back will not have."""
    if names:
        again = f"with {option('carry', True)} the way back has them again"
        yield f"MaxText has no place for {array_count(names)}; {again}"


def _way_back(family: Family, options: ToMaxText) -> str:
    """What becomes of towers that are not converted."""
    if options.carry:
        return "are carried along, for the way back"
    model = "which takes them from the model"
    if any(each.name == "text" for each in family.spellings):
        model += f", or writes the text model alone ({option('names', 'text')})"
    return f"are left out, also for the way back, {model}"


def _without_towers(towers: Collection[str], way: str) -> Iterator[str]:
    """What to say of towers that are left out."""
    if towers:
        yield f"as {option('text_only', True)} says, the towers {way}: {array_count(towers)}"


def _vocab_notes(family: Family, vocab: int | None, pad_vocab: int | None) -> Iterator[Note]:
    """What is added to the vocabulary, and what MaxText's own configuration would rather have."""
    if vocab is None:
        return
    if pad_vocab:
        yield Note("vocabulary", f"padded with zeros from {vocab} rows to {pad_vocab}")
    wanted = family.maxtext_vocab.get(vocab, vocab)
    if wanted != vocab and wanted != pad_vocab:
        remedy = f"{option('pad_vocab', wanted)}, or " if wanted > vocab else ""
        text = f"{vocab} rows, {wanted} in MaxText's own configuration: {remedy}{vocab_setting(vocab)}"
        yield Note("vocabulary", text)
