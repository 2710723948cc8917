"""Each command with what it reads, and with what it writes, in each store: the same as on a disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import pytest
from support.command_line import ckpt
from support.hf_models import write_llama
from support.object_stores import amazon, files_in, google
from support.places import TRAINED

import ckpttools
from ckpttools.stores import Place, parse

STORES = ("local", "gs", "s3", "memory")
NUMBERS = count()


@dataclass(frozen=True)
class Case:
    """A command.

    Attributes:
        words: before SRC.
        source: what it reads.
        options: after SRC, or after DST where there is one.
        writes: whether it takes DST.
    """

    words: str
    source: str
    options: str = ""
    writes: bool = False


READING = {
    "tree": Case("inspect tree", "train"),
    "chunks": Case("inspect chunks", "maxtext"),
    "stats": Case("inspect stats", "hf"),
    "diff": Case("diff", "hf", "{hf}"),
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
    write_llama(root / "hf")
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
def done(sources, tmp_path_factory) -> Callable[[Case], Place]:
    """What a command makes of a source on a disk, made once."""
    root, made = tmp_path_factory.mktemp("done"), {}

    def make(case: Case) -> Place:
        if case not in made:
            made[case] = parse(root / str(len(made)))
            said(case, sources, "local", made[case])
        return made[case]

    return make


def said(case: Case, sources, store: str, *destination: Place) -> str:
    """What a command prints on stdout, with what it reads in a store."""
    names = {kind: str(place) for (kind, where), place in sources.items() if where == "local"}
    words = [*case.words.split(), sources[case.source, store], *destination]
    result = ckpt(*words, *case.options.format(**names).split())
    assert result.exit_code == 0, result.output
    return result.stdout.replace(str(sources[case.source, store]), "SRC")


def contents(place: Place) -> dict[str, bytes]:
    """All files of a checkpoint, but for the times in its metadata and the commit files, which a disk lacks."""
    if hasattr(place.store, "forget"):
        place.store.forget(place.key)
    found = {name: (place / name).read_bytes() for name, _ in place.walk()}
    return {
        name: each for name, each in found.items() if not name.endswith(("_METADATA", "commit_success.txt"))
    }


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", READING)
def test_reading(sources, name, store):
    assert said(READING[name], sources, store) == said(READING[name], sources, "local")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", WRITING)
def test_reading_what_is_written_on_a_disk(sources, done, tmp_path, name, store):
    said(WRITING[name], sources, store, parse(tmp_path / "out"))
    assert contents(parse(tmp_path / "out")) == contents(done(WRITING[name]))


@pytest.mark.parametrize("store", STORES[1:])
@pytest.mark.parametrize("name", WRITING)
def test_writing(sources, stores, done, name, store):
    """Data files may be cut otherwise in a bucket; what is in them may not differ."""
    place = stores[store]()
    said(WRITING[name], sources, "local", place)
    wanted, found = contents(done(WRITING[name])), contents(place)
    if name.startswith("copy") or any(file.endswith(".safetensors") for file in wanted):
        assert found == wanted
    assert ckpttools.hash(place).digest == ckpttools.hash(done(WRITING[name])).digest
    assert ckpttools.doctor(place).healthy
    assert not [each for each in place.parent.entries() if each.name.startswith(f"{place.name}.")]


def test_nothing_of_the_issue_is_left_out():
    assert files_in is not None
