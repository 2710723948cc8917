"""What a user may say of how zarr arrays are written."""

from __future__ import annotations

from ckpttools.codecs.registry import parse_compression
from ckpttools.core.options import Option

HELP = """Write any checkpoint as zarr v3: groups and arrays under the keys of the tree, whatever the model.

SRC may be a file, an item, a step or a run directory. DST is the root group, which zarr.open_group of
zarr-python opens. Arrays of dtypes that zarr-python lacks, such as bfloat16, are read by tensorstore;
zarr-python opens what is beside them by name, but cannot list their group.

What zarr has no place for (keys of lists, empty nodes, strings, custom metadata, the step) goes into the
attributes of the root, and comes back when that is converted or inspected.

Example:
  ckpt convert to-zarr3 ~/maxtext/llama ~/zarr/llama --dtype float32
"""
COMPRESSION = Option(
    "compression",
    parse_compression,
    "none",
    "Compress chunks: smaller on disk, slower to write and to load.",
    "none|zstd[:N]",
)
