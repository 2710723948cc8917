"""All of a quantized module or nothing of it, whatever its scheme."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import run
from support.golden_data import convert
from support.internals import Dequantize, MapArrays, dotted, inspect_tree, parse_rules, quantized_view
from support.locations import GOLDEN
from support.quantized_kinds import (
    GPTQ,
    KINDS,
    MODULES,
    PLAIN,
    SAID_ONLY,
    Arrays,
    parts_of,
    tree_of_kind,
    write,
)
from support.quantized_weights import fp8_blocks, tree_of

import ckpttools
from ckpttools import DTYPES, CastMap, CastTo, CheckpointError, FormatError, MappingError, Select, Tree, save
from ckpttools.quantized.weights import auxiliary_tensors, find_weights
from ckpttools.testing.strategies import noise, stored

# Kinds that are read, and those of which a variant is that is not.
READ, UNREADABLE = ("mxfp4", "fp8 in blocks", "static fp8"), ("pack-quantized", "modelopt")


def bytes_of(location: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        dotted(path): (array.dtype.name, array.shape, np.asarray(array.read()).tobytes())
        for path, array in ckpttools.open(location).arrays.items()
    }


@pytest.mark.parametrize("kind", KINDS)
class TestModuleKinds:
    def test_selecting_part_of_a_module_is_refused(self, kind):
        for declared in (True,) if kind in SAID_ONLY else (True, False):
            tree = tree_of_kind(kind, declared=declared)
            for key in KINDS[kind][1]:
                if (kind, key) == ("nf4", "weight"):
                    continue  # It names what is below it as well.
                # The array of one module, of all modules, and it alone.
                name = f"{MODULES[0]}.{key}"
                for select in (Select(drop=[name]), Select(drop=[f"*.{key}"]), Select([name])):
                    with pytest.raises(MappingError, match="each module completely") as error:
                        tree.pipe(select)
                    assert "mlp.up_proj." in str(error.value)

    def test_complete_modules_and_plain_arrays_may_be_dropped(self, kind):
        for declared in (True,) if kind in SAID_ONLY else (True, False):
            tree = tree_of_kind(kind, declared=declared)
            built = tree.pipe(Select(drop=[f"{MODULES[0]}.*"]))
            gone = {dotted(path) for path in tree} - {dotted(path) for path in built}
            assert all(name.startswith(MODULES[0]) for name in gone)
            assert len(gone) == 1 + len(KINDS[kind][1])
            assert len(tree.pipe(Select([f"{MODULES[1]}.*"]))) == len(KINDS[kind][1])
            assert len(tree.pipe(Select(drop=["*norm*", "*.bias"]))) == len(tree) - 4

    def test_casts_keep_auxiliary_tensors(self, kind):
        tree = tree_of_kind(kind)
        quantized = {path for path in tree.arrays if path[0] not in PLAIN}
        floats = kind.endswith(("fp8", "blocks"))
        if floats:
            with pytest.raises(FormatError, match="quantized weights cannot be cast"):
                tree.pipe(CastTo("float8_e5m2"))
        if kind in UNREADABLE:
            with pytest.raises(FormatError, match="cannot be dequantized"):
                tree.pipe(CastTo("float64"))
        by_name = floats or kind in {*READ, *UNREADABLE}
        built = tree.pipe(
            CastMap({f"*{name}": "float64" for name in PLAIN}) if by_name else CastTo("float64")
        )
        for path, array in built.arrays.items():
            if path in quantized:
                assert array is tree.arrays[path]
            else:
                assert array.dtype.name == "float64"
        remarks = " ".join(built.metadata.notes.remarks)
        sides = [key for key, (dtype, _) in KINDS[kind][1].items() if DTYPES[dtype].is_float]
        if not by_name:
            assert all(key.rpartition(".")[2] in remarks for key in sides)
        for (name,) in quantized:
            with pytest.raises(FormatError, match="cannot be cast"):
                tree.pipe(CastMap({name: "int16"}, force=True))

    def test_casts_dequantize_readable_schemes(self, kind):
        if kind not in READ:
            return
        tree = tree_of_kind(kind)
        built = quantized_view(tree).dequantized().tree
        assert all(array.dtype.name in ("bfloat16", "float32") for array in built.arrays.values())
        assert len(built) == len(PLAIN) + len(MODULES) * (2 if kind == "mxfp4" else 1)
        assert "quantization_config" not in built.metadata.config

    def test_renames_that_separate_scales_are_refused(self, kind):
        tree = tree_of_kind(kind)
        assert len(tree.pipe(MapArrays(lambda path, _: path.replace("up_proj", "wi_0")))) == len(tree)
        for key in KINDS[kind][1]:
            with pytest.raises(MappingError, match="each module completely"):
                tree.pipe(MapArrays(lambda path, _, key=key: f"far/{path}" if path.endswith(key) else path))

    def test_conversions_keep_every_bit(self, kind, tmp_path):
        source = write(tmp_path / "source", kind)
        expected = bytes_of(source)
        run("convert", "to-orbax", source, tmp_path / "orbax")
        run("convert", "to-safetensors", tmp_path / "orbax", tmp_path / "back")
        assert bytes_of(tmp_path / "back") == expected
        assert bytes_of(tmp_path / "orbax") == expected
        config = json.loads((source / "config.json").read_bytes())
        assert json.loads((tmp_path / "back" / "config.json").read_bytes()) == config
        out = tmp_path / "out"
        last = list(KINDS[kind][1])[-1]
        for words in (("hf-to-maxtext",), ("to-safetensors", "--drop", f"*.{last}")):
            run("convert", words[0], source, out, *words[1:], code=3)
            assert not out.exists()

    def test_inspect_reports_unknown_schemes(self, kind):
        report = inspect_tree(tree_of_kind(kind)).quantization
        assert report is not None
        assert report.num_modules == len(MODULES)
        assert KINDS[kind][0]["quant_method"] in report.scheme
        if kind not in SAID_ONLY:
            bare = inspect_tree(tree_of_kind(kind, declared=False)).quantization
            assert bare is not None
            assert bare.num_modules == len(MODULES)
            assert bare.method is None


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.booleans(), st.data())
def test_modules_are_kept_or_dropped_completely(kind, declared, data):
    tree = tree_of_kind(kind, declared=declared or kind in SAID_ONLY)
    names = [name for (name,) in tree.arrays]
    keys = sorted({name.rpartition(".")[2] for name in names})
    pattern = st.one_of(
        st.sampled_from(names),
        st.sampled_from(keys).map(lambda key: f"*{key}"),
        st.sampled_from((*MODULES, "model.layers.0", "model.layers.1")).map(lambda head: f"{head}.*"),
        st.sampled_from("aegiqswz_").map(lambda letter: f"*.?*{letter}*"),
        st.sampled_from(("*weight*", "*scale*", "*.q*", "*idx", "*_*", "*proj.w*", "model.layers.?.mlp*")),
    )
    some = st.lists(pattern, max_size=3)
    keep, drop = data.draw(some), data.draw(some)
    try:
        built = {name for (name,) in tree.pipe(Select(keep, drop)).arrays}
    except CheckpointError:
        return
    for module in MODULES:
        for part in parts_of(kind, module):
            assert part <= built or part.isdisjoint(built)


class TestModuleOwnership:
    def test_scale_of_a_parent_module_is_found(self):
        names = {
            "attn.k_proj.weight": "int8",
            "attn.k_proj.weight_scale": "float32",
            "attn.k_scale": "float32",
        }
        tree = Tree({(name,): stored(noise((4, 4), DTYPES[d]), DTYPES[d]) for name, d in names.items()})
        with pytest.raises(MappingError, match=r"k_proj.weight: without k_scale"):
            tree.pipe(Select(drop=["attn.k_scale"]))
        assert len(tree.pipe(Select(["*scale", "*weight"]))) == 3

    def test_activation_scales_are_not_weight_scales(self):
        """A float8 weight that has lost its own still has that of its input."""
        tree = tree_of_kind("static fp8")
        left = Tree({p: item for p, item in tree.items() if not p[0].endswith("weight_scale")}, tree.metadata)
        with pytest.raises(FormatError, match=r"weight: float8_e4m3fn, without its scale"):
            left.pipe(CastTo("bfloat16"))

    @pytest.mark.parametrize("entry", ["lm_head", "re:.*lm_head", "re:^lm_head.*$", "lm_head*"])
    def test_unquantized_modules_are_ignored(self, entry):
        """Whole numbers are no weights there; float8 without a scale has lost it, unless a dtype says so."""
        dtypes = [DTYPES[name] for name in ("int32", "float8_e4m3fn")]
        whole, float8 = (stored(noise((8, 16), dtype), dtype) for dtype in dtypes)
        for field in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"):
            tree = tree_of_kind("gptq")
            declared = {"quantization_config": {**GPTQ, field: [entry]}}
            built = Tree({**tree.leaves, ("lm_head.weight",): whole}, tree.metadata).with_metadata(
                config=declared
            )
            assert "lm_head.weight" not in quantized_view(built).weights
            built = Tree({**tree.leaves, ("lm_head.weight",): float8}, tree.metadata)
            with pytest.raises(FormatError, match=r"lm_head.weight: float8_e4m3fn, without its scale"):
                built.with_metadata(config=declared).pipe(CastTo("float16"))
            stating = declared | {"dtype": "float8_e4m3fn"}
            cast = built.with_metadata(config=stating).pipe(CastTo("float16"))
            assert cast.arrays["lm_head.weight",].dtype.name == "float16"
            assert cast.arrays[f"{MODULES[0]}.scales",] is tree.arrays[f"{MODULES[0]}.scales",]

    @pytest.mark.parametrize("key", ["weight", "bias"])
    def test_unscaled_float8_in_unquantized_module_is_reported(self, key):
        """It is never dequantized as it is, nor beside others that are."""
        built = fp8_blocks(np.random.default_rng(0), (16, 16), (8, 8))
        codes = built.arrays[built.name]
        arrays = {**built.arrays, f"lm_head.{key}": codes if key == "weight" else codes[0]}
        tree = tree_of(
            arrays, {"quantization_config": {**built.config, "modules_to_not_convert": ["lm_head"]}}
        )
        with pytest.raises(FormatError, match=rf"lm_head.{key}: float8_e4m3fn, without its scale"):
            tree.pipe(Dequantize())

    def test_float8_scalar_is_not_plain(self):
        built = fp8_blocks(np.random.default_rng(0), (16, 16), (8, 8))
        arrays = {**built.arrays, "m.gate.e": built.arrays[built.name][0, 0].reshape(())}
        with pytest.raises(FormatError, match=r"m.gate.e: float8_e4m3fn, without its scale"):
            tree_of(arrays, {"quantization_config": built.config}).pipe(CastTo("bfloat16"))

    def test_other_entries_exempt_nothing(self):
        float8 = DTYPES["float8_e4m3fn"]
        for entry in ("head", "re:(lm|x)_head", "re:[", 3, "lm_head.weight.x"):
            leaves = {("lm_head.weight",): stored(noise((8, 16), float8), float8)}
            declared = {"quantization_config": {**GPTQ, "ignore": [entry]}}
            with pytest.raises(FormatError, match="without scales"):
                Tree(leaves).with_metadata(config=declared).pipe(CastTo("float16"))

    def test_slash_separated_names_are_grouped(self):
        for module in ("a/b", ""):
            names = {
                "up/kernel": "int8",
                "up/kernel_scale": "float32",
                "up/order": "int32",
                "norm": "float32",
            }
            tree = Tree(
                {
                    (f"{module}/{n}".lstrip("/"),): stored(noise((4, 4), DTYPES[d]), DTYPES[d])
                    for n, d in names.items()
                }
            )
            with pytest.raises(MappingError, match="without order"):
                tree.pipe(Select(drop=["*order"]))
            assert len(tree.pipe(Select(drop=["*norm"]))) == 3


class TestPlainFloat8:
    """What `ckpt cast` made, against what has lost its scales."""

    def cast(self, tmp_path, *words: str) -> Path:
        run("cast", GOLDEN / "llama3.1" / "hf", tmp_path / "f8", *words)
        return tmp_path / "f8"

    def test_stated_dtype_allows_all_operations(self, tmp_path):
        f8 = self.cast(tmp_path, "--dtype", "float8_e4m3fn")
        assert "taken literally" not in run("cast", f8, tmp_path / "back", "--dtype", "bfloat16")
        assert json.loads((tmp_path / "back" / "config.json").read_bytes())["dtype"] == "bfloat16"
        run("convert", "hf-to-maxtext", f8, tmp_path / "maxtext", "--dtype", "bfloat16")
        run("convert", "hf-to-maxtext", tmp_path / "back", tmp_path / "expected")
        mapped, expected = bytes_of(tmp_path / "maxtext"), bytes_of(tmp_path / "expected")
        assert {n for n in expected if mapped[n] != expected[n]} <= {
            n for n in expected if "query" in n or "key" in n
        }
        assert inspect_tree(ckpttools.open(f8)).quantization is None

    def test_lost_scales_are_refused_like_fp8_casts(self, tmp_path):
        """Not the dtype that was cast to, which the other says as well."""
        f8 = self.cast(tmp_path, "--dtype", "float8_e4m3fn")
        config = json.loads((f8 / "config.json").read_bytes()) | {"dtype": "bfloat16"}
        (f8 / "config.json").write_text(json.dumps(config))
        for words in (("cast",), ("convert", "hf-to-maxtext"), ("convert", "to-safetensors")):
            done = run(*words, f8, tmp_path / "out", "--dtype", "bfloat16", code=3)
            for part in ("may be the weights themselves", "--dtype bfloat16 --force", "all of its scales"):
                assert part in " ".join(done.split())
            assert not (tmp_path / "out").exists()
        done = run("cast", f8, tmp_path / "out", "--dtype", "bfloat16", "--force")
        assert "taken literally" in done

    def test_copies_do_not_state_unknown_dtypes(self, tmp_path):
        f8 = self.cast(tmp_path, "--dtype", "float8_e4m3fn")
        config = json.loads((f8 / "config.json").read_bytes()) | {"dtype": "bfloat16"}
        (f8 / "config.json").write_text(json.dumps(config))
        run("convert", "to-orbax", f8, tmp_path / "orbax")
        run("convert", "to-safetensors", tmp_path / "orbax", tmp_path / "copy")
        assert json.loads((tmp_path / "copy" / "config.json").read_bytes()) == config

    def test_tree_without_config_is_checked(self):
        float8 = DTYPES["float8_e4m3fn"]
        built = Tree({("up.weight",): stored(noise((4, 4), float8), float8)}).pipe(CastTo("bfloat16"))
        assert "if scales were lost" in " ".join(built.metadata.notes.remarks)


class TestIntegerIndices:
    """Whole numbers that are no weights, in models that are quantized."""

    def test_integer_indices_own_no_arrays(self):
        names = {
            "vision.embeddings.position_ids": "int64",
            "vision.embeddings.class_embedding": "bfloat16",
            "vision.embeddings.patch.weight": "bfloat16",
            "vision.attn.relative_position_index": "int64",
            "vision.attn.relative_position_bias_table": "bfloat16",
        }
        tree = tree_of_kind("gptq")
        extra = {
            (name,): stored(noise((4, 4), DTYPES[dtype]), DTYPES[dtype]) for name, dtype in names.items()
        }
        tree = Tree({**tree.leaves, **extra}, tree.metadata)
        assert len(tree.pipe(Select(drop=["*position_ids", "*position_index"]))) == len(tree) - 2
        built = tree.pipe(CastTo("float32"))
        assert {built.arrays[path].dtype.name for path in extra} == {"int64", "float32"}

    ATTENTION: ClassVar[Arrays] = {
        "model.attn.mask": ("int8", (8, 8)),
        "model.attn.scale": ("float32", ()),
        "model.attn.weight": ("float32", (8, 8)),
    }

    @pytest.mark.parametrize("key", ["mask", "attention_mask", "relative_position_index", "bucket_ids"])
    @pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
    def test_full_precision_weight_is_plain(self, key, dtype):
        tree = _stored({**self.ATTENTION, "model.attn.mask": (dtype, (8, 8))})
        tree = Tree({(item[0].replace("mask", key),): leaf for item, leaf in tree.items()})
        built = tree.pipe(CastTo("bfloat16"))
        dtypes = {path[0].rpartition(".")[2]: array.dtype.name for path, array in built.arrays.items()}
        assert dtypes == {key: dtype, "scale": "bfloat16", "weight": "bfloat16"}
        assert len(tree.pipe(Select(drop=["*scale"]))) == 2

    @pytest.mark.parametrize(
        ("changed", "declared"),
        [
            ({}, True),
            ({"model.attn.mask_scale": ("float32", (8,))}, False),
            ({"model.attn.mask.absmax": ("float32", (8,))}, False),
            ({"model.attn.weight": ("float32", (4, 8))}, False),
            ({"model.attn.weight": ("float32", (64,))}, False),
            ({"model.attn.qvalue": ("int8", (8, 8))}, False),
        ],
    )
    def test_quantized_modules_stay_together(self, changed, declared):
        tree = _stored(self.ATTENTION | changed)
        tree = tree.with_metadata(config={"quantization_config": GPTQ}) if declared else tree
        with pytest.raises(MappingError, match=r"without .*scale"):
            tree.pipe(Select(drop=["*.scale"]))
        assert tree.pipe(CastTo("bfloat16")).arrays[("model.attn.scale",)].dtype.name == "float32"


def _stored(arrays: Arrays) -> Tree:
    return Tree(
        {(name,): stored(noise(shape, DTYPES[item]), DTYPES[item]) for name, (item, shape) in arrays.items()}
    )


EXPERT: Arrays = {
    "weight_packed": ("int32", (4, 4)),
    "weight_scale": ("float32", (4, 2)),
    "weight_shape": ("int64", (2,)),
}
AXES = ("a b", "a groups", "rank")


class TestStackedModules:
    """Rules with axes, as experts are put together."""

    def remapped(self, stacked: int, *, drop: bool) -> Tree:
        leaves = {
            (f"experts.{e}.{key}",): stored(noise(shape, DTYPES[dtype]), DTYPES[dtype])
            for e in range(2)
            for key, (dtype, shape) in EXPERT.items()
        }
        source = "experts.{e}."
        rules: list[dict[str, object]] = []
        for at, (key, axes) in enumerate(zip(EXPERT, AXES, strict=True)):
            if at < stacked:
                to = {"to": f"all.{key}", "axes": axes, "to-axes": f"e {axes}"}
                rules.append({"from": source + key, **to})
            elif drop:
                rules.append({"from": source + key, "drop": True})
        return Tree(leaves).pipe(parse_rules({"rules": rules}))

    def test_complete_modules_can_be_stacked(self):
        built = self.remapped(3, drop=False)
        assert {path: array.shape for path, array in built.arrays.items()} == {
            ("all.weight_packed",): (2, 4, 4),
            ("all.weight_scale",): (2, 4, 2),
            ("all.weight_shape",): (2, 2),
        }

    @pytest.mark.parametrize("drop", [True, False])
    @pytest.mark.parametrize("stacked", [1, 2])
    def test_incomplete_modules_cannot_be_stacked(self, stacked, drop):
        with pytest.raises(MappingError, match="each module completely"):
            self.remapped(stacked, drop=drop)


def quantized_maxtext(tree: Tree, kind: str) -> Tree:
    """A MaxText tree with its matrices as FP8-native runs, AQT and Qwix store them."""
    float8, float32 = DTYPES["float8_e4m3fn"], DTYPES["float32"]
    leaves = {}
    for path, array in tree.items():
        if path[-1] != "kernel" or "decoder" not in path:
            leaves[path] = array
            continue
        shape = tree.arrays[path].shape
        scale = stored(noise((1, *shape[1:]), float32), float32)
        whole = stored(noise(shape, DTYPES["int8"]), DTYPES["int8"])
        if kind.startswith("fp8"):
            leaves[path] = stored(noise(shape, float8), float8)
            # MaxText stacks those of whole kernels on the first axis, wherever kernels have their layers.
            each = stored(noise(shape[1:2], float32), float32) if kind.endswith("tensor") else scale
            leaves[*path[:-1], "kernel_scale"] = each
        elif kind == "aqt":
            frozen = (*path[:-1], "AqtDotGeneral_0", "qrhs", "frozen")
            leaves |= {(*frozen, "qvalue"): whole, (*frozen, "scale", 0): scale}
        else:
            leaves |= {(*path, "qvalue"): whole, (*path, "scale"): scale}
    return Tree(leaves, tree.metadata)


class TestMaxText:
    @pytest.mark.parametrize("kind", ["fp8", "fp8 per tensor", "aqt", "qwix"])
    def test_modules_split_and_join(self, kind, tmp_path):
        plain = ckpttools.open(convert(tmp_path / "plain", "qwen3"))
        save(quantized_maxtext(plain, kind), tmp_path / "source", "orbax")
        run("unstack", tmp_path / "source", tmp_path / "apart")
        run("stack", tmp_path / "apart", tmp_path / "together")
        expected = bytes_of(tmp_path / "source")
        assert bytes_of(tmp_path / "together") == expected
        apart = ckpttools.open(tmp_path / "apart")
        result = find_weights({dotted(path): array for path, array in apart.arrays.items()})
        assert result and all(item.scales for item in result.values())
        name = next(name for name in expected if name.endswith(("scale", "scale.0")) and "mlp" in name)
        first = name.replace("decoder.layers", "decoder.layers_1")
        whole = {dotted(p): item for p, item in ckpttools.open(tmp_path / "source").arrays.items()}[name]
        second = np.ascontiguousarray(np.moveaxis(np.asarray(whole.read()), whole.ndim > 1, 0)[1])
        assert bytes_of(tmp_path / "apart")[first][2] == second.tobytes()
        run("convert", "maxtext-to-hf", tmp_path / "source", tmp_path / "hf", code=3)
        run("select", tmp_path / "source", tmp_path / "part", "--drop", "*scale*", code=3)
        assert not (tmp_path / "hf").exists()
        assert not (tmp_path / "part").exists()


SAID = {"quantization_config": {"quant_method": "somebody's"}}


def arrays_of(dtypes: dict[str, str], rank: int = 2) -> Tree:
    return Tree({(n,): stored(noise((4,) * rank, DTYPES[d]), DTYPES[d]) for n, d in dtypes.items()})


class TestUnknownSchemes:
    """Where the configuration says that weights are quantized, and no name tells how."""

    NORM: ClassVar = {"m.norm.weight": "bfloat16", "m.down.weight": "bfloat16"}

    @pytest.mark.parametrize("weight", ["m.up.weight.data.codes", "m.up.codes"])
    def test_nested_arrays_belong_to_their_module(self, weight):
        top = weight.removesuffix(".data.codes").removesuffix(".codes")
        sides = [f"{top}.meta.table", f"{top}.a.b.table", f"{top}.zero.a.b.c"]
        tree = arrays_of({weight: "int32", **dict.fromkeys(sides, "float16"), **self.NORM})
        tree = tree.with_metadata(config=SAID)
        for name in (weight, *sides):
            with pytest.raises(MappingError, match="each module completely"):
                tree.pipe(Select(drop=[name]))
        assert len(tree.pipe(Select(drop=[f"{top}.*"]))) == 2
        assert len(tree.pipe(Select(drop=["m.norm.*"]))) == len(tree) - 1

    def test_array_beyond_a_layer_is_not_a_module(self):
        names = {"m.order": "int32", "m.mlp.up.weight": "bfloat16", "m.mlp.up.bias": "bfloat16"}
        tree = arrays_of(names).with_metadata(config=SAID)
        assert len(tree.pipe(Select(drop=["m.order"]))) == 2

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8", "int32"])
    @pytest.mark.parametrize("rank", [1, 2])
    def test_lone_quantized_array_is_not_cast(self, dtype, rank):
        """Nothing can be parted from it; its numbers may mean anything, beside known weights as well."""
        alone = arrays_of({"m.down.blob": dtype}, rank)
        for beside in ({}, {"m.up.qweight": "int32", "m.up.scales": "float16"}):
            tree = Tree({**arrays_of({**beside, **self.NORM}).leaves, **alone.leaves})
            tree = tree.with_metadata(config=SAID)
            with pytest.raises(FormatError, match="cannot be cast"):
                tree.pipe(CastMap({"m.down.blob": "bfloat16"}, force=True))
            assert len(tree.pipe(CastMap({"m.norm.weight": "float32"}))) == len(tree) if beside else True
            if dtype == "float8_e4m3fn":
                with pytest.raises(FormatError, match="cannot be cast"):
                    tree.pipe(CastTo("float32"))


def test_scale_belongs_to_one_weight():
    names = ["m.up", "m.up_scale", "m.down", "m.down_scale", "m.up_order"]
    scales = {"m.up": ("m.up_scale",), "m.down": ("m.down_scale",)}
    assert auxiliary_tensors(names, scales, scales) == {"m.up": ("m.up_order",)}


def test_many_weights_with_many_arrays_are_fast():
    """What all of them have in common is found once: it took 31 s."""
    one = {dtype: stored(noise((1, 1), DTYPES[dtype]), DTYPES[dtype]) for dtype in ("int8", "float32")}
    arrays = {f"m.w{i}": one["int8"] for i in range(200)}
    arrays |= {f"m.w{i}_scale": one["float32"] for i in range(200)}
    arrays |= {f"m.odd{i}": one["float32"] for i in range(5_000)} | {"m.w7_table": one["float32"]}
    start = time.process_time()
    result = find_weights(arrays, SAID)
    assert time.process_time() - start < 3
    assert len(result["m.w7"].others) == 5_001
    assert result["m.w0"].others == result["m.w1"].others == tuple(f"m.odd{i}" for i in range(5_000))


def test_large_module_is_fast():
    """Each array is held against those that share its rarest word; of 1 MB of header it took 90 s."""
    one = {
        dtype: stored(noise((1, 1), DTYPES[dtype]), DTYPES[dtype]) for dtype in ("float8_e4m3fn", "float32")
    }
    start = time.process_time()
    for end in ("_scale", "_of_scale"):
        weights = {f"a.w{i}": one["float8_e4m3fn"] for i in range(3000)}
        result = find_weights({**weights, **{f"{name}{end}": one["float32"] for name in weights}})
        assert len(result) == 3000
        assert all(item.scales == (f"{name}{end}",) for name, item in result.items())
    assert time.process_time() - start < 5
