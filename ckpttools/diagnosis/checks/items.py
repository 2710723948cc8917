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
from ckpttools.formats.orbax.naming import group_by_tree_name, is_finished, is_listed_with
from ckpttools.formats.orbax.steps import IN_PROGRESS, OrbaxRun, Step
from ckpttools.stores.location import Location


def _examine(inventory: Inventory) -> Iterator[Finding]:
    for step in inventory.steps:
        items = [item for item in inventory.items if item.step == step.path]
        if len(items) > 1:
            problem = f"{len(items)} items: {', '.join(item.path.name for item in items)}"
            reason = "commands that open one tree choose the only one with a model, or need its path"
            command = call("inspect", step.path)
            yield Finding(
                INFO, str(step.path), problem, reason, f"show all of them: {command}", command=command
            )
    yield from chain.from_iterable(map(_adapter, inventory.items))
    paths = {directory.path for directory in inventory.directories}
    for run in sorted({step.path.parent for step in inventory.steps} & paths):
        finished = [entry for entry in OrbaxRun(run).steps.values() if is_finished(entry)]
        groups = group_by_tree_name(finished)
        if groups:
            yield _differing_names_finding(run, groups)
        sibling_steps = [step.path for step in inventory.steps if step.path.parent == run]
        yield from _unlisted_findings(sibling_steps, finished)


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
            problem = f"a LoRA adapter in the names of Tunix: factors of {plural(len(kernels), 'kernel')}"
            reason = "it is not a complete model, and MaxText does not load these names"
            command = call("adapter_to_peft", item.path, "DST", base="BASE", alpha="ALPHA")
            yield Finding(INFO, str(item.path), problem, reason, f"convert it: {command}", command=command)


def _differing_names_finding(run: Location, groups: Mapping[tuple[str, ...], Sequence[Step]]) -> Finding:
    """Report steps whose trees have different names, and suggest rewriting the less frequent ones."""
    named = {names: steps for names, steps in groups.items() if names}
    most_common = max(named, key=lambda names: (len(named[names]), names == ("items",)))
    example = next(steps[0] for names, steps in groups.items() if names != most_common)
    values = [f"{', '.join(names) or 'no name'} in {_format_steps(steps)}" for names, steps in groups.items()]
    directory = example.items[0].directory
    command = call("convert", directory, _copy(example), format="orbax", level="step", item=most_common[0])
    return Finding(
        WARNING,
        str(run),
        f"the trees of the steps have different names: {'; '.join(values)}",
        "the same call of a CheckpointManager restores some steps, and fails for the others",
        f"write the others with one name, outside of the run, and replace them: {command}",
        command=command,
    )


def _copy(step: Step) -> Location:
    """Return where to rewrite a step: next to the run, because the copy is not part of the run yet."""
    run = step.path.parent
    return run.with_name(f"{run.name}.renamed") / step.path.name


def _format_steps(steps: Sequence[Step]) -> str:
    return sample_names(step.path.name for step in steps)


def _unlisted_findings(siblings: Sequence[Location], finished: Sequence[Step]) -> Iterator[Finding]:
    """Report steps whose names a CheckpointManager for the other steps ignores."""
    known = {item.path for item in finished}
    for location in siblings if finished else ():
        others = [item for item in finished if item.path != location]
        is_odd = bool(others) and location not in known and not is_listed_with(location.name, others)
        if is_odd and IN_PROGRESS not in location.name and is_finished(Step(location)):
            problem = f"a step that a CheckpointManager for {others[-1].path.name} does not list"
            reason = "it is never the latest one, never restored by its number, and never deleted"
            yield Finding(INFO, str(location), problem, reason, "open it by its path, or give it a number")


CHECK = Check("items", "steps with several trees, and trees whose names differ between steps", _examine)
