"""Resident memory and threads of this process now, as the kernel counts them."""

from __future__ import annotations

from pathlib import Path

_STATUS, _SHARES = Path("/proc/self/status"), Path("/proc/self/smaps_rollup")


def current_bytes() -> int | None:
    """Resident size now (`VmRSS`), or None where there is no /proc."""
    return kernel_field(_STATUS, "VmRSS:")


def own_bytes() -> int | None:
    """What of it no other process has, such as the one that forked this; None as `current_bytes`."""
    return kernel_field(_SHARES, "Private_Dirty:")


def threads() -> int | None:
    """How many threads this process has, those of libraries included; None where there is no /proc."""
    found = _field(_STATUS, "Threads:")
    return None if found is None else int(found[0])


def kernel_field(file: Path, name: str) -> int | None:
    """Bytes that a line of a file in /proc gives in kB; None where there is none."""
    found = _field(file, name)
    return None if found is None else int(found[0]) * 1024


def _field(file: Path, name: str) -> list[str] | None:
    """The words behind a name in a file of /proc."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[1:] for line in lines if line.startswith(name)), None)
