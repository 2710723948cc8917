"""Smaller models: cutting and converting commute, configurations are true, everything else is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, ended, run
from support.hf_models import write_llama
from support.internals import family_named, to_maxtext, view_of
from support.locations import GOLDEN, GOLDEN_0_2_5, HF, TRAINED

import ckpttools
from ckpttools import (
    CheckpointError,
    ConfigError,
    CoverageError,
    FormatError,
    StackLayers,
    ToMaxText,
    Tree,
    UnstackLayers,
    UsageError,
)
from ckpttools.maxtext.shrink import Shrink
from ckpttools.maxtext.smaller_config import KeptParts, smaller_config

# Each with layers that it can have fewer of, and what else.
MODELS = [
    (GOLDEN / "llama3.1", KeptParts(range(3), vocab=77)),
    (GOLDEN / "gemma2", KeptParts(range(2), vocab=77)),
    (GOLDEN / "gemma3", KeptParts(range(7))),
    (GOLDEN / "gemma4-moe", KeptParts(range(6), experts=2)),
    (GOLDEN / "llama4-scout", KeptParts(range(4), experts=2)),
    (GOLDEN / "mixtral-8x7b", KeptParts((1, 3), experts=2)),
    (GOLDEN / "gpt-oss", KeptParts(range(2), experts=2)),
    (GOLDEN / "deepseek2", KeptParts(range(4), experts=2)),
    # Fewer of the first layers, which have no experts.
    (GOLDEN / "deepseek3", KeptParts((1, 4), experts=2)),
    (GOLDEN / "qwen3-next", KeptParts(range(4), experts=2)),
    (GOLDEN_0_2_5 / "deepseek3.2", KeptParts(range(2), vocab=50)),
    (GOLDEN_0_2_5 / "qwen3-vl", KeptParts(range(2), vocab=50)),
    (GOLDEN_0_2_5 / "gemma4-e2b", KeptParts(range(5))),
]


def bits(tree: Tree) -> dict[object, object]:
    return {path: (item.shape, item.dtype.name, item.read().tobytes()) for path, item in tree.arrays.items()}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(("model", "how"), MODELS, ids=lambda item: getattr(item, "name", ""))
def test_shrinking_and_converting_commute(model, how, scan):
    tree = ckpttools.open(model / "hf")
    to = ToMaxText(scan=scan, leaves_out=True)
    try:
        whole = to_maxtext(tree, to).state.with_metadata(location="")
    except UsageError:
        pytest.skip("MaxText does not scan it")
    cut = tree.pipe(Shrink(how))
    assert bits(to_maxtext(cut, to).state) == bits(whole.pipe(Shrink(how, like=model / "hf")))
    # A tower stays whole, also one for which MaxText has no place: the configuration goes on to speak of it.
    assert {path for path in tree if "vision_tower" in str(path)} == {
        p for p in cut if "vision_tower" in str(p)
    }
    # What is left of the configuration describes what is left of the arrays: all rows fit.
    assert cut.metadata.config != tree.metadata.config


@settings(max_examples=10)
@given(st.sets(st.integers(0, 3), min_size=1), st.integers(1, 256), st.booleans())
def test_shrink_keeps_the_named_layers_and_tokens(layers, vocab, stacked):
    tree = to_maxtext(ckpttools.open(HF), ToMaxText(scan=False)).state.with_metadata(location="")
    how = Shrink(KeptParts(sorted(layers), vocab=vocab), like=HF)
    built = UnstackLayers()(tree.pipe(StackLayers(), how)).tree if stacked else tree.pipe(how)
    inner = ("params", "params")
    for new, old in enumerate(sorted(layers)):
        path = ("mlp", "wi_0", "kernel")
        one, other = (
            item[(*inner, "decoder", f"layers_{n}", *path)] for item, n in ((built, new), (tree, old))
        )
        assert np.array_equal(one.read(), other.read())
    assert sum("wi_0" in path for path in built) == len(layers)
    rows = built[(*inner, "token_embedder", "embedding")]
    assert np.array_equal(rows.read(), tree[(*inner, "token_embedder", "embedding")][:vocab])


def test_moments_and_random_states_are_shrunk_with_the_weights(tmp_path):
    (tmp_path / "hf").mkdir()
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"head_dim": 16, "intermediate_size": 128, "vocab_size": 256, "tie_word_embeddings": False}
    (tmp_path / "hf/config.json").write_text(json.dumps({"model_type": "llama", **sizes, **more}))
    tree = ckpttools.open(TRAINED)
    built = tree.pipe(Shrink(KeptParts(range(1), vocab=100), like=tmp_path / "hf/config.json"))
    assert built.keys() == tree.keys()
    for path, array in built.arrays.items():
        if "layers" in path:
            axis = [
                k for k, (a, b) in enumerate(zip(array.shape, tree.arrays[path].shape, strict=True)) if a != b
            ]
            assert len(axis) == 1 and array.shape[axis[0]] == 1, path
            assert np.array_equal(
                array.read(), np.take(tree.arrays[path].read(), [0], axis[0]), equal_nan=True
            )
        if "embedding" in path:
            assert array.shape == (100, 64)


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_llama(Path("hf/llama"))
    run("convert", "hf-to-maxtext", "hf/llama", "maxtext/llama")


def test_shrunk_model_has_a_correct_config_and_shares_arrays(models):
    declared = run("shrink", "hf/llama", "small", "--layers", "2", "--vocab", "100")
    config = json.loads(Path("small/config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"]) == (2, 100)
    assert "num_hidden_layers is 2; it was 4" in declared
    run("convert", "hf-to-maxtext", "hf/llama", "single", "--no-scan")
    receipt = json.loads(ended("shrink", "single", "cut", "--layers", "2", "--json").stdout)
    assert receipt["bytes_referenced"] > 100_000 and receipt["bytes_out"] == 0
    # Most of the file would be dead bytes in every copy of this one.
    words = ("shrink", "single", "--layers", "1", "--vocab", "100")
    told = [
        json.loads(ended(*words, name, *how, "--json").stdout)
        for name, how in (("tiny", []), ("shared", ["--reference"]))
    ]
    assert [item["bytes_out"] > 0 == item["bytes_referenced"] for item in told] == [True, False]
    assert sum(item.stat().st_size for item in Path("tiny").rglob("*")) < told[0]["bytes_out"] + 60_000
    assert "copied: they are less than 50% of files" in " ".join(run(*words, "again").split())
    assert ckpt("diff", "tiny", "shared").exit_code == 0
    carried = json.loads(Path("cut/0/items/hf/config.json").read_text())
    assert carried["num_hidden_layers"] == 2
    run("shrink", "hf/llama", "two", "--layers", "2")
    assert ckpt("verify", "cut", "--against", "two").exit_code == 0
    run("convert", "maxtext-to-hf", "cut", "back")
    assert ckpt("diff", "back", "two").exit_code == 0


def test_only_layer_lists_are_truncated():
    family = family_named("llama")
    lists = {"layer_types": ["a", "b", "c"], "eos_token_id": [1, 2, 3], "architectures": ["A", "B", "C"]}
    config = {
        "num_hidden_layers": 3,
        "vocab_size": 9,
        "mlp_only_layers": [0, 2],
        "pinpoints": [1] * 4,
        "no_rope_layers": [],
        "per_layer_config": {"01": {"head_dim": 2}, "02": {"head_dim": 4}},
        "num_kv_shared_layers": 2,
        "mlp_layer_types": ["dense", "sparse", "dense", "of no layer", "of none"],
        **lists,
    }
    built = smaller_config(config, family, KeptParts((0, 2)))
    assert built.config == {
        **config,
        "num_hidden_layers": 2,
        "layer_types": ["a", "c"],
        "mlp_layer_types": ["dense", "dense"],
        "mlp_only_layers": [0, 1],
        "per_layer_config": {"01": {"head_dim": 4}},
        "num_kv_shared_layers": 1,
    }
    for odd, declared in (
        ({"widths": [1, 2, 3]}, "unknown whether widths"),
        ({"layer_types": ["a"]}, "has a different length"),
    ):
        with pytest.raises(ConfigError, match=declared):
            smaller_config({**config, **odd}, family, KeptParts((0, 2)))
        assert smaller_config({**config, **odd}, family, KeptParts(vocab=8)).config["vocab_size"] == 8
    window = {**config, "max_window_layers": 1, "pad_token_id": 8}
    fewer = smaller_config(window, family, KeptParts((1, 2), vocab=8)).config
    assert (fewer["max_window_layers"], fewer["pad_token_id"]) == (0, None)
    ends = {**config, "bos_token_id": 9, "eos_token_id": [1, 8, 9]}
    told = smaller_config(ends, family, KeptParts(vocab=8)).changes
    assert [item.partition(",")[0] for item in told[-2:]] == ["bos_token_id is 9", "eos_token_id is 8"]
    grouped = {
        "num_hidden_layers": 1,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 6,
    }
    fewer = smaller_config(grouped, family_named("deepseek"), KeptParts(experts=4)).config
    assert (fewer["n_group"], fewer["topk_group"], fewer["num_experts_per_tok"]) == (1, 1, 4)


REFUSED = [
    (GOLDEN / "llama3.1/hf", KeptParts(()), UsageError, "these layers cannot be kept"),
    (GOLDEN / "llama3.1/hf", KeptParts((0, 9)), UsageError, "these layers cannot be kept"),
    (GOLDEN / "llama3.1/hf", KeptParts((2, 1)), UsageError, "these layers cannot be kept"),
    (GOLDEN / "llama3.1/hf", KeptParts(experts=2), ConfigError, "does not apply"),
    (GOLDEN / "llama3.1/hf", KeptParts(vocab=300), UsageError, "the model has fewer"),
    (GOLDEN / "gemma3/hf", KeptParts((1, 2)), UsageError, "repeat every 6"),
    (GOLDEN / "gemma2/hf", KeptParts((0, 2)), UsageError, "repeat every 2"),
    (
        GOLDEN_0_2_5 / "gemma4-e2b/hf",
        KeptParts(range(4)),
        UsageError,
        "another kind of layer at this position",
    ),
    (GOLDEN_0_2_5 / "deepseek4/hf", KeptParts(experts=2), UsageError, "expert indices"),
    (GOLDEN_0_2_5 / "qwen3.5-fp8/hf", KeptParts(vocab=2), FormatError, "only plain weights can be cut"),
    (TRAINED, KeptParts(range(1)), ConfigError, "config.json does not exist next to"),
]


@pytest.mark.parametrize(("location", "how", "kind", "declared"), REFUSED, ids=lambda item: str(item)[-30:])
def test_impossible_shrinks_are_refused(location, how, kind, declared):
    with pytest.raises(kind, match=declared):
        ckpttools.open(location).pipe(Shrink(how))


def test_quantized_model_is_dequantized_before_shrinking(tmp_path):
    """As a cast of the whole model makes them, of which no copy is needed."""
    source, kept = GOLDEN / "gpt-oss/hf", {"layers": 2, "experts": 2}
    ckpttools.quantize(source, tmp_path / "mxfp4", scheme="mxfp4")
    assert "--dtype bfloat16 dequantizes them" in run(
        "shrink", tmp_path / "mxfp4", tmp_path / "one", "--layers", "2", code=3
    )
    ckpttools.shrink(tmp_path / "mxfp4", tmp_path / "one", dtype="bfloat16", **kept)
    ckpttools.cast(tmp_path / "mxfp4", tmp_path / "plain", dtype="bfloat16")
    ckpttools.shrink(tmp_path / "plain", tmp_path / "two", **kept)
    one, two = (ckpttools.open(tmp_path / item) for item in ("one", "two"))
    assert one.arrays.keys() == two.arrays.keys() and one.metadata.config == two.metadata.config
    assert all(array.read().tobytes() == two[path].read().tobytes() for path, array in one.arrays.items())


def test_array_without_a_row_is_refused():
    tree = ckpttools.open(HF)
    odd = Tree({**tree, ("model.layers.1.mlp.extra.weight",): tree["lm_head.weight"]}, tree.metadata)
    with pytest.raises(CoverageError, match="extra"):
        odd.pipe(Shrink(KeptParts(range(1))))


def test_arrays_with_one_name_are_both_kept():
    tree = to_maxtext(ckpttools.open(GOLDEN / "llama3.1/hf"), ToMaxText(leaves_out=True)).state
    path = ("params", "params", "decoder", "decoder_norm", "scale")
    twin = Tree({**tree, (*path[:3], "decoder_norm.scale"): tree[path]}, tree.metadata)
    with pytest.raises(FormatError, match="several arrays have one name"):
        twin.pipe(Shrink(KeptParts(range(2)), like=GOLDEN / "llama3.1/hf"))
    with pytest.raises(FormatError, match="several arrays have one name"):
        _ = view_of(twin).named


def test_command_names_missing_options(models):
    assert "give --layers or --experts or --vocab" in run("shrink", "hf/llama", "x", code=2)
    assert "neither a number nor a list" in run("shrink", "hf/llama", "x", "--layers", "a", code=2)
    with pytest.raises(CheckpointError):
        ckpttools.shrink("hf/llama", "x", layers=9)
