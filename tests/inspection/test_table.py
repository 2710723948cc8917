from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import Scale, Size, Stored, Table, parse_key, parse_side, row

from ckpttools import DTYPES, ConfigError, CoverageError, MappingError, ShapeError, UsageError
from ckpttools.mapping.axes import parse_groups
from ckpttools.mapping.flags import Flag
from ckpttools.mapping.sizes import Observation, require, sizes_from_config, sizes_from_keys, unify
from ckpttools.testing.strategies import UnreadableFile, noise, stored

F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]
ROWS = (
    row("embedding: vocab embed <-> embed.weight: vocab embed"),
    row("logits: embed vocab <-> head.weight: vocab embed, unless tied"),
    row("layers_{layer}.norm: embed <-> blocks.{layer}.norm.weight: embed"),
    row("layers_{layer}.wi: embed mlp <-> blocks.{layer}.up.weight: mlp embed"),
    row("layers_{layer}.query: embed heads head_dim <-> blocks.{layer}.q.weight: (heads head_dim) embed"),
)
LENGTHS = {"vocab": 11, "embed": 5, "mlp": 7, "heads": 3, "head_dim": 2, "layer": 3}
FIELDS = {"layer": "num_hidden_layers", "embed": "hidden_size", "vocab": "vocab_size"}


def declared(axis):
    return Size(LENGTHS[axis], f"config.json: {FIELDS.get(axis, axis)}")


def table(axes=tuple(LENGTHS), tied=False, **more):
    flags = {"tied": Flag(tied, f"config.json: tie_word_embeddings is {str(tied).lower()}")}
    return Table(ROWS, {axis: declared(axis) for axis in axes}, flags, location="model", **more)


def right_shapes(lengths=LENGTHS, tied=False):
    shapes = {}
    for item in ROWS:
        if item.unless != "tied" or not tied:
            shapes |= dict.fromkeys(item.right.keys(lengths), item.right.shape(lengths))
    return shapes


def unread(shapes):
    return {key: Stored(shape, F32, UnreadableFile(key), 0) for key, shape in shapes.items()}


def refused(shapes, built=None, **options):
    with pytest.raises(CoverageError) as caught:
        (built or table(**options)).to_left(unread(shapes))
    assert caught.value.location == "model"
    return caught.value


def test_matching_model_is_mapped_without_reading():
    mapped = table().to_left(unread(right_shapes()))
    assert mapped.sizes == LENGTHS
    assert {key: array.shape for key, array in mapped.arrays.items()} == {
        "embedding": (11, 5),
        "logits": (5, 11),
        **{f"layers_{k}.norm": (5,) for k in range(3)},
        **{f"layers_{k}.wi": (5, 7) for k in range(3)},
        **{f"layers_{k}.query": (5, 3, 2) for k in range(3)},
    }
    assert table().to_right(mapped.arrays).arrays.keys() == right_shapes().keys()


def expanded(line):
    """The lines that one with ranges such as `{0..2,5}` stands for."""
    before, brace, rest = line.partition("{")
    if not brace or not rest[0].isdigit():
        return [line]
    inside, _, after = rest.partition("}")
    pairs = [part.split("..") for part in inside.split(",")]
    numbers = [n for pair in pairs for n in range(int(pair[0]), int(pair[-1]) + 1)]
    return [item for n in numbers for item in expanded(f"{before}{n}{after}")]


def sections(message):
    """The listed lines of an error's text, and their number as it says, by what is said of them."""
    result, lines = {}, []
    for line in message.split("\n")[1:]:
        if line.startswith("    "):
            lines += expanded(line.strip())
        else:
            count, _, what = line.strip().rstrip(":").partition(" ")
            lines = []
            result[what.split(" ", 2)[2]] = (int(count), lines)
    return result


SOME_KEYS = st.sets(st.sampled_from(sorted(right_shapes())), max_size=4)
STRANGERS = st.sets(st.sampled_from(["blocks.3.norm.weight", "other", "embed.bias"]), max_size=3)


@given(st.data())
def test_all_mismatches_are_listed_together(data):
    shapes = right_shapes()
    missing = data.draw(SOME_KEYS)
    bent = data.draw(SOME_KEYS) - missing
    extra = data.draw(STRANGERS)
    there = {key: shape for key, shape in shapes.items() if key not in missing}
    there |= {key: (*shapes[key][:-1], shapes[key][-1] + 1) for key in bent}
    there |= dict.fromkeys(extra, (5,))
    if not missing | bent | extra:
        table().to_left(unread(there))
        return
    error = refused(there)
    result = sections(error.message)
    marks = {"missing": "  ", "not expected": "  ", "of the wrong shape": ":"}
    for (what, mark), expected in zip(marks.items(), (missing, extra, bent), strict=True):
        count, lines = result.pop(what, (0, []))
        assert count == len(expected)
        assert {line.split(mark)[0] for line in lines} == expected
    assert not result
    assert error.hint


def test_long_list_is_complete():
    lengths = LENGTHS | {"layer": 60}
    built = table(axes=("vocab", "embed", "mlp", "heads", "head_dim"))
    built = Table(built.rows, built.sizes | {"layer": Size(60, "test")}, built.flags, location="model")
    there = {key: shape for key, shape in right_shapes(lengths).items() if ".norm." not in key}
    count, lines = sections(refused(there, built).message)["missing"]
    assert count == 60
    assert lines == [f"blocks.{k}.norm.weight" for k in range(60)]


def test_missing_array_is_listed_with_its_near_name():
    shapes = right_shapes()
    shapes["blocks.1.norm.weigth"] = shapes.pop("blocks.1.norm.weight")
    assert "blocks.1.norm.weight  (blocks.1.norm.weigth exists)" in refused(shapes).message


@pytest.mark.parametrize("key", ["blocks.1.up.weight", "head.weight", "blocks.2.q.weight"])
def test_transposed_array_is_refused(key):
    shapes = right_shapes()
    shapes[key] = shapes[key][::-1]
    message = refused(shapes).message
    assert (
        f"{key}: got {list(shapes[key])}, expected {list(shapes[key][::-1])} (it looks transposed)" in message
    )


def test_wrong_first_array_of_a_row_is_named():
    shapes = right_shapes()
    shapes["blocks.0.up.weight"] = (5, 7)
    assert "blocks.0.up.weight: got [5, 7], expected [7, 5]" in refused(shapes).message


def test_config_contradiction_names_field_and_array():
    shapes = right_shapes(LENGTHS | {"vocab": 12})
    message = refused(shapes).message
    assert "embed.weight: got [12, 5], expected [11, 5] (vocab 11 from config.json: vocab_size)" in message
    assert "head.weight" in message


def test_array_contradiction_names_both_arrays():
    shapes = right_shapes()
    shapes["blocks.2.up.weight"] = (8, 5)
    message = refused(shapes, axes=("layer", "embed", "vocab", "heads")).message
    assert "blocks.2.up.weight: got [8, 5], expected [7, 5] (mlp 7 from blocks.0.up.weight [7, 5])" in message


def test_array_of_wrong_rank_is_listed_with_its_axes():
    shapes = right_shapes()
    shapes["blocks.1.norm.weight"] = (5, 1)
    assert "blocks.1.norm.weight: got [5, 1], expected [5] (1 axes: blocks.{layer}" in refused(shapes).message


def test_layer_beyond_the_config_is_explained():
    error = refused(right_shapes(LENGTHS | {"layer": 5}))
    assert "is beyond the 3 of config.json: num_hidden_layers" in error.hint
    assert "blocks.3." in error.hint
    assert "6 arrays are not expected" in error.message
    error = refused({**right_shapes(), "blocks.17.norm.weight": (5,)})
    assert "blocks.17.norm.weight is beyond the 3 of config.json: num_hidden_layers; " in error.hint


def test_missing_layer_is_listed():
    error = refused(right_shapes(LENGTHS | {"layer": 2}))
    assert "3 arrays are missing" in error.message
    assert "blocks.2.norm.weight" in error.message


@pytest.mark.parametrize(("tied", "verdict"), [(True, "not expected"), (False, "expected")])
def test_error_names_the_undecided_flag(tied, verdict):
    error = refused(right_shapes(tied=not tied), tied=tied)
    reason = f"config.json: tie_word_embeddings is {str(tied).lower()}"
    assert f"head.weight is {verdict} because of {reason}" in error.hint


def test_extra_arrays_can_be_dropped_by_name():
    shapes = right_shapes() | {"blocks.0.rotary": (2,), "blocks.1.rotary": (2,), "extra": (1,)}
    assert 'drop="PATTERN"' in refused(shapes).hint
    mapped = table().to_left(unread(shapes), ["*.rotary", "extra"])
    assert mapped.dropped == ("blocks.0.rotary", "blocks.1.rotary", "extra")
    assert not any("rotary" in key for key in mapped.arrays)
    assert table(dropped=("blocks.*.rotary",)).to_left(unread(shapes), ["ext?a"]).dropped == mapped.dropped


def test_family_drop_patterns_match_only_right_side_keys():
    mapped = table().to_left(unread(right_shapes()))
    with pytest.raises(CoverageError):
        table(dropped=("layers_0.extra",)).to_right(mapped.arrays | unread({"layers_0.extra": (1,)}))
    with pytest.raises(CoverageError) as caught:
        table().to_right(mapped.arrays | unread({"extra.value": (1,)}))
    assert caught.value.hint == 'to leave them out, `ckpttools.select("SRC", "DST", drop=["PATTERN"])` first'


def test_dropping_a_required_array_is_refused():
    with pytest.raises(CoverageError, match="1 array is missing"):
        table().to_left(unread(right_shapes()), ["embed.weight"])


@pytest.mark.parametrize("silent", ["vocab", "embed", "mlp", "heads", "head_dim"])
def test_missing_sizes_are_inferred_from_shapes(silent):
    built = table(axes=[axis for axis in LENGTHS if axis != silent])
    assert built.to_left(unread(right_shapes())).sizes == LENGTHS


def test_unknown_sizes_are_named():
    with pytest.raises(ShapeError, match="head_dim, heads") as caught:
        table(axes=("layer", "vocab", "embed", "mlp")).to_left(unread(right_shapes()))
    assert caught.value.location == "model"


def test_layer_count_is_inferred_from_names():
    built = table(axes=("vocab", "embed", "mlp", "heads"))
    mapped = built.to_left(unread(right_shapes(LENGTHS | {"layer": 11})))
    assert mapped.sizes == LENGTHS | {"layer": 11}


def test_indivisible_merged_axis_is_not_guessed():
    sizes = unify(
        {"heads": Size(4, "config")},
        [Observation("q", (("heads", "head_dim"),), (6,)), Observation("v", (("head_dim",),), (2,))],
    )
    assert sizes["head_dim"] == Size(2, "v [2]")


@given(st.data())
def test_unify_infers_sizes_and_keeps_known_ones(data):
    texts = ("(heads head_dim) embed", "(embed vocab)", "(kv head_dim)", "embed")
    groups = [parse_groups(text) for text in texts]
    lengths = {axis: data.draw(st.integers(1, 9)) for axis in ("heads", "head_dim", "embed", "vocab", "kv")}
    seen = []
    for number, item in enumerate(groups):
        shape = []
        for group in item:
            count = 1
            for axis in group:
                count *= lengths[axis]
            shape.append(count)
        seen.append(Observation(str(number), item, tuple(shape)))
    known = {"head_dim": Size(lengths["head_dim"], "config")}
    result = unify(known, data.draw(st.permutations(seen)))
    assert {axis: size.length for axis, size in result.items()} == lengths
    assert result["head_dim"] is known["head_dim"]
    assert require(result, lengths, seen, "here") == lengths


def test_alternatives_are_tried_in_order():
    fields = {"kv": ("num_key_value_heads", "num_attention_heads")}
    assert sizes_from_config({"num_attention_heads": 8}, fields, "c") == {
        "kv": Size(8, "c: num_attention_heads")
    }
    both = {"num_attention_heads": 8, "num_key_value_heads": 2}
    assert sizes_from_config(both, fields, "c") == {"kv": Size(2, "c: num_key_value_heads")}
    assert sizes_from_config({**both, "num_key_value_heads": None}, fields, "c")["kv"].length == 8
    assert sizes_from_config({}, fields, "c") == {}


@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True, [8]])
def test_invalid_size_is_refused(value):
    with pytest.raises(ConfigError, match="hidden_size must be an integer of at least 1") as caught:
        sizes_from_config({"hidden_size": value}, {"embed": ("hidden_size",)}, "config.json")
    assert caught.value.got == repr(value)
    assert caught.value.location == "config.json"


def test_value_notes_explain_changes():
    scaled = row("a.{layer}: head_dim <-> b.{layer}: head_dim", op=Scale("head_dim", -0.5))
    built = Table((scaled,), {"layer": Size(2, "test")})
    arrays = {f"b.{k}": stored(noise((8,), F32), F32) for k in range(2)}
    mapped = built.to_left(arrays)
    (note,) = mapped.values
    assert (note.key, note.exact, note.dtype) == ("a.{layer}", False, F32)
    assert "times 0.353553" in note.reason
    assert "divided by 0.353553" in built.to_right(mapped.arrays).values[0].reason


def test_labels_give_the_size_of_their_axis():
    built = Table((row("qkv: part embed <-> {part:q,k,v}.weight: embed"),), {})
    mapped = built.to_left({f"{p}.weight": stored(noise((4,), F32, k), F32) for k, p in enumerate("qkv")})
    assert mapped.sizes == {"part": 3, "embed": 4}
    assert mapped.arrays["qkv"].shape == (3, 4)
    back = built.to_right(mapped.arrays).arrays
    assert list(back) == ["q.weight", "k.weight", "v.weight"]
    assert back["k.weight"].read().tobytes() == noise((4,), F32, 1).tobytes()


@given(dense=st.integers(0, 4), moe=st.integers(0, 4))
def test_consecutive_groups_are_numbered_consecutively(dense, moe):
    """`{moe+#dense}` counts from the number of dense layers; the names on the left tell both."""
    rows = (
        row("dense_{dense}.w: embed <-> layers.{dense}.mlp: embed"),
        row("moe_{moe}.w: embed <-> layers.{moe+#dense}.experts: embed"),
        row("norm: embed <-> norm: embed"),
    )
    built = Table(rows, {"dense": Size(dense, "config"), "moe": Size(moe, "config")})
    shapes = {f"layers.{k}.mlp": (5,) for k in range(dense)}
    shapes |= {f"layers.{dense + k}.experts": (5,) for k in range(moe)}
    mapped = built.to_left(unread(shapes | {"norm": (5,)}))
    assert mapped.sizes == {"dense": dense, "moe": moe, "embed": 5}
    names = {"norm", *(f"dense_{k}.w" for k in range(dense)), *(f"moe_{k}.w" for k in range(moe))}
    assert mapped.arrays.keys() == names
    for back in (built, Table(rows, {}, is_configured=False)):
        mapped_back = back.to_right(mapped.arrays)
        assert mapped_back.sizes == mapped.sizes
        assert mapped_back.arrays.keys() == shapes.keys() | {"norm"}


@given(layers=st.integers(1, 20))
def test_cycles_and_remaining_layers_are_mapped(layers):
    """Six layers are a block that is stacked; the rest is stored layer by layer."""
    rows = (
        row("layers.part_{position}: embed block <-> layers.{6*block+position}: embed"),
        row("rest.part_{rest}: embed <-> layers.{rest+#cycled}: embed"),
    )
    derived = {"block": "layers // 6", "rest": "layers % 6", "cycled": "6 * block"}
    sizes = {"layers": Size(layers, "config"), "position": Size(6, "family")}
    built = Table(rows, sizes, derived=derived)
    arrays = {f"layers.{k}": stored(noise((3,), F32, k), F32, str(k)) for k in range(layers)}
    mapped = built.to_left(arrays)
    blocks = {f"layers.part_{k}": (3, layers // 6) for k in range(6) if layers >= 6}
    assert {key: array.shape for key, array in mapped.arrays.items()} == blocks | {
        f"rest.part_{k}": (3,) for k in range(layers % 6)
    }
    back = built.to_right(mapped.arrays).arrays
    assert back.keys() == arrays.keys()
    for number in range(layers):
        assert back[f"layers.{number}"].read().tobytes() == noise((3,), F32, number).tobytes()


def test_incomplete_layer_groups_are_refused():
    built = Table(
        ROWS, {"layers": Size(5, "config.json: n_layers")}, derived={"pair": "layers / 2"}, location="m"
    )
    with pytest.raises(ConfigError, match="5 is not a multiple of 2") as caught:
        built.to_left(unread(right_shapes()))
    assert caught.value.got == "config.json: n_layers"
    assert caught.value.expected == "pair = layers / 2 without a remainder"


def test_negative_length_is_refused():
    sizes = {"layers": Size(2, "c: n_layers"), "dense": Size(3, "c: first_k")}
    built = Table(ROWS, sizes, derived={"moe": "layers - dense"}, location="m")
    with pytest.raises(ConfigError, match="moe = layers - dense would be -1") as caught:
        built.to_left(unread(right_shapes()))
    assert caught.value.got == "c: first_k; c: n_layers"


def test_scale_by_unknown_axis_is_refused():
    built = Table((row("a: n <-> b: n", op=Scale("heads", -0.5)),), {})
    with pytest.raises(MappingError, match="scaled by an axis of unknown length") as caught:
        built.to_left({"b": stored(noise((3,), F32), F32)})
    assert caught.value.got == "heads"


@given(rows=st.integers(11, 30), tied=st.booleans())
def test_vocabulary_padding_round_trips(rows, tied):
    shapes = right_shapes(tied=tied)
    arrays = {key: stored(noise(shape, F32, n), F32, key) for n, (key, shape) in enumerate(shapes.items())}
    built = table(tied=tied, padded={"vocab": rows})
    there = built.to_left(arrays)
    plain = table(tied=tied).to_left(arrays).arrays
    assert there.sizes == LENGTHS
    heads = {"embedding": 0} if tied else {"embedding": 0, "logits": 1}
    for key, array in there.arrays.items():
        if key not in heads:
            assert array.read().tobytes() == plain[key].read().tobytes()
            continue
        whole = array.read()
        assert whole.shape[heads[key]] == rows
        first, rest = np.split(whole, [11], axis=heads[key])
        assert first.tobytes() == plain[key].read().tobytes()
        assert not rest.view("u4").any()
    back = built.to_right(there.arrays, ("vocab",))
    assert back.cut == ({"vocab": (rows, 11)} if rows > 11 else {})
    assert back.arrays.keys() == arrays.keys()
    assert all(back.arrays[key].read().tobytes() == arrays[key].read().tobytes() for key in arrays)


def test_unexpected_vocabulary_padding_is_refused():
    there = table(padded={"vocab": 12}).to_left(unread(right_shapes())).arrays
    with pytest.raises(CoverageError, match=r"embedding: got \[12, 5\], expected \[11, 5\]"):
        table().to_right(there)


def test_short_vocabulary_is_refused():
    there = table().to_left(unread(right_shapes())).arrays
    short = Table(ROWS, table().sizes | {"vocab": Size(13, "config")}, table().flags)
    with pytest.raises(CoverageError, match=r"embedding: got \[11, 5\], expected \[13, 5\]"):
        short.to_right(there, ("vocab",))


def test_arrays_without_a_left_side_are_left_out():
    keys = ("vision.{part:a,b}.w", "blocks.{extra+#layer}.*", "tower.*", "blocks.{unknown}.x")
    built = table(left_out=tuple(map(parse_key, keys)))
    built = replace(built, sizes=built.sizes | {"extra": Size(2, "test"), "part": Size(2, "test")})
    more = {"vision.a.w": (1,), "vision.b.w": (1,), "tower.x.y": (1,), "blocks.3.norm.weight": (1,)}
    there = unread(right_shapes() | more | {"blocks.4.q.weight": (2,)})
    mapped = built.to_left(there)
    assert set(mapped.dropped) == {*more, "blocks.4.q.weight"} == built.unmatched_right(there).keys()
    with pytest.raises(CoverageError, match=r"blocks\.5"):
        built.to_left(there | unread({"blocks.5.norm.weight": (1,)}))


@given(values=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=50), size=st.integers(2, 200))
def test_exact_stores_inexact_values_in_float32(values, size):
    built = Table((row("a: n <-> b: n", op=Scale("size", -0.5)),), {"size": Size(size, "test")})
    bits = np.array(values, np.uint16)
    small = np.abs(bits.view(BF16.numpy).astype(np.float32)) < 2.0**-120
    bits = np.where(np.isnan(bits.view(BF16.numpy).astype(np.float32)) | small, np.uint16(0x3F80), bits)
    mapped = built.to_left({"b": stored(bits, BF16)}, exact=True)
    (note,) = mapped.values
    assert note.exact
    assert mapped.changed == {"a"}
    assert mapped.arrays["a"].dtype == (BF16 if size in (4, 16, 64) else F32)
    back = built.to_right(mapped.arrays).arrays["b"]
    assert back.read().astype(BF16.numpy).tobytes() == bits.tobytes()


def test_exact_refuses_unrepresentable_values():
    built = Table((row("a: n <-> b: n", op=Scale("n", -0.5)),), {})
    with pytest.raises(
        UsageError, match="cannot be stored so that the reverse conversion is exact"
    ) as caught:
        built.to_left({"b": stored(noise((3,), F32), F32)}, exact=True)
    assert caught.value.location == "a"


def test_unset_flags_are_inferred_from_names():
    built = Table(ROWS, {axis: declared(axis) for axis in LENGTHS}, location="model")
    for tied in (True, False):
        assert built.to_left(unread(right_shapes(tied=tied))).arrays.keys() == (
            table(tied=tied).to_left(unread(right_shapes(tied=tied))).arrays.keys()
        )


def test_layer_count_comes_from_complete_names():
    sides = [parse_side("layers.{layer}.w", "x"), parse_side("{2*pair+1}.{layer+#dense}", "x")]
    names = ["layers.1.w", "layers.7.other", "layers.08.w", "7.4", f"layers.{10**30}.w", f"{10**3999}.1"]
    assert {axis: size.length for axis, size in sizes_from_keys({}, names, sides[:1]).items()} == {"layer": 2}
    result = sizes_from_keys({"dense": Size(3, "said")}, names, sides)
    assert {axis: size.length for axis, size in result.items()} == {"dense": 3, "layer": 2, "pair": 4}
