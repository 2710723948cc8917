"""FP8 as MaxText keeps it: `kernel` beside `kernel_scale`, `wi_0` beside `wi_0_scale`, whatever the model."""

from __future__ import annotations

from ckpttools.core.region import Shape
from ckpttools.quantized.scales import last_key
from ckpttools.quantized.schemes.base import Module, Scales, UnreadableError, Weight

# Leaves of which Hugging Face's checkpoints have none.
_KERNEL = "kernel"
_LEAVES = (_KERNEL, "wi", "wi_0", "wi_1", "wo")


class MaxText:
    """`X.kernel` in float8 beside `X.kernel_scale`, a grid with the kernel's axes, or one scale for an array.

    Each axis of the grid has a divisor of the kernel's length, as MaxText multiplies them. Layers and experts
    are among these axes; scales of whole arrays have only them.
    """

    methods: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()

    def takes(self, module: Module) -> bool:
        is_fp8 = module.dtype.is_float and module.dtype.bits == 8
        return is_fp8 and module.key in _LEAVES and _scale_of(module) in module.by_key

    def read(self, module: Module) -> Weight:
        # Experts lie in one module with others and their router.
        name = module.by_key[_scale_of(module)]
        odd = [key for key in module.by_key if key.startswith(f"{module.key}_") and key != last_key(name)]
        if odd:
            raise UnreadableError(f"{module.name}: {', '.join(odd)} beside it, which is not understood")
        scale = _scale(module, name)
        is_of_all = len(module.arrays[name].shape) < len(module.shape)
        return Weight(
            name=module.name,
            codes=module.name,
            scheme="fp8 per tensor" if is_of_all else f"fp8 {_size(scale.block)}",
            shape=module.shape,
            layout=module.shape,
            packed=1,
            numbers=module.dtype.name,
            scales=(scale,),
            activation_scales=module.activation_scales,
        )


def _size(block: Shape) -> str:
    """Of square blocks `128x128`, whatever axes lie between; of others the lengths of all their axes."""
    sizes = [length for length in block if length > 1] or [1]
    return "x".join(map(str, sizes * 2 if len(sizes) == 1 else sizes))


def _scale_of(module: Module) -> str:
    return _scale_key(module.key)


def _scale_key(key: str) -> str:
    return f"{key}_scale"


def _scale(module: Module, name: str) -> Scales:
    array, shape = module.arrays[name], module.shape
    if not array.dtype.is_float:
        raise UnreadableError(f"{name}: {array.dtype}, which scales are not")
    grid = _with_axes_of(shape, array.shape) or _layer_scale(module, array.shape)
    if grid is None or any(count == 0 or length % count for length, count in zip(shape, grid, strict=True)):
        raise UnreadableError(f"{name}: {list(array.shape)} scales do not fit {module.name} of {list(shape)}")
    block = tuple(length // count for length, count in zip(shape, grid, strict=True))
    return Scales(name, array.dtype, grid, block)


def _with_axes_of(shape: Shape, scales: Shape) -> Shape | None:
    """The shape of scales with as many axes as the kernel has; None where they could be of several."""
    missing = len(shape) - len(scales)
    if missing <= 0:
        return scales if not missing else None
    # Experts lead; layers follow at the scan axis, 0 or 1.
    at_first = (*scales, *(1,) * missing)
    at_second = (1, *scales, *(1,) * (missing - 1))
    fitting = {item for item in (at_first, at_second) if _fits(item, shape)}
    return fitting.pop() if len(fitting) == 1 else None


def _layer_scale(module: Module, scales: Shape) -> Shape | None:
    """The grid of one scale for each layer of a kernel that has as many heads as layers.

    Other kernels of the checkpoint tell on which axis layers are: of Llama 3.1 8B `out` has 32 of both, and
    `query` 32 on that axis alone.
    """
    if module.key != _KERNEL or len(scales) != 1:
        return None
    known = {
        axes
        for name, array in module.arrays.items()
        if array.shape == scales and last_key(name) == _scale_key(_KERNEL)
        if len(axes := _axes_of(module, name.replace(_scale_key(_KERNEL), _KERNEL), scales[0])) == 1
    }
    own = set(_axes_of(module, module.name, scales[0]))
    if len(known) != 1 or not own.issuperset(*known):
        return None
    ((axis,),) = known
    return tuple(n if location == axis else 1 for location, n in enumerate(module.shape))


def _axes_of(module: Module, kernel: str, layers: int) -> tuple[int, ...]:
    """The axes on which a kernel may have its layers."""
    array = module.arrays.get(kernel)
    return tuple(axis for axis, n in enumerate(array.shape[:2]) if n == layers) if array is not None else ()


def _fits(grid: Shape, shape: Shape) -> bool:
    return all(count in (1, length) for count, length in zip(grid, shape, strict=True))
