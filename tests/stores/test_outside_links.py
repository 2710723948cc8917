"""Files that symbolic links pull into a source are reported, and published only if the user allows it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from damage.models import base
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import ckpt, succeed
from support.internals import parse
from support.stores_on_loopback import asked_by_writer
from support.web_server import web_server

from ckpttools.stores.outside_links import find_outside_links

PUBLIC = "hf://me/new"
SIDECAR, SHARD = "tokenizer_config.json", "model-00002-of-00002.safetensors"
LINKS = {
    "absolute": lambda path, outside: path.symlink_to(outside),
    "relative": lambda path, outside: path.symlink_to(os.path.relpath(outside, path.parent)),
    "chain inside": lambda path, outside: (
        (path.parent / ".hop").symlink_to(outside),
        path.symlink_to(path.parent / ".hop"),
    ),
    "chain outside": lambda path, outside: (
        (outside.parent / "hop").symlink_to(outside),
        path.symlink_to(outside.parent / "hop"),
    ),
}


@pytest.fixture(scope="module")
def server():
    with web_server() as web:
        yield web


@pytest.fixture(autouse=True)
def fresh(server, monkeypatch, tmp_path):
    with asked_by_writer(server, monkeypatch, tmp_path):
        yield


def write_linked_model(directory: Path, name: str, how: str) -> Path:
    """Write a model in which one file is a link to a file outside."""
    base("llama", 2).write(directory / "model")
    outside = directory / "elsewhere" / "private"
    outside.parent.mkdir()
    shutil.move(directory / "model" / name, outside)
    LINKS[how](directory / "model" / name, outside)
    return directory / "model"


@pytest.mark.parametrize("how", LINKS)
@pytest.mark.parametrize("name", [SIDECAR, SHARD, "config.json"])
@pytest.mark.parametrize("command", ["copy", "convert to-safetensors", "convert hf-to-maxtext"])
def test_outside_links_are_reported_and_not_published(server, tmp_path, how, name, command):
    source = write_linked_model(tmp_path, name, how)
    words = [*command.split(), source]
    done = succeed(*words, tmp_path / "out")
    assert "through symbolic links" in done.output and name in done.output
    refused = ckpt(*words, PUBLIC, "--public")
    assert refused.exit_code == 2, refused.output
    assert "--allow-outside-links" in refused.output and name in refused.output
    assert not server.hub.commits.get("me/new")
    succeed(*words, PUBLIC, "--public", "--allow-outside-links")


def test_outside_links_to_sidecars_are_refused(server, tmp_path):
    source = write_linked_model(tmp_path, SIDECAR, "relative")
    base("llama", 2).write(tmp_path / "own")
    succeed("convert", "hf-to-maxtext", tmp_path / "own", tmp_path / "maxtext")
    (carried,) = (tmp_path / "maxtext").rglob("tokenizer.json")
    carried.rename(tmp_path / "elsewhere" / "tokenizer")
    words = ("convert", "maxtext-to-hf", tmp_path / "maxtext", PUBLIC, "--public")
    assert ckpt(*words, "--like", source).exit_code == 2
    carried.symlink_to(tmp_path / "elsewhere" / "tokenizer")
    refused = ckpt(*words)
    assert refused.exit_code == 2 and "tokenizer.json" in refused.output
    succeed(*words, "--allow-outside-links")


@pytest.mark.parametrize("command", ["copy", "convert to-safetensors"])
def test_links_from_hub_snapshot_to_blobs_are_allowed(server, tmp_path, command):
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "c0ffee"
    base("llama", 2).write(snapshot)
    (repository / "blobs").mkdir()
    for path in sorted(snapshot.iterdir()):
        blob = repository / "blobs" / f"{len(path.name)}{path.name}"
        path.rename(blob)
        path.symlink_to(Path("../../blobs", blob.name))
    done = succeed(*command.split(), snapshot, PUBLIC, "--public")
    assert "through symbolic links" not in done.output
    # A blob that is itself a link and a blob of another repository do not belong to this snapshot.
    for target in (tmp_path / "hub" / "models--org--other" / "blobs" / "x", tmp_path / "private"):
        target.parent.mkdir(parents=True, exist_ok=True)
        blob = (snapshot / SIDECAR).resolve()
        blob.rename(target)
        blob.symlink_to(target)
        refused = ckpt(*command.split(), snapshot, "hf://me/other", "--public")
        assert refused.exit_code == 2 and SIDECAR in refused.output
        blob.unlink()
        target.rename(blob)


def test_links_inside_source_are_allowed(server, tmp_path):
    base("llama", 2).write(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "model" / "tokenizer.v1.json")
    (tmp_path / "model" / "tokenizer.json").symlink_to("tokenizer.v1.json")
    (tmp_path / "link").symlink_to("model")
    done = succeed("copy", tmp_path / "link", PUBLIC, "--public")
    assert "through symbolic links" not in done.output


@given(st.lists(st.sampled_from(["a", "b", "snapshots", "blobs", "models--x--y"]), max_size=4), st.booleans())
def test_only_links_to_outside_targets_are_found(tmp_path_factory, parts, is_inside):
    top = tmp_path_factory.mktemp("links").joinpath(*parts, "root")
    top.mkdir(parents=True)
    target = (top if is_inside else top.parent) / "target"
    target.touch()
    (top / "link").symlink_to(target)
    (top / "file").touch()
    links = find_outside_links(parse(top), map(str, top.iterdir()))
    assert dict(links) == ({} if is_inside else {"link": str(target.resolve())})
