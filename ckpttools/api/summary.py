"""Identify a path and suggest commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpttools.adapters.report import adapter_report, is_maxtext_adapter, names_of_jax
from ckpttools.api.inspect import inspect
from ckpttools.api.options import REQUESTS
from ckpttools.api.trainer_hints import adapter_commands, commands_of_model
from ckpttools.api.trainer_hints import trainer_commands as commands_of_trainers
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, ChosenItemWarning, suppress_step_warnings
from ckpttools.core.message_terms import call, is_call
from ckpttools.core.options import declare
from ckpttools.core.text import plural
from ckpttools.formats.adapters import ADAPTER, adapter_in, has_adapter
from ckpttools.formats.detect import Detected, LocationKind, count_members, detect, is_checkpoint
from ckpttools.formats.known_formats import writable
from ckpttools.formats.orbax.hosts import is_part_of_a_host
from ckpttools.formats.orbax.steps import OrbaxItem, OrbaxRun, Step
from ckpttools.formats.registry import not_opened, open_detected
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.inspection.tree import TreeReport
from ckpttools.plan.plan_file import read_plan
from ckpttools.quantized.view import quantized_view
from ckpttools.runs.collection import CollectionListing, list_collection
from ckpttools.runs.listing import ItemListing, RunListing, StepListing, list_run, list_step, run_of
from ckpttools.runs.trained import find_trainer_run
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

_MAX_SHOWN = 8


@dataclass(frozen=True, repr=False)
class Summary:
    """Facts about a path.

    Attributes:
        path: The path.
        what: Description, such as "a run of 3 steps".
        run: Steps of the run; None if the path is not a run.
        collection: Checkpoints and runs in a directory of several; None for other paths.
        items: Items of a step that has several.
        tree: The tree without its values; None if the path does not have exactly one tree, or it cannot be
            opened.
        next: Suggested commands.
    """

    path: str
    what: str
    run: RunListing | None = None
    items: tuple[ItemListing, ...] = ()
    tree: TreeReport | None = None
    next: tuple[str, ...] = ()
    collection: CollectionListing | None = None

    def __repr__(self) -> str:
        return f"<Summary of {self.path}: {self.what}>"


@validate_arguments
@declare(REQUESTS)
def summary(path: LocationLike, *, requests: int | None = None) -> Summary:
    """Identify a path: a run, step, model, adapter or file. Reads headers and indexes, but no arrays.

    Args:
        path: Location in any store.

    Raises:
        CheckpointError: The path does not exist, is not a checkpoint, or cannot be read.
    """
    location = parse(path)
    with use_concurrency(requests):
        return _describe(detect(location))


def _describe(detected: Detected) -> Summary:
    location, place = detected.location, detected.orbax
    if detected.unfinished is not None:
        raise not_opened(detected)
    if isinstance(place, OrbaxRun) and place.steps:
        return _summarize_run(detected, place)
    if isinstance(place, Step) and len(place.items) > 1:
        return _summarize_step(location, place)
    if detected.hosts:
        return _summarize_hosts(location, len(detected.hosts))
    if detected.format is not None:
        summary = _summarize_tree(detected)
        return _add_steps(summary, detected) if detected.kind is LocationKind.RUN else summary
    match detected.kind:
        case LocationKind.PLAN:
            return _summarize_plan(location)
        case LocationKind.RUN if (listing := find_trainer_run(location)) is not None:
            return _summarize_trainer_run(detected, listing)
        case LocationKind.COLLECTION:
            return _summarize_collection(location, list_collection(detected), detected)
    raise not_opened(detected)


def _summarize_plan(location: Location) -> Summary:
    header, path = read_plan(location).header, str(location)
    made_by = f" of ckpttools.{header.call['name']}" if header.call else ""
    description = (
        f"a plan{made_by}: {plural(header.tasks, 'task')}, from {header.source} to {header.destination}"
    )
    next = call("plan_status", path), call("run_part", path, "0/1"), call("publish_plan", path)
    return Summary(str(location), description, next=next)


def _summarize_collection(location: Location, listing: CollectionListing, detected: Detected) -> Summary:
    runs = sum(member.kind == LocationKind.RUN for member in listing.members)
    description = f"a directory with {count_members(len(listing.members), runs)}"
    locations = [member.location for member in detected.members if member.unfinished is None][:_MAX_SHOWN]
    next = tuple(call("summary", str(item)) for item in locations)
    return Summary(str(location), description, collection=listing, next=next)


def _summarize_trainer_run(detected: Detected, listing: RunListing) -> Summary:
    location, above = detected.location, detected.trainer_steps[0].parent
    locations = [_first_item(above / step.name, step) for step in listing.finished[-1:]]
    next = tuple(call("summary", str(item)) for item in locations)
    description = f"a run of {plural(len(listing.steps), 'step')} of a PyTorch trainer"
    return Summary(str(location), description, run=listing, next=next)


def _first_item(step: Location, listing: StepListing) -> Location:
    name = listing.items[0].name
    return step / name if name else step


def _add_steps(summary: Summary, detected: Detected) -> Summary:
    """Add all steps to the summary of a run that is opened at its latest step."""
    run = run_of(detected)
    listing = find_trainer_run(detected.location) if run is None else list_run(run)
    if listing is None:
        return summary
    return replace(
        summary, what=f"a run of {plural(len(listing.steps), 'step')}: {summary.what}", run=listing
    )


def _summarize_hosts(location: Location, count: int) -> Summary:
    path = str(location)
    next = (call("list_saves", path), call("assemble", path, "DST"), call("inspect", path))
    return Summary(str(location), f"the parts that {plural(count, 'host')} of a job saved", next=next)


def _summarize_run(detected: Detected, run: OrbaxRun) -> Summary:
    location, listing = detected.location, list_run(run)
    path = str(location)
    count = len(listing.steps)
    description = f"a run of {count} steps" if count > 1 else "a run of one step"
    if any(step.missing_chunks for step in listing.steps):
        if any(is_part_of_a_host(item.directory) for step in run.steps.values() for item in step.items):
            next = (call("list_saves", [path, "OTHER_HOST…"]), call("inspect", path))
            description = "the part of each step that one host of a job saved"
        else:
            next = (call("doctor", path), call("inspect", path))
            description += ", incomplete: chunks are missing"
        return Summary(str(location), description, run=listing, next=next)
    kinds = {item.kind for step in listing.finished[-1:] for item in step.items}
    tree = _open_detected(detected) if listing.finished else None
    if tree is not None and is_maxtext_adapter(tree):
        follows = tuple(adapter_commands(path, adapter_report(tree), is_peft=False))
        names = names_of_jax(tree)
        # The listing explains how to load it instead.
        hint = "MaxText loads it with lora.lora_restore_path"
        if names != "MaxText":
            hint = f"its factors have {names}'s names, which MaxText does not load"
        listing = (
            replace(listing, blocked_by=f"which is an adapter: {hint}") if listing.blocked_by else listing
        )
        return Summary(
            str(location), f"{description}, a LoRA adapter of {names}'s", run=listing, next=follows
        )
    is_described = tree is not None and tree.metadata.config is not None
    if listing.finished and tree is None:
        return Summary(str(location), description, run=listing, next=_next_of_damaged(path, run, listing))
    advice = tuple(_next_of_run(path, kinds, count, is_described=is_described))
    if tree is not None and quantized_view(tree).is_supported:
        advice = (*advice[:-1], call("cast", path, "DST", dtype="bfloat16"), advice[-1])
    return Summary(str(location), description, run=listing, next=advice)


def _next_of_damaged(path: str, run: OrbaxRun, listing: RunListing) -> tuple[str, ...]:
    """Return the commands for a run that cannot be opened: its diagnosis first, then its latest good step."""
    complete = [step for step in listing.finished if not step.missing_chunks and step.kind]
    doctor = call("doctor", path)
    return (doctor, call("summary", str(run.path / complete[-1].name))) if complete else (doctor,)


def _open_detected(detected: Detected) -> Tree | None:
    with suppress_step_warnings(ChosenItemWarning):
        try:
            return open_detected(detected)
        except CheckpointError:
            # The listing explains the problem.
            return None


def _maxtext_commands(path: str, *, is_described: bool) -> Iterator[str]:
    """Yield commands for MaxText arrays. Without a configuration, the user must name the model."""
    like = None if is_described else "HF_DIR"
    yield call("maxtext_to_hf", path, "DST", like=like)
    yield call("maxtext_config", path, like=like)


def _next_of_run(path: str, kinds: set[str], count: int, *, is_described: bool) -> Iterator[str]:
    yield call("inspect", path)
    if any(kind.endswith("training") for kind in kinds):
        yield call("strip_optimizer", path, "DST")
    if any(kind.startswith(("stacked", "unstacked")) for kind in kinds):
        yield from _maxtext_commands(path, is_described=is_described)
    if count > 1:
        yield call("prune", path, keep_last="N")
    yield call("doctor", path)


def _summarize_step(location: Location, step: Step) -> Summary:
    items = list_step(step).items
    trees = [item for item in items if item.arrays]
    locations = [step.path, *(step.path / tree.name for tree in trees)]
    next = tuple(call("inspect", str(item)) for item in locations)
    return Summary(str(location), f"a step with {plural(len(trees), 'tree')}", items=items, next=next)


def _summarize_tree(detected: Detected) -> Summary:
    location, result = detected.location, detected.orbax
    with suppress_step_warnings(ChosenItemWarning):
        source = open_detected(detected)
        tree = inspect(source)
    folder = location if detected.is_directory else location.parent
    path = str(location)
    # Adapter files may remain next to models into which the adapter was merged.
    is_model = source.metadata.config is not None and not has_adapter(source)
    if tree.format != "orbax" and not is_model and (folder / ADAPTER).is_file():
        next = tuple(adapter_commands(path, tree.adapter, is_peft=True))
        return Summary(str(location), adapter_in(folder), tree=tree, next=next)
    if tree.format == "orbax" and tree.adapter is not None:
        next = tuple(adapter_commands(path, tree.adapter, is_peft=False))
        return Summary(str(location), f"a LoRA adapter of {tree.adapter.names}'s", tree=tree, next=next)
    directory = "a model" if tree.num_parameters else "the state of an optimizer"
    description = {OrbaxItem: "an item", Step: "a step"}.get(
        type(result), directory if detected.is_directory else "a file"
    )
    whose = f" of {' or '.join(family.name for family in tree.families)}" if tree.families else ""
    return Summary(
        str(location),
        f"{description}{whose}, {tree.format}",
        tree=tree,
        next=tuple(_next(location, tree, source)),
    )


def _is_of_process(location: Location) -> bool:
    """Return whether a torch.save file belongs to one process of a checkpoint whose path is the directory."""
    try:
        return location.suffix == ".pt" and is_checkpoint(location.parent)
    except CheckpointError:
        return False


def _next(location: Location, tree: TreeReport, source: Tree) -> Iterator[str]:
    path, is_written, result = str(location), tree.format in writable(), list[str]()
    yield call("inspect", path)
    if any(warning.name == "quantized" for warning in tree.warnings):
        yield call("doctor", path)
        return
    if tree.format == "torch" and location.is_file() and _is_of_process(location):
        yield call("summary", str(location.parent))
        return
    if tree.kind is not None and tree.families:
        if tree.optimizer is not None:
            yield call("strip_optimizer", path, "DST", format=None if is_written else "orbax")
        is_described = any(sidecar.rpartition("/")[2] == CONFIG for sidecar in tree.sidecars)
        yield from _maxtext_commands(path, is_described=is_described)
    elif tree.families and tree.format != "orbax":
        yield from commands_of_model(source, location)
    else:
        result = list(commands_of_trainers(source, location))
        yield from result or [call("stats", path)]
    if tree.scales is not None and is_written:
        yield call("cast", path, "DST", dtype="bfloat16")
    if not is_written and not any(map(is_call, result)):
        is_mixed = "optimizer" in tree.roles and tree.num_parameters
        yield call("convert", path, "DST", format="safetensors", strip_optimizer=True if is_mixed else None)
    yield call("doctor", path)
