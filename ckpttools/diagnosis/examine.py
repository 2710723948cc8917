"""Run checks on a path, and apply fixes that a user requested."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module

from ckpttools.checks.base import ModelCheck
from ckpttools.checks.registry import checks as library_checks
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, MemoryBudgetError, UsageError, listing
from ckpttools.core.message_terms import action, call, option
from ckpttools.core.tabular import Tabular
from ckpttools.core.text import first_names, natural_key
from ckpttools.diagnosis import checks as checks_room
from ckpttools.diagnosis.base import ERROR, LEVELS, Check, Finding, Fix, as_finding, finding_of, quote_path
from ckpttools.diagnosis.checks.checksums import has_checksums
from ckpttools.diagnosis.inventory import Inventory, ValueReading, inventory_of
from ckpttools.formats.base import ReadOptions, SupportsFaults
from ckpttools.formats.foreign import foreign_error
from ckpttools.formats.interrupted import absent, refuse_empty
from ckpttools.formats.known_formats import formats
from ckpttools.formats.orbax.steps import Step
from ckpttools.formats.registry import faults_in
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.formats.zarr import untyped_arrays
from ckpttools.formats.zarr.legacy_runs import is_legacy_step
from ckpttools.stores.fetching import Observe
from ckpttools.stores.location import is_store_failure
from ckpttools.stores.registry import LocationLike, parse

# This check opens everything. Its findings are reported only if no other check explains them.
LAST_RESORT = "opens"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A location at which a requested fix was not applied.

    Attributes:
        location: The file or directory.
        what: Why the fix was not safe or not possible.
        hint: The next step.
        exit_code: The exit code of the error.
    """

    location: str
    what: str
    hint: str
    exit_code: int


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(Tabular):
    """The findings at a path.

    Attributes:
        path: The examined path.
        healthy: Whether no errors were found; `values_read` and `checksums_compared` show what was examined.
        examined: Examined objects, such as "2 steps" or "1 item".
        findings: The findings, errors first.
        applied_fixes: Changes made by the requested fixes.
        refused_fixes: Locations at which a requested fix was not applied.
        checksums_compared: Whether data was compared with the checksums in its files; None if there are no
            checksums.
        values_read: Whether the values of all arrays were read; values of unfinished saves are never read.
    """

    rows_field = "findings"

    path: str
    healthy: bool
    examined: tuple[str, ...]
    findings: tuple[Finding, ...]
    applied_fixes: tuple[str, ...] = ()
    refused_fixes: tuple[Refusal, ...] = ()
    checksums_compared: bool | None = None
    values_read: bool = False

    def __repr__(self) -> str:
        """Return the verdict, the findings and the fixes as text."""
        lines = [f"fixed: {item}" for item in self.applied_fixes]
        lines += [f"refused: {item.location}: {item.what}" for item in self.refused_fixes]
        lines += [
            f"{finding.level}: {finding.location}: {finding.what} [{finding.check}]"
            for finding in self.findings
        ]
        verdict = "no errors" if self.healthy else "errors"
        unread = "" if self.values_read else ", values not read"
        return f"<Diagnosis of {self.path}: {verdict}{unread}{listing(lines)}>"

    @property
    def exit_code(self) -> int:
        """Exit code: that of the first refusal; otherwise 1 for errors, and 0 if there are none."""
        return self.refused_fixes[0].exit_code if self.refused_fixes else int(not self.healthy)


@cache
def checks() -> tuple[Check, ...]:
    """Return all checks in the order of their names."""
    modules = (
        import_module(f"{checks_room.__name__}.{item.name}")
        for item in pkgutil.iter_modules(checks_room.__path__)
    )
    own = (module.CHECK for module in modules)
    return tuple(sorted((*own, *format_checks(), *_model_checks()), key=lambda check: check.name))


def _model_checks() -> Iterator[Check]:
    """Yield the checks of `ckpttools.checks`, which run on every model at a path."""
    return (Check(check.name, check.summary, partial(_check_models, check)) for check in library_checks())


def _check_models(check: ModelCheck, inventory: Inventory) -> Iterator[Finding]:
    for model in inventory.models:
        yield from map(as_finding, check.run(model))


def fixes() -> dict[str, Fix]:
    """Return all fixes by name."""
    return {check.fix.name: check.fix for check in checks() if check.fix is not None}


def examine(
    where: LocationLike,
    read: ReadOptions | None = None,
    reading: Observe | None = None,
    values: ValueReading | None = None,
) -> Diagnosis:
    """Examine everything at or below a path without changing it.

    Args:
        where: The path.
        read: Limits for opening.
        reading, values: See `Inventory`; None to read no arrays.

    Raises:
        StorageError: The path does not exist or cannot be listed.
        FormatError: The path does not contain a checkpoint, not even an incomplete one.
    """
    path = parse(where)
    inventory = replace(inventory_of(path, read), reading=reading, values=values)
    if inventory.path in inventory.denied:
        raise inventory.denied[inventory.path]
    if inventory.is_empty and not Step(inventory.path).is_being_deleted:
        refuse_empty(path)
        if model := next(iter(inventory.models), None):
            names = sorted(name for name in model.files if name != CONFIG)
            raise FormatError(
                f"the model in {model.location} has no weights",
                got=f"{CONFIG}{f', {first_names(names, 5)}' if names else ''}",
                expected="model.safetensors, or shards and model.safetensors.index.json",
                hint=f"fetch them: hf download REPO --include '*.safetensors' --local-dir {quote_path(path)}",
            )
        raise foreign_error(path) or FormatError(
            f"{path} is not a checkpoint",
            expected="a step, item or run of Orbax, weights, or a zarr v3 hierarchy, complete or damaged",
            hint=f"{action('families.formats')} lists the supported formats",
        )
    result = dict.fromkeys(finding for check in checks() for finding in _run_check(check, inventory))
    ordered = sorted(_drop_explained_errors(result), key=_rank)
    healthy = all(item.level != ERROR for item in ordered)
    compared = (reading is not None) if has_checksums(inventory) else None
    has_unfinished = bool(inventory.leftovers) or any(item.is_unfinished for item in inventory.items)
    return Diagnosis(
        str(path),
        healthy,
        tuple(_count_inventory(inventory)),
        tuple(ordered),
        checksums_compared=compared,
        values_read=values is not None and not has_unfinished,
    )


def _rank(finding: Finding) -> tuple[int, bytes, str]:
    return LEVELS.index(finding.level), natural_key(finding.location), finding.check


def _run_check(check: Check, inventory: Inventory) -> Iterator[Finding]:
    """Yield the findings of a check.

    If the check fails, yield that as a finding, so that others are still reported.

    Raises:
        StorageError: A network store did not respond, which is not a fault of the files.
        MemoryBudgetError: The check needs more memory than is allowed.
    """
    try:
        for finding in check.look(inventory):
            yield replace(finding, check=check.name)
    except Exception as error:
        if is_store_failure(error, inventory.path) or isinstance(error, MemoryBudgetError):
            raise
        problem = f"the check {check.name!r} failed: {type(error).__name__}: {error}"
        reason = "the files are damaged in an unexpected way; this check is incomplete"
        yield Finding(
            ERROR, str(inventory.path), problem, reason, "fetch the checkpoint again", check=check.name
        )


def _count_inventory(inventory: Inventory) -> Iterator[str]:
    result = {location for other in inventory.others.values() for location in other}
    hierarchies = [hierarchy for hierarchy in inventory.hierarchies if result.isdisjoint(hierarchy.parents)]
    trees = inventory.others.get(untyped_arrays.FORMAT.name, ())
    above = {Step(location) for tree in trees for location in (tree, tree.parent)}
    legacy = [step for step in above if step.number is not None and is_legacy_step(step.path)]
    counts = [
        (len(inventory.steps) + len(legacy), "step", "steps"),
        (len(inventory.items), "item", "items"),
        (len(inventory.weights), "directory of safetensors", "directories of safetensors"),
        (len(hierarchies), "zarr v3 hierarchy", "zarr v3 hierarchies"),
        (len(inventory.leftovers), "leftover", "leftovers"),
        *(
            (len(item), f"checkpoint of {name}", f"checkpoints of {name}")
            for name, item in inventory.others.items()
        ),
    ]
    return (
        f"{number:,} {one if number == 1 else plural_noun}" for number, one, plural_noun in counts if number
    )


def _drop_explained_errors(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings, except errors of opening that another finding explains."""
    locations = [item.location for item in findings if item.level == ERROR and item.check != LAST_RESORT]
    for item in findings:
        if item.check != LAST_RESORT or not any(_is_explained(item, location) for location in locations):
            yield item


def _is_explained(last: Finding, location: str) -> bool:
    """Return whether the last finding explains an error at a location or in its directory."""
    if _is_at(location, last.location) or _is_at(last.location, location):
        return True
    return location in last.what or f"{parse(location).parent}: " in last.what


def _is_at(location: str, top: str) -> bool:
    """Return whether a location is `top` or below it."""
    return location == top or location.startswith((f"{top}/", f"{top}:"))


def apply_fixes(
    where: LocationLike,
    *names: str,
    read: ReadOptions | None = None,
    reading: Observe | None = None,
    values: ValueReading | None = None,
) -> Diagnosis:
    """Apply fixes wherever a finding suggests them, then examine the path again.

    If a fix is refused at one location, the others are still applied.

    Args:
        where: The path.
        names: Names of the fixes.
        read: Limits for opening.
        reading, values: See `examine`, for the second examination.

    Raises:
        UsageError: No fix has this name.
        CheckpointError: No fix was safe or possible anywhere. Nothing was changed.
    """
    path = parse(where)
    known, read = fixes(), read or ReadOptions()
    for name in names:
        if name not in known:
            problem = f"the fix {name!r} does not exist"
            raise UsageError(problem, expected=" or ".join(known), hint=call("doctor.checks"))
    if not path.lexists():
        raise absent(path)
    done: list[str] = []
    refused: dict[str, CheckpointError] = {}
    for name in names:
        if path.lexists():
            _apply_everywhere(known[name], examine(path, read).findings, read, done, refused)
    if refused and not done:
        raise _combined_error(names, refused)
    after = examine(path, read, reading, values) if path.lexists() else Diagnosis(str(path), True, (), ())
    refusals = tuple(_refusal(location, error) for location, error in refused.items())
    return replace(after, applied_fixes=tuple(done), refused_fixes=refusals)


def _apply_everywhere(
    fix: Fix,
    findings: Sequence[Finding],
    read: ReadOptions,
    done: list[str],
    refused: dict[str, CheckpointError],
) -> None:
    """Apply a fix at all locations. Adds the results to `done`, and errors to `refused` by location."""
    for location in dict.fromkeys(item.location for item in findings if item.fix == fix.name):
        try:
            done.append(_apply(fix, location, findings, read))
        except CheckpointError as error:
            refused[location] = error


def _apply(fix: Fix, location: str, findings: Iterable[Finding], read: ReadOptions) -> str:
    if fix.needs_health:
        _refuse_ill(location, findings)
    return fix.apply(parse(location), read)


def _combined_error(names: Iterable[str], refused: Mapping[str, CheckpointError]) -> CheckpointError:
    """Return a single error for all refusals."""
    first = next(iter(refused.values()))
    if len(refused) == 1:
        return first
    reasons = listing(
        [f"{location}: {_refusal(location, error).what}" for location, error in refused.items()]
    )
    text = " ".join(option("fix", name) for name in names)
    return type(first)(f"{text} could repair nothing{reasons}", hint=first.hint)


def _refusal(location: str, error: CheckpointError) -> Refusal:
    as_finding = finding_of(error, parse(location))
    where = f"{as_finding.location}: " if as_finding.location != location else ""
    do = error.raw.hint or "resolve that, and run the same command again"
    return Refusal(location, where + as_finding.what, do, error.exit_code)


def _refuse_ill(location: str, findings: Iterable[Finding]) -> None:
    for item in findings:
        if item.level == ERROR and _is_at(item.location, location):
            raise FormatError(
                "this cannot be marked as finished while it has errors",
                location=item.location,
                got=item.what,
                hint="repair the errors first",
            )


def format_checks() -> Iterator[Check]:
    """Yield the checks of all formats that have one."""
    for name, format in formats().items():
        if isinstance(format, SupportsFaults):
            yield _check(name, format)


def _check(name: str, format: SupportsFaults) -> Check:
    def examine(inventory: Inventory) -> Iterator[Finding]:
        for location in inventory.locations(name):
            for error in faults_in(format, location, inventory.read):
                yield finding_of(error, location, reason="none of its tensors can be trusted")

    return Check(name, format.fault_summary, examine)
