"""Parts of quantized modules may have other names, and no other order of elements."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from support.command_line import run
from support.internals import Convert, MapArrays, Relayout, elementwise, parse_rules, relayout, stack
from support.quantized_kinds import KINDS, MODULES, PLAIN, tree_of_kind, write

from ckpttools import DTYPES, MappingError, Tree
from ckpttools.testing.strategies import noise, stored

REFUSED = "can be renamed, but not rearranged"
EXPERTS = 3


def turned(array) -> Relayout:
    """All of its axes in the other order; of one axis each half in the place of the other's elements."""
    rank = len(array.shape)
    if rank > 1:
        return relayout(array, [[n] for n in array.shape], list(reversed(range(rank))), [1] * rank)
    return relayout(array, [[2, array.shape[0] // 2]], [1, 0], [2])


@pytest.mark.parametrize("kind", KINDS)
def test_functions_cannot_rearrange_parts(kind):
    tree = tree_of_kind(kind)
    for key, (_, shape) in KINDS[kind][1].items():
        if len(shape) < 2 and (not shape or shape[0] % 2 or shape[0] < 4):
            continue  # They are the same in any order of axes.
        for ends in ((f"{MODULES[0]}.{key}",), tuple(f"{module}.{key}" for module in MODULES)):
            with pytest.raises(MappingError) as error:
                tree.pipe(MapArrays(lambda path, item, ends=ends: turned(item) if path in ends else path))
            assert REFUSED in str(error.value)
            assert f"{MODULES[0]}.{key}" in str(error.value)
    built = tree.pipe(MapArrays(lambda path, item: turned(item) if path == "lm_head.weight" else path))
    assert built.arrays["lm_head.weight",].shape == PLAIN["lm_head.weight"][1][::-1]


@pytest.mark.parametrize("kind", KINDS)
def test_rules_cannot_rearrange_parts(kind):
    """Names of axes that stay as they are rearrange nothing."""
    tree = tree_of_kind(kind)
    for key, (_, shape) in KINDS[kind][1].items():
        if len(shape) < 2:
            continue
        axes = "abcd"[: len(shape)]
        rule = {"from": f"{MODULES[0]}.{key}", "to": f"{MODULES[0]}.{key}", "axes": " ".join(axes)}
        assert len(tree.pipe(parse_rules({"rules": [{**rule, "to-axes": " ".join(axes)}]}))) == len(tree)
        for other in (" ".join(reversed(axes)), f"({' '.join(axes)})"):
            with pytest.raises(MappingError, match=REFUSED):
                tree.pipe(parse_rules({"rules": [{**rule, "to-axes": other}]}))


def test_functions_cannot_cast_parts():
    tree = tree_of_kind("gptq")
    part = next(path[0] for path in tree.arrays if path[0].endswith(".scales"))
    cast = elementwise(tree.arrays[part,], Convert(DTYPES["float32"]))
    with pytest.raises(MappingError, match="cast from float16 to float32"):
        tree.pipe(MapArrays(lambda path, item: cast if path == part else path))


def experts(sides: dict[str, tuple[str, tuple[int, ...]]]) -> Tree:
    return Tree(
        {
            (f"experts.{d}.{e}.{key}",): stored(noise(shape, DTYPES[dtype]), DTYPES[dtype])
            for d in range(2)
            for e in range(EXPERTS)
            for key, (dtype, shape) in sides.items()
        }
    )


PARTS = {"weight": ("int8", (4, 6)), "weight_scale": ("float32", (4, 2)), "weight_order": ("int32", (6, 2))}
# Its own axes of each part.
AXES = dict(zip(PARTS, ("a b", "a g", "b g"), strict=True))
# How each part is put together; in the first two ways a module's parts are found together again.
ORDERS = ("d e {0} {1}", "e d {0} {1}", "d {0} e {1}", "{0} {1} d e", "(d e) {0} {1}", "e {0} {1} d")
ONE_FOR_ALL = st.sampled_from(ORDERS[:3]).map(lambda order: (order,) * len(PARTS))
EACH_ITS_OWN = st.tuples(*(st.sampled_from(ORDERS) for _ in PARTS))


@settings(max_examples=25, deadline=None)
@given(st.one_of(ONE_FOR_ALL, EACH_ITS_OWN))
def test_equally_stacked_parts_are_accepted(orders):
    rules = [
        {
            "from": f"experts.{{d}}.{{e}}.{key}",
            "to": f"all.{key}",
            "axes": axes,
            "to-axes": order.format(*axes.split()),
        }
        for (key, axes), order in zip(AXES.items(), orders, strict=True)
    ]
    remap, tree = parse_rules({"rules": rules}), experts(PARTS)
    if orders not in [(order,) * len(PARTS) for order in ORDERS[:2]]:
        with pytest.raises(MappingError, match=r"rearranged|each module whole"):
            tree.pipe(remap)
        return
    built = tree.pipe(remap)
    for key in PARTS:
        read = np.asarray(built.arrays[f"all.{key}",].read())
        for d in range(2):
            for e in range(EXPERTS):
                one = np.asarray(tree.arrays[f"experts.{d}.{e}.{key}",].read())
                assert np.array_equal(read[(d, e) if orders[0] == ORDERS[0] else (e, d)], one)


def test_stacked_modules_can_be_unstacked():
    tree = experts(PARTS)
    one, whole = "experts.{d}.{e}.", "all.{d}."
    there, back = [], []
    for key, axes in AXES.items():
        there.append({"from": one + key, "to": whole + key, "axes": axes, "to-axes": f"e {axes}"})
        back.append({"from": whole + key, "to": one + key, "axes": f"e {axes}", "to-axes": axes})
    stacked = tree.pipe(parse_rules({"rules": there}))
    again = stacked.pipe(parse_rules({"rules": back}))
    for path, array in tree.arrays.items():
        assert np.array_equal(np.asarray(again.arrays[path].read()), np.asarray(array.read()))
    # A row of a weight is no expert's.
    with pytest.raises(MappingError, match=REFUSED):
        stacked.pipe(parse_rules({"rules": [{**back[0], "to": "r.{d}.{a}.weight", "to-axes": "e b"}]}))


def test_reordered_parts_are_not_a_stack():
    """A function that puts them together in another order than their weights."""
    tree = experts({key: PARTS[key] for key in ("weight", "weight_scale")})
    whole = {
        key: [tree.arrays[f"experts.{d}.0.{key}",] for d in range(2)] for key in ("weight", "weight_scale")
    }

    def function(backwards: bool):
        def put(path, array):
            _, d, e, key = path.split(".")
            if e != "0":
                return path
            parts = whole[key][::-1] if backwards and key == "weight_scale" else whole[key]
            return (f"all.{key}", stack(parts, 0)) if d == "0" else None

        return MapArrays(put)

    assert len(tree.pipe(function(False))) == len(tree) - 2
    with pytest.raises(MappingError, match=r"all.weight: without weight_scale"):
        tree.pipe(function(True))


def test_commands_refuse_and_write_nothing(tmp_path):
    source = write(tmp_path / "source", "gptq")
    axes = {"axes": "a b", "to-axes": "b a"}
    for key in ("scales", "qzeros", "qweight"):
        name = f"model.layers.1.self_attn.{{p:o_proj}}.{key}"
        (tmp_path / "rules.json").write_text(json.dumps({"rules": [{"from": name, "to": name, **axes}]}))
        done = run("remap", source, tmp_path / "out", "--map", tmp_path / "rules.json", code=3)
        assert REFUSED in " ".join(done.split())
        assert not (tmp_path / "out").exists()


def test_copies_keep_the_quantization_config(tmp_path):
    """Also of schemes that nobody has told of."""
    for kind in ("quanto", "spqr", "vptq"):
        source, expected = write(tmp_path / kind, kind), KINDS[kind][0]
        before = load_file(source / "model.safetensors")
        for words, flags in (
            (("convert", "to-safetensors"), ()),
            (("select",), ("--drop", "lm_head.weight")),
            (("cast",), ("--dtype", "float32")),
        ):
            out = tmp_path / f"{kind}-{words[-1]}"
            run(*words, source, out, *flags)
            config = json.loads((out / "config.json").read_bytes())
            assert config["quantization_config"] == expected
            after = load_file(out / "model.safetensors")
            for name in before.keys() - PLAIN.keys():
                assert after[name].dtype == before[name].dtype
                assert after[name].tobytes() == before[name].tobytes()
