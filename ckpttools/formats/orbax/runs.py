"""Find the item for an Orbax path, which may be a run, a step or an item.

For a run, the latest finished step is opened. Later unfinished steps are skipped with a warning: a
running job leaves such steps, and steps need not have a tree. A later step that finished but whose tree
cannot be read is an error. Orbax (0.12.8) also takes it for the latest step and fails, and falling back
to older weights could go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from shlex import quote

from ckpttools.array.tree import Metadata, Tree
from ckpttools.core.errors import (
    ChosenItemWarning,
    FormatError,
    LaterStepWarning,
    StorageError,
    UnlistedStepWarning,
    UsageError,
    listing,
    warn_step,
)
from ckpttools.core.message_terms import action
from ckpttools.core.text import first_and_last, natural_key, sample_names
from ckpttools.formats.base import NOT_A_DIRECTORY, OtherSteps
from ckpttools.formats.interrupted import find_interrupted_copy, next_step
from ckpttools.formats.json_file import read_json
from ckpttools.formats.orbax.hosts import hosts_at
from ckpttools.formats.orbax.index import processes_of
from ckpttools.formats.orbax.metadata import COMMIT_FILE, TREE_FILE, holds_arrays, holds_data
from ckpttools.formats.orbax.ocdbt import MANIFEST
from ckpttools.formats.orbax.steps import (
    OrbaxItem,
    OrbaxRun,
    Step,
    commits_by_file,
    directories,
    is_item,
    orbax_at,
    step_of,
)
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse


class DamagedStepError(FormatError):
    """The latest step with a completely saved tree cannot be read."""


def mismatch_reason(path: Location) -> str | None:
    """Return None if a path has an Orbax pytree or a part of one; otherwise return what is missing.

    Raises:
        StorageError: `path` cannot be accessed.
    """
    if not path.is_dir():
        return NOT_A_DIRECTORY
    path.entries()  # Raises StorageError if permission is denied.
    try:
        result = orbax_at(path)
        if not isinstance(result, OrbaxRun) or result.steps or hosts_at(path):
            return None
    except StorageError as error:
        return f"{error.raw.message}: {(error.raw.got or '').partition(' (errno')[0]}"
    reason = f"no {TREE_FILE} here, in a subdirectory or in a step directory"
    if (path / MANIFEST).is_file() or processes_of(path):
        reason = f"an OCDBT database without {TREE_FILE}: an unfinished save, or an incomplete copy"
    return reason


def find_items(place: OrbaxItem | Step | OrbaxRun, step: int | None) -> tuple[OrbaxItem, ...]:
    """Return the named item, or all items of a step (by default the latest finished step of a run).

    Emits `LaterStepWarning` for later steps that are skipped, and `UnlistedStepWarning` if Orbax would not
    open the same step.

    Raises:
        DamagedStepError: The latest finished step is damaged.
        FormatError: A step has no finished tree, or a run has no finished step.
        StorageError: A directory cannot be accessed.
        UsageError: The requested step does not exist.
    """
    match place:
        case OrbaxItem() as item:
            # If this item is requested, other items of the step do not matter.
            reason = ", ".join(item.step.faults([item])) or None
            _require_finished(item.step, reason)
            return (item,)
        case Step() as named:
            result = _items(named)
            _require_finished(named, named.unfinished_reason)
            return result
        case run:
            return _items_of_step(run, step)


def steps_around(tree: Tree) -> OtherSteps:
    """Return later and unfinished steps of the run that contains a tree.

    Args:
        tree: The tree as opened by its format; trees of formats without steps have no other steps.

    Raises:
        StorageError: The run cannot be accessed.
    """
    unfinished: dict[str, str] = {}
    damaged: dict[str, str] = {}
    location = parse(tree.metadata.location)
    step = Step(location) if tree.metadata.items else step_of(location)
    is_one = bool(tree.metadata.items) or is_item(location)
    if tree.metadata.format != "orbax" or step.number is None or not is_one:
        return OtherSteps({}, {})
    siblings = sorted(directories(step.path.parent), key=lambda location: natural_key(location.name))
    for item in map(Step, siblings):
        if _may_be_later(item, step) and not item.others and item.unfinished_reason:
            (damaged if item.is_damaged else unfinished)[item.path.name] = item.unfinished_reason
    return OtherSteps(unfinished, damaged)


def remains_after(step: Step) -> list[Step]:
    """Return later directories named like this step that are unfinished steps or have lost most of a step.

    Other kinds of directories, such as runs and exports, may also end in a number.
    """
    return [
        directory
        for directory in map(Step, directories(step.path.parent))
        if _is_later(directory, step)
        and not directory.is_one
        and not any(Step(below).is_one for below in directories(directory.path))
    ]


def _is_later(other: Step, step: Step) -> bool:
    return other.prefix == step.prefix and (other.number or 0) > (step.number or 0)


def _may_be_later(other: Step, step: Step) -> bool:
    if _is_later(other, step):
        return other.is_one or other in remains_after(step)
    is_alike = other.prefix == step.prefix and other.number is not None
    return is_alike and other.is_in_progress and other.is_one


def _require_finished(step: Step, reason: str | None) -> None:
    """Raise FormatError if `reason` states why a step is unfinished."""
    if reason:
        raise _unfinished_error(step, step.path, reason)


def _unfinished_error(step: Step, location: Location, reason: str) -> FormatError:
    subject = "this" if step.number is None else f"step {step.number}"
    is_finished = step.others and not step.is_in_progress
    is_alone = step.number is None or len(directories(step.path.parent)) < 2
    instead = "" if is_alone else "open an earlier step, or the run directory for the latest finished one; "
    hint = f"{instead}{action('doctor', str(step.path))} shows details"
    if step.items and not any(step.faults(step.items)):
        hint = f"open what is left by its own path: {quote(str(step.items[0].directory))}"
    state = "damaged" if step.is_damaged else "an unfinished save"
    return FormatError(
        f"{subject} has {reason}" if is_finished else f"{subject} is {state}: {reason}",
        location=location,
        hint=hint,
    )


def _items_of_step(run: OrbaxRun, step: int | None) -> tuple[OrbaxItem, ...]:
    if step is not None:
        return _items(_finished_step(run, step))
    reasons: dict[int, str] = {}
    for number, item in sorted(run.steps.items(), reverse=True):
        if item.unfinished_reason is None:
            later = [other for at, other in run.steps.items() if at > number]
            remains = remains_after(item)
            _refuse_legacy(remains)
            _warn_of_later_steps(item, [*later, *remains])
            _warn_if_unlisted(item)
            return _items(item)
        reasons[number] = item.unfinished_reason
    lines = [f"step {number}: {reason}" for number, reason in sorted(reasons.items())]
    damaged = any(item.is_damaged for item in run.steps.values())
    left = find_interrupted_copy(run.path)
    raise FormatError(
        f"no step is {'complete' if damaged else 'a finished save'}" + listing(lines),
        location=run.path,
        hint=next_step(left) if left else f"{action('doctor', str(run.path))} shows details",
    )


def _refuse_legacy(steps: Collection[Step]) -> None:
    """Raise FormatError if a run with `_METADATA` also has a step in the earlier Orbax layout."""
    if not steps:
        return
    from ckpttools.formats.zarr.legacy_runs import is_legacy_step

    legacy = [step for step in steps if is_legacy_step(step.path)]
    if legacy:
        step = max(legacy, key=lambda step: step.number or 0)
        raise FormatError(
            f"step {step.number} has the layout of Orbax before {TREE_FILE}, unlike other steps",
            location=step.path.parent,
            hint=f"open it by its own path: {quote(str(step.path))}",
        )


def _warn_of_later_steps(opened: Step, later: Collection[Step]) -> None:
    """Warn about later steps that are not opened.

    Raises:
        DamagedStepError: One of the later steps is damaged.
    """
    ordered = sorted(later, key=lambda step: (step.number or 0, step.path.name))
    above = opened.path.parent
    reasons = {step: f"step {step.number}: {step.unfinished_reason}" for step in ordered}
    damaged = [reason for step, reason in reasons.items() if step.is_damaged]
    if damaged:
        raise DamagedStepError(
            "the latest step is damaged, and an older one is not used instead" + listing(damaged),
            location=above,
            hint=f"{action('doctor', str(above))} shows details; the latest intact step is "
            f"{quote(str(opened.path))}",
        )
    if reasons:
        text = f"step {opened.number} of {above} is opened; later ones have no finished tree" + listing(
            list(reasons.values())
        )
        if not all(step.others for step in ordered):
            text += f"\n  next   {action('doctor', str(above))} shows details"
        warn_step(text, LaterStepWarning)


def _warn_if_unlisted(opened: Step) -> None:
    """Warn if Orbax would not open the same step."""
    if commits_by_file(opened.path) and not (opened.path / COMMIT_FILE).is_file():
        text = (
            f"step {opened.number} of {opened.path.parent} is opened, which Orbax does not list on "
            f"{opened.path.store.scheme}://: it has no {COMMIT_FILE}\n"
            f"  next   {action('doctor', str(opened.path))} shows details"
        )
        warn_step(text, UnlistedStepWarning)


def _items(step: Step) -> tuple[OrbaxItem, ...]:
    """Return the items of a step; raises FormatError if it has none."""
    if not step.items:
        raise _unfinished_error(step, step.path, step.unfinished_reason or f"no {TREE_FILE}")
    return step.items


def _finished_step(run: OrbaxRun, number: int) -> Step:
    """Return the requested step."""
    step = run.steps.get(number)
    if step is None:
        _refuse_legacy(
            [directory for directory in map(Step, directories(run.path)) if directory.number == number]
        )
        raise UsageError(
            f"step {number} does not exist",
            location=run.path,
            expected=f"one of {first_and_last(sorted(run.steps))}",
        )
    if step.unfinished_reason:
        raise _unfinished_error(step, run.path, step.unfinished_reason)
    return step


# Items that trainers (Tunix, EasyLM, Flax) save next to the model.
_NO_PARAMETERS = frozenset(
    ("optimizer_state", "opt_state", "optimizer", "rng", "rngs", "rng_key", "data_iter", "iter", "step")
)
# Names of the optimizer's item in `save_checkpointables` and `Composite`. The item is opened together with
# the model, because both are one training state, and only the user may decide to drop a part.
_OPTIMIZERS = frozenset(("opt", "optim"))


def open_items(items: Sequence[OrbaxItem], opened: Callable[[OrbaxItem], Tree], *, all_items: bool) -> Tree:
    """Open an item, or several items of one step, without reading array data.

    Args:
        items: All items of the step; at least two.
        opened: Opens an item.
        all_items: Whether to open all items as one tree, each below its name.

    Returns:
        The only item with a model (emits `ChosenItemWarning`), or several items as one tree if `all_items` is
        set or if they are a model and its optimizer state.

    Raises:
        FormatError: It is unclear which item is the model, or an item is damaged.
    """
    step = items[0].step
    if all_items:
        return _as_one_tree(step, items, opened)
    unknown = [item for item in items if item.directory.name not in _NO_PARAMETERS]
    documents = {item: read_json(item.directory / TREE_FILE) for item in unknown}
    models = [item for item in unknown if holds_arrays(documents[item])]
    if len(models) == 1:
        _warn_about_other_items(step, items, models)
        return opened(models[0])
    # Numbers in other items may be part of the training state, such as a position in the data.
    parts = [item for item in unknown if holds_data(documents[item])]
    if len(parts) == 2 and len([item for item in parts if item.directory.name in _OPTIMIZERS]) == 1:
        _warn_about_other_items(step, items, parts)
        return _as_one_tree(step, parts, opened)
    raise several_items_error(step.path, [item.directory.name for item in items])


def several_items_error(step: Location, names: Sequence[str]) -> FormatError:
    """Return the error for a step whose items must be opened one by one."""
    return FormatError(
        "there are several items",
        location=step,
        got=", ".join(names),
        hint=f"add one of them to the path, such as {quote(str(step / names[-1]))}",
    )


def one_item(tree: Tree, name: str) -> Tree:
    """Extract one item of a tree as if it had been opened separately.

    Args:
        tree: A tree of several items.
        name: One of `tree.metadata.items`.
    """
    of = tree.metadata
    return Tree(
        {path[1:]: leaf for path, leaf in tree.items() if path[0] == name},
        replace(
            of,
            item=name,
            items=(),
            scalars=frozenset(path[1:] for path in of.scalars if path[0] == name),
            key_impls={path[1:]: impl for path, impl in of.key_impls.items() if path[0] == name},
            location=str(parse(of.location) / name),
        ),
    )


def _warn_about_other_items(step: Step, items: Sequence[OrbaxItem], opened: Sequence[OrbaxItem]) -> None:
    """Warn that a step has more items than the opened ones."""
    if others := [item.directory.name for item in items if item not in opened]:
        names = " and ".join(item.directory.name for item in opened)
        verb = "is" if len(opened) == 1 else "are"
        warn_step(
            f"{names} of {step.path} {verb} opened; open {sample_names(others)} next to it with "
            f"{step.path}/NAME",
            ChosenItemWarning,
        )


def _as_one_tree(step: Step, items: Sequence[OrbaxItem], opened: Callable[[OrbaxItem], Tree]) -> Tree:
    trees = {item.directory.name: opened(item) for item in items}
    metadata_by_item = {name: tree.metadata for name, tree in trees.items()}
    metadata = Metadata(
        format=next(iter(metadata_by_item.values())).format,
        step=step.number,
        items=tuple(trees),
        custom=next((of.custom for of in metadata_by_item.values() if of.custom), {}),
        config=next((of.config for of in metadata_by_item.values() if of.config is not None), None),
        scalars=frozenset((name, *path) for name, of in metadata_by_item.items() for path in of.scalars),
        key_impls={
            (name, *path): impl
            for name, of in metadata_by_item.items()
            for path, impl in of.key_impls.items()
        },
        location=str(step.path),
    )
    leaves = {(name, *path): leaf for name, tree in trees.items() for path, leaf in tree.items()}
    return Tree(leaves, metadata)
