"""Every test has this package's hypothesis settings, and waits for the disk only where that is tested."""

import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines differ, so there is no deadline. Under continuous integration all runs try the same examples.
IS_CI = bool(os.environ.get("CI"))
settings.register_profile(
    "ckpttools",
    deadline=None,
    max_examples=20 if IS_CI else 100,
    derandomize=IS_CI,
    print_blob=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
)
settings.load_profile("ckpttools")
# Without bytecode reading the tests takes twice as long, and each process that they start 70 ms more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Output has the width of a pipe, unless a test asks for another.
os.environ.pop("COLUMNS", None)
sys.dont_write_bytecode = False

HERE = Path(__file__).parent
FOLDERS = sorted({path.parent for path in HERE.rglob("test_*.py")})
sys.path[:0] = map(str, FOLDERS)
# These test what is synced, when, and what a crash leaves; so do all modules in tests/crash.
WAITING = ("test_durability.py", "test_run.py")


def pytest_collection_modifyitems(items):
    """Run large modules first, so that the last one to start is a short one.

    `--dist loadfile --no-loadscope-reorder` hands modules out in this order. The order by size ends within
    two seconds of the order by measured duration, and needs no list.
    """
    sizes = {path: _scope_bytes(path) for path in {item.path for item in items}}
    items.sort(key=lambda item: -sizes[item.path])


def _scope_bytes(path):
    """Return the size of a module, or of all modules that run in one worker with it."""
    if path.parent.name != "crash":
        return path.stat().st_size
    return sum(item.stat().st_size for item in path.parent.glob("*.py"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One worker runs all of tests/crash: its scenarios are recorded once, 9 CPU seconds."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "tests/crash" if nodeid.startswith("tests/crash/") else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection(session):
    """Let each worker compile other modules first: in a fresh clone, all workers collect at the same time."""
    is_of_all = not any(".py" in argument for argument in session.config.args)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if is_of_all and count > 1:
        modules = sorted(path.stem for path in HERE.rglob("test_*.py"))
        for name in modules[int(worker) :: count]:
            # Collection reports errors of the module.
            with suppress(Exception, pytest.skip.Exception):
                import_module(name)


def pytest_collection_finish():
    """What was collected stays to the end: a tenth of the time was spent looking for garbage in it."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk(request):
    """Nothing that other tests write must outlive a crash: a third of their time was spent in syncs."""
    if request.path.parent.name == "crash" or request.path.name in WAITING:
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

    with google(gcs_server) as result:
        result.filled({"a": b""})
        yield result
        gcs_server.uploads.clear()


@pytest.fixture(params=["gs", "s3", "az"])
def cloud(request):
    """Each scheme of object stores, with a bucket of its own."""
    from support.object_stores import amazon, azure, google

    server = request.getfixturevalue("s3_server" if request.param == "s3" else "gcs_server")
    with {"gs": google, "s3": amazon, "az": azure}[request.param](server) as result:
        result.filled({"a": b""})
        yield result
    if request.param != "s3":
        server.uploads.clear()


@pytest.fixture
def target(gcs):
    """A destination in a bucket, where nothing is."""
    return f"gs://{gcs.bucket}/runs/out"
