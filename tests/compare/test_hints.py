"""An option that leaves all that differs out of account is named; where something else differs, none is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.command_line import ckpt, ended, run
from support.golden_data import convert
from support.hf_models import write_llama
from support.locations import FIXTURES, GOLDEN, HF, TRAINED

import ckpttools
from ckpttools import DTYPES, Tree, save
from ckpttools.testing.strategies import stored

CAST = "values were not compared where dtypes differ: --cast compares with SRC cast to the dtypes of DST"
DIFF = " shows the size of the differences and known causes"
PARAMETERS = "--parameters compares only the parameters"
BOTH = f"two options are needed: {PARAMETERS}, and {CAST.partition(': ')[2]}"


OPEN_INSTRUCT = FIXTURES / "torch/trainers/open-instruct"
PEFT = FIXTURES / "peft"


def hints(command: str, *arguments: object, code: int = 1) -> list[str]:
    arguments = (command, *arguments, "--json", "--no-progress")
    result = ckpt(*arguments)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)["hints"]


def changed(source: Path, destination: Path, name: str) -> Path:
    """A checkpoint with one other number in the only array that has such a name."""
    tree = ckpttools.open(source)
    (path,) = (path for path in tree.arrays if name in path and path[0] == "params")
    values = tree.arrays[path].read()
    values.reshape(-1)[0] += 1
    save(Tree({**tree.leaves, path: stored(values, tree.arrays[path].dtype)}, tree.metadata), destination)
    return destination


def test_hint_suggests_cast_for_another_dtype(tmp_path):
    built = {}
    for name in ("bfloat16", "float16", "float32"):
        convert(built.setdefault(name, tmp_path / name), "qwen3", dtype=DTYPES[name])
    source = GOLDEN / "qwen3" / "hf"
    same, half, wide = (built[name] for name in ("bfloat16", "float16", "float32"))
    for one, other in ((wide, same), (same, wide), (half, source)):
        assert hints("verify", one, "--against", other) == [CAST]
        assert hints("verify", one, "--against", other, "--cast", code=0) == []
    assert hints("diff", same, wide) == [
        "the numbers are the same: with --ignore-dtype they are equal in any dtype"
    ]
    assert hints("diff", same, wide, "--ignore-dtype", code=0) == []
    # Of a rounded float32 only a cast tells, and which of the two is the rounded one.
    tree = ckpttools.open(wide)
    fine = dict(tree.items())
    for path, array in tree.arrays.items():
        if path[0] == "params":
            fine[path] = stored(np.asarray(array.read() * np.float32(1 / 3)), array.dtype)
    save(Tree(fine, tree.metadata), tmp_path / "fine")
    result = ckpt("cast", tmp_path / "fine", tmp_path / "rounded", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    for sides in (("fine", "rounded"), ("rounded", "fine")):
        (hint,) = hints("diff", *(tmp_path / side for side in sides))
        command = hint.removesuffix(" proves that the one is the other, rounded").split()[1:]
        assert [Path(command[1]).parents[1].name, Path(command[3]).parents[1].name] == ["rounded", "fine"]
        assert hints(*command, code=0) == []
    # One number that is no rounding: nothing is talked away.
    damaged = changed(wide, tmp_path / "damaged", "embedding")
    assert hints("diff", damaged, same) == []


def test_hint_suggests_parameters_for_training_state(tmp_path):
    for name in ("stripped", "manifest"):
        arguments = ["strip-optimizer", TRAINED, tmp_path / name, "--copy"]
        assert ckpt(*arguments).exit_code == 0
    stripped, manifest = tmp_path / "stripped", tmp_path / "m.json"
    assert hints("verify", stripped, "--against", TRAINED) == [PARAMETERS]
    assert hints("verify", stripped, "--against", TRAINED, "--parameters", code=0) == []
    assert ckpt("hash", TRAINED, "--manifest", manifest).exit_code == 0
    (hint,) = hints("verify", stripped, "--manifest", manifest)
    assert hint == PARAMETERS
    damaged = changed(stripped, tmp_path / "damaged", "embedding")
    (hint,) = hints("verify", damaged, "--against", TRAINED)
    command = hint.removesuffix(f"`{DIFF}").removeprefix("`ckpt ").split()
    (result,) = json.loads(ckpt(*command, "--json").stdout)["arrays"]
    assert result["name"] == "token_embedder/embedding"
    assert hints("verify", damaged, "--manifest", manifest) == []


def test_hint_names_both_needed_options(tmp_path):
    arguments = ["cast", TRAINED, tmp_path / "cast", "--dtype", "bfloat16"]
    assert ckpt(*arguments).exit_code == 0
    arguments = ["strip-optimizer", tmp_path / "cast", tmp_path / "stripped", "--copy"]
    assert ckpt(*arguments).exit_code == 0
    verify = ("verify", tmp_path / "stripped", "--against", TRAINED)
    assert hints(*verify) == [BOTH]
    # Before the list of all that an option leaves out of account.
    told = ckpt(*verify, "--no-progress").stdout.splitlines()
    assert told.index(BOTH) < told.index("")
    assert hints(*verify, "--parameters", "--cast", code=0) == []


def test_equal_parameters_report_only_different_state(tmp_path):
    """Of two training checkpoints with equal parameters only the state is told."""
    tree = ckpttools.open(TRAINED)
    path = next(path for path in tree.arrays if path[0] == "opt_state" and "mu" in path)
    values = tree.arrays[path].read() + np.float32(1)
    later = tmp_path / "later"
    save(Tree({**tree.leaves, path: stored(values, tree.arrays[path].dtype)}, tree.metadata), later)
    (hint,) = hints("diff", TRAINED, later)
    assert hint.startswith("the compared parameters do not differ: ckpt verify ")
    command = hint.partition(": ckpt ")[2].removesuffix(" compares all of them and nothing else")
    assert hints(*command.split(), code=0) == []


def test_equality_within_tolerance_is_not_exact(tmp_path):
    tree = ckpttools.open(TRAINED)
    state = next(path for path in tree.arrays if path[0] == "opt_state" and "mu" in path)
    norm = next(path for path in tree.arrays if path[0] == "params" and "decoder_norm" in path)
    changed = {
        path: stored(tree.arrays[path].read() + np.float32(by), tree.arrays[path].dtype)
        for path, by in ((state, 1), (norm, 1e-6))
    }
    save(Tree({**tree.leaves, **changed}, tree.metadata), tmp_path / "later")
    assert hints("diff", TRAINED, tmp_path / "later", "--atol", "1e-3") == []


def test_hint_for_manifest_names_usable_options(tmp_path):
    """And obeys what became of the head."""
    source, manifest = GOLDEN / "llama3.2-tied" / "hf", tmp_path / "m.json"
    convert(tmp_path / "maxtext", "llama3.2-tied")
    built = ["hash", str(tmp_path / "maxtext"), "--as", "maxtext", "--manifest", str(manifest)]
    assert ckpt(*built).exit_code == 0
    for option in ("--cast", "--parameters", "--filter=*"):
        refused = ckpt("verify", source, "--manifest", manifest, option)
        assert (refused.exit_code == 2) == (option == "--cast"), refused.output
    assert hints("verify", source, "--manifest", manifest, "--tied", "drop", code=0) == []
    assert hints("verify", source, "--manifest", manifest, "--tied", "materialize") == []


def obeyed(hint: str, **locations: Path) -> list[list[str]]:
    """The commands in a hint, with the paths that its placeholders stand for."""
    known = {name: str(location) for name, location in locations.items()}
    return [[known.get(word, word) for word in text.split()[1:]] for text in hint.split("`")[1::2]]


def test_hint_explains_differing_name_styles(tmp_path):
    source, manifest = GOLDEN / "llama3.1" / "hf", tmp_path / "m.json"
    convert(tmp_path / "maxtext", "llama3.1")
    assert ckpt("hash", source, "--manifest", manifest).exit_code == 0
    (hint,) = hints("verify", tmp_path / "maxtext", "--manifest", manifest)
    again, against = obeyed(hint, SRC=source, DST=tmp_path / "maxtext", FILE=tmp_path / "again.json")
    assert ckpt(*again).exit_code == 0
    assert hints("verify", tmp_path / "maxtext", "--manifest", tmp_path / "again.json", code=0) == []
    assert hints(*against, code=0) == []


def test_hint_explains_layers_stacked_on_one_side(tmp_path):
    stacked, single = tmp_path / "stacked", tmp_path / "single"
    convert(stacked, "llama3.1")
    assert ckpt("unstack", stacked, single).exit_code == 0
    for sides in ((stacked, single), (single, stacked)):
        (hint,) = hints("verify", sides[0], "--against", sides[1], "--whole")
        assert "without --whole" in hint
        assert hints("verify", sides[0], "--against", sides[1], code=0) == []


def test_hint_suggests_the_rope_layout(tmp_path):
    source, built = GOLDEN / "llama3.1" / "hf", tmp_path / "maxtext"
    words = ["convert", "hf-to-maxtext", str(source), str(built), "--rope-layout", "halves"]
    assert ckpt(*words).exit_code == 0
    (hint,) = hints("verify", built, "--against", source)
    (command,) = obeyed(hint, SRC=source, DST=built)
    told = ckpt(*command, "--no-progress").stdout
    assert "rotary pairs" in told and "--rope-layout interleaved" in told


def nan(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def test_equal_values_with_other_bits_are_reported(tmp_path):
    payloads = {"a": nan(0x7FC00000, 0x7FC00000, 0xFFC00001), "b": nan(0x7FC00000, 0x7FC00002, 0xFFC00001)}
    for name, values in payloads.items():
        save_file({"w": values, "zero": np.zeros(3, np.float32)}, tmp_path / f"{name}.safetensors")
    a, b = (tmp_path / f"{name}.safetensors" for name in payloads)
    same = "all numbers are the same except for the sign of zero or the bits of NaN"
    (hint,) = hints("diff", a, b)
    assert hint == f"{same}: with a tolerance, such as --atol 1e-45, these are equal"
    declared = "1 element equal but for the sign of zero or the bits of NaN"
    assert declared in ckpt("diff", a, b, "--no-progress").stdout
    assert hints("diff", a, b, "--atol", "1e-45", code=0) == []
    assert hints("diff", a, a, code=0) == []
    assert ckpt("verify", b, "--against", a, "--no-progress").exit_code == 1
    assert ckpt("verify", a, "--against", a, "--no-progress").exit_code == 0


def test_exact_and_cast_conversions_verify_as_equal(tmp_path):
    """Of a head dimension whose root is no power of two, scaled queries do not fit into 16 bits."""
    write_llama(tmp_path / "hf", head_dim=24)
    for name, words in {"exact": ["--exact"], "cast": ["--dtype", "float32"], "plain": []}.items():
        run("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / name, *words)
    for name, code in {"exact": 0, "cast": 1, "plain": 0}.items():
        ended("diff", tmp_path / "hf", tmp_path / name, code=code)
        ended("diff", tmp_path / name, tmp_path / "hf", code=code)
        ended("diff", tmp_path / "hf", tmp_path / name, "--ignore-dtype")
        ended("verify", tmp_path / name, "--against", tmp_path / "hf", code=code)
        ended("verify", tmp_path / name, "--against", tmp_path / "hf", "--cast")


def test_incomparable_trainer_and_adapter_names_are_explained(tmp_path):
    """Nothing can be compared, and what makes it so is said."""
    trainers, peft = FIXTURES / "torch/trainers", FIXTURES / "peft"
    (told,) = hints("diff", trainers / "open-instruct", trainers / "hub")
    assert told.startswith("no array has the same name on both sides: `ckpt select ")
    assert f"ckpt select {trainers / 'open-instruct'} DST --prefix policy" in told
    (told,) = hints("diff", peft / "bases/llama-float32", peft / "plain")
    merging = f"merge the adapter before comparing it: ckpt adapter merge BASE {peft / 'plain'} MODEL"
    assert merging in told
    told = ended("verify", peft / "plain", "--against", peft / "bases/llama-float32", code=1).output
    assert merging in " ".join(told.split())


def test_adapter_is_refused_on_either_side(tmp_path):
    """It is said to be one, whichever side it is on, and not to lack a configuration."""
    model, plain = FIXTURES / "peft/bases/llama-float32", FIXTURES / "peft/plain"
    ckpttools.hf_to_maxtext(model, tmp_path / "maxtext")
    ckpttools.adapter_to_maxtext(plain, tmp_path / "lora", base=model)
    for built, source in (("maxtext", plain), ("lora", plain), ("lora", model)):
        told = ended("verify", tmp_path / built, "--against", source, code=3).output
        assert "this is a LoRA adapter" in told and "config.json" not in told
    told = ended("verify", model, "--against", tmp_path / "lora", code=3).output
    assert "this is a LoRA adapter, without the parameters of its model" in told
    assert "this is a LoRA adapter" in ended("hash", plain, "--as", "maxtext", code=3).output
    told = ended("verify", tmp_path / "maxtext", "--against", tmp_path / "lora", code=1).output
    assert f"ckpt adapter merge BASE {tmp_path}/lora/0/items MODEL" in " ".join(told.split())


def test_extra_output_head_is_explained(tmp_path):
    """Of tied models it may be the table of embeddings once more, which only numbers tell."""
    for name in ("one", "tied"):
        write_llama(tmp_path / name, num_hidden_layers=1, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "one/model.safetensors")
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    save_file(both, tmp_path / "one/model.safetensors", {"format": "pt"})
    head = (
        "only {} has an output head: `ckpt diff {} {}` reports if it equals the embedding; otherwise "
        "the head has its own values"
    )
    sides = tmp_path / "one", tmp_path / "tied"
    in_tied = head.format("SRC", *sides)
    assert hints("verify", sides[0], "--against", sides[1]) == [head.format("DST", *sides[::-1])]
    assert hints("verify", sides[1], "--against", sides[0]) == [in_tied]
    wide = {name: array.astype("f4") for name, array in tensors.items()}
    save_file(wide, tmp_path / "tied/model.safetensors", {"format": "pt"})
    result = hints("verify", tmp_path / "tied", "--against", tmp_path / "one")
    assert result == [in_tied, CAST.partition(": ")[2]]
    # Both have one. Its other name is recognized, as `ckpt diff` does.
    renamed = {**tensors, "tower.lm_head.weight": both["lm_head.weight"]}
    save_file(renamed, tmp_path / "tied/model.safetensors", {"format": "pt"})
    assert hints("verify", tmp_path / "tied", "--against", tmp_path / "one", code=0) == []


@pytest.mark.parametrize(
    ("words", "declared"),
    [
        (
            ("convert", "hf-to-maxtext", OPEN_INSTRUCT, "OUT"),
            f"`ckpt select {OPEN_INSTRUCT} MODEL --prefix policy --to safetensors` extracts the model",
        ),
        (
            ("stack", HF, "OUT"),
            f"`ckpt convert hf-to-maxtext {HF} DST` converts a Hugging Face model to stacked layers",
        ),
        (
            ("adapter", "merge", PEFT / "bases/llama-float32", PEFT / "experts", "OUT"),
            f"with --against {PEFT / 'bases/llama-float32'} it lists every mismatch",
        ),
    ],
)
def test_hint_names_the_source(words, declared, tmp_path):
    result = ckpt(*(tmp_path / "out" if word == "OUT" else word for word in words))
    assert result.exit_code == 3 and declared in result.stderr
