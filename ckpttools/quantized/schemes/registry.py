"""The registry of schemes. A new one needs a file with a `Scheme`, and a line here or an entry point."""

from __future__ import annotations

from functools import cache

from ckpttools.core.plugins import load_group
from ckpttools.quantized.schemes.base import Module, Scheme
from ckpttools.quantized.schemes.fp4 import Fp4Experts, Mxfp4, Nvfp4
from ckpttools.quantized.schemes.fp8 import Fp8
from ckpttools.quantized.schemes.maxtext import MaxText
from ckpttools.quantized.schemes.pack_quantized import PackQuantized

GROUP = "ckpttools.schemes"
"""Entry point group for packages that provide schemes."""
# MaxText's names determine the scheme, even if a configuration was copied along.
_BUILT_IN: tuple[Scheme, ...] = (MaxText(), Fp8(), Fp4Experts(), Mxfp4(), PackQuantized(), Nvfp4())


@cache
def schemes() -> tuple[Scheme, ...]:
    """Return all schemes, starting with those of other packages."""
    return (*load_group(GROUP).values(), *_BUILT_IN)


@cache
def read_methods() -> tuple[str, ...]:
    """Return the `quant_method` values of supported schemes."""
    return tuple(dict.fromkeys(method for scheme in schemes() for method in scheme.methods))


@cache
def read_formats() -> frozenset[str]:
    """Return the `format` values of supported schemes in compressed-tensors."""
    return frozenset(name for scheme in schemes() for name in scheme.formats)


def scheme_of(module: Module) -> Scheme | None:
    """Return the scheme of a weight; None if unknown."""
    return next((scheme for scheme in schemes() if scheme.takes(module)), None)
