"""The cases of maxtext_loading_script.py: paths that MaxText is given, and runs that it may go on with."""

from __future__ import annotations

RULES = ("load_parameters_path", "load_full_state_path")
PATHS = (
    "full/checkpoints/5/items",
    "full/checkpoints/5",
    "full/checkpoints/5/",
    "full/checkpoints",
    "converted/checkpoints/0/items",
    "converted/checkpoints/0",
    "parameters/checkpoints/1/items",
    "other/checkpoints/3/default",
    "other/checkpoints/3",
    "bare",
    "bare/items",
    "v1/4",
    "v1/4/items",
    "copied/item",
    "copied_items/items",
    "cut/checkpoints/5/items",
    "cut/checkpoints/5",
    "unnoted/checkpoints/5",
    "unnoted/checkpoints/5/items",
    "begun/checkpoints/5.orbax-checkpoint-tmp",
    "absent/items",
    "tunix/3/model_params",
)
RUNS = (
    "full",
    "converted",
    "parameters",
    "other",
    "cut",
    "unnoted",
    "begun",
    "named",
    "empty_step",
    "absent",
)
