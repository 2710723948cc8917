"""Options for writing Orbax checkpoints."""

from __future__ import annotations

from ckpttools.codecs.registry import COMPRESSION
from ckpttools.core.memory_limit import parse_size
from ckpttools.core.options import Option, shared
from ckpttools.formats.zarr.chunking import CHUNKS

HELP = """Write any checkpoint as Orbax, or an Orbax checkpoint in another layout, for any model.

SRC may be a file, an item, a step or a run directory. DST gets <step>/<item>, as CheckpointManager and
MaxText lay it out. With --level step DST itself is the step, with --level item the item.

Keys of lists, empty nodes, strings, scalars, typed PRNG keys, custom metadata and the step are kept. Arrays
restore as numpy arrays by default, typed PRNG keys on one device.

Examples:
  $ ckpt convert to-orbax ~/run/checkpoints ~/smaller --compression zstd:9
  $ ckpt convert to-orbax weights.safetensors ~/orbax --item params --no-ocdbt
"""
STORAGE = shared(
    "Layout",
    Option(
        "ocdbt",
        bool,
        True,
        "Store chunks in a few data files with an index (OCDBT), or each chunk in its own file.",
    ),
    Option("zarr3", bool, True, "Store arrays as zarr version 3, or version 2."),
    COMPRESSION,
    CHUNKS,
    Option(
        "target_data_file_size",
        parse_size,
        None,
        "With {ocdbt}, start a new data file at this size. Default: one data file.",
        "SIZE",
    ),
    Option(
        "reference",
        bool,
        None,
        "Share bytes with {source} by hard links where possible, or write all of them. Default: "
        "conversions write all; commands that change the tree share unchanged zarr chunks, unless another "
        "storage option is given. Shared ranges of safetensors keep their order of axes, which loads "
        "slower.",
    ),
)
"""Options for chunk storage."""

OPTIONS = shared(
    "Layout",
    Option(
        "level",
        ("run", "step", "item"),
        "run",
        "What {destination} becomes: a run directory with one step, a step of an existing run, or a single "
        "item.",
    ),
    Option(
        "item",
        str,
        None,
        "Name of the item. Default: as in the run's other steps, else as in {source}, else items.",
        "NAME",
    ),
    Option(
        "as_step",
        int,
        None,
        "Number of the step to write. Default: that of {source}, or 0 if it has none.",
        "N",
    ),
    *STORAGE,
)
