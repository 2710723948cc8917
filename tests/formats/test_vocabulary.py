"""Rows beyond a vocabulary: nothing is cut off, or called equal, but the zeros that it was padded with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import run
from support.golden_data import SCAN_NAMES, convert
from support.locations import GOLDEN

import ckpttools
from ckpttools import DTYPES, MemoryBudgetError, Tree, save
from ckpttools.maxtext import vocabulary
from ckpttools.maxtext.vocabulary import Surplus, drop_surplus, find_surpluses
from ckpttools.testing.strategies import chunk_shapes, chunked, stored

PARAMS = ("params", "params")
EMBEDDING = (*PARAMS, "token_embedder", "embedding")
HEAD = (*PARAMS, "decoder", "logits_dense", "kernel")
PLENTY = 512 << 20
FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn")


@given(st.data(), st.integers(0, 1), st.sampled_from(FLOATS))
def test_nonzero_row_is_found_anywhere(data, axis, name):
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    kept = data.draw(st.integers(0, shape[axis] - 1))
    dtype = DTYPES[name]
    truth = np.ones(shape, dtype.numpy)
    beyond = truth[kept:] if axis == 0 else truth[:, kept:]
    beyond[...] = data.draw(st.sampled_from([0.0, -0.0]))
    for _ in range(data.draw(st.integers(0, 2))):
        at = tuple(data.draw(st.integers(0, n - 1)) for n in beyond.shape)
        beyond[at] = data.draw(st.sampled_from([0.125, -1.0, np.nan, -0.0]))
    chunk = data.draw(st.none() | chunk_shapes(shape))
    carried = truth.view(dtype.carrier)
    array = chunked(carried, dtype, chunk) if chunk else stored(carried, dtype)
    extra = Surplus.of("a", array, axis, kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_COMPARED_ELEMENTS", data.draw(st.sampled_from([1, 3, 1 << 18])))
        row = extra.first_learned(memory=PLENTY)
    learned = np.flatnonzero((np.moveaxis(beyond, axis, 0).astype(np.float32) != 0).any(axis=1)) + kept
    assert (row is None) == (learned.size == 0)
    assert row is None or row in learned
    assert (extra.count, extra.there) == (shape[axis] - kept, shape[axis])
    rest = drop_surplus(array, extra).read()
    assert rest.tobytes() == np.ascontiguousarray(truth[:kept] if axis == 0 else truth[:, :kept]).tobytes()


def test_padding_rows_are_read_within_the_memory():
    extra = Surplus.of("a", stored(np.zeros((9, 4), np.uint16), DTYPES["bfloat16"]), 0, 5)
    with pytest.raises(MemoryBudgetError):
        extra.first_learned(memory=90 << 20)
    with pytest.raises(MemoryBudgetError):
        extra.first_learned(memory=PLENTY, reserved=PLENTY)
    assert extra.rows.shape == (4, 4)
    assert extra.location == "a[5:9]"


def test_only_extra_rows_count_as_padding():
    embedding = {"token_embedder/embedding": stored(np.zeros((9, 4), np.float32), DTYPES["float32"])}
    for shape, result in (((5, 4), 1), ((9, 4), 0), ((10, 4), 0), ((5, 3), 0), ((5,), 0), ((5, 4, 1), 0)):
        assert len(find_surpluses(embedding, {"token_embedder/embedding": shape})) == result
    assert find_surpluses(embedding, {}) == find_surpluses({}, {"token_embedder/embedding": (5, 4)}) == {}


def with_learned(source: Path, destination: Path, path: tuple[str, ...]) -> Path:
    """A checkpoint with one number in the last row of a padded vocabulary."""
    tree = ckpttools.open(source)
    values = tree.arrays[path].read()
    values[(299, 5) if path == EMBEDDING else (5, 299)] = np.float32(-1e-30)
    save(Tree({**tree.leaves, path: stored(values, DTYPES["bfloat16"])}, tree.metadata), destination)
    return destination


@pytest.mark.parametrize("scan", [True, False], ids=SCAN_NAMES.get)
@pytest.mark.parametrize("family", ["llama3.1", "llama3.2-tied"])
class TestPadded:
    def test_zero_rows_are_left_out_with_a_remark(self, tmp_path, family, scan):
        source, built, manifest = GOLDEN / family / "hf", tmp_path / "maxtext", tmp_path / "m.json"
        convert(built, family, scan=scan, pad_vocab=300)
        run("convert", "maxtext-to-hf", built, tmp_path / "hf")
        run("hash", source, "--as", "maxtext", "--manifest", manifest)
        for command in (
            ("verify", built, "--against", source),
            ("verify", tmp_path / "hf", "--against", built),
            ("verify", built, "--manifest", manifest),
            ("diff", built, source),
            ("diff", source, built),
        ):
            told = json.loads(run(*command, "--json"))
            assert told["equal"]
            rows = [text for text in told["remarks"] if "[256:300]" in text]
            assert len(rows) == 1 and "left out, because vocabularies are padded with zeros" in rows[0]
            head = [text for text in told["remarks"] if "kernel[:, 256:300]" in text]
            assert len(head) == (family == "llama3.1")
            counted = json.loads(run(*command, "--padding-rows", "keep", "--json", code=1))
            assert not counted["equal"]

    def test_learned_padding_rows_are_reported(self, tmp_path, family, scan):
        source, manifest, built = GOLDEN / family / "hf", tmp_path / "m.json", tmp_path / "learned"
        convert(tmp_path / "maxtext", family, scan=scan, pad_vocab=300)
        path = HEAD if family == "llama3.1" else EMBEDDING
        rows = f"{'/'.join(path[2:])}[{':, ' * (path == HEAD)}256:300]"
        with_learned(tmp_path / "maxtext", built, path)
        run("hash", source, "--as", "maxtext", "--manifest", manifest)
        for command, name, reason in (
            (("verify", built, "--against", source), rows, "extra"),
            (("verify", source, "--against", built), rows.replace("/", "."), "missing"),
            (("verify", built, "--manifest", manifest), rows, "extra"),
            (("diff", built, source), rows, "only in A"),
            (("diff", source, built), rows, "only in B"),
        ):
            told = json.loads(run(*command, "--json", code=1))
            (result,) = told["differences"] if command[0] == "verify" else told["arrays"]
            assert (result["name"], result.get("reason", result.get("outcome"))) == (name, reason)
            (remark,) = [text for text in told["remarks"] if "row 299 is not zero" in text]
            assert name in remark and "--padding-rows drop" in remark
            declared = json.loads(run(*command, "--padding-rows", "drop", "--json"))
            # Names in remarks are those of the comparison, which are MaxText's where it finds nothing.
            assert any(
                "left out (--padding-rows drop)" in text and rows in text for text in declared["remarks"]
            )
        if path == EMBEDDING:
            # What is not asked for is not read.
            filtered = run("diff", built, source, "--filter", "*norm*")
            assert "256:300" not in filtered

    def test_conversion_keeps_or_drops_rows_only_on_request(self, tmp_path, family, scan):
        source, built, out = GOLDEN / family / "hf", tmp_path / "learned", tmp_path / "out"
        convert(tmp_path / "maxtext", family, scan=scan, pad_vocab=300)
        like = ("--like", source)
        with_learned(tmp_path / "maxtext", built, EMBEDDING)
        refused = run("convert", "maxtext-to-hf", built, out, *like, code=3)
        assert "--padding-rows keep" in refused and "row 299 is not zero" in refused
        assert not out.exists()
        dropped = run("convert", "maxtext-to-hf", built, out, *like, "--padding-rows", "drop")
        assert (
            "the last 44 are cut off, including values that are not zero (--padding-rows drop)"
            in " ".join(dropped.split())
        )
        run("verify", out, "--against", source)
        assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
        kept = run("convert", "maxtext-to-hf", built, tmp_path / "kept", *like, "--padding-rows", "keep")
        assert "config.json: vocab_size is 300, because all rows are kept; it was 256" in kept
        config = json.loads((tmp_path / "kept" / "config.json").read_bytes())
        assert config == {**json.loads((source / "config.json").read_bytes()), "vocab_size": 300}
        expected = ckpttools.open(built).arrays[EMBEDDING].read()
        there = ckpttools.open(tmp_path / "kept").arrays["model.embed_tokens.weight",].read()
        assert there.tobytes() == expected.tobytes()
        run("verify", tmp_path / "kept", "--against", built)
        # And there again, all rows.
        run("convert", "hf-to-maxtext", tmp_path / "kept", tmp_path / "again")
        run("verify", tmp_path / "again", "--against", built, "--parameters")


def test_multimodal_configuration_is_read(tmp_path):
    convert(tmp_path / "maxtext", "gemma3", pad_vocab=300, carry=True)
    run("convert", "maxtext-to-hf", tmp_path / "maxtext", tmp_path / "hf", "--padding-rows", "keep")
    config = json.loads((tmp_path / "hf" / "config.json").read_bytes())
    original = json.loads((GOLDEN / "gemma3" / "hf" / "config.json").read_bytes())
    assert config["text_config"] == {**original["text_config"], "vocab_size": 300}
    assert config == {**original, "text_config": config["text_config"]}


def test_padding_option_is_refused_without_conversion(tmp_path):
    source = GOLDEN / "qwen3" / "hf"
    run("hash", source, "--manifest", tmp_path / "m.json")
    for command in (
        ("verify", source, "--against", source),
        ("verify", source, "--manifest", tmp_path / "m.json"),
        ("diff", source, source),
    ):
        assert "--padding-rows requires" in run(*command, "--padding-rows", "drop", code=2)
