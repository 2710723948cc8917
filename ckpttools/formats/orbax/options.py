"""What a user may say of how Orbax checkpoints are written."""

from __future__ import annotations

from ckpttools.core.budget import parse_size
from ckpttools.core.options import Option
from ckpttools.formats.zarr.given_chunks import CHUNKS
from ckpttools.formats.zarr.options import COMPRESSION

HELP = """Write any checkpoint as Orbax, or an Orbax checkpoint in another layout, whatever the model.

SRC may be a file, an item, a step or a run directory. DST gets <step>/<item>, as CheckpointManager and
MaxText lay it out. With --level step DST itself is the step, with --level item the item.

Keys of lists, empty nodes, strings, scalars, typed PRNG keys, custom metadata and the step are kept. Arrays
restore as numpy's where no target says otherwise, typed PRNG keys on one device.

Example:
  ckpt convert to-orbax ~/run/checkpoints ~/smaller --compression zstd:9
  ckpt convert to-orbax weights.safetensors ~/orbax --item params --no-ocdbt
"""
STORAGE = (
    Option(
        "ocdbt",
        bool,
        True,
        "Few data files under an index, or a directory for each array and a file for each chunk.",
    ),
    Option("zarr3", bool, True, "Version of zarr that arrays are in."),
    COMPRESSION,
    CHUNKS,
    Option(
        "target_data_file_size",
        parse_size,
        None,
        "With OCDBT, begin another data file at this size; without it there is one.",
        "SIZE",
    ),
    Option(
        "reference",
        bool,
        None,
        "Share bytes with SRC by hard links where possible, or write all of them. Without "
        "either, commands that change the tree share zarr chunks that stay as they are, unless another "
        "option says how they are to be stored; ckpt convert writes all. Ranges of safetensors are shared in "
        "their order of axes, which loads slower.",
    ),
)
"""How chunks are stored."""

OPTIONS = (
    Option(
        "level",
        ("run", "step", "item"),
        "run",
        "What DST becomes: a run directory with one step, a step of a run that is there, or a single item.",
    ),
    Option(
        "item",
        str,
        None,
        "Name of the item; without it that of the steps beside, that in SRC, or items.",
        "NAME",
    ),
    Option(
        "as_step",
        int,
        None,
        "Number of the step that is written; without it that of SRC, or 0 where it has none.",
        "N",
    ),
    *STORAGE,
)
