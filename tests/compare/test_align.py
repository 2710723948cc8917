"""Two checkpoints under one set of names: frameworks, layouts, flavors, and what does not fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from support.flavors import with_parameters
from support.golden_data import FAMILIES, golden_checkpoint
from support.internals import (
    LINEN,
    NNX,
    ModelFiles,
    Pairing,
    align,
    dotted,
    keystr,
    render,
    to_huggingface,
    to_maxtext,
    view_of,
)
from support.locations import GOLDEN, TRAINED
from support.trees import hugging_face, lazy, parameters_of, values_of

import ckpttools
from ckpttools import (
    DTYPES,
    CheckpointError,
    LazyArray,
    ModelOptions,
    StripOptimizer,
    ToHuggingFace,
    ToMaxText,
    Tree,
    UnknownNameError,
)
from ckpttools.compare.align import AlignOptions, as_maxtext
from ckpttools.compare.verify import compare
from ckpttools.testing.strategies import noise, stored

PLENTY = {"memory": 512 << 20, "jobs": 2}
# One kind of layer, and several with experts among them.
BOTH_WAYS = ("llama3.1", "qwen3-next")
SCANS = pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])


def assert_equal(both: Pairing[LazyArray]) -> None:
    """Every array has a counterpart, and holds the same to the bit."""
    assert both.a and both.a.keys() == both.b.keys()
    assert compare(both, **PLENTY) == ()


class TestHuggingFaceAgainstMaxText:
    @SCANS
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_family_aligns_with_its_conversion(self, family: str, scan: bool):
        """Each layout from one side: which side it is decides nothing of a family's rows."""
        hf = hugging_face(family)
        built = to_maxtext(hf, ToMaxText(scan=scan)).state
        if scan or family in BOTH_WAYS:
            assert_equal(align(hf, built))
        if not scan or family in BOTH_WAYS:
            assert_equal(align(built, hf))

    @SCANS
    def test_maxtext_output_aligns_with_hugging_face(self, scan: bool):
        both = align(hugging_face("llama3.1"), ckpttools.open(golden_checkpoint(scan)))
        assert_equal(both)
        assert len(list(both.pairs)) == 39
        assert "A: names are mapped to MaxText's by the rows of family llama" in map(str, both.naming)
        assert both.sizes["head_dim"] == 16

    @pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.2.mlp.up_proj.weight"])
    def test_missing_and_extra_arrays_do_not_prevent_alignment(self, missing: str):
        hf = hugging_face("llama3.1")
        leaves = {path: leaf for path, leaf in hf.items() if dotted(path) != missing}
        extra = lazy(np.ones(3, np.float32))
        both = align(
            Tree({**leaves, ("extra.weight",): extra}, hf.metadata), to_maxtext(hf, ToMaxText()).state
        )
        assert list(both.only_a) == ["extra.weight"]
        assert len(both.only_b) == 1
        assert len(list(both.pairs)) == 38
        assert any("under their own names" in str(item) for item in both.naming)

    def test_missing_expert_leaves_its_stack_unpaired(self):
        hf = hugging_face("qwen3-moe")
        gone = "model.layers.1.mlp.experts.0.up_proj.weight"
        leaves = {path: leaf for path, leaf in hf.items() if dotted(path) != gone}
        both = align(Tree(leaves, hf.metadata), to_maxtext(hf, ToMaxText()).state)
        assert list(both.only_b) == ["decoder/layers_1/moe_block/wi_1"]
        assert all(".experts." in name and "up_proj" in name for name in both.only_a)

    def test_arrays_of_different_shape_are_paired(self):
        hf = hugging_face("llama3.1")
        longer = stored(noise((300, 64), DTYPES["bfloat16"]), DTYPES["bfloat16"])
        wider = stored(noise((80, 64), DTYPES["bfloat16"]), DTYPES["bfloat16"])
        changed = {"model.embed_tokens.weight": longer, "model.layers.0.self_attn.q_proj.weight": wider}
        leaves = {path: changed.get(dotted(path), leaf) for path, leaf in hf.items()}
        both = align(Tree(leaves, hf.metadata), to_maxtext(hf, ToMaxText()).state)
        assert not both.only_a and not both.only_b
        assert both.a["token_embedder/embedding"].shape == (300, 64)
        assert both.a["decoder/layers_0/self_attention/query/kernel"].shape == (64, 5, 16)
        assert both.a["decoder/layers_1/self_attention/query/kernel"].shape == (64, 4, 16)

    @pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral-8x7b", "gpt-oss"])
    def test_family_is_inferred_from_names_without_config(self, family: str):
        hf = hugging_face(family)
        bare = hf.with_metadata(config=None)
        both = align(bare, to_maxtext(hf, ToMaxText()).state)
        assert not both.only_a and not both.only_b
        remarks = render(" ".join(map(str, both.naming)))
        assert "without a config.json" in remarks and "`rope_layout` override this" in remarks

    def test_align_accepts_given_or_carried_config(self, tmp_path: Path):
        hf = hugging_face("mistral-7b")
        bare, built = hf.with_metadata(config=None), to_maxtext(hf, ToMaxText()).state
        assert_equal(align(bare, built, AlignOptions(like=GOLDEN / "mistral-7b" / "hf")))
        assert_equal(align(bare, built, AlignOptions(ModelOptions("mistral"))))
        (tmp_path / "hf").mkdir()
        shutil.copy(GOLDEN / "mistral-7b" / "hf" / "config.json", tmp_path / "hf")
        assert_equal(align(bare, built.with_metadata(location=str(tmp_path))))

    def test_unknown_model_is_matched_by_names(self):
        hf = hugging_face("qwen3")
        other = hf.with_metadata(config={**(hf.metadata.config or {}), "model_type": "something"})
        assert_equal(align(other, to_maxtext(hf, ToMaxText()).state))

    def test_unrelated_trees_have_no_pairs(self):
        built = to_maxtext(hugging_face("qwen3"), ToMaxText()).state
        both = align(Tree({("x",): lazy(np.ones(2, np.float32))}), built)
        assert list(both.only_a) == ["x"]
        assert not list(both.pairs)

    def test_invalid_options_are_refused(self):
        hf, built = hugging_face("qwen3"), to_maxtext(hugging_face("qwen3"), ToMaxText()).state
        with pytest.raises(UnknownNameError):
            align(hf, built, AlignOptions(ModelOptions("qwen33")))
        with pytest.raises(CheckpointError, match="does not exist"):
            align(hf, built, AlignOptions(like="nowhere"))

    def test_stored_tied_head_is_compared(self):
        hf = hugging_face("llama3.2-tied")
        head = hf["model.embed_tokens.weight",]
        both = align(Tree({**hf, ("lm_head.weight",): head}, hf.metadata), to_maxtext(hf, ToMaxText()).state)
        assert list(both.only_a) == ["decoder/logits_dense/kernel"]


class TestHuggingFaceAgainstHuggingFace:
    def test_equal_names_are_paired(self):
        hf = hugging_face("llama3.1")
        both = align(hf, ckpttools.open(GOLDEN / "llama3.1" / "hf_sharded"))
        assert_equal(both)
        assert both.remarks == ()
        assert "model.norm.weight" in both.a

    @pytest.mark.parametrize("family", ["gemma3", "gemma4-moe"])
    @pytest.mark.parametrize("config", [True, False])
    def test_hub_names_align_with_transformers_names(self, family: str, config: bool):
        hf = hugging_face(family)
        built = to_maxtext(hf, ToMaxText(text_only=True)).state
        files = ModelFiles(config=hf.metadata.config)
        spellings = ("transformers", "text")
        first, second = (
            to_huggingface(built, ToHuggingFace(spelling=spelling), files).tree for spelling in spellings
        )
        assert first.keys() != second.keys()
        if config:
            first = first.with_metadata(config=hf.metadata.config)
        assert_equal(align(first, second))
        assert_equal(align(second, first))

    def test_sizes_come_from_the_config(self):
        hf = hugging_face("llama3.1")
        assert align(hf, hf).sizes["head_dim"] == 16
        bare = hf.with_metadata(config=None)
        assert align(bare, bare).sizes == {}
        assert align(bare, bare, AlignOptions(like=GOLDEN / "llama3.1" / "hf")).sizes["head_dim"] == 16

    def test_invalid_options_are_refused(self):
        hf = hugging_face("qwen3")
        with pytest.raises(UnknownNameError):
            align(hf, hf, AlignOptions(ModelOptions("qwen33")))
        with pytest.raises(CheckpointError, match="does not exist"):
            align(hf, hf, AlignOptions(like="nowhere"))

    def test_missing_array_is_listed_as_one_sided(self):
        hf = hugging_face("gemma3")
        leaves = {path: leaf for path, leaf in hf.items() if "norm" not in dotted(path)}
        both = align(hf, Tree(leaves, hf.metadata))
        assert both.only_a and not both.only_b


class TestMaxTextAgainstMaxText:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_scanned_layers_align_with_unscanned_layers(self, family: str):
        hf = hugging_face(family)
        assert_equal(align(*(to_maxtext(hf, ToMaxText(scan=scan)).state for scan in (True, False))))

    def test_linen_aligns_with_nnx(self):
        tree = to_maxtext(hugging_face("qwen3"), ToMaxText()).state
        nnx = Tree({NNX.wrapped(path): array for path, array in view_of(tree).parameters.items()})
        both = align(tree, nnx)
        assert_equal(both)
        assert {
            "A: the name prefix of linen is ignored",
            "B: the name prefix of nnx is ignored",
        } <= set(map(str, both.naming))

    def test_training_state_aligns_with_parameters(self):
        training = ckpttools.open(TRAINED)
        stripped = training.pipe(StripOptimizer())
        both = align(training, stripped)
        assert_equal(both)
        assert not any("opt_state" in name for name in both.a)
        assert str(both.uncompared[0].remark).startswith(
            "A: left out, as only one of them is a training checkpoint"
        )
        assert align(training, stripped, AlignOptions(parameters=True)).uncompared == ()
        whole = align(training, training)
        assert_equal(whole)
        assert any("opt_state" in name for name in whole.a)

    def test_random_states_of_one_side_are_left_out(self):
        training = ckpttools.open(TRAINED)
        gone = next(path for path in training.arrays if "rngs" in path)
        both = align(training, Tree({p: leaf for p, leaf in training.items() if p != gone}))
        assert_equal(both)
        (told,) = both.uncompared
        assert "as the other side has no such state" in str(told.remark)

    def test_linen_and_nnx_training_states_align(self):
        training = ckpttools.open(TRAINED)
        other = with_parameters(training, view_of(training).parameters, LINEN)
        assert_equal(align(training, other))

    @pytest.mark.parametrize("joint", ["/", "."])
    def test_joined_names_are_aligned(self, joint: str):
        tree = to_maxtext(hugging_face("qwen3"), ToMaxText()).state
        flat = Tree({(joint.join(map(str, path)),): leaf for path, leaf in tree.arrays.items()})
        assert_equal(align(tree, flat))
        assert_equal(align(hugging_face("qwen3"), flat))

    def test_indivisible_stacks_are_compared_as_stored(self):
        values = values_of("qwen3")
        scanned = dict(parameters_of(values, scan=True))
        path = next(path for path in scanned if keystr(path).endswith("mlp/wi_0/kernel"))
        scanned[path] = lazy(np.ones((64, 3, 128), np.float32))
        both = align(Tree(scanned), Tree(scanned))
        assert_equal(both)
        assert any(
            "stacked layers are compared in their stored form" in str(remark) for remark in both.remarks
        )


class TestCommonArraysAreCompared:
    """Where neither is of a training, whatever the names."""

    WEIGHTS: ClassVar = {
        (f"model.layers.{k}.w.weight",): lazy(noise((8, 8), DTYPES["float32"])) for k in range(3)
    }

    @pytest.mark.parametrize(
        ("arrays", "what"),
        [
            ({"epoch": ("float32", (16, 16))}, "epoch"),
            ({"loss_scale.weight": ("float32", (4,))}, "loss_scale.weight"),
            ({"loss_scale": ("float32", ())}, "loss_scale"),
            ({"model.rngs.table": ("int32", (8,))}, "model.rngs.table"),
            ({"model.attn.key": ("int32", (2, 2)), "model.attn.count": ("int32", ())}, "model.attn.key"),
            ({"step": ("int64", ())}, "step"),
        ],
        ids=lambda item: item if isinstance(item, str) else "",
    )
    def test_arrays_on_both_sides_are_never_left_out(
        self, arrays: dict[str, tuple[str, tuple[int, ...]]], what: str
    ):
        first, second = (
            {(name,): lazy(np.full(shape, number, dtype)) for name, (dtype, shape) in arrays.items()}
            for number in (1, 2)
        )
        both = align(Tree({**self.WEIGHTS, **first}), Tree({**self.WEIGHTS, **second}))
        assert what in {item.name for item in compare(both, **PLENTY)}
        assert not both.remarks

    def test_one_sided_arrays_have_remarks(self):
        step = {("step",): lazy(np.int64(1))}
        names = ("rng", *(f"model.layers.{k}.rngs.{key}" for key in "abcd" for k in range(3)))
        more = {(name,): lazy(np.zeros(2, np.uint32)) for name in names}
        declared = "B: left out, as the other side has no such state: "
        for arrays, listed in (
            (step, "step"),
            (
                step | more,
                "14 arrays (step, rng, model.layers.{0..2}.rngs.a, model.layers.{0..2}.rngs.b, 2 more)",
            ),
        ):
            both = align(Tree(self.WEIGHTS), Tree({**self.WEIGHTS, **arrays}))
            assert_equal(both)
            assert [str(item.remark) for item in both.uncompared] == [declared + listed]


class TestOtherTrees:
    def test_differently_joined_paths_align(self):
        array = lazy(np.arange(6, dtype=np.float32))
        both = align(Tree({("a", "b", "c"): array, ("d",): array}), Tree({("a.b.c",): array, ("d",): array}))
        assert_equal(both)
        assert list(both.a) == ["a/b/c", "d"]


def test_as_maxtext_names_arrays_like_maxtext():
    hf = hugging_face("gemma3")
    named = as_maxtext(hf)
    own = as_maxtext(to_maxtext(hf, ToMaxText()).state)
    unplaced = {name for name in named.arrays if name.startswith("vision_tower.head.")}
    assert unplaced
    assert named.arrays.keys() - unplaced == own.arrays.keys() - {"step"}
    assert named.sizes["head_dim"] == 16
    assert any("under their own names" in item for item in named.naming)
    plain = Tree({("x",): lazy(np.ones(2, np.float32))})
    assert as_maxtext(plain).naming == ("names are used unchanged",)
