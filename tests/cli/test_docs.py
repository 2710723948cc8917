"""The documentation is executed: examples run, the generated page is fresh, links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.command_line import succeed
from support.hf_models import write_llama
from support.locations import FIXTURES, ROOT
from support.torch_files import save, whole

import ckpttools
from ckpttools import CoverageError, UsageError
from ckpttools.cli.help import TOPICS

FAMILY_PAGE = ROOT / "docs" / "add-a-family.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


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
    locations = [str(path)] if path else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*locations, *sys.path])}


def ckpt_process(*arguments: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What a new process does, which finds what is installed in `path`."""
    command = [sys.executable, "-c", "from ckpttools.cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=with_path(path), check=False)


SESSION = """
import json, sys
from click.testing import CliRunner
from ckpttools.cli.main import main

results = [CliRunner().invoke(main, words) for words in json.loads(sys.argv[1])]
print(json.dumps([{"code": each.exit_code, "output": each.output} for each in results]))
"""


def ckpt_session(*commands: list[object], path: Path) -> list[dict[str, Any]]:
    """The exit codes and outputs of several commands, which find what is installed in `path`."""
    words = json.dumps([[str(word) for word in item] for item in commands])
    command = [sys.executable, "-c", SESSION, words]
    done = subprocess.run(command, capture_output=True, text=True, env=with_path(path), check=True)
    return json.loads(done.stdout)


def run_lines(lines: str) -> None:
    """Every command of a page ends well, one after the other."""
    for line in lines.splitlines():
        succeed(*shlex.split(line.removeprefix("$ ckpt "), comments=True))


def test_generated_pages_are_fresh():
    pages = ("cli.md", "families.md", "oracle.md", "reference.md", "tested-families.md")
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check", *pages], check=False)
    assert done.returncode == 0, "run `make docs`"


def test_picture_in_readme_has_the_words_of_today():
    done = subprocess.run([sys.executable, ROOT / "docs" / "terminal.py", "--check"], check=False)
    assert done.returncode == 0, "run `python docs/terminal.py`"


def test_readme_has_at_most_120_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_existing_targets(page):
    text = page.read_text()
    for part in text.split("](")[1:]:
        target, _, anchor = part.split(")")[0].partition("#")
        if "://" in target:
            continue
        led = page.parent / target if target else page
        assert led.exists(), target
        assert not anchor or anchor in anchors(led), f"{target}#{anchor}"


def anchors(page):
    """What headings are called in links: the second of one name gets a number."""
    result = Counter()
    for line in re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines():
        if line.startswith("#"):
            name = re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            result[name] += 1
            yield name if result[name] == 1 else f"{name}-{result[name] - 1}"


def test_every_reference_heading_is_linked_once():
    page = ROOT / "docs" / "reference.md"
    contents = page.read_text().partition("\n## ")[0]
    assert re.findall(r"\]\(#([\w-]+)\)", contents) == list(anchors(page))[1:]


NAVIGATION = (ROOT / "docs" / "site" / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
USER_PAGES = re.findall(r"([\w-]+\.md)$", NAVIGATION.partition("- Contributing:")[0], re.MULTILINE)
# Pages that the site makes of others: the home page, and those of commands and Python calls.
SPLIT_PAGES = ["cli.md", "reference.md"]


def test_navigation_lists_every_page():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    listed = {*re.findall(r"([\w-]+\.md)$", NAVIGATION, re.MULTILINE), *SPLIT_PAGES}
    assert pages <= listed
    assert listed - pages == {"index.md", "contributing.md", "changelog.md", "benchmarks.md"}


def user_texts() -> dict[str, str]:
    """Return the text of each page for users, which are those outside Contributing."""
    pages = {page: (ROOT / "docs" / page) for page in [*USER_PAGES, *SPLIT_PAGES] if page != "index.md"}
    return {page: path.read_text() for page, path in {**pages, "index.md": ROOT / "README.md"}.items()}


def test_user_pages_have_at_most_60_000_words():
    words = {page: len(re.findall(r"\S*\w\S*", text)) for page, text in user_texts().items()}
    assert sum(words.values()) <= 60_000, sorted(words.items(), key=lambda item: item[1])


def test_user_pages_name_no_tests():
    named = {page: re.findall(r"\btests?/[\w/.]+|\btest_\w+", text) for page, text in user_texts().items()}
    assert {page: names for page, names in named.items() if names} == {}


def test_python_page_names_every_call():
    page = (ROOT / "docs" / "python.md").read_text()
    calls = (name for name in ckpttools.__all__ if not isinstance(getattr(ckpttools, name), type))
    assert [name for name in calls if not re.search(rf"\b{name}\b", page)] == []


def test_documented_family_equals_the_mixtral_family():
    from ckpttools.model_families.registry import families

    names: dict[str, object] = {}
    exec(code_blocks(FAMILY_PAGE, "python")[0], names)
    assert names["FAMILY"] == families()["mixtral"]


@pytest.fixture
def tiny(tmp_path):
    """The page's own family in a file, and a model of it."""
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


def assert_tiny(model: Path, built: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tree = ckpttools.open(built)

    def layers(*path: str) -> np.ndarray:
        return tree[("params", "params", "decoder", "layers", *path)].read()

    up = [tensors[f"layers.{layer}.up.weight"].T for layer in range(2)]
    assert np.array_equal(layers("mlp", "wi", "kernel"), np.stack(up, axis=1))
    key = [tensors[f"layers.{layer}.attn.qkv.weight"][12:24].T.reshape(8, 3, 4) for layer in range(2)]
    assert np.array_equal(layers("self_attention", "key", "kernel"), np.stack(key, axis=1))
    norms = [tensors[f"layers.{layer}.norm.weight"] + 1 for layer in range(2)]
    assert np.array_equal(layers("pre_self_attention_layer_norm", "scale"), np.stack(norms, axis=1))


def test_documented_family_file_converts_both_ways(tmp_path, tiny):
    file = tmp_path / "tiny.toml"
    succeed("families", "check", file)
    succeed("families", "check", file, "--against", tiny)
    succeed("convert", "hf-to-maxtext", tiny, tmp_path / "out", "--family", file)
    assert_tiny(tiny, tmp_path / "out")
    succeed("convert", "maxtext-to-hf", tmp_path / "out", tmp_path / "back", "--family", file)
    one, other = (path / "model.safetensors" for path in (tiny, tmp_path / "back"))
    tensors, returned = load_file(one), load_file(other)
    assert tensors.keys() == returned.keys()
    assert all(returned[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())


def test_documented_family_package_works(tmp_path, tiny):
    install(tmp_path, "add-a-family.md", "my_family", "ckpttools.families", "tiny", "FAMILY", block=1)
    assert "tiny" in ckpt_process("families", path=tmp_path).stdout
    done = ckpt_process("convert", "hf-to-maxtext", tiny, tmp_path / "out", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_tiny(tiny, tmp_path / "out")


def test_python_page_examples_run_in_order(tmp_path, monkeypatch):
    write_llama(tmp_path / "hf" / "llama")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "python_page"}
    blocks = code_blocks(ROOT / "docs" / "python.md", "python")
    assert len(blocks) >= 6
    for block in blocks:
        exec(block, names)


def test_family_page_names_every_key():
    from dataclasses import fields

    from ckpttools.mapping.row import Layers
    from ckpttools.model_families.family import Family, FlagRule, Spelling

    text = FAMILY_PAGE.read_text()
    names = {field.name for kind in (Family, FlagRule, Spelling, Layers) for field in fields(kind)}
    assert [name for name in sorted(names) if name not in text] == []


def test_documented_format_plugin_works(tmp_path):
    page = "add-a-format.md"
    install(tmp_path, page, "npy_format", "ckpttools.formats", "npy", "FORMAT")
    (tmp_path / "test_npy_format.py").write_text(code_blocks(ROOT / "docs" / page, "python")[1])
    # None of the hundreds of files that it writes must outlive a crash.
    (tmp_path / "conftest.py").write_text("import os\nos.fsync = os.fdatasync = lambda descriptor: None\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_npy_format.py"]
    # What hypothesis knows of Unicode takes it 4 s to work out.
    environment = with_path(tmp_path) | {"HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_documented_scheme_reads_compressed_tensors(tmp_path):
    install(tmp_path, "add-a-scheme.md", "mx_scheme", "ckpttools.schemes", "packed-mx", "SCHEME")
    sample, model, built = FIXTURES / "compressed-tensors" / "mxfp4", tmp_path / "model", tmp_path / "made"
    model.mkdir()
    for file in ("model.safetensors", "config.json"):
        (model / file).write_bytes((sample / file).read_bytes())
    done = ckpt_session(
        ["inspect", "tree", model],
        ["cast", model, built, "--dtype", "bfloat16"],
        ["diff", model, built],
        path=tmp_path,
    )
    assert [item["code"] for item in done] == [0, 0, 0], done
    assert "mxfp4 1x32" in done[0]["output"]
    (expected,) = load_file(sample / "expected.safetensors").values()
    (result,) = load_file(built / "model.safetensors").values()
    assert np.array_equal(result.astype(np.float32), expected)


def test_documented_store_plugin_works(tmp_path):
    page = "add-a-store.md"
    install(tmp_path, page, "zip_store", "ckpttools.stores", "zip", "STORE")
    (tmp_path / "test_zip_store.py").write_text(code_blocks(ROOT / "docs" / page, "python")[1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_zip_store.py"]
    environment = with_path(tmp_path) | {"HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_documented_format_supports_all_commands(tmp_path):
    install(tmp_path, "add-a-format.md", "npy_format", "ckpttools.formats", "npy", "FORMAT")
    rng = np.random.default_rng(0)
    truth = {"b": np.arange(7), "a.w": rng.standard_normal((3, 4), np.float32)}
    (tmp_path / "st").mkdir()
    save_file(truth, tmp_path / "st" / "model.safetensors")
    one, two, back = (tmp_path / name for name in ("one", "two", "back"))
    listed, built, again, chunks, healthy, refused, wrong, help, returned, selected = ckpt_session(
        ["formats", "--json"],
        ["convert", "to-npy", tmp_path / "st", one, "--pages"],
        ["convert", "to-npy", tmp_path / "st", one, "--overwrite"],
        ["inspect", "chunks", one, "--json"],
        ["doctor", one],
        ["convert", "to-npy", tmp_path / "st", two, "--dtype", "bfloat16"],
        ["convert", "to-zarr3", tmp_path / "st", two, "--pages"],
        ["convert", "to-npy", "--help"],
        ["convert", "to-safetensors", one, back],
        ["select", one, two, "--keep", "b"],
        path=tmp_path,
    )
    assert {"name": "npy", "written": True} in json.loads(listed["output"])
    for item in (built, again, chunks, healthy, returned, selected):
        assert item["code"] == 0, item["output"]
    for number, array in enumerate(truth.values()):
        assert np.array_equal(np.load(one / f"{number}.npy"), array)
    result = json.loads(chunks["output"])["report"]
    assert [(item["path"], item["num_chunks"]) for item in result["arrays"]] == [("b", 1), ("a.w", 1)]
    live = {item["name"]: item["referenced_nbytes"] for item in result["files"]}
    assert live == {"0.npy": 56, "1.npy": 48, "tree.json": 0}
    assert "1 checkpoint of npy" in healthy["output"]
    assert refused["code"] == 3
    assert "npy does not support bfloat16" in refused["output"]
    assert "--dtype float32" in refused["output"]
    assert wrong["code"] == 2
    assert "--pages / --no-pages" in help["output"]
    assert {name: array.tobytes() for name, array in load_file(back / "model.safetensors").items()} == {
        name: array.tobytes() for name, array in truth.items()
    }
    assert [item.name for item in sorted(two.iterdir())] == ["0.npy", "tree.json"]
    (one / "1.npy").write_bytes((one / "1.npy").read_bytes()[:-1])
    (one / "notes.txt").write_text("mine")
    ill, kept = ckpt_session(
        ["doctor", one], ["convert", "to-npy", tmp_path / "st", one, "--overwrite"], path=tmp_path
    )
    assert ill["code"] == 1
    assert "not the size of a.w" in ill["output"]
    assert "[npy]" in ill["output"]
    assert kept["code"] == 2
    assert "notes.txt" in kept["output"]
    assert (one / "notes.txt").exists()


def test_documented_transform_plugin_works(tmp_path):
    install(
        tmp_path, "add-a-transform.md", "every_layer", "ckpttools.transforms", "every-layer", "EveryLayer"
    )
    source = tmp_path / "maxtext" / "llama"
    source.mkdir(parents=True)
    save_file({"layers": np.arange(60).reshape(3, 4, 5)}, source / "model.safetensors")
    save_file({"layers": np.arange(4)}, tmp_path / "flat.safetensors")
    listed, help, wrong, flat, unlike = ckpt_session(
        ["--help"],
        ["every-layer", "--help"],
        ["every-layer", source, tmp_path / "x", "--every", "0"],
        ["every-layer", tmp_path / "flat.safetensors", tmp_path / "x"],
        ["every-leyar"],
        path=tmp_path,
    )
    assert "every-layer" in listed["output"]
    assert "From the package every_layer." in listed["output"]
    assert "Every n-th layer of a stack on axis 1." in help["output"]
    assert re.search(r"--every N +Keep every N-th layer", help["output"])
    assert "--compression" in help["output"]
    assert (wrong["code"], flat["code"], unlike["code"]) == (2, 3, 2)
    assert "'0' is not an integer of at least 1" in wrong["output"]
    assert "this array has no axis of layers" in flat["output"]
    assert "Did you mean 'every-layer'?" in unlike["output"]
    (lines,) = code_blocks(ROOT / "docs" / "add-a-transform.md", "sh")
    environment = with_path(tmp_path) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-e"], input=lines, text=True, cwd=tmp_path, env=environment, check=True)
    layers = np.arange(60).reshape(3, 4, 5)
    for name, every, format in (("thin", 3, "zarr3"), ("two", 2, "safetensors")):
        built = ckpttools.open(tmp_path / "out" / name)
        assert built.metadata.format == format
        assert np.array_equal(built["layers"].read(), layers[:, ::every])
    with pytest.raises(UsageError, match="unknown transform 'every-layer'"):
        ckpttools.transform(source, tmp_path / "y", transforms="every-layer")


def test_documented_command_plugin_works(tmp_path):
    install(tmp_path, "add-a-command.md", "largest_command", "ckpttools.commands", "largest", "command")
    save_file({"a": np.zeros(3), "b": np.zeros(5)}, tmp_path / "model.safetensors")
    listed, result, text, missing = ckpt_session(
        ["--help"],
        ["largest", tmp_path / "model.safetensors", "--count", "1", "--json"],
        ["largest", tmp_path / "model.safetensors"],
        ["largest", tmp_path / "nothing"],
        path=tmp_path,
    )
    assert "From the package largest_command." in listed["output"]
    assert json.loads(result["output"]) == [{"path": "b", "nbytes": 40}]
    assert [line.split()[-1] for line in text["output"].splitlines()] == ["b", "a"]
    assert missing["code"] == 2
    (tmp_path / "largest_command.py").write_text("command = 1")
    (broken,) = ckpt_session(["largest"], path=tmp_path)
    assert broken["code"] == 2
    assert "largest of largest_command is not a command" in broken["output"]


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
def test_documented_codec_plugin_works(tmp_path, lzma_codec, shards):
    import zarr
    from zarr.codecs.numcodecs import LZMA

    truth = np.arange(63, dtype="float32").reshape(9, 7)
    built = zarr.create_group(tmp_path / "z").create_array(
        "w", shape=truth.shape, chunks=(4, 3), shards=shards, dtype="f4", compressors=LZMA(preset=2)
    )
    built[...] = truth
    array = ckpttools.open(tmp_path / "z")[("w",)]
    assert np.array_equal(array.read(), truth)
    assert np.array_equal(array[2:7, 1:4], truth[2:7, 1:4])
    (result,) = ckpttools.chunks(tmp_path / "z").arrays
    assert (result.codecs[0], result.is_compressed) == ("lzma:2", True)
    assert ckpttools.doctor(tmp_path / "z").findings == ()
    chunk = next(path for path in sorted((tmp_path / "z" / "w" / "c").rglob("0")) if path.is_file())
    chunk.write_bytes(chunk.read_bytes()[:-1])
    assert any("are truncated" in finding.what for finding in ckpttools.doctor(tmp_path / "z").findings)


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
def test_documented_codec_refuses_damaged_chunks(tmp_path, lzma_codec):
    import zarr

    from ckpttools import FormatError, UsageError

    truth = np.arange(63, dtype="float32").reshape(9, 7)
    zarr.create_group(tmp_path / "a").create_array("w", data=truth)
    ckpttools.convert(tmp_path / "a", tmp_path / "z", format="zarr3", compression="lzma:1")
    assert np.array_equal(ckpttools.open(tmp_path / "z")[("w",)].read(), truth)
    assert np.array_equal(zarr.open_array(tmp_path / "z" / "w", mode="r")[...], truth)
    with pytest.raises(UsageError, match="unknown compression 'lzma:10'") as refused:
        ckpttools.convert(tmp_path / "a", tmp_path / "y", format="zarr3", compression="lzma:10")
    assert "lzma or lzma:LEVEL with a level from 0 to 9" in refused.value.expected
    chunk = next(path for path in (tmp_path / "z" / "w" / "c").rglob("*") if path.is_file())
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 255
    chunk.write_bytes(data)
    with pytest.raises(FormatError, match="the lzma data is damaged") as damaged:
        ckpttools.open(tmp_path / "z")[("w",)].read()
    assert damaged.value.location.endswith("w, chunk c/0/0")


def test_broken_plugin_is_named_and_ignored(tmp_path):
    install(tmp_path, "add-a-family.md", "my_family", "ckpttools.families", "tiny", "FAMILY", block=1)
    (tmp_path / "my_family.py").write_text("raise RuntimeError('boom')\n")
    done = ckpt_process("families", path=tmp_path)
    assert done.returncode == 0
    assert "llama" in done.stdout
    assert "my_family" in done.stderr
    assert "boom" in done.stderr


def test_fp8_page_is_correct(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "head_dim": 128}
    write_llama(tmp_path / "hf", num_hidden_layers=2, **sizes)
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "run")
    blocks = code_blocks(ROOT / "docs" / "fp8-maxtext.md", "console")
    run_lines("".join(blocks))
    # The query's scales are divided by what they were multiplied by: the root of 128.
    differing = {array.name for array in ckpttools.diff(tmp_path / "fp8", tmp_path / "back").arrays}
    assert all(name.endswith("q_proj.weight_scale_inv") for name in differing)


def test_pytorch_page_is_correct(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fixtures").mkdir()
    (tmp_path / "fixtures/torch").symlink_to(ROOT / "fixtures/torch")
    page = ROOT / "docs" / "from-pytorch.md"
    run_lines("".join(code_blocks(page, "console")))
    write_llama(tmp_path / "hf", num_hidden_layers=1)
    weights = load_file(tmp_path / "hf/model.safetensors")
    nested = {
        "model": {f"module.{name}": whole(array) for name, array in weights.items()},
        "optim": {"exp_avg": whole(weights["lm_head.weight"])},
    }
    (tmp_path / "hf/model.safetensors").unlink()
    save(tmp_path / "hf/pytorch_model.bin", nested)
    with pytest.raises(CoverageError) as refused:
        ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "out")
    (declared,) = code_blocks(page, "text")
    assert (
        "contains arrays outside the model" in str(refused.value)
        and "contains arrays outside the model" in declared
    )
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "out", drop="optim.*")
    assert (tmp_path / "out/0/items").is_dir()


def test_rl_to_hub_page_is_correct(tmp_path, monkeypatch):
    """On what torch, transformers and DeepSpeed wrote of one model."""
    trainers = ROOT / "fixtures/torch/trainers"
    carry_out("from-rl-to-hub.md", tmp_path, monkeypatch, trainers=trainers)
    for name in ("verl", "fsdp", "policy", "titan"):
        written, truth = (
            load_file(f"hub/{name}/model.safetensors"),
            load_file("trainers/hub/model.safetensors"),
        )
        assert written.keys() == truth.keys()
        assert all(written[key].tobytes() == truth[key].tobytes() for key in truth), name
        for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            if name != "titan":
                assert Path(f"hub/{name}", file).read_bytes() == Path("trainers/hub", file).read_bytes(), name


def test_flax_page_is_correct(tmp_path, monkeypatch):
    (rules,) = code_blocks(ROOT / "docs" / "from-flax.md", "toml")
    (tmp_path / "flax.toml").write_text(rules)
    locations = {"llama": ROOT / "fixtures/flax/llama", "trainers": ROOT / "fixtures/torch/trainers"}
    carry_out("from-flax.md", tmp_path, monkeypatch, **locations)


def carry_out(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **locations: Path) -> None:
    """Runs the commands of a page, then its Python, where copies of these directories are."""
    monkeypatch.chdir(tmp_path)
    for name, source in locations.items():
        shutil.copytree(source, tmp_path / name)
    run_lines("".join(code_blocks(ROOT / "docs" / page, "console")))
    for block in code_blocks(ROOT / "docs" / page, "python"):
        exec(block, {"__name__": "page"})


def test_runs_page_is_correct(tmp_path, monkeypatch):
    fixtures = ROOT / "fixtures"
    run, hub = fixtures / "orbax" / "cm_best_metrics", fixtures / "torch" / "trainers" / "hub"
    carry_out("runs.md", tmp_path, monkeypatch, RUN=run, DIR=fixtures / "torch" / "trainers", OTHER=hub)


def test_assemble_page_is_correct(tmp_path, monkeypatch):
    hosts = ROOT / "fixtures" / "hosts" / "replicator-data=2,fsdp=4"
    carry_out("assemble.md", tmp_path, monkeypatch, RAMDISKS=hosts)


def test_adapters_page_is_correct(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fixtures").mkdir()
    (tmp_path / "fixtures/peft").symlink_to(ROOT / "fixtures/peft")
    run_lines("".join(code_blocks(ROOT / "docs" / "adapters.md", "console")))


def test_every_command_has_an_example():
    page = (ROOT / "docs" / "cli.md").read_text()
    topics = ("Repeated options", *(f"`ckpt help {name}`" for name in TOPICS))
    for section in page.split("\n## ")[1:]:
        if section.startswith(topics):
            continue
        assert "Examples:" in section, section.splitlines()[0]


def test_architecture_map_names_definitions_in_the_given_files():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| [^|]+\? \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert len(rows) >= 10
    for files, names in rows:
        paths = [ROOT / "ckpttools" / path for path in re.findall(r"`([\w/]+(?:\.py|/))`", files)]
        sources = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
        text = "\n".join(file.read_text() for file in sources)
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
            assert re.search(rf"^\s*(?:def|class) {name}\b|^{name}\b.* = ", text, re.MULTILINE), name


def test_architecture_map_names_existing_modules():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`(\w+(?:/\w+)*\.py)`", page)
    assert len(named) > 30
    assert [name for name in named if not any((ROOT / at / name).exists() for at in ("ckpttools", "."))] == []
    rooms = {path.name for path in (ROOT / "ckpttools").iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == rooms
