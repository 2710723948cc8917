"""What there is to know of the checkpoints of a training before it begins."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import plural
from ckpttools.maxtext.planning.intervals import SaveInterval, Tier
from ckpttools.maxtext.planning.ramdisk import Ramdisk


@dataclass(frozen=True, repr=False)
class TrainingPlan:
    """A plan of saving.

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
