"""One checkpoint in the spelling of another, as a conversion makes it: what `verify` and `hash` compare.

Unlike `ckpttools.compare.alignment`, which compares whatever it finds, this refuses what a conversion
would refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, dotted
from ckpttools.core.errors import UsageError
from ckpttools.core.text import array_count
from ckpttools.core.wording import option
from ckpttools.digest.canonical import per_layer
from ckpttools.maxtext.model import ModelOptions, family_for
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.to_hf import ToHuggingFace, to_huggingface
from ckpttools.maxtext.to_maxtext import ToMaxText, to_maxtext
from ckpttools.maxtext.tying import right_head
from ckpttools.maxtext.view import view_of
from ckpttools.maxtext.vocabulary import Surplus, counted, less_padding

_HEAD = "decoder/logits_dense/kernel"


@dataclass(frozen=True, slots=True)
class Wording:
    """What a user says of the conversion that made the one of the other.

    Attributes:
        model: family, RoPE layout, and what became of an output head.
        drop: patterns of Hugging Face arrays that were left out.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    drop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Counterpart:
    """The parameters of a checkpoint in another spelling.

    Attributes:
        arrays: by name.
        remarks: what is not among them, in words.
        surplus: name -> rows of the array it was made from, beyond the vocabulary, that are not in it.
    """

    arrays: Mapping[str, LazyArray]
    remarks: tuple[str, ...] = ()
    surplus: Mapping[str, Surplus] = field(default_factory=dict)


def in_maxtext_names(tree: Tree, wording: Wording | None = None) -> Counterpart:
    """The arrays of a MaxText tree, layers one by one; of a Hugging Face tree those that it becomes.

    Raises:
        UsageError: a conversion is told of, and there is none.
        CheckpointError: as `to_maxtext`.
    """
    if view_of(tree).is_maxtext:
        require_none(wording, "the names are MaxText's")
        return Counterpart(per_layer(tree))
    wording = wording or Wording()
    return _converted(
        tree, ToMaxText(model=wording.model, drop=wording.drop), f"{option('tied', 'drop')} says so"
    )


def counterpart(source: Tree, made: Tree, wording: Wording | None = None) -> Counterpart | None:
    """The parameters of `source` as a conversion to `made` spells them; None where both spell alike.

    What a user may have chosen for that conversion is told from `made`: an output head, and float32 for what
    would not come back exactly otherwise. Rows beyond the vocabulary are left to `paired`.

    Args:
        source: what was converted.
        made: what came of it.
        wording: what the user says of the conversion.

    Raises:
        UsageError: a conversion is told of that cannot be the one between these.
        CheckpointError: the one cannot have become the other; as `to_maxtext` and `to_huggingface`.
    """
    if view_of(made).is_maxtext == view_of(source).is_maxtext:
        require_none(wording, "both sides spell names alike")
        return None
    wording = wording or Wording()
    if view_of(source).is_maxtext:
        if wording.drop:
            raise UsageError(
                f"{option('drop')} is for arrays of Hugging Face that were left out",
                got=f"{source.metadata.place}, which is MaxText's, as the source",
                hint="leave it out",
            )
        return _as_huggingface(source, made, wording.model)
    there = per_layer(made)
    options = _options(there, wording)
    why_headless = (
        f"{option('tied', 'drop')} says so" if wording.model.tied else f"{made.metadata.place} has none"
    )
    wanted = _converted(source, options, why_headless)
    widened = any(_is_wider(there.get(name), array) for name, array in wanted.arrays.items())
    return _converted(source, replace(options, exact=True), why_headless) if widened else wanted


@dataclass(frozen=True)
class Paired:
    """Two sets of arrays that should be the same.

    Attributes:
        mine, wanted: by name. Rows beyond the vocabulary that count are arrays of their own on one side.
        remarks: what became of the others.
    """

    mine: Mapping[str, LazyArray]
    wanted: Mapping[str, LazyArray]
    remarks: tuple[str, ...] = ()


def paired(
    mine: Mapping[str, LazyArray],
    wanted: Mapping[str, LazyArray],
    surplus: Mapping[str, Surplus],
    *,
    padding_rows: str | None,
    memory: int,
) -> Paired:
    """Arrays and what a conversion makes of others, with the rows beyond the vocabulary looked at.

    Args:
        mine: arrays of what was made.
        wanted: what was converted, in their spelling.
        surplus: as `Counterpart.surplus`, of `wanted`.
        padding_rows: as `ckpttools.maxtext.vocabulary.counted` takes it.
        memory: bytes that may be resident at most.

    Raises:
        CheckpointError: rows cannot be read, or the memory is too small.
    """
    theirs = counted({name: surplus[name] for name in wanted if name in surplus}, padding_rows, memory)
    less = less_padding(mine, {name: each.shape for name, each in wanted.items()}, padding_rows, memory)
    return Paired(less.arrays, {**wanted, **theirs.arrays}, (*theirs.remarks, *less.remarks))


def require_none(wording: Wording | None, why: str) -> None:
    """Refuses what would be ignored.

    Args:
        wording: what the user says of a conversion.
        why: there is none.

    Raises:
        UsageError: something is said.
    """
    if wording not in (None, Wording()):
        family, rope_layout, tied, drop = map(option, ("family", "rope_layout", "tied", "drop"))
        hint = f"leave out {family}, {rope_layout}, {tied} and {drop}"
        raise UsageError(f"nothing is converted: {why}", hint=hint)


def require_no_padding(padding_rows: str | None) -> None:
    """Raises UsageError where something is said of rows beyond a vocabulary and nothing is converted."""
    if padding_rows is not None:
        what = option("padding_rows")
        raise UsageError(
            f"{what} is for a conversion, and there is none: both sides spell names alike",
            hint="leave it out",
        )


def _converted(tree: Tree, options: ToMaxText, why_headless: str) -> Counterpart:
    made = to_maxtext(tree, replace(options, scan=False))
    family = family_for(tree.metadata.config, options.model, tree.metadata.place)
    parameters = Tree({path: leaf for path, leaf in made.state.items() if path[0] == "params"})
    head, remarks = _head(tree, options), []
    dropped = [name for name in made.notes.dropped if name != head]
    if dropped:
        said = f" or {option('drop')} says so" if options.drop else ""
        remarks.append(f"left out, as family {family.name} has no row for it{said}: {array_count(dropped)}")
    if head in made.notes.dropped:
        remarks.append(f"left out, as {why_headless}: the output head, {head}")
    return Counterpart(per_layer(parameters), tuple(remarks))


def _head(tree: Tree, options: ToMaxText) -> str | None:
    """What the output head of a Hugging Face tree is called, if its family has one."""
    family = family_for(tree.metadata.config, options.model, tree.metadata.place)
    head = right_head(family, family.spelling_of([dotted(path) for path in tree.arrays]))
    return head.head if head else None


def _options(there: Mapping[str, LazyArray], wording: Wording) -> ToMaxText:
    """The options that the conversion to `there` must have had."""
    model = wording.model
    if model.tied is None:
        model = replace(model, tied="materialize" if _HEAD in there else "drop")
    return ToMaxText(model=model, drop=wording.drop)


def _is_wider(there: LazyArray | None, wanted: LazyArray) -> bool:
    floats = there is not None and there.dtype.is_float and wanted.dtype.is_float
    return floats and there is not None and there.dtype.bits == 32 and wanted.dtype.bits == 16


def _as_huggingface(source: Tree, made: Tree, model: ModelOptions) -> Counterpart:
    weights = {dotted(path): array for path, array in made.arrays.items()}
    known = ModelFiles.of(source, None)
    config = made.metadata.config or known.config
    # Names are spelled as `made` has them, whatever was written down of the model that `source` came from.
    files = replace(known, config=config, weights=weights, carried={}, spelling=None)
    options = ToHuggingFace(model=model if model.tied else replace(model, tied="keep"))
    converted = to_huggingface(source, options, files)
    carried = {name: array for name, array in known.carried.items() if name in weights}
    # A conversion with --like leaves them out, too.
    absent = known.carried.keys() - carried.keys()
    remark = f"left out, as it is carried along and not in {made.metadata.place}: {array_count(absent)}"
    arrays = {dotted(path): array for path, array in converted.tree.arrays.items()}
    return Counterpart({**arrays, **carried}, (remark,) if absent else (), converted.surplus)
