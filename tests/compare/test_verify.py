"""Comparing bit by bit: equal in every layout, and every kind of difference found and told."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support import command_line
from support.command_line import ckpt
from support.golden_data import golden_checkpoint
from support.internals import (
    OrbaxWriter,
    Pairing,
    SafetensorsWriter,
    Selection,
    keystr,
    stack,
    take,
    to_maxtext,
)
from support.large_pairs import differing_models, said_within
from support.locations import FIXTURES, GOLDEN
from support.stored_trees import write

import ckpttools
from ckpttools import DTYPES, Empty, FormatError, Metadata, StackLayers, Text, ToMaxText, Tree
from ckpttools.compare.verify import compare
from ckpttools.digest.pairing import Difference
from ckpttools.testing.models import LlamaSizes, write_llama, write_model
from ckpttools.testing.strategies import chunk_shapes, chunked, dtypes, noise, shapes, stored

run = partial(command_line.run, "verify")

PLENTY = {"memory": 512 << 20, "jobs": 2}
WI = ("params", "params", "decoder", "layers", "mlp", "wi_0", "kernel")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_stacks_with_other_axes_and_orders_are_compared(axis, turned):
    layers = noise((3, 4, 5), DTYPES["float32"])
    order = [2, 0, 1] if turned else [0, 1, 2]
    ours, theirs = layers, np.stack([layers[at] for at in order], axis)
    for nth, damage in enumerate([None, 1]):
        if damage is not None:
            theirs = theirs.copy()
            theirs[(0,) * 3] += damage
        mine, other = stored(ours, DTYPES["float32"]), stored(theirs, DTYPES["float32"])
        a = {f"l.{at}": take(mine, 0, at) for at in range(3)}
        b = {f"l.{at}": take(other, axis, order.index(at)) for at in range(3)}
        result = compare(Pairing(a, b), **PLENTY)
        assert [item.name for item in result] == [f"l.{order[0]}"] * nth


@given(st.data(), shapes(min_rank=1, limit=300), dtypes(packed=True))
def test_first_differing_bit_is_named_and_bits_are_counted(data, shape, dtype):
    truth = noise(shape, dtype)
    damaged = truth.copy()
    locations = data.draw(st.sets(st.integers(0, truth.size - 1), max_size=4))
    for location in locations:
        damaged.reshape(-1)[location : location + 1].view(np.uint8)[-1] ^= 1
    chunk = None if dtype.packed else data.draw(chunk_shapes(shape))
    mine = chunked(damaged, dtype, chunk) if chunk else stored(damaged, dtype)
    result = compare(Pairing({"a": mine}, {"a": stored(truth, dtype)}), **PLENTY)
    if not locations:
        assert result == ()
        return
    ((name, reason, first, elements),) = [
        (item.name, item.reason, item.first, item.elements) for item in result
    ]
    assert (name, reason, elements) == ("a", "values", len(locations))
    assert first == tuple(map(int, np.unravel_index(min(locations), shape)))


def test_nan_equals_itself_but_zero_differs_from_minus_zero():
    values = np.array([np.nan, 0.0, 1.0], "<f8").view(np.uint64)
    others = np.array([np.nan, -0.0, 1.0], "<f8").view(np.uint64)
    dtype = DTYPES["float64"]
    assert compare(Pairing({"a": stored(values, dtype)}, {"a": stored(values, dtype)}), **PLENTY) == ()
    (result,) = compare(Pairing({"a": stored(values, dtype)}, {"a": stored(others, dtype)}), **PLENTY)
    assert result == Difference("a", "values", first=(1,), elements=1, file="memory")
    nans = stored(np.full(3, complex(np.nan, np.nan)), DTYPES["complex128"])
    assert compare(Pairing({"a": nans}, {"a": nans}), **PLENTY) == ()


@pytest.mark.parametrize("mine_stacked", [True, False])
@pytest.mark.parametrize("expected_stacked", [True, False])
def test_stacks_and_layers_are_compared_on_either_side(mine_stacked, expected_stacked):
    dtype = DTYPES["bfloat16"]
    truth = noise((6, 3, 8), dtype)
    damaged = truth.copy()
    damaged[4, 2, 5] ^= 0x8000
    damaged[5, 2, 0] ^= 1

    def layers(values, stacked):
        whole = chunked(values, dtype, (2, 3, 8))
        alone = [stored(values[:, k].copy(), dtype, str(k)) for k in range(3)]
        return {f"layers_{k}": take(whole, 1, k) if stacked else alone[k] for k in range(3)}

    read = []
    both = Pairing(layers(damaged, mine_stacked), layers(truth, expected_stacked))
    result = compare(both, **PLENTY, observe=read.append)
    assert [(item.name, item.first, item.elements) for item in result] == [("layers_2", (4, 5), 2)]
    assert sum(read) == 2 * truth.nbytes, "each side once"


@pytest.mark.parametrize("mine", ["scanned", "hf"])
def test_conversion_verifies_against_its_source(mine):
    """One side stacked and compressed, the other rearranged from Hugging Face."""
    scanned = Selection(parameters=True).arrays(ckpttools.open(golden_checkpoint(scan=True)))
    source = to_maxtext(ckpttools.open(GOLDEN / "llama3.1" / "hf"), ToMaxText(scan=False)).state
    built = Selection(parameters=True).arrays(source)
    sides = (scanned, built) if mine == "scanned" else (built, scanned)
    read = []
    assert compare(Pairing(*sides), **PLENTY, observe=read.append) == ()
    assert sum(read) == 2 * sum(array.nbytes for array in scanned.values())


def test_differences_are_sorted_by_name():
    dtype = DTYPES["float32"]
    a, b = stored(noise((4, 3), dtype), dtype), stored(noise((4, 3), dtype, 1), dtype)
    half = stored(noise((4, 3), DTYPES["float16"]), DTYPES["float16"])
    mine = {"x.10": a, "x.2": a, "same": a, "dtype": half, "extra": a, "shape": stack([a, a], 0)}
    expected = {"x.10": b, "x.2": b, "same": a, "dtype": a, "missing": a, "shape": a}
    result = [
        (item.name, item.reason, item.got, item.expected)
        for item in compare(Pairing(mine, expected), **PLENTY)
    ]
    assert result == [
        ("dtype", "dtype", "float16[4,3]", "float32[4,3]"),
        ("extra", "extra", None, None),
        ("missing", "missing", None, None),
        ("shape", "shape", "float32[2,4,3]", "float32[4,3]"),
        ("x.2", "values", None, None),
        ("x.10", "values", None, None),
    ]


# The command


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A stacked checkpoint whose chunks are as they are in a data file, and its stacked kernel."""
    dtype = DTYPES["bfloat16"]
    leaves = {("params", "params", "decoder", "decoder_norm", "scale"): stored(noise((24,), dtype), dtype)}
    for layer in range(3):
        path = ("params", "params", "decoder", f"layers_{layer}", "mlp", "wi_0", "kernel")
        leaves[path] = stored(noise((24, 40), dtype, layer), dtype, str(layer))
    tree = StackLayers()(Tree(leaves, Metadata(step=0))).tree
    location = tmp_path_factory.mktemp("model") / "stacked"
    write(tree, OrbaxWriter(), location)
    return location


def test_conversions_verify_against_their_source(model, tmp_path):
    ckpt("unstack", model, tmp_path / "apart")
    ckpt("convert", "to-safetensors", model, tmp_path / "st")
    assert run(tmp_path / "apart", "--against", model) == (
        f"{tmp_path / 'apart' / '0' / 'items'}\nequal to {model / '0' / 'items'}: 4 arrays, 5.81 kB\n"
    )
    assert json.loads(run(tmp_path / "st", "--against", tmp_path / "apart", "--json"))["equal"]


def damaged_copy(model, location, layer, row, column):
    """A copy with one bit flipped in the kernel of one layer; returns the file that has it."""
    shutil.copytree(model, location)
    stacked = ckpttools.open(location)[WI]
    needle = stacked.read()[row, layer, column : column + 8].tobytes()
    (file,) = [item for item in location.rglob("*") if item.is_file() and needle in item.read_bytes()]
    data = bytearray(file.read_bytes())
    assert data.count(needle) == 1
    data[data.index(needle)] ^= 4
    file.write_bytes(data)
    return file


def test_flipped_bit_is_found_and_located(model, tmp_path):
    file = damaged_copy(model, tmp_path / "damaged", layer=1, row=17, column=30)
    text = run(tmp_path / "damaged", "--against", model, code=1)
    item = tmp_path / "damaged" / "0" / "items"
    assert f"differs from {model / '0' / 'items'}: 1 array with different values" in text
    location = f"at [17, 30], in {file.relative_to(item)}"
    assert f"decoder/layers_1/mlp/wi_0/kernel: 1 element differs, {location}\n" in text
    report = json.loads(run(tmp_path / "damaged", "--against", model, "--json", code=1))
    assert (report["equal"], report["arrays"], report["different"]) == (False, 4, 1)
    assert report["differences"][0] == {
        "name": "decoder/layers_1/mlp/wi_0/kernel",
        "reason": "values",
        "got": None,
        "expected": None,
        "first": [17, 30],
        "last": None,
        "elements": 1,
        "file": str(file),
    }


def test_filter_restricts_the_comparison(model, tmp_path):
    damaged_copy(model, tmp_path / "damaged", layer=1, row=0, column=0)
    run(tmp_path / "damaged", "--against", model, "--filter", "*/layers_1/*", code=1)
    run(tmp_path / "damaged", "--against", model, "--filter", "*/layers_2/*")


def test_parameters_alone_can_be_compared(tmp_path):
    dtype = DTYPES["float32"]
    kernel = stored(noise((4,), dtype), dtype)
    state = {
        ("opt_state", "mu", "kernel"): kernel,
        ("step",): stored(np.array(1, np.uint64), DTYPES["int64"]),
    }
    write(Tree({("kernel",): kernel, **state}, Metadata(step=0)), OrbaxWriter(), tmp_path / "training")
    write(Tree({("kernel",): kernel}), SafetensorsWriter(), tmp_path / "weights")
    text = run(tmp_path / "weights", "--against", tmp_path / "training", code=1)
    assert "2 arrays missing" in text
    assert "opt_state/mu/kernel: missing\nstep: missing\n" in text
    run(tmp_path / "weights", "--against", tmp_path / "training", "--parameters")


@pytest.mark.parametrize("other", ["b", None, "absent", [], {}])
def test_non_array_leaves_are_compared_in_every_mode(tmp_path, other):
    kernel = np.ones((2, 3), np.float32)
    for name, tag in ("one", "a"), ("same", "a"), ("two", other):
        tags = {} if tag == "absent" else {"tag": tag}
        ckpttools.save({"params": {"kernel": kernel, **tags}}, tmp_path / name)
    for ways in [], ["--whole"]:
        run(tmp_path / "same", "--against", tmp_path / "one", *ways)
        for a, b in ("one", "two"), ("two", "one"):
            assert "tag" in run(tmp_path / a, "--against", tmp_path / b, *ways, code=1)
    run(tmp_path / "one", "--against", tmp_path / "two", "--whole", "--parameters")


@pytest.mark.parametrize("other", ["b", "", None, "absent", {}])
def test_manifest_compares_texts(tmp_path, other):
    for name, tag in ("one", "a"), ("same", "a"), ("two", other):
        tags = {} if tag == "absent" else {"tag": tag}
        ckpttools.save({"params": {"kernel": np.ones(3, np.float32), **tags}}, tmp_path / name)
        command_line.run("hash", tmp_path / name, "--manifest", tmp_path / f"{name}.json")
    run(tmp_path / "same", "--manifest", tmp_path / "one.json")
    for checkpoint, manifest in ("one", "two"), ("two", "one"):
        text = run(tmp_path / checkpoint, "--manifest", tmp_path / f"{manifest}.json", code=1)
        assert "params/tag" in text
        run(tmp_path / checkpoint, "--manifest", tmp_path / f"{manifest}.json", "--parameters")


def test_conversion_records_texts_in_its_manifest(tmp_path):
    ckpttools.save({"params": {"kernel": np.ones(3, np.float32), "tag": "a"}}, tmp_path / "one")
    manifest = "--manifest", tmp_path / "m.json"
    command_line.run("convert", "to-orbax", tmp_path / "one", tmp_path / "two", *manifest)
    assert json.loads((tmp_path / "m.json").read_text())["texts"] == {"params/tag": "a"}
    run(tmp_path / "two", *manifest)


def test_texts_differ_from_a_manifest_that_does_not_record_them(tmp_path):
    ckpttools.save({"params": {"kernel": np.ones(3, np.float32), "tag": "a"}}, tmp_path / "one")
    path = tmp_path / "m.json"
    command_line.run("hash", tmp_path / "one", "--manifest", path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in document.items() if key != "texts"}))
    text = run(tmp_path / "one", "--manifest", path, code=1)
    assert "the manifest does not record texts: params/tag" in text
    run(tmp_path / "one", "--manifest", path, "--parameters")


def test_manifest_compares_empty_nodes_and_kinds_of_numbers(tmp_path):
    """`--manifest` and `--against` agree where two trees differ in leaves that no digest covers."""
    kernel = np.ones((2, 3), np.float32)
    kinds = {
        "absent": {},
        "dict": {"extra": {}},
        "list": {"extra": []},
        "none": {"extra": None},
        "array": {"extra": np.asarray(7)},
        "number": {"extra": 7},
        "key": {"extra": jax.random.key(0)},
        "data": {"extra": jax.random.key_data(jax.random.key(0))},
    }
    for name, tree in kinds.items():
        ckpttools.save({"params": {"kernel": kernel}, **tree}, tmp_path / name)
        command_line.run("hash", tmp_path / name, "--manifest", tmp_path / f"{name}.json")
    for a, b in itertools.product(kinds, repeat=2):
        code = int(a != b)
        run(tmp_path / a, "--against", tmp_path / b, code=code)
        text = run(tmp_path / a, "--manifest", tmp_path / f"{b}.json", code=code)
        assert not code or "extra" in text
        assert "not compared" not in text


def test_filtered_manifest_compares_texts_and_kinds_of_selected_leaves(tmp_path):
    values = {"t": "a", "e": None, "n": 3}
    for name, change in {"one": {}, "t": {"t": "b"}, "e": {"e": {}}, "n": {"n": np.asarray(3)}}.items():
        leaves = {"kernel": np.ones(3, np.float32), **values, **change}
        ckpttools.save({"meta": leaves, "aside": {**leaves, "t": name}}, tmp_path / name)
    only = "--filter", "meta/*"
    command_line.run("hash", tmp_path / "one", "--manifest", tmp_path / "m.json", *only)
    for name in ("one", *values):
        code = int(name != "one")
        ways = [("--against", tmp_path / "one", *only), ("--manifest", tmp_path / "m.json")]
        for text in (run(tmp_path / name, *way, code=code) for way in ways):
            assert not code or f"meta/{name}" in text
            assert "aside" not in text


@pytest.mark.parametrize("impls", [*itertools.permutations(["rbg", "unsafe_rbg"])])
def test_random_keys_of_other_implementations_differ(tmp_path, impls):
    for impl in impls:
        tree = {"kernel": np.ones(3, np.float32), "key": jax.random.key(0, impl=impl)}
        ckpttools.save(tree, tmp_path / impl)
    command_line.run("hash", tmp_path / impls[0], "--manifest", tmp_path / "m.json")
    for other in ("--against", tmp_path / impls[0]), ("--manifest", tmp_path / "m.json"):
        assert f"typed random key ({impls[0]})" in run(tmp_path / impls[1], *other, code=1)


KEYS = st.lists(st.sampled_from(["a", "b", "a.b", "a/b"]), min_size=1, max_size=3).map(tuple)


@given(
    paths=st.lists(KEYS, min_size=1, max_size=4, unique=True),
    number=st.integers(0, 3),
    leaves=st.permutations([Text("x"), Text("y"), Empty("None"), Empty("Dict")]).map(lambda item: item[:2]),
    pattern=st.sampled_from(["*", "a*"]),
)
def test_changed_leaf_is_found_among_names_that_join_alike(paths, number, leaves, pattern):
    array = {("a_kernel",): stored(np.ones(3, np.float32), DTYPES["float32"])}
    changed = paths[number % len(paths)]
    trees = [Tree({**array, **dict.fromkeys(paths, leaves[0]), changed: leaf}) for leaf in leaves]
    is_selected = pattern == "*" or keystr(changed).startswith("a")
    assert ckpttools.verify(trees[0], trees[0], filter=pattern, jobs=1).equal
    for a, b in itertools.permutations(trees):
        assert ckpttools.verify(a, b, filter=pattern, jobs=1).equal != is_selected
        if pattern == "*":
            assert not ckpttools.diff(a, b, explain=False, jobs=1).equal


def test_texts_of_one_name_are_refused_in_a_manifest():
    tree = Tree({("a/b",): Text("x"), ("a", "b"): Text("y")})
    with pytest.raises(FormatError, match="two leaves would get one name"):
        Selection().texts(tree)


def test_lower_bits_that_the_reverse_conversion_rounds_are_remarked(tmp_path):
    command_line.run("convert", "hf-to-maxtext", GOLDEN / "gemma2/hf", tmp_path / "mt", "--no-scan")
    tree = ckpttools.open(tmp_path / "mt")
    path = next(path for path, item in tree.arrays.items() if item.dtype.name == "float32" and item.shape)
    values = tree.arrays[path].read().copy()
    values.view(np.uint32)[0] ^= 1
    changed = Tree({**tree, path: stored(values, tree.arrays[path].dtype)}, tree.metadata)
    remarks = ckpttools.verify(changed, GOLDEN / "gemma2/hf", jobs=1).remarks
    assert any("in the other direction, values differ in 1 array" in remark for remark in remarks)
    assert not ckpttools.verify(tree, GOLDEN / "gemma2/hf", jobs=1).remarks


def test_different_configurations_are_remarked(tmp_path):
    shutil.copytree(GOLDEN / "llama3.1/hf", tmp_path / "hf")
    command_line.run("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "mt")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5, "use_cache": False}))
    for other in GOLDEN / "llama3.1/hf", tmp_path / "mt":
        text = run(tmp_path / "hf", "--against", other)
        assert "not compared: config.json, which differs in rms_norm_eps\n" in text


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"lora_alpha": 99, "lora_dropout": 0.5}, "lora_alpha"),
        ({"use_rslora": True, "r": 3}, "r, use_rslora"),
        ({"inference_mode": False, "revision": "main"}, ""),
        # Fields and defaults of later releases of PEFT.
        (dict.fromkeys(("use_dora", "alpha_pattern", "megatron_core", "qalora_group_size")), ""),
    ],
)
def test_different_adapter_configurations_are_remarked(tmp_path, changes, fields):
    adapter = FIXTURES / "peft/plain"
    shutil.copytree(adapter, tmp_path / "other")
    path = tmp_path / "other/adapter_config.json"
    declared = json.loads(path.read_text())
    path.write_text(json.dumps(declared | {"target_modules": declared["target_modules"][::-1]} | changes))
    text = run(tmp_path / "other", "--against", adapter)
    expected = f"not compared: adapter_config.json, which differs in {fields}\n"
    assert expected in text if fields else "not compared" not in text


def test_conversion_records_empty_nodes_in_its_manifest(tmp_path):
    params = {"kernel": np.ones(3, np.float32)}
    ckpttools.save({"params": params, "extra": {}, "step": 3}, tmp_path / "one")
    manifest = "--manifest", tmp_path / "m.json"
    command_line.run("convert", "to-orbax", tmp_path / "one", tmp_path / "two", *manifest)
    assert "not compared" not in run(tmp_path / "two", *manifest)
    ckpttools.save(
        {"params": {"kernel": np.ones(3, np.float32)}, "extra": None, "step": 3}, tmp_path / "other"
    )
    assert "extra" in run(tmp_path / "other", *manifest, code=1)


@pytest.fixture
def steps(tmp_path):
    """Two equal steps of Orbax with an item `state` and a JSON item `data`."""
    for name in "ab":
        shutil.copytree(GOLDEN.parent / "orbax" / "cm_composite", tmp_path / name)
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.parametrize(
    ("content", "code"),
    [('{"pos": 3}', 0), (' {\n"pos":3}', 0), ('{"pos": 4}', 1), ("", 1), (None, 1), ("x" * 5_000_000, 1)],
)
def test_items_without_arrays_are_compared(steps, content, code):
    """`verify` and `diff` agree about them; JSON counts by its values."""
    a, b = steps
    data = b / "ckpt_00000012" / "data" / "metadata"
    data.unlink()
    if content is not None:
        data.write_text(content)
    for command in "diff", "verify":
        words = (a, b) if command == "diff" else (a, "--against", b)
        text = command_line.run(command, *words, code=code)
        assert ("data/metadata" in text) == bool(code)
        command_line.run(command, *words, "--parameters")
        item = a / "ckpt_00000012" / "state"
        command_line.run(command, item, *words[1:])


def test_items_that_one_side_lacks_are_listed(steps):
    a, b = steps
    shutil.rmtree(b / "ckpt_00000012" / "data")
    text = run(a, "--against", b)
    assert "not compared, since the other side lacks them: 1 item without arrays (data)" in text


def test_all_items_of_a_step_are_compared(tmp_path):
    """A difference in another item than the model's is one, for `verify` as for `diff`."""
    for name, value in ("a", 1), ("b", 2):
        for item in "params", "ema":
            values = np.full(3, value if item == "ema" else 0, np.float32)
            ckpttools.save({"w": values}, tmp_path / name / "7" / item, level="item")
    assert "ema/w" in run(tmp_path / "a", "--against", tmp_path / "b", code=1)
    assert "ema/w" in command_line.run("diff", tmp_path / "a", tmp_path / "b", code=1)


BFLOAT16 = DTYPES["bfloat16"].numpy
FREQUENCIES = (1 / 10000 ** (np.arange(2) / 2)).astype(np.float32)
BUFFER = "model.layers.0.self_attn.rotary_emb.inv_freq"
# Changes to a Llama that a conversion to MaxText refuses or ignores, and what verify reports.
CHANGES = {
    "unknown array": ({"model.extra.weight": FREQUENCIES}, "model.extra.weight: extra"),
    "array of another layer": (
        {"model.layers.9.input_layernorm.weight": np.ones(8, np.float32)},
        "model.layers.9.input_layernorm.weight: extra",
    ),
    "unknown array without a prefix": ({"extra": FREQUENCIES}, "extra: extra"),
    "scale": ({"model.norm.weight_scale": FREQUENCIES}, "model.norm.weight_scale: extra"),
    "bias": (
        {"model.layers.1.mlp.up_proj.bias": np.ones(12, np.float32)},
        "model.layers.1.mlp.up_proj.bias: extra",
    ),
    "module state": ({"model._extra_state": np.ones(3, np.uint8)}, "model._extra_state: extra"),
    "buffer with other values": ({BUFFER: FREQUENCIES * 3}, f"{BUFFER}: extra"),
    "buffer of another size": ({BUFFER: FREQUENCIES[:1] * 2}, f"{BUFFER}: extra"),
    "missing norm": ({"model.norm.weight": None}, "decoder/decoder_norm/scale: missing"),
    "missing matrix": (
        {"model.layers.1.mlp.up_proj.weight": None},
        "decoder/layers_1/mlp/wi_1/kernel: missing",
    ),
    "head that differs": (
        {"lm_head.weight": np.ones((16, 8), np.float32)},
        "decoder/logits_dense/kernel: extra",
    ),
    "other shape": (
        {"model.norm.weight": np.ones(7, BFLOAT16)},
        "decoder/decoder_norm/scale: bfloat16[7] instead of bfloat16[8]",
    ),
    "other dtype": (
        {"model.norm.weight": np.ones(8, np.float16)},
        "decoder/decoder_norm/scale: float16[8] instead of bfloat16[8]",
    ),
    "other value": (
        {"model.norm.weight": np.full(8, 3, BFLOAT16)},
        "decoder/decoder_norm/scale: different values",
    ),
}


def save_model(path, changes):
    """Write a small Llama with changed arrays; None removes an array."""
    sizes = LlamaSizes(2, hidden=8, mlp=12, heads=2, kv_heads=1, head_dim=4, vocab=16)
    write_model(path, sizes.config() | {"rope_theta": 10000.0, "rope_scaling": None})
    arrays = load_file(path / "model.safetensors") | changes
    built = {name: item for name, item in arrays.items() if item is not None}
    save_file(built, path / "model.safetensors", {"format": "pt"})


@pytest.fixture
def maxtext_manifest(tmp_path):
    """The manifest of a Llama in MaxText's names."""
    save_model(tmp_path / "hf", {})
    command_line.run("hash", tmp_path / "hf", "--as", "maxtext", "--manifest", tmp_path / "m.json")
    return tmp_path / "m.json"


@pytest.mark.parametrize("change", CHANGES)
def test_manifest_in_maxtext_names_lists_every_difference(tmp_path, maxtext_manifest, change):
    changes, expected = CHANGES[change]
    save_model(tmp_path / "changed", changes)
    text = run(tmp_path / "changed", "--manifest", maxtext_manifest, code=1)
    assert expected in text
    assert "1 array " in text


def test_manifest_in_maxtext_names_ignores_computed_buffers_with_a_remark(tmp_path, maxtext_manifest):
    save_model(tmp_path / "buffers", {BUFFER: FREQUENCIES})
    text = run(tmp_path / "buffers", "--manifest", maxtext_manifest)
    assert "left out, as models compute these values themselves: 1 array" in text


def test_manifest_in_maxtext_names_ignores_a_copy_of_the_embedding_with_a_remark(tmp_path, maxtext_manifest):
    table = load_file(tmp_path / "hf/model.safetensors")["model.embed_tokens.weight"]
    save_model(tmp_path / "head", {"lm_head.weight": table})
    text = run(tmp_path / "head", "--manifest", maxtext_manifest)
    assert "the output head equals the embedding" in text


@pytest.mark.parametrize(
    "path",
    [
        ("params", "params", "decoder", "extra", "kernel"),
        ("params", "params", "decoder", "layers_7", "mlp", "wi_0", "kernel"),
        ("params", "params", "extra"),
        ("extra",),
        ("opt_state", "mu", "params", "decoder", "decoder_norm", "scale"),
        ("rng",),
    ],
)
def test_manifest_in_maxtext_names_lists_extra_arrays_of_maxtext(tmp_path, maxtext_manifest, path):
    dtype = DTYPES["uint32" if path == ("rng",) else "float32"]
    command_line.run("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "mt", "--no-scan")
    run(tmp_path / "mt", "--manifest", maxtext_manifest)
    tree = ckpttools.open(tmp_path / "mt")
    extra = {path: stored(np.ones(8 if path[0] != "rng" else 2, dtype.numpy), dtype)}
    write(Tree({**tree, **extra}, tree.metadata), OrbaxWriter(), tmp_path / "more")
    text = run(tmp_path / "more", "--manifest", maxtext_manifest, code=1)
    # The step of a training counts, and that of a conversion does not.
    assert f"{2 if path[0] == 'opt_state' else 1} array" in text
    assert "too many" in text


def test_manifest_covers_carried_arrays(tmp_path):
    model, paths = GOLDEN / "gemma3/hf", [tmp_path / name for name in ("carried", "bare")]
    manifest = "--manifest", tmp_path / "m.json"
    command_line.run("convert", "hf-to-maxtext", model, paths[0], "--carry", *manifest)
    command_line.run("convert", "hf-to-maxtext", model, paths[1])
    run(paths[0], *manifest)
    assert "hf/carried/vision_tower" in run(paths[1], *manifest, code=1)
    run(paths[1], *manifest, "--parameters")
    (file,) = paths[0].glob("**/carried.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "1 array with different values" in run(paths[0], *manifest, code=1)


def test_manifest_of_a_selection_counts_unselected_arrays(tmp_path):
    save_model(tmp_path / "hf", {})
    command_line.run("hash", tmp_path / "hf", "--filter", "*norm*", "--manifest", tmp_path / "m.json")
    text = run(tmp_path / "hf", "--manifest", tmp_path / "m.json")
    assert "not compared: 15 arrays, because the manifest covers only arrays that match '*norm*'" in text


def test_rounding_conversion_lists_same_arrays_both_ways(tmp_path):
    # MaxText divides queries by the root of 32, so the way back does not give every value again.
    sizes = LlamaSizes(layers=3, hidden=64, mlp=64, heads=2, kv_heads=1, head_dim=32, vocab=64)
    write_llama(tmp_path / "hf", sizes)
    rng = np.random.default_rng(0)
    arrays = load_file(tmp_path / "hf/model.safetensors")
    noisy = {name: rng.standard_normal(item.shape).astype(item.dtype) for name, item in arrays.items()}
    save_file(noisy, tmp_path / "hf/model.safetensors")
    command_line.run("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "mt", "--no-scan")
    command_line.run("convert", "to-safetensors", tmp_path / "mt", tmp_path / "st")
    run(tmp_path / "hf", "--against", tmp_path / "st")
    (file,) = (tmp_path / "st").glob("*.safetensors")
    with safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
    built = load_file(file)
    (name,) = [item for item in built if "layers_1" in item and "query" in item]
    built[name] = built[name].copy()
    built[name].flat[5] += 1
    save_file(built, file, metadata)
    for a, b in ("st", "hf"), ("hf", "st"):
        result = run(tmp_path / a, "--against", tmp_path / b, code=1)
        assert "1 array with different values" in result


def test_many_differences_are_folded():
    sides = [GOLDEN / family / "hf" for family in ("qwen3", "llama4-scout")]
    some = "--filter", "*feed_forward*"
    text = run(sides[0], "--against", sides[1], *some, code=1)
    assert "48 arrays missing" in text
    assert "\nmodel.layers.{0..7}.feed_forward.router.weight: missing\n" in text
    assert text.endswith("shared_expert.up_proj.weight: missing\n"), text
    result = json.loads(run(sides[0], "--against", sides[1], "--json", code=1))["differences"]
    whole = json.loads(command_line.run("diff", *sides, "--no-explain", "--json", code=1))["arrays"]
    assert {item["name"] for item in result} == {item["name"] for item in whole}
    assert run(sides[0], "--against", sides[1], code=1).endswith("more lines; --json lists all\n")


def test_verify_requires_one_comparison_option(model):
    assert "--against SRC, --manifest FILE" in run(model, code=2)
    run(model, "--against", model, "--manifest", "x", code=2)


def test_unreadable_checkpoint_is_not_a_difference(model, tmp_path):
    run(model, "--against", tmp_path / "nothing", code=2)
    (tmp_path / "text").write_text("no checkpoint")
    run(model, "--against", tmp_path / "text", code=3)
    shutil.copytree(model, tmp_path / "short")
    largest = max((tmp_path / "short").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
    largest.write_bytes(largest.read_bytes()[:-100])
    assert "the file was truncated" in run(tmp_path / "short", "--against", model, code=3)


COMPARE = """
import sys
import ckpttools
from ckpttools.digest.canonical import per_layer
from ckpttools.digest.pairing import Pairing
from ckpttools.compare.verify import compare
from ckpttools.core.process_memory import peak_bytes
sides = [per_layer(ckpttools.open(path)) for path in sys.argv[2:]]
found = compare(Pairing(*sides), memory=int(sys.argv[1]), jobs=2)
print(len(found), peak_bytes())
"""


@pytest.mark.parametrize("memory", [128 << 20, 512 << 20])
def test_commands_name_the_array_with_invalid_booleans(tmp_path, memory):
    result, peak = said_within(COMPARE, memory, differing_models(tmp_path))
    assert result == 1
    assert peak <= memory


@pytest.mark.parametrize(
    ("value", "text"), [(None, "empty node (None)"), ({}, "empty node (Dict)"), ("a", "text 'a'")]
)
def test_non_array_nodes_are_described_and_counted_separately(tmp_path, value, text):
    ocp = pytest.importorskip("orbax.checkpoint")
    ocp.PyTreeCheckpointer().save(tmp_path / "a", {"w": np.ones(3, "f4")})
    ocp.PyTreeCheckpointer().save(tmp_path / "b", {"w": np.ones(3, "f4"), "x": value})
    extra = command_line.run("verify", tmp_path / "b", "--against", tmp_path / "a", code=1)
    assert ": 1 other node too many\n" in extra and f"x: extra, {text}\n" in extra
    missing = command_line.run("verify", tmp_path / "a", "--against", tmp_path / "b", code=1)
    assert ": 1 other node missing\n" in missing and f"x: missing, {text}\n" in missing
    assert "None instead of" not in extra + missing and "instead of None" not in extra + missing
