"""Convert Llama weights with the names of Meta's code, which torchtitan also uses, to Hub names.

The conversion reorders the rows of queries and keys, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttools.array.tree import Path, Tree, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, ConfigError, FormatError, listing
from ckpttools.core.message_terms import action, option, repeated_option
from ckpttools.core.notes import Notes
from ckpttools.core.text import matches_any
from ckpttools.formats.adapters import ADAPTER, is_adapter
from ckpttools.formats.sidecar_files import CONFIG, is_saved_by_peft
from ckpttools.mapping.coverage import NotCoveredError
from ckpttools.maxtext.model_options import config_hint
from ckpttools.maxtext.recognition import (
    FamilyKeys,
    find_unowned_arrays,
    hub_keys,
    mask_numbers,
    prefix_hint,
)
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.family import Family
from ckpttools.model_families.llama_names import IDENTIFYING_NAMES, MODEL_TYPES, OPTIONAL, REARRANGED, RENAMED
from ckpttools.model_families.registry import families_of_type, family_of
from ckpttools.transforms.base import Move, Transformed, move_leaves
from ckpttools.transforms.strip_wrappers import drop_states, patterns_outside_state_dict, strip_wrappers

if TYPE_CHECKING:
    from ckpttools.transforms.rename import Rule


def patterns_outside_model(tree: Tree, drop: Collection[str] = ()) -> list[str]:
    """Return `patterns_outside_state_dict`, and patterns for a trainer's state next to the weights.

    Args:
        tree: The tree of a PyTorch checkpoint.
        drop: Patterns of dotted array names that are left out in any case.
    """
    result = patterns_outside_state_dict(tree, drop)
    view, known, numbers = view_of(tree), (*result, *drop), tree.metadata.scalars
    leaves = (*view.of_role("optimizer"), *view.of_role("other"))
    names = (dotted(path) for path in leaves if path not in numbers)
    state = [name for name in names if not matches_any(name, known)]
    if not state:
        return result
    own = {head for path in view.of_role("parameter") for head in _dotted_prefixes(dotted(path))}
    return list(dict.fromkeys((*result, *(_pattern(name, own) for name in state))))


def _dotted_prefixes(name: str) -> Iterator[str]:
    """Yield the proper dotted prefixes of a name."""
    return (name[:at] for at, sign in enumerate(name) if sign == ".")


def _pattern(name: str, own: Collection[str]) -> str:
    """Return a pattern for an array and its neighbors that do not belong to the model."""
    return next((f"{head}.*" for head in _dotted_prefixes(name) if head not in own), name)


@cache
def _rules() -> tuple[Rule, ...]:
    """Build the rules for the names of Meta's code; few models need them."""
    from ckpttools.transforms.rename import Rule

    renamed = (Rule(*item) for item in (*REARRANGED, *RENAMED))
    return (*renamed, *(Rule(name, hub, optional=True) for name, hub in OPTIONAL))


# A trainer stores a handful of dictionaries next to the model. Each is looked up in all names, twice. With
# 10,000 names, this takes 0.2 s for 32 dictionaries, and 6 s for 1,000, which no trainer writes.
_MAX_SIDE_DICTIONARIES = 32
OTHER_MODELS_HINT = (
    "these are names of torchtitan or Meta's own code, which are supported for models with model_type llama: "
    f"rename others with rules for {action('remap')}, and note that the order of rotary pairs may differ"
)
"""The hint for Meta's names with the configuration of another model."""
_NOT_LOADED = "which transformers and vLLM do not load"
# The matrix of a linear layer.
_FLAX_SUFFIX = ".kernel"


def has_llama_names(names: Iterable[str]) -> bool:
    """Return whether weights have the names of Meta's Llama code."""
    return {*names}.issuperset(IDENTIFYING_NAMES)


def hub_name(name: str) -> str | None:
    """Return the Hub name for a name in Meta's Llama code; None if there is none."""
    for rule in _rules():
        filled = rule.match((name,))
        if filled and rule.target_template is not None:
            return rule.target_template.format(filled)
    return None


def with_hub_names(tree: Tree) -> Transformed:
    """Convert a Llama model with Meta's names to the names and row order of the Hub; keep other trees.

    Raises:
        CheckpointError: The sizes in the configuration differ from those of the arrays.
    """
    config = tree.metadata.config or {}
    pairs = _pairs(config) if config.get("model_type") in MODEL_TYPES else None
    if pairs is None or not has_llama_names(map(dotted, tree.arrays)):
        return Transformed(tree, Notes())
    from ckpttools.transforms.rename import Remap

    result = Remap(_rules(), {"pair": pairs, "half": 2}, location="the names of Meta's own Llama code")(tree)
    remark = (
        "names of torchtitan or Meta's own code become Hub names, and rows of queries and keys get the Hub's "
        "order of rotary halves"
    )
    return Transformed(result.tree, result.notes + Notes(remarks=(remark,)))


@dataclass(frozen=True)
class ToHubNames:
    """A transform that gives a trainer's PyTorch model Hub names."""

    def __call__(self, tree: Tree) -> Transformed:
        """Return the tree, unchanged if it already has Hub names.

        Raises:
            FormatError: The tree is a MaxText tree, has more than a model, has names with a prefix, or has
                Meta's names without the configuration of a Llama model.
            CheckpointError: The sizes in the configuration differ from those of the arrays.
        """
        if view_of(tree).is_maxtext:
            raise FormatError(
                "these are names of MaxText",
                location=tree.metadata.location or None,
                hint=f"{action('maxtext_to_hf', 'SRC', 'DST')} converts them",
            )
        built = select_model(
            tree,
            others="the checkpoint contains arrays outside the model, which have no Hub names",
            leaving="leave them out with {}",
            names="the Hub names of these arrays are unknown",
        )
        result = find_unowned_arrays(built.tree)
        if result is not None and result.prefixes:
            raise FormatError(
                f"the Hub names have the prefix {' or '.join(result.prefixes)} here",
                location=tree.metadata.location or None,
                expected=f"names of the family {result.family}",
                hint=prefix_hint(result.prefixes, tree),
            )
        return built


def select_model(tree: Tree, *, others: str, leaving: str, names: str) -> Transformed:
    """Return a trainer's PyTorch model under Hub names, refusing other arrays.

    Args:
        tree: The model.
        others: The message if the tree has more than the model.
        leaving: The hint for that case, with {} for options that leave out the other arrays.
        names: The message if Meta's names remain.

    Raises:
        FormatError: The tree has more than the model, Meta's names remain, or the sizes in the configuration
            differ from those of the arrays.
        CheckpointError: The arrays cannot be divided into the sizes in the configuration.
    """
    location = tree.metadata.location or None
    stripped = drop_states(tree)
    plain = strip_wrappers(stripped.tree)
    if result := patterns_outside_model(plain.tree):
        hint = leaving.format(repeated_option("drop", result))
        raise FormatError(others, location=location, got=", ".join(result), hint=hint)
    named = with_family_names(plain.tree)
    built = with_hub_names(named.tree)
    if has_llama_names(map(dotted, built.tree.arrays)):
        hint = OTHER_MODELS_HINT if tree.metadata.config else config_hint(tree.metadata.location)
        raise FormatError(names, location=location, hint=hint)
    if built.tree is not named.tree:
        _require_sizes(built.tree)
    return Transformed(built.tree, stripped.notes + plain.notes + named.notes + built.notes)


def _require_sizes(tree: Tree) -> None:
    """Raise FormatError if arrays under Hub names have other sizes than those of the model.

    Meta's code writes one file per device, `consolidated.00.pth` and so on, with matrices cut into parts. The
    contents of such a file do not show that it is one of several.
    """
    config = tree.metadata.config or {}
    try:
        table = family_of(config, CONFIG).table(config, CONFIG)
        table.require_fit({dotted(path): array for path, array in tree.arrays.items()})
    except NotCoveredError as error:
        if error.coverage.misshapen:
            raise FormatError(
                "the shapes of arrays contradict config.json:"
                + listing([str(item) for item in error.coverage.misshapen]),
                location=tree.metadata.location or None,
                hint="if there are files such as consolidated.01.pth, each one has a part of the matrices: "
                "convert_llama_weights_to_hf.py of transformers joins them; otherwise, check that "
                "config.json belongs to these weights",
            ) from error
    except ConfigError:
        return  # The caller reads the arrays again if necessary.


def with_name_remarks(tree: Tree) -> Transformed:
    """Add remarks on how weights get names that can be loaded, without other changes."""
    return Transformed(tree, Notes(remarks=tuple(_name_remarks(tree))))


def _name_remarks(tree: Tree) -> Iterator[str]:
    by_hub = f"{option('names', 'hub')} writes Hub names"
    if has_llama_names(map(dotted, tree.arrays)):
        yield f"names are those of torchtitan or Meta's own code, {_NOT_LOADED}: {by_hub}"
        return
    if is_adapter(tree):
        if not is_saved_by_peft(tree):
            yield f"{ADAPTER} is not written: PEFT loads an adapter as adapter_model.safetensors next to it"
        return
    result = find_unowned_arrays(tree)
    if result is None or not result.names or view_of(tree).is_maxtext:
        return
    if result.prefixes:
        prefixes = " or ".join(result.prefixes)
        yield f"names begin with {prefixes}, {_NOT_LOADED}: {prefix_hint(result.prefixes, tree)}"
    elif any(name.endswith(_FLAX_SUFFIX) for name in result.names):
        yield (
            f"names and axes are those of Flax, {_NOT_LOADED}: {option('map')} accepts rules that change both"
        )
    elif strip_wrappers(tree, patterns_outside_model(tree)).tree is not tree:
        yield f"names contain the wrappers of a trainer, {_NOT_LOADED}: {by_hub}"


class HubModel(NamedTuple):
    """A tree under Hub names, with remarks."""

    tree: Tree
    remarks: tuple[str, ...] = ()


def as_hub_model(tree: Tree, config: Mapping[str, Any] | None) -> HubModel:
    """Return a trainer's PyTorch model under Hub names; return the tree itself if it has other names.

    Args:
        tree: The model; arrays outside it keep their names.
        config: The model's configuration, if known.
    """
    other_patterns = patterns_outside_model(tree)
    if len(other_patterns) > _MAX_SIDE_DICTIONARIES:
        return HubModel(tree)
    plain = strip_wrappers(tree, other_patterns)
    result, remarks = plain.tree, plain.notes.remarks
    if has_llama_names(map(dotted, result.arrays)):
        try:
            hub = with_hub_names(result.with_metadata(config=config))
        except CheckpointError:
            # The configuration has other sizes, so the names stay unchanged.
            return HubModel(result, remarks)
        if hub.notes.remarks:
            return HubModel(hub.tree, remarks + hub.notes.remarks)
        return HubModel(result, remarks)
    named = with_family_names(result.with_metadata(config=config), other_patterns)
    return (
        HubModel(named.tree, remarks + named.notes.remarks)
        if named.notes.remarks
        else HubModel(result, remarks)
    )


def _pairs(config: Mapping[str, Any]) -> int | None:
    """Return the number of rotary pairs per head; None if the configuration does not state it."""
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    own = config.get("head_dim")
    if type(own) is not int and type(width) is int and type(heads) is int and heads > 0:
        own = width // heads
    return own // 2 if type(own) is int and own > 1 else None


# Recognize array names of a Hugging Face model whose prefix differs from its family's.
#
# `AutoModel.save_pretrained` and sentence-transformers save a backbone without `model.`. Trainers and
# wrappers add `transformer.`, `language_model.` or `module.`. The rest of each name identifies the array.
#
# Maximum number of keys that a wrapper adds: `base_model.model.`, `model.language_model.`.
_MAX_KEYS = 3


def with_family_names(tree: Tree, drop: Collection[str] = ()) -> Transformed:
    """Give a tree the names of its family; no change if they already match, or if several prefixes match.

    Args:
        tree: A Hugging Face model.
        drop: Patterns of dotted names of arrays that are left out in any case.
    """
    paths = {dotted(path): path for path in tree.arrays if len(path) == 1}
    names = [name for name in paths if not matches_any(name, drop)]
    forms = [form for family in _families_of(tree) for form in hub_keys(family)]
    unmatched = [[name for name in names if not is_known(name)] for is_known in map(_recognizer, forms)]
    if len(paths) < len(tree.arrays) or not all(unmatched):
        return Transformed(tree, Notes())
    for form, unknown in zip(forms, unmatched, strict=True):
        readings = {tuple(result.items()): result for result in _renamings(names, unknown, form)}
        if len(readings) == 1:
            (renamed,) = readings.values()
            targets: dict[Path, Path] = {paths[name]: (target,) for name, target in renamed.items()}
            moves = [Move(path, targets.get(path, path), leaf) for path, leaf in tree.items()]
            return Transformed(
                move_leaves(tree, moves), Notes(remarks=(_renaming_remark(unknown[0], renamed),))
            )
    return Transformed(tree, Notes())


def _renaming_remark(name: str, renamed: Mapping[str, str]) -> str:
    return f"recognized names whose prefix differs from the family's: {name} is {renamed[name]}"


def _families_of(tree: Tree) -> list[Family]:
    config = tree.metadata.config or {}
    if config.get("auto_map"):
        return []
    return [*families_of_type(config.get("model_type"))]


def _recognizer(forms: FamilyKeys) -> Callable[[str], bool]:
    """Return a test for names that belong to a family, including scales and other parts of its modules."""
    modules = {text.rpartition(".")[0] for text in forms.by_text} - {""}

    def is_known(name: str) -> bool:
        text = mask_numbers(name)
        return text in forms.by_text or text.rpartition(".")[0] in modules or matches_any(name, forms.ignored)

    return is_known


def _renamings(names: Sequence[str], unknown: Sequence[str], forms: FamilyKeys) -> Iterator[dict[str, str]]:
    """Yield renamings that exchange one prefix and give all arrays distinct names of the family."""
    is_known = _recognizer(forms)
    prefixes = {"", *(_layers_prefix(text) for text in forms.by_text)}
    for removed in _shared_prefixes(unknown):
        for added in sorted(prefixes):
            renamed = {name: _rename(name, removed, added, is_known) for name in unknown}
            all_names = [renamed.get(name, name) for name in names]
            if all(map(is_known, renamed.values())) and len({*all_names}) == len(all_names):
                yield renamed


def _rename(name: str, removed: str, added: str, is_known: Callable[[str], bool]) -> str:
    """Exchange a name's prefix; remove it only if the family has the rest as a name (`lm_head.weight`)."""
    stripped = name.removeprefix(removed)
    return stripped if is_known(stripped) else added + stripped


def _layers_prefix(text: str) -> str:
    """Return the prefix before the layers: `model.` for `model.layers.#.mlp.up_proj.weight`."""
    keys = text.split(".")
    at = keys.index("#") if "#" in keys else 0
    return "".join(f"{key}." for key in keys[: max(at - 1, 0)])


def _shared_prefixes(names: Sequence[str]) -> Iterator[str]:
    """Yield the prefixes that all names share: the empty prefix, one key, or several keys."""
    keys = [name.split(".") for name in names]
    for count in range(_MAX_KEYS + 1):
        heads = {tuple(parts[:count]) for parts in keys}
        if len(heads) > 1:
            return
        yield "".join(f"{key}." for key in heads.pop())
