"""The plan for checkpoints of a training run, and the ramdisk that each host needs."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import plural
from ckpttools.maxtext.planning.intervals import SaveInterval, Tier

# Weights and two moments of Adam's, each in float32.
BYTES_PER_PARAMETER = 12
# A checkpoint is written while the one before it is still there; and some room to spare.
_COPIES, _SPARE = 2, 1.15
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ramdisk:
    """The size that a ramdisk should have, in bytes.

    Attributes:
        documented: 2 x (state / hosts of a slice) x 1.15, as MaxText's documentation says.
        exact: the same of what a host really holds; None where no sharding is known.
        setting: for `RAMDISK_SIZE`, in whole MiB: the exact one where it is known.
    """

    documented: float
    exact: float | None
    setting: str


def ramdisk(state_bytes: int, hosts: int, host_bytes: int | None) -> Ramdisk:
    """Return the ramdisk size of each host.

    Args:
        state_bytes: of a full training state.
        hosts: of a slice.
        host_bytes: that one host holds, with what others hold, too; None where that is unknown.
    """
    documented = _COPIES * _SPARE * state_bytes / hosts
    exact = None if host_bytes is None else _COPIES * _SPARE * host_bytes
    # MaxText's 1.15 is for what nobody knows: an exact number that is smaller is taken.
    return Ramdisk(documented, exact, f"{ceil((documented if exact is None else exact) / _MIB)}Mi")


@dataclass(frozen=True, repr=False)
class TrainingPlan:
    """A plan for saving checkpoints.

    Attributes:
        path: what the model was told by.
        parameters: numbers that are learned.
        state_bytes: of a full training state: as stored, or 12 for each parameter.
        is_exact: whether that is of a state that is stored.
        hosts, slices: hosts of a slice, and slices.
        host_bytes: that a host writes where each writes all that its devices hold, as emergency and
            multi-tier checkpoints do; replicated arrays count on every host. An even share where no sharding
            is known.
        replicated_bytes: of these, what other hosts of the slice write as well.
        ramdisk: of each host.
        mode: "persistent", "emergency" or "multi-tier".
        local_write_seconds, persistent_write_seconds: for one checkpoint at the bandwidths given, by all
            hosts at once.
        intervals: of each tier; empty where no time between failures is given.
        run_bytes: room that a run's checkpoints take; None where its steps are not known.
        run_checkpoints: how many these are.
        settings: MaxText's.
        refusals: why MaxText would refuse these, with those of the user among them.
        commands: of xpk.
        tiers: what the intervals were found of.
        remarks: what else to know.
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
