"""Whether a checkpoint holds what it should, bit by bit: one call, one report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ckpttools.api.sources import (
    DEFAULT_MEMORY,
    Looking,
    Observe,
    Reading,
    Source,
    looking,
    opened,
    read_options,
)
from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree
from ckpttools.core.errors import UsageError, listing
from ckpttools.core.wording import option
from ckpttools.digest.canonical import Selection
from ckpttools.digest.differences import Difference
from ckpttools.digest.manifest import Manifest
from ckpttools.maxtext.model import check_choice

if TYPE_CHECKING:
    from ckpttools.compare.counterpart import Counterpart, Paired, Wording

_SHOWN = 8


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """What was found.

    Attributes:
        path: the checkpoint.
        against: what it should be: a checkpoint or a manifest.
        equal: whether it is.
        arrays: how many were there.
        nbytes: of these.
        different: how many are not as they should be, those that are missing included.
        differences: each of them.
        remarks: what took no part, in words.
        hints: which options leave all that differs out of account.
    """

    path: str
    against: str
    equal: bool
    arrays: int
    nbytes: int
    different: int
    differences: tuple[Difference, ...]
    remarks: tuple[str, ...]
    hints: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The verdict, and what differs, arrays whose names differ in numbers only on one line."""
        lines = [f"{each.name}: {each.reason}" for each in self.differences]
        verdict = "equal" if self.equal else f"{self.different:,} different"
        what = f"{self.path} against {self.against}"
        return f"<Verification of {what}: {verdict}, {self.arrays:,} arrays{listing(lines, _SHOWN)}>"


def verify(
    checkpoint: Source,
    against: Source | None = None,
    *,
    manifest: str | os.PathLike[str] | None = None,
    cast: bool = False,
    padding_rows: str | None = None,
    family: str | None = None,
    rope_layout: str | None = None,
    tied: str | None = None,
    drop: Sequence[str] = (),
    filter: str = "*",
    per_layer: bool = True,
    parameters: bool = False,
    memory: int | str = DEFAULT_MEMORY,
    jobs: int | None = None,
    observe: Observe | None = None,
    **reading: Unpack[Reading],
) -> Verification:
    """Compares bit by bit with another checkpoint, or with the digests of a manifest.

    Both may be in any format and layout. Where one is of Hugging Face and the other MaxText's, `against` is
    compared as a conversion to `checkpoint` spells it.

    Args:
        checkpoint: what to prove: a file, an item, a step or a run directory, or a tree.
        against: the checkpoint that it should be equal to.
        manifest: instead of that, a file of digests as `ckpttools.hash` writes them.
        cast: compare with `against` cast to the dtypes of `checkpoint`.
        padding_rows: whether rows that MaxText has beyond the vocabulary of Hugging Face's side count:
            "keep" or "drop"; None for those that are not zeros.
        family, rope_layout, tied: what is said of the conversion; as in `ckpttools.ModelOptions`.
        drop: patterns of Hugging Face arrays that the conversion left out.
        filter: shell pattern of the names to compare.
        per_layer: stacked layers one by one; else as they are stored.
        parameters: these alone, without optimizer state, step and random states.
        memory: bytes that may be resident at most, as a number or as text: "4GiB".
        jobs: workers at a time; None for one for each core, 16 at most.
        observe: called with the bytes that were read and with all that will be.
        reading: how a path is opened, see `ckpttools.api.sources.Reading`.

    Raises:
        CheckpointError: one of them cannot be read, the memory is too small, or the one cannot have become
            the other.
        UsageError: `against` and `manifest` are both given, or neither; or no array matches.
    """
    check_choice("way with rows beyond the vocabulary", padding_rows, ("keep", "drop"))
    if (against is None) == (manifest is None):
        wanted = f"one of: {option('against', 'SRC')}, {option('manifest', 'FILE')}"
        raise UsageError("say what to compare with", wanted=wanted)
    said = _Said(wording_of(family, rope_layout, tied, drop), cast, padding_rows)
    selection = Selection(filter, per_layer, parameters)
    with looking(memory, jobs, observe) as look:
        read = read_options(reading)
        tree = opened(checkpoint, read)
        if against is not None:
            other = opened(against, replace(read, step=None))
            return _bit_by_bit(tree, other, said, selection, look)
        return _by_digests(tree, Path(manifest or ""), said, selection, look)


@dataclass(frozen=True, slots=True)
class _Said:
    """What the user says of what made the one of the other."""

    wording: Wording | None
    casts: bool
    padding_rows: str | None


def wording_of(
    family: str | None, rope_layout: str | None, tied: str | None, drop: str | Sequence[str]
) -> Wording | None:
    """What is said of a conversion; None where nothing is, which spares the import of all conversions."""
    if not (family or rope_layout or tied or drop):
        return None
    from ckpttools.compare.counterpart import Wording
    from ckpttools.maxtext.model import ModelOptions

    patterns = (drop,) if isinstance(drop, str) else tuple(drop)
    return Wording(ModelOptions(family, rope_layout, tied), patterns)


def _bit_by_bit(tree: Tree, source: Tree, said: _Said, selection: Selection, look: Looking) -> Verification:
    from ckpttools.compare.hints import after_verify
    from ckpttools.compare.verify import compare
    from ckpttools.transforms.cast import cast as cast_to

    sides = _sides(tree, source, said, selection, look.memory)
    mine, wanted = sides.mine, sides.wanted
    if said.casts:
        wanted = {
            name: cast_to(array, mine[name].dtype) if name in mine else array
            for name, array in wanted.items()
        }
    total = sum(mine[name].nbytes + wanted[name].nbytes for name in mine.keys() & wanted.keys())
    found = compare(mine, wanted, memory=look.memory, jobs=look.jobs, observe=look.observer(total))
    made = _verification(tree, source.metadata.place, mine, found, sides.remarks)
    return replace(made, hints=after_verify(found, mine, wanted))


def _sides(tree: Tree, source: Tree, said: _Said, selection: Selection, memory: int) -> Paired:
    """What is compared with what."""
    from ckpttools.compare.counterpart import Paired, counterpart, paired, require_no_padding

    respelled = counterpart(source, tree, said.wording)
    if respelled is None:
        require_no_padding(said.padding_rows)
        return Paired(selection.arrays(tree), selection.arrays(source))
    if not selection.layers:
        hint = f"leave out {option('per_layer', False)}"
        raise UsageError("a conversion is compared layer by layer", hint=hint)
    parameters = replace(selection, parameters=True)
    both = paired(
        parameters.arrays(tree),
        parameters.chosen(respelled.arrays, source.metadata.place),
        respelled.surplus,
        padding_rows=said.padding_rows,
        memory=memory,
    )
    return replace(both, remarks=(*respelled.remarks, *both.remarks))


def _by_digests(tree: Tree, path: Path, said: _Said, selection: Selection, look: Looking) -> Verification:
    from ckpttools.compare.hints import after_manifest
    from ckpttools.digest.hashing import differences, hash_tree
    from ckpttools.digest.manifest import read_manifest

    if said.casts:
        what, where = option("cast", True), option("against")
        raise UsageError(f"{what} is for {where}: a manifest has digests of one dtype")
    if selection != Selection():
        hint = f"leave out {option('filter')} and the like"
        raise UsageError("the manifest says which arrays are meant", hint=hint)
    manifest = read_manifest(path)
    mine = _as_in(manifest, tree, said, look.memory)
    selection = Selection(spelling=lambda tree: mine.arrays)
    made = hash_tree(
        tree,
        selection,
        algorithm=manifest.algorithm,
        memory=look.memory,
        jobs=look.jobs,
        observe=look.observer(selection.nbytes(tree)),
    )
    found = differences(made, manifest)
    shown = _verification(tree, str(path), mine.arrays, found, mine.remarks)
    return replace(shown, hints=after_manifest(found, mine.arrays, manifest.arrays))


def _as_in(manifest: Manifest, tree: Tree, said: _Said, memory: int) -> Counterpart:
    """The arrays that a manifest means, under the names that it gives them."""
    from ckpttools.compare.counterpart import Counterpart, in_maxtext_names, require_no_padding, require_none
    from ckpttools.maxtext.view import view_of
    from ckpttools.maxtext.vocabulary import less_padding

    selection = manifest.selection
    if manifest.names != "maxtext":
        require_none(said.wording, "the manifest has the names that are stored")
        require_no_padding(said.padding_rows)
        return Counterpart(selection.arrays(tree))
    named = in_maxtext_names(tree, said.wording)
    arrays = selection.chosen(named.arrays, tree.metadata.place)
    shapes = {name: each.shape for name, each in manifest.arrays.items()}
    # A Hugging Face model has no rows beyond its own vocabulary.
    way = said.padding_rows if view_of(tree).is_maxtext else "keep"
    less = less_padding(arrays, shapes, way, memory)
    return Counterpart(less.arrays, (*named.remarks, *less.remarks))


def _verification(
    tree: Tree,
    against: str,
    arrays: Mapping[str, LazyArray],
    found: tuple[Difference, ...],
    remarks: tuple[str, ...],
) -> Verification:
    nbytes = sum(each.nbytes for each in arrays.values())
    where = tree.metadata.place
    return Verification(where, against, not found, len(arrays), nbytes, len(found), found, remarks)
