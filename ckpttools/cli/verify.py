"""`ckpt verify`: proves that a checkpoint holds what it should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from ckpttools.cli.hash import selection_options
from ckpttools.cli.options import ANY_PATH, json_option, read_options, resource_options
from ckpttools.cli.output import print_json, show
from ckpttools.cli.scanning import progress_option, watching
from ckpttools.cli.units import counted, disk
from ckpttools.cli.wording import padding_rows_option, wording_options
from ckpttools.core.errors import UsageError
from ckpttools.core.text import folded, printable

if TYPE_CHECKING:
    from ckpttools.api.conversion import Resources
    from ckpttools.array.tree import Tree
    from ckpttools.compare.counterpart import Counterpart, Paired, Wording
    from ckpttools.digest.canonical import Selection
    from ckpttools.digest.differences import Difference
    from ckpttools.digest.manifest import Manifest
    from ckpttools.formats.base import ReadOptions

_DIFFERENT = 1
_MOST_LINES = 20
# What `Difference.reason` is called after a number of arrays; also the order in which they are listed.
_REASONS = {
    "values": "with other values",
    "dtype": "of another dtype",
    "shape": "of another shape",
    "missing": "missing",
    "extra": "too many",
}


@dataclass(frozen=True, slots=True)
class Verification:
    """What `ckpt verify` found.

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


@click.command(short_help="Prove that a checkpoint holds what another one does.")
@click.argument("path", metavar="DST", type=ANY_PATH)
@click.option("--against", type=ANY_PATH, metavar="SRC", help="The checkpoint that DST should be equal to.")
@click.option(
    "--manifest", type=ANY_PATH, metavar="FILE", help="Digests, as ckpt hash --manifest writes them."
)
@click.option(
    "--cast", "casts", is_flag=True, help="Compare with SRC cast to the dtypes of DST, as --dtype casts it."
)
@padding_rows_option
@wording_options
@json_option
@selection_options
@resource_options
@progress_option
@read_options
def verify(
    path: Path,
    against: Path | None,
    manifest: Path | None,
    casts: bool,
    padding_rows: str | None,
    wording: Wording | None,
    as_json: bool,
    selection: Selection,
    resources: Resources,
    progress: bool,
    read: ReadOptions,
) -> None:
    """Prove that DST holds the same arrays as SRC, bit by bit, or those that a manifest has digests of.

    Both may be in any format and layout; arrays are named as ckpt hash names them. Where one is of Hugging
    Face and the other MaxText's, SRC is compared as a conversion to DST spells it. All that differs is
    counted, and the place of the first difference in each array is told. --step is for DST; SRC may be the
    directory of a step.

    Exit codes: 0 equal, 1 different; with 3 (bad input) and 5 (input/output) it cannot be told.

    \b
    Example:
      ckpt verify ~/unscanned --against ~/maxtext/llama3.1-8b
      ckpt verify ~/decode --against ~/run/checkpoints --parameters
      ckpt verify ~/maxtext/llama3.1-8b --manifest llama.json
    """
    from ckpttools.formats.registry import open_tree

    if (against is None) == (manifest is None):
        raise UsageError("say what to compare with", wanted="one of: --against SRC, --manifest FILE")
    tree = open_tree(path, read)
    if against is not None:
        source = open_tree(against, replace(read, step=None))
        said = _Said(wording, casts, padding_rows)
        found = _bit_by_bit(tree, source, said, selection, resources, progress)
    else:
        if casts:
            raise UsageError("--cast is for --against: a manifest has digests of one dtype")
        said = _Said(wording, padding_rows=padding_rows)
        found = _by_digests(tree, cast(Path, manifest), said, selection, resources, progress)
    if as_json:
        print_json(found)
    else:
        show(_lines(found))
    if not found.equal:
        click.get_current_context().exit(_DIFFERENT)


@dataclass(frozen=True, slots=True)
class _Said:
    """What the user says of what made the one of the other."""

    wording: Wording | None
    casts: bool = False
    padding_rows: str | None = None


def _bit_by_bit(
    tree: Tree,
    source: Tree,
    said: _Said,
    selection: Selection,
    resources: Resources,
    progress: bool,
) -> Verification:
    from ckpttools.compare.hints import after_verify
    from ckpttools.compare.verify import compare
    from ckpttools.transforms.cast import cast as cast_to

    sides = _sides(tree, source, said, selection, resources)
    mine, wanted = sides.mine, sides.wanted
    if said.casts:
        wanted = {
            name: cast_to(array, mine[name].dtype) if name in mine else array
            for name, array in wanted.items()
        }
    both = sum(mine[name].nbytes + wanted[name].nbytes for name in mine.keys() & wanted.keys())
    with watching(progress, both) as observe:
        found = compare(mine, wanted, memory=resources.memory, jobs=resources.readers, observe=observe)
    nbytes = sum(each.nbytes for each in mine.values())
    made = _verification(tree, source.metadata.place, len(mine), nbytes, found, sides.remarks)
    return replace(made, hints=after_verify(found, mine, wanted))


def _sides(tree: Tree, source: Tree, said: _Said, selection: Selection, resources: Resources) -> Paired:
    """What is compared with what."""
    from ckpttools.compare.counterpart import Paired, counterpart, paired, require_no_padding

    respelled = counterpart(source, tree, said.wording)
    if respelled is None:
        require_no_padding(said.padding_rows)
        return Paired(selection.arrays(tree), selection.arrays(source))
    if not selection.layers:
        raise UsageError("a conversion is compared layer by layer", hint="leave out --whole")
    parameters = replace(selection, parameters=True)
    both = paired(
        parameters.arrays(tree),
        parameters.chosen(respelled.arrays, source.metadata.place),
        respelled.surplus,
        padding_rows=said.padding_rows,
        memory=resources.memory,
    )
    return replace(both, remarks=(*respelled.remarks, *both.remarks))


def _by_digests(
    tree: Tree,
    path: Path,
    said: _Said,
    selection: Selection,
    resources: Resources,
    progress: bool,
) -> Verification:
    from ckpttools.compare.hints import after_manifest
    from ckpttools.digest.canonical import Selection
    from ckpttools.digest.hashing import differences, hash_tree
    from ckpttools.digest.manifest import read_manifest

    if selection != Selection():
        raise UsageError("the manifest says which arrays are meant", hint="leave out --filter and the like")
    manifest = read_manifest(path)
    mine = _as_in(manifest, tree, said, resources)
    selection = Selection(spelling=lambda tree: mine.arrays)
    with watching(progress, selection.nbytes(tree)) as observe:
        made = hash_tree(
            tree,
            selection,
            algorithm=manifest.algorithm,
            memory=resources.memory,
            jobs=resources.readers,
            observe=observe,
        )
    found = differences(made, manifest)
    nbytes = sum(each.nbytes for each in mine.arrays.values())
    shown = _verification(tree, str(path), len(made.arrays), nbytes, found, mine.remarks)
    return replace(shown, hints=after_manifest(found, mine.arrays, manifest.arrays))


def _as_in(manifest: Manifest, tree: Tree, said: _Said, resources: Resources) -> Counterpart:
    """The arrays that a manifest means, under the names that it gives them."""
    from ckpttools.compare.counterpart import Counterpart, in_maxtext_names, require_no_padding, require_none
    from ckpttools.maxtext.kinds import kind_of
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
    way = "keep" if kind_of(tree).kind is None else said.padding_rows
    less = less_padding(arrays, shapes, way, resources.memory)
    return Counterpart(less.arrays, (*named.remarks, *less.remarks))


def _verification(
    tree: Tree,
    against: str,
    arrays: int,
    nbytes: int,
    found: tuple[Difference, ...],
    remarks: tuple[str, ...],
) -> Verification:
    return Verification(tree.metadata.place, against, not found, arrays, nbytes, len(found), found, remarks)


def _lines(found: Verification) -> Iterator[str]:
    yield click.style(printable(found.path), bold=True)
    yield from map(printable, found.remarks)
    if found.equal:
        held = f"{counted(found.arrays, 'array')}, {disk(found.nbytes)}"
        yield f"equal to {printable(found.against)}: {held}"
        return
    reasons = Counter(each.reason for each in found.differences)
    counts = [
        f"{counted(reasons[reason], 'array')} {text}" for reason, text in _REASONS.items() if reasons[reason]
    ]
    yield f"differs from {printable(found.against)}: {', '.join(counts)}"
    yield ""
    lines = [line for reason in _REASONS for line in _of_reason(found, reason)]
    yield from map(printable, lines[:_MOST_LINES])
    if len(lines) > _MOST_LINES:
        yield f"… and {len(lines) - _MOST_LINES:,} more lines; --json lists all"
    if found.hints:
        yield ""
        yield from map(printable, found.hints)


def _of_reason(found: Verification, reason: str) -> list[str]:
    """A line for each array of other values; of the others those that differ in numbers only are one line."""
    listed = [each for each in found.differences if each.reason == reason]
    if reason == "values":
        return [f"{each.name}: {_place(each, found.path)}" for each in listed]
    return folded(
        f"{each.name}: {each.got} instead of {each.wanted}" if each.got else f"{each.name}: {reason}"
        for each in listed
    )


def _place(each: Difference, root: str) -> str:
    """Which elements differ, as far as it is known."""
    first, last = (f"[{', '.join(map(str, index or ()))}]" for index in (each.first, each.last))
    if each.elements is None:
        return f"other values, the first between {first} and {last}"
    file = f", in {each.file.removeprefix(root + '/')}" if each.file and each.file.startswith(root) else ""
    if each.elements == 1:
        return f"1 element differs, at {first}{file}"
    return f"{each.elements:,} elements differ, the first at {first}{file}"
