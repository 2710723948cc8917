"""Every format passes the shipped conformance tests; every pair of formats carries trees over."""

from __future__ import annotations

from ckpttools.dtypes import DTYPES
from ckpttools.formats import orbax
from ckpttools.formats.orbax_write import OrbaxWriter
from ckpttools.testing.conformance import FormatTests

ZARR3 = tuple(dtype for dtype in DTYPES.values() if dtype.zarr3)


class TestOrbax(FormatTests):
    format = orbax.FORMAT
    dtypes = ZARR3

    def writer(self, tree):
        return OrbaxWriter(step=tree.metadata.step)
