import warnings
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.hf_models import llama_shapes
from support.internals import FlagRule, Stored, Whole, families, family_named, family_of

from ckpttools import DTYPES, CheckpointError, ConfigError, CoverageError, UnknownNameError
from ckpttools.family_check.check import present_rows
from ckpttools.family_check.definition import Definition
from ckpttools.family_check.synthetic_models import Sizes, configuration, flag_settings
from ckpttools.mapping.arithmetic import axes_in
from ckpttools.mapping.values import Fill
from ckpttools.model_families.registry import MAXTEXT_ONLY_MODELS, UNFIT
from ckpttools.testing.strategies import UnreadableFile, noise, stored

F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]
BUILT_IN = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3_ROPES = (
    {"rope_scaling": {"rope_type": "llama3"}},
    {"rope_scaling": {"type": "llama3"}},
    {"rope_parameters": {"rope_type": "llama3"}},
    {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "llama3"}},
)


def config_of(family, **fields):
    return {
        "model_type": family,
        "num_hidden_layers": 2,
        "hidden_size": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 10,
        "vocab_size": 14,
        "tie_word_embeddings": False,
    } | fields


def weights(shapes, seed=0):
    """Return float32 values of about 0.02, so that scaling by a power of two is exact."""
    random = np.random.default_rng(seed)
    return {key: random.normal(0, 0.02, shape).astype(np.float32) for key, shape in shapes.items()}


def lazy(tensors):
    return {key: stored(t.view(F32.carrier), F32, key) for key, t in tensors.items()}


def bound(config, axis=None, location="config.json"):
    return family_of(config, location).table(config, location, scan_axis=axis)


@st.composite
def configs(draw, exact=True):
    family = draw(st.sampled_from(BUILT_IN))
    interleaved = family == "llama" and draw(st.booleans())
    scaled = family in ("llama", "mistral")
    dims = (4, 16) if scaled and exact else (2, 6, 8) if interleaved else (1, 3, 5, 4)
    return config_of(
        family,
        num_hidden_layers=draw(st.integers(1, 4)),
        hidden_size=draw(st.integers(1, 9)),
        num_attention_heads=draw(st.integers(1, 5)),
        num_key_value_heads=draw(st.integers(1, 5)),
        head_dim=draw(st.sampled_from(dims)),
        intermediate_size=draw(st.integers(1, 9)),
        vocab_size=draw(st.integers(1, 9)),
        tie_word_embeddings=draw(st.booleans()),
        **(draw(st.sampled_from(LLAMA3_ROPES)) if interleaved else {}),
    )


SCANS = st.sampled_from((None, 0, 1, 2))


@settings(max_examples=60)
@given(config=configs(), axis=SCANS)
def test_round_trip_restores_every_bit(config, axis):
    table = bound(config, axis)
    tensors = weights(llama_shapes(config))
    there = table.to_left(lazy(tensors))
    assert all(note.exact for note in there.values)
    back = table.to_right(there.arrays)
    assert back.arrays.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert back.arrays[key].read().tobytes() == tensor.tobytes(), key


@settings(max_examples=30)
@given(config=configs(exact=False), axis=SCANS)
def test_inexact_round_trip_differs_by_at_most_one_ulp(config, axis):
    table = bound(config, axis)
    tensors = weights(llama_shapes(config))
    there = table.to_left(lazy(tensors))
    inexact = {note.key for note in there.values if not note.exact}
    back = table.to_right(there.arrays).arrays
    for key, tensor in tensors.items():
        read = back[key].read()
        if inexact and "q_proj.weight" in key:
            assert np.abs(read.view(np.int32) - tensor.view(np.int32)).max() <= 1
        else:
            assert read.tobytes() == tensor.tobytes(), key


def test_hundred_layers_round_trip():
    config = config_of("llama", num_hidden_layers=100, hidden_size=3, vocab_size=2, intermediate_size=1)
    table = bound(config, 1)
    tensors = weights(llama_shapes(config))
    there = table.to_left(lazy(tensors)).arrays
    stacked = there["decoder.layers.mlp.wi_0.kernel"]
    assert stacked.shape == (3, 100, 1)
    for layer in (0, 9, 10, 99):
        expected = tensors[f"model.layers.{layer}.mlp.gate_proj.weight"].T
        assert stacked.read()[:, layer].tobytes() == expected.tobytes()
    back = table.to_right(there).arrays
    assert all(back[key].read().tobytes() == tensor.tobytes() for key, tensor in tensors.items())


def maxtext(config, tensors, interleaved):
    """Return MaxText's unscanned arrays, computed with numpy alone."""
    embed, heads, kv = (config[f] for f in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    dim = config["head_dim"]
    scale = dim**-0.5 if config["model_type"] in ("llama", "mistral") else 1

    def rope(array):
        """Reorder the last axis from halves to neighbors."""
        if not interleaved:
            return array
        out = np.empty_like(array)
        out[..., 0::2], out[..., 1::2] = array[..., : dim // 2], array[..., dim // 2 :]
        return out

    built = {
        "token_embedder.embedding": tensors["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": tensors["model.norm.weight"],
    }
    if not config["tie_word_embeddings"]:
        built["decoder.logits_dense.kernel"] = tensors["lm_head.weight"].T
    for n in range(config["num_hidden_layers"]):
        hf = {k.removeprefix(f"model.layers.{n}."): t for k, t in tensors.items() if f"layers.{n}." in k}
        layer = {
            "pre_self_attention_layer_norm.scale": hf["input_layernorm.weight"],
            "post_self_attention_layer_norm.scale": hf["post_attention_layernorm.weight"],
            "mlp.wi_0.kernel": hf["mlp.gate_proj.weight"].T,
            "mlp.wi_1.kernel": hf["mlp.up_proj.weight"].T,
            "mlp.wo.kernel": hf["mlp.down_proj.weight"].T,
            "self_attention.query.kernel": rope(hf["self_attn.q_proj.weight"].T.reshape(embed, heads, dim))
            * np.float32(scale),
            "self_attention.key.kernel": rope(hf["self_attn.k_proj.weight"].T.reshape(embed, kv, dim)),
            "self_attention.value.kernel": hf["self_attn.v_proj.weight"].T.reshape(embed, kv, dim),
            "self_attention.out.kernel": hf["self_attn.o_proj.weight"].T.reshape(heads, dim, embed),
        }
        if config["model_type"] == "qwen2":
            for short, long, count in (("q", "query", heads), ("k", "key", kv), ("v", "value", kv)):
                layer[f"self_attention.{long}.bias"] = hf[f"self_attn.{short}_proj.bias"].reshape(count, dim)
        if config["model_type"] == "qwen3":
            layer["self_attention.query_norm.scale"] = hf["self_attn.q_norm.weight"]
            layer["self_attention.key_norm.scale"] = hf["self_attn.k_norm.weight"]
        built |= {f"decoder.layers_{n}.{name}": array for name, array in layer.items()}
    return built


@settings(max_examples=60)
@given(config=configs(exact=False) | configs(), axis=SCANS)
def test_hugging_face_arrays_match_numpy(config, axis):
    interleaved = "rope_scaling" in config or "rope_parameters" in config
    table = bound(config, axis)
    tensors = weights(llama_shapes(config), seed=1)
    expected = maxtext(config, tensors, interleaved)
    got = table.to_left(lazy(tensors)).arrays
    if axis is not None:
        names = {key.split("layers_0.")[1] for key in expected if "layers_0." in key}
        for name in names:
            parts = [expected.pop(f"decoder.layers_{n}.{name}") for n in range(config["num_hidden_layers"])]
            expected[f"decoder.layers.{name}"] = np.stack(parts, min(axis, parts[0].ndim))
    assert got.keys() == expected.keys()
    for key, truth in expected.items():
        assert got[key].shape == truth.shape, key
        assert got[key].read().tobytes() == truth.tobytes(), key


@pytest.mark.parametrize("family", BUILT_IN)
@pytest.mark.parametrize("absent", ["head_dim", "num_key_value_heads", "intermediate_size", "vocab_size"])
def test_unstated_config_fields_have_defaults(family, absent):
    config = config_of(family, num_key_value_heads=4, hidden_size=16)
    tensors = lazy(weights(llama_shapes(config)))
    full = family_named(family).table(config, "c").to_left(tensors)
    built = family_named(family).table(config | {absent: None}, "c").to_left(tensors)
    assert built.sizes == full.sizes
    assert {k: a.read().tobytes() for k, a in built.arrays.items()} == {
        k: a.read().tobytes() for k, a in full.arrays.items()
    }


@pytest.mark.parametrize("rope", LLAMA3_ROPES)
def test_llama3_rope_reorders_query_and_key(rope):
    halves, neighbors = config_of("llama"), config_of("llama", **rope)
    tensors = lazy(weights(llama_shapes(halves)))
    one = bound(halves).to_left(tensors).arrays
    other = bound(neighbors).to_left(tensors).arrays
    differ = {key for key in one if one[key].read().tobytes() != other[key].read().tobytes()}
    assert differ == {
        f"decoder.layers_{k}.self_attention.{n}.kernel" for k in (0, 1) for n in ("query", "key")
    }


@pytest.mark.parametrize(
    "rope", [{"rope_scaling": None}, {"rope_scaling": {"type": "linear"}}, {"rope_theta": 1.0}]
)
def test_other_ropes_keep_halves_of_heads(rope):
    config = config_of("llama", **rope)
    assert not bound(config).flags["interleaved"].value


def test_odd_head_size_cannot_be_interleaved():
    config = config_of("llama", head_dim=3, **LLAMA3_ROPES[0])
    shapes = llama_shapes(config)
    with pytest.raises(CheckpointError):
        bound(config).to_left(
            {key: Stored(shape, BF16, UnreadableFile(key), 0) for key, shape in shapes.items()}
        )


def test_rotary_buffers_of_old_checkpoints_are_dropped():
    config = config_of("llama")
    tensors = lazy(weights(llama_shapes(config) | {"model.layers.1.self_attn.rotary_emb.inv_freq": (2,)}))
    mapped = bound(config).to_left(tensors)
    assert mapped.dropped == ("model.layers.1.self_attn.rotary_emb.inv_freq",)


def test_tied_model_with_a_head_is_refused():
    config = config_of("qwen3")
    tensors = lazy(weights(llama_shapes(config)))
    tied = config | {"tie_word_embeddings": True}
    with pytest.raises(CoverageError) as caught:
        bound(tied).to_left(tensors)
    assert (
        "lm_head.weight is not expected because of config.json: tie_word_embeddings is true"
        in caught.value.hint
    )


@pytest.mark.parametrize("family", BUILT_IN)
def test_config_contradiction_names_field_and_array(family):
    config = config_of(family)
    tensors = lazy(weights(llama_shapes(config)))
    wrong = config | {"hidden_size": 8}
    with pytest.raises(CoverageError) as caught:
        bound(wrong).to_left(tensors)
    assert "model.embed_tokens.weight: got [14, 6], expected [14, 8]" in caught.value.message
    assert "embed 8 from config.json: hidden_size" in caught.value.message


@settings(max_examples=20)
@given(config=configs())
def test_bfloat16_models_note_inexact_scales(config):
    table = bound(config)
    tensors = {key: stored(noise(s, BF16), BF16, key) for key, s in llama_shapes(config).items()}
    notes = table.to_left(tensors).values
    assert bool(notes) == (config["model_type"] in ("llama", "mistral"))
    assert all("query" in note.key and note.exact for note in notes)


def test_built_in_families_are_found():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        families.cache_clear()
        assert set(BUILT_IN) <= set(families())
    assert list(families()) == sorted(families())
    assert all(family.name == name for name, family in families().items())
    assert all(family.models and family.model_types for family in families().values())


def test_every_model_type_finds_its_family():
    # Others have a type of theirs in common with the family that says when a model is of them.
    others = {name for family in families().values() for name in family.others}
    first = [family for family in families().values() if family.name not in others]
    owners = [(kind, family) for family in first for kind in family.model_types]
    assert len({kind for kind, _ in owners}) == len(owners)
    plain = {"hidden_size_per_layer_input": None}  # transformers takes 256, which is E2B, for silence
    assert all(family_of({"model_type": kind, **plain}, "config.json") is family for kind, family in owners)


def test_spellings_differing_only_in_layers_are_distinguished():
    family = families()["kimi-k2.5"]
    for spelling in family.spellings:
        names = [spelling.key(row.right.key).first() for row in family.all_rows(None)]
        assert family.spelling_of(names) is spelling
    assert {item.name for item in family.spellings} == {"hub", "transformers", "nested"}


def test_unknown_family_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match="unknown family 'lama'") as caught:
        family_named("lama")
    assert "llama" in caught.value.hint
    with pytest.raises(UnknownNameError) as caught:
        family_named("zzzzzz")
    assert "ckpttools.families" in caught.value.hint


@pytest.mark.parametrize(
    "model, family",
    [
        ("Kimi-K2", "deepseek"),
        ("kimi_k2", "deepseek"),
        ("gemma4-e2b", "gemma4-small"),
        ("DeepSeek V3.2", "deepseek"),
    ],
)
def test_model_names_resolve_to_families(model, family):
    with pytest.raises(UnknownNameError) as caught:
        family_named(model)
    assert caught.value.hint == f"{model} belongs to the family {family}"


def test_unknown_model_type_is_refused():
    with pytest.raises(ConfigError, match="no family has model_type 'qwen9'") as caught:
        family_of({"model_type": "qwen9"}, "config.json")
    assert caught.value.location == "config.json"
    assert "qwen2" in caught.value.expected
    assert 'family="NAME"' in caught.value.hint and "ckpttools.families" in caught.value.hint


@pytest.mark.parametrize("model_type", sorted({**UNFIT, **MAXTEXT_ONLY_MODELS}))
def test_unsupported_model_type_is_explained(model_type):
    """And no family is named, as none fits."""
    with pytest.raises(ConfigError, match=f"no family has model_type '{model_type}'") as caught:
        family_of({"model_type": model_type}, "config.json")
    assert {**UNFIT, **MAXTEXT_ONLY_MODELS}[model_type] in caught.value.got
    assert ("MaxText 0.2.5 supports it" in caught.value.got) == (model_type in MAXTEXT_ONLY_MODELS)
    assert "NAME" not in caught.value.hint and "inspect" not in caught.value.hint
    with pytest.raises(UnknownNameError) as named:
        family_named(model_type)
    assert {**UNFIT, **MAXTEXT_ONLY_MODELS}[model_type] in named.value.hint


def test_unsupported_model_types_have_no_family():
    assert not {**UNFIT, **MAXTEXT_ONLY_MODELS}.keys() & {
        name for family in families().values() for name in family.model_types
    }


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 3}, {"model_type": ["llama"]}])
def test_missing_model_type_is_refused(config):
    with pytest.raises(ConfigError, match="does not state a model type") as caught:
        family_of(config, "config.json")
    assert "`family`" in caught.value.hint


def test_flag_rules_read_config_fields():
    rule = FlagRule(("a.b", "c"), ("x", True), default=True)
    assert rule.read({"a": {"b": "x"}, "c": "y"}, "p").value
    assert rule.read({"c": True}, "p").source == "p: c is true"
    assert not rule.read({"a": {"b": "y"}}, "p").value
    assert rule.read({"a": "text"}, "p").value
    assert rule.read({}, "p").source == "p: no a.b"
    assert not FlagRule((), ()).read({"a": 1}, "p").value


@cache
def usual_sizes(name):
    """Sizes of a family, and how long those may be that count arrays, by the name of what says them."""
    family = families()[name]
    definition = Definition(family)
    usual = Sizes.of(definition)
    counting = {name for formula in family.derived.values() for name in axes_in(formula)}
    counting |= {axis for side in definition.sides for axis in side.key.axes}
    return usual, {usual.names[axis]: 13 if axis == "layers" else 3 for axis in counting & usual.names.keys()}


NAMES = st.sampled_from(tuple(families()))


@st.composite
def random_models(draw):
    """Any family with any sizes, in any setting of its flags and any spelling; and lengths of all axes."""
    name = draw(NAMES)
    family, (usual, limit) = families()[name], usual_sizes(name)
    variables = {name: draw(st.integers(1, limit.get(name, 5))) for name in usual.variables}
    sizes = replace(usual, variables=variables)
    setting = draw(st.sampled_from(list(flag_settings(family, sizes.stated))))
    config = configuration({**sizes.stated, **setting.fields})
    assume(not sizes.wrong)
    return family, config, sizes.lengths, setting.flags, draw(st.sampled_from(family.spellings))


def bfloat16_numbers(shape, seed):
    """Normal numbers of about 0.02, none so small that adding 1 would change it."""
    numbers = np.random.default_rng(seed).normal(0, 0.02, shape).astype(BF16.numpy)
    return np.where(np.abs(numbers.astype(np.float32)) < 2.0**-16, BF16.numpy.type(0.5), numbers)


def random_tensors(rows, lengths):
    """What files of a model have by their rows; of some rows MaxText alone has arrays."""
    sides = {key: row for row in rows if not isinstance(row.op, Fill) for key in row.right.keys(lengths)}
    return {
        key: np.random.default_rng(n).integers(0, 200, row.right.shape(lengths), row.op.right)
        if isinstance(row.op, Whole)
        else bfloat16_numbers(row.right.shape(lengths), n)
        for n, (key, row) in enumerate(sides.items())
    }


@settings(max_examples=60)
@given(model=random_models(), axis=st.sampled_from((None, 0, 1)), exact=st.booleans())
def test_every_family_of_any_size_round_trips(model, axis, exact):
    """To the bit, or to one ulp where the plan says so."""
    family, config, lengths, flags, spelling = model
    if family.layers_beyond_cycles(lengths):
        axis = None  # MaxText does not scan them
    table = family.table(config, "c", scan_axis=axis, spelling=spelling, overrides=flags)
    tensors = random_tensors(present_rows(table, lengths), lengths)
    dtypes = {key: DTYPES[tensor.dtype.name] for key, tensor in tensors.items()}
    arrays = {
        key: stored(tensor.view(dtypes[key].carrier), dtypes[key], key) for key, tensor in tensors.items()
    }
    there = table.to_left(arrays, exact=exact)
    assert not exact or all(note.exact for note in there.values)
    back = table.to_right(there.arrays)
    assert back.arrays.keys() == tensors.keys()
    inexact = any(not note.exact for note in there.values)
    for key, tensor in tensors.items():
        read = back.arrays[key].read().astype(tensor.dtype)
        if inexact and key in back.changed:
            assert np.abs(read.view(np.int16).astype(int) - tensor.view(np.int16)).max(initial=0) <= 1, key
        else:
            assert read.tobytes() == tensor.tobytes(), key
