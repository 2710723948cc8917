"""Meshes, partition specs and rules: what of an array each device has, decided without devices."""

from __future__ import annotations

import json

import pytest
from support.internals import keystr, parse, parse_mesh, to_maxtext
from support.locations import GOLDEN, HF

import ckpttools
from ckpttools import FormatError, MappingError, ShapeError, ToMaxText, UsageError, chunks
from ckpttools.maxtext.axis_names import axis_names
from ckpttools.sharding.mesh import MeshShape, parse_spec, shard_shape, spec_text
from ckpttools.sharding.rules import MAXTEXT, NamedArray, Rules, resolve_rules

MESH = parse_mesh("data=2,fsdp=4,tensor=2")


def named(text):
    return tuple((word,) if word != "-" else () for word in text.split())


def test_shards_are_equal_parts():
    spec = parse_spec("P(('data', 'fsdp'), None, tensor)")
    assert shard_shape((16, 3, 6), spec, MESH) == (2, 3, 3)
    assert shard_shape((16, 3, 6, 5), spec, MESH) == (2, 3, 3, 5)
    assert shard_shape((0, 2, 6), spec, MESH) == (0, 2, 3)
    assert parse_spec(spec_text(spec)) == spec


@pytest.mark.parametrize(
    ("shape", "spec", "declared"),
    [
        ((6,), "P('fsdp')", "a multiple of 4, not 6"),
        ((), "P('fsdp')", "more entries than the array has axes"),
        ((8, 8), "P('fsdp', 'model')", "no axis 'model'"),
        ((8, 8), "P('tensr')", "did you mean tensor"),
    ],
)
def test_shapes_refused_by_jax_are_refused(shape, spec, declared):
    with pytest.raises((ShapeError, UsageError), match=declared):
        shard_shape(shape, parse_spec(spec), MESH)


@pytest.mark.parametrize("text", ["fsdp", "P('fsdp', 'fsdp')", "P(1.5)", "P(a.b)", "os.system('ls')", ""])
def test_invalid_partition_spec_is_refused(text):
    with pytest.raises(UsageError):
        parse_spec(text)


def test_first_matching_pattern_takes_precedence_over_axes():
    rules = resolve_rules({"*/wo/kernel": "P(None, 'fsdp')", "*/w*/kernel": "P('data')", "mlp": "tensor"})
    assert rules.spec(("a", "wo", "kernel"), named("mlp embed"), MESH) == ((), ("fsdp",))
    assert rules.spec(("a", "wi", "kernel"), named("embed mlp"), MESH) == (("data",),)
    assert rules.spec(("a", "bias"), named("mlp"), MESH) == (("tensor",),)
    assert rules.spec(("a", "scale"), named("norm"), MESH) == ((),)
    assert not rules.applies(("a", "scale"), named("norm"))


def test_axis_rules_match_flax():
    rules = resolve_rules(
        [("a", ("data", "fsdp")), ("b", ("fsdp", "tensor")), ("b", "tensor"), ("c", None), ("c", "data")]
    )
    assert rules.spec((), named("a b"), MESH) == (("data", "fsdp"), ("tensor",))
    assert rules.spec((), named("b a"), MESH) == (("tensor",), ("data", "fsdp"))
    assert rules.spec((), named("b -"), MESH) == (("fsdp", "tensor"), ())
    assert rules.spec((), named("c"), MESH) == ((),)
    assert rules.spec((), (("embed_attn", "a"),), MESH) == (("data", "fsdp"),)


def test_maxtext_rules_are_complete():
    mesh = parse_mesh("fsdp=4,tensor=2")
    assert MAXTEXT.spec((), named("embed mlp"), mesh) == (("fsdp",), ("tensor",))
    assert MAXTEXT.spec((), named("embed layers mlp"), mesh) == (("fsdp",), (), ("tensor",))
    assert MAXTEXT.spec((), named("vocab embed_vocab"), mesh) == (("tensor",), ("fsdp",))
    experts = MeshShape({"expert": 2, "fsdp": 4})
    assert MAXTEXT.spec((), named("exp embed_moe mlp_moe"), experts) == (("expert",), ("fsdp",), ())
    assert resolve_rules("maxtext") is MAXTEXT


def test_mesh_may_only_lack_axes_of_maxtext():
    resolve_rules([("embed", ["fsdp", "expert"])]).check(MESH)
    with pytest.raises(UsageError, match="did you mean fsdp"):
        resolve_rules([("embed", "fsdpp")]).check(MESH)
    with pytest.raises(UsageError, match="no axis 'expert'"):
        resolve_rules({"*": "P('expert')"}).check(MESH)


@pytest.mark.parametrize(
    ("rules", "expected", "hint"),
    [
        ({"embd": "fsdp"}, "one of embed, embed_attn, ", "did you mean embed?"),
        ({"Mlp": ["fsdp", "tensor"]}, "one of embed, ", "did you mean mlp?"),
        ({"batch": "data"}, "one of embed, ", "correct it or leave it out"),
        ({"batch": None, "activation_mlp": "tensor", "exp": "expert", "embed": "fsdp"}, None, None),
    ],
)
def test_unknown_logical_axes_are_refused(rules, expected, hint):
    tree = ckpttools.open(parse(HF))
    if expected is None:
        resolve_rules(rules).check_names(tree)
        return
    with pytest.raises(UsageError, match="no array has the logical axis") as caught:
        resolve_rules(rules).check_names(tree)
    assert caught.value.expected.startswith(expected)
    assert hint in caught.value.hint


def test_axes_of_templates_are_known():
    tree, rules = ckpttools.open(parse(HF)), resolve_rules({"own": "fsdp"})
    rules.check_names(tree, [NamedArray(("a",), (("own",), ()))])
    with pytest.raises(UsageError, match="no array has the logical axis"):
        rules.check_names(tree, [NamedArray(("a",), ((), ()))])


@pytest.mark.parametrize(
    ("rules", "mesh", "message"),
    [
        ({"fsdp": "embed"}, "fsdp=4", "swap them: embed: fsdp"),
        ({"embed": "fsdp"}, "model=4", "use no axis of the mesh"),
        ({"embed": "fsdp"}, "8", "use no axis of the mesh"),
        ({"embed": "fsdp"}, "data=4", None),
    ],
)
def test_rules_without_axes_of_the_mesh_are_refused(rules, mesh, message):
    if message is None:
        resolve_rules(rules).check(parse_mesh(mesh))
        return
    with pytest.raises(UsageError) as caught:
        resolve_rules(rules).check(parse_mesh(mesh))
    assert message in str(caught.value)


def test_rules_are_read_from_toml_and_json(tmp_path):
    (tmp_path / "a.toml").write_text(
        'axes = [["embed", ["fsdp", "expert"]], ["mlp", "tensor"]]\n[arrays]\n"*/bias" = "P()"\n'
    )
    (tmp_path / "a.json").write_text(json.dumps({"axes": {"embed": ["fsdp", "expert"], "mlp": "tensor"}}))
    first, second = (resolve_rules(str(tmp_path / f"a.{kind}")) for kind in ("toml", "json"))
    assert first.axes == second.axes == (("embed", ("fsdp", "expert")), ("mlp", ("tensor",)))
    assert first.arrays == (("*/bias", ()),)


@pytest.mark.parametrize(
    ("name", "content", "error", "declared"),
    [
        ("a.toml", "axes = 3", MappingError, "a list of pairs"),
        ("a.toml", "axis = []", MappingError, "did you mean axes"),
        ("a.toml", '[arrays]\n"*" = "fsdp"', MappingError, "not a partition spec"),
        ("a.toml", '[arrays]\n"*" = "P(1.5)"', MappingError, "not a partition spec"),
        ("a.json", "{", FormatError, "not a JSON file"),
        ("a.toml", "=", FormatError, "not a TOML file"),
        ("a.json", '{"axes": [["a", 3]]}', MappingError, "not a rule"),
    ],
)
def test_invalid_files_are_refused(tmp_path, name, content, error, declared):
    (tmp_path / name).write_text(content)
    with pytest.raises(error, match=declared):
        resolve_rules(str(tmp_path / name))


@pytest.mark.parametrize("value", ["maxtxt", [("a",)], ["ab"], {1: "fsdp"}, {"a": 3}])
def test_invalid_rules_are_refused(value):
    with pytest.raises(UsageError):
        resolve_rules(value)


def test_rows_have_axis_names():
    hf = ckpttools.open(parse(HF))
    names = axis_names(hf)
    assert names.keys() == hf.arrays.keys()
    rules = Rules(axes=(("embed", ("fsdp",)), ("mlp", ("tensor",)), ("heads", ("tensor",))), name="own")
    by_path = {keystr(path): spec_text(rules.spec(path, item, MESH)) for path, item in names.items()}
    layer = "model.layers.0"
    assert {by_path[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up")} == {"P('tensor', 'fsdp')"}
    assert by_path[f"{layer}.mlp.down_proj.weight"] == "P('fsdp', 'tensor')"
    assert by_path[f"{layer}.self_attn.q_proj.weight"] == "P('tensor', 'fsdp')"
    assert by_path[f"{layer}.self_attn.k_proj.weight"] == "P(None, 'fsdp')"
    assert by_path[f"{layer}.self_attn.o_proj.weight"] == "P('fsdp', 'tensor')"
    assert by_path[f"{layer}.input_layernorm.weight"] == "P(None)"
    assert by_path["model.embed_tokens.weight"] == "P(None, 'fsdp')"


@pytest.mark.parametrize("family", ["llama3.1", "qwen3-moe", "deepseek3"])
def test_every_large_maxtext_array_has_axis_names(family):
    hf = ckpttools.open(parse(GOLDEN / family / "hf"))
    tree = to_maxtext(hf, ToMaxText()).state
    names = axis_names(tree)
    assert [path for path, array in tree.arrays.items() if array.ndim > 2 and path not in names] == []
    assert all(len(item) == tree.arrays[path].ndim for path, item in names.items())
    kernel = (
        names["params", "params", "decoder", "layers", "mlp", "wi_0", "kernel"] if family[0] == "l" else None
    )
    assert kernel in (None, (("embed",), ("layers", "layer"), ("mlp",)))


def test_processes_are_predicted_without_devices():
    source = GOLDEN / "llama3.1" / "hf"
    alone = chunks(source, mesh="tensor=8", rules="maxtext", processes=1).processes
    assert (alone.fetched, alone.over_read, alone.num_exchanged) == (alone.needed, 1.0, 0)
    four = chunks(source, mesh="fsdp=2,tensor=4", rules="maxtext", processes=4).processes
    assert four.devices == 2 and four.fetched_with_exchange <= four.fetched and four.needed < alone.needed
    rows = chunks(source, mesh="8", spec="axis0", processes=8).processes
    assert rows.over_read == 1.0 and rows.num_exchanged == 0
    columns = chunks(source, mesh="8", spec="axis-1", processes=8).processes
    assert columns.over_read > 2 and columns.num_exchanged > 0
    assert columns.fetched_with_exchange < 1.5 * columns.needed
    assert (columns.num_broadcast, columns.fetched_single_replica) == (0, columns.fetched_with_exchange)


def test_single_reader_is_predicted():
    source = GOLDEN / "llama3.1" / "hf"
    result = chunks(source, mesh="data=4,fsdp=2", rules={"*": "P('fsdp')"}, processes=4)
    loading = result.processes
    # Each of four processes has a whole replica: the first reads it for all.
    assert loading.num_broadcast == result.num_arrays
    assert loading.fetched_single_replica == loading.fetched == loading.needed == result.stored_nbytes
    # Four processes have a replica together, and four others the same one.
    eight = chunks(source, mesh="data=2,fsdp=8", rules={"*": "P('fsdp')"}, processes=8).processes
    assert eight.num_broadcast == result.num_arrays and eight.fetched_single_replica == eight.needed
    assert chunks(source, mesh="8", spec="axis0", processes=8).processes.num_broadcast == 0


@pytest.mark.parametrize(
    ("how", "declared"),
    [
        ({"mesh": "8", "spec": "axis0", "processes": 3}, "a divisor of 8"),
        ({"mesh": "8", "spec": "axis0", "processes": 0}, "a divisor of 8"),
        ({"processes": 2}, "require a mesh"),
        ({"mesh": "8", "spec": "axis0", "rules": "maxtext"}, "exclude each other"),
        ({"mesh": "8"}, "requires a spec"),
        ({"rules": "maxtext"}, "require a mesh"),
        ({"mesh": "a=8", "rules": {"*": "P('b')"}}, "no axis 'b'"),
    ],
)
def test_invalid_predictions_are_refused(how, declared):
    with pytest.raises(UsageError, match=declared):
        chunks(HF, **how)
