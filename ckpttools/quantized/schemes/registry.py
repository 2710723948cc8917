"""The schemes that are read. To add one: a file with a `Scheme`, and a line here."""

from __future__ import annotations

from ckpttools.quantized.schemes.base import Module, Scheme
from ckpttools.quantized.schemes.fp4_experts import Fp4Experts
from ckpttools.quantized.schemes.fp8 import Fp8
from ckpttools.quantized.schemes.maxtext import MaxText
from ckpttools.quantized.schemes.mxfp4 import Mxfp4
from ckpttools.quantized.schemes.nvfp4 import Nvfp4
from ckpttools.quantized.schemes.pack_quantized import PackQuantized

# MaxText's names say how, whatever the configuration says that was carried along.
SCHEMES: tuple[Scheme, ...] = (MaxText(), Fp8(), Fp4Experts(), Mxfp4(), PackQuantized(), Nvfp4())

READ_METHODS = tuple(dict.fromkeys(method for scheme in SCHEMES for method in scheme.methods))
"""What `quant_method` may say of weights that are read."""


def scheme_of(module: Module) -> Scheme | None:
    """The scheme of a weight; None for one that is not known."""
    return next((each for each in SCHEMES if each.takes(module)), None)
