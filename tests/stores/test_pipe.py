"""Transforms in one pass: the order on the command line, pipes in Python, and the page that explains them."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import run
from support.golden_data import golden_checkpoint
from support.internals import OrbaxWriter, ZarrWriter, keystr, plan_tree
from support.locations import DOCS, GOLDEN, HF

import ckpttools
from ckpttools import DTYPES, CastMap, CastTo, Metadata, Select, Tree, UsageError, mapped_by
from ckpttools.core.notes import Notes
from ckpttools.formats.registry import writer_for
from ckpttools.testing.strategies import assert_same, noise, stored, trees

PAGES = DOCS / "transforms.md", DOCS / "add-a-transform.md"
F32 = DTYPES["float32"]


class TestPipe:
    @given(trees())
    def test_empty_pipe_returns_the_tree(self, tree):
        built = tree.pipe()
        assert_same(built, tree)
        assert built.metadata == tree.metadata

    @settings(max_examples=30)
    @given(trees(structure=False), st.lists(st.sampled_from(["float64", "float16", "bfloat16"]), max_size=3))
    def test_pipe_in_steps_equals_single_pipe(self, tree, names):
        casts = [CastTo(name) for name in names]
        map_concurrently, in_steps = tree.pipe(*casts), tree
        for cast in casts:
            in_steps = in_steps.pipe(cast)
        assert_same(map_concurrently, in_steps)
        assert map_concurrently.metadata.notes == in_steps.metadata.notes

    def test_pipe_notes_accumulate_in_the_plan(self):
        tree = Tree({(name,): stored(noise((2,), F32), F32) for name in "ab"}, Metadata())
        built = tree.pipe(Select(drop=["a"]), CastTo("bfloat16"))
        plan = plan_tree(built, ZarrWriter()).plan
        assert plan.notes == built.metadata.notes
        assert plan.notes.dropped == ("a",)
        assert [note.subject for note in plan.notes.inexact] == ["1 array"]
        assert tree.metadata.notes == Notes()

    def test_save_accepts_writer_options(self, tmp_path):
        tree = ckpttools.open(golden_checkpoint(True)).pipe(Select(["*norm*"]))
        ckpttools.save(tree, tmp_path / "out", item="state", ocdbt=False)
        assert (tmp_path / "out" / "0" / "state" / "_METADATA").is_file()
        assert not list((tmp_path / "out").rglob("manifest.ocdbt"))
        with pytest.raises(UsageError, match="not stored with these options"):
            ckpttools.save(tree, tmp_path / "st", "safetensors", compression="zstd")
        conversion = ckpttools.plan_save(tree, "zarr3")
        assert len(conversion.plan.tree) == 3
        assert not (tmp_path / "st").exists()

    def test_save_keeps_step_and_item_of_the_source(self):
        tree = Tree({("a",): stored(noise((2,), F32), F32)}, Metadata(format="orbax", step=5, item="params"))
        assert writer_for(tree) == OrbaxWriter(step=None, item="params")
        assert writer_for(tree, item="x", as_step=1) == OrbaxWriter(step=1, item="x")
        assert writer_for(tree.with_metadata(item=None)) == OrbaxWriter(step=None, item="items")


NAMES = '[[rules]]\nfrom = "model.layers.{i}.{...}"\nto = "blocks.{i+1}.{...}"\n'


class TestSingleCommand:
    """Patterns of --drop are about old names, those of --dtype-map about new ones, whatever comes first."""

    OPTIONS = (
        ("--drop", "model.layers.*.self_attn"),
        ("--map", "names.toml"),
        ("--dtype-map", "blocks.*=float32"),
        ("--dtype", "float16"),
    )

    @pytest.fixture
    def names(self, tmp_path, monkeypatch):
        (tmp_path / "names.toml").write_text(NAMES)
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize("target", ["to-orbax", "to-safetensors", "to-zarr3"])
    @pytest.mark.parametrize("order", [1, -1])
    def test_option_order_is_irrelevant(self, names, target, order):
        options = [text for pair in self.OPTIONS[::order] for text in pair]
        run("convert", target, HF, "out", *options)
        built = ckpttools.open(Path("out"))
        expected = ckpttools.open(HF).pipe(
            Select(drop=["model.layers.*.self_attn"]),
            mapped_by({"model.layers.{i}.{...}": "blocks.{i+1}.{...}"}),
            CastMap({"blocks.*": "float32"}, "float16"),
        )
        assert {keystr(path) for path in built} == {keystr(path) for path in expected}
        for path, array in expected.arrays.items():
            got = next(item for other, item in built.arrays.items() if keystr(other) == keystr(path))
            assert got.dtype == array.dtype
            assert np.array_equal(got.read(), array.read())

    def test_convert_reads_only_selected_arrays(self, names):
        options = [text for pair in self.OPTIONS for text in pair]
        report = json.loads(run("convert", "to-orbax", HF, "out", *options, "--dry-run", "--json"))
        tree = ckpttools.open(HF)
        kept = sum(a.nbytes for p, a in tree.arrays.items() if "self_attn" not in p[0])
        assert report["bytes_in"] == kept

    def test_convert_strips_optimizer_and_casts(self, tmp_path):
        source = GOLDEN.parent / "orbax" / "maxtext_run"
        run("convert", "to-orbax", source, tmp_path / "out", "--strip-optimizer", "--dtype", "float16")
        before, after = ckpttools.open(source), ckpttools.open(tmp_path / "out")
        assert any(path[0] == "opt_state" for path in before.arrays)
        kept = {path: array for path, array in before.arrays.items() if path[0] == "params"}
        assert {path for path in after.arrays if path[0] == "params"} == set(kept)
        assert not any(path[0] == "opt_state" for path in after.arrays)

    def test_dependent_options_are_refused_alone(self, tmp_path):
        assert "--map" in run("convert", "to-zarr3", HF, tmp_path / "out", "--strict", code=2)

    def test_runs_with_different_transforms_do_not_mix(self):
        """What is left of an interrupted conversion belongs to the transforms that began it."""
        one = plan_tree(ckpttools.open(HF).pipe(CastTo("float16")), ZarrWriter()).plan.fingerprint()
        two = plan_tree(ckpttools.open(HF).pipe(CastTo("bfloat16")), ZarrWriter()).plan.fingerprint()
        again = plan_tree(ckpttools.open(HF).pipe(CastTo("float16")), ZarrWriter()).plan.fingerprint()
        assert one == again != two


@pytest.fixture(scope="module")
def location(tmp_path_factory):
    """A directory with a checkpoint of each kind."""
    location = tmp_path_factory.mktemp("page")
    shutil.copytree(golden_checkpoint(True), location / "maxtext" / "llama")
    shutil.copytree(HF, location / "hf" / "llama")
    return location


class TestPage:
    """Every block of docs/transforms.md and docs/add-a-transform.md runs, in order."""

    def test_documented_python_code_works(self, location, monkeypatch):
        monkeypatch.chdir(location)
        page = ModuleType("page")
        # Dataclasses look for their module.
        monkeypatch.setitem(sys.modules, "page", page)
        blocks = code_blocks("python")
        assert len(blocks) == 5
        for block in blocks:
            exec(compile(block, "page", "exec"), vars(page))
        assert ckpttools.open(location / "out" / "body").metadata.format == "orbax"
        thin = ckpttools.open(location / "out" / "thin")
        source = ckpttools.open(location / "maxtext" / "llama")
        path = ("params", "params", "decoder", "layers", "mlp", "wo", "kernel")
        assert np.array_equal(thin[path].read(), source[path].read()[:, ::2])

    def test_documented_commands_work(self, location, monkeypatch):
        monkeypatch.chdir(location)
        (location / "names.toml").write_text(code_blocks("toml")[0])
        commands = [line[2:] for block in code_blocks("console") for line in block.splitlines()]
        assert len(commands) == 3
        for command in commands:
            run(*shlex.split(command)[1:])
        norms, source = ckpttools.open(location / "out" / "norms"), ckpttools.open(location / "hf" / "llama")
        assert {array.dtype.name for array in norms.arrays.values()} == {"float32"}
        built = ckpttools.open(location / "out" / "remapped")
        up = [source[f"model.layers.{k}.mlp.up_proj.weight",].read().T for k in range(4)]
        path = ("params", "params", "decoder", "layers", "mlp", "wi_1", "kernel")
        assert np.array_equal(built[path].read(), np.stack(up, axis=1))
        assert ("rest", "4", "self_attn.v_proj.weight") in built
        assert not any("lm_head" in path[0] for path in built)


def code_blocks(language):
    texts = [page.read_text() for page in PAGES]
    return [part.split("\n```")[0] for text in texts for part in text.split(f"```{language}\n")[1:]]
