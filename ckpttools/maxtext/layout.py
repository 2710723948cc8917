"""The layout of MaxText's checkpoints: names and axes, which may differ in other versions of MaxText.

The rows of a model's family (`ckpttools.model_families`) define its parameter names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ckpttools.array.tree import Path

Kind = Literal["stacked-training", "stacked-inference", "unstacked-training", "unstacked-inference"]
FlavourName = Literal["linen", "nnx", "nnx-rl"]

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
