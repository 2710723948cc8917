"""The checkpoint plan for a training run, and the ramdisk size for each host."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import plural
from ckpttools.maxtext.planning.intervals import SaveInterval, Tier

# Bytes per parameter: weights and two Adam moments, each in float32.
BYTES_PER_PARAMETER = 12
# A checkpoint is written while the previous one still exists, with some headroom.
_COPIES, _SPARE = 2, 1.15
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ramdisk:
    """The recommended size of a ramdisk, in bytes.

    Attributes:
        documented: The size 2 x (state / hosts of a slice) x 1.15, as in MaxText's documentation.
        exact: The size from the actual bytes of a host; None if the sharding is unknown.
        setting: The value for `RAMDISK_SIZE`, rounded to MiB; uses the exact size if known.
    """

    documented: float
    exact: float | None
    setting: str


def ramdisk(state_bytes: int, hosts: int, host_bytes: int | None) -> Ramdisk:
    """Return the ramdisk size for each host.

    Args:
        state_bytes: The size of a full training state.
        hosts: The number of hosts in a slice.
        host_bytes: The number of bytes that one host holds, including replicas; None if unknown.
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
        state_bytes: The size of a full training state: as stored, or 12 bytes per parameter.
        is_exact: Whether the size comes from a stored state.
        hosts, slices: The number of hosts in a slice, and the number of slices.
        host_bytes: The number of bytes that a host writes if each host writes everything on its devices, as
            for emergency and multi-tier checkpoints; replicated arrays count on every host. If the sharding
            is unknown, an equal share.
        replicated_bytes: The part of `host_bytes` that other hosts of the slice also write.
        ramdisk: The ramdisk size for each host.
        mode: "persistent", "emergency" or "multi-tier".
        local_write_seconds, persistent_write_seconds: The time to write a checkpoint at the given bandwidths,
            with all hosts writing at once.
        intervals: The interval of each tier; empty if the time between failures is not given.
        run_bytes: The size of all checkpoints of a run; None if its steps are unknown.
        run_checkpoints: The number of checkpoints of a run.
        settings: The settings for MaxText.
        refusals: The reasons why MaxText would refuse the settings, including the user's.
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
