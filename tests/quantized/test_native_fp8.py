"""FP8 weights in MaxText with their scales beside them, and back; refused where blocks do not allow it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import run, succeed
from support.hf_models import write_llama
from support.internals import Fp8BlockEncoder, Size, Table, by_name, dotted, parse, quantized_view, row
from support.locations import GOLDEN, GOLDEN_0_2_5

import ckpttools
from ckpttools import DTYPES, FormatError, Metadata, UsageError
from ckpttools.maxtext.config.observed_model import StoredFp8
from ckpttools.maxtext.native_fp8 import CODES, grid_mismatch_test
from ckpttools.maxtext.scale_grids import scale_grids
from ckpttools.quantized import scale_checks
from ckpttools.testing.strategies import stored

BLOCK = 16
ROWS = (
    "w: embed heads head_dim <-> x: (heads head_dim) embed",
    "w: heads head_dim embed <-> x: embed (heads head_dim)",
    "w: embed heads (pair half) <-> x: (heads half pair) embed",
    "w_{part}: embed mlp <-> x: (part mlp) embed",
    "w_{part}: embed mlp <-> x: (mlp part) embed",
    "w: expert embed mlp <-> x.{expert}: mlp embed",
    "w: embed layer mlp <-> x.{layer}: mlp embed",
)


def expanded(grid: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The scale of each element."""
    for axis, length in enumerate(shape):
        grid = np.repeat(grid, -(-length // grid.shape[axis]), axis).take(range(length), axis)
    return grid


@given(text=st.sampled_from(ROWS), block=st.sampled_from((1, 2, 3, 4, 8)), data=st.data())
def test_elements_keep_their_scale_or_are_refused(text, block, data):
    built = row(text)
    lengths = {axis: data.draw(st.sampled_from((1, 2, 3, 4, 6, 8)), axis) for axis in built.left.axes}
    table = Table((built,), {axis: Size(length, "the test") for axis, length in lengths.items()})
    shape = built.right.shape(lengths)
    scales, whole = {}, {}
    for number, key in enumerate(built.right.keys(lengths)):
        grid = np.arange(np.prod(counts := [-(-n // block) for n in shape]), dtype=np.float32).reshape(counts)
        grid += 1000 * number
        scales[key] = stored(grid, DTYPES["float32"])
        of_each = np.repeat(np.repeat(grid, block, 0), block, 1)[: shape[0], : shape[1]]
        whole[key] = stored(np.ascontiguousarray(of_each), DTYPES["float32"])
    result = scale_grids(table, whole, scales, (block, block))
    if result.problems:
        assert not result.scales and result.problems[0].startswith(str(built.left.key))
        return
    expected = table.to_left(whole).arrays
    assert result.scales.keys() == expected.keys()
    for key, array in expected.items():
        assert (expanded(result.scales[key].read(), array.shape) == array.read()).all()
    back = scale_grids(table, expected, result.scales, (block, block), inverse=True)
    assert not back.problems
    assert all((back.scales[key].read() == item.read()).all() for key, item in scales.items())


@pytest.mark.parametrize(
    ("text", "lengths", "grid", "why"),
    [
        (ROWS[0], {"embed": 8, "heads": 2, "head_dim": 8}, (2, 2, 2), ""),
        # A block has two heads, and MaxText a scale for each element of such short ones.
        (ROWS[0], {"embed": 8, "heads": 2, "head_dim": 2}, (2, 2, 2), ""),
        (ROWS[0], {"embed": 2, "heads": 2, "head_dim": 8}, (2, 2, 2), ""),
        (ROWS[0], {"embed": 8, "heads": 4, "head_dim": 6}, (2, 4, 3), "MaxText has 1 scale on heads 4"),
        (ROWS[0], {"embed": 8, "heads": 8, "head_dim": 4}, (2, 8, 1), "MaxText has 2 scales on heads 8"),
        (ROWS[0], {"embed": 10, "heads": 2, "head_dim": 8}, (5, 2, 2), "MaxText has 2 scales on embed 10"),
        (ROWS[2], {"embed": 8, "heads": 2, "half": 2, "pair": 4}, (2, 2, 8), "2 scales on pair half 8"),
        (ROWS[4], {"embed": 8, "part": 2, "mlp": 8}, (2, 8), "MaxText has 2 scales on mlp 8"),
    ],
)
def test_fp8_models_accept_matching_grids(text, lengths, grid, why):
    built = row(text)
    table = Table((built,), {axis: Size(length, "the test") for axis, length in lengths.items()})
    shape = built.right.shape(lengths)
    array = stored(np.zeros(shape, np.uint8), DTYPES["float8_e4m3fn"])
    scales = stored(np.ones([-(-n // 4) for n in shape], np.float32), DTYPES["float32"])
    result = scale_grids(table, {"x": array}, {"x": scales}, (4, 4), fits=grid_mismatch_test(4))
    assert {scale.shape for scale in result.scales.values()} == {grid} and not result.problems
    assert (why in result.misfits[0]) if why else not result.misfits


def test_scales_are_never_as_large_as_the_weight():
    built = row(ROWS[0])
    sizes = {"embed": 129, "heads": 3, "head_dim": 43}
    table = Table((built,), {axis: Size(length, "the test") for axis, length in sizes.items()})
    array = stored(np.zeros((129, 129), np.uint8), DTYPES["float8_e4m3fn"])
    grid = stored(np.ones((2, 2), np.float32), DTYPES["float32"])
    result = scale_grids(table, {"x": array}, {"x": grid}, (128, 128))
    assert "the last block is smaller" in result.problems[0] and not result.scales


def quantized(
    directory: Path, *, skipped: str = "nothing", block: int | None = BLOCK, **config: object
) -> Path:
    """A tiny Llama with FP8 weights; in blocks, or with one scale each."""
    tensors = write_llama(directory, **config)
    leaves = {}
    for name, tensor in tensors.items():
        if "_proj." in name and skipped not in name:
            encoder = Fp8BlockEncoder(block, block) if block else Fp8BlockEncoder(1 << 20, 1 << 20)
            scales = encoder.scales(tensor)
            leaves[name] = encoder.codes(tensor, scales), "float8_e4m3fn"
            leaves[f"{name}_scale_inv"] = scales.view("<f4").reshape(scales.shape if block else ()), "float32"
        else:
            leaves[name] = tensor, "bfloat16"
    built = {
        (name,): stored(item.view(DTYPES[dtype].numpy), DTYPES[dtype])
        for name, (item, dtype) in leaves.items()
    }
    declared = json.loads((directory / "config.json").read_bytes())
    declared["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [block, block] if block else None,
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }
    (directory / "model.safetensors").unlink()
    tree = ckpttools.Tree(built)
    ckpttools.convert(tree, directory.with_name("weights"), format="safetensors")
    for file in directory.with_name("weights").glob("*.safetensors*"):
        file.rename(directory / file.name)
    (directory / "config.json").write_text(json.dumps(declared))
    return directory


def arrays(location: Path) -> dict[str, bytes]:
    return {
        dotted(path): array.read().tobytes() for path, array in ckpttools.open(parse(location)).arrays.items()
    }


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("block", [BLOCK, None])
def test_remap_round_trip_restores_the_tree(tmp_path, scan, block):
    source = quantized(tmp_path / "hf", block=block)
    receipt = ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep", scan=scan)
    native = ckpttools.open(parse(tmp_path / "native")).arrays
    kernels = {dotted(path): item for path, item in native.items()}
    query = f"params.params.decoder.layers{'' if scan else '_3'}.self_attention.query.kernel"
    grid = {True: (4, 4, 4, 1), False: (4, 4, 1)}[scan] if block else (4,) * scan
    assert kernels[query].dtype.name == "float8_e4m3fn" and kernels[f"{query}_scale"].shape == grid
    # Times 1/4, the root of the length of a head: a power of two, of the scales alone.
    assert receipt.arrays == len(native)
    ckpttools.maxtext_to_hf(tmp_path / "native", tmp_path / "back")
    assert arrays(tmp_path / "back") == arrays(source)
    built, own = (json.loads((item / "config.json").read_bytes()) for item in (tmp_path / "back", source))
    assert built == own


@pytest.mark.parametrize("block", [BLOCK, None])
def test_dequantizing_during_or_after_conversion_is_equal(tmp_path, block):
    """Of as many layers as heads, too: of which of both a kernel has one scale each other kernels tell."""
    source = quantized(tmp_path / "hf", block=block)
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    ckpttools.hf_to_maxtext(source, tmp_path / "plain", dtype="float32")
    ckpttools.cast(tmp_path / "native", tmp_path / "cast", dtype="float32")
    assert arrays(tmp_path / "cast") == arrays(tmp_path / "plain")
    ckpttools.maxtext_to_hf(tmp_path / "native", tmp_path / "a", dtype="bfloat16")
    ckpttools.cast(source, tmp_path / "b", dtype="bfloat16")
    assert arrays(tmp_path / "a") == arrays(tmp_path / "b")
    assert "quantization_config" not in json.loads((tmp_path / "a" / "config.json").read_bytes())


def test_dtype_applies_to_unquantized_arrays(tmp_path):
    source = quantized(tmp_path / "hf")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep", dtype="float32")
    leaves = ckpttools.open(parse(tmp_path / "native")).arrays
    result = {"/".join(map(str, path[-2:])): item.dtype.name for path, item in leaves.items()}
    assert result["query/kernel"] == "float8_e4m3fn" and result["query/kernel_scale"] == "float32"
    assert result["decoder_norm/scale"] == result["token_embedder/embedding"] == "float32"
    ckpttools.maxtext_to_hf(tmp_path / "native", tmp_path / "back", quantized="keep", dtype="bfloat16")
    assert arrays(tmp_path / "back") == arrays(source)


def test_carried_weights_keep_their_scales(tmp_path):
    model = shutil.copytree(GOLDEN_0_2_5 / "qwen3.5-fp8" / "hf", tmp_path / "hf")
    tree = ckpttools.open(parse(model))
    names = {dotted(path): item for path, item in tree.arrays.items()}
    module = "model.language_model.layers.0.mlp.shared_expert.up_proj"
    more = {f"mtp.layers.0.up_proj{end}": names[module + end] for end in (".weight", ".weight_scale_inv")}
    built = ckpttools.Tree({(name,): item for name, item in {**names, **more}.items()}, tree.metadata)
    options = {"quantized": "keep", "carry": True, "text_only": True}
    ckpttools.hf_to_maxtext(built, tmp_path / "native", **options)
    for dtype in (None, "bfloat16"):
        location = tmp_path / f"back-{dtype}"
        ckpttools.maxtext_to_hf(tmp_path / "native", location, quantized="keep", dtype=dtype)
        back = arrays(location)
        assert {name: back[name] for name in more} == {
            name: item.read().tobytes() for name, item in more.items()
        }


SCALE = "params.params.decoder.layers.mlp.wi_0.kernel_scale"
DAMAGES = {
    "nan": (lambda scales: scales * np.float32([1, np.nan, 1]), "error", "are damaged"),
    "negative": (lambda scales: -scales, "warning", "zero or negative"),
    "another grid": (lambda scales: scales[:2], "error", "do not fit"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_doctor_checks_maxtext_scales(tmp_path, damage):
    source = quantized(tmp_path / "hf", block=None, num_hidden_layers=3)
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    sound = ckpttools.doctor(tmp_path / "native").findings
    (declared,) = (item for item in sound if item.check == "native-fp8")
    assert (declared.level, declared.what) == ("info", "7 weights in FP8, each with its scales")
    tree = ckpttools.open(parse(tmp_path / "native"))
    changed, level, words = DAMAGES[damage]
    leaves = dict(tree.arrays)
    (path,) = (leaf for leaf in leaves if dotted(leaf) == SCALE)
    leaves[path] = stored(changed(leaves[path].read()).view(np.uint32), leaves[path].dtype)
    ckpttools.convert(ckpttools.Tree(leaves, tree.metadata), tmp_path / "damaged", format="orbax")
    result = ckpttools.doctor(tmp_path / "damaged")
    assert [
        finding.level for finding in result.findings if words in finding.what and SCALE in finding.what
    ] == [level]
    assert result.healthy == (level != "error")
    if damage == "nan":
        with pytest.raises(FormatError, match="kernel_scale: nan"):
            ckpttools.maxtext_to_hf(tmp_path / "damaged", tmp_path / "never", like=source)
    if damage == "negative":
        for way in ("keep", "dequantize"):
            back = tmp_path / f"back-{way}"
            plan = ckpttools.maxtext_to_hf.plan(tmp_path / "damaged", back, like=source, quantized=way)
            assert "zero or negative" in " ".join(plan.plan.notes.remarks)
        ckpttools.maxtext_to_hf(tmp_path / "damaged", tmp_path / "hf-damaged", like=source, quantized="keep")
        plan = ckpttools.hf_to_maxtext.plan(tmp_path / "hf-damaged", tmp_path / "again", quantized="keep")
        assert "zero or negative" in " ".join(plan.plan.notes.remarks)


@pytest.mark.parametrize("to_hf", [False, True])
def test_unchanged_scales_are_checked(tmp_path, to_hf):
    """Nothing multiplies by them on the way."""
    source = quantized(tmp_path / "hf", num_hidden_layers=1)
    if to_hf:
        ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    tree = ckpttools.open(tmp_path / "native" if to_hf else source)
    path = next(path for path in tree.arrays if "_scale" in dotted(path))
    scales = np.array(tree.arrays[path].read())
    scales.reshape(-1)[-1] = np.inf
    bad = ckpttools.Tree(
        {**tree.leaves, path: stored(scales.view(np.uint32), tree.arrays[path].dtype)}, tree.metadata
    )
    convert = ckpttools.maxtext_to_hf if to_hf else ckpttools.hf_to_maxtext
    with pytest.raises(FormatError, match=f"{dotted(path)}: inf"):
        convert(bad, tmp_path / "never", quantized="keep")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("to_hf", [False, True])
def test_unchanged_remote_scales_are_checked_while_copying(tmp_path, gcs, to_hf):
    """Where no number of small requests is made before."""
    source = quantized(tmp_path / "hf", num_hidden_layers=1)
    if to_hf:
        ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    tree = ckpttools.open(tmp_path / "native" if to_hf else source)
    path = next(path for path in tree.arrays if "_scale" in dotted(path))
    scales = np.array(tree.arrays[path].read())
    scales.reshape(-1)[-1] = np.nan
    leaves = {**tree.leaves, path: stored(scales.view(np.uint32), tree.arrays[path].dtype)}
    written = tmp_path / "bad"
    ckpttools.convert(
        ckpttools.Tree(leaves, tree.metadata), written, format="orbax" if to_hf else "safetensors"
    )
    if not to_hf:
        shutil.copy(source / "config.json", written)
    files = {
        str(item.relative_to(written)): item.read_bytes() for item in written.rglob("*") if item.is_file()
    }
    far = gcs.filled(files)
    convert, more = (
        (ckpttools.maxtext_to_hf, {"like": source}) if to_hf else (ckpttools.hf_to_maxtext, {"scan": False})
    )
    with pytest.raises(FormatError, match="scales that give values that are not finite"):
        convert(far, tmp_path / "never", quantized="keep", **more)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("scan", [True, False])
def test_out_of_range_scales_are_refused(tmp_path, scan):
    """MaxText's query has 1/4 of the scales, which are sound; four times as much makes no finite numbers."""
    source = quantized(tmp_path / "hf")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep", scan=scan)
    tree = ckpttools.open(tmp_path / "native")
    (path, *_) = (path for path in tree.arrays if dotted(path).endswith("query.kernel_scale"))
    scales = np.array(tree.arrays[path].read())
    scales.reshape(-1)[-1] = 5e35
    leaves = {**tree.leaves, path: stored(scales.view(np.uint32), tree.arrays[path].dtype)}
    large = ckpttools.Tree(leaves, tree.metadata)
    with pytest.raises(FormatError, match=r"query.kernel_scale: 2e\+36"):
        ckpttools.maxtext_to_hf(large, tmp_path / "never", quantized="keep")
    assert not (tmp_path / "never").exists()
    ckpttools.cast(large, tmp_path / "numbers", dtype="bfloat16")


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    limit=st.integers(1, 50),
    data=st.data(),
)
def test_all_damaged_scales_are_listed_for_any_read_batching(counts, limit, data):
    bad = data.draw(st.sets(st.sampled_from(range(len(counts)))))
    arrays, weights = {}, []
    for number, count in enumerate(counts):
        grid = np.ones((count, 1), np.float32)
        if number in bad:
            grid[data.draw(st.integers(0, count - 1))] = np.nan
        shape, name = (count * 4, 4), f"w{number}"
        arrays[f"{name}.weight",] = stored(np.zeros(shape, np.uint8), DTYPES["float8_e4m3fn"])
        arrays[f"{name}.weight_scale_inv",] = stored(grid.view(np.uint32), DTYPES["float32"])
    declared = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    tree = ckpttools.Tree(arrays, Metadata(config={"quantization_config": declared}))
    weights = quantized_view(tree).readable.values()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_checks, "_READ_ELEMENTS", limit)
        result = scale_checks.value_faults(by_name(tree.arrays), weights)
    assert [item.split(":")[0] for item in result.damaged] == [f"w{n}.weight_scale_inv" for n in sorted(bad)]


def test_maxtext_settings_for_fp8_are_reported(tmp_path):
    source = quantized(tmp_path / "hf")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    there, advice, settings = ckpttools.maxtext_config(tmp_path / "native").notes
    assert "7 arrays in FP8 (float8_e4m3fn)" in there and f"weight_block_size={BLOCK} " in settings
    assert f'`ckpttools.cast("{tmp_path / "native"}/0/items", "DST", dtype="bfloat16")`' in advice
    told = run("convert", "hf-to-maxtext", source, tmp_path / "again", "--quantized", "keep")
    assert " ".join(told.split()).count("from_pretrained") == 1


def test_settings_state_the_dtype_of_quantized_values():
    *_, settings = StoredFp8("", 1, ("float8_e5m2",), (16, 16)).notes()
    assert "weight_dtype=float8_e5m2 " in settings
    *_, both = StoredFp8("", 2, tuple(sorted(CODES)), (16, 16)).notes()
    assert "cannot compute with them in FP8" in both
    assert "some are float8_e4m3fn and some float8_e5m2" in both


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["weight_dtype=float8_e4m3fn", f"weight_block_size={BLOCK}"], {}),
        (["weight_dtype=float8_e4m3fn", f"weight_block_size=[{BLOCK},{BLOCK}]"], {}),
        (["weight_dtype=bfloat16", "weight_block_size=64"], {}),
        (["weight_block_size=64"], {}),
        (["weight_dtype=float8_e5m2"], {"weight_dtype": "float8_e4m3fn"}),
        (["weight_dtype=float8_e4m3fn", "weight_block_size=64"], {"weight_block_size": BLOCK}),
        (["weight_dtype=float8_e4m3fn", "weight_block_size="], {"weight_block_size": BLOCK}),
    ],
)
def test_mismatched_fp8_settings_are_reported(settings, expected, tmp_path):
    source = quantized(tmp_path / "hf")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    result = ckpttools.maxtext_config(tmp_path / "native", check=settings).contradictions
    assert {item.name: item.expected for item in result} == expected


def test_fp8_settings_are_printed_only_for_fp8_checkpoints(tmp_path):
    source = quantized(tmp_path / "hf")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    ckpttools.hf_to_maxtext(source, tmp_path / "plain")
    ckpttools.hf_to_maxtext(
        quantized(tmp_path / "odd", intermediate_size=120), tmp_path / "kept", quantized="keep", scan=False
    )
    fp8 = "weight_dtype=float8_e4m3fn"

    def result(location, *settings):
        return {
            e.name: e for e in ckpttools.maxtext_config(tmp_path / location, check=settings).contradictions
        }

    assert "none is FP8" in result("plain", fp8)["weight_dtype"].source
    assert "7 scales on mlp 120" in result("kept", fp8)["weight_dtype"].source
    assert not result("plain", "weight_dtype=bfloat16")
    # Of a whole run, what nobody says is as MaxText has it by default.
    whole = result("native", "base.yml", fp8, f"weight_block_size={BLOCK}")
    assert "norm" in whole["unquantized_modules"].expected and "weight_block_size" not in whole
    left = "unquantized_modules=[" + ",".join(whole["unquantized_modules"].expected) + "]"
    assert "unquantized_modules" not in result("native", "base.yml", fp8, left)


def test_inexactly_scaled_scales_are_reported(tmp_path):
    source = quantized(tmp_path / "hf", head_dim=32, num_attention_heads=2, num_key_value_heads=2)
    inexact = ckpttools.hf_to_maxtext.plan(source, tmp_path / "native", quantized="keep").plan.notes.inexact
    assert ["query" in item.subject and "its scales are" in item.text for item in inexact] == [True]


def test_blocks_across_edges_round_trip_with_a_note(tmp_path):
    source = quantized(tmp_path / "hf", head_dim=4, intermediate_size=120)
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep", scan=False)
    grids = {
        path[-3:]: item.shape for path, item in ckpttools.open(parse(tmp_path / "native")).arrays.items()
    }
    # A block of 16 has four heads of 4; of blocks in 120 columns each 8 have a scale.
    assert grids["self_attention", "out", "kernel_scale"] == (4, 4, 4)
    assert grids["mlp", "wo", "kernel_scale"] == (15, 4)
    *_, told = ckpttools.maxtext_config(tmp_path / "native").notes
    assert "MaxText has 7 scales on mlp 120" in told and "more like this)" in told
    ckpttools.hf_to_maxtext(source, tmp_path / "plain", scan=False, dtype="float32")
    ckpttools.cast(tmp_path / "native", tmp_path / "cast", dtype="float32")
    assert arrays(tmp_path / "cast") == arrays(tmp_path / "plain")
    ckpttools.maxtext_to_hf(tmp_path / "native", tmp_path / "back", quantized="keep")
    assert arrays(tmp_path / "back") == arrays(source)
    tree = ckpttools.open(parse(tmp_path / "native"))
    path = next(path for path in tree.arrays if path[-3:] == ("mlp", "wo", "kernel_scale"))
    scales = tree.arrays[path].read()
    scales[0, 0] *= 2
    other = ckpttools.Tree({**tree.leaves, path: stored(scales, DTYPES["float32"])}, tree.metadata)
    with pytest.raises(FormatError, match="its scales differ within blocks of 16 x 16"):
        ckpttools.maxtext_to_hf(other, tmp_path / "differ", quantized="keep")


def test_all_unsupported_weights_are_listed(tmp_path):
    source = quantized(tmp_path / "hf", skipped="layers.2.mlp.up")
    with pytest.raises(FormatError, match="cannot be converted as they are") as caught:
        ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    assert "only some of the parts of an array are quantized: 3 of 4" in str(caught.value)
    assert caught.value.location == str(source)
    assert "dequantize" in (caught.value.hint or "") and not (tmp_path / "native").exists()
    ckpttools.hf_to_maxtext(source, tmp_path / "plain")


def test_single_layers_may_stay_unquantized(tmp_path):
    source = quantized(tmp_path / "hf", skipped="layers.2.mlp.up")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep", scan=False)
    ckpttools.maxtext_to_hf(tmp_path / "native", tmp_path / "back")
    assert arrays(tmp_path / "back") == arrays(source)


def test_carried_config_is_reported_once(tmp_path):
    source = quantized(tmp_path / "hf")
    run("convert", "hf-to-maxtext", source, tmp_path / "plain")
    told = " ".join(run("quantize", tmp_path / "plain", tmp_path / "out").split())
    assert "INEXACT" in told
    assert "is left out" not in told


def test_cast_to_fp8_next_to_fp8_is_refused(tmp_path):
    """What reads such a model would take the numbers for codes that have lost their scales."""
    source, few = quantized(tmp_path / "hf"), "float8_e4m3fn"
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    for model in (source, tmp_path / "native"):
        for how in ({"dtype": few}, {"dtype": few, "force": True}, {"dtype_map": {"*norm*": few}}):
            with pytest.raises(FormatError, match=r"norm.*: bfloat16 to float8_e4m3fn"):
                ckpttools.cast(model, tmp_path / "never", **how)
    for convert, model in (
        (ckpttools.hf_to_maxtext, source),
        (ckpttools.maxtext_to_hf, tmp_path / "native"),
    ):
        for way in ("keep", "dequantize"):
            with pytest.raises(UsageError, match="has too few bits"):
                convert(model, tmp_path / "never", dtype=few, quantized=way)
    for model in (source, tmp_path / "native"):
        with pytest.raises(UsageError, match="has too few bits") as caught:
            ckpttools.average(model, tmp_path / "never", others=[model], dtype=few)
        assert caught.value.hint == '`ckpttools.quantize("MEAN", "DST")` quantizes the mean'
        with pytest.raises(UsageError, match="has too few bits") as caught:
            ckpttools.load(model, dtype=few)
        assert caught.value.hint == "without `dtype` quantized values and scales are loaded as stored"
    assert not (tmp_path / "never").exists()


def test_invalid_quantized_options_are_refused(tmp_path):
    write_llama(tmp_path / "plain")
    with pytest.raises(UsageError, match="no weight is quantized"):
        ckpttools.hf_to_maxtext(tmp_path / "plain", tmp_path / "native", quantized="keep")
    source = quantized(tmp_path / "hf")
    with pytest.raises(UsageError, match="has no quantized weights"):
        ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep", maxtext="e591f30")
    with pytest.raises(UsageError, match="`quantized` cannot be this"):
        ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="leave")


def test_plan_file_checks_scales(tmp_path):
    """Also those that a row multiplies; no part plans again."""
    source, here, back = quantized(tmp_path / "hf"), tmp_path / "native", tmp_path / "back"
    for number, command in enumerate(
        (
            ("convert", "hf-to-maxtext", source, here, "--quantized", "keep"),
            ("convert", "maxtext-to-hf", here, back),
        )
    ):
        plan = tmp_path / str(number)
        assert "each part plans again" not in run("plan", "-o", plan, *command)
        run("run", plan, "--part", "0/1")
        run("run", plan, "--publish")
    assert arrays(back) == arrays(source)


def test_scales_follow_their_kernels(tmp_path):
    source = quantized(tmp_path / "hf")
    for scan in (True, False):
        ckpttools.hf_to_maxtext(source, tmp_path / f"scan-{scan}", quantized="keep", scan=scan)
    ckpttools.unstack(tmp_path / "scan-True", tmp_path / "unstacked")
    ckpttools.stack(tmp_path / "scan-False", tmp_path / "stacked")
    assert arrays(tmp_path / "unstacked") == arrays(tmp_path / "scan-False")
    assert arrays(tmp_path / "stacked") == arrays(tmp_path / "scan-True")
    run("select", tmp_path / "stacked", tmp_path / "some", "--drop", "*self_attention*")
    refused = run("select", tmp_path / "stacked", tmp_path / "none", "--drop", "*kernel_scale", code=3)
    assert "without kernel_scale" in refused
    assert "no errors, 1 info" in succeed("doctor", tmp_path / "stacked").output


def test_extra_quantization_file_is_kept_only_when_true(tmp_path):
    """Loaders read such a file before config.json."""
    source, name = quantized(tmp_path / "hf"), "hf_quant_config.json"
    (source / name).write_text('{"quantization": {"quant_algo": "FP8"}}')
    told = run("cast", source, tmp_path / "plain", "--dtype", "bfloat16")
    assert f"that are no longer quantized: {name}" in " ".join(told.split())
    ckpttools.select(source, tmp_path / "some", drop="*layers.3*")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    ckpttools.maxtext_to_hf(tmp_path / "native", tmp_path / "back")
    ckpttools.maxtext_to_hf(tmp_path / "native", tmp_path / "back-plain", dtype="bfloat16")
    kept = {
        location: (tmp_path / location / name).exists()
        for location in ("plain", "some", "back", "back-plain")
    }
    assert kept == {"plain": False, "some": True, "back": True, "back-plain": False}


def test_run_with_another_config_gets_quantization_settings(tmp_path):
    source = quantized(tmp_path / "hf")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep")
    write_llama(tmp_path / "like")
    ckpttools.maxtext_to_hf(tmp_path / "native", tmp_path / "back", like=tmp_path / "like")
    declared = json.loads((tmp_path / "back" / "config.json").read_bytes())["quantization_config"]
    assert declared["weight_block_size"] == [BLOCK, BLOCK]
    assert declared["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]
    assert arrays(tmp_path / "back") == arrays(source)


def test_bfloat16_scales_stay_bfloat16_and_exponents_become_float32(tmp_path):
    for dtype, expected in (("bfloat16", "bfloat16"), ("float8_e8m0fnu", "float32")):
        location = tmp_path / dtype
        source = quantized(location / "hf")
        tree = ckpttools.open(parse(source))
        leaves = dict(tree.leaves)
        for path, array in tree.arrays.items():
            if dotted(path).endswith("_scale_inv"):
                values = np.exp2(np.round(np.log2(array.read()))).astype(DTYPES[dtype].numpy)
                leaves[path] = stored(values, DTYPES[dtype])
        built = ckpttools.Tree(leaves, tree.metadata)
        ckpttools.hf_to_maxtext(built, location / "native", quantized="keep")
        result = ckpttools.open(parse(location / "native")).arrays
        assert {item.dtype.name for path, item in result.items() if path[-1] == "kernel_scale"} == {expected}
        ckpttools.cast(location / "native", location / "cast", dtype="float32")
        ckpttools.hf_to_maxtext(built, location / "plain", dtype="float32")
        assert arrays(location / "cast") == arrays(location / "plain")


def test_digests_in_maxtext_names_use_dequantized_values(tmp_path):
    source = quantized(tmp_path / "hf")
    run("convert", "hf-to-maxtext", source, tmp_path / "native", "--quantized", "keep")
    run("unstack", tmp_path / "native", tmp_path / "apart")
    locations = (source, tmp_path / "native", tmp_path / "apart")
    assert len({ckpttools.hash(location, names="maxtext").parameters for location in locations}) == 1
    ckpttools.hash(tmp_path / "native", names="maxtext", manifest=tmp_path / "manifest.json")
    assert ckpttools.verify(source, manifest=tmp_path / "manifest.json").equal


def test_undeclared_quantized_values_are_compared_as_stored(tmp_path):
    """zarr has no place for a configuration: the same codes and scales are equal all the same."""
    source = quantized(tmp_path / "hf")
    run("convert", "to-zarr3", source, tmp_path / "zarr")
    assert ckpttools.diff(tmp_path / "zarr", source).equal
    assert ckpttools.verify(source, tmp_path / "zarr").equal


def test_mean_uses_dequantized_values(tmp_path):
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        source = quantized(tmp_path / str(seed) / "hf", seed=seed)
        ckpttools.hf_to_maxtext(source, tmp_path / f"native{seed}", quantized="keep")
        ckpttools.hf_to_maxtext(source, tmp_path / f"plain{seed}", dtype="float32")
    for name in ("native", "plain"):
        ckpttools.average(
            tmp_path / f"{name}0", tmp_path / name, others=[tmp_path / f"{name}1"], dtype="float32"
        )
    assert ckpttools.hash(tmp_path / "native").parameters == ckpttools.hash(tmp_path / "plain").parameters


def with_prediction(directory: Path) -> Path:
    """DeepSeek V3 in FP8, with a layer that predicts a further token."""
    there = GOLDEN / "deepseek3" / "hf"
    config = json.loads((there / "config.json").read_bytes()) | {"num_nextn_predict_layers": 1}
    names = {dotted(path): array.read() for path, array in ckpttools.open(there).arrays.items()}
    last, new = (f"model.layers.{config['num_hidden_layers'] - 1 + more}." for more in (0, 1))
    names |= {name.replace(last, new): item for name, item in names.items() if name.startswith(last)}
    names[f"{new}shared_head.head.weight"] = names["lm_head.weight"]
    plain = directory.with_name(f"{directory.name}-plain")
    plain.mkdir()
    save_file(names, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config))
    ckpttools.quantize(plain, directory)
    return directory


def test_carried_fp8_layers_are_dequantized_with_the_model(tmp_path):
    source = with_prediction(tmp_path / "hf")
    ckpttools.cast(source, tmp_path / "expected", dtype="bfloat16")
    ckpttools.hf_to_maxtext(source, tmp_path / "native", quantized="keep", carry=True)
    ckpttools.cast(tmp_path / "native", tmp_path / "plain", dtype="bfloat16")
    ckpttools.maxtext_to_hf(tmp_path / "native", tmp_path / "kept")
    receipt = ckpttools.maxtext_to_hf.plan(tmp_path / "native", tmp_path / "asked", dtype="bfloat16").run()
    ckpttools.maxtext_to_hf(tmp_path / "plain", tmp_path / "cast-before")
    assert receipt.arrays == len(arrays(tmp_path / "expected"))
    assert arrays(tmp_path / "kept") == arrays(source)
    assert arrays(tmp_path / "asked") == arrays(tmp_path / "cast-before") == arrays(tmp_path / "expected")
    # In one line, however many notes there are of it.
    told = run("convert", "maxtext-to-hf", tmp_path / "native", tmp_path / "told", "--dtype", "bfloat16")
    assert " and 1 more: dequantized" not in " ".join(told.split())


def test_value_counts_cover_written_arrays(tmp_path):
    source = with_prediction(tmp_path / "hf")
    plans = {
        carry: ckpttools.hf_to_maxtext.plan(source, tmp_path / "it", carry=carry).plan.notes
        for carry in (False, True)
    }
    weights = ckpttools.inspect(source).quantization.num_weights
    (all_of_it,) = plans[True].inexact
    (written,) = plans[False].inexact
    assert all_of_it.subject == f"{weights} arrays"
    gone = [
        name
        for name in arrays(source)
        if name in plans[False].dropped and f"{name}_scale_inv" in arrays(source)
    ]
    assert written.subject == f"{weights - len(gone)} arrays" and gone
    kept = ckpttools.hf_to_maxtext.plan(source, tmp_path / "it", quantized="keep").plan.notes
    assert f"kept in FP8, with their scales: {weights - len(gone)} weights of the source" in kept.remarks
    assert any(f"does not support {len(kept.dropped)} arrays" in remark for remark in kept.remarks)


def test_mtp_heads_stay_unquantized(tmp_path):
    built = arrays(with_prediction(tmp_path / "hf"))
    assert not [name for name in built if "head" in name and "scale" in name]


def test_run_is_quantized_with_its_sidecars(tmp_path):
    source = with_prediction(tmp_path / "hf")
    ckpttools.hf_to_maxtext(source, tmp_path / "run")
    told = " ".join(run("quantize", tmp_path / "run", tmp_path / "less", "--like", source).split())
    assert "--like HF_DIR --carry copies them from the model" in told
    run("quantize", tmp_path / "run", tmp_path / "all", "--like", source, "--carry")
    assert arrays(tmp_path / "all").keys() == arrays(source).keys()
    with pytest.raises(UsageError, match="carry=True"):
        ckpttools.quantize(tmp_path / "hf", tmp_path / "odd", carry=True)
