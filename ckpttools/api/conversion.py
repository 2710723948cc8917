"""The common steps of conversions: open, budget resources, and run a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Unpack

from ckpttools.api.output_checks import check_output
from ckpttools.api.sources import PathReading, opened, read_options
from ckpttools.array.gaps import refuse_incomplete
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_arguments, validate_fields
from ckpttools.core.budget import DEFAULT_MEMORY
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, StorageError
from ckpttools.core.notes import Notes
from ckpttools.core.text import plural
from ckpttools.formats.base import Writer
from ckpttools.plan.plan import Division, Plan
from ckpttools.plan.task import cores, reading_costs
from ckpttools.run.events import Observer, Receipt
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import find_unfinished
from ckpttools.stores.registry import LocationLike, parse


@validate_fields
@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a conversion may use.

    Attributes:
        memory: bytes resident at most.
        jobs: parallel workers; None for as many as suit the work, at most 16.
        manifest: whether the output is hashed while it is written, which takes memory for every array.
        destination: where it is written; None for a local directory.
        requests: reads under way at once in stores behind a network; None for as many as are found good.
    """

    memory: int = DEFAULT_MEMORY
    jobs: int | None = None
    manifest: bool = False
    destination: Location | None = None
    requests: int | None = None

    @property
    def workers(self) -> int:
        """Return the number of workers for writing: two per core."""
        # A worker that writes past the page cache waits for the disk: two cores, 2.47 GB, two workers
        # 1.65 to 2.1 s, four 1.4 to 1.8 s.
        return self.jobs or min(16, 2 * cores())

    def plan(self, tree: Tree, writer: Writer, notes: Notes | None = None) -> Conversion:
        """Plan writing `tree` with `writer`.

        Raises:
            FormatError: as `check_output`.
            CheckpointError: as `ckpttools.plan.plan.build`.
        """
        location = tree.metadata.location if self.destination is None else str(self.destination)
        notes, of_output = notes or Notes(), check_output(tree, writer, location)
        # Most defects of the output were already reported for the source.
        new = tuple(remark for remark in of_output.remarks if remark not in notes.remarks)
        notes += replace(of_output, remarks=new)
        # Imported here: these modules take memory, and the checks above may refuse the conversion first.
        from ckpttools.plan.plan import build

        with use_concurrency(self.requests):
            costs = reading_costs(tree.arrays.values())
            reserved = costs.memory + (_hashing_bytes(tree) if self.manifest else 0)
            streams = self.destination.store.streams if self.destination else None
            jobs = self.jobs or max(self.workers, costs.requests or 0, streams.files if streams else 0)
            if self.requests and streams and not self.jobs:
                # A worker writes one file at a time.
                jobs = max(self.requests, costs.requests or 0)
            build_plan = partial(build, tree, writer, memory=self.memory, jobs=jobs)
            build_plan = partial(build_plan, notes=notes, reserved=reserved, streams=streams)
            plan = self._begun_plan(build_plan, writer) or build_plan()
            return Conversion(plan, writer, self.requests, jobs)

    def _begun_plan(self, build_plan: Callable[..., Plan], writer: Writer) -> Plan | None:
        """Return the plan that an interrupted command began at the destination; None if it began another one.

        That command may have had more memory or workers, and have divided the arrays into other tasks.
        """
        begun = find_unfinished(self.destination) if self.destination else None
        division = Division.from_text(begun.division) if begun else None
        if begun is None or division is None:
            return None
        from ckpttools.run.fingerprint import fingerprint

        try:
            plan = build_plan(division=division)
            return plan if fingerprint(plan, writer) == begun.plan else None
        except CheckpointError:
            return None  # other tasks may fit into the memory, or another source may be readable


def _hashing_bytes(tree: Tree) -> int:
    from ckpttools.digest.watching import hashing_bytes

    return hashing_bytes(tree)


@validate_arguments
def open(path: LocationLike, step: int | None = None, **reading: Unpack[PathReading]) -> Tree:
    """Open the checkpoint at `path` in any format. Reads headers and indexes, but no array.

    Args:
        path: a file, an item, a step or a run directory.
        step: the step to open; None takes the latest finished one.
        reading: `ckpttools.api.sources.PathReading`, such as `with_optimizer=True` for DeepSpeed's moments.

    Raises:
        CheckpointError: nothing is there, or it cannot be read.
    """
    return opened(path, read_options({"step": step, **reading}))


@dataclass(frozen=True, slots=True, repr=False)
class Conversion:
    """A plan, its writer, and the resources it was planned for.

    Attributes:
        plan: what is done.
        writer: of the format, with its options.
        requests: as of `Resources`.
        jobs: workers at a time that were expected; fewer may fit.
    """

    plan: Plan
    writer: Writer
    requests: int | None = None
    jobs: int = 1

    def __repr__(self) -> str:
        return f"<Conversion to {self.writer.name}: {self.plan!r}>"

    def with_remarks(self, texts: tuple[str, ...]) -> Conversion:
        """Return the same conversion with further remarks for the user."""
        if not texts:
            return self
        notes = self.plan.notes + Notes(remarks=texts)
        return replace(self, plan=replace(self.plan, notes=notes))

    def run(
        self,
        destination: LocationLike,
        *,
        overwrite: bool = False,
        observe: Observer = lambda event: None,
        manifest: LocationLike | None = None,
        command: str = "",
        planned: str = "",
        check_replaced: Callable[[], None] = lambda: None,
        finalize: Callable[[], None] = lambda: None,
    ) -> Receipt:
        """Run the plan.

        Args:
            destination, overwrite, observe, command, planned: see `ckpttools.run.executor.execute`.
            check_replaced: raises, before all else, where something is there that may not be replaced.
            finalize: called when the checkpoint has its name; not where there is a manifest.
            manifest: file that gets the digests of all arrays; replaced only if `overwrite`. They are
                computed while data is in memory; arrays that do not pass through it are read once more.

        Raises:
            MemoryBudgetError: the plan has no room for digests: `Resources.manifest` reserves it.
            UsageError: the manifest would be part of the output, or is one of the source's files.
            CheckpointError: as `execute`, or the manifest cannot be written.
        """
        from ckpttools.run.executor import execute

        def refuse(location: Location) -> None:
            check_replaced()
            self._check_replaced(location)

        run = partial(
            execute,
            self.plan,
            self.writer,
            parse(destination, is_written=True),
            overwrite=overwrite,
            check_replaced=refuse,
            check_published=self._check_published,
            observe=observe,
            command=command,
            planned=planned,
        )
        with use_concurrency(self.requests):
            if manifest is None:
                return run(finalize=finalize)
            from ckpttools.api.output_file import check_manifest
            from ckpttools.digest.watching import run_hashing

            source = self.plan.tree.metadata.location
            check_manifest(parse(manifest), source, parse(destination), overwrite=overwrite)
            return run_hashing(self.plan, run, parse(manifest), overwrite=overwrite)

    def check(self, destination: LocationLike, *, overwrite: bool = False, planned: str = "") -> None:
        """Raise the error that would stop `run` before it writes; `planned` is its fingerprint, if known."""
        from ckpttools.run.executor import check

        location = parse(destination, is_written=True)
        check(self.plan, self.writer, location, overwrite, self._check_replaced, planned)

    def _check_published(self, destination: Location) -> None:
        """Check the published checkpoint before the one that it replaces is deleted.

        Raises:
            CheckpointError: it cannot be opened, or has other arrays than planned.
        """
        from ckpttools.formats.registry import open_tree

        published = open_tree(destination)
        refuse_incomplete(published.arrays.values(), str(destination))
        if len(published.arrays) != len(self.plan.tree.arrays):
            raise StorageError(
                f"{destination} is not the checkpoint that was written",
                got=plural(len(published.arrays), "array"),
                expected=plural(len(self.plan.tree.arrays), "array"),
            )

    def _check_replaced(self, destination: Location) -> None:
        from ckpttools.api.overwrite_guard import check_replaceable

        check_replaceable(destination, self.plan.tree, self.writer)
