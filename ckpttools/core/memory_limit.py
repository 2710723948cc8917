"""Memory limits that apply before a checkpoint is opened.

`ckpttools.plan` counts the memory of a plan, but the names of 100,000 arrays can exceed the limit before
there is a plan. Formats therefore call `check_memory` as soon as they know the number of arrays, before
they read the metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import MemoryBudgetError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.process_memory import current_bytes

# Memory of the interpreter, numpy and this package: 40 MiB are resident after planning (Linux, CPython 3.11,
# numpy 2.4). The rest is for imports of the command line and decoders, and for the allocator.
BASELINE_BYTES = 96 << 20
# Memory per array for opening, naming and planning: the minimum and maximum of all commands.
# Measured with 2,000 and with 12,000 arrays; docs/concepts.md has the figures.
_MIN_PER_ARRAY = 1 << 10
_MAX_PER_ARRAY = 3584
# Additional memory of a worker in the hint: buffers for any common chunk.
_WORKER_BYTES = 16 << 20
# The memory limit of commands that write.
DEFAULT_MEMORY = 1 << 30
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


@dataclass
class _MemoryLimit:
    """A command's memory limit, the memory its open checkpoints need, and the most arrays open at once."""

    memory: int
    needed: int = 0
    arrays: int = 0


_BUDGET: ContextVar[_MemoryLimit | None] = ContextVar("memory_limit", default=None)
_EXTRA_BYTES: ContextVar[int] = ContextVar("extra_bytes", default=0)


def baseline_bytes() -> int:
    """Return the number of bytes that are resident before anything is opened."""
    return BASELINE_BYTES + _EXTRA_BYTES.get()


@contextmanager
def extra_resident(nbytes: int) -> Iterator[None]:
    """Add to the baseline inside the `with`, for imports that only some commands need."""
    token = _EXTRA_BYTES.set(_EXTRA_BYTES.get() + nbytes)
    try:
        yield
    finally:
        _EXTRA_BYTES.reset(token)


@contextmanager
def limit_memory(memory: int) -> Iterator[None]:
    """Limit the memory of all checkpoints that are opened inside the `with`, together.

    A surrounding limit takes precedence, because it belongs to the complete command.
    """
    if _BUDGET.get() is not None:
        yield
        return
    token = _BUDGET.set(_MemoryLimit(memory))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def check_memory(arrays: int, nbytes: int, location: object) -> None:
    """Check that a checkpoint's metadata fits, before it is read.

    Args:
        arrays: Approximate number of arrays.
        nbytes: Memory for reading their metadata, in addition to the base cost of each array.
        location: Location of the checkpoint.

    Raises:
        MemoryBudgetError: The limit cannot be enough for any command.
    """
    allowed = _BUDGET.get()
    if allowed is None:
        return
    allowed.needed += arrays * _MIN_PER_ARRAY + nbytes
    allowed.arrays = max(allowed.arrays, arrays)
    comfortable = allowed.arrays * (_MAX_PER_ARRAY - _MIN_PER_ARRAY)
    if baseline_bytes() + allowed.needed > allowed.memory and allowed.needed > _WORKER_BYTES:
        raise memory_error(
            f"the names and locations of {arrays:,} arrays do not fit into the memory limit",
            allowed.memory,
            baseline_bytes() + allowed.needed + comfortable + _WORKER_BYTES,
            location,
        )


def check_resident(location: object) -> None:
    """Check resident memory while reading metadata that can decode to far more than its file size.

    Raises:
        MemoryBudgetError: Resident memory exceeds the command's limit.
    """
    allowed = _BUDGET.get()
    resident = None if allowed is None else current_bytes()
    if allowed is not None and resident is not None and resident > allowed.memory:
        raise memory_error(
            "the file's metadata does not fit into the memory limit", allowed.memory, 2 * resident, location
        )


def memory_error(message: str, memory: int, needed: int, location: object = None) -> MemoryBudgetError:
    """Return the error for a memory limit that is too small; `needed` bytes would be enough."""
    least = f"{-(-needed >> 20)}MiB"
    # Such a small number probably lacks its unit; 1000000 is 1MB.
    is_bare = memory << 20 >= needed and memory < 1 << 16
    suggestion = f"; did you mean {option('memory', f'{memory}MiB')}" if is_bare else ""
    return MemoryBudgetError(
        message,
        location=location,
        got=option("memory", format_size(memory)),
        expected=f"at least {least}, with {option('jobs', 1)}",
        hint=f"try {option('memory', least)}{suggestion}",
    )


def parse_size(size: int | str) -> int:
    """Parse a number of bytes: an integer or text such as 512MiB, 2GB, 1.5GiB, 1073741824.

    Raises:
        UsageError: The text is not a size, or the size is less than one byte.
    """
    nbytes = _parse_text(size) if isinstance(size, str) else size
    if not isinstance(nbytes, int) or isinstance(nbytes, bool):
        raise _invalid_size(size)
    if nbytes < 1:
        raise UsageError("must be at least one byte.")
    return nbytes


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise _invalid_size(text)
    number, letter, binary = match.groups()
    power = _POWERS[letter.lower()] if letter else 0
    return int(float(number) * (1024 if binary else 1000) ** power) if letter else int(float(number))


def _invalid_size(value: object) -> UsageError:
    return UsageError(f"{value!r} is not a size. Write 512MiB, 2GB or a number of bytes.")


def format_size(nbytes: int) -> str:
    """Format 1 << 30 as "1024MiB" and 8,000,000 as "8MB", as `parse_size` accepts; less in KiB or bytes."""
    if nbytes and not nbytes % 10**6:
        return f"{nbytes // 10**6}MB"
    if nbytes >> 10:
        return f"{nbytes >> 20}MiB" if nbytes >> 20 else f"{nbytes >> 10}KiB"
    return f"{nbytes} byte{'s' * (nbytes != 1)}"


def estimate_names_bytes(names: Iterable[str]) -> int:
    """Estimate the memory of several copies of names, as in lines and sorted keys."""
    return 4 * sum(map(len, names))
