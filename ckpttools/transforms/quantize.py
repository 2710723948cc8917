"""Plain weights of a Hugging Face model as quantised ones, as models are published."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import block_codes, relayout
from ckpttools.array.patterns import first_match
from ckpttools.array.tree import Leaf, Path, Tree, dotted
from ckpttools.core.errors import FormatError, UnknownNameError, UsageError
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count
from ckpttools.quantized.config import FIELD, says_quantized, scheme
from ckpttools.quantized.encoders.fp8 import Fp8Blocks
from ckpttools.quantized.encoders.mxfp4 import GROUP, Mxfp4
from ckpttools.quantized.modules import is_fused, is_linear, is_out_first, left_modules
from ckpttools.quantized.refusals import remedy
from ckpttools.quantized.tree import quantized_in
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.select import require_matches

_FP8, _MXFP4 = "fp8-block128", "mxfp4"
_BLOCK = 128
_SCALE_INV = "_scale_inv"
_TEXT, _HIDDEN = "text_config", "hidden_size"


@dataclass(frozen=True)
class Scheme:
    """What a scheme makes of the weights of a model.

    Attributes:
        takes: whether it is for an array; of fused experts, of the model's width as well.
        made: what becomes of one: end of the name -> array.
        said: what `quantization_config` says, but for the modules that are not quantised.
        words: what is done, for notes.
        what: which arrays it is for, for messages.
    """

    takes: Callable[[str, LazyArray, int | None], bool]
    made: Callable[[str, LazyArray], Mapping[str, LazyArray]]
    said: Mapping[str, Any]
    words: str
    what: str


def _is_fp8(name: str, array: LazyArray, hidden: int | None) -> bool:
    return is_linear(name, array) or (is_fused(name, array) and is_out_first(name, array, hidden) is True)


def _fp8(name: str, array: LazyArray) -> dict[str, LazyArray]:
    codes, scales = block_codes(array, Fp8Blocks(_BLOCK, _BLOCK), name)
    return {"": codes, _SCALE_INV: scales}


def _is_mxfp4(name: str, array: LazyArray, hidden: int | None) -> bool:
    return (
        is_fused(name, array) and is_out_first(name, array, hidden) is not True and not array.shape[1] % GROUP
    )


def _mxfp4(name: str, array: LazyArray) -> dict[str, LazyArray]:
    experts, into, out = array.shape
    swapped = relayout(array, ((experts,), (into,), (out,)), (0, 2, 1), (1, 1, 1))
    codes, scales = block_codes(swapped, Mxfp4(), name)
    groups = (into // GROUP, GROUP // codes.encoder.packed)
    return {
        "_blocks": relayout(codes, ((experts,), (out,), groups), (0, 1, 2, 3), (1, 1, 1, 1)),
        "_scales": scales,
    }


SCHEMES: Mapping[str, Scheme] = {
    _FP8: Scheme(
        _is_fp8,
        _fp8,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
        },
        f"quantised to FP8 (E4M3) in blocks of {_BLOCK} x {_BLOCK} with float32 scales: rounded",
        "the matrices of linear layers, as `X.weight`, and fused experts (expert, out, in)",
    ),
    _MXFP4: Scheme(
        _is_mxfp4,
        _mxfp4,
        {"quant_method": "mxfp4"},
        "quantised to MXFP4 (E2M1 in groups of 32, exponents as scales): rounded",
        "the experts of gpt-oss, (expert, in, out) of `X.experts.gate_up_proj` and `down_proj`",
    ),
}


@dataclass(frozen=True)
class Quantize:
    """The weights of a Hugging Face model quantised, with what `config.json` has to say of it.

    Attributes:
        scheme: one of `SCHEMES`.
        exclude: patterns, as of `Select`, of arrays that stay as they are.
    """

    scheme: str = _FP8
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise UnknownNameError(
                "there is no such scheme of quantisation", got=self.scheme, wanted=" or ".join(SCHEMES)
            )

    def __call__(self, tree: Tree) -> Transformed:
        """The quantised tree. Values that no scale fits, such as NaN, are refused when they are read.

        Raises:
            UsageError: a pattern that matches nothing; there is nothing to quantise.
            FormatError: weights are quantised already.
        """
        refuse_quantized(tree, says_quantized(tree.metadata.config) is not None)
        require_matches(self.exclude, tree.arrays, tree.metadata.place)
        how = SCHEMES[self.scheme]
        hidden = _width(tree.metadata.config)
        chosen = {
            path
            for path, array in tree.arrays.items()
            if how.takes(dotted(path), array, hidden) and not first_match(path, self.exclude)
        }
        if not chosen:
            raise UsageError(
                "there is nothing to quantise",
                place=tree.metadata.place or None,
                wanted=how.what,
                hint="`ckpt inspect tree SRC --flat` shows all names",
            )
        leaves: dict[Path, Leaf] = {}
        for path, leaf in tree.items():
            if path in chosen:
                parts = how.made(dotted(path), tree.arrays[path])
                leaves |= {(*path[:-1], f"{path[-1]}{end}"): made for end, made in parts.items()}
            else:
                leaves[path] = leaf
        config = _with_scheme(tree, {dotted(path) for path in chosen}, how)
        made = Tree(leaves, tree.metadata).with_metadata(config=config)
        notes = Notes((Note(array_count(chosen), how.words),), remarks=tuple(_remarks(tree, chosen, how)))
        return Transformed(made, notes)


def refuse_quantized(tree: Tree, is_said: bool = False, hint: str | None = None) -> None:
    """Raises FormatError where weights are quantised.

    Args:
        tree: the weights.
        is_said: whether it is enough that the configuration says so.
        hint: what to do; None for what makes plain weights of them.
    """
    said, found = says_quantized(tree.metadata.config), quantized_in(tree).weights
    if is_said or found:
        raise FormatError(
            "weights are quantised already",
            place=tree.metadata.place or None,
            got=f"{scheme(said)} ({FIELD})" if said else next(map(str, found.values())),
            hint=hint or remedy(said),
        )


def _width(config: Mapping[str, Any] | None) -> int | None:
    """The model's width, as its configuration says it."""
    text = (config or {}).get(_TEXT)
    found = [place.get(_HIDDEN) for place in (text, config) if isinstance(place, Mapping)]
    return next((each for each in found if isinstance(each, int)), None)


def _with_scheme(tree: Tree, chosen: Collection[str], how: Scheme) -> Mapping[str, Any] | None:
    if tree.metadata.config is None:
        return None
    arrays = {dotted(path): array for path, array in tree.arrays.items()}
    left = {"modules_to_not_convert": left_modules(arrays, chosen)}
    return {**tree.metadata.config, FIELD: {**how.said, **left}}


def _remarks(tree: Tree, chosen: Collection[Path], how: Scheme) -> Iterator[str]:
    if tree.metadata.config is None:
        yield f"no config.json is at hand: what loads this has to be told {dict(how.said)}"
    fused = [path for path, array in tree.arrays.items() if is_fused(dotted(path), array)]
    others = [path for path in fused if path not in chosen]
    if others:
        yield f"{array_count(others)} of fused experts stay as they are; this scheme is for {how.what}"
    block = how.said.get("weight_block_size")
    uneven = [path for path in chosen if block and _is_uneven(tree.arrays[path], block)]
    if uneven:
        yield (
            f"the last blocks of {array_count(uneven)} are smaller than the others, as in DeepSeek V3's; "
            "transformers up to 5.23 cannot dequantise such, vLLM and `ckpt cast` can"
        )


def _is_uneven(array: LazyArray, block: Sequence[int]) -> bool:
    lengths = zip(array.shape[-2:], block, strict=True)
    return any(length > size and length % size for length, size in lengths)
