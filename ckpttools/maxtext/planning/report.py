"""The plan for checkpoints of a training run, and the ramdisk that each host needs."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import plural
from ckpttools.maxtext.planning.intervals import SaveInterval, Tier

# Weights and two Adam moments, each in float32.
BYTES_PER_PARAMETER = 12
# A checkpoint is written while the previous one still exists, with some headroom.
_COPIES, _SPARE = 2, 1.15
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ramdisk:
    """The size that a ramdisk should have, in bytes.

    Attributes:
        documented: 2 x (state / hosts of a slice) x 1.15, as in MaxText's documentation.
        exact: The same formula with the actual bytes of a host; None if the sharding is unknown.
        setting: The value for `RAMDISK_SIZE`, in full MiB: the exact one if known.
    """

    documented: float
    exact: float | None
    setting: str


def ramdisk(state_bytes: int, hosts: int, host_bytes: int | None) -> Ramdisk:
    """Return the ramdisk size of each host.

    Args:
        state_bytes: The size of a full training state.
        hosts: The hosts of a slice.
        host_bytes: The bytes that one host holds, including replicated ones; None if unknown.
    """
    documented = _COPIES * _SPARE * state_bytes / hosts
    exact = None if host_bytes is None else _COPIES * _SPARE * host_bytes
    # MaxText's factor 1.15 covers unknown overhead, so a smaller exact size is used.
    return Ramdisk(documented, exact, f"{ceil((documented if exact is None else exact) / _MIB)}Mi")


@dataclass(frozen=True, repr=False)
class TrainingPlan:
    """A plan for saving checkpoints.

    Attributes:
        path: The checkpoint or configuration that defines the model.
        parameters: The number of learned values.
        state_bytes: The size of a full training state: as stored, or 12 bytes for each parameter.
        is_exact: Whether the size comes from a stored state.
        hosts, slices: The hosts of a slice, and the number of slices.
        host_bytes: The bytes that a host writes if each host writes everything that its devices hold, as
            emergency and multi-tier checkpoints do; replicated arrays count on every host. An even share if
            the sharding is unknown.
        replicated_bytes: The bytes among these that other hosts of the slice write as well.
        ramdisk: The ramdisk of each host.
        mode: "persistent", "emergency" or "multi-tier".
        local_write_seconds, persistent_write_seconds: The duration of one checkpoint at the given bandwidths,
            with all hosts writing at once.
        intervals: The interval of each tier; empty if the time between failures is not given.
        run_bytes: The size of all checkpoints of a run; None if its steps are unknown.
        run_checkpoints: The number of these checkpoints.
        settings: The settings for MaxText.
        refusals: The reasons why MaxText would refuse these settings, including those of the user.
        commands: The xpk commands.
        tiers: The tiers from which the intervals were computed.
        remarks: Other notes for the user.
    """

    path: str
    parameters: int
    state_bytes: int
    is_exact: bool
    hosts: int
    slices: int
    host_bytes: int
    replicated_bytes: int
    ramdisk: Ramdisk
    mode: str
    local_write_seconds: float
    persistent_write_seconds: float
    intervals: tuple[SaveInterval, ...]
    run_bytes: int | None
    run_checkpoints: int | None
    settings: Mapping[str, str]
    refusals: tuple[str, ...]
    commands: tuple[str, ...]
    tiers: tuple[Tier, ...]
    remarks: tuple[str, ...]

    def __repr__(self) -> str:
        hosts = plural(self.hosts * self.slices, "host")
        held = f"{self.state_bytes:,} bytes, {self.host_bytes:,} on each of {hosts}"
        return f"<TrainingPlan of {self.path}: {self.mode} checkpoints of {held}>"
