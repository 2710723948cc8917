"""Every test has this package's hypothesis settings, and waits for the disk only where that is tested."""

import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from ckpttools.testing.profile import use_profile

use_profile()
# Without bytecode reading the tests takes twice as long, and each process that they start 70 ms more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

HERE = Path(__file__).parent
# What is synced, when, and what a crash leaves is the subject of these, and of those in sub-directories.
WAITING = ("test_durability.py", "test_run.py")
# By the seconds they take: what is begun first does not end last, alone on one of two cores.
LONG = (
    "test_crash_states.py",  # and with it all of that directory
    "test_eight_devices.py",
    "test_object_writing.py",
    "test_family_check.py",
    "test_memory_matrix.py",
    "test_object_hardening.py",
    "test_parts.py",
    "test_docs.py",
    "test_object_stores.py",
    "test_together.py",
    "test_stores_web.py",
    "test_orbax_write.py",
    "test_store_matrix.py",
    "test_round_trips.py",
    "test_memory.py",
    "test_prune.py",
    "test_references.py",
    "test_conversion_pairs.py",
    "test_copy_command.py",
    "test_golden.py",
    "test_stats.py",
    "test_maxtext_to_hf.py",
    "test_adapter_rows.py",
    "test_hub_upload.py",
    "test_config_back.py",
    "test_maxtext_config.py",
    "test_sharding_processes.py",
    "test_stopping.py",
    "test_diff.py",
    "test_staging.py",
    "test_zarr3.py",
    "test_worker_processes.py",
    "test_orbax_loads.py",
    "test_dequantizing_models.py",
    "test_towers.py",
    "test_doctor.py",
    "test_in_memory.py",
    "test_explain.py",
    "test_silent.py",
    "test_manifest.py",
    "test_shared_save.py",
    "test_exit_codes.py",
    "test_destination.py",
    "test_align.py",
    "test_mutation.py",
    "test_scanning.py",
    "test_roles.py",
    "test_ocdbt.py",
    "test_native_fp8.py",
    "test_assemble.py",
    "test_scan.py",
    "test_strip.py",
    "test_resolve.py",
    "test_family_file.py",
)


def pytest_collection_modifyitems(items):
    """Long modules first: `--dist loadfile --no-loadscope-reorder` hands them out in this order."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One worker runs all of tests/crash: its scenarios are recorded once, 9 CPU seconds."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "tests/crash" if nodeid.startswith("tests/crash/") else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection(session):
    """In a fresh clone each module is compiled by one of two workers: the second begins with the last."""
    is_of_all = not any(".py" in each for each in session.config.args)
    if is_of_all and os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        modules = sorted(path.stem for path in HERE.glob("test_*.py"))
        for name in reversed(modules[len(modules) // 2 :]):
            # What is wrong with it is said when it is collected.
            with suppress(Exception, pytest.skip.Exception):
                import_module(name)


def pytest_collection_finish():
    """What was collected stays to the end: a tenth of the time was spent looking for garbage in it."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk(request):
    """Nothing that other tests write must outlive a crash: a third of their time was spent in syncs."""
    if request.path.parent != HERE or request.path.name in WAITING:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync", "sync"):
            patch.setattr(os, name, lambda *descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_records_of_the_user(tmp_path_factory):
    """Copies are recorded in a directory of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def gcs_server():
    """Google Cloud Storage on loopback, for the whole session; each test fills buckets of its own."""
    from support.gcs_server import Server

    with Server().running() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server():
    """Amazon S3 on loopback, by moto: its address."""
    from support.s3_server import running

    with running() as url:
        yield url


@pytest.fixture
def gcs(gcs_server):
    """`gs://`, with a bucket of its own; a bucket is there once something is in it."""
    from support.object_stores import google

    with google(gcs_server) as found:
        found.filled({"a": b""})
        yield found
        gcs_server.uploads.clear()


@pytest.fixture(params=["gs", "s3", "az"])
def cloud(request):
    """Each scheme of object stores, with a bucket of its own."""
    from support.object_stores import amazon, azure, google

    server = request.getfixturevalue("s3_server" if request.param == "s3" else "gcs_server")
    with {"gs": google, "s3": amazon, "az": azure}[request.param](server) as found:
        found.filled({"a": b""})
        yield found
    if request.param != "s3":
        server.uploads.clear()


@pytest.fixture
def target(gcs):
    """A destination in a bucket, where nothing is."""
    return f"gs://{gcs.bucket}/runs/out"
