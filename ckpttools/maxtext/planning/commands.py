"""MaxText's settings and the xpk commands for a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Mode = Literal["persistent", "emergency", "multi-tier"]
MODES: tuple[Mode, ...] = ("persistent", "emergency", "multi-tier")
RAMDISK = "/local"
UNKNOWN = "N"
"""Placeholder for an unknown number of steps."""
KEEP, LOCAL_PERIOD = "max_num_checkpoints_to_keep", "local_checkpoint_period"
_LINE = " \\\n  "


def settings_for(mode: Mode, local: int | None, persistent: int | None, keep: int | None) -> dict[str, str]:
    """Return MaxText's settings for a way of saving.

    Args:
        mode: The way of saving.
        local, persistent: Number of steps between saves; None if unknown, which is written as `UNKNOWN`.
        keep: The number of checkpoints to keep; None keeps all.
    """
    every = UNKNOWN if persistent is None else str(persistent)
    built = {"enable_checkpointing": "true", "async_checkpointing": "true"}
    if mode == "emergency":
        built |= {"enable_emergency_checkpoint": "true"}
    if mode == "multi-tier":
        built |= {"enable_multi_tier_checkpointing": "true"}
    if mode != "persistent":
        near = UNKNOWN if local is None else str(local)
        built |= {"local_checkpoint_directory": RAMDISK, LOCAL_PERIOD: near}
    built |= {period_setting(mode): every}
    # The managers of the other modes do not accept a number, and keep all persistent checkpoints.
    if keep is not None and mode == "persistent":
        built |= {KEEP: str(keep)}
    return built


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
