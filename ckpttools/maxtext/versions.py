"""Supported versions of MaxText, the layout of their checkpoints, and how they read and store them.

Rows of families (`ckpttools.model_families`) have the layout of the newest version;
`ckpttools.maxtext.family_layouts` has the layouts of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ckpttools.array.tree import Path
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UnknownNameError, did_you_mean

# Path suffixes of variables with a separate class, whose layers are stacked on axis 0: router biases in
# DeepSeek V3 and V4, and the experts of each token in V4's routing tables.
_BIAS_V3: Path = ("DeepSeekMoeBlock_0", "MoeBlock_0", "gate", "bias")
_BIAS_V4: Path = ("mlp", "MoeBlock_0", "gate", "bias")
_TABLE_V4: Path = ("mlp", "MoeBlock_0", "tid2eid")


@dataclass(frozen=True, slots=True)
class Version:
    """A version of MaxText.

    Attributes:
        name: The value of the option `maxtext`.
        orbax: The API that reads the user's paths. "v0" reads exactly the directory of the item; "v1" reads
            its parent step, so a trailing `/items` is removed first.
        parameters_need_checkpointing: Whether load_parameters_path is refused if enable_checkpointing is
            false, as load_full_state_path is in all versions.
        renames_before_deletion: Whether checkpoint_todelete_subdir may be set.
        learned_variables: Whether variables with a separate class, such as router biases, must be among the
            parameters.
        variables: Path suffixes of variables with a separate class; their layers are always on axis 0. Other
            versions have parameters at these paths.
        stacked_by_kind: Families with a stack for each kind of layer in their cycle; other models with linear
            attention have one for each position. Model names begin with these names.
        absent_models: Names of unsupported models.
        has_fp8: Whether the version supports FP8 weights with scales.
    """

    name: str
    orbax: Literal["v0", "v1"]
    parameters_need_checkpointing: bool
    renames_before_deletion: bool
    learned_variables: bool
    variables: tuple[Path, ...] = ()
    stacked_by_kind: tuple[str, ...] = ()
    absent_models: frozenset[str] = frozenset()
    has_fp8: bool = False


NEWEST = "0.2.5"
VERSIONS: Mapping[str, Version] = {
    item.name: item
    for item in (
        Version(
            NEWEST,
            orbax="v1",
            parameters_need_checkpointing=False,
            renames_before_deletion=False,
            learned_variables=True,
            variables=(_BIAS_V3, _BIAS_V4, _TABLE_V4),
            stacked_by_kind=("qwen3-next",),
            has_fp8=True,
        ),
        Version(
            "e591f30",  # main on 22 August 2026
            orbax="v0",
            parameters_need_checkpointing=True,
            renames_before_deletion=True,
            learned_variables=False,
            variables=(_BIAS_V4, _TABLE_V4),
            absent_models=frozenset(
                {
                    "deepseek3-671b-lineage",
                    "maxtext-omni-gemma3-qwen3",
                    "qwen3.5-35b-a3b-fp8",
                    "qwen3.5-35b-fp8",
                    "qwen3.5-397b-a17b-fp8",
                    "weaver-max",
                    "weaver-mini",
                }
            ),
        ),
    )
}


def version_called(name: str) -> Version:
    """Return the MaxText version with this name.

    Raises:
        UnknownNameError: The version is unknown.
    """
    if name not in VERSIONS:
        raise UnknownNameError(
            f"unknown MaxText version {name!r}",
            expected=f"one of {', '.join(VERSIONS)}",
            hint=did_you_mean(name, VERSIONS) or "use the nearest version",
        )
    return VERSIONS[name]


Kind = Literal["stacked-training", "stacked-inference", "unstacked-training", "unstacked-inference"]
FlavorName = Literal["linen", "nnx", "nnx-rl"]

# Keys around the parameters: Linen's collections, the NNX model, the model in reinforcement learning, and the
# variable after each path.
PARAMS = "params"
MODEL, BASE, VALUE = "model", "base", "value"
# Keys next to the parameters: the optimizer state, and possible locations of the step.
OPTIMIZER: Path = ("opt_state",)
STEP: Path = ("step",)
STEPS: tuple[Path, ...] = (STEP, ("optimizer", "step"), ("optimizer", "step", VALUE))
# Key where NNX stores all variables that are not plain parameters: random states, but also learned variables.
NNX_AUX = "nnx_aux"
AUXILIARY: Path = (NNX_AUX, MODEL)
# An nnx.Variable with a class of its own, such as MoEBiasVar, is in a collection named after the class.
COLLECTION = "Var"

# Names of the Hugging Face arrays that a checkpoint keeps for the reverse conversion, as in the plan that
# writes them (`ckpttools.formats.sidecar`).
CARRIED_PREFIX = "hf/carried/"

# The axis of token rows.
VOCAB = "vocab"

# Keys below the decoder: numbered or stacked layers; see `ckpttools.maxtext.layers` for the layouts.
DECODER = "decoder"
LAYERS, LAYER = "layers", "layer"
BLOCKS, LOCAL, GLOBAL = "scanned_blocks", "local_layers", "global_layer"
REMAINDER = "_remainder"
PIPELINE = "pipeline_module"
FINAL_NORM = "decoder_norm"
# The default axis on which layers of parameters are stacked, and the axes that MaxText supports. Norms have
# one axis, so stacked norms have two.
SCAN_AXIS, SCAN_AXES = 1, (0, 1)
# The layer axis of all other arrays, such as random states and variables with a class of their own.
STATE_AXIS = 0
# Stacking notes in the custom metadata.
SCAN_LAYERS = "scan_layers"
# The entry for adapters in the custom metadata, and its pattern of modules.
LORA_KEY, MODULE_PATH = "lora", "lora_module_path"
# Names of adapter factors contain this in upper or lower case.
FACTOR = "lora_"

EMBEDDING: Path = ("token_embedder", "embedding")
HEAD: Path = (DECODER, "logits_dense", "kernel")
# The arrays in which MaxText has one row per token, and the axis of those rows.
VOCABULARY: Mapping[Path, int] = {EMBEDDING: 0, HEAD: 1}
