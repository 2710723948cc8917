"""Options for writing zarr arrays."""

from __future__ import annotations

from ckpttools.codecs.registry import parse_compression
from ckpttools.core.options import Option

HELP = """Write any checkpoint as zarr v3: groups and arrays named by the keys of the tree, for any model.

SRC may be a file, an item, a step or a run directory. DST is the root group, which zarr.open_group of
zarr-python opens. Arrays of dtypes that zarr-python lacks, such as bfloat16, are read by tensorstore;
zarr-python opens their neighbors by name, but cannot list the group.

Content that zarr cannot express (keys of lists, empty nodes, strings, custom metadata, the step) is stored in
the attributes of the root, and is restored when the checkpoint is converted or inspected.

Examples:
  $ ckpt convert to-zarr3 ~/maxtext/llama ~/zarr/llama --dtype float32
  $ ckpt convert to-zarr3 ~/maxtext/llama ~/zarr/llama --compression zstd
"""
COMPRESSION = Option(
    "compression",
    parse_compression,
    "none",
    "Compress chunks: smaller on disk, but slower to write and load.",
    "none|zstd[:N]",
)
