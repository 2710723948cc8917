"""Check whether a checkpoint has what MaxText looks for: kind, flavor, layers and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ckpttools.array.tree import Empty, Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import action
from ckpttools.core.text import plural
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.loading.report import Expected, Problem, RunSetting
from ckpttools.maxtext.loading.settings import DEFAULT, DEFAULTS, Settings
from ckpttools.maxtext.native_fp8 import IGNORED_SCALES_REMARK, scale_pairs
from ckpttools.maxtext.variables import misplaced_variables
from ckpttools.maxtext.versions import (
    AUXILIARY,
    COLLECTION,
    DECODER,
    EMBEDDING,
    GLOBAL,
    HEAD,
    LAYERS,
    LOCAL,
    LORA_KEY,
    OPTIMIZER,
    PARAMS,
    Version,
)
from ckpttools.maxtext.view import MaxTextView, view_of
from ckpttools.model_families.registry import family_of

_MODEL_SETTINGS = ("model_name", "base_emb_dim", "base_num_decoder_layers", "vocab_size")
# Array names and the settings for their axes, without the axes on which layers are stacked. A query may be
# longer than a head because of rotary dimensions or a gate.
_AXES: Mapping[Path, Sequence[str | None]] = {
    ("self_attention", "query", "kernel"): ("base_emb_dim", "base_num_query_heads", None),
    ("self_attention", "key", "kernel"): ("base_emb_dim", "base_num_kv_heads", "head_dim"),
}


@dataclass(frozen=True, slots=True)
class WeightsCheck:
    """The result of checking a checkpoint.

    Attributes:
        problems: The reasons why MaxText fails, or loads something else.
        notes: Other notes for the user.
    """

    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def check_weights(
    tree: Tree, expected: Expected, key: str, settings: Settings, version: Version
) -> WeightsCheck:
    """Check what MaxText would miss in a checkpoint.

    Args:
        tree: The tree of the item that MaxText reads.
        expected: The part of the tree that is expected.
        key: The key of the parameters.
        settings: The settings of the run.
        version: The version of MaxText.
    """
    if expected == "adapter":
        return WeightsCheck(tuple(_adapter_problems(tree, settings)), ())
    if settings.flag("lora.enable_lora") and expected == "full state":
        return WeightsCheck((), ("with lora.enable_lora only adapters and the step are loaded from it",))
    where = str(tree.metadata.location)
    problems = [*_nesting_problems(tree, key, where)]
    notes: list[str] = []
    if not problems:
        view = view_of(tree)
        problems += [*_state_problems(tree, view, expected, where), *_layer_problems(view, settings, where)]
        problems += unread_layouts(view, expected, version, _model_name(settings), where)
        problems += _size_problems(view, settings)
        notes += _notes(view, expected, settings)
    return WeightsCheck(tuple(problems), tuple(notes))


def _model_name(settings: Settings) -> str:
    """Return the name of the model, or of its decoder block, in a common spelling."""
    name = settings.text("model_name")
    if name != DEFAULT or settings["decoder_block"].source == "default":
        return name
    return settings.text("decoder_block").replace("_", "-")


def _nesting_problems(tree: Tree, key: str, where: str) -> Iterator[Problem]:
    """Yield a problem if parameters are not where MaxText looks for them."""
    above = (PARAMS, PARAMS) if key == PARAMS else (key,)
    result = [path for path in tree.arrays if path[: len(above)] == above]
    if any(not _is_adapter(path) for path in result):
        return
    view = view_of(tree)
    if any(map(_is_adapter, tree.arrays)):
        yield Problem(
            f"{where} contains only adapters, without the parameters of the model",
            "set it as lora.lora_restore_path",
        )
        return
    got = f"in the flavor {view.flavor.name}" if view.flavor.name else "differently"
    tree_path = next(iter(view.homes.values()), None)
    example = f", such as {keystr(tree_path)}" if tree_path else ""
    yield Problem(
        f"MaxText looks for parameters below {keystr(above)} and misses all: they are nested {got}{example}",
        f"{action('strip_optimizer', where, 'DST', flavor='linen')} writes this nesting"
        if view.is_maxtext
        else f"{action('inspect', where)} shows the contents",
    )


def _is_adapter(path: Path) -> bool:
    return "lora" in keystr(path).lower()


def _state_problems(tree: Tree, view: MaxTextView, expected: Expected, where: str) -> Iterator[Problem]:
    if expected == "full state" and view.optimizer is None:
        if isinstance(tree.leaves.get(OPTIMIZER), Empty):
            yield Problem(
                f"the full state is expected, but {where} contains only parameters: its opt_state is "
                "empty, which"
                " MaxText does not accept (TypeError: Type mismatch at key path ('opt_state',))",
                "set it as load_parameters_path, and keep it outside the run's own directory",
            )
        else:
            yield Problem(
                f"the full state is expected, but {where} contains only parameters: MaxText starts with a "
                f"new "
                "optimizer, without a warning",
                "set it as load_parameters_path if that is intended",
            )


def _layer_problems(view: MaxTextView, settings: Settings, where: str) -> Iterator[Problem]:
    """Yield a problem if layers are not stacked as `scan_layers` requires."""
    if not view.is_maxtext or _is_pipelined(settings):
        return
    setting = settings["scan_layers"]
    scans = settings.flag("scan_layers")
    if scans != view.is_stacked:
        are = "stacked" if view.is_stacked else "single"
        command, other = ("unstack", "true") if view.is_stacked else ("stack", "false")
        yield Problem(
            f"scan_layers is {_setting_text(setting)}, but the layers of {where} are {are}",
            f"set scan_layers={other}, or {action(command, where, 'DST')}",
        )
        return
    axis = settings.number("param_scan_axis")
    if view.is_stacked and not view.is_axis_open and axis is not None and view.scan_axis != axis:
        yield Problem(
            f"param_scan_axis is {_setting_text(settings['param_scan_axis'])}, but layers are stacked "
            "on axis "
            f"{view.scan_axis}",
            f"set param_scan_axis={view.scan_axis}",
        )


def _is_pipelined(settings: Settings) -> bool:
    return any((settings.number(f"{mesh}_pipeline_parallelism") or 1) != 1 for mesh in ("ici", "dcn"))


def _setting_text(setting: RunSetting) -> str:
    value = str(setting.value).lower() if isinstance(setting.value, bool) else str(setting.value)
    return f"{value} ({setting.source})"


def _is_sized(settings: Settings) -> bool:
    return (
        any(settings.is_declared(name) for name in _MODEL_SETTINGS)
        and settings.number("global_parameter_scale") == 1
    )


def _size_problems(view: MaxTextView, settings: Settings) -> Iterator[Problem]:
    """Yield model settings that contradict the sizes of arrays."""
    if not view.is_maxtext or not _is_sized(settings):
        return
    result = _measure_sizes(view)
    for name, sizes in result.items():
        declared = settings.number(name)
        # Models with several kinds of layers have several sizes, and this setting has only one of them.
        if settings.is_declared(name) and declared is not None and declared not in sizes:
            got = ", ".join(map(str, sorted(sizes)))
            yield Problem(
                f"{name} is {_setting_text(settings[name])}, but the checkpoint has {got}", _model_hint(name)
            )


def _model_hint(name: str) -> str:
    if name == "vocab_size":
        return (
            f"check model_name; {action('hf_to_maxtext', pad_vocab=True)} adds the rows that a model expects"
        )
    return "check model_name, or set the size with override_model_config=true"


def _measure_sizes(view: MaxTextView) -> Mapping[str, set[int]]:
    """Map settings to the sizes of arrays."""
    result: dict[str, set[int]] = {}

    def note(name: str, size: int) -> None:
        result.setdefault(name, set()).add(size)

    if (table := view.parameters.get(EMBEDDING)) is not None and len(table.shape) == 2:
        note("vocab_size", table.shape[0])
        note("base_emb_dim", table.shape[1])
    elif (head := view.parameters.get(HEAD)) is not None and len(head.shape) == 2:
        note("vocab_size", head.shape[1])
    if view.layers:
        note("base_num_decoder_layers", sum(group.length for group in view.layers))
    for path, array in view.decoder.items():
        names = _AXES.get(path[-3:])
        shape = _single_layer_shape(view, path, array.shape)
        if names and len(shape) == len(names):
            for name, size in zip(names, shape, strict=True):
                if name:
                    note(name, size)
    return result


def _single_layer_shape(view: MaxTextView, path: Path, shape: Sequence[int]) -> Sequence[int]:
    axes = next((axes for key, axes in view.stacked_keys.items() if path[: len(key)] == key), 0)
    start = view.scan_axis or 0
    return (*shape[:start], *shape[start + axes :]) if axes else shape


def _notes(view: MaxTextView, expected: Expected, settings: Settings) -> Iterator[str]:
    if expected == "parameters" and view.optimizer is not None:
        yield "it is a full state, of which only the parameters are loaded, without optimizer and step"
    if not view.is_maxtext:
        yield "it has no layers with MaxText's names, so layers were not compared with the settings"
        return
    if expected == "parameters" and scale_pairs(view.named):
        yield (
            "it is in FP8 with scales, which pre-training "
            f"multiplies when it loads them; {IGNORED_SCALES_REMARK}"
        )
    if _is_pipelined(settings):
        yield "with pipeline parallelism layers have a different layout, so scan_layers was not compared"
    if not _is_sized(settings):
        yield "no model_name and no sizes are set, so sizes were not compared"


def _adapter_problems(tree: Tree, settings: Settings) -> Iterator[Problem]:
    """Yield the problems of `lora.lora_restore_path`."""
    where = str(tree.metadata.location)
    adapters = [path for path in tree.arrays if _is_adapter(path)]
    if not any(path[0] == DECODER for path in adapters):
        there = f"there are adapters below {keystr(adapters[0][:2])}" if adapters else "there are none"
        yield Problem(
            f"MaxText looks for adapters below {DECODER}, but in {where} {there}: it fails with 'was not "
            "restored from checkpoint'",
            "use the item that its fine-tuning writes: STEP/model_params",
        )
    declared = tree.metadata.custom.get(LORA_KEY)
    for name in ("lora_rank", "lora_alpha"):
        configured = settings.number(f"lora.{name}")
        stored = declared.get(name) if isinstance(declared, Mapping) else None
        if configured and isinstance(stored, int | float) and stored != configured:
            yield Problem(
                f"lora.{name} is {_setting_text(settings[f'lora.{name}'])}, but the checkpoint has {stored}",
                f"leave lora.{name} out: MaxText reads it from the checkpoint",
            )


# An array that only linear attention has, in models whose layers newer versions stack by kind.
_DECAY = "A_log"


def unread_layouts(
    view: MaxTextView, expected: Expected, version: Version, model: str, where: str
) -> Iterator[Problem]:
    """Yield the parts of a checkpoint whose layout this version does not read.

    Args:
        view: The view of the checkpoint.
        expected: The part of the checkpoint that is read.
        version: The version of MaxText.
        model: The name of the model or of its blocks, as in the settings.
        where: The location of the checkpoint.
    """
    if expected == "parameters":
        yield from _variable_problems(view, version, where)
        rules = _NEWER if version.learned_variables else _OLDER
        for unread in rules:
            yield from unread(view, version, where)
    yield from _linear_attention_problems(view, version, model, where)


def _auxiliary_problems(view: MaxTextView, version: Version, where: str) -> Iterator[Problem]:
    auxiliary = [path for path in view.homes.values() if path[:2] == AUXILIARY]
    if auxiliary:
        yield Problem(
            f"{plural(len(auxiliary), 'array')} of the model are not loaded: load_parameters_path does not "
            f"read {keystr(auxiliary[0])}",
            f"{action('strip_optimizer', where, 'DST')} moves them to the parameters",
        )


def _variable_problems(view: MaxTextView, version: Version, where: str) -> Iterator[Problem]:
    """Yield variables whose layers are on a different axis in this version."""
    for path in misplaced_variables(view, version):
        got = view.arrays[view.homes[path]].shape
        yield Problem(
            f"{keystr(path)} has the shape {got}: MaxText {version.name} expects {got[::-1]}",
            _move_hint(version, where),
        )


def _move_hint(version: Version, where: str, family: str | None = None) -> str:
    return action("remap", where, "DST", maxtext=version.name, family=family)


def _collection_problems(view: MaxTextView, version: Version, where: str) -> Iterator[Problem]:
    collections = [path for path in view.homes.values() if str(path[1:2]).find(COLLECTION) >= 0]
    if collections:
        yield Problem(
            f"MaxText {version.name} does not read {keystr(collections[0][:2])}, and so lacks "
            f"{plural(len(collections), 'array')} of the model there",
            "use a newer MaxText",
        )


_NEWER: tuple[Callable[[MaxTextView, Version, str], Iterator[Problem]], ...] = (_auxiliary_problems,)
_OLDER = (_collection_problems,)


def _linear_attention_problems(
    view: MaxTextView, version: Version, model: str, where: str
) -> Iterator[Problem]:
    """Yield a problem if layers are stacked by position instead of kind, or vice versa."""
    stacks = sorted(keystr(key) for key in view.stacked_keys if key[:1] == (LAYERS,))
    if not stacks or not any(path[-1] == _DECAY for path in view.decoder):
        return
    by_kind = any(name.endswith((LOCAL, GLOBAL)) for name in stacks)
    known = _carried_model(view) if model == DEFAULTS["model_name"] else model
    if known is None and version.stacked_by_kind and not by_kind:
        kinds = ", ".join(version.stacked_by_kind)
        yield Problem(
            f"the model is unknown, and its layers are stacked below {', '.join(stacks)}: MaxText "
            f"{version.name} loads this layout for other models with linear attention, but not for {kinds}",
            "set model_name or decoder_block",
        )
        return
    # Without a name, layers stacked by kind belong to a model that some version stacks this way.
    wants_kinds = bool(
        version.stacked_by_kind if known is None else known.startswith(version.stacked_by_kind)
    )
    if by_kind != wants_kinds:
        expected = f"{LAYERS}/{LOCAL} and {LAYERS}/{GLOBAL}" if wants_kinds else f"{LAYERS}/layer_N"
        # Stacks by position match several families.
        named = known or ""
        family = next((item for item in version.stacked_by_kind if named.startswith(item)), None)
        yield Problem(
            f"layers are stacked below {', '.join(stacks)}, but MaxText {version.name} expects {expected}",
            _move_hint(version, where, family),
        )


def _carried_model(view: MaxTextView) -> str | None:
    """Return the family of the checkpoint's own configuration; None if there is none."""
    try:
        return family_of(view.metadata.config or {}, CONFIG).name
    except CheckpointError:
        return None
