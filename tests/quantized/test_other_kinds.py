"""Files that other programs write: told by name, with what to do; and directories with several kinds."""

import json
import shutil
from pathlib import Path

import pytest
from support.command_line import ckpt, run, succeed
from support.hf_models import write_llama

FIXTURES = Path(__file__).parents[2] / "fixtures/torch"


@pytest.mark.parametrize(
    ("name", "what", "way"),
    [
        ("model-q4_0.gguf", "llama.cpp files (GGUF)", "hf download REPO"),
        ("llama.nemo", "NeMo archives", "tar -xf"),
        ("model.weights.h5", "Keras weights", "from Keras"),
        ("gemma.keras", "Keras weights", "from Keras"),
        ("model.weights.json", "sharded Keras weights (HDF5)", "model.load_weights("),
        ("tf_model.h5", "TensorFlow weights", "hf download REPO"),
        ("model.ckpt-100.data-00000-of-00002", "TensorFlow checkpoints", "tf.train.load_checkpoint"),
        ("params.pkl", "Python pickles", "is not executed here"),
        ("params.npz", "NumPy arrays", "numpy.load"),
    ],
)
@pytest.mark.parametrize("in_directory", (False, True))
def test_unsupported_files_are_named(tmp_path, name, what, way, in_directory):
    (tmp_path / name).write_bytes(b"whatever it holds")
    told = run("hash", tmp_path if in_directory else tmp_path / name, code=3)
    assert what in told and way in " ".join(told.split()) and name in told
    assert what in ckpt("doctor", tmp_path if in_directory else tmp_path / name).output


SHARDS = [f"model_{number:05}.weights.h5" for number in range(3)]


@pytest.mark.parametrize("lost", [(), SHARDS[1:2], SHARDS[:2], SHARDS])
@pytest.mark.parametrize("named", ["", "model.weights.json"])
def test_sharded_weights_of_keras_are_identified(tmp_path, lost, named):
    weight_map = {"/layers/dense/vars": SHARDS[:2], "/layers/dense_1/vars": SHARDS[2]}
    index = {"metadata": {"total_size": 96.0}, "weight_map": weight_map}
    (tmp_path / "model.weights.json").write_text(json.dumps(index))
    for name in sorted({*SHARDS} - {*lost}):
        (tmp_path / name).write_bytes(b"\x89HDF\r\n\x1a\n")
    for command in ((), ("inspect", "tree"), ("doctor",)):
        result = ckpt(*command, tmp_path / named)
        text = " ".join(result.output.split())
        assert result.exit_code == 3
        assert "these are sharded Keras weights (HDF5), which ckpttools does not read" in text
        assert "and Keras weights" not in text
        assert ("model.load_weights(" in text) == (not lost)
        assert not lost or f"of 3, too: {', '.join(lost)}" in text


def test_files_in_trainer_directories_are_named(tmp_path):
    """Of accelerate beside states of random numbers, of verl, of Meta's code; deeper as well."""
    trainers = FIXTURES / "trainers"
    shutil.copytree(trainers / "fsdp", tmp_path / "run/checkpoint-20")
    (tmp_path / "run/checkpoint-20/random_states_0.pkl").touch()
    inside = f"{tmp_path}/run/checkpoint-20/pytorch_model_fsdp_0"
    for location in ("run", "run/checkpoint-20"):
        assert f"name one of them: ckpt hash {inside}" in run("hash", tmp_path / location, code=3)
    assert run("hash", inside)
    actor = shutil.copytree(trainers / "verl/global_step_10/actor", tmp_path / "a/b/c/global_step_1/actor")
    (actor.parent / "data.pt").touch()
    assert f"name one of them: ckpt hash {actor}" in run("hash", actor.parent, code=3)
    assert f"are in the parent directory: pass {actor}" in run("hash", actor / "huggingface", code=3)
    assert f"ckpt {actor.parent.parent}" in succeed(tmp_path / "a").output
    assert f"ckpt {actor}" in succeed(actor.parent.parent).output
    meta = tmp_path / "meta"
    meta.mkdir()
    shutil.copy(FIXTURES / "full.pt", meta / "consolidated.00.pth")
    shutil.copy(trainers / "hub/config.json", meta)
    assert f"name one of them: ckpt hash {meta}/consolidated.00.pth" in run("hash", meta, code=3)


def test_several_unsupported_kinds_are_listed(tmp_path):
    for name in ("a.gguf", "tf_model.h5"):
        (tmp_path / name).touch()
    told = run("hash", tmp_path, code=3)
    assert "llama.cpp files (GGUF) and TensorFlow weights" in told and "a.gguf, tf_model.h5" in told


def test_several_kinds_with_one_supported_are_listed(tmp_path):
    """The directory that most models on the hub once were."""
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(FIXTURES / "pytorch_model.safetensors", model / "model.safetensors")
    shutil.copy(FIXTURES / "pytorch_model.bin", model)
    (model / "a.gguf").touch()
    declared = "safetensors is read, not torch, a.gguf (llama.cpp files (GGUF))"
    assert declared in " ".join(succeed("inspect", "tree", model).output.split())
    assert declared in " ".join(run("convert", "to-zarr3", model, tmp_path / "out", "--dry-run").split())
    assert "several kinds" not in succeed("inspect", "tree", FIXTURES / "dcp").output


def test_other_weight_files_are_reported(tmp_path):
    """vLLM reads what the index names, transformers `model.safetensors`: who has both should know."""
    model = tmp_path / "model"
    write_llama(model, shards=3)
    for name in ("consolidated.safetensors", "adapter_model.safetensors", "._model.safetensors"):
        shutil.copy(FIXTURES / "pytorch_model.safetensors", model / name)
    out = tmp_path / "out"
    told = " ".join(run("convert", "hf-to-maxtext", model, out, "--dry-run").split())
    assert "the model of model.safetensors.index.json is read, not consolidated.safetensors Dry run" in told
    write_llama(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", model)
    told = " ".join(run("convert", "hf-to-maxtext", model, out, "--dry-run").split())
    assert "here, model.safetensors is read, not consolidated.safetensors and 3 more" in told
    assert "weight files" not in run("convert", "hf-to-maxtext", tmp_path / "other", out, "--dry-run")
    shutil.copy(FIXTURES / "pytorch_model.bin", tmp_path / "other")
    told = " ".join(run("convert", "hf-to-maxtext", tmp_path / "other", out, "--dry-run").split())
    assert "safetensors is read, not torch" in told


def test_contradicting_settings_are_refused_for_any_arrays(tmp_path):
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    succeed("maxtext-config", tmp_path)
    shutil.copy(FIXTURES / "pytorch_model.bin", tmp_path)
    told = ckpt("maxtext-config", tmp_path)
    assert told.exit_code == 3 and "the arrays do not match the model" in told.output


def test_settings_are_refused_if_scales_are_damaged(tmp_path):
    """That arrays cannot be compared with their configuration is no reason to be silent."""
    write_llama(tmp_path / "model")
    succeed("quantize", tmp_path / "model", tmp_path / "fp8", "--scheme", "fp8-block128")
    succeed("maxtext-config", tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8/config.json").read_bytes())
    config["quantization_config"]["weight_block_size"] = [16, 16]
    (tmp_path / "fp8/config.json").write_text(json.dumps(config))
    told = ckpt("maxtext-config", tmp_path / "fp8")
    assert told.exit_code == 3 and "scale" in told.output
