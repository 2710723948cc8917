"""Report trees that must be opened by name, or whose names differ from those in neighboring steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import call
from ckpttools.core.text import plural, sample_names
from ckpttools.diagnosis.base import INFO, WARNING, Check, Finding
from ckpttools.diagnosis.inventory import Inventory, ListedItem
from ckpttools.formats.orbax.metadata import parse_tree
from ckpttools.formats.orbax.naming import is_alike, is_finished, named_apart
from ckpttools.formats.orbax.steps import IN_PROGRESS, OrbaxRun, Step
from ckpttools.stores.location import Location


def _look(inventory: Inventory) -> Iterator[Finding]:
    for step in inventory.steps:
        items = [item for item in inventory.items if item.step == step.path]
        if len(items) > 1:
            what = f"{len(items)} items: {', '.join(item.path.name for item in items)}"
            why = "commands that open one tree choose the only one with a model, or need its path"
            command = call("inspect", step.path)
            yield Finding(INFO, str(step.path), what, why, f"show all of them: {command}", command=command)
    yield from chain.from_iterable(map(_adapter, inventory.items))
    listed = {directory.path for directory in inventory.directories}
    for run in sorted({step.path.parent for step in inventory.steps} & listed):
        finished = [entry for entry in OrbaxRun(run).steps.values() if is_finished(entry)]
        apart = named_apart(finished)
        if apart:
            yield _apart(run, apart)
        beside = [step.path for step in inventory.steps if step.path.parent == run]
        yield from _unlisted(beside, finished)


def _adapter(item: ListedItem) -> Iterator[Finding]:
    """Report an adapter of a Tunix model, which only its names distinguish from MaxText's."""
    try:
        document = {} if isinstance(item.metadata, CheckpointError) else item.metadata
        leaves = parse_tree(document, str(item.path))
    except CheckpointError:
        return  # The check of metadata reports this.
    # In reinforcement learning, the model is below `base`. Moments of factors are below other keys.
    paths = [leaf.path for leaf in leaves if leaf.path[:1] in (("layers",), ("base",))]
    if any("lora_a" in str(key) for path in paths for key in path[-2:]):
        # Only adapters have all these modules.
        from ckpttools.adapters.from_jax import tunix_kernels

        if kernels := tunix_kernels(paths):
            what = f"a LoRA adapter in the names of Tunix: factors of {plural(len(kernels), 'kernel')}"
            why = "it is not a complete model, and MaxText does not load these names"
            command = call("adapter_to_peft", item.path, "DST", base="BASE", alpha="ALPHA")
            yield Finding(INFO, str(item.path), what, why, f"convert it: {command}", command=command)


def _apart(run: Location, apart: Mapping[tuple[str, ...], Sequence[Step]]) -> Finding:
    """Report steps whose trees have different names, and suggest rewriting the less frequent ones."""
    named = {names: steps for names, steps in apart.items() if names}
    kept = max(named, key=lambda names: (len(named[names]), names == ("items",)))
    odd = next(steps[0] for names, steps in apart.items() if names != kept)
    declared = [f"{', '.join(names) or 'no name'} in {_numbers(steps)}" for names, steps in apart.items()]
    directory = odd.items[0].directory
    command = call("convert", directory, _copy(odd), format="orbax", level="step", item=kept[0])
    return Finding(
        WARNING,
        str(run),
        f"the trees of the steps have different names: {'; '.join(declared)}",
        "the same call of a CheckpointManager restores some steps, and fails for the others",
        f"write the others with one name, outside of the run, and replace them: {command}",
        command=command,
    )


def _copy(step: Step) -> Location:
    """Return where to rewrite a step: next to the run, because the copy is not part of the run yet."""
    run = step.path.parent
    return run.with_name(f"{run.name}.renamed") / step.path.name


def _numbers(steps: Sequence[Step]) -> str:
    return sample_names(step.path.name for step in steps)


def _unlisted(beside: Sequence[Location], finished: Sequence[Step]) -> Iterator[Finding]:
    """Report steps whose names a CheckpointManager for the other steps ignores."""
    known = {item.path for item in finished}
    for location in beside if finished else ():
        others = [item for item in finished if item.path != location]
        is_odd = bool(others) and location not in known and not is_alike(location.name, others)
        if is_odd and IN_PROGRESS not in location.name and is_finished(Step(location)):
            what = f"a step that a CheckpointManager for {others[-1].path.name} does not list"
            why = "it is never the latest one, never restored by its number, and never deleted"
            yield Finding(INFO, str(location), what, why, "open it by its path, or give it a number")


CHECK = Check("items", "steps with several trees, and trees whose names differ between steps", _look)
