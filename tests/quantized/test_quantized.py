"""Quantized weights: nothing parts them from their scales, and nothing takes their numbers for weights."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.command_line import examine, run
from support.golden_data import FAMILIES, convert
from support.internals import Convert, MapArrays, Stored, dotted, elementwise, parse_rules
from support.locations import GOLDEN

import ckpttools
from ckpttools import (
    DTYPES,
    CastMap,
    CastTo,
    CheckpointError,
    FormatError,
    MappingError,
    Select,
    ToHuggingFace,
    ToMaxText,
    Tree,
    plan_to_huggingface,
    plan_to_maxtext,
    save,
)
from ckpttools.array.nodes import Dequantized, distinct_arrays
from ckpttools.quantized.config import scheme
from ckpttools.quantized.weights import QuantizedWeight, find_weights
from ckpttools.testing.strategies import noise, stored

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}


def fp8_arrays(family: str, *, scales: bool = True) -> dict[str, np.ndarray]:
    """A golden model with its matrices in float8."""
    arrays = {}
    for name, array in load_file(GOLDEN / family / "hf" / "model.safetensors").items():
        quantize = name.endswith("proj.weight") or ("experts" in name and array.ndim == 3)
        arrays[name] = array.astype(ml_dtypes.float8_e4m3fn) if quantize else array
        if quantize and scales:
            rows, columns = (-(-length // 128) for length in array.shape[-2:])
            arrays[f"{name}_scale_inv"] = np.full((*array.shape[:-2], rows, columns), 0.5, np.float32)
    return arrays


def write(directory: Path, family: str, arrays: dict[str, np.ndarray], *, declared: bool = True) -> Path:
    """These arrays with a golden model's configuration, which says that they are float8 in blocks."""
    config = json.loads((GOLDEN / family / "hf" / "config.json").read_bytes())
    config |= {"quantization_config": FP8} if declared else {}
    directory.mkdir()
    save_file(arrays, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def fp8(directory: Path, family: str, *, scales: bool = True, declared: bool = True) -> Path:
    return write(directory, family, fp8_arrays(family, scales=scales), declared=declared)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return fp8(tmp_path_factory.mktemp("fp8") / "llama", "llama3.1")


def array_of(name: str, *shape: int) -> Stored:
    return stored(noise(shape, DTYPES[name]), DTYPES[name])


class TestToMaxText:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("declared", [True, False])
    def test_every_family_refuses_weights_without_scales(self, tmp_path, family, declared):
        bare = fp8(tmp_path / "bare", family, scales=False, declared=declared)
        with pytest.raises(FormatError, match="meaningless without their scales") as error:
            plan_to_maxtext(bare)
        assert "drop" not in str(error.value)
        assert "float8_e4m3fn" in str(error.value)

    def test_message_states_the_scheme_and_lists_all(self, tmp_path):
        arrays = fp8_arrays("llama3.1")
        lost = [name for name in arrays if "up_proj" in name and name.endswith("_scale_inv")]
        left = {name: array for name, array in arrays.items() if name not in lost}
        source = write(tmp_path / "source", "llama3.1", left)
        done = run("convert", "hf-to-maxtext", source, tmp_path / "out", code=3)
        assert "fp8, e4m3 in blocks of 128 x 128 (quantization_config)" in done
        assert "up_proj.weight: float8_e4m3fn, without its scale (weight_scale_inv" in " ".join(done.split())
        assert "{0..3}" in done
        assert not (tmp_path / "out").exists()

    def test_stale_scales_of_cast_weights_are_reported(self, tmp_path):
        """What a cast made that knew nothing of scales."""
        plain = {name: array.astype(ml_dtypes.bfloat16) for name, array in fp8_arrays("qwen3").items()}
        source = write(tmp_path / "source", "qwen3", plain)
        with pytest.raises(FormatError, match="weight_scale_inv"):
            plan_to_maxtext(source, ToMaxText(drop=("*_scale_inv",)))

    def test_integers_are_not_weights_under_any_name(self, tmp_path):
        arrays = load_file(GOLDEN / "gpt-oss" / "hf" / "model.safetensors")
        whole = {name: a.astype(np.int8) for name, a in arrays.items() if name.endswith("gate_up_proj")}
        source = write(tmp_path / "source", "gpt-oss", arrays | whole, declared=False)
        with pytest.raises(FormatError, match=r"wi_.*: int8, without its scale"):
            plan_to_maxtext(source)

    def test_mxfp4_without_scales_is_refused(self, tmp_path):
        arrays = load_file(GOLDEN / "gpt-oss" / "hf" / "model.safetensors")
        for name in [name for name in arrays if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, rows, columns = arrays.pop(name).shape
            arrays[f"{name}_blocks"] = np.zeros((experts, columns, rows // 32, 16), np.uint8)
        source = write(tmp_path / "source", "gpt-oss", arrays, declared=False)
        config = json.loads((source / "config.json").read_bytes()) | {"quantization_config": MXFP4}
        (source / "config.json").write_text(json.dumps(config))
        with pytest.raises(FormatError, match=r"down_proj_blocks: uint8, without its scale") as error:
            plan_to_maxtext(source)
        assert error.value.got == "mxfp4 (quantization_config)"

    def test_dequantized_model_with_stale_config_is_accepted(self, tmp_path):
        arrays = load_file(GOLDEN / "llama3.1" / "hf" / "model.safetensors")
        source = write(tmp_path / "source", "llama3.1", arrays)
        config = json.loads((GOLDEN / "llama3.1" / "hf" / "config.json").read_bytes())
        done = " ".join(run("convert", "hf-to-maxtext", source, tmp_path / "maxtext").split())
        assert "config.json declares fp8, e4m3 in blocks of 128 x 128, but no weight is quantized" in done
        for command, there in (("maxtext-to-hf", "maxtext"), ("to-safetensors", "source")):
            done = run("convert", command, tmp_path / there, tmp_path / command)
            assert "config.json: quantization_config is left out" in done
            assert json.loads((tmp_path / command / "config.json").read_bytes()) == config


class TestToHuggingFace:
    @pytest.mark.parametrize("scales", [True, False])
    def test_maxtext_float8_weights_are_handled(self, tmp_path, scales):
        tree = ckpttools.open(convert(tmp_path / "maxtext", "qwen3"))
        leaves = dict(tree.leaves)
        for path, array in tree.arrays.items():
            if path[-1] == "kernel":
                float8 = DTYPES["float8_e4m3fn"]
                leaves[path] = stored(noise(array.shape, float8), float8)
                if scales:
                    leaves[(*path[:-1], "kernel_scale")] = stored(
                        noise((1,), DTYPES["float32"]), DTYPES["float32"]
                    )
        save(Tree(leaves, tree.metadata), tmp_path / "fp8", "orbax")
        # With one scale for four stacked layers, its meaning is unknown.
        expected = "cannot be converted as they are" if scales else "meaningless without their scales"
        with pytest.raises(FormatError, match=expected) as error:
            plan_to_huggingface(tmp_path / "fp8", ToHuggingFace(like=GOLDEN / "qwen3" / "hf"))
        assert ("has scales of an unexpected shape" in str(error.value)) == scales

    def test_quantized_arrays_are_carried_with_scales(self, tmp_path):
        convert(tmp_path / "maxtext", "deepseek3")
        arrays = fp8_arrays("deepseek3")
        first = {name: array for name, array in arrays.items() if ".0." in name and "down_proj" in name}
        extra = {name.replace("layers.0", "layers.5"): array for name, array in first.items()}
        like = write(tmp_path / "like", "deepseek3", arrays | extra)
        for carry in (True, False):
            out = tmp_path / f"out-{carry}"
            plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(like=like, carry=carry)).run(out)
            assert "quantization_config" not in json.loads((out / "config.json").read_bytes())
        there = {dotted(path): array for path, array in ckpttools.open(tmp_path / "out-True").arrays.items()}
        carried = {name: array for name, array in there.items() if "layers.5" in name}
        codes = {n: array for n, array in extra.items() if "layers.5" in n and not n.endswith("_scale_inv")}
        assert carried.keys() == codes.keys()
        for name, array in codes.items():
            halves = array.astype(np.float32) * 0.5
            assert (carried[name].read() == halves.astype(ml_dtypes.bfloat16)).all()
        bare = {n: item for n, item in (arrays | extra).items() if "5.mlp.down_proj.weight_" not in n}
        like = write(tmp_path / "bare", "deepseek3", bare)
        with pytest.raises(FormatError, match=r"layers\.5\..*without its scale"):
            plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(like=like, carry=True))


# A weight and its scales, as each scheme names and stores them.
SCHEMES = {
    "block float8": {"weight": "float8_e4m3fn", "weight_scale_inv": "float32"},
    "deepseek-v4 experts": {"weight": "int8", "scale": "uint8"},
    "compressed float8": {"weight": "float8_e4m3fn", "weight_scale": "bfloat16"},
    "pack-quantized": {"weight_packed": "int32", "weight_scale": "bfloat16"},
    "nvfp4": {"weight": "uint8", "weight_scale": "float8_e4m3fn", "weight_scale_2": "float32"},
    "gptq": {"qweight": "int32", "scales": "float16"},
    "bitsandbytes": {"weight": "int8", "SCB": "float32"},
    "maxtext": {"kernel": "float8_e4m3fn", "kernel_scale": "float32"},
    "comfyui": {"weight": "float8_e4m3fn", "scale_weight": "float32"},
    "of channels": {"weight": "float8_e4m3fn", "weight_scales": "bfloat16"},
    "qwix": {"kernel.qvalue": "int8", "kernel.scale": "float32"},
    "aqt": {"qrhs.frozen.qvalue": "int8", "qrhs.frozen.scale.0": "bfloat16"},
    "w_q": {"w_q": "int8", "w_q_scale": "float32"},
    "hqq": {"W_q": "uint8", "scale": "float16", "zero": "float16"},
    "quanto": {"weight._data": "int8", "weight._scale": "bfloat16"},
    "torchao": {"_weight_qdata": "float8_e4m3fn", "_weight_scale": "float32"},
    "awq": {"qweight": "int32", "qzeros": "int32", "scales": "float16"},
    "nf4": {"weight": "uint8", "weight.absmax": "uint8", "weight.nested_absmax": "float32"},
    "nnx": {"kernel.value": "float8_e4m3fn", "kernel_scale.value": "float32"},
    "other words": {"codes": "uint32", "row_scales": "float16"},
}


def module_of(dtypes: dict[str, str], above: str = "layers.0.up.") -> Tree:
    arrays = {(above + name,): array_of(dtype, 4, 4) for name, dtype in dtypes.items()}
    return Tree({**arrays, ("norm.weight",): array_of("bfloat16", 4, 4)})


@pytest.mark.parametrize("name", SCHEMES)
class TestTransforms:
    def test_scales_are_never_left_out(self, name):
        weight, *scales = SCHEMES[name]
        tree = module_of(SCHEMES[name])
        assert list(find_weights({dotted(p): a for p, a in tree.arrays.items()})) == [f"layers.0.up.{weight}"]
        for scale in scales:
            with pytest.raises(MappingError, match="would lose their scales"):
                tree.pipe(Select(drop=[f"*up.{scale}"]))
        assert len(tree.pipe(Select(drop=["*norm*"]))) == 1 + len(scales)
        assert len(tree.pipe(Select(["*norm*"]))) == 1

    def test_module_names_are_grouped(self, name):
        _, *scales = SCHEMES[name]
        tree = module_of(SCHEMES[name])
        renamed = tree.pipe(MapArrays(lambda path, array: path.replace("layers.0.up", "layers/0/wi")))
        assert len(renamed) == len(tree)
        with pytest.raises(MappingError, match="would lose their scales"):
            tree.pipe(MapArrays(lambda path, array: path.replace(f".{scales[0]}", "/far/off")))
        with pytest.raises(MappingError, match="would lose their scales"):
            tree.pipe(MapArrays(lambda path, array: None if path.endswith(f".{scales[0]}") else path))

    def test_quantized_values_are_not_cast(self, name):
        weight = next(iter(SCHEMES[name]))
        tree = module_of(SCHEMES[name])
        with pytest.raises(FormatError, match="quantized weights cannot be cast"):
            tree.pipe(CastMap({f"*up.{weight}": "float32"}, force=True))
        assert tree.pipe(CastMap({"norm*": "float32"})).arrays["norm.weight",].dtype.name == "float32"

    def test_functions_cannot_cast_quantized_weights(self, name):
        weight, *scales = SCHEMES[name]
        tree = module_of(SCHEMES[name])

        def bare(path, array):
            if path.endswith(f".{weight}"):
                return elementwise(array, Convert(DTYPES["float32"]))
            return None if path.endswith(tuple(f".{scale}" for scale in scales)) else path

        with pytest.raises(MappingError, match="would lose their scales"):
            tree.pipe(MapArrays(bare))
        with pytest.raises(MappingError, match="cast from"):
            tree.pipe(MapArrays(lambda path, array: bare(path, array) or path))


# Of the same module, as experts are.
PAIRS = {
    "w_q": ("int8", {"w_q_scale": "float32"}),
    "wi_0": ("float8_e4m3fn", {"wi_0_scale": "float32"}),
    "wi_1": ("float8_e4m3fn", {"wi_1_scale": "float32"}),
    "up_blocks": ("uint8", {"up_scales": "uint8"}),
    "down_blocks": ("uint8", {"down_scales": "uint8"}),
}
KEYS = st.sampled_from(("layers", "0", "1", "scale", "norm_scale", "weight", "zeros", "up", "q_proj", "a"))


MODULES = st.lists(st.lists(KEYS, max_size=3).map("_".join), min_size=1, max_size=4, unique=True)
WHICH = st.sampled_from(sorted(SCHEMES))
WEIGHTS = st.lists(st.sampled_from(sorted(PAIRS)), min_size=1, unique=True)


@st.composite
def quantized_trees(draw):
    """A tree, and the paths of each weight's scales; plain arrays lie between them."""
    modules = draw(MODULES)
    dtypes: dict[str, str] = {}
    scales: dict[str, list[str]] = {}
    for at, module in enumerate(modules):
        # No module lies in another.
        above = f"m{at}.{module.replace('_', '.')}".rstrip(".")
        dtypes |= {f"{above}.rms.scale": "float32", f"{above}.rms.bias": "bfloat16"}
        if draw(st.booleans()):
            weight, *others = scheme = SCHEMES[draw(WHICH)]
            dtypes |= {f"{above}.w.{name}": dtype for name, dtype in scheme.items()}
            scales[f"{above}.w.{weight}"] = [f"{above}.w.{name}" for name in others]
            continue
        for weight in draw(WEIGHTS):
            dtype, others = PAIRS[weight]
            dtypes |= {f"{above}.{weight}": dtype} | {
                f"{above}.{name}": item for name, item in others.items()
            }
            scales[f"{above}.{weight}"] = [f"{above}.{name}" for name in others]
    names = draw(st.permutations(sorted(dtypes)))
    return Tree({(name,): array_of(dtypes[name], 2, 2) for name in names}), scales


def is_whole(array, codes):
    """Whether a weight is as it was, or the numbers that its codes and scales stand for."""
    meant = [item for item in distinct_arrays([array]) if isinstance(item, Dequantized)]
    return array is codes or [item.codes for item in meant] == [codes]


@settings(max_examples=60)
@given(quantized_trees(), st.data())
def test_transforms_keep_weights_with_scales(tree_and_scales, data):
    tree, scales = tree_and_scales
    names = st.sampled_from([name for (name,) in tree.arrays])
    some = st.lists(names, max_size=4, unique=True)
    dtypes = st.sampled_from(("bfloat16", "float32", "float8_e5m2"))
    swapped = dict(data.draw(st.lists(st.tuples(names, names), max_size=2)))
    swapped |= {there: here for here, there in swapped.items()}
    transform = data.draw(
        st.one_of(
            some.map(lambda drop: Select(drop=drop)),
            some.map(lambda keep: Select(keep)),
            dtypes.map(CastTo),
            st.builds(lambda chosen, to: CastMap(dict.fromkeys(chosen, to), force=True), some, dtypes),
            some.map(lambda drop: MapArrays(lambda path, _: None if path in drop else path)),
            some.map(lambda moved: MapArrays(lambda path, _: f"x/{path}/far" if path in moved else path)),
            st.just(MapArrays(lambda path, _: swapped.get(path, path))),
        )
    )
    try:
        built = tree.pipe(transform)
    except CheckpointError:
        return
    names_made = {id(array): dotted(path) for path, array in built.arrays.items()}
    result = find_weights({dotted(path): array for path, array in built.arrays.items()})
    for weight, theirs in scales.items():
        if isinstance(transform, CastTo | CastMap):
            assert is_whole(built.arrays[weight,], tree.arrays[weight,])
            continue
        name = names_made.get(id(tree.arrays[weight,]))
        if name is not None:
            assert {names_made[id(tree.arrays[scale,])] for scale in theirs} <= set(result[name].scales)


@settings(max_examples=30)
@given(quantized_trees())
def test_separated_weights_and_scales_are_detected(tree_and_scales):
    """Each weight may go with its own scales, and every module may have another name."""
    tree, scales = tree_and_scales
    assert {item.name: set(item.scales) for item in found_in(tree).values()} == {
        weight: set(theirs) for weight, theirs in scales.items()
    }
    for weight, theirs in scales.items():
        assert len(tree.pipe(Select(drop=[weight, *theirs]))) == len(tree) - 1 - len(theirs)
    assert len(tree.pipe(MapArrays(lambda path, _: f"model.{path}"))) == len(tree)
    norms = tree.pipe(CastMap({"*.rms.*": "float16"}))
    assert {item.dtype.name for path, item in norms.arrays.items() if ".rms." in path[0]} == {"float16"}


def test_scale_of_another_weight_is_not_used():
    tree = module_of(
        {"up_blocks": "uint8", "up_scales": "uint8", "down_blocks": "uint8", "down_scales": "uint8"}
    )
    with pytest.raises(MappingError, match="up_blocks: without up_scales"):
        tree.pipe(Select(drop=["*up_scales", "*down_blocks"]))


def found_in(tree: Tree) -> dict[str, QuantizedWeight]:
    return find_weights({dotted(path): array for path, array in tree.arrays.items()})


def test_norm_scales_are_not_quantization_scales():
    plain = {"norm.scale": "float8_e4m3fn", "norm.bias": "float8_e4m3fn", "up.kernel": "float8_e4m3fn"}
    for dtypes in (plain, {"scale": "bfloat16", "up.kernel": "int8"}):
        tree = module_of(dtypes)
        assert not any(item.scales for item in found_in(tree).values())
        tree.pipe(CastTo("float32"))


def test_casts_leave_scales_unchanged():
    tree = module_of({"weight": "int8", "weight_scale": "float32"})
    cast = tree.pipe(CastTo("float16"))
    assert cast.arrays["layers.0.up.weight_scale",].dtype.name == "float32"
    assert cast.arrays["norm.weight",].dtype.name == "float16"
    for dtypes, to in (
        ({"weight": "int8", "weight_scale": "float32"}, "bfloat16"),
        ({"weight": "int8", "weight_scale": "float32"}, "float8_e4m3fn"),
        ({"weight": "float4_e2m1fn", "scale": "float8_e8m0fnu"}, "float32"),
    ):
        with pytest.raises(FormatError, match="cannot be cast"):
            module_of(dtypes).pipe(CastMap({"*scale": to}))


@pytest.mark.parametrize("scales", ["", "w_scale.{layer}"])
def test_stacked_weights_keep_their_scales(scales):
    """A rule with axes makes one array of the layers: nothing has its old name then."""
    names = {f"w.{k}": "int8" for k in range(2)} | {f"w_scale.{k}": "float32" for k in range(2)}
    tree = Tree({(name,): array_of(dtype, 4, 4) for name, dtype in names.items()})
    axes = {"axes": "a b", "to-axes": "layer a b"}
    rest = {"to": "all.w_scale", **axes} if scales else {"drop": True}
    rules = [{"from": "w.{layer}", "to": "all.w", **axes}, {"from": "w_scale.{layer}", **rest}]
    remap = parse_rules({"rules": rules})
    if scales:
        assert len(tree.pipe(remap)) == 2
        return
    with pytest.raises(MappingError, match=r"all\.w: int8, without its scale"):
        tree.pipe(remap)


def test_mxfp4_arrays_are_not_cast():
    dtypes = {"mlp.experts.down_proj_blocks": "uint8", "mlp.experts.down_proj_scales": "uint8"}
    tree = module_of(dtypes)
    # Only floating-point arrays are cast, and these are none.
    assert tree.pipe(CastTo("float32")).arrays["norm.weight",].dtype.name == "float32"
    for pattern in ("*_scales", "*_blocks"):
        with pytest.raises(FormatError, match="cannot be cast"):
            tree.pipe(CastMap({pattern: "float32"}, force=True))
    with pytest.raises(MappingError, match=r"down_proj_blocks: without .*down_proj_scales"):
        tree.pipe(Select(drop=["*_scales"]))


def test_unscaled_float8_is_cast():
    tree = module_of({"weight": "float8_e4m3fn"})
    assert tree.pipe(CastTo("bfloat16")).arrays["layers.0.up.weight",].dtype.name == "bfloat16"
    declared = tree.with_metadata(config={"quantization_config": FP8})
    with pytest.raises(FormatError, match="without its scale"):
        declared.pipe(CastTo("bfloat16"))


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (FP8, "fp8, e4m3 in blocks of 128 x 128"),
        (MXFP4, "mxfp4"),
        (INT4, "compressed-tensors, pack-quantized, int4 in groups of 32"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq, 4 bits in groups of 128"),
        ({"weight_block_size": None, "quant_method": "fp8"}, "fp8"),
        ({"anything": 1}, "of no named method"),
        (None, ""),
    ],
)
def test_schemes_have_descriptions(declared, words):
    assert scheme(declared) == words


class TestCommands:
    def test_separating_scales_exits_with_3(self, llama, tmp_path):
        (tmp_path / "rules.toml").write_text('[[rename]]\nfrom = "{a}_scale_inv"\nto = "{a}_other"\n')
        for words in (
            ("select", llama, tmp_path / "out", "--drop", "*_scale_inv"),
            ("cast", llama, tmp_path / "out", "--dtype", "float8_e5m2"),
            ("convert", "to-orbax", llama, tmp_path / "out", "--drop", "*_scale_inv"),
            ("strip-optimizer", llama, tmp_path / "out", "--drop", "*_scale_inv"),
            ("convert", "to-safetensors", llama, tmp_path / "out", "--dtype", "float8_e5m2"),
        ):
            done = run(*words, code=3)
            assert "fp8, e4m3 in blocks of 128 x 128" in done
        assert not (tmp_path / "out").exists()

    def test_converted_weights_keep_their_scales(self, llama, tmp_path):
        run("convert", "to-orbax", llama, tmp_path / "orbax")
        run("convert", "to-safetensors", tmp_path / "orbax", tmp_path / "back")
        assert set(ckpttools.open(tmp_path / "back")) == set(ckpttools.open(llama))
        run("cast", llama, tmp_path / "cast", "--dtype-map", "*norm*=float32")
        assert json.loads((tmp_path / "cast" / "config.json").read_bytes()) == json.loads(
            (llama / "config.json").read_bytes()
        )


class TestDoctor:
    def findings(self, directory):
        result = examine(directory).findings
        return [item for item in result if item.check == "quantization"]

    def test_healthy_quantized_model_is_described(self, llama):
        (finding,) = self.findings(llama)
        assert finding.level == "info"
        assert "fp8, e4m3 in blocks of 128 x 128; 28 weights, each with its scales" in finding.what
        assert not self.findings(GOLDEN / "llama3.1" / "hf")

    def test_missing_scales_are_reported(self, tmp_path):
        arrays = fp8_arrays("llama3.1")
        scale = next(name for name in arrays if name.endswith("_scale_inv"))
        del arrays[scale]
        (finding,) = self.findings(write(tmp_path / "source", "llama3.1", arrays))
        assert finding.level == "error"
        assert "1 of 28 quantized weights have no scale" in finding.what
        assert scale.removesuffix("_scale_inv") in finding.what

    def test_config_without_quantization_is_accepted(self, tmp_path):
        (finding,) = self.findings(fp8(tmp_path / "unsaid", "qwen3", declared=False))
        assert finding.level == "error"
        assert "has no quantization_config" in finding.what
        (finding,) = self.findings(fp8(tmp_path / "bare", "qwen3", declared=False, scales=False))
        assert finding.level == "warning"

    def test_config_declaring_missing_quantization_is_reported(self, tmp_path):
        arrays = load_file(GOLDEN / "llama3.1" / "hf" / "model.safetensors")
        (finding,) = self.findings(write(tmp_path / "source", "llama3.1", arrays))
        assert finding.level == "warning"
        assert "but no weight is quantized" in finding.what

    def test_float8_stated_by_config_is_plain(self, tmp_path):
        run("cast", GOLDEN / "qwen3" / "hf", tmp_path / "out", "--dtype", "float8_e4m3fn")
        assert json.loads((tmp_path / "out" / "config.json").read_bytes())["dtype"] == "float8_e4m3fn"
        assert not self.findings(tmp_path / "out")


def test_messages_do_not_suggest_dropping_scales(llama):
    """Also where rows are held against arrays without a look at the configuration."""
    from ckpttools.model_families.registry import family_named

    table = family_named("llama").table(json.loads((llama / "config.json").read_bytes()), "config.json")
    arrays = {dotted(path): array for path, array in ckpttools.open(llama).arrays.items()}
    with pytest.raises(CheckpointError) as error:
        table.to_left(arrays)
    assert "--drop" not in str(error.value)
    assert "meaningless without" in str(error.value)
