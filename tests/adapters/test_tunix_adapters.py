"""LoRA adapters of Tunix's own models: identified everywhere, and merged as Tunix merges them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import run, succeed
from support.hf_models import LLAMA_CONFIG, write_llama
from support.internals import dotted

import ckpttools

EMBED, MLP, HEADS, KV_HEADS, HEAD = 64, 128, 4, 2, 16
RANK, ALPHA = 4, 6.0
SIZES = {"num_hidden_layers": 2, "dtype": "float32"}
# Kernel -> shapes of both factors without the rank, and the weights of transformers that it holds.
LLAMA = {
    ("attn", "q_proj", "w"): ((EMBED,), (HEADS, HEAD), ["self_attn.q_proj"]),
    ("attn", "k_proj", "w"): ((EMBED,), (KV_HEADS, HEAD), ["self_attn.k_proj"]),
    ("attn", "v_proj", "w"): ((EMBED,), (KV_HEADS, HEAD), ["self_attn.v_proj"]),
    ("attn", "o_proj", "w"): ((HEADS, HEAD), (EMBED,), ["self_attn.o_proj"]),
    ("mlp", "gate_proj", "kernel"): ((EMBED,), (MLP,), ["mlp.gate_proj"]),
    ("mlp", "up_proj", "kernel"): ((EMBED,), (MLP,), ["mlp.up_proj"]),
    ("mlp", "down_proj", "kernel"): ((MLP,), (EMBED,), ["mlp.down_proj"]),
}
GEMMA = {
    ("attn", "q_einsum", "w"): ((EMBED,), (HEADS, HEAD), ["self_attn.q_proj"]),
    ("attn", "kv_einsum", "w"): ((EMBED,), (2, KV_HEADS, HEAD), ["self_attn.k_proj", "self_attn.v_proj"]),
    ("attn", "attn_vec_einsum", "w"): ((HEADS, HEAD), (EMBED,), ["self_attn.o_proj"]),
    ("mlp", "down_proj", "kernel"): ((MLP,), (EMBED,), ["mlp.down_proj"]),
}


def factors(kernels, layers=range(2), seed=0):
    """Return the state of a Tunix model with adapters, and what Tunix adds to each weight when it merges."""
    random = np.random.default_rng(seed)
    state, added = {}, {}
    for layer in layers:
        for (module, name, kernel), (inputs, outputs, weights) in kernels.items():
            a = random.standard_normal((*inputs, RANK)).astype(np.float32)
            b = random.standard_normal((RANK, *outputs)).astype(np.float32)
            of_layer = state.setdefault("layers", {}).setdefault(str(layer), {}).setdefault(module, {})
            of_layer[name] = {
                f"{kernel}_lora_a": {"value": jnp.asarray(a)},
                f"{kernel}_lora_b": {"value": jnp.asarray(b)},
            }
            for number, weight in enumerate(weights):
                part = b[:, number] if len(weights) > 1 else b
                product = (a.reshape(-1, RANK) @ part.reshape(RANK, -1)) * (ALPHA / RANK)
                added[f"model.layers.{layer}.{weight}.weight"] = product.T
    return state, added


def saved(path, state, item="model_params"):
    optimizer = {"opt_state": optax.adamw(1e-3).init(state), "step": {"value": jnp.uint32(2)}}
    items = {item: state, "optimizer_state": optimizer}
    with ocp.CheckpointManager(path) as manager:
        trees = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
        manager.save(2, args=ocp.args.Composite(**trees))
    return path


def numbers(path):
    return {dotted(where): array.read() for where, array in ckpttools.open(path).arrays.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "llama"
    write_llama(path, **SIZES)
    return path


@pytest.mark.parametrize(
    ("kernels", "layers", "wrapper"),
    [
        (LLAMA, (0, 1), None),
        (GEMMA, (0, 1), None),
        (LLAMA, (1,), None),
        (LLAMA, (0, 1), "base"),
        ({key: LLAMA[key] for key in [*LLAMA][:1]}, (0,), None),
    ],
    ids=["llama", "gemma", "one layer", "reinforcement learning", "one kernel"],
)
class TestAdapters:
    @pytest.fixture
    def adapter(self, tmp_path, kernels, layers, wrapper):
        state, added = factors(kernels, layers)
        return saved(tmp_path / "run", {wrapper: state} if wrapper else state), added

    def test_merge_adds_what_tunix_adds(self, tmp_path, base, adapter, layers):
        path, added = adapter
        location = path if len(layers) == 2 else path / "2" / "model_params"
        run("adapter", "merge", base, location, tmp_path / "out", "--alpha", ALPHA)
        merged, before = numbers(tmp_path / "out"), numbers(base)
        assert merged.keys() == before.keys()
        for name, weight in before.items():
            expected = weight + added.get(name, 0)
            assert np.allclose(merged[name], expected, rtol=0, atol=1e-5), name

    def test_peft_adapter_has_equal_factors(self, tmp_path, base, adapter):
        path, added = adapter
        run("adapter", "to-peft", path, tmp_path / "peft", "--base", base, "--alpha", ALPHA)
        arrays = numbers(tmp_path / "peft")
        assert len(arrays) == 2 * len(added)
        for name, expected in added.items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            product = arrays[f"{module}.lora_B.weight"] @ arrays[f"{module}.lora_A.weight"]
            assert np.allclose(product * (ALPHA / RANK), expected, rtol=0, atol=1e-4), name
        run("adapter", "to-maxtext", tmp_path / "peft", tmp_path / "maxtext", "--base", base)

    def test_commands_identify_tunix_adapters(self, adapter, base):
        path, _ = adapter
        assert "a LoRA adapter of Tunix's" in succeed(path).output
        assert "MaxText does not load these names" in " ".join(run("doctor", path).split())
        text = succeed("inspect", "tree", path / "2").output
        assert "a LoRA in Tunix's names" in text and f"rank        {RANK}" in text
        (listing,) = ckpttools.ls(path).steps
        assert [item.kind for item in listing.items] == ["adapter", "optimizer"]
        against = succeed("inspect", "tree", path / "2" / "model_params", "--against", base).output
        assert "none missing, none unexpected" in " ".join(against.split())
        hints = [item for item in ckpttools.summary(path).next if "adapter" in item]
        assert hints and all("alpha=ALPHA" in hint for hint in hints)


def test_alpha_must_be_given(tmp_path, base):
    adapter = saved(tmp_path / "run", factors(LLAMA)[0])
    assert "--alpha" in run("adapter", "merge", base, adapter, tmp_path / "out", code=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ({("attn", "qkv_einsum", "w"): ((EMBED,), (3, HEADS, HEAD), [])}, "no known counterpart"),
        ({("attn", "kv_einsum", "w"): ((EMBED,), (3, HEADS, HEAD), [])}, "do not have Tunix's layout"),
        ({("mlp", "up_proj", "kernel"): ((EMBED,), (MLP * 2,), [])}, "do not fit the base's weight"),
        ({("mlp", "up_proj", "kernel"): ((EMBED, 2), (MLP,), [])}, "do not fit the base's weight"),
    ],
    ids=["joined queries, keys and values", "three in two", "wider outputs", "wider inputs"],
)
def test_unknown_tunix_factors_are_refused(tmp_path, base, kernels, message):
    known = {key: LLAMA[key] for key in [*LLAMA][:1]}
    adapter = saved(tmp_path / "run", factors(known | kernels)[0])
    output = run("adapter", "merge", base, adapter, tmp_path / "out", "--alpha", 2, code=3)
    assert message in output and not (tmp_path / "out").exists()


def test_layers_missing_from_the_base_are_refused(tmp_path, base):
    adapter = saved(tmp_path / "run", factors(LLAMA, layers=(0, 7))[0])
    output = run("adapter", "to-peft", adapter, tmp_path / "out", "--base", base, "--alpha", 2, code=3)
    assert "weights that the base does not have" in output and "model.layers.7" in output


@given(st.sampled_from(["wi_0", "wi_1", "wo"]), st.sampled_from(["layers", "layers_0", "moe_layers"]))
def test_maxtext_names_are_not_mistaken_for_tunix(kernel, layers):
    from ckpttools.adapters.from_jax import tunix_kernels

    head = ("decoder", layers, "mlp", kernel)
    assert not tunix_kernels([(*head, "kernel_lora_a", "value"), (*head, "kernel_lora_b", "value")])


def test_tunix_factors_must_match_base_sizes():
    config = LLAMA_CONFIG
    assert (config["hidden_size"], config["intermediate_size"], config["head_dim"]) == (EMBED, MLP, HEAD)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
