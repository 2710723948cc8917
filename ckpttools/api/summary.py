"""Identify a path and suggest commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from shlex import quote

from ckpttools.adapters.report import adapter_report, is_maxtext_adapter, names_of_jax
from ckpttools.api.adapter_hints import commands
from ckpttools.api.inspect import inspect
from ckpttools.api.options import REQUESTS
from ckpttools.api.sources import opened
from ckpttools.api.trainer_hints import commands as commands_of_trainers
from ckpttools.api.trainer_hints import commands_of_model
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, ChosenItemWarning, FormatError, suppress_step_warnings
from ckpttools.core.options import declare
from ckpttools.core.text import plural
from ckpttools.formats.adapters import ADAPTER, adapter_in, has_adapter
from ckpttools.formats.interrupted import absent, refuse_interrupted
from ckpttools.formats.orbax.hosts import hosts_at, is_part_of_a_host
from ckpttools.formats.orbax.steps import OrbaxItem, OrbaxRun, Step, directories, orbax_at
from ckpttools.formats.registry import is_checkpoint, writable
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.inspection.tree import TreeReport
from ckpttools.plan.plan_encoding import is_plan, read_plan
from ckpttools.quantized.view import quantized_view
from ckpttools.runs.listing import ItemListing, RunListing, list_step, listed
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

_MOST_BELOW = 8


@dataclass(frozen=True, repr=False)
class Summary:
    """Facts about a path.

    Attributes:
        path: the path.
        what: description, such as "a run of 3 steps".
        run: steps of the run; None if the path is not a run.
        items: items of a step that has several.
        tree: the tree without its values; None if the path has no single tree, or none can be opened.
        next: commands to continue with.
    """

    path: str
    what: str
    run: RunListing | None = None
    items: tuple[ItemListing, ...] = ()
    tree: TreeReport | None = None
    next: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Summary of {self.path}: {self.what}>"


@validate_arguments
@declare(REQUESTS)
def summary(path: LocationLike, *, requests: int | None = None) -> Summary:
    """Identify a path: a run, step, model, adapter or file. Reads headers and indexes, but no array.

    Args:
        path: location in any store.

    Raises:
        CheckpointError: the path does not exist, is not a checkpoint, or cannot be read.
    """
    location = parse(path)
    if not location.exists():
        raise absent(location)
    refuse_interrupted(location)
    with use_concurrency(requests):
        result = orbax_at(location) if location.is_dir() else None
        if isinstance(result, OrbaxRun) and result.steps:
            return _of_run(location, result)
        if isinstance(result, Step) and len(result.items) > 1:
            return _of_step(location, result)
        if isinstance(result, OrbaxRun) and (hosts := hosts_at(location)):
            return _of_hosts(location, len(hosts))
        if result is None and is_plan(location.open()):
            return _of_plan(location)
        try:
            return _of_tree(location, result)
        except FormatError:
            is_any = result is None or is_checkpoint(location)
            if is_any or not (below := checkpoints_below(location, _MOST_BELOW + 1)):
                raise
            return _of_directory(location, below)


def _of_plan(location: Location) -> Summary:
    header, path = read_plan(location).header, quote(str(location))
    made_by = f" of ckpttools.{header.call['name']}" if header.call else ""
    what = f"a plan{made_by}: {plural(header.tasks, 'task')}, from {header.source} to {header.destination}"
    next = tuple(f"ckpt run {path} {how}" for how in ("--status", "--part 0/1", "--publish"))
    return Summary(str(location), what, next=next)


def _of_directory(location: Location, below: Sequence[Location]) -> Summary:
    several = "checkpoints lie" if len(below) > 1 else "a checkpoint lies"
    more = f"more than {_MOST_BELOW} " if len(below) > _MOST_BELOW else ""
    next = tuple(f"ckpt {quote(str(item))}" for item in below[:_MOST_BELOW])
    return Summary(str(location), f"a directory below which {more}{several}", next=next)


def _of_hosts(location: Location, count: int) -> Summary:
    path = quote(str(location))
    next = (f"ckpt assemble {path} --list", f"ckpt assemble {path} DST", f"ckpt inspect tree {path}")
    return Summary(str(location), f"what {plural(count, 'host')} of a job kept, each a part", next=next)


def _of_run(location: Location, run: OrbaxRun) -> Summary:
    listing = listed(run)
    path = quote(str(location))
    count = len(listing.steps)
    what = f"a run of {count} steps" if count > 1 else "a run of one step"
    if any(step.missing_chunks for step in listing.steps):
        if any(is_part_of_a_host(item.directory) for step in run.steps.values() for item in step.items):
            next = (f"ckpt assemble {path} OTHER_HOST… --list", f"ckpt inspect tree {path}")
            what = "what one host of a job kept, a part of each step"
        else:
            next = (f"ckpt doctor {path}", f"ckpt inspect tree {path}")
            what += ", not whole: chunks are missing"
        return Summary(str(location), what, run=listing, next=next)
    kinds = {item.kind for step in listing.finished[-1:] for item in step.items}
    tree = _opened(location) if listing.finished else None
    if tree is not None and is_maxtext_adapter(tree):
        follows = tuple(commands(path, adapter_report(tree), is_peft=False))
        names = names_of_jax(tree)
        # Whose listing says what loads a whole model.
        way = "MaxText loads it with lora.lora_restore_path"
        if names != "MaxText":
            way = f"its factors have {names}'s names, which MaxText does not load"
        listing = replace(listing, hindered=f"which is an adapter: {way}") if listing.hindered else listing
        return Summary(str(location), f"{what}, a LoRA adapter of {names}'s", run=listing, next=follows)
    is_described = tree is not None and tree.metadata.config is not None
    if listing.finished and tree is None:
        return Summary(str(location), what, run=listing, next=_next_of_damaged(path, run, listing))
    advice = tuple(_next_of_run(path, kinds, count, is_described=is_described))
    if tree is not None and quantized_view(tree).is_supported:
        advice = (*advice[:-1], f"ckpt cast {path} DST --dtype bfloat16", advice[-1])
    return Summary(str(location), what, run=listing, next=advice)


def _next_of_damaged(path: str, run: OrbaxRun, listing: RunListing) -> tuple[str, ...]:
    """Return the commands for a run that no command opens: its report first, then its latest good step."""
    complete = [step for step in listing.finished if not step.missing_chunks and step.kind]
    doctor = f"ckpt doctor {path}"
    return (doctor, f"ckpt {quote(str(run.path / complete[-1].name))}") if complete else (doctor,)


def _opened(location: Location) -> Tree | None:
    with suppress_step_warnings(ChosenItemWarning):
        try:
            return opened(location)
        except CheckpointError:
            # The listing says what is wrong with it.
            return None


def _of_maxtext(path: str, *, is_described: bool) -> Iterator[str]:
    """Of MaxText's arrays; without the configuration of their model that has to be named."""
    like = "" if is_described else " --like HF_DIR"
    yield f"ckpt convert maxtext-to-hf {path} DST{like}"
    yield f"ckpt maxtext-config {path}{like}"


def _next_of_run(path: str, kinds: set[str], count: int, *, is_described: bool) -> Iterator[str]:
    yield f"ckpt inspect tree {path}"
    if any(kind.endswith("training") for kind in kinds):
        yield f"ckpt strip-optimizer {path} DST"
    if any(kind.startswith(("stacked", "unstacked")) for kind in kinds):
        yield from _of_maxtext(path, is_described=is_described)
    if count > 1:
        yield f"ckpt prune {path} --keep-last N"
    yield f"ckpt doctor {path}"


def _of_step(location: Location, step: Step) -> Summary:
    items = list_step(step).items
    trees = [item for item in items if item.arrays]
    shown = [step.path, *(step.path / tree.name for tree in trees)]
    next = tuple(f"ckpt inspect tree {quote(str(item))}" for item in shown)
    return Summary(str(location), f"a step with {plural(len(trees), 'tree')}", items=items, next=next)


def _of_tree(location: Location, result: OrbaxItem | Step | OrbaxRun | None) -> Summary:
    with suppress_step_warnings(ChosenItemWarning):
        source = opened(location)
        tree = inspect(source)
    folder = location if result is not None else location.parent
    path = quote(str(location))
    # Files of an adapter are left next to models that it was merged into.
    is_model = source.metadata.config is not None and not has_adapter(source)
    if tree.format != "orbax" and not is_model and (folder / ADAPTER).is_file():
        next = tuple(commands(path, tree.adapter, is_peft=True))
        return Summary(str(location), adapter_in(folder), tree=tree, next=next)
    if tree.format == "orbax" and tree.adapter is not None:
        next = tuple(commands(path, tree.adapter, is_peft=False))
        return Summary(str(location), f"a LoRA adapter of {tree.adapter.names}'s", tree=tree, next=next)
    directory = "a model" if tree.num_parameters else "the state of an optimizer"
    what = {OrbaxItem: "an item", Step: "a step"}.get(type(result), "a file" if result is None else directory)
    whose = f" of {' or '.join(family.name for family in tree.families)}" if tree.families else ""
    return Summary(
        str(location), f"{what}{whose}, {tree.format}", tree=tree, next=tuple(_next(location, tree, source))
    )


def _is_of_process(location: Location) -> bool:
    """Whether a file of torch.save is one process's of a checkpoint that is named by its directory."""
    try:
        return location.suffix == ".pt" and is_checkpoint(location.parent)
    except CheckpointError:
        return False


def _next(location: Location, tree: TreeReport, source: Tree) -> Iterator[str]:
    path, is_written, built = quote(str(location)), tree.format in writable(), list[str]()
    yield f"ckpt inspect tree {path}"
    if any(warning.name == "quantized" for warning in tree.warnings):
        yield f"ckpt doctor {path}"
        return
    if tree.format == "torch" and location.is_file() and _is_of_process(location):
        yield f"ckpt {quote(str(location.parent))}"
        return
    if tree.kind is not None and tree.families:
        if tree.optimizer is not None:
            yield f"ckpt strip-optimizer {path} DST" + ("" if is_written else " --to orbax")
        is_described = any(sidecar.rpartition("/")[2] == CONFIG for sidecar in tree.sidecars)
        yield from _of_maxtext(path, is_described=is_described)
    elif tree.families and tree.format != "orbax":
        yield from commands_of_model(source, location)
    else:
        built = list(commands_of_trainers(source, location))
        yield from built or [f"ckpt inspect stats {path}"]
    if tree.scales is not None and is_written:
        yield f"ckpt cast {path} DST --dtype bfloat16"
    if not is_written and not any(item.startswith("ckpt") for item in built):
        alone = " --strip-optimizer" if "optimizer" in tree.roles and tree.num_parameters else ""
        yield f"ckpt convert to-safetensors {path} DST{alone}"
    yield f"ckpt doctor {path}"


# Levels that are searched, and directories that are looked at in all.
_DEEPEST, _MOST_TRIED = 4, 200


def checkpoints_below(location: Location, limit: int) -> list[Location]:
    """Find the first checkpoints and runs in a directory tree, without searching inside them."""
    return list(islice(_found(location), limit))


def _found(location: Location) -> Iterator[Location]:
    level, left = [location], _MOST_TRIED
    for _ in range(_DEEPEST):
        further: list[Location] = []
        for item in (below for above in level for below in _directories(above)):
            if not left:
                return
            left -= 1
            if _is_one(item):
                yield item
            else:
                further.append(item)
        level = further


def _directories(location: Location) -> list[Location]:
    try:
        return sorted(directories(location), key=str)
    except CheckpointError:
        return []  # only advice depends on it


def _is_one(location: Location) -> bool:
    try:
        return is_checkpoint(location) or bool(hosts_at(location))
    except CheckpointError:
        return False
