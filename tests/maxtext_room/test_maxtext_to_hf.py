"""The way back: `maxtext-to-hf` gives the Hugging Face checkpoint that a MaxText one was made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.command_line import succeed
from support.golden_data import FAMILIES, SCAN_NAMES, convert, golden_checkpoint
from support.internals import (
    Constant,
    ModelFiles,
    OrbaxWriter,
    SafetensorsWriter,
    build,
    execute,
    families,
    family_to_toml,
    keystr,
    to_huggingface,
    to_maxtext,
)
from support.locations import FIXTURES, GOLDEN, HF, TRAINED

import ckpttools
from ckpttools import (
    DTYPES,
    CastMap,
    CastTo,
    CheckpointError,
    ConfigError,
    CoverageError,
    FormatError,
    ModelOptions,
    Resources,
    Select,
    ToHuggingFace,
    ToMaxText,
    Tree,
    UsageError,
    plan_save,
    plan_to_huggingface,
    plan_to_maxtext,
    save,
)
from ckpttools.maxtext.model_config import absent_mtp_field
from ckpttools.maxtext.original_dtypes import narrower_dtype_advice
from ckpttools.testing.models import LlamaSizes, write_llama
from ckpttools.testing.strategies import stored

DESCRIBED = "config.json describes the complete model, including arrays that are left out"
SCANS = pytest.mark.parametrize("scan", [True, False], ids=SCAN_NAMES.get)
# One with values that are scaled, norms in float32 and arrays that are left out; one of the plainest.


def hf(family: str) -> Path:
    return GOLDEN / family / "hf"


def back(source: Path, destination: Path, **options) -> Path:
    plan_to_huggingface(source, ToHuggingFace(**options), Resources(jobs=2)).run(destination)
    return destination


def tensors(directory: Path) -> dict[str, np.ndarray]:
    return {
        name: array
        for path in sorted(directory.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


def assert_same(built: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert built.keys() == expected.keys()
    for name, array in expected.items():
        assert built[name].dtype == array.dtype, name
        assert built[name].tobytes() == array.tobytes(), name


class TestRoundTrip:
    """That of every family is in test_conversion_pairs.py."""

    @pytest.mark.parametrize("family", ["llama3.1", "deepseek3", "gpt-oss"])
    def test_layers_stacked_on_axis_0_are_converted(self, tmp_path, family):
        convert(tmp_path / "maxtext", family, scan_axis=0)
        assert_same(tensors(back(tmp_path / "maxtext", tmp_path / "hf")), tensors(hf(family)))

    @SCANS
    def test_maxtext_output_converts_to_the_original(self, tmp_path, scan):
        built = back(golden_checkpoint(scan), tmp_path / "hf", like=hf("llama3.1"))
        assert_same(tensors(built), tensors(hf("llama3.1")))

    @pytest.mark.parametrize("family", ["gemma3", "llama4-scout"])
    def test_model_without_declared_tower_is_refused(self, tmp_path, family):
        """transformers would make the tower of random numbers, and only log it."""
        convert(tmp_path / "maxtext", family)
        for options in ({}, {"like": hf(family)}, {"like": hf(family) / "config.json"}):
            with pytest.raises(ConfigError, match="have no arrays") as error:
                plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(**options))
            assert str(error.value.got).startswith("vision_config in ")
            assert "carry=True" in str(error.value.hint) and 'names="text"' in str(error.value.hint)

    def test_text_model_cannot_carry_towers(self):
        with pytest.raises(UsageError, match="cannot contain the arrays that carry=True copies"):
            ToHuggingFace(spelling="text", carry=True)
        with pytest.raises(UsageError, match="but no model is given"):
            ToHuggingFace(carry=True)

    @pytest.mark.parametrize("carry", [True, False])
    def test_separate_text_model_has_its_own_config(self, tmp_path, carry):
        convert(tmp_path / "maxtext", "gemma3", carry=carry)
        source = tensors(hf("gemma3"))
        options = ToHuggingFace(like=None if carry else hf("gemma3"), spelling="text")
        conversion = plan_to_huggingface(tmp_path / "maxtext", options)
        left_out = conversion.plan.notes.dropped
        assert len(left_out) == 34
        assert all("vision" in name or "projector" in name for name in left_out)
        assert "config.json: it describes only the text model" in conversion.plan.remarks
        conversion.run(tmp_path / "hf")
        expected = {name: array for name, array in source.items() if name not in left_out}
        prefix = "language_model."
        assert_same(
            tensors(tmp_path / "hf"), {name.removeprefix(prefix): array for name, array in expected.items()}
        )
        config = json.loads((tmp_path / "hf" / "config.json").read_bytes())
        original = json.loads((hf("gemma3") / "config.json").read_bytes())
        assert config["architectures"] == ["Gemma3ForCausalLM"]
        assert config["model_type"] == "gemma3_text"
        assert {**config, **original["text_config"]} == config
        # It is a model of its own: there, and back.
        plan_to_maxtext(tmp_path / "hf").run(tmp_path / "again")
        again = ckpttools.open(tmp_path / "again")
        for path, array in ckpttools.open(tmp_path / "maxtext").arrays.items():
            assert array.read().tobytes() == again[path].read().tobytes()

    def test_uncarried_arrays_are_copied_from_the_like_model(self, tmp_path):
        convert(tmp_path / "maxtext", "gemma3")
        built = back(tmp_path / "maxtext", tmp_path / "hf", like=hf("gemma3"), carry=True)
        assert_same(tensors(built), tensors(hf("gemma3")))

    def test_like_model_without_weights_is_refused(self, tmp_path):
        convert(tmp_path / "maxtext", "gemma3")
        model = shutil.copytree(hf("gemma3"), tmp_path / "model")
        (weights,) = model.glob("*.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1])
        alone = tmp_path / "alone"
        alone.mkdir()
        shutil.copy(model / "config.json", alone)
        for like in (model, alone, model / "config.json"):
            with pytest.raises(FormatError) as error:
                plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(like=like, carry=True))
            assert str(like) in str(error.value)
            # Its configuration is all that is expected of it here.
            plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(like=like, spelling="text"))


class TestSource:
    def test_training_checkpoint_converts_only_parameters(self, tmp_path):
        """Made of a training run of MaxText's, whose sizes the configuration below states."""
        tree = ckpttools.open(TRAINED)
        assert any(path[0] == "opt_state" for path in tree.arrays)
        config = train_config(tree)
        (tmp_path / "config.json").write_text(json.dumps(config))
        built = tensors(back(TRAINED, tmp_path / "hf", like=tmp_path / "config.json"))
        assert not any("opt" in name or "mu" in name.split(".") for name in built)
        kernel = tree["params", "params", "decoder", "layers", "mlp", "wi_0", "kernel"].read()
        assert len(built) == 3 + 9 * kernel.shape[1]
        for layer in range(kernel.shape[1]):
            expected = kernel[:, layer].T
            assert np.array_equal(built[f"model.layers.{layer}.mlp.gate_proj.weight"], expected)

    def test_float32_run_of_a_bfloat16_model_gets_advice(self, tmp_path):
        config = train_config(ckpttools.open(TRAINED)) | {"torch_dtype": "bfloat16"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = "convert", "maxtext-to-hf", TRAINED, tmp_path / "hf", "--like", tmp_path / "config.json"
        advice = (
            "the weights are float32, 723 kB; the model is bfloat16 (config.json), in which they take 362 kB"
            ": --dtype bfloat16"
        )
        planned = json.loads(succeed(*words, "--dry-run", "--json").stdout)
        assert planned["remarks"][-1] == advice
        done = succeed(*words, COLUMNS="300").stdout
        assert advice in done.splitlines()[-1]
        result = json.loads(succeed(*words, "--overwrite", "--json").stdout)
        assert result["notes"]["advice"] == [advice]
        assert result["bytes_out"] == 723_200
        cast = json.loads(succeed(*words, "--overwrite", "--dtype", "bfloat16", "--json").stdout)
        assert (cast["notes"]["advice"], cast["bytes_out"]) == ([], 361_600)

    @pytest.mark.parametrize(
        ("stored", "config", "settings", "reason"),
        [
            ("float32", {"dtype": "torch.bfloat16"}, (), "the model is bfloat16 (config.json)"),
            ("float32", {"text_config": {"dtype": "float16"}}, (), "the model is float16 (config.json)"),
            ("float32", None, ("weight_dtype=bfloat16",), "the run has weight_dtype=bfloat16"),
            ("float32", {}, ("weight_dtype=float32",), "MaxText computes in bfloat16 by default"),
            ("float32", None, ("dtype=float32",), None),
            ("float32", {"dtype": "float32"}, (), None),
            ("float32", {"dtype": "auto"}, (), None),
            ("bfloat16", {"dtype": "float16"}, (), None),
            ("bfloat16", None, (), None),
        ],
    )
    def test_advice_names_the_origin_of_the_narrower_dtype(self, stored, config, settings, reason):
        arrays = {"w": Constant((8,), DTYPES[stored], bytes(DTYPES[stored].itemsize))}
        advice = narrower_dtype_advice(arrays, config, settings)
        assert [reason in text for text in advice] == ([True] if reason else [])

    def test_optimizer_state_is_not_read(self, tmp_path):
        config = train_config(ckpttools.open(TRAINED))
        (tmp_path / "config.json").write_text(json.dumps(config))
        plan = plan_to_huggingface(TRAINED, ToHuggingFace(like=tmp_path / "config.json")).plan
        assert plan.bytes_in < 2 * plan.bytes_out
        assert plan.notes.dropped == ()

    @pytest.mark.parametrize("wrap", ["nnx", "nnx-rl", "policy"])
    def test_flavors_and_composites_are_converted(self, tmp_path, wrap):
        convert(tmp_path / "maxtext", "qwen3")
        tree = ckpttools.open(tmp_path / "maxtext")
        leaves = {}
        for path, array in tree.arrays.items():
            if path[0] != "params":
                continue
            own = path[2:]
            wrapped = {
                "nnx": (*own, "value"),
                "nnx-rl": ("base", *own, "value"),
                "policy": ("params", "params", "policy", *own),
            }[wrap]
            leaves[wrapped] = array
            if wrap == "policy" and own[-1] == "embedding":
                leaves["params", "params", "value_head", "kernel"] = array
        writer = OrbaxWriter(step=0)
        execute(build(Tree(leaves), writer, memory=1 << 30, jobs=1), writer, tmp_path / "wrapped")
        prefix = {"prefix": "policy"} if wrap == "policy" else {}
        built = back(tmp_path / "wrapped", tmp_path / "hf", like=hf("qwen3"), **prefix)
        assert_same(tensors(built), tensors(hf("qwen3")))

    def test_learned_extras_are_dropped_by_name(self):
        built = to_maxtext(ckpttools.open(hf("qwen3")), ToMaxText())
        beside = [("ema", "params", "decoder", "gain"), ("params", "lora", "a"), ("lora", "b")]
        leaves = dict.fromkeys(beside, stored(np.zeros(5, np.float32), DTYPES["float32"]))
        files = ModelFiles(config=ckpttools.open(hf("qwen3")).metadata.config)
        tree = Tree({**built.state.leaves, **leaves}, built.state.metadata)
        assert to_huggingface(tree, ToHuggingFace(), files).notes.dropped == tuple(map(keystr, beside))

    def test_colliding_names_are_refused(self):
        built = to_maxtext(ckpttools.open(hf("qwen3")), ToMaxText())
        norm = ("params", "params", "decoder", "decoder_norm", "scale")
        leaves = {**built.state.leaves, (*norm[:3], "decoder_norm.scale"): built.state[norm]}
        files = ModelFiles(config=ckpttools.open(hf("qwen3")).metadata.config)
        with pytest.raises(FormatError, match=r"decoder.decoder_norm.scale: .* and decoder/decoder_norm"):
            to_huggingface(Tree(leaves, built.state.metadata), ToHuggingFace(), files)

    def test_missing_prefix_is_refused(self, tmp_path):
        convert(tmp_path / "maxtext", "qwen3")
        with pytest.raises(UsageError, match="no array is below 'decodr'") as error:
            plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(prefix="decodr"))
        assert error.value.hint == "did you mean decoder?"


def train_config(tree: Tree) -> dict[str, object]:
    """What a Hugging Face configuration would say of the model in a tree of stacked layers."""
    below = ("params", "params", "decoder", "layers")
    embed, layers, heads, head_dim = tree[(*below, "self_attention", "query", "kernel")].shape
    kv_heads = tree[(*below, "self_attention", "key", "kernel")].shape[2]
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": embed,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": tree[(*below, "mlp", "wi_0", "kernel")].shape[2],
        "vocab_size": tree["params", "params", "token_embedder", "embedding"].shape[0],
        "tie_word_embeddings": False,
    }


@pytest.mark.parametrize("family", ["llama3.1", "gemma3"])
def test_converted_source_is_refused(tmp_path, family):
    convert(tmp_path / "maxtext", family)
    for like in (None, hf(family)):
        with pytest.raises(FormatError, match="this is already a Hugging Face checkpoint") as caught:
            plan_to_huggingface(hf(family), ToHuggingFace(like=like))
        assert f'`ckpttools.hf_to_maxtext("{hf(family)}", "DST")`' in caught.value.hint
    for source in (tmp_path / "maxtext", golden_checkpoint(scan=True)):
        with pytest.raises(FormatError, match="this is already a MaxText checkpoint") as caught:
            plan_to_maxtext(source)
        assert "ckpttools.maxtext_to_hf(" in caught.value.hint


class TestModelSelection:
    def test_arrays_identify_a_unique_family(self, tmp_path):
        item = convert(tmp_path / "maxtext", "qwen3")
        shutil.rmtree(item / "hf")
        built = back(tmp_path / "maxtext", tmp_path / "hf")
        assert_same(tensors(built), tensors(hf("qwen3")))
        assert not (built / "config.json").exists()

    @pytest.mark.parametrize("family", [f for f in FAMILIES if not f.startswith(("llama", "mistral"))])
    def test_family_and_arrays_are_sufficient(self, tmp_path, family):
        item = convert(tmp_path / "maxtext", family)
        config = json.loads((hf(family) / "config.json").read_bytes())
        shutil.rmtree(item / "hf")
        name = next(n for n in families_of(config["model_type"]))
        built = back(tmp_path / "maxtext", tmp_path / "hf", model=ModelOptions(family=name))
        expected = tensors(hf(family))
        assert built and tensors(built).keys() <= expected.keys()
        assert_same(tensors(built), {name: expected[name] for name in tensors(built)})

    def test_missing_model_description_is_refused(self, tmp_path):
        item = convert(tmp_path / "maxtext", "llama3.1")
        shutil.rmtree(item / "hf")
        with pytest.raises(ConfigError, match="nothing says which model this is") as error:
            plan_to_huggingface(tmp_path / "maxtext")
        # The family alone is refused, as it leaves the order of rotary pairs open.
        assert str(error.value.hint).endswith('like="HF_DIR"')
        options = ToHuggingFace(model=ModelOptions(family="llama"))
        with pytest.raises(ConfigError, match="rotary pairs are interleaved or in halves") as error:
            plan_to_huggingface(tmp_path / "maxtext", options)
        layout = str(error.value.hint).partition('rope_layout="')[2].partition('"')[0]
        declared = ModelOptions(family="llama", rope_layout=layout)
        assert_same(
            tensors(back(tmp_path / "maxtext", tmp_path / "said", model=declared)), tensors(hf("llama3.1"))
        )
        like = back(tmp_path / "maxtext", tmp_path / "like", like=hf("llama3.1"))
        assert_same(tensors(like), tensors(hf("llama3.1")))

    def test_missing_like_directory_is_refused(self, tmp_path):
        convert(tmp_path / "maxtext", "qwen3")
        with pytest.raises(CheckpointError, match="does not exist"):
            plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(like=tmp_path / "none"))

    def test_mismatched_like_model_is_refused(self, tmp_path):
        convert(tmp_path / "maxtext", "qwen3")
        with pytest.raises(CoverageError, match="missing"):
            plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(like=hf("qwen2.5")))
        assert not (tmp_path / "hf").exists()


class TestGivenAndCarriedConfig:
    """The one that the user names and the one carried along: values come out alike, or nothing does."""

    @pytest.fixture
    def like(self, tmp_path):
        def built(**fields: object) -> Path:
            config = json.loads((tmp_path / "maxtext" / "0" / "items" / "hf" / "config.json").read_bytes())
            (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
            return tmp_path / "config.json"

        return built

    def test_contradicting_rope_layouts_are_refused(self, tmp_path, like):
        convert(tmp_path / "maxtext", "llama3.1")
        plain = like(rope_scaling=None, rope_parameters=None)
        with pytest.raises(ConfigError, match="give the arrays other values") as error:
            plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(like=plain))
        assert error.value.got == f"interleaved is not set ({plain}: no rope_scaling.rope_type)"
        assert 'rope_type is "llama3"' in str(error.value.expected)
        assert "rope_layout=" in str(error.value.hint)
        options = {"like": plain, "model": ModelOptions(rope_layout="interleaved")}
        assert_same(tensors(back(tmp_path / "maxtext", tmp_path / "hf", **options)), tensors(hf("llama3.1")))

    def test_contradicting_families_are_refused(self, tmp_path, like):
        convert(tmp_path / "maxtext", "llama3.1")
        other = like(model_type="mistral")
        with pytest.raises(ConfigError, match="give the arrays other values") as error:
            plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(like=other))
        assert error.value.got == 'model_type "mistral" (family mistral)'
        assert str(error.value.expected).startswith('model_type "llama" (family llama)')
        assert "family=" in str(error.value.hint)
        options = {"like": other, "model": ModelOptions(family="llama")}
        assert_same(tensors(back(tmp_path / "maxtext", tmp_path / "hf", **options)), tensors(hf("llama3.1")))

    def test_size_that_affects_only_values_is_checked(self, tmp_path, like):
        (tmp_path / "mine.py").write_text(
            "from dataclasses import replace\n"
            "from ckpttools.model_families.llama import FAMILY as LLAMA\n"
            "from ckpttools.mapping.values import Scale\n"
            "first, *rest = LLAMA.rows\n"
            "rows = (replace(first, op=Scale('scalar', 1)), *rest)\n"
            "FAMILY = replace(LLAMA, rows=rows, sizes={**LLAMA.sizes, 'scalar': ('scalar',)})\n"
        )
        source = tmp_path / "source"
        shutil.copytree(hf("llama3.1"), source)
        config = json.loads((source / "config.json").read_bytes())
        (source / "config.json").write_text(json.dumps({**config, "scalar": 4}))
        model = ModelOptions(family=str(tmp_path / "mine.py"))
        plan_to_maxtext(source, ToMaxText(model=model)).run(tmp_path / "maxtext")
        with pytest.raises(ConfigError, match="give the arrays other values") as error:
            plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(like=like(scalar=8), model=model))
        assert str(error.value.got).startswith("scalar 8 (")
        assert str(error.value.expected).startswith("scalar 4 (")
        built = back(tmp_path / "maxtext", tmp_path / "hf", like=like(rms_norm_eps=1), model=model)
        assert_same(tensors(built), tensors(source))

    def test_irrelevant_config_fields_may_differ(self, tmp_path, like):
        convert(tmp_path / "maxtext", "deepseek3")
        other = like(rope_theta=1, num_nextn_predict_layers=0, model_type="deepseek_v3")
        built = back(tmp_path / "maxtext", tmp_path / "hf", like=other)
        expected = tensors(hf("deepseek3"))
        assert_same(tensors(built), {name: expected[name] for name in tensors(built)})


def families_of(model_type: str) -> list[str]:
    from ckpttools.model_families.registry import families

    return [family.name for family in families().values() if model_type in family.model_types]


class TestDtypes:
    def test_cast_updates_the_config(self, tmp_path):
        convert(tmp_path / "maxtext", "qwen3")
        built = back(tmp_path / "maxtext", tmp_path / "hf", dtype=DTYPES["float32"])
        expected = {name: array.astype(np.float32) for name, array in tensors(hf("qwen3")).items()}
        assert_same(tensors(built), expected)
        config = json.loads((built / "config.json").read_bytes())
        assert config["dtype"] == "float32"
        original = json.loads((hf("qwen3") / "config.json").read_bytes())
        assert config == {**original, "dtype": "float32"}

    @pytest.mark.parametrize("family", ["llama3.1", "gemma3"])
    def test_float32_run_gets_a_float32_config(self, tmp_path, family):
        """As MaxText trains, beside the bfloat16 configuration of the model that it began with."""
        item = convert(tmp_path / "maxtext", family, dtype=DTYPES["float32"], carry=True)
        # Carried arrays stay in bfloat16: they are the tower's.
        conversion = plan_to_huggingface(tmp_path / "maxtext")
        conversion.run(tmp_path / "hf")
        built, original = (
            json.loads((at / "config.json").read_bytes()) for at in (tmp_path / "hf", item / "hf")
        )
        remarks = [remark for remark in conversion.plan.remarks if "like the weights" in remark]
        assert remarks[0] == "config.json: dtype is float32, like the weights; it was bfloat16"
        if family == "llama3.1":
            assert built == {**original, "dtype": "float32"}
            return
        assert built["dtype"] == built["text_config"]["dtype"] == "float32"
        assert built["vision_config"] == original["vision_config"]
        assert remarks[1].startswith("config.json: text_config.dtype is float32")
        expected = tensors(hf(family))
        for name, array in tensors(tmp_path / "hf").items():
            vision = "vision" in name or "projector" in name
            assert array.dtype == (expected[name].dtype if vision else np.float32), name

    def test_cast_changes_every_part_of_the_config(self, tmp_path):
        """Of what lies beside the weights as of what was carried along; names may be torch's."""
        source = tmp_path / "source"
        shutil.copytree(hf("gemma3"), source)
        config = json.loads((source / "config.json").read_bytes())
        config["text_config"]["torch_dtype"] = "torch.bfloat16"
        config["vision_config"]["dtype"] = "bfloat16"
        (source / "config.json").write_text(json.dumps(config))
        save(ckpttools.open(source).pipe(CastTo("bfloat16")), tmp_path / "same")
        assert (tmp_path / "same" / "config.json").read_bytes() == (source / "config.json").read_bytes()
        save(ckpttools.open(source).pipe(CastTo("float32")), tmp_path / "cast")
        plan_to_maxtext(source, ToMaxText(carry=True)).run(tmp_path / "maxtext")
        back(tmp_path / "maxtext", tmp_path / "back", dtype=DTYPES["float32"])
        expected = json.loads(json.dumps(config).replace('"torch.bfloat16"', '"float32"'))
        for part in (expected, expected["text_config"], expected["vision_config"]):
            part["dtype"] = "float32"
        for built in ("cast", "back"):
            assert json.loads((tmp_path / built / "config.json").read_bytes()) == expected

    def test_config_dtype_follows_most_weights_and_each_tower(self, tmp_path):
        tree = ckpttools.open(hf("gemma3"))
        patterns = {"*norm*": "float32", "*vision_tower*": "float16"}
        plan = plan_save(tree.pipe(CastMap(patterns)))
        assert not plan.plan.remarks
        plan = plan_save(tree.pipe(CastMap({**patterns, "*": "float64"})), "safetensors")
        assert [remark.partition(" is ")[2] for remark in plan.plan.remarks] == [
            "float64, like the weights; it was bfloat16"
        ] * 2

    def test_config_describing_dropped_arrays_is_reported(self, tmp_path):
        for family, name in (
            ("gemma3", "*vision*"),
            ("gemma3", "*vision_tower.head.probe"),
            ("qwen2.5", "model.layers.3.self_attn.q_proj.bias"),
            ("qwen3-next", "model.norm.weight"),
            ("deepseek3", "*.2.mlp.gate.e_score_correction_bias"),
        ):
            selected = ckpttools.open(hf(family)).pipe(Select(drop=[name]))
            (told,) = plan_save(selected).plan.remarks
            assert told == DESCRIBED, name

    @pytest.mark.parametrize(
        ("trainer", "declared", "is_told"),
        [
            ("open-instruct", {"drop": "value_head"}, False),
            ("open-instruct", {"drop": ["value_head", "policy.model.norm"]}, True),
            ("torchtitan/step-10", {"strip_optimizer": True}, False),
            ("torchtitan/step-10", {"drop": ["optimizer", "train_state"], "names": "hub"}, False),
            ("torchtitan/step-10", {"strip_optimizer": True, "drop": "layers.1", "names": "hub"}, True),
            ("torchtitan/step-10", {"strip_optimizer": True, "drop": "output.weight"}, True),
        ],
    )
    def test_trainer_extras_are_not_described_by_config(self, tmp_path, trainer, declared, is_told):
        source = FIXTURES / "torch" / "trainers" / trainer
        plan = ckpttools.convert.plan(source, tmp_path / "out", format="safetensors", **declared).plan
        assert plan.notes.dropped and (DESCRIBED in plan.remarks) == is_told

    @pytest.mark.parametrize("tied", [True, False])
    def test_tied_head_is_not_described(self, tmp_path, tied):
        write_llama(tmp_path / "model", LlamaSizes(1, 32, 64, 2, 2, 16, 64, tied=False))
        config = json.loads((tmp_path / "model/config.json").read_text()) | {"tie_word_embeddings": tied}
        (tmp_path / "model/config.json").write_text(json.dumps(config))
        plan = plan_save(ckpttools.open(tmp_path / "model").pipe(Select(drop=["lm_head.weight"]))).plan
        assert (DESCRIBED in plan.remarks) == (not tied)

    def test_unknown_model_config_may_describe_everything_except_the_optimizer(self, tmp_path):
        save_file({name: np.ones(2, "f4") for name in ("a", "b", "optimizer.mu")}, tmp_path / "a.safetensors")
        (tmp_path / "config.json").write_text('{"model_type": "own"}')
        for drop, is_told in (("optimizer", False), ("b", True)):
            plan = plan_save(ckpttools.open(tmp_path).pipe(Select(drop=[drop]))).plan
            assert (DESCRIBED in plan.remarks) == is_told

    @pytest.mark.parametrize(("family", "way"), [("llama3.1", "drop"), ("gemma2", "materialize")])
    def test_untied_head_is_declared_if_the_default_is_tied(self, tmp_path, family, way):
        """transformers would make an output head of random numbers, or leave one out that is stored."""
        config = json.loads((hf(family) / "config.json").read_bytes())
        del config["tie_word_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        dropped = {"drop": ("lm_head.weight",)} if way == "drop" else {}
        convert(tmp_path / "maxtext", family, **dropped)
        options = {"like": tmp_path / "config.json", "model": ModelOptions(tied=way)}
        built = back(tmp_path / "maxtext", tmp_path / "hf", **options)
        assert ("lm_head.weight" in tensors(built)) == (way == "materialize")
        written = json.loads((built / "config.json").read_bytes())
        assert written == {**config, "tie_word_embeddings": way == "drop"}

    def test_missing_mtp_layers_are_reported(self, tmp_path):
        convert(tmp_path / "maxtext", "deepseek3")
        (told,) = plan_to_huggingface(tmp_path / "maxtext").plan.remarks
        assert told.startswith("config.json: num_nextn_predict_layers is 1, but MTP layers")
        assert told.endswith('do not exist here; like="HF_DIR" carry=True copies them from the model')
        # This model's files lack them: carrying them would change nothing.
        for carry in (True, False):
            options = ToHuggingFace(like=hf("deepseek3"), carry=carry)
            (told,) = plan_to_huggingface(tmp_path / "maxtext", options).plan.remarks
            assert told.endswith("do not exist here, nor in the model")

    @pytest.mark.parametrize(
        ("names", "are_there"),
        [
            (["model.layers.0.a", "model.layers.1.a", "model.layers.2.a"], True),
            (["model.layers.0.a", "model.layers.1.a"], False),
            (["model.layers.1.a", "mtp.layers.0.a"], True),
            ([], False),
        ],
    )
    def test_mtp_layers_are_found(self, names, are_there):
        """Behind the others, or below a name of their own."""
        config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
        assert absent_mtp_field(config, names) == (None if are_there else "num_nextn_predict_layers")

    def test_missing_config_is_reported(self, tmp_path):
        shutil.rmtree(convert(tmp_path / "maxtext", "qwen3") / "hf")
        (told,) = plan_to_huggingface(tmp_path / "maxtext").plan.remarks
        assert told.startswith("no config.json is written")

    @SCANS
    def test_exact_option_refuses_rounding_scales(self, tmp_path, scan):
        """A head of 8: the query is divided by sqrt(8), which rounds some of its elements."""
        source = odd_heads(tmp_path / "source")
        for exact in (False, True):
            options = ToMaxText(scan=scan, exact=exact)
            plan_to_maxtext(source, options).run(tmp_path / f"maxtext-{exact}")
            back(tmp_path / f"maxtext-{exact}", tmp_path / f"hf-{exact}")
        assert_same(tensors(tmp_path / "hf-True"), tensors(source))
        plain = tensors(tmp_path / "hf-False")
        differing = [
            name for name, array in tensors(source).items() if not np.array_equal(plain[name], array)
        ]
        assert differing and all("q_proj" in name for name in differing)
        for name in differing:
            ulps = plain[name].view(np.int16).astype(int) - tensors(source)[name].view(np.int16).astype(int)
            assert np.abs(ulps).max() == 1
        tree = ckpttools.open(tmp_path / "maxtext-True")
        wide = {path for path, array in tree.arrays.items() if array.dtype.name == "float32"}
        assert wide and all("query" in path for path in wide)

    def test_plan_lists_inexact_values(self, tmp_path):
        source = odd_heads(tmp_path / "source")
        notes = plan_to_maxtext(source).plan.notes
        assert ["query" in note.subject for note in notes.inexact] == [True]
        assert "at most 1 ulp" in notes.inexact[0].text
        assert not plan_to_maxtext(source, ToMaxText(exact=True)).plan.notes.inexact

    def test_float32_cannot_be_stored_exactly(self, tmp_path):
        source = odd_heads(tmp_path / "source", np.float32)
        with pytest.raises(UsageError, match="reverse conversion is exact"):
            plan_to_maxtext(source, ToMaxText(exact=True))

    def test_float32_norms_round_trip_in_float32(self, tmp_path):
        source = tmp_path / "source"
        shutil.copytree(hf("gemma2"), source)
        wide = {name: array.astype(np.float32) for name, array in tensors(hf("gemma2")).items()}
        save_file(wide, source / "model.safetensors", {"format": "pt"})
        plan_to_maxtext(source).run(tmp_path / "maxtext")
        built = tensors(back(tmp_path / "maxtext", tmp_path / "hf"))
        assert {array.dtype for array in built.values()} == {np.dtype(np.float32)}
        for name, array in wide.items():
            assert np.abs(built[name] - array).max() < 1e-6


def odd_heads(directory: Path, dtype=ml_dtypes.bfloat16) -> Path:
    """A Llama whose head dimension is no power of four."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 96,
        "vocab_size": 50,
        "tie_word_embeddings": True,
    }
    shapes = {"model.embed_tokens.weight": (50, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        below = f"model.layers.{layer}"
        shapes |= {
            f"{below}.input_layernorm.weight": (64,),
            f"{below}.post_attention_layernorm.weight": (64,),
            f"{below}.self_attn.q_proj.weight": (64, 64),
            f"{below}.self_attn.k_proj.weight": (32, 64),
            f"{below}.self_attn.v_proj.weight": (32, 64),
            f"{below}.self_attn.o_proj.weight": (64, 64),
            f"{below}.mlp.gate_proj.weight": (96, 64),
            f"{below}.mlp.up_proj.weight": (96, 64),
            f"{below}.mlp.down_proj.weight": (64, 96),
        }
    random = np.random.default_rng(5)
    directory.mkdir()
    arrays = {name: random.normal(0, 0.02, shape).astype(dtype) for name, shape in shapes.items()}
    save_file(arrays, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class TestVocabulary:
    @SCANS
    @pytest.mark.parametrize("family", ["gemma2", "llama3.1"])
    def test_vocabulary_padding_is_removed(self, tmp_path, family, scan):
        item = convert(tmp_path / "maxtext", family, scan=scan, pad_vocab=300)
        tree = ckpttools.open(item)
        embedding = tree["params", "params", "token_embedder", "embedding"].read()
        plain = ckpttools.open(convert(tmp_path / "plain", family, scan=scan))
        assert embedding.shape == (300, 64)
        assert not embedding[256:].astype(np.float32).any()
        unpadded = plain["params", "params", "token_embedder", "embedding"].read()
        assert embedding[:256].tobytes() == unpadded.tobytes()
        head = tree.get(("params", "params", "decoder", "logits_dense", "kernel"))
        assert head is None or head.shape == (64, 300)
        conversion = plan_to_huggingface(tmp_path / "maxtext")
        assert any("the last 44 are cut off" in note.text for note in conversion.plan.notes.values)
        conversion.run(tmp_path / "hf")
        assert_same(tensors(tmp_path / "hf"), tensors(hf(family)))

    @SCANS
    @pytest.mark.parametrize("tied", [True, False], ids=["embedding", "head"])
    def test_nonzero_rows_are_never_dropped(self, tmp_path, scan, tied):
        """A configuration of fewer rows than were learned; and one learned element in the last padded row."""
        convert(tmp_path / "maxtext", "llama3.1", scan=scan)
        config = json.loads((hf("llama3.1") / "config.json").read_bytes())
        (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 200}))
        with pytest.raises(ConfigError, match="the last 56 rows of the vocabulary") as error:
            plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(like=tmp_path / "config.json"))
        assert str(error.value.location).startswith("token_embedder.embedding in ")
        assert error.value.got == "256 rows for a vocabulary of 200; row 200 is not zero"

        tree = ckpttools.open(convert(tmp_path / "padded", "llama3.1", scan=scan, pad_vocab=300))
        name = ("token_embedder", "embedding") if tied else ("decoder", "logits_dense", "kernel")
        path = ("params", "params", *name)
        learned = tree.arrays[path].read()
        learned[(299, 5) if tied else (5, 299)] = np.float32(-1e-30)
        save(
            Tree({**tree.leaves, path: stored(learned, DTYPES["bfloat16"])}, tree.metadata),
            tmp_path / "learned",
        )
        with pytest.raises(ConfigError, match="the last 44 rows of the vocabulary") as error:
            plan_to_huggingface(tmp_path / "learned")
        assert str(error.value.location).startswith(".".join(name))
        assert "row 299 is not zero" in str(error.value.got)
        # What the hint says: all rows are kept.
        (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
        built = tensors(back(tmp_path / "learned", tmp_path / "hf", like=tmp_path / "config.json"))
        written = built["model.embed_tokens.weight" if tied else "lm_head.weight"]
        assert written.tobytes() == (learned if tied else np.ascontiguousarray(learned.T)).tobytes()

    def test_vocabulary_rows_are_never_removed(self, tmp_path):
        with pytest.raises(UsageError, match="padding cannot remove rows"):
            plan_to_maxtext(hf("llama3.1"), ToMaxText(pad_vocab=255))

    def test_maxtext_vocabulary_size_is_reported(self, tmp_path):
        source = tmp_path / "source"
        shutil.copytree(hf("gemma2"), source)
        arrays = tensors(hf("gemma2"))
        arrays["model.embed_tokens.weight"] = np.zeros((256000, 64), ml_dtypes.bfloat16)
        save_file(arrays, source / "model.safetensors", {"format": "pt"})
        config = json.loads((source / "config.json").read_bytes())
        (source / "config.json").write_text(json.dumps({**config, "vocab_size": 256000}))
        notes = plan_to_maxtext(source).plan.notes.values
        assert [note.text for note in notes if note.subject == "vocabulary"] == [
            "256000 rows, 256128 in MaxText's own configuration: pad_vocab=256128, "
            "or set vocab_size=256000 (rows of the embedding) in MaxText's configs/models/*.yml, "
            "or on its command line"
        ]


class TestTiedHead:
    """The configuration decides; what contradicts it is refused, unless the user says what to do."""

    def model(self, directory: Path, *, declared: bool, head: bool) -> Path:
        shutil.copytree(hf("llama3.1"), directory)
        config = json.loads((directory / "config.json").read_bytes())
        (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": declared}))
        if not head:
            arrays = tensors(hf("llama3.1"))
            del arrays["lm_head.weight"]
            save_file(arrays, directory / "model.safetensors", {"format": "pt"})
        return directory

    @pytest.mark.parametrize("declared", [True, False])
    @pytest.mark.parametrize("head", [True, False])
    def test_config_decides_the_head(self, tmp_path, declared, head):
        source = self.model(tmp_path / "source", declared=declared, head=head)
        if declared == head:
            with pytest.raises(CoverageError, match=r"lm_head\.weight") as error:
                plan_to_maxtext(source)
            ways = 'tied="keep" keeps both' if head else "`tied` keep, drop or materialize"
            assert ways in str(error.value.hint)
        else:
            plan_to_maxtext(source).run(tmp_path / "maxtext")
            assert_same(tensors(back(tmp_path / "maxtext", tmp_path / "hf")), tensors(source))

    @pytest.mark.parametrize("wrong", ["missing", "of the wrong shape"])
    def test_head_option_is_not_suggested_for_other_faults(self, tmp_path, wrong):
        source = self.model(tmp_path / "source", declared=False, head=False)
        arrays = tensors(source)
        norm = arrays.pop("model.norm.weight")
        if wrong != "missing":
            arrays["model.norm.weight"] = norm[:-1]
        save_file(arrays, source / "model.safetensors", {"format": "pt"})
        with pytest.raises(CoverageError, match=r"model\.norm\.weight") as error:
            plan_to_maxtext(source)
        assert "`tied`" not in error.value.hint
        assert "check that config.json belongs to these weights" in error.value.hint

    @pytest.mark.parametrize("declared", [True, False])
    @pytest.mark.parametrize("head", [True, False])
    @pytest.mark.parametrize("way", ["keep", "drop", "materialize"])
    def test_tied_option_controls_the_head_in_maxtext(self, tmp_path, declared, head, way):
        source = self.model(tmp_path / "source", declared=declared, head=head)
        dropped = ("lm_head.weight",) if way == "drop" and head else ()
        options = ToMaxText(model=ModelOptions(tied=way), drop=dropped)
        conversion = plan_to_maxtext(source, options)
        arrays = conversion.plan.tree.arrays
        kernel = arrays.get(("params", "params", "decoder", "logits_dense", "kernel"))
        assert (kernel is not None) == {"keep": head, "drop": False, "materialize": True}[way]
        assert conversion.plan.notes.dropped == (("lm_head.weight",) if way == "drop" and head else ())
        if way == "materialize" and not head:
            embedding = tensors(source)["model.embed_tokens.weight"]
            assert np.array_equal(kernel.read(), embedding.T)

    @pytest.mark.parametrize("way", ["keep", "drop", "materialize"])
    @pytest.mark.parametrize("head", [True, False])
    def test_tied_option_controls_the_head_in_hugging_face(self, tmp_path, head, way):
        source = self.model(tmp_path / "source", declared=not head, head=head)
        plan_to_maxtext(source).run(tmp_path / "maxtext")
        if head and way == "drop":
            with pytest.raises(ConfigError, match="the output head differs from the embedding"):
                back(tmp_path / "maxtext", tmp_path / "hf", model=ModelOptions(tied=way))
            return
        built = back(tmp_path / "maxtext", tmp_path / "hf", model=ModelOptions(tied=way))
        there = "lm_head.weight" in tensors(built)
        assert there == {"keep": head, "drop": False, "materialize": True}[way]
        assert json.loads((built / "config.json").read_bytes())["tie_word_embeddings"] == (not there)
        if there and not head:
            arrays = tensors(built)
            assert np.array_equal(arrays["lm_head.weight"], arrays["model.embed_tokens.weight"])


class TestNames:
    HUB, INNER = "language_model.model.norm.weight", "model.language_model.norm.weight"

    def test_both_spellings_round_trip(self, tmp_path):
        source = tmp_path / "source"
        shutil.copytree(hf("gemma3"), source)
        arrays = {inner(name): array for name, array in tensors(hf("gemma3")).items()}
        assert self.INNER in arrays
        save_file(arrays, source / "model.safetensors", {"format": "pt"})
        plan_to_maxtext(source, ToMaxText(carry=True)).run(tmp_path / "maxtext")
        same = ckpttools.open(convert(tmp_path / "hub", "gemma3", text_only=False))
        for path, array in ckpttools.open(tmp_path / "maxtext").arrays.items():
            assert array.read().tobytes() == same[path].read().tobytes()
        assert_same(tensors(back(tmp_path / "maxtext", tmp_path / "hf")), arrays)

    @pytest.mark.parametrize("family", ["gemma3", "gemma4-moe", "llama4-scout"])
    @pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
    def test_all_spellings_of_multimodal_models_are_read(self, tmp_path, family, prefix):
        source = tmp_path / "source"
        shutil.copytree(hf(family), source)
        arrays = {respelled(name, prefix): array for name, array in tensors(hf(family)).items()}
        save_file(arrays, source / "model.safetensors", {"format": "pt"})
        alone = prefix == "model."
        plan_to_maxtext(source, ToMaxText(text_only=alone, carry=True)).run(tmp_path / "maxtext")
        plain = ckpttools.open(convert(tmp_path / "plain", family, text_only=alone))
        for path, array in ckpttools.open(tmp_path / "maxtext").arrays.items():
            assert array.read().tobytes() == plain[path].read().tobytes()
        assert_same(tensors(back(tmp_path / "maxtext", tmp_path / "hf")), arrays)

    def test_transformers_names_are_written_on_request(self, tmp_path):
        convert(tmp_path / "maxtext", "gemma3", carry=True)
        built = tensors(back(tmp_path / "maxtext", tmp_path / "hf", spelling="transformers"))
        assert self.INNER in built
        assert self.HUB not in built

    def test_unknown_spelling_is_refused(self, tmp_path):
        convert(tmp_path / "maxtext", "qwen3")
        with pytest.raises(UsageError, match="no such spelling of names"):
            plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(spelling="transformers"))


def inner(name: str) -> str:
    """A hub name of Gemma 3 as transformers has it."""
    return respelled(name, "model.language_model.")


def respelled(name: str, prefix: str) -> str:
    """A name of a multimodal model with another prefix for those of its text part, and towers beside it."""
    for known in ("language_model.model.", "model.language_model."):
        if name.startswith(known):
            return prefix + name.removeprefix(known)
    if name == "language_model.lm_head.weight":
        return name if prefix.startswith("language_model") else "lm_head.weight"
    within = "model." if prefix == "model.language_model." else ""
    return within + name.removeprefix("model.")


class TestWrittenFiles:
    def test_shards_have_an_index_and_layers_stay_together(self, tmp_path):
        convert(tmp_path / "maxtext", "llama3.1")
        writer = SafetensorsWriter(100_000)
        plan_to_huggingface(tmp_path / "maxtext", writer=writer).run(tmp_path / "hf")
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_bytes())["weight_map"]
        assert len(set(index.values())) > 3
        for layer in range(4):
            files = {file for name, file in index.items() if f".{layer}." in name}
            assert len(files) <= 2
        assert_same(tensors(tmp_path / "hf"), tensors(hf("llama3.1")))

    def test_tokenizer_round_trips(self, tmp_path):
        source = tmp_path / "source"
        shutil.copytree(hf("qwen3"), source)
        texts = {"tokenizer.json": b"{}", "merges.txt": b"a b\n", "chat_template.jinja": b"{{ x }}"}
        for name, content in texts.items():
            (source / name).write_bytes(content)
        (source / "README.md").write_text("not needed")
        plan_to_maxtext(source).run(tmp_path / "maxtext")
        built = back(tmp_path / "maxtext", tmp_path / "hf")
        assert {name: (built / name).read_bytes() for name in texts} == texts
        assert not (built / "README.md").exists()


def test_rope_layout_is_recorded(tmp_path):
    """Chosen on the way to MaxText, it holds for the way back, with --like as well."""
    sizes = LlamaSizes(layers=1, hidden=32, mlp=64, heads=2, kv_heads=2, head_dim=16, vocab=64)
    write_llama(tmp_path / "hf", sizes)
    before = ckpttools.open(tmp_path / "hf")
    for layout in ("halves", "interleaved"):
        options = ToMaxText(model=ModelOptions(rope_layout=layout))
        plan_to_maxtext(tmp_path / "hf", options).run(tmp_path / layout)
        for like in (None, tmp_path / "hf"):
            out = tmp_path / f"{layout}-{like is None}"
            plan_to_huggingface(tmp_path / layout, ToHuggingFace(like=like)).run(out)
            after = ckpttools.open(out)
            assert all((after.arrays[path].read() == before.arrays[path].read()).all() for path in before)


def test_family_file_is_recorded(tmp_path):
    """The built-in one of its name would take its arrays for others."""
    text = family_to_toml(families()["llama"])
    other = tmp_path / "mine.toml"
    other.write_text(
        text.replace("mlp.gate_proj", "mlp.X")
        .replace("mlp.up_proj", "mlp.gate_proj")
        .replace("mlp.X", "mlp.up_proj")
    )
    built, back = tmp_path / "made", tmp_path / "back"
    ckpttools.hf_to_maxtext(HF, built, family=str(other))
    with pytest.raises(UsageError, match=r"(?s)with a family file.*PATH/mine\.toml"):
        ckpttools.maxtext_to_hf(built, back)
    assert not back.exists()
    ckpttools.maxtext_to_hf(built, back, family=str(other))
    assert ckpttools.diff(HF, back).equal


def test_named_family_is_used_for_the_reverse_conversion(tmp_path):
    hf = shutil.copytree(HF, tmp_path / "hf")
    config = json.loads((hf / "config.json").read_bytes())
    (hf / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))
    ckpttools.hf_to_maxtext(hf, tmp_path / "made", family="llama")
    ckpttools.maxtext_to_hf(tmp_path / "made", tmp_path / "back")
    assert ckpttools.diff(hf, tmp_path / "back").equal


@pytest.mark.parametrize("name", ["spelling", "rope_layout", "family"])
def test_non_string_record_is_refused(tmp_path, name):
    ckpttools.hf_to_maxtext(HF, tmp_path / "made")
    note = tmp_path / "made" / "0" / "items" / "hf" / "ckpttools.json"
    note.write_text(json.dumps({name: 5}))
    with pytest.raises(FormatError, match=f"(?s){name} is not a string.*ckpttools.json.*5"):
        ckpttools.maxtext_to_hf(tmp_path / "made", tmp_path / "back")
    assert not (tmp_path / "back").exists()
