"""Detect scales by structure: a narrow array with a `scale` or similar array next to it.

Names differ between schemes, and new schemes appear. All have a narrow array, and an array in the same module
whose last key contains a word for a scale or a zero point. Other words of that key (`weight_scale`,
`scale_weight`, `wi_0_scale`) identify the weight if a module has several.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple, Protocol

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.region import Shape

# NNX stores an array below the name of its variable.
NNX = ".value"
BLOCK_SCALE = "_scale_inv"
# Arrays below a weight that is an object with several arrays belong to the module of the weight.
OBJECT = ".weight."
# Endings of words for scales: `scales`, `qscale`, `wscales`, `qzeros`, `absmax`, `_amax`, `SCB`, and GPTQ's
# `g_idx`.
_SCALES = ("scale", "zero", "absmax", "amax", "scb", "gidx")
# Additional words that do not name a weight: `weight_scale_inv`, `zero_point`, `weight_global_scale`.
_BEFORE, _BEHIND = frozenset(("global",)), frozenset(("inv", "point"))
# Scales of activations and of cached keys and values do not apply to the numbers of a weight.
_ACTIVATIONS = frozenset(("input", "output", "activation", "act"))
_CACHES = frozenset(("k", "v", "q", "kv"))
# For all names, the scales of norms are learned weights of the model.
_NORMS = frozenset(("norm", "layernorm", "rmsnorm", "ln"))
_PLAIN_BITS, _MAX_PACKED_BITS = 16, 32
_EXPONENT = "float8_e8m0fnu"


class ArrayLike(Protocol):
    """The properties of an array without its values."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> DType: ...


class _ModuleEntry(NamedTuple):
    """The properties that distinguish an array in its module.

    Attributes:
        key: Last key of the name.
        item: List index after the key, for scales in a list; else empty.
        dtype: Stored dtype.
        rank: Number of axes.
    """

    key: str
    item: str
    dtype: DType
    rank: int


@dataclass(frozen=True, slots=True)
class _ModuleArray:
    """An array in its module.

    Attributes:
        location: Index among the arrays of the module.
        key, item, dtype, rank: As for `_ModuleEntry`.
        words: Words of the last key; for a scale, the words that identify its weight.
        is_scale: Whether the words include one for a scale.
    """

    location: int
    key: str
    item: str
    dtype: DType
    rank: int
    words: tuple[str, ...]
    is_scale: bool

    @property
    def is_block_scale(self) -> bool:
        return not self.item and self.key.endswith(BLOCK_SCALE)

    @property
    def is_weight(self) -> bool:
        return self.rank > 1 and not self.is_scale and is_narrow(self.dtype)


def is_plain(dtype: DType) -> bool:
    """Return whether models compute with this dtype."""
    return dtype.kind == "float" and dtype.bits >= _PLAIN_BITS


def is_narrow(dtype: DType) -> bool:
    """Return whether numbers of this dtype may need scales; dtypes of exponents are scales themselves."""
    if dtype.is_float:
        return not is_plain(dtype) and dtype.name != _EXPONENT
    return dtype.kind in ("int", "uint") and dtype.bits <= _MAX_PACKED_BITS


def bare_name(name: str) -> str:
    """Return a name without the suffix that NNX appends."""
    return name.removesuffix(NNX)


@lru_cache(maxsize=1024)
def words_of_key(key: str) -> tuple[str, ...]:
    """Split a key into words: `weight_scale_inv` -> weight, scale, inv."""
    spelled = key.lower().replace("g_idx", "gidx")
    return tuple("".join(item if item.isalnum() else " " for item in spelled).split())


def has_scale_word(name: str) -> bool:
    """Return whether the last key of a name contains a word for a scale."""
    return _scale_at(words_of_key(split_name(name)[1])) is not None


def owner_words(key: str) -> tuple[str, ...]:
    """Return the words of a scale's key that identify its weight: `k_scale` -> k."""
    words = words_of_key(key)
    at = _scale_at(words)
    return words if at is None else _owner(words, at)


def scales_of(arrays: Mapping[str, ArrayLike]) -> dict[str, tuple[str, ...]]:
    """Find the scales of each scaled array.

    Args:
        arrays: Arrays by name, with keys joined by dots.

    Returns:
        Name -> names of its scales and of arrays that describe its packing, in the order of `arrays`.
    """
    modules: defaultdict[str, tuple[list[str], list[_ModuleEntry]]] = defaultdict(lambda: ([], []))
    for name, array in arrays.items():
        module, key, index = split_name(name)
        names, described = modules[module]
        names.append(name)
        described.append(_ModuleEntry(key, index, array.dtype, len(array.shape)))
    # Tens of thousands of experts have the same structure.
    known: dict[tuple[_ModuleEntry, ...], list[tuple[int, int]]] = {}
    pairs = []
    for names, described in modules.values():
        module_kind = tuple(described)
        if module_kind not in known:
            known[module_kind] = list(_pairs([_array(*item) for item in enumerate(described)]))
        pairs += [(names[weight], names[scale]) for weight, scale in known[module_kind]]
    pairs += _nested_auxiliary(arrays)
    result: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for weight, scale in pairs:
        result[weight][scale] = None
    return {weight: tuple(scales) for weight, scales in result.items()}


def last_key(name: str) -> str:
    """Return the last key of a name: `scale`, or `scale.0` in a list of scales."""
    _, key, index = split_name(name)
    return f"{key}.{index}" if index else key


def activation_scales(words: Iterable[str]) -> bool:
    """Return whether words indicate that a scale does not apply to a weight."""
    return not (_ACTIVATIONS | _CACHES).isdisjoint(words)


def scales_no_weight(name: str) -> bool:
    """Return whether an array scales activations or cached keys and values, judged by its name."""
    words = words_of_key(split_name(name)[1])
    if len(words) < 2 or "scale" not in words or not _NORMS.isdisjoint(words):
        return False
    return words[0] in _CACHES or not _ACTIVATIONS.isdisjoint(words)


def split_name(name: str) -> tuple[str, str, str]:
    """Split a name into module, last key and list index; modules may also be joined by "/".

    For arrays below a weight (`X.weight._data`), the key begins with the weight: `weight._data` in module
    `X`.
    """
    spelled, index = bare_name(name).replace("/", "."), ""
    # Most names have neither, and the check runs five times for each of 100,000 names.
    if spelled[-1:].isdigit():
        above, _, last = spelled.rpartition(".")
        if above and last.isdigit():
            spelled, index = above, last
    if OBJECT in spelled:
        module, _, below = spelled.partition(OBJECT)
        if all(key.startswith("_") for key in below.split(".")[1:]):
            return module, f"weight.{below}", index
    module, _, key = spelled.rpartition(".")
    return module, key, index


def _array(location: int, array: _ModuleEntry) -> _ModuleArray:
    words = words_of_key(array.key)
    at = _scale_at(words)
    owner = words if at is None else _owner(words, at)
    return _ModuleArray(location, *array, words=owner, is_scale=at is not None)


def _scale_at(words: tuple[str, ...]) -> int | None:
    return next((at for at, word in enumerate(words) if word.rstrip("s").endswith(_SCALES)), None)


def _owner(words: tuple[str, ...], at: int) -> tuple[str, ...]:
    """Return the words that identify the weight of a scale: those before `scale`, else those after it."""
    before = tuple(word for word in words[:at] if word not in _BEFORE)
    return before or tuple(word for word in words[at + 1 :] if word not in _BEHIND and not word.isdigit())


def _pairs(module: list[_ModuleArray]) -> Iterator[tuple[int, int]]:
    """Yield the index pairs (weight, scale) for all arrays of a module."""
    scales = [item for item in module if item.is_scale and item.dtype.kind not in ("bool", "complex")]
    if not scales:
        return
    others = [item for item in module if not item.is_scale]
    known = _index_by_words(others)
    owners = {scale.location: _owners(scale, known) for scale in scales}
    yield from ((weight, scale) for scale, weights in owners.items() for weight in weights or ())
    owned = {weight for weights in owners.values() for weight in weights or ()}
    weights = [other for other in others if other.is_weight]
    are_packed = not any(item.dtype.is_float for item in weights)
    if (len(weights) == 1 or are_packed) and owned.isdisjoint(item.location for item in weights):
        # With `qvalue` and `kernel_scale`, there is only one candidate.
        near = [
            item for item in scales if owners[item.location] is None and not activation_scales(item.words)
        ]
        yield from ((w.location, item.location) for w in weights for item in near if _may_scale(item, w))


@dataclass(frozen=True, slots=True)
class _WordIndex:
    """An index of a module's arrays by words, because a module may have thousands of arrays and scales.

    Attributes:
        arrays: All arrays of the module.
        with_words: Arrays by the set of their words.
        with_word: Arrays by each of their words.
        with_rarest: Arrays by their rarest word.
    """

    arrays: list[_ModuleArray]
    with_words: Mapping[tuple[str, ...], list[_ModuleArray]]
    with_word: Mapping[str, list[_ModuleArray]]
    with_rarest: Mapping[str, list[_ModuleArray]]

    def alike(self, words: Collection[str]) -> list[_ModuleArray]:
        """Return the arrays whose words include all these words, or are included in them."""
        if not words:
            return self.arrays
        expected = set(words)
        rarest = min((self.with_word.get(word, []) for word in expected), key=len)
        wider = [item for item in rarest if expected <= {*item.words}]
        narrower = [
            item for word in expected for item in self.with_rarest.get(word, ()) if expected > {*item.words}
        ]
        return wider + narrower + self.with_words.get((), [])


def _index_by_words(arrays: list[_ModuleArray]) -> _WordIndex:
    with_words: defaultdict[tuple[str, ...], list[_ModuleArray]] = defaultdict(list)
    with_word: defaultdict[str, list[_ModuleArray]] = defaultdict(list)
    with_rarest: defaultdict[str, list[_ModuleArray]] = defaultdict(list)
    for array in arrays:
        with_words[array.words].append(array)
        for word in dict.fromkeys(array.words):
            with_word[word].append(array)
    for array in arrays:
        if array.words:
            with_rarest[min(array.words, key=lambda word: len(with_word[word]))].append(array)
    return _WordIndex(arrays, with_words, with_word, with_rarest)


def _owners(scale: _ModuleArray, others: _WordIndex) -> list[int] | None:
    """Return the arrays that own a scale according to its words; None if no array has these words."""
    named = _nearby(scale, others.with_words.get(scale.words, ()))
    if named:
        return [item.location for item in named if _is_scaled(item, scale)]
    related = _nearby(scale, others.alike(scale.words))
    return [item.location for item in related if item.is_weight and _may_scale(scale, item)] or None


def _nearby(scale: _ModuleArray, arrays: Iterable[_ModuleArray]) -> list[_ModuleArray]:
    """Return the arrays with the same list index as a scale, if both are in lists."""
    return [array for array in arrays if not (scale.item and array.item) or scale.item == array.item]


def _is_scaled(array: _ModuleArray, scale: _ModuleArray) -> bool:
    """Return whether a scale has an array's name.

    The scale may have any rank, and any float dtype if it has blocks.
    """
    return (scale.is_block_scale and array.dtype.is_float) or (
        is_narrow(array.dtype) and _may_scale(scale, array)
    )


def _may_scale(scale: _ModuleArray, weight: _ModuleArray) -> bool:
    """Return whether an array may be a scale; float8 next to float8 is not, as both may be plain numbers."""
    return not (scale.dtype.is_float and scale.dtype == weight.dtype)


def _nested_auxiliary(arrays: Mapping[str, ArrayLike]) -> Iterator[tuple[str, str]]:
    """Yield arrays below a narrow array's name, which describe how to read it: `X.weight.absmax`."""
    narrow = {name for name, array in arrays.items() if len(array.shape) > 1 and is_narrow(array.dtype)}
    # Narrow arrays in and above each module: tens of thousands of names share a few parent modules.
    known: dict[str, tuple[str, ...]] = {"": ()}
    for name in arrays if narrow else ():
        above, new = bare_name(name).rpartition(".")[0], []
        while above not in known:
            new.append(above)
            above = above.rpartition(".")[0]
        for module in reversed(new):
            known[module] = (module, *known[above]) if module in narrow else known[above]
            above = module
        yield from ((owner, name) for owner in known[above])
