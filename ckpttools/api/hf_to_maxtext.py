"""From Hugging Face to MaxText: open, map, plan. The command line does nothing but call this."""

from __future__ import annotations

from pathlib import Path

from ckpttools.api.conversion import Conversion, Resources
from ckpttools.formats.adapters import refuse_adapter
from ckpttools.formats.base import COMPANIONS, RECORD
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.formats.registry import open_tree
from ckpttools.formats.sidecar import Beside, Companions
from ckpttools.maxtext.direction import refuse_maxtext
from ckpttools.maxtext.model_files import companions_of, record
from ckpttools.maxtext.to_maxtext import ToMaxText, to_maxtext


def plan_to_maxtext(
    source: str | Path,
    options: ToMaxText | None = None,
    resources: Resources | None = None,
    writer: OrbaxWriter | None = None,
) -> Conversion:
    """Plans a conversion without reading any array or writing anything.

    Args:
        source: directory with safetensors and `config.json`, or one of its safetensors files.
        options: how to convert.
        resources: what it may take.
        writer: how Orbax stores it; None for `0/items` in one uncompressed data file.

    Raises:
        CheckpointError: the source cannot be read or does not match its configuration; or the work does
            not fit into the memory.
    """
    options, resources = options or ToMaxText(), resources or Resources()
    writer = writer or OrbaxWriter(step=0, item="items")
    tree = open_tree(Path(source), options.read)
    refuse_maxtext(tree)
    refuse_adapter(tree)
    made = to_maxtext(tree, options)
    place = f"{writer.step or 0}/{writer.item}/{COMPANIONS}"
    written_down = {RECORD: record(made.spelling, options.model.rope_layout)}
    beside = Beside(writer, Companions(companions_of(tree).files, made.carried), place, written_down)
    state = beside.with_companions(made.state)
    return resources.plan(state, beside, made.notes)
