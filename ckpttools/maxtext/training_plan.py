"""Plan a run's checkpoints: save intervals, ramdisks, MaxText's settings and the xpk commands.

Training runs for T seconds, then a save blocks it for C seconds. Failures occur at random, every M
seconds on average, also while a checkpoint is saved or restored. Completing T + C seconds without a
failure takes M (exp((T + C) / M) - 1) on average, and exp(R / M) times that if each failure costs R
seconds of restoring (Daly 2006). The best T solves (1 - T / M) exp((T + C) / M) = 1; to first order, it
is sqrt(2 C M) (Young 1974).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, exp, expm1, log1p, sqrt
from typing import Any, Literal

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.text import plural
from ckpttools.maxtext.loading.settings import LOCAL_TIERS
from ckpttools.stores.location import Location

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
        text = f"{self.state_bytes:,} bytes, {self.host_bytes:,} on each of {hosts}"
        return f"<TrainingPlan of {self.path}: {self.mode} checkpoints of {text}>"


# Bisection steps on the interval from 0 to 1; with more steps, a float64 would round to 1.
_HALVINGS = 50


@dataclass(frozen=True, slots=True)
class Tier:
    """A destination of checkpoints, and the failures that it covers.

    Attributes:
        name: "local" or "persistent".
        save_seconds: Seconds for which a save blocks training.
        failure_seconds: Average seconds between failures after which training resumes from this tier.
        write_seconds: Seconds from the start of a save until the checkpoint is complete; restoring takes as
            long.
    """

    name: str
    save_seconds: float
    failure_seconds: float
    write_seconds: float = 0.0

    @property
    def young_seconds(self) -> float:
        """Return the best interval to first order (Young)."""
        return sqrt(2 * self.save_seconds * self.failure_seconds)

    @property
    def best_seconds(self) -> float:
        """Return the interval with the least loss; a save that waits for the previous one gains nothing."""
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_short = -log1p(-middle) - middle < self.save_seconds / self.failure_seconds
            low, high = (middle, high) if is_short else (low, middle)
        busy = min(self.write_seconds - self.save_seconds, self.failure_seconds)
        return max(high * self.failure_seconds, busy)

    def lost(self, interval: float) -> float:
        """Return the fraction of time that is lost with an interval in seconds, from 0 to 1."""
        hold = max(self.save_seconds, self.write_seconds - interval)
        # A failure loses the restore time, and the training done while the last save was still being written.
        redone = self.write_seconds + max(0.0, self.write_seconds - hold)
        failure_ratio = (interval + hold) / self.failure_seconds
        return 1 + interval * exp(-redone / self.failure_seconds - failure_ratio) / (
            self.failure_seconds * expm1(-failure_ratio)
        )

    def best_steps(self, step_seconds: float, multiple: int = 1) -> int:
        """Return the best interval in steps, rounded to the better of the neighboring multiples."""
        fewer = max(1, int(self.best_seconds / step_seconds) // multiple) * multiple
        return min((fewer, fewer + multiple), key=lambda steps: self.lost(steps * step_seconds))


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """The save interval of a tier.

    Attributes:
        tier: The name of the tier.
        save_seconds, failure_seconds: As for `Tier`.
        young_seconds, best_seconds: The best training time between two saves, to first order and exactly.
        steps: The planned interval in steps; None if the time of a step is unknown.
        seconds: The planned interval in seconds; the best interval if steps are unknown.
        lost_fraction: The fraction of time that is lost with this interval.
    """

    tier: str
    save_seconds: float
    failure_seconds: float
    young_seconds: float
    best_seconds: float
    steps: int | None
    seconds: float
    lost_fraction: float

    @classmethod
    def of(
        cls, tier: Tier, step_seconds: float | None, multiple: int = 1, steps: int | None = None
    ) -> SaveInterval:
        """Return the save interval of a tier.

        Args:
            tier: The costs of a save and of a failure.
            step_seconds: The duration of a step.
            multiple: The number of steps that the interval must be a multiple of.
            steps: The interval that the user sets, in place of the best one.
        """
        seconds = tier.best_seconds
        if step_seconds is not None:
            steps = steps or tier.best_steps(step_seconds, multiple)
            seconds = steps * step_seconds
        return cls(
            tier.name,
            tier.save_seconds,
            tier.failure_seconds,
            tier.young_seconds,
            tier.best_seconds,
            steps,
            seconds,
            tier.lost(seconds),
        )


def count_kept_checkpoints(total_steps: int, period: int, limit: int | None) -> int:
    """Return how many checkpoints exist at the end of a run."""
    saved = total_steps // period + (total_steps % period > 0)
    return saved if limit is None else min(saved, limit)


Mode = Literal["persistent", "emergency", "multi-tier"]
MODES: tuple[Mode, ...] = ("persistent", "emergency", "multi-tier")
RAMDISK = "/local"
UNKNOWN = "N"
"""Placeholder for an unknown number of steps."""
KEEP, LOCAL_PERIOD = "max_num_checkpoints_to_keep", "local_checkpoint_period"
_LOCAL_DIRECTORY = "local_checkpoint_directory"
_LINE = " \\\n  "


def settings_for(mode: Mode, local: int | None, persistent: int | None, keep: int | None) -> dict[str, str]:
    """Return MaxText's settings for a way of saving.

    Args:
        mode: The way of saving.
        local, persistent: Number of steps between saves; None if unknown, which is written as `UNKNOWN`.
        keep: The number of checkpoints to keep; None keeps all.
    """
    interval = UNKNOWN if persistent is None else str(persistent)
    result = {"enable_checkpointing": "true", "async_checkpointing": "true"}
    if mode == "emergency":
        result |= {"enable_emergency_checkpoint": "true"}
    if mode == "multi-tier":
        result |= {"enable_multi_tier_checkpointing": "true"}
    if mode != "persistent":
        near = UNKNOWN if local is None else str(local)
        result |= {_LOCAL_DIRECTORY: RAMDISK, LOCAL_PERIOD: near}
    result |= {period_setting(mode): interval}
    # The managers of the other modes do not accept a number, and keep all persistent checkpoints.
    if keep is not None and mode == "persistent":
        result |= {KEEP: str(keep)}
    return result


def period_setting(mode: Mode) -> str:
    """Return the name of the setting for the number of steps between persistent checkpoints."""
    return "multi_tier_checkpointing_backup_interval_steps" if mode == "multi-tier" else "checkpoint_period"


def commands_for(mode: Mode, slices: int, ramdisk: str, settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the xpk commands that create the cluster and start the training."""
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    train = f'"python3 -m maxtext.trainers.pre_train.train ${{CONFIG}} {words}"'
    cluster = [
        "xpk cluster create",
        "--cluster=${CLUSTER}",
        "--tpu-type=${TPU_TYPE}",
        f"--num-slices={slices}",
    ]
    workload = ["xpk workload create", "--cluster=${CLUSTER}", "--workload=${WORKLOAD}"]
    workload += ["--tpu-type=${TPU_TYPE}", f"--num-slices={slices}", "--docker-image=${IMAGE}"]
    if mode != "persistent":
        cluster += ["--enable-mtc", "--enable-gcsfuse-csi-driver", f"--mtc-ramdisk-size={ramdisk}"]
        cluster += ["--mtc-gcs-bucket=gs://${BUCKET}", "--gke-version=${GKE_VERSION}"]
        workload += [f"--ramdisk-directory={RAMDISK}", "--mtc-enabled"]
    return _LINE.join(cluster), _LINE.join([*workload, f"--command {train}"])


def parse_user_settings(settings: Sequence[str]) -> dict[str, str]:
    """Return the user's settings by name.

    Raises:
        UsageError: A setting does not have the form `NAME=VALUE`.
    """
    for word in settings:
        name, equals, _ = word.partition("=")
        if not (name and equals):
            raise UsageError("this is not a MaxText setting", got=word, expected="NAME=VALUE")
    return dict(word.partition("=")[::2] for word in settings)


def effective_run(
    mode: Mode, best: int | None, keep: int | None, words: Mapping[str, str]
) -> tuple[int | None, int | None]:
    """Return the steps between persistent checkpoints and the number kept; the user's settings win."""
    return positive_setting(words, period_setting(mode)) or best, positive_setting(words, KEEP) or keep


def positive_setting(words: Mapping[str, str], name: str) -> int | None:
    """Return the positive number that the user set for a setting; None if there is none."""
    declared = words.get(name, "")
    return int(declared) or None if declared.isdecimal() else None


def find_refusals(
    file: Location | None, planned: Mapping[str, str], settings: Sequence[str]
) -> Iterator[str]:
    """Yield the reasons why MaxText would refuse settings: first single settings, then combinations.

    Args:
        file: A MaxText configuration file, which settings of the plan override.
        planned: The settings of the plan, including the user's.
        settings: The user's settings as `NAME=VALUE`.
    """
    # Other commands for runs import this module for its options, so they must not import MaxText's settings.
    from ckpttools.maxtext.config.run_settings import read_settings
    from ckpttools.maxtext.config.setting_kinds import find_invalid_settings
    from ckpttools.maxtext.versions import NEWEST

    mistakes = list(find_invalid_settings(read_settings(list(settings)).declared, NEWEST)) if settings else []
    yield from (f"{item.name}={item.declared}: {item.reason}" for item in mistakes)
    if not mistakes:
        in_file = (
            {} if file is None else {item.name: item.value for item in read_settings([str(file)]).declared}
        )
        # Steps that are still unknown will be positive.
        known = {name: "1" if declared == UNKNOWN else declared for name, declared in planned.items()}
        yield from invalid_combinations({**in_file, **known})


_BACKUP = "multi_tier_checkpointing_backup_interval_"
_INTEGER = re.compile(r"[+-]?[0-9]+")
_TRUE_WORDS = ("true", "t", "yes", "y", "on", "1")


def invalid_combinations(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why MaxText would refuse a combination of valid settings.

    Args:
        settings: Name -> value, as text or parsed; absent settings have MaxText's defaults.
    """

    def declared(name: str) -> Any:
        value = settings.get(name)
        return None if value is None or str(value).lower() in ("", "none", "null") else value

    def is_set(name: str, default: bool = False) -> bool:
        value = declared(name)
        return default if value is None else str(value).lower() in _TRUE_WORDS

    def number(name: str) -> int | None:
        value = declared(name)
        return int(value) if value is not None and _INTEGER.fullmatch(str(value)) else None

    for name in (LOCAL_PERIOD, f"{_BACKUP}minutes", f"{_BACKUP}steps"):
        if declared(name) is not None and number(name) is None:
            yield f"{name} must be an integer, but is {declared(name)}"
    if declared("load_parameters_path") and declared("load_full_state_path"):
        yield "load_parameters_path and load_full_state_path are mutually exclusive"
    if declared("load_full_state_path") and not is_set("enable_checkpointing", default=True):
        yield "load_full_state_path needs enable_checkpointing=true"
    for tier in filter(is_set, LOCAL_TIERS):
        if not declared(_LOCAL_DIRECTORY):
            yield f"{tier} needs {_LOCAL_DIRECTORY}"
        if (number(LOCAL_PERIOD) or 0) <= 0:
            yield f"{tier} needs {LOCAL_PERIOD} above 0"
    if is_set(LOCAL_TIERS[0]):
        minutes, steps = number(f"{_BACKUP}minutes"), number(f"{_BACKUP}steps")
        if (minutes is None) == (steps is None):
            yield f"{LOCAL_TIERS[0]} needs one of {_BACKUP}minutes and {_BACKUP}steps, not both"
        if steps is not None and steps < (number(LOCAL_PERIOD) or 0):
            yield f"{_BACKUP}steps must not be less than {LOCAL_PERIOD}"
