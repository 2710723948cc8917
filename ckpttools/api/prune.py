"""Delete steps of a run, or their optimizer state, according to rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from ckpttools.api.options.runs import PRUNE
from ckpttools.api.prepared import WriteRequest, command
from ckpttools.api.tree_plan import plan_tree
from ckpttools.array.gaps import refuse_incomplete
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, NoSpaceError, StorageError, UsageError
from ckpttools.core.memory_limit import DEFAULT_MEMORY
from ckpttools.core.message_terms import action, option
from ckpttools.core.options import declare
from ckpttools.formats.orbax.steps import PRUNE_DIRECTORY, OrbaxRun, Step, directories
from ckpttools.formats.orbax.write import OrbaxWriter, OtherItem
from ckpttools.formats.registry import open_tree, writer_for
from ckpttools.maxtext.scan_axis import KeepScanAxis
from ckpttools.maxtext.strip import StripOptimizer
from ckpttools.runs.journal import (
    PruneJournal,
    fingerprint,
    interrupted_error,
    journal_location,
    locked_run,
    read_journal,
    store_with_removal,
)
from ckpttools.runs.listing import find_run, list_consistently, measure_usage
from ckpttools.runs.policy import Best, Keep
from ckpttools.runs.prune import PruneDecision, StepOutcome, commit_texts, decide
from ckpttools.runs.removal import Removal, check_can_rename, tidy, tidy_all
from ckpttools.stores.abilities import SupportsRename
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

# Maximum size of other items of a step (metrics, states of data iterators), which are copied to its stripped
# version.
_MAX_SIDE_FILE_BYTES = 16 << 20


@dataclass(frozen=True, repr=False)
class PruneReport:
    """The outcome for each step of a run.

    Attributes:
        path: Directory that contains the steps.
        steps: All steps; () if an interrupted prune was finished or undone.
        freed_bytes: Minimum number of bytes that are freed; the bytes freed by stripping are known only after
            it is done.
        is_done: Whether the prune was carried out.
        what: "prune", "finish" or "undo".
        unchanged_steps: Steps that were left unchanged during the prune, or could not be restored, with the
            reason.
        is_copied: Whether the parameters of stripped steps are copied; otherwise stripped steps share
            complete data files.
    """

    path: str
    steps: tuple[StepOutcome, ...]
    freed_bytes: int
    is_done: bool = False
    what: str = "prune"
    unchanged_steps: tuple[str, ...] = ()
    is_copied: bool = False

    def __repr__(self) -> str:
        outcomes = Counter(step.outcome for step in self.steps)
        steps = "".join(f"{count:,} {outcome}, " for outcome, count in outcomes.items())
        text = self.what if self.is_done else f"{self.what} to be done"
        return f"<PruneReport of {self.path}: {text}: {steps}{self.freed_bytes:,} bytes free>"


@dataclass(frozen=True, repr=False)
class PreparedPrune:
    """A planned prune. Nothing has been changed.

    Attributes:
        decision: The outcome for each step; None to finish or undo an interrupted prune.
        location: Directory that contains the steps.
        what: "prune", "finish" or "undo".
        copy: Whether the parameters of stripped steps are copied.
        requests: Concurrent reads in network stores; None to choose the number automatically.
    """

    decision: PruneDecision | None
    location: Location
    what: str
    copy: bool
    requests: int | None

    def __repr__(self) -> str:
        return f"<PreparedPrune: {self.report!r}>"

    @property
    def report(self) -> PruneReport:
        """Return the report of the planned work."""
        outcomes, freed_bytes = (
            (self.decision.outcomes, self.decision.freed_bytes) if self.decision else ((), 0)
        )
        return PruneReport(str(self.location), outcomes, freed_bytes, what=self.what, is_copied=self.copy)

    def run(self) -> PruneReport:
        """Prune the run.

        Raises:
            CheckpointError: Reading or writing fails. The prune can be finished or undone.
        """
        with use_concurrency(self.requests), locked_run(self.location):
            if self.decision is None:
                return self._resume()
            if read_journal(self.location) is not None:
                raise interrupted_error(self.location)
            return self._apply(self.decision)

    def _resume(self) -> PruneReport:
        journal = read_journal(self.location)
        if journal is None:
            raise UsageError("no prune of this run was started", location=self.location)
        if not (journal.delete or journal.strip):
            tidy_all(self.location)
            return replace(
                self.report,
                is_done=True,
                unchanged_steps=("it had changed nothing, so nothing had to be done",),
            )
        removal = Removal(self.location, journal)
        left = removal.carry_out() if self.what == "finish" else removal.undo()
        return replace(self.report, is_done=True, unchanged_steps=left)

    def _apply(self, decision: PruneDecision) -> PruneReport:
        run, report = decision.run, self.report
        tidy(run.path)
        check_can_rename(run.path, (*decision.names_with("deleted"), *decision.names_with("stripped")))
        result = self._strip_steps(decision)
        delete = decision.names_with("deleted")
        if not (result or delete):
            return replace(report, is_done=True)
        prints = decision.fingerprints
        journal = PruneJournal(
            {name: prints[name] for name in delete},
            {name: prints[name] for name in result},
            {name: fingerprint(location) for name, location in result.items()},
            decision.names_with("kept"),
            commit_texts(run.path, delete),
        )
        removal = Removal(run.path, journal)
        removal.check_kept()
        going = (run.path / name for name in (*delete, *result))
        # Files that the stripped steps share have another name now, so they do not count as freed.
        freed = measure_usage(*(location for location in going if location.is_dir())).own
        freed_bytes = max(0, freed - measure_usage(*result.values()).own)
        try:
            journal.begin(run.path)
        except NoSpaceError as error:
            raise error.at(
                hint="recording the deletions takes some kB: move a file of that size away"
            ) from error
        left = removal.carry_out()
        if left:
            kept_names = {item.partition(":")[0] for item in left}
            freed_bytes = sum(step.freed_bytes for step in report.steps if step.name not in kept_names)
        return replace(report, is_done=True, unchanged_steps=left, freed_bytes=freed_bytes)

    def _strip_steps(self, decision: PruneDecision) -> dict[str, Location]:
        """Write all steps without their optimizer state, and return their locations by name."""
        names = decision.names_with("stripped")
        try:
            return {name: self._strip_step(decision.run.path / name) for name in names}
        except NoSpaceError as error:
            hint = (
                "stripped steps are written before any step is deleted: free some space, or leave "
                f"{option('strip_older', True)} out at first"
            )
            raise error.at(hint=hint) from error

    def _strip_step(self, path: Location) -> Location:
        """Write a step without its optimizer state next to the run's own steps."""
        step = Step(path)
        (item,) = step.items
        destination = journal_location(path.parent, "stripped", path.name)
        tree = open_tree(item.directory)
        refuse_incomplete(tree.arrays.values(), str(item.directory))

        with WriteRequest(tree, destination, memory=DEFAULT_MEMORY, command="ckpt prune") as request:
            writer = writer_for(
                tree,
                destination=destination,
                shares=True,
                level="step",
                item=item.name,
                reference=False if self.copy else None,
            )
            if isinstance(writer, OrbaxWriter):
                writer = replace(writer, beside=dict(_copy_other_items(step)))
            changed = tree.pipe(KeepScanAxis(StripOptimizer(keep_step=True)))
            prepared = request.complete(plan_tree(changed, writer, request.resources))
        prepared.run()
        return destination


def _copy_other_items(step: Step) -> Iterator[tuple[str, OtherItem]]:
    """Yield copies of the items of a step that are not trees.

    Raises:
        FormatError: An item is larger than any that belongs there.
    """
    handlers = step.declared.handlers
    trees = {item.directory for item in step.items}
    for location in directories(step.path):
        if location in trees:
            continue
        usage = measure_usage(location)
        if usage.nbytes > _MAX_SIDE_FILE_BYTES:
            raise FormatError(
                "an item that is not a tree is too large to be copied with it", location=location
            )
        handler = handlers.get(location.name) if isinstance(handlers, dict) else None
        yield (
            location.name,
            OtherItem(
                str(handler or ""), {name: (location / name).read_bytes() for name, _ in location.walk()}
            ),
        )


@command(returns="PruneReport")
@declare(*PRUNE)
def prune(
    run: LocationLike,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    strip_older: bool = False,
    copy: bool = False,
    finish: bool = False,
    undo: bool = False,
    requests: int | None = None,
) -> PreparedPrune:
    """Delete the steps of a run that no rule keeps. `prune.plan` reports the outcome for each.

    Never deletes the last finished step, the step that Orbax considers the latest, steps behind symbolic
    links, or anything other than finished saves in which every file is known.

    Args:
        run: Directory with steps, on a disk or in a bucket.

    Raises:
        UsageError: No rule is given, another prune is running or was interrupted, or nothing can be deleted
            there.
        FormatError: No step is finished.
        CheckpointError: The path is not a run, or cannot be read or written.
    """
    keep = Keep(keep_last, keep_every, None if keep_best is None else Best.of(keep_best))
    with use_concurrency(requests):
        location = parse(run, is_written=True).absolute()
        if finish or undo:
            return _prepare_resume(location, finish, undo, keep, requests)
        if keep.has_no_rule:
            names = ("keep_last", "keep_every", "keep_best")
            raise UsageError(
                "no option selects the steps to keep", hint=f"give {' or '.join(map(option, names))}"
            )
        result = find_run(location)
        if result.path not in (location, location / "checkpoints"):
            raise UsageError(
                f"{location} is a part of a run",
                expected="the run itself: all of its steps are examined",
                hint=f"name {result.path}",
            )
        store_with_removal(result.path)
        if read_journal(result.path) is not None:
            with locked_run(result.path):
                raise interrupted_error(result.path)
        if strip_older and not isinstance(result.path.store, SupportsRename):
            raise UsageError(
                "steps in a bucket cannot be replaced, because objects cannot be renamed",
                location=result.path,
                hint=f"leave {option('strip_older', True)} out; {action('strip_optimizer')} writes "
                "parameters to another location",
            )
        decision = list_consistently(result, lambda seen: _strippable(decide(seen, keep, strip_older)))
        return PreparedPrune(decision, result.path, "prune", copy, requests)


def _strippable(decision: PruneDecision) -> PruneDecision:
    """Return the same decisions, except that steps that cannot be stripped are kept."""

    def checked(item: StepOutcome) -> StepOutcome:
        if item.outcome != "stripped":
            return item
        try:
            step = Step(decision.run.path / item.name)
            open_tree(step.items[0].directory).pipe(KeepScanAxis(StripOptimizer(keep_step=True)))
            dict(_copy_other_items(step))
        except StorageError:
            raise
        except CheckpointError as error:
            return replace(
                item, outcome="kept", reason=f"{item.reason}; it is not stripped: {error.raw.message}"
            )
        return item

    return replace(decision, outcomes=tuple(map(checked, decision.outcomes)))


def _prepare_resume(
    location: Location, finish: bool, undo: bool, keep: Keep, requests: int | None
) -> PreparedPrune:
    if (finish and undo) or not keep.has_no_rule:
        raise UsageError(
            f"{option('finish', True)} and {option('undo', True)} apply only to an interrupted prune",
            hint="pass one of them, and no other option",
        )
    above = next(
        (item for item in (location, location / "checkpoints") if (item / PRUNE_DIRECTORY).is_dir()), None
    )
    if above is None:
        raise UsageError("no prune of this run was started", location=location)
    return PreparedPrune(None, OrbaxRun(above).path, "finish" if finish else "undo", False, requests)
