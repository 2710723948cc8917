"""Options for writing Orbax checkpoints."""

from __future__ import annotations

from ckpttools.core.budget import parse_size
from ckpttools.core.options import Option
from ckpttools.formats.zarr.given_chunks import CHUNKS
from ckpttools.formats.zarr.options import COMPRESSION

HELP = """Write any checkpoint as Orbax, or an Orbax checkpoint in another layout, for any model.

SRC may be a file, an item, a step or a run directory. DST gets <step>/<item>, as CheckpointManager and
MaxText lay it out. With --level step DST itself is the step, with --level item the item.

Keys of lists, empty nodes, strings, scalars, typed PRNG keys, custom metadata and the step are kept. Arrays
restore as numpy arrays by default, typed PRNG keys on one device.

Example:
  ckpt convert to-orbax ~/run/checkpoints ~/smaller --compression zstd:9
  ckpt convert to-orbax weights.safetensors ~/orbax --item params --no-ocdbt
"""
STORAGE = (
    Option(
        "ocdbt",
        bool,
        True,
        "Write few data files with an index, or a directory for each array and a file for each chunk.",
    ),
    Option("zarr3", bool, True, "Write arrays as zarr v3, or as v2."),
    COMPRESSION,
    CHUNKS,
    Option(
        "target_data_file_size",
        parse_size,
        None,
        "With OCDBT, start a new data file at this size (default: one file).",
        "SIZE",
    ),
    Option(
        "reference",
        bool,
        None,
        "Share bytes with SRC by hard links if possible, or write all bytes. By default, "
        "commands that change the tree share unchanged zarr chunks, unless another "
        "option sets their encoding; ckpt convert writes all. Ranges of safetensors keep "
        "their order of axes, which loads slower.",
    ),
)
"""Options for how chunks are stored."""

OPTIONS = (
    Option(
        "level",
        ("run", "step", "item"),
        "run",
        "Write DST as a run directory with one step, as a step of an existing run, or as a single item.",
    ),
    Option(
        "item",
        str,
        None,
        "Name of the item (default: as in the run's other steps, as in SRC, or items).",
        "NAME",
    ),
    Option(
        "as_step",
        int,
        None,
        "Step number to write (default: the step of SRC, or 0).",
        "N",
    ),
    *STORAGE,
)
