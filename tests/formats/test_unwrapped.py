"""Names of weights without what PyTorch's trainers put around them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.command_line import run, succeed
from support.hf_models import LLAMA_CONFIG, write_llama
from support.internals import align, dotted, to_maxtext
from support.torch_files import save, whole
from support.trees import lazy

import ckpttools
from ckpttools import (
    CoverageError,
    FormatError,
    Metadata,
    ModelOptions,
    Select,
    Text,
    ToMaxText,
    Tree,
    UsageError,
)
from ckpttools.array.patterns import expand_branches, first_match, match_names
from ckpttools.maxtext.hub_names import ToHubNames, has_llama_names, with_hub_names
from ckpttools.transforms.strip_wrappers import drop_states, patterns_outside_state_dict, strip_wrappers

TRAINERS = Path(__file__).parents[2] / "fixtures/torch/trainers"
TITAN, FSDP, HUB = (TRAINERS / name for name in ("torchtitan/step-10", "fsdp/pytorch_model_fsdp_0", "hub"))
NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight")


def tree_of(paths, scalars=()):
    leaves = {path: lazy(np.full(2, n, "f4")) for n, path in enumerate(paths)}
    numbers = {path: lazy(np.array(3)) for path in scalars}
    return Tree(leaves | numbers, Metadata(scalars=frozenset(scalars)))


def names_of(built):
    return {path: array.read()[0] for path, array in built.tree.arrays.items()}


PLAIN = {(name,): n for n, name in enumerate(NAMES)}
PREFIXES = st.sampled_from(
    ("", "module.", "_orig_mod.", "_fsdp_wrapped_module.", "module._orig_mod.", "model.")
)
OUTER = st.sampled_from(((), ("model",), ("app", "model"), ("state_dict",)))


@given(OUTER, PREFIXES, st.booleans(), st.sampled_from(("", "_fsdp_wrapped_module.", "_orig_mod.")))
def test_wrapped_names_are_unwrapped(outer, prefix, number, inner):
    """Around everything, before all names, and within a name: the arrays and their order stay."""
    wrapped = [(*outer, prefix + name.replace("0.self", f"0.{inner}self")) for name in NAMES]
    built = strip_wrappers(tree_of(wrapped, [("epoch",)] if number and outer else []))
    assert names_of(built) == PLAIN
    assert bool(built.notes.remarks) == (bool(outer) or bool(prefix) or bool(inner))
    assert ("1 number left out (epoch)" in " ".join(built.notes.remarks)) == (number and bool(outer))


@pytest.mark.parametrize(
    "paths",
    [
        [(name,) for name in NAMES],
        [("module.a",), ("b",)],  # not all have it
        [("module.a",), ("module._orig_mod.a",)],  # two would have one name
        [("encoder", "a"), ("encoder", "b")],  # no trainer's word
        [("model", "a"), ("optim", "state", "a", "exp_avg")],  # what is beside it the user has to drop
        [("model", "layers", "a"), ("model", "b")],  # a nested tree of a model
        [("model.embed_tokens.weight",), ("model.norm.weight",)],  # a tied model's own names
    ],
)
def test_everything_else_is_unchanged(paths):
    tree = tree_of(paths)
    built = strip_wrappers(tree)
    assert built.tree is tree and not built.notes.remarks


def test_dropped_arrays_may_have_any_name():
    tree = tree_of(
        [
            ("app", "model", "a"),
            ("app", "model", "b"),
            ("app", "optim", "state", "a", "exp_avg"),
            ("app", "rng"),
        ]
    )
    assert patterns_outside_state_dict(tree) == ["app.optim.*", "app.rng"]
    built = strip_wrappers(tree, ("app.optim.*", "app.rng"))
    assert set(built.tree.arrays) == {
        ("a",),
        ("b",),
        ("app", "optim", "state", "a", "exp_avg"),
        ("app", "rng"),
    }
    assert not patterns_outside_state_dict(tree_of([("a",), ("b",)]))
    titan = tree_of([("norm.weight",), ("optimizer", "state", "a")], [("train_state", "step"), ("epoch",)])
    assert patterns_outside_state_dict(titan) == ["optimizer.*", "train_state.*", "epoch"]
    mixed = tree_of([("model.norm.weight",), ("lm_head.weight",), ("model", "final", "weight")])
    assert patterns_outside_state_dict(mixed) == ["model.final.weight"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("optim", "optim.*"), ("opt?m", "opt?m.*"), ("norm", "norm"), ("*", "*"), ("nothing", "nothing")],
)
def test_dropping_a_key_drops_its_subtree(pattern, expected):
    assert expand_branches([pattern], ["norm", "norm.bias", "optim.state.a", "optim.lr"]) == (expected,)


def test_brackets_in_names_are_not_globs():
    names = ["blocks[0].w", "blocks0.w"]
    for pattern in ("blocks[0]", "blocks[0].w"):
        assert match_names(names, expand_branches([pattern], names))[0] == names[0]
    assert match_names(names, expand_branches(["blocks[0]"], names)) == names[:1]
    assert first_match(("blocks[0]", "w"), ["blocks[0]"]) == "blocks[0]"


def llama_state(heads, groups, pairs, embed):
    """Arrays of one layer under the names of Meta's own code."""
    shapes = {f"attention.{name}.weight": (heads * 2 * pairs, embed) for name in ("wq", "wv", "wo")}
    shapes |= {"attention.wk.weight": (groups * heads * 2 * pairs, embed)}
    shapes |= {f"feed_forward.{name}.weight": (3, embed) for name in ("w1", "w2", "w3")}
    shapes |= {f"{name}.weight": (embed,) for name in ("attention_norm", "ffn_norm")}
    shapes = {f"layers.0.{name}": shape for name, shape in shapes.items()}
    shapes |= {"tok_embeddings.weight": (5, embed), "norm.weight": (embed,)}
    return {name: np.random.default_rng(0).random(shape, "f4") for name, shape in shapes.items()}


def tree_with(arrays, config):
    return Tree({(name,): lazy(array) for name, array in arrays.items()}, Metadata(config=config))


SAME = {
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
}


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_llama_names_become_hub_names(heads, groups, pairs, embed, is_said):
    """Rows of queries and keys as torchtitan itself puts them in order (`_permute`); all else as it is."""
    arrays = llama_state(heads, groups, pairs, embed)
    config = {"model_type": "llama", "hidden_size": heads * 2 * pairs, "num_attention_heads": heads}
    tree = tree_with(arrays, {**config, "head_dim": 2 * pairs} if is_said else config)
    built = {path[0]: array.read() for path, array in with_hub_names(tree).tree.arrays.items()}
    assert len(built) == len(arrays) and not has_llama_names(built)
    for name in "qk":
        native = arrays[f"layers.0.attention.w{name}.weight"]
        expected = native.reshape(-1, pairs, 2, embed).swapaxes(1, 2).reshape(native.shape)
        assert np.array_equal(built[f"model.layers.0.self_attn.{name}_proj.weight"], expected)
    for hub, native in SAME.items():
        assert np.array_equal(built[f"model.layers.0.{hub}.weight"], arrays[f"layers.0.{native}.weight"])


def test_llama_names_of_another_model_are_kept():
    """Whose rotary pairs may lie otherwise."""
    tree = tree_with(llama_state(2, 1, 2, 3), {**LLAMA_CONFIG, "model_type": "qwen3"})
    assert with_hub_names(tree).tree is tree
    with pytest.raises(CoverageError, match="names of torchtitan or Meta's own code"):
        to_maxtext(tree, ToMaxText())


def test_single_device_shard_is_not_a_model():
    """As `consolidated.00.pth` beside others: every matrix is cut, every name is there."""
    tree = Select(drop=("optimizer", "train_state"))(ckpttools.open(TITAN)).tree
    half = {
        path: lazy(array.read()[:, ::2]) if len(array.shape) == 2 else array
        for path, array in tree.arrays.items()
    }
    cut = Tree(half, tree.metadata)
    assert ToHubNames()(tree)
    with pytest.raises(FormatError, match=r"contradict config\.json(.|\n)*consolidated\.01"):
        ToHubNames()(cut)
    with pytest.raises(CoverageError, match="of the wrong shape"):
        to_maxtext(cut, ToMaxText())


def test_source_and_hub_names_can_be_dropped():
    tree = ckpttools.open(TITAN)
    beside = ("optimizer", "train_state")
    for head in ("output.weight", "out*", "lm_head.weight"):
        built = to_maxtext(tree, ToMaxText(drop=(*beside, head), model=ModelOptions(tied="drop")))
        assert "lm_head.weight" in built.notes.dropped
    for layer in ("layers.1", "model.layers.1", "layers.1.*"):
        with pytest.raises(
            CoverageError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight is missing bec"
        ):
            to_maxtext(tree, ToMaxText(drop=(*beside, layer)))
    # What the hub has no name for is left out with the names.
    with_angles = Tree({**tree, ("rope.freqs",): tree["norm.weight"]}, tree.metadata)
    assert to_maxtext(with_angles, ToMaxText(drop=(*beside, "rope.freqs"))).state.arrays
    # Keys are joined by slashes where `ckpt inspect tree --flat` shows them.
    for slashes in (("optimizer/state/*", "optimizer/param_groups"), ("optimizer/*",)):
        assert len(to_maxtext(tree, ToMaxText(drop=(*slashes, "train_state/step"))).notes.dropped) == 8
    for pattern, near in (
        ("layers.7", "layers.1"),
        ("model.layers.7*", "model.layers.1"),
        ("optim", "optimizer"),
        ("optimiser/state", "optimizer/state"),
    ):
        with pytest.raises(UsageError, match="no array name matches") as caught:
            to_maxtext(tree, ToMaxText(drop=(*beside, pattern)))
        assert caught.value.got == pattern and caught.value.expected.startswith("names of the source, or")
        assert caught.value.hint.startswith(f"did you mean {near}")


@pytest.mark.parametrize(
    "locations", [(TITAN, HUB), (HUB, FSDP), (TITAN, FSDP), (TITAN, TITAN), ("bare", HUB)]
)
def test_comparisons_unwrap_trainer_names(locations):
    trees = [ckpttools.open(TITAN if location == "bare" else location) for location in locations]
    if "bare" in locations:
        trees[0] = trees[0].with_metadata(config=None)
    both = align(*trees)
    assert both.a.keys() == both.b.keys() and (locations == (TITAN, TITAN)) == ("norm.weight" in both.a)
    for name, array in both.a.items():
        assert array.read().tobytes() == both.b[name].read().tobytes(), name
    other_size = {**trees[0].metadata.config, "head_dim": 2} if trees[0].metadata.config else {}
    assert align(trees[0].with_metadata(config=other_size), trees[1]).a


def test_flax_names_are_refused_with_a_hint():
    with pytest.raises(CoverageError, match="Flax names, and Flax matrices have their inputs first"):
        to_maxtext(ckpttools.open(TRAINERS.parents[1] / "flax/llama"), ToMaxText())


def test_safetensors_output_uses_hub_names(tmp_path):
    """Refused where the hub has none; told where they are kept."""
    drop, told = ("optimizer", "train_state"), "--names hub writes Hub names"
    words = ("convert", "to-safetensors", TITAN, "--drop", "optimizer", "--drop", "train_state")
    assert told in " ".join(run(*words, tmp_path / "kept").split())
    assert told not in " ".join(run(*words, tmp_path / "titan", "--names", "hub").split())
    ckpttools.convert(FSDP, tmp_path / "fsdp", format="safetensors", names="hub")
    assert all(ckpttools.verify(tmp_path / name, HUB).equal for name in ("titan", "fsdp"))
    alone = Select(drop=drop)(ckpttools.open(TITAN)).tree
    refused = {
        "contains arrays outside the model": ckpttools.open(TITAN),
        "are supported for models with model_type llama": alone.with_metadata(config={"model_type": "qwen3"}),
        "cp HF_DIR/config.json": alone.with_metadata(config=None),
        "names of MaxText": to_maxtext(alone, ToMaxText()).state,
        "have the prefix policy": ckpttools.open(TRAINERS / "open-instruct"),
    }
    for message, tree in refused.items():
        with pytest.raises(FormatError, match=message):
            ToHubNames()(tree)


def test_extra_module_state_is_left_out_of_conversions(tmp_path):
    """Also behind a trainer's prefixes; --drop may name it, and then says what is left out."""
    write_llama(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "src")
    file = tmp_path / "src" / "model.safetensors"
    states = {f"model.layers.{n}.mlp.up_proj._extra_state": np.arange(5, dtype=np.uint8) for n in range(4)}
    arrays = {f"module.{name}": array for name, array in {**load_file(file), **states}.items()}
    save_file(arrays, file)
    built = ckpttools.hf_to_maxtext.plan(tmp_path / "src", tmp_path / "maxtext")
    assert any(
        "4 arrays left out" in remark and "_extra_state" in remark for remark in built.plan.notes.remarks
    )
    built.run()
    assert ckpttools.verify(tmp_path / "maxtext", against=tmp_path / "plain").equal
    dropped = ckpttools.hf_to_maxtext.plan(tmp_path / "src", tmp_path / "dropped", drop=["*._extra_state"])
    assert not any("left out, which" in remark for remark in dropped.plan.notes.remarks)
    assert dropped.plan.tree.arrays.keys() == built.plan.tree.arrays.keys()
    tree = ckpttools.open(tmp_path / "src")
    hub = ToHubNames()(tree)
    assert {*map(dotted, hub.tree.arrays)} == {*load_file(tmp_path / "plain" / "model.safetensors")}
    assert drop_states(ckpttools.open(tmp_path / "plain")).notes.remarks == ()


def test_list_next_to_a_state_dict_is_kept():
    """Numbers and texts in it, too: without its first element the others have no place."""
    paths = [*(("model", name) for name in NAMES), ("l", 1), ("l", 3)]
    tree = tree_of(paths, [("l", 0), ("epoch",)])
    tree = Tree({**tree, ("l", 2): Text("sgd"), ("note",): Text("mine")}, tree.metadata)
    built = strip_wrappers(tree, ["l.*"])
    assert {*built.tree} == {*PLAIN, *(("l", number) for number in range(4))}
    assert "1 number left out (epoch)" in " ".join(built.notes.remarks)


def test_partly_unreadable_list_does_not_prevent_reading(tmp_path):
    """The gap was there before anything was renamed."""
    saved = {"model": {name: whole(np.ones(2, "f4")) for name in NAMES}, "l": [{1}, whole(np.ones(2, "f4"))]}
    save(tmp_path / "pytorch_model.bin", saved)
    tree = ckpttools.open(tmp_path)
    assert ("l", 1) in tree and ("l", 0) not in tree
    assert {*strip_wrappers(tree, ["l.*"]).tree} == {*PLAIN, ("l", 1)}
    assert "ckpt inspect tree" in succeed(tmp_path).output


def test_extra_arrays_are_reported_in_one_remark():
    """The hint would be below a hundred names that it is about; what is missing is named all the same."""
    titan = ckpttools.open(TITAN)
    moments = {
        ("optimizer", "state", f"layers.{number}.weight{'x' * number}", name): titan["norm.weight",]
        for number in range(60)
        for name in ("exp_avg", "exp_avg_sq")
    }
    with pytest.raises(CoverageError) as told:
        to_maxtext(Tree({**titan, **moments}, titan.metadata), ToMaxText())
    lines = "  8 arrays are not expected:\n    optimizer.*: 7 arrays\n    train_state.*: 1 array\n"
    assert lines.replace("8", "128").replace("7", "127") in str(told.value)
    assert told.value.hint.endswith('drop=["optimizer.*", "train_state.*"]')
    hub = ckpttools.open(HUB)
    lacking = {path: leaf for path, leaf in {**hub, **moments}.items() if path != ("model.norm.weight",)}
    with pytest.raises(CoverageError) as told:
        to_maxtext(Tree(lacking, hub.metadata), ToMaxText())
    assert "1 array is missing:\n    model.norm.weight" in str(told.value)
    assert "120 arrays are not expected:\n    optimizer.*: 120 arrays\n" in str(told.value)
