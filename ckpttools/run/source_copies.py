"""Whether all tasks of a plan read the same model, where hosts have copies of it.

Each process notes which copy it reads (`copy_of`), and parts of a plan also note a digest of what each task
made (`digest_of`). Whoever publishes does every task of another copy once more from its own, and compares.
A few bytes of each file, or all bytes of some, cannot show that two copies are equal: what a task made of one
copy is known to be right only if the same task was done with the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from ckpttools.array.scratch import Scratch
from ckpttools.array.tree import keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.text import plural
from ckpttools.plan.plan import Plan
from ckpttools.run.entries import FinishedTask
from ckpttools.run.run_task import digest_of, task_values
from ckpttools.stores.abilities import DistinguishesCopies
from ckpttools.stores.at_once import in_threads
from ckpttools.stores.base import File
from ckpttools.stores.place import Place
from ckpttools.stores.registry import parse
from ckpttools.stores.shares import this_process


class MixedCopiesError(FormatError):
    """Tasks of one checkpoint read different models."""


@dataclass(frozen=True, slots=True)
class SourceCopy:
    """The copy of a model that a process reads.

    Attributes:
        identity: equal only for processes that read the same files; "" where no file is read.
        process: that reads it, in words, with its host.
    """

    identity: str
    process: str


FROM_NO_FILE = SourceCopy("", "")
"""Of arrays that lie in memory."""


def copy_of(files: Iterable[tuple[str, str]]) -> SourceCopy:
    """The copy that this process reads.

    Args:
        files: path and version of each file of the source. The version is used in stores whose versions
            tell contents apart.

    Raises:
        StorageError: a file cannot be looked at.
    """
    import xxhash

    said = sorted((path, _identity(parse(path), version)) for path, version in set(files))
    if not said:
        return FROM_NO_FILE
    return SourceCopy(xxhash.xxh3_128_hexdigest(repr(said).encode()), this_process())


def copy_read(plan: Plan) -> SourceCopy:
    """The copy that a plan was made of in this process; errors as `copy_of`."""
    files = (each for each in plan.sources if isinstance(each, File))
    return copy_of((str(parse(each.path).absolute()), each.version) for each in files)


def _identity(place: Place, version: str) -> str:
    store = place.store
    return store.copy_identity(place.key) if isinstance(store, DistinguishesCopies) else version


def of_same_copy(done: Iterable[FinishedTask], copy: SourceCopy) -> list[FinishedTask]:
    """The finished tasks that read this copy, or that can be compared with it (`check_same_model`)."""
    return [entry for entry in done if entry.digest or entry.copy == copy.identity]


def check_same_model(
    plan: Plan,
    done: Iterable[FinishedTask],
    copy: SourceCopy,
    content: Place,
    observe: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Does finished tasks of other copies once more from this one, and compares what comes of them.

    Args:
        plan: all of it.
        done: its finished tasks. Those without a digest are not compared.
        copy: that this process reads.
        content: where the checkpoint grows, for messages.
        observe: called with the bytes compared so far, and with all that will be.

    Raises:
        MixedCopiesError: a task made something else. Names the arrays, and the processes that did the tasks.
        CheckpointError: the source cannot be read.
    """
    others = [entry for entry in done if entry.digest and entry.copy != copy.identity]
    if not others:
        return
    total = sum(plan.tasks[entry.task].bytes_out for entry in others)
    lock, compared = threading.Lock(), 0

    def differing(entries: Sequence[FinishedTask]) -> list[FinishedTask]:
        nonlocal compared
        buffer, scratch = Scratch(plan.buffer_bytes), Scratch(plan.scratch_bytes)
        found = []
        for entry in entries:
            task = plan.tasks[entry.task]
            with task_values(plan, task, buffer, scratch) as (memory, _):
                if digest_of(memory) != entry.digest:
                    found.append(entry)
            with lock:
                compared += task.bytes_out
                observe(compared, total)
        return found

    jobs = min(plan.jobs, len(others))
    observe(0, total)
    results = in_threads(jobs, differing, [others[first::jobs] for first in range(jobs)])
    if wrong := sorted((entry for each in results for entry in each), key=lambda entry: entry.task):
        raise _mixed(plan, wrong, len(others), copy, content)


def _mixed(
    plan: Plan, wrong: Sequence[FinishedTask], count: int, copy: SourceCopy, content: Place
) -> MixedCopiesError:
    arrays = dict.fromkeys((keystr(plan.tasks[entry.task].path), entry.process) for entry in wrong)
    listed = listing([f"{name}: {process}" for name, process in arrays], folds=False)
    source = plan.tree.metadata.place or "the source"
    # In a bucket the checkpoint grows under its final name, next to the journal.
    work = content.parent if content.store.streams is None else content.with_name(f"{content.name}.partial")
    return MixedCopiesError(
        f"parts read different copies of the model: {len(wrong)} of {plural(count, 'task')} differ:{listed}",
        place=work,
        got=f"other values than {copy.process} reads from {source}",
        wanted="the same values in all copies",
        hint=f"find the wrong copy: run `ckpt hash {source}` on each host. If it is the one of this host, "
        f"publish on another host. If a part read it, replace it, discard the parts as `ckpt doctor {work}` "
        "explains, and run all parts again",
    )
