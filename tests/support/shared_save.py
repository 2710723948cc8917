"""What several processes save together, as arrays of the host."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# How arrays are cut over a mesh of x=4, y=2; all others every process has as they are.
SPECS: dict[str, tuple[str | None, ...]] = {
    "grid": ("x", "y"),
    "rows": ("x",),
    "columns": (None, "y"),
    "whole": (),
    "large": ("y", "x"),
}


def values() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    bits = generator.integers(0, 1 << 16, (64, 48), np.uint16)
    return {
        "columns": generator.integers(-8, 8, (16, 32)).astype(ml_dtypes.int4),
        "grid": bits.view(ml_dtypes.bfloat16),
        "host": np.arange(6.0),
        "large": generator.standard_normal((1024, 3072), np.float32),
        "rows": generator.integers(0, 256, (8, 16), np.uint8),
        "whole": np.array(-0.0, np.float32),
    }
