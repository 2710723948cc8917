"""The causes that `ckpt diff` recognizes. Their order does not matter."""

from ckpttools.compare.causes.axes import padded, reshaped, rope_layout, transposed
from ckpttools.compare.causes.base import Detector
from ckpttools.compare.causes.content import all_nan, all_zeros, byte_order, cast, truncated
from ckpttools.compare.causes.factors import factor, norm_offset
from ckpttools.compare.causes.order import entry_order
from ckpttools.compare.causes.others import moved_and_changed, renamed

DETECTORS: tuple[Detector, ...] = (
    all_nan,
    all_zeros,
    byte_order,
    cast,
    entry_order,
    factor,
    moved_and_changed,
    norm_offset,
    padded,
    renamed,
    reshaped,
    rope_layout,
    transposed,
    truncated,
)
