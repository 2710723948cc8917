"""`verify` and `diff` agree on whether two checkpoints are equal, whatever differs between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import Path, cast, keystr, to_maxtext
from support.locations import GOLDEN

import ckpttools
from ckpttools import DTYPES, Empty, LazyArray, Text, ToMaxText, Tree
from ckpttools.array.tree import Leaf
from ckpttools.testing.strategies import noise, stored

Pick = Callable[[int], int]
Edit = Callable[[Tree, Pick], Tree]
HUB_PREFIX = "model."


@cache
def model(family: str, kind: str) -> Tree:
    """Two layers of a small model: as Hugging Face has it, or as MaxText does, scanned or not."""
    tree = ckpttools.open(GOLDEN / family / "hf")
    config = {**(tree.metadata.config or {}), "num_hidden_layers": 2}
    config.pop("layer_types", None)
    kept = {path: leaf for path, leaf in tree.items() if not layer_of(path) >= 2}
    tree = Tree(kept, tree.metadata).with_metadata(config=config)
    return tree if kind == "hf" else to_maxtext(tree, ToMaxText(scan=kind == "scanned")).state


def layer_of(path: Path) -> int:
    keys = str(path[0]).split(".")
    return int(keys[keys.index("layers") + 1]) if "layers" in keys else -1


def some(tree: Tree, pick: Pick) -> tuple[Path, LazyArray]:
    paths = list(tree.arrays)
    path = paths[pick(len(paths))]
    return path, tree.arrays[path]


def changed(tree: Tree, more: dict[Path, Leaf], less: tuple[Path, ...] = ()) -> Tree:
    kept = {path: leaf for path, leaf in tree.items() if path not in less}
    return Tree({**kept, **more}, tree.metadata)


def array_of(values: np.ndarray, dtype: str) -> LazyArray:
    return stored(values.view(DTYPES[dtype].carrier), DTYPES[dtype])


def beside(path: Path, name: str) -> Path:
    """A path next to another one, such as that of a bias next to a weight's."""
    if len(path) > 1:
        return (*path[:-1], name)
    return (f"{str(path[0]).rpartition('.')[0]}.{name}",)


def drop(tree: Tree, pick: Pick) -> Tree:
    return changed(tree, {}, (some(tree, pick)[0],))


def add(tree: Tree, pick: Pick) -> Tree:
    path, array = some(tree, pick)
    name = ("bias", "weight_scale_inv", "alias", "masked_bias")[pick(4)]
    return changed(tree, {beside(path, name): tree.get(beside(path, name), array)})


def rename(tree: Tree, pick: Pick) -> Tree:
    path, array = some(tree, pick)
    return changed(tree, {(*path[:-1], f"{path[-1]}_x"): array}, (path,))


def change_a_bit(tree: Tree, pick: Pick) -> Tree:
    path, array = some(tree, pick)
    values = array.read().copy()
    data = values.reshape(-1).view(np.uint8)
    data[pick(data.size)] ^= 1 << pick(8)
    return changed(tree, {path: stored(values, array.dtype)})


def change_a_zero(tree: Tree, pick: Pick) -> Tree:
    path, array = some(tree, pick)
    values = array.read().copy()
    data = values.reshape(-1).view(np.uint8)
    data[: array.dtype.itemsize] = 0
    data[array.dtype.itemsize - 1] = pick(2) << 7
    return changed(tree, {path: stored(values, array.dtype)})


def change_the_dtype(tree: Tree, pick: Pick) -> Tree:
    path, array = some(tree, pick)
    return changed(tree, {path: cast(array, DTYPES[("float32", "bfloat16")[pick(2)]])})


def change_the_shape(tree: Tree, pick: Pick) -> Tree:
    path, array = some(tree, pick)
    shape = (*array.shape[:-1], array.shape[-1] + 1) if array.shape else (1,)
    return changed(tree, {path: stored(noise(shape, array.dtype), array.dtype)})


def add_a_leaf(tree: Tree, pick: Pick) -> Tree:
    leaf = (Text("a"), Text("b"), Empty("None"), Empty("Dict"))[pick(4)]
    return changed(tree, {(("note",), ("meta", "note"))[pick(2)]: leaf})


def replace_by_a_leaf(tree: Tree, pick: Pick) -> Tree:
    return changed(tree, {some(tree, pick)[0]: (Text("a"), Empty("None"))[pick(2)]})


def add_a_number(tree: Tree, pick: Pick) -> Tree:
    built = changed(tree, {("epoch",): array_of(np.array(3), "int64")})
    scalars = built.metadata.scalars | ({("epoch",)} if pick(2) else set())
    return built.with_metadata(scalars=scalars, format=(None, "orbax")[pick(2)])


def pad_rows(tree: Tree, pick: Pick) -> Tree:
    path = next((path for path, item in tree.arrays.items() if "embed" in keystr(path)), None)
    if path is None or len(tree.arrays[path].shape) != 2:
        return tree
    array = tree.arrays[path]
    values = np.pad(array.read().view(array.dtype.carrier), ((0, 3), (0, 0)))
    values[-1, -1] = pick(2)
    return changed(tree, {path: stored(values, array.dtype)})


def add_a_head(tree: Tree, pick: Pick) -> Tree:
    array = next((item for path, item in tree.arrays.items() if "embed" in keystr(path)), None)
    if array is None:
        return tree
    head = array if pick(2) else stored(noise(array.shape, array.dtype, 3), array.dtype)
    return changed(tree, {("lm_head.weight",): head})


def remove_parts(tree: Tree, pick: Pick) -> Tree:
    part = ("lm_head", "logits_dense", "norm", "layers.1.", "layers_1")[pick(5)]
    return changed(tree, {}, tuple(path for path in tree.arrays if part in keystr(path)))


def add_a_layer(tree: Tree, pick: Pick) -> Tree:
    more = {(str(p[0]).replace("layers.1.", "layers.2."),): tree[p] for p in tree if layer_of(p) == 1}
    return changed(tree, more)


def add_state(tree: Tree, pick: Pick) -> Tree:
    held = [path for path in tree.arrays if "params" in path][: 1 + pick(99)]
    more: dict[Path, Leaf] = {("opt_state", "mu", *path): tree[path] for path in held}
    more[("opt_state", "count")] = array_of(np.array(pick(2)), "int64")
    return changed(tree, more, (("opt_state",),))


def add_bookkeeping(tree: Tree, pick: Pick) -> Tree:
    path = (("step",), ("rngs", "params", "key"))[pick(2)]
    return changed(tree, {path: array_of(np.array(pick(2)), "int64")})


def change_the_prefix(tree: Tree, pick: Pick) -> Tree:
    if any(len(path) > 1 for path in tree):
        return tree
    prefix = ("", "model.", "module.", "transformer.")[pick(4)]
    names = {path: (prefix or str(path[0]).removeprefix(HUB_PREFIX)) for path in tree}
    moved = {(prefix + str(path[0]) if prefix else names[path],): leaf for path, leaf in tree.items()}
    return Tree(moved, tree.metadata)


def join_keys(tree: Tree, pick: Pick) -> Tree:
    return Tree({(keystr(path),): leaf for path, leaf in tree.items()}, tree.metadata)


def add_frequencies(tree: Tree, pick: Pick) -> Tree:
    values = frequencies(tree) * (1, 1, 2)[pick(3)]
    return changed(tree, {("model.layers.0.self_attn.rotary_emb.inv_freq",): array_of(values, "float32")})


def add_a_mask(tree: Tree, pick: Pick) -> Tree:
    mask = np.tril(np.ones((1, 1, 4, 4), np.uint8))
    mask[..., 0, 0] = pick(2)
    return changed(tree, {("model.layers.0.attn.bias",): array_of(mask, "bool")})


def forget_the_configuration(tree: Tree, pick: Pick) -> Tree:
    return tree.with_metadata(config=None)


EDITS: list[Edit] = [
    drop,
    add,
    rename,
    change_a_bit,
    change_a_zero,
    change_the_dtype,
    change_the_shape,
    add_a_leaf,
    replace_by_a_leaf,
    add_a_number,
    pad_rows,
    add_a_head,
    remove_parts,
    add_a_layer,
    add_state,
    add_bookkeeping,
    change_the_prefix,
    join_keys,
    add_frequencies,
    add_a_mask,
    forget_the_configuration,
]


def frequencies(tree: Tree) -> np.ndarray:
    """The rotary frequencies of the Qwen3 model here, whose heads have 16 elements."""
    config = tree.metadata.config or {}
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 1e6)
    return np.asarray(theta ** -(np.arange(8) / 8), np.float32)


def verdicts(a: Tree, b: Tree, **options: bool) -> list[bool]:
    """Whether each call finds two trees equal; one that refuses them does not."""
    calls = [
        partial(command, *sides, jobs=1, **options)
        for sides in ((a, b), (b, a))
        for command in (ckpttools.verify, partial(ckpttools.diff, explain=False))
    ]
    result = []
    for call in calls:
        try:
            result.append(call().equal)
        except ckpttools.CheckpointError:
            result.append(False)
    return result


KINDS = st.sampled_from(
    [("hf", "hf"), ("hf", "scanned"), ("unscanned", "hf"), ("scanned", "unscanned"), ("scanned", "scanned")]
)
MADE = st.tuples(st.sampled_from(EDITS), st.sampled_from(["both", "first", "second"]))


@settings(max_examples=12)
@given(
    kinds=KINDS,
    family=st.sampled_from(["qwen3", "llama3.2-tied"]),
    edits=st.lists(MADE, max_size=2),
    parameters=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_verify_and_diff_agree(kinds, family, edits, parameters, seed):
    sides = [model(family, kind) for kind in kinds]
    for number, (edit, where) in enumerate(edits):
        for index, name in enumerate(("first", "second")):
            if where in ("both", name):
                random = np.random.default_rng(seed + number)
                sides[index] = edit(sides[index], lambda count, random=random: int(random.integers(count)))
    result = verdicts(*sides, parameters=parameters)
    assert len(set(result)) == 1, result


def zero(count: int) -> int:
    return 0


def of(edit: Edit, *picks: int) -> Edit:
    """An edit with the first choices given, and zeros after these."""

    def built(tree: Tree, pick: Pick) -> Tree:
        rest = iter(picks)
        return edit(tree, lambda count: next(rest, 0))

    return built


@pytest.mark.parametrize("kinds", [("hf", "hf"), ("hf", "scanned"), ("scanned", "unscanned")])
@pytest.mark.parametrize(
    ("edit", "is_equal"),
    [
        (of(add_a_leaf, 0, 0), False),
        (of(change_a_bit, 1), False),
        (of(drop, 1), False),
        (of(add_state), False),
        (of(add, 1, 0), False),
        (of(rename, 1), False),
    ],
    ids=["text", "bit", "lost", "state", "scale", "name"],
)
def test_every_difference_counts(kinds, edit, is_equal):
    sides = [model("qwen3", kind) for kind in kinds]
    assert verdicts(edit(sides[0], zero), sides[1]) == [is_equal] * 4


@pytest.mark.parametrize("kind", ["hf", "scanned"])
@pytest.mark.parametrize(
    ("edit", "is_equal"),
    [
        (of(change_the_prefix, 2), True),
        (of(add_frequencies, 0), True),
        (of(add_frequencies, 2), False),
        (of(add_a_mask, 1), True),
        (of(add_a_mask, 0), False),
    ],
    ids=["prefix", "frequencies", "other-frequencies", "mask", "other-mask"],
)
def test_prefixes_and_computed_buffers_do_not_count(kind, edit, is_equal):
    assert verdicts(edit(model("qwen3", "hf"), zero), model("qwen3", kind)) == [is_equal] * 4


def test_one_sided_training_state_counts_unless_only_parameters_are_compared():
    training = add_state(model("qwen3", "scanned"), lambda count: count - 1)
    for other in ("hf", "scanned", "unscanned"):
        assert verdicts(training, model("qwen3", other)) == [False] * 4
        assert verdicts(training, model("qwen3", other), parameters=True) == [True] * 4
