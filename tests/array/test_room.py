"""What a disk must have room for before a conversion begins: what is certain to be written, and no more."""

from __future__ import annotations

import pytest
from support.internals import Constant, OrbaxWriter, ZarrWriter, Zstd

from ckpttools import DTYPES, Tree

TIB = 1 << 40
WRITERS = (OrbaxWriter, lambda **options: OrbaxWriter(ocdbt=False, **options), ZarrWriter)


@pytest.mark.parametrize("writer", WRITERS, ids=("ocdbt", "files", "zarr3"))
def test_compressed_output_may_exceed_disk_space(tmp_path, writer):
    # No disk that runs this test has so much room; compressed, 256 TiB of zeros would be little.
    huge = Tree({("w",): Constant((256 << 10, 1 << 30), DTYPES["uint8"], b"\0")})
    raw, encoded = (writer(**options).layout(huge, 64 << 20) for options in ({}, {"compression": Zstd(1)}))
    assert (raw.nbytes, encoded.nbytes) == (256 * TIB, 0)
