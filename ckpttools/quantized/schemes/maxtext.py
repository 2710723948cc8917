"""FP8 in MaxText's layout: `kernel` with `kernel_scale`, or `wi_0` with `wi_0_scale`, for all models."""

from __future__ import annotations

from ckpttools.core.region import Shape
from ckpttools.quantized.scales import last_key
from ckpttools.quantized.schemes.base import Module, Scales, UnreadableError, Weight

# Leaf names that do not occur in Hugging Face checkpoints.
_KERNEL = "kernel"
_LEAVES = (_KERNEL, "wi", "wi_0", "wi_1", "wo")


class MaxText:
    """MaxText's FP8: float8 `X.kernel` with `X.kernel_scale`, a grid with the kernel's axes or one scale.

    The length of each grid axis must divide that of the kernel, because MaxText multiplies the two. Layers
    and experts are also grid axes; scales of complete arrays have only these axes.
    """

    methods: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()

    def takes(self, module: Module) -> bool:
        is_fp8 = module.dtype.is_float and module.dtype.bits == 8
        return is_fp8 and module.key in _LEAVES and _scale_of(module) in module.by_key

    def read(self, module: Module) -> Weight:
        # A module may contain several experts and their router.
        name = module.by_key[_scale_of(module)]
        unexpected = [
            key for key in module.by_key if key.startswith(f"{module.key}_") and key != last_key(name)
        ]
        if unexpected:
            raise UnreadableError(f"{module.name}: with unknown auxiliary tensors: {', '.join(unexpected)}")
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
    """Format square blocks as `128x128`, ignoring axes in between; otherwise the lengths of all axes."""
    sizes = [length for length in block if length > 1] or [1]
    return "x".join(map(str, sizes * 2 if len(sizes) == 1 else sizes))


def _scale_of(module: Module) -> str:
    return _scale_key(module.key)


def _scale_key(key: str) -> str:
    return f"{key}_scale"


def _scale(module: Module, name: str) -> Scales:
    array, shape = module.arrays[name], module.shape
    if not array.dtype.is_float:
        raise UnreadableError(f"{name}: {array.dtype} is not a dtype of scales")
    grid = _with_axes_of(shape, array.shape) or _layer_scale(module, array.shape)
    if grid is None or any(count == 0 or length % count for length, count in zip(shape, grid, strict=True)):
        raise UnreadableError(f"{name}: {list(array.shape)} scales do not fit {module.name} of {list(shape)}")
    block = tuple(length // count for length, count in zip(shape, grid, strict=True))
    return Scales(name, array.dtype, grid, block)


def _with_axes_of(shape: Shape, scales: Shape) -> Shape | None:
    """Extend the shape of scales to the kernel's number of axes; return None if that is ambiguous."""
    missing = len(shape) - len(scales)
    if missing <= 0:
        return scales if not missing else None
    # Experts come first, then layers at the scan axis, 0 or 1.
    at_first = (*scales, *(1,) * missing)
    at_second = (1, *scales, *(1,) * (missing - 1))
    matching = {item for item in (at_first, at_second) if _fits(item, shape)}
    return matching.pop() if len(matching) == 1 else None


def _layer_scale(module: Module, scales: Shape) -> Shape | None:
    """Return the grid with one scale per layer for a kernel with as many heads as layers.

    Other kernels of the checkpoint determine the layer axis: in Llama 3.1 8B, `out` has length 32 on both
    axes, but `query` only on the layer axis.
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
    """Return the possible layer axes of a kernel."""
    array = module.arrays.get(kernel)
    return tuple(axis for axis, n in enumerate(array.shape[:2]) if n == layers) if array is not None else ()


def _fits(grid: Shape, shape: Shape) -> bool:
    return all(count in (1, length) for count, length in zip(grid, shape, strict=True))
