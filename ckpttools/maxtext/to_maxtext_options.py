"""How a Hugging Face checkpoint becomes one of MaxText."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from ckpttools.core.checked import checked_options
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.formats.base import ReadOptions
from ckpttools.maxtext.layout import SCAN_AXES, SCAN_AXIS
from ckpttools.maxtext.model import ModelOptions, check_choice
from ckpttools.maxtext.native import (
    QUANTIZED,
    Quantized,
)
from ckpttools.maxtext.versions import NEWEST, version_called
from ckpttools.quantized.decoding import Like


@checked_options
@dataclass(frozen=True, slots=True)
class ToMaxText:
    """How a Hugging Face checkpoint becomes a MaxText one.

    Attributes:
        scan: stack the layers, as MaxText's `scan_layers=true` wants them.
        scan_axis: the axis on which they are stacked (MaxText's `param_scan_axis`).
        dtype: dtype of all floating-point arrays; None keeps those stored.
        exact: store in float32 what would otherwise not come back to the bit.
        maxtext: version whose layout is written, as `ckpttools.maxtext.versions.VERSIONS` names them.
        pad_vocab: rows that the embedding gets at least, zeros at the end; None for those of the model.
        model: what the user says of the model.
        drop: patterns of source arrays to leave out.
        text_only: leave out the towers (vision, audio).
        carry: keep what is not converted (prediction layers, towers that are left out) in the checkpoint,
            for the way back.
        leaves_out: leave out what MaxText has no place for, unasked: where nothing is written, nothing is
            lost.
        read: options for opening the source.
        dequantize_like: how products of quantised weights and their scales are rounded, as of
            `ckpttools.transforms.dequantize.Dequantize`.
        quantized: what becomes of quantised weights: "dequantize", or "keep" for FP8 as MaxText keeps it.
    """

    scan: bool = True
    scan_axis: int = SCAN_AXIS
    dtype: DType | None = None
    exact: bool = False
    maxtext: str = NEWEST
    pad_vocab: int | None = None
    model: ModelOptions = field(default_factory=ModelOptions)
    drop: Sequence[str] = ()
    text_only: bool = False
    carry: bool = False
    leaves_out: bool = False
    read: ReadOptions = field(default_factory=ReadOptions)
    dequantize_like: Like = "float32"
    quantized: Quantized = "dequantize"

    def __post_init__(self) -> None:
        if self.scan and self.scan_axis not in SCAN_AXES:
            expected = " or ".join(map(str, SCAN_AXES))
            raise UsageError("layers cannot be stacked on this axis", got=self.scan_axis, expected=expected)
        version = version_called(self.maxtext)
        check_choice("way with quantised weights", self.quantized, QUANTIZED)
        if self.quantized == "keep" and not version.has_fp8:
            raise UsageError(
                f"MaxText {self.maxtext} has no quantised weights",
                got=option("quantized", "keep"),
                hint=f"leave it out, or {option('maxtext', NEWEST)}",
            )
        if self.exact and self.dtype is not None:
            raise UsageError(
                f"{option('exact', True)} chooses dtypes so that nothing is lost, "
                f"{option('dtype')} casts all",
                hint="leave one of them out",
            )
