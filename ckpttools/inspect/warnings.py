"""Problems with loading a checkpoint, as far as names, shapes, dtypes and chunk grids show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from types import MappingProxyType

from ckpttools.adapters.described import unmerged
from ckpttools.array.chunk_sizes import is_fine, is_giant
from ckpttools.array.gaps import incomplete
from ckpttools.array.nodes import Chunked
from ckpttools.array.tree import Path, Tree, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import grid_shape
from ckpttools.core.text import plural
from ckpttools.maxtext.layout import SCAN_LAYERS
from ckpttools.maxtext.stacked_on import remarks_about_axis
from ckpttools.maxtext.view import view_of
from ckpttools.quantized.readable import weights_in
from ckpttools.quantized.tree import quantized_in
from ckpttools.quantized.weights import is_scale


@dataclass(frozen=True, slots=True)
class TreeWarning:
    """One thing to know before loading.

    Attributes:
        name: "missing-chunks", "damaged-step", "unfinished-step", "contradiction", "no-scan-layers",
            "open-scan-axis", "giant-chunk", "fine-chunks", "mixed-dtypes", "quantized", "unclear-state",
            "unmerged" or "remark".
        text: the finished sentence.
        arrays: paths of those it is about; empty if it is about the whole.
    """

    name: str
    text: str
    arrays: tuple[str, ...] = ()


def warnings_of(
    tree: Tree, unfinished: Mapping[str, str], damaged: Mapping[str, str] = MappingProxyType({})
) -> tuple[TreeWarning, ...]:
    """All warnings about a tree, the most serious first.

    Args:
        tree: any checkpoint.
        unfinished: later steps of its run whose save did not finish: directory name -> what is missing.
        damaged: later steps that finished and have lost something since.
    """
    return (
        *_missing_chunks(tree),
        *_other_steps(tree, "damaged-step", "is damaged", damaged),
        *_other_steps(tree, "unfinished-step", "is an unfinished save", unfinished),
        *(TreeWarning("contradiction", text) for text in view_of(tree).contradictions),
        *_no_scan_layers(tree),
        *(TreeWarning("open-scan-axis", text) for text in remarks_about_axis(tree)),
        *_giant_chunks(tree),
        *_fine_chunks(tree),
        *_mixed_dtypes(tree),
        *_unreadable(tree),
        *_unclear_state(tree),
        *_unmerged(tree),
        *(TreeWarning("remark", text) for text in tree.metadata.notes.remarks),
    )


def _missing_chunks(tree: Tree) -> Iterator[TreeWarning]:
    lacking = incomplete(tree.arrays.values())
    if lacking is not None:
        names = tuple(each.array for each in lacking.arrays)
        yield TreeWarning("missing-chunks", f"{lacking.summary}: {lacking.hint}", names)


def _other_steps(tree: Tree, name: str, what: str, steps: Mapping[str, str]) -> Iterator[TreeWarning]:
    for directory, reason in steps.items():
        yield TreeWarning(name, f"{directory}, beside step {tree.metadata.step}, {what}: {reason}")


def _no_scan_layers(tree: Tree) -> Iterator[TreeWarning]:
    view = view_of(tree)
    if view.is_maxtext and tree.metadata.format == "orbax" and SCAN_LAYERS not in tree.metadata.custom:
        value = "true" if view.is_stacked else "false"
        text = f"the metadata has no {SCAN_LAYERS}: MaxText must be told {SCAN_LAYERS}={value}"
        yield TreeWarning("no-scan-layers", text)


def _giant_chunks(tree: Tree) -> Iterator[TreeWarning]:
    found = _cut_so(tree, is_giant)
    if found:
        largest = max(found, key=lambda path: found[path].nbytes)
        are = "1 array is one chunk" if len(found) == 1 else f"{len(found):,} arrays are one chunk each"
        size = f"{found[largest].nbytes / 1e9:.1f} GB"
        text = f"{are}, {keystr(largest)} {size}: who loads a part of it reads all of it"
        yield TreeWarning("giant-chunk", text, tuple(map(keystr, found)))


def _fine_chunks(tree: Tree) -> Iterator[TreeWarning]:
    found = _cut_so(tree, is_fine)
    if found:
        counts = {path: _chunks(array) for path, array in found.items()}
        most = max(counts, key=lambda path: counts[path])
        size = f"{found[most].nbytes / counts[most] / 1e3:.1f} kB"
        are = "1 array is" if len(found) == 1 else f"{len(found):,} arrays are"
        text = f"{are} cut very finely, {keystr(most)} into {counts[most]:,} chunks of {size}: slow to load"
        yield TreeWarning("fine-chunks", text, tuple(map(keystr, found)))


def _cut_so(tree: Tree, rule: Callable[[int, int], bool]) -> dict[Path, Chunked]:
    """The arrays stored in a grid of chunks whose number and size a rule is about."""
    return {path: array for path, array, chunks, nbytes in tree.once(_grids) if rule(chunks, nbytes)}


def _grids(tree: Tree) -> list[tuple[Path, Chunked, int, int]]:
    """The arrays stored in a grid of chunks: how many each has, and the bytes of one."""
    stored = ((path, array) for path, array in tree.arrays.items() if isinstance(array, Chunked))
    return [(path, each, _chunks(each), prod(each.chunk) * each.dtype.itemsize) for path, each in stored]


def _chunks(array: Chunked) -> int:
    return prod(grid_shape(array.shape, array.chunk))


def _unclear_state(tree: Tree) -> Iterator[TreeWarning]:
    known = view_of(tree).roles
    if known.unclear:
        heads = ", ".join(map(keystr, known.unclear))
        text = f"{heads}: counted as parameters, but may be state of an optimizer or an average of parameters"
        arrays = tuple(keystr(path) for path in tree.arrays if known.unclear_of(path))
        yield TreeWarning("unclear-state", text, arrays)


def _unmerged(tree: Tree) -> Iterator[TreeWarning]:
    """A model as PEFT trains it: modules are wrapped, with factors beside their weights."""
    if wrapped := unmerged(tree):
        text = (
            f"adapters lie beside {plural(len(wrapped), 'array')} of the model, and are not merged into them"
        )
        yield TreeWarning("unmerged", text, tuple(wrapped))


def _mixed_dtypes(tree: Tree) -> Iterator[TreeWarning]:
    """Parameters of several float dtypes; the arrays named are those of all but the commonest.

    Codes of quantised weights and their scales are of other dtypes than the rest in any such model.
    """
    found = quantized_in(tree)
    scaled = {found.paths[name] for each in found.weights.values() for name in (each.name, *each.sides)}
    by_dtype: dict[str, list[Path]] = {}
    for path in view_of(tree).of_role("parameter"):
        array = tree.arrays.get(path)
        is_scaling = path in scaled or (bool(scaled) and is_scale(dotted(path)))
        if array is not None and array.dtype.is_float and not is_scaling:
            by_dtype.setdefault(array.dtype.name, []).append(path)
    ordered = sorted(by_dtype.items(), key=lambda item: -len(item[1]))
    if len(ordered) > 1:
        counts = ", ".join(f"{len(paths):,} in {name}" for name, paths in ordered)
        odd = tuple(keystr(path) for _, paths in ordered[1:] for path in paths)
        yield TreeWarning("mixed-dtypes", f"parameters have mixed dtypes: {counts}", odd)


def _unreadable(tree: Tree) -> Iterator[TreeWarning]:
    """Quantised weights that are shown as they are stored, as no numbers can be made of some."""
    found = weights_in(tree)
    if not found.faults:
        return
    more = f", and {len(found.faults) - 1} more" if len(found.faults) > 1 else ""
    why = (
        "conversions refuse this scheme, and what is counted here is codes"
        if found.is_whole
        else f"{found.faults[0]}{more}"
    )
    text = f"the quantised weights cannot be dequantised: {why}; `ckpt doctor` says what to do"
    yield TreeWarning("quantized", text)
