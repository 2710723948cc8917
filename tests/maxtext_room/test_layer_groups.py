"""Groups of layers of which there is no golden data, against what MaxText's own tables say, in numpy.

From MaxText's checkpoint_conversion/utils/param_mapping.py and models/gemma4.py at commit e591f30.
"""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np
import pytest
from support.internals import to_maxtext
from support.trees import model

import ckpttools
from ckpttools import FormatError, ToMaxText

TEXT = {
    "hidden_size": 16,
    "vocab_size": 5,
    "intermediate_size": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": True,
}


def both(config, scan):
    """The Hugging Face arrays by name, and MaxText's below `params/params` by path."""
    tree = model(config, 3)
    built = to_maxtext(tree, ToMaxText(scan=scan)).state
    theirs = {path[0]: array.read() for path, array in tree.arrays.items()}
    return theirs, {"/".join(p[2:]): a.read() for p, a in built.arrays.items() if p[0] == "params"}


def same(built, expected):
    return (
        built.shape == expected.shape
        and built.dtype == expected.dtype
        and built.tobytes() == expected.tobytes()
    )


def stacked(arrays):
    return np.stack(arrays, axis=1)


class TestOlmo3:
    CONFIG: ClassVar = {"model_type": "olmo3", **TEXT, "num_hidden_layers": 8}

    @pytest.mark.parametrize("position", range(4))
    def test_four_layers_form_a_cycle(self, position):
        theirs, ours = both(self.CONFIG, scan=True)
        layers = [f"model.layers.{n}" for n in (position, position + 4)]
        below = f"decoder/layers/layers_{position}"
        queries = [theirs[f"{n}.self_attn.q_proj.weight"].T.reshape(16, 4, 4) for n in layers]
        assert same(ours[f"{below}/attention/query/kernel"], stacked(queries))
        norms = [theirs[f"{n}.self_attn.k_norm.weight"] for n in layers]
        assert same(ours[f"{below}/attention/key_norm/scale"], stacked(norms))
        norms = [theirs[f"{n}.post_feedforward_layernorm.weight"] for n in layers]
        assert same(ours[f"{below}/post_mlp_layer_norm/scale"], stacked(norms))

    def test_olmo3_layers_are_stored_separately_unscanned(self):
        theirs, ours = both(self.CONFIG, scan=False)
        expected = theirs["model.layers.6.mlp.down_proj.weight"].T
        assert same(ours["decoder/layers_6/mlp/wo/kernel"], expected)
        assert not any("remainder" in name for name in ours)


class TestLlama4:
    """Maverick has experts in every second layer; its dense layers are wider."""

    CONFIG: ClassVar = {
        "model_type": "llama4",
        "tie_word_embeddings": False,
        "text_config": {
            **TEXT,
            "tie_word_embeddings": False,
            "num_hidden_layers": 8,
            "intermediate_size_mlp": 7,
            "num_local_experts": 3,
            "interleave_moe_layer_step": 2,
        },
    }

    @pytest.mark.parametrize("position", [0, 2])
    def test_dense_layers_are_stacked_by_position(self, position):
        theirs, ours = both(self.CONFIG, scan=True)
        expected = [
            theirs[f"language_model.model.layers.{n}.feed_forward.gate_proj.weight"].T
            for n in (position, position + 4)
        ]
        assert expected[0].shape == (16, 7)
        assert same(ours[f"decoder/layers/layers_{position}/mlp/wi_0/kernel"], stacked(expected))

    @pytest.mark.parametrize("position", [1, 3])
    def test_expert_layers_are_stacked_by_position(self, position):
        theirs, ours = both(self.CONFIG, scan=True)
        fused = [
            theirs[f"language_model.model.layers.{n}.feed_forward.experts.gate_up_proj"]
            for n in (position, position + 4)
        ]
        below = f"decoder/layers/layers_{position}/Llama4MoEBlock_0"
        assert same(ours[f"{below}/MoeBlock_0/wi_0"], stacked([item[..., :6] for item in fused]))
        assert same(ours[f"{below}/MoeBlock_0/wi_1"], stacked([item[..., 6:] for item in fused]))
        assert f"decoder/layers/layers_{position}/mlp/wi_0/kernel" not in ours

    def test_llama4_layers_are_stored_separately_unscanned(self):
        theirs, ours = both(self.CONFIG, scan=False)
        expected = theirs["language_model.model.layers.6.feed_forward.down_proj.weight"].T
        assert same(ours["decoder/layers_6/mlp/wo/kernel"], expected)
        router = theirs["language_model.model.layers.7.feed_forward.router.weight"].T
        assert same(ours["decoder/layers_7/Llama4MoEBlock_0/MoeBlock_0/gate/kernel"], router)


class TestGemma4:
    """Dense: no experts. With fourteen layers two remain, which MaxText scans as local layers."""

    CONFIG: ClassVar = {
        "model_type": "gemma4",
        "tie_word_embeddings": True,
        "text_config": {
            **TEXT,
            "num_hidden_layers": 14,
            "global_head_dim": 8,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    }
    HF = "model.language_model.layers"

    def test_local_layers_are_stacked_twice(self):
        theirs, ours = both(self.CONFIG, scan=True)
        blocks = [
            np.stack([theirs[f"{self.HF}.{6 * b + n}.mlp.up_proj.weight"].T for n in range(5)], axis=1)
            for b in range(2)
        ]
        built = ours["decoder/scanned_blocks/local_layers/mlp/wi_1/kernel"]
        assert same(built, stacked(blocks))
        assert built.shape == (16, 2, 5, 6)

    def test_global_layers_have_other_heads_and_no_values(self):
        theirs, ours = both(self.CONFIG, scan=True)
        keys = [theirs[f"{self.HF}.{n}.self_attn.k_proj.weight"].T.reshape(16, 1, 8) for n in (5, 11)]
        below = "decoder/scanned_blocks/global_layer/self_attention"
        assert same(ours[f"{below}/key/kernel"], stacked(keys))
        assert f"{below}/value/kernel" not in ours

    def test_remainder_layers_are_unstacked(self):
        theirs, ours = both(self.CONFIG, scan=True)
        scalars = [theirs[f"{self.HF}.{n}.layer_scalar"] for n in (12, 13)]
        assert same(ours["decoder/layers_remainder/local_layers/layer_scalar"], stacked(scalars))

    def test_gemma4_layers_are_stored_separately_unscanned(self):
        theirs, ours = both(self.CONFIG, scan=False)
        expected = theirs[f"{self.HF}.13.pre_feedforward_layernorm.weight"]
        assert same(ours["decoder/layers_13/pre_ffw_norm/scale"], expected)


class TestGemma3:
    CONFIG: ClassVar = {"model_type": "gemma3_text", **TEXT}

    @pytest.mark.parametrize(("layers", "stacks", "single"), [(5, 0, 5), (6, 6, 0), (7, 6, 1), (18, 6, 0)])
    def test_cycles_and_remaining_layers_are_stacked(self, layers, stacks, single):
        theirs, ours = both({**self.CONFIG, "num_hidden_layers": layers}, scan=True)
        cycled = {name.split("/")[2] for name in ours if name.startswith("decoder/layers/")}
        rest = {name.split("/")[2] for name in ours if name.startswith("decoder/layers_remainder/")}
        assert cycled == {f"layers_{n}" for n in range(stacks)}
        assert rest == {f"layers_{n}" for n in range(single)}
        if single:
            last = theirs[f"model.layers.{layers - 1}.mlp.gate_proj.weight"].T
            built = ours[f"decoder/layers_remainder/layers_{single - 1}/mlp/wi_0/kernel"]
            assert same(built, last)


class TestDeepSeek:
    CONFIG: ClassVar = {
        "model_type": "deepseek_v3",
        **TEXT,
        "num_hidden_layers": 3,
        "kv_lora_rank": 3,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 5,
        "moe_intermediate_size": 3,
        "n_routed_experts": 2,
        "n_shared_experts": 2,
    }

    @pytest.mark.parametrize("dense", [0, 1, 3])
    @pytest.mark.parametrize("rank", [None, 6])
    def test_dense_layers_come_first(self, dense, rank):
        config = {**self.CONFIG, "first_k_dense_replace": dense, "q_lora_rank": rank}
        theirs, ours = both(config, scan=True)
        assert any(name.startswith("decoder/dense_layers/") for name in ours) == (dense > 0)
        assert any(name.startswith("decoder/moe_layers/") for name in ours) == (dense < 3)
        query = "wq_b" if rank else "query"
        assert any(f"/{query}/" in name for name in ours)
        if dense == 1:
            experts = [
                [theirs[f"model.layers.{n}.mlp.experts.{e}.up_proj.weight"].T for n in (1, 2)]
                for e in range(2)
            ]
            expected = np.array(experts)
            assert same(ours["decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/wi_1"], expected)

    @pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
    @pytest.mark.parametrize("dense", [0, 1, 3])
    def test_widths_are_equal_if_all_layers_have_experts(self, tmp_path, kind, dense):
        """MaxText refuses other widths (configs/types.py: is_fully_moe)."""
        declared = {"first_k_dense_replace": dense, "model_type": kind, "num_experts_per_tok": 1}
        config = {**self.CONFIG, **declared}
        (tmp_path / "config.json").write_text(json.dumps(config))
        told = dict(argument.split("=", 1) for argument in ckpttools.maxtext_config(tmp_path).arguments())
        assert told["base_moe_mlp_dim"] == "3"
        assert told["base_mlp_dim"] == ("3" if dense == 0 else str(config["intermediate_size"]))

    def test_mtp_layers_are_dropped_by_name_or_carried(self):
        config = {**self.CONFIG, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
        tree = model(config, 0)
        name = "model.layers.3.eh_proj.weight"
        leaves = {**tree.leaves, (name,): tree["model.norm.weight",]}
        with_prediction = type(tree)(leaves, tree.metadata)
        built = to_maxtext(with_prediction, ToMaxText())
        assert built.notes.dropped == (name,)
        assert not built.carried
        carried = to_maxtext(with_prediction, ToMaxText(carry=True))
        assert list(carried.carried) == [name]
        assert not carried.notes.dropped

    def test_block_scaled_fp8_weights_get_advice(self):
        config = {**self.CONFIG, "first_k_dense_replace": 1}
        tree = model(config, 0)
        scale = "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"
        leaves = {**tree.leaves, (scale,): tree["model.norm.weight",]}
        with pytest.raises(FormatError, match="quantized weights cannot be converted") as error:
            to_maxtext(type(tree)(leaves, tree.metadata), ToMaxText())
        assert "dequantize the model to bfloat16" in str(error.value.hint)
        weight = scale.removesuffix("_scale_inv")
        assert f"{weight}: bfloat16, with weight_scale_inv" in error.value.message
