"""Assemble a checkpoint from the parts of several hosts: emergency, multi-tier and peer-to-peer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack

from ckpttools.api.convert import ChangedRun
from ckpttools.api.options import MAX_INDEX_BYTES, READING, REQUESTS, WRITING_OPTIONS
from ckpttools.api.options.convert import TARGET
from ckpttools.api.options.runs import ASSEMBLE
from ckpttools.api.prepared import Prepared, WriteRequest, Writing, command
from ckpttools.api.sources import Opening, Size, part_of, read_options
from ckpttools.api.tree_plan import plan_tree
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, UsageError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.core.notes import Notes
from ckpttools.core.options import declare, parse_size_option
from ckpttools.core.text import first_names, natural_key, plural, sample_names, sort_naturally
from ckpttools.formats.orbax.format import join_tree
from ckpttools.formats.orbax.joined import (
    ReplicaComparison,
    compare_replicas,
    has_many,
    keys_alone,
    losers,
    refuse_mixed,
    unlike,
)
from ckpttools.formats.orbax.naming import ITEM as TREE_ITEM
from ckpttools.formats.orbax.saves import (
    ITEM,
    MAX_SAVE_SPREAD_SECONDS,
    HostShare,
    Save,
    UnsavedChunks,
    iterators_of,
    newest_complete,
    saves_of,
    shares_of,
)
from ckpttools.formats.orbax.sharding import ExpectedHost, expected_hosts
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.formats.registry import writer_for, writer_options
from ckpttools.maxtext.versions import SCAN_LAYERS, STEPS
from ckpttools.maxtext.view import view_of
from ckpttools.run.overlap_check import check_no_overlap
from ckpttools.stores.concurrency import map_concurrently, use_concurrency
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

_MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class SaveListing:
    """The parts of one saved step in the directories of hosts.

    Attributes:
        step: Step number.
        started_at: Start of the save, in seconds since 1970; None if unknown.
        hosts: Directories of the hosts with parts of the step, ordered by name.
        processes: Distributed IDs of the processes whose chunks each host has; () if unknown.
        chunks: Number of distinct chunks; `num_duplicates` of them are on several hosts.
        missing: Chunks that are not on any host.
        expected: Hosts that should have the missing chunks; () if the save is complete, None if unknown.
    """

    step: int
    started_at: float | None
    hosts: tuple[Location, ...]
    processes: tuple[tuple[int, ...], ...]
    chunks: int
    num_duplicates: int
    missing: tuple[UnsavedChunks, ...]
    expected: tuple[ExpectedHost, ...] | None

    @property
    def is_complete(self) -> bool:
        """Return whether a checkpoint can be assembled from the save."""
        return not self.missing


@dataclass(frozen=True, repr=False)
class HostsListing:
    """The saves in the directories of several hosts.

    Attributes:
        saves: The saves, newest first.
        unusable: Reason why each unusable step directory is unusable.
        missing_files: Data files that are missing or truncated; other hosts are searched for their chunks.
    """

    saves: tuple[SaveListing, ...]
    unusable: dict[str, str]
    missing_files: tuple[str, ...]

    def __repr__(self) -> str:
        newest = "none is complete" if self.newest is None else f"step {self.newest.step} is complete"
        return f"<HostsListing of {plural(len(self.saves), 'save')}: {newest}>"

    @property
    def newest(self) -> SaveListing | None:
        """Return the newest complete save."""
        return next((save for save in self.saves if save.is_complete), None)


def host_text(host: Location, processes: Sequence[int]) -> str:
    """Return a host's directory and the processes whose chunks it has."""
    if not processes:
        return str(host)
    return f"{host} ({'process' if len(processes) == 1 else 'processes'} {', '.join(map(str, processes))})"


@validate_arguments
@declare(REQUESTS, MAX_INDEX_BYTES)
def list_saves(
    hosts: LocationLike | Sequence[LocationLike],
    *,
    requests: int | None = None,
    max_index_bytes: Size = "256MiB",
) -> HostsListing:
    """List the steps in the directories of several hosts, and their missing chunks. Reads only indexes.

    Args:
        hosts: Directories of hosts, of steps in them, or directories that contain several of them.

    Raises:
        FormatError: The directories do not contain parts of a checkpoint.
        CheckpointError: A location does not exist or cannot be read.
    """
    with use_concurrency(requests):
        shares = _shares(_locations(hosts), parse_size_option("max_index_bytes", max_index_bytes))
        faults = {str(share.step.path): share.fault for share in shares if share.fault is not None}
        saves = tuple(_list_save(save) for save in saves_of(shares))
        lost = tuple(item for share in shares if share.fault is None for item in share.lost)
        return HostsListing(saves, faults, lost)


def _list_save(save: Save) -> SaveListing:
    documents = sum(document is not None for _, document in save.arrays.values())
    by_name = _sorted_shares(save)
    return SaveListing(
        save.step,
        save.began,
        tuple(share.host for share in by_name),
        tuple(share.processes for share in by_name),
        len(save.owners) - documents,
        len(save.twins),
        save.missing,
        expected_hosts(save) if save.missing else (),
    )


def _sorted_shares(save: Save) -> list[HostShare]:
    """Return the shares of a save, ordered by the names of their hosts."""
    return sorted(save.shares, key=lambda share: natural_key(str(share.host)))


@command(ChangedRun, more=writer_options)
@declare(*ASSEMBLE, *TARGET, *READING, *WRITING_OPTIONS)
def assemble(
    hosts: LocationLike | Sequence[LocationLike],
    destination: LocationLike,
    *,
    prefer: LocationLike | Sequence[LocationLike] = (),
    comparing: Callable[[int], None] = lambda nbytes: None,
    **common: Unpack[ChangedRun],
) -> Prepared:
    """Assemble one checkpoint from the newest complete step on several hosts.

    Chunks that several hosts have are compared byte for byte during planning. Where possible, the output
    shares chunks with the hosts' files by hard links.

    Args:
        hosts: Directories of hosts, of steps in them, or directories that contain several of them.
        destination: The directory to create: a run with one step. It appears only when everything is written.
        comparing: Called with numbers of bytes while chunks are compared, from several threads.

    Raises:
        FormatError: No step is complete, or chunks that several hosts have differ.
        UsageError: The step or host does not exist.
        CheckpointError: See `ckpttools.convert`.
    """
    opening, writing = part_of(common, Opening), part_of(common, Writing)
    rest = {name: value for name, value in common.items() if name not in {**opening, **writing}}
    item_options: dict[str, Any] = {"item": TREE_ITEM, **rest}
    read, locations, preferred = read_options(opening), _locations(hosts), _locations(prefer)
    with use_concurrency(writing.get("requests")):
        shares = _shares(locations, read.max_index_bytes)
        save = _newest_complete_save(shares, read.step).prefer_hosts(preferred)
        _refuse_unnamed(save)
        if read.step is None:
            _refuse_separate_runs(save, shares)
        for share in save.shares:
            check_no_overlap(share.host, parse(destination))
        comparison = _compare_shared_chunks(save, preferred, comparing)
        iterators = iterators_of(save)
    damage = Notes(remarks=tuple(_damage_remarks(save, shares, None if read.step is None else save.step)))
    notes = damage + _notes(save, comparison, has_iterators=iterators is not None)
    tree = _tree(save, locations[0], notes)

    with WriteRequest(tree, destination, **writing) as request:
        writer = writer_for(
            tree, destination=parse(destination), keeps_names=False, shares=True, **item_options
        )
        if isinstance(writer, OrbaxWriter) and iterators is not None:
            writer = replace(writer, beside={ITEM: iterators})
        return request.complete(plan_tree(tree, writer, request.resources))


def _locations(where: LocationLike | Sequence[LocationLike]) -> list[Location]:
    named: Iterable[LocationLike] = where if isinstance(where, list | tuple) else [where]  # type: ignore[list-item]
    return [parse(item) for item in named]


def _shares(hosts: Sequence[Location], max_index_bytes: int) -> list[HostShare]:
    """Return the shares of all hosts without duplicates, checking that each is usable."""
    if not hosts:
        raise UsageError("no host directory is given")
    result = {share.item.resolve(): share for host in hosts for share in shares_of(host, max_index_bytes)}
    if not result:
        raise FormatError(
            "no steps of a host found",
            location=", ".join(map(str, hosts)),
            expected="host directories with STEP/state, or a directory that contains several of them",
            hint=f"{action('summary', 'PATH')} identifies a path",
        )
    map_concurrently(hosts[0].store, lambda share: share.fault, result.values())
    return list(result.values())


def _newest_complete_save(shares: Sequence[HostShare], step: int | None) -> Save:
    """Select the newest complete save, or that of a given step.

    Raises:
        UsageError: The step does not exist.
        FormatError: None of the saves is complete.
    """
    saves = saves_of(shares)
    if step is not None and step not in {save.step for save in saves}:
        steps_text = ", ".join(map(str, sorted({save.step for save in saves})))
        raise UsageError(f"no host has step {step}", expected=f"one of {steps_text}" if steps_text else None)
    save = newest_complete(saves, step)
    if save is None:
        faults = [f"{share.step.path}: {share.fault}" for share in shares if share.fault is not None]
        raise FormatError(
            "no step is complete: none of these hosts has the missing chunks"
            + listing([*map(_describe_missing, saves), *faults]),
            expected="directories of enough hosts to cover every chunk",
            hint="add directories of more hosts, their copies in a bucket, or the persistent directory",
        )
    return save


def _refuse_separate_runs(save: Save, shares: Sequence[HostShare]) -> None:
    """Raise UsageError if one directory has the complete save, and others have other steps of its processes.

    Such directories are separate runs, and only one would be used. The processes of a host that is
    only late differ.
    """
    if len(save.shares) > 1:
        return
    (own,) = save.shares
    others = {
        str(share.host)
        for share in shares
        if share.fault is None and share.processes == own.processes != () and share.host != own.host
    }
    if others:
        raise UsageError(
            f"only one directory has step {save.step}; others have different steps of the same process",
            location=own.host,
            got=f"also {first_names(sort_naturally(others))}",
            expected="directories of the hosts of one job",
            hint=f"to assemble this step, add {option('step', save.step)}; to copy a run, "
            f"{action('copy', str(own.host), 'DST')}",
        )


def _refuse_unnamed(save: Save) -> None:
    if save.unnamed:
        raise FormatError(
            f"hosts have arrays of step {save.step} that its metadata does not name{listing(save.unnamed)}",
            location=save.shares[0].item,
            expected="the metadata of the tree that was saved",
            hint="leave out the directory of a host whose metadata is damaged, or choose another step",
        )


def _describe_missing(save: Save) -> str:
    missing = sum(item.num_missing for item in save.missing)
    expected = expected_hosts(save)
    more = ""
    if expected:
        ways = ", and ".join(" or ".join(map(str, item.processes)) for item in expected)
        more = f"; {plural(len(expected), 'more host')} would do: process {ways}"
    arrays = sample_names([str(item) for item in save.missing])
    lost, hosts = plural(missing, "chunk"), plural(len(save.shares), "host")
    return f"step {save.step}, of {hosts}: {lost} ({arrays}){more}"


def _compare_shared_chunks(
    save: Save, preferred: Sequence[Location], observe: Callable[[int], None]
) -> ReplicaComparison:
    """Compare the chunks that several hosts have.

    Raises:
        FormatError: Chunks differ, and no preferred host decides.
        UsageError: A preferred host has no share.
    """
    locations = {share.host.resolve() for share in save.shares}
    for host in preferred:
        if host.resolve() not in locations:
            hosts = ", ".join(str(share.host) for share in save.shares)
            raise UsageError(f"{host} has no chunks of step {save.step}", expected=f"one of {hosts}")
    result = compare_replicas(save, observe)
    names = {share.name for share in save.shares if share.host.resolve() in {p.resolve() for p in preferred}}
    open_ones = [
        disagreement
        for disagreement in result.disagreements
        if not names & {n for g in disagreement.groups for n in g}
    ]
    if open_ones:
        raise unlike(save, open_ones)
    refuse_mixed(save, result.disagreements)
    return result


def _damage_remarks(save: Save, shares: Sequence[HostShare], step: int | None) -> Iterator[str]:
    """Yield remarks about damaged parts, the source of their chunks, and newer steps that are not complete.

    Args:
        save: The save that is assembled, which is complete.
        shares: The shares of all steps.
        step: The step that the user chose; None for the newest complete one.
    """
    for share in sorted(shares, key=lambda item: natural_key(str(item.host))):
        if share.fault is not None and share.number == save.step:
            host = host_text(share.host, share.processes)
            yield f"{host} is left out: {share.step.path}: {share.fault}; the other hosts have all chunks"
    for share in _sorted_shares(save):
        if share.lost:
            lost = [key for key in share.index.all.keys() - share.entries.keys() if key in save.owners]
            hosts = sorted({str(save.shares[save.owners[key]].host) for key in lost}, key=natural_key)
            source = f"; {plural(len(lost), 'value')} come from {', '.join(hosts)}" if hosts else ""
            yield f"{host_text(share.host, share.processes)} is damaged: {'; '.join(share.lost)}{source}"
    for other in saves_of(shares) if step is None else []:
        if other.step > save.step:
            damaged = [f"{item.step.path}: {item.fault}" for item in shares if _is_damaged(item, other.step)]
            yield "; ".join((f"a newer step is not complete: {_describe_missing(other)}", *damaged))


def _is_damaged(share: HostShare, step: int) -> bool:
    return share.number == step and share.fault is not None


def _notes(save: Save, comparison: ReplicaComparison, *, has_iterators: bool) -> Notes:
    hosts = [host_text(share.host, share.processes) for share in _sorted_shares(save)[:_MAX_NAMED]]
    more = f" and {len(save.shares) - len(hosts):,} more" if len(save.shares) > len(hosts) else ""
    remarks = [f"step {save.step} of {plural(len(save.shares), 'host')}: {', '.join(hosts)}{more}"]
    if comparison.chunks:
        same = comparison.chunks - len(comparison.disagreements)
        remarks.append(f"{plural(same, 'value')} that several hosts have are identical")
    remarks += [
        f"{disagreement}; {save.shares[save.owners[disagreement.key]].host} was preferred"
        for disagreement in comparison.disagreements
    ]
    remarks += [*_wrong_host_remarks(save, comparison), *_kinship_remarks(save)]
    if not has_iterators:
        remarks.append("the position of the data iterator is unknown: these hosts did not save its state")
    return Notes(remarks=tuple(remarks))


def _kinship_remarks(save: Save) -> Iterator[str]:
    """Yield remarks if there is little evidence that the hosts belong to the same run."""
    start_times = [share.began for share in save.shares if share.began is not None]
    if start_times and max(start_times) - min(start_times) > MAX_SAVE_SPREAD_SECONDS:
        spread = f"{max(start_times) - min(start_times):.0f} s"
        yield f"hosts started this save up to {spread} apart: check that they belong to the same run"
    if len(save.shares) > 1 and not any(has_many(save, key) for key in save.twins):
        yield "no array that these hosts share shows that they belong to the same run"


def _wrong_host_remarks(save: Save, comparison: ReplicaComparison) -> Iterator[str]:
    """Yield remarks about chunks that exist only on hosts whose other data was rejected."""
    for number in sorted(
        {number for disagreement in comparison.disagreements for number in losers(save, disagreement)}
    ):
        if alone := keys_alone(save, number):
            host = save.shares[number].host
            yield f"{plural(len(alone), 'chunk')} that no other has are those of {host} all the same"


def _tree(save: Save, location: Location, notes: Notes) -> Tree:
    """Return the tree with the layer metadata that MaxText needs and such saves lack."""
    tree = join_tree(save, location)
    tree = tree.with_metadata(notes=notes + Notes(remarks=tuple(_step_counter_remarks(save, tree))))
    view = view_of(tree)
    if not view.is_maxtext or SCAN_LAYERS in tree.metadata.custom:
        return tree
    return tree.with_metadata(custom={**tree.metadata.custom, SCAN_LAYERS: view.is_stacked})


def _step_counter_remarks(save: Save, tree: Tree) -> Iterator[str]:
    """Yield a remark if the state's step counter contradicts its directory name.

    MaxText names a step after the last completed one, and its state counts the next.
    """
    for path in (path for path in STEPS if path in tree.arrays and not tree.arrays[path].shape):
        counted = int(tree.arrays[path].read())
        if counted not in (save.step, save.step + 1):
            steps = plural(counted, "step")
            yield f"the state has counted {steps}, but the directories are named {save.step}"
