"""Every command takes places in any store, and does the same there: here in memory, beside local files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count

import pytest
from support.command_line import ckpt
from support.golden_data import SOURCES
from support.internals import Location, parse
from support.locations import GOLDEN, HF, TRAINED

import ckpttools
from ckpttools import Resources, ToMaxText, plan_to_maxtext
from ckpttools.stores.memory import STORE

NUMBERS = count()
# Of these only the text part is converted.
MULTIMODAL = ("gemma3", "gemma4-moe", "llama4-scout")
# What says when it was written, or how long that took.
_TIMES = re.compile(rb'"[a-z]+_timestamp_nsecs": ?\d+|"seconds": ?[0-9.e-]+|"peak_bytes": ?\d+')


@pytest.fixture
def memory() -> Iterator[Location]:
    """An empty place in memory."""
    location = parse(f"memory://commands/{next(NUMBERS)}")
    yield location
    STORE.remove(location.key)


def copied(source: Location, target: Location) -> Location:
    """All files of a directory under another name, in any store."""
    for name, _ in source.walk():
        (target / name).write_bytes((source / name).read_bytes())
    return target


def contents(location: Location) -> dict[str, bytes]:
    return {name: _TIMES.sub(b"", (location / name).read_bytes()) for name, _ in location.walk()}


@pytest.mark.parametrize(("family", "source"), SOURCES, ids=["-".join(item) for item in SOURCES])
def test_conversions_write_the_same_bytes_in_memory(tmp_path, memory, family, source):
    """Both ways, scanned and unscanned, for every golden model."""
    local, held = parse(tmp_path), copied(parse(GOLDEN / family / source), memory / "hf")
    for scan in (True, False):
        name = f"scan-{scan}"
        for model, out in ((GOLDEN / family / source, local / name), (held, memory / name)):
            plan_to_maxtext(model, ToMaxText(scan=scan), Resources(jobs=2)).run(out)
        assert contents(memory / name) == contents(local / name)
    text = {"names": "text"} if family in MULTIMODAL else {}
    ckpttools.maxtext_to_hf(memory / name, memory / "back", jobs=2, **text)
    ckpttools.maxtext_to_hf(local / name, local / "back", jobs=2, **text)
    assert contents(memory / "back") == contents(local / "back")


# Each is run in a directory with a model `hf`, a training run `run`, and what earlier ones have made.
WRITING = (
    ("convert", "hf-to-maxtext", "hf", "mt"),
    ("convert", "hf-to-maxtext", "hf", "flat", "--no-scan", "--reference"),
    ("convert", "maxtext-to-hf", "mt", "back", "--max-shard-size", "20KB"),
    ("convert", "to-zarr3", "mt", "zarr", "--compression", "zstd"),
    ("convert", "to-safetensors", "zarr", "st"),
    ("convert", "to-orbax", "st", "files", "--no-ocdbt"),
    ("unstack", "mt", "unstacked"),
    ("stack", "unstacked", "stacked", "--copy"),
    ("cast", "hf", "f32", "--dtype", "float32", "--manifest", "f32.json"),
    ("select", "run", "kernels", "--keep", "*kernel*"),
    ("strip-optimizer", "run", "stripped"),
    ("cast", "hf", "f32", "--dtype", "float16", "--overwrite"),
)
LOOKING = (
    ("inspect", "tree", "mt", "--json"),
    ("inspect", "tree", "run", "--against", "mt", "--json"),
    ("inspect", "stats", "zarr", "--json", "--no-progress"),
    ("inspect", "chunks", "files", "--json"),
    ("inspect", "chunks", "st", "--json"),
    ("hash", "back", "--json", "--no-progress"),
    ("diff", "hf", "back", "--json", "--no-progress"),
    ("diff", "mt", "st", "--json", "--no-progress"),
    ("verify", "mt", "--against", "hf", "--json", "--no-progress"),
    ("doctor", "run", "--json"),
    ("doctor", "zarr", "--json"),
    ("inspect", "tree", "nothing"),
    ("inspect", "tree", "mt/0/items/d/data"),
    ("convert", "hf-to-maxtext", "hf", "mt"),
    ("cast", "mt", "mt/0/inside", "--dtype", "float32"),
)
NAMES = {"hf", "mt", "flat", "back", "zarr", "st", "files", "unstacked", "stacked", "f32", "f32.json", "run"}
NAMES |= {"kernels", "stripped", "nothing", "mt/0/items/d/data", "mt/0/inside"}


def test_every_command_works_in_memory(tmp_path, memory):
    homes = (parse(tmp_path), memory)
    for home in homes:
        copied(parse(HF), home / "hf")
        copied(parse(TRAINED), home / "run")
    for words in (*WRITING, *LOOKING):
        result = []
        for home in homes:
            done = ckpt(*(home / word if word in NAMES else word for word in words))
            text = _TIMES.sub(b"", done.output.replace(str(home), "HOME").encode())
            result.append((done.exit_code, text.decode() if "--json" in words or done.exit_code else ""))
        assert result[0] == result[1], words
    for name in sorted(NAMES - {"nothing", "f32.json", "mt/0/items/d/data", "mt/0/inside"}):
        assert contents(memory / name) == contents(parse(tmp_path) / name), name


def test_interrupted_conversion_in_memory_resumes(memory):
    class StopError(Exception):
        pass

    def stop(event):
        if isinstance(event, ckpttools.run.events.Publishing):
            raise StopError

    held = copied(parse(HF), memory / "hf")
    with pytest.raises(StopError):
        plan_to_maxtext(held).run(memory / "out", observe=stop)
    assert not (memory / "out").exists()
    assert "to resume it" in ckpt("inspect", "tree", memory / "out").output
    receipt = plan_to_maxtext(held).run(memory / "out")
    assert receipt.tasks_resumed == receipt.tasks and not (memory / "out.partial").exists()
    assert len(ckpttools.open(memory / "out").arrays) > 0


def test_changed_source_in_memory_is_detected(memory):
    held = copied(parse(HF), memory / "hf")
    conversion = plan_to_maxtext(held)
    weights = held / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    with pytest.raises(ckpttools.CheckpointError, match="was changed"):
        conversion.run(memory / "out")


def test_unknown_scheme_is_refused_in_every_argument():
    for words in (
        ("inspect", "tree", "ftp://host/run"),
        ("convert", "hf-to-maxtext", "ftp://org/model", "out"),
        ("convert", "hf-to-maxtext", HF, "ftp://bucket/out"),
        ("diff", HF, "ftp://host/x"),
        ("hash", HF, "--manifest", "ftp://b/x.json"),
    ):
        done = ckpt(*words)
        scheme = next(str(word) for word in words if "://" in str(word)).partition("://")[0]
        assert done.exit_code == 2
        assert f"no store for {scheme}:// is installed" in done.output
        is_written = ("out" in str(words[-1]) and "://" in str(words[-1])) or "--manifest" in words
        assert ("then copy it there" in done.output) is is_written
