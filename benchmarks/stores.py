"""`ckpt convert hf-to-maxtext hf://… gs://…` against bare clients of the same servers, and the long way.

    python benchmarks/stores.py [--directory DIR] [--latency SECONDS] [--bandwidth SIZE] [--rounds N]
                                [--memory SIZE]

Servers of the tests, each in a process of its own, which wait before each answer, have a line of so many
bytes in a second in each direction, and keep what they have in memory. Each round downloads the model with
threads that do nothing else, uploads as many bytes with obstore alone, converts, and takes the long way:
download, conversion, upload. The target is 0.8 of the slower of the two bare ones. All of it shares the cores
of this machine, the servers as well: without a limit (0) it is they that are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import urllib3
from buckets import clear, serve_bucket, started

from ckpttools.core.memory_limit import parse_size
from ckpttools.testing.models import LlamaSizes, write_llama

SIZES = LlamaSizes()
RANGE, THREADS, UPLOADS = 8 << 20, 16, 8
COMMIT = "c0ffee" + "0" * 34


def serve_hub(directory: Path, latency: float, bandwidth: float, pipe: Any) -> None:
    """Serves the model of a directory until the process ends."""
    from support import web_server

    with web_server.web_server() as web:
        web.delay, web.down.bandwidth = latency, bandwidth
        for path in directory.iterdir():
            web.files[f"hub/org/model/{path.name}"] = path.read_bytes()
        pipe.send(f"http://{web.address}")
        pipe.recv()


def download(web: str, name: str, size: int) -> None:
    """All ranges of a file, with several requests under way; nothing is kept."""
    pool = urllib3.PoolManager(maxsize=THREADS, block=True)
    there = pool.request("GET", f"{web}/org/model/resolve/{COMMIT}/{name}", redirect=False).headers[
        "Location"
    ]

    def fetch(start: int) -> None:
        stop = min(size, start + RANGE)
        buffer = memoryview(bytearray(stop - start))
        answer = pool.request(
            "GET", there, headers={"Range": f"bytes={start}-{stop - 1}"}, preload_content=False
        )
        while buffer and (count := answer.readinto(buffer)):
            buffer = buffer[count:]
        answer.release_conn()
        assert not buffer

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(fetch, range(0, size, RANGE)))


def bucket_at(url: str) -> Any:
    """obstore's own client."""
    from obstore.store import GCSStore

    nobody = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    account = json.dumps({"gcs_base_url": url, "disable_oauth": True, **nobody})
    return GCSStore("bucket", service_account_key=account, client_options={"allow_http": True})


def upload(bucket: str, nbytes: int) -> None:
    """As many bytes as the model has, in several objects, by obstore alone."""
    import obstore

    store, data = bucket_at(bucket), bytes(RANGE)

    def put(number: int) -> None:
        with obstore.open_writer(store, f"bare/{number}", buffer_size=RANGE, max_concurrency=3) as writer:
            for _ in range(nbytes // UPLOADS // RANGE):
                writer.write(data)

    with ThreadPoolExecutor(UPLOADS) as threads:
        list(threads.map(put, range(UPLOADS)))


def convert(*words: str, environment: dict[str, str]) -> dict[str, Any]:
    """Runs `ckpt convert hf-to-maxtext`; its receipt, with the processor's seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [str(Path(sys.executable).with_name("ckpt")), "convert", "hf-to-maxtext", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    receipt: dict[str, Any] = json.loads(done.stdout)
    receipt["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return receipt


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.monotonic()
    result = call()
    return time.monotonic() - start, result


def the_long_way(directory: Path, environment: dict[str, str]) -> None:
    """`hf download`, a conversion on the disk, and an upload."""
    cache = directory / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    hub = {**environment, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}
    script = (
        "import sys, huggingface_hub as hub\n"
        "for name in sys.argv[1:]: print(hub.hf_hub_download('org/model', name))"
    )
    names = sorted(path.name for path in (directory / "hf").iterdir())
    done = subprocess.run(
        [sys.executable, "-c", script, *names],
        capture_output=True,
        text=True,
        env=os.environ | hub,
        check=True,
    )
    out = directory / "out"
    convert(str(Path(done.stdout.splitlines()[-1]).parent), str(out), environment=hub)
    for path in (path for path in out.rglob("*") if path.is_file()):
        _upload_file(environment["STORAGE_EMULATOR_HOST"], path, str(path.relative_to(out)))
    shutil.rmtree(out)


def other_uploads(bucket: str, model: Path) -> None:
    """The model uploaded by other clients, as far as they are installed."""
    for name, upload_by in (("gcsfs", _by_gcsfs), ("google-cloud-storage", _by_google)):
        try:
            taken, _ = timed(lambda upload_by=upload_by: upload_by(bucket, model))  # type: ignore[misc]
        except ImportError:
            print(f"  upload by {name}: not installed")
            continue
        print(f"  upload by {name} {taken:5.2f} s", flush=True)


def _by_gcsfs(bucket: str, model: Path) -> None:
    # Else it asks for the bucket's kind over gRPC, for a minute.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    import gcsfs

    gcsfs.GCSFileSystem(token="anon", endpoint_url=bucket).put(str(model), "bucket/gcsfs/model")


def _by_google(bucket: str, model: Path) -> None:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    options = {"api_endpoint": bucket}
    client = storage.Client(project="none", credentials=AnonymousCredentials(), client_options=options)
    client.bucket("bucket").blob("google/model").upload_from_filename(str(model), checksum=None)


def _upload_file(bucket: str, path: Path, name: str) -> None:
    import obstore

    obstore.put(bucket_at(bucket), f"long/{name}", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 8 GB of room; default a temporary one")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds before each answer")
    parser.add_argument("--bandwidth", default="200MB", help="bytes in a second; 0 for no limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="1GiB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        model = write_llama(directory / "hf", SIZES)
        size = model.stat().st_size
        line = arguments.latency, parse_size(arguments.bandwidth)
        web, _ = started(serve_hub, model.parent, *line)
        bucket, here = started(serve_bucket, *line)
        environment = {"STORAGE_EMULATOR_HOST": bucket, "HF_ENDPOINT": web}
        environment["HF_HUB_CACHE"] = str(directory / "empty")
        # The hub of the tests computes its digests at the first question.
        download(web, model.name, 1)
        other_uploads(bucket, model)
        clear(here)
        ratios = []
        for _ in range(arguments.rounds):
            down, _ = timed(lambda: download(web, model.name, size))
            up, _ = timed(lambda: upload(bucket, size))
            clear(here)
            taken, receipt = timed(
                lambda: convert(
                    "hf://org/model", "gs://bucket/out", "--memory", arguments.memory, environment=environment
                )
            )
            clear(here)
            ratios.append(max(down, up) / taken)
            print(
                f"download {down:5.2f} s, upload {up:5.2f} s, ckpt {taken:5.2f} s, ratio {ratios[-1]:.2f}, "
                f"{receipt['cpu'] / size * 1e9:.2f} CPU s per GB, {receipt['peak_bytes'] / 2**20:.0f} MiB",
                flush=True,
            )
            long, _ = timed(lambda: the_long_way(directory, environment))
            clear(here)
            print(f"  the long way {long:5.2f} s", flush=True)
        print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
