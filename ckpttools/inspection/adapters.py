"""Compare an adapter with its base model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ckpttools.adapters.bases import Base
from ckpttools.adapters.factors import Adapter
from ckpttools.adapters.fitting import split_as_base
from ckpttools.adapters.peft import skip_remarks
from ckpttools.core.errors import FormatError
from ckpttools.inspection.comparison import ArraySpec, Comparison, Different


def against_base(adapter: Adapter, base: Base) -> Comparison:
    """Compare the weights that an adapter changes, and their shapes, with the arrays of a model."""
    # If the number of experts differs, all experts are reported as missing.
    with suppress(FormatError):
        adapter = split_as_base(base, adapter)
    shapes = {factor.name: factor.shape for factor in adapter.factors}
    shapes |= {name: array.shape for name, array in adapter.replaced.items()}
    names = {name: base.named(name) for name in shapes}
    extra = [ArraySpec(name, shapes[name], None) for name, result in names.items() if result is None]
    return Comparison(
        against=base.tree.metadata.location,
        num_compared=len(shapes),
        extra=tuple(extra),
        different=tuple(_different(adapter, base)),
        reasons=tuple(skip_remarks(adapter)),
    )


def _different(adapter: Adapter, base: Base) -> Iterator[Different]:
    for factor in adapter.factors:
        name = base.named(factor.name)
        if name is not None and not factor.fits(base.weights[name].shape):
            why = f"A {list(factor.a.shape)}, B {list(factor.b.shape)}"
            expected = ArraySpec(name, base.weights[name].shape, None)
            yield Different(factor.name, ArraySpec(factor.name, factor.shape, None), expected, why)
    for own, array in adapter.replaced.items():
        name = base.named(own)
        if name is not None and base.weights[name].shape != array.shape:
            expected = ArraySpec(name, base.weights[name].shape, None)
            yield Different(own, ArraySpec(own, array.shape, None), expected)
