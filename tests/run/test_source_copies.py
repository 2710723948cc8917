"""Parts of a plan that read different copies of a model never end up in one checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, run, succeed
from support.internals import SafetensorsWriter, Started, TaskDone, parse
from support.object_stores import Google, files_in
from support.safetensors_files import packed

import ckpttools
from ckpttools import SourceChangedError
from ckpttools.plan.plan_file import read_plan
from ckpttools.run.events import Comparing
from ckpttools.run.source_copies import MixedCopiesError
from ckpttools.stores.checksums import BLOCK_BYTES, sample_starts
from ckpttools.stores.local import mounts, store
from ckpttools.stores.local.store import STORE

# Rows and columns of a matrix: a file is longer than all samples of it together.
SHAPE = (512, 512)
NAMES = ("a", "b", "c", "d")


def write_model(location: Path) -> Path:
    location.mkdir(parents=True)
    for number in range(2):
        draw = np.random.default_rng(number)
        arrays = {
            f"{number}.{name}": ("F32", SHAPE, draw.standard_normal(SHAPE, np.float32).tobytes())
            for name in NAMES
        }
        (location / f"model-{number + 1:05}-of-00002.safetensors").write_bytes(packed(arrays))
    return location


def planned(tmp_path: Path, *words: object) -> Path:
    succeed("plan", *words, "-o", tmp_path / "plan")
    return tmp_path / "plan"


def find_unsampled(plan: Path, file: Path) -> range:
    """Return offsets in the middle of a file, between two blocks that the plan samples."""
    gaps = find_gaps(plan, file)
    start = gaps[len(gaps) // 2]
    return range(start, start + 64)


def find_gaps(plan: Path, file: Path) -> list[int]:
    """Return the offsets after which a plan does not sample at least 64 bytes of a file."""
    (source,) = [item for item in read_plan(parse(plan)).sources if item.path.endswith(file.name)]
    starts = sample_starts(source.size, source.sample.count(":") + 1)
    return [start + BLOCK_BYTES for start, stop in pairwise(starts) if stop - start >= BLOCK_BYTES + 64]


def change(file: Path, offsets: range, flip: int = 0x40) -> None:
    """Change bytes of a file in place, and restore its modification time."""
    status = file.stat()
    with file.open("r+b") as opened:
        opened.seek(offsets.start)
        data = bytearray(opened.read(len(offsets)))
        opened.seek(offsets.start)
        opened.write(bytes(item ^ flip for item in data))
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
    locations = {"SRC": model, "OUT": tmp_path / "out", "RULES": tmp_path / "rules.toml"}
    plan = planned(tmp_path, *(locations.get(str(command), command) for command in COMMANDS[kind]))
    change(shard(copy), find_unsampled(plan, shard(model))[:1])
    run("run", plan, "--part", "0/2")
    run("run", plan, "--part", "1/2", *root)
    refused = run("run", plan, "--publish", code=3)
    assert "parts read different copies of the model" in refused and f"`ckpt hash {model}`" in refused
    assert "1." in refused and f"on {socket.gethostname()}" in refused
    assert not (tmp_path / "out").exists()
    assert f"rm -r {tmp_path / 'out.partial'}" in run("doctor", tmp_path / "out.partial")


@pytest.mark.parametrize("publisher", ["here", "there"])
@pytest.mark.parametrize("kind", ["cast", "compressed"])
def test_publish_accepts_equal_copies(
    kind: str, publisher: str, model: Path, copy: Path, root: tuple[str, str], tmp_path: Path
) -> None:
    locations = {"SRC": model, "OUT": tmp_path / "out"}
    words = COMMANDS[kind]
    plan = planned(tmp_path, *(locations.get(str(word), word) for word in words))
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
    locations["OUT"] = tmp_path / "alone"
    run(*(locations.get(str(word), word) for word in words))
    assert run("hash", tmp_path / "out") == run("hash", tmp_path / "alone")


def test_publish_does_not_reread_a_shared_copy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount_as("ext4", tmp_path, monkeypatch)
    plan = planned(tmp_path, "cast", model, tmp_path / "out", "--dtype", "float16")
    for number in range(3):
        run("run", plan, "--part", f"{number}/3")
    seen: list[object] = []
    ckpttools.publish_plan(plan, observe=seen.append)
    assert not [item for item in seen if isinstance(item, Comparing)]


def mount_as(kind: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a directory's file system look like one of another type in the system's table of mounts."""
    device = path.stat().st_dev
    table = path / "mountinfo"
    number = f"{os.major(device)}:{os.minor(device)}"
    table.write_text(f"22 1 {number} / / rw,relatime shared:1 - {kind} none rw\n")
    monkeypatch.setattr(mounts, "_TABLE", str(table))
    mounts._file_systems.cache_clear()


# Image builders and servers choose the ctime on these.
UNRELIABLE = ("squashfs", "iso9660", "erofs", "fuse.sshfs", "overlay", "tmpfs", "unheard-of")


@pytest.mark.parametrize("kind", UNRELIABLE)
def test_stat_does_not_identify_copies_with_settable_ctime(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for type, is_reliable in (("ext4", True), ("nfs4", True), (kind, False)):
        mount_as(type, tmp_path, monkeypatch)
        assert STORE.copy_identity(str(tmp_path / "file")).is_reliable == is_reliable


def test_publish_rereads_sources_with_settable_ctime(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path, "cast", model, tmp_path / "out", "--dtype", "float16")
    mount_as("squashfs", tmp_path, monkeypatch)
    for number in range(2):
        run("run", plan, "--part", f"{number}/2")
    seen: list[Comparing] = []
    ckpttools.publish_plan(
        plan, observe=lambda event: seen.append(event) if isinstance(event, Comparing) else None
    )
    assert seen[-1].done == seen[-1].total == 2 * len(NAMES) * SHAPE[0] * SHAPE[1] * 2


def test_stat_does_not_identify_copies_in_disk_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times in an ext4 image are whole seconds."""
    mount_as("ext4", tmp_path, monkeypatch)
    device, second = tmp_path.stat().st_dev, 10**9
    times = {"st_mtime_ns": second, "st_ctime_ns": second}
    in_image = os.stat_result([0o100644, 12, device, 1, 0, 0, 3, 1, 1, 1], times)
    monkeypatch.setattr(store, "_stat_result", lambda key: in_image)
    assert not STORE.copy_identity(str(tmp_path)).is_reliable


@pytest.mark.parametrize("is_changed", [False, True])
def test_resume_compares_finished_tasks_of_sources_with_settable_ctime(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_changed: bool
) -> None:
    plan = planned(tmp_path, "cast", model, tmp_path / "out", "--dtype", "float16")
    mount_as("squashfs", tmp_path, monkeypatch)

    def stop(event: object) -> None:
        if isinstance(event, TaskDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckpttools.cast(model, tmp_path / "out", dtype="float16", jobs=1, observe=stop)
    if is_changed:
        for file in model.iterdir():
            for start in find_gaps(plan, file):
                change(file, range(start, start + 1))
        with pytest.raises(MixedCopiesError):
            ckpttools.cast(model, tmp_path / "out", dtype="float16", jobs=1)
    else:
        assert ckpttools.cast(model, tmp_path / "out", dtype="float16", jobs=1).tasks_resumed
    assert (tmp_path / "out").exists() != is_changed


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Create a small model with sidecars."""
    model = tmp_path / "here" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(packed({"a": ("F32", (8, 8), bytes(256))}))
    for name in SIDECARS:
        (model / name).write_text('{"model_type": "one"}')
        os.utime(model / name, ns=(0, 0))
    return model


SIDECARS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "merges.txt")


def test_publish_accepts_copies_of_sidecars_with_other_times(
    small: Path, root: tuple[str, str], tmp_path: Path
) -> None:
    """`cp -r` gives copies new modification times."""
    plan = planned(tmp_path, "cast", small, tmp_path / "out", "--dtype", "bfloat16")
    shutil.copytree(small, tmp_path / "there" / "model", copy_function=shutil.copyfile)
    shutil.rmtree(small)
    for number in range(2):
        run("run", plan, "--part", f"{number}/2", *root)
    run("run", plan, "--publish", *root)
    assert {item.name for item in (tmp_path / "out").iterdir()} >= {*SIDECARS}


@pytest.mark.parametrize(
    ("name", "content"),
    [*((name, '{"model_type": "two"}') for name in SIDECARS), ("merges.txt", ""), ("vocab.json", "{}")],
)
def test_publish_refuses_other_sidecars_and_names_them(
    name: str, content: str, small: Path, root: tuple[str, str], tmp_path: Path
) -> None:
    """A sidecar of the publisher's copy has other content, and the planned size and modification time."""
    plan = planned(tmp_path, "cast", small, tmp_path / "out", "--dtype", "bfloat16")
    other = shutil.copytree(small, tmp_path / "there" / "model") / name
    run("run", plan, "--part", "0/1", *root)
    other.write_text(content)
    os.utime(other, ns=(0, 0))
    if not content:
        other.unlink()
    refused = run("run", plan, "--publish", *root, code=3)
    assert f"{name} differs from that in the planned model" in refused
    assert not (tmp_path / "out").exists()
    run("run", plan, "--publish")


@pytest.mark.parametrize("block", [3, 7])
def test_publish_names_the_file_whose_fingerprint_sample_differs(
    block: int, model: Path, copy: Path, root: tuple[str, str], tmp_path: Path
) -> None:
    plan = planned(tmp_path, "cast", model, tmp_path / "out", "--dtype", "bfloat16")
    run("run", plan, "--part", "0/1")
    start = sample_starts(shard(copy).stat().st_size, 8)[block] + BLOCK_BYTES // 2
    change(shard(copy), range(start, start + 1))
    refused = run("run", plan, "--publish", *root, code=3)
    assert f"{shard(copy)} is not the file that was planned" in refused and "other bytes" in refused


@pytest.mark.parametrize("options", [("--part", "0/3"), ("--publish",), ("--status",)])
def test_root_that_matches_no_path_is_refused(options: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path, "cast", model, tmp_path / "out", "--dtype", "bfloat16")
    for old in (f"{model}-TYPO", str(model)[:-1], "model", "/TYPO"):
        refused = ckpt("run", plan, *options, "--root", f"{old}=/x", "--root", f"{model}={model}")
        assert refused.exit_code == 2 and f"no path of the plan begins with {old}" in refused.output
        assert f"{model}, {tmp_path / 'out'}" in refused.output
    assert not (tmp_path / "out.partial").exists()
    assert f"`ckpt run {plan} --part 0/1`" in run("run", plan, "--publish", code=2)


@pytest.mark.parametrize("option", [(), ("--resume",)])
def test_resume_after_source_changed_names_the_cause(
    option: tuple[str, ...], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--resume and --no-progress do not change what a command does."""
    words = ("cast", small, tmp_path / "out", "--dtype", "bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsWriter, "finish", interrupt)
        assert ckpt(*words).exit_code != 0
    assert (tmp_path / "out.partial").is_dir()
    (small / "tokenizer.json").write_text("{}")
    assert "started before its source changed" in run(*words, *option, code=2)


def test_resume_with_other_options_names_them(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("cast", small, tmp_path / "out", "--dtype")
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsWriter, "finish", interrupt)
        assert ckpt(*words, "bfloat16").exit_code != 0
    refused = " ".join(run(*words, "float16", "--memory", "2GiB", code=2).split())
    assert "started with other options (with --dtype bfloat16, now --dtype float16)" in refused


def test_part_after_single_run_names_the_single_run(small: Path, tmp_path: Path) -> None:
    words = ("cast", small, tmp_path / "out", "--dtype", "bfloat16")
    plan = planned(tmp_path, *words)
    run("run", plan, "--part", "0/2")
    run(*words)
    for options in (("--part", "0/1"), ("--publish",)):
        refused = run("run", plan, *options, code=2)
        assert "a single run of the plan's command" in refused


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


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


def _link(file: Path) -> None:
    os.link(file, file.with_suffix(f".{file.stat().st_nlink}"))


def _set_mode(file: Path) -> None:
    file.chmod(0o600 if file.stat().st_mode & 0o777 != 0o600 else 0o640)


def _change_in_location(file: Path) -> None:
    change(file, find_unsampled(file.parents[2] / "plan", file))


def _change_and_link(file: Path) -> None:
    _change_in_location(file)
    _link(file)


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("act", [_link, _set_mode, _change_in_location, _change_and_link])
def test_part_repeats_its_tasks_if_the_source_changes_meanwhile(
    act: Callable[[Path], None], after: int, model: Path, tmp_path: Path
) -> None:
    plan = planned(tmp_path, "cast", model, tmp_path / "out", "--dtype", "bfloat16")
    started, done = [], []

    def observe(event: object) -> None:
        started.extend([event] * isinstance(event, Started))
        done.extend([event] * isinstance(event, TaskDone))
        if isinstance(event, TaskDone) and len(done) == after:
            act(shard(model))

    ckpttools.run_part(plan, "0/2", observe=observe)
    assert len(started) == 2
    ckpttools.run_part(plan, "1/2")
    run("run", plan, "--publish")
    run("cast", model, tmp_path / "expected", "--dtype", "bfloat16")
    assert ckpttools.hash(tmp_path / "out").digest == ckpttools.hash(tmp_path / "expected").digest


@pytest.mark.parametrize("act", [_set_mode, _link, _change_in_location])
def test_part_stops_if_the_source_keeps_changing(
    act: Callable[[Path], None], model: Path, tmp_path: Path
) -> None:
    plan = planned(tmp_path, "cast", model, tmp_path / "out", "--dtype", "bfloat16")
    with pytest.raises(SourceChangedError, match=r"safetensors was changed while it was read"):
        ckpttools.run_part(
            plan, "0/2", observe=lambda event: act(shard(model)) if isinstance(event, TaskDone) else None
        )
    assert "missing" in run("run", plan, "--publish", code=2)
    run("run", plan, "--part", "0/1")
    run("run", plan, "--publish")


def _link_content(partial: Path, elsewhere: Path) -> Path:
    (content,) = (item for item in partial.iterdir() if item.is_dir() and item.name != "parts")
    shutil.copytree(content, elsewhere, copy_function=shutil.copy2)
    shutil.rmtree(content)
    content.symlink_to(elsewhere)
    return content


def _link_staging(partial: Path, elsewhere: Path) -> Path:
    shutil.copytree(partial, elsewhere)
    shutil.rmtree(partial)
    partial.symlink_to(elsewhere)
    return partial


def _link_inner_directory(partial: Path, elsewhere: Path) -> Path:
    elsewhere.mkdir()
    (content,) = (item for item in partial.iterdir() if item.is_dir() and item.name != "parts")
    inner = next((item for item in content.rglob("*") if item.is_dir()), content / "d")
    if inner.exists():
        shutil.rmtree(inner)
    inner.symlink_to(elsewhere)
    return inner


def _link_file(partial: Path, elsewhere: Path) -> Path:
    elsewhere.write_bytes(bytes(1 << 16))
    (content,) = (item for item in partial.iterdir() if item.is_dir() and item.name != "parts")
    file = next(
        item for item in sorted(content.rglob("*")) if item.is_file() and not item.name.startswith(".")
    )
    file.unlink()
    file.symlink_to(elsewhere)
    return file


@pytest.mark.parametrize("command", ["cast", "convert to-orbax", "convert to-orbax --no-ocdbt"])
@pytest.mark.parametrize("act", [_link_content, _link_staging, _link_inner_directory, _link_file])
def test_parts_refuse_links_in_the_staging_directory(
    act: Callable[[Path, Path], Path], command: str, model: Path, tmp_path: Path
) -> None:
    words = ["--dtype", "bfloat16"] if command == "cast" else []
    command, *flags = command.split(" --")
    flags = [f"--{flag}" for flag in flags]
    plan = planned(tmp_path, *command.split(), model, tmp_path / "out", *words, *flags)
    run("run", plan, "--part", "0/2")
    elsewhere = tmp_path / "elsewhere"
    link = act(tmp_path / "out.partial", elsewhere)
    before = _files_below(elsewhere)
    assert "symbolic link" in run("run", plan, "--part", "1/2", code=2)
    assert link.is_symlink()
    after = _files_below(elsewhere)
    assert {name: after[name] for name in before} == before


def _files_below(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    return {str(file): file.read_bytes() for file in files}


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
def test_publish_uses_only_the_publishing_copy(tmp_path_factory: pytest.TempPathFactory, data) -> None:
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
