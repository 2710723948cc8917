"""Verify bit for bit that a checkpoint has the expected arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from ckpttools.api.options import LIMITS, PROGRESS_CALL, SCANNING
from ckpttools.api.options.inspect import VERIFY
from ckpttools.api.sources import (
    DEFAULT_MEMORY,
    Observe,
    Scanning,
    ScanSettings,
    Source,
    open_both,
    opened,
    scanning,
)
from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Empty, Tree
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, UsageError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.core.options import declare
from ckpttools.core.tabular import Tabular
from ckpttools.core.text import array_count, plural, sample_names, sort_naturally
from ckpttools.digest.canonical import STEP, Selection, drop_step, parameters_among, with_carried
from ckpttools.digest.leaves import LeafKinds
from ckpttools.digest.manifest import Manifest
from ckpttools.digest.pairing import Difference, NamedArrays, Pairing, Remark, kind_differences, sort_by_name
from ckpttools.maxtext.model_options import check_choice
from ckpttools.quantized.view import make_comparable, quantized_view
from ckpttools.stores.contents import FileDifference, SupportsContents, find_differing_files
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

if TYPE_CHECKING:
    from ckpttools.compare.conversion import ConversionOptions


_MAX_SHOWN = 8
_ONE_SIDED = ("missing", "extra")


@dataclass(frozen=True, slots=True, repr=False)
class Verification(Tabular):
    """The result of a verification.

    Attributes:
        path: Path of the checkpoint.
        against: The reference: a checkpoint or a manifest.
        equal: Whether both are the same.
        arrays: Number of arrays in the checkpoint.
        nbytes: Total size of the arrays, in bytes.
        different: Number of arrays that differ or are missing.
        differences: The arrays that differ or are missing.
        remarks: Arrays that were left out.
        hints: Options that would ignore all differences.
    """

    rows_field = "differences"

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
        """Return the verdict and the differences. Arrays whose names differ only in numbers share a line."""
        lines = [f"{difference.name}: {difference.reason}" for difference in self.differences]
        verdict = "equal" if self.equal else f"{self.different:,} different"
        text = f"{self.path} against {self.against}"
        return f"<Verification of {text}: {verdict}, {self.arrays:,} arrays{listing(lines, _MAX_SHOWN)}>"


@validate_arguments
@declare(*VERIFY, *SCANNING)
def verify(
    checkpoint: Source,
    against: Source | None = None,
    *,
    manifest: LocationLike | None = None,
    cast: bool = False,
    padding_rows: str | None = None,
    family: str | None = None,
    rope_layout: str | None = None,
    tied: str | None = None,
    drop: Sequence[str] = (),
    filter: str = "*",
    per_layer: bool = True,
    parameters: bool = False,
    **common: Unpack[Scanning],
) -> Verification:
    """Compare a checkpoint bit for bit with another one, or with the digests of a manifest.

    Both may be in any format and layout. If one is a Hugging Face checkpoint and the other MaxText's,
    `against` is compared as a conversion to `checkpoint` would write it.

    Args:
        checkpoint: The checkpoint to verify: a file, item, step or run directory, or a tree.

    Raises:
        CheckpointError: A checkpoint cannot be read, the memory is too small, or one cannot be converted
            to the other.
        UsageError: Both or neither of `against` and `manifest` are given, or no array matches.
    """
    check_choice("way with rows beyond the vocabulary", padding_rows, ("keep", "drop"))
    if (against is None) == (manifest is None):
        expected = f"one of: {option('against', 'SRC')}, {option('manifest', 'FILE')}"
        raise UsageError(
            "pass a reference to compare with", expected=expected, hint=_hub_verify_hint(checkpoint)
        )
    declared = _StatedSettings(conversion_options(family, rope_layout, tied, drop), cast, padding_rows)
    selection = Selection(filter, per_layer, parameters)
    with scanning(common) as scan:
        if against is not None:
            tree, other = open_both(checkpoint, against, scan.read, replace(scan.read, step=None))
            scan.fetch(tree, other)
            actual, expected_view = make_comparable(tree, other, is_read=filter == "*")
            given = (checkpoint, actual.tree), (against, expected_view.tree)
            result = _bit_by_bit(*given, declared, selection, scan)
            sides = ("this", actual), ("the source", expected_view)
            remarks = [f"{side}: {item.remark}" for side, item in sides if item.remark]
            return replace(result, remarks=(*remarks, *result.remarks))
        tree = opened(checkpoint, scan.read)
        scan.fetch(tree)
        return _verify_by_digests(tree, parse(manifest or ""), declared, selection, scan)


def _hub_verify_hint(checkpoint: Source) -> str | None:
    """Return the call that verifies a checkpoint by itself, if its store lists digests of its files."""
    is_listed = not isinstance(checkpoint, Tree) and isinstance(parse(checkpoint).store, SupportsContents)
    return "ckpttools.verify_files compares it with the digests that its store lists" if is_listed else None


@dataclass(frozen=True, slots=True)
class _StatedSettings:
    """Options of the conversion between the two checkpoints."""

    conversion: ConversionOptions | None
    casts: bool
    padding_rows: str | None


def conversion_options(
    family: str | None, rope_layout: str | None, tied: str | None, drop: str | Sequence[str]
) -> ConversionOptions | None:
    """Return the conversion options; None if there are none, which avoids importing conversions."""
    if not (family or rope_layout or tied or drop):
        return None
    from ckpttools.compare.conversion import ConversionOptions
    from ckpttools.maxtext.model_options import ModelOptions

    patterns = (drop,) if isinstance(drop, str) else tuple(drop)
    return ConversionOptions(ModelOptions(family, rope_layout, tied), patterns)


def _bit_by_bit(
    a: tuple[Source, Tree],
    b: tuple[Source, Tree],
    stated: _StatedSettings,
    selection: Selection,
    scan: ScanSettings,
) -> Verification:
    from ckpttools.api.step_files import with_step_files
    from ckpttools.compare.hints import diff_command, hints_after_verify

    (_, tree), (_, source) = a, b
    both, result = _differences(tree, source, stated, selection, scan)
    if selection == Selection(layers=selection.layers):
        files = with_step_files(Pairing[LazyArray]({}, {}), a, b)
        both = replace(both, remarks=(*both.remarks, *files.remarks))
        result = sort_by_name((*result, *kind_differences(files)))
    remarks = tuple(remark.text for remark in both.remarks)
    built = _verification(tree, source.metadata.location, both.a, result, remarks)
    compared = diff_command(source.metadata.location, tree.metadata.location)
    hints = _equal_values_hint(result, both, tree, source, scan) or hints_after_verify(result, both, compared)
    if result and not hints and not (both.a.keys() & both.b.keys()):
        hints = _compare_names(tree, source, compared)
    return replace(built, hints=hints)


_Compared = tuple[Pairing[LazyArray], tuple[Difference, ...]]


def _differences(
    tree: Tree, source: Tree, stated: _StatedSettings, selection: Selection, scan: ScanSettings
) -> _Compared:
    """Compare two trees and find their differences.

    Arrays are compared under MaxText's names, as in `diff`. If a Hugging Face checkpoint differs from
    MaxText's, the result of the conversion is compared as well.
    """
    from ckpttools.compare.conversion import as_huggingface, pair_conversion

    both = pair_conversion(tree, source, selection, stated.conversion, stated.padding_rows)
    dropped = stated.conversion.drop if stated.conversion else ()
    is_to_hub, is_filtered = both.maxtext == "B", selection.pattern != "*"
    if is_to_hub and (is_filtered or dropped):
        # Filters apply to the checkpoint's names, and patterns to drop apply to Hugging Face names.
        state = [] if is_filtered else _state_differences(both, kind_differences(both))
        back, unequal = _compare(as_huggingface(tree, source, selection, stated.conversion), stated, scan)
        return back, sort_by_name((*unequal, *state))
    first = both, result = _compare(both, stated, scan)
    if not result or both.maxtext is None or is_filtered or dropped:
        return first
    hub, maxtext = (tree, source) if is_to_hub else (source, tree)
    try:
        converted = as_huggingface(hub, maxtext, selection, stated.conversion)
    except CheckpointError:
        # A conversion rejects these arrays; the first comparison lists them.
        return first
    back, unequal = _compare(converted, stated, scan)
    state = _state_differences(both, result)
    is_incomplete = any(item.reason in _ONE_SIDED for item in result if item not in state)
    # Arrays that differ only by the rounding of the reverse conversion are equal under MaxText's names.
    if (not unequal and is_incomplete) or (unequal and _elements(unequal) > _elements(result)):
        return first
    if not unequal:
        back = replace(back, remarks=(*back.remarks, _rounding_remark(result, state)))
    return (back, sort_by_name((*unequal, *state))) if is_to_hub or not unequal else first


def _rounding_remark(result: Sequence[Difference], state: Sequence[Difference]) -> Remark:
    names = [item.name for item in result if item not in state]
    return Remark(
        "equal as the conversion from MaxText to Hugging Face writes them, which rounds; in the other "
        f"direction, values differ in {array_count(names)}: {sample_names(names)}"
    )


def _elements(result: Sequence[Difference]) -> int:
    return sum(item.elements or 0 for item in result)


def _state_differences(both: Pairing[LazyArray], result: Sequence[Difference]) -> list[Difference]:
    """Return the differences outside the parameters."""
    parameters = parameters_among({**both.a, **both.b})
    return [item for item in result if item.name not in parameters]


def _compare(both: Pairing[LazyArray], stated: _StatedSettings, scan: ScanSettings) -> _Compared:
    from ckpttools.compare.padding import drop_implied
    from ckpttools.compare.verify import compare

    both = drop_implied(both, stated.padding_rows, scan.memory)
    both = _cast(both) if stated.casts else both
    total = sum(actual.nbytes + expected.nbytes for _, actual, expected in both.pairs)
    return both, compare(both, memory=scan.memory, jobs=scan.jobs, observe=scan.observer(total))


def _compare_names(tree: Tree, source: Tree, compared: str) -> tuple[str, ...]:
    from ckpttools.api.trainer_hints import merge_command_hint, names_of_hub

    others = f"{compared} knows more names, and {action('remap')} renames by rules"
    hint = merge_command_hint(source, tree) or names_of_hub(source, tree) or others
    return (f"no array has the same name on both sides: {hint}",)


def _equal_values_hint(
    result: Sequence[Difference], both: Pairing[LazyArray], tree: Tree, source: Tree, scan: ScanSettings
) -> tuple[str, ...]:
    """Return a hint if all differing quantized values and scales represent the same values."""
    if not result or any(item.reason != "values" or item.name not in both.a for item in result):
        return ()
    arrays = [both.a[item.name] for item in result]
    return equal_values_hint(tree, source, arrays, memory=scan.memory, jobs=scan.jobs)


def _cast(both: Pairing[LazyArray]) -> Pairing[LazyArray]:
    """Cast B's arrays to the dtypes of A's."""
    from ckpttools.transforms.cast import cast

    return replace(both, b={**both.b, **{name: cast(b, a.dtype) for name, a, b in both.pairs}})


def _verify_by_digests(
    tree: Tree, path: Location, stated: _StatedSettings, selection: Selection, scan: ScanSettings
) -> Verification:
    from ckpttools.compare.hints import hints_after_manifest
    from ckpttools.digest.hashing import differences, hash_tree
    from ckpttools.digest.manifest import read_manifest

    if stated.casts:
        cast_option, where = option("cast", True), option("against")
        raise UsageError(f"{cast_option} is for {where}: a manifest has digests of one dtype")
    if replace(selection, parameters=False) != Selection():
        hint = f"leave out {option('filter')} and the like"
        raise UsageError("the manifest determines which arrays are compared", hint=hint)
    manifest = read_manifest(path)
    if selection.parameters:
        manifest = manifest.of_parameters()
    named = _as_in(manifest, tree, stated, scan.memory)
    selected = manifest.selection.names(named.arrays)
    arrays = {name: named.arrays[name] for name in sort_naturally(named.arrays) if name in selected}
    built = hash_tree(
        tree,
        replace(manifest.selection, naming=lambda tree: arrays),
        algorithm=manifest.algorithm,
        memory=scan.memory,
        jobs=scan.jobs,
        observe=scan.observer(sum(array.nbytes for array in arrays.values())),
    )
    result = differences(built, manifest)
    remarks = (*named.remarks, *_not_compared(tree, named.arrays.keys() - selected, manifest, built.nodes))
    verification = _verification(tree, str(path), arrays, result, remarks)
    return replace(verification, hints=hints_after_manifest(result, arrays, manifest.arrays))


def _not_compared(
    tree: Tree, names: Collection[str], manifest: Manifest, nodes: LeafKinds | None
) -> Iterator[str]:
    """Report arrays outside the manifest's selection, and texts and nodes that it does not record."""
    if names:
        selection = manifest.selection
        kind = "parameters" if selection.parameters else "arrays"
        pattern_text = "" if selection.pattern == "*" else f" that match {selection.pattern!r}"
        yield f"not compared: {array_count(names)}, because the manifest covers only {kind}{pattern_text}"
    texts = manifest.selection.texts(tree)
    if manifest.texts is None and texts:
        yield (
            f"not compared, because the manifest does not record texts: {sample_names(texts)}; "
            f"{action('hash', 'SRC', manifest='FILE')} records them"
        )
    recorded = manifest.nodes
    empty = sum(isinstance(leaf, Empty) for leaf in tree.values())
    kinds = nodes.kinds if nodes else {}
    is_comparable = nodes is not None and recorded is not None and nodes.comparable(recorded)
    if recorded and not is_comparable and kinds != recorded.kinds:
        yield "not compared, because the manifest is of another layout: empty nodes and kinds of numbers"
    elif empty and recorded is None and not manifest.selection.parameters:
        yield f"not compared, because this manifest does not record them: {plural(empty, 'empty node')}"


def _as_in(manifest: Manifest, tree: Tree, stated: _StatedSettings, memory: int) -> NamedArrays[LazyArray]:
    """Return all arrays of a checkpoint under the kind of names that the manifest uses."""
    from ckpttools.compare.conversion import (
        drop_implied_arrays,
        name_like_maxtext,
        require_no_padding,
        require_none,
    )
    from ckpttools.maxtext.scan_axis import scan_axis_remarks
    from ckpttools.maxtext.view import view_of
    from ckpttools.maxtext.vocabulary import drop_vocabulary_padding

    layers = manifest.selection.layers
    if manifest.names != "maxtext":
        require_none(stated.conversion, "the manifest has the names that are stored")
        require_no_padding(stated.padding_rows)
        return NamedArrays(with_carried(tree, layers), scan_axis_remarks(tree) if layers else ())
    named = name_like_maxtext(quantized_view(tree).plain().tree, stated.conversion, is_strict=False)
    named = drop_implied_arrays(named, manifest.arrays, tree.metadata.config, memory)
    arrays = named.arrays if STEP in manifest.arrays else drop_step(named.arrays)
    shapes = {name: item.shape for name, item in manifest.arrays.items()}
    # A Hugging Face model has no rows beyond its own vocabulary.
    padding_mode = stated.padding_rows if view_of(tree).is_maxtext else "keep"
    less = drop_vocabulary_padding(arrays, shapes, padding_mode, memory)
    return NamedArrays(less.arrays, (*named.remarks, *less.remarks))


def _verification(
    tree: Tree,
    against: str,
    arrays: Mapping[str, LazyArray],
    result: tuple[Difference, ...],
    remarks: tuple[str, ...],
) -> Verification:
    nbytes = sum(array.nbytes for array in arrays.values())
    where = tree.metadata.location
    return Verification(where, against, not result, len(arrays), nbytes, len(result), result, remarks)


_MAX_FILES_SHOWN = 8


@dataclass(frozen=True, slots=True, repr=False)
class FileVerification:
    """The result of a verification of files.

    Attributes:
        path: Path that was read, with the commit of a revision.
        against: Origin of the expected digests.
        equal: Whether all files have the expected digests.
        files: Number of files.
        nbytes: Total size of the files, in bytes.
        different: Number of files that differ.
        differences: The files that differ.
    """

    path: str
    against: str
    equal: bool
    files: int
    nbytes: int
    different: int
    differences: tuple[FileDifference, ...]

    def __repr__(self) -> str:
        lines = [
            f"{difference.name}: {difference.got} instead of {difference.expected}"
            for difference in self.differences
        ]
        verdict = "equal" if self.equal else f"{self.different:,} different"
        text = f"{self.path} against {self.against}"
        return (
            f"<FileVerification of {text}: {verdict}, {self.files:,} files{listing(lines, _MAX_FILES_SHOWN)}>"
        )


@validate_arguments
@declare(*LIMITS, PROGRESS_CALL)
def verify_files(
    checkpoint: LocationLike,
    *,
    memory: int | str = DEFAULT_MEMORY,
    jobs: int | None = None,
    requests: int | None = None,
    observe: Observe | None = None,
) -> FileVerification:
    """Read all files and compare them with the digests that their store lists, as the Hub does.

    Args:
        checkpoint: A model on the Hub, or a directory or file in it.

    Raises:
        UsageError: The store lists no digests.
        MemoryBudgetError: The memory is too small.
        StorageError: The path does not exist, or the store cannot be read.
    """
    location = parse(checkpoint)
    if not isinstance(location.store, SupportsContents):
        raise UsageError(
            f"{location.store.scheme}:// does not list digests of its files",
            location=location,
            expected=f"hf://…, or a reference to compare with: {option('against', 'SRC')}, "
            f"{option('manifest', 'FILE')}",
        )
    result = location.store.contents(location.key)
    total = sum(file.size for file in result.files.values())
    with scanning({"memory": memory, "requests": requests, "observe": observe}) as scan:
        different = find_differing_files(
            location, result.files, memory=scan.memory, jobs=jobs, observe=scan.observer(total)
        )
    return FileVerification(
        str(location.absolute()),
        result.declared,
        not different,
        len(result.files),
        total,
        len(different),
        tuple(different),
    )


def equal_values_hint(
    a: Tree, b: Tree, differing: Collection[LazyArray], *, memory: int, jobs: int | None
) -> tuple[str, ...]:
    """Return a hint if all differing quantized values and scales represent the same values.

    Args:
        a, b: The checkpoints.
        differing: Arrays of `a`, or derived from them, that differ from those of `b`.
        memory, jobs: See `ckpttools.compare.verify.compare`.

    Raises:
        CheckpointError: An array cannot be read, or the memory is too small.
    """
    from ckpttools.compare.verify import compare
    from ckpttools.quantized.dequantized_tree import dequantize_weights, weights_of_arrays

    names = weights_of_arrays(a, differing)
    actual, expected = dequantize_weights(a, names), dequantize_weights(b, names)
    if not names or actual.keys() != expected.keys():
        return ()
    smallest = min(actual, key=lambda name: actual[name].nbytes)
    try:
        # Two different models differ in any weight, so one weight is read before all are.
        for subset in ({smallest}, names):
            sides = {name: actual[name] for name in subset}, {name: expected[name] for name in subset}
            if compare(Pairing(*sides), memory=memory, jobs=jobs):
                return ()
    except FormatError:
        # The scales produce non-finite values.
        return ()
    return (
        f"dequantized, they are equal: codes and scales of {array_count(names)} differ, but their products "
        "in float32 do not",
    )
