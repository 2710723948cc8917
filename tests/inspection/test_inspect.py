"""`ckpttools.inspect`: what a tree report says, and how repetitions fold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import Constant, LayerGroup, Path, Sharding, inspect_tree

from ckpttools import DTYPES, Empty, Metadata, Tree, UsageError
from ckpttools.core.text import natural_key
from ckpttools.inspection.folding import RNG_STATE, Branch, fold, sort_arrays
from ckpttools.inspection.tree import ArrayReport, Total, TreeReport, TreeWarning
from ckpttools.maxtext.view import Optimizer


def constant(*shape: int, dtype: str = "bfloat16") -> Constant:
    return Constant(shape, DTYPES[dtype], bytes(DTYPES[dtype].itemsize))


def reported(arrays: dict[str, Constant]) -> TreeReport:
    return inspect_tree(Tree({tuple(name.split("/")): array for name, array in arrays.items()}))


def folded(arrays: dict[str, Constant]) -> list[tuple[str, int, int]]:
    """Name, count and bytes of every line, depth first."""

    def lines(branches: tuple[Branch, ...]) -> Iterator[tuple[str, int, int]]:
        for branch in branches:
            yield branch.name, branch.num_arrays, branch.nbytes
            yield from lines(branch.children)

    return list(lines(fold(reported(arrays).arrays)))


class TestInspectTree:
    def test_inspect_tree_reports_kind_totals_and_warnings(self):
        leaves = {
            ("step",): constant(dtype="int64"),
            ("params", "params", "decoder", "decoder_norm", "scale"): constant(8),
            ("params", "params", "decoder", "layers", "norm", "scale"): constant(8, 4),
            ("opt_state", 0, "mu"): constant(8, dtype="float32"),
            ("opt_state", 1): Empty("None"),
        }
        metadata = Metadata("orbax", step=7, custom={"scan_layers": True}, location="/run/7/items")
        sharding = Sharding("NamedSharding", (("fsdp", 4),), (("fsdp",),))
        report = inspect_tree(
            Tree(leaves, metadata),
            shardings={("params", "params", "decoder", "decoder_norm", "scale"): sharding},
            unfinished={"8": "no _METADATA"},
        )
        assert report == TreeReport(
            path="/run/7/items",
            format="orbax",
            kind="stacked-training",
            flavor="linen",
            scan_axis=1,
            step=7,
            num_arrays=4,
            num_parameters=8 + 32,
            nbytes=8 + 16 + 64 + 32,
            custom_metadata={"scan_layers": True},
            arrays=(
                ArrayReport(
                    "params/params/decoder/decoder_norm/scale", (8,), "bfloat16", 16, "parameter", sharding
                ),
                ArrayReport("params/params/decoder/layers/norm/scale", (8, 4), "bfloat16", 64, "parameter"),
                ArrayReport("opt_state/0/mu", (8,), "float32", 32, "optimizer"),
                ArrayReport("step", (), "int64", 8, "other"),
            ),
            layers=(LayerGroup("decoder/layers", 4, "stacked"),),
            optimizer=Optimizer("unknown"),
            random_states=0,
            families=(),
            roles={
                "parameter": Total(2, 40, 80),
                "optimizer": Total(1, 8, 32),
                "other": Total(1, 1, 8),
            },
            parameter_dtypes={"bfloat16": Total(2, 40, 80)},
            warnings=(
                TreeWarning("unfinished-step", "8, next to step 7, is an unfinished save: no _METADATA"),
            ),
        )

    def test_pattern_limits_arrays_and_totals_but_not_the_kind(self):
        leaves: dict[Path, Constant] = {
            ("params", "params", "decoder", "decoder_norm", "scale"): constant(8),
            ("params", "params", "decoder", "layers_0", "norm", "scale"): constant(8),
        }
        report = inspect_tree(Tree(leaves), "*/layers_*")
        assert [array.path for array in report.arrays] == ["params/params/decoder/layers_0/norm/scale"]
        assert (report.num_arrays, report.num_parameters, report.nbytes) == (1, 8, 16)
        assert report.kind == "unstacked-inference"

    def test_unmatched_pattern_is_refused(self):
        with pytest.raises(UsageError, match="no array has a path that matches"):
            inspect_tree(Tree({("a",): constant(2)}), "b*")

    def test_empty_tree_has_no_lines(self):
        assert inspect_tree(Tree({})).arrays == ()
        assert fold(()) == ()

    def test_reports_are_frozen(self):
        report = inspect_tree(Tree({}))
        with pytest.raises(FrozenInstanceError):
            report.step = 1  # type: ignore[misc]


class TestFold:
    def test_siblings_differing_in_one_number_are_folded(self):
        arrays = {f"decoder/layers_{k}/kernel": constant(4, 2) for k in range(32)}
        assert folded(arrays) == [("decoder/layers_{0..31}/kernel", 32, 32 * 16)]

    def test_numeric_names_are_folded(self):
        assert folded({f"layers/{k}": constant(1) for k in range(3)}) == [("layers/{0..2}", 3, 6)]

    def test_flat_names_are_split_at_dots(self):
        report = reported({f"model.layers.{k}.weight": constant(1) for k in range(12)})
        assert [branch.name for branch in fold(report.arrays)] == ["model.layers.{0..11}.weight"]

    def test_dot_inside_a_key_is_not_a_separator(self):
        assert folded({"a.b/c": constant(1), "a.d/c": constant(1)}) == [("a.b/c", 1, 2), ("a.d/c", 1, 2)]

    def test_gaps_are_listed_in_ranges(self):
        assert folded({f"l_{k}": constant(1) for k in (0, 1, 2, 3, 5)}) == [("l_{0..3,5}", 5, 10)]

    def test_every_second_layer_is_folded_with_a_step(self):
        arrays = {f"l_{k}": constant(1 + k % 2) for k in range(9)}
        assert folded(arrays) == [("l_{0..8 by 2}", 5, 10), ("l_{1..7 by 2}", 4, 16)]

    def test_three_siblings_are_folded(self):
        assert folded({f"l_{k}": constant(1) for k in (0, 5, 10)}) == [("l_{0,5,10}", 3, 6)]

    def test_new_range_starts_where_the_step_changes(self):
        names = (1, 3, 5, 7, 8, 9)
        assert folded({f"l_{k}": constant(1) for k in names}) == [("l_{1..7 by 2,8..9}", 6, 12)]

    def test_different_shardings_are_not_folded(self):
        tree = Tree({("l_0",): constant(4), ("l_1",): constant(4)})
        cut = Sharding("NamedSharding", (("x", 2),), (("x",),))
        report = inspect_tree(tree, shardings={("l_1",): cut})
        assert [branch.name for branch in fold(report.arrays)] == ["l_0", "l_1"]

    def test_parameters_precede_optimizer_state_and_the_rest(self):
        arrays = {
            "a_step/count": ArrayReport("a_step/count", (), "int32", 4, "other"),
            "b/mu": ArrayReport("b/mu", (8,), "float32", 32, "optimizer"),
            "c/a_rng": ArrayReport("c/a_rng", (2,), "uint32", 8, "other", is_random=True),
            "c/z": ArrayReport("c/z", (2,), "float32", 8, "parameter"),
            "d_rng": ArrayReport("d_rng", (2,), "uint32", 8, "other", is_random=True),
        }
        top = fold(arrays.values())
        assert [branch.name for branch in top] == ["c", "b/mu", "a_step/count", "d_rng"]
        assert [branch.name for branch in top[0].children] == ["z", "a_rng"]
        assert [branch.name for branch in fold(arrays.values(), sort="name")] == sorted(
            branch.name for branch in top
        )
        folded_names = [(item.name, item.num_arrays) for item in fold(arrays.values(), collapse_random=True)]
        assert folded_names == [("c/z", 1), ("b/mu", 1), ("a_step/count", 1), (RNG_STATE, 2)]

    def test_random_states_alone_are_not_collapsed(self):
        keys = [ArrayReport(f"rngs/{k}", (2,), "uint32", 8, "other", is_random=True) for k in "ab"]
        assert fold(keys, collapse_random=True) == fold(keys)
        one = [keys[0], ArrayReport("w", (2,), "float32", 8, "parameter")]
        assert fold(one, collapse_random=True) == fold(one)

    def test_branches_are_sorted_largest_first(self):
        arrays = {"a": constant(1), "b/c": constant(2), "b/d": constant(8), "e": constant(4)}
        branches = fold(reported(arrays).arrays, sort="size")
        assert [branch.name for branch in branches] == ["b", "e", "a"]
        assert [branch.name for branch in branches[0].children] == ["d", "c"]

    def test_depth_does_not_change_totals(self):
        arrays = {"a/b/c": constant(1), "a/b/d": constant(2), "a/e": constant(4)}
        (top,) = fold(reported(arrays).arrays, depth=2)
        assert (top.name, top.num_arrays, top.num_elements, top.nbytes, top.fraction) == ("a", 3, 7, 14, 1.0)
        assert [(child.name, child.num_arrays, child.children) for child in top.children] == [
            ("b", 2, ()),
            ("e", 1, ()),
        ]

    def test_different_shapes_are_not_folded(self):
        arrays = {f"l_{k}": constant(2 if k % 3 == 2 else 1) for k in range(6)}
        assert folded(arrays) == [("l_{0..1,3..4}", 4, 8), ("l_{2,5}", 2, 8)]

    def test_different_dtypes_are_not_folded(self):
        arrays = {"l_0": constant(1), "l_1": constant(1, dtype="float16")}
        assert folded(arrays) == [("l_0", 1, 2), ("l_1", 1, 2)]

    def test_different_names_below_are_not_folded(self):
        arrays = {"l_0/a": constant(1), "l_1/b": constant(1)}
        assert folded(arrays) == [("l_0/a", 1, 2), ("l_1/b", 1, 2)]

    def test_experts_are_folded_inside_layers(self):
        arrays = {
            f"layers.{layer}.experts.{expert}.{name}": constant(3)
            for layer in range(4)
            for expert in range(8)
            for name in ("up", "down")
        }
        assert folded(arrays) == [
            ("layers.{0..3}.experts.{0..7}", 64, 384),
            ("down", 32, 192),
            ("up", 32, 192),
        ]

    def test_number_with_most_siblings_is_folded(self):
        arrays = {f"a{i}_b{k}": constant(1) for i in range(2) for k in range(5)}
        assert folded(arrays) == [("a0_b{0..4}", 5, 10), ("a1_b{0..4}", 5, 10)]

    def test_leading_zeros_are_kept(self):
        assert folded({f"l_{k:02}": constant(1) for k in range(8, 12)}) == [("l_{08..11}", 4, 8)]

    def test_equal_numbers_spelled_differently_are_not_folded(self):
        lines = folded({"l_1": constant(1), "l_01": constant(1)})
        assert sorted(lines) == [("l_01", 1, 2), ("l_1", 1, 2)]

    def test_array_with_nested_arrays_is_counted(self):
        arrays = {"a": constant(1), "a.b": constant(2)}
        assert folded(arrays) == [("a", 2, 6), ("b", 1, 4)]

    def test_numbered_names_are_sorted_naturally(self):
        arrays = {f"l_{k}": constant(k + 1) for k in range(12)}
        assert [name for name, _, _ in folded(arrays)] == [f"l_{k}" for k in range(12)]
        assert natural_key("layers_2") < natural_key("layers_10") < natural_key("norm")

    def test_ten_thousand_leaves_fold_quickly(self):
        arrays = {f"l_{k % 100}/x_{k}": constant(k) for k in range(10_000)}
        report = reported(arrays)
        started = time.perf_counter()
        fold(report.arrays)
        assert time.perf_counter() - started < 2

    def test_name_of_ten_thousand_keys_is_folded(self):
        assert sum(branch.num_arrays for branch in fold(reported({"a." * 10_000: constant(1)}).arrays)) == 1


KEYS = st.sampled_from(
    ["a", "layers_0", "layers_1", "layers_2", "layers_10", "0", "1", "2", "4", "6", "01", "w0_b1", "w1_b1"]
)
PATHS = st.lists(KEYS, min_size=1, max_size=4).map("/".join)
TREES = st.dictionaries(PATHS, st.integers(0, 2), max_size=40)


@given(TREES)
def test_folded_lines_add_up_to_all_leaves_and_bytes(lengths: dict[str, int]):
    arrays = {path: constant(2**length) for path, length in lengths.items()}
    report = reported(arrays)
    top = fold(report.arrays)
    assert sum(branch.num_arrays for branch in top) == report.num_arrays
    assert sum(branch.nbytes for branch in top) == report.nbytes
    for branch in _all(top):
        own = branch.num_arrays - sum(child.num_arrays for child in branch.children)
        assert own >= 0 and (own > 0) == (branch.array is not None)
        assert branch.fraction == pytest.approx(branch.nbytes / report.nbytes)
        assert branch.nbytes == 2 * branch.num_elements
        own_bytes = branch.nbytes - sum(child.nbytes for child in branch.children)
        assert own_bytes == (own * prod(branch.array.shape) * 2 if branch.array else 0)


@given(TREES)
def test_every_leaf_is_in_exactly_one_line(lengths: dict[str, int]):
    arrays = {path: constant(2**length) for path, length in lengths.items()}
    joint = "/" if any("/" in path for path in arrays) else "."
    told = sorted(path for path in _unfolded(fold(reported(arrays).arrays), joint))
    assert told == sorted(arrays)


@given(TREES, st.integers(1, 4))
def test_tree_limited_by_depth_is_the_top_of_the_full_tree(lengths: dict[str, int], depth: int):
    arrays = reported({path: constant(2**length) for path, length in lengths.items()}).arrays
    whole, cut = fold(arrays), fold(arrays, depth=depth)
    assert [line[1:] for line in _down_to(cut, 99)] == [line[1:] for line in _down_to(whole, depth)]


@given(TREES)
def test_sorting_changes_only_the_order(lengths: dict[str, int]):
    arrays = reported({path: constant(2**length) for path, length in lengths.items()}).arrays
    by_size = sort_arrays(arrays, "size")
    assert sorted(by_size, key=lambda item: item.path) == sorted(arrays, key=lambda array: array.path)
    assert all(a.nbytes >= b.nbytes for a, b in pairwise(by_size))
    names = [natural_key(array.path) for array in sort_arrays(arrays, "name")]
    assert names == sorted(names)


def _down_to(branches: tuple[Branch, ...], depth: int) -> Iterator[tuple[int, str, int, int]]:
    for branch in branches if depth else ():
        yield depth, branch.name, branch.num_arrays, branch.nbytes
        yield from _down_to(branch.children, depth - 1)


def _all(branches: tuple[Branch, ...]) -> Iterator[Branch]:
    for branch in branches:
        yield branch
        yield from _all(branch.children)


def _unfolded(branches: tuple[Branch, ...], joint: str) -> Iterator[str]:
    """The paths that lines stand for, told from their names alone."""
    for branch in branches:
        for name in _expanded(branch.name):
            if branch.array is not None:
                yield name
            yield from (f"{name}{joint}{below}" for below in _unfolded(branch.children, joint))


def _expanded(name: str) -> list[str]:
    before, brace, rest = name.partition("{")
    if not brace:
        return [name]
    ranges, _, after = rest.partition("}")
    numbers: list[str] = []
    for item in ranges.split(","):
        run, _, step = item.partition(" by ")
        first, _, last = run.partition("..")
        values = range(int(first), int(last or first) + 1, int(step or 1))
        numbers += [str(k).zfill(len(first)) for k in values]
    return [f"{before}{number}{tail}" for number in numbers for tail in _expanded(after)]
