"""Every pair of formats carries trees over: written in one, opened, written in the other, opened, the same.

Each format alone passes the shipped conformance tests: tests/formats/test_orbax_write.py, test_zarr3.py,
test_safetensors_write.py; the plainest of them here.
"""

from __future__ import annotations

import tempfile
from itertools import chain, pairwise, product
from pathlib import Path

from hypothesis import HealthCheck, assume, given, note, settings
from support.internals import OrbaxWriter, SafetensorsWriter, ZarrWriter, Zstd

import ckpttools
from ckpttools import DTYPES
from ckpttools.formats.orbax import format as orbax
from ckpttools.testing.conformance import FormatTests, write
from ckpttools.testing.strategies import assert_same, trees, unambiguous

ZARR3 = tuple(dtype for dtype in DTYPES.values() if dtype.zarr3)
HELD_BY_ALL = tuple(dtype for dtype in ZARR3 if dtype.safetensors and not dtype.packed)

WRITERS = {
    "orbax": OrbaxWriter(step=None),
    "orbax zstd": OrbaxWriter(step=None, compression=Zstd(3)),
    "orbax zarr2": OrbaxWriter(step=None, zarr3=False),
    "orbax files": OrbaxWriter(step=None, ocdbt=False),
    "safetensors": SafetensorsWriter(),
    "safetensors shards": SafetensorsWriter(max_shard_bytes=1000, separator="/"),
    "zarr3": ZarrWriter(),
    "zarr3 zstd": ZarrWriter(compression=Zstd(1)),
}


class TestOrbax(FormatTests):
    format = orbax.FORMAT
    dtypes = ZARR3

    def writer(self, tree):
        return OrbaxWriter(step=tree.metadata.step)


def every_pair():
    """Names of writers in an order in which each comes right after each, itself included, once."""
    names = list(WRITERS)
    # De Bruijn's sequence: all words of one or two rising letters, one after the other as in a dictionary.
    words = [(one, *chain(*((one, other) for other in names[k + 1 :]))) for k, one in enumerate(names)]
    return [*chain(*words), names[0]]


@settings(deadline=None, max_examples=2, suppress_health_check=list(HealthCheck))
@given(tree=trees(HELD_BY_ALL, most_leaves=6))
def test_every_format_converts_to_every_format(tree):
    assume(unambiguous(tree))
    path = every_pair()
    assert sorted(pairwise(path)) == sorted(product(WRITERS, WRITERS))
    with tempfile.TemporaryDirectory() as name:
        current = tree
        for number, item in enumerate(path):
            write(current, WRITERS[item], Path(name) / str(number))
            current = ckpttools.open(Path(name) / str(number))
            note(f"{path[number - 1] if number else 'made up'} to {item}")
            assert_same(current, tree)
