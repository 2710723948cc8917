"""Resident memory of this process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS, _SYSTEM = Path("/proc/self/status"), Path("/proc/meminfo")


def peak_bytes() -> int | None:
    """Highest resident size since the process began (`VmHWM`), or None where there is no /proc.

    Not `ru_maxrss`: that is inherited from the process that started this one.
    """
    return _field(_STATUS, "VmHWM:")


def current_bytes() -> int | None:
    """Resident size now (`VmRSS`), or None where there is no /proc."""
    return _field(_STATUS, "VmRSS:")


def available_bytes() -> int | None:
    """What the system would give to processes (`MemAvailable`), or None where there is no /proc."""
    return _field(_SYSTEM, "MemAvailable:")


def _field(file: Path, name: str) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)
