"""Write a tree in any format, with its model files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from inspect import Parameter, signature
from typing import Any, Literal

from ckpttools.api.options import WRITING_OPTIONS
from ckpttools.api.prepared import Prepared, Resources, WriteRequest, Writing, command
from ckpttools.api.sources import Size, part_of, rest_of
from ckpttools.api.tree_plan import plan_tree
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.options import declare, parse_size_option
from ckpttools.formats.registry import writer_for, writer_options
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.plan.plan import Plan
from ckpttools.run.events import Receipt
from ckpttools.sharding.distributed_save import DistributedSave, check_chunk_owners
from ckpttools.sharding.processes import Processes
from ckpttools.sharding.save_background import Saving, refuse_concurrent_save, start
from ckpttools.sharding.save_layout import OwnedWriter, keep_shardings
from ckpttools.sharding.save_leaves import copy_holders, holders, is_shared, tree_from_pytree
from ckpttools.sharding.save_shards import ShardHolder
from ckpttools.stores.registry import LocationLike, parse


@validate_arguments
def plan_save(
    tree: Tree | Any,
    format: str | None = None,
    *,
    resources: Resources | None = None,
    destination: LocationLike | None = None,
    keep_sharding: bool = False,
    **options: Any,
) -> Prepared:
    """Plan a `save` with these arguments; `run(destination)` of the result writes it."""
    location = None if destination is None else parse(destination, is_written=True)
    resources = replace(resources or Resources(), destination=location)
    tree, format = _as_tree(tree, None), _format(tree, format)
    writer = writer_for(tree, format, location, **options)
    if keep_sharding:
        writer = keep_shardings(writer, tree)
    if is_shared(tree):
        writer = OwnedWriter(writer, location.store.streams if location else None)
    return plan_tree(tree, writer, resources)


def _save_distributed(plan: Callable[..., PreparedSave], *args: Any, **options: Any) -> Receipt:
    """Plan and write, together with the other processes that have parts of the arrays."""
    processes = _processes_of(args[0] if args else options.get("tree"))

    def checked() -> PreparedSave:
        prepared = plan(*args, **options)
        refuse_concurrent_save(prepared.destination)
        if processes is not None:
            prepared.check_for(processes)
        return prepared

    if processes is None:
        return checked().run()
    return processes.run_in_all("planned", checked).together(processes).run()


@command(Writing, more=lambda: [*writer_options(), *_model_options()], carry_out=_save_distributed)
@declare(*WRITING_OPTIONS)
def save(
    tree: Tree | Any,
    destination: LocationLike,
    format: str | None = None,
    *,
    to: Literal["hf", "maxtext"] | None = None,
    model: LocationLike | None = None,
    custom: Mapping[str, Any] | None = None,
    keep_sharding: bool = False,
    **options: Any,
) -> PreparedSave:
    """Write an opened tree, or arrays in memory, to `destination`.

    JAX arrays may be sharded in any way. Each shard is read piece by piece from one of the devices that have
    it, so that no array is gathered on the host.

    Args:
        tree: A `Tree`, or any pytree (dictionaries, lists, Flax states and modules, optax states) of JAX and
            numpy arrays, lazy arrays, numbers and strings. Plans can also be made from
            `jax.ShapeDtypeStruct`s.
        destination: The directory to create. It appears only when everything is written.
        format: A writable format (see `ckpt formats`); None for the format from which the tree was read, and
            "orbax" for arrays in memory.
        to: Conversion to apply: "hf" writes MaxText parameters with Hugging Face names and layout, "maxtext"
            does the reverse; None writes the tree unchanged.
        model: With `to`, the model's directory or its `config.json`.
        custom: User metadata, for arrays in memory.
        keep_sharding: Whether to store JAX arrays with their sharding, in chunks that each belong to one
            shard, so that Orbax restores them as JAX arrays by default (only on the same number of devices).
            Only Orbax supports this.
        options: Options of the format, as in `ckpttools.convert`; with `to`, those of
            `ckpttools.maxtext_to_hf` or `ckpttools.hf_to_maxtext`.

    Raises:
        UsageError: The tree contains a value that is not an array, or arguments contradict each other.
        LockedError: Another save to this destination is in progress.
        CheckpointError: The format cannot represent the tree, the work does not fit into the memory, or
            reading or writing fails.
    """
    result = _as_tree(tree, custom)
    if keep_sharding and to is not None:
        raise UsageError(
            f"{option('keep_sharding')} applies only to arrays that are written as they are",
            hint=f"leave out {option('keep_sharding')} or {option('to')}",
        )
    if to is not None:
        return PreparedSave.of(_conversion(result, destination, format, to, model, options))
    if model is not None:
        raise UsageError(
            f"{option('model')} applies only to conversions", hint='also pass to="hf" or to="maxtext"'
        )
    with WriteRequest(result, destination, **part_of(options, Writing)) as request:
        prepared = plan_save(
            result,
            _format(tree, format),
            resources=request.resources,
            destination=destination,
            keep_sharding=keep_sharding,
            **rest_of(options, Writing),
        )
        return PreparedSave.of(request.complete(prepared))


@validate_arguments
def save_async(
    tree: Tree | Any,
    destination: LocationLike,
    format: str | None = None,
    *,
    host_memory: Size | None = None,
    **options: Any,
) -> Saving:
    """Copy the arrays to the host, return, and write them in the background.

    After the call, the arrays may be donated, deleted or, if they are numpy arrays, modified. When the
    process ends, it waits for saves in progress.

    Args:
        tree, destination, format, options: See `save`.
        host_memory: Limit in bytes for copies of arrays, including those of other saves in progress. All data
            that this process saves is copied; `memory` is needed in addition. None for half of the available
            memory.

    Returns:
        The save in progress. Its `wait()` returns the receipt or raises the error.

    Raises:
        LockedError: Another save to this destination is in progress.
        MemoryBudgetError: The copies would take more than `host_memory`.
        CheckpointError: An error that can be detected before anything is written; see `save`.
    """
    processes = _processes_of(tree)

    def plan() -> tuple[PreparedSave, int | None]:
        prepared = save.plan(tree, destination, format, **options)
        prepared.check_for(processes)
        return prepared, None if host_memory is None else parse_size_option("host_memory", host_memory)

    prepared, allowed = plan() if processes is None else processes.run_in_all("planned", plan)
    distributed = None if processes is None else prepared.together(processes)
    run = prepared.run if distributed is None else distributed.run
    try:
        return start(prepared.destination, holders(prepared.plan.tree), run, allowed)
    except BaseException as error:
        if distributed is not None:
            distributed.abort(error)
        raise


def _processes_of(tree: Tree | Any) -> Processes | None:
    """Start a save in all processes that have parts of a tree; None if this process has all parts.

    The save starts before any process can fail, so that a message about one save is not mistaken for a
    message about the next.
    """
    return Processes.of_job() if is_shared(tree) else None


@dataclass(frozen=True, slots=True, repr=False)
class PreparedSave(Prepared):
    """A `Prepared` whose arrays may be in memory."""

    @classmethod
    def of(cls, prepared: Prepared) -> PreparedSave:
        """Convert a `Prepared` to a prepared save."""
        return cls(*(getattr(prepared, field.name) for field in fields(prepared)))

    def check(self, planned: str = "") -> None:
        """Raise the error that would stop `run` before it writes; see `Prepared.check` for `planned`."""
        self._check_held()
        Prepared.check(self, planned)

    def check_for(self, processes: Processes | None) -> None:
        """Check the complete save in process 0, and only this process's arrays in the others.

        Raises:
            UsageError: An array has no elements, or these processes cannot save together.
            SourceChangedError: JAX has deleted an array.
        """
        if processes is None:
            self.check()
            return
        self._check_distributed()
        if processes.number == 0:
            Prepared.check(self)

    def execute(
        self,
        planned: str = "",
        check_replaced: Callable[[], None] = lambda: None,
        finalize: Callable[[], None] = lambda: None,
    ) -> Receipt:
        """Run the save; see `Prepared.execute` for arguments and errors.

        Raises:
            UsageError: An array has no elements, or these processes cannot save together.
            SourceChangedError: JAX has deleted an array.
        """
        if planned:  # Only the last steps remain, which read no arrays.
            return Prepared.execute(self, planned, check_replaced, finalize)
        processes = _processes_of(self.plan.tree)
        for holder in holders(self.plan.tree):
            if isinstance(holder, ShardHolder):
                holder.refresh_version()
        if processes is None:
            self._check_held()
            return Prepared.execute(self, planned, check_replaced, finalize)
        processes.run_in_all("planned", self._check_distributed)
        return self.together(processes).run()

    def together(self, processes: Processes) -> DistributedSave:
        """Return the same save, shared with the other processes, which must all have planned it."""
        return DistributedSave(
            self.plan,
            self.writer,
            self.destination,
            self.options.overwrite,
            self.options.observe,
            lambda: Prepared.check(self),
            self._publish,
            processes,
        )

    def _check_distributed(self) -> None:
        self._check_held()
        check_chunk_owners(self.plan)
        if self.options.manifest is not None:
            raise UsageError(
                f"{option('manifest')} is written by one process, and none sees all arrays",
                hint="hash the saved checkpoint: ckpttools.hash(destination, manifest=…)",
            )

    def _publish(self, plan: Plan, planned: str) -> Receipt:
        """Publish when all processes have finished their tasks."""
        return replace(self, plan=plan).execute(planned)

    def _check_held(self) -> None:
        for holder in holders(self.plan.tree):
            holder.check()


def _as_tree(tree: Any, custom: Mapping[str, Any] | None) -> Tree:
    """Return a tree unchanged; convert a pytree to a tree."""
    if not isinstance(tree, Tree):
        return copy_holders(tree_from_pytree(tree, custom))
    if custom is not None:
        raise UsageError(
            f"{option('custom')} applies only to arrays in memory",
            hint="a tree has its own: tree.with_metadata(custom=…)",
        )
    return copy_holders(tree)


def _format(tree: Any, format: str | None) -> str | None:
    return format if isinstance(tree, Tree) else format or "orbax"


def _conversion(
    tree: Tree,
    destination: LocationLike,
    format: str | None,
    to: str,
    model: LocationLike | None,
    options: Mapping[str, Any],
) -> Prepared:
    """Plan the conversion to the names and layout of the other framework."""
    expected = {"hf": "safetensors", "maxtext": "orbax"}
    if to not in expected:
        raise UsageError(f"cannot convert to {to!r}", expected='"hf" or "maxtext"')
    if format not in (None, expected[to]):
        raise UsageError(
            f"{option('to', to)} is written as {expected[to]}",
            got=f"format {format}",
            hint=f"leave out {option('format')}, or save without {option('to')}",
        )
    from ckpttools.api.hf_to_maxtext import hf_to_maxtext
    from ckpttools.api.maxtext_to_hf import maxtext_to_hf

    if "like" in options:
        raise UsageError(f"{option('like')} is called {option('model')} here", hint="pass model= instead")
    if to == "hf":
        return maxtext_to_hf.plan(tree, destination, like=model, **options)
    if model is not None:
        files = ModelFiles.of(tree, model)
        tree = tree.with_metadata(config=files.config)
    return hf_to_maxtext.plan(tree, destination, **options)


def _model_options() -> Iterator[Parameter]:
    """Yield the parameters of the model conversions."""
    from ckpttools.api.hf_to_maxtext import hf_to_maxtext
    from ckpttools.api.maxtext_to_hf import maxtext_to_hf

    for call in (maxtext_to_hf, hf_to_maxtext):
        yield from signature(call).parameters.values()
