"""Layouts that one version of MaxText writes and another does not read: found by loading with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from shlex import quote

from ckpttools.array.tree import keystr
from ckpttools.core.errors import CheckpointError
from ckpttools.core.text import plural
from ckpttools.families.registry import family_of
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.layout import AUXILIARY, COLLECTION, GLOBAL, LAYERS, LOCAL
from ckpttools.maxtext.loading.report import Problem, Wanted
from ckpttools.maxtext.loading.settings import DEFAULTS
from ckpttools.maxtext.variables import misplaced_variables
from ckpttools.maxtext.versions import Version
from ckpttools.maxtext.view import MaxTextView

# What linear attention alone has, in models whose layers newer versions stack by kind.
_DECAY = "A_log"


def unread_layouts(
    view: MaxTextView, wanted: Wanted, version: Version, model: str, where: str
) -> Iterator[Problem]:
    """What of a checkpoint another version has written otherwise than this one reads it.

    Args:
        view: of the checkpoint.
        wanted: what of it is read.
        version: of MaxText.
        model: its name, or that of its blocks, as the settings have it.
        where: place of the checkpoint.
    """
    if wanted == "parameters":
        yield from _variables(view, version, where)
        rules = _NEWER if version.learned_variables else _OLDER
        for unread in rules:
            yield from unread(view, version, where)
    yield from _linear_attention(view, version, model, where)


def _beside_parameters(view: MaxTextView, version: Version, where: str) -> Iterator[Problem]:
    beside = [path for path in view.homes.values() if path[:2] == AUXILIARY]
    if beside:
        yield Problem(
            f"{plural(len(beside), 'array')} of the model: load_parameters_path does not look where "
            f"{keystr(beside[0])} is",
            f"`ckpt strip-optimizer {quote(where)} DST` puts it among the parameters",
        )


def _variables(view: MaxTextView, version: Version, where: str) -> Iterator[Problem]:
    """Variables among the parameters with their layers on another axis than this version has them."""
    for path in misplaced_variables(view, version):
        got = view.arrays[view.homes[path]].shape
        yield Problem(
            f"{keystr(path)} has the shape {got}: MaxText {version.name} wants {got[::-1]}",
            _moved(version, where),
        )


def _moved(version: Version, where: str, family: str = "") -> str:
    return f"`ckpt remap {quote(where)} DST --maxtext {version.name}{family}`"


def _in_a_collection(view: MaxTextView, version: Version, where: str) -> Iterator[Problem]:
    beside = [path for path in view.homes.values() if str(path[1:2]).find(COLLECTION) >= 0]
    if beside:
        yield Problem(
            f"MaxText {version.name} does not look into {keystr(beside[0][:2])}, and misses "
            f"{plural(len(beside), 'array')} of the model there",
            "take a newer MaxText",
        )


_NEWER: tuple[Callable[[MaxTextView, Version, str], Iterator[Problem]], ...] = (_beside_parameters,)
_OLDER = (_in_a_collection,)


def _linear_attention(view: MaxTextView, version: Version, model: str, where: str) -> Iterator[Problem]:
    """Models of linear and full attention in turn: positions of the cycle, or kinds of layers."""
    stacks = sorted(keystr(key) for key in view.stacked_keys if key[:1] == (LAYERS,))
    if not stacks or not any(path[-1] == _DECAY for path in view.decoder):
        return
    by_kind = any(name.endswith((LOCAL, GLOBAL)) for name in stacks)
    known = _carried_model(view) if model == DEFAULTS["model_name"] else model
    if known is None and version.stacked_by_kind and not by_kind:
        kinds = ", ".join(version.stacked_by_kind)
        yield Problem(
            f"nothing says which model this is, whose layers are stacked below {', '.join(stacks)}: MaxText "
            f"{version.name} loads that of others with linear attention, but not of {kinds}",
            "set model_name or decoder_block",
        )
        return
    # Without a name, layers stacked by kind are of a model that some version stacks so.
    wants_kinds = bool(
        version.stacked_by_kind if known is None else known.startswith(version.stacked_by_kind)
    )
    if by_kind != wants_kinds:
        wanted = f"{LAYERS}/{LOCAL} and {LAYERS}/{GLOBAL}" if wants_kinds else f"{LAYERS}/layer_N"
        # Stacks below positions fit several families.
        named = known or ""
        family = next((f" --family {each}" for each in version.stacked_by_kind if named.startswith(each)), "")
        yield Problem(
            f"layers are stacked below {', '.join(stacks)}, and MaxText {version.name} looks for {wanted}",
            _moved(version, where, family),
        )


def _carried_model(view: MaxTextView) -> str | None:
    """The family of the configuration that was carried along, None where none says one."""
    try:
        return family_of(view.metadata.config or {}, CONFIG).name
    except CheckpointError:
        return None
