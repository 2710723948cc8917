"""What lies beside the weights: apart from arrays, as it was when planned, never dropped in silence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.command_line import run
from support.golden_data import all_described
from support.internals import OrbaxWriter, Started, ZarrWriter, parse, plan_tree
from support.locations import GOLDEN, GOLDEN_0_2_5

import ckpttools
from ckpttools import (
    ConfigError,
    FormatError,
    Prepared,
    ToHuggingFace,
    ToMaxText,
    Tree,
    plan_save,
    plan_to_huggingface,
    plan_to_maxtext,
)
from ckpttools.formats.sidecar import read_file
from ckpttools.run.events import Event
from ckpttools.run.source_copies import fingerprint
from ckpttools.transforms.rename import renames

TOKENIZER = b'{"model": "the one that was planned"}'


@pytest.fixture
def model(tmp_path) -> Path:
    """A model with a tokenizer."""
    shutil.copytree(GOLDEN / "qwen3" / "hf", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes(TOKENIZER)
    return tmp_path / "model"


class TestChanged:
    """A file that is replaced, or grows, while the weights are written is not published half-way."""

    @pytest.fixture(params=["any", "to_maxtext", "to_huggingface"])
    def planned(self, request, model, tmp_path):
        if request.param == "to_huggingface":
            plan_to_maxtext(model).run(tmp_path / "maxtext")
        return {
            "any": lambda: plan_tree(ckpttools.open(model), OrbaxWriter(step=0)),
            "to_maxtext": lambda: plan_to_maxtext(model),
            "to_huggingface": lambda: plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(like=model)),
        }[request.param]

    @pytest.mark.parametrize("change", ["written", "replaced"])
    def test_sidecar_changed_during_conversion_is_refused(self, planned, model, tmp_path, change):
        tokenizer, out = model / "tokenizer.json", tmp_path / "out"
        conversion: Prepared = planned()

        def meddle(event: Event) -> None:
            if isinstance(event, Started) and change == "written":
                tokenizer.write_bytes(b"{}")
            elif isinstance(event, Started):
                other = tokenizer.with_suffix(".new")
                other.write_bytes(TOKENIZER.swapcase())
                os.utime(other, ns=(0, tokenizer.stat().st_mtime_ns))
                other.rename(tokenizer)

        with pytest.raises(FormatError, match=r"tokenizer\.json (was changed|ends too early)"):
            conversion.run(out, observe=meddle)
        assert not out.exists()
        now = tokenizer.read_bytes()
        planned().run(out)
        assert [path.read_bytes() for path in out.rglob("tokenizer.json")] == [now]

    def test_fingerprint_depends_on_content_of_sidecars(self, planned, model):
        """The content counts, not the modification time, which copies do not share."""
        tokenizer = model / "tokenizer.json"
        first = planned()
        before = fingerprint(first.plan, first.writer)
        content, status = tokenizer.read_bytes(), tokenizer.stat()
        os.utime(tokenizer, ns=(0, status.st_mtime_ns + 1))
        touched = planned()
        assert fingerprint(touched.plan, touched.writer) == before
        tokenizer.write_bytes(content.swapcase())
        os.utime(tokenizer, ns=(0, status.st_mtime_ns))
        changed = planned()
        assert fingerprint(changed.plan, changed.writer) != before

    def test_conversion_refuses_sidecar_changed_with_its_time_restored(self, planned, model, tmp_path):
        tokenizer = model / "tokenizer.json"
        status, conversion = tokenizer.stat(), planned()

        def change(event: Event) -> None:
            if isinstance(event, Started):
                tokenizer.write_bytes(tokenizer.read_bytes().swapcase())
                os.utime(tokenizer, ns=(0, status.st_mtime_ns))

        with pytest.raises(FormatError, match=r"tokenizer\.json was changed after"):
            conversion.run(tmp_path / "out", observe=change)
        assert not (tmp_path / "out").exists()


class TestNames:
    """Arrays have any path; those copied with the model are told from them by more than theirs."""

    def renamed(self, tree: Tree, target: str) -> Tree:
        return tree.pipe(renames({"model.norm.weight": target}))

    def test_array_below_the_sidecar_directory_is_kept(self, model, tmp_path):
        tree = self.renamed(ckpttools.open(model), "hf/carried/x")
        plan_save(tree, "orbax").run(tmp_path / "out")
        built = ckpttools.open(tmp_path / "out")
        expected = load_file(model / "model.safetensors")["model.norm.weight"]
        assert built.arrays["hf", "carried", "x"].read().tobytes() == expected.tobytes()
        assert built.arrays.keys() == tree.arrays.keys()

    def test_array_with_the_path_of_a_sidecar_is_refused(self, tmp_path):
        plan_to_maxtext(GOLDEN / "gemma3" / "hf", ToMaxText(carry=True)).run(tmp_path / "maxtext")
        tree = ckpttools.open(tmp_path / "maxtext")
        carried = load_file(tmp_path / "maxtext" / "0" / "items" / "hf" / "carried.safetensors")
        path, array = next(iter(tree.arrays.items()))
        for name, refused in ((next(iter(carried)), True), ("x", False)):
            leaves = {**tree.leaves, ("hf", "carried", name): array}
            del leaves[path]
            taken = Tree(leaves, tree.metadata)
            if refused:
                with pytest.raises(FormatError, match="copied with the model") as error:
                    plan_save(taken)
                assert error.value.location == f"hf/carried/{name}"
                continue
            plan_save(taken).run(tmp_path / "out")
            assert ckpttools.open(tmp_path / "out").arrays.keys() == taken.arrays.keys()
            kept = load_file(tmp_path / "out" / "0" / "items" / "hf" / "carried.safetensors")
            assert kept.keys() == carried.keys()


def test_plain_zarr_reports_dropped_sidecars(model, tmp_path):
    plan = plan_tree(ckpttools.open(model), ZarrWriter()).plan
    names = sorted(path.name for path in model.iterdir() if path.suffix == ".json")
    assert names
    assert [remark.partition(": ")[2] for remark in plan.remarks] == [", ".join(names)]
    plan_to_maxtext(GOLDEN / "gemma3" / "hf", ToMaxText(carry=True)).run(tmp_path / "maxtext")
    plan = plan_tree(ckpttools.open(tmp_path / "maxtext"), ZarrWriter()).plan
    carried = load_file(tmp_path / "maxtext" / "0" / "items" / "hf" / "carried.safetensors")
    assert set(plan.notes.dropped) == {f"hf/carried/{name}" for name in carried}
    assert "ckpttools.json" in plan.remarks[0]


def test_sidecars_do_not_depend_on_the_target(tmp_path):
    """Of Qwen3.5 the way back goes by it: whether experts are apart, as in quantized files."""
    shutil.copytree(GOLDEN_0_2_5 / "qwen3.5" / "hf", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    declared = json.dumps(config).encode()
    (tmp_path / "model" / "config.json").write_bytes(declared)
    run("convert", "hf-to-maxtext", tmp_path / "model", tmp_path / "maxtext")
    run("unstack", tmp_path / "maxtext", tmp_path / "single")
    run("stack", tmp_path / "single", tmp_path / "stacked", "--dtype", "float32")
    run("select", tmp_path / "stacked", tmp_path / "chosen", "--drop", "step")
    run("cast", tmp_path / "chosen", tmp_path / "cast", "--dtype", "bfloat16")
    for name in ("maxtext", "single", "stacked", "chosen", "cast"):
        (carried,) = (tmp_path / name).rglob("hf/config.json")
        assert carried.read_bytes() == declared
    for name in ("maxtext", "cast"):
        run("convert", "maxtext-to-hf", tmp_path / name, tmp_path / f"{name}-hf")
    built, expected = (
        load_file(tmp_path / f"{name}-hf" / "model.safetensors") for name in ("cast", "maxtext")
    )
    assert all_described(built) == all_described(expected)
    assert "quantization_config" not in json.loads((tmp_path / "cast-hf" / "config.json").read_bytes())


@pytest.mark.parametrize(
    ("name", "error", "next_step"),
    [
        (
            "model.embed_tokens.weight",
            ConfigError,
            "this Orbax checkpoint does not contain a config.json",
        ),
        ("encoder.weight", FormatError, "has neither Hugging Face nor MaxText names"),
    ],
)
def test_orbax_without_config_names_the_missing_files(tmp_path, name, error, next_step):
    plan_save({name: np.ones((4, 2), np.float32)}, "orbax").run(tmp_path / "a")
    with pytest.raises(error, match=next_step):
        plan_to_maxtext(tmp_path / "a")


def test_unreadable_unchanged_sidecar_is_reported(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    file = parse(tmp_path / "config.json").open()

    def refused(*_):
        raise FormatError("it cannot be")

    monkeypatch.setattr(type(file), "read", refused)
    with pytest.raises(FormatError, match="it cannot be"):
        read_file(file)
