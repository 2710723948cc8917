"""The schemes that are read. To add one: a file with a `Scheme`, and a line here or an entry point."""

from __future__ import annotations

from functools import cache

from ckpttools.core.plugins import load_group
from ckpttools.quantized.schemes.base import Module, Scheme
from ckpttools.quantized.schemes.fp4 import Fp4Experts, Mxfp4, Nvfp4
from ckpttools.quantized.schemes.fp8 import Fp8
from ckpttools.quantized.schemes.maxtext import MaxText
from ckpttools.quantized.schemes.pack_quantized import PackQuantized

GROUP = "ckpttools.schemes"
"""Entry points of packages whose schemes are read as well."""
# MaxText's names say how, whatever the configuration says that was carried along.
_BUILT_IN: tuple[Scheme, ...] = (MaxText(), Fp8(), Fp4Experts(), Mxfp4(), PackQuantized(), Nvfp4())


@cache
def schemes() -> tuple[Scheme, ...]:
    """All of them; those of other packages are asked first whether a weight is theirs."""
    return (*load_group(GROUP).values(), *_BUILT_IN)


@cache
def read_methods() -> tuple[str, ...]:
    """What `quant_method` may say of weights that are read."""
    return tuple(dict.fromkeys(method for scheme in schemes() for method in scheme.methods))


@cache
def read_formats() -> frozenset[str]:
    """What `format` of compressed-tensors may say of weights that are read."""
    return frozenset(name for scheme in schemes() for name in scheme.formats)


def scheme_of(module: Module) -> Scheme | None:
    """The scheme of a weight; None for one that is not known."""
    return next((scheme for scheme in schemes() if scheme.takes(module)), None)
