"""Parts of a plan that read different copies of a model never end up in one checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, run, succeed
from support.object_stores import Google, files_in
from support.safetensors_files import packed

import ckpttools
from ckpttools.plan.plan_decoding import read_plan
from ckpttools.run.events import Comparing
from ckpttools.stores import parse
from ckpttools.stores.samples import BLOCK_BYTES

# Rows and columns of a matrix: a file is longer than all samples of it together.
SHAPE = (512, 512)
NAMES = ("a", "b", "c", "d")


def write_model(place: Path) -> Path:
    place.mkdir(parents=True)
    for number in range(2):
        draw = np.random.default_rng(number)
        arrays = {
            f"{number}.{name}": ("F32", SHAPE, draw.standard_normal(SHAPE, np.float32).tobytes())
            for name in NAMES
        }
        (place / f"model-{number + 1:05}-of-00002.safetensors").write_bytes(packed(arrays))
    return place


def planned(tmp_path: Path, *words: object) -> Path:
    succeed("plan", *words, "-o", tmp_path / "plan")
    return tmp_path / "plan"


def find_unsampled(plan: Path, file: Path) -> range:
    """Return offsets in the middle of a file, between two blocks that the plan samples."""
    (source,) = [each for each in read_plan(parse(plan)).sources if each.path.endswith(file.name)]
    count, last = source.sample.count(":") + 1, source.size - BLOCK_BYTES
    middle = count // 2
    start = last * middle // (count - 1) + BLOCK_BYTES
    stop = last * (middle + 1) // (count - 1)
    assert stop - start > 100
    return range(start, stop)


def change(file: Path, offsets: range, flip: int = 0x40) -> None:
    """Change bytes of a file in place, and restore its modification time."""
    status = file.stat()
    with file.open("r+b") as opened:
        opened.seek(offsets.start)
        data = bytearray(opened.read(len(offsets)))
        opened.seek(offsets.start)
        opened.write(bytes(each ^ flip for each in data))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def shard(model: Path) -> Path:
    return model / "model-00002-of-00002.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "here" / "model")


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "there" / "model"))


@pytest.fixture
def root(tmp_path: Path) -> tuple[str, str]:
    return "--root", f"{tmp_path / 'here'}={tmp_path / 'there'}"


COMMANDS: dict[str, tuple[object, ...]] = {
    "cast": ("cast", "SRC", "OUT", "--dtype", "bfloat16"),
    "same bytes": ("convert", "to-safetensors", "SRC", "OUT"),
    "renamed": ("remap", "SRC", "OUT", "--map", "RULES"),
    "orbax": ("convert", "to-orbax", "SRC", "OUT"),
    "orbax of files": ("convert", "to-orbax", "SRC", "OUT", "--no-ocdbt"),
    "compressed": ("convert", "to-orbax", "SRC", "OUT", "--compression", "zstd"),
    "zarr": ("convert", "to-zarr3", "SRC", "OUT", "--compression", "zstd"),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_publish_refuses_different_copies(
    kind: str, model: Path, copy: Path, root: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "rules.toml").write_text('[[rules]]\nfrom = "{...}.a"\nto = "{...}.first"\n')
    places = {"SRC": model, "OUT": tmp_path / "out", "RULES": tmp_path / "rules.toml"}
    plan = planned(tmp_path, *(places.get(str(each), each) for each in COMMANDS[kind]))
    change(shard(copy), find_unsampled(plan, shard(model))[:1])
    run("run", plan, "--part", "0/2")
    run("run", plan, "--part", "1/2", *root)
    refused = run("run", plan, "--publish", code=3)
    assert "parts read different copies of the model" in refused
    assert "1." in refused and f"on {socket.gethostname()}" in refused
    assert not (tmp_path / "out").exists()
    assert f"rm -r {tmp_path / 'out.partial'}" in run("doctor", tmp_path / "out.partial")


@pytest.mark.parametrize("publisher", ["here", "there"])
@pytest.mark.parametrize("kind", ["cast", "compressed"])
def test_publish_accepts_equal_copies(
    kind: str, publisher: str, model: Path, copy: Path, root: tuple[str, str], tmp_path: Path
) -> None:
    places = {"SRC": model, "OUT": tmp_path / "out"}
    words = COMMANDS[kind]
    plan = planned(tmp_path, *(places.get(str(each), each) for each in words))
    for file in copy.iterdir():
        os.utime(file)
    run("run", plan, "--part", "0/2")
    run("run", plan, "--part", "1/2", *root)
    seen: list[Comparing] = []
    ckpttools.publish_plan(
        plan,
        root=() if publisher == "here" else root[1],
        observe=lambda event: seen.append(event) if isinstance(event, Comparing) else None,
    )
    assert seen[-1].done == seen[-1].total > 0
    places["OUT"] = tmp_path / "alone"
    run(*(places.get(str(each), each) for each in words))
    assert run("hash", tmp_path / "out") == run("hash", tmp_path / "alone")


def test_publish_does_not_reread_a_shared_copy(model: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path, "cast", model, tmp_path / "out", "--dtype", "float16")
    for number in range(3):
        run("run", plan, "--part", f"{number}/3")
    seen: list[object] = []
    ckpttools.publish_plan(plan, observe=seen.append)
    assert not [each for each in seen if isinstance(each, Comparing)]


def replace_file(file: Path, offsets: range) -> None:
    """Replace a file by a changed copy with the same modification time."""
    other = file.with_suffix(".new")
    shutil.copy2(file, other)
    change(other, offsets)
    other.rename(file)


@pytest.mark.parametrize("how", [change, replace_file])
def test_publish_refuses_source_changed_between_parts(
    how: Callable[[Path, range], None], model: Path, tmp_path: Path
) -> None:
    """The size, the modification time and all samples stay the same."""
    plan = planned(tmp_path, "cast", model, tmp_path / "out", "--dtype", "bfloat16")
    run("run", plan, "--part", "1/2")
    how(shard(model), find_unsampled(plan, shard(model))[:64])
    run("run", plan, "--part", "0/2")
    assert "different copies" in run("run", plan, "--publish", code=3)
    assert not (tmp_path / "out").exists()


def test_publish_accepts_new_links_and_permissions(model: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path, "cast", model, tmp_path / "out", "--dtype", "bfloat16")
    run("run", plan, "--part", "0/2")
    os.link(shard(model), tmp_path / "backup")
    shard(model).chmod(0o600)
    run("run", plan, "--part", "1/2")
    run("run", plan, "--publish")
    assert (tmp_path / "out").is_dir()


def test_single_run_refuses_parts_of_another_copy(
    model: Path, copy: Path, root: tuple[str, str], tmp_path: Path
) -> None:
    words = ("cast", model, tmp_path / "out", "--dtype", "bfloat16")
    plan = planned(tmp_path, *words)
    change(shard(copy), find_unsampled(plan, shard(model))[:1])
    run("run", plan, "--part", "1/2", *root)
    assert "different copies" in run(*words, code=3)
    assert not (tmp_path / "out").exists()


def test_publish_compares_tasks_of_user_functions(
    model: Path, copy: Path, root: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from ckpttools.array.nodes import elementwise\n"
        "@dataclass(frozen=True)\n"
        "class Same:\n"
        "    def result(self, dtype):\n        return dtype\n"
        "    def apply(self, source, target, dtype):\n        target[...] = source\n"
        "def mapped(path, array):\n    return elementwise(array, Same())\n"
    )
    code = ("--map", f"{tmp_path / 'mine.py'}:mapped")
    plan = planned(tmp_path, "remap", model, tmp_path / "out", *code)
    change(shard(copy), find_unsampled(plan, shard(model))[:1])
    run("run", plan, "--part", "0/2", *code)
    run("run", plan, "--part", "1/2", *code, *root)
    assert "different copies" in run("run", plan, "--publish", *code, code=3)


def test_publish_to_bucket_refuses_different_copies(
    gcs: Google, model: Path, copy: Path, root: tuple[str, str], tmp_path: Path
) -> None:
    there = f"gs://{gcs.bucket}/copies/out"
    plan = planned(tmp_path, "convert", "to-safetensors", model, there, "--max-shard-size", "1200KB")
    change(shard(copy), find_unsampled(plan, shard(model))[:1])
    run("run", plan, "--part", "0/2")
    run("run", plan, "--part", "1/2", *root)
    assert "different copies" in run("run", plan, "--publish", code=3)
    assert json.loads(succeed("run", plan, "--status", "--json").stdout)["state"] == "done"
    assert "discard it" in run("doctor", f"{there}.partial")


def test_part_detects_large_differences_before_it_starts(
    model: Path, copy: Path, root: tuple[str, str], tmp_path: Path
) -> None:
    plan = planned(tmp_path, "cast", model, tmp_path / "out", "--dtype", "bfloat16")
    size = shard(copy).stat().st_size
    change(shard(copy), range(size // 3, size // 3 + size * 3 // 100))
    refused = run("run", plan, "--part", "0/1", *root, code=3)
    assert "other bytes at" in refused and "(in 1." in refused and f"on {socket.gethostname()}" in refused


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_publish_writes_only_the_publishers_copy(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    """Publishing writes what the publisher's copy gives, or nothing."""
    tmp_path = tmp_path_factory.mktemp("copies")
    model = write_model(tmp_path / "here" / "model")
    copy = Path(shutil.copytree(model, tmp_path / "there" / "model"))
    roots = ((), ("--root", f"{tmp_path / 'here'}={tmp_path / 'there'}"))
    plan = planned(tmp_path, "cast", model, tmp_path / "out", "--dtype", "bfloat16")
    file = data.draw(st.sampled_from(sorted(copy.iterdir())))
    start = data.draw(st.integers(1000, file.stat().st_size - 100))
    change(file, range(start, start + data.draw(st.integers(1, 100))), data.draw(st.integers(1, 255)))
    count = data.draw(st.integers(1, 4))
    for number in data.draw(st.permutations(range(count))):
        done = ckpt("run", plan, "--part", f"{number}/{count}", *data.draw(st.sampled_from(roots)))
        assert done.exit_code in (0, 3), done.output
    publisher = data.draw(st.sampled_from((0, 1)))
    published = ckpt("run", plan, "--publish", *roots[publisher])
    assert published.exit_code in (0, 2, 3), published.output
    assert (published.exit_code == 0) == (tmp_path / "out").exists()
    if published.exit_code == 0:
        run("cast", (model, copy)[publisher], tmp_path / "alone", "--dtype", "bfloat16")
        assert files_in(tmp_path / "out") == files_in(tmp_path / "alone")
