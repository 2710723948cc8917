"""Plan the checkpoints of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import NamedTuple, Unpack

from ckpttools.api.options import OPENING
from ckpttools.api.options.runs import PLAN_TRAINING
from ckpttools.api.output_file import check_output_file
from ckpttools.api.sources import Opening, Size, Source, config_alone, location_of, opened, read_options
from ckpttools.array.storage import Sharding
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.errors import FormatError, UsageError
from ckpttools.core.extras import require_package
from ckpttools.core.message_terms import action, option
from ckpttools.core.options import declare, parse_size_option
from ckpttools.formats.json_file import read_json
from ckpttools.formats.registry import stored_shardings
from ckpttools.inspection.lost_time import FONTS, lost_time_svg, png_of
from ckpttools.maxtext.config.to_hf_config import config_from_settings
from ckpttools.maxtext.synthetic import synthetic_model
from ckpttools.maxtext.training_plan import (
    BYTES_PER_PARAMETER,
    LOCAL_PERIOD,
    UNKNOWN,
    Mode,
    SaveInterval,
    Tier,
    TrainingPlan,
    commands_for,
    count_kept_checkpoints,
    effective_run,
    find_refusals,
    parse_user_settings,
    period_setting,
    positive_setting,
    ramdisk,
    settings_for,
)
from ckpttools.roles.of_tree import roles
from ckpttools.sharding.load_prediction import process_loading
from ckpttools.sharding.mesh import MeshShape, parse_mesh
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

# A host's disk is a hundred times as fast.
_MIN_BANDWIDTH = 1_000_000
_YAML = (".yml", ".yaml")
_EXAMPLES = {"mtbf": "6h", "step_time": "8s"}
# If more than this fraction of the time is lost, the interval is not the problem.
_MAX_LOST_FRACTION = 0.5


class _SaveSettings(NamedTuple):
    """MaxText's settings for saving checkpoints.

    Attributes:
        settings: Values by name, as passed to MaxText.
        checkpoints: Number of checkpoints at the end of the run, if known.
        kept: Number of checkpoints that are kept; None for all.
    """

    settings: Mapping[str, str]
    checkpoints: int | None
    kept: int | None


@validate_arguments
@declare(*PLAN_TRAINING, *OPENING)
def plan_training(
    source: Source,
    *,
    hosts: int,
    slices: int = 1,
    mode: Mode | None = None,
    settings: Sequence[str] = (),
    mesh: str | None = None,
    local_bandwidth: Size = "2GB",
    persistent_bandwidth: Size = "500MB",
    step_time: float | str | None = None,
    mtbf: float | str | None = None,
    mtbf_all: float | str | None = None,
    local_save: float | str | None = None,
    persistent_save: float | str | None = None,
    total_steps: int | None = None,
    keep: int | None = None,
    plot: LocationLike | None = None,
    **reading: Unpack[Opening],
) -> TrainingPlan:
    """Plan the checkpoints of a training run: bytes per host, ramdisk, save intervals and settings.

    Args:
        source: A checkpoint, a `config.json`, or a MaxText configuration file. A training state counts as it
            is stored; in other sources each parameter takes 12 bytes, for itself and two moments.
        settings: Further MaxText settings, "NAME=VALUE"; they are checked together with those of the plan.

    Raises:
        UsageError: Numbers are implausible or contradict each other.
        CheckpointError: The source cannot be read, or does not determine the size of the model.
    """
    words = parse_user_settings(settings)
    if plot is not None:
        check_plot(parse(plot, is_written=True), source, has_tiers=mtbf is not None)
    state = _state(source, settings, reading)
    share = host_bytes(state, hosts, slices, None if mesh is None else parse_mesh(mesh))
    used_mode: Mode = mode or ("multi-tier" if slices > 1 else "persistent")
    size = ramdisk(state.nbytes, hosts, share.nbytes if share.is_known else None)
    # Emergency and multi-tier checkpoints are written to storage by one slice, and each of its hosts writes
    # an equal share.
    to_storage = state.nbytes / hosts / _bandwidth("persistent_bandwidth", persistent_bandwidth)
    writes = share.nbytes / _bandwidth("local_bandwidth", local_bandwidth), to_storage
    tiers = _tiers(used_mode, (local_save, persistent_save), writes, (mtbf, mtbf_all))
    intervals = _intervals(tiers, used_mode, _seconds("step_time", step_time), words)
    saving = _save_settings(used_mode, intervals, words, keep, total_steps)
    count, unknown = saving.checkpoints, _open(saving.settings, mtbf=mtbf, step_time=step_time)
    result = TrainingPlan(
        path=str(source.metadata.location if isinstance(source, Tree) else source),
        parameters=state.parameters,
        state_bytes=state.nbytes,
        is_exact=state.is_exact,
        hosts=hosts,
        slices=slices,
        host_bytes=share.nbytes,
        replicated_bytes=share.replicated,
        ramdisk=size,
        mode=used_mode,
        local_write_seconds=writes[0],
        persistent_write_seconds=writes[1],
        intervals=intervals,
        run_bytes=None if count is None else count * state.nbytes,
        run_checkpoints=count,
        settings=saving.settings,
        refusals=tuple(find_refusals(_configuration(source), saving.settings, settings)),
        commands=commands_for(used_mode, slices, size.setting, saving.settings),
        tiers=tiers,
        remarks=(*share.remarks, *unknown, *_remarks(tiers, total_steps, saving, used_mode)),
    )
    if plot is not None:
        draw(result.tiers, parse(plot, is_written=True))
    return result


def _save_settings(
    mode: Mode,
    intervals: Sequence[SaveInterval],
    words: Mapping[str, str],
    keep: int | None,
    total_steps: int | None,
) -> _SaveSettings:
    """Return the settings for the intervals, after those of the user, and the number of checkpoints."""
    steps = {interval.tier: interval.steps for interval in intervals}
    settings = {**settings_for(mode, steps.get("local"), steps.get("persistent"), keep), **words}
    period, kept_saves = effective_run(mode, steps.get("persistent"), keep, words)
    count = count_kept_checkpoints(total_steps, period, kept_saves) if total_steps and period else None
    return _SaveSettings(settings, count, kept_saves)


def _intervals(
    tiers: Sequence[Tier], mode: Mode, step_seconds: float | None, words: Mapping[str, str]
) -> tuple[SaveInterval, ...]:
    """Return the save interval of each tier. A backup copies every n-th local save."""
    result: list[SaveInterval] = []
    for tier in tiers:
        local = result[0].steps if mode == "multi-tier" and result else None
        set_by_hand = positive_setting(words, LOCAL_PERIOD if tier.name == "local" else period_setting(mode))
        result.append(SaveInterval.of(tier, step_seconds, local or 1, set_by_hand))
    return tuple(result)


def _bandwidth(name: str, value: int | str) -> int:
    """Parse a bandwidth in bytes per second.

    Raises:
        UsageError: The text is not a size, or is so small that a unit is probably missing.
    """
    rate = parse_size_option(name, value)
    if rate < _MIN_BANDWIDTH:
        raise UsageError(
            f"{option(name)} is in bytes per second, and no host is that slow",
            got=value,
            expected="a size with its unit",
            hint=option(name, f"{value}GB" if rate < 1000 else "2GB"),
        )
    return rate


def _configuration(source: Source) -> Location | None:
    """Return the MaxText configuration file that describes the model, if there is one."""
    location = None if isinstance(source, Tree) else parse(source)
    return location if location is not None and location.name.endswith(_YAML) else None


def _remarks(
    tiers: Sequence[Tier], total_steps: int | None, saving: _SaveSettings, mode: Mode
) -> Iterator[str]:
    kept = saving.kept
    for tier in tiers:
        if tier.lost(tier.best_seconds) > _MAX_LOST_FRACTION:
            yield (
                f"{tier.name} saves of {tier.save_seconds:.0f} s and {tier.write_seconds:.0f} s to restore "
                f"leave little of the {tier.failure_seconds:.0f} s between failures, whatever the interval"
            )
    if kept is not None and mode != "persistent":
        yield (
            f"MaxText does not delete persistent checkpoints of {mode} checkpointing: keeping {kept} of "
            f"them requires {action('prune', 'RUN', keep_last=kept)}"
        )
    if total_steps is not None and saving.checkpoints is None:
        yield (
            "the space of a run is unknown without its save interval: pass "
            f"{' and '.join(option(name, declared) for name, declared in _EXAMPLES.items())}, or the "
            "setting"
        )


def _open(settings: Mapping[str, str], **times: float | str | None) -> Iterator[str]:
    """Yield a remark if settings have unknown values."""
    names = [name for name, declared in settings.items() if declared == UNKNOWN]
    lacking = [option(name, _EXAMPLES[name]) for name, declared in times.items() if declared is None]
    if names:
        yield (
            f"{UNKNOWN} in {', '.join(names)} can be computed with {' and '.join(lacking)}; or choose a value"
        )


def _state(source: Source, settings: Sequence[str], reading: Mapping[str, object]) -> TrainingState:
    tree = source if isinstance(source, Tree) else _tree(source, settings, reading)
    known = roles(tree)
    parameters = {path for path in tree.arrays if known.of(path) == "parameter"}
    count = sum(tree.arrays[path].size for path in parameters)
    is_exact = any(known.of(path) == "optimizer" for path in tree.arrays)
    nbytes = tree.nbytes if is_exact else count * BYTES_PER_PARAMETER
    if not nbytes:
        raise FormatError("there is nothing to save: no parameters", got=f"{len(tree.arrays)} arrays")
    return TrainingState(tree, count, nbytes, is_exact)


def _tree(source: LocationLike, settings: Sequence[str], reading: Mapping[str, object]) -> Tree:
    read = read_options(reading)
    config = config_alone(source, read, (".json", *_YAML))
    if config is None:
        return opened(source, read)
    is_maxtexts = config.name.endswith(_YAML)
    return synthetic_model(
        config_from_settings([str(config), *settings]) if is_maxtexts else read_json(config.require_exists())
    )


def _seconds(name: str, value: float | str | None) -> float | None:
    return None if value is None else parse_duration(value, option(name))


def _tiers(
    mode: Mode,
    saves: tuple[float | str | None, float | str | None],
    writes: tuple[float, float],
    failures: tuple[float | str | None, float | str | None],
) -> tuple[Tier, ...]:
    """Return the tiers of a checkpointing mode, local before persistent.

    Args:
        mode: Checkpointing mode.
        saves: How long a local and a persistent save block training; None for as long as `writes`.
        writes: Seconds to write a local and a persistent checkpoint, and also to resume from it.
        failures: Time between failures, and between failures that no ramdisk survives; ten times the first by
            default.
    """
    often, seldom = _seconds("mtbf", failures[0]), _seconds("mtbf_all", failures[1])
    hold_seconds = _seconds("local_save", saves[0]), _seconds("persistent_save", saves[1])
    if often is None:
        if seldom is not None:
            raise UsageError(
                f"{option('mtbf_all')} requires a time between all failures",
                hint=f"also give {option('mtbf', '6h')}",
            )
        return ()
    if seldom is not None and seldom < often:
        raise UsageError(
            "failures that no ramdisk survives cannot be more frequent than all failures",
            got=f"one in {seldom:.0f} s, and one of any kind in {often:.0f} s",
        )
    holds = [save or write for save, write in zip(hold_seconds, writes, strict=True)]
    if mode == "persistent":
        return (Tier("persistent", holds[1], often, writes[1]),)
    return (
        Tier("local", holds[0], often, writes[0]),
        Tier("persistent", holds[1], seldom or 10 * often, writes[1]),
    )


_PNG = ".png"


def check_plot(location: Location, source: Source, *, has_tiers: bool) -> None:
    """Reject an invalid image path before anything is read.

    Args:
        location: Location of the image.
        source: Source of the model.
        has_tiers: Whether there is a curve to draw.

    Raises:
        UsageError: The image cannot be drawn, or its name is invalid.
    """
    if not location.name.endswith((".svg", _PNG)):
        raise UsageError(
            f"{location} is not the name of an image", expected="a name that ends in .svg or .png"
        )
    if location.name.endswith(_PNG):
        require_package("resvg_py", "a PNG image")
    if not has_tiers:
        raise UsageError("there is nothing to plot", hint=f"pass {option('mtbf', '6h')}")
    if location.lexists():
        raise UsageError(f"{location} already exists", hint="choose another name, or remove it")
    read = location_of(source)
    check_output_file(location, "" if read is None else read)


def draw(tiers: Sequence[Tier], location: Location) -> None:
    """Plot lost time against the save interval.

    Raises:
        StorageError, NoSpaceError: The image cannot be drawn or written.
    """
    svg = lost_time_svg(tiers)
    location.put(png_of(svg, FONTS) if location.name.endswith(_PNG) else svg.encode())


class TrainingState(NamedTuple):
    """The size of a training state, from a checkpoint or a configuration.

    Attributes:
        tree: The arrays.
        parameters: Number of parameters of the model.
        nbytes: Bytes of the complete state, including moments.
        is_exact: Whether the arrays are those of a checkpoint; otherwise their sizes are computed from a
            configuration.
    """

    tree: Tree
    parameters: int
    nbytes: int
    is_exact: bool


class HostBytes(NamedTuple):
    """The bytes that one host writes.

    Attributes:
        nbytes: Bytes that the host writes.
        replicated: Bytes in excess of an even share, which other hosts write as well.
        remarks: Remarks about replication.
        is_known: Whether the shardings are known; otherwise an even share is assumed.
    """

    nbytes: int
    replicated: int
    remarks: tuple[str, ...]
    is_known: bool


def host_bytes(state: TrainingState, hosts: int, slices: int, mesh: MeshShape | None) -> HostBytes:
    """Return the number of bytes of each host according to the shardings of the saved state."""
    stored = stored_shardings(state.tree) if state.is_exact else {}
    named = {path: item for path, item in stored.items() if item.mesh}
    even = -(-state.nbytes // hosts)
    if not named:
        unused = f", so {option('mesh')} has no effect" if mesh is not None else ""
        note = f"the sharding is unknown{unused}: an even share per host is assumed"
        return HostBytes(even, 0, (note,), False)
    saved = MeshShape(dict(next(iter(named.values())).mesh))
    used = _with_axes(saved, mesh)
    if used.size % (hosts * slices):
        note = (
            f"the checkpoint was saved on a mesh of {used.size} devices ({used}), which "
            f"{hosts * slices} hosts cannot share evenly: an even share of a slice per host is assumed"
        )
        return HostBytes(even, 0, (note,), False)
    nbytes = _host_bytes(state.tree, named, used, hosts * slices)
    return HostBytes(nbytes, max(0, nbytes - even), (), True)


def _with_axes(saved: MeshShape, mesh: MeshShape | None) -> MeshShape:
    """Return the planned mesh with all axes of the saved mesh; missing axes have length 1."""
    if mesh is None:
        return saved
    unknown = [name for name in mesh.axes if name not in saved.axes]
    if unknown:
        raise UsageError(
            "the checkpoint was saved on a mesh without such axes",
            got=", ".join(unknown),
            expected=f"axes of {saved}",
        )
    return MeshShape({name: mesh.axes.get(name, 1) for name in saved.axes})


def _host_bytes(tree: Tree, stored: Mapping[Path, Sharding], mesh: MeshShape, processes: int) -> int:
    arrays = {keystr(path): array for path, array in tree.arrays.items()}
    specs = {keystr(path): item.spec for path, item in stored.items()}
    return process_loading(arrays, specs, mesh, processes).needed


_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: float | str, name: str = "a duration") -> float:
    """Parse seconds: a number, or text with a unit.

    Args:
        value: A duration such as 90, "90" or "1.5h".
        name: Name for messages.

    Raises:
        UsageError: The text is not a duration, or the duration is not positive.
    """
    text = str(value).strip()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        seconds = float(digits) * _UNITS[text[len(digits) :].strip() or "s"]
    except (ValueError, KeyError):
        seconds = 0.0
    if not (isfinite(seconds) and seconds > 0):
        raise UsageError(f"{name} is not a duration", got=text, expected="such as 90, 4s, 30min, 6h or 7d")
    return seconds
