"""Resident memory of this process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

from ckpttools.core.resident import current_bytes, kernel_field

__all__ = ["available_bytes", "current_bytes", "peak_bytes"]

_STATUS, _SYSTEM = Path("/proc/self/status"), Path("/proc/meminfo")


def peak_bytes(forked: int = 0) -> int | None:
    """Highest resident size since the process began (`VmHWM`), or None where there is no /proc.

    Not `ru_maxrss`: that is inherited from the process that started this one.

    Args:
        forked: bytes that processes had for themselves which this one has forked, to be added.
    """
    own = kernel_field(_STATUS, "VmHWM:")
    return None if own is None else own + forked


def available_bytes() -> int | None:
    """What the system would give to processes (`MemAvailable`), or None where there is no /proc."""
    return kernel_field(_SYSTEM, "MemAvailable:")
