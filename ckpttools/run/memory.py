"""Resident memory of this process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

from ckpttools.core.resident import current_bytes, kernel_field

__all__ = ["available_bytes", "current_bytes", "peak_bytes"]

_STATUS, _SYSTEM = Path("/proc/self/status"), Path("/proc/meminfo")


def peak_bytes() -> int | None:
    """Highest resident size since the process began (`VmHWM`), or None where there is no /proc.

    Not `ru_maxrss`: that is inherited from the process that started this one.
    """
    return kernel_field(_STATUS, "VmHWM:")


def available_bytes() -> int | None:
    """What the system would give to processes (`MemAvailable`), or None where there is no /proc."""
    return kernel_field(_SYSTEM, "MemAvailable:")
