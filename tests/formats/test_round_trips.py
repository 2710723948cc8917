"""Every family, random sizes: from Hugging Face to MaxText and back gives every bit again."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from support.internals import ModelFiles, StackAsModel, to_huggingface, to_maxtext
from support.trees import model

from ckpttools import DTYPES, ConfigError, Metadata, ToHuggingFace, ToMaxText, Tree, UsageError

BF16 = DTYPES["bfloat16"]
LENGTHS = st.integers(1, 5)
# Lengths whose square root is a power of two, so that scaling by it is exact.
SQUARES = st.sampled_from((1, 4, 16))


def text(draw, layers, *, embed=LENGTHS, head_dim=LENGTHS):
    """What configurations of all families say."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": draw(embed),
        "vocab_size": draw(LENGTHS),
        "intermediate_size": draw(LENGTHS),
        "num_attention_heads": draw(LENGTHS),
        "num_key_value_heads": draw(LENGTHS),
        "head_dim": draw(head_dim),
        "tie_word_embeddings": draw(st.booleans()),
    }


def moe(draw, experts, size):
    return {experts: draw(LENGTHS), size: draw(LENGTHS)}


@st.composite
def llama(draw):
    rope = draw(st.booleans())
    dims = st.sampled_from((4, 16)) if rope else SQUARES
    extra = {"rope_parameters": {"rope_type": "llama3"}} if rope else {}
    return {"model_type": "llama", **text(draw, draw(LENGTHS), head_dim=dims), **extra}


def plain(model_type, head_dim=LENGTHS, embed=LENGTHS, **more):
    @st.composite
    def config(draw):
        drawn = {name: draw(strategy) for name, strategy in more.items()}
        return {
            "model_type": model_type,
            **text(draw, draw(LENGTHS), embed=embed, head_dim=head_dim),
            **drawn,
        }

    return config()


@st.composite
def deepseek(draw):
    layers = draw(st.integers(1, 5))
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size")
    return {
        "model_type": draw(st.sampled_from(("deepseek_v2", "deepseek_v3", "kimi_k2"))),
        **text(draw, layers),
        **{name: draw(LENGTHS) for name in (*sizes, "n_routed_experts", "n_shared_experts")},
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "q_lora_rank": draw(st.none() | LENGTHS),
    }


@st.composite
def with_indexer(draw):
    config = {**draw(deepseek()), "model_type": "deepseek_v32", "q_lora_rank": draw(LENGTHS)}
    return {**config, "index_n_heads": draw(LENGTHS), "index_head_dim": draw(LENGTHS)}


@st.composite
def gemma3(draw):
    sizes = text(draw, draw(st.integers(1, 14)), embed=SQUARES)
    if draw(st.booleans()):
        return {"model_type": "gemma3_text", **sizes}
    return {"model_type": "gemma3", "text_config": sizes, "tie_word_embeddings": sizes["tie_word_embeddings"]}


@st.composite
def gemma4(draw):
    sizes = text(draw, draw(st.integers(1, 14)), embed=SQUARES)
    sizes |= {
        "global_head_dim": draw(LENGTHS),
        "num_global_key_value_heads": draw(LENGTHS),
        "enable_moe_block": draw(st.booleans()),
        "attention_k_eq_v": draw(st.booleans()),
        # As published: silence would make a model of another family.
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        **moe(draw, "num_experts", "moe_intermediate_size"),
    }
    tied = sizes["tie_word_embeddings"]
    return {"model_type": "gemma4", "text_config": sizes, "tie_word_embeddings": tied}


@st.composite
def gemma4_small(draw):
    """A global layer in five, or six; any number of the last layers have no keys and values."""
    cycle = draw(st.sampled_from((5, 6)))
    layers = cycle * draw(st.integers(1, 3))
    kinds = [*["sliding_attention"] * (cycle - 1), "full_attention"] * (layers // cycle)
    names = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "global_head_dim")
    sizes = {
        **text(draw, layers, embed=SQUARES),
        **{name: draw(LENGTHS) for name in names},
        "layer_types": kinds,
        "use_double_wide_mlp": draw(st.booleans()),
        "num_kv_shared_layers": draw(st.integers(0, layers - 1)),
    }
    if draw(st.booleans()):
        return {"model_type": "gemma4_text", **sizes}
    return {"model_type": "gemma4", "text_config": sizes}


@st.composite
def cycles(draw, model_type, cycle, **more):
    layers = cycle * draw(st.integers(1, 3))
    drawn = {name: draw(strategy) for name, strategy in more.items()}
    return {"model_type": model_type, **text(draw, layers), **drawn}


@st.composite
def multimodal(draw, model_type, config, part="text_config"):
    """The configuration of a text model, in a part of that of the whole model."""
    inner = draw(config)
    built = {**inner, "model_type": f"{inner['model_type']}_text"}
    for name in reversed(part.split(".")):
        built = {name: built}
    return {"model_type": model_type, **built}


@st.composite
def gemma2(draw):
    layers = 2 * draw(st.integers(1, 3))
    return {"model_type": "gemma2", **text(draw, layers, embed=SQUARES, head_dim=SQUARES)}


@st.composite
def llama4(draw):
    sizes = text(draw, 4 * draw(st.integers(1, 2)))
    sizes |= {
        "intermediate_size_mlp": draw(LENGTHS),
        "num_local_experts": draw(LENGTHS),
        "interleave_moe_layer_step": draw(st.integers(1, 2)),
    }
    return {"model_type": "llama4", "text_config": sizes, "tie_word_embeddings": sizes["tie_word_embeddings"]}


@st.composite
def olmo3(draw):
    config = draw(cycles("olmo3", 4))
    # These models have no field of their own for the size of a head.
    del config["head_dim"]
    return {**config, "hidden_size": config["num_attention_heads"] * draw(LENGTHS)}


LINEAR_ATTENTION = dict.fromkeys(
    (
        "num_experts",
        "shared_expert_intermediate_size",
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ),
    LENGTHS,
)


@st.composite
def qwen3_5_moe(draw):
    """Fused experts or an array for each, and as many heads of values for each of keys as there may be."""
    config = draw(cycles("qwen3_5_moe", 4, moe_intermediate_size=LENGTHS, **LINEAR_ATTENTION))
    config["linear_num_value_heads"] = config["linear_num_key_heads"] * draw(st.integers(1, 3))
    if draw(st.booleans()):
        return {**config, "model_type": "qwen3_5_moe_text"}
    return {
        "model_type": "qwen3_5_moe",
        "text_config": config,
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


MOE = {"moe_intermediate_size": LENGTHS}
CONFIGS = {
    "llama": llama(),
    "mistral": plain("mistral", SQUARES),
    "mixtral": plain("mixtral", SQUARES, num_local_experts=LENGTHS),
    "qwen2": plain("qwen2"),
    "qwen3": plain("qwen3"),
    "qwen3-moe": plain("qwen3_moe", num_experts=LENGTHS, moe_intermediate_size=LENGTHS),
    "qwen3-next": cycles(
        "qwen3_next", 4, moe_intermediate_size=LENGTHS, linear_num_value_heads=LENGTHS, **LINEAR_ATTENTION
    ),
    "qwen3-vl": multimodal("qwen3_vl", plain("qwen3_vl")),
    "qwen3-vl-moe": multimodal("qwen3_vl_moe", plain("qwen3_vl_moe", num_local_experts=LENGTHS, **MOE)),
    "qwen3-omni": multimodal(
        "qwen3_omni_moe",
        plain("qwen3_omni_moe", num_experts=LENGTHS, **MOE),
        "thinker_config.text_config",
    ),
    "qwen3.5-moe": qwen3_5_moe(),
    "gemma": plain("gemma", SQUARES, embed=SQUARES),
    "gemma2": gemma2(),
    "gemma3": gemma3(),
    "gemma4": gemma4(),
    "gemma4-small": gemma4_small(),
    "gpt-oss": cycles("gpt_oss", 2, num_local_experts=LENGTHS),
    "deepseek": deepseek(),
    "deepseek-v3.2": with_indexer(),
    "kimi-k2.5": multimodal("kimi_k25", deepseek()),
    "olmo3": olmo3(),
    "llama4": llama4(),
}
NEVER_SCANNED = ("gemma4-small",)
EVERY_FAMILY = pytest.mark.parametrize("family", CONFIGS)


def round_trip(tree: Tree, **options) -> Tree:
    built = to_maxtext(tree, ToMaxText(**options))
    files = ModelFiles(config=tree.metadata.config, spelling=built.spelling)
    axis = options.get("scan_axis")
    return to_huggingface(built.state, ToHuggingFace(scan_axis=axis), files).tree


def assert_equal(built: Tree, expected: Tree) -> None:
    assert built.arrays.keys() == expected.arrays.keys()
    for path, array in expected.arrays.items():
        got = built.arrays[path]
        assert (got.shape, got.dtype) == (array.shape, array.dtype), path
        assert got.read().tobytes() == array.read().tobytes(), path


@EVERY_FAMILY
@settings(max_examples=12)
@given(data=st.data(), seed=st.integers(0, 99), scan=st.sampled_from((None, 0, 1)))
def test_every_bit_round_trips(family, data, seed, scan):
    tree = model(data.draw(CONFIGS[family]), seed)
    scan = None if family in NEVER_SCANNED else scan
    built = round_trip(tree, scan=False) if scan is None else round_trip(tree, scan_axis=scan)
    assert_equal(built, tree)


@pytest.mark.parametrize("family", [name for name in CONFIGS if name not in NEVER_SCANNED])
@settings(max_examples=8)
@given(data=st.data())
def test_stacked_layers_equal_the_single_layers(family, data):
    """Both layouts hold the same numbers: every element of the one is in the other."""
    tree = model(data.draw(CONFIGS[family]), 1)
    stacked, single = (to_maxtext(tree, ToMaxText(scan=scan)).state for scan in (True, False))
    assert sum(a.size for a in stacked.arrays.values()) == sum(a.size for a in single.arrays.values())
    assert _digest(stacked) == _digest(single)


def _digest(tree: Tree) -> list[bytes]:
    """All elements of all parameters, sorted: the same for the same numbers in any order."""
    values = [a.read().reshape(-1).astype(np.float64) for p, a in tree.arrays.items() if p[0] == "params"]
    return np.sort(np.concatenate(values)).tolist()


@pytest.mark.parametrize(
    ("family", "layers"),
    [("gemma2", 3), ("gpt-oss", 5), ("olmo3", 6), ("qwen3-next", 7), ("qwen3.5-moe", 7), ("llama4", 5)],
)
def test_incomplete_layer_groups_are_refused(family, layers):
    # Any will do: not the smallest, which takes half a second to find.
    config = find(CONFIGS[family], lambda config: True, settings=settings(phases=[Phase.generate]))
    inner = config.get("text_config", config)
    inner["num_hidden_layers"] = layers
    tree = Tree({}, Metadata(config=config, location="hf"))
    # Of gemma2 MaxText builds complete pairs alone; the others keep an incomplete cycle apart.
    is_never = family == "gemma2"
    expected = "the layers do not form complete groups" if is_never else "would be left over"
    with pytest.raises(ConfigError, match=expected) as error:
        to_maxtext(tree, ToMaxText())
    assert ("is not a multiple of" in str(error.value)) == is_never
    assert ("scan=False" in str(error.value.hint)) != is_never


@settings(max_examples=8)
@given(config=gemma4_small())
def test_unscannable_family_is_refused(config):
    tree = model(config, 0)
    with pytest.raises(UsageError, match="MaxText does not scan the layers of family gemma4-small"):
        to_maxtext(tree, ToMaxText())
    apart = to_maxtext(tree, ToMaxText(scan=False)).state
    with pytest.raises(UsageError, match="share keys and values"):
        StackAsModel(family="gemma4-small")(apart)
