"""From MaxText back to Hugging Face: open, map, plan. The command line does nothing but call this."""

from __future__ import annotations

from pathlib import Path

from ckpttools.api.conversion import Conversion, Resources
from ckpttools.formats.adapters import refuse_adapter
from ckpttools.formats.registry import open_tree
from ckpttools.formats.safetensors.write import SafetensorsWriter
from ckpttools.formats.sidecar import Beside, Companions
from ckpttools.maxtext.direction import refuse_hugging_face
from ckpttools.maxtext.model import CONFIG
from ckpttools.maxtext.model_files import ModelFiles, config_bytes
from ckpttools.maxtext.to_hf import TEXT, ToHuggingFace, require_towers, to_huggingface
from ckpttools.maxtext.vocabulary import refuse_learned

# Files that only a model with towers has.
_OF_TOWERS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def plan_to_huggingface(
    source: str | Path,
    options: ToHuggingFace | None = None,
    resources: Resources | None = None,
    writer: SafetensorsWriter | None = None,
) -> Conversion:
    """Plans a conversion without writing anything, or reading any array but the rows that are cut off.

    Args:
        source: a run directory, a step or an item, of any kind and flavour.
        options: how to convert.
        resources: what it may take.
        writer: how safetensors are split; None for shards of 5 GB.

    Raises:
        CheckpointError: the source cannot be read, nothing tells which model it is, its arrays are not
            those of that model, it has towers that are not there, or rows that are cut off are not zero;
            or the work does not fit into the memory.
    """
    options, resources = options or ToHuggingFace(), resources or Resources()
    tree = open_tree(Path(source), options.read)
    refuse_hugging_face(tree)
    refuse_adapter(tree)
    files = ModelFiles.of(tree, options.like)
    model = to_huggingface(tree, options, files)
    require_towers(model, files, tree.metadata.place)
    made = {} if model.config is None else {CONFIG: config_bytes(files, model.config)}
    unwanted = _OF_TOWERS if options.spelling == TEXT else ()
    copied = {name: file for name, file in files.companions.items() if name not in (*made, *unwanted)}
    beside = Beside(writer or SafetensorsWriter(), Companions(copied), made=made)
    conversion = resources.plan(model.tree, beside, model.notes)
    # The only place where a plan reads data: what is cut off is lost, and no header tells whether that is
    # padding. Only once the plan is made, which refuses what does not fit into the memory.
    if options.padding_rows is None:
        held = conversion.plan.held_bytes
        refuse_learned(model.surplus, tree.metadata.place, memory=resources.memory, reserved=held)
    return conversion
