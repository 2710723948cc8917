"""Options of conversions between Hugging Face and MaxText."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from ckpttools.core.argument_checks import validate_fields
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.formats.base import ReadOptions
from ckpttools.maxtext.model_options import ModelOptions, check_choice
from ckpttools.maxtext.native_fp8 import (
    QUANTIZED,
    Quantized,
)
from ckpttools.maxtext.versions import NEWEST, SCAN_AXES, SCAN_AXIS, version_called
from ckpttools.maxtext.vocabulary import PADDING_MODES
from ckpttools.quantized.config import Like
from ckpttools.stores.registry import LocationLike


@validate_fields
@dataclass(frozen=True, slots=True)
class ToMaxText:
    """Options of the conversion from Hugging Face to MaxText.

    Attributes:
        scan: Whether to stack the layers, as for MaxText's `scan_layers=true`.
        scan_axis: The axis on which layers are stacked (MaxText's `param_scan_axis`).
        dtype: The dtype of all floating-point arrays; None keeps the stored dtypes.
        exact: Whether to store arrays in float32 if they would otherwise not convert back bit for bit.
        maxtext: The version whose layout is written, a name in `ckpttools.maxtext.versions.VERSIONS`.
        pad_vocab: The minimum number of embedding rows, padded with zeros; None keeps the model's own number.
        model: The model options that the user set.
        drop: Patterns of source arrays to leave out.
        text_only: Whether to leave out the towers (vision, audio).
        carry: Whether to keep unconverted arrays (MTP layers, towers that are left out) in the checkpoint for
            the reverse conversion.
        leaves_out: Whether to leave out arrays without a counterpart in MaxText without an error, because
            nothing is written.
        read: Options for opening the source.
        dequantize_like: How to round products of quantized weights and scales, as in
            `ckpttools.transforms.cast.Dequantize`.
        quantized: How to handle quantized weights: "dequantize", or "keep" for FP8 as MaxText stores it.
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
        check_choice("handling of quantized weights", self.quantized, QUANTIZED)
        if self.quantized == "keep" and not version.has_fp8:
            raise UsageError(
                f"MaxText {self.maxtext} has no quantized weights",
                got=option("quantized", "keep"),
                hint=f"leave it out, or use {option('maxtext', NEWEST)}",
            )
        if self.exact and self.dtype is not None:
            raise UsageError(
                f"{option('exact', True)} chooses dtypes so that nothing is lost, "
                f"{option('dtype')} casts all",
                hint="leave one of them out",
            )


# The spelling of names in a text model.
TEXT = "text"


@validate_fields
@dataclass(frozen=True, slots=True)
class ToHuggingFace:
    """Options of the conversion from MaxText to Hugging Face.

    Attributes:
        like: The directory of the original model, or a `config.json`; None uses the configuration in the
            checkpoint.
        dtype: The dtype of all floating-point arrays; None keeps the stored dtypes.
        prefix: The path of a model within a composite one, with keys joined by "/"; only its arrays are
            written.
        spelling: The spelling of names: "hub", "transformers" or "text"; None keeps that of the original
            model. "text" writes the text model of a multimodal one as a separate model, with its own
            configuration.
        scan_axis: The axis on which layers are stacked, if the arrays do not show it.
        model: The model options that the user set.
        carry: Whether to copy arrays without a counterpart in MaxText from `like`.
        padding_rows: How to handle rows beyond the vocabulary: "keep" writes them and enlarges the
            vocabulary, "drop" leaves them out regardless of their values; None leaves out zeros and refuses
            other values.
        read: Options for opening the source.
        quantized: How to handle FP8 weights: "keep" writes them with their scales, "dequantize" converts them
            to plain values; None keeps them unless a dtype is given.
        maxtext_config: The settings of the run, as passed to MaxText, from which `config.json` is built if
            the checkpoint has none.
    """

    like: LocationLike | None = None
    dtype: DType | None = None
    prefix: str | None = None
    spelling: str | None = None
    scan_axis: int | None = None
    model: ModelOptions = field(default_factory=ModelOptions)
    carry: bool = False
    padding_rows: str | None = None
    read: ReadOptions = field(default_factory=ReadOptions)
    maxtext_config: tuple[str, ...] = ()
    quantized: Quantized | None = None

    @property
    def dequantizes(self) -> bool:
        """Return whether quantized weights become plain values."""
        return self.quantized == "dequantize" or (self.quantized is None and self.dtype is not None)

    def __post_init__(self) -> None:
        check_choice("handling of quantized weights", self.quantized, QUANTIZED)
        check_choice("handling of padding rows", self.padding_rows, PADDING_MODES)
        if self.carry and self.spelling == TEXT:
            raise UsageError(
                f"a separate text model cannot contain the arrays that {option('carry', True)} copies from "
                f"the model",
                hint=f"leave out {option('carry', True)} or {option('names', TEXT)}",
            )
        if self.carry and self.like is None:
            raise UsageError(
                f"{option('carry', True)} copies missing arrays from a model, but no model is given",
                hint=f"add {option('like', 'HF_DIR')}; arrays that the checkpoint carries are always written",
            )
