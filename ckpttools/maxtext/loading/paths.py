"""Resolve paths in settings: find the item that MaxText reads, or why it does not find one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.core.message_terms import action
from ckpttools.core.text import natural_key, plural
from ckpttools.formats.orbax.metadata import CHECKPOINT_FILE, COMMIT_FILE, TREE_FILE, V1_FILE
from ckpttools.formats.orbax.naming import ITEM
from ckpttools.formats.orbax.steps import (
    IN_PROGRESS,
    OrbaxItem,
    OrbaxRun,
    Step,
    directories,
    has_metadata,
    is_committed,
    is_item,
    orbax_at,
)
from ckpttools.maxtext.loading.report import Problem
from ckpttools.maxtext.versions import Version
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

# Stores that MaxText reads; `memory` is for tests that call this from Python.
_READABLE_SCHEMES = ("file", "gs", "memory")
_KEYS = ("model", "model_params")


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """The item or location that a path in the settings refers to.

    Attributes:
        item: The directory whose arrays are read; None if MaxText does not find one.
        key: The key of the parameters in the item.
        problems: The reasons why loading fails.
        shown: A description of the target if it cannot be accessed.
        instead: The hint if the item cannot be opened; None for the hint of the reason.
    """

    item: Location | None
    key: str = "params"
    problems: tuple[Problem, ...] = ()
    shown: str | None = None
    instead: str | None = None

    @property
    def path(self) -> str | None:
        """Return the path that is read; None if nothing is found."""
        return self.shown if self.item is None else str(self.item)


def resolve_path(setting: str, text: str, version: Version) -> ResolvedPath:
    """Return what MaxText reads for a path in the settings.

    Args:
        setting: The name of the setting.
        text: The path as given.
        version: The version of MaxText.

    Raises:
        CheckpointError: The path cannot be accessed.
    """
    location = parse(text)
    key = _key(text, version)
    if problem := unreadable_reason(setting, text):
        is_relative = location.store.scheme == "file" and not text.startswith(("/", "~"))
        # Problems of the requested path itself are reported at once.
        further = resolve_path(setting, str(location.absolute()), version).problems if is_relative else ()
        return ResolvedPath(None, key, (problem, *further))
    find = _find_item_v0 if version.orbax == "v0" else _find_item_v1
    result = find(location, setting)
    return ResolvedPath(result, key) if isinstance(result, Location) else ResolvedPath(None, key, (result,))


def unreadable_reason(setting: str, text: str) -> Problem | None:
    """Return why MaxText cannot read a path, regardless of its content; None if it can."""
    location = parse(text)
    if problem := unsupported_store_problem(location):
        return problem
    if location.store.scheme == "gs" and location.key[:1] in ("", "/"):
        return Problem(f"{setting}={text} does not name a bucket", f"set {setting}=gs://BUCKET/…")
    if text.startswith("~"):
        return Problem(f"MaxText does not expand ~ in {setting}={text}", "write the complete path")
    if location.store.scheme == "file" and not text.startswith("/"):
        return Problem(
            f"Orbax refuses relative paths such as {setting}={text}",
            f"set {setting}={location.absolute()}",
        )
    return None


def step_number(item: Location) -> int | None:
    """Return the step of an item from the name of its directory or the parent directory."""
    own = Step(item).number
    return own if own is not None else Step(item.parent).number


def _key(text: str, version: Version) -> str:
    cut = text.rstrip("/").removesuffix(f"/{ITEM}") if version.orbax == "v1" else text
    name = cut.rpartition("/")[2]
    return name if name in _KEYS else "params"


def unsupported_store_problem(location: Location) -> Problem | None:
    """Return why MaxText cannot read from a store; None if it can."""
    scheme = location.store.scheme
    if scheme in _READABLE_SCHEMES:
        return None
    return Problem(
        f"MaxText reads local paths and gs://, but not {scheme}://",
        f"copy it to a directory or to gs://: {action('copy', str(location), 'DST')}"
        if scheme in ("s3", "az")
        else f"convert it first: {action('hf_to_maxtext', str(location), 'DST')}",
    )


def _missing_problem(location: Location, setting: str, api: str) -> Problem:
    near = next((above for above in location.parents[:2] if above.is_dir()), None)
    return Problem(
        f"{location} does not exist", _nearby_item_hint(near, setting, api) or "check its spelling"
    )


def _find_item_v0(location: Location, setting: str) -> Location | Problem:
    """Return the item at a path, which must be exact in Orbax v0."""
    if not location.is_dir():
        return _missing_problem(location, setting, "v0")
    if not is_item(location):
        return _no_item_problem(location, setting, "v0")
    return location if is_committed(location) else _uncommitted_problem(location)


def _find_item_v1(location: Location, setting: str) -> Location | Problem:
    """Return the item in the step at a path, or the step itself, as Orbax v1 does."""
    root = location.parent if location.name == ITEM else location
    item = root / ITEM if (root / ITEM).is_dir() else root
    if not is_item(item):
        exists = location.is_dir()
        return _no_item_problem(item, setting, "v1") if exists else _missing_problem(location, setting, "v1")
    if not is_committed(root):
        return _uncommitted_problem(root)
    return _v1_problem(root, item) or item


def _v1_problem(root: Location, item: Location) -> Problem | None:
    """Return why Orbax v1 refuses a directory that has an item; None if it does not."""
    if (root / V1_FILE).is_file():
        if item == root or not has_metadata(root):
            return Problem(
                f"{root} has {V1_FILE}, but no {CHECKPOINT_FILE} with an item {ITEM}", _doctor_hint(root)
            )
        return None
    if has_metadata(root.parent):
        return Problem(
            f"Orbax refuses {root}: it is in a step, next to {CHECKPOINT_FILE}, but is not named {ITEM}",
            rewrite_hint(root),
        )
    if not has_metadata(root) and item != root and has_metadata(item):
        return Problem(
            f"{root} has no {CHECKPOINT_FILE}, but its item has one: Orbax treats it as a run",
            _doctor_hint(root),
        )
    return None


def _uncommitted_problem(location: Location) -> Problem:
    if location.store.scheme != "gs":
        return Problem(f"{location} is an unfinished save, as its name shows", "use an earlier step")
    return Problem(
        f"{location} has no {COMMIT_FILE}: on gs://, Orbax treats it as unfinished",
        f"{_doctor_hint(location)}; if the copy is complete, add the files of that name next to the others",
    )


def _doctor_hint(location: Location) -> str:
    return f"{action('doctor', str(location))} shows details"


def rewrite_hint(item: Location) -> str:
    """Return a hint for rewriting an item under a name that MaxText finds."""
    command = action("convert", str(item), "DST", format="orbax", item=ITEM)
    return f"{command} writes an item that MaxText finds"


def _no_item_problem(location: Location, setting: str, api: str) -> Problem:
    """Describe a directory that is not an item."""
    instead = _nearby_item_hint(location, setting, api)
    if instead:
        return Problem(f"{location} is not the directory of an item: it has no {TREE_FILE}", instead)
    if any(entry.name.endswith(".safetensors") for entry in location.entries()):
        return Problem(
            f"{location} contains Hugging Face weights",
            f"convert them, {action('hf_to_maxtext', str(location), 'DST')}, or set "
            "source_checkpoint_layout=safetensors_dynamic",
        )
    return Problem(f"{location} is not an Orbax checkpoint: it has no {TREE_FILE}", _doctor_hint(location))


def _nearby_item_hint(location: Location | None, setting: str, api: str) -> str | None:
    """Return a hint that names a nearby item, above or below the location."""
    result = orbax_at(location) if location is not None and location.is_dir() else None
    match result:
        case OrbaxItem(directory=directory):
            return f"set {setting}={directory}"
        case Step() as step if step.items:
            return _step_item_hint(step, setting, api)
        case OrbaxRun() as run if (committed := list_committed_steps(run.path)).latest is not None:
            step = Step(committed.steps[committed.latest])
            return _step_item_hint(step, setting, api) if step.items else None
    return None


def _step_item_hint(step: Step, setting: str, api: str) -> str:
    """Return a hint that names an item in a step."""
    names = {item.directory.name: item.directory for item in step.items}
    if api == "v0" and len(names) > 1 and ITEM not in names:
        return "set it to one of " + ", ".join(map(str, names.values()))
    item = names.get(ITEM) or next(iter(names.values()))
    if api == "v1" and item != step.path and item.name != ITEM:
        return rewrite_hint(item)
    return f"set {setting}={item}"


def problem_of(error: CheckpointError) -> Problem:
    """Convert an error of opening a location to a problem."""
    text = " ".join(error.raw.message.split())
    where = f" ({error.location})" if error.location and isinstance(error, FormatError) else ""
    return Problem(f"{text}{where}", error.raw.hint)


EMERGENCY_ITEMS = ("state", "default")
_STEP = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True)
class OrbaxSteps:
    """A directory of steps as Orbax lists it.

    Attributes:
        directory: The directory that contains the steps.
        steps: The steps that Orbax considers finished, by number.
        skipped: Name of an entry that looks like a step but is not listed -> reason.
    """

    directory: Location
    steps: Mapping[int, Location]
    skipped: Mapping[str, str]

    @property
    def latest(self) -> int | None:
        return max(self.steps, default=None)

    @property
    def text(self) -> str:
        """Summarize the steps in one line."""
        if not self.steps and not self.skipped:
            return "no step exists" if self.directory.is_dir() else "does not exist"
        steps_text = "no finished step"
        if self.steps:
            steps_text = f"{plural(len(self.steps), 'step')}, the latest {self.latest}"
        skipped = [f"{name} is skipped: {reason}" for name, reason in self.skipped.items()]
        return "; ".join([steps_text, *skipped])


def list_committed_steps(directory: Location) -> OrbaxSteps:
    """List the steps in a directory as Orbax's manager does.

    Raises:
        StorageError: The directory cannot be listed.
    """
    steps: dict[int, Location] = {}
    passed: dict[str, str] = {}
    result = sorted(directories(directory), key=lambda location: natural_key(location.name))
    for location, reason in zip(result, map_concurrently(directory.store, _skip_reason, result), strict=True):
        if reason is None:
            steps[int(location.name)] = location
        elif Step(location).number is not None:
            passed[location.name] = reason
    return OrbaxSteps(directory, steps, passed)


def _skip_reason(location: Location) -> str | None:
    """Return why a directory is not listed as a step; None if it is."""
    if IN_PROGRESS in location.name:
        return "an unfinished save"
    if not _STEP.fullmatch(location.name):
        return "a name that Orbax does not recognize as a step"
    if is_committed(location):
        return None
    return ", ".join(filter(None, (f"no {COMMIT_FILE}", Step(location).unfinished_reason)))
