"""Memory and threads of this process, as the kernel counts them."""

from __future__ import annotations

from pathlib import Path

_STATUS, _SHARES = Path("/proc/self/status"), Path("/proc/self/smaps_rollup")
_SYSTEM = Path("/proc/meminfo")


def current_bytes() -> int | None:
    """Return the resident size (`VmRSS`). Like all functions here, returns None without /proc."""
    return _read_bytes(_STATUS, "VmRSS:")


def private_bytes() -> int | None:
    """Return the number of bytes that this process shares with no other process, such as its parent."""
    return _read_bytes(_SHARES, "Private_Dirty:")


def peak_bytes(forked: int = 0) -> int | None:
    """Return the highest resident size since the process started (`VmHWM`).

    `ru_maxrss` is not used because a process inherits it from its parent.

    Args:
        forked: Private bytes of forked processes, which are added.
    """
    own = _read_bytes(_STATUS, "VmHWM:")
    return None if own is None else own + forked


def available_bytes() -> int | None:
    """Return the memory available to processes (`MemAvailable`)."""
    return _read_bytes(_SYSTEM, "MemAvailable:")


def thread_count() -> int | None:
    """Return the number of threads, including those of libraries."""
    result = _read_words(_STATUS, "Threads:")
    return None if result is None else int(result[0])


def _read_bytes(file: Path, name: str) -> int | None:
    """Return a field of a /proc file that is in kB, in bytes."""
    result = _read_words(file, name)
    return None if result is None else int(result[0]) * 1024


def _read_words(file: Path, name: str) -> list[str] | None:
    """Return the words of a field of a /proc file."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[1:] for line in lines if line.startswith(name)), None)
