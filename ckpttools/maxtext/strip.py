"""Remove the training state, keeping the parameters that inference and fine-tuning load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ckpttools.array.lazy import LazyArray
from ckpttools.array.patterns import first_match
from ckpttools.array.tree import Leaf, Path, Tree, dotted, keystr, refuse_collisions
from ckpttools.core.argument_checks import validate_fields
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, UsageError, listing
from ckpttools.core.message_terms import action, option, quoted_option
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count
from ckpttools.formats.orbax.runs import one_item
from ckpttools.maxtext.layers import first_axis_names, with_layer_notes
from ckpttools.maxtext.variables import collection_moves
from ckpttools.maxtext.versions import NNX_AUX, OPTIMIZER, STEP, STEPS
from ckpttools.maxtext.view import LINEN, NNX, Flavor, MaxTextView, linen_state, view_of
from ckpttools.quantized.protection import refuse_separation
from ckpttools.quantized.view import quantized_view
from ckpttools.roles.names import is_random
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.select import require_matches

NewFlavor = Literal["same", "linen", "nnx"]
_AUXILIARY: Path = (NNX_AUX,)


@validate_fields
@dataclass(frozen=True)
class StripOptimizer:
    """A transform that keeps only parameters: no optimizer state, no random states and, by default, no step.

    All learned arrays are kept. Variables in MaxText's `nnx_aux` are moved to the parameters, with their
    layers still on axis 0, so that MaxText loads them.

    Attributes:
        keep_step: Whether to keep the step's array and the number of the step directory. Otherwise, the
            directory is 0, and so is the array in Linen's flavor, as in MaxText's own tool. The NNX flavor
            has no array.
        flavor: How to nest the parameters: "same" (as in the source), "linen" or "nnx".
        keep: Patterns of leaves that are always kept, as in `ckpttools.transforms.select.Select`.
        drop: Patterns of leaves that are dropped, with precedence over everything else.
    """

    keep_step: bool = False
    flavor: NewFlavor = "same"
    keep: Sequence[str] = ()
    drop: Sequence[str] = ()

    def __call__(self, tree: Tree) -> Transformed:
        """Return the parameters, with MaxText's additional nodes in Linen's flavor.

        Raises:
            MappingError: A quantized weight would lose its scales.
            FormatError: There are no parameters, they cannot be identified, or the other flavor does not
                support some of them.
            UsageError: There is nothing to strip, no step to keep, or a pattern matches nothing.
        """
        require_matches((*self.keep, *self.drop), tree, tree.metadata.location)
        left = Tree({p: item for p, item in tree.items() if not first_match(p, self.drop)}, tree.metadata)
        view, location = view_of(left), tree.metadata.location or None
        own = view.flavor
        target = {"linen": LINEN, "nnx": NNX}.get(self.flavor, own)
        self._require_clear(left)
        if not any(path in left.arrays for path in view.of_role("parameter")):
            raise FormatError(
                "the checkpoint has no parameters", location=location, expected="more than optimizer state"
            )
        new_paths = _parameter_paths(view, target)
        kept = {path: path for path in left if first_match(path, self.keep)} | new_paths
        dropped = [path for path in tree.arrays if path not in kept and path not in STEPS]
        if not dropped and target == own:
            raise UsageError(
                "there is nothing to strip: the checkpoint has no known optimizer state or random states",
                location=location,
                hint=f"to cast it, use {action('cast')}; to leave out other arrays, "
                + option("drop", "PATTERN"),
            )
        leaves = {new: left[old] for old, new in kept.items()}
        result = _add_flavor_nodes(leaves, tree, target, self._step(tree))
        # A new step takes the position of the source's step.
        kept_paths = {*kept, *(STEPS if STEP in result else ())}
        dropped = [path for path in tree.arrays if path not in kept_paths]
        if quantized_view(tree).weights:
            refuse_separation(tree, result, {new: old for old, new in kept.items() if old in tree.arrays})
        notes = Notes(dropped=tuple(map(keystr, dropped)), remarks=_count_dropped(tree, dropped))
        return Transformed(_as_single_item(_with_axis_notes(result, view_of(tree), kept, target)), notes)

    def _require_clear(self, tree: Tree) -> None:
        """Raise an error if arrays may be either optimizer state or learned."""
        known = view_of(tree).roles
        left = [path for path in tree.arrays if known.unclear_of(path) and not first_match(path, self.keep)]
        heads = dict.fromkeys(head for path in left if (head := known.unclear_of(path)))
        if heads:
            first = _pattern(next(iter(heads)), left)
            neighbor_text = f" next to {keystr(known.mirrored)}" if known.mirrored else ""
            copy = f" if it, not {keystr(known.mirrored)}, is the copy" if known.mirrored else " a copy"
            raise FormatError(
                "it is unclear whether this is optimizer state or learned, such as an average of "
                f"parameters{neighbor_text}" + listing([_ambiguous_line(tree, head) for head in heads]),
                location=tree.metadata.location or None,
                hint=f"{quoted_option('keep', first)} if it is learned; "
                f"{quoted_option('drop', first)} if it is state, or{copy}",
            )

    def _step(self, tree: Tree) -> LazyArray | None:
        """Return the array of the step if it is kept."""
        if not self.keep_step:
            return None
        step = next((tree.arrays[path] for path in STEPS if path in tree.arrays), None)
        if step is None:
            raise UsageError("the checkpoint has no step to keep", location=tree.metadata.location or None)
        return step


def _count_dropped(tree: Tree, dropped: Sequence[Path]) -> tuple[str, ...]:
    """Return remarks with the number of dropped arrays of each kind."""
    known = view_of(tree).roles
    state = [path for path in dropped if known.of(path) == "optimizer"]
    random = [path for path in dropped if known.of(path) != "optimizer" and is_random(path)]
    others = len(dropped) - len(state) - len(random)
    kinds = {"of the optimizer": len(state), "of random states": len(random), "of neither": others}
    counts = [f"{count:,} {kind}" for kind, count in kinds.items() if count]
    return (f"dropped, by kind: {', '.join(counts)}",) if counts else ()


def _pattern(head: Path, paths: Sequence[Path]) -> str:
    """Return a pattern for everything below a prefix, with the separator of the tree."""
    patterns = (keystr(head), dotted(head))
    return next(
        (pattern for pattern in patterns if any(first_match(path, (pattern,)) for path in paths)), patterns[0]
    )


def _ambiguous_line(tree: Tree, head: Path) -> str:
    arrays = [keystr(path) for path in tree.arrays if view_of(tree).roles.unclear_of(path) == head]
    return f"{keystr(head)}: {array_count(arrays)}"


def _parameter_paths(view: MaxTextView, target: Flavor) -> dict[Path, Path]:
    """Map the paths of learned arrays to their paths in the new tree.

    Raises:
        FormatError: The target flavor does not support arrays outside the model, or two arrays would have the
            same path.
    """
    own, model = view.flavor, {tree_path: inner for inner, tree_path in view.homes.items()}
    learned = view.of_role("parameter")
    empty = {path for path in learned if path not in view.arrays}
    if target == own:
        # MaxText's training looks for these variables in a separate collection, but its post-training does
        # not.
        moved = {
            **{
                path: own.wrapped(model[path]) for path in learned if path in model and path[:1] == _AUXILIARY
            },
            **collection_moves(view),
        }
        placed = {p: moved.get(p, p) for p in learned if p not in empty or p[:1] != _AUXILIARY}
    else:
        placed = {path: target.wrapped(inner) for path, inner in model.items()}
        unplaced = [keystr(path) for path in learned if path not in placed and path not in empty]
        if unplaced:
            raise FormatError(
                f"the flavor {target.name} does not support these arrays outside the parameters"
                + listing(unplaced),
                location=view.metadata.location or None,
                hint=f"keep the flavor with {option('flavor', 'same')}, or leave this out with "
                f"{option('drop', 'PATTERN')}",
            )
    refuse_collisions(placed.values())
    return placed


def _with_axis_notes(tree: Tree, view: MaxTextView, kept: Mapping[Path, Path], target: Flavor) -> Tree:
    """Return the new tree with notes about arrays whose layers are on axis 0."""
    notes = view.notes
    were: list[Path] = [tuple(name.split("/")) for name in notes.first_axis]
    # For unstacked layers, only the note records the axis.
    moved = [target.wrapped(path[2:]) for path in were if path[:1] == _AUXILIARY]
    leading = [kept[path] for path in view.leading_layer_paths if path in kept]
    stay = [path for path in were if path[:1] != _AUXILIARY]
    return with_layer_notes(tree, replace(notes, first_axis=first_axis_names([*leading, *moved, *stay])))


def _as_single_item(tree: Tree) -> Tree:
    """Return the tree as a single item if only one item of a training state remains."""
    left = [name for name in tree.metadata.items if any(path[0] == name for path in tree)]
    is_whole = all(path[0] in left for path in tree)
    return one_item(tree, left[0]) if len(left) == 1 and is_whole else tree


def _add_flavor_nodes(kept: Mapping[Path, Leaf], tree: Tree, target: Flavor, step: LazyArray | None) -> Tree:
    """Add the nodes that a flavor has around parameters; a step of None becomes 0."""
    leaves, scalars, source = dict(kept), tree.metadata.scalars, tree.metadata
    if target == LINEN:
        around = linen_state({}, 0, {})
        leaves = {STEP: around[STEP], **leaves, OPTIMIZER: around[OPTIMIZER]}
        scalars = scalars | around.metadata.scalars if step is None else scalars
    if step is not None and target.name != "nnx":
        leaves[STEP] = step
    return Tree(
        leaves,
        replace(
            source,
            step=None if step is None else source.step,
            scalars=scalars & leaves.keys(),
            key_impls={path: name for path, name in source.key_impls.items() if path in leaves},
        ),
    )
