"""The documentation is executed: examples run, the generated page is fresh, links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.hf_models import write_llama
from support.places import ROOT

import ckpttools
from ckpttools.core.dtypes import DTYPES

FAMILY_PAGE = ROOT / "docs" / "add-a-family.md"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def code_blocks(page: Path, language: str) -> list[str]:
    blocks, inside, lines = [], False, []
    for line in page.read_text().splitlines():
        if line == f"```{language}":
            inside, lines = True, []
        elif line == "```" and inside:
            inside = False
            blocks.append("\n".join(lines) + "\n")
        elif inside:
            lines.append(line)
    return blocks


def install(
    directory: Path, page: str, module: str, group: str, name: str, attribute: str, block: int = 0
) -> None:
    """Lays the page's module out as an installed distribution with its entry point."""
    (directory / f"{module}.py").write_text(code_blocks(ROOT / "docs" / page, "python")[block])
    info = directory / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{attribute}\n")


def with_path(path: Path | None) -> dict[str, str]:
    """The environment, with one more place for modules."""
    places = [str(path)] if path else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*places, *sys.path])}


def ckpt_process(*arguments: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What a new process does, which finds what is installed in `path`."""
    command = [sys.executable, "-c", "from ckpttools.cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=with_path(path), check=False)


@pytest.mark.parametrize("name", ["cli.md", "families.md", "reference.md"])
def test_generated_pages_are_fresh(name):
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check", name], check=False)
    assert done.returncode == 0, "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for part in text.split("](")[1:]:
        target = part.split(")")[0].split("#")[0]
        if target and "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_family_that_the_page_explains_is_the_one_that_there_is():
    from ckpttools.families.registry import families

    names: dict[str, object] = {}
    exec(code_blocks(FAMILY_PAGE, "python")[0], names)
    assert names["FAMILY"] == families()["mixtral"]


@pytest.fixture
def tiny(tmp_path):
    """The page's own family in a file, and a model of it."""
    from safetensors.numpy import save_file

    (tmp_path / "tiny.toml").write_text(code_blocks(FAMILY_PAGE, "toml")[0])
    model = tmp_path / "hf"
    model.mkdir()
    sizes = {"num_layers": 2, "hidden_size": 8, "vocab_size": 16, "num_heads": 3}
    config = {"model_type": "tiny", "tie_word_embeddings": True, **sizes}
    (model / "config.json").write_text(json.dumps(config))
    shapes = {"embed.weight": (16, 8), "norm.weight": (8,)}
    for layer in range(2):
        rows = {"norm": (8,), "attn.qkv": (3 * 3 * 4, 8), "attn.out": (8, 12), "up": (24, 8), "down": (8, 24)}
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in rows.items()}
    rng = np.random.default_rng(0)
    # Multiples of 2**-10 are float32 numbers that stay what they are when 1 is added.
    save_file(
        {
            name: np.round(rng.standard_normal(shape) * 1024).astype(np.float32) / 1024
            for name, shape in shapes.items()
        },
        model / "model.safetensors",
    )
    return model


def assert_tiny(model: Path, made: Path) -> None:
    from safetensors.numpy import load_file

    tensors = load_file(model / "model.safetensors")
    tree = ckpttools.open(made)

    def layers(*path: str) -> np.ndarray:
        return tree[("params", "params", "decoder", "layers", *path)].read()

    up = [tensors[f"layers.{layer}.up.weight"].T for layer in range(2)]
    assert np.array_equal(layers("mlp", "wi", "kernel"), np.stack(up, axis=1))
    key = [tensors[f"layers.{layer}.attn.qkv.weight"][12:24].T.reshape(8, 3, 4) for layer in range(2)]
    assert np.array_equal(layers("self_attention", "key", "kernel"), np.stack(key, axis=1))
    norms = [tensors[f"layers.{layer}.norm.weight"] + 1 for layer in range(2)]
    assert np.array_equal(layers("pre_self_attention_layer_norm", "scale"), np.stack(norms, axis=1))


def test_a_family_in_a_file_goes_both_ways_as_the_page_says(tmp_path, tiny):
    file = tmp_path / "tiny.toml"
    for against in ([], ["--against", tiny]):
        checked = ckpt_process("families", "check", file, *against)
        assert checked.returncode == 0, checked.stdout
    there = ckpt_process("convert", "hf-to-maxtext", tiny, tmp_path / "out", "--family", file)
    assert there.returncode == 0, there.stderr
    assert_tiny(tiny, tmp_path / "out")
    back = ckpt_process("convert", "maxtext-to-hf", tmp_path / "out", tmp_path / "back", "--family", file)
    assert back.returncode == 0, back.stderr
    one, other = (path / "model.safetensors" for path in (tiny, tmp_path / "back"))
    from safetensors.numpy import load_file

    tensors, returned = load_file(one), load_file(other)
    assert tensors.keys() == returned.keys()
    assert all(returned[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())


def test_a_family_can_be_added_by_a_package_as_the_page_says(tmp_path, tiny):
    install(tmp_path, "add-a-family.md", "my_family", "ckpttools.families", "tiny", "FAMILY", block=1)
    assert "tiny" in ckpt_process("families", path=tmp_path).stdout
    done = ckpt_process("convert", "hf-to-maxtext", tiny, tmp_path / "out", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_tiny(tiny, tmp_path / "out")


def test_the_examples_of_the_python_page_run_one_after_the_other(tmp_path, monkeypatch):
    write_llama(tmp_path / "hf" / "llama")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "python_page"}
    blocks = code_blocks(ROOT / "docs" / "python.md", "python")
    assert len(blocks) >= 6
    for block in blocks:
        exec(block, names)


def test_the_page_names_every_key_of_a_family_file():
    from dataclasses import fields

    from ckpttools.families.family import Family, FlagRule, Spelling
    from ckpttools.mapping.layers import Layers

    text = FAMILY_PAGE.read_text()
    names = {field.name for kind in (Family, FlagRule, Spelling, Layers) for field in fields(kind)}
    assert [name for name in sorted(names) if name not in text] == []


def test_a_format_can_be_added_as_the_page_says(tmp_path):
    page = "add-a-format.md"
    install(tmp_path, page, "npy_format", "ckpttools.formats", "npy", "FORMAT")
    (tmp_path / "test_npy_format.py").write_text(code_blocks(ROOT / "docs" / page, "python")[1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_npy_format.py"]
    # What hypothesis knows of Unicode takes it 4 s to work out.
    environment = with_path(tmp_path) | {"HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_a_store_can_be_added_as_the_page_says(tmp_path):
    page = "add-a-store.md"
    install(tmp_path, page, "zip_store", "ckpttools.stores", "zip", "STORE")
    (tmp_path / "test_zip_store.py").write_text(code_blocks(ROOT / "docs" / page, "python")[1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_zip_store.py"]
    environment = with_path(tmp_path) | {"HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_the_added_format_is_found_and_is_what_it_says(tmp_path, monkeypatch):
    install(tmp_path, "add-a-format.md", "npy_format", "ckpttools.formats", "npy", "FORMAT")
    monkeypatch.syspath_prepend(tmp_path)
    import npy_format

    from ckpttools.array.tree import Metadata, Tree
    from ckpttools.testing.conformance import write
    from ckpttools.testing.strategies import noise, stored

    dtype = DTYPES["float32"]
    truth = noise((3, 4), dtype)
    write(Tree({("a", "w"): stored(truth, dtype)}, Metadata()), npy_format.NpyWriter(), tmp_path / "out")
    assert np.array_equal(np.load(tmp_path / "out" / "0.npy"), truth.view(dtype.numpy))
    done = ckpt_process("inspect", "tree", tmp_path / "out", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "npy" in done.stdout
    assert "float32[3,4]" in done.stdout


@pytest.fixture
def lzma_codec(tmp_path, monkeypatch):
    """The codec of the page, as an installed package has it."""
    from ckpttools.codecs import registry

    install(tmp_path, "add-a-codec.md", "lzma_codec", "ckpttools.codecs", "lzma", "Lzma")
    monkeypatch.syspath_prepend(tmp_path)
    registry._plug_ins.cache_clear()
    yield
    registry._plug_ins.cache_clear()


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
@pytest.mark.parametrize("shards", [None, (8, 6)])
def test_a_codec_can_be_added_as_the_page_says(tmp_path, lzma_codec, shards):
    import zarr
    from zarr.codecs.numcodecs import LZMA

    truth = np.arange(63, dtype="float32").reshape(9, 7)
    made = zarr.create_group(tmp_path / "z").create_array(
        "w", shape=truth.shape, chunks=(4, 3), shards=shards, dtype="f4", compressors=LZMA(preset=2)
    )
    made[...] = truth
    array = ckpttools.open(tmp_path / "z")[("w",)]
    assert np.array_equal(array.read(), truth)
    assert np.array_equal(array[2:7, 1:4], truth[2:7, 1:4])
    (found,) = ckpttools.chunks(tmp_path / "z").arrays
    assert (found.codecs[0], found.compressed) == ("lzma:2", True)
    assert ckpttools.doctor(tmp_path / "z").findings == ()
    chunk = next(path for path in sorted((tmp_path / "z" / "w" / "c").rglob("0")) if path.is_file())
    chunk.write_bytes(chunk.read_bytes()[:-1])
    assert any("are cut" in each.what for each in ckpttools.doctor(tmp_path / "z").findings)


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
def test_the_added_codec_is_written_and_refused(tmp_path, lzma_codec):
    import zarr

    from ckpttools.core.errors import FormatError, UsageError

    truth = np.arange(63, dtype="float32").reshape(9, 7)
    zarr.create_group(tmp_path / "a").create_array("w", data=truth)
    ckpttools.convert(tmp_path / "a", tmp_path / "z", to="zarr3", compression="lzma:1")
    assert np.array_equal(ckpttools.open(tmp_path / "z")[("w",)].read(), truth)
    assert np.array_equal(zarr.open_array(tmp_path / "z" / "w", mode="r")[...], truth)
    with pytest.raises(UsageError, match="unknown compression 'lzma:10'") as refused:
        ckpttools.convert(tmp_path / "a", tmp_path / "y", to="zarr3", compression="lzma:10")
    assert "lzma or lzma:LEVEL with a level from 0 to 9" in refused.value.wanted
    chunk = next(path for path in (tmp_path / "z" / "w" / "c").rglob("*") if path.is_file())
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 255
    chunk.write_bytes(data)
    with pytest.raises(FormatError, match="the lzma data is damaged") as damaged:
        ckpttools.open(tmp_path / "z")[("w",)].read()
    assert damaged.value.place.endswith("w, chunk c/0/0")


def test_a_plug_in_that_cannot_be_loaded_is_named_and_breaks_nothing(tmp_path):
    install(tmp_path, "add-a-family.md", "my_family", "ckpttools.families", "tiny", "FAMILY", block=1)
    (tmp_path / "my_family.py").write_text("raise RuntimeError('boom')\n")
    done = ckpt_process("families", path=tmp_path)
    assert done.returncode == 0
    assert "llama" in done.stdout
    assert "my_family" in done.stderr
    assert "boom" in done.stderr


def test_every_command_has_an_example():
    page = (ROOT / "docs" / "cli.md").read_text()
    for section in page.split("\n## ")[1:]:
        assert "Example:" in section, section.splitlines()[0]


def test_the_map_names_modules_that_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`(\w+(?:/\w+)*\.py)`", page)
    assert len(named) > 30
    assert [name for name in named if not any((ROOT / at / name).exists() for at in ("ckpttools", "."))] == []
    rooms = {path.name for path in (ROOT / "ckpttools").iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == rooms
