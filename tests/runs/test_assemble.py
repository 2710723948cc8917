"""`ckpt assemble`: of what hosts keep one checkpoint, as Orbax restores it; what is missing is named exactly.

`fixtures/hosts` was written by Orbax's own managers in jobs of four processes (`support/host_saves.py`), with
what they restored of the full set.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, succeed
from support.internals import dotted, entries_of, parse
from support.locations import FIXTURES, ORBAX
from support.object_stores import files_in
from support.orbax_items import LITTLE, write_item, zarr3
from support.pruned_runs import HANDLER

import ckpttools
from ckpttools import FormatError, UsageError
from ckpttools.formats.orbax.ocdbt import Extent

HOSTS = FIXTURES / "hosts"
JOBS = sorted(path.name for path in HOSTS.iterdir())
LAST = 3


def hosts_of(job: Path) -> list[Path]:
    """All directories that hold something: of hosts, and the persistent one."""
    return sorted(path for path in job.iterdir() if path.is_dir() and any(path.iterdir()))


def restored(job: str) -> dict[str, np.ndarray]:
    with np.load(HOSTS / job / "restored.npz") as file:
        return dict(file)


def values(path: object, **options: object) -> dict[str, np.ndarray]:
    """All arrays by dotted names, bfloat16 as float32."""
    tree = ckpttools.open(path, **options)
    return {dotted(name): array.read().astype(np.float32) for name, array in tree.arrays.items()}


def same(result: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return result.keys() == expected.keys() and all(
        np.array_equal(result[name], expected[name]) for name in result
    )


def keys_by_tensorstore(host: Path, step: int) -> dict[str, bytes]:
    """All that tensorstore lists in a host's database of a step, and what it stands for."""
    (item,) = (path for path in (host / str(step)).glob("*") if (path / "_METADATA").exists())
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
    return {key.decode(): store.read(key).result().value for key in store.list().result()}


def missing_by_tensorstore(hosts: Sequence[Path], step: int) -> set[tuple[str, tuple[int, ...]]]:
    """What hosts lack of a step, by its zarr.json and the keys that are there; nothing here is asked."""
    there: dict[str, bytes] = {}
    for host in hosts:
        if (host / str(step)).exists():
            there |= keys_by_tensorstore(host, step)
    result = set()
    for key in (key for key in there if key.endswith("/zarr.json")):
        declared, name = json.loads(there[key]), key.removesuffix("/zarr.json")
        chunk = declared["chunk_grid"]["configuration"]["chunk_shape"]
        grid = [-(-n // c) for n, c in zip(declared["shape"], chunk, strict=True)]
        for cell in product(*map(range, grid)):
            if "/".join([name, "c", *map(str, cell)]) not in there:
                result.add((name, cell))
    return result


@pytest.mark.parametrize("job", JOBS)
def test_assemble_agrees_with_tensorstore_on_missing_chunks(job):
    hosts = hosts_of(HOSTS / job)
    for chosen in subsets(hosts):
        listing = ckpttools.list_saves(chosen)
        assert {save.step for save in listing.saves} == {
            int(step.name) for host in chosen for step in host.iterdir()
        }
        for save in listing.saves:
            named = {(dotted(item.path), cell) for item in save.missing for cell in item.cells}
            assert named == missing_by_tensorstore(chosen, save.step)
            assert save.is_complete == (not named)
            if save.expected:
                by_process = {process: host for host in hosts for process in processes(host)}
                for expected in save.expected:
                    # Of an emergency manager the first slice keeps nothing.
                    assert all(
                        item.name == f"host{n}" for n, item in by_process.items() if n in expected.processes
                    )
                added = [by_process.get(item.processes[-1]) for item in save.expected]
                if all(added):
                    more = ckpttools.list_saves([*chosen, *added])
                    assert next(item for item in more.saves if item.step == save.step).is_complete


def subsets(hosts: Sequence[Path]) -> Iterator[list[Path]]:
    for bits in range(1, 1 << len(hosts)):
        yield [host for number, host in enumerate(hosts) if bits >> number & 1]


def processes(host: Path) -> list[int]:
    if not host.name.startswith("host"):
        return []
    return [int(item.name.partition("_")[2]) for item in host.glob(f"{LAST}/*/ocdbt.process_*")]


@pytest.mark.parametrize("job", JOBS)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_assembled_checkpoint_restores_in_orbax(tmp_path_factory, job, data):
    hosts = hosts_of(HOSTS / job)
    chosen = data.draw(st.permutations(hosts))[: data.draw(st.integers(1, len(hosts)))]
    out = tmp_path_factory.mktemp("out") / "made"
    complete = [step for step in (LAST, 2) if not lacking(chosen, step)]
    if not complete:
        with pytest.raises(FormatError, match="no step is complete"):
            ckpttools.assemble(chosen, out)
        assert not out.exists()
        return
    ckpttools.assemble(chosen, out)
    step = complete[0]
    assert [path.name for path in out.iterdir()] == [str(step)]
    expected = restored(job) if step == LAST else values(HOSTS / job, step=2)
    assert same(values(out), expected)
    tree = ckpttools.open(out)
    assert (tree.metadata.step, tree.metadata.item) == (step, "items")
    assert ckpttools.doctor(out).findings == ()


def lacking(hosts: Sequence[Path], step: int) -> bool:
    return not any((host / str(step)).exists() for host in hosts) or bool(missing_by_tensorstore(hosts, step))


def test_inspect_shows_parent_as_complete_and_host_as_part():
    for job in JOBS:
        assert same(values(HOSTS / job), restored(job))
        assert "missing" not in succeed("inspect", "tree", HOSTS / job).output
        host = hosts_of(HOSTS / job)[0]
        shown = " ".join(succeed("inspect", "tree", host).output.split())
        assert "chunks of" in shown and "are missing" in shown
        assert "ckpt assemble" in shown or "other processes" in shown


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Four hosts with all they had, two slices."""
    return Path(shutil.copytree(HOSTS / "replicator-data=2,fsdp=4", tmp_path / "job"))


def test_files_are_shared_where_they_can_be_linked(job, tmp_path):
    receipt = ckpttools.assemble(job, tmp_path / "out")
    assert receipt.bytes_out == 0 < receipt.bytes_referenced
    inodes = {path.stat().st_ino for path in job.rglob("d/*")}
    linked = list((tmp_path / "out").rglob("d/linked-*"))
    assert linked and all(path.stat().st_ino in inodes for path in linked)
    shutil.rmtree(job)
    assert same(values(tmp_path / "out"), restored("replicator-data=2,fsdp=4"))
    copied = ckpttools.assemble(HOSTS / "replicator-data=2,fsdp=4", tmp_path / "copy", reference=False)
    assert copied.bytes_referenced == 0
    assert same(values(tmp_path / "copy"), restored("replicator-data=2,fsdp=4"))


def large_chunks(host: Path, step: int = LAST) -> list[tuple[str, Path, Extent]]:
    """Chunks that lie in data files: key, file, and where in it."""
    entries = entries_of(parse(host / str(step) / "state"))
    result = ((key, item) for key, item in entries.all.items() if isinstance(item, Extent))
    return [(key, host / str(step) / "state" / item.file, item) for key, item in result]


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_replica_differences_are_resolved_by_preferred_host(tmp_path_factory, data):
    top = tmp_path_factory.mktemp("flipped")
    job = Path(shutil.copytree(HOSTS / "replicator-data=2,fsdp=4", top / "job"))
    bad = data.draw(st.sampled_from(hosts_of(job)))
    key, file, extent = data.draw(st.sampled_from(large_chunks(bad)))
    at = extent.offset + data.draw(st.integers(0, extent.length - 1))
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    with pytest.raises(FormatError, match="hosts disagree on 1 chunk of step 3") as caught:
        ckpttools.assemble(job, top / "out")
    assert key in str(caught.value) and str(bad) in str(caught.value)
    assert not (top / "out").exists()
    twins = [host for host in hosts_of(job) if host != bad and key in keys_by_tensorstore(host, LAST)]
    others = [host for host in hosts_of(job) if host not in (bad, *twins)]
    ckpttools.assemble(job, top / "out", prefer=twins[0])
    assert same(values(top / "out"), restored("replicator-data=2,fsdp=4"))
    with pytest.raises(FormatError, match="hosts disagree"):
        ckpttools.assemble(job, top / "none", prefer=others[0])
    # Without the damaged host there is nothing to differ.
    whole = [host for host in hosts_of(job) if host != bad]
    ckpttools.assemble(whole, top / "without")
    assert same(values(top / "without"), restored("replicator-data=2,fsdp=4"))


def test_replica_replaces_lost_data_file(job, tmp_path):
    key, file, _ = large_chunks(job / "host0")[0]
    file.unlink()
    listing = ckpttools.list_saves(job)
    assert listing.missing_files and str(file) in listing.missing_files[0]
    ckpttools.assemble(job, tmp_path / "out")
    assert same(values(tmp_path / "out"), restored("replicator-data=2,fsdp=4"))
    shutil.rmtree(job / "host2")
    (save, *_) = ckpttools.list_saves(job).saves
    assert key in {
        f"{dotted(item.path)}/c/{'/'.join(map(str, cell))}" for item in save.missing for cell in item.cells
    }


def test_steps_are_not_mixed(job, tmp_path):
    for host in ("host0", "host2"):
        shutil.rmtree(job / host / "3")
    ckpttools.assemble(job, tmp_path / "out")
    assert same(values(tmp_path / "out"), values(HOSTS / "replicator-data=2,fsdp=4", step=2))
    with pytest.raises(FormatError, match="no step is complete"):
        ckpttools.assemble(job, tmp_path / "three", step=3)
    with pytest.raises(UsageError, match="no host has step 4"):
        ckpttools.assemble(job, tmp_path / "four", step=4)


def test_saves_of_the_same_step_are_not_mixed(job, tmp_path):
    """A job that went back has saved step 3 again, on the hosts that were left."""
    for number in range(4):
        begin(job / f"host{number}", 1000 + 3600 * (number % 2))
    listing = ckpttools.list_saves(job)
    assert [(save.step, len(save.hosts), save.is_complete) for save in listing.saves] == [
        (3, 2, False),
        (3, 2, False),
        (2, 4, True),
    ]
    ckpttools.assemble(job, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["2"]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 1500), min_size=4, max_size=4), st.permutations(range(4)))
def test_saves_are_separated_by_time(tmp_path_factory, seconds, order):
    """None is spread over more than ten minutes, nor joined over more by one that lies between."""
    top = tmp_path_factory.mktemp("times") / "job"
    shutil.copytree(HOSTS / "replicator-data=2,fsdp=4", top)
    for number, later in enumerate(seconds):
        begin(top / f"host{number}", 1000 + later)
    listings = [ckpttools.list_saves([top / f"host{n}" for n in hosts]) for hosts in (order, range(4))]
    result, again = ([{*save.hosts} for save in listing.saves if save.step == LAST] for listing in listings)
    assert result == again
    for hosts in result:
        times = [seconds[int(host.name[-1])] for host in hosts]
        assert max(times) - min(times) <= 600
    for one, other in pairwise(sorted(result, key=lambda item: min(seconds[int(h.name[-1])] for h in item))):
        first, last = (min(seconds[int(host.name[-1])] for host in item) for item in (one, other))
        assert last - first > 60


def begin(host: Path, seconds: float) -> None:
    """Has a host note that its save of step 3 began then."""
    file = host / "3" / "_CHECKPOINT_METADATA"
    declared = json.loads(file.read_text())
    file.write_text(json.dumps({**declared, "init_timestamp_nsecs": int(seconds * 1e9)}))


def test_hosts_with_different_chunks_belong_to_another_save(job):
    other = HOSTS / "emergency-data=2,fsdp=2,tensor=2"
    listing = ckpttools.list_saves([job / "host0", job / "host1", other / "host2"])
    result = [(save.step, {host.parent.name for host in save.hosts}) for save in listing.saves]
    assert all(len(names) == 1 for _, names in result)
    assert sorted(step for step, _ in result) == [2, 2, 3, 3]


def test_links_of_multi_tier_checkpointing_are_followed(job, tmp_path):
    for number in range(4):
        data = job / "data" / f"host{number}"
        data.parent.mkdir(exist_ok=True)
        (job / f"host{number}" / "3").rename(data)
        (job / f"host{number}" / f"llama-run-s3-n{number}-w0.restore").symlink_to(data)
        (job / f"host{number}" / "llama-run-s0-n0-w0.restore").touch()
        (job / f"host{number}" / "replicator.yaml").write_text("framework: orbax\n")
    hosts = [job / f"host{number}" for number in (1, 2)]
    ckpttools.assemble(hosts, tmp_path / "out")
    assert same(values(tmp_path / "out"), restored("replicator-data=2,fsdp=4"))


def test_process_directories_below_hosts_are_found(job, tmp_path):
    for number in range(4):
        (tmp_path / "gpus" / f"node{number // 2}").mkdir(parents=True, exist_ok=True)
        (job / f"host{number}").rename(tmp_path / "gpus" / f"node{number // 2}" / str(number))
    for location in (tmp_path / "gpus", tmp_path / "gpus" / "node0"):
        out = tmp_path / f"out-{location.name}"
        ckpttools.assemble(location, out)
        assert same(values(out), restored("replicator-data=2,fsdp=4"))


def test_chunks_fetched_by_a_peer_count(tmp_path):
    job = Path(shutil.copytree(HOSTS / "p2p-data=2,fsdp=4", tmp_path / "job"))
    partial = next(save for save in ckpttools.list_saves(job / "host0").saves if save.step == LAST)
    assert not partial.is_complete
    shutil.copytree(job / "host1" / "3", job / "host0" / "p2p_restore" / "3")
    result = next(save for save in ckpttools.list_saves(job / "host0").saves if save.step == LAST)
    assert {str(host) for host in result.hosts} == {str(job / "host0"), str(job / "host0" / "p2p_restore")}
    assert result.chunks > partial.chunks
    ckpttools.assemble(job / "host0", tmp_path / "out")
    assert same(values(tmp_path / "out"), restored("p2p-data=2,fsdp=4"))


class TestDataIterators:
    def keep(self, host: Path, states: dict[str, object]) -> None:
        location = host / "3" / "data_iter"
        location.mkdir()
        (location / "pygrain_states.json").write_text(json.dumps(states))

    def test_assemble_keeps_data_iterators(self, job, tmp_path):
        for host in hosts_of(job):
            self.keep(host, {"0": {"next_index": 7}, "1": '{"position": 3}'})
        ckpttools.assemble(job, tmp_path / "out")
        kept = tmp_path / "out" / "3" / "iter"
        assert json.loads((kept / "process_0-of-2.json").read_text()) == {"next_index": 7}
        assert (kept / "process_1-of-2.json").read_text() == '{"position": 3}'
        declared = json.loads((tmp_path / "out/3/_CHECKPOINT_METADATA").read_text())
        assert declared["item_handlers"].keys() == {"items", "iter"}
        assert same(values(tmp_path / "out"), restored("replicator-data=2,fsdp=4"))
        assert "did not save its state" not in ckpt("assemble", job, tmp_path / "again", "--dry-run").output

    def test_differing_hosts_are_refused(self, job, tmp_path):
        self.keep(job / "host0", {"0": {"next_index": 7}})
        self.keep(job / "host1", {"0": {"next_index": 8}})
        with pytest.raises(FormatError, match="at different positions in the data"):
            ckpttools.assemble(job, tmp_path / "out")

    def test_iterator_states_without_a_process_are_refused(self, job, tmp_path):
        """Whose names would be those of files."""
        self.keep(job / "host0", {"0": {}, "/../../../escaped": {}})
        with pytest.raises(FormatError, match="numbered by process"):
            ckpttools.assemble(job, tmp_path / "out")

    def test_empty_hosts_are_reported(self, job, tmp_path):
        told = " ".join(ckpt("assemble", job, tmp_path / "out", "--dry-run", COLUMNS="200").output.split())
        assert "these hosts did not save its state" in told


def test_assemble_reads_bucket_and_disk_together(gcs, job, tmp_path):
    location = gcs.filled({f"host3/{name}": content for name, content in files_in(job / "host3").items()})
    ckpttools.assemble([job / "host0", location], tmp_path / "out")
    assert same(values(tmp_path / "out"), restored("replicator-data=2,fsdp=4"))
    whole = gcs.filled(files_in(job))
    assert same(values(whole), restored("replicator-data=2,fsdp=4"))
    ckpttools.assemble(whole, tmp_path / "second")
    assert same(values(tmp_path / "second"), restored("replicator-data=2,fsdp=4"))


def test_assemble_command_lists_and_writes(job, tmp_path):
    listed = succeed("assemble", job / "host0", job / "host2", "--list").output
    assert "not complete" in listed and "the host of process 1 or 3" in listed
    assert all(f"{job / f'host{n}'}(process{n})" in "".join(listed.split()) for n in (0, 2))
    declared = json.loads(succeed("assemble", job, "--list", "--json").output)
    assert [save["step"] for save in declared["saves"]] == [3, 2]
    refused = ckpt("assemble", job / "host0", tmp_path / "out")
    assert refused.exit_code == 3
    assert "1 more host would do: process 1 or 3" in refused.output
    done = succeed("assemble", job / "host0", job / "host1", tmp_path / "out", "--no-progress")
    assert "shared with the source" in done.output
    assert "host1(process1)" in "".join(done.output.split())
    assert same(values(tmp_path / "out"), restored("replicator-data=2,fsdp=4"))
    assert ckpt("assemble", job / "host0").exit_code == 2
    inside = ckpt("assemble", job / "host0", job / "host1", job / "host0" / "out")
    assert inside.exit_code == 2 and not (job / "host0" / "out").exists()
    assert ckpt("assemble", ORBAX / "nothing", "--list").exit_code == 2
    (tmp_path / "empty").mkdir()
    assert ckpt("assemble", tmp_path / "empty", "--list").exit_code == 3


def test_file_commands_require_one_host(job):
    assert ckpt("inspect", "chunks", job).exit_code == 3
    assert "assemble" in ckpt("inspect", "chunks", job).output


def test_unreadable_host_is_named(job):
    (job / "host1/3/state/manifest.ocdbt").write_bytes(b"nothing")
    listing = ckpttools.list_saves(job)
    assert [Path(name).parent.name for name in listing.unusable] == ["host1"]
    assert listing.newest is not None and len(listing.newest.hosts) == 3


@pytest.mark.parametrize("lost", ["manifest", "metadata", "item", "data"])
def test_assemble_names_damaged_hosts(lost, job, tmp_path):
    item = job / "host1/3/state"
    if lost == "manifest":
        (item / "manifest.ocdbt").write_bytes(b"nothing")
        expected = "host1 (process 1) is left out: ", "host1/3: "
    elif lost == "metadata":
        (item / "_METADATA").unlink()
        expected = "host1 (process 1) is left out: ", "no state/_METADATA; the other hosts have all chunks"
    elif lost == "item":
        shutil.rmtree(item)
        expected = "host1 is left out: ", "no state/_METADATA"
    else:
        large_chunks(job / "host1")[0][1].write_bytes(b"")
        expected = "host1 (process 1) is damaged: ", "host3"
    receipt = json.loads(succeed("assemble", job, tmp_path / "out", "--json").stdout)
    remark = next(text for text in receipt["notes"]["remarks"] if "host1" in text)
    assert all(text in remark for text in expected), remark
    assert same(values(tmp_path / "out"), restored("replicator-data=2,fsdp=4"))
    # The other host with the same chunks was the replacement: without it, the step is not complete.
    shutil.rmtree(job / "host3")
    refused = ckpt("assemble", job, tmp_path / "other", "--step", 3)
    assert refused.exit_code == 3 and "no step is complete" in refused.output
    assert not (tmp_path / "other").exists()


def test_assemble_reports_newer_incomplete_steps(job, tmp_path):
    shutil.rmtree(job / "host1/3")
    (job / "host3/3/state/_METADATA").unlink()
    receipt = json.loads(succeed("assemble", job, tmp_path / "out", "--json").stdout)
    remark = next(text for text in receipt["notes"]["remarks"] if text.startswith("a newer step"))
    assert "step 3, of 2 hosts: 10 chunks" in remark and "host3/3: no state/_METADATA" in remark
    chosen = json.loads(succeed("assemble", job, tmp_path / "b", "--step", 2, "--json").stdout)
    assert not any(text.startswith("a newer") for text in chosen["notes"]["remarks"])


def test_separate_runs_are_not_parts_of_one_job(tmp_path):
    runs = [tmp_path / name for name in "ab"]
    for run, extra in zip(runs, ("4", "0"), strict=True):
        shutil.copytree(ORBAX / "maxtext_run" / "checkpoints", run)
        shutil.rmtree(run / extra)
    with pytest.raises(UsageError, match="different steps of the same process") as caught:
        ckpttools.assemble(runs, tmp_path / "out")
    assert str(runs[0]) in caught.value.got and not (tmp_path / "out").exists()
    ckpttools.assemble(runs, tmp_path / "out", step=4)
    assert ckpttools.verify(tmp_path / "out", runs[1]).equal


class TestForeignRuns:
    """Hosts of two runs that were at the same step at the same time."""

    def test_jobs_with_other_names_are_separate(self, job):
        for number in range(4):
            (job / f"host{number}" / "replicator.yaml").write_text(f"job-name: run-{number % 2}\n")
        result = [(save.step, len(save.hosts), save.is_complete) for save in ckpttools.list_saves(job).saves]
        assert result == [(3, 2, False), (3, 2, False), (2, 2, False), (2, 2, False)]

    def test_jobs_with_other_devices_are_separate(self, job):
        location = job / "host1" / "3" / "process_metadata" / "mesh_metadata.json"
        location.write_text(json.dumps([8192, *json.loads(location.read_text())[1:]]))
        hosts = [len(save.hosts) for save in ckpttools.list_saves(job).saves if save.step == LAST]
        assert sorted(hosts) == [1, 3]

    @pytest.mark.parametrize(
        ("names", "seconds", "declared"),
        [
            ("x", 50, "no array that these hosts share"),
            ("x", 90, "no step is complete"),
            ("xyz", 90, "up to 90 s apart"),
            ("xyz", 900, "no step is complete"),
        ],
    )
    def test_hosts_of_one_run_are_recognized(self, tmp_path, names, seconds, declared):
        """What they have in common; within a minute that is not asked for, and its lack is told."""
        for seed, host in enumerate(("a", "b")):
            write_half(tmp_path / host, seed, names, 0)
            begin(tmp_path / host, 1000 + seconds * seed)
        told = ckpt("assemble", tmp_path / "a", tmp_path / "b", tmp_path / "out", "--dry-run", COLUMNS="200")
        assert declared in told.output and told.exit_code == (3 if "complete" in declared else 0)

    def test_mostly_different_host_is_refused(self, tmp_path):
        """What is preferred decides on values that were damaged, not on what another run has alone."""
        for host, seed in (("a", 1), ("b", 2)):
            write_half(tmp_path / host, seed)
        with pytest.raises(FormatError, match="hosts disagree on 4 chunks"):
            ckpttools.assemble([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
        with pytest.raises(FormatError, match="b seems to be from another save: it differs in 4 of 4 values"):
            ckpttools.assemble([tmp_path / "a", tmp_path / "b"], tmp_path / "out", prefer=tmp_path / "a")
        assert not (tmp_path / "out").exists()


def write_half(host: Path, seed: int, names: str = "xyz", run: int | None = None) -> None:
    """A host with half of the chunks of an array, and others that all have; with the numbers of a run."""
    noise = np.random.default_rng(seed if run is None else run)
    values = {(name,): noise.standard_normal(16).astype(np.float32) for name in names}
    arrays = {path: (zarr3([LITTLE], [8]), item) for path, item in values.items()}
    write_item(host / "3" / "state", arrays, use_ocdbt=False)
    (host / "3" / "state" / "x" / "c" / str(seed % 2)).unlink()
    (host / "3" / "state" / "commit_success.txt").write_text(f"Checkpoint commit was successful to {host}")
    declared = {"item_handlers": {"state": HANDLER}, "commit_timestamp_nsecs": 1}
    (host / "3" / "_CHECKPOINT_METADATA").write_text(json.dumps(declared))


def test_arrays_without_metadata_are_kept(job, tmp_path):
    for host in hosts_of(job):
        location = host / "3" / "state" / "_METADATA"
        declared = json.loads(location.read_text())
        del declared["tree_metadata"]["('step',)"]
        location.write_text(json.dumps(declared))
    with pytest.raises(FormatError, match="that its metadata does not name") as caught:
        ckpttools.assemble(job, tmp_path / "out")
    assert "step" in str(caught.value)


def test_renamed_steps_are_reported(job, tmp_path):
    for host in hosts_of(job):
        (host / "2").rename(host / "9")
    told = " ".join(ckpt("assemble", job, tmp_path / "out", "--dry-run", COLUMNS="200").output.split())
    assert "the state has counted 2 steps, but the directories are named 9" in told


@pytest.mark.parametrize("began", ["true", "-1", "1" + "0" * 400])
def test_invalid_timestamps_are_ignored(job, began):
    file = job / "host0" / "3" / "_CHECKPOINT_METADATA"
    file.write_text(f'{{"init_timestamp_nsecs": {began}, "commit_timestamp_nsecs": 1}}')
    assert ckpttools.list_saves(job).saves[0].started_at is not None


def test_damaged_huge_shape_is_counted_without_listing_chunks(tmp_path):
    write_half(tmp_path / "a", 1)
    location = tmp_path / "a" / "3" / "state" / "x" / "zarr.json"
    location.write_text(json.dumps({**json.loads(location.read_text()), "shape": [1 << 60]}))
    (save,) = ckpttools.list_saves(tmp_path / "a").saves
    (lacking,) = save.missing
    assert (lacking.num_chunks, lacking.num_missing, lacking.cells) == (1 << 57, (1 << 57) - 1, ())
    assert save.expected is None
