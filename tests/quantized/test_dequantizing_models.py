"""Quantized models through the commands: equal, bit for bit, to their dequantized ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import quantized_weights as built
from support.command_line import examine, run, succeed
from support.internals import by_name, dotted, quantized_view
from support.locations import GOLDEN, ROOT
from support.measured import within

import ckpttools
from ckpttools import DamagedScalesError, FormatError
from ckpttools.quantized import scale_checks

BLOCK = (24, 40)
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head", "norm"]}


class Pair:
    """A tiny quantized model in shards, and the same in bfloat16.

    Attributes:
        quantized, plain: their directories.
    """

    def __init__(self, directory: Path, family: str) -> None:
        self.quantized, self.plain = directory / "quantized", directory / "plain"
        source = GOLDEN / family / "hf"
        self.config = json.loads((source / "config.json").read_bytes()) | {"torch_dtype": "bfloat16"}
        self.config.pop("dtype", None)
        arrays = load_file(source / "model.safetensors")
        arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
        rng = np.random.default_rng(0)
        stored, plain = dict(arrays), dict(arrays)
        declared: dict[str, object] = FP8
        for name, array in arrays.items():
            if family == "gpt-oss" and name.endswith(("gate_up_proj", "down_proj")):
                declared = {"quant_method": "mxfp4"}
                experts, inside, outside = array.shape
                weight = built.mxfp4(rng, experts, outside, inside // 32)
                part = "model.layers.0.mlp.experts.down_proj"
            elif family != "gpt-oss" and name.endswith("proj.weight"):
                weight = built.fp8_blocks(rng, array.shape, BLOCK)
                part = weight.name
            else:
                continue
            del stored[name]
            sides = {key: value for key, value in weight.arrays.items() if not key.endswith("_bias")}
            stored |= {key.replace(part, name): value for key, value in sides.items()}
            plain[name] = weight.bfloat16
        self._write(self.quantized, stored, {"quantization_config": declared})
        self._write(self.plain, plain, {})

    def _write(self, directory: Path, arrays: dict[str, np.ndarray], more: dict[str, object]) -> None:
        """In two shards: scales lie in another one than their weights."""
        directory.mkdir(parents=True)
        scales = {name for name in arrays if "scale" in name}
        parts = [
            {name: array for name, array in arrays.items() if (name in scales) == is_scale}
            for is_scale in (False, True)
        ]
        index = {}
        for number, part in enumerate(part for part in parts if part):
            file = f"model-{number + 1:05d}-of-00002.safetensors"
            save_file({name: np.ascontiguousarray(a) for name, a in part.items()}, directory / file)
            index |= dict.fromkeys(part, file)
        text = json.dumps({"metadata": {}, "weight_map": index})
        (directory / "model.safetensors.index.json").write_text(text)
        (directory / "config.json").write_text(json.dumps({**self.config, **more}, indent=2) + "\n")


@pytest.fixture(scope="module", params=["deepseek3", "gpt-oss"])
def pair(request, tmp_path_factory):
    return Pair(tmp_path_factory.mktemp(request.param), request.param)


def content(location: Path) -> dict[str, tuple[str, bytes]]:
    return {
        dotted(path): (array.dtype.name, array.read().tobytes())
        for path, array in ckpttools.open(location).arrays.items()
    }


class TestEquality:
    def test_cast_makes_the_dequantized_model(self, pair, tmp_path):
        done = " ".join(run("cast", pair.quantized, tmp_path / "out", "--dtype", "bfloat16").split())
        assert content(tmp_path / "out") == content(pair.plain)
        config = json.loads((tmp_path / "out" / "config.json").read_bytes())
        assert config == pair.config
        assert "quantization_config is left out of config.json" in done
        # What is exact is said by the plan alone.
        assert ("dequantized from" in done) == ("mxfp4" not in done)

    def test_cast_removes_only_quantization_fields(self, pair, tmp_path):
        """The dtype describes the weights, so only the fields about quantization are removed."""
        ckpttools.convert(pair.quantized, tmp_path / "out", format="orbax", dtype="bfloat16")
        ckpttools.convert(tmp_path / "out", tmp_path / "back", format="safetensors")
        assert content(tmp_path / "back") == content(pair.plain)
        assert json.loads((tmp_path / "back" / "config.json").read_bytes()) == pair.config

    @pytest.mark.parametrize("options", [{}, {"scan": False}, {"dtype": "float32"}])
    def test_quantized_and_plain_models_convert_equally(self, pair, tmp_path, options):
        out = [tmp_path / "quantized", tmp_path / "plain"]
        if options.get("dtype"):
            # Products stay in float32: the plain model has lost what was rounded.
            ckpttools.cast(pair.quantized, tmp_path / "wide", dtype="float32")
            sources = [pair.quantized, tmp_path / "wide"]
        else:
            sources = [pair.quantized, pair.plain]
        for source, destination in zip(sources, out, strict=True):
            ckpttools.hf_to_maxtext(source, destination, **options)
        assert content(out[0]) == content(out[1])
        back = tmp_path / "back"
        ckpttools.maxtext_to_hf(out[0], back)
        config = json.loads((back / "config.json").read_bytes())
        assert "quantization_config" not in config

    def test_plan_file_dequantizes_the_model(self, pair, tmp_path):
        run("convert", "hf-to-maxtext", pair.quantized, tmp_path / "a", "--memory", "200MiB")
        run("plan", "-o", tmp_path / "plan", "convert", "hf-to-maxtext", pair.quantized, tmp_path / "b")
        run("run", tmp_path / "plan", "--part", "0/1")
        run("run", tmp_path / "plan", "--publish")
        assert content(tmp_path / "a") == content(tmp_path / "b")


def test_scales_changed_since_the_plan_are_refused(fp8, tmp_path):
    """They lie in another file than the weights, and are not read again for each of them."""
    source = shutil.copytree(fp8.quantized, tmp_path / "hf")
    run("plan", "-o", tmp_path / "plan", "cast", source, tmp_path / "out", "--dtype", "bfloat16")
    scales = source / "model-00002-of-00002.safetensors"
    save_file({name: 2 * array for name, array in load_file(scales).items()}, scales)
    refused = run("run", tmp_path / "plan", "--part", "0/1", code=3)
    assert f"{scales.name} is not the file that was planned" in " ".join(refused.split())


@pytest.mark.parametrize("is_far", [False, True])
def test_all_damaged_scales_are_listed(pair, tmp_path, gcs, is_far):
    """Those that lie far away are looked at when they are used, and the others once one is found."""
    broken = []

    def damage(arrays):
        scales = {name: array for name, array in arrays.items() if "_scale" in name and ".mlp." in name}
        for name in (min(scales), max(scales)):
            carriers = scales[name].reshape(-1).view(f"u{scales[name].dtype.itemsize}")
            carriers[-1] = np.iinfo(carriers.dtype).max
            broken.append(name)

    source = rewritten(pair, tmp_path / "damaged", damage)
    if is_far:
        source = gcs.filled({item.name: item.read_bytes() for item in source.iterdir()})
    for read in (
        lambda: ckpttools.cast(source, tmp_path / "out", dtype="bfloat16"),
        lambda: ckpttools.hf_to_maxtext(source, tmp_path / "outside"),
        lambda: ckpttools.stats(source),
        lambda: ckpttools.verify(source, against=pair.plain),
        lambda: ckpttools.hash(source, names="maxtext"),
    ):
        with pytest.raises(DamagedScalesError) as error:
            read()
        assert [name for name in broken if f"    {name}" not in str(error.value)] == []
        assert "nan, which gives bfloat16 values that are not finite" in str(error.value)
        assert {item.name for item in tmp_path.iterdir()} <= {"damaged", "out.partial", "outside.partial"}
    if not is_far:
        (declared,) = (finding for finding in ckpttools.doctor(source).findings if finding.level == "error")
        assert "and 1 more" in declared.what
        same = ckpttools.diff(source, source)
        assert any("and 1 more" in str(remark) for remark in same.remarks)


@pytest.mark.parametrize("block", [(1, 4), (3, 5), (40, 1), (40, 64)])
def test_blocks_with_zero_scales_are_read_in_batches(tmp_path, monkeypatch, block):
    """Zeros may have such scales: all blocks are looked at, and one by one these took minutes of a model."""
    rng, shape, name = np.random.default_rng(1), (40, 64), "model.layers.0.mlp.up_proj.weight"
    grid = tuple(-(-length // step) for length, step in zip(shape, block, strict=True))
    declared = {"quant_method": "fp8", "weight_block_size": list(block)}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": declared})
    )
    reads = []
    unscaled = scale_checks.unscaled_array

    def counted(weight, arrays):
        codes = unscaled(weight, arrays)
        return SimpleNamespace(read=lambda region: reads.append(region) or codes.read(region))

    monkeypatch.setattr(scale_checks, "unscaled_array", counted)
    for number in range(8):
        is_zero = np.ones(grid, bool) if number < 2 else rng.random(grid) < 0.5
        is_zero[-1, -1] = True
        of_numbers = is_zero.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]
        codes = np.where(of_numbers, 0, 2).astype(ml_dtypes.float8_e4m3fn)
        codes[-1, -1] = number % 2  # in the last block
        arrays = {name: codes, f"{name}_scale_inv": np.where(is_zero, 0, 1).astype("f4")}
        save_file(arrays, tmp_path / "model.safetensors")
        tree = ckpttools.open(tmp_path)
        result = scale_checks.value_faults(by_name(tree.arrays), quantized_view(tree).readable.values())
        assert result.not_positive == ((f"{name}_scale_inv: 0",) if number % 2 else ())
    assert len(reads) == 8


@pytest.mark.parametrize("is_far", [False, True])
def test_mean_names_the_model_with_damaged_scales(fp8, tmp_path, gcs, is_far):
    def damage(arrays):
        arrays["model.layers.1.mlp.up_proj.weight_scale_inv"][0, 1] = np.inf

    whole, *damaged = fp8.quantized, *(rewritten(fp8, tmp_path / name, damage) for name in "ab")
    if is_far:
        files = [
            {item.name: item.read_bytes() for item in location.iterdir()} for location in (whole, *damaged)
        ]
        whole, *damaged = map(gcs.filled, files)
    with pytest.raises(DamagedScalesError) as error:
        ckpttools.average(whole, tmp_path / "mean", others=damaged, dtype="float32")
    line = "model.layers.1.mlp.up_proj.weight_scale_inv: inf, which gives float32 values"
    if is_far:
        # All models are read at once; those alike are folded into one line.
        numbers = "..".join(str(location).split("/")[3] for location in damaged)
        assert f"/{{{numbers}}}/some where: {line}" in str(error.value)
    else:
        assert f"    {line}" in str(error.value) and error.value.location == str(damaged[0])
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("location", [0, 1])
def test_mean_reports_zero_scales_of_any_model(fp8, tmp_path, location):
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    odd = rewritten(fp8, tmp_path / "odd", lambda arrays: arrays[name].__setitem__((0, 1), 0))
    models = [fp8.quantized]
    models.insert(location, odd)
    plan = ckpttools.average.plan(models[0], tmp_path / "mean", others=models[1:]).plan
    (told,) = (remark for remark in plan.notes.remarks if "zero or negative" in remark)
    assert f"({name}: 0)" in told and (str(odd) in told) == (location == 0)


def rewritten(pair: Pair, directory: Path, change) -> Path:
    """The quantized model with its arrays changed, in one file."""
    arrays = {dotted(path): array.read() for path, array in ckpttools.open(pair.quantized).arrays.items()}
    change(arrays)
    directory.mkdir()
    save_file(arrays, directory / "model.safetensors")
    (directory / "config.json").write_bytes((pair.quantized / "config.json").read_bytes())
    return directory


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("fp8"), "llama3.1")


def test_products_equal_after_rounding_differ(tmp_path):
    """Two models that are quantized in different ways have the same bfloat16, and not the same products."""
    rows = built.fp8_rows(np.random.default_rng(0), (16, 24))
    scale = np.float32(0.0117)
    rows.arrays[f"{rows.name}_scale"][...] = scale
    blocks = {rows.name: rows.arrays[rows.name], f"{rows.name}_scale_inv": np.full((2, 3), scale)}
    by_blocks = built.tree_of(
        blocks, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    )
    same = (ckpttools.verify(by_blocks, against=rows.tree), ckpttools.diff(by_blocks, rows.tree))
    assert [item.equal for item in same] == [True, True]
    rows.arrays[f"{rows.name}_scale"][3] = np.nextafter(scale, np.float32(1))
    differ = (ckpttools.verify(by_blocks, against=rows.tree), ckpttools.diff(by_blocks, rows.tree))
    assert [item.equal for item in differ] == [False, False]
    assert (built.scaled(rows.arrays[rows.name], np.full((16, 1), scale), (1, 24)) != rows.product).any()


class TestRefusedModels:
    """All that is wrong is listed, and nothing is written."""

    def lines(self, source: Path, tmp_path: Path, dtype: str = "bfloat16") -> str:
        with pytest.raises(FormatError) as error:
            ckpttools.cast(source, tmp_path / "out", dtype=dtype)
        with pytest.raises(FormatError) as other:
            ckpttools.hf_to_maxtext(source, tmp_path / "out", dtype=dtype)
        assert str(error.value) == str(other.value)
        assert list(tmp_path.glob("out*")) == []
        return str(error.value)

    def test_missing_and_mismatched_scales_are_reported(self, fp8, tmp_path):
        def change(arrays):
            del arrays["model.layers.0.mlp.up_proj.weight_scale_inv"]
            del arrays["model.layers.1.mlp.up_proj.weight"]
            name = "model.layers.2.mlp.up_proj.weight_scale_inv"
            arrays[name] = arrays[name][:-1]
            arrays["model.layers.3.mlp.up_proj.weight"] = arrays["model.layers.3.mlp.up_proj.weight"].astype(
                ml_dtypes.bfloat16
            )

        declared = self.lines(rewritten(fp8, tmp_path / "source", change), tmp_path)
        assert "model.layers.0.mlp.up_proj.weight: float8_e4m3fn, without its scale" in declared
        assert "model.layers.1.mlp.up_proj.weight_scale_inv: float32, a scale without a weight" in declared
        assert "model.layers.3.mlp.up_proj.weight: bfloat16, with weight_scale_inv" in declared
        assert "in blocks of 24 x 40 has" in declared

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e36])
    def test_non_numeric_scales_are_refused(self, fp8, tmp_path, value):
        def change(arrays):
            for layer in (0, 2):
                arrays[f"model.layers.{layer}.mlp.up_proj.weight_scale_inv"][0, 1] = value

        source = rewritten(fp8, tmp_path / "source", change)
        with pytest.raises(FormatError, match="values that are not finite") as error:
            ckpttools.cast(source, tmp_path / "out", dtype="bfloat16")
        assert "up_proj" in str(error.value)
        assert not (tmp_path / "out").exists()

    def test_unstated_block_is_inferred(self, fp8, tmp_path):
        source = rewritten(fp8, tmp_path / "source", lambda arrays: None)
        config = json.loads((source / "config.json").read_bytes())
        config["quantization_config"]["weight_block_size"] = [24, 0]
        (source / "config.json").write_text(json.dumps(config))
        assert "[24, 0] in the configuration is not a block" in self.lines(source, tmp_path)
        del config["quantization_config"]
        (source / "config.json").write_text(json.dumps(config))
        with pytest.raises(FormatError, match="meaningless without their scales"):
            ckpttools.hf_to_maxtext(source, tmp_path / "out")


class TestReadCommands:
    """Commands that look at numbers look at those that are meant."""

    def test_inspect_tree_shows_one_array_per_weight(self, pair):
        report, plain = ckpttools.inspect(pair.quantized), ckpttools.inspect(pair.plain)
        assert {item.path: item.shape for item in report.arrays} == {e.path: e.shape for e in plain.arrays}
        assert {item.dtype for item in report.arrays} == {item.dtype for item in plain.arrays}
        assert report.num_parameters == plain.num_parameters
        assert report.families == plain.families
        quantized = [item for item in report.arrays if item.quantized]
        assert {item.quantized for item in quantized} in ({"fp8 24x40"}, {"mxfp4"})
        files = pair.quantized.glob("*.safetensors")
        stored = sum(array.nbytes for file in files for array in ckpttools.open(file).arrays.values())
        assert report.nbytes == stored
        assert report.nbytes == sum(item.nbytes for item in report.arrays) + report.scales.nbytes
        assert report.scales.num_arrays == len(quantized)
        text = " ".join(succeed("inspect", "tree", pair.quantized).output.split())
        assert f"scales {len(quantized)} arrays" in text
        assert quantized[0].quantized in text

    def test_against_accepts_family_and_dequantized_model(self, pair):
        for against in (pair.plain, pair.plain / "config.json"):
            assert ckpttools.inspect(pair.quantized, against=against).comparison.is_same

    def test_diff_and_verify_find_dequantized_models_equal(self, pair, tmp_path):
        ckpttools.hf_to_maxtext(pair.quantized, tmp_path / "maxtext")
        for a, b in (
            (pair.quantized, pair.plain),
            (pair.plain, pair.quantized),
            (pair.quantized, pair.quantized),
            (pair.quantized, tmp_path / "maxtext"),
        ):
            report = ckpttools.diff(a, b)
            assert report.equal, report
            declared = [str(remark) for remark in report.remarks if "dequantized" in remark.text]
            assert len(declared) == (a != b)
        for made_of_it in (tmp_path / "maxtext", pair.plain):
            report = ckpttools.verify(made_of_it, pair.quantized)
            assert report.equal
            assert "dequantized from" in report.remarks[0]

    def test_diff_finds_a_changed_scale(self, pair, tmp_path):
        def change(arrays):
            name = next(name for name in arrays if "scale" in name)
            arrays[name].reshape(-1)[0] += arrays[name].dtype.type(1)

        other = rewritten(pair, tmp_path / "other", change)
        assert not ckpttools.diff(other, pair.plain).equal
        assert not ckpttools.verify(pair.plain, other).equal

    def test_statistics_and_digests_use_dequantized_values(self, pair):
        looks = [ckpttools.stats(item).arrays for item in (pair.quantized, pair.plain)]
        assert {e.path: e.statistics for e in looks[0]} == {e.path: e.statistics for e in looks[1]}
        digests = {ckpttools.hash(item, names="maxtext").digest for item in (pair.quantized, pair.plain)}
        assert len(digests) == 1

    def test_load_dequantizes_the_weights(self, pair):
        import jax

        expected = ckpttools.load(pair.plain, to="maxtext")
        got = ckpttools.load(pair.quantized, to="maxtext")
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert len(ckpttools.load(pair.quantized, dtype="bfloat16")) == len(ckpttools.open(pair.plain))


def test_diff_ignores_damaged_scales_of_other_arrays(fp8, tmp_path):
    """Of arrays that are not asked for, one has damaged scales."""
    asked, broken = (f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1))

    def change(arrays):
        arrays[f"{broken}_scale_inv"][0, 0] = np.nan
        rng = np.random.default_rng(0)
        arrays[asked] = rng.permutation(arrays[asked].reshape(-1)).reshape(arrays[asked].shape)

    plain = {dotted(path): array.read() for path, array in ckpttools.open(fp8.plain).arrays.items()}
    del plain[broken]
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    report = ckpttools.diff(rewritten(fp8, tmp_path / "a", change), tmp_path / "plain", filter=asked)
    assert report.outcomes == {"differs": 1}
    assert any(f"values from {tmp_path}/a: {broken}_scale_inv" in str(remark) for remark in report.remarks)


def test_dequantize_like_maxtext_rounds_scales_first(fp8, tmp_path):
    """28 % of the elements are one unit in the last place off the product in float32."""
    run("cast", fp8.quantized, tmp_path / "a", "--dtype", "bfloat16", "--dequantize-like", "maxtext")
    result = {dotted(path): array.read() for path, array in ckpttools.open(fp8.quantized).arrays.items()}
    made_of_it = {dotted(path): array.read() for path, array in ckpttools.open(tmp_path / "a").arrays.items()}
    name = "model.layers.0.mlp.up_proj.weight"
    scales = result[f"{name}_scale_inv"].astype(ml_dtypes.bfloat16)
    product = built.scaled(result[name], scales.astype(np.float32), BLOCK).astype(ml_dtypes.bfloat16)
    assert (made_of_it[name] == product).all()
    once = built.scaled(result[name], result[f"{name}_scale_inv"], BLOCK).astype(ml_dtypes.bfloat16)
    assert 0.1 < (made_of_it[name] != once).mean() < 0.5


def test_different_codes_of_equal_values_are_reported(fp8, tmp_path):
    """Of models that store weights alike what is stored is compared; that the numbers are equal is said."""
    name = "model.layers.0.mlp.up_proj.weight"

    def made_of(code: float, factor: float, *, odd: float | None = None) -> Path:
        def change(arrays):
            arrays[name][:] = code
            arrays[name][0, 0] = code if odd is None else odd
            arrays[f"{name}_scale_inv"] *= np.float32(factor)

        return rewritten(fp8, tmp_path / f"{code}-{odd}", change)

    one, other, third = made_of(64, 1), made_of(32, 2), made_of(16, 4, odd=18)
    for item, equal in ((other, True), (third, False)):
        result = ckpttools.diff(one, item, explain=False), ckpttools.verify(one, item)
        assert result[0].outcomes["differs"] == 2
        assert not any(report.equal for report in result)
        assert all(("codes and scales of 1 array differ" in str(r.hints)) == equal for r in result)


def test_read_commands_name_damaged_scales(fp8, tmp_path):
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    both = r"layers\.\{0\.\.1\}\.mlp\.up_proj\.weight_scale_inv: nan"

    def damage(arrays):
        for name in names:
            arrays[f"{name}_scale_inv"][0, 0] = np.nan

    blocks = SimpleNamespace(quantized=tmp_path / "blocks")
    ckpttools.quantize(fp8.plain, blocks.quantized)
    bad = rewritten(blocks, tmp_path / "bad", damage)
    for arguments in ((bad, fp8.plain), (fp8.plain, bad)):
        for command in (ckpttools.diff, ckpttools.verify):
            with pytest.raises(FormatError, match=both):
                command(*arguments)
    with pytest.raises(FormatError, match=both):
        ckpttools.stats(bad)
    for report in (ckpttools.diff(bad, bad), ckpttools.verify(bad, bad)):
        assert report.equal and len(report.remarks) == 2
        assert f"{names[0]}_scale_inv: nan" in str(report.remarks[0])
    bare = rewritten(fp8, tmp_path / "bare", lambda arrays: arrays.pop(f"{names[0]}_scale_inv"))
    assert "without its scale" in run("inspect", "stats", bare)
    assert ckpttools.stats(fp8.quantized, filter=names[0]).remarks[0].endswith("to bfloat16")


class TestDoctor:
    def findings(self, directory: Path):
        return [finding for finding in examine(directory).findings if finding.check == "quantization"]

    def test_healthy_quantized_model_gets_cast_advice(self, pair):
        (finding,) = self.findings(pair.quantized)
        assert finding.level == "info"
        assert f"ckpt cast {pair.quantized} DST --dtype bfloat16" in finding.hint
        assert ("--quantized keep" in finding.hint) == ("deepseek3" in str(pair.quantized))

    def test_mismatched_grid_is_refused(self, fp8, tmp_path):
        def change(arrays):
            name = "model.layers.2.mlp.up_proj.weight_scale_inv"
            arrays[name] = arrays[name][:-1]

        result = self.findings(rewritten(fp8, tmp_path / "source", change))
        assert "error" in [item.level for item in result]
        assert any("in blocks of 24 x 40 has" in item.what for item in result)


class TestPage:
    """docs/quantized.md on tiny models."""

    def test_quantized_page_is_correct(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for family, name in (("deepseek3", "DeepSeek-V3"), ("gpt-oss", "gpt-oss")):
            Pair(tmp_path / "made" / name, family).quantized.rename(tmp_path / name)
        lines = (ROOT / "docs" / "quantized.md").read_text().splitlines()
        commands = [line.removeprefix("$ ckpt ").split() for line in lines if line.startswith("$ ckpt ")]
        assert len(commands) == 7
        for words in commands:
            assert succeed(*words).exit_code == 0
        assert "quantization_config" not in json.loads(
            (tmp_path / "gpt-oss-bf16" / "config.json").read_bytes()
        )


def test_array_larger_than_memory_is_dequantized(tmp_path):
    """128 MiB are written of one array: the interpreter and its libraries leave a third of that."""
    source, count = tmp_path / "hf", 8192
    scales = {"dtype": "F32", "shape": [64, 64], "data_offsets": [count * count, count * count + 4 * 64 * 64]}
    codes = {"dtype": "F8_E4M3", "shape": [count, count], "data_offsets": [0, count * count]}
    header = json.dumps({"q_proj.weight": codes, "q_proj.weight_scale_inv": scales}).encode()
    source.mkdir()
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + scales["data_offsets"][1])
    declared = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps({"quantization_config": declared}))
    done = within("cast", source, tmp_path / "plain", "--dtype", "bfloat16", "--jobs", "2", mib=128)
    assert done.code == 0 and done.peak < 128 << 20, done.declared
