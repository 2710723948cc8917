"""Adapters go through the rows of every family as weights do."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.internals import families, family_of, merge_into_base, to_maxtext
from support.locations import FIXTURES, GOLDEN, GOLDEN_0_2_5
from support.trees import lazy, model

from ckpttools import DTYPES, CheckpointError, Metadata, ToMaxText, Tree
from ckpttools.adapters.bases import open_base
from ckpttools.adapters.factor_rows import model_factor_rows, no_factors_reason, weight_names
from ckpttools.adapters.factors import Adapter, FactorPair
from ckpttools.adapters.fitting import fit_adapter
from ckpttools.adapters.from_jax import adapter_of_maxtext
from ckpttools.adapters.peft import to_peft
from ckpttools.adapters.to_maxtext import ToMaxTextAdapter, to_maxtext_adapter

GLOBAL = {"global_head_dim": 8, "num_global_key_value_heads": 2}


def without_towers(config):
    """Return the configuration of the text model."""
    kept = {name: value for name, value in config.items() if name not in ("vision_config", "audio_config")}
    return {name: without_towers(value) if isinstance(value, dict) else value for name, value in kept.items()}


@cache
def configs():
    """Return the smallest available configuration of each family."""
    result: dict[str, dict] = {}
    for root in (GOLDEN, GOLDEN_0_2_5, FIXTURES / "oracle"):
        for file in sorted((*root.glob("*/hf/config.json"), *root.glob("*/config.json"))):
            config = without_towers(json.loads(file.read_bytes()))
            try:
                name = family_of(config, str(file)).name
            except CheckpointError:
                continue
            text = config.get("text_config", config)
            # Of Gemma 4 shapes alone tell these, and here there are none yet.
            text |= GLOBAL if name.startswith("gemma4") else {}
            result.setdefault(name, config)
    return result


def test_every_family_has_a_test_case():
    assert set(configs()) == set(families())


EVERY_FAMILY = pytest.mark.parametrize("family", sorted(families()))
RANK = 2


def linear(name, shape, random, scale=0.5):
    """Return random factors of a linear layer, with a product of the size of weights."""
    a, b = (random.normal(0, 0.3, item).astype("f4") for item in ((RANK, shape[1]), (shape[0], RANK)))
    return FactorPair(name, lazy(a), lazy(b), scale, RANK)


def experts(name, shape, random):
    count, first, second = shape
    a = lazy(random.normal(0, 0.3, (RANK * count, first)).astype("f4"))
    b = lazy(random.normal(0, 0.3, (second, RANK * count)).astype("f4"))
    return FactorPair(name, a, b, 0.5, RANK, "experts", True)


def is_matrix(name, array):
    return name.endswith(".weight") and array.ndim == 2 and array.dtype.is_float


def share(name):
    return 0.2 if ".experts." in name else 0.7


def adapter_of(base, random, names=None):
    """Return factors of all matrices except in some layers."""
    weights = {name: array for name, array in base.weights.items() if names is None or name in names}
    some = [name for name in weights if is_matrix(name, weights[name]) and random.random() < share(name)]
    factors = [linear(name, weights[name].shape, random) for name in some]
    fused = [name for name, array in weights.items() if ".experts." in name and array.ndim == 3]
    factors += [experts(name, weights[name].shape, random) for name in fused if names is None]
    return Adapter("adapter", tuple(factors))


def scans(family):
    """Return whether the layers of a family are stacked, as in MaxText."""
    return not family.no_scan_reason


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return a randomly initialized model of a family and its MaxText checkpoint, as bases."""
    location = tmp_path_factory.mktemp("configs")
    return cache(lambda name: made_bases(name, location / f"{name}.json"))


def made_bases(name, location):
    tree = model(configs()[name], 1)
    family = families()[name]
    state = to_maxtext(tree, ToMaxText(scan=scans(family), leaves_out=True)).state
    location.write_text(json.dumps(configs()[name]))
    return open_base(tree), open_base(state, like=location)


def near(built: Tree, expected: Tree, base: Tree) -> None:
    for path in [path for path in expected.arrays if built.arrays[path] is not base.arrays[path]]:
        array = expected.arrays[path]
        got, there = built.arrays[path].read(), array.read()
        if got.tobytes() == there.tobytes():
            continue
        digits = 8 if array.dtype.name == "bfloat16" else 24
        # A base whose values are scaled was rounded once more, before anything was added.
        before = np.abs(base.arrays[path].read().astype(np.float64))
        step = 2.0 ** (1 - digits)
        got, there = got.astype(np.float64), there.astype(np.float64)
        assert np.all(np.abs(got - there) <= step * (np.abs(there) + before / 2) + 1e-7), path


@EVERY_FAMILY
def test_merge_and_convert_commute(family, bases):
    base, maxtext = bases(family)
    adapter = adapter_of(base, np.random.default_rng(2))
    one = merge_into_base(maxtext, adapter).tree
    options = ToMaxText(scan=scans(families()[family]), leaves_out=True)
    two = to_maxtext(merge_into_base(base, adapter).tree, options).state
    near(one, two, maxtext.tree)
    same = (path for path in one.arrays if one.arrays[path] is maxtext.tree.arrays[path])
    for path in itertools.islice((path for path in same if "tid2eid" not in path), 3):
        assert one.arrays[path].read().tobytes() == two.arrays[path].read().tobytes(), path


@EVERY_FAMILY
def test_adapter_is_equivalent_in_maxtext(family, bases):
    base, maxtext = bases(family)
    own = families()[family]
    axis = 1 if scans(own) else None
    rows = model_factor_rows(base, axis, own)
    fitting = {
        name for row in rows.rows if not no_factors_reason(row) for name in weight_names(row, rows.sizes)
    }
    adapter = adapter_of(base, np.random.default_rng(3), fitting)
    tree = to_maxtext_adapter(base, adapter, ToMaxTextAdapter(scan=scans(own))).tree
    modules = re.compile(tree.metadata.custom["lora"]["lora_module_path"])
    assert all(modules.fullmatch("/".join(map(str, path[:-2]))) for path in tree.arrays)
    expected = {
        factor.name: factor.delta(base.weights[factor.name].shape).read() for factor in adapter.factors
    }
    for known in (base, maxtext):
        back = adapter_of_maxtext(known, tree)
        there = {factor.name: factor.delta(base.weights[factor.name].shape).read() for factor in back.factors}
        assert expected.keys() <= there.keys()
        for name, delta in there.items():
            assert np.allclose(delta, expected.get(name, 0), rtol=1e-5, atol=1e-6), name
    # What is in MaxText's kernels is what its own multiplication of the factors adds.
    one, two = (
        merge_into_base(maxtext, adapter_of_maxtext(maxtext, tree)).tree,
        merge_into_base(maxtext, adapter).tree,
    )
    near(one, two, maxtext.tree)


@pytest.mark.parametrize(
    ("family", "module", "parts"),
    [
        ("qwen3-moe", "mlp.experts", (("gate_proj", "up_proj"), ("down_proj",))),
        ("mixtral", "block_sparse_moe.experts", (("w1", "w3"), ("w2",))),
    ],
)
def test_fused_expert_factors_equal_single_expert_factors(bases, family, module, parts):
    """Transformers 5 fuses them and PEFT multiplies them: A (expert rank, in), B (out, rank expert)."""
    base, _ = bases(family)
    random = np.random.default_rng(5)
    for fused, names in zip(("gate_up_proj", "down_proj"), parts, strict=True):
        single = [[f"model.layers.0.{module}.{e}.{part}.weight" for part in names] for e in range(4)]
        outs, ins = base.weights[single[0][0]].shape
        a = random.normal(size=(4 * RANK, ins)).astype("f4")
        b = random.normal(size=(len(names) * outs, RANK * 4)).astype("f4")
        factor = FactorPair(
            f"model.layers.0.mlp.experts.{fused}", lazy(a), lazy(b), 0.5, RANK, "experts", None
        )
        result = {item.name: item for item in fit_adapter(base, Adapter("adapter", (factor,))).factors}
        delta = 0.5 * np.einsum("ore,eri->eoi", b.reshape(-1, RANK, 4), a.reshape(4, RANK, ins))
        for expert, own in enumerate(single):
            built = [result[name].delta(base.weights[name].shape).read() for name in own]
            assert np.allclose(np.concatenate(built), delta[expert], atol=1e-5)
    few = FactorPair(factor.name, lazy(a[RANK:]), lazy(b[:, RANK:]), 0.5, RANK, "experts", None)
    with pytest.raises(CheckpointError, match="a different number of experts"):
        fit_adapter(base, Adapter("adapter", (few,)))


def test_modules_determine_the_input_axis(bases):
    """PEFT corrects a wrong `fan_in_fan_out` when it creates the modules."""
    base, _ = bases("llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    factor = replace(linear(name, base.weights[name].shape, np.random.default_rng(6)), has_inputs_first=True)
    assert fit_adapter(base, Adapter("adapter", (factor,))).factors[0].has_inputs_first is False
    conv1d = replace(factor, name="transformer.h.0.attn.c_proj.weight", has_inputs_first=False)
    tree = Tree({(conv1d.name,): lazy(np.zeros((4, 4), "f4"))}, Metadata(config={"model_type": "gpt2"}))
    assert fit_adapter(open_base(tree), Adapter("adapter", (conv1d,))).factors[0].has_inputs_first is True
    long = replace(linear("a", (4, 4), np.random.default_rng(9)), has_inputs_first=True)
    with pytest.raises(CheckpointError, match="of linear layers") as refused:
        replace(long, magnitude=lazy(np.ones(4, "f4"))).change(lazy(np.zeros((4, 4), "f4")))
    assert "with PEFT" in str(refused.value)


def test_tied_head_is_reported_under_any_table_name():
    tree = Tree({("transformer.wte.weight",): lazy(np.zeros((4, 4), "f4"))}, Metadata())
    head = linear("lm_head.weight", (4, 4), np.random.default_rng(8))
    adapter = Adapter("adapter", (head,), {head.name: lazy(np.zeros((4, 4), "f4"))})
    with pytest.raises(CheckpointError, match="output head, but in the base"):
        fit_adapter(open_base(tree), adapter)


@EVERY_FAMILY
def test_unscaled_factors_round_trip_exactly(family, bases):
    base, _ = bases(family)
    own = families()[family]
    rows = model_factor_rows(base, 1 if scans(own) else None, own)
    chosen = [row for row in rows.rows if not no_factors_reason(row) and row.op is None]
    names = {name for row in chosen for name in weight_names(row, rows.sizes)}
    random = np.random.default_rng(4)
    every = [linear(name, base.weights[name].shape, random) for name in names if name in base.weights]
    tree = to_maxtext_adapter(base, Adapter("adapter", tuple(every)), ToMaxTextAdapter(scan=scans(own))).tree
    back = {factor.name: factor for factor in adapter_of_maxtext(base, tree).factors}
    assert back.keys() == {item.name for item in every}
    for item in every:
        assert item.a.read().tobytes() == back[item.name].a.read().tobytes(), item.name
        assert item.b.read().tobytes() == back[item.name].b.read().tobytes(), item.name
        assert back[item.name].scale == item.scale
    config = json.loads(to_peft(base, Adapter("adapter", tuple(every)), "me/base").config)
    assert (config["r"], config["lora_alpha"]) == (RANK, 1) and not config["rank_pattern"]
    assert DTYPES["float32"] == every[0].a.dtype


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "llama4"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_module_names_match_the_loading_class(family, is_whole):
    """PEFT hardly reports factors for modules that do not exist."""
    whole = configs()[family]
    config = whole if is_whole else whole["text_config"] | {"model_type": f"{family}_text"}
    base = open_base(model(config, 1))
    name = next(name for name in base.weights if name.endswith("layers.0.self_attn.q_proj.weight"))
    factor = linear(name, base.weights[name].shape, np.random.default_rng(7))
    built = to_peft(base, Adapter("adapter", (factor,)), "me/base").tree
    above = "model.language_model" if is_whole else "model"
    assert [*built] == [
        (f"base_model.model.{above}.layers.0.self_attn.q_proj.lora_{x}.weight",) for x in "AB"
    ]
