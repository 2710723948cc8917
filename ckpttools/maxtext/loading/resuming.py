"""The first rule: a run that has a step goes on with it, whatever else is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import plural
from ckpttools.formats.orbax.naming import ITEM
from ckpttools.formats.orbax.skipping import remedy
from ckpttools.formats.orbax.steps import Step, directories, is_item
from ckpttools.maxtext.loading.paths import Led, other_store, rewritten, why_not_read
from ckpttools.maxtext.loading.report import Problem, Tried
from ckpttools.maxtext.loading.runs import EMERGENCY_ITEMS, OrbaxSteps, listed_by_manager
from ckpttools.maxtext.loading.settings import Settings
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

_JOB = "JOBSET_NAME"
_OUTPUT = "maxtext_output"
_MULTI_TIER, _EMERGENCY = "enable_multi_tier_checkpointing", "enable_emergency_checkpoint"


@dataclass(frozen=True, slots=True)
class OwnRun:
    """What is found of a run's own checkpoints.

    Attributes:
        tried: where was looked.
        led: the item that MaxText goes on with; None where the run has no step yet.
        problems: why going on fails, whatever is in it.
        notes: what else is worth knowing.
        is_hidden: whether there may be more where nobody can look from here.
    """

    tried: Tried
    led: Led | None = None
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    is_hidden: bool = False


def own_run(settings: Settings, environment: Mapping[str, str]) -> OwnRun:
    """The run's own checkpoints, as the manager that MaxText makes would list them.

    Args:
        settings: of the run.
        environment: of the process that runs it.

    Raises:
        StorageError: a directory may not be looked into.
    """
    notes: list[str] = []
    if not (_is_local(settings) or settings.flag("enable_checkpointing")):
        return OwnRun(Tried("resume", None, "not looked for: enable_checkpointing is false"))
    name = settings.text("run_name") or environment.get(_JOB, "")
    local = _on_this_host(settings, notes) if _is_local(settings) else None
    seen = [] if local is None else [local]
    if not settings.flag(_MULTI_TIER):
        if not name:
            result = f"run_name is empty: MaxText makes a new one from model and time, unless {_JOB} is set"
            return OwnRun(Tried("resume", None, result), notes=tuple(notes))
        base = settings.text("base_output_directory")
        if base and (problem := other_store(parse(base))):
            return OwnRun(Tried("resume", base, "not looked at"), Led(None, problems=(problem,)))
        seen.append(listed_by_manager(_checkpoints(name, settings, notes)))
    is_hidden = _is_local(settings) and local is None
    return replace(_chosen(seen, settings), notes=tuple(notes), is_hidden=is_hidden)


def _is_local(settings: Settings) -> bool:
    return settings.flag(_MULTI_TIER) or settings.flag(_EMERGENCY)


def _checkpoints(name: str, settings: Settings, notes: list[str]) -> Location:
    base = settings.text("base_output_directory")
    if not base:
        notes.append(
            f"base_output_directory is not set: MaxText takes {_OUTPUT} where it is started, which was taken "
            "to be here"
        )
    location = parse(base) if base else parse(_OUTPUT).absolute()
    return location / name / "checkpoints"


def _on_this_host(settings: Settings, notes: list[str]) -> OrbaxSteps | None:
    """What the local disk has; None where it is not here."""
    location = parse(settings.text("local_checkpoint_directory"))
    if not location.is_dir():
        notes.append(
            f"{location} is not here: each host has its own, and a step there goes before older ones "
            "elsewhere"
        )
        return None
    notes.append(f"{location} was looked at on this host alone: a step must be on the others, too")
    # On GPUs each process has a directory below, named by its number.
    result = [listed_by_manager(directory) for directory in (location, *directories(location))]
    whole = [
        replace(item, steps={n: step for n, step in item.steps.items() if Step(step).is_one})
        for item in result
    ]
    return next((item for item in whole if item.steps), result[0])


def _chosen(seen: Sequence[OrbaxSteps], settings: Settings) -> OwnRun:
    """The latest step of all places."""
    if not seen:
        return OwnRun(Tried("resume", settings.text("local_checkpoint_directory"), "not here"))
    several = len(seen) > 1
    shown = "; ".join(f"{entry.directory}: {entry.text}" if several else entry.text for entry in seen)
    best = max(seen, key=lambda entry: -1 if entry.latest is None else entry.latest)
    tried = Tried("resume", str(best.directory), shown)
    if best.latest is None:
        return OwnRun(tried)
    step = best.steps[best.latest]
    problems = [*_finished(best.latest, settings)]
    base = settings.text("base_output_directory")
    if base and (problem := why_not_read("base_output_directory", base)):
        problems.append(problem)
    names = EMERGENCY_ITEMS if _is_local(settings) else (ITEM,)
    item = next((step / name for name in names if is_item(step / name)), None)
    led = Led(
        item,
        problems=() if item is not None else (_no_item(step, names),),
        instead=_without(step, sorted(best.steps)[:-1]),
    )
    return OwnRun(tried, led, tuple(problems))


def _without(latest: Location, earlier: Sequence[int]) -> str:
    """How a run goes on without its latest step, which cannot be opened."""
    is_uncommitted = Step(latest).declared.is_uncommitted
    way = remedy(latest, latest.parent, is_uncommitted=is_uncommitted)
    then = f"MaxText goes on with step {earlier[-1]}" if earlier else "MaxText starts from step 0"
    command = f": `{way.command}`" if way.command else ""
    return f"{'' if is_uncommitted else 'fetch it again, or '}{way.words}{command}; then {then}"


def _no_item(step: Location, names: Sequence[str]) -> Problem:
    there = ", ".join(item.directory.name for item in Step(step).items)
    what = f"{step} is the latest step to Orbax, and there is no whole item {' or '.join(names)} in it"
    if there and ITEM not in names:
        return Problem(f"{what}, but {there}", "leave emergency checkpointing out, or take another run_name")
    if there:
        return Problem(f"{what}, but {there}", f"{rewritten(Step(step).items[0].directory)}")
    return Problem(
        what, f"move {step} away to go on from the step before it; `ckpt doctor` says what it lacks"
    )


def _finished(step: int, settings: Settings) -> Iterator[Problem]:
    """Whether the run has reached its last step already."""
    steps = settings.number("steps")
    if steps == -1:
        steps = settings.number("learning_rate_schedule_steps")
    if steps is not None and 0 <= steps <= step + 1:
        yield Problem(
            f"{plural(step + 1, 'step')} of {int(steps):,} are done, so MaxText refuses to start",
            f"set steps to more than {step + 1}, or another run_name",
        )
