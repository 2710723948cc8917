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
from support.object_stores import amazon, google
from support.places import TRAINED

import ckpttools
from ckpttools.stores import Place, parse

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

    place: Place
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
    found = {(kind, "local"): parse(root / kind) for kind in kinds}
    for kind in kinds:
        for name, make in stores.items():
            place = found[kind, name] = make()
            ckpttools.copy(root / kind, place)
    (root / "rules.toml").write_text('[[rules]]\nfrom = "model.norm.weight"\nto = "norm"\n')
    found["rules", "local"] = parse(root / "rules.toml")
    return found


@pytest.fixture(scope="module")
def printed(sources) -> Callable[[Case], str]:
    """What a command prints of a source on a disk, asked once."""
    return cache(lambda case: said(case, sources, "local"))


@pytest.fixture(scope="module")
def done(sources, tmp_path_factory) -> Callable[[Case], Made]:
    """What a command makes of a source on a disk, made once."""
    root = tmp_path_factory.mktemp("done")

    @cache
    def make(case: Case) -> Made:
        place = parse(root / str(next(NUMBERS)))
        said(case, sources, "local", place)
        return Made(place, contents(place), ckpttools.hash(place).digest)

    return make


def said(case: Case, sources, store: str, *destination: Place) -> str:
    """What a command prints on stdout, with what it reads in a store."""
    names = {kind: str(place) for (kind, where), place in sources.items() if where == "local"}
    words = [*case.words.split(), sources[case.source, store], *destination]
    result = ckpt(*words, *case.options.format(**names).split())
    assert result.exit_code == 0, result.output
    return result.stdout.replace(str(sources[case.source, store]), "SRC")


def contents(place: Place) -> dict[str, bytes]:
    """All files of a checkpoint, but those with times in them, and commit files, which a disk may lack."""
    if hasattr(place.store, "forget"):
        place.store.forget(place.key)
    found = {name: (place / name).read_bytes() for name, _ in place.walk()}
    return {name: each for name, each in found.items() if not name.endswith(_OTHERS)}


_OTHERS = ("_METADATA", "commit_success.txt")


def is_alike(found: Place, wanted: Made, case: Case) -> None:
    """The same files where nothing is shared and files are cut alike; the same arrays, and nothing wrong."""
    is_cut_alike = found.store is wanted.place.store or not any("ocdbt" in name for name in wanted.files)
    if case.words not in SHARING and is_cut_alike:
        assert contents(found) == wanted.files
    assert ckpttools.hash(found).digest == wanted.digest
    # The rules give one array a name that its model does not have.
    expected = {"coverage"} if case.words.startswith("remap") else set()
    assert {each.check for each in ckpttools.doctor(found).findings if each.level == "error"} == expected
    assert not [each for each in found.parent.entries() if each.name.startswith(f"{found.name}.")]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", READING)
def test_reading(sources, printed, name, store):
    assert said(READING[name], sources, store) == printed(READING[name])


@pytest.mark.parametrize(("name", "store"), READ_THERE)
def test_what_is_read_is_written_on_a_disk(sources, done, tmp_path, name, store):
    said(WRITING[name], sources, store, parse(tmp_path / "out"))
    is_alike(parse(tmp_path / "out"), done(WRITING[name]), WRITING[name])


@pytest.mark.parametrize(("name", "store"), WRITTEN_THERE)
def test_what_is_on_a_disk_is_written_there(sources, stores, done, name, store):
    said(WRITING[name], sources, "local", place := stores[store]())
    is_alike(place, done(WRITING[name]), WRITING[name])


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", [name for name, case in WRITING.items() if case.words in SHARING])
def test_what_is_shared_within_a_store(sources, stores, done, name, store):
    said(WRITING[name], sources, store, place := stores[store]())
    is_alike(place, done(WRITING[name]), WRITING[name])


def test_from_one_cloud_to_the_other(sources, stores, done):
    for store, other in (("gs", "s3"), ("s3", "gs")):
        for name in ("hf-to-maxtext", "strip-optimizer", "copy-run"):
            said(WRITING[name], sources, store, place := stores[other]())
            is_alike(place, done(WRITING[name]), WRITING[name])
