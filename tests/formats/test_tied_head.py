"""Output heads are compared with the embedding before they are dropped."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 then)
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.command_line import ckpt, doctor
from support.object_stores import files_in

import ckpttools
from ckpttools import DTYPES, CheckpointError, ConfigError, CoverageError
from ckpttools.array.nodes import swap_last_axes
from ckpttools.checks.registry import OWN_CHECKS
from ckpttools.maxtext.stored_head import StoredHead
from ckpttools.maxtext.tied_embeddings import Head
from ckpttools.testing.models import LlamaSizes, write_llama
from ckpttools.testing.strategies import noise, stored

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NAMES = Head(EMBEDDING, HEAD)
PLENTY = 1 << 28
ROWS = 24


def model(directory, *, tied, change=lambda arrays: None, metadata=None):
    """Write a small Llama whose head equals its embedding, after `change` has modified its arrays."""
    write_llama(directory, LlamaSizes(1, 32, 64, 2, 2, 16, ROWS, tied=tied))
    arrays = load_file(directory / "model.safetensors")
    arrays[HEAD] = arrays[EMBEDDING].copy()
    change(arrays)
    save_file(arrays, directory / "model.safetensors", {"format": "pt", **(metadata or {})})
    return directory


def change_rows(*rows):
    def change(arrays):
        for row in rows:
            arrays[HEAD][row, 3] += np.asarray(0.5, arrays[HEAD].dtype)

    return change


@pytest.mark.parametrize(
    ("name", "signaling"), [("float32", 0x7F800001), ("bfloat16", 0x7F81), ("float16", 0x7C01)]
)
@pytest.mark.filterwarnings("error")
def test_nan_is_compared_without_a_warning(name, signaling):
    dtype = DTYPES[name]
    values = np.ones((ROWS, 8), dtype.numpy).view(f"u{dtype.numpy.itemsize}")
    head, table = values.copy(), values.copy()
    head[0, 0] = table[0, 0] = signaling
    head[1, 0] = signaling
    head[2, 0] = signaling + 1
    table[2, 0] = signaling
    arrays = [stored(item.view(dtype.carrier), dtype) for item in (head, table)]
    result = StoredHead(NAMES, *arrays).deviation(memory=PLENTY)
    assert (result.rows, result.largest) == (1, np.inf)


def without(name):
    return lambda arrays: arrays.pop(name)


def arrays_of(directory):
    return load_file(directory / "model.safetensors")


@given(
    st.sets(st.integers(0, ROWS - 1)),
    st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
    st.booleans(),
)
def test_deviation_counts_rows_and_finds_the_largest_difference(rows, name, is_transposed):
    dtype = DTYPES[name]
    table = np.arange(ROWS * 8, dtype=np.float64).reshape(ROWS, 8).astype(dtype.numpy)
    head = table.copy()
    for row in rows:
        head[row, row % 8] = -head[row, row % 8] - 1
    arrays = [stored(item.view(dtype.carrier), dtype) for item in (head, table)]
    shown = swap_last_axes(arrays[0]) if is_transposed else arrays[0]
    result = StoredHead(NAMES, shown, arrays[1], is_transposed).deviation(memory=PLENTY)
    if not rows:
        assert result is None
        return
    largest = np.abs(head.astype(np.float64) - table.astype(np.float64)).max()
    assert (result.rows, result.compared, result.largest) == (len(rows), ROWS, largest)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_deviation_handles_nan_and_infinity(value):
    dtype = DTYPES["float32"]
    table = noise((4, 4), dtype)
    head = table.copy()
    head.view(np.float32)[2, 1] = value
    result = StoredHead(NAMES, stored(head, dtype), stored(table, dtype)).deviation(memory=PLENTY)
    assert (result.rows, result.largest) == (1, np.inf)
    same = StoredHead(NAMES, stored(head, dtype), stored(head.copy(), dtype))
    assert same.deviation(memory=PLENTY) is None


def test_deviation_compares_some_rows_of_a_large_table():
    dtype = DTYPES["float32"]
    table = noise((1000, 4), dtype)
    other = stored(noise((1000, 4), dtype, 1), dtype)
    result = StoredHead(NAMES, stored(table, dtype), other).deviation(memory=PLENTY, max_rows=64)
    assert result.rows == result.compared == 64


def test_deviation_reports_different_shapes():
    dtype = DTYPES["float32"]
    arrays = stored(noise((5, 4), dtype), dtype), stored(noise((4, 4), dtype), dtype)
    assert str(StoredHead(NAMES, *arrays).deviation(memory=PLENTY)) == "a different shape"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_tied_drop_leaves_out_an_equal_head(tmp_path, tied, dtype):
    def cast(arrays):
        if dtype:
            arrays[HEAD] = arrays[HEAD].astype(dtype)

    source = model(tmp_path / "hf", tied=tied, change=cast)
    result = ckpt("convert", "hf-to-maxtext", source, tmp_path / "maxtext", "--tied", "drop")
    assert result.exit_code == 0, result.stderr
    assert ckpt("verify", tmp_path / "maxtext", "--against", source).exit_code == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [(0,), (ROWS - 1,), (3, 5, 7), range(ROWS)])
def test_tied_drop_refuses_a_different_head(tmp_path, tied, rows):
    source = model(tmp_path / "hf", tied=tied, change=change_rows(*rows))
    result = ckpt("convert", "hf-to-maxtext", source, tmp_path / "maxtext", "--tied", "drop")
    assert result.exit_code == 3
    assert f"{len(rows)} of 24 rows differ, by up to " in result.stderr
    assert "--tied keep keeps the head; --drop lm_head.weight discards it" in result.stderr
    assert not (tmp_path / "maxtext").exists()


@pytest.mark.parametrize("options", [("--tied", "drop", "--drop", HEAD), ("--drop", HEAD)])
def test_head_is_dropped_by_name(tmp_path, options):
    source = model(tmp_path / "hf", tied=False, change=change_rows(1))
    result = ckpt("convert", "hf-to-maxtext", source, tmp_path / "maxtext", *options)
    assert result.exit_code == 0, result.stderr
    assert ckpt("verify", tmp_path / "maxtext", "--against", source).exit_code == 1
    assert ckpt("verify", tmp_path / "maxtext", "--against", source, "--drop", HEAD).exit_code == 0


@pytest.mark.parametrize(("rows", "way"), [((), "drop stores both once"), ((2,), "keep keeps both")])
def test_refused_head_error_suggests_lossless_option(tmp_path, rows, way):
    source = model(tmp_path / "hf", tied=True, change=change_rows(*rows))
    with pytest.raises(CoverageError) as error:
        ckpttools.hf_to_maxtext(source, tmp_path / "maxtext")
    assert ("differs from" in error.value.got) == bool(rows)
    result = ckpt("convert", "hf-to-maxtext", source, tmp_path / "maxtext")
    assert f"--tied {way}" in result.stderr
    # The comparison has settled whether the head duplicates the embedding.
    assert "use drop if" not in result.stderr
    chosen = way.partition(" ")[0]
    result = ckpt("convert", "hf-to-maxtext", source, tmp_path / "maxtext", "--tied", chosen)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("way", ["keep", "drop", "materialize"])
def test_reverse_conversion_needs_no_option(tmp_path, tied, has_head, way):
    source = model(tmp_path / "hf", tied=tied, change=(lambda _: None) if has_head else without(HEAD))
    result = ckpt("convert", "hf-to-maxtext", source, tmp_path / "maxtext", "--tied", way)
    assert result.exit_code == 0, result.stderr
    result = ckpt("convert", "maxtext-to-hf", tmp_path / "maxtext", tmp_path / "back")
    assert result.exit_code == 0, result.stderr
    assert ckpt("verify", tmp_path / "back", "--against", tmp_path / "maxtext").exit_code == 0
    built, config = arrays_of(tmp_path / "back"), json.loads((tmp_path / "back/config.json").read_text())
    assert config["tie_word_embeddings"] == (HEAD not in built)
    expected = arrays_of(source)
    expected.setdefault(HEAD, expected[EMBEDDING])
    for name, array in built.items():
        assert array.tobytes() == expected[name].tobytes()
    assert built.keys() | {HEAD} == expected.keys()


def test_maxtext_to_hf_refuses_to_drop_a_different_head(tmp_path):
    source = model(tmp_path / "hf", tied=False, change=change_rows(4))
    ckpttools.hf_to_maxtext(source, tmp_path / "maxtext")
    result = ckpt("convert", "maxtext-to-hf", tmp_path / "maxtext", tmp_path / "back", "--tied", "drop")
    assert result.exit_code == 3
    assert "1 of 24 rows differ, by up to " in result.stderr
    command = "ckpt select SRC DST --drop '*decoder/logits_dense/kernel'"
    assert command in result.stderr
    parts = ["select", tmp_path / "maxtext", tmp_path / "less", "--drop", "*decoder/logits_dense/kernel"]
    assert ckpt(*parts).exit_code == 0
    result = ckpt("convert", "maxtext-to-hf", tmp_path / "less", tmp_path / "back", "--tied", "drop")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("to", ["maxtext", "hf"])
def test_load_refuses_to_drop_a_different_head(tmp_path, to):
    source = model(tmp_path / "hf", tied=False, change=change_rows(4))
    if to == "hf":
        ckpttools.hf_to_maxtext(source, tmp_path / "maxtext")
        source = tmp_path / "maxtext"
    with pytest.raises(ConfigError, match="the output head differs from the embedding"):
        ckpttools.load(source, to=to, tied="drop")


# What safetensors.torch.save_model writes


@pytest.mark.parametrize(("stored_name", "alias"), [(HEAD, EMBEDDING), (EMBEDDING, HEAD)])
@pytest.mark.parametrize("tied", [True, False])
def test_alias_is_read_under_both_names(tmp_path, stored_name, alias, tied):
    source = model(tmp_path / "hf", tied=tied, change=without(alias), metadata={alias: stored_name})
    tree = ckpttools.open(source)
    assert tree[alias].read().tobytes() == tree[stored_name].read().tobytes()
    assert tree.metadata.custom == {"format": "pt"}
    result = ckpt("convert", "hf-to-maxtext", source, tmp_path / "maxtext")
    assert result.exit_code == 0, result.stderr
    plain = model(tmp_path / "plain", tied=tied, change=without(HEAD) if tied else lambda _: None)
    for built, against in [(tmp_path / "maxtext", plain), (tmp_path / "maxtext", source)]:
        result = ckpt("verify", built, "--against", against)
        assert result.exit_code == 0, result.output
    result = ckpt("convert", "to-safetensors", source, tmp_path / "both")
    assert arrays_of(tmp_path / "both").keys() >= {HEAD, EMBEDDING}


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": EMBEDDING + "s"},
        {EMBEDDING: EMBEDDING},
        {HEAD: "model.gone.weight"},
        {"note": "of nothing"},
    ],
)
def test_other_metadata_is_not_an_alias(tmp_path, metadata):
    source = model(tmp_path / "hf", tied=True, change=without(HEAD), metadata=metadata)
    tree = ckpttools.open(source)
    assert HEAD not in tree and "note" not in tree
    assert tree.metadata.custom == {"format": "pt", **metadata}


def test_alias_of_save_model_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_model

    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    tied["b"].weight = tied["a"].weight
    save_model(tied, str(tmp_path / "model.safetensors"))
    tree = ckpttools.open(tmp_path)
    assert {path[0] for path in tree} == {"a.weight", "a.bias", "b.weight", "b.bias"}
    with pytest.raises(CheckpointError):
        tree["c.weight"]


# What doctor reports


def findings_of(path, check="tied-head"):
    return [finding for finding in doctor(path).findings if finding.check == check]


def run_command(command, directory):
    """Run a command that doctor suggests, as a user pastes it."""
    command = command.replace(" DST", " made").replace("ckpt ", f"{sys.executable} -m ckpttools ", 1)
    subprocess.run(["bash", "-ec", command], cwd=directory, check=True, capture_output=True)


def set_config(directory, **fields):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return directory


@settings(max_examples=25)
@given(st.sets(st.integers(0, ROWS - 1)), st.floats(0.25, 64, width=16))
def test_doctor_counts_differing_head_rows(rows, step):
    def change(arrays):
        for row in rows:
            arrays[HEAD][row, 1] = arrays[HEAD][row, 1].astype(np.float32) + step

    with tempfile.TemporaryDirectory() as name:
        source = model(Path(name) / "m", tied=True, change=change)
        arrays = arrays_of(source)
        head, table = (arrays[item].astype(np.float64) for item in (HEAD, EMBEDDING))
        (result,) = findings_of(source)
        differing = int((head != table).any(axis=1).sum())
        assert (result.level == "error") == bool(differing)
        if differing:
            assert f"{differing} of 24 rows differ, by up to {np.abs(head - table).max():.3g}" in result.what
        assert findings_of(source, "coverage") == []


def changed_to(value):
    def change(arrays):
        arrays[HEAD][5] = np.asarray(value, arrays[HEAD].dtype)

    return change


def as_float32(arrays):
    arrays[HEAD] = arrays[HEAD].astype(np.float32) + np.float32(1e-6)


def negative_zeros(arrays):
    arrays[EMBEDDING][5], arrays[HEAD][5] = 0.0, -0.0


@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        (change_rows(0), "error", "1 of 24 rows differ, by up to 0.5"),
        (change_rows(*range(ROWS)), "error", "24 of 24 rows differ"),
        (changed_to(np.nan), "error", "1 of 24 rows differ, by up to inf"),
        (changed_to(np.inf), "error", "1 of 24 rows differ, by up to inf"),
        (as_float32, "error", "rows differ"),
        (lambda arrays: arrays.update({HEAD: arrays[HEAD][:-1].copy()}), "error", "a different shape"),
        (negative_zeros, "info", "has the values of"),
        (lambda arrays: None, "info", "has the values of"),
        (without(HEAD), None, ""),
        (without(EMBEDDING), None, ""),
    ],
)
def test_doctor_compares_a_stored_tied_head(tmp_path, change, level, text):
    source = model(tmp_path / "m", tied=True, change=change)
    result = findings_of(source)
    assert [item.level for item in result] == [level] * (level is not None)
    assert all(text in item.what for item in result)
    assert doctor(source).healthy == (level == "info" or HEAD not in arrays_of(source))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model_type": "unknown"},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        # transformers ties Gemma where the configuration does not state it.
        {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "tie_word_embeddings": None},
    ],
)
def test_tied_heads_of_all_families_are_compared(tmp_path, fields):
    source = set_config(model(tmp_path / "m", tied=True, change=change_rows(4)), **fields)
    (result,) = findings_of(source)
    assert result.level == "error" and "1 of 24 rows differ" in result.what
    assert (result.command is None) == ("tie_word_embeddings" in fields)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "policy."])
def test_tied_heads_under_a_prefix_are_compared(tmp_path, prefix):
    source = model(tmp_path / "m", tied=True, change=change_rows(4))
    named = {prefix + name: array for name, array in arrays_of(source).items()}
    save_file(named, source / "model.safetensors")
    assert [item.level for item in findings_of(source)] == ["error"]


@pytest.mark.parametrize(
    "fields", [{"tie_word_embeddings": False}, {"tie_word_embeddings": None}, {"model_type": None}]
)
def test_untied_heads_are_not_compared(tmp_path, fields):
    source = model(tmp_path / "m", tied="model_type" not in fields or None, change=change_rows(4))
    assert findings_of(set_config(source, **{"tie_word_embeddings": None} | fields)) == []


@pytest.mark.parametrize("stored_name", [HEAD, EMBEDDING])
def test_doctor_does_not_report_an_alias(tmp_path, stored_name):
    alias = ({HEAD, EMBEDDING} - {stored_name}).pop()
    source = model(tmp_path / "m", tied=True, change=without(alias), metadata={alias: stored_name})
    assert findings_of(source) == []


def test_head_and_other_unexpected_arrays_are_reported(tmp_path):
    def change(arrays):
        change_rows(4)(arrays)
        arrays["model.layers.0.extra.weight"] = np.ones(4, np.float32)

    source = model(tmp_path / "m", tied=True, change=change)
    assert [item.level for item in findings_of(source)] == ["error"]
    assert "model.layers.0.extra.weight" in findings_of(source, "coverage")[0].what


@pytest.mark.parametrize("is_in_shards", [True, False])
def test_commands_for_a_tied_head_lead_to_a_healthy_model(tmp_path, is_in_shards):
    source = model(tmp_path / "m", tied=True, change=change_rows(4))
    if is_in_shards:
        ckpttools.convert(source, tmp_path / "shards", max_shard_size="4kB")
        source = tmp_path / "shards"
    values = {".".join(path): array.read().tobytes() for path, array in ckpttools.open(source).arrays.items()}
    (result,) = findings_of(source)
    run_command(result.hint.split("`")[1], tmp_path)
    assert doctor(tmp_path / "made").healthy
    built = {
        ".".join(path): item.read().tobytes()
        for path, item in ckpttools.open(tmp_path / "made").arrays.items()
    }
    assert built == {name: value for name, value in values.items() if name != HEAD}
    run_command(result.command, tmp_path)
    assert doctor(source).healthy and findings_of(source) == []
    ckpttools.hf_to_maxtext(source, tmp_path / "maxtext")
    ckpttools.maxtext_to_hf(tmp_path / "maxtext", tmp_path / "back", like=source)
    assert arrays_of(tmp_path / "back")[HEAD].tobytes() == values[HEAD]


def test_command_for_a_repeated_head_leads_to_a_healthy_model(tmp_path):
    source = model(tmp_path / "m", tied=True)
    (result,) = findings_of(source)
    run_command(result.command, tmp_path)
    assert HEAD not in arrays_of(tmp_path / "made")
    assert doctor(tmp_path / "made").healthy and findings_of(tmp_path / "made") == []


def test_conversions_do_not_compare_a_tied_head_twice():
    assert "tied_head" in OWN_CHECKS


@pytest.mark.parametrize(
    ("rows", "level", "text"),
    [
        (slice(None), "error", "256 of 256 rows differ"),
        (slice(0, 1), "error", "1 of 256 rows differ"),
        # A row that no sample contains: equality is not claimed.
        (slice(1200, 1201), "warning", "only 256 rows were compared"),
        (slice(0, 0), "warning", "only 256 rows were compared"),
    ],
)
def test_doctor_samples_a_tied_head_in_a_bucket(tmp_path, gcs, rows, level, text):
    source = tmp_path / "m"
    write_llama(source, LlamaSizes(1, 32, 64, 2, 2, 16, 4096, tied=True))
    arrays = arrays_of(source)
    arrays[HEAD] = arrays[EMBEDDING].copy()
    arrays[HEAD][rows] += np.asarray(8, arrays[HEAD].dtype)
    save_file(arrays, source / "model.safetensors", {"format": "pt"})
    (result,) = findings_of(gcs.filled(files_in(source)))
    assert result.level == level and text in result.what
