"""Remove the wrappers that PyTorch trainers add to the names of weights.

`{"model": model.state_dict()}` in a distributed checkpoint, `module.` of DistributedDataParallel,
`_orig_mod.` of `torch.compile` and `_fsdp_wrapped_module.` of FSDP all denote the same weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from ckpttools.array.tree import Path, Tree, dotted
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count, matches_any, plural, sample_names
from ckpttools.roles.buffers import is_buffer
from ckpttools.transforms.base import Move, Transformed, move_leaves

# Keys under which trainers store the state dict of a model: torchtitan and accelerate, Lightning, DeepSpeed.
_OUTER = frozenset(("app", "model", "model_state_dict", "module", "policy", "state_dict", "weights"))
# Wrappers insert these keys anywhere in a name. Models do not use them for their own modules.
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
# PyTorch's name for the result of `Module.get_extra_state`, which is never a weight.
_STATE = "_extra_state"
_MODULE, _MODEL = "module.", "model."


def strip_wrappers(tree: Tree, drop: Collection[str] = ()) -> Transformed:
    """Return the tree with plain weight names. It is unchanged unless all arrays have the same wrappers.

    Python numbers next to a state dict (`epoch`) are left out with the wrappers, except those in a list with
    arrays, which would then have a gap.

    Args:
        tree: Tree of a PyTorch checkpoint. Trees of other formats do not have such names and are left
            unchanged.
        drop: Patterns of dotted names of arrays that will be left out; these may have any name.
    """
    weights = [path for path in tree.arrays if path not in tree.metadata.scalars]
    weights = [path for path in weights if not matches_any(dotted(path), drop)]
    outer = _outer_keys(weights)
    names = {path: str(path[-1]) for path in weights if len(path) == len(outer) + 1}
    if not names or len(names) < len(weights):
        return Transformed(tree, Notes())
    plain, stripped = _strip_names(names)
    if (not outer and not stripped) or len({*plain.values()}) < len(plain):
        return Transformed(tree, Notes())
    other_paths = [path for path in tree.arrays if path not in plain and path not in tree.metadata.scalars]
    kept_paths = dict.fromkeys([*other_paths, *_list_siblings(tree, other_paths)])
    moves = [Move(path, (name,), tree[path]) for path, name in plain.items()]
    moves += [Move(path, path, tree[path]) for path in kept_paths]
    numbers = [
        dotted(path) for path in tree.arrays if path in tree.metadata.scalars and path not in kept_paths
    ]
    return Transformed(move_leaves(tree, moves), Notes(remarks=tuple(_remarks(outer, stripped, numbers))))


def _list_siblings(tree: Tree, paths: Iterable[Path]) -> Iterator[Path]:
    """Return all leaves in the outermost lists that contain these leaves."""
    lists = set(map(_list_of, paths)) - {None}
    return (path for path in tree if _list_of(path) in lists)


def _list_of(path: Path) -> Path | None:
    """Return the outermost list that contains a path."""
    return next((path[:at] for at, key in enumerate(path) if isinstance(key, int)), None)


def find_buffers(tree: Tree, drop: Collection[str] = ()) -> list[Path]:
    """Find the buffers of a tree, except those whose dotted names match a pattern in `drop`."""
    names = {path: dotted(path) for path in tree.arrays}
    return [
        path
        for path, name in names.items()
        if is_buffer(name, tree.arrays[path]) and not matches_any(name, drop)
    ]


def drop_states(tree: Tree, drop: Collection[str] = ()) -> Transformed:
    """Leave out arrays that PyTorch modules store in addition to weights.

    These are states, such as scales of Transformer Engine, and buffers, which models recompute.

    Args:
        tree: A model.
        drop: Patterns of dotted names of arrays that are left out anyway; this function keeps them.
    """
    names = {path: dotted(path) for path in tree.arrays}
    names = {path: name for path, name in names.items() if name.rpartition(".")[2] == _STATE}
    states = {path for path, name in names.items() if not matches_any(name, drop)}
    buffers = find_buffers(tree, drop)
    left = {*states, *buffers}
    if not left:
        return Transformed(tree, Notes())
    moves = [Move(path, path, leaf) for path, leaf in tree.items() if path not in left]
    remarks = []
    if states:
        remarks.append(
            f"{array_count(states)} left out, which modules store in addition to weights (*.{_STATE})"
        )
    if buffers:
        names_of_buffers = sample_names([dotted(path) for path in buffers])
        remarks.append(f"left out, because models recompute these buffers: {names_of_buffers}")
    return Transformed(move_leaves(tree, moves), Notes(remarks=tuple(remarks)))


def patterns_outside_state_dict(tree: Tree, drop: Collection[str] = ()) -> list[str]:
    """Return patterns for the arrays outside a model's state dict, such as those of an optimizer.

    The list is empty if there are none.

    Args:
        tree: The tree of a PyTorch checkpoint.
        drop: See `strip_wrappers`.
    """
    arrays = [path for path in tree.arrays if not matches_any(dotted(path), drop)]
    weights = (path for path in arrays if path not in tree.metadata.scalars)
    above = Counter(path[:-1] for path in weights if all(key in _OUTER for key in path[:-1]))
    if not above:
        return []
    ((outer, _),) = above.most_common(1)
    numbers = tree.metadata.scalars
    # Numbers next to the state dict are dropped with the wrappers.
    other_paths = [p for p in arrays if (p[:-1] != outer or p in numbers) and not (outer and p in numbers)]
    others = set(other_paths)
    own = [dotted(path) for path in arrays if path not in others]
    patterns = {path: _pattern(path, outer) for path in other_paths}
    # Keys of a flat state dict have dots: "model.*" would also match "model.norm.weight".
    unsafe = {
        pattern
        for pattern in set(patterns.values())
        if pattern.endswith(".*") and any(name.startswith(pattern[:-1]) for name in own)
    }
    result = (dotted(path) if pattern in unsafe else pattern for path, pattern in patterns.items())
    return list(dict.fromkeys(result))


def _pattern(path: Path, outer: Path) -> str:
    """Return the pattern that matches a path and everything next to it, except arrays below `outer`."""
    shared = next((at for at, (a, b) in enumerate(zip(path, outer, strict=False)) if a != b), len(outer))
    return dotted(path) if len(path) <= shared + 1 else f"{dotted(path[: shared + 1])}.*"


def _outer_keys(paths: Collection[Path]) -> Path:
    """Return the keys of the dictionaries around the one state dict that contains all arrays."""
    above = {path[:-1] for path in paths}
    outer = above.pop() if len(above) == 1 else ()
    return outer if all(key in _OUTER for key in outer) else ()


def _strip_names(names: dict[Path, str]) -> tuple[dict[Path, str], list[str]]:
    """Strip common prefixes and wrappers from names. Also returns the stripped parts."""
    stripped: dict[str, None] = {}
    for _ in range(4):
        before = names
        for item in filter(_may_be_wrapped, names.values()):
            stripped.update((f"{word}.", None) for word in item.split(".")[:-1] if word in _WRAPPERS)
        names = {path: _unwrap_name(name) for path, name in names.items()}
        for prefix, is_prefix in ((_MODULE, _all_start_with), (_MODEL, _has_doubled_prefix)):
            if is_prefix(names.values(), prefix):
                stripped[prefix] = None
                names = {path: name.removeprefix(prefix) for path, name in names.items()}
        if names == before:
            break
    return names, list(stripped)


def _may_be_wrapped(name: str) -> bool:
    return any(word in name for word in _WRAPPERS)


def _unwrap_name(name: str) -> str:
    if not _may_be_wrapped(name):
        return name
    *above, last = name.split(".")
    return ".".join([*(word for word in above if word not in _WRAPPERS), last])


def _all_start_with(names: Iterable[str], prefix: str) -> bool:
    return all(name.startswith(prefix) for name in names)


def _has_doubled_prefix(names: Collection[str], prefix: str) -> bool:
    """Return whether a prefix that models themselves have occurs twice: `model.model.layers`."""
    inside = (prefix + prefix, f"{prefix}lm_head.")
    return _all_start_with(names, prefix) and any(name.startswith(inside) for name in names)


def _remarks(outer: Path, stripped: Collection[str], numbers: Sequence[str]) -> Iterator[str]:
    parts = [f"the state dict below {dotted(outer)!r}"] if outer else []
    parts += [f"names without {', '.join(map(repr, stripped))}"] if stripped else []
    parts += [f"{plural(len(numbers), 'number')} left out ({sample_names(numbers)})"] if numbers else []
    yield f"read from a trainer's checkpoint: {', '.join(parts)}"
