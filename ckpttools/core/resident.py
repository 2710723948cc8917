"""Resident memory of this process now, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")


def current_bytes() -> int | None:
    """Resident size now (`VmRSS`), or None where there is no /proc."""
    return kernel_field(_STATUS, "VmRSS:")


def kernel_field(file: Path, name: str) -> int | None:
    """Bytes that a line of a file in /proc gives in kB; None where there is none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)
