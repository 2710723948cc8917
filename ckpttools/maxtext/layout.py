"""How MaxText's checkpoints are laid out: names and axes, which other versions of MaxText may have otherwise.

What the parameters of a model are called says its family's rows (`ckpttools.model_families`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ckpttools.array.tree import Path

Kind = Literal["stacked-training", "stacked-inference", "unstacked-training", "unstacked-inference"]
FlavourName = Literal["linen", "nnx", "nnx-rl"]

# Around the parameters: Linen's collections, the model of NNX, that of reinforcement learning, and the
# variable behind each path.
PARAMS = "params"
MODEL, BASE, VALUE = "model", "base", "value"
# Beside them: the state of the optimizer, and the places that the step has.
OPTIMIZER: Path = ("opt_state",)
STEP: Path = ("step",)
STEPS: tuple[Path, ...] = (STEP, ("optimizer", "step"), ("optimizer", "step", VALUE))
# Where NNX keeps what its model has beside parameters: random states, but also learned variables.
NNX_AUX = "nnx_aux"
AUXILIARY: Path = (NNX_AUX, MODEL)
# An nnx.Variable of a class of its own, such as MoEBiasVar, lies in a collection that is named as the class.
COLLECTION = "Var"

# Names of the Hugging Face arrays that a checkpoint carries for the reverse conversion, as in the plan that
# writes them (`ckpttools.formats.sidecar`).
CARRIED_PREFIX = "hf/carried/"

# The axis of a model's tokens, in rows.
VOCAB = "vocab"

# Below the decoder: layers by number, or stacked; `ckpttools.maxtext.layers` has the ways.
DECODER = "decoder"
LAYERS, LAYER = "layers", "layer"
BLOCKS, LOCAL, GLOBAL = "scanned_blocks", "local_layers", "global_layer"
REMAINDER = "_remainder"
PIPELINE = "pipeline_module"
FINAL_NORM = "decoder_norm"
# The axis of parameters on which layers are stacked, if nothing says otherwise, and those that MaxText knows:
# norms have one axis, so the stacked ones have two.
SCAN_AXIS, SCAN_AXES = 1, (0, 1)
# The axis of everything else that layers have, such as random states and variables of a class of their own.
STATE_AXIS = 0
# What the custom metadata says of stacking.
SCAN_LAYERS = "scan_layers"
# Where it speaks of an adapter, and there, of which modules: a pattern.
LORA_KEY, MODULE_PATH = "lora", "lora_module_path"
# In names of its factors, in whichever case.
FACTOR = "lora_"

EMBEDDING: Path = ("token_embedder", "embedding")
HEAD: Path = (DECODER, "logits_dense", "kernel")
# The arrays in which MaxText has a row for each token, and the axis of these rows.
VOCABULARY: Mapping[Path, int] = {EMBEDDING: 0, HEAD: 1}
