"""Execute a load plan: read, exchange, and put arrays on devices."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import jax

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CoverageError, LostValuesWarning, listing
from ckpttools.sharding.assignments import Assignment, Batches
from ckpttools.sharding.exchange import broadcast_parts, exchange_parts
from ckpttools.sharding.load_plan import LoadPlan, Route, group_routes, join_reads
from ckpttools.sharding.load_request import Request
from ckpttools.sharding.processes import Processes, is_spread
from ckpttools.sharding.scatter import Parts, ReadResources, read_parts

# Interval at which each process reports its progress to process 0.
_REPORT_SECONDS = 5.0
_TOPIC = "progress"


@dataclass(frozen=True, slots=True)
class ProcessProgress:
    """The progress of one process.

    Attributes:
        process: Index of the process.
        nbytes: Total bytes to produce.
        bytes_done: Bytes produced so far.
        bytes_per_second: Average rate since the start.
    """

    process: int
    nbytes: int
    bytes_done: int
    bytes_per_second: float


@dataclass(frozen=True, slots=True, repr=False)
class JobProgress:
    """The last reported progress of all processes that load together.

    Attributes:
        count: Number of processes.
        processes: Progress of the processes that have reported.
        waiting_for: The process for which process 0 waits, and therefore every process that has read its
            share; None if no process waits.
    """

    count: int
    processes: tuple[ProcessProgress, ...]
    waiting_for: int | None = None

    def __repr__(self) -> str:
        done = sum(process.bytes_done for process in self.processes)
        nbytes = sum(process.nbytes for process in self.processes)
        rate = sum(process.bytes_per_second for process in self.processes)
        on_wait = "" if self.waiting_for is None else f", waiting for process {self.waiting_for}"
        last = min(
            self.processes, key=lambda process: process.bytes_done / max(1, process.nbytes), default=None
        )
        slowest = f", process {last.process} is last" if last and len(self.processes) > 1 else ""
        share = f"{100 * done // max(1, nbytes)}% of {nbytes:,} bytes, {rate:,.0f} bytes/s"
        return f"<JobProgress of {self.count:,} processes: {share}{slowest}{on_wait}>"


@dataclass
class ProgressReporter:
    """Reporter of this process's progress. Process 0 also passes on the progress of all processes.

    Attributes:
        processes: All processes.
        nbytes: Total bytes of this process.
        report: Called regularly in process 0.
    """

    processes: Processes
    nbytes: int
    report: Callable[[JobProgress], None]
    done: int = 0
    start_time: float = field(default_factory=time.monotonic)
    last_report: float = 0.0

    def add(self, nbytes: int) -> None:
        """Add bytes to this process's progress."""
        self.done += nbytes
        if time.monotonic() - self.last_report >= _REPORT_SECONDS or self.done == self.nbytes:
            self.publish()

    def publish(self, waiting_for: int | None = None) -> None:
        """Report the progress now."""
        self.last_report = time.monotonic()
        rate = self.done / max(1e-9, self.last_report - self.start_time)
        self.processes.set_status(_TOPIC, f"{self.nbytes} {self.done} {rate:.0f}")
        if self.processes.number == 0:
            statuses = sorted(self.processes.statuses(_TOPIC).items())
            result = [ProcessProgress(number, *map(int, text.split())) for number, text in statuses]
            self.report(JobProgress(self.processes.count, tuple(result), waiting_for))

    def on_wait(self, topic: str) -> None:
        """Report in process 0 that it waits for another process, whose index ends the topic."""
        number = topic.rpartition("/")[2]
        if self.processes.number == 0 and number.isdigit():
            self.publish(int(number))


def execute_load(
    expected: Request,
    plan: LoadPlan,
    *,
    jobs: int | None,
    observe: Callable[[int], None],
    observe_job: Callable[[JobProgress], None] | None = None,
) -> Any:
    """Read all arrays of a request.

    Args:
        expected: The request.
        plan: The plan of the request.
        jobs: Maximum number of workers.
        observe: Called with the number of bytes that were loaded.
        observe_job: Called regularly in process 0, with the progress of all processes.

    Returns:
        The caller's tree, built by the request.

    Raises:
        CheckpointError: An array cannot be read.
    """
    processes = _agreed_processes(plan)
    if processes is not None and observe_job is not None:
        processes, observe = _with_progress(processes, plan.bytes_in_memory, observe, observe_job)
    shared = deque(route.leaf.name for route in plan.routes if route.way != "direct")
    values: dict[int, Any] = {}
    lost: dict[str, Counter[str]] = {}

    def record_lost(name: str, counts: Mapping[str, float]) -> None:
        lost.setdefault(name, Counter()).update(counts)

    reading = ReadResources(plan.memory, jobs, plan.staging, observe, record_lost)
    in_flight: list[jax.Array] = []
    for group in group_routes(plan.routes, plan.staging // 2):
        result = _parts(group, reading)
        if processes is not None and shared:
            result = _synchronize_reads(result, group, shared, processes)
        built = list(_arrays(group, result))
        # The previous group's staging memory is free now, or will be before more is staged.
        _wait_for(in_flight)
        in_flight = [array for route, array in built if not route.is_in_place]
        values.update({id(route.leaf): _wrap_keys(array, route.leaf) for route, array in built})
    _wait_for(in_flight)
    for leaf in expected.arrays:
        if leaf.number is not None:
            values[id(leaf)] = _number(leaf, leaf.number)
    _warn_lost_values(lost)
    return expected.fill([values[id(leaf)] for leaf in expected.arrays])


def _number(leaf: Assignment, kind: type) -> Any:
    """Return a Python number that equals the stored value exactly."""
    stored = leaf.array.read().reshape(()).item()
    value = kind(stored)
    if isinstance(stored, int) and value != stored:
        raise CoverageError(f"{leaf.name}: {stored} cannot be a {kind.__name__} exactly", expected="an int")
    return value


def _agreed_processes(plan: LoadPlan) -> Processes | None:
    """Return all processes after checking that their plans agree. Returns None if this process loads alone.

    Raises:
        OtherProcessError: Their plans differ.
    """
    # Arrays on the devices of a single process need no other process.
    spread = [route for route in plan.routes if is_spread(route.leaf.target.sharding)]
    if plan.processes == 1 or not spread:
        return None
    processes = Processes.of_job("load")
    declared = repr([(route.leaf.name, route.way, route.leaf.target.shape) for route in spread])
    processes.check_same("plan of the load", hashlib.sha256(declared.encode()).hexdigest())
    return processes


def _with_progress(
    processes: Processes,
    total: int,
    observe: Callable[[int], None],
    observe_job: Callable[[JobProgress], None],
) -> tuple[Processes, Callable[[int], None]]:
    """Return the processes and observer, extended to report progress."""
    reporter = ProgressReporter(processes, total, observe_job)
    reporter.publish()

    def both(nbytes: int) -> None:
        observe(nbytes)
        reporter.add(nbytes)

    return replace(processes, on_wait=reporter.on_wait), both


def _warn_lost_values(lost: Mapping[str, Mapping[str, float]]) -> None:
    """Warn about values that changed in a cast; docs/transforms.md explains the terms."""
    lines = [
        f"{name}: {', '.join(f'{count:,} {loss}' for loss, count in counts.items())}"
        for name, counts in lost.items()
    ]
    if lines:
        text = f"values that the new dtype cannot represent:{listing(lines)}"
        warnings.warn(text, LostValuesWarning, stacklevel=2)


def _wait_for(arrays: list[jax.Array]) -> None:
    for array in arrays:
        array.block_until_ready()


def _arrays(
    routes: Sequence[Route], result: Iterator[tuple[int, Parts]]
) -> Iterator[tuple[Route, jax.Array]]:
    """Yield arrays as they are read. Arrays that need all processes come in the order of the routes."""
    batches = Batches()
    for number, parts in result:
        route = routes[number]
        if route.way == "direct":
            yield from (
                (routes[done], array) for done, array in batches.add(number, route.leaf.target, parts)
            )
        else:
            yield route, _assemble(route, parts)
    yield from ((routes[done], array) for done, array in batches.flush())


def _synchronize_reads(
    result: Iterator[tuple[int, Parts]], routes: Sequence[Route], shared: deque[str], processes: Processes
) -> Iterator[tuple[int, Parts]]:
    """Before each exchange, wait until all processes have read the array, or all know which one failed.

    Args:
        result: Route indices, with their parts.
        routes: Routes by index.
        shared: Names of all arrays that will be exchanged, in order; consumed in the process.
        processes: All processes.
    """
    while True:
        try:
            number, parts = next(result)
        except StopIteration:
            return
        except BaseException as error:
            if shared:
                processes.check_all(f"read {shared.popleft()}", error)
            raise
        if routes[number].way != "direct":
            processes.check_all(f"read {shared.popleft()}", None)
        yield number, parts


def _parts(routes: Sequence[Route], reading: ReadResources) -> Iterator[tuple[int, Parts]]:
    """Yield the parts of each route, with its index."""
    result = join_reads(routes)
    for number, parts in reorder(read_parts([item.local for item in result], reading)):
        yield from result[number].split(parts)


def _assemble(route: Route, parts: Parts) -> jax.Array:
    """Assemble an array from the parts that all processes have read."""
    if route.read is not None:
        return exchange_parts(parts, route.read, route.leaf.target)
    return broadcast_parts(parts, route.leaf.target)


def reorder(built: Iterable[tuple[int, Parts]]) -> Iterator[tuple[int, Parts]]:
    """Yield the items in the order of their indices, starting from 0."""
    waiting: dict[int, Parts] = {}
    following = 0
    for number, parts in built:
        waiting[number] = parts
        while following in waiting:
            yield following, waiting.pop(following)
            following += 1


def _wrap_keys(array: jax.Array, leaf: Assignment) -> jax.Array:
    """Convert key data to PRNG keys; return other arrays unchanged."""
    return array if leaf.key_impl is None else jax.random.wrap_key_data(array, impl=leaf.key_impl)
