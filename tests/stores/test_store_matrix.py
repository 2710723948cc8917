"""Each command with what it reads, and with what it writes, in each store: the same as on a disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count

import pytest
from support.command_line import ckpt
from support.hf_models import write_llama
from support.internals import Location, parse
from support.locations import TRAINED
from support.object_stores import amazon, google

import ckpttools

STORES = ("gs", "s3", "memory")
NUMBERS = count()


@dataclass(frozen=True)
class Case:
    """A command.

    Attributes:
        words: before SRC.
        source: what it reads.
        options: after SRC, or after DST where there is one.
    """

    words: str
    source: str
    options: str = ""


@dataclass(frozen=True)
class Made:
    """A checkpoint on a disk: where, its files as of `contents`, and its hash."""

    location: Location
    files: dict[str, bytes]
    digest: str


READING = {
    "tree": Case("inspect tree", "train"),
    "chunks": Case("inspect chunks", "hf"),
    "stats": Case("inspect stats", "hf"),
    "diff": Case("diff", "hf", "{maxtext}"),
    "verify": Case("verify", "maxtext", "--against {hf}"),
    "hash": Case("hash", "maxtext"),
    "doctor": Case("doctor", "train"),
}
WRITING = {
    "hf-to-maxtext": Case("convert hf-to-maxtext", "hf"),
    "maxtext-to-hf": Case("convert maxtext-to-hf", "maxtext"),
    "to-orbax": Case("convert to-orbax", "hf"),
    "to-safetensors": Case("convert to-safetensors", "maxtext"),
    "to-zarr3": Case("convert to-zarr3", "maxtext"),
    "strip-optimizer": Case("strip-optimizer", "train"),
    "unstack": Case("unstack", "maxtext"),
    "stack": Case("stack", "unscanned"),
    "select": Case("select", "train", "--keep params"),
    "cast": Case("cast", "hf", "--dtype float32"),
    "remap": Case("remap", "hf", "--map {rules}"),
    "copy-model": Case("copy", "hf"),
    "copy-run": Case("copy", "train"),
}
# What links or copies files where SRC and DST are in one store, and reads and writes them where they are not.
SHARING = ("strip-optimizer", "unstack", "stack", "select")
# Each command meets each store, every second time as the source: both ways are those of all commands.
MET = [(name, store, (k + j) % 2 == 0) for k, name in enumerate(WRITING) for j, store in enumerate(STORES)]
READ_THERE = [(name, store) for name, store, is_source in MET if is_source]
WRITTEN_THERE = [(name, store) for name, store, is_source in MET if not is_source]


@pytest.fixture(scope="module")
def stores(gcs_server, s3_server):
    """All schemes at once: a new place in each, by its name."""
    with google(gcs_server) as gs, amazon(s3_server) as s3, pytest.MonkeyPatch.context() as patch:
        # Each of these forgets what says where the other is.
        patch.setenv("STORAGE_EMULATOR_HOST", gcs_server.url)
        gs.filled({"a": b""})
        yield {
            "gs": lambda: parse(f"gs://{gs.bucket}/matrix/{next(NUMBERS)}"),
            "s3": lambda: parse(f"s3://{s3.bucket}/matrix/{next(NUMBERS)}"),
            "memory": lambda: parse(f"memory://matrix/{next(NUMBERS)}"),
        }


@pytest.fixture(scope="module")
def sources(stores, tmp_path_factory):
    """What is read, by kind and store."""
    root = tmp_path_factory.mktemp("sources")
    write_llama(root / "hf", num_hidden_layers=2)
    ckpttools.hf_to_maxtext(root / "hf", root / "maxtext")
    ckpttools.unstack(root / "maxtext", root / "unscanned")
    shutil.copytree(TRAINED, root / "train")
    kinds = ("hf", "maxtext", "unscanned", "train")
    result = {(kind, "local"): parse(root / kind) for kind in kinds}
    for kind in kinds:
        for name, make in stores.items():
            location = result[kind, name] = make()
            ckpttools.copy(root / kind, location)
    (root / "rules.toml").write_text('[[rules]]\nfrom = "model.norm.weight"\nto = "norm"\n')
    result["rules", "local"] = parse(root / "rules.toml")
    return result


@pytest.fixture(scope="module")
def printed(sources) -> Callable[[Case], str]:
    """What a command prints of a source on a disk, asked once."""
    return cache(lambda case: declared(case, sources, "local"))


@pytest.fixture(scope="module")
def done(sources, tmp_path_factory) -> Callable[[Case], Made]:
    """What a command makes of a source on a disk, made once."""
    root = tmp_path_factory.mktemp("done")

    @cache
    def make(case: Case) -> Made:
        location = parse(root / str(next(NUMBERS)))
        declared(case, sources, "local", location)
        return Made(location, contents(location), ckpttools.hash(location).digest)

    return make


def declared(case: Case, sources, store: str, *destination: Location) -> str:
    """What a command prints on stdout, with what it reads in a store."""
    names = {kind: str(location) for (kind, where), location in sources.items() if where == "local"}
    words = [*case.words.split(), sources[case.source, store], *destination]
    result = ckpt(*words, *case.options.format(**names).split())
    assert result.exit_code == 0, result.output
    return result.stdout.replace(str(sources[case.source, store]), "SRC")


def contents(location: Location) -> dict[str, bytes]:
    """All files of a checkpoint, but those with times in them, and commit files, which a disk may lack."""
    if hasattr(location.store, "forget"):
        location.store.forget(location.key)
    result = {name: (location / name).read_bytes() for name, _ in location.walk()}
    return {name: item for name, item in result.items() if not name.endswith(_OTHERS)}


_OTHERS = ("_METADATA", "commit_success.txt")


def is_listed_with(result: Location, expected: Made, case: Case) -> None:
    """The same files where nothing is shared and files are cut alike; the same arrays, and nothing wrong."""
    is_cut_alike = result.store is expected.location.store or not any(
        "ocdbt" in name for name in expected.files
    )
    if case.words not in SHARING and is_cut_alike:
        assert contents(result) == expected.files
    assert ckpttools.hash(result).digest == expected.digest
    # The rules give one array a name that its model does not have.
    reference = {"coverage"} if case.words.startswith("remap") else set()
    assert {
        finding.check for finding in ckpttools.doctor(result).findings if finding.level == "error"
    } == reference
    assert not [entry for entry in result.parent.entries() if entry.name.startswith(f"{result.name}.")]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", READING)
def test_read_commands_print_the_same_for_every_store(sources, printed, name, store):
    assert declared(READING[name], sources, store) == printed(READING[name])


@pytest.mark.parametrize(("name", "store"), READ_THERE)
def test_store_sources_are_written_to_disk(sources, done, tmp_path, name, store):
    declared(WRITING[name], sources, store, parse(tmp_path / "out"))
    is_listed_with(parse(tmp_path / "out"), done(WRITING[name]), WRITING[name])


@pytest.mark.parametrize(("name", "store"), WRITTEN_THERE)
def test_disk_sources_are_written_to_stores(sources, stores, done, name, store):
    declared(WRITING[name], sources, "local", location := stores[store]())
    is_listed_with(location, done(WRITING[name]), WRITING[name])


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", [name for name, case in WRITING.items() if case.words in SHARING])
def test_sources_are_copied_within_a_store(sources, stores, done, name, store):
    declared(WRITING[name], sources, store, location := stores[store]())
    is_listed_with(location, done(WRITING[name]), WRITING[name])


def test_copies_between_clouds_have_the_same_content(sources, stores, done):
    for store, other in (("gs", "s3"), ("s3", "gs")):
        for name in ("hf-to-maxtext", "strip-optimizer", "copy-run"):
            declared(WRITING[name], sources, store, location := stores[other]())
            is_listed_with(location, done(WRITING[name]), WRITING[name])
