"""The memory that a command may take, as far as it is known before a checkpoint is opened.

What a plan needs is counted when it is made (`ckpttools.plan`), but the names of a hundred thousand arrays
can take more than was allowed before there is anything to plan. Formats ask here as soon as they know how
many arrays there are, before they read what describes them.
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

# What the interpreter, numpy and this package take: 40 MiB are resident after planning (Linux, CPython 3.11,
# numpy 2.4). The rest is for what the command line and a format's decoders import, and for the allocator.
BASELINE_BYTES = 96 << 20
# What opening, naming and planning take for each array in any command, and in the one that takes most.
# Measured with 2,000 and with 12,000 arrays; docs/concepts.md has the figures.
_MIN_PER_ARRAY = 1 << 10
_MAX_PER_ARRAY = 3584
# What a worker needs beside that in the hint: buffers that serve any common chunk.
_WORKER_BYTES = 16 << 20
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


@dataclass
class _MemoryLimit:
    """What a command may take, what it has opened so far takes at least, and the most arrays at once."""

    memory: int
    needed: int = 0
    arrays: int = 0


_BUDGET: ContextVar[_MemoryLimit | None] = ContextVar("allowed", default=None)
_EXTRA_BYTES: ContextVar[int] = ContextVar("beside", default=0)


def baseline_bytes() -> int:
    """What is resident before anything is opened."""
    return BASELINE_BYTES + _EXTRA_BYTES.get()


@contextmanager
def extra_resident(nbytes: int) -> Iterator[None]:
    """Inside the `with` so much more is resident than other commands take, as of what only some import."""
    token = _EXTRA_BYTES.set(_EXTRA_BYTES.get() + nbytes)
    try:
        yield
    finally:
        _EXTRA_BYTES.reset(token)


@contextmanager
def limit_memory(memory: int) -> Iterator[None]:
    """Checkpoints that are opened inside the `with` must fit into so many bytes, all of them together.

    Inside another `with` of this kind that one counts, as it is of the whole command.
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
    """To be called before a checkpoint's description is read.

    Args:
        arrays: how many it has, about.
        nbytes: that reading their description takes beside what any array takes.
        location: what is opened.

    Raises:
        MemoryBudgetError: what was allowed cannot be enough for any command.
    """
    allowed = _BUDGET.get()
    if allowed is None:
        return
    allowed.needed += arrays * _MIN_PER_ARRAY + nbytes
    allowed.arrays = max(allowed.arrays, arrays)
    at_ease = allowed.arrays * (_MAX_PER_ARRAY - _MIN_PER_ARRAY)
    if baseline_bytes() + allowed.needed > allowed.memory and allowed.needed > _WORKER_BYTES:
        raise memory_error(
            f"the names and places of {arrays:,} arrays do not fit into the memory allowed",
            allowed.memory,
            baseline_bytes() + allowed.needed + at_ease + _WORKER_BYTES,
            location,
        )


def check_resident(location: object) -> None:
    """To be called while a description is read whose values may take far more than its bytes.

    Raises:
        MemoryBudgetError: more is resident than the command may take.
    """
    allowed = _BUDGET.get()
    resident = None if allowed is None else current_bytes()
    if allowed is not None and resident is not None and resident > allowed.memory:
        raise memory_error(
            "what the file says does not fit into the memory allowed", allowed.memory, 2 * resident, location
        )


def memory_error(message: str, memory: int, needed: int, location: object = None) -> MemoryBudgetError:
    """The refusal of a budget; with `needed` bytes the same command is not refused."""
    least = f"{-(-needed >> 20)}MiB"
    # A number without its unit; 1000000 is one with it, 1MB.
    is_bare = memory << 20 >= needed and memory < 1 << 16
    meant = f"; did you mean {option('memory', f'{memory}MiB')}" if is_bare else ""
    return MemoryBudgetError(
        message,
        location=location,
        got=option("memory", format_size(memory)),
        expected=f"at least {least}, with {option('jobs', 1)}",
        hint=f"try {option('memory', least)}{meant}",
    )


def parse_size(size: int | str) -> int:
    """A number of bytes, as a number or as text: 512MiB, 2GB, 1.5GiB, 1073741824.

    Raises:
        UsageError: it is not a size, or less than one byte.
    """
    nbytes = _parse_text(size) if isinstance(size, str) else size
    if not isinstance(nbytes, int) or isinstance(nbytes, bool):
        raise _invalid_size(size)
    if nbytes < 1:
        raise UsageError("must be more than nothing.")
    return nbytes


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise _invalid_size(text)
    number, letter, binary = match.groups()
    power = _POWERS[letter.lower()] if letter else 0
    return int(float(number) * (1024 if binary else 1000) ** power) if letter else int(float(number))


def _invalid_size(declared: object) -> UsageError:
    return UsageError(f"{declared!r} is not a size. Write 512MiB, 2GB or a number of bytes.")


def format_size(nbytes: int) -> str:
    """1 << 30 -> "1024MiB", as `parse_size` takes it; what is less than that in KiB, or in bytes."""
    if nbytes >> 10:
        return f"{nbytes >> 20}MiB" if nbytes >> 20 else f"{nbytes >> 10}KiB"
    return f"{nbytes} byte{'s' * (nbytes != 1)}"


def estimate_names_bytes(names: Iterable[str]) -> int:
    """What several copies of names take, as in lines and sorted keys; they can be long."""
    return 4 * sum(map(len, names))
