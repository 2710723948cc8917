"""Apply MaxText's rules in order, from settings to the checkpoint that is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, StorageError
from ckpttools.core.message_terms import action
from ckpttools.core.text import plural
from ckpttools.formats.orbax.naming import ITEM
from ckpttools.formats.orbax.steps import Step, directories, is_item, remedy
from ckpttools.formats.registry import open_tree
from ckpttools.maxtext.loading.paths import (
    EMERGENCY_ITEMS,
    OrbaxSteps,
    ResolvedPath,
    list_committed_steps,
    problem_of,
    resolve_path,
    rewrite_hint,
    step_number,
    unreadable_reason,
    unsupported_store_problem,
)
from ckpttools.maxtext.loading.report import Expected, Outcome, Problem, Resolution, Rule, RuleCheck
from ckpttools.maxtext.loading.settings import DEFAULTS, Settings, settings_problems
from ckpttools.maxtext.loading.weights import check_weights
from ckpttools.maxtext.versions import Version
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

NOTHING_FOUND_TEXT = "nothing found: training starts from step 0 with random parameters"
_PATHS: tuple[Rule, ...] = ("load_parameters_path", "load_full_state_path")
_HF_RULES = ("safetensors", "safetensors_dynamic")
_DESCRIPTIONS: Mapping[Rule, str] = {
    "resume": "{step} of the run itself",
    "load_parameters_path": "the parameters of {step}",
    "load_full_state_path": "the full state of {step}",
    "safetensors": "Hugging Face weights, through checkpoint_conversion_fn",
    "safetensors_dynamic": "Hugging Face weights, converted on the fly",
    "lora_restore_path": "adapters of {step}",
    "none": "nothing",
}


@dataclass(frozen=True, slots=True)
class _RuleTarget:
    """The target of a rule, before the checkpoint is opened."""

    rule: Rule
    expected: Expected
    target: ResolvedPath


def resolve_run(settings: Settings, version: Version, environment: Mapping[str, str]) -> Resolution:
    """Predict which checkpoint a run would load.

    Args:
        settings: The settings of the run.
        version: The version of MaxText.
        environment: Environment variables of the run.

    Raises:
        CheckpointError: A location cannot be accessed.
    """
    blank = Resolution(
        version.name, "fails", "", "none", None, None, "nothing", (), (), settings.notes, settings.non_default
    )
    if problems := tuple(settings_problems(settings, version)):
        return replace(blank, verdict="refuses these settings for any checkpoint", problems=problems)
    run = find_own_run(settings, environment)
    result = replace(blank, rules=(run.tried,), notes=(*blank.notes, *run.notes))
    if run.target is not None:
        others = [
            RuleCheck(name, text, "not inspected: the run itself takes precedence")
            for name, text in _named_paths(settings)
        ]
        result = _with_contents(_RuleTarget("resume", "full state", run.target), settings, version, result)
        result = replace(result, rules=(*result.rules, *others), problems=(*run.problems, *result.problems))
    elif (named := _resolve_named(settings, version)) is not None:
        path = next((text for _, text in _named_paths(settings)), None)
        result = replace(
            result, rules=(*result.rules, RuleCheck(named.rule, path, _found_text(named.target, path)))
        )
        result = _with_contents(named, settings, version, result)
    adapter = _adapter(settings, version, blank, result.rule == "resume")
    result = replace(result, adapter=adapter, notes=(*result.notes, *_unused_notes(settings)))
    return _with_verdict(result, run.is_hidden)


def _with_verdict(resolution: Resolution, is_hidden: bool) -> Resolution:
    """Return the resolution with its outcome and verdict."""
    outcome: Outcome
    if resolution.problems:
        outcome = "fails"
    elif is_hidden:
        outcome = "unknown"
    else:
        outcome = "loads" if resolution.path else "scratch"
    return replace(resolution, outcome=outcome, verdict=_verdict(resolution, outcome))


def _verdict(resolution: Resolution, outcome: Outcome) -> str:
    verdict = _DESCRIPTIONS[resolution.rule].format(
        step="a checkpoint" if resolution.step is None else f"step {resolution.step}"
    )
    return {
        "loads": f"loads {verdict}",
        "scratch": NOTHING_FOUND_TEXT,
        "unknown": "the result depends on the disks of the hosts, which cannot be inspected from here",
        "fails": f"finds {verdict}, but cannot use it"
        if resolution.path
        else "does not find the named checkpoint",
    }[outcome]


def _named_paths(settings: Settings) -> Iterator[tuple[Rule, str]]:
    """Yield the paths that are set, in MaxText's order."""
    yield from ((name, text) for name in _PATHS if (text := settings.text(name)))


def _found_text(target: ResolvedPath, path: str | None) -> str:
    if target.path is None:
        return "not found"
    is_other = target.item is None or path is None or target.item != parse(path)
    return f"that is {target.path}" if is_other else "found"


def _resolve_named(settings: Settings, version: Version) -> _RuleTarget | None:
    """Return the target of the paths in the settings; None if no path is set."""
    rule, text = next(_named_paths(settings), (None, ""))
    layout = settings.text("source_checkpoint_layout")
    if layout == "safetensors_dynamic":
        return _RuleTarget("safetensors_dynamic", "parameters", resolve_dynamic(text, settings))
    if rule is None:
        return None
    if layout == "safetensors" and rule == "load_full_state_path":
        return _RuleTarget("safetensors", "full state", resolve_conversion_fn(text, settings, version))
    expected: Expected = "parameters" if rule == "load_parameters_path" else "full state"
    return _RuleTarget(rule, expected, resolve_path(rule, text, version))


def _with_contents(
    result: _RuleTarget, settings: Settings, version: Version, blank: Resolution
) -> Resolution:
    """Add the problems of the checkpoint's contents to the resolution."""
    item, problems, notes = result.target.item, list(result.target.problems), list(blank.notes)
    is_orbax = result.rule not in _HF_RULES
    if item is not None and is_orbax:
        try:
            found = check_weights(open_tree(item), result.expected, result.target.key, settings, version)
        except StorageError:
            raise
        except CheckpointError as error:
            reason = problem_of(error)
            problems.append(replace(reason, hint=result.target.instead or reason.hint))
        else:
            problems += found.problems
            notes += found.notes
    return replace(
        blank,
        rule=result.rule,
        path=result.target.path,
        step=step_number(item) if item is not None and is_orbax else None,
        expected=result.expected,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _adapter(settings: Settings, version: Version, blank: Resolution, is_resumed: bool) -> Resolution | None:
    """Return the resolution of `lora.lora_restore_path`, or None."""
    text = settings.text("lora.lora_restore_path")
    if not text:
        return None
    blank = replace(blank, rule="lora_restore_path", expected="adapter", notes=(), settings=())
    if not settings.flag("lora.enable_lora"):
        problem = Problem(
            "lora.lora_restore_path is ignored, because lora.enable_lora is false", "set it to true"
        )
        return replace(blank, verdict="does not look for adapters", problems=(problem,))
    # Both versions read adapters with Orbax's older API.
    target = resolve_path("lora.lora_restore_path", text, replace(version, orbax="v0"))
    result = _with_verdict(
        _with_contents(_RuleTarget("lora_restore_path", "adapter", target), settings, version, blank), False
    )
    notes = [
        *result.notes,
        "pre-training does not add adapters to the model; fine-tuning does, and loads them from there",
    ]
    notes += ["they replace the adapters of the resumed step"] if is_resumed else []
    return replace(result, notes=tuple(notes))


def _unused_notes(settings: Settings) -> Iterator[str]:
    for name, where in (
        ("lora_input_adapters_path", "the inference engine"),
        ("hf_lora_adapter_path", "the converters"),
    ):
        if settings.text(name):
            yield f"{name} is for {where} of MaxText; training ignores it"
    if not settings.flag("pure_nnx"):
        yield (
            "pure_nnx is false: Linen's trainer looks in the same locations, and requires all arrays of "
            "its state"
        )
    if settings.flag("enable_diloco"):
        yield "with enable_diloco the state has additional parts, which were not checked"


_HUB, _BUCKET = "hf://", "gs://"


def resolve_dynamic(text: str, settings: Settings) -> ResolvedPath:
    """Return what MaxText reads with source_checkpoint_layout=safetensors_dynamic.

    Args:
        text: A directory or a Hub repository; "" for MaxText's default repository of the model.
        settings: The settings of the run.

    Raises:
        StorageError: The location cannot be accessed.
    """
    if text.startswith(_BUCKET) or (text and not text.startswith(_HUB) and parse(text).is_dir()):
        return _weights_directory(parse(text))
    name, problems = text.removeprefix(_HUB), []
    if not text and settings.text("model_name") == DEFAULTS["model_name"]:
        problems.append(
            Problem("without a path, model_name determines the weights, but it is not set", "set it")
        )
    if not settings.text("base_output_directory").startswith(_BUCKET):
        problems.append(
            Problem(
                "Hub weights are read through a copy in base_output_directory, which must be on gs://"
                + (f": {text} is not a local directory" if text and not text.startswith(_HUB) else ""),
                "set it, or download the weights and pass their directory",
            )
        )
    source_text = f"{_HUB}{name}" if name else f"the Hub weights for model_name={settings.text('model_name')}"
    return ResolvedPath(None, problems=tuple(problems), shown=source_text)


def resolve_conversion_fn(text: str, settings: Settings, version: Version) -> ResolvedPath:
    """Return what MaxText reads for a full state with source_checkpoint_layout=safetensors.

    Raises:
        StorageError: The location cannot be accessed.
    """
    location = parse(text)
    target = ResolvedPath(location) if location.is_file() else _weights_directory(location)
    problems = list(target.problems)
    if not settings.text("checkpoint_conversion_fn"):
        do = "set it to a function, such as one from `ckpttools.family_conversion_fn`"
        problems.append(Problem("source_checkpoint_layout=safetensors needs checkpoint_conversion_fn", do))
    if version.orbax == "v0" and not settings.flag("enable_orbax_v1"):
        problem = f"MaxText {version.name} reads safetensors only with enable_orbax_v1=true"
        problems.append(Problem(problem, "set it, or convert the weights first"))
    return ResolvedPath(target.item, problems=tuple(problems))


def _weights_directory(location: Location) -> ResolvedPath:
    """Return the directory if it contains safetensors files."""
    if location.is_dir() and any(entry.name.endswith(".safetensors") for entry in location.entries()):
        return ResolvedPath(location)
    return ResolvedPath(
        None, problems=(Problem(f"{location} has no safetensors files", "check its spelling"),)
    )


_JOB = "JOBSET_NAME"
_OUTPUT = "maxtext_output"
_MULTI_TIER, _EMERGENCY = "enable_multi_tier_checkpointing", "enable_emergency_checkpoint"


@dataclass(frozen=True, slots=True)
class OwnRun:
    """The checkpoints of the run itself.

    Attributes:
        tried: The locations that were checked.
        target: The item from which MaxText resumes; None if the run has no step yet.
        problems: The reasons why resuming fails regardless of the item's content.
        notes: Other notes for the user.
        is_hidden: Whether there may be more checkpoints in locations that cannot be accessed from here.
    """

    tried: RuleCheck
    target: ResolvedPath | None = None
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    is_hidden: bool = False


def find_own_run(settings: Settings, environment: Mapping[str, str]) -> OwnRun:
    """Find the run's own checkpoints as MaxText's manager would list them.

    Args:
        settings: The settings of the run.
        environment: Environment variables of the run.

    Raises:
        StorageError: A directory cannot be listed.
    """
    notes: list[str] = []
    if not (_is_local(settings) or settings.flag("enable_checkpointing")):
        return OwnRun(RuleCheck("resume", None, "not searched: enable_checkpointing is false"))
    name = settings.text("run_name") or environment.get(_JOB, "")
    local = _local_steps(settings, notes) if _is_local(settings) else None
    candidates = [] if local is None else [local]
    if not settings.flag(_MULTI_TIER):
        if not name:
            result = f"run_name is empty: MaxText creates a new one from model and time, unless {_JOB} is set"
            return OwnRun(RuleCheck("resume", None, result), notes=tuple(notes))
        base = settings.text("base_output_directory")
        if base and (problem := unsupported_store_problem(parse(base))):
            return OwnRun(RuleCheck("resume", base, "not inspected"), ResolvedPath(None, problems=(problem,)))
        candidates.append(list_committed_steps(_checkpoints(name, settings, notes)))
    is_hidden = _is_local(settings) and local is None
    return replace(_latest_step(candidates, settings), notes=tuple(notes), is_hidden=is_hidden)


def _is_local(settings: Settings) -> bool:
    return settings.flag(_MULTI_TIER) or settings.flag(_EMERGENCY)


def _checkpoints(name: str, settings: Settings, notes: list[str]) -> Location:
    base = settings.text("base_output_directory")
    if not base:
        notes.append(
            f"base_output_directory is not set: MaxText uses {_OUTPUT} in its working directory, which is "
            "assumed to be this one"
        )
    location = parse(base) if base else parse(_OUTPUT).absolute()
    return location / name / "checkpoints"


def _local_steps(settings: Settings, notes: list[str]) -> OrbaxSteps | None:
    """Return the steps on the local disk; None if that is not on this host."""
    location = parse(settings.text("local_checkpoint_directory"))
    if not location.is_dir():
        notes.append(
            f"{location} does not exist here: each host has its own, and a step there takes precedence over "
            f"older "
            "ones elsewhere"
        )
        return None
    notes.append(f"{location} was inspected only on this host; a step must exist on the other hosts as well")
    # On GPUs, each process has a subdirectory named after its index.
    result = [list_committed_steps(directory) for directory in (location, *directories(location))]
    complete = [
        replace(item, steps={n: step for n, step in item.steps.items() if Step(step).is_one})
        for item in result
    ]
    return next((item for item in complete if item.steps), result[0])


def _latest_step(listings: Sequence[OrbaxSteps], settings: Settings) -> OwnRun:
    """Return the latest step of all locations."""
    if not listings:
        return OwnRun(RuleCheck("resume", settings.text("local_checkpoint_directory"), "does not exist here"))
    has_several = len(listings) > 1
    text = "; ".join(f"{entry.directory}: {entry.text}" if has_several else entry.text for entry in listings)
    best = max(listings, key=lambda entry: -1 if entry.latest is None else entry.latest)
    tried = RuleCheck("resume", str(best.directory), text)
    if best.latest is None:
        return OwnRun(tried)
    step = best.steps[best.latest]
    problems = [*_finished_run_problems(best.latest, settings)]
    base = settings.text("base_output_directory")
    if base and (problem := unreadable_reason("base_output_directory", base)):
        problems.append(problem)
    names = EMERGENCY_ITEMS if _is_local(settings) else (ITEM,)
    item = next((step / name for name in names if is_item(step / name)), None)
    target = ResolvedPath(
        item,
        problems=() if item is not None else (_no_item_problem(step, names),),
        instead=_skip_latest_hint(step, sorted(best.steps)[:-1]),
    )
    return OwnRun(tried, target, tuple(problems))


def _skip_latest_hint(latest: Location, earlier: Sequence[int]) -> str:
    """Return a hint on how a run resumes without its damaged latest step."""
    is_uncommitted = Step(latest).declared.is_uncommitted
    fix = remedy(latest, latest.parent, is_uncommitted=is_uncommitted)
    then = f"MaxText continues with step {earlier[-1]}" if earlier else "MaxText starts from step 0"
    command = f": `{fix.command}`" if fix.command else ""
    return f"{'' if is_uncommitted else 'download it again, or '}{fix.words}{command}; then {then}"


def _no_item_problem(step: Location, names: Sequence[str]) -> Problem:
    item_names = ", ".join(item.directory.name for item in Step(step).items)
    problem = f"{step} is the latest step for Orbax, but has no complete item {' or '.join(names)}"
    if item_names and ITEM not in names:
        return Problem(
            f"{problem}, only {item_names}", "turn emergency checkpointing off, or use another run_name"
        )
    if item_names:
        return Problem(f"{problem}, only {item_names}", f"{rewrite_hint(Step(step).items[0].directory)}")
    return Problem(
        problem,
        f"move {step} away to continue from the previous step; {action('doctor')} lists the missing parts",
    )


def _finished_run_problems(step: int, settings: Settings) -> Iterator[Problem]:
    """Yield a problem if the run has already reached its last step."""
    steps = settings.number("steps")
    if steps == -1:
        steps = settings.number("learning_rate_schedule_steps")
    if steps is not None and 0 <= steps <= step + 1:
        yield Problem(
            f"{plural(step + 1, 'step')} of {int(steps):,} are done, so MaxText refuses to start",
            f"set steps to more than {step + 1}, or use another run_name",
        )
