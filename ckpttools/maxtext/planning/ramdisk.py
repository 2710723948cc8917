"""What a host's ramdisk must hold: by MaxText's documentation, and by what a host really writes."""

from __future__ import annotations

from math import ceil

from ckpttools.core.dataclass import dataclass

# Weights and two moments of Adam's, each in float32.
BYTES_PER_PARAMETER = 12
# A checkpoint is written while the one before it is still there; and some room to spare.
_COPIES, _SPARE = 2, 1.15
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ramdisk:
    """Bytes that a ramdisk should have.

    Attributes:
        documented: 2 x (state / hosts of a slice) x 1.15, as MaxText's documentation says.
        exact: the same of what a host really holds; None where no sharding is known.
        setting: for `RAMDISK_SIZE`, in whole MiB: the exact one where it is known.
    """

    documented: float
    exact: float | None
    setting: str


def ramdisk(state_bytes: int, hosts: int, host_bytes: int | None) -> Ramdisk:
    """The ramdisk of each host.

    Args:
        state_bytes: of a full training state.
        hosts: of a slice.
        host_bytes: that one host holds, with what others hold, too; None where that is unknown.
    """
    documented = _COPIES * _SPARE * state_bytes / hosts
    exact = None if host_bytes is None else _COPIES * _SPARE * host_bytes
    # MaxText's 1.15 is for what nobody knows: an exact number that is smaller is taken.
    return Ramdisk(documented, exact, f"{ceil((documented if exact is None else exact) / _MIB)}Mi")
