"""Logical names of array axes, MaxText's own and those of families, and MaxText's sharding rules for them.

MaxText names axes in the code that creates a parameter. For 0.2.5, this table maps the ends of paths to
those names. Arrays with Hugging Face names get axis names from the family's rows; a merged axis gets the
name of its outermost part.

Rules for activations and caches are left out, because checkpoints do not have such axes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from ckpttools.array.tree import Path, Tree, dotted, keystr
from ckpttools.core.errors import CheckpointError
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import lengths_of
from ckpttools.maxtext.model_options import ModelOptions, family_for
from ckpttools.maxtext.versions import SCAN_AXIS
from ckpttools.maxtext.view import view_of

AxisNames = tuple[tuple[str, ...], ...]
"""The names of each axis of an array, the most specific first; () for an unnamed axis."""

# From layers/ and models/ of MaxText 0.2.5. "-" is an unnamed axis, and the first match counts.
_AXES = (
    ("*token_embedder/embedding", "vocab embed_vocab"),
    ("*logits_dense/kernel", "embed_vocab vocab"),
    ("*norm*/scale", "norm"),
    ("*norm*/bias", "norm"),
    ("*/query/kernel", "embed_attn q_heads kv"),
    ("*/query/bias", "q_heads kv"),
    ("*/key/kernel", "embed_attn kv_heads kv_head_dim"),
    ("*/value/kernel", "embed_attn kv_heads kv_head_dim"),
    ("*/key/bias", "kv_heads kv_head_dim"),
    ("*/value/bias", "kv_heads kv_head_dim"),
    ("*/out/kernel", "heads kv embed_attn"),
    ("*/out/bias", "embed_attn"),
    ("*/wq_a/kernel", "embed_attn q_lora_up_proj"),
    ("*/wq_b/kernel", "q_lora q_heads kv"),
    ("*/wkv_a/kernel", "embed_attn kv_lora_up_proj"),
    ("*/wkv_b/kernel", "kv_lora kv_heads kv_head_dim"),
    ("*/in_proj_*/kernel", "embed_attn gdn_head"),
    ("*/out_proj/kernel", "gdn_head embed_attn"),
    ("*/shared_expert_gate/kernel", "embed -"),
    ("*/gate/kernel", "embed -"),
    ("*/wi_0/kernel", "embed mlp"),
    ("*/wi_1/kernel", "embed mlp"),
    ("*/wo/kernel", "mlp embed"),
    ("*/wi_0", "exp embed_moe mlp_moe"),
    ("*/wi_1", "exp embed_moe mlp_moe"),
    ("*/wo", "exp mlp_moe embed_moe"),
)
# Axis names in the rows of families for which MaxText has several names.
_FAMILY_NAMES = {
    "embed_vocab": "embed",
    "embed_attn": "embed",
    "embed_moe": "embed",
    "q_heads": "heads",
    "kv": "head_dim",
    "kv_head_dim": "head_dim",
    "exp": "expert",
    "mlp_moe": "mlp",
    "q_lora": "q_latent",
    "kv_lora": "kv_latent",
}
_STACKS = ("dense_layers", "moe_layers", "local_layers")
_NUMBER = re.compile(r"\d+")


def axis_names(tree: Tree) -> dict[Path, AxisNames]:
    """Return the axis names of all arrays with a known name, either MaxText's or a family's."""
    if view_of(tree).is_maxtext:
        axis = view_of(tree).scan_axis
        scan_axis = SCAN_AXIS if axis is None else axis
        result = {
            path: _maxtext_axis_names(path, len(array.shape), scan_axis)
            for path, array in tree.arrays.items()
        }
    else:
        result = _hf_axis_names(tree)
    return {path: names for path, names in result.items() if any(names)}


def _maxtext_axis_names(path: Path, rank: int, scan_axis: int) -> AxisNames:
    """Return the axis names of a MaxText array; () if its name or rank is unknown."""
    name = keystr(path).removesuffix("/value")
    words = next((axes.split() for pattern, axes in _AXES if fnmatchcase(name, pattern)), None)
    if words is None or len(words) > rank:
        return ()
    names = list(map(_alternatives, words))
    stack = next((key for key in _STACKS if key in path), "layers")
    at = min(scan_axis, len(names))
    added: list[tuple[str, ...]] = [(stack, "layer"), *[()] * rank][: rank - len(names)]
    return (*names[:at], *added, *names[at:])


def _alternatives(word: str) -> tuple[str, ...]:
    if word == "-":
        return ()
    return (word, _FAMILY_NAMES[word]) if word in _FAMILY_NAMES else (word,)


def _hf_axis_names(tree: Tree) -> dict[Path, AxisNames]:
    try:
        rows, lengths = _rows(tree)
    except CheckpointError:
        return {}
    # Names that differ only in indices, such as layers and experts, are looked up once.
    known: dict[tuple[str, int], AxisNames] = {}
    result: dict[Path, AxisNames] = {}
    for path, array in tree.arrays.items():
        name = dotted(path)
        kind = _NUMBER.sub("#", name), len(array.shape)
        if kind not in known:
            sides = (row for row in rows if row.right.key.match(name, lengths) is not None)
            known[kind] = next(
                (_row_axis_names(row) for row in sides if len(row.right.groups) == kind[1]), ()
            )
        result[path] = known[kind]
    return result


def _rows(tree: Tree) -> tuple[tuple[Row, ...], Mapping[str, int]]:
    """Return the rows of the model's family in the tree's spelling, and the known lengths."""
    config = tree.metadata.config
    family = family_for(config, ModelOptions(), tree.metadata.location)
    names = frozenset(map(dotted, tree.arrays))
    table = family.table(config, CONFIG, spelling=family.spelling_of(names))
    return table.rows, lengths_of(table.sizes)


def _row_axis_names(row: Row) -> AxisNames:
    """Return the axis names of a row's Hugging Face array: MaxText's names if known, else the row's own."""
    path = tuple(row.left.key.first().split("."))
    of_left = _maxtext_axis_names(path, len(row.left.groups), SCAN_AXIS)
    # Only the outermost part of a merged axis can be sharded while the other parts stay complete.
    named = {group[0]: own for group, own in zip(row.left.groups, of_left, strict=False)}
    return tuple(named.get(group[0], (group[0],)) for group in row.right.groups)


def is_maxtext_axis(name: str) -> bool:
    """Return whether MaxText uses a logical axis name, also for activations and caches, or families do."""
    return name in _LOGICAL_AXES or name.startswith(_PREFIXES_OF_OTHERS)


# Names without a prefix are those in `logical_axis_rules` of MaxText 0.2.5 that are not names of parameters.
_OTHER_AXES = ("embed_no_exp", "embed_no_exp_moe", "expert_only", "num_pages", "tokens_per_page")
_PREFIXES_OF_OTHERS = ("activation_", "cache_", "decode_", "paged_", "prefill_", "segment_ids_")

MESH_AXES = (
    "diloco",
    "data",
    "stage",
    "fsdp",
    "fsdp_transpose",
    "context",
    "context_usp_ulysses",
    "context_autoregressive",
    "tensor",
    "tensor_sequence",
    "expert",
    "autoregressive",
)

_FSDP = ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "expert")
_FSDP_ALONE = ("fsdp", "context", "context_usp_ulysses", "expert")
_TENSOR = ("tensor", "tensor_sequence", "autoregressive")

LOGICAL_AXIS_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("circular_repeats", ()),
    ("vocab", _TENSOR),
    ("embed_vocab", _FSDP),
    ("heads", _TENSOR),
    ("q_heads", _TENSOR),
    ("kv_heads", _TENSOR),
    ("qkv", ()),
    ("kv", ()),
    ("kv_head_dim", ()),
    ("q_lora", _FSDP),
    ("q_lora", _FSDP_ALONE),
    ("q_lora_up_proj", ()),
    ("kv_lora", _FSDP),
    ("kv_lora", _FSDP_ALONE),
    ("kv_lora_up_proj", ()),
    ("embed_attn", _FSDP),
    ("exp", ("expert",)),
    ("mlp_moe", ("fsdp_transpose", *_TENSOR)),
    ("embed_moe", ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses")),
    ("embed_moe", ("fsdp", "context", "context_usp_ulysses")),
    ("embed_router", ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses")),
    ("embed_router", ("fsdp", "context", "context_usp_ulysses")),
    ("mlp", ("fsdp_transpose", *_TENSOR)),
    ("gdn_head", ("fsdp_transpose", *_TENSOR)),
    ("embed", _FSDP),
    ("embed", _FSDP_ALONE),
    ("norm", ("tensor",)),
    ("layers", ("stage",)),
    ("diloco", ("diloco",)),
    ("engram_dim", ("tensor",)),
    ("dense_layers", ()),
    ("moe_layers", ()),
    ("local_layers", ()),
    ("mhc", ()),
    ("mlp_no_fsdp", _TENSOR),
    ("exp_with_fsdp", ("fsdp",)),
)
_LOGICAL_AXES = frozenset(
    (*dict(LOGICAL_AXIS_RULES), *_FAMILY_NAMES, *_FAMILY_NAMES.values(), *_OTHER_AXES, "layer")
)
